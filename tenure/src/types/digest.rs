//! A digest of the messages up to a point of a log: counters and hashes from which they can be continued.

use crate::types::message::Role;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A running hash over the visible messages of a session (128 bits of BLAKE3): equal hashes, equal conversations.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VisibleHash(pub [u8; 16]);

impl fmt::Display for VisibleHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for VisibleHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl TryFrom<String> for VisibleHash {
    type Error = std::num::ParseIntError;
    fn try_from(s: String) -> Result<Self, Self::Error> {
        Ok(Self(u128::from_str_radix(&s, 16)?.to_be_bytes()))
    }
}

/// How much has been said: enough to go on from here without reading what came before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Number of messages.
    pub messages: usize,
    /// Number of turns: user messages that do not follow another user message.
    pub turns: usize,
    /// Number of visible messages.
    pub visible: usize,
    /// Who spoke last, system messages apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<Role>,
    /// The hash over the visible messages.
    pub hash: VisibleHash,
    /// The hash of the last user message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub question: Option<VisibleHash>,
    /// The hash of the last answer together with its question: what a client that sends the newest turns only is found by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exchange: Option<VisibleHash>,
    /// The ids of the tool calls of the last turn, at most [`MAX_MARK_CALLS`], the newest last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<String>,
}

impl Mark {
    /// What a session is looked up by besides its whole conversation: its last exchange, and the tool calls of its last turn.
    pub fn match_keys(&self) -> Vec<VisibleHash> {
        self.exchange.into_iter().chain(self.calls.iter().map(|id| VisibleHash::of_call(id))).collect()
    }
}

impl VisibleHash {
    /// What a tool call is looked up by.
    pub(crate) fn of_call(id: &str) -> Self {
        let mut hash = blake3::Hasher::new();
        hash.update(b"tool call\0").update(id.as_bytes());
        let mut first = [0; 16];
        first.copy_from_slice(&hash.finalize().as_bytes()[..16]);
        Self(first)
    }
}

/// A session can be found by so many tool calls of its last turn.
pub const MAX_MARK_CALLS: usize = 32;
