//! The request that is merged into a session, and what to do about it.

use crate::rules::overlay::Overlay;
use crate::types::message::Role;
use std::ops::Range;

use crate::rules::session::StoredMessage;
use crate::types::entry::MessageEntry;
use crate::types::id::Seq;
use crate::types::message::Message;
use crate::types::policy::HistoryMode;

/// The messages of a request and how they were sent.
#[derive(Clone, Copy, Debug, Default)]
pub struct IncomingRequest<'a> {
    /// The messages, including system messages.
    pub messages: &'a [Message],
    /// How the messages are reconciled with the stored ones.
    pub history: HistoryMode,
    /// Whether the client's SDK marked the request as a retry.
    pub is_retry: bool,
    /// Whether the session was busy when the request arrived. Then its sender has not seen the turns that
    /// ended since.
    pub has_waited: bool,
}

/// The result of reconciliation: what to rewind, append and show.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReconcilePlan {
    /// Number of stored messages that remain; later ones are rewound.
    pub retained: usize,
    /// The messages to append, in order.
    pub append: Vec<NewMessage>,
    /// How many of the appended messages, from the first, are the system prompt.
    pub system_prompt_len: usize,
    /// Number of incoming messages that are already stored.
    pub matched: usize,
    /// Number of stored messages that the request omits after the first one that it repeats.
    pub omitted: usize,
    /// Number of stored messages that are rewound, excluding the system prompt.
    pub rewound: usize,
    /// Number of incoming messages that are shown to the model but not stored, or ignored because the stored
    /// ones stay.
    pub ephemeral: usize,
    /// The call ids of tool results without a known call. These results are dropped.
    pub orphans: Vec<String>,
    /// The messages that the model is shown in place of stored ones.
    pub overlay: Overlay,
}

/// A message to append.
#[derive(Clone, Debug, PartialEq)]
pub struct NewMessage {
    /// Whether this system message replaces the initial instructions.
    pub replaces_instructions: bool,
    /// The assistant message that this user message follows in the request.
    pub replies_to: Option<ReplyTo>,
    /// The message itself.
    pub message: Message,
}

/// A reference to the assistant message that a user message follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyTo {
    /// A stored message, by its record.
    Stored(Seq),
    /// A message of the same plan, by its index in [`ReconcilePlan::append`].
    New(usize),
}

impl ReconcilePlan {
    /// Creates a plan that keeps the first `retained` stored messages and appends nothing.
    pub(crate) fn retaining(stored: &[StoredMessage], retained: usize) -> Self {
        Self { retained, rewound: count_without_instructions(&stored[retained..]), ..Self::default() }
    }

    /// Returns the new messages as log entries. `first` is the record of the first one.
    pub fn message_entries(&self, first: Seq) -> Vec<MessageEntry> {
        let seq = |reply: ReplyTo| match reply {
            ReplyTo::Stored(seq) => seq,
            ReplyTo::New(i) => first + i as Seq,
        };
        let entry = |m: &NewMessage| MessageEntry {
            replaces_instructions: m.replaces_instructions,
            replies_to: m.replies_to.map(seq),
            ..MessageEntry::from(m.message.clone())
        };
        self.append.iter().map(entry).collect()
    }

    /// Returns the number of new messages, excluding the system prompt.
    pub fn appended(&self) -> usize {
        self.append.len() - self.system_prompt_len
    }
}

/// Returns the start of the last turn.
pub(crate) fn last_turn(stored: &[StoredMessage]) -> usize {
    last_question(stored).map_or(0, |question| question.start)
}

/// Counts the messages that are not part of the system prompt.
pub(crate) fn count_without_instructions(messages: &[StoredMessage]) -> usize {
    messages.iter().filter(|m| !m.replaces_instructions && !m.message.role().is_instruction()).count()
}

/// Returns the range of the user messages of the last turn.
pub(crate) fn last_question(stored: &[StoredMessage]) -> Option<Range<usize>> {
    let end = stored.iter().rposition(|m| m.message.role() == Role::User)? + 1;
    let start = stored[..end].iter().rposition(|m| m.message.role() != Role::User).map_or(0, |i| i + 1);
    Some(start..end)
}
