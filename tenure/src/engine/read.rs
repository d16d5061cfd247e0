//! Reads sessions through the cache. Every read sees all writes acknowledged before it, by any process.

#[cfg(test)]
mod tests;

use crate::engine::cache::{CARD_BYTES, CacheEntry, CacheState, CachedSession, CachedState, WeighedEntry, moment};
use crate::engine::core::Engine;
use crate::engine::draft::Depth;
use crate::rules::session::Session;
use crate::store::contract::HeadCheck;
use crate::types::entry::{Entry, Record};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{AccessScope, Principal, SessionId, SessionKey};
use crate::types::message::Message;
use crate::types::policy::Window;

use std::collections::HashMap;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::MutexGuard;

impl Engine {
    /// The cache entry of a session, created if there is none.
    pub fn hot(&self, key: &SessionKey) -> Arc<CacheEntry> {
        let fresh = || Ok::<_, std::convert::Infallible>(WeighedEntry { hot: Arc::default(), weight: CARD_BYTES });
        match self.hot_sessions().get_or_insert_with(key, fresh) {
            Ok(slot) => slot.hot,
            Err(never) => match never {},
        }
    }

    /// Updates the weight of a cached session after a rendering was cached with it.
    pub(crate) fn weigh(&self, key: &SessionKey, session: &CachedSession) {
        self.reweigh(key, &self.hot(key), session.weight());
    }

    /// Evicts a session from the cache.
    pub(crate) fn forget(&self, key: &SessionKey) {
        self.hot_sessions().remove(key);
    }

    /// Reads a session as it is in the store now, loaded as far as `need` says. Another user's
    /// session is reported as not found.
    pub(crate) async fn read<R>(
        &self,
        who: &Principal,
        id: &SessionId,
        need: Depth,
        f: impl FnOnce(&CacheState) -> Result<R>,
    ) -> Result<R> {
        let (key, came) = (who.key(id), moment());
        let hot = self.hot(&key);
        // Concurrently: both may have to query the store.
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

    /// Reads a session from the cache, possibly stale: it includes everything that this process
    /// wrote, but perhaps not what other processes wrote since. For callers that hold the session's
    /// lease, whose next commit would detect a concurrent write (D-055).
    pub(crate) async fn read_known<R>(
        &self,
        who: &Principal,
        id: &SessionId,
        need: Depth,
        f: impl FnOnce(&CacheState) -> Result<R>,
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

    /// Locks the cached state of a session, refreshed if necessary so that it includes everything
    /// acknowledged before the logical time `came` (D-012).
    pub async fn fresh<'a>(
        &self,
        key: &SessionKey,
        hot: &'a CacheEntry,
        need: Depth,
        came: u64,
    ) -> Result<MutexGuard<'a, CachedState>> {
        let mut known = hot.known.lock().await;
        self.count_found(&known.state, need);
        if known.as_of <= came || known.state.head().is_none() {
            self.catch_up(key, &mut known).await?;
        }
        Ok(known)
    }

    /// Refreshes the cached state from the store: the head, and the records that were appended since.
    pub async fn catch_up(&self, key: &SessionKey, known: &mut CachedState) -> Result<()> {
        let began = moment();
        // A session in use is also cached in the store, so this check needs no other thread to wake up.
        let head = match known.state.card().and_then(|card| self.store().glance(key, card)).transpose()? {
            Some(HeadCheck::Same) => {
                known.as_of = began;
                return Ok(());
            }
            Some(HeadCheck::Now(head)) => head.map(|head| *head),
            None => self.store().head(key).await?,
        };
        let Some(head) = head else {
            known.state = CacheState::Cold;
            self.forget(key);
            return Err(Error::NotFound { session_id: key.session.clone() });
        };
        known.state = self.follow_up(std::mem::take(&mut known.state), head).await?;
        known.as_of = began;
        Ok(())
    }

    /// Loads as much of a session as a step must see. If another node purged the session and
    /// created it again during the read, the read is retried (at most [`MAX_MOVES`] times).
    pub async fn warm_current(&self, key: &SessionKey, known: &mut CachedState, need: Depth) -> Result<()> {
        for _ in 0..MAX_MOVES {
            match self.warm(key, &mut known.state, need).await {
                Err(Error::Conflict { .. }) => {
                    known.state = CacheState::Cold;
                    self.catch_up(key, known).await?;
                }
                other => return other,
            }
        }
        self.warm(key, &mut known.state, need).await
    }

    /// Applies the records that were appended since to the cached state. Returns only the new head
    /// if the cached session is a different one or cannot be continued. The hash over the log
    /// detects whether the cached records are in the store at all: a database that lost its last
    /// commits may have grown to the same length, or beyond it, with other records (D-007).
    pub async fn follow_up(&self, mut state: CacheState, head: Head) -> Result<CacheState> {
        let (CacheState::Tail(known, _) | CacheState::Whole(known)) = &state else {
            return Ok(CacheState::Head(Box::new(head)));
        };
        // Only records of the session's own log may be missing, not records of an ancestor.
        let same = known.info.created_at == head.info.created_at
            && known.origin == head.origin
            && known.seq <= head.seq
            && known.seq >= head.first;
        if !same {
            return Ok(CacheState::Head(Box::new(head)));
        }
        if *known.head() == head {
            return Ok(state);
        }
        let pages = match known.seq < head.seq {
            true => match self.own_records(&head, known.seq, head.seq).await {
                // The session was purged and created again.
                Err(Error::Conflict { .. }) => return Ok(CacheState::Head(Box::new(head))),
                pages => pages?,
            },
            false => Vec::new(),
        };
        let hash = known.log.map(|log| pages.iter().flatten().fold(log, |log, record| log.then(record)));
        if hash != head.log {
            tracing::warn!(session_id = %head.info.session_id, known = known.seq, stored = head.seq,
                "the store has another log than this node remembers; it was loaded again");
            return Ok(CacheState::Head(Box::new(head)));
        }
        // These entries refer to records that may not be in the partial session.
        let reaches_back = |r: &Record| matches!(r.entry, Entry::Rewound(_) | Entry::Compacted { .. });
        if matches!(state, CacheState::Tail(..)) && pages.iter().flatten().any(reaches_back) {
            return Ok(CacheState::Head(Box::new(head)));
        }
        if let Some(session) = state.folded() {
            pages.into_iter().flatten().for_each(|record| session.take_in(record));
            session.set_head(head);
        }
        Ok(state)
    }

    /// Returns true if the cached state covers `need`.
    pub fn suffices(&self, state: &CacheState, need: Depth) -> bool {
        match (need, state) {
            (_, CacheState::Cold) => false,
            (Depth::Head, _) | (_, CacheState::Whole(_)) => true,
            (Depth::Run, CacheState::Tail(session, window)) => *window == self.window(session.head()),
            _ => false,
        }
    }

    /// The context window of a session's policy.
    pub fn window(&self, head: &Head) -> Window {
        self.policy(&head.tenant, head.assistant.as_deref()).window
    }

    /// Loads as much of a session as `need` says, unless it is cached.
    pub async fn warm(&self, key: &SessionKey, state: &mut CacheState, need: Depth) -> Result<()> {
        if self.suffices(state, need) {
            return Ok(());
        }
        let head = state.head().cloned().ok_or_else(|| Error::NotFound { session_id: key.session.clone() })?;
        let window = self.window(&head);
        // If the newest part cannot be read, neither can the whole log, whose error is reported.
        let tail = if need == Depth::Run { self.newest(&head, &window).await.ok().flatten() } else { None };
        *state = match tail {
            Some(session) => CacheState::Tail(CachedSession::new(session), window),
            None => CacheState::Whole(CachedSession::new(self.fold(head).await?)),
        };
        Ok(())
    }

    /// Counts a cache hit or miss for `need`.
    pub fn count_found(&self, state: &CacheState, need: Depth) {
        let found = if self.suffices(state, need) { "hit" } else { "miss" };
        metrics::counter!("tenure_hot_sessions_total", "found" => found).increment(1);
    }

    /// Updates the weight of a session in the cache when it grew by more than an eighth or shrank
    /// to less than half.
    pub fn reweigh(&self, key: &SessionKey, hot: &Arc<CacheEntry>, now: usize) {
        let known = hot.weight.load(Ordering::Relaxed);
        if now > known + known / 8 || now < known / 2 {
            hot.weight.store(now, Ordering::Relaxed);
            self.hot_sessions().insert(key.clone(), WeighedEntry { hot: hot.clone(), weight: now });
        }
    }

    /// Clones the whole session from a state. It is an error if only a part is loaded.
    pub fn whole(&self, state: &CacheState) -> Result<Session> {
        match state {
            CacheState::Whole(session) => Ok(Session::clone(session)),
            _ => Err(Error::unavailable("the session was not loaded")),
        }
    }

    /// Borrows the whole session from a state. It is an error if only a part is loaded.
    pub(crate) fn whole_ref<'a>(&self, state: &'a CacheState, id: &SessionId) -> Result<&'a Session> {
        match state {
            CacheState::Whole(session) => Ok(session),
            _ => Err(Error::NotFound { session_id: id.clone() }),
        }
    }

    /// Borrows a session that is loaded at least as far as a run needs it.
    pub(crate) fn run_ref<'a>(&self, state: &'a CacheState, id: &SessionId) -> Result<&'a Session> {
        match state {
            CacheState::Tail(session, _) => Ok(session),
            other => self.whole_ref(other, id),
        }
    }

    /// Reads the head of a session from the store, whatever its status. Another user's session is
    /// reported as not found.
    pub async fn head(&self, who: &Principal, id: &SessionId) -> Result<Head> {
        let head = self.store().head(&who.key(id)).await?;
        match head {
            Some(head) if who.reach == AccessScope::Tenant || head.user == who.user => Ok(head),
            _ => Err(Error::NotFound { session_id: id.clone() }),
        }
    }

    /// Replaces blob references by the media, in all messages.
    pub(crate) async fn attach(&self, mut session: Session) -> Result<Session> {
        let tenant = session.tenant.clone();
        for said in session.messages.iter_mut().filter(|m| !m.message.cuts().is_empty()) {
            said.message = self.attach_message(&tenant, &said.message).await?;
        }
        Ok(session)
    }

    /// Replaces blob references by the media, in one message.
    pub(crate) async fn attach_message(&self, tenant: &crate::types::id::Tenant, message: &Message) -> Result<Message> {
        let mut blobs = HashMap::new();
        for cut in message.cuts() {
            if let Some(bytes) = self.store().blob(tenant, &cut.id).await? {
                blobs.insert(cut.id, bytes);
            }
        }
        message.attach(|id| blobs.get(id).cloned())
    }

    /// Reads the head of a session that is active or paused. An expired or deleted session is
    /// [`crate::Error::Gone`].
    pub async fn live(&self, who: &Principal, id: &SessionId) -> Result<Head> {
        self.know(&who.tenant).await?;
        let head = self.head(who, id).await?;
        self.check_live(&head)?;
        Ok(head)
    }

    /// Returns a shared reference to the current session, with blob references in place of media.
    /// Holding it does not block writers.
    pub(crate) async fn shared(&self, who: &Principal, id: &SessionId) -> Result<Arc<CachedSession>> {
        self.read(who, id, Depth::Session, |state| match state {
            CacheState::Whole(session) => self.check_live(session).map(|()| session.clone()),
            _ => Err(Error::NotFound { session_id: id.clone() }),
        })
        .await
    }
}

/// The number of times a read is retried because another node purged and created the session again during it.
pub(crate) const MAX_MOVES: usize = 3;

/// Checks that a principal may access a session. Another user's session is reported as not found,
/// so that its existence is not revealed.
pub(crate) fn admit(who: &Principal, id: &SessionId, state: &CacheState) -> Result<()> {
    match state.head() {
        Some(head) if head.tenant == who.tenant && (who.reach == AccessScope::Tenant || head.user == who.user) => {
            Ok(())
        }
        _ => Err(Error::NotFound { session_id: id.clone() }),
    }
}
