//! Index cards and how they are found.

use super::link::{Link, Param};
use super::{column, micros, row_limit};
use crate::entry::Parent;
use crate::error::{Error, Result};
use crate::head::{Head, Status, VisibleHash};
use crate::id::{Key, SessionId, Tenant, User};
use crate::log_hash::LogHash;
use crate::store::{Order, Query, Whose};
use jiff::Timestamp;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

/// The columns that [`read`] takes.
const CARD: &str = "tenant, session, card, first, parent, parent_seq, parent_mark, log";

/// So much of a thread's name is in the index: see the migration.
const THREAD_CHARS: usize = 200;

pub(super) async fn head(link: &Link, key: &Key) -> Result<Option<Head>> {
    let sql = format!("SELECT {CARD} FROM tenure_head WHERE tenant = $1 AND session = $2");
    let params: [Param<'_>; 2] = [(&key.tenant.as_str(), Type::TEXT), (&key.session.as_str(), Type::TEXT)];
    link.rows(&sql, &params).await?.first().map(read).transpose()
}

pub(super) async fn heads(link: &Link, query: &Query) -> Result<Vec<Head>> {
    let nul = |s: &Option<String>| s.as_ref().is_some_and(|s| s.contains('\0'));
    if query.limit == 0 || nul(&query.assistant) || nul(&query.thread) {
        return Ok(Vec::new()); // nothing with a NUL is stored
    }
    let Built { sql, values } = build(query);
    let params: Vec<Param<'_>> = values.iter().map(|(v, t)| (&**v as &(dyn ToSql + Sync), t.clone())).collect();
    let mut heads: Vec<Head> = link.rows_planned(&sql, &params).await?.iter().map(read).collect::<Result<_>>()?;
    // A number may stand for another key by chance.
    heads.retain(|h| query.matches.is_empty() || query.matches(h));
    Ok(heads)
}

/// How many sessions there are in each state. Most are active: they are what is left of all.
pub(super) async fn count(link: &Link) -> Result<Vec<(Status, u64)>> {
    let sql = "SELECT status, count(*) FROM tenure_head WHERE status <> 'active' GROUP BY status \
        UNION ALL SELECT 'all', count(*) FROM tenure_head";
    let table = || "postgres, table tenure_head".to_owned();
    let mut counts = Vec::new();
    for row in &link.rows(sql, &[]).await? {
        counts.push((column::<String>(row, 0, table)?, column::<i64>(row, 1, table)?));
    }
    let all = counts.iter().find(|(word, _)| word == "all").map_or(0, |(_, n)| *n);
    Ok(Status::counts(all, &counts))
}

/// A card as it was stored, with the lineage and the hash over the log as they are now: see the migrations.
fn read(row: &Row) -> Result<Head> {
    let table = || "postgres, table tenure_head".to_owned();
    let (tenant, session): (&str, &str) = (column(row, 0, table)?, column(row, 1, table)?);
    let place = || format!("postgres, session {tenant}/{session}, card");
    let mut head: Head = serde_json::from_str(column(row, 2, place)?).map_err(|e| Error::corrupt(place(), e))?;
    head.first = column::<i64>(row, 3, place)?.unsigned_abs();
    head.parent = match column::<Option<&str>>(row, 4, place)? {
        None => None,
        Some(parent) => Some(Parent {
            session: SessionId::new(parent).map_err(|e| Error::corrupt(place(), e))?,
            seq: column::<i64>(row, 5, place)?.unsigned_abs(),
            mark: serde_json::from_str(column(row, 6, place)?).map_err(|e| Error::corrupt(place(), e))?,
        }),
    };
    head.log = column::<Option<i64>>(row, 7, place)?.map(|log| LogHash(log.cast_unsigned()));
    Ok(head)
}

/// What a conversation of a user is looked up by: 64 bits of a hash, where an index with the names and the whole hash would be
/// several times as large. The few that share it by chance are told apart by the other conditions.
pub(super) fn talk(tenant: &Tenant, user: &User, hash: &VisibleHash) -> i64 {
    let mut all = blake3::Hasher::new();
    for name in [tenant.as_str(), user.as_str()] {
        // Names have no control characters.
        all.update(name.as_bytes()).update(&[0]);
    }
    all.update(&hash.0);
    let mut bits = [0; 8];
    bits.copy_from_slice(&all.finalize().as_bytes()[..8]);
    i64::from_le_bytes(bits)
}

/// A statement of fixed pieces, and what is bound to it.
struct Built {
    sql: String,
    values: Vec<(Box<dyn ToSql + Send + Sync>, Type)>,
}

impl Built {
    fn text(&mut self, piece: &'static str) -> &mut Self {
        self.sql.push_str(piece);
        self
    }

    fn bind(&mut self, value: impl ToSql + Send + Sync + 'static, kind: Type) -> &mut Self {
        self.values.push((Box::new(value), kind));
        self.sql.push_str(&format!("${}", self.values.len()));
        self
    }
}

fn build(query: &Query) -> Built {
    let mut b = Built { sql: format!("SELECT {CARD} FROM "), values: Vec::new() };
    let keys = |hashes: &[VisibleHash]| -> Vec<i64> {
        match &query.whose {
            Whose::User(tenant, user) => hashes.iter().map(|h| talk(tenant, user, h)).collect(),
            _ => Vec::new(),
        }
    };
    let (talks, matches) = (keys(&query.hashes), keys(&query.matches));
    let by_talk = !talks.is_empty() || !matches.is_empty();
    // The offset keeps the other conditions out: without statistics, the server would rather go through the whole tenant.
    if !talks.is_empty() {
        b.text("(SELECT * FROM tenure_head WHERE talk = ANY(").bind(talks, Type::INT8_ARRAY);
        b.text(") OFFSET 0) head WHERE true");
    } else if !matches.is_empty() {
        b.text("(SELECT * FROM tenure_head WHERE matches IS NOT NULL AND matches && ").bind(matches, Type::INT8_ARRAY);
        b.text(" OFFSET 0) head WHERE true");
    } else {
        // True of every card, and what lets the indexes for lists be used: see the migration.
        b.text("tenure_head WHERE first > 0");
    }
    match &query.whose {
        Whose::User(tenant, user) => {
            b.text(" AND tenant = ").bind(tenant.to_string(), Type::TEXT);
            b.text(" AND \"user\" = ").bind(user.to_string(), Type::TEXT);
        }
        Whose::Tenant(tenant) => {
            b.text(" AND tenant = ").bind(tenant.to_string(), Type::TEXT);
        }
        Whose::Everyone => {}
    }
    if let Some(assistant) = &query.assistant {
        b.text(" AND assistant = ").bind(assistant.clone(), Type::TEXT);
    }
    if let Some(thread) = &query.thread {
        let beginning: String = thread.chars().take(THREAD_CHARS).collect();
        b.text(" AND left(thread, 200) = ").bind(beginning, Type::TEXT);
        b.text(" AND thread = ").bind(thread.clone(), Type::TEXT);
    }
    if !query.status.is_empty() {
        let status: Vec<&'static str> = query.status.iter().map(|s| s.as_str()).collect();
        b.text(" AND status = ANY(").bind(status, Type::TEXT_ARRAY).text(")");
    }
    if let Some(at) = query.created_after {
        b.text(" AND created_at >= ").bind(micros_up(at), Type::INT8);
    }
    if let Some(at) = query.created_before {
        b.text(" AND created_at < ").bind(micros_up(at), Type::INT8);
    }
    let labels = query.labels();
    if !labels.is_empty() {
        b.text(" AND labels @> ").bind(labels, Type::TEXT_ARRAY);
    }
    if let Some(title) = query.folded_title() {
        b.text(" AND position(").bind(title, Type::TEXT).text(" IN title) > 0");
    }
    if let Some(parent) = &query.parent {
        b.text(" AND parent = ").bind(parent.to_string(), Type::TEXT);
    }
    if !query.hashes.is_empty() {
        let hashes: Vec<Vec<u8>> = query.hashes.iter().map(|h| h.0.to_vec()).collect();
        b.text(" AND hash = ANY(").bind(hashes, Type::BYTEA_ARRAY).text(")");
    }
    if let Some(at) = query.due_before {
        b.text(" AND due_at < ").bind(micros_up(at), Type::INT8);
    }
    if let Some(at) = query.lease_before {
        b.text(" AND lease_until < ").bind(micros_up(at), Type::INT8);
    }
    if let Some(cursor) = &query.cursor {
        let at = micros(cursor.active_at);
        b.text(" AND active_at >> 26 <= ").bind(at >> 26, Type::INT8);
        b.text(" AND (active_at, session) < (").bind(at, Type::INT8);
        b.text(", ").bind(cursor.session.to_string(), Type::TEXT).text(")");
    }
    b.text(match query.order {
        Order::Newest if by_talk => " ORDER BY active_at DESC, session DESC",
        // The slot first, for the index: see the migration. It does not change the order.
        Order::Newest => " ORDER BY active_at >> 26 DESC, active_at DESC, session DESC",
        Order::Oldest => " ORDER BY active_at, session",
        Order::Due => " ORDER BY due_at, session",
    });
    b.text(" LIMIT ").bind(row_limit(query.limit), Type::INT8);
    b.text(" OFFSET ").bind(row_limit(query.offset), Type::INT8);
    b
}

/// A bound in whole microseconds: what is at or after it, or before it, is the same for whole microseconds.
fn micros_up(at: Timestamp) -> i64 {
    let up = (at.as_nanosecond() + 999).div_euclid(1000);
    i64::try_from(up).expect("a timestamp's microseconds fit")
}
