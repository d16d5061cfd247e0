//! The sandbox of the `python` tool: set-up, supervision and clean-up, all outside the server process.
//!
//! The server starts its own executable again with [`SUBCOMMAND`]. That process is the *supervisor*: it enters new namespaces, starts
//! the *init* process inside them and waits until the server closes the pipe or the init process ends. The init process is process 1
//! of the PID namespace. It builds a private root file system, applies Landlock and seccomp, starts the interpreter, relays its
//! output, and checks the session's files after each call. When it ends, the kernel ends everything that was started below it.
//!
//! With a private root file system all files of a session are in a tmpfs of limited size: there is nothing to remove afterwards.
//! Without one (`python.require` is not `full`) they are in a directory of the host, which [`cleanup`] removes.

pub mod cleanup;
mod init;
mod landlock;
mod mounts;
mod namespaces;
mod seccomp;
mod supervisor;
mod usage;

use crate::config::tools::Require;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// First argument of a process that the server starts for the sandbox. The second one is a [`Job`] as JSON.
pub const SUBCOMMAND: &str = "sandbox-helper";
/// Where the session's files are in a private root file system.
pub const SESSION_DIRECTORY: &str = "/session";
/// Begins a line of the interpreter.
pub const FROM_INTERPRETER: u8 = b'+';
/// Begins a line of the sandbox itself. The interpreter can not write such a line: the init process marks every line it relays.
pub const FROM_SANDBOX: u8 = b'!';

/// What a helper process is started for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Job {
    /// Run an interpreter.
    Supervise(Plan),
    /// Started by the supervisor inside the new namespaces.
    Init(Plan),
    /// Remove what earlier sandboxes left in this directory.
    Clean(PathBuf),
}

/// What to run, and in which limits.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// What must be enforced.
    pub require: Require,
    /// What to run once everything is enforced; without it, the sandbox is only set up, reported and ended.
    pub interpreter: Option<Interpreter>,
    /// Directories of the host that may be read, besides the system's programs and libraries.
    pub read: Vec<PathBuf>,
    /// The host's directory for temporary files.
    pub scratch: PathBuf,
    /// Limits on the session's files.
    pub files: FileLimits,
    /// Processes and threads.
    pub processes: usize,
    /// Whether the supervisor has entered new namespaces.
    #[serde(default)]
    pub namespaces: bool,
    /// The directory of the host for the session's files, unless a private root file system is required.
    #[serde(default)]
    pub directory: Option<PathBuf>,
}

/// A Python interpreter, and the limits that its driver sets before it runs any code.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Interpreter {
    /// Its executable.
    pub program: PathBuf,
    /// Limits of each of its processes.
    pub limits: ProcessLimits,
}

/// Limits of each process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProcessLimits {
    /// Bytes of address space.
    pub memory: u64,
    /// Bytes of a file that it writes.
    pub file: u64,
    /// Bytes of output that a call returns.
    pub output: u64,
    /// File descriptors.
    pub open_files: u32,
    /// Seconds of CPU time of one call on one core.
    pub seconds: u64,
    /// Processes and threads of the interpreter's user; `None` where that would count other programs of the user.
    #[serde(default)]
    pub processes: Option<usize>,
}

/// Limits on all files of a session together.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct FileLimits {
    /// Bytes on disk (`python.disk`).
    pub disk: u64,
    /// Files and directories (`python.max_files`).
    pub max_files: u64,
    /// Nested directories (`python.max_depth`).
    pub max_depth: usize,
}

/// What the sandbox tells the server, one JSON line each.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// Nothing was run; the text says which feature is missing and what to do.
    Refused(String),
    /// The sandbox is in force.
    Confined(Features),
    /// After each line of the interpreter: which limit on the session's files is exceeded, if any.
    Checked {
        /// In words for the model.
        exceeded: Option<String>,
    },
    /// The interpreter has ended, and how.
    Ended(String),
}

/// What is enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Features {
    /// User, PID, network, IPC and UTS namespaces: no network, no other processes.
    pub namespaces: bool,
    /// A private root file system: no other files.
    pub mounts: bool,
    /// Landlock rules on files.
    pub landlock: bool,
    /// Landlock rules on TCP.
    pub landlock_tcp: bool,
    /// A seccomp filter.
    pub seccomp: bool,
}

impl Features {
    /// Whether everything that `python.require: full` asks for is enforced.
    pub fn is_full(self) -> bool {
        self.namespaces && self.mounts && self.landlock && self.seccomp
    }
}

/// A feature that this system does not have or does not permit.
#[derive(Debug, thiserror::Error)]
#[error("{feature} can not be used ({detail}). {remedy}")]
pub struct Missing {
    feature: &'static str,
    detail: String,
    remedy: &'static str,
}

impl Missing {
    fn new(feature: &'static str, remedy: &'static str, detail: impl std::fmt::Display) -> Self {
        Self { feature, detail: detail.to_string(), remedy }
    }
}

impl Plan {
    /// Passes over a missing feature, unless this level of isolation needs it.
    fn accept(&self, missing: Missing, needed_by: &[Require]) -> anyhow::Result<()> {
        if needed_by.contains(&self.require) {
            anyhow::bail!("python.require is `{}`, but {missing}", self.require);
        }
        Ok(())
    }
}

/// Does the work of a helper process, if the arguments of this process ask for it. Must be called before any thread is started: a
/// process with threads can not enter a user namespace.
pub fn dispatch(arguments: impl IntoIterator<Item = OsString>) -> Option<ExitCode> {
    let mut arguments = arguments.into_iter().skip(1);
    if arguments.next()? != SUBCOMMAND {
        return None;
    }
    let job = arguments.next().and_then(|text| serde_json::from_str(text.to_str()?).ok());
    let done = match job {
        Some(Job::Supervise(plan)) => supervisor::run(plan),
        Some(Job::Init(plan)) => init::run(&plan),
        Some(Job::Clean(scratch)) => cleanup::clean(&scratch).map_err(Into::into),
        None => {
            eprintln!("error: `{SUBCOMMAND}` is started by the server only");
            return Some(ExitCode::FAILURE);
        }
    };
    Some(match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            // Nobody may be there to read it.
            let _ = report(&mut std::io::stdout(), &Report::Refused(format!("{e:#}")));
            ExitCode::FAILURE
        }
    })
}

fn report(output: &mut impl Write, report: &Report) -> std::io::Result<()> {
    let mut line = vec![FROM_SANDBOX];
    line.extend(serde_json::to_vec(report).expect("plain data"));
    line.push(b'\n');
    output.write_all(&line)?;
    output.flush()
}

/// This executable, also if its file was replaced since it was started.
pub fn own_executable() -> PathBuf {
    if cfg!(target_os = "linux") {
        return PathBuf::from("/proc/self/exe");
    }
    std::env::current_exe().unwrap_or_else(|_| PathBuf::from("tenure"))
}

/// Paths below none of the others.
fn topmost(mut paths: Vec<PathBuf>) -> Vec<PathBuf> {
    paths.sort();
    let mut kept: Vec<PathBuf> = Vec::new();
    for path in paths {
        if !kept.last().is_some_and(|above: &PathBuf| path.starts_with(above)) {
            kept.push(path);
        }
    }
    kept
}

/// Whether a path can be shown inside the sandbox.
pub fn is_mountable(path: &Path) -> bool {
    let plain = path.components().all(|part| !matches!(part, std::path::Component::ParentDir));
    path.is_absolute() && path.parent().is_some() && plain && !path.starts_with(SESSION_DIRECTORY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_paths_are_shown_once() {
        let paths = ["/usr/lib", "/usr", "/usr-local", "/a/b/c", "/a/b"].map(PathBuf::from).to_vec();
        assert_eq!(topmost(paths), ["/a/b", "/usr", "/usr-local"].map(PathBuf::from));
        let mountable = ["/usr", "/", "relative", "/a/../b", "/session/x"].map(|path| is_mountable(Path::new(path)));
        assert_eq!(mountable, [true, false, false, false, false]);
    }

    #[test]
    fn only_its_own_arguments_are_taken() {
        let run = |arguments: &[&str]| dispatch(arguments.iter().map(OsString::from));
        assert_eq!(run(&["tenure"]), None);
        assert_eq!(run(&["tenure", "serve"]), None);
        assert_eq!(run(&["tenure", SUBCOMMAND, "nonsense"]), Some(ExitCode::FAILURE));
    }
}
