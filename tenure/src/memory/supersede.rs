//! Newer memories that supersede older ones. A superseded memory is kept and still found, after the newer one, but no
//! longer injected into prompts. The link is stored with the older memory, and counts as long as the newer one exists.

use crate::engine::memory_index::Question;
use crate::memory::index::lock;
use crate::memory::memories::{decode_memory, is_fresh};
use crate::rules::supersede::Statement;
use crate::store::item::{Item, Namespace};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use crate::types::memory::MemoryKind;

/// Maximum number of memories that a new memory can be declared to supersede.
pub(crate) const MAX_SUPERSEDED: usize = 16;
/// The number of memories that a new one is compared with: the most relevant ones.
const COMPARED: usize = 10;

/// A pair of memories: the id of the older one, and of the one that supersedes it.
type Link = (String, String);

impl Tenure {
    /// Verifies that the memories that a new one is declared to supersede exist.
    pub(crate) async fn check_superseded(&self, namespace: &Namespace, ids: &[String]) -> Result<()> {
        if ids.len() > MAX_SUPERSEDED {
            let message = format!("a memory can supersede at most {MAX_SUPERSEDED} others, not {}", ids.len());
            return Err(Error::invalid("supersedes", message));
        }
        let keys: Vec<&str> = ids.iter().map(String::as_str).collect();
        let found = self.store().get_many(namespace, &keys, None).await?;
        match ids.iter().find(|id| found.iter().all(|item| item.key != **id)) {
            None => Ok(()),
            Some(id) => {
                let message =
                    format!("there is no memory {id} here; the ids are those of stored memories", id = excerpt(id));
                Err(Error::invalid("supersedes", message))
            }
        }
    }

    /// Links a stored memory with those that it supersedes, or with the newer one that supersedes it: the declared
    /// ones, and those that it updates by its words. The caller holds no memory's lock.
    pub(crate) async fn link_superseded(
        &self,
        namespace: &Namespace,
        memory: &Item,
        declared: Vec<String>,
        vector: Option<Vec<f32>>,
    ) -> Result<()> {
        let mut links: Vec<Link> = declared.into_iter().map(|older| (older, memory.key.clone())).collect();
        links.extend(self.find_updates(namespace, memory, vector).await?);
        for (older, newer) in links.iter().filter(|(older, newer)| older != newer) {
            let _memory_guard = self.shared.memories.lock_memory(older).await;
            let Some(item) = self.store().get(namespace, older, None).await? else { continue };
            let mut record = decode_memory(&item)?;
            if record.superseded_by.as_ref() != Some(newer) {
                record.superseded_by = Some(newer.clone());
                let value = self.encode_within_limit(&record)?;
                self.store().put(namespace, &Item { value, ..item }, None).await?;
                self.memory_changed(namespace, older).await?;
            }
        }
        Ok(())
    }

    /// Finds the facts that a stored one updates, or the newer one that updates it.
    async fn find_updates(&self, namespace: &Namespace, memory: &Item, vector: Option<Vec<f32>>) -> Result<Vec<Link>> {
        let record = decode_memory(memory)?;
        let Some(statement) = Statement::parse(&record.text).filter(|_| record.kind == MemoryKind::Fact) else {
            return Ok(Vec::new());
        };
        let index = self.memory_index(namespace).await?;
        let mut similar = lock(&index).rank(&[Question::new(&record.text, vector)]);
        similar.retain(|other| other.key != memory.key && !other.is_superseded);
        similar.truncate(COMPARED);
        let keys: Vec<&str> = similar.iter().map(|other| other.key.as_str()).collect();
        let items = self.store().get_many(namespace, &keys, None).await?;
        let mut links = Vec::new();
        for item in items.iter().filter(|item| is_fresh(item, self.now())) {
            let other = decode_memory(item)?;
            let similarity = similar.iter().find(|s| s.key == item.key).and_then(|s| s.similarity);
            let Some(compared) = Statement::parse(&other.text).filter(|_| other.kind == MemoryKind::Fact) else {
                continue;
            };
            if item.created_at <= memory.created_at {
                if statement.updates(&compared, similarity).is_some() {
                    links.push((item.key.clone(), memory.key.clone()));
                }
            } else if compared.updates(&statement, similarity).is_some() {
                links.push((memory.key.clone(), item.key.clone()));
            }
        }
        Ok(links)
    }
}
