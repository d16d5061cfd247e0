//! Settings: the policy of an assistant's sessions, and the limits of a [`crate::Tenure`] as a whole.

use crate::types::entry::Decision;
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use crate::types::human_duration::HumanDuration;
use crate::types::template::{check_condition, may_hold};
use crate::types::tool::Tool;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::time::Duration;

/// Whether a run continues when the client that waits for it disconnects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnDisconnect {
    /// The run continues to its end.
    #[default]
    Finish,
    /// The run is cancelled. The part of the answer received until then is stored.
    Cancel,
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The part of a history that a model is shown. Messages outside the window stay in the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Maximum number of turns, the newest ones. `None` means unlimited.
    pub max_turns: Option<usize>,
    /// Maximum number of tokens, estimated (see [`history()`](crate::history())). `None` means unlimited. The
    /// newest turn is always shown.
    pub max_tokens: Option<usize>,
}

/// Whether the oldest turns are summarized when a history exceeds its window, and by which model. Serialized
/// as `false` (the window drops them), `true` (summarized by the session's model), or the name of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "CompactionText", into = "CompactionText")]
pub enum CompactionPolicy {
    /// No summaries are written.
    #[default]
    Off,
    /// The session's own model writes the summary.
    On,
    /// The named model writes the summary.
    With(String),
}

/// The serialized form of [`CompactionPolicy`].
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "true, false or the name of a model")]
enum CompactionText {
    Switch(bool),
    Model(String),
}

impl From<CompactionPolicy> for CompactionText {
    fn from(compact: CompactionPolicy) -> Self {
        match compact {
            CompactionPolicy::Off => CompactionText::Switch(false),
            CompactionPolicy::On => CompactionText::Switch(true),
            CompactionPolicy::With(model) => CompactionText::Model(model),
        }
    }
}

impl TryFrom<CompactionText> for CompactionPolicy {
    type Error = Error;
    fn try_from(written: CompactionText) -> Result<Self> {
        match written {
            CompactionText::Switch(false) => Ok(CompactionPolicy::Off),
            CompactionText::Switch(true) => Ok(CompactionPolicy::On),
            CompactionText::Model(name) => match crate::types::id::check_text(&name) {
                Ok(()) => Ok(CompactionPolicy::With(name)),
                Err(reason) => Err(Error::invalid("", format!("not a valid model name: {reason}"))),
            },
        }
    }
}

/// The lifetime and the number of cached tool results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachePolicy {
    /// Time after which a cached result expires.
    pub ttl: Duration,
    /// Maximum number of results per session; the least recently used ones are evicted first.
    pub max_entries: usize,
}

impl Default for CachePolicy {
    fn default() -> Self {
        Self { ttl: Duration::from_secs(60 * 60), max_entries: 256 }
    }
}

/// When a run sets checkpoints. Except with `Manual`, there is also one after each completed turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum CheckpointPolicy {
    /// After each tool call.
    #[default]
    Tool,
    /// After each step: a model's answer and all the calls that it made.
    Step,
    /// When the last checkpoint is older than this.
    Every(Duration),
    /// Only on request.
    Manual,
}

impl From<CheckpointPolicy> for String {
    fn from(c: CheckpointPolicy) -> String {
        match c {
            CheckpointPolicy::Tool => "tool".to_owned(),
            CheckpointPolicy::Step => "step".to_owned(),
            CheckpointPolicy::Manual => "manual".to_owned(),
            CheckpointPolicy::Every(d) => HumanDuration::of(d).to_string(),
        }
    }
}

impl TryFrom<String> for CheckpointPolicy {
    type Error = Error;
    fn try_from(s: String) -> Result<Self> {
        match s.as_str() {
            "tool" => Ok(CheckpointPolicy::Tool),
            "step" => Ok(CheckpointPolicy::Step),
            "manual" => Ok(CheckpointPolicy::Manual),
            other => match other.parse::<HumanDuration>() {
                Ok(p) if p.duration().is_some_and(|d| !d.is_zero()) => {
                    Ok(CheckpointPolicy::Every(p.duration().unwrap_or_default()))
                }
                _ => Err(Error::invalid(
                    "",
                    format!("{s} is not valid; use tool, step, manual or a duration such as 60s", s = excerpt(s)),
                )),
            },
        }
    }
}

/// A rule that selects tool calls that need a reviewer's approval.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReviewRule {
    /// The name of the tool, or a pattern such as `refund_*`.
    pub tool: String,
    /// A condition on the arguments of the call, such as `amount > 100`. `None` means that the rule applies to
    /// every call. A condition that cannot be evaluated holds (D-134).
    #[serde(default, rename = "when", skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
    /// The queue of reviewers to which the request is addressed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// How long to wait for a decision. `None` means without limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<HumanDuration>,
    /// The decision that applies when the timeout expires.
    #[serde(default = "rejected")]
    pub on_timeout: Decision,
}

/// The default of [`ReviewRule::on_timeout`].
fn rejected() -> Decision {
    Decision::Rejected
}

impl ReviewRule {
    /// Returns true if the rule applies to a call. Arguments that are not an object (`None`) satisfy every
    /// condition.
    pub fn applies(&self, tool: &Tool, arguments: Option<&Map<String, Value>>) -> bool {
        let may_apply =
            |condition: &String| arguments.is_none_or(|arguments| may_hold(condition, arguments, &tool.parameters));
        matches_pattern(&self.tool, &tool.name) && self.condition.as_ref().is_none_or(may_apply)
    }

    /// Checks the condition.
    pub fn check(&self) -> Result<()> {
        let condition = self.condition.as_deref().map_or(Ok(()), check_condition);
        condition.map_err(|reason| Error::invalid("when", format!("not a valid condition: {reason}")))
    }
}

/// Returns true if a name matches a pattern in which `*` stands for any number of characters.
pub fn matches_pattern(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut remaining) = name.strip_prefix(start) else { return false };
    let mut parts = rest.split('*').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return remaining.ends_with(part);
        }
        match remaining.find(part) {
            Some(offset) => remaining = &remaining[offset + part.len()..],
            None => return false,
        }
    }
    true
}

/// The limits and rules of a run. Each limit ends the run with its own error code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunPolicy {
    /// When checkpoints are set.
    pub checkpoints: CheckpointPolicy,
    /// The tool calls that need a reviewer's approval.
    pub review: Vec<ReviewRule>,
    /// Maximum number of model requests (`too_many_rounds`).
    pub max_rounds: usize,
    /// Maximum duration of the run, excluding the time spent waiting for reviewers (`out_of_time`).
    pub max_time: Duration,
    /// Maximum number of tokens, as counted by the model server (`out_of_tokens`). `None` means unlimited.
    pub max_tokens: Option<u64>,
    /// Maximum duration of one tool call (`tool_timeout`, D-053).
    pub tool_timeout: Duration,
    /// Maximum size of one tool result, in bytes (`result_too_large`).
    pub max_result_bytes: usize,
    /// Maximum number of concurrent tool calls.
    pub parallel: usize,
    /// Maximum time for which a run waits, in one model call, for a model server that is rate limited or
    /// overloaded. If it would have to wait longer, it pauses or fails (D-136).
    pub retry_wait: Duration,
    /// Maximum duration of one pause of a run because of a rate limit. Zero means that runs do not pause but
    /// fail.
    pub max_pause: Duration,
}

impl Default for RunPolicy {
    fn default() -> Self {
        Self {
            checkpoints: CheckpointPolicy::Tool,
            review: Vec::new(),
            max_rounds: 50,
            max_time: Duration::from_secs(60 * 60),
            max_tokens: None,
            tool_timeout: Duration::from_secs(120),
            max_result_bytes: 1 << 20,
            parallel: 8,
            retry_wait: Duration::from_secs(5),
            max_pause: Duration::from_secs(60 * 60),
        }
    }
}

/// Which sessions share memories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryScope {
    /// Stateless: nothing is remembered, and the model is shown only the current request.
    None,
    /// Each session has its own memories, which are deleted with it.
    #[default]
    Session,
    /// All sessions of a user share their memories.
    User,
    /// All assistants of a group share their memories.
    Group,
}

impl MemoryScope {
    /// Returns the serialized name of the scope.
    pub fn as_str(self) -> &'static str {
        match self {
            MemoryScope::None => "none",
            MemoryScope::Session => "session",
            MemoryScope::User => "user",
            MemoryScope::Group => "group",
        }
    }
}

/// Long-term memory beyond the messages of a session: who shares it, its limits, and how much is injected.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryPolicy {
    /// Which sessions share the memories.
    pub scope: MemoryScope,
    /// The group that shares the memories, with the scope `group`.
    pub group: Option<String>,
    /// Time after which a memory expires. `None` means never.
    pub retention: Option<Duration>,
    /// Maximum number of memories; the least recently used ones are evicted first.
    pub max_entries: usize,
    /// Whether recalled memories are injected into the prompt before the model is called.
    pub inject: bool,
    /// Maximum number of memories injected.
    pub limit: usize,
    /// Maximum number of tokens of injected memories (estimated).
    pub max_tokens: usize,
}

impl Default for MemoryPolicy {
    fn default() -> Self {
        Self {
            scope: MemoryScope::Session,
            group: None,
            retention: None,
            max_entries: 1000,
            inject: true,
            limit: 8,
            max_tokens: 512,
        }
    }
}

/// All settings of an assistant's sessions.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Idle time after which an active session expires. `None` means never.
    pub ttl: Option<Duration>,
    /// Time after which an expired or deleted session is purged. `None` means never.
    pub retention: Option<Duration>,
    /// How the messages of a request are reconciled with the stored ones, if the request does not name a
    /// mode. `None` means the default of the caller.
    pub history: Option<HistoryMode>,
    /// The part of the history that a model is shown.
    pub window: Window,
    /// Whether turns beyond the window are summarized, and by which model.
    pub compact: CompactionPolicy,
    /// The cache of tool results.
    pub cache: CachePolicy,
    /// The limits and rules of runs.
    pub runs: RunPolicy,
    /// Long-term memory.
    pub memory: MemoryPolicy,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            ttl: Some(7 * DAY),
            retention: Some(30 * DAY),
            history: None,
            window: Window { max_turns: Some(50), max_tokens: None },
            compact: CompactionPolicy::Off,
            cache: CachePolicy::default(),
            runs: RunPolicy::default(),
            memory: MemoryPolicy::default(),
        }
    }
}

impl Policy {
    /// Returns true if the model is shown only the current request: the memory scope is `none` (D-130).
    pub fn is_stateless(&self) -> bool {
        self.memory.scope == MemoryScope::None
    }

    /// Applies what follows from the memory scope: a stateless session needs no more than its current turn,
    /// and no summaries.
    pub(crate) fn with_scope_applied(mut self) -> Self {
        if self.is_stateless() {
            self.window = Window { max_turns: Some(1), max_tokens: None };
            self.compact = CompactionPolicy::Off;
        }
        self
    }
}

/// Limits that protect the store and the process. Each has a name, and the error for exceeding a limit
/// contains it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum size of one message, including media, in bytes.
    pub max_message_bytes: usize,
    /// Maximum number of messages in one append or import.
    pub max_messages: usize,
    /// Maximum size of title, tags and metadata together, in bytes.
    pub max_info_bytes: usize,
    /// Maximum size of one tool result or other key-value item, in bytes.
    pub max_item_bytes: usize,
    /// Maximum size of one memory, in bytes.
    pub max_memory_bytes: usize,
    /// Maximum number of sessions in one page of a list.
    pub max_page: usize,
    /// Maximum number of sessions that a list may skip (`offset`).
    pub max_offset: usize,
    /// Maximum number of sessions that one list request scans for a filter that no index serves, such as a
    /// substring of a title. The page then ends early and contains a cursor to continue from.
    pub max_scan: usize,
    /// Maximum number of queued reads per principal, beyond those that run concurrently (lists and searches,
    /// not the reads of a turn).
    pub max_waiting_reads: usize,
    /// Maximum number of sessions that one pass of the sweep processes.
    pub max_sweep: usize,
    /// Maximum number of requests that wait for one busy session.
    pub max_queue: usize,
    /// Maximum number of retries after a conflict with another writer.
    pub max_retries: usize,
    /// Duration of a lease: how long a node may execute a run without renewing its claim. After that, another
    /// node may take the run over.
    pub lease: Duration,
    /// Maximum time that a request waits for another node that executes a run in its session.
    pub max_wait: Duration,
    /// Maximum time a streaming client may apply backpressure before it is disconnected. The answer is still
    /// completed and stored.
    pub max_stall: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_message_bytes: 64 << 20,
            max_messages: 200_000,
            max_info_bytes: 256 << 10,
            max_item_bytes: 16 << 20,
            max_memory_bytes: 16 << 10,
            max_page: 100,
            max_offset: 1_000,
            max_scan: 5_000,
            max_waiting_reads: 1_024,
            max_sweep: 1_000,
            max_queue: 16,
            max_retries: 16,
            lease: Duration::from_secs(30),
            max_wait: Duration::from_secs(600),
            max_stall: Duration::from_secs(60),
        }
    }
}

/// How the messages of a request are reconciled with the stored ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HistoryMode {
    /// Infers the intent from the messages.
    #[default]
    Auto,
    /// The messages are the whole history. Stored messages that differ are rewound.
    Full,
    /// Like `Auto`, but never rewinds anything.
    Append,
}
