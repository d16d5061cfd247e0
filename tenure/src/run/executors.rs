//! The executors of a run, the events it emits, and its outcome.

use crate::executors::model::Model;
use crate::executors::tools::Tools;
use crate::rules::answer::ModelAnswer;
use crate::run::request::ReconcileReport;
use crate::types::error::Error;
use crate::types::id::Seq;
use crate::types::model::{ModelChunk, ModelError};
use crate::types::tool::ToolError;
use serde::{Deserialize, Serialize};

/// The model and the tools that execute a run.
#[derive(Clone, Copy)]
pub struct Executors<'a> {
    /// The model.
    pub model: &'a dyn Model,
    /// Tools that the server executes. `None` means that only the client's tools are available.
    pub tools: Option<&'a dyn Tools>,
}

impl std::fmt::Debug for Executors<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Executors")
    }
}

/// An event of a run in progress.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunEvent {
    /// A chunk of the model's answer.
    Chunk(ModelChunk),
    /// A tool call that has started or finished.
    Tool(ToolProgress),
}

/// The progress of a tool call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
pub struct TurnOutcome {
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
    /// Whether the run is paused until a review is decided.
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

/// The reason why a turn has no answer.
#[derive(Debug, thiserror::Error)]
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
            TurnError::Tools(_) => "tools_unavailable",
        }
    }
}
