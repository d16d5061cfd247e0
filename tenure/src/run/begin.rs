//! Begins a turn: resolves the session, acquires its turn lock, reconciles the request with the
//! stored history, and commits the new messages together with the start of the run.
//!
//! Invariants: the user's messages are durable before any model output is used. Where no further
//! lookup is needed, the model is called concurrently with that commit (D-044). The answer is
//! durable before the turn is acknowledged. A turn that fails or is stopped persists the partial
//! answer and records the failure (`run_ended`).

use crate::engine::pending_commit::{Depth, PendingCommit};
use crate::engine::turn_lock::{Admission, OnBusy, TurnGuard};
use crate::executors::model::{EagerModelCall, SpeculativeSlot};
use crate::memory::recall::{MemoryInjection, with_block};
use crate::rules::overlay::Overlay;
use crate::rules::prompt::build_history;
use crate::rules::reconcile::plan::ReconcilePlan;
use crate::rules::reconcile::reconcile;
use crate::rules::session::{Point, Run, Session, StoredMessage};
use crate::run::executors::StoredAnswer;
use crate::run::idempotency::{IdempotencyRecord, derive_run_id, derive_session_id, idempotency_lock_key};
use crate::run::request::{OnExpired, ReconcileReport, TurnRequest};
use crate::tenure::Tenure;
use crate::types::assistant::Assistant;
use crate::types::blob::Blob;
use crate::types::entry::{Entry, Record, RunOutcome, SessionCreated};
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use crate::types::head::Head;
use crate::types::id::{Principal, RunId, Seq, SessionId, SessionKey, Tenant};
use crate::types::message::Message;
use crate::types::policy::HistoryMode;
use crate::types::policy::{CompactionPolicy, OnDisconnect, Window};
use jiff::Timestamp;

use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::Duration;

impl OpenRun {
    /// The principal that the turn runs as: the caller, or the session's owner for a run that was
    /// taken over.
    pub fn principal(&self) -> &Principal {
        &self.principal
    }

    /// The assistant's policy for a client that disconnects. `None` means that the assistant does
    /// not configure one.
    pub fn on_disconnect(&self) -> Option<OnDisconnect> {
        self.assistant.as_ref().and_then(|a| a.sessions.on_disconnect)
    }

    /// The compaction policy: whether a model, and which one, summarizes the history after the turn
    /// if it exceeds its budget.
    pub fn compaction_policy(&self) -> CompactionPolicy {
        self.tenure.policy(&self.principal.tenant, self.assistant.as_ref().map(|a| a.name.as_str())).compact
    }
}

/// The outcome of beginning a turn.
#[derive(Debug)]
pub enum TurnStart {
    /// A turn that is ready to be executed.
    Run(Box<OpenRun>),
    /// The request was already answered: its idempotency key has a stored response (D-047).
    AlreadyAnswered {
        /// The session of the earlier request.
        session_id: SessionId,
        /// The run that produced the stored response.
        run: RunId,
        /// The stored response.
        replay: Box<StoredAnswer>,
    },
}

/// An open turn, ready to be executed. The user's messages are persisted, and the session's turn
/// lock is held until the turn is finished or dropped.
#[derive(Debug)]
pub struct OpenRun {
    pub(crate) tenure: Tenure,
    /// The principal that the turn runs as: the caller, or the session's owner for a run that was
    /// taken over.
    pub(crate) principal: Principal,
    /// The guard of the session's turn lock.
    pub(crate) turn_guard: TurnGuard,
    /// Whether to store the response for a replay under its idempotency key.
    pub(crate) store_answer: bool,
    /// The position of the message that is answered. 0 means that there is none.
    pub(crate) input_seq: Seq,
    /// The assistant that the session belongs to.
    pub(crate) assistant: Option<Arc<Assistant>>,
    /// The model that answers. It is stored as the session's model once it has answered.
    pub(crate) model: Option<String>,
    /// Replacements for stored messages, shown to the model but not stored (D-022).
    pub(crate) overlay: Overlay,
    /// The session's id.
    pub session_id: SessionId,
    /// The id of the run.
    pub run: RunId,
    /// The report of how the request's messages were merged into the stored history.
    pub reconcile_report: ReconcileReport,
    /// The first prompt. Empty if the run resumes from its stored state.
    pub messages: Vec<Message>,
    /// The parameters that the run was started with.
    pub detail: Map<String, Value>,
    /// The time when the run was started. For a run that was taken over, the time it was paused for
    /// reviews is added, so that it does not count against `max_time`.
    pub started_at: Timestamp,
    /// The time when this node claimed the run.
    pub(crate) claimed_at: Timestamp,
    /// Recalled memories that are injected into the prompt.
    pub(crate) memory_injection: Option<MemoryInjection>,
    /// A model request that is already in flight.
    pub(crate) speculative_call: SpeculativeSlot,
}

/// Key in a run's detail: the request had an idempotency key, so its answer must be stored for a
/// replay.
pub(crate) const KEYED: &str = "keyed";

/// Maximum retries if a session exists but is not visible: another node may be moving it to a
/// different id.
const MAX_INVISIBLE_RETRIES: usize = 3;

impl Tenure {
    /// Begins a turn: resolves the session, waits for its turn lock, and commits the client's
    /// messages.
    pub async fn begin_turn(&self, principal: &Principal, request: TurnRequest) -> Result<TurnStart> {
        self.begin_turn_with(principal, request, None).await
    }

    /// Begins a turn like [`Tenure::begin_turn`], but sends the model request concurrently with the
    /// commit of the client's messages. No output is used before the commit succeeds; if it fails,
    /// the request is cancelled. Falls back to sequential order for new sessions, and for turns
    /// with an assistant or media (D-044).
    pub async fn begin_turn_eager(
        &self,
        principal: &Principal,
        request: TurnRequest,
        eager_call: &EagerModelCall,
    ) -> Result<TurnStart> {
        self.begin_turn_with(principal, request, Some(eager_call)).await
    }

    async fn begin_turn_with(
        &self,
        principal: &Principal,
        request: TurnRequest,
        eager_call: Option<&EagerModelCall>,
    ) -> Result<TurnStart> {
        let (incoming, blobs) = self.engine.detach(&request.messages)?;
        // Requests with the same idempotency key are serialized until the first one has stored its
        // claim.
        let _key_guard = match &request.idempotency {
            Some((key, _)) => Some(
                self.shared
                    .key_locks
                    .acquire(&idempotency_lock_key(principal, key)?, OnBusy::Queue, self.limits().max_queue)
                    .await?,
            ),
            None => None,
        };
        let key_record = self.find_idempotency_record(principal, &request).await?;
        // A retried request waits for its first attempt. It never interrupts it and never forks the
        // session.
        let on_busy = if key_record.is_some() { OnBusy::Queue } else { request.on_busy };
        let new_id = || {
            request
                .idempotency
                .as_ref()
                .map_or_else(SessionId::generate, |(key, body)| derive_session_id(principal, key, body))
        };
        let mut id = match (&key_record, &request.session) {
            (Some(key_record), _) => key_record.session.clone(),
            (None, Some(id)) => id.clone(),
            (None, None) if request.content_matching => self.find(principal, &incoming).await?.unwrap_or_else(new_id),
            (None, None) => new_id(),
        };
        // The run id is derived from the request, so two nodes that receive the same request
        // concurrently use the same run.
        let run = request
            .idempotency
            .as_ref()
            .map_or_else(RunId::generate, |(key, body)| derive_run_id(principal, key, body));
        let mut attempts = 0;
        let mut waited = Duration::ZERO;
        let mut redo = false;
        let mut invisible_retries = 0;
        while attempts <= self.limits().max_retries {
            let key = principal.key(&id);
            let max = self.limits().max_queue;
            let turn_guard = match self
                .shared
                .turn_locks
                .acquire_with_callback(&key, on_busy, max, || request.notify_queued())
                .await?
            {
                Admission::Admitted(turn_guard) => turn_guard,
                Admission::Branch(before) => {
                    id = self.fork(principal, &id, Point::Position(before), None).await?.info.session_id;
                    attempts += 1;
                    continue;
                }
            };
            let key_record = self.find_idempotency_record(principal, &request).await?;
            if let Some(key_record) = &key_record
                && let Some(replay) = self.stored_answer(principal, key_record).await?
            {
                return Ok(TurnStart::AlreadyAnswered { session_id: id, run, replay });
            }
            let started_at = self.now();
            let has_waited = turn_guard.has_waited() || !waited.is_zero();
            let speculative_slot = SpeculativeSlot::default();
            let turn_plan = TurnPlan {
                request: &request,
                incoming: &incoming,
                has_waited,
                run: &run,
                redo,
                eager_call,
                speculative_slot,
            };
            if let (Some((key, body)), None) = (&request.idempotency, &key_record) {
                self.store_idempotency_record(
                    principal,
                    key,
                    IdempotencyRecord { body: body.clone(), session: id.clone(), run: run.clone() },
                )
                .await?;
            }
            let commit = async {
                match self.commit_turn(principal, &id, &turn_plan, &blobs).await {
                    Err(Error::NotFound { .. }) => self.commit_first_turn(principal, &id, &turn_plan, &blobs).await,
                    other => other,
                }
            };
            let committed = match turn_plan.speculative_slot.during(commit).await {
                Ok(committed) => committed,
                // Another node is working on the session. If it executes this very request, wait
                // for it; never interrupt or fork.
                Err(e @ Error::Busy { .. }) => {
                    drop(turn_guard);
                    if matches!(on_busy, OnBusy::Queue | OnBusy::Interrupt) {
                        request.notify_queued();
                    }
                    let is_same_run = self.head(principal, &id).await.is_ok_and(|h| h.run.as_ref() == Some(&run));
                    match on_busy {
                        OnBusy::Queue => self.wait_for_release(&key, &mut waited).await?,
                        _ if is_same_run => self.wait_for_release(&key, &mut waited).await?,
                        OnBusy::Branch => {
                            let before = self.head(principal, &id).await?.digest.turns.saturating_sub(1);
                            id = self.fork(principal, &id, Point::Turn(before), None).await?.info.session_id;
                        }
                        _ => return Err(e),
                    }
                    continue;
                }
                // Another node has just completed this request: its answer is stored now.
                Err(Error::Conflict { .. }) if !redo => {
                    redo = true;
                    continue;
                }
                // The session was found by content and has been deleted since. The request did not
                // name it, so a new one is started.
                Err(Error::Gone { status: "deleted", .. }) if request.session.is_none() && key_record.is_none() => {
                    id = SessionId::generate();
                    attempts += 1;
                    continue;
                }
                Err(Error::Gone { status, session_id }) => {
                    match self.handle_expired(principal, &session_id, status, request.on_expired).await {
                        // Another node has just moved the session to a different id.
                        Ok(()) | Err(Error::NotFound { .. }) => attempts += 1,
                        Err(e) => return Err(e),
                    }
                    continue;
                }
                // The session was created concurrently, has been moved by another node, or belongs
                // to a different user. Reading its head tells which.
                Err(Error::Exists { session_id }) => {
                    match self.head(principal, &session_id).await {
                        Ok(_) => {}
                        Err(Error::NotFound { .. }) if invisible_retries < MAX_INVISIBLE_RETRIES => {
                            invisible_retries += 1
                        }
                        Err(e) => return Err(e),
                    }
                    attempts += 1;
                    continue;
                }
                Err(e) => return Err(e),
            };
            let speculative_call = turn_plan.speculative_slot;
            turn_guard.record_turn_start(committed.messages_before, &run);
            let memory_injection =
                self.recall_for_prompt(principal, &id, committed.assistant.as_deref(), &committed.messages).await;
            let assistant =
                self.assistant_of(principal, committed.assistant.or_else(|| request.assistant.clone())).await?;
            let block = memory_injection.as_ref().map(|r| &r.block);
            let messages = if committed.resumes {
                Vec::new()
            } else {
                with_block(self.prompt(&principal.tenant, assistant.as_deref(), committed.messages).await?, block)
            };
            let mut reconcile_report = committed.reconcile_report;
            reconcile_report.memories = memory_injection.as_ref().map(|r| r.memories.clone()).unwrap_or_default();
            let open_run = OpenRun {
                tenure: self.clone(),
                principal: principal.clone(),
                turn_guard,
                store_answer: request.idempotency.is_some(),
                input_seq: committed.input_seq,
                assistant,
                model: request.model,
                overlay: committed.overlay,
                session_id: id,
                run,
                reconcile_report,
                messages,
                detail: request.detail,
                started_at,
                claimed_at: started_at,
                memory_injection,
                speculative_call,
            };
            return Ok(TurnStart::Run(Box::new(open_run)));
        }
        Err(Error::Conflict { session_id: id, expected: 0 })
    }

    /// Finds the run that was started by a request with this idempotency key and body. `None` if
    /// there is none, or if it no longer exists.
    pub async fn find_by_idempotency_key(
        &self,
        principal: &Principal,
        key: &str,
        body: &str,
    ) -> Result<Option<(SessionId, RunId)>> {
        let request = TurnRequest { idempotency: Some((key.to_owned(), body.to_owned())), ..TurnRequest::default() };
        let Some(key_record) = self.find_idempotency_record(principal, &request).await? else { return Ok(None) };
        match self.get_run(principal, &key_record.session, &key_record.run).await {
            Ok(_) => Ok(Some((key_record.session, key_record.run))),
            Err(Error::NotFound { .. } | Error::NoSuchRun { .. } | Error::Gone { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Returns the prompt that a model would be sent for this request, without persisting anything.
    pub async fn preview(&self, principal: &Principal, request: &TurnRequest) -> Result<Vec<Message>> {
        self.engine.detach(&request.messages)?; // checks the size limits
        let session = match &request.session {
            Some(id) => match self.load(principal, id).await {
                Ok(session) => Some(session),
                Err(Error::NotFound { .. }) => None,
                Err(Error::Gone { status: "expired", .. }) if request.on_expired == OnExpired::Fresh => None,
                Err(Error::Gone { status: "expired", .. }) if request.on_expired == OnExpired::Restore => {
                    Some(self.load_any(principal, id).await?)
                }
                Err(e) => return Err(e),
            },
            None => None,
        };
        let assistant = session.as_ref().and_then(|s| s.assistant.clone()).or_else(|| request.assistant.clone());
        let assistant = self.assistant_of(principal, assistant).await?;
        let mut messages: Vec<Message> = instructions(assistant.as_deref()).collect();
        let Some(session) = session else {
            messages.extend(request.messages.iter().cloned());
            return Ok(messages);
        };
        let policy = self.policy(&principal.tenant, session.assistant.as_deref());
        let plan = reconcile(&session, &request.incoming(&request.messages, policy.history, false));
        messages.extend(prompt_after(&session, &plan, &policy.window));
        Ok(messages)
    }

    /// Loads an assistant by its name, if one is given.
    pub(crate) async fn assistant_of(
        &self,
        principal: &Principal,
        name: Option<String>,
    ) -> Result<Option<Arc<Assistant>>> {
        match name {
            Some(name) => self.assistant(principal, &name).await,
            None => Ok(None),
        }
    }

    /// Builds the prompt: the assistant's instructions followed by the messages, with media loaded
    /// from their blobs.
    pub(crate) async fn prompt(
        &self,
        tenant: &Tenant,
        assistant: Option<&Assistant>,
        history: Vec<Message>,
    ) -> Result<Vec<Message>> {
        let mut messages: Vec<Message> = instructions(assistant).collect();
        messages.reserve(history.len());
        for message in history {
            messages.push(if message.blob_refs().is_empty() {
                message
            } else {
                self.engine.attach_message(tenant, &message).await?
            });
        }
        Ok(messages)
    }

    /// Waits for another node to release a session: for a change notification, or with backoff from
    /// 20 ms to 500 ms. Returns [`Error::Busy`] once the total exceeds `max_wait`.
    async fn wait_for_release(&self, key: &SessionKey, total_wait: &mut Duration) -> Result<()> {
        let pause = (*total_wait / 4).clamp(Duration::from_millis(20), Duration::from_millis(500));
        *total_wait += pause;
        if *total_wait > self.limits().max_wait {
            return Err(Error::Busy { session_id: key.session.clone() });
        }
        let watch = self.engine.watch(key);
        let _ = tokio::time::timeout(pause, watch.remote_change()).await;
        Ok(())
    }

    /// Restores an expired session, or moves it to another id so that a new one can start (D-018).
    /// A deleted session stays as it is (D-019).
    async fn handle_expired(
        &self,
        principal: &Principal,
        id: &SessionId,
        status: &'static str,
        policy: OnExpired,
    ) -> Result<()> {
        match (status, policy) {
            ("deleted", _) | (_, OnExpired::Reject) => Err(Error::Gone { session_id: id.clone(), status }),
            (_, OnExpired::Restore) => self.restore(principal, id).await.map(drop),
            (_, OnExpired::Fresh) => self.archive(principal, id).await,
        }
    }

    async fn commit_turn(
        &self,
        principal: &Principal,
        id: &SessionId,
        turn_plan: &TurnPlan<'_>,
        blobs: &[Blob],
    ) -> Result<CommittedTurn> {
        self.write(principal, id, Depth::Session, |state, now| {
            let session = self.engine.full_session_ref(state, id)?;
            self.engine.check_active(session)?;
            if turn_plan.is_completed(session) {
                return Err(Error::Conflict { session_id: id.clone(), expected: session.seq });
            }
            turn_plan.check_assistant(session)?;
            let history = self.policy(&session.tenant, session.assistant.as_deref()).history;
            let plan = turn_plan.plan(session, history, blobs);
            let mut entries: Vec<Entry> =
                self.end_previous_run(session, turn_plan.run, turn_plan.request.on_busy, now)?.into_iter().collect();
            let mut discarded = Vec::new();
            if plan.retained < session.messages.len() {
                let (entry, messages) = crate::rules::checkpoint::rewind_entry(session, plan.retained);
                entries.push(entry);
                discarded = messages;
            }
            let first_seq = session.seq + 1 + entries.len() as Seq;
            entries.extend(plan.message_entries(first_seq).into_iter().map(Entry::Message));
            let input_seq = if plan.append.is_empty() {
                session.messages[..plan.retained].last().map_or(0, |m| m.seq)
            } else {
                session.seq + entries.len() as Seq
            };
            let resumes = turn_plan.resumes_run(session);
            let claim = self.lease_claim(now);
            entries.push(if session.head().run.as_ref() == Some(turn_plan.run) {
                Entry::RunClaimed { run: turn_plan.run.clone(), claim }
            } else {
                turn_plan.run_started_entry(claim)
            });
            let input_seq = if resumes { 0 } else { input_seq };
            let committed = CommittedTurn { resumes, ..self.committed_turn(session, &plan, input_seq) };
            committed.check()?;
            self.start_speculative_call(principal, turn_plan, &committed);
            let mut pending = PendingCommit::new(entries, committed);
            let used_blobs: Vec<_> = plan.append.iter().flat_map(|p| p.message.blob_refs()).map(|c| c.id).collect();
            pending.blobs = blobs.iter().filter(|b| used_blobs.contains(&b.id)).cloned().collect();
            pending.discarded = discarded;
            Ok(pending)
        })
        .await
    }

    /// Returns the entry that ends a run left open by another (possibly dead) node, or
    /// [`Error::Busy`] if that node's lease is still valid and the turn may not interrupt it. The
    /// caller holds the local turn lock, so the run is executed by another node or by none (D-041).
    pub(crate) fn end_previous_run(
        &self,
        session: &Session,
        new_run: &RunId,
        on_busy: OnBusy,
        now: Timestamp,
    ) -> Result<Option<Entry>> {
        let Some(run) = session.head().run.clone() else { return Ok(None) };
        let lease = session.head().lease.as_ref().filter(|l| l.node != self.node());
        let is_resumable = session.run(&run).is_some_and(|r| r.detail.contains_key("model"));
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
            return Err(Error::Busy { session_id: session.info.session_id.clone() });
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

    /// Begins the first turn of a session: creation, messages and run start are one commit.
    async fn commit_first_turn(
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
        let committed = self.committed_turn(&empty, &plan, input_seq);
        committed.check()?;
        // The model is not called speculatively here: the id may turn out to belong to a different
        // user.
        let later_records: Vec<Record> = later_records.collect();
        self.engine.reserve_session(principal, later_records.iter()).await?;
        self.engine.begin_with(&key, &first, later_records, blobs.to_vec()).await?;
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

    fn committed_turn(&self, session: &Session, plan: &ReconcilePlan, input_seq: Seq) -> CommittedTurn {
        let window = self.policy(&session.tenant, session.assistant.as_deref()).window;
        CommittedTurn {
            resumes: false,
            messages_before: plan.retained.min(session.messages.len()),
            input_seq,
            assistant: session.assistant.clone(),
            messages: prompt_after(session, plan, &window),
            overlay: plan.overlay.clone(),
            reconcile_report: ReconcileReport {
                matched: plan.matched,
                omitted: plan.omitted,
                rewound: plan.rewound,
                appended: plan.appended(),
                ephemeral: plan.ephemeral,
                orphans: plan.orphans.clone(),
                memories: Vec::new(),
            },
        }
    }
}

/// The assistant's instructions as a system message, if it has any.
fn instructions(assistant: Option<&Assistant>) -> impl Iterator<Item = Message> {
    assistant.and_then(|a| a.instructions.as_deref()).map(Message::system).into_iter()
}

/// The input for opening a turn.
struct TurnPlan<'a> {
    request: &'a TurnRequest,
    incoming: &'a [Message],
    /// Whether the request had to wait for the session's turn lock or for another node.
    has_waited: bool,
    run: &'a RunId,
    /// Whether to execute a completed request again because its stored answer is no longer
    /// available.
    redo: bool,
    /// The model to call speculatively, and the slot for that request.
    eager_call: Option<&'a EagerModelCall>,
    speculative_slot: SpeculativeSlot,
}

/// A turn whose start is committed.
struct CommittedTurn {
    /// Whether the run was started earlier (by a previous attempt or another node) and resumes from
    /// its stored state.
    resumes: bool,
    messages_before: usize,
    input_seq: Seq,
    assistant: Option<String>,
    messages: Vec<Message>,
    overlay: Overlay,
    reconcile_report: ReconcileReport,
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
        match (&self.request.assistant, &session.assistant) {
            (Some(requested), own) if own.as_ref() != Some(requested) => Err(Error::OtherAssistant {
                session_id: session.info.session_id.clone(),
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

    fn run_started_entry(&self, claim: crate::types::entry::LeaseClaim) -> Entry {
        let mut detail = self.request.detail.clone();
        if self.request.idempotency.is_some() {
            detail.insert(KEYED.to_owned(), Value::Bool(true));
        }
        Entry::RunStarted { run: self.run.clone(), claim: Some(claim), detail }
    }
}

/// Builds the prompt as it will be once the plan is applied to the session.
fn prompt_after(session: &Session, plan: &ReconcilePlan, window: &Window) -> Vec<Message> {
    let first_seq = session.seq + 1;
    let new_messages = (first_seq..).zip(plan.message_entries(first_seq));
    let new_messages: Vec<StoredMessage> =
        new_messages.map(|(seq, post)| StoredMessage::new(seq, Timestamp::UNIX_EPOCH, post)).collect();
    let all = session.messages[..plan.retained].iter().chain(&new_messages);
    build_history(all, &session.reviews, &session.summaries, window, &plan.overlay)
}
