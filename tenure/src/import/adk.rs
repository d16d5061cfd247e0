//! Reads the SQLite database of Google's Agent Development Kit (`DatabaseSessionService`): sessions from `sessions`,
//! and their events from `events`, ordered by time. The state of a session becomes `metadata.state`.

use crate::import::builder::{ImportedCall, ImportedPart, MessageBuilder};
use crate::import::imported::{ImportFormat, ImportedSession, SkippedPart};
use crate::session::transfer::export::Export;
use crate::types::error::{Error, Result};
use crate::types::id::SessionId;
use jiff::Timestamp;
use rusqlite::Connection;
use serde_json::{Value, json};

/// A row of `sessions`.
struct SessionRow {
    app: String,
    user: String,
    id: String,
    state: Option<String>,
    created_at: Option<String>,
}

/// The time of an event, and its content or data as JSON.
type EventRow = (Option<String>, Option<String>);

/// The column of an event's JSON: the whole event, or only its content before version 1 of the schema.
fn event_column(db: &Connection) -> Option<&'static str> {
    ["event_data", "content"].into_iter().find(|column| {
        db.prepare(&format!("SELECT app_name, user_id, session_id, timestamp, {column} FROM events")).is_ok()
    })
}

/// Returns true if a database has the tables of the kit.
pub(super) fn is_adk(db: &Connection) -> bool {
    db.prepare("SELECT app_name, user_id, id, state FROM sessions").is_ok() && event_column(db).is_some()
}

/// Reads the sessions, oldest first.
pub(super) fn read(db: &Connection) -> rusqlite::Result<Vec<Result<ImportedSession>>> {
    let column = event_column(db).unwrap_or("event_data");
    let sql = "SELECT app_name, user_id, id, state, create_time FROM sessions ORDER BY create_time, id";
    let mut statement = db.prepare(sql)?;
    let rows = statement.query_map([], |row| {
        let created_at = row.get(4).ok();
        Ok(SessionRow { app: row.get(0)?, user: row.get(1)?, id: row.get(2)?, state: row.get(3).ok(), created_at })
    })?;
    let rows = rows.collect::<rusqlite::Result<Vec<_>>>()?;
    rows.into_iter().map(|row| Ok(session(&row, events(db, &row, column)?))).collect()
}

fn events(db: &Connection, session: &SessionRow, column: &str) -> rusqlite::Result<Vec<EventRow>> {
    let sql = format!(
        "SELECT timestamp, {column} FROM events WHERE app_name = ?1 AND user_id = ?2 AND session_id = ?3
         ORDER BY timestamp, rowid"
    );
    let mut statement = db.prepare(&sql)?;
    let rows = statement
        .query_map([&session.app, &session.user, &session.id], |row| Ok((row.get(0).ok(), row.get(1).ok())))?;
    rows.collect()
}

/// Parses a time of SQLAlchemy: `2026-01-01 00:00:00.250000`, in UTC.
fn time(text: Option<&str>) -> Option<Timestamp> {
    format!("{}Z", text?.replace(' ', "T")).parse().ok()
}

/// Converts one session.
fn session(row: &SessionRow, events: Vec<EventRow>) -> Result<ImportedSession> {
    let mut export = Export { created_at: time(row.created_at.as_deref()), ..Export::default() };
    let mut skipped = Vec::new();
    match SessionId::new(&row.id) {
        Ok(id) => export.session_id = Some(id),
        Err(e) => skipped.push(SkippedPart::new("id", format!("{e}; a new session id is generated"))),
    }
    export.metadata.insert("app_name".to_owned(), json!(row.app));
    match row.state.as_deref().map(serde_json::from_str::<Value>) {
        Some(Ok(Value::Object(state))) if state.is_empty() => {}
        Some(Ok(state)) => drop(export.metadata.insert("state".to_owned(), state)),
        Some(Err(_)) => skipped.push(SkippedPart::new("state", "the state is not JSON")),
        None => {}
    }
    let mut drafts = Vec::new();
    for (i, (at, data)) in events.into_iter().enumerate() {
        let location = format!("session {:.40}, event {}", row.id, i + 1);
        let Some(data) = data else {
            skipped.push(SkippedPart::new(location, "an event without content"));
            continue;
        };
        let invalid = |_| Error::invalid(&*location, "the event is not JSON");
        let event: Value = serde_json::from_str(&data).map_err(invalid)?;
        let content = event.get("content").unwrap_or(&event);
        let at = time(at.as_deref());
        let before = drafts.len();
        convert(content, &location, at, &mut drafts, &mut skipped);
        if drafts.len() == before && content.get("parts").is_none() {
            skipped.push(SkippedPart::new(location, "an event without content"));
        }
    }
    (export.messages, export.message_times) = crate::import::builder::timed_messages(drafts)?;
    skipped.push(SkippedPart::new("user_id", format!("{:?}: the importing user owns the session", row.user)));
    Ok(ImportedSession { format: ImportFormat::Adk, export, skipped })
}

/// Converts the content of an event: a message, and a tool message for each function response.
fn convert(
    content: &Value,
    location: &str,
    time: Option<Timestamp>,
    drafts: &mut Vec<MessageBuilder>,
    skipped: &mut Vec<SkippedPart>,
) {
    let role = if content.get("role").and_then(Value::as_str) == Some("model") { "assistant" } else { "user" };
    let mut draft = MessageBuilder { time, ..MessageBuilder::new(location, role) };
    let mut results = Vec::new();
    for (i, part) in content.get("parts").and_then(Value::as_array).into_iter().flatten().enumerate() {
        let item_location = format!("{location}: parts[{i}]");
        let object = |snake: &str, camel: &str| part.get(snake).or(part.get(camel)).filter(|v| v.is_object());
        let text = |value: &Value, name: &str| value.get(name).and_then(Value::as_str).map(str::to_owned);
        // A call without an id is answered by the response of the same function.
        let call_id = |call: &Value| text(call, "id").or(text(call, "name")).unwrap_or_default();
        if part.get("thought") == Some(&Value::Bool(true)) {
            skipped.push(SkippedPart::new(item_location, "reasoning of the model"));
        } else if let Some(words) = part.get("text").and_then(Value::as_str) {
            draft.parts.push(ImportedPart::Text(words.to_owned()));
        } else if let Some(call) = object("function_call", "functionCall") {
            let arguments =
                call.get("args").filter(|a| a.is_object()).map_or_else(|| "{}".to_owned(), Value::to_string);
            let name = text(call, "name").unwrap_or_default();
            draft.calls.push(ImportedCall::function(call_id(call), &name, &arguments));
        } else if let Some(response) = object("function_response", "functionResponse") {
            let value = response.get("response").cloned().unwrap_or_default();
            let mut result = MessageBuilder { time, ..MessageBuilder::new(&*item_location, "tool") };
            result.answered_call = Some(call_id(response));
            result.parts.push(ImportedPart::Text(value.to_string()));
            results.push(result);
        } else if let Some(blob) = object("inline_data", "inlineData") {
            let kind = text(blob, "mime_type").or(text(blob, "mimeType")).unwrap_or_default();
            let url = format!("data:{kind};base64,{}", text(blob, "data").unwrap_or_default());
            if kind.starts_with("image/") {
                draft.parts.push(ImportedPart::image(&url));
            } else {
                let name = text(blob, "display_name").unwrap_or_else(|| "file".to_owned());
                let file = json!({"type": "file", "file": {"filename": name, "file_data": url}});
                draft.parts.push(ImportedPart::Json(file.to_string()));
            }
        } else {
            let names: Vec<&str> = part.as_object().into_iter().flat_map(|p| p.keys()).map(String::as_str).collect();
            skipped.push(SkippedPart::new(
                item_location,
                format!("a part that a message cannot represent: {}", names.join(", ")),
            ));
        }
    }
    if !draft.is_empty() {
        drafts.push(draft);
    }
    drafts.extend(results);
}
