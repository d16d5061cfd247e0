//! Filters a model's response for the client when tools are called here: removes the calls that the server
//! makes itself.

use crate::types::model::ModelChunk;
use crate::types::tool::Tool;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::sync::Arc;

/// Removes calls of the server's own tools from the chunks of a response.
pub(crate) struct ToolCallFilter {
    tools: Arc<[Tool]>,
    /// The stream indexes of the server's calls.
    server_calls: HashSet<u64>,
    /// Whether there were calls of other tools.
    has_client_calls: bool,
    /// A chunk with the token usage, if the model server reported it. It is sent once, at the end of the turn
    /// (D-050).
    usage: Option<Value>,
}

impl ToolCallFilter {
    /// Creates a filter for the calls of these tools. Without tools, everything passes unchanged.
    pub fn new(tools: Arc<[Tool]>) -> Self {
        Self { tools, server_calls: HashSet::new(), has_client_calls: false, usage: None }
    }

    /// Returns the chunk with the token usage, if it was removed from the response.
    pub fn usage(self) -> Option<Value> {
        self.usage
    }

    /// Filters a chunk. `None` means that nothing of it remains. Token usage is removed.
    pub fn filter(&mut self, chunk: ModelChunk) -> Option<ModelChunk> {
        if self.tools.is_empty() {
            return Some(chunk);
        }
        let (text, part) = match &chunk {
            ModelChunk::Chunk(text) => (text, "delta"),
            ModelChunk::Complete(text) => (text, "message"),
        };
        let Ok(mut body) = serde_json::from_str::<Value>(text) else { return Some(chunk) };
        let reported = body.as_object_mut().filter(|b| b.get("usage").is_some_and(|u| !u.is_null()));
        let usage = reported.and_then(|b| b.remove("usage"));
        if let Some(usage) = &usage {
            let fields = ["id", "created", "model", "system_fingerprint"];
            let mut usage_chunk: Map<String, Value> =
                fields.iter().filter_map(|f| Some(((*f).to_owned(), body.get(*f)?.clone()))).collect();
            usage_chunk.extend([
                ("object".to_owned(), json!("chat.completion.chunk")),
                ("choices".to_owned(), json!([])),
                ("usage".to_owned(), usage.clone()),
            ]);
            self.usage = Some(Value::Object(usage_chunk));
        }
        let choices = body.get_mut("choices").and_then(Value::as_array_mut).map(std::mem::take).unwrap_or_default();
        if choices.is_empty() {
            return usage.is_none().then_some(chunk);
        }
        let remaining: Vec<Value> = choices.into_iter().filter_map(|c| self.choice(c, part)).collect();
        if remaining.is_empty() {
            return None;
        }
        body["choices"] = Value::Array(remaining);
        Some(if part == "message" {
            ModelChunk::Complete(body.to_string())
        } else {
            ModelChunk::Chunk(body.to_string())
        })
    }

    /// Filters one choice. `None` means that nothing of it remains.
    fn choice(&mut self, mut choice: Value, part: &str) -> Option<Value> {
        // Not by indexing, which would insert a `null` for a missing field.
        let calls = choice.get_mut(part).and_then(|p| p.get_mut("tool_calls"));
        if let Some(calls) = calls.and_then(Value::as_array_mut) {
            for (i, call) in calls.iter().enumerate() {
                let index = call["index"].as_u64().unwrap_or(i as u64);
                match call["function"]["name"].as_str() {
                    Some(name) if self.tools.iter().any(|t| t.name == name) => drop(self.server_calls.insert(index)),
                    Some(name) if !name.is_empty() => self.has_client_calls = true,
                    _ => {}
                }
            }
            let mut position = 0;
            calls.retain(|call| {
                let index = call["index"].as_u64().unwrap_or(position);
                position += 1;
                !self.server_calls.contains(&index)
            });
            let no_calls = calls.is_empty();
            if let (true, Value::Object(part)) = (no_calls, &mut choice[part]) {
                part.remove("tool_calls");
            }
        }
        // The turn continues: the tools are called, and the model is called again.
        let only_server_calls = !self.server_calls.is_empty() && !self.has_client_calls;
        let finish = choice["finish_reason"].as_str().map(str::to_owned);
        if only_server_calls && finish.is_some() {
            choice["finish_reason"] = Value::Null;
        }
        let is_empty = |v: &Value| v.is_null() || v.as_str() == Some("");
        let has_no_content =
            choice[part].as_object().is_none_or(|o| o.iter().all(|(name, v)| name == "role" || is_empty(v)));
        (!(only_server_calls && has_no_content)).then_some(choice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(delta: Value, finish: Value) -> ModelChunk {
        ModelChunk::Chunk(json!({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}).to_string())
    }

    #[test]
    fn server_calls_are_removed_and_the_rest_stays() {
        let tools: Arc<[Tool]> = Arc::new([Tool { name: "server_tool".into(), ..Tool::default() }]);
        let mut filter = ToolCallFilter::new(tools.clone());
        assert_eq!(
            filter.filter(chunk(json!({"content": "I look."}), Value::Null)),
            Some(chunk(json!({"content": "I look."}), Value::Null))
        );
        assert_eq!(
            filter.filter(chunk(
                json!({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "server_tool", "arguments": ""}}]}),
                Value::Null
            )),
            None
        );
        assert_eq!(
            filter.filter(chunk(json!({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}), Value::Null)),
            None
        );
        assert_eq!(filter.filter(chunk(json!({}), json!("tool_calls"))), None);
        let mut filter = ToolCallFilter::new(tools.clone());
        let client_call =
            json!({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "client_tool", "arguments": ""}}]});
        assert_eq!(filter.filter(chunk(client_call.clone(), Value::Null)), Some(chunk(client_call, Value::Null)));
        assert_eq!(filter.filter(chunk(json!({}), json!("tool_calls"))), Some(chunk(json!({}), json!("tool_calls"))));
    }

    #[test]
    fn without_server_tools_every_chunk_passes_unchanged() {
        let malformed = ModelChunk::Chunk("odd".into());
        assert_eq!(ToolCallFilter::new(Arc::default()).filter(malformed.clone()), Some(malformed));
    }
}
