//! Consistency checks of the file, and removal of orphans (D-027).
//!
//! Invariant: data that a session may still need are never removed, even if that session has lost
//! its head.

use super::{items, messages};
use crate::store::finding::{Finding, MAX_FINDINGS, Orphan, Remedy};
use crate::store::item::Owner;
use crate::store::sqlite::database::Database;
use crate::store::sqlite::fault::StoreResult;
use crate::types::blob::BlobId;
use crate::types::error::Error;
use crate::types::excerpt::excerpt;
use crate::types::id::{SessionId, SessionKey, Tenant};
use rusqlite::{Connection, ErrorCode, Row, params};

const RECOVER_ADVICE: &str =
    "stop writing to it, and restore the file from a backup, or what can be read with `sqlite3 FILE .recover`";
const RESTORE_ADVICE: &str = "restore the session from a backup, or purge it";

/// A statement that selects damaged rows, and the finding for each of them.
type RowCheck = (&'static str, fn(&Database, &Row<'_>) -> StoreResult<Finding>);

/// The checks that do not depend on each other, in the order of their findings.
const CHECKS: [RowCheck; 9] = [
    (INVALID_HEADS, invalid_head),
    (MISMATCHED_IDENTITY, mismatched_identity),
    (MISMATCHED_COLUMNS, mismatched_columns),
    (RECORDS_WITHOUT_HEAD, records_without_head),
    (RECORDS_OUT_OF_RANGE, records_out_of_range),
    (UNREFERENCED_BLOBS, unreferenced_blob),
    (DANGLING_BLOB_REFERENCES, dangling_blob_references),
    (MISMATCHED_LABELS, mismatched_labels),
    (UNUSED_MESSAGE_NUMBERS, unused_message_numbers),
];

/// Runs all checks and returns the findings.
pub(super) fn check(conn: &Connection, file: &Database) -> StoreResult<Vec<Finding>> {
    let damage = check_integrity(conn, file)?;
    if !damage.is_empty() {
        // In a damaged file, the results of the other checks cannot be trusted.
        return Ok(damage);
    }
    let mut findings = Vec::new();
    for check in &CHECKS {
        findings.extend(run(conn, file, check)?);
    }
    // Otherwise items may belong to a session that has lost its head.
    if !conn.prepare(RECORDS_WITHOUT_HEAD)?.exists([1])? {
        findings.extend(run(conn, file, &(ORPHANED_ITEMS, orphaned_items))?);
    }
    Ok(findings)
}

fn run(conn: &Connection, file: &Database, (sql, finding): &RowCheck) -> StoreResult<Vec<Finding>> {
    let mut statement = conn.prepare(sql)?;
    let mut rows = statement.query([MAX_FINDINGS as i64])?;
    let mut findings = Vec::new();
    while let Some(row) = rows.next()? {
        findings.push(finding(file, row)?);
    }
    Ok(findings)
}

fn invalid_head(file: &Database, row: &Row<'_>) -> StoreResult<Finding> {
    Ok(Finding::new(describe_session(file, row)?, "the head is not valid JSON", RESTORE_ADVICE))
}

fn mismatched_identity(file: &Database, row: &Row<'_>) -> StoreResult<Finding> {
    let problem = "the row's key, parent or seq differs from the serialized head";
    Ok(Finding::new(describe_session(file, row)?, problem, RESTORE_ADVICE))
}

fn mismatched_columns(file: &Database, row: &Row<'_>) -> StoreResult<Finding> {
    let location = describe_session(file, row)?;
    let key = SessionKey { tenant: tenant_column(row, 0)?, session: parse_session_id(&text_column(row, 1)?)? };
    let description =
        "the row's user, status or hash differs from the serialized head: lists and matching return wrong results"
            .to_owned();
    Ok(Finding { location, description, remedy: Remedy::RebuildHead(key) })
}

fn records_without_head(file: &Database, row: &Row<'_>) -> StoreResult<Finding> {
    let head: i64 = row.get(0)?;
    let count: i64 = row.get(1)?;
    let advice = "restore the file from a backup: the session they belong to is unknown";
    Ok(Finding::new(format!("{file}, head {head}"), format!("{count} records have no head"), advice))
}

fn records_out_of_range(file: &Database, row: &Row<'_>) -> StoreResult<Finding> {
    let count: i64 = row.get(2)?;
    let problem = format!("{count} records are outside the range of its log");
    Ok(Finding::new(describe_session(file, row)?, problem, RESTORE_ADVICE))
}

fn unreferenced_blob(file: &Database, row: &Row<'_>) -> StoreResult<Finding> {
    let tenant = tenant_column(row, 0)?;
    let id = BlobId(row.get(1)?);
    let location = format!("{file}, tenant {tenant}, blob {id}");
    Ok(Finding::orphan(location, "no session references it", Orphan::Blob(tenant, id)))
}

fn dangling_blob_references(file: &Database, row: &Row<'_>) -> StoreResult<Finding> {
    let tenant = tenant_column(row, 0)?;
    let head = row.get::<_, i64>(1)?.to_string();
    let location = format!("{file}, tenant {tenant}, head {head}");
    let problem = "blob references of a session that does not exist";
    Ok(Finding::orphan(location, problem, Orphan::BlobRefs(tenant, head)))
}

fn mismatched_labels(file: &Database, row: &Row<'_>) -> StoreResult<Finding> {
    let tenant = tenant_column(row, 0)?;
    let head = row.get::<_, i64>(1)?.to_string();
    let location = format!("{file}, tenant {tenant}, head {head}");
    let problem = "the label index differs from the session's labels: filters return wrong results";
    Ok(Finding::orphan(location, problem, Orphan::Labels(tenant, head)))
}

fn unused_message_numbers(file: &Database, row: &Row<'_>) -> StoreResult<Finding> {
    let count: i64 = row.get(0)?;
    let problem = format!("{count} entries belong to no message");
    Ok(Finding::orphan(format!("{file}, message index"), problem, Orphan::IndexedMessages))
}

fn orphaned_items(file: &Database, row: &Row<'_>) -> StoreResult<Finding> {
    let tenant = tenant_column(row, 0)?;
    let session = parse_session_id(&text_column(row, 1)?)?;
    let location = format!("{file}, items of session {tenant}/{session}");
    Ok(Finding::orphan(location, "the session does not exist", Orphan::Items(tenant, session)))
}

/// Runs SQLite's own integrity and foreign key checks.
fn check_integrity(conn: &Connection, file: &Database) -> StoreResult<Vec<Finding>> {
    let mut findings = Vec::new();
    let mut report_damage = |message: &dyn std::fmt::Display| {
        findings.push(Finding::new(file, format!("SQLite reports damage: {message}"), RECOVER_ADVICE));
    };
    let mut integrity = conn.prepare("PRAGMA integrity_check(100)")?;
    let mut rows = integrity.query([])?;
    loop {
        match rows.next() {
            Ok(Some(row)) => {
                let message: String = row.get(0)?;
                if message != "ok" {
                    report_damage(&message);
                }
            }
            Ok(None) => break,
            // The damage is severe enough that the check itself fails.
            Err(e) if e.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt) => {
                report_damage(&e);
                break;
            }
            Err(e) => return Err(e.into()),
        }
    }
    if !findings.is_empty() {
        return Ok(findings);
    }
    let mut keys = conn.prepare("PRAGMA foreign_key_check")?;
    let mut rows = keys.query([])?;
    while let Some(row) = rows.next()? {
        let table: String = row.get(0)?;
        findings.push(Finding::new(file, format!("a row of {table} references a missing row"), RECOVER_ADVICE));
    }
    Ok(findings)
}

// In each statement, `?1` is the maximum number of findings.

// Heads that are not valid JSON.
const INVALID_HEADS: &str = "SELECT tenant, session FROM head WHERE NOT json_valid(head_json) LIMIT ?1";

// Heads whose columns for identity, parent or log end differ from the serialized head.
const MISMATCHED_IDENTITY: &str = "
    SELECT tenant, session FROM head WHERE CASE WHEN json_valid(head_json) THEN
        head_json ->> '$.seq' IS NOT seq OR head_json ->> '$.tenant' IS NOT tenant
        OR head_json ->> '$.info.session_id' IS NOT session OR head_json ->> '$.parent.session' IS NOT parent
    END LIMIT ?1";

// Heads whose columns for user, status or hash differ from the serialized head. They can be
// rebuilt.
const MISMATCHED_COLUMNS: &str = "
    SELECT tenant, session FROM head WHERE CASE WHEN json_valid(head_json) THEN
        head_json ->> '$.user' IS NOT user OR head_json ->> '$.status' IS NOT status
        OR unhex(head_json ->> '$.digest.hash') IS NOT visible_hash
    END LIMIT ?1";

// Records of sessions without a head.
const RECORDS_WITHOUT_HEAD: &str = "
    SELECT record_key >> 32, count(*) FROM record WHERE record_key >> 32 NOT IN (SELECT id FROM head)
    GROUP BY record_key >> 32 LIMIT ?1";

// Records outside the range of their log.
const RECORDS_OUT_OF_RANGE: &str = "
    SELECT h.tenant, h.session, count(*)
    FROM head h JOIN record r ON r.record_key >= h.id << 32 AND r.record_key < (h.id + 1) << 32
    WHERE CASE WHEN json_valid(h.head_json) THEN
        r.record_key > h.id << 32 | h.seq OR r.record_key & 0xffffffff < h.head_json ->> '$.first'
    END
    GROUP BY h.id LIMIT ?1";

// Blobs without references.
const UNREFERENCED_BLOBS: &str = "
    SELECT tenant, id FROM blob b
    WHERE NOT EXISTS (SELECT 1 FROM blob_ref r WHERE r.tenant = b.tenant AND r.blob_id = b.id) LIMIT ?1";

// Excludes sessions that only lost their head: their records still need the blobs.
const DANGLING_BLOB_REFERENCES: &str = "
    SELECT DISTINCT tenant, head_id FROM blob_ref r WHERE head_id NOT IN (SELECT id FROM head)
        AND NOT EXISTS (
            SELECT 1 FROM record WHERE record_key >= r.head_id << 32 AND record_key < (r.head_id + 1) << 32
        ) LIMIT ?1";

// Labels that are missing in the index, and index entries that are no label of their session.
const MISMATCHED_LABELS: &str = "
    SELECT tenant, id FROM head h WHERE CASE WHEN json_valid(labels) THEN EXISTS (
        SELECT 1 FROM json_each(h.labels) l WHERE NOT EXISTS (
            SELECT 1 FROM head_label x WHERE x.tenant = h.tenant AND x.label = l.value AND x.head_id = h.id)) END
    UNION
    SELECT x.tenant, x.head_id FROM head_label x LEFT JOIN head h ON h.id = x.head_id AND h.tenant = x.tenant
    WHERE NOT EXISTS (SELECT 1 FROM json_each(CASE WHEN json_valid(h.labels) THEN h.labels ELSE '[]' END) l
        WHERE l.value = x.label)
    LIMIT ?1";

// Entries of the message index without a message.
const UNUSED_MESSAGE_NUMBERS: &str = "
    SELECT count(*) FROM (SELECT doc FROM message_recent UNION ALL SELECT id FROM message_words_docsize)
    WHERE doc NOT IN (SELECT doc FROM record WHERE doc IS NOT NULL) HAVING count(*) > 0 LIMIT ?1";

// Items of sessions that do not exist.
const ORPHANED_ITEMS: &str = "
    SELECT DISTINCT tenant, substr(owner, 9) FROM item i WHERE owner GLOB 'session/*'
        AND NOT EXISTS (SELECT 1 FROM head h WHERE h.tenant = i.tenant AND h.session = substr(i.owner, 9)) LIMIT ?1";

fn text_column(row: &Row<'_>, column: usize) -> StoreResult<String> {
    Ok(row.get(column)?)
}

fn describe_session(file: &Database, row: &Row<'_>) -> StoreResult<String> {
    Ok(format!("{file}, head of session {}/{}", text_column(row, 0)?, text_column(row, 1)?))
}

fn tenant_column(row: &Row<'_>, column: usize) -> StoreResult<Tenant> {
    let name = text_column(row, column)?;
    Ok(Tenant::new(&name).map_err(|e| Error::corrupt_from(format!("tenant {name}", name = excerpt(name)), e))?)
}

fn parse_session_id(name: &str) -> StoreResult<SessionId> {
    Ok(SessionId::new(name).map_err(|e| Error::corrupt_from(format!("session {name}", name = excerpt(name)), e))?)
}

/// Removes those of the given orphans that no session references at this moment; the others stay.
pub(super) fn remove(conn: &Connection, orphans: &[Orphan]) -> StoreResult<()> {
    let mut has_headless_records = None;
    for orphan in orphans {
        match orphan {
            Orphan::Blob(tenant, id) => {
                let sql = "DELETE FROM blob WHERE tenant = ?1 AND id = ?2
                    AND NOT EXISTS (SELECT 1 FROM blob_ref WHERE tenant = ?1 AND blob_id = ?2)";
                conn.execute(sql, params![tenant.as_str(), id.0])?;
            }
            Orphan::BlobRefs(tenant, head) => {
                let sql = "DELETE FROM blob_ref WHERE tenant = ?1 AND head_id = ?2
                    AND NOT EXISTS (SELECT 1 FROM head WHERE id = ?2)
                    AND NOT EXISTS (SELECT 1 FROM record WHERE record_key >= ?2 << 32 AND record_key < (?2 + 1) << 32)";
                conn.execute(sql, params![tenant.as_str(), head.parse::<i64>().ok()])?;
            }
            Orphan::Labels(tenant, head) => {
                let head = head.parse::<i64>().ok();
                let session_params = params![tenant.as_str(), head];
                conn.execute("DELETE FROM head_label WHERE tenant = ?1 AND head_id = ?2", session_params)?;
                let sql = "INSERT INTO head_label (tenant, label, head_id)
                    SELECT head.tenant, value, head.id FROM head, json_each(head.labels) WHERE tenant = ?1 AND head.id = ?2
                    ON CONFLICT DO NOTHING";
                conn.execute(sql, session_params)?;
            }
            Orphan::IndexedMessages => messages::remove_unused(conn)?,
            Orphan::Items(tenant, session) => {
                let has_headless_records = match has_headless_records {
                    Some(known) => known,
                    None => *has_headless_records.insert(conn.prepare(RECORDS_WITHOUT_HEAD)?.exists([1])?),
                };
                if !has_headless_records && crate::store::sqlite::heads::seq(conn, tenant, session)?.is_none() {
                    items::delete_owner_items(conn, tenant, &Owner::Session(session.clone()))?;
                }
            }
        }
    }
    Ok(())
}
