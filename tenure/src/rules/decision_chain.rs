//! How the hash chain over the decisions of a session is computed.

use crate::types::canonical_json::{Nulls, canonical};
use crate::types::decision_chain::{DecisionChain, DecisionHash};
use crate::types::entry::ReviewDecided;
use jiff::Timestamp;
use serde_json::json;

/// The version of the hashed content. It is hashed too, so that a later version cannot be confused with this one.
const CONTENT: &str = "tenure.decision.1";

impl DecisionChain {
    /// The chain after one more record. Decisions of older versions carry no link and leave it unchanged.
    pub(crate) fn after(chain: Option<Self>, decided: &ReviewDecided, at: Timestamp) -> Option<Self> {
        if decided.previous.is_none() {
            return chain;
        }
        Some(Self { count: chain.map_or(0, |c| c.count) + 1, hash: decided.hash(at) })
    }

    /// What the next decision names as the previous one.
    pub(crate) fn link(chain: Option<Self>) -> DecisionHash {
        chain.map_or(DecisionHash::START, |c| c.hash)
    }
}

impl ReviewDecided {
    /// The hash of its canonical content. It does not depend on the session's id: of the review only the record that opened it counts.
    pub fn hash(&self, at: Timestamp) -> DecisionHash {
        let review = match self.review.seq() {
            Some(seq) => json!(seq),
            None => json!(self.review),
        };
        let previous = self.previous.unwrap_or(DecisionHash::START);
        let content = json!([
            CONTENT,
            previous,
            review,
            self.step,
            self.decision,
            self.reviewer,
            self.notes,
            self.arguments,
            at.as_microsecond(),
        ]);
        DecisionHash(*blake3::hash(canonical(&content, Nulls::Keep).as_bytes()).as_bytes())
    }
}
