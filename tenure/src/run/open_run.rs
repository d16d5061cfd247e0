//! An open run: its start is committed and the session's turn lock is held. It is constructed in one place,
//! whether a request, a caller without input, or a crash started it.

use crate::engine::turn_lock::TurnGuard;
use crate::executors::model::SpeculativeSlot;
use crate::memory::injection::MemoryInjection;
use crate::rules::overlay::Overlay;
use crate::run::reconcile_report::ReconcileReport;
use crate::tenure::Tenure;
use crate::types::assistant::{Assistant, RateLimitConfig};
use crate::types::error::Result;
use crate::types::id::{Principal, RunId, Seq, SessionId};
use crate::types::message::Message;
use crate::types::policy::{CompactionPolicy, OnDisconnect};
use crate::types::resumable::Resumable;
use jiff::Timestamp;
use std::sync::Arc;

/// An open run, ready to be executed. The user's messages are persisted, and the session's turn
/// lock is held until the run is executed or dropped.
#[derive(Debug)]
pub struct OpenRun {
    /// The guard of the session's turn lock.
    pub(crate) turn_guard: TurnGuard,
    /// Everything that its execution needs.
    pub(crate) context: RunContext,
}

/// The identity of a run, and what it was started with.
#[derive(Debug)]
pub(crate) struct RunContext {
    pub tenure: Tenure,
    /// The principal that the run is executed as: the caller, or the session's owner for a run that
    /// was taken over.
    pub principal: Principal,
    /// The session of the run.
    pub session_id: SessionId,
    /// The id of the run.
    pub run: RunId,
    /// The assistant that the session belongs to.
    pub assistant: Option<Arc<Assistant>>,
    /// The assistant's instructions, rendered when this node opened the run, or why they could not be rendered.
    /// Then the run fails when it is executed.
    pub instructions: Result<Option<String>, String>,
    /// The model that answers. It is stored as the session's model once it has answered.
    pub model: Option<String>,
    /// The parameters with which another process can resume the run.
    pub resumable: Option<Resumable>,
    /// Whether to store the response for a replay under its idempotency key.
    pub store_answer: bool,
    /// When the run was started. For a run that was taken over, the time it was paused for reviews
    /// is added, so that it does not count against `max_time`.
    pub started_at: Timestamp,
    /// When this node claimed the run.
    pub claimed_at: Timestamp,
    /// What the request of this turn contributes. Empty if the run resumes from its stored state.
    pub input: RunInput,
}

/// What the request of a turn contributes to its run.
#[derive(Debug, Default)]
pub(crate) struct RunInput {
    /// The position of the message that is answered. 0 means that there is none.
    pub seq: Seq,
    /// The first prompt. Empty if the run resumes from its stored state.
    pub prompt: Vec<Message>,
    /// The request's messages, if the model is shown nothing else besides the messages of the run (D-130).
    pub sole_input: Option<Vec<Message>>,
    /// Replacements for stored messages, shown to the model but not stored (D-022).
    pub overlay: Overlay,
    /// Recalled memories that are injected into the prompt.
    pub memory_injection: Option<MemoryInjection>,
    /// A model request that is already in flight.
    pub speculative_call: SpeculativeSlot,
    /// The report of how the request's messages were merged into the stored history.
    pub reconcile_report: ReconcileReport,
}

/// The parameters of a new [`OpenRun`] that the store does not know.
pub(crate) struct RunStart {
    /// The session of the run.
    pub session_id: SessionId,
    /// The id of the run.
    pub run: RunId,
    /// The name of the session's assistant.
    pub assistant: Option<String>,
    /// The model that answers, if it differs from the one in `resumable`.
    pub model: Option<String>,
    /// The parameters with which another process can resume the run.
    pub resumable: Option<Resumable>,
    /// Whether to store the response for a replay under its idempotency key.
    pub store_answer: bool,
    /// When the run was started.
    pub started_at: Timestamp,
    /// When this node claimed the run.
    pub claimed_at: Timestamp,
}

impl OpenRun {
    /// Opens a run whose start or claim is committed. Loads its assistant.
    pub(crate) async fn new(
        tenure: &Tenure,
        principal: &Principal,
        turn_guard: TurnGuard,
        start: RunStart,
    ) -> Result<Self> {
        let RunStart { session_id, run, assistant, model, resumable, store_answer, started_at, claimed_at } = start;
        let assistant = tenure.assistant_of(principal, assistant).await?;
        let instructions = match assistant.as_deref() {
            Some(assistant) => tenure.render_instructions(principal, &session_id, assistant, claimed_at).await?,
            None => Ok(None),
        };
        let model = model.or_else(|| resumable.as_ref().map(|r| r.model.clone()));
        let context = RunContext {
            tenure: tenure.clone(),
            principal: principal.clone(),
            session_id,
            run,
            assistant,
            instructions,
            model,
            resumable,
            store_answer,
            started_at,
            claimed_at,
            input: RunInput::default(),
        };
        Ok(Self { turn_guard, context })
    }

    /// The session of the run.
    pub fn session_id(&self) -> &SessionId {
        &self.context.session_id
    }

    /// The id of the run.
    pub fn run_id(&self) -> &RunId {
        &self.context.run
    }

    /// The principal that the run is executed as: the caller, or the session's owner for a run that
    /// was taken over.
    pub fn principal(&self) -> &Principal {
        &self.context.principal
    }

    /// When the run was started. For a run that was taken over, the time it was paused for reviews
    /// is added, so that it does not count against `max_time`.
    pub fn started_at(&self) -> Timestamp {
        self.context.started_at
    }

    /// The first prompt. Empty if the run resumes from its stored state.
    pub fn prompt(&self) -> &[Message] {
        &self.context.input.prompt
    }

    /// The report of how the request's messages were merged into the stored history.
    pub fn reconcile_report(&self) -> &ReconcileReport {
        &self.context.input.reconcile_report
    }

    /// The parameters with which another process can resume the run. `None` means that none can.
    pub fn resumable(&self) -> Option<&Resumable> {
        self.context.resumable.as_ref()
    }

    /// The assistant's policy for a client that disconnects. `None` means that the assistant does
    /// not configure one.
    pub fn on_disconnect(&self) -> Option<OnDisconnect> {
        self.context.assistant.as_ref().and_then(|a| a.sessions.on_disconnect)
    }

    /// The assistant of the run with its rate limit. `None` means that the run has no assistant, or that it is
    /// not limited.
    pub fn rate_limit(&self) -> Option<(&str, RateLimitConfig)> {
        let assistant = self.context.assistant.as_deref()?;
        let limit = assistant.rate_limit;
        (limit != RateLimitConfig::default()).then_some((&assistant.name, limit))
    }

    /// The compaction policy: whether a model, and which one, summarizes the history after the turn
    /// if it exceeds its budget.
    pub fn compaction_policy(&self) -> CompactionPolicy {
        self.context.policy().compact
    }
}

impl RunContext {
    /// The assistant's instructions. `None` if there are none, or if they could not be rendered.
    pub fn rendered_instructions(&self) -> Option<&str> {
        self.instructions.as_ref().ok()?.as_deref()
    }

    /// The policy for sessions of the run's assistant.
    pub fn policy(&self) -> crate::types::policy::Policy {
        self.tenure.policy(&self.principal.tenant, self.assistant.as_ref().map(|a| a.name.as_str()))
    }
}
