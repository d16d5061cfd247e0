//! The injection of memories into prompts: the preferences, and the facts that are relevant to the question.

use crate::memory::memories::MemoryTarget;
use crate::memory::recall::{InjectedMemory, RecallHit, Superseded};
use crate::rules::prompt::tokens;
use crate::store::item::Item;
use crate::tenure::Tenure;
use crate::types::error::Result;
use crate::types::id::{Principal, SessionId, Tenant};
use crate::types::memory::{Memory, MemoryKind};
use crate::types::message::{Message, Role};
use crate::types::policy::{MemoryPolicy, MemoryScope};
use std::cmp::Ordering;

/// The minimum coverage of a fact that is injected, if recall is by words alone.
const MIN_COVERAGE: f64 = 0.15;

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

impl Tenure {
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
        let recalled = self.recall_in(&location, &[question], candidates, Superseded::Omitted).await?;
        let mut facts = recalled.memories;
        // By words alone, a memory that shares only a function word with the question is not relevant to it.
        facts.retain(|hit| recalled.by_meaning || hit.coverage >= MIN_COVERAGE);
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

/// Formats preferences and facts as one system message, each newest first. The facts are selected by their relevance:
/// one that would exceed `max_tokens` is skipped. Preferences may use half of that, so that there is room for facts.
/// `None` if none fits.
fn memory_block(
    mut preferences: Vec<Memory>,
    facts: Vec<RecallHit>,
    policy: &MemoryPolicy,
) -> Option<(Message, Vec<InjectedMemory>)> {
    let mut block = MemoryBlock::default();
    preferences.sort_by(newest_first);
    let preferences = preferences.into_iter().map(|memory| (memory, 0.0)).collect();
    block.add(PREFERENCES_SECTION, preferences, policy.max_tokens / 2);
    let facts = facts.into_iter().map(|hit| (hit.memory, hit.score)).collect();
    block.add(FACTS_SECTION, facts, policy.max_tokens);
    (!block.injected.is_empty()).then(|| (block.message(), block.injected))
}

fn newest_first(a: &Memory, b: &Memory) -> Ordering {
    (b.created_at, &a.id).cmp(&(a.created_at, &b.id))
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
    /// Adds a section with those memories, in the order given, that fit into `max_tokens` for the whole block; they are
    /// shown newest first. Nothing is added if none fits.
    fn add(&mut self, (name, introduction): Section, memories: Vec<(Memory, f64)>, max_tokens: usize) {
        let end = format!("[/{name}]");
        let start = self.lines.len();
        self.lines.push(format!("[{name}] {introduction}"));
        let mut selected = Vec::new();
        for (memory, score) in memories {
            let text: Vec<&str> = memory.text.split_whitespace().collect();
            let line = format!("- {}: {}", memory.created_at.strftime("%Y-%m-%d"), text.join(" "));
            self.lines.extend([line, end.clone()]);
            let is_too_long = tokens(&self.message()) > max_tokens;
            self.lines.pop();
            match self.lines.pop_if(|_| is_too_long) {
                Some(_) => {}
                None => selected.push((memory, score)),
            }
        }
        let mut lines = self.lines.split_off(start + 1).into_iter().zip(selected).collect::<Vec<_>>();
        lines.sort_by(|(_, (a, _)), (_, (b, _))| newest_first(a, b));
        for (line, (memory, score)) in lines {
            self.lines.push(line);
            self.injected.push(InjectedMemory { id: memory.id, score, kind: memory.kind });
        }
        match self.lines.len() == start + 1 {
            true => self.lines.truncate(start),
            false => self.lines.push(end),
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
