//! Creates sessions within the cap: over `max_sessions`, the least recently used sessions are evicted by the
//! creation itself, without waiting for the sweep (D-135).

use crate::engine::hooks::EndReason;
use crate::engine::live_count::EvictionCandidate;
use crate::store::query::{OwnerFilter, SessionOrder, SessionQuery};
use crate::tenure::Tenure;
use crate::types::blob::Blob;
use crate::types::entry::Record;
use crate::types::error::Result;
use crate::types::head::Head;
use crate::types::id::SessionKey;
use crate::types::status::Status;
use jiff::SignedDuration;
use std::collections::VecDeque;
use std::time::Duration;

/// Maximum number of sessions that one creation evicts. The sweep evicts the rest, for example after the cap
/// was lowered.
const MAX_EVICTIONS: usize = 16;

/// The number of longest idle sessions that are looked up at once. The lookup reads every head, so its result
/// is used for several creations.
const CANDIDATES: usize = 64;

/// Maximum time for which a creation waits for the hooks of evicted sessions.
const MAX_WAIT: Duration = Duration::from_secs(5);

/// After a failed eviction, the time for which creations evict nothing.
const RETRY_DELAY: SignedDuration = SignedDuration::from_mins(1);

impl Tenure {
    /// Commits the first records of a new session with their media. If there are more than `max_sessions`
    /// live sessions then, the least recently used ones are evicted: their `on_expire` hooks are called and
    /// they expire. A failing hook does not fail the creation; the sweep tries again.
    pub(crate) async fn begin_session(
        &self,
        key: &SessionKey,
        first: &Record,
        more: Vec<Record>,
        blobs: Vec<Blob>,
    ) -> Result<Head> {
        let head = self.engine.begin(key, first, more, blobs).await?;
        if self.engine.options().max_sessions > 0 && head.status.is_live() {
            // Boxed, because it is rare and its future is large.
            match tokio::time::timeout(MAX_WAIT, Box::pin(self.evict_over_limit(key))).await {
                Ok(Ok(())) => {}
                Ok(Err(e)) => tracing::warn!(error = %e, "could not evict a session; the sweep tries again"),
                Err(_) => tracing::warn!("evicting a session takes too long; the sweep tries again"),
            }
        }
        Ok(head)
    }

    /// Evicts the least recently used sessions over the cap, except the one that was just created, and sessions
    /// in which a run is in progress.
    async fn evict_over_limit(&self, created: &SessionKey) -> Result<()> {
        let mut eviction = self.shared.eviction.lock().await;
        if eviction.retry_at.is_some_and(|at| self.now() < at) {
            return Ok(());
        }
        let mut evicted = 0;
        let mut looked_up = false;
        while evicted < MAX_EVICTIONS && self.engine.live_sessions().await? > self.engine.options().max_sessions as u64
        {
            let Some(candidate) = eviction.candidates.pop_front() else {
                if looked_up {
                    break;
                }
                looked_up = true;
                eviction.candidates = self.longest_idle().await?;
                continue;
            };
            if candidate.key == *created {
                continue;
            }
            let Some(head) = self.store().head(&candidate.key).await? else { continue };
            let now = self.now();
            let is_running = head.lease.as_ref().is_some_and(|lease| lease.until > now);
            if head.active_at != candidate.active_at || is_running {
                continue;
            }
            let expired = self.engine.status_of(&head) == Status::Expired;
            let reason = if expired { EndReason::Expired } else { EndReason::Evicted };
            match self.end_session(head, reason, now).await {
                Ok(ended) => evicted += usize::from(ended),
                Err(e) => {
                    eviction.retry_at = now.checked_add(RETRY_DELAY).ok();
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    /// The longest idle live sessions, longest idle first.
    async fn longest_idle(&self) -> Result<VecDeque<EvictionCandidate>> {
        let mut query = SessionQuery::new(OwnerFilter::AllTenants, CANDIDATES);
        query.status = vec![Status::Active, Status::Paused];
        query.order = SessionOrder::Oldest;
        let heads = self.store().heads(&query).await?;
        Ok(heads.into_iter().map(|head| EvictionCandidate { key: head.key(), active_at: head.active_at }).collect())
    }
}
