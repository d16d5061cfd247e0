//! Consistency checks of the file, and removal of orphans (D-027).
//!
//! Invariant: data that a session may still need are never removed, even if that session has lost
//! its head.

use super::items;
use crate::store::finding::{Finding, MAX_FINDINGS, Orphan, Remedy};
use crate::store::item::Owner;
use crate::store::sqlite::database::Database;
use crate::store::sqlite::fault::StoreResult;
use crate::types::blob::BlobId;
use crate::types::error::Error;
use crate::types::excerpt::excerpt;
use crate::types::id::{SessionId, SessionKey, Tenant};
use rusqlite::{Connection, ErrorCode, Row, params};

const RECOVER: &str =
    "stop writing to it, and restore the file from a backup, or what can be read with `sqlite3 FILE .recover`";
const RESTORE: &str = "restore the session from a backup, or purge it";

/// Runs all checks and returns the findings.
pub(super) fn check(conn: &Connection, file: &Database) -> StoreResult<Vec<Finding>> {
    let damage = pragma(conn, file)?;
    if !damage.is_empty() {
        // In a damaged file, the results of the other checks cannot be trusted.
        return Ok(damage);
    }
    let mut found = Vec::new();
    each(conn, UNREADABLE, |row| {
        found.push(Finding::new(session(file, row)?, "its card is not JSON", RESTORE));
        Ok(())
    })?;
    each(conn, MOVED, |row| {
        found.push(Finding::new(
            session(file, row)?,
            "its row has another place, parent or end than its card",
            RESTORE,
        ));
        Ok(())
    })?;
    each(conn, DIFFERENT, |row| {
        let (place, key) = (session(file, row)?, SessionKey { tenant: tenant(row, 0)?, session: id(&text(row, 1)?)? });
        let what = "its row has another owner, status or hash than its card: lists and matching go wrong".to_owned();
        found.push(Finding { place, what, cure: Remedy::Card(key) });
        Ok(())
    })?;
    let mut headless = false;
    each(conn, HEADLESS, |row| {
        headless = true;
        let (head, count): (i64, i64) = (row.get(0)?, row.get(1)?);
        let advice = "restore the file from a backup: which session they belonged to is not known any more";
        found.push(Finding::new(format!("{file}, head {head}"), format!("{count} records have no card"), advice));
        Ok(())
    })?;
    each(conn, OUTSIDE, |row| {
        let (place, count): (_, i64) = (session(file, row)?, row.get(2)?);
        found.push(Finding::new(place, format!("{count} records are before or after the ends of its log"), RESTORE));
        Ok(())
    })?;
    each(conn, UNUSED, |row| {
        let (tenant, id) = (tenant(row, 0)?, BlobId(row.get(1)?));
        let place = format!("{file}, tenant {tenant}, blob {id}");
        found.push(Finding::orphan(place, "no session uses it", Orphan::Blob(tenant, id)));
        Ok(())
    })?;
    each(conn, USELESS, |row| {
        let (tenant, head) = (tenant(row, 0)?, row.get::<_, i64>(1)?.to_string());
        let place = format!("{file}, tenant {tenant}, head {head}");
        found.push(Finding::orphan(place, "it uses blobs, but there is no such session", Orphan::Uses(tenant, head)));
        Ok(())
    })?;
    each(conn, MISLABELED, |row| {
        let (tenant, head) = (tenant(row, 0)?, row.get::<_, i64>(1)?.to_string());
        let place = format!("{file}, tenant {tenant}, head {head}");
        let what = "the index of labels differs from its labels: filters go wrong";
        found.push(Finding::orphan(place, what, Orphan::Labels(tenant, head)));
        Ok(())
    })?;
    if headless {
        // Items may belong to a session that has lost its head.
        return Ok(found);
    }
    each(conn, HOMELESS, |row| {
        let (tenant, session) = (tenant(row, 0)?, id(&text(row, 1)?)?);
        let place = format!("{file}, shelves of session {tenant}/{session}");
        found.push(Finding::orphan(place, "there is no such session", Orphan::Items(tenant, session)));
        Ok(())
    })?;
    Ok(found)
}

/// Runs SQLite's own integrity and foreign key checks.
fn pragma(conn: &Connection, file: &Database) -> StoreResult<Vec<Finding>> {
    let mut found = Vec::new();
    let mut damage = |said: &dyn std::fmt::Display| {
        found.push(Finding::new(file, format!("SQLite finds damage: {said}"), RECOVER));
    };
    let mut integrity = conn.prepare("PRAGMA integrity_check(100)")?;
    let mut rows = integrity.query([])?;
    loop {
        match rows.next() {
            Ok(Some(row)) => {
                let said: String = row.get(0)?;
                if said != "ok" {
                    damage(&said);
                }
            }
            Ok(None) => break,
            // The damage is severe enough that the check itself fails.
            Err(e) if e.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt) => {
                damage(&e);
                break;
            }
            Err(e) => return Err(e.into()),
        }
    }
    if !found.is_empty() {
        return Ok(found);
    }
    let mut keys = conn.prepare("PRAGMA foreign_key_check")?;
    let mut rows = keys.query([])?;
    while let Some(row) = rows.next()? {
        let table: String = row.get(0)?;
        found.push(Finding::new(file, format!("a row of {table} refers to one that is not there"), RECOVER));
    }
    Ok(found)
}

// In each statement, `?1` is the maximum number of findings.

// Heads that are not valid JSON.
const UNREADABLE: &str = "SELECT tenant, session FROM head WHERE NOT json_valid(card) LIMIT ?1";

// Heads whose columns for identity, parent or log end differ from the serialized head.
const MOVED: &str = "
    SELECT tenant, session FROM head WHERE CASE WHEN json_valid(card) THEN
        card ->> '$.seq' IS NOT seq OR card ->> '$.tenant' IS NOT tenant OR card ->> '$.info.session_id' IS NOT session
        OR card ->> '$.parent.session' IS NOT parent
    END LIMIT ?1";

// Heads whose columns for user, status or hash differ from the serialized head. They can be
// rebuilt.
const DIFFERENT: &str = "
    SELECT tenant, session FROM head WHERE CASE WHEN json_valid(card) THEN
        card ->> '$.user' IS NOT user OR card ->> '$.status' IS NOT status OR unhex(card ->> '$.mark.hash') IS NOT hash
    END LIMIT ?1";

// Records of sessions without a head.
const HEADLESS: &str = "
    SELECT k >> 32, count(*) FROM record WHERE k >> 32 NOT IN (SELECT id FROM head) GROUP BY k >> 32 LIMIT ?1";

// Records outside the range of their log.
const OUTSIDE: &str = "
    SELECT h.tenant, h.session, count(*)
    FROM head h JOIN record r ON r.k >= h.id << 32 AND r.k < (h.id + 1) << 32
    WHERE CASE WHEN json_valid(h.card) THEN r.k > h.id << 32 | h.seq OR r.k & 0xffffffff < h.card ->> '$.first' END
    GROUP BY h.id LIMIT ?1";

// Blobs without references.
const UNUSED: &str = "
    SELECT tenant, id FROM blob b
    WHERE NOT EXISTS (SELECT 1 FROM blob_use u WHERE u.tenant = b.tenant AND u.id = b.id) LIMIT ?1";

// Excludes sessions that only lost their head: their records still need the blobs.
const USELESS: &str = "
    SELECT DISTINCT tenant, head_id FROM blob_use u WHERE head_id NOT IN (SELECT id FROM head)
        AND NOT EXISTS (SELECT 1 FROM record WHERE k >= u.head_id << 32 AND k < (u.head_id + 1) << 32) LIMIT ?1";

// Labels that are missing in the index, and index entries that are no label of their session.
const MISLABELED: &str = "
    SELECT tenant, id FROM head h WHERE CASE WHEN json_valid(labels) THEN EXISTS (
        SELECT 1 FROM json_each(h.labels) l WHERE NOT EXISTS (
            SELECT 1 FROM head_label x WHERE x.tenant = h.tenant AND x.label = l.value AND x.head_id = h.id)) END
    UNION
    SELECT x.tenant, x.head_id FROM head_label x LEFT JOIN head h ON h.id = x.head_id AND h.tenant = x.tenant
    WHERE NOT EXISTS (SELECT 1 FROM json_each(CASE WHEN json_valid(h.labels) THEN h.labels ELSE '[]' END) l
        WHERE l.value = x.label)
    LIMIT ?1";

// Items of sessions that do not exist.
const HOMELESS: &str = "
    SELECT DISTINCT tenant, substr(owner, 9) FROM item i WHERE owner GLOB 'session/*'
        AND NOT EXISTS (SELECT 1 FROM head h WHERE h.tenant = i.tenant AND h.session = substr(i.owner, 9)) LIMIT ?1";

fn each(conn: &Connection, sql: &str, mut take: impl FnMut(&Row<'_>) -> StoreResult<()>) -> StoreResult<()> {
    let mut find = conn.prepare(sql)?;
    let mut rows = find.query([MAX_FINDINGS as i64])?;
    while let Some(row) = rows.next()? {
        take(row)?;
    }
    Ok(())
}

fn text(row: &Row<'_>, column: usize) -> StoreResult<String> {
    Ok(row.get(column)?)
}

fn session(file: &Database, row: &Row<'_>) -> StoreResult<String> {
    Ok(format!("{file}, head of session {}/{}", text(row, 0)?, text(row, 1)?))
}

fn tenant(row: &Row<'_>, column: usize) -> StoreResult<Tenant> {
    let name = text(row, column)?;
    Ok(Tenant::new(&name).map_err(|e| Error::corrupt(format!("tenant {name}", name = excerpt(name)), e))?)
}

fn id(name: &str) -> StoreResult<SessionId> {
    Ok(SessionId::new(name).map_err(|e| Error::corrupt(format!("session {name}", name = excerpt(name)), e))?)
}

/// Removes those of the given orphans that no session references at this moment; the others stay.
pub(super) fn remove(conn: &Connection, orphans: &[Orphan]) -> StoreResult<()> {
    let mut headless = None;
    for orphan in orphans {
        match orphan {
            Orphan::Blob(tenant, id) => {
                let sql = "DELETE FROM blob WHERE tenant = ?1 AND id = ?2
                    AND NOT EXISTS (SELECT 1 FROM blob_use WHERE tenant = ?1 AND id = ?2)";
                conn.execute(sql, params![tenant.as_str(), id.0])?;
            }
            Orphan::Uses(tenant, head) => {
                let sql = "DELETE FROM blob_use WHERE tenant = ?1 AND head_id = ?2
                    AND NOT EXISTS (SELECT 1 FROM head WHERE id = ?2)
                    AND NOT EXISTS (SELECT 1 FROM record WHERE k >= ?2 << 32 AND k < (?2 + 1) << 32)";
                conn.execute(sql, params![tenant.as_str(), head.parse::<i64>().ok()])?;
            }
            Orphan::Labels(tenant, head) => {
                let head = head.parse::<i64>().ok();
                let of = params![tenant.as_str(), head];
                conn.execute("DELETE FROM head_label WHERE tenant = ?1 AND head_id = ?2", of)?;
                let sql = "INSERT INTO head_label (tenant, label, head_id)
                    SELECT head.tenant, value, head.id FROM head, json_each(head.labels) WHERE tenant = ?1 AND head.id = ?2
                    ON CONFLICT DO NOTHING";
                conn.execute(sql, of)?;
            }
            Orphan::Items(tenant, session) => {
                let headless = match headless {
                    Some(known) => known,
                    None => *headless.insert(conn.prepare(HEADLESS)?.exists([1])?),
                };
                if !headless && crate::store::sqlite::heads::seq(conn, tenant, session)?.is_none() {
                    items::clear(conn, tenant, &Owner::Session(session.clone()))?;
                }
            }
        }
    }
    Ok(())
}
