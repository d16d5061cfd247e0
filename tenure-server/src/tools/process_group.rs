//! A child process together with all of its descendants in the same process group.

use rustix::process::{Pid, Signal, kill_process_group};
use std::time::Duration;
use tokio::process::Child;

/// Grace period for a process to exit by itself after its input was closed.
const TIME_TO_END: Duration = Duration::from_secs(2);

/// Owner of a process group. Dropping it kills the whole group.
#[derive(Debug)]
pub struct ProcessGroup {
    child: Child,
    id: Option<Pid>,
}

impl ProcessGroup {
    /// Takes ownership of a child that was started with `process_group(0)`.
    pub fn new(child: Child) -> Self {
        let id = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        Self { child, id }
    }

    /// Returns the leader of the group.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Returns a handle that can interrupt the group later.
    pub fn interrupter(&self) -> Interrupter {
        Interrupter { id: self.id }
    }

    /// Waits up to two seconds for the leader to exit by itself, then kills the group. Its input must already be
    /// closed.
    pub async fn end(mut self) {
        // Not `wait`: until the leader is reaped, its process id cannot be reused by another group.
        let mut pause = Duration::from_millis(2);
        let mut waited = Duration::ZERO;
        while waited < TIME_TO_END && !self.has_ended() {
            tokio::time::sleep(pause).await;
            waited += pause;
            pause = (pause * 2).min(Duration::from_millis(50));
        }
        self.kill();
        let _ = self.child.wait().await;
    }

    /// Returns true if the leader has exited, without reaping it.
    pub fn has_ended(&self) -> bool {
        use rustix::process::{WaitId, WaitIdOptions, waitid};
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        self.id.is_none_or(|id| !matches!(waitid(WaitId::Pid(id), options), Ok(None)))
    }

    fn kill(&mut self) {
        if let Some(id) = self.id.take() {
            let _ = kill_process_group(id, Signal::KILL);
        }
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Handle that sends SIGINT to a process group.
#[derive(Clone, Copy, Debug)]
pub struct Interrupter {
    id: Option<Pid>,
}

impl Interrupter {
    /// Sends SIGINT to the group. Must be called only while its [`ProcessGroup`] exists, because the process id may
    /// be reused afterwards.
    pub fn interrupt(self) {
        if let Some(id) = self.id {
            let _ = kill_process_group(id, Signal::INT);
        }
    }
}
