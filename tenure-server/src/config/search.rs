//! The section `search`: how messages are found.

use serde::{Deserialize, Serialize};

/// Full-text search over messages.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SearchConfig {
    /// Whether the words of messages are indexed by the commits that store them. Without an index, each search reads
    /// messages.
    pub index: bool,
}

impl Default for SearchConfig {
    fn default() -> Self {
        Self { index: true }
    }
}
