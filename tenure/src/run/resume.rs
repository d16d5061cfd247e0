//! Operations on runs: look up, follow, cancel, start without input, and take over after a crash. A
//! run is claimed by a commit, so at most one node can commit to it.

use crate::engine::draft::{Depth, PendingCommit};
use crate::engine::turn_lock::{Admission, OnBusy};
use crate::executors::model::SpeculativeSlot;
use crate::rules::overlay::Overlay;
use crate::rules::run_entries::{CANCELLED, ended, unpaused};
use crate::rules::session::{Run, Session};
use crate::run::begin::{KEYED, OpenRun};
use crate::run::request::ReconcileReport;
use crate::store::query::RecordRange;
use crate::tenure::Tenure;
use crate::types::entry::{Entry, Record, RunOutcome};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Principal, RunId, Seq, SessionId};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Map, Value};
use std::time::Duration;

/// The events of a run after a given position.
#[derive(Clone, Debug)]
pub struct RunEvents {
    /// The records, oldest first.
    pub records: Vec<Record>,
    /// Whether the run has ended and no more records will follow.
    pub over: bool,
}

/// Maximum time that a stopped run has to persist its partial answer.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// The model that the run was started with. `None` means that the detail does not name one.
fn model_of(detail: &Map<String, Value>) -> Option<String> {
    detail.get("model").and_then(Value::as_str).map(str::to_owned)
}

/// Total time the run was paused for reviews. Reviews that were opened together count once, up to
/// the last decision.
fn waited(session: &Session, run: &RunId) -> SignedDuration {
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
    pub async fn run(&self, who: &Principal, id: &SessionId, run: &RunId) -> Result<(Head, Run)> {
        self.engine
            .read(who, id, Depth::Session, |state| {
                let session = self.engine.whole_ref(state, id)?;
                self.engine.check_live(session)?;
                let found = session.run(run).ok_or_else(|| no_run(id, run))?;
                Ok((session.head().clone(), found.clone()))
            })
            .await
    }

    /// Reads at most `limit` records of a run after a position, and reports whether the run is
    /// over.
    pub async fn follow(
        &self,
        who: &Principal,
        id: &SessionId,
        run: &RunId,
        after: Seq,
        limit: usize,
    ) -> Result<RunEvents> {
        let (head, from, over) = self
            .engine
            .read(who, id, Depth::Session, |state| {
                let session = self.engine.whole_ref(state, id)?;
                self.engine.check_live(session)?;
                let found = session.run(run).ok_or_else(|| no_run(id, run))?;
                Ok((session.head().clone(), found.seq, found.ended.is_some()))
            })
            .await?;
        // A fork's log starts with records of its parent, so the position decides which log is
        // read.
        let after = after.max(from.saturating_sub(1));
        if after >= head.seq {
            return Ok(RunEvents { records: Vec::new(), over });
        }
        let key = self.owner_of(head.clone(), after + 1).await?.key();
        let range = RecordRange { upto: head.seq, limit, ..RecordRange::after(after) };
        let mut records = self.store().records(&key, &range).await?;
        let end = records.iter().position(|r| matches!(&r.entry, Entry::RunEnded { run: r, .. } if r == run));
        if let Some(end) = end {
            records.truncate(end + 1);
        }
        for record in &mut records {
            if let Entry::Message(post) = &mut record.entry
                && !post.message.cuts().is_empty()
            {
                post.message = self.engine.attach_message(&head.tenant, &post.message).await?;
            }
        }
        let over = end.is_some() || (over && records.is_empty());
        Ok(RunEvents { records, over })
    }

    /// Cancels a run. Its messages stay stored; the node that works on it can commit nothing more
    /// except its partial answer. Idempotent: a run that has already ended is returned unchanged.
    pub async fn cancel(&self, who: &Principal, id: &SessionId, run: &RunId) -> Result<Run> {
        self.stop_here(who, id, run).await?;
        let stopped = self.write(who, id, Depth::Session, |state, now| {
            let session = self.engine.whole_ref(state, id)?;
            self.engine.check_live(session)?;
            let mut found = session.run(run).ok_or_else(|| no_run(id, run))?.clone();
            if found.ended.is_some() {
                return Ok(PendingCommit::new(Vec::new(), found));
            }
            let why = "somebody stopped it".to_owned();
            found.ended = Some((now, RunOutcome::Cancelled));
            (found.error, found.code) = (Some(why.clone()), Some(CANCELLED.to_owned()));
            let mut entries = vec![ended(run, RunOutcome::Cancelled, Some(why), Some(CANCELLED))];
            entries.extend(unpaused(session));
            Ok(PendingCommit::new(entries, found))
        });
        stopped.await
    }

    /// Cancels a run of this process, and waits up to `STOP_TIMEOUT` until its partial answer is
    /// persisted. On another node, the run stops when that node notices the change.
    async fn stop_here(&self, who: &Principal, id: &SessionId, run: &RunId) -> Result<()> {
        // Check access first: a principal without access must not be able to cancel the run.
        let mut head = self.head(who, id).await?;
        if !self.shared.turn_locks.cancel(&who.key(id), run) {
            return Ok(());
        }
        let saved = async {
            while head.run.as_ref() == Some(run) {
                self.changed(who, id, head.seq).await?;
                head = self.head(who, id).await?;
            }
            Ok(())
        };
        tokio::time::timeout(STOP_TIMEOUT, saved).await.unwrap_or(Ok(()))
    }

    /// Starts a run without input from the session's current state: executes pending tool calls, or
    /// generates a missing answer. The run has its own id.
    pub async fn go_on(
        &self,
        who: &Principal,
        id: &SessionId,
        on_busy: OnBusy,
        detail: Map<String, Value>,
    ) -> Result<OpenRun> {
        let key = who.key(id);
        let pass = match self.shared.turn_locks.enter(&key, on_busy, self.limits().max_queue).await? {
            Admission::Pass(pass) => pass,
            Admission::Branch(_) => return Err(Error::Busy { session_id: id.clone() }),
        };
        let (run, began) = (RunId::generate(), self.now());
        let opened = self.write(who, id, Depth::Run, |state, now| {
            let session = self.engine.run_ref(state, id)?;
            self.engine.check_active(session)?;
            let mut entries: Vec<Entry> = self.step_in(session, &run, on_busy, now)?.into_iter().collect();
            let claim = Some(self.claim(now));
            entries.push(Entry::RunStarted { run: run.clone(), claim, detail: detail.clone() });
            Ok(PendingCommit::new(entries, (session.mark.messages, session.assistant.clone())))
        });
        let (before, assistant) = opened.await?;
        pass.began(before, &run);
        let assistant = self.assistant_of(who, assistant).await?;
        Ok(OpenRun {
            tenure: self.clone(),
            who: who.clone(),
            pass,
            remember: false,
            asked: 0,
            assistant,
            model: model_of(&detail),
            overlay: Overlay::default(),
            session_id: id.clone(),
            run,
            spliced: ReconcileReport::default(),
            messages: Vec::new(),
            detail,
            started_at: began,
            claimed_at: began,
            recalled: None,
            asking: SpeculativeSlot::default(),
        })
    }

    /// Takes over an orphaned run. Returns `None` if another node or a turn of this process was
    /// faster, or if the run does not record its model: such a run cannot be resumed without its
    /// client, and is ended as failed (D-043).
    pub async fn take_over(&self, head: &Head) -> Result<Option<OpenRun>> {
        let (id, who) = (&head.info.session_id, head.owner());
        let Some(run) = head.run.clone() else { return Ok(None) };
        let pass = match self.shared.turn_locks.enter(&head.key(), OnBusy::Reject, 0).await {
            Ok(Admission::Pass(pass)) => pass,
            // A turn in this process holds the lock.
            _ => return Ok(None),
        };
        pass.works_on(&run);
        let claimed_at = self.now();
        if !self.claim_run(head, &run).await? {
            return Ok(None);
        }
        let (found, assistant, waited) = self
            .engine
            .read(&who, id, Depth::Run, |state| {
                let session = self.engine.run_ref(state, id)?;
                Ok((session.run(&run).cloned(), session.assistant.clone(), waited(session, &run)))
            })
            .await?;
        let Some(found) = found else { return Ok(None) };
        if !found.detail.contains_key("model") {
            self.end_abandoned(&who, id, &run).await?;
            return Ok(None);
        }
        let assistant = self.assistant_of(&who, assistant).await?;
        Ok(Some(OpenRun {
            tenure: self.clone(),
            who,
            pass,
            // A client with an idempotency key may retry, so the answer must be stored.
            remember: found.detail.contains_key(KEYED),
            asked: 0,
            assistant,
            model: model_of(&found.detail),
            overlay: Overlay::default(),
            session_id: id.clone(),
            run,
            spliced: ReconcileReport::default(),
            messages: Vec::new(),
            detail: found.detail,
            started_at: found.started_at.saturating_add(waited).unwrap_or(found.started_at),
            claimed_at,
            recalled: None,
            asking: SpeculativeSlot::default(),
        }))
    }

    async fn end_abandoned(&self, who: &Principal, id: &SessionId, run: &RunId) -> Result<()> {
        self.write(who, id, Depth::Head, |state, _| {
            let ours = state.head().is_some_and(|h| self.holds(h, run));
            let why = "the node that worked on it has stopped".to_owned();
            let entry = ended(run, RunOutcome::Failed, Some(why), Some("abandoned"));
            Ok(PendingCommit::new(if ours { vec![entry] } else { Vec::new() }, ()))
        })
        .await
    }
}
