//! Computes the stored amount of a principal, and enforces its quota.

use crate::engine::core::Engine;
use crate::engine::live_count::MAX_COUNT_AGE;
use crate::engine::quota::{CachedUsage, MAX_SUM_AGE, MAX_SUM_AGE_FOR_REFUSAL, PAGE, Usage, stored_bytes};
use crate::store::query::{OwnerFilter, SessionCursor, SessionQuery};
use crate::types::entry::Record;
use crate::types::error::Result;
use crate::types::id::Principal;
use crate::types::quota::QuotaScope;
use std::sync::Arc;
use tokio::sync::Mutex;

impl Engine {
    /// The number of active and paused sessions of all tenants, at most [`MAX_COUNT_AGE`] old.
    pub(crate) async fn live_sessions(&self) -> Result<u64> {
        let now = self.now();
        if let Some((count, at)) = *self.live_count().lock()
            && now.duration_since(at).abs() < MAX_COUNT_AGE
        {
            return Ok(count);
        }
        let counts = self.store().count().await?;
        let live = counts.iter().filter(|(status, _)| status.is_live()).map(|(_, n)| n).sum();
        *self.live_count().lock() = Some((live, now));
        Ok(live)
    }

    /// Sums the stored amount of a user or of a whole tenant over the heads of its sessions.
    pub async fn usage(&self, principal: &Principal, scope: QuotaScope) -> Result<Usage> {
        let owner_filter = match scope {
            QuotaScope::User => OwnerFilter::User(principal.tenant.clone(), principal.user.clone()),
            QuotaScope::Tenant => OwnerFilter::Tenant(principal.tenant.clone()),
        };
        let mut usage = Usage::default();
        let mut cursor = None::<SessionCursor>;
        loop {
            let page =
                self.store().heads(&SessionQuery { cursor, ..SessionQuery::new(owner_filter.clone(), PAGE) }).await?;
            for head in &page {
                usage.sessions += u64::from(self.status_of(head).is_live());
                usage.bytes += head.stored_bytes;
            }
            match page.last() {
                Some(last) if page.len() == PAGE => cursor = Some(SessionCursor::of(last)),
                _ => return Ok(usage),
            }
        }
    }

    /// Reserves quota for a new session with its first records. It is an error if the quota would
    /// be exceeded.
    pub(crate) async fn reserve_session<'a>(
        &self,
        principal: &Principal,
        records: impl Iterator<Item = &'a Record>,
    ) -> Result<()> {
        self.reserve(principal, Usage { sessions: 1, bytes: stored_bytes(records.map(|r| &r.entry)) }).await
    }

    /// Reserves quota for data that is about to be stored. It is an error if the quota would be exceeded.
    pub(crate) async fn reserve(&self, principal: &Principal, more: Usage) -> Result<()> {
        let Some(quota) = principal.quota else { return Ok(()) };
        let sum = self.cached_sum(principal, quota.scope);
        let mut sum = sum.lock().await;
        for max_age in [MAX_SUM_AGE, MAX_SUM_AGE_FOR_REFUSAL] {
            let now = self.now();
            let current = match &mut *sum {
                Some(current) if now.duration_since(current.at).abs() < max_age => current,
                stale => stale.insert(CachedUsage { usage: self.usage(principal, quota.scope).await?, at: now }),
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
            if max_age == MAX_SUM_AGE_FOR_REFUSAL {
                return refused;
            }
        }
        Ok(())
    }

    /// Adds data to the usage that is stored even if it exceeds the quota.
    pub(crate) async fn add_usage(&self, principal: &Principal, more: Usage) {
        let Some(quota) = principal.quota else { return };
        if let Some(sum) = &mut *self.cached_sum(principal, quota.scope).lock().await {
            sum.usage.sessions += more.sessions;
            sum.usage.bytes = sum.usage.bytes.saturating_add(more.bytes);
        }
    }

    /// The cached sum of a principal's user or tenant.
    pub fn cached_sum(&self, principal: &Principal, scope: QuotaScope) -> Arc<Mutex<Option<CachedUsage>>> {
        let user = (scope == QuotaScope::User).then(|| principal.user.clone());
        let empty = || Ok::<_, std::convert::Infallible>(Arc::default());
        match self.usage_cache().0.get_or_insert_with(&(principal.tenant.clone(), user), empty) {
            Ok(sum) => sum,
            Err(never) => match never {},
        }
    }
}
