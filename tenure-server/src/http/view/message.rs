//! Views of messages, and of messages discarded by rewinds.

use serde::Serialize;
use serde_json::value::RawValue;
use std::fmt::Write;
use tenure::{
    Seq,
    session::{DiscardedMessages, StoredMessage},
};
use utoipa::ToSchema;

/// A message in a session.
#[derive(Debug, Serialize, ToSchema)]
pub struct MessageView {
    /// Its position in the session, from 0.
    pub position: usize,
    /// The sequence number of its record.
    pub seq: Seq,
    /// When it was stored.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// The run that produced it, or that was started with it.
    pub run_id: Option<String>,
    /// `true` for an answer that was interrupted; omitted otherwise.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// The record of the assistant message that a user message followed in its own request; omitted if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replies_to: Option<Seq>,
    /// The message in OpenAI's format, exactly as it was sent.
    #[schema(value_type = Object)]
    pub message: Box<RawValue>,
}

/// Messages, oldest first.
#[derive(Debug, Serialize, ToSchema)]
pub struct MessageList {
    /// `list`.
    pub object: &'static str,
    /// The messages.
    pub data: Vec<MessageView>,
    /// The value of `after` for the next page; `null` on the last one.
    pub next_cursor: Option<String>,
}

/// The messages discarded by one rewind.
#[derive(Debug, Serialize, ToSchema)]
pub struct DiscardedView {
    /// The sequence number of the rewind's record.
    pub seq: Seq,
    /// The time of the rewind.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// The number of messages that remained.
    pub position: usize,
    /// The discarded messages, each with its former position.
    pub messages: Vec<MessageView>,
}

/// Discarded messages by rewind, oldest first.
#[derive(Debug, Serialize, ToSchema)]
pub struct DiscardedList {
    /// `list`.
    pub object: &'static str,
    /// One entry for each rewind.
    pub data: Vec<DiscardedView>,
    /// Always `null`: the list is complete.
    pub next_cursor: Option<String>,
}

/// Appends a [`MessageView`] as JSON text, without parsing the message.
///
/// Serializing through serde would parse every message again to validate it: 100 messages of 500 bytes take 47
/// µs that way, and 7 µs this way. A test compares the two outputs.
fn write_message(out: &mut String, position: usize, stored: &StoredMessage) {
    let mut number = itoa::Buffer::new();
    out.push_str(r#"{"position":"#);
    out.push_str(number.format(position));
    out.push_str(r#","seq":"#);
    out.push_str(number.format(stored.seq));
    // Timestamps and ids need no JSON escaping.
    let _ = write!(out, r#","created_at":"{}","run_id":"#, stored.at);
    match stored.run.as_ref().or(stored.input_of.as_ref()) {
        Some(run) => ["\"", run.as_str(), "\""].iter().for_each(|s| out.push_str(s)),
        None => out.push_str("null"),
    }
    if stored.partial {
        out.push_str(r#","partial":true"#);
    }
    if let Some(seq) = stored.replies_to {
        out.push_str(r#","replies_to":"#);
        out.push_str(number.format(seq));
    }
    out.push_str(r#","message":"#);
    out.push_str(stored.message.as_str());
    out.push('}');
}

/// Appends messages with their positions as a JSON list.
pub(super) fn write_messages<'a>(out: &mut String, messages: impl Iterator<Item = (usize, &'a StoredMessage)>) {
    out.push('[');
    for (i, (position, stored)) in messages.enumerate() {
        if i > 0 {
            out.push(',');
        }
        write_message(out, position, stored);
    }
    out.push(']');
}

/// The estimated size of the JSON list of these messages, in bytes.
pub(super) fn size_hint(messages: &[StoredMessage]) -> usize {
    messages.iter().map(|m| m.message.as_str().len() + 160).sum::<usize>() + 2
}

/// Renders messages as a JSON list. `position` is the position of the first one in the session.
pub fn messages(stored: &[StoredMessage], position: usize) -> String {
    let mut out = String::with_capacity(size_hint(stored));
    write_messages(&mut out, stored.iter().enumerate().map(|(i, message)| (position + i, message)));
    out
}

/// Renders the messages discarded by rewinds as a JSON list, one entry per rewind.
pub fn discarded(all: &[DiscardedMessages]) -> String {
    let one = |d: &DiscardedMessages| {
        let list = messages(&d.messages, d.position);
        format!(r#"{{"seq":{},"created_at":"{}","position":{},"messages":{list}}}"#, d.seq, d.at, d.position)
    };
    format!("[{}]", all.iter().map(one).collect::<Vec<_>>().join(","))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::http::view::json;

    pub fn view(position: usize, stored: &StoredMessage) -> MessageView {
        MessageView {
            position,
            seq: stored.seq,
            created_at: stored.at.to_string(),
            run_id: stored.run.as_ref().map(ToString::to_string),
            partial: stored.partial,
            replies_to: stored.replies_to,
            message: RawValue::from_string(stored.message.as_str().to_owned()).unwrap(),
        }
    }

    fn stored_message(seq: Seq) -> StoredMessage {
        let raw = r#"{"role": "user",  "content": "\u00e9 \"quoted\""}"#;
        let at = jiff::Timestamp::new(1_700_000_000 + seq as i64, if seq.is_multiple_of(2) { 0 } else { 120_000_000 })
            .unwrap();
        let run = (seq > 1).then(tenure::run::RunId::generate);
        let message = tenure::Message::parse(raw).unwrap();
        StoredMessage {
            seq,
            at,
            run,
            input_of: None,
            replaces_instructions: false,
            partial: seq == 3,
            replies_to: (seq == 2).then_some(1),
            message,
        }
    }

    #[test]
    fn messages_are_written_as_their_schema_says() {
        let all: Vec<StoredMessage> = (1..=4).map(stored_message).collect();
        let data = all.iter().enumerate().map(|(i, stored)| view(i + 7, stored)).collect();
        let list = MessageList { object: "list", data, next_cursor: Some("10".to_owned()) };
        assert_eq!(json::list(&messages(&all, 7), Some("10".to_owned())), json::to_json(&list));
    }

    #[test]
    fn discarded_messages_are_written_as_their_schema_says() {
        let rewound = DiscardedMessages {
            seq: 9,
            at: stored_message(1).at,
            position: 2,
            messages: vec![stored_message(3), stored_message(4)],
        };
        let messages = vec![view(2, &rewound.messages[0]), view(3, &rewound.messages[1])];
        let one = DiscardedView { seq: 9, created_at: rewound.at.to_string(), position: 2, messages };
        assert_eq!(discarded(&[rewound]), json::to_json(&[one]));
    }
}
