//! In-process vector indexes of memories: a bounded cache that is searched by cosine similarity.
//! The search itself is in `rules/vector_set.rs`.

use crate::rules::vector_set::VectorSet;
use crate::store::item::Namespace;
use crate::types::memory::MemoryRecord;
use crate::types::vector::{Vector, quantize};
use jiff::Timestamp;
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tokio::sync::{Mutex, MutexGuard};

/// The minimum cosine similarity of a result.
pub(crate) const MIN_COSINE: f32 = 0.2;

/// The vector index of one namespace.
#[derive(Debug, Default)]
pub(crate) struct VectorIndex {
    /// The name of the embedding model.
    pub model: String,
    /// The vectors.
    vectors: VectorSet,
    /// The keys of the memories, in the order of the vectors.
    keys: Vec<Arc<str>>,
    /// The position of each key in `keys`.
    positions: HashMap<Arc<str>, usize>,
    /// The keys of memories without a vector of this model.
    pub without_vector: HashSet<String>,
    /// The change notes that were applied, with the times at which they were created.
    pub applied_notes: HashMap<String, Timestamp>,
    /// The time of the last check for changes. `None` means that the index has not been loaded.
    pub checked_at: Option<Timestamp>,
}

impl VectorIndex {
    /// Creates an empty index of vectors of the named model.
    pub fn new(model: &str) -> Self {
        Self { model: model.to_owned(), ..Self::default() }
    }

    /// Inserts or replaces the vector of a memory. `None` removes it.
    pub fn set(&mut self, key: &str, record: Option<&MemoryRecord>) {
        self.remove_vector(key);
        let Some(record) = record else { return };
        let vector = record.vector.as_ref().filter(|v| v.model == self.model).and_then(Vector::numbers);
        if vector.is_some_and(|vector| self.vectors.push(&vector)) {
            let key: Arc<str> = key.into();
            self.positions.insert(key.clone(), self.keys.len());
            self.keys.push(key);
        } else {
            self.without_vector.insert(key.to_owned());
        }
    }

    /// Removes the vector of a memory.
    pub fn remove_vector(&mut self, key: &str) {
        self.without_vector.remove(key);
        let Some(position) = self.positions.remove(key) else { return };
        // The last vector moves to the free position.
        self.vectors.swap_remove(position);
        self.keys.swap_remove(position);
        if let Some(moved) = self.keys.get(position) {
            self.positions.insert(moved.clone(), position);
        }
    }

    /// The memories that are most similar to the question, best first, with their cosine similarity.
    pub fn nearest(&self, question: &[f32], limit: usize) -> Vec<(String, f32)> {
        let nearest = self.vectors.nearest(&quantize(question), limit).into_iter();
        let mut best: Vec<_> = nearest.filter(|(_, cosine)| *cosine >= MIN_COSINE).collect();
        best.sort_by(|(a, x), (b, y)| y.total_cmp(x).then_with(|| self.keys[*a].cmp(&self.keys[*b])));
        best.truncate(limit);
        best.into_iter().map(|(position, cosine)| (self.keys[position].to_string(), cosine)).collect()
    }

    /// The approximate size in bytes.
    pub fn weight(&self) -> usize {
        1024 + self.vectors.bytes() + self.keys.len() * 120 + self.without_vector.len() * 80
    }
}

/// The cache value of a namespace's vector index, with the weight that the cache accounts for it.
#[derive(Clone, Debug)]
pub(crate) struct WeighedIndex {
    /// The vector index.
    pub index: Arc<Mutex<VectorIndex>>,
    /// The weight in bytes.
    pub weight: usize,
}

/// Weighs vector indexes by their size in bytes.
#[derive(Clone, Debug)]
pub(crate) struct IndexWeighter;

impl Weighter<Namespace, WeighedIndex> for IndexWeighter {
    fn weight(&self, _: &Namespace, slot: &WeighedIndex) -> u64 {
        slot.weight as u64
    }
}

/// In-process state of memories: a cache only, the store is authoritative.
#[derive(Debug)]
pub(crate) struct MemoryState {
    /// The vector indexes by namespace.
    pub vectors: Cache<Namespace, WeighedIndex, IndexWeighter>,
    /// Locks that are held while a memory is read, changed and written. The hash of the memory's id
    /// selects the lock.
    pub locks: Vec<Mutex<()>>,
    /// Namespaces that are already recorded in the store as having memories.
    pub known_namespaces: std::sync::Mutex<HashSet<Namespace>>,
}

impl MemoryState {
    /// Creates the state with a cache of at most `bytes` bytes of vectors.
    pub fn new(bytes: usize) -> Self {
        let options =
            OptionsBuilder::new().shards(1).estimated_items_capacity(256).weight_capacity(bytes as u64).build();
        let options = options.expect("every required cache option is set");
        let vectors = Cache::with_options(options, IndexWeighter, Default::default(), Default::default());
        Self { vectors, locks: (0..64).map(|_| Mutex::default()).collect(), known_namespaces: Default::default() }
    }

    /// Locks a memory for a change.
    pub async fn lock_memory(&self, id: &str) -> MutexGuard<'_, ()> {
        let index = blake3::hash(id.as_bytes()).as_bytes()[0] as usize % self.locks.len();
        self.locks[index].lock().await
    }

    /// Returns true the first time that it is called for a namespace.
    pub fn register_namespace(&self, namespace: &Namespace) -> bool {
        self.known_namespaces.lock().unwrap_or_else(|e| e.into_inner()).insert(namespace.clone())
    }

    /// Evicts the state of a namespace.
    pub fn evict(&self, namespace: &Namespace) {
        self.known_namespaces.lock().unwrap_or_else(|e| e.into_inner()).remove(namespace);
        self.vectors.remove(namespace);
    }
}
