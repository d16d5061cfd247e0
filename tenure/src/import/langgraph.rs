//! Converts the threads of LangGraph's checkpointers: the newest checkpoint of a thread contains its messages. A message
//! has the time of the checkpoint in which it first occurs.

use crate::import::builder::{ImportedCall, ImportedPart, MessageBuilder};
use crate::import::imported::{ImportFormat, ImportedSession, SkippedPart};
use crate::import::msgpack;
use crate::session::transfer::export::Export;
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use crate::types::id::SessionId;
use jiff::Timestamp;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// The channel with the messages, as `MessagesState` names it.
pub(super) const MESSAGES: &str = "messages";

/// What the newest state of a thread consists of.
#[derive(Debug, Default)]
pub(super) struct NewestState {
    /// The values of the channel with the messages.
    pub messages: Vec<Value>,
    /// The names of all channels that have a value.
    pub channels: Vec<String>,
    /// The number of subgraphs, whose checkpoints are separate.
    pub subgraphs: u64,
    /// The number of writes that are in no checkpoint yet.
    pub pending_writes: u64,
}

/// Collects the checkpoints of one thread, oldest first.
pub(super) struct ThreadBuilder {
    id: String,
    location: String,
    checkpoints: usize,
    created_at: Option<Timestamp>,
    first_times: HashMap<String, Timestamp>,
}

impl ThreadBuilder {
    pub fn new(id: &str) -> Self {
        let location = format!("thread {id:.40}");
        Self { id: id.to_owned(), location, checkpoints: 0, created_at: None, first_times: HashMap::new() }
    }

    /// Adds a checkpoint with its time, which is ignored if it is not valid.
    pub fn add_checkpoint(&mut self, time: Option<&str>) -> Option<Timestamp> {
        self.checkpoints += 1;
        let time = time.and_then(|time| time.parse().ok());
        self.created_at = self.created_at.or(time);
        time
    }

    /// Records the time of the messages that first occur in a checkpoint.
    pub fn record_times(&mut self, messages: &[Value], time: Option<Timestamp>) {
        let Some(time) = time else { return };
        let ids = messages.iter().filter_map(message_fields).filter_map(|m| m.get("id")?.as_str());
        for id in ids {
            if !self.first_times.contains_key(id) {
                self.first_times.insert(id.to_owned(), time);
            }
        }
    }

    /// An error that names the thread and the checkpoint that was added last.
    pub fn invalid_checkpoint(&self, reason: impl Into<String>) -> Error {
        Error::invalid(format!("{}, checkpoint {}", self.location, self.checkpoints), reason)
    }

    /// Converts the thread.
    pub fn finish(self, newest: NewestState) -> Result<ImportedSession> {
        let Self { id, location, checkpoints, created_at, first_times } = self;
        let mut export = Export { created_at, ..Export::default() };
        let mut skipped = Vec::new();
        match SessionId::new(id) {
            Ok(id) => export.session_id = Some(id),
            Err(e) => skipped.push(SkippedPart::new("thread_id", format!("{e}; a new session id is generated"))),
        }
        let mut drafts = Vec::new();
        for (i, value) in newest.messages.iter().enumerate() {
            let item_location = format!("{location}, messages[{i}]");
            let Some(fields) = message_fields(value) else {
                skipped.push(SkippedPart::new(item_location, "not a message of LangChain"));
                continue;
            };
            let time = fields.get("id").and_then(Value::as_str).and_then(|id| first_times.get(id)).copied();
            drafts.extend(message(fields, &item_location, time, &mut skipped));
        }
        (export.messages, export.message_times) = crate::import::builder::timed_messages(drafts)?;
        let is_other = |name: &&String| *name != MESSAGES && !name.starts_with("branch:");
        let channels: Vec<String> = newest.channels.iter().filter(is_other).map(excerpt).collect();
        let mut skip = |reason: String| skipped.push(SkippedPart::new(&*location, reason));
        if !channels.is_empty() {
            skip(format!("channels other than `messages`: {}", channels.join(", ")));
        }
        if checkpoints > 1 {
            skip(format!("{} earlier checkpoints; the messages are those of the newest one", checkpoints - 1));
        }
        if newest.subgraphs > 0 {
            skip(format!("the checkpoints of {} subgraphs", newest.subgraphs));
        }
        if newest.pending_writes > 0 {
            skip(format!("{} writes of a step that is not complete", newest.pending_writes));
        }
        Ok(ImportedSession { format: ImportFormat::LangGraph, export, skipped })
    }
}

/// Decodes a value of a checkpointer. `kind` is the type of its encoding.
pub(super) fn decode(kind: Option<&str>, bytes: &[u8]) -> Result<Value, String> {
    match kind {
        Some("msgpack") | None => msgpack::decode(bytes).map_err(str::to_owned),
        Some("json") => serde_json::from_slice(bytes).map_err(|e| format!("not valid JSON: {e}")),
        Some("empty" | "null") => Ok(Value::Null),
        Some(other) => Err(format!("the encoding {} is not supported", excerpt(other))),
    }
}

/// The fields of a message: of an extension value `[module, class, fields, method]`, or of a constructor in JSON.
fn message_fields(value: &Value) -> Option<&Map<String, Value>> {
    let constructed = value.get(msgpack::EXTENSION).and_then(|_| value.get("data")?.get(2));
    let fields = constructed.or_else(|| value.get("kwargs")).unwrap_or(value).as_object()?;
    fields.contains_key("content").then_some(fields)
}

/// Converts one message. `None` if it has nothing that a session can represent.
fn message(
    fields: &Map<String, Value>,
    location: &str,
    time: Option<Timestamp>,
    skipped: &mut Vec<SkippedPart>,
) -> Option<MessageBuilder> {
    let text = |name: &str| fields.get(name).and_then(Value::as_str);
    let role = match text("type").unwrap_or_default().trim_end_matches("MessageChunk") {
        "human" | "Human" => "user",
        "ai" | "AI" => "assistant",
        "system" | "System" => "system",
        "tool" | "Tool" => "tool",
        other => {
            skipped.push(SkippedPart::new(location, format!("a message of the type {}", excerpt(other))));
            return None;
        }
    };
    let mut draft = MessageBuilder { time, ..MessageBuilder::new(location, role) };
    match fields.get("content") {
        Some(Value::String(text)) if text.is_empty() => {}
        Some(Value::String(text)) => draft.parts.push(ImportedPart::Text(text.clone())),
        Some(Value::Array(parts)) => {
            for (i, part) in parts.iter().enumerate() {
                let kind = part.get("type").and_then(Value::as_str).unwrap_or("text");
                let text = part.as_str().or(part.get("text").and_then(Value::as_str));
                match (kind, text) {
                    ("text", Some(text)) => draft.parts.push(ImportedPart::Text(text.to_owned())),
                    ("image_url" | "input_audio" | "file", _) => draft.parts.push(ImportedPart::Json(part.to_string())),
                    // The calls are in `tool_calls`, too.
                    ("tool_use" | "function_call", _) => {}
                    (other, _) => {
                        let reason = format!("a content part of the type {}", excerpt(other));
                        skipped.push(SkippedPart::new(format!("{location}.content[{i}]"), reason));
                    }
                }
            }
        }
        _ => {}
    }
    for call in fields.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
        let name = call.get("name").and_then(Value::as_str).unwrap_or_default();
        let id = call.get("id").and_then(Value::as_str).unwrap_or_default();
        let arguments = call.get("args").map_or_else(|| "{}".to_owned(), Value::to_string);
        draft.calls.push(ImportedCall::function(id.to_owned(), name, &arguments));
    }
    if role == "tool" {
        draft.answered_call = Some(text("tool_call_id").unwrap_or_default().to_owned());
    }
    Some(draft)
}
