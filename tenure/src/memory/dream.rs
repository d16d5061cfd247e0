//! Dreams: what a session recalled often, for different questions, on different days, becomes its user's. Nothing else is ever promoted.

use crate::memory::memories::{MEMORY, Place, bound, is_fresh, kept, shelf, written};
use crate::memory::recall::{Event, RECALLS};
use crate::store::item::{Item, Owner, Shelf};
use crate::store::query::{Query, Whose};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Principal, Reach, SessionId, Tenant, User};
use crate::types::memory::Kept;
use crate::types::policy::{MemoryPolicy, Scope};
use crate::types::status::Status;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};

const DREAMS: &str = "dreams";
/// So many reports are kept.
const DREAMS_KEPT: usize = 100;

/// What it takes to be promoted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DreamRules {
    /// Recalled at least so often,
    pub recalls: usize,
    /// for so many different questions,
    pub questions: usize,
    /// on so many different days (UTC).
    pub days: usize,
}

impl Default for DreamRules {
    fn default() -> Self {
        Self { recalls: 3, questions: 2, days: 2 }
    }
}

/// What a dream did, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dream {
    /// Its id.
    pub id: String,
    /// When it was.
    pub at: Timestamp,
    /// Whether it only says what it would do.
    pub dry_run: bool,
    /// How many sessions it looked at.
    pub sessions: usize,
    /// What was promoted.
    pub promoted: Vec<Promoted>,
}

/// A memory that went from a session to its user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Promoted {
    /// The memory.
    pub memory: String,
    /// Where it was.
    pub session_id: SessionId,
    /// Whose it is now.
    pub user: User,
    /// How often it was recalled.
    pub recalls: usize,
    /// For how many different questions.
    pub questions: usize,
    /// On how many different days.
    pub days: usize,
    /// How well it fitted, on average.
    pub score: f64,
}

/// What is known of one memory's recalls.
#[derive(Default)]
struct Tally {
    recalls: usize,
    questions: BTreeSet<String>,
    days: BTreeSet<String>,
    score: f64,
}

impl Tally {
    fn passes(&self, rules: &DreamRules) -> bool {
        self.recalls >= rules.recalls && self.questions.len() >= rules.questions && self.days.len() >= rules.days
    }
}

/// A question without case, order and punctuation.
fn question(text: &str) -> String {
    let text = text.to_lowercase();
    let words: BTreeSet<&str> = text.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()).collect();
    words.into_iter().collect::<Vec<_>>().join(" ")
}

impl Tenure {
    /// Looks at what was recalled in the sessions that `who` sees, and promotes what passes the rules. With `dry_run` it only says so.
    pub async fn dream(&self, who: &Principal, rules: &DreamRules, dry_run: bool) -> Result<Dream> {
        let (id, at) = (format!("dream_{}", uuid::Uuid::now_v7().simple()), self.now());
        let mut dream = Dream { id, at, dry_run, sessions: 0, promoted: Vec::new() };
        for assistant in self.engine.assistants(who).await? {
            let policy = self.policy(&who.tenant, Some(&assistant.name)).memory;
            if policy.scope != Scope::Session {
                continue;
            }
            let mut query = Query::new(Whose::Everyone, self.limits().max_page);
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

    /// One session.
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
                let place =
                    Place { shelf: theirs, policy: policy.clone(), assistant: None, session: Some(head.clone()) };
                self.promote(&place, item, &dream.id).await?;
            }
            dream.promoted.push(Promoted {
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

    async fn tallies(&self, recalls: &Shelf) -> Result<HashMap<String, Tally>> {
        let (mut all, mut after) = (HashMap::<String, Tally>::new(), None::<String>);
        loop {
            let page = self.store().items(recalls, after.as_deref(), 256).await?;
            let Some(last) = page.last() else { return Ok(all) };
            after = Some(last.key.clone());
            for item in &page {
                let place = || format!("recall {} of {}", item.key, recalls.owner);
                let event: Event = serde_json::from_str(&item.value).map_err(|e| Error::corrupt(place(), e))?;
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

    /// A session's memory becomes its user's too.
    async fn promote(&self, place: &Place, item: Item, dream: &str) -> Result<()> {
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

    /// The dreams of a tenant that promoted something, the newest first. For its administrators.
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

    /// Takes back what a dream promoted; how many memories that were, or nothing if there is no such dream. What was said again since
    /// then stays.
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
                    let value = written(&Kept { dream: None, ..all });
                    self.store().put(&theirs, &Item { value, ..item }, None).await?;
                }
            }
            self.memory_changed(&theirs, &one.memory).await?;
            undone += 1;
        }
        self.store().remove(&dreams(&who.tenant), id).await?;
        Ok(Some(undone))
    }

    /// Strikes a user from the reports.
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
        Reach::Tenant => Ok(()),
        Reach::Own => Err(Error::invalid("dream", "dreams are for an administrator of the tenant")),
    }
}

fn dreams(tenant: &Tenant) -> Shelf {
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
