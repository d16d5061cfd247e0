//! Matching a search query against a text: parsing the query, finding the matches, and cutting a snippet
//! around them. Pure; the search that uses it is in `session/search.rs`.
//!
//! Words are compared without case and accents. Scripts without spaces between words are compared letter by
//! letter, so that a word is found at any position.

use crate::rules::text::{is_combining, plain};
use crate::types::error::{Error, Result};
use std::ops::Range;

/// Maximum number of words in a query, because each is represented by one bit.
const MAX_WORDS: usize = 64;
/// Maximum length of a query, in bytes.
const MAX_BYTES: usize = 1024;
/// Maximum number of matches recorded per text. More would not be displayed.
const MAX_SPOTS: usize = 256;
/// Number of characters of context before and after the matches in a snippet.
const AROUND: usize = 60;
/// Maximum span of matches that are shown in one snippet, in bytes.
const TOGETHER: usize = 160;
/// Maximum number of characters of a snippet.
const MAX_SHOWN: usize = 400;

/// A parsed search query: words and phrases, all of which must match.
#[derive(Clone, Debug)]
pub(crate) struct Matcher {
    /// The words of all phrases in order, each with whether it is a prefix pattern (`word*`).
    words: Vec<(String, bool)>,
    /// Bit masks of the words that start a phrase, and of those that end one.
    begins: u64,
    ends: u64,
}

/// A match: a byte range of the text, and the bit of the matched phrase.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Match {
    span: Range<usize>,
    phrase: u64,
}

impl Matcher {
    /// Parses a query such as `words "and phrases" and begin*`.
    pub fn parse(question: &str) -> Result<Self> {
        let wrong = |message: String| Err(Error::invalid("q", message));
        if question.len() > MAX_BYTES {
            return wrong(format!("the question is longer than {MAX_BYTES} bytes; ask for less"));
        }
        let mut needle = Self { words: Vec::new(), begins: 0, ends: 0 };
        for (i, part) in question.split('"').enumerate() {
            match i % 2 {
                0 => part.split_whitespace().for_each(|word| needle.phrase(word)),
                _ => needle.phrase(part),
            }
        }
        match needle.words.len() {
            0 => wrong("there is no word to look for".to_owned()),
            n if n > MAX_WORDS => wrong(format!("there are more than {MAX_WORDS} words; ask for less")),
            _ => Ok(needle),
        }
    }

    /// Adds a phrase: words that must follow each other.
    fn phrase(&mut self, text: &str) {
        let (first, mut tokens) = (self.words.len(), WordTokens::of(text));
        while self.words.len() <= MAX_WORDS && tokens.next().is_some() {
            self.words.push((tokens.word.clone(), false));
        }
        if self.words.len() > first {
            self.begins |= bit(first);
            self.ends |= bit(self.words.len() - 1);
            if let Some((_, open)) = self.words.last_mut() {
                *open = text.ends_with('*');
            }
        }
    }

    /// Returns the matches in a text. `None` unless all phrases match.
    pub fn find(&self, text: &str) -> Option<Vec<Match>> {
        let (mut tokens, mut recent) = (WordTokens::of(text), [0; MAX_WORDS]);
        // Shift-and matching: bit `i` is set if the words of its phrase up to word `i` equal the last words
        // that were read.
        let (mut state, mut found, mut spots) = (0, 0, Vec::new());
        let mut count = 0;
        while let Some(span) = tokens.next() {
            recent[count % MAX_WORDS] = span.start;
            count += 1;
            let words = self.words.iter().enumerate();
            let same = words.filter(|(_, (word, open))| match open {
                true => tokens.word.starts_with(word),
                false => tokens.word == *word,
            });
            let same = same.fold(0, |bits, (i, _)| bits | bit(i));
            state = ((state << 1) | self.begins) & same;
            let mut ended = state & self.ends;
            found |= ended;
            while ended != 0 && spots.len() < MAX_SPOTS {
                let last = ended.trailing_zeros() as usize;
                let length = last - self.first(last);
                let start = recent[(count - 1 - length) % MAX_WORDS];
                spots.push(Match { span: start..span.end, phrase: bit(last) });
                ended &= ended - 1;
            }
            if found == self.ends && spots.len() >= MAX_SPOTS {
                break;
            }
        }
        (found == self.ends).then_some(spots)
    }

    /// Returns the index of the first word of the phrase that a word belongs to.
    fn first(&self, word: usize) -> usize {
        let begun = self.begins & (u64::MAX >> (MAX_WORDS - 1 - word));
        MAX_WORDS - 1 - begun.leading_zeros() as usize
    }
}

/// Returns the bit of a word; 0 beyond the maximum.
fn bit(word: usize) -> u64 {
    // One word more than allowed is parsed, to detect that there are too many.
    1u64.checked_shl(word as u32).unwrap_or(0)
}

/// A tokenizer that reads the words of a text one at a time.
struct WordTokens<'t> {
    text: &'t str,
    at: usize,
    /// The last word read, in lower case and without accents.
    word: String,
}

impl<'t> WordTokens<'t> {
    fn of(text: &'t str) -> Self {
        Self { text, at: 0, word: String::new() }
    }

    /// Reads the next word and returns its byte range.
    fn next(&mut self) -> Option<Range<usize>> {
        self.word.clear();
        let mut start = self.at;
        let mut chars = self.text[self.at..].chars();
        while let Some(c) = chars.next() {
            let (here, after) = (self.at, self.text.len() - chars.as_str().len());
            let belongs = c.is_alphanumeric() || (is_mark(c) && !self.word.is_empty());
            let alone = belongs && stands_alone(c);
            if !self.word.is_empty() && (!belongs || alone) {
                return Some(start..here);
            }
            self.at = after;
            if belongs {
                if self.word.is_empty() {
                    start = here;
                }
                fold(c, &mut self.word);
            }
            if alone {
                return Some(start..after);
            }
        }
        (!self.word.is_empty()).then_some(start..self.at)
    }
}

/// Appends a character in its normalized form.
fn fold(c: char, word: &mut String) {
    if c.is_ascii() {
        return word.push(c.to_ascii_lowercase());
    }
    for c in c.to_lowercase().filter(|c| !is_mark(*c)) {
        match c {
            'ß' => word.push_str("ss"),
            'ά' => word.push('α'),
            'έ' => word.push('ε'),
            'ή' => word.push('η'),
            'ί' | 'ϊ' | 'ΐ' => word.push('ι'),
            'ό' => word.push('ο'),
            'ύ' | 'ϋ' | 'ΰ' => word.push('υ'),
            'ώ' => word.push('ω'),
            'ς' => word.push('σ'),
            'ё' => word.push('е'),
            c => word.push(plain(c)),
        }
    }
}

/// Returns true for combining accents and vowel points: Latin, Greek and Cyrillic; Hebrew; Arabic.
fn is_mark(c: char) -> bool {
    is_combining(c) || matches!(c, '\u{591}'..='\u{5bd}' | '\u{5bf}'..='\u{5c7}' | '\u{64b}'..='\u{65f}' | '\u{670}')
}

/// Returns true for letters of scripts without spaces between words, or with suffixes attached to words.
fn stands_alone(c: char) -> bool {
    matches!(c,
        '\u{e00}'..='\u{eff}'       // Thai, Lao
        | '\u{1000}'..='\u{109f}'   // Burmese
        | '\u{1780}'..='\u{17ff}'   // Khmer
        | '\u{3040}'..='\u{30ff}' | '\u{31f0}'..='\u{31ff}' | '\u{ff66}'..='\u{ff9d}' // Kana
        | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3ffff}' // Han
        | '\u{ac00}'..='\u{d7af}'   // Hangul
    )
}

/// Cuts the part of a text with the most distinct phrases close together. Also returns the matches in the
/// snippet as character ranges, end exclusive (D-083).
pub(crate) fn snippet(text: &str, spots: &[Match]) -> (String, Vec<(usize, usize)>) {
    let near = |i: usize| {
        let reach = spots[i].span.start + TOGETHER;
        spots[i..].iter().take_while(move |s| s.span.start == spots[i].span.start || s.span.end <= reach)
    };
    let worth = |i: usize| near(i).fold(0, |bits, s| bits | s.phrase).count_ones();
    // The first one among equally good positions.
    let Some(best) = (0..spots.len()).rev().max_by_key(|i| worth(*i)) else { return Default::default() };
    let (start, end) = (spots[best].span.start, near(best).map(|s| s.span.end).max().unwrap_or_default());
    let from = text[..start].char_indices().rev().nth(AROUND - 1).map_or(0, |(i, _)| i);
    let to = text[end..].char_indices().nth(AROUND).map_or(text.len(), |(i, _)| end + i);
    let to = text[from..to].char_indices().nth(MAX_SHOWN).map_or(to, |(i, _)| from + i);
    let (before, after) = (if from > 0 { "…" } else { "" }, if to < text.len() { "…" } else { "" });
    let place = |byte: usize| before.chars().count() + text[from..byte.clamp(from, to)].chars().count();
    let seen = spots.iter().map(|s| &s.span).filter(|s| s.start >= from && s.start < to);
    let mut places: Vec<(usize, usize)> = seen.map(|s| (place(s.start), place(s.end))).collect();
    places.sort_unstable();
    let mut marked: Vec<(usize, usize)> = Vec::new();
    for (start, end) in places {
        match marked.last_mut().filter(|(_, last)| start <= *last) {
            Some((_, last)) => *last = end.max(*last),
            None => marked.push((start, end)),
        }
    }
    (format!("{before}{}{after}", &text[from..to]), marked)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(question: &str, text: &str) -> Option<Vec<String>> {
        let spots = Matcher::parse(question).unwrap().find(text)?;
        Some(spots.into_iter().map(|s| text[s.span].to_owned()).collect())
    }

    fn is_in(question: &str, text: &str) -> bool {
        found(question, text).is_some()
    }

    #[test]
    fn all_words_must_be_there_without_case_and_accents() {
        let text = "The FERRY to Dover leaves at 8; the café is closed.";
        assert_eq!(found("ferry dover", text).unwrap(), ["FERRY", "Dover"]);
        assert_eq!(found("cafe Thé", text).unwrap(), ["The", "the", "café"]);
        assert!(!is_in("ferry calais", text) && !is_in("ferr", text) && !is_in("erry", text));
        assert!(is_in("cafe", "cafe\u{301}") && is_in("ÇA", "ca\u{327} va") && is_in("strasse", "Straße"));
        assert_eq!(found("ferr*", text).unwrap(), ["FERRY"]);
        assert!(is_in("8", text) && is_in("o'clock", "six o’clock"));
    }

    #[test]
    fn phrases_follow_each_other() {
        let text = "green tea and black tea, black coffee; tea";
        assert_eq!(found("\"black tea\"", text).unwrap(), ["black tea"]);
        assert!(is_in("\"tea, BLACK coffee\"", text) && !is_in("\"coffee black\"", text));
        assert!(!is_in("\"green tea\" milk", text) && is_in("\"green tea\" coffee", text));
        // An unclosed quote extends to the end; words joined by punctuation form a phrase.
        assert!(is_in("\"black coffee", text) && is_in("black-coffee", text) && !is_in("tea-coffee", text));
        // Phrases that overlap themselves.
        assert_eq!(found("\"a a b\"", "a a a b").unwrap(), ["a a b"]);
        assert_eq!(found("\"a a\"", "a a a").unwrap(), ["a a", "a a"]);
    }

    #[test]
    fn other_languages() {
        for (question, text) in [
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
            assert!(is_in(question, text), "{question} in {text}");
        }
        assert!(!is_in("東北", "東京の北") && !is_in("京東", "東京"));
    }

    #[test]
    fn questions_that_ask_nothing_or_too_much() {
        for wrong in ["", "  ", "\"\" - !", &"x ".repeat(65), &"x".repeat(1025), &"一".repeat(70)] {
            let error = Matcher::parse(wrong).unwrap_err();
            assert!(matches!(&error, Error::Invalid { param, .. } if param == "q"), "{error}");
        }
        let most: Vec<String> = (0..64).map(|i| format!("w{i}")).collect();
        assert!(is_in(&most.join(" "), &most.join(" ")) && is_in(&format!("\"{}\"", most.join(" ")), &most.join(" ")));
        assert!(!is_in(&most.join(" "), &most[1..].join(" ")));
    }

    #[test]
    fn a_snippet_shows_where() {
        let show = |question: &str, text: &str| {
            let (shown, marked) = snippet(text, &Matcher::parse(question).unwrap().find(text).unwrap());
            let chars: Vec<char> = shown.chars().collect();
            let words: Vec<String> = marked.iter().map(|(a, b)| chars[*a..*b].iter().collect()).collect();
            (shown, words)
        };
        let far = "ä ".repeat(300);
        let (shown, words) = show("ferry dover", &format!("ferry {far} the Ferry to Döver {far} dover"));
        assert_eq!(words, ["Ferry", "Döver"], "{shown}");
        assert!(shown.starts_with("…") && shown.ends_with('…') && shown.chars().count() < 160, "{shown}");
        assert_eq!(show("a b \"a b\"", "a b"), ("a b".to_owned(), vec!["a b".to_owned()]));
        assert_eq!(show("東京", "<b>東京</b>"), ("<b>東京</b>".to_owned(), vec!["東京".to_owned()]));
        let (shown, words) = show("x*", &"x".repeat(5000));
        assert_eq!((shown.chars().count(), words[0].len()), (MAX_SHOWN + 1, MAX_SHOWN));
    }
}
