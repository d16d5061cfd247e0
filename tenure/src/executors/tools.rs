//! The interface to tools that runs execute.

use crate::types::assistant::Assistant;
use crate::types::id::{RunId, SessionKey};
use crate::types::tool::{Tool, ToolError, ToolOutput};
use async_trait::async_trait;
use serde_json::{Map, Value};

/// A tool call to execute.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolInvocation {
    /// The session of the run.
    pub session: SessionKey,
    /// The run that requested the call.
    pub run: RunId,
    /// The id of the call, assigned by the model.
    pub id: String,
    /// The name of the tool.
    pub tool: String,
    /// The arguments of the call.
    pub arguments: Map<String, Value>,
}

/// A set of tools, local or remote.
#[async_trait]
pub trait Tools: Send + Sync + 'static {
    /// Lists the tools available to sessions of an assistant.
    async fn list(&self, assistant: &Assistant) -> Result<Vec<Tool>, ToolError>;

    /// Executes a call. The future is dropped if the call times out or its run is stopped; the
    /// implementation should then cancel the call.
    async fn call(&self, assistant: &Assistant, call: &ToolInvocation) -> Result<ToolOutput, ToolError>;

    /// Notifies that a session has ended or was deleted: resources held for it can be released.
    async fn end(&self, session: &SessionKey);
}
