//! The engine: a store, the session cache in front of it, and the shared state that both need to
//! read and write sessions.

use crate::clock::Clock;
use crate::engine::cache::{SessionCache, new_session_cache};
use crate::engine::live_count::LiveCount;
use crate::engine::node::node_name;
use crate::engine::observer::CommitObserver;
use crate::engine::options::Options;
use crate::engine::quota::UsageCache;
use crate::engine::read_scheduler::{Bounds, Permit, Scheduler};
use crate::engine::registry::Registry;
use crate::engine::scheduled_store::{ReadPurpose, ScheduledStore};
use crate::engine::watch::ChangeHub;
use crate::rules::message_words::word_rules_hash;
use crate::store::contract::{Concurrency, Store, WriteCost};
use crate::store::message_index::WordRules;
use crate::types::error::Result;
use crate::types::id::Principal;
use crate::types::policy::{Limits, Policy};
use jiff::Timestamp;
use std::sync::{Arc, Weak};

/// Reads and writes sessions in a store. Cheap to clone; clones share the store and the cache.
#[derive(Clone, Debug)]
pub(crate) struct Engine {
    shared: Arc<EngineState>,
    /// The store behind a read scheduler, for reads that are not part of a turn. `None` means that
    /// this handle calls the store directly.
    scheduled: Option<Arc<dyn Store>>,
}

/// The state that all clones of an [`Engine`] share.
#[derive(Debug)]
pub(crate) struct EngineState {
    store: Arc<dyn Store>,
    /// Schedules the reads that are not part of a turn (D-106).
    browsing: Arc<Scheduler>,
    options: Options,
    assistants: Registry,
    cache: SessionCache,
    node: String,
    /// The tasks that wait for sessions to change.
    pub watchers: Arc<ChangeHub>,
    usage: UsageCache,
    live_count: LiveCount,
    observers: Vec<Arc<dyn CommitObserver>>,
    word_rules: WordRules,
}

impl Engine {
    /// Creates an engine on an open store. Where reads and writes share the store's connections,
    /// the calls of turns are scheduled too, so that one tenant cannot take all of them.
    pub fn new(store: Arc<dyn Store>, options: Options) -> Self {
        let Concurrency { reads, writes } = store.concurrency();
        let browsing = Scheduler::new(Bounds::of_browsing(reads, options.limits.max_waiting_reads));
        let store = match writes {
            WriteCost::DedicatedWriter => store,
            WriteCost::SharedWithReads => {
                let scheduler = Scheduler::new(Bounds::of_turns(reads));
                Arc::new(ScheduledStore { inner: store, scheduler, caller: ReadPurpose::Turns })
            }
        };
        let watchers = Arc::new(ChangeHub::default());
        let shared = EngineState {
            observers: vec![watchers.clone()],
            watchers,
            store,
            browsing,
            cache: new_session_cache(options.cache_bytes),
            assistants: Registry::default(),
            node: node_name(),
            usage: UsageCache::default(),
            live_count: LiveCount::default(),
            word_rules: WordRules(word_rules_hash(&options.redaction)),
            options,
        };
        Self { shared: Arc::new(shared), scheduled: None }
    }

    /// The store, behind the read scheduler if this handle is for browsing.
    pub fn store(&self) -> &Arc<dyn Store> {
        self.scheduled.as_ref().unwrap_or(&self.shared.store)
    }

    /// A handle whose reads are scheduled fairly between principals and separately from turns.
    pub fn browsing(&self, principal: &Principal) -> Self {
        let inner = self.shared.store.clone();
        let scheduler = self.shared.browsing.clone();
        let caller = ReadPurpose::Browsing(principal.clone());
        Self { scheduled: Some(Arc::new(ScheduledStore { inner, scheduler, caller })), ..self.clone() }
    }

    /// Waits until the principal may do work as large as a read that is not part of a turn. The
    /// permit is released when dropped.
    pub async fn browse_permit(&self, principal: &Principal) -> Result<Permit> {
        self.shared.browsing.acquire(principal).await
    }

    /// The options that the store was opened with.
    pub fn options(&self) -> &Options {
        &self.shared.options
    }

    /// The configured limits.
    pub fn limits(&self) -> &Limits {
        &self.shared.options.limits
    }

    /// The configured clock.
    pub fn clock(&self) -> &Clock {
        &self.shared.options.clock
    }

    /// The current time of the configured clock.
    pub fn now(&self) -> Timestamp {
        self.clock().now()
    }

    /// The rules by which the words of messages are computed.
    pub fn word_rules(&self) -> WordRules {
        self.shared.word_rules
    }

    /// The policy of sessions that belong to no assistant with a policy of its own.
    pub fn default_policy(&self) -> &Policy {
        &self.shared.options.policy
    }

    /// The name of this node, unique for each engine.
    pub fn node(&self) -> &str {
        &self.shared.node
    }

    /// The cached assistants.
    pub fn assistant_registry(&self) -> &Registry {
        &self.shared.assistants
    }

    /// The session cache.
    pub fn session_cache(&self) -> &SessionCache {
        &self.shared.cache
    }

    /// The cached usage of users and tenants that have quotas.
    pub fn usage_cache(&self) -> &UsageCache {
        &self.shared.usage
    }

    /// The cached number of live sessions.
    pub fn live_count(&self) -> &LiveCount {
        &self.shared.live_count
    }

    /// The tasks that wait for sessions to change.
    pub fn watchers(&self) -> &ChangeHub {
        &self.shared.watchers
    }

    /// The observers that are called after each commit.
    pub fn observers(&self) -> &[Arc<dyn CommitObserver>] {
        &self.shared.observers
    }

    /// A weak reference to the shared state, for background tasks that must not keep it alive.
    pub fn downgrade(&self) -> Weak<EngineState> {
        Arc::downgrade(&self.shared)
    }
}
