//! Findings of a store check, and their remedies.
//!
//! Invariant: only derived or unreachable data have an automatic remedy; everything else is advice
//! (D-028).

use crate::types::blob::BlobId;
use crate::types::id::{SessionId, SessionKey, Tenant};
use serde::Serialize;
use std::fmt;

/// Maximum number of findings of each kind that one check of a store returns.
pub const MAX_FINDINGS: usize = 1000;

/// A defect that a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The location: a session, a record, or a file and its line, as precisely as it is known.
    #[serde(rename = "place")]
    pub location: String,
    /// The defect, as text.
    #[serde(rename = "what")]
    pub description: String,
    /// The remedy.
    #[serde(rename = "cure")]
    pub remedy: Remedy,
}

/// The remedy for a finding. Its `Display` text is for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Remedy {
    /// An orphan, which can be removed without loss.
    Remove(Orphan),
    /// The session's head, which can be rebuilt from its log.
    #[serde(rename = "card")]
    RebuildHead(SessionKey),
    /// The entries of a session in the message index, which can be computed again from its log.
    IndexSession(SessionKey),
    /// The message index, to which sessions must be added.
    CompleteMessageIndex,
    /// No automatic remedy is safe; the text advises what an operator can do.
    Advice(String),
}

/// Data that no session references.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Orphan {
    /// A blob that no session references.
    Blob(Tenant, BlobId),
    /// Blob references of a session that does not exist, identified by the store's internal name of
    /// that session.
    #[serde(rename = "uses")]
    BlobRefs(Tenant, String),
    /// Items of a session that does not exist. A session that only lost its head still exists.
    Items(Tenant, SessionId),
    /// Label index entries that differ from the labels of the session, identified by the store's
    /// internal name of that session. They are rebuilt.
    Labels(Tenant, String),
    /// Entries of the message index that belong to no message.
    IndexedMessages,
}

impl Finding {
    /// Creates a finding with advice for an operator.
    pub fn new(location: impl fmt::Display, description: impl fmt::Display, advice: &str) -> Self {
        Self {
            location: location.to_string(),
            description: description.to_string(),
            remedy: Remedy::Advice(advice.to_owned()),
        }
    }

    /// Creates a finding for an orphan.
    pub fn orphan(location: impl fmt::Display, description: impl fmt::Display, orphan: Orphan) -> Self {
        Self { location: location.to_string(), description: description.to_string(), remedy: Remedy::Remove(orphan) }
    }

    /// Returns whether [`Tenure::repair`](crate::Tenure::repair) can fix it automatically.
    pub fn is_repairable(&self) -> bool {
        !matches!(self.remedy, Remedy::Advice(_))
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.location, self.description, self.remedy)
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remedy::Remove(_) => f.write_str("repair removes it; no session references it"),
            Remedy::RebuildHead(_) => f.write_str("repair rebuilds the head from the log"),
            Remedy::IndexSession(_) => f.write_str("repair indexes the session again"),
            Remedy::CompleteMessageIndex => f.write_str("repair completes the index"),
            Remedy::Advice(advice) => f.write_str(advice),
        }
    }
}
