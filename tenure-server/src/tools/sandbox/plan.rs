//! Messages between the server and the processes of a sandbox: the job, its limits, and reports about what is enforced.

use crate::config::tools::Require;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::PathBuf;

/// First argument of a helper process that the server starts for the sandbox. The second one is a [`SandboxJob`] as
/// JSON.
pub const SUBCOMMAND: &str = "sandbox-helper";
/// First byte of a line that the interpreter wrote.
pub const FROM_INTERPRETER: u8 = b'+';
/// First byte of a line that the sandbox itself wrote. The interpreter cannot forge such a line, because the init
/// process prefixes every line it relays with [`FROM_INTERPRETER`].
pub const FROM_SANDBOX: u8 = b'!';

/// The job of a helper process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxJob {
    /// Supervise a sandbox that runs an interpreter.
    Supervise(SandboxPlan),
    /// Act as the init process. Started by the supervisor inside the new namespaces.
    Init(SandboxPlan),
    /// Remove directories that earlier sandboxes left in this directory.
    Clean(PathBuf),
}

/// Configuration of one sandbox: the program to run and its limits.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SandboxPlan {
    /// The required level of isolation.
    pub require: Require,
    /// The interpreter to run once everything is enforced. `None` means that the sandbox is only set up, reported
    /// and ended.
    pub interpreter: Option<Interpreter>,
    /// Directories of the host that are readable, in addition to the system's programs and libraries.
    pub read: Vec<PathBuf>,
    /// The host's directory for temporary files.
    pub scratch: PathBuf,
    /// Limits on the session's files.
    pub files: FileLimits,
    /// Maximum number of processes and threads.
    pub processes: usize,
    /// Whether the supervisor has entered new namespaces.
    #[serde(default)]
    pub namespaces: bool,
    /// The directory of the host for the session's files. `None` if a private root file system is required.
    #[serde(default)]
    pub directory: Option<PathBuf>,
}

/// A Python interpreter, and the limits that its driver sets before it runs any code.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Interpreter {
    /// Path of the executable.
    pub program: PathBuf,
    /// Limits of each process.
    pub limits: ProcessLimits,
}

/// Resource limits of each process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProcessLimits {
    /// Maximum address space in bytes.
    pub memory: u64,
    /// Maximum size in bytes of a file that the process writes.
    pub file: u64,
    /// Maximum number of bytes of output that a call returns.
    pub output: u64,
    /// Maximum number of open file descriptors.
    pub open_files: u32,
    /// Maximum CPU time in seconds of one call on one core.
    pub seconds: u64,
    /// Maximum number of processes and threads of the interpreter's user. `None` where that limit would also count
    /// other programs of the user.
    #[serde(default)]
    pub processes: Option<usize>,
}

/// Limits on the total of all files of a session.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct FileLimits {
    /// Maximum bytes on disk (`python.disk`).
    pub disk: u64,
    /// Maximum number of files and directories (`python.max_files`).
    pub max_files: u64,
    /// Maximum depth of nested directories (`python.max_depth`).
    pub max_depth: usize,
}

/// A message from the sandbox to the server, serialized as one JSON line.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxReport {
    /// Nothing was run. The text says which feature is missing and how to fix it.
    Refused(String),
    /// The sandbox is in force.
    Confined(Features),
    /// Result of the check after each line of the interpreter.
    Checked {
        /// The exceeded limit on the session's files, worded for the model. `None` means that no limit is exceeded.
        exceeded: Option<String>,
    },
    /// The interpreter has exited; the text is its exit code or signal.
    Ended(String),
}

/// Isolation features that are enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Features {
    /// User, PID, network, IPC and UTS namespaces: no network access, and other processes are invisible.
    pub namespaces: bool,
    /// A private root file system: other files of the host are invisible.
    pub mounts: bool,
    /// Landlock rules on file access.
    pub landlock: bool,
    /// Landlock rules on TCP.
    pub landlock_tcp: bool,
    /// A seccomp filter.
    pub seccomp: bool,
}

impl Features {
    /// Returns true if everything that `python.require: full` requires is enforced.
    pub fn is_full(self) -> bool {
        self.namespaces && self.mounts && self.landlock && self.seccomp
    }
}

/// A feature that this system lacks or does not permit.
#[derive(Debug, thiserror::Error)]
#[error("{feature} is not available ({detail}). {remedy}")]
pub struct MissingFeature {
    feature: &'static str,
    detail: String,
    remedy: &'static str,
}

impl MissingFeature {
    pub(super) fn new(feature: &'static str, remedy: &'static str, detail: impl std::fmt::Display) -> Self {
        Self { feature, detail: detail.to_string(), remedy }
    }
}

impl SandboxPlan {
    /// Tolerates a missing feature, unless the configured level of isolation requires it.
    pub(super) fn accept(&self, missing: MissingFeature, needed_by: &[Require]) -> anyhow::Result<()> {
        if needed_by.contains(&self.require) {
            anyhow::bail!("python.require is `{}`, but {missing}", self.require);
        }
        Ok(())
    }
}

/// Writes one report line to the server and flushes it.
pub(super) fn report(output: &mut impl Write, report: &SandboxReport) -> std::io::Result<()> {
    let mut line = vec![FROM_SANDBOX];
    line.extend(serde_json::to_vec(report).expect("plain data"));
    line.push(b'\n');
    output.write_all(&line)?;
    output.flush()
}

/// Returns the paths that are not below any of the others.
pub(super) fn topmost(mut paths: Vec<PathBuf>) -> Vec<PathBuf> {
    paths.sort();
    let mut outermost: Vec<PathBuf> = Vec::new();
    for path in paths {
        if !outermost.last().is_some_and(|above: &PathBuf| path.starts_with(above)) {
            outermost.push(path);
        }
    }
    outermost
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_paths_are_shown_once() {
        let paths = ["/usr/lib", "/usr", "/usr-local", "/a/b/c", "/a/b"].map(PathBuf::from).to_vec();
        assert_eq!(topmost(paths), ["/a/b", "/usr", "/usr-local"].map(PathBuf::from));
    }
}
