//! Commits: one statement and one round trip for each.
//!
//! Invariant: the head, records, items and blobs of a commit are written by a single statement,
//! hence atomically.

use super::heads::conversation_key;
use super::items::{ITEM_COLUMNS, ITEM_REPLACE, check_item_key, check_no_nul, words};
use crate::store::contract::Commit;
use crate::store::item::{Item, Owner};
use crate::store::postgres::connection::{Param, PgConnection};
use crate::store::postgres::failure::FailureKind;
use crate::store::postgres::messages::WordColumns;
use crate::store::postgres::row::{count_to_i64, micros};
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::log_hash::LogHash;
use std::collections::BTreeMap;
use tokio_postgres::types::Type;

/// The SQL of the commit statements, composed once. All bind the same parameters
/// ([`BoundCommit::params`]).
pub(super) struct Statements {
    append: String,
    create: String,
    append_with_data: String,
    create_with_data: String,
    rewind: String,
    rewind_with_data: String,
}

// Compare-and-set on log end, log hash and creation time: no row is returned if one of them
// differs.
const UPDATE_HEAD: &str = r#"WITH head AS (
    UPDATE tenure_head SET "user" = $3, assistant = $4, thread = $5, status = $6, active_at = $8,
        due_at = $9, seq = $10, visible_hash = $11, lease_until = $12, title = $13, labels = $14, head_json = $15,
        conversation_key = $25, match_keys = $26, log_hash = $27
    WHERE tenant = $1 AND session = $2 AND seq = $16 AND log_hash = $28 AND created_at = $7
    RETURNING 1
)"#;

// The row lock on the parent delays a concurrent purge of it until the new fork is visible.
const INSERT_HEAD: &str = r#"WITH parent AS (
    SELECT 1 FROM tenure_head WHERE tenant = $1 AND session = $18 AND seq >= $19 FOR KEY SHARE
), head AS (
    INSERT INTO tenure_head (tenant, session, "user", assistant, thread, status, created_at, active_at, due_at, seq,
        visible_hash, lease_until, title, labels, head_json, first_seq, parent, parent_seq, parent_digest,
        conversation_key, match_keys, log_hash)
    SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $17, $18, $19, $20, $25, $26, $27
    WHERE $18 IS NULL OR EXISTS (SELECT 1 FROM parent)
    ON CONFLICT DO NOTHING
    RETURNING 1
)"#;

// The words of messages are stored if the index has words of the same rules.
const INSERT_RECORDS: &str = ", inserted_record AS (
    INSERT INTO tenure_record (tenant, session, seq, at, checksum, entry, position, words)
    SELECT $1, $2, r.seq, r.at, r.checksum, r.entry, CASE WHEN i.is_same THEN r.position END,
        CASE WHEN i.is_same THEN r.words::int[] END
    FROM head, (SELECT coalesce(rules = $31, $31 IS NOT NULL) AS is_same FROM tenure_message_index) i,
        unnest($21, $22, $23, $24, $29, $30) AS r (seq, at, checksum, entry, position, words)
)";

// The first words determine the rules of the index. Records without words, or with words of other rules, make it
// incomplete. Otherwise the row is only read.
const UPDATE_MESSAGE_INDEX: &str = ", message_index AS (
    UPDATE tenure_message_index i SET rules = coalesce(i.rules, $31),
        from_tenant = CASE WHEN i.rules IS NULL AND $31 IS NOT NULL THEN i.from_tenant ELSE $1 END,
        from_session = CASE WHEN i.rules IS NULL AND $31 IS NOT NULL THEN i.from_session ELSE $2 END,
        after_key = i.rules IS NULL AND $31 IS NOT NULL AND i.after_key
    FROM head
    WHERE cardinality($21) > 0 AND CASE WHEN i.rules IS NULL AND $31 IS NOT NULL THEN true
        ELSE (i.rules = $31) IS NOT TRUE AND NOT coalesce(($1, $2) >= (i.from_tenant, i.from_session)
            AND NOT (i.after_key AND i.from_tenant = $1 AND i.from_session = $2), false) END
)";

// Removes what a rewind discards from the message index, except what forks show.
const DISCARD_MESSAGES: &str = ", discarded_message AS (
    UPDATE tenure_record r SET position = NULL, words = NULL FROM head
    WHERE r.tenant = $1 AND r.session = $2 AND r.words IS NOT NULL AND r.seq > greatest($32,
        (SELECT max(parent_seq) FROM tenure_head f WHERE f.tenant = $1 AND f.parent = $2))
)";

const SELECT_OUTCOME: &str = " SELECT 1 FROM head";

impl Statements {
    pub fn new() -> Self {
        let items_and_blobs = format!(
            ", item AS (
    INSERT INTO tenure_item ({ITEM_COLUMNS})
    SELECT $1, $33, i.namespace, i.key, i.value, i.text, array_to_tsvector(string_to_array(i.words, ' ')), i.created_at,
        i.used_at, i.uses, i.expires_at
    FROM head, unnest($34, $35, $36, $37, $38, $39, $40, $41, $42)
        AS i (namespace, key, value, text, words, created_at, used_at, uses, expires_at)
    {ITEM_REPLACE}
), blob AS (
    INSERT INTO tenure_blob (tenant, id, bytes)
    SELECT $1, b.id, b.bytes FROM head, unnest($43, $44) AS b (id, bytes)
    ON CONFLICT DO NOTHING
), blob_ref AS (
    INSERT INTO tenure_blob_ref (tenant, session, blob_id, first_seq)
    SELECT $1, $2, b.id, $45 FROM head, unnest($43) AS b (id)
    ON CONFLICT DO NOTHING
)"
        );
        let compose = |head: &str, discard: &str, data: &str| {
            [head, discard, INSERT_RECORDS, UPDATE_MESSAGE_INDEX, data, SELECT_OUTCOME].concat()
        };
        Self {
            append: compose(UPDATE_HEAD, "", ""),
            create: compose(INSERT_HEAD, "", ""),
            append_with_data: compose(UPDATE_HEAD, "", &items_and_blobs),
            create_with_data: compose(INSERT_HEAD, "", &items_and_blobs),
            rewind: compose(UPDATE_HEAD, DISCARD_MESSAGES, ""),
            rewind_with_data: compose(UPDATE_HEAD, DISCARD_MESSAGES, &items_and_blobs),
        }
    }
}

/// Commits, and resolves unknown outcomes. If the connection breaks, the commit may or may not have
/// been applied: it is sent again, and the compare-and-set on the log end decides. If the first
/// attempt was applied, the second one finds the log end moved; the presence of the records is then
/// confirmed by another commit ([`BoundCommit::confirm_applied`], D-038).
pub(super) async fn commit(connection: &PgConnection, statements: &Statements, commit: &Commit) -> Result<()> {
    commit.check()?;
    let bound = BoundCommit::new(commit)?;
    let params = bound.params();
    let is_rewind = bound.words.discarded_after.is_some();
    let statement = match (commit.base, commit.items.is_empty() && commit.blobs.is_empty()) {
        (Some(_), true) if is_rewind => &statements.rewind,
        (Some(_), false) if is_rewind => &statements.rewind_with_data,
        (Some(_), true) => &statements.append,
        (None, true) => &statements.create,
        (Some(_), false) => &statements.append_with_data,
        (None, false) => &statements.create_with_data,
    };
    let mut retries = connection.retry_budget();
    let mut is_outcome_unknown = false;
    loop {
        let failure = match connection.rows_once(statement, &params).await {
            Ok(rows) if !rows.is_empty() => return Ok(()),
            Ok(_) if is_outcome_unknown => match bound.confirm_applied(connection).await {
                Ok(true) => return Ok(()),
                Ok(false) => rejection(connection, commit).await?,
                Err(failure) => failure,
            },
            Ok(_) => rejection(connection, commit).await?,
            Err(failure) => failure,
        };
        is_outcome_unknown |= matches!(failure, FailureKind::Lost(_));
        retries.wait(failure).await?;
    }
}

/// Determines why a commit was rejected.
async fn rejection(connection: &PgConnection, commit: &Commit) -> Result<FailureKind> {
    let head = &commit.head;
    let session_id = head.info.session_id.clone();
    let sql = "SELECT 1 FROM tenure_head WHERE tenant = $1 AND session = $2";
    let params: [Param<'_>; 2] = [(&head.tenant.as_str(), Type::TEXT), (&session_id.as_str(), Type::TEXT)];
    let exists = !connection.rows(sql, &params).await?.is_empty();
    let error = match (commit.base, &head.parent) {
        (Some(end), _) if exists => Error::Conflict { session_id, expected: end.seq },
        (Some(_), _) => Error::NotFound { session_id },
        (None, _) if exists => Error::Exists { session_id },
        (None, Some(parent)) => Error::NotFound { session_id: parent.session.clone() },
        // The session existed when the commit was rejected, and has been purged since.
        (None, None) => return Ok(FailureKind::rolled_back(format!("session {session_id} was purged concurrently"))),
    };
    Ok(FailureKind::Final(error))
}

/// A log hash as PostgreSQL stores it: a signed integer.
fn to_signed(hash: LogHash) -> i64 {
    hash.0.cast_signed()
}

/// A commit as columns and arrays to bind.
struct BoundCommit<'a> {
    commit: &'a Commit,
    tenant: &'a str,
    session: &'a str,
    user: &'a str,
    status: &'static str,
    created_at: i64,
    active_at: i64,
    due_at: Option<i64>,
    seq: i64,
    visible_hash: &'a [u8],
    conversation_key: i64,
    match_keys: Option<Vec<i64>>,
    lease_until: Option<i64>,
    title: String,
    labels: Option<Vec<String>>,
    head_json: String,
    base_seq: Option<i64>,
    base_log_hash: Option<i64>,
    log_hash: i64,
    first_seq: i64,
    parent: Option<&'a str>,
    parent_seq: Option<i64>,
    parent_digest: Option<String>,
    seqs: Vec<i64>,
    times: Vec<i64>,
    checksums: Vec<i32>,
    entries: Vec<String>,
    words: WordColumns,
    owner: String,
    items: ItemColumns<'a>,
    blob_ids: Vec<&'a [u8]>,
    blob_bytes: Vec<&'a [u8]>,
    first_new_seq: i64,
}

/// Items as arrays to bind, one for each column.
#[derive(Default)]
struct ItemColumns<'a> {
    namespaces: Vec<&'a str>,
    keys: Vec<&'a str>,
    values: Vec<&'a str>,
    texts: Vec<Option<String>>,
    words: Vec<Option<String>>,
    created_at: Vec<i64>,
    used_at: Vec<i64>,
    uses: Vec<i64>,
    expires_at: Vec<Option<i64>>,
}

impl<'a> BoundCommit<'a> {
    fn new(commit: &'a Commit) -> Result<Self> {
        let head = &commit.head;
        for (name, value) in [("assistant", &head.assistant), ("thread", &head.thread)] {
            check_no_nul(name, value.as_deref().unwrap_or_default())?;
        }
        let entries: Vec<String> = commit.records.iter().map(|r| r.entry.encode()).collect();
        let checksum = |(r, text): (&Record, &String)| Record::checksum(r.seq, r.at, text).cast_signed();
        let parent = head.parent.as_ref();
        let parent_digest = parent.map(|p| serde_json::to_string(&p.digest).expect("digests always serialize"));
        let blobs: BTreeMap<&[u8], &[u8]> = commit.blobs.iter().map(|b| (&b.id.0[..], &b.bytes[..])).collect();
        let owner = Owner::Session(head.info.session_id.clone()).to_string();
        Ok(Self {
            commit,
            tenant: head.tenant.as_str(),
            session: head.info.session_id.as_str(),
            user: head.user.as_str(),
            status: head.status.as_str(),
            created_at: micros(head.info.created_at),
            active_at: micros(head.active_at),
            due_at: head.due_at.map(micros),
            seq: count_to_i64(head.seq),
            visible_hash: &head.digest.hash.0,
            conversation_key: conversation_key(&head.tenant, &head.user, &head.digest.hash),
            match_keys: Some(
                head.digest.match_keys().iter().map(|key| conversation_key(&head.tenant, &head.user, key)).collect(),
            )
            .filter(|keys: &Vec<i64>| !keys.is_empty()),
            lease_until: head.lease.as_ref().map(|l| micros(l.until)),
            title: head.folded_title(),
            labels: Some(head.labels()).filter(|l| !l.is_empty()),
            head_json: serde_json::to_string(head).expect("heads have only string keys and finite numbers"),
            base_seq: commit.base.map(|end| count_to_i64(end.seq)),
            base_log_hash: commit.base.map(|end| to_signed(end.hash)),
            log_hash: to_signed(head.log_hash),
            first_seq: count_to_i64(head.first),
            parent: parent.map(|p| p.session.as_str()),
            parent_seq: parent.map(|p| count_to_i64(p.seq)),
            parent_digest,
            seqs: commit.records.iter().map(|r| count_to_i64(r.seq)).collect(),
            times: commit.records.iter().map(|r| micros(r.at)).collect(),
            checksums: commit.records.iter().zip(&entries).map(checksum).collect(),
            entries,
            words: WordColumns::new(commit),
            items: ItemColumns::new(&owner, &commit.items)?,
            owner,
            blob_ids: blobs.keys().copied().collect(),
            blob_bytes: blobs.values().copied().collect(),
            first_new_seq: count_to_i64(commit.first()),
        })
    }

    fn params(&self) -> Vec<Param<'_>> {
        let mut params: Vec<Param<'_>> = vec![
            (&self.tenant, Type::TEXT),
            (&self.session, Type::TEXT),
            (&self.user, Type::TEXT),
            (&self.commit.head.assistant, Type::TEXT),
            (&self.commit.head.thread, Type::TEXT),
            (&self.status, Type::TEXT),
            (&self.created_at, Type::INT8),
            (&self.active_at, Type::INT8),
            (&self.due_at, Type::INT8),
            (&self.seq, Type::INT8),
            (&self.visible_hash, Type::BYTEA),
            (&self.lease_until, Type::INT8),
            (&self.title, Type::TEXT),
            (&self.labels, Type::TEXT_ARRAY),
            (&self.head_json, Type::TEXT),
            (&self.base_seq, Type::INT8),
            (&self.first_seq, Type::INT8),
            (&self.parent, Type::TEXT),
            (&self.parent_seq, Type::INT8),
            (&self.parent_digest, Type::TEXT),
            (&self.seqs, Type::INT8_ARRAY),
            (&self.times, Type::INT8_ARRAY),
            (&self.checksums, Type::INT4_ARRAY),
            (&self.entries, Type::TEXT_ARRAY),
            (&self.conversation_key, Type::INT8),
            (&self.match_keys, Type::INT8_ARRAY),
            (&self.log_hash, Type::INT8),
            (&self.base_log_hash, Type::INT8),
            (&self.words.positions, Type::INT4_ARRAY),
            (&self.words.words, Type::TEXT_ARRAY),
            (&self.words.rules, Type::INT8),
            (&self.words.discarded_after, Type::INT8),
        ];
        if !self.commit.items.is_empty() || !self.commit.blobs.is_empty() {
            let items = &self.items;
            params.extend::<[Param<'_>; 13]>([
                (&self.owner, Type::TEXT),
                (&items.namespaces, Type::TEXT_ARRAY),
                (&items.keys, Type::TEXT_ARRAY),
                (&items.values, Type::TEXT_ARRAY),
                (&items.texts, Type::TEXT_ARRAY),
                (&items.words, Type::TEXT_ARRAY),
                (&items.created_at, Type::INT8_ARRAY),
                (&items.used_at, Type::INT8_ARRAY),
                (&items.uses, Type::INT8_ARRAY),
                (&items.expires_at, Type::INT8_ARRAY),
                (&self.blob_ids, Type::BYTEA_ARRAY),
                (&self.blob_bytes, Type::BYTEA_ARRAY),
                (&self.first_new_seq, Type::INT8),
            ]);
        }
        params
    }

    /// Returns whether the log contains exactly these records: with the same sequence numbers,
    /// times and texts.
    ///
    /// The check is a write that changes nothing. A commit may be visible before it is replicated
    /// (its connection ended while it waited for a synchronous standby), and may still be lost with
    /// this server. A later commit is not acknowledged before the earlier one is replicated, so
    /// what this write confirms is as durable as if the original acknowledgement had arrived
    /// (D-038).
    async fn confirm_applied(&self, connection: &PgConnection) -> Result<bool, FailureKind> {
        if self.seqs.is_empty() {
            return Ok(false);
        }
        let sql = "UPDATE tenure_head SET seq = seq WHERE tenant = $1 AND session = $2 AND cardinality($3) = (
                SELECT count(*) FROM tenure_record r, unnest($3, $4, $5) AS w (seq, at, entry)
                WHERE r.tenant = $1 AND r.session = $2 AND r.seq = w.seq AND r.at = w.at AND r.entry = w.entry
            ) RETURNING 1";
        let params: [Param<'_>; 5] = [
            (&self.tenant, Type::TEXT),
            (&self.session, Type::TEXT),
            (&self.seqs, Type::INT8_ARRAY),
            (&self.times, Type::INT8_ARRAY),
            (&self.entries, Type::TEXT_ARRAY),
        ];
        Ok(!connection.rows_once(sql, &params).await?.is_empty())
    }
}

impl<'a> ItemColumns<'a> {
    fn new(owner: &str, items: &'a [(String, Item)]) -> Result<Self> {
        // One statement cannot write a row twice: of items with the same key, the last one is
        // written.
        let unique_items: BTreeMap<_, _> =
            items.iter().map(|(namespace, item)| ((namespace, &item.key), item)).collect();
        let mut columns = Self::default();
        for ((namespace, key), item) in unique_items {
            check_item_key(owner, namespace, key)?;
            columns.namespaces.push(namespace);
            columns.keys.push(key);
            columns.values.push(&item.value);
            columns.texts.push(item.text.clone());
            columns.words.push(item.text.as_deref().map(words));
            columns.created_at.push(micros(item.created_at));
            columns.used_at.push(micros(item.used_at));
            columns.uses.push(count_to_i64(item.uses));
            columns.expires_at.push(item.expires_at.map(micros));
        }
        Ok(columns)
    }
}
