//! Observers of commits. The write path does not know what follows from a commit; whoever needs to know registers here.

use crate::store::contract::{Commit, Store};
use std::fmt::Debug;

/// Is called after every commit that the store has acknowledged, in the task that committed. Must not block.
pub(crate) trait CommitObserver: Debug + Send + Sync {
    /// A commit is durable.
    fn committed(&self, store: &dyn Store, commit: &Commit);
}
