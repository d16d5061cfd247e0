//! Keeps the message index complete.

use crate::store::message_index::WordRules;
use crate::tenure::Tenure;
use crate::types::error::Result;

impl Tenure {
    /// The rules by which the words of messages are computed, for reading the message index of the store
    /// ([`MessageIndex::find`](crate::store::MessageIndex::find)).
    pub fn word_rules(&self) -> WordRules {
        self.engine.word_rules()
    }

    /// Indexes sessions that are not in the message index, and removes the words of removed messages from
    /// the files of the store. Ends after the session with which `max_messages` is reached. Returns whether
    /// more remains to be done.
    ///
    /// Sessions are not in the index if the index was switched off when they were written, if the redaction
    /// has changed, after a backup was restored, or, in stores that build the index only when it is used,
    /// before the first search. Until all sessions are in the index, searches read all messages.
    pub async fn maintain_message_index(&self, max_messages: usize) -> Result<bool> {
        self.engine.maintain_message_index(max_messages).await
    }
}
