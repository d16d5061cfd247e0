//! The execution loop of a run: computes the next step ([`next`](crate::rules::next())), executes
//! it and commits the result, until there is an answer, a review is required, or a limit is
//! reached.
//!
//! A round with tools is two commits: the answer with the calls that are about to be executed, and
//! their results with a checkpoint. A tool call is therefore recorded before it starts. While the
//! store is unavailable, the run retries and retains uncommitted results in memory ([`insist`]).

mod calls;
mod insist;

use crate::engine::draft::{Depth, PendingCommit};
use crate::engine::turn_lock::{StopReason, TurnGuard};
use crate::executors::model::{Prompt, SpeculativeSlot};
use crate::memory::recall::{MemoryInjection, RECALLS, with_block};
use crate::rules::answer::{ModelAnswer, add_usage};
use crate::rules::next::{CallAction, NextStep, PendingCall, ReviewRequest, RunRules, next_after};
use crate::rules::overlay::Overlay;
use crate::rules::prompt::shown_with;
use crate::rules::run_entries::{CANCELLED, ended};
use crate::rules::session::{CACHED, Run, Session, StoredMessage, TOKENS, spent};
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
use insist::Backoff;
use jiff::{SignedDuration, Timestamp};
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
        hands: Executors<'_>,
        options: RawObject,
        stream: bool,
        listener: Option<mpsc::Sender<RunEvent>>,
    ) -> Result<TurnOutcome, TurnError> {
        let listened = listener.is_some();
        let (mut work, mut pass) = Execution::new(self, hands, options, stream, listener);
        let (tenure, who) = (work.tenure.clone(), work.who.clone());
        let (id, run, time) = (work.session_id.clone(), work.run.clone(), work.time_left());
        let held = work.held.clone();
        let done = tokio::select! {
            done = work.go() => done,
            why = pass.stopped() => Err(match why {
                StopReason::Interrupted => TurnError::Stopped,
                StopReason::Cancelled => TurnError::Cancelled,
            }),
            lost = tenure.keep_lease(&who, &id, &run, &held) => Err(lost.into()),
            () = tokio::time::sleep(time) => Err(limit("out_of_time", "the run took longer than its `max_time`")),
        };
        match done {
            Ok(()) => Ok(TurnOutcome {
                heard: listened == work.listener.is_some(),
                body: work.body(),
                answer: work.answer,
                seq: work.seq,
                calls: work.calls,
                waiting: work.waiting,
            }),
            Err(why) => {
                work.give_up(&why).await?;
                Err(why)
            }
        }
    }
}

/// The state of a run while it is executed.
struct Execution<'a> {
    tenure: Tenure,
    who: Principal,
    session_id: SessionId,
    run: RunId,
    asked: Seq,
    remember: bool,
    assistant: Option<Arc<Assistant>>,
    model: Option<String>,
    overlay: Overlay,
    policy: RunPolicy,
    started_at: Timestamp,
    hands: Executors<'a>,
    tools: Arc<[Tool]>,
    options: RawObject,
    client_tools: bool,
    stream: bool,
    listener: Option<mpsc::Sender<RunEvent>>,
    /// The first prompt. `None` means that the run was started earlier and is resumed.
    first: Option<Vec<Message>>,
    goes_on: bool,
    /// A model request that is already in flight.
    asking: SpeculativeSlot,
    /// The answer of the current round; `kept` is true once it is persisted.
    answer: ModelAnswer,
    kept: bool,
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
    held: Arc<LeaseState>,
    /// Recalled memories that are injected into the prompt.
    recalled: Option<MemoryInjection>,
    /// The record of that injection, until it is committed.
    recall: Option<Item>,
    /// The report of how the request's messages were merged.
    spliced: ReconcileReport,
    /// The streamed events, recorded for a replay under the same idempotency key (D-047).
    streamed: Option<StreamedText>,
    /// The creation time in the response body, fixed at first use so that the body is the same each
    /// time.
    answered_at: OnceLock<Timestamp>,
}

/// Recorded stream events and their total size in bytes.
#[derive(Default)]
struct StreamedText {
    heard: Vec<RunEvent>,
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
        turn: OpenRun,
        hands: Executors<'a>,
        options: RawObject,
        stream: bool,
        listener: Option<mpsc::Sender<RunEvent>>,
    ) -> (Self, TurnGuard) {
        let OpenRun {
            tenure,
            who,
            pass,
            remember,
            asked,
            assistant,
            model,
            overlay,
            session_id,
            run,
            messages,
            started_at,
            claimed_at,
            recalled,
            asking,
            spliced,
            ..
        } = turn;
        let policy = tenure.policy(&who.tenant, assistant.as_ref().map(|a| a.name.as_str())).runs;
        let until = AtomicI64::new(tenure.claim(claimed_at).until.as_microsecond());
        let held = Arc::new(LeaseState { until, ends: AtomicBool::new(false) });
        let client_tools = options.get("tools").is_some_and(|t| t.trim() != "null" && t.trim() != "[]");
        let remember_stream = remember && listener.is_some();
        let work = Self {
            tenure,
            who,
            session_id,
            run,
            asked,
            remember,
            assistant,
            model,
            overlay,
            policy,
            started_at,
            hands,
            tools: Arc::default(),
            options,
            client_tools,
            stream,
            listener,
            goes_on: messages.is_empty(),
            first: (!messages.is_empty()).then_some(messages),
            asking,
            answer: ModelAnswer::default(),
            kept: true,
            rounds: 0,
            tokens: 0,
            usage: Value::Null,
            usage_chunk: None,
            calls: Vec::new(),
            hits: HashMap::new(),
            seq: 0,
            waiting: false,
            held,
            recall: recalled.as_ref().map(|r| r.event.clone()),
            recalled,
            spliced,
            streamed: remember_stream.then(StreamedText::default),
            answered_at: OnceLock::new(),
        };
        (work, pass)
    }

    fn time_left(&self) -> Duration {
        let spent = self.tenure.now().duration_since(self.started_at);
        self.policy
            .max_time
            .saturating_sub(Duration::try_from(spent).unwrap_or_default())
            .min(Duration::from_secs(u32::MAX.into()))
    }

    async fn go(&mut self) -> Result<(), TurnError> {
        if let Some(assistant) = &self.assistant {
            let mut tools = match self.hands.tools {
                Some(tools) => tools.list(assistant).await.map_err(TurnError::Tools)?,
                None => Vec::new(),
            };
            if let Some(memory) = self.tenure.memory_tool(&self.who, assistant) {
                tools.retain(|t| t.name != memory.name);
                tools.push(memory);
            }
            self.tools = tools.into();
            self.offer();
        }
        let mut step = match self.first {
            Some(_) => NextStep::Model,
            None => {
                let mut pauses = Backoff::new();
                while pauses.unless_away(self.recall().await).await.transpose()?.is_none() {}
                self.keep(Vec::new(), true).await?
            }
        };
        loop {
            step = match step {
                NextStep::Model => self.ask().await?,
                NextStep::Tools(jobs) => self.call(jobs).await?,
                NextStep::Review(_) | NextStep::Wait => {
                    self.waiting = true;
                    return Ok(());
                }
                NextStep::Done => {
                    self.tell_usage().await;
                    return Ok(());
                }
            };
        }
    }

    /// Restores the round and token counters of a resumed run from its log.
    async fn recall(&mut self) -> Result<()> {
        let (tenure, id, run) = (&self.tenure, &self.session_id, &self.run);
        let spent = tenure.engine.read(&self.who, id, Depth::Run, |state| {
            let session = tenure.engine.run_ref(state, id)?;
            let own = session.messages.iter().rev().take_while(|m| m.run.as_ref() == Some(run));
            let rounds = own.filter(|m| m.message.role() == Role::Assistant).count();
            let last = session.checkpoints.iter().rev().find(|c| c.run.as_ref() == Some(run));
            let called = session.run(run).and_then(|r| r.tools_started.last()).map_or(0, |s| s.tokens);
            Ok((rounds, last.map_or(0, |c| spent(&c.state)).max(called)))
        });
        (self.rounds, self.tokens) = spent.await?;
        if self.tokens > 0 {
            // Only the total was persisted, not the breakdown.
            self.usage = json!({"total_tokens": self.tokens});
        }
        Ok(())
    }

    /// Adds the assistant's tool definitions to the request, after the client's. A client tool with
    /// the same name is dropped.
    fn offer(&mut self) {
        if self.tools.is_empty() {
            return;
        }
        let brought = self.options.get("tools").and_then(|t| serde_json::from_str::<Vec<Value>>(t).ok());
        let ours = |v: &Value| self.tools.iter().any(|t| v["function"]["name"] == t.name.as_str());
        let mut all: Vec<Value> = brought.unwrap_or_default().into_iter().filter(|v| !ours(v)).collect();
        all.extend(self.tools.iter().map(|t| {
            let function = json!({"name": t.name, "description": t.description, "parameters": t.parameters});
            json!({"type": "function", "function": function})
        }));
        self.options.set("tools", all);
    }

    /// Executes one model round: calls the model and commits its answer together with the entries
    /// of the next step. Fails if `max_rounds` or `max_tokens` is exhausted.
    async fn ask(&mut self) -> Result<NextStep, TurnError> {
        if self.rounds >= self.policy.max_rounds {
            let max = self.policy.max_rounds;
            return Err(limit(
                "too_many_rounds",
                format!("the model was asked {max} times, the `max_rounds` of this assistant"),
            ));
        }
        if let Some(max) = self.policy.max_tokens.filter(|max| self.tokens >= *max) {
            return Err(limit("out_of_tokens", format!("the run has used its `max_tokens` of {max}")));
        }
        self.rounds += 1;
        let messages = match self.first.take() {
            Some(messages) => messages,
            None => {
                let mut pauses = Backoff::new();
                loop {
                    if let Some(messages) = pauses.unless_away(self.shown().await).await {
                        break messages?;
                    }
                }
            }
        };
        (self.answer, self.kept) = (ModelAnswer::limited(self.tenure.limits().max_message_bytes), false);
        let prompt = Prompt { messages, options: self.options.clone(), stream: self.stream };
        self.listen(prompt).await?;
        let Some(message) = self.answer.message() else {
            return Err(ModelError::Broken { why: "it ended before anything was said".into() }.into());
        };
        let used = self.answer.usage.as_ref().and_then(|u| u["total_tokens"].as_u64());
        self.tokens = self.tokens.saturating_add(used.unwrap_or(0));
        self.add_usage();
        self.look_up(&message).await?;
        let step = self.keep(vec![message], true).await?;
        self.kept = true;
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
    async fn tell_usage(&mut self) {
        if let Some(last) = self.usage_piece() {
            self.usage_chunk = None;
            self.tell(last).await;
        }
    }

    fn usage_piece(&self) -> Option<RunEvent> {
        let mut chunk = self.usage_chunk.clone()?;
        chunk["usage"] = self.usage.clone();
        Some(RunEvent::Piece(ModelChunk::Chunk(chunk.to_string())))
    }

    /// Builds the prompt of a later round from the run's last commit (D-055), without checking the
    /// store for newer records.
    async fn shown(&mut self) -> Result<Vec<Message>> {
        let (tenure, id) = (&self.tenure, &self.session_id);
        let said = tenure.engine.read_known(&self.who, id, Depth::Run, |state| {
            let session = tenure.engine.run_ref(state, id)?;
            let window = tenure.policy(&session.tenant, session.assistant.as_deref()).window;
            Ok(shown_with(session.messages.iter(), &session.reviews, &session.summaries, &window, &self.overlay))
        });
        let said = said.await?;
        if self.recalled.is_none() && self.goes_on {
            // The run was started by another node, which injected its recalled memories. Recall
            // them again.
            let name = self.assistant.as_ref().map(|a| a.name.as_str());
            self.recalled = tenure.recollect(&self.who, id, name, &said).await;
        }
        let messages = tenure.prompt(&self.who.tenant, self.assistant.as_deref(), said).await?;
        Ok(with_block(messages, self.recalled.as_ref().map(|r| &r.block)))
    }

    async fn listen(&mut self, prompt: Prompt) -> Result<(), TurnError> {
        let mut sift = ToolCallFilter::new(self.tools.clone());
        let mut pieces = match self.asking.take() {
            Some(asking) => asking.said().await?,
            None => self.hands.model.ask(prompt).await?,
        };
        while let Some(piece) = std::future::poll_fn(|cx| pieces.as_mut().poll_next(cx)).await {
            let piece = piece?;
            self.answer.take(&piece)?;
            // Record for a replay even without a listener: a disconnected client gets the stream
            // when it retries.
            if (self.listener.is_some() || self.streamed.is_some())
                && let Some(piece) = sift.pass(piece)
            {
                self.tell(RunEvent::Piece(piece)).await;
            }
        }
        self.usage_chunk = sift.usage().or(self.usage_chunk.take());
        Ok(())
    }

    async fn tell(&mut self, heard: RunEvent) {
        self.record(&heard);
        let stall = self.tenure.limits().max_stall;
        if let Some(to) = &self.listener
            && !matches!(tokio::time::timeout(stall, to.send(heard)).await, Ok(Ok(())))
        {
            self.listener = None;
        }
    }

    /// Records an event for a replay. Recording stops, and is discarded, beyond `MAX_STREAMED`.
    fn record(&mut self, heard: &RunEvent) {
        let Some(streamed) = &mut self.streamed else { return };
        streamed.bytes += match heard {
            RunEvent::Piece(ModelChunk::Chunk(text) | ModelChunk::Whole(text)) => text.len(),
            RunEvent::Tool(progress) => progress.arguments.len() + progress.content.as_ref().map_or(0, String::len),
        };
        match streamed.bytes > MAX_STREAMED {
            true => self.streamed = None,
            false => streamed.heard.push(heard.clone()),
        }
    }

    /// The answer as one `chat.completion`, identical each time it is serialized.
    fn body(&self) -> String {
        self.answer.body(self.run.as_str(), *self.answered_at.get_or_init(|| self.tenure.now()))
    }

    /// Commits messages together with the entries that follow from them: tool call starts, review
    /// requests, or the end of the run. `last` is true if no other call of this round is in flight.
    /// Returns [`Error::Superseded`] if this node no longer holds the run.
    async fn keep(&mut self, said: Vec<Message>, last: bool) -> Result<NextStep> {
        let (tenure, id, run) = (&self.tenure, &self.session_id, &self.run);
        let done = tenure.write_insisting(&self.who, id, Depth::Run, |state, now| {
            let session = tenure.engine.run_ref(state, id)?;
            let Some(this) = self.mine(session) else { return Ok(self.yielded(session)) };
            let post = |m: &Message| Entry::Message(MessageEntry::by(run, m.clone()));
            let mut log = EntryBuilder { session, entries: Vec::new(), steps: steps(session, this) };
            let results = said.iter().any(|m| m.tool_call_id().is_some());
            for message in &said {
                log.entries.push(post(message));
                if results && self.policy.checkpoints == CheckpointPolicy::Tool {
                    log.checkpoint(run, self.state());
                }
            }
            let rules = RunRules { tools: &self.tools, review: &self.policy.review, client_tools: self.client_tools };
            let step = if last { next_after(session, &said, &rules) } else { NextStep::Wait };
            if last && results && self.policy.checkpoints == CheckpointPolicy::Step {
                log.checkpoint(run, self.state());
            }
            if last && let CheckpointPolicy::Every(time) = self.policy.checkpoints {
                let since = session.checkpoints.last().map_or(this.started_at, |c| c.created_at).max(this.started_at);
                if Duration::try_from(now.duration_since(since)).is_ok_and(|age| age >= time) {
                    log.checkpoint(run, self.state());
                }
            }
            let mut items: Vec<_> = self.recall.iter().map(|event| (RECALLS.to_owned(), event.clone())).collect();
            match &step {
                NextStep::Tools(jobs) => log.entries.extend(jobs.iter().filter_map(|job| self.started(job))),
                NextStep::Review(questions) => {
                    log.checkpoint(run, self.state());
                    for question in questions {
                        let seq = log.next_seq();
                        log.entries.push(Entry::review_opened(self.question(question, seq, now)));
                    }
                    let reason = Some("waiting for a person".to_owned());
                    log.entries.push(Entry::Status { to: Status::Paused, reason });
                }
                NextStep::Done if last => {
                    let turn = (self.policy.checkpoints != CheckpointPolicy::Manual)
                        .then(|| crate::rules::checkpoint::automatic(session, &said, Some(run)));
                    log.entries.extend(turn.flatten());
                    log.entries.extend(self.new_model(session));
                    log.entries.push(ended(run, RunOutcome::Completed, None, None));
                    items.extend(self.answer_item());
                }
                _ => {}
            }
            self.held.ends.store(matches!(step, NextStep::Done | NextStep::Review(_)), Ordering::Relaxed);
            let seq = log.next_seq() - 1;
            let mut draft = PendingCommit::new(log.entries, Some((seq, step)));
            draft.items = items;
            Ok(draft)
        });
        match done.await {
            Ok(Some((seq, step))) => {
                (self.seq, self.recall) = (seq, None);
                Ok(step)
            }
            Ok(None) | Err(Error::NotFound { .. }) => Err(Error::Superseded { session_id: id.clone() }),
            Err(e) => Err(e),
        }
    }

    /// Returns the run if this node still holds its lease, the run is open, and the message it
    /// answers has not been discarded.
    fn mine<'s>(&self, session: &'s Session) -> Option<&'s Run> {
        let asked = self.asked == 0 || session.has(self.asked);
        let ours = asked && session.status.is_live() && self.tenure.holds(session.head(), &self.run);
        session.run(&self.run).filter(|run| ours && run.ended.is_none())
    }

    /// Returns true if another node has cancelled the run and no message was added since. The
    /// partial answer can then still be stored.
    fn was_cancelled_elsewhere(&self, session: &Session) -> bool {
        let cancelled = |run: &Run| run.code.as_deref() == Some(CANCELLED) && run.ended.is_some();
        let last = session.runs.last().is_some_and(|run| run.id == self.run && cancelled(run));
        let ours = |m: &StoredMessage| !m.partial && (m.run.as_ref() == Some(&self.run) || m.seq == self.asked);
        last && session.status.is_live() && session.messages.last().is_some_and(ours)
    }

    /// The commit for a run that was superseded: ends the run, unless it has ended or is held by
    /// another node.
    fn yielded<R>(&self, session: &Session) -> PendingCommit<Option<R>> {
        let open = session.status.is_live() && self.tenure.holds(session.head(), &self.run);
        let why = "the session was rewound, replaced or ended meanwhile".to_owned();
        let entry = ended(&self.run, RunOutcome::Cancelled, Some(why), Some("superseded"));
        PendingCommit::new(if open { vec![entry] } else { Vec::new() }, None)
    }

    /// The entry that stores the answering model as the session's model, if it has changed.
    fn new_model(&self, session: &Session) -> Option<Entry> {
        let model = self.model.as_ref().filter(|m| Some(*m) != session.info.model.as_ref())?;
        Some(Entry::info(SessionPatch { model: Patch::Set(model.clone()), ..SessionPatch::default() }))
    }

    /// The item that stores the response for a replay under the same idempotency key.
    fn answer_item(&self) -> Option<(String, Item)> {
        (self.remember && self.answer.message().is_some()).then(|| {
            let mut stream = self.streamed.as_ref().map(|s| s.heard.clone()).unwrap_or_default();
            if !stream.is_empty() {
                // The usage event is sent only after this commit.
                stream.extend(self.usage_piece());
            }
            let (spliced, calls) = (self.spliced.clone(), self.calls.clone());
            let replay = StoredAnswer { body: self.body(), spliced, calls, stream };
            let value = serde_json::to_string(&replay).expect("replays are plain data");
            (ANSWERS.to_owned(), self.tenure.item(self.run.as_str(), value))
        })
    }

    fn state(&self) -> Map<String, Value> {
        match self.tokens {
            0 => Map::new(),
            tokens => Map::from_iter([(TOKENS.to_owned(), json!(tokens))]),
        }
    }

    fn started(&self, job: &PendingCall) -> Option<Entry> {
        if matches!(job.doing, CallAction::Say(_)) {
            return None;
        }
        let mut detail = self.state();
        if self.hits.contains_key(&job.call.id) {
            detail.insert(CACHED.to_owned(), json!(true));
        }
        let (call, tool) = (job.call.id.clone(), job.call.name.clone());
        Some(Entry::ToolStarted { run: self.run.clone(), call, tool, detail })
    }

    fn question(&self, question: &ReviewRequest, seq: Seq, now: Timestamp) -> ReviewOpened {
        let rule = question.rule.and_then(|i| self.policy.review.get(i));
        let wait = rule.and_then(|r| r.timeout?.duration()).and_then(|d| SignedDuration::try_from(d).ok());
        let at = wait.and_then(|wait| now.checked_add(wait).ok());
        ReviewOpened {
            review: ReviewId::of(&self.session_id, seq),
            step: question.call.name.clone(),
            run: Some(self.run.clone()),
            call: Some(question.call.id.clone()),
            queue: rule.and_then(|r| r.queue.clone()),
            lost: question.lost,
            // A lost call has no review timeout: whether it had side effects must not be decided by
            // a timer.
            timeout: rule
                .filter(|_| !question.lost)
                .and_then(|r| Some(ReviewTimeout { at: at?, decision: r.on_timeout })),
            detail: Map::from_iter([("arguments".to_owned(), question.arguments.clone())]),
        }
    }

    /// Ends the run as failed or cancelled, and persists the partial answer (D-048).
    async fn give_up(&mut self, why: &TurnError) -> Result<()> {
        let said: Vec<Message> = if self.kept { Vec::new() } else { self.answer.message().into_iter().collect() };
        let stopped = matches!(why, TurnError::Stopped | TurnError::Cancelled);
        let outcome = if stopped { RunOutcome::Cancelled } else { RunOutcome::Failed };
        let (tenure, id, run) = (&self.tenure, &self.session_id, &self.run);
        let done = tenure.write(&self.who, id, Depth::Run, |state, _| {
            let session = tenure.engine.run_ref(state, id)?;
            let post = |m: &Message| Entry::Message(MessageEntry { partial: true, ..MessageEntry::by(run, m.clone()) });
            // The answer may have been committed at the moment the run was stopped: do not store it
            // twice.
            let last = session.messages.last().filter(|m| m.run.as_ref() == Some(run));
            let new = said.iter().filter(|m| last.is_none_or(|last| last.message != **m));
            let mut entries: Vec<Entry> = new.map(post).collect();
            if self.was_cancelled_elsewhere(session) {
                return Ok(PendingCommit::new(entries, None));
            }
            if self.mine(session).is_none() {
                return Ok(self.yielded::<()>(session));
            }
            entries.push(ended(run, outcome, Some(why.to_string()), Some(why.code())));
            Ok(PendingCommit::new(entries, None))
        });
        match done.await {
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
        let label = format!("turn-{}.{}", self.session.mark.turns.max(1), self.steps);
        if let Ok(label) = CheckpointLabel::new(label) {
            let (auto, run, step) = (true, Some(run.clone()), Some(self.steps));
            self.entries.push(Entry::Checkpoint(CheckpointEntry { label, auto, run, step, state }));
        }
    }
}

/// The step number of the run's latest checkpoint, 0 if it has none. Checkpoints of other origin
/// are skipped.
fn steps(session: &Session, run: &Run) -> u64 {
    let since = session.checkpoints.iter().rev().take_while(|c| c.seq > run.seq);
    since.filter(|c| c.run.as_ref() == Some(&run.id)).find_map(|c| c.step).unwrap_or(0)
}
