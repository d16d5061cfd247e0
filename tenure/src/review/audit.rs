//! The audit trail: every decision of a person, in order, linked by a hash chain.
//!
//! The trail is derived from the log alone. Decisions that a rewind has cut off stay in it, and clients cannot write to it.

use crate::rules::decision_chain::{AuditedDecision, ChainCheck};
use crate::rules::session::Session;
use crate::store::query::{Cursor, Query, Range, Whose};
use crate::tenure::Tenure;
use crate::types::entry::Record;
use crate::types::error::Result;
use crate::types::head::{DECISIONS, Head, Reviewing};
use crate::types::id::{Principal, Reach, Seq, SessionId};
use crate::types::status::Status;
use jiff::Timestamp;
use serde_json::Value;
use std::collections::{HashSet, VecDeque};

/// The audit trail of a session.
#[derive(Clone, Debug, PartialEq)]
pub struct AuditTrail {
    /// The decisions, oldest first.
    pub decisions: Vec<AuditedDecision>,
    /// Where the chain is broken first, and why.
    pub broken: Option<(Seq, String)>,
}

impl AuditTrail {
    /// The audit trail of a whole log, compared with the end of the chain that the session's head records.
    pub(crate) fn of<'r>(head: &Head, log: impl IntoIterator<Item = &'r Record>) -> Self {
        let mut check = ChainCheck::default();
        let mut trail = Self { decisions: Vec::new(), broken: None };
        for record in log {
            let (decision, broken) = check.take(&head.info.session_id, record);
            trail.decisions.extend(decision);
            if trail.broken.is_none() {
                trail.broken = broken.map(|why| (record.seq, why));
            }
        }
        if trail.broken.is_none() && check.chain() != head.decisions {
            let last = trail.decisions.last().map_or(head.seq, |d| d.seq);
            let why = "the last decision is not the one that the session's head records".to_owned();
            trail.broken = Some((last, why));
        }
        trail
    }
}

impl Session {
    /// Its head as a fork at this record copies it: without the decisions that were made later.
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

/// Which decisions of a tenant to export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuditRange {
    /// Made at or after this time.
    pub from: Option<Timestamp>,
    /// Made before this time.
    pub to: Option<Timestamp>,
}

impl AuditRange {
    fn contains(&self, at: Timestamp) -> bool {
        self.from.is_none_or(|from| at >= from) && self.to.is_none_or(|to| at < to)
    }
}

/// So many heads are read at once.
const HEADS: usize = 100;

/// The decisions of all sessions that a principal sees, one page of records after the other. Memory is bounded by one page of records
/// and sixteen bytes per session with decisions.
#[derive(Debug)]
pub struct AuditExport {
    tenure: Tenure,
    whose: Whose,
    range: AuditRange,
    began: Timestamp,
    /// Sessions that were exported already: one that becomes active meanwhile moves to the front of the list.
    seen: HashSet<[u8; 16]>,
    heads: VecDeque<Head>,
    cursor: Option<Cursor>,
    /// Whether this pass is over all sessions, or only over those that were active since the export began.
    again: bool,
    found: bool,
    ended: bool,
    current: Option<(Head, Seq, ChainCheck)>,
}

impl Tenure {
    /// The audit trail of a session, whatever its status; a fork's begins with its parent's part.
    pub async fn audit(&self, who: &Principal, id: &SessionId) -> Result<AuditTrail> {
        let head = self.head(who, id).await?;
        let log = self.engine.log(&head).await?;
        Ok(AuditTrail::of(&head, log.iter().flatten()))
    }

    /// Exports the decisions of all sessions that `who` sees, of every status. They are ordered by session, and by record within one. A
    /// decision that forks share is exported once, with the session whose log has it.
    pub fn audit_export(&self, who: &Principal, range: AuditRange) -> AuditExport {
        let whose = match who.reach {
            Reach::Own => Whose::User(who.tenant.clone(), who.user.clone()),
            Reach::Tenant => Whose::Tenant(who.tenant.clone()),
        };
        AuditExport {
            tenure: self.clone(),
            whose,
            range,
            began: self.now(),
            seen: HashSet::new(),
            heads: VecDeque::new(),
            cursor: None,
            again: false,
            found: false,
            ended: false,
            current: None,
        }
    }
}

impl AuditExport {
    /// The next decisions; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Vec<AuditedDecision>>> {
        loop {
            if let Some((head, last, mut check)) = self.current.take() {
                let page =
                    self.tenure.store().records(&head.key(), &Range { upto: head.seq, ..Range::after(last) }).await?;
                // A session that was purged meanwhile has no records any more.
                let Some(end) = page.last().map(|r| r.seq) else { continue };
                let id = &head.info.session_id;
                let decisions = page.iter().filter_map(|record| check.take(id, record).0);
                let decisions: Vec<_> = decisions.filter(|d| self.range.contains(d.at)).collect();
                if end < head.seq {
                    self.current = Some((head, end, check));
                }
                if !decisions.is_empty() {
                    return Ok(Some(decisions));
                }
            } else if let Some(head) = self.heads.pop_front() {
                self.visit(head);
            } else if self.ended {
                return Ok(None);
            } else {
                self.more().await?;
            }
        }
    }

    fn visit(&mut self, head: Head) {
        let mut id = [0; 16];
        id.copy_from_slice(&blake3::hash(head.info.session_id.as_str().as_bytes()).as_bytes()[..16]);
        if !self.seen.insert(id) {
            return;
        }
        self.found = true;
        // A fork may own older records, which it inherited from a session that was purged.
        let whole = head.parent.is_none() && head.first == 1 && head.decisions.is_none_or(|c| c.count > 0);
        let over = self.range.from.is_some_and(|from| head.info.updated_at < from);
        if whole && over {
            return;
        }
        let first = head.first;
        self.current = Some((head, first - 1, ChainCheck::default()));
    }

    async fn more(&mut self) -> Result<()> {
        let mut query = Query::new(self.whose.clone(), HEADS);
        query.status = vec![Status::Active, Status::Paused, Status::Expired, Status::Deleted];
        query.reviewing = Some(Reviewing::Decided);
        query.cursor = self.cursor.take();
        let heads = self.tenure.store().heads(&query).await?;
        let more = heads.len() == HEADS && (!self.again || heads.last().is_some_and(|h| h.active_at >= self.began));
        self.cursor = heads.last().filter(|_| more).map(Cursor::of);
        self.heads = heads.into();
        if !more {
            // Sessions that became active during a pass may have moved past it. Passes are repeated until one finds nothing new.
            self.ended = self.again && !self.found;
            (self.again, self.found) = (true, false);
        }
        Ok(())
    }
}
