//! The section `workspaces`: the directories of sessions that are versioned with git.

use serde::{Deserialize, Serialize};

/// Workspaces: the directories that sessions name in `metadata.workspace`, versioned with git.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkspacesConfig {
    /// Their root directory; paths are `ROOT/TENANT/NAME`. Empty disables workspaces.
    pub root: String,
    /// Whether they are committed after each checkpoint too, and not only when a session ends.
    pub checkpoints: bool,
    /// Maximum number of files; a larger workspace is not committed.
    pub max_files: usize,
    /// Maximum number of bytes; a larger workspace is not committed.
    pub max_bytes: u64,
}

impl Default for WorkspacesConfig {
    fn default() -> Self {
        Self { root: String::new(), checkpoints: false, max_files: 10_000, max_bytes: 256 << 20 }
    }
}
