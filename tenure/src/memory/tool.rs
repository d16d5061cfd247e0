//! The tool `memory`: what a model can do with what its assistant remembers.

use crate::executors::tools::Call;
use crate::memory::memories::{Mind, Remember};
use crate::rules::session::Said;
use crate::tenure::Tenure;
use crate::types::assistant::Assistant;
use crate::types::error::{Error, Result};
use crate::types::id::{Principal, SessionId};
use crate::types::policy::Scope;
use crate::types::tool::{Output, Tool};
use crate::types::tool_source::ToolSource;
use serde::Deserialize;
use serde_json::{Value, json};

/// Its name.
pub(crate) const NAME: &str = "memory";
/// So many memories are recalled if it is not said how many.
const LIMIT: usize = 8;
const MAX_LIMIT: usize = 50;

/// What it is called with.
#[derive(Deserialize)]
#[serde(tag = "action", rename_all = "lowercase", deny_unknown_fields)]
enum Action {
    Remember { text: String },
    Recall { query: String, limit: Option<usize> },
    Forget { id: String },
}

/// The tool, as a model is told of it.
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
        // The same words are one memory, however often they are said.
        idempotent: true,
        cache: false,
    }
}

impl Tenure {
    /// The tool, if an assistant lists it and remembers anything.
    pub(crate) fn memory_tool(&self, who: &Principal, assistant: &Assistant) -> Option<Tool> {
        let remembers = || self.policy(&who.tenant, Some(&assistant.name)).memory.scope != Scope::None;
        (assistant.tools.contains(&ToolSource::Memory) && remembers()).then(tool)
    }

    /// Does what the model asks for. What is wrong with that is told to the model.
    pub(crate) async fn call_memory(&self, who: &Principal, id: &SessionId, call: &Call) -> Result<Output> {
        let action = match serde_json::from_value(Value::Object(call.arguments.clone())) {
            Ok(action) => action,
            Err(e) => return Ok(failed(format!("{e}; the actions are remember, recall and forget"))),
        };
        match self.act(who, id, call, action).await {
            Ok(content) => Ok(Output { content: content.to_string(), failed: false }),
            Err(e @ (Error::Invalid { .. } | Error::TooLarge { .. })) => Ok(failed(e.to_string())),
            Err(e) => Err(e),
        }
    }

    async fn act(&self, who: &Principal, id: &SessionId, call: &Call, action: Action) -> Result<Value> {
        let mind = Mind::Session(id.clone());
        match action {
            Action::Remember { text } => {
                // It comes from the message that made the call.
                let session = self.engine.shared(who, id).await?;
                let calls = |m: &&Said| m.message.tool_calls().iter().any(|c| c.id == call.id);
                let messages = session.messages.iter().rev().find(calls).map(|m| m.seq).into_iter().collect();
                let memory = self.remember(who, &mind, Remember { text, messages, ..Remember::default() }).await?;
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

fn failed(content: String) -> Output {
    Output { content: format!("[{content}]"), failed: true }
}
