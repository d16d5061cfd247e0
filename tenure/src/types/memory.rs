//! Long-term memories: their API representation, and the value that is stored for each.

use crate::types::id::{Seq, SessionId, User};
use crate::types::policy::MemoryScope;
use crate::types::vector::Vector;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// When a memory is injected into prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// A statement that is injected when it is relevant to the question.
    #[default]
    Fact,
    /// How the user wants to be answered, such as "always use metric units". Injected in every turn.
    Preference,
}

impl MemoryKind {
    fn is_fact(&self) -> bool {
        *self == MemoryKind::Fact
    }
}

/// A memory: a statement that is remembered beyond the messages of a session.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Memory {
    /// The id of the memory, derived from its text: equal texts have equal ids.
    pub id: String,
    /// The text of the memory.
    pub text: String,
    /// When the memory is injected into prompts.
    pub kind: MemoryKind,
    /// Which sessions share the memory.
    pub scope: MemoryScope,
    /// The session that the memory belongs to, with the scope `session`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// The user that the memory belongs to, with the scope `user`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<User>,
    /// The group that the memory belongs to, with the scope `group`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The assistant for which the memory was first stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub assistant: Option<String>,
    /// The sources that the memory came from.
    pub sources: Vec<MemorySource>,
    /// Application-defined metadata.
    pub metadata: Map<String, Value>,
    /// When the memory was said or became true: the timestamp that it was stored with, else when it was last stored.
    pub created_at: Timestamp,
    /// When the memory was last recalled.
    pub used_at: Timestamp,
    /// How often the memory was recalled.
    pub uses: u64,
    /// When the memory expires. `None` means never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
    /// The id of the newer memory that supersedes this one: the memory is still found, after the newer one, but no
    /// longer injected into prompts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub superseded_by: Option<String>,
    /// The id of the dream (a run of memory consolidation) that promoted the memory to this scope.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dream: Option<String>,
}

/// The origin of a memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemorySource {
    /// The session that the memory came from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// The messages of that session, by their records. Empty means that they were not named.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub messages: Vec<Seq>,
    /// The user who stored the memory outside of any session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<User>,
}

/// The stored value of a memory (D-071).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct MemoryRecord {
    pub text: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assistant: Option<String>,
    #[serde(default, skip_serializing_if = "MemoryKind::is_fact")]
    pub kind: MemoryKind,
    /// Records of messages, by session id, or by `@` and the name of a user.
    #[serde(default)]
    pub sources: BTreeMap<String, Vec<Seq>>,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vector: Option<Vector>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dream: Option<String>,
    /// When the memory was stored, if it was stored with a timestamp of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_at: Option<Timestamp>,
    /// The id of the memory that supersedes this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub superseded_by: Option<String>,
}
