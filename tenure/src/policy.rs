//! What can be set: for an assistant's sessions, and for the house as a whole.

use std::time::Duration;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// How much of a history a model is shown. What is left out stays in the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// At most so many turns, the newest.
    pub max_turns: Option<usize>,
    /// At most so many tokens, estimated (see [`crate::history()`]); the newest turn is always shown.
    pub max_tokens: Option<usize>,
}

/// How long tool results are kept, and how many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachePolicy {
    /// How long a result is good for.
    pub ttl: Duration,
    /// How many results a session keeps; the least recently used goes first.
    pub max_entries: usize,
}

impl Default for CachePolicy {
    fn default() -> Self {
        Self { ttl: Duration::from_secs(60 * 60), max_entries: 256 }
    }
}

/// Everything that can be set for the sessions of an assistant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// An active session that is idle for longer expires. `None`: never.
    pub ttl: Option<Duration>,
    /// An expired or deleted session is purged after so long. `None`: never.
    pub retention: Option<Duration>,
    /// What a model is shown.
    pub window: Window,
    /// The cache of tool results.
    pub cache: CachePolicy,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            ttl: Some(7 * DAY),
            retention: Some(30 * DAY),
            window: Window { max_turns: Some(50), max_tokens: None },
            cache: CachePolicy::default(),
        }
    }
}

/// The limits. Each has a name, and an error says which one was passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one message, media included.
    pub max_message_bytes: usize,
    /// Messages in one append or import.
    pub max_messages: usize,
    /// Bytes of title, tags and metadata together.
    pub max_info_bytes: usize,
    /// Bytes of one tool result or other item.
    pub max_item_bytes: usize,
    /// Sessions in one page of a list.
    pub max_page: usize,
    /// Sessions that one pass of the sweep works on.
    pub max_sweep: usize,
    /// Times a step is tried again after another writer was first.
    pub max_retries: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_message_bytes: 64 << 20,
            max_messages: 200_000,
            max_info_bytes: 256 << 10,
            max_item_bytes: 16 << 20,
            max_page: 100,
            max_sweep: 1_000,
            max_retries: 16,
        }
    }
}
