//! Tool definitions and results.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A tool: what a model is told of it, and what may be done with it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tool {
    /// Its name, by which the model calls it.
    pub name: String,
    /// What it is good for, for the model.
    pub description: String,
    /// Its parameters, as a JSON schema.
    pub parameters: Value,
    /// Calling it changes nothing, so that it may be called again after a crash.
    #[serde(default)]
    pub read_only: bool,
    /// Calling it twice does what calling it once does, so that it may be called again after a crash.
    #[serde(default)]
    pub idempotent: bool,
    /// Its results may be kept in the session's cache.
    #[serde(default)]
    pub cache: bool,
}

impl Tool {
    /// Whether a call that may or may not have happened can simply be made again.
    pub fn is_repeatable(&self) -> bool {
        self.read_only || self.idempotent
    }
}

/// What a tool answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output {
    /// What the model is shown.
    pub content: String,
    /// Whether the tool says that it failed. The model is told, and may try something else.
    pub failed: bool,
}

/// Why a call has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ToolError {
    /// It was not made: nothing has happened.
    #[error("the tool was not called: {0}")]
    NotCalled(String),
    /// It was made, but the answer was lost: it may or may not have happened.
    #[error("the tool's answer was lost: {0}")]
    Lost(String),
}
