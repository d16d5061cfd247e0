//! Quotas: how many sessions and bytes a caller may have stored.
//!
//! Usage is summed up from the heads of the sessions and counted on from there, so that a check usually reads nothing. Other nodes'
//! writes and deletions are seen with the next sum: a quota may be exceeded by what they write within [`FRESH`].

use crate::types::entry::Entry;
use crate::types::error::{Error, Result};
use crate::types::id::{Tenant, User};
use crate::types::quota::{Quota, QuotaScope};
use jiff::{SignedDuration, Timestamp};
use quick_cache::sync::Cache;
use std::sync::Arc;
use tokio::sync::Mutex;

/// A sum is trusted for so long.
pub(crate) const FRESH: SignedDuration = SignedDuration::from_secs(60);
/// A request is refused only by a sum that is not older than this: what was deleted since must count.
pub(crate) const FRESH_REFUSAL: SignedDuration = SignedDuration::from_secs(5);
/// Sums are kept for so many users and tenants.
pub(crate) const MAX_CACHED: usize = 10_000;
/// Heads that are read at once.
pub(crate) const PAGE: usize = 1000;

/// What is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Sessions that are active or paused.
    pub sessions: u64,
    /// Bytes of messages and media.
    pub bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Sum {
    pub usage: Usage,
    pub at: Timestamp,
}

/// A tenant, or one of its users.
pub(crate) type ScopeKey = (Tenant, Option<User>);

/// The sums of users and tenants that have quotas.
#[derive(Debug)]
pub(crate) struct UsageCache(pub Cache<ScopeKey, Arc<Mutex<Option<Sum>>>>);

impl Default for UsageCache {
    fn default() -> Self {
        Self(Cache::new(MAX_CACHED))
    }
}

impl Quota {
    /// Refuses what would exceed it.
    pub(crate) fn check(&self, more: Usage, total: Usage) -> Result<()> {
        let whose = match self.scope {
            QuotaScope::User => "this user",
            QuotaScope::Tenant => "this tenant",
        };
        let limits = [
            ("max_sessions", "sessions", self.max_sessions, more.sessions, total.sessions),
            ("max_stored_bytes", "bytes", self.max_stored_bytes, more.bytes, total.bytes),
        ];
        for (limit, what, max, more, total) in limits {
            if let Some(max) = max
                && more > 0
                && total > max
            {
                return Err(Error::QuotaExceeded { whose, what, limit, max, used: total - more });
            }
        }
        Ok(())
    }
}

/// The bytes that entries add to what is stored.
pub(crate) fn stored_bytes<'a>(entries: impl Iterator<Item = &'a Entry>) -> u64 {
    let bytes = |entry: &Entry| match entry {
        Entry::Message(post) => post.message.stored_len(),
        _ => 0,
    };
    entries.map(bytes).sum()
}
