//! The sections `sessions`, `short_term` and `cache`: the lifetime of sessions, the part of them that models see,
//! and the lifetime of cached tool results.

use anyhow::bail;
use serde::{Deserialize, Serialize};
use tenure::{
    Policy, Window,
    policy::{CachePolicy, CompactionPolicy, HistoryMode, HumanDuration, OnDisconnect},
    run::{OnBusy, OnExpired},
};

/// Lifetime of sessions, and the handling of busy and expired ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SessionsConfig {
    /// Idle time after which a session expires.
    pub ttl: HumanDuration,
    /// Time after which an expired or deleted session is purged.
    pub retention: HumanDuration,
    /// Maximum number of live sessions; the longest idle are evicted first (D-017). 0 means unlimited.
    pub max_sessions: usize,
    /// Whether a request without `session_id` is matched by its content.
    pub content_matching: bool,
    /// Request headers that name the session besides `X-Session-Id`, for clients that cannot set a body field.
    pub id_headers: Vec<String>,
    /// How request messages are merged with the stored history: `auto`, `full` or `append`.
    pub history: HistoryMode,
    /// How a request to a busy session is handled: `queue`, `reject`, `interrupt` or `branch`.
    pub on_busy: OnBusy,
    /// How a request to an expired session is handled: `restore`, `fresh` or `reject`.
    pub on_expired: OnExpired,
    /// How a run is handled when its client disconnects: `finish` or `cancel`.
    pub on_disconnect: OnDisconnect,
}

/// The prompt window: the part of a session that models see. The log contains all messages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShortTerm {
    /// Maximum number of turns. 0 means all.
    pub max_history_turns: usize,
    /// Maximum number of estimated tokens. 0 means all.
    pub max_tokens: usize,
    /// Whether the oldest turns are summarized when there are more: `false` (no, they are omitted from prompts), `true`
    /// (by the session's model), or the name of the model that summarizes them.
    pub compact: CompactionPolicy,
}

/// The cache of tool results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cache {
    /// Time after which a cached result expires.
    pub ttl: HumanDuration,
    /// Maximum number of cached results per session.
    pub max_entries: usize,
}

impl Default for SessionsConfig {
    fn default() -> Self {
        let Policy { ttl, retention, .. } = Policy::default();
        let period = |d: Option<std::time::Duration>| d.map_or(HumanDuration::NEVER, HumanDuration::of);
        Self {
            ttl: period(ttl),
            retention: period(retention),
            max_sessions: 0,
            content_matching: true,
            id_headers: Vec::new(),
            history: HistoryMode::default(),
            on_busy: OnBusy::default(),
            on_expired: OnExpired::default(),
            on_disconnect: OnDisconnect::default(),
        }
    }
}

impl Default for ShortTerm {
    fn default() -> Self {
        let Policy { window: Window { max_turns, max_tokens }, compact, .. } = Policy::default();
        Self { max_history_turns: max_turns.unwrap_or(0), max_tokens: max_tokens.unwrap_or(0), compact }
    }
}

impl Default for Cache {
    fn default() -> Self {
        let CachePolicy { ttl, max_entries } = CachePolicy::default();
        Self { ttl: HumanDuration::of(ttl), max_entries }
    }
}

impl SessionsConfig {
    /// Validates the section.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        for (i, name) in self.id_headers.iter().enumerate() {
            if axum::http::HeaderName::from_bytes(name.as_bytes()).is_err() {
                bail!("sessions.id_headers[{i}]: {name:?} is not a valid header name");
            }
        }
        Ok(())
    }
}

impl ShortTerm {
    /// The prompt window: the part of a session that a model sees.
    pub(super) fn window(&self) -> Window {
        let limit = |n: usize| (n > 0).then_some(n);
        Window { max_turns: limit(self.max_history_turns), max_tokens: limit(self.max_tokens) }
    }
}

impl Cache {
    /// The lifetime and number of cached tool results.
    pub(super) fn policy(&self) -> CachePolicy {
        CachePolicy { ttl: self.ttl.duration().unwrap_or(std::time::Duration::MAX), max_entries: self.max_entries }
    }
}
