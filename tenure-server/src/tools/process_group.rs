//! A program that we started, with everything that it starts itself.

use rustix::process::{Pid, Signal, kill_process_group};
use std::time::Duration;
use tokio::process::Child;

/// How long a program may take to end by itself once its input was closed.
const TIME_TO_END: Duration = Duration::from_secs(2);

/// The leader of a process group. When this is dropped, the whole group is killed.
#[derive(Debug)]
pub struct ProcessGroup {
    child: Child,
    id: Option<Pid>,
}

impl ProcessGroup {
    /// Takes over a child that was started with `process_group(0)`.
    pub fn of(child: Child) -> Self {
        let id = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        Self { child, id }
    }

    /// The leader.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// What interrupts it later.
    pub fn interrupter(&self) -> Interrupter {
        Interrupter { id: self.id }
    }

    /// Waits a moment for the leader to end by itself, then ends the group. Its input must have been closed.
    pub async fn end(mut self) {
        // Not `wait`: until the leader is reaped, its number is not given to another group.
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

    /// Whether the leader has ended, without reaping it.
    pub fn has_ended(&self) -> bool {
        use rustix::process::{WaitId, WaitIdOptions, waitid};
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        self.id.is_none_or(|id| !matches!(waitid(WaitId::Pid(id), look), Ok(None)))
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

/// Interrupts a group, as Ctrl-C does.
#[derive(Clone, Copy, Debug)]
pub struct Interrupter {
    id: Option<Pid>,
}

impl Interrupter {
    /// Interrupts it. Only while its [`ProcessGroup`] is there.
    pub fn interrupt(self) {
        if let Some(id) = self.id {
            let _ = kill_process_group(id, Signal::INT);
        }
    }
}
