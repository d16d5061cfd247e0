//! Serving: how connections are accepted, and how the server stops.
#![expect(clippy::disallowed_methods, reason = "connections are tasks of their own")]

use crate::app::{App, AppState};
use crate::config::Limits;
use crate::error::ApiError;
use crate::jobs;
use crate::net::connections::{AdmittedConnection, CloseReason, ConnectionLimitReached, Connections};
use crate::net::responses::{self, ResponseBody};
use crate::net::transport::Transport;
use crate::observability::metrics;
use crate::router::router;
use anyhow::{Context, bail};
use axum::Router;
use axum::http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::future::Future;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Binds the address, if it may be: other than loopback only with keys.
pub async fn bind(app: &App) -> anyhow::Result<TcpListener> {
    let address = &app.config.listen;
    let listener = TcpListener::bind(address).await.with_context(|| {
        format!("can not listen on {address}; is another server running there? choose another with --listen")
    })?;
    let ip = listener.local_addr()?.ip();
    if !is_loopback(ip) {
        if !app.keys.are_required().await? {
            bail!(
                "refusing to listen on {ip} without keys: anybody there could read everything. Make one with `tenure keys add`, or listen on 127.0.0.1"
            );
        }
        app.keys.always_require();
    }
    if !app.config.trusted_proxies.is_empty() {
        // Whoever asks comes from elsewhere, whatever the address says.
        app.keys.always_require();
        if !app.keys.are_there().await? {
            tracing::warn!(
                "trusted_proxies is set and there is no key yet: every request is refused. Make one with `tenure keys add`"
            );
        }
    }
    Ok(listener)
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Serves until `stop` ends, then drains: requests and turns in progress are finished.
pub async fn run(app: AppState, listener: TcpListener, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
    jobs::start_all(&app);
    let acceptor = Acceptor::new(app.clone());
    tokio::pin!(stop);
    loop {
        tokio::select! {
            (stream, address) = accept(&listener) => acceptor.serve(stream, address),
            () = &mut stop => break,
        }
    }
    drop(listener);
    drain(&app, &acceptor.connections).await;
    app.tools.close().await;
    Ok(())
}

/// The next connection, and the address that it comes from.
async fn accept(listener: &TcpListener) -> (TcpStream, IpAddr) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => return (stream, peer.ip()),
            Err(e) => {
                // Out of file descriptors, most likely: others will be freed.
                tracing::warn!(error = %e, "can not accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Tells everything to stop, and waits for it as long as `drain_timeout` says.
async fn drain(app: &App, connections: &Connections) {
    let time = app.config.limits.drain_timeout.duration().unwrap_or(Duration::MAX);
    tracing::info!("stopping: finishing what is in progress");
    app.tasks.stop();
    let finish = async {
        connections.all_closed().await;
        app.tasks.ended().await;
        app.transcripts.finish(&app.tenure).await;
    };
    if tokio::time::timeout(time, finish).await.is_err() {
        tracing::warn!(limit = "drain_timeout", "some work was not finished in time; what was acknowledged is safe");
    }
}

/// What a new connection needs.
struct Acceptor {
    app: AppState,
    router: Router,
    connections: Arc<Connections>,
    http: auto::Builder<StreamExecutor>,
    /// One permit for each client that is being told that there are too many.
    refusals: Arc<Semaphore>,
}

impl Acceptor {
    fn new(app: AppState) -> Self {
        let router = router(app.clone());
        let connections = Connections::new(&app.config);
        let http = http_protocols(&app.config.limits);
        Self { app, router, connections, http, refusals: Arc::new(Semaphore::new(MAX_REFUSALS)) }
    }

    /// Serves a connection in a task of its own, or refuses it if there are too many.
    fn serve(&self, stream: TcpStream, address: IpAddr) {
        match self.connections.admit(address) {
            Ok(admitted) => self.serve_admitted(stream, admitted),
            Err(full) => {
                metrics::connection_refused();
                if let Ok(permit) = self.refusals.clone().try_acquire_owned() {
                    tokio::spawn(refuse(stream, full, permit));
                }
            }
        }
    }

    fn serve_admitted(&self, stream: TcpStream, admitted: AdmittedConnection) {
        let limits = &self.app.config.limits;
        let _ = stream.set_nodelay(true);
        let connection = admitted.connection().clone();
        let write_timeout = limits.write_timeout.duration();
        let transport = Transport::new(stream, connection.clone(), write_timeout, head_buffer(limits));
        let routes = TowerToHyperService::new(self.router.clone());
        let service = service_fn(move |mut request: Request<Incoming>| {
            let in_flight = connection.begin();
            request.extensions_mut().insert(connection.clone());
            let response = routes.call(request);
            async move { Ok::<_, Infallible>(response.await?.map(|body| ResponseBody::new(body, in_flight))) }
        });
        let connection = self.http.serve_connection(TokioIo::new(transport), service).into_owned();
        tokio::spawn(serve_connection(self.app.clone(), connection, admitted));
    }
}

/// At most so many are told at once that there are too many; to others the connection just ends.
const MAX_REFUSALS: usize = 64;

/// How long a connection that is closed may take to end what it is doing.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// The HTTP/2 receive window of a stream. What a client sends beyond it waits until the handler has read.
const STREAM_WINDOW: u32 = 256 << 10;
/// The HTTP/2 receive window of a connection: the most that is received for all its streams before it is read.
const CONNECTION_WINDOW: u32 = 1 << 20;
/// What is kept of the responses on one HTTP/2 stream until the client accepts it.
const STREAM_SEND_BUFFER: usize = 64 << 10;
/// Streams that a client may reset before they are handled, and that may fail, until its HTTP/2 connection is closed.
const MAX_RESET_STREAMS: usize = 32;
/// How often an HTTP/2 client is asked whether it is still there, and how long it may take to answer.
const PING_INTERVAL: Duration = Duration::from_secs(20);

/// Both versions of HTTP, with their limits. How long a connection may be idle is `net/connections.rs`'s to decide, for both.
fn http_protocols(limits: &Limits) -> auto::Builder<StreamExecutor> {
    let streams = StreamExecutor { write_timeout: limits.write_timeout.duration() };
    let mut http = auto::Builder::new(streams);
    http.http1().timer(TokioTimer::new()).header_read_timeout(None).max_buf_size(head_buffer(limits)).keep_alive(true);
    http.http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Some(PING_INTERVAL))
        .keep_alive_timeout(PING_INTERVAL)
        .max_concurrent_streams(Some(limits.max_streams))
        .max_pending_accept_reset_streams(Some(MAX_RESET_STREAMS))
        .max_local_error_reset_streams(Some(MAX_RESET_STREAMS))
        .max_header_list_size(u32::try_from(head_buffer(limits)).unwrap_or(u32::MAX))
        .initial_stream_window_size(Some(STREAM_WINDOW))
        .initial_connection_window_size(Some(CONNECTION_WINDOW))
        .max_send_buf_size(STREAM_SEND_BUFFER);
    http
}

/// What the HTTP library reads of a request's head at most. It is larger than `max_header_bytes`, so that most requests
/// over that limit are answered by the router, in both versions of HTTP.
fn head_buffer(limits: &Limits) -> usize {
    limits.max_header_bytes.saturating_mul(2).max(64 << 10)
}

/// Runs the streams of HTTP/2 connections. One whose client accepts nothing of its response for too long is reset.
#[derive(Clone, Debug)]
struct StreamExecutor {
    write_timeout: Option<Duration>,
}

impl<F: Future<Output: Send> + Send + 'static> hyper::rt::Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        tokio::spawn(responses::until_stalled(self.write_timeout, stream));
    }
}

/// Serves one connection until it ends, is closed, or the server stops. Requests in flight are then finished, for a
/// limited time.
async fn serve_connection<S>(
    app: AppState,
    connection: auto::Connection<'static, TokioIo<Transport>, S, StreamExecutor>,
    admitted: AdmittedConnection,
) where
    S: Service<Request<Incoming>, Response = Response<ResponseBody>, Error = Infallible, Future: Send + 'static>,
{
    let _counted = metrics::ConnectionGuard::opened();
    let mut connection = pin!(connection);
    let close = tokio::select! {
        ended = connection.as_mut() => {
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ended with an error");
            }
            return;
        }
        close = admitted.close() => Some(close),
        () = app.tasks.stopping() => None,
    };
    if close == Some(CloseReason::Evicted) && !admitted.connection().is_authenticated() {
        // At once: many such connections may come, and each holds a file descriptor.
        metrics::connection_closed(CloseReason::Evicted.reason());
        return;
    }
    connection.as_mut().graceful_shutdown();
    let ended = match close {
        Some(close) => {
            metrics::connection_closed(close.reason());
            tracing::debug!(?close, "a connection is closed");
            tokio::time::timeout(CLOSE_TIME, connection).await.unwrap_or(Ok(()))
        }
        None => connection.await,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended with an error");
    }
}

/// Tells a client that there are too many connections.
async fn refuse(mut stream: TcpStream, full: ConnectionLimitReached, _permit: OwnedSemaphorePermit) {
    let ConnectionLimitReached { limit, max } = full;
    let message = format!("over the limit `{limit}` of {max}; try again in a moment");
    let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", message).with_param(limit);
    let body = serde_json::to_string(&error.body()).unwrap_or_default();
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {}\r\nretry-after: 1\r\nconnection: close\r\n\r\n",
        body.len()
    );
    let write = async {
        stream.write_all((head + &body).as_bytes()).await?;
        stream.shutdown().await?;
        // A connection that is closed with something unread is reset, and the answer may be lost with it.
        let mut ignored = [0; 4096];
        while stream.read(&mut ignored).await? > 0 {}
        Ok::<_, std::io::Error>(())
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), write).await;
}
