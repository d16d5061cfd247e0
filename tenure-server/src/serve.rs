//! The network server: binding, accepting connections within limits, serving HTTP/1 and HTTP/2, and graceful
//! shutdown.
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

/// Binds the listen address. An address other than loopback is refused unless API keys are required (one exists
/// or has existed), since any client could reach the server; keys then stay required for as long as the process
/// runs. With `trusted_proxies`, keys are always required too, but a missing key only causes a warning.
pub async fn bind(app: &App) -> anyhow::Result<TcpListener> {
    let address = &app.config.listen;
    let listener = TcpListener::bind(address).await.with_context(|| {
        format!("could not listen on {address}; if another server uses the address, choose another with --listen")
    })?;
    let ip = listener.local_addr()?.ip();
    if !is_loopback(ip) {
        if !app.keys.read_required().await? {
            bail!(
                "refusing to listen on {ip} without API keys: any client could read and write all data. Create a key with `tenure keys add`, or listen on 127.0.0.1"
            );
        }
        app.keys.always_require();
    }
    if !app.config.trusted_proxies.is_empty() {
        // Requests come through a proxy, so clients are remote even if the peer address is loopback.
        app.keys.always_require();
        if !app.keys.has_keys().await? {
            tracing::warn!(
                "trusted_proxies is set but no API key exists: all requests are rejected. Create a key with `tenure keys add`"
            );
        }
    }
    Ok(listener)
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Serves requests until `stop` completes, then shuts down gracefully: requests and turns in progress are
/// finished, within `drain_timeout`.
pub async fn run(app: AppState, listener: TcpListener, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
    let router = router(app.clone());
    run_router(app, router, listener, stop).await
}

/// Serves a router of other routes in the same way, for benchmarks.
pub async fn run_router(
    app: AppState,
    router: Router,
    listener: TcpListener,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    jobs::start_all(&app);
    let acceptor = Acceptor::new(app.clone(), router);
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

/// Accepts the next connection and returns it with the peer's address. Errors are logged and retried.
async fn accept(listener: &TcpListener) -> (TcpStream, IpAddr) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => return (stream, peer.ip()),
            Err(e) => {
                // Most likely the process is out of file descriptors; some are freed as other connections
                // close.
                tracing::warn!(error = %e, "could not accept a connection; retrying");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Signals all tasks and connections to stop, and waits for them for at most `drain_timeout`.
async fn drain(app: &App, connections: &Connections) {
    let drain_timeout = app.config.limits.drain_timeout.duration().unwrap_or(Duration::MAX);
    tracing::info!("shutting down: finishing requests and runs in progress");
    app.tasks.stop();
    let finish = async {
        connections.all_closed().await;
        app.tasks.wait_until_finished().await;
        app.transcripts.finish(&app.tenure).await;
    };
    if tokio::time::timeout(drain_timeout, finish).await.is_err() {
        tracing::warn!(
            limit = "drain_timeout",
            "drain_timeout exceeded: stopping with work in progress; acknowledged writes are durable"
        );
    }
}

/// The state needed to serve new connections.
struct Acceptor {
    app: AppState,
    router: Router,
    connections: Arc<Connections>,
    http: auto::Builder<StreamExecutor>,
    /// One permit per connection that is being rejected with a response.
    refusals: Arc<Semaphore>,
}

impl Acceptor {
    fn new(app: AppState, router: Router) -> Self {
        let connections = Connections::new(&app.config);
        let http = http_protocols(&app.config.limits);
        Self { app, router, connections, http, refusals: Arc::new(Semaphore::new(MAX_REFUSALS)) }
    }

    /// Serves a connection in its own task, or rejects it if the connection limit is reached.
    fn serve(&self, stream: TcpStream, address: IpAddr) {
        match self.connections.admit(address) {
            Ok(admitted) => self.serve_admitted(stream, admitted),
            Err(limit_reached) => {
                metrics::connection_refused();
                if let Ok(permit) = self.refusals.clone().try_acquire_owned() {
                    tokio::spawn(refuse(stream, limit_reached, permit));
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
            let in_flight = connection.begin_request();
            request.extensions_mut().insert(connection.clone());
            let response = routes.call(request);
            async move { Ok::<_, Infallible>(response.await?.map(|body| ResponseBody::new(body, in_flight))) }
        });
        let connection = self.http.serve_connection(TokioIo::new(transport), service).into_owned();
        tokio::spawn(serve_connection(self.app.clone(), connection, admitted));
    }
}

/// Maximum number of connections that are rejected with a 503 response concurrently. Beyond it, connections are
/// closed without a response.
const MAX_REFUSALS: usize = 64;

/// Grace period for a connection that is being closed to finish its requests.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// The HTTP/2 receive window of a stream, in bytes. A client that has sent this much is blocked by flow control
/// until the handler has read.
const STREAM_WINDOW: u32 = 256 << 10;
/// The HTTP/2 receive window of a connection, in bytes: the maximum received and unread data over all its
/// streams.
const CONNECTION_WINDOW: u32 = 1 << 20;
/// The send buffer of an HTTP/2 stream, in bytes: response data that the client has not accepted yet.
const STREAM_SEND_BUFFER: usize = 64 << 10;
/// Maximum number of HTTP/2 streams that a client may reset before they are handled, and of streams reset
/// because of errors, before its connection is closed (protection against rapid-reset attacks).
const MAX_RESET_STREAMS: usize = 32;
/// Interval of HTTP/2 keep-alive pings, and the timeout for the reply.
const PING_INTERVAL: Duration = Duration::from_secs(20);

/// Builds the HTTP/1 and HTTP/2 protocol implementation with its limits. Idle timeouts are enforced in
/// `net/connections.rs`, for both versions.
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

/// Maximum size of a request head that the HTTP library reads, in bytes. It is larger than `max_header_bytes`,
/// so that most requests over that limit get an error response from the router, in both versions of HTTP.
fn head_buffer(limits: &Limits) -> usize {
    limits.max_header_bytes.saturating_mul(2).max(64 << 10)
}

/// The executor for HTTP/2 streams. A stream whose client accepts no response data for `write_timeout` is
/// reset.
#[derive(Clone, Debug)]
struct StreamExecutor {
    write_timeout: Option<Duration>,
}

impl<F: Future<Output: Send> + Send + 'static> hyper::rt::Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        tokio::spawn(responses::until_stalled(self.write_timeout, stream));
    }
}

/// Serves one connection until it ends, is closed, or the server stops. Requests in flight are then finished:
/// within `CLOSE_TIME` if the connection is closed, within `drain_timeout` if the server stops. Evicted
/// connections that never authenticated are dropped immediately.
async fn serve_connection<S>(
    app: AppState,
    connection: auto::Connection<'static, TokioIo<Transport>, S, StreamExecutor>,
    admitted: AdmittedConnection,
) where
    S: Service<Request<Incoming>, Response = Response<ResponseBody>, Error = Infallible, Future: Send + 'static>,
{
    let _counted = metrics::ConnectionGuard::open();
    let mut connection = pin!(connection);
    let close = tokio::select! {
        result = connection.as_mut() => {
            if let Err(error) = result {
                tracing::debug!(%error, "a connection ended with an error");
            }
            return;
        }
        close = admitted.wait_for_close() => Some(close),
        () = app.tasks.wait_for_stop() => None,
    };
    if close == Some(CloseReason::Evicted) && !admitted.connection().is_authenticated() {
        // Without grace period: there may be many such connections, and each holds a file descriptor.
        metrics::connection_closed(CloseReason::Evicted.reason());
        return;
    }
    connection.as_mut().graceful_shutdown();
    let result = match close {
        Some(close) => {
            metrics::connection_closed(close.reason());
            tracing::debug!(?close, "closing a connection");
            tokio::time::timeout(CLOSE_TIME, connection).await.unwrap_or(Ok(()))
        }
        None => connection.await,
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection ended with an error");
    }
}

/// Rejects a connection with a 503 response that names the exceeded limit. Takes at most one second.
async fn refuse(mut stream: TcpStream, limit_reached: ConnectionLimitReached, _permit: OwnedSemaphorePermit) {
    let ConnectionLimitReached { limit, max } = limit_reached;
    let message = format!("connection limit `{limit}` ({max}) reached; retry later");
    let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", message).with_param(limit);
    let body = serde_json::to_string(&error.body()).unwrap_or_default();
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {}\r\nretry-after: 1\r\nconnection: close\r\n\r\n",
        body.len()
    );
    let write = async {
        stream.write_all((head + &body).as_bytes()).await?;
        stream.shutdown().await?;
        // Closing a socket with unread data sends a reset, which can discard the response on its way to the
        // client.
        let mut ignored = [0; 4096];
        while stream.read(&mut ignored).await? > 0 {}
        Ok::<_, std::io::Error>(())
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), write).await;
}
