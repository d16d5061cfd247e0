//! The test kit: a scripted model server that records its requests, a Tenure server in front of it, and a client.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use axum::routing::post;
use futures_util::StreamExt;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tenure::{
    Principal, Session, SessionId,
    run::{ModelAnswer, ModelChunk},
};
use tenure_server::app::{App, AppState};
use tenure_server::config::{Config, ModelConfig};
use tenure_server::serve;
use tokio::sync::Semaphore;

/// A scripted response of the model server.
#[derive(Clone, Debug)]
pub enum Act {
    /// Answers with this text; word by word if a stream was requested.
    Say(&'static str),
    /// Answers with this assistant message.
    Answer(Value),
    /// Calls tools: id, name, arguments.
    Call(Vec<(&'static str, &'static str, &'static str)>),
    /// Sends the first part, waits for a permit, sends the second. Not streamed, it waits and sends both.
    Hold(&'static str, Arc<Semaphore>, &'static str),
    /// Answers with a status, a content type, a body and a `Retry-After`.
    Refuse(u16, &'static str, &'static str, Option<&'static str>),
    /// Accepts the request and sends nothing, not even a status.
    Hang,
    /// Answers 200 with this content type and these chunks; then ends properly, breaks off, or hangs.
    Raw(&'static str, Vec<Bytes>, End),
}

/// How a raw response ends.
#[derive(Clone, Copy, Debug)]
pub enum End {
    Well,
    Cut,
    Silent,
}

/// The scripted model server.
#[derive(Clone, Debug, Default)]
pub struct Script {
    acts: Arc<Mutex<VecDeque<Act>>>,
    seen: Arc<Mutex<Vec<(HeaderMap, String)>>>,
}

impl Script {
    /// Appends a response to the script. When the script is empty, the server answers `answer N`.
    pub fn then(&self, act: Act) -> &Self {
        self.acts.lock().unwrap().push_back(act);
        self
    }

    /// Discards the rest of the script.
    pub fn clear(&self) {
        self.acts.lock().unwrap().clear();
    }

    /// The request bodies it received.
    pub fn bodies(&self) -> Vec<String> {
        self.seen.lock().unwrap().iter().map(|(_, body)| body.clone()).collect()
    }

    pub fn headers(&self, i: usize) -> HeaderMap {
        self.seen.lock().unwrap()[i].0.clone()
    }

    /// The number of requests it received.
    pub fn count(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    /// The messages of the last request.
    pub fn shown(&self) -> Vec<Value> {
        let last = self.bodies().pop().expect("it was asked");
        serde_json::from_str::<Value>(&last).unwrap()["messages"].as_array().unwrap().clone()
    }

    /// Waits until it has received this many requests.
    pub async fn asked(&self, times: usize) {
        within("the model was asked", async || self.count() >= times).await;
    }

    /// Starts it. Returns its base URL, up to `/v1`.
    pub async fn start(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Router::new().route("/v1/chat/completions", post(act)).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        format!("http://{address}/v1")
    }
}

/// Polls until a condition holds; two minutes at most.
pub async fn within(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    for _ in 0..24_000 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never: {what}");
}

async fn act(State(script): State<Script>, headers: HeaderMap, body: String) -> Response {
    let (act, n) = {
        let mut seen = script.seen.lock().unwrap();
        seen.push((headers, body.clone()));
        let act = script.acts.lock().unwrap().pop_front();
        (act.unwrap_or(Act::Say("")), seen.len())
    };
    let request: Value = serde_json::from_str(&body).unwrap();
    let stream = request["stream"] == true;
    match act {
        Act::Say(text) => {
            let text = if text.is_empty() { format!("answer {n}") } else { text.to_owned() };
            let words: Vec<Value> = text.split_inclusive(' ').map(|w| json!({"content": w})).collect();
            say(&request, json!({"role": "assistant", "content": text}), words, "stop")
        }
        Act::Answer(message) => {
            let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
            let mut delta = message.clone();
            for (i, call) in delta["tool_calls"].as_array_mut().into_iter().flatten().enumerate() {
                call["index"] = json!(i);
            }
            say(&request, message, vec![delta], if calls.is_empty() { "stop" } else { "tool_calls" })
        }
        Act::Call(calls) => {
            let call = |(id, name, arguments): &(&str, &str, &str)| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
            let calls: Vec<Value> = calls.iter().map(call).collect();
            let mut parts = vec![json!({"content": null})];
            for (i, call) in calls.iter().enumerate() {
                let arguments = call["function"]["arguments"].as_str().unwrap();
                let (first, second) = arguments.split_at(arguments.len() / 2);
                let mut begin = call.clone();
                (begin["index"], begin["function"]["arguments"]) = (json!(i), json!(first));
                parts.push(json!({"tool_calls": [begin]}));
                parts.push(json!({"tool_calls": [{"index": i, "function": {"arguments": second}}]}));
            }
            say(&request, json!({"role": "assistant", "content": null, "tool_calls": calls}), parts, "tool_calls")
        }
        Act::Hold(first, permit, second) if stream => {
            let rest = async move {
                permit.acquire().await.unwrap().forget();
                format!("{}{}", chunk(json!({"content": second}), Value::Null), end("stop"))
            };
            let first = chunk(json!({"role": "assistant", "content": first}), Value::Null);
            let parts = futures_util::stream::iter([first]).chain(futures_util::stream::once(rest));
            let body = Body::from_stream(parts.map(Ok::<_, std::io::Error>));
            Response::builder().header("content-type", "text/event-stream").body(body).unwrap()
        }
        Act::Hold(first, permit, second) => {
            permit.acquire().await.unwrap().forget();
            say(&request, json!({"role": "assistant", "content": format!("{first}{second}")}), Vec::new(), "stop")
        }
        Act::Refuse(status, kind, body, retry) => {
            let mut response = Response::builder().status(status).header("content-type", kind);
            if let Some(retry) = retry {
                response = response.header("retry-after", retry);
            }
            response.body(body.into()).unwrap()
        }
        Act::Hang => std::future::pending().await,
        Act::Raw(kind, parts, end) => {
            let parts = futures_util::stream::iter(parts).then(|part| async move {
                tokio::time::sleep(Duration::from_millis(1)).await;
                Ok(part)
            });
            let last = futures_util::stream::once(async move {
                tokio::time::sleep(Duration::from_millis(20)).await;
                match end {
                    End::Silent => std::future::pending().await,
                    End::Cut => Err(std::io::Error::other("cut")),
                    End::Well => Ok(Bytes::new()),
                }
            });
            Response::builder().header("content-type", kind).body(Body::from_stream(parts.chain(last))).unwrap()
        }
    }
}

/// One chunk of a stream.
pub fn chunk(delta: Value, finish: Value) -> String {
    let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
    let chunk = json!({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "scripted", "choices": [choice]});
    format!("data: {chunk}\n\n")
}

/// The end of a stream.
pub fn end(finish: &str) -> String {
    format!("{}data: [DONE]\n\n", chunk(json!({}), json!(finish)))
}

fn say(request: &Value, message: Value, parts: Vec<Value>, finish: &str) -> Response {
    let usage = json!({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10});
    if request["stream"] != true {
        let n = request["n"].as_u64().unwrap_or(1);
        let choice = |i: u64| json!({"index": i, "message": message, "finish_reason": finish});
        let choices: Vec<Value> = (0..n).map(choice).collect();
        let body = json!({"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "scripted", "choices": choices, "usage": usage});
        return Response::builder().header("content-type", "application/json").body(body.to_string().into()).unwrap();
    }
    let mut text = chunk(json!({"role": "assistant"}), Value::Null);
    parts.into_iter().for_each(|part| text.push_str(&chunk(part, Value::Null)));
    text.push_str(&chunk(json!({}), json!(finish)));
    if request["stream_options"]["include_usage"] == true {
        let last = json!({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "scripted", "choices": [], "usage": usage});
        text.push_str(&format!("data: {last}\n\n"));
    }
    text.push_str("data: [DONE]\n\n");
    // In chunks that are not aligned with the events.
    let parts: Vec<Bytes> = text.as_bytes().chunks(97).map(Bytes::copy_from_slice).collect();
    let body = Body::from_stream(futures_util::stream::iter(parts.into_iter().map(Ok::<_, std::io::Error>)));
    Response::builder().header("content-type", "text/event-stream; charset=utf-8").body(body).unwrap()
}

/// The configuration of a model server, with short timeouts.
pub fn model(name: &str, base_url: &str) -> ModelConfig {
    let model = json!({"name": name, "base_url": base_url, "idle_timeout": "400ms", "retries": 0});
    serde_json::from_value(model).unwrap()
}

/// A Tenure server in this process, in front of a scripted model.
pub struct Home {
    pub app: AppState,
    pub client: Client,
    pub model: Script,
    pub stream: bool,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    served: Option<tokio::task::JoinHandle<()>>,
    _dir: Option<tempfile::TempDir>,
}

impl Home {
    /// Returns `None` if the store is not available here.
    pub async fn new(kind: &str, stream: bool) -> Option<Self> {
        Self::with(kind, stream, |_| ()).await
    }

    pub async fn with(kind: &str, stream: bool, change: impl FnOnce(&mut Config)) -> Option<Self> {
        let dir = (kind == "sqlite").then(|| tempfile::tempdir().unwrap());
        let store = match (kind, &dir) {
            ("sqlite", Some(dir)) => format!("sqlite:{}", dir.path().join("tenure.db").display()),
            ("postgres", _) => postgres_url()?,
            _ => "memory:".to_owned(),
        };
        let model = Script::default();
        let base_url = model.start().await;
        let mut config = Config { listen: "127.0.0.1:0".into(), store, ..Config::default() };
        config.models = vec![self::model("default", &base_url)];
        change(&mut config);
        let app = App::open(config).await.unwrap();
        let mut home = Self { app, client: Client::new(""), model, stream, stop: None, served: None, _dir: dir };
        home.serve().await;
        Some(home)
    }

    /// Serves `app` on its own address.
    pub async fn serve(&mut self) {
        let listener = serve::bind(&self.app).await.unwrap();
        self.client = Client::new(&format!("http://{}", listener.local_addr().unwrap()));
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let run = serve::run(self.app.clone(), listener, async move { drop(stopped.await) });
        self.served = Some(tokio::spawn(async move { run.await.unwrap() }));
        self.stop = Some(stop);
    }

    /// Stops the server, closes the store, and restarts both.
    pub async fn restart(&mut self) {
        drop(self.stop.take());
        self.served.take().unwrap().await.unwrap();
        let config = self.app.config.clone();
        self.app = App::open(Config { store: "memory:".into(), ..config.clone() }).await.unwrap(); // closes the store
        self.app = App::open(config).await.unwrap();
        self.serve().await;
    }

    /// Sends a chat request, streamed or not as this home is configured.
    pub async fn chat(&self, body: Value) -> Reply {
        self.client.chat(self.stream, body, &[]).await
    }

    /// The session, whatever its status.
    pub async fn session(&self, id: &str) -> Session {
        self.app.tenure.load_any(&nobody(), &SessionId::new(id).unwrap()).await.unwrap()
    }

    /// The stored messages.
    pub async fn stored(&self, id: &str) -> Vec<Value> {
        self.session(id).await.messages.iter().map(|m| m.message.to_value()).collect()
    }

    /// The number of sessions.
    pub async fn sessions(&self) -> usize {
        let query = tenure::session::SessionQuery::new(tenure::session::OwnerFilter::Tenant(nobody().tenant), 100);
        self.app.tenure.store().heads(&query).await.unwrap().len()
    }
}

/// The principal of a request without a key.
pub fn nobody() -> Principal {
    Principal::new("default", "default").unwrap()
}

/// A separate schema on the PostgreSQL that `make test` starts. Without a database, tests are skipped, but never in
/// CI.
pub fn postgres_url() -> Option<String> {
    let Ok(url) = std::env::var("TENURE_TEST_POSTGRES") else {
        assert!(std::env::var("CI").is_err(), "TENURE_TEST_POSTGRES must be set in CI");
        eprintln!("skipped: TENURE_TEST_POSTGRES is not set (`make test` sets it)");
        return None;
    };
    let schema = format!("t_{}", SessionId::generate().as_str().replace('-', ""));
    Some(format!("{url}{}schema={schema}", if url.contains('?') { '&' } else { '?' }))
}

/// An HTTP client.
#[derive(Clone, Debug)]
pub struct Client {
    pub http: reqwest::Client,
    pub base: String,
}

/// A response.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: HeaderMap,
    /// The raw body.
    pub text: String,
    /// The complete answer or the error; of a stream, its assembled chunks.
    pub body: Value,
    /// The raw data of a stream's events.
    pub events: Vec<String>,
}

impl Reply {
    pub fn session_id(&self) -> String {
        self.headers["x-session-id"].to_str().unwrap().to_owned()
    }

    pub fn message(&self) -> &Value {
        &self.body["choices"][0]["message"]
    }

    pub fn said(&self) -> &str {
        self.message()["content"].as_str().unwrap_or_else(|| panic!("no answer: {self:?}"))
    }

    /// How the messages were reconciled: matched, spliced, rewound, appended.
    pub fn report(&self) -> [u64; 4] {
        let part = |name: &str| self.body["session"][name].as_u64().unwrap_or_else(|| panic!("no {name}: {self:?}"));
        [part("matched"), part("spliced"), part("rewound"), part("appended")]
    }

    pub fn code(&self) -> &str {
        self.body["error"]["code"].as_str().unwrap_or_default()
    }

    pub fn is_done(&self) -> bool {
        self.events.last().is_some_and(|e| e == "[DONE]")
    }
}

impl Client {
    pub fn new(base: &str) -> Self {
        Self { http: tenure_server::http_client::client().build().unwrap(), base: base.to_owned() }
    }

    pub fn post(&self, stream: bool, mut body: Value, headers: &[(&str, &str)]) -> reqwest::RequestBuilder {
        if stream {
            body["stream"] = json!(true);
        }
        self.post_text(&body.to_string(), headers)
    }

    pub fn post_text(&self, body: &str, headers: &[(&str, &str)]) -> reqwest::RequestBuilder {
        let request = self.http.post(format!("{}/v1/chat/completions", self.base)).body(body.to_owned());
        let request = request.header("content-type", "application/json");
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value))
    }

    pub async fn chat(&self, stream: bool, body: Value, headers: &[(&str, &str)]) -> Reply {
        reply(self.post(stream, body, headers).send().await.unwrap()).await
    }
}

/// Reads a response. The chunks of a successful stream are assembled; an error in it becomes the body.
pub async fn reply(response: reqwest::Response) -> Reply {
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let streamed = headers.get("content-type").is_some_and(|t| t == "text/event-stream");
    let text = response.text().await.unwrap();
    let mut reply = Reply { status, headers, text, ..Reply::default() };
    if !streamed {
        reply.body = serde_json::from_str(&reply.text).unwrap_or_default();
        return reply;
    }
    // Comments only keep the connection alive while a request waits.
    let events = reply.text.split("\n\n").filter(|e| !e.is_empty() && !e.starts_with(':'));
    let data = |e: &str| e.lines().find_map(|l| l.strip_prefix("data: ")).expect("an event with data").to_owned();
    reply.events = events.map(data).collect();
    let mut answer = ModelAnswer::default();
    let (mut report, mut run_id, mut error) = (Value::Null, Value::Null, None);
    let mut id = reply.headers.get("x-session-id").map(|v| v.to_str().unwrap().to_owned());
    for (i, event) in reply.events.iter().enumerate().filter(|(_, e)| *e != "[DONE]") {
        let chunk: Value = serde_json::from_str(event).unwrap();
        if chunk.get("error").is_some() {
            assert_eq!(i + 1, reply.events.len(), "nothing follows an error");
            error = Some(chunk);
            break;
        }
        // A request that was queued gets its session id with the first chunk.
        id = id.or_else(|| chunk["session_id"].as_str().map(str::to_owned));
        assert_eq!(chunk["session_id"].as_str(), id.as_deref(), "every chunk names the session");
        assert_eq!(chunk["object"], "chat.completion.chunk");
        answer.add_chunk(&ModelChunk::Chunk(event.clone())).unwrap();
        if i == 0 {
            report = chunk["session"].clone();
            run_id = chunk["run_id"].clone();
        } else {
            assert!(chunk.get("session").is_none(), "only the first chunk reports");
        }
    }
    reply.body = serde_json::from_str(&answer.body("streamed", jiff::Timestamp::UNIX_EPOCH)).unwrap();
    (reply.body["session_id"], reply.body["session"]) = (json!(id), report);
    reply.body["run_id"] = run_id;
    if let Some(error) = error {
        reply.body["error"] = error["error"].clone();
    }
    reply
}

/// The real binary.
pub struct Binary {
    child: Child,
    pub client: Client,
}

impl Binary {
    /// Starts it on a store, in front of a model, and waits until it listens.
    pub fn start(dir: &Path, store: &str, base_url: &str) -> Self {
        Self::with(dir, store, base_url, json!({}))
    }

    /// Starts it with additional configuration.
    pub fn with(dir: &Path, store: &str, base_url: &str, more: Value) -> Self {
        let mut config = json!({
            "listen": "127.0.0.1:0", "store": store,
            "models": [{"name": "default", "base_url": base_url, "retries": 0}],
            "telemetry": {"log": "off"},
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        // JSON is YAML.
        std::fs::write(dir.join("tenure.yaml"), config.to_string()).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_tenure"))
            .arg("serve")
            .current_dir(dir)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        lines.read_line(&mut line).unwrap();
        let base = line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("it said {line:?}")).to_owned();
        // Its further output must be drained, or it would block.
        std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
        Self { child, client: Client::new(&base) }
    }

    /// Freezes it (`SIGSTOP`), or lets it continue (`SIGCONT`).
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([format!("-{name}"), self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Kills it with `kill -9`.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

impl Drop for Binary {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn system(text: &str) -> Value {
    json!({"role": "system", "content": text})
}

pub fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

pub fn assistant(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

pub fn call(id: &str, name: &str, arguments: &str) -> Value {
    let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    json!({"role": "assistant", "content": null, "tool_calls": [call]})
}

pub fn tool(id: &str, text: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": text})
}

/// A user message with an image that is large enough to be stored as a blob.
pub fn picture(text: &str, fill: u8) -> Value {
    use base64::Engine;
    let data = base64::engine::general_purpose::STANDARD.encode(vec![fill; 4000]);
    json!({"role": "user", "content": [
        {"type": "text", "text": text},
        {"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{data}")}},
    ]})
}

/// Expands each case to four tests: unary and streamed, on SQLite and on PostgreSQL.
#[macro_export]
macro_rules! in_every_way {
    ($($(#[doc = $doc:literal])* async fn $name:ident($home:ident: &mut Home) $body:block)*) => {$(
        $(#[doc = $doc])*
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            async fn case($home: &mut $crate::kit::Home) $body

            async fn on(kind: &str, stream: bool) {
                if let Some(mut home) = $crate::kit::Home::new(kind, stream).await {
                    case(&mut home).await;
                }
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn sqlite() { on("sqlite", false).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn sqlite_streamed() { on("sqlite", true).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn postgres() { on("postgres", false).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn postgres_streamed() { on("postgres", true).await }
        }
    )*};
}
