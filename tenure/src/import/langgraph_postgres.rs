//! Reads the PostgreSQL database of LangGraph's checkpointer (`langgraph-checkpoint-postgres`). A row of `checkpoints` has
//! the versions of the channels, and `checkpoint_blobs` the value of each version.
//!
//! Invariant: everything is read in one transaction, which can only read, and one thread at a time. Of its checkpoints
//! and of the list of threads, only a page is in memory.

use crate::import::imported::ImportedSession;
use crate::import::langgraph::{NewestState, ThreadBuilder, decode};
use crate::store::postgres::foreign::ForeignDatabase;
use crate::types::error::{Error, Result};
use serde_json::Value;
use std::collections::VecDeque;
use std::fmt;
use tokio_postgres::Row;
use tokio_postgres::types::FromSql;

/// The number of checkpoints, with the values of their messages, that one statement returns.
const CHECKPOINT_PAGE: usize = 20;

/// The columns that the statements below need, and that `ShallowPostgresSaver` does not have.
const COLUMNS: &str = "SELECT count(*) FROM pg_attribute WHERE NOT attisdropped AND (
    attrelid = to_regclass('checkpoints')
        AND attname IN ('thread_id', 'checkpoint_ns', 'checkpoint_id', 'checkpoint')
    OR attrelid = to_regclass('checkpoint_blobs')
        AND attname IN ('thread_id', 'checkpoint_ns', 'channel', 'version', 'type', 'blob')
    OR attrelid = to_regclass('checkpoint_writes')
        AND attname IN ('thread_id', 'checkpoint_ns', 'checkpoint_id'))";
const COLUMN_COUNT: u64 = 13;

const COUNT_THREADS: &str = "SELECT count(DISTINCT thread_id) FROM checkpoints WHERE checkpoint_ns = ''";

const DECLARE_THREADS: &str = "DECLARE langgraph_threads NO SCROLL CURSOR FOR
    SELECT thread_id FROM checkpoints WHERE checkpoint_ns = ''
    GROUP BY thread_id ORDER BY min(checkpoint_id), thread_id";

const FETCH_THREADS: &str = "FETCH 100 FROM langgraph_threads";

/// A page of checkpoints after one of them, without the size of the page, oldest first: their ids are ordered by time. Plain values are part of the
/// checkpoint, and have no blob.
const CHECKPOINTS: &str = "SELECT c.checkpoint_id, c.checkpoint ->> 'ts',
        c.checkpoint -> 'channel_versions' ->> 'messages', c.checkpoint -> 'channel_values' ? 'messages', b.type, b.blob
    FROM checkpoints c LEFT JOIN checkpoint_blobs b
        ON b.thread_id = c.thread_id AND b.checkpoint_ns = c.checkpoint_ns AND b.channel = 'messages'
        AND b.version = c.checkpoint -> 'channel_versions' ->> 'messages'
    WHERE c.thread_id = $1 AND c.checkpoint_ns = '' AND c.checkpoint_id > $2
    ORDER BY c.checkpoint_id LIMIT ";

/// The names of the channels that have a value in a checkpoint. A map that is not an object counts as empty: an error
/// would end the transaction.
const CHANNELS: &str = "WITH newest AS (
        SELECT thread_id, checkpoint_ns,
            CASE jsonb_typeof(checkpoint -> 'channel_values') WHEN 'object' THEN checkpoint -> 'channel_values' END AS plain,
            CASE jsonb_typeof(checkpoint -> 'channel_versions') WHEN 'object' THEN checkpoint -> 'channel_versions' END
                AS versions
        FROM checkpoints WHERE thread_id = $1 AND checkpoint_ns = '' AND checkpoint_id = $2)
    SELECT jsonb_object_keys(plain) FROM newest
    UNION SELECT v.key FROM newest n CROSS JOIN LATERAL jsonb_each_text(n.versions) v
    JOIN checkpoint_blobs b ON b.thread_id = n.thread_id AND b.checkpoint_ns = n.checkpoint_ns
        AND b.channel = v.key AND b.version = v.value AND b.type <> 'empty'
    ORDER BY 1";

const COUNT_SUBGRAPHS: &str =
    "SELECT count(DISTINCT checkpoint_ns) FROM checkpoints WHERE thread_id = $1 AND checkpoint_ns <> ''";

const COUNT_WRITES: &str =
    "SELECT count(*) FROM checkpoint_writes WHERE thread_id = $1 AND checkpoint_ns = '' AND checkpoint_id = $2";

/// Opens a checkpoint database of LangGraph (`PostgresSaver`). The URL is that of a store: the schema is `?schema=NAME`,
/// or that of the search path. The database is only read, and may be a standby. It must be called in a runtime of Tokio.
pub async fn read_postgres(url: &str) -> Result<PostgresImport> {
    let database = ForeignDatabase::open(url).await?;
    let location = database.location();
    if count(&database, COLUMNS, &[]).await? != COLUMN_COUNT {
        return Err(Error::invalid(
            "",
            format!(
                "{location} is not a checkpoint database of LangGraph (tables checkpoints, checkpoint_blobs and \
                 checkpoint_writes of PostgresSaver)"
            ),
        ));
    }
    let total = count(&database, COUNT_THREADS, &[]).await?;
    database.rows(DECLARE_THREADS, &[]).await?;
    Ok(PostgresImport { database, total, threads: VecDeque::new(), is_complete: false })
}

/// The threads of a checkpoint database of LangGraph, which are read one by one.
pub struct PostgresImport {
    database: ForeignDatabase,
    total: u64,
    /// The threads that were listed, but not read yet.
    threads: VecDeque<String>,
    /// Whether all threads were read, which ends the transaction.
    is_complete: bool,
}

impl fmt::Debug for PostgresImport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PostgresImport({}, {} threads)", self.database.location(), self.total)
    }
}

impl PostgresImport {
    /// The number of threads.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Reads the next thread, in the order of their first checkpoints. `None` means that there are no more.
    ///
    /// The outer error means that the database cannot be read any further. The inner one is that of a thread that cannot
    /// be converted, and does not affect the others.
    pub async fn next_session(&mut self) -> Result<Option<Result<ImportedSession>>> {
        if self.threads.is_empty() && !self.is_complete {
            let rows = self.database.rows(FETCH_THREADS, &[]).await?;
            self.threads = rows.iter().map(|row| column(row, 0)).collect::<Result<_>>()?;
            if rows.is_empty() {
                self.database.rows("COMMIT", &[]).await?;
                self.is_complete = true;
            }
        }
        let Some(id) = self.threads.pop_front() else { return Ok(None) };
        self.thread(&id).await.map(Some)
    }

    async fn thread(&self, id: &str) -> Result<Result<ImportedSession>> {
        let mut thread = ThreadBuilder::new(id);
        let mut messages = Ok(Vec::new());
        let mut version: Option<String> = None;
        let mut last = String::new();
        let sql = format!("{CHECKPOINTS}{CHECKPOINT_PAGE}");
        loop {
            let page = self.database.rows(&sql, &[id, &last]).await?;
            for row in &page {
                last = column(row, 0)?;
                let time = thread.add_checkpoint(column(row, 1)?);
                let current: Option<String> = column(row, 2)?;
                if current == version {
                    continue;
                }
                messages = messages_of(row)?.map_err(|reason| thread.invalid_checkpoint(reason));
                if let Ok(messages) = &messages {
                    thread.record_times(messages, time);
                }
                version = current;
            }
            if page.len() < CHECKPOINT_PAGE {
                break;
            }
        }
        // An earlier value that cannot be decoded only lacks its times.
        let messages = match messages {
            Ok(messages) => messages,
            Err(e) => return Ok(Err(e)),
        };
        let channels = self.database.rows(CHANNELS, &[id, &last]).await?;
        let newest = NewestState {
            messages,
            channels: channels.iter().map(|row| column(row, 0)).collect::<Result<_>>()?,
            subgraphs: count(&self.database, COUNT_SUBGRAPHS, &[id]).await?,
            pending_writes: count(&self.database, COUNT_WRITES, &[id, &last]).await?,
        };
        Ok(thread.finish(newest))
    }
}

/// The messages of a row of `CHECKPOINTS`. The inner error is the reason why they cannot be read.
fn messages_of(row: &Row) -> Result<Result<Vec<Value>, String>> {
    let has_version = column::<Option<String>>(row, 2)?.is_some();
    let is_plain: Option<bool> = column(row, 3)?;
    let kind: Option<&str> = column(row, 4)?;
    let bytes: Option<&[u8]> = column(row, 5)?;
    Ok(match (kind, decode(kind, bytes.unwrap_or_default())) {
        (Some(_), Ok(Value::Array(messages))) => Ok(messages),
        (Some(_), Ok(Value::Null)) => Ok(Vec::new()),
        (Some(_), Ok(_)) => Err("the value of `messages` is not a list".to_owned()),
        (Some(_), Err(reason)) => Err(reason),
        (None, _) if has_version && is_plain != Some(true) => {
            Err("`messages` has no value: the differences that a DeltaChannel stores are not supported".to_owned())
        }
        (None, _) => Ok(Vec::new()),
    })
}

async fn count(database: &ForeignDatabase, sql: &str, params: &[&str]) -> Result<u64> {
    let rows = database.rows(sql, params).await?;
    let count: i64 = rows.first().map_or(Ok(0), |row| column(row, 0))?;
    Ok(u64::try_from(count).unwrap_or_default())
}

/// Reads a column, whose type another program has chosen.
fn column<'a, T: FromSql<'a>>(row: &'a Row, index: usize) -> Result<T> {
    row.try_get(index).map_err(|e| Error::invalid("", format!("a table of LangGraph has an unknown form: {e}")))
}
