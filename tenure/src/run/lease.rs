//! Leases on runs. The node that works on a run holds a lease in the session's head and renews it.
//!
//! A claim is a commit. A node that has lost its lease therefore finds that the log has advanced
//! and cannot write any more, whatever its clock says (D-041).

use crate::engine::node::is_gone;
use crate::engine::pending_commit::PendingCommit;
use crate::engine::turn_lock::OnBusy;
use crate::rules::partial::PartialSession;
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::tenure::Tenure;
use crate::types::entry::{Entry, LeaseClaim, RunOutcome};
use crate::types::error::{Error, Result};
use crate::types::head::{Head, Lease};
use crate::types::id::{Principal, RunId, SessionId};
use jiff::{SignedDuration, Timestamp};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

/// The lease state shared between a run and its renewal task.
#[derive(Debug)]
pub(crate) struct LeaseState {
    /// End of the lease, in microseconds since the Unix epoch.
    pub until: AtomicI64,
    /// Whether a commit that releases the lease is in flight.
    pub releasing: AtomicBool,
}

impl Tenure {
    /// Duration of a lease.
    pub(crate) fn lease_duration(&self) -> SignedDuration {
        SignedDuration::try_from(self.limits().lease).unwrap_or(SignedDuration::MAX)
    }

    /// A claim of this node that starts now and lasts one lease duration.
    pub(crate) fn lease_claim(&self, now: Timestamp) -> LeaseClaim {
        LeaseClaim {
            node: self.node().to_owned(),
            until: now.saturating_add(self.lease_duration()).unwrap_or(Timestamp::MAX),
        }
    }

    /// Returns true if the lease has expired, or its process is known to be dead (D-042).
    pub(crate) fn is_free(&self, lease: &Lease, now: Timestamp) -> bool {
        lease.until <= now || is_gone(&lease.node)
    }

    /// Returns true if the head records this node's lease on the run, whether or not it has
    /// expired.
    pub(crate) fn holds_lease(&self, head: &Head, run: &RunId) -> bool {
        head.lease.as_ref().is_some_and(|l| l.run == *run && l.node == self.node())
    }

    /// Finds sessions with an orphaned run: its lease has expired, or its node is known to be dead
    /// (D-042).
    pub async fn find_orphaned_runs(&self, limit: usize) -> Result<Vec<Head>> {
        let now = self.now();
        let mut query = SessionQuery::new(OwnerFilter::AllTenants, limit);
        query.lease_before = now.checked_add(SignedDuration::from_micros(1)).ok();
        let mut heads = self.store().heads(&query).await?;
        if heads.len() < limit {
            // Leases that are still valid are queried separately: many active runs must not crowd
            // out an orphaned one.
            query.lease_before = Some(self.lease_claim(now).until);
            let valid_leases = self.store().heads(&query).await?;
            heads.extend(valid_leases.into_iter().filter(|h| h.lease.as_ref().is_some_and(|l| l.until > now)));
        }
        heads.retain(|h| h.lease.as_ref().is_some_and(|l| self.is_free(l, now)));
        heads.truncate(limit);
        Ok(heads)
    }

    /// Renews this node's lease on a run and returns its new end. Updates only the head; no record
    /// is appended.
    pub(crate) async fn renew_lease(&self, principal: &Principal, id: &SessionId, run: &RunId) -> Result<Timestamp> {
        self.write_head(principal, id, |head, now| {
            if !self.holds_lease(head, run) {
                return Err(Error::Superseded { session_id: id.clone() });
            }
            let until = self.lease_claim(now).until;
            let mut pending = PendingCommit::new(Vec::new(), until);
            pending.lease = Some(until);
            Ok(pending)
        })
        .await
    }

    /// Renews a lease every third of its duration until it is lost, and returns the error. When
    /// another node has changed the session, ownership is checked immediately.
    pub(crate) async fn maintain_lease(
        &self,
        principal: &Principal,
        id: &SessionId,
        run: &RunId,
        lease_state: &LeaseState,
    ) -> Error {
        let watch = self.engine.watch(&principal.key(id));
        let renewal_delay = || tokio::time::sleep(self.limits().lease / 3);
        let due = renewal_delay();
        let changed = watch.remote_change();
        tokio::pin!(due, changed);
        loop {
            let renewed = tokio::select! {
                () = &mut due => {
                    due.set(renewal_delay());
                    self.renew_lease(principal, id, run).await.map(Some)
                }
                () = &mut changed => {
                    // Subscribe again before reading the head, so that no notification is missed.
                    changed.set(watch.remote_change());
                    match self.head(principal, id).await {
                        Ok(head) if !self.holds_lease(&head, run) => Err(Error::Superseded { session_id: id.clone() }),
                        checked => checked.map(|_| None),
                    }
                }
            };
            match renewed {
                // Not fatal: the store may recover before the lease expires. If it does not, the
                // next commit reports the loss.
                Err(Error::Unavailable { .. }) | Ok(None) => {}
                Ok(Some(until)) => lease_state.until.store(until.as_microsecond(), Ordering::Relaxed),
                // We released the lease ourselves; the notification overtook our own commit's
                // return. Not a loss.
                Err(_) if lease_state.releasing.load(Ordering::Relaxed) => {}
                Err(e) => return e,
            }
        }
    }

    /// Claims an orphaned run. Returns `false` if another node was faster.
    pub(crate) async fn claim_run(&self, head: &Head, run: &RunId) -> Result<bool> {
        let id = &head.info.session_id;
        let principal = head.owner();
        let claimed = self.write_head(&principal, id, |head, now| {
            let is_claimable = head.status.is_live()
                && head.run.as_ref() == Some(run)
                && head.lease.as_ref().is_some_and(|l| self.is_free(l, now));
            let entry = Entry::RunClaimed { run: run.clone(), claim: self.lease_claim(now) };
            Ok(PendingCommit::new(if is_claimable { vec![entry] } else { Vec::new() }, is_claimable))
        });
        match claimed.await {
            Err(Error::NotFound { .. } | Error::Conflict { .. }) => Ok(false),
            other => other,
        }
    }

    /// Returns the entry that ends a run left open by another (possibly dead) node, or
    /// [`Error::Busy`] if that node's lease is still valid and the turn may not interrupt it. The
    /// caller holds the local turn lock, so the run is executed by another node or by none (D-041).
    pub(crate) fn end_previous_run(
        &self,
        session: PartialSession<'_>,
        new_run: &RunId,
        on_busy: OnBusy,
        now: Timestamp,
    ) -> Result<Option<Entry>> {
        let Some(run) = session.head.run.clone() else { return Ok(None) };
        let lease = session.head.lease.as_ref().filter(|l| l.node != self.node());
        let is_resumable = session.run(&run).is_some_and(|r| r.is_resumable());
        let is_active = lease.is_some_and(|l| {
            // A run that records its model is resumable: other nodes get one more lease duration to
            // take it over (D-043).
            if is_resumable {
                !self.is_free(l, now.saturating_sub(self.lease_duration()).unwrap_or(now))
            } else {
                !self.is_free(l, now)
            }
        });
        // The same request, executed by another node, must not be interrupted by its own retry.
        let is_same_run = run == *new_run;
        if is_active && (is_same_run || on_busy != OnBusy::Interrupt) {
            return Err(Error::Busy { session_id: session.head.info.session_id.clone() });
        }
        if is_same_run {
            return Ok(None);
        }
        let (outcome, error, code) = if is_active {
            (RunOutcome::Cancelled, "the run was interrupted by another request", "interrupted")
        } else {
            (RunOutcome::Failed, "the node that executed the run has stopped", "abandoned")
        };
        Ok(Some(Entry::RunEnded { run, outcome, error: Some(error.to_owned()), code: Some(code.to_owned()) }))
    }
}
