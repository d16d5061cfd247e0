//! A word index in memory, ranked by BM25.

use crate::rules::text::words;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// How soon more occurrences of a word stop counting.
const K1: f64 = 1.2;

/// How much a long text counts for less.
const B: f64 = 0.75;

/// The words of many texts, and where they are.
#[derive(Debug, Default)]
pub(crate) struct Words {
    /// For each word the texts that have it, and how often.
    found: HashMap<String, BTreeMap<String, u32>>,
    /// How many words each text has.
    lengths: HashMap<String, usize>,
    total: usize,
}

impl Words {
    /// Takes in a text under a key that is free.
    pub fn put(&mut self, key: &str, text: &str) {
        let words = words(text);
        self.total += words.len();
        self.lengths.insert(key.to_owned(), words.len());
        for word in words {
            *self.found.entry(word).or_default().entry(key.to_owned()).or_default() += 1;
        }
    }

    /// Takes a text out again.
    pub fn take(&mut self, key: &str, text: &str) {
        let Some(length) = self.lengths.remove(key) else { return };
        self.total -= length;
        for word in words(text) {
            if let Some(texts) = self.found.get_mut(&word) {
                texts.remove(key);
                if texts.is_empty() {
                    self.found.remove(&word);
                }
            }
        }
    }

    /// The keys of the texts that have any word of `query`, best first; equally good ones by key.
    pub fn search(&self, query: &str, limit: usize) -> Vec<(&str, f64)> {
        let query: BTreeSet<_> = words(query).into_iter().collect();
        let (count, mean) = (self.lengths.len() as f64, self.total as f64 / self.lengths.len().max(1) as f64);
        let mut scores = HashMap::<&str, f64>::new();
        for texts in query.iter().filter_map(|word| self.found.get(word)) {
            let rarity = (1.0 + (count - texts.len() as f64 + 0.5) / (texts.len() as f64 + 0.5)).ln();
            for (key, n) in texts {
                let (n, length) = (f64::from(*n), self.lengths.get(key).copied().unwrap_or(0) as f64);
                *scores.entry(key).or_default() += rarity * n * (K1 + 1.0) / (n + K1 * (1.0 - B + B * length / mean));
            }
        }
        let mut best: Vec<_> = scores.into_iter().collect();
        best.sort_by(|(a, x), (b, y)| y.total_cmp(x).then_with(|| a.cmp(b)));
        best.truncate(limit);
        best
    }
}
