//! The steps of a tokenizer before a text is split: replaced characters, lower case, removed accents.

use super::charsmap::Charsmap;
use regex::Regex;
use serde::Deserialize;
use serde_json::Value;
use unicode_normalization::UnicodeNormalization;
use unicode_properties::{GeneralCategory, UnicodeGeneralCategory};

/// One step.
pub enum Normalizer {
    /// The steps of BERT.
    Bert(BertNormalizer),
    /// The replacements of a SentencePiece model.
    Charsmap(Charsmap),
    /// All letters in lower case.
    Lowercase,
    /// Without nonspacing marks. Only those that are characters of their own: NFD separates them.
    StripAccents,
    /// A Unicode normalization form.
    Form(Form),
    /// A replacement of all matches.
    Replace(Regex, String),
    /// Without white space at the start, the end, or both.
    Strip {
        /// At the start.
        left: bool,
        /// At the end.
        right: bool,
    },
}

/// A Unicode normalization form.
#[derive(Clone, Copy)]
pub enum Form {
    /// Canonical composition.
    Nfc,
    /// Canonical decomposition.
    Nfd,
    /// Compatibility composition.
    Nfkc,
    /// Compatibility decomposition.
    Nfkd,
}

/// The settings of the steps of BERT. Control characters are always removed.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct BertNormalizer {
    #[serde(default = "yes")]
    clean_text: bool,
    /// Whether each CJK character is a word.
    #[serde(default = "yes", alias = "tokenize_chinese_chars")]
    handle_chinese_chars: bool,
    /// Whether accents are removed. By default if `lowercase` is true.
    #[serde(default)]
    strip_accents: Option<bool>,
    /// Whether letters become lower case.
    #[serde(default = "yes", alias = "do_lower_case")]
    lowercase: bool,
}

impl Default for BertNormalizer {
    fn default() -> Self {
        Self { clean_text: true, handle_chinese_chars: true, strip_accents: None, lowercase: true }
    }
}

fn yes() -> bool {
    true
}

/// The deserialized fields of the types of normalizers that have fields, except BERT's.
#[derive(Deserialize)]
struct Fields {
    precompiled_charsmap: Option<String>,
    pattern: Option<Pattern>,
    content: Option<String>,
    #[serde(default, alias = "strip_left")]
    left: bool,
    #[serde(default, alias = "strip_right")]
    right: bool,
}

#[derive(Deserialize)]
enum Pattern {
    String(String),
    Regex(String),
}

impl Normalizer {
    /// Parses the field `normalizer` of a `tokenizer.json` into steps.
    pub fn parse_all(normalizer: &Value) -> Result<Vec<Self>, String> {
        if normalizer.is_null() {
            return Ok(Vec::new());
        }
        let parts = normalizer["normalizers"].as_array();
        if let Some(parts) = parts.filter(|_| normalizer["type"] == "Sequence") {
            return Ok(parts
                .iter()
                .map(Self::parse_all)
                .collect::<Result<Vec<_>, _>>()?
                .into_iter()
                .flatten()
                .collect());
        }
        Self::parse(normalizer).map(|step| vec![step])
    }

    fn parse(normalizer: &Value) -> Result<Self, String> {
        let invalid = |e: &dyn std::fmt::Display| format!("invalid normalizer: {e}");
        let fields = || Fields::deserialize(normalizer).map_err(|e| invalid(&e));
        Ok(match normalizer["type"].as_str().unwrap_or_default() {
            "BertNormalizer" => {
                let bert = BertNormalizer::deserialize(normalizer).map_err(|e| invalid(&e))?;
                if !bert.clean_text {
                    return Err("unsupported BertNormalizer with `clean_text: false`".into());
                }
                Self::Bert(bert)
            }
            "Precompiled" => Self::Charsmap(Charsmap::parse(&fields()?.precompiled_charsmap.unwrap_or_default())?),
            "Lowercase" => Self::Lowercase,
            "StripAccents" => Self::StripAccents,
            "NFC" => Self::Form(Form::Nfc),
            "NFD" => Self::Form(Form::Nfd),
            "NFKC" => Self::Form(Form::Nfkc),
            "NFKD" => Self::Form(Form::Nfkd),
            "Replace" => {
                let Fields { pattern, content, .. } = fields()?;
                let pattern = match pattern.ok_or_else(|| invalid(&"Replace without `pattern`"))? {
                    Pattern::String(text) => regex::escape(&text),
                    Pattern::Regex(pattern) => pattern,
                };
                Self::Replace(Regex::new(&pattern).map_err(|e| invalid(&e))?, content.unwrap_or_default())
            }
            "Strip" => {
                let Fields { left, right, .. } = fields()?;
                Self::Strip { left, right }
            }
            other => {
                return Err(format!(
                    "unsupported normalizer {other:?}; supported are BertNormalizer, Precompiled, Lowercase, StripAccents, NFC, NFD, NFKC, NFKD, Replace, Strip and Sequence"
                ));
            }
        })
    }

    /// Applies the step.
    pub fn apply(&self, text: String) -> String {
        match self {
            Self::Bert(bert) => bert.apply(&text),
            Self::Charsmap(charsmap) => charsmap.apply(&text),
            Self::Lowercase => text.to_lowercase(),
            Self::StripAccents => text.chars().filter(|c| !is_accent(*c)).collect(),
            Self::Form(Form::Nfc) => text.nfc().collect(),
            Self::Form(Form::Nfd) => text.nfd().collect(),
            Self::Form(Form::Nfkc) => text.nfkc().collect(),
            Self::Form(Form::Nfkd) => text.nfkd().collect(),
            Self::Replace(pattern, content) => pattern.replace_all(&text, regex::NoExpand(content)).into_owned(),
            Self::Strip { left, right } => {
                let text = if *left { text.trim_start() } else { &text };
                if *right { text.trim_end() } else { text }.to_owned()
            }
        }
    }
}

impl BertNormalizer {
    fn apply(&self, text: &str) -> String {
        let mut separated = String::with_capacity(text.len());
        for c in text.chars().filter(|c| is_text(*c)) {
            if self.handle_chinese_chars && is_cjk(c) {
                separated.extend([' ', c, ' ']);
            } else {
                separated.push(c);
            }
        }
        let text: String = if self.strip_accents.unwrap_or(self.lowercase) {
            separated.nfd().filter(|c| !is_accent(*c)).collect()
        } else {
            separated
        };
        if self.lowercase { text.chars().flat_map(char::to_lowercase).collect() } else { text }
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

fn is_accent(c: char) -> bool {
    c.general_category() == GeneralCategory::NonspacingMark
}

fn is_cjk(c: char) -> bool {
    matches!(c, '\u{4e00}'..='\u{9fff}' | '\u{3400}'..='\u{4dbf}' | '\u{20000}'..='\u{2a6df}' | '\u{2a700}'..='\u{2ceaf}' | '\u{f900}'..='\u{faff}' | '\u{2f800}'..='\u{2fa1f}')
}
