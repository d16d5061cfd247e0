//! Opens the SQLite database of another program, and detects which one wrote it by its tables.

use crate::import::imported::ImportedSession;
use crate::import::{adk, langgraph_sqlite, openai_agents};
use crate::types::error::{Error, Result};
use rusqlite::{Connection, OpenFlags};
use std::path::Path;

/// Reads the sessions in a SQLite database of OpenAI's Agents SDK (`SQLiteSession`), of LangGraph (`SqliteSaver`) or of
/// Google's Agent Development Kit (`DatabaseSessionService`). The file is opened read-only; the call blocks during the
/// read. As with [`read`](super::read), an invalid session does not affect the others.
pub fn read_database(path: impl AsRef<Path>) -> Result<Vec<Result<ImportedSession>>> {
    let path = path.as_ref();
    let to_error = |e: rusqlite::Error| match e.sqlite_error_code() {
        None | Some(rusqlite::ErrorCode::NotADatabase | rusqlite::ErrorCode::Unknown) => Error::invalid(
            "",
            format!(
                "{} is not a database of the Agents SDK (tables agent_sessions, agent_messages), of LangGraph (table \
                 checkpoints) or of Google's ADK (tables sessions, events): {e}",
                path.display()
            ),
        ),
        _ => Error::unavailable(format!("{}: {e}", path.display())).with_source(e),
    };
    let db = open(path).map_err(to_error)?;
    let sessions = if langgraph_sqlite::is_langgraph(&db) {
        langgraph_sqlite::read(&db)
    } else if adk::is_adk(&db) {
        adk::read(&db)
    } else {
        openai_agents::read(&db)
    };
    sessions.map_err(to_error)
}

/// Opens the database read-only. Without a write-ahead log the file is complete, and is opened as
/// immutable, which also works in a read-only directory.
fn open(path: &Path) -> rusqlite::Result<Connection> {
    let mut wal = path.as_os_str().to_owned();
    wal.push("-wal");
    let has_no_wal = std::fs::metadata(&wal).map_or(true, |m| m.len() == 0);
    let name = path.to_string_lossy().replace('%', "%25").replace('?', "%3f").replace('#', "%23");
    let uri = format!("file:{name}?mode=ro{}", if has_no_wal { "&immutable=1" } else { "" });
    Connection::open_with_flags(uri, OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI)
}
