//! The commit of one step of a run: the new messages, and the entries that follow from them.

use super::Execution;
use crate::engine::idempotency::expiring_item;
use crate::engine::pending_commit::PendingCommit;
use crate::memory::recall::RECALLS;
use crate::rules::checkpoint::automatic_checkpoint;
use crate::rules::human_question::{CHOICES, HumanQuestion, QUESTION};
use crate::rules::next::{CallAction, NextStep, PendingCall, ReviewRequest, RunRules, next_after};
use crate::rules::partial::PartialSession;
use crate::rules::run_entries::run_ended_entry;
use crate::rules::session::{CACHED, Run, TOKENS};
use crate::run::executors::StoredAnswer;
use crate::run::idempotency::ANSWERS;
use crate::store::item::Item;
use crate::types::entry::{
    CheckpointEntry, Entry, MessageEntry, Patch, ReviewOpened, ReviewTimeout, RunOutcome, SessionPatch,
};
use crate::types::error::{Error, Result};
use crate::types::id::{CheckpointLabel, ReviewId, RunId, Seq};
use crate::types::message::Message;
use crate::types::policy::CheckpointPolicy;
use crate::types::status::Status;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Map, Value, json};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The input of a commit: the session as it is stored, and what the step has produced.
#[derive(Clone, Copy)]
struct StepInput<'s> {
    session: PartialSession<'s>,
    run: &'s Run,
    messages: &'s [Message],
    /// Whether no other call of this round is in flight.
    is_round_complete: bool,
    now: Timestamp,
}

impl Execution<'_> {
    /// Commits messages together with the entries that follow from them: tool call starts, review
    /// requests, or the end of the run. `is_round_complete` is true if no other call of this round
    /// is in flight. Returns [`Error::Superseded`] if this node no longer holds the run.
    pub(super) async fn commit_messages(
        &mut self,
        messages: Vec<Message>,
        is_round_complete: bool,
    ) -> Result<NextStep> {
        let id = &self.context.session_id;
        let principal = &self.context.principal;
        let committed = self.context.tenure.write_partial_with_retries(principal, id, |session, now| {
            Ok(match self.held_run(session) {
                Some(run) => self.step_commit(StepInput { session, run, messages: &messages, is_round_complete, now }),
                None => self.superseded_commit(session),
            })
        });
        // Boxed: the futures of steps contain it several times.
        match Box::pin(committed).await {
            Ok(Some((seq, step))) => {
                self.seq = seq;
                self.recall_event = None;
                self.metadata_patches.clear();
                Ok(step)
            }
            Ok(None) | Err(Error::NotFound { .. }) => Err(Error::Superseded { session_id: id.clone() }),
            Err(e) => Err(e),
        }
    }

    /// The commit of a step, with the sequence number of its last record and the next step.
    fn step_commit(&self, input: StepInput<'_>) -> PendingCommit<Option<(Seq, NextStep)>> {
        let StepInput { session, messages, .. } = input;
        let mut builder = EntryBuilder::new(session, input.run);
        self.add_messages(&mut builder, &input);
        builder.entries.extend(
            self.metadata_patches
                .iter()
                .map(|patch| Entry::info(SessionPatch { metadata: patch.clone(), ..SessionPatch::default() })),
        );
        let rules = RunRules { tools: &self.tools, review: &self.policy.review, client_tools: self.client_tools };
        let step = if input.is_round_complete { next_after(session, messages, &rules) } else { NextStep::Wait };
        let mut items: Vec<_> = self.recall_event.iter().map(|event| (RECALLS.to_owned(), event.clone())).collect();
        match &step {
            NextStep::Tools(jobs) => {
                builder.entries.extend(jobs.iter().filter_map(|job| self.tool_started_entry(job)));
            }
            NextStep::Review(requests) => self.open_reviews(&mut builder, requests, input.now),
            NextStep::Done => {
                self.end_run(&mut builder, messages);
                items.extend(self.answer_item());
            }
            NextStep::Model | NextStep::Wait => {}
        }
        self.lease_state.releasing.store(matches!(step, NextStep::Done | NextStep::Review(_)), Ordering::Relaxed);
        let seq = builder.next_seq() - 1;
        let mut pending = PendingCommit::new(builder.entries, Some((seq, step)));
        pending.items = items;
        pending
    }

    /// Adds the messages, and the checkpoints that the policy requires.
    fn add_messages(&self, builder: &mut EntryBuilder<'_>, input: &StepInput<'_>) {
        let run = &self.context.run;
        let policy = self.policy.checkpoints;
        let has_results = input.messages.iter().any(|m| m.tool_call_id().is_some());
        for message in input.messages {
            builder.entries.push(Entry::Message(MessageEntry::by_run(run, message.clone())));
            if has_results && policy == CheckpointPolicy::Tool {
                builder.checkpoint(run, self.checkpoint_state());
            }
        }
        let is_due = match policy {
            CheckpointPolicy::Step => has_results,
            CheckpointPolicy::Every(interval) => {
                let last = input.session.checkpoints.last().map(|c| c.created_at);
                let since = last.map_or(input.run.started_at, |at| at.max(input.run.started_at));
                Duration::try_from(input.now.duration_since(since)).is_ok_and(|age| age >= interval)
            }
            CheckpointPolicy::Tool | CheckpointPolicy::Manual => false,
        };
        if input.is_round_complete && is_due {
            builder.checkpoint(run, self.checkpoint_state());
        }
    }

    /// Adds a checkpoint and the review requests, and pauses the session.
    fn open_reviews(&self, builder: &mut EntryBuilder<'_>, requests: &[ReviewRequest], now: Timestamp) {
        builder.checkpoint(&self.context.run, self.checkpoint_state());
        for request in requests {
            let seq = builder.next_seq();
            builder.entries.push(Entry::review_opened(self.review_opened(request, seq, now)));
        }
        let reason = Some("waiting for review".to_owned());
        builder.entries.push(Entry::Status { to: Status::Paused, reason, until: None });
    }

    /// Adds the end of the run, with the checkpoint of the turn and the session's new model.
    fn end_run(&self, builder: &mut EntryBuilder<'_>, messages: &[Message]) {
        let run = &self.context.run;
        if self.policy.checkpoints != CheckpointPolicy::Manual {
            builder.entries.extend(automatic_checkpoint(builder.session.head, messages, Some(run)));
        }
        builder.entries.extend(self.new_model(builder.session));
        builder.entries.push(run_ended_entry(run, RunOutcome::Completed, None, None));
    }

    /// The entry that stores the answering model as the session's model, if it has changed.
    fn new_model(&self, session: PartialSession<'_>) -> Option<Entry> {
        let model = self.context.model.as_ref().filter(|m| Some(*m) != session.head.info.model.as_ref())?;
        Some(Entry::info(SessionPatch { model: Patch::Set(model.clone()), ..SessionPatch::default() }))
    }

    /// The item that stores the response for a replay under the same idempotency key.
    fn answer_item(&self) -> Option<(String, Item)> {
        (self.context.store_answer && self.answer.message().is_some()).then(|| {
            let mut stream = self.streamed.as_ref().map(|s| s.events.clone()).unwrap_or_default();
            if !stream.is_empty() {
                // The usage event is sent only after this commit.
                stream.extend(self.usage_event());
            }
            let replay = StoredAnswer {
                body: self.body(),
                reconcile_report: self.context.input.reconcile_report.clone(),
                calls: self.calls.clone(),
                stream,
            };
            let value = serde_json::to_string(&replay).expect("a replay serializes to JSON");
            (ANSWERS.to_owned(), expiring_item(self.context.run.as_str(), value, self.context.tenure.now()))
        })
    }

    pub(super) fn checkpoint_state(&self) -> Map<String, Value> {
        match self.tokens {
            0 => Map::new(),
            tokens => Map::from_iter([(TOKENS.to_owned(), json!(tokens))]),
        }
    }

    fn tool_started_entry(&self, job: &PendingCall) -> Option<Entry> {
        if matches!(job.action, CallAction::Respond(_)) {
            return None;
        }
        let mut detail = self.checkpoint_state();
        if self.hits.contains_key(&job.call.id) {
            detail.insert(CACHED.to_owned(), json!(true));
        }
        let call = job.call.id.clone();
        let tool = job.call.name.clone();
        Some(Entry::ToolStarted { run: self.context.run.clone(), call, tool, detail })
    }

    /// The question of a review, if the call asks a person.
    fn human_question(&self, request: &ReviewRequest) -> Option<HumanQuestion> {
        let asks_human = self.tools.iter().any(|tool| tool.asks_human && tool.name == request.call.name);
        HumanQuestion::from_arguments(request.arguments.as_object().filter(|_| asks_human)?).ok()
    }

    fn review_opened(&self, request: &ReviewRequest, seq: Seq, now: Timestamp) -> ReviewOpened {
        let rule = request.rule.and_then(|i| self.policy.review.get(i));
        let timeout = rule.and_then(|r| r.timeout?.duration()).and_then(|d| SignedDuration::try_from(d).ok());
        let expires_at = timeout.and_then(|timeout| now.checked_add(timeout).ok());
        let mut detail = Map::from_iter([("arguments".to_owned(), request.arguments.clone())]);
        let mut queue = rule.and_then(|r| r.queue.clone());
        if let Some(question) = self.human_question(request) {
            detail.insert(QUESTION.to_owned(), json!(question.question));
            detail.insert(CHOICES.to_owned(), json!(question.choices));
            queue = question.queue.or(queue);
        }
        ReviewOpened {
            review: ReviewId::of(&self.context.session_id, seq),
            step: request.call.name.clone(),
            run: Some(self.context.run.clone()),
            call: Some(request.call.id.clone()),
            queue,
            lost: request.lost,
            // A lost call has no review timeout: whether it had side effects must not be decided by
            // a timer.
            timeout: rule
                .filter(|_| !request.lost)
                .and_then(|r| Some(ReviewTimeout { at: expires_at?, decision: r.on_timeout })),
            detail,
        }
    }
}

/// A builder for the entries of one commit.
pub(super) struct EntryBuilder<'s> {
    session: PartialSession<'s>,
    pub entries: Vec<Entry>,
    steps: u64,
}

impl<'s> EntryBuilder<'s> {
    pub fn new(session: PartialSession<'s>, run: &Run) -> Self {
        Self { session, entries: Vec::new(), steps: last_step(session, run) }
    }

    fn next_seq(&self) -> Seq {
        self.session.head.seq + self.entries.len() as Seq + 1
    }

    pub fn checkpoint(&mut self, run: &RunId, state: Map<String, Value>) {
        self.steps += 1;
        let label = format!("turn-{}.{}", self.session.head.digest.turns.max(1), self.steps);
        if let Ok(label) = CheckpointLabel::new(label) {
            let run = Some(run.clone());
            let step = Some(self.steps);
            self.entries.push(Entry::Checkpoint(CheckpointEntry { label, auto: true, run, step, state }));
        }
    }
}

/// The step number of the run's latest checkpoint, 0 if it has none. Checkpoints of other origin
/// are skipped.
fn last_step(session: PartialSession<'_>, run: &Run) -> u64 {
    let checkpoints = session.checkpoints.iter().rev().take_while(|c| c.seq > run.seq);
    checkpoints.filter(|c| c.run.as_ref() == Some(&run.id)).find_map(|c| c.step).unwrap_or(0)
}
