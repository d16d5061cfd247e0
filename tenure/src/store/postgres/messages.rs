//! The message index: a GIN index of hashes of the words of each message.
//!
//! A hash covers the tenant and a word, or the tenant and the user. Nothing can be read from it, and a
//! search of one tenant does not find messages of another. Words cannot be found by their beginning.

use crate::store::contract::Commit;
use crate::store::message_index::{
    IndexedMessage, MessageLocation, MessageMatches, MessageQuery, SessionIndexPart, WordRules,
};
use crate::store::postgres::connection::{MAINTENANCE_TIMEOUT, Param, PgConnection};
use crate::store::postgres::failure::FailureKind;
use crate::store::postgres::row::{column, count_to_i64, row_limit, session_location};
use crate::types::error::{Error, Result};
use crate::types::id::{Seq, SessionId, SessionKey, Tenant, User};
use std::collections::HashMap;
use tokio_postgres::types::Type;
use tokio_postgres::{Row, Transaction};

/// The words of the records of a commit as arrays to bind, one element for each record.
pub(super) struct WordColumns {
    pub positions: Vec<Option<i32>>,
    pub words: Vec<Option<String>>,
    pub rules: Option<i64>,
    pub discarded_after: Option<i64>,
}

impl WordColumns {
    pub fn new(commit: &Commit) -> Self {
        let head = &commit.head;
        let update = commit.message_index.as_ref();
        let added: HashMap<Seq, &IndexedMessage> =
            update.into_iter().flat_map(|update| &update.added).map(|message| (message.seq, message)).collect();
        let messages: Vec<_> = commit.records.iter().map(|record| added.get(&record.seq)).collect();
        let words = |message: &&IndexedMessage| word_array(&head.tenant, &head.user, &message.words);
        Self {
            positions: messages.iter().map(|message| message.map(|m| m.position as i32)).collect(),
            words: messages.iter().map(|message| message.map(words)).collect(),
            rules: update.map(|update| update.rules.0.cast_signed()),
            discarded_after: update.and_then(|update| update.discarded_after).map(count_to_i64),
        }
    }
}

/// The hashes of a message, as an array literal.
fn word_array(tenant: &Tenant, user: &User, words: &[String]) -> String {
    let hashes = words.iter().map(|word| word_hash(tenant, word)).chain([user_hash(tenant, user)]);
    format!("{{{}}}", hashes.map(|hash| hash.to_string()).collect::<Vec<_>>().join(","))
}

fn word_hash(tenant: &Tenant, word: &str) -> i32 {
    short_hash(&[b"word", tenant.as_str().as_bytes(), word.as_bytes()])
}

fn user_hash(tenant: &Tenant, user: &User) -> i32 {
    short_hash(&[b"user", tenant.as_str().as_bytes(), user.as_str().as_bytes()])
}

fn short_hash(parts: &[&[u8]]) -> i32 {
    let mut hash = blake3::Hasher::new();
    for part in parts {
        hash.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    let mut first = [0; 4];
    first.copy_from_slice(&hash.finalize().as_bytes()[..4]);
    i32::from_le_bytes(first)
}

/// The condition that the session `$1`, `$2` is in the part that is not in the index.
const IS_UNINDEXED: &str = "coalesce(($1, $2) >= (from_tenant, from_session)
    AND NOT (after_key AND from_tenant = $1 AND from_session = $2), false)";

// The key is a subquery, so that the sessions are read in the order of the primary key, and only up to the
// first one.
const FIRST_UNINDEXED: &str = "
    SELECT tenant, session FROM tenure_head
    WHERE (tenant, session) >=
        ((SELECT from_tenant FROM tenure_message_index), (SELECT from_session FROM tenure_message_index))
        AND NOT EXISTS (SELECT 1 FROM tenure_message_index i
            WHERE i.after_key AND i.from_tenant = tenure_head.tenant AND i.from_session = tenure_head.session)
    ORDER BY tenant, session LIMIT 1";

// The messages with the words are selected first: another plan could read all messages of the tenant.
const FIND: &str = "
    WITH found AS MATERIALIZED (
        SELECT tenant, session, seq, at, position FROM tenure_record WHERE words @> $1 AND words IS NOT NULL
    )
    SELECT session, seq, position FROM found WHERE tenant = $2 ORDER BY at DESC, session DESC, seq DESC LIMIT $3";

/// Returns whether every session is in the index, with words of these rules.
async fn is_complete(connection: &PgConnection, rules: WordRules) -> Result<bool> {
    let sql = "SELECT 1 FROM tenure_message_index WHERE from_tenant IS NULL AND coalesce(rules, $1) = $1";
    Ok(!connection.rows(sql, &[(&rules.0.cast_signed(), Type::INT8)]).await?.is_empty())
}

/// Finds messages, the newest first.
pub(super) async fn find(connection: &PgConnection, query: &MessageQuery) -> Result<MessageMatches> {
    let words = query.words.iter().filter(|word| !word.is_prefix);
    let mut hashes: Vec<i32> = words.map(|word| word_hash(&query.tenant, &word.text)).collect();
    if hashes.is_empty() || !is_complete(connection, query.rules).await? {
        return Ok(MessageMatches::Unindexed);
    }
    hashes.extend(query.user.iter().map(|user| user_hash(&query.tenant, user)));
    let params: [Param<'_>; 3] =
        [(&hashes, Type::INT4_ARRAY), (&query.tenant.as_str(), Type::TEXT), (&row_limit(query.limit), Type::INT8)];
    let rows = connection.rows_planned(FIND, &params).await?;
    let location = |row: &Row| {
        let location_text = || format!("postgres, messages of tenant {}", query.tenant);
        let session: &str = column(row, 0, location_text)?;
        let session = SessionId::new(session).map_err(|e| Error::corrupt_from(location_text(), e))?;
        let seq = column::<i64>(row, 1, location_text)? as Seq;
        Ok(MessageLocation { session, seq, position: column::<i32>(row, 2, location_text)? as usize })
    };
    Ok(MessageMatches::Found(rows.iter().map(location).collect::<Result<_>>()?))
}

/// Lists the messages of a session that are in the index.
pub(super) async fn indexed(connection: &PgConnection, key: &SessionKey) -> Result<Vec<(Seq, usize)>> {
    let sql = "SELECT seq, position FROM tenure_record
        WHERE tenant = $1 AND session = $2 AND words IS NOT NULL ORDER BY seq";
    let params: [Param<'_>; 2] = [(&key.tenant.as_str(), Type::TEXT), (&key.session.as_str(), Type::TEXT)];
    let rows = connection.rows(sql, &params).await?;
    let location_text = || session_location(key);
    let message =
        |row: &Row| Ok((column::<i64>(row, 0, location_text)? as Seq, column::<i32>(row, 1, location_text)? as usize));
    rows.iter().map(message).collect()
}

/// Returns the first session that is not in the index. Empties an index with words of other rules.
pub(super) async fn next_unindexed(connection: &PgConnection, rules: WordRules) -> Result<Option<SessionKey>> {
    if is_complete(connection, rules).await? {
        return Ok(None);
    }
    let mut retries = connection.retry_budget();
    loop {
        match connection.with_timeout(MAINTENANCE_TIMEOUT, advance(connection, rules)).await {
            Ok(next) => return next,
            Err(failure) => retries.wait(failure).await?,
        }
    }
}

async fn advance(connection: &PgConnection, rules: WordRules) -> Result<Result<Option<SessionKey>>, FailureKind> {
    let mut pooled = connection.acquire().await?;
    let tx = pooled.transaction().await?;
    let rules: &[Param<'_>] = &[(&rules.0.cast_signed(), Type::INT8)];
    // Waits for the commits in progress: every commit locks this table before it writes to it or not.
    run(connection, &tx, "LOCK TABLE tenure_message_index IN EXCLUSIVE MODE", &[]).await?;
    let sql = "UPDATE tenure_message_index SET rules = $1, from_tenant = '', from_session = '', after_key = false
        WHERE rules <> $1 RETURNING 1";
    if !run(connection, &tx, sql, rules).await?.is_empty() {
        let sql = "UPDATE tenure_record SET position = NULL, words = NULL WHERE words IS NOT NULL";
        run(connection, &tx, sql, &[]).await?;
    }
    let next = run(connection, &tx, FIRST_UNINDEXED, &[]).await?.pop();
    if next.is_none() {
        let sql = "UPDATE tenure_message_index SET from_tenant = NULL, from_session = NULL, after_key = false";
        run(connection, &tx, sql, &[]).await?;
    }
    tx.commit().await?;
    pooled.release();
    Ok(next.map(|row| session_key(&row)).transpose())
}

fn session_key(row: &Row) -> Result<SessionKey> {
    let location_text = || "postgres, a head".to_owned();
    let tenant =
        Tenant::new(column::<&str>(row, 0, location_text)?).map_err(|e| Error::corrupt_from(location_text(), e))?;
    let session =
        SessionId::new(column::<&str>(row, 1, location_text)?).map_err(|e| Error::corrupt_from(location_text(), e))?;
    Ok(SessionKey { tenant, session })
}

/// Replaces the entries of a part of a session's log.
pub(super) async fn replace(connection: &PgConnection, part: &SessionIndexPart) -> Result<()> {
    let mut retries = connection.retry_budget();
    loop {
        match connection.with_timeout(MAINTENANCE_TIMEOUT, try_replace(connection, part)).await {
            Ok(outcome) => return outcome,
            Err(failure) => retries.wait(failure).await?,
        }
    }
}

async fn try_replace(connection: &PgConnection, part: &SessionIndexPart) -> Result<Result<()>, FailureKind> {
    let tenant = part.key.tenant.as_str();
    let session = part.key.session.as_str();
    let key: [Param<'_>; 2] = [(&tenant, Type::TEXT), (&session, Type::TEXT)];
    let mut pooled = connection.acquire().await?;
    let tx = pooled.transaction().await?;
    let sql = "SELECT seq, log_hash, \"user\" FROM tenure_head WHERE tenant = $1 AND session = $2 FOR UPDATE";
    let Some(head) = run(connection, &tx, sql, &key).await?.pop() else { return Ok(Ok(())) };
    let end = (count_to_i64(part.end.seq), part.end.hash.0.cast_signed());
    if (head.try_get::<_, i64>(0)?, head.try_get::<_, i64>(1)?) != end {
        let session_id = part.key.session.clone();
        return Ok(Err(Error::Conflict { session_id, expected: part.end.seq }));
    }
    let rules = part.rules.0.cast_signed();
    let sql = "SELECT 1 FROM tenure_message_index WHERE coalesce(rules, $1) = $1";
    if run(connection, &tx, sql, &[(&rules, Type::INT8)]).await?.is_empty() {
        return Ok(Ok(()));
    }
    let user = match User::new(head.try_get::<_, &str>(2)?) {
        Ok(user) => user,
        Err(e) => return Ok(Err(Error::corrupt_from(session_location(&part.key), e))),
    };
    let first = count_to_i64(*part.range.start());
    let last = count_to_i64(*part.range.end());
    let sql = "UPDATE tenure_record SET position = NULL, words = NULL
        WHERE tenant = $1 AND session = $2 AND seq BETWEEN $3 AND $4 AND words IS NOT NULL";
    run(connection, &tx, sql, &[key[0].clone(), key[1].clone(), (&first, Type::INT8), (&last, Type::INT8)]).await?;
    let seqs: Vec<i64> = part.messages.iter().map(|message| count_to_i64(message.seq)).collect();
    let positions: Vec<i32> = part.messages.iter().map(|message| message.position as i32).collect();
    let words = part.messages.iter().map(|message| word_array(&part.key.tenant, &user, &message.words));
    let words: Vec<String> = words.collect();
    let sql = "UPDATE tenure_record r SET position = m.position, words = m.words::int[]
        FROM unnest($3, $4, $5) AS m (seq, position, words)
        WHERE r.tenant = $1 AND r.session = $2 AND r.seq = m.seq";
    let arrays: [Param<'_>; 3] =
        [(&seqs, Type::INT8_ARRAY), (&positions, Type::INT4_ARRAY), (&words, Type::TEXT_ARRAY)];
    run(connection, &tx, sql, &[&key[..], &arrays].concat()).await?;
    let sql = "UPDATE tenure_message_index SET rules = $1 WHERE rules IS NULL";
    run(connection, &tx, sql, &[(&rules, Type::INT8)]).await?;
    if part.is_last
        && let Some(next) = run(connection, &tx, FIRST_UNINDEXED, &[]).await?.pop()
        && (next.try_get::<_, &str>(0)?, next.try_get::<_, &str>(1)?) == (tenant, session)
    {
        let sql = "UPDATE tenure_message_index SET from_tenant = $1, from_session = $2, after_key = true
            WHERE from_tenant IS NOT NULL";
        run(connection, &tx, sql, &key).await?;
    }
    tx.commit().await?;
    pooled.release();
    Ok(Ok(()))
}

async fn run(
    connection: &PgConnection,
    tx: &Transaction<'_>,
    sql: &str,
    params: &[Param<'_>],
) -> Result<Vec<Row>, FailureKind> {
    Ok(tx.query_typed(&connection.qualify_tables(sql), params).await?)
}

/// The statement that records that the messages which the fork `$3` inherits from `$2` must be indexed again,
/// if they may not be in the index while the fork is, or if they are with another user.
pub(super) fn mark_inherited() -> String {
    let is_unindexed = IS_UNINDEXED.replace("$2", "$3");
    format!(
        "UPDATE tenure_message_index SET from_tenant = $1, from_session = $3, after_key = false
        WHERE NOT {is_unindexed} AND (from_tenant IS NOT NULL OR
            (SELECT \"user\" FROM tenure_head WHERE tenant = $1 AND session = $2) <>
            (SELECT \"user\" FROM tenure_head WHERE tenant = $1 AND session = $3))"
    )
}
