//! Looking at sessions: parts of them, without copying the rest.

use crate::engine::cache::{Need, State, Warm};
use crate::error::{Error, Result};
use crate::rules::session::{Point, Said, Session};
use crate::tenure::Tenure;
use crate::types::head::Head;
use crate::types::id::{Principal, Seq, SessionId};
use std::sync::Arc;

impl Tenure {
    /// A session's index card, if it is in use. One that has expired or was deleted is [`crate::Error::Gone`].
    pub async fn live(&self, who: &Principal, id: &SessionId) -> Result<Head> {
        self.know(&who.tenant).await?;
        let head = self.head(who, id).await?;
        self.check_live(&head)?;
        Ok(head)
    }

    /// What `look` makes of a session. Nothing is copied unless there are media to put back, or somebody writes meanwhile.
    pub async fn view<R>(&self, who: &Principal, id: &SessionId, look: impl FnOnce(&Session) -> R) -> Result<R> {
        let seen = self.shared(who, id).await?;
        match seen.messages.iter().all(|m| m.message.cuts().is_empty()) {
            true => Ok(look(&seen)),
            false => Ok(look(&self.attach(Session::clone(&seen)).await?)),
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
        let seen = self.shared(who, id).await?;
        if let Some(text) = seen.text() {
            return Ok((seen.seq, text));
        }
        // Media are large, and seldom asked for twice.
        if seen.messages.iter().any(|m| !m.message.cuts().is_empty()) {
            return Ok((seen.seq, make(&self.attach(Session::clone(&seen)).await?).into()));
        }
        let text = seen.keep(make(&seen));
        self.weigh(&who.key(id), &seen);
        Ok((seen.seq, text))
    }

    /// A session as it is now, its media apart. Nobody has to wait while it is looked at.
    pub(crate) async fn shared(&self, who: &Principal, id: &SessionId) -> Result<Arc<Warm>> {
        self.read(who, id, Need::Session, |state| match state {
            State::Whole(session) => self.check_live(session).map(|()| session.clone()),
            _ => Err(Error::NotFound { session_id: id.clone() }),
        })
        .await
    }

    /// A session as it was at a point: what had been said, what was pending, and what was known of it then.
    pub async fn state_at(&self, who: &Principal, id: &SessionId, at: impl Into<Point>) -> Result<Session> {
        let at = at.into();
        let (head, seq) = self
            .read(who, id, Need::Session, |state| {
                let session = self.whole_ref(state, id)?;
                self.check_live(session)?;
                Ok((session.head().clone(), crate::session::checkpoint::place(session, &at)?.seq))
            })
            .await?;
        let records = self.log(&head).await?.into_iter().flatten().take_while(|r| r.seq <= seq);
        let then = Session::replay(&head.key(), records);
        let then =
            then.ok_or_else(|| crate::Error::corrupt(format!("session {}", head.key()), "its log has no beginning"))?;
        self.attach(then).await
    }

    /// A session's messages from a position on, at most so many, with the card they belong to.
    pub async fn messages_from(
        &self,
        who: &Principal,
        id: &SessionId,
        position: usize,
        limit: usize,
    ) -> Result<(Head, Vec<Said>)> {
        let seen = self.read(who, id, Need::Session, |state| {
            let session = self.whole_ref(state, id)?;
            self.check_live(session)?;
            let page = session.messages.iter().skip(position).take(limit).cloned().collect();
            Ok((session.head().clone(), page))
        });
        let (head, mut page): (Head, Vec<Said>) = seen.await?;
        for said in page.iter_mut().filter(|m| !m.message.cuts().is_empty()) {
            said.message = self.attach_message(&head.tenant, &said.message).await?;
        }
        Ok((head, page))
    }

    /// The last messages of a session, oldest first. Costs what it returns, however long the session is.
    pub async fn tail(&self, who: &Principal, id: &SessionId, limit: usize) -> Result<Vec<Said>> {
        Ok(self.last_messages(who, id, limit).await?.1)
    }
}
