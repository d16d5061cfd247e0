//! Quotas: how many sessions and bytes a user or tenant may have stored.
//!
//! Usage is the sum over the heads of the sessions, updated incrementally in the cache, so that a
//! check usually reads nothing. Writes and deletions by other nodes are seen with the next sum: a
//! quota may be exceeded by what they write within [`MAX_SUM_AGE`] (D-105).

use crate::types::entry::Entry;
use crate::types::error::{Error, Result};
use crate::types::id::{Tenant, User};
use crate::types::quota::{Quota, QuotaScope};
use jiff::{SignedDuration, Timestamp};
use quick_cache::sync::Cache;
use std::sync::Arc;
use tokio::sync::Mutex;

/// The time for which a cached sum is used.
pub(crate) const MAX_SUM_AGE: SignedDuration = SignedDuration::from_secs(60);
/// The maximum age of a sum by which a request is refused: recent deletions must be taken into account.
pub(crate) const MAX_SUM_AGE_FOR_REFUSAL: SignedDuration = SignedDuration::from_secs(5);
/// The maximum number of users and tenants whose sums are cached.
pub(crate) const MAX_CACHED: usize = 10_000;
/// The number of heads that are read in one page.
pub(crate) const PAGE: usize = 1000;

/// The stored amount of data of a user or tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// The number of active and paused sessions.
    pub sessions: u64,
    /// The number of bytes of messages and media.
    pub bytes: u64,
}

/// A sum of usage, and the time at which it was computed.
#[derive(Debug)]
pub(crate) struct CachedUsage {
    /// The sum, including reservations since it was computed.
    pub usage: Usage,
    /// The time at which the heads were read.
    pub at: Timestamp,
}

/// A tenant, or one of its users: the scope of a quota.
pub(crate) type ScopeKey = (Tenant, Option<User>);

/// The cached sums of users and tenants that have quotas.
#[derive(Debug)]
pub(crate) struct UsageCache(pub Cache<ScopeKey, Arc<Mutex<Option<CachedUsage>>>>);

impl Default for UsageCache {
    fn default() -> Self {
        Self(Cache::new(MAX_CACHED))
    }
}

impl Quota {
    /// Checks the limits: `total` includes `more`, and only what grows is checked. Returns an error
    /// if a limit would be exceeded.
    pub(crate) fn check(&self, more: Usage, total: Usage) -> Result<()> {
        let owner = match self.scope {
            QuotaScope::User => "this user",
            QuotaScope::Tenant => "this tenant",
        };
        let limits = [
            ("max_sessions", "sessions", self.max_sessions, more.sessions, total.sessions),
            ("max_stored_bytes", "bytes", self.max_stored_bytes, more.bytes, total.bytes),
        ];
        for (limit, unit, max, more, total) in limits {
            if let Some(max) = max
                && more > 0
                && total > max
            {
                return Err(Error::QuotaExceeded { owner, resource: unit, limit, max, used: total - more });
            }
        }
        Ok(())
    }
}

/// The number of bytes that entries add to the stored amount.
pub(crate) fn stored_bytes<'a>(entries: impl Iterator<Item = &'a Entry>) -> u64 {
    let bytes = |entry: &Entry| match entry {
        Entry::Message(post) => post.message.stored_len(),
        _ => 0,
    };
    entries.map(bytes).sum()
}
