//! Tool definitions and results.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A tool: its definition as shown to the model, and the guarantees that callers may rely on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tool {
    /// The name by which the model calls the tool.
    pub name: String,
    /// A description for the model.
    pub description: String,
    /// The parameters, as a JSON schema.
    pub parameters: Value,
    /// Whether calls have no side effects. Such a call may be retried after a crash.
    #[serde(default)]
    pub read_only: bool,
    /// Whether calls are idempotent. Such a call may be retried after a crash.
    #[serde(default)]
    pub idempotent: bool,
    /// Whether results may be stored in the session's cache.
    #[serde(default)]
    pub cache: bool,
    /// Whether a call is a question to a person: it opens a review, and the decision is its result. The
    /// arguments are those of the built-in tool `ask_human`.
    #[serde(default)]
    pub asks_human: bool,
}

impl Tool {
    /// Returns true if a call with an unknown outcome can safely be retried.
    pub fn is_repeatable(&self) -> bool {
        self.read_only || self.idempotent
    }
}

/// The result of a tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolOutput {
    /// The content that the model is shown.
    pub content: String,
    /// Whether the tool reported a failure. The model is shown the failure and may try something else.
    pub failed: bool,
}

/// The reason why a call has no result (D-054).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ToolError {
    /// The call was not made: it has had no effect.
    #[error("the tool was not called: {0}")]
    NotCalled(String),
    /// The call was made but its result was lost: it may or may not have been executed.
    #[error("the result of the tool call was lost: {0}")]
    Lost(String),
}
