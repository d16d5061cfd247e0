//! Where work on the file may be done without another thread: to wake one up takes longer than most of the work.

use tokio::runtime::{self, Handle, RuntimeFlavor};
use tokio::task;

/// A thread that may wait for the disk.
#[derive(Clone, Copy)]
pub(super) enum Seat {
    /// It runs one future and nothing else.
    Own,
    /// It runs tasks, and others can take them over.
    Worker,
}

impl Seat {
    /// Whether this thread is one. Not on a runtime of one thread, nor in a task of a `LocalSet`: others would have to wait too.
    pub fn here() -> Option<Self> {
        let flavor = Handle::try_current().ok()?.runtime_flavor();
        match (runtime::worker_index(), task::try_id()) {
            _ if flavor != RuntimeFlavor::MultiThread => None,
            (Some(_), _) => Some(Seat::Worker),
            (None, None) => Some(Seat::Own),
            (None, Some(_)) => None,
        }
    }

    /// Does work that may have to wait for the disk.
    pub fn wait<T>(self, work: impl FnOnce() -> T) -> T {
        match self {
            Seat::Own => work(),
            Seat::Worker => task::block_in_place(work),
        }
    }
}
