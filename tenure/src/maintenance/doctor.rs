//! The doctor: checks all sessions and the store, reports findings, and repairs those that are safe
//! to repair. Only derived or unreachable data is repaired (D-028).

use crate::rules::decision_chain::ChainCheck;
use crate::rules::message_words::indexed_title;
use crate::rules::session::Session;
use crate::store::contract::Commit;
use crate::store::finding::{Finding, Orphan, Remedy};
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::tenure::Tenure;
use crate::types::blob::BlobId;
use crate::types::entry::{Entry, Record};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Seq, SessionKey, Tenant};
use serde::Serialize;
use std::collections::{BTreeSet, HashMap, HashSet};

/// The number of heads that are read in one page.
const PAGE: usize = 4096;

/// The number of times a session is checked if it changes during the check.
const MAX_ATTEMPTS: usize = 3;

/// The maximum number of rounds of repairs. A repair may make another one possible.
const ROUNDS: usize = 3;

/// The number of messages that one step of completing the message index adds.
const INDEX_STEP: usize = 10_000;

const RESTORE_ADVICE: &str = "restore the session from a backup, or purge it";

/// The result of a repair.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RepairReport {
    /// The findings that were repaired.
    pub repaired: Vec<Finding>,
    /// The remaining findings, which need manual intervention.
    pub remaining: Vec<Finding>,
}

impl Tenure {
    /// Checks every session of every tenant and the store itself. Findings are: gaps and damage in
    /// logs, heads that differ from their log, forks without their parent, missing media of
    /// messages, a message index that differs from the messages, and orphaned data. `progress` is called with the number of sessions checked so
    /// far. The store may be in use meanwhile.
    pub async fn examine(&self, mut progress: impl FnMut(usize)) -> Result<Vec<Finding>> {
        let mut exam = Examination {
            tenure: self,
            findings: Vec::new(),
            media: HashMap::new(),
            unreadable: HashSet::new(),
            has_unknown_tenant: false,
            is_indexed: false,
        };
        exam.message_index().await?;
        let mut offset = 0;
        let mut limit = PAGE;
        let mut last = None;
        loop {
            let page =
                self.store().heads(&SessionQuery { offset, ..SessionQuery::new(OwnerFilter::AllTenants, limit) }).await;
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
                Err(Error::Corrupt { location, reason, .. }) => {
                    exam.has_unknown_tenant = true;
                    let finding = Finding::new(location, reason, RESTORE_ADVICE);
                    // The same finding again: all heads are affected, not only one.
                    if last.as_ref() == Some(&finding) {
                        break;
                    }
                    exam.findings.push(finding.clone());
                    last = Some(finding);
                    offset += 1;
                    progress(offset);
                }
                Err(e) => return Err(e),
            }
        }
        // After the sessions, so that all media that they reference are known.
        let store_findings = match self.store().check(&[]).await {
            Err(Error::Corrupt { location, reason, .. }) => {
                vec![Finding::new(location, reason, "restore the store from a backup")]
            }
            findings => findings?,
        };
        let mut findings: Vec<Finding> = store_findings.into_iter().map(|f| exam.confirm_unused(f)).collect();
        findings.extend(exam.findings);
        let mut reported = HashSet::new();
        findings.retain(|f| reported.insert((f.location.clone(), f.description.clone())));
        Ok(findings)
    }

    /// Repairs a finding of [`Tenure::examine`] if that is safe. Returns true if it did. Does
    /// nothing for findings that need manual intervention.
    pub async fn repair(&self, finding: &Finding) -> Result<bool> {
        match &finding.remedy {
            Remedy::Advice(_) => return Ok(false),
            Remedy::Remove(orphan) => drop(self.store().check(std::slice::from_ref(orphan)).await?),
            Remedy::RebuildHead(key) => self.rebuild_head(key).await?,
            Remedy::IndexSession(key) => drop(self.engine.index_session(key).await?),
            Remedy::CompleteMessageIndex => while self.maintain_message_index(INDEX_STEP).await? {},
        }
        Ok(true)
    }

    /// Checks everything, repairs what is safe to repair, and checks again.
    pub async fn repair_all(&self, mut progress: impl FnMut(usize)) -> Result<RepairReport> {
        let mut report = RepairReport::default();
        for _ in 0..ROUNDS {
            report.remaining = self.examine(&mut progress).await?;
            let before = report.repaired.len();
            for finding in report.remaining.iter().filter(|f| f.is_repairable()) {
                match self.repair(finding).await {
                    Ok(true) => report.repaired.push(finding.clone()),
                    Ok(false) => {}
                    Err(error) => {
                        tracing::warn!(location = finding.location, %error, "a finding could not be repaired")
                    }
                }
            }
            if report.repaired.len() == before {
                return Ok(report);
            }
        }
        report.remaining = self.examine(progress).await?;
        Ok(report)
    }

    /// Rebuilds the head of a session from its log.
    async fn rebuild_head(&self, key: &SessionKey) -> Result<()> {
        let missing = || Error::NotFound { session_id: key.session.clone() };
        let stored = self.store().head(key).await?.ok_or_else(missing)?;
        let log = self.engine.log(&stored).await?.into_iter().flatten();
        let Some(session) = Session::replay(key, log) else {
            return Err(Error::corrupt(format!("session {key}"), "its log does not begin with `created`"));
        };
        let mut head = expected_head(&stored, session.head());
        head.due_at = self.engine.due_at(&head);
        self.store().commit(&Commit::new(Some(stored.end()), Vec::new(), head)).await?;
        self.engine.evict(key);
        Ok(())
    }
}

/// The head that follows from the log. Fields that do not follow from it are taken from the stored
/// head: the next sweep time, the expiry of the lease, and where a purge moved the beginning of the
/// log. A prompt prefix that is absent in the stored head stays absent: it is unknown, which is
/// always allowed.
fn expected_head(stored: &Head, replayed: &Head) -> Head {
    let mut head =
        Head { due_at: stored.due_at, first: stored.first, parent: stored.parent.clone(), ..replayed.clone() };
    if let (Some(stored_lease), Some(lease)) = (&stored.lease, &mut head.lease)
        && stored_lease.run == lease.run
    {
        *lease = stored_lease.clone();
    }
    if stored.prompt_prefix.is_none() {
        head.prompt_prefix = None;
    }
    head
}

/// The state of an examination.
struct Examination<'a> {
    tenure: &'a Tenure,
    findings: Vec<Finding>,
    /// The media that messages reference, with what is wrong with each. `None` means that it is intact.
    media: HashMap<(Tenant, BlobId), Option<String>>,
    /// Tenants with a session that could not be read, so that the media it references are unknown.
    unreadable: HashSet<Tenant>,
    /// Whether there is a session of which not even the tenant is known.
    has_unknown_tenant: bool,
    /// Whether the message index is complete, so that it can be compared with the sessions.
    is_indexed: bool,
}

impl Examination<'_> {
    /// Checks whether the message index is complete.
    async fn message_index(&mut self) -> Result<()> {
        let Some(index) = self.tenure.engine.message_index().filter(|index| index.is_used()) else { return Ok(()) };
        match index.next_unindexed(self.tenure.engine.word_rules()).await? {
            None => self.is_indexed = true,
            Some(key) => self.findings.push(Finding {
                location: "message index".to_owned(),
                description: format!("sessions from {key} on are not in it, so searches read all messages"),
                remedy: Remedy::CompleteMessageIndex,
            }),
        }
        Ok(())
    }

    /// Compares the entries of a session in the message index with its log. Messages that were discarded may
    /// be in the index: a fork that no longer exists has shown them. So are the records that set titles.
    async fn check_indexed(&self, head: &Head, log: &[Record]) -> Result<Option<Finding>> {
        let Some(index) = self.tenure.engine.message_index().filter(|_| self.is_indexed) else { return Ok(None) };
        let shown: BTreeSet<_> = self.tenure.engine.shown_messages(head).await?.into_iter().collect();
        let indexed: BTreeSet<_> = index.indexed(&head.key()).await?.into_iter().collect();
        let has_words = |seq: Seq| {
            let found = log.binary_search_by_key(&seq, |record| record.seq);
            found.is_ok_and(|i| {
                let is_message = matches!(log[i].entry, Entry::Message(_));
                is_message || indexed_title(&log[i], head.info.title.as_deref().or(Some(""))).is_some()
            })
        };
        let missing = shown.difference(&indexed).count();
        let wrong = indexed.difference(&shown).filter(|(seq, _)| !has_words(*seq)).count();
        let description = format!("the message index lacks {missing} of its messages, and has {wrong} wrong entries");
        let location = format!("session {}", head.key());
        let finding = Finding { location, description, remedy: Remedy::IndexSession(head.key()) };
        Ok((missing + wrong > 0).then_some(finding))
    }

    /// Checks one session. Findings are only reported if the session did not change meanwhile.
    async fn session(&mut self, mut head: Head) -> Result<()> {
        for attempt in 1.. {
            let findings = match self.check_session(&head).await {
                Ok(findings) => findings,
                Err(Error::Corrupt { location, reason, .. }) => {
                    self.unreadable.insert(head.tenant.clone());
                    vec![Finding::new(location, reason, RESTORE_ADVICE)]
                }
                // The session was purged meanwhile.
                Err(Error::NotFound { .. }) => return Ok(()),
                Err(e) => return Err(e),
            };
            if findings.is_empty() {
                return Ok(());
            }
            // A finding may be caused by a concurrent change: check again if the head has changed.
            match self.tenure.store().head(&head.key()).await {
                Ok(None) => return Ok(()),
                Ok(Some(now)) if now != head && attempt < MAX_ATTEMPTS => head = now,
                _ => {
                    self.findings.extend(findings);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Checks the parent, log, media, decision chain and head of one session.
    async fn check_session(&mut self, head: &Head) -> Result<Vec<Finding>> {
        let key = head.key();
        let location = format!("session {key}");
        if let Some(parent) = &head.parent {
            let session = parent.session.clone();
            let parent_head = self.tenure.store().head(&SessionKey { tenant: key.tenant.clone(), session }).await?;
            let at = parent.seq;
            let problem = match parent_head {
                None => Some(format!("its parent session {} (forked at record {at}) does not exist", parent.session)),
                Some(parent_head) if parent_head.seq < at => Some(format!(
                    "it was forked from {} at record {at}, but the log of that session ends at {}",
                    parent.session, parent_head.seq
                )),
                Some(_) => None,
            };
            if let Some(problem) = problem {
                self.unreadable.insert(key.tenant.clone());
                return Ok(vec![Finding::new(location, problem, "restore its parent from a backup, or purge it")]);
            }
        }
        let log: Vec<Record> = self.tenure.engine.log(head).await?.into_iter().flatten().collect();
        let mut findings = Vec::new();
        if let Some((want, got)) = (1..).zip(&log).map(|(want, r)| (want, r.seq)).find(|(want, got)| want != got) {
            return Err(Error::corrupt(
                location,
                format!("record {want} is missing; record {got} was found in its position"),
            ));
        }
        for record in log.iter().filter(|r| r.seq >= head.first) {
            let message = match &record.entry {
                Entry::Message(post) => &post.message,
                Entry::Compacted { summary: Some(summary), .. } => summary,
                _ => continue,
            };
            for blob_ref in message.blob_refs() {
                if let Some(problem) = self.check_blob(&key.tenant, &blob_ref.id).await? {
                    let advice = "restore the blob from a backup; until then the message cannot be read";
                    findings.push(Finding::new(format!("{location}, record {}", record.seq), problem, advice));
                }
            }
        }
        findings.extend(self.check_indexed(head, &log).await?);
        let mut chain = ChainCheck::default();
        for record in &log {
            if let (_, Some(problem)) = chain.check_record(&key.session, record)
                && record.seq >= head.first
            {
                let advice = "the audit trail was tampered with: compare the session with a backup";
                findings.push(Finding::new(format!("{location}, record {}", record.seq), problem, advice));
            }
        }
        match Session::replay(&key, log) {
            None => findings.push(Finding::new(location, "its log does not begin with `created`", RESTORE_ADVICE)),
            Some(session) if expected_head(head, session.head()) != *head => {
                let problem = format!("the head differs from the log in: {}", differences(head, session.head()));
                findings.push(Finding { location, description: problem, remedy: Remedy::RebuildHead(key) });
            }
            Some(_) => {}
        }
        Ok(findings)
    }

    /// Checks a blob and returns what is wrong with it. Each blob is read only once.
    async fn check_blob(&mut self, tenant: &Tenant, id: &BlobId) -> Result<Option<String>> {
        let blob_key = (tenant.clone(), *id);
        if let Some(known) = self.media.get(&blob_key) {
            return Ok(known.clone());
        }
        let problem = match self.tenure.store().blob(tenant, id).await {
            Ok(Some(bytes)) if BlobId::of(&bytes) == *id => None,
            Ok(Some(_)) => Some(format!("it references blob {id}, whose content does not match its hash")),
            Ok(None) => Some(format!("it references blob {id}, which is missing")),
            Err(Error::Corrupt { location, reason, .. }) => {
                Some(format!("it references blob {id}, which is damaged at {location}: {reason}"))
            }
            Err(e) => return Err(e),
        };
        self.media.insert(blob_key, problem.clone());
        Ok(problem)
    }

    /// Changes a store's finding of an unused blob to advice if a message references the blob, or
    /// if a session that may reference it could not be read.
    fn confirm_unused(&self, finding: Finding) -> Finding {
        let Remedy::Remove(Orphan::Blob(tenant, id)) = &finding.remedy else { return finding };
        let advice = if self.media.contains_key(&(tenant.clone(), *id)) {
            "a message references the blob, but its reference is not counted, so a purge may remove it: export the session and import it again to correct the count"
        } else if self.has_unknown_tenant || self.unreadable.contains(tenant) {
            "a session of the tenant cannot be read and may reference the blob: repair that session first"
        } else {
            return finding;
        };
        Finding::new(finding.location, finding.description, advice)
    }
}

/// The names of the fields in which two heads differ.
fn differences(stored: &Head, replayed: &Head) -> String {
    let fields = |head: &Head| serde_json::to_value(head).unwrap_or_default();
    let replayed = fields(&expected_head(stored, replayed));
    let stored = fields(stored);
    let names = stored.as_object().into_iter().chain(replayed.as_object()).flat_map(|o| o.keys());
    let mut names: Vec<&str> = names.map(|n| &**n).filter(|n| stored.get(n) != replayed.get(n)).collect();
    names.sort();
    names.dedup();
    names.join(", ")
}
