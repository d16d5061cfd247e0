//! Aligns the messages of a request with those of the session: finds the anchor, and pairs the messages
//! before it.

use super::index::StoredIndex;
use crate::rules::overlay::Overlay;
use crate::rules::session::StoredMessage;
use crate::types::message::meaning::{CallMatch, pair_calls};
use crate::types::message::{Message, Role};
use std::collections::{HashMap, HashSet};
use std::ops::RangeFrom;

/// Maximum number of messages before an anchor that are compared to choose between candidates.
const CONTEXT: usize = 32;

/// The stored position of an anchor.
#[derive(Clone, Copy, Debug)]
pub(super) struct AnchorMatch {
    pub position: usize,
    /// Whether several positions match equally well.
    pub is_tie: bool,
    /// Whether the preceding question is the same in the request and in the session.
    pub question_agrees: bool,
}

/// Finds the stored message that equals the assistant message at `end` of a request.
pub(super) fn locate(stored: &StoredIndex<'_>, rest: &[Message], end: usize) -> Option<AnchorMatch> {
    // Fast path: the answer and its question are in the last turn.
    let recent = best(stored, crate::rules::reconcile::plan::last_turn(stored).., &rest[end]);
    if let Some(position) = recent.last().filter(|p| question_agrees(stored, **p, rest, end)) {
        return Some(AnchorMatch { position: *position, is_tie: false, question_agrees: true });
    }
    locate_anywhere(stored, rest, end)
}

/// Finds the stored message that equals the assistant message at `end` of a request, by the index. Costs the
/// number of equal messages, once the session is indexed.
pub(super) fn locate_anywhere(stored: &StoredIndex<'_>, rest: &[Message], end: usize) -> Option<AnchorMatch> {
    let found = |position, is_tie| {
        let question_agrees = question_agrees(stored, position, rest, end);
        Some(AnchorMatch { position, is_tie, question_agrees })
    };
    let candidates = stored.same_as(&rest[end], stored.len());
    let all = best_of(stored, candidates.into_iter(), &rest[end]);
    if all.len() <= 1 {
        return found(*all.first()?, false);
    }
    let scores: Vec<usize> = all.iter().map(|p| agreeing_before(stored, *p, rest, end)).collect();
    let best = scores.iter().copied().max()?;
    let latest = scores.iter().rposition(|score| *score == best)?;
    found(all[latest], scores.iter().filter(|score| **score == best).count() > 1)
}

/// Returns the positions in a range whose message equals this assistant message.
fn best(stored: &[StoredMessage], range: RangeFrom<usize>, message: &Message) -> Vec<usize> {
    best_of(stored, range.take_while(|p| *p < stored.len()), message)
}

/// Returns those of the positions whose message equals this assistant message. With tool calls, only the best
/// kind of match counts: a known id is never overruled by equal arguments.
fn best_of(stored: &[StoredMessage], positions: impl Iterator<Item = usize>, message: &Message) -> Vec<usize> {
    let assistants = positions.filter(|p| stored[*p].message.role() == Role::Assistant);
    if message.call_ids().is_empty() {
        let meaning = message.meaning();
        let plain = assistants.filter(|p| stored[*p].message.is_visible());
        return plain.filter(|p| stored[*p].message.has_content(&meaning)).collect();
    }
    let matches: Vec<(usize, CallMatch)> =
        assistants.filter_map(|p| Some((p, stored[p].message.call_match(message)?))).collect();
    let best = matches.iter().map(|(_, kind)| *kind).max();
    matches.into_iter().filter(|(_, kind)| Some(*kind) == best).map(|(p, _)| p).collect()
}

/// Returns true if the last user message before the anchor is the same in the request and in the session.
fn question_agrees(stored: &[StoredMessage], position: usize, rest: &[Message], end: usize) -> bool {
    let incoming_question = rest[..end].iter().rev().find(|m| m.role() == Role::User);
    let stored_question = stored[..position].iter().rev().find(|m| m.message.role() == Role::User);
    match (stored_question, incoming_question) {
        (Some(stored_question), Some(incoming_question)) => stored_question.message.is_same(incoming_question),
        _ => false,
    }
}

/// Counts how many messages directly before a position equal those before the anchor. Tool messages that the
/// client omitted do not interrupt the sequence.
fn agreeing_before(stored: &[StoredMessage], position: usize, rest: &[Message], end: usize) -> usize {
    let mut stored_before = stored[..position].iter().rev().filter(|m| !m.message.role().is_instruction()).peekable();
    let incoming_before = rest[..end].iter().rev().filter(|m| !m.role().is_instruction());
    let mut agreeing = 0;
    for message in incoming_before.take(CONTEXT) {
        while stored_before.next_if(|m| m.message.is_tool_round() && !m.message.is_same(message)).is_some() {}
        match stored_before.next_if(|m| m.message.is_same(message)) {
            Some(_) => agreeing += 1,
            None => break,
        }
    }
    agreeing
}

/// A pairing of equal messages in a request and in the session, up to an anchor that is one of the pairs.
pub(super) struct Alignment {
    /// The index of the anchor in the request.
    pub end: usize,
    /// The position of the anchor in the session.
    pub position: usize,
    /// For each message of the request up to the anchor, and those paired after it: the position of the
    /// stored message that it equals.
    pairs: Vec<Option<usize>>,
    /// Messages after the anchor that replace stored ones in the prompt: index in the request, position in
    /// the session.
    replaced: Vec<(usize, usize)>,
    /// Number of messages after the anchor that are neither stored nor shown.
    skipped: usize,
}

impl Alignment {
    /// Pairs messages backwards from the anchor. Costs the length of the request; if messages differ, the
    /// session is indexed once.
    pub fn new(stored: &StoredIndex<'_>, rest: &[Message], end: usize, position: usize) -> Self {
        let mut pairs = vec![None; end + 1];
        pairs[end] = Some(position);
        // The last stored message that is not paired yet.
        let mut next = position;
        // The start of the tool messages before `next`, as far as they were skipped.
        let mut above_tools = position;
        let mut results = HashSet::new();
        for j in (0..end).rev() {
            let message = &rest[j];
            if message.role() == Role::Tool {
                // Results of parallel calls may come in another order.
                let found = stored.result_before(message, next, &results);
                results.extend(found);
                pairs[j] = found;
                continue;
            }
            let mut p = if message.is_tool_round() { next } else { above_tools.min(next) };
            while p > 0 && is_skipped(&stored[p - 1], message) {
                p -= 1;
            }
            if !message.is_tool_round() {
                above_tools = p;
            }
            let here = p.checked_sub(1).filter(|p| stored[*p].message.is_same(message));
            let found = here.or_else(|| find_before(stored, next, rest, j));
            if let Some(found) = found {
                pairs[j] = Some(found);
                (next, above_tools) = (found, found);
            }
        }
        let mut alignment = Self { end, position, pairs, replaced: Vec::new(), skipped: 0 };
        alignment.pair_renamed_results(stored, rest);
        alignment
    }

    /// Pairs the results of calls whose ids the client renamed.
    fn pair_renamed_results(&mut self, stored: &StoredIndex<'_>, rest: &[Message]) {
        let is_open = |j: &usize| self.pairs[*j].is_none() && rest[*j].role() == Role::Tool;
        let open: Vec<usize> = (0..self.end).filter(is_open).collect();
        if open.is_empty() {
            return;
        }
        // The client's ids, each with the stored id and the position of the stored call.
        let mut stored_calls: HashMap<String, (String, usize)> = HashMap::new();
        for (j, position) in self.pairs.iter().enumerate().filter_map(|(j, p)| Some((j, (*p)?))) {
            let ids = renamed_call_ids(&stored[position].message, &rest[j]).into_iter();
            stored_calls.extend(ids.map(|(incoming_id, id)| (incoming_id, (id, position))));
        }
        for j in open {
            let stored_call = rest[j].tool_call_id().and_then(|id| stored_calls.get(&id));
            self.pairs[j] =
                stored_call.and_then(|(id, call)| stored.result_of(id, *call)).filter(|p| *p < self.position);
        }
    }

    /// Adds a pair after the anchor.
    pub fn pair(&mut self, index: usize, position: usize) {
        self.pairs.resize(index + 1, None);
        self.pairs[index] = Some(position);
    }

    /// Shows a message after the anchor in place of a stored one.
    pub fn replace(&mut self, index: usize, position: usize) {
        self.replaced.push((index, position));
    }

    /// Drops a number of messages after the anchor.
    pub fn skip(&mut self, messages: usize) {
        self.skipped += messages;
    }

    /// Returns the record of the last paired assistant message, if it is among the `retained` stored messages
    /// that remain.
    pub fn anchor(&self, stored: &[StoredMessage], retained: usize) -> Option<crate::types::id::Seq> {
        let paired = self.pairs.iter().rev().flatten();
        let mut remaining = paired.filter(|p| **p < retained && stored[**p].message.role() == Role::Assistant);
        remaining.next().map(|p| stored[*p].seq)
    }

    /// Computes the overlay: what the model is shown instead of the first `retained` stored messages.
    pub fn overlay(&self, stored: &[StoredMessage], rest: &[Message], retained: usize) -> AlignedView {
        let mut view = AlignedView { ephemeral: self.skipped, ..AlignedView::default() };
        for (index, position) in &self.replaced {
            view.overlay.replace(&stored[*position], rest[*index].clone());
            view.ephemeral += 1;
        }
        // Stored messages from here on are already processed.
        let mut upper = self.position;
        let mut unpaired: Vec<&Message> = Vec::new();
        let mut first = self.position;
        for (j, pair) in self.pairs.iter().enumerate().rev() {
            let message = &rest[j];
            let Some(p) = *pair else {
                view.ephemeral += 1;
                unpaired.push(message);
                continue;
            };
            let changed = message.role() == Role::Tool && !stored[p].message.has_same_content(message);
            if changed && p < retained {
                view.ephemeral += 1;
                view.overlay.replace(&stored[p], as_answer_to(&stored[p].message, message));
            } else {
                view.matched += 1;
            }
            first = first.min(p);
            if j >= self.end || message.role() == Role::Tool {
                continue;
            }
            unpaired.reverse();
            overlay_between(&stored[p + 1..upper.max(p + 1)], &stored[upper], &unpaired, &mut view.overlay);
            unpaired.clear();
            upper = p;
        }
        if !unpaired.is_empty() {
            unpaired.reverse();
            view.overlay.begin_with(&stored[first], unpaired.into_iter().cloned().collect());
        }
        view.first = first;
        view
    }
}

/// The outcome of an alignment.
#[derive(Default)]
pub(super) struct AlignedView {
    pub matched: usize,
    pub ephemeral: usize,
    /// The position of the first stored message that the request contains.
    pub first: usize,
    pub overlay: Overlay,
}

/// Handles unpaired messages between two pairs: each is shown in place of the stored message of the same
/// role, in order; the others are inserted before the next pair.
fn overlay_between(messages: &[StoredMessage], next: &StoredMessage, incoming: &[&Message], overlay: &mut Overlay) {
    let mut rest = incoming.iter().peekable();
    for stored in messages {
        let hidden = stored.replaces_instructions || stored.message.is_tool_round();
        let replaces = |m: &&&Message| m.role() == stored.message.role() && !m.is_tool_round();
        if !hidden && let Some(message) = rest.next_if(replaces) {
            overlay.replace(stored, (*message).clone());
        }
    }
    let rest: Vec<Message> = rest.map(|m| (*m).clone()).collect();
    if !rest.is_empty() {
        overlay.insert_before(next, rest);
    }
}

/// Returns a client's tool result with the call id of the stored one.
pub(super) fn as_answer_to(stored: &Message, result: &Message) -> Message {
    match stored.tool_call_id_ref() {
        Some(id) if result.tool_call_id_ref().as_deref() != Some(&*id) => result.with_tool_call_id(&id),
        _ => result.clone(),
    }
}

/// Maps the client's tool call ids to the stored ids, if the calls agree by name and arguments only. Empty if
/// any id agrees.
pub(super) fn renamed_call_ids(stored: &Message, incoming: &Message) -> HashMap<String, String> {
    let stored_calls = stored.tool_calls();
    let incoming_calls = incoming.tool_calls();
    if incoming_calls.iter().any(|incoming| stored_calls.iter().any(|stored| stored.id == incoming.id)) {
        return HashMap::new();
    }
    let pairs = pair_calls(&stored_calls, &incoming_calls).unwrap_or_default();
    incoming_calls.into_iter().zip(pairs).map(|(call, i)| (call.id, stored_calls[i].id.clone())).collect()
}

/// Returns true if a stored message is skipped when compared with this incoming one: parts of the system
/// prompt, and tool messages that the client omitted.
fn is_skipped(stored: &StoredMessage, message: &Message) -> bool {
    let prompt =
        stored.replaces_instructions || (stored.message.role().is_instruction() && !message.role().is_instruction());
    prompt || (stored.message.is_tool_round() && !stored.message.is_same(message))
}

/// Finds the position before `next` of the message at `j`: the only one, or the latest whose preceding
/// message agrees as well.
fn find_before(stored: &StoredIndex<'_>, next: usize, rest: &[Message], j: usize) -> Option<usize> {
    let found = stored.same_as(&rest[j], next);
    match found[..] {
        [] => None,
        [only] => Some(only),
        _ => found.into_iter().rev().find(|p| agreeing_before(stored, *p, rest, j) > 0),
    }
}
