//! The init process inside the sandbox: enforces every restriction, then starts the interpreter and relays its output.

use super::plan::{FROM_INTERPRETER, Features, Interpreter, ProcessLimits, SandboxPlan, SandboxReport, report};
use super::usage::{self, UsageLimit};
use super::{landlock, mounts, namespaces, seccomp};
use crate::config::tools::{Require, SESSION_DIRECTORY};
use anyhow::Context;
use rustix::process::{Pid, WaitOptions, WaitStatus, wait};
use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

/// The Python driver that runs in the interpreter.
const DRIVER: &str = include_str!("../python_driver.py");
/// Maximum number of bytes of the interpreter's output per read.
const CHUNK: usize = 64 << 10;
/// Timeout for each remaining chunk of output after the interpreter has exited.
const TIME_TO_DRAIN: Duration = Duration::from_millis(20);

/// Maximum number of chunks that are read after the interpreter has exited.
const MAX_DRAINED: usize = 64;

/// Location of the session's files, and how limits on them are enforced.
struct SandboxFiles {
    directory: PathBuf,
    enforced: UsageLimit,
}

/// Sets up the sandbox and runs the interpreter in it until it exits. Standard input and output are the pipes to
/// the server.
pub fn run(plan: &SandboxPlan) -> anyhow::Result<()> {
    signal_hook::flag::register(signal_hook::consts::SIGINT, Default::default())?;
    namespaces::guard();
    let stderr_file = memory_file().context("could not create a file for the output")?;
    let (features, files) = confine(plan)?;
    let mut output = std::io::stdout();
    report(&mut output, &SandboxReport::Confined(features))?;
    let Some(interpreter) = &plan.interpreter else { return Ok(()) };
    let processes = features.namespaces.then_some(plan.processes);
    let child = start(interpreter, processes, &files, stderr_file)
        .with_context(|| format!("cannot run {}", interpreter.program.display()))?;
    proxy_io(child, &mut output, || usage::exceeded(&files.directory, &plan.files, files.enforced))
}

/// Enforces every restriction that the system supports. Fails if a required one is missing.
fn confine(plan: &SandboxPlan) -> anyhow::Result<(Features, SandboxFiles)> {
    let mut features = Features { namespaces: plan.namespaces, ..Features::default() };
    if plan.namespaces {
        namespaces::configure(plan.processes);
        match mounts::enter(&plan.read, &plan.scratch, &plan.files) {
            Ok(()) => features.mounts = true,
            Err(missing) => plan.accept(missing, &[Require::Full])?,
        }
    }
    let files = if features.mounts {
        SandboxFiles { directory: SESSION_DIRECTORY.into(), enforced: UsageLimit::ByKernel }
    } else {
        let directory = plan.directory.clone().context("no directory for the session's files was provided")?;
        SandboxFiles { directory, enforced: UsageLimit::ByScan }
    };
    namespaces::drop_capabilities().context("could not drop capabilities")?;
    match landlock::restrict(&files.directory, &plan.read) {
        Ok(tcp) => (features.landlock, features.landlock_tcp) = (true, tcp),
        Err(missing) => plan.accept(missing, &[Require::Full, Require::Landlock])?,
    }
    let visible = if features.mounts { seccomp::VisibleFiles::Private } else { seccomp::VisibleFiles::Host };
    match seccomp::apply(visible) {
        Ok(()) => features.seccomp = true,
        Err(missing) => plan.accept(missing, &[Require::Full])?,
    }
    Ok((features, files))
}

/// Creates an in-memory file for the output of the code, so that the model sees the error even if the disk is full.
fn memory_file() -> std::io::Result<File> {
    #[cfg(target_os = "linux")]
    return Ok(rustix::fs::memfd_create("output", rustix::fs::MemfdFlags::CLOEXEC)?.into());
    #[cfg(not(target_os = "linux"))]
    tempfile::tempfile()
}

fn start(
    interpreter: &Interpreter,
    processes: Option<usize>,
    files: &SandboxFiles,
    stderr_file: File,
) -> std::io::Result<Child> {
    let limits = ProcessLimits { processes, ..interpreter.limits.clone() };
    let limits = serde_json::to_string(&limits)?;
    let mut command = Command::new(&interpreter.program);
    command.args(["-I", "-u", "-c", DRIVER, &limits]).env_clear().env("LANG", "C.UTF-8");
    command.env("HOME", &files.directory).env("TMPDIR", &files.directory).current_dir(&files.directory);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr_file).spawn()
}

enum InitEvent {
    Output(Vec<u8>),
    /// The interpreter itself has exited, as opposed to a process that it started.
    Exited(WaitStatus),
    /// The server has closed the pipe.
    InputClosed,
}

/// Relays calls and answers until the interpreter exits. Every line of the interpreter is prefixed and followed by
/// a check of the session's files.
fn proxy_io(mut child: Child, output: &mut impl Write, check: impl Fn() -> Option<String>) -> anyhow::Result<()> {
    let (events, received) = sync_channel(4);
    let (Some(calls), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
        anyhow::bail!("the interpreter has no pipes");
    };
    let interpreter =
        i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("the interpreter has no process id")?;
    let threads: [Box<dyn FnOnce() + Send>; 3] = [
        {
            let events = events.clone();
            Box::new(move || forward(calls, &events))
        },
        {
            let events = events.clone();
            Box::new(move || read(answers, &events))
        },
        Box::new(move || reap(interpreter, &events)),
    ];
    for thread in threads {
        std::thread::Builder::new().stack_size(256 << 10).spawn(thread)?;
    }
    write_lines(&received, output, check)?;
    Ok(())
}

fn forward(mut calls: impl Write, events: &SyncSender<InitEvent>) {
    // An error means that the interpreter is gone, which `reap` reports.
    if std::io::copy(&mut std::io::stdin(), &mut calls).is_ok() {
        let _ = events.send(InitEvent::InputClosed);
    }
}

fn read(mut answers: impl Read, events: &SyncSender<InitEvent>) {
    let mut chunk = vec![0; CHUNK];
    loop {
        match answers.read(&mut chunk) {
            Ok(0) => return,
            Ok(length) => {
                if events.send(InitEvent::Output(chunk[..length].to_vec())).is_err() {
                    return;
                }
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

fn reap(interpreter: Pid, events: &SyncSender<InitEvent>) {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == interpreter => {
                let _ = events.send(InitEvent::Exited(status));
                return;
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

fn write_lines(
    events: &Receiver<InitEvent>,
    output: &mut impl Write,
    check: impl Fn() -> Option<String>,
) -> std::io::Result<()> {
    let mut in_line = false;
    let mut write_tagged = |output: &mut dyn Write, bytes: &[u8]| -> std::io::Result<bool> {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            if !in_line {
                output.write_all(&[FROM_INTERPRETER])?;
            }
            output.write_all(part)?;
            in_line = !part.ends_with(b"\n");
            if !in_line {
                report(&mut &mut *output, &SandboxReport::Checked { exceeded: check() })?;
            }
        }
        output.flush()?;
        Ok(in_line)
    };
    let mut unfinished = false;
    let ended = loop {
        match events.recv() {
            Ok(InitEvent::Output(bytes)) => unfinished = write_tagged(output, &bytes)?,
            Ok(InitEvent::Exited(status)) => break describe_exit(status),
            Ok(InitEvent::InputClosed) | Err(_) => return Ok(()),
        }
    };
    // Drains output that was written before the exit. Bounded, because an orphaned child may keep the pipe open.
    for _ in 0..MAX_DRAINED {
        match events.recv_timeout(TIME_TO_DRAIN) {
            Ok(InitEvent::Output(bytes)) => unfinished = write_tagged(output, &bytes)?,
            Ok(_) => {}
            Err(_) => break,
        }
    }
    if unfinished {
        output.write_all(b"\n")?;
    }
    report(output, &SandboxReport::Ended(ended))
}

fn describe_exit(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => match signal_hook::low_level::signal_name(signal) {
            Some(name) => name.to_owned(),
            None => format!("signal {signal}"),
        },
        (None, None) => "for an unknown reason".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The interpreter cannot forge a report of the sandbox, whatever it writes.
    #[test]
    fn lines_are_prefixed() {
        let (events, received) = sync_channel(10);
        for bytes in ["{\"id\":1}\n!{\"ended\"", ":\"x\"}\n\n", "rest"] {
            events.send(InitEvent::Output(bytes.as_bytes().to_vec())).unwrap();
        }
        drop(events);
        let mut output = Vec::new();
        write_lines(&received, &mut output, || None).unwrap();
        let checked = r#"!{"checked":{"exceeded":null}}"#;
        let want = format!("+{{\"id\":1}}\n{checked}\n+!{{\"ended\":\"x\"}}\n{checked}\n+\n{checked}\n+rest");
        assert_eq!(String::from_utf8(output).unwrap(), want);
    }
}
