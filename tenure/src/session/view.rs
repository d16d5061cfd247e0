//! Looking at sessions: parts of them, without copying the rest.

use crate::engine::draft::Need;
use crate::engine::list::Page;
use crate::rules::session::{Point, Said, Session};
use crate::store::query::Query;
use crate::tenure::Tenure;
use crate::types::error::Result;
use crate::types::head::Head;
use crate::types::id::{Principal, Seq, SessionId};
use std::sync::Arc;

impl Tenure {
    /// Sessions that match, newest first. Those that expired or were deleted are left out unless asked for. The work is bounded
    /// (`max_scan`): a page may be short, or empty, and still have a next one.
    pub async fn list(&self, who: &Principal, query: Query) -> Result<Page> {
        self.engine.list(who, query).await
    }

    /// What `look` makes of a session. Nothing is copied unless there are media to put back, or somebody writes meanwhile.
    pub async fn view<R>(&self, who: &Principal, id: &SessionId, look: impl FnOnce(&Session) -> R) -> Result<R> {
        let seen = self.engine.shared(who, id).await?;
        match seen.messages.iter().all(|m| m.message.cuts().is_empty()) {
            true => Ok(look(&seen)),
            false => Ok(look(&self.engine.attach(Session::clone(&seen)).await?)),
        }
    }

    /// The same for a text that is asked for again and again: it is kept until the session changes. `make` must make the same text each
    /// time, of nothing but the session. With it comes the end of the log it was made of.
    pub async fn text(
        &self,
        who: &Principal,
        id: &SessionId,
        make: impl FnOnce(&Session) -> String,
    ) -> Result<(Seq, Arc<str>)> {
        let seen = self.engine.shared(who, id).await?;
        if let Some(text) = seen.text() {
            return Ok((seen.seq, text));
        }
        // Media are large, and seldom asked for twice.
        if seen.messages.iter().any(|m| !m.message.cuts().is_empty()) {
            return Ok((seen.seq, make(&self.engine.attach(Session::clone(&seen)).await?).into()));
        }
        let text = seen.keep(make(&seen));
        self.engine.weigh(&who.key(id), &seen);
        Ok((seen.seq, text))
    }

    /// A session as it was at a point: what had been said, what was pending, and what was known of it then.
    pub async fn state_at(&self, who: &Principal, id: &SessionId, at: impl Into<Point>) -> Result<Session> {
        let at = at.into();
        let (head, seq) = self
            .engine
            .read(who, id, Need::Session, |state| {
                let session = self.engine.whole_ref(state, id)?;
                self.engine.check_live(session)?;
                Ok((session.head().clone(), crate::rules::checkpoint::place(session, &at)?.seq))
            })
            .await?;
        let records = self.engine.log(&head).await?.into_iter().flatten().take_while(|r| r.seq <= seq);
        let then = Session::replay(&head.key(), records);
        let then =
            then.ok_or_else(|| crate::Error::corrupt(format!("session {}", head.key()), "its log has no beginning"))?;
        self.engine.attach(then).await
    }

    /// A session's messages from a position on, at most so many, with the card they belong to.
    pub async fn messages_from(
        &self,
        who: &Principal,
        id: &SessionId,
        position: usize,
        limit: usize,
    ) -> Result<(Head, Vec<Said>)> {
        let seen = self.engine.read(who, id, Need::Session, |state| {
            let session = self.engine.whole_ref(state, id)?;
            self.engine.check_live(session)?;
            let page = session.messages.iter().skip(position).take(limit).cloned().collect();
            Ok((session.head().clone(), page))
        });
        let (head, mut page): (Head, Vec<Said>) = seen.await?;
        for said in page.iter_mut().filter(|m| !m.message.cuts().is_empty()) {
            said.message = self.engine.attach_message(&head.tenant, &said.message).await?;
        }
        Ok((head, page))
    }

    /// The last messages of a session, oldest first. Costs what it returns, however long the session is.
    pub async fn tail(&self, who: &Principal, id: &SessionId, limit: usize) -> Result<Vec<Said>> {
        Ok(self.last_messages(who, id, limit).await?.1)
    }
}
