//! Runs: the overhead of the execution loop over its commits, resuming in a long session, and
//! sessions that wait for reviews.
//!
//! A round with a tool is two durable commits of two records each: the answer with the start of its
//! call, and the result with a checkpoint. The baseline for the loop is as many sequential appends
//! of our own on the same store, which have the same two fsyncs, checksums and heads. The
//! comparison with raw commits includes the cost of both.

use crate::*;
use async_trait::async_trait;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use std::pin::Pin;
use std::task::{Context, Poll};

/// A model that calls a tool a given number of times, then answers. All answers are precomputed, so
/// that it takes no time.
struct Caller {
    calls: Vec<String>,
    done: String,
}

impl Caller {
    fn new(rounds: usize) -> Self {
        let body = |message: Value| json!({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]});
        let calls = (0..rounds).map(|n| body(turn(n)[1].to_value()).to_string()).collect();
        Self { calls, done: body(json!({"role": "assistant", "content": "done"})).to_string() }
    }
}

struct Once(Option<ModelChunk>);

impl futures_core::Stream for Once {
    type Item = Result<ModelChunk, ModelError>;
    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.0.take().map(Ok))
    }
}

#[async_trait]
impl Model for Caller {
    async fn ask(&self, prompt: Prompt) -> Result<ModelStream, ModelError> {
        let asked = prompt.messages.iter().rposition(|m| m.role() == Role::User).unwrap_or(0);
        let round = prompt.messages[asked..].iter().filter(|m| m.role() == Role::Assistant).count();
        let body = self.calls.get(round).unwrap_or(&self.done).clone();
        Ok(Box::pin(Once(Some(ModelChunk::Whole(body)))))
    }
}

/// A tool with a precomputed result.
struct Shelf(String);

#[async_trait]
impl Tools for Shelf {
    async fn list(&self, _: &Assistant) -> Result<Vec<Tool>, ToolError> {
        Ok(vec![Tool { name: "search".to_owned(), read_only: true, ..Tool::default() }])
    }

    async fn call(&self, _: &Assistant, _: &ToolInvocation) -> Result<ToolOutput, ToolError> {
        Ok(ToolOutput { content: self.0.clone(), failed: false })
    }

    async fn end(&self, _: &SessionKey) {}
}

fn ask(session: &SessionId) -> TurnRequest {
    TurnRequest {
        session: Some(session.clone()),
        messages: vec![turn(0)[0].clone()],
        history: Some(HistoryMode::Append),
        assistant: Some("a".to_owned()),
        detail: serde_json::Map::from_iter([("model".to_owned(), json!("m"))]),
        ..TurnRequest::default()
    }
}

async fn begin(tenure: &Tenure, session: &SessionId) -> OpenRun {
    match tenure.turn(&who(), ask(session)).await.unwrap() {
        TurnStart::Turn(turn) => *turn,
        TurnStart::Before { .. } => unreachable!("there is no key"),
    }
}

async fn work(turn: OpenRun, caller: &Caller, shelf: &Shelf) -> TurnOutcome {
    let hands = Executors { model: caller, tools: Some(shelf) };
    turn.run(hands, RawObject::default(), false, None).await.unwrap()
}

fn house(store: &Tenure, change: impl FnOnce(&mut Assistant, &mut Options)) -> Tenure {
    let (mut assistant, mut options) = (Assistant { name: "a".to_owned(), ..Assistant::default() }, Options::default());
    change(&mut assistant, &mut options);
    let tenure = Tenure::on(store.store().clone(), options);
    tenure.declare(assistant);
    tenure
}

/// A round with a tool compared with two appends of the same messages, and with two raw commits.
pub async fn rounds(report: &mut Report) {
    const ROUNDS: usize = 20;
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("ours.db").display());
    let tenure = house(&Tenure::open(&url).await.unwrap(), |_, _| ());
    let db = raw::open(&dir.path().join("raw.db"));
    let (mut ours, mut appends, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    let (none, all, shelf) = (Caller::new(0), Caller::new(ROUNDS), Shelf(turn(1)[2].text()));
    for n in 0..30 {
        let (run, plainly) = (id(&format!("r{n}")), create(&tenure, &format!("p{n}")).await);
        let short = timed(async { work(begin(&tenure, &run).await, &none, &shelf).await }).await;
        let long = timed(async { work(begin(&tenure, &run).await, &all, &shelf).await }).await;
        ours.push(long.saturating_sub(short) / ROUNDS as u32);
        let (said, short) = (turn(n), Message::assistant("a note of the size of the other records, or nearly so"));
        let pair = async {
            for _ in 0..ROUNDS {
                tenure.append(&who(), &plainly, plain(vec![said[1].clone(), short.clone()])).await.unwrap();
                tenure.append(&who(), &plainly, plain(vec![said[2].clone(), short.clone()])).await.unwrap();
            }
        };
        appends.push(timed(pair).await / ROUNDS as u32);
        let (t, ()) = time(|| {
            for i in 0..ROUNDS {
                raw::commit(&db, n as i64, i * 2, &said[1..2]);
                raw::commit(&db, n as i64, i * 2 + 1, &said[2..3]);
            }
        });
        theirs.push(t / ROUNDS as u32);
    }
    let (ours, appends, theirs) = (median(ours), median(appends), median(theirs));
    let what = "a round of a run with one tool";
    report.row(
        format!("{what}, beside two appends"),
        ms(ours),
        ms(appends),
        ratio(ours, appends),
        Promise::AtMost(1.0),
    );
    report.row(format!("{what}, beside two raw commits"), ms(ours), ms(theirs), ratio(ours, theirs), Promise::None);
}

/// Resuming an orphaned run on a node without cache.
pub async fn resume(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("ours.db").display());
    let store = Tenure::open(&url).await.unwrap();
    let clock = Clock::manual(Timestamp::now());
    let held = |_: &mut Assistant, options: &mut Options| options.clock = clock.clone();
    let first = house(&store, held);
    let mut took = Vec::new();
    for (name, messages) in [("small", 100), ("large", 10_000)] {
        let session = create(&first, name).await;
        fill(&first, &session, messages).await;
        let mut times = Vec::new();
        for _ in 0..30 {
            drop(begin(&first, &session).await);
            let cold = house(&store, held);
            clock.advance(SignedDuration::from_secs(31)); // its lease has expired
            let start = Instant::now();
            let head = cold.abandoned(1).await.unwrap().pop().unwrap();
            work(cold.take_over(&head).await.unwrap().unwrap(), &Caller::new(0), &Shelf(String::new())).await;
            times.push(start.elapsed());
        }
        took.push(median(times));
    }
    report.row(
        "going on with a run in a session of 10,000 messages, cold, beside of 100",
        ms(took[1]),
        ms(took[0]),
        ratio(took[1], took[0]),
        Promise::AtMost(3.0),
    );
}

/// Sessions that wait for a review take space in the store only, not in memory.
pub async fn paused(report: &mut Report) {
    const SESSIONS: usize = 1_000;
    const BUDGET: usize = 16 << 20;
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("ours.db").display());
    let tenure = house(&Tenure::open(&url).await.unwrap(), |assistant, options| {
        let tool = "search".to_owned();
        assistant.review = vec![ReviewRule { tool, queue: None, timeout: None, on_timeout: Decision::Rejected }];
        options.cache_bytes = BUDGET;
    });
    let (caller, shelf) = (Caller::new(1), Shelf(String::new()));
    let wait =
        async |n: usize| assert!(work(begin(&tenure, &id(&format!("w{n}"))).await, &caller, &shelf).await.waiting);
    // Warm up: fixed costs of the process are allocated after a few sessions.
    for n in 0..50 {
        wait(n).await;
    }
    let alive = || tokio::runtime::Handle::current().metrics().num_alive_tasks() + memory::status("Threads");
    let (before, tasks) = (memory::status("VmRSS"), alive());
    for n in 50..50 + SESSIONS {
        wait(n).await;
    }
    let (grown, after) = (memory::status("VmRSS").saturating_sub(before) as f64 / 1024.0, alive());
    let open = tenure.reviews(&who(), &ReviewFilter::Open(None), None, 100).await.unwrap();
    assert_eq!(open.reviews.len(), 100);
    report.row(
        "tasks and threads with 1,000 more sessions that wait for a person, beside without",
        after.to_string(),
        tasks.to_string(),
        after as f64 / tasks as f64,
        Promise::AtMost(1.0),
    );
    let budget = (BUDGET >> 20) as f64;
    report.row(
        "memory that they take, beside the budget for hot sessions",
        format!("{grown:.1} MB"),
        format!("{budget:.1} MB"),
        grown / budget,
        Promise::AtMost(1.0),
    );
}
