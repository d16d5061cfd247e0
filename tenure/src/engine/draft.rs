//! What an operation must see of a session, and what it wants to write.

use crate::store::item::Item;
use crate::types::blob::Blob;
use crate::types::entry::Entry;
use crate::types::message::Message;
use jiff::Timestamp;

/// How much of a session a step must see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// The index card.
    Head,
    /// What a run needs: what its model is shown, and the run that is on ([`crate::rules::partial`]).
    Run,
    /// All of it.
    Session,
}

/// What a step wants to write, and what it answers when that is done.
#[derive(Debug)]
pub(crate) struct Draft<R> {
    pub entries: Vec<Entry>,
    pub items: Vec<(String, Item)>,
    pub blobs: Vec<Blob>,
    pub cut: Vec<Message>,
    /// The end of the lease from now on, which is not in the log.
    pub lease: Option<Timestamp>,
    pub reply: R,
}

impl<R> Draft<R> {
    pub fn new(entries: Vec<Entry>, reply: R) -> Self {
        Self { entries, items: Vec::new(), blobs: Vec::new(), cut: Vec::new(), lease: None, reply }
    }

    pub fn is_idle(&self) -> bool {
        self.entries.is_empty() && self.items.is_empty() && self.lease.is_none()
    }
}
