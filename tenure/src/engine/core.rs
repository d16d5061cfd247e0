//! The engine: a store, the session cache in front of it, and what both need to read and write sessions.

use crate::clock::Clock;
use crate::engine::cache::{HotSessions, hot_sessions};
use crate::engine::node::node_name;
use crate::engine::observer::CommitObserver;
use crate::engine::options::Options;
use crate::engine::quota::UsageCache;
use crate::engine::read_scheduler::{self, Bounds, ScheduledStore, Scheduler};
use crate::engine::registry::Assistants;
use crate::engine::watch::Watchers;
use crate::store::contract::{Concurrency, Store, Writes};
use crate::types::error::Result;
use crate::types::id::{Principal, Seq};
use crate::types::policy::{Limits, Policy};
use jiff::Timestamp;
use std::sync::{Arc, Weak};

/// Reads and writes sessions. Cheap to clone; clones share the store and the cache.
#[derive(Clone, Debug)]
pub(crate) struct Engine {
    shared: Arc<EngineState>,
    /// The position at which the log of a session must end for an operation on it (`If-Match`).
    pub expect: Option<Seq>,
    /// The store behind a read scheduler, for reads that are not part of a turn.
    scheduled: Option<Arc<dyn Store>>,
}

#[derive(Debug)]
pub(crate) struct EngineState {
    store: Arc<dyn Store>,
    /// Schedules the reads that are not part of a turn.
    browsing: Arc<Scheduler>,
    options: Options,
    assistants: Assistants,
    cache: HotSessions,
    node: String,
    pub watchers: Arc<Watchers>,
    usage: UsageCache,
    observers: Vec<Arc<dyn CommitObserver>>,
}

impl Engine {
    pub fn new(store: Arc<dyn Store>, options: Options) -> Self {
        let Concurrency { reads, writes } = store.concurrency();
        let browsing = Scheduler::new(Bounds::of_browsing(reads, options.limits.max_waiting_reads));
        let store = match writes {
            Writes::Apart => store,
            Writes::AsReads => {
                let scheduler = Scheduler::new(Bounds::of_turns(reads));
                Arc::new(ScheduledStore { inner: store, scheduler, caller: read_scheduler::Caller::Turns })
            }
        };
        let watchers = Arc::new(Watchers::default());
        let shared = EngineState {
            observers: vec![watchers.clone()],
            watchers,
            store,
            browsing,
            cache: hot_sessions(options.cache_bytes),
            assistants: Assistants::default(),
            node: node_name(),
            usage: UsageCache::default(),
            options,
        };
        Self { shared: Arc::new(shared), expect: None, scheduled: None }
    }

    /// The store, behind the read scheduler if this handle is for browsing.
    pub fn store(&self) -> &Arc<dyn Store> {
        self.scheduled.as_ref().unwrap_or(&self.shared.store)
    }

    /// A handle whose reads are scheduled fairly between principals, apart from turns.
    pub fn browsing(&self, who: &Principal) -> Self {
        let (inner, scheduler) = (self.shared.store.clone(), self.shared.browsing.clone());
        let caller = read_scheduler::Caller::Browsing(who.clone());
        Self { scheduled: Some(Arc::new(ScheduledStore { inner, scheduler, caller })), ..self.clone() }
    }

    /// A handle whose operations are refused unless the log of the session ends at `seq`.
    pub fn expecting(&self, seq: Seq) -> Self {
        Self { expect: Some(seq), ..self.clone() }
    }

    /// Waits until a principal may do work as large as a read that is not part of a turn.
    pub async fn browse_permit(&self, who: &Principal) -> Result<read_scheduler::Permit> {
        self.shared.browsing.acquire(who).await
    }

    pub fn options(&self) -> &Options {
        &self.shared.options
    }

    pub fn limits(&self) -> &Limits {
        &self.shared.options.limits
    }

    pub fn clock(&self) -> &Clock {
        &self.shared.options.clock
    }

    pub fn now(&self) -> Timestamp {
        self.clock().now()
    }

    pub fn default_policy(&self) -> &Policy {
        &self.shared.options.policy
    }

    /// The name of this node, unique for each engine.
    pub fn node(&self) -> &str {
        &self.shared.node
    }

    pub fn assistants_known(&self) -> &Assistants {
        &self.shared.assistants
    }

    pub fn hot_sessions(&self) -> &HotSessions {
        &self.shared.cache
    }

    pub fn usage_cache(&self) -> &UsageCache {
        &self.shared.usage
    }

    pub fn watchers(&self) -> &Watchers {
        &self.shared.watchers
    }

    pub fn observers(&self) -> &[Arc<dyn CommitObserver>] {
        &self.shared.observers
    }

    pub fn downgrade(&self) -> Weak<EngineState> {
        Arc::downgrade(&self.shared)
    }
}
