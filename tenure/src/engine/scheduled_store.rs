//! A store decorator that schedules calls: each call waits until the scheduler admits it.

use crate::engine::read_scheduler::{Permit, Scheduler};
use crate::store::contract::{Commit, Concurrency, HeadChecker, Notifier, Store};
use crate::store::finding::{Finding, Orphan};
use crate::store::item::{Item, Namespace, Owner};
use crate::store::message_index::{MessageIndex, MessageMatches, MessageQuery, SessionIndexPart, WordRules};
use crate::store::query::{HeadPage, OwnerFilter, RecordRange, SessionQuery};
use crate::store::shown::{RecordLocation, ShownRecord};
use crate::store::snapshot::Snapshots;
use crate::types::blob::BlobId;
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{AccessScope, Principal, Seq, SessionKey, Tenant, User};
use crate::types::status::Status;
use async_trait::async_trait;
use jiff::Timestamp;
use std::sync::Arc;

/// The party on whose behalf calls are scheduled.
#[derive(Clone, Debug)]
pub(crate) enum ReadPurpose {
    /// A principal that browses. Reads are scheduled, writes are not.
    Browsing(Principal),
    /// Turns and the server's own work. Each call is on behalf of the tenant that it concerns.
    /// Writes are scheduled too, because they take a connection like reads.
    Turns,
}

/// A store whose calls are admitted by a scheduler.
#[derive(Clone, Debug)]
pub(crate) struct ScheduledStore {
    /// The store that serves the calls.
    pub inner: Arc<dyn Store>,
    /// The scheduler that admits the calls.
    pub scheduler: Arc<Scheduler>,
    /// The party on whose behalf calls are made.
    pub caller: ReadPurpose,
}

impl ScheduledStore {
    async fn read(&self, tenant: &Tenant) -> Result<Permit> {
        match &self.caller {
            ReadPurpose::Browsing(principal) => self.scheduler.acquire(principal).await,
            ReadPurpose::Turns => self.scheduler.acquire(&tenant_principal(tenant)).await,
        }
    }

    async fn write(&self, tenant: &Tenant) -> Result<Option<Permit>> {
        match &self.caller {
            ReadPurpose::Browsing(_) => Ok(None),
            ReadPurpose::Turns => Ok(Some(self.scheduler.acquire(&tenant_principal(tenant)).await?)),
        }
    }

    /// Admits a query over heads. `None` means that the query is not scheduled.
    async fn read_filtered(&self, owner_filter: &OwnerFilter) -> Result<Option<Permit>> {
        match owner_filter {
            OwnerFilter::User(tenant, _) | OwnerFilter::Tenant(tenant) => Ok(Some(self.read(tenant).await?)),
            // Only the sweep and the takeover of runs query all tenants. They are not scheduled.
            OwnerFilter::AllTenants => Ok(None),
        }
    }
}

fn tenant_principal(tenant: &Tenant) -> Principal {
    Principal { tenant: tenant.clone(), user: User::default(), scope: AccessScope::Own, quota: None }
}

#[async_trait]
impl Store for ScheduledStore {
    async fn commit(&self, commit: &Commit) -> Result<()> {
        let _permit = self.write(&commit.head.tenant).await?;
        self.inner.commit(commit).await
    }

    async fn head(&self, key: &SessionKey) -> Result<Option<Head>> {
        let _permit = self.read(&key.tenant).await?;
        self.inner.head(key).await
    }

    // Not scheduled: it never blocks.
    fn head_checker(&self) -> Option<&dyn HeadChecker> {
        self.inner.head_checker()
    }

    fn notifier(&self) -> Option<&dyn Notifier> {
        self.inner.notifier()
    }

    fn message_index(&self) -> Option<&dyn MessageIndex> {
        self.inner.message_index().map(|_| self as &dyn MessageIndex)
    }

    // Not scheduled: a snapshot has a connection of its own.
    fn snapshots(&self) -> Option<&dyn Snapshots> {
        self.inner.snapshots()
    }

    fn concurrency(&self) -> Concurrency {
        self.inner.concurrency()
    }

    async fn heads(&self, query: &SessionQuery) -> Result<Vec<Head>> {
        let _permit = self.read_filtered(&query.owner).await?;
        self.inner.heads(query).await
    }

    async fn page(&self, query: &SessionQuery, max_scan: usize) -> Result<HeadPage> {
        let _permit = self.read_filtered(&query.owner).await?;
        self.inner.page(query, max_scan).await
    }

    async fn count_items(&self, name: &str) -> Result<u64> {
        self.inner.count_items(name).await
    }

    async fn count(&self) -> Result<Vec<(Status, u64)>> {
        self.inner.count().await
    }

    async fn records(&self, key: &SessionKey, range: &RecordRange) -> Result<Vec<Record>> {
        let _permit = self.read(&key.tenant).await?;
        self.inner.records(key, range).await
    }

    async fn sessions_showing(
        &self,
        tenant: &Tenant,
        records: &[RecordLocation],
        limit: usize,
    ) -> Result<Vec<ShownRecord>> {
        let _permit = self.read(tenant).await?;
        self.inner.sessions_showing(tenant, records, limit).await
    }

    async fn purge(&self, key: &SessionKey) -> Result<()> {
        let _permit = self.write(&key.tenant).await?;
        self.inner.purge(key).await
    }

    async fn purge_at(&self, key: &SessionKey, created_at: Timestamp, seq: Seq) -> Result<()> {
        let _permit = self.write(&key.tenant).await?;
        self.inner.purge_at(key, created_at, seq).await
    }

    async fn put(&self, namespace: &Namespace, item: &Item, max_items: Option<usize>) -> Result<()> {
        let _permit = self.write(&namespace.tenant).await?;
        self.inner.put(namespace, item, max_items).await
    }

    async fn get(&self, namespace: &Namespace, key: &str, used_at: Option<Timestamp>) -> Result<Option<Item>> {
        let _permit = self.read(&namespace.tenant).await?;
        self.inner.get(namespace, key, used_at).await
    }

    async fn get_many(&self, namespace: &Namespace, keys: &[&str], used_at: Option<Timestamp>) -> Result<Vec<Item>> {
        let _permit = self.read(&namespace.tenant).await?;
        self.inner.get_many(namespace, keys, used_at).await
    }

    async fn items(&self, namespace: &Namespace, after: Option<&str>, limit: usize) -> Result<Vec<Item>> {
        let _permit = self.read(&namespace.tenant).await?;
        self.inner.items(namespace, after, limit).await
    }

    async fn remove(&self, namespace: &Namespace, key: &str) -> Result<bool> {
        let _permit = self.write(&namespace.tenant).await?;
        self.inner.remove(namespace, key).await
    }

    async fn expire(&self, now: Timestamp, limit: usize) -> Result<usize> {
        self.inner.expire(now, limit).await
    }

    async fn delete_owner(&self, tenant: &Tenant, owner: &Owner) -> Result<()> {
        let _permit = self.write(tenant).await?;
        self.inner.delete_owner(tenant, owner).await
    }

    async fn scrub(&self, tenant: &Tenant, owner: &Owner) -> Result<()> {
        self.inner.scrub(tenant, owner).await
    }

    async fn blob(&self, tenant: &Tenant, id: &BlobId) -> Result<Option<Arc<[u8]>>> {
        let _permit = self.read(tenant).await?;
        self.inner.blob(tenant, id).await
    }

    async fn check(&self, remove: &[Orphan]) -> Result<Vec<Finding>> {
        self.inner.check(remove).await
    }
}

impl ScheduledStore {
    /// The inner store's message index.
    fn inner_index(&self) -> Result<&dyn MessageIndex> {
        self.inner.message_index().ok_or_else(|| Error::unavailable("the store has no message index"))
    }
}

#[async_trait]
impl MessageIndex for ScheduledStore {
    async fn find(&self, query: &MessageQuery) -> Result<MessageMatches> {
        let _permit = self.read(&query.tenant).await?;
        self.inner_index()?.find(query).await
    }

    async fn indexed(&self, key: &SessionKey) -> Result<Vec<(Seq, usize)>> {
        let _permit = self.read(&key.tenant).await?;
        self.inner_index()?.indexed(key).await
    }

    fn is_used(&self) -> bool {
        self.inner.message_index().is_some_and(MessageIndex::is_used)
    }

    async fn next_unindexed(&self, rules: WordRules) -> Result<Option<SessionKey>> {
        self.inner_index()?.next_unindexed(rules).await
    }

    async fn replace(&self, part: &SessionIndexPart) -> Result<()> {
        let _permit = self.write(&part.key.tenant).await?;
        self.inner_index()?.replace(part).await
    }

    async fn compact(&self) -> Result<bool> {
        self.inner_index()?.compact().await
    }
}
