//! The section `search`: how messages are found.

use serde::{Deserialize, Serialize};

/// Full-text search over messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SearchConfig {
    /// Whether the words of messages are indexed: `on` or `off`. Without an index, each search reads messages.
    pub index: MessageIndexing,
}

/// Whether the words of messages are indexed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MessageIndexing {
    /// They are indexed by the commit that stores the message.
    #[default]
    On,
    /// They are not indexed.
    Off,
}
