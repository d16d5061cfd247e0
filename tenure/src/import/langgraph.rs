//! Reads the SQLite database of LangGraph's checkpointer (`langgraph-checkpoint-sqlite`): the newest checkpoint of each
//! thread contains its messages, as MessagePack. A message has the time of the checkpoint in which it first occurs.

use crate::import::builder::{ImportedCall, ImportedPart, MessageBuilder};
use crate::import::imported::{ImportFormat, ImportedSession, SkippedPart};
use crate::import::msgpack;
use crate::session::transfer::export::Export;
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use crate::types::id::SessionId;
use jiff::Timestamp;
use rusqlite::Connection;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// The channel with the messages, as `MessagesState` names it.
const MESSAGES: &str = "messages";

/// A checkpoint: the type of its encoding, and its bytes.
type CheckpointRow = (Option<String>, Option<Vec<u8>>);

/// Returns true if a database has the tables of LangGraph.
pub(super) fn is_langgraph(db: &Connection) -> bool {
    db.prepare("SELECT thread_id, checkpoint_ns, checkpoint_id, type, checkpoint FROM checkpoints").is_ok()
}

/// Reads the threads, in the order of their first checkpoints.
pub(super) fn read(db: &Connection) -> rusqlite::Result<Vec<Result<ImportedSession>>> {
    let sql =
        "SELECT thread_id FROM checkpoints WHERE checkpoint_ns = '' GROUP BY thread_id ORDER BY min(checkpoint_id)";
    let threads = db.prepare(sql)?.query_map([], |row| row.get(0))?.collect::<rusqlite::Result<Vec<String>>>()?;
    threads.into_iter().map(|id| Ok(thread(&id, checkpoints(db, &id)?, subgraphs(db, &id)?))).collect()
}

/// The checkpoints of a thread, oldest first: their ids are ordered by time.
fn checkpoints(db: &Connection, thread: &str) -> rusqlite::Result<Vec<CheckpointRow>> {
    let sql =
        "SELECT type, checkpoint FROM checkpoints WHERE thread_id = ?1 AND checkpoint_ns = '' ORDER BY checkpoint_id";
    db.prepare(sql)?.query_map([thread], |row| Ok((row.get(0).ok(), row.get(1).ok())))?.collect()
}

fn subgraphs(db: &Connection, thread: &str) -> rusqlite::Result<u32> {
    let sql = "SELECT count(DISTINCT checkpoint_ns) FROM checkpoints WHERE thread_id = ?1 AND checkpoint_ns <> ''";
    db.query_row(sql, [thread], |row| row.get(0))
}

/// Converts one thread.
fn thread(id: &str, checkpoints: Vec<CheckpointRow>, subgraphs: u32) -> Result<ImportedSession> {
    let location = format!("thread {:.40}", id);
    let count = checkpoints.len();
    let mut first_times: HashMap<String, Timestamp> = HashMap::new();
    let mut created_at = None;
    let mut newest = Map::new();
    for (i, (kind, bytes)) in checkpoints.into_iter().enumerate() {
        let item_location = format!("{location}, checkpoint {}", i + 1);
        let state =
            decode(kind.as_deref(), bytes.as_deref()).map_err(|reason| Error::invalid(&*item_location, reason))?;
        let time = state.get("ts").and_then(Value::as_str).and_then(|ts| ts.parse::<Timestamp>().ok());
        created_at = created_at.or(time);
        if let Some(time) = time {
            let messages = messages_of(&state).into_iter().filter_map(message_fields);
            for key in messages.filter_map(|m| Some(m.get("id")?.as_str()?.to_owned())) {
                first_times.entry(key).or_insert(time);
            }
        }
        newest = state;
    }
    let mut export = Export { created_at, ..Export::default() };
    let mut skipped = Vec::new();
    match SessionId::new(id) {
        Ok(id) => export.session_id = Some(id),
        Err(e) => skipped.push(SkippedPart::new("thread_id", format!("{e}; a new session id is generated"))),
    }
    let mut drafts = Vec::new();
    for (i, value) in messages_of(&newest).into_iter().enumerate() {
        let item_location = format!("{location}, messages[{i}]");
        let Some(fields) = message_fields(value) else {
            skipped.push(SkippedPart::new(item_location, "not a message of LangChain"));
            continue;
        };
        let time = fields.get("id").and_then(Value::as_str).and_then(|id| first_times.get(id)).copied();
        drafts.extend(message(fields, &item_location, time, &mut skipped));
    }
    (export.messages, export.message_times) = crate::import::builder::timed_messages(drafts)?;
    let channels: Vec<String> = channel_values(&newest)
        .map(|values| values.keys().filter(|k| *k != MESSAGES && !k.starts_with("branch:")).map(excerpt).collect())
        .unwrap_or_default();
    if !channels.is_empty() {
        let reason = format!("channels other than `messages`: {}", channels.join(", "));
        skipped.push(SkippedPart::new(&*location, reason));
    }
    if count > 1 {
        let reason = format!("{} earlier checkpoints; the messages are those of the newest one", count - 1);
        skipped.push(SkippedPart::new(&*location, reason));
    }
    if subgraphs > 0 {
        skipped.push(SkippedPart::new(&*location, format!("the checkpoints of {subgraphs} subgraphs")));
    }
    Ok(ImportedSession { format: ImportFormat::LangGraph, export, skipped })
}

/// Decodes a checkpoint.
fn decode(kind: Option<&str>, bytes: Option<&[u8]>) -> Result<Map<String, Value>, String> {
    let bytes = bytes.ok_or("the checkpoint has no value")?;
    let value = match kind {
        Some("msgpack") | None => msgpack::decode(bytes).map_err(str::to_owned)?,
        Some("json") => serde_json::from_slice(bytes).map_err(|e| format!("not valid JSON: {e}"))?,
        Some(other) => return Err(format!("the encoding {} is not supported", excerpt(other))),
    };
    match value {
        Value::Object(map) => Ok(map),
        _ => Err("the checkpoint is not a map".to_owned()),
    }
}

fn channel_values(state: &Map<String, Value>) -> Option<&Map<String, Value>> {
    state.get("channel_values")?.as_object()
}

fn messages_of(state: &Map<String, Value>) -> Vec<&Value> {
    let messages = channel_values(state).and_then(|values| values.get(MESSAGES)?.as_array());
    messages.into_iter().flatten().collect()
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
