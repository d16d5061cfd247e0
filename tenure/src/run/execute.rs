//! The execution loop of a run: computes the next step ([`next`](crate::rules::next())), executes
//! it and commits the result, until there is an answer, a review is required, or a limit is
//! reached.
//!
//! A round with tools is two commits: the answer with the calls that are about to be executed, and
//! their results with a checkpoint. A tool call is therefore recorded before it starts. While the
//! store is unavailable, the run retries and retains uncommitted results in memory ([`retry`]).

mod calls;
mod rate_limit;
mod retry;
mod step_commit;
mod tool_call;

use crate::engine::pending_commit::PendingCommit;
use crate::engine::turn_lock::StopReason;
use crate::executors::model::{ModelStream, Prompt};
use crate::executors::tools::ToolContext;
use crate::memory::injection::with_block;
use crate::rules::answer::{ModelAnswer, add_usage};
use crate::rules::next::NextStep;
use crate::rules::partial::PartialSession;
use crate::rules::prompt::{build_history, stateless_prompt};
use crate::rules::run_entries::{CANCELLED, run_ended_entry};
use crate::rules::session::{Run, StoredMessage, tokens_used};
use crate::rules::tool_call_filter::ToolCallFilter;
use crate::run::built_in_tools::BuiltInTool;
use crate::run::executors::{Executors, RunEvent, ToolProgress, TurnError, TurnOutcome};
use crate::run::lease::LeaseState;
use crate::run::open_run::{OpenRun, RunContext};
use crate::store::item::Item;
use crate::types::entry::{Entry, MessageEntry, RunOutcome};
use crate::types::error::{Error, Result};
use crate::types::id::Seq;
use crate::types::message::{Message, Role};
use crate::types::model::{ModelChunk, ModelError};
use crate::types::policy::RunPolicy;
use crate::types::tool::Tool;
use jiff::Timestamp;
use retry::Backoff;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

impl OpenRun {
    /// Executes the run and commits every step. A client that disconnects does not stop it (D-049).
    pub async fn execute(self, executors: Executors<'_>) -> Result<TurnOutcome, TurnError> {
        // Boxed, because futures of callers contain it and would be large.
        Box::pin(self.execute_boxed(executors)).await
    }

    async fn execute_boxed(self, executors: Executors<'_>) -> Result<TurnOutcome, TurnError> {
        let OpenRun { mut turn_guard, context } = self;
        let had_receiver = executors.events.is_some();
        let mut execution = Execution::new(context, executors);
        let tenure = execution.context.tenure.clone();
        let principal = execution.context.principal.clone();
        let id = execution.context.session_id.clone();
        let run = execution.context.run.clone();
        let time = execution.time_left();
        let lease_state = execution.lease_state.clone();
        let result = tokio::select! {
            // Boxed, because futures of callers contain it and would be large.
            result = Box::pin(execution.execute_steps()) => result,
            reason = turn_guard.stopped() => Err(match reason {
                StopReason::Interrupted => TurnError::Stopped,
                StopReason::Cancelled => TurnError::Cancelled,
            }),
            error = tenure.maintain_lease(&principal, &id, &run, &lease_state) => Err(error.into()),
            () = tokio::time::sleep(time) => Err(limit("out_of_time", "the run exceeded its `max_time`")),
        };
        match result {
            Ok(()) => Ok(TurnOutcome {
                session_id: id,
                run,
                all_events_delivered: had_receiver == execution.executors.events.is_some(),
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
    context: RunContext,
    executors: Executors<'a>,
    policy: RunPolicy,
    tools: Arc<[Tool]>,
    built_in: Vec<BuiltInTool>,
    /// Whether the client has tools of its own.
    client_tools: bool,
    /// The first prompt. `None` after the first round, and if the run is resumed.
    first_prompt: Option<Vec<Message>>,
    /// Whether the run was started earlier and resumes from its stored state.
    resumed: bool,
    /// The answer of the current round; `answer_committed` is true once it is persisted.
    answer: ModelAnswer,
    answer_committed: bool,
    rounds: usize,
    tokens: u64,
    /// Token usage summed over the model's answers, as far as the model server reports it.
    usage: Value,
    /// The stream chunk that reports the usage to the receiver of events.
    usage_chunk: Option<Value>,
    calls: Vec<ToolProgress>,
    /// Tool results that were found in the cache, by call id.
    hits: HashMap<String, String>,
    seq: Seq,
    waiting: bool,
    /// Changes of the session's metadata by tool calls, until they are committed with the results.
    metadata_patches: Vec<Map<String, Value>>,
    lease_state: Arc<LeaseState>,
    /// The record of the memories that are injected, until it is committed.
    recall_event: Option<Item>,
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
    fn new(mut context: RunContext, executors: Executors<'a>) -> Self {
        let until = AtomicI64::new(context.tenure.lease_claim(context.claimed_at).until.as_microsecond());
        let client_tools = executors.options.get("tools").is_some_and(|t| t.trim() != "null" && t.trim() != "[]");
        let prompt = std::mem::take(&mut context.input.prompt);
        let record_stream = context.store_answer && executors.events.is_some();
        Self {
            policy: context.policy().runs,
            tools: Arc::default(),
            built_in: Vec::new(),
            client_tools,
            resumed: prompt.is_empty(),
            first_prompt: (!prompt.is_empty()).then_some(prompt),
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
            metadata_patches: Vec::new(),
            lease_state: Arc::new(LeaseState { until, releasing: AtomicBool::new(false) }),
            recall_event: context.input.memory_injection.as_ref().and_then(|m| m.event.clone()),
            streamed: record_stream.then(StreamedText::default),
            answered_at: OnceLock::new(),
            context,
            executors,
        }
    }

    fn time_left(&self) -> Duration {
        let spent = self.context.tenure.now().duration_since(self.context.started_at);
        self.policy
            .max_time
            .saturating_sub(Duration::try_from(spent).unwrap_or_default())
            .min(Duration::from_secs(u32::MAX.into()))
    }

    /// Lists the tools of this run, and adds their definitions to the model request.
    async fn list_tools(&mut self) -> Result<(), TurnError> {
        let assistant = self.context.assistant.as_deref();
        let session = self.context.principal.key(&self.context.session_id);
        let mut tools = match self.executors.tools {
            Some(tools) => tools.list(&ToolContext::new(&session, assistant)).await.map_err(TurnError::Tools)?,
            None => Vec::new(),
        };
        let built_in = |a| BuiltInTool::of_assistant(&self.context.tenure, &self.context.principal, a);
        self.built_in = assistant.map(built_in).unwrap_or_default();
        tools.retain(|tool| self.built_in.iter().all(|built_in| built_in.name() != tool.name));
        tools.extend(self.built_in.iter().map(BuiltInTool::definition));
        self.tools = tools.into();
        self.add_tool_definitions();
        Ok(())
    }

    async fn execute_steps(&mut self) -> Result<(), TurnError> {
        if let Err(reason) = &self.context.instructions {
            return Err(TurnError::Instructions(reason.clone()));
        }
        self.list_tools().await?;
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
        let tenure = &self.context.tenure;
        let id = &self.context.session_id;
        let run = &self.context.run;
        let usage = tenure.engine.read_partial(&self.context.principal, id, |session| {
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
        let client_tools = self.executors.options.get("tools").and_then(|t| serde_json::from_str::<Vec<Value>>(t).ok());
        let is_own_tool = |v: &Value| self.tools.iter().any(|t| v["function"]["name"] == t.name.as_str());
        let mut definitions: Vec<Value> =
            client_tools.unwrap_or_default().into_iter().filter(|v| !is_own_tool(v)).collect();
        definitions.extend(self.tools.iter().map(|t| {
            let function = json!({"name": t.name, "description": t.description, "parameters": t.parameters});
            json!({"type": "function", "function": function})
        }));
        self.executors.options.set("tools", definitions);
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
        self.answer = ModelAnswer::with_max_bytes(self.context.tenure.limits().max_message_bytes);
        self.answer_committed = false;
        let prompt = Prompt { messages, options: self.executors.options.clone(), stream: self.executors.stream };
        let Some(chunks) = Box::pin(self.ask_model(prompt)).await? else {
            self.answer_committed = true;
            return Ok(NextStep::Wait);
        };
        self.stream_answer(chunks).await?;
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
        let tenure = &self.context.tenure;
        let id = &self.context.session_id;
        let history = tenure.engine.read_cached_partial(&self.context.principal, id, |session| {
            let policy = tenure.policy(&session.head.tenant, session.head.assistant.as_deref());
            let input = &self.context.input;
            if let Some(request) = input.sole_input.as_ref().filter(|_| policy.is_stateless()) {
                let produced = session.messages.iter().filter(|m| m.run.as_ref() == Some(&self.context.run));
                return Ok(stateless_prompt(request, &produced.collect::<Vec<_>>(), session.reviews));
            }
            let summaries = if policy.is_stateless() { &[] } else { session.summaries };
            Ok(build_history(session.messages.iter(), session.reviews, summaries, &policy.window, &input.overlay))
        });
        let history = history.await?;
        if self.context.input.memory_injection.is_none() && self.resumed {
            // The run was started by another node, which injected its recalled memories. Recall
            // them again.
            let name = self.context.assistant.as_ref().map(|a| a.name.as_str());
            self.context.input.memory_injection =
                tenure.recall_for_prompt(&self.context.principal, id, name, &history).await;
        }
        let messages =
            tenure.prompt(&self.context.principal.tenant, self.context.rendered_instructions(), history).await?;
        Ok(with_block(messages, self.context.input.memory_injection.as_ref().map(|r| &r.block)))
    }

    async fn stream_answer(&mut self, mut chunks: ModelStream) -> Result<(), TurnError> {
        let mut filter = ToolCallFilter::new(self.tools.clone());
        while let Some(chunk) = std::future::poll_fn(|cx| chunks.as_mut().poll_next(cx)).await {
            let chunk = chunk?;
            self.answer.add_chunk(&chunk)?;
            // Record for a replay even without a listener: a disconnected client gets the stream
            // when it retries.
            if (self.executors.events.is_some() || self.streamed.is_some())
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
        let max_stall = self.context.tenure.limits().max_stall;
        if let Some(listener) = &self.executors.events
            && !matches!(tokio::time::timeout(max_stall, listener.send(event)).await, Ok(Ok(())))
        {
            self.executors.events = None;
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
        self.answer.body(self.context.run.as_str(), *self.answered_at.get_or_init(|| self.context.tenure.now()))
    }

    /// Returns the run if this node still holds its lease, the run is open, and the message it
    /// answers has not been discarded.
    fn held_run<'s>(&self, session: PartialSession<'s>) -> Option<&'s Run> {
        let has_input = self.context.input.seq == 0 || session.contains_message(self.context.input.seq);
        let is_held = has_input
            && session.head.status.is_live()
            && self.context.tenure.holds_lease(session.head, &self.context.run);
        session.run(&self.context.run).filter(|run| is_held && run.ended.is_none())
    }

    /// Returns true if another node has cancelled the run and no message was added since. The
    /// partial answer can then still be stored.
    fn was_cancelled_elsewhere(&self, session: PartialSession<'_>) -> bool {
        let cancelled = |run: &Run| run.code.as_deref() == Some(CANCELLED) && run.ended.is_some();
        let is_last_run = session.runs.last().is_some_and(|run| run.id == self.context.run && cancelled(run));
        let is_own = |m: &StoredMessage| {
            !m.partial && (m.run.as_ref() == Some(&self.context.run) || m.seq == self.context.input.seq)
        };
        is_last_run && session.head.status.is_live() && session.messages.last().is_some_and(is_own)
    }

    /// The commit for a run that was superseded: ends the run, unless it has ended or is held by
    /// another node.
    fn superseded_commit<R>(&self, session: PartialSession<'_>) -> PendingCommit<Option<R>> {
        let is_held = session.head.status.is_live() && self.context.tenure.holds_lease(session.head, &self.context.run);
        let reason = "the session was rewound, replaced or ended during the run".to_owned();
        let entry = run_ended_entry(&self.context.run, RunOutcome::Cancelled, Some(reason), Some("superseded"));
        PendingCommit::new(if is_held { vec![entry] } else { Vec::new() }, None)
    }

    /// Ends the run as failed or cancelled, and persists the partial answer (D-048).
    async fn fail_run(&mut self, error: &TurnError) -> Result<()> {
        let partial_answer: Vec<Message> =
            if self.answer_committed { Vec::new() } else { self.answer.message().into_iter().collect() };
        let is_stopped = matches!(error, TurnError::Stopped | TurnError::Cancelled);
        let outcome = if is_stopped { RunOutcome::Cancelled } else { RunOutcome::Failed };
        let tenure = &self.context.tenure;
        let id = &self.context.session_id;
        let run = &self.context.run;
        let committed = tenure.write_partial(&self.context.principal, id, |session, _| {
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
