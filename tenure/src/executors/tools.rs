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
    /// Whether the session has an earlier result of this tool, among the messages that the model is shown. A tool
    /// that holds state for a session in memory can tell from it that the state was lost.
    pub called_before: bool,
}

/// The session for which tools are listed or called.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ToolContext<'a> {
    /// The session.
    pub session: &'a SessionKey,
    /// The assistant that the session belongs to. `None` means that it belongs to none.
    pub assistant: Option<&'a Assistant>,
    /// The session's metadata when the tool is called. `None` while tools are listed, and outside of a run.
    pub metadata: Option<&'a Map<String, Value>>,
}

impl<'a> ToolContext<'a> {
    /// Creates the context of a session, for calls outside of a run, such as in tests.
    pub fn new(session: &'a SessionKey, assistant: Option<&'a Assistant>) -> Self {
        Self { session, assistant, metadata: None }
    }

    /// Adds the session's metadata.
    pub fn with_metadata(self, metadata: &'a Map<String, Value>) -> Self {
        Self { metadata: Some(metadata), ..self }
    }
}

/// A set of tools, local or remote.
///
/// A call is recorded in the session's log before it is made. After a crash, a call whose result is missing
/// is repeated only if its [`Tool`] is declared `read_only` or `idempotent`; otherwise a person must decide
/// (see [`crate::review`]).
///
/// ```
/// use async_trait::async_trait;
/// use serde_json::json;
/// use tenure::run::{ToolContext, ToolInvocation};
/// use tenure::{Tool, ToolError, ToolOutput, Tools};
///
/// struct Dice;
///
/// #[async_trait]
/// impl Tools for Dice {
///     async fn list(&self, _: &ToolContext<'_>) -> Result<Vec<Tool>, ToolError> {
///         let parameters = json!({"type": "object", "properties": {"sides": {"type": "integer"}}});
///         let description = "Rolls a die.".into();
///         Ok(vec![Tool { name: "roll".into(), description, parameters, ..Tool::default() }])
///     }
///
///     async fn call(&self, _: &ToolContext<'_>, call: &ToolInvocation) -> Result<ToolOutput, ToolError> {
///         let sides = call.arguments.get("sides").and_then(|s| s.as_u64()).unwrap_or(6);
///         // A failure that is reported to the model. `ToolError` is for calls without a result.
///         if sides == 0 {
///             return Ok(ToolOutput { content: "a die needs sides".into(), failed: true });
///         }
///         Ok(ToolOutput { content: "4".into(), failed: false })
///     }
/// }
/// ```
#[async_trait]
pub trait Tools: Send + Sync + 'static {
    /// Lists the tools that are available to a session.
    async fn list(&self, context: &ToolContext<'_>) -> Result<Vec<Tool>, ToolError>;

    /// Executes a call. The future is dropped if the call times out or its run is stopped; the
    /// implementation should then cancel the call.
    async fn call(&self, context: &ToolContext<'_>, call: &ToolInvocation) -> Result<ToolOutput, ToolError>;

    /// Called when a session was deleted, has expired, or was purged or erased: resources held for
    /// it can be released. It is called for tools that were registered with
    /// [`Tenure::register_tools`](crate::Tenure::register_tools). The default does nothing.
    async fn end(&self, session: &SessionKey) {
        let _ = session;
    }
}
