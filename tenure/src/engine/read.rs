//! Reads sessions through the cache. Every read sees all writes acknowledged before it, by any process.

#[cfg(test)]
mod tests;

use crate::engine::cache::{
    CacheEntry, CacheState, CachedSession, CachedState, Depth, HEAD_WEIGHT, WeighedEntry, next_generation,
};
use crate::engine::core::Engine;
use crate::rules::partial::PartialSession;
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
use tracing::Instrument;

impl Engine {
    /// The cache entry of a session, created if there is none.
    pub fn cache_entry(&self, key: &SessionKey) -> Arc<CacheEntry> {
        let empty = || Ok::<_, std::convert::Infallible>(WeighedEntry { entry: Arc::default(), weight: HEAD_WEIGHT });
        match self.session_cache().get_or_insert_with(key, empty) {
            Ok(slot) => slot.entry,
            Err(never) => match never {},
        }
    }

    /// Updates the weight of a cached session after a rendering was cached with it.
    pub(crate) fn update_weight(&self, key: &SessionKey, session: &CachedSession) {
        self.update_entry_weight(key, &self.cache_entry(key), session.weight());
    }

    /// Evicts a session from the cache.
    pub(crate) fn evict(&self, key: &SessionKey) {
        self.session_cache().remove(key);
    }

    /// Reads the head of a session as it is in the store now. Another user's session is reported as
    /// not found.
    pub(crate) async fn read_head<R>(
        &self,
        principal: &Principal,
        id: &SessionId,
        f: impl FnOnce(&Head) -> Result<R>,
    ) -> Result<R> {
        self.read(principal, id, Depth::Head, |state| f(state.loaded_head()?)).await
    }

    /// Reads the part of a session that a run needs, as it is in the store now. Another user's
    /// session is reported as not found.
    pub(crate) async fn read_partial<R>(
        &self,
        principal: &Principal,
        id: &SessionId,
        f: impl FnOnce(PartialSession<'_>) -> Result<R>,
    ) -> Result<R> {
        self.read(principal, id, Depth::Partial, |state| f(state.partial()?)).await
    }

    /// Reads a full session as it is in the store now. Another user's session is reported as not
    /// found.
    pub(crate) async fn read_session<R>(
        &self,
        principal: &Principal,
        id: &SessionId,
        f: impl FnOnce(&Session) -> Result<R>,
    ) -> Result<R> {
        self.read(principal, id, Depth::Full, |state| f(&state.full()?.session)).await
    }

    /// Reads a session, loaded as far as `need` says.
    async fn read<R>(
        &self,
        principal: &Principal,
        id: &SessionId,
        need: Depth,
        f: impl FnOnce(&CacheState) -> Result<R>,
    ) -> Result<R> {
        let key = principal.key(id);
        let arrived = next_generation();
        let entry = self.cache_entry(&key);
        // Concurrently: both may have to query the store.
        let (assistants, cached) =
            tokio::join!(self.ensure_assistants_loaded(&key.tenant), self.lock_refreshed(&key, &entry, need, arrived));
        assistants?;
        let mut cached = cached?;
        admit(principal, id, &cached.state)?;
        self.load_current(&key, &mut cached, need).await?;
        admit(principal, id, &cached.state)?;
        let answer = f(&cached.state);
        self.update_entry_weight(&key, &entry, cached.state.weight());
        answer
    }

    /// Reads the part of a session that a run needs from the cache, possibly stale: it includes
    /// everything that this process wrote, but perhaps not what other processes wrote since. For
    /// callers that hold the session's lease, whose next commit would detect a concurrent write
    /// (D-055).
    pub(crate) async fn read_cached_partial<R>(
        &self,
        principal: &Principal,
        id: &SessionId,
        f: impl FnOnce(PartialSession<'_>) -> Result<R>,
    ) -> Result<R> {
        let entry = self.cache_entry(&principal.key(id));
        let cached = entry.cached.lock().await;
        if self.suffices(&cached.state, Depth::Partial) {
            self.count_cache_lookup(&cached.state, Depth::Partial);
            admit(principal, id, &cached.state)?;
            return f(cached.state.partial()?);
        }
        drop(cached);
        self.read_partial(principal, id, f).await
    }

    /// Locks the cached state of a session, refreshed if necessary so that it includes everything
    /// acknowledged before the logical time `arrived` (D-012).
    pub async fn lock_refreshed<'a>(
        &self,
        key: &SessionKey,
        entry: &'a CacheEntry,
        need: Depth,
        arrived: u64,
    ) -> Result<MutexGuard<'a, CachedState>> {
        let mut cached = entry.cached.lock().await;
        self.count_cache_lookup(&cached.state, need);
        if cached.as_of <= arrived || cached.state.head().is_none() {
            self.refresh(key, &mut cached).await?;
        }
        Ok(cached)
    }

    /// Refreshes the cached state from the store: the head, and the records that were appended since.
    pub async fn refresh(&self, key: &SessionKey, cached: &mut CachedState) -> Result<()> {
        let generation = next_generation();
        // A session in use is also cached in the store, so this check needs no other thread to wake up.
        let check = cached
            .state
            .head_json()
            .and_then(|head_json| self.store().head_checker()?.head_if_changed(key, head_json))
            .transpose()?;
        if matches!(check, Some(HeadCheck::Unchanged)) {
            cached.as_of = generation;
            return Ok(());
        }
        // Boxed: every read contains it, and most find the head unchanged.
        Box::pin(self.refresh_changed(key, cached, check, generation)).await
    }

    /// Refreshes the cached state, unless the check has found it to be current.
    async fn refresh_changed(
        &self,
        key: &SessionKey,
        cached: &mut CachedState,
        check: Option<HeadCheck>,
        generation: u64,
    ) -> Result<()> {
        let head = match check {
            Some(HeadCheck::Unchanged) => return Ok(()),
            Some(HeadCheck::Current(head)) => head.map(|head| *head),
            None => self.store().head(key).await?,
        };
        let Some(head) = head else {
            cached.state = CacheState::Empty;
            self.evict(key);
            return Err(Error::NotFound { session_id: key.session.clone() });
        };
        cached.state = self.apply_newer(std::mem::take(&mut cached.state), head).await?;
        cached.as_of = generation;
        Ok(())
    }

    /// Loads as much of a session as a step must see. If another node purged the session and
    /// created it again during the read, the read is retried (at most [`MAX_LOAD_RETRIES`] times).
    pub async fn load_current(&self, key: &SessionKey, cached: &mut CachedState, need: Depth) -> Result<()> {
        for _ in 0..MAX_LOAD_RETRIES {
            match self.load_to_depth(key, &mut cached.state, need).await {
                Err(Error::Conflict { .. }) => {
                    cached.state = CacheState::Empty;
                    self.refresh(key, cached).await?;
                }
                other => return other,
            }
        }
        self.load_to_depth(key, &mut cached.state, need).await
    }

    /// Applies the records that were appended since to the cached state. Returns only the new head
    /// if the cached session is a different one or cannot be continued. The hash over the log
    /// detects whether the cached records are in the store at all: a database that lost its last
    /// commits may have grown to the same length, or beyond it, with other records (D-007).
    pub async fn apply_newer(&self, mut state: CacheState, head: Head) -> Result<CacheState> {
        let (CacheState::Partial(cached, _) | CacheState::Full(cached)) = &state else {
            return Ok(CacheState::Head(Box::new(head)));
        };
        // Only records of the session's own log may be missing, not records of an ancestor.
        let same = cached.session.head().info.created_at == head.info.created_at
            && cached.session.head().origin == head.origin
            && cached.session.head().seq <= head.seq
            && cached.session.head().seq >= head.first;
        if !same {
            return Ok(CacheState::Head(Box::new(head)));
        }
        if *cached.session.head() == head {
            return Ok(state);
        }
        let pages = if cached.session.head().seq < head.seq {
            match self.own_records(&head, cached.session.head().seq, head.seq).await {
                // The session was purged and created again.
                Err(Error::Conflict { .. }) => return Ok(CacheState::Head(Box::new(head))),
                pages => pages?,
            }
        } else {
            Vec::new()
        };
        let hash = pages.iter().flatten().fold(cached.session.head().log_hash, |hash, record| hash.then(record));
        if hash != head.log_hash {
            tracing::warn!(session_id = %head.info.session_id, known = cached.session.head().seq, stored = head.seq,
                "the log in the store differs from the cached one; the session was reloaded");
            return Ok(CacheState::Head(Box::new(head)));
        }
        // These entries refer to records that may not be in the partial session.
        let reaches_back = |r: &Record| matches!(r.entry, Entry::Rewound(_) | Entry::Compacted { .. });
        if matches!(state, CacheState::Partial(..)) && pages.iter().flatten().any(reaches_back) {
            return Ok(CacheState::Head(Box::new(head)));
        }
        if let Some(session) = state.session_mut() {
            pages.into_iter().flatten().for_each(|record| session.fold_record(record));
            session.set_head(head);
        }
        Ok(state)
    }

    /// Returns true if the cached state covers `need`.
    pub fn suffices(&self, state: &CacheState, need: Depth) -> bool {
        match (need, state) {
            (_, CacheState::Empty) => false,
            (Depth::Head, _) | (_, CacheState::Full(_)) => true,
            (Depth::Partial, CacheState::Partial(session, window)) => *window == self.window(session.session.head()),
            _ => false,
        }
    }

    /// The context window of a session's policy.
    pub fn window(&self, head: &Head) -> Window {
        self.policy(&head.tenant, head.assistant.as_deref()).window
    }

    /// Loads as much of a session as `need` says, unless it is cached.
    pub async fn load_to_depth(&self, key: &SessionKey, state: &mut CacheState, need: Depth) -> Result<()> {
        if self.suffices(state, need) {
            return Ok(());
        }
        let head = state.head().cloned().ok_or_else(|| Error::NotFound { session_id: key.session.clone() })?;
        let span = tracing::info_span!(
            target: "tenure::trace", "load", otel.name = "load session", otel.kind = "client",
            db.operation.name = "read", session.id = key.session.as_str(), records = head.seq,
        );
        // On the heap: every operation contains this future, and most find the session in the cache.
        *state = Box::pin(self.load_log(head, need)).instrument(span).await?;
        Ok(())
    }

    async fn load_log(&self, head: Head, need: Depth) -> Result<CacheState> {
        let window = self.window(&head);
        // If the newest part cannot be read, neither can the whole log, whose error is reported.
        let tail = if need == Depth::Partial { self.load_partial(&head, &window).await.ok().flatten() } else { None };
        Ok(match tail {
            Some(session) => CacheState::Partial(CachedSession::new(session), window),
            None => CacheState::Full(CachedSession::new(self.fold(head).await?)),
        })
    }

    /// Counts a cache hit or miss for `need`.
    pub fn count_cache_lookup(&self, state: &CacheState, need: Depth) {
        let outcome = if self.suffices(state, need) { "hit" } else { "miss" };
        metrics::counter!("tenure_hot_sessions_total", "found" => outcome).increment(1);
    }

    /// Updates the weight of a session in the cache when it grew by more than an eighth or shrank
    /// to less than half.
    pub fn update_entry_weight(&self, key: &SessionKey, entry: &Arc<CacheEntry>, weight: usize) {
        let reported = entry.weight.load(Ordering::Relaxed);
        if weight > reported + reported / 8 || weight < reported / 2 {
            entry.weight.store(weight, Ordering::Relaxed);
            self.session_cache().insert(key.clone(), WeighedEntry { entry: entry.clone(), weight });
        }
    }

    /// Reads the head of a session from the store, whatever its status. Another user's session is
    /// reported as not found.
    pub async fn head(&self, principal: &Principal, id: &SessionId) -> Result<Head> {
        let head = self.store().head(&principal.key(id)).await?;
        match head {
            Some(head) if principal.scope == AccessScope::Tenant || head.user == principal.user => Ok(head),
            _ => Err(Error::NotFound { session_id: id.clone() }),
        }
    }

    /// Replaces blob references by the media, in all messages.
    pub(crate) async fn attach(&self, mut session: Session) -> Result<Session> {
        let tenant = session.head().tenant.clone();
        for stored in session.messages.iter_mut().filter(|m| !m.message.blob_refs().is_empty()) {
            stored.message = self.attach_message(&tenant, &stored.message).await?;
        }
        Ok(session)
    }

    /// Replaces blob references by the media, in one message.
    pub(crate) async fn attach_message(&self, tenant: &crate::types::id::Tenant, message: &Message) -> Result<Message> {
        let mut blobs = HashMap::new();
        for blob_ref in message.blob_refs() {
            if let Some(bytes) = self.store().blob(tenant, &blob_ref.id).await? {
                blobs.insert(blob_ref.id, bytes);
            }
        }
        message.attach(|id| blobs.get(id).cloned())
    }

    /// Reads the head of a session that is active or paused. An expired or deleted session is
    /// [`crate::Error::Gone`].
    pub async fn get_live_head(&self, principal: &Principal, id: &SessionId) -> Result<Head> {
        self.ensure_assistants_loaded(&principal.tenant).await?;
        let head = self.head(principal, id).await?;
        self.check_live(&head)?;
        Ok(head)
    }

    /// Returns a shared reference to the current session, with blob references in place of media.
    /// Holding it does not block writers.
    pub(crate) async fn shared_session(&self, principal: &Principal, id: &SessionId) -> Result<Arc<CachedSession>> {
        self.read(principal, id, Depth::Full, |state| {
            let session = state.full()?;
            self.check_live(session.session.head()).map(|()| session.clone())
        })
        .await
    }
}

/// The number of times a read is retried because another node purged and created the session again during it.
pub(crate) const MAX_LOAD_RETRIES: usize = 3;

/// Checks that a principal may access a session. Another user's session is reported as not found,
/// so that its existence is not revealed.
pub(crate) fn admit(principal: &Principal, id: &SessionId, state: &CacheState) -> Result<()> {
    match state.head() {
        Some(head)
            if head.tenant == principal.tenant
                && (principal.scope == AccessScope::Tenant || head.user == principal.user) =>
        {
            Ok(())
        }
        _ => Err(Error::NotFound { session_id: id.clone() }),
    }
}
