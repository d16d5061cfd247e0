//! Reading and querying heads.
//!
//! Invariant: a query selects exactly the sessions that [`SessionQuery::matches`] accepts; every value in
//! SQL is a bound parameter.

use crate::store::contract::HeadCheck;
use crate::store::query::{HeadPage, OwnerFilter, SessionOrder, SessionQuery};
use crate::store::sqlite::database::Database;
use crate::store::sqlite::fault::StoreResult;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Seq, SessionId, SessionKey, Tenant};
use crate::types::status::Status;
use jiff::Timestamp;
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Rows, Transaction, TransactionBehavior, params, params_from_iter};
use std::fmt::Display;

/// Serializes a head as it is stored.
pub(super) fn encode(head: &Head) -> String {
    head.to_json()
}

/// Deserializes a stored head; damage is [`Error::Corrupt`].
pub(super) fn decode(file: &Database, tenant: impl Display, session: impl Display, head_json: &str) -> Result<Head> {
    serde_json::from_str(head_json)
        .map_err(|e| Error::corrupt_from(format!("{file}, head of session {tenant}/{session}"), e))
}

pub(super) fn head(conn: &Connection, file: &Database, key: &SessionKey) -> StoreResult<Option<Head>> {
    match head_if_changed(conn, file, key, "")? {
        HeadCheck::Current(head) => Ok(head.map(|head| *head)),
        HeadCheck::Unchanged => Ok(None),
    }
}

/// Reads a head, unless the stored text equals `known`.
pub(super) fn head_if_changed(
    conn: &Connection,
    file: &Database,
    key: &SessionKey,
    known: &str,
) -> StoreResult<HeadCheck> {
    let mut statement = conn.prepare_cached("SELECT head_json FROM head WHERE tenant = ?1 AND session = ?2")?;
    let mut rows = statement.query([key.tenant.as_str(), key.session.as_str()])?;
    let Some(row) = rows.next()? else { return Ok(HeadCheck::Current(None)) };
    let head_json = row.get_ref(0)?.as_str().map_err(rusqlite::Error::from)?;
    if head_json == known && !known.is_empty() {
        return Ok(HeadCheck::Unchanged);
    }
    Ok(HeadCheck::Current(Some(Box::new(decode(file, &key.tenant, &key.session, head_json)?))))
}

/// Returns the last sequence number of a session's log, or `None` if the session does not exist.
pub(super) fn seq(conn: &Connection, tenant: &Tenant, session: &SessionId) -> StoreResult<Option<Seq>> {
    let mut statement = conn.prepare_cached("SELECT seq FROM head WHERE tenant = ?1 AND session = ?2")?;
    let seq = statement.query_row([tenant.as_str(), session.as_str()], |r| r.get::<_, i64>(0));
    Ok(seq.optional()?.map(|seq| seq as Seq))
}

/// Maximum number of sessions with a label or thread for which a query without a scan bound uses
/// that label's or thread's index.
const MAX_NARROW_SCAN: usize = 10_000;

pub(super) fn heads(conn: &Connection, file: &Database, query: &SessionQuery) -> StoreResult<Vec<Head>> {
    let narrow_scan = NarrowScan::choose(conn, query, MAX_NARROW_SCAN)?;
    select_matching(conn, file, query, narrow_scan.as_ref())
}

/// Lists the heads of all tenants in the order of their keys.
pub(super) fn heads_after(
    conn: &Connection,
    file: &Database,
    after: Option<&SessionKey>,
    limit: usize,
) -> StoreResult<Vec<Head>> {
    let tenant = after.map_or("", |key| key.tenant.as_str());
    let session = after.map_or("", |key| key.session.as_str());
    let mut statement = conn.prepare_cached(
        "SELECT tenant, session, head_json FROM head WHERE (tenant, session) > (?1, ?2)
        ORDER BY tenant, session LIMIT ?3",
    )?;
    let rows = statement.query(params![tenant, session, i64::try_from(limit).unwrap_or(i64::MAX)])?;
    read_heads(rows, file)
}

/// Returns the newest matching heads, scanning at most `max_scan`.
pub(super) fn page(conn: &Connection, file: &Database, query: &SessionQuery, max_scan: usize) -> StoreResult<HeadPage> {
    // Both statements read one snapshot.
    let _snapshot = Transaction::new_unchecked(conn, TransactionBehavior::Deferred)?;
    match NarrowScan::choose(conn, query, max_scan)? {
        narrow_scan if narrow_scan.is_some() || HeadSelect::is_indexed(query) => {
            Ok(HeadPage { heads: select_matching(conn, file, query, narrow_scan.as_ref())?, scan_stopped_at: None })
        }
        _ => scan(conn, file, query, max_scan),
    }
}

/// Scans heads in the order of their activity, newest first, up to `max_scan`.
fn scan(conn: &Connection, file: &Database, query: &SessionQuery, max_scan: usize) -> StoreResult<HeadPage> {
    let HeadSelect { sql, params } = HeadSelect::scan(query, max_scan);
    let mut statement = conn.prepare_cached(&sql)?;
    let mut rows = statement.query(params_from_iter(params))?;
    let mut heads = Vec::new();
    let mut scanned = 0;
    let mut matched = 0;
    let mut last = None;
    while heads.len() < query.limit {
        let Some(row) = rows.next()? else { break };
        scanned += 1;
        let text = |i| row.get_ref(i).and_then(|v| v.as_str_or_null().map_err(rusqlite::Error::from));
        if scanned == max_scan {
            last = Some((row.get::<_, i64>(3)?, text(1)?.unwrap_or_default().to_owned()));
        }
        let Some(head_json) = text(2)? else { continue };
        matched += 1;
        if matched > query.offset {
            heads.push(decode(file, text(0)?.unwrap_or_default(), text(1)?.unwrap_or_default(), head_json)?);
        }
    }
    let stopped = match last.filter(|_| heads.len() < query.limit) {
        Some((at, session)) => Some(format!("{at}~{session}").parse()?),
        None => None,
    };
    Ok(HeadPage { heads, scan_stopped_at: stopped })
}

/// A selective condition, by whose index the matching heads are looked up.
pub(super) enum NarrowScan {
    Label(String),
    Thread,
}

impl NarrowScan {
    /// Chooses the condition that the fewest heads satisfy. Returns `None` if each condition
    /// selects more than `max_heads` heads, or if another index serves the query.
    pub fn choose(conn: &Connection, query: &SessionQuery, max_heads: usize) -> StoreResult<Option<Self>> {
        let (OwnerFilter::User(tenant, _) | OwnerFilter::Tenant(tenant)) = &query.owner else { return Ok(None) };
        if HeadSelect::is_indexed(query) {
            return Ok(None);
        }
        let max_count = i64::try_from(max_heads).unwrap_or(i64::MAX);
        let mut best = None;
        let mut fewest = max_count.saturating_add(1);
        let mut count = |sql: &str, value: &str, narrow_scan: Self| -> StoreResult<()> {
            let n: i64 = conn.prepare_cached(sql)?.query_row(params![tenant.as_str(), value, fewest], |r| r.get(0))?;
            if n < fewest {
                (best, fewest) = (Some(narrow_scan), n);
            }
            Ok(())
        };
        if let Some(thread) = &query.thread {
            let sql = "SELECT count(*) FROM (SELECT 1 FROM head WHERE tenant = ?1 AND thread = ?2 LIMIT ?3)";
            count(sql, thread, Self::Thread)?;
        }
        for label in query.labels().into_iter().take(MAX_COUNTED_LABELS) {
            let sql = "SELECT count(*) FROM (SELECT 1 FROM head_label WHERE tenant = ?1 AND label = ?2 LIMIT ?3)";
            count(sql, &label.clone(), Self::Label(label))?;
        }
        Ok(best)
    }
}

/// Returns the matching heads of a query, by the index of `narrow_scan` if it is given.
fn select_matching(
    conn: &Connection,
    file: &Database,
    query: &SessionQuery,
    narrow_scan: Option<&NarrowScan>,
) -> StoreResult<Vec<Head>> {
    let HeadSelect { sql, params } = HeadSelect::new(query, narrow_scan);
    let mut statement = conn.prepare_cached(&sql)?;
    let rows = statement.query(params_from_iter(params))?;
    read_heads(rows, file)
}

/// Reads rows of tenant, session and serialized head.
fn read_heads(mut rows: Rows<'_>, file: &Database) -> StoreResult<Vec<Head>> {
    let mut heads = Vec::new();
    while let Some(row) = rows.next()? {
        let text = |i| row.get_ref(i).and_then(|v| v.as_str().map_err(rusqlite::Error::from));
        heads.push(decode(file, text(0)?, text(1)?, text(2)?)?);
    }
    Ok(heads)
}

/// Counts the sessions by status. Most are active: their number is the total minus the others,
/// which the index counts.
pub(super) fn count(conn: &Connection) -> StoreResult<Vec<(Status, u64)>> {
    let sql = "SELECT status, count(*) FROM head WHERE status <> 'active' GROUP BY status";
    let mut statement = conn.prepare_cached(sql)?;
    let rows = statement.query_map([], |r| Ok((r.get::<_, String>(0)?, r.get::<_, i64>(1)?)))?;
    let inactive = rows.collect::<rusqlite::Result<Vec<_>>>()?;
    let total: i64 = conn.prepare_cached("SELECT count(*) FROM head")?.query_row([], |r| r.get(0))?;
    Ok(Status::counts(total, &inactive))
}

/// A query in SQL, composed of the fragments below; every value is a bound parameter.
pub(super) struct HeadSelect {
    pub sql: String,
    pub params: Vec<Value>,
}

/// Maximum number of labels of a query that are counted to find the most selective one.
const MAX_COUNTED_LABELS: usize = 16;

impl HeadSelect {
    pub fn new(query: &SessionQuery, narrow_scan: Option<&NarrowScan>) -> Self {
        let mut select = Self { sql: "SELECT tenant, session, head_json FROM head".to_owned(), params: Vec::new() };
        select.choose_index(query, narrow_scan);
        select.sql.push_str(" WHERE true");
        select.add_scope(query);
        select.add_filters(query);
        if let (Some(NarrowScan::Label(label)), OwnerFilter::User(tenant, _) | OwnerFilter::Tenant(tenant)) =
            (narrow_scan, &query.owner)
        {
            select.and("id IN (SELECT head_id FROM head_label WHERE tenant = ?", tenant.to_string());
            select.and("label = ?)", label.clone());
        }
        select.sql.push_str(match query.order {
            SessionOrder::Newest => " ORDER BY active_at DESC, session DESC, tenant DESC",
            SessionOrder::Oldest => " ORDER BY active_at, session, tenant",
            SessionOrder::Due => " ORDER BY due_at, tenant, session",
        });
        select.sql.push_str(" LIMIT ? OFFSET ?");
        for n in [query.limit, query.offset] {
            select.params.push(i64::try_from(n).unwrap_or(i64::MAX).into());
        }
        select
    }

    /// Selects the heads in the order of their activity, at most `max_scan`; the serialized head is
    /// NULL where the filters do not match.
    pub fn scan(query: &SessionQuery, max_scan: usize) -> Self {
        let mut select = Self { sql: "SELECT tenant, session, CASE WHEN true".to_owned(), params: Vec::new() };
        select.add_filters(query);
        select.sql.push_str(" THEN head_json END, active_at FROM head WHERE true");
        select.add_scope(query);
        select.sql.push_str(" ORDER BY active_at DESC, session DESC, tenant DESC LIMIT ?");
        select.params.push(i64::try_from(max_scan).unwrap_or(i64::MAX).into());
        select
    }

    /// Returns whether the query names a value that few sessions have, whatever its other
    /// conditions are.
    fn is_indexed(query: &SessionQuery) -> bool {
        !query.matches.is_empty() || !query.hashes.is_empty() || !query.sessions.is_empty() || query.parent.is_some()
    }

    /// Forces an index: without statistics the planner may prefer one in the right order to one
    /// that finds the few matching rows.
    fn choose_index(&mut self, query: &SessionQuery, narrow_scan: Option<&NarrowScan>) {
        let index = match query.owner {
            OwnerFilter::AllTenants => return,
            // The few matching rows are looked up by rowid.
            _ if !query.matches.is_empty() => " NOT INDEXED",
            _ if !query.hashes.is_empty() => " INDEXED BY head_visible_hash",
            _ if !query.sessions.is_empty() => " INDEXED BY head_key",
            _ if query.parent.is_some() => " INDEXED BY head_parent",
            _ => match narrow_scan {
                Some(NarrowScan::Label(_)) => " NOT INDEXED",
                Some(NarrowScan::Thread) => " INDEXED BY head_thread",
                None => return,
            },
        };
        self.sql.push_str(index);
    }

    /// Adds the owner and cursor conditions, which the indexes on activity serve.
    fn add_scope(&mut self, query: &SessionQuery) {
        match &query.owner {
            OwnerFilter::User(tenant, user) => {
                self.and("tenant = ?", tenant.to_string());
                self.and("user = ?", user.to_string());
            }
            OwnerFilter::Tenant(tenant) => self.and("tenant = ?", tenant.to_string()),
            OwnerFilter::AllTenants => {}
        }
        if let (Some(cursor), SessionOrder::Newest) = (&query.cursor, query.order) {
            self.and("(active_at, session) < (?, ", cursor.active_at.as_microsecond());
            self.sql.push_str("?)");
            self.params.push(cursor.session.to_string().into());
        }
    }

    /// Adds all conditions except owner and cursor.
    fn add_filters(&mut self, query: &SessionQuery) {
        self.and_if("assistant = ?", query.assistant.clone());
        self.and_if("thread = ?", query.thread.clone());
        self.and_any("session IN (SELECT value FROM json_each(?))", query.sessions.iter().map(|s| s.to_string()));
        self.and_if("parent = ?", query.parent.as_ref().map(|p| p.to_string()));
        self.and_if("created_at >= ?", query.created_after.map(micros));
        self.and_if("created_at < ?", query.created_before.map(micros));
        self.and_if("due_at < ?", query.due_before.map(micros));
        self.and_if("lease_until < ?", query.lease_before.map(micros));
        self.and_if("instr(title, ?) > 0", query.folded_title().filter(|t| !t.is_empty()));
        self.add_status(query);
        self.and_any(
            "visible_hash IN (SELECT unhex(value) FROM json_each(?))",
            query.hashes.iter().map(|h| h.to_string()),
        );
        if !query.matches.is_empty() {
            let keys = "SELECT unhex(value) FROM json_each(?)";
            let values = serde_json::Value::from(query.matches.iter().map(|h| h.to_string()).collect::<Vec<_>>());
            let tenant = match &query.owner {
                OwnerFilter::User(tenant, _) | OwnerFilter::Tenant(tenant) => tenant.to_string(),
                OwnerFilter::AllTenants => String::new(),
            };
            self.and("id IN (SELECT head_id FROM head_match WHERE tenant = ?", tenant);
            self.sql.push_str(&format!(" AND match_key IN ({keys}))"));
            self.params.push(values.to_string().into());
        }
        // No wanted label may be missing.
        let has_label =
            "SELECT 1 FROM head_label WHERE tenant = head.tenant AND label = wanted_label.value AND head_id = head.id";
        let missing_label = format!("SELECT 1 FROM json_each(?) wanted_label WHERE NOT EXISTS ({has_label})");
        self.and_any(&format!("NOT EXISTS ({missing_label})"), query.labels().into_iter());
    }

    /// Adds the condition on the status: the stored one, or the effective one if the query has cutoffs.
    fn add_status(&mut self, query: &SessionQuery) {
        let wanted = query.status.iter().map(|s| s.as_str().to_owned());
        let Some(expiry) = query.expiry.as_ref().filter(|_| !query.status.is_empty()) else {
            return self.and_any("status IN (SELECT value FROM json_each(?))", wanted);
        };
        let (names, cutoffs, default) = expiry.in_micros();
        let by_assistant: serde_json::Map<_, _> = names.into_iter().zip(cutoffs.into_iter().map(Into::into)).collect();
        self.sql.push_str(
            " AND CASE WHEN status = 'active' AND active_at < \
             coalesce((SELECT value FROM json_each(?) WHERE key = assistant), ?) THEN 'expired' ELSE status END \
             IN (SELECT value FROM json_each(?))",
        );
        self.params.push(serde_json::Value::Object(by_assistant).to_string().into());
        self.params.push(default.into());
        self.params.push(serde_json::Value::from(wanted.collect::<Vec<_>>()).to_string().into());
    }

    fn and(&mut self, condition: &str, value: impl Into<Value>) {
        self.sql.push_str(" AND ");
        self.sql.push_str(condition);
        self.params.push(value.into());
    }

    fn and_if(&mut self, condition: &str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.and(condition, value);
        }
    }

    /// Adds a condition on a JSON list, unless the list is empty.
    fn and_any(&mut self, condition: &str, values: impl Iterator<Item = String>) {
        let values: Vec<_> = values.collect();
        if !values.is_empty() {
            self.and(condition, serde_json::Value::from(values).to_string());
        }
    }
}

/// Rounds a bound up to the first whole microsecond that is not before it.
fn micros(bound: Timestamp) -> i64 {
    let micros = bound.as_microsecond();
    let is_truncated = Timestamp::from_microsecond(micros).is_ok_and(|t| t < bound);
    if is_truncated { micros + 1 } else { micros }
}
