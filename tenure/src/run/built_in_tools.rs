//! The tools that the library provides itself: `memory`, `metadata` and `ask_human`. An assistant has those that
//! it lists among its `tools`.

use crate::executors::tools::ToolInvocation;
use crate::memory::tool as memory_tool;
use crate::run::metadata_tool;
use crate::tenure::Tenure;
use crate::types::assistant::Assistant;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::Principal;
use crate::types::policy::MemoryScope;
use crate::types::tool::{Tool, ToolOutput};
use crate::types::tool_source::{MetadataSource, ToolSource};
use serde_json::{Map, Value, json};

/// A built-in tool of an assistant.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum BuiltInTool {
    /// Stores, recalls and deletes memories.
    Memory,
    /// Reads and changes permitted keys of the session's metadata.
    Metadata(MetadataSource),
    /// Asks a person. The run loop opens a review instead of calling it (`rules/next.rs`).
    AskHuman,
}

impl BuiltInTool {
    /// Returns the built-in tools of an assistant. There is no tool `memory` without a memory.
    pub fn of_assistant(tenure: &Tenure, principal: &Principal, assistant: &Assistant) -> Vec<Self> {
        let scope = tenure.policy(&principal.tenant, Some(&assistant.name)).memory.scope;
        let built_in = |source: &ToolSource| match source {
            ToolSource::Memory => (scope != MemoryScope::None).then_some(BuiltInTool::Memory),
            ToolSource::Metadata(source) => Some(BuiltInTool::Metadata(source.clone())),
            ToolSource::AskHuman => Some(BuiltInTool::AskHuman),
            ToolSource::Mcp(_) | ToolSource::Http(_) | ToolSource::Python(_) => None,
        };
        assistant.tools.iter().filter_map(built_in).collect()
    }

    /// The name by which the model calls it.
    pub fn name(&self) -> &'static str {
        match self {
            BuiltInTool::Memory => memory_tool::NAME,
            BuiltInTool::Metadata(_) => metadata_tool::NAME,
            BuiltInTool::AskHuman => "ask_human",
        }
    }

    /// The definition that is sent to the model.
    pub fn definition(&self) -> Tool {
        match self {
            BuiltInTool::Memory => memory_tool::definition(),
            BuiltInTool::Metadata(source) => metadata_tool::definition(source),
            BuiltInTool::AskHuman => ask_human(self.name()),
        }
    }

    /// Executes a call in the session with this head. Invalid arguments are returned to the model as a failed
    /// output, not as an error of the run.
    pub async fn call(
        &self,
        tenure: &Tenure,
        principal: &Principal,
        head: &Head,
        call: &ToolInvocation,
    ) -> Result<(ToolOutput, Map<String, Value>)> {
        let result = match self {
            BuiltInTool::Memory => tenure.call_memory(principal, call).await.map(|content| (content, Map::new())),
            BuiltInTool::Metadata(source) => {
                tenure.call_metadata(source, head, call).map(|result| (result.content, result.patch))
            }
            BuiltInTool::AskHuman => Err(Error::invalid("question", "a question is answered by a review")),
        };
        match result {
            Ok((content, patch)) => Ok((ToolOutput { content: content.to_string(), failed: false }, patch)),
            Err(e @ (Error::Invalid { .. } | Error::TooLarge { .. })) => {
                Ok((ToolOutput { content: format!("[{e}]"), failed: true }, Map::new()))
            }
            Err(e) => Err(e),
        }
    }
}

fn ask_human(name: &str) -> Tool {
    Tool {
        name: name.to_owned(),
        description: "Asks a person and waits for the answer. Use it for a decision that you must not make alone, or \
            for information that only a person has. The result has `decision` (approved, rejected or corrected) and, \
            if the person gave one, `answer`."
            .to_owned(),
        parameters: json!({
            "type": "object",
            "properties": {
                "question": {"type": "string", "description": "the question, with everything needed to answer it"},
                "choices": {"type": "array", "items": {"type": "string"}, "description": "answers to choose from"},
                "queue": {"type": "string", "description": "who is asked; omit it unless you were told a queue"},
            },
            "required": ["question"],
        }),
        asks_human: true,
        ..Tool::default()
    }
}
