//! Begins a turn: resolves the session, acquires its turn lock, reconciles the request with the
//! stored history, and commits the new messages together with the start of the run.
//!
//! Invariants: the user's messages are durable before any model output is used. Where no further
//! lookup is needed, the model is called concurrently with that commit (D-044). The answer is
//! durable before the turn is acknowledged. A turn that fails or is stopped persists the partial
//! answer and records the failure (`run_ended`).

use crate::engine::draft::{Depth, PendingCommit};
use crate::engine::turn_lock::{Admission, OnBusy, TurnGuard};
use crate::executors::model::{EagerModelCall, SpeculativeSlot};
use crate::memory::recall::{MemoryInjection, with_block};
use crate::rules::overlay::Overlay;
use crate::rules::prompt::shown_with;
use crate::rules::reconcile::plan::ReconcilePlan;
use crate::rules::reconcile::reconcile;
use crate::rules::session::{Point, Run, Session, StoredMessage};
use crate::run::executors::StoredAnswer;
use crate::run::idempotency::{IdempotencyRecord, place, same_id, same_run};
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
        &self.who
    }

    /// The assistant's policy for a client that disconnects. `None` means that the assistant does
    /// not configure one.
    pub fn on_disconnect(&self) -> Option<OnDisconnect> {
        self.assistant.as_ref().and_then(|a| a.sessions.on_disconnect)
    }

    /// The compaction policy: whether a model, and which one, summarizes the history after the turn
    /// if it exceeds its budget.
    pub fn compact(&self) -> CompactionPolicy {
        self.tenure.policy(&self.who.tenant, self.assistant.as_ref().map(|a| a.name.as_str())).compact
    }
}

/// The outcome of beginning a turn.
#[derive(Debug)]
pub enum TurnStart {
    /// A turn that is ready to be executed.
    Turn(Box<OpenRun>),
    /// The request was already answered: its idempotency key has a stored response (D-047).
    Before {
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
    pub(crate) who: Principal,
    /// The guard of the session's turn lock.
    pub(crate) pass: TurnGuard,
    /// Whether to store the response for a replay under its idempotency key.
    pub(crate) remember: bool,
    /// The position of the message that is answered. 0 means that there is none.
    pub(crate) asked: Seq,
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
    pub spliced: ReconcileReport,
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
    pub(crate) recalled: Option<MemoryInjection>,
    /// A model request that is already in flight.
    pub(crate) asking: SpeculativeSlot,
}

/// Key in a run's detail: the request had an idempotency key, so its answer must be stored for a
/// replay.
pub(crate) const KEYED: &str = "keyed";

/// Maximum retries if a session exists but is not visible: another node may be moving it to a
/// different id.
const MAX_VANISHED: usize = 3;

impl Tenure {
    /// Begins a turn: resolves the session, waits for its turn lock, and commits the client's
    /// messages.
    pub async fn turn(&self, who: &Principal, ask: TurnRequest) -> Result<TurnStart> {
        self.begin_turn(who, ask, None).await
    }

    /// Begins a turn like [`Tenure::turn`], but sends the model request concurrently with the
    /// commit of the client's messages. No output is used before the commit succeeds; if it fails,
    /// the request is cancelled. Falls back to sequential order for new sessions, and for turns
    /// with an assistant or media (D-044).
    pub async fn turn_asking(&self, who: &Principal, ask: TurnRequest, first: &EagerModelCall) -> Result<TurnStart> {
        self.begin_turn(who, ask, Some(first)).await
    }

    async fn begin_turn(&self, who: &Principal, ask: TurnRequest, first: Option<&EagerModelCall>) -> Result<TurnStart> {
        let (incoming, blobs) = self.engine.detach(&ask.messages)?;
        // Requests with the same idempotency key are serialized until the first one has stored its
        // claim.
        let _claiming = match &ask.idempotency {
            Some((key, _)) => {
                Some(self.shared.key_locks.enter(&place(who, key)?, OnBusy::Queue, self.limits().max_queue).await?)
            }
            None => None,
        };
        let claim = self.claimed(who, &ask).await?;
        // A retried request waits for its first attempt. It never interrupts it and never forks the
        // session.
        let on_busy = if claim.is_some() { OnBusy::Queue } else { ask.on_busy };
        let fresh = || ask.idempotency.as_ref().map_or_else(SessionId::generate, |(key, body)| same_id(who, key, body));
        let mut id = match (&claim, &ask.session) {
            (Some(claim), _) => claim.session.clone(),
            (None, Some(id)) => id.clone(),
            (None, None) if ask.content_matching => self.find(who, &incoming).await?.unwrap_or_else(fresh),
            (None, None) => fresh(),
        };
        // The run id is derived from the request, so two nodes that receive the same request
        // concurrently use the same run.
        let run = ask.idempotency.as_ref().map_or_else(RunId::generate, |(key, body)| same_run(who, key, body));
        let (mut tries, mut waited, mut redo) = (0, Duration::ZERO, false);
        let mut vanished = 0;
        while tries <= self.limits().max_retries {
            let key = who.key(&id);
            let max = self.limits().max_queue;
            let pass = match self.shared.turn_locks.enter_telling(&key, on_busy, max, || ask.tell_queued()).await? {
                Admission::Pass(pass) => pass,
                Admission::Branch(before) => {
                    id = self.fork(who, &id, Point::Position(before), None).await?.info.session_id;
                    tries += 1;
                    continue;
                }
            };
            let claim = self.claimed(who, &ask).await?;
            if let Some(claim) = &claim
                && let Some(replay) = self.answer_of(who, claim).await?
            {
                return Ok(TurnStart::Before { session_id: id, run, replay });
            }
            let opening_at = self.now();
            let has_waited = pass.has_waited() || !waited.is_zero();
            let beside = SpeculativeSlot::default();
            let opening = TurnPlan { ask: &ask, incoming: &incoming, has_waited, run: &run, redo, first, beside };
            if let (Some((key, body)), None) = (&ask.idempotency, &claim) {
                self.remember_key(
                    who,
                    key,
                    IdempotencyRecord { body: body.clone(), session: id.clone(), run: run.clone() },
                )
                .await?;
            }
            let open = async {
                match self.open_turn(who, &id, &opening, &blobs).await {
                    Err(Error::NotFound { .. }) => self.open_fresh(who, &id, &opening, &blobs).await,
                    other => other,
                }
            };
            let opened = match opening.beside.during(open).await {
                Ok(opened) => opened,
                // Another node is working on the session. If it executes this very request, wait
                // for it; never interrupt or fork.
                Err(e @ Error::Busy { .. }) => {
                    drop(pass);
                    if matches!(on_busy, OnBusy::Queue | OnBusy::Interrupt) {
                        ask.tell_queued();
                    }
                    let same = self.head(who, &id).await.is_ok_and(|h| h.run.as_ref() == Some(&run));
                    match on_busy {
                        OnBusy::Queue => self.wait_for(&key, &mut waited).await?,
                        _ if same => self.wait_for(&key, &mut waited).await?,
                        OnBusy::Branch => {
                            let before = self.head(who, &id).await?.mark.turns.saturating_sub(1);
                            id = self.fork(who, &id, Point::Turn(before), None).await?.info.session_id;
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
                Err(Error::Gone { status: "deleted", .. }) if ask.session.is_none() && claim.is_none() => {
                    id = SessionId::generate();
                    tries += 1;
                    continue;
                }
                Err(Error::Gone { status, session_id }) => {
                    match self.reopen(who, &session_id, status, ask.on_expired).await {
                        // Another node has just moved the session to a different id.
                        Ok(()) | Err(Error::NotFound { .. }) => tries += 1,
                        Err(e) => return Err(e),
                    }
                    continue;
                }
                // The session was created concurrently, has been moved by another node, or belongs
                // to a different user. Reading its head tells which.
                Err(Error::Exists { session_id }) => {
                    match self.head(who, &session_id).await {
                        Ok(_) => {}
                        Err(Error::NotFound { .. }) if vanished < MAX_VANISHED => vanished += 1,
                        Err(e) => return Err(e),
                    }
                    tries += 1;
                    continue;
                }
                Err(e) => return Err(e),
            };
            let asking = opening.beside;
            pass.began(opened.before, &run);
            let started_at = opening_at;
            let recalled = self.recollect(who, &id, opened.assistant.as_deref(), &opened.messages).await;
            let assistant = self.assistant_of(who, opened.assistant.or_else(|| ask.assistant.clone())).await?;
            let block = recalled.as_ref().map(|r| &r.block);
            let messages = match opened.goes_on {
                true => Vec::new(),
                false => with_block(self.prompt(&who.tenant, assistant.as_deref(), opened.messages).await?, block),
            };
            let (tenure, who, remember) = (self.clone(), who.clone(), ask.idempotency.is_some());
            let (asked, mut spliced, detail) = (opened.asked, opened.spliced, ask.detail);
            let (model, overlay) = (ask.model, opened.overlay);
            spliced.memories = recalled.as_ref().map(|r| r.told.clone()).unwrap_or_default();
            let session_id = id;
            let turn = OpenRun {
                tenure,
                who,
                pass,
                remember,
                asked,
                assistant,
                model,
                overlay,
                session_id,
                run,
                spliced,
                messages,
                detail,
                started_at,
                claimed_at: started_at,
                recalled,
                asking,
            };
            return Ok(TurnStart::Turn(Box::new(turn)));
        }
        Err(Error::Conflict { session_id: id, expected: 0 })
    }

    /// Finds the run that was started by a request with this idempotency key and body. `None` if
    /// there is none, or if it no longer exists.
    pub async fn started(&self, who: &Principal, key: &str, body: &str) -> Result<Option<(SessionId, RunId)>> {
        let ask = TurnRequest { idempotency: Some((key.to_owned(), body.to_owned())), ..TurnRequest::default() };
        let Some(claim) = self.claimed(who, &ask).await? else { return Ok(None) };
        match self.run(who, &claim.session, &claim.run).await {
            Ok(_) => Ok(Some((claim.session, claim.run))),
            Err(Error::NotFound { .. } | Error::NoSuchRun { .. } | Error::Gone { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Returns the prompt that a model would be sent for this request, without persisting anything.
    pub async fn preview(&self, who: &Principal, ask: &TurnRequest) -> Result<Vec<Message>> {
        self.engine.detach(&ask.messages)?; // checks the size limits
        let session = match &ask.session {
            Some(id) => match self.load(who, id).await {
                Ok(session) => Some(session),
                Err(Error::NotFound { .. }) => None,
                Err(Error::Gone { status: "expired", .. }) if ask.on_expired == OnExpired::Fresh => None,
                Err(Error::Gone { status: "expired", .. }) if ask.on_expired == OnExpired::Restore => {
                    Some(self.load_any(who, id).await?)
                }
                Err(e) => return Err(e),
            },
            None => None,
        };
        let assistant = session.as_ref().and_then(|s| s.assistant.clone()).or_else(|| ask.assistant.clone());
        let assistant = self.assistant_of(who, assistant).await?;
        let mut messages: Vec<Message> = instructions(assistant.as_deref()).collect();
        let Some(session) = session else {
            messages.extend(ask.messages.iter().cloned());
            return Ok(messages);
        };
        let policy = self.policy(&who.tenant, session.assistant.as_deref());
        let plan = reconcile(&session, &ask.incoming(&ask.messages, policy.history, false));
        messages.extend(shown_after(&session, &plan, &policy.window));
        Ok(messages)
    }

    /// Loads an assistant by its name, if one is given.
    pub(crate) async fn assistant_of(&self, who: &Principal, name: Option<String>) -> Result<Option<Arc<Assistant>>> {
        match name {
            Some(name) => self.assistant(who, &name).await,
            None => Ok(None),
        }
    }

    /// Builds the prompt: the assistant's instructions followed by the messages, with media loaded
    /// from their blobs.
    pub(crate) async fn prompt(
        &self,
        tenant: &Tenant,
        assistant: Option<&Assistant>,
        said: Vec<Message>,
    ) -> Result<Vec<Message>> {
        let mut messages: Vec<Message> = instructions(assistant).collect();
        messages.reserve(said.len());
        for message in said {
            messages.push(match message.cuts().is_empty() {
                true => message,
                false => self.engine.attach_message(tenant, &message).await?,
            });
        }
        Ok(messages)
    }

    /// Waits for another node to release a session: for a change notification, or with backoff from
    /// 20 ms to 500 ms. Returns [`Error::Busy`] once the total exceeds `max_wait`.
    async fn wait_for(&self, key: &SessionKey, waited: &mut Duration) -> Result<()> {
        let pause = (*waited / 4).clamp(Duration::from_millis(20), Duration::from_millis(500));
        *waited += pause;
        if *waited > self.limits().max_wait {
            return Err(Error::Busy { session_id: key.session.clone() });
        }
        let watch = self.engine.watch(key);
        let _ = tokio::time::timeout(pause, watch.elsewhere()).await;
        Ok(())
    }

    /// Restores an expired session, or moves it to another id so that a new one can start (D-018).
    /// A deleted session stays as it is (D-019).
    async fn reopen(&self, who: &Principal, id: &SessionId, status: &'static str, rule: OnExpired) -> Result<()> {
        match (status, rule) {
            ("deleted", _) | (_, OnExpired::Reject) => Err(Error::Gone { session_id: id.clone(), status }),
            (_, OnExpired::Restore) => self.restore(who, id).await.map(drop),
            (_, OnExpired::Fresh) => self.archive(who, id).await,
        }
    }

    async fn open_turn(
        &self,
        who: &Principal,
        id: &SessionId,
        opening: &TurnPlan<'_>,
        blobs: &[Blob],
    ) -> Result<CommittedTurn> {
        self.write(who, id, Depth::Session, |state, now| {
            let session = self.engine.whole_ref(state, id)?;
            self.engine.check_active(session)?;
            if opening.is_done(session) {
                return Err(Error::Conflict { session_id: id.clone(), expected: session.seq });
            }
            opening.check_assistant(session)?;
            let history = self.policy(&session.tenant, session.assistant.as_deref()).history;
            let plan = opening.plan(session, history, blobs);
            let mut entries: Vec<Entry> =
                self.step_in(session, opening.run, opening.ask.on_busy, now)?.into_iter().collect();
            let mut cut = Vec::new();
            if plan.keep < session.messages.len() {
                let (entry, messages) = crate::rules::checkpoint::rewound(session, plan.keep);
                entries.push(entry);
                cut = messages;
            }
            let first = session.seq + 1 + entries.len() as Seq;
            entries.extend(plan.posts(first).into_iter().map(Entry::Message));
            let asked = match plan.append.is_empty() {
                true => session.messages[..plan.keep].last().map_or(0, |m| m.seq),
                false => session.seq + entries.len() as Seq,
            };
            let (goes_on, claim) = (opening.goes_on(session), self.claim(now));
            entries.push(match session.head().run.as_ref() == Some(opening.run) {
                true => Entry::RunClaimed { run: opening.run.clone(), claim },
                false => opening.started(claim),
            });
            let asked = if goes_on { 0 } else { asked };
            let opened = CommittedTurn { goes_on, ..self.opened(session, &plan, asked) };
            opened.check()?;
            self.ask_beside(who, opening, &opened);
            let mut draft = PendingCommit::new(entries, opened);
            let used: Vec<_> = plan.append.iter().flat_map(|p| p.message.cuts()).map(|c| c.id).collect();
            draft.blobs = blobs.iter().filter(|b| used.contains(&b.id)).cloned().collect();
            draft.cut = cut;
            Ok(draft)
        })
        .await
    }

    /// Returns the entry that ends a run left open by another (possibly dead) node, or
    /// [`Error::Busy`] if that node's lease is still valid and the turn may not interrupt it. The
    /// caller holds the local turn lock, so the run is executed by another node or by none (D-041).
    pub(crate) fn step_in(
        &self,
        session: &Session,
        by: &RunId,
        on_busy: OnBusy,
        now: Timestamp,
    ) -> Result<Option<Entry>> {
        let Some(run) = session.head().run.clone() else { return Ok(None) };
        let lease = session.head().lease.as_ref().filter(|l| l.node != self.node());
        let lasting = session.run(&run).is_some_and(|r| r.detail.contains_key("model"));
        let at_work = lease.is_some_and(|l| match lasting {
            // A run that records its model is resumable: other nodes get one more lease duration to
            // take it over (D-043).
            true => !self.is_free(l, now.saturating_sub(self.lease()).unwrap_or(now)),
            false => !self.is_free(l, now),
        });
        // The same request, executed by another node, must not be interrupted by its own retry.
        let same = run == *by;
        if at_work && (same || on_busy != OnBusy::Interrupt) {
            return Err(Error::Busy { session_id: session.info.session_id.clone() });
        }
        if same {
            return Ok(None);
        }
        let (outcome, error, code) = match at_work {
            true => (RunOutcome::Cancelled, "another request interrupted it", "interrupted"),
            false => (RunOutcome::Failed, "the node that worked on it has stopped", "abandoned"),
        };
        Ok(Some(Entry::RunEnded { run, outcome, error: Some(error.to_owned()), code: Some(code.to_owned()) }))
    }

    /// Begins the first turn of a session: creation, messages and run start are one commit.
    async fn open_fresh(
        &self,
        who: &Principal,
        id: &SessionId,
        opening: &TurnPlan<'_>,
        blobs: &[Blob],
    ) -> Result<CommittedTurn> {
        let (key, now) = (who.key(id), self.now());
        let mut created = SessionCreated { user: who.user.clone(), ..SessionCreated::default() };
        created.assistant = opening.ask.assistant.clone();
        self.engine.check_info(&created)?;
        let first = Record { seq: 1, at: now, entry: Entry::created(created) };
        let Some(head) = Head::begin(&key, &first) else { return Err(Error::invalid("session", "not a session")) };
        let empty = Session::empty(head);
        let plan = opening.plan(&empty, None, blobs);
        let asked = if plan.append.is_empty() { 0 } else { 1 + plan.append.len() as Seq };
        let posts = plan.posts(2).into_iter().map(Entry::Message);
        let more = (2..).zip(posts.chain([opening.started(self.claim(now))])).map(|(seq, entry)| Record {
            seq,
            at: now,
            entry,
        });
        let opened = self.opened(&empty, &plan, asked);
        opened.check()?;
        // The model is not called speculatively here: the id may turn out to belong to a different
        // user.
        let more: Vec<Record> = more.collect();
        self.engine.reserve_session(who, more.iter()).await?;
        self.engine.begin_with(&key, &first, more, blobs.to_vec()).await?;
        Ok(opened)
    }

    /// Starts a speculative model request that runs concurrently with the commit, if the prompt is
    /// already final: no assistant, no media, no memories, and not a resumed run (D-044).
    fn ask_beside(&self, who: &Principal, opening: &TurnPlan<'_>, opened: &CommittedTurn) {
        let Some(first) = opening.first else { return };
        let assisted = opened.assistant.is_some() || opening.ask.assistant.is_some();
        let whole = opened.messages.iter().all(|m| m.cuts().is_empty());
        if !assisted && whole && !opened.goes_on && !self.tells(&who.tenant, None) {
            opening.beside.set(first.ask(opened.messages.clone()));
        }
    }

    fn opened(&self, session: &Session, plan: &ReconcilePlan, asked: Seq) -> CommittedTurn {
        let window = self.policy(&session.tenant, session.assistant.as_deref()).window;
        CommittedTurn {
            goes_on: false,
            before: plan.keep.min(session.messages.len()),
            asked,
            assistant: session.assistant.clone(),
            messages: shown_after(session, plan, &window),
            overlay: plan.overlay.clone(),
            spliced: ReconcileReport {
                matched: plan.matched,
                spliced: plan.spliced,
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
    ask: &'a TurnRequest,
    incoming: &'a [Message],
    /// Whether the request had to wait for the session's turn lock or for another node.
    has_waited: bool,
    run: &'a RunId,
    /// Whether to execute a completed request again because its stored answer is no longer
    /// available.
    redo: bool,
    /// The model to call speculatively, and the slot for that request.
    first: Option<&'a EagerModelCall>,
    beside: SpeculativeSlot,
}

/// A turn whose start is committed.
struct CommittedTurn {
    /// Whether the run was started earlier (by a previous attempt or another node) and resumes from
    /// its stored state.
    goes_on: bool,
    before: usize,
    asked: Seq,
    assistant: Option<String>,
    messages: Vec<Message>,
    overlay: Overlay,
    spliced: ReconcileReport,
}

impl CommittedTurn {
    /// Rejects a turn with an empty prompt.
    fn check(&self) -> Result<()> {
        if self.goes_on || !self.messages.is_empty() {
            return Ok(());
        }
        let ids = self.spliced.orphans.iter().take(3).map(excerpt).collect::<Vec<_>>();
        let message = format!("there is nothing to answer: no tool call {} is known here", ids.join(", "));
        Err(Error::invalid("messages", message))
    }
}

impl TurnPlan<'_> {
    /// Rejects a request for a different assistant: a session belongs to one assistant.
    fn check_assistant(&self, session: &Session) -> Result<()> {
        match (&self.ask.assistant, &session.assistant) {
            (Some(asked), own) if own.as_ref() != Some(asked) => Err(Error::OtherAssistant {
                session_id: session.info.session_id.clone(),
                asked: asked.clone(),
                own: own.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Returns true if another node has completed this request in the meantime.
    fn is_done(&self, session: &Session) -> bool {
        let completed = |r: &Run| r.id == *self.run && r.ended.is_some_and(|(_, o)| o == RunOutcome::Completed);
        !self.redo && session.runs.last().is_some_and(completed)
    }

    /// Returns true if this request was attempted before and its run is still open or has started
    /// tool calls. Such a run is resumed, so that no tool call is executed twice.
    fn goes_on(&self, session: &Session) -> bool {
        let mut same = session.runs.iter().rev().take_while(|r| r.id == *self.run);
        session.head().run.as_ref() == Some(self.run) || same.any(|r| !r.tools_started.is_empty())
    }

    fn plan(&self, session: &Session, assistant: Option<HistoryMode>, blobs: &[Blob]) -> ReconcilePlan {
        let mut plan = reconcile(session, &self.ask.incoming(self.incoming, assistant, self.has_waited));
        let stored = &session.messages;
        let matched = self.incoming.iter().filter(|m| !m.role().instructs()).count();
        if self.goes_on(session) {
            return ReconcilePlan { keep: stored.len(), matched, ..ReconcilePlan::default() };
        }
        if session.runs.last().is_some_and(|r| r.id == *self.run) {
            // An earlier attempt of this request already stored its messages, and no message was
            // added since. The partial answer of that attempt is discarded.
            let keep = stored.iter().rposition(|m| m.run.as_ref() != Some(self.run)).map_or(0, |i| i + 1);
            return ReconcilePlan { keep, rewound: stored.len() - keep, matched, ..ReconcilePlan::default() };
        }
        plan.overlay.attach(blobs);
        plan
    }

    fn started(&self, claim: crate::types::entry::LeaseClaim) -> Entry {
        let mut detail = self.ask.detail.clone();
        if self.ask.idempotency.is_some() {
            detail.insert(KEYED.to_owned(), Value::Bool(true));
        }
        Entry::RunStarted { run: self.run.clone(), claim: Some(claim), detail }
    }
}

/// Builds the prompt as it will be once the plan is applied to the session.
fn shown_after(session: &Session, plan: &ReconcilePlan, window: &Window) -> Vec<Message> {
    let first = session.seq + 1;
    let new = (first..).zip(plan.posts(first));
    let new: Vec<StoredMessage> = new.map(|(seq, post)| StoredMessage::new(seq, Timestamp::UNIX_EPOCH, post)).collect();
    let all = session.messages[..plan.keep].iter().chain(&new);
    shown_with(all, &session.reviews, &session.summaries, window, &plan.overlay)
}
