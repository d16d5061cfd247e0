//! What is not as it should be in a store, and what to do about it.

use crate::types::blob::BlobId;
use crate::types::id::{Key, SessionId, Tenant};
use serde::Serialize;
use std::fmt;

/// At most so many findings of a kind come from one check of a store.
pub const MAX_FINDINGS: usize = 1000;

/// Something that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Where: a session, a record, a file and its line, as far as they are known.
    pub place: String,
    /// What is wrong there.
    pub what: String,
    /// What to do about it.
    pub cure: Cure,
}

/// What to do about a finding. Its text is for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cure {
    /// It belongs to nobody and can be removed without loss.
    Remove(Orphan),
    /// The session's card can be written anew from its log.
    Card(Key),
    /// Nothing here is safe to do by itself; this is what a person can do.
    Advice(String),
}

/// What belongs to nobody.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Orphan {
    /// A blob that no session uses.
    Blob(Tenant, BlobId),
    /// Notes that a session uses blobs, when there is no such session; by the store's own name for it.
    Uses(Tenant, String),
    /// Items of a session that does not exist; a session that only lost its card does.
    Items(Tenant, SessionId),
    /// Entries of the index of labels that differ from the labels of the session; by the store's own name for it. They are written anew.
    Labels(Tenant, String),
}

impl Finding {
    /// Something for a person to look at.
    pub fn new(place: impl fmt::Display, what: impl fmt::Display, advice: &str) -> Self {
        Self { place: place.to_string(), what: what.to_string(), cure: Cure::Advice(advice.to_owned()) }
    }

    /// Something that belongs to nobody.
    pub fn orphan(place: impl fmt::Display, what: impl fmt::Display, orphan: Orphan) -> Self {
        Self { place: place.to_string(), what: what.to_string(), cure: Cure::Remove(orphan) }
    }

    /// Whether [`Tenure::repair`](crate::Tenure::repair) can mend it.
    pub fn is_mendable(&self) -> bool {
        !matches!(self.cure, Cure::Advice(_))
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.place, self.what, self.cure)
    }
}

impl fmt::Display for Cure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cure::Remove(_) => f.write_str("repairing removes it; nothing else needs it"),
            Cure::Card(_) => f.write_str("repairing writes the card anew from the log"),
            Cure::Advice(advice) => f.write_str(advice),
        }
    }
}
