//! The store in plain files: one JSONL file per session, readable with any tool.
//!
//! ```text
//! DIR/format                              the format number
//! DIR/lock                                locked while a process has the store open
//! DIR/TENANT/SESSION.jsonl                a session: its records, items and head (see `codec`)
//! DIR/TENANT/SESSION.discarded.jsonl      the messages that rewinds discarded, one per line; a copy for people
//! DIR/TENANT/blobs/HEX                    media in their original bytes, named by their BLAKE3 hash
//! DIR/TENANT/namespaces/OWNER.jsonl       the items of a user, a group or the tenant
//! ```
//!
//! A JSONL file only grows, one commit at a time, and each commit is on disk (fsync) before it is
//! acknowledged. Where lines must be removed (after a purge, or when most of them are about removed
//! items), a new file is written next to it and renamed over it. Heads, items and the offsets of
//! records are cached in memory; records are read from the files.

mod check;
mod codec;
mod discarded;
mod engine;
mod file;
mod locks;
mod open;
mod paths;
mod purge;
mod recover;
mod snapshot;
#[cfg(test)]
mod tests;

use self::engine::JsonlEngine;
use self::locks::FileLocks;
use self::paths::LogFile;
use crate::home::expand_home;
use crate::store::contract::{Commit, Concurrency, HeadCheck, HeadChecker, OpenRepair, Store, WriteCost};
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
use std::collections::HashMap;
use std::{fmt, sync::Arc};
use tokio::sync::RwLock;

/// A store of sessions in JSONL files. A lock file limits a directory to one process at a time.
pub struct JsonlStore {
    engine: Arc<JsonlEngine>,
    locks: FileLocks,
    /// Held for reading by a commit that depends on data outside its session (a parent, blobs), and
    /// for writing by a purge, so that no purge removes those data concurrently.
    purge_lock: Arc<RwLock<()>>,
    /// Held for reading by a snapshot, and for writing by a purge, which would remove what the
    /// snapshot reads. Only purges wait for it.
    snapshot_lock: Arc<RwLock<()>>,
}

impl JsonlStore {
    /// Opens a directory; a new or empty one becomes a store. Returns the repairs that were made.
    pub async fn open(dir: &str) -> Result<(Self, Vec<OpenRepair>)> {
        if dir.is_empty() {
            return Err(Error::invalid("store", "jsonl: needs a directory, as in jsonl:DIR"));
        }
        let dir = expand_home(dir);
        let (engine, repairs) = blocking(move || {
            let (root, lock) = open::lock_directory(&dir)?;
            let (state, repairs) = open::load(&root)?;
            Ok((JsonlEngine::new(root, lock, state), repairs))
        })
        .await?;
        Ok((
            Self {
                engine: Arc::new(engine),
                locks: FileLocks::default(),
                purge_lock: Arc::default(),
                snapshot_lock: Arc::default(),
            },
            repairs,
        ))
    }

    /// Returns the format of a directory, which is only read. `None` means that it is not a store
    /// yet.
    pub fn format(dir: &str) -> Result<Option<u32>> {
        open::read_format(&expand_home(dir))
    }

    /// Returns a head from the in-memory index; fails if the session's file is damaged.
    fn indexed_head(&self, key: &SessionKey) -> Result<Option<Head>> {
        let state = self.engine.state();
        state.check_intact(&LogFile::session(key))?;
        Ok(state.index.head(key).cloned())
    }

    /// Runs work on a file while holding its lock.
    async fn with_file_lock<T: Send + 'static>(
        &self,
        log_file: LogFile,
        work: impl FnOnce(&JsonlEngine, &LogFile) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let guard = self.locks.lock(log_file.clone()).await;
        self.with_engine(move |engine| {
            let _guard = guard;
            work(engine, &log_file)
        })
        .await
    }

    async fn with_engine<T: Send + 'static>(
        &self,
        work: impl FnOnce(&JsonlEngine) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let engine = self.engine.clone();
        blocking(move || work(&engine)).await
    }
}

/// Runs work that blocks on the disk, on a blocking thread. It completes even if the caller is
/// cancelled.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(|_| Error::unavailable("the disk operation was aborted; retry"))?
}

impl fmt::Debug for JsonlStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JsonlStore").field("dir", &self.engine.root).finish_non_exhaustive()
    }
}

impl JsonlStore {
    async fn purge_if(&self, key: &SessionKey, expected: Option<(Timestamp, Seq)>) -> Result<()> {
        // No fork can be created meanwhile. Only a purge holds more than one file lock, so there is
        // no deadlock.
        let snapshot_guard = self.snapshot_lock.clone().write_owned().await;
        let purge_guard = self.purge_lock.clone().write_owned().await;
        let inheritance = self.engine.state().index.fork_inheritance(key);
        let mut fork_guards = Vec::new();
        for head in inheritance.inheriting_fork.iter().map(|(head, _)| head).chain(&inheritance.reparented) {
            fork_guards.push(self.locks.lock(LogFile::session(&head.key())).await);
        }
        let log_file = LogFile::session(key);
        let key = key.clone();
        let work = move |engine: &JsonlEngine, log_file: &LogFile| {
            let _guards = (snapshot_guard, purge_guard, fork_guards);
            engine.state().index.check_at(&key, expected)?;
            engine.purge(log_file, &key)
        };
        self.with_file_lock(log_file, work).await
    }
}

#[async_trait]
impl Store for JsonlStore {
    async fn commit(&self, commit: &Commit) -> Result<()> {
        let depends_on_others = (commit.base.is_none() && commit.head.parent.is_some()) || !commit.blobs.is_empty();
        let purge_guard = if depends_on_others { Some(self.purge_lock.clone().read_owned().await) } else { None };
        let log_file = LogFile::session(&commit.head.key());
        let commit = commit.clone();
        let work = move |engine: &JsonlEngine, log_file: &LogFile| {
            let _purge_guard = purge_guard;
            engine.commit(log_file, &commit)
        };
        self.with_file_lock(log_file, work).await
    }

    async fn head(&self, key: &SessionKey) -> Result<Option<Head>> {
        self.indexed_head(key)
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
        Concurrency { reads: 8, writes: WriteCost::DedicatedWriter }
    }

    async fn heads(&self, query: &SessionQuery) -> Result<Vec<Head>> {
        Ok(self.engine.state().index.heads(query))
    }

    async fn page(&self, query: &SessionQuery, max_scan: usize) -> Result<HeadPage> {
        Ok(self.engine.state().index.page(query, max_scan))
    }

    async fn count_items(&self, name: &str) -> Result<u64> {
        Ok(self.engine.state().index.count_items(name))
    }

    async fn count(&self) -> Result<Vec<(Status, u64)>> {
        Ok(self.engine.state().index.count())
    }

    async fn records(&self, key: &SessionKey, range: &RecordRange) -> Result<Vec<Record>> {
        let log_file = LogFile::session(key);
        let range = range.clone();
        let retry = (log_file.clone(), range.clone());
        match self.with_engine(move |engine| engine.records(&log_file, &range)).await {
            // The file may have been rewritten during the read: retry under the file's lock.
            Err(_) => self.with_file_lock(retry.0, move |engine, log_file| engine.records(log_file, &retry.1)).await,
            records => records,
        }
    }

    async fn sessions_showing(
        &self,
        tenant: &Tenant,
        records: &[RecordLocation],
        limit: usize,
    ) -> Result<Vec<ShownRecord>> {
        Ok(self.engine.state().index.sessions_showing(tenant, records, limit))
    }

    async fn purge(&self, key: &SessionKey) -> Result<()> {
        self.purge_if(key, None).await
    }

    async fn purge_at(&self, key: &SessionKey, created_at: Timestamp, seq: Seq) -> Result<()> {
        self.purge_if(key, Some((created_at, seq))).await
    }

    async fn put(&self, namespace: &Namespace, item: &Item, max_items: Option<usize>) -> Result<()> {
        item.check()?;
        let namespace = namespace.clone();
        let item = item.clone();
        self.with_file_lock(LogFile::of(&namespace), move |engine, log_file| {
            engine.put(log_file, &namespace, &item, max_items)
        })
        .await
    }

    async fn get(&self, namespace: &Namespace, key: &str, used_at: Option<Timestamp>) -> Result<Option<Item>> {
        let mut state = self.engine.state();
        state.check_intact(&LogFile::of(namespace))?;
        Ok(state.index.get(namespace, key, used_at))
    }

    async fn get_many(&self, namespace: &Namespace, keys: &[&str], used_at: Option<Timestamp>) -> Result<Vec<Item>> {
        let mut state = self.engine.state();
        state.check_intact(&LogFile::of(namespace))?;
        Ok(keys.iter().filter_map(|key| state.index.get(namespace, key, used_at)).collect())
    }

    async fn items(&self, namespace: &Namespace, after: Option<&str>, limit: usize) -> Result<Vec<Item>> {
        let state = self.engine.state();
        state.check_intact(&LogFile::of(namespace))?;
        Ok(state.index.items(namespace, after).take(limit).map(|i| Item::clone(i)).collect())
    }

    async fn remove(&self, namespace: &Namespace, key: &str) -> Result<bool> {
        let items = vec![(namespace.clone(), key.to_owned())];
        Ok(self
            .with_file_lock(LogFile::of(namespace), move |engine, log_file| engine.remove(log_file, items, |_| true))
            .await?
            > 0)
    }

    async fn expire(&self, now: Timestamp, limit: usize) -> Result<usize> {
        let mut expired: HashMap<LogFile, Vec<_>> = HashMap::new();
        for (namespace, key) in self.engine.state().index.expired(now, limit) {
            expired.entry(LogFile::of(&namespace)).or_default().push((namespace, key));
        }
        let mut removed = 0;
        for (log_file, items) in expired {
            // A concurrent `put` may have replaced the item.
            let is_expired = move |item: &Item| item.is_expired(now);
            removed += self
                .with_file_lock(log_file, move |engine, log_file| engine.remove(log_file, items, is_expired))
                .await?;
        }
        Ok(removed)
    }

    async fn delete_owner(&self, tenant: &Tenant, owner: &Owner) -> Result<()> {
        let log_file = LogFile { tenant: tenant.clone(), owner: owner.clone() };
        self.with_file_lock(log_file, |engine, log_file| engine.remove_namespaces(log_file)).await?;
        let log_files = self.engine.state().files_with_dead_lines();
        for log_file in log_files {
            self.with_file_lock(log_file, |engine, log_file| engine.rewrite(log_file)).await?;
        }
        let purge_guard = self.purge_lock.clone().write_owned().await;
        let tenant = tenant.clone();
        self.with_engine(move |engine| {
            let _purge_guard = purge_guard;
            engine.remove_unused_blobs(&tenant)
        })
        .await
    }

    async fn scrub(&self, tenant: &Tenant, owner: &Owner) -> Result<()> {
        let log_file = LogFile { tenant: tenant.clone(), owner: owner.clone() };
        if !self.engine.state().has_dead_lines(&log_file) {
            return Ok(());
        }
        self.with_file_lock(log_file, |engine, log_file| engine.rewrite(log_file)).await
    }

    async fn blob(&self, tenant: &Tenant, id: &BlobId) -> Result<Option<Arc<[u8]>>> {
        let tenant = tenant.clone();
        let id = *id;
        self.with_engine(move |engine| engine.blob(&tenant, id)).await
    }

    async fn check(&self, remove: &[Orphan]) -> Result<Vec<Finding>> {
        // Excludes commits that have written blobs but have not been appended yet.
        let purge_guard = self.purge_lock.clone().write_owned().await;
        let orphans = remove.to_vec();
        let mut findings = self
            .with_engine(move |engine| {
                let _purge_guard = purge_guard;
                engine.remove_orphans(&orphans)?;
                engine.check()
            })
            .await?;
        let log_files: Vec<LogFile> = self.engine.state().logs.keys().cloned().collect();
        for log_file in log_files {
            findings.extend(self.with_file_lock(log_file, |engine, log_file| engine.check_file(log_file)).await?);
        }
        Ok(findings)
    }
}

#[async_trait]
impl MessageIndex for JsonlStore {
    async fn find(&self, query: &MessageQuery) -> Result<MessageMatches> {
        Ok(self.engine.state().index.find_messages(query))
    }

    async fn indexed(&self, key: &SessionKey) -> Result<Vec<(Seq, usize)>> {
        Ok(self.engine.state().index.indexed_messages(key))
    }

    fn is_used(&self) -> bool {
        self.engine.state().index.uses_message_index()
    }

    async fn next_unindexed(&self, rules: WordRules) -> Result<Option<SessionKey>> {
        Ok(self.engine.state().index.next_unindexed(rules))
    }

    async fn replace(&self, part: &SessionIndexPart) -> Result<()> {
        self.engine.state().index.replace_messages(part)
    }

    async fn compact(&self) -> Result<bool> {
        Ok(false)
    }
}

impl HeadChecker for JsonlStore {
    fn head_if_changed(&self, key: &SessionKey, _: &str) -> Option<Result<HeadCheck>> {
        Some(self.indexed_head(key).map(|head| HeadCheck::Current(head.map(Box::new))))
    }
}
