//! Hot sessions: a bounded cache of index cards and folded sessions, and the one way in which a session is read and written.
//!
//! A write commits against the log's end as the cache knows it and reads nothing. If somebody else was first, the store says
//! so, the cache catches up with the records after its own, and the step is taken again. A read asks the store for the card
//! first, so that it always sees what was acknowledged before it, by whichever process. Those who wait for one session share the
//! answer, if it was asked for after they came.

#[cfg(test)]
mod tests;

use crate::engine::quota::{self, Usage};
use crate::error::{Error, Result};
use crate::rules::session::Session;
use crate::store::contract::{Commit, Glance};
use crate::store::item::Item;
use crate::tenure::Tenure;
use crate::types::blob::Blob;
use crate::types::entry::{Entry, Record};
use crate::types::head::Head;
use crate::types::id::{Key, Principal, Reach, SessionId};
use crate::types::message::Message;
use crate::types::policy::Window;
use jiff::Timestamp;
use quick_cache::{OptionsBuilder, Weighter, sync::Cache};
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use tokio::sync::{Mutex, MutexGuard};

/// What is known of a session without asking the store. It may be behind, never wrong.
#[derive(Debug, Default)]
pub(crate) enum State {
    #[default]
    Cold,
    Head(Box<Head>),
    /// Its newest part, enough for a run that shows a model this window ([`crate::rules::partial`]).
    Tail(Arc<Warm>, Window),
    /// Shared with those who look at it: whoever writes while somebody looks gets a copy.
    Whole(Arc<Warm>),
}

/// A session, and the text that was made of it, which is good for as long as nothing changes.
#[derive(Debug)]
pub(crate) struct Warm {
    session: Session,
    text: OnceLock<Arc<str>>,
    /// Its card as JSON.
    card: OnceLock<String>,
}

impl Warm {
    fn new(session: Session) -> Arc<Self> {
        Arc::new(Self { session, text: OnceLock::new(), card: OnceLock::new() })
    }

    /// The one way to change it.
    fn change(&mut self) -> &mut Session {
        (self.text, self.card) = Default::default();
        &mut self.session
    }

    /// The text that was made of it.
    pub fn text(&self) -> Option<Arc<str>> {
        self.text.get().cloned()
    }

    /// Keeps a text that was made of it, unless there is one.
    pub fn keep(&self, text: String) -> Arc<str> {
        self.text.get_or_init(|| text.into()).clone()
    }

    pub fn weight(&self) -> usize {
        self.session.weight() + self.text.get().map_or(0, |t| t.len()) + self.card.get().map_or(0, String::len)
    }
}

impl Deref for Warm {
    type Target = Session;
    fn deref(&self) -> &Session {
        &self.session
    }
}

impl Clone for Warm {
    fn clone(&self) -> Self {
        Self { session: self.session.clone(), text: OnceLock::new(), card: OnceLock::new() }
    }
}

impl State {
    pub fn head(&self) -> Option<&Head> {
        match self {
            State::Cold => None,
            State::Head(head) => Some(head),
            State::Tail(session, _) | State::Whole(session) => Some(session.head()),
        }
    }

    /// The card as JSON, if that is at hand.
    fn card(&self) -> Option<&str> {
        match self {
            State::Cold => None,
            State::Head(_) => Some(""),
            State::Tail(session, _) | State::Whole(session) => {
                Some(session.card.get_or_init(|| session.head().to_json()))
            }
        }
    }

    fn weight(&self) -> usize {
        match self {
            State::Tail(session, _) | State::Whole(session) => session.weight(),
            _ => CARD_BYTES,
        }
    }

    /// What is folded of it, if anything is, to be changed.
    fn folded(&mut self) -> Option<&mut Session> {
        match self {
            State::Tail(session, _) | State::Whole(session) => Some(Arc::make_mut(session).change()),
            _ => None,
        }
    }
}

/// What is known of a session, and since when.
#[derive(Debug, Default)]
struct Known {
    state: State,
    /// Whatever was acknowledged before this moment is in it.
    as_of: u64,
    /// The last step has cut messages off.
    cut: bool,
}

/// A moment of this process, later than all that were given before. No clock: those stand still, and jump.
fn moment() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::SeqCst) + 1
}

/// One session in the cache. Its lock makes the writers of this process wait for each other, so that they need not conflict.
#[derive(Debug, Default)]
pub(crate) struct Hot {
    known: Mutex<Known>,
    weight: AtomicUsize,
}

/// A session's place in the cache, with the weight that the cache knows it by: that must not change in place.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    hot: Arc<Hot>,
    weight: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct ByBytes;

impl Weighter<Key, Slot> for ByBytes {
    fn weight(&self, _: &Key, slot: &Slot) -> u64 {
        slot.weight as u64
    }
}

/// So many times a session is read again that another node purges and creates again meanwhile.
const MAX_MOVES: usize = 3;

pub(crate) type HotSessions = Cache<Key, Slot, ByBytes>;

/// The weight of a session of which only the card is known: the card, and its place in the cache.
const CARD_BYTES: usize = size_of::<Head>() + size_of::<Hot>() + 1024;

pub(crate) fn hot_sessions(bytes: usize) -> HotSessions {
    // One shard: a session may be as large as the whole budget, and the lock is held for nanoseconds.
    let options = OptionsBuilder::new().shards(1).estimated_items_capacity(4096).weight_capacity(bytes as u64).build();
    let options = options.expect("all options are given");
    Cache::with_options(options, ByBytes, Default::default(), Default::default())
}

/// How much of a session a step must see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// The index card.
    Head,
    /// What a run needs: what its model is shown, and the run that is on ([`crate::rules::partial`]).
    Run,
    /// All of it.
    Session,
}

/// What a step wants to write, and what it answers when that is done.
#[derive(Debug)]
pub(crate) struct Draft<R> {
    pub entries: Vec<Entry>,
    pub items: Vec<(String, Item)>,
    pub blobs: Vec<Blob>,
    pub cut: Vec<Message>,
    /// The end of the lease from now on, which is not in the log.
    pub lease: Option<Timestamp>,
    pub reply: R,
}

impl<R> Draft<R> {
    pub fn new(entries: Vec<Entry>, reply: R) -> Self {
        Self { entries, items: Vec::new(), blobs: Vec::new(), cut: Vec::new(), lease: None, reply }
    }

    fn is_idle(&self) -> bool {
        self.entries.is_empty() && self.items.is_empty() && self.lease.is_none()
    }
}

impl Tenure {
    fn hot(&self, key: &Key) -> Arc<Hot> {
        let fresh = || Ok::<_, std::convert::Infallible>(Slot { hot: Arc::default(), weight: CARD_BYTES });
        match self.hot_sessions().get_or_insert_with(key, fresh) {
            Ok(slot) => slot.hot,
            Err(never) => match never {},
        }
    }

    /// Tells the cache that a text was made of a session.
    pub(crate) fn weigh(&self, key: &Key, session: &Warm) {
        self.reweigh(key, &self.hot(key), session.weight());
    }

    /// Forgets what is known of a session.
    pub(crate) fn forget(&self, key: &Key) {
        self.hot_sessions().remove(key);
    }

    /// Reads a session as it is in the store now.
    pub(crate) async fn read<R>(
        &self,
        who: &Principal,
        id: &SessionId,
        need: Need,
        f: impl FnOnce(&State) -> Result<R>,
    ) -> Result<R> {
        let (key, came) = (who.key(id), moment());
        let hot = self.hot(&key);
        // Side by side: both may have to ask the store.
        let (told, known) = tokio::join!(self.know(&key.tenant), self.fresh(&key, &hot, need, came));
        told?;
        let mut known = known?;
        admit(who, id, &known.state)?;
        self.warm_current(&key, &mut known, need).await?;
        admit(who, id, &known.state)?;
        let answer = f(&known.state);
        self.reweigh(&key, &hot, known.state.weight());
        answer
    }

    /// Reads a session as this process knows it: with all that it has written, and perhaps without what others wrote since. For whoever
    /// holds its lease, and would find that out with the next commit.
    pub(crate) async fn read_known<R>(
        &self,
        who: &Principal,
        id: &SessionId,
        need: Need,
        f: impl FnOnce(&State) -> Result<R>,
    ) -> Result<R> {
        let hot = self.hot(&who.key(id));
        let known = hot.known.lock().await;
        if self.suffices(&known.state, need) {
            self.count_found(&known.state, need);
            admit(who, id, &known.state)?;
            return f(&known.state);
        }
        drop(known);
        self.read(who, id, need, f).await
    }

    /// What is known of a session, with everything that was acknowledged before the caller came.
    async fn fresh<'a>(&self, key: &Key, hot: &'a Hot, need: Need, came: u64) -> Result<MutexGuard<'a, Known>> {
        let mut known = hot.known.lock().await;
        self.count_found(&known.state, need);
        if known.as_of <= came || known.state.head().is_none() {
            self.catch_up(key, &mut known).await?;
        }
        Ok(known)
    }

    /// Takes one step in a session: look at it, decide what to write, commit. If somebody else was first, looks again.
    pub(crate) async fn write<R>(
        &self,
        who: &Principal,
        id: &SessionId,
        need: Need,
        mut step: impl FnMut(&State, Timestamp) -> Result<Draft<R>>,
    ) -> Result<R> {
        let key = who.key(id);
        self.know(&key.tenant).await?;
        let hot = self.hot(&key);
        let mut known = hot.known.lock().await;
        self.count_found(&known.state, need);
        let (mut fresh, mut reserved) = (false, false);
        // One round more, for looking again.
        for _ in 0..=self.limits().max_retries + 1 {
            // A session is only ever folded from a fresh card: an old one may name a parent that is another session by now. And while
            // another node works on it, the end of its lease is not in the log: what we know of it may be old without a conflict.
            let head = known.state.head();
            let elsewhere = head.and_then(|h| h.lease.as_ref()).is_some_and(|l| l.node != self.node());
            if !self.suffices(&known.state, need) || (elsewhere && !fresh) {
                self.catch_up(&key, &mut known).await?;
                fresh = true;
            }
            self.warm_current(&key, &mut known, need).await?;
            let (now, state) = (self.now(), &known.state);
            let admitted = admit(who, id, state).and_then(|()| state.head().map_or(Ok(()), |h| self.check_expected(h)));
            let draft = admitted.and_then(|()| step(state, now));
            // What we know may be behind: look before saying no, or that there is nothing to do.
            let idle = draft.as_ref().map_or(true, Draft::is_idle);
            if idle && !fresh {
                self.catch_up(&key, &mut known).await?;
                fresh = true;
                continue;
            }
            let draft = draft?;
            // What a run in progress says is stored in any case: to refuse it would lose what was paid for.
            if who.quota.is_some() && !reserved {
                let more = Usage { sessions: 0, bytes: quota::stored_bytes(draft.entries.iter()) };
                match known.state.head().is_some_and(|head| head.run.is_some()) {
                    true => self.count(who, more).await,
                    false => self.reserve(who, more).await?,
                }
                reserved = true;
            }
            let set = known.state.head().and_then(|h| self.watched(h.seq, draft.entries.iter()));
            match self.commit(&mut known, draft, now).await {
                Err(Error::Conflict { .. }) => {
                    self.catch_up(&key, &mut known).await?;
                    fresh = true;
                }
                answer => {
                    if answer.is_err() {
                        known.state = State::Cold;
                    }
                    self.reweigh(&key, &hot, known.state.weight());
                    let cut = std::mem::take(&mut known.cut);
                    let head = set.as_ref().and_then(|_| known.state.head().cloned());
                    drop(known);
                    if cut {
                        self.let_go(who, id).await;
                    }
                    if let (Some(set), Some(head)) = (set, head) {
                        self.checkpointed(&head, set).await;
                    }
                    return answer;
                }
            }
        }
        Err(Error::Conflict { session_id: id.clone(), expected: known.state.head().map_or(0, |h| h.seq) })
    }

    /// Messages were cut off: what was remembered of them goes too. That is done already; if this fails, the next cut makes up for it.
    async fn let_go(&self, who: &Principal, id: &SessionId) {
        if let Err(e) = self.retract_rewound(who, id).await {
            tracing::warn!(session_id = %id, error = %e, "what was remembered of messages that were cut off is still there");
        }
    }

    /// Takes one step in the store, and counts it.
    pub(crate) async fn commit_step(&self, commit: &Commit) -> Result<()> {
        let done = self.store().commit(commit).await;
        let outcome = match &done {
            Ok(()) => "committed",
            Err(Error::Conflict { .. } | Error::Exists { .. }) => "conflict",
            Err(_) => "failed",
        };
        metrics::counter!("tenure_commits_total", "outcome" => outcome).increment(1);
        if done.is_ok() && !commit.records.is_empty() {
            let key = commit.head.key();
            self.watchers().tell(&key);
            // Nobody elsewhere waits for a session without a run.
            let over = || commit.records.iter().any(|r| matches!(r.entry, Entry::RunEnded { .. }));
            if commit.head.run.is_some() || over() {
                self.store().tell(&key);
            }
        }
        done
    }

    async fn commit<R>(&self, known: &mut Known, draft: Draft<R>, now: Timestamp) -> Result<R> {
        let began = moment();
        let Some(before) = known.state.head() else { return Err(Error::unavailable("the session was not loaded")) };
        if draft.is_idle() {
            return Ok(draft.reply);
        }
        let numbered = (before.seq + 1..).zip(draft.entries);
        let records: Vec<Record> = numbered.map(|(seq, entry)| Record { seq, at: now, entry }).collect();
        let mut head = before.clone();
        records.iter().for_each(|r| head.apply(r));
        if head.status != before.status || head.due_at.is_none() {
            head.due_at = self.due_at(&head);
        }
        if let (Some(lease), Some(until)) = (&mut head.lease, draft.lease) {
            lease.until = until;
        }
        let base = Some(before.end());
        let commit = Commit { base, records, head, items: draft.items, blobs: draft.blobs, cut: draft.cut };
        self.commit_step(&commit).await?;
        known.cut = commit.records.iter().any(|r| matches!(r.entry, Entry::Rewound(_)));
        // What a fork leans on is the store's to say, and may have changed.
        if commit.head.parent.is_none() {
            known.as_of = began;
        }
        match known.state.folded() {
            Some(session) => {
                commit.records.iter().for_each(|r| drop(session.take(r)));
                session.set_head(commit.head);
            }
            None => known.state = State::Head(Box::new(commit.head)),
        }
        Ok(draft.reply)
    }

    /// Brings what is known up to the store's truth: the card, and the records that came since.
    async fn catch_up(&self, key: &Key, known: &mut Known) -> Result<()> {
        let began = moment();
        // What is in use is at hand in the store too: no other thread need wake up for it.
        let head = match known.state.card().and_then(|card| self.store().glance(key, card)).transpose()? {
            Some(Glance::Same) => {
                known.as_of = began;
                return Ok(());
            }
            Some(Glance::Now(head)) => head.map(|head| *head),
            None => self.store().head(key).await?,
        };
        let Some(head) = head else {
            known.state = State::Cold;
            self.forget(key);
            return Err(Error::NotFound { session_id: key.session.clone() });
        };
        known.state = self.follow_up(std::mem::take(&mut known.state), head).await?;
        known.as_of = began;
        Ok(())
    }

    /// Loads what a step must see. If another node has purged the session and created it again while it was read, reads again.
    async fn warm_current(&self, key: &Key, known: &mut Known, need: Need) -> Result<()> {
        for _ in 0..MAX_MOVES {
            match self.warm(key, &mut known.state, need).await {
                Err(Error::Conflict { .. }) => {
                    known.state = State::Cold;
                    self.catch_up(key, known).await?;
                }
                other => return other,
            }
        }
        self.warm(key, &mut known.state, need).await
    }

    /// What was known, with the records that came since; the new card alone, if what was known is another session, or can not be gone on from.
    /// The hash over the log tells whether what was known is in the store at all: a database that lost its last commits may have
    /// grown to the same length, or beyond it, with other records.
    async fn follow_up(&self, mut state: State, head: Head) -> Result<State> {
        let (State::Tail(known, _) | State::Whole(known)) = &state else { return Ok(State::Head(Box::new(head))) };
        // Not behind by more than records of its own.
        let same = known.info.created_at == head.info.created_at
            && known.origin == head.origin
            && known.seq <= head.seq
            && known.seq >= head.first;
        if !same {
            return Ok(State::Head(Box::new(head)));
        }
        if *known.head() == head {
            return Ok(state);
        }
        let pages = match known.seq < head.seq {
            true => match self.own_records(&head, known.seq, head.seq).await {
                // It is another session by now.
                Err(Error::Conflict { .. }) => return Ok(State::Head(Box::new(head))),
                pages => pages?,
            },
            false => Vec::new(),
        };
        let hash = known.log.map(|log| pages.iter().flatten().fold(log, |log, record| log.then(record)));
        if hash != head.log {
            tracing::warn!(session_id = %head.info.session_id, known = known.seq, stored = head.seq,
                "the store has another log than this node remembers; it was loaded again");
            return Ok(State::Head(Box::new(head)));
        }
        // What these are about may not be in a tail.
        let reaches_back = |r: &Record| matches!(r.entry, Entry::Rewound(_) | Entry::Compacted { .. });
        if matches!(state, State::Tail(..)) && pages.iter().flatten().any(reaches_back) {
            return Ok(State::Head(Box::new(head)));
        }
        if let Some(session) = state.folded() {
            pages.into_iter().flatten().for_each(|record| session.take_in(record));
            session.set_head(head);
        }
        Ok(state)
    }

    /// Whether this much is known.
    fn suffices(&self, state: &State, need: Need) -> bool {
        match (need, state) {
            (_, State::Cold) => false,
            (Need::Head, _) | (_, State::Whole(_)) => true,
            (Need::Run, State::Tail(session, window)) => *window == self.window(session.head()),
            _ => false,
        }
    }

    fn window(&self, head: &Head) -> Window {
        self.policy(&head.tenant, head.assistant.as_deref()).window
    }

    async fn warm(&self, key: &Key, state: &mut State, need: Need) -> Result<()> {
        if self.suffices(state, need) {
            return Ok(());
        }
        let head = state.head().cloned().ok_or_else(|| Error::NotFound { session_id: key.session.clone() })?;
        let window = self.window(&head);
        // If that can not be read, the whole can not be either, and tells why.
        let tail = if need == Need::Run { self.newest(&head, &window).await.ok().flatten() } else { None };
        *state = match tail {
            Some(session) => State::Tail(Warm::new(session), window),
            None => State::Whole(Warm::new(self.fold(head).await?)),
        };
        Ok(())
    }

    /// Counts whether what a step must see was at hand.
    fn count_found(&self, state: &State, need: Need) {
        let found = if self.suffices(state, need) { "hit" } else { "miss" };
        metrics::counter!("tenure_hot_sessions_total", "found" => found).increment(1);
    }

    /// Tells the cache when a session has grown or shrunk a good deal.
    fn reweigh(&self, key: &Key, hot: &Arc<Hot>, now: usize) {
        let known = hot.weight.load(Ordering::Relaxed);
        if now > known + known / 8 || now < known / 2 {
            hot.weight.store(now, Ordering::Relaxed);
            self.hot_sessions().insert(key.clone(), Slot { hot: hot.clone(), weight: now });
        }
    }
}

/// Somebody else's session does not exist.
pub(crate) fn admit(who: &Principal, id: &SessionId, state: &State) -> Result<()> {
    match state.head() {
        Some(head) if head.tenant == who.tenant && (who.reach == Reach::Tenant || head.user == who.user) => Ok(()),
        _ => Err(Error::NotFound { session_id: id.clone() }),
    }
}
