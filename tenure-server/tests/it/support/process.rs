//! The real binary, in a directory of its own.

use super::client::{Client, chat_request, http_client, send};
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
pub struct ServerProcess {
    child: Child,
    /// A client of its address.
    pub client: Client,
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

impl ServerProcess {
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
        if !yaml.contains("listen") {
            yaml.push_str("\nlisten: 127.0.0.1:0\n");
        }
        let mut command = program_through(starter, dir, &yaml);
        command.envs(env.iter().copied());
        let mut child = command.spawn().unwrap();
        let (errors, mut pipe) = (Arc::new(Mutex::new(String::new())), BufReader::new(child.stderr.take().unwrap()));
        let log = errors.clone();
        let reader = std::thread::spawn(move || {
            let mut line = String::new();
            while pipe.read_line(&mut line).is_ok_and(|n| n > 0) {
                log.lock().unwrap().push_str(&line);
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
        Self { child, client: Client::new(&url), url, address, errors, reader: Some(reader) }
    }

    /// Starts it on a store, in front of a model server, with additional configuration and without a log.
    pub fn with_model(dir: &Path, store: &str, base_url: &str, more: Value) -> Self {
        let mut config = json!({
            "listen": "127.0.0.1:0", "store": store,
            "models": [{"name": "default", "base_url": base_url, "retries": 0}],
            "telemetry": {"log": "off"},
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        // JSON is YAML.
        Self::start(dir, &config.to_string())
    }

    /// Asserts that the start fails, and returns the output.
    pub fn start_failure(dir: &Path, yaml: &str) -> String {
        let output = program(dir, yaml).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// Sends a signal, for example `TERM`, or `STOP` and `CONT` to freeze it and let it continue.
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
    pub fn wait_for_exit(&mut self, within: Duration) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < within, "it still runs; it said: {}", self.errors.lock().unwrap());
            std::thread::sleep(Duration::from_millis(10)); // polling interval
        }
    }

    /// Stops it as an operator does. Returns its log.
    pub fn stop(mut self) -> String {
        self.signal("TERM");
        assert!(self.wait_for_exit(Duration::from_secs(40)).success());
        self.reader.take().unwrap().join().unwrap();
        std::mem::take(&mut *self.errors.lock().unwrap())
    }

    /// Kills it with `kill -9`.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// The current number of its threads.
    pub fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.child.id())).map_or(0, |tasks| tasks.count())
    }

    pub fn request(&self, method: &str, path: &str) -> reqwest::RequestBuilder {
        http_client().request(method.parse().unwrap(), format!("{}{path}", self.url))
    }

    pub async fn get(&self, path: &str) -> (u16, Value) {
        send(self.request("GET", path)).await
    }

    /// Sends one turn of a conversation.
    pub async fn chat(&self, session: &str, text: &str) -> (u16, Value) {
        send(self.request("POST", "/v1/chat/completions").json(&chat_request(session, text))).await
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
