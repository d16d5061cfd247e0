//! The store in one SQLite file, with one writer connection and a bounded pool of readers.
//!
//! Writes use group commit: one transaction includes all writes that have queued, so that many
//! commits share one fsync. Readers run concurrently, on a few dedicated threads. Other processes
//! may use the same file at the same time.

mod blocking;
mod check;
mod commit;
mod database;
mod fault;
mod heads;
mod idle_checkpoint;
mod items;
mod messages;
mod purge;
mod readers;
mod record_key;
mod records;
mod shown;
mod snapshot;
mod write_batch;
mod writer;

#[cfg(test)]
mod tests;

use self::blocking::BlockingContext;
use self::commit::CommitRows;
use self::database::{Database, Pool};
use self::readers::Readers;
use self::writer::Writer;
use crate::store::contract::{Commit, Concurrency, HeadCheck, HeadChecker, Store, WriteCost};
use crate::store::finding::{Finding, Orphan};
use crate::store::item::{Item, Namespace, Owner};
use crate::store::message_index::{MessageIndex, MessageMatches, MessageQuery, SessionIndexPart, WordRules};
use crate::store::query::{HeadPage, RecordRange, SessionQuery};
use crate::store::shown::{RecordLocation, ShownRecord};
use crate::store::snapshot::{Snapshot, Snapshots};
use crate::store::sqlite::fault::StoreResult;
use crate::types::blob::BlobId;
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Seq, SessionKey, Tenant};
use crate::types::status::Status;
use async_trait::async_trait;
use jiff::Timestamp;
use rusqlite::Connection;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

/// A store of sessions in one SQLite file (WAL mode). Several processes may open the same file.
pub struct SqliteStore {
    readers: Arc<Pool>,
    threads: Readers,
    writer: Writer,
    /// Whether a step that moves messages within the message index is queued.
    is_moving: Arc<AtomicBool>,
}

/// Clears the flag of a queued step when the step is done or dropped.
struct MoveDone(Arc<AtomicBool>);

impl Drop for MoveDone {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl SqliteStore {
    /// Opens a file, or creates it in an existing directory, and migrates it to the newest format.
    pub async fn open(file: &str) -> Result<Self> {
        let file = Database::new(file)?;
        blocking(move || {
            let connection = file.open()?;
            file.migrate(&connection)?;
            file.ensure_reserve();
            let writer = Writer::start(file.clone(), connection)?;
            Ok(Self {
                readers: Arc::new(Pool::new(file)),
                threads: Readers::new(database::MAX_READERS),
                writer,
                is_moving: Arc::default(),
            })
        })
        .await
    }

    /// Returns the format of a file, which is only read. `None` means that the file does not exist
    /// or has no format yet.
    pub async fn format(file: &str) -> Result<Option<u32>> {
        let file = Database::new(file)?;
        blocking(move || file.existing_format()).await
    }

    /// Runs a short read: inline on this thread if it runs no other task, otherwise on a reader
    /// thread (D-031).
    async fn read_short<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection, &Database) -> StoreResult<T> + Send + 'static,
    ) -> Result<T> {
        let permit = self.readers.permit().await?;
        match BlockingContext::current() {
            Some(BlockingContext::Dedicated) => self.readers.with(work),
            _ => self.read_with(permit, work).await,
        }
    }

    /// Runs a read on a reader thread, with a connection of its own.
    async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection, &Database) -> StoreResult<T> + Send + 'static,
    ) -> Result<T> {
        self.read_with(self.readers.permit().await?, work).await
    }

    async fn read_with<T: Send + 'static>(
        &self,
        permit: OwnedSemaphorePermit,
        work: impl FnOnce(&Connection, &Database) -> StoreResult<T> + Send + 'static,
    ) -> Result<T> {
        self.on_reader(move |pool| {
            let _permit = permit;
            pool.with(work)
        })
        .await
    }

    /// Runs work on one of the reader threads (D-032).
    async fn on_reader<T: Send + 'static>(&self, work: impl FnOnce(&Pool) -> Result<T> + Send + 'static) -> Result<T> {
        let pool = self.readers.clone();
        let (reply, answer) = oneshot::channel();
        self.threads.run(move || drop(reply.send(work(&pool)))).map_err(Error::unavailable_from)?;
        answer.await.unwrap_or_else(|_| Err(Error::unavailable("a read of the SQLite file panicked; see the log")))
    }
}

/// Maximum number of records for which a read counts as short.
const MAX_SHORT_READ: Seq = 128;

/// Runs work that blocks, on a blocking thread of the runtime.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(Error::unavailable_from(e)))
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore").field("file", &self.readers.file).finish_non_exhaustive()
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn commit(&self, commit: &Commit) -> Result<()> {
        let write = CommitRows::new(commit)?;
        let recent = self.writer.write(move |conn, file| write.apply(conn, file)).await?;
        if recent > messages::MAX_RECENT && !self.is_moving.swap(true, Ordering::Relaxed) {
            let move_done = MoveDone(self.is_moving.clone());
            self.writer.submit_background(move |conn, _| {
                let _ = &move_done;
                messages::move_recent(conn)
            });
        }
        Ok(())
    }

    async fn head(&self, key: &SessionKey) -> Result<Option<Head>> {
        let key = key.clone();
        self.read_short(move |conn, file| heads::head(conn, file, &key)).await
    }

    fn head_checker(&self) -> Option<&dyn HeadChecker> {
        Some(self)
    }

    fn message_index(&self) -> Option<&dyn MessageIndex> {
        Some(self)
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        Some(self)
    }

    fn concurrency(&self) -> Concurrency {
        Concurrency { reads: database::MAX_READERS, writes: WriteCost::DedicatedWriter }
    }

    async fn heads(&self, query: &SessionQuery) -> Result<Vec<Head>> {
        let query = query.clone();
        self.read(move |conn, file| heads::heads(conn, file, &query)).await
    }

    async fn page(&self, query: &SessionQuery, max_scan: usize) -> Result<HeadPage> {
        let query = query.clone();
        self.read(move |conn, file| heads::page(conn, file, &query, max_scan)).await
    }

    async fn count_items(&self, name: &str) -> Result<u64> {
        let name = name.to_owned();
        self.read(move |conn, _| items::count(conn, &name)).await
    }

    async fn count(&self) -> Result<Vec<(Status, u64)>> {
        self.read(|conn, _| heads::count(conn)).await
    }

    async fn records(&self, key: &SessionKey, range: &RecordRange) -> Result<Vec<Record>> {
        let key = key.clone();
        let range = range.clone();
        let max_records = range.upto.saturating_sub(range.after).min(range.limit as Seq);
        let work = move |conn: &Connection, file: &Database| records::records(conn, file, &key, &range);
        if max_records <= MAX_SHORT_READ { self.read_short(work).await } else { self.read(work).await }
    }

    async fn sessions_showing(
        &self,
        tenant: &Tenant,
        records: &[RecordLocation],
        limit: usize,
    ) -> Result<Vec<ShownRecord>> {
        let tenant = tenant.clone();
        let records = records.to_vec();
        self.read_short(move |conn, _| shown::sessions_showing(conn, &tenant, &records, limit)).await
    }

    async fn purge(&self, key: &SessionKey) -> Result<()> {
        let key = key.clone();
        self.writer.write_freeing_space(move |conn, file| purge::purge(conn, file, &key, None)).await
    }

    async fn purge_at(&self, key: &SessionKey, created_at: Timestamp, seq: Seq) -> Result<()> {
        let key = key.clone();
        self.writer.write_freeing_space(move |conn, file| purge::purge(conn, file, &key, Some((created_at, seq)))).await
    }

    async fn put(&self, namespace: &Namespace, item: &Item, max_items: Option<usize>) -> Result<()> {
        item.check()?;
        let namespace = namespace.clone();
        let item = item.clone();
        self.writer.write(move |conn, _| items::put(conn, &namespace, &item, max_items)).await
    }

    async fn get(&self, namespace: &Namespace, key: &str, used_at: Option<Timestamp>) -> Result<Option<Item>> {
        Ok(self.get_many(namespace, &[key], used_at).await?.pop())
    }

    async fn get_many(&self, namespace: &Namespace, keys: &[&str], used_at: Option<Timestamp>) -> Result<Vec<Item>> {
        if used_at.is_none() {
            self.writer.flush_unsynced().await?;
        }
        let read_namespace = namespace.clone();
        let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        let mut items = self.read_short(move |conn, file| items::get_many(conn, file, &read_namespace, &keys)).await?;
        if let Some(at) = used_at.filter(|_| !items.is_empty()) {
            items.iter_mut().for_each(|item| item.record_use(at));
            let namespace = namespace.clone();
            let keys: Vec<String> = items.iter().map(|item| item.key.clone()).collect();
            self.writer.submit_unsynced(move |conn, _| items::record_uses(conn, &namespace, &keys, at));
        }
        Ok(items)
    }

    async fn items(&self, namespace: &Namespace, after: Option<&str>, limit: usize) -> Result<Vec<Item>> {
        self.writer.flush_unsynced().await?;
        let namespace = namespace.clone();
        let after = after.map(str::to_owned);
        self.read_short(move |conn, file| items::items(conn, file, &namespace, after.as_deref(), limit)).await
    }

    async fn remove(&self, namespace: &Namespace, key: &str) -> Result<bool> {
        let namespace = namespace.clone();
        let key = key.to_owned();
        self.writer.write_freeing_space(move |conn, _| items::remove(conn, &namespace, &key)).await
    }

    async fn expire(&self, now: Timestamp, limit: usize) -> Result<usize> {
        self.writer.write_freeing_space(move |conn, _| items::expire(conn, now, limit)).await
    }

    async fn delete_owner(&self, tenant: &Tenant, owner: &Owner) -> Result<()> {
        let tenant = tenant.clone();
        let owner = owner.clone();
        self.writer.write_freeing_space(move |conn, _| items::delete_owner_items(conn, &tenant, &owner)).await?;
        self.writer.run_exclusive(|conn, file| file.scrub(conn)).await
    }

    async fn scrub(&self, _: &Tenant, _: &Owner) -> Result<()> {
        self.writer.run_exclusive(|conn, file| file.truncate_wal(conn)).await
    }

    async fn blob(&self, tenant: &Tenant, id: &BlobId) -> Result<Option<Arc<[u8]>>> {
        let tenant = tenant.clone();
        let id = *id;
        self.read(move |conn, _| records::blob(conn, &tenant, &id)).await
    }

    async fn check(&self, remove: &[Orphan]) -> Result<Vec<Finding>> {
        if !remove.is_empty() {
            let orphans = remove.to_vec();
            self.writer.write_freeing_space(move |conn, _| check::remove(conn, &orphans)).await?;
        }
        let permit = self.readers.permit().await?;
        self.on_reader(move |pool| {
            let _permit = permit;
            // The full-text index caches what it has read on a connection, and would report changes
            // of other connections as corruption.
            pool.with_new_connection(check::check)
        })
        .await
    }
}

#[async_trait]
impl MessageIndex for SqliteStore {
    async fn find(&self, query: &MessageQuery) -> Result<MessageMatches> {
        let query = query.clone();
        self.read(move |conn, _| messages::find(conn, &query)).await
    }

    async fn indexed(&self, key: &SessionKey) -> Result<Vec<(Seq, usize)>> {
        let key = key.clone();
        self.read(move |conn, _| messages::indexed(conn, &key)).await
    }

    async fn next_unindexed(&self, rules: WordRules) -> Result<Option<SessionKey>> {
        if self.read(move |conn, _| messages::is_complete(conn, rules)).await? {
            return Ok(None);
        }
        self.writer.write(move |conn, _| messages::next_unindexed(conn, rules)).await
    }

    async fn replace(&self, part: &SessionIndexPart) -> Result<()> {
        let part = part.clone();
        self.writer.write(move |conn, _| messages::replace(conn, &part)).await
    }

    async fn compact(&self) -> Result<bool> {
        if self.read(|conn, _| messages::is_compact(conn)).await? {
            return Ok(false);
        }
        self.writer.write_freeing_space(|conn, _| messages::compact(conn)).await
    }
}

impl HeadChecker for SqliteStore {
    fn head_if_changed(&self, key: &SessionKey, known: &str) -> Option<Result<HeadCheck>> {
        self.readers.try_with(|conn, file| heads::head_if_changed(conn, file, key, known))
    }
}

#[async_trait]
impl Snapshots for SqliteStore {
    async fn snapshot(&self) -> Result<Box<dyn Snapshot>> {
        self.writer.flush_unsynced().await?;
        let pool = self.readers.clone();
        Ok(Box::new(blocking(move || snapshot::SqliteSnapshot::begin(pool.connect()?, pool.file.clone())).await?))
    }
}
