//! Snapshots: a read-only transaction with the isolation level `REPEATABLE READ` on one connection
//! of the pool. It locks no rows, so writers and purges are not blocked.

use super::connection::{Param, PgConnection, PooledConnection, RowSource, STATEMENT_TIMEOUT};
use super::failure::FailureKind;
use super::{heads, items, records};
use crate::store::item::{Item, Namespace};
use crate::store::query::RecordRange;
use crate::store::snapshot::Snapshot;
use crate::types::blob::BlobId;
use crate::types::entry::Record;
use crate::types::error::Result;
use crate::types::head::Head;
use crate::types::id::{SessionKey, Tenant};
use async_trait::async_trait;
use std::sync::Arc;
use tokio_postgres::Row;

/// A connection in a transaction. It is never retried: another connection would have another snapshot. Dropping it closes the connection, which ends the transaction.
pub(super) struct PgSnapshot {
    connection: Arc<PgConnection>,
    transaction: PooledConnection,
}

impl PgSnapshot {
    /// Begins the transaction. The first statement fixes what it sees, so it is executed here.
    pub async fn begin(connection: Arc<PgConnection>) -> Result<Self> {
        let mut retries = connection.retry_budget();
        let transaction = loop {
            match connection.acquire().await {
                Ok(pooled) => break pooled,
                Err(failure) => retries.wait(failure).await?,
            }
        };
        let snapshot = Self { connection, transaction };
        let begin = snapshot.transaction.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SELECT 1");
        let begin = async { Ok(begin.await?) };
        snapshot.connection.with_timeout(STATEMENT_TIMEOUT, begin).await.map_err(FailureKind::into_error)?;
        Ok(snapshot)
    }
}

impl RowSource for PgSnapshot {
    async fn rows(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
        let sql = self.connection.qualify_tables(sql);
        let query = async { Ok(self.transaction.query_typed(&sql, params).await?) };
        self.connection.with_timeout(STATEMENT_TIMEOUT, query).await.map_err(FailureKind::into_error)
    }
}

#[async_trait]
impl Snapshot for PgSnapshot {
    async fn heads(&self, after: Option<&SessionKey>, limit: usize) -> Result<Vec<Head>> {
        heads::heads_after(self, after, limit).await
    }

    async fn records(&self, key: &SessionKey, range: &RecordRange) -> Result<Vec<Record>> {
        records::records(self, key, range).await
    }

    async fn items(&self, after: Option<(&Namespace, &str)>, limit: usize) -> Result<Vec<(Namespace, Item)>> {
        items::items_after(self, after, limit).await
    }

    async fn blob(&self, tenant: &Tenant, id: &BlobId) -> Result<Option<Arc<[u8]>>> {
        records::blob(self, tenant, id).await
    }
}
