//! The execution of one tool call: cached result, lease, invocation with a timeout, and what the
//! run makes of the result.

use super::limit;
use super::retry::Backoff;
use crate::executors::tools::{ToolContext, ToolInvocation, Tools};
use crate::rules::next::{CallAction, PendingCall};
use crate::run::built_in_tools::BuiltInTool;
use crate::run::executors::TurnError;
use crate::run::lease::LeaseState;
use crate::tenure::Tenure;
use crate::types::assistant::Assistant;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Principal, RunId, SessionId};
use crate::types::tool::{Tool, ToolError, ToolOutput};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::Instant;
use tracing::Instrument;

/// One tool call of a run, with everything that its execution needs.
pub(super) struct ToolCall<'a> {
    pub tenure: Tenure,
    pub principal: Principal,
    pub session_id: SessionId,
    pub run: RunId,
    /// The session's head as of the run's last commit.
    pub head: Arc<Head>,
    pub assistant: Option<Arc<Assistant>>,
    pub tools: Option<&'a dyn Tools>,
    /// The built-in tool that is called. `None` means that it is one of `tools`.
    pub built_in: Option<BuiltInTool>,
    pub tool: Tool,
    pub cached_result: Option<String>,
    pub lease_state: Arc<LeaseState>,
    pub timeout: Duration,
    pub max_result_bytes: usize,
    pub pending: PendingCall,
    pub called_before: bool,
}

/// The result of a tool call.
pub(super) enum CallResult {
    Content {
        content: String,
        /// A change of the session's metadata, to be committed with the result. Empty means none.
        patch: Map<String, Value>,
    },
    /// The outcome is unknown and the tool is not repeatable: a review is required (D-054).
    Lost,
}

/// The output of an invocation, with a change of the session's metadata.
type Invoked = Result<(ToolOutput, Map<String, Value>), ToolError>;

impl CallResult {
    fn of_content(content: String) -> Self {
        CallResult::Content { content, patch: Map::new() }
    }
}

impl ToolCall<'_> {
    pub async fn execute(self) -> Result<CallResult, TurnError> {
        let arguments = match &self.pending.action {
            CallAction::Respond(content) => return Ok(CallResult::of_content(content.clone())),
            CallAction::Call(arguments) => arguments.clone(),
        };
        if let Some(content) = self.cached_result {
            return Ok(CallResult::of_content(content));
        }
        if self.tools.is_none() && self.built_in.is_none() {
            return Ok(CallResult::Lost);
        }
        self.ensure_lease().await?;
        let invocation = ToolInvocation {
            session: self.principal.key(&self.session_id),
            run: self.run.clone(),
            id: self.pending.call.id.clone(),
            tool: self.pending.call.name.clone(),
            arguments,
            called_before: self.called_before,
        };
        let span = tracing::info_span!(
            target: "tenure::trace", "tool", otel.name = format!("execute_tool {}", invocation.tool),
            gen_ai.operation.name = "execute_tool", gen_ai.tool.name = invocation.tool,
            gen_ai.tool.call.id = invocation.id, gen_ai.conversation.id = self.session_id.as_str(),
        );
        let started = Instant::now();
        let result = tokio::time::timeout(self.timeout, self.invoke(&invocation)).instrument(span).await;
        let seconds = started.elapsed().as_secs_f64();
        metrics::histogram!("tenure_tool_seconds", "tool" => self.tool.name.clone()).record(seconds);
        let Ok(result) = result else {
            let name = &invocation.tool;
            let message = format!("tool {name:?} exceeded its `tool_timeout`; raise it or make the tool faster");
            return Err(limit("tool_timeout", message));
        };
        let result = result?;
        count_outcome(&result);
        match result {
            Ok((output, patch)) => self.accept_output(invocation, output, patch).await,
            Err(ToolError::Lost(_)) if !self.tool.is_repeatable() => Ok(CallResult::Lost),
            Err(e) => Ok(CallResult::of_content(format!("[{e}]"))),
        }
    }

    /// Renews the lease if it has expired: this node may have been suspended, and another node may
    /// be executing this call.
    async fn ensure_lease(&self) -> Result<()> {
        if self.tenure.now().as_microsecond() < self.lease_state.until.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut backoff = Backoff::new();
        let until = loop {
            let renewed = self.tenure.renew_lease(&self.principal, &self.session_id, &self.run).await;
            if let Some(until) = backoff.unless_unavailable(renewed).await {
                break until?;
            }
        };
        self.lease_state.until.store(until.as_microsecond(), Ordering::Relaxed);
        Ok(())
    }

    async fn invoke(&self, invocation: &ToolInvocation) -> Result<Invoked> {
        let result = match (&self.built_in, self.tools) {
            (Some(built_in), _) => built_in.call(&self.tenure, &self.principal, &self.head, invocation).await.map(Ok),
            (None, Some(tools)) => {
                let context = ToolContext::new(&invocation.session, self.assistant.as_deref());
                let context = context.with_metadata(&self.head.info.metadata);
                Ok(tools.call(&context, invocation).await.map(|output| (output, Map::new())))
            }
            (None, None) => Ok(Err(ToolError::NotCalled("there are no tools".to_owned()))),
        };
        match result {
            Err(e @ Error::Unavailable { .. }) => Ok(Err(ToolError::NotCalled(e.to_string()))),
            result => result,
        }
    }

    /// Checks the size of a result, and caches it if the tool allows that.
    async fn accept_output(
        &self,
        invocation: ToolInvocation,
        output: ToolOutput,
        patch: Map<String, Value>,
    ) -> Result<CallResult, TurnError> {
        let max = self.max_result_bytes;
        let size = output.content.len();
        if size > max {
            let name = &invocation.tool;
            let message = format!("tool {name:?} returned {size} bytes, more than `max_result_bytes` ({max})");
            return Err(limit("result_too_large", message));
        }
        if self.tool.cache && !output.failed {
            let arguments = Value::Object(invocation.arguments);
            let result = json!(output.content);
            let id = &self.session_id;
            match self.tenure.cache_put(&self.principal, id, &invocation.tool, &arguments, &result).await {
                Err(e @ Error::Unavailable { .. }) => {
                    tracing::warn!(session_id = %id, tool = invocation.tool, error = %e, "could not cache a tool result: store unavailable");
                }
                put => put?,
            }
        }
        Ok(CallResult::Content { content: output.content, patch })
    }
}

fn count_outcome(result: &Invoked) {
    let outcome = match result {
        Ok((ToolOutput { failed: false, .. }, _)) => "answered",
        Ok(_) => "failed",
        Err(ToolError::NotCalled(_)) => "not_called",
        Err(ToolError::Lost(_)) => "lost",
    };
    metrics::counter!("tenure_tool_calls_total", "outcome" => outcome).increment(1);
}
