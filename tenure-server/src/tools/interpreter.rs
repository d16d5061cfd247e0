//! A running interpreter: starts it in its sandbox, sends calls to it and parses its answers.

use super::process_group::{Interrupter, ProcessGroup};
use super::sandbox::plan::{
    FROM_INTERPRETER, FROM_SANDBOX, Features, SUBCOMMAND, SandboxJob, SandboxPlan, SandboxReport,
};
use super::text::format_duration;
use crate::clock::Stopwatch;
use crate::config::tools::Require;
use anyhow::{Context, bail};
use serde::Deserialize;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{ChildStdin, ChildStdout, Command};

/// Timeout for starting a sandbox, and for starting the interpreter in it.
pub const TIME_TO_START: Duration = Duration::from_secs(20);
/// How long to wait for the removal of files, which continues in the background after that.
const TIME_TO_CLEAN: Duration = Duration::from_secs(10);

/// Result of waiting for an answer.
enum InterpreterEnded {
    Answered(InterpreterReply),
    /// The interpreter has exited, or must be ended.
    Died(String),
}

/// The answer to a call.
#[derive(Debug, Deserialize)]
pub struct InterpreterReply {
    pub text: String,
    pub failed: bool,
}

/// A parsed line of the sandbox's output.
enum ProtocolLine {
    /// Written by the interpreter, and therefore controlled by the code that runs in it.
    Answer(ProtocolMessage),
    /// Written by the sandbox itself.
    Report(SandboxReport),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ProtocolMessage {
    Answer {
        id: u64,
        #[serde(flatten)]
        answer: InterpreterReply,
    },
    Ready {
        ready: bool,
    },
}

/// Sets up a sandbox and ends it again. Returns the features that are enforced on this system.
pub async fn probe(helper: &Path, plan: SandboxPlan) -> anyhow::Result<Features> {
    let (process, features) = Process::confined(helper, plan, 1 << 16).await?;
    process.end().await;
    Ok(features)
}

/// Removes directories of the host that sandboxes have left behind, in a separate process.
pub async fn clean(helper: &Path, scratch: &Path) {
    let job = serde_json::to_string(&SandboxJob::Clean(scratch.to_owned())).expect("plain data");
    let mut command = Command::new(helper);
    command.arg(SUBCOMMAND).arg(job).env_clear().process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let result = match command.spawn() {
        Ok(mut child) => tokio::time::timeout(TIME_TO_CLEAN, child.wait()).await,
        Err(e) => Ok(Err(e)),
    };
    match result {
        Ok(Ok(status)) if status.success() => {}
        Ok(Ok(status)) => tracing::warn!(%status, "could not remove files of the Python tool"),
        Ok(Err(error)) => tracing::warn!(%error, "could not remove files of the Python tool"),
        Err(_) => tracing::debug!("files of the Python tool are still being removed"),
    }
}

/// A running interpreter in its sandbox.
pub struct Process {
    group: ProcessGroup,
    input: ChildStdin,
    output: ChildStdout,
    /// Buffered output that is not parsed yet.
    buffer: Vec<u8>,
    max_line: usize,
    calls: u64,
    state: InterpreterState,
    /// An answer whose usage check has not arrived yet.
    reply: Option<InterpreterReply>,
    /// Executable and directory for the cleanup. `None` if no files of the session are on the host.
    cleaner: Option<(PathBuf, PathBuf)>,
}

#[derive(Clone, Copy)]
enum InterpreterState {
    Idle,
    /// A call is being written. If that is cancelled here, the protocol is out of sync.
    Writing,
    /// A call was sent and its answer is outstanding.
    Sent(Stopwatch),
}

/// Outcome of a call.
pub enum CallOutcome {
    Done(InterpreterReply),
    Interrupted(InterpreterReply),
    Died(String),
}

/// Interrupts the interpreter if the future of a call is dropped before it has completed.
struct AbandonedCall(Option<Interrupter>);

impl Drop for AbandonedCall {
    fn drop(&mut self) {
        if let Some(interrupter) = self.0.take() {
            interrupter.interrupt();
        }
    }
}

impl Process {
    /// Starts a sandbox with an interpreter in it, and waits until the interpreter is ready.
    pub async fn start(helper: &Path, plan: SandboxPlan, max_line: usize) -> anyhow::Result<Self> {
        let (mut process, _) = Self::confined(helper, plan, max_line).await?;
        let ready = tokio::time::timeout(TIME_TO_START, process.line())
            .await
            .context("the interpreter did not start in time")?;
        match ready {
            Ok(ProtocolLine::Answer(ProtocolMessage::Ready { ready: true })) => Ok(process),
            Ok(ProtocolLine::Report(SandboxReport::Refused(reason) | SandboxReport::Ended(reason))) => {
                bail!("the interpreter failed to start: {reason}")
            }
            Ok(_) => bail!("unexpected message from the interpreter"),
            Err(reason) => bail!("the interpreter failed to start: {reason}"),
        }
    }

    /// Starts a sandbox, and waits until it is in force.
    async fn confined(helper: &Path, plan: SandboxPlan, max_line: usize) -> anyhow::Result<(Self, Features)> {
        let on_host = plan.require != Require::Full;
        let cleaner = on_host.then(|| (helper.to_owned(), plan.scratch.clone()));
        let mut command = Command::new(helper);
        command.arg(SUBCOMMAND).arg(serde_json::to_string(&SandboxJob::Supervise(plan))?).env_clear();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        command.process_group(0).kill_on_drop(true);
        let mut group = ProcessGroup::new(command.spawn().context("could not start the sandbox")?);
        let child = group.child();
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("the sandbox process has no pipes")
        };
        let state = InterpreterState::Idle;
        let reply = None;
        let mut process = Self { group, input, output, buffer: Vec::new(), max_line, calls: 0, state, reply, cleaner };
        match tokio::time::timeout(TIME_TO_START, process.line()).await.context("the sandbox did not start in time")? {
            Ok(ProtocolLine::Report(SandboxReport::Confined(features))) => Ok((process, features)),
            Ok(ProtocolLine::Report(SandboxReport::Refused(reason))) => bail!(reason),
            Ok(_) => bail!("unexpected message from the sandbox"),
            Err(reason) => bail!("the sandbox failed to start: {reason}"),
        }
    }

    /// Executes code and waits up to `limit` for the answer, then interrupts it and waits up to `grace` more. Dropping
    /// the future interrupts the call as well.
    pub async fn ask(&mut self, code: &str, limit: Duration, grace: Duration) -> CallOutcome {
        self.calls += 1;
        let mut abandoned = AbandonedCall(Some(self.group.interrupter()));
        let line = json!({"id": self.calls, "code": code}).to_string() + "\n";
        self.state = InterpreterState::Writing;
        let call = async {
            if self.input.write_all(line.as_bytes()).await.is_err() {
                return InterpreterEnded::Died("the interpreter had exited".into());
            }
            self.state = InterpreterState::Sent(Stopwatch::start());
            self.answer().await
        };
        let outcome = match tokio::time::timeout(limit, call).await {
            Ok(InterpreterEnded::Answered(answer)) => CallOutcome::Done(answer),
            Ok(InterpreterEnded::Died(reason)) => CallOutcome::Died(reason),
            Err(_) => {
                self.group.interrupter().interrupt();
                match tokio::time::timeout(grace, self.answer()).await {
                    Ok(InterpreterEnded::Answered(answer)) => CallOutcome::Interrupted(answer),
                    Ok(InterpreterEnded::Died(reason)) => CallOutcome::Died(reason),
                    Err(_) => CallOutcome::Died(format!(
                        "the call took longer than {} and could not be interrupted",
                        format_duration(limit)
                    )),
                }
            }
        };
        abandoned.0 = None;
        outcome
    }

    /// Waits up to `grace` for the answer to a cancelled call. Returns true if the interpreter is ready for the
    /// next one.
    pub async fn drain_cancelled_call(&mut self, grace: Duration) -> bool {
        match self.state {
            InterpreterState::Idle => true,
            InterpreterState::Writing => false,
            InterpreterState::Sent(_) => {
                matches!(tokio::time::timeout(grace, self.answer()).await, Ok(InterpreterEnded::Answered(_)))
            }
        }
    }

    /// Returns how long the answer to a cancelled call has been outstanding, or `None` if the interpreter is idle.
    pub fn outstanding_since_cancel(&self) -> Option<Duration> {
        match self.state {
            InterpreterState::Idle => None,
            InterpreterState::Writing => Some(Duration::MAX),
            InterpreterState::Sent(since) => Some(since.elapsed()),
        }
    }

    /// Reads the answer to the last call. Cancel-safe: after a drop, it can be called again.
    async fn answer(&mut self) -> InterpreterEnded {
        loop {
            match self.line().await {
                Ok(ProtocolLine::Answer(ProtocolMessage::Answer { id, answer })) if id == self.calls => {
                    self.reply = Some(answer)
                }
                Ok(ProtocolLine::Answer(_)) => {}
                Ok(ProtocolLine::Report(SandboxReport::Checked { exceeded: Some(limit) })) => {
                    return InterpreterEnded::Died(limit);
                }
                Ok(ProtocolLine::Report(SandboxReport::Ended(status))) => {
                    return InterpreterEnded::Died(format!("the interpreter exited ({status})"));
                }
                Ok(ProtocolLine::Report(_)) => {
                    if let Some(answer) = self.reply.take() {
                        self.state = InterpreterState::Idle;
                        return InterpreterEnded::Answered(answer);
                    }
                }
                Err(reason) => return InterpreterEnded::Died(reason),
            }
        }
    }

    async fn line(&mut self) -> Result<ProtocolLine, String> {
        loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                let parsed = match line.split_first() {
                    Some((&FROM_SANDBOX, report)) => serde_json::from_slice(report).map(ProtocolLine::Report),
                    Some((&FROM_INTERPRETER, answer)) => serde_json::from_slice(answer).map(ProtocolLine::Answer),
                    _ => return Err("invalid message from the sandbox".into()),
                };
                return parsed.map_err(|_| "invalid message from the interpreter".to_owned());
            }
            if self.buffer.len() > self.max_line {
                return Err("the interpreter's answer exceeds the maximum length".into());
            }
            match self.output.read_buf(&mut self.buffer).await {
                Ok(0) | Err(_) => return Err("the interpreter exited".into()),
                Ok(_) => {}
            }
        }
    }

    /// Ends the interpreter and all of its descendants. Its files disappear with the sandbox, or are removed by a
    /// separate process.
    pub async fn end(self) {
        let Self { group, input, output, cleaner, .. } = self;
        // The supervisor sees the closed pipe and ends the sandbox.
        drop((input, output));
        group.end().await;
        if let Some((helper, scratch)) = cleaner {
            clean(&helper, &scratch).await;
        }
    }
}
