//! The sweep: expires, evicts and purges sessions, decides reviews that timed out, and removes expired items.
//!
//! Expiry is checked whenever a session is loaded; the sweep only cleans up. One pass is bounded,
//! and a failure with one session does not stop it. Destroying data needs a trustworthy clock:
//! while the wall clock has jumped, nothing is expired or purged (D-016).

use crate::engine::hooks::EndReason;
use crate::store::query::{OwnerFilter, SessionOrder, SessionQuery};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::SessionKey;
use crate::types::status::Status;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use jiff::{SignedDuration, Timestamp};
use std::future::Future;
use std::sync::atomic::Ordering;

/// The maximum drift of the wall clock. With more, nothing is expired or purged.
pub const MAX_CLOCK_JUMP: SignedDuration = SignedDuration::from_mins(5);

/// The number of sessions that are ended concurrently, so that a slow hook delays only these.
const MAX_CONCURRENT_ENDS: usize = 16;

/// The result of one pass of the sweep.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SweepReport {
    /// Sessions that expired.
    pub expired: Vec<SessionKey>,
    /// Sessions that were evicted because there were more than `max_sessions`.
    pub evicted: Vec<SessionKey>,
    /// Sessions that were purged after their retention.
    pub purged: Vec<SessionKey>,
    /// Sessions with reviews that timed out and were decided automatically.
    pub decided: Vec<SessionKey>,
    /// Sessions whose pause was over and that continue.
    pub resumed: Vec<SessionKey>,
    /// The number of expired items that were removed, such as cached tool results.
    pub items: usize,
    /// Sessions that failed, and why. The next pass tries them again.
    pub failed: Vec<(SessionKey, String)>,
    /// The reason why the whole pass was skipped. `None` means that it was not.
    pub suspended: Option<String>,
    /// Whether a bound was reached, so that another pass is needed immediately.
    pub more: bool,
}

/// The way in which a session was processed.
enum SweepOutcome {
    Expired,
    Evicted,
    Purged,
    Decided,
    Resumed,
}

impl SweepReport {
    fn record(&mut self, key: SessionKey, outcome: Result<Option<SweepOutcome>>) {
        match outcome {
            Ok(None) => {}
            Ok(Some(SweepOutcome::Expired)) => self.expired.push(key),
            Ok(Some(SweepOutcome::Evicted)) => self.evicted.push(key),
            Ok(Some(SweepOutcome::Purged)) => self.purged.push(key),
            Ok(Some(SweepOutcome::Decided)) => self.decided.push(key),
            Ok(Some(SweepOutcome::Resumed)) => self.resumed.push(key),
            Err(e) => self.failed.push((key, e.to_string())),
        }
    }
}

/// Runs steps concurrently in this task, at most [`MAX_CONCURRENT_ENDS`] at a time. They start and are
/// reported in the given order.
async fn run_concurrently<T, F: Future<Output = Result<T>>>(
    steps: impl Iterator<Item = (SessionKey, F)>,
    mut report: impl FnMut(SessionKey, Result<T>),
) {
    let mut steps = steps.enumerate();
    let mut running = FuturesUnordered::new();
    let mut outcomes = Vec::new();
    loop {
        for (index, (key, step)) in steps.by_ref().take(MAX_CONCURRENT_ENDS - running.len()) {
            running.push(async move { (index, key, step.await) });
        }
        match running.next().await {
            Some(outcome) => outcomes.push(outcome),
            None => break,
        }
    }
    outcomes.sort_by_key(|(index, ..)| *index);
    outcomes.into_iter().for_each(|(_, key, outcome)| report(key, outcome));
}

impl Tenure {
    /// Runs one bounded pass: expires idle sessions, evicts sessions over `max_sessions`, purges
    /// sessions after their retention, removes expired items, and completes the message index. At
    /// most `max_sweep` of each are processed.
    pub async fn sweep(&self) -> Result<SweepReport> {
        let mut report = SweepReport::default();
        let drift = self.engine.clock().drift();
        if drift.abs() > MAX_CLOCK_JUMP {
            let reason =
                format!("the wall clock has jumped by {drift:#}; restart the process when the clock is correct");
            tracing::warn!(%drift, "the wall clock has jumped: nothing is expired or purged");
            report.suspended = Some(reason);
            return Ok(report);
        }
        let now = self.now();
        let max = self.limits().max_sweep;
        let mut due = SessionQuery::new(OwnerFilter::AllTenants, max);
        due.due_before = Some(now);
        due.order = SessionOrder::Due;
        let heads = self.store().heads(&due).await?;
        report.more = heads.len() == max;
        let due = heads.into_iter().map(|head| (head.key(), self.end_due(head, now)));
        run_concurrently(due, |key, outcome| report.record(key, outcome)).await;
        if self.engine.options().max_sessions > 0 {
            let heads = self.sessions_over_limit(max).await?;
            report.more |= heads.len() == max;
            let tried = heads.len();
            let over = heads.into_iter().map(|head| (head.key(), self.end_session(head, EndReason::Evicted, now)));
            run_concurrently(over, |key, outcome| {
                report.record(key, outcome.map(|ended| ended.then_some(SweepOutcome::Evicted)))
            })
            .await;
            if report.evicted.is_empty() {
                self.shared.unevictable.fetch_add(tried, Ordering::Relaxed);
            } else {
                self.shared.unevictable.swap(0, Ordering::Relaxed);
            }
        }
        report.items = self.store().expire(now, max).await?;
        report.more |= report.items == max;
        match self.maintain_message_index(max).await {
            Ok(more) => report.more |= more,
            Err(error) => tracing::warn!(%error, "the message index could not be completed; the next pass tries again"),
        }
        Ok(report)
    }

    /// The sessions over `max_sessions`, longest idle first, at most `max`. If none of them could
    /// be evicted, the next pass starts after them, so that failing hooks do not block the eviction
    /// of others (D-017).
    async fn sessions_over_limit(&self, max: usize) -> Result<Vec<Head>> {
        let counts = self.store().count().await?;
        let live: u64 = counts.iter().filter(|(status, _)| status.is_live()).map(|(_, n)| n).sum();
        let over = usize::try_from(live).unwrap_or(usize::MAX).saturating_sub(self.engine.options().max_sessions);
        let skipped = self.shared.unevictable.load(Ordering::Relaxed);
        let skipped = if skipped < over { skipped } else { 0 };
        self.shared.unevictable.store(skipped, Ordering::Relaxed);
        if over == 0 {
            return Ok(Vec::new());
        }
        let mut oldest = SessionQuery::new(OwnerFilter::AllTenants, (over - skipped).min(max));
        oldest.offset = skipped;
        oldest.status = vec![Status::Active, Status::Paused];
        oldest.order = SessionOrder::Oldest;
        self.store().heads(&oldest).await
    }

    /// Processes a session that is due. `None` means that nothing was done.
    async fn end_due(&self, head: Head, now: Timestamp) -> Result<Option<SweepOutcome>> {
        let key = head.key();
        self.engine.ensure_assistants_loaded(&key.tenant).await?;
        match self.engine.due_at(&head) {
            // The session was active since its due time was stored.
            due if due.is_none_or(|t| t > now) => self.set_due_at(&head, due).await.map(|()| None),
            _ if head.status == Status::Paused && self.resume_paused_session(&head).await? => {
                Ok(Some(SweepOutcome::Resumed))
            }
            _ if head.status == Status::Paused => match self.decide_overdue_in_session(&head).await? {
                0 => self.set_due_at(&head, None).await.map(|()| None),
                _ => Ok(Some(SweepOutcome::Decided)),
            },
            _ if head.status.is_live() => {
                Ok(self.end_session(head, EndReason::Expired, now).await?.then_some(SweepOutcome::Expired))
            }
            _ => {
                let purged = self.store().purge_at(&key, head.info.created_at, head.seq).await;
                self.engine.evict(&key);
                match purged {
                    Ok(()) => {
                        self.end_tools(&key).await;
                        Ok(Some(SweepOutcome::Purged))
                    }
                    // The session was restored meanwhile.
                    Err(Error::Conflict { .. }) => Ok(None),
                    Err(e) => Err(e),
                }
            }
        }
    }
}
