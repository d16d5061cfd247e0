//! What a model may be shown: a history that is valid for every OpenAI-style server, after any crash, edit, fork or cut.
//!
//! * Each tool call is followed by exactly one result. A result that came late moves to its call; one that answers nothing is
//!   left out; one that never came is stood in for by a marked message that is never stored.
//! * The system messages come first: those the conversation began with, or those that replaced them since.
//! * A summary stands for the oldest turns, if one was written ([`crate::Tenure::compact`]).
//! * A call that a reviewer has corrected is shown with the arguments that were used, and notes of reviewers before the result.
//! * A window leaves out the oldest turns, whole turns only. The log keeps everything.
//!
//! Tokens are estimated: a quarter of the text's bytes, and [`MEDIA_TOKENS`] for each picture, sound or file.

use crate::rules::decided_calls::with_decisions;
use crate::rules::overlay::Overlay;
use crate::rules::session::{Review, Said, Session, Summary};
use crate::types::id::Seq;
use crate::types::message::{Message, Role};
use crate::types::policy::Window;
use std::borrow::{Borrow, Cow};
use std::ops::Range;

/// What a picture, sound or file is estimated to cost.
pub const MEDIA_TOKENS: usize = 800;

/// The text of a result that stands in for one that never came.
pub const NO_RESULT: &str = "[no result: this call was interrupted before it finished]";

/// The history of a session as a model may see it, within a window.
pub fn history(session: &Session, window: &Window) -> Vec<Message> {
    shown_with(session.messages.iter(), &session.reviews, &session.summaries, window, &Overlay::default())
}

impl Overlay {
    /// The history of a session as a model may see it, within a window, with what is shown in place of stored messages.
    pub fn shown(&self, session: &Session, window: &Window) -> Vec<Message> {
        shown_with(session.messages.iter(), &session.reviews, &session.summaries, window, self)
    }
}

/// The same for a list of messages, with what is shown in place of some of them.
pub(crate) fn shown_with<'a>(
    messages: impl Iterator<Item = &'a Said>,
    reviews: &[Review],
    summaries: &[Summary],
    window: &Window,
    overlay: &Overlay,
) -> Vec<Message> {
    let messages: Vec<&Said> = messages.collect();
    let summary = summaries.iter().rev().find(|s| holds(s, &messages));
    if overlay.is_empty() {
        return shown(&messages, reviews, summary, window);
    }
    // A client that sends its own beginning after what is summarized does not want the summary.
    let summary = summary.filter(|s| !overlay.hides(s.upto));
    let messages = overlay.apply(messages.into_iter());
    let messages: Vec<&Said> = messages.iter().map(|m| &**m).collect();
    shown(&messages, reviews, summary, window)
}

/// The same for a list of messages. Costs what the window shows, however long the list is.
fn shown(messages: &[&Said], reviews: &[Review], summary: Option<&Summary>, window: &Window) -> Vec<Message> {
    let mut shown: Vec<Message> = messages[lead(messages)].iter().map(|m| m.message.clone()).collect();
    shown.extend(summary.map(|s| s.message.clone()));
    let covered = |upto: Seq| messages.partition_point(|m| m.seq <= upto);
    let from = summary.map_or(0, |s| covered(s.upto)).max(opening(messages));
    let said: Vec<&Said> = messages.iter().skip(from).filter(|m| !m.lead).copied().collect();
    let spoken: Vec<&Message> = said.iter().map(|m| &m.message).collect();
    let start = window_start(&spoken, window, || shown.iter().map(tokens).sum());
    // After the window: where it begins must not depend on what reviewers wrote.
    if reviews.iter().any(|r| r.decided.is_some()) {
        let spoken = with_decisions(&said[start..], reviews);
        shown.extend(repair(spoken.iter().map(|m| &**m)));
    } else {
        shown.extend(repair(spoken[start..].iter().copied()));
    }
    shown
}

/// Whether a summary covers the first of these messages, and nothing else. What it covers may lie before all of them.
fn holds(summary: &Summary, messages: &[&Said]) -> bool {
    let covers = |m: &&&Said| m.seq <= summary.upto;
    let before = summary.position.checked_sub(1).map(|i| messages.get(i));
    let after = messages.get(summary.position);
    before.is_none_or(|m| m.as_ref().is_some_and(covers)) && !after.as_ref().is_some_and(covers)
}

/// Whether what is shown is the same whatever was said before these messages, instructions and summaries apart. From `since` on they are all
/// there, beginning with a user's; those before it are instructions.
pub(crate) fn is_enough(messages: &[&Said], since: Seq, summaries: &[Summary], window: &Window) -> bool {
    let summary = summaries.iter().rev().find(|s| holds(s, messages));
    if summary.is_some_and(|s| s.upto >= since) {
        return true;
    }
    let lead = messages[lead(messages)].iter().map(|m| &m.message).chain(summary.map(|s| &s.message));
    let lead: usize = lead.map(tokens).sum();
    let spoken: Vec<&Message> = messages.iter().filter(|m| m.seq >= since && !m.lead).map(|m| &m.message).collect();
    // Turns that begin after the first of them do so whatever came before. If that one is too much, it is so with more before it.
    window_start(&spoken, window, || lead) > 0
}

/// The messages that give a model its instructions now: the newest group that replaced the opening, or the opening itself.
pub fn lead<S: Borrow<Said>>(messages: &[S]) -> Range<usize> {
    let is_lead = |m: &S| m.borrow().lead;
    match messages.iter().rposition(is_lead) {
        Some(last) => {
            let first = messages[..last].iter().rposition(|m| !is_lead(m)).map_or(0, |i| i + 1);
            first..last + 1
        }
        None => 0..opening(messages),
    }
}

/// How many system messages the conversation began with.
pub(crate) fn opening<S: Borrow<Said>>(messages: &[S]) -> usize {
    messages.iter().map(Borrow::borrow).take_while(|m: &&Said| m.message.role().instructs()).count()
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
    /// A call, and where its result belongs.
    struct Slot<'a> {
        call: Cow<'a, str>,
        group: usize,
        place: usize,
    }
    // Nothing: a result that is not there yet.
    let mut shown: Vec<Option<&Message>> = Vec::new();
    let mut open: Vec<Slot<'_>> = Vec::new();
    for message in messages {
        if let Some(id) = message.answers() {
            // The newest call of that id that waits; within one message, the first.
            let newest = open.iter().filter(|s| s.call == id).map(|s| s.group).max();
            if let Some(i) = newest.and_then(|g| open.iter().position(|s| s.call == id && s.group == g)) {
                shown[open.remove(i).place] = Some(message);
            }
            continue;
        }
        shown.push(Some(message));
        let group = shown.len();
        for call in message.call_ids() {
            open.push(Slot { group, place: shown.len(), call });
            shown.push(None);
        }
    }
    // Those that never came are open still, in the order of their places.
    let mut missing = open.into_iter().map(|slot| Message::tool(&slot.call, NO_RESULT));
    shown.into_iter().filter_map(|message| message.cloned().or_else(|| missing.next())).collect()
}

/// Where the newest turns that fit begin.
fn window_start(messages: &[&Message], window: &Window, lead: impl Fn() -> usize) -> usize {
    if window.max_turns.is_none() && window.max_tokens.is_none() {
        return 0;
    }
    let mut budget = window.max_tokens.map(|max| (lead(), max));
    let (mut start, mut seen) = (messages.len(), 0);
    while start > 0 {
        let turn = last_turn(&messages[..start]);
        if let Some((used, _)) = &mut budget {
            *used += messages[turn..start].iter().map(|m| tokens(m)).sum::<usize>();
        }
        let over = window.max_turns.is_some_and(|max| seen >= max) || budget.is_some_and(|(used, max)| used > max);
        if over && seen > 0 {
            break;
        }
        (start, seen) = (turn, seen + 1);
    }
    start
}

/// Where the last turn begins: with a user message that does not follow another. What comes before the first turn belongs to it.
fn last_turn(messages: &[&Message]) -> usize {
    let said = |i: &usize| !messages[*i].role().instructs();
    let is_user = |i: &usize| messages[*i].role() == Role::User;
    let mut end = messages.len();
    while let Some(user) = (0..end).rfind(is_user) {
        match (0..user).rfind(said) {
            Some(before) if is_user(&before) => end = user,
            Some(_) if (0..user).any(|i| is_user(&i)) => return user,
            _ => return 0,
        }
    }
    0
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
