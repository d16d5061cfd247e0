//! Full-text search over the messages of all sessions that a principal may see.
//!
//! The message index of the store finds the messages that contain the words, and the matcher decides.
//! Without an index, or if too many messages contain the words, the logs are scanned in the store, one
//! page at a time (D-082). Erased and purged messages are not found because they are no longer stored.

pub(crate) mod cursor;
mod indexed;
mod page;
mod relevance;
pub(crate) mod request;
mod scan;

use crate::rules::matcher::Matcher;
use crate::session::search::cursor::{SearchCursor, SearchPosition};
use crate::session::search::page::PageBuilder;
use crate::session::search::relevance::{MAX_RANKED, rank};
use crate::session::search::request::{SearchPage, SearchRequest, SearchSort};
use crate::store::query::{SessionOrder, SessionQuery};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Principal, SessionId};
use std::sync::Arc;

/// The number of heads that are read in one page.
const HEADS_PER_PAGE: usize = 32;

impl Tenure {
    /// Searches the messages and titles of all sessions that the principal may see, newest first or best
    /// first. One page is bounded in results, sessions, bytes and store reads, including those of
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
        query.cursor = None;
        match (search.sort, search.cursor.as_ref().map(|cursor| &cursor.0)) {
            (SearchSort::Time, None | Some(SearchPosition::Time { .. })) => {
                let page = self.search_by_time(principal, search, query, matcher).await?;
                let is_full = page.is_full();
                Ok(SearchPage { truncated: page.page.next.is_some() && !is_full, ..page.page })
            }
            (SearchSort::Relevance, None) => self.search_by_relevance(principal, search, query, matcher, 0).await,
            (SearchSort::Relevance, Some(SearchPosition::Rank(skipped))) => {
                self.search_by_relevance(principal, search, query, matcher, *skipped).await
            }
            _ => Err(Error::invalid("cursor", "the cursor belongs to a search in another order")),
        }
    }

    /// Ranks the newest results, and returns those after the best `skipped` ones.
    async fn search_by_relevance(
        &self,
        principal: &Principal,
        search: &SearchRequest,
        query: SessionQuery,
        matcher: Arc<Matcher>,
        skipped: usize,
    ) -> Result<SearchPage> {
        let all = SessionQuery { limit: MAX_RANKED, ..search.query.clone() };
        let newest = SearchRequest { query: all, cursor: None, ..search.clone() };
        let PageBuilder { page, statistics, .. } = self.search_by_time(principal, &newest, query, matcher).await?;
        let truncated = page.next.is_some();
        let upto = skipped.saturating_add(search.query.limit.max(1));
        let next = (page.hits.len() > upto).then_some(SearchCursor(SearchPosition::Rank(upto)));
        let hits = rank(page.hits, &statistics).into_iter().take(upto).skip(skipped).collect();
        Ok(SearchPage { hits, truncated, next, ..page })
    }

    /// Fills a page, newest first.
    async fn search_by_time<'a>(
        &'a self,
        principal: &'a Principal,
        search: &'a SearchRequest,
        mut query: SessionQuery,
        matcher: Arc<Matcher>,
    ) -> Result<PageBuilder<'a>> {
        let mut resumed = None;
        if let Some(SearchCursor(SearchPosition::Time { session, scan_position })) = &search.cursor {
            if let Some(scan_position) = scan_position {
                let head = self.searched_head(principal, &session.session, &query).await?;
                resumed = head.map(|head| (head, *scan_position));
            }
            query.cursor = Some(session.clone());
        }
        let mut page = PageBuilder::new(principal, search, matcher, self.redaction());
        match self.find_candidates(&query, &page).await? {
            Some(candidates) => self.search_candidates(query, resumed, candidates, &mut page).await?,
            None => self.scan_sessions(query, resumed, &mut page).await?,
        }
        Ok(page)
    }

    /// Returns the head of a session that a query selects, whatever its position in the list is now.
    async fn searched_head(
        &self,
        principal: &Principal,
        session: &SessionId,
        query: &SessionQuery,
    ) -> Result<Option<Head>> {
        match self.head(principal, session).await {
            Ok(head) => {
                let is_selected = query.matches(&head) && query.status.contains(&self.engine.status_of(&head));
                Ok(is_selected.then_some(head))
            }
            Err(Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::lifecycle::NewSession;
    use crate::types::message::Message;

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
