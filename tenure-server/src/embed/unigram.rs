//! The Unigram model of SentencePiece: the segmentation of a word into pieces with the highest probability.

use serde::Deserialize;
use std::collections::HashMap;

/// How much less likely an unknown character is than the least likely piece.
const UNKNOWN_PENALTY: f64 = 10.0;

/// The pieces of a vocabulary, with their logarithmic probabilities.
pub struct Unigram {
    pieces: HashMap<String, (u32, f64)>,
    /// Maximum length of a piece in bytes.
    max_bytes: usize,
    largest: u32,
    unknown: u32,
    unknown_score: f64,
}

/// The deserialized fields of the model in a `tokenizer.json`.
#[derive(Deserialize)]
struct UnigramFile {
    vocab: Vec<(String, f64)>,
    unk_id: Option<u32>,
    #[serde(default)]
    byte_fallback: bool,
}

/// The best segmentation of the text up to a position.
#[derive(Clone, Copy)]
struct Best {
    score: f64,
    start: usize,
    id: u32,
}

impl Unigram {
    /// Parses the field `model` of a `tokenizer.json`. Pieces in `special` are not matched in texts.
    pub fn parse(model: serde_json::Value, special: &[String]) -> Result<Self, String> {
        let file: UnigramFile = serde_json::from_value(model).map_err(|e| format!("invalid vocabulary: {e}"))?;
        if file.byte_fallback {
            return Err("unsupported Unigram model with `byte_fallback`".into());
        }
        let unknown = file.unk_id.filter(|id| (*id as usize) < file.vocab.len());
        let unknown = unknown.ok_or("the unknown token (`unk_id`) is missing")?;
        let least = file.vocab.iter().map(|(_, score)| *score).fold(f64::INFINITY, f64::min);
        if !least.is_finite() || file.vocab.iter().any(|(_, score)| !score.is_finite()) {
            return Err("invalid vocabulary: a score is not finite".into());
        }
        let max_bytes = file.vocab.iter().map(|(piece, _)| piece.len()).max().unwrap_or(0);
        let largest = file.vocab.len() as u32 - 1;
        let pieces = (0..).zip(file.vocab).map(|(id, (piece, score))| (piece, (id, score)));
        let pieces = pieces.filter(|(piece, _)| !special.contains(piece)).collect();
        Ok(Self { pieces, max_bytes, largest, unknown, unknown_score: least - UNKNOWN_PENALTY })
    }

    /// Returns the largest token id.
    pub fn largest(&self) -> u32 {
        self.largest
    }

    /// Appends the pieces of a word. Consecutive unknown characters become one unknown token.
    pub fn push_word(&self, word: &str, ids: &mut Vec<u32>) {
        let mut best: Vec<Option<Best>> = vec![None; word.len() + 1];
        best[0] = Some(Best { score: 0.0, start: 0, id: self.unknown });
        for (start, c) in word.char_indices() {
            let Some(Best { score: base, .. }) = best[start] else { continue };
            let mut extend = |end: usize, id: u32, score: f64| {
                let score = base + score;
                if best[end].is_none_or(|b| score > b.score) {
                    best[end] = Some(Best { score, start, id });
                }
            };
            let rest = &word[start..];
            let lengths = rest.char_indices().map(|(i, c)| i + c.len_utf8());
            for length in lengths.take_while(|length| *length <= self.max_bytes) {
                if let Some((id, score)) = self.pieces.get(&rest[..length]) {
                    extend(start + length, *id, *score);
                }
            }
            if !self.pieces.contains_key(&rest[..c.len_utf8()]) {
                extend(start + c.len_utf8(), self.unknown, self.unknown_score);
            }
        }
        let first = ids.len();
        let mut end = word.len();
        while end > 0 {
            let Some(Best { start, id, .. }) = best[end] else { break };
            if id != self.unknown || ids.len() == first || ids.last() != Some(&id) {
                ids.push(id);
            }
            end = start;
        }
        ids[first..].reverse();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_most_likely_segmentation_wins() {
        let vocab =
            json!([["<unk>", 0.0], ["a", -2.0], ["b", -2.0], ["ab", -3.0], ["abc", -1.0], ["c", -5.5], ["é", -4.0]]);
        let model = Unigram::parse(json!({"type": "Unigram", "unk_id": 0, "vocab": vocab}), &["abc".into()]).unwrap();
        let encode = |word: &str| {
            let mut ids = vec![7];
            model.push_word(word, &mut ids);
            ids
        };
        assert_eq!(encode(""), [7]);
        assert_eq!(encode("ba"), [7, 2, 1]);
        // ab + c is -8.5, a + b + c is -9.5; abc is excluded.
        assert_eq!(encode("abc"), [7, 3, 5]);
        assert_eq!(encode("aéb"), [7, 1, 6, 2]);
        assert_eq!(encode("xya€€"), [7, 0, 1, 0]);
        assert_eq!(model.largest(), 6);
        assert_eq!(encode(&"x".repeat(1_000_000)), [7, 0]);
    }

    #[test]
    fn unsupported_models_are_rejected() {
        for (model, want) in [
            (json!({"unk_id": 0}), "invalid vocabulary"),
            (json!({"vocab": [["a", -1.0]]}), "unk_id"),
            (json!({"vocab": [["a", -1.0]], "unk_id": 1}), "unk_id"),
            (json!({"vocab": [["a", -1.0]], "unk_id": 0, "byte_fallback": true}), "byte_fallback"),
        ] {
            assert!(Unigram::parse(model, &[]).err().unwrap().contains(want));
        }
    }
}
