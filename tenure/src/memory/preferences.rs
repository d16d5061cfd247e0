//! Preferences: memories that are injected in every turn.
//!
//! A preference is a memory like any other. A companion namespace lists the ids of an owner's preferences, so
//! that a turn reads only those (D-131). An entry of that index contains no text; one whose memory was evicted
//! or has expired is removed when it is next read.

use crate::memory::memories::{MEMORY, is_fresh, memory_from_item};
use crate::store::item::{Item, Namespace};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::memory::{Memory, MemoryKind};
use jiff::Timestamp;
use std::collections::HashMap;

/// Namespace of the ids of preferences.
const PREFERENCES: &str = "memory-preferences";
/// Maximum number of preferences of a session, user or group. All of them are read in every turn.
pub const MAX_PREFERENCES: usize = 32;

fn index_namespace(memories: &Namespace) -> Namespace {
    debug_assert_eq!(memories.name, MEMORY);
    Namespace { name: PREFERENCES.to_owned(), ..memories.clone() }
}

impl Tenure {
    /// Checks that another preference can be stored. Concurrent writers may exceed the maximum by a few.
    pub(crate) async fn check_preference_limit(&self, memories: &Namespace, id: &str) -> Result<()> {
        let preferences = self.preferences(memories, None).await?;
        if preferences.len() < MAX_PREFERENCES || preferences.iter().any(|p| p.id == id) {
            return Ok(());
        }
        let message = format!("there are {MAX_PREFERENCES} preferences, the maximum; forget one, or store a fact");
        Err(Error::invalid("kind", message))
    }

    /// Adds a stored memory to the index of preferences. It expires with the memory.
    pub(crate) async fn index_preference(&self, memories: &Namespace, item: &Item) -> Result<()> {
        let entry = Item { expires_at: item.expires_at, ..Item::new(item.key.clone(), "null", item.created_at) };
        self.store().put(&index_namespace(memories), &entry, None).await
    }

    /// Removes a memory from the index of preferences.
    pub(crate) async fn unindex_preference(&self, memories: &Namespace, id: &str) -> Result<()> {
        self.store().remove(&index_namespace(memories), id).await.map(drop)
    }

    /// Reads the preferences of an owner, in order of their ids, at most [`MAX_PREFERENCES`]. With `used_at`,
    /// their last-use times are updated, so that unused facts are evicted before them. Costs one read if there
    /// are none. The caller holds no memory's lock.
    pub(crate) async fn preferences(&self, memories: &Namespace, used_at: Option<Timestamp>) -> Result<Vec<Memory>> {
        let index = index_namespace(memories);
        let now = self.now();
        let mut preferences = Vec::new();
        let mut after = None::<String>;
        while preferences.len() < MAX_PREFERENCES {
            let entries = self.store().items(&index, after.as_deref(), MAX_PREFERENCES).await?;
            let Some(last) = entries.last() else { break };
            after = Some(last.key.clone());
            let is_last_page = entries.len() < MAX_PREFERENCES;
            let keys: Vec<&str> = entries.iter().map(|entry| entry.key.as_str()).collect();
            let items = self.store().get_many(memories, &keys, used_at).await?;
            let mut items: HashMap<String, Item> = items.into_iter().map(|item| (item.key.clone(), item)).collect();
            for entry in &entries {
                let item = items.remove(&entry.key);
                let memory = item.filter(|item| is_fresh(item, now)).map(|item| memory_from_item(memories, item));
                match memory.transpose()? {
                    Some(memory) if memory.kind == MemoryKind::Preference => preferences.push(memory),
                    _ => self.remove_stale_entry(memories, &entry.key).await?,
                }
            }
            if is_last_page {
                break;
            }
        }
        preferences.truncate(MAX_PREFERENCES);
        Ok(preferences)
    }

    /// Removes an index entry without a preference, unless one has been stored since.
    async fn remove_stale_entry(&self, memories: &Namespace, id: &str) -> Result<()> {
        let _memory_guard = self.shared.memories.lock_memory(id).await;
        let item = self.store().get(memories, id, None).await?.filter(|item| is_fresh(item, self.now()));
        let memory = item.map(|item| memory_from_item(memories, item)).transpose()?;
        if memory.is_none_or(|memory| memory.kind == MemoryKind::Fact) {
            self.unindex_preference(memories, id).await?;
        }
        Ok(())
    }
}
