//! The first commit of a turn: the request reconciled with the stored history, its new messages, and the
//! start of the run.

use crate::engine::pending_commit::PendingCommit;
use crate::executors::model::{EagerModelCall, SpeculativeSlot};
use crate::rules::checkpoint::client_tools_checkpoint;
use crate::rules::overlay::Overlay;
use crate::rules::prompt::{build_history, is_self_contained, stateless_prompt};
use crate::rules::reconcile::plan::ReconcilePlan;
use crate::rules::reconcile::reconcile;
use crate::rules::session::{Run, Session, StoredMessage};
use crate::run::reconcile_report::ReconcileReport;
use crate::run::request::TurnRequest;
use crate::tenure::Tenure;
use crate::types::blob::Blob;
use crate::types::entry::{Entry, LeaseClaim, Record, RunOutcome, SessionCreated};
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use crate::types::head::Head;
use crate::types::id::{Principal, RunId, Seq, SessionId};
use crate::types::message::Message;
use crate::types::policy::{CheckpointPolicy, HistoryMode, Policy};
use crate::types::resumable::KEYED;
use jiff::Timestamp;
use serde_json::{Map, Value};

impl Tenure {
    /// Begins a turn in an existing session: the new messages and the start of the run are one
    /// commit.
    pub(crate) async fn commit_turn(
        &self,
        principal: &Principal,
        id: &SessionId,
        turn_plan: &TurnPlan<'_>,
        blobs: &[Blob],
    ) -> Result<CommittedTurn> {
        self.write_session(principal, id, |session, now| {
            self.engine.check_active(session.head())?;
            if turn_plan.is_completed(session) {
                return Err(Error::Conflict { session_id: id.clone(), expected: session.head().seq });
            }
            turn_plan.check_assistant(session)?;
            let history = self.policy(&session.head().tenant, session.head().assistant.as_deref()).history;
            let plan = turn_plan.plan(session, history, blobs);
            let mut entries: Vec<Entry> = self
                .end_previous_run(session.as_partial(), turn_plan.run, turn_plan.request.on_busy, now)?
                .into_iter()
                .collect();
            if plan.retained < session.messages.len() {
                entries.push(crate::rules::checkpoint::rewind_entry(session, plan.retained));
            }
            let first_seq = session.head().seq + 1 + entries.len() as Seq;
            entries.extend(plan.message_entries(first_seq).into_iter().map(Entry::Message));
            let input_seq = if plan.append.is_empty() {
                session.messages[..plan.retained].last().map_or(0, |m| m.seq)
            } else {
                session.head().seq + entries.len() as Seq
            };
            let resumes = turn_plan.resumes_run(session);
            let claim = self.lease_claim(now);
            entries.push(if session.head().run.as_ref() == Some(turn_plan.run) {
                Entry::RunClaimed { run: turn_plan.run.clone(), claim }
            } else {
                turn_plan.run_started_entry(claim)
            });
            let sends_results = plan.append.iter().any(|m| m.message.tool_call_id().is_some());
            let policy = self.policy(&session.head().tenant, session.head().assistant.as_deref()).runs.checkpoints;
            if sends_results && matches!(policy, CheckpointPolicy::Tool | CheckpointPolicy::Step) {
                entries.extend(client_tools_checkpoint(session, turn_plan.run));
            }
            let input_seq = if resumes { 0 } else { input_seq };
            let committed = CommittedTurn { resumes, ..self.committed_turn(session, turn_plan, &plan, input_seq) };
            committed.check()?;
            self.start_speculative_call(principal, turn_plan, &committed);
            let mut pending = PendingCommit::new(entries, committed);
            let used_blobs: Vec<_> = plan.append.iter().flat_map(|p| p.message.blob_refs()).map(|c| c.id).collect();
            pending.blobs = blobs.iter().filter(|b| used_blobs.contains(&b.id)).cloned().collect();
            Ok(pending)
        })
        .await
    }

    /// Begins the first turn of a session: creation, messages and run start are one commit.
    pub(crate) async fn commit_first_turn(
        &self,
        principal: &Principal,
        id: &SessionId,
        turn_plan: &TurnPlan<'_>,
        blobs: &[Blob],
    ) -> Result<CommittedTurn> {
        let key = principal.key(id);
        let now = self.now();
        let mut created = SessionCreated { user: principal.user.clone(), ..SessionCreated::default() };
        created.assistant = turn_plan.request.assistant.clone();
        self.engine.check_info(&created)?;
        let first = Record { seq: 1, at: now, entry: Entry::created(created) };
        let Some(head) = Head::begin(&key, &first) else {
            return Err(Error::invalid("session", "the first record does not create a session"));
        };
        let empty = Session::empty(head);
        let plan = turn_plan.plan(&empty, None, blobs);
        let input_seq = if plan.append.is_empty() { 0 } else { 1 + plan.append.len() as Seq };
        let posts = plan.message_entries(2).into_iter().map(Entry::Message);
        let later_records = (2..)
            .zip(posts.chain([turn_plan.run_started_entry(self.lease_claim(now))]))
            .map(|(seq, entry)| Record { seq, at: now, entry });
        let committed = self.committed_turn(&empty, turn_plan, &plan, input_seq);
        committed.check()?;
        // The model is not called speculatively here: the id may turn out to belong to a different
        // user.
        let later_records: Vec<Record> = later_records.collect();
        self.engine.reserve_session(principal, later_records.iter()).await?;
        self.begin_session(&key, &first, later_records, blobs.to_vec()).await?;
        Ok(committed)
    }

    /// Starts a speculative model request that runs concurrently with the commit, if the prompt is
    /// already final: no assistant, no media, no memories, and not a resumed run (D-044).
    fn start_speculative_call(&self, principal: &Principal, turn_plan: &TurnPlan<'_>, committed: &CommittedTurn) {
        let Some(eager_call) = turn_plan.eager_call else { return };
        let has_assistant = committed.assistant.is_some() || turn_plan.request.assistant.is_some();
        let without_media = committed.messages.iter().all(|m| m.blob_refs().is_empty());
        if !has_assistant && without_media && !committed.resumes && !self.injects_memories(&principal.tenant, None) {
            turn_plan.speculative_slot.set(eager_call.with_messages(committed.messages.clone()));
        }
    }

    fn committed_turn(
        &self,
        session: &Session,
        turn_plan: &TurnPlan<'_>,
        plan: &ReconcilePlan,
        input_seq: Seq,
    ) -> CommittedTurn {
        let policy = self.policy(&session.head().tenant, session.head().assistant.as_deref());
        let request = &turn_plan.request.messages;
        let sole_input = (policy.is_stateless() && is_self_contained(request)).then(|| request.clone());
        CommittedTurn {
            resumes: false,
            messages_before: plan.retained.min(session.messages.len()),
            input_seq,
            assistant: session.head().assistant.clone(),
            messages: prompt_after(session, plan, request, &policy),
            sole_input,
            overlay: plan.overlay.clone(),
            reconcile_report: ReconcileReport {
                matched: plan.matched,
                omitted: if policy.is_stateless() { 0 } else { plan.omitted },
                rewound: plan.rewound,
                appended: plan.appended(),
                ephemeral: plan.ephemeral,
                orphans: plan.orphans.clone(),
                memories: Vec::new(),
            },
        }
    }
}

/// The input for opening a turn.
pub(crate) struct TurnPlan<'a> {
    pub request: &'a TurnRequest,
    pub incoming: &'a [Message],
    /// Whether the request had to wait for the session's turn lock or for another node.
    pub has_waited: bool,
    pub run: &'a RunId,
    /// Whether to execute a completed request again because its stored answer is no longer
    /// available.
    pub redo: bool,
    /// The model to call speculatively, and the slot for that request.
    pub eager_call: Option<&'a EagerModelCall>,
    pub speculative_slot: SpeculativeSlot,
}

/// A turn whose start is committed.
pub(crate) struct CommittedTurn {
    /// Whether the run was started earlier (by a previous attempt or another node) and resumes from
    /// its stored state.
    pub resumes: bool,
    pub messages_before: usize,
    pub input_seq: Seq,
    pub assistant: Option<String>,
    pub messages: Vec<Message>,
    /// The request's messages, if the model is shown nothing else (D-130).
    pub sole_input: Option<Vec<Message>>,
    pub overlay: Overlay,
    pub reconcile_report: ReconcileReport,
}

impl CommittedTurn {
    /// Rejects a turn with an empty prompt.
    fn check(&self) -> Result<()> {
        if self.resumes || !self.messages.is_empty() {
            return Ok(());
        }
        let ids = self.reconcile_report.orphans.iter().take(3).map(excerpt).collect::<Vec<_>>();
        let message = format!(
            "nothing to answer: the tool call ids {} are not known in this session; send the tool results to the session that made the calls, or send a user message",
            ids.join(", ")
        );
        Err(Error::invalid("messages", message))
    }
}

impl TurnPlan<'_> {
    /// Rejects a request for a different assistant: a session belongs to one assistant.
    fn check_assistant(&self, session: &Session) -> Result<()> {
        match (&self.request.assistant, &session.head().assistant) {
            (Some(requested), own) if own.as_ref() != Some(requested) => Err(Error::OtherAssistant {
                session_id: session.head().info.session_id.clone(),
                requested: requested.clone(),
                current: own.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Returns true if another node has completed this request in the meantime.
    fn is_completed(&self, session: &Session) -> bool {
        let completed = |r: &Run| r.id == *self.run && r.ended.is_some_and(|(_, o)| o == RunOutcome::Completed);
        !self.redo && session.runs.last().is_some_and(completed)
    }

    /// Returns true if this request was attempted before and its run is still open or has started
    /// tool calls. Such a run is resumed, so that no tool call is executed twice.
    fn resumes_run(&self, session: &Session) -> bool {
        let mut attempts = session.runs.iter().rev().take_while(|r| r.id == *self.run);
        session.head().run.as_ref() == Some(self.run) || attempts.any(|r| !r.tools_started.is_empty())
    }

    fn plan(&self, session: &Session, assistant: Option<HistoryMode>, blobs: &[Blob]) -> ReconcilePlan {
        let mut plan = reconcile(session, &self.request.incoming(self.incoming, assistant, self.has_waited));
        let stored = &session.messages;
        let matched = self.incoming.iter().filter(|m| !m.role().is_instruction()).count();
        if self.resumes_run(session) {
            return ReconcilePlan { retained: stored.len(), matched, ..ReconcilePlan::default() };
        }
        if session.runs.last().is_some_and(|r| r.id == *self.run) {
            // An earlier attempt of this request already stored its messages, and no message was
            // added since. The partial answer of that attempt is discarded.
            let keep = stored.iter().rposition(|m| m.run.as_ref() != Some(self.run)).map_or(0, |i| i + 1);
            return ReconcilePlan { retained: keep, rewound: stored.len() - keep, matched, ..ReconcilePlan::default() };
        }
        plan.overlay.attach(blobs);
        plan
    }

    fn run_started_entry(&self, claim: LeaseClaim) -> Entry {
        let mut detail = Map::new();
        if let Some(resumable) = &self.request.resumable {
            resumable.add_to_detail(&mut detail);
        }
        if self.request.idempotency.is_some() {
            detail.insert(KEYED.to_owned(), Value::Bool(true));
        }
        Entry::RunStarted { run: self.run.clone(), claim: Some(claim), detail }
    }
}

/// Builds the prompt as it will be once the plan is applied to the session. If the policy is stateless, it is
/// the request, or the current turn if the request cannot be answered without it.
pub(crate) fn prompt_after(
    session: &Session,
    plan: &ReconcilePlan,
    request: &[Message],
    policy: &Policy,
) -> Vec<Message> {
    if policy.is_stateless() && is_self_contained(request) {
        return stateless_prompt(request, &[], &[]);
    }
    let summaries = if policy.is_stateless() { &[] } else { &session.summaries[..] };
    let first_seq = session.head().seq + 1;
    let new_messages = (first_seq..).zip(plan.message_entries(first_seq));
    let new_messages: Vec<StoredMessage> =
        new_messages.map(|(seq, post)| StoredMessage::new(seq, Timestamp::UNIX_EPOCH, post)).collect();
    let all = session.messages[..plan.retained].iter().chain(&new_messages);
    build_history(all, &session.reviews, summaries, &policy.window, &plan.overlay)
}
