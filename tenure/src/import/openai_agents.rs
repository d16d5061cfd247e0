//! Reads the SQLite database of OpenAI's Agents SDK: sessions from `agent_sessions`, and their
//! items from `agent_messages`, ordered by id.

use crate::import::imported::{ImportedSession, SkippedPart};
use crate::import::openai_responses::ResponsesReader;
use crate::types::error::{Error, Result};
use crate::types::id::SessionId;
use jiff::Timestamp;
use rusqlite::Connection;

/// Reads the sessions, oldest first.
pub(super) fn read(db: &Connection) -> rusqlite::Result<Vec<Result<ImportedSession>>> {
    let branched = db.prepare("SELECT branch_id, message_id FROM message_structure").is_ok();
    sessions(db)?.into_iter().map(|row| Ok(session(&row, items(db, &row.id, branched)?))).collect()
}

/// A row of `agent_sessions`.
struct AgentsRow {
    id: String,
    created_at: Option<Timestamp>,
    updated_at: Option<Timestamp>,
}

/// The id of an item, its text, whether it is on the main branch, and its time.
type AgentsItem = (i64, Option<String>, bool, Option<String>);

/// Parses a time of SQLite, in UTC.
fn time(text: Option<String>) -> Option<Timestamp> {
    format!("{}Z", text?.replace(' ', "T")).parse().ok()
}

fn sessions(db: &Connection) -> rusqlite::Result<Vec<AgentsRow>> {
    // Items whose session has no row in `agent_sessions` form sessions too.
    let mut rows = db.prepare(
        "SELECT session_id, created_at, updated_at FROM agent_sessions
         UNION ALL
         SELECT session_id, min(created_at), max(created_at) FROM agent_messages
         WHERE session_id NOT IN (SELECT session_id FROM agent_sessions) GROUP BY session_id
         ORDER BY 2, 1",
    )?;
    let rows = rows.query_map([], |r| {
        Ok(AgentsRow { id: r.get(0)?, created_at: time(r.get(1).ok()), updated_at: time(r.get(2).ok()) })
    })?;
    rows.collect()
}

fn items(db: &Connection, session: &str, branched: bool) -> rusqlite::Result<Vec<AgentsItem>> {
    let main = if branched {
        "NOT EXISTS (SELECT 1 FROM message_structure s WHERE s.message_id = m.id AND s.branch_id <> 'main')"
    } else {
        "1"
    };
    let sql =
        format!("SELECT id, message_data, {main}, created_at FROM agent_messages m WHERE session_id = ?1 ORDER BY id");
    let mut rows = db.prepare(&sql)?;
    let rows = rows.query_map([session], |r| Ok((r.get(0)?, r.get(1).ok(), r.get(2)?, r.get(3).ok())))?;
    rows.collect()
}

fn session(row: &AgentsRow, items: Vec<AgentsItem>) -> Result<ImportedSession> {
    let mut reader = ResponsesReader::default();
    let mut other_items = 0;
    for (id, data, main, at) in items {
        let location = format!("session {:.40}, item {id}", row.id);
        let not_text = || Error::invalid(&*location, "the item is not text");
        if main {
            reader.item_at(&data.ok_or_else(not_text)?, &location, time(at))?;
        } else {
            other_items += 1;
        }
    }
    let mut imported = reader.finish()?;
    imported.export.created_at = row.created_at;
    imported.export.updated_at = row.updated_at;
    match SessionId::new(&row.id) {
        Ok(id) => imported.export.session_id = Some(id),
        Err(e) => imported.skipped.push(SkippedPart::new("session_id", format!("{e}; a new session id is generated"))),
    }
    if other_items > 0 {
        imported
            .skipped
            .push(SkippedPart::new("message_structure", format!("{other_items} items of branches other than `main`")));
    }
    Ok(imported)
}
