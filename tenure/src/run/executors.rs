//! The executors of a run, the events it emits, and its outcome.

use crate::executors::model::Model;
use crate::executors::tools::Tools;
use crate::rules::answer::ModelAnswer;
use crate::run::reconcile_report::ReconcileReport;
use crate::types::error::Error;
use crate::types::id::{RunId, Seq, SessionId};
use crate::types::model::{ModelChunk, ModelError};
use crate::types::raw_object::RawObject;
use crate::types::tool::ToolError;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

/// The model and the tools that execute a run, and where its events are sent.
#[derive(Clone)]
pub struct Executors<'a> {
    /// The model.
    pub(crate) model: &'a dyn Model,
    /// Tools that are executed here. `None` means that only the client's tools are available.
    pub(crate) tools: Option<&'a dyn Tools>,
    /// All fields of the model request besides the conversation.
    pub(crate) options: RawObject,
    /// Whether the model is requested to stream its answer.
    pub(crate) stream: bool,
    /// Receives the events of the run as they occur.
    pub(crate) events: Option<mpsc::Sender<RunEvent>>,
    /// What happens to a run that a rate limit stops for longer than it may wait.
    pub(crate) on_rate_limit: OnRateLimit,
}

/// What happens to a run that a rate limit stops for longer than `retry_wait`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnRateLimit {
    /// The run fails with the error of the model.
    #[default]
    Fail,
    /// The session is paused until the model can be asked again, and the run resumes then
    /// ([`Tenure::resume_paused`](crate::Tenure::resume_paused)). A run that is not resumable fails.
    Pause,
}

impl<'a> Executors<'a> {
    /// Executes runs with a model and without tools.
    pub fn new(model: &'a dyn Model) -> Self {
        Self {
            model,
            tools: None,
            options: RawObject::default(),
            stream: false,
            events: None,
            on_rate_limit: OnRateLimit::Fail,
        }
    }

    /// Sets the tools.
    pub fn tools(mut self, tools: &'a dyn Tools) -> Self {
        self.tools = Some(tools);
        self
    }

    /// Sets all fields of the model request besides the conversation, such as `temperature`. A
    /// client's tools are definitions in its field `tools`: a call of one ends the run, and the
    /// client answers it with a tool message.
    pub fn options(mut self, options: RawObject) -> Self {
        self.options = options;
        self
    }

    /// Requests the model to stream its answer.
    pub fn stream(mut self, stream: bool) -> Self {
        self.stream = stream;
        self
    }

    /// Sets what happens to a run that a rate limit stops for longer than `retry_wait`.
    pub fn on_rate_limit(mut self, on_rate_limit: OnRateLimit) -> Self {
        self.on_rate_limit = on_rate_limit;
        self
    }

    /// Sends the events of the run to a channel as they occur. A receiver that is dropped, or that
    /// takes no event for longer than `max_stall`, does not stop the run (D-049).
    pub fn events(mut self, events: mpsc::Sender<RunEvent>) -> Self {
        self.events = Some(events);
        self
    }
}

impl std::fmt::Debug for Executors<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executors")
            .field("options", &self.options)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}

/// An event of a run in progress.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RunEvent {
    /// A chunk of the model's answer.
    Chunk(ModelChunk),
    /// A tool call that has started or finished.
    Tool(ToolProgress),
}

/// The progress of a tool call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ToolProgress {
    /// The round of the run, counted from 1.
    pub round: usize,
    /// The id of the call.
    pub call: String,
    /// The name of the tool.
    pub tool: String,
    /// The arguments as JSON text.
    pub arguments: String,
    /// The result. `None` while the call is in flight.
    pub content: Option<String>,
    /// Whether the result came from the cache.
    pub cached: bool,
}

/// The outcome of a run.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TurnOutcome {
    /// The session of the run.
    pub session_id: SessionId,
    /// The id of the run.
    pub run: RunId,
    /// The model's last answer.
    pub answer: ModelAnswer,
    /// The answer as one `chat.completion` object.
    pub body: String,
    /// The end of the log after the run's last commit.
    pub seq: Seq,
    /// Whether the listener received every event. A listener that applies backpressure for longer
    /// than `max_stall` is dropped.
    pub all_events_delivered: bool,
    /// The tool calls that this server executed.
    pub calls: Vec<ToolProgress>,
    /// Whether the run is paused, until a review is decided or a rate limit is over.
    pub waiting: bool,
}

/// The stored response of a request with an idempotency key. A retry receives the same response
/// (D-047).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StoredAnswer {
    /// The answer as one `chat.completion` object.
    pub body: String,
    /// The report of how the request's messages were merged.
    #[serde(default)]
    pub reconcile_report: ReconcileReport,
    /// The tool calls that this server executed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<ToolProgress>,
    /// The streamed events. Empty if the response was not streamed, or the stream was too long to
    /// be stored.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stream: Vec<RunEvent>,
}

impl StoredAnswer {
    /// Returns the outcome of the run that produced the answer. `seq` is the end of the log.
    pub fn outcome(self, session_id: SessionId, run: RunId, seq: Seq) -> Result<TurnOutcome, ModelError> {
        let mut answer = ModelAnswer::default();
        answer.add_chunk(&ModelChunk::Complete(self.body.clone()))?;
        let StoredAnswer { body, calls, .. } = self;
        Ok(TurnOutcome { session_id, run, answer, body, seq, all_events_delivered: true, calls, waiting: false })
    }
}

/// The reason why a turn has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TurnError {
    /// The store failed or rejected an operation.
    #[error(transparent)]
    Store(#[from] Error),
    /// The model failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Another request interrupted the turn.
    #[error("another request interrupted this turn; the partial answer is stored")]
    Stopped,
    /// The run was cancelled.
    #[error("the run was cancelled; the partial answer is stored")]
    Cancelled,
    /// The run exceeded a limit.
    #[error("{message}")]
    Limit {
        /// A stable identifier of the limit.
        code: &'static str,
        /// A description for people.
        message: String,
    },
    /// The assistant's instructions are a template that could not be rendered.
    #[error("could not render the assistant's instructions: {0}")]
    Instructions(String),
    /// The assistant's tools could not be listed.
    #[error("could not list the assistant's tools: {0}")]
    Tools(ToolError),
}

impl TurnError {
    /// A stable identifier of the error.
    pub fn code(&self) -> &'static str {
        match self {
            TurnError::Store(e) => e.code(),
            TurnError::Model(e) => e.code(),
            TurnError::Stopped => "interrupted",
            TurnError::Cancelled => "cancelled",
            TurnError::Limit { code, .. } => code,
            TurnError::Instructions(_) => "instructions_failed",
            TurnError::Tools(_) => "tools_unavailable",
        }
    }
}
