//! The handle that applications use. Operations are methods of [`Tenure`], grouped by directory:
//! `session`, `run`, `review`, `memory`.

use crate::engine::core::Engine;
use crate::engine::hooks::{ArchiveHook, SessionEndHook};
use crate::engine::live_count::Eviction;
use crate::engine::memory_index::MemoryState;
use crate::engine::options::Options;
use crate::engine::pending_commit::PendingCommit;
use crate::engine::quota::Usage;
use crate::engine::turn_lock::{TurnLoad, TurnLocks};
use crate::engine::write::Committed;
use crate::executors::tools::Tools;
use crate::rules::partial::PartialSession;
use crate::rules::redaction::Redaction;
use crate::rules::session::Session;
use crate::store::contract::{OpenRepair, Store};
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::types::error::Result;
use crate::types::head::{Head, ReviewIndexLabel};
use crate::types::id::{Principal, Seq, SessionId, SessionKey, Tenant};
use crate::types::policy::{Limits, Policy};
use crate::types::quota::QuotaScope;
use async_trait::async_trait;
use jiff::Timestamp;
use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, RwLock};
use std::time::Duration;

/// An open store with its sessions: the entry point of the library. Cheap to clone; clones share
/// the store and the cache.
#[derive(Clone, Debug)]
pub struct Tenure {
    /// Reads and writes sessions.
    pub(crate) engine: Engine,
    /// State that clones share besides the engine.
    pub(crate) shared: Arc<SharedState>,
}

/// State that all clones of a [`Tenure`] share besides the engine.
pub(crate) struct SharedState {
    /// Callbacks before a session expires or is evicted.
    pub hooks: RwLock<Vec<SessionEndHook>>,
    /// Callbacks when a session moves to another id.
    pub archive_hooks: RwLock<Vec<ArchiveHook>>,
    /// Observers of commits that discard messages or set checkpoints.
    pub observers: RwLock<Vec<Arc<dyn SessionObserver>>>,
    /// Tools that are notified when a session ends.
    pub tools: RwLock<Vec<Arc<dyn Tools>>>,
    /// The number of longest idle sessions that recent sweeps could not evict.
    pub unevictable: AtomicUsize,
    /// Evictions by creations of sessions. Held across awaits, so that they are serialized.
    pub eviction: tokio::sync::Mutex<Eviction>,
    /// Turn locks: at most one turn at a time in each session.
    pub turn_locks: TurnLocks,
    /// Locks of idempotency keys: at most one request at a time for each key.
    pub key_locks: TurnLocks,
    /// Compaction locks: at most one compaction at a time in each session.
    pub compaction_locks: TurnLocks,
    /// The repairs that were made when the store was opened.
    pub repairs: Vec<OpenRepair>,
    /// Vector indexes and locks of memories.
    pub memories: MemoryState,
}

impl Debug for SharedState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedState").field("repairs", &self.repairs).finish_non_exhaustive()
    }
}

/// Observer that ends the tools of a session that was deleted or has expired.
#[derive(Debug)]
pub(crate) struct EndTools;

#[async_trait]
impl SessionObserver for EndTools {
    async fn committed(&self, tenure: &Tenure, event: &Committed) {
        if event.ended {
            tenure.end_tools(&event.head.key()).await;
        }
    }
}

/// An observer of commits that concern other parts than the one that committed. It is called after
/// the commit is durable and the session's lock is released; the operation that committed waits for
/// it.
#[async_trait]
pub(crate) trait SessionObserver: Debug + Send + Sync {
    /// Called after a commit that discarded messages, set a checkpoint or ended the session.
    async fn committed(&self, tenure: &Tenure, event: &Committed);
}

impl Tenure {
    /// Builds a handle from its parts.
    pub(crate) fn build(
        store: Arc<dyn Store>,
        options: Options,
        repairs: Vec<OpenRepair>,
        observers: Vec<Arc<dyn SessionObserver>>,
    ) -> Self {
        let memories = MemoryState::new(options.vector_bytes);
        let observers = RwLock::new(observers);
        let shared = SharedState {
            hooks: RwLock::default(),
            archive_hooks: RwLock::default(),
            observers,
            tools: RwLock::default(),
            unevictable: AtomicUsize::default(),
            eviction: tokio::sync::Mutex::default(),
            turn_locks: TurnLocks::default(),
            key_locks: TurnLocks::default(),
            compaction_locks: TurnLocks::default(),
            repairs,
            memories,
        };
        Self { engine: Engine::new(store, options), shared: Arc::new(shared) }
    }

    /// Counts the turns in progress, and the requests that wait for one, in this process.
    pub fn turn_load(&self) -> TurnLoad {
        self.shared.turn_locks.load()
    }

    /// Counts the reviews of all tenants that wait for a decision, in at most `max_sessions` sessions.
    pub async fn count_open_reviews(&self, max_sessions: usize) -> Result<usize> {
        let mut query = SessionQuery::new(OwnerFilter::AllTenants, max_sessions);
        query.reviewing = Some(ReviewIndexLabel::Open);
        Ok(self.store().heads(&query).await?.iter().map(|head| head.reviews.len()).sum())
    }

    /// The store that this handle reads and writes.
    pub fn store(&self) -> &Arc<dyn Store> {
        self.engine.store()
    }

    /// A handle for lists, searches and other reads that are not part of a turn. Reads through this
    /// handle are scheduled: each principal has a bounded number of concurrent reads, waiting reads
    /// are served round robin, and a part of the store's capacity is reserved for turns. A read is
    /// rejected (`max_waiting_reads`) if too many reads of the same principal wait (D-106).
    pub fn browsing(&self, principal: &Principal) -> Self {
        Self { engine: self.engine.browsing(principal), shared: self.shared.clone() }
    }

    /// The repairs that were made when the store was opened, such as the truncation of a torn tail.
    pub fn repairs(&self) -> &[OpenRepair] {
        &self.shared.repairs
    }

    /// The limits in force.
    pub fn limits(&self) -> &Limits {
        self.engine.limits()
    }

    /// The current time of the configured clock.
    pub fn now(&self) -> Timestamp {
        self.engine.now()
    }

    /// The name of this node, unique for each open store.
    pub fn node(&self) -> &str {
        self.engine.node()
    }

    /// The redaction rules for text that leaves the log.
    pub fn redaction(&self) -> &Redaction {
        &self.engine.options().redaction
    }

    /// Redacts a text. Returns it with the names of the rules that matched. Callers use it before
    /// they write text outside of the log (D-084).
    pub fn redact<'t>(&self, text: &'t str) -> (Cow<'t, str>, Vec<&str>) {
        self.redaction().apply(text)
    }

    /// Reads the head of a session, whatever its status.
    pub async fn head(&self, principal: &Principal, id: &SessionId) -> Result<Head> {
        self.engine.head(principal, id).await
    }

    /// Reads the head of a session that is active or paused. An expired or deleted session is
    /// [`Error::Gone`](crate::Error::Gone).
    pub async fn get_live_head(&self, principal: &Principal, id: &SessionId) -> Result<Head> {
        self.engine.get_live_head(principal, id).await
    }

    /// The policy for the sessions of an assistant, or of no assistant. A tenant's own assistants
    /// are only considered once they have been read from the store.
    pub fn policy(&self, tenant: &Tenant, assistant: Option<&str>) -> Policy {
        self.engine.policy(tenant, assistant)
    }

    /// The shortest time to live of any session, as far as assistants are cached. It determines how
    /// often a sweep is useful.
    pub fn shortest_ttl(&self) -> Option<Duration> {
        self.engine.shortest_ttl()
    }

    /// The stored amount of a user, or of a whole tenant.
    pub async fn usage(&self, principal: &Principal, scope: QuotaScope) -> Result<Usage> {
        self.engine.usage(principal, scope).await
    }

    /// Waits until a session may have changed after the record `seen`. It may also return without a
    /// change, so callers check again.
    pub async fn wait_for_change(&self, principal: &Principal, id: &SessionId, seen: Seq) -> Result<()> {
        self.engine.wait_for_change(principal, id, seen).await
    }

    /// Subscribes to the keys of all sessions that this process creates or writes to from now on.
    /// Each key is sent after its commit. A slow receiver loses keys and gets an error that says
    /// so.
    pub fn subscribe(&self) -> tokio::sync::broadcast::Receiver<SessionKey> {
        self.engine.subscribe()
    }

    /// Writes to a session whose head `step` sees, then notifies the observers of the commit.
    pub(crate) async fn write_head<R>(
        &self,
        principal: &Principal,
        id: &SessionId,
        step: impl FnMut(&Head, Timestamp) -> Result<PendingCommit<R>>,
    ) -> Result<R> {
        self.observed(self.engine.write_head(principal, id, step)).await
    }

    /// Writes to a session of which `step` sees the part that a run needs, then notifies the
    /// observers of the commit.
    pub(crate) async fn write_partial<R>(
        &self,
        principal: &Principal,
        id: &SessionId,
        step: impl FnMut(PartialSession<'_>, Timestamp) -> Result<PendingCommit<R>>,
    ) -> Result<R> {
        self.observed(self.engine.write_partial(principal, id, step)).await
    }

    /// Writes to a session that `step` sees in full, then notifies the observers of the commit.
    pub(crate) async fn write_session<R>(
        &self,
        principal: &Principal,
        id: &SessionId,
        step: impl FnMut(&Session, Timestamp) -> Result<PendingCommit<R>>,
    ) -> Result<R> {
        self.observed(self.engine.write_session(principal, id, step)).await
    }

    async fn observed<R>(&self, write: impl Future<Output = Result<(R, Option<Committed>)>>) -> Result<R> {
        let (reply, event) = write.await?;
        if let Some(event) = event {
            self.notify_observers(&event).await;
        }
        Ok(reply)
    }

    /// Registers tools that are notified ([`Tools::end`]) when a session was deleted, has expired, or
    /// was purged or erased through this handle or its clones.
    pub fn register_tools(&self, tools: Arc<dyn Tools>) {
        self.shared.tools.write().unwrap_or_else(|e| e.into_inner()).push(tools);
    }

    /// Notifies the registered tools that a session has ended.
    pub(crate) async fn end_tools(&self, session: &SessionKey) {
        let tools = self.shared.tools.read().unwrap_or_else(|e| e.into_inner()).clone();
        for tools in tools {
            tools.end(session).await;
        }
    }

    /// Calls the observers of a commit, one after the other.
    pub(crate) async fn notify_observers(&self, event: &Committed) {
        let observers = self.shared.observers.read().unwrap_or_else(|e| e.into_inner()).clone();
        for observer in observers {
            observer.committed(self, event).await;
        }
    }
}
