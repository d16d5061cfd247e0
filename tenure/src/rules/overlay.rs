//! Messages that a model is shown in place of stored ones, because the client sent a different wording
//! (D-022).

use crate::rules::session::StoredMessage;
use crate::types::blob::{Blob, BlobId};
use crate::types::id::Seq;
use crate::types::message::Message;
use std::borrow::Cow;
use std::collections::HashMap;

/// The differences between the stored messages and those that a model is shown. They apply to one run and are
/// never stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overlay {
    /// Messages shown in place of the stored message of this record.
    replaced: HashMap<Seq, Message>,
    /// Messages shown before the stored message of this record.
    inserted: HashMap<Seq, Vec<Message>>,
    /// Nothing stored before this record is shown, except system messages. `None` means that everything is.
    start: Option<Seq>,
}

impl Overlay {
    /// Returns true if the stored messages are shown unchanged.
    pub fn is_empty(&self) -> bool {
        self.replaced.is_empty() && self.inserted.is_empty() && self.start.is_none()
    }

    /// Returns the number of stored messages that are replaced.
    pub(crate) fn replaced(&self) -> usize {
        self.replaced.len()
    }

    /// Returns true if everything up to this record is hidden.
    pub(crate) fn hides(&self, upto: Seq) -> bool {
        self.start.is_some_and(|start| start > upto)
    }

    /// Shows a message in place of a stored one.
    pub(crate) fn replace(&mut self, stored: &StoredMessage, message: Message) {
        self.replaced.insert(stored.seq, message);
    }

    /// Shows messages before a stored one.
    pub(crate) fn insert_before(&mut self, stored: &StoredMessage, messages: Vec<Message>) {
        self.inserted.entry(stored.seq).or_default().extend(messages);
    }

    /// Hides everything before a stored message and shows these messages instead.
    pub(crate) fn begin_with(&mut self, stored: &StoredMessage, messages: Vec<Message>) {
        self.start = Some(stored.seq);
        self.inserted.entry(stored.seq).or_default().splice(0..0, messages);
    }

    /// Adds another overlay. Where both replace a message, `other` applies.
    pub(crate) fn merge(&mut self, other: Overlay) {
        self.replaced.extend(other.replaced);
        for (seq, messages) in other.inserted {
            self.inserted.entry(seq).or_default().extend(messages);
        }
        self.start = self.start.or(other.start);
    }

    /// Restores detached media in the messages of the overlay. These messages are not stored, so their media
    /// are available only here.
    pub(crate) fn attach(&mut self, blobs: &[Blob]) {
        let find = |id: &BlobId| blobs.iter().find(|blob| blob.id == *id).map(|blob| blob.bytes.clone());
        for message in self.replaced.values_mut().chain(self.inserted.values_mut().flatten()) {
            if let Ok(attached) = message.attach(find) {
                *message = attached;
            }
        }
    }

    /// Returns the messages to show for these stored ones. System messages are always shown.
    pub(crate) fn apply<'a>(&self, messages: impl Iterator<Item = &'a StoredMessage>) -> Vec<Cow<'a, StoredMessage>> {
        let mut shown = Vec::new();
        for stored in messages {
            let hidden = self.start.is_some_and(|start| stored.seq < start);
            if hidden && !stored.message.role().is_instruction() {
                continue;
            }
            let shown_as = |message: &Message| StoredMessage {
                replaces_instructions: false,
                message: message.clone(),
                ..stored.clone()
            };
            for message in self.inserted.get(&stored.seq).into_iter().flatten() {
                shown.push(Cow::Owned(shown_as(message)));
            }
            shown.push(match self.replaced.get(&stored.seq) {
                Some(message) => Cow::Owned(shown_as(message)),
                None => Cow::Borrowed(stored),
            });
        }
        shown
    }
}
