//! A store that fails on request.

use crate::store::contract::{Commit, Concurrency, HeadCheck, HeadChecker, Notifier, Store};
use crate::store::finding::{Finding, Orphan};
use crate::store::item::{Item, Namespace, Owner};
use crate::store::message_index::{MessageIndex, MessageMatches, MessageQuery, SessionIndexPart, WordRules};
use crate::store::query::{HeadPage, RecordRange, SessionQuery};
use crate::store::shown::{RecordLocation, ShownRecord};
use crate::store::snapshot::Snapshots;
use crate::types::blob::BlobId;
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Seq, SessionKey, Tenant};
use crate::types::status::Status;
use async_trait::async_trait;
use jiff::Timestamp;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use tokio::sync::Semaphore;

/// When a store fails, relative to a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailurePoint {
    /// The commit is not persisted.
    BeforeCommit,
    /// The commit is persisted but not acknowledged.
    AfterCommit,
}

/// A store that passes everything on to another one, counts commits, and fails at one of them. From
/// then on every operation fails: permanently, as in a killed process, or until
/// [`FailingStore::recover`] is called, as in a database outage.
///
/// Commits are counted from 0. A conditional purge (`purge_at`) counts as a commit.
#[derive(Debug)]
pub struct FailingStore {
    inner: Arc<dyn Store>,
    fails_at: Option<(usize, FailurePoint)>,
    recoverable: bool,
    permits: Option<Arc<Semaphore>>,
    commits: AtomicUsize,
    records_read: AtomicUsize,
    failed: AtomicBool,
}

impl FailingStore {
    /// A store that fails permanently at this commit, or, with `None`, once
    /// [`FailingStore::fail`] is called.
    pub fn new(inner: &Arc<dyn Store>, fails_at: Option<(usize, FailurePoint)>) -> Arc<Self> {
        Arc::new(Self::build(inner, fails_at))
    }

    /// A store that is unavailable from this commit on, until [`FailingStore::recover`] is called.
    pub fn unavailable_at(inner: &Arc<dyn Store>, commit: usize, point: FailurePoint) -> Arc<Self> {
        Arc::new(Self { recoverable: true, ..Self::build(inner, Some((commit, point))) })
    }

    /// A store that takes a permit before each commit.
    pub fn with_permits(inner: &Arc<dyn Store>, permits: &Arc<Semaphore>) -> Arc<Self> {
        Arc::new(Self { permits: Some(permits.clone()), ..Self::build(inner, None) })
    }

    fn build(inner: &Arc<dyn Store>, fails_at: Option<(usize, FailurePoint)>) -> Self {
        Self {
            inner: inner.clone(),
            fails_at,
            recoverable: false,
            permits: None,
            commits: AtomicUsize::new(0),
            records_read: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
        }
    }

    /// Makes every operation fail from now on.
    pub fn fail(&self) {
        self.failed.store(true, SeqCst);
    }

    /// Makes every operation succeed again.
    pub fn recover(&self) {
        self.failed.store(false, SeqCst);
    }

    /// Whether every operation fails.
    pub fn has_failed(&self) -> bool {
        self.failed.load(SeqCst)
    }

    /// The number of attempted commits, which include lease renewals.
    pub fn commits(&self) -> usize {
        self.commits.load(SeqCst)
    }

    /// The number of records read.
    pub fn records_read(&self) -> usize {
        self.records_read.load(SeqCst)
    }

    fn error(&self) -> Error {
        if self.recoverable {
            Error::unavailable("the store is unavailable, as the test requested")
        } else {
            Error::full("a store that fails as the test requested")
        }
    }

    fn available_index(&self) -> Result<&dyn MessageIndex> {
        self.available()?.message_index().ok_or_else(|| self.error())
    }

    fn available(&self) -> Result<&dyn Store> {
        if self.has_failed() { Err(self.error()) } else { Ok(&*self.inner) }
    }
}

#[async_trait]
impl Store for FailingStore {
    async fn commit(&self, commit: &Commit) -> Result<()> {
        let inner = self.available()?;
        let n = self.commits.fetch_add(1, SeqCst);
        if let Some(permits) = &self.permits {
            permits.acquire().await.unwrap().forget();
        }
        match self.fails_at.filter(|(at, _)| *at == n) {
            None => inner.commit(commit).await,
            Some((_, point)) => {
                self.fail();
                if point == FailurePoint::AfterCommit {
                    inner.commit(commit).await?;
                }
                Err(self.error())
            }
        }
    }
    async fn head(&self, key: &SessionKey) -> Result<Option<Head>> {
        self.available()?.head(key).await
    }
    fn head_checker(&self) -> Option<&dyn HeadChecker> {
        self.inner.head_checker().map(|_| self as &dyn HeadChecker)
    }
    fn notifier(&self) -> Option<&dyn Notifier> {
        self.inner.notifier()
    }
    fn snapshots(&self) -> Option<&dyn Snapshots> {
        self.inner.snapshots()
    }
    fn message_index(&self) -> Option<&dyn MessageIndex> {
        self.inner.message_index().map(|_| self as &dyn MessageIndex)
    }
    fn concurrency(&self) -> Concurrency {
        self.inner.concurrency()
    }
    async fn heads(&self, query: &SessionQuery) -> Result<Vec<Head>> {
        self.available()?.heads(query).await
    }
    async fn page(&self, query: &SessionQuery, max_scan: usize) -> Result<HeadPage> {
        self.available()?.page(query, max_scan).await
    }
    async fn count_items(&self, name: &str) -> Result<u64> {
        self.available()?.count_items(name).await
    }

    async fn count(&self) -> Result<Vec<(Status, u64)>> {
        self.available()?.count().await
    }
    async fn records(&self, key: &SessionKey, range: &RecordRange) -> Result<Vec<Record>> {
        let records = self.available()?.records(key, range).await?;
        self.records_read.fetch_add(records.len(), SeqCst);
        Ok(records)
    }
    async fn sessions_showing(
        &self,
        tenant: &Tenant,
        records: &[RecordLocation],
        limit: usize,
    ) -> Result<Vec<ShownRecord>> {
        self.available()?.sessions_showing(tenant, records, limit).await
    }

    async fn purge(&self, key: &SessionKey) -> Result<()> {
        self.available()?.purge(key).await
    }
    async fn purge_at(&self, key: &SessionKey, created_at: Timestamp, seq: Seq) -> Result<()> {
        let inner = self.available()?;
        let n = self.commits.fetch_add(1, SeqCst);
        match self.fails_at.filter(|(at, _)| *at == n) {
            None => inner.purge_at(key, created_at, seq).await,
            Some((_, point)) => {
                self.fail();
                if point == FailurePoint::AfterCommit {
                    inner.purge_at(key, created_at, seq).await?;
                }
                Err(self.error())
            }
        }
    }
    async fn put(&self, namespace: &Namespace, item: &Item, max_items: Option<usize>) -> Result<()> {
        self.available()?.put(namespace, item, max_items).await
    }
    async fn get(&self, namespace: &Namespace, key: &str, used_at: Option<Timestamp>) -> Result<Option<Item>> {
        self.available()?.get(namespace, key, used_at).await
    }
    async fn get_many(&self, namespace: &Namespace, keys: &[&str], used_at: Option<Timestamp>) -> Result<Vec<Item>> {
        self.available()?.get_many(namespace, keys, used_at).await
    }
    async fn items(&self, namespace: &Namespace, after: Option<&str>, limit: usize) -> Result<Vec<Item>> {
        self.available()?.items(namespace, after, limit).await
    }
    async fn remove(&self, namespace: &Namespace, key: &str) -> Result<bool> {
        self.available()?.remove(namespace, key).await
    }
    async fn expire(&self, now: Timestamp, limit: usize) -> Result<usize> {
        self.available()?.expire(now, limit).await
    }
    async fn delete_owner(&self, tenant: &Tenant, owner: &Owner) -> Result<()> {
        self.available()?.delete_owner(tenant, owner).await
    }
    async fn scrub(&self, tenant: &Tenant, owner: &Owner) -> Result<()> {
        self.available()?.scrub(tenant, owner).await
    }
    async fn blob(&self, tenant: &Tenant, id: &BlobId) -> Result<Option<Arc<[u8]>>> {
        self.available()?.blob(tenant, id).await
    }
    async fn check(&self, remove: &[Orphan]) -> Result<Vec<Finding>> {
        self.available()?.check(remove).await
    }
}

#[async_trait]
impl MessageIndex for FailingStore {
    async fn find(&self, query: &MessageQuery) -> Result<MessageMatches> {
        self.available_index()?.find(query).await
    }
    async fn indexed(&self, key: &SessionKey) -> Result<Vec<(Seq, usize)>> {
        self.available_index()?.indexed(key).await
    }
    fn is_used(&self) -> bool {
        self.inner.message_index().is_some_and(MessageIndex::is_used)
    }

    async fn next_unindexed(&self, rules: WordRules) -> Result<Option<SessionKey>> {
        self.available_index()?.next_unindexed(rules).await
    }
    async fn replace(&self, part: &SessionIndexPart) -> Result<()> {
        self.available_index()?.replace(part).await
    }

    async fn compact(&self) -> Result<bool> {
        self.available_index()?.compact().await
    }
}

impl HeadChecker for FailingStore {
    fn head_if_changed(&self, key: &SessionKey, known_json: &str) -> Option<Result<HeadCheck>> {
        match self.available() {
            Ok(store) => store.head_checker()?.head_if_changed(key, known_json),
            Err(e) => Some(Err(e)),
        }
    }
}
