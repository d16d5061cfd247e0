//! Memories as they are stored and shown.

use crate::types::id::{Seq, SessionId, User};
use crate::types::policy::Scope;
use crate::types::vector::Vector;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Something that is remembered.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// Its id: the same words have the same one.
    pub id: String,
    /// The words.
    pub text: String,
    /// Who shares it.
    pub scope: Scope,
    /// The session whose it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// The user whose it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<User>,
    /// The group whose it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The assistant that it was told to first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub assistant: Option<String>,
    /// Where it came from.
    pub sources: Vec<Source>,
    /// Anything else.
    pub metadata: Map<String, Value>,
    /// When it was said last.
    pub created_at: Timestamp,
    /// When it was recalled last.
    pub used_at: Timestamp,
    /// How often it was.
    pub uses: u64,
    /// When its time is over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
    /// The dream that brought it here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dream: Option<String>,
}

/// Where a memory came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Source {
    /// The session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// Its messages, by their records; none: it was not said which.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub messages: Vec<Seq>,
    /// Who said it outside of any session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<User>,
}

/// What an item holds besides its text.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Kept {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assistant: Option<String>,
    /// By session, or by `@` and a user.
    #[serde(default)]
    pub sources: BTreeMap<String, Vec<Seq>>,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vector: Option<Vector>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dream: Option<String>,
    /// The words, if they are not what it can be found by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}
