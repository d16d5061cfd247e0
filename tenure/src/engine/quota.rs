//! Quotas: how many sessions and bytes a caller may have stored.
//!
//! Usage is summed up from the heads of the sessions and counted on from there, so that a check usually reads nothing. Other nodes'
//! writes and deletions are seen with the next sum: a quota may be exceeded by what they write within [`FRESH`].

use crate::error::{Error, Result};
use crate::store::query::{Cursor, Query, Whose};
use crate::tenure::Tenure;
use crate::types::entry::{Entry, Record};
use crate::types::id::{Principal, Tenant, User};
use crate::types::quota::{Quota, QuotaScope};
use jiff::{SignedDuration, Timestamp};
use quick_cache::sync::Cache;
use std::sync::Arc;
use tokio::sync::Mutex;

/// A sum is trusted for so long.
const FRESH: SignedDuration = SignedDuration::from_secs(60);
/// A request is refused only by a sum that is not older than this: what was deleted since must count.
const FRESH_REFUSAL: SignedDuration = SignedDuration::from_secs(5);
/// Sums are kept for so many users and tenants.
const MAX_CACHED: usize = 10_000;
/// Heads that are read at once.
const PAGE: usize = 1000;

/// What is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Sessions that are active or paused.
    pub sessions: u64,
    /// Bytes of messages and media.
    pub bytes: u64,
}

#[derive(Debug)]
struct Sum {
    usage: Usage,
    at: Timestamp,
}

/// A tenant, or one of its users.
type ScopeKey = (Tenant, Option<User>);

/// The sums of users and tenants that have quotas.
#[derive(Debug)]
pub(crate) struct UsageCache(Cache<ScopeKey, Arc<Mutex<Option<Sum>>>>);

impl Default for UsageCache {
    fn default() -> Self {
        Self(Cache::new(MAX_CACHED))
    }
}

impl Tenure {
    /// What is stored of a user, or of a whole tenant.
    pub async fn usage(&self, who: &Principal, scope: QuotaScope) -> Result<Usage> {
        let whose = match scope {
            QuotaScope::User => Whose::User(who.tenant.clone(), who.user.clone()),
            QuotaScope::Tenant => Whose::Tenant(who.tenant.clone()),
        };
        let (mut usage, mut cursor) = (Usage::default(), None::<Cursor>);
        loop {
            let page = self.store().heads(&Query { cursor, ..Query::new(whose.clone(), PAGE) }).await?;
            for head in &page {
                usage.sessions += u64::from(self.status_of(head).is_live());
                usage.bytes += head.stored_bytes.unwrap_or(0);
            }
            match page.last() {
                Some(last) if page.len() == PAGE => cursor = Some(Cursor::of(last)),
                _ => return Ok(usage),
            }
        }
    }

    /// Counts a new session with its first records, or refuses it.
    pub(crate) async fn reserve_session<'a>(
        &self,
        who: &Principal,
        records: impl Iterator<Item = &'a Record>,
    ) -> Result<()> {
        self.reserve(who, Usage { sessions: 1, bytes: stored_bytes(records.map(|r| &r.entry)) }).await
    }

    /// Counts what is going to be stored, or refuses it.
    pub(crate) async fn reserve(&self, who: &Principal, more: Usage) -> Result<()> {
        let Some(quota) = who.quota else { return Ok(()) };
        let sum = self.cached_sum(who, quota.scope);
        let mut sum = sum.lock().await;
        for max_age in [FRESH, FRESH_REFUSAL] {
            let now = self.now();
            let current = match &mut *sum {
                Some(current) if now.duration_since(current.at).abs() < max_age => current,
                stale => stale.insert(Sum { usage: self.usage(who, quota.scope).await?, at: now }),
            };
            let total = Usage {
                sessions: current.usage.sessions + more.sessions,
                bytes: current.usage.bytes.saturating_add(more.bytes),
            };
            let refused = quota.check(more, total);
            if refused.is_ok() {
                current.usage = total;
                return Ok(());
            }
            if max_age == FRESH_REFUSAL {
                return refused;
            }
        }
        Ok(())
    }
}

impl Tenure {
    /// Counts what is stored in any case.
    pub(crate) async fn count(&self, who: &Principal, more: Usage) {
        let Some(quota) = who.quota else { return };
        if let Some(sum) = &mut *self.cached_sum(who, quota.scope).lock().await {
            sum.usage.sessions += more.sessions;
            sum.usage.bytes = sum.usage.bytes.saturating_add(more.bytes);
        }
    }

    fn cached_sum(&self, who: &Principal, scope: QuotaScope) -> Arc<Mutex<Option<Sum>>> {
        let user = (scope == QuotaScope::User).then(|| who.user.clone());
        let empty = || Ok::<_, std::convert::Infallible>(Arc::default());
        match self.usage_cache().0.get_or_insert_with(&(who.tenant.clone(), user), empty) {
            Ok(sum) => sum,
            Err(never) => match never {},
        }
    }
}

impl Quota {
    fn check(&self, more: Usage, total: Usage) -> Result<()> {
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
