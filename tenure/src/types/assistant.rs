//! An assistant: the configuration that its sessions share.

use crate::types::error::{Error, Result};
use crate::types::human_duration::Period;
use crate::types::id::check_text;
use crate::types::policy::HistoryMode;
use crate::types::policy::{Checkpoints, Compact, MemoryPolicy, OnDisconnect, Policy, ReviewRule, Scope};
use crate::types::tool_source::ToolSource;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::time::Duration;

/// An assistant. What it does not say is as the house has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Assistant {
    /// Its name, which is its id too.
    pub name: String,
    /// The model it talks to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// What the model is told before anything else. It is not part of a session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instructions: Option<String>,
    /// How long its sessions last.
    #[serde(default, skip_serializing_if = "is_default")]
    pub sessions: Lifetime,
    /// What the model is shown of them.
    #[serde(default, skip_serializing_if = "is_default")]
    pub short_term: ShortTerm,
    /// Their tool results.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cache: CacheSize,
    /// When its runs set checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoints: Option<Checkpoints>,
    /// What a person must allow.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub review: Vec<ReviewRule>,
    /// How much its runs may do.
    #[serde(default, skip_serializing_if = "is_default")]
    pub runs: RunLimits,
    /// What it remembers beyond the messages; nothing is said: nothing is remembered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemorySize>,
    /// Where its tools come from. Only a declared assistant has any: they start programs and reach addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<ToolSource>,
    /// Anything else the application wants to know of it.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
}

/// How much an assistant's runs may do.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunLimits {
    /// So many times the model is asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rounds: Option<usize>,
    /// So long a run may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_time: Option<Period>,
    /// So many tokens its model may use; 0: any number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u64>,
    /// So long one tool call may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_timeout: Option<Period>,
    /// So many bytes one tool may answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_result_bytes: Option<usize>,
    /// So many tool calls are made at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallel: Option<usize>,
}

/// How an assistant's sessions are kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lifetime {
    /// Idle for longer, a session expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<Period>,
    /// Expired or deleted for longer, it is purged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<Period>,
    /// How the messages of requests are read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<HistoryMode>,
    /// What becomes of a run when its client goes away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_disconnect: Option<OnDisconnect>,
}

/// What an assistant's model is shown.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShortTerm {
    /// At most so many turns; 0: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_history_turns: Option<usize>,
    /// At most so many tokens, estimated; 0: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
    /// Who writes a summary of what would be left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compact: Option<Compact>,
}

/// How much an assistant's sessions keep of tool results.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheSize {
    /// How long a result is good for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<Period>,
    /// How many a session keeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_entries: Option<usize>,
}

/// What an assistant remembers beyond the messages. Its sessions can not change that.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemorySize {
    /// Who shares it.
    #[serde(default)]
    pub scope: Scope,
    /// The group that shares it, for the scope `group`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// A memory goes after so long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<Period>,
    /// So many are kept; the one that was not used for the longest time goes first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_entries: Option<usize>,
    /// Whether the model is told what is recalled before it is asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inject: Option<bool>,
    /// At most so many memories.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// At most so many tokens of them, estimated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
}

impl MemorySize {
    /// What is wrong with it.
    pub fn check(&self) -> Result<()> {
        match (self.scope, &self.group) {
            (Scope::Group, None) => {
                Err(Error::invalid("memory.group", "the scope `group` needs the name of the group that shares it"))
            }
            (Scope::Group, Some(group)) => check_text(group)
                .map_err(|why| Error::invalid("memory.group", format!("not a valid name of a group: {why}"))),
            (_, Some(_)) => Err(Error::invalid("memory.group", "a group belongs to the scope `group`")),
            (_, None) => Ok(()),
        }
    }

    fn apply(&self, policy: &mut MemoryPolicy) {
        (policy.scope, policy.group) = (self.scope, self.group.clone());
        if let Some(retention) = self.retention {
            policy.retention = retention.duration();
        }
        policy.max_entries = self.max_entries.unwrap_or(policy.max_entries);
        policy.inject = self.inject.unwrap_or(policy.inject);
        policy.limit = self.limit.unwrap_or(policy.limit);
        policy.max_tokens = self.max_tokens.unwrap_or(policy.max_tokens);
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Assistant {
    /// Its policy: the house's, and what it says itself.
    pub fn policy(&self, house: &Policy) -> Policy {
        let mut policy = house.clone();
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
        let (ours, theirs) = (&mut policy.runs, &self.runs);
        ours.checkpoints = self.checkpoints.unwrap_or(ours.checkpoints);
        ours.max_rounds = theirs.max_rounds.unwrap_or(ours.max_rounds);
        ours.max_result_bytes = theirs.max_result_bytes.unwrap_or(ours.max_result_bytes);
        ours.parallel = theirs.parallel.unwrap_or(ours.parallel);
        if let Some(tokens) = theirs.max_tokens {
            ours.max_tokens = (tokens > 0).then_some(tokens);
        }
        if let Some(time) = theirs.max_time {
            ours.max_time = time.duration().unwrap_or(Duration::MAX);
        }
        if let Some(time) = theirs.tool_timeout {
            ours.tool_timeout = time.duration().unwrap_or(Duration::MAX);
        }
        policy
    }
}
