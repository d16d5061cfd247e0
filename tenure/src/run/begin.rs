//! Begins a turn: resolves the session, acquires its turn lock, reconciles the request with the
//! stored history, and commits the new messages together with the start of the run.
//!
//! Invariants: the user's messages are durable before any model output is used. Where no further
//! lookup is needed, the model is called concurrently with that commit (D-044). The answer is
//! durable before the turn is acknowledged. A turn that fails or is stopped persists the partial
//! answer and records the failure (`run_ended`).

use crate::engine::turn_lock::{Admission, OnBusy, TurnGuard};
use crate::executors::model::{EagerModelCall, SpeculativeSlot};
use crate::memory::injection::with_block;
use crate::rules::reconcile::reconcile;
use crate::rules::session::Point;
use crate::run::executors::StoredAnswer;
use crate::run::idempotency::{StartedRun, derive_run_id, derive_session_id, idempotency_lock_key};
use crate::run::instructions::render_with;
use crate::run::open_run::{OpenRun, RunInput, RunStart};
use crate::run::request::{OnExpired, TurnRequest};
use crate::run::turn_plan::{CommittedTurn, TurnPlan, prompt_after};
use crate::session::lifecycle::NewSession;
use crate::tenure::Tenure;
use crate::types::blob::Blob;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Principal, RunId, SessionId, SessionKey, Tenant};
use crate::types::message::Message;
use jiff::Timestamp;
use serde_json::Map;
use std::time::Duration;

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

/// Maximum retries if a session exists but is not visible: another node may be moving it to a
/// different id.
const MAX_INVISIBLE_RETRIES: usize = 3;

impl Tenure {
    /// Begins a turn: resolves the session, waits for its turn lock, and commits the client's
    /// messages.
    pub async fn begin_turn(&self, principal: &Principal, request: TurnRequest) -> Result<TurnStart> {
        // Boxed, here and below, because futures of callers contain it and would be large.
        Box::pin(self.begin_turn_with(principal, request, None)).await
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
        Box::pin(self.begin_turn_with(principal, request, Some(eager_call))).await
    }

    async fn begin_turn_with(
        &self,
        principal: &Principal,
        request: TurnRequest,
        eager_call: Option<&EagerModelCall>,
    ) -> Result<TurnStart> {
        let (incoming, blobs) = self.engine.detach(&request.messages)?;
        // Requests with the same idempotency key are serialized until the first one has stored its
        // record.
        let _key_guard = match &request.idempotency {
            Some((key, _)) => {
                let lock_key = idempotency_lock_key(principal, key)?;
                Some(self.shared.key_locks.acquire(&lock_key, OnBusy::Queue, self.limits().max_queue).await?)
            }
            None => None,
        };
        let mut attempt = TurnAttempt::new(self, principal, &request, &incoming, &blobs, eager_call).await?;
        while attempt.count <= self.limits().max_retries {
            // Boxed, because futures of callers contain it and would be large.
            if let Some(start) = Box::pin(attempt.run()).await? {
                return Ok(start);
            }
        }
        Err(Error::Conflict { session_id: attempt.id, expected: 0 })
    }

    /// Finds the run that was started by a request with this idempotency key and body. `None` if
    /// there is none, or if it no longer exists.
    pub async fn find_by_idempotency_key(
        &self,
        principal: &Principal,
        key: &str,
        body: &str,
    ) -> Result<Option<(SessionId, RunId)>> {
        let keyed = (key.to_owned(), body.to_owned());
        let Some(started) = self.find_started_run(principal, Some(&keyed)).await? else { return Ok(None) };
        match self.get_run(principal, &started.session, &started.run).await {
            Ok(_) => Ok(Some((started.session, started.run))),
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
        let assistant = session.as_ref().and_then(|s| s.head().assistant.clone()).or_else(|| request.assistant.clone());
        let assistant = self.assistant_of(principal, assistant).await?;
        let (metadata, user) = match &session {
            Some(session) => (session.head().info.metadata.clone(), &session.head().user),
            None => (Map::new(), &principal.user),
        };
        let instructions =
            assistant.as_deref().map_or(Ok(None), |assistant| render_with(assistant, metadata, user, self.now()));
        let instructions = instructions
            .map_err(|reason| Error::invalid("instructions", format!("could not be rendered: {reason}")))?;
        let mut messages: Vec<Message> = instructions.as_deref().map(Message::system).into_iter().collect();
        let Some(session) = session else {
            messages.extend(request.messages.iter().cloned());
            return Ok(messages);
        };
        let policy = self.policy(&principal.tenant, session.head().assistant.as_deref());
        let plan = reconcile(&session, &request.incoming(&request.messages, policy.history, false));
        messages.extend(prompt_after(&session, &plan, &request.messages, &policy));
        Ok(messages)
    }

    /// Builds the prompt: the assistant's instructions followed by the messages, with media loaded
    /// from their blobs.
    pub(crate) async fn prompt(
        &self,
        tenant: &Tenant,
        instructions: Option<&str>,
        history: Vec<Message>,
    ) -> Result<Vec<Message>> {
        let mut messages: Vec<Message> = instructions.map(Message::system).into_iter().collect();
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

    /// Prepares a session for a request that continues it. A live session is left as it is. An expired session
    /// is restored, replaced by a new one with the same assistant, thread and model, or rejected
    /// ([`Error::Gone`]), as `policy` says. A deleted session is rejected.
    pub async fn ensure_live(&self, principal: &Principal, id: &SessionId, policy: OnExpired) -> Result<Head> {
        self.engine.ensure_assistants_loaded(&principal.tenant).await?;
        let head = self.head(principal, id).await?;
        match self.engine.check_live(&head) {
            Err(Error::Gone { status, .. }) => self.handle_expired(principal, id, status, policy).await?,
            checked => return checked.map(|()| head),
        }
        match self.head(principal, id).await {
            Err(Error::NotFound { .. }) => {
                let new = NewSession {
                    id: Some(id.clone()),
                    assistant: head.assistant,
                    thread: head.thread,
                    model: head.info.model,
                    ..NewSession::default()
                };
                let owner = Principal { user: head.user, ..principal.clone() };
                match self.create(&owner, new).await {
                    // A concurrent request has created it.
                    Err(Error::Exists { .. }) => self.head(principal, id).await,
                    created => Ok(created?.head().clone()),
                }
            }
            head => head,
        }
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
            (_, OnExpired::Restore) => self.restore(principal, id, None).await.map(drop),
            (_, OnExpired::Fresh) => self.archive(principal, id).await,
        }
    }
}

/// The state of opening a turn. Every attempt acquires the turn lock and tries to commit the first
/// records of the turn.
struct TurnAttempt<'a> {
    tenure: &'a Tenure,
    principal: &'a Principal,
    request: &'a TurnRequest,
    /// The request's messages, with blob references in place of media.
    incoming: &'a [Message],
    blobs: &'a [Blob],
    eager_call: Option<&'a EagerModelCall>,
    /// The session. It changes if the turn is moved to a fork or to a new session.
    id: SessionId,
    run: RunId,
    on_busy: OnBusy,
    /// The number of attempts that count against `max_retries`.
    count: usize,
    /// How long the turn has waited for other nodes.
    waited: Duration,
    /// Whether to execute a completed request again because its stored answer is no longer
    /// available.
    redo: bool,
    /// The number of times the session existed but was not visible.
    invisible_retries: usize,
}

impl<'a> TurnAttempt<'a> {
    /// Resolves the session and the run of a request.
    async fn new(
        tenure: &'a Tenure,
        principal: &'a Principal,
        request: &'a TurnRequest,
        incoming: &'a [Message],
        blobs: &'a [Blob],
        eager_call: Option<&'a EagerModelCall>,
    ) -> Result<Self> {
        let earlier = tenure.find_started_run(principal, request.idempotency.as_ref()).await?;
        let keyed = request.idempotency.as_ref();
        let new_id = || keyed.map_or_else(SessionId::generate, |(key, body)| derive_session_id(principal, key, body));
        let id = match (&earlier, &request.session) {
            (Some(earlier), _) => earlier.session.clone(),
            (None, Some(id)) => id.clone(),
            (None, None) if request.content_matching => tenure.find(principal, incoming).await?.unwrap_or_else(new_id),
            (None, None) => new_id(),
        };
        // The run id is derived from the request, so two nodes that receive the same request
        // concurrently use the same run.
        let run = keyed.map_or_else(RunId::generate, |(key, body)| derive_run_id(principal, key, body));
        // A retried request waits for its first attempt. It never interrupts it and never forks the
        // session.
        let on_busy = if earlier.is_some() { OnBusy::Queue } else { request.on_busy };
        Ok(Self {
            tenure,
            principal,
            request,
            incoming,
            blobs,
            eager_call,
            id,
            run,
            on_busy,
            count: 0,
            waited: Duration::ZERO,
            redo: false,
            invisible_retries: 0,
        })
    }

    /// Makes one attempt. `None` means that another attempt is needed.
    async fn run(&mut self) -> Result<Option<TurnStart>> {
        let Some(turn_guard) = self.acquire_turn_lock().await? else { return Ok(None) };
        let earlier = self.tenure.find_started_run(self.principal, self.request.idempotency.as_ref()).await?;
        if let Some(earlier) = &earlier
            && let Some(replay) = self.tenure.stored_answer(self.principal, earlier).await?
        {
            let session_id = self.id.clone();
            return Ok(Some(TurnStart::AlreadyAnswered { session_id, run: self.run.clone(), replay }));
        }
        let started_at = self.tenure.now();
        if let (Some((key, body)), None) = (&self.request.idempotency, &earlier) {
            let started = StartedRun { session: self.id.clone(), run: self.run.clone() };
            self.tenure.store_started_run(self.principal, key, body, &started).await?;
        }
        let plan = TurnPlan {
            request: self.request,
            incoming: self.incoming,
            has_waited: turn_guard.has_waited() || !self.waited.is_zero(),
            run: &self.run,
            redo: self.redo,
            eager_call: self.eager_call,
            speculative_slot: SpeculativeSlot::default(),
        };
        let commit = async {
            match self.tenure.commit_turn(self.principal, &self.id, &plan, self.blobs).await {
                Err(Error::NotFound { .. }) => {
                    self.tenure.commit_first_turn(self.principal, &self.id, &plan, self.blobs).await
                }
                other => other,
            }
        };
        match plan.speculative_slot.during(commit).await {
            Ok(committed) => {
                let speculative_call = plan.speculative_slot;
                turn_guard.record_turn_start(committed.messages_before, &self.run);
                Box::pin(self.open_run(turn_guard, committed, speculative_call, started_at)).await.map(Some)
            }
            Err(Error::Busy { session_id }) => {
                drop(turn_guard);
                Box::pin(self.recover_from_busy(session_id)).await.map(|()| None)
            }
            // The turn lock is held until the session is ready for the next attempt.
            Err(e) => Box::pin(self.recover(e, earlier.is_some())).await.map(|()| None),
        }
    }

    /// Waits for the session's turn lock, as `on_busy` says. `None` means that the turn was moved to
    /// a fork.
    async fn acquire_turn_lock(&mut self) -> Result<Option<TurnGuard>> {
        let locks = &self.tenure.shared.turn_locks;
        let max_queue = self.tenure.limits().max_queue;
        let key = self.principal.key(&self.id);
        let notify = || self.request.notify_queued();
        match locks.acquire_with_callback(&key, self.on_busy, max_queue, notify).await? {
            Admission::Admitted(turn_guard) => Ok(Some(turn_guard)),
            Admission::Branch(before) => {
                self.fork_at(Point::Position(before)).await?;
                self.count += 1;
                Ok(None)
            }
        }
    }

    /// Moves the turn to a fork of the session.
    async fn fork_at(&mut self, point: Point) -> Result<()> {
        self.id = self.tenure.fork(self.principal, &self.id, point).await?.info.session_id;
        Ok(())
    }

    /// Opens the run of a turn whose start is committed: recalls memories and builds the prompt.
    async fn open_run(
        &self,
        turn_guard: TurnGuard,
        committed: CommittedTurn,
        speculative_call: SpeculativeSlot,
        started_at: Timestamp,
    ) -> Result<TurnStart> {
        let (tenure, principal) = (self.tenure, self.principal);
        let memory_injection =
            tenure.recall_for_prompt(principal, &self.id, committed.assistant.as_deref(), &committed.messages).await;
        let start = RunStart {
            session_id: self.id.clone(),
            run: self.run.clone(),
            assistant: committed.assistant.or_else(|| self.request.assistant.clone()),
            model: self.request.model.clone(),
            resumable: self.request.resumable.clone(),
            store_answer: self.request.idempotency.is_some(),
            started_at,
            claimed_at: started_at,
        };
        let mut open_run = OpenRun::new(tenure, principal, turn_guard, start).await?;
        let block = memory_injection.as_ref().map(|m| &m.block);
        let instructions = open_run.context.rendered_instructions();
        let prompt = if committed.resumes {
            Vec::new()
        } else {
            with_block(tenure.prompt(&principal.tenant, instructions, committed.messages).await?, block)
        };
        let mut reconcile_report = committed.reconcile_report;
        reconcile_report.memories = memory_injection.as_ref().map(|m| m.memories.clone()).unwrap_or_default();
        open_run.context.input = RunInput {
            seq: committed.input_seq,
            prompt,
            sole_input: committed.sole_input.filter(|_| !committed.resumes),
            overlay: committed.overlay,
            memory_injection,
            speculative_call,
            reconcile_report,
        };
        Ok(TurnStart::Run(Box::new(open_run)))
    }

    /// Prepares another attempt after a failed one, or returns the error if there must be none.
    /// `is_retry` is true if the request was made before with its idempotency key.
    async fn recover(&mut self, error: Error, is_retry: bool) -> Result<()> {
        let (tenure, principal) = (self.tenure, self.principal);
        match error {
            // Another node has just completed this request: its answer is stored now.
            Error::Conflict { .. } if !self.redo => {
                self.redo = true;
                Ok(())
            }
            // The session was found by content and has been deleted since. The request did not name
            // it, so a new one is started.
            Error::Gone { status: "deleted", .. } if self.request.session.is_none() && !is_retry => {
                self.id = SessionId::generate();
                self.count += 1;
                Ok(())
            }
            Error::Gone { status, session_id } => {
                match tenure.handle_expired(principal, &session_id, status, self.request.on_expired).await {
                    // Another node has just moved the session to a different id.
                    Ok(()) | Err(Error::NotFound { .. }) => self.count += 1,
                    Err(e) => return Err(e),
                }
                Ok(())
            }
            // The session was created concurrently, has been moved by another node, or belongs to a
            // different user. Reading its head tells which.
            Error::Exists { session_id } => {
                match tenure.head(principal, &session_id).await {
                    Ok(_) => {}
                    Err(Error::NotFound { .. }) if self.invisible_retries < MAX_INVISIBLE_RETRIES => {
                        self.invisible_retries += 1;
                    }
                    Err(e) => return Err(e),
                }
                self.count += 1;
                Ok(())
            }
            e => Err(e),
        }
    }

    /// Another node is working on the session. If it executes this very request, wait for it; never
    /// interrupt or fork.
    async fn recover_from_busy(&mut self, session_id: SessionId) -> Result<()> {
        let (tenure, principal) = (self.tenure, self.principal);
        if matches!(self.on_busy, OnBusy::Queue | OnBusy::Interrupt) {
            self.request.notify_queued();
        }
        let is_same_run = tenure.head(principal, &self.id).await.is_ok_and(|h| h.run.as_ref() == Some(&self.run));
        match self.on_busy {
            OnBusy::Queue => tenure.wait_for_release(&principal.key(&self.id), &mut self.waited).await,
            _ if is_same_run => tenure.wait_for_release(&principal.key(&self.id), &mut self.waited).await,
            OnBusy::Branch => {
                let turns_before = tenure.head(principal, &self.id).await?.digest.turns.saturating_sub(1);
                self.fork_at(Point::Turn(turns_before)).await
            }
            _ => Err(Error::Busy { session_id }),
        }
    }
}
