//! Embedding vectors of memories, and nearest-neighbour search.
//!
//! A vector is stored with its memory, quantized to one byte per dimension. Searches use an
//! in-memory index per namespace: a first pass compares sign bits (a few machine words per vector),
//! a second ranks the best candidates by cosine similarity (D-074). Changes are noted in a
//! companion namespace for a limited time; each search reads the notes first, so the index reflects
//! the writes of other processes.

use crate::engine::vector_index::{VectorIndex, WeighedIndex};
use crate::executors::embedder::Embedder;
use crate::memory::memories::{MEMORY, kept};
use crate::store::item::{Item, Namespace, Owner};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::memory::MemoryRecord;
use crate::types::vector::Vector;
use jiff::{SignedDuration, Timestamp};

use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;

const CHANGES: &str = "memory-changes";
/// Lifetime of a change note. An index that is older is rebuilt.
const CHANGES_FOR: SignedDuration = SignedDuration::from_hours(1);
/// Tolerated clock skew between two nodes.
const SKEW: SignedDuration = SignedDuration::from_mins(1);
/// Timeout for an embedding request. When a question exceeds it, the recall falls back to word
/// search.
const PATIENCE: Duration = Duration::from_secs(5);
/// Number of texts per embedding request.
pub(crate) const BATCH: usize = 32;

/// The outcome of a similarity search.
pub(crate) enum NearestResult {
    /// Ids and similarities of the nearest memories.
    Found(Vec<(String, f32)>),
    /// The reason why the search was skipped.
    Not(String),
}

impl Tenure {
    /// Computes the vector of a text. `None` if there is no embedder or it fails: the memory is
    /// then found by word search, and embedded later.
    pub(crate) async fn vector_of(&self, text: &str) -> Option<Vector> {
        let embedder = self.engine.options().embedder.as_ref()?;
        match ask(embedder, vec![text.to_owned()]).await {
            Ok(vectors) => vectors.first().map(|v| Vector::new(embedder.name(), v)),
            Err(why) => {
                tracing::warn!(why, "a memory has no vector yet");
                None
            }
        }
    }

    /// Stores a change note for a memory, which invalidates its vector in the index of this process
    /// and of others.
    pub(crate) async fn memory_changed(&self, shelf: &Namespace, id: &str) -> Result<()> {
        if self.engine.options().embedder.as_ref().is_none() {
            return Ok(());
        }
        let now = self.now();
        let mut note = self.lasting(stamp(now), id.to_owned());
        note.expires_at = now.checked_add(CHANGES_FOR).ok();
        self.store().put(&changes(shelf), &note, None).await
    }

    /// Finds the memories of a namespace whose vectors are nearest to that of a question.
    pub(crate) async fn nearest(&self, shelf: &Namespace, question: &str, limit: usize) -> Result<NearestResult> {
        let Some(embedder) = self.engine.options().embedder.as_ref() else {
            return Ok(NearestResult::Not("there is no embedder".to_owned()));
        };
        let vectors = match ask(embedder, vec![question.to_owned()]).await {
            Ok(vectors) => vectors,
            Err(why) => return Ok(NearestResult::Not(why)),
        };
        let slot = self.codes(shelf, embedder);
        let mut codes = slot.codes.lock().await;
        self.look(shelf, &mut codes).await?;
        // Session namespaces are not covered by `embed_all`, so missing vectors are computed here.
        if !codes.bare.is_empty() && matches!(shelf.owner, Owner::Session(_)) {
            match self.embed_shelf(shelf, embedder, &mut |_| ()).await {
                Ok(_) => self.look(shelf, &mut codes).await?,
                Err(e) => tracing::debug!(error = %e, "no vectors for now"),
            }
        }
        let found = vectors.first().map(|v| codes.nearest(v, limit)).unwrap_or_default();
        let weight = codes.weight();
        drop(codes);
        if weight > slot.weight + slot.weight / 8 {
            self.shared.memories.vectors.insert(shelf.clone(), WeighedIndex { weight, ..slot });
        }
        Ok(NearestResult::Found(found))
    }

    fn codes(&self, shelf: &Namespace, embedder: &Embedder) -> WeighedIndex {
        let fresh = || {
            let codes = VectorIndex { model: embedder.name().to_owned(), ..VectorIndex::default() };
            Ok::<_, std::convert::Infallible>(WeighedIndex {
                weight: codes.weight(),
                codes: Arc::new(Mutex::new(codes)),
            })
        };
        match self.shared.memories.vectors.get_or_insert_with(shelf, fresh) {
            Ok(slot) => slot,
            Err(never) => match never {},
        }
    }

    /// Refreshes the index from the change notes, or rebuilds it if it is older than the notes are
    /// stored.
    async fn look(&self, shelf: &Namespace, codes: &mut VectorIndex) -> Result<()> {
        let now = self.now();
        let since = codes.looked.filter(|t| now.duration_since(*t).abs() < CHANGES_FOR - SKEW - SKEW);
        let Some(since) = since else { return self.read_all(shelf, codes, now).await };
        let notes = self.notes(shelf, since).await?;
        for note in notes.iter().filter(|n| !codes.seen.contains_key(&n.key)).collect::<Vec<_>>() {
            let item = self.store().get(shelf, &note.value, None).await?;
            let kept = item.as_ref().map(kept).transpose()?;
            codes.set(&note.value, kept.as_ref());
        }
        codes.seen.extend(notes.into_iter().map(|n| (n.key, n.created_at)));
        codes.seen.retain(|_, at| now.duration_since(*at) < SKEW + SKEW + SKEW);
        codes.looked = Some(now);
        Ok(())
    }

    /// Reads the change notes since a time, minus the allowed clock skew.
    async fn notes(&self, shelf: &Namespace, since: Timestamp) -> Result<Vec<Item>> {
        let at = changes(shelf);
        let mut after = stamp(since.checked_sub(SKEW).unwrap_or(since));
        let mut all = Vec::new();
        loop {
            let page = self.store().items(&at, Some(&after), 1000).await?;
            let Some(last) = page.last() else { return Ok(all) };
            after = last.key.clone();
            all.extend(page);
        }
    }

    async fn read_all(&self, shelf: &Namespace, codes: &mut VectorIndex, now: Timestamp) -> Result<()> {
        *codes = VectorIndex { model: std::mem::take(&mut codes.model), ..VectorIndex::default() };
        let mut after = None::<String>;
        loop {
            let page = self.store().items(shelf, after.as_deref(), 1000).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.key.clone());
            for item in &page {
                codes.set(&item.key, Some(&kept(item)?));
            }
        }
        codes.looked = Some(now);
        Ok(())
    }

    /// Computes missing vectors (of the current model) for the memories of a namespace, and returns
    /// how many were computed. `told` is called after each batch.
    async fn embed_shelf(&self, shelf: &Namespace, embedder: &Embedder, told: &mut impl FnMut(usize)) -> Result<usize> {
        let (mut after, mut done) = (None::<String>, 0);
        loop {
            let page = self.store().items(shelf, after.as_deref(), BATCH * 4).await?;
            let Some(last) = page.last() else { return Ok(done) };
            after = Some(last.key.clone());
            let mut bare = Vec::new();
            for item in page {
                let all = kept(&item)?;
                let has = all.vector.is_some_and(|v| v.model == embedder.name());
                bare.extend(all.text.or(item.text).filter(|_| !has).map(|text| (item.key, text)));
            }
            for batch in bare.chunks(BATCH) {
                let texts = batch.iter().map(|(_, text)| text.clone()).collect();
                let vectors = ask(embedder, texts).await.map_err(Error::unavailable)?;
                for ((id, _), vector) in batch.iter().zip(vectors) {
                    self.give_vector(shelf, id, Vector::new(embedder.name(), &vector)).await?;
                }
                done += batch.len();
                told(batch.len());
            }
        }
    }

    async fn give_vector(&self, shelf: &Namespace, id: &str, vector: Vector) -> Result<()> {
        let _changing = self.shared.memories.changing(id).await;
        // The memory may have been removed in the meantime.
        let Some(item) = self.store().get(shelf, id, None).await? else { return Ok(()) };
        let all = MemoryRecord { vector: Some(vector), ..kept(&item)? };
        let item = Item { value: crate::memory::memories::written(&all), ..item };
        self.store().put(shelf, &item, None).await?;
        self.memory_changed(shelf, id).await
    }

    /// Computes missing vectors (of the current model) for all memories of users and groups, and
    /// returns how many were computed. Memories can be recalled concurrently. Memories of sessions
    /// are embedded when they are recalled.
    pub async fn embed_all(&self, mut told: impl FnMut(usize)) -> Result<usize> {
        let Some(embedder) = self.engine.options().embedder.as_ref() else { return Ok(0) };
        let mut done = 0;
        for shelf in self.memory_shelves().await? {
            done += self.embed_shelf(&shelf, embedder, &mut told).await?;
        }
        Ok(done)
    }
}

async fn ask(embedder: &Embedder, texts: Vec<String>) -> Result<Vec<Vec<f32>>, String> {
    let late = |_| format!("{} took longer than {PATIENCE:?}", embedder.name());
    tokio::time::timeout(PATIENCE, embedder.embed(texts)).await.map_err(late)?
}

fn changes(shelf: &Namespace) -> Namespace {
    debug_assert_eq!(shelf.name, MEMORY);
    Namespace { name: CHANGES.to_owned(), ..shelf.clone() }
}

/// A unique key that sorts by time (UUIDv7).
fn stamp(now: Timestamp) -> String {
    let (seconds, nanos) = (now.as_second().max(0) as u64, now.subsec_nanosecond().max(0) as u32);
    uuid::Uuid::new_v7(uuid::Timestamp::from_unix(uuid::NoContext, seconds, nanos)).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(numbers: &[f32]) -> MemoryRecord {
        MemoryRecord { vector: Some(Vector::new("m", numbers)), ..MemoryRecord::default() }
    }

    fn codes() -> VectorIndex {
        VectorIndex { model: "m".to_owned(), ..VectorIndex::default() }
    }

    #[test]
    fn the_nearest_come_first_and_strangers_not_at_all() {
        let mut codes = codes();
        codes.set("east", Some(&with(&[1.0, 0.0])));
        codes.set("north", Some(&with(&[0.0, 1.0])));
        codes.set("north-east", Some(&with(&[1.0, 1.0])));
        codes.set("west", Some(&with(&[-1.0, 0.0])));
        codes.set(
            "of another model",
            Some(&MemoryRecord { vector: Some(Vector::new("n", &[1.0, 0.0])), ..MemoryRecord::default() }),
        );
        codes.set("longer", Some(&with(&[1.0, 0.0, 0.0])));
        let found: Vec<_> = codes.nearest(&[2.0, 0.5], 10).into_iter().map(|(key, _)| key).collect();
        assert_eq!(found, ["east", "north-east", "north"]);
        assert_eq!(codes.bare.len(), 2);
        assert!(codes.nearest(&[1.0, 0.0, 0.0], 10).is_empty(), "of another length");
    }

    #[test]
    fn what_is_taken_out_is_found_no_more() {
        let mut all = codes();
        let numbers = |i: usize| -> Vec<f32> { (0..100).map(|j| ((i * 31 + j * 17) % 13) as f32 - 6.0).collect() };
        for i in 0..50 {
            all.set(&format!("k{i}"), Some(&with(&numbers(i))));
        }
        for i in (0..50).step_by(3) {
            all.set(&format!("k{i}"), None);
        }
        let mut same = codes();
        for i in (0..50).filter(|i| i % 3 > 0) {
            same.set(&format!("k{i}"), Some(&with(&numbers(i))));
        }
        for i in 0..50 {
            assert_eq!(all.nearest(&numbers(i), 7), same.nearest(&numbers(i), 7));
        }
        assert_eq!(all.weight(), same.weight());
    }

    #[test]
    fn a_byte_a_number_is_enough() {
        let numbers: Vec<f32> = (0..384).map(|i| ((i * 7919 % 1000) as f32 - 500.0) / 3000.0).collect();
        let mut codes = codes();
        codes.set("same", Some(&with(&numbers)));
        let (_, cosine) = codes.nearest(&numbers, 1).remove(0);
        assert!(cosine > 0.9999, "{cosine}");
    }
}
