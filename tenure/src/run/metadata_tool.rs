//! The built-in tool `metadata`: lets a model read and change permitted keys of its session's metadata.

use crate::executors::tools::ToolInvocation;
use crate::rules::metadata::apply_patch;
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::head::{DECISIONS, Head};
use crate::types::tool::Tool;
use crate::types::tool_source::MetadataSource;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// The tool's name.
pub(crate) const NAME: &str = "metadata";

/// The arguments of a call.
#[derive(Deserialize)]
#[serde(tag = "action", rename_all = "lowercase", deny_unknown_fields)]
enum Action {
    Read {},
    Update { patch: Map<String, Value> },
}

/// The tool definition sent to the model.
pub(crate) fn definition(source: &MetadataSource) -> Tool {
    let keys = source.keys.join("`, `");
    Tool {
        name: NAME.to_owned(),
        description: format!(
            "What this session has accumulated, shared by all of its turns. `read` returns the keys `{keys}`. `update` \
             merges `patch`, an object with some of these keys, into them: objects are merged, null removes a key, \
             anything else replaces it."
        ),
        parameters: json!({
            "type": "object",
            "properties": {
                "action": {"type": "string", "enum": ["read", "update"]},
                "patch": {"type": "object", "description": "for update"},
            },
            "required": ["action"],
        }),
        // Nothing has changed until the result is committed.
        idempotent: true,
        ..Tool::default()
    }
}

/// The result of a call: the permitted keys, and the change to commit with it.
pub(crate) struct MetadataResult {
    pub content: Value,
    pub patch: Map<String, Value>,
}

impl Tenure {
    /// Executes a call on the session with this head. The change is committed together with the result, so that
    /// it is made exactly once.
    pub(crate) fn call_metadata(
        &self,
        source: &MetadataSource,
        head: &Head,
        call: &ToolInvocation,
    ) -> Result<MetadataResult> {
        let invalid =
            |e: serde_json::Error| Error::invalid("action", format!("{e}; valid actions are read and update"));
        let action = serde_json::from_value(Value::Object(call.arguments.clone())).map_err(invalid)?;
        let is_permitted = |key: &String| key != DECISIONS && source.keys.contains(key);
        let patch = match action {
            Action::Read {} => Map::new(),
            Action::Update { patch } => patch,
        };
        if let Some(key) = patch.keys().find(|key| !is_permitted(key)) {
            let keys = source.keys.join(", ");
            return Err(Error::invalid(format!("patch.{key}"), format!("not permitted; use one of: {keys}")));
        }
        let mut after = head.clone();
        apply_patch(&mut after.info.metadata, &patch);
        self.engine.check_info_of(&after)?;
        let permitted = after.info.metadata.into_iter().filter(|(key, _)| is_permitted(key));
        Ok(MetadataResult { content: json!({"metadata": permitted.collect::<Map<_, _>>()}), patch })
    }
}
