//! The sections `sessions`, `short_term` and `cache`: the lifetime of sessions, the part of them that models see,
//! and the lifetime of cached tool results.

use anyhow::bail;
use serde::{Deserialize, Serialize};
use tenure::{
    CachePolicy, CompactionPolicy, HistoryMode, HumanDuration, OnBusy, OnDisconnect, OnExpired, Policy, Window,
};

/// How long sessions last, and what requests do that come at a bad time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SessionsConfig {
    /// Idle for longer, a session expires.
    pub ttl: HumanDuration,
    /// Expired or deleted for longer, it is purged.
    pub retention: HumanDuration,
    /// At most so many live sessions; the longest idle go first. 0: no cap.
    pub max_sessions: usize,
    /// Whether a request without `session_id` is matched by its content.
    pub content_matching: bool,
    /// Request headers that name the session besides `X-Session-Id`, for clients that can not set a body field.
    pub id_headers: Vec<String>,
    /// How the messages of requests are read: `auto`, `full` or `append`.
    pub history: HistoryMode,
    /// What a request does whose session is busy: `queue`, `reject`, `interrupt` or `branch`.
    pub on_busy: OnBusy,
    /// What a request does whose session has expired: `restore`, `fresh` or `reject`.
    pub on_expired: OnExpired,
    /// What becomes of a run when the client that waits for it goes away: `finish` or `cancel`.
    pub on_disconnect: OnDisconnect,
}

/// What models are shown. The log keeps everything.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShortTerm {
    /// At most so many turns; 0: all.
    pub max_history_turns: usize,
    /// At most so many tokens, estimated; 0: all.
    pub max_tokens: usize,
    /// Who writes a summary of the oldest turns when there are more: `false` (nobody: they are left out), `true` (the session's model), or
    /// the name of a model.
    pub compact: CompactionPolicy,
}

/// Tool results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cache {
    /// How long a result is good for.
    pub ttl: HumanDuration,
    /// How many a session keeps.
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
                bail!("sessions.id_headers[{i}]: {name:?} is not the name of a header");
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
