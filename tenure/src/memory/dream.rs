//! Dreams (memory consolidation): a session's memory that was recalled often, for different
//! questions and on different days, is promoted to its user. Nothing is promoted in any other way.

use crate::memory::memories::{
    MEMORY, MemoryLocation, decode_memory, encode_memory, is_fresh, namespace_of, sampled_eviction_cap,
};
use crate::memory::recall::{RECALLS, RecallEvent};
use crate::store::item::{Item, Namespace, Owner};
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{AccessScope, Principal, SessionId, Tenant, User};
use crate::types::memory::{MemoryKind, MemoryRecord};
use crate::types::policy::{MemoryPolicy, MemoryScope};
use crate::types::status::Status;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};

const DREAMS: &str = "dreams";
/// Maximum number of stored reports per tenant.
const MAX_DREAMS: usize = 100;

/// The thresholds for promoting a memory. All of them must be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DreamRules {
    /// Minimum number of recalls.
    pub recalls: usize,
    /// Minimum number of different questions.
    pub questions: usize,
    /// Minimum number of different days (UTC).
    pub days: usize,
}

impl Default for DreamRules {
    fn default() -> Self {
        Self { recalls: 3, questions: 2, days: 2 }
    }
}

/// The report of a dream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Dream {
    /// The id of the dream.
    pub id: String,
    /// The time when it ran.
    pub at: Timestamp,
    /// Whether it was a dry run, which promotes nothing.
    pub dry_run: bool,
    /// The number of sessions that were examined.
    pub sessions: usize,
    /// The promoted memories, with the statistics that justify each.
    pub promoted: Vec<PromotedMemory>,
}

/// A memory that was promoted from a session to its user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PromotedMemory {
    /// The id of the memory.
    pub memory: String,
    /// The session that it was promoted from.
    pub session_id: SessionId,
    /// The user that it was promoted to.
    pub user: User,
    /// The number of recalls.
    pub recalls: usize,
    /// The number of different questions.
    pub questions: usize,
    /// The number of different days.
    pub days: usize,
    /// The average score of its recalls.
    pub score: f64,
}

/// Recall statistics of one memory.
#[derive(Default)]
struct RecallStats {
    recalls: usize,
    questions: BTreeSet<String>,
    days: BTreeSet<String>,
    score: f64,
}

impl RecallStats {
    fn passes(&self, rules: &DreamRules) -> bool {
        self.recalls >= rules.recalls && self.questions.len() >= rules.questions && self.days.len() >= rules.days
    }
}

/// Normalizes a question for deduplication: its set of words, without case, order and punctuation.
fn normalized_question(text: &str) -> String {
    let text = text.to_lowercase();
    let words: BTreeSet<&str> = text.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()).collect();
    words.into_iter().collect::<Vec<_>>().join(" ")
}

impl Tenure {
    /// Consolidates memory: examines the recalls in the sessions visible to `principal` and
    /// promotes memories that pass the rules. With `dry_run` it only reports them.
    pub async fn dream(&self, principal: &Principal, rules: &DreamRules, dry_run: bool) -> Result<Dream> {
        let id = format!("dream_{}", uuid::Uuid::now_v7().simple());
        let at = self.now();
        let mut dream = Dream { id, at, dry_run, sessions: 0, promoted: Vec::new() };
        for assistant in self.engine.assistants(principal).await? {
            let policy = self.policy(&principal.tenant, Some(&assistant.name)).memory;
            if policy.scope != MemoryScope::Session {
                continue;
            }
            let mut query = SessionQuery::new(OwnerFilter::AllTenants, self.limits().max_page);
            query.assistant = Some(assistant.name.clone());
            query.status = vec![Status::Active, Status::Paused, Status::Expired];
            loop {
                let page = self.engine.list(principal, query.clone()).await?;
                dream.sessions += page.heads.len();
                for head in page.heads {
                    self.promote_from_session(head, &policy, rules, &mut dream).await?;
                }
                match page.next {
                    Some(next) => query.cursor = Some(next),
                    None => break,
                }
            }
        }
        if !dry_run && !dream.promoted.is_empty() {
            self.store_dream(&principal.tenant, &dream).await?;
        }
        Ok(dream)
    }

    /// Examines one session and promotes its memories that pass the rules. A memory the user
    /// already has is skipped.
    async fn promote_from_session(
        &self,
        head: Head,
        policy: &MemoryPolicy,
        rules: &DreamRules,
        dream: &mut Dream,
    ) -> Result<()> {
        let owner = Owner::Session(head.info.session_id.clone());
        let session_namespace = namespace_of(&head.tenant, owner.clone(), MEMORY);
        if self.store().items(&session_namespace, None, 1).await?.is_empty() {
            return Ok(());
        }
        let all_stats = self.recall_stats(&namespace_of(&head.tenant, owner, RECALLS)).await?;
        let mut passed: Vec<_> = all_stats.into_iter().filter(|(_, stats)| stats.passes(rules)).collect();
        passed.sort_by(|(a, _), (b, _)| a.cmp(b));
        for (id, stats) in passed {
            let Some(item) = self.store().get(&session_namespace, &id, None).await?.filter(|i| is_fresh(i, dream.at))
            else {
                continue;
            };
            let user_namespace = namespace_of(&head.tenant, Owner::User(head.user.clone()), MEMORY);
            if self.store().get(&user_namespace, &id, None).await?.is_some_and(|i| is_fresh(&i, dream.at)) {
                continue;
            }
            if !dream.dry_run {
                let location = MemoryLocation {
                    namespace: user_namespace,
                    policy: policy.clone(),
                    assistant: None,
                    session: Some(head.clone()),
                };
                self.promote(&location, item, &dream.id).await?;
            }
            dream.promoted.push(PromotedMemory {
                memory: id,
                session_id: head.info.session_id.clone(),
                user: head.user.clone(),
                recalls: stats.recalls,
                questions: stats.questions.len(),
                days: stats.days.len(),
                score: stats.score / stats.recalls as f64,
            });
        }
        Ok(())
    }

    async fn recall_stats(&self, recalls: &Namespace) -> Result<HashMap<String, RecallStats>> {
        let mut all_stats = HashMap::<String, RecallStats>::new();
        let mut after = None::<String>;
        loop {
            let page = self.store().items(recalls, after.as_deref(), 256).await?;
            let Some(last) = page.last() else { return Ok(all_stats) };
            after = Some(last.key.clone());
            for item in &page {
                let subject = || format!("recall {} of {}", item.key, recalls.owner);
                let event: RecallEvent =
                    serde_json::from_str(&item.value).map_err(|e| Error::corrupt_from(subject(), e))?;
                for memory in event.memories {
                    let stats = all_stats.entry(memory.id).or_default();
                    stats.recalls += 1;
                    stats.score += memory.score;
                    stats.questions.insert(normalized_question(&event.question));
                    stats.days.insert(event.at.strftime("%Y-%m-%d").to_string());
                }
            }
        }
    }

    /// Copies a session's memory to its user, with back references from its sources so that it can
    /// be retracted.
    async fn promote(&self, location: &MemoryLocation, item: Item, dream: &str) -> Result<()> {
        let mut record = decode_memory(&item)?;
        record.dream = Some(dream.to_owned());
        for source in record.sources.keys() {
            self.store_back_references(location, &item.key, source, &User::default()).await?;
        }
        let retention = location.policy.retention.and_then(|d| SignedDuration::try_from(d).ok());
        let expires_at = retention.and_then(|retention| self.now().checked_add(retention).ok());
        let item = Item { value: encode_memory(&record), expires_at, uses: 0, ..item };
        let _memory_guard = self.shared.memories.lock_memory(&item.key).await;
        self.store()
            .put(&location.namespace, &item, sampled_eviction_cap(location.policy.max_entries, &item.key))
            .await?;
        if record.kind == MemoryKind::Preference {
            self.index_preference(&location.namespace, &item).await?;
        }
        self.memory_changed(&location.namespace, &item.key).await
    }

    async fn store_dream(&self, tenant: &Tenant, dream: &Dream) -> Result<()> {
        let item = self.permanent_item(dream.id.clone(), serde_json::to_string(dream).expect("plain data"));
        self.store().put(&dream_namespace(tenant), &item, Some(MAX_DREAMS)).await
    }

    /// Lists the dreams of a tenant that promoted something, newest first. Requires an
    /// administrator of the tenant.
    pub async fn dreams(&self, principal: &Principal) -> Result<Vec<Dream>> {
        check_administrator(principal)?;
        self.all_dreams(&principal.tenant).await
    }

    async fn all_dreams(&self, tenant: &Tenant) -> Result<Vec<Dream>> {
        let items = self.store().items(&dream_namespace(tenant), None, MAX_DREAMS * 2).await?;
        let decode = |item: &Item| {
            serde_json::from_str(&item.value).map_err(|e| Error::corrupt_from(format!("dream {}", item.key), e))
        };
        items.iter().rev().map(decode).collect()
    }

    /// Reverts the promotions of a dream and returns how many were reverted. `None` means that
    /// there is no such dream. A promoted memory that has gained other sources since then stays.
    /// Requires an administrator of the tenant.
    pub async fn undo_dream(&self, principal: &Principal, id: &str) -> Result<Option<usize>> {
        check_administrator(principal)?;
        let Some(dream) = self.all_dreams(&principal.tenant).await?.into_iter().find(|d| d.id == id) else {
            return Ok(None);
        };
        let mut reverted = 0;
        for promotion in &dream.promoted {
            let user_namespace = namespace_of(&principal.tenant, Owner::User(promotion.user.clone()), MEMORY);
            let _memory_guard = self.shared.memories.lock_memory(&promotion.memory).await;
            let Some(item) = self.store().get(&user_namespace, &promotion.memory, None).await? else { continue };
            let mut record = decode_memory(&item)?;
            if record.dream.as_deref() != Some(id) {
                continue;
            }
            record.sources.remove(promotion.session_id.as_str());
            if record.sources.is_empty() {
                self.remove_memory(&user_namespace, &promotion.memory).await?;
            } else {
                let value = encode_memory(&MemoryRecord { dream: None, ..record });
                self.store().put(&user_namespace, &Item { value, ..item }, None).await?;
                self.memory_changed(&user_namespace, &promotion.memory).await?;
            }
            reverted += 1;
        }
        self.store().remove(&dream_namespace(&principal.tenant), id).await?;
        Ok(Some(reverted))
    }

    /// Removes a user from the stored reports.
    pub(crate) async fn remove_user_from_dreams(&self, tenant: &Tenant, user: &User) -> Result<()> {
        for mut dream in self.all_dreams(tenant).await? {
            let before = dream.promoted.len();
            dream.promoted.retain(|p| p.user != *user);
            if dream.promoted.len() < before {
                self.store_dream(tenant, &dream).await?;
            }
        }
        Ok(())
    }
}

fn check_administrator(principal: &Principal) -> Result<()> {
    match principal.scope {
        AccessScope::Tenant => Ok(()),
        AccessScope::Own => Err(Error::invalid("dream", "dream reports require an administrator of the tenant")),
    }
}

fn dream_namespace(tenant: &Tenant) -> Namespace {
    namespace_of(tenant, Owner::Tenant, DREAMS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_the_same_in_any_word_order_case_and_punctuation() {
        assert_eq!(normalized_question("What tea, Ada?"), normalized_question("ada what TEA"));
        assert_ne!(normalized_question("What tea?"), normalized_question("What coffee?"));
    }
}
