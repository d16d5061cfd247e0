//! What can be set: for an assistant's sessions, and for the house as a whole.

use crate::types::entry::Decision;
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use crate::types::human_duration::Period;

use serde::{Deserialize, Serialize};
use std::time::Duration;

impl From<Period> for String {
    fn from(p: Period) -> String {
        p.to_string()
    }
}

/// What becomes of a run when the client that waits for it goes away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnDisconnect {
    /// It goes on to its end.
    #[default]
    Finish,
    /// It is cancelled; what was said until then is kept.
    Cancel,
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// How much of a history a model is shown. What is left out stays in the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// At most so many turns, the newest.
    pub max_turns: Option<usize>,
    /// At most so many tokens, estimated (see [`crate::rules::prompt()`]); the newest turn is always shown.
    pub max_tokens: Option<usize>,
}

/// Who writes a summary of the oldest turns when a history is over its window: `false` (nobody: the window cuts), `true` (the model
/// of the session), or the name of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub enum Compact {
    /// Nobody.
    #[default]
    Off,
    /// The model of the session.
    On,
    /// This model.
    With(String),
}

/// How people write it.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "it is true, false or the name of a model")]
enum Written {
    Switch(bool),
    Model(String),
}

impl From<Compact> for Written {
    fn from(compact: Compact) -> Self {
        match compact {
            Compact::Off => Written::Switch(false),
            Compact::On => Written::Switch(true),
            Compact::With(model) => Written::Model(model),
        }
    }
}

impl TryFrom<Written> for Compact {
    type Error = Error;
    fn try_from(written: Written) -> Result<Self> {
        match written {
            Written::Switch(false) => Ok(Compact::Off),
            Written::Switch(true) => Ok(Compact::On),
            Written::Model(name) => match crate::types::id::check_text(&name) {
                Ok(()) => Ok(Compact::With(name)),
                Err(why) => Err(Error::invalid("", format!("not the name of a model: {why}"))),
            },
        }
    }
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

/// When a run sets checkpoints. There is one after each completed turn too, unless they are set by hand only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Checkpoints {
    /// After each tool call.
    #[default]
    Tool,
    /// After each step: a model's answer and all that it called for.
    Step,
    /// When the last one is so old.
    Every(Duration),
    /// Never: only when somebody asks for one.
    Manual,
}

impl From<Checkpoints> for String {
    fn from(c: Checkpoints) -> String {
        match c {
            Checkpoints::Tool => "tool".to_owned(),
            Checkpoints::Step => "step".to_owned(),
            Checkpoints::Manual => "manual".to_owned(),
            Checkpoints::Every(d) => Period::of(d).to_string(),
        }
    }
}

impl TryFrom<String> for Checkpoints {
    type Error = Error;
    fn try_from(s: String) -> Result<Self> {
        match s.as_str() {
            "tool" => Ok(Checkpoints::Tool),
            "step" => Ok(Checkpoints::Step),
            "manual" => Ok(Checkpoints::Manual),
            other => match other.parse::<Period>() {
                Ok(p) if p.duration().is_some_and(|d| !d.is_zero()) => {
                    Ok(Checkpoints::Every(p.duration().unwrap_or_default()))
                }
                _ => Err(Error::invalid(
                    "",
                    format!("{s} is not tool, step, manual or a time such as 60s", s = excerpt(s)),
                )),
            },
        }
    }
}

/// A tool call that a person must allow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReviewRule {
    /// The tool's name, or a pattern: `refund_*`.
    pub tool: String,
    /// Who is asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// How long to wait for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Period>,
    /// What is decided then.
    #[serde(default = "rejected")]
    pub on_timeout: Decision,
}

fn rejected() -> Decision {
    Decision::Rejected
}

impl ReviewRule {
    /// Whether it is for this tool.
    pub fn covers(&self, tool: &str) -> bool {
        matches_pattern(&self.tool, tool)
    }
}

/// Whether a name fits a pattern in which `*` stands for anything.
pub fn matches_pattern(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut left) = name.strip_prefix(start) else { return false };
    let mut parts = rest.split('*').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return left.ends_with(part);
        }
        match left.find(part) {
            Some(at) => left = &left[at + part.len()..],
            None => return false,
        }
    }
    true
}

/// What a run may do, and how much of it. Each limit ends the run with a code of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunPolicy {
    /// When checkpoints are set.
    pub checkpoints: Checkpoints,
    /// What a person must allow.
    pub review: Vec<ReviewRule>,
    /// So many times the model is asked (`too_many_rounds`).
    pub max_rounds: usize,
    /// So long the run may take, waiting for people apart (`out_of_time`).
    pub max_time: Duration,
    /// So many tokens the model may use, as its server counts them (`out_of_tokens`). `None`: any number.
    pub max_tokens: Option<u64>,
    /// So long one tool call may take (`tool_timeout`).
    pub tool_timeout: Duration,
    /// So many bytes one tool may answer (`result_too_large`).
    pub max_result_bytes: usize,
    /// So many tool calls are made at once.
    pub parallel: usize,
}

impl Default for RunPolicy {
    fn default() -> Self {
        Self {
            checkpoints: Checkpoints::Tool,
            review: Vec::new(),
            max_rounds: 50,
            max_time: Duration::from_secs(60 * 60),
            max_tokens: None,
            tool_timeout: Duration::from_secs(120),
            max_result_bytes: 1 << 20,
            parallel: 8,
        }
    }
}

/// Who shares what is remembered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Nothing is remembered.
    None,
    /// Each session has its own memories, which go with it.
    #[default]
    Session,
    /// All sessions of a user share them.
    User,
    /// All assistants of a group share them.
    Group,
}

impl Scope {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Scope::None => "none",
            Scope::Session => "session",
            Scope::User => "user",
            Scope::Group => "group",
        }
    }
}

/// What is remembered beyond the messages, and how much of it a model is told.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryPolicy {
    /// Who shares it.
    pub scope: Scope,
    /// The group that shares it, if a group does.
    pub group: Option<String>,
    /// A memory goes after so long. `None`: never.
    pub retention: Option<Duration>,
    /// So many are kept; the one that was not used for the longest time goes first.
    pub max_entries: usize,
    /// Whether the model is told what is recalled before it is asked.
    pub inject: bool,
    /// At most so many.
    pub limit: usize,
    /// At most so many tokens, estimated.
    pub max_tokens: usize,
}

impl Default for MemoryPolicy {
    fn default() -> Self {
        let (scope, group, retention) = (Scope::None, None, None);
        Self { scope, group, retention, max_entries: 1000, inject: true, limit: 8, max_tokens: 512 }
    }
}

/// Everything that can be set for the sessions of an assistant.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// An active session that is idle for longer expires. `None`: never.
    pub ttl: Option<Duration>,
    /// An expired or deleted session is purged after so long. `None`: never.
    pub retention: Option<Duration>,
    /// How to read the messages of a request that does not say so.
    pub history: Option<HistoryMode>,
    /// What a model is shown.
    pub window: Window,
    /// Who writes a summary of what would be left out.
    pub compact: Compact,
    /// The cache of tool results.
    pub cache: CachePolicy,
    /// Their runs.
    pub runs: RunPolicy,
    /// What is remembered beyond their messages.
    pub memory: MemoryPolicy,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            ttl: Some(7 * DAY),
            retention: Some(30 * DAY),
            history: None,
            window: Window { max_turns: Some(50), max_tokens: None },
            compact: Compact::Off,
            cache: CachePolicy::default(),
            runs: RunPolicy::default(),
            memory: MemoryPolicy::default(),
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
    /// Bytes of one memory.
    pub max_memory_bytes: usize,
    /// Sessions in one page of a list.
    pub max_page: usize,
    /// Sessions that one list leaves out at its beginning.
    pub max_offset: usize,
    /// Sessions that one list looks at for what no index serves, such as a part of a title. Then it ends early and says where to go on.
    pub max_scan: usize,
    /// Reads of one principal that wait because as many as it may have are under way (lists, searches: not those of a turn).
    pub max_waiting_reads: usize,
    /// Sessions that one pass of the sweep works on.
    pub max_sweep: usize,
    /// Requests that wait for one busy session.
    pub max_queue: usize,
    /// Times a step is tried again after another writer was first.
    pub max_retries: usize,
    /// How long a node may work on a run without saying that it still does. After that another may take it over.
    pub lease: Duration,
    /// How long a request waits for another node that works on its session.
    pub max_wait: Duration,
    /// How long whoever listens to an answer may take nothing of it, before it is finished without them.
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

/// How to read the messages of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HistoryMode {
    /// Infer it from the messages.
    #[default]
    Auto,
    /// They are the whole history: what is stored and differs is rewound.
    Full,
    /// As `Auto`, but nothing is ever rewound.
    Append,
}
