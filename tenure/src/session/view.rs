//! Read access to sessions and to parts of them, without copying the rest.

use crate::engine::list::SessionPage;
use crate::rules::session::{Point, Session, StoredMessage};
use crate::store::query::SessionQuery;
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Principal, Seq, SessionId};
use std::sync::Arc;

impl Tenure {
    /// Lists sessions that match the query, most recently active first (D-029). Expired and deleted
    /// sessions are omitted unless the query asks for them. The work of one page is bounded by
    /// `max_scan`: a page may be short or empty and still have a next one.
    pub async fn list(&self, principal: &Principal, query: SessionQuery) -> Result<SessionPage> {
        self.engine.list(principal, query).await
    }

    /// Calls `f` with the current session and returns its result. The session is copied only if
    /// it has media that must be inserted, or if it is written to concurrently.
    pub async fn with_session<R>(
        &self,
        principal: &Principal,
        id: &SessionId,
        f: impl FnOnce(&Session) -> R,
    ) -> Result<R> {
        let session = self.engine.shared_session(principal, id).await?;
        if session.session.messages.iter().all(|m| m.message.blob_refs().is_empty()) {
            Ok(f(&session.session))
        } else {
            Ok(f(&self.engine.attach(session.session.clone()).await?))
        }
    }

    /// Renders a session to text and caches the text until the session changes (D-013). `render` must
    /// be a pure function of the session. Returns the text with the end of the log that it was
    /// rendered from. Sessions with media are rendered again each time.
    pub async fn render_cached(
        &self,
        principal: &Principal,
        id: &SessionId,
        render: impl FnOnce(&Session) -> String,
    ) -> Result<(Seq, Arc<str>)> {
        let session = self.engine.shared_session(principal, id).await?;
        if let Some(text) = session.rendering() {
            return Ok((session.session.head().seq, text));
        }
        // Renderings with media are large and seldom requested twice.
        if session.session.messages.iter().any(|m| !m.message.blob_refs().is_empty()) {
            return Ok((
                session.session.head().seq,
                render(&self.engine.attach(session.session.clone()).await?).into(),
            ));
        }
        let text = session.cache_rendering(render(&session.session));
        self.engine.update_weight(&principal.key(id), &session);
        Ok((session.session.head().seq, text))
    }

    /// Loads a session as it was at a point: its messages, pending work and info at that time.
    pub async fn state_at(&self, principal: &Principal, id: &SessionId, point: impl Into<Point>) -> Result<Session> {
        let point = point.into();
        let (head, seq) = self
            .engine
            .read_session(principal, id, |session| {
                self.engine.check_live(session.head())?;
                Ok((session.head().clone(), crate::rules::checkpoint::resolve_point(session, &point)?.seq))
            })
            .await?;
        let records = self.engine.log(&head).await?.into_iter().flatten().take_while(|r| r.seq <= seq);
        let session = Session::replay(&head.key(), records);
        let session = session.ok_or_else(|| {
            Error::corrupt(format!("session {}", head.key()), "the log does not begin with `created`")
        })?;
        self.engine.attach(session).await
    }

    /// Reads at most `limit` messages of a session from a position on, with the session's head.
    pub async fn messages_from(
        &self,
        principal: &Principal,
        id: &SessionId,
        position: usize,
        limit: usize,
    ) -> Result<(Head, Vec<StoredMessage>)> {
        let read = self.engine.read_session(principal, id, |session| {
            self.engine.check_live(session.head())?;
            let page = session.messages.iter().skip(position).take(limit).cloned().collect();
            Ok((session.head().clone(), page))
        });
        let (head, mut page): (Head, Vec<StoredMessage>) = read.await?;
        for stored in page.iter_mut().filter(|m| !m.message.blob_refs().is_empty()) {
            stored.message = self.engine.attach_message(&head.tenant, &stored.message).await?;
        }
        Ok((head, page))
    }

    /// Reads the last messages of a session, oldest first. The cost is proportional to the number
    /// of messages returned, however long the session is.
    pub async fn last_messages(
        &self,
        principal: &Principal,
        id: &SessionId,
        limit: usize,
    ) -> Result<Vec<StoredMessage>> {
        Ok(self.last_messages_with_head(principal, id, limit).await?.1)
    }
}
