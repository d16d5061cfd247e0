//! Operations on runs: look up, follow, cancel, start without input, and take over after a crash. A
//! run is claimed by a commit, so at most one node can commit to it.

use crate::engine::pending_commit::PendingCommit;
use crate::engine::turn_lock::{Admission, OnBusy};
use crate::rules::partial::PartialSession;
use crate::rules::run_entries::{CANCELLED, reactivation_entry, resume_entries, run_ended_entry};
use crate::rules::session::Run;
use crate::run::open_run::{OpenRun, RunStart};
use crate::store::query::{OwnerFilter, RecordRange, SessionOrder, SessionQuery};
use crate::tenure::Tenure;
use crate::types::entry::{Entry, Record, RunOutcome};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Principal, RunId, Seq, SessionId};
use crate::types::resumable::{KEYED, Resumable};
use crate::types::status::Status;
use jiff::{SignedDuration, Timestamp};
use serde_json::Map;
use std::time::Duration;

/// The events of a run after a given position.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RunEvents {
    /// The records, oldest first.
    pub records: Vec<Record>,
    /// Whether the run has ended and no more records will follow.
    pub ended: bool,
}

/// Maximum time that a stopped run has to persist its partial answer.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// Total time the run was paused for reviews. Reviews that were opened together count once, up to
/// the last decision.
fn review_pause(session: PartialSession<'_>, run: &RunId) -> SignedDuration {
    let reviews = session.reviews.iter().filter(|r| r.opened.run.as_ref() == Some(run));
    let mut pauses: Vec<(Timestamp, Timestamp)> = Vec::new();
    for (from, to) in reviews.filter_map(|r| Some((r.opened_at, r.decided.as_ref()?.0))) {
        match pauses.last_mut().filter(|(last, _)| *last == from) {
            Some((_, end)) => *end = to.max(*end),
            None => pauses.push((from, to)),
        }
    }
    pauses.into_iter().map(|(from, to)| to.duration_since(from).max(SignedDuration::ZERO)).sum()
}

fn no_run(id: &SessionId, run: &RunId) -> Error {
    Error::NoSuchRun { session_id: id.clone(), run: run.clone() }
}

impl Tenure {
    /// Returns a run together with its session's head.
    pub async fn get_run(&self, principal: &Principal, id: &SessionId, run: &RunId) -> Result<(Head, Run)> {
        self.engine
            .read_session(principal, id, |session| {
                self.engine.check_live(session.head())?;
                let run_state = session.run(run).ok_or_else(|| no_run(id, run))?;
                Ok((session.head().clone(), run_state.clone()))
            })
            .await
    }

    /// Reads at most `limit` records of a run after a position, and reports whether the run is
    /// over.
    pub async fn follow(
        &self,
        principal: &Principal,
        id: &SessionId,
        run: &RunId,
        after: Seq,
        limit: usize,
    ) -> Result<RunEvents> {
        let (head, first_seq, ended) = self
            .engine
            .read_session(principal, id, |session| {
                self.engine.check_live(session.head())?;
                let run_state = session.run(run).ok_or_else(|| no_run(id, run))?;
                Ok((session.head().clone(), run_state.seq, run_state.ended.is_some()))
            })
            .await?;
        // A fork's log starts with records of its parent, so the position decides which log is
        // read.
        let after = after.max(first_seq.saturating_sub(1));
        if after >= head.seq {
            return Ok(RunEvents { records: Vec::new(), ended });
        }
        let key = self.find_log_owner(head.clone(), after + 1).await?.key();
        let range = RecordRange { upto: head.seq, limit, ..RecordRange::after(after) };
        let mut records = self.store().records(&key, &range).await?;
        let end = records.iter().position(|r| matches!(&r.entry, Entry::RunEnded { run: r, .. } if r == run));
        if let Some(end) = end {
            records.truncate(end + 1);
        }
        for record in &mut records {
            if let Entry::Message(post) = &mut record.entry
                && !post.message.blob_refs().is_empty()
            {
                post.message = self.engine.attach_message(&head.tenant, &post.message).await?;
            }
        }
        let ended = end.is_some() || (ended && records.is_empty());
        Ok(RunEvents { records, ended })
    }

    /// Cancels a run. Its messages stay stored; the node that works on it can commit nothing more
    /// except its partial answer. Idempotent: a run that has already ended is returned unchanged.
    pub async fn cancel(&self, principal: &Principal, id: &SessionId, run: &RunId) -> Result<Run> {
        self.stop_local_run(principal, id, run).await?;
        let cancelled = self.write_session(principal, id, |session, now| {
            self.engine.check_live(session.head())?;
            let mut run_state = session.run(run).ok_or_else(|| no_run(id, run))?.clone();
            if run_state.ended.is_some() {
                return Ok(PendingCommit::new(Vec::new(), run_state));
            }
            let reason = "the run was cancelled on request".to_owned();
            run_state.ended = Some((now, RunOutcome::Cancelled));
            run_state.error = Some(reason.clone());
            run_state.code = Some(CANCELLED.to_owned());
            let mut entries = vec![run_ended_entry(run, RunOutcome::Cancelled, Some(reason), Some(CANCELLED))];
            entries.extend(reactivation_entry(session.as_partial()));
            Ok(PendingCommit::new(entries, run_state))
        });
        cancelled.await
    }

    /// Cancels a run of this process, and waits up to `STOP_TIMEOUT` until its partial answer is
    /// persisted. On another node, the run stops when that node notices the change.
    async fn stop_local_run(&self, principal: &Principal, id: &SessionId, run: &RunId) -> Result<()> {
        // Check access first: a principal without access must not be able to cancel the run.
        let mut head = self.head(principal, id).await?;
        if !self.shared.turn_locks.cancel(&principal.key(id), run) {
            return Ok(());
        }
        let wait_until_saved = async {
            while head.run.as_ref() == Some(run) {
                self.wait_for_change(principal, id, head.seq).await?;
                head = self.head(principal, id).await?;
            }
            Ok(())
        };
        tokio::time::timeout(STOP_TIMEOUT, wait_until_saved).await.unwrap_or(Ok(()))
    }

    /// Starts a run without input from the session's current state: executes pending tool calls, or
    /// generates a missing answer. The run has its own id.
    pub async fn start_run(
        &self,
        principal: &Principal,
        id: &SessionId,
        on_busy: OnBusy,
        resumable: Option<Resumable>,
    ) -> Result<OpenRun> {
        let key = principal.key(id);
        let turn_guard = match self.shared.turn_locks.acquire(&key, on_busy, self.limits().max_queue).await? {
            Admission::Admitted(turn_guard) => turn_guard,
            Admission::Branch(_) => return Err(Error::Busy { session_id: id.clone() }),
        };
        let run = RunId::generate();
        let started_at = self.now();
        let started = self.write_partial(principal, id, |session, now| {
            self.engine.check_active(session.head)?;
            let mut entries: Vec<Entry> = self.end_previous_run(session, &run, on_busy, now)?.into_iter().collect();
            let claim = Some(self.lease_claim(now));
            let mut detail = Map::new();
            if let Some(resumable) = &resumable {
                resumable.add_to_detail(&mut detail);
            }
            entries.push(Entry::RunStarted { run: run.clone(), claim, detail });
            Ok(PendingCommit::new(entries, (session.head.digest.messages, session.head.assistant.clone())))
        });
        let (before, assistant) = started.await?;
        turn_guard.record_turn_start(before, &run);
        let start = RunStart {
            session_id: id.clone(),
            run,
            assistant,
            model: None,
            resumable,
            store_answer: false,
            started_at,
            claimed_at: started_at,
        };
        OpenRun::new(self, principal, turn_guard, start).await
    }

    /// Continues the sessions whose pause is over: they become active, and their runs are released, so that any
    /// node takes them over ([`Tenure::find_orphaned_runs`]). Returns how many were continued, at most
    /// `max_sweep`.
    pub async fn resume_paused(&self) -> Result<usize> {
        let mut query = SessionQuery::new(OwnerFilter::AllTenants, self.limits().max_sweep);
        query.due_before = self.now().checked_add(SignedDuration::from_micros(1)).ok();
        query.order = SessionOrder::Due;
        query.status = vec![Status::Paused];
        let mut count = 0;
        for head in self.store().heads(&query).await? {
            count += usize::from(self.resume_paused_session(&head).await?);
        }
        Ok(count)
    }

    /// Continues a session if its pause is over. Returns whether it was.
    pub(crate) async fn resume_paused_session(&self, head: &Head) -> Result<bool> {
        let is_over = |head: &Head, now| head.reviews.is_empty() && head.paused_until().is_some_and(|at| at <= now);
        if !is_over(head, self.now()) {
            return Ok(false);
        }
        let owner = head.owner();
        let resumed = self.write_head(&owner, &head.info.session_id, |head, now| {
            let is_due = head.status == Status::Paused && is_over(head, now);
            let entries = if is_due { resume_entries(head, Some("the pause is over"), now) } else { Vec::new() };
            Ok(PendingCommit::new(entries, is_due))
        });
        match resumed.await {
            Err(Error::NotFound { .. } | Error::Conflict { .. }) => Ok(false),
            other => other,
        }
    }

    /// Takes over an orphaned run. Returns `None` if another node or a turn of this process was
    /// faster, or if the run is not [`Resumable`]: such a run needs its client, and is ended as failed
    /// (D-043).
    pub async fn claim_orphaned_run(&self, head: &Head) -> Result<Option<OpenRun>> {
        let id = &head.info.session_id;
        let principal = head.owner();
        let Some(run) = head.run.clone() else { return Ok(None) };
        let turn_guard = match self.shared.turn_locks.acquire(&head.key(), OnBusy::Reject, 0).await {
            Ok(Admission::Admitted(turn_guard)) => turn_guard,
            // A turn in this process holds the lock.
            _ => return Ok(None),
        };
        turn_guard.record_run(&run);
        let claimed_at = self.now();
        if !self.claim_run(head, &run).await? {
            return Ok(None);
        }
        let (run_state, assistant, paused_for) = self
            .engine
            .read_partial(&principal, id, |session| {
                Ok((session.run(&run).cloned(), session.head.assistant.clone(), review_pause(session, &run)))
            })
            .await?;
        let Some(run_state) = run_state else { return Ok(None) };
        let paused_for = paused_for + run_state.pauses.total;
        let Some(resumable) = run_state.resumable() else {
            self.fail_orphaned_run(&principal, id, &run).await?;
            return Ok(None);
        };
        let start = RunStart {
            session_id: id.clone(),
            run,
            assistant,
            model: None,
            resumable: Some(resumable),
            // A client with an idempotency key may retry, so the answer must be stored.
            store_answer: run_state.detail.contains_key(KEYED),
            started_at: run_state.started_at.saturating_add(paused_for).unwrap_or(run_state.started_at),
            claimed_at,
        };
        OpenRun::new(self, &principal, turn_guard, start).await.map(Some)
    }

    async fn fail_orphaned_run(&self, principal: &Principal, id: &SessionId, run: &RunId) -> Result<()> {
        self.write_head(principal, id, |head, _| {
            let is_held = self.holds_lease(head, run);
            let reason = "the node that executed the run has stopped, and the run cannot be resumed".to_owned();
            let entry = run_ended_entry(run, RunOutcome::Failed, Some(reason), Some("abandoned"));
            Ok(PendingCommit::new(if is_held { vec![entry] } else { Vec::new() }, ()))
        })
        .await
    }
}
