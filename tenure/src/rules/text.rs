//! Tokenization for full-text search in stores without a database.

/// Splits a text into words: runs of letters and digits, in lower case, without common diacritics.
pub(crate) fn words(text: &str) -> Vec<String> {
    let folded: String = text.chars().filter(|c| !is_combining(*c)).flat_map(char::to_lowercase).map(plain).collect();
    // Lower-casing some letters leaves a combining mark behind (`İ`), so these are removed again.
    let split = folded.split(|c: char| !c.is_alphanumeric() && !is_combining(c));
    split.map(|w| w.replace(is_combining, "")).filter(|w| !w.is_empty()).collect()
}

/// Returns true for combining diacritical marks (U+0300 to U+036F).
pub(crate) fn is_combining(c: char) -> bool {
    ('\u{300}'..='\u{36f}').contains(&c)
}

/// Returns a Latin letter without its accent; any other character unchanged. Expects lower case.
pub(crate) fn plain(c: char) -> char {
    match c {
        'à'..='å' | 'ā' | 'ă' | 'ą' | 'ǎ' => 'a',
        'ç' | 'ć' | 'ĉ' | 'ċ' | 'č' => 'c',
        'ď' | 'đ' => 'd',
        'è'..='ë' | 'ē' | 'ĕ' | 'ė' | 'ę' | 'ě' => 'e',
        'ĝ' | 'ğ' | 'ġ' | 'ģ' => 'g',
        'ĥ' | 'ħ' => 'h',
        'ì'..='ï' | 'ĩ' | 'ī' | 'ĭ' | 'į' | 'ı' | 'ǐ' => 'i',
        'ĵ' => 'j',
        'ķ' => 'k',
        'ĺ' | 'ļ' | 'ľ' | 'ł' => 'l',
        'ñ' | 'ń' | 'ņ' | 'ň' => 'n',
        'ò'..='ö' | 'ø' | 'ō' | 'ŏ' | 'ő' | 'ơ' | 'ǒ' => 'o',
        'ŕ' | 'ŗ' | 'ř' => 'r',
        'ś' | 'ŝ' | 'ş' | 'š' | 'ș' => 's',
        'ţ' | 'ť' | 'ț' => 't',
        'ù'..='ü' | 'ũ' | 'ū' | 'ŭ' | 'ů' | 'ű' | 'ų' | 'ư' | 'ǔ' => 'u',
        'ŵ' => 'w',
        'ý' | 'ÿ' | 'ŷ' => 'y',
        'ź' | 'ż' | 'ž' => 'z',
        other => other,
    }
}
