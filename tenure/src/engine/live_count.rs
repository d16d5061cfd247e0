//! The number of live sessions, for `max_sessions`. Counting reads every head's index entry, so the count is
//! cached and updated with the changes that this process makes.

use crate::types::head::Head;
use crate::types::id::SessionKey;
use crate::types::status::Status;
use jiff::{SignedDuration, Timestamp};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The time for which a count is used. Changes by other nodes are seen after it at the latest.
pub(crate) const MAX_COUNT_AGE: SignedDuration = SignedDuration::from_secs(5);

/// The cached number of live sessions, and when it was counted. `None` means that it must be counted.
#[derive(Debug, Default)]
pub(crate) struct LiveCount(Mutex<Option<(u64, Timestamp)>>);

impl LiveCount {
    /// Locks the count.
    pub fn lock(&self) -> MutexGuard<'_, Option<(u64, Timestamp)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a session was created with this head, or changed to it from `previous`.
    pub fn record_change(&self, previous: Option<Status>, head: &Head) {
        let was_live = previous.is_some_and(Status::is_live);
        if let Some((count, _)) = &mut *self.lock() {
            *count = match (was_live, head.status.is_live()) {
                (false, true) => *count + 1,
                (true, false) => count.saturating_sub(1),
                _ => *count,
            };
        }
    }

    /// Discards the count: sessions were purged.
    pub fn forget(&self) {
        *self.lock() = None;
    }
}

/// The state of evictions by creations of sessions.
#[derive(Debug, Default)]
pub(crate) struct Eviction {
    /// The longest idle sessions when they were looked up, longest idle first.
    pub candidates: VecDeque<EvictionCandidate>,
    /// The time until which creations evict nothing, because a hook failed.
    pub retry_at: Option<Timestamp>,
}

/// A session that may be evicted if it has not been active since.
#[derive(Debug)]
pub(crate) struct EvictionCandidate {
    /// The session.
    pub key: SessionKey,
    /// Its last activity when it was looked up.
    pub active_at: Timestamp,
}
