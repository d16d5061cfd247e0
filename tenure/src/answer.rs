//! The pieces of an answer become a message.
//!
//! Streams differ from server to server. Text is put together, what is numbered by `index` is put in its place, and fields that
//! nobody has heard of are kept.

use crate::fields::Fields;
use crate::message::Message;
use crate::model::Piece;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Number, Value, json};

/// An answer in the making. Only the first of several choices is kept.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    message: Map<String, Value>,
    whole: Option<Message>,
    body: Option<String>,
    /// Why the model stopped, once it has.
    pub finish_reason: Option<String>,
    /// What it cost, as the model's server says.
    pub usage: Option<Value>,
    /// The model that answered, by its own name.
    pub model: Option<String>,
}

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow, default)]
    choices: Option<Vec<Choice<'a>>>,
    #[serde(default)]
    usage: Option<Value>,
    #[serde(default)]
    model: Option<String>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(default)]
    index: u64,
    #[serde(borrow, default)]
    message: Option<&'a RawValue>,
    #[serde(default)]
    delta: Option<Map<String, Value>>,
    #[serde(default)]
    finish_reason: Option<String>,
}

impl Answer {
    /// Takes a piece in. What is no piece of an answer is an error that says why.
    pub fn take(&mut self, piece: &Piece) -> Result<(), String> {
        let (Piece::Chunk(text) | Piece::Whole(text)) = piece;
        let body: Body<'_> = serde_json::from_str(text).map_err(|e| format!("it is no chat completion: {e}"))?;
        if let Some(error) = body.error.filter(|e| e.get() != "null") {
            return Err(format!("the model's server reported an error: {:.500}", error.get()));
        }
        self.usage = body.usage.filter(|u| !u.is_null()).or(self.usage.take());
        self.model = body.model.or(self.model.take());
        let choices = body.choices.unwrap_or_default();
        if choices.is_empty() && matches!(piece, Piece::Whole(_)) {
            return Err("it has no choices".to_owned());
        }
        if let Piece::Whole(text) = piece {
            self.body = Some(text.clone());
        }
        for choice in choices.into_iter().filter(|c| c.index == 0) {
            if let Some(message) = choice.message {
                self.whole = Some(complete(message.get())?);
            }
            for (name, value) in choice.delta.unwrap_or_default() {
                merge(&mut self.message, name, value);
            }
            self.finish_reason = choice.finish_reason.or(self.finish_reason.take());
        }
        Ok(())
    }

    /// The message so far. `None` if nothing has been said that could be kept.
    pub fn message(&self) -> Option<Message> {
        if let Some(whole) = &self.whole {
            return Some(whole.clone());
        }
        if self.message.iter().all(|(name, v)| name == "role" || is_nothing(v)) && self.finish_reason.is_none() {
            return None;
        }
        let mut text = String::from(r#"{"role":"assistant""#);
        let content = self.message.get("content").cloned().unwrap_or(Value::Null);
        text.push_str(&format!(r#","content":{content}"#));
        for (name, value) in self.message.iter().filter(|(n, _)| !["role", "content"].contains(&n.as_str())) {
            let value = if name == "tool_calls" { calls(value, self.finish_reason.is_some()) } else { value.clone() };
            if !is_nothing(&value) {
                text.push_str(&format!(",{}:{value}", Value::from(name.as_str())));
            }
        }
        text.push('}');
        complete(&text).ok()
    }
}

impl Answer {
    /// The answer as one `chat.completion`: as it came, or put together from its pieces.
    pub fn body(&self, id: &str, at: Timestamp) -> String {
        if let Some(body) = &self.body {
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

impl Answer {
    /// Puts what all answers of a turn cost in place of what this one did.
    pub(crate) fn set_usage(&mut self, usage: Value) {
        if let Some(body) = &mut self.body
            && let Ok(mut fields) = serde_json::from_str::<Fields>(body)
        {
            fields.set("usage", &usage);
            *body = fields.to_string();
        }
        self.usage = Some(usage);
    }
}

/// Adds what one more answer cost, field by field. What is no number keeps its last value.
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

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(s) => s.is_empty(),
        Value::Array(a) => a.is_empty(),
        _ => false,
    }
}

/// Tool calls without their places in the stream. Of an answer that broke off, only those whose arguments are whole.
fn calls(value: &Value, finished: bool) -> Value {
    let Value::Array(calls) = value else { return value.clone() };
    let whole = |call: &&Value| {
        let arguments = call["function"]["arguments"].as_str().or(call["custom"]["input"].as_str());
        finished || arguments.is_some_and(|a| serde_json::from_str::<Value>(a).is_ok())
    };
    let bare = |call: &Value| {
        let mut call = call.clone();
        if let Value::Object(fields) = &mut call {
            fields.remove("index");
        }
        call
    };
    calls.iter().filter(whole).map(bare).collect()
}

/// A message as it came; one without any content gets an empty one, so that it can be said again.
fn complete(raw: &str) -> Result<Message, String> {
    if let Ok(message) = Message::parse(raw) {
        return Ok(message);
    }
    let mut message: Map<String, Value> =
        serde_json::from_str(raw).map_err(|e| format!("its message is broken: {e}"))?;
    if message.get("content").is_none_or(Value::is_null) {
        message.insert("content".to_owned(), json!(""));
    }
    message.entry("role").or_insert_with(|| json!("assistant"));
    Message::from_value(&Value::Object(message)).map_err(|e| format!("its message is broken: {e}"))
}

/// Fields that are said once, or the same each time.
const NAMES: [&str; 5] = ["role", "id", "type", "name", "index"];

fn merge(target: &mut Map<String, Value>, name: String, value: Value) {
    if value.is_null() {
        return;
    }
    let slot = target.entry(name.clone()).or_insert(Value::Null);
    match (slot, value) {
        (Value::String(old), Value::String(new)) if NAMES.contains(&name.as_str()) => {
            if !new.is_empty() {
                *old = new;
            }
        }
        (Value::String(old), Value::String(new)) => old.push_str(&new),
        (Value::Object(old), Value::Object(new)) => new.into_iter().for_each(|(name, value)| merge(old, name, value)),
        (slot @ (Value::Array(_) | Value::Null), Value::Array(new)) => {
            let mut list = if let Value::Array(old) = slot.take() { old } else { Vec::new() };
            new.into_iter().for_each(|item| merge_item(&mut list, item));
            *slot = Value::Array(list);
        }
        (slot, new) => *slot = new,
    }
}

/// Items with an `index` go together; others follow each other.
fn merge_item(list: &mut Vec<Value>, item: Value) {
    let index = item.get("index").and_then(Value::as_u64);
    let place = index.and_then(|i| list.iter().position(|v| v.get("index").and_then(Value::as_u64) == Some(i)));
    match (place, item) {
        (Some(place), Value::Object(new)) => {
            if let Value::Object(old) = &mut list[place] {
                new.into_iter().for_each(|(name, value)| merge(old, name, value));
            }
        }
        (_, item) => list.push(item),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(chunks: &[Value]) -> Answer {
        let mut answer = Answer::default();
        for delta in chunks {
            let chunk = json!({"choices": [{"index": 0, "delta": delta}]});
            answer.take(&Piece::Chunk(chunk.to_string())).unwrap();
        }
        answer
    }

    #[test]
    fn text_is_put_together_and_unknown_fields_are_kept() {
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
    fn tool_calls_are_put_in_their_places() {
        let call = |i: u64, f: Value| json!({"tool_calls": [{"index": i, "function": f}]});
        let mut answer = answer(&[
            json!({"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]}),
            call(0, json!({"arguments": "{\"x\""})),
            json!({"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{"}}]}),
            call(0, json!({"arguments": ":1}"})),
        ]);
        // Broken off here, only the first call is whole.
        let calls = answer.message().unwrap().tool_calls();
        assert_eq!(calls.len(), 1);
        assert_eq!(
            (calls[0].id.as_str(), calls[0].name.as_str(), calls[0].arguments.as_str()),
            ("a", "f", "{\"x\":1}")
        );
        answer.take(&Piece::Chunk(json!({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]}, "finish_reason": "tool_calls"}]}).to_string())).unwrap();
        let message = answer.message().unwrap();
        assert_eq!(message.tool_calls()[1].arguments, "{}");
        assert_eq!(message.to_value()["content"], Value::Null);
        assert!(message.to_value()["tool_calls"][0].get("index").is_none());
    }

    #[test]
    fn a_whole_message_keeps_its_bytes() {
        let raw = r#"{"role":"assistant","content":"x","z":1.50,"a":null}"#;
        let mut answer = Answer::default();
        answer.take(&Piece::Whole(format!(r#"{{"choices":[{{"index":0,"message":{raw}}}]}}"#))).unwrap();
        assert_eq!(answer.message().unwrap().as_str(), raw);
    }

    #[test]
    fn nothing_said_is_no_message_and_an_empty_answer_is_one() {
        let mut answer = answer(&[json!({"role": "assistant", "content": ""})]);
        assert!(answer.message().is_none());
        answer.take(&Piece::Chunk(r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#.into())).unwrap();
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
        let want = json!({"total_tokens": 12, "prompt_tokens_details": details(3), "tier": "b", "cost": 1.5, "new": 7});
        assert_eq!(total, want);
    }

    #[test]
    fn errors_and_garbage_are_told() {
        let mut answer = Answer::default();
        assert!(answer.take(&Piece::Chunk("nonsense".into())).is_err());
        assert!(
            answer
                .take(&Piece::Chunk(r#"{"error":{"message":"overloaded"}}"#.into()))
                .unwrap_err()
                .contains("overloaded")
        );
        assert!(answer.take(&Piece::Whole("{}".into())).is_err());
    }
}
