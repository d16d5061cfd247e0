//! Tokenizers: from a text to token ids. Two models are supported, WordPiece (BERT) and Unigram (SentencePiece,
//! XLM-RoBERTa), from a `tokenizer.json` or a `vocab.txt`.

use super::normalizer::{BertNormalizer, Normalizer};
use super::unigram::Unigram;
use super::wordpiece::{WordPiece, is_punctuation};
use serde::Deserialize;
use serde_json::Value;

/// Maximum number of characters of a text that are encoded. More tokens than that is more than any model reads.
const MAX_CHARS: usize = 100_000;

/// A tokenizer.
pub struct Tokenizer {
    normalizers: Vec<Normalizer>,
    splits: Vec<Split>,
    model: TokenModel,
    /// The special tokens before and after a text.
    begin: Vec<u32>,
    end: Vec<u32>,
}

/// The special tokens before and after a text.
type Frame = (Vec<u32>, Vec<u32>);

enum TokenModel {
    WordPiece(WordPiece),
    Unigram(Unigram),
}

/// How a text is split into words.
enum Split {
    /// At white space; each punctuation character is a word.
    Bert,
    /// At white space.
    Whitespace,
    /// Spaces become a visible character, with which each word begins.
    Metaspace { space: char, prepend: Prepend, split: bool },
}

/// Where a space is added.
#[derive(Clone, Copy, PartialEq)]
enum Prepend {
    Always,
    First,
    Never,
}

/// The deserialized fields of a `tokenizer.json`.
#[derive(Deserialize)]
struct TokenizerFile {
    model: Value,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

impl Tokenizer {
    /// Parses a `tokenizer.json`.
    pub fn from_json(bytes: &[u8]) -> Result<Self, String> {
        let file: TokenizerFile = serde_json::from_slice(bytes).map_err(|e| format!("not a tokenizer file: {e}"))?;
        let special: Vec<String> = file.added_tokens.iter().filter(|t| t.special).map(|t| t.content.clone()).collect();
        let normalizers = Normalizer::parse_all(&file.normalizer)?;
        let splits = Split::parse_all(&file.pre_tokenizer)?;
        let kind = file.model["type"].as_str().unwrap_or("WordPiece").to_owned();
        let (model, begin, end) = match kind.as_str() {
            "WordPiece" => {
                let model = WordPiece::parse(file.model)?;
                let (begin, end) = match special_tokens(&file.post_processor, &file.added_tokens)? {
                    Some(tokens) => tokens,
                    None => (vec![model.id("[CLS]")?], vec![model.id("[SEP]")?]),
                };
                // Files of early versions have no pre-tokenizer.
                (TokenModel::WordPiece(model), begin, end)
            }
            "Unigram" => {
                let (begin, end) = special_tokens(&file.post_processor, &file.added_tokens)?.unwrap_or_default();
                (TokenModel::Unigram(Unigram::parse(file.model, &special)?), begin, end)
            }
            other => {
                return Err(format!("unsupported tokenizer model {other:?}; supported are WordPiece and Unigram"));
            }
        };
        let splits = match model {
            TokenModel::WordPiece(_) if splits.is_empty() => vec![Split::Bert],
            _ => splits,
        };
        if begin.is_empty() && end.is_empty() {
            return Err("unsupported post-processor; it must add at least one special token".into());
        }
        Ok(Self { normalizers, splits, model, begin, end })
    }

    /// Parses a `vocab.txt`: one token per line, whose id is the zero-based line number. The settings are those
    /// of the `tokenizer_config.json`, if there is one.
    pub fn from_vocab(vocab: &[u8], config: Option<&[u8]>) -> Result<Self, String> {
        let bert = match config {
            Some(config) => serde_json::from_slice(config).map_err(|e| format!("tokenizer_config.json: {e}"))?,
            None => BertNormalizer::default(),
        };
        let model = WordPiece::from_vocab(vocab)?;
        Ok(Self {
            normalizers: vec![Normalizer::Bert(bert)],
            splits: vec![Split::Bert],
            begin: vec![model.id("[CLS]")?],
            end: vec![model.id("[SEP]")?],
            model: TokenModel::WordPiece(model),
        })
    }

    /// Adds a step before all others: all letters become lower case.
    #[must_use]
    pub fn in_lower_case(mut self) -> Self {
        self.normalizers.insert(0, Normalizer::Lowercase);
        self
    }

    /// Returns the largest token id.
    pub fn largest(&self) -> usize {
        let model = match &self.model {
            TokenModel::WordPiece(model) => model.largest(),
            TokenModel::Unigram(model) => model.largest(),
        };
        self.begin.iter().chain(&self.end).fold(model, |largest, id| largest.max(*id)) as usize
    }

    /// Returns the number of special tokens around a text.
    pub fn special_tokens(&self) -> usize {
        self.begin.len() + self.end.len()
    }

    /// Encodes a text as token ids between the special tokens, at most `max` in total. Words that look like
    /// special tokens (`[SEP]`) are encoded as ordinary words.
    pub fn encode(&self, text: &str, max: usize) -> Vec<u32> {
        let end = text.char_indices().nth(MAX_CHARS).map_or(text.len(), |(end, _)| end);
        let mut text = text[..end].to_owned();
        for normalizer in &self.normalizers {
            text = normalizer.apply(text);
        }
        let words = self.splits.iter().fold(vec![text], |words, split| split.apply(words));
        let mut ids = self.begin.clone();
        let max = max.saturating_sub(self.end.len()).max(ids.len());
        for word in words.iter().filter(|word| !word.is_empty()) {
            match &self.model {
                TokenModel::WordPiece(model) => model.push_word(word, &mut ids),
                TokenModel::Unigram(model) => model.push_word(word, &mut ids),
            }
            if ids.len() >= max {
                break;
            }
        }
        ids.truncate(max);
        ids.extend(&self.end);
        ids
    }
}

impl Split {
    /// Parses the field `pre_tokenizer` of a `tokenizer.json`.
    fn parse_all(file: &Value) -> Result<Vec<Self>, String> {
        match file["type"].as_str() {
            None => Ok(Vec::new()),
            Some("Sequence") => {
                let parts = file["pretokenizers"].as_array().map(Vec::as_slice).unwrap_or_default();
                let parts = parts.iter().map(Self::parse_all).collect::<Result<Vec<_>, _>>()?;
                Ok(parts.into_iter().flatten().collect())
            }
            Some("BertPreTokenizer") => Ok(vec![Self::Bert]),
            Some("WhitespaceSplit") => Ok(vec![Self::Whitespace]),
            Some("Metaspace") => {
                let prepend = match (file["prepend_scheme"].as_str(), file["add_prefix_space"].as_bool()) {
                    (Some("first"), _) => Prepend::First,
                    (Some("never"), _) | (None, Some(false)) => Prepend::Never,
                    _ => Prepend::Always,
                };
                let space = file["replacement"].as_str().and_then(|s| s.chars().next()).unwrap_or('▁');
                Ok(vec![Self::Metaspace { space, prepend, split: file["split"].as_bool().unwrap_or(true) }])
            }
            Some(other) => Err(format!(
                "unsupported pre-tokenizer {other:?}; supported are BertPreTokenizer, WhitespaceSplit, Metaspace and Sequence"
            )),
        }
    }

    fn apply(&self, words: Vec<String>) -> Vec<String> {
        let mut result = Vec::with_capacity(words.len());
        for (i, word) in words.into_iter().enumerate() {
            match self {
                Self::Whitespace => result.extend(word.split_whitespace().map(str::to_owned)),
                Self::Bert => {
                    for word in word.split_whitespace() {
                        result.extend(word.split_inclusive(is_punctuation).flat_map(|part| {
                            // A part ends with a punctuation character, unless it is the last one.
                            let end = part.trim_end_matches(is_punctuation).len();
                            let (letters, mark) = part.split_at(end);
                            [letters.to_owned(), mark.to_owned()]
                        }));
                    }
                }
                Self::Metaspace { space, prepend, split } => {
                    let mut word = word.replace(' ', &space.to_string());
                    let prepends = *prepend == Prepend::Always || (*prepend == Prepend::First && i == 0);
                    if prepends && !word.is_empty() && !word.starts_with(*space) {
                        word.insert(0, *space);
                    }
                    if *split {
                        let starts = word.match_indices(*space).map(|(start, _)| start).filter(|start| *start > 0);
                        let starts: Vec<usize> = [0].into_iter().chain(starts).collect();
                        let ends = starts.iter().skip(1).copied().chain([word.len()]);
                        result.extend(starts.iter().zip(ends).map(|(start, end)| word[*start..end].to_owned()));
                    } else {
                        result.push(word);
                    }
                }
            }
        }
        result.retain(|word| !word.is_empty());
        result
    }
}

/// The special tokens before and after a text, from the field `post_processor` of a `tokenizer.json`.
fn special_tokens(file: &Value, added: &[AddedToken]) -> Result<Option<Frame>, String> {
    let invalid = || "invalid post-processor".to_owned();
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(invalid);
    match file["type"].as_str() {
        None => Ok(None),
        Some("TemplateProcessing") => {
            let mut parts: [Vec<u32>; 2] = Default::default();
            let mut side = 0;
            for piece in file["single"].as_array().ok_or_else(invalid)? {
                match piece["SpecialToken"]["id"].as_str() {
                    Some(token) => {
                        let ids = file["special_tokens"][token]["ids"].as_array();
                        let ids: Option<Vec<u32>> = match ids {
                            Some(ids) => Some(ids.iter().map(id).collect::<Result<_, _>>()?),
                            None => added.iter().find(|t| t.content == token).map(|t| vec![t.id]),
                        };
                        parts[side].extend(ids.ok_or_else(invalid)?);
                    }
                    None => side = 1,
                }
            }
            let [begin, end] = parts;
            Ok(Some((begin, end)))
        }
        Some("BertProcessing" | "RobertaProcessing") => {
            Ok(Some((vec![id(&file["cls"][1])?], vec![id(&file["sep"][1])?])))
        }
        Some(other) => Err(format!(
            "unsupported post-processor {other:?}; supported are TemplateProcessing, BertProcessing and RobertaProcessing"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCAB: &str = "[PAD]\n[UNK]\n[CLS]\n[SEP]\ncafe\nferry\n##s\n##ing\n.\n$\n[\n]\nsep\n渡\n轮\nа\n##б\n—\nx\n##x\n\u{1112}\n##\u{1161}\n##\u{11ab}\nnew\nline\nनक\n";

    #[track_caller]
    fn check(text: &str, want: &[&str]) {
        let tokens = Tokenizer::from_vocab(VOCAB.as_bytes(), None).unwrap();
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
        let tokens = Tokenizer::from_vocab(VOCAB.as_bytes(), None).unwrap();
        for max in [2, 3, 7, 256] {
            let ids = tokens.encode(&"ferrysing ".repeat(500), max);
            assert_eq!((ids.len(), ids[0], ids[max - 1]), (max, 2, 3));
        }
        assert_eq!(tokens.encode(&"ж".repeat(5_000_000), 256), [2, 1, 3]);
    }

    /// The field `model` of a `tokenizer.json`.
    const WORDS: &str = r#"{"type": "WordPiece", "vocab": {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "A": 4, "À": 5, "渡": 6, "<s>": 7, "</s>": 8}}"#;

    fn json(model: &str, normalizer: &str) -> String {
        format!(r#"{{"model": {model}, "normalizer": {normalizer}}}"#)
    }

    #[test]
    fn letter_case_and_accents_are_as_configured() {
        for (settings, want) in [
            (r#""lowercase": true, "strip_accents": null"#, [1, 3, 0, 6, 2]),
            (r#""lowercase": false"#, [1, 5, 0, 6, 2]),
            (r#""lowercase": false, "strip_accents": true"#, [1, 4, 0, 6, 2]),
        ] {
            let file = json(WORDS, &format!(r#"{{"type": "BertNormalizer", {settings}}}"#));
            assert_eq!(Tokenizer::from_json(file.as_bytes()).unwrap().encode("À b渡", 9), want, "{settings}");
        }
        let whole = r#"{"type": "BertNormalizer", "lowercase": false, "handle_chinese_chars": false}"#;
        assert_eq!(Tokenizer::from_json(json(WORDS, whole).as_bytes()).unwrap().encode("À b渡", 9), [1, 5, 0, 2]);
        let config = br#"{"do_lower_case": false, "tokenize_chinese_chars": true, "strip_accents": null}"#;
        let vocab = b"[UNK]\n[CLS]\n[SEP]\na\nA";
        assert_eq!(Tokenizer::from_vocab(vocab, Some(config)).unwrap().encode("A a", 9), [1, 4, 3, 2]);
        assert_eq!(Tokenizer::from_vocab(vocab, None).unwrap().encode("A a", 9), [1, 3, 3, 2]);
        let cased = Tokenizer::from_vocab(vocab, Some(config)).unwrap().in_lower_case();
        assert_eq!(cased.encode("A a", 9), [1, 3, 3, 2]);
    }

    #[test]
    fn special_tokens_are_those_of_the_post_processor() {
        let encode = |post_processor: &str| {
            let file = format!(
                r#"{{"model": {WORDS}, "post_processor": {post_processor}, "added_tokens": [{{"id": 8, "content": "</s>", "special": true}}]}}"#
            );
            Tokenizer::from_json(file.as_bytes()).map(|t| (t.encode("a a", 9), t.special_tokens()))
        };
        let sequence = r#"{"Sequence": {"id": "A", "type_id": 0}}"#;
        let template = |before: &str, after: &str| {
            format!(
                r#"{{"type": "TemplateProcessing", "single": [{before}{sequence}{after}], "special_tokens": {{"<s>": {{"ids": [7]}}}}}}"#
            )
        };
        let token = |name: &str| format!(r#"{{"SpecialToken": {{"id": "{name}", "type_id": 0}}}}"#);
        assert_eq!(encode("null"), Ok((vec![1, 3, 3, 2], 2)));
        assert_eq!(encode(&template(&(token("<s>") + ","), &format!(",{}", token("</s>")))), Ok((vec![7, 3, 3, 8], 2)));
        assert_eq!(encode(&template("", &format!(",{}", token("</s>")))), Ok((vec![3, 3, 8], 1)));
        let roberta = r#"{"type": "RobertaProcessing", "sep": ["</s>", 8], "cls": ["<s>", 7]}"#;
        assert_eq!(encode(roberta), Ok((vec![7, 3, 3, 8], 2)));
        for (post_processor, want) in [
            (template("", ""), "at least one special token"),
            (template("", &format!(",{}", token("?"))), "invalid post-processor"),
            (r#"{"type": "BertProcessing"}"#.to_owned(), "invalid post-processor"),
            (r#"{"type": "ByteLevel"}"#.to_owned(), "TemplateProcessing"),
        ] {
            assert!(encode(&post_processor).unwrap_err().contains(want), "{post_processor}");
        }
    }

    #[test]
    fn unsupported_files_are_rejected() {
        let bert = r#"{"type": "BertNormalizer", "lowercase": true, "strip_accents": null}"#;
        let normalizer = |json: &str| format!(r#"{{"type": "Sequence", "normalizers": [{{"type": "NFC"}}, {json}]}}"#);
        let good = Tokenizer::from_json(json(WORDS, bert).as_bytes()).unwrap();
        assert_eq!((good.encode("À b", 9), good.largest()), (vec![1, 3, 0, 2], 8));
        for (file, want) in [
            ("no json".to_owned(), "not a tokenizer file"),
            (json(r#"{"type": "BPE", "vocab": {}}"#, bert), "WordPiece and Unigram"),
            (json(r#"{"type": "Unigram", "vocab": [["a", -1.0]]}"#, bert), "unk_id"),
            (json(WORDS, &normalizer(r#"{"type": "Nmt"}"#)), "unsupported normalizer \"Nmt\""),
            (json(WORDS, &normalizer(r#"{"type": "Precompiled"}"#)), "precompiled_charsmap"),
            (json(WORDS, &normalizer(r#"{"type": "Replace"}"#)), "pattern"),
            (json(WORDS, &normalizer(r#"{"type": "Replace", "pattern": {"Regex": "("}}"#)), "invalid normalizer"),
            (json(WORDS, r#"{"type": "BertNormalizer", "clean_text": false}"#), "clean_text"),
            (json(WORDS, r#"{"type": "BertNormalizer", "lowercase": 1}"#), "invalid normalizer"),
            (json(WORDS, r#"null, "pre_tokenizer": {"type": "ByteLevel"}"#), "Metaspace"),
            (json(r#"{"type": "WordPiece"}"#, bert), "invalid vocabulary"),
            (json(r#"{"type": "WordPiece", "vocab": {"[UNK]": -1}}"#, bert), "invalid vocabulary"),
            (json(r#"{"type": "WordPiece", "vocab": {"[UNK]": 0}}"#, bert), "[CLS]"),
        ] {
            let error = Tokenizer::from_json(file.as_bytes()).err().unwrap();
            assert!(error.contains(want), "{file}: {error}");
        }
        for (file, want) in [(&b"a\nb\na\n"[..], "duplicate token"), (b"\xff", "UTF-8"), (b"[CLS]\n[SEP]", "[UNK]")] {
            assert!(Tokenizer::from_vocab(file, None).err().unwrap().contains(want));
        }
    }
}
