//! What can be wrong with a workspace.

use std::path::Path;
use tenure::SessionId;

/// Where a session's metadata names its workspace.
pub const METADATA_KEY: &str = "workspace";

/// What can be wrong with a workspace.
#[derive(Debug, thiserror::Error)]
pub enum WorkspaceError {
    /// It can not be one.
    #[error("{0}")]
    Name(String),
    /// It was not kept at that point.
    #[error("{0}")]
    NotKept(String),
    /// Another session or another process is at it.
    #[error("the workspace is in use by another session; try again in a moment")]
    Busy,
    /// It is over a limit.
    #[error("the workspace is over its limit `{limit}` of {max}; leave out what need not be kept with a .gitignore")]
    TooLarge {
        /// The limit's name.
        limit: &'static str,
        /// What it is set to.
        max: u64,
    },
    /// This server keeps no workspaces.
    #[error("workspaces are not kept here; set `workspaces.root` in the configuration")]
    Disabled,
    /// The session has no workspace.
    #[error("session {0} names no workspace; set `metadata.{METADATA_KEY}` first")]
    Unnamed(SessionId),
    /// Something else went wrong, such as a full disk.
    #[error("{0}")]
    Failed(String),
}

impl WorkspaceError {
    pub(super) fn at(path: &Path, e: impl std::fmt::Display) -> Self {
        Self::Failed(format!("workspace, {}: {e}", path.display()))
    }
}

impl From<git2::Error> for WorkspaceError {
    fn from(e: git2::Error) -> Self {
        Self::Failed(format!("workspace, git: {}", e.message()))
    }
}
