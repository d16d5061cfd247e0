//! The supervisor process between the server and the sandbox. It ends the sandbox when the server closes the pipe,
//! which also happens when the server is killed.

use super::plan::{SUBCOMMAND, SandboxJob, SandboxPlan};
use super::{cleanup, namespaces};
use crate::config::tools::{Require, own_executable};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Signal, getpgrp, kill_process_group};
use std::process::Command;
use std::sync::Arc;

/// Runs one sandbox from setup to end. Standard input and output are the pipes to the server.
pub fn run(mut plan: SandboxPlan) -> anyhow::Result<()> {
    // The server sends SIGINT to the process group; it is meant for the interpreter, so it is ignored here.
    signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::default())?;
    // Locked until this process exits, so that `cleanup` does not treat it as abandoned.
    let directory = match plan.require {
        Require::Full => None,
        Require::Landlock | Require::None => Some(cleanup::Directory::create(&plan.scratch)?),
    };
    plan.directory = directory.as_ref().map(|directory| directory.files());
    plan.namespaces = match namespaces::enter() {
        Ok(()) => true,
        Err(missing) => {
            plan.accept(missing, &[Require::Full])?;
            false
        }
    };
    let namespaces = plan.namespaces;
    let job = serde_json::to_string(&SandboxJob::Init(plan))?;
    // The write end is closed when the init process exits, because no other process holds it.
    let (liveness_reader, liveness_writer) = std::io::pipe()?;
    let mut init = Command::new(own_executable()).args([SUBCOMMAND, &job]).stderr(liveness_writer).spawn()?;
    let input = std::io::stdin();
    loop {
        // No requested events: only hang-ups of the other end are reported.
        let mut ends = [PollFd::new(&input, PollFlags::empty()), PollFd::new(&liveness_reader, PollFlags::empty())];
        match poll(&mut ends, None) {
            Err(rustix::io::Errno::INTR) => {}
            _ => break,
        }
    }
    let _ = init.kill();
    let _ = init.wait();
    if !namespaces {
        // Without a PID namespace, other processes may survive. This kills the supervisor, too.
        let _ = kill_process_group(getpgrp(), Signal::KILL);
    }
    Ok(())
}
