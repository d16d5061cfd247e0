//! Commits that are retried while the store is unavailable. Used where a run holds results that
//! cannot be reproduced: a paid model answer, or the result of a tool with side effects.
//!
//! The results stay in memory until they are committed. If another node takes over the run in the
//! meantime, the log shows it, and they are dropped.

use crate::engine::pending_commit::PendingCommit;
use crate::rules::partial::PartialSession;
use crate::store::query::RecordRange;
use crate::tenure::Tenure;
use crate::types::entry::{Entry, Record};
use crate::types::error::{Error, Result};
use crate::types::id::{Principal, Seq, SessionId, SessionKey};
use jiff::Timestamp;
use std::time::Duration;

const INITIAL_DELAY: Duration = Duration::from_millis(100);
const MAX_DELAY: Duration = Duration::from_secs(2);

/// Exponential backoff between retries, from 100 ms to 2 s.
pub(super) struct Backoff(Duration);

impl Backoff {
    pub fn new() -> Self {
        Self(INITIAL_DELAY)
    }

    /// Sleeps for the current delay and doubles it, up to `MAX_DELAY`.
    pub async fn next(&mut self) {
        tokio::time::sleep(self.0).await;
        self.0 = (self.0 * 2).min(MAX_DELAY);
    }

    /// Returns the result of an idempotent step. `None` means that the store was unavailable, and
    /// that the backoff delay has elapsed.
    pub async fn unless_unavailable<T>(&mut self, result: Result<T>) -> Option<Result<T>> {
        match result {
            Err(Error::Unavailable { .. }) => {
                self.next().await;
                None
            }
            result => Some(result),
        }
    }
}

/// A commit with an unknown outcome.
struct UnknownOutcome<R> {
    base: Seq,
    at: Timestamp,
    entries: Vec<Entry>,
    reply: R,
}

impl Tenure {
    /// Commits like [`Tenure::write_partial`], but retries while the store is unavailable. Before each
    /// retry it checks whether the previous commit was persisted after all, so nothing is written
    /// twice.
    pub(super) async fn write_partial_with_retries<R: Clone>(
        &self,
        principal: &Principal,
        id: &SessionId,
        mut step: impl FnMut(PartialSession<'_>, Timestamp) -> Result<PendingCommit<R>>,
    ) -> Result<R> {
        let mut backoff = Backoff::new();
        loop {
            let mut unknown = None;
            let written = self.write_partial(principal, id, |session, now| {
                let pending = step(session, now)?;
                let base = session.head.seq;
                let entries = pending.entries.clone();
                let reply = pending.reply.clone();
                unknown = Some(UnknownOutcome { base, at: now, entries, reply });
                Ok(pending)
            });
            match written.await {
                Err(Error::Unavailable { reason, .. }) => {
                    tracing::warn!(session_id = %id, error = reason, "store unavailable; retrying the commit of a run's results");
                }
                written => return written,
            }
            backoff.next().await;
            let Some(unknown) = unknown else { continue };
            let committed = loop {
                if let Some(committed) =
                    backoff.unless_unavailable(self.was_committed(&principal.key(id), &unknown).await).await
                {
                    break committed?;
                }
            };
            if committed {
                self.engine.evict(&principal.key(id));
                return Ok(unknown.reply);
            }
        }
    }

    /// Returns true if the log contains exactly these records. Position, timestamp and content
    /// together identify a commit: no two commits share all three.
    async fn was_committed<R>(&self, key: &SessionKey, unknown: &UnknownOutcome<R>) -> Result<bool> {
        let upto = unknown.base + unknown.entries.len() as Seq;
        if upto == unknown.base {
            return Ok(false);
        }
        let mut last = unknown.base;
        let mut stored = Vec::new();
        while last < upto {
            let page = self.store().records(key, &RecordRange { upto, ..RecordRange::after(last) }).await?;
            let Some(end) = page.last() else { return Ok(false) };
            last = end.seq;
            stored.extend(page);
        }
        let expected = (unknown.base + 1..).zip(&unknown.entries);
        let is_equal = |(stored, (seq, entry)): (&Record, (Seq, &Entry))| {
            stored.seq == seq
                && stored.at.as_microsecond() == unknown.at.as_microsecond()
                && stored.entry.encode() == entry.encode()
        };
        Ok(stored.iter().zip(expected).all(is_equal))
    }
}
