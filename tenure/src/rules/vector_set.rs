//! A set of quantized vectors, and the search for those nearest to a question.
//!
//! A search has two passes. The first compares only sign bits, one bit per dimension, and selects
//! candidates; the second ranks the candidates by cosine similarity. Recall and time by the number
//! of vectors are in `docs/benchmarks.md` (D-074). This module depends on no other, so that the
//! benchmark beside other indexes (`tenure/benches/ann`) can include it.

/// Up to this number of vectors, all are candidates.
const MIN_CANDIDATES: usize = 2048;

/// Above that number, one in this many vectors is a candidate.
const CANDIDATE_SHARE: usize = 128;

/// Vectors of equal dimension, one byte per component, in dense positions from 0.
#[derive(Debug, Default)]
pub(crate) struct VectorSet {
    /// The number of components of a vector.
    dimension: usize,
    /// The sign bits of all vectors, packed into words, one vector after the other.
    signs: Vec<u64>,
    /// The components of all vectors, one vector after the other.
    components: Vec<i8>,
    /// The reciprocal length of each vector.
    inverse_norms: Vec<f32>,
}

impl VectorSet {
    /// The number of vectors.
    pub fn len(&self) -> usize {
        self.inverse_norms.len()
    }

    /// Appends a vector. The first one determines the dimension. Returns false, without a change, if the
    /// vector is empty or has another dimension.
    pub fn push(&mut self, vector: &[i8]) -> bool {
        if vector.is_empty() || (self.len() > 0 && vector.len() != self.dimension) {
            return false;
        }
        self.dimension = vector.len();
        self.signs.extend(sign_words(vector));
        self.components.extend(vector);
        self.inverse_norms.push(inverse_norm(vector));
        true
    }

    /// Removes the vector at a position. The last vector moves there.
    pub fn swap_remove(&mut self, position: usize) {
        self.inverse_norms.swap_remove(position);
        let last = self.len();
        let words = self.words_per_vector();
        self.signs.copy_within(last * words.., position * words);
        self.signs.truncate(last * words);
        self.components.copy_within(last * self.dimension.., position * self.dimension);
        self.components.truncate(last * self.dimension);
    }

    /// The positions of the `limit` vectors most similar to the question, in no order, with their cosine
    /// similarities. More than `limit` if the last ones are equally similar.
    pub fn nearest(&self, question: &[i8], limit: usize) -> Vec<(usize, f32)> {
        if question.len() != self.dimension || self.len() == 0 || limit == 0 {
            return Vec::new();
        }
        let question_norm = inverse_norm(question);
        let cosine = |i: usize| {
            let vector = &self.components[i * self.dimension..][..self.dimension];
            dot_product(question, vector) as f32 * question_norm * self.inverse_norms[i]
        };
        let mut nearest: Vec<(usize, f32)> =
            self.candidates(question, limit).into_iter().map(|i| (i as usize, cosine(i as usize))).collect();
        if nearest.len() > limit {
            let (_, &mut (_, last), _) = nearest.select_nth_unstable_by(limit - 1, |(_, a), (_, b)| b.total_cmp(a));
            nearest.retain(|(_, cosine)| *cosine >= last);
        }
        nearest
    }

    /// The cosine similarity of the vector at a position to the question. `None` if it has another dimension.
    pub fn cosine(&self, question: &[i8], position: usize) -> Option<f32> {
        let vector = self.components.get(position * self.dimension..(position + 1) * self.dimension)?;
        let is_comparable = question.len() == self.dimension;
        is_comparable
            .then(|| dot_product(question, vector) as f32 * inverse_norm(question) * self.inverse_norms[position])
    }

    /// The positions of the vectors whose signs differ least from those of the question.
    fn candidates(&self, question: &[i8], limit: usize) -> Vec<u32> {
        let count = MIN_CANDIDATES.max(self.len() / CANDIDATE_SHARE).max(limit * 4);
        if self.len() <= count {
            return (0..self.len() as u32).collect();
        }
        let question = sign_words(question).collect::<Vec<_>>();
        let distances: Vec<u16> = self
            .signs
            .chunks_exact(self.words_per_vector())
            .map(|words| words.iter().zip(&question).map(|(a, b)| (a ^ b).count_ones()).sum::<u32>() as u16)
            .collect();
        // A histogram gives the largest distance of a candidate without sorting.
        let mut vectors_at = vec![0_usize; self.dimension + 1];
        distances.iter().for_each(|d| vectors_at[usize::from(*d)] += 1);
        let mut found = 0;
        let largest = vectors_at.iter().position(|n| {
            found += n;
            found >= count
        });
        let largest = largest.unwrap_or(self.dimension) as u16;
        (0..).zip(&distances).filter(|(_, d)| **d <= largest).map(|(i, _)| i).collect()
    }

    fn words_per_vector(&self) -> usize {
        self.dimension.div_ceil(64)
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.components.len() + self.signs.len() * 8 + self.inverse_norms.len() * 4
    }
}

/// The sign bits of a vector, packed into words of 64 bits.
fn sign_words(vector: &[i8]) -> impl Iterator<Item = u64> {
    let word = |part: &[i8]| part.iter().enumerate().fold(0, |word, (i, n)| word | (u64::from(*n > 0) << i));
    vector.chunks(64).map(word)
}

/// The reciprocal length of a vector.
fn inverse_norm(vector: &[i8]) -> f32 {
    1.0 / (dot_product(vector, vector) as f32).sqrt().max(1.0)
}

fn dot_product(a: &[i8], b: &[i8]) -> i32 {
    a.iter().zip(b).map(|(a, b)| i32::from(*a) * i32::from(*b)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Vectors of pseudo-random components, the same in each run.
    fn vectors(count: usize, dimension: usize) -> Vec<Vec<i8>> {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut component = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as i8
        };
        (0..count).map(|_| (0..dimension).map(|_| component()).collect()).collect()
    }

    fn set_of(vectors: &[Vec<i8>]) -> VectorSet {
        let mut set = VectorSet::default();
        vectors.iter().for_each(|vector| assert!(set.push(vector)));
        set
    }

    fn positions(mut nearest: Vec<(usize, f32)>) -> Vec<usize> {
        nearest.sort_by(|(i, a), (j, b)| b.total_cmp(a).then(i.cmp(j)));
        nearest.into_iter().map(|(i, _)| i).collect()
    }

    #[test]
    fn a_small_set_is_searched_exactly() {
        let all = vectors(MIN_CANDIDATES, 70);
        let set = set_of(&all);
        for question in &all[..20] {
            let cosine = |v: &Vec<i8>| {
                let dot = |a: &[i8], b: &[i8]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
                (dot(question, v) / (dot(v, v) * dot(question, question)).sqrt()) as f32
            };
            let mut exact: Vec<(usize, f32)> = all.iter().map(cosine).enumerate().collect();
            exact.sort_by(|(_, a), (_, b)| b.total_cmp(a));
            assert_eq!(positions(set.nearest(question, 10)), positions(exact[..10].to_vec()));
        }
    }

    #[test]
    fn similar_vectors_are_found_among_many() {
        let mut all = vectors(30_000, 64);
        // Two variants of each of ten vectors, with other signs in a few places.
        for i in 0..10 {
            for offset in [0, 5] {
                let mut variant = all[i].clone();
                (0..4).for_each(|j| variant[offset + j * 11] = -(variant[offset + j * 11] / 2));
                all.push(variant);
            }
        }
        let set = set_of(&all);
        assert!(set.candidates(&all[0], 10).len() < all.len() / 5);
        for (i, question) in all[..10].iter().enumerate() {
            let found = positions(set.nearest(question, 3));
            assert_eq!(found[0], i);
            let mut variants = found[1..].to_vec();
            variants.sort_unstable();
            assert_eq!(variants, [30_000 + 2 * i, 30_001 + 2 * i]);
        }
    }

    #[test]
    fn equal_vectors_are_all_returned_and_unsuitable_ones_rejected() {
        let mut set = set_of(&[vec![1, 2], vec![2, 4], vec![1, 2], vec![-1, 0], vec![1, 2]]);
        let found = positions(set.nearest(&[1, 2], 2));
        assert!(found.len() > 2 && !found.contains(&3), "{found:?}");
        assert!(!set.push(&[]) && !set.push(&[1]) && set.len() == 5);
        assert!(set.nearest(&[1], 2).is_empty() && set.nearest(&[1, 2], 0).is_empty());
        (0..5).rev().for_each(|position| set.swap_remove(position));
        assert!(set.nearest(&[1, 2], 2).is_empty() && set.bytes() == 0);
        assert!(set.push(&[1, 2, 3]), "an empty set accepts another dimension");
    }
}
