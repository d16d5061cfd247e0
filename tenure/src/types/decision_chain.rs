//! The hash chain over the review decisions of a session: the hash of a link, and the end of the chain.

use crate::types::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;

/// The BLAKE3 hash of a decision's canonical content.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Cow<'_, str>", into = "String")]
pub struct DecisionHash(pub [u8; 32]);

impl DecisionHash {
    /// The previous hash named by the first decision of a chain: all zeros.
    pub const START: Self = Self([0; 32]);
}

impl fmt::Display for DecisionHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for DecisionHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl TryFrom<Cow<'_, str>> for DecisionHash {
    type Error = Error;
    fn try_from(s: Cow<'_, str>) -> Result<Self> {
        let hash = blake3::Hash::from_hex(s.as_bytes());
        let hash = hash.map_err(|_| Error::invalid("previous", "a hash has 64 hexadecimal digits"))?;
        Ok(Self(*hash.as_bytes()))
    }
}

/// The end of a session's hash chain. Comparing it reveals decisions that were changed, removed or reordered
/// (D-064).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionChain {
    /// Number of linked decisions.
    pub count: u64,
    /// The hash of the last decision.
    pub hash: DecisionHash,
}

impl From<DecisionHash> for String {
    fn from(hash: DecisionHash) -> String {
        hash.to_string()
    }
}
