//! Queries for heads and records.

use crate::types::digest::VisibleHash;
use crate::types::error::{Error, Result};
use crate::types::head::{Head, Reviewing, field_label, fold_case, origin_label, tag_label};
use crate::types::id::{Seq, SessionId, Tenant, User};
use crate::types::status::Status;
use jiff::Timestamp;

use serde_json::Value;
use std::fmt;

/// Index cards that were found with bounded work.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeadPage {
    /// The cards, newest first.
    pub heads: Vec<Head>,
    /// The last card that was looked at, if the page ended there and not because of its limit or because there are no more.
    pub stopped: Option<Cursor>,
}

/// Which records.
#[derive(Clone, Debug)]
pub struct Range {
    /// Only records after this one.
    pub after: Seq,
    /// Only records up to this one.
    pub upto: Seq,
    /// From which end.
    pub order: Direction,
    /// At most so many.
    pub limit: usize,
}

impl Range {
    /// All records after one, oldest first.
    pub fn after(seq: Seq) -> Self {
        Self { after: seq, upto: Seq::MAX, order: Direction::Forward, limit: usize::MAX }
    }

    /// The last records up to one, newest first.
    pub fn back_from(upto: Seq, limit: usize) -> Self {
        Self { after: 0, upto, order: Direction::Backward, limit }
    }
}

/// Which end comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Oldest first.
    Forward,
    /// Newest first.
    Backward,
}

/// Whose sessions a query looks at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Those of one user.
    User(Tenant, User),
    /// Those of a tenant.
    Tenant(Tenant),
    /// All: for the sweep and for taking over runs only.
    Everyone,
}

/// The order of index cards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Last active first; equal times by session id, descending.
    #[default]
    Newest,
    /// The same, the other way round: longest idle first (without a cursor).
    Oldest,
    /// First due first (only with `due_before`, and without a cursor).
    Due,
}

/// Which sessions. All conditions must hold.
#[derive(Clone, Debug)]
pub struct Query {
    /// Whose.
    pub whose: Whose,
    /// Of which assistant.
    pub assistant: Option<String>,
    /// Of which chat thread.
    pub thread: Option<String>,
    /// In one of these states; empty: any.
    pub status: Vec<Status>,
    /// Created at or after.
    pub created_after: Option<Timestamp>,
    /// Created before.
    pub created_before: Option<Timestamp>,
    /// With all of these tags.
    pub tags: Vec<String>,
    /// With all of these metadata fields (top level, plain values).
    pub metadata: Vec<(String, Value)>,
    /// With this text in the title, whatever its case.
    pub title: Option<String>,
    /// Having to do with people in this way.
    pub reviewing: Option<Reviewing>,
    /// Imported from the export with this hash ([`Origin::export`](crate::Origin::export)).
    pub origin: Option<String>,
    /// Leaning on this session.
    pub parent: Option<SessionId>,
    /// With one of these conversations.
    pub hashes: Vec<VisibleHash>,
    /// With one of these match keys ([`Mark::match_keys`](crate::Mark::match_keys)); only with [`Whose::User`].
    pub matches: Vec<VisibleHash>,
    /// Due before.
    pub due_before: Option<Timestamp>,
    /// With a lease that ended before.
    pub lease_before: Option<Timestamp>,
    /// In which order.
    pub order: Order,
    /// After the session this cursor names.
    pub cursor: Option<Cursor>,
    /// Leaving out the first so many.
    pub offset: usize,
    /// At most so many.
    pub limit: usize,
}

impl Query {
    /// Everything of somebody, newest first.
    pub fn new(whose: Whose, limit: usize) -> Self {
        Self {
            whose,
            limit,
            assistant: None,
            thread: None,
            status: Vec::new(),
            created_after: None,
            created_before: None,
            tags: Vec::new(),
            metadata: Vec::new(),
            title: None,
            reviewing: None,
            origin: None,
            parent: None,
            hashes: Vec::new(),
            matches: Vec::new(),
            due_before: None,
            lease_before: None,
            order: Order::Newest,
            cursor: None,
            offset: 0,
        }
    }

    /// The labels ([`Head::labels`]) that a session must have.
    pub fn labels(&self) -> Vec<String> {
        let tags = self.tags.iter().map(|t| tag_label(t));
        let fields = self.metadata.iter().map(|(k, v)| field_label(k, v));
        let origin = self.origin.iter().map(|export| origin_label(export));
        tags.chain(fields).chain(self.reviewing.iter().map(Reviewing::label)).chain(origin).collect()
    }

    /// What the folded title ([`Head::folded_title`]) must contain.
    pub fn folded_title(&self) -> Option<String> {
        self.title.as_deref().map(fold_case)
    }

    /// Whether a session matches, order, cursor, offset and limit apart: what every store's answer must agree with.
    pub fn matches(&self, head: &Head) -> bool {
        let has = |want: &Option<String>, got: &Option<String>| want.is_none() || want == got;
        let labels = self.labels();
        let labelled = || {
            let have = head.labels();
            labels.iter().all(|l| have.contains(l))
        };
        (match &self.whose {
            Whose::User(t, u) => head.tenant == *t && head.user == *u,
            Whose::Tenant(t) => head.tenant == *t,
            Whose::Everyone => true,
        }) && has(&self.assistant, &head.assistant)
            && has(&self.thread, &head.thread)
            && (self.status.is_empty() || self.status.contains(&head.status))
            && self.created_after.is_none_or(|t| head.info.created_at >= t)
            && self.created_before.is_none_or(|t| head.info.created_at < t)
            && (labels.is_empty() || labelled())
            && self.folded_title().is_none_or(|t| head.folded_title().contains(&t))
            && self.parent.as_ref().is_none_or(|p| head.parent.as_ref().is_some_and(|h| h.session == *p))
            && (self.hashes.is_empty() || self.hashes.contains(&head.mark.hash))
            && (self.matches.is_empty() || head.mark.match_keys().iter().any(|key| self.matches.contains(key)))
            && self.due_before.is_none_or(|t| head.due_at.is_some_and(|d| d < t))
            && self.lease_before.is_none_or(|t| head.lease.as_ref().is_some_and(|l| l.until < t))
    }
}

/// A place in a list of sessions, newest first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cursor {
    /// When the session was last active.
    pub active_at: Timestamp,
    /// Which session.
    pub session: SessionId,
}

impl Cursor {
    /// The place after a session.
    pub fn of(head: &Head) -> Self {
        Self { active_at: head.active_at, session: head.info.session_id.clone() }
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}~{}", self.active_at.as_microsecond(), self.session)
    }
}

impl std::str::FromStr for Cursor {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let wrong = || Error::invalid("cursor", "not a cursor; use the one that came with the page before");
        let (at, session) = s.split_once('~').ok_or_else(wrong)?;
        let at = at.parse().ok().and_then(|at| Timestamp::from_microsecond(at).ok()).ok_or_else(wrong)?;
        Ok(Self { active_at: at, session: SessionId::new(session).map_err(|_| wrong())? })
    }
}
