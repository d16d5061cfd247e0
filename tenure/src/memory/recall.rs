//! Recall: finds memories relevant to a question by word search and by embedding similarity, and
//! builds the prompt block that injects them.

use crate::memory::memories::{MemoryLocation, MemoryTarget, findable, is_fresh, memory, shelf};
use crate::memory::vectors::NearestResult;
use crate::rules::prompt::tokens;
use crate::rules::text::words;
use crate::store::item::{Item, Owner};
use crate::tenure::Tenure;
use crate::types::error::Result;
use crate::types::id::{Principal, SessionId, Tenant};
use crate::types::memory::Memory;
use crate::types::message::{Message, Role};
use crate::types::policy::{MemoryPolicy, MemoryScope};
use futures_util::future::try_join_all;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};

/// Namespace of the recall events.
pub(crate) const RECALLS: &str = "recalls";
/// Number of candidates that each search contributes to the ranking.
const CANDIDATES: usize = 50;
/// Constant of the reciprocal rank fusion: it flattens the difference between the first few ranks
/// (D-075).
const RANK: f64 = 60.0;
/// Weight of a rank by similarity relative to a rank by words. Measured: docs/benchmarks.md
/// (D-075).
const MEANING: f64 = 2.0;
/// Minimum weighted share of the question's words that a word match must contain if similarity
/// search is available: words such as `what`, `is` and `her` occur everywhere.
const MIN_SHARE: f64 = 0.3;
/// Number of memories read from the store concurrently.
const CONCURRENT_READS: usize = 16;

/// Maximum number of recall events stored per session or user.
const RECALLS_KEPT: usize = 512;
/// Maximum length of a question in bytes. Longer questions are truncated.
const MAX_QUESTION: usize = 4096;

/// The result of a recall.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RecallResult {
    /// The memories, best match first.
    pub memories: Vec<RecallHit>,
    /// Whether embedding similarity was used in addition to word search.
    pub by_meaning: bool,
    /// The reason why similarity was not used. `None` if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// A recalled memory with its score.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RecallHit {
    /// The relevance score, comparable only within one result.
    pub score: f64,
    /// Cosine similarity to the question, from -1 to 1. `None` if it was found by words only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub similarity: Option<f32>,
    /// The memory itself.
    #[serde(flatten)]
    pub memory: Memory,
}

/// A memory that was injected into a prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InjectedMemory {
    /// The id of the memory.
    pub id: String,
    /// The relevance score of its recall.
    pub score: f64,
}

/// A stored recall event. Dreams promote memories on the basis of these events.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RecallEvent {
    pub question: String,
    pub at: Timestamp,
    pub found: Vec<InjectedMemory>,
}

/// The memory injection of a turn.
#[derive(Clone, Debug)]
pub(crate) struct MemoryInjection {
    /// The system message for the prompt.
    pub block: Message,
    /// The memories that it contains.
    pub told: Vec<InjectedMemory>,
    /// The recall event, to be committed with the run's next step.
    pub event: Item,
}

/// Maps each key to its rank, counted from 0.
fn places<'a>(keys: impl Iterator<Item = &'a str>) -> HashMap<&'a str, usize> {
    keys.enumerate().map(|(place, key)| (key, place)).collect()
}

/// Merges two ranked lists by weighted reciprocal rank fusion (D-075).
fn fuse(words: &[String], meaning: &[(String, f32)]) -> Vec<(String, f64)> {
    let (by_words, by_meaning) =
        (places(words.iter().map(String::as_str)), places(meaning.iter().map(|(k, _)| k.as_str())));
    let worth = |place: Option<&usize>| place.map_or(0.0, |p| 1.0 / (RANK + 1.0 + *p as f64));
    let rest = meaning.iter().map(|(k, _)| k).filter(|k| !by_words.contains_key(k.as_str()));
    let score = |key: &String| worth(by_words.get(key.as_str())) + MEANING * worth(by_meaning.get(key.as_str()));
    let mut all: Vec<_> = words.iter().chain(rest).map(|key| (key.clone(), score(key))).collect();
    all.sort_by(|(a, x), (b, y)| y.total_cmp(x).then_with(|| a.cmp(b)));
    all
}

/// The words of a question with their weights. Short words weigh less, except numbers and non-ASCII
/// words: in some scripts a single character is a word.
fn weights(question: &str) -> HashMap<String, f64> {
    let weight = |word: &str| {
        let says = !word.is_ascii() || word.bytes().any(|b| b.is_ascii_digit());
        word.chars().count().saturating_sub(if says { 0 } else { 2 }) as f64
    };
    words(&findable(question)).into_iter().map(|word| (weight(&word), word)).map(|(n, word)| (word, n)).collect()
}

/// The weighted share of a question's words that occur in a text, from 0 to 1.
fn share(weights: &HashMap<String, f64>, text: &str) -> f64 {
    let there: HashSet<String> = words(text).into_iter().collect();
    let found: f64 = weights.iter().filter(|(word, _)| there.contains(*word)).map(|(_, n)| n).sum();
    found / weights.values().sum::<f64>().max(1.0)
}

impl Tenure {
    /// Finds the memories most relevant to a question, best match first. Updates their last-use
    /// times and stores a recall event.
    pub async fn recall(
        &self,
        who: &Principal,
        mind: &MemoryTarget,
        question: &str,
        limit: usize,
    ) -> Result<RecallResult> {
        let place = self.mind(who, mind).await?;
        let recalled = self.recall_at(&place, question, limit).await?;
        if let Some(event) = self.event(question, &recalled.memories) {
            let owner = match &place.session {
                Some(head) => Owner::Session(head.info.session_id.clone()),
                None => Owner::User(who.user.clone()),
            };
            self.store().put(&shelf(&who.tenant, owner, RECALLS), &event, Some(RECALLS_KEPT)).await?;
        }
        Ok(recalled)
    }

    async fn recall_at(&self, place: &MemoryLocation, question: &str, limit: usize) -> Result<RecallResult> {
        let (question, _) = self.redact(clipped(question));
        let question = &*question;
        if question.trim().is_empty() || limit == 0 {
            return Ok(RecallResult::default());
        }
        let at = &place.shelf;
        let many = CANDIDATES.max(limit);
        let sought = findable(question);
        let (words, near) = tokio::join!(self.store().search(at, &sought, many), self.nearest(at, question, many));
        let now = self.now();
        let (near, by_meaning, note) = match near? {
            NearestResult::Found(near) => (near, true, None),
            NearestResult::Not(why) => (Vec::new(), false, Some(format!("by words only: {why}"))),
        };
        let weights = weights(question);
        let counts = |item: &Item| {
            is_fresh(item, now)
                && (!by_meaning || share(&weights, item.text.as_deref().unwrap_or_default()) >= MIN_SHARE)
        };
        let words: Vec<String> = words?.into_iter().filter(|h| counts(&h.item)).map(|h| h.item.key).collect();
        let mut best = fuse(&words, &near).into_iter();
        let mut memories = Vec::new();
        // Some may have been removed or have expired since the search; continue with the next
        // candidates.
        while memories.len() < limit && best.len() > 0 {
            let wanted: Vec<_> = best.by_ref().take(limit - memories.len()).collect();
            let mut found: Vec<Option<Item>> = Vec::with_capacity(wanted.len());
            for keys in wanted.chunks(CONCURRENT_READS) {
                found.extend(try_join_all(keys.iter().map(|(key, _)| self.store().get(at, key, Some(now)))).await?);
            }
            for ((key, score), item) in wanted.iter().zip(found) {
                let Some(item) = item.filter(|item| is_fresh(item, now)) else { continue };
                let score = *score;
                let similarity = near.iter().find(|(k, _)| k == key).map(|(_, cosine)| *cosine);
                memories.push(RecallHit { score, similarity, memory: memory(at, item)? });
            }
        }
        Ok(RecallResult { memories, by_meaning, note })
    }

    fn event(&self, question: &str, found: &[RecallHit]) -> Option<Item> {
        if found.is_empty() {
            return None;
        }
        let found = found.iter().map(|h| InjectedMemory { id: h.memory.id.clone(), score: h.score }).collect();
        let (question, _) = self.redact(clipped(question));
        let event = RecallEvent { question: question.replace('\0', " "), at: self.now(), found };
        let value = serde_json::to_string(&event).expect("plain data");
        Some(self.lasting(uuid::Uuid::now_v7().to_string(), value))
    }

    /// Returns true if the policy injects memories into prompts.
    pub(crate) fn tells(&self, tenant: &Tenant, assistant: Option<&str>) -> bool {
        let policy = self.policy(tenant, assistant).memory;
        policy.scope != MemoryScope::None && policy.inject
    }

    /// Recalls memories for injection into a prompt, if the policy requests it. Failures are logged
    /// and never fail a turn.
    pub(crate) async fn recollect(
        &self,
        who: &Principal,
        id: &SessionId,
        assistant: Option<&str>,
        said: &[Message],
    ) -> Option<MemoryInjection> {
        if !self.tells(&who.tenant, assistant) {
            return None;
        }
        let policy = self.policy(&who.tenant, assistant).memory;
        let question = said.iter().rev().find(|m| m.role() == Role::User)?.text();
        let recalled = async {
            let place = self.mind(who, &MemoryTarget::Session(id.clone())).await?;
            self.recall_at(&place, &question, policy.limit).await
        };
        match recalled.await {
            Ok(recalled) => {
                let (block, told) = block(recalled.memories.clone(), &policy)?;
                Some(MemoryInjection { block, told, event: self.event(&question, &recalled.memories)? })
            }
            Err(e) => {
                tracing::warn!(session_id = %id, error = %e, "nothing was recalled");
                None
            }
        }
    }
}

/// Formats memories as one system message, newest first. A memory that would exceed `max_tokens` is
/// skipped. `None` if none fits.
fn block(mut found: Vec<RecallHit>, policy: &MemoryPolicy) -> Option<(Message, Vec<InjectedMemory>)> {
    found.sort_by(|a, b| (b.memory.created_at, &a.memory.id).cmp(&(a.memory.created_at, &b.memory.id)));
    let mut lines = vec![
        "[memories] What was remembered before and may matter now, the newest first. Where two differ, the newer one holds."
            .to_owned(),
    ];
    let mut told = Vec::new();
    let message = |lines: &[String]| Message::system(&format!("{}\n[/memories]", lines.join("\n")));
    for hit in found {
        let text: Vec<&str> = hit.memory.text.split_whitespace().collect();
        lines.push(format!("- {}: {}", hit.memory.created_at.strftime("%Y-%m-%d"), text.join(" ")));
        if tokens(&message(&lines)) > policy.max_tokens {
            lines.pop();
            continue;
        }
        told.push(InjectedMemory { id: hit.memory.id, score: hit.score });
    }
    (!told.is_empty()).then(|| (message(&lines), told))
}

/// Inserts the memory block after the instructions and before the turns (D-076).
pub(crate) fn with_block(mut messages: Vec<Message>, block: Option<&Message>) -> Vec<Message> {
    if let Some(block) = block {
        let at = messages.iter().take_while(|m| m.role().instructs()).count();
        messages.insert(at, block.clone());
    }
    messages
}

fn clipped(question: &str) -> &str {
    &question[..question.floor_char_boundary(MAX_QUESTION)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(list: &[&str]) -> Vec<String> {
        list.iter().map(|k| (*k).to_owned()).collect()
    }

    #[test]
    fn two_lists_become_one() {
        let near = |list: &[&str]| -> Vec<(String, f32)> { list.iter().map(|k| ((*k).to_owned(), 0.5)).collect() };
        let fused = |a: &[&str], b: &[&str]| -> Vec<String> {
            fuse(&keys(a), &near(b)).into_iter().map(|(key, _)| key).collect()
        };
        assert_eq!(fused(&["a", "b", "c"], &[]), ["a", "b", "c"]);
        assert_eq!(fused(&[], &["c", "a"]), ["c", "a"]);
        assert_eq!(fused(&["x", "both"], &["y", "both"]), ["both", "y", "x"]);
        assert_eq!(fused(&["x"], &["y"]), ["y", "x"], "what is meant counts more than how it is said");
        assert_eq!(fused(&[], &[]), Vec::<String>::new());
    }

    #[test]
    fn common_words_say_little() {
        let of = |question: &str, text: &str| share(&weights(question), text);
        assert!(of("What is her favourite tea?", "What is in her bag") < MIN_SHARE);
        assert!(of("What is her favourite tea?", "favourite colour: green") > MIN_SHARE);
        assert!(of("who has 88?", "locker 88 is hers") > MIN_SHARE);
        assert!(of("緑茶", &findable("彼女は緑茶が好きです")) > MIN_SHARE);
        assert_eq!(of("", "anything"), 0.0);
    }
}
