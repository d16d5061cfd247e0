//! The output of a step on a session: what it commits, and its reply to the caller.

use crate::store::item::Item;
use crate::types::blob::Blob;
use crate::types::entry::Entry;
use jiff::Timestamp;

/// A pending commit of a step, and its reply to the caller once the commit is durable.
#[derive(Debug)]
pub(crate) struct PendingCommit<R> {
    /// The entries to append, in order.
    pub entries: Vec<Entry>,
    /// Key-value items to store, each with the name of its namespace of the session.
    pub items: Vec<(String, Item)>,
    /// Media that the new entries reference.
    pub blobs: Vec<Blob>,
    /// The new expiry time of the lease, which is stored in the head and not in the log. `None`
    /// leaves it as it is.
    pub lease: Option<Timestamp>,
    /// The value that is returned to the caller after the commit.
    pub reply: R,
}

impl<R> PendingCommit<R> {
    /// A pending commit of entries only.
    pub fn new(entries: Vec<Entry>, reply: R) -> Self {
        Self { entries, items: Vec::new(), blobs: Vec::new(), lease: None, reply }
    }

    /// Returns true if there is nothing to commit.
    pub fn is_idle(&self) -> bool {
        self.entries.is_empty() && self.items.is_empty() && self.lease.is_none()
    }
}
