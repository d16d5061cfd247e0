//! What a model can have done: tools, wherever they run.

use crate::types::assistant::Assistant;
use crate::types::id::{Key, RunId};
use crate::types::tool::{Output, Tool, ToolError};
use async_trait::async_trait;
use serde_json::{Map, Value};

/// A call to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The session.
    pub session: Key,
    /// The run.
    pub run: RunId,
    /// The call's id, as the model gave it.
    pub id: String,
    /// The tool.
    pub tool: String,
    /// Its arguments.
    pub arguments: Map<String, Value>,
}

/// Tools, wherever they run.
#[async_trait]
pub trait Tools: Send + Sync + 'static {
    /// What the sessions of an assistant can call.
    async fn list(&self, assistant: &Assistant) -> Result<Vec<Tool>, ToolError>;

    /// Makes a call. When the future is dropped (the call took too long, or its run was stopped), the call should be given up.
    async fn call(&self, assistant: &Assistant, call: &Call) -> Result<Output, ToolError>;

    /// A session has ended or was deleted: what runs for it can stop.
    async fn end(&self, session: &Key);
}
