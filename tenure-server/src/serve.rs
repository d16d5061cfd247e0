//! The server: what it holds, how it listens, how it stops. The only place that spawns tasks.
#![expect(clippy::disallowed_methods, reason = "this is the one place that spawns tasks")]

use crate::auth::Keys;
use crate::config::{BUILT_IN_MODEL, Config, Limits};
use crate::embed::Source;
use crate::error::ApiError;
use crate::llm::echo::Rehearsal;
use crate::llm::upstream::Upstream;
use crate::net::bodies::BodyBudget;
use crate::net::connections::{Admitted, Close, Connections, Full};
use crate::net::responses::ResponseBody;
use crate::net::transport::Transport;
use crate::observability::metrics;
use crate::tools::Toolbox;
use crate::transcripts::Transcripts;
use anyhow::{Context, bail};
use axum::Router;
use axum::http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use tenure::{Model, Tenure, Tools};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// What every handler has in hand.
pub type Shared = Arc<App>;

/// The server's parts.
pub struct App {
    /// The sessions.
    pub tenure: Tenure,
    /// How it is set up.
    pub config: Config,
    /// Who may ask.
    pub keys: Keys,
    /// What keys have used of their limits this minute.
    pub rate_limits: Arc<crate::auth::rate_limit::RateLimits>,
    /// The models by name, in the order of the configuration.
    pub models: Models,
    /// What makes vectors.
    pub embeddings: Source,
    /// What the models can have done.
    pub tools: Arc<Toolbox>,
    /// The workspaces of sessions, if they are kept.
    pub workspaces: Option<Arc<crate::workspace::Workspaces>>,
    /// Work that outlives its request.
    pub tasks: Tasks,
    /// What runs by the clock.
    pub schedules: Vec<crate::config::schedules::CompiledSchedule>,
    /// Who is told when a run ends.
    pub run_hooks: Vec<Arc<crate::webhooks::Receiver>>,
    /// The files that sessions are written to as they go, or when they end.
    pub transcripts: Transcripts,
    /// When sessions were last counted.
    pub census: metrics::Census,
    /// The memory that request bodies may use.
    pub bodies: Arc<BodyBudget>,
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("App")
    }
}

impl App {
    /// Opens the store and sets everything up.
    pub async fn open(config: Config) -> anyhow::Result<Shared> {
        let embeddings = Source::open(&config.embeddings).await?;
        let options = tenure::Options { embedder: embeddings.embedder(), ..config.options() };
        let tenure = Tenure::open_with(&config.store, options).await?;
        let app = Self::with(tenure, config, embeddings)?;
        app.transcripts.check()?;
        let file = &app.config.bootstrap_key_file;
        if !file.is_empty()
            && let Some(id) = crate::auth::add_bootstrap_key(&app.keys, file.as_ref()).await?
        {
            tracing::info!(key = id, "the key of bootstrap_key_file was added");
        }
        Ok(app)
    }

    /// The same on a house that is open already, and makes vectors or not by itself.
    pub fn on(tenure: Tenure, config: Config) -> anyhow::Result<Shared> {
        Self::with(tenure, config, Source::None)
    }

    fn with(tenure: Tenure, config: Config, embeddings: Source) -> anyhow::Result<Shared> {
        config.assistants.iter().cloned().for_each(|a| tenure.declare(a));
        let models = Models::new(&config)?;
        let tools = Arc::new(Toolbox::new(&config)?);
        let keys = Keys::of(tenure.clone());
        let transcripts = Transcripts::new(&config);
        transcripts.install(&tenure);
        crate::webhooks::install(&tenure, &config)?;
        let interpreters = tools.clone();
        tenure.on_archive(move |old, _| {
            let tools = interpreters.clone();
            async move {
                tools.end(&old.key()).await;
                Ok(())
            }
        });
        let workspaces = crate::workspace::Workspaces::new(&config)?;
        let (tasks, census, rate_limits) = Default::default();
        let run_hooks = crate::webhooks::run_hooks(&config)?;
        let schedules = crate::config::schedules::compile(&config.schedules, &config.assistants)?;
        Ok(Arc::new(Self {
            bodies: BodyBudget::new(&config.limits),
            tenure,
            config,
            keys,
            rate_limits,
            models,
            embeddings,
            tools,
            workspaces,
            schedules,
            run_hooks,
            transcripts,
            tasks,
            census,
        }))
    }
}

/// The models that can be asked.
pub struct Models {
    order: Vec<String>,
    by_name: BTreeMap<String, Arc<Upstream>>,
    /// The server that gets requests for any other name.
    pass_unknown: Option<Arc<Upstream>>,
}

/// The name under which the first model can always be asked for: the built-in one, if none is configured.
const DEFAULT_MODEL: &str = "default";

impl Models {
    fn new(config: &Config) -> anyhow::Result<Self> {
        let (mut by_name, mut pass_unknown) = (BTreeMap::new(), None);
        for model in &config.models {
            let upstream = Arc::new(Upstream::new(model)?);
            if model.pass_unknown {
                pass_unknown = Some(upstream.clone());
            }
            by_name.insert(model.name.clone(), upstream);
        }
        Ok(Self { order: config.models.iter().map(|m| m.name.clone()).collect(), by_name, pass_unknown })
    }

    /// The names, in the order of the configuration; the built-in model last.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.order.iter().map(String::as_str).chain([BUILT_IN_MODEL])
    }

    /// Why a request for a model of this name is refused.
    pub fn unknown(&self, name: &str) -> crate::error::ApiError {
        let known: Vec<_> = self.names().collect();
        let message = format!(
            "there is no model or assistant {}; it can be one of: {} (GET /v1/models lists the assistants too)",
            tenure::excerpt(name),
            known.join(", ")
        );
        crate::error::ApiError::new(axum::http::StatusCode::NOT_FOUND, "model_not_found", message).with_param("model")
    }

    /// The model that is meant if none is named.
    pub fn default_name(&self) -> &str {
        self.order.first().map_or(BUILT_IN_MODEL, String::as_str)
    }

    /// A model by name.
    pub fn get(&self, name: &str) -> Option<Arc<dyn Model>> {
        if name == BUILT_IN_MODEL || (self.order.is_empty() && name == DEFAULT_MODEL) {
            return Some(Arc::new(Rehearsal));
        }
        self.upstream(name).map(|u| u as Arc<dyn Model>)
    }

    /// A model server by the name of its model.
    pub fn upstream(&self, name: &str) -> Option<Arc<Upstream>> {
        self.by_name.get(name).or(self.pass_unknown.as_ref()).cloned()
    }
}

/// Work that outlives its request: a turn is finished although its client has gone away.
#[derive(Debug)]
pub struct Tasks {
    /// Each running task holds a clone.
    running: Arc<()>,
    stopping: watch::Sender<bool>,
}

impl Default for Tasks {
    fn default() -> Self {
        Self { running: Arc::default(), stopping: watch::channel(false).0 }
    }
}

impl Tasks {
    /// Starts a task that the server waits for before it stops.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let running = self.running.clone();
        tokio::spawn(async move {
            task.await;
            drop(running);
        });
    }

    /// Ends when the server is stopping: for tasks that go on until then.
    pub async fn stopping(&self) {
        let mut stopping = self.stopping.subscribe();
        if stopping.wait_for(|s| *s).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Tells tasks to stop.
    fn stop(&self) {
        self.stopping.send_replace(true);
    }

    /// Waits until all have ended.
    async fn ended(&self) {
        while Arc::strong_count(&self.running) > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Work that is done where its answer is waited for, so that no other task has to wake up; and as a task of its own from the moment when
/// this is dropped.
pub struct Kept {
    app: Shared,
    work: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Kept {
    /// Nothing is done yet.
    pub fn new(app: Shared, work: impl Future<Output = ()> + Send + 'static) -> Self {
        Self { app, work: Some(Box::pin(work)) }
    }

    /// Works until something else is there.
    pub async fn until<T>(&mut self, there: impl Future<Output = T>) -> T {
        let mut there = pin!(there);
        poll_fn(|context| {
            if self.work.as_mut().is_some_and(|work| work.as_mut().poll(context).is_ready()) {
                self.work = None;
            }
            there.as_mut().poll(context)
        })
        .await
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            self.app.tasks.spawn(work);
        }
    }
}

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
pub async fn run(app: Shared, listener: TcpListener, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
    let router = crate::router::router(app.clone());
    let sweeper = app.clone();
    app.tasks.spawn(async move { crate::webhooks::sweep_for_ever(&sweeper).await });
    let runner = app.clone();
    app.tasks.spawn(async move { crate::jobs::runs::look_after(&runner).await });
    let watcher = app.clone();
    app.tasks.spawn(async move { crate::jobs::schedules::watch(&watcher).await });
    let embedder = app.clone();
    app.tasks.spawn(async move { crate::jobs::memory::embed_for_ever(&embedder).await });
    let dreamer = app.clone();
    app.tasks.spawn(async move { crate::jobs::memory::dream_for_ever(&dreamer).await });
    let writer = app.clone();
    app.tasks.spawn(async move { writer.transcripts.follow(&writer).await });
    let counter = app.clone();
    app.tasks.spawn(async move { metrics::upkeep(&counter).await });
    let keeper = app.clone();
    app.tasks.spawn(async move { keeper.tools.reap_until(keeper.tasks.stopping()).await });
    let limits = &app.config.limits;
    let connections = Connections::new(&app.config);
    let refusals = Arc::new(Semaphore::new(MAX_REFUSALS));
    let http = http_protocols(limits);
    let write_timeout = limits.write_timeout.duration();
    tokio::pin!(stop);
    loop {
        let (stream, peer) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(e) => {
                    // Out of file descriptors, most likely: others will be freed.
                    tracing::warn!(error = %e, "can not accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
            () = &mut stop => break,
        };
        let admitted = match connections.admit(peer.ip()) {
            Ok(admitted) => admitted,
            Err(full) => {
                metrics::connection_refused();
                if let Ok(permit) = refusals.clone().try_acquire_owned() {
                    tokio::spawn(refuse(stream, full, permit));
                }
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let transport = Transport::new(stream, admitted.connection().clone(), write_timeout, head_buffer(limits));
        let (connection, routes) = (admitted.connection().clone(), TowerToHyperService::new(router.clone()));
        let service = service_fn(move |mut request: Request<Incoming>| {
            let in_flight = connection.begin();
            request.extensions_mut().insert(connection.clone());
            let response = routes.call(request);
            async move { Ok::<_, Infallible>(response.await?.map(|body| ResponseBody::new(body, in_flight))) }
        });
        let connection = http.serve_connection(TokioIo::new(transport), service).into_owned();
        tokio::spawn(serve_connection(app.clone(), connection, admitted));
    }
    drop(listener);
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
    app.tools.close().await;
    Ok(())
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

/// Both versions of HTTP, with their limits. How long a connection may be idle is `connections.rs`'s to decide, for both.
fn http_protocols(limits: &Limits) -> auto::Builder<Streams> {
    let streams = Streams { write_timeout: limits.write_timeout.duration() };
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
struct Streams {
    write_timeout: Option<Duration>,
}

impl<F: Future<Output: Send> + Send + 'static> hyper::rt::Executor<F> for Streams {
    fn execute(&self, stream: F) {
        tokio::spawn(crate::net::responses::until_stalled(self.write_timeout, stream));
    }
}

/// Serves one connection until it ends, is closed, or the server stops. Requests in flight are then finished, for a
/// limited time.
async fn serve_connection<S>(
    app: Shared,
    connection: auto::Connection<'static, TokioIo<Transport>, S, Streams>,
    admitted: Admitted,
) where
    S: Service<Request<Incoming>, Response = Response<ResponseBody>, Error = Infallible, Future: Send + 'static>,
{
    let _counted = metrics::Connection::opened();
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
    if close == Some(Close::Evicted) && !admitted.connection().is_authenticated() {
        // At once: many such connections may come, and each holds a file descriptor.
        metrics::connection_closed(Close::Evicted);
        return;
    }
    connection.as_mut().graceful_shutdown();
    let ended = match close {
        Some(close) => {
            metrics::connection_closed(close);
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
async fn refuse(mut stream: TcpStream, full: Full, _permit: OwnedSemaphorePermit) {
    let Full { limit, max } = full;
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

/// The routes without a socket, for the command line and for tests.
pub fn in_process(app: &Shared) -> Router {
    crate::router::router(app.clone())
}
