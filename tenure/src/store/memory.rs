//! The in-memory store, for tests and for sessions that need not outlive the process. Nothing is
//! persisted.

use crate::store::contract::{Commit, Concurrency, HeadCheck, HeadChecker, MAX_PAGE_BYTES, Store, WriteCost};
use crate::store::finding::{Finding, MAX_FINDINGS, Orphan};
use crate::store::item::{Item, Namespace, Owner};
use crate::store::mem_index::MemIndex;
use crate::store::message_index::{MessageIndex, MessageMatches, MessageQuery, SessionIndexPart, WordRules};
use crate::store::query::{HeadPage, ReadDirection, RecordRange, SessionQuery};
use crate::store::shown::{RecordLocation, ShownRecord};
use crate::types::blob::BlobId;
use crate::types::entry::{Entry, Record};
use crate::types::error::Result;
use crate::types::head::Head;
use crate::types::id::{Seq, SessionKey, Tenant};
use crate::types::status::Status;
use async_trait::async_trait;
use jiff::Timestamp;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

/// A store of sessions in memory. All data are lost when it is dropped.
#[derive(Default)]
pub struct MemoryStore {
    // A std mutex: no task awaits while it is held.
    state: Mutex<MemoryTables>,
}

#[derive(Default)]
struct MemoryTables {
    index: MemIndex,
    logs: HashMap<SessionKey, Vec<Record>>,
    blobs: HashMap<(Tenant, BlobId), Arc<[u8]>>,
}

impl MemoryStore {
    /// Creates an empty store.
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, MemoryTables> {
        self.state.lock().expect("no code panics while holding this lock")
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

impl MemoryStore {
    /// Purges a session, with fork inheritance; with `expected`, on condition.
    fn purge_if(&self, key: &SessionKey, expected: Option<(Timestamp, Seq)>) -> Result<()> {
        let mut guard = self.state();
        let state = &mut *guard;
        state.index.check_at(key, expected)?;
        let inheritance = state.index.fork_inheritance(key);
        let mut log = state.logs.remove(key).unwrap_or_default();
        if let Some((head, upto)) = inheritance.inheriting_fork {
            let fork = head.key();
            log.truncate(log.partition_point(|r| r.seq <= upto));
            log.append(state.logs.entry(fork.clone()).or_default());
            state.logs.insert(fork.clone(), log);
            state.index.inherit_blobs(key, &fork, upto);
            state.index.inherit_rewinds(key, &fork, upto);
            state.index.inherit_messages(key, &head, upto);
            state.index.set(head);
        }
        inheritance.reparented.into_iter().for_each(|head| state.index.set(head));
        for blob in state.index.remove(key) {
            state.blobs.remove(&(key.tenant.clone(), blob));
        }
        Ok(())
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn commit(&self, commit: &Commit) -> Result<()> {
        let mut state = self.state();
        state.index.check(commit)?;
        state.index.apply(commit);
        let key = commit.head.key();
        for blob in &commit.blobs {
            state.blobs.entry((key.tenant.clone(), blob.id)).or_insert_with(|| blob.bytes.clone());
        }
        state.logs.entry(key).or_default().extend(commit.records.iter().cloned());
        Ok(())
    }

    async fn head(&self, key: &SessionKey) -> Result<Option<Head>> {
        Ok(self.state().index.head(key).cloned())
    }

    fn head_checker(&self) -> Option<&dyn HeadChecker> {
        Some(self)
    }

    fn message_index(&self) -> Option<&dyn MessageIndex> {
        Some(self)
    }

    fn concurrency(&self) -> Concurrency {
        Concurrency { reads: 8, writes: WriteCost::DedicatedWriter }
    }

    async fn heads(&self, query: &SessionQuery) -> Result<Vec<Head>> {
        Ok(self.state().index.heads(query))
    }

    async fn page(&self, query: &SessionQuery, max_scan: usize) -> Result<HeadPage> {
        Ok(self.state().index.page(query, max_scan))
    }

    async fn count_items(&self, name: &str) -> Result<u64> {
        Ok(self.state().index.count_items(name))
    }

    async fn count(&self) -> Result<Vec<(Status, u64)>> {
        Ok(self.state().index.count())
    }

    async fn records(&self, key: &SessionKey, range: &RecordRange) -> Result<Vec<Record>> {
        let state = self.state();
        let log = state.logs.get(key).map(Vec::as_slice).unwrap_or_default();
        let from = log.partition_point(|r| r.seq <= range.after);
        let to = log.partition_point(|r| r.seq <= range.upto).max(from);
        let log = log[from..to].iter();
        Ok(match range.order {
            ReadDirection::Forward => page(log, range.limit),
            ReadDirection::Backward => page(log.rev(), range.limit),
        })
    }

    async fn sessions_showing(
        &self,
        tenant: &Tenant,
        records: &[RecordLocation],
        limit: usize,
    ) -> Result<Vec<ShownRecord>> {
        Ok(self.state().index.sessions_showing(tenant, records, limit))
    }

    async fn purge(&self, key: &SessionKey) -> Result<()> {
        self.purge_if(key, None)
    }

    async fn purge_at(&self, key: &SessionKey, created_at: Timestamp, seq: Seq) -> Result<()> {
        self.purge_if(key, Some((created_at, seq)))
    }

    async fn put(&self, namespace: &Namespace, item: &Item, max_items: Option<usize>) -> Result<()> {
        item.check()?;
        let index = &mut self.state().index;
        index.check_namespace(namespace)?;
        for key in index.keys_to_evict(namespace, &item.key, max_items) {
            index.remove_item(namespace, &key);
        }
        index.put(namespace, item.clone());
        Ok(())
    }

    async fn get(&self, namespace: &Namespace, key: &str, used_at: Option<Timestamp>) -> Result<Option<Item>> {
        Ok(self.state().index.get(namespace, key, used_at))
    }

    async fn get_many(&self, namespace: &Namespace, keys: &[&str], used_at: Option<Timestamp>) -> Result<Vec<Item>> {
        let mut state = self.state();
        Ok(keys.iter().filter_map(|key| state.index.get(namespace, key, used_at)).collect())
    }

    async fn items(&self, namespace: &Namespace, after: Option<&str>, limit: usize) -> Result<Vec<Item>> {
        Ok(self.state().index.items(namespace, after).take(limit).map(|i| Item::clone(i)).collect())
    }

    async fn remove(&self, namespace: &Namespace, key: &str) -> Result<bool> {
        Ok(self.state().index.remove_item(namespace, key))
    }

    async fn expire(&self, now: Timestamp, limit: usize) -> Result<usize> {
        let index = &mut self.state().index;
        let expired = index.expired(now, limit);
        Ok(expired.iter().filter(|(namespace, key)| index.remove_item(namespace, key)).count())
    }

    async fn delete_owner(&self, tenant: &Tenant, owner: &Owner) -> Result<()> {
        self.state().index.remove_namespaces(tenant, owner);
        Ok(())
    }

    async fn scrub(&self, _: &Tenant, _: &Owner) -> Result<()> {
        Ok(())
    }

    async fn blob(&self, tenant: &Tenant, id: &BlobId) -> Result<Option<Arc<[u8]>>> {
        Ok(self.state().blobs.get(&(tenant.clone(), *id)).cloned())
    }

    async fn check(&self, remove: &[Orphan]) -> Result<Vec<Finding>> {
        let state = &mut *self.state();
        for orphan in remove {
            match orphan {
                Orphan::Blob(tenant, id) if !state.index.uses_blob(tenant, *id) => {
                    state.blobs.remove(&(tenant.clone(), *id));
                }
                _ => {}
            }
        }
        let logs = state.logs.keys().filter(|key| state.index.head(key).is_none());
        let logs = logs.map(|key| {
            Finding::new(format!("memory, session {key}"), "the session has records but no head", "purge it")
        });
        let unused = state.blobs.keys().filter(|(tenant, id)| !state.index.uses_blob(tenant, *id));
        let unused = unused.map(|(tenant, id)| {
            let location = format!("memory, tenant {tenant}, blob {id}");
            Finding::orphan(location, "no session references it", Orphan::Blob(tenant.clone(), *id))
        });
        Ok(logs.take(MAX_FINDINGS).chain(unused.take(MAX_FINDINGS)).collect())
    }
}

#[async_trait]
impl MessageIndex for MemoryStore {
    async fn find(&self, query: &MessageQuery) -> Result<MessageMatches> {
        Ok(self.state().index.find_messages(query))
    }

    async fn indexed(&self, key: &SessionKey) -> Result<Vec<(Seq, usize)>> {
        Ok(self.state().index.indexed_messages(key))
    }

    fn is_used(&self) -> bool {
        self.state().index.uses_message_index()
    }

    async fn next_unindexed(&self, rules: WordRules) -> Result<Option<SessionKey>> {
        Ok(self.state().index.next_unindexed(rules))
    }

    async fn replace(&self, part: &SessionIndexPart) -> Result<()> {
        self.state().index.replace_messages(part)
    }

    async fn compact(&self) -> Result<bool> {
        Ok(false)
    }
}

impl HeadChecker for MemoryStore {
    fn head_if_changed(&self, key: &SessionKey, _: &str) -> Option<Result<HeadCheck>> {
        Some(Ok(HeadCheck::Current(self.state().index.head(key).cloned().map(Box::new))))
    }
}

/// Collects the records of one page: at most `limit`, and at most `MAX_PAGE_BYTES` unless the first
/// record alone is larger.
fn page<'a>(records: impl Iterator<Item = &'a Record>, limit: usize) -> Vec<Record> {
    let mut bytes = 0;
    let fits = |record: &&Record| {
        let first = bytes == 0;
        bytes += match &record.entry {
            Entry::Message(entry) => entry.message.as_str().len(),
            other => other.encode().len(),
        };
        first || bytes <= MAX_PAGE_BYTES
    };
    records.take(limit).take_while(fits).cloned().collect()
}
