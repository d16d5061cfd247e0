//! The newest part of a session, folded alone: what a run needs that goes on, however long the session is.
//!
//! It holds the turns that the model is shown, the run that is on, and whatever waits for a person; before them stand the instructions and
//! the summary that hold, which the index card knows the places of ([`Front`]). What a rule finds in it is what it finds in the whole
//! session; where that can not be made sure, there is no tail, and the session is read from its beginning.

#[cfg(test)]
mod tests;

use crate::rules::prompt::is_enough;
use crate::rules::session::{Said, Session};
use crate::types::entry::{Entry, Post, Record};
use crate::types::head::{Front, Head, Lead};
use crate::types::id::Seq;
use crate::types::message::Role;
use crate::types::policy::Window;

impl Session {
    /// The newest part of a session, from what its card names as the front and from the last records of its log. `None`: they do not tell
    /// enough; more of them may.
    pub(crate) fn tail(head: Head, front: &[Record], newest: &[Record], window: &Window) -> Option<Self> {
        let (lead, messages) = (head.front.as_ref()?.lead.clone(), head.mark.messages);
        let since = newest.first()?.seq;
        let mut session = Self::empty(head);
        for record in front.iter().filter(|r| r.seq < since).chain(newest) {
            session.take(record);
        }
        // It begins with a user, so that no part of a turn is taken for the whole of it.
        let begins = session.messages.iter().position(|m| m.seq >= since && m.message.role() == Role::User)?;
        let since = session.messages[begins].seq;
        session.messages.retain(|m| m.seq >= since || lead.as_ref().is_some_and(|l| l.has(m.seq)));
        session.older = (messages.checked_sub(session.messages.len())?, since);
        for summary in &mut session.summaries {
            summary.position = session.messages.partition_point(|m| m.seq <= summary.upto);
        }
        session.checkpoints.retain(|c| c.seq > since);
        for checkpoint in &mut session.checkpoints {
            let before = session.messages.partition_point(|m| m.seq < checkpoint.seq);
            checkpoint.position = session.older.0 + before;
        }
        (session.knows_runs(newest) && session.knows_talk(window)).then_some(session)
    }

    /// Whether the run that is on is in it from its beginning, and every call that may have no result, and every question.
    fn knows_runs(&self, newest: &[Record]) -> bool {
        let run = self.head().run.as_ref();
        let run = run.is_none_or(|run| self.run(run).is_some_and(|r| r.seq > self.older.1));
        let spoken = |m: &&Said| !m.message.role().instructs() && m.message.role() != Role::Tool;
        let last = self.messages.iter().rev().find(spoken).map_or(0, |m| m.seq);
        let calls = newest.iter().rev().take_while(|r| r.seq > last).all(|r| match &r.entry {
            Entry::ToolStarted { run, .. } => self.run(run).is_some(),
            _ => true,
        });
        let asked = self.head().reviews.iter().all(|open| self.reviews.iter().any(|r| r.seq == open.seq));
        run && calls && asked
    }

    /// Whether all is in it that a model is shown.
    fn knows_talk(&self, window: &Window) -> bool {
        let messages: Vec<&Said> = self.messages.iter().collect();
        is_enough(&messages, self.older.1, &self.summaries, window)
    }

    /// Whether a message that was said is still there.
    pub(crate) fn has(&self, message: Seq) -> bool {
        message < self.older.1 || self.messages.binary_search_by_key(&message, |m| m.seq).is_ok()
    }
}

impl Lead {
    fn has(&self, message: Seq) -> bool {
        (self.from..=self.to).contains(&message)
    }
}

impl Front {
    /// The front once this was said too, after so many messages. `None`: what belongs to it is not in one piece.
    pub(crate) fn after(mut self, post: &Post, seq: Seq, before: usize) -> Option<Self> {
        let (replaced, instructs) = (post.lead, post.lead || post.message.role().instructs());
        match &mut self.lead {
            Some(lead) if lead.messages == before && lead.replaced == replaced && instructs => {
                if lead.to + 1 != seq {
                    return None;
                }
                (lead.to, lead.messages) = (seq, before + 1);
            }
            _ if replaced || (instructs && before == 0) => {
                self.lead = Some(Lead { from: seq, to: seq, messages: before + 1, replaced });
            }
            _ => {}
        }
        Some(self)
    }

    /// Whether a rewind to this record leaves it as it is.
    pub(crate) fn is_before(&self, to: Seq) -> bool {
        self.lead.as_ref().is_none_or(|l| l.to <= to) && self.summary.is_none_or(|(_, upto)| upto <= to)
    }

    /// Which of its records are before this one, as ranges of the first and the last.
    pub(crate) fn places(&self, since: Seq) -> impl Iterator<Item = (Seq, Seq)> {
        let lead = self.lead.as_ref().map(|l| (l.from, l.to));
        let summary = self.summary.map(|(seq, _)| (seq, seq));
        let mut places = [lead, summary];
        places.sort();
        places
            .into_iter()
            .flatten()
            .filter(move |(from, _)| *from < since)
            .map(move |(from, to)| (from, to.min(since - 1)))
    }
}
