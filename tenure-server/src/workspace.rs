//! Workspaces: the directory that a session names is committed to git at the session's checkpoints and when the
//! session ends, and a rewind can restore it.
//!
//! The contents of a workspace, including its `.git`, were written by an agent and are untrusted. Therefore nothing
//! in it is executed (no hook, no filter, no git program), no symbolic link is followed, and nothing outside it is
//! written.

mod error;
mod note;
mod repository;
mod tree;
mod workspaces;

pub use error::{METADATA_KEY, WorkspaceError};
pub use workspaces::{RestorePlan, RestoredWorkspace, Workspaces};
