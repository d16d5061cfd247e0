//! The audit trail: every review decision, in order, linked by a hash chain.
//!
//! The trail is derived from the log alone. Decisions discarded by a rewind stay in it, and clients
//! cannot write to it (D-064, D-065).

use crate::rules::decision_chain::{AuditedDecision, ChainCheck};
use crate::rules::session::Session;
use crate::store::query::{OwnerFilter, RecordRange, SessionCursor, SessionQuery};
use crate::tenure::Tenure;
use crate::types::entry::Record;
use crate::types::error::Result;
use crate::types::head::{DECISIONS, Head, ReviewIndexLabel};
use crate::types::id::{AccessScope, Principal, Seq, SessionId};
use crate::types::status::Status;
use jiff::Timestamp;
use serde_json::Value;
use std::collections::{HashSet, VecDeque};

/// The audit trail of a session.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct AuditTrail {
    /// The decisions, oldest first.
    pub decisions: Vec<AuditedDecision>,
    /// Position and reason of the first break in the hash chain. `None` means that the chain is
    /// intact.
    pub broken: Option<(Seq, String)>,
}

impl AuditTrail {
    /// Builds the audit trail of a complete log and compares it with the end of the chain recorded
    /// in the session's head.
    pub(crate) fn from_log<'r>(head: &Head, log: impl IntoIterator<Item = &'r Record>) -> Self {
        let mut check = ChainCheck::default();
        let mut trail = Self { decisions: Vec::new(), broken: None };
        for record in log {
            let (decision, broken) = check.check_record(&head.info.session_id, record);
            trail.decisions.extend(decision);
            if trail.broken.is_none() {
                trail.broken = broken.map(|reason| (record.seq, reason));
            }
        }
        if trail.broken.is_none() && check.chain() != head.decisions {
            let last = trail.decisions.last().map_or(head.seq, |d| d.seq);
            let reason = "the last decision differs from the end of the hash chain in the session's head".to_owned();
            trail.broken = Some((last, reason));
        }
        trail
    }
}

impl Session {
    /// Returns the head as a fork at `seq` copies it: without decisions made after that record.
    pub(crate) fn head_at(&self, seq: Seq) -> Head {
        let mut head = self.head().clone();
        let count = self.decided.partition_point(|(s, _)| *s <= seq);
        if count == self.decided.len() {
            return head;
        }
        head.decisions = count.checked_sub(1).and_then(|last| self.decided[last].1);
        if let Some(Value::Array(all)) = head.info.metadata.get_mut(DECISIONS) {
            all.truncate(count);
        }
        if count == 0 {
            head.info.metadata.remove(DECISIONS);
        }
        head
    }
}

/// The time range of an audit export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuditRange {
    /// Include decisions made at or after this time. `None` means no lower bound.
    pub from: Option<Timestamp>,
    /// Include decisions made before this time. `None` means no upper bound.
    pub to: Option<Timestamp>,
}

impl AuditRange {
    fn contains(&self, at: Timestamp) -> bool {
        self.from.is_none_or(|from| at >= from) && self.to.is_none_or(|to| at < to)
    }
}

/// Number of heads read per page.
const HEADS_PER_PAGE: usize = 100;

/// A paged export of the decisions of all sessions visible to a principal. Memory is bounded by one
/// page of records and sixteen bytes per session with decisions.
#[derive(Debug)]
#[non_exhaustive]
pub struct AuditExport {
    tenure: Tenure,
    owner_filter: OwnerFilter,
    range: AuditRange,
    started_at: Timestamp,
    /// Digests of the sessions that were already exported. A session that becomes active during the
    /// export moves to the front of the list and is found again.
    seen: HashSet<[u8; 16]>,
    heads: VecDeque<Head>,
    cursor: Option<SessionCursor>,
    /// True in passes after the first. They cover only sessions that were active since the export
    /// began.
    is_repeated_pass: bool,
    found_session: bool,
    is_finished: bool,
    current: Option<(Head, Seq, ChainCheck)>,
}

impl Tenure {
    /// Returns the audit trail of a session of any status. A fork's trail starts with the decisions
    /// inherited from its parent.
    pub async fn audit(&self, principal: &Principal, id: &SessionId) -> Result<AuditTrail> {
        let head = self.head(principal, id).await?;
        let log = self.engine.log(&head).await?;
        Ok(AuditTrail::from_log(&head, log.iter().flatten()))
    }

    /// Exports the decisions of all sessions visible to `principal`, of every status, ordered by
    /// session and by record within a session. A decision shared by forks is exported once, with
    /// the session whose log contains it.
    pub fn audit_export(&self, principal: &Principal, range: AuditRange) -> AuditExport {
        let owner_filter = match principal.scope {
            AccessScope::Own => OwnerFilter::User(principal.tenant.clone(), principal.user.clone()),
            AccessScope::Tenant => OwnerFilter::Tenant(principal.tenant.clone()),
        };
        AuditExport {
            tenure: self.clone(),
            owner_filter,
            range,
            started_at: self.now(),
            seen: HashSet::new(),
            heads: VecDeque::new(),
            cursor: None,
            is_repeated_pass: false,
            found_session: false,
            is_finished: false,
            current: None,
        }
    }
}

impl AuditExport {
    /// Returns the next page of decisions. `None` means the end of the export.
    pub async fn next(&mut self) -> Result<Option<Vec<AuditedDecision>>> {
        loop {
            if let Some((head, last, mut check)) = self.current.take() {
                let page = self
                    .tenure
                    .store()
                    .records(&head.key(), &RecordRange { upto: head.seq, ..RecordRange::after(last) })
                    .await?;
                // A session purged during the export has no records left.
                let Some(end) = page.last().map(|r| r.seq) else { continue };
                let id = &head.info.session_id;
                let decisions = page.iter().filter_map(|record| check.check_record(id, record).0);
                let decisions: Vec<_> = decisions.filter(|d| self.range.contains(d.at)).collect();
                if end < head.seq {
                    self.current = Some((head, end, check));
                }
                if !decisions.is_empty() {
                    return Ok(Some(decisions));
                }
            } else if let Some(head) = self.heads.pop_front() {
                self.visit(head);
            } else if self.is_finished {
                return Ok(None);
            } else {
                self.load_heads().await?;
            }
        }
    }

    fn visit(&mut self, head: Head) {
        let mut id = [0; 16];
        id.copy_from_slice(&blake3::hash(head.info.session_id.as_str().as_bytes()).as_bytes()[..16]);
        if !self.seen.insert(id) {
            return;
        }
        self.found_session = true;
        // A fork may own older records, inherited from a purged parent (D-001), so its log is read
        // in any case.
        let owns_all_records = head.parent.is_none() && head.first == 1 && head.decisions.is_none_or(|c| c.count > 0);
        let is_before_range = self.range.from.is_some_and(|from| head.info.updated_at < from);
        if owns_all_records && is_before_range {
            return;
        }
        let first = head.first;
        self.current = Some((head, first - 1, ChainCheck::default()));
    }

    async fn load_heads(&mut self) -> Result<()> {
        let mut query = SessionQuery::new(self.owner_filter.clone(), HEADS_PER_PAGE);
        query.status = vec![Status::Active, Status::Paused, Status::Expired, Status::Deleted];
        query.reviewing = Some(ReviewIndexLabel::Decided);
        query.cursor = self.cursor.take();
        let heads = self.tenure.store().heads(&query).await?;
        let has_more = heads.len() == HEADS_PER_PAGE
            && (!self.is_repeated_pass || heads.last().is_some_and(|h| h.active_at >= self.started_at));
        self.cursor = heads.last().filter(|_| has_more).map(SessionCursor::of);
        self.heads = heads.into();
        if !has_more {
            // Sessions that became active during a pass may have moved past its cursor. Passes are
            // repeated until one finds no new session.
            self.is_finished = self.is_repeated_pass && !self.found_session;
            self.is_repeated_pass = true;
            self.found_session = false;
        }
        Ok(())
    }
}
