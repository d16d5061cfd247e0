//! Advances a log digest message by message, without reading earlier messages.

use crate::rules::turns::TurnCounter;
use crate::types::digest::{LogDigest, MAX_DIGEST_CALLS, VisibleHash};
use crate::types::message::meaning::Meaning;
use crate::types::message::{Message, Role};
use std::borrow::Cow;

/// Maximum length of a tool call id by which a session can be looked up. The ids are stored in the head,
/// which must stay small.
const MAX_CALL_BYTES: usize = 256;

impl LogDigest {
    /// Advances the digest by one message.
    pub fn advance(&mut self, message: &Message) {
        let role = message.role();
        self.messages += 1;
        let mut counter = TurnCounter::after(self);
        counter.count(role);
        self.turns = counter.turns;
        self.last = counter.last;
        match role {
            Role::User => self.calls.clear(),
            Role::Assistant => {
                let calls = message.call_ids().into_iter().filter(|id| id.len() <= MAX_CALL_BYTES);
                self.calls.extend(calls.map(Cow::into_owned));
            }
            _ => {}
        }
        let excess = self.calls.len().saturating_sub(MAX_DIGEST_CALLS);
        self.calls.drain(..excess);
        if message.is_visible() {
            self.visible += 1;
            let meaning = message.meaning();
            self.hash = self.hash.then(role, &meaning);
            match role {
                Role::User => self.question = Some(VisibleHash::default().then(role, &meaning)),
                _ => self.exchange = self.question.map(|question| question.then(role, &meaning)),
            }
        }
    }
}

impl VisibleHash {
    /// Returns this hash extended by one more message.
    pub(crate) fn then(&self, role: Role, meaning: &Meaning) -> Self {
        let mut hash = blake3::Hasher::new();
        hash.update(&self.0).update(&[role as u8]);
        if !meaning.text.is_empty() {
            // The length comes first, so that a text cannot collide with a shorter text and other parts.
            hash.update(&(meaning.text.len() as u64).to_le_bytes()).update(meaning.text.as_bytes());
        }
        for part in &meaning.other {
            hash.update(&part.0);
        }
        let mut first = [0; 16];
        first.copy_from_slice(&hash.finalize().as_bytes()[..16]);
        Self(first)
    }
}
