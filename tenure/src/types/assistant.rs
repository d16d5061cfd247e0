//! An assistant: configuration shared by its sessions, and how it overrides the default [`Policy`].

use crate::types::error::{Error, Result};
use crate::types::human_duration::HumanDuration;
use crate::types::id::check_text;
use crate::types::policy::HistoryMode;
use crate::types::policy::{
    CheckpointPolicy, CompactionPolicy, MemoryPolicy, MemoryScope, OnDisconnect, Policy, ReviewRule,
};
use crate::types::template::check_template;
use crate::types::tool_source::ToolSource;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::time::Duration;

/// The configuration of an assistant. Fields that are not set fall back to the server's defaults, except
/// where noted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Assistant {
    /// The name of the assistant, which is also its id.
    pub name: String,
    /// The model that its runs use. `None` means that each session or request names its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Instructions that precede everything else in the prompt. They are not part of any session. A text with
    /// `{{` or `{%` is a template over `metadata` (the session's), `user` and `now` (D-132).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instructions: Option<String>,
    /// Overrides of the lifetime of its sessions, and of how requests to them are handled.
    #[serde(default, skip_serializing_if = "is_default")]
    pub sessions: SessionConfig,
    /// Overrides of how much of the history a model is shown.
    #[serde(default, skip_serializing_if = "is_default")]
    pub short_term: WindowConfig,
    /// Overrides of the cache of tool results.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cache: CacheConfig,
    /// When its runs set checkpoints. `None` means the server's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoints: Option<CheckpointPolicy>,
    /// Tool calls that need a reviewer's approval. They replace the server's rules, even if the list is
    /// empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub review: Vec<ReviewRule>,
    /// Overrides of the limits of its runs.
    #[serde(default, skip_serializing_if = "is_default")]
    pub runs: RunConfig,
    /// How often its runs may call models. A run over it waits or pauses (D-136).
    #[serde(default, skip_serializing_if = "is_default")]
    pub rate_limit: RateLimitConfig,
    /// Its long-term memory. `None` means the server's default: each session has its own memories (D-130).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryConfig>,
    /// The sources of its tools. Only an assistant that is declared in the configuration file has any,
    /// because tools start programs and connect to addresses (D-059).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<ToolSource>,
    /// Application-defined metadata.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
}

/// Overrides of the limits of an assistant's runs. `None` in a field means the server's default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Maximum number of model requests per run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rounds: Option<usize>,
    /// Maximum duration of a run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_time: Option<HumanDuration>,
    /// Maximum number of tokens that a run may use. 0 means unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u64>,
    /// Maximum duration of one tool call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_timeout: Option<HumanDuration>,
    /// Maximum size of one tool result, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_result_bytes: Option<usize>,
    /// Maximum number of concurrent tool calls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallel: Option<usize>,
    /// Maximum time for which a model call waits for a model server that is rate limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_wait: Option<HumanDuration>,
    /// Maximum duration of one pause because of a rate limit. Zero means that runs do not pause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_pause: Option<HumanDuration>,
}

/// How often the runs of an assistant may call models, on each node. `None` in a field means unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimitConfig {
    /// Maximum number of model requests per minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_minute: Option<u64>,
    /// Maximum number of input and output tokens per minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_minute: Option<u64>,
}

/// Overrides of the lifetime of an assistant's sessions, and of how requests to them are handled. `None` in a
/// field means the server's default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionConfig {
    /// Idle time after which a session expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<HumanDuration>,
    /// Time after which an expired or deleted session is purged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<HumanDuration>,
    /// How the messages of a request are reconciled with the stored ones, if the request does not name a
    /// mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<HistoryMode>,
    /// Whether a run continues or is cancelled when its client disconnects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_disconnect: Option<OnDisconnect>,
    /// Whether each interaction of a chat thread starts a new session.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fresh: bool,
}

/// Overrides of how much of the history an assistant's model is shown. `None` in a field means the server's
/// default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowConfig {
    /// Maximum number of turns, the newest ones. 0 means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_history_turns: Option<usize>,
    /// Maximum number of tokens (estimated). 0 means unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
    /// Whether turns beyond the window are summarized, and by which model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compact: Option<CompactionPolicy>,
}

/// Overrides of the cache of tool results of an assistant's sessions. `None` in a field means the server's
/// default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheConfig {
    /// Time after which a cached result expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<HumanDuration>,
    /// Maximum number of cached results per session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_entries: Option<usize>,
}

/// The long-term memory of an assistant, beyond the messages of its sessions. Sessions cannot change it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryConfig {
    /// Which sessions share the memories.
    #[serde(default)]
    pub scope: MemoryScope,
    /// The group that shares the memories. Required with the scope `group`, rejected with any other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Time after which a memory expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<HumanDuration>,
    /// Maximum number of memories; the least recently used ones are evicted first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_entries: Option<usize>,
    /// Whether recalled memories are injected into the prompt before the model is called.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inject: Option<bool>,
    /// Maximum number of memories injected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Maximum number of tokens of injected memories (estimated).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
}

impl MemoryConfig {
    /// Checks that `group` is set exactly when the scope is `group`, and that it is a valid name.
    pub fn check(&self) -> Result<()> {
        match (self.scope, &self.group) {
            (MemoryScope::Group, None) => {
                Err(Error::invalid("memory.group", "the scope `group` requires `memory.group`, the name of the group"))
            }
            (MemoryScope::Group, Some(group)) => check_text(group)
                .map_err(|reason| Error::invalid("memory.group", format!("not a valid group name: {reason}"))),
            (_, Some(_)) => Err(Error::invalid(
                "memory.group",
                "`memory.group` is only allowed with the scope `group`; remove it, or set the scope",
            )),
            (_, None) => Ok(()),
        }
    }

    /// Overrides the memory policy with the fields that are set. Scope and group are always overridden.
    fn apply(&self, policy: &mut MemoryPolicy) {
        policy.scope = self.scope;
        policy.group = self.group.clone();
        if let Some(retention) = self.retention {
            policy.retention = retention.duration();
        }
        policy.max_entries = self.max_entries.unwrap_or(policy.max_entries);
        policy.inject = self.inject.unwrap_or(policy.inject);
        policy.limit = self.limit.unwrap_or(policy.limit);
        policy.max_tokens = self.max_tokens.unwrap_or(policy.max_tokens);
    }
}

impl Assistant {
    /// Checks the settings that a program or a person wrote: memory, templates, conditions and built-in tools.
    /// The error contains the path of the field.
    pub fn check(&self) -> Result<()> {
        self.memory.as_ref().map_or(Ok(()), MemoryConfig::check)?;
        let instructions = self.instructions.as_deref().map_or(Ok(()), check_template);
        instructions.map_err(|reason| Error::invalid("instructions", format!("not a valid template: {reason}")))?;
        for (i, rule) in self.review.iter().enumerate() {
            rule.check().map_err(|e| e.under(&format!("review[{i}]")))?;
        }
        for (i, source) in self.tools.iter().enumerate() {
            if let ToolSource::Metadata(metadata) = source {
                metadata.check().map_err(|e| e.under(&format!("tools[{i}].metadata")))?;
            }
        }
        Ok(())
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Assistant {
    /// Returns the effective policy: the server's `defaults`, overridden by the fields that are set here.
    /// History mode and review rules are always those of the assistant, even if it sets none.
    pub fn policy(&self, defaults: &Policy) -> Policy {
        let mut policy = defaults.clone();
        if let Some(ttl) = self.sessions.ttl {
            policy.ttl = ttl.duration();
        }
        if let Some(retention) = self.sessions.retention {
            policy.retention = retention.duration();
        }
        policy.history = self.sessions.history;
        if let Some(turns) = self.short_term.max_history_turns {
            policy.window.max_turns = (turns > 0).then_some(turns);
        }
        if let Some(tokens) = self.short_term.max_tokens {
            policy.window.max_tokens = (tokens > 0).then_some(tokens);
        }
        if let Some(compact) = &self.short_term.compact {
            policy.compact = compact.clone();
        }
        if let Some(ttl) = self.cache.ttl {
            policy.cache.ttl = ttl.duration().unwrap_or(Duration::MAX);
        }
        if let Some(max) = self.cache.max_entries {
            policy.cache.max_entries = max;
        }
        if let Some(memory) = &self.memory {
            memory.apply(&mut policy.memory);
        }
        policy.runs.review = self.review.clone();
        let runs = &mut policy.runs;
        let overrides = &self.runs;
        runs.checkpoints = self.checkpoints.unwrap_or(runs.checkpoints);
        runs.max_rounds = overrides.max_rounds.unwrap_or(runs.max_rounds);
        runs.max_result_bytes = overrides.max_result_bytes.unwrap_or(runs.max_result_bytes);
        runs.parallel = overrides.parallel.unwrap_or(runs.parallel);
        if let Some(tokens) = overrides.max_tokens {
            runs.max_tokens = (tokens > 0).then_some(tokens);
        }
        if let Some(time) = overrides.max_time {
            runs.max_time = time.duration().unwrap_or(Duration::MAX);
        }
        if let Some(time) = overrides.retry_wait {
            runs.retry_wait = time.duration().unwrap_or(Duration::MAX);
        }
        if let Some(time) = overrides.max_pause {
            runs.max_pause = time.duration().unwrap_or(Duration::MAX);
        }
        if let Some(time) = overrides.tool_timeout {
            runs.tool_timeout = time.duration().unwrap_or(Duration::MAX);
        }
        policy
    }
}
