//! The built-in tool `memory`: lets a model store, recall and delete the memories of its assistant.

use crate::executors::tools::ToolInvocation;
use crate::memory::memories::{MemoryTarget, NewMemory};
use crate::memory::recall::MAX_QUESTIONS;
use crate::rules::session::StoredMessage;
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::id::Principal;
use crate::types::memory::{Memory, MemoryKind};
use crate::types::tool::Tool;
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
    Remember {
        text: String,
        kind: Option<MemoryKind>,
        #[serde(default)]
        supersedes: Vec<String>,
    },
    Recall {
        query: Option<String>,
        #[serde(default)]
        queries: Vec<String>,
        limit: Option<usize>,
    },
    Forget {
        id: String,
    },
}

/// The tool definition sent to the model.
pub(crate) fn definition() -> Tool {
    let text = |description: &str| json!({"type": "string", "description": description});
    Tool {
        name: NAME.to_owned(),
        description: "Long-term memory across conversations. `remember` stores `text`, one statement in plain words. \
            Its `kind` is `preference` for how the user wants to be answered from now on, such as language, units, \
            format or length (\"always use metric units\"); it is shown to you in every turn. Everything else is a \
            `fact` (\"lives in Bern\"), which is shown when it is relevant. If it replaces what you recalled before, \
            name the old ids in `supersedes`. `recall` finds memories relevant to `query`, or to any of `queries` \
            when an answer needs several facts; `forget` deletes the memory with `id`."
            .to_owned(),
        parameters: json!({
            "type": "object",
            "properties": {
                "action": {"type": "string", "enum": ["remember", "recall", "forget"]},
                "text": text("the statement, for remember"),
                "kind": {"type": "string", "enum": ["fact", "preference"], "description": "for remember; default: fact"},
                "supersedes": {"type": "array", "items": {"type": "string"}, "description": "ids of memories that are no longer true, for remember"},
                "query": text("the search query, for recall"),
                "queries": {"type": "array", "items": {"type": "string"}, "maxItems": MAX_QUESTIONS, "description": "several search queries, for recall"},
                "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "description": "maximum number of results, for recall"},
                "id": text("the id of the memory, for forget"),
            },
            "required": ["action"],
        }),
        // Idempotent: a memory's id is derived from its text.
        idempotent: true,
        ..Tool::default()
    }
}

impl Tenure {
    /// Executes a call.
    pub(crate) async fn call_memory(&self, principal: &Principal, call: &ToolInvocation) -> Result<Value> {
        let invalid = |e: serde_json::Error| {
            Error::invalid("action", format!("{e}; valid actions are remember, recall and forget"))
        };
        let action = serde_json::from_value(Value::Object(call.arguments.clone())).map_err(invalid)?;
        let id = &call.session.session;
        let target = MemoryTarget::Session(id.clone());
        match action {
            Action::Remember { text, kind, supersedes } => {
                // The source is the message that contains the call.
                let session = self.engine.shared_session(principal, id).await?;
                let contains_call = |m: &&StoredMessage| m.message.tool_calls().iter().any(|c| c.id == call.id);
                let messages =
                    session.session.messages.iter().rev().find(contains_call).map(|m| m.seq).into_iter().collect();
                let new_memory = NewMemory { text, kind, messages, supersedes, ..NewMemory::default() };
                let memory = self.remember(principal, &target, new_memory).await?;
                Ok(json!({"remembered": memory.id, "kind": memory.kind}))
            }
            Action::Recall { query, queries, limit } => {
                let queries: Vec<&str> = query.iter().chain(&queries).map(String::as_str).collect();
                if queries.is_empty() {
                    return Err(Error::invalid("query", "recall needs a `query` or `queries`"));
                }
                let limit = limit.unwrap_or(LIMIT).clamp(1, MAX_LIMIT);
                let result = self.recall_any(principal, &target, &queries, limit).await?;
                let memories = result.memories.iter().map(|hit| {
                    let Memory { id, text, kind, .. } = &hit.memory;
                    let day = hit.memory.created_at.strftime("%Y-%m-%d").to_string();
                    let mut memory = json!({"id": id, "text": text, "kind": kind, "since": day});
                    if let Some(newer) = &hit.memory.superseded_by {
                        memory["superseded_by"] = json!(newer);
                    }
                    memory
                });
                Ok(json!({"memories": memories.collect::<Vec<_>>()}))
            }
            Action::Forget { id: memory } => {
                Ok(json!({"forgotten": self.forget_memory(principal, &target, &memory).await?}))
            }
        }
    }
}
