//! The loop of a run: ask [`next`](crate::rules::next()), do it, keep it, until there is an answer, a person must decide, or a limit is reached.
//!
//! A round with tools is two commits: the answer with the calls that are about to be made, and their results with a checkpoint. While
//! the store is away the run waits, with what it holds ([`insist`]).

mod calls;
mod insist;

use crate::engine::draft::{Draft, Need};
use crate::engine::turn_lock::{Pass, Stop};
use crate::executors::model::{Beside, Prompt};
use crate::memory::recall::{RECALLS, Recollection, with_block};
use crate::rules::answer::{Answer, add_usage};
use crate::rules::next::{Doing, Job, Question, Rules, Step, next_after};
use crate::rules::overlay::Overlay;
use crate::rules::prompt::shown_with;
use crate::rules::run_entries::{CANCELLED, ended};
use crate::rules::session::{CACHED, Run, Said, Session, TOKENS, spent};
use crate::rules::tool_call_filter::Sift;
use crate::run::begin::Turn;
use crate::run::executors::{Answered, Hands, Heard, Progress, Replay, TurnError};
use crate::run::idempotency::ANSWERS;
use crate::run::lease::Held;
use crate::run::request::Spliced;
use crate::store::item::Item;
use crate::tenure::Tenure;
use crate::types::assistant::Assistant;
use crate::types::entry::{Change, Checkpointed, Entry, InfoChange, Outcome, Post, ReviewOpened, Timeout};
use crate::types::error::{Error, Result};
use crate::types::id::{Label, Principal, ReviewId, RunId, Seq, SessionId};
use crate::types::message::{Message, Role};
use crate::types::model::{ModelError, Piece};
use crate::types::policy::{Checkpoints, RunPolicy};
use crate::types::raw_object::Fields;
use crate::types::status::Status;
use crate::types::tool::Tool;
use insist::Pauses;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::mpsc;

impl Turn {
    /// Does the work and keeps it as it goes. What can be heard is handed on; whoever listens may go away, the run goes on.
    pub async fn run(
        self,
        hands: Hands<'_>,
        options: Fields,
        stream: bool,
        listener: Option<mpsc::Sender<Heard>>,
    ) -> Result<Answered, TurnError> {
        let listened = listener.is_some();
        let (mut work, mut pass) = Work::new(self, hands, options, stream, listener);
        let (tenure, who) = (work.tenure.clone(), work.who.clone());
        let (id, run, time) = (work.session_id.clone(), work.run.clone(), work.time_left());
        let held = work.held.clone();
        let done = tokio::select! {
            done = work.go() => done,
            why = pass.stopped() => Err(match why {
                Stop::Interrupted => TurnError::Stopped,
                Stop::Cancelled => TurnError::Cancelled,
            }),
            lost = tenure.keep_lease(&who, &id, &run, &held) => Err(lost.into()),
            () = tokio::time::sleep(time) => Err(limit("out_of_time", "the run took longer than its `max_time`")),
        };
        match done {
            Ok(()) => Ok(Answered {
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

/// A run at work.
struct Work<'a> {
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
    hands: Hands<'a>,
    tools: Arc<[Tool]>,
    options: Fields,
    client_tools: bool,
    stream: bool,
    listener: Option<mpsc::Sender<Heard>>,
    /// What the model is shown first; nothing: the run was begun before, and goes on.
    first: Option<Vec<Message>>,
    goes_on: bool,
    /// The model, if it is being asked already.
    asking: Beside,
    /// The answer of this round, and whether it is kept.
    answer: Answer,
    kept: bool,
    rounds: usize,
    tokens: u64,
    /// What the model's answers have cost, as far as it is known.
    usage: Value,
    /// The chunk that tells a listener of it.
    usage_chunk: Option<Value>,
    calls: Vec<Progress>,
    /// Results that were in the cache.
    hits: HashMap<String, String>,
    seq: Seq,
    waiting: bool,
    /// What is known of the lease.
    held: Arc<Held>,
    /// What the model is told of what is remembered.
    recalled: Option<Recollection>,
    /// That it was, to be written down.
    recall: Option<Item>,
    /// What was made of the request's messages.
    spliced: Spliced,
    /// What was streamed, for whoever asks the same again.
    streamed: Option<Streamed>,
    /// The time of the response's body.
    answered_at: OnceLock<Timestamp>,
}

/// What was streamed, and how many bytes of it there are.
#[derive(Default)]
struct Streamed {
    heard: Vec<Heard>,
    bytes: usize,
}

/// A stream that is longer is not kept for whoever asks the same again: the answer comes as one chunk then.
const MAX_STREAMED: usize = 4 << 20;

fn limit(code: &'static str, message: impl Into<String>) -> TurnError {
    TurnError::Limit { code, message: message.into() }
}

impl<'a> Work<'a> {
    fn new(
        turn: Turn,
        hands: Hands<'a>,
        options: Fields,
        stream: bool,
        listener: Option<mpsc::Sender<Heard>>,
    ) -> (Self, Pass) {
        let Turn {
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
        let held = Arc::new(Held { until, ends: AtomicBool::new(false) });
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
            answer: Answer::default(),
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
            streamed: remember_stream.then(Streamed::default),
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
            Some(_) => Step::Model,
            None => {
                let mut pauses = Pauses::new();
                while pauses.unless_away(self.recall().await).await.transpose()?.is_none() {}
                self.keep(Vec::new(), true).await?
            }
        };
        loop {
            step = match step {
                Step::Model => self.ask().await?,
                Step::Tools(jobs) => self.call(jobs).await?,
                Step::Review(_) | Step::Wait => {
                    self.waiting = true;
                    return Ok(());
                }
                Step::Done => {
                    self.tell_usage().await;
                    return Ok(());
                }
            };
        }
    }

    /// What a run that goes on has spent already.
    async fn recall(&mut self) -> Result<()> {
        let (tenure, id, run) = (&self.tenure, &self.session_id, &self.run);
        let spent = tenure.engine.read(&self.who, id, Need::Run, |state| {
            let session = tenure.engine.run_ref(state, id)?;
            let own = session.messages.iter().rev().take_while(|m| m.run.as_ref() == Some(run));
            let rounds = own.filter(|m| m.message.role() == Role::Assistant).count();
            let last = session.checkpoints.iter().rev().find(|c| c.run.as_ref() == Some(run));
            let called = session.run(run).and_then(|r| r.tools_started.last()).map_or(0, |s| s.tokens);
            Ok((rounds, last.map_or(0, |c| spent(&c.state)).max(called)))
        });
        (self.rounds, self.tokens) = spent.await?;
        if self.tokens > 0 {
            // Of what was used before, only the total was kept.
            self.usage = json!({"total_tokens": self.tokens});
        }
        Ok(())
    }

    /// Tells the model of the tools, after those that the client brought.
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

    /// Asks the model, and keeps its answer with what follows from it.
    async fn ask(&mut self) -> Result<Step, TurnError> {
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
                let mut pauses = Pauses::new();
                loop {
                    if let Some(messages) = pauses.unless_away(self.shown().await).await {
                        break messages?;
                    }
                }
            }
        };
        (self.answer, self.kept) = (Answer::limited(self.tenure.limits().max_message_bytes), false);
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

    /// Adds what the last answer cost. The answer then has the sum: the last one of a turn is what its client gets.
    fn add_usage(&mut self) {
        let Some(used) = self.answer.usage.clone() else { return };
        let first = self.usage.is_null();
        add_usage(&mut self.usage, &used);
        if !first {
            self.answer.set_usage(self.usage.clone());
        }
    }

    /// Tells the listener what the whole turn cost, if the model's server has told what its answers did.
    async fn tell_usage(&mut self) {
        if let Some(last) = self.usage_piece() {
            self.usage_chunk = None;
            self.tell(last).await;
        }
    }

    fn usage_piece(&self) -> Option<Heard> {
        let mut chunk = self.usage_chunk.clone()?;
        chunk["usage"] = self.usage.clone();
        Some(Heard::Piece(Piece::Chunk(chunk.to_string())))
    }

    /// What the model is shown in a later round.
    async fn shown(&mut self) -> Result<Vec<Message>> {
        let (tenure, id) = (&self.tenure, &self.session_id);
        let said = tenure.engine.read_known(&self.who, id, Need::Run, |state| {
            let session = tenure.engine.run_ref(state, id)?;
            let window = tenure.policy(&session.tenant, session.assistant.as_deref()).window;
            Ok(shown_with(session.messages.iter(), &session.reviews, &session.summaries, &window, &self.overlay))
        });
        let said = said.await?;
        if self.recalled.is_none() && self.goes_on {
            // Another node began it, and told the model what it recalled.
            let name = self.assistant.as_ref().map(|a| a.name.as_str());
            self.recalled = tenure.recollect(&self.who, id, name, &said).await;
        }
        let messages = tenure.prompt(&self.who.tenant, self.assistant.as_deref(), said).await?;
        Ok(with_block(messages, self.recalled.as_ref().map(|r| &r.block)))
    }

    async fn listen(&mut self, prompt: Prompt) -> Result<(), TurnError> {
        let mut sift = Sift::new(self.tools.clone());
        let mut pieces = match self.asking.take() {
            Some(asking) => asking.said().await?,
            None => self.hands.model.ask(prompt).await?,
        };
        while let Some(piece) = std::future::poll_fn(|cx| pieces.as_mut().poll_next(cx)).await {
            let piece = piece?;
            self.answer.take(&piece)?;
            // What a client that has gone away misses is in the response to its next try.
            if (self.listener.is_some() || self.streamed.is_some())
                && let Some(piece) = sift.pass(piece)
            {
                self.tell(Heard::Piece(piece)).await;
            }
        }
        self.usage_chunk = sift.usage().or(self.usage_chunk.take());
        Ok(())
    }

    async fn tell(&mut self, heard: Heard) {
        self.record(&heard);
        let stall = self.tenure.limits().max_stall;
        if let Some(to) = &self.listener
            && !matches!(tokio::time::timeout(stall, to.send(heard)).await, Ok(Ok(())))
        {
            self.listener = None;
        }
    }

    /// Keeps what is streamed for whoever asks the same again.
    fn record(&mut self, heard: &Heard) {
        let Some(streamed) = &mut self.streamed else { return };
        streamed.bytes += match heard {
            Heard::Piece(Piece::Chunk(text) | Piece::Whole(text)) => text.len(),
            Heard::Tool(progress) => progress.arguments.len() + progress.content.as_ref().map_or(0, String::len),
        };
        match streamed.bytes > MAX_STREAMED {
            true => self.streamed = None,
            false => streamed.heard.push(heard.clone()),
        }
    }

    /// The answer as one `chat.completion`, the same each time.
    fn body(&self) -> String {
        self.answer.body(self.run.as_str(), *self.answered_at.get_or_init(|| self.tenure.now()))
    }

    /// Keeps what was said, and what follows from it: calls that are about to be made, questions to a person, or the end.
    /// `last`: nothing else is under way.
    async fn keep(&mut self, said: Vec<Message>, last: bool) -> Result<Step> {
        let (tenure, id, run) = (&self.tenure, &self.session_id, &self.run);
        let done = tenure.write_insisting(&self.who, id, Need::Run, |state, now| {
            let session = tenure.engine.run_ref(state, id)?;
            let Some(this) = self.mine(session) else { return Ok(self.yielded(session)) };
            let post = |m: &Message| Entry::Message(Post::by(run, m.clone()));
            let mut log = Log { session, entries: Vec::new(), steps: steps(session, this) };
            let results = said.iter().any(|m| m.tool_call_id().is_some());
            for message in &said {
                log.entries.push(post(message));
                if results && self.policy.checkpoints == Checkpoints::Tool {
                    log.checkpoint(run, self.state());
                }
            }
            let rules = Rules { tools: &self.tools, review: &self.policy.review, client_tools: self.client_tools };
            let step = if last { next_after(session, &said, &rules) } else { Step::Wait };
            if last && results && self.policy.checkpoints == Checkpoints::Step {
                log.checkpoint(run, self.state());
            }
            if last && let Checkpoints::Every(time) = self.policy.checkpoints {
                let since = session.checkpoints.last().map_or(this.started_at, |c| c.created_at).max(this.started_at);
                if Duration::try_from(now.duration_since(since)).is_ok_and(|age| age >= time) {
                    log.checkpoint(run, self.state());
                }
            }
            let mut items: Vec<_> = self.recall.iter().map(|event| (RECALLS.to_owned(), event.clone())).collect();
            match &step {
                Step::Tools(jobs) => log.entries.extend(jobs.iter().filter_map(|job| self.started(job))),
                Step::Review(questions) => {
                    log.checkpoint(run, self.state());
                    for question in questions {
                        let seq = log.next_seq();
                        log.entries.push(Entry::review_opened(self.question(question, seq, now)));
                    }
                    let reason = Some("waiting for a person".to_owned());
                    log.entries.push(Entry::Status { to: Status::Paused, reason });
                }
                Step::Done if last => {
                    let turn = (self.policy.checkpoints != Checkpoints::Manual)
                        .then(|| crate::rules::checkpoint::automatic(session, &said, Some(run)));
                    log.entries.extend(turn.flatten());
                    log.entries.extend(self.new_model(session));
                    log.entries.push(ended(run, Outcome::Completed, None, None));
                    items.extend(self.answer_item());
                }
                _ => {}
            }
            self.held.ends.store(matches!(step, Step::Done | Step::Review(_)), Ordering::Relaxed);
            let seq = log.next_seq() - 1;
            let mut draft = Draft::new(log.entries, Some((seq, step)));
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

    /// The run, if it is still this node's to work on, and what it answers is still there.
    fn mine<'s>(&self, session: &'s Session) -> Option<&'s Run> {
        let asked = self.asked == 0 || session.has(self.asked);
        let ours = asked && session.status.is_live() && self.tenure.holds(session.head(), &self.run);
        session.run(&self.run).filter(|run| ours && run.ended.is_none())
    }

    /// Whether another node has cancelled the run, and nothing was said since: then what there is of an answer can still be kept.
    fn was_cancelled_elsewhere(&self, session: &Session) -> bool {
        let cancelled = |run: &Run| run.code.as_deref() == Some(CANCELLED) && run.ended.is_some();
        let last = session.runs.last().is_some_and(|run| run.id == self.run && cancelled(run));
        let ours = |m: &Said| !m.partial && (m.run.as_ref() == Some(&self.run) || m.seq == self.asked);
        last && session.status.is_live() && session.messages.last().is_some_and(ours)
    }

    /// What is written when the run is not ours any more: that it ended, if nobody has said so yet.
    fn yielded<R>(&self, session: &Session) -> Draft<Option<R>> {
        let open = session.status.is_live() && self.tenure.holds(session.head(), &self.run);
        let why = "the session was rewound, replaced or ended meanwhile".to_owned();
        let entry = ended(&self.run, Outcome::Cancelled, Some(why), Some("superseded"));
        Draft::new(if open { vec![entry] } else { Vec::new() }, None)
    }

    /// The session goes on with the model that has answered.
    fn new_model(&self, session: &Session) -> Option<Entry> {
        let model = self.model.as_ref().filter(|m| Some(*m) != session.info.model.as_ref())?;
        Some(Entry::info(InfoChange { model: Change::Set(model.clone()), ..InfoChange::default() }))
    }

    /// The answer for whoever asks the same again.
    fn answer_item(&self) -> Option<(String, Item)> {
        (self.remember && self.answer.message().is_some()).then(|| {
            let mut stream = self.streamed.as_ref().map(|s| s.heard.clone()).unwrap_or_default();
            if !stream.is_empty() {
                // It is told when this is stored.
                stream.extend(self.usage_piece());
            }
            let (spliced, calls) = (self.spliced.clone(), self.calls.clone());
            let replay = Replay { body: self.body(), spliced, calls, stream };
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

    fn started(&self, job: &Job) -> Option<Entry> {
        if matches!(job.doing, Doing::Say(_)) {
            return None;
        }
        let mut detail = self.state();
        if self.hits.contains_key(&job.call.id) {
            detail.insert(CACHED.to_owned(), json!(true));
        }
        let (call, tool) = (job.call.id.clone(), job.call.name.clone());
        Some(Entry::ToolStarted { run: self.run.clone(), call, tool, detail })
    }

    fn question(&self, question: &Question, seq: Seq, now: Timestamp) -> ReviewOpened {
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
            // Whether something was done is not for a clock to say.
            timeout: rule.filter(|_| !question.lost).and_then(|r| Some(Timeout { at: at?, decision: r.on_timeout })),
            detail: Map::from_iter([("arguments".to_owned(), question.arguments.clone())]),
        }
    }

    /// Ends the run without a whole answer, and keeps what there is of one.
    async fn give_up(&mut self, why: &TurnError) -> Result<()> {
        let said: Vec<Message> = if self.kept { Vec::new() } else { self.answer.message().into_iter().collect() };
        let stopped = matches!(why, TurnError::Stopped | TurnError::Cancelled);
        let outcome = if stopped { Outcome::Cancelled } else { Outcome::Failed };
        let (tenure, id, run) = (&self.tenure, &self.session_id, &self.run);
        let done = tenure.write(&self.who, id, Need::Run, |state, _| {
            let session = tenure.engine.run_ref(state, id)?;
            let post = |m: &Message| Entry::Message(Post { partial: true, ..Post::by(run, m.clone()) });
            // It may have been stored at the very moment when the run was stopped.
            let last = session.messages.last().filter(|m| m.run.as_ref() == Some(run));
            let new = said.iter().filter(|m| last.is_none_or(|last| last.message != **m));
            let mut entries: Vec<Entry> = new.map(post).collect();
            if self.was_cancelled_elsewhere(session) {
                return Ok(Draft::new(entries, None));
            }
            if self.mine(session).is_none() {
                return Ok(self.yielded::<()>(session));
            }
            entries.push(ended(run, outcome, Some(why.to_string()), Some(why.code())));
            Ok(Draft::new(entries, None))
        });
        match done.await {
            // It has ended in another way.
            Err(Error::Superseded { .. } | Error::NotFound { .. } | Error::Gone { .. } | Error::Paused { .. }) => {
                Ok(())
            }
            other => other.map(drop),
        }
    }
}

/// Entries in the making.
struct Log<'s> {
    session: &'s Session,
    entries: Vec<Entry>,
    steps: u64,
}

impl Log<'_> {
    fn next_seq(&self) -> Seq {
        self.session.seq + self.entries.len() as Seq + 1
    }

    fn checkpoint(&mut self, run: &RunId, state: Map<String, Value>) {
        self.steps += 1;
        let label = format!("turn-{}.{}", self.session.mark.turns.max(1), self.steps);
        if let Ok(label) = Label::new(label) {
            let (auto, run, step) = (true, Some(run.clone()), Some(self.steps));
            self.entries.push(Entry::Checkpoint(Checkpointed { label, auto, run, step, state }));
        }
    }
}

/// How many checkpoints a run has set: the number of its last step. Others may have set some in between.
fn steps(session: &Session, run: &Run) -> u64 {
    let since = session.checkpoints.iter().rev().take_while(|c| c.seq > run.seq);
    since.filter(|c| c.run.as_ref() == Some(&run.id)).find_map(|c| c.step).unwrap_or(0)
}
