//! The message index: an FTS5 table without contents, and the newest messages beside it.
//!
//! A commit adds its messages to `message_recent`, which costs one row of a small table each; they are
//! moved to the FTS5 table in batches, because every transaction that writes to it writes a segment. A
//! search reads both. Invariant: the record of a message in the index has its number (`record.doc`), and
//! every number is in exactly one of the two tables.

use super::record_key::record_key;
use crate::store::message_index::{
    IndexWord, IndexedMessage, MessageIndexUpdate, MessageLocation, MessageMatches, MessageQuery, SessionIndexPart,
    WordRules,
};
use crate::store::sqlite::fault::StoreResult;
use crate::types::error::Error;
use crate::types::head::Head;
use crate::types::id::{Seq, SessionId, SessionKey, Tenant, User};
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};
use std::collections::VecDeque;

/// The number of messages in `message_recent` above which a batch of them is moved.
pub(super) const MAX_RECENT: usize = 64;

/// Maximum number of messages, and of bytes of words, that one step moves.
const MAX_MOVED: usize = 64;
const MAX_MOVED_BYTES: usize = 256 << 10;

/// The number of pages that one step of removing tombstones writes.
const MERGE_PAGES: i64 = 256;

/// The length of a hash in the index, in characters of 5 bits.
const HASH_CHARS: usize = 12;

/// The change of the message index that a commit makes, and the hashes of its owner.
pub(super) struct MessageRows {
    rules: i64,
    tenant_hash: String,
    user_hash: String,
    added: Vec<MessageRow>,
    discarded_after: Option<Seq>,
}

/// A message that is added, with its words separated by spaces.
struct MessageRow {
    seq: Seq,
    position: i64,
    words: String,
}

impl MessageRow {
    fn new(message: &IndexedMessage) -> Self {
        Self { seq: message.seq, position: message.position as i64, words: message.words.join(" ") }
    }
}

impl MessageRows {
    /// The rows of the update of a commit with this head.
    pub fn new(head: &Head, update: &MessageIndexUpdate) -> Self {
        let MessageIndexUpdate { rules, added, discarded_after } = update;
        let discarded_after = *discarded_after;
        Self { discarded_after, ..Self::added(*rules, &head.tenant, &head.user, added) }
    }

    /// The rows of messages that are added.
    fn added(rules: WordRules, tenant: &Tenant, user: &User, added: &[IndexedMessage]) -> Self {
        Self {
            rules: rules.0.cast_signed(),
            tenant_hash: tenant_hash(tenant),
            user_hash: user_hash(tenant, user),
            added: added.iter().map(MessageRow::new).collect(),
            discarded_after: None,
        }
    }

    /// Removes what the commit discards, and adds its messages. Their records get the numbers that are
    /// returned. `None` means that the index has words of other rules.
    pub fn apply(&self, conn: &Connection, head_id: i64, key: &SessionKey) -> StoreResult<Option<AddedMessages>> {
        if let Some(after) = self.discarded_after {
            let sql = "SELECT max(head_json ->> '$.parent.seq') FROM head WHERE tenant = ?1 AND parent = ?2";
            let inherited: Option<i64> =
                conn.prepare_cached(sql)?.query_row([key.tenant.as_str(), key.session.as_str()], |r| r.get(0))?;
            let after = after.max(inherited.unwrap_or_default() as Seq);
            remove(conn, head_id, after + 1, Seq::MAX)?;
        }
        self.add(conn)
    }

    /// Adds the messages. `None` means that the index has words of other rules.
    fn add(&self, conn: &Connection) -> StoreResult<Option<AddedMessages>> {
        if self.added.is_empty() {
            return Ok(Some(AddedMessages::default()));
        }
        // More than one step moves is indexed at once.
        let bytes: usize = self.added.iter().map(|message| message.words.len()).sum();
        let is_recent = self.added.len() <= MAX_MOVED && bytes <= MAX_MOVED_BYTES;
        let count = self.added.len() as i64;
        let row = conn
            .prepare_cached(
                "UPDATE message_index SET doc = doc + ?1, recent = recent + ?2, rules = coalesce(rules, ?3)
                 WHERE coalesce(rules, ?3) = ?3 RETURNING doc - ?1, recent",
            )?
            .query_row(params![count, if is_recent { count } else { 0 }, self.rules], |r| {
                Ok((r.get::<_, i64>(0)?, r.get::<_, i64>(1)?))
            });
        let Some((last_doc, recent)) = row.optional()? else { return Ok(None) };
        let mut insert = conn.prepare_cached(if is_recent {
            "INSERT INTO message_recent (doc, tenant_hash, user_hash, words) VALUES (?1, ?2, ?3, ?4)"
        } else {
            "INSERT INTO message_words (rowid, words) VALUES (?1, ?2)"
        })?;
        let mut docs = VecDeque::with_capacity(self.added.len());
        for (message, doc) in self.added.iter().zip(last_doc + 1..) {
            if is_recent {
                insert.execute(params![doc, self.tenant_hash, self.user_hash, message.words])?;
            } else {
                insert.execute(params![doc, prefixed(&self.tenant_hash, &self.user_hash, &message.words)])?;
            }
            docs.push_back(MessageNumber { seq: message.seq, doc, position: message.position });
        }
        Ok(Some(AddedMessages { docs, recent: recent as usize }))
    }
}

/// The messages that a commit added to the index.
#[derive(Default)]
pub(super) struct AddedMessages {
    /// The number of each message, oldest first.
    docs: VecDeque<MessageNumber>,
    /// The number of messages in `message_recent`.
    pub recent: usize,
}

/// The number of a message in the index.
struct MessageNumber {
    seq: Seq,
    doc: i64,
    position: i64,
}

impl AddedMessages {
    /// Returns the number and the position of the message of a record. Records must be asked for in
    /// ascending order.
    pub fn number_of(&mut self, seq: Seq) -> (Option<i64>, Option<i64>) {
        let number = self.docs.pop_front_if(|number| number.seq == seq);
        (number.as_ref().map(|number| number.doc), number.as_ref().map(|number| number.position))
    }
}

/// The text of a message as the FTS5 table gets it: each word with the tenant's hash before it, and the
/// user's hash.
fn prefixed(tenant_hash: &str, user_hash: &str, words: &str) -> String {
    let mut text = user_hash.to_owned();
    for word in words.split(' ').filter(|word| !word.is_empty()) {
        text.extend([" ", tenant_hash, word]);
    }
    text
}

/// The hash of a tenant, in letters and digits.
fn tenant_hash(tenant: &Tenant) -> String {
    short_hash(&[b"tenant", tenant.as_str().as_bytes()])
}

/// The hash of a user. It is a word of its own, which cannot be a tenant's hash followed by a word.
fn user_hash(tenant: &Tenant, user: &User) -> String {
    short_hash(&[b"user", tenant.as_str().as_bytes(), user.as_str().as_bytes()])
}

fn short_hash(parts: &[&[u8]]) -> String {
    let mut hash = blake3::Hasher::new();
    for part in parts {
        hash.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    let bytes = hash.finalize();
    let digit = |byte: &u8| char::from(b"abcdefghijklmnopqrstuvwxyz234567"[usize::from(byte & 31)]);
    bytes.as_bytes()[..HASH_CHARS].iter().map(digit).collect()
}

/// Moves the oldest of the newest messages to the FTS5 table, in a bounded step.
pub(super) fn move_recent(conn: &Connection) -> StoreResult<()> {
    let mut moved = Vec::new();
    {
        let mut select =
            conn.prepare_cached("SELECT doc, tenant_hash, user_hash, words FROM message_recent ORDER BY doc LIMIT ?1")?;
        let mut insert = conn.prepare_cached("INSERT INTO message_words (rowid, words) VALUES (?1, ?2)")?;
        let mut rows = select.query([MAX_MOVED as i64])?;
        let mut bytes = 0;
        while bytes < MAX_MOVED_BYTES
            && let Some(row) = rows.next()?
        {
            let doc: i64 = row.get(0)?;
            let words = row.get_ref(3)?.as_str().map_err(rusqlite::Error::from)?;
            bytes += words.len();
            let tenant_hash: String = row.get(1)?;
            let user_hash: String = row.get(2)?;
            insert.execute(params![doc, prefixed(&tenant_hash, &user_hash, words)])?;
            moved.push(doc);
        }
    }
    let Some(last) = moved.last() else { return Ok(()) };
    conn.prepare_cached("DELETE FROM message_recent WHERE doc <= ?1")?.execute([last])?;
    conn.prepare_cached("UPDATE message_index SET recent = recent - ?1")?.execute([moved.len() as i64])?;
    Ok(())
}

/// Removes the messages of a range of a session's own records from the index.
pub(super) fn remove(conn: &Connection, head_id: i64, first: Seq, last: Seq) -> StoreResult<()> {
    let mut docs: Vec<i64> = Vec::new();
    {
        let mut select = conn
            .prepare_cached("SELECT doc FROM record WHERE record_key >= ?1 AND record_key <= ?2 AND doc IS NOT NULL")?;
        let mut rows = select.query([record_key(head_id, first), record_key(head_id, last)])?;
        while let Some(row) = rows.next()? {
            docs.push(row.get(0)?);
        }
    }
    if docs.is_empty() {
        return Ok(());
    }
    remove_docs(conn, &docs)?;
    conn.prepare_cached(
        "UPDATE record SET doc = NULL, position = NULL WHERE record_key >= ?1 AND record_key <= ?2 AND doc IS NOT NULL",
    )?
    .execute([record_key(head_id, first), record_key(head_id, last)])?;
    Ok(())
}

/// Removes entries that belong to no message.
pub(super) fn remove_unused(conn: &Connection) -> StoreResult<()> {
    let sql = "SELECT doc FROM (SELECT doc FROM message_recent UNION ALL SELECT id FROM message_words_docsize)
        WHERE doc NOT IN (SELECT doc FROM record WHERE doc IS NOT NULL)";
    let docs: Vec<i64> = conn.prepare(sql)?.query_map([], |r| r.get(0))?.collect::<rusqlite::Result<_>>()?;
    remove_docs(conn, &docs)
}

/// Removes messages by their numbers from both tables.
fn remove_docs(conn: &Connection, docs: &[i64]) -> StoreResult<()> {
    let mut recent = conn.prepare_cached("DELETE FROM message_recent WHERE doc = ?1")?;
    let mut words = conn.prepare_cached("DELETE FROM message_words WHERE rowid = ?1")?;
    let mut recent_count = 0;
    for doc in docs {
        if recent.execute([doc])? > 0 {
            recent_count += 1;
        } else {
            words.execute([doc])?;
        }
    }
    let removed = if docs.len() as i64 > recent_count { HAS_REMOVED } else { 0 };
    conn.prepare_cached("UPDATE message_index SET recent = recent - ?1, compaction = compaction | ?2")?
        .execute(params![recent_count, removed])?;
    Ok(())
}

/// In `message_index.compaction`: words of messages that were removed since the last merge began are in
/// the FTS5 table.
const HAS_REMOVED: i64 = 1;
/// In `message_index.compaction`: a merge is in progress.
const IS_MERGING: i64 = 2;

/// Merges segments of the FTS5 table until they contain no words of removed messages, in a bounded step.
/// Returns whether another step is needed.
pub(super) fn compact(conn: &Connection) -> StoreResult<bool> {
    let state: i64 = conn.query_row("SELECT compaction FROM message_index", [], |r| r.get(0))?;
    if state == 0 {
        return Ok(false);
    }
    let is_merging = state & IS_MERGING != 0;
    let before = conn.total_changes();
    // A negative number begins a merge of all segments.
    let pages = if is_merging { MERGE_PAGES } else { -MERGE_PAGES };
    conn.execute("INSERT INTO message_words (message_words, rank) VALUES ('merge', ?1)", [pages])?;
    // As FTS5 documents: fewer than two changes mean that there was nothing to do.
    let is_done = conn.total_changes() - before < 2;
    let removed_meanwhile = if is_merging { state & HAS_REMOVED } else { 0 };
    let state = if is_done { removed_meanwhile } else { removed_meanwhile | IS_MERGING };
    conn.execute("UPDATE message_index SET compaction = ?1", [state])?;
    Ok(state != 0)
}

/// Returns whether the FTS5 table contains no words of removed messages.
pub(super) fn is_compact(conn: &Connection) -> StoreResult<bool> {
    Ok(conn.prepare_cached("SELECT compaction = 0 FROM message_index")?.query_row([], |r| r.get(0))?)
}

/// Removes all words of removed messages. The time is proportional to the size of the index.
pub(super) fn compact_all(conn: &Connection) -> rusqlite::Result<()> {
    conn.execute_batch(
        "INSERT INTO message_words (message_words) VALUES ('optimize'); UPDATE message_index SET compaction = 0;",
    )
}

/// The condition that a session is in the part that is not in the index.
const IS_UNINDEXED: &str = "(tenant, session) >= (from_tenant, from_session)
    AND NOT (after_key AND (tenant, session) = (from_tenant, from_session))";

/// Records that a session must be indexed again.
pub(super) fn mark_unindexed(conn: &Connection, key: &SessionKey) -> StoreResult<()> {
    let sql = format!(
        "UPDATE message_index SET from_tenant = ?1, from_session = ?2, after_key = 0
         WHERE coalesce(NOT (SELECT {IS_UNINDEXED} FROM (SELECT ?1 AS tenant, ?2 AS session)), true)"
    );
    conn.prepare_cached(&sql)?.execute([key.tenant.as_str(), key.session.as_str()])?;
    Ok(())
}

/// Records that the messages a fork inherits must be indexed again, if they may not be in the index while
/// the fork is, or if they are with another user.
pub(super) fn inherit(conn: &Connection, fork: &SessionKey, is_same_user: bool) -> StoreResult<()> {
    let sql = "SELECT from_tenant IS NOT NULL FROM message_index";
    if !is_same_user || conn.prepare_cached(sql)?.query_row([], |r| r.get(0))? {
        mark_unindexed(conn, fork)?;
    }
    Ok(())
}

/// Returns the first session that is not in the index. Empties an index with words of other rules.
pub(super) fn next_unindexed(conn: &Connection, rules: WordRules) -> StoreResult<Option<SessionKey>> {
    let rules = rules.0.cast_signed();
    let changed = conn.execute(
        "UPDATE message_index SET rules = ?1, recent = 0, compaction = 0, from_tenant = '', from_session = '',
            after_key = 0 WHERE rules <> ?1",
        [rules],
    )?;
    if changed > 0 {
        conn.execute_batch(
            "INSERT INTO message_words (message_words) VALUES ('delete-all');
             DELETE FROM message_recent;
             UPDATE record SET doc = NULL, position = NULL WHERE doc IS NOT NULL;",
        )?;
    }
    let next = first_unindexed(conn)?;
    if next.is_none() {
        conn.execute("UPDATE message_index SET from_tenant = NULL, from_session = NULL, after_key = 0", [])?;
    }
    Ok(next)
}

/// Returns whether every session is in the index, with words of these rules.
pub(super) fn is_complete(conn: &Connection, rules: WordRules) -> StoreResult<bool> {
    let sql = "SELECT from_tenant IS NULL AND coalesce(rules, ?1) = ?1 FROM message_index";
    Ok(conn.prepare_cached(sql)?.query_row([rules.0.cast_signed()], |r| r.get(0))?)
}

// The key is a subquery, so that the sessions are read in the order of an index, and only up to the first one.
const FIRST_UNINDEXED: &str = "
    SELECT tenant, session FROM head
    WHERE (tenant, session) >= (SELECT from_tenant, from_session FROM message_index)
        AND NOT ((SELECT after_key FROM message_index)
            AND (tenant, session) = (SELECT from_tenant, from_session FROM message_index))
    ORDER BY tenant, session LIMIT 1";

fn first_unindexed(conn: &Connection) -> StoreResult<Option<SessionKey>> {
    let row =
        conn.prepare_cached(FIRST_UNINDEXED)?.query_row([], |r| Ok((r.get::<_, String>(0)?, r.get::<_, String>(1)?)));
    let Some((tenant, session)) = row.optional()? else { return Ok(None) };
    let corrupt = |e| Error::corrupt_from(format!("session {tenant}/{session}"), e);
    Ok(Some(SessionKey {
        tenant: Tenant::new(&tenant).map_err(corrupt)?,
        session: SessionId::new(&session).map_err(corrupt)?,
    }))
}

/// Replaces the entries of a part of a session's log.
pub(super) fn replace(conn: &Connection, part: &SessionIndexPart) -> StoreResult<()> {
    let key = &part.key;
    let sql = "SELECT id, seq, log_hash, user FROM head WHERE tenant = ?1 AND session = ?2";
    let row = conn.prepare_cached(sql)?.query_row([key.tenant.as_str(), key.session.as_str()], |r| {
        Ok((r.get::<_, i64>(0)?, r.get::<_, i64>(1)?, r.get::<_, i64>(2)?, r.get::<_, String>(3)?))
    });
    let Some((id, seq, hash, user)) = row.optional()? else { return Ok(()) };
    if (seq as Seq, hash) != (part.end.seq, part.end.hash.0.cast_signed()) {
        return Err(Error::Conflict { session_id: key.session.clone(), expected: part.end.seq }.into());
    }
    let sql = "SELECT coalesce(rules, ?1) = ?1 FROM message_index";
    if !conn.prepare_cached(sql)?.query_row([part.rules.0.cast_signed()], |r| r.get::<_, bool>(0))? {
        return Ok(());
    }
    let user = User::new(&user).map_err(|e| Error::corrupt_from(format!("head of session {key}"), e))?;
    remove(conn, id, *part.range.start(), *part.range.end())?;
    if !part.messages.is_empty() {
        let added = MessageRows::added(part.rules, &key.tenant, &user, &part.messages).add(conn)?;
        let mut update = conn.prepare_cached("UPDATE record SET doc = ?2, position = ?3 WHERE record_key = ?1")?;
        for number in added.into_iter().flat_map(|added| added.docs) {
            update.execute(params![record_key(id, number.seq), number.doc, number.position])?;
        }
    }
    if part.is_last && first_unindexed(conn)?.as_ref() == Some(key) {
        conn.prepare_cached("UPDATE message_index SET from_tenant = ?1, from_session = ?2, after_key = 1")?
            .execute([key.tenant.as_str(), key.session.as_str()])?;
    }
    Ok(())
}

/// Lists the messages of a session that are in the index.
pub(super) fn indexed(conn: &Connection, key: &SessionKey) -> StoreResult<Vec<(Seq, usize)>> {
    let sql = "SELECT r.record_key & 0xffffffff, r.position
        FROM head h CROSS JOIN record r ON r.record_key > h.id << 32 AND r.record_key < (h.id + 1) << 32
        WHERE h.tenant = ?1 AND h.session = ?2 AND r.doc IS NOT NULL
            AND (EXISTS (SELECT 1 FROM message_recent m WHERE m.doc = r.doc)
                OR EXISTS (SELECT 1 FROM message_words_docsize m WHERE m.id = r.doc))
        ORDER BY r.record_key";
    let mut statement = conn.prepare_cached(sql)?;
    let rows = statement.query_map([key.tenant.as_str(), key.session.as_str()], |r| {
        Ok((r.get::<_, i64>(0)? as Seq, r.get::<_, i64>(1)? as usize))
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

const SELECT_RECENT: &str = "SELECT doc, user_hash, words FROM message_recent WHERE tenant_hash = ?1 ORDER BY doc DESC";

const SELECT_LOCATION: &str = "
    SELECT h.session, r.record_key & 0xffffffff, r.position
    FROM record r CROSS JOIN head h ON h.id = r.record_key >> 32
    WHERE r.doc = ?1 AND h.tenant = ?2";

const SELECT_DOCS: &str = "SELECT rowid FROM message_words WHERE message_words MATCH ?1 ORDER BY rowid DESC LIMIT ?2";

/// Finds messages, the last indexed first.
pub(super) fn find(conn: &Connection, query: &MessageQuery) -> StoreResult<MessageMatches> {
    let _snapshot = Transaction::new_unchecked(conn, TransactionBehavior::Deferred)?;
    if query.words.is_empty() || !is_complete(conn, query.rules)? {
        return Ok(MessageMatches::Unindexed);
    }
    let tenant_hash = tenant_hash(&query.tenant);
    let user_hash = query.user.as_ref().map(|user| user_hash(&query.tenant, user));
    let mut docs = recent_docs(conn, &tenant_hash, user_hash.as_deref(), &query.words)?;
    let wanted = query.limit.saturating_sub(docs.len());
    if wanted > 0 {
        let expression = expression(&tenant_hash, user_hash.as_deref(), &query.words);
        let mut statement = conn.prepare_cached(SELECT_DOCS)?;
        let rows = statement.query_map(params![expression, i64::try_from(wanted).unwrap_or(i64::MAX)], |r| r.get(0))?;
        for doc in rows {
            docs.push(doc?);
        }
    }
    docs.truncate(query.limit);
    let mut locate = conn.prepare_cached(SELECT_LOCATION)?;
    let mut found = Vec::with_capacity(docs.len());
    for doc in docs {
        let row = locate.query_row(params![doc, query.tenant.as_str()], |r| {
            Ok((r.get::<_, String>(0)?, r.get::<_, i64>(1)?, r.get::<_, i64>(2)?))
        });
        let Some((session, seq, position)) = row.optional()? else { continue };
        let session = SessionId::new(&session)
            .map_err(|e| Error::corrupt_from(format!("tenant {}, session {session}", query.tenant), e))?;
        found.push(MessageLocation { session, seq: seq as Seq, position: position as usize });
    }
    Ok(MessageMatches::Found(found))
}

/// Finds messages among the newest, the newest first.
fn recent_docs(
    conn: &Connection,
    tenant_hash: &str,
    user_hash: Option<&str>,
    words: &[IndexWord],
) -> StoreResult<Vec<i64>> {
    let mut statement = conn.prepare_cached(SELECT_RECENT)?;
    let mut rows = statement.query([tenant_hash])?;
    let mut docs = Vec::new();
    while let Some(row) = rows.next()? {
        let user = row.get_ref(1)?.as_str().map_err(rusqlite::Error::from)?;
        let text = row.get_ref(2)?.as_str().map_err(rusqlite::Error::from)?;
        let contains = |word: &IndexWord| {
            let mut stored = text.split(' ');
            let wanted = word.text.as_str();
            stored.any(|stored| if word.is_prefix { stored.starts_with(wanted) } else { stored == wanted })
        };
        if user_hash.is_none_or(|hash| hash == user) && words.iter().all(contains) {
            docs.push(row.get(0)?);
        }
    }
    Ok(docs)
}

/// The FTS5 expression of a query.
fn expression(tenant_hash: &str, user_hash: Option<&str>, words: &[IndexWord]) -> String {
    let words = words.iter().map(|word| {
        // Words contain no quotation marks; another text would be no word of the index.
        let text = word.text.replace('"', "");
        format!("\"{tenant_hash}{text}\"{}", if word.is_prefix { "*" } else { "" })
    });
    let user = user_hash.map(|hash| format!("\"{hash}\""));
    words.chain(user).collect::<Vec<_>>().join(" AND ")
}
