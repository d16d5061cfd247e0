//! `limits`: every resource has one, and its error names it.

use crate::auth::KeyLimits;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tenure::Period;

/// The limits. Each error says which one was passed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Bytes of a request's body.
    pub max_body_bytes: usize,
    /// Messages in one request.
    pub max_messages: usize,
    /// Bytes of one message, media included.
    pub max_message_bytes: usize,
    /// Sessions, messages and other things in one page.
    pub max_page: usize,
    /// Sessions that a list leaves out at its beginning (`offset`).
    pub max_offset: usize,
    /// Sessions that one list looks at for what no index serves; then the page ends early and has a cursor.
    pub max_scan: usize,
    /// Lists, searches and other reads of one principal that wait for their turn.
    pub max_waiting_reads: usize,
    /// Requests that wait for one busy session.
    pub max_queue: usize,
    /// Connections at once.
    pub max_connections: usize,
    /// How long a client may take to send a request's headers.
    pub header_timeout: Period,
    /// How long it may send nothing of a request's body.
    pub body_timeout: Period,
    /// How long work in progress may take when the server stops.
    pub drain_timeout: Period,
    /// Memory for sessions in use.
    pub cache_bytes: usize,
    /// Limits of each key that has none of its own; 0: unlimited.
    pub keys: KeyLimits,
}

impl Default for Limits {
    fn default() -> Self {
        let ours = tenure::Limits::default();
        Self {
            max_body_bytes: 64 << 20,
            max_messages: 20_000,
            max_message_bytes: 32 << 20,
            max_page: ours.max_page,
            max_offset: ours.max_offset,
            max_scan: ours.max_scan,
            max_waiting_reads: ours.max_waiting_reads,
            max_queue: ours.max_queue,
            max_connections: 1024,
            header_timeout: Period::of(Duration::from_secs(10)),
            body_timeout: Period::of(Duration::from_secs(30)),
            drain_timeout: Period::of(Duration::from_secs(30)),
            cache_bytes: 256 << 20,
            keys: KeyLimits::default(),
        }
    }
}
