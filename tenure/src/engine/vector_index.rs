//! The vectors of the memories of one namespace, searched by cosine similarity. The search itself is in
//! `rules/vector_set.rs`.

use crate::rules::vector_set::VectorSet;
use crate::types::memory::MemoryRecord;
use crate::types::vector::{Vector, quantize};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

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
        let mut best = self.vectors.nearest(&quantize(question), limit);
        best.sort_by(|(a, x), (b, y)| y.total_cmp(x).then_with(|| self.keys[*a].cmp(&self.keys[*b])));
        best.truncate(limit);
        best.into_iter().map(|(position, cosine)| (self.keys[position].to_string(), cosine)).collect()
    }

    /// The cosine similarity of a memory to the question. `None` if the memory has no vector.
    pub fn similarity(&self, question: &[f32], key: &str) -> Option<f32> {
        self.vectors.cosine(&quantize(question), *self.positions.get(key)?)
    }

    /// The approximate size in bytes.
    pub fn weight(&self) -> usize {
        1024 + self.vectors.bytes() + self.keys.len() * 120 + self.without_vector.len() * 80
    }
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
        assert_eq!(found, ["east", "north-east", "north", "west"]);
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
