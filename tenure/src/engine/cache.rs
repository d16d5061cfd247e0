//! Hot sessions: a bounded cache of index cards and folded sessions, and the one way in which a session is read and written.
//!
//! A write commits against the log's end as the cache knows it and reads nothing. If somebody else was first, the store says
//! so, the cache catches up with the records after its own, and the step is taken again. A read asks the store for the card
//! first, so that it always sees what was acknowledged before it, by whichever process. Those who wait for one session share the
//! answer, if it was asked for after they came.

use crate::rules::session::Session;
use crate::types::head::Head;
use crate::types::id::Key;
use crate::types::policy::Window;
use quick_cache::{OptionsBuilder, Weighter, sync::Cache};
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use tokio::sync::Mutex;

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
    pub session: Session,
    pub text: OnceLock<Arc<str>>,
    /// Its card as JSON.
    pub card: OnceLock<String>,
}

impl Warm {
    pub fn new(session: Session) -> Arc<Self> {
        Arc::new(Self { session, text: OnceLock::new(), card: OnceLock::new() })
    }

    /// The one way to change it.
    pub fn change(&mut self) -> &mut Session {
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
    pub fn card(&self) -> Option<&str> {
        match self {
            State::Cold => None,
            State::Head(_) => Some(""),
            State::Tail(session, _) | State::Whole(session) => {
                Some(session.card.get_or_init(|| session.head().to_json()))
            }
        }
    }

    pub fn weight(&self) -> usize {
        match self {
            State::Tail(session, _) | State::Whole(session) => session.weight(),
            _ => CARD_BYTES,
        }
    }

    /// What is folded of it, if anything is, to be changed.
    pub fn folded(&mut self) -> Option<&mut Session> {
        match self {
            State::Tail(session, _) | State::Whole(session) => Some(Arc::make_mut(session).change()),
            _ => None,
        }
    }
}

/// What is known of a session, and since when.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub state: State,
    /// Whatever was acknowledged before this moment is in it.
    pub as_of: u64,
}

/// A moment of this process, later than all that were given before. No clock: those stand still, and jump.
pub(crate) fn moment() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::SeqCst) + 1
}

/// One session in the cache. Its lock makes the writers of this process wait for each other, so that they need not conflict.
#[derive(Debug, Default)]
pub(crate) struct Hot {
    pub known: Mutex<Known>,
    pub weight: AtomicUsize,
}

/// A session's place in the cache, with the weight that the cache knows it by: that must not change in place.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub hot: Arc<Hot>,
    pub weight: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct ByBytes;

impl Weighter<Key, Slot> for ByBytes {
    fn weight(&self, _: &Key, slot: &Slot) -> u64 {
        slot.weight as u64
    }
}

pub(crate) type HotSessions = Cache<Key, Slot, ByBytes>;

/// The weight of a session of which only the card is known: the card, and its place in the cache.
pub(crate) const CARD_BYTES: usize = size_of::<Head>() + size_of::<Hot>() + 1024;

pub(crate) fn hot_sessions(bytes: usize) -> HotSessions {
    // One shard: a session may be as large as the whole budget, and the lock is held for nanoseconds.
    let options = OptionsBuilder::new().shards(1).estimated_items_capacity(4096).weight_capacity(bytes as u64).build();
    let options = options.expect("all options are given");
    Cache::with_options(options, ByBytes, Default::default(), Default::default())
}
