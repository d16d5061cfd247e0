//! The lifecycle of sessions: create, load, update, pause, delete, restore and purge.

use crate::engine::pending_commit::PendingCommit;
use crate::engine::status::{check_derived, check_if_match};
use crate::rules::run_entries::resume_entries;
use crate::rules::session::{Session, StoredMessage, mark_inputs};
use crate::types::error::{Error, Result};

use crate::tenure::Tenure;
use crate::types::entry::{Entry, MessageEntry, Patch, Record, SessionCreated, SessionPatch};
use crate::types::head::Head;
use crate::types::id::{Principal, Seq, SessionId, check_text};
use crate::types::status::Status;
use jiff::Timestamp;
use serde_json::{Map, Value};

/// The parameters of a new session.
#[derive(Clone, Debug, Default)]
pub struct NewSession {
    /// The session id. `None` means that one is generated.
    pub id: Option<SessionId>,
    /// The assistant that the session belongs to.
    pub assistant: Option<String>,
    /// The chat thread that shows the session.
    pub thread: Option<String>,
    /// The model that the session uses.
    pub model: Option<String>,
    /// The title.
    pub title: Option<String>,
    /// Tags for filtering.
    pub tags: Vec<String>,
    /// Arbitrary metadata.
    pub metadata: Map<String, Value>,
}

/// A change of a session's info or status.
///
/// ```
/// use tenure::session::{Patch, SessionUpdate, Status};
/// use tenure::{Message, SessionPatch, Tenure};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> tenure::Result<()> {
/// # let tenure = Tenure::open("memory:").await?;
/// # let session = tenure.user("acme", "ada")?.create_session().await?;
/// let patch = SessionPatch { title: Patch::Set("Weather".into()), ..SessionPatch::default() };
/// let head = session.update(SessionUpdate::from(patch).status(Status::Paused)).await?;
/// assert_eq!((head.info.title.as_deref(), head.status), (Some("Weather"), Status::Paused));
/// assert_eq!(session.append(Message::user("hi")).await.unwrap_err().code(), "paused");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct SessionUpdate {
    /// The change of the title, tags, metadata and model.
    pub patch: SessionPatch,
    /// The new status. `None` leaves it unchanged.
    pub status: Option<Status>,
    /// Changes the session only if its log ends at this record; otherwise it is a conflict.
    pub if_match: Option<Seq>,
}

impl From<SessionPatch> for SessionUpdate {
    fn from(patch: SessionPatch) -> Self {
        Self { patch, ..Self::default() }
    }
}

impl SessionUpdate {
    /// Pauses or activates the session.
    pub fn status(mut self, status: impl Into<Option<Status>>) -> Self {
        self.status = status.into();
        self
    }

    /// Sets the condition: the log must end at this record.
    pub fn if_match(mut self, seq: impl Into<Option<Seq>>) -> Self {
        self.if_match = seq.into();
        self
    }
}

impl Tenure {
    /// Creates a session. It is durable when it returns.
    pub async fn create(&self, principal: &Principal, new: NewSession) -> Result<Session> {
        let id = new.id.clone().unwrap_or_else(SessionId::generate);
        let NewSession { assistant, thread, model, title, tags, metadata, .. } = new;
        let user = principal.user.clone();
        let created =
            SessionCreated { user, assistant, thread, model, title, tags, metadata, ..SessionCreated::default() };
        self.engine.check_info(&created)?;
        let record = Record { seq: 1, at: self.now(), entry: Entry::created(created) };
        self.engine.reserve_session(principal, [&record].into_iter()).await?;
        let head = self.begin_session(&principal.key(&id), &record, Vec::new(), Vec::new()).await?;
        Ok(Session::empty(head))
    }

    /// Loads a whole session with its media. An expired or deleted session is [`Error::Gone`].
    pub async fn load(&self, principal: &Principal, id: &SessionId) -> Result<Session> {
        let session = self.engine.read_session(principal, id, |session| Ok(session.clone())).await?;
        self.engine.check_live(session.head())?;
        self.engine.attach(session).await
    }

    /// Loads a whole session with its media, whatever its status.
    pub async fn load_any(&self, principal: &Principal, id: &SessionId) -> Result<Session> {
        let session = self.engine.read_session(principal, id, |session| Ok(session.clone())).await?;
        self.engine.attach(session).await
    }

    /// The messages of a session as one JSON array, each byte for byte as it was given. A server
    /// can send it without serializing the messages again.
    pub async fn messages_json(&self, principal: &Principal, id: &SessionId) -> Result<String> {
        let json = self.engine.read_session(principal, id, |session| {
            self.engine.check_live(session.head())?;
            let has_no_media = session.messages.iter().all(|m| m.message.blob_refs().is_empty());
            Ok(has_no_media.then(|| session.messages_json()))
        });
        match json.await? {
            Some(json) => Ok(json),
            // Media must be inserted first.
            None => Ok(self.load(principal, id).await?.messages_json()),
        }
    }

    /// Reads the last messages of a session, oldest first, with its head. The cost is proportional
    /// to the number of messages returned, however long the session is.
    pub async fn last_messages_with_head(
        &self,
        principal: &Principal,
        id: &SessionId,
        limit: usize,
    ) -> Result<(Head, Vec<StoredMessage>)> {
        let head = self.get_live_head(principal, id).await?;
        let mut reader = self.engine.log_reader(head.clone());
        let mut messages: Vec<StoredMessage> = Vec::new();
        // The start of the run that was read last, whose input may follow.
        let mut started = None;
        'log: while messages.len() < limit {
            let count = (limit - messages.len()).saturating_mul(2).saturating_add(8);
            let page = reader.read(count).await?;
            if page.is_empty() {
                break;
            }
            for record in page {
                match record.entry {
                    Entry::Rewound(rewind) => {
                        reader.seek(rewind.to);
                        continue 'log;
                    }
                    Entry::Message(entry) => {
                        let message = self.engine.attach_message(&head.tenant, &entry.message).await?;
                        let mut stored = StoredMessage::new(record.seq, record.at, MessageEntry { message, ..entry });
                        if let Some((run, next, at)) = started.take() {
                            mark_inputs([&mut stored].into_iter(), &run, next, at);
                            started = stored.input_of.is_some().then_some((run, stored.seq, at));
                        }
                        messages.push(stored);
                        if messages.len() == limit {
                            break 'log;
                        }
                    }
                    Entry::RunStarted { run, .. } => started = Some((run, record.seq, record.at)),
                    _ => {}
                }
            }
        }
        messages.reverse();
        Ok((head, messages))
    }

    /// Changes the title, tags, metadata, model or status of a session, in one commit. `status` can
    /// be [`Status::Paused`] or [`Status::Active`].
    pub async fn update(
        &self,
        principal: &Principal,
        id: &SessionId,
        update: impl Into<SessionUpdate>,
    ) -> Result<Head> {
        let SessionUpdate { patch: change, status, if_match } = update.into();
        if status.is_some_and(|s| !s.is_live()) {
            return Err(Error::invalid(
                "status",
                "`status` can be set to `active` or `paused`; delete the session to end it",
            ));
        }
        check_derived(&change.metadata)?;
        self.write_head(principal, id, |head, now| {
            check_if_match(head, if_match)?;
            self.engine.check_live(head)?;
            if let Patch::Set(model) = &change.model
                && let Err(reason) = check_text(model)
            {
                return Err(Error::invalid("model", format!("not a valid model: {reason}")));
            }
            let mut entries = Vec::new();
            if change != SessionPatch::default() {
                entries.push(Entry::info(change.clone()));
            }
            check_no_open_reviews(head, status)?;
            if let Some(to) = status.filter(|s| *s != head.status) {
                entries.extend(status_entries(head, to, None, now));
            }
            let mut after = head.clone();
            for (seq, entry) in (head.seq + 1..).zip(&entries) {
                after.apply(&Record { seq, at: now, entry: entry.clone() });
            }
            self.engine.check_info_of(&after)?;
            Ok(PendingCommit::new(entries, after))
        })
        .await
    }

    /// Changes the status of a session. Does nothing if it has that status already.
    async fn set_status(
        &self,
        principal: &Principal,
        id: &SessionId,
        to: Status,
        reason: Option<&str>,
        if_match: Option<Seq>,
    ) -> Result<Head> {
        self.write_head(principal, id, |head, now| {
            check_if_match(head, if_match)?;
            if to.is_live() {
                self.engine.check_live(head)?;
            }
            check_no_open_reviews(head, Some(to))?;
            if head.status == to {
                return Ok(PendingCommit::new(Vec::new(), head.clone()));
            }
            let entries = status_entries(head, to, reason, now);
            let mut after = head.clone();
            for (seq, entry) in (head.seq + 1..).zip(&entries) {
                after.apply(&Record { seq, at: now, entry: entry.clone() });
            }
            Ok(PendingCommit::new(entries, after))
        })
        .await
    }

    /// Pauses a session: it accepts no messages until it is activated.
    pub async fn pause(&self, principal: &Principal, id: &SessionId, reason: Option<&str>) -> Result<Head> {
        self.set_status(principal, id, Status::Paused, reason, None).await
    }

    /// Activates a paused session. It is an error if it has open reviews.
    pub async fn activate(&self, principal: &Principal, id: &SessionId) -> Result<Head> {
        self.set_status(principal, id, Status::Active, None, None).await
    }

    /// Deletes a session. It can be restored until its retention ends (D-019). Returns true if there
    /// was one. With `if_match`, it is a conflict unless the log ends there.
    pub async fn delete(&self, principal: &Principal, id: &SessionId, if_match: Option<Seq>) -> Result<bool> {
        match self.set_status(principal, id, Status::Deleted, None, if_match).await {
            Ok(_) => Ok(true),
            Err(Error::NotFound { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Restores an expired or deleted session. With `if_match`, it is a conflict unless the log ends
    /// there.
    pub async fn restore(&self, principal: &Principal, id: &SessionId, if_match: Option<Seq>) -> Result<Head> {
        self.write_head(principal, id, |head, now| {
            check_if_match(head, if_match)?;
            if self.engine.status_of(head).is_live() {
                return Ok(PendingCommit::new(Vec::new(), head.clone()));
            }
            // The session is past its time to live but was not swept yet: the expiry is recorded
            // first, so that the log is complete.
            let expiry =
                head.status.is_live().then_some(Entry::Status { to: Status::Expired, reason: None, until: None });
            // A session that waited for human review still does.
            let to = if head.reviews.is_empty() { Status::Active } else { Status::Paused };
            let entries: Vec<Entry> = expiry
                .into_iter()
                .chain([Entry::Status { to, reason: Some("restored".into()), until: None }])
                .collect();
            let mut after = head.clone();
            for (seq, entry) in (head.seq + 1..).zip(&entries) {
                after.apply(&Record { seq, at: now, entry: entry.clone() });
            }
            Ok(PendingCommit::new(entries, after))
        })
        .await
    }

    /// Purges a session irrevocably. Its forks inherit the records that they need (D-001). Returns
    /// true if there was one. With `if_match`, it is a conflict unless the log ends there.
    pub async fn purge(&self, principal: &Principal, id: &SessionId, if_match: Option<Seq>) -> Result<bool> {
        match self.head(principal, id).await {
            Ok(head) => {
                check_if_match(&head, if_match)?;
                self.retract(&head.key(), None).await?;
                self.engine.purge_key(&head.key()).await?;
                self.end_tools(&head.key()).await;
                Ok(true)
            }
            Err(Error::NotFound { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }
}

/// The entries that change the status of a session. A session that is paused until a time continues with its
/// run.
fn status_entries(head: &Head, to: Status, reason: Option<&str>, now: Timestamp) -> Vec<Entry> {
    if to == Status::Active && head.paused_until().is_some() {
        return resume_entries(head, reason, now);
    }
    vec![Entry::Status { to, reason: reason.map(str::to_owned), until: None }]
}

/// Checks that a session with open reviews is not activated: it continues when they are decided, or
/// when its run is cancelled.
fn check_no_open_reviews(head: &Head, to: Option<Status>) -> Result<()> {
    match to {
        Some(Status::Active) if !head.reviews.is_empty() => Err(Error::invalid(
            "status",
            "the session has open reviews; decide them, or cancel its run, before activating it",
        )),
        _ => Ok(()),
    }
}
