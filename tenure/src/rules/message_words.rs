//! The words of a message: its searchable text, and the tokenizer that search and the message index share.
//!
//! Words are compared without case and accents. Scripts without spaces between words are compared letter by
//! letter, so that a word is found at any position.

use crate::rules::redaction::Redaction;
use crate::rules::text::{fold_char, is_diacritic};
use crate::types::entry::{Entry, Patch, Record};
use crate::types::id::Seq;
use crate::types::message::Message;
use std::collections::HashSet;
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

/// The distinct words of a text, as the index contains them.
pub(crate) fn indexed_words(text: &str) -> Vec<String> {
    let mut tokens = WordTokens::of(text);
    let mut words = HashSet::new();
    while tokens.next().is_some() {
        let (word, _) = indexed_word(&tokens.word, false);
        if !words.contains(word) {
            words.insert(word.to_owned());
        }
    }
    words.into_iter().collect()
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
#[derive(Clone, Copy, Debug)]
pub(crate) struct PositionedMessage<'a> {
    /// The record of the message.
    pub seq: Seq,
    /// The number of messages before it.
    pub position: usize,
    /// The message.
    pub message: &'a Message,
}

/// The messages among consecutive records that are visible after the last of them, newest first.
/// `messages` is the number of visible messages after the last record.
pub(crate) fn visible_messages(records: &[Record], mut messages: usize) -> Vec<PositionedMessage<'_>> {
    let mut visible = Vec::new();
    let mut upto = Seq::MAX;
    for record in records.iter().rev() {
        if record.seq > upto {
            continue;
        }
        match &record.entry {
            Entry::Rewound(rewind) => {
                upto = rewind.to;
                messages = rewind.digest.messages;
            }
            Entry::Message(entry) => {
                messages = messages.saturating_sub(1);
                visible.push(PositionedMessage { seq: record.seq, position: messages, message: &entry.message });
            }
            _ => {}
        }
    }
    visible
}

/// The records among consecutive ones that are in the index for the session's title, newest first, each with the
/// title that it sets. `None` means the session's title at the end: a rewind discards index entries, but not the
/// title.
pub(crate) fn titled_records(records: &[Record]) -> Vec<(Seq, Option<&str>)> {
    let mut titled = Vec::new();
    let mut upto = Seq::MAX;
    for record in records.iter().rev() {
        if record.seq > upto {
            continue;
        }
        match &record.entry {
            Entry::Rewound(rewind) => {
                upto = rewind.to;
                titled.push((record.seq, None));
            }
            Entry::Created(created) => titled.extend(created.title.as_deref().map(|title| (record.seq, Some(title)))),
            Entry::Info(patch) => {
                if let Patch::Set(title) = &patch.title {
                    titled.push((record.seq, Some(title)));
                }
            }
            _ => {}
        }
    }
    titled
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
