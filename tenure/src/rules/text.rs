//! Full-text search in the process itself, for stores without a database: words, and BM25 over them.

/// The words of a text: runs of letters and digits, in lower case, without the common diacritics.
pub(crate) fn words(text: &str) -> Vec<String> {
    let folded: String = text.chars().filter(|c| !is_combining(*c)).flat_map(char::to_lowercase).map(plain).collect();
    // Lower-casing some letters leaves a combining mark behind (`İ`), so they are looked for again.
    let split = folded.split(|c: char| !c.is_alphanumeric() && !is_combining(c));
    split.map(|w| w.replace(is_combining, "")).filter(|w| !w.is_empty()).collect()
}

pub(crate) fn is_combining(c: char) -> bool {
    ('\u{300}'..='\u{36f}').contains(&c)
}

/// A Latin letter without its accent; anything else as it is. Only lower case comes here.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn found(texts: &[&str], query: &str) -> Vec<String> {
        let mut words = Words::default();
        for (i, text) in texts.iter().enumerate() {
            words.put(&format!("k{i}"), text);
        }
        words.search(query, 10).into_iter().map(|(key, _)| key.to_owned()).collect()
    }

    #[test]
    fn words_have_no_case_and_no_accents() {
        assert_eq!(words("Crème-brûlée, 2 Stück!"), ["creme", "brulee", "2", "stuck"]);
        assert_eq!(words("cafe\u{301} \u{130}stanbul"), ["cafe", "istanbul"]);
        assert_eq!(words("Ελλάδα 日本語"), ["ελλάδα", "日本語"]);
        assert_eq!(words(" -- ' "), Vec::<String>::new());
    }

    #[test]
    fn any_word_is_enough_and_more_is_better() {
        let texts = ["likes green tea", "likes coffee", "green tea green tea", "nothing"];
        assert_eq!(found(&texts, "GREEN tea"), ["k2", "k0"]);
        assert_eq!(found(&texts, "likes tea"), ["k0", "k2", "k1"]);
        assert_eq!(found(&texts, "absent"), Vec::<String>::new());
        assert_eq!(found(&texts, ""), Vec::<String>::new());
        assert_eq!(found(&[], "tea"), Vec::<String>::new());
    }

    #[test]
    fn a_rare_word_counts_more_and_a_long_text_less() {
        assert_eq!(found(&["tea cup", "tea pot", "tea mug"], "tea pot")[0], "k1");
        assert_eq!(found(&["tea and much more that nobody asked for", "tea"], "tea"), ["k1", "k0"]);
    }

    #[test]
    fn equals_come_by_key_and_the_limit_holds() {
        let texts = ["same", "same", "same"];
        assert_eq!(found(&texts, "same"), ["k0", "k1", "k2"]);
        let mut words = Words::default();
        texts.iter().enumerate().for_each(|(i, text)| words.put(&format!("k{i}"), text));
        assert_eq!(words.search("same", 2).len(), 2);
    }

    #[test]
    fn what_is_taken_out_leaves_nothing() {
        let mut words = Words::default();
        words.put("a", "green tea tea");
        words.put("b", "tea");
        words.take("a", "green tea tea");
        assert_eq!(words.search("green tea", 10).len(), 1);
        words.take("b", "tea");
        words.take("b", "tea");
        assert!(words.found.is_empty() && words.lengths.is_empty() && words.total == 0);
    }
}
