//! Reconciliation: decides what to store and what to show when a client sends messages to a session that
//! already has some.
//!
//! Clients send the whole history, only new messages, a sliding window, the local list of a tool loop, an
//! edited turn, or a turn again. One rule serves all of them: **the last assistant message of a request tells
//! what its sender has seen** (D-021). It is the *anchor*; everything after it is new. The rows of the table
//! in `docs/clients.md` are the branches of [`ReconcileRows::decide`].
//!
//! A wrong inference about the client's intent costs at most the last answer, and rewound messages stay
//! readable in the log.

mod align;
mod full;
mod index;
pub(crate) mod plan;

use crate::rules::overlay::Overlay;
use crate::rules::prompt::active_instructions;
use crate::rules::reconcile::plan::{
    IncomingRequest, NewMessage, ReconcilePlan, ReplyTo, count_without_instructions, last_question, last_turn,
};
use crate::rules::review_notice::notice_answer;
use crate::rules::session::{Session, StoredMessage};
use crate::types::entry::RunOutcome;
use crate::types::message::{Message, Role};
use crate::types::policy::HistoryMode;
use align::Alignment;
use index::{StoredIndex, keys};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Reconciles the messages of a request with a session.
pub fn reconcile(session: &Session, incoming: &IncomingRequest<'_>) -> ReconcilePlan {
    let messages = with_answers_for_notices(session, incoming.messages);
    let split = messages.iter().take_while(|m| m.role().is_instruction()).count();
    let (system, rest) = messages.split_at(split);
    let stored = &session.messages[..];
    let has_conversation = stored.iter().any(|m| !m.message.role().is_instruction());
    let rows = ReconcileRows {
        session,
        stored: &StoredIndex::new(stored),
        rest,
        may_rewind: true,
        may_edit: !incoming.has_waited,
        is_retry: incoming.is_retry,
    };
    let plan = match incoming.history {
        _ if rest.is_empty() || !has_conversation => rows.append_all(0),
        // A list of tool results alone is never a whole history.
        HistoryMode::Full if rest.iter().any(|m| m.role() != Role::Tool) => full::plan(rows.stored, rest),
        HistoryMode::Full => rows.decide(),
        HistoryMode::Auto if !incoming.has_waited || incoming.is_retry => rows.decide(),
        HistoryMode::Auto | HistoryMode::Append => {
            ReconcileRows { may_rewind: false, may_edit: false, ..rows }.decide()
        }
    };
    with_system_prompt(plan, stored, system)
}

/// Adds the request's system prompt if it differs from the active one. It applies from now on; the turns
/// stay, and no counter changes.
fn with_system_prompt(mut plan: ReconcilePlan, stored: &[StoredMessage], system: &[Message]) -> ReconcilePlan {
    if system.is_empty() {
        return plan;
    }
    let remaining = &stored[..plan.retained];
    let current = &remaining[active_instructions(remaining)];
    let same = current.len() == system.len() && current.iter().zip(system).all(|(s, m)| s.message.is_same(m));
    if same {
        return plan;
    }
    // A system prompt that no message has followed yet is replaced instead of being superseded.
    plan.retained = remaining.iter().rposition(|m| !m.replaces_instructions).map_or(0, |i| i + 1);
    let replaces_instructions = plan.retained > 0;
    for message in &mut plan.append {
        if let Some(ReplyTo::New(i)) = &mut message.replies_to {
            *i += system.len();
        }
    }
    let prompt = system.iter().map(|m| NewMessage { replaces_instructions, replies_to: None, message: m.clone() });
    plan.append.splice(0..0, prompt);
    plan.system_prompt_len = system.len();
    plan
}

/// Replaces notices by the messages they stood for. A client that sends back everything also sends the notice
/// that it received while a review was open or the run was paused; the message that the run has since produced stands for
/// it, and without one the notice is dropped (D-062).
fn with_answers_for_notices<'a>(session: &Session, incoming: &'a [Message]) -> Cow<'a, [Message]> {
    if session.runs.is_empty() || !incoming.iter().any(crate::rules::review_notice::is_notice) {
        return Cow::Borrowed(incoming);
    }
    let answers = incoming.iter().filter_map(|message| {
        if crate::rules::review_notice::is_notice(message) {
            notice_answer(session, message).cloned()
        } else {
            Some(message.clone())
        }
    });
    Cow::Owned(answers.collect())
}

/// Maximum number of unanswered questions with the same normalized text that an incoming message is compared
/// with.
const MAX_FAILED: usize = 16;

/// The branches of the reconciliation table, and their input.
struct ReconcileRows<'a> {
    session: &'a Session,
    stored: &'a StoredIndex<'a>,
    /// The request without its system prompt.
    rest: &'a [Message],
    may_rewind: bool,
    /// Whether more than the last answer to the same question may be rewound.
    may_edit: bool,
    is_retry: bool,
}

impl<'a> ReconcileRows<'a> {
    /// Finds the row of the table that applies to the request.
    fn decide(&self) -> ReconcilePlan {
        let rest = self.rest;
        if self.continues_last_answer() {
            let alignment = Alignment::new(self.stored, rest, rest.len() - 1, self.stored.len() - 1);
            return self.with_alignment(ReconcilePlan::retaining(self.stored, self.stored.len()), &alignment);
        }
        if self.extends_last_answer()
            && let Some(plan) = self.clients_version_of_last_answer(rest.len() - 1)
        {
            return plan;
        }
        // An assistant message at the very end is the beginning of an answer (a prefill): it is new.
        let before_last = &rest[..rest.len() - 1];
        let Some(end) = before_last.iter().rposition(|m| m.role() == Role::Assistant) else {
            return self.without_anchor();
        };
        let after = end + 1;
        if let Some(plan) = self.retry(after) {
            return plan;
        }
        let located = align::locate(self.stored, rest, end);
        if let Some(plan) = located.and_then(|filler| self.after_filler(end, filler)) {
            return plan;
        }
        let alignment = located.map(|l| Alignment::new(self.stored, rest, end, l.position));
        if let (Some(located), Some(alignment)) = (located, &alignment) {
            if rest[after..].iter().all(|m| m.role() == Role::Tool) {
                return self.with_alignment(self.tool_results(after, Some(alignment)), alignment);
            }
            return self.after_anchor(after, located, alignment);
        }
        if let Some(plan) = self.clients_version_of_last_answer(end) {
            return plan;
        }
        // The last assistant message that is stored is the anchor; everything after it is new.
        let earlier = rest[..end].iter().enumerate().rev().filter(|(_, m)| m.role() == Role::Assistant);
        for (end, _) in earlier {
            if let Some(located) = align::locate_anywhere(self.stored, rest, end) {
                let alignment = Alignment::new(self.stored, rest, end, located.position);
                return self.after_anchor(end + 1, located, &alignment);
            }
        }
        self.append_all(0)
    }

    /// Returns true if the request ends with the last answer, asking for its continuation.
    fn continues_last_answer(&self) -> bool {
        let (Some(incoming), Some(stored)) = (self.rest.last(), self.stored.last()) else { return false };
        let stored_question = self.stored.iter().rev().map(|m| &m.message).find(|m| m.role() == Role::User);
        let incoming_question = self.rest.iter().rev().find(|m| m.role() == Role::User);
        incoming.role() == Role::Assistant
            && stored.message.is_same(incoming)
            && match (stored_question, incoming_question) {
                (Some(stored), Some(incoming)) => stored.is_same(incoming),
                _ => false,
            }
    }

    /// Returns true if the request ends with the last answer and additional text: some clients write tool
    /// results into it.
    fn extends_last_answer(&self) -> bool {
        let (Some(incoming), Some(stored)) = (self.rest.last(), self.stored.last()) else { return false };
        if incoming.role() != Role::Assistant
            || !stored.message.is_visible()
            || stored.message.role() != Role::Assistant
        {
            return false;
        }
        let stored = stored.message.meaning().text;
        let incoming = incoming.meaning().text;
        !stored.is_empty() && incoming.len() > stored.len() && incoming.starts_with(&stored)
    }

    /// Handles clients that insert the same question and answer, which no model produced, before each new
    /// question. The preceding answer is then the anchor, if it is in the last turn.
    fn after_filler(&self, end: usize, filler: align::AnchorMatch) -> Option<ReconcilePlan> {
        let turn = last_turn(self.stored);
        if self.stored[filler.position].run.is_some() || filler.position >= turn {
            return None;
        }
        let previous_answer = self.rest[..end].iter().rposition(|m| m.role() == Role::Assistant)?;
        let located = align::locate(self.stored, self.rest, previous_answer).filter(|l| l.position >= turn)?;
        let alignment = Alignment::new(self.stored, self.rest, previous_answer, located.position);
        let between = &self.rest[previous_answer + 1..=end];
        // If they contain anything that is not stored, they are new messages.
        if !between.iter().all(|m| !self.stored.same_as(m, self.stored.len()).is_empty()) {
            return Some(self.after_anchor(previous_answer + 1, located, &alignment));
        }
        let plan = self.after_anchor(end + 1, located, &alignment);
        Some(ReconcilePlan { matched: plan.matched + between.len(), ..plan })
    }

    /// Row 1: the new messages are, or start with, the unanswered user messages at the end of the session (a
    /// retry, D-023). Older unanswered questions may precede them.
    fn retry(&self, after: usize) -> Option<ReconcilePlan> {
        self.retry_from(after).or_else(|| match self.failed_questions(after, self.stored.len()) {
            0 => None,
            older => self.retry_from(after + older),
        })
    }

    /// Row 1 without older unanswered questions: the retried messages start at `after`.
    fn retry_from(&self, after: usize) -> Option<ReconcilePlan> {
        let after = self.rest.len() - self.rest[after..].iter().skip_while(|m| m.role().is_instruction()).count();
        let (new, reminders) = self.new_conversation(after);
        let question = last_question(self.stored)?;
        let (end, is_broken) = self.end_of_unanswered();
        if question.end > end || (is_broken && !self.may_rewind) {
            return None;
        }
        let sent = |range: Range<usize>| {
            let stored = self.stored[range].iter();
            stored.zip(&new).all(|(s, m)| s.run.is_none() && s.message.is_same(m))
        };
        let aligned = |plan, first| {
            let alignment = Alignment::new(self.stored, self.rest, after, first);
            let plan = self.with_alignment(plan, &alignment);
            ReconcilePlan { matched: plan.matched + reminders, ..plan }
        };
        // Exact repetition. The new messages may end with the beginning of an answer.
        let exact = new.len() <= end && new.first().is_some_and(|m| m.role() == Role::User);
        if exact && sent(end - new.len()..end) {
            let plan = ReconcilePlan { matched: new.len() - 1, ..ReconcilePlan::retaining(self.stored, end) };
            return Some(aligned(plan, end - new.len()));
        }
        // The failed question, followed by more user messages.
        let is_answered = self.stored.last().is_some_and(|m| m.message.role() == Role::Assistant);
        if is_answered || new.iter().any(|m| m.role() != Role::User) {
            return None;
        }
        let repeats = |start: &usize| question.end - start < new.len() && sent(*start..question.end);
        let first = question.clone().find(repeats)?;
        let repeated = question.end - first;
        let mut plan =
            ReconcilePlan { matched: repeated - 1, ..ReconcilePlan::retaining(self.stored, self.stored.len()) };
        let reply = self.stored[first].replies_to.map(ReplyTo::Stored);
        let new = new[repeated..].iter();
        plan.append = new
            .map(|m| NewMessage { replaces_instructions: false, replies_to: reply, message: (*m).clone() })
            .collect();
        Some(aligned(plan, first))
    }

    /// Returns the new messages without system messages, and the number of system messages.
    fn new_conversation(&self, after: usize) -> (Vec<&'a Message>, usize) {
        let new = &self.rest[after..];
        let conversation: Vec<&Message> = new.iter().filter(|m| !m.role().is_instruction()).collect();
        let instructions = new.len() - conversation.len();
        (conversation, instructions)
    }

    /// Returns the end of the messages before an incomplete answer of a failed or cancelled run, and whether
    /// there is such an answer. Later changes of the system prompt are ignored.
    fn end_of_unanswered(&self) -> (usize, bool) {
        let broken = self.session.runs.last().filter(|r| r.ended.is_some_and(|(_, o)| o != RunOutcome::Completed));
        let produced = |m: &StoredMessage| m.run.is_some() && m.run.as_ref() == broken.map(|r| &r.id);
        let tail = self.stored.iter().rev().take_while(|m| m.replaces_instructions || produced(m));
        let (tail, partial) = tail.fold((0, false), |(n, partial), m| (n + 1, partial || produced(m)));
        (self.stored.len() - tail, partial)
    }

    /// Row 2: tool results answer their calls, wherever these are stored. If all of them are stored already,
    /// the turn is repeated from there.
    fn tool_results(&self, after: usize, alignment: Option<&Alignment>) -> ReconcilePlan {
        let results = self.admit(after, alignment);
        let mut plan = ReconcilePlan::retaining(self.stored, self.stored.len());
        let repeated = results.new.is_empty() && results.orphans.is_empty();
        if let (true, true, Some(last)) = (repeated, self.may_rewind, results.last_stored) {
            let results = self.stored[last..].iter().take_while(|m| m.message.role() == Role::Tool).count();
            if last >= last_turn(self.stored) {
                plan = ReconcilePlan::retaining(self.stored, last + results);
            }
        }
        results.add_to(&mut plan);
        plan
    }

    /// Row 3: the request has no assistant message. It is appended, unless it asks for the only answer again
    /// or is a retry.
    fn without_anchor(&self) -> ReconcilePlan {
        if let Some(plan) = self.retry(0) {
            return plan;
        }
        if self.rest.iter().all(|m| m.role() == Role::Tool) {
            return self.tool_results(0, None);
        }
        let question = last_question(self.stored);
        let new = self.new_conversation(0).0;
        let is_only = |q: &Range<usize>| self.session.head().digest.turns == 1 && q.len() == new.len();
        match question {
            Some(q) if self.may_rewind && (self.is_retry || is_only(&q)) && self.ends_with(&q, &new) => {
                ReconcilePlan { matched: self.rest.len(), ..ReconcilePlan::retaining(self.stored, q.end) }
            }
            _ => {
                let repeated = self.failed_questions(0, self.stored.len());
                let plan = self.append_all(repeated);
                ReconcilePlan { matched: plan.matched + repeated, ..plan }
            }
        }
    }

    /// Returns true if the stored messages of a range end with these messages.
    fn ends_with(&self, range: &Range<usize>, messages: &[&Message]) -> bool {
        let stored = &self.stored[range.clone()];
        let first = stored.len().checked_sub(messages.len());
        let same = |first: usize| stored[first..].iter().zip(messages).all(|(s, m)| s.message.is_same(m));
        !messages.is_empty() && first.is_some_and(same)
    }

    /// Rows 4, 5, 6 and 8: the anchor is stored.
    fn after_anchor(&self, after: usize, anchor: align::AnchorMatch, alignment: &Alignment) -> ReconcilePlan {
        if anchor.position < last_turn(self.stored) && self.may_rewind {
            if let Some(plan) = self.regenerate(after, anchor.position) {
                return self.with_alignment(plan, alignment);
            }
            if let Some(retained) = self.edited_question(anchor).filter(|_| self.may_edit) {
                return self.append_after(retained, after, alignment);
            }
        }
        self.append_after(self.stored.len(), after, alignment)
    }

    /// Keeps the first `retained` stored messages and appends the new ones.
    fn append_after(&self, retained: usize, after: usize, alignment: &Alignment) -> ReconcilePlan {
        let repeated = self.failed_questions(after, retained);
        let mut plan = ReconcilePlan { matched: repeated, ..ReconcilePlan::retaining(self.stored, retained) };
        self.admit_before(after + repeated, Some(alignment), retained).add_to(&mut plan);
        self.with_alignment(plan, alignment)
    }

    /// Counts how many new messages, from the first, repeat stored questions that were never answered. A
    /// client that keeps a failed question in its list sends it again with the next one.
    fn failed_questions(&self, after: usize, retained: usize) -> usize {
        let new = &self.rest[after..];
        let is_user = |m: &StoredMessage| m.message.role() == Role::User;
        let mut conversation = self.stored[..retained].iter().filter(|m| !m.message.role().is_instruction()).peekable();
        let mut failed: HashMap<_, Vec<&Message>> = HashMap::new();
        if new.len() > 1 && new[0].role() == Role::User {
            while let Some(stored) = conversation.next() {
                let unanswered = conversation.peek().is_none_or(|next| is_user(next));
                if is_user(stored) && unanswered {
                    for key in keys(&stored.message) {
                        failed.entry(key).or_default().push(&stored.message);
                    }
                }
            }
        }
        let candidates = &new[..new.len().saturating_sub(1)];
        let has_failed = |m: &Message| {
            let same = keys(m).into_iter().filter_map(|key| failed.get(&key)).flatten();
            m.role() == Role::User && same.take(MAX_FAILED).any(|f| f.is_same(m))
        };
        candidates.iter().take_while(|m| has_failed(m)).count()
    }

    /// Row 5: regeneration. The last question is sent again, in reply to the anchor.
    fn regenerate(&self, after: usize, anchor: usize) -> Option<ReconcilePlan> {
        let question = last_question(self.stored)?;
        let (new, reminders) = self.new_conversation(after);
        let follows = self.stored[anchor + 1..question.start].iter().all(|m| m.message.role().is_instruction());
        let replies = self.stored[question.start].replies_to == Some(self.stored[anchor].seq);
        let same = (follows || replies) && self.ends_with(&question, &new);
        same.then(|| ReconcilePlan {
            matched: new.len() + reminders,
            ..ReconcilePlan::retaining(self.stored, question.end)
        })
    }

    /// Row 6: an edited question. Returns the position of the user message that the new ones replace: it was
    /// sent in reply to the same answer, by a client that sends lists, and everything after it descends from
    /// it.
    fn edited_question(&self, anchor: align::AnchorMatch) -> Option<usize> {
        let answer = &self.stored[anchor.position];
        if anchor.is_tie || !anchor.question_agrees || answer.run.is_none() {
            return None;
        }
        let replies = |m: &StoredMessage| m.replies_to == Some(answer.seq);
        let sibling = self.stored.iter().rposition(replies)?;
        let since = self.stored[sibling].seq;
        let descends =
            |m: &StoredMessage| m.message.role() != Role::User || m.replies_to.is_some_and(|seq| seq > since);
        // Consecutive user messages of one request belong together.
        let together = |m: &&StoredMessage| replies(m) || m.message.role().is_instruction();
        let rest = self.stored[sibling..].iter().skip_while(together);
        let start = sibling - self.stored[..sibling].iter().rev().take_while(|m| replies(m)).count();
        rest.clone().all(descends).then_some(start)
    }

    /// Row 7: the anchor is not stored, but its question is the last one. It is the client's version of the
    /// last answer.
    fn clients_version_of_last_answer(&self, end: usize) -> Option<ReconcilePlan> {
        let question_index = self.rest[..end].iter().rposition(|m| m.role() == Role::User)?;
        let question = last_question(self.stored)?.end - 1;
        if !self.stored[question].message.is_same(&self.rest[question_index]) {
            return None;
        }
        let mut alignment = Alignment::new(self.stored, self.rest, question_index, question);
        // The messages of the last turn that the client has too.
        let mut position = question + 1;
        let mut new = question_index + 1;
        while new < end {
            let stored_position =
                (position..self.stored.len()).find(|p| self.stored[*p].message.is_same(&self.rest[new]));
            let Some(stored_position) = stored_position else { break };
            alignment.pair(new, stored_position);
            position = stored_position + 1;
            new += 1;
        }
        let stored_answer = self.stored.last().filter(|m| m.message.role() == Role::Assistant);
        let retained = self.stored.len() - usize::from(stored_answer.is_some() && position < self.stored.len());
        if !self.may_edit {
            // The stored answer remains; the model is shown the client's version.
            let mut plan = ReconcilePlan::retaining(self.stored, self.stored.len());
            self.admit(end + 1, Some(&alignment)).add_to(&mut plan);
            alignment.skip(end - new);
            if stored_answer.is_some() {
                alignment.replace(end, self.stored.len() - 1);
            } else {
                alignment.skip(1);
            }
            return Some(self.with_alignment(plan, &alignment));
        }
        let mut plan = ReconcilePlan::retaining(self.stored, retained);
        self.admit_before(new, Some(&alignment), retained).add_to(&mut plan);
        Some(self.with_alignment(plan, &alignment))
    }

    /// Rows 3 and 9: everything from `after` on is new.
    fn append_all(&self, after: usize) -> ReconcilePlan {
        let mut plan = ReconcilePlan::retaining(self.stored, self.stored.len());
        self.admit(after, None).add_to(&mut plan);
        plan
    }

    /// Adds the overlay and the counters that result from aligning the older messages.
    fn with_alignment(&self, mut plan: ReconcilePlan, alignment: &Alignment) -> ReconcilePlan {
        let shown = alignment.overlay(self.stored, self.rest, plan.retained);
        plan.matched += shown.matched;
        plan.ephemeral += shown.ephemeral;
        let inside = count_without_instructions(&self.stored[shown.first.min(plan.retained)..plan.retained]);
        plan.omitted = inside.saturating_sub(plan.matched + shown.overlay.replaced());
        plan.overlay.merge(shown.overlay);
        plan
    }

    /// Selects the messages from `after` on that are appended after all stored ones.
    fn admit(&self, after: usize, alignment: Option<&Alignment>) -> AdmittedMessages {
        self.admit_before(after, alignment, self.stored.len())
    }

    /// Selects the messages from `after` on that are appended after `retained` stored ones. A tool result needs a
    /// call: one that is stored already is not stored again, and one without a call is dropped.
    fn admit_before(&self, after: usize, alignment: Option<&Alignment>, retained: usize) -> AdmittedMessages {
        let mut admitted = AdmittedMessages::default();
        let mut reply = alignment.and_then(|a| a.anchor(self.stored, retained)).map(ReplyTo::Stored);
        let renamed_ids = alignment
            .map(|a| align::renamed_call_ids(&self.stored[a.position].message, &self.rest[a.end]))
            .unwrap_or_default();
        for message in &self.rest[after..] {
            if message.role() == Role::Tool {
                self.admit_result(message, &renamed_ids, alignment, retained, &mut admitted);
                continue;
            }
            let replies_to = reply.filter(|_| message.role() == Role::User);
            if message.role() == Role::Assistant {
                reply = Some(ReplyTo::New(admitted.new.len()));
                admitted.calls.extend(message.call_ids().into_iter().map(Cow::into_owned));
            }
            admitted.new.push(NewMessage { replaces_instructions: false, replies_to, message: message.clone() });
        }
        admitted
    }

    /// Admits one tool result: appended if its call has none, counted if it is stored already, shown in place
    /// of the stored one if it differs, dropped if its call is unknown.
    fn admit_result(
        &self,
        result: &Message,
        renamed_ids: &HashMap<String, String>,
        alignment: Option<&Alignment>,
        retained: usize,
        admitted: &mut AdmittedMessages,
    ) {
        let incoming_id = result.tool_call_id().unwrap_or_default();
        if admitted.calls.contains(&incoming_id) {
            admitted.new.push(NewMessage { replaces_instructions: false, replies_to: None, message: result.clone() });
            return;
        }
        let id = renamed_ids.get(&incoming_id).unwrap_or(&incoming_id);
        let stored = self.stored;
        let calls = |p: &usize| stored[*p].message.call_ids().iter().any(|call| call == id);
        let anchor = alignment.map(|a| a.position).filter(|p| *p < retained && calls(p));
        let Some(call) = anchor.or_else(|| stored.call_before(id, retained)) else {
            admitted.orphans.push(incoming_id);
            return;
        };
        match stored.result_of(id, call).filter(|p| *p < retained) {
            Some(position) => {
                admitted.last_stored = admitted.last_stored.max(Some(position));
                if stored[position].message.has_same_content(result) {
                    admitted.already_stored += 1;
                } else {
                    admitted.changed += 1;
                    let shown = align::as_answer_to(&stored[position].message, result);
                    admitted.overlay.replace(&stored[position], shown);
                }
            }
            None => {
                let message = if *id == incoming_id { result.clone() } else { result.with_tool_call_id(id) };
                admitted.new.push(NewMessage { replaces_instructions: false, replies_to: None, message });
            }
        }
    }
}

/// The outcome of admitting new messages: what is appended, and what is not.
#[derive(Default)]
struct AdmittedMessages {
    new: Vec<NewMessage>,
    /// The ids of the tool calls in `new`.
    calls: HashSet<String>,
    /// Number of tool results that are already stored.
    already_stored: usize,
    /// The position of the last stored one.
    last_stored: Option<usize>,
    /// Number of tool results that are stored with different content; the overlay shows the client's version.
    changed: usize,
    overlay: Overlay,
    orphans: Vec<String>,
}

impl AdmittedMessages {
    fn add_to(self, plan: &mut ReconcilePlan) {
        plan.append = self.new;
        plan.matched += self.already_stored;
        plan.ephemeral += self.changed;
        plan.orphans = self.orphans;
        plan.overlay = self.overlay;
    }
}
