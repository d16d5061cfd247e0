//! What is configured when a store is opened.

use crate::clock::Clock;
use crate::executors::embedder::Embedder;
use crate::rules::redaction::Redaction;
use crate::types::policy::{Limits, Policy};

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
