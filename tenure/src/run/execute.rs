//! The execution loop of a run: computes the next step ([`next`](crate::rules::next())), executes
//! it and commits the result, until there is an answer, a review is required, or a limit is
//! reached.
//!
//! A round with tools is two commits: the answer with the calls that are about to be executed, and
//! their results with a checkpoint. A tool call is therefore recorded before it starts. While the
//! store is unavailable, the run retries and retains uncommitted results in memory ([`retry`]).

mod calls;
mod retry;

use crate::engine::pending_commit::{Depth, PendingCommit};
use crate::engine::turn_lock::{StopReason, TurnGuard};
use crate::executors::model::{Prompt, SpeculativeSlot};
use crate::memory::recall::{MemoryInjection, RECALLS, with_block};
use crate::rules::answer::{ModelAnswer, add_usage};
use crate::rules::next::{CallAction, NextStep, PendingCall, ReviewRequest, RunRules, next_after};
use crate::rules::overlay::Overlay;
use crate::rules::prompt::build_history;
use crate::rules::run_entries::{CANCELLED, run_ended_entry};
use crate::rules::session::{CACHED, Run, Session, StoredMessage, TOKENS, tokens_used};
use crate::rules::tool_call_filter::ToolCallFilter;
use crate::run::begin::OpenRun;
use crate::run::executors::{Executors, RunEvent, StoredAnswer, ToolProgress, TurnError, TurnOutcome};
use crate::run::idempotency::ANSWERS;
use crate::run::lease::LeaseState;
use crate::run::request::ReconcileReport;
use crate::store::item::Item;
use crate::tenure::Tenure;
use crate::types::assistant::Assistant;
use crate::types::entry::{
    CheckpointEntry, Entry, MessageEntry, Patch, ReviewOpened, ReviewTimeout, RunOutcome, SessionPatch,
};
use crate::types::error::{Error, Result};
use crate::types::id::{CheckpointLabel, Principal, ReviewId, RunId, Seq, SessionId};
use crate::types::message::{Message, Role};
use crate::types::model::{ModelChunk, ModelError};
use crate::types::policy::{CheckpointPolicy, RunPolicy};
use crate::types::raw_object::RawObject;
use crate::types::status::Status;
use crate::types::tool::Tool;
use jiff::{SignedDuration, Timestamp};
use retry::Backoff;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::mpsc;

impl OpenRun {
    /// Executes the run and commits every step. Events are sent to `listener` as they occur; a
    /// listener that disconnects does not stop the run (D-049).
    pub async fn run(
        self,
        executors: Executors<'_>,
        options: RawObject,
        stream: bool,
        listener: Option<mpsc::Sender<RunEvent>>,
    ) -> Result<TurnOutcome, TurnError> {
        let had_listener = listener.is_some();
        let (mut execution, mut turn_guard) = Execution::new(self, executors, options, stream, listener);
        let tenure = execution.tenure.clone();
        let principal = execution.principal.clone();
        let id = execution.session_id.clone();
        let run = execution.run.clone();
        let time = execution.time_left();
        let lease_state = execution.lease_state.clone();
        let result = tokio::select! {
            result = execution.execute_steps() => result,
            reason = turn_guard.stopped() => Err(match reason {
                StopReason::Interrupted => TurnError::Stopped,
                StopReason::Cancelled => TurnError::Cancelled,
            }),
            error = tenure.maintain_lease(&principal, &id, &run, &lease_state) => Err(error.into()),
            () = tokio::time::sleep(time) => Err(limit("out_of_time", "the run exceeded its `max_time`")),
        };
        match result {
            Ok(()) => Ok(TurnOutcome {
                all_events_delivered: had_listener == execution.listener.is_some(),
                body: execution.body(),
                answer: execution.answer,
                seq: execution.seq,
                calls: execution.calls,
                waiting: execution.waiting,
            }),
            Err(reason) => {
                execution.fail_run(&reason).await?;
                Err(reason)
            }
        }
    }
}

/// The state of a run while it is executed.
struct Execution<'a> {
    tenure: Tenure,
    principal: Principal,
    session_id: SessionId,
    run: RunId,
    input_seq: Seq,
    store_answer: bool,
    assistant: Option<Arc<Assistant>>,
    model: Option<String>,
    overlay: Overlay,
    policy: RunPolicy,
    started_at: Timestamp,
    executors: Executors<'a>,
    tools: Arc<[Tool]>,
    options: RawObject,
    client_tools: bool,
    stream: bool,
    listener: Option<mpsc::Sender<RunEvent>>,
    /// The first prompt. `None` means that the run was started earlier and is resumed.
    first_prompt: Option<Vec<Message>>,
    resumed: bool,
    /// A model request that is already in flight.
    speculative_call: SpeculativeSlot,
    /// The answer of the current round; `answer_committed` is true once it is persisted.
    answer: ModelAnswer,
    answer_committed: bool,
    rounds: usize,
    tokens: u64,
    /// Token usage summed over the model's answers, as far as the model server reports it.
    usage: Value,
    /// The stream chunk that reports the usage to the listener.
    usage_chunk: Option<Value>,
    calls: Vec<ToolProgress>,
    /// Tool results that were found in the cache, by call id.
    hits: HashMap<String, String>,
    seq: Seq,
    waiting: bool,
    lease_state: Arc<LeaseState>,
    /// Recalled memories that are injected into the prompt.
    memory_injection: Option<MemoryInjection>,
    /// The record of that injection, until it is committed.
    recall_event: Option<Item>,
    /// The report of how the request's messages were merged.
    reconcile_report: ReconcileReport,
    /// The streamed events, recorded for a replay under the same idempotency key (D-047).
    streamed: Option<StreamedText>,
    /// The creation time in the response body, fixed at first use so that the body is the same each
    /// time.
    answered_at: OnceLock<Timestamp>,
}

/// Recorded stream events and their total size in bytes.
#[derive(Default)]
struct StreamedText {
    events: Vec<RunEvent>,
    bytes: usize,
}

/// Maximum size of a recorded stream in bytes. A longer stream is not stored; its replay contains
/// the answer as one chunk.
const MAX_STREAMED: usize = 4 << 20;

fn limit(code: &'static str, message: impl Into<String>) -> TurnError {
    TurnError::Limit { code, message: message.into() }
}

impl<'a> Execution<'a> {
    fn new(
        open_run: OpenRun,
        executors: Executors<'a>,
        options: RawObject,
        stream: bool,
        listener: Option<mpsc::Sender<RunEvent>>,
    ) -> (Self, TurnGuard) {
        let OpenRun {
            tenure,
            principal,
            turn_guard,
            store_answer,
            input_seq,
            assistant,
            model,
            overlay,
            session_id,
            run,
            messages,
            started_at,
            claimed_at,
            memory_injection,
            speculative_call,
            reconcile_report,
            ..
        } = open_run;
        let policy = tenure.policy(&principal.tenant, assistant.as_ref().map(|a| a.name.as_str())).runs;
        let until = AtomicI64::new(tenure.lease_claim(claimed_at).until.as_microsecond());
        let lease_state = Arc::new(LeaseState { until, releasing: AtomicBool::new(false) });
        let client_tools = options.get("tools").is_some_and(|t| t.trim() != "null" && t.trim() != "[]");
        let record_stream = store_answer && listener.is_some();
        let execution = Self {
            tenure,
            principal,
            session_id,
            run,
            input_seq,
            store_answer,
            assistant,
            model,
            overlay,
            policy,
            started_at,
            executors,
            tools: Arc::default(),
            options,
            client_tools,
            stream,
            listener,
            resumed: messages.is_empty(),
            first_prompt: (!messages.is_empty()).then_some(messages),
            speculative_call,
            answer: ModelAnswer::default(),
            answer_committed: true,
            rounds: 0,
            tokens: 0,
            usage: Value::Null,
            usage_chunk: None,
            calls: Vec::new(),
            hits: HashMap::new(),
            seq: 0,
            waiting: false,
            lease_state,
            recall_event: memory_injection.as_ref().map(|r| r.event.clone()),
            memory_injection,
            reconcile_report,
            streamed: record_stream.then(StreamedText::default),
            answered_at: OnceLock::new(),
        };
        (execution, turn_guard)
    }

    fn time_left(&self) -> Duration {
        let spent = self.tenure.now().duration_since(self.started_at);
        self.policy
            .max_time
            .saturating_sub(Duration::try_from(spent).unwrap_or_default())
            .min(Duration::from_secs(u32::MAX.into()))
    }

    async fn execute_steps(&mut self) -> Result<(), TurnError> {
        if let Some(assistant) = &self.assistant {
            let mut tools = match self.executors.tools {
                Some(tools) => tools.list(assistant).await.map_err(TurnError::Tools)?,
                None => Vec::new(),
            };
            if let Some(memory) = self.tenure.memory_tool(&self.principal, assistant) {
                tools.retain(|t| t.name != memory.name);
                tools.push(memory);
            }
            self.tools = tools.into();
            self.add_tool_definitions();
        }
        let mut step = match self.first_prompt {
            Some(_) => NextStep::Model,
            None => {
                let mut backoff = Backoff::new();
                while backoff.unless_unavailable(self.restore_usage().await).await.transpose()?.is_none() {}
                self.commit_messages(Vec::new(), true).await?
            }
        };
        loop {
            step = match step {
                NextStep::Model => self.call_model().await?,
                NextStep::Tools(jobs) => self.call_tools(jobs).await?,
                NextStep::Review(_) | NextStep::Wait => {
                    self.waiting = true;
                    return Ok(());
                }
                NextStep::Done => {
                    self.send_usage().await;
                    return Ok(());
                }
            };
        }
    }

    /// Restores the round and token counters of a resumed run from its log.
    async fn restore_usage(&mut self) -> Result<()> {
        let tenure = &self.tenure;
        let id = &self.session_id;
        let run = &self.run;
        let usage = tenure.engine.read(&self.principal, id, Depth::Run, |state| {
            let session = tenure.engine.run_ref(state, id)?;
            let run_messages = session.messages.iter().rev().take_while(|m| m.run.as_ref() == Some(run));
            let rounds = run_messages.filter(|m| m.message.role() == Role::Assistant).count();
            let last = session.checkpoints.iter().rev().find(|c| c.run.as_ref() == Some(run));
            let tool_tokens = session.run(run).and_then(|r| r.tools_started.last()).map_or(0, |s| s.tokens);
            Ok((rounds, last.map_or(0, |c| tokens_used(&c.state)).max(tool_tokens)))
        });
        (self.rounds, self.tokens) = usage.await?;
        if self.tokens > 0 {
            // Only the total was persisted, not the breakdown.
            self.usage = json!({"total_tokens": self.tokens});
        }
        Ok(())
    }

    /// Adds the assistant's tool definitions to the request, after the client's. A client tool with
    /// the same name is dropped.
    fn add_tool_definitions(&mut self) {
        if self.tools.is_empty() {
            return;
        }
        let client_tools = self.options.get("tools").and_then(|t| serde_json::from_str::<Vec<Value>>(t).ok());
        let is_own_tool = |v: &Value| self.tools.iter().any(|t| v["function"]["name"] == t.name.as_str());
        let mut definitions: Vec<Value> =
            client_tools.unwrap_or_default().into_iter().filter(|v| !is_own_tool(v)).collect();
        definitions.extend(self.tools.iter().map(|t| {
            let function = json!({"name": t.name, "description": t.description, "parameters": t.parameters});
            json!({"type": "function", "function": function})
        }));
        self.options.set("tools", definitions);
    }

    /// Executes one model round: calls the model and commits its answer together with the entries
    /// of the next step. Fails if `max_rounds` or `max_tokens` is exhausted.
    async fn call_model(&mut self) -> Result<NextStep, TurnError> {
        if self.rounds >= self.policy.max_rounds {
            let max = self.policy.max_rounds;
            return Err(limit("too_many_rounds", format!("the run reached its `max_rounds` of {max} model calls")));
        }
        if let Some(max) = self.policy.max_tokens.filter(|max| self.tokens >= *max) {
            return Err(limit("out_of_tokens", format!("the run has used its `max_tokens` of {max}")));
        }
        self.rounds += 1;
        let messages = match self.first_prompt.take() {
            Some(messages) => messages,
            None => {
                let mut backoff = Backoff::new();
                loop {
                    if let Some(messages) = backoff.unless_unavailable(self.build_prompt().await).await {
                        break messages?;
                    }
                }
            }
        };
        self.answer = ModelAnswer::with_max_bytes(self.tenure.limits().max_message_bytes);
        self.answer_committed = false;
        let prompt = Prompt { messages, options: self.options.clone(), stream: self.stream };
        self.stream_answer(prompt).await?;
        let Some(message) = self.answer.message() else {
            return Err(ModelError::Broken { reason: "the answer ended without any content".into() }.into());
        };
        let used = self.answer.usage.as_ref().and_then(|u| u["total_tokens"].as_u64());
        self.tokens = self.tokens.saturating_add(used.unwrap_or(0));
        self.add_usage();
        self.look_up_cached_results(&message).await?;
        let step = self.commit_messages(vec![message], true).await?;
        self.answer_committed = true;
        Ok(step)
    }

    /// Adds the usage of the last answer to the sum of the run. From the second answer on, the
    /// answer carries the sum, because the last one is returned to the client (D-050).
    fn add_usage(&mut self) {
        let Some(used) = self.answer.usage.clone() else { return };
        let first = self.usage.is_null();
        add_usage(&mut self.usage, &used);
        if !first {
            self.answer.set_usage(self.usage.clone());
        }
    }

    /// Sends the usage of the whole turn to the listener, if the model server has reported usage
    /// (D-050).
    async fn send_usage(&mut self) {
        if let Some(event) = self.usage_event() {
            self.usage_chunk = None;
            self.send_event(event).await;
        }
    }

    fn usage_event(&self) -> Option<RunEvent> {
        let mut chunk = self.usage_chunk.clone()?;
        chunk["usage"] = self.usage.clone();
        Some(RunEvent::Chunk(ModelChunk::Chunk(chunk.to_string())))
    }

    /// Builds the prompt of a later round from the run's last commit (D-055), without checking the
    /// store for newer records.
    async fn build_prompt(&mut self) -> Result<Vec<Message>> {
        let tenure = &self.tenure;
        let id = &self.session_id;
        let history = tenure.engine.read_cached(&self.principal, id, Depth::Run, |state| {
            let session = tenure.engine.run_ref(state, id)?;
            let window = tenure.policy(&session.tenant, session.assistant.as_deref()).window;
            Ok(build_history(session.messages.iter(), &session.reviews, &session.summaries, &window, &self.overlay))
        });
        let history = history.await?;
        if self.memory_injection.is_none() && self.resumed {
            // The run was started by another node, which injected its recalled memories. Recall
            // them again.
            let name = self.assistant.as_ref().map(|a| a.name.as_str());
            self.memory_injection = tenure.recall_for_prompt(&self.principal, id, name, &history).await;
        }
        let messages = tenure.prompt(&self.principal.tenant, self.assistant.as_deref(), history).await?;
        Ok(with_block(messages, self.memory_injection.as_ref().map(|r| &r.block)))
    }

    async fn stream_answer(&mut self, prompt: Prompt) -> Result<(), TurnError> {
        let mut filter = ToolCallFilter::new(self.tools.clone());
        let mut chunks = match self.speculative_call.take() {
            Some(call) => call.response().await?,
            None => self.executors.model.ask(prompt).await?,
        };
        while let Some(chunk) = std::future::poll_fn(|cx| chunks.as_mut().poll_next(cx)).await {
            let chunk = chunk?;
            self.answer.add_chunk(&chunk)?;
            // Record for a replay even without a listener: a disconnected client gets the stream
            // when it retries.
            if (self.listener.is_some() || self.streamed.is_some())
                && let Some(chunk) = filter.filter(chunk)
            {
                self.send_event(RunEvent::Chunk(chunk)).await;
            }
        }
        self.usage_chunk = filter.usage().or(self.usage_chunk.take());
        Ok(())
    }

    async fn send_event(&mut self, event: RunEvent) {
        self.record(&event);
        let max_stall = self.tenure.limits().max_stall;
        if let Some(listener) = &self.listener
            && !matches!(tokio::time::timeout(max_stall, listener.send(event)).await, Ok(Ok(())))
        {
            self.listener = None;
        }
    }

    /// Records an event for a replay. Recording stops, and is discarded, beyond `MAX_STREAMED`.
    fn record(&mut self, event: &RunEvent) {
        let Some(streamed) = &mut self.streamed else { return };
        streamed.bytes += match event {
            RunEvent::Chunk(ModelChunk::Chunk(text) | ModelChunk::Complete(text)) => text.len(),
            RunEvent::Tool(progress) => progress.arguments.len() + progress.content.as_ref().map_or(0, String::len),
        };
        if streamed.bytes > MAX_STREAMED {
            self.streamed = None;
        } else {
            streamed.events.push(event.clone());
        }
    }

    /// The answer as one `chat.completion`, identical each time it is serialized.
    fn body(&self) -> String {
        self.answer.body(self.run.as_str(), *self.answered_at.get_or_init(|| self.tenure.now()))
    }

    /// Commits messages together with the entries that follow from them: tool call starts, review
    /// requests, or the end of the run. `is_round_complete` is true if no other call of this round
    /// is in flight. Returns [`Error::Superseded`] if this node no longer holds the run.
    async fn commit_messages(&mut self, messages: Vec<Message>, is_round_complete: bool) -> Result<NextStep> {
        let tenure = &self.tenure;
        let id = &self.session_id;
        let run = &self.run;
        let committed = tenure.write_with_retries(&self.principal, id, Depth::Run, |state, now| {
            let session = tenure.engine.run_ref(state, id)?;
            let Some(held_run) = self.held_run(session) else { return Ok(self.superseded_commit(session)) };
            let message_entry = |m: &Message| Entry::Message(MessageEntry::by_run(run, m.clone()));
            let mut builder = EntryBuilder { session, entries: Vec::new(), steps: last_step(session, held_run) };
            let results = messages.iter().any(|m| m.tool_call_id().is_some());
            for message in &messages {
                builder.entries.push(message_entry(message));
                if results && self.policy.checkpoints == CheckpointPolicy::Tool {
                    builder.checkpoint(run, self.checkpoint_state());
                }
            }
            let rules = RunRules { tools: &self.tools, review: &self.policy.review, client_tools: self.client_tools };
            let step = if is_round_complete { next_after(session, &messages, &rules) } else { NextStep::Wait };
            if is_round_complete && results && self.policy.checkpoints == CheckpointPolicy::Step {
                builder.checkpoint(run, self.checkpoint_state());
            }
            if is_round_complete && let CheckpointPolicy::Every(interval) = self.policy.checkpoints {
                let since =
                    session.checkpoints.last().map_or(held_run.started_at, |c| c.created_at).max(held_run.started_at);
                if Duration::try_from(now.duration_since(since)).is_ok_and(|age| age >= interval) {
                    builder.checkpoint(run, self.checkpoint_state());
                }
            }
            let mut items: Vec<_> = self.recall_event.iter().map(|event| (RECALLS.to_owned(), event.clone())).collect();
            match &step {
                NextStep::Tools(jobs) => {
                    builder.entries.extend(jobs.iter().filter_map(|job| self.tool_started_entry(job)))
                }
                NextStep::Review(requests) => {
                    builder.checkpoint(run, self.checkpoint_state());
                    for request in requests {
                        let seq = builder.next_seq();
                        builder.entries.push(Entry::review_opened(self.review_opened(request, seq, now)));
                    }
                    let reason = Some("waiting for review".to_owned());
                    builder.entries.push(Entry::Status { to: Status::Paused, reason });
                }
                NextStep::Done if is_round_complete => {
                    let turn = (self.policy.checkpoints != CheckpointPolicy::Manual)
                        .then(|| crate::rules::checkpoint::automatic_checkpoint(session, &messages, Some(run)));
                    builder.entries.extend(turn.flatten());
                    builder.entries.extend(self.new_model(session));
                    builder.entries.push(run_ended_entry(run, RunOutcome::Completed, None, None));
                    items.extend(self.answer_item());
                }
                _ => {}
            }
            self.lease_state.releasing.store(matches!(step, NextStep::Done | NextStep::Review(_)), Ordering::Relaxed);
            let seq = builder.next_seq() - 1;
            let mut pending = PendingCommit::new(builder.entries, Some((seq, step)));
            pending.items = items;
            Ok(pending)
        });
        match committed.await {
            Ok(Some((seq, step))) => {
                self.seq = seq;
                self.recall_event = None;
                Ok(step)
            }
            Ok(None) | Err(Error::NotFound { .. }) => Err(Error::Superseded { session_id: id.clone() }),
            Err(e) => Err(e),
        }
    }

    /// Returns the run if this node still holds its lease, the run is open, and the message it
    /// answers has not been discarded.
    fn held_run<'s>(&self, session: &'s Session) -> Option<&'s Run> {
        let has_input = self.input_seq == 0 || session.contains_message(self.input_seq);
        let is_held = has_input && session.status.is_live() && self.tenure.holds_lease(session.head(), &self.run);
        session.run(&self.run).filter(|run| is_held && run.ended.is_none())
    }

    /// Returns true if another node has cancelled the run and no message was added since. The
    /// partial answer can then still be stored.
    fn was_cancelled_elsewhere(&self, session: &Session) -> bool {
        let cancelled = |run: &Run| run.code.as_deref() == Some(CANCELLED) && run.ended.is_some();
        let is_last_run = session.runs.last().is_some_and(|run| run.id == self.run && cancelled(run));
        let is_own = |m: &StoredMessage| !m.partial && (m.run.as_ref() == Some(&self.run) || m.seq == self.input_seq);
        is_last_run && session.status.is_live() && session.messages.last().is_some_and(is_own)
    }

    /// The commit for a run that was superseded: ends the run, unless it has ended or is held by
    /// another node.
    fn superseded_commit<R>(&self, session: &Session) -> PendingCommit<Option<R>> {
        let is_held = session.status.is_live() && self.tenure.holds_lease(session.head(), &self.run);
        let reason = "the session was rewound, replaced or ended during the run".to_owned();
        let entry = run_ended_entry(&self.run, RunOutcome::Cancelled, Some(reason), Some("superseded"));
        PendingCommit::new(if is_held { vec![entry] } else { Vec::new() }, None)
    }

    /// The entry that stores the answering model as the session's model, if it has changed.
    fn new_model(&self, session: &Session) -> Option<Entry> {
        let model = self.model.as_ref().filter(|m| Some(*m) != session.info.model.as_ref())?;
        Some(Entry::info(SessionPatch { model: Patch::Set(model.clone()), ..SessionPatch::default() }))
    }

    /// The item that stores the response for a replay under the same idempotency key.
    fn answer_item(&self) -> Option<(String, Item)> {
        (self.store_answer && self.answer.message().is_some()).then(|| {
            let mut stream = self.streamed.as_ref().map(|s| s.events.clone()).unwrap_or_default();
            if !stream.is_empty() {
                // The usage event is sent only after this commit.
                stream.extend(self.usage_event());
            }
            let replay = StoredAnswer {
                body: self.body(),
                reconcile_report: self.reconcile_report.clone(),
                calls: self.calls.clone(),
                stream,
            };
            let value = serde_json::to_string(&replay).expect("a replay serializes to JSON");
            (ANSWERS.to_owned(), self.tenure.expiring_item(self.run.as_str(), value))
        })
    }

    fn checkpoint_state(&self) -> Map<String, Value> {
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
        Some(Entry::ToolStarted { run: self.run.clone(), call, tool, detail })
    }

    fn review_opened(&self, request: &ReviewRequest, seq: Seq, now: Timestamp) -> ReviewOpened {
        let rule = request.rule.and_then(|i| self.policy.review.get(i));
        let timeout = rule.and_then(|r| r.timeout?.duration()).and_then(|d| SignedDuration::try_from(d).ok());
        let expires_at = timeout.and_then(|timeout| now.checked_add(timeout).ok());
        ReviewOpened {
            review: ReviewId::of(&self.session_id, seq),
            step: request.call.name.clone(),
            run: Some(self.run.clone()),
            call: Some(request.call.id.clone()),
            queue: rule.and_then(|r| r.queue.clone()),
            lost: request.lost,
            // A lost call has no review timeout: whether it had side effects must not be decided by
            // a timer.
            timeout: rule
                .filter(|_| !request.lost)
                .and_then(|r| Some(ReviewTimeout { at: expires_at?, decision: r.on_timeout })),
            detail: Map::from_iter([("arguments".to_owned(), request.arguments.clone())]),
        }
    }

    /// Ends the run as failed or cancelled, and persists the partial answer (D-048).
    async fn fail_run(&mut self, error: &TurnError) -> Result<()> {
        let partial_answer: Vec<Message> =
            if self.answer_committed { Vec::new() } else { self.answer.message().into_iter().collect() };
        let is_stopped = matches!(error, TurnError::Stopped | TurnError::Cancelled);
        let outcome = if is_stopped { RunOutcome::Cancelled } else { RunOutcome::Failed };
        let tenure = &self.tenure;
        let id = &self.session_id;
        let run = &self.run;
        let committed = tenure.write(&self.principal, id, Depth::Run, |state, _| {
            let session = tenure.engine.run_ref(state, id)?;
            let partial_entry =
                |m: &Message| Entry::Message(MessageEntry { partial: true, ..MessageEntry::by_run(run, m.clone()) });
            // The answer may have been committed at the moment the run was stopped: do not store it
            // twice.
            let last = session.messages.last().filter(|m| m.run.as_ref() == Some(run));
            let unstored = partial_answer.iter().filter(|m| last.is_none_or(|last| last.message != **m));
            let mut entries: Vec<Entry> = unstored.map(partial_entry).collect();
            if self.was_cancelled_elsewhere(session) {
                return Ok(PendingCommit::new(entries, None));
            }
            if self.held_run(session).is_none() {
                return Ok(self.superseded_commit::<()>(session));
            }
            entries.push(run_ended_entry(run, outcome, Some(error.to_string()), Some(error.code())));
            Ok(PendingCommit::new(entries, None))
        });
        match committed.await {
            // The run has already ended in another way.
            Err(Error::Superseded { .. } | Error::NotFound { .. } | Error::Gone { .. } | Error::Paused { .. }) => {
                Ok(())
            }
            other => other.map(drop),
        }
    }
}

/// A builder for the entries of one commit.
struct EntryBuilder<'s> {
    session: &'s Session,
    entries: Vec<Entry>,
    steps: u64,
}

impl EntryBuilder<'_> {
    fn next_seq(&self) -> Seq {
        self.session.seq + self.entries.len() as Seq + 1
    }

    fn checkpoint(&mut self, run: &RunId, state: Map<String, Value>) {
        self.steps += 1;
        let label = format!("turn-{}.{}", self.session.digest.turns.max(1), self.steps);
        if let Ok(label) = CheckpointLabel::new(label) {
            let run = Some(run.clone());
            let step = Some(self.steps);
            self.entries.push(Entry::Checkpoint(CheckpointEntry { label, auto: true, run, step, state }));
        }
    }
}

/// The step number of the run's latest checkpoint, 0 if it has none. Checkpoints of other origin
/// are skipped.
fn last_step(session: &Session, run: &Run) -> u64 {
    let checkpoints = session.checkpoints.iter().rev().take_while(|c| c.seq > run.seq);
    checkpoints.filter(|c| c.run.as_ref() == Some(&run.id)).find_map(|c| c.step).unwrap_or(0)
}
