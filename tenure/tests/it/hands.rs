//! Test doubles: a scripted model, tools that count their executions, and a store that fails on
//! request.

use crate::places::*;
use async_trait::async_trait;
use jiff::Timestamp;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;
use tenure::store::*;
use tenure::{log::*, maintenance::*, memory::*, policy::*, review::*, rules::*, run::*, session::*, *};
use tokio::sync::{Semaphore, broadcast};

/// A model whose n-th answer in a turn is the n-th of its script. The index is derived from the
/// prompt alone, so that another node's model gives the same answers.
#[derive(Debug, Default)]
pub struct Script {
    answers: Vec<Value>,
    /// The prompts it received.
    pub prompts: Mutex<Vec<Vec<Message>>>,
    /// If set, each answer needs a permit.
    pub held: Option<Arc<Semaphore>>,
}

impl Script {
    pub fn new(answers: impl IntoIterator<Item = Value>) -> Self {
        Self { answers: answers.into_iter().collect(), ..Self::default() }
    }

    pub fn held(answers: impl IntoIterator<Item = Value>, by: &Arc<Semaphore>) -> Self {
        Self { held: Some(by.clone()), ..Self::new(answers) }
    }

    pub fn asked(&self) -> usize {
        self.prompts.lock().unwrap().len()
    }

    /// The texts of the last prompt, including the question.
    pub fn shown(&self) -> Vec<String> {
        self.prompts.lock().unwrap().last().map(|p| p.iter().map(Message::text).collect()).unwrap_or_default()
    }
}

/// An answer with text.
pub fn say(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

/// An answer with tool calls: id, tool, arguments.
pub fn calls(calls: &[(&str, &str, Value)]) -> Value {
    let call = |(id, tool, arguments): &(&str, &str, Value)| {
        let arguments = arguments.as_str().map_or_else(|| arguments.to_string(), str::to_owned);
        json!({"id": id, "type": "function", "function": {"name": tool, "arguments": arguments}})
    };
    let calls: Vec<Value> = calls.iter().map(call).collect();
    json!({"role": "assistant", "content": null, "tool_calls": calls})
}

struct Spoken(VecDeque<ModelChunk>);

impl futures_core::Stream for Spoken {
    type Item = Result<ModelChunk, ModelError>;
    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.0.pop_front().map(Ok))
    }
}

#[async_trait]
impl Model for Script {
    async fn ask(&self, prompt: Prompt) -> Result<ModelStream, ModelError> {
        let since = prompt.messages.iter().rposition(|m| m.role() == Role::User).unwrap_or(0);
        let round = prompt.messages[since..].iter().filter(|m| m.role() == Role::Assistant).count();
        self.prompts.lock().unwrap().push(prompt.messages);
        if let Some(held) = &self.held {
            held.acquire().await.unwrap().forget();
        }
        let message = self.answers.get(round).cloned().unwrap_or_else(|| say("There is nothing more in my script."));
        let body = json!({
            "id": "x", "object": "chat.completion", "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": {"total_tokens": 10},
        });
        Ok(Box::pin(Spoken([ModelChunk::Complete(body.to_string())].into())))
    }
}

/// The behaviour of a tool.
#[derive(Clone)]
pub enum Does {
    /// Succeeds.
    Says(&'static str),
    /// Reports a failure.
    Fails(&'static str),
    /// Executes the call, but the result is lost.
    LosesAnswer,
    /// Cannot be called.
    IsAway,
    /// Executes the call once a permit is available.
    Waits(Arc<Semaphore>),
    /// Executes the call and never returns.
    Hangs,
}

/// Tools that record their calls.
#[derive(Default)]
pub struct Workshop {
    tools: Vec<(Tool, Does)>,
    /// The executed calls, in order: call id, tool and arguments.
    done: Mutex<Vec<(String, String, Value)>>,
    now: AtomicUsize,
    /// Maximum number of concurrent calls.
    pub most: AtomicUsize,
}

pub fn tool(name: &str) -> Tool {
    Tool { name: name.to_owned(), description: format!("does {name}"), parameters: json!({}), ..Tool::default() }
}

pub fn read_only(name: &str) -> Tool {
    Tool { read_only: true, ..tool(name) }
}

impl Workshop {
    pub fn new(tools: impl IntoIterator<Item = (Tool, Does)>) -> Self {
        Self { tools: tools.into_iter().collect(), ..Self::default() }
    }

    /// The arguments of the executed calls of a tool, in order.
    pub fn done(&self, tool: &str) -> Vec<Value> {
        let done = self.done.lock().unwrap();
        done.iter().filter(|(_, t, _)| t == tool).map(|(_, _, arguments)| arguments.clone()).collect()
    }

    /// The number of executions per tool and arguments.
    pub fn counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for (_, tool, arguments) in self.done.lock().unwrap().iter() {
            *counts.entry(format!("{tool} {arguments}")).or_default() += 1;
        }
        counts
    }

    fn note(&self, call: &ToolInvocation) {
        let arguments = Value::Object(call.arguments.clone());
        self.done.lock().unwrap().push((call.id.clone(), call.tool.clone(), arguments));
    }
}

/// Counts calls in flight; decrements on drop, so that cancelled calls are covered.
struct AtWork<'a>(&'a AtomicUsize);

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

#[async_trait]
impl Tools for Workshop {
    async fn list(&self, _: &ToolContext<'_>) -> Result<Vec<Tool>, ToolError> {
        Ok(self.tools.iter().map(|(tool, _)| tool.clone()).collect())
    }

    async fn call(&self, _: &ToolContext<'_>, call: &ToolInvocation) -> Result<ToolOutput, ToolError> {
        self.most.fetch_max(self.now.fetch_add(1, SeqCst) + 1, SeqCst);
        let _working = AtWork(&self.now);
        let does = self.tools.iter().find(|(tool, _)| tool.name == call.tool).map(|(_, does)| does.clone());
        // Let other calls start.
        tokio::task::yield_now().await;
        let output = |content: &str, failed| Ok(ToolOutput { content: content.to_owned(), failed });
        let answer = match does.unwrap() {
            Does::IsAway => return Err(ToolError::NotCalled("nobody is there".to_owned())),
            Does::Waits(permit) => {
                permit.acquire().await.unwrap().forget();
                self.note(call);
                return output(&format!("{} is done", call.tool), false);
            }
            Does::Says(text) => output(text, false),
            Does::Fails(text) => output(text, true),
            Does::LosesAnswer => Err(ToolError::Lost("the line broke".to_owned())),
            Does::Hangs => {
                self.note(call);
                return std::future::pending().await;
            }
        };
        self.note(call);
        tokio::task::yield_now().await;
        answer
    }

    async fn end(&self, _: &SessionKey) {}
}

/// When a store fails, relative to the commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// The commit is not persisted.
    Before,
    /// The commit is persisted but not acknowledged.
    After,
}

/// A store that counts commits and fails at one of them. From then on every operation fails:
/// permanently, as in a killed process, or until `come_back` is called, as in a database outage.
#[derive(Debug)]
pub struct Fragile {
    inner: Arc<dyn Store>,
    dies: Option<(usize, When)>,
    commits: AtomicUsize,
    /// Number of records read.
    pub read: AtomicUsize,
    dead: AtomicBool,
    comes_back: bool,
    /// If set, each commit needs a permit.
    pub held: Option<Arc<Semaphore>>,
}

impl Fragile {
    pub fn new(inner: &Arc<dyn Store>, dies: Option<(usize, When)>) -> Arc<Self> {
        Arc::new(Self::on(inner, dies, None))
    }

    pub fn held(inner: &Arc<dyn Store>, by: &Arc<Semaphore>) -> Arc<Self> {
        Arc::new(Self::on(inner, None, Some(by.clone())))
    }

    /// A store that is unavailable from the given commit on, until `come_back` is called.
    pub fn away_at(inner: &Arc<dyn Store>, commit: usize, when: When) -> Arc<Self> {
        Arc::new(Self { comes_back: true, ..Self::on(inner, Some((commit, when)), None) })
    }

    pub fn come_back(&self) {
        self.dead.store(false, SeqCst);
    }

    fn error(&self) -> Error {
        match self.comes_back {
            true => Error::unavailable("it is away"),
            false => Error::Full { location: "a store that is dead".to_owned() },
        }
    }

    fn on(inner: &Arc<dyn Store>, dies: Option<(usize, When)>, held: Option<Arc<Semaphore>>) -> Self {
        let (commits, read, dead) = Default::default();
        Self { inner: inner.clone(), dies, commits, read, dead, comes_back: false, held }
    }

    /// Number of commits, including lease renewals.
    pub fn commits(&self) -> usize {
        self.commits.load(SeqCst)
    }

    pub fn is_dead(&self) -> bool {
        self.dead.load(SeqCst)
    }

    pub fn die(&self) {
        self.dead.store(true, SeqCst);
    }

    fn alive(&self) -> Result<&dyn Store> {
        if self.is_dead() { Err(self.error()) } else { Ok(&*self.inner) }
    }
}

#[async_trait]
impl Store for Fragile {
    async fn commit(&self, commit: &Commit) -> Result<()> {
        let inner = self.alive()?;
        let n = self.commits.fetch_add(1, SeqCst);
        if let Some(held) = &self.held {
            held.acquire().await.unwrap().forget();
        }
        match self.dies.filter(|(at, _)| *at == n) {
            None => inner.commit(commit).await,
            Some((_, when)) => {
                self.die();
                if when == When::After {
                    inner.commit(commit).await?;
                }
                Err(self.error())
            }
        }
    }
    async fn head(&self, key: &SessionKey) -> Result<Option<Head>> {
        self.alive()?.head(key).await
    }
    fn head_if_changed(&self, key: &SessionKey, known: &str) -> Option<Result<HeadCheck>> {
        match self.alive() {
            Ok(store) => store.head_if_changed(key, known),
            Err(e) => Some(Err(e)),
        }
    }
    fn notify(&self, key: &SessionKey) {
        self.inner.notify(key);
    }
    fn subscribe(&self) -> Option<broadcast::Receiver<Option<SessionKey>>> {
        self.inner.subscribe()
    }
    fn concurrency(&self) -> Concurrency {
        self.inner.concurrency()
    }
    async fn heads(&self, query: &SessionQuery) -> Result<Vec<Head>> {
        self.alive()?.heads(query).await
    }
    async fn page(&self, query: &SessionQuery, max_scan: usize) -> Result<HeadPage> {
        self.alive()?.page(query, max_scan).await
    }
    async fn count(&self) -> Result<Vec<(Status, u64)>> {
        self.alive()?.count().await
    }
    async fn records(&self, key: &SessionKey, range: &RecordRange) -> Result<Vec<Record>> {
        let records = self.alive()?.records(key, range).await?;
        self.read.fetch_add(records.len(), SeqCst);
        Ok(records)
    }
    async fn purge(&self, key: &SessionKey) -> Result<()> {
        self.alive()?.purge(key).await
    }
    async fn purge_at(&self, key: &SessionKey, created_at: Timestamp, seq: Seq) -> Result<()> {
        let inner = self.alive()?;
        let n = self.commits.fetch_add(1, SeqCst);
        match self.dies.filter(|(at, _)| *at == n) {
            None => inner.purge_at(key, created_at, seq).await,
            Some((_, when)) => {
                self.die();
                if when == When::After {
                    inner.purge_at(key, created_at, seq).await?;
                }
                Err(self.error())
            }
        }
    }
    async fn put(&self, shelf: &Namespace, item: &Item, keep: Option<usize>) -> Result<()> {
        self.alive()?.put(shelf, item, keep).await
    }
    async fn get(&self, shelf: &Namespace, key: &str, used: Option<Timestamp>) -> Result<Option<Item>> {
        self.alive()?.get(shelf, key, used).await
    }
    async fn items(&self, shelf: &Namespace, after: Option<&str>, limit: usize) -> Result<Vec<Item>> {
        self.alive()?.items(shelf, after, limit).await
    }
    async fn remove(&self, shelf: &Namespace, key: &str) -> Result<bool> {
        self.alive()?.remove(shelf, key).await
    }
    async fn search(&self, shelf: &Namespace, text: &str, limit: usize) -> Result<Vec<Hit>> {
        self.alive()?.search(shelf, text, limit).await
    }
    async fn expire(&self, now: Timestamp, limit: usize) -> Result<usize> {
        self.alive()?.expire(now, limit).await
    }
    async fn delete_owner(&self, tenant: &Tenant, owner: &Owner) -> Result<()> {
        self.alive()?.delete_owner(tenant, owner).await
    }
    async fn scrub(&self, tenant: &Tenant, owner: &Owner) -> Result<()> {
        self.alive()?.scrub(tenant, owner).await
    }
    async fn blob(&self, tenant: &Tenant, id: &BlobId) -> Result<Option<Arc<[u8]>>> {
        self.alive()?.blob(tenant, id).await
    }
    async fn check(&self, remove: &[Orphan]) -> Result<Vec<Finding>> {
        self.alive()?.check(remove).await
    }
}

/// The assistant of these tests, with a modified configuration.
pub fn clerk(change: impl FnOnce(&mut Assistant)) -> Assistant {
    let mut clerk = Assistant { name: "clerk".to_owned(), ..Assistant::default() };
    change(&mut clerk);
    clerk
}

pub fn reviewed(tool: &str) -> ReviewRule {
    ReviewRule { tool: tool.to_owned(), queue: None, timeout: None, on_timeout: Decision::Rejected }
}

/// The parameters of a run that can be taken over.
pub fn lasting() -> Option<Resumable> {
    Some(Resumable::new("m"))
}

/// A question to the clerk in session `x`.
pub fn question(text: &str) -> TurnRequest {
    TurnRequest {
        session: Some(id("x")),
        messages: vec![Message::user(text)],
        history: Some(HistoryMode::Append),
        assistant: Some("clerk".to_owned()),
        resumable: lasting(),
        ..TurnRequest::default()
    }
}

pub async fn begin(tenure: &Tenure, ask: TurnRequest) -> Result<Box<OpenRun>> {
    match tenure.begin_turn(&ada(), ask).await? {
        TurnStart::Run(turn) => Ok(turn),
        TurnStart::AlreadyAnswered { .. } => panic!("the request was already answered"),
    }
}

/// Executes a turn to its end.
pub async fn work(turn: OpenRun, model: &Script, tools: &Workshop) -> Result<TurnOutcome, TurnError> {
    turn.execute(Executors::new(model).tools(tools)).await
}

/// Begins a turn and executes it to its end.
pub async fn turn_of(
    tenure: &Tenure,
    ask: TurnRequest,
    model: &Script,
    tools: &Workshop,
) -> Result<TurnOutcome, TurnError> {
    let turn = begin(tenure, ask).await?;
    work(*turn, model, tools).await
}

/// Takes over all orphaned runs and executes them.
pub async fn take_over(tenure: &Tenure, model: &Script, tools: &Workshop) -> Vec<Result<TurnOutcome, TurnError>> {
    let mut done = Vec::new();
    for head in tenure.find_orphaned_runs(16).await.unwrap() {
        if let Some(turn) = tenure.claim_orphaned_run(&head).await.unwrap() {
            done.push(work(turn, model, tools).await);
        }
    }
    done
}

pub async fn x(tenure: &Tenure) -> Session {
    tenure.load(&ada(), &id("x")).await.unwrap()
}

/// Roles and texts of a session's messages.
pub fn talk(session: &Session) -> Vec<String> {
    let text = |m: &StoredMessage| match m.message.tool_calls() {
        calls if calls.is_empty() => format!("{}: {}", role(&m.message), m.message.text()),
        calls => format!("calls: {}", calls.iter().map(|c| c.id.as_str()).collect::<Vec<_>>().join(" ")),
    };
    session.messages.iter().map(text).collect()
}

fn role(message: &Message) -> String {
    message.to_value()["role"].as_str().unwrap().to_owned()
}

/// Outcome and code of the session's last run.
pub fn ending(session: &Session) -> (Option<RunOutcome>, Option<String>) {
    let run = session.runs.last().unwrap();
    (run.ended.map(|(_, outcome)| outcome), run.code.clone())
}

/// The ids of the open reviews.
pub fn open(session: &Session) -> Vec<ReviewId> {
    session.open_reviews().map(|r| r.opened.review.clone()).collect()
}

pub fn verdict(decision: Decision) -> ReviewInput {
    ReviewInput { decision, reviewer: "eve".to_owned(), notes: None, arguments: None }
}

/// Polls until a condition holds. Panics after two minutes.
pub async fn until(what: &str, mut is: impl AsyncFnMut() -> bool) {
    for _ in 0..24_000 {
        if is().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("timed out waiting until {what}");
}
