//! The WordPiece model of BERT: the segmentation of a word by greedy longest match from its start.

use serde::Deserialize;
use std::collections::HashMap;
use unicode_properties::{GeneralCategoryGroup, UnicodeGeneralCategory};

/// The vocabulary: token ids by token.
pub struct WordPiece {
    ids: HashMap<String, u32>,
    unknown: u32,
    /// The prefix of tokens that do not begin a word.
    continuation: String,
    /// Maximum number of characters of a word. A longer one becomes the unknown token.
    max_word_chars: usize,
}

/// The deserialized fields of the model in a `tokenizer.json`.
#[derive(Deserialize)]
struct WordPieceFile {
    #[serde(default)]
    vocab: serde_json::Value,
    #[serde(default = "unknown_token")]
    unk_token: String,
    #[serde(default = "continuation")]
    continuing_subword_prefix: String,
    #[serde(default = "max_word_chars")]
    max_input_chars_per_word: usize,
}

fn unknown_token() -> String {
    "[UNK]".to_owned()
}

fn continuation() -> String {
    "##".to_owned()
}

fn max_word_chars() -> usize {
    100
}

impl WordPiece {
    /// Parses the field `model` of a `tokenizer.json`.
    pub fn parse(model: serde_json::Value) -> Result<Self, String> {
        let file: WordPieceFile = serde_json::from_value(model).map_err(|e| format!("invalid model: {e}"))?;
        let ids = serde_json::from_value(file.vocab).map_err(|e| format!("invalid vocabulary: {e}"))?;
        Self::new(ids, &file.unk_token, file.continuing_subword_prefix, file.max_input_chars_per_word)
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
        if ids.len() != lines as usize {
            return Err("duplicate token".into());
        }
        Self::new(ids, &unknown_token(), continuation(), max_word_chars())
    }

    fn new(
        ids: HashMap<String, u32>,
        unknown: &str,
        continuation: String,
        max_word_chars: usize,
    ) -> Result<Self, String> {
        let unknown = *ids.get(unknown).ok_or_else(|| format!("the token {unknown} is missing"))?;
        Ok(Self { ids, unknown, continuation, max_word_chars })
    }

    /// Returns the id of a token. Fails if there is no such token.
    pub fn id(&self, token: &str) -> Result<u32, String> {
        self.ids.get(token).copied().ok_or_else(|| format!("the token {token} is missing"))
    }

    /// Returns the largest token id.
    pub fn largest(&self) -> u32 {
        self.ids.values().max().copied().unwrap_or(0)
    }

    /// Appends the tokens of a word. If any part is unknown, the whole word is.
    pub fn push_word(&self, word: &str, ids: &mut Vec<u32>) {
        let initial_len = ids.len();
        let mut rest = word;
        let mut piece = String::new();
        let mut known = word.chars().count() <= self.max_word_chars;
        while known && !rest.is_empty() {
            let ends = rest.char_indices().rev().map(|(i, c)| i + c.len_utf8());
            let mut matches = ends.filter_map(|end| {
                piece.clear();
                piece.push_str(if rest.len() == word.len() { "" } else { &self.continuation });
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
    }
}

/// Returns true if a character is punctuation, and so a word by itself.
pub fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation() || c.general_category_group() == GeneralCategoryGroup::Punctuation
}
