//! Builds the prompt: a message history that is valid for every OpenAI-compatible server, after any crash,
//! edit, fork or rewind.
//!
//! * Each tool call is followed by exactly one result. A late result moves to its call; one without a call is
//!   omitted; a missing one is replaced by a marked message that is never stored.
//! * System messages come first: the initial ones, or those that have replaced them.
//! * A summary replaces the oldest turns, if one was written ([`crate::Tenure::compact`]).
//! * A call that a reviewer corrected is shown with the arguments that were used, and reviewers' notes are
//!   shown before the result.
//! * A window omits the oldest turns, whole turns only. The log retains everything.
//!
//! Tokens are estimated: a quarter of the text's bytes, and [`MEDIA_TOKENS`] for each image, audio or file of
//! a message with detached media or data URLs. Other messages are counted as text.

use crate::rules::decided_calls::with_decisions;
use crate::rules::overlay::Overlay;
use crate::rules::session::{Review, Session, StoredMessage, Summary};
use crate::rules::turns::begins_turn;
use crate::types::id::Seq;
use crate::types::message::{Message, Role};
use crate::types::policy::Window;
use std::borrow::{Borrow, Cow};
use std::ops::Range;

/// Estimated number of tokens of an image, audio or file.
pub const MEDIA_TOKENS: usize = 800;

/// The content of the message that replaces a missing tool result.
pub const NO_RESULT: &str = "[no result: this call was interrupted before it finished]";

/// Returns the history of a session as shown to a model, limited to a window.
pub fn history(session: &Session, window: &Window) -> Vec<Message> {
    build_history(session.messages.iter(), &session.reviews, &session.summaries, window, &Overlay::default())
}

impl Overlay {
    /// Returns the history of a session as shown to a model, limited to a window, with the messages of this
    /// overlay in place of stored ones.
    pub fn history(&self, session: &Session, window: &Window) -> Vec<Message> {
        build_history(session.messages.iter(), &session.reviews, &session.summaries, window, self)
    }
}

/// Builds the prompt of a stateless session: the request as it was sent, followed by the messages that its run
/// has produced. Nothing else of the session is shown (D-130).
pub(crate) fn stateless_prompt(request: &[Message], produced: &[&StoredMessage], reviews: &[Review]) -> Vec<Message> {
    let produced = with_decisions(produced, reviews);
    repair(request.iter().chain(produced.iter().map(|m| &**m)))
}

/// Returns true if a request can be answered without the stored messages. It cannot if it contains no
/// conversation, or if it ends with results of tool calls that it does not contain.
pub(crate) fn is_self_contained(request: &[Message]) -> bool {
    let mut newest_first = request.iter().rev().filter(|m| !m.role().is_instruction()).peekable();
    let calls = |id: &str| request.iter().any(|m| m.call_ids().iter().any(|call| call == id));
    newest_first.peek().is_some() && newest_first.map_while(|m| m.tool_call_id_ref()).all(|id| calls(&id))
}

/// Builds the history from a list of messages, limited to a window, with an overlay applied.
pub(crate) fn build_history<'a>(
    messages: impl Iterator<Item = &'a StoredMessage>,
    reviews: &[Review],
    summaries: &[Summary],
    window: &Window,
    overlay: &Overlay,
) -> Vec<Message> {
    let messages: Vec<&StoredMessage> = messages.collect();
    let summary = summaries.iter().rev().find(|s| is_applicable(s, &messages));
    if overlay.is_empty() {
        return windowed_history(&messages, reviews, summary, window);
    }
    // The client sent its own beginning in place of the summarized part, so the summary is not shown.
    let summary = summary.filter(|s| !overlay.hides(s.upto));
    let messages = overlay.apply(messages.into_iter());
    let messages: Vec<&StoredMessage> = messages.iter().map(|m| &**m).collect();
    windowed_history(&messages, reviews, summary, window)
}

/// Builds the history from a list of messages, limited to a window. The cost depends on what the window
/// shows, not on the length of the list.
fn windowed_history(
    messages: &[&StoredMessage],
    reviews: &[Review],
    summary: Option<&Summary>,
    window: &Window,
) -> Vec<Message> {
    let mut shown: Vec<Message> = messages[active_instructions(messages)].iter().map(|m| m.message.clone()).collect();
    shown.extend(summary.map(|s| s.message.clone()));
    let covered = |upto: Seq| messages.partition_point(|m| m.seq <= upto);
    let from = summary.map_or(0, |s| covered(s.upto)).max(count_initial_instructions(messages));
    let stored: Vec<&StoredMessage> =
        messages.iter().skip(from).filter(|m| !m.replaces_instructions).copied().collect();
    let conversation: Vec<&Message> = stored.iter().map(|m| &m.message).collect();
    let start = window_start(&conversation, window, || shown.iter().map(tokens).sum());
    // Applied after the window, so that its start does not depend on the length of reviewers' notes.
    if reviews.iter().any(|r| r.decided.is_some()) {
        let conversation = with_decisions(&stored[start..], reviews);
        shown.extend(repair(conversation.iter().map(|m| &**m)));
    } else {
        shown.extend(repair(conversation[start..].iter().copied()));
    }
    shown
}

/// Returns true if a summary covers exactly the first `position` of these messages. The messages that it
/// covers may all precede these.
fn is_applicable(summary: &Summary, messages: &[&StoredMessage]) -> bool {
    let covers = |m: &&&StoredMessage| m.seq <= summary.upto;
    let before = summary.position.checked_sub(1).map(|i| messages.get(i));
    let after = messages.get(summary.position);
    before.is_none_or(|m| m.as_ref().is_some_and(covers)) && !after.as_ref().is_some_and(covers)
}

/// Returns true if the prompt built from these messages equals the prompt built from the full history, i.e.
/// the window boundary lies inside them (or a summary covers all that precedes them). The messages from
/// `since` on must be complete and start with a user message; those before it are instructions.
pub(crate) fn is_enough(messages: &[&StoredMessage], since: Seq, summaries: &[Summary], window: &Window) -> bool {
    let summary = summaries.iter().rev().find(|s| is_applicable(s, messages));
    if summary.is_some_and(|s| s.upto >= since) {
        return true;
    }
    let prefix = messages[active_instructions(messages)].iter().map(|m| &m.message).chain(summary.map(|s| &s.message));
    let prefix_tokens: usize = prefix.map(tokens).sum();
    let conversation: Vec<&Message> =
        messages.iter().filter(|m| m.seq >= since && !m.replaces_instructions).map(|m| &m.message).collect();
    // The starts of all turns after the first do not depend on earlier messages. If the first turn exceeds
    // the window, it does so with more messages before it too.
    window_start(&conversation, window, || prefix_tokens) > 0
}

/// Returns the range of the active instructions: the newest group that replaced the initial ones, or the
/// initial ones.
pub fn active_instructions<S: Borrow<StoredMessage>>(messages: &[S]) -> Range<usize> {
    let replaces_instructions = |m: &S| m.borrow().replaces_instructions;
    match messages.iter().rposition(replaces_instructions) {
        Some(last) => {
            let first = messages[..last].iter().rposition(|m| !replaces_instructions(m)).map_or(0, |i| i + 1);
            first..last + 1
        }
        None => 0..count_initial_instructions(messages),
    }
}

/// Returns the number of system messages that the conversation starts with.
pub(crate) fn count_initial_instructions<S: Borrow<StoredMessage>>(messages: &[S]) -> usize {
    messages.iter().map(Borrow::borrow).take_while(|m: &&StoredMessage| m.message.role().is_instruction()).count()
}

/// Returns true if every OpenAI-compatible server accepts the list: every tool call is followed by exactly
/// one result, and every result belongs to a preceding call.
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

/// Makes a history valid: moves each result to its call, drops results without a call, and replaces missing
/// results by [`NO_RESULT`].
fn repair<'a>(messages: impl Iterator<Item = &'a Message>) -> Vec<Message> {
    /// A tool call and the position of its result.
    struct Slot<'a> {
        call: Cow<'a, str>,
        group: usize,
        position: usize,
    }
    // `None` is a placeholder for a result that has not been found yet.
    let mut shown: Vec<Option<&Message>> = Vec::new();
    let mut open: Vec<Slot<'_>> = Vec::new();
    for message in messages {
        if let Some(id) = message.tool_call_id_ref() {
            // The newest open call with that id; within one message, the first.
            let newest = open.iter().filter(|s| s.call == id).map(|s| s.group).max();
            if let Some(i) = newest.and_then(|g| open.iter().position(|s| s.call == id && s.group == g)) {
                shown[open.remove(i).position] = Some(message);
            }
            continue;
        }
        shown.push(Some(message));
        let group = shown.len();
        for call in message.call_ids() {
            open.push(Slot { group, position: shown.len(), call });
            shown.push(None);
        }
    }
    // Calls that are still open have no result; they are in the order of their positions.
    let mut missing = open.into_iter().map(|slot| Message::tool(&slot.call, NO_RESULT));
    shown.into_iter().filter_map(|message| message.cloned().or_else(|| missing.next())).collect()
}

/// Returns the start of the newest turns that fit into the window.
fn window_start(messages: &[&Message], window: &Window, prefix_tokens: impl Fn() -> usize) -> usize {
    if window.max_turns.is_none() && window.max_tokens.is_none() {
        return 0;
    }
    let mut budget = window.max_tokens.map(|max| (prefix_tokens(), max));
    let mut start = messages.len();
    let mut turns = 0;
    while start > 0 {
        let turn = last_turn(&messages[..start]);
        if let Some((used, _)) = &mut budget {
            *used += messages[turn..start].iter().map(|m| tokens(m)).sum::<usize>();
        }
        let over = window.max_turns.is_some_and(|max| turns >= max) || budget.is_some_and(|(used, max)| used > max);
        if over && turns > 0 {
            break;
        }
        start = turn;
        turns += 1;
    }
    start
}

/// Returns the start of the last turn. Messages before the first turn belong to it.
fn last_turn(messages: &[&Message]) -> usize {
    let is_conversation = |i: &usize| !messages[*i].role().is_instruction();
    let is_user = |i: &usize| messages[*i].role() == Role::User;
    let mut end = messages.len();
    while let Some(user) = (0..end).rfind(is_user) {
        let last = (0..user).rfind(is_conversation).map(|i| messages[i].role());
        if begins_turn(Role::User, last) {
            return if (0..user).any(|i| is_user(&i)) { user } else { 0 };
        }
        end = user;
    }
    0
}

/// Estimates the number of tokens of a message.
pub fn tokens(message: &Message) -> usize {
    let raw = message.as_str();
    let has_media = !message.blob_refs().is_empty() || raw.contains(";base64,");
    let media = if has_media { message.meaning().media.len() } else { 0 };
    match media {
        0 => raw.len() / 4,
        n => message.text().len() / 4 + n * MEDIA_TOKENS,
    }
}
