//! The session cache: a cache of session heads and folded sessions, bounded by bytes.
//!
//! A write commits against the log end that the cache knows and reads nothing (optimistic
//! concurrency). If another writer committed first, the store reports a conflict, the cache reads
//! the records after its own, and the step is retried. A read checks the head in the store first,
//! so it always sees every write acknowledged before it, by any process. Concurrent readers of one
//! session share a single head check, provided it was issued after each of them arrived (D-012).

use crate::rules::partial::PartialSession;
use crate::rules::session::Session;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::SessionKey;
use crate::types::policy::Window;
use quick_cache::{OptionsBuilder, Weighter, sync::Cache};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use tokio::sync::Mutex;

/// How much of a session must be loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// The head.
    Head,
    /// The part that a run needs: the messages that its model is shown, and the run in progress
    /// ([`PartialSession`]).
    Partial,
    /// The full session.
    Full,
}

/// The cached state of a session. It may be stale, but is always a consistent prefix of the log.
#[derive(Debug, Default)]
pub(crate) enum CacheState {
    /// Nothing is cached.
    #[default]
    Empty,
    /// Only the head is cached.
    Head(Box<Head>),
    /// The newest part of the session, enough for a run whose model is shown this window
    /// ([`crate::rules::partial`], D-014).
    Partial(Arc<CachedSession>, Window),
    /// The whole session. It is shared with concurrent readers: a write during a read works on a copy.
    Full(Arc<CachedSession>),
}

/// A cached session with its memoized serialized forms. Every mutation clears them (D-013).
#[derive(Debug)]
pub(crate) struct CachedSession {
    /// The session, with blob references in place of media.
    pub session: Session,
    /// The cached rendering of the session ([`crate::Tenure::render_cached`]).
    pub rendering: OnceLock<Arc<str>>,
    /// The head as JSON.
    pub head_json: OnceLock<String>,
}

impl CachedSession {
    /// A cached session without serialized forms.
    pub fn new(session: Session) -> Arc<Self> {
        Arc::new(Self { session, rendering: OnceLock::new(), head_json: OnceLock::new() })
    }

    /// Mutable access to the session, which clears the serialized forms. All mutations go through
    /// this method.
    pub fn session_mut(&mut self) -> &mut Session {
        (self.rendering, self.head_json) = Default::default();
        &mut self.session
    }

    /// The cached rendering, if there is one.
    pub fn rendering(&self) -> Option<Arc<str>> {
        self.rendering.get().cloned()
    }

    /// Caches a rendering unless there is one already. Returns the cached rendering.
    pub fn cache_rendering(&self, text: String) -> Arc<str> {
        self.rendering.get_or_init(|| text.into()).clone()
    }

    /// The size in bytes of the session and its serialized forms.
    pub fn weight(&self) -> usize {
        self.session.weight()
            + self.rendering.get().map_or(0, |t| t.len())
            + self.head_json.get().map_or(0, String::len)
    }
}

impl Clone for CachedSession {
    fn clone(&self) -> Self {
        Self { session: self.session.clone(), rendering: OnceLock::new(), head_json: OnceLock::new() }
    }
}

impl CacheState {
    /// The cached head, if there is one.
    pub fn head(&self) -> Option<&Head> {
        match self {
            CacheState::Empty => None,
            CacheState::Head(head) => Some(head),
            CacheState::Partial(session, _) | CacheState::Full(session) => Some(session.session.head()),
        }
    }

    /// The cached head as JSON, for the non-blocking head check. `None` means that no head is
    /// cached. An empty string means that the head is cached without its JSON, so that the store
    /// returns the head itself.
    pub fn head_json(&self) -> Option<&str> {
        match self {
            CacheState::Empty => None,
            CacheState::Head(_) => Some(""),
            CacheState::Partial(session, _) | CacheState::Full(session) => {
                Some(session.head_json.get_or_init(|| session.session.head().to_json()))
            }
        }
    }

    /// The head, if it is loaded.
    pub fn loaded_head(&self) -> Result<&Head> {
        self.head().ok_or_else(not_loaded)
    }

    /// The session, if it is loaded in full.
    pub fn full(&self) -> Result<&Arc<CachedSession>> {
        match self {
            CacheState::Full(session) => Ok(session),
            _ => Err(not_loaded()),
        }
    }

    /// The session, if at least the part that a run needs is loaded.
    pub fn partial(&self) -> Result<PartialSession<'_>> {
        match self {
            CacheState::Partial(session, _) | CacheState::Full(session) => Ok(session.session.as_partial()),
            _ => Err(not_loaded()),
        }
    }

    /// The size in bytes that the cache accounts for this state.
    pub fn weight(&self) -> usize {
        match self {
            CacheState::Partial(session, _) | CacheState::Full(session) => session.weight(),
            _ => HEAD_WEIGHT,
        }
    }

    /// Mutable access to the folded session, in part or as a whole. `None` means that nothing is
    /// folded. Clears the serialized forms.
    pub fn session_mut(&mut self) -> Option<&mut Session> {
        match self {
            CacheState::Partial(session, _) | CacheState::Full(session) => Some(Arc::make_mut(session).session_mut()),
            _ => None,
        }
    }
}

/// The error of a read that did not load as much of a session as its caller uses. It is a defect of
/// this library.
fn not_loaded() -> Error {
    Error::unavailable("the session was not loaded to the depth that the operation requires")
}

/// The cached state of a session, and the logical time as of which it is current.
#[derive(Debug, Default)]
pub(crate) struct CachedState {
    /// The cached state.
    pub state: CacheState,
    /// The logical time ([`next_generation`]) of the last head check or commit: every write acknowledged
    /// before it is included in `state`.
    pub as_of: u64,
}

/// The process-wide logical clock: each call returns a larger number. Wall clocks can stall or
/// jump, so they are not used for ordering.
pub(crate) fn next_generation() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::SeqCst) + 1
}

/// One session in the cache. Its lock serializes the writers of this process, so that they do not
/// conflict with each other.
#[derive(Debug, Default)]
pub(crate) struct CacheEntry {
    /// The cached state, locked during reads and writes.
    pub cached: Mutex<CachedState>,
    /// The weight in bytes that was last reported to the cache.
    pub weight: AtomicUsize,
}

/// The cache value of a session, with the weight that the cache accounts for it. The weight must
/// not change while the value is in the cache, so a new weight is a new value.
#[derive(Clone, Debug)]
pub(crate) struct WeighedEntry {
    /// The cached session.
    pub entry: Arc<CacheEntry>,
    /// The weight in bytes.
    pub weight: usize,
}

/// Weighs cached sessions by their size in bytes.
#[derive(Clone, Debug)]
pub(crate) struct SessionWeighter;

impl Weighter<SessionKey, WeighedEntry> for SessionWeighter {
    fn weight(&self, _: &SessionKey, slot: &WeighedEntry) -> u64 {
        slot.weight as u64
    }
}

/// The session cache.
pub(crate) type SessionCache = Cache<SessionKey, WeighedEntry, SessionWeighter>;

/// The weight in bytes of a session of which only the head is cached: the head and its cache entry.
pub(crate) const HEAD_WEIGHT: usize = size_of::<Head>() + size_of::<CacheEntry>() + 1024;

/// Creates a session cache that holds at most `bytes` bytes.
pub(crate) fn new_session_cache(bytes: usize) -> SessionCache {
    // One shard: a session may be as large as the whole budget, and the lock is held for nanoseconds.
    let options = OptionsBuilder::new().shards(1).estimated_items_capacity(4096).weight_capacity(bytes as u64).build();
    let options = options.expect("every required cache option is set");
    Cache::with_options(options, SessionWeighter, Default::default(), Default::default())
}
