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

const RESTORE_ADVICE: &str = "restore the session from a backup, or purge it";

// In each statement, `$1` is the maximum number of findings.

// Records of sessions without a head.
const RECORDS_WITHOUT_HEAD: &str = "
    SELECT tenant, session, count(*) FROM tenure_record r
    WHERE NOT EXISTS (SELECT 1 FROM tenure_head h WHERE h.tenant = r.tenant AND h.session = r.session)
    GROUP BY tenant, session LIMIT $1";

// Records outside the range of their log.
const RECORDS_OUT_OF_RANGE: &str = "
    SELECT tenant, session, count(*) FROM tenure_record r JOIN tenure_head h USING (tenant, session)
    WHERE r.seq > h.seq OR r.seq < h.first_seq GROUP BY tenant, session LIMIT $1";

// Blobs without references.
const UNREFERENCED_BLOBS: &str = "
    SELECT tenant, id FROM tenure_blob b
    WHERE NOT EXISTS (SELECT 1 FROM tenure_blob_ref r WHERE r.tenant = b.tenant AND r.blob_id = b.id) LIMIT $1";

// Excludes sessions that only lost their head: they still need the blobs.
const DANGLING_BLOB_REFERENCES: &str = "
    SELECT DISTINCT tenant, session FROM tenure_blob_ref b
    WHERE NOT EXISTS (SELECT 1 FROM tenure_head h WHERE h.tenant = b.tenant AND h.session = b.session)
    AND NOT EXISTS (SELECT 1 FROM tenure_record r WHERE r.tenant = b.tenant AND r.session = b.session) LIMIT $1";

// Items of sessions that do not exist.
const ORPHANED_ITEMS: &str = "
    SELECT DISTINCT tenant, substr(owner, 9) FROM tenure_item i WHERE starts_with(owner, 'session/')
    AND NOT EXISTS (SELECT 1 FROM tenure_head h WHERE h.tenant = i.tenant AND h.session = substr(i.owner, 9))
    AND NOT EXISTS (SELECT 1 FROM tenure_record r WHERE r.tenant = i.tenant AND r.session = substr(i.owner, 9)) LIMIT $1";

// Labels that are missing in the index, and index entries that are no label of their session.
const MISMATCHED_LABELS: &str = "
    SELECT tenant, session FROM tenure_head h WHERE EXISTS (
        SELECT 1 FROM unnest(h.labels) AS wanted_label WHERE NOT EXISTS (
            SELECT 1 FROM tenure_head_label l
            WHERE l.tenant = h.tenant AND l.label = wanted_label AND l.session = h.session))
    UNION
    SELECT l.tenant, l.session FROM tenure_head_label l WHERE NOT EXISTS (
        SELECT 1 FROM tenure_head h WHERE h.tenant = l.tenant AND h.session = l.session AND l.label = ANY(h.labels))
    LIMIT $1";

/// Runs all checks and returns the findings.
pub(super) async fn check(connection: &PgConnection) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let limit = [(&(MAX_FINDINGS as i64) as _, Type::INT8)];
    for row in query_rows(connection, RECORDS_WITHOUT_HEAD, &limit).await? {
        let problem = format!("{} records have no head", count_column(&row)?);
        let advice = "restore the row of tenure_head from a backup; if the session is not needed, delete these rows of tenure_record";
        findings.push(Finding::new(describe_session(&row)?, problem, advice));
    }
    for row in query_rows(connection, RECORDS_OUT_OF_RANGE, &limit).await? {
        let problem = format!("{} records are outside the range of its log", count_column(&row)?);
        findings.push(Finding::new(describe_session(&row)?, problem, RESTORE_ADVICE));
    }
    for row in query_rows(connection, UNREFERENCED_BLOBS, &limit).await? {
        let tenant = tenant_column(&row)?;
        let bytes: &[u8] = column(&row, 1, server_location)?;
        let id = BlobId(bytes.try_into().map_err(|_| Error::corrupt(server_location(), "a blob's id has 32 bytes"))?);
        let location = format!("postgres, tenant {tenant}, blob {id}");
        findings.push(Finding::orphan(location, "no session references it", Orphan::Blob(tenant, id)));
    }
    for row in query_rows(connection, DANGLING_BLOB_REFERENCES, &limit).await? {
        let orphan = Orphan::BlobRefs(tenant_column(&row)?, column(&row, 1, server_location)?);
        findings.push(Finding::orphan(
            describe_session(&row)?,
            "blob references of a session that does not exist",
            orphan,
        ));
    }
    for row in query_rows(connection, MISMATCHED_LABELS, &limit).await? {
        let orphan = Orphan::Labels(tenant_column(&row)?, column(&row, 1, server_location)?);
        let problem = "the label index differs from the session's labels: filters return wrong results";
        findings.push(Finding::orphan(describe_session(&row)?, problem, orphan));
    }
    for row in query_rows(connection, ORPHANED_ITEMS, &limit).await? {
        let id = SessionId::new(column::<&str>(&row, 1, server_location)?)
            .map_err(|e| Error::corrupt_from(server_location(), e))?;
        let location = format!("{}, its items", describe_session(&row)?);
        findings.push(Finding::orphan(location, "the session does not exist", Orphan::Items(tenant_column(&row)?, id)));
    }
    Ok(findings)
}

/// Removes those of the given orphans that no session references at this moment; the others stay.
pub(super) async fn remove(connection: &PgConnection, orphans: &[Orphan]) -> Result<()> {
    for orphan in orphans {
        match orphan {
            Orphan::Blob(tenant, id) => {
                let sql = "DELETE FROM tenure_blob WHERE tenant = $1 AND id = $2
                    AND NOT EXISTS (SELECT 1 FROM tenure_blob_ref WHERE tenant = $1 AND blob_id = $2)";
                query_rows(connection, sql, &[(&tenant.as_str(), Type::TEXT), (&&id.0[..], Type::BYTEA)]).await?;
            }
            Orphan::BlobRefs(tenant, session) => {
                let sql = "DELETE FROM tenure_blob_ref WHERE tenant = $1 AND session = $2
                    AND NOT EXISTS (SELECT 1 FROM tenure_head WHERE tenant = $1 AND session = $2)
                    AND NOT EXISTS (SELECT 1 FROM tenure_record WHERE tenant = $1 AND session = $2)";
                query_rows(connection, sql, &[(&tenant.as_str(), Type::TEXT), (&session, Type::TEXT)]).await?;
            }
            Orphan::Labels(tenant, session) => {
                let session_params: [Param<'_>; 2] = [(&tenant.as_str(), Type::TEXT), (&session, Type::TEXT)];
                query_rows(
                    connection,
                    "DELETE FROM tenure_head_label WHERE tenant = $1 AND session = $2",
                    &session_params,
                )
                .await?;
                let sql = "INSERT INTO tenure_head_label (tenant, label, session)
                    SELECT h.tenant, label, h.session FROM tenure_head h, unnest(h.labels) AS label
                    WHERE h.tenant = $1 AND h.session = $2 ON CONFLICT DO NOTHING";
                query_rows(connection, sql, &session_params).await?;
            }
            // The words are in the rows of the records.
            Orphan::IndexedMessages => {}
            Orphan::Items(tenant, session) => {
                let owner = Owner::Session(session.clone()).to_string();
                let sql = "DELETE FROM tenure_item WHERE tenant = $1 AND owner = $2
                    AND NOT EXISTS (SELECT 1 FROM tenure_head WHERE tenant = $1 AND session = $3)
                    AND NOT EXISTS (SELECT 1 FROM tenure_record WHERE tenant = $1 AND session = $3)";
                let params: [Param<'_>; 3] =
                    [(&tenant.as_str(), Type::TEXT), (&owner, Type::TEXT), (&session.as_str(), Type::TEXT)];
                query_rows(connection, sql, &params).await?;
            }
        }
    }
    Ok(())
}

/// Runs a statement that may scan whole tables, with the timeout of maintenance.
async fn query_rows(connection: &PgConnection, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
    let sql = connection.qualify_tables(sql);
    let mut retries = connection.retry_budget();
    loop {
        let attempt = async {
            let pooled = connection.acquire().await?;
            let rows = pooled.query_typed(&sql, params).await?;
            pooled.release();
            Ok::<_, FailureKind>(rows)
        };
        match connection.with_timeout(MAINTENANCE_TIMEOUT, attempt).await {
            Ok(rows) => return Ok(rows),
            Err(failure) => retries.wait(failure).await?,
        }
    }
}

fn server_location() -> String {
    "postgres".to_owned()
}

fn tenant_column(row: &Row) -> Result<Tenant> {
    Tenant::new(column::<&str>(row, 0, server_location)?).map_err(|e| Error::corrupt_from(server_location(), e))
}

fn describe_session(row: &Row) -> Result<String> {
    Ok(format!(
        "postgres, session {}/{}",
        column::<&str>(row, 0, server_location)?,
        column::<&str>(row, 1, server_location)?
    ))
}

fn count_column(row: &Row) -> Result<i64> {
    column(row, 2, server_location)
}
