//! Terms: the words of a text in the form in which memories are indexed and ranked.
//!
//! Words are folded (case, accents) and stemmed, and function words are marked. A short question and the
//! text that answers it may be assigned to different languages, so a word outside of English is indexed by
//! several forms: two words are equal if they share one (D-161). Scripts without spaces are split into pairs of letters.

use crate::rules::stop_words::{ENGLISH, LANGUAGES, detect};
use crate::rules::text::words;
use rust_stemmers::{Algorithm, Stemmer};
use std::collections::BTreeSet;

/// Words of at least this many letters, in a language other than English, are also compared by their first letters.
const MIN_PREFIXED_CHARS: usize = 6;
/// The number of these first letters.
const PREFIX_CHARS: usize = 5;
/// Marks a form that is the beginning of a word. Not alphanumeric, so that it equals no word.
const PREFIX_MARK: char = '*';

/// The forms of one word.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Term {
    /// The most specific one first.
    pub forms: Vec<String>,
    /// Whether it is a word such as `the` or `what`, which says little about the content.
    pub is_function_word: bool,
}

impl Term {
    fn single(form: String) -> Self {
        Self { forms: vec![form], is_function_word: false }
    }
}

/// Returns the terms of a text in order, with repetitions.
pub(crate) fn terms(text: &str) -> Vec<Term> {
    let words = words(text);
    let language = &LANGUAGES[detect(&words)];
    let is_english = language.algorithm == Some(Algorithm::English);
    let english = Stemmer::create(Algorithm::English);
    let own = language.algorithm.filter(|_| !is_english).map(Stemmer::create);
    let stop_words = [&LANGUAGES[ENGLISH].stop_words, &language.stop_words];
    let mut terms = Vec::new();
    for word in &words {
        if !word.chars().any(is_unspaced_letter) {
            let mut forms: Vec<String> = own.iter().map(|stemmer| stemmer.stem(word).into_owned()).collect();
            forms.push(english.stem(word).into_owned());
            if !is_english && word.chars().count() >= MIN_PREFIXED_CHARS {
                forms.push(word.chars().take(PREFIX_CHARS).chain([PREFIX_MARK]).collect());
            }
            forms.dedup();
            let is_function_word = stop_words.iter().any(|list| list.contains(word));
            terms.push(Term { forms, is_function_word });
            continue;
        }
        for part in split_by_script(word) {
            let letters: Vec<char> = part.chars().collect();
            if !letters.iter().all(|c| is_unspaced_letter(*c)) {
                terms.push(Term::single(part));
                continue;
            }
            terms.extend(letters.windows(2.min(letters.len())).map(|pair| Term::single(pair.iter().collect())));
        }
    }
    terms
}

/// Returns the distinct terms of a question.
pub(crate) fn question_terms(question: &str) -> BTreeSet<Term> {
    terms(question).into_iter().collect()
}

/// Splits a word where letters of a script without spaces meet others.
fn split_by_script(word: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    let mut previous = None;
    for c in word.chars() {
        let is_unspaced = is_unspaced_letter(c);
        match parts.last_mut().filter(|_| previous == Some(is_unspaced)) {
            Some(part) => part.push(c),
            None => parts.push(c.to_string()),
        }
        previous = Some(is_unspaced);
    }
    parts
}

/// Returns true for letters of scripts whose words are not separated by spaces, or have suffixes attached: Chinese,
/// Japanese, Korean, Thai and Lao. Hangul is decomposed by the folding.
fn is_unspaced_letter(c: char) -> bool {
    let is_in_block = matches!(c,
        '\u{e00}'..='\u{eff}' | '\u{1100}'..='\u{11ff}' | '\u{2e80}'..='\u{9fff}' | '\u{ac00}'..='\u{d7af}'
        | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3ffff}');
    is_in_block && c.is_alphanumeric()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forms(text: &str) -> Vec<String> {
        content_terms(text).map(|term| term.forms.join("/")).collect()
    }

    fn content_terms(text: &str) -> impl Iterator<Item = Term> {
        terms(text).into_iter().filter(|term| !term.is_function_word)
    }

    fn share_a_term(a: &str, b: &str) -> bool {
        let of_a: BTreeSet<String> = content_terms(a).flat_map(|term| term.forms).collect();
        content_terms(b).any(|term| term.forms.iter().any(|form| of_a.contains(form)))
    }

    #[test]
    fn function_words_are_marked_and_the_rest_is_stemmed() {
        assert_eq!(forms("What were the Dogs running after?"), ["dog", "run", "after"]);
        assert_eq!(forms("Who am I?"), Vec::<String>::new());
        assert_eq!((terms("Who am I?").len(), terms("").len()), (3, 0));
        assert_eq!(forms("8 May, 2023"), ["8", "may", "2023"], "`may` is a month as well");
    }

    #[test]
    fn inflected_words_share_a_term_in_other_languages() {
        for (a, b) in [
            ("Sie arbeitet im Krankenhaus", "Welche Krankenhäuser?"),
            ("Elle habite à Lyon", "Où habitent-ils ?"),
            ("Ona pracuje w szpitalu", "Gdzie jest szpital?"),
            ("Она работает в больнице", "Где её работа?"),
            ("彼女は緑茶が好きです", "緑茶"),
            ("그는 서울에 산다", "서울"),
        ] {
            assert!(share_a_term(a, b), "{a} / {b}: {:?} {:?}", forms(a), forms(b));
        }
        assert!(!share_a_term("Elle aime le thé", "Où est la gare ?"));
    }

    #[test]
    fn a_question_of_unclear_language_shares_a_term_with_its_answer() {
        assert!(share_a_term("Ihr Lieblingsgetränk ist Tee", "Lieblingsgetränke?"));
        assert!(share_a_term("Le restaurant est fermé le lundi", "restaurants"));
    }
}
