//! The real binary in its own directory, and small servers for it to talk to.

use axum::Router;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The binary under test: the one cargo has built with the tests, or another build (`make attack`: the release
/// binary).
pub fn binary() -> String {
    std::env::var("TENURE_TEST_BINARY").unwrap_or_else(|_| env!("CARGO_BIN_EXE_tenure").to_owned())
}

/// The running binary. Dropping it kills the process.
pub struct Running {
    child: Child,
    /// `http://127.0.0.1:PORT`
    pub url: String,
    pub address: SocketAddr,
    errors: Arc<Mutex<String>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

fn program(dir: &Path, yaml: &str) -> Command {
    program_through(None, dir, yaml)
}

/// The command that serves a directory with this configuration, through a launcher if one is given.
fn program_through(starter: Option<&Path>, dir: &Path, yaml: &str) -> Command {
    std::fs::write(dir.join("tenure.yaml"), yaml).unwrap();
    let executable = &binary();
    let mut command = Command::new(starter.unwrap_or(Path::new(executable)));
    if starter.is_some() {
        command.arg(executable);
    }
    command.current_dir(dir).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for (name, _) in std::env::vars().filter(|(n, _)| n.starts_with("TENURE_") || n.to_lowercase().ends_with("_proxy"))
    {
        command.env_remove(name);
    }
    command
}

impl Running {
    /// Starts it with this configuration; `listen` and `store` get test defaults unless set.
    pub fn start(dir: &Path, yaml: &str) -> Self {
        Self::start_with(dir, yaml, &[])
    }

    pub fn start_with(dir: &Path, yaml: &str, env: &[(&str, &str)]) -> Self {
        Self::start_through(None, dir, yaml, env)
    }

    /// Starts it through a launcher, which must `exec` it.
    pub fn start_through(starter: Option<&Path>, dir: &Path, yaml: &str, env: &[(&str, &str)]) -> Self {
        let mut yaml = yaml.to_owned();
        if !yaml.contains("listen:") {
            yaml.push_str("\nlisten: 127.0.0.1:0\n");
        }
        let mut command = program_through(starter, dir, &yaml);
        command.envs(env.iter().copied());
        let mut child = command.spawn().unwrap();
        let (errors, mut pipe) = (Arc::new(Mutex::new(String::new())), BufReader::new(child.stderr.take().unwrap()));
        let heard = errors.clone();
        let reader = std::thread::spawn(move || {
            let mut line = String::new();
            while pipe.read_line(&mut line).is_ok_and(|n| n > 0) {
                heard.lock().unwrap().push_str(&line);
                line.clear();
            }
        });
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let Some(url) = line.trim().strip_prefix("listening on ").map(str::to_owned) else {
            let _ = child.wait();
            panic!("it did not start: {line:?}\n{}", errors.lock().unwrap());
        };
        // Its further output must be drained, or it would block.
        std::thread::spawn(move || drop(out.read_to_end(&mut Vec::new())));
        let address = url.strip_prefix("http://").unwrap().parse().unwrap();
        Self { child, url, address, errors, reader: Some(reader) }
    }

    /// Asserts that the start fails, and returns the output.
    pub fn refuses(dir: &Path, yaml: &str) -> String {
        let output = program(dir, yaml).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    pub fn signal(&self, name: &str) {
        let done = Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status().unwrap();
        assert!(done.success());
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its current and peak resident memory in MiB (`VmRSS` and `VmHWM`).
    pub fn memory(&self) -> (u64, u64) {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(name)).unwrap();
            line.trim_matches([':', '\t', ' ']).split(' ').next().unwrap().parse::<u64>().unwrap() >> 10
        };
        (field("VmRSS"), field("VmHWM"))
    }

    /// The log so far.
    pub fn log(&self) -> String {
        self.errors.lock().unwrap().clone()
    }

    /// Waits until it exits.
    pub fn ended(&mut self, within: Duration) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < within, "it still runs; it said: {}", self.errors.lock().unwrap());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Stops it as an operator does. Returns its log.
    pub fn stop(mut self) -> String {
        self.signal("TERM");
        assert!(self.ended(Duration::from_secs(40)).success());
        self.reader.take().unwrap().join().unwrap();
        std::mem::take(&mut *self.errors.lock().unwrap())
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The current number of its threads.
    pub fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.child.id())).map_or(0, |tasks| tasks.count())
    }

    pub fn request(&self, method: &str, path: &str) -> reqwest::RequestBuilder {
        client().request(method.parse().unwrap(), format!("{}{path}", self.url))
    }

    pub async fn get(&self, path: &str) -> (u16, Value) {
        answer(self.request("GET", path)).await
    }

    /// Sends one turn of a conversation.
    pub async fn chat(&self, session: &str, text: &str) -> (u16, Value) {
        answer(self.request("POST", "/v1/chat/completions").json(&said(session, text))).await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn said(session: &str, text: &str) -> Value {
    json!({"session_id": session, "messages": [{"role": "user", "content": text}]})
}

pub fn client() -> reqwest::Client {
    tenure_server::http_client::client().no_proxy().timeout(Duration::from_secs(60)).build().unwrap()
}

/// Sends a request. Returns the status, and the body as JSON (or as a JSON string).
pub async fn answer(request: reqwest::RequestBuilder) -> (u16, Value) {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

/// Asserts all parts of an API error.
#[track_caller]
pub fn assert_error(answer: &(u16, Value), status: u16, code: &str, param: Option<&str>) {
    let error = &answer.1["error"];
    assert_eq!((answer.0, error["code"].as_str(), error["param"].as_str()), (status, Some(code), param), "{answer:?}");
    assert!(!error["message"].as_str().unwrap().is_empty() && error["type"].is_string(), "{answer:?}");
}

/// Serves routes on its own port, for as long as the test runs.
pub async fn serve(router: Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    format!("http://{address}")
}

/// A model server that streams `words` words with a pause before each.
pub async fn slow_model(words: usize, pause: Duration) -> String {
    use futures_util::{StreamExt, stream};
    let route = axum::routing::post(move || async move {
        let chunk = |delta: Value, finish: Value| {
            format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}))
        };
        let said = (0..words).map(move |i| chunk(json!({"content": format!("word{i} ")}), Value::Null));
        let all = said.chain([chunk(json!({}), json!("stop")), "data: [DONE]\n\n".to_owned()]);
        let slowly = stream::iter(all).then(move |text| async move {
            tokio::time::sleep(pause).await;
            Ok::<_, std::convert::Infallible>(text)
        });
        ([("content-type", "text/event-stream")], axum::body::Body::from_stream(slowly))
    });
    serve(Router::new().route("/v1/chat/completions", route)).await
}

/// Polls until a condition holds.
pub async fn until(what: &str, within: Duration, mut holds: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !holds().await {
        assert!(start.elapsed() < within, "not within {within:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
