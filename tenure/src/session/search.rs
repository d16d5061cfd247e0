//! Full-text search over the messages of all sessions that a principal may see, newest first.
//!
//! There is no index and no second copy of the text: the logs are scanned in the store, one page at
//! a time. Discarded messages are not found because the scan skips them; erased and purged messages
//! are not found because they are no longer stored (D-082).

use crate::rules::matcher::{Matcher, snippet};
use crate::rules::redaction::Redaction;
use crate::store::query::{HeadPage, OwnerFilter, RecordRange, SessionCursor, SessionOrder, SessionQuery};
use crate::tenure::Tenure;
use crate::types::entry::{Entry, MessageEntry, Record};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Principal, Seq, SessionId, SessionKey, User};
use crate::types::message::{Message, Role};
use jiff::Timestamp;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The number of heads that are read in one page.
const CARDS: usize = 32;
/// The number of records that are read in one page.
const RECORDS: usize = 128;
/// The number of bytes of text above which a page is scanned on a blocking thread, so that other
/// tasks do not wait.
const MUCH: usize = 256 << 10;

/// A search request: what to find, in which sessions, and how much work one page may do.
#[derive(Clone, Debug)]
pub struct SearchRequest {
    /// The search terms. All words must be in a message, in any order, regardless of case and
    /// accents; `"words in quotes"` must be adjacent; `begin*` matches a prefix.
    pub text: String,
    /// Searches only messages of this role. `None` means all roles, and titles too.
    pub role: Option<Role>,
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
        let query = SessionQuery::new(OwnerFilter::Everyone, limit);
        Self {
            text: text.into(),
            role: None,
            query,
            cursor: None,
            max_sessions: 500,
            max_bytes: 16 << 20,
            max_reads: 1000,
        }
    }
}

/// A search result: a message, or a session whose title matches.
#[derive(Clone, Debug, PartialEq)]
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
    pub said: Option<MessageHit>,
    /// An excerpt of the text around the matches, redacted.
    pub snippet: String,
    /// The matches in the excerpt as ranges of characters: start inclusive, end exclusive, in
    /// order. Offsets count Unicode characters, not bytes (D-083).
    pub highlights: Vec<(usize, usize)>,
}

/// The location of a matching message.
#[derive(Clone, Debug, PartialEq)]
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
pub struct SearchPage {
    /// The results: the most recently active session first, and within a session the newest message first.
    pub found: Vec<SearchHit>,
    /// The cursor of the next page. `None` means that everything was searched. A page without
    /// results may have a next one.
    pub next: Option<SearchCursor>,
    /// The number of sessions that were searched.
    pub looked_at: usize,
    /// Whether the page ended before it was full: because of `max_sessions`, `max_bytes` or
    /// `max_reads`, or because the store scanned `max_scan` heads.
    pub cut: bool,
    /// Sessions that could not be searched because their log is damaged.
    pub damaged: Vec<SessionId>,
}

/// A position in a search, opaque to clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchCursor {
    session: SessionCursor,
    inside: Option<ScanPosition>,
}

/// A position in a session: records up to `upto` have not been searched yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ScanPosition {
    upto: Seq,
    /// The number of messages up to `upto`. It is valid only if the log still ends at `seq`.
    messages: usize,
    seq: Seq,
}

impl fmt::Display for SearchCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.inside {
            None => write!(f, "{}", self.session),
            Some(ScanPosition { upto, messages, seq }) => write!(f, "{}~{upto}~{messages}~{seq}", self.session),
        }
    }
}

impl FromStr for SearchCursor {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let wrong = || Error::invalid("cursor", "not a cursor; use the one that came with the page before");
        let mut parts = s.splitn(3, '~');
        let (at, session) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let session = format!("{at}~{session}").parse()?;
        let Some(rest) = parts.next() else { return Ok(Self { session, inside: None }) };
        let numbers: Vec<Seq> = rest.split('~').map(|n| n.parse().map_err(|_| wrong())).collect::<Result<_>>()?;
        match numbers[..] {
            [upto, messages, seq] => {
                Ok(Self { session, inside: Some(ScanPosition { upto, messages: messages as usize, seq }) })
            }
            _ => Err(wrong()),
        }
    }
}

/// The state of a search while it fills a page.
struct SearchState<'a> {
    who: &'a Principal,
    search: &'a SearchRequest,
    needle: Arc<Matcher>,
    redaction: &'a Redaction,
    page: SearchPage,
    bytes: usize,
    reads: usize,
}

impl SearchState<'_> {
    /// Returns true if the page has all the results that it may have.
    fn is_full(&self) -> bool {
        self.page.found.len() >= self.search.query.limit.max(1)
    }

    /// Returns true if the page must end.
    fn is_over(&self) -> bool {
        self.is_full() || self.bytes >= self.search.max_bytes.max(1) || self.reads >= self.search.max_reads.max(1)
    }

    /// Adds a result to the page.
    fn note(&mut self, head: &Head, said: Option<MessageHit>, (snippet, highlights): (String, Vec<(usize, usize)>)) {
        let title = head.info.title.as_deref().map(|t| self.redaction.apply(t).0.into_owned());
        let (session_id, user, active_at) = (head.info.session_id.clone(), head.user.clone(), head.active_at);
        self.page.found.push(SearchHit { session_id, user, title, active_at, said, snippet, highlights });
    }
}

/// A message that the scan has reached.
struct SearchCandidate {
    at: MessageHit,
    message: Message,
}

/// A backward scan through the log of a session and the logs of its ancestors, from the last
/// message to the first.
struct BackwardScan {
    head: Head,
    /// The session or ancestor whose records are being read.
    current: Head,
    /// Records up to this one have not been read yet.
    upto: Seq,
    /// Messages after this one were searched on an earlier page.
    below: Seq,
    /// The number of messages up to `upto`.
    messages: usize,
    /// Whether the scan is still seeking the position where an earlier page ended. These reads do
    /// not count towards `max_reads`: otherwise a search through more ancestors than one page may
    /// read would never make progress.
    seeking: bool,
}

impl BackwardScan {
    /// Starts a scan at the end of a session, or continues it from a position.
    fn begin(head: Head, inside: Option<ScanPosition>) -> Self {
        let (upto, messages) = match inside {
            Some(inside) if inside.seq == head.seq => (inside.upto.min(head.seq), inside.messages),
            _ => (head.seq, head.mark.messages),
        };
        let below = inside.map_or(Seq::MAX, |i| i.upto);
        Self { current: head.clone(), head, upto, below, messages, seeking: inside.is_some() }
    }

    /// The current position, for the cursor.
    fn place(&self) -> ScanPosition {
        ScanPosition { upto: self.upto, messages: self.messages, seq: self.head.seq }
    }

    /// The messages among records, newest first, up to the next rewind. The scan continues at the
    /// rewind's target: the records between were discarded.
    fn take(&mut self, records: Vec<Record>) -> Vec<SearchCandidate> {
        let mut passed = Vec::new();
        for record in records {
            self.upto = record.seq - 1;
            match record.entry {
                Entry::Rewound(r) => {
                    self.upto = r.to;
                    break;
                }
                Entry::Message(MessageEntry { message, .. }) => {
                    self.messages = self.messages.saturating_sub(1);
                    let (position, seq, at, role) = (self.messages, record.seq, record.at, message.role());
                    if seq <= self.below {
                        passed.push(SearchCandidate { at: MessageHit { position, seq, role, at }, message });
                    }
                }
                _ => {}
            }
        }
        passed
    }
}

/// An excerpt and the ranges of its matches.
type SnippetSource = (String, Vec<(usize, usize)>);

/// Filters the messages that match, with their redacted excerpts.
fn look(needle: &Matcher, redaction: &Redaction, passed: Vec<SearchCandidate>) -> Vec<(MessageHit, SnippetSource)> {
    let found = passed.into_iter().filter_map(|SearchCandidate { at, message }| {
        let text = words_of(&message);
        let spots = needle.find(&text)?;
        let (redacted, rules) = redaction.message(&message);
        if rules.is_empty() {
            return Some((at, snippet(&text, &spots)));
        }
        // Redacted text must not be found either, so the redacted message must match too.
        let text = words_of(&redacted);
        Some((at, snippet(&text, &needle.find(&text)?)))
    });
    found.collect()
}

/// The searchable text of a message: its text, and the names and arguments of its tool calls.
fn words_of(message: &Message) -> String {
    let mut text = message.text();
    for call in message.tool_calls() {
        if !text.is_empty() {
            text.push('\n');
        }
        text.extend([&call.name, " ", &call.arguments]);
    }
    text
}

impl Tenure {
    /// Searches the messages and titles of all sessions that the principal may see, newest first.
    /// One page is bounded in results, sessions, bytes and store reads, including those of
    /// ancestors of forks; continue with the returned cursor. Expired and deleted sessions are
    /// omitted unless the query asks for them. Discarded and redacted text is not found.
    pub async fn search_sessions(&self, who: &Principal, search: &SearchRequest) -> Result<SearchPage> {
        let needle = Arc::new(Matcher::parse(&search.text)?);
        self.engine.know(&who.tenant).await?;
        let mut query = search.query.clone();
        self.engine.narrow(who, &mut query)?;
        (query.order, query.offset, query.limit) = (SessionOrder::Newest, 0, CARDS);
        query.cursor = search.cursor.as_ref().map(|c| c.session.clone());
        let page = SearchPage::default();
        let mut hunt = SearchState { who, search, needle, redaction: self.redaction(), page, bytes: 0, reads: 0 };
        self.hunt_through(who, query, &mut hunt).await?;
        hunt.page.cut = hunt.page.next.is_some() && !hunt.is_full();
        Ok(hunt.page)
    }

    /// Searches the sessions that a query selects, until one of the bounds is reached.
    async fn hunt_through(&self, who: &Principal, mut query: SessionQuery, hunt: &mut SearchState<'_>) -> Result<()> {
        let search = hunt.search;
        if let Some(SearchCursor { session, inside: Some(inside) }) = &search.cursor {
            match self.head(who, &session.session).await {
                Ok(head) if query.matches(&head) && query.status.contains(&self.engine.status_of(&head)) => {
                    if !self.look_into(head, Some(*inside), session, hunt).await? {
                        return Ok(());
                    }
                }
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        let mut cards = 0;
        loop {
            let HeadPage { heads, stopped } = self.store().page(&query, self.limits().max_scan).await?;
            // The first page of heads does not count, so that each search makes progress by at
            // least one session.
            hunt.reads += usize::from(cards > 0);
            let last = heads.len() < query.limit;
            for head in heads {
                if cards >= search.max_sessions.max(1) || hunt.is_over() {
                    hunt.page.next = query.cursor.clone().map(|session| SearchCursor { session, inside: None });
                    return Ok(());
                }
                cards += 1;
                let place = SessionCursor::of(&head);
                query.cursor = Some(place.clone());
                // The stored status may be out of date: sessions may have expired since the last sweep.
                if query.status.contains(&self.engine.status_of(&head))
                    && !self.look_into(head, None, &place, hunt).await?
                {
                    return Ok(());
                }
            }
            if last {
                hunt.page.next = stopped.map(|session| SearchCursor { session, inside: None });
                return Ok(());
            }
        }
    }

    /// Searches one session. Returns true if all of it was searched; otherwise sets the cursor of
    /// the next page.
    async fn look_into(
        &self,
        head: Head,
        inside: Option<ScanPosition>,
        place: &SessionCursor,
        hunt: &mut SearchState<'_>,
    ) -> Result<bool> {
        hunt.page.looked_at += 1;
        let mut walk = BackwardScan::begin(head, inside);
        match self.walk_through(&mut walk, inside.is_none(), hunt).await {
            Ok(true) => Ok(true),
            Ok(false) => {
                hunt.page.next = Some(SearchCursor { session: place.clone(), inside: Some(walk.place()) });
                Ok(false)
            }
            // A damaged session does not prevent the search of the others.
            Err(Error::Corrupt { place, why }) => {
                let id = walk.head.info.session_id;
                tracing::warn!(session_id = %id, place, why, "a search could not read a session");
                hunt.page.damaged.push(id);
                Ok(true)
            }
            Err(e) => Err(e),
        }
    }

    /// Scans one session. Returns true if the scan has reached its beginning.
    async fn walk_through(
        &self,
        walk: &mut BackwardScan,
        with_title: bool,
        hunt: &mut SearchState<'_>,
    ) -> Result<bool> {
        let title = walk.head.info.title.clone().filter(|_| with_title && hunt.search.role.is_none());
        if let Some(title) = title.map(|t| hunt.redaction.apply(&t).0.into_owned())
            && let Some(spots) = hunt.needle.find(&title)
        {
            hunt.note(&walk.head, None, snippet(&title, &spots));
        }
        while !hunt.is_over() {
            let Some(records) = self.read_back(walk, &mut hunt.reads).await? else { return Ok(true) };
            let mut passed = walk.take(records);
            let bytes: usize = passed.iter().map(|p| p.message.text_len()).sum();
            hunt.bytes += bytes;
            passed.retain(|p| hunt.search.role.is_none_or(|role| p.at.role == role));
            let found = match bytes > MUCH {
                false => look(&hunt.needle, hunt.redaction, passed),
                true => {
                    // Counts as a read of this principal, which bounds the number of concurrent scans.
                    let _permit = self.engine.browse_permit(hunt.who).await?;
                    let (needle, redaction) = (hunt.needle.clone(), hunt.redaction.clone());
                    let looked = tokio::task::spawn_blocking(move || look(&needle, &redaction, passed)).await;
                    looked.map_err(Error::unavailable)?
                }
            };
            for (at, shown) in found {
                if hunt.is_full() {
                    return Ok(false);
                }
                // If this result fills the page, the next page continues right after it.
                let before = (at.seq - 1, at.position);
                hunt.note(&walk.head, Some(at), shown);
                if hunt.is_full() {
                    (walk.upto, walk.messages) = before;
                }
            }
            // Yields to other tasks between pages of records.
            tokio::task::yield_now().await;
        }
        Ok(false)
    }

    /// Reads the next records of the backward scan. `None` means that it has reached the beginning.
    /// Adds the number of store reads to `reads`.
    async fn read_back(&self, walk: &mut BackwardScan, reads: &mut usize) -> Result<Option<Vec<Record>>> {
        loop {
            *reads += usize::from(!walk.seeking);
            if walk.upto >= walk.current.first {
                let range = RecordRange { after: walk.current.first - 1, ..RecordRange::back_from(walk.upto, RECORDS) };
                let records = self.store().records(&walk.current.key(), &range).await?;
                if !records.is_empty() {
                    walk.seeking = false;
                    return Ok(Some(records));
                }
            } else {
                let Some(parent) = walk.current.parent.clone() else { return Ok(None) };
                let key = SessionKey { tenant: walk.head.tenant.clone(), session: parent.session };
                if let Some(next) = self.store().head(&key).await? {
                    (walk.upto, walk.current) = (walk.upto.min(parent.seq), next);
                    continue;
                }
            }
            // The session was purged during the scan, or a purge moved its records to another
            // session: check the head again.
            let old = &walk.head;
            match self.store().head(&old.key()).await? {
                None => return Ok(None),
                Some(new) if new.info.created_at != old.info.created_at => return Ok(None),
                Some(new) if (new.first, &new.parent) != (old.first, &old.parent) => {
                    // Records that were scanned already are skipped, wherever they are stored now.
                    let upto = walk.upto.min(walk.below);
                    *walk = BackwardScan { below: upto, ..BackwardScan::begin(new, None) };
                }
                Some(_) => {
                    let place = format!("session {}, record {}", walk.current.key(), walk.upto);
                    return Err(Error::corrupt(place, "it is missing"));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::lifecycle::NewSession;

    #[tokio::test]
    async fn a_search_leaves_the_cache_alone() {
        let (tenure, who) = (Tenure::open("memory:").await.unwrap(), Principal::default());
        for i in 0..50 {
            let id = SessionId::new(format!("s{i}")).unwrap();
            tenure.create(&who, NewSession { id: Some(id.clone()), ..NewSession::default() }).await.unwrap();
            tenure.append(&who, &id, vec![Message::user("the ferry")]).await.unwrap();
            tenure.engine.forget(&who.key(&id));
        }
        let hot = SessionId::new("s0").unwrap();
        tenure.load(&who, &hot).await.unwrap();
        let before = (tenure.engine.hot_sessions().len(), tenure.engine.hot_sessions().weight());
        assert_eq!(tenure.search_sessions(&who, &SearchRequest::new("ferry", 100)).await.unwrap().found.len(), 50);
        assert_eq!((tenure.engine.hot_sessions().len(), tenure.engine.hot_sessions().weight()), before);
    }
}
