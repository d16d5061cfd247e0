//! Detects where blocking is allowed, so that short work on the file needs no other thread: waking
//! one takes longer than most of the work.

use tokio::runtime::{self, Handle, RuntimeFlavor};
use tokio::task;

/// A thread context in which blocking on the disk is allowed.
#[derive(Clone, Copy)]
pub(super) enum BlockingContext {
    /// A thread that runs a single future and nothing else (`block_on`).
    Dedicated,
    /// A worker thread of a multi-thread runtime, whose other tasks can move to another worker.
    Worker,
}

impl BlockingContext {
    /// Returns how this thread may block, or `None` if it must not: on a current-thread runtime or
    /// in a `LocalSet`, blocking would stall other tasks.
    pub fn current() -> Option<Self> {
        let flavor = Handle::try_current().ok()?.runtime_flavor();
        match (runtime::worker_index(), task::try_id()) {
            _ if flavor != RuntimeFlavor::MultiThread => None,
            (Some(_), _) => Some(BlockingContext::Worker),
            (None, None) => Some(BlockingContext::Dedicated),
            (None, Some(_)) => None,
        }
    }

    /// Runs work that may block on the disk.
    pub fn run_blocking<T>(self, work: impl FnOnce() -> T) -> T {
        match self {
            BlockingContext::Dedicated => work(),
            BlockingContext::Worker => task::block_in_place(work),
        }
    }
}
