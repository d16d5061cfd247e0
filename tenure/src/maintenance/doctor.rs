//! The doctor: looks at everything in a house, says what is wrong, and mends what is safe to mend.

use crate::rules::decision_chain::ChainCheck;
use crate::rules::session::Session;
use crate::store::contract::Commit;
use crate::store::finding::{Cure, Finding, Orphan};
use crate::store::query::{Query, Whose};
use crate::tenure::Tenure;
use crate::types::blob::BlobId;
use crate::types::entry::{Entry, Record};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Key, Tenant};
use serde::Serialize;
use std::collections::{HashMap, HashSet};

/// So many cards are read at once.
const PAGE: usize = 4096;

/// A session that changes while it is looked at is looked at again, so often.
const LOOKS: usize = 3;

/// Mending one thing may free another; after so many rounds it is left at that.
const ROUNDS: usize = 3;

const RESTORE: &str = "restore the session from a backup, or purge it";

/// What a repair did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Repaired {
    /// What was mended.
    pub mended: Vec<Finding>,
    /// What is left, for a person to look at.
    pub left: Vec<Finding>,
}

impl Tenure {
    /// Looks at every session of every tenant and at the store itself, and says what is wrong: holes and damage in logs, cards that
    /// are not what their log says, forks without their parent, media that messages need and nobody has, and what belongs to nobody.
    /// `progress` is told how many sessions have been looked at. The house may be in use meanwhile.
    pub async fn examine(&self, mut progress: impl FnMut(usize)) -> Result<Vec<Finding>> {
        let mut exam =
            Exam { tenure: self, found: Vec::new(), media: HashMap::new(), unread: HashSet::new(), lost: false };
        let (mut offset, mut limit, mut last) = (0, PAGE, None);
        loop {
            let page = self.store().heads(&Query { offset, ..Query::new(Whose::Everyone, limit) }).await;
            match page {
                Ok(heads) if heads.is_empty() => break,
                Ok(heads) => {
                    for head in heads {
                        exam.session(head).await?;
                        offset += 1;
                        progress(offset);
                    }
                    limit = PAGE.min(limit * 2);
                }
                // A card that can not be read spoils its page: smaller pages, until it is alone.
                Err(Error::Corrupt { .. }) if limit > 1 => limit /= 2,
                Err(Error::Corrupt { place, why }) => {
                    exam.lost = true;
                    let finding = Finding::new(place, why, RESTORE);
                    // Not one card, but all of them.
                    if last.as_ref() == Some(&finding) {
                        break;
                    }
                    exam.found.push(finding.clone());
                    last = Some(finding);
                    offset += 1;
                    progress(offset);
                }
                Err(e) => return Err(e),
            }
        }
        // Last, so that it sees what the sessions need.
        let of_the_store = match self.store().check(&[]).await {
            Err(Error::Corrupt { place, why }) => vec![Finding::new(place, why, "restore the store from a backup")],
            found => found?,
        };
        let mut found: Vec<Finding> = of_the_store.into_iter().map(|f| exam.judge(f)).collect();
        found.extend(exam.found);
        let mut told = HashSet::new();
        found.retain(|f| told.insert((f.place.clone(), f.what.clone())));
        Ok(found)
    }

    /// Mends a finding of [`Tenure::examine`] if that is safe; whether it was. Where only a person can help, nothing is done.
    pub async fn repair(&self, finding: &Finding) -> Result<bool> {
        match &finding.cure {
            Cure::Advice(_) => return Ok(false),
            Cure::Remove(orphan) => drop(self.store().check(std::slice::from_ref(orphan)).await?),
            Cure::Card(key) => self.rebuild_card(key).await?,
        }
        Ok(true)
    }

    /// Examines, mends what is safe to mend, and examines again.
    pub async fn repair_all(&self, mut progress: impl FnMut(usize)) -> Result<Repaired> {
        let mut done = Repaired::default();
        for _ in 0..ROUNDS {
            done.left = self.examine(&mut progress).await?;
            let before = done.mended.len();
            for finding in done.left.iter().filter(|f| f.is_mendable()) {
                match self.repair(finding).await {
                    Ok(true) => done.mended.push(finding.clone()),
                    Ok(false) => {}
                    Err(error) => tracing::warn!(place = finding.place, %error, "could not be mended"),
                }
            }
            if done.mended.len() == before {
                return Ok(done);
            }
        }
        done.left = self.examine(progress).await?;
        Ok(done)
    }

    async fn rebuild_card(&self, key: &Key) -> Result<()> {
        let missing = || Error::NotFound { session_id: key.session.clone() };
        let stored = self.store().head(key).await?.ok_or_else(missing)?;
        let log = self.engine.log(&stored).await?.into_iter().flatten();
        let Some(session) = Session::replay(key, log) else {
            return Err(Error::corrupt(format!("session {key}"), "its log does not begin with `created`"));
        };
        let mut head = card(&stored, session.head());
        head.due_at = self.engine.due_at(&head);
        self.store().commit(&Commit::new(Some(stored.end()), Vec::new(), head)).await?;
        self.engine.forget(key);
        Ok(())
    }
}

/// The card that follows from the log. What does not follow is taken from the one that is stored: when the sweep should look next, how long
/// a lease lasts, and where a purge elsewhere has put the log's beginning. An older version may have left out what it did not know of.
fn card(stored: &Head, replayed: &Head) -> Head {
    let mut head =
        Head { due_at: stored.due_at, first: stored.first, parent: stored.parent.clone(), ..replayed.clone() };
    if let (Some(theirs), Some(lease)) = (&stored.lease, &mut head.lease)
        && theirs.run == lease.run
    {
        *lease = theirs.clone();
    }
    if stored.front.is_none() {
        head.front = None;
    }
    if stored.stored_bytes.is_none() {
        head.stored_bytes = None;
    }
    if stored.log.is_none() {
        head.log = None;
    }
    head
}

/// What has been seen so far.
struct Exam<'a> {
    tenure: &'a Tenure,
    found: Vec<Finding>,
    /// The media that messages need, and what is wrong with them.
    media: HashMap<(Tenant, BlobId), Option<String>>,
    /// Tenants with a session that could not be read: what it needs is not known.
    unread: HashSet<Tenant>,
    /// Whether there is a session of which not even the tenant is known.
    lost: bool,
}

impl Exam<'_> {
    async fn session(&mut self, mut head: Head) -> Result<()> {
        for look in 1.. {
            let found = match self.look(&head).await {
                Ok(found) => found,
                Err(Error::Corrupt { place, why }) => {
                    self.unread.insert(head.tenant.clone());
                    vec![Finding::new(place, why, RESTORE)]
                }
                // Purged meanwhile.
                Err(Error::NotFound { .. }) => return Ok(()),
                Err(e) => return Err(e),
            };
            if found.is_empty() {
                return Ok(());
            }
            // What looks wrong may only have changed under our eyes.
            match self.tenure.store().head(&head.key()).await {
                Ok(None) => return Ok(()),
                Ok(Some(now)) if now != head && look < LOOKS => head = now,
                _ => {
                    self.found.extend(found);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    async fn look(&mut self, head: &Head) -> Result<Vec<Finding>> {
        let key = head.key();
        let place = format!("session {key}");
        if let Some(parent) = &head.parent {
            let session = parent.session.clone();
            let above = self.tenure.store().head(&Key { tenant: key.tenant.clone(), session }).await?;
            let at = parent.seq;
            let wrong = match above {
                None => Some(format!("it was forked from {} at record {at}, which does not exist", parent.session)),
                Some(above) if above.seq < at => {
                    Some(format!("it was forked from {} at record {at}, which ends at {}", parent.session, above.seq))
                }
                Some(_) => None,
            };
            if let Some(what) = wrong {
                self.unread.insert(key.tenant.clone());
                return Ok(vec![Finding::new(place, what, "restore its parent from a backup, or purge it")]);
            }
        }
        let log: Vec<Record> = self.tenure.engine.log(head).await?.into_iter().flatten().collect();
        let mut found = Vec::new();
        if let Some((want, got)) = (1..).zip(&log).map(|(want, r)| (want, r.seq)).find(|(want, got)| want != got) {
            return Err(Error::corrupt(place, format!("record {want} is missing, {got} is in its place")));
        }
        for record in log.iter().filter(|r| r.seq >= head.first) {
            let message = match &record.entry {
                Entry::Message(post) => &post.message,
                Entry::Compacted { summary: Some(summary), .. } => summary,
                _ => continue,
            };
            for cut in message.cuts() {
                if let Some(what) = self.medium(&key.tenant, &cut.id).await? {
                    let advice = "restore the blob from a backup; until then the message can not be shown";
                    found.push(Finding::new(format!("{place}, record {}", record.seq), what, advice));
                }
            }
        }
        let mut chain = ChainCheck::default();
        for record in &log {
            if let (_, Some(what)) = chain.take(&key.session, record)
                && record.seq >= head.first
            {
                let advice = "the audit trail was tampered with: compare the session with a backup";
                found.push(Finding::new(format!("{place}, record {}", record.seq), what, advice));
            }
        }
        match Session::replay(&key, log) {
            None => found.push(Finding::new(place, "its log does not begin with `created`", RESTORE)),
            Some(session) if card(head, session.head()) != *head => {
                let what = format!("its card is not what its log says: {}", differences(head, session.head()));
                found.push(Finding { place, what, cure: Cure::Card(key) });
            }
            Some(_) => {}
        }
        Ok(found)
    }

    /// What is wrong with a medium. Each is read once.
    async fn medium(&mut self, tenant: &Tenant, id: &BlobId) -> Result<Option<String>> {
        let at = (tenant.clone(), *id);
        if let Some(known) = self.media.get(&at) {
            return Ok(known.clone());
        }
        let wrong = match self.tenure.store().blob(tenant, id).await {
            Ok(Some(bytes)) if BlobId::of(&bytes) == *id => None,
            Ok(Some(_)) => Some(format!("it needs blob {id}, whose bytes are not those that its name says")),
            Ok(None) => Some(format!("it needs blob {id}, which is missing")),
            Err(Error::Corrupt { place, why }) => {
                Some(format!("it needs blob {id}, which is damaged at {place}: {why}"))
            }
            Err(e) => return Err(e),
        };
        self.media.insert(at, wrong.clone());
        Ok(wrong)
    }

    /// What a store calls unused, a message may need: then it stays.
    fn judge(&self, finding: Finding) -> Finding {
        let Cure::Remove(Orphan::Blob(tenant, id)) = &finding.cure else { return finding };
        let advice = if self.media.contains_key(&(tenant.clone(), *id)) {
            "a message needs it, and a purge may take it away: export its session and import it again, which counts it anew"
        } else if self.lost || self.unread.contains(tenant) {
            "a session of the tenant can not be read and may need it: see to that first"
        } else {
            return finding;
        };
        Finding::new(finding.place, finding.what, advice)
    }
}

/// The fields in which two cards differ.
fn differences(stored: &Head, replayed: &Head) -> String {
    let fields = |head: &Head| serde_json::to_value(head).unwrap_or_default();
    let (stored, replayed) = (fields(stored), fields(&card(stored, replayed)));
    let names = stored.as_object().into_iter().chain(replayed.as_object()).flat_map(|o| o.keys());
    let mut names: Vec<&str> = names.map(|n| &**n).filter(|n| stored.get(n) != replayed.get(n)).collect();
    names.sort();
    names.dedup();
    names.join(", ")
}
