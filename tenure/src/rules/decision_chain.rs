//! How the hash chain over the decisions of a session is computed.

use crate::types::canonical_json::{Nulls, canonical};
use crate::types::decision_chain::{DecisionChain, DecisionHash};
use crate::types::entry::ReviewDecided;
use crate::types::entry::{Entry, Record};
use crate::types::id::{Seq, SessionId};
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

/// Follows the hash chain along a log.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChainCheck {
    chain: Option<DecisionChain>,
    /// Records up to this one came with an import.
    imported: Seq,
}

impl ChainCheck {
    /// Takes the next record. Returns a decision, or what is wrong with a fork's link to the chain of its parent.
    pub fn take(&mut self, session: &SessionId, record: &Record) -> (Option<AuditedDecision>, Option<String>) {
        match &record.entry {
            Entry::Created(created) => {
                self.imported = created.origin.as_ref().map_or(self.imported, |o| o.upto);
                let inherited = std::mem::replace(&mut self.chain, created.decisions);
                let differs = created.parent.is_some() && inherited.is_some() && inherited != created.decisions;
                // A fork that an older version made knows of no chain; it begins its own.
                let wrong = differs && created.decisions.is_some();
                (None, wrong.then(|| "the fork does not continue the hash chain of its parent".to_owned()))
            }
            Entry::ReviewDecided(decided) => {
                let expected = DecisionChain::link(self.chain);
                let broken = match decided.previous {
                    None if self.chain.is_some() => Some("the decision has no link in the hash chain".to_owned()),
                    Some(previous) if previous != expected => Some(
                        "the hash of the previous decision differs: one was changed, removed or reordered".to_owned(),
                    ),
                    _ => None,
                };
                self.chain = DecisionChain::after(self.chain, decided, record.at);
                let decision = AuditedDecision {
                    session: session.clone(),
                    seq: record.seq,
                    at: record.at,
                    decided: (**decided).clone(),
                    hash: decided.hash(record.at),
                    imported: record.seq <= self.imported,
                    broken: broken.clone(),
                };
                (Some(decision), broken)
            }
            _ => (None, None),
        }
    }

    pub fn chain(&self) -> Option<DecisionChain> {
        self.chain
    }
}

/// One decision of the audit trail.
#[derive(Clone, Debug, PartialEq)]
pub struct AuditedDecision {
    /// The session.
    pub session: SessionId,
    /// Its record.
    pub seq: Seq,
    /// When it was made.
    pub at: Timestamp,
    /// The decision.
    pub decided: ReviewDecided,
    /// The hash of its content.
    pub hash: DecisionHash,
    /// Whether it came with an import: then the exporting installation vouches for it, not this one.
    pub imported: bool,
    /// What is wrong with its place in the chain.
    pub broken: Option<String>,
}
