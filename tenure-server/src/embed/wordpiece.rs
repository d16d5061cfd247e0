//! The WordPiece tokenizer of BERT models: lower case, without accents; each CJK character and each punctuation
//! character is a separate word.

use serde::Deserialize;
use std::collections::HashMap;
use unicode_normalization::UnicodeNormalization;
use unicode_properties::{GeneralCategory, GeneralCategoryGroup, UnicodeGeneralCategory};

/// Maximum number of characters of a word. A longer one becomes the unknown token.
const MAX_WORD_CHARS: usize = 100;

/// The vocabulary: token ids by token.
pub struct TokenIds {
    ids: HashMap<String, u32>,
    unknown: u32,
    begin: u32,
    end: u32,
}

/// The deserialized fields of a `tokenizer.json`.
#[derive(Deserialize)]
struct TokenizerFile {
    model: WordPieces,
    normalizer: Option<Normalizer>,
}

#[derive(Deserialize)]
struct WordPieces {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    vocab: serde_json::Value,
}

#[derive(Deserialize)]
struct Normalizer {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    lowercase: bool,
    strip_accents: Option<bool>,
}

impl TokenIds {
    /// Parses a `tokenizer.json`. Only the WordPiece format of this model family is supported.
    pub fn from_json(bytes: &[u8]) -> Result<Self, String> {
        let file: TokenizerFile = serde_json::from_slice(bytes).map_err(|e| format!("not a tokenizer file: {e}"))?;
        if file.model.kind.as_deref().is_some_and(|k| k != "WordPiece") {
            return Err(format!("unsupported tokenizer model {:?}; only WordPiece is supported", file.model.kind));
        }
        let fits = |n: &Normalizer| n.kind == "BertNormalizer" && n.lowercase && n.strip_accents != Some(false);
        if !file.normalizer.as_ref().is_some_and(fits) {
            return Err(
                "unsupported normalizer; only a BertNormalizer with lower case and without accents is supported".into(),
            );
        }
        let ids = serde_json::from_value(file.model.vocab).map_err(|e| format!("invalid vocabulary: {e}"))?;
        Self::new(ids)
    }

    /// Parses a `vocab.txt`: one token per line, whose id is the zero-based line number.
    pub fn from_vocab(bytes: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(bytes).map_err(|_| "not valid UTF-8")?;
        let mut ids = HashMap::new();
        let mut lines = 0;
        for piece in text.lines() {
            ids.insert(piece.to_owned(), lines);
            lines += 1;
        }
        if ids.len() == lines as usize { Self::new(ids) } else { Err("duplicate token".into()) }
    }

    fn new(ids: HashMap<String, u32>) -> Result<Self, String> {
        let find = |piece: &str| ids.get(piece).copied().ok_or_else(|| format!("the token {piece} is missing"));
        let unknown = find("[UNK]")?;
        let begin = find("[CLS]")?;
        let end = find("[SEP]")?;
        Ok(Self { ids, unknown, begin, end })
    }

    /// Returns the largest token id.
    pub fn largest(&self) -> usize {
        self.ids.values().max().map_or(0, |id| *id as usize)
    }

    /// Encodes a text as token ids between the start and the end token, at most `max` in total. Words that look
    /// like special tokens (`[SEP]`) are encoded as ordinary words.
    pub fn encode(&self, text: &str, max: usize) -> Vec<u32> {
        let mut ids = vec![self.begin];
        let mut word = String::new();
        let chars = text.chars().filter(|c| is_text(*c)).nfd();
        let chars = chars.filter(|c| c.general_category() != GeneralCategory::NonspacingMark);
        for c in chars.flat_map(char::to_lowercase) {
            if ids.len() >= max {
                break;
            }
            if c.is_whitespace() {
                self.push_word(&mut word, &mut ids);
            } else if is_separate_token(c) {
                self.push_word(&mut word, &mut ids);
                word.push(c);
                self.push_word(&mut word, &mut ids);
            } else if word.len() <= MAX_WORD_CHARS * 4 {
                // A character has at most four bytes, so a word that exceeds this is too long in any case.
                word.push(c);
            }
        }
        self.push_word(&mut word, &mut ids);
        ids.truncate(max.saturating_sub(1));
        ids.push(self.end);
        ids
    }

    /// Splits a word into tokens by greedy longest match from its start. If any part is unknown, the whole word is.
    fn push_word(&self, word: &mut String, ids: &mut Vec<u32>) {
        let initial_len = ids.len();
        let mut rest = word.as_str();
        let mut piece = String::new();
        let mut known = word.chars().count() <= MAX_WORD_CHARS;
        while known && !rest.is_empty() {
            let ends = rest.char_indices().rev().map(|(i, c)| i + c.len_utf8());
            let mut matches = ends.filter_map(|end| {
                piece.clear();
                piece.push_str(if rest.len() == word.len() { "" } else { "##" });
                piece.push_str(&rest[..end]);
                Some((*self.ids.get(&piece)?, end))
            });
            match matches.next() {
                Some((id, end)) => {
                    ids.push(id);
                    rest = &rest[end..];
                }
                None => known = false,
            }
        }
        if !known {
            ids.truncate(initial_len);
            ids.push(self.unknown);
        }
        word.clear();
    }
}

/// Returns true for characters that are part of the text, as opposed to control, format and private-use characters.
fn is_text(c: char) -> bool {
    use GeneralCategory::{Control, Format, PrivateUse};
    match c {
        '\t' | '\n' | '\r' => true,
        '\0' | '\u{fffd}' => false,
        c => !matches!(c.general_category(), Control | Format | PrivateUse),
    }
}

/// Returns true if a character is a word by itself (CJK or punctuation).
fn is_separate_token(c: char) -> bool {
    let cjk = matches!(c, '\u{4e00}'..='\u{9fff}' | '\u{3400}'..='\u{4dbf}' | '\u{20000}'..='\u{2a6df}' | '\u{2a700}'..='\u{2ceaf}' | '\u{f900}'..='\u{faff}' | '\u{2f800}'..='\u{2fa1f}');
    cjk || c.is_ascii_punctuation() || c.general_category_group() == GeneralCategoryGroup::Punctuation
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCAB: &str = "[PAD]\n[UNK]\n[CLS]\n[SEP]\ncafe\nferry\n##s\n##ing\n.\n$\n[\n]\nsep\n渡\n轮\nа\n##б\n—\nx\n##x\n\u{1112}\n##\u{1161}\n##\u{11ab}\nnew\nline\nनक\n";

    #[track_caller]
    fn check(text: &str, want: &[&str]) {
        let tokens = TokenIds::from_vocab(VOCAB.as_bytes()).unwrap();
        let names: Vec<&str> = VOCAB.lines().collect();
        let got: Vec<&str> = tokens.encode(text, 256).iter().map(|id| names[*id as usize]).collect();
        assert_eq!(got, [&["[CLS]"], want, &["[SEP]"]].concat(), "{text:?}");
    }

    #[test]
    fn texts_are_split_into_tokens() {
        check("", &[]);
        check("  \n\t ", &[]);
        check("CAFÉ cafe\u{301}", &["cafe", "cafe"]);
        check("ferrys ferrysings", &["ferry", "##s", "ferry", "##s", "##ing", "##s"]);
        check("ferry.$ferry—", &["ferry", ".", "$", "ferry", "—"]);
        check("渡轮ferry渡", &["渡", "轮", "ferry", "渡"]);
        check("АБ", &["а", "##б"]);
        check("한", &["\u{1112}", "##\u{1161}", "##\u{11ab}"]);
        // A spacing mark is a letter, a nonspacing mark is an accent.
        check("न\u{93c}क", &["नक"]);
        check("न\u{93e}क", &["[UNK]"]);
        // An unknown suffix makes the whole word unknown.
        check("ferryz ferry", &["[UNK]", "ferry"]);
        check("new\u{200b}\0\nline\u{7}", &["new", "line"]);
        check("[SEP]", &["[", "sep", "]"]);
        check(&format!("{} ferry", "x".repeat(101)), &["[UNK]", "ferry"]);
        check(&"x".repeat(100), &[&["x"][..], &["##x"; 99]].concat());
    }

    #[test]
    fn long_texts_are_truncated() {
        let tokens = TokenIds::from_vocab(VOCAB.as_bytes()).unwrap();
        for max in [2, 3, 7, 256] {
            let ids = tokens.encode(&"ferrysing ".repeat(500), max);
            assert_eq!((ids.len(), ids[0], ids[max - 1]), (max, 2, 3));
        }
        assert_eq!(tokens.encode(&"ж".repeat(5_000_000), 256), [2, 1, 3]);
    }

    #[test]
    fn unsupported_files_are_rejected() {
        let json = |model: &str, normalizer: &str| format!(r#"{{"model": {model}, "normalizer": {normalizer}}}"#);
        let bert = r#"{"type": "BertNormalizer", "lowercase": true, "strip_accents": null}"#;
        let words = r#"{"type": "WordPiece", "vocab": {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3}}"#;
        let good = TokenIds::from_json(json(words, bert).as_bytes()).unwrap();
        assert_eq!((good.encode("À b", 9), good.largest()), (vec![1, 3, 0, 2], 3));
        for (file, want) in [
            ("no json".to_owned(), "not a tokenizer file"),
            (json(r#"{"type": "Unigram", "vocab": [["a", -1.0]]}"#, bert), "Unigram"),
            (json(words, "null"), "lower case"),
            (json(words, r#"{"type": "BertNormalizer", "lowercase": false}"#), "lower case"),
            (json(r#"{"type": "WordPiece"}"#, bert), "invalid vocabulary"),
            (json(r#"{"type": "WordPiece", "vocab": {"[UNK]": -1}}"#, bert), "invalid vocabulary"),
            (json(r#"{"type": "WordPiece", "vocab": {"[UNK]": 0}}"#, bert), "[CLS]"),
        ] {
            let error = TokenIds::from_json(file.as_bytes()).err().unwrap();
            assert!(error.contains(want), "{file}: {error}");
        }
        for (file, want) in [(&b"a\nb\na\n"[..], "duplicate token"), (b"\xff", "UTF-8"), (b"[CLS]\n[SEP]", "[UNK]")] {
            assert!(TokenIds::from_vocab(file).err().unwrap().contains(want));
        }
    }
}
