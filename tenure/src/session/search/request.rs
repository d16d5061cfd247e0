//! What to search for, and what a search returns.

use crate::session::search::cursor::SearchCursor;
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::types::id::{Seq, SessionId, User};
use crate::types::message::Role;
use jiff::Timestamp;

/// A search request: what to find, in which sessions, and how much work one page may do.
#[derive(Clone, Debug)]
pub struct SearchRequest {
    /// The search terms. All words must be in a message, in any order, regardless of case and
    /// accents; `"words in quotes"` must be adjacent; `begin*` matches a prefix.
    pub text: String,
    /// Searches only messages of this role. `None` means all roles, and titles too.
    pub role: Option<Role>,
    /// The order of the results.
    pub sort: SearchSort,
    /// Selects the sessions. Its `limit` is the maximum number of results of a page; its cursor and
    /// order are not used.
    pub query: SessionQuery,
    /// The cursor that the previous page returned. `None` starts from the beginning.
    pub cursor: Option<SearchCursor>,
    /// The number of sessions after which a page ends, whether they had results or not.
    pub max_sessions: usize,
    /// The number of bytes of messages after which a page ends.
    pub max_bytes: usize,
    /// The number of store reads after which a page ends: each page of records and each ancestor of
    /// a fork is one.
    pub max_reads: usize,
}

impl SearchRequest {
    /// Searches for `text` in everything that the principal may see, with default bounds.
    pub fn new(text: impl Into<String>, limit: usize) -> Self {
        let query = SessionQuery::new(OwnerFilter::AllTenants, limit);
        Self {
            text: text.into(),
            role: None,
            sort: SearchSort::Time,
            query,
            cursor: None,
            max_sessions: 500,
            max_bytes: 16 << 20,
            max_reads: 1000,
        }
    }
}

/// The order of search results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SearchSort {
    /// The most recently active session first, and within a session the newest message first.
    #[default]
    Time,
    /// The best match first: those with the most occurrences of the terms in the shortest text. Equally good ones
    /// are in the order of [`SearchSort::Time`]. Only the newest 1,000 matches within the bounds of one page
    /// are ranked.
    Relevance,
}

/// A search result: a message, or a session whose title matches.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SearchHit {
    /// The id of the session.
    pub session_id: SessionId,
    /// The user who owns the session.
    pub user: User,
    /// The title of the session, redacted.
    pub title: Option<String>,
    /// The time of the last activity in the session.
    pub active_at: Timestamp,
    /// The matching message. `None` means that the title matched.
    pub message: Option<MessageHit>,
    /// An excerpt of the text around the matches, redacted.
    pub snippet: String,
    /// The matches in the excerpt as ranges of characters: start inclusive, end exclusive, in
    /// order. Offsets count Unicode characters, not bytes (D-083).
    pub highlights: Vec<(usize, usize)>,
}

/// The location of a matching message.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MessageHit {
    /// The position of the message in the session, from 0.
    pub position: usize,
    /// The sequence number of its record.
    pub seq: Seq,
    /// The role of the message.
    pub role: Role,
    /// The time at which the message was stored.
    pub at: Timestamp,
}

/// A page of search results.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct SearchPage {
    /// The results, in the order of the request.
    pub hits: Vec<SearchHit>,
    /// The cursor of the next page. `None` means that everything was searched. A page without
    /// results may have a next one.
    pub next: Option<SearchCursor>,
    /// The number of sessions that were searched: with the message index, only those in which it found a
    /// candidate.
    pub scanned: usize,
    /// Whether the page ended before it was full: because of `max_sessions`, `max_bytes` or
    /// `max_reads`, or because the store scanned `max_scan` heads. By relevance: whether there are older
    /// matches that were not ranked for one of these reasons, or because there are too many.
    pub truncated: bool,
    /// Sessions that could not be searched because their log is damaged.
    pub damaged: Vec<SessionId>,
}
