//! Recall: memories that have to do with a question, found by their words and by their meaning, and what a model is told of them.

use crate::memory::memories::{Mind, Place, findable, is_fresh, memory, shelf};
use crate::memory::vectors::Near;
use crate::rules::prompt::tokens;
use crate::rules::text::words;
use crate::store::item::{Item, Owner};
use crate::tenure::Tenure;
use crate::types::error::Result;
use crate::types::id::{Principal, SessionId, Tenant};
use crate::types::memory::Memory;
use crate::types::message::{Message, Role};
use crate::types::policy::{MemoryPolicy, Scope};
use futures_util::future::try_join_all;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};

pub(crate) const RECALLS: &str = "recalls";
/// So many of each kind are put in order.
const CANDIDATES: usize = 50;
/// Reciprocal ranks are taken from here on: the first few are about as good as each other.
const RANK: f64 = 60.0;
/// A place by meaning counts so many times a place by words. Measured: docs/benchmarks.md.
const MEANING: f64 = 2.0;
/// Beside what is meant, words count only where so much of the question is there: `what`, `is` and `her` are everywhere.
const MIN_SHARE: f64 = 0.3;
/// How many found memories are read from the store concurrently.
const CONCURRENT_READS: usize = 16;

/// So many recalls are written down for each session or user.
const RECALLS_KEPT: usize = 512;
/// Longer questions are cut off.
const MAX_QUESTION: usize = 4096;

/// What was recalled.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Recalled {
    /// The memories, the best first.
    pub memories: Vec<Recall>,
    /// Whether they were looked for by meaning too, and not by their words alone.
    pub by_meaning: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// A memory that was recalled.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recall {
    /// How well it fits, comparable within one answer only.
    pub score: f64,
    /// How alike it is in meaning, from -1 to 1, if that is how it was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub similarity: Option<f32>,
    /// The memory.
    #[serde(flatten)]
    pub memory: Memory,
}

/// A memory that a model was told of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Told {
    /// Its id.
    pub id: String,
    /// How well it fits.
    pub score: f64,
}

/// That something was recalled: what a dream goes by.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Event {
    pub question: String,
    pub at: Timestamp,
    pub found: Vec<Told>,
}

/// What a turn begins with besides its messages.
#[derive(Clone, Debug)]
pub(crate) struct Recollection {
    /// What the model is told.
    pub block: Message,
    /// Which memories that are.
    pub told: Vec<Told>,
    /// To be written down with the next step.
    pub event: Item,
}

/// The places of one list, by key, from 0.
fn places<'a>(keys: impl Iterator<Item = &'a str>) -> HashMap<&'a str, usize> {
    keys.enumerate().map(|(place, key)| (key, place)).collect()
}

/// Two lists as one: each key counts by its places in both.
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

/// The words of a question, and how much each says. Short words say little, but not numbers, nor where every letter is a word.
fn weights(question: &str) -> HashMap<String, f64> {
    let weight = |word: &str| {
        let says = !word.is_ascii() || word.bytes().any(|b| b.is_ascii_digit());
        word.chars().count().saturating_sub(if says { 0 } else { 2 }) as f64
    };
    words(&findable(question)).into_iter().map(|word| (weight(&word), word)).map(|(n, word)| (word, n)).collect()
}

/// How much of a question is in a text, from 0 to 1.
fn share(weights: &HashMap<String, f64>, text: &str) -> f64 {
    let there: HashSet<String> = words(text).into_iter().collect();
    let found: f64 = weights.iter().filter(|(word, _)| there.contains(*word)).map(|(_, n)| n).sum();
    found / weights.values().sum::<f64>().max(1.0)
}

impl Tenure {
    /// Memories that have to do with a question, the best first. Each counts as used.
    pub async fn recall(&self, who: &Principal, mind: &Mind, question: &str, limit: usize) -> Result<Recalled> {
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

    async fn recall_at(&self, place: &Place, question: &str, limit: usize) -> Result<Recalled> {
        let (question, _) = self.redact(clipped(question));
        let question = &*question;
        if question.trim().is_empty() || limit == 0 {
            return Ok(Recalled::default());
        }
        let at = &place.shelf;
        let many = CANDIDATES.max(limit);
        let sought = findable(question);
        let (words, near) = tokio::join!(self.store().search(at, &sought, many), self.nearest(at, question, many));
        let now = self.now();
        let (near, by_meaning, note) = match near? {
            Near::Found(near) => (near, true, None),
            Near::Not(why) => (Vec::new(), false, Some(format!("by words only: {why}"))),
        };
        let weights = weights(question);
        let counts = |item: &Item| {
            is_fresh(item, now)
                && (!by_meaning || share(&weights, item.text.as_deref().unwrap_or_default()) >= MIN_SHARE)
        };
        let words: Vec<String> = words?.into_iter().filter(|h| counts(&h.item)).map(|h| h.item.key).collect();
        let mut best = fuse(&words, &near).into_iter();
        let mut memories = Vec::new();
        // Some may have gone since they were found.
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
                memories.push(Recall { score, similarity, memory: memory(at, item)? });
            }
        }
        Ok(Recalled { memories, by_meaning, note })
    }

    fn event(&self, question: &str, found: &[Recall]) -> Option<Item> {
        if found.is_empty() {
            return None;
        }
        let found = found.iter().map(|h| Told { id: h.memory.id.clone(), score: h.score }).collect();
        let (question, _) = self.redact(clipped(question));
        let event = Event { question: question.replace('\0', " "), at: self.now(), found };
        let value = serde_json::to_string(&event).expect("plain data");
        Some(self.lasting(uuid::Uuid::now_v7().to_string(), value))
    }

    /// Whether a model is told of what is remembered.
    pub(crate) fn tells(&self, tenant: &Tenant, assistant: Option<&str>) -> bool {
        let policy = self.policy(tenant, assistant).memory;
        policy.scope != Scope::None && policy.inject
    }

    /// What the model is to be told of what is remembered, if its assistant wants that. Trouble with it never stops a turn.
    pub(crate) async fn recollect(
        &self,
        who: &Principal,
        id: &SessionId,
        assistant: Option<&str>,
        said: &[Message],
    ) -> Option<Recollection> {
        if !self.tells(&who.tenant, assistant) {
            return None;
        }
        let policy = self.policy(&who.tenant, assistant).memory;
        let question = said.iter().rev().find(|m| m.role() == Role::User)?.text();
        let recalled = async {
            let place = self.mind(who, &Mind::Session(id.clone())).await?;
            self.recall_at(&place, &question, policy.limit).await
        };
        match recalled.await {
            Ok(recalled) => {
                let (block, told) = block(recalled.memories.clone(), &policy)?;
                Some(Recollection { block, told, event: self.event(&question, &recalled.memories)? })
            }
            Err(e) => {
                tracing::warn!(session_id = %id, error = %e, "nothing was recalled");
                None
            }
        }
    }
}

/// Memories as one system message, the newest first: where not all fit, the oldest are left out.
fn block(mut found: Vec<Recall>, policy: &MemoryPolicy) -> Option<(Message, Vec<Told>)> {
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
        told.push(Told { id: hit.memory.id, score: hit.score });
    }
    (!told.is_empty()).then(|| (message(&lines), told))
}

/// Puts what is remembered behind the messages that instruct.
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
