//! The doctor: checks all sessions and the store, reports findings, and repairs those that are safe
//! to repair. Only derived or unreachable data is repaired (D-028).

use crate::rules::decision_chain::ChainCheck;
use crate::rules::session::Session;
use crate::store::contract::Commit;
use crate::store::finding::{Finding, Orphan, Remedy};
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::tenure::Tenure;
use crate::types::blob::BlobId;
use crate::types::entry::{Entry, Record};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{SessionKey, Tenant};
use serde::Serialize;
use std::collections::{HashMap, HashSet};

/// The number of heads that are read in one page.
const PAGE: usize = 4096;

/// The number of times a session is checked if it changes during the check.
const LOOKS: usize = 3;

/// The maximum number of rounds of repairs. A repair may make another one possible.
const ROUNDS: usize = 3;

const RESTORE: &str = "restore the session from a backup, or purge it";

/// The result of a repair.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RepairReport {
    /// The findings that were repaired.
    pub mended: Vec<Finding>,
    /// The remaining findings, which need manual intervention.
    pub left: Vec<Finding>,
}

impl Tenure {
    /// Checks every session of every tenant and the store itself. Findings are: gaps and damage in
    /// logs, heads that differ from their log, forks without their parent, missing media of
    /// messages, and orphaned data. `progress` is called with the number of sessions checked so
    /// far. The store may be in use meanwhile.
    pub async fn examine(&self, mut progress: impl FnMut(usize)) -> Result<Vec<Finding>> {
        let mut exam =
            Examination { tenure: self, found: Vec::new(), media: HashMap::new(), unread: HashSet::new(), lost: false };
        let (mut offset, mut limit, mut last) = (0, PAGE, None);
        loop {
            let page =
                self.store().heads(&SessionQuery { offset, ..SessionQuery::new(OwnerFilter::Everyone, limit) }).await;
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
                // A head that cannot be read makes its whole page fail: halve the page until the
                // head is alone.
                Err(Error::Corrupt { .. }) if limit > 1 => limit /= 2,
                Err(Error::Corrupt { place, why }) => {
                    exam.lost = true;
                    let finding = Finding::new(place, why, RESTORE);
                    // The same finding again: all heads are affected, not only one.
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
        // After the sessions, so that all media that they reference are known.
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

    /// Repairs a finding of [`Tenure::examine`] if that is safe. Returns true if it did. Does
    /// nothing for findings that need manual intervention.
    pub async fn repair(&self, finding: &Finding) -> Result<bool> {
        match &finding.cure {
            Remedy::Advice(_) => return Ok(false),
            Remedy::Remove(orphan) => drop(self.store().check(std::slice::from_ref(orphan)).await?),
            Remedy::Card(key) => self.rebuild_card(key).await?,
        }
        Ok(true)
    }

    /// Checks everything, repairs what is safe to repair, and checks again.
    pub async fn repair_all(&self, mut progress: impl FnMut(usize)) -> Result<RepairReport> {
        let mut done = RepairReport::default();
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

    /// Rebuilds the head of a session from its log.
    async fn rebuild_card(&self, key: &SessionKey) -> Result<()> {
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

/// The head that follows from the log. Fields that do not follow from it are taken from the stored
/// head: the next sweep time, the expiry of the lease, and where a purge moved the beginning of the
/// log. Fields that are absent in the stored head stay absent: an older version may not have known
/// them.
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

/// The state of an examination.
struct Examination<'a> {
    tenure: &'a Tenure,
    found: Vec<Finding>,
    /// The media that messages reference, with what is wrong with each. `None` means that it is intact.
    media: HashMap<(Tenant, BlobId), Option<String>>,
    /// Tenants with a session that could not be read, so that the media it references are unknown.
    unread: HashSet<Tenant>,
    /// Whether there is a session of which not even the tenant is known.
    lost: bool,
}

impl Examination<'_> {
    /// Checks one session. Findings are only reported if the session did not change meanwhile.
    async fn session(&mut self, mut head: Head) -> Result<()> {
        for look in 1.. {
            let found = match self.look(&head).await {
                Ok(found) => found,
                Err(Error::Corrupt { place, why }) => {
                    self.unread.insert(head.tenant.clone());
                    vec![Finding::new(place, why, RESTORE)]
                }
                // The session was purged meanwhile.
                Err(Error::NotFound { .. }) => return Ok(()),
                Err(e) => return Err(e),
            };
            if found.is_empty() {
                return Ok(());
            }
            // A finding may be caused by a concurrent change: check again if the head has changed.
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

    /// Checks the parent, log, media, decision chain and head of one session.
    async fn look(&mut self, head: &Head) -> Result<Vec<Finding>> {
        let key = head.key();
        let place = format!("session {key}");
        if let Some(parent) = &head.parent {
            let session = parent.session.clone();
            let above = self.tenure.store().head(&SessionKey { tenant: key.tenant.clone(), session }).await?;
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
                found.push(Finding { place, what, cure: Remedy::Card(key) });
            }
            Some(_) => {}
        }
        Ok(found)
    }

    /// Checks a blob and returns what is wrong with it. Each blob is read only once.
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

    /// Changes a store's finding of an unused blob to advice if a message references the blob, or
    /// if a session that may reference it could not be read.
    fn judge(&self, finding: Finding) -> Finding {
        let Remedy::Remove(Orphan::Blob(tenant, id)) = &finding.cure else { return finding };
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

/// The names of the fields in which two heads differ.
fn differences(stored: &Head, replayed: &Head) -> String {
    let fields = |head: &Head| serde_json::to_value(head).unwrap_or_default();
    let (stored, replayed) = (fields(stored), fields(&card(stored, replayed)));
    let names = stored.as_object().into_iter().chain(replayed.as_object()).flat_map(|o| o.keys());
    let mut names: Vec<&str> = names.map(|n| &**n).filter(|n| stored.get(n) != replayed.get(n)).collect();
    names.sort();
    names.dedup();
    names.join(", ")
}
