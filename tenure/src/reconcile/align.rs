//! Where the messages of a request stand in the session: the anchor, and what precedes it.

use super::overlay::Overlay;
use crate::message::meaning::{CallMatch, pair_calls};
use crate::message::{Message, Role};
use crate::session::Said;
use std::collections::HashMap;
use std::ops::Range;

/// So many messages before an anchor are compared to tell candidates apart.
const CONTEXT: usize = 32;

/// Where the anchor is stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Located {
    pub position: usize,
    /// Several places are equally good.
    pub is_tie: bool,
    /// The question before it is the same in the request and in the session.
    pub question_agrees: bool,
}

/// Finds the stored message that the assistant message at `end` of a request is.
pub(super) fn locate(stored: &[Said], rest: &[Message], end: usize) -> Option<Located> {
    let turn = super::last_turn(stored);
    let found = |position, is_tie| {
        let question_agrees = question_agrees(stored, position, rest, end);
        Some(Located { position, is_tie, question_agrees })
    };
    // The common case: it is in the last turn, and so is its question.
    let recent = candidates(stored, turn..stored.len(), &rest[end]);
    if let Some(position) = recent.last().filter(|p| question_agrees(stored, **p, rest, end)) {
        return found(*position, false);
    }
    let all = candidates(stored, 0..stored.len(), &rest[end]);
    if all.len() <= 1 {
        return found(*all.first()?, false);
    }
    let scores: Vec<usize> = all.iter().map(|p| agreeing_before(stored, *p, rest, end)).collect();
    let best = scores.iter().copied().max()?;
    let latest = scores.iter().rposition(|score| *score == best)?;
    found(all[latest], scores.iter().filter(|score| **score == best).count() > 1)
}

/// The places of stored messages that are the same as this assistant message. Among those with tool calls, only the best kind of
/// agreement counts: an id that is known is never overruled by equal arguments.
fn candidates(stored: &[Said], range: Range<usize>, message: &Message) -> Vec<usize> {
    let assistants = range.filter(|p| stored[*p].message.role() == Role::Assistant);
    if message.call_ids().is_empty() {
        return assistants.filter(|p| stored[*p].message.is_same(message)).collect();
    }
    let matches: Vec<(usize, CallMatch)> =
        assistants.filter_map(|p| Some((p, stored[p].message.call_match(message)?))).collect();
    let best = matches.iter().map(|(_, kind)| *kind).max();
    matches.into_iter().filter(|(_, kind)| Some(*kind) == best).map(|(p, _)| p).collect()
}

fn question_agrees(stored: &[Said], position: usize, rest: &[Message], end: usize) -> bool {
    let theirs = rest[..end].iter().rev().find(|m| m.role() == Role::User);
    let ours = stored[..position].iter().rev().find(|m| m.message.role() == Role::User);
    match (ours, theirs) {
        (Some(ours), Some(theirs)) => ours.message.is_same(theirs),
        _ => false,
    }
}

/// How many messages directly before a place agree with those before the anchor. Tool messages that the client left out do not
/// interrupt.
fn agreeing_before(stored: &[Said], position: usize, rest: &[Message], end: usize) -> usize {
    let mut ours = stored[..position].iter().rev().filter(|m| !m.message.role().instructs()).peekable();
    let theirs = rest[..end].iter().rev().filter(|m| !m.role().instructs());
    let mut agreeing = 0;
    for message in theirs.take(CONTEXT) {
        while ours.next_if(|m| m.message.is_tool_turn() && !m.message.is_same(message)).is_some() {}
        match ours.next_if(|m| m.message.is_same(message)) {
            Some(_) => agreeing += 1,
            None => break,
        }
    }
    agreeing
}

/// Pairs of messages that are the same in a request and in the session, up to an anchor that is one of them.
pub(super) struct Alignment {
    /// The anchor's place in the request.
    pub end: usize,
    /// Its place in the session.
    pub position: usize,
    /// For each message of the request up to the anchor, and what was paired after it, the stored one that it is.
    pairs: Vec<Option<usize>>,
    /// Messages after the anchor that stand for stored ones in other words.
    replaced: Vec<(usize, usize)>,
    /// Messages after the anchor that are neither stored nor shown.
    left_out: usize,
}

impl Alignment {
    /// Walks back from the anchor. Costs the length of the request, unless messages differ: then the session is indexed once.
    pub fn new(stored: &[Said], rest: &[Message], end: usize, position: usize) -> Self {
        let mut pairs = vec![None; end + 1];
        pairs[end] = Some(position);
        let mut index: Option<Index<'_>> = None;
        // The last stored message that is not paired yet.
        let mut next = position;
        let mut results = position;
        for j in (0..end).rev() {
            let message = &rest[j];
            if message.role() == Role::Tool {
                // Results of parallel calls may come in another order.
                let found = (0..results)
                    .rev()
                    .take_while(|p| stored[*p].message.role() != Role::User)
                    .find(|p| stored[*p].message.is_same(message) && !pairs[j..].contains(&Some(*p)));
                pairs[j] = found;
                continue;
            }
            let mut p = next;
            while p > 0 && skipped(&stored[p - 1], message) {
                p -= 1;
            }
            let here = p.checked_sub(1).filter(|p| stored[*p].message.is_same(message));
            let found = here.or_else(|| {
                let index = index.get_or_insert_with(|| Index::new(stored, position));
                index.find(next, rest, j)
            });
            if let Some(found) = found {
                pairs[j] = Some(found);
                (next, results) = (found, found);
            }
        }
        let mut alignment = Self { end, position, pairs, replaced: Vec::new(), left_out: 0 };
        alignment.pair_renamed_results(stored, rest);
        alignment
    }

    /// Pairs the results of calls whose ids the client renamed.
    fn pair_renamed_results(&mut self, stored: &[Said], rest: &[Message]) {
        let is_open = |j: &usize| self.pairs[*j].is_none() && rest[*j].role() == Role::Tool;
        let open: Vec<usize> = (0..self.end).filter(is_open).collect();
        for j in open {
            let theirs = rest[j].tool_call_id().unwrap_or_default();
            let calls = |j: &usize| rest[*j].call_ids().iter().any(|id| *id == theirs);
            let call = (0..j).rev().find(calls).and_then(|j| Some((j, self.pairs[j]?)));
            let Some((call, position)) = call else { continue };
            let ours = renamed(&stored[position].message, &rest[call]).remove(&theirs);
            let Some(ours) = ours else { continue };
            let answers = |p: &usize| stored[*p].message.answers().as_deref() == Some(&*ours);
            self.pairs[j] = (position..self.position).find(answers);
        }
    }

    /// Adds a pair after the anchor.
    pub fn pair(&mut self, at: usize, position: usize) {
        self.pairs.resize(at + 1, None);
        self.pairs[at] = Some(position);
    }

    /// Has a message after the anchor shown in place of a stored one.
    pub fn replace(&mut self, at: usize, position: usize) {
        self.replaced.push((at, position));
    }

    /// Leaves so many messages after the anchor out.
    pub fn leave_out(&mut self, messages: usize) {
        self.left_out += messages;
    }

    /// The record of the last stored assistant message that the request has before what is new, if it stays.
    pub fn anchor(&self, stored: &[Said], keep: usize) -> Option<crate::id::Seq> {
        let paired = self.pairs.iter().rev().flatten();
        let mut kept = paired.filter(|p| **p < keep && stored[**p].message.role() == Role::Assistant);
        kept.next().map(|p| stored[*p].seq)
    }

    /// What the model is shown instead of stored messages, of which so many are kept.
    pub fn overlay(&self, stored: &[Said], rest: &[Message], keep: usize) -> Shown {
        let mut shown = Shown { ephemeral: self.left_out, ..Shown::default() };
        for (at, position) in &self.replaced {
            shown.overlay.replace(&stored[*position], rest[*at].clone());
            shown.ephemeral += 1;
        }
        // Stored messages from here on have been dealt with.
        let mut upper = self.position;
        let mut waiting: Vec<&Message> = Vec::new();
        let mut first = self.position;
        for (j, pair) in self.pairs.iter().enumerate().rev() {
            let message = &rest[j];
            let Some(p) = *pair else {
                shown.ephemeral += 1;
                waiting.push(message);
                continue;
            };
            let changed = message.role() == Role::Tool && !stored[p].message.says_the_same(message);
            match changed && p < keep {
                true => {
                    shown.ephemeral += 1;
                    shown.overlay.replace(&stored[p], as_answer_to(&stored[p].message, message));
                }
                false => shown.matched += 1,
            }
            first = first.min(p);
            if j >= self.end || message.role() == Role::Tool {
                continue;
            }
            waiting.reverse();
            between(&stored[p + 1..upper.max(p + 1)], &stored[upper], &waiting, &mut shown.overlay);
            waiting.clear();
            upper = p;
        }
        if !waiting.is_empty() {
            waiting.reverse();
            shown.overlay.begin_with(&stored[first], waiting.into_iter().cloned().collect());
        }
        shown.first = first;
        shown
    }
}

/// What an alignment tells.
#[derive(Default)]
pub(super) struct Shown {
    pub matched: usize,
    pub ephemeral: usize,
    /// The first stored message that the request has.
    pub first: usize,
    pub overlay: Overlay,
}

/// Messages that stand between two agreeing ones: each is shown in place of the stored one of the same role, in order; any
/// others before the next agreeing one.
fn between(stored: &[Said], next: &Said, theirs: &[&Message], overlay: &mut Overlay) {
    let mut rest = theirs.iter().peekable();
    for said in stored {
        let hidden = said.lead || said.message.is_tool_turn();
        let replaces = |m: &&&Message| m.role() == said.message.role() && !m.is_tool_turn();
        if !hidden && let Some(message) = rest.next_if(replaces) {
            overlay.replace(said, (*message).clone());
        }
    }
    let rest: Vec<Message> = rest.map(|m| (*m).clone()).collect();
    if !rest.is_empty() {
        overlay.insert_before(next, rest);
    }
}

/// A client's tool result under the id that the stored one has.
pub(super) fn as_answer_to(stored: &Message, result: &Message) -> Message {
    match stored.answers() {
        Some(id) if result.answers().as_deref() != Some(&*id) => result.answering(&id),
        _ => result.clone(),
    }
}

/// The ids of a client's tool calls that are equal to stored ones by name and arguments only, and the stored ids.
pub(super) fn renamed(stored: &Message, incoming: &Message) -> HashMap<String, String> {
    let (ours, theirs) = (stored.tool_calls(), incoming.tool_calls());
    if theirs.iter().any(|t| ours.iter().any(|o| o.id == t.id)) {
        return HashMap::new();
    }
    let pairs = pair_calls(&ours, &theirs).unwrap_or_default();
    theirs.into_iter().zip(pairs).map(|(theirs, i)| (theirs.id, ours[i].id.clone())).collect()
}

/// Whether a stored message is passed over when the request has this one: parts of the system prompt, and tool messages that
/// the client left out.
fn skipped(stored: &Said, message: &Message) -> bool {
    let prompt = stored.lead || (stored.message.role().instructs() && !message.role().instructs());
    prompt || (stored.message.is_tool_turn() && !stored.message.is_same(message))
}

/// The stored messages before an anchor by what they are compared by.
struct Index<'a> {
    stored: &'a [Said],
    places: HashMap<[u8; 32], Vec<usize>>,
}

impl<'a> Index<'a> {
    fn new(stored: &'a [Said], end: usize) -> Self {
        let mut places: HashMap<_, Vec<usize>> = HashMap::new();
        for (p, said) in stored[..end].iter().enumerate().filter(|(_, m)| !m.lead) {
            for key in keys(&said.message) {
                places.entry(key).or_default().push(p);
            }
        }
        Self { stored, places }
    }

    /// The place before `next` of the message at `j`: where the message before it agrees as well, or the only one.
    fn find(&self, next: usize, rest: &[Message], j: usize) -> Option<usize> {
        let mut found: Vec<usize> = keys(&rest[j])
            .iter()
            .filter_map(|key| self.places.get(key))
            .flatten()
            .copied()
            .filter(|p| *p < next && self.stored[*p].message.is_same(&rest[j]))
            .collect();
        found.sort_unstable();
        found.dedup();
        match found[..] {
            [] => None,
            [only] => Some(only),
            _ => found.into_iter().rev().find(|p| agreeing_before(self.stored, *p, rest, j) > 0),
        }
    }
}

/// What a message is looked up by: its tool calls, or its role and text.
fn keys(message: &Message) -> Vec<[u8; 32]> {
    let hash = |parts: &[&[u8]]| {
        let mut hash = blake3::Hasher::new();
        for part in parts {
            hash.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        *hash.finalize().as_bytes()
    };
    let calls = message.tool_calls();
    if calls.is_empty() {
        return vec![hash(&[&[message.role() as u8], message.meaning().text.as_bytes()])];
    }
    calls.iter().flat_map(|c| [hash(&[b"id", c.id.as_bytes()]), hash(&[b"name", c.name.as_bytes()])]).collect()
}
