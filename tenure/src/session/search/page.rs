//! The page that a search fills: its bounds, and what matches.

use crate::engine::core::Engine;
use crate::rules::matcher::{Matcher, snippet};
use crate::rules::message_words::searchable_text;
use crate::rules::redaction::Redaction;
use crate::session::search::cursor::{ScanPosition, SearchCursor};
use crate::session::search::relevance::MatchStatistics;
use crate::session::search::request::{MessageHit, SearchHit, SearchPage, SearchRequest};
use crate::store::query::SessionCursor;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::Principal;
use crate::types::message::Message;
use std::sync::Arc;

/// The number of bytes of text above which messages are matched on a blocking thread, so that other
/// tasks do not wait.
const BLOCKING_BYTES: usize = 256 << 10;

/// The state of a search while it fills a page.
pub(super) struct PageBuilder<'a> {
    pub principal: &'a Principal,
    pub request: &'a SearchRequest,
    pub matcher: Arc<Matcher>,
    pub redaction: &'a Redaction,
    pub page: SearchPage,
    /// Of each result, what its rank is computed from.
    pub statistics: Vec<MatchStatistics>,
    pub bytes: usize,
    pub reads: usize,
}

/// A message to compare with the query.
pub(super) struct SearchCandidate {
    pub hit: MessageHit,
    pub message: Message,
}

/// A match in a text.
pub(super) struct TextMatch {
    /// An excerpt, and the ranges of the matches in it.
    excerpt: (String, Vec<(usize, usize)>),
    statistics: MatchStatistics,
}

impl<'a> PageBuilder<'a> {
    pub fn new(
        principal: &'a Principal,
        request: &'a SearchRequest,
        matcher: Arc<Matcher>,
        redaction: &'a Redaction,
    ) -> Self {
        let page = SearchPage::default();
        Self { principal, request, matcher, redaction, page, statistics: Vec::new(), bytes: 0, reads: 0 }
    }

    /// Returns true if the page has all the results that it may have.
    pub fn is_full(&self) -> bool {
        self.page.hits.len() >= self.request.query.limit.max(1)
    }

    /// Returns true if the page must end.
    pub fn is_over(&self) -> bool {
        self.is_full() || self.bytes >= self.request.max_bytes.max(1) || self.reads >= self.request.max_reads.max(1)
    }

    /// Sets the cursor of the next page: after a session, or within it.
    pub fn set_next(&mut self, session: Option<SessionCursor>, scan_position: Option<ScanPosition>) {
        self.page.next = session.map(|session| SearchCursor::in_session(session, scan_position));
    }

    /// Adds a result to the page.
    pub fn add_hit(&mut self, head: &Head, message: Option<MessageHit>, found: TextMatch) {
        let title = head.info.title.as_deref().map(|t| self.redaction.apply(t).0.into_owned());
        let (snippet, highlights) = found.excerpt;
        self.statistics.push(found.statistics);
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

    /// Adds the title of a session, if it matches and titles are searched.
    pub fn add_title(&mut self, head: &Head) {
        let title = head.info.title.as_deref().filter(|_| self.request.role.is_none());
        if let Some(title) = title.map(|t| self.redaction.apply(t).0.into_owned())
            && let Some(found) = TextMatch::find(&self.matcher, &title)
        {
            self.add_hit(head, None, found);
        }
    }

    /// Records that a session was skipped because its log is damaged.
    pub fn skip_damaged(&mut self, head: &Head, location: &str, reason: &str) {
        let id = head.info.session_id.clone();
        tracing::warn!(session_id = %id, location, reason, "a session was skipped in a search because its log is damaged");
        self.page.damaged.push(id);
    }

    /// Selects the messages that match, in the same order.
    pub async fn find_matches(
        &mut self,
        engine: &Engine,
        mut candidates: Vec<SearchCandidate>,
    ) -> Result<Vec<(MessageHit, TextMatch)>> {
        let bytes: usize = candidates.iter().map(|p| p.message.text_len()).sum();
        self.bytes += bytes;
        candidates.retain(|p| self.request.role.is_none_or(|role| p.hit.role == role));
        if bytes <= BLOCKING_BYTES {
            return Ok(find_matches(&self.matcher, self.redaction, candidates));
        }
        // Counts as a read of this principal, which bounds the number of concurrent scans.
        let _permit = engine.browse_permit(self.principal).await?;
        let matcher = self.matcher.clone();
        let redaction = self.redaction.clone();
        let matched = tokio::task::spawn_blocking(move || find_matches(&matcher, &redaction, candidates)).await;
        matched.map_err(Error::unavailable_from)
    }
}

impl TextMatch {
    /// Matches a query against a text.
    fn find(matcher: &Matcher, text: &str) -> Option<Self> {
        let matches = matcher.find(text)?;
        Some(Self { excerpt: snippet(text, &matches), statistics: MatchStatistics::of(text, &matches) })
    }
}

/// Filters the messages that match, with their redacted excerpts.
fn find_matches(
    matcher: &Matcher,
    redaction: &Redaction,
    candidates: Vec<SearchCandidate>,
) -> Vec<(MessageHit, TextMatch)> {
    let hits = candidates.into_iter().filter_map(|SearchCandidate { hit, message }| {
        let text = searchable_text(&message);
        let matches = matcher.find(&text)?;
        let (redacted, rules) = redaction.redact_message(&message);
        if rules.is_empty() {
            let statistics = MatchStatistics::of(&text, &matches);
            return Some((hit, TextMatch { excerpt: snippet(&text, &matches), statistics }));
        }
        // Redacted text must not be found either, so the redacted message must match too.
        Some((hit, TextMatch::find(matcher, &searchable_text(&redacted))?))
    });
    hits.collect()
}
