//! A session's status.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Where a session stands in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It takes new messages and runs.
    #[default]
    Active,
    /// It waits, for instance for a review.
    Paused,
    /// It was idle for longer than its time to live. Can be restored until it is purged.
    Expired,
    /// Somebody deleted it. Can be restored until it is purged.
    Deleted,
}

impl Status {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Active => "active",
            Status::Paused => "paused",
            Status::Expired => "expired",
            Status::Deleted => "deleted",
        }
    }

    /// Counts of each state, from the number of all sessions and of those that are not active, by their words.
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    pub(crate) fn counts(all: i64, others: &[(String, i64)]) -> Vec<(Self, u64)> {
        let count = |status: Self| others.iter().find(|(word, _)| word == status.as_str()).map_or(0, |(_, n)| *n);
        let rest = [Status::Paused, Status::Expired, Status::Deleted].map(|status| (status, count(status)));
        let active = (Status::Active, all - rest.iter().map(|(_, n)| n).sum::<i64>());
        [active].into_iter().chain(rest).map(|(status, n)| (status, n.max(0) as u64)).collect()
    }

    /// Whether it is in use: active or paused.
    pub fn is_live(self) -> bool {
        matches!(self, Status::Active | Status::Paused)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
