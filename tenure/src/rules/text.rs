//! Tokenization for full-text search in stores without a database.

use unicode_normalization::char::decompose_canonical;

/// Splits a text into words: runs of letters and digits, case-folded and without diacritics.
pub(crate) fn words(text: &str) -> Vec<String> {
    let mut folded = String::with_capacity(text.len());
    text.chars().for_each(|c| fold_char(c, &mut folded));
    folded.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()).map(str::to_owned).collect()
}

/// Appends a character in the form in which words are compared: lower case, decomposed (NFD), without
/// diacritics. Letters that Unicode does not decompose are mapped to the base letter that people type instead
/// of them.
pub(crate) fn fold_char(c: char, folded: &mut String) {
    if c.is_ascii() {
        return folded.push(c.to_ascii_lowercase());
    }
    for lower in c.to_lowercase() {
        // A letter of its own in Cyrillic alphabets, although Unicode decomposes it.
        if lower == 'й' {
            folded.push(lower);
            continue;
        }
        decompose_canonical(lower, |c| match c {
            'ß' => folded.push_str("ss"),
            'ı' => folded.push('i'),
            'ø' => folded.push('o'),
            'ł' => folded.push('l'),
            'đ' => folded.push('d'),
            'ħ' => folded.push('h'),
            'ς' => folded.push('σ'),
            c if is_diacritic(c) => {}
            c => folded.push(c),
        });
    }
}

/// Returns true for combining accents and vowel points that words are compared without: Latin, Greek and
/// Cyrillic; Hebrew; Arabic. Vowel signs of Indic scripts are letters to their readers and are compared.
pub(crate) fn is_diacritic(c: char) -> bool {
    matches!(c, '\u{300}'..='\u{36f}' | '\u{591}'..='\u{5bd}' | '\u{5bf}'..='\u{5c7}' | '\u{64b}'..='\u{65f}' | '\u{670}')
}
