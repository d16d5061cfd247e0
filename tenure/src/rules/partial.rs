//! The most recent part of a session, folded on its own: what a run needs in order to continue, independent
//! of the length of the session (D-014).
//!
//! It contains the turns that the model is shown, the current run, and all open reviews. They are preceded by
//! the active instructions and summary, whose positions the head records ([`PromptPrefix`]). Every rule gives the
//! same result on it as on the whole session; where that cannot be guaranteed, no partial session is built
//! and the whole log is read.

#[cfg(test)]
mod tests;

use crate::rules::prompt::is_enough;
use crate::rules::session::{Checkpoint, Review, Run, Session, StoredMessage, Summary};
use crate::types::entry::{Entry, MessageEntry, Record};
use crate::types::head::{Head, InstructionSpan, PromptPrefix};
use crate::types::id::{RunId, Seq};
use crate::types::message::Role;
use crate::types::policy::Window;

/// The part of a session that a run depends on: a borrowed view of a session that is loaded in part or in
/// full. Operations that need the full history, such as resolving a checkpoint, are not available on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartialSession<'a> {
    /// The head.
    pub head: &'a Head,
    /// The messages that are loaded, oldest first: at least those that the model is shown.
    pub messages: &'a [StoredMessage],
    /// The checkpoints that are loaded, oldest first.
    pub checkpoints: &'a [Checkpoint],
    /// The runs that are loaded, oldest first: at least the current one.
    pub runs: &'a [Run],
    /// The reviews that are loaded, oldest first: at least all open ones.
    pub reviews: &'a [Review],
    /// The summaries that are loaded, oldest first: at least the active one.
    pub summaries: &'a [Summary],
    /// Messages in earlier records may not be loaded.
    loaded_from: Seq,
}

impl<'a> PartialSession<'a> {
    /// Returns a run by its id.
    pub fn run(self, id: &RunId) -> Option<&'a Run> {
        self.runs.iter().rev().find(|run| run.id == *id)
    }

    /// Returns the reviews that still need a decision.
    pub fn open_reviews(self) -> impl Iterator<Item = &'a Review> {
        self.reviews.iter().filter(|review| review.is_open())
    }

    /// Returns true if a message has not been rewound. Messages before the loaded part are assumed to remain.
    pub fn contains_message(self, seq: Seq) -> bool {
        seq < self.loaded_from || self.messages.binary_search_by_key(&seq, |m| m.seq).is_ok()
    }
}

impl Session {
    /// Returns the view of this session, which may be loaded in part, that a run uses.
    pub(crate) fn as_partial(&self) -> PartialSession<'_> {
        PartialSession {
            head: self.head(),
            messages: &self.messages,
            checkpoints: &self.checkpoints,
            runs: &self.runs,
            reviews: &self.reviews,
            summaries: &self.summaries,
            loaded_from: self.older.1,
        }
    }
}

impl Session {
    /// Folds the most recent part of a session from the records of its prompt prefix and the last records of
    /// its log. `None` means that these records do not suffice; more of them may.
    pub(crate) fn fold_partial(head: Head, prefix: &[Record], newest: &[Record], window: &Window) -> Option<Self> {
        let instructions = head.prompt_prefix.as_ref()?.instructions.clone();
        let messages = head.digest.messages;
        let since = newest.first()?.seq;
        let mut session = Self::empty(head);
        for record in prefix.iter().filter(|r| r.seq < since).chain(newest) {
            session.apply_to_lists(record);
        }
        // The part starts with a user message, so that an incomplete turn is never taken for a complete one.
        let start = session.messages.iter().position(|m| m.seq >= since && m.message.role() == Role::User)?;
        let since = session.messages[start].seq;
        session.messages.retain(|m| m.seq >= since || instructions.as_ref().is_some_and(|span| span.contains(m.seq)));
        session.older = (messages.checked_sub(session.messages.len())?, since);
        for summary in &mut session.summaries {
            summary.position = session.messages.partition_point(|m| m.seq <= summary.upto);
        }
        session.checkpoints.retain(|c| c.seq > since);
        for checkpoint in &mut session.checkpoints {
            let before = session.messages.partition_point(|m| m.seq < checkpoint.seq);
            checkpoint.position = session.older.0 + before;
        }
        (session.contains_runs(newest) && session.contains_window(window)).then_some(session)
    }

    /// Returns true if the part contains the current run from its start, every call that may have no result,
    /// and every open review.
    fn contains_runs(&self, newest: &[Record]) -> bool {
        let run = self.head().run.as_ref();
        let run = run.is_none_or(|run| self.run(run).is_some_and(|r| r.seq > self.older.1));
        let is_user_or_assistant =
            |m: &&StoredMessage| !m.message.role().is_instruction() && m.message.role() != Role::Tool;
        let last = self.messages.iter().rev().find(is_user_or_assistant).map_or(0, |m| m.seq);
        let calls = newest.iter().rev().take_while(|r| r.seq > last).all(|r| match &r.entry {
            Entry::ToolStarted { run, .. } => self.run(run).is_some(),
            _ => true,
        });
        let reviews = self.head().reviews.iter().all(|open| self.reviews.iter().any(|r| r.seq == open.seq));
        run && calls && reviews
    }

    /// Returns true if the part contains everything that the model is shown.
    fn contains_window(&self, window: &Window) -> bool {
        let messages: Vec<&StoredMessage> = self.messages.iter().collect();
        is_enough(&messages, self.older.1, &self.summaries, window)
    }
}

impl InstructionSpan {
    fn contains(&self, message: Seq) -> bool {
        (self.from..=self.to).contains(&message)
    }
}

impl PromptPrefix {
    /// Returns the prefix after one more message, which follows `before` others. `None` means that the
    /// instructions are no longer a contiguous range of records.
    pub(crate) fn with_message(mut self, entry: &MessageEntry, seq: Seq, before: usize) -> Option<Self> {
        let replaced = entry.replaces_instructions;
        let is_instruction = entry.replaces_instructions || entry.message.role().is_instruction();
        match &mut self.instructions {
            Some(span) if span.messages == before && span.replaced == replaced && is_instruction => {
                if span.to + 1 != seq {
                    return None;
                }
                span.to = seq;
                span.messages = before + 1;
            }
            _ if replaced || (is_instruction && before == 0) => {
                self.instructions = Some(InstructionSpan { from: seq, to: seq, messages: before + 1, replaced });
            }
            _ => {}
        }
        Some(self)
    }

    /// Returns true if a rewind to this record leaves the prefix intact.
    pub(crate) fn survives_rewind(&self, to: Seq) -> bool {
        self.instructions.as_ref().is_none_or(|span| span.to <= to) && self.summary.is_none_or(|(_, upto)| upto <= to)
    }

    /// Returns the inclusive record ranges of the prefix that lie before `since`, in log order.
    pub(crate) fn ranges_before(&self, since: Seq) -> impl Iterator<Item = (Seq, Seq)> {
        let instructions = self.instructions.as_ref().map(|span| (span.from, span.to));
        let summary = self.summary.map(|(seq, _)| (seq, seq));
        let mut ranges = [instructions, summary];
        ranges.sort();
        ranges
            .into_iter()
            .flatten()
            .filter(move |(from, _)| *from < since)
            .map(move |(from, to)| (from, to.min(since - 1)))
    }
}
