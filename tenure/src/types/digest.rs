//! The log digest: counters and hashes over the messages up to a position of a log, which can be advanced
//! without reading earlier messages.

use crate::types::message::Role;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A running hash over the visible messages of a session (128 bits of BLAKE3). Equal hashes mean equal
/// conversations, except for media, which are not hashed because clients often omit them (D-024).
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

/// A log digest. It holds everything that is needed to continue from its position without reading earlier
/// messages (D-005).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogDigest {
    /// Number of messages.
    pub messages: usize,
    /// Number of turns: user messages that do not follow another user message.
    pub turns: usize,
    /// Number of visible messages.
    pub visible: usize,
    /// The role of the last message, ignoring system messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<Role>,
    /// The hash over all visible messages.
    pub hash: VisibleHash,
    /// The hash of the last user message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub question: Option<VisibleHash>,
    /// The hash of the last answer together with its question. Finds the session of a client that sends only
    /// the newest turns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exchange: Option<VisibleHash>,
    /// The ids of the tool calls of the last turn, newest last: at most [`MAX_DIGEST_CALLS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<String>,
}

impl LogDigest {
    /// Returns the keys by which a session is looked up, besides the hash of its whole conversation: its last
    /// exchange and the tool calls of its last turn (D-025).
    pub fn match_keys(&self) -> Vec<VisibleHash> {
        self.exchange.into_iter().chain(self.calls.iter().map(|id| VisibleHash::of_call(id))).collect()
    }
}

impl VisibleHash {
    /// Computes the lookup key of a tool call.
    pub(crate) fn of_call(id: &str) -> Self {
        let mut hash = blake3::Hasher::new();
        hash.update(b"tool call\0").update(id.as_bytes());
        let mut first = [0; 16];
        first.copy_from_slice(&hash.finalize().as_bytes()[..16]);
        Self(first)
    }
}

/// Maximum number of tool calls of the last turn by which a session can be looked up.
pub const MAX_DIGEST_CALLS: usize = 32;

impl From<VisibleHash> for String {
    fn from(h: VisibleHash) -> String {
        h.to_string()
    }
}
