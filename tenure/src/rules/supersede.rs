//! Whether a newer statement updates an older one: "I moved, my new address is …" after "My address is …".
//!
//! Decided from the words alone, for short statements in English. Two statements are compared only if they may have
//! the same subject; then one of three patterns must apply ([`Update`]). Turns of a dialogue and questions update
//! nothing (D-163).

use crate::rules::stop_words::{ENGLISH, LANGUAGES};
use crate::rules::text::words;
use rust_stemmers::{Algorithm, Stemmer};
use std::collections::{BTreeSet, HashSet};
use std::sync::LazyLock;

/// Statements with more words are not compared: they usually say several things.
const MAX_WORDS: usize = 25;
/// The number of words at the beginning of a statement among which its subject is looked for.
const SUBJECT_WORDS: usize = 6;
/// The minimum similarity of two statements if the newer one says clearly that something changed.
const MIN_SIMILARITY: f32 = 0.38;
/// The minimum similarity if a word that often, but not always, tells a change is the only sign.
const MIN_SIMILARITY_WEAK: f32 = 0.55;

/// Words that tell a change.
const CHANGES: &str = "anymore broke cancelled canceled changed changing closed delayed died divorced ended expired \
    extended extends formerly freeze increased instead longer lowered married moved moving new newly postponed \
    previously promoted quit raised reduced renamed replaced replaces replacing rescheduled resigned retired \
    separated slips slipped sold stopped switched transferred updated";
/// Words that often tell a change.
const POSSIBLE_CHANGES: &str = "actually again back changes correction currently engaged gone left move moves now off \
    rather since started today took taken";
/// Verbs that end the subject of a statement.
const AUXILIARIES: &str = "am are be been can could did do does had has have is ll m must re s should ve was were will \
    would";
/// Nouns for persons and pets: the subject of what is said about them.
const RELATIONS: &str = "aunt baby boss boyfriend brother cat child colleague cousin dad daughter dog father flatmate \
    friend girlfriend grandfather grandma grandmother grandpa husband kid mom mother mum neighbor neighbour nephew \
    niece partner roommate sister son uncle wife";
/// What a person or thing has one of at a time.
const ATTRIBUTES: &str = "address age birthday boss car code deadline dentist diet doctor email employer favorite \
    favourite flat gym height home job landlord manager name number office password phone pin plan price rent salary \
    school size therapist title weight";
/// Words for numbers, days and times of day.
const QUANTITIES: &str = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen \
    sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand half \
    quarter first second third fourth fifth sixth seventh eighth ninth tenth monday tuesday wednesday thursday friday \
    saturday sunday mondays tuesdays wednesdays thursdays fridays saturdays sundays once twice without no morning noon \
    evening night midnight";
const MONTHS: &str = "january february march april june july august september october november december";

struct Lexicon {
    changes: HashSet<String>,
    possible_changes: HashSet<String>,
    auxiliaries: HashSet<String>,
    relations: HashSet<String>,
    attributes: HashSet<String>,
    quantities: HashSet<String>,
    months: HashSet<String>,
}

static LEXICON: LazyLock<Lexicon> = LazyLock::new(|| {
    let set = |list: &str| list.split_whitespace().map(str::to_owned).collect();
    Lexicon {
        changes: set(CHANGES),
        possible_changes: set(POSSIBLE_CHANGES),
        auxiliaries: set(AUXILIARIES),
        relations: set(RELATIONS),
        attributes: set(ATTRIBUTES).into_iter().map(|word: String| stem(&word)).collect(),
        quantities: set(QUANTITIES),
        months: set(MONTHS),
    }
});

/// How a newer statement updates an older one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Update {
    /// The same statement with other numbers, days or times: "The stand-up is at ten."
    Quantity,
    /// Another value of an attribute that has one: "My dentist is Dr Osei."
    Attribute,
    /// A statement about the same thing that tells a change: "We no longer use Jenkins."
    Change,
}

/// A short statement, prepared for comparison. All words are stemmed.
pub(crate) struct Statement {
    /// The words that are neither function words nor tell a change.
    content: BTreeSet<String>,
    /// All words.
    all: HashSet<String>,
    quantities: BTreeSet<String>,
    /// Names and relations in the subject. Empty: the speaker, or a thing.
    names: BTreeSet<String>,
    /// The content words before the first auxiliary verb. Empty without one.
    subject: BTreeSet<String>,
    /// The numbers among the first words: parts of a name, such as that of a contract.
    leading_numbers: BTreeSet<String>,
    is_change: bool,
    may_be_change: bool,
    has_date: bool,
    /// Whether the speaker is involved.
    is_first_person: bool,
}

fn stem(word: &str) -> String {
    Stemmer::create(Algorithm::English).stem(word).into_owned()
}

impl Statement {
    /// Parses a statement. `None` if it is not one that could update another, or be updated: too long, a question, or
    /// a turn of a dialogue.
    pub fn parse(text: &str) -> Option<Self> {
        let folded = words(text);
        if folded.is_empty() || folded.len() > MAX_WORDS || text.contains('?') || is_dialogue_turn(text) {
            return None;
        }
        let is_function_word = |word: &str| LANGUAGES[ENGLISH].stop_words.contains(word);
        let is_change_word = |word: &str| LEXICON.changes.contains(word) || LEXICON.possible_changes.contains(word);
        let is_content = |word: &str| {
            let is_quantity = LEXICON.quantities.contains(word);
            is_quantity || !is_function_word(word) && !is_change_word(word)
        };
        let content: Vec<&String> = folded.iter().filter(|word| is_content(word)).collect();
        let is_quantity =
            |word: &str| LEXICON.quantities.contains(word) || word.starts_with(|c: char| c.is_ascii_digit());
        let subject_end = folded.iter().take(SUBJECT_WORDS).position(|word| LEXICON.auxiliaries.contains(word));
        Some(Self {
            content: content.iter().map(|word| stem(word)).collect(),
            all: folded.iter().map(|word| stem(word)).collect(),
            quantities: content.iter().filter(|word| is_quantity(word)).map(|word| stem(word)).collect(),
            names: names(text),
            subject: folded[..subject_end.unwrap_or(0)]
                .iter()
                .filter(|word| is_content(word))
                .map(|word| stem(word))
                .collect(),
            leading_numbers: folded.iter().take(3).filter(|word| is_quantity(word)).cloned().collect(),
            is_change: folded.iter().any(|word| LEXICON.changes.contains(word)),
            may_be_change: folded.iter().any(|word| LEXICON.possible_changes.contains(word)),
            has_date: folded.iter().any(|word| LEXICON.months.contains(word)) || has_iso_date(&folded),
            is_first_person: folded.iter().any(|word| word == "i" || word == "we"),
        })
    }

    /// Returns how this statement updates an older one. `None` if it does not. `similarity` is the cosine similarity
    /// of their meanings, if it is known.
    pub fn updates(&self, older: &Self, similarity: Option<f32>) -> Option<Update> {
        if self.differs_in_subject(older) {
            return None;
        }
        let shared: BTreeSet<&String> = self.content.intersection(&older.content).collect();
        let core = shared.iter().filter(|word| !self.quantities.contains(**word)).count();
        let is_quantity_of = |a: &Self, b: &Self| a.content.difference(&b.content).all(|w| a.quantities.contains(w));
        let have_dates = self.has_date && older.has_date;
        if core > 0
            && self.content != older.content
            && !have_dates
            && is_quantity_of(self, older)
            && is_quantity_of(older, self)
        {
            return Some(Update::Quantity);
        }
        let names_attribute = self.subject.iter().any(|word| LEXICON.attributes.contains(word));
        if names_attribute && self.subject == older.subject && self.content != older.content {
            return Some(Update::Attribute);
        }
        let is_similar = |minimum: f32| similarity.is_none_or(|cosine| cosine >= minimum);
        if self.is_change && !shared.is_empty() && is_similar(MIN_SIMILARITY) {
            return Some(Update::Change);
        }
        let is_close = shared.len() >= 2 && is_similar(MIN_SIMILARITY)
            || !shared.is_empty() && similarity.is_some_and(|cosine| cosine >= MIN_SIMILARITY_WEAK);
        (self.may_be_change && is_close).then_some(Update::Change)
    }

    /// Returns true if the statements are about different persons or things: Anna's address and Ben's, the test server
    /// and the build server.
    fn differs_in_subject(&self, older: &Self) -> bool {
        if self.names.is_disjoint(&older.names) {
            let is_about_other =
                |a: &Self, b: &Self| !a.names.is_empty() && !a.names.iter().any(|name| b.all.contains(name));
            if is_about_other(older, self) || is_about_other(self, older) && !self.is_first_person {
                return true;
            }
        }
        let has_own_word = |a: &Self, b: &Self| a.subject.iter().any(|word| !b.all.contains(word));
        if !self.subject.is_disjoint(&older.subject) && has_own_word(self, older) && has_own_word(older, self) {
            return true;
        }
        !self.leading_numbers.is_empty()
            && !older.leading_numbers.is_empty()
            && self.leading_numbers != older.leading_numbers
    }
}

/// The names and relations before the first auxiliary verb, among the first words.
fn names(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for token in text.split_whitespace().take(SUBJECT_WORDS - 1) {
        let token = token.trim_matches(|c: char| !c.is_alphanumeric());
        let base = token.strip_suffix("'s").or_else(|| token.strip_suffix("’s"));
        let Some(word) = words(base.unwrap_or(token)).into_iter().next() else { continue };
        if LEXICON.auxiliaries.contains(&word) {
            break;
        }
        let is_function_word = LANGUAGES[ENGLISH].stop_words.contains(&word);
        let is_change = LEXICON.changes.contains(&word) || LEXICON.possible_changes.contains(&word);
        let is_name = token.starts_with(char::is_uppercase) || base.is_some();
        if LEXICON.relations.contains(&word) || is_name && !is_function_word && !is_change {
            names.insert(stem(&word));
        }
    }
    names
}

/// Returns true for texts such as `Ada: the ferry leaves at nine` and `[8 May] Ada: …`, which belong to a dialogue.
fn is_dialogue_turn(text: &str) -> bool {
    let Some((before, after)) = text.split_once(':') else { return text.starts_with('[') };
    let speaker = before.rsplit([']', ',']).next().unwrap_or(before).trim();
    let is_name = |word: &str| word.starts_with(char::is_uppercase) && word != "I";
    let is_short = (1..=2).contains(&speaker.split_whitespace().count());
    text.starts_with('[') || after.starts_with(' ') && is_short && speaker.split_whitespace().all(is_name)
}

/// Returns true if the words contain a date such as 2025-03-02.
fn has_iso_date(words: &[String]) -> bool {
    let is_number = |word: &String, length: usize| word.len() == length && word.bytes().all(|b| b.is_ascii_digit());
    words.windows(3).any(|w| is_number(&w[0], 4) && is_number(&w[1], 2) && is_number(&w[2], 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update(older: &str, newer: &str) -> Option<Update> {
        Statement::parse(newer)?.updates(&Statement::parse(older)?, Some(0.6))
    }

    #[test]
    fn a_changed_quantity_is_an_update() {
        for (older, newer) in [
            ("The API allows 100 requests a minute", "The API allows 250 requests a minute"),
            ("I go to yoga on Mondays", "I go to yoga on Tuesdays and Fridays"),
            ("I take two sugars in my coffee", "I take my coffee without sugar"),
            ("The shop opens at nine", "The shop opens at 10:30"),
        ] {
            assert_eq!(update(older, newer), Some(Update::Quantity), "{older} / {newer}");
        }
    }

    #[test]
    fn another_value_of_an_attribute_is_an_update() {
        assert_eq!(update("My address is 4 Hill Road", "My address is 9 Lake View"), Some(Update::Attribute));
        assert_eq!(update("My favourite colour is blue", "My favourite colour is red"), Some(Update::Attribute));
    }

    #[test]
    fn a_change_of_the_same_thing_is_an_update() {
        for (older, newer) in [
            ("We build with Make", "Make is gone, we build with Just now"),
            ("I drive an old Volvo", "I sold the Volvo"),
            ("Olga is the release manager", "Pete took over from Olga as release manager"),
            ("The review is on Monday", "The review was postponed to Thursday"),
            ("My number is 555 0100", "I have a new number: 555 0199"),
        ] {
            assert!(update(older, newer).is_some(), "{older} / {newer}");
        }
    }

    #[test]
    fn facts_that_are_both_true_are_kept() {
        for (older, newer) in [
            ("I like tea", "I like coffee"),
            ("Anna's address is 5 Elm Road", "Ben has moved, his new address is 19 Oak Street"),
            ("My sister lives in Rome", "My brother lives in Oslo"),
            ("My sister lives in Rome", "I moved and live in Oslo now"),
            ("The test server has 16 GB of memory", "The build server has 64 GB of memory"),
            ("My car insurance is with Acme", "My health insurance is with Corvus now"),
            ("My son is allergic to cats", "My son is allergic to pollen"),
            ("Kim speaks Arabic", "Kim speaks Danish"),
            ("The Hamburg office opens at seven", "The Munich office now opens at eight"),
            ("I swim on Fridays", "I play chess on Fridays"),
            ("Contract 17 was signed", "Contract 18 was cancelled"),
            ("Weight on 2025-03-02: 80", "Weight on 2025-04-02: 81"),
        ] {
            assert_eq!(update(older, newer), None, "{older} / {newer}");
        }
    }

    #[test]
    fn dialogues_questions_and_long_texts_are_not_compared() {
        for text in
            ["Ada: I moved to Bern", "[8 May, 2023] Ada: I moved", "2024-03-07, Ada: I moved", "Did I move?", ""]
        {
            assert!(Statement::parse(text).is_none(), "{text}");
        }
        assert!(Statement::parse(&"word ".repeat(30)).is_none());
        assert!(Statement::parse("I moved: my address is 4 Hill Road").is_some());
    }
}
