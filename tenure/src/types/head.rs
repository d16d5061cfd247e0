//! The head: the per-session index row. It holds everything that listing, matching, sweeping and taking over
//! need, so that none of them reads the log.

use crate::types::decision_chain::DecisionChain;
use crate::types::digest::LogDigest;
use crate::types::entry::{LeaseClaim, Origin, Parent};
use crate::types::id::{AccessScope, Principal, RunId, Seq, SessionId, SessionKey, Tenant, User};
use crate::types::log_hash::LogHash;
use crate::types::status::Status;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The descriptive fields of a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SessionInfo {
    /// The id of the session.
    pub session_id: SessionId,
    /// When the session was created.
    pub created_at: Timestamp,
    /// When the session last changed.
    pub updated_at: Timestamp,
    /// The model that the session uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// A human-readable title.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// Tags for filtering.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// Application-defined metadata.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
}

impl SessionInfo {
    /// Returns the context of the session, any JSON value: the value of `metadata.context`, or null.
    pub fn context(&self) -> &Value {
        self.metadata.get("context").unwrap_or(&Value::Null)
    }
}

/// Log positions of the prompt prefix (active instructions and summary). Lets a run load only the prefix and
/// the most recent turns instead of the whole log (D-014).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptPrefix {
    /// The active instructions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instructions: Option<InstructionSpan>,
    /// The active summary: its record, and the last record that it covers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<(Seq, Seq)>,
}

/// A contiguous range of records that hold instructions (system messages).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstructionSpan {
    /// The first record.
    pub from: Seq,
    /// The last record.
    pub to: Seq,
    /// Number of messages of the conversation up to and including the last of these.
    pub messages: usize,
    /// Whether these instructions replaced the initial ones.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replaced: bool,
}

/// A lease on a run: one node's exclusive right to execute it until a deadline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The id of the run.
    pub run: RunId,
    /// The node that executes the run.
    pub node: String,
    /// When the lease expires.
    pub until: Timestamp,
}

impl Lease {
    /// Creates the lease that a claim of a run grants.
    pub(crate) fn new(run: &RunId, claim: &LeaseClaim) -> Self {
        Self { run: run.clone(), node: claim.node.clone(), until: claim.until }
    }
}

/// Why a session is paused, and until when.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    /// A human-readable reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// When the session continues by itself, and its run with it. `None` means that it waits for a request or
    /// for a reviewer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
}

/// The index entry of an open review: one that is not decided yet (D-061).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenReview {
    /// The record that opened the review.
    pub seq: Seq,
    /// The queue of reviewers to which the request is addressed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// When the review is decided without a person. `None` means that it has no timeout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Timestamp>,
}

/// The end of a log: its length and a hash of its content. The two are what a commit is conditional on
/// (D-007).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEnd {
    /// The last record.
    pub seq: Seq,
    /// The hash over the log ([`Head::log_hash`]).
    pub hash: LogHash,
}

/// The index row of a session. Everything but `due_at` and the end of the lease is derived from the log and
/// can be rebuilt from it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// The tenant that the session belongs to.
    pub tenant: Tenant,
    /// The owner of the session.
    pub user: User,
    /// The descriptive fields.
    pub info: SessionInfo,
    /// The assistant that the session belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assistant: Option<String>,
    /// The chat thread that displays the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread: Option<String>,
    /// The current status.
    pub status: Status,
    /// When the status last changed.
    pub status_at: Timestamp,
    /// Why the session is paused, and until when. `None` means that it is not paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause: Option<Pause>,
    /// The time of the last message or run. Idle time is measured from here.
    pub active_at: Timestamp,
    /// The latest time at which the sweep should examine the session. The session may have become active
    /// since this was set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub due_at: Option<Timestamp>,
    /// The first record of the session's own log. Earlier records belong to its parent.
    pub first: Seq,
    /// The last record.
    pub seq: Seq,
    /// The hash over the log.
    pub log_hash: LogHash,
    /// The log digest at the end of the log.
    pub digest: LogDigest,
    /// Bytes of messages and media in the session's own log.
    pub stored_bytes: u64,
    /// The positions of the prompt prefix. `None` means that they are unknown: in a fork, after a rewind that
    /// discarded a part of the prefix, or if the instructions are not a contiguous range of records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_prefix: Option<PromptPrefix>,
    /// The parent and the position of the fork. `None` means that the session is not a fork.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Parent>,
    /// The run that has not ended yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// The lease of the node that executes the run. `None` means that no node does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<Lease>,
    /// The open reviews.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reviews: Vec<OpenReview>,
    /// The end of the hash chain of decisions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decisions: Option<DecisionChain>,
    /// The export that the session was imported from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
}

impl Head {
    /// Returns the owner as a principal without a quota, for background work on their behalf.
    pub(crate) fn owner(&self) -> Principal {
        Principal { tenant: self.tenant.clone(), user: self.user.clone(), scope: AccessScope::Own, quota: None }
    }

    /// Serializes the head to the JSON text that stores persist.
    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("heads have string keys and finite numbers only")
    }

    /// Returns when a paused session continues by itself. `None` means that it is not paused, or waits for a
    /// request or a reviewer.
    pub fn paused_until(&self) -> Option<Timestamp> {
        self.pause.as_ref()?.until
    }

    /// Returns the key of the session.
    pub fn key(&self) -> SessionKey {
        SessionKey { tenant: self.tenant.clone(), session: self.info.session_id.clone() }
    }

    /// Returns the end of the log, on which the next commit is conditional.
    pub fn end(&self) -> LogEnd {
        LogEnd { seq: self.seq, hash: self.log_hash }
    }

    /// Returns the labels that stores index for filters: tags, metadata fields with a scalar value, open
    /// reviews and their queues, past decisions, and the origin of an import (D-030).
    pub fn labels(&self) -> Vec<String> {
        let tags = self.info.tags.iter().map(|t| tag_label(t));
        let scalars = self.info.metadata.iter().filter(|(_, v)| !v.is_object() && !v.is_array());
        let mut labels: Vec<_> = tags.chain(scalars.map(|(k, v)| field_label(k, v))).collect();
        if !self.reviews.is_empty() {
            labels.push(ReviewIndexLabel::Open.label());
        }
        labels.extend(self.reviews.iter().filter_map(|r| Some(ReviewIndexLabel::Queue(r.queue.clone()?).label())));
        // Sessions whose decisions are all unlinked have no chain. Clients cannot write the field.
        if self.decisions.is_some() || self.info.metadata.contains_key(DECISIONS) {
            labels.push(ReviewIndexLabel::Decided.label());
        }
        labels.extend(self.origin.as_ref().map(|o| origin_label(&o.export)));
        labels.sort();
        labels.dedup();
        labels
    }

    /// Returns the case-folded title that stores search.
    pub fn folded_title(&self) -> String {
        self.info.title.as_deref().map(fold_case).unwrap_or_default()
    }
}

/// The metadata field that lists review decisions. It is derived from the log; clients cannot write it
/// (D-065).
pub(crate) const DECISIONS: &str = "hitl_decisions";

/// A label for the review state of a session, used by filters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReviewIndexLabel {
    /// The session has an open review.
    Open,
    /// The session has an open review in this queue.
    Queue(String),
    /// The session has at least one review decision.
    Decided,
}

impl ReviewIndexLabel {
    /// Returns the index label. Labels of tags and metadata fields start with a quotation mark and this one
    /// does not, so they cannot collide.
    pub(crate) fn label(&self) -> String {
        match self {
            ReviewIndexLabel::Open => "review".to_owned(),
            ReviewIndexLabel::Queue(queue) => bounded(format!("review:{}", Value::from(queue.as_str()))),
            ReviewIndexLabel::Decided => "reviewed".to_owned(),
        }
    }
}

/// Returns the label of an import. It does not start with a quotation mark, so it cannot collide with the
/// label of a tag or a metadata field.
pub(crate) fn origin_label(export: &str) -> String {
    bounded(format!("origin:{export}"))
}

/// Returns the label of a tag.
pub(crate) fn tag_label(tag: &str) -> String {
    bounded(Value::from(tag).to_string())
}

/// Returns the label of a metadata field with a scalar value.
pub(crate) fn field_label(key: &str, value: &Value) -> String {
    bounded(format!("{}:{value}", Value::from(key)))
}

/// Converts text to lower case and removes NUL characters, which PostgreSQL cannot store.
pub(crate) fn fold_case(s: &str) -> String {
    s.to_lowercase().replace('\0', "")
}

/// Replaces labels of more than 512 bytes by their hash, to keep index entries small.
fn bounded(label: String) -> String {
    if label.len() <= 512 { label } else { format!("#{}", blake3::hash(label.as_bytes()).to_hex()) }
}
