//! Purging a session, with fork inheritance, in one transaction.
//!
//! Invariant: what a fork of the purged session shows does not change (D-001).

use crate::store::item::Owner;
use crate::store::postgres::connection::{MAINTENANCE_TIMEOUT, Param, PgConnection};
use crate::store::postgres::failure::FailureKind;
use crate::store::postgres::messages;
use crate::types::error::{Error, Result};
use crate::types::id::{Seq, SessionKey};
use jiff::Timestamp;
use tokio_postgres::types::Type;
use tokio_postgres::{Row, Transaction};

/// Purges a session. With `expected`, only if it still has this creation time and its log still
/// ends at this record.
pub(super) async fn purge(
    connection: &PgConnection,
    key: &SessionKey,
    expected: Option<(Timestamp, Seq)>,
) -> Result<()> {
    let mut retries = connection.retry_budget();
    loop {
        match connection.with_timeout(MAINTENANCE_TIMEOUT, attempt(connection, key, expected)).await {
            Ok(true) => return Ok(()),
            Ok(false) => {
                let expected = expected.map_or(0, |(_, seq)| seq);
                return Err(Error::Conflict { session_id: key.session.clone(), expected });
            }
            Err(failure) => retries.wait(failure).await?,
        }
    }
}

/// Runs one attempt. Returns `false` if the session was not as expected.
async fn attempt(
    connection: &PgConnection,
    key: &SessionKey,
    expected: Option<(Timestamp, Seq)>,
) -> Result<bool, FailureKind> {
    let mut pooled = connection.acquire().await?;
    let tx = pooled.transaction().await?;
    let step = PurgeStep { tx: &tx, connection, tenant: key.tenant.as_str(), session: key.session.as_str() };
    let is_purged = step.purge(&Owner::Session(key.session.clone()).to_string(), expected).await?;
    tx.commit().await?;
    pooled.release();
    Ok(is_purged)
}

/// A purge within a transaction.
struct PurgeStep<'a> {
    tx: &'a Transaction<'a>,
    connection: &'a PgConnection,
    tenant: &'a str,
    session: &'a str,
}

/// The lineage of a session: where its own log begins, and its parent.
struct Lineage {
    first: i64,
    parent: Option<String>,
    parent_seq: Option<i64>,
    parent_digest: Option<String>,
}

impl PurgeStep<'_> {
    /// Runs a statement with the tenant as `$1`, the session as `$2`, and further parameters.
    async fn run(&self, sql: &str, extra_params: &[Param<'_>]) -> Result<Vec<Row>, FailureKind> {
        let mut params: Vec<Param<'_>> = vec![(&self.tenant, Type::TEXT), (&self.session, Type::TEXT)];
        params.extend(extra_params.iter().cloned());
        Ok(self.tx.query_typed(&self.connection.qualify_tables(sql), &params).await?)
    }

    async fn purge(&self, owner: &str, expected: Option<(Timestamp, Seq)>) -> Result<bool, FailureKind> {
        // One purge per tenant at a time: concurrent purges of related sessions would change the
        // lineage that the other one has read.
        let lock = "SELECT pg_advisory_xact_lock(hashtextextended('tenure purge ' || $1, 0))";
        self.run(lock, &[]).await?;
        // From here on, commits to the session and forks of it wait for this transaction.
        let sql = "SELECT first_seq, parent, parent_seq, parent_digest, created_at, seq FROM tenure_head
            WHERE tenant = $1 AND session = $2 FOR UPDATE";
        let Some(row) = self.run(sql, &[]).await?.pop() else { return Ok(true) };
        let current: (i64, i64) = (row.try_get(4)?, row.try_get(5)?);
        if expected.is_some_and(|(created_at, seq)| current != (created_at.as_microsecond(), seq as i64)) {
            return Ok(false);
        }
        let lineage = Lineage {
            first: row.try_get(0)?,
            parent: row.try_get(1)?,
            parent_seq: row.try_get(2)?,
            parent_digest: row.try_get(3)?,
        };
        let sql = "SELECT session, parent_seq FROM tenure_head WHERE tenant = $1 AND parent = $2
            ORDER BY parent_seq DESC, session LIMIT 1";
        if let Some(fork_row) = self.run(sql, &[]).await?.pop() {
            self.transfer_to_fork(fork_row.try_get(0)?, fork_row.try_get(1)?, &lineage).await?;
        }
        self.run("DELETE FROM tenure_record WHERE tenant = $1 AND session = $2", &[]).await?;
        self.run("DELETE FROM tenure_item WHERE tenant = $1 AND owner = $3", &[(&owner, Type::TEXT)]).await?;
        let sql = "DELETE FROM tenure_blob_ref WHERE tenant = $1 AND session = $2 RETURNING blob_id";
        let blobs: Vec<Vec<u8>> = self.run(sql, &[]).await?.iter().map(|r| r.try_get(0)).collect::<Result<_, _>>()?;
        if !blobs.is_empty() {
            let sql = "DELETE FROM tenure_blob b WHERE tenant = $1 AND id = ANY($3) AND NOT EXISTS
                (SELECT 1 FROM tenure_blob_ref r WHERE r.tenant = b.tenant AND r.blob_id = b.id)";
            self.run(sql, &[(&blobs, Type::BYTEA_ARRAY)]).await?;
        }
        self.run("DELETE FROM tenure_head WHERE tenant = $1 AND session = $2", &[]).await?;
        Ok(true)
    }

    /// Lets the fork with the latest fork point inherit the records and take the session's place.
    async fn transfer_to_fork(
        &self,
        inheriting_fork: &str,
        fork_point: i64,
        lineage: &Lineage,
    ) -> Result<(), FailureKind> {
        if fork_point >= lineage.first {
            let inherited: [Param<'_>; 2] = [(&inheriting_fork, Type::TEXT), (&fork_point, Type::INT8)];
            let sql = "UPDATE tenure_record SET session = $3 WHERE tenant = $1 AND session = $2 AND seq <= $4";
            self.run(sql, &inherited).await?;
            self.run(&messages::mark_inherited(), &inherited[..1]).await?;
            let sql = "INSERT INTO tenure_blob_ref (tenant, session, blob_id, first_seq)
                SELECT tenant, $3, blob_id, first_seq FROM tenure_blob_ref
                WHERE tenant = $1 AND session = $2 AND first_seq <= $4
                ON CONFLICT (tenant, session, blob_id)
                DO UPDATE SET first_seq = least(tenure_blob_ref.first_seq, excluded.first_seq)";
            self.run(sql, &inherited).await?;
            let sql = "UPDATE tenure_head SET first_seq = $4, parent = $5, parent_seq = $6, parent_digest = $7
                WHERE tenant = $1 AND session = $3";
            let params: [Param<'_>; 5] = [
                (&inheriting_fork, Type::TEXT),
                (&lineage.first, Type::INT8),
                (&lineage.parent, Type::TEXT),
                (&lineage.parent_seq, Type::INT8),
                (&lineage.parent_digest, Type::TEXT),
            ];
            self.run(sql, &params).await?;
        } else {
            // Its fork point lies before the session's own first record: all records that it needs
            // are in the session's ancestors.
            let sql = "UPDATE tenure_head SET parent = $4 WHERE tenant = $1 AND session = $3";
            self.run(sql, &[(&inheriting_fork, Type::TEXT), (&lineage.parent, Type::TEXT)]).await?;
        }
        let sql = "UPDATE tenure_head SET parent = $3 WHERE tenant = $1 AND parent = $2 AND session <> $3";
        self.run(sql, &[(&inheriting_fork, Type::TEXT)]).await?;
        Ok(())
    }
}
