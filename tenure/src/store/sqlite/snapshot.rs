//! Snapshots: a read transaction on a connection of its own.
//!
//! In WAL mode it blocks no writer, of this process or another; the write-ahead log grows until the
//! snapshot is dropped, because its pages cannot be reused meanwhile.

use super::database::Database;
use super::fault::StoreResult;
use super::{blocking, heads, items, records};
use crate::store::item::{Item, Namespace};
use crate::store::query::RecordRange;
use crate::store::snapshot::Snapshot;
use crate::types::blob::BlobId;
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{SessionKey, Tenant};
use async_trait::async_trait;
use rusqlite::Connection;
use std::sync::{Arc, Mutex};

/// A connection in a read transaction.
pub(super) struct SqliteSnapshot {
    connection: Arc<Mutex<Connection>>,
    file: Database,
}

impl SqliteSnapshot {
    /// Begins the transaction. The first read fixes what it sees, so it is made here.
    pub fn begin(connection: Connection, file: Database) -> Result<Self> {
        let begin = "BEGIN DEFERRED; SELECT 1 FROM head LIMIT 1;";
        connection.execute_batch(begin).map_err(|e| file.error(e))?;
        Ok(Self { connection: Arc::new(Mutex::new(connection)), file })
    }

    async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection, &Database) -> StoreResult<T> + Send + 'static,
    ) -> Result<T> {
        let connection = self.connection.clone();
        let file = self.file.clone();
        blocking(move || {
            let connection = connection.lock().map_err(|_| Error::unavailable("an earlier read panicked"))?;
            work(&connection, &file).map_err(|fault| file.fault_to_error(fault))
        })
        .await
    }
}

#[async_trait]
impl Snapshot for SqliteSnapshot {
    async fn heads(&self, after: Option<&SessionKey>, limit: usize) -> Result<Vec<Head>> {
        let after = after.cloned();
        self.read(move |conn, file| heads::heads_after(conn, file, after.as_ref(), limit)).await
    }

    async fn records(&self, key: &SessionKey, range: &RecordRange) -> Result<Vec<Record>> {
        let key = key.clone();
        let range = range.clone();
        self.read(move |conn, file| records::records_in_transaction(conn, file, &key, &range)).await
    }

    async fn items(&self, after: Option<(&Namespace, &str)>, limit: usize) -> Result<Vec<(Namespace, Item)>> {
        let after = after.map(|(namespace, key)| (namespace.clone(), key.to_owned()));
        self.read(move |conn, file| items::items_after(conn, file, after.as_ref(), limit)).await
    }

    async fn blob(&self, tenant: &Tenant, id: &BlobId) -> Result<Option<Arc<[u8]>>> {
        let tenant = tenant.clone();
        let id = *id;
        self.read(move |conn, _| records::blob(conn, &tenant, &id)).await
    }
}
