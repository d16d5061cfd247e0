//! Reading and querying heads.
//!
//! Invariant: a query selects exactly the sessions that [`SessionQuery::matches`] accepts; every value in
//! SQL is a bound parameter.

use crate::store::postgres::connection::{Param, PgConnection, RowSource};
use crate::store::postgres::row::{column, micros, row_limit};
use crate::store::query::{HeadPage, OwnerFilter, SessionOrder, SessionQuery};
use crate::types::digest::VisibleHash;
use crate::types::entry::Parent;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{SessionId, SessionKey, Tenant, User};
use crate::types::log_hash::LogHash;
use crate::types::status::Status;
use jiff::Timestamp;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

/// The columns that [`read_head`] expects.
const HEAD_COLUMNS: &str = "tenant, session, head_json, first_seq, parent, parent_seq, parent_digest, log_hash";

/// Number of characters of a thread's name that are indexed (see the migration).
const THREAD_CHARS: usize = 200;

pub(super) async fn head(connection: &PgConnection, key: &SessionKey) -> Result<Option<Head>> {
    let sql = format!("SELECT {HEAD_COLUMNS} FROM tenure_head WHERE tenant = $1 AND session = $2");
    let params: [Param<'_>; 2] = [(&key.tenant.as_str(), Type::TEXT), (&key.session.as_str(), Type::TEXT)];
    connection.rows(&sql, &params).await?.first().map(read_head).transpose()
}

/// Lists the heads of all tenants in the order of their keys.
pub(super) async fn heads_after(
    source: &impl RowSource,
    after: Option<&SessionKey>,
    limit: usize,
) -> Result<Vec<Head>> {
    let tenant = after.map(|key| key.tenant.as_str());
    let session = after.map(|key| key.session.as_str());
    let sql = format!(
        "SELECT {HEAD_COLUMNS} FROM tenure_head
        WHERE $1 IS NULL OR (tenant, session) > ($1, $2) ORDER BY tenant, session LIMIT $3"
    );
    let params: [Param<'_>; 3] = [(&tenant, Type::TEXT), (&session, Type::TEXT), (&row_limit(limit), Type::INT8)];
    source.rows(&sql, &params).await?.iter().map(read_head).collect()
}

/// Maximum number of sessions with a label for which a query without a scan bound uses that label's
/// index.
const MAX_NARROW_SCAN: usize = 10_000;

/// Maximum number of labels of a query that are counted to find the most selective one.
const MAX_COUNTED_LABELS: usize = 16;

/// Number of heads in the first window of a scan. Each further window is four times as large.
const FIRST_WINDOW: usize = 256;

pub(super) async fn heads(connection: &PgConnection, query: &SessionQuery) -> Result<Vec<Head>> {
    if is_unsatisfiable(query) {
        return Ok(Vec::new());
    }
    let narrow_label = most_selective_label(connection, query, MAX_NARROW_SCAN).await?;
    select_matching(connection, query, narrow_label.as_deref()).await
}

/// Returns the newest matching heads, scanning at most `max_scan`.
pub(super) async fn page(connection: &PgConnection, query: &SessionQuery, max_scan: usize) -> Result<HeadPage> {
    if is_unsatisfiable(query) {
        return Ok(HeadPage::default());
    }
    let query = &SessionQuery { order: SessionOrder::Newest, ..query.clone() };
    let narrow_label = most_selective_label(connection, query, max_scan).await?;
    if narrow_label.is_some() || is_indexed(query) || matches!(query.owner, OwnerFilter::AllTenants) {
        return Ok(HeadPage {
            heads: select_matching(connection, query, narrow_label.as_deref()).await?,
            scan_stopped_at: None,
        });
    }
    scan(connection, query.clone(), max_scan).await
}

/// Returns whether the query cannot match anything: text with a NUL character is never stored.
fn is_unsatisfiable(query: &SessionQuery) -> bool {
    let has_nul = |s: &Option<String>| s.as_ref().is_some_and(|s| s.contains('\0'));
    query.limit == 0 || has_nul(&query.assistant) || has_nul(&query.thread)
}

/// Returns whether the query names a value that few sessions have, whatever its other conditions
/// are.
fn is_indexed(query: &SessionQuery) -> bool {
    !query.hashes.is_empty()
        || !query.matches.is_empty()
        || !query.sessions.is_empty()
        || query.parent.is_some()
        || query.thread.is_some()
}

/// Scans heads in the order of their activity, newest first, up to `max_scan`.
async fn scan(connection: &PgConnection, mut query: SessionQuery, max_scan: usize) -> Result<HeadPage> {
    let mut page = HeadPage::default();
    let mut remaining_scan = max_scan;
    let mut window = FIRST_WINDOW;
    let mut matched = 0;
    while remaining_scan > 0 && page.heads.len() < query.limit {
        window = window.min(remaining_scan);
        let rows = connection.run(&build_scan(&query, window)).await?;
        for row in &rows {
            let location = || "postgres, table tenure_head".to_owned();
            if page.heads.len() < query.limit && column::<Option<&str>>(row, 2, location)?.is_some() {
                matched += 1;
                if matched > query.offset {
                    page.heads.push(read_head(row)?);
                }
            }
        }
        let Some(last) = rows.last().filter(|_| rows.len() == window) else { return Ok(page) };
        let location = || "postgres, table tenure_head".to_owned();
        let active_at: i64 = column(last, 8, location)?;
        let session: &str = column(last, 1, location)?;
        query.cursor = Some(format!("{active_at}~{session}").parse()?);
        (remaining_scan, window) = (remaining_scan - window, window * 4);
    }
    if page.heads.len() < query.limit {
        page.scan_stopped_at = query.cursor;
    }
    Ok(page)
}

/// Chooses the label that the fewest sessions of the tenant have. Returns `None` if each label
/// selects more than `max_sessions` sessions, or if another index serves the query.
async fn most_selective_label(
    connection: &PgConnection,
    query: &SessionQuery,
    max_sessions: usize,
) -> Result<Option<String>> {
    let labels: Vec<String> = query.labels().into_iter().take(MAX_COUNTED_LABELS).collect();
    let (OwnerFilter::User(tenant, _) | OwnerFilter::Tenant(tenant)) = &query.owner else { return Ok(None) };
    if labels.is_empty() || is_indexed(query) {
        return Ok(None);
    }
    let sql = "SELECT wanted_label, (
            SELECT count(*) FROM (
                SELECT 1 FROM tenure_head_label l WHERE l.tenant = $1 AND l.label = wanted_label LIMIT $3
            ) counted
        ) FROM unnest($2) AS wanted_label";
    let count_limit = row_limit(max_sessions).saturating_add(1);
    let params: [Param<'_>; 3] =
        [(&tenant.as_str(), Type::TEXT), (&labels, Type::TEXT_ARRAY), (&count_limit, Type::INT8)];
    let location = || "postgres, table tenure_head_label".to_owned();
    let mut counts = Vec::new();
    for row in &connection.rows(sql, &params).await? {
        counts.push((column::<i64>(row, 1, location)?, column::<String>(row, 0, location)?));
    }
    Ok(counts.into_iter().min().filter(|(n, _)| *n < count_limit).map(|(_, label)| label))
}

/// Returns the matching heads of a query, by the index of the label `narrow_label` if it is given.
async fn select_matching(
    connection: &PgConnection,
    query: &SessionQuery,
    narrow_label: Option<&str>,
) -> Result<Vec<Head>> {
    let mut heads: Vec<Head> =
        connection.run(&build(query, narrow_label)).await?.iter().map(read_head).collect::<Result<_>>()?;
    // Two keys may have the same 64-bit digest.
    heads.retain(|h| query.matches.is_empty() || query.matches(h));
    Ok(heads)
}

/// Counts the sessions by status. Most are active: their number is the total minus the others,
/// which the index counts.
pub(super) async fn count(connection: &PgConnection) -> Result<Vec<(Status, u64)>> {
    let sql = "SELECT status, count(*) FROM tenure_head WHERE status <> 'active' GROUP BY status \
        UNION ALL SELECT 'all', count(*) FROM tenure_head";
    let table = || "postgres, table tenure_head".to_owned();
    let mut counts = Vec::new();
    for row in &connection.rows(sql, &[]).await? {
        counts.push((column::<String>(row, 0, table)?, column::<i64>(row, 1, table)?));
    }
    let total = counts.iter().find(|(status, _)| status == "all").map_or(0, |(_, n)| *n);
    Ok(Status::counts(total, &counts))
}

/// Deserializes a stored head. Lineage and log hash are taken from their own columns, which are
/// current (see the migration).
fn read_head(row: &Row) -> Result<Head> {
    let table = || "postgres, table tenure_head".to_owned();
    let tenant: &str = column(row, 0, table)?;
    let session: &str = column(row, 1, table)?;
    let location = || format!("postgres, session {tenant}/{session}, head");
    let mut head: Head =
        serde_json::from_str(column(row, 2, location)?).map_err(|e| Error::corrupt_from(location(), e))?;
    head.first = column::<i64>(row, 3, location)?.unsigned_abs();
    head.parent = match column::<Option<&str>>(row, 4, location)? {
        None => None,
        Some(parent) => Some(Parent {
            session: SessionId::new(parent).map_err(|e| Error::corrupt_from(location(), e))?,
            seq: column::<i64>(row, 5, location)?.unsigned_abs(),
            digest: serde_json::from_str(column(row, 6, location)?).map_err(|e| Error::corrupt_from(location(), e))?,
        }),
    };
    head.log_hash = LogHash(column::<i64>(row, 7, location)?.cast_unsigned());
    Ok(head)
}

/// The lookup key of a user's conversation: a 64-bit digest, because an index of the names and the
/// full hash would be several times as large. Collisions are resolved by the other conditions of
/// the query (D-036).
pub(super) fn conversation_key(tenant: &Tenant, user: &User, hash: &VisibleHash) -> i64 {
    let mut hasher = blake3::Hasher::new();
    for name in [tenant.as_str(), user.as_str()] {
        // A separator that cannot occur: names contain no control characters.
        hasher.update(name.as_bytes()).update(&[0]);
    }
    hasher.update(&hash.0);
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    i64::from_le_bytes(bytes)
}

/// A builder for SQL: fixed fragments and bound values.
struct SqlBuilder {
    sql: String,
    values: Vec<(Box<dyn ToSql + Send + Sync>, Type)>,
}

impl SqlBuilder {
    fn text(&mut self, fragment: &'static str) -> &mut Self {
        self.sql.push_str(fragment);
        self
    }

    fn bind(&mut self, value: impl ToSql + Send + Sync + 'static, kind: Type) -> &mut Self {
        self.values.push((Box::new(value), kind));
        self.sql.push_str(&format!("${}", self.values.len()));
        self
    }
}

impl PgConnection {
    async fn run(&self, SqlBuilder { sql, values }: &SqlBuilder) -> Result<Vec<Row>> {
        let params: Vec<Param<'_>> = values.iter().map(|(v, t)| (&**v as &(dyn ToSql + Sync), t.clone())).collect();
        self.rows_planned(sql, &params).await
    }
}

/// Selects the heads in the order of their activity, at most `window`; the serialized head is NULL
/// where the filters do not match.
fn build_scan(query: &SessionQuery, window: usize) -> SqlBuilder {
    let mut b = SqlBuilder { sql: "SELECT tenant, session, CASE WHEN true".to_owned(), values: Vec::new() };
    add_filters(&mut b, query);
    b.text(" THEN head_json END, first_seq, parent, parent_seq, parent_digest, log_hash, active_at");
    b.text(" FROM tenure_head WHERE first_seq > 0");
    add_scope(&mut b, query);
    b.text(" ORDER BY active_at >> 26 DESC, active_at DESC, session DESC LIMIT ").bind(row_limit(window), Type::INT8);
    b
}

/// Builds the SQL of a query, with the index lookup first.
fn build(query: &SessionQuery, narrow_label: Option<&str>) -> SqlBuilder {
    let mut b = SqlBuilder { sql: format!("SELECT {HEAD_COLUMNS} FROM "), values: Vec::new() };
    let keys = |hashes: &[VisibleHash]| -> Vec<i64> {
        match &query.owner {
            OwnerFilter::User(tenant, user) => hashes.iter().map(|h| conversation_key(tenant, user, h)).collect(),
            _ => Vec::new(),
        }
    };
    let conversation_keys = keys(&query.hashes);
    let match_keys = keys(&query.matches);
    let by_id =
        |tenant: &Tenant| (tenant.to_string(), query.sessions.iter().map(|s| s.to_string()).collect::<Vec<_>>());
    let ids = match &query.owner {
        OwnerFilter::User(tenant, _) | OwnerFilter::Tenant(tenant) if !query.sessions.is_empty() => Some(by_id(tenant)),
        _ => None,
    };
    let is_lookup = !conversation_keys.is_empty() || !match_keys.is_empty() || ids.is_some() || narrow_label.is_some();
    // OFFSET 0 is an optimization barrier: without statistics, the planner would prefer to scan the
    // whole tenant.
    if !conversation_keys.is_empty() {
        b.text("(SELECT * FROM tenure_head WHERE conversation_key = ANY(").bind(conversation_keys, Type::INT8_ARRAY);
        b.text(") OFFSET 0) head WHERE true");
    } else if !match_keys.is_empty() {
        b.text("(SELECT * FROM tenure_head WHERE match_keys IS NOT NULL AND match_keys && ")
            .bind(match_keys, Type::INT8_ARRAY);
        b.text(" OFFSET 0) head WHERE true");
    } else if let Some((tenant, ids)) = ids {
        b.text("(SELECT * FROM tenure_head WHERE tenant = ").bind(tenant, Type::TEXT);
        b.text(" AND session = ANY(").bind(ids, Type::TEXT_ARRAY).text(") OFFSET 0) head WHERE true");
    } else if let (Some(label), OwnerFilter::User(tenant, _) | OwnerFilter::Tenant(tenant)) =
        (narrow_label, &query.owner)
    {
        b.text("(SELECT h.* FROM tenure_head_label l");
        b.text(" JOIN tenure_head h ON h.tenant = l.tenant AND h.session = l.session");
        b.text(" WHERE l.tenant = ").bind(tenant.to_string(), Type::TEXT);
        b.text(" AND l.label = ").bind(label.to_owned(), Type::TEXT).text(" OFFSET 0) head WHERE true");
    } else {
        // True for every head; needed to match the predicate of the partial indexes for lists (see
        // the migration).
        b.text("tenure_head WHERE first_seq > 0");
    }
    add_scope(&mut b, query);
    add_filters(&mut b, query);
    b.text(match query.order {
        SessionOrder::Newest if is_lookup => " ORDER BY active_at DESC, session DESC",
        // The time slot comes first to match the index (see the migration). It does not change the
        // order.
        SessionOrder::Newest => " ORDER BY active_at >> 26 DESC, active_at DESC, session DESC",
        SessionOrder::Oldest => " ORDER BY active_at, session",
        SessionOrder::Due => " ORDER BY due_at, session",
    });
    b.text(" LIMIT ").bind(row_limit(query.limit), Type::INT8);
    b.text(" OFFSET ").bind(row_limit(query.offset), Type::INT8);
    b
}

/// Adds the owner and cursor conditions, which the indexes on activity serve.
fn add_scope(b: &mut SqlBuilder, query: &SessionQuery) {
    match &query.owner {
        OwnerFilter::User(tenant, user) => {
            b.text(" AND tenant = ").bind(tenant.to_string(), Type::TEXT);
            b.text(" AND \"user\" = ").bind(user.to_string(), Type::TEXT);
        }
        OwnerFilter::Tenant(tenant) => {
            b.text(" AND tenant = ").bind(tenant.to_string(), Type::TEXT);
        }
        OwnerFilter::AllTenants => {}
    }
    if let Some(cursor) = &query.cursor {
        let at = micros(cursor.active_at);
        b.text(" AND active_at >> 26 <= ").bind(at >> 26, Type::INT8);
        b.text(" AND (active_at, session) < (").bind(at, Type::INT8);
        b.text(", ").bind(cursor.session.to_string(), Type::TEXT).text(")");
    }
}

/// Adds all conditions except owner and cursor.
fn add_filters(b: &mut SqlBuilder, query: &SessionQuery) {
    if let Some(assistant) = &query.assistant {
        b.text(" AND assistant = ").bind(assistant.clone(), Type::TEXT);
    }
    if let Some(thread) = &query.thread {
        let prefix: String = thread.chars().take(THREAD_CHARS).collect();
        b.text(" AND left(thread, 200) = ").bind(prefix, Type::TEXT);
        b.text(" AND thread = ").bind(thread.clone(), Type::TEXT);
    }
    if !query.status.is_empty() {
        let status: Vec<&'static str> = query.status.iter().map(|s| s.as_str()).collect();
        match &query.expiry {
            None => b.text(" AND status"),
            Some(expiry) => {
                let (names, cutoffs, default) = expiry.in_micros();
                b.text(" AND CASE WHEN status = 'active' AND active_at < coalesce((SELECT cutoff FROM unnest(");
                b.bind(names, Type::TEXT_ARRAY).text(", ").bind(cutoffs, Type::INT8_ARRAY);
                b.text(") AS expiry (name, cutoff) WHERE name = assistant), ").bind(default, Type::INT8);
                b.text(") THEN 'expired' ELSE status END")
            }
        };
        b.text(" = ANY(").bind(status, Type::TEXT_ARRAY).text(")");
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
    if !query.sessions.is_empty() {
        let ids: Vec<String> = query.sessions.iter().map(|s| s.to_string()).collect();
        b.text(" AND session = ANY(").bind(ids, Type::TEXT_ARRAY).text(")");
    }
    if let Some(parent) = &query.parent {
        b.text(" AND parent = ").bind(parent.to_string(), Type::TEXT);
    }
    if !query.hashes.is_empty() {
        let hashes: Vec<Vec<u8>> = query.hashes.iter().map(|h| h.0.to_vec()).collect();
        b.text(" AND visible_hash = ANY(").bind(hashes, Type::BYTEA_ARRAY).text(")");
    }
    if let Some(at) = query.due_before {
        b.text(" AND due_at < ").bind(micros_up(at), Type::INT8);
    }
    if let Some(at) = query.lease_before {
        b.text(" AND lease_until < ").bind(micros_up(at), Type::INT8);
    }
}

/// Rounds a bound up to whole microseconds. Stored times are whole microseconds, so `>=` and `<`
/// select the same rows.
fn micros_up(bound: Timestamp) -> i64 {
    let rounded = (bound.as_nanosecond() + 999).div_euclid(1000);
    i64::try_from(rounded).expect("a timestamp's microseconds fit")
}
