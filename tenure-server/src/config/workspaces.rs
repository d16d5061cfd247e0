//! The section `workspaces`: the directories of sessions that are versioned with git.

use serde::{Deserialize, Serialize};

/// The directories that sessions name in `metadata.workspace`, kept in git.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkspacesConfig {
    /// The directory they are in, as `ROOT/TENANT/NAME`; nothing is kept if empty.
    pub root: String,
    /// Whether they are committed after each checkpoint too, and not only when a session ends.
    pub checkpoints: bool,
    /// A workspace with more files is not committed.
    pub max_files: usize,
    /// Nor one with more bytes.
    pub max_bytes: u64,
}

impl Default for WorkspacesConfig {
    fn default() -> Self {
        Self { root: String::new(), checkpoints: false, max_files: 10_000, max_bytes: 256 << 20 }
    }
}
