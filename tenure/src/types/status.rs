//! The status of a session.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The stage of a session's life cycle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The session accepts new messages and runs.
    #[default]
    Active,
    /// The session waits, for example for a review.
    Paused,
    /// The session was idle for longer than its time to live. It can be restored until it is purged.
    Expired,
    /// The session was deleted on request. It can be restored until it is purged.
    Deleted,
}

impl Status {
    /// Returns the serialized name of the status.
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Active => "active",
            Status::Paused => "paused",
            Status::Expired => "expired",
            Status::Deleted => "deleted",
        }
    }

    /// Computes the number of sessions per status, from the total and the counts of all statuses except
    /// `active`, by their serialized names.
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    pub(crate) fn counts(total: i64, other_counts: &[(String, i64)]) -> Vec<(Self, u64)> {
        let count = |status: Self| other_counts.iter().find(|(name, _)| name == status.as_str()).map_or(0, |(_, n)| *n);
        let rest = [Status::Paused, Status::Expired, Status::Deleted].map(|status| (status, count(status)));
        let active = (Status::Active, total - rest.iter().map(|(_, n)| n).sum::<i64>());
        [active].into_iter().chain(rest).map(|(status, n)| (status, n.max(0) as u64)).collect()
    }

    /// Returns true if the session is in use: active or paused.
    pub fn is_live(self) -> bool {
        matches!(self, Status::Active | Status::Paused)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
