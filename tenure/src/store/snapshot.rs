//! Snapshots: everything that a store holds, at one point in time, for backups.

use crate::store::item::{Item, Namespace};
use crate::store::query::RecordRange;
use crate::types::blob::BlobId;
use crate::types::entry::Record;
use crate::types::error::Result;
use crate::types::head::Head;
use crate::types::id::{SessionKey, Tenant};
use async_trait::async_trait;
use std::sync::Arc;

/// Snapshots of a store: an optional capability.
#[async_trait]
pub trait Snapshots: Send + Sync {
    /// Takes a snapshot. It contains every write that was acknowledged before the call. Writers are
    /// not blocked while it exists, except that a purge may wait for it to be dropped.
    async fn snapshot(&self) -> Result<Box<dyn Snapshot>>;
}

/// A read-only view of a store at one point in time. Writes that are made after it was taken are not
/// visible. It holds resources of the store (a connection, a lock) until it is dropped.
#[async_trait]
pub trait Snapshot: Send + Sync {
    /// Lists the heads of all tenants in the order of their keys, after a key (exclusive), at most
    /// `limit`.
    async fn heads(&self, after: Option<&SessionKey>, limit: usize) -> Result<Vec<Head>>;

    /// Reads records like [`Store::records`](crate::store::Store::records).
    async fn records(&self, key: &SessionKey, range: &RecordRange) -> Result<Vec<Record>>;

    /// Lists the items of all namespaces in a fixed order, after an item (exclusive), at most
    /// `limit`. Items that have expired and were not removed yet are included.
    async fn items(&self, after: Option<(&Namespace, &str)>, limit: usize) -> Result<Vec<(Namespace, Item)>>;

    /// Returns the bytes of a blob, or `None` if the tenant does not have it.
    async fn blob(&self, tenant: &Tenant, id: &BlobId) -> Result<Option<Arc<[u8]>>>;
}
