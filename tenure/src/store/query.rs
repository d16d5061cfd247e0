//! Queries for heads and ranges of records.
//!
//! Invariant: [`SessionQuery::matches`] defines which sessions a query selects; every store's index must
//! agree with it.

use crate::types::digest::VisibleHash;
use crate::types::error::{Error, Result};
use crate::types::head::{Head, ReviewIndexLabel, field_label, fold_case, origin_label, tag_label};
use crate::types::id::{Seq, SessionId, Tenant, User};
use crate::types::status::Status;
use jiff::Timestamp;

use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;

/// A page of heads that was found with a bounded scan ([`Store::page`](crate::store::Store::page)).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeadPage {
    /// The matching heads, newest first.
    pub heads: Vec<Head>,
    /// The position of the last head that was scanned, if the scan bound ended the page. `None`
    /// means that the page ended at its limit, or that there are no more heads.
    pub scan_stopped_at: Option<SessionCursor>,
}

/// A range of a session's records.
#[derive(Clone, Debug)]
pub struct RecordRange {
    /// Exclusive lower bound: only records after this one.
    pub after: Seq,
    /// Inclusive upper bound: only records up to this one.
    pub upto: Seq,
    /// The order in which the records are read.
    pub order: ReadDirection,
    /// Maximum number of records.
    pub limit: usize,
}

impl RecordRange {
    /// Selects all records after `seq`, oldest first.
    pub fn after(seq: Seq) -> Self {
        Self { after: seq, upto: Seq::MAX, order: ReadDirection::Forward, limit: usize::MAX }
    }

    /// Selects the last `limit` records up to `upto` (inclusive), newest first.
    pub fn back_from(upto: Seq, limit: usize) -> Self {
        Self { after: 0, upto, order: ReadDirection::Backward, limit }
    }
}

/// The order in which records are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadDirection {
    /// Oldest first.
    Forward,
    /// Newest first.
    Backward,
}

/// The owner filter of a query: the sessions that it considers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnerFilter {
    /// The sessions of one user.
    User(Tenant, User),
    /// The sessions of one tenant.
    Tenant(Tenant),
    /// The sessions of all tenants: only for the sweep and for taking over runs.
    AllTenants,
}

/// The sort order of heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SessionOrder {
    /// Most recently active first; equal times by session id, descending (D-029).
    #[default]
    Newest,
    /// Least recently active first, the reverse of [`SessionOrder::Newest`]. Cannot be combined with a
    /// cursor.
    Oldest,
    /// Earliest due time first. Requires `due_before`; cannot be combined with a cursor.
    Due,
}

/// The times of last activity before which active sessions have expired. With it, a query compares the
/// effective status of a session instead of the stored one: expiry needs no sweep.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpiryCutoffs {
    /// The cutoff of sessions whose assistant is not in `by_assistant`. `None` means that they do not expire.
    pub default: Option<Timestamp>,
    /// The cutoffs of assistants with a time to live of their own.
    pub by_assistant: BTreeMap<String, Option<Timestamp>>,
}

impl ExpiryCutoffs {
    /// Returns the effective status of a session: an active session has expired if it was last active before
    /// its cutoff.
    pub fn status_of(&self, head: &Head) -> Status {
        let own = head.assistant.as_ref().and_then(|name| self.by_assistant.get(name));
        let cutoff = own.copied().unwrap_or(self.default);
        match head.status {
            Status::Active if cutoff.is_some_and(|cutoff| head.active_at < cutoff) => Status::Expired,
            status => status,
        }
    }

    /// The cutoffs of assistants in microseconds, as parallel lists, and the default. A cutoff before every
    /// possible time means that sessions do not expire.
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    pub(crate) fn in_micros(&self) -> (Vec<String>, Vec<i64>, i64) {
        // Stored times are whole microseconds: a cutoff is rounded up.
        let micros =
            |cutoff: &Option<Timestamp>| cutoff.map_or(i64::MIN, |t| (t.as_nanosecond() + 999).div_euclid(1000) as i64);
        let names = self.by_assistant.keys().cloned().collect();
        (names, self.by_assistant.values().map(micros).collect(), micros(&self.default))
    }
}

/// A query for sessions. A session matches if it satisfies all conditions; a condition that is
/// `None` or empty always holds.
#[derive(Clone, Debug)]
pub struct SessionQuery {
    /// The owner of the session.
    pub owner: OwnerFilter,
    /// The session's assistant.
    pub assistant: Option<String>,
    /// The session's chat thread.
    pub thread: Option<String>,
    /// The session has one of these statuses. Empty means any status.
    pub status: Vec<Status>,
    /// Compares `status` with the effective status at these cutoffs. `None` means with the stored status.
    pub expiry: Option<ExpiryCutoffs>,
    /// The session was created at or after this time.
    pub created_after: Option<Timestamp>,
    /// The session was created before this time.
    pub created_before: Option<Timestamp>,
    /// The session has all of these tags.
    pub tags: Vec<String>,
    /// The session has all of these metadata fields (top level, scalar values).
    pub metadata: Vec<(String, Value)>,
    /// The session's title contains this text, compared case-insensitively.
    pub title: Option<String>,
    /// The session has this relation to human review.
    pub reviewing: Option<ReviewIndexLabel>,
    /// The session was imported from the export with this hash
    /// ([`Origin::export`](crate::log::Origin::export)).
    pub origin: Option<String>,
    /// The session is one of these. Empty means any session.
    pub sessions: Vec<SessionId>,
    /// The session is a fork whose parent is this session.
    pub parent: Option<SessionId>,
    /// The session's visible messages have one of these hashes.
    pub hashes: Vec<VisibleHash>,
    /// The session has one of these match keys ([`LogDigest::match_keys`](crate::log::LogDigest::match_keys)).
    /// Requires [`OwnerFilter::User`].
    pub matches: Vec<VisibleHash>,
    /// The session is due before this time.
    pub due_before: Option<Timestamp>,
    /// The session has a lease that ended before this time.
    pub lease_before: Option<Timestamp>,
    /// The sort order of the result.
    pub order: SessionOrder,
    /// Only sessions after this position in the list.
    pub cursor: Option<SessionCursor>,
    /// Number of matching sessions to skip.
    pub offset: usize,
    /// Maximum number of sessions.
    pub limit: usize,
}

impl SessionQuery {
    /// Creates a query for all sessions of an owner filter, newest first.
    pub fn new(owner: OwnerFilter, limit: usize) -> Self {
        Self {
            owner,
            limit,
            assistant: None,
            thread: None,
            status: Vec::new(),
            expiry: None,
            created_after: None,
            created_before: None,
            tags: Vec::new(),
            metadata: Vec::new(),
            title: None,
            reviewing: None,
            origin: None,
            sessions: Vec::new(),
            parent: None,
            hashes: Vec::new(),
            matches: Vec::new(),
            due_before: None,
            lease_before: None,
            order: SessionOrder::Newest,
            cursor: None,
            offset: 0,
        }
    }

    /// The labels ([`Head::labels`]) that a session must have to match: tags, metadata fields,
    /// review relation and origin.
    pub fn labels(&self) -> Vec<String> {
        let tags = self.tags.iter().map(|t| tag_label(t));
        let fields = self.metadata.iter().map(|(k, v)| field_label(k, v));
        let origin = self.origin.iter().map(|export| origin_label(export));
        tags.chain(fields).chain(self.reviewing.iter().map(ReviewIndexLabel::label)).chain(origin).collect()
    }

    /// The case-folded text that the folded title ([`Head::folded_title`]) must contain. `None`
    /// means any title.
    pub fn folded_title(&self) -> Option<String> {
        self.title.as_deref().map(fold_case)
    }

    /// Returns whether a session matches, regardless of order, cursor, offset and limit. This is
    /// the reference that every store's result must agree with.
    pub fn matches(&self, head: &Head) -> bool {
        let has = |want: &Option<String>, got: &Option<String>| want.is_none() || want == got;
        let labels = self.labels();
        let labelled = || {
            let have = head.labels();
            labels.iter().all(|l| have.contains(l))
        };
        (match &self.owner {
            OwnerFilter::User(t, u) => head.tenant == *t && head.user == *u,
            OwnerFilter::Tenant(t) => head.tenant == *t,
            OwnerFilter::AllTenants => true,
        }) && has(&self.assistant, &head.assistant)
            && has(&self.thread, &head.thread)
            && (self.status.is_empty()
                || self.status.contains(&self.expiry.as_ref().map_or(head.status, |e| e.status_of(head))))
            && self.created_after.is_none_or(|t| head.info.created_at >= t)
            && self.created_before.is_none_or(|t| head.info.created_at < t)
            && (labels.is_empty() || labelled())
            && self.folded_title().is_none_or(|t| head.folded_title().contains(&t))
            && (self.sessions.is_empty() || self.sessions.contains(&head.info.session_id))
            && self.parent.as_ref().is_none_or(|p| head.parent.as_ref().is_some_and(|h| h.session == *p))
            && (self.hashes.is_empty() || self.hashes.contains(&head.digest.hash))
            && (self.matches.is_empty() || head.digest.match_keys().iter().any(|key| self.matches.contains(key)))
            && self.due_before.is_none_or(|t| head.due_at.is_some_and(|d| d < t))
            && self.lease_before.is_none_or(|t| head.lease.as_ref().is_some_and(|l| l.until < t))
    }
}

/// A position in a list of sessions, newest first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SessionCursor {
    /// The last activity of the session at this position.
    pub active_at: Timestamp,
    /// The session at this position.
    pub session: SessionId,
}

impl SessionCursor {
    /// Returns the position of a session: the next page starts after it.
    pub fn of(head: &Head) -> Self {
        Self { active_at: head.active_at, session: head.info.session_id.clone() }
    }
}

impl fmt::Display for SessionCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}~{}", self.active_at.as_microsecond(), self.session)
    }
}

impl std::str::FromStr for SessionCursor {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let wrong = || Error::invalid("cursor", "invalid cursor; use the cursor that the previous page returned");
        let (at, session) = s.split_once('~').ok_or_else(wrong)?;
        let at = at.parse().ok().and_then(|at| Timestamp::from_microsecond(at).ok()).ok_or_else(wrong)?;
        Ok(Self { active_at: at, session: SessionId::new(session).map_err(|_| wrong())? })
    }
}
