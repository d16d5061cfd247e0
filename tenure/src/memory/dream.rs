//! Dreams (memory consolidation): a session's memory that was recalled often, for different
//! questions and on different days, is promoted to its user. Nothing is promoted in any other way.

use crate::memory::memories::{MEMORY, MemoryLocation, bound, is_fresh, kept, shelf, written};
use crate::memory::recall::{RECALLS, RecallEvent};
use crate::store::item::{Item, Namespace, Owner};
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{AccessScope, Principal, SessionId, Tenant, User};
use crate::types::memory::MemoryRecord;
use crate::types::policy::{MemoryPolicy, MemoryScope};
use crate::types::status::Status;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};

const DREAMS: &str = "dreams";
/// Maximum number of stored reports per tenant.
const DREAMS_KEPT: usize = 100;

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
fn question(text: &str) -> String {
    let text = text.to_lowercase();
    let words: BTreeSet<&str> = text.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()).collect();
    words.into_iter().collect::<Vec<_>>().join(" ")
}

impl Tenure {
    /// Consolidates memory: examines the recalls in the sessions visible to `who` and promotes
    /// memories that pass the rules. With `dry_run` it only reports them.
    pub async fn dream(&self, who: &Principal, rules: &DreamRules, dry_run: bool) -> Result<Dream> {
        let (id, at) = (format!("dream_{}", uuid::Uuid::now_v7().simple()), self.now());
        let mut dream = Dream { id, at, dry_run, sessions: 0, promoted: Vec::new() };
        for assistant in self.engine.assistants(who).await? {
            let policy = self.policy(&who.tenant, Some(&assistant.name)).memory;
            if policy.scope != MemoryScope::Session {
                continue;
            }
            let mut query = SessionQuery::new(OwnerFilter::Everyone, self.limits().max_page);
            query.assistant = Some(assistant.name.clone());
            query.status = vec![Status::Active, Status::Paused, Status::Expired];
            loop {
                let page = self.engine.list(who, query.clone()).await?;
                dream.sessions += page.heads.len();
                for head in page.heads {
                    self.dream_of(head, &policy, rules, &mut dream).await?;
                }
                match page.next {
                    Some(next) => query.cursor = Some(next),
                    None => break,
                }
            }
        }
        if !dry_run && !dream.promoted.is_empty() {
            self.keep_dream(&who.tenant, &dream).await?;
        }
        Ok(dream)
    }

    /// Examines one session and promotes its memories that pass the rules. A memory the user
    /// already has is skipped.
    async fn dream_of(&self, head: Head, policy: &MemoryPolicy, rules: &DreamRules, dream: &mut Dream) -> Result<()> {
        let session = Owner::Session(head.info.session_id.clone());
        let own = shelf(&head.tenant, session.clone(), MEMORY);
        if self.store().items(&own, None, 1).await?.is_empty() {
            return Ok(());
        }
        let tallies = self.tallies(&shelf(&head.tenant, session, RECALLS)).await?;
        let mut passed: Vec<_> = tallies.into_iter().filter(|(_, tally)| tally.passes(rules)).collect();
        passed.sort_by(|(a, _), (b, _)| a.cmp(b));
        for (id, tally) in passed {
            let Some(item) = self.store().get(&own, &id, None).await?.filter(|i| is_fresh(i, dream.at)) else {
                continue;
            };
            let theirs = shelf(&head.tenant, Owner::User(head.user.clone()), MEMORY);
            if self.store().get(&theirs, &id, None).await?.is_some_and(|i| is_fresh(&i, dream.at)) {
                continue;
            }
            if !dream.dry_run {
                let place = MemoryLocation {
                    shelf: theirs,
                    policy: policy.clone(),
                    assistant: None,
                    session: Some(head.clone()),
                };
                self.promote(&place, item, &dream.id).await?;
            }
            dream.promoted.push(PromotedMemory {
                memory: id,
                session_id: head.info.session_id.clone(),
                user: head.user.clone(),
                recalls: tally.recalls,
                questions: tally.questions.len(),
                days: tally.days.len(),
                score: tally.score / tally.recalls as f64,
            });
        }
        Ok(())
    }

    async fn tallies(&self, recalls: &Namespace) -> Result<HashMap<String, RecallStats>> {
        let (mut all, mut after) = (HashMap::<String, RecallStats>::new(), None::<String>);
        loop {
            let page = self.store().items(recalls, after.as_deref(), 256).await?;
            let Some(last) = page.last() else { return Ok(all) };
            after = Some(last.key.clone());
            for item in &page {
                let place = || format!("recall {} of {}", item.key, recalls.owner);
                let event: RecallEvent = serde_json::from_str(&item.value).map_err(|e| Error::corrupt(place(), e))?;
                for told in event.found {
                    let tally = all.entry(told.id).or_default();
                    tally.recalls += 1;
                    tally.score += told.score;
                    tally.questions.insert(question(&event.question));
                    tally.days.insert(event.at.strftime("%Y-%m-%d").to_string());
                }
            }
        }
    }

    /// Copies a session's memory to its user, with back references from its sources so that it can
    /// be retracted.
    async fn promote(&self, place: &MemoryLocation, item: Item, dream: &str) -> Result<()> {
        let mut all = kept(&item)?;
        all.dream = Some(dream.to_owned());
        for source in all.sources.keys() {
            self.leave_traces(place, &item.key, source, &User::default()).await?;
        }
        let age = place.policy.retention.and_then(|d| SignedDuration::try_from(d).ok());
        let expires_at = age.and_then(|age| self.now().checked_add(age).ok());
        let item = Item { value: written(&all), expires_at, uses: 0, ..item };
        let _changing = self.shared.memories.changing(&item.key).await;
        self.store().put(&place.shelf, &item, bound(place.policy.max_entries, &item.key)).await?;
        self.memory_changed(&place.shelf, &item.key).await
    }

    async fn keep_dream(&self, tenant: &Tenant, dream: &Dream) -> Result<()> {
        let item = self.lasting(dream.id.clone(), serde_json::to_string(dream).expect("plain data"));
        self.store().put(&dreams(tenant), &item, Some(DREAMS_KEPT)).await
    }

    /// Lists the dreams of a tenant that promoted something, newest first. Requires an
    /// administrator of the tenant.
    pub async fn dreams(&self, who: &Principal) -> Result<Vec<Dream>> {
        administers(who)?;
        self.all_dreams(&who.tenant).await
    }

    async fn all_dreams(&self, tenant: &Tenant) -> Result<Vec<Dream>> {
        let items = self.store().items(&dreams(tenant), None, DREAMS_KEPT * 2).await?;
        let read = |item: &Item| {
            serde_json::from_str(&item.value).map_err(|e| Error::corrupt(format!("dream {}", item.key), e))
        };
        items.iter().rev().map(read).collect()
    }

    /// Reverts the promotions of a dream and returns how many were reverted. `None` means that
    /// there is no such dream. A promoted memory that has gained other sources since then stays.
    /// Requires an administrator of the tenant.
    pub async fn undo_dream(&self, who: &Principal, id: &str) -> Result<Option<usize>> {
        administers(who)?;
        let Some(dream) = self.all_dreams(&who.tenant).await?.into_iter().find(|d| d.id == id) else { return Ok(None) };
        let mut undone = 0;
        for one in &dream.promoted {
            let theirs = shelf(&who.tenant, Owner::User(one.user.clone()), MEMORY);
            let _changing = self.shared.memories.changing(&one.memory).await;
            let Some(item) = self.store().get(&theirs, &one.memory, None).await? else { continue };
            let mut all = kept(&item)?;
            if all.dream.as_deref() != Some(id) {
                continue;
            }
            all.sources.remove(one.session_id.as_str());
            match all.sources.is_empty() {
                true => drop(self.store().remove(&theirs, &one.memory).await?),
                false => {
                    let value = written(&MemoryRecord { dream: None, ..all });
                    self.store().put(&theirs, &Item { value, ..item }, None).await?;
                }
            }
            self.memory_changed(&theirs, &one.memory).await?;
            undone += 1;
        }
        self.store().remove(&dreams(&who.tenant), id).await?;
        Ok(Some(undone))
    }

    /// Removes a user from the stored reports.
    pub(crate) async fn undream(&self, tenant: &Tenant, user: &User) -> Result<()> {
        for mut dream in self.all_dreams(tenant).await? {
            let before = dream.promoted.len();
            dream.promoted.retain(|p| p.user != *user);
            if dream.promoted.len() < before {
                self.keep_dream(tenant, &dream).await?;
            }
        }
        Ok(())
    }
}

fn administers(who: &Principal) -> Result<()> {
    match who.reach {
        AccessScope::Tenant => Ok(()),
        AccessScope::Own => Err(Error::invalid("dream", "dreams are for an administrator of the tenant")),
    }
}

fn dreams(tenant: &Tenant) -> Namespace {
    shelf(tenant, Owner::Tenant, DREAMS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_question_in_other_words_order_and_case_is_one() {
        assert_eq!(question("What tea, Ada?"), question("ada what TEA"));
        assert_ne!(question("What tea?"), question("What coffee?"));
    }
}
