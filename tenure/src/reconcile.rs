//! A client's view of a conversation and ours become one.
//!
//! Clients send the whole history, only what is new, an edited turn, a turn again, or bare tool results; most never saw the
//! tool turns that we hold. The plan says what of ours stays, and what of theirs is new. Nothing is lost: what is cut off stays
//! in the log.

use crate::entry::{Outcome, Post};
use crate::head::{Style, VisibleHash};
use crate::history::{lead, opening};
use crate::message::{Message, Role};
use crate::review::is_notice;
use crate::session::{Said, Session};
use std::borrow::Cow;
use std::ops::Range;

/// How to read what a client sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Find out from the messages, and from how this client did it before.
    #[default]
    Auto,
    /// It is the whole history.
    Full,
    /// It is only what is new.
    Append,
}

/// What to do with a request's messages.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// So many stored messages stay; the others are rewound.
    pub keep: usize,
    /// The new messages, in order.
    pub append: Vec<Post>,
    /// How this client sends history, as known now.
    pub style: Style,
    /// How many incoming messages are ones we have.
    pub matched: usize,
    /// How many stored messages of tool turns stay although the client did not send them.
    pub spliced: usize,
    /// How many stored messages are cut off.
    pub rewound: usize,
    /// Tool results that answer no call we know of. They are not appended.
    pub orphans: Vec<String>,
}

/// Compares a session with the messages of a request.
pub fn reconcile(session: &Session, incoming: &[Message], mode: Mode) -> Plan {
    let incoming = &*without_notices(session, incoming);
    let stored = &session.messages[..];
    let split = incoming.iter().take_while(|m| m.role().instructs()).count();
    let (system, rest) = incoming.split_at(split);
    let mut plan = match choose(session, rest, mode) {
        Way::Fresh | Way::Add => Plan::adding(stored, rest),
        Way::Tools => tools(stored, rest),
        Way::Again(keep) => Plan { matched: rest.len(), ..Plan::keeping(stored, keep, &[]) },
        Way::Walk => walk(stored, rest),
    };
    plan.style = style(session, rest, &plan, mode);
    if system.is_empty() {
        return plan;
    }
    // A changed system prompt takes effect from now on; the turns stay.
    let kept = &stored[..plan.keep];
    let current = &kept[lead(kept)];
    let changed = current.len() != system.len() || current.iter().zip(system).any(|(s, m)| !s.message.is_same(m));
    if changed {
        // One that nobody has spoken under yet is replaced, not followed.
        let spoken = kept.iter().rposition(|m| !m.lead).map_or(0, |i| i + 1);
        (plan.rewound, plan.keep) = (plan.rewound + plan.keep - spoken, spoken);
        let kept = &stored[..plan.keep];
        let posts = system.iter().map(|m| Post { run: None, lead: !kept.is_empty(), message: m.clone() });
        plan.append.splice(0..0, posts);
    } else {
        plan.matched += system.len();
    }
    plan
}

/// The hashes of all prefixes of a request's visible messages that could be a session's whole conversation, longest first. At
/// least one answer must be in it: a lone question says too little about which conversation is meant.
pub fn prefix_hashes(incoming: &[Message]) -> Vec<VisibleHash> {
    let mut mark = crate::head::Mark::default();
    let (mut hashes, mut answered) = (Vec::new(), false);
    for message in incoming {
        mark.advance(message);
        answered |= message.role() == Role::Assistant && message.is_visible();
        if answered && message.is_visible() {
            hashes.push(mark.hash);
        }
    }
    hashes.reverse();
    hashes
}

/// A client that sends everything back also sends what it was told while a person had to decide. In its place stands the answer that came
/// later, if there is one by now.
fn without_notices<'a>(session: &Session, incoming: &'a [Message]) -> Cow<'a, [Message]> {
    if session.reviews.is_empty() || !incoming.iter().any(is_notice) {
        return Cow::Borrowed(incoming);
    }
    let mut visible = session.messages.iter().map(|m| &m.message).filter(|m| m.is_visible());
    let mut meant = Vec::with_capacity(incoming.len());
    for message in incoming {
        let ours = if message.is_visible() { visible.next() } else { None };
        match is_notice(message) {
            true => meant.extend(ours.filter(|m| m.role() == Role::Assistant).cloned()),
            false => meant.push(message.clone()),
        }
    }
    Cow::Owned(meant)
}

enum Way {
    /// We have nothing: all of it is new.
    Fresh,
    /// All of it is new.
    Add,
    /// Only results of tools.
    Tools,
    /// The last user message again: so many messages stay.
    Again(usize),
    /// Side by side.
    Walk,
}

fn choose(session: &Session, rest: &[Message], mode: Mode) -> Way {
    let stored = &session.messages[..];
    let Some(first) = rest.first() else { return Way::Add };
    let Some(ours) = stored.iter().find(|m| !m.message.role().instructs()) else { return Way::Fresh };
    if rest.iter().all(|m| m.role() == Role::Tool) {
        return Way::Tools;
    }
    if mode == Mode::Full {
        return Way::Walk;
    }
    // Asked again before there was an answer: a retry, not a second question.
    let again = |q: &Range<usize>| stored[q.clone()].iter().zip(rest).all(|(s, m)| s.message.is_same(m));
    let question = last_question(stored).filter(|q| q.len() == rest.len()).filter(again);
    if let Some(q) = question.as_ref().filter(|q| is_unanswered(session, q.end)) {
        return Way::Again(q.end);
    }
    if mode == Mode::Append {
        return Way::Add;
    }
    if rest.iter().any(|m| m.role() == Role::Assistant) {
        return Way::Walk;
    }
    match session.style {
        Style::Append => Way::Add,
        Style::Full => Way::Walk,
        Style::Unknown if ours.message.is_same(first) => Way::Walk,
        Style::Unknown => question.map_or(Way::Add, |q| Way::Again(q.end)),
    }
}

/// Whether a question that ends here has no answer, or only the beginning of one that broke off.
fn is_unanswered(session: &Session, end: usize) -> bool {
    let broken = session.runs.last().filter(|r| r.ended.is_some_and(|(_, outcome)| outcome != Outcome::Completed));
    session.messages[end..].iter().all(|m| m.run.is_some() && m.run.as_ref() == broken.map(|r| &r.id))
}

/// Where the user messages of the last turn are.
fn last_question(stored: &[Said]) -> Option<Range<usize>> {
    let end = stored.iter().rposition(|m| m.message.role() == Role::User)? + 1;
    let start = stored[..end].iter().rposition(|m| m.message.role() != Role::User).map_or(0, |i| i + 1);
    Some(start..end)
}

fn style(session: &Session, rest: &[Message], plan: &Plan, mode: Mode) -> Style {
    let answers = rest.iter().filter(|m| m.role() == Role::Assistant).count();
    match mode {
        Mode::Full => Style::Full,
        Mode::Append => Style::Append,
        // It has sent an answer of ours back.
        Mode::Auto if answers > 0 && plan.matched > 1 => Style::Full,
        Mode::Auto if answers == 0 && session.style == Style::Unknown && added_to(session, rest, plan) => Style::Append,
        Mode::Auto => session.style,
    }
}

/// Whether the client has added to a conversation that it did not send.
fn added_to(session: &Session, rest: &[Message], plan: &Plan) -> bool {
    let question = rest.iter().any(|m| m.role() == Role::User);
    let answered = session.messages.iter().any(|m| m.message.role() == Role::Assistant);
    question && answered && plan.matched == 0 && plan.rewound == 0
}

impl Plan {
    fn keeping(stored: &[Said], keep: usize, new: &[Message]) -> Self {
        let append = new.iter().map(|m| Post { run: None, lead: false, message: m.clone() }).collect();
        let rewound = stored.len() - keep;
        Self { keep, append, style: Style::Unknown, matched: 0, spliced: 0, rewound, orphans: Vec::new() }
    }

    fn adding(stored: &[Said], new: &[Message]) -> Self {
        Self::keeping(stored, stored.len(), new)
    }
}

/// Results for open calls are new; results we have are matched, and the turn goes on from there.
fn tools(stored: &[Said], rest: &[Message]) -> Plan {
    let (mut new, mut orphans, mut known) = (Vec::new(), Vec::new(), 0);
    for message in rest {
        let id = message.tool_call_id().unwrap_or_default();
        let call = stored.iter().rposition(|m| m.message.tool_calls().iter().any(|c| c.id == id));
        let Some(call) = call else {
            orphans.push(id);
            continue;
        };
        let result = stored[call..].iter().position(|m| m.message.tool_call_id().as_deref() == Some(&id));
        match result {
            Some(at) => known = known.max(call + at + 1),
            None => new.push(message.clone()),
        }
    }
    let matched = rest.len() - new.len() - orphans.len();
    let keep = if new.is_empty() && known > 0 { known } else { stored.len() };
    Plan { matched, orphans, ..Plan::keeping(stored, keep, &new) }
}

/// Stored and incoming side by side, up to the first difference.
fn walk(stored: &[Said], rest: &[Message]) -> Plan {
    let opening = opening(stored);
    let (mut i, mut j) = (0, 0);
    let mut kept = 0; // after the last message that the client has too
    let mut has = vec![false; stored.len()]; // which of ours the client has too
    let keep = loop {
        let Some(theirs) = rest.get(j) else { break kept };
        let turn = turn_around(stored, i);
        let find = |mut places: Range<usize>| places.find(|k| stored[*k].message.is_same(theirs));
        // Results may come in another order than ours.
        if theirs.role() == Role::Tool
            && let Some(k) = find(turn.start..end_of_tools(stored, i))
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
            // A client that runs tools itself sends its calls; ours, which it never saw, come before them.
            match find(i..turn.end) {
                Some(k) => i = k,
                None => break kept.max(opening),
            }
        } else {
            i += 1;
        }
    };
    let spliced = (0..keep).filter(|k| !has[*k] && stored[*k].message.is_tool_turn()).count();
    Plan { matched: j, spliced, ..Plan::keeping(stored, keep, &rest[j..]) }
}

/// Where the tool turns that begin at `i` end.
fn end_of_tools(stored: &[Said], i: usize) -> usize {
    let others = stored.iter().skip(i).position(|m| !m.lead && !m.message.is_tool_turn());
    others.map_or(stored.len(), |p| i + p)
}

/// The stored messages of the turn at `i`, from its question to the next one.
fn turn_around(stored: &[Said], i: usize) -> Range<usize> {
    let user = |m: &Said| m.message.role() == Role::User;
    let i = i.min(stored.len());
    let start = stored[..i].iter().rposition(user).map_or(0, |p| p + 1);
    let end = stored[i..].iter().position(user).map_or(stored.len(), |p| i + p);
    start..end
}
