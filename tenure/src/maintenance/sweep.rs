//! The end of sessions: expiry, the cap, purging, and erasing a user.
//!
//! Expiry is checked whenever a session is loaded; the sweep only cleans up. One pass is bounded, and trouble with one session
//! never stops it. Destroying needs a clock that can be trusted: while the wall clock has jumped, nothing is expired or purged.

use crate::engine::hooks::Ending;
use crate::store::query::{Order, Query, Whose};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::Key;
use crate::types::status::Status;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use jiff::{SignedDuration, Timestamp};
use std::future::Future;
use std::sync::atomic::Ordering;

/// A wall clock that is off by more is not trusted with destroying anything.
pub const MAX_CLOCK_JUMP: SignedDuration = SignedDuration::from_mins(5);

/// So many sessions are ended side by side: a hook that takes its time holds up no more than these.
const SIDE_BY_SIDE: usize = 16;

/// What a pass of the sweep did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Sessions that expired.
    pub expired: Vec<Key>,
    /// Sessions that went because there were too many.
    pub evicted: Vec<Key>,
    /// Sessions that were destroyed after their retention.
    pub purged: Vec<Key>,
    /// Sessions with reviews that nobody decided in time.
    pub decided: Vec<Key>,
    /// Cached and other items whose time was over.
    pub items: usize,
    /// Sessions that could not be done, and why; the next pass tries again.
    pub failed: Vec<(Key, String)>,
    /// Why nothing was expired or purged.
    pub suspended: Option<String>,
    /// Whether there is more to do at once.
    pub more: bool,
}

/// What became of a session.
enum End {
    Expired,
    Evicted,
    Purged,
    Decided,
}

impl Report {
    fn note(&mut self, key: Key, done: Result<Option<End>>) {
        match done {
            Ok(None) => {}
            Ok(Some(End::Expired)) => self.expired.push(key),
            Ok(Some(End::Evicted)) => self.evicted.push(key),
            Ok(Some(End::Purged)) => self.purged.push(key),
            Ok(Some(End::Decided)) => self.decided.push(key),
            Err(e) => self.failed.push((key, e.to_string())),
        }
    }
}

/// Runs steps concurrently in this task, at most [`SIDE_BY_SIDE`] at a time. They start and are reported in the given order.
async fn side_by_side<T, F: Future<Output = Result<T>>>(
    steps: impl Iterator<Item = (Key, F)>,
    mut done: impl FnMut(Key, Result<T>),
) {
    let mut steps = steps.enumerate();
    let mut running = FuturesUnordered::new();
    let mut outcomes = Vec::new();
    loop {
        for (place, (key, step)) in steps.by_ref().take(SIDE_BY_SIDE - running.len()) {
            running.push(async move { (place, key, step.await) });
        }
        match running.next().await {
            Some(outcome) => outcomes.push(outcome),
            None => break,
        }
    }
    outcomes.sort_by_key(|(place, ..)| *place);
    outcomes.into_iter().for_each(|(_, key, outcome)| done(key, outcome));
}

impl Tenure {
    /// One bounded pass: expires, sends away what is over the cap, purges what is over its retention.
    pub async fn sweep(&self) -> Result<Report> {
        let mut report = Report::default();
        let drift = self.engine.clock().drift();
        if drift.abs() > MAX_CLOCK_JUMP {
            let why = format!("the clock has jumped by {drift:#}; restart the process once it is right");
            tracing::warn!(%drift, "the clock has jumped: nothing is expired or purged");
            report.suspended = Some(why);
            return Ok(report);
        }
        let (now, max) = (self.now(), self.limits().max_sweep);
        let mut due = Query::new(Whose::Everyone, max);
        (due.due_before, due.order) = (Some(now), Order::Due);
        let heads = self.store().heads(&due).await?;
        report.more = heads.len() == max;
        let due = heads.into_iter().map(|head| (head.key(), self.end_due(head, now)));
        side_by_side(due, |key, done| report.note(key, done)).await;
        if self.engine.options().max_sessions > 0 {
            let heads = self.over_the_cap(max).await?;
            report.more |= heads.len() == max;
            let tried = heads.len();
            let over = heads.into_iter().map(|head| (head.key(), self.end(head, Ending::Evicted, now)));
            side_by_side(over, |key, done| report.note(key, done.map(|ended| ended.then_some(End::Evicted)))).await;
            match report.evicted.is_empty() {
                true => self.shared.stuck.fetch_add(tried, Ordering::Relaxed),
                false => self.shared.stuck.swap(0, Ordering::Relaxed),
            };
        }
        report.items = self.store().expire(now, max).await?;
        report.more |= report.items == max;
        Ok(report)
    }

    /// Those that are too many, the longest idle first, at most so many. Where none of them could go, the next pass begins after them, so that
    /// hooks that fail do not hold up others for ever.
    async fn over_the_cap(&self, max: usize) -> Result<Vec<Head>> {
        let counted = self.store().count().await?;
        let live: u64 = counted.iter().filter(|(status, _)| status.is_live()).map(|(_, n)| n).sum();
        let over = usize::try_from(live).unwrap_or(usize::MAX).saturating_sub(self.engine.options().max_sessions);
        let from = self.shared.stuck.load(Ordering::Relaxed);
        let from = if from < over { from } else { 0 };
        self.shared.stuck.store(from, Ordering::Relaxed);
        if over == 0 {
            return Ok(Vec::new());
        }
        let mut oldest = Query::new(Whose::Everyone, (over - from).min(max));
        oldest.offset = from;
        (oldest.status, oldest.order) = (vec![Status::Active, Status::Paused], Order::Oldest);
        self.store().heads(&oldest).await
    }

    async fn end_due(&self, head: Head, now: Timestamp) -> Result<Option<End>> {
        let key = head.key();
        self.engine.know(&key.tenant).await?;
        match self.engine.due_at(&head) {
            // It was active since its card was marked.
            due if due.is_none_or(|t| t > now) => self.look_again(&head, due).await.map(|()| None),
            _ if head.status == Status::Paused => match self.decide_for(&head).await? {
                0 => self.look_again(&head, None).await.map(|()| None),
                _ => Ok(Some(End::Decided)),
            },
            _ if head.status.is_live() => Ok(self.end(head, Ending::Expired, now).await?.then_some(End::Expired)),
            _ => {
                let purged = self.store().purge_at(&key, head.info.created_at, head.seq).await;
                self.engine.forget(&key);
                match purged {
                    Ok(()) => Ok(Some(End::Purged)),
                    // Restored meanwhile.
                    Err(Error::Conflict { .. }) => Ok(None),
                    Err(e) => Err(e),
                }
            }
        }
    }
}
