//! The store in plain files: one JSONL file per session, readable with any tool.
//!
//! ```text
//! DIR/format                              the format number
//! DIR/lock                                locked while a process has the store open
//! DIR/TENANT/SESSION.jsonl                a session: its records, items and head (see `codec`)
//! DIR/TENANT/SESSION.discarded.jsonl      the messages that rewinds discarded, one per line; a copy for people
//! DIR/TENANT/blobs/HEX                    media in their original bytes, named by their BLAKE3 hash
//! DIR/TENANT/shelves/OWNER.jsonl          the items of a user, a group or the tenant
//! ```
//!
//! A JSONL file only grows, one commit at a time, and each commit is on disk (fsync) before it is
//! acknowledged. Where lines must be removed (after a purge, or when most of them are about removed
//! items), a new file is written next to it and renamed over it. Heads, items and the offsets of
//! records are cached in memory; records are read from the files.

mod check;
mod codec;
mod engine;
mod file;
mod locks;
mod open;
mod paths;
mod purge;
mod recover;
#[cfg(test)]
mod tests;

use self::engine::JsonlEngine;
use self::locks::FileLocks;
use self::paths::LogFile;
use crate::store::contract::{Commit, Concurrency, HeadCheck, OpenRepair, Store, WriteCost};
use crate::store::finding::{Finding, Orphan};
use crate::store::item::{Hit, Item, Namespace, Owner};
use crate::store::query::{HeadPage, RecordRange, SessionQuery};
use crate::types::blob::BlobId;
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Seq, SessionKey, Tenant};
use crate::types::status::Status;
use async_trait::async_trait;
use jiff::Timestamp;
use std::collections::HashMap;
use std::path::PathBuf;
use std::{fmt, sync::Arc};
use tokio::sync::{RwLock, broadcast};

/// A store of sessions in JSONL files. A lock file limits a directory to one process at a time.
pub struct JsonlStore {
    disk: Arc<JsonlEngine>,
    gates: FileLocks,
    /// Held for reading by a commit that depends on data outside its session (a parent, blobs), and
    /// for writing by a purge, so that no purge removes those data concurrently.
    leaning: Arc<RwLock<()>>,
}

impl JsonlStore {
    /// Opens a directory; a new or empty one becomes a store. Returns the repairs that were made.
    pub async fn open(dir: &str) -> Result<(Self, Vec<OpenRepair>)> {
        if dir.is_empty() {
            return Err(Error::invalid("store", "jsonl: needs a directory, as in jsonl:DIR"));
        }
        let dir = PathBuf::from(dir);
        let (disk, repairs) = blocking(move || {
            let (root, lock) = open::claim(&dir)?;
            let (state, repairs) = open::load(&root)?;
            Ok((JsonlEngine::new(root, lock, state), repairs))
        })
        .await?;
        Ok((Self { disk: Arc::new(disk), gates: FileLocks::default(), leaning: Arc::default() }, repairs))
    }

    /// Returns the format of a directory, which is only read. `None` means that it is not a store
    /// yet.
    pub fn format(dir: &str) -> Result<Option<u32>> {
        open::found(&PathBuf::from(dir))
    }

    /// Returns a head from the in-memory index; fails if the session's file is damaged.
    fn card(&self, key: &SessionKey) -> Result<Option<Head>> {
        let state = self.disk.state();
        state.intact(&LogFile::session(key))?;
        Ok(state.index.head(key).cloned())
    }

    /// Runs work on a file while holding its lock.
    async fn in_turn<T: Send + 'static>(
        &self,
        place: LogFile,
        work: impl FnOnce(&JsonlEngine, &LogFile) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let turn = self.gates.turn(place.clone()).await;
        self.with_disk(move |disk| {
            let _turn = turn;
            work(disk, &place)
        })
        .await
    }

    async fn with_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&JsonlEngine) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let disk = self.disk.clone();
        blocking(move || work(&disk)).await
    }
}

/// Runs work that blocks on the disk, on a blocking thread. It completes even if the caller is
/// cancelled.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(|_| Error::unavailable("the work on the disk was broken off"))?
}

impl fmt::Debug for JsonlStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JsonlStore").field("dir", &self.disk.root).finish_non_exhaustive()
    }
}

impl JsonlStore {
    async fn purge_if(&self, key: &SessionKey, expected: Option<(Timestamp, Seq)>) -> Result<()> {
        // No fork can be created meanwhile. Only a purge holds more than one file lock, so there is
        // no deadlock.
        let leaning = self.leaning.clone().write_owned().await;
        let forks = self.disk.state().index.estate(key);
        let mut turns = Vec::new();
        for head in forks.heir.iter().map(|(head, _)| head).chain(&forks.others) {
            turns.push(self.gates.turn(LogFile::session(&head.key())).await);
        }
        let (place, key) = (LogFile::session(key), key.clone());
        let work = move |disk: &JsonlEngine, place: &LogFile| {
            let _held = (leaning, turns);
            disk.state().index.check_at(&key, expected)?;
            disk.purge(place, &key)
        };
        self.in_turn(place, work).await
    }
}

#[async_trait]
impl Store for JsonlStore {
    async fn commit(&self, commit: &Commit) -> Result<()> {
        let leans = (commit.base.is_none() && commit.head.parent.is_some()) || !commit.blobs.is_empty();
        let leaning = if leans { Some(self.leaning.clone().read_owned().await) } else { None };
        let (place, commit) = (LogFile::session(&commit.head.key()), commit.clone());
        let work = move |disk: &JsonlEngine, place: &LogFile| {
            let _leaning = leaning;
            disk.commit(place, &commit)
        };
        self.in_turn(place, work).await
    }

    async fn head(&self, key: &SessionKey) -> Result<Option<Head>> {
        self.card(key)
    }

    fn glance(&self, key: &SessionKey, _: &str) -> Option<Result<HeadCheck>> {
        Some(self.card(key).map(|card| HeadCheck::Now(card.map(Box::new))))
    }

    // There is no notification channel: only one process has the files open.
    fn tell(&self, _: &SessionKey) {}

    fn hear(&self) -> Option<broadcast::Receiver<Option<SessionKey>>> {
        None
    }

    fn concurrency(&self) -> Concurrency {
        Concurrency { reads: 8, writes: WriteCost::Apart }
    }

    async fn heads(&self, query: &SessionQuery) -> Result<Vec<Head>> {
        Ok(self.disk.state().index.heads(query))
    }

    async fn page(&self, query: &SessionQuery, max_scan: usize) -> Result<HeadPage> {
        Ok(self.disk.state().index.page(query, max_scan))
    }

    async fn count(&self) -> Result<Vec<(Status, u64)>> {
        Ok(self.disk.state().index.count())
    }

    async fn records(&self, key: &SessionKey, range: &RecordRange) -> Result<Vec<Record>> {
        let (place, range) = (LogFile::session(key), range.clone());
        let again = (place.clone(), range.clone());
        match self.with_disk(move |disk| disk.records(&place, &range)).await {
            // The file may have been rewritten during the read: retry under the file's lock.
            Err(_) => self.in_turn(again.0, move |disk, place| disk.records(place, &again.1)).await,
            found => found,
        }
    }

    async fn purge(&self, key: &SessionKey) -> Result<()> {
        self.purge_if(key, None).await
    }

    async fn purge_at(&self, key: &SessionKey, created_at: Timestamp, seq: Seq) -> Result<()> {
        self.purge_if(key, Some((created_at, seq))).await
    }

    async fn put(&self, shelf: &Namespace, item: &Item, keep: Option<usize>) -> Result<()> {
        item.check()?;
        let (shelf, item) = (shelf.clone(), item.clone());
        self.in_turn(LogFile::of(&shelf), move |disk, place| disk.put(place, &shelf, &item, keep)).await
    }

    async fn get(&self, shelf: &Namespace, key: &str, used: Option<Timestamp>) -> Result<Option<Item>> {
        let mut state = self.disk.state();
        state.intact(&LogFile::of(shelf))?;
        Ok(state.index.get(shelf, key, used))
    }

    async fn items(&self, shelf: &Namespace, after: Option<&str>, limit: usize) -> Result<Vec<Item>> {
        let state = self.disk.state();
        state.intact(&LogFile::of(shelf))?;
        Ok(state.index.items(shelf, after).take(limit).map(|i| Item::clone(i)).collect())
    }

    async fn remove(&self, shelf: &Namespace, key: &str) -> Result<bool> {
        let items = vec![(shelf.clone(), key.to_owned())];
        Ok(self.in_turn(LogFile::of(shelf), move |disk, place| disk.remove(place, items, |_| true)).await? > 0)
    }

    async fn search(&self, shelf: &Namespace, text: &str, limit: usize) -> Result<Vec<Hit>> {
        let state = self.disk.state();
        state.intact(&LogFile::of(shelf))?;
        Ok(state.index.search(shelf, text, limit))
    }

    async fn expire(&self, now: Timestamp, limit: usize) -> Result<usize> {
        let mut over: HashMap<LogFile, Vec<_>> = HashMap::new();
        for (shelf, key) in self.disk.state().index.expired(now, limit) {
            over.entry(LogFile::of(&shelf)).or_default().push((shelf, key));
        }
        let mut removed = 0;
        for (place, items) in over {
            // A concurrent `put` may have replaced the item.
            let is_over = move |item: &Item| item.is_expired(now);
            removed += self.in_turn(place, move |disk, place| disk.remove(place, items, is_over)).await?;
        }
        Ok(removed)
    }

    async fn clear(&self, tenant: &Tenant, owner: &Owner) -> Result<()> {
        let place = LogFile { tenant: tenant.clone(), owner: owner.clone() };
        self.in_turn(place, |disk, place| disk.clear(place)).await?;
        let places = self.disk.state().with_dead_lines();
        for place in places {
            self.in_turn(place, |disk, place| disk.rewrite(place)).await?;
        }
        let leaning = self.leaning.clone().write_owned().await;
        let tenant = tenant.clone();
        self.with_disk(move |disk| {
            let _leaning = leaning;
            disk.remove_unused_blobs(&tenant)
        })
        .await
    }

    async fn wipe(&self, tenant: &Tenant, owner: &Owner) -> Result<()> {
        let place = LogFile { tenant: tenant.clone(), owner: owner.clone() };
        if !self.disk.state().has_dead_lines(&place) {
            return Ok(());
        }
        self.in_turn(place, |disk, place| disk.rewrite(place)).await
    }

    async fn blob(&self, tenant: &Tenant, id: &BlobId) -> Result<Option<Arc<[u8]>>> {
        let (tenant, id) = (tenant.clone(), *id);
        self.with_disk(move |disk| disk.blob(&tenant, id)).await
    }

    async fn check(&self, remove: &[Orphan]) -> Result<Vec<Finding>> {
        // Excludes commits that have written blobs but have not been appended yet.
        let leaning = self.leaning.clone().write_owned().await;
        let orphans = remove.to_vec();
        let mut findings = self
            .with_disk(move |disk| {
                let _leaning = leaning;
                disk.remove_orphans(&orphans)?;
                disk.check()
            })
            .await?;
        let places: Vec<LogFile> = self.disk.state().logs.keys().cloned().collect();
        for place in places {
            findings.extend(self.in_turn(place, |disk, place| disk.check_file(place)).await?);
        }
        Ok(findings)
    }
}
