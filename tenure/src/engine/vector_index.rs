//! The vectors of the memories of one namespace, searched by cosine similarity. Large indexes are first narrowed to
//! the candidates with the nearest sign bits (D-074).

use crate::types::memory::MemoryRecord;
use crate::types::vector::{Vector, quantize};
use std::collections::{HashMap, HashSet};

/// The minimum number of vectors with the nearest sign bits that are compared by cosine similarity.
pub(crate) const MIN_CANDIDATES: usize = 256;

/// The sign bits of a vector, packed into words of 64 bits.
pub(crate) fn signs(numbers: &[i8]) -> Vec<u64> {
    let word = |part: &[i8]| part.iter().enumerate().fold(0, |word, (i, n)| word | (u64::from(*n > 0) << i));
    numbers.chunks(64).map(word).collect()
}

/// The dot product of two quantized vectors.
pub(crate) fn dot_product(a: &[i8], b: &[i8]) -> i32 {
    a.iter().zip(b).map(|(a, b)| i32::from(*a) * i32::from(*b)).sum()
}

/// The cosine similarity of two quantized vectors of the same length.
pub(crate) fn cosine(a: &[i8], b: &[i8]) -> f32 {
    let norm = |v: &[i8]| (dot_product(v, v) as f32).sqrt().max(1.0);
    dot_product(a, b) as f32 / (norm(a) * norm(b))
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
        let vector = |i: usize| &self.numbers[i * self.dimension..(i + 1) * self.dimension];
        let mut best: Vec<_> = all
            .into_iter()
            .map(|(_, i)| (self.keys[i as usize].clone(), cosine(&question, vector(i as usize))))
            .collect();
        best.sort_by(|(a, x), (b, y)| y.total_cmp(x).then_with(|| a.cmp(b)));
        best.truncate(limit);
        best
    }

    /// The cosine similarity of a memory to the question. `None` if the memory has no vector.
    pub fn similarity(&self, question: &[f32], key: &str) -> Option<f32> {
        let position = *self.positions.get(key)?;
        let question = quantize(question);
        let vector = self.numbers.get(position * self.dimension..(position + 1) * self.dimension)?;
        (question.len() == vector.len()).then(|| cosine(&question, vector))
    }

    /// The approximate size in bytes.
    pub fn weight(&self) -> usize {
        1024 + self.keys.len() * 160 + self.numbers.len() + self.signs.len() * 8 + self.without_vector.len() * 80
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record_with_vector(numbers: &[f32]) -> MemoryRecord {
        MemoryRecord { vector: Some(Vector::new("m", numbers)), ..MemoryRecord::default() }
    }

    fn empty_index() -> VectorIndex {
        VectorIndex { model: "m".to_owned(), ..VectorIndex::default() }
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
