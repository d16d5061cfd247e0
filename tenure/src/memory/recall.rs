//! Recall: finds memories relevant to a question by word search and by embedding similarity, and
//! builds the prompt block that injects them.

use crate::memory::memories::{MemoryLocation, MemoryTarget, indexable_text, is_fresh, memory_from_item, namespace_of};
use crate::memory::vectors::NearestResult;
use crate::rules::prompt::tokens;
use crate::rules::text::words;
use crate::store::item::{Item, Namespace, Owner};
use crate::tenure::Tenure;
use crate::types::error::Result;
use crate::types::id::{Principal, SessionId, Tenant};
use crate::types::memory::{Memory, MemoryKind};
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
const RRF_CONSTANT: f64 = 60.0;
/// Weight of a rank by similarity relative to a rank by words. Measured: docs/benchmarks.md
/// (D-075).
const SIMILARITY_WEIGHT: f64 = 2.0;
/// Minimum weighted share of the question's words that a word match must contain if similarity
/// search is available: words such as `what`, `is` and `her` occur everywhere.
const MIN_SHARE: f64 = 0.3;
/// Number of memories read from the store concurrently.
const CONCURRENT_READS: usize = 16;

/// Maximum number of recall events stored per session or user.
const MAX_RECALLS: usize = 512;
/// Maximum length of a question in bytes. Longer questions are truncated.
const MAX_QUESTION_BYTES: usize = 4096;

/// The result of a recall.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
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
#[non_exhaustive]
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
    /// The relevance score of its recall, 0 for a preference, which is injected in every turn.
    pub score: f64,
    /// Why it was injected: a fact is relevant to the question, a preference always applies.
    #[serde(default)]
    pub kind: MemoryKind,
}

/// A stored recall event. Dreams promote memories on the basis of these events.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RecallEvent {
    pub question: String,
    pub at: Timestamp,
    pub memories: Vec<InjectedMemory>,
}

/// The memory injection of a turn.
#[derive(Clone, Debug)]
pub(crate) struct MemoryInjection {
    /// The system message for the prompt.
    pub block: Message,
    /// The memories that it contains.
    pub memories: Vec<InjectedMemory>,
    /// The recall event, to be committed with the run's next step. `None` if only preferences are injected.
    pub event: Option<Item>,
}

/// Maps each key to its rank, counted from 0.
fn ranks<'a>(keys: impl Iterator<Item = &'a str>) -> HashMap<&'a str, usize> {
    keys.enumerate().map(|(rank, key)| (key, rank)).collect()
}

/// Merges two ranked lists by weighted reciprocal rank fusion (D-075).
fn fuse(word_hits: &[String], similar: &[(String, f32)]) -> Vec<(String, f64)> {
    let word_ranks = ranks(word_hits.iter().map(String::as_str));
    let similarity_ranks = ranks(similar.iter().map(|(k, _)| k.as_str()));
    let reciprocal_rank = |rank: Option<&usize>| rank.map_or(0.0, |r| 1.0 / (RRF_CONSTANT + 1.0 + *r as f64));
    let rest = similar.iter().map(|(k, _)| k).filter(|k| !word_ranks.contains_key(k.as_str()));
    let score = |key: &String| {
        reciprocal_rank(word_ranks.get(key.as_str()))
            + SIMILARITY_WEIGHT * reciprocal_rank(similarity_ranks.get(key.as_str()))
    };
    let mut all: Vec<_> = word_hits.iter().chain(rest).map(|key| (key.clone(), score(key))).collect();
    all.sort_by(|(a, x), (b, y)| y.total_cmp(x).then_with(|| a.cmp(b)));
    all
}

/// The words of a question with their weights. Short words weigh less, except numbers and non-ASCII
/// words: in some scripts a single character is a word.
fn weights(question: &str) -> HashMap<String, f64> {
    let weight = |word: &str| {
        let is_significant = !word.is_ascii() || word.bytes().any(|b| b.is_ascii_digit());
        word.chars().count().saturating_sub(if is_significant { 0 } else { 2 }) as f64
    };
    words(&indexable_text(question)).into_iter().map(|word| (weight(&word), word)).map(|(n, word)| (word, n)).collect()
}

/// The weighted share of a question's words that occur in a text, from 0 to 1.
fn share(weights: &HashMap<String, f64>, text: &str) -> f64 {
    let text_words: HashSet<String> = words(text).into_iter().collect();
    let matched: f64 = weights.iter().filter(|(word, _)| text_words.contains(*word)).map(|(_, n)| n).sum();
    matched / weights.values().sum::<f64>().max(1.0)
}

impl Tenure {
    /// Finds the memories most relevant to a question, best match first. Updates their last-use
    /// times and stores a recall event.
    pub async fn recall(
        &self,
        principal: &Principal,
        target: &MemoryTarget,
        question: &str,
        limit: usize,
    ) -> Result<RecallResult> {
        let location = self.resolve_memory_target(principal, target).await?;
        let result = self.recall_in(&location, question, limit).await?;
        if let Some(event) = self.recall_event(question, &result.memories) {
            let owner = match &location.session {
                Some(head) => Owner::Session(head.info.session_id.clone()),
                None => Owner::User(principal.user.clone()),
            };
            self.store().put(&namespace_of(&principal.tenant, owner, RECALLS), &event, Some(MAX_RECALLS)).await?;
        }
        Ok(result)
    }

    async fn recall_in(&self, location: &MemoryLocation, question: &str, limit: usize) -> Result<RecallResult> {
        let (question, _) = self.redact(truncated(question));
        let question = &*question;
        if question.trim().is_empty() || limit == 0 {
            return Ok(RecallResult::default());
        }
        let namespace = &location.namespace;
        let candidates = CANDIDATES.max(limit);
        let query = indexable_text(question);
        let (word_hits, nearest) = tokio::join!(
            self.store().search(namespace, &query, candidates),
            self.nearest(namespace, question, candidates)
        );
        let now = self.now();
        let (nearest, by_meaning, note) = match nearest? {
            NearestResult::Found(nearest) => (nearest, true, None),
            NearestResult::Skipped(reason) => {
                (Vec::new(), false, Some(format!("similarity search was not used: {reason}")))
            }
        };
        let weights = weights(question);
        let is_relevant = |item: &Item| {
            is_fresh(item, now)
                && (!by_meaning || share(&weights, item.text.as_deref().unwrap_or_default()) >= MIN_SHARE)
        };
        let word_hits: Vec<String> =
            word_hits?.into_iter().filter(|h| is_relevant(&h.item)).map(|h| h.item.key).collect();
        let memories = self.read_hits(namespace, fuse(&word_hits, &nearest), &nearest, limit).await?;
        Ok(RecallResult { memories, by_meaning, note })
    }

    /// Reads the best `limit` memories of a ranking, and updates their last-use times. Some may have
    /// been removed or have expired since the search; the next candidates take their places.
    async fn read_hits(
        &self,
        namespace: &Namespace,
        ranked: Vec<(String, f64)>,
        nearest: &[(String, f32)],
        limit: usize,
    ) -> Result<Vec<RecallHit>> {
        let now = self.now();
        let mut ranked = ranked.into_iter();
        let mut memories = Vec::new();
        while memories.len() < limit && ranked.len() > 0 {
            let batch: Vec<_> = ranked.by_ref().take((limit - memories.len()).min(CONCURRENT_READS)).collect();
            let reads = batch.iter().map(|(key, _)| self.store().get(namespace, key, Some(now)));
            let items = try_join_all(reads).await?;
            for ((key, score), item) in batch.into_iter().zip(items) {
                let Some(item) = item.filter(|item| is_fresh(item, now)) else { continue };
                let similarity = nearest.iter().find(|(k, _)| *k == key).map(|(_, cosine)| *cosine);
                memories.push(RecallHit { score, similarity, memory: memory_from_item(namespace, item)? });
            }
        }
        Ok(memories)
    }

    fn recall_event(&self, question: &str, hits: &[RecallHit]) -> Option<Item> {
        if hits.is_empty() {
            return None;
        }
        let memories = hits.iter().map(InjectedMemory::of_hit).collect();
        let (question, _) = self.redact(truncated(question));
        let event = RecallEvent { question: question.replace('\0', " "), at: self.now(), memories };
        let value = serde_json::to_string(&event).expect("plain data");
        Some(self.permanent_item(uuid::Uuid::now_v7().to_string(), value))
    }

    /// Returns true if the policy injects memories into prompts. The memories of a session without an assistant
    /// are recalled on request only, so that its model can be called before they could be read (D-130).
    pub(crate) fn injects_memories(&self, tenant: &Tenant, assistant: Option<&str>) -> bool {
        let policy = self.policy(tenant, assistant).memory;
        let is_in_scope = match policy.scope {
            MemoryScope::None => false,
            MemoryScope::Session => assistant.is_some(),
            MemoryScope::User | MemoryScope::Group => true,
        };
        is_in_scope && policy.inject
    }

    /// Reads all preferences, and recalls at most `limit` facts. Costs one read if there are no memories.
    async fn memories_for_prompt(
        &self,
        principal: &Principal,
        id: &SessionId,
        question: &str,
        limit: usize,
    ) -> Result<(Vec<Memory>, Vec<RecallHit>)> {
        let location = self.resolve_memory_target(principal, &MemoryTarget::Session(id.clone())).await?;
        if self.store().items(&location.namespace, None, 1).await?.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let preferences = self.preferences(&location.namespace, Some(self.now())).await?;
        // A recall finds preferences too; they must not take the places of facts.
        let candidates = if limit == 0 { 0 } else { limit + preferences.len() };
        let mut facts = self.recall_in(&location, question, candidates).await?.memories;
        facts.retain(|hit| hit.memory.kind == MemoryKind::Fact);
        facts.truncate(limit);
        Ok((preferences, facts))
    }

    /// Recalls memories for injection into a prompt, if the policy requests it. Failures are logged
    /// and never fail a turn.
    pub(crate) async fn recall_for_prompt(
        &self,
        principal: &Principal,
        id: &SessionId,
        assistant: Option<&str>,
        messages: &[Message],
    ) -> Option<MemoryInjection> {
        if !self.injects_memories(&principal.tenant, assistant) {
            return None;
        }
        let policy = self.policy(&principal.tenant, assistant).memory;
        let question = messages.iter().rev().find(|m| m.role() == Role::User).map(Message::text).unwrap_or_default();
        match self.memories_for_prompt(principal, id, &question, policy.limit).await {
            Ok((preferences, facts)) => {
                let event = self.recall_event(&question, &facts);
                let (block, memories) = memory_block(preferences, facts, &policy)?;
                Some(MemoryInjection { block, memories, event })
            }
            Err(e) => {
                tracing::warn!(session_id = %id, error = %e, "recall failed; the turn continues without memories");
                None
            }
        }
    }
}

impl InjectedMemory {
    fn of_hit(hit: &RecallHit) -> Self {
        Self { id: hit.memory.id.clone(), score: hit.score, kind: hit.memory.kind }
    }
}

/// Formats preferences and facts as one system message, each newest first. A memory that would exceed
/// `max_tokens` is skipped; preferences may use half of that, so that there is room for facts. `None` if none
/// fits.
fn memory_block(
    preferences: Vec<Memory>,
    facts: Vec<RecallHit>,
    policy: &MemoryPolicy,
) -> Option<(Message, Vec<InjectedMemory>)> {
    let mut block = MemoryBlock::default();
    let mut preferences: Vec<RecallHit> =
        preferences.into_iter().map(|memory| RecallHit { score: 0.0, similarity: None, memory }).collect();
    newest_first(&mut preferences);
    block.add(PREFERENCES_SECTION, preferences, policy.max_tokens / 2);
    let mut facts = facts;
    newest_first(&mut facts);
    block.add(FACTS_SECTION, facts, policy.max_tokens);
    (!block.injected.is_empty()).then(|| (block.message(), block.injected))
}

fn newest_first(hits: &mut [RecallHit]) {
    hits.sort_by(|a, b| (b.memory.created_at, &a.memory.id).cmp(&(a.memory.created_at, &b.memory.id)));
}

/// A section of the memory block: the name of its brackets, and its introduction.
type Section = (&'static str, &'static str);

const PREFERENCES_SECTION: Section = (
    "preferences",
    "Preferences, newest first. Follow them in every answer. If two contradict, the newer one applies.",
);
const FACTS_SECTION: Section =
    ("memories", "Facts from earlier conversations, newest first. If two contradict, the newer one applies.");

/// The memories of a prompt, in sections.
#[derive(Default)]
struct MemoryBlock {
    lines: Vec<String>,
    injected: Vec<InjectedMemory>,
}

impl MemoryBlock {
    /// Adds a section with the memories that fit into `max_tokens` for the whole block. Nothing is added if none
    /// fits.
    fn add(&mut self, (name, introduction): Section, hits: Vec<RecallHit>, max_tokens: usize) {
        let end = format!("[/{name}]");
        let start = self.lines.len();
        self.lines.push(format!("[{name}] {introduction}"));
        for hit in hits {
            let text: Vec<&str> = hit.memory.text.split_whitespace().collect();
            self.lines.push(format!("- {}: {}", hit.memory.created_at.strftime("%Y-%m-%d"), text.join(" ")));
            self.lines.push(end.clone());
            let is_too_long = tokens(&self.message()) > max_tokens;
            self.lines.pop();
            if is_too_long {
                self.lines.pop();
                continue;
            }
            self.injected.push(InjectedMemory::of_hit(&hit));
        }
        if self.lines.len() == start + 1 {
            self.lines.truncate(start);
        } else {
            self.lines.push(end);
        }
    }

    fn message(&self) -> Message {
        Message::system(&self.lines.join("\n"))
    }
}

/// Inserts the memory block after the instructions and before the turns (D-076).
pub(crate) fn with_block(mut messages: Vec<Message>, block: Option<&Message>) -> Vec<Message> {
    if let Some(block) = block {
        let position = messages.iter().take_while(|m| m.role().is_instruction()).count();
        messages.insert(position, block.clone());
    }
    messages
}

fn truncated(question: &str) -> &str {
    &question[..question.floor_char_boundary(MAX_QUESTION_BYTES)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(list: &[&str]) -> Vec<String> {
        list.iter().map(|k| (*k).to_owned()).collect()
    }

    #[test]
    fn ranked_lists_are_fused() {
        let near = |list: &[&str]| -> Vec<(String, f32)> { list.iter().map(|k| ((*k).to_owned(), 0.5)).collect() };
        let fused = |a: &[&str], b: &[&str]| -> Vec<String> {
            fuse(&keys(a), &near(b)).into_iter().map(|(key, _)| key).collect()
        };
        assert_eq!(fused(&["a", "b", "c"], &[]), ["a", "b", "c"]);
        assert_eq!(fused(&[], &["c", "a"]), ["c", "a"]);
        assert_eq!(fused(&["x", "both"], &["y", "both"]), ["both", "y", "x"]);
        assert_eq!(fused(&["x"], &["y"]), ["y", "x"], "similarity outweighs words");
        assert_eq!(fused(&[], &[]), Vec::<String>::new());
    }

    #[test]
    fn common_words_have_little_weight() {
        let share_of = |question: &str, text: &str| share(&weights(question), text);
        assert!(share_of("What is her favourite tea?", "What is in her bag") < MIN_SHARE);
        assert!(share_of("What is her favourite tea?", "favourite colour: green") > MIN_SHARE);
        assert!(share_of("who has 88?", "locker 88 is hers") > MIN_SHARE);
        assert!(share_of("緑茶", &indexable_text("彼女は緑茶が好きです")) > MIN_SHARE);
        assert_eq!(share_of("", "anything"), 0.0);
    }
}
