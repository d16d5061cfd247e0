//! Recall: finds the memories that are relevant to questions, by their words and by their meaning.

use crate::engine::memory_index::{MemoryIndex, Question, RankedMemory, SharedIndex};
use crate::memory::index::lock;
use crate::memory::memories::{MemoryLocation, MemoryTarget, is_fresh, memory_from_item, namespace_of};
use crate::store::item::{Item, Namespace, Owner};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::id::Principal;
use crate::types::memory::{Memory, MemoryKind};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Namespace of the recall events.
pub(crate) const RECALLS: &str = "recalls";
/// Maximum number of questions of one recall.
pub const MAX_QUESTIONS: usize = 8;
/// Maximum number of recall events stored per session or user.
const MAX_RECALLS: usize = 512;
/// The minimum similarity of a memory that counts as recalled for dreams, unless it contains a word of the question:
/// a result that only fills the list, or is found by the words of its neighbours, is not relevant to the question.
const COUNTED_SIMILARITY: f32 = 0.3;
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
    /// The relevance score, comparable only within one result: the coverage, or the weighted sum of coverage and
    /// similarity. A memory that supersedes another one has at least the score of that.
    pub score: f64,
    /// How much of the question's words the memory contains, weighted by their rarity, from 0 to 1. Words of the
    /// memories stored right before and after it count in part.
    pub coverage: f64,
    /// Whether the memory contains a word of the question that is not a function word.
    #[serde(skip)]
    pub(crate) has_word: bool,
    /// Cosine similarity to the question, from -1 to 1. `None` if it has no vector.
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

impl InjectedMemory {
    pub(crate) fn of_hit(hit: &RecallHit) -> Self {
        Self { id: hit.memory.id.clone(), score: hit.score, kind: hit.memory.kind }
    }
}

/// Whether a recall returns memories that newer ones supersede.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Superseded {
    /// They are returned, each after the memory that supersedes it.
    Included,
    /// They are omitted.
    Omitted,
}

/// A stored recall event. Dreams promote memories on the basis of these events.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RecallEvent {
    pub question: String,
    pub at: Timestamp,
    pub memories: Vec<InjectedMemory>,
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
        self.recall_any(principal, target, &[question], limit).await
    }

    /// Like [`Tenure::recall`], for the memories that are relevant to any of several questions, at most
    /// [`MAX_QUESTIONS`]: each memory is ranked by the question that it matches best.
    pub async fn recall_any(
        &self,
        principal: &Principal,
        target: &MemoryTarget,
        questions: &[&str],
        limit: usize,
    ) -> Result<RecallResult> {
        if questions.len() > MAX_QUESTIONS {
            let message = format!("a recall has at most {MAX_QUESTIONS} questions, not {}", questions.len());
            return Err(Error::invalid("questions", message));
        }
        let location = self.resolve_memory_target(principal, target).await?;
        let result = self.recall_in(&location, questions, limit, Superseded::Included).await?;
        if let Some(event) = self.recall_event(&questions.join("\n"), &result.memories) {
            let owner = match &location.session {
                Some(head) => Owner::Session(head.info.session_id.clone()),
                None => Owner::User(principal.user.clone()),
            };
            self.store().put(&namespace_of(&principal.tenant, owner, RECALLS), &event, Some(MAX_RECALLS)).await?;
        }
        Ok(result)
    }

    pub(crate) async fn recall_in(
        &self,
        location: &MemoryLocation,
        questions: &[&str],
        limit: usize,
        superseded: Superseded,
    ) -> Result<RecallResult> {
        let redacted = questions.iter().map(|question| self.redact(truncated(question)).0.into_owned());
        let questions: Vec<String> = redacted.filter(|question| !question.trim().is_empty()).collect();
        if questions.is_empty() || limit == 0 {
            return Ok(RecallResult::default());
        }
        let namespace = &location.namespace;
        let (questions, note) = self.prepare_questions(&questions).await?;
        let index = self.searchable_index(namespace).await?;
        let mut ranked = lock(&index).rank(&questions);
        ranked.retain(|memory| superseded == Superseded::Included || !memory.is_superseded);
        let memories = self.read_hits(namespace, ranked, limit).await?;
        Ok(RecallResult { memories, by_meaning: note.is_none(), note })
    }

    /// Computes the terms and vectors of questions. Without vectors, also returns the reason.
    async fn prepare_questions(&self, questions: &[String]) -> Result<(Vec<Question>, Option<String>)> {
        let (vectors, note) = match self.question_vectors(questions).await {
            Ok(vectors) => (vectors.into_iter().map(Some).collect(), None),
            Err(reason) => (vec![None; questions.len()], Some(format!("similarity search was not used: {reason}"))),
        };
        let prepared = questions.iter().zip(vectors).map(|(text, vector)| Question::new(text, vector));
        Ok((prepared.collect(), note))
    }

    /// Returns the current index of a namespace. The missing vectors of a session's memories are computed first: other
    /// namespaces are covered by `embed_all`.
    async fn searchable_index(&self, namespace: &Namespace) -> Result<SharedIndex> {
        let index = self.memory_index(namespace).await?;
        let has_gaps = |index: &MemoryIndex| index.vectors.as_ref().is_some_and(|v| !v.without_vector.is_empty());
        let lacks_vectors = has_gaps(&lock(&index));
        let embedder = self.engine.options().embedder.as_ref().filter(|_| lacks_vectors);
        if let (Some(embedder), Owner::Session(_)) = (embedder, &namespace.owner) {
            match self.embed_namespace(namespace, embedder, &mut |_| ()).await {
                Ok(_) => self.refresh_index(namespace, &index).await?,
                Err(e) => {
                    tracing::debug!(error = %e, "could not embed the session's memories; retrying at the next recall")
                }
            }
        }
        Ok(index)
    }

    /// Reads the best `limit` memories of a ranking, and updates their last-use times. Some may have
    /// been removed or have expired since they were indexed; the next candidates take their places.
    async fn read_hits(
        &self,
        namespace: &Namespace,
        ranked: Vec<RankedMemory>,
        limit: usize,
    ) -> Result<Vec<RecallHit>> {
        let now = self.now();
        let mut ranked = ranked.into_iter();
        let mut memories = Vec::new();
        while memories.len() < limit && ranked.len() > 0 {
            let batch: Vec<_> = ranked.by_ref().take(limit - memories.len()).collect();
            let keys: Vec<&str> = batch.iter().map(|hit| hit.key.as_str()).collect();
            let items = self.store().get_many(namespace, &keys, Some(now)).await?;
            let mut items: HashMap<String, Item> = items.into_iter().map(|item| (item.key.clone(), item)).collect();
            for hit in batch {
                let Some(item) = items.remove(&hit.key).filter(|item| is_fresh(item, now)) else { continue };
                let RankedMemory { score, coverage, has_word, similarity, .. } = hit;
                let memory = memory_from_item(namespace, item)?;
                memories.push(RecallHit { score, coverage, has_word, similarity, memory });
            }
        }
        Ok(memories)
    }

    /// Creates the event of a recall. `None` if no memory counts as recalled.
    pub(crate) fn recall_event(&self, question: &str, hits: &[RecallHit]) -> Option<Item> {
        let counts =
            |hit: &&RecallHit| hit.has_word || hit.similarity.is_some_and(|cosine| cosine >= COUNTED_SIMILARITY);
        let memories: Vec<_> = hits.iter().filter(counts).map(InjectedMemory::of_hit).collect();
        if memories.is_empty() {
            return None;
        }
        let (question, _) = self.redact(truncated(question));
        let event = RecallEvent { question: question.replace('\0', " "), at: self.now(), memories };
        let value = serde_json::to_string(&event).expect("plain data");
        Some(self.permanent_item(uuid::Uuid::now_v7().to_string(), value))
    }
}

fn truncated(question: &str) -> &str {
    &question[..question.floor_char_boundary(MAX_QUESTION_BYTES)]
}
