//! What a model may be shown: a history that is valid for every OpenAI-style server, after any crash, edit, fork or cut.
//!
//! * Each tool call is followed by exactly one result. A result that came late moves to its call; one that answers nothing is
//!   left out; one that never came is stood in for by a marked message that is never stored.
//! * The system messages come first: those the conversation began with, or those that replaced them since.
//! * A window leaves out the oldest turns, whole turns only. The log keeps everything.
//!
//! Tokens are estimated: a quarter of the text's bytes, and [`MEDIA_TOKENS`] for each picture, sound or file.

use crate::message::{Message, Role};
use crate::policy::Window;
use crate::session::{Said, Session};
use std::ops::Range;

/// What a picture, sound or file is estimated to cost.
pub const MEDIA_TOKENS: usize = 800;

/// The text of a result that stands in for one that never came.
pub const NO_RESULT: &str = "[no result: this call was interrupted before it finished]";

/// The history of a session as a model may see it, within a window.
pub fn history(session: &Session, window: &Window) -> Vec<Message> {
    let messages = &session.messages[..];
    let lead = lead(messages);
    let mut shown: Vec<Message> = messages[lead.clone()].iter().map(|m| m.message.clone()).collect();
    let from = match &session.summary {
        Some(summary) => {
            shown.push(summary.message.clone());
            summary.position
        }
        None => 0,
    };
    let opening = opening(messages);
    let spoken = messages.iter().enumerate().skip(from);
    let spoken = spoken.filter(|(i, m)| *i >= opening && !m.lead).map(|(_, m)| &m.message);
    let mut spoken = repair(spoken);
    let start = window_start(&spoken, window, shown.iter().map(tokens).sum());
    shown.extend(spoken.drain(start..));
    shown
}

/// The messages that give a model its instructions now: the newest group that replaced the opening, or the opening itself.
pub fn lead(messages: &[Said]) -> Range<usize> {
    match messages.iter().rposition(|m| m.lead) {
        Some(last) => {
            let first = messages[..last].iter().rposition(|m| !m.lead).map_or(0, |i| i + 1);
            first..last + 1
        }
        None => 0..opening(messages),
    }
}

/// How many system messages the conversation began with.
pub(crate) fn opening(messages: &[Said]) -> usize {
    messages.iter().take_while(|m| m.message.role().instructs()).count()
}

/// Whether a list of messages is one that every OpenAI-style server takes: every tool call is followed by exactly one result,
/// and no result is without its call.
pub fn is_valid(messages: &[Message]) -> bool {
    let mut open: Vec<String> = Vec::new();
    for message in messages {
        match message.tool_call_id() {
            Some(id) => match open.iter().position(|o| *o == id) {
                Some(i) => drop(open.remove(i)),
                None => return false,
            },
            None if !open.is_empty() => return false,
            None => open = message.tool_calls().into_iter().map(|c| c.id).collect(),
        }
    }
    open.is_empty()
}

fn repair<'a>(messages: impl Iterator<Item = &'a Message>) -> Vec<Message> {
    struct Slot {
        call: String,
        group: usize,
        place: usize,
    }
    let mut shown: Vec<Message> = Vec::new();
    let mut open: Vec<Slot> = Vec::new();
    for message in messages {
        if let Some(id) = message.tool_call_id() {
            // The newest call of that id that waits; within one message, the first.
            let newest = open.iter().filter(|s| s.call == id).map(|s| s.group).max();
            if let Some(i) = newest.and_then(|g| open.iter().position(|s| s.call == id && s.group == g)) {
                shown[open.remove(i).place] = message.clone();
            }
            continue;
        }
        shown.push(message.clone());
        let group = shown.len();
        for call in message.tool_calls() {
            open.push(Slot { group, place: shown.len(), call: call.id.clone() });
            shown.push(Message::tool(&call.id, NO_RESULT));
        }
    }
    shown
}

fn window_start(messages: &[Message], window: &Window, mut used: usize) -> usize {
    if window.max_turns.is_none() && window.max_tokens.is_none() {
        return 0;
    }
    let mut start = messages.len();
    for (seen, turn) in turns(messages).into_iter().rev().enumerate() {
        used += messages[turn.clone()].iter().map(tokens).sum::<usize>();
        let over = window.max_turns.is_some_and(|max| seen >= max) || window.max_tokens.is_some_and(|max| used > max);
        if over && seen > 0 {
            break;
        }
        start = turn.start;
    }
    start
}

/// The turns of a history: each begins with a user message that does not follow another. What comes before the first one
/// belongs to it.
fn turns(messages: &[Message]) -> Vec<Range<usize>> {
    let mut starts = Vec::new();
    let mut last = None;
    for (i, message) in messages.iter().enumerate() {
        let role = message.role();
        if role == Role::User && last != Some(Role::User) {
            starts.push(if starts.is_empty() { 0 } else { i });
        }
        if !role.instructs() {
            last = Some(role);
        }
    }
    if starts.is_empty() {
        starts.push(0);
    }
    let ends = starts.iter().skip(1).copied().chain([messages.len()]).collect::<Vec<_>>();
    starts.into_iter().zip(ends).map(|(a, b)| a..b).collect()
}

/// The estimated number of tokens of a message.
pub fn tokens(message: &Message) -> usize {
    let raw = message.as_str();
    let media = match message.cuts().is_empty() && !raw.contains(";base64,") {
        true => 0,
        false => message.meaning().media.len(),
    };
    match media {
        0 => raw.len() / 4,
        n => message.text().len() / 4 + n * MEDIA_TOKENS,
    }
}
