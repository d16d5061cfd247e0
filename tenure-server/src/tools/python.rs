//! The Python tool: one interpreter per session that uses it, isolated from the server and from other sessions.
//!
//! An interpreter is started by the session's first call and keeps its state until it ends: because it was idle,
//! was evicted, had to be killed, or because the session or the server ended. The next call then starts a new one
//! without that state.

use super::interpreter::{self, CallOutcome, Process, TIME_TO_START};
use super::sandbox::plan::{Features, FileLimits, Interpreter, ProcessLimits, SandboxPlan};
use super::text::format_duration;
use crate::clock::Stopwatch;
use crate::config::tools::{Python, is_mountable};
use crate::names::callable_name;
use anyhow::{Context, bail};
use serde_json::json;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tenure::{Tool, ToolError, ToolOutput, policy::PythonSource, run::ToolInvocation, session::SessionKey};
use tokio::process::Command;

/// Name of the tool, as models call it.
pub const NAME: &str = "python";
/// Code that prints the location of the interpreter: the program found in `PATH` may be a wrapper script.
const LOCATE_SCRIPT: &str =
    "import sys, json; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, list(sys.version_info)[:2]]))";
/// Maximum number of sessions for which the reason is stored why their interpreter has ended.
const MAX_END_REASONS: usize = 10_000;
/// Python's error message when a file system has no space or no inodes left.
const DISK_IS_FULL: &str = "No space left on device";
/// Maximum number of open files of an interpreter.
const OPEN_FILES: u32 = 256;

/// Returns the tool's definition for the model.
pub fn tool() -> Tool {
    let description = "Runs Python code. Returns the printed output and the value of the last expression. Variables, functions and imports \
                       persist between calls. There is no network access; files can be written to the current directory.";
    let code = json!({"type": "string", "description": "The code"});
    Tool {
        name: callable_name(NAME),
        description: description.to_owned(),
        parameters: json!({"type": "object", "properties": {"code": code}, "required": ["code"]}),
        ..Tool::default()
    }
}

/// The pool of interpreters, at most `python.max_processes`.
pub struct Pool {
    settings: Python,
    located: tokio::sync::OnceCell<AcquiredInterpreter>,
    slots: Mutex<InterpreterSlots>,
}

/// Location of a Python installation on this machine.
#[derive(Debug)]
struct AcquiredInterpreter {
    program: PathBuf,
    prefixes: Vec<PathBuf>,
}

#[derive(Default)]
struct InterpreterSlots {
    occupied: HashMap<SessionKey, Arc<InterpreterSlot>>,
    /// Sessions whose interpreter has ended, with the reason, which is reported with their next call.
    end_reasons: HashMap<SessionKey, &'static str>,
}

/// A session's interpreter. The lock of `process` is held for the duration of a call.
struct InterpreterSlot {
    last_used: Mutex<Stopwatch>,
    process: tokio::sync::Mutex<Option<Process>>,
    /// Whether this slot has had an interpreter. Then its end has been reported.
    was_started: AtomicBool,
    /// Notified when the session has ended: a call in progress is cancelled.
    ended: tokio::sync::Notify,
}

impl Pool {
    /// Creates an empty pool.
    pub fn new(settings: Python) -> Self {
        Self { settings, located: tokio::sync::OnceCell::new(), slots: Mutex::default() }
    }

    /// Returns the interval between two checks for idle interpreters.
    pub fn pause(&self) -> Duration {
        let idle = self.settings.idle.duration().unwrap_or(Duration::MAX);
        (idle / 4).clamp(Duration::from_millis(50), Duration::from_secs(1))
    }

    fn slots(&self) -> MutexGuard<'_, InterpreterSlots> {
        self.slots.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Executes code in the session's interpreter, starting one if necessary. A call over its timeout is interrupted;
    /// an interpreter that does not react within `python.grace` is killed.
    pub async fn call(&self, source: &PythonSource, call: &ToolInvocation) -> Result<ToolOutput, ToolError> {
        let Some(code) = call.arguments.get("code").and_then(|c| c.as_str()) else {
            return Ok(ToolOutput {
                content: "the argument `code` (a string with Python code) is missing".into(),
                failed: true,
            });
        };
        let slot = self.acquire_slot(&call.session).await?;
        let mut current = slot.process.lock().await;
        let grace = self.settings.grace.duration().unwrap_or_default();
        if let Some(process) = &mut *current
            && !process.drain_cancelled_call(grace).await
        {
            self.end_process(&call.session, current.take(), "a cancelled call could not be interrupted").await;
        }
        let process = match &mut *current {
            Some(process) => process,
            empty => match self.start(source).await {
                Ok(process) => empty.insert(process),
                Err(e) => return Err(ToolError::NotCalled(format!("could not start an interpreter: {e:#}"))),
            },
        };
        let end_reason = self.slots().end_reasons.remove(&call.session);
        // The log has results of an interpreter that this process does not know: of one before a restart, on another
        // node, of the session that this one is a fork of, or of the server that it was exported from.
        let is_first = !slot.was_started.swap(true, Ordering::Relaxed);
        let unknown = (is_first && call.called_before).then_some("the one of the earlier calls has ended");
        let end_reason = end_reason.or(unknown);
        let limit = source.timeout.unwrap_or(self.settings.timeout).duration().unwrap_or(Duration::from_secs(30));
        let outcome = tokio::select! {
            outcome = process.ask(code, limit, grace) => outcome,
            () = slot.ended.notified() => CallOutcome::Died("the session has ended".into()),
        };
        let mut output = match outcome {
            CallOutcome::Done(answer) => ToolOutput { content: answer.text, failed: answer.failed },
            CallOutcome::Interrupted(answer) => {
                let time = format_duration(limit);
                let text = answer.text;
                let content = format!("{text}\n[interrupted after {time}; earlier definitions are kept]");
                ToolOutput { content, failed: true }
            }
            CallOutcome::Died(reason) => {
                if let Some(process) = current.take() {
                    process.end().await;
                }
                let content = format!("[{reason}; all definitions are lost, the next call starts a new interpreter]");
                return Ok(ToolOutput { content, failed: true });
            }
        };
        if output.failed && output.content.contains(DISK_IS_FULL) {
            let disk = self.settings.disk;
            let max_files = self.settings.max_files;
            let limits = format!("[a session may use {disk} (python.disk) and {max_files} files (python.max_files)]");
            output.content = format!("{}\n{limits}", output.content);
        }
        if let Some(reason) = end_reason {
            output.content = format!("[this is a new interpreter: {reason}]\n{}", output.content);
        }
        *slot.last_used.lock().unwrap_or_else(|e| e.into_inner()) = Stopwatch::start();
        Ok(output)
    }

    /// Returns the session's slot. If all slots are taken, evicts the session that has been idle for longest; fails
    /// if none is idle.
    async fn acquire_slot(&self, session: &SessionKey) -> Result<Arc<InterpreterSlot>, ToolError> {
        let (slot, evicted) = {
            let mut slots = self.slots();
            if let Some(slot) = slots.occupied.get(session) {
                return Ok(slot.clone());
            }
            let mut evicted = None;
            if slots.occupied.len() >= self.settings.max_processes {
                let idle = slots.occupied.iter().filter(|(_, slot)| Arc::strong_count(slot) == 1);
                let Some(longest) = idle.max_by_key(|(_, slot)| slot.idle()).map(|(key, _)| key.clone()) else {
                    let max = self.settings.max_processes;
                    return Err(ToolError::NotCalled(format!(
                        "all {max} interpreters are busy (python.max_processes); try again later"
                    )));
                };
                evicted = slots.occupied.remove(&longest).map(|slot| (longest, slot));
            }
            let last_used = Mutex::new(Stopwatch::start());
            let process = Default::default();
            let ended = Default::default();
            let slot = Arc::new(InterpreterSlot { last_used, process, was_started: AtomicBool::new(false), ended });
            slots.occupied.insert(session.clone(), slot.clone());
            (slot, evicted)
        };
        if let Some((key, evicted)) = evicted {
            self.end_process(
                &key,
                evicted.process.lock().await.take(),
                "the previous one was evicted for another session",
            )
            .await;
        }
        Ok(slot)
    }

    /// Ends an interpreter whose session may continue, and stores the reason for its next call.
    async fn end_process(&self, session: &SessionKey, process: Option<Process>, reason: &'static str) {
        let Some(process) = process else { return };
        {
            let mut slots = self.slots();
            if slots.end_reasons.len() >= MAX_END_REASONS {
                slots.end_reasons.clear();
            }
            slots.end_reasons.insert(session.clone(), reason);
        }
        process.end().await;
    }

    /// Ends interpreters that have been idle for too long, and those that do not stop after their call was cancelled.
    pub async fn reap(&self) {
        let idle = self.settings.idle.duration().unwrap_or(Duration::MAX);
        let grace = self.settings.grace.duration().unwrap_or_default();
        let mut ended = Vec::new();
        {
            let mut slots = self.slots();
            slots.occupied.retain(|key, slot| {
                // Another reference to the slot means that a call is using it.
                let Some(mut process) = (Arc::strong_count(slot) == 1).then(|| slot.process.try_lock().ok()).flatten()
                else {
                    return true;
                };
                let stuck =
                    process.as_ref().is_some_and(|p| p.outstanding_since_cancel().is_some_and(|time| time > grace));
                if slot.idle() <= idle && !stuck {
                    return true;
                }
                ended.push((key.clone(), process.take()));
                false
            });
        }
        for (key, process) in ended {
            self.end_process(&key, process, "the previous one was idle for too long").await;
        }
    }

    /// Ends a session's interpreter permanently, cancelling a call in progress.
    pub async fn end(&self, session: &SessionKey) {
        let slot = {
            let mut slots = self.slots();
            slots.end_reasons.remove(session);
            slots.occupied.remove(session)
        };
        let Some(slot) = slot else { return };
        slot.ended.notify_one();
        let process = slot.process.lock().await.take();
        if let Some(process) = process {
            process.end().await;
        }
    }

    /// Ends all interpreters.
    pub async fn close(&self) {
        let keys: Vec<SessionKey> = self.slots().occupied.keys().cloned().collect();
        for key in keys {
            self.end(&key).await;
        }
    }

    /// Removes files that earlier servers left behind, and logs whether interpreters can be isolated as
    /// `python.require` demands.
    pub async fn prepare(&self) {
        interpreter::clean(&self.settings.helper, &scratch()).await;
        match self.probe().await {
            Ok(features) if features.is_full() => tracing::info!("the Python tool is fully isolated"),
            Ok(features) => tracing::warn!(
                namespaces = features.namespaces,
                private_root = features.mounts,
                landlock = features.landlock,
                landlock_tcp = features.landlock_tcp,
                seccomp = features.seccomp,
                require = %self.settings.require,
                "the Python tool is not fully isolated; see docs/tools.md"
            ),
            Err(reason) => tracing::error!(error = %format!("{reason:#}"), "the Python tool is not available"),
        }
    }

    /// Sets up a sandbox and ends it again. Fails if it cannot be isolated as `python.require` demands.
    async fn probe(&self) -> anyhow::Result<Features> {
        let plan = self.plan(None, self.read_paths()?);
        interpreter::probe(&self.settings.helper, plan).await
    }

    /// Checks that the interpreter is installed and can be isolated as `python.require` demands.
    pub async fn check(&self) -> anyhow::Result<()> {
        self.located.get_or_try_init(|| locate_interpreter(&self.settings.program)).await?;
        self.probe().await.map(drop)
    }

    /// Returns the directories of `python.read` as absolute paths. Fails if one does not exist.
    fn read_paths(&self) -> anyhow::Result<Vec<PathBuf>> {
        let check = |path: &String| {
            let absolute = std::path::absolute(path)?;
            if !absolute.exists() {
                bail!("python.read: {path:?} does not exist");
            }
            Ok(absolute)
        };
        self.settings.read.iter().map(check).collect()
    }

    fn plan(&self, interpreter: Option<Interpreter>, read: Vec<PathBuf>) -> SandboxPlan {
        let settings = &self.settings;
        let files = FileLimits { disk: settings.disk.0, max_files: settings.max_files, max_depth: settings.max_depth };
        SandboxPlan {
            require: settings.require,
            interpreter,
            read,
            scratch: scratch(),
            files,
            processes: settings.processes,
            namespaces: false,
            directory: None,
        }
    }

    async fn start(&self, source: &PythonSource) -> anyhow::Result<Process> {
        let located = self.located.get_or_try_init(|| locate_interpreter(&self.settings.program)).await?;
        let settings = &self.settings;
        let limits = ProcessLimits {
            memory: source.memory.unwrap_or(settings.memory).0,
            file: settings.file.0,
            output: settings.output.0,
            open_files: OPEN_FILES,
            seconds: source.timeout.unwrap_or(settings.timeout).duration().unwrap_or_default().as_secs() + 1,
            processes: None,
        };
        let read = located.prefixes.iter().cloned().chain(self.read_paths()?).collect();
        let plan = self.plan(Some(Interpreter { program: located.program.clone(), limits }), read);
        let max_line = usize::try_from(settings.output.0).unwrap_or(usize::MAX).saturating_mul(6).saturating_add(4096);
        Process::start(&settings.helper, plan, max_line).await
    }
}

/// Returns the host's directory for temporary files.
fn scratch() -> PathBuf {
    std::env::temp_dir()
}

impl InterpreterSlot {
    fn idle(&self) -> Duration {
        self.last_used.lock().unwrap_or_else(|e| e.into_inner()).elapsed()
    }
}

async fn locate_interpreter(program: &str) -> anyhow::Result<AcquiredInterpreter> {
    let mut command = Command::new(program);
    command.args(["-I", "-c", LOCATE_SCRIPT]).stdin(Stdio::null()).kill_on_drop(true);
    let answer = tokio::time::timeout(TIME_TO_START, command.output())
        .await
        .context("the interpreter did not respond in time")?;
    let answer = answer.with_context(|| format!("cannot run {program:?}"))?;
    type InterpreterPaths = (PathBuf, PathBuf, PathBuf, (u32, u32));
    let paths: InterpreterPaths = serde_json::from_slice(&answer.stdout)
        .with_context(|| format!("{program:?} is not a Python interpreter ({})", answer.status))?;
    let (program, prefix, base, version) = paths;
    if version < (3, 9) {
        bail!("Python {}.{} is too old; 3.9 or later is needed", version.0, version.1);
    }
    // `/` would expose the whole host, and `/usr` is readable anyway.
    let prefixes = [prefix, base].into_iter().filter(|p| is_mountable(p) && p != Path::new("/usr"));
    Ok(AcquiredInterpreter { program, prefixes: prefixes.collect() })
}
