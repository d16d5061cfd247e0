//! A store of sessions with five methods, for programs that have their own: whole sessions are loaded and saved.
//!
//! [`UserHandle`](crate::UserHandle) is one, for the sessions of one user in any of our stores.

use crate::rules::session::{Checkpoint, Point, Session};
use crate::session::transfer::export::Export;
use crate::session::transfer::import_entries;
use crate::types::entry::{Entry, Record, SessionCreated};
use crate::types::error::{Error, Result};
use crate::types::head::SessionInfo;
use crate::types::id::{Principal, Seq, SessionId};
use async_trait::async_trait;
use jiff::Timestamp;

/// A store of sessions. A session that does not exist is [`Error::NotFound`].
///
/// A store of your own converts a session to and from an [`Export`]:
///
/// ```
/// use async_trait::async_trait;
/// use std::collections::BTreeMap;
/// use std::sync::Mutex;
/// use tenure::session::{Export, SessionInfo, SessionStore, fork_session, resume_session};
/// use tenure::{Checkpoint, Clock, Error, Message, Principal, Result, Session, SessionId};
///
/// #[derive(Default)]
/// struct JsonStore(Mutex<BTreeMap<SessionId, String>>);
///
/// #[async_trait]
/// impl SessionStore for JsonStore {
///     async fn load(&self, id: &SessionId) -> Result<Session> {
///         let texts = self.0.lock().unwrap();
///         let text = texts.get(id).ok_or(Error::NotFound { session_id: id.clone() })?;
///         let export: Export = serde_json::from_str(text).map_err(|e| Error::corrupt_from(id, e))?;
///         let mut session = Session::from_export(&Principal::default(), id, &export)?;
///         session.mark_saved();
///         Ok(session)
///     }
///
///     async fn save(&self, session: &mut Session) -> Result<()> {
///         let text = serde_json::to_string(&Export::from(session.clone())).expect("an export is JSON");
///         self.0.lock().unwrap().insert(session.head().info.session_id.clone(), text);
///         session.mark_saved();
///         Ok(())
///     }
///
///     async fn list(&self) -> Result<Vec<SessionInfo>> {
///         let ids: Vec<SessionId> = self.0.lock().unwrap().keys().cloned().collect();
///         let mut all = Vec::new();
///         for id in ids {
///             all.push(self.load(&id).await?.head().info.clone());
///         }
///         Ok(all)
///     }
///
///     async fn delete(&self, id: &SessionId) -> Result<()> {
///         self.0.lock().unwrap().remove(id).map(drop).ok_or(Error::NotFound { session_id: id.clone() })
///     }
///
///     async fn list_checkpoints(&self, id: &SessionId) -> Result<Vec<Checkpoint>> {
///         Ok(self.load(id).await?.checkpoints)
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<()> {
/// let store = JsonStore::default();
/// let now = Clock::default().now();
/// let id = SessionId::new("trip")?;
/// let export = Export { messages: vec![Message::user("hi"), Message::assistant("hello")], ..Export::default() };
/// let mut session = Session::from_export(&Principal::default(), &id, &export)?;
/// session.add_checkpoint("greeting", now)?;
/// session.push(Message::user("and now?"), now);
/// session.save(&store).await?;
///
/// let mut fork = fork_session(&Session::load(&store, &id).await?, "greeting", SessionId::new("other")?, now)?;
/// fork.save(&store).await?;
/// let resumed = resume_session(&id, "greeting", &store, now).await?;
/// assert_eq!((resumed.messages.len(), store.list().await?.len()), (2, 2));
/// # Ok(())
/// # }
/// ```
#[async_trait]
pub trait SessionStore: Send + Sync {
    /// Loads a session. It has no unsaved changes ([`Session::mark_saved`]).
    async fn load(&self, id: &SessionId) -> Result<Session>;

    /// Saves a session. Its unsaved changes count as saved afterwards ([`Session::mark_saved`]).
    async fn save(&self, session: &mut Session) -> Result<()>;

    /// Lists the sessions.
    async fn list(&self) -> Result<Vec<SessionInfo>>;

    /// Deletes a session.
    async fn delete(&self, id: &SessionId) -> Result<()>;

    /// Lists the checkpoints of a session, oldest first.
    async fn list_checkpoints(&self, id: &SessionId) -> Result<Vec<Checkpoint>>;
}

impl Session {
    /// Loads a session from a store.
    pub async fn load(store: &(impl SessionStore + ?Sized), id: &SessionId) -> Result<Session> {
        store.load(id).await
    }

    /// Saves all changes since the session was loaded.
    pub async fn save(&mut self, store: &(impl SessionStore + ?Sized)) -> Result<()> {
        store.save(self).await
    }

    /// Creates a session in memory from the messages, checkpoints and info of an export; its log is not used. The
    /// session has not been saved.
    pub fn from_export(principal: &Principal, id: &SessionId, export: &Export) -> Result<Session> {
        let entries = import_entries(export, &export.messages)?;
        let created_at = export.created_at.or(export.message_times.iter().flatten().min().copied());
        let at = created_at.unwrap_or(Timestamp::UNIX_EPOCH);
        let created = SessionCreated {
            user: principal.user.clone(),
            assistant: export.assistant.clone(),
            thread: export.thread.clone(),
            model: export.model.clone(),
            title: export.title.clone(),
            tags: export.tags.clone(),
            metadata: export.metadata.clone(),
            ..SessionCreated::default()
        };
        let end = export.updated_at.unwrap_or(at).max(at);
        let mut records = vec![Record { seq: 1, at, entry: Entry::created(created) }];
        let mut message_times = export.message_times.iter().copied();
        for entry in entries {
            let time = match &entry {
                Entry::Message(_) => message_times.next().flatten(),
                _ => None,
            };
            let last = records.last().map_or(at, |record| record.at);
            let seq = records.len() as Seq + 1;
            records.push(Record { seq, at: time.unwrap_or(end).max(last), entry });
        }
        let mut session = Session::replay(&principal.key(id), records.iter().cloned())
            .ok_or_else(|| Error::invalid("", "the export is not a session"))?;
        session.pending = records;
        Ok(session)
    }

    /// Marks all changes as saved. For implementations of [`SessionStore`].
    pub fn mark_saved(&mut self) {
        self.pending.clear();
        self.committed_end = None;
    }
}

/// Loads a session, discards everything after a checkpoint or another point, saves it and returns it. In our stores
/// the discarded messages stay in the log; the JSONL store also writes them to `{session_id}.discarded.jsonl`.
pub async fn resume_session(
    id: &SessionId,
    point: impl Into<Point>,
    store: &(impl SessionStore + ?Sized),
    at: Timestamp,
) -> Result<Session> {
    let mut session = store.load(id).await?;
    session.truncate_to(point, at)?;
    store.save(&mut session).await?;
    Ok(session)
}
