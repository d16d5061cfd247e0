//! Matching a search query against a text: parsing the query, finding the matches, and cutting a snippet
//! around them. Pure; the search that uses it is in `session/search.rs`.
//!
//! Words are compared without case and accents. Scripts without spaces between words are compared letter by
//! letter, so that a word is found at any position.

use crate::rules::message_words::{WordTokens, indexed_word};
use crate::types::error::{Error, Result};
use std::ops::Range;

/// Maximum number of words in a query, because each is represented by one bit.
const MAX_WORDS: usize = 64;
/// Maximum length of a query, in bytes.
const MAX_BYTES: usize = 1024;
/// Maximum number of matches recorded per text. More would not be displayed.
const MAX_MATCHES: usize = 256;
/// Number of characters of context before and after the matches in a snippet.
const CONTEXT_CHARS: usize = 60;
/// Maximum span of matches that are shown in one snippet, in bytes.
const MAX_SPAN_BYTES: usize = 160;
/// Maximum number of characters of a snippet.
const MAX_SNIPPET_CHARS: usize = 400;

/// A parsed search query: words and phrases, all of which must match.
#[derive(Clone, Debug)]
pub(crate) struct Matcher {
    /// The words of all phrases in order, each with whether it is a prefix pattern (`word*`).
    words: Vec<(String, bool)>,
    /// Bit masks of the words that start a phrase, and of those that end one.
    phrase_starts: u64,
    phrase_ends: u64,
}

/// A match: a byte range of the text, and the bit of the matched phrase.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Match {
    span: Range<usize>,
    phrase: u64,
}

impl Match {
    /// Identifies the term (word or phrase) of the query that matched.
    pub fn term(&self) -> u64 {
        self.phrase
    }
}

impl Matcher {
    /// Parses a query such as `words "and phrases" and begin*`.
    pub fn parse(query: &str) -> Result<Self> {
        let invalid = |message: String| Err(Error::invalid("q", message));
        if query.len() > MAX_BYTES {
            return invalid(format!("the query is longer than {MAX_BYTES} bytes; shorten it"));
        }
        let mut matcher = Self { words: Vec::new(), phrase_starts: 0, phrase_ends: 0 };
        for (i, part) in query.split('"').enumerate() {
            match i % 2 {
                0 => part.split_whitespace().for_each(|word| matcher.add_phrase(word)),
                _ => matcher.add_phrase(part),
            }
        }
        match matcher.words.len() {
            0 => invalid("the query contains no words".to_owned()),
            n if n > MAX_WORDS => invalid(format!("the query has more than {MAX_WORDS} words; use fewer")),
            _ => Ok(matcher),
        }
    }

    /// Adds a phrase: words that must follow each other.
    fn add_phrase(&mut self, text: &str) {
        let first = self.words.len();
        let mut tokens = WordTokens::of(text);
        while self.words.len() <= MAX_WORDS && tokens.next().is_some() {
            self.words.push((tokens.word.clone(), false));
        }
        if self.words.len() > first {
            self.phrase_starts |= bit(first);
            self.phrase_ends |= bit(self.words.len() - 1);
            if let Some((_, is_prefix)) = self.words.last_mut() {
                *is_prefix = text.ends_with('*');
            }
        }
    }

    /// The words as the message index contains them, each with whether it is a prefix. A text that matches
    /// contains all of them.
    pub fn indexed_words(&self) -> impl Iterator<Item = (&str, bool)> {
        self.words.iter().map(|(word, is_prefix)| indexed_word(word, *is_prefix))
    }

    /// Returns the matches in a text. `None` unless all phrases match.
    pub fn find(&self, text: &str) -> Option<Vec<Match>> {
        let mut tokens = WordTokens::of(text);
        let mut recent = [0; MAX_WORDS];
        // Shift-and matching: bit `i` is set if the words of its phrase up to word `i` equal the last words
        // that were read.
        let mut state = 0;
        let mut matched = 0;
        let mut matches = Vec::new();
        let mut count = 0;
        while let Some(span) = tokens.next() {
            recent[count % MAX_WORDS] = span.start;
            count += 1;
            let words = self.words.iter().enumerate();
            let is_same = |word: &str, is_prefix: bool| {
                if is_prefix { tokens.word.starts_with(word) } else { tokens.word == word }
            };
            let same = words.filter(|(_, (word, is_prefix))| is_same(word, *is_prefix));
            let same = same.fold(0, |bits, (i, _)| bits | bit(i));
            state = ((state << 1) | self.phrase_starts) & same;
            let mut ended = state & self.phrase_ends;
            matched |= ended;
            while ended != 0 && matches.len() < MAX_MATCHES {
                let last = ended.trailing_zeros() as usize;
                let length = last - self.first_word(last);
                let start = recent[(count - 1 - length) % MAX_WORDS];
                matches.push(Match { span: start..span.end, phrase: bit(last) });
                ended &= ended - 1;
            }
            if matched == self.phrase_ends && matches.len() >= MAX_MATCHES {
                break;
            }
        }
        (matched == self.phrase_ends).then_some(matches)
    }

    /// Returns the index of the first word of the phrase that a word belongs to.
    fn first_word(&self, word: usize) -> usize {
        let starts = self.phrase_starts & (u64::MAX >> (MAX_WORDS - 1 - word));
        MAX_WORDS - 1 - starts.leading_zeros() as usize
    }
}

/// Returns the bit of a word; 0 beyond the maximum.
fn bit(word: usize) -> u64 {
    // One word more than allowed is parsed, to detect that there are too many.
    1u64.checked_shl(word as u32).unwrap_or(0)
}

/// Cuts the part of a text with the most distinct phrases close together. Also returns the matches in the
/// snippet as character ranges, end exclusive (D-083).
pub(crate) fn snippet(text: &str, matches: &[Match]) -> (String, Vec<(usize, usize)>) {
    let near = |i: usize| {
        let max_end = matches[i].span.start + MAX_SPAN_BYTES;
        matches[i..].iter().take_while(move |s| s.span.start == matches[i].span.start || s.span.end <= max_end)
    };
    let score = |i: usize| near(i).fold(0, |bits, s| bits | s.phrase).count_ones();
    // The first one among equally good positions.
    let Some(best) = (0..matches.len()).rev().max_by_key(|i| score(*i)) else { return Default::default() };
    let start = matches[best].span.start;
    let end = near(best).map(|s| s.span.end).max().unwrap_or_default();
    let from = text[..start].char_indices().rev().nth(CONTEXT_CHARS - 1).map_or(0, |(i, _)| i);
    let to = text[end..].char_indices().nth(CONTEXT_CHARS).map_or(text.len(), |(i, _)| end + i);
    let to = text[from..to].char_indices().nth(MAX_SNIPPET_CHARS).map_or(to, |(i, _)| from + i);
    let before = if from > 0 { "…" } else { "" };
    let after = if to < text.len() { "…" } else { "" };
    let char_index = |byte: usize| before.chars().count() + text[from..byte.clamp(from, to)].chars().count();
    let visible = matches.iter().map(|s| &s.span).filter(|s| s.start >= from && s.start < to);
    let mut ranges: Vec<(usize, usize)> = visible.map(|s| (char_index(s.start), char_index(s.end))).collect();
    ranges.sort_unstable();
    let mut merged: Vec<(usize, usize)> = Vec::new();
    for (start, end) in ranges {
        match merged.last_mut().filter(|(_, last)| start <= *last) {
            Some((_, last)) => *last = end.max(*last),
            None => merged.push((start, end)),
        }
    }
    (format!("{before}{}{after}", &text[from..to]), merged)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(query: &str, text: &str) -> Option<Vec<String>> {
        let matches = Matcher::parse(query).unwrap().find(text)?;
        Some(matches.into_iter().map(|s| text[s.span].to_owned()).collect())
    }

    fn is_match(query: &str, text: &str) -> bool {
        matches(query, text).is_some()
    }

    #[test]
    fn all_words_must_match_without_case_and_accents() {
        let text = "The FERRY to Dover leaves at 8; the café is closed.";
        assert_eq!(matches("ferry dover", text).unwrap(), ["FERRY", "Dover"]);
        assert_eq!(matches("cafe Thé", text).unwrap(), ["The", "the", "café"]);
        assert!(!is_match("ferry calais", text) && !is_match("ferr", text) && !is_match("erry", text));
        assert!(is_match("cafe", "cafe\u{301}") && is_match("ÇA", "ca\u{327} va") && is_match("strasse", "Straße"));
        assert_eq!(matches("ferr*", text).unwrap(), ["FERRY"]);
        assert!(is_match("8", text) && is_match("o'clock", "six o’clock"));
    }

    #[test]
    fn phrases_follow_each_other() {
        let text = "green tea and black tea, black coffee; tea";
        assert_eq!(matches("\"black tea\"", text).unwrap(), ["black tea"]);
        assert!(is_match("\"tea, BLACK coffee\"", text) && !is_match("\"coffee black\"", text));
        assert!(!is_match("\"green tea\" milk", text) && is_match("\"green tea\" coffee", text));
        // An unclosed quote extends to the end; words joined by punctuation form a phrase.
        assert!(is_match("\"black coffee", text) && is_match("black-coffee", text) && !is_match("tea-coffee", text));
        // Phrases that overlap themselves.
        assert_eq!(matches("\"a a b\"", "a a a b").unwrap(), ["a a b"]);
        assert_eq!(matches("\"a a\"", "a a a").unwrap(), ["a a", "a a"]);
    }

    #[test]
    fn other_languages() {
        for (query, text) in [
            ("東京", "明日東京に行きます"),
            ("ありがとう", "本当にありがとうございます"),
            ("서울", "서울에서 만나요"),
            ("ภาษา", "ฉันเรียนภาษาไทย"),
            ("ΟΔΌΣ", "η οδός είναι εδώ"),
            ("ОБЪЕМ ещё", "Весь объём еще виден"),
            ("كتاب", "هذا كِتَاب جديد"),
            ("हिन्दी", "मैं हिन्दी बोलता हूँ"),
            ("istanbul", "\u{130}stanbul"),
        ] {
            assert!(is_match(query, text), "{query} in {text}");
        }
        assert!(!is_match("東北", "東京の北") && !is_match("京東", "東京"));
    }

    #[test]
    fn empty_and_overlong_queries_are_rejected() {
        for invalid in ["", "  ", "\"\" - !", &"x ".repeat(65), &"x".repeat(1025), &"一".repeat(70)] {
            let error = Matcher::parse(invalid).unwrap_err();
            assert!(matches!(&error, Error::Invalid { param, .. } if param == "q"), "{error}");
        }
        let words: Vec<String> = (0..64).map(|i| format!("w{i}")).collect();
        assert!(
            is_match(&words.join(" "), &words.join(" "))
                && is_match(&format!("\"{}\"", words.join(" ")), &words.join(" "))
        );
        assert!(!is_match(&words.join(" "), &words[1..].join(" ")));
    }

    #[test]
    fn a_snippet_contains_the_matches() {
        let show = |query: &str, text: &str| {
            let (shown, ranges) = snippet(text, &Matcher::parse(query).unwrap().find(text).unwrap());
            let chars: Vec<char> = shown.chars().collect();
            let words: Vec<String> = ranges.iter().map(|(a, b)| chars[*a..*b].iter().collect()).collect();
            (shown, words)
        };
        let padding = "ä ".repeat(300);
        let (shown, words) = show("ferry dover", &format!("ferry {padding} the Ferry to Döver {padding} dover"));
        assert_eq!(words, ["Ferry", "Döver"], "{shown}");
        assert!(shown.starts_with("…") && shown.ends_with('…') && shown.chars().count() < 160, "{shown}");
        assert_eq!(show("a b \"a b\"", "a b"), ("a b".to_owned(), vec!["a b".to_owned()]));
        assert_eq!(show("東京", "<b>東京</b>"), ("<b>東京</b>".to_owned(), vec!["東京".to_owned()]));
        let (shown, words) = show("x*", &"x".repeat(5000));
        assert_eq!((shown.chars().count(), words[0].len()), (MAX_SNIPPET_CHARS + 1, MAX_SNIPPET_CHARS));
    }
}
