//! Commits: a commit is serialized into rows on the caller's side, so that the writer only binds
//! and executes statements.

use super::messages::{self, AddedMessages, MessageRows};
use super::record_key::{MAX_RECORDS, record_key};
use super::{heads, items};
use crate::store::contract::Commit;
use crate::store::item::{Item, Owner};
use crate::store::sqlite::database::Database;
use crate::store::sqlite::fault::StoreResult;
use crate::types::blob::Blob;
use crate::types::digest::VisibleHash;
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::head::{Head, LogEnd};
use crate::types::id::{Seq, SessionId, SessionKey, Tenant, User};
use crate::types::log_hash::LogHash;
use crate::types::status::Status;
use rusqlite::{Connection, OptionalExtension, named_params, params};

/// Maximum number of sessions in one file.
const MAX_SESSIONS: u64 = (1 << 31) - 1;

/// Removes the match keys of a session from the index.
pub(super) fn remove_match_keys(conn: &Connection, tenant: &str, id: i64, match_keys_hex: &str) -> StoreResult<()> {
    let mut delete =
        conn.prepare_cached("DELETE FROM head_match WHERE tenant = ?1 AND match_key = unhex(?2) AND head_id = ?3")?;
    for key in match_keys_hex.as_bytes().chunks(32) {
        delete.execute(params![tenant, str::from_utf8(key).unwrap_or_default(), id])?;
    }
    Ok(())
}

/// A log hash as SQLite stores it: a signed integer.
fn to_signed(hash: LogHash) -> i64 {
    hash.0.cast_signed()
}

/// A commit, serialized into rows.
pub(super) struct CommitRows {
    base: Option<LogEnd>,
    tenant: Tenant,
    session: SessionId,
    user: User,
    assistant: Option<String>,
    thread: Option<String>,
    status: Status,
    created_at: i64,
    active_at: i64,
    due_at: Option<i64>,
    seq: Seq,
    log_hash: LogHash,
    visible_hash: VisibleHash,
    match_keys: Vec<VisibleHash>,
    match_keys_hex: String,
    parent: Option<(SessionId, Seq)>,
    lease_until: Option<i64>,
    title: String,
    labels: String,
    head_json: String,
    first_seq: Seq,
    records: Vec<RecordRow>,
    items: Vec<(String, Item)>,
    blobs: Vec<Blob>,
    messages: Option<MessageRows>,
}

/// A record, serialized with its checksum.
struct RecordRow {
    seq: Seq,
    at: i64,
    checksum: u32,
    entry: String,
}

impl RecordRow {
    fn new(record: &Record) -> Self {
        let entry = record.entry.encode();
        let checksum = Record::checksum(record.seq, record.at, &entry);
        Self { seq: record.seq, at: record.at.as_microsecond(), checksum, entry }
    }
}

/// Reads the columns that a commit is compared with (optimistic concurrency), and those that the
/// common update leaves unchanged.
const SELECT_STORED: &str = "
    SELECT id, seq, created_at, parent, user, assistant, thread, status, due_at, lease_until, title, labels, match_keys,
        log_hash
    FROM head WHERE tenant = ?1 AND session = ?2";

/// The common update: only messages and activity are new. Other columns are not named, because
/// SQLite writes an index if one of its columns is named after SET, whether its value has changed
/// or not.
const UPDATE_LOG_COLUMNS: &str =
    "UPDATE head SET active_at = ?2, seq = ?3, visible_hash = ?4, head_json = ?5, match_keys = ?6, log_hash = ?7
    WHERE id = ?1";

/// The update at the begin or end of a run, when the lease changes as well.
const UPDATE_LOG_AND_LEASE_COLUMNS: &str =
    "UPDATE head SET active_at = ?2, seq = ?3, visible_hash = ?4, head_json = ?5, match_keys = ?6, log_hash = ?7,
    lease_until = ?8
    WHERE id = ?1";

/// The update of all columns, when anything else has changed.
const UPDATE_ALL_COLUMNS: &str = "
    UPDATE head SET user = :user, assistant = :assistant, thread = :thread, status = :status, active_at = :active_at,
        due_at = :due_at, seq = :seq, visible_hash = :visible_hash, lease_until = :lease_until, title = :title,
        labels = :labels, head_json = :head_json, match_keys = :match_keys, log_hash = :log_hash
    WHERE id = :id";

const INSERT_HEAD: &str = "
    INSERT INTO head (tenant, session, user, assistant, thread, status, created_at, active_at, due_at, seq,
        log_hash, visible_hash, match_keys, parent, lease_until, title, labels, head_json)
    VALUES (:tenant, :session, :user, :assistant, :thread, :status, :created_at, :active_at, :due_at, :seq,
        :log_hash, :visible_hash, :match_keys, :parent, :lease_until, :title, :labels, :head_json)
    ON CONFLICT (tenant, session) DO NOTHING RETURNING id";

impl CommitRows {
    /// Validates and serializes a commit.
    pub fn new(commit: &Commit) -> Result<Self> {
        commit.check()?;
        let head = &commit.head;
        if commit.records.is_empty() && commit.base.map(|end| end.seq) != Some(head.seq) {
            return Err(Error::invalid("commit", "a commit without records must not change the head's seq"));
        }
        Ok(Self {
            base: commit.base,
            tenant: head.tenant.clone(),
            session: head.info.session_id.clone(),
            user: head.user.clone(),
            assistant: head.assistant.clone(),
            thread: head.thread.clone(),
            status: head.status,
            created_at: head.info.created_at.as_microsecond(),
            active_at: head.active_at.as_microsecond(),
            due_at: head.due_at.map(|t| t.as_microsecond()),
            seq: head.seq,
            log_hash: head.log_hash,
            visible_hash: head.digest.hash,
            match_keys_hex: head.digest.match_keys().iter().map(ToString::to_string).collect(),
            match_keys: head.digest.match_keys(),
            parent: head.parent.as_ref().map(|p| (p.session.clone(), p.seq)),
            lease_until: head.lease.as_ref().map(|l| l.until.as_microsecond()),
            title: head.folded_title(),
            labels: serde_json::Value::from(head.labels()).to_string(),
            head_json: heads::encode(head),
            first_seq: commit.first(),
            records: commit.records.iter().map(RecordRow::new).collect(),
            items: commit.items.clone(),
            blobs: commit.blobs.clone(),
            messages: commit.message_index.as_ref().map(|update| MessageRows::new(head, update)),
        })
    }

    /// Executes the commit in the current transaction. Returns the number of messages that wait to be moved
    /// within the message index.
    pub fn apply(&self, conn: &Connection, file: &Database) -> StoreResult<usize> {
        let id = match self.base {
            Some(base) => self.update_head(conn, file, base)?,
            None => self.insert_head(conn)?,
        };
        if self.seq > MAX_RECORDS {
            let subject = format!("session {} with {} records", self.session, self.seq);
            return Err(Error::TooLarge { subject, limit: "sqlite_records", max: MAX_RECORDS }.into());
        }
        let mut added = self.index_messages(conn, id)?;
        let mut insert = conn.prepare_cached(
            "INSERT INTO record (record_key, at, checksum, doc, position, entry) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        )?;
        for row in &self.records {
            let (doc, position) = added.number_of(row.seq);
            insert.execute(params![record_key(id, row.seq), row.at, row.checksum, doc, position, row.entry])?;
        }
        for blob in &self.blobs {
            self.store_blob(conn, id, blob)?;
        }
        let owner = Owner::Session(self.session.clone()).to_string();
        for (namespace, item) in &self.items {
            items::upsert(conn, &self.tenant, &owner, namespace, item)?;
        }
        Ok(added.recent)
    }

    /// Changes the message index, before the records are inserted.
    fn index_messages(&self, conn: &Connection, id: i64) -> StoreResult<AddedMessages> {
        if self.records.is_empty() {
            return Ok(AddedMessages::default());
        }
        let key = SessionKey { tenant: self.tenant.clone(), session: self.session.clone() };
        let added = match &self.messages {
            Some(messages) => messages.apply(conn, id, &key)?,
            None => None,
        };
        match added {
            Some(added) => Ok(added),
            None => messages::mark_unindexed(conn, &key).map(|()| AddedMessages::default()),
        }
    }

    /// Updates the head, if the stored log ends at `base` ([`Error::Conflict`] otherwise). Returns
    /// its id.
    fn update_head(&self, conn: &Connection, file: &Database, base: LogEnd) -> StoreResult<i64> {
        let mut statement = conn.prepare_cached(SELECT_STORED)?;
        let mut rows = statement.query([self.tenant.as_str(), self.session.as_str()])?;
        let Some(row) = rows.next()? else {
            return Err(Error::NotFound { session_id: self.session.clone() }.into());
        };
        let id = row.get(0)?;
        let stored: (i64, i64, i64) = (row.get(1)?, row.get(13)?, row.get(2)?);
        if stored != (base.seq as i64, to_signed(base.hash), self.created_at) {
            return Err(Error::Conflict { session_id: self.session.clone(), expected: base.seq }.into());
        }
        let text_equals = |column, want: Option<&str>| -> rusqlite::Result<bool> {
            Ok(row.get_ref(column)?.as_str_or_null()? == want)
        };
        let is_moved = !text_equals(3, self.parent())?;
        let is_unchanged = text_equals(4, Some(self.user.as_str()))?
            && text_equals(5, self.assistant.as_deref())?
            && text_equals(6, self.thread.as_deref())?
            && text_equals(7, Some(self.status.as_str()))?
            && row.get::<_, Option<i64>>(8)? == self.due_at
            && text_equals(10, Some(&self.title))?
            && text_equals(11, Some(&self.labels))?;
        let is_lease_unchanged = row.get::<_, Option<i64>>(9)? == self.lease_until;
        let stored_match_keys =
            if text_equals(12, Some(&self.match_keys_hex))? { None } else { Some(row.get::<_, String>(12)?) };
        drop(rows);
        if let Some(stored_match_keys) = stored_match_keys {
            self.replace_match_keys(conn, id, &stored_match_keys)?;
        }
        if !is_unchanged || is_moved {
            return self.update_all_columns(conn, file, id, is_moved);
        }
        let seq = self.seq as i64;
        let visible_hash = self.visible_hash.0;
        let log_hash = to_signed(self.log_hash);
        if is_lease_unchanged {
            let row = params![id, self.active_at, seq, visible_hash, self.head_json, self.match_keys_hex, log_hash];
            conn.prepare_cached(UPDATE_LOG_COLUMNS)?.execute(row)?;
        } else {
            let row = params![
                id,
                self.active_at,
                seq,
                visible_hash,
                self.head_json,
                self.match_keys_hex,
                log_hash,
                self.lease_until
            ];
            conn.prepare_cached(UPDATE_LOG_AND_LEASE_COLUMNS)?.execute(row)?;
        }
        Ok(id)
    }

    /// Replaces the match keys of the session in the index.
    fn replace_match_keys(&self, conn: &Connection, id: i64, stored: &str) -> StoreResult<()> {
        remove_match_keys(conn, self.tenant.as_str(), id, stored)?;
        let mut insert = conn.prepare_cached(
            "INSERT INTO head_match (tenant, match_key, head_id) VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING",
        )?;
        for key in &self.match_keys {
            insert.execute(params![self.tenant.as_str(), key.0, id])?;
        }
        Ok(())
    }

    /// Updates all columns of the head. With `is_moved`, keeps the stored `first` and `parent`.
    fn update_all_columns(&self, conn: &Connection, file: &Database, id: i64, is_moved: bool) -> StoreResult<i64> {
        // The store decides which records are the session's own: a purge may have moved them since
        // the writer read the head.
        let merged_json = if is_moved {
            let stored_json: String = conn.query_row("SELECT head_json FROM head WHERE id = ?1", [id], |r| r.get(0))?;
            let stored = heads::decode(file, &self.tenant, &self.session, &stored_json)?;
            let head: Head = heads::decode(file, &self.tenant, &self.session, &self.head_json)?;
            Some(heads::encode(&Head { first: stored.first, parent: stored.parent, ..head }))
        } else {
            None
        };
        conn.prepare_cached(UPDATE_ALL_COLUMNS)?.execute(named_params! {
            ":id": id, ":user": self.user.as_str(), ":assistant": self.assistant, ":thread": self.thread,
            ":status": self.status.as_str(), ":active_at": self.active_at, ":due_at": self.due_at,
            ":seq": self.seq as i64, ":visible_hash": self.visible_hash.0, ":lease_until": self.lease_until,
            ":title": self.title, ":labels": self.labels, ":head_json": merged_json.as_ref().unwrap_or(&self.head_json),
            ":match_keys": self.match_keys_hex, ":log_hash": to_signed(self.log_hash),
        })?;
        Ok(id)
    }

    /// Inserts a head, if the session does not exist ([`Error::Exists`] otherwise). Returns its id.
    fn insert_head(&self, conn: &Connection) -> StoreResult<i64> {
        if let Some((parent, fork_point)) = &self.parent {
            self.check_parent(conn, parent, *fork_point)?;
        }
        let id = conn.prepare_cached(INSERT_HEAD)?.query_row(
            named_params! {
                ":tenant": self.tenant.as_str(), ":session": self.session.as_str(), ":user": self.user.as_str(),
                ":assistant": self.assistant, ":thread": self.thread, ":status": self.status.as_str(),
                ":created_at": self.created_at, ":active_at": self.active_at, ":due_at": self.due_at,
                ":seq": self.seq as i64, ":log_hash": to_signed(self.log_hash), ":visible_hash": self.visible_hash.0,
                ":match_keys": self.match_keys_hex, ":parent": self.parent(), ":lease_until": self.lease_until,
                ":title": self.title, ":labels": self.labels, ":head_json": self.head_json,
            },
            |r| r.get(0),
        );
        match id.optional()? {
            Some(id) if id as u64 > MAX_SESSIONS => {
                let subject = "the number of sessions in this file".to_owned();
                Err(Error::TooLarge { subject, limit: "sqlite_sessions", max: MAX_SESSIONS }.into())
            }
            Some(id) => {
                if !self.match_keys.is_empty() {
                    self.replace_match_keys(conn, id, "")?;
                }
                Ok(id)
            }
            None => Err(self.exists_error()),
        }
    }

    /// Checks that the session does not exist, and that the parent's log reaches the fork point.
    fn check_parent(&self, conn: &Connection, parent: &SessionId, fork_point: Seq) -> StoreResult<()> {
        if heads::seq(conn, &self.tenant, &self.session)?.is_some() {
            return Err(self.exists_error());
        }
        match heads::seq(conn, &self.tenant, parent)? {
            Some(seq) if seq >= fork_point => Ok(()),
            _ => Err(Error::NotFound { session_id: parent.clone() }.into()),
        }
    }

    fn exists_error(&self) -> crate::store::sqlite::fault::StoreFault {
        Error::Exists { session_id: self.session.clone() }.into()
    }

    /// Stores a blob unless the tenant has it, and adds the session's reference.
    fn store_blob(&self, conn: &Connection, id: i64, blob: &Blob) -> StoreResult<()> {
        conn.prepare_cached("INSERT INTO blob (tenant, id, bytes) VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING")?
            .execute(params![self.tenant.as_str(), blob.id.0, &*blob.bytes])?;
        conn.prepare_cached(
            "INSERT INTO blob_ref (head_id, first_seq, tenant, blob_id) VALUES (?1, ?2, ?3, ?4) ON CONFLICT DO NOTHING",
        )?
        .execute(params![id, self.first_seq as i64, self.tenant.as_str(), blob.id.0])?;
        Ok(())
    }

    fn parent(&self) -> Option<&str> {
        self.parent.as_ref().map(|(session, _)| session.as_str())
    }
}
