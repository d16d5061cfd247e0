//! Snapshots: the heads and items of the index, copied at once, and the records up to those heads.
//!
//! Files only grow, so the records of a head stay readable while the session grows; only a purge
//! removes them, and waits until the snapshot is dropped.

use super::JsonlStore;
use super::engine::JsonlEngine;
use super::paths::LogFile;
use crate::store::item::{Item, Namespace};
use crate::store::query::RecordRange;
use crate::store::snapshot::{Snapshot, Snapshots};
use crate::types::blob::BlobId;
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{SessionKey, Tenant};
use async_trait::async_trait;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use tokio::sync::OwnedRwLockReadGuard;

/// The state of the index at one point in time.
struct JsonlSnapshot {
    engine: Arc<JsonlEngine>,
    heads: BTreeMap<SessionKey, Head>,
    items: BTreeMap<(Namespace, String), Arc<Item>>,
    _no_purge: OwnedRwLockReadGuard<()>,
}

#[async_trait]
impl Snapshots for JsonlStore {
    async fn snapshot(&self) -> Result<Box<dyn Snapshot>> {
        let no_purge = self.snapshot_lock.clone().read_owned().await;
        let state = self.engine.state();
        if let Some(damage) = state.damaged.values().next() {
            return Err(Error::corrupt(&damage.location, &damage.reason));
        }
        let heads = state.index.all_heads().map(|head| (head.key(), head.clone())).collect();
        let items = state.index.all_items().map(|(n, i)| ((n.clone(), i.key.clone()), i.clone())).collect();
        drop(state);
        Ok(Box::new(JsonlSnapshot { engine: self.engine.clone(), heads, items, _no_purge: no_purge }))
    }
}

#[async_trait]
impl Snapshot for JsonlSnapshot {
    async fn heads(&self, after: Option<&SessionKey>, limit: usize) -> Result<Vec<Head>> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        Ok(self.heads.range((from, Bound::Unbounded)).take(limit).map(|(_, head)| head.clone()).collect())
    }

    async fn records(&self, key: &SessionKey, range: &RecordRange) -> Result<Vec<Record>> {
        let Some(head) = self.heads.get(key) else { return Ok(Vec::new()) };
        let log_file = LogFile::session(key);
        let range = RecordRange { upto: range.upto.min(head.seq), ..range.clone() };
        let engine = self.engine.clone();
        super::blocking(move || {
            // The file may be rewritten, with the same records at other offsets, during the read.
            engine.records(&log_file, &range).or_else(|_| engine.records(&log_file, &range))
        })
        .await
    }

    async fn items(&self, after: Option<(&Namespace, &str)>, limit: usize) -> Result<Vec<(Namespace, Item)>> {
        let after = after.map(|(namespace, key)| (namespace.clone(), key.to_owned()));
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let page = self.items.range((from, Bound::Unbounded)).take(limit);
        Ok(page.map(|((namespace, _), item)| (namespace.clone(), Item::clone(item))).collect())
    }

    async fn blob(&self, tenant: &Tenant, id: &BlobId) -> Result<Option<Arc<[u8]>>> {
        let engine = self.engine.clone();
        let tenant = tenant.clone();
        let id = *id;
        super::blocking(move || engine.blob(&tenant, id)).await
    }
}
