//! Who does the work of a run, what can be heard of it, and what comes of it.

use crate::executors::model::Model;
use crate::executors::tools::Tools;
use crate::rules::answer::Answer;
use crate::run::request::Spliced;
use crate::types::error::Error;
use crate::types::id::Seq;
use crate::types::model::{ModelError, Piece};
use crate::types::tool::ToolError;
use serde::{Deserialize, Serialize};

/// Who does the work.
#[derive(Clone, Copy)]
pub struct Hands<'a> {
    /// What answers.
    pub model: &'a dyn Model,
    /// What it can have done; nothing: only the client's tools.
    pub tools: Option<&'a dyn Tools>,
}

impl std::fmt::Debug for Hands<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hands")
    }
}

/// What can be heard of a run while it goes on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Heard {
    /// A part of the model's answer.
    Piece(Piece),
    /// A tool is called, or has answered.
    Tool(Progress),
}

/// A tool call of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// In which round of the run, from 1.
    pub round: usize,
    /// The call's id.
    pub call: String,
    /// The tool.
    pub tool: String,
    /// Its arguments, as JSON text.
    pub arguments: String,
    /// What it answered; nothing yet: it is being called.
    pub content: Option<String>,
    /// Whether the answer was in the cache.
    pub cached: bool,
}

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Answered {
    /// The model's last answer.
    pub answer: Answer,
    /// The same as one `chat.completion`.
    pub body: String,
    /// The end of the log after it.
    pub seq: Seq,
    /// Whether whoever listened took every piece of it; one that takes nothing for too long (`max_stall`) gets no more.
    pub heard: bool,
    /// The tool calls that were made here.
    pub calls: Vec<Progress>,
    /// Whether a person must decide before it can go on.
    pub waiting: bool,
}

/// The response to a request with an idempotency key, as it was given the first time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Replay {
    /// The answer as one `chat.completion`.
    pub body: String,
    /// What was made of the request's messages.
    #[serde(default)]
    pub spliced: Spliced,
    /// The tool calls that were made here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<Progress>,
    /// What was streamed, if it was. Long streams are not kept.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stream: Vec<Heard>,
}

/// Why a turn has no answer.
#[derive(Debug, thiserror::Error)]
pub enum TurnError {
    /// It could not be kept.
    #[error(transparent)]
    Store(#[from] Error),
    /// The model gave none.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Another request stopped the turn.
    #[error("another request interrupted this turn; what was said until then is kept")]
    Stopped,
    /// Its run was cancelled.
    #[error("the run was cancelled; what was said until then is kept")]
    Cancelled,
    /// It was over a limit.
    #[error("{message}")]
    Limit {
        /// Which one, as one stable word.
        code: &'static str,
        /// The same for people.
        message: String,
    },
    /// Its tools can not be had.
    #[error("the tools of this assistant can not be had: {0}")]
    Tools(ToolError),
}

impl TurnError {
    /// One stable word for each kind.
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
