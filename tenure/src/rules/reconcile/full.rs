//! `history: full`: the request is the whole history.
//!
//! Stored and incoming messages are compared in order, up to the first difference. Stored tool messages
//! remain where their neighbors agree, because most clients never saw them. Everything else that differs or
//! is missing is rewound.

use super::index::StoredIndex;
use crate::rules::prompt::opening;
use crate::rules::reconcile::plan::{NewMessage, ReconcilePlan, ReplyTo};
use crate::rules::session::StoredMessage;
use crate::types::message::{Message, Role};
use std::ops::Range;

/// Reconciles a request that is the whole history.
pub(super) fn plan(stored: &StoredIndex<'_>, rest: &[Message]) -> ReconcilePlan {
    let opening = opening(stored);
    let mut turn = turn_around(stored, 0);
    let mut tools = 0..0;
    let (mut i, mut j) = (0, 0);
    // The end of the stored messages that the request contains too.
    let mut kept = 0;
    let mut has = vec![false; stored.len()];
    let keep = loop {
        let Some(theirs) = rest.get(j) else { break kept };
        if i >= turn.end && i < stored.len() {
            turn = turn_around(stored, i);
        }
        if !tools.contains(&i) {
            tools = i..end_of_tools(stored, i);
        }
        let find = |mut places: Range<usize>| places.find(|k| stored[*k].message.is_same(theirs));
        // Results may be in another order than the stored ones.
        if theirs.role() == Role::Tool
            && let Some(k) = theirs.answers().and_then(|id| stored.result_of(&id, turn.start))
            && k < tools.end.max(i)
        {
            has[k] = true;
            kept = kept.max(k + 1);
            j += 1;
            continue;
        }
        let Some(ours) = stored.get(i) else { break i };
        if i < opening || ours.lead || ours.message.role() == Role::Tool {
            i += 1;
        } else if ours.message.is_same(theirs) {
            has[i] = true;
            (i, j) = (i + 1, j + 1);
            kept = kept.max(i);
        } else if !ours.message.is_tool_turn() {
            break i;
        } else if theirs.is_tool_turn() && theirs.role() == Role::Assistant {
            // A client that calls tools itself sends its calls; the server's calls, which it never saw,
            // precede them.
            match find(i..turn.end) {
                Some(k) => i = k,
                None => break kept.max(opening),
            }
        } else {
            i += 1;
        }
    };
    let spliced = (0..keep).filter(|k| !has[*k] && stored[*k].message.is_tool_turn()).count();
    let answer = (0..keep).rev().find(|k| has[*k] && stored[*k].message.role() == Role::Assistant);
    let append = new_messages(answer.map(|k| ReplyTo::Stored(stored[k].seq)), &rest[j..]);
    ReconcilePlan { matched: j, spliced, append, ..ReconcilePlan::keeping(stored, keep) }
}

/// Builds the messages to append, each user message with the assistant message that it follows.
fn new_messages(mut reply: Option<ReplyTo>, new: &[Message]) -> Vec<NewMessage> {
    let mut messages = Vec::with_capacity(new.len());
    for message in new {
        let replies_to = reply.filter(|_| message.role() == Role::User);
        if message.role() == Role::Assistant {
            reply = Some(ReplyTo::New(messages.len()));
        }
        messages.push(NewMessage { lead: false, replies_to, message: message.clone() });
    }
    messages
}

/// Returns the end of the tool messages that start at `i`.
fn end_of_tools(stored: &[StoredMessage], i: usize) -> usize {
    let others = stored.iter().skip(i).position(|m| !m.lead && !m.message.is_tool_turn());
    others.map_or(stored.len(), |p| i + p)
}

/// Returns the range of the stored messages of the turn at `i`, between its question and the next one.
fn turn_around(stored: &[StoredMessage], i: usize) -> Range<usize> {
    let user = |m: &StoredMessage| m.message.role() == Role::User;
    let i = i.min(stored.len());
    let start = stored[..i].iter().rposition(user).map_or(0, |p| p + 1);
    let end = stored[i..].iter().position(user).map_or(stored.len(), |p| i + p);
    start..end
}
