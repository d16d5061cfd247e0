//! Reads the SQLite database of LangGraph's checkpointer (`langgraph-checkpoint-sqlite`): each row of `checkpoints` is the
//! whole state of a thread, as MessagePack.

use crate::import::imported::ImportedSession;
use crate::import::langgraph::{self, MESSAGES, NewestState, ThreadBuilder};
use crate::types::error::Result;
use rusqlite::Connection;
use serde_json::{Map, Value};

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
    let mut thread = ThreadBuilder::new(id);
    let mut newest = NewestState::default();
    for (kind, bytes) in checkpoints {
        let state = decode(kind.as_deref(), bytes.as_deref());
        let time = state.as_ref().ok().and_then(|state| state.get("ts")?.as_str());
        let time = thread.add_checkpoint(time);
        let mut state = state.map_err(|reason| thread.invalid_checkpoint(reason))?;
        let Some(Value::Object(mut values)) = state.remove("channel_values") else {
            newest = NewestState::default();
            continue;
        };
        let channels = values.keys().cloned().collect();
        let messages = match values.remove(MESSAGES) {
            Some(Value::Array(messages)) => messages,
            _ => Vec::new(),
        };
        thread.record_times(&messages, time);
        newest = NewestState { messages, channels, ..NewestState::default() };
    }
    thread.finish(NewestState { subgraphs: subgraphs.into(), ..newest })
}

/// Decodes a checkpoint.
fn decode(kind: Option<&str>, bytes: Option<&[u8]>) -> Result<Map<String, Value>, String> {
    match langgraph::decode(kind, bytes.ok_or("the checkpoint has no value")?)? {
        Value::Object(map) => Ok(map),
        _ => Err("the checkpoint is not a map".to_owned()),
    }
}
