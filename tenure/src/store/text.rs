//! Full-text search in the process itself, for stores without a database: words, and BM25 over them.

use super::{Hit, Item};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// How soon more occurrences of a word stop counting.
const K1: f64 = 1.2;
/// How much a long text counts for less.
const B: f64 = 0.75;

/// The words of a text: runs of letters and digits, in lower case, without the common diacritics.
pub(super) fn words(text: &str) -> Vec<String> {
    let folded: String = text.chars().filter(|c| !is_combining(*c)).flat_map(char::to_lowercase).map(plain).collect();
    // Lower-casing some letters leaves a combining mark behind (`İ`), so they are looked for again.
    let split = folded.split(|c: char| !c.is_alphanumeric() && !is_combining(c));
    split.map(|w| w.replace(is_combining, "")).filter(|w| !w.is_empty()).collect()
}

/// The items whose text has any word of `query`, best first; equally good ones by key.
pub(super) fn search(items: &[Arc<Item>], query: &str, limit: usize) -> Vec<Hit> {
    let query: BTreeSet<_> = words(query).into_iter().collect();
    let texts: Vec<_> = items.iter().filter_map(|i| Some((i, words(i.text.as_deref()?)))).collect();
    let mean = texts.iter().map(|(_, w)| w.len()).sum::<usize>() as f64 / texts.len().max(1) as f64;

    let mut scores = HashMap::<usize, f64>::new();
    for word in &query {
        let counts = texts.iter().map(|(_, words)| words.iter().filter(|w| *w == word).count());
        let found: Vec<_> = counts.enumerate().filter(|(_, n)| *n > 0).collect();
        let rarity = (1.0 + (texts.len() as f64 - found.len() as f64 + 0.5) / (found.len() as f64 + 0.5)).ln();
        for (i, n) in found {
            let (n, length) = (n as f64, texts[i].1.len() as f64);
            *scores.entry(i).or_default() += rarity * n * (K1 + 1.0) / (n + K1 * (1.0 - B + B * length / mean));
        }
    }

    let mut hits: Vec<_> = scores.into_iter().map(|(i, score)| (texts[i].0, score)).collect();
    hits.sort_by(|(a, x), (b, y)| y.total_cmp(x).then_with(|| a.key.cmp(&b.key)));
    hits.into_iter().take(limit).map(|(item, score)| Hit { item: Item::clone(item), score }).collect()
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
    use jiff::Timestamp;

    fn items(texts: &[&str]) -> Vec<Arc<Item>> {
        let at = Timestamp::UNIX_EPOCH;
        let item = |(i, text): (usize, &&str)| Item {
            key: format!("k{i}"),
            value: "null".into(),
            text: Some((*text).into()),
            created_at: at,
            used_at: at,
            uses: 0,
            expires_at: None,
        };
        texts.iter().enumerate().map(item).map(Arc::new).collect()
    }

    fn found(texts: &[&str], query: &str) -> Vec<String> {
        search(&items(texts), query, 10).into_iter().map(|h| h.item.key).collect()
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
        assert_eq!(search(&items(&texts), "same", 2).len(), 2);
    }

    #[test]
    fn items_without_text_are_not_found() {
        let mut items = items(&["tea", "tea"]);
        Arc::make_mut(&mut items[0]).text = None;
        assert_eq!(search(&items, "tea", 10).len(), 1);
    }
}
