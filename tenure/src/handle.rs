//! Handles: [`UserHandle`] fixes the principal of every call, [`SessionHandle`] also the session.
//! Both are cheap to clone and hold no session data: every method reads or writes the store.

use crate::engine::list::SessionPage;
use crate::memory::memories::{MemoryTarget, NewMemory};
use crate::memory::recall::RecallResult;
use crate::rules::prompt::history;
use crate::rules::session::{Checkpoint, Point, Session};
use crate::run::executors::{Executors, TurnError, TurnOutcome};
use crate::run::request::RunRequest;
use crate::session::append::{Append, AppendResult};
use crate::session::checkpoint::{Fork, Rewind, RewindResult};
use crate::session::lifecycle::{NewSession, SessionUpdate};
use crate::session::search::request::{SearchPage, SearchRequest};
use crate::session::session_store::SessionStore;
use crate::session::transfer::export::Export;
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::head::{Head, SessionInfo};
use crate::types::id::{AccessScope, CheckpointLabel, Principal, SessionId};
use crate::types::memory::Memory;
use crate::types::message::Message;
use async_trait::async_trait;

impl Tenure {
    /// Returns a handle for the sessions and memories of one user. Fails if a name is not valid;
    /// users need not be created.
    ///
    /// ```
    /// # use tenure::{Message, Point, Tenure};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> tenure::Result<()> {
    /// # let tenure = Tenure::open("memory:").await?;
    /// let session = tenure.user("acme", "ada")?.create_session().await?;
    /// session.append([Message::user("hi")]).await?;
    /// let branch = session.fork(Point::Turn(1)).await?;
    /// # assert_eq!(branch.load().await?.messages.len(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn user(&self, tenant: &str, user: &str) -> Result<UserHandle> {
        Ok(self.principal(Principal::new(tenant, user)?))
    }

    /// Returns a handle whose calls are made as a principal, with its access scope and quota.
    pub fn principal(&self, principal: Principal) -> UserHandle {
        UserHandle { tenure: self.clone(), principal }
    }
}

/// A [`Tenure`] together with the principal on whose behalf it is used. Created by [`Tenure::user`].
#[derive(Clone, Debug)]
pub struct UserHandle {
    tenure: Tenure,
    principal: Principal,
}

impl UserHandle {
    /// The principal of this handle's calls.
    pub fn principal(&self) -> &Principal {
        &self.principal
    }

    /// Creates a session with a generated id. It is durable when this returns.
    pub async fn create_session(&self) -> Result<SessionHandle> {
        self.create_session_with(NewSession::default()).await
    }

    /// Creates a session with the given id, title, tags or metadata. It is durable when this
    /// returns.
    ///
    /// ```
    /// # use tenure::{NewSession, Tenure};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> tenure::Result<()> {
    /// # let tenure = Tenure::open("memory:").await?;
    /// let new = NewSession { title: Some("Weather".into()), ..NewSession::default() };
    /// let session = tenure.user("acme", "ada")?.create_session_with(new).await?;
    /// assert_eq!(session.head().await?.info.title.as_deref(), Some("Weather"));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn create_session_with(&self, new: NewSession) -> Result<SessionHandle> {
        let session = self.tenure.create(&self.principal, new).await?;
        Ok(self.handle(session.head().info.session_id.clone()))
    }

    /// Returns a handle on a session by its id. It is not checked here whether the session exists:
    /// calls on a session that does not exist, or belongs to another user, return
    /// [`Error::NotFound`](crate::Error::NotFound).
    pub fn session(&self, id: impl AsRef<str>) -> Result<SessionHandle> {
        Ok(self.handle(SessionId::new(id)?))
    }

    /// Exports a session with its log and media. `None` if it does not exist, has expired or was deleted.
    ///
    /// The functions on session ids have the names and results of mistral.rs:
    ///
    /// ```
    /// # use tenure::{Message, NewSession, SessionId, Tenure};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> tenure::Result<()> {
    /// # let tenure = Tenure::open("memory:").await?;
    /// let ada = tenure.user("acme", "ada")?;
    /// let src = ada.create_session_with(NewSession { id: Some(SessionId::new("src")?), ..NewSession::default() }).await?;
    /// src.append([Message::user("hi"), Message::assistant("hello")]).await?;
    /// src.append([Message::user("bye"), Message::assistant("see you")]).await?;
    ///
    /// if let Some(session) = ada.export_session("src").await? {
    ///     ada.import_session("copy", session).await?; // replaces an existing session
    /// }
    /// ada.fork_session("src", "first-turn", 1).await?; // shares the first turn
    /// assert_eq!(ada.session("first-turn")?.load().await?.messages.len(), 2);
    /// assert_eq!(ada.list_session_ids().await?.len(), 3);
    ///
    /// assert!(ada.delete_session("copy").await?);
    /// assert!(!ada.delete_session("copy").await?);
    /// assert!(ada.export_session("copy").await?.is_none());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn export_session(&self, id: impl AsRef<str>) -> Result<Option<Export>> {
        match self.session(id)?.export().await {
            Ok(export) => Ok(Some(export)),
            Err(Error::NotFound { .. } | Error::Gone { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Imports a session under an id. The messages of an existing session are replaced; they stay in its log.
    pub async fn import_session(&self, id: impl AsRef<str>, export: Export) -> Result<SessionHandle> {
        let session = self.session(id)?;
        self.tenure.import(&self.principal, session.id(), export, None).await?;
        Ok(session)
    }

    /// Deletes a session. Returns false if it does not exist, has expired or was deleted before.
    pub async fn delete_session(&self, id: impl AsRef<str>) -> Result<bool> {
        let session = self.session(id)?;
        match self.tenure.get_live_head(&self.principal, session.id()).await {
            Ok(_) => session.delete().await,
            Err(Error::NotFound { .. } | Error::Gone { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Lists the ids of all live sessions, most recently active first.
    pub async fn list_session_ids(&self) -> Result<Vec<SessionId>> {
        Ok(self.all_heads().await?.into_iter().map(|head| head.info.session_id).collect())
    }

    async fn all_heads(&self) -> Result<Vec<Head>> {
        let owner = OwnerFilter::Tenant(self.principal.tenant.clone());
        let mut query = SessionQuery::new(owner, self.tenure.limits().max_page);
        let mut heads = Vec::new();
        loop {
            let page = self.sessions(query.clone()).await?;
            heads.extend(page.heads);
            match page.next {
                Some(next) => query.cursor = Some(next),
                None => return Ok(heads),
            }
        }
    }

    /// Forks a session after its first `turns` turns, under a new id. Nothing is copied.
    pub async fn fork_session(
        &self,
        source: impl AsRef<str>,
        new: impl AsRef<str>,
        turns: usize,
    ) -> Result<SessionHandle> {
        self.session(source)?.fork(Fork::at(Point::Turn(turns)).id(SessionId::new(new)?)).await
    }

    /// Lists sessions, most recently active first.
    pub async fn sessions(&self, query: SessionQuery) -> Result<SessionPage> {
        self.tenure.list(&self.principal, query).await
    }

    /// Searches the messages of the user's sessions for words and phrases.
    pub async fn search(&self, request: &SearchRequest) -> Result<SearchPage> {
        self.tenure.search_sessions(&self.principal, request).await
    }

    /// Stores a fact in the user's long-term memory.
    ///
    /// ```
    /// # use tenure::Tenure;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> tenure::Result<()> {
    /// # let tenure = Tenure::open("memory:").await?;
    /// let ada = tenure.user("acme", "ada")?;
    /// ada.remember("Ada is allergic to peanuts.").await?;
    /// let found = ada.recall("which food is she allergic to?", 3).await?;
    /// assert_eq!(found.memories[0].memory.text, "Ada is allergic to peanuts.");
    /// # Ok(())
    /// # }
    /// ```
    pub async fn remember(&self, memory: impl Into<NewMemory>) -> Result<Memory> {
        self.tenure.remember(&self.principal, &MemoryTarget::Own, memory.into()).await
    }

    /// Finds at most `limit` of the user's memories that are relevant to a text, best first.
    pub async fn recall(&self, query: &str, limit: usize) -> Result<RecallResult> {
        self.tenure.recall(&self.principal, &MemoryTarget::Own, query, limit).await
    }

    fn handle(&self, id: SessionId) -> SessionHandle {
        SessionHandle { tenure: self.tenure.clone(), principal: self.principal.clone(), id }
    }
}

/// The sessions of the user, in the store of the [`Tenure`].
#[async_trait]
impl SessionStore for UserHandle {
    async fn load(&self, id: &SessionId) -> Result<Session> {
        self.tenure.load(&self.principal, id).await
    }

    async fn save(&self, session: &mut Session) -> Result<()> {
        let head = session.head();
        let is_own = head.user == self.principal.user || self.principal.scope == AccessScope::Tenant;
        if head.tenant != self.principal.tenant || !is_own {
            return Err(Error::NotFound { session_id: head.info.session_id.clone() });
        }
        self.tenure.save(session).await
    }

    async fn list(&self) -> Result<Vec<SessionInfo>> {
        Ok(self.all_heads().await?.into_iter().map(|head| head.info).collect())
    }

    async fn delete(&self, id: &SessionId) -> Result<()> {
        self.tenure.get_live_head(&self.principal, id).await?;
        self.tenure.delete(&self.principal, id, None).await.map(drop)
    }

    async fn list_checkpoints(&self, id: &SessionId) -> Result<Vec<Checkpoint>> {
        self.tenure.checkpoints(&self.principal, id).await
    }
}

/// One session, as one principal. Created by [`UserHandle::create_session`] or
/// [`UserHandle::session`].
#[derive(Clone, Debug)]
pub struct SessionHandle {
    tenure: Tenure,
    principal: Principal,
    id: SessionId,
}

impl SessionHandle {
    /// The id of the session.
    pub fn id(&self) -> &SessionId {
        &self.id
    }

    /// The principal of this handle's calls.
    pub fn principal(&self) -> &Principal {
        &self.principal
    }

    /// Appends messages atomically. They are durable when this returns. [`Append`] has options: a
    /// condition, an idempotency key, the run that produced the messages.
    pub async fn append(&self, messages: impl Into<Append>) -> Result<AppendResult> {
        self.tenure.append(&self.principal, &self.id, messages).await
    }

    /// Reads the head: title, tags, metadata, status and counters, without the messages.
    pub async fn head(&self) -> Result<Head> {
        self.tenure.head(&self.principal, &self.id).await
    }

    /// Loads the session with all its messages and media.
    pub async fn load(&self) -> Result<Session> {
        self.tenure.load(&self.principal, &self.id).await
    }

    /// Returns the messages that a model is sent for the session's next turn, within the window of
    /// the session's policy.
    ///
    /// ```
    /// # use tenure::{Message, Tenure};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> tenure::Result<()> {
    /// # let tenure = Tenure::open("memory:").await?;
    /// # let session = tenure.user("acme", "ada")?.create_session().await?;
    /// session.append([Message::user("2 + 2?"), Message::assistant("4")]).await?;
    /// session.append([Message::user("and times 3?")]).await?;
    /// assert_eq!(session.history().await?.len(), 3);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn history(&self) -> Result<Vec<Message>> {
        let session = self.load().await?;
        let head = session.head();
        Ok(history(&session, &self.tenure.policy(&head.tenant, head.assistant.as_deref()).window))
    }

    /// Sets a checkpoint at the end of the session.
    ///
    /// ```
    /// # use tenure::{Message, Tenure};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> tenure::Result<()> {
    /// # let tenure = Tenure::open("memory:").await?;
    /// # let session = tenure.user("acme", "ada")?.create_session().await?;
    /// session.append([Message::user("plan A"), Message::assistant("done")]).await?;
    /// session.checkpoint("plan-a").await?;
    /// session.append([Message::user("plan B"), Message::assistant("failed")]).await?;
    /// let rewound = session.rewind("plan-a").await?;
    /// assert_eq!((rewound.position, rewound.discarded), (2, 2));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn checkpoint(&self, label: &str) -> Result<Checkpoint> {
        self.tenure.checkpoint(&self.principal, &self.id, CheckpointLabel::new(label)?).await
    }

    /// Lists the checkpoints, oldest first.
    pub async fn checkpoints(&self) -> Result<Vec<Checkpoint>> {
        self.tenure.checkpoints(&self.principal, &self.id).await
    }

    /// Rewinds the session to a checkpoint's label, a turn or a position. The discarded messages
    /// stay in the log.
    pub async fn rewind(&self, to: impl Into<Rewind>) -> Result<RewindResult> {
        self.tenure.rewind(&self.principal, &self.id, to).await
    }

    /// Forks the session: the new session shares the history up to a point. Nothing is copied, and
    /// neither session can change the other.
    pub async fn fork(&self, at: impl Into<Fork>) -> Result<Self> {
        let head = self.tenure.fork(&self.principal, &self.id, at).await?;
        Ok(Self { id: head.info.session_id, ..self.clone() })
    }

    /// Executes one turn: stores the messages, calls the model, executes the tool calls that it
    /// requests, and stores every step before the next one starts. See [`crate::run`].
    pub async fn run(&self, request: RunRequest<'_>) -> Result<TurnOutcome, TurnError> {
        self.tenure.run(&self.principal, &self.id, request).await
    }

    /// Resumes a run that was interrupted by a crash, or that waited for a review. Returns `None` if
    /// the session has no such run. See [`crate::run`].
    pub async fn resume(&self, executors: Executors<'_>) -> Result<Option<TurnOutcome>, TurnError> {
        self.tenure.resume(&self.principal, &self.id, executors).await
    }

    /// Changes title, tags, metadata, model or status.
    pub async fn update(&self, update: impl Into<SessionUpdate>) -> Result<Head> {
        self.tenure.update(&self.principal, &self.id, update).await
    }

    /// Deletes the session. It can be restored until its retention ends. Returns false if it was
    /// deleted before.
    pub async fn delete(&self) -> Result<bool> {
        self.tenure.delete(&self.principal, &self.id, None).await
    }

    /// Restores a deleted or expired session.
    pub async fn restore(&self) -> Result<Head> {
        self.tenure.restore(&self.principal, &self.id, None).await
    }

    /// Destroys the session irrevocably. Forks keep the history that they share with it. Returns
    /// false if it did not exist.
    pub async fn purge(&self) -> Result<bool> {
        self.tenure.purge(&self.principal, &self.id, None).await
    }

    /// Exports the session with its log and media.
    pub async fn export(&self) -> Result<Export> {
        self.tenure.export(&self.principal, &self.id).await
    }
}
