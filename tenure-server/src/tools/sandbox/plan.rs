//! What the processes of a sandbox tell each other: what to run, in which limits, and what is enforced.

use crate::config::tools::Require;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::PathBuf;

/// First argument of a process that the server starts for the sandbox. The second one is a [`SandboxJob`] as JSON.
pub const SUBCOMMAND: &str = "sandbox-helper";
/// Begins a line of the interpreter.
pub const FROM_INTERPRETER: u8 = b'+';
/// Begins a line of the sandbox itself. The interpreter can not write such a line: the init process marks every line it relays.
pub const FROM_SANDBOX: u8 = b'!';

/// What a helper process is started for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxJob {
    /// Run an interpreter.
    Supervise(SandboxPlan),
    /// Started by the supervisor inside the new namespaces.
    Init(SandboxPlan),
    /// Remove what earlier sandboxes left in this directory.
    Clean(PathBuf),
}

/// What to run, and in which limits.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SandboxPlan {
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
pub enum SandboxReport {
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
    /// Passes over a missing feature, unless this level of isolation needs it.
    pub(super) fn accept(&self, missing: MissingFeature, needed_by: &[Require]) -> anyhow::Result<()> {
        if needed_by.contains(&self.require) {
            anyhow::bail!("python.require is `{}`, but {missing}", self.require);
        }
        Ok(())
    }
}

/// Writes one line for the server.
pub(super) fn report(output: &mut impl Write, report: &SandboxReport) -> std::io::Result<()> {
    let mut line = vec![FROM_SANDBOX];
    line.extend(serde_json::to_vec(report).expect("plain data"));
    line.push(b'\n');
    output.write_all(&line)?;
    output.flush()
}

/// Paths below none of the others.
pub(super) fn topmost(mut paths: Vec<PathBuf>) -> Vec<PathBuf> {
    paths.sort();
    let mut kept: Vec<PathBuf> = Vec::new();
    for path in paths {
        if !kept.last().is_some_and(|above: &PathBuf| path.starts_with(above)) {
            kept.push(path);
        }
    }
    kept
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
