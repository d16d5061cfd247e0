//! Workspaces: the directory that a session names is kept in git, at the session's checkpoints and at its end, and a rewind can bring it
//! back.
//!
//! What is in a workspace was written by an agent, its `.git` included. So nothing in it is run (no hook, no filter, no program of git),
//! no link is followed, and nothing outside of it is written.

mod error;
mod note;
mod repository;
mod tree;
mod workspaces;

pub use error::{METADATA_KEY, WorkspaceError};
pub use workspaces::{RestorePlan, RestoredWorkspace, Workspaces};
