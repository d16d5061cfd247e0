//! The report of how a request's messages were merged into the stored history.

use crate::memory::recall::InjectedMemory;
use serde::{Deserialize, Serialize};

/// The report of how a request's messages were merged into the stored history.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReconcileReport {
    /// Number of request messages that were already stored.
    pub matched: usize,
    /// Number of stored messages that the request omits after the first one that it repeats, such
    /// as tool messages.
    #[serde(rename = "spliced")]
    pub omitted: usize,
    /// Number of stored messages that were rewound.
    pub rewound: usize,
    /// Number of request messages that are new and were stored.
    pub appended: usize,
    /// Number of request messages that are shown to the model but not stored.
    #[serde(default)]
    pub ephemeral: usize,
    /// Ids of tool results that answer no known call. They were dropped.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub orphans: Vec<String>,
    /// Memories that were injected into the prompt.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memories: Vec<InjectedMemory>,
}
