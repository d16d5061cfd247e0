//! An in-process inverted index of memories, ranked by BM25 over their own terms and those of their neighbours.
//!
//! The scores depend only on the indexed texts, so they are the same in every store and after every order of writes.

use crate::rules::terms::{Term, terms};
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// BM25 saturation: how soon further occurrences of a term stop increasing the score (D-075).
const K1: f64 = 0.7;
/// BM25 length normalization: how much the score decreases with the length of a text. Memories are short, and a
/// longer one usually says more.
const B: f64 = 0.3;
/// What an occurrence of a term in a neighbouring memory counts, relative to one in the memory itself (D-162).
const NEIGHBOR_SHARE: f64 = 0.25;
/// What a function word of the question counts, relative to another word as rare as it.
const FUNCTION_WORD_SHARE: f64 = 0.2;
/// The maximum distance in a log, in records, between messages whose memories are neighbours.
const MAX_NEIGHBOR_RECORDS: u64 = 16;
/// The maximum time between memories that are neighbours and were not derived from messages, in seconds.
const MAX_NEIGHBOR_SECONDS: i64 = 1800;

/// The place of a memory in the sequence that it was stored in. Memories next to each other in a sequence are
/// neighbours, if they are close enough to belong to one conversation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SequencePosition {
    /// The source: a session, or the user who stored it.
    pub source: String,
    /// The record of the first message that it was derived from; 0 if it was derived from none.
    pub message: u64,
    /// When it was true or said.
    pub created_at: Timestamp,
    /// When it was stored, which orders memories of the same time.
    pub stored_at: Timestamp,
}

impl SequencePosition {
    fn is_close_to(&self, other: &Self) -> bool {
        let is_close = match (self.message, other.message) {
            (0, 0) => self.created_at.duration_since(other.created_at).as_secs().abs() <= MAX_NEIGHBOR_SECONDS,
            (0, _) | (_, 0) => false,
            (a, b) => a.abs_diff(b) <= MAX_NEIGHBOR_RECORDS,
        };
        is_close && self.source == other.source
    }
}

/// An indexed memory.
#[derive(Debug)]
struct Document {
    key: String,
    /// The number of words that are not function words.
    length: u32,
    /// The ids of the distinct forms of its words.
    forms: Vec<u32>,
    position: SequencePosition,
    /// The neighbours in the sequence, by document number.
    previous: Option<u32>,
    next: Option<u32>,
}

/// An inverted index: the terms of the memories of one namespace.
#[derive(Debug, Default)]
pub(crate) struct TermIndex {
    /// The number of each form.
    form_ids: HashMap<String, u32>,
    /// For each form, the documents that contain it, with the number of occurrences.
    postings: Vec<Vec<(u32, u32)>>,
    /// The documents by number. `None` is free.
    documents: Vec<Option<Document>>,
    free: Vec<u32>,
    numbers: HashMap<String, u32>,
    sequence: BTreeMap<(SequencePosition, String), u32>,
    total_length: u64,
    posting_count: usize,
}

/// A memory that a question found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Coverage<'a> {
    pub key: &'a str,
    /// BM25 divided by the highest score that a text could have, from 0 to 1.
    pub value: f64,
    /// Whether the memory itself contains a word of the question that is not a function word.
    pub has_word: bool,
}

/// Occurrences of a term, per document.
#[derive(Default)]
struct Occurrences {
    own: Vec<u32>,
    neighbors: Vec<u32>,
    touched: Vec<u32>,
}

impl Occurrences {
    fn touch(&mut self, number: u32) {
        if self.own[number as usize] == 0 && self.neighbors[number as usize] == 0 {
            self.touched.push(number);
        }
    }
}

impl TermIndex {
    /// Inserts or replaces the text of a memory.
    pub fn set(&mut self, key: &str, text: &str, position: SequencePosition) {
        self.remove(key);
        let terms = terms(text);
        let number = self.free.pop().unwrap_or(self.documents.len() as u32);
        let mut counts = BTreeMap::<u32, u32>::new();
        for form in terms.iter().flat_map(|term| &term.forms) {
            let next_id = self.postings.len() as u32;
            let id = *self.form_ids.entry(form.clone()).or_insert(next_id);
            if id == next_id {
                self.postings.push(Vec::new());
            }
            *counts.entry(id).or_default() += 1;
        }
        for (id, count) in &counts {
            self.postings[*id as usize].push((number, *count));
        }
        self.posting_count += counts.len();
        let length = terms.iter().filter(|term| !term.is_function_word).count().max(1) as u32;
        self.total_length += u64::from(length);
        let document = Document {
            key: key.to_owned(),
            length,
            forms: counts.into_keys().collect(),
            position: position.clone(),
            previous: None,
            next: None,
        };
        match self.documents.get_mut(number as usize) {
            Some(slot) => *slot = Some(document),
            None => self.documents.push(Some(document)),
        }
        self.numbers.insert(key.to_owned(), number);
        self.link(number, (position, key.to_owned()));
    }

    /// Removes a memory.
    pub fn remove(&mut self, key: &str) {
        let Some(number) = self.numbers.remove(key) else { return };
        let Some(document) = self.documents[number as usize].take() else { return };
        self.free.push(number);
        self.total_length -= u64::from(document.length);
        self.posting_count -= document.forms.len();
        for form in &document.forms {
            self.postings[*form as usize].retain(|(n, _)| *n != number);
        }
        let entry = (document.position, document.key);
        self.sequence.remove(&entry);
        let previous = self.sequence.range(..&entry).next_back().map(|(_, number)| *number);
        let next = self.sequence.range(&entry..).next().map(|(_, number)| *number);
        self.set_neighbors(previous, next);
    }

    /// Inserts a document into the sequence of its source.
    fn link(&mut self, number: u32, entry: (SequencePosition, String)) {
        let previous = self.sequence.range(..&entry).next_back().map(|(_, number)| *number);
        let next = self.sequence.range(&entry..).next().map(|(_, number)| *number);
        self.sequence.insert(entry, number);
        self.set_neighbors(previous, Some(number));
        self.set_neighbors(Some(number), next);
    }

    /// Makes two documents that follow each other neighbours, if they are close. `None` is the end of the sequence.
    fn set_neighbors(&mut self, previous: Option<u32>, next: Option<u32>) {
        let position = |number: Option<u32>| Some(&self.documents[number? as usize].as_ref()?.position);
        let are_close = position(previous).zip(position(next)).is_some_and(|(a, b)| a.is_close_to(b));
        if let Some(document) = previous.and_then(|n| self.documents[n as usize].as_mut()) {
            document.next = next.filter(|_| are_close);
        }
        if let Some(document) = next.and_then(|n| self.documents[n as usize].as_mut()) {
            document.previous = previous.filter(|_| are_close);
        }
    }

    /// Returns the memories that contain a term of the question, or whose neighbour does. In no particular order.
    pub fn coverage(&self, question: &BTreeSet<Term>) -> Vec<Coverage<'_>> {
        let count = self.numbers.len() as f64;
        let mean_length = (self.total_length as f64 / count.max(1.0)).max(1.0);
        let size = self.documents.len();
        let mut occurrences = Occurrences { own: vec![0; size], neighbors: vec![0; size], touched: Vec::new() };
        let mut scores = vec![0.0; size];
        let mut has_word = vec![false; size];
        let mut maximum = 0.0;
        let mut found = Vec::new();
        for term in question {
            let containing = self.count_occurrences(term, &mut occurrences);
            let share = if term.is_function_word { FUNCTION_WORD_SHARE } else { 1.0 };
            let rarity = share * (1.0 + (count - containing as f64 + 0.5) / (containing as f64 + 0.5)).ln();
            maximum += rarity * (K1 + 1.0);
            for number in occurrences.touched.drain(..) {
                let i = number as usize;
                has_word[i] |= occurrences.own[i] > 0 && !term.is_function_word;
                let frequency = f64::from(occurrences.own[i]) + NEIGHBOR_SHARE * f64::from(occurrences.neighbors[i]);
                occurrences.own[i] = 0;
                occurrences.neighbors[i] = 0;
                let Some(document) = &self.documents[i] else { continue };
                let length = 1.0 - B + B * f64::from(document.length) / mean_length;
                if scores[i] == 0.0 {
                    found.push(number);
                }
                scores[i] += rarity * frequency * (K1 + 1.0) / (frequency + K1 * length);
            }
        }
        // A question of function words only says little, however well it is covered.
        let share = if question.iter().all(|term| term.is_function_word) { FUNCTION_WORD_SHARE } else { 1.0 };
        let coverage = |number: u32| {
            let key = &self.documents[number as usize].as_ref()?.key;
            let value = share * scores[number as usize] / maximum;
            Some(Coverage { key, value, has_word: has_word[number as usize] })
        };
        found.into_iter().filter_map(coverage).collect()
    }

    /// Counts a term in each document and in its neighbours. Returns the number of documents that contain it.
    fn count_occurrences(&self, term: &Term, occurrences: &mut Occurrences) -> usize {
        for form in &term.forms {
            let Some(id) = self.form_ids.get(form) else { continue };
            for (number, count) in &self.postings[*id as usize] {
                occurrences.touch(*number);
                let own = &mut occurrences.own[*number as usize];
                *own = (*own).max(*count);
            }
        }
        let containing = occurrences.touched.len();
        for i in 0..containing {
            let number = occurrences.touched[i];
            let Some(document) = &self.documents[number as usize] else { continue };
            let count = occurrences.own[number as usize];
            for neighbor in [document.previous, document.next].into_iter().flatten() {
                occurrences.touch(neighbor);
                occurrences.neighbors[neighbor as usize] += count;
            }
        }
        containing
    }

    /// Returns true if the memory is indexed.
    pub fn contains(&self, key: &str) -> bool {
        self.numbers.contains_key(key)
    }

    /// The approximate size in bytes.
    pub fn weight(&self) -> usize {
        self.numbers.len() * 360 + self.posting_count * 12 + self.form_ids.len() * 80
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::terms::question_terms;

    fn position(source: &str, second: i64) -> SequencePosition {
        let stored_at = Timestamp::from_second(second).unwrap();
        SequencePosition { source: source.to_owned(), message: 0, created_at: stored_at, stored_at }
    }

    fn index_of(texts: &[&str]) -> TermIndex {
        let mut index = TermIndex::default();
        for (i, text) in texts.iter().enumerate() {
            // Sources of their own: no neighbours.
            index.set(&format!("k{i}"), text, position(&i.to_string(), 0));
        }
        index
    }

    fn ranked(index: &TermIndex, question: &str) -> Vec<String> {
        let mut hits = index.coverage(&question_terms(question));
        hits.sort_by(|a, b| b.value.total_cmp(&a.value).then_with(|| a.key.cmp(b.key)));
        hits.into_iter().map(|hit| hit.key.to_owned()).collect()
    }

    #[test]
    fn any_word_is_enough_and_more_is_better() {
        let index = index_of(&["likes green tea", "likes coffee", "green tea green tea", "nothing"]);
        assert_eq!(ranked(&index, "GREEN teas"), ["k2", "k0"]);
        assert_eq!(ranked(&index, "liked tea"), ["k0", "k2", "k1"]);
        assert_eq!(ranked(&index, "absent"), Vec::<String>::new());
        assert_eq!(ranked(&TermIndex::default(), "tea"), Vec::<String>::new());
    }

    #[test]
    fn coverage_is_between_zero_and_one() {
        let index = index_of(&["tea", "tea tea tea tea tea tea tea tea", "coffee"]);
        let hits = index.coverage(&question_terms("tea"));
        assert!(hits.len() == 2 && hits.iter().all(|hit| hit.value > 0.3 && hit.value < 1.0), "{hits:?}");
        let with_unknown = index.coverage(&question_terms("tea chocolate"));
        assert!(with_unknown[0].value < hits[0].value, "a word that no memory contains lowers the coverage");
    }

    #[test]
    fn a_neighbour_counts_in_part() {
        let mut index = TermIndex::default();
        index.set("question", "Which instrument do you play?", position("s", 1));
        index.set("answer", "The cello, since school", position("s", 2));
        index.set("later", "Lovely weather", position("s", 3));
        index.set("elsewhere", "The cello, since school", position("t", 2));
        assert_eq!(ranked(&index, "instrument"), ["question", "answer"]);
        let has_word = index.coverage(&question_terms("instrument")).into_iter().map(|hit| (hit.key, hit.has_word));
        assert_eq!(BTreeMap::from_iter(has_word), [("answer", false), ("question", true)].into());
        index.remove("answer");
        assert_eq!(ranked(&index, "instrument"), ["question", "later"], "the sequence closes");
        index.set("answer", "The cello, since school", position("s", 2));
        assert_eq!(ranked(&index, "instrument"), ["question", "answer"], "and opens again");
        index.set("answer", "The cello, since school", position("s", 2 + MAX_NEIGHBOR_SECONDS));
        assert_eq!(ranked(&index, "instrument"), ["question", "later"], "half an hour later is another conversation");
    }

    #[test]
    fn the_scores_do_not_depend_on_the_order_of_writes() {
        let texts = ["a red apple", "the red car", "apples and pears", "cars, cars, cars", "no fruit"];
        let mut forward = TermIndex::default();
        let mut backward = TermIndex::default();
        for (i, text) in texts.iter().enumerate() {
            forward.set(&i.to_string(), text, position("s", i as i64));
        }
        backward.set("gone", "apple car", position("s", 2));
        for (i, text) in texts.iter().enumerate().rev() {
            backward.set(&i.to_string(), text, position("s", i as i64));
        }
        backward.remove("gone");
        let scores = |index: &TermIndex| {
            let mut hits: Vec<(String, f64)> = index
                .coverage(&question_terms("red apples in a car"))
                .into_iter()
                .map(|hit| (hit.key.to_owned(), hit.value))
                .collect();
            hits.sort_by(|a, b| a.0.cmp(&b.0));
            hits
        };
        assert_eq!(scores(&forward), scores(&backward));
        assert_eq!(forward.total_length, backward.total_length);
    }
}
