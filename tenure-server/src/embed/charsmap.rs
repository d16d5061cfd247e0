//! The character map of a SentencePiece model (`precompiled_charsmap`): which characters and short sequences
//! are replaced before a text is split, in `nmt_nfkc` mostly those that NFKC replaces.
//!
//! The format: the size of a double-array trie in bytes (32 bits, little endian), the trie, and the replacements,
//! each ended by a NUL byte. A key of the trie is the original in UTF-8, its value the offset of the replacement.

use base64::Engine;
use unicode_segmentation::UnicodeSegmentation;

/// Maximum length in bytes of a sequence of several characters that is looked up as a whole.
const MAX_SEQUENCE_BYTES: usize = 5;

/// A parsed character map.
pub struct Charsmap {
    /// The double-array trie: each unit has the label of its edge, the offset to its children, and whether a key
    /// ends here.
    units: Vec<u32>,
    replacements: String,
}

impl Charsmap {
    /// Parses the base64 of a character map.
    pub fn parse(base64: &str) -> Result<Self, String> {
        let bytes = base64::engine::general_purpose::STANDARD.decode(base64);
        let bytes = bytes.map_err(|e| format!("precompiled_charsmap is not base64: {e}"))?;
        let invalid = "precompiled_charsmap has an unknown format";
        let (size, rest) = bytes.split_first_chunk::<4>().ok_or(invalid)?;
        let (trie, replacements) = rest.split_at_checked(u32::from_le_bytes(*size) as usize).ok_or(invalid)?;
        let (units, remainder) = trie.as_chunks::<4>();
        if units.is_empty() || !remainder.is_empty() {
            return Err(invalid.into());
        }
        let replacements = String::from_utf8(replacements.to_vec()).map_err(|_| invalid)?;
        Ok(Self { units: units.iter().map(|unit| u32::from_le_bytes(*unit)).collect(), replacements })
    }

    /// Returns the text with its replacements. A grapheme cluster of several characters is looked up as a whole,
    /// then character by character.
    pub fn apply(&self, text: &str) -> String {
        let mut result = String::with_capacity(text.len());
        for grapheme in text.graphemes(true) {
            if grapheme.len() <= MAX_SEQUENCE_BYTES
                && let Some(replacement) = self.replacement(grapheme)
            {
                result.push_str(replacement);
                continue;
            }
            for c in grapheme.chars() {
                match self.replacement(c.encode_utf8(&mut [0; 4])) {
                    Some(replacement) => result.push_str(replacement),
                    None => result.push(c),
                }
            }
        }
        result
    }

    /// Returns the replacement of the shortest key that the text begins with: Hugging Face's tokenizers do the
    /// same, and the models were trained or published with them.
    fn replacement(&self, text: &str) -> Option<&str> {
        let mut position = offset(self.units[0]);
        for byte in text.bytes() {
            position ^= usize::from(byte);
            let unit = *self.units.get(position)?;
            // The label of a unit that ends a key has the highest bit set, and never equals a byte.
            if unit & (1 << 31 | 0xff) != u32::from(byte) {
                return None;
            }
            position ^= offset(unit);
            if unit & (1 << 8) != 0 {
                let start = (*self.units.get(position)? & !(1 << 31)) as usize;
                return self.replacements.get(start..)?.split('\0').next();
            }
        }
        None
    }
}

/// The offset from a unit to its children.
fn offset(unit: u32) -> usize {
    ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn unknown_formats_are_rejected() {
        for bytes in [&b""[..], b"\x01\0\0", b"\x04\0\0\0abc", b"\x03\0\0\0abc", b"\0\0\0\0", b"\x04\0\0\0abcd\xff"] {
            let error = Charsmap::parse(&base64::engine::general_purpose::STANDARD.encode(bytes)).err().unwrap();
            assert!(error.contains("unknown format"), "{error}");
        }
        assert!(Charsmap::parse("?").err().unwrap().contains("base64"));
    }

    proptest! {
        #[test]
        fn no_input_panics(units in proptest::collection::vec(any::<u32>(), 1..300), text in ".*", replacements in ".*") {
            Charsmap { units, replacements }.apply(&text);
        }
    }
}
