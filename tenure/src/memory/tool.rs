//! The built-in tool `memory`: lets a model store, recall and delete the memories of its assistant.

use crate::executors::tools::ToolInvocation;
use crate::memory::memories::{MemoryTarget, NewMemory};
use crate::rules::session::StoredMessage;
use crate::tenure::Tenure;
use crate::types::assistant::Assistant;
use crate::types::error::{Error, Result};
use crate::types::id::{Principal, SessionId};
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
    Remember { text: String },
    Recall { query: String, limit: Option<usize> },
    Forget { id: String },
}

/// The tool definition sent to the model.
fn tool() -> Tool {
    let text = |what: &str| json!({"type": "string", "description": what});
    Tool {
        name: NAME.to_owned(),
        description: "Remembers facts beyond this conversation. `remember` keeps `text`, one fact in plain words; \
            `recall` finds what has to do with `query`; `forget` takes back the memory with `id`."
            .to_owned(),
        parameters: json!({
            "type": "object",
            "properties": {
                "action": {"type": "string", "enum": ["remember", "recall", "forget"]},
                "text": text("the fact, for remember"),
                "query": text("what to look for, for recall"),
                "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "description": "at most so many, for recall"},
                "id": text("the memory, for forget"),
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
    pub(crate) fn memory_tool(&self, who: &Principal, assistant: &Assistant) -> Option<Tool> {
        let remembers = || self.policy(&who.tenant, Some(&assistant.name)).memory.scope != MemoryScope::None;
        (assistant.tools.contains(&ToolSource::Memory) && remembers()).then(tool)
    }

    /// Executes a call. Invalid arguments are returned to the model as a failed output, not as an
    /// error of the run.
    pub(crate) async fn call_memory(
        &self,
        who: &Principal,
        id: &SessionId,
        call: &ToolInvocation,
    ) -> Result<ToolOutput> {
        let action = match serde_json::from_value(Value::Object(call.arguments.clone())) {
            Ok(action) => action,
            Err(e) => return Ok(failed(format!("{e}; the actions are remember, recall and forget"))),
        };
        match self.act(who, id, call, action).await {
            Ok(content) => Ok(ToolOutput { content: content.to_string(), failed: false }),
            Err(e @ (Error::Invalid { .. } | Error::TooLarge { .. })) => Ok(failed(e.to_string())),
            Err(e) => Err(e),
        }
    }

    async fn act(&self, who: &Principal, id: &SessionId, call: &ToolInvocation, action: Action) -> Result<Value> {
        let mind = MemoryTarget::Session(id.clone());
        match action {
            Action::Remember { text } => {
                // The source is the message that contains the call.
                let session = self.engine.shared(who, id).await?;
                let calls = |m: &&StoredMessage| m.message.tool_calls().iter().any(|c| c.id == call.id);
                let messages = session.messages.iter().rev().find(calls).map(|m| m.seq).into_iter().collect();
                let memory = self.remember(who, &mind, NewMemory { text, messages, ..NewMemory::default() }).await?;
                Ok(json!({"remembered": memory.id}))
            }
            Action::Recall { query, limit } => {
                let found = self.recall(who, &mind, &query, limit.unwrap_or(LIMIT).clamp(1, MAX_LIMIT)).await?;
                let memories = found.memories.iter().map(|hit| {
                    let day = hit.memory.created_at.strftime("%Y-%m-%d").to_string();
                    json!({"id": hit.memory.id, "text": hit.memory.text, "since": day})
                });
                Ok(json!({"memories": memories.collect::<Vec<_>>()}))
            }
            Action::Forget { id: memory } => Ok(json!({"forgotten": self.forget_memory(who, &mind, &memory).await?})),
        }
    }
}

fn failed(content: String) -> ToolOutput {
    ToolOutput { content: format!("[{content}]"), failed: true }
}
