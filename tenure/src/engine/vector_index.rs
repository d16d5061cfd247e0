//! In-process vector indexes of memories: a bounded cache that is searched by cosine similarity.
//! Large indexes are first narrowed to the candidates with the nearest sign bits (D-074).

use crate::store::item::Namespace;
use crate::types::memory::MemoryRecord;
use crate::types::vector::{Vector, quantize};
use jiff::Timestamp;
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tokio::sync::{Mutex, MutexGuard};

/// The minimum number of vectors with the nearest sign bits that are compared by cosine similarity.
pub(crate) const MIN_CANDIDATES: usize = 256;

/// The minimum cosine similarity of a result.
pub(crate) const MIN_COSINE: f32 = 0.2;

/// The sign bits of a vector, packed into words of 64 bits.
pub(crate) fn signs(numbers: &[i8]) -> Vec<u64> {
    let word = |part: &[i8]| part.iter().enumerate().fold(0, |word, (i, n)| word | (u64::from(*n > 0) << i));
    numbers.chunks(64).map(word).collect()
}

/// The dot product of two quantized vectors.
pub(crate) fn dot_product(a: &[i8], b: &[i8]) -> i32 {
    a.iter().zip(b).map(|(a, b)| i32::from(*a) * i32::from(*b)).sum()
}

/// The vector index of one namespace.
#[derive(Debug, Default)]
pub(crate) struct VectorIndex {
    /// The name of the embedding model.
    pub model: String,
    /// The dimension of the vectors.
    pub dimension: usize,
    /// The keys of the memories, in the order of the vectors.
    pub keys: Vec<String>,
    /// The position of each key in `keys`.
    pub positions: HashMap<String, usize>,
    /// The sign bits of all vectors, one after the other.
    pub signs: Vec<u64>,
    /// The quantized components of all vectors, one after the other.
    pub numbers: Vec<i8>,
    /// The keys of memories without a vector of this model.
    pub without_vector: HashSet<String>,
    /// The change notes that were applied, with the times at which they were created.
    pub applied_notes: HashMap<String, Timestamp>,
    /// The time of the last check for changes. `None` means that the index has not been loaded.
    pub checked_at: Option<Timestamp>,
}

impl VectorIndex {
    /// The number of sign words of one vector.
    pub fn words_per_vector(&self) -> usize {
        self.dimension.div_ceil(64)
    }

    /// Inserts or replaces the vector of a memory. `None` removes it.
    pub fn set(&mut self, key: &str, record: Option<&MemoryRecord>) {
        self.remove_vector(key);
        let Some(record) = record else { return };
        let vector = record.vector.as_ref().filter(|v| v.model == self.model).and_then(Vector::numbers);
        match vector.filter(|v| !v.is_empty() && (self.keys.is_empty() || v.len() == self.dimension)) {
            Some(numbers) => {
                self.dimension = numbers.len();
                self.positions.insert(key.to_owned(), self.keys.len());
                self.keys.push(key.to_owned());
                self.signs.extend(signs(&numbers));
                self.numbers.extend(numbers);
            }
            None => drop(self.without_vector.insert(key.to_owned())),
        }
    }

    /// Removes the vector of a memory.
    pub fn remove_vector(&mut self, key: &str) {
        self.without_vector.remove(key);
        let Some(position) = self.positions.remove(key) else { return };
        // The last vector moves to the free position.
        let last = self.keys.len() - 1;
        let words = self.words_per_vector();
        let dimension = self.dimension;
        self.keys.swap_remove(position);
        if position < last {
            self.signs.copy_within(last * words..(last + 1) * words, position * words);
            self.numbers.copy_within(last * dimension..(last + 1) * dimension, position * dimension);
            self.positions.insert(self.keys[position].clone(), position);
        }
        self.signs.truncate(last * words);
        self.numbers.truncate(last * dimension);
    }

    /// The memories that are most similar to the question, best first, with their cosine similarity.
    /// Candidates are preselected by the Hamming distance of their sign bits, then ranked exactly.
    pub fn nearest(&self, question: &[f32], limit: usize) -> Vec<(String, f32)> {
        let question = quantize(question);
        if question.len() != self.dimension || self.keys.is_empty() {
            return Vec::new();
        }
        let sign = signs(&question);
        let hamming_distance = |words: &[u64]| words.iter().zip(&sign).map(|(a, b)| (a ^ b).count_ones()).sum::<u32>();
        let mut all: Vec<(u32, u32)> = self
            .signs
            .chunks(self.words_per_vector())
            .enumerate()
            .map(|(i, words)| (hamming_distance(words), i as u32))
            .collect();
        let candidates = MIN_CANDIDATES.max(limit * 4);
        if all.len() > candidates {
            all.select_nth_unstable(candidates);
            all.truncate(candidates);
        }
        let norm = |v: &[i8]| (dot_product(v, v) as f32).sqrt().max(1.0);
        let question_norm = norm(&question);
        let cosine = |i: usize| {
            let vector = &self.numbers[i * self.dimension..(i + 1) * self.dimension];
            dot_product(&question, vector) as f32 / (question_norm * norm(vector))
        };
        let mut best: Vec<_> =
            all.into_iter().map(|(_, i)| (self.keys[i as usize].clone(), cosine(i as usize))).collect();
        best.retain(|(_, cosine)| *cosine >= MIN_COSINE);
        best.sort_by(|(a, x), (b, y)| y.total_cmp(x).then_with(|| a.cmp(b)));
        best.truncate(limit);
        best
    }

    /// The approximate size in bytes.
    pub fn weight(&self) -> usize {
        1024 + self.keys.len() * 160 + self.numbers.len() + self.signs.len() * 8 + self.without_vector.len() * 80
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
