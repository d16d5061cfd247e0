//! Assembles a message from the chunks of a model's response.
//!
//! Streams differ between servers. Text is concatenated, items with an `index` are merged by it, and unknown
//! fields are preserved.

use crate::types::message::Message;
use crate::types::model::{ModelChunk, ModelError};
use crate::types::raw_object::RawObject;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Number, Value, json};

/// A model's response that is being received. Only the first of several choices is used.
#[derive(Clone, Debug, Default)]
pub struct ModelAnswer {
    /// Maximum size of the message, in bytes of JSON.
    max_bytes: Option<usize>,
    /// Current size of the message, approximately.
    bytes: usize,
    message: Map<String, Value>,
    complete_message: Option<Message>,
    complete_body: Option<String>,
    /// Why the model stopped. `None` while the response is incomplete.
    pub finish_reason: Option<String>,
    /// Token usage as reported by the model server.
    pub usage: Option<Value>,
    /// The name of the model, as reported by the model server.
    pub model: Option<String>,
}

/// The parsed fields of a response or chunk.
#[derive(Deserialize)]
struct CompletionBody<'a> {
    #[serde(borrow, default)]
    choices: Option<Vec<CompletionChoice<'a>>>,
    #[serde(default)]
    usage: Option<Value>,
    #[serde(default)]
    model: Option<String>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct CompletionChoice<'a> {
    #[serde(default)]
    index: u64,
    #[serde(borrow, default)]
    message: Option<&'a RawValue>,
    #[serde(default)]
    delta: Option<Map<String, Value>>,
    #[serde(default)]
    finish_reason: Option<String>,
}

impl ModelAnswer {
    /// Creates an empty response whose message may have at most `max_bytes` bytes.
    pub fn with_max_bytes(max_bytes: usize) -> Self {
        Self { max_bytes: Some(max_bytes), ..Self::default() }
    }

    /// Merges a chunk. Malformed input is [`ModelError::Broken`]. A chunk that would make the message exceed
    /// its limit is [`ModelError::TooLarge`] and is not merged: the message stays as it was.
    pub fn add_chunk(&mut self, chunk: &ModelChunk) -> Result<(), ModelError> {
        let (ModelChunk::Chunk(text) | ModelChunk::Complete(text)) = chunk;
        let body: CompletionBody<'_> =
            serde_json::from_str(text).map_err(|e| broken(format!("not a chat completion object: {e}")))?;
        if let Some(error) = body.error.filter(|e| e.get() != "null") {
            return Err(broken(format!("the model server reported an error: {:.500}", error.get())));
        }
        if let Some(limit) = self.max_bytes {
            let choices = body.choices.iter().flatten().filter(|c| c.index == 0);
            let added =
                choices.map(|c| c.message.map_or(0, |m| m.get().len()) + c.delta.as_ref().map_or(0, object_size));
            if self.bytes.saturating_add(added.sum()) > limit {
                return Err(ModelError::TooLarge { limit });
            }
        }
        self.usage = body.usage.filter(|u| !u.is_null()).or(self.usage.take());
        self.model = body.model.or(self.model.take());
        let choices = body.choices.unwrap_or_default();
        if choices.is_empty() && matches!(chunk, ModelChunk::Complete(_)) {
            return Err(broken("the response has no choices"));
        }
        if let ModelChunk::Complete(text) = chunk {
            self.complete_body = Some(text.clone());
        }
        for choice in choices.into_iter().filter(|c| c.index == 0) {
            if let Some(message) = choice.message {
                self.complete_message = Some(parse_message(message.get()).map_err(broken)?);
            }
            for (name, value) in choice.delta.unwrap_or_default() {
                self.bytes += merge(&mut self.message, name, value);
            }
            self.finish_reason = choice.finish_reason.or(self.finish_reason.take());
        }
        Ok(())
    }

    /// Returns the message received so far. `None` means that there is no content worth storing.
    pub fn message(&self) -> Option<Message> {
        if let Some(message) = &self.complete_message {
            return Some(message.clone());
        }
        if self.message.iter().all(|(name, v)| name == "role" || is_empty_value(v)) && self.finish_reason.is_none() {
            return None;
        }
        let mut text = String::from(r#"{"role":"assistant""#);
        let content = self.message.get("content").cloned().unwrap_or(Value::Null);
        text.push_str(&format!(r#","content":{content}"#));
        for (name, value) in self.message.iter().filter(|(n, _)| !["role", "content"].contains(&n.as_str())) {
            let value =
                if name == "tool_calls" { complete_calls(value, self.finish_reason.is_some()) } else { value.clone() };
            if !is_empty_value(&value) {
                text.push_str(&format!(",{}:{value}", Value::from(name.as_str())));
            }
        }
        text.push('}');
        parse_message(&text).ok()
    }
}

impl ModelAnswer {
    /// Returns the response as one `chat.completion` object: as received, or assembled from the chunks.
    pub fn body(&self, id: &str, at: Timestamp) -> String {
        if let Some(body) = &self.complete_body {
            return body.clone();
        }
        let mut body = json!({
            "id": id, "object": "chat.completion", "created": at.as_second(), "model": self.model,
            "choices": [{"index": 0, "message": null, "finish_reason": self.finish_reason.as_deref().unwrap_or("stop")}],
        });
        body["choices"][0]["message"] = self.message().map_or(Value::Null, |m| m.to_value());
        if let Some(usage) = &self.usage {
            body["usage"] = usage.clone();
        }
        body.to_string()
    }
}

impl ModelAnswer {
    /// Replaces the token usage of this response by the sum over all responses of the turn (D-050).
    pub(crate) fn set_usage(&mut self, usage: Value) {
        if let Some(body) = &mut self.complete_body
            && let Ok(mut fields) = serde_json::from_str::<RawObject>(body)
        {
            fields.set("usage", &usage);
            *body = fields.to_string();
        }
        self.usage = Some(usage);
    }
}

/// Adds the token usage of one more response to a total, field by field. Values that are not numbers are
/// replaced by the latest one.
pub(crate) fn add_usage(total: &mut Value, more: &Value) {
    match (total, more) {
        (_, Value::Null) => {}
        (Value::Object(total), Value::Object(more)) => {
            for (name, value) in more {
                add_usage(total.entry(name.clone()).or_insert(Value::Null), value);
            }
        }
        (Value::Number(total), Value::Number(more)) => *total = sum(total, more),
        (total, more) => *total = more.clone(),
    }
}

fn sum(a: &Number, b: &Number) -> Number {
    match (a.as_u64(), b.as_u64()) {
        (Some(a), Some(b)) => a.saturating_add(b).into(),
        _ => {
            let sum = a.as_f64().unwrap_or(0.0) + b.as_f64().unwrap_or(0.0);
            Number::from_f64(sum).unwrap_or_else(|| b.clone())
        }
    }
}

/// Returns true for values without content: `null`, and empty strings and arrays.
fn is_empty_value(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(s) => s.is_empty(),
        Value::Array(a) => a.is_empty(),
        _ => false,
    }
}

/// Removes the stream indexes from tool calls. Of an incomplete response, only calls with complete arguments
/// are returned.
fn complete_calls(value: &Value, finished: bool) -> Value {
    let Value::Array(calls) = value else { return value.clone() };
    let is_complete = |call: &&Value| {
        let arguments = call["function"]["arguments"].as_str().or(call["custom"]["input"].as_str());
        finished || arguments.is_some_and(|a| serde_json::from_str::<Value>(a).is_ok())
    };
    let without_index = |call: &Value| {
        let mut call = call.clone();
        if let Value::Object(fields) = &mut call {
            fields.remove("index");
        }
        call
    };
    calls.iter().filter(is_complete).map(without_index).collect()
}

/// Parses a received message. One without content gets an empty content, so that it is valid in later
/// requests.
fn parse_message(raw: &str) -> Result<Message, String> {
    if let Ok(message) = Message::parse(raw) {
        return Ok(message);
    }
    let mut message: Map<String, Value> =
        serde_json::from_str(raw).map_err(|e| format!("the message of the response is malformed: {e}"))?;
    if message.get("content").is_none_or(Value::is_null) {
        message.insert("content".to_owned(), json!(""));
    }
    message.entry("role").or_insert_with(|| json!("assistant"));
    Message::from_value(&Value::Object(message)).map_err(|e| format!("the message of the response is malformed: {e}"))
}

/// Fields that are sent once or repeated unchanged: they are replaced, not concatenated.
const REPLACED_FIELDS: [&str; 5] = ["role", "id", "type", "name", "index"];

fn broken(reason: impl Into<String>) -> ModelError {
    ModelError::Broken { reason: reason.into() }
}

/// Computes the size of a string in JSON, including quotes and escapes.
fn text_size(text: &str) -> usize {
    let byte = |b: u8| match b {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 8 | 12 => 2,
        0..0x20 => 6,
        _ => 1,
    };
    text.bytes().map(byte).sum::<usize>() + 2
}

/// Computes the size of a value in JSON, approximately.
fn size(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) => 5,
        Value::Number(number) => number.to_string().len(),
        Value::String(text) => text_size(text),
        Value::Array(items) => items.iter().map(|item| size(item) + 1).sum::<usize>() + 2,
        Value::Object(fields) => object_size(fields),
    }
}

/// Computes the size of an object in JSON, approximately.
fn object_size(fields: &Map<String, Value>) -> usize {
    fields.iter().map(|(name, value)| text_size(name) + size(value) + 2).sum::<usize>() + 2
}

/// Merges a field of a chunk into a message. Returns the number of bytes by which the message has grown.
fn merge(target: &mut Map<String, Value>, name: String, value: Value) -> usize {
    if value.is_null() {
        return 0;
    }
    let new_name = if target.contains_key(&name) { 0 } else { text_size(&name) + 2 };
    let slot = target.entry(name.clone()).or_insert(Value::Null);
    let grown = match (slot, value) {
        (Value::String(old), Value::String(new)) if REPLACED_FIELDS.contains(&name.as_str()) => {
            let grown = new.len().saturating_sub(old.len());
            if !new.is_empty() {
                *old = new;
            }
            grown
        }
        (Value::String(old), Value::String(new)) => {
            old.push_str(&new);
            text_size(&new) - 2
        }
        (Value::Object(old), Value::Object(new)) => new.into_iter().map(|(name, value)| merge(old, name, value)).sum(),
        (slot @ (Value::Array(_) | Value::Null), Value::Array(new)) => {
            let mut list = if let Value::Array(old) = slot.take() { old } else { Vec::new() };
            let grown = new.into_iter().map(|item| merge_item(&mut list, item)).sum();
            *slot = Value::Array(list);
            grown
        }
        (slot, new) => {
            let grown = size(&new);
            *slot = new;
            grown
        }
    };
    new_name + grown
}

/// Merges an item into a list: by `index` if it has one, else at the end. Returns the number of bytes by
/// which the list has grown.
fn merge_item(list: &mut Vec<Value>, item: Value) -> usize {
    let index = item.get("index").and_then(Value::as_u64);
    let position = index.and_then(|i| list.iter().position(|v| v.get("index").and_then(Value::as_u64) == Some(i)));
    match (position, item) {
        (Some(position), Value::Object(new)) => {
            let Value::Object(old) = &mut list[position] else { return 0 };
            new.into_iter().map(|(name, value)| merge(old, name, value)).sum()
        }
        (_, item) => {
            let grown = size(&item) + 1;
            list.push(item);
            grown
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(chunks: &[Value]) -> ModelAnswer {
        let mut answer = ModelAnswer::default();
        for delta in chunks {
            let chunk = json!({"choices": [{"index": 0, "delta": delta}]});
            answer.add_chunk(&ModelChunk::Chunk(chunk.to_string())).unwrap();
        }
        answer
    }

    #[test]
    fn text_is_concatenated_and_unknown_fields_are_preserved() {
        let answer = answer(&[
            json!({"role": "assistant", "content": ""}),
            json!({"content": "Hel", "reasoning_content": "think"}),
            json!({"content": "lo", "reasoning_content": "ing", "odd": {"a": 1}}),
        ]);
        let message = answer.message().unwrap();
        assert_eq!(
            message.to_value(),
            json!({"role": "assistant", "content": "Hello", "reasoning_content": "thinking", "odd": {"a": 1}})
        );
    }

    #[test]
    fn tool_calls_are_merged_by_index() {
        let call = |i: u64, f: Value| json!({"tool_calls": [{"index": i, "function": f}]});
        let mut answer = answer(&[
            json!({"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]}),
            call(0, json!({"arguments": "{\"x\""})),
            json!({"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{"}}]}),
            call(0, json!({"arguments": ":1}"})),
        ]);
        // Truncated here, only the first call is complete.
        let calls = answer.message().unwrap().tool_calls();
        assert_eq!(calls.len(), 1);
        assert_eq!(
            (calls[0].id.as_str(), calls[0].name.as_str(), calls[0].arguments.as_str()),
            ("a", "f", "{\"x\":1}")
        );
        answer.add_chunk(&ModelChunk::Chunk(json!({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]}, "finish_reason": "tool_calls"}]}).to_string())).unwrap();
        let message = answer.message().unwrap();
        assert_eq!(message.tool_calls()[1].arguments, "{}");
        assert_eq!(message.to_value()["content"], Value::Null);
        assert!(message.to_value()["tool_calls"][0].get("index").is_none());
    }

    #[test]
    fn a_complete_message_keeps_its_bytes() {
        let raw = r#"{"role":"assistant","content":"x","z":1.50,"a":null}"#;
        let mut answer = ModelAnswer::default();
        answer.add_chunk(&ModelChunk::Complete(format!(r#"{{"choices":[{{"index":0,"message":{raw}}}]}}"#))).unwrap();
        assert_eq!(answer.message().unwrap().as_str(), raw);
    }

    #[test]
    fn an_incomplete_empty_answer_is_no_message_and_a_complete_one_is() {
        let mut answer = answer(&[json!({"role": "assistant", "content": ""})]);
        assert!(answer.message().is_none());
        answer.add_chunk(&ModelChunk::Chunk(r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#.into())).unwrap();
        assert_eq!(answer.message().unwrap().text(), "");
    }

    #[test]
    fn usage_is_added_field_by_field() {
        let mut total = Value::Null;
        let details = |n: u64| json!({"cached_tokens": n, "audio_tokens": null});
        add_usage(
            &mut total,
            &json!({"total_tokens": 3, "prompt_tokens_details": details(1), "tier": "a", "cost": 0.5}),
        );
        add_usage(&mut total, &Value::Null);
        add_usage(
            &mut total,
            &json!({"total_tokens": 4, "prompt_tokens_details": details(2), "tier": "b", "cost": 1, "new": 7}),
        );
        add_usage(&mut total, &json!({"total_tokens": 5, "prompt_tokens_details": null}));
        let expected =
            json!({"total_tokens": 12, "prompt_tokens_details": details(3), "tier": "b", "cost": 1.5, "new": 7});
        assert_eq!(total, expected);
    }

    /// A chunk that exceeds the limit is rejected and earlier content is preserved; the counted size
    /// approximates that of the message.
    #[test]
    fn a_message_has_a_limit() {
        let chunk = |delta: Value| ModelChunk::Chunk(json!({"choices": [{"index": 0, "delta": delta}]}).to_string());
        for delta in [
            json!({"role": "assistant", "content": "a \"word\"\n"}),
            json!({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]}),
            json!({"odd": [1, 2.5, {"a": null}]}),
        ] {
            let mut answer = ModelAnswer::with_max_bytes(4000);
            let error = loop {
                if let Err(error) = answer.add_chunk(&chunk(delta.clone())) {
                    break error;
                }
            };
            assert_eq!((error.code(), error.to_string().contains("max_message_bytes")), ("answer_too_large", true));
            answer.finish_reason = Some("length".to_owned());
            let message = answer.message().unwrap();
            assert!((3500..=4100).contains(&message.as_str().len()), "{} bytes of {delta}", message.as_str().len());
        }
        let complete = format!(
            r#"{{"choices":[{{"index":0,"message":{{"role":"assistant","content":"{}"}}}}]}}"#,
            "x".repeat(5000)
        );
        let mut answer = ModelAnswer::with_max_bytes(4000);
        assert_eq!(answer.add_chunk(&ModelChunk::Complete(complete)).unwrap_err().code(), "answer_too_large");
        assert!(answer.message().is_none());
    }

    #[test]
    fn errors_and_malformed_chunks_are_reported() {
        let mut answer = ModelAnswer::default();
        assert!(answer.add_chunk(&ModelChunk::Chunk("nonsense".into())).is_err());
        assert!(
            answer
                .add_chunk(&ModelChunk::Chunk(r#"{"error":{"message":"overloaded"}}"#.into()))
                .unwrap_err()
                .to_string()
                .contains("overloaded")
        );
        assert!(answer.add_chunk(&ModelChunk::Complete("{}".into())).is_err());
    }
}
