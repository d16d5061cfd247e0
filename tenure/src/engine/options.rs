//! Configuration that is given when a store is opened.

use crate::clock::Clock;
use crate::executors::embedder::Embedder;
use crate::rules::redaction::Redaction;
use crate::types::policy::{Limits, Policy};

/// Options for opening a store.
#[derive(Clone, Debug)]
pub struct Options {
    /// The policy of sessions that belong to no assistant with a policy of its own.
    pub policy: Policy,
    /// The maximum number of live sessions; 0 means no limit. Creating a session beyond it evicts the least
    /// recently used ones; the sweep evicts what remains (D-017, D-135).
    pub max_sessions: usize,
    /// Limits on sizes and counts.
    pub limits: Limits,
    /// The size of the session cache, in bytes.
    pub cache_bytes: usize,
    /// The size of the cache for embedding vectors of memories, in bytes.
    pub vector_bytes: usize,
    /// The clock that all times are taken from.
    pub clock: Clock,
    /// Computes embeddings of memories, so that recall also ranks by similarity. `None` means that
    /// recall ranks by words only.
    pub embedder: Option<Embedder>,
    /// Redaction rules for text that leaves the log. Without rules, nothing is redacted (D-084).
    pub redaction: Redaction,
    /// Whether the words of messages are indexed, in stores that have a message index, so that searches
    /// need not read all messages.
    pub message_index: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            max_sessions: 0,
            limits: Limits::default(),
            cache_bytes: 256 << 20,
            vector_bytes: 64 << 20,
            clock: Clock::default(),
            embedder: None,
            redaction: Redaction::default(),
            message_index: true,
        }
    }
}
