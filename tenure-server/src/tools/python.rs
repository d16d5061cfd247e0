//! The Python tool: an interpreter for each session that uses it, apart from the server and from other sessions.
//!
//! It is started by a session's first call and keeps what was defined until it ends: because it was idle, because others needed its place, because
//! it had to be killed, or because the session or the server ended. Then the next call starts another, which knows nothing.

use super::confine::{self, Reach};
use super::process::{Group, Interrupter};
use super::{callable, spoken};
use crate::clock::Stopwatch;
use crate::config::tools::Python;
use anyhow::{Context, bail};
use serde::Deserialize;
use serde_json::json;
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, Once};
use std::time::Duration;
use tenure::{Call, Key, Output, PythonSource, Tool, ToolError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{ChildStdin, ChildStdout, Command};

/// What the model calls it.
pub const NAME: &str = "python";
/// Runs in the interpreter.
const DRIVER: &str = include_str!("python_driver.py");
/// Tells where the interpreter is: what is on the path may be a script that looks for it.
const WHERE: &str =
    "import sys, json; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, list(sys.version_info)[:2]]))";
/// How long an interpreter may take to start.
const TIME_TO_START: Duration = Duration::from_secs(20);
/// Sessions of which is remembered that their interpreter is gone.
const MAX_GONE: usize = 10_000;
/// Files that it may have open.
const OPEN_FILES: u32 = 256;

/// What the model is told of it.
pub fn tool() -> Tool {
    let description = "Runs Python code. What is printed and the value of the last expression come back. Variables, functions and imports are \
                       kept between calls. There is no network; files can be written to the current directory.";
    let code = json!({"type": "string", "description": "The code"});
    Tool {
        name: callable(NAME),
        description: description.to_owned(),
        parameters: json!({"type": "object", "properties": {"code": code}, "required": ["code"]}),
        ..Tool::default()
    }
}

/// The interpreters.
pub struct Pool {
    settings: Python,
    found: tokio::sync::OnceCell<Found>,
    seats: Mutex<Seats>,
    told: Once,
}

/// An interpreter's place on this machine.
#[derive(Debug)]
struct Found {
    program: PathBuf,
    prefixes: Vec<PathBuf>,
}

#[derive(Default)]
struct Seats {
    taken: HashMap<Key, Arc<Seat>>,
    /// Whose interpreter is gone, and why. They are told with their next call.
    gone: HashMap<Key, &'static str>,
}

/// A session's interpreter. Its lock is held for as long as a call takes.
struct Seat {
    used: Mutex<Stopwatch>,
    process: tokio::sync::Mutex<Option<Process>>,
    /// The session has ended: a call in progress is given up.
    ended: tokio::sync::Notify,
}

/// How a call ended.
enum Ended {
    Answered(Answer),
    /// The interpreter is not there any more.
    Died(String),
}

#[derive(Deserialize)]
struct Answer {
    text: String,
    failed: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Answer {
        id: u64,
        #[serde(flatten)]
        answer: Answer,
    },
    Ready {
        ready: Vec<String>,
    },
    Ended {
        ended: String,
    },
}

impl Pool {
    pub fn new(settings: Python) -> Self {
        Self { settings, found: tokio::sync::OnceCell::new(), seats: Mutex::default(), told: Once::new() }
    }

    /// How long to wait between two looks for idle interpreters.
    pub fn pause(&self) -> Duration {
        let idle = self.settings.idle.duration().unwrap_or(Duration::MAX);
        (idle / 4).clamp(Duration::from_millis(50), Duration::from_secs(1))
    }

    fn seats(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub async fn call(&self, source: &PythonSource, call: &Call) -> Result<Output, ToolError> {
        let Some(code) = call.arguments.get("code").and_then(|c| c.as_str()) else {
            return Ok(Output {
                content: "the argument `code` is missing: a text with Python code".into(),
                failed: true,
            });
        };
        let seat = self.seat(&call.session).await?;
        let mut place = seat.process.lock().await;
        let grace = self.settings.grace.duration().unwrap_or_default();
        if let Some(process) = &mut *place
            && !process.settles(grace).await
        {
            self.leave(&call.session, place.take(), "a call was given up and could not be interrupted").await;
        }
        let process = match &mut *place {
            Some(process) => process,
            empty => match self.start(source).await {
                Ok(process) => empty.insert(process),
                Err(e) => return Err(ToolError::NotCalled(format!("no interpreter could be started: {e:#}"))),
            },
        };
        let note = self.seats().gone.remove(&call.session);
        let limit = source.timeout.unwrap_or(self.settings.timeout).duration().unwrap_or(Duration::from_secs(30));
        let asked = tokio::select! {
            asked = process.ask(code, limit, grace) => asked,
            () = seat.ended.notified() => Asked::Died("the session has ended".into()),
        };
        let mut output = match asked {
            Asked::Done(answer) => Output { content: answer.text, failed: answer.failed },
            Asked::Interrupted(answer) => {
                let (time, text) = (spoken(limit), answer.text);
                let content = format!("{text}\n[interrupted after {time}; what was defined before is still there]");
                Output { content, failed: true }
            }
            Asked::Died(why) => {
                if let Some(process) = place.take() {
                    process.end().await;
                }
                let content =
                    format!("[{why}; everything that was defined is gone, the next call starts a new interpreter]");
                return Ok(Output { content, failed: true });
            }
        };
        if let Some(why) = note {
            output.content = format!("[this is a new interpreter: {why}]\n{}", output.content);
        }
        *seat.used.lock().unwrap_or_else(|e| e.into_inner()) = Stopwatch::start();
        Ok(output)
    }

    /// The session's seat; if there is none free, that of the session that was idle for longest.
    async fn seat(&self, session: &Key) -> Result<Arc<Seat>, ToolError> {
        let (seat, evicted) = {
            let mut seats = self.seats();
            if let Some(seat) = seats.taken.get(session) {
                return Ok(seat.clone());
            }
            let mut evicted = None;
            if seats.taken.len() >= self.settings.max_processes {
                let idle = seats.taken.iter().filter(|(_, seat)| Arc::strong_count(seat) == 1);
                let Some(longest) = idle.max_by_key(|(_, seat)| seat.idle()).map(|(key, _)| key.clone()) else {
                    let max = self.settings.max_processes;
                    return Err(ToolError::NotCalled(format!(
                        "all {max} interpreters are busy (python.max_processes); try again later"
                    )));
                };
                evicted = seats.taken.remove(&longest).map(|seat| (longest, seat));
            }
            let (used, process, ended) = (Mutex::new(Stopwatch::start()), Default::default(), Default::default());
            let seat = Arc::new(Seat { used, process, ended });
            seats.taken.insert(session.clone(), seat.clone());
            (seat, evicted)
        };
        if let Some((key, evicted)) = evicted {
            self.leave(&key, evicted.process.lock().await.take(), "another session needed its place").await;
        }
        Ok(seat)
    }

    /// Ends an interpreter whose session may come back.
    async fn leave(&self, session: &Key, process: Option<Process>, why: &'static str) {
        let Some(process) = process else { return };
        {
            let mut seats = self.seats();
            if seats.gone.len() >= MAX_GONE {
                seats.gone.clear();
            }
            seats.gone.insert(session.clone(), why);
        }
        process.end().await;
    }

    /// Ends the interpreters that were idle for too long, and those that do not stop although nobody waits for them.
    pub async fn reap(&self) {
        let idle = self.settings.idle.duration().unwrap_or(Duration::MAX);
        let grace = self.settings.grace.duration().unwrap_or_default();
        let mut ended = Vec::new();
        {
            let mut seats = self.seats();
            seats.taken.retain(|key, seat| {
                // In use, if somebody else has it.
                let Some(mut process) = (Arc::strong_count(seat) == 1).then(|| seat.process.try_lock().ok()).flatten()
                else {
                    return true;
                };
                let stuck = process.as_ref().is_some_and(|p| p.given_up().is_some_and(|time| time > grace));
                if seat.idle() <= idle && !stuck {
                    return true;
                }
                ended.push((key.clone(), process.take()));
                false
            });
        }
        for (key, process) in ended {
            self.leave(&key, process, "the one before was idle for too long").await;
        }
    }

    /// Ends a session's interpreter for good, in the middle of a call if need be.
    pub async fn end(&self, session: &Key) {
        let seat = {
            let mut seats = self.seats();
            seats.gone.remove(session);
            seats.taken.remove(session)
        };
        let Some(seat) = seat else { return };
        seat.ended.notify_one();
        let process = seat.process.lock().await.take();
        if let Some(process) = process {
            process.end().await;
        }
    }

    pub async fn close(&self) {
        let keys: Vec<Key> = self.seats().taken.keys().cloned().collect();
        for key in keys {
            self.end(&key).await;
        }
    }

    async fn start(&self, source: &PythonSource) -> anyhow::Result<Process> {
        let found = self.found.get_or_try_init(|| find(&self.settings.program)).await?;
        let dir = tempfile::Builder::new().prefix("tenure-python-").tempdir()?;
        let own = dir.path().canonicalize()?;
        let settings = &self.settings;
        let seconds = source.timeout.unwrap_or(settings.timeout).duration().unwrap_or_default().as_secs() + 1;
        let limits = json!({
            "memory": source.memory.unwrap_or(settings.memory).0, "file": settings.file.0, "output": settings.output.0,
            "processes": settings.processes, "open_files": OPEN_FILES, "seconds": seconds,
        });
        let read = found.prefixes.iter().cloned().chain(settings.read.iter().map(PathBuf::from)).collect();
        let rules = confine::rules(&Reach { own: own.clone(), read });
        let tcp = rules.as_ref().is_some_and(|r| r.tcp);
        let mut command = Command::new(&found.program);
        command.args(["-I", "-u", "-c", DRIVER, &limits.to_string()]).env_clear();
        command.env("LANG", "C.UTF-8").env("HOME", &own).env("TMPDIR", &own).current_dir(&own);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(rules.map_or_else(Stdio::null, |r| r.rules.into()));
        command.process_group(0).kill_on_drop(true);
        let mut group = Group::of(command.spawn()?);
        let child = group.child();
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else { bail!("it has no pipes") };
        let max_line = usize::try_from(settings.output.0).unwrap_or(usize::MAX).saturating_mul(6).saturating_add(4096);
        let state = State::Idle;
        let mut process = Process { group, input, output, read: Vec::new(), max_line, calls: 0, state, dir };
        let ready = tokio::time::timeout(TIME_TO_START, process.line()).await.context("it did not start in time")?;
        let apart = match ready {
            Ok(Line::Ready { ready }) => ready,
            Ok(_) => bail!("it does not do what it should"),
            Err(why) => bail!("{} does not run: {why}", found.program.display()),
        };
        self.told.call_once(|| {
            let has = |what: &str| apart.iter().any(|a| a == what);
            let (files, processes, network) = (has("files"), has("processes"), has("network") || (has("files") && tcp));
            match files && processes && network {
                true => tracing::info!("the Python tool is kept apart: files, processes, network"),
                false => tracing::warn!(
                    files,
                    processes,
                    network,
                    "this system does not keep the Python tool apart in every way; see docs/tools.md"
                ),
            }
        });
        Ok(process)
    }
}

impl Seat {
    fn idle(&self) -> Duration {
        self.used.lock().unwrap_or_else(|e| e.into_inner()).elapsed()
    }
}

async fn find(program: &str) -> anyhow::Result<Found> {
    let mut ask = Command::new(program);
    ask.args(["-I", "-c", WHERE]).stdin(Stdio::null()).kill_on_drop(true);
    let answer = tokio::time::timeout(TIME_TO_START, ask.output()).await.context("it did not answer in time")?;
    let answer = answer.with_context(|| format!("can not run {program:?}"))?;
    type Places = (PathBuf, PathBuf, PathBuf, (u32, u32));
    let places: Places = serde_json::from_slice(&answer.stdout)
        .with_context(|| format!("{program:?} is not a Python interpreter ({})", answer.status))?;
    let (program, prefix, base, version) = places;
    if version < (3, 9) {
        bail!("Python {}.{} is too old; 3.9 or later is needed", version.0, version.1);
    }
    // `/` would be everything, and `/usr` can be read anyway.
    let prefixes = [prefix, base].into_iter().filter(|p| p.parent().is_some() && p != std::path::Path::new("/usr"));
    Ok(Found { program, prefixes: prefixes.collect() })
}

/// A running interpreter.
struct Process {
    group: Group,
    input: ChildStdin,
    output: ChildStdout,
    /// What was read and not understood yet.
    read: Vec<u8>,
    max_line: usize,
    calls: u64,
    state: State,
    /// Removed with it.
    dir: tempfile::TempDir,
}

#[derive(Clone, Copy)]
enum State {
    Idle,
    /// A call is being written: broken off here, what comes next would not be understood.
    Writing,
    /// An answer is owed.
    Asked(Stopwatch),
}

/// How a call went.
enum Asked {
    Done(Answer),
    Interrupted(Answer),
    Died(String),
}

/// Interrupts a call that nobody waits for any more.
struct Abandoned(Option<Interrupter>);

impl Drop for Abandoned {
    fn drop(&mut self) {
        if let Some(interrupter) = self.0.take() {
            interrupter.interrupt();
        }
    }
}

impl Process {
    async fn ask(&mut self, code: &str, limit: Duration, grace: Duration) -> Asked {
        self.calls += 1;
        let mut abandoned = Abandoned(Some(self.group.interrupter()));
        let line = json!({"id": self.calls, "code": code}).to_string() + "\n";
        self.state = State::Writing;
        let asked = async {
            if self.input.write_all(line.as_bytes()).await.is_err() {
                return Ended::Died("the interpreter was gone".into());
            }
            self.state = State::Asked(Stopwatch::start());
            self.answer().await
        };
        let outcome = match tokio::time::timeout(limit, asked).await {
            Ok(Ended::Answered(answer)) => Asked::Done(answer),
            Ok(Ended::Died(why)) => Asked::Died(why),
            Err(_) => {
                self.group.interrupter().interrupt();
                match tokio::time::timeout(grace, self.answer()).await {
                    Ok(Ended::Answered(answer)) => Asked::Interrupted(answer),
                    Ok(Ended::Died(why)) => Asked::Died(why),
                    Err(_) => {
                        Asked::Died(format!("it took longer than {} and could not be interrupted", spoken(limit)))
                    }
                }
            }
        };
        abandoned.0 = None;
        outcome
    }

    /// Whether it is ready for a call: one that was given up before may have to end first.
    async fn settles(&mut self, grace: Duration) -> bool {
        match self.state {
            State::Idle => true,
            State::Writing => false,
            State::Asked(_) => matches!(tokio::time::timeout(grace, self.answer()).await, Ok(Ended::Answered(_))),
        }
    }

    /// For how long an answer is owed that nobody waits for.
    fn given_up(&self) -> Option<Duration> {
        match self.state {
            State::Idle => None,
            State::Writing => Some(Duration::MAX),
            State::Asked(since) => Some(since.elapsed()),
        }
    }

    /// The answer to the last call. When this is dropped, it can be asked for again.
    async fn answer(&mut self) -> Ended {
        loop {
            match self.line().await {
                Ok(Line::Answer { id, answer }) if id == self.calls => {
                    self.state = State::Idle;
                    return Ended::Answered(answer);
                }
                Ok(Line::Ended { ended }) => return Ended::Died(format!("the interpreter ended ({ended})")),
                Ok(_) => {}
                Err(why) => return Ended::Died(why),
            }
        }
    }

    async fn line(&mut self) -> Result<Line, String> {
        loop {
            if let Some(end) = self.read.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return serde_json::from_slice(&line).map_err(|_| "the interpreter gave no sensible answer".to_owned());
            }
            if self.read.len() > self.max_line {
                return Err("the interpreter's answer was too long".into());
            }
            match self.output.read_buf(&mut self.read).await {
                Ok(0) | Err(_) => return Err("the interpreter ended".into()),
                Ok(_) => {}
            }
        }
    }

    /// Ends it with everything that it started, and removes its directory.
    async fn end(self) {
        let Self { group, input, output, dir, .. } = self;
        // The driver sees that, and ends what the group does not hold.
        drop((input, output));
        group.end().await;
        let _ = tokio::task::spawn_blocking(move || drop(dir)).await;
    }
}
