//! Consistency checks of the database, and removal of orphans (D-027).
//!
//! Invariant: data that a session may still need are never removed, even if that session has lost
//! its head.

use crate::store::finding::{Finding, MAX_FINDINGS, Orphan};
use crate::store::item::Owner;
use crate::store::postgres::connection::{MAINTENANCE_TIMEOUT, Param, PgConnection};
use crate::store::postgres::failure::FailureKind;
use crate::store::postgres::row::column;
use crate::types::blob::BlobId;
use crate::types::error::{Error, Result};
use crate::types::id::{SessionId, Tenant};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

const RESTORE: &str = "restore the session from a backup, or purge it";

// In each statement, `$1` is the maximum number of findings.

// Records of sessions without a head.
const HEADLESS: &str = "
    SELECT tenant, session, count(*) FROM tenure_record r
    WHERE NOT EXISTS (SELECT 1 FROM tenure_head h WHERE h.tenant = r.tenant AND h.session = r.session)
    GROUP BY tenant, session LIMIT $1";

// Records outside the range of their log.
const OUTSIDE: &str = "
    SELECT tenant, session, count(*) FROM tenure_record r JOIN tenure_head h USING (tenant, session)
    WHERE r.seq > h.seq OR r.seq < h.first GROUP BY tenant, session LIMIT $1";

// Blobs without references.
const UNUSED: &str = "
    SELECT tenant, id FROM tenure_blob b
    WHERE NOT EXISTS (SELECT 1 FROM tenure_blob_use u WHERE u.tenant = b.tenant AND u.blob = b.id) LIMIT $1";

// Excludes sessions that only lost their head: they still need the blobs.

const USELESS: &str = "
    SELECT DISTINCT tenant, session FROM tenure_blob_use u
    WHERE NOT EXISTS (SELECT 1 FROM tenure_head h WHERE h.tenant = u.tenant AND h.session = u.session)
    AND NOT EXISTS (SELECT 1 FROM tenure_record r WHERE r.tenant = u.tenant AND r.session = u.session) LIMIT $1";

// Items of sessions that do not exist.
const HOMELESS: &str = "
    SELECT DISTINCT tenant, substr(owner, 9) FROM tenure_item i WHERE starts_with(owner, 'session/')
    AND NOT EXISTS (SELECT 1 FROM tenure_head h WHERE h.tenant = i.tenant AND h.session = substr(i.owner, 9))
    AND NOT EXISTS (SELECT 1 FROM tenure_record r WHERE r.tenant = i.tenant AND r.session = substr(i.owner, 9)) LIMIT $1";

// Labels that are missing in the index, and index entries that are no label of their session.

const MISLABELED: &str = "
    SELECT tenant, session FROM tenure_head h WHERE EXISTS (SELECT 1 FROM unnest(h.labels) AS wanted WHERE NOT EXISTS (
        SELECT 1 FROM tenure_label l WHERE l.tenant = h.tenant AND l.label = wanted AND l.session = h.session))
    UNION
    SELECT l.tenant, l.session FROM tenure_label l WHERE NOT EXISTS (
        SELECT 1 FROM tenure_head h WHERE h.tenant = l.tenant AND h.session = l.session AND l.label = ANY(h.labels))
    LIMIT $1";

/// Runs all checks and returns the findings.
pub(super) async fn check(link: &PgConnection) -> Result<Vec<Finding>> {
    let mut found = Vec::new();
    let limit = [(&(MAX_FINDINGS as i64) as _, Type::INT8)];
    for row in rows(link, HEADLESS, &limit).await? {
        let what = format!("{} records have no card", number(&row)?);
        let advice = "restore the row of tenure_head from a backup; only if it is not wanted, delete these rows of tenure_record";
        found.push(Finding::new(session(&row)?, what, advice));
    }
    for row in rows(link, OUTSIDE, &limit).await? {
        let what = format!("{} records are before or after the ends of its log", number(&row)?);
        found.push(Finding::new(session(&row)?, what, RESTORE));
    }
    for row in rows(link, UNUSED, &limit).await? {
        let tenant = tenant(&row)?;
        let bytes: &[u8] = column(&row, 1, here)?;
        let id = BlobId(bytes.try_into().map_err(|_| Error::corrupt(here(), "a blob's id has 32 bytes"))?);
        let place = format!("postgres, tenant {tenant}, blob {id}");
        found.push(Finding::orphan(place, "no session uses it", Orphan::Blob(tenant, id)));
    }
    for row in rows(link, USELESS, &limit).await? {
        let orphan = Orphan::Uses(tenant(&row)?, column(&row, 1, here)?);
        found.push(Finding::orphan(session(&row)?, "it uses blobs, but there is no such session", orphan));
    }
    for row in rows(link, MISLABELED, &limit).await? {
        let orphan = Orphan::Labels(tenant(&row)?, column(&row, 1, here)?);
        let what = "the index of labels differs from its labels: filters go wrong";
        found.push(Finding::orphan(session(&row)?, what, orphan));
    }
    for row in rows(link, HOMELESS, &limit).await? {
        let id = SessionId::new(column::<&str>(&row, 1, here)?).map_err(|e| Error::corrupt(here(), e))?;
        let place = format!("{}, its shelves", session(&row)?);
        found.push(Finding::orphan(place, "there is no such session", Orphan::Items(tenant(&row)?, id)));
    }
    Ok(found)
}

/// Removes those of the given orphans that no session references at this moment; the others stay.
pub(super) async fn remove(link: &PgConnection, orphans: &[Orphan]) -> Result<()> {
    for orphan in orphans {
        match orphan {
            Orphan::Blob(tenant, id) => {
                let sql = "DELETE FROM tenure_blob WHERE tenant = $1 AND id = $2
                    AND NOT EXISTS (SELECT 1 FROM tenure_blob_use WHERE tenant = $1 AND blob = $2)";
                rows(link, sql, &[(&tenant.as_str(), Type::TEXT), (&&id.0[..], Type::BYTEA)]).await?;
            }
            Orphan::Uses(tenant, session) => {
                let sql = "DELETE FROM tenure_blob_use WHERE tenant = $1 AND session = $2
                    AND NOT EXISTS (SELECT 1 FROM tenure_head WHERE tenant = $1 AND session = $2)
                    AND NOT EXISTS (SELECT 1 FROM tenure_record WHERE tenant = $1 AND session = $2)";
                rows(link, sql, &[(&tenant.as_str(), Type::TEXT), (&session, Type::TEXT)]).await?;
            }
            Orphan::Labels(tenant, session) => {
                let of: [Param<'_>; 2] = [(&tenant.as_str(), Type::TEXT), (&session, Type::TEXT)];
                rows(link, "DELETE FROM tenure_label WHERE tenant = $1 AND session = $2", &of).await?;
                let sql = "INSERT INTO tenure_label (tenant, label, session)
                    SELECT h.tenant, label, h.session FROM tenure_head h, unnest(h.labels) AS label
                    WHERE h.tenant = $1 AND h.session = $2 ON CONFLICT DO NOTHING";
                rows(link, sql, &of).await?;
            }
            Orphan::Items(tenant, session) => {
                let owner = Owner::Session(session.clone()).to_string();
                let sql = "DELETE FROM tenure_item WHERE tenant = $1 AND owner = $2
                    AND NOT EXISTS (SELECT 1 FROM tenure_head WHERE tenant = $1 AND session = $3)
                    AND NOT EXISTS (SELECT 1 FROM tenure_record WHERE tenant = $1 AND session = $3)";
                let params: [Param<'_>; 3] =
                    [(&tenant.as_str(), Type::TEXT), (&owner, Type::TEXT), (&session.as_str(), Type::TEXT)];
                rows(link, sql, &params).await?;
            }
        }
    }
    Ok(())
}

/// Runs a statement that may scan whole tables, with the timeout of maintenance.
async fn rows(link: &PgConnection, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
    let sql = link.sql(sql);
    let mut tries = link.tries();
    loop {
        let attempt = async {
            let lease = link.lease().await?;
            let rows = lease.query_typed(&sql, params).await?;
            lease.keep();
            Ok::<_, FailureKind>(rows)
        };
        match link.within(MAINTENANCE_TIMEOUT, attempt).await {
            Ok(rows) => return Ok(rows),
            Err(fail) => tries.wait(fail).await?,
        }
    }
}

fn here() -> String {
    "postgres".to_owned()
}

fn tenant(row: &Row) -> Result<Tenant> {
    Tenant::new(column::<&str>(row, 0, here)?).map_err(|e| Error::corrupt(here(), e))
}

fn session(row: &Row) -> Result<String> {
    Ok(format!("postgres, session {}/{}", column::<&str>(row, 0, here)?, column::<&str>(row, 1, here)?))
}

fn number(row: &Row) -> Result<i64> {
    column(row, 2, here)
}
