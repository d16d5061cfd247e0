//! The sandbox of the `python` tool: setup, supervision and cleanup, all outside the server process (D-109).
//!
//! The server starts its own executable again with [`SUBCOMMAND`]. That process is the *supervisor*: it enters new
//! namespaces, starts the *init* process inside them and waits until the server closes the pipe or the init process
//! exits. The init process is process 1 of the PID namespace. It builds a private root file system, applies
//! Landlock and seccomp, starts the interpreter, relays its output, and checks the session's files after each call.
//! When it exits, the kernel kills all of its descendants.
//!
//! With a private root file system, all files of a session are in a tmpfs of limited size, so nothing needs to be
//! removed afterwards. Without one (`python.require` is not `full`) they are in a directory of the host, which
//! [`cleanup`] removes.

pub mod cleanup;
mod init;
mod landlock;
mod mounts;
mod namespaces;
pub mod plan;
mod seccomp;
mod supervisor;
mod usage;

use plan::{SUBCOMMAND, SandboxJob, SandboxReport, report};
use std::ffi::OsString;
use std::process::ExitCode;

/// Runs a helper job if the arguments of this process request one, and returns `None` otherwise. Must be called
/// before any thread is started: a multithreaded process cannot enter a user namespace.
pub fn dispatch(arguments: impl IntoIterator<Item = OsString>) -> Option<ExitCode> {
    let mut arguments = arguments.into_iter().skip(1);
    if arguments.next()? != SUBCOMMAND {
        return None;
    }
    let job = arguments.next().and_then(|text| serde_json::from_str(text.to_str()?).ok());
    let result = match job {
        Some(SandboxJob::Supervise(plan)) => supervisor::run(plan),
        Some(SandboxJob::Init(plan)) => init::run(&plan),
        Some(SandboxJob::Clean(scratch)) => cleanup::clean(&scratch).map_err(Into::into),
        None => {
            eprintln!("error: `{SUBCOMMAND}` is internal and can only be started by the server");
            return Some(ExitCode::FAILURE);
        }
    };
    Some(match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            // Ignored: the server may have closed the pipe.
            let _ = report(&mut std::io::stdout(), &SandboxReport::Refused(format!("{e:#}")));
            ExitCode::FAILURE
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_sandbox_subcommand_is_dispatched() {
        let run = |arguments: &[&str]| dispatch(arguments.iter().map(OsString::from));
        assert_eq!(run(&["tenure"]), None);
        assert_eq!(run(&["tenure", "serve"]), None);
        assert_eq!(run(&["tenure", SUBCOMMAND, "nonsense"]), Some(ExitCode::FAILURE));
    }
}
