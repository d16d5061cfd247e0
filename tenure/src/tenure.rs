//! The front door: open a house, and the everyday verbs of its sessions. Each loads, asks a rule, and commits.

use crate::clock::Clock;
use crate::engine::cache::{Draft, HotSessions, Need, State, hot_sessions};
use crate::engine::quota::UsageCache;
use crate::engine::read_scheduler::{self, Bounds, ScheduledStore, Scheduler};
use crate::engine::registry::Assistants;
use crate::engine::turn_lock::Gates;
use crate::error::{Error, Result};
use crate::memory::embedder::Embedder;
use crate::memory::vector_index::Memories;
use crate::rules::redaction::Redaction;
use crate::rules::session::{Said, Session};
use crate::run::resume::Watchers;
use crate::session::archive::ArchiveHook;
use crate::session::checkpoint::Watch;
use crate::session::sweep::Hook;
use crate::store;
use crate::store::contract::{Commit, Concurrency, Repair, Store, Writes};
use crate::store::query::Range;
use crate::types::blob::Blob;
use crate::types::entry::{Change, Created, Entry, InfoChange, Post, Record};
use crate::types::head::{DECISIONS, Head};
use crate::types::id::{Key, Principal, Reach, Seq, SessionId, check_text};
use crate::types::message::Message;
use crate::types::policy::{Limits, Policy};
use crate::types::status::Status;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, RwLock, Weak};

/// What can be chosen when a house is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// How sessions are kept that belong to no assistant with a policy of its own.
    pub policy: Policy,
    /// At most so many live sessions (0: no cap); the sweep sends the longest idle ones away.
    pub max_sessions: usize,
    /// The limits.
    pub limits: Limits,
    /// Memory for hot sessions, in bytes.
    pub cache_bytes: usize,
    /// Memory for the vectors of memories, in bytes.
    pub vector_bytes: usize,
    /// The time.
    pub clock: Clock,
    /// What makes vectors of memories, so that they are found by meaning too; nothing: by their words only.
    pub embedder: Option<Embedder>,
    /// What must not leave the log: nothing, unless there are rules.
    pub redaction: Redaction,
}

impl Default for Options {
    fn default() -> Self {
        let (policy, limits, clock, redaction, embedder) = Default::default();
        let (cache_bytes, vector_bytes) = (256 << 20, 64 << 20);
        Self { policy, max_sessions: 0, limits, cache_bytes, vector_bytes, clock, embedder, redaction }
    }
}

/// A house of sessions. Cheap to clone; all clones are the same house.
#[derive(Clone, Debug)]
pub struct Tenure {
    house: Arc<House>,
    /// See [`Tenure::expecting`].
    expect: Option<Seq>,
    /// See [`Tenure::browsing`].
    scheduled: Option<Arc<dyn Store>>,
}

#[derive(Debug)]
pub(crate) struct House {
    store: Arc<dyn Store>,
    /// Schedules the reads that are not part of a turn.
    browsing: Arc<Scheduler>,
    options: Options,
    assistants: Assistants,
    hot: HotSessions,
    hooks: RwLock<Vec<Hook>>,
    watches: RwLock<Vec<Watch>>,
    archive_hooks: RwLock<Vec<ArchiveHook>>,
    /// So many of the longest idle could not be sent away by the last pass of the sweep.
    stuck: AtomicUsize,
    gates: Gates,
    key_gates: Gates,
    compact_gates: Gates,
    repairs: Vec<Repair>,
    node: String,
    pub watchers: Watchers,
    memories: Memories,
    usage: UsageCache,
}

/// A session to be.
#[derive(Clone, Debug, Default)]
pub struct New {
    /// Its id; generated if there is none.
    pub id: Option<SessionId>,
    /// The assistant it belongs to.
    pub assistant: Option<String>,
    /// The chat thread that shows it.
    pub thread: Option<String>,
    /// The model it talks to.
    pub model: Option<String>,
    /// A title.
    pub title: Option<String>,
    /// Words to find it by.
    pub tags: Vec<String>,
    /// Anything else.
    pub metadata: Map<String, Value>,
}

impl Tenure {
    /// Opens a house by its store's URL: `memory:`, `jsonl:DIR`, `sqlite:FILE` or `postgres://…`.
    pub async fn open(url: &str) -> Result<Self> {
        Self::open_with(url, Options::default()).await
    }

    /// Opens a house with options.
    pub async fn open_with(url: &str, options: Options) -> Result<Self> {
        let (store, repairs) = store::open(url).await?;
        for repair in &repairs {
            tracing::warn!(place = repair.place, what = repair.what, "mended while opening the store");
        }
        Ok(Self::build(store, options, repairs))
    }

    /// A house on a store that is open already.
    pub fn on(store: Arc<dyn Store>, options: Options) -> Self {
        Self::build(store, options, Vec::new())
    }

    fn build(store: Arc<dyn Store>, options: Options, repairs: Vec<Repair>) -> Self {
        let (hot, memories) = (hot_sessions(options.cache_bytes), Memories::new(options.vector_bytes));
        let archive_hooks = RwLock::default();
        let Concurrency { reads, writes } = store.concurrency();
        let browsing = Scheduler::new(Bounds::of_browsing(reads, options.limits.max_waiting_reads));
        let store = match writes {
            Writes::Apart => store,
            Writes::AsReads => {
                let (scheduler, caller) = (Scheduler::new(Bounds::of_turns(reads)), read_scheduler::Caller::Turns);
                Arc::new(ScheduledStore { inner: store, scheduler, caller })
            }
        };
        let (assistants, hooks, watches, stuck, gates, key_gates, compact_gates) = Default::default();
        Self {
            house: Arc::new(House {
                store,
                browsing,
                options,
                assistants,
                hot,
                hooks,
                watches,
                archive_hooks,
                stuck,
                gates,
                key_gates,
                compact_gates,
                repairs,
                node: crate::run::lease::node_name(),
                watchers: Watchers::default(),
                memories,
                usage: UsageCache::default(),
            }),
            expect: None,
            scheduled: None,
        }
    }

    /// The store, for what has no verb.
    pub fn store(&self) -> &Arc<dyn Store> {
        self.scheduled.as_ref().unwrap_or(&self.house.store)
    }

    /// The same house for lists, searches and other reads that are not part of a turn. What is read through this handle is scheduled:
    /// each principal has a bounded number of reads under way, those that wait are served round robin, and a part of the store's
    /// capacity is left to turns. A read is refused (`max_waiting_reads`) if too many of the same principal wait.
    pub fn browsing(&self, who: &Principal) -> Self {
        let (inner, scheduler) = (self.house.store.clone(), self.house.browsing.clone());
        let caller = read_scheduler::Caller::Browsing(who.clone());
        Self { scheduled: Some(Arc::new(ScheduledStore { inner, scheduler, caller })), ..self.clone() }
    }

    /// Waits until a principal may do work as large as a read that is not part of a turn.
    pub(crate) async fn browse_permit(&self, who: &Principal) -> Result<read_scheduler::Permit> {
        self.house.browsing.acquire(who).await
    }

    /// What was mended when the store was opened, such as a torn tail that was cut.
    pub fn repairs(&self) -> &[Repair] {
        &self.house.repairs
    }

    /// The limits in force.
    pub fn limits(&self) -> &Limits {
        &self.house.options.limits
    }

    /// The time by this house's clock.
    pub fn now(&self) -> Timestamp {
        self.house.options.clock.now()
    }

    /// What this node is called: each house that is opened has a name of its own.
    pub fn node(&self) -> &str {
        &self.house.node
    }

    pub(crate) fn options(&self) -> &Options {
        &self.house.options
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.house.options.clock
    }

    pub(crate) fn usage_cache(&self) -> &UsageCache {
        &self.house.usage
    }

    pub(crate) fn max_sessions(&self) -> usize {
        self.house.options.max_sessions
    }

    pub(crate) fn hot_sessions(&self) -> &HotSessions {
        &self.house.hot
    }

    pub(crate) fn hooks(&self) -> &RwLock<Vec<Hook>> {
        &self.house.hooks
    }

    pub(crate) fn watches(&self) -> &RwLock<Vec<Watch>> {
        &self.house.watches
    }

    pub(crate) fn archive_hooks(&self) -> &RwLock<Vec<ArchiveHook>> {
        &self.house.archive_hooks
    }

    pub(crate) fn stuck(&self) -> &AtomicUsize {
        &self.house.stuck
    }

    pub(crate) fn assistants_known(&self) -> &Assistants {
        &self.house.assistants
    }

    pub(crate) fn house_policy(&self) -> &Policy {
        &self.house.options.policy
    }

    pub(crate) fn gates(&self) -> &Gates {
        &self.house.gates
    }

    pub(crate) fn watchers(&self) -> &Watchers {
        &self.house.watchers
    }

    pub(crate) fn memories(&self) -> &Memories {
        &self.house.memories
    }

    pub(crate) fn embedder(&self) -> Option<&Embedder> {
        self.house.options.embedder.as_ref()
    }

    pub(crate) fn downgrade(&self) -> Weak<House> {
        Arc::downgrade(&self.house)
    }

    pub(crate) fn key_gates(&self) -> &Gates {
        &self.house.key_gates
    }

    pub(crate) fn compact_gates(&self) -> &Gates {
        &self.house.compact_gates
    }

    /// The same house, but a verb that is called on this handle is refused with [`Error::Conflict`] unless the log of its session
    /// ends at `seq`.
    pub fn expecting(&self, seq: Seq) -> Self {
        Self { expect: Some(seq), ..self.clone() }
    }

    /// A session that does not exist ends nowhere.
    pub(crate) fn check_expected_none(&self, id: &SessionId) -> Result<()> {
        match self.expect {
            Some(expected) => Err(Error::Conflict { session_id: id.clone(), expected }),
            None => Ok(()),
        }
    }

    pub(crate) fn check_expected(&self, head: &Head) -> Result<()> {
        match self.expect {
            Some(expected) if expected != head.seq => {
                Err(Error::Conflict { session_id: head.info.session_id.clone(), expected })
            }
            _ => Ok(()),
        }
    }

    /// When the sweep should look at a session.
    pub(crate) fn due_at(&self, head: &Head) -> Option<Timestamp> {
        let policy = self.policy(&head.tenant, head.assistant.as_deref());
        let (from, after) = match head.status {
            Status::Active => (head.active_at, policy.ttl?),
            // It waits for a person, if need be for as long as the rule says.
            Status::Paused => return head.reviews.iter().filter_map(|r| r.timeout).min(),
            Status::Expired | Status::Deleted => (head.status_at, policy.retention?),
        };
        from.checked_add(SignedDuration::try_from(after).ok()?).ok()
    }

    /// Whether a session stands where its card says: an active one may have expired since.
    pub(crate) fn status_of(&self, head: &Head) -> Status {
        let idle = self.now().duration_since(head.active_at);
        let ttl =
            self.policy(&head.tenant, head.assistant.as_deref()).ttl.and_then(|t| SignedDuration::try_from(t).ok());
        match head.status {
            Status::Active if ttl.is_some_and(|ttl| idle > ttl) => Status::Expired,
            status => status,
        }
    }

    pub(crate) fn check_live(&self, head: &Head) -> Result<()> {
        match self.status_of(head) {
            Status::Active | Status::Paused => Ok(()),
            gone => Err(Error::Gone { session_id: head.info.session_id.clone(), status: gone.as_str() }),
        }
    }

    pub(crate) fn check_active(&self, head: &Head) -> Result<()> {
        match self.check_live(head) {
            Ok(()) if head.status == Status::Paused => Err(Error::Paused { session_id: head.info.session_id.clone() }),
            other => other,
        }
    }

    /// Begins a session.
    pub async fn create(&self, who: &Principal, new: New) -> Result<Session> {
        let id = new.id.clone().unwrap_or_else(SessionId::generate);
        let New { assistant, thread, model, title, tags, metadata, .. } = new;
        let user = who.user.clone();
        let created = Created { user, assistant, thread, model, title, tags, metadata, ..Created::default() };
        self.check_info(&created)?;
        let record = Record { seq: 1, at: self.now(), entry: Entry::created(created) };
        self.reserve_session(who, [&record].into_iter()).await?;
        let head = self.begin(&who.key(&id), &record, Vec::new()).await?;
        Ok(Session::empty(head))
    }

    /// Writes the first records of a session.
    pub(crate) async fn begin(&self, key: &Key, first: &Record, more: Vec<Record>) -> Result<Head> {
        self.begin_with(key, first, more, Vec::new()).await
    }

    pub(crate) async fn begin_with(
        &self,
        key: &Key,
        first: &Record,
        more: Vec<Record>,
        blobs: Vec<Blob>,
    ) -> Result<Head> {
        self.know(&key.tenant).await?;
        let head = Head::begin(key, first);
        let mut head = head.ok_or_else(|| Error::invalid("session", "a log must begin with `created`"))?;
        more.iter().for_each(|r| head.apply(r));
        head.due_at = self.due_at(&head);
        let mut commit = Commit::new(None, [vec![first.clone()], more].concat(), head.clone());
        commit.blobs = blobs;
        self.commit_step(&commit).await?;
        self.forget(key);
        Ok(head)
    }

    pub(crate) fn check_info(&self, info: &Created) -> Result<()> {
        for (param, name) in [("assistant", &info.assistant), ("thread", &info.thread), ("model", &info.model)] {
            if let Some(why) = name.as_deref().and_then(|n| check_text(n).err()) {
                return Err(Error::invalid(param, format!("not a valid {param}: {why}")));
            }
        }
        check_derived(&info.metadata)?;
        self.check_info_size(serde_json::to_string(info).map_or(0, |t| t.len()))
    }

    /// The size of what clients can write. Decisions do not count: people's decisions must not keep a client from writing.
    pub(crate) fn check_info_of(&self, head: &Head) -> Result<()> {
        let mut info = head.info.clone();
        info.metadata.remove(DECISIONS);
        self.check_info_size(serde_json::to_string(&info).map_or(0, |t| t.len()))
    }

    fn check_info_size(&self, bytes: usize) -> Result<()> {
        let max = self.limits().max_info_bytes;
        match bytes > max {
            true => Err(Error::TooLarge {
                what: "title, tags and metadata".into(),
                limit: "max_info_bytes",
                max: max as u64,
            }),
            false => Ok(()),
        }
    }

    /// A session, whole. One that has expired or was deleted is [`Error::Gone`].
    pub async fn load(&self, who: &Principal, id: &SessionId) -> Result<Session> {
        let session = self.read(who, id, Need::Session, |state| self.whole(state)).await?;
        self.check_live(&session)?;
        self.attach(session).await
    }

    /// A session whatever its status.
    pub async fn load_any(&self, who: &Principal, id: &SessionId) -> Result<Session> {
        let session = self.read(who, id, Need::Session, |state| self.whole(state)).await?;
        self.attach(session).await
    }

    /// The messages of a session as one JSON list, each exactly as it was given: what a server sends on.
    pub async fn messages_json(&self, who: &Principal, id: &SessionId) -> Result<String> {
        let json = self.read(who, id, Need::Session, |state| {
            let session = self.whole_ref(state, id)?;
            self.check_live(session)?;
            let whole = session.messages.iter().all(|m| m.message.cuts().is_empty());
            Ok(whole.then(|| session.messages_json()))
        });
        match json.await? {
            Some(json) => Ok(json),
            // Media must be put back first.
            None => Ok(self.load(who, id).await?.messages_json()),
        }
    }

    fn whole(&self, state: &State) -> Result<Session> {
        match state {
            State::Whole(session) => Ok(Session::clone(session)),
            _ => Err(Error::unavailable("the session was not loaded")),
        }
    }

    /// Puts the media back into the messages.
    pub(crate) async fn attach(&self, mut session: Session) -> Result<Session> {
        let tenant = session.tenant.clone();
        for said in session.messages.iter_mut().filter(|m| !m.message.cuts().is_empty()) {
            said.message = self.attach_message(&tenant, &said.message).await?;
        }
        Ok(session)
    }

    pub(crate) async fn attach_message(&self, tenant: &crate::types::id::Tenant, message: &Message) -> Result<Message> {
        let mut blobs = HashMap::new();
        for cut in message.cuts() {
            if let Some(bytes) = self.store().blob(tenant, &cut.id).await? {
                blobs.insert(cut.id, bytes);
            }
        }
        message.attach(|id| blobs.get(id).cloned())
    }

    /// A session's index card, whatever its status.
    pub async fn head(&self, who: &Principal, id: &SessionId) -> Result<Head> {
        let head = self.store().head(&who.key(id)).await?;
        match head {
            Some(head) if who.reach == Reach::Tenant || head.user == who.user => Ok(head),
            _ => Err(Error::NotFound { session_id: id.clone() }),
        }
    }

    /// The last messages of a session, oldest first, with the card they belong to. Costs what it returns, however long the session
    /// is.
    pub async fn last_messages(&self, who: &Principal, id: &SessionId, limit: usize) -> Result<(Head, Vec<Said>)> {
        let head = self.live(who, id).await?;
        let (mut current, mut upto) = (head.clone(), head.seq);
        let mut tail: Vec<Said> = Vec::new();
        'log: while tail.len() < limit {
            let about = (limit - tail.len()).saturating_mul(2).saturating_add(8);
            let range = Range { after: current.first - 1, ..Range::back_from(upto, about) };
            let page = self.store().records(&current.key(), &range).await?;
            if page.is_empty() && upto >= current.first {
                // Purged while we read, or its records moved to another session: look again.
                return match self.head(who, id).await? {
                    moved if (moved.first, &moved.parent) != (head.first, &head.parent) => {
                        Box::pin(self.last_messages(who, id, limit)).await
                    }
                    _ => Err(Error::corrupt(format!("session {}, record {upto}", current.key()), "it is missing")),
                };
            }
            for record in page {
                upto = record.seq - 1;
                match &record.entry {
                    Entry::Rewound(r) => {
                        upto = r.to;
                        continue 'log;
                    }
                    Entry::Message(post) => {
                        let message = self.attach_message(&head.tenant, &post.message).await?;
                        tail.push(Said::new(record.seq, record.at, Post { message, ..post.clone() }));
                        if tail.len() == limit {
                            break 'log;
                        }
                    }
                    _ => {}
                }
            }
            if upto >= current.first {
                continue;
            }
            let Some(parent) = current.parent.clone() else { break };
            upto = upto.min(parent.seq);
            let key = Key { tenant: head.tenant.clone(), session: parent.session };
            let next = self.store().head(&key).await?;
            current = next.ok_or_else(|| {
                Error::corrupt(format!("session {}", head.key()), format!("its parent {key} is missing"))
            })?;
        }
        tail.reverse();
        Ok((head, tail))
    }

    /// Checks messages against the limits and takes their media out.
    pub(crate) fn detach(&self, messages: &[Message]) -> Result<(Vec<Message>, Vec<Blob>)> {
        let limits = self.limits();
        if messages.len() > limits.max_messages {
            let (what, max) = (format!("a list of {} messages", messages.len()), limits.max_messages as u64);
            return Err(Error::TooLarge { what, limit: "max_messages", max });
        }
        let (mut stored, mut blobs) = (Vec::with_capacity(messages.len()), Vec::new());
        for (i, message) in messages.iter().enumerate() {
            if message.as_str().len() > limits.max_message_bytes {
                let (what, max) = (format!("message {i}"), limits.max_message_bytes as u64);
                return Err(Error::TooLarge { what, limit: "max_message_bytes", max });
            }
            let (message, media) = message.detach();
            stored.push(message);
            blobs.extend(media);
        }
        Ok((stored, blobs))
    }

    pub(crate) fn whole_ref<'a>(&self, state: &'a State, id: &SessionId) -> Result<&'a Session> {
        match state {
            State::Whole(session) => Ok(session),
            _ => Err(Error::NotFound { session_id: id.clone() }),
        }
    }

    /// A session as far as a run needs it.
    pub(crate) fn run_ref<'a>(&self, state: &'a State, id: &SessionId) -> Result<&'a Session> {
        match state {
            State::Tail(session, _) => Ok(session),
            other => self.whole_ref(other, id),
        }
    }

    /// Changes title, tags, metadata or model.
    pub async fn update(&self, who: &Principal, id: &SessionId, change: InfoChange) -> Result<Head> {
        self.patch(who, id, change, None).await
    }

    /// The same, and makes it wait or go on ([`Status::Paused`], [`Status::Active`]), in one step.
    pub async fn patch(
        &self,
        who: &Principal,
        id: &SessionId,
        change: InfoChange,
        status: Option<Status>,
    ) -> Result<Head> {
        if status.is_some_and(|s| !s.is_live()) {
            return Err(Error::invalid("status", "it can be set to active or paused; delete a session to end it"));
        }
        check_derived(&change.metadata)?;
        self.write(who, id, Need::Head, |state, now| {
            let Some(head) = state.head() else { return Err(Error::NotFound { session_id: id.clone() }) };
            self.check_live(head)?;
            if let Change::Set(model) = &change.model
                && let Err(why) = check_text(model)
            {
                return Err(Error::invalid("model", format!("not a valid model: {why}")));
            }
            let mut entries = Vec::new();
            if change != InfoChange::default() {
                entries.push(Entry::info(change.clone()));
            }
            check_waiting(head, status)?;
            if let Some(to) = status.filter(|s| *s != head.status) {
                entries.push(Entry::Status { to, reason: None });
            }
            let mut after = head.clone();
            for (seq, entry) in (head.seq + 1..).zip(&entries) {
                after.apply(&Record { seq, at: now, entry: entry.clone() });
            }
            self.check_info_of(&after)?;
            Ok(Draft::new(entries, after))
        })
        .await
    }

    async fn set_status(&self, who: &Principal, id: &SessionId, to: Status, reason: Option<&str>) -> Result<Head> {
        self.write(who, id, Need::Head, |state, now| {
            let Some(head) = state.head() else { return Err(Error::NotFound { session_id: id.clone() }) };
            if to.is_live() {
                self.check_live(head)?;
            }
            check_waiting(head, Some(to))?;
            if head.status == to {
                return Ok(Draft::new(Vec::new(), head.clone()));
            }
            let entry = Entry::Status { to, reason: reason.map(str::to_owned) };
            let mut after = head.clone();
            after.apply(&Record { seq: head.seq + 1, at: now, entry: entry.clone() });
            Ok(Draft::new(vec![entry], after))
        })
        .await
    }

    /// Makes a session wait: it takes no messages until it is activated.
    pub async fn pause(&self, who: &Principal, id: &SessionId, reason: Option<&str>) -> Result<Head> {
        self.set_status(who, id, Status::Paused, reason).await
    }

    /// Lets a paused session go on.
    pub async fn activate(&self, who: &Principal, id: &SessionId) -> Result<Head> {
        self.set_status(who, id, Status::Active, None).await
    }

    /// Deletes a session so that it can be restored until its retention ends. Whether there was one.
    pub async fn delete(&self, who: &Principal, id: &SessionId) -> Result<bool> {
        match self.set_status(who, id, Status::Deleted, None).await {
            Ok(_) => Ok(true),
            Err(Error::NotFound { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Brings an expired or deleted session back.
    pub async fn restore(&self, who: &Principal, id: &SessionId) -> Result<Head> {
        self.write(who, id, Need::Head, |state, now| {
            let Some(head) = state.head() else { return Err(Error::NotFound { session_id: id.clone() }) };
            if self.status_of(head).is_live() {
                return Ok(Draft::new(Vec::new(), head.clone()));
            }
            // Expired by its age, but not yet swept: it is marked first, so that the log tells the whole story.
            let mark = head.status.is_live().then_some(Entry::Status { to: Status::Expired, reason: None });
            // What waited for a person still does.
            let to = if head.reviews.is_empty() { Status::Active } else { Status::Paused };
            let entries: Vec<Entry> =
                mark.into_iter().chain([Entry::Status { to, reason: Some("restored".into()) }]).collect();
            let mut after = head.clone();
            for (seq, entry) in (head.seq + 1..).zip(&entries) {
                after.apply(&Record { seq, at: now, entry: entry.clone() });
            }
            Ok(Draft::new(entries, after))
        })
        .await
    }

    /// Destroys a session for good. Forks of it keep what they need. Whether there was one.
    pub async fn purge(&self, who: &Principal, id: &SessionId) -> Result<bool> {
        match self.head(who, id).await {
            Ok(head) => {
                self.check_expected(&head)?;
                self.retract(&head.key(), None).await?;
                self.purge_key(&head.key()).await?;
                Ok(true)
            }
            Err(Error::NotFound { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    pub(crate) async fn purge_key(&self, key: &Key) -> Result<()> {
        self.store().purge(key).await?;
        self.forget(key);
        Ok(())
    }
}

/// Refuses metadata that names the audit trail, also to remove it.
fn check_derived(metadata: &Map<String, Value>) -> Result<()> {
    if metadata.contains_key(DECISIONS) {
        let why = "it is derived from the decisions in the session's log and cannot be written; leave it out";
        return Err(Error::invalid(format!("metadata.{DECISIONS}"), why));
    }
    Ok(())
}

/// A session that waits for a person goes on when they have decided, or when its run is stopped.
fn check_waiting(head: &Head, to: Option<Status>) -> Result<()> {
    match to {
        Some(Status::Active) if !head.reviews.is_empty() => {
            Err(Error::invalid("status", "a person has to decide first; decide its open reviews, or cancel its run"))
        }
        _ => Ok(()),
    }
}
