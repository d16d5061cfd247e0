//! The handle that applications use. Operations are methods of it, grouped by directory: `session`, `run`, `review`, `memory`.

use crate::engine::cache::State;
use crate::engine::core::Engine;
use crate::engine::draft::{Draft, Need};
use crate::engine::hooks::{ArchiveHook, Hook};
use crate::engine::options::Options;
use crate::engine::quota::Usage;
use crate::engine::turn_lock::Gates;
use crate::engine::vector_index::Memories;
use crate::engine::write::Committed;
use crate::rules::redaction::Redaction;
use crate::store::contract::{Repair, Store};
use crate::types::error::Result;
use crate::types::head::Head;
use crate::types::id::{Principal, Seq, SessionId, Tenant};
use crate::types::policy::{Limits, Policy};
use crate::types::quota::QuotaScope;
use async_trait::async_trait;
use jiff::Timestamp;
use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, RwLock};
use std::time::Duration;

/// An open store with its sessions. Cheap to clone; clones share the store and the cache.
#[derive(Clone, Debug)]
pub struct Tenure {
    pub(crate) engine: Engine,
    pub(crate) shared: Arc<Shared>,
}

/// What operations share besides the engine.
#[derive(Debug)]
pub(crate) struct Shared {
    pub hooks: RwLock<Vec<Hook>>,
    pub archive_hooks: RwLock<Vec<ArchiveHook>>,
    pub observers: RwLock<Vec<Arc<dyn SessionObserver>>>,
    /// How many of the longest idle sessions the last sweep could not evict.
    pub stuck: AtomicUsize,
    /// One turn at a time in each session.
    pub turn_locks: Gates,
    /// One request at a time for each idempotency key.
    pub key_locks: Gates,
    /// One compaction at a time in each session.
    pub compaction_locks: Gates,
    pub repairs: Vec<Repair>,
    pub memories: Memories,
}

/// Is told of commits that concern other parts than the one that committed. Called after the commit is durable and the session's lock is
/// released; the operation that committed waits for it.
#[async_trait]
pub(crate) trait SessionObserver: Debug + Send + Sync {
    /// A commit cut messages off or set a checkpoint.
    async fn committed(&self, tenure: &Tenure, event: &Committed);
}

impl Tenure {
    pub(crate) fn build(
        store: Arc<dyn Store>,
        options: Options,
        repairs: Vec<Repair>,
        observers: Vec<Arc<dyn SessionObserver>>,
    ) -> Self {
        let memories = Memories::new(options.vector_bytes);
        let observers = RwLock::new(observers);
        let shared = Shared {
            hooks: RwLock::default(),
            archive_hooks: RwLock::default(),
            observers,
            stuck: AtomicUsize::default(),
            turn_locks: Gates::default(),
            key_locks: Gates::default(),
            compaction_locks: Gates::default(),
            repairs,
            memories,
        };
        Self { engine: Engine::new(store, options), shared: Arc::new(shared) }
    }

    /// The store.
    pub fn store(&self) -> &Arc<dyn Store> {
        self.engine.store()
    }

    /// A handle for lists, searches and other reads that are not part of a turn. What is read through this handle is scheduled:
    /// each principal has a bounded number of reads under way, those that wait are served round robin, and a part of the store's
    /// capacity is left to turns. A read is refused (`max_waiting_reads`) if too many of the same principal wait.
    pub fn browsing(&self, who: &Principal) -> Self {
        Self { engine: self.engine.browsing(who), shared: self.shared.clone() }
    }

    /// What was repaired when the store was opened, such as a torn tail that was truncated.
    pub fn repairs(&self) -> &[Repair] {
        &self.shared.repairs
    }

    /// The limits in force.
    pub fn limits(&self) -> &Limits {
        self.engine.limits()
    }

    /// The current time by the configured clock.
    pub fn now(&self) -> Timestamp {
        self.engine.now()
    }

    /// The name of this node. Each open store has a name of its own.
    pub fn node(&self) -> &str {
        self.engine.node()
    }

    /// A handle whose operations are refused with [`Error::Conflict`](crate::Error::Conflict) unless the log of the session ends at `seq`.
    pub fn expecting(&self, seq: Seq) -> Self {
        Self { engine: self.engine.expecting(seq), shared: self.shared.clone() }
    }

    /// What must not leave the log.
    pub fn redaction(&self) -> &Redaction {
        &self.engine.options().redaction
    }

    /// A text as it may leave the log, and the names of the rules that matched: for whoever writes it anywhere else.
    pub fn redact<'t>(&self, text: &'t str) -> (Cow<'t, str>, Vec<&str>) {
        self.redaction().apply(text)
    }

    /// The head of a session, whatever its status.
    pub async fn head(&self, who: &Principal, id: &SessionId) -> Result<Head> {
        self.engine.head(who, id).await
    }

    /// The head of a session that is active or paused. One that has expired or was deleted is [`Error::Gone`](crate::Error::Gone).
    pub async fn live(&self, who: &Principal, id: &SessionId) -> Result<Head> {
        self.engine.live(who, id).await
    }

    /// The policy for the sessions of an assistant, or of none. A tenant's own assistants count once they were read.
    pub fn policy(&self, tenant: &Tenant, assistant: Option<&str>) -> Policy {
        self.engine.policy(tenant, assistant)
    }

    /// The shortest time to live of any session, as far as assistants are known: how often a sweep makes sense.
    pub fn shortest_ttl(&self) -> Option<Duration> {
        self.engine.shortest_ttl()
    }

    /// What a user, or a whole tenant, has stored.
    pub async fn usage(&self, who: &Principal, scope: QuotaScope) -> Result<Usage> {
        self.engine.usage(who, scope).await
    }

    /// Waits until a session may have changed since a record. It may also return without a change: check again.
    pub async fn changed(&self, who: &Principal, id: &SessionId, seen: Seq) -> Result<()> {
        self.engine.changed(who, id, seen).await
    }

    /// Every session that this process creates or writes to from now on, after the commit. A slow receiver misses some, and is told so.
    pub fn changes(&self) -> tokio::sync::broadcast::Receiver<crate::types::id::Key> {
        self.engine.changes()
    }

    /// Writes to a session through the engine, then tells the observers.
    pub(crate) async fn write<R>(
        &self,
        who: &Principal,
        id: &SessionId,
        need: Need,
        step: impl FnMut(&State, Timestamp) -> Result<Draft<R>>,
    ) -> Result<R> {
        let (reply, event) = self.engine.write(who, id, need, step).await?;
        if let Some(event) = event {
            self.tell_observers(&event).await;
        }
        Ok(reply)
    }

    pub(crate) async fn tell_observers(&self, event: &Committed) {
        let observers = self.shared.observers.read().unwrap_or_else(|e| e.into_inner()).clone();
        for observer in observers {
            observer.committed(self, event).await;
        }
    }
}
