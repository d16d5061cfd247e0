//! The quality of recall, measured over HTTP on labelled questions: tests/data/recall.json.
//! `scripts/evaluate-recall.py` prints the same tables for a running server.

use crate::support::InProcessClient;
use futures_util::future::join_all;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap, HashSet};
use tenure_server::config::embeddings::Embeddings;

/// Results asked for per question. More than the measurements need, so that outdated memories are ranked, too.
const RESULTS: usize = 100;

/// What recall must reach for the questions of a category: shares, well below those measured.
struct Floor {
    category: &'static str,
    /// Questions with a memory that answers among the first five results, by words alone.
    words: f64,
    /// The same, by words and meaning.
    hybrid: f64,
    /// Memories ranked above those that look like them, by words and meaning.
    above: f64,
}

const fn floor(category: &'static str, words: f64, hybrid: f64, above: f64) -> Floor {
    Floor { category, words, hybrid, above }
}

const FLOORS: [Floor; 10] = [
    floor("short facts", 0.40, 0.93, 0.0),
    floor("dialogue", 0.20, 0.50, 0.0),
    floor("dialogue: context", 0.20, 0.40, 0.0),
    floor("dialogue: several", 0.40, 0.70, 0.0),
    floor("dialogue: time", 0.10, 0.40, 0.0),
    floor("other languages", 0.80, 0.90, 0.0),
    floor("dates and numbers", 0.60, 0.90, 0.60),
    floor("negation", 0.40, 0.90, 0.60),
    floor("superseded facts", 0.60, 0.90, 0.80),
    floor("both facts true", 0.95, 0.95, 0.95),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RecallData {
    sets: Vec<RecallSet>,
}

/// Memories of one user, and questions about them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RecallSet {
    name: String,
    user: String,
    memories: Vec<LabelledMemory>,
    questions: Vec<Question>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LabelledMemory {
    id: String,
    text: String,
    at: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    category: String,
    text: String,
    /// The memories that answer it; all of them are needed.
    evidence: Vec<String>,
    /// Memories that look like the evidence and must be ranked below it.
    #[serde(default)]
    above: Vec<String>,
}

impl RecallData {
    fn load() -> Self {
        serde_json::from_str(include_str!("../data/recall.json")).unwrap()
    }
}

/// Sums over questions.
#[derive(Default)]
struct Measurement {
    questions: usize,
    recall_at_10: f64,
    hits: [usize; 3],
    pairs: usize,
    above: usize,
}

impl Measurement {
    /// Adds a question and the ids of the memories that were found, best first.
    fn add(&mut self, question: &Question, found: &[&str]) {
        let rank = |id: &String| found.iter().position(|f| f == id).unwrap_or(RESULTS);
        let ranks: Vec<usize> = question.evidence.iter().map(rank).collect();
        let best = *ranks.iter().min().unwrap();
        let worst = *ranks.iter().max().unwrap();
        self.questions += 1;
        self.recall_at_10 += ranks.iter().filter(|r| **r < 10).count() as f64 / ranks.len() as f64;
        for (hits, first) in self.hits.iter_mut().zip([1, 5, 10]) {
            *hits += usize::from(best < first);
        }
        self.pairs += question.above.len();
        self.above += question.above.iter().filter(|other| worst < rank(other)).count();
    }

    fn share(&self, count: usize) -> f64 {
        count as f64 / self.questions as f64
    }

    fn hit_at_5(&self) -> f64 {
        self.share(self.hits[1])
    }

    /// The share of pairs that are ranked correctly: 1 if there are none.
    fn above(&self) -> f64 {
        if self.pairs == 0 { 1.0 } else { self.above as f64 / self.pairs as f64 }
    }

    fn recall_at_10(&self) -> f64 {
        self.recall_at_10 / self.questions as f64
    }

    fn print(&self, name: &str) {
        let [first, five, ten] = self.hits.map(|hits| self.share(hits));
        let (n, recall) = (self.questions, self.recall_at_10());
        let above = if self.pairs == 0 { String::new() } else { format!("{}/{}", self.above, self.pairs) };
        println!("{name:<20}{n:>4}{recall:>11.3}{first:>11.3}{five:>11.3}{ten:>11.3}{above:>9}");
    }
}

/// The measurements of one ranking by category, and over all questions.
#[derive(Default)]
struct Table {
    categories: BTreeMap<String, Measurement>,
    all: Measurement,
}

impl Table {
    fn add(&mut self, question: &Question, found: &[&str]) {
        self.categories.entry(question.category.clone()).or_default().add(question, found);
        self.all.add(question, found);
    }

    fn print(&self, name: &str) {
        println!("{name:<20}   n  recall@10      hit@1      hit@5     hit@10    above");
        for (category, measurement) in &self.categories {
            measurement.print(category);
        }
        self.all.print("all");
    }
}

/// The ids of the memories that a question found, best first: as ranked, and as ranked by similarity alone.
struct Answer<'a> {
    question: &'a Question,
    ranked: Vec<&'a str>,
    by_similarity: Vec<&'a str>,
}

/// Stores a set for its user, in order, and asks its questions.
async fn ask<'a>(api: &InProcessClient, set: &'a RecallSet, mode: &str) -> Vec<Answer<'a>> {
    let api = api.with("x-tenure-user", &set.user);
    let mut labels: HashMap<String, &str> = HashMap::new();
    for memory in &set.memories {
        let mut body = json!({"text": memory.text});
        if let Some(at) = &memory.at {
            body["timestamp"] = json!(at);
        }
        api.advance(60);
        let stored = api.post("/memories", body).await.expect_status(201);
        labels.insert(stored["id"].as_str().unwrap().to_owned(), &memory.id);
    }
    let mut answers = Vec::new();
    for question in &set.questions {
        let query = utf8_percent_encode(&question.text, NON_ALPHANUMERIC);
        let result = api.get(&format!("/memories/search?q={query}&limit={RESULTS}")).await.expect_status(200);
        assert_eq!(result["mode"], mode);
        let mut hits: Vec<&Value> = result["data"].as_array().unwrap().iter().collect();
        let label = |hit: &&Value| labels[hit["id"].as_str().unwrap()];
        let ranked = hits.iter().map(label).collect();
        hits.retain(|hit| hit.get("similarity").is_some());
        hits.sort_by(|a, b| b["similarity"].as_f64().unwrap().total_cmp(&a["similarity"].as_f64().unwrap()));
        let by_similarity = hits.iter().map(label).collect();
        answers.push(Answer { question, ranked, by_similarity });
    }
    answers
}

/// Asks all questions, of all sets concurrently. Returns the measurements of the results as ranked, and as ranked by
/// similarity alone.
async fn measure(api: &InProcessClient, mode: &str) -> (Table, Table) {
    let data = RecallData::load();
    let answers = join_all(data.sets.iter().map(|set| ask(api, set, mode))).await;
    let (mut ranked, mut by_similarity) = (Table::default(), Table::default());
    for answer in answers.into_iter().flatten() {
        ranked.add(answer.question, &answer.ranked);
        by_similarity.add(answer.question, &answer.by_similarity);
    }
    (ranked, by_similarity)
}

async fn measure_words() -> Table {
    let (table, _) = measure(&InProcessClient::memory().await, "full_text").await;
    table.print("full_text");
    table
}

/// Every id is unique, every label names a memory of its set, and every category has a floor.
#[test]
fn the_questions_are_labelled_consistently() {
    let data = RecallData::load();
    let mut ids = HashSet::new();
    let mut categories: HashMap<&str, usize> = HashMap::new();
    for set in &data.sets {
        let own: HashSet<&String> = set.memories.iter().map(|m| &m.id).collect();
        let texts: HashSet<&String> = set.memories.iter().map(|m| &m.text).collect();
        assert_eq!((own.len(), texts.len()), (set.memories.len(), set.memories.len()), "{}: duplicates", set.name);
        assert!(own.iter().all(|id| ids.insert(id.to_string())), "{}: an id of another set", set.name);
        let times: Vec<&String> = set.memories.iter().filter_map(|m| m.at.as_ref()).collect();
        assert!(times.is_sorted(), "{}: not in the order of time", set.name);
        for question in &set.questions {
            *categories.entry(&question.category).or_default() += 1;
            let mut labels = question.evidence.iter().chain(&question.above);
            assert!(!question.evidence.is_empty() && labels.all(|id| own.contains(id)), "{}", question.text);
            assert!(!question.above.iter().any(|id| question.evidence.contains(id)), "{}", question.text);
        }
    }
    assert!(categories.values().sum::<usize>() >= 150, "{categories:?}");
    let mut floors = FLOORS.map(|floor| floor.category);
    let mut found: Vec<&str> = categories.into_keys().collect();
    floors.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, floors);
}

#[tokio::test(flavor = "multi_thread")]
async fn recall_by_words() {
    let words = measure_words().await;
    for floor in FLOORS {
        let found = words.categories[floor.category].hit_at_5();
        assert!(found >= floor.words, "{}: {found}", floor.category);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn recall_by_words_and_meaning() {
    let Ok(path) = std::env::var("TENURE_TEST_MODEL") else {
        assert!(std::env::var("CI").is_err(), "TENURE_TEST_MODEL must be set in CI");
        eprintln!("skipped: TENURE_TEST_MODEL is not set (`make test` sets it)");
        return;
    };
    let api = InProcessClient::with_config("memory:", |config| {
        config.embeddings = Embeddings { model: "local".into(), path, ..Embeddings::default() };
    })
    .await;
    let words = measure_words().await;
    let (hybrid, similarity) = measure(&api, "hybrid").await;
    hybrid.print("hybrid");
    similarity.print("similarity alone");
    for floor in FLOORS {
        let measured = &hybrid.categories[floor.category];
        let (found, above) = (measured.hit_at_5(), measured.above());
        assert!(found >= floor.hybrid && above >= floor.above, "{}: {found}, {above}", floor.category);
    }
    for half in [&words.all, &similarity.all] {
        assert!(hybrid.all.hit_at_5() > half.hit_at_5());
        assert!(hybrid.all.recall_at_10() > half.recall_at_10());
    }
}
