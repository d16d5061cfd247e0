//! The built-in tool `memory`: lets a model store, recall and delete the memories of its assistant.

use crate::executors::tools::ToolInvocation;
use crate::memory::memories::{MemoryTarget, NewMemory};
use crate::rules::session::StoredMessage;
use crate::tenure::Tenure;
use crate::types::assistant::Assistant;
use crate::types::error::{Error, Result};
use crate::types::id::{Principal, SessionId};
use crate::types::memory::MemoryKind;
use crate::types::policy::MemoryScope;
use crate::types::tool::{Tool, ToolOutput};
use crate::types::tool_source::ToolSource;
use serde::Deserialize;
use serde_json::{Value, json};

/// The tool's name.
pub(crate) const NAME: &str = "memory";
/// Default number of memories to recall.
const LIMIT: usize = 8;
const MAX_LIMIT: usize = 50;

/// The arguments of a call.
#[derive(Deserialize)]
#[serde(tag = "action", rename_all = "lowercase", deny_unknown_fields)]
enum Action {
    Remember { text: String, kind: Option<MemoryKind> },
    Recall { query: String, limit: Option<usize> },
    Forget { id: String },
}

/// The tool definition sent to the model.
fn tool() -> Tool {
    let text = |description: &str| json!({"type": "string", "description": description});
    Tool {
        name: NAME.to_owned(),
        description: "Long-term memory across conversations. `remember` stores `text`, one statement in plain words. \
            Its `kind` is `preference` for how the user wants to be answered from now on, such as language, units, \
            format or length (\"always use metric units\"); it is shown to you in every turn. Everything else is a \
            `fact` (\"lives in Bern\"), which is shown when it is relevant. `recall` finds memories relevant to \
            `query`; `forget` deletes the memory with `id`."
            .to_owned(),
        parameters: json!({
            "type": "object",
            "properties": {
                "action": {"type": "string", "enum": ["remember", "recall", "forget"]},
                "text": text("the statement, for remember"),
                "kind": {"type": "string", "enum": ["fact", "preference"], "description": "for remember; default: fact"},
                "query": text("the search query, for recall"),
                "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "description": "maximum number of results, for recall"},
                "id": text("the id of the memory, for forget"),
            },
            "required": ["action"],
        }),
        read_only: false,
        // Idempotent: a memory's id is derived from its text.
        idempotent: true,
        cache: false,
    }
}

impl Tenure {
    /// Returns the tool if the assistant lists it and its memory scope is not `none`.
    pub(crate) fn memory_tool(&self, principal: &Principal, assistant: &Assistant) -> Option<Tool> {
        let has_memory = || self.policy(&principal.tenant, Some(&assistant.name)).memory.scope != MemoryScope::None;
        (assistant.tools.contains(&ToolSource::Memory) && has_memory()).then(tool)
    }

    /// Executes a call. Invalid arguments are returned to the model as a failed output, not as an
    /// error of the run.
    pub(crate) async fn call_memory(
        &self,
        principal: &Principal,
        id: &SessionId,
        call: &ToolInvocation,
    ) -> Result<ToolOutput> {
        let action = match serde_json::from_value(Value::Object(call.arguments.clone())) {
            Ok(action) => action,
            Err(e) => return Ok(failed(format!("{e}; valid actions are remember, recall and forget"))),
        };
        match self.execute_action(principal, id, call, action).await {
            Ok(content) => Ok(ToolOutput { content: content.to_string(), failed: false }),
            Err(e @ (Error::Invalid { .. } | Error::TooLarge { .. })) => Ok(failed(e.to_string())),
            Err(e) => Err(e),
        }
    }

    async fn execute_action(
        &self,
        principal: &Principal,
        id: &SessionId,
        call: &ToolInvocation,
        action: Action,
    ) -> Result<Value> {
        let target = MemoryTarget::Session(id.clone());
        match action {
            Action::Remember { text, kind } => {
                // The source is the message that contains the call.
                let session = self.engine.shared_session(principal, id).await?;
                let contains_call = |m: &&StoredMessage| m.message.tool_calls().iter().any(|c| c.id == call.id);
                let messages =
                    session.session.messages.iter().rev().find(contains_call).map(|m| m.seq).into_iter().collect();
                let new_memory = NewMemory { text, kind, messages, ..NewMemory::default() };
                let memory = self.remember(principal, &target, new_memory).await?;
                Ok(json!({"remembered": memory.id, "kind": memory.kind}))
            }
            Action::Recall { query, limit } => {
                let result =
                    self.recall(principal, &target, &query, limit.unwrap_or(LIMIT).clamp(1, MAX_LIMIT)).await?;
                let memories = result.memories.iter().map(|hit| {
                    let day = hit.memory.created_at.strftime("%Y-%m-%d").to_string();
                    json!({"id": hit.memory.id, "text": hit.memory.text, "kind": hit.memory.kind, "since": day})
                });
                Ok(json!({"memories": memories.collect::<Vec<_>>()}))
            }
            Action::Forget { id: memory } => {
                Ok(json!({"forgotten": self.forget_memory(principal, &target, &memory).await?}))
            }
        }
    }
}

fn failed(content: String) -> ToolOutput {
    ToolOutput { content: format!("[{content}]"), failed: true }
}
