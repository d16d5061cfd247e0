//! The checkpoint of an idle store: the write-ahead log of a store without writes does not stay
//! large (D-171).
//!
//! SQLite copies the write-ahead log into the main file every 4000 pages, and then overwrites it
//! from the beginning; the file keeps its size of 16 MB. Truncating it after each commit would cost
//! every commit the extension of the file. So the writer thread does it when no write has come for
//! [`IDLE_TIME`]: it first copies the pages on a connection of its own, while commits may proceed,
//! and then truncates the file, for which nothing is left to copy.

use crate::store::sqlite::database::Database;
use std::time::Duration;

/// The time without a write after which the write-ahead log is truncated.
const IDLE_TIME: Duration = Duration::from_secs(1);

/// Maximum time until the next attempt, if readers need the write-ahead log.
const MAX_RETRY_TIME: Duration = Duration::from_secs(60);

/// Size up to which a write-ahead log is left alone: a store with a write now and then does not
/// extend the file at each of them.
const KEPT_BYTES: u64 = 256 << 10;

/// Decides when the writer thread truncates the write-ahead log.
pub(super) struct IdleCheckpoint {
    file: Database,
    /// The number of batches when the thread last looked.
    seen_batches: u64,
    retry_time: Duration,
}

/// What the writer thread does next.
#[derive(Debug, PartialEq)]
pub(super) enum IdleStep {
    /// There is nothing to truncate.
    Sleep,
    /// Wait for this time, and look again.
    Wait(Duration),
    /// The write-ahead log is in the main file: truncate it, unless a write is in progress.
    Truncate,
}

impl IdleCheckpoint {
    pub fn new(file: Database) -> Self {
        // The log that an earlier process has left counts as a write.
        Self { file, seen_batches: u64::MAX, retry_time: IDLE_TIME }
    }

    /// Returns the next step after `batches` batches of writes. Copies pages if no write came since
    /// the previous call.
    pub fn next_step(&mut self, batches: u64) -> IdleStep {
        let is_idle = self.seen_batches == batches;
        self.seen_batches = batches;
        if !is_idle {
            self.retry_time = IDLE_TIME;
            return IdleStep::Wait(IDLE_TIME);
        }
        if self.file.wal_bytes() <= KEPT_BYTES {
            return IdleStep::Sleep;
        }
        match self.file.copy_wal() {
            Ok(true) => IdleStep::Truncate,
            Ok(false) => self.wait_longer(),
            Err(error) => {
                tracing::debug!(%error, "could not copy SQLite's write-ahead log into the main file");
                self.wait_longer()
            }
        }
    }

    /// Waits twice as long as before: a reader needs the write-ahead log.
    pub fn wait_longer(&mut self) -> IdleStep {
        let wait = self.retry_time;
        self.retry_time = (wait * 2).min(MAX_RETRY_TIME);
        IdleStep::Wait(wait)
    }
}
