//! Observers of commits. The write path does not know the consequences of a commit; the parts that
//! react to commits register here.

use crate::store::contract::{Commit, Store};
use std::fmt::Debug;

/// An observer that is called after every commit that the store has acknowledged, in the task that
/// committed. It must not block.
pub(crate) trait CommitObserver: Debug + Send + Sync {
    /// Called when a commit is durable.
    fn committed(&self, store: &dyn Store, commit: &Commit);
}
