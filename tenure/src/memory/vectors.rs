//! Embedding vectors of memories, and nearest-neighbour search.
//!
//! A vector is stored with its memory, quantized to one byte per dimension. Searches use an
//! in-memory index per namespace (`rules/vector_set.rs`). Changes are noted in a
//! companion namespace for a limited time; each search reads the notes first, so the index reflects
//! the writes of other processes.

use crate::engine::vector_index::{VectorIndex, WeighedIndex};
use crate::executors::embedder::{Embedder, EmbeddingInput};
use crate::memory::memories::{MEMORY, decode_memory};
use crate::store::item::{Item, Namespace, Owner};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::error_source::{BoxError, ErrorSource};
use crate::types::memory::MemoryRecord;
use crate::types::vector::Vector;
use futures_util::future::try_join_all;
use jiff::{SignedDuration, Timestamp};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;

const CHANGES: &str = "memory-changes";
/// Lifetime of a change note. An index that is older is rebuilt.
const CHANGE_TTL: SignedDuration = SignedDuration::from_hours(1);
/// Tolerated clock skew between two nodes.
const CLOCK_SKEW: SignedDuration = SignedDuration::from_mins(1);
/// Timeout for the embedding of a question or of one memory. When a question exceeds it, the recall
/// falls back to word search.
const EMBED_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for the embedding of a batch of memories, for which no request waits.
const BATCH_TIMEOUT: Duration = Duration::from_secs(300);
/// Number of texts per embedding request.
pub(crate) const BATCH: usize = 32;

/// The outcome of a similarity search.
pub(crate) enum NearestResult {
    /// Ids and similarities of the nearest memories.
    Found(Vec<(String, f32)>),
    /// The reason why the search was skipped.
    Skipped(String),
}

impl Tenure {
    /// Computes the vector of a text. `None` if there is no embedder or it fails: the memory is
    /// then found by word search, and embedded later.
    pub(crate) async fn vector_of(&self, text: &str) -> Option<Vector> {
        let embedder = self.engine.options().embedder.as_ref()?;
        match embed_one(embedder, text, EmbeddingInput::Passage).await {
            Ok(vector) => Some(Vector::new(embedder.name(), &vector)),
            Err(e) => {
                tracing::warn!(reason = %e, "could not embed a memory; it is found by words only until it is embedded");
                None
            }
        }
    }

    /// Stores a change note for a memory, which invalidates its vector in the index of this process
    /// and of others.
    pub(crate) async fn memory_changed(&self, namespace: &Namespace, id: &str) -> Result<()> {
        if self.engine.options().embedder.as_ref().is_none() {
            return Ok(());
        }
        let now = self.now();
        let mut note = self.permanent_item(time_ordered_key(now), id.to_owned());
        note.expires_at = now.checked_add(CHANGE_TTL).ok();
        self.store().put(&change_namespace(namespace), &note, None).await
    }

    /// Finds the memories of a namespace whose vectors are nearest to that of a question.
    pub(crate) async fn nearest(&self, namespace: &Namespace, question: &str, limit: usize) -> Result<NearestResult> {
        let Some(embedder) = self.engine.options().embedder.as_ref() else {
            return Ok(NearestResult::Skipped("no embedder is configured".to_owned()));
        };
        let vector = match embed_one(embedder, question, EmbeddingInput::Query).await {
            Ok(vector) => vector,
            Err(e) => return Ok(NearestResult::Skipped(e.to_string())),
        };
        let slot = self.vector_index(namespace, embedder);
        let mut index = slot.index.lock().await;
        self.refresh_index(namespace, &mut index).await?;
        // Session namespaces are not covered by `embed_all`, so missing vectors are computed here.
        if !index.without_vector.is_empty() && matches!(namespace.owner, Owner::Session(_)) {
            match self.embed_namespace(namespace, embedder, &mut |_| ()).await {
                Ok(_) => self.refresh_index(namespace, &mut index).await?,
                Err(e) => {
                    tracing::debug!(error = %e, "could not embed the session's memories; retrying at the next recall")
                }
            }
        }
        let hits = index.nearest(&vector, limit);
        let weight = index.weight();
        drop(index);
        if weight > slot.weight + slot.weight / 8 {
            self.shared.memories.vectors.insert(namespace.clone(), WeighedIndex { weight, ..slot });
        }
        Ok(NearestResult::Found(hits))
    }

    fn vector_index(&self, namespace: &Namespace, embedder: &Embedder) -> WeighedIndex {
        let new_index = || {
            let index = VectorIndex::new(embedder.name());
            Ok::<_, std::convert::Infallible>(WeighedIndex {
                weight: index.weight(),
                index: Arc::new(Mutex::new(index)),
            })
        };
        match self.shared.memories.vectors.get_or_insert_with(namespace, new_index) {
            Ok(slot) => slot,
            Err(never) => match never {},
        }
    }

    /// Refreshes the index from the change notes, or rebuilds it if it is older than the notes are
    /// stored.
    async fn refresh_index(&self, namespace: &Namespace, index: &mut VectorIndex) -> Result<()> {
        let now = self.now();
        let since = index.checked_at.filter(|t| now.duration_since(*t).abs() < CHANGE_TTL - CLOCK_SKEW - CLOCK_SKEW);
        let Some(since) = since else { return self.rebuild_index(namespace, index, now).await };
        let notes = self.change_notes(namespace, since).await?;
        for note in notes.iter().filter(|n| !index.applied_notes.contains_key(&n.key)).collect::<Vec<_>>() {
            let item = self.store().get(namespace, &note.value, None).await?;
            let record = item.as_ref().map(decode_memory).transpose()?;
            index.set(&note.value, record.as_ref());
        }
        index.applied_notes.extend(notes.into_iter().map(|n| (n.key, n.created_at)));
        index.applied_notes.retain(|_, at| now.duration_since(*at) < CLOCK_SKEW + CLOCK_SKEW + CLOCK_SKEW);
        index.checked_at = Some(now);
        Ok(())
    }

    /// Reads the change notes since a time, minus the allowed clock skew.
    async fn change_notes(&self, namespace: &Namespace, since: Timestamp) -> Result<Vec<Item>> {
        let changes = change_namespace(namespace);
        let mut after = time_ordered_key(since.checked_sub(CLOCK_SKEW).unwrap_or(since));
        let mut all = Vec::new();
        loop {
            let page = self.store().items(&changes, Some(&after), 1000).await?;
            let Some(last) = page.last() else { return Ok(all) };
            after = last.key.clone();
            all.extend(page);
        }
    }

    async fn rebuild_index(&self, namespace: &Namespace, index: &mut VectorIndex, now: Timestamp) -> Result<()> {
        *index = VectorIndex::new(&index.model);
        let mut after = None::<String>;
        loop {
            let page = self.store().items(namespace, after.as_deref(), 1000).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.key.clone());
            for item in &page {
                index.set(&item.key, Some(&decode_memory(item)?));
            }
        }
        index.checked_at = Some(now);
        Ok(())
    }

    /// Computes missing vectors (of the current model) for the memories of a namespace, and returns
    /// how many were computed. `on_batch` is called after each batch.
    async fn embed_namespace(
        &self,
        namespace: &Namespace,
        embedder: &Embedder,
        on_batch: &mut impl FnMut(usize),
    ) -> Result<usize> {
        let mut after = None::<String>;
        let mut count = 0;
        loop {
            let page = self.store().items(namespace, after.as_deref(), BATCH * 4).await?;
            let Some(last) = page.last() else { return Ok(count) };
            after = Some(last.key.clone());
            let mut missing = Vec::new();
            for item in page {
                let record = decode_memory(&item)?;
                let has_vector = record.vector.is_some_and(|v| v.model == embedder.name());
                missing.extend(record.text.or(item.text).filter(|_| !has_vector).map(|text| (item.key, text)));
            }
            for batch in missing.chunks(BATCH) {
                let texts = batch.iter().map(|(_, text)| text.clone()).collect();
                let vectors = embed(embedder, texts, EmbeddingInput::Passage, BATCH_TIMEOUT).await;
                let vectors = vectors.map_err(|e| Error::unavailable_from(ErrorSource::boxed(e)))?;
                // Written concurrently, so that a store can combine the writes.
                let writes = batch
                    .iter()
                    .zip(vectors)
                    .map(|((id, _), vector)| self.store_vector(namespace, id, Vector::new(embedder.name(), &vector)));
                try_join_all(writes).await?;
                count += batch.len();
                on_batch(batch.len());
            }
        }
    }

    async fn store_vector(&self, namespace: &Namespace, id: &str, vector: Vector) -> Result<()> {
        let _memory_guard = self.shared.memories.lock_memory(id).await;
        // The memory may have been removed in the meantime.
        let Some(item) = self.store().get(namespace, id, None).await? else { return Ok(()) };
        let record = MemoryRecord { vector: Some(vector), ..decode_memory(&item)? };
        let item = Item { value: crate::memory::memories::encode_memory(&record), ..item };
        self.store().put(namespace, &item, None).await?;
        self.memory_changed(namespace, id).await
    }

    /// Computes missing vectors (of the current model) for all memories of users and groups, and
    /// returns how many were computed. Memories can be recalled concurrently. Memories of sessions
    /// are embedded when they are recalled.
    pub async fn embed_all(&self, mut on_batch: impl FnMut(usize)) -> Result<usize> {
        let Some(embedder) = self.engine.options().embedder.as_ref() else { return Ok(0) };
        let mut count = 0;
        for namespace in self.memory_namespaces().await? {
            count += self.embed_namespace(&namespace, embedder, &mut on_batch).await?;
        }
        Ok(count)
    }
}

/// Embeds a text that a request waits for.
async fn embed_one(embedder: &Embedder, text: &str, input: EmbeddingInput) -> Result<Vec<f32>, BoxError> {
    let vectors = embed(embedder, vec![text.to_owned()], input, EMBED_TIMEOUT).await?;
    Ok(vectors.into_iter().next().unwrap_or_default())
}

async fn embed(
    embedder: &Embedder,
    texts: Vec<String>,
    input: EmbeddingInput,
    timeout: Duration,
) -> Result<Vec<Vec<f32>>, BoxError> {
    let timed_out = |_| format!("embedder {} timed out after {timeout:?}", embedder.name());
    tokio::time::timeout(timeout, embedder.embed(texts, input)).await.map_err(timed_out)?
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

#[cfg(test)]
mod tests {
    use super::*;

    fn record_with_vector(numbers: &[f32]) -> MemoryRecord {
        MemoryRecord { vector: Some(Vector::new("m", numbers)), ..MemoryRecord::default() }
    }

    fn empty_index() -> VectorIndex {
        VectorIndex::new("m")
    }

    #[test]
    fn nearest_vectors_come_first_and_other_models_are_excluded() {
        let mut index = empty_index();
        index.set("east", Some(&record_with_vector(&[1.0, 0.0])));
        index.set("north", Some(&record_with_vector(&[0.0, 1.0])));
        index.set("north-east", Some(&record_with_vector(&[1.0, 1.0])));
        index.set("west", Some(&record_with_vector(&[-1.0, 0.0])));
        index.set(
            "of another model",
            Some(&MemoryRecord { vector: Some(Vector::new("n", &[1.0, 0.0])), ..MemoryRecord::default() }),
        );
        index.set("longer", Some(&record_with_vector(&[1.0, 0.0, 0.0])));
        let found: Vec<_> = index.nearest(&[2.0, 0.5], 10).into_iter().map(|(key, _)| key).collect();
        assert_eq!(found, ["east", "north-east", "north"]);
        assert_eq!(index.without_vector.len(), 2);
        assert!(index.nearest(&[1.0, 0.0, 0.0], 10).is_empty(), "of another length");
    }

    #[test]
    fn a_removed_vector_is_not_found() {
        let mut all = empty_index();
        let numbers = |i: usize| -> Vec<f32> { (0..100).map(|j| ((i * 31 + j * 17) % 13) as f32 - 6.0).collect() };
        for i in 0..50 {
            all.set(&format!("k{i}"), Some(&record_with_vector(&numbers(i))));
        }
        for i in (0..50).step_by(3) {
            all.set(&format!("k{i}"), None);
        }
        let mut same = empty_index();
        for i in (0..50).filter(|i| i % 3 > 0) {
            same.set(&format!("k{i}"), Some(&record_with_vector(&numbers(i))));
        }
        for i in 0..50 {
            assert_eq!(all.nearest(&numbers(i), 7), same.nearest(&numbers(i), 7));
        }
        assert_eq!(all.weight(), same.weight());
    }

    #[test]
    fn quantization_to_one_byte_preserves_similarity() {
        let numbers: Vec<f32> = (0..384).map(|i| ((i * 7919 % 1000) as f32 - 500.0) / 3000.0).collect();
        let mut index = empty_index();
        index.set("same", Some(&record_with_vector(&numbers)));
        let (_, cosine) = index.nearest(&numbers, 1).remove(0);
        assert!(cosine > 0.9999, "{cosine}");
    }
}
