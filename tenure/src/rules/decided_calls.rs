//! How reviewed tool calls are presented to a model.
//!
//! The log contains the call as the model wrote it. The prompt contains the arguments that were used, and the
//! reviewer's notes before the result, so that the model continues from what was really done (D-063).
//! Rejections are results of their own, which contain the notes already.

use crate::rules::session::{Review, StoredMessage};
use crate::types::entry::{Decision, ReviewDecided};
use crate::types::message::{Message, Role};
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// Returns these messages with reviewers' corrections and notes applied. The cost depends on the number of
/// reviews and of the messages around them.
pub(crate) fn with_decisions<'a>(messages: &[&'a StoredMessage], reviews: &[Review]) -> Vec<Cow<'a, Message>> {
    let mut shown: Vec<Cow<'a, Message>> = messages.iter().map(|m| Cow::Borrowed(&m.message)).collect();
    // Newest first: each note is prepended, so that the oldest note ends up first.
    let mut corrected = Vec::new();
    for review in reviews.iter().rev() {
        let (Some(call), Some((_, decided))) = (&review.opened.call, &review.decided) else { continue };
        if review.question().is_some() {
            // The result is the decision already.
            continue;
        }
        let Some(position) = find_call(messages, review, call) else { continue };
        if let Some(arguments) = corrected_arguments(decided)
            && !corrected.contains(&(position, call))
        {
            corrected.push((position, call));
            if let Some(message) = with_arguments(&shown[position], call, arguments) {
                shown[position] = Cow::Owned(message);
            }
        }
        if let Some(note) = note(review, decided)
            && let Some(result) = find_result(messages, position, call)
            && let Some(message) = with_note(&shown[result], &note)
        {
            shown[result] = Cow::Owned(message);
        }
    }
    shown
}

/// Finds the message with the call that a review is about: the newest call with this id before the review, by
/// the same run. Models reuse ids, and the call may have been rewound.
fn find_call(messages: &[&StoredMessage], review: &Review, call: &str) -> Option<usize> {
    let end = messages.partition_point(|m| m.seq < review.seq);
    let answers = (0..end).rev().filter(|i| messages[*i].message.role() == Role::Assistant);
    let same_run = |i: &usize| review.opened.run.is_none() || messages[*i].run == review.opened.run;
    answers.take_while(same_run).find(|i| messages[*i].message.call_ids().iter().any(|id| id == call))
}

/// Finds the result of a call, before any later call with the same id.
fn find_result(messages: &[&StoredMessage], position: usize, call: &str) -> Option<usize> {
    let calls_again = |i: &usize| messages[*i].message.call_ids().iter().any(|id| id == call);
    let until_next = (position + 1..messages.len()).take_while(|i| !calls_again(i));
    until_next.into_iter().find(|i| messages[*i].message.tool_call_id_ref().is_some_and(|id| id == call))
}

/// Returns the reviewer's arguments, if the decision is a correction.
fn corrected_arguments(decided: &ReviewDecided) -> Option<&Map<String, Value>> {
    let corrected = decided.decision == Decision::Corrected;
    decided.arguments.as_ref().filter(|_| corrected)?.as_object()
}

/// Returns the note that is shown with the result of a reviewed call. `None` means that no note is needed.
fn note(review: &Review, decided: &ReviewDecided) -> Option<String> {
    let text = match (review.opened.lost, decided.decision) {
        (_, Decision::Corrected) => "a reviewer changed the arguments",
        (false, Decision::Approved) => "a reviewer approved this call",
        (true, Decision::Rejected) => "a reviewer confirmed that this call had not been executed",
        // The results of these calls state the decision and the notes already.
        (true, Decision::Approved) | (false, Decision::Rejected) => return None,
    };
    match &decided.notes {
        Some(notes) => Some(format!("[{text}: {notes}]")),
        None => (decided.decision == Decision::Corrected).then(|| format!("[{text}]")),
    }
}

/// Returns an assistant message with other arguments for one of its calls.
fn with_arguments(message: &Message, call: &str, arguments: &Map<String, Value>) -> Option<Message> {
    let mut value = parse_for_edit(message)?;
    let index = message.call_ids().iter().position(|id| id == call)?;
    let calls = value.get_mut("tool_calls")?.as_array_mut()?;
    let function = calls.get_mut(index)?.get_mut("function")?.as_object_mut()?;
    function.insert("arguments".to_owned(), json!(Value::Object(arguments.clone()).to_string()));
    Message::from_value(&value).ok()
}

/// Returns a tool result with a note prepended to its content.
fn with_note(message: &Message, note: &str) -> Option<Message> {
    let mut value = parse_for_edit(message)?;
    let content = value.get_mut("content")?;
    match content {
        Value::String(text) => *text = format!("{note}\n{text}"),
        Value::Array(parts) => parts.insert(0, json!({"type": "text", "text": note})),
        _ => *content = json!(note),
    }
    Message::from_value(&value).ok()
}

/// Parses a message for modification. `None` if its media are detached, because they are referenced by byte
/// offsets in its text.
fn parse_for_edit(message: &Message) -> Option<Value> {
    message.blob_refs().is_empty().then(|| message.to_value())
}
