//! Runs: the overhead of the execution loop over its commits, resuming in a long session, and
//! sessions that wait for reviews.
//!
//! A round with a tool is two durable commits of two records each: the answer with the start of its
//! call, and the result with a checkpoint. The baseline for the loop is as many sequential appends
//! of our own on the same store, which have the same two fsyncs, checksums and heads. The
//! comparison with raw commits includes the cost of both.

use crate::*;
use jiff::{SignedDuration, Timestamp};
use tenure::testing::{CountingTools, ScriptedModel, ToolBehavior, read_only_tool, text_answer};

/// A model that calls a tool a given number of times, then answers.
fn calling_model(rounds: usize) -> ScriptedModel {
    ScriptedModel::new((0..rounds).map(|n| turn(n)[1].to_value()).chain([text_answer("done")]))
}

/// A tool with a fixed result.
fn search_tool(result: String) -> CountingTools {
    CountingTools::new([(read_only_tool("search"), ToolBehavior::Succeeds(result))])
}

fn turn_request(session: &SessionId) -> TurnRequest {
    TurnRequest {
        session: Some(session.clone()),
        messages: vec![turn(0)[0].clone()],
        history: Some(HistoryMode::Append),
        assistant: Some("a".to_owned()),
        resumable: Some(Resumable::new("m")),
        ..TurnRequest::default()
    }
}

async fn begin(tenure: &Tenure, session: &SessionId) -> OpenRun {
    match tenure.begin_turn(&bench_principal(), turn_request(session)).await.unwrap() {
        TurnStart::Run(open_run) => *open_run,
        TurnStart::AlreadyAnswered { .. } => unreachable!("there is no key"),
    }
}

async fn execute(open_run: OpenRun, model: &ScriptedModel, tools: &CountingTools) -> TurnOutcome {
    open_run.execute(Executors::new(model).tools(tools)).await.unwrap()
}

fn tenure_with(store: &Tenure, change: impl FnOnce(&mut Assistant, &mut Options)) -> Tenure {
    let mut assistant = Assistant { name: "a".to_owned(), ..Assistant::default() };
    let mut options = Options::default();
    change(&mut assistant, &mut options);
    let tenure = Tenure::with_store(store.store().clone(), options);
    tenure.declare(assistant);
    tenure
}

/// A round with a tool compared with two appends of the same messages, and with two raw commits.
pub async fn rounds(report: &mut Report) {
    const ROUNDS: usize = 20;
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("ours.db").display());
    let tenure = tenure_with(&Tenure::open(&url).await.unwrap(), |_, _| ());
    let db = raw::open(&dir.path().join("raw.db"));
    let mut rounds = Vec::new();
    let mut appends = Vec::new();
    let mut baseline = Vec::new();
    let none = calling_model(0);
    let all = calling_model(ROUNDS);
    let tool = search_tool(turn(1)[2].text());
    for n in 0..30 {
        let run_session = id(&format!("r{n}"));
        let append_session = create(&tenure, &format!("p{n}")).await;
        let short = timed(async { execute(begin(&tenure, &run_session).await, &none, &tool).await }).await;
        let long = timed(async { execute(begin(&tenure, &run_session).await, &all, &tool).await }).await;
        rounds.push(long.saturating_sub(short) / ROUNDS as u32);
        let messages = turn(n);
        let short = Message::assistant("a note of the size of the other records, or nearly so");
        let pair = async {
            for _ in 0..ROUNDS {
                tenure
                    .append(&bench_principal(), &append_session, plain(vec![messages[1].clone(), short.clone()]))
                    .await
                    .unwrap();
                tenure
                    .append(&bench_principal(), &append_session, plain(vec![messages[2].clone(), short.clone()]))
                    .await
                    .unwrap();
            }
        };
        appends.push(timed(pair).await / ROUNDS as u32);
        let (elapsed, ()) = time(|| {
            for i in 0..ROUNDS {
                raw::commit(&db, n as i64, i * 2, &messages[1..2]);
                raw::commit(&db, n as i64, i * 2 + 1, &messages[2..3]);
            }
        });
        baseline.push(elapsed / ROUNDS as u32);
    }
    let rounds = median(rounds);
    let appends = median(appends);
    let baseline = median(baseline);
    let label = "a round of a run with one tool";
    report.row(
        format!("{label}, beside two appends"),
        ms(rounds),
        ms(appends),
        ratio(rounds, appends),
        Promise::AtMost(1.0),
    );
    report.row(
        format!("{label}, beside two raw commits"),
        ms(rounds),
        ms(baseline),
        ratio(rounds, baseline),
        Promise::None,
    );
}

/// Resuming an orphaned run on a node without cache.
pub async fn resume(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("ours.db").display());
    let store = Tenure::open(&url).await.unwrap();
    let clock = Clock::manual(Timestamp::now());
    let with_clock = |_: &mut Assistant, options: &mut Options| options.clock = clock.clone();
    let first = tenure_with(&store, with_clock);
    let mut medians = Vec::new();
    for (name, messages) in [("small", 100), ("large", 10_000)] {
        let session = id(name);
        let of_assistant =
            NewSession { id: Some(session.clone()), assistant: Some("a".to_owned()), ..NewSession::default() };
        first.create(&bench_principal(), of_assistant).await.unwrap();
        fill(&first, &session, messages).await;
        let mut times = Vec::new();
        for _ in 0..30 {
            drop(begin(&first, &session).await);
            let uncached = tenure_with(&store, with_clock);
            clock.advance(SignedDuration::from_secs(31)); // its lease has expired
            let start = Instant::now();
            let head = uncached.find_orphaned_runs(1).await.unwrap().pop().unwrap();
            execute(
                uncached.claim_orphaned_run(&head).await.unwrap().unwrap(),
                &calling_model(0),
                &search_tool(String::new()),
            )
            .await;
            times.push(start.elapsed());
        }
        medians.push(median(times));
    }
    report.row(
        "resuming a run in a session of 10,000 messages, cold, beside of 100",
        ms(medians[1]),
        ms(medians[0]),
        ratio(medians[1], medians[0]),
        Promise::AtMost(3.0),
    );
}

/// Sessions that wait for a review take space in the store only, not in memory.
pub async fn paused(report: &mut Report) {
    const SESSIONS: usize = 1_000;
    const BUDGET: usize = 16 << 20;
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("ours.db").display());
    let tenure = tenure_with(&Tenure::open(&url).await.unwrap(), |assistant, options| {
        let tool = "search".to_owned();
        assistant.review =
            vec![ReviewRule { tool, condition: None, queue: None, timeout: None, on_timeout: Decision::Rejected }];
        options.cache_bytes = BUDGET;
    });
    let tool = search_tool(String::new());
    // A model for each session, because models keep their prompts.
    let wait = async |n: usize| {
        let open_run = begin(&tenure, &id(&format!("w{n}"))).await;
        assert!(execute(open_run, &calling_model(1), &tool).await.waiting);
    };
    // Warm up: fixed costs of the process are allocated after a few sessions.
    for n in 0..50 {
        wait(n).await;
    }
    let alive = || tokio::runtime::Handle::current().metrics().num_alive_tasks() + memory::status("Threads");
    let before = memory::status("VmRSS");
    let tasks = alive();
    for n in 50..50 + SESSIONS {
        wait(n).await;
    }
    let grown = memory::status("VmRSS").saturating_sub(before) as f64 / 1024.0;
    let after = alive();
    let open = tenure.reviews(&bench_principal(), &ReviewFilter::Open(None), None, 100).await.unwrap();
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
