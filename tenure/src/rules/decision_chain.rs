//! Computes and verifies the hash chain over the review decisions of a session (D-064).

use crate::types::canonical_json::{Nulls, canonical};
use crate::types::decision_chain::{DecisionChain, DecisionHash};
use crate::types::entry::ReviewDecided;
use crate::types::entry::{Entry, Record};
use crate::types::id::{Seq, SessionId};
use jiff::Timestamp;
use serde_json::json;

/// The version of the hashed content. It is hashed too, so that content of a later version cannot be confused
/// with this one.
const CONTENT: &str = "tenure.decision.1";

impl DecisionChain {
    /// Returns the chain after one more decision. A decision without a link leaves the chain
    /// unchanged.
    pub(crate) fn after(chain: Option<Self>, decided: &ReviewDecided, at: Timestamp) -> Option<Self> {
        if decided.previous.is_none() {
            return chain;
        }
        Some(Self { count: chain.map_or(0, |c| c.count) + 1, hash: decided.hash(at) })
    }

    /// Returns the hash that the next decision records as its previous one.
    pub(crate) fn link(chain: Option<Self>) -> DecisionHash {
        chain.map_or(DecisionHash::START, |c| c.hash)
    }
}

impl ReviewDecided {
    /// Computes the hash of the canonical content. It does not depend on the session's id, because only the
    /// record that opened the review is included.
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

/// Verifies the hash chain along a log, one record at a time.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChainCheck {
    chain: Option<DecisionChain>,
    /// The last record that came with an import.
    imported: Seq,
}

impl ChainCheck {
    /// Processes the next record. Returns the decision that it contains, and a description of what is wrong:
    /// with the decision's link, or with a fork's link to the chain of its parent.
    pub fn check_record(&mut self, session: &SessionId, record: &Record) -> (Option<AuditedDecision>, Option<String>) {
        match &record.entry {
            Entry::Created(created) => {
                self.imported = created.origin.as_ref().map_or(self.imported, |o| o.upto);
                let inherited = std::mem::replace(&mut self.chain, created.decisions);
                let differs = created.parent.is_some() && inherited.is_some() && inherited != created.decisions;
                // A fork that records no chain starts its own.
                let is_broken = differs && created.decisions.is_some();
                (None, is_broken.then(|| "the fork does not continue the hash chain of its parent".to_owned()))
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

    /// Returns the end of the chain after the records processed so far.
    pub fn chain(&self) -> Option<DecisionChain> {
        self.chain
    }
}

/// One decision of the audit trail.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct AuditedDecision {
    /// The session of the decision.
    pub session: SessionId,
    /// The record of the decision.
    pub seq: Seq,
    /// When the decision was made.
    pub at: Timestamp,
    /// The decision itself.
    pub decided: ReviewDecided,
    /// The hash of the decision's content.
    pub hash: DecisionHash,
    /// Whether the decision came with an import. Then the exporting installation vouches for it, not this
    /// one.
    pub imported: bool,
    /// A description of the broken link in the chain. `None` means that the link is intact.
    pub broken: Option<String>,
}
