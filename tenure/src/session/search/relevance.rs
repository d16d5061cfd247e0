//! The order of search results by relevance.

use crate::rules::matcher::Match;
use crate::session::search::request::SearchHit;

/// Maximum number of results that are ranked.
pub(super) const MAX_RANKED: usize = 1_000;

/// The usual parameters of BM25: how fast further occurrences of a term lose weight, and how much the length of the
/// text counts.
const SATURATION: f64 = 1.2;
const LENGTH_WEIGHT: f64 = 0.75;

/// What the rank of a result is computed from.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MatchStatistics {
    /// The number of occurrences of each term (word or phrase).
    occurrences: Vec<u32>,
    /// The length of the text, in bytes.
    length: usize,
}

impl MatchStatistics {
    pub fn of(text: &str, matches: &[Match]) -> Self {
        let mut occurrences = Vec::<(u64, u32)>::new();
        for found in matches {
            match occurrences.iter_mut().find(|(term, _)| *term == found.term()) {
                Some((_, count)) => *count += 1,
                None => occurrences.push((found.term(), 1)),
            }
        }
        Self { occurrences: occurrences.into_iter().map(|(_, count)| count).collect(), length: text.len() }
    }

    /// The BM25 score without the weights of the terms: all results contain all of them.
    fn score(&self, mean_length: f64) -> f64 {
        let length = 1.0 - LENGTH_WEIGHT + LENGTH_WEIGHT * self.length as f64 / mean_length.max(1.0);
        let term = |count: &u32| f64::from(*count) * (SATURATION + 1.0) / (f64::from(*count) + SATURATION * length);
        self.occurrences.iter().map(term).sum()
    }
}

/// Sorts results, best first; equally good ones stay in their order.
pub(super) fn rank(hits: Vec<SearchHit>, statistics: &[MatchStatistics]) -> Vec<SearchHit> {
    let total: usize = statistics.iter().map(|s| s.length).sum();
    let mean_length = total as f64 / statistics.len().max(1) as f64;
    let mut ranked: Vec<(f64, SearchHit)> = statistics.iter().map(|s| s.score(mean_length)).zip(hits).collect();
    ranked.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    ranked.into_iter().map(|(_, hit)| hit).collect()
}
