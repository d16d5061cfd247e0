//! An in-memory inverted index of words, ranked by BM25.

use crate::rules::text::words;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// BM25 saturation: how soon further occurrences of a word stop increasing the score.
const K1: f64 = 1.2;

/// BM25 length normalization: how much the score decreases with the length of a text.
const B: f64 = 0.75;

/// An inverted index: the words of many texts, by key.
#[derive(Debug, Default)]
pub(crate) struct Bm25Index {
    /// For each word, the keys of the texts that contain it, with the number of occurrences.
    postings: HashMap<String, BTreeMap<String, u32>>,
    /// The number of words of each text.
    lengths: HashMap<String, usize>,
    total: usize,
}

impl Bm25Index {
    /// Adds a text under a key that is not in use.
    pub fn put(&mut self, key: &str, text: &str) {
        let words = words(text);
        self.total += words.len();
        self.lengths.insert(key.to_owned(), words.len());
        for word in words {
            *self.postings.entry(word).or_default().entry(key.to_owned()).or_default() += 1;
        }
    }

    /// Removes a text. `text` must be the text that was added under this key.
    pub fn remove(&mut self, key: &str, text: &str) {
        let Some(length) = self.lengths.remove(key) else { return };
        self.total -= length;
        for word in words(text) {
            if let Some(texts) = self.postings.get_mut(&word) {
                texts.remove(key);
                if texts.is_empty() {
                    self.postings.remove(&word);
                }
            }
        }
    }

    /// Returns the keys of the texts that contain any word of `query`, ranked best first; equal
    /// scores by key.
    pub fn search(&self, query: &str, limit: usize) -> Vec<(&str, f64)> {
        let query: BTreeSet<_> = words(query).into_iter().collect();
        let count = self.lengths.len() as f64;
        let mean_length = self.total as f64 / self.lengths.len().max(1) as f64;
        let mut scores = HashMap::<&str, f64>::new();
        for texts in query.iter().filter_map(|word| self.postings.get(word)) {
            let rarity = (1.0 + (count - texts.len() as f64 + 0.5) / (texts.len() as f64 + 0.5)).ln();
            for (key, n) in texts {
                let n = f64::from(*n);
                let length = self.lengths.get(key).copied().unwrap_or(0) as f64;
                *scores.entry(key).or_default() +=
                    rarity * n * (K1 + 1.0) / (n + K1 * (1.0 - B + B * length / mean_length));
            }
        }
        let mut best: Vec<_> = scores.into_iter().collect();
        best.sort_by(|(a, x), (b, y)| y.total_cmp(x).then_with(|| a.cmp(b)));
        best.truncate(limit);
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(texts: &[&str], query: &str) -> Vec<String> {
        let mut words = Bm25Index::default();
        for (i, text) in texts.iter().enumerate() {
            words.put(&format!("k{i}"), text);
        }
        words.search(query, 10).into_iter().map(|(key, _)| key.to_owned()).collect()
    }

    #[test]
    fn words_have_no_case_and_no_accents() {
        assert_eq!(words("Crème-brûlée, 2 Stück!"), ["creme", "brulee", "2", "stuck"]);
        assert_eq!(words("cafe\u{301} \u{130}stanbul"), ["cafe", "istanbul"]);
        assert_eq!(words("Ελλάδα 日本語"), ["ελλαδα", "日本語"]);
        assert_eq!(words(" -- ' "), Vec::<String>::new());
    }

    #[test]
    fn any_word_is_enough_and_more_is_better() {
        let texts = ["likes green tea", "likes coffee", "green tea green tea", "nothing"];
        assert_eq!(search(&texts, "GREEN tea"), ["k2", "k0"]);
        assert_eq!(search(&texts, "likes tea"), ["k0", "k2", "k1"]);
        assert_eq!(search(&texts, "absent"), Vec::<String>::new());
        assert_eq!(search(&texts, ""), Vec::<String>::new());
        assert_eq!(search(&[], "tea"), Vec::<String>::new());
    }

    #[test]
    fn a_rare_word_counts_more_and_a_long_text_less() {
        assert_eq!(search(&["tea cup", "tea pot", "tea mug"], "tea pot")[0], "k1");
        assert_eq!(search(&["tea and much more that nobody asked for", "tea"], "tea"), ["k1", "k0"]);
    }

    #[test]
    fn equal_scores_are_ordered_by_key_and_the_limit_holds() {
        let texts = ["same", "same", "same"];
        assert_eq!(search(&texts, "same"), ["k0", "k1", "k2"]);
        let mut words = Bm25Index::default();
        texts.iter().enumerate().for_each(|(i, text)| words.put(&format!("k{i}"), text));
        assert_eq!(words.search("same", 2).len(), 2);
    }

    #[test]
    fn a_removed_text_leaves_nothing() {
        let mut words = Bm25Index::default();
        words.put("a", "green tea tea");
        words.put("b", "tea");
        words.remove("a", "green tea tea");
        assert_eq!(words.search("green tea", 10).len(), 1);
        words.remove("b", "tea");
        words.remove("b", "tea");
        assert!(words.postings.is_empty() && words.lengths.is_empty() && words.total == 0);
    }
}
