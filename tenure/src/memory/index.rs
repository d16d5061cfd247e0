//! The in-process indexes of memories: loading, and refreshing before each use.
//!
//! An index holds the terms and the vectors of the memories of one namespace, so that all stores rank identically
//! (D-160). Changes are noted in a companion namespace for a limited time; each use reads the notes first, so the
//! index reflects the writes of other processes.

use crate::engine::memory_index::{MemoryIndex, SharedIndex, WeighedIndex};
use crate::memory::memories::{MEMORY, decode_memory};
use crate::store::item::{Item, Namespace};
use crate::tenure::Tenure;
use crate::types::error::Result;
use jiff::{SignedDuration, Timestamp};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard};

const CHANGES: &str = "memory-changes";
/// Lifetime of a change note. An index that is older is rebuilt.
const CHANGE_TTL: SignedDuration = SignedDuration::from_hours(1);
/// Tolerated clock skew between two nodes.
const CLOCK_SKEW: SignedDuration = SignedDuration::from_mins(1);
/// The number of items or notes that are read in one page.
const PAGE: usize = 1000;

impl Tenure {
    /// Stores a change note for a memory, which invalidates its entry in the index of this process and of others.
    pub(crate) async fn memory_changed(&self, namespace: &Namespace, id: &str) -> Result<()> {
        let now = self.now();
        let mut note = self.permanent_item(time_ordered_key(now), id.to_owned());
        note.expires_at = now.checked_add(CHANGE_TTL).ok();
        self.store().put(&change_namespace(namespace), &note, None).await
    }

    /// Returns the index of a namespace, refreshed. Its lock is never held across an `await`: concurrent tool calls are
    /// polled by one task, and one that waits for the lock could keep the holder from being polled.
    pub(crate) async fn memory_index(&self, namespace: &Namespace) -> Result<SharedIndex> {
        let slot = self.index_slot(namespace);
        self.refresh_index(namespace, &slot.index).await?;
        let weight = lock(&slot.index).weight();
        if weight > slot.weight + slot.weight / 8 {
            self.shared.memories.indexes.insert(namespace.clone(), WeighedIndex { weight, ..slot.clone() });
        }
        Ok(slot.index)
    }

    fn index_slot(&self, namespace: &Namespace) -> WeighedIndex {
        let model = self.engine.options().embedder.as_ref().map(|embedder| embedder.name());
        let new_index = || {
            let index = MemoryIndex::new(model);
            let weight = index.weight();
            Ok::<_, std::convert::Infallible>(WeighedIndex { weight, index: SharedIndex::new(Mutex::new(index)) })
        };
        match self.shared.memories.indexes.get_or_insert_with(namespace, new_index) {
            Ok(slot) => slot,
            Err(never) => match never {},
        }
    }

    /// Refreshes the index from the change notes, or rebuilds it if it is older than the notes are stored. Calls may
    /// overlap: a note is written after its memory, so what is read after a note is at least as new, and a note that
    /// another call has applied meanwhile is not applied again.
    pub(crate) async fn refresh_index(&self, namespace: &Namespace, shared: &SharedIndex) -> Result<()> {
        let now = self.now();
        let is_recent = |t: &Timestamp| now.duration_since(*t).abs() < CHANGE_TTL - CLOCK_SKEW - CLOCK_SKEW;
        let since = lock(shared).checked_at.filter(is_recent);
        let Some(since) = since else { return self.rebuild_index(namespace, shared, now).await };
        let mut notes = self.change_notes(namespace, since).await?;
        notes.retain(|note| !lock(shared).applied_notes.contains_key(&note.key));
        let mut memories = HashMap::new();
        for page in notes.chunks(PAGE) {
            let ids: BTreeSet<&str> = page.iter().map(|note| note.value.as_str()).collect();
            let ids: Vec<&str> = ids.into_iter().collect();
            for item in self.store().get_many(namespace, &ids, None).await? {
                let record = decode_memory(&item)?;
                memories.insert(item.key, (item.created_at, record));
            }
        }
        let mut index = lock(shared);
        for note in notes {
            if index.applied_notes.contains_key(&note.key) {
                continue;
            }
            match memories.get(&note.value) {
                Some((created_at, record)) => index.set(&note.value, *created_at, record),
                None => index.remove(&note.value),
            }
            index.applied_notes.insert(note.key, note.created_at);
        }
        index.applied_notes.retain(|_, at| now.duration_since(*at) < CLOCK_SKEW + CLOCK_SKEW + CLOCK_SKEW);
        index.checked_at = index.checked_at.max(Some(now));
        Ok(())
    }

    /// Reads the change notes since a time, minus the allowed clock skew.
    async fn change_notes(&self, namespace: &Namespace, since: Timestamp) -> Result<Vec<Item>> {
        let changes = change_namespace(namespace);
        let mut after = time_ordered_key(since.checked_sub(CLOCK_SKEW).unwrap_or(since));
        let mut all = Vec::new();
        loop {
            let page = self.store().items(&changes, Some(&after), PAGE).await?;
            let is_last = page.len() < PAGE;
            if let Some(last) = page.last() {
                after.clone_from(&last.key);
            }
            all.extend(page);
            if is_last {
                return Ok(all);
            }
        }
    }

    async fn rebuild_index(&self, namespace: &Namespace, shared: &SharedIndex, now: Timestamp) -> Result<()> {
        let model = lock(shared).vectors.as_ref().map(|vectors| vectors.model.clone());
        let mut index = MemoryIndex::new(model.as_deref());
        let mut after = None::<String>;
        loop {
            let page = self.store().items(namespace, after.as_deref(), PAGE).await?;
            for item in &page {
                index.set(&item.key, item.created_at, &decode_memory(item)?);
            }
            match page.into_iter().next_back() {
                Some(last) => after = Some(last.key),
                None => break,
            }
        }
        index.checked_at = Some(now);
        *lock(shared) = index;
        Ok(())
    }
}

/// Locks an index. One whose update panicked is still a cache of what is stored.
pub(crate) fn lock(index: &Mutex<MemoryIndex>) -> MutexGuard<'_, MemoryIndex> {
    index.lock().unwrap_or_else(|e| e.into_inner())
}

fn change_namespace(namespace: &Namespace) -> Namespace {
    debug_assert_eq!(namespace.name, MEMORY);
    Namespace { name: CHANGES.to_owned(), ..namespace.clone() }
}

/// A unique key that sorts by time (UUIDv7).
fn time_ordered_key(now: Timestamp) -> String {
    let seconds = now.as_second().max(0) as u64;
    let nanos = now.subsec_nanosecond().max(0) as u32;
    uuid::Uuid::new_v7(uuid::Timestamp::from_unix(uuid::NoContext, seconds, nanos)).to_string()
}
