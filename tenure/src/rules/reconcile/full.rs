//! `history: full`: the request is the whole history.
//!
//! Stored and incoming messages are compared in order, up to the first difference. Stored tool messages
//! remain where their neighbors agree, because most clients never saw them. Everything else that differs or
//! is missing is rewound.

use super::index::StoredIndex;
use crate::rules::prompt::count_initial_instructions;
use crate::rules::reconcile::plan::{NewMessage, ReconcilePlan, ReplyTo};
use crate::rules::session::StoredMessage;
use crate::types::message::{Message, Role};
use std::ops::Range;

/// Reconciles a request that is the whole history.
pub(super) fn plan(stored: &StoredIndex<'_>, rest: &[Message]) -> ReconcilePlan {
    let initial_instructions = count_initial_instructions(stored);
    let mut turn = turn_around(stored, 0);
    let mut tools = 0..0;
    let mut i = 0;
    let mut j = 0;
    // The end of the stored messages that the request contains too.
    let mut matched_end = 0;
    let mut is_matched = vec![false; stored.len()];
    let retained = loop {
        let Some(incoming) = rest.get(j) else { break matched_end };
        if i >= turn.end && i < stored.len() {
            turn = turn_around(stored, i);
        }
        if !tools.contains(&i) {
            tools = i..end_of_tools(stored, i);
        }
        let find = |mut positions: Range<usize>| positions.find(|k| stored[*k].message.is_same(incoming));
        // Results may be in another order than the stored ones.
        if incoming.role() == Role::Tool
            && let Some(k) = incoming.tool_call_id_ref().and_then(|id| stored.result_of(&id, turn.start))
            && k < tools.end.max(i)
        {
            is_matched[k] = true;
            matched_end = matched_end.max(k + 1);
            j += 1;
            continue;
        }
        let Some(current) = stored.get(i) else { break i };
        if i < initial_instructions || current.replaces_instructions || current.message.role() == Role::Tool {
            i += 1;
        } else if current.message.is_same(incoming) {
            is_matched[i] = true;
            i += 1;
            j += 1;
            matched_end = matched_end.max(i);
        } else if !current.message.is_tool_round() {
            break i;
        } else if incoming.is_tool_round() && incoming.role() == Role::Assistant {
            // A client that calls tools itself sends its calls; the server's calls, which it never saw,
            // precede them.
            match find(i..turn.end) {
                Some(k) => i = k,
                None => break matched_end.max(initial_instructions),
            }
        } else {
            i += 1;
        }
    };
    let omitted = (0..retained).filter(|k| !is_matched[*k] && stored[*k].message.is_tool_round()).count();
    let answer = (0..retained).rev().find(|k| is_matched[*k] && stored[*k].message.role() == Role::Assistant);
    let append = new_messages(answer.map(|k| ReplyTo::Stored(stored[k].seq)), &rest[j..]);
    ReconcilePlan { matched: j, omitted, append, ..ReconcilePlan::retaining(stored, retained) }
}

/// Builds the messages to append, each user message with the assistant message that it follows.
fn new_messages(mut reply: Option<ReplyTo>, new: &[Message]) -> Vec<NewMessage> {
    let mut messages = Vec::with_capacity(new.len());
    for message in new {
        let replies_to = reply.filter(|_| message.role() == Role::User);
        if message.role() == Role::Assistant {
            reply = Some(ReplyTo::New(messages.len()));
        }
        messages.push(NewMessage { replaces_instructions: false, replies_to, message: message.clone() });
    }
    messages
}

/// Returns the end of the tool messages that start at `i`.
fn end_of_tools(stored: &[StoredMessage], i: usize) -> usize {
    let other = stored.iter().skip(i).position(|m| !m.replaces_instructions && !m.message.is_tool_round());
    other.map_or(stored.len(), |p| i + p)
}

/// Returns the range of the stored messages of the turn at `i`, between its question and the next one.
fn turn_around(stored: &[StoredMessage], i: usize) -> Range<usize> {
    let is_user = |m: &StoredMessage| m.message.role() == Role::User;
    let i = i.min(stored.len());
    let start = stored[..i].iter().rposition(is_user).map_or(0, |p| p + 1);
    let end = stored[i..].iter().position(is_user).map_or(stored.len(), |p| i + p);
    start..end
}
