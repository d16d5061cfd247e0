//! The words of a message: its searchable text, and the tokenizer that search and the message index share.
//!
//! Words are compared without case and accents. Scripts without spaces between words are compared letter by
//! letter, so that a word is found at any position.

use crate::rules::redaction::Redaction;
use crate::rules::text::{fold_char, is_diacritic};
use crate::types::entry::{Entry, Patch, Record};
use crate::types::id::Seq;
use crate::types::message::Message;
use std::ops::Range;

/// The version of the tokenizer. A change of the words that it finds needs a new one, so that indexes are
/// built again.
const TOKENIZER_VERSION: u32 = 1;

/// Maximum length of a word in the index, in bytes. A longer one is truncated, in the index and in queries.
const MAX_INDEXED_WORD_BYTES: usize = 64;

/// The searchable text of a message: its text, and the names and arguments of its tool calls.
pub(crate) fn searchable_text(message: &Message) -> String {
    let mut text = message.text();
    for call in message.tool_calls() {
        if !text.is_empty() {
            text.push('\n');
        }
        text.extend([&call.name, " ", &call.arguments]);
    }
    text
}

/// The distinct words of a text, as the index contains them, in order.
pub(crate) fn indexed_words(text: &str) -> Vec<String> {
    let mut tokens = WordTokens::of(text);
    // All words one after the other, so that only distinct ones are allocated.
    let mut folded = String::with_capacity(text.len());
    let mut spans = Vec::new();
    while tokens.next().is_some() {
        let start = folded.len();
        folded.push_str(indexed_word(&tokens.word, false).0);
        spans.push(start..folded.len());
    }
    let mut words: Vec<&str> = spans.into_iter().map(|span| &folded[span]).collect();
    words.sort_unstable();
    words.dedup();
    words.into_iter().map(str::to_owned).collect()
}

/// The form in which the index contains a word, and whether it finds a prefix: a word that is truncated
/// finds all words that begin with it.
pub(crate) fn indexed_word(word: &str, is_prefix: bool) -> (&str, bool) {
    if word.len() <= MAX_INDEXED_WORD_BYTES {
        return (word, is_prefix);
    }
    (&word[..word.floor_char_boundary(MAX_INDEXED_WORD_BYTES)], false)
}

/// Identifies the rules by which words are computed: a hash of the tokenizer's version and the redaction.
pub(crate) fn word_rules_hash(redaction: &Redaction) -> u64 {
    let mut hash = blake3::Hasher::new();
    hash.update(&TOKENIZER_VERSION.to_le_bytes());
    let rules = serde_json::to_string(redaction).expect("rules have string keys");
    hash.update(rules.as_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&hash.finalize().as_bytes()[..8]);
    u64::from_le_bytes(first)
}

/// A message of a log, with the number of messages before it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PositionedMessage {
    /// The record of the message.
    pub seq: Seq,
    /// The number of messages before it.
    pub position: usize,
    /// The message.
    pub message: Message,
}

/// The messages among consecutive records that are visible after the last of them, oldest first.
/// `messages` is the number of visible messages after the last record.
pub(crate) fn visible_messages(records: &[Record], mut messages: usize) -> Vec<PositionedMessage> {
    let mut visible = Vec::new();
    let mut last = Seq::MAX;
    for record in records.iter().rev() {
        if record.seq > last {
            continue;
        }
        match &record.entry {
            Entry::Rewound(rewind) => {
                last = rewind.to;
                messages = rewind.digest.messages;
            }
            Entry::Message(entry) => {
                messages = messages.saturating_sub(1);
                let message = entry.message.clone();
                visible.push(PositionedMessage { seq: record.seq, position: messages, message });
            }
            _ => {}
        }
    }
    visible.reverse();
    visible
}

/// The title for which a record is in the index: the one that it sets, and at a rewind the current one, because a
/// rewind discards index entries but not the title.
pub(crate) fn indexed_title<'a>(record: &'a Record, current: Option<&'a str>) -> Option<&'a str> {
    match &record.entry {
        Entry::Created(created) => created.title.as_deref(),
        Entry::Info(patch) => match &patch.title {
            Patch::Set(title) => Some(title),
            _ => None,
        },
        Entry::Rewound(_) => current,
        _ => None,
    }
}

/// A fold of a session's own log that finds the messages that the session or a fork of it shows.
#[derive(Debug, Default)]
pub(crate) struct ShownMessages {
    /// The fork points that were not reached yet, the latest first.
    fork_points: Vec<Seq>,
    /// The visible messages: record and position.
    visible: Vec<(Seq, usize)>,
    /// The number of visible messages that a fork shows.
    in_forks: usize,
    /// Messages that were discarded and that a fork shows.
    discarded: Vec<(Seq, usize)>,
    messages: usize,
    /// Whether the log contains a rewind.
    pub has_rewind: bool,
}

impl ShownMessages {
    /// Begins the fold of a log with these fork points of its forks.
    pub fn with_forks(mut fork_points: Vec<Seq>) -> Self {
        fork_points.sort_unstable_by(|a, b| b.cmp(a));
        Self { fork_points, ..Self::default() }
    }

    /// Applies the next record.
    pub fn push(&mut self, record: &Record) {
        while self.fork_points.pop_if(|point| *point < record.seq).is_some() {
            self.in_forks = self.visible.len();
        }
        match &record.entry {
            Entry::Created(created) => {
                self.messages = created.parent.as_ref().map_or(0, |parent| parent.digest.messages);
            }
            Entry::Message(_) => {
                self.visible.push((record.seq, self.messages));
                self.messages += 1;
            }
            Entry::Rewound(rewind) => {
                self.has_rewind = true;
                self.messages = rewind.digest.messages;
                let retained = self.visible.partition_point(|(seq, _)| *seq <= rewind.to);
                if retained < self.in_forks {
                    self.discarded.extend(&self.visible[retained..self.in_forks]);
                }
                self.visible.truncate(retained);
                self.in_forks = self.in_forks.min(retained);
            }
            _ => {}
        }
    }

    /// The messages that are shown, oldest first: record and position.
    pub fn finish(mut self) -> Vec<(Seq, usize)> {
        self.visible.append(&mut self.discarded);
        self.visible.sort_unstable();
        self.visible
    }
}

/// The record after which rewinds among consecutive records discard earlier ones. `None` if they discard none.
pub(crate) fn discarded_after(records: &[Record]) -> Option<Seq> {
    let targets = records.iter().filter_map(|record| match &record.entry {
        Entry::Rewound(rewind) => Some(rewind.to),
        _ => None,
    });
    let first = records.first()?.seq;
    targets.min().filter(|target| target + 1 < first)
}

/// A tokenizer that reads the words of a text one at a time.
pub(crate) struct WordTokens<'t> {
    text: &'t str,
    offset: usize,
    /// The last word read, in lower case and without accents.
    pub word: String,
}

impl<'t> WordTokens<'t> {
    pub fn of(text: &'t str) -> Self {
        Self { text, offset: 0, word: String::new() }
    }

    /// Reads the next word and returns its byte range.
    pub fn next(&mut self) -> Option<Range<usize>> {
        self.word.clear();
        let mut start = self.offset;
        let mut chars = self.text[self.offset..].chars();
        while let Some(c) = chars.next() {
            let char_start = self.offset;
            let char_end = self.text.len() - chars.as_str().len();
            let is_part = c.is_alphanumeric() || (is_diacritic(c) && !self.word.is_empty());
            let is_single = is_part && is_single_letter_word(c);
            if !self.word.is_empty() && (!is_part || is_single) {
                return Some(start..char_start);
            }
            self.offset = char_end;
            if is_part {
                if self.word.is_empty() {
                    start = char_start;
                }
                fold_char(c, &mut self.word);
            }
            if is_single {
                return Some(start..char_end);
            }
        }
        (!self.word.is_empty()).then_some(start..self.offset)
    }
}

/// Returns true for letters of scripts without spaces between words, or with suffixes attached to words.
fn is_single_letter_word(c: char) -> bool {
    matches!(c,
        '\u{e00}'..='\u{eff}'       // Thai, Lao
        | '\u{1000}'..='\u{109f}'   // Burmese
        | '\u{1780}'..='\u{17ff}'   // Khmer
        | '\u{3040}'..='\u{30ff}' | '\u{31f0}'..='\u{31ff}' | '\u{ff66}'..='\u{ff9d}' // Kana
        | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3ffff}' // Han
        | '\u{ac00}'..='\u{d7af}'   // Hangul
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::digest::LogDigest;
    use crate::types::entry::{RewindEntry, SessionCreated};
    use jiff::Timestamp;

    fn log(entries: impl IntoIterator<Item = Entry>) -> Vec<Record> {
        (1..).zip(entries).map(|(seq, entry)| Record { seq, at: Timestamp::UNIX_EPOCH, entry }).collect()
    }

    fn created() -> Entry {
        Entry::created(SessionCreated::default())
    }

    fn message(text: &str) -> Entry {
        Entry::message(Message::user(text))
    }

    fn rewound(to: Seq, messages: usize) -> Entry {
        Entry::Rewound(RewindEntry { to, digest: LogDigest { messages, ..LogDigest::default() } })
    }

    #[test]
    fn only_messages_that_are_visible_at_the_end_have_words() {
        let records = log([created(), message("a"), message("b"), rewound(2, 1), message("c"), rewound(5, 2)]);
        let found: Vec<_> = visible_messages(&records, 2).into_iter().map(|m| (m.seq, m.position)).collect();
        assert_eq!(found, [(2, 0), (5, 1)]);
        assert_eq!(discarded_after(&records), None, "nothing before these records is discarded");
        // A commit of the last three records: the message before them is not among them.
        let found: Vec<_> = visible_messages(&records[3..], 2).into_iter().map(|m| (m.seq, m.position)).collect();
        assert_eq!((found, discarded_after(&records[3..])), (vec![(5, 1)], Some(2)));
        let found = visible_messages(&log([created(), message("a"), rewound(1, 0)]), 0);
        assert_eq!(found, []);
    }

    #[test]
    fn a_fork_shows_messages_that_its_parent_discarded() {
        let records =
            log([created(), message("a"), message("b"), message("c"), rewound(2, 1), message("d"), rewound(1, 0)]);
        let shown = |fork_points: &[Seq]| {
            let mut fold = ShownMessages::with_forks(fork_points.to_vec());
            records.iter().for_each(|record| fold.push(record));
            assert!(fold.has_rewind);
            fold.finish()
        };
        assert_eq!(shown(&[]), []);
        assert_eq!(shown(&[3]), [(2, 0), (3, 1)]);
        assert_eq!(shown(&[3, 6]), [(2, 0), (3, 1), (6, 1)]);
        assert_eq!(shown(&[1]), []);
    }

    #[test]
    fn words_in_the_index_are_distinct_and_bounded() {
        assert_eq!(indexed_words("The FERRY, the ferry; 東京 कि"), ["ferry", "the", "कि", "京", "東"]);
        let long = "x".repeat(1000);
        assert_eq!(indexed_words(&long), ["x".repeat(MAX_INDEXED_WORD_BYTES)]);
        assert_eq!(indexed_word(&long, true), (&long[..MAX_INDEXED_WORD_BYTES], false));
        assert_eq!(indexed_word("fer", true), ("fer", true));
        // Truncated between characters.
        let long = format!("x{}", "é".repeat(63));
        assert_eq!(indexed_word(&long, false).0.len(), MAX_INDEXED_WORD_BYTES - 1);
    }
}
