//! The index card of a session: all that listing, matching, sweeping and taking over need, without reading the log.

use crate::types::decision_chain::DecisionChain;
use crate::types::digest::{Mark, VisibleHash};
use crate::types::entry::{Claim, Origin, Parent};
use crate::types::id::{Key, Principal, Reach, RunId, Seq, SessionId, Tenant, User};
use crate::types::log_hash::LogHash;
use crate::types::status::Status;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What is known about a session besides its messages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SessionInfo {
    /// Its id.
    pub session_id: SessionId,
    /// When it began.
    pub created_at: Timestamp,
    /// When anything last happened in it.
    pub updated_at: Timestamp,
    /// The model it talks to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// A title for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// Words to find it by.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// Anything else the application wants to know of it.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
}

impl From<VisibleHash> for String {
    fn from(h: VisibleHash) -> String {
        h.to_string()
    }
}

/// Where that is in the log which a model is shown before the newest turns: with it, those can be shown without reading what lies between.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Front {
    /// The instructions that hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lead: Option<Lead>,
    /// The summary that holds: its record, and the last record that it covers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<(Seq, Seq)>,
}

/// Instructions, one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lead {
    /// The first record.
    pub from: Seq,
    /// The last one.
    pub to: Seq,
    /// How many messages there were with the last one.
    pub messages: usize,
    /// Whether they replaced those that the conversation began with.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replaced: bool,
}

/// A node's right to work on a run, until a moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The run.
    pub run: RunId,
    /// Who works on it.
    pub node: String,
    /// Until when.
    pub until: Timestamp,
}

impl Lease {
    pub(crate) fn new(run: &RunId, claim: &Claim) -> Self {
        Self { run: run.clone(), node: claim.node.clone(), until: claim.until }
    }
}

/// A question that a person has not answered yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenReview {
    /// Its record.
    pub seq: Seq,
    /// Who is asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// When it is decided without a person.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Timestamp>,
}

/// The end of a log: how long it is, and what is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEnd {
    /// The last record.
    pub seq: Seq,
    /// The hash over the log ([`Head::log`]).
    pub hash: Option<LogHash>,
}

/// The index card. All but `due_at` and the lease's end follows from the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// Whose data.
    pub tenant: Tenant,
    /// Who owns it.
    pub user: User,
    /// What is known about it.
    pub info: SessionInfo,
    /// The assistant it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assistant: Option<String>,
    /// The chat thread that shows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread: Option<String>,
    /// Where it stands.
    pub status: Status,
    /// Since when.
    pub status_at: Timestamp,
    /// The last message or run; idle time counts from here.
    pub active_at: Timestamp,
    /// When the sweep should look at it, at the latest. It may have become active since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub due_at: Option<Timestamp>,
    /// The first record of its own; earlier ones are its parent's.
    pub first: Seq,
    /// The last record.
    pub seq: Seq,
    /// The hash over its log. Sessions that were created before format 3 have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<LogHash>,
    /// How much has been said.
    pub mark: Mark,
    /// Bytes of the messages and media in its own log; absent if an older version created it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_bytes: Option<u64>,
    /// What comes before the newest turns, if that is known: not in forks, and not where a rewind has cut it off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub front: Option<Front>,
    /// What it was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Parent>,
    /// The run that has not ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// Who works on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<Lease>,
    /// What waits for a person.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reviews: Vec<OpenReview>,
    /// The end of the hash chain of decisions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decisions: Option<DecisionChain>,
    /// The export that it was imported from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
}

impl Head {
    /// The principal whose session it is, without a quota: for work on their behalf.
    pub(crate) fn owner(&self) -> Principal {
        Principal { tenant: self.tenant.clone(), user: self.user.clone(), reach: Reach::Own, quota: None }
    }

    /// As it is stored.
    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("cards have string keys and finite numbers only")
    }

    /// Where the session is.
    pub fn key(&self) -> Key {
        Key { tenant: self.tenant.clone(), session: self.info.session_id.clone() }
    }

    /// Where its log ends: what the next commit builds on.
    pub fn end(&self) -> LogEnd {
        LogEnd { seq: self.seq, hash: self.log }
    }

    /// What stores index for filters: each tag, each metadata field with a plain value, and what waits for a person.
    pub fn labels(&self) -> Vec<String> {
        let tags = self.info.tags.iter().map(|t| tag_label(t));
        let plain = self.info.metadata.iter().filter(|(_, v)| !v.is_object() && !v.is_array());
        let mut labels: Vec<_> = tags.chain(plain.map(|(k, v)| field_label(k, v))).collect();
        if !self.reviews.is_empty() {
            labels.push(Reviewing::Open.label());
        }
        labels.extend(self.reviews.iter().filter_map(|r| Some(Reviewing::Queue(r.queue.clone()?).label())));
        // Sessions whose decisions were all made by older versions have no chain. Clients cannot write the field.
        if self.decisions.is_some() || self.info.metadata.contains_key(DECISIONS) {
            labels.push(Reviewing::Decided.label());
        }
        labels.extend(self.origin.as_ref().map(|o| origin_label(&o.export)));
        labels.sort();
        labels.dedup();
        labels
    }

    /// The title as stores search it.
    pub fn folded_title(&self) -> String {
        self.info.title.as_deref().map(fold_case).unwrap_or_default()
    }
}

/// The metadata field with the decisions of people. It is derived from the log; clients cannot write it.
pub(crate) const DECISIONS: &str = "hitl_decisions";

/// How a session has to do with people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reviewing {
    /// Something waits for a person.
    Open,
    /// Something waits in this queue.
    Queue(String),
    /// A person has decided something.
    Decided,
}

impl Reviewing {
    /// Tags and fields begin with a quotation mark, so that this is none of them.
    pub(crate) fn label(&self) -> String {
        match self {
            Reviewing::Open => "review".to_owned(),
            Reviewing::Queue(queue) => bounded(format!("review:{}", Value::from(queue.as_str()))),
            Reviewing::Decided => "reviewed".to_owned(),
        }
    }
}

/// The label of an import: it has no quotation mark at its beginning either.
pub(crate) fn origin_label(export: &str) -> String {
    bounded(format!("origin:{export}"))
}

/// The label of a tag.
pub(crate) fn tag_label(tag: &str) -> String {
    bounded(Value::from(tag).to_string())
}

/// The label of a metadata field with a plain value.
pub(crate) fn field_label(key: &str, value: &Value) -> String {
    bounded(format!("{}:{value}", Value::from(key)))
}

/// Text in lower case and without what PostgreSQL can not store.
pub(crate) fn fold_case(s: &str) -> String {
    s.to_lowercase().replace('\0', "")
}

/// Long labels are indexed by their hash; an index entry must stay small.
fn bounded(label: String) -> String {
    if label.len() <= 512 { label } else { format!("#{}", blake3::hash(label.as_bytes()).to_hex()) }
}
