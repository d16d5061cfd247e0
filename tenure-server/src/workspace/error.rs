//! Errors of workspaces.

use std::path::Path;
use tenure::SessionId;

/// Metadata key under which a session names its workspace.
pub const METADATA_KEY: &str = "workspace";

/// An error of a workspace operation.
#[derive(Debug, thiserror::Error)]
pub enum WorkspaceError {
    /// The name is invalid, or does not denote a directory of the tenant.
    #[error("{0}")]
    InvalidName(String),
    /// There is no commit of the workspace at or before the requested point.
    #[error("{0}")]
    NotCommitted(String),
    /// Another session or another process holds the workspace's lock.
    #[error("the workspace is in use by another session; try again in a moment")]
    Busy,
    /// The workspace exceeds a limit.
    #[error("the workspace exceeds its limit `{limit}` of {max}; exclude files with a .gitignore")]
    TooLarge {
        /// Name of the limit.
        limit: &'static str,
        /// Value of the limit.
        max: u64,
    },
    /// Workspaces are not enabled on this server.
    #[error("workspaces are not enabled; set `workspaces.root` in the configuration")]
    Disabled,
    /// The session names no workspace.
    #[error("session {0} names no workspace; set `metadata.{METADATA_KEY}` first")]
    Unnamed(SessionId),
    /// Any other failure, such as a full disk.
    #[error("{0}")]
    Failed(String),
}

impl WorkspaceError {
    pub(super) fn at_path(path: &Path, e: impl std::fmt::Display) -> Self {
        Self::Failed(format!("workspace, {}: {e}", path.display()))
    }
}

impl From<git2::Error> for WorkspaceError {
    fn from(e: git2::Error) -> Self {
        Self::Failed(format!("workspace, git: {}", e.message()))
    }
}
