//! In-process indexes of memories, one per namespace: their terms and their vectors, ranked together. A bounded cache:
//! the store is authoritative.

use crate::engine::term_index::{Coverage, SequencePosition, TermIndex};
use crate::engine::vector_index::VectorIndex;
use crate::rules::terms::{Term, question_terms};
use crate::store::item::Namespace;
use crate::types::memory::MemoryRecord;
use jiff::Timestamp;
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use tokio::sync::{Mutex, MutexGuard};

/// The weight of the coverage of a question's words, relative to the similarity of its meaning (D-075).
const COVERAGE_WEIGHT: f64 = 1.5;
/// The number of candidates that each of the two searches contributes.
const CANDIDATES: usize = 200;

/// A question, prepared for ranking.
#[derive(Debug)]
pub(crate) struct Question {
    terms: BTreeSet<Term>,
    /// Its embedding vector. `None` ranks by words only.
    vector: Option<Vec<f32>>,
}

impl Question {
    pub fn new(text: &str, vector: Option<Vec<f32>>) -> Self {
        Self { terms: question_terms(text), vector }
    }
}

/// A memory in a ranking.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RankedMemory {
    pub key: String,
    /// By what the ranking is ordered: the coverage by itself, or the weighted sum of coverage and similarity.
    pub score: f64,
    /// BM25 divided by the highest score that a text could have, from 0 to 1.
    pub coverage: f64,
    /// Whether it contains a word of the question that is not a function word.
    pub has_word: bool,
    /// Cosine similarity, from -1 to 1. `None` without a vector.
    pub similarity: Option<f32>,
    /// Whether a newer memory supersedes this one.
    pub is_superseded: bool,
}

/// The index of one namespace.
#[derive(Debug, Default)]
pub(crate) struct MemoryIndex {
    terms: TermIndex,
    /// `None` without an embedder.
    pub vectors: Option<VectorIndex>,
    /// The superseded memories, each with the memory that supersedes it.
    superseded: HashMap<String, String>,
    /// The change notes that were applied, with the times at which they were created.
    pub applied_notes: HashMap<String, Timestamp>,
    /// The time of the last check for changes. `None` means that the index has not been loaded.
    pub checked_at: Option<Timestamp>,
}

impl MemoryIndex {
    /// Creates an empty index for the vectors of an embedding model.
    pub fn new(model: Option<&str>) -> Self {
        Self { vectors: model.map(VectorIndex::new), ..Self::default() }
    }

    /// Inserts or replaces a memory.
    pub fn set(&mut self, key: &str, created_at: Timestamp, record: &MemoryRecord) {
        let (source, message) = match record.sources.iter().find(|(_, messages)| !messages.is_empty()) {
            Some((source, messages)) => (source.clone(), messages[0]),
            None => (record.sources.keys().next().cloned().unwrap_or_default(), 0),
        };
        let stored_at = record.stored_at.unwrap_or(created_at);
        let position = SequencePosition { source, message, created_at, stored_at };
        self.terms.set(key, &record.text, position);
        if let Some(vectors) = &mut self.vectors {
            vectors.set(key, Some(record));
        }
        match &record.superseded_by {
            Some(newer) => self.superseded.insert(key.to_owned(), newer.clone()),
            None => self.superseded.remove(key),
        };
    }

    /// Removes a memory.
    pub fn remove(&mut self, key: &str) {
        self.terms.remove(key);
        if let Some(vectors) = &mut self.vectors {
            vectors.set(key, None);
        }
        self.superseded.remove(key);
    }

    /// Ranks the memories by their relevance to any of the questions, best first. A memory that supersedes another one
    /// is placed before it.
    pub fn rank(&self, questions: &[Question]) -> Vec<RankedMemory> {
        let mut best = HashMap::<String, RankedMemory>::new();
        for question in questions {
            for memory in self.rank_question(question) {
                match best.get_mut(&memory.key) {
                    Some(other) if other.score >= memory.score => {}
                    _ => drop(best.insert(memory.key.clone(), memory)),
                }
            }
        }
        self.raise_superseding(&mut best);
        let mut ranked: Vec<_> = best.into_values().collect();
        ranked.sort_by(|a, b| {
            b.score.total_cmp(&a.score).then(a.is_superseded.cmp(&b.is_superseded)).then_with(|| a.key.cmp(&b.key))
        });
        ranked
    }

    /// The best candidates by words and by meaning, in no particular order.
    fn rank_question(&self, question: &Question) -> Vec<RankedMemory> {
        let coverage = self.terms.coverage(&question.terms).into_iter().map(|coverage| (coverage.key, coverage));
        let coverage: HashMap<&str, Coverage<'_>> = coverage.collect();
        let mut by_words: Vec<_> = coverage.iter().map(|(key, coverage)| (coverage.value, *key)).collect();
        let is_better = |a: &(f64, &str), b: &(f64, &str)| b.0.total_cmp(&a.0).then_with(|| a.1.cmp(b.1));
        if by_words.len() > CANDIDATES {
            by_words.select_nth_unstable_by(CANDIDATES, is_better);
            by_words.truncate(CANDIDATES);
        }
        let search = self.vectors.as_ref().zip(question.vector.as_deref());
        let nearest = search.map(|(vectors, question)| vectors.nearest(question, CANDIDATES)).unwrap_or_default();
        let mut seen = HashSet::new();
        let by_meaning = nearest.into_iter().map(|(key, cosine)| (key, Some(cosine)));
        let by_words = by_words.into_iter().map(|(_, key)| {
            let similarity = search.and_then(|(vectors, question)| vectors.similarity(question, key));
            (key.to_owned(), similarity)
        });
        let mut candidates: Vec<_> = by_meaning.chain(by_words).collect();
        candidates.retain(|(key, _)| seen.insert(key.clone()));
        let rank = |(key, similarity): (String, Option<f32>)| {
            let found = coverage.get(key.as_str());
            let coverage = found.map_or(0.0, |coverage| coverage.value);
            let has_word = found.is_some_and(|coverage| coverage.has_word);
            let score = match question.vector {
                None => coverage,
                Some(_) => f64::from(similarity.unwrap_or(0.0)) + COVERAGE_WEIGHT * coverage,
            };
            let is_superseded = false;
            RankedMemory { key, score, coverage, has_word, similarity, is_superseded }
        };
        candidates.into_iter().map(rank).collect()
    }

    /// Gives a memory that supersedes others at least the score of each of them, and adds it if it was not found.
    fn raise_superseding(&self, best: &mut HashMap<String, RankedMemory>) {
        let mut found: Vec<_> = best.keys().filter(|key| self.superseded.contains_key(*key)).cloned().collect();
        found.sort();
        for key in found {
            let score = best[&key].score;
            let mut passed = HashSet::from([key.as_str()]);
            let mut older = key.as_str();
            while let Some(newer) = self.superseded.get(older).filter(|newer| self.terms.contains(newer)) {
                if !passed.insert(newer) {
                    break;
                }
                if let Some(memory) = best.get_mut(older) {
                    memory.is_superseded = true;
                }
                let raised = best.entry(newer.clone()).or_default();
                raised.key.clone_from(newer);
                raised.score = raised.score.max(score);
                older = newer;
            }
        }
    }

    /// The approximate size in bytes.
    pub fn weight(&self) -> usize {
        let vectors = self.vectors.as_ref().map_or(0, VectorIndex::weight);
        1024 + self.terms.weight() + vectors + self.superseded.len() * 160
    }
}

/// An index that is shared by concurrent recalls.
pub(crate) type SharedIndex = Arc<std::sync::Mutex<MemoryIndex>>;

/// The cache value of a namespace's index, with the weight that the cache accounts for it.
#[derive(Clone, Debug)]
pub(crate) struct WeighedIndex {
    /// The index.
    pub index: SharedIndex,
    /// The weight in bytes.
    pub weight: usize,
}

/// Weighs indexes by their size in bytes.
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
    /// The indexes by namespace.
    pub indexes: Cache<Namespace, WeighedIndex, IndexWeighter>,
    /// Locks that are held while a memory is read, changed and written. The hash of the memory's id
    /// selects the lock.
    pub locks: Vec<Mutex<()>>,
    /// Namespaces that are already recorded in the store as having memories.
    pub known_namespaces: std::sync::Mutex<HashSet<Namespace>>,
}

impl MemoryState {
    /// Creates the state with a cache of at most `bytes` bytes of indexes.
    pub fn new(bytes: usize) -> Self {
        let options =
            OptionsBuilder::new().shards(1).estimated_items_capacity(256).weight_capacity(bytes as u64).build();
        let options = options.expect("every required cache option is set");
        let indexes = Cache::with_options(options, IndexWeighter, Default::default(), Default::default());
        Self { indexes, locks: (0..64).map(|_| Mutex::default()).collect(), known_namespaces: Default::default() }
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
        self.indexes.remove(namespace);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::vector::Vector;

    fn time(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// A memory in a sequence of its own, so that it has no neighbours.
    fn record(text: &str, vector: Option<&[f32]>) -> MemoryRecord {
        let vector = vector.map(|numbers| Vector::new("m", numbers));
        let sources = [(text.to_owned(), Vec::new())].into();
        MemoryRecord { text: text.to_owned(), vector, sources, ..MemoryRecord::default() }
    }

    fn keys(ranked: &[RankedMemory]) -> Vec<&str> {
        ranked.iter().map(|memory| memory.key.as_str()).collect()
    }

    #[test]
    fn words_and_meaning_add_up() {
        let mut index = MemoryIndex::new(Some("m"));
        index.set("words", time(1), &record("the ferry leaves at nine", Some(&[0.0, 1.0])));
        index.set("meaning", time(1), &record("boats depart in the morning", Some(&[1.0, 0.1])));
        index.set("both", time(1), &record("a ferry", Some(&[1.0, 0.2])));
        index.set("neither", time(1), &record("green tea", Some(&[0.0, 1.0])));
        let ranked = index.rank(&[Question::new("ferry", Some(vec![1.0, 0.0]))]);
        assert_eq!(keys(&ranked), ["both", "meaning", "words", "neither"]);
        assert!(ranked[0].coverage > 0.3 && ranked[0].similarity.unwrap() > 0.9, "{ranked:?}");
        let ranked = index.rank(&[Question::new("ferry", None)]);
        assert_eq!(keys(&ranked), ["both", "words"], "without a vector by words only");
        assert_eq!(ranked[0].score, ranked[0].coverage);
    }

    #[test]
    fn a_memory_is_ranked_by_its_best_question() {
        let mut index = MemoryIndex::new(None);
        for text in ["ada plays the cello", "bob lives in oslo", "green tea"] {
            index.set(text, time(1), &record(text, None));
        }
        let questions = ["who plays the cello?", "where is oslo?"].map(|text| Question::new(text, None));
        assert_eq!(keys(&index.rank(&questions)).len(), 2);
    }

    #[test]
    fn a_superseded_memory_is_ranked_after_the_one_that_supersedes_it() {
        let mut index = MemoryIndex::new(None);
        let superseded =
            |text, newer: &str| MemoryRecord { superseded_by: Some(newer.to_owned()), ..record(text, None) };
        index.set("a", time(1), &superseded("my address is mill lane", "b"));
        index.set("b", time(2), &superseded("moved to harbour street", "c"));
        index.set("c", time(3), &record("now at park road", None));
        index.set("d", time(3), &record("my address book is blue", None));
        let ranked = index.rank(&[Question::new("what is my address?", None)]);
        assert_eq!(keys(&ranked)[0], "c");
        assert_eq!(ranked.iter().filter(|memory| memory.is_superseded).count(), 2);
        index.remove("c");
        index.remove("b");
        let ranked = index.rank(&[Question::new("what is my address?", None)]);
        assert_eq!((keys(&ranked)[0], ranked[0].is_superseded), ("a", false), "nothing supersedes it any more");
    }
}
