//! Who works on a run. A node holds a lease in the session's card and renews it; a claim is a commit, so whoever lost its lease
//! finds that the log has moved on and can not write any more, whatever its clock says.

use crate::engine::draft::{Draft, Need};
use crate::engine::node::is_gone;
use crate::store::query::{Query, Whose};
use crate::tenure::Tenure;
use crate::types::entry::{Claim, Entry};
use crate::types::error::{Error, Result};
use crate::types::head::{Head, Lease};
use crate::types::id::{Principal, RunId, SessionId};
use jiff::{SignedDuration, Timestamp};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

/// What whoever works on a run knows of its lease.
#[derive(Debug)]
pub(crate) struct Held {
    /// Its end, in microseconds.
    pub until: AtomicI64,
    /// Whether it is being given back.
    pub ends: AtomicBool,
}

impl Tenure {
    /// How long a lease lasts.
    pub(crate) fn lease(&self) -> SignedDuration {
        SignedDuration::try_from(self.limits().lease).unwrap_or(SignedDuration::MAX)
    }

    /// A claim of this node, from now on.
    pub(crate) fn claim(&self, now: Timestamp) -> Claim {
        Claim { node: self.node().to_owned(), until: now.saturating_add(self.lease()).unwrap_or(Timestamp::MAX) }
    }

    /// Whether nobody works under a lease any more.
    pub(crate) fn is_free(&self, lease: &Lease, now: Timestamp) -> bool {
        lease.until <= now || is_gone(&lease.node)
    }

    pub(crate) fn holds(&self, head: &Head, run: &RunId) -> bool {
        head.lease.as_ref().is_some_and(|l| l.run == *run && l.node == self.node())
    }

    /// Sessions with a run that nobody works on: its node has not renewed its lease in time, or is gone.
    pub async fn abandoned(&self, limit: usize) -> Result<Vec<Head>> {
        let now = self.now();
        let mut query = Query::new(Whose::Everyone, limit);
        query.lease_before = now.checked_add(SignedDuration::from_micros(1)).ok();
        let mut heads = self.store().heads(&query).await?;
        if heads.len() < limit {
            // Those whose time is not over come after them: many runs that are on must not hide one that was left behind.
            query.lease_before = Some(self.claim(now).until);
            let others = self.store().heads(&query).await?;
            heads.extend(others.into_iter().filter(|h| h.lease.as_ref().is_some_and(|l| l.until > now)));
        }
        heads.retain(|h| h.lease.as_ref().is_some_and(|l| self.is_free(l, now)));
        heads.truncate(limit);
        Ok(heads)
    }

    /// Says that this node still works on a run. The log does not grow.
    pub(crate) async fn renew(&self, who: &Principal, id: &SessionId, run: &RunId) -> Result<Timestamp> {
        self.write(who, id, Need::Head, |state, now| {
            match state.head() {
                Some(head) if self.holds(head, run) => {}
                _ => return Err(Error::Superseded { session_id: id.clone() }),
            }
            let until = self.claim(now).until;
            let mut draft = Draft::new(Vec::new(), until);
            draft.lease = Some(until);
            Ok(draft)
        })
        .await
    }

    /// Renews a lease for as long as it is held. When another node has changed the session, it may be gone: that is looked at right away.
    pub(crate) async fn keep_lease(&self, who: &Principal, id: &SessionId, run: &RunId, held: &Held) -> Error {
        let watch = self.engine.watch(&who.key(id));
        let pause = || tokio::time::sleep(self.limits().lease / 3);
        let (due, told) = (pause(), watch.elsewhere());
        tokio::pin!(due, told);
        loop {
            let renewed = tokio::select! {
                () = &mut due => {
                    due.set(pause());
                    self.renew(who, id, run).await.map(Some)
                }
                () = &mut told => {
                    // What is told from now on counts, also while we look.
                    told.set(watch.elsewhere());
                    match self.head(who, id).await {
                        Ok(head) if !self.holds(&head, run) => Err(Error::Superseded { session_id: id.clone() }),
                        looked => looked.map(|_| None),
                    }
                }
            };
            match renewed {
                // The store may be back before the lease ends; if it is not, the next commit says so.
                Err(Error::Unavailable { .. }) | Ok(None) => {}
                Ok(Some(end)) => held.until.store(end.as_microsecond(), Ordering::Relaxed),
                // We gave it back ourselves, and hear of that before our own commit has told us.
                Err(_) if held.ends.load(Ordering::Relaxed) => {}
                Err(e) => return e,
            }
        }
    }

    /// Claims a run that nobody works on; `false` if somebody else was first.
    pub(crate) async fn claim_run(&self, head: &Head, run: &RunId) -> Result<bool> {
        let (id, who) = (&head.info.session_id, head.owner());
        let claimed = self.write(&who, id, Need::Head, |state, now| {
            let free = state.head().is_some_and(|h| {
                h.status.is_live()
                    && h.run.as_ref() == Some(run)
                    && h.lease.as_ref().is_some_and(|l| self.is_free(l, now))
            });
            let entry = Entry::RunClaimed { run: run.clone(), claim: self.claim(now) };
            Ok(Draft::new(if free { vec![entry] } else { Vec::new() }, free))
        });
        match claimed.await {
            Err(Error::NotFound { .. } | Error::Conflict { .. }) => Ok(false),
            other => other,
        }
    }
}
