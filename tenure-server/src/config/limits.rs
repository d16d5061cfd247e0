//! The section `limits`. Each error names the limit that was exceeded.

use anyhow::ensure;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tenure::policy::HumanDuration;
use utoipa::ToSchema;

/// The limits of the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Bytes of a request's body.
    pub max_body_bytes: usize,
    /// Total bytes of all request bodies in memory.
    pub max_inflight_body_bytes: usize,
    /// Total bytes of the request bodies of one principal in memory.
    pub max_principal_body_bytes: usize,
    /// Bytes of a request's target and headers.
    pub max_header_bytes: usize,
    /// Messages in one request.
    pub max_messages: usize,
    /// Bytes of one message, media included; also of what a model answers.
    pub max_message_bytes: usize,
    /// Sessions, messages and other things in one page.
    pub max_page: usize,
    /// Maximum `offset` of a list of sessions.
    pub max_offset: usize,
    /// Sessions that one list request scans for filters without an index; then the page ends early with a cursor.
    pub max_scan: usize,
    /// Queued lists, searches and other reads of one principal.
    pub max_waiting_reads: usize,
    /// Requests that wait for one busy session.
    pub max_queue: usize,
    /// Concurrent connections.
    pub max_connections: usize,
    /// Concurrent connections from one address (IPv6: from one /64 network), except trusted proxies.
    pub max_connections_per_address: usize,
    /// Concurrent streams of one HTTP/2 connection.
    pub max_streams: u32,
    /// Maximum time until the first request of a connection is complete.
    pub header_timeout: HumanDuration,
    /// Maximum idle time of a connection after its first request.
    pub idle_timeout: HumanDuration,
    /// Maximum time a client may read nothing of a response.
    pub write_timeout: HumanDuration,
    /// Maximum time a client may send nothing of a request's body.
    pub body_timeout: HumanDuration,
    /// Maximum time for requests in progress to complete at shutdown.
    pub drain_timeout: HumanDuration,
    /// Memory for sessions in use.
    pub cache_bytes: usize,
    /// Memory for the vectors of memories, per node. A namespace that is larger is read again at each recall.
    pub vector_bytes: usize,
    /// Default limits of keys. 0 means unlimited.
    pub keys: KeyLimits,
}

impl Default for Limits {
    fn default() -> Self {
        let library = tenure::Limits::default();
        let seconds = |n| HumanDuration::of(Duration::from_secs(n));
        Self {
            max_body_bytes: 64 << 20,
            max_inflight_body_bytes: 256 << 20,
            max_principal_body_bytes: 128 << 20,
            max_header_bytes: 32 << 10,
            max_messages: 20_000,
            max_message_bytes: 32 << 20,
            max_page: library.max_page,
            max_offset: library.max_offset,
            max_scan: library.max_scan,
            max_waiting_reads: library.max_waiting_reads,
            max_queue: library.max_queue,
            max_connections: 1024,
            max_connections_per_address: 512,
            max_streams: 100,
            header_timeout: seconds(10),
            idle_timeout: seconds(60),
            write_timeout: seconds(30),
            body_timeout: seconds(30),
            drain_timeout: seconds(30),
            cache_bytes: 256 << 20,
            vector_bytes: 64 << 20,
            keys: KeyLimits::default(),
        }
    }
}

impl Limits {
    /// Rejects limits that no request could satisfy.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        for (name, limit) in [
            ("max_body_bytes", self.max_body_bytes),
            ("max_header_bytes", self.max_header_bytes),
            ("max_page", self.max_page),
            ("max_scan", self.max_scan),
            ("max_waiting_reads", self.max_waiting_reads),
            ("max_connections", self.max_connections),
            ("max_connections_per_address", self.max_connections_per_address),
            ("max_streams", self.max_streams as usize),
        ] {
            ensure!(limit > 0, "limits.{name}: must be at least 1");
        }
        ensure!(
            self.max_principal_body_bytes >= self.max_body_bytes,
            "limits.max_principal_body_bytes: it must be at least `max_body_bytes` ({}), or such a body could never be sent",
            self.max_body_bytes
        );
        ensure!(
            self.max_inflight_body_bytes >= self.max_principal_body_bytes,
            "limits.max_inflight_body_bytes: it must be at least `max_principal_body_bytes` ({})",
            self.max_principal_body_bytes
        );
        Ok(())
    }
}

/// Limits of one key. A field that is absent is as configured under `limits.keys`; 0: unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KeyLimits {
    /// Requests per minute, on each node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_minute: Option<u64>,
    /// Tokens of models per minute, on each node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_minute: Option<u64>,
    /// Live sessions of the user that the key is bound to, else of its tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sessions: Option<u64>,
    /// Bytes of messages and media stored by the user that the key is bound to, else by its tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_stored_bytes: Option<u64>,
}

impl KeyLimits {
    /// Returns these limits, with `defaults` for absent ones. In the result, `None` means unlimited.
    #[must_use]
    pub fn or(self, defaults: Self) -> Self {
        let pick = |own: Option<u64>, default: Option<u64>| own.or(default).filter(|limit| *limit > 0);
        Self {
            requests_per_minute: pick(self.requests_per_minute, defaults.requests_per_minute),
            tokens_per_minute: pick(self.tokens_per_minute, defaults.tokens_per_minute),
            max_sessions: pick(self.max_sessions, defaults.max_sessions),
            max_stored_bytes: pick(self.max_stored_bytes, defaults.max_stored_bytes),
        }
    }

    /// Returns true if no limit is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_must_admit_the_largest_body() {
        let small = Limits { max_principal_body_bytes: 1, ..Limits::default() };
        assert!(small.check().unwrap_err().to_string().contains("max_principal_body_bytes"));
        let small = Limits { max_inflight_body_bytes: 100 << 20, ..Limits::default() };
        assert!(small.check().unwrap_err().to_string().contains("max_inflight_body_bytes"));
        assert!(Limits::default().check().is_ok());
    }
}
