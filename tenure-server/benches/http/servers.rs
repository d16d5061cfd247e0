//! The servers of the benchmarks: the real binary, a fast scripted model server, and bare axum as the baseline.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use futures_util::StreamExt;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tenure_server::app::App;
use tenure_server::config::Config;
use tenure_server::router::with_middleware;
use tenure_server::serve::run_router;

/// A running `tenure` binary.
pub struct Server {
    child: Child,
    pub address: String,
}

impl Server {
    /// Starts the binary with a store and, if the benchmark needs one, a model server.
    pub fn start(store: &str, upstream: Option<&str>, more: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenure"));
        command.arg("--store").arg(store).args(["serve", "--listen", "127.0.0.1:0"]);
        command.env("TENURE_TELEMETRY__LOG", "warn").env_remove("TENURE_CONFIG");
        command.envs(more.iter().copied());
        let dir = tempfile::tempdir().unwrap();
        if let Some(address) = upstream {
            let file = dir.path().join("tenure.yaml");
            std::fs::write(&file, format!("models: [{{name: m, base_url: 'http://{address}/v1'}}]")).unwrap();
            command.arg("--config").arg(file);
        }
        let mut child = command.stdout(Stdio::piped()).current_dir(dir.path()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.next().unwrap().unwrap();
        let address = line.strip_prefix("listening on http://").expect("it says where it listens").to_owned();
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address }
    }

    /// Resident memory in MB.
    pub fn resident(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|l| l.starts_with("VmRSS")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1024.0
    }
}

impl Server {
    /// Stops the server as an operator does, and waits until it has ended.
    pub fn stop(mut self) {
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Serves a router on its own port and threads.
fn serve(router: Router) -> String {
    let (address_sender, address_receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            address_sender.send(listener.local_addr().unwrap().to_string()).unwrap();
            let listener = axum::serve::ListenerExt::tap_io(listener, |s| drop(s.set_nodelay(true)));
            axum::serve(listener, router).await.unwrap();
        });
    });
    address_receiver.recv().unwrap()
}

/// A model server that answers at once with 600 characters, or streams them in ten chunks, 5 ms apart.
pub fn upstream() -> String {
    upstream_with(super::words(600, 7))
}

/// A model server that answers at once with this text, or streams its first 600 characters.
pub fn upstream_with(answer: String) -> String {
    let completion = serde_json::json!({"id": "c", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}]})
    .to_string();
    let chunk = |delta: serde_json::Value, finish: Option<&str>| {
        let chunk = serde_json::json!({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]});
        Bytes::from(format!("data: {chunk}\n\n"))
    };
    let mut chunks: Vec<Bytes> =
        (0..10).map(|i| chunk(serde_json::json!({"content": &answer[i * 60..i * 60 + 60]}), None)).collect();
    chunks.push(chunk(serde_json::json!({}), Some("stop")));
    chunks.push(Bytes::from("data: [DONE]\n\n"));
    let handler = move |body: Bytes| {
        let completion = completion.clone();
        let chunks = chunks.clone();
        async move {
            if !body.windows(13).any(|w| w == b"\"stream\":true") {
                return ([(CONTENT_TYPE, "application/json")], completion).into_response();
            }
            let chunks = futures_util::stream::iter(chunks).then(|chunk| async move {
                tokio::time::sleep(Duration::from_millis(5)).await;
                Ok::<_, std::convert::Infallible>(chunk)
            });
            ([(CONTENT_TYPE, "text/event-stream")], Body::from_stream(chunks)).into_response()
        }
    };
    serve(Router::new().route("/v1/chat/completions", post(handler)).layer(axum::extract::DefaultBodyLimit::disable()))
}

/// A minimal handler behind the connections and the middleware of the server, without authentication: what a route of
/// the server costs before its handler begins. It has threads of its own, like the binary.
pub fn behind_middleware(body: String) -> String {
    let body = Bytes::from(body);
    let (address_sender, address_receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let app = App::open(Config::parse("store: 'memory:'").unwrap()).await.unwrap();
            let handler = move || async move { ([(CONTENT_TYPE, "application/json")], body.clone()) };
            let router = with_middleware(Router::new().route("/", get(handler)), app.clone());
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            address_sender.send(listener.local_addr().unwrap().to_string()).unwrap();
            run_router(app, router, listener, std::future::pending()).await.unwrap();
        });
    });
    address_receiver.recv().unwrap()
}

/// Bare axum serving the same bytes, as the baseline.
pub fn bare(body: String) -> String {
    let body = Bytes::from(body);
    serve(Router::new().route("/", get(move || async move { ([(CONTENT_TYPE, "application/json")], body.clone()) })))
}
