//! Full-text search over the messages of all sessions that a principal may see, newest first.
//!
//! There is no index and no second copy of the text: the logs are scanned in the store, one page at
//! a time. Discarded messages are not found because the scan skips them; erased and purged messages
//! are not found because they are no longer stored (D-082).

use crate::engine::log_reader::LogReader;
use crate::rules::matcher::{Matcher, snippet};
use crate::rules::message_words::searchable_text;
use crate::rules::redaction::Redaction;
use crate::store::query::{HeadPage, OwnerFilter, SessionCursor, SessionOrder, SessionQuery};
use crate::tenure::Tenure;
use crate::types::entry::{Entry, MessageEntry, Record};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Principal, Seq, SessionId, User};
use crate::types::message::{Message, Role};
use jiff::Timestamp;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The number of heads that are read in one page.
const HEADS_PER_PAGE: usize = 32;
/// The number of records that are read in one page.
const RECORDS_PER_PAGE: usize = 128;
/// The number of bytes of text above which a page is scanned on a blocking thread, so that other
/// tasks do not wait.
const BLOCKING_BYTES: usize = 256 << 10;

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
        let query = SessionQuery::new(OwnerFilter::AllTenants, limit);
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
    /// The results: the most recently active session first, and within a session the newest message first.
    pub hits: Vec<SearchHit>,
    /// The cursor of the next page. `None` means that everything was searched. A page without
    /// results may have a next one.
    pub next: Option<SearchCursor>,
    /// The number of sessions that were searched.
    pub scanned: usize,
    /// Whether the page ended before it was full: because of `max_sessions`, `max_bytes` or
    /// `max_reads`, or because the store scanned `max_scan` heads.
    pub truncated: bool,
    /// Sessions that could not be searched because their log is damaged.
    pub damaged: Vec<SessionId>,
}

/// A position in a search, opaque to clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchCursor {
    session: SessionCursor,
    scan_position: Option<ScanPosition>,
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
        match self.scan_position {
            None => write!(f, "{}", self.session),
            Some(ScanPosition { upto, messages, seq }) => write!(f, "s~{upto}~{messages}~{seq}~{}", self.session),
        }
    }
}

impl FromStr for SearchCursor {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let invalid = || Error::invalid("cursor", "not a valid cursor; use the one that the previous page returned");
        // The position of the session is last, because an id may contain any character.
        let Some(rest) = s.strip_prefix("s~") else { return Ok(Self { session: s.parse()?, scan_position: None }) };
        let mut parts = rest.splitn(4, '~');
        let mut number = || parts.next().and_then(|n| n.parse::<Seq>().ok()).ok_or_else(invalid);
        let upto = number()?;
        let messages = number()? as usize;
        let seq = number()?;
        let session = parts.next().ok_or_else(invalid)?.parse()?;
        Ok(Self { session, scan_position: Some(ScanPosition { upto, messages, seq }) })
    }
}

/// The state of a search while it fills a page.
struct SearchState<'a> {
    principal: &'a Principal,
    search: &'a SearchRequest,
    matcher: Arc<Matcher>,
    redaction: &'a Redaction,
    page: SearchPage,
    bytes: usize,
    reads: usize,
}

impl SearchState<'_> {
    /// Returns true if the page has all the results that it may have.
    fn is_full(&self) -> bool {
        self.page.hits.len() >= self.search.query.limit.max(1)
    }

    /// Returns true if the page must end.
    fn is_over(&self) -> bool {
        self.is_full() || self.bytes >= self.search.max_bytes.max(1) || self.reads >= self.search.max_reads.max(1)
    }

    /// Adds a result to the page.
    fn add_hit(
        &mut self,
        head: &Head,
        message: Option<MessageHit>,
        (snippet, highlights): (String, Vec<(usize, usize)>),
    ) {
        let title = head.info.title.as_deref().map(|t| self.redaction.apply(t).0.into_owned());
        self.page.hits.push(SearchHit {
            session_id: head.info.session_id.clone(),
            user: head.user.clone(),
            title,
            active_at: head.active_at,
            message,
            snippet,
            highlights,
        });
    }
}

/// A message that the scan has reached.
struct SearchCandidate {
    hit: MessageHit,
    message: Message,
}

/// A backward scan through the messages of a session, from the last to the first.
struct BackwardScan<'a> {
    reader: LogReader<'a>,
    /// Messages after this one were searched on an earlier page.
    below: Seq,
    /// The number of messages up to the reader's position.
    messages: usize,
    /// Whether the scan is still seeking the position where an earlier page ended. These reads do
    /// not count towards `max_reads`: otherwise a search through more ancestors than one page may
    /// read would never make progress.
    seeking: bool,
}

impl<'a> BackwardScan<'a> {
    /// Starts a scan at the end of a session, or continues it from a position.
    fn begin(mut reader: LogReader<'a>, scan_position: Option<ScanPosition>) -> Self {
        let mut messages = reader.head().digest.messages;
        if let Some(position) = scan_position.filter(|position| position.seq == reader.head().seq) {
            reader.seek(position.upto.min(reader.head().seq));
            messages = position.messages;
        }
        let below = scan_position.map_or(Seq::MAX, |i| i.upto);
        Self { reader, below, messages, seeking: scan_position.is_some() }
    }

    fn head(&self) -> &Head {
        self.reader.head()
    }

    /// The current position, for the cursor.
    fn position(&self) -> ScanPosition {
        ScanPosition { upto: self.reader.position(), messages: self.messages, seq: self.head().seq }
    }

    /// The messages among records, newest first, up to the next rewind. The scan continues at the
    /// rewind's target: the records between were discarded.
    fn advance(&mut self, records: Vec<Record>) -> Vec<SearchCandidate> {
        let mut candidates = Vec::new();
        for record in records {
            match record.entry {
                Entry::Rewound(rewind) => {
                    self.reader.seek(rewind.to);
                    break;
                }
                Entry::Message(MessageEntry { message, .. }) => {
                    self.messages = self.messages.saturating_sub(1);
                    if record.seq <= self.below {
                        let position = self.messages;
                        let hit = MessageHit { position, seq: record.seq, role: message.role(), at: record.at };
                        candidates.push(SearchCandidate { hit, message });
                    }
                }
                _ => {}
            }
        }
        candidates
    }
}

/// An excerpt and the ranges of its matches.
type SnippetSource = (String, Vec<(usize, usize)>);

/// Filters the messages that match, with their redacted excerpts.
fn find_matches(
    matcher: &Matcher,
    redaction: &Redaction,
    candidates: Vec<SearchCandidate>,
) -> Vec<(MessageHit, SnippetSource)> {
    let hits = candidates.into_iter().filter_map(|SearchCandidate { hit, message }| {
        let text = searchable_text(&message);
        let matches = matcher.find(&text)?;
        let (redacted, rules) = redaction.redact_message(&message);
        if rules.is_empty() {
            return Some((hit, snippet(&text, &matches)));
        }
        // Redacted text must not be found either, so the redacted message must match too.
        let text = searchable_text(&redacted);
        Some((hit, snippet(&text, &matcher.find(&text)?)))
    });
    hits.collect()
}

impl Tenure {
    /// Searches the messages and titles of all sessions that the principal may see, newest first.
    /// One page is bounded in results, sessions, bytes and store reads, including those of
    /// ancestors of forks; continue with the returned cursor. Expired and deleted sessions are
    /// omitted unless the query asks for them. Discarded and redacted text is not found.
    pub async fn search_sessions(&self, principal: &Principal, search: &SearchRequest) -> Result<SearchPage> {
        let matcher = Arc::new(Matcher::parse(&search.text)?);
        self.engine.ensure_assistants_loaded(&principal.tenant).await?;
        let mut query = search.query.clone();
        self.engine.restrict_query(principal, &mut query)?;
        query.order = SessionOrder::Newest;
        query.offset = 0;
        query.limit = HEADS_PER_PAGE;
        query.cursor = search.cursor.as_ref().map(|c| c.session.clone());
        let page = SearchPage::default();
        let mut state =
            SearchState { principal, search, matcher, redaction: self.redaction(), page, bytes: 0, reads: 0 };
        self.scan_sessions(principal, query, &mut state).await?;
        state.page.truncated = state.page.next.is_some() && !state.is_full();
        Ok(state.page)
    }

    /// Searches the sessions that a query selects, until one of the bounds is reached.
    async fn scan_sessions(
        &self,
        principal: &Principal,
        mut query: SessionQuery,
        state: &mut SearchState<'_>,
    ) -> Result<()> {
        let search = state.search;
        if let Some(SearchCursor { session, scan_position: Some(scan_position) }) = &search.cursor {
            match self.head(principal, &session.session).await {
                Ok(head) if query.matches(&head) && query.status.contains(&self.engine.status_of(&head)) => {
                    if !self.search_session(head, Some(*scan_position), session, state).await? {
                        return Ok(());
                    }
                }
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        let mut sessions = 0;
        loop {
            let HeadPage { heads, scan_stopped_at: stopped } =
                self.store().page(&query, self.limits().max_scan).await?;
            // The first page of heads does not count, so that each search makes progress by at
            // least one session.
            state.reads += usize::from(sessions > 0);
            let last = heads.len() < query.limit;
            for head in heads {
                if sessions >= search.max_sessions.max(1) || state.is_over() {
                    state.page.next = query.cursor.clone().map(|session| SearchCursor { session, scan_position: None });
                    return Ok(());
                }
                sessions += 1;
                let cursor = SessionCursor::of(&head);
                query.cursor = Some(cursor.clone());
                // The stored status may be out of date: sessions may have expired since the last sweep.
                if query.status.contains(&self.engine.status_of(&head))
                    && !self.search_session(head, None, &cursor, state).await?
                {
                    return Ok(());
                }
            }
            if last {
                state.page.next = stopped.map(|session| SearchCursor { session, scan_position: None });
                return Ok(());
            }
        }
    }

    /// Searches one session. Returns true if all of it was searched; otherwise sets the cursor of
    /// the next page.
    async fn search_session(
        &self,
        head: Head,
        scan_position: Option<ScanPosition>,
        cursor: &SessionCursor,
        state: &mut SearchState<'_>,
    ) -> Result<bool> {
        state.page.scanned += 1;
        let mut scan = BackwardScan::begin(self.engine.log_reader(head), scan_position);
        match self.scan_session(&mut scan, scan_position.is_none(), state).await {
            Ok(true) => Ok(true),
            Ok(false) => {
                state.page.next = Some(SearchCursor { session: cursor.clone(), scan_position: Some(scan.position()) });
                Ok(false)
            }
            // A damaged session does not prevent the search of the others.
            Err(Error::Corrupt { location, reason, .. }) => {
                let id = scan.head().info.session_id.clone();
                tracing::warn!(session_id = %id, location, reason, "a session was skipped in a search because its log is damaged");
                state.page.damaged.push(id);
                Ok(true)
            }
            Err(e) => Err(e),
        }
    }

    /// Scans one session. Returns true if the scan has reached its beginning.
    async fn scan_session(
        &self,
        scan: &mut BackwardScan<'_>,
        with_title: bool,
        state: &mut SearchState<'_>,
    ) -> Result<bool> {
        let title = scan.head().info.title.clone().filter(|_| with_title && state.search.role.is_none());
        if let Some(title) = title.map(|t| state.redaction.apply(&t).0.into_owned())
            && let Some(matches) = state.matcher.find(&title)
        {
            state.add_hit(scan.head(), None, snippet(&title, &matches));
        }
        while !state.is_over() {
            let Some(records) = self.read_back(scan, &mut state.reads).await? else { return Ok(true) };
            let mut candidates = scan.advance(records);
            let bytes: usize = candidates.iter().map(|p| p.message.text_len()).sum();
            state.bytes += bytes;
            candidates.retain(|p| state.search.role.is_none_or(|role| p.hit.role == role));
            let hits = if bytes > BLOCKING_BYTES {
                // Counts as a read of this principal, which bounds the number of concurrent scans.
                let _permit = self.engine.browse_permit(state.principal).await?;
                let matcher = state.matcher.clone();
                let redaction = state.redaction.clone();
                let matched = tokio::task::spawn_blocking(move || find_matches(&matcher, &redaction, candidates)).await;
                matched.map_err(Error::unavailable_from)?
            } else {
                find_matches(&state.matcher, state.redaction, candidates)
            };
            for (hit, excerpt) in hits {
                if state.is_full() {
                    return Ok(false);
                }
                // If this result fills the page, the next page continues right after it.
                let before = (hit.seq - 1, hit.position);
                state.add_hit(scan.head(), Some(hit), excerpt);
                if state.is_full() {
                    scan.reader.seek(before.0);
                    scan.messages = before.1;
                }
            }
            // Yields to other tasks between pages of records.
            tokio::task::yield_now().await;
        }
        Ok(false)
    }

    /// Reads the next records of the backward scan. `None` means that it has reached the beginning,
    /// or that the session was purged meanwhile. Adds the number of store reads to `reads`.
    async fn read_back(&self, scan: &mut BackwardScan<'_>, reads: &mut usize) -> Result<Option<Vec<Record>>> {
        let reads_before = scan.reader.reads();
        let records = match scan.reader.read(RECORDS_PER_PAGE).await {
            Err(Error::NotFound { .. } | Error::Conflict { .. }) => Vec::new(),
            other => other?,
        };
        if !scan.seeking {
            *reads += scan.reader.reads() - reads_before;
        }
        scan.seeking = false;
        Ok((!records.is_empty()).then_some(records))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::lifecycle::NewSession;

    #[tokio::test]
    async fn a_search_does_not_change_the_cache() {
        let tenure = Tenure::open("memory:").await.unwrap();
        let principal = Principal::default();
        for i in 0..50 {
            let id = SessionId::new(format!("s{i}")).unwrap();
            tenure.create(&principal, NewSession { id: Some(id.clone()), ..NewSession::default() }).await.unwrap();
            tenure.append(&principal, &id, vec![Message::user("the ferry")]).await.unwrap();
            tenure.engine.evict(&principal.key(&id));
        }
        let cached_id = SessionId::new("s0").unwrap();
        tenure.load(&principal, &cached_id).await.unwrap();
        let before = (tenure.engine.session_cache().len(), tenure.engine.session_cache().weight());
        assert_eq!(tenure.search_sessions(&principal, &SearchRequest::new("ferry", 100)).await.unwrap().hits.len(), 50);
        assert_eq!((tenure.engine.session_cache().len(), tenure.engine.session_cache().weight()), before);
    }
}
