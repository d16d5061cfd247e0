//! The execution loop of a run: concurrent tools, limits, checkpoints, the tool cache, client
//! tools, and the state after a cancellation.

use crate::support::*;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tenure::{log::*, policy::*, review::*, rules::*, run::*, session::*, *};
use tokio::sync::Semaphore;

async fn test_with_clerk(change: impl FnOnce(&mut Assistant)) -> TestTenure {
    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    test.tenure.declare(clerk(change));
    test
}

fn millis(n: u64) -> Option<HumanDuration> {
    Some(HumanDuration::of(Duration::from_millis(n)))
}

/// Calls run concurrently up to the limit; their results are stored in call order, and the model
/// sees them (D-051).
#[tokio::test(flavor = "multi_thread")]
async fn calls_run_concurrently_and_results_stay_in_order() {
    let test = test_with_clerk(|a| a.runs.parallel = Some(3)).await;
    let permit = Arc::new(Semaphore::new(0));
    let tools = CountingTools::new([
        (tool("slow"), ToolBehavior::WaitsForPermit(permit.clone())),
        (read_only_tool("look"), ToolBehavior::succeeds("seen")),
        (tool("pay"), ToolBehavior::succeeds("paid")),
        (tool("odd"), ToolBehavior::fails("no such thing")),
        (tool("away"), ToolBehavior::Unavailable),
    ]);
    let named = ["slow", "look", "pay", "odd", "away", "slow"];
    let ids: Vec<String> = (1..).zip(named).map(|(n, _)| format!("c{n}")).collect();
    let wanted: Vec<_> = ids.iter().zip(named).map(|(id, name)| (id.as_str(), name, json!({}))).collect();
    let model = ScriptedModel::new([tool_calls_answer(&wanted), text_answer("All done.")]);
    let turn = begin(&test.tenure, question("Do it")).await.unwrap();
    let (answered, ()) = tokio::join!(execute(*turn, &model, &tools), async {
        wait_until("the others are done", async || tools.calls("pay").len() == 1).await;
        let s = session_x(&test.tenure).await;
        assert_eq!(conversation(&s), ["user: Do it", "calls: c1 c2 c3 c4 c5 c6"], "nothing is kept out of its order");
        assert_eq!(s.runs[0].tools_started.len(), 6, "all of them were announced before the first was made");
        permit.add_permits(2);
    });
    let answered = answered.unwrap();
    assert!(tools.max_concurrent() <= 3, "{} at once", tools.max_concurrent());
    assert!(tools.max_concurrent() > 1, "not one after the other");
    let s = session_x(&test.tenure).await;
    let results = [
        "slow is done",
        "seen",
        "paid",
        "no such thing",
        "[the tool was not called: the tool is unavailable]",
        "slow is done",
    ];
    let mut want = vec!["user: Do it".to_owned(), "calls: c1 c2 c3 c4 c5 c6".to_owned()];
    want.extend(results.iter().map(|r| format!("tool: {r}")));
    want.push("assistant: All done.".to_owned());
    assert_eq!(conversation(&s), want);
    assert_eq!(ending(&s), (Some(RunOutcome::Completed), None));
    assert_eq!(model.last_prompt()[2..], results, "the model was shown the results, in order");
    let reported_results: Vec<_> =
        answered.calls.iter().map(|c| (c.call.clone(), c.content.clone().unwrap())).collect();
    assert_eq!(reported_results, ids.iter().cloned().zip(results.map(str::to_owned)).collect::<Vec<_>>());
    assert_eq!(answered.seq, s.head().seq);
}

/// A round with tools is two commits, however many calls it has; the question and the last answer
/// are one each.
#[tokio::test]
async fn a_round_is_two_commits() {
    let test = test_with_clerk(|_| ()).await;
    let store = FailingStore::new(test.tenure.store(), None);
    let tenure = Tenure::with_store(store.clone(), Options { clock: test.clock.clone(), ..Options::default() });
    tenure.declare(clerk(|_| ()));
    let tools = CountingTools::new([
        (read_only_tool("look"), ToolBehavior::succeeds("seen")),
        (tool("pay"), ToolBehavior::succeeds("paid")),
    ]);
    let round = |n: u64| {
        tool_calls_answer(&[("c1", "look", json!({"n": n})), ("c2", "pay", json!({"n": n})), ("c3", "look", json!({}))])
    };
    let model = ScriptedModel::new([round(1), round(2), text_answer("Done.")]);
    let turn = begin(&tenure, question("Do it")).await.unwrap();
    let opened = store.commits();
    execute(*turn, &model, &tools).await.unwrap();
    assert_eq!((opened, store.commits() - opened), (1, 2 * 2 + 1));
}

/// The reported usage of a turn is the sum over its answers, also after a node was lost; a repeated
/// request gets the same (D-050).
#[tokio::test]
async fn usage_is_the_sum_of_all_rounds() {
    let test = test_with_clerk(|_| ()).await;
    let tools = CountingTools::new([(read_only_tool("look"), ToolBehavior::succeeds("seen"))]);
    let look_call = |id| tool_calls_answer(&[(id, "look", json!({}))]);
    let script = || ScriptedModel::new([look_call("c1"), look_call("c2"), text_answer("Done.")]);
    let ask = || TurnRequest { idempotency: Some(("k".into(), "b".into())), ..question("Look twice") };
    let answered = run_turn(&test.tenure, ask(), &script(), &tools).await.unwrap();
    assert_eq!(answered.answer.usage, Some(json!({"total_tokens": 30})));
    let total = |body: &str| serde_json::from_str::<Value>(body).unwrap()["usage"]["total_tokens"].clone();
    assert_eq!(total(&answered.answer.body("x", test.now())), 30);
    let TurnStart::AlreadyAnswered { replay, .. } = test.tenure.begin_turn(&ada(), ask()).await.unwrap() else {
        panic!("expected a stored response")
    };
    assert_eq!(total(&replay.body), 30);
    // One node crashes after its second answer, and another resumes the run.
    let store = FailingStore::new(test.tenure.store(), Some((4, FailurePoint::BeforeCommit)));
    let crashing_node = Tenure::with_store(store.clone(), Options { clock: test.clock.clone(), ..Options::default() });
    crashing_node.declare(clerk(|_| ()));
    assert!(run_turn(&crashing_node, question("Again"), &script(), &tools).await.is_err() && store.has_failed());
    test.advance(jiff::SignedDuration::from_mins(5));
    let outcomes = take_over(&test.tenure, &script(), &tools).await;
    let usage = outcomes.into_iter().next().unwrap().unwrap().answer.usage.unwrap();
    assert_eq!(usage["total_tokens"], 30, "{usage}");
}

/// The session cache is an optimization only: a run works even if it is evicted after every step.
#[tokio::test]
async fn a_run_needs_no_cache() {
    let store = TestTenure::new(StoreKind::Memory).await.unwrap().tenure.store().clone();
    let tenure = Tenure::with_store(store, Options { cache_bytes: 0, ..Options::default() });
    tenure.declare(clerk(|_| ()));
    let tools = CountingTools::new([(read_only_tool("look"), ToolBehavior::succeeds("seen"))]);
    let look_call = |id| tool_calls_answer(&[(id, "look", json!({}))]);
    let model = ScriptedModel::new([look_call("c1"), look_call("c2"), text_answer("Done.")]);
    run_turn(&tenure, question("Look twice"), &model, &tools).await.unwrap();
    assert_eq!(model.prompts().iter().map(Vec::len).collect::<Vec<_>>(), [1, 3, 5]);
    assert_eq!(conversation(&session_x(&tenure).await).len(), 6);
}

async fn ends_with(test: &TestTenure, model: ScriptedModel, tools: CountingTools, code: &str) -> Session {
    let error = run_turn(&test.tenure, question("Do it"), &model, &tools).await.unwrap_err();
    assert_eq!(error.code(), code, "{error}");
    let s = session_x(&test.tenure).await;
    assert_eq!(ending(&s), (Some(RunOutcome::Failed), Some(code.to_owned())));
    assert_eq!((s.head().run.clone(), s.head().lease.clone()), (None, None));
    assert_eq!(s.runs[0].error.as_deref(), Some(error.to_string().as_str()));
    s
}

/// Each limit ends the run with its own code, and everything committed before stays stored.
#[tokio::test(flavor = "multi_thread")]
async fn every_limit_has_its_code() {
    let tool_definitions =
        || [(read_only_tool("look"), ToolBehavior::succeeds("seen")), (tool("hang"), ToolBehavior::Hangs)];
    let again = || tool_calls_answer(&[("c1", "look", json!({}))]);
    let h = test_with_clerk(|a| a.runs.max_rounds = Some(2)).await;
    let s = ends_with(
        &h,
        ScriptedModel::new([again(), again(), again()]),
        CountingTools::new(tool_definitions()),
        "too_many_rounds",
    )
    .await;
    assert_eq!(conversation(&s)[1..], ["calls: c1", "tool: seen", "calls: c1", "tool: seen"]);

    let h = test_with_clerk(|a| a.runs.max_tokens = Some(20)).await;
    let s = ends_with(
        &h,
        ScriptedModel::new([again(), again(), again()]),
        CountingTools::new(tool_definitions()),
        "out_of_tokens",
    )
    .await;
    assert_eq!(s.messages.len(), 5, "two answers of ten tokens");

    let h = test_with_clerk(|a| a.runs.max_time = millis(80)).await;
    let hang = tool_calls_answer(&[("c1", "look", json!({})), ("c2", "hang", json!({}))]);
    let s =
        ends_with(&h, ScriptedModel::new([hang.clone()]), CountingTools::new(tool_definitions()), "out_of_time").await;
    assert_eq!(conversation(&s), ["user: Do it", "calls: c1 c2", "tool: seen"], "what was there is kept");

    let h = test_with_clerk(|a| a.runs.tool_timeout = millis(80)).await;
    let s = ends_with(&h, ScriptedModel::new([hang]), CountingTools::new(tool_definitions()), "tool_timeout").await;
    assert_eq!(conversation(&s), ["user: Do it", "calls: c1 c2", "tool: seen"]);

    let h = test_with_clerk(|a| a.runs.max_result_bytes = Some(3)).await;
    let s =
        ends_with(&h, ScriptedModel::new([again()]), CountingTools::new(tool_definitions()), "result_too_large").await;
    assert_eq!(conversation(&s), ["user: Do it", "calls: c1"]);
    // The session stays usable: the next question is answered.
    let (model, tools) = (ScriptedModel::new([text_answer("Hello.")]), CountingTools::new(tool_definitions()));
    run_turn(&h.tenure, question("And?"), &model, &tools).await.unwrap();
    assert!(is_valid(&model.prompts()[0]));
}

/// When one call ends the run, calls in flight are awaited and their results stored, because they
/// may have side effects; pending calls are not started (D-052).
#[tokio::test(flavor = "multi_thread")]
async fn other_results_are_stored_when_a_call_ends_the_run() {
    let test = test_with_clerk(|a| (a.runs.parallel, a.runs.max_result_bytes) = (Some(2), Some(12))).await;
    let permit = Arc::new(Semaphore::new(0));
    let tools = CountingTools::new([
        (tool("big"), ToolBehavior::succeeds("far more than twelve bytes")),
        (tool("slow"), ToolBehavior::WaitsForPermit(permit.clone())),
        (tool("pay"), ToolBehavior::succeeds("paid")),
    ]);
    let model = ScriptedModel::new([tool_calls_answer(&[
        ("c1", "big", json!({})),
        ("c2", "slow", json!({})),
        ("c3", "pay", json!({})),
    ])]);
    let turn = begin(&test.tenure, question("Do it")).await.unwrap();
    let (ended, ()) = tokio::join!(execute(*turn, &model, &tools), async {
        wait_until("one is done", async || tools.calls("big").len() == 1).await;
        tokio::time::sleep(Duration::from_millis(50)).await; // observation window: `pay` is not called
        permit.add_permits(1);
    });
    assert_eq!(ended.unwrap_err().code(), "result_too_large");
    let s = session_x(&test.tenure).await;
    assert_eq!(conversation(&s), ["user: Do it", "calls: c1 c2 c3", "tool: slow is done"]);
    assert_eq!((tools.calls("slow").len(), tools.calls("pay").len()), (1, 0));
}

/// Token and round limits apply to the whole run across nodes; the time limit excludes the time
/// spent waiting for reviews.
#[tokio::test]
async fn limits_survive_a_pause() {
    let limits = |a: &mut Assistant| {
        (a.review, a.runs.max_time) = (vec![reviewed("pay")], Some(HumanDuration::of(Duration::from_secs(600))));
        a.runs.max_tokens = Some(15);
    };
    let h = test_with_clerk(limits).await;
    let permit = Arc::new(Semaphore::new(0));
    let tools = CountingTools::new([(tool("pay"), ToolBehavior::WaitsForPermit(permit.clone()))]);
    let pay = || tool_calls_answer(&[("c1", "pay", json!({}))]);
    let model = ScriptedModel::new([pay(), pay(), text_answer("Done.")]);
    assert!(run_turn(&h.tenure, question("Pay"), &model, &tools).await.unwrap().waiting);
    h.advance(jiff::SignedDuration::from_hours(5));
    let review = open(&session_x(&h.tenure).await)[0].clone();
    h.tenure.decide(&ada(), &review, &review_input(Decision::Approved)).await.unwrap();
    let (outcomes, ()) = tokio::join!(take_over(&h.tenure, &model, &tools), async {
        // Long enough for an exceeded time limit to be noticed.
        tokio::time::sleep(Duration::from_millis(30)).await; // observation window
        permit.add_permits(9);
    });
    assert!(outcomes[0].as_ref().unwrap().waiting, "it had all its time, and asked again");
    let review = open(&session_x(&h.tenure).await)[0].clone();
    h.tenure.decide(&ada(), &review, &review_input(Decision::Approved)).await.unwrap();
    let outcomes = take_over(&h.tenure, &model, &tools).await;
    assert_eq!(outcomes[0].as_ref().unwrap_err().code(), "out_of_tokens", "twenty were used before");
    assert_eq!(ending(&session_x(&h.tenure).await), (Some(RunOutcome::Failed), Some("out_of_tokens".to_owned())));
}

/// Tokens used before a crash count, whether or not a checkpoint was set since.
#[tokio::test]
async fn tokens_that_were_used_before_a_crash_count() {
    for policy in ["tool", "manual"] {
        let h = test_with_clerk(|_| ()).await;
        let node = |store: &Arc<dyn store::Store>| {
            let tenure = Tenure::with_store(store.clone(), Options { clock: h.clock.clone(), ..Options::default() });
            tenure.declare(clerk(|a| {
                a.runs.max_tokens = Some(10);
                a.checkpoints = Some(CheckpointPolicy::try_from(policy.to_owned()).unwrap());
            }));
            tenure
        };
        let tools = CountingTools::new([(read_only_tool("look"), ToolBehavior::succeeds("seen"))]);
        let model = ScriptedModel::new([tool_calls_answer(&[("c1", "look", json!({}))]), text_answer("Done.")]);
        // Commits: the question, the answer with the call, and its result, which is lost.
        let dying = FailingStore::new(h.tenure.store(), Some((2, FailurePoint::BeforeCommit)));
        assert!(run_turn(&node(&(dying.clone() as _)), question("Look"), &model, &tools).await.is_err());
        assert!(dying.has_failed());
        h.advance(jiff::SignedDuration::from_secs(31));
        let outcomes = take_over(&node(h.tenure.store()), &model, &tools).await;
        assert_eq!(outcomes[0].as_ref().unwrap_err().code(), "out_of_tokens", "{policy}");
        assert_eq!(model.call_count(), 1, "{policy}: it is not asked once more than it may be");
    }
}

/// The checkpoint policy determines when checkpoints are set and how they are labelled.
#[tokio::test]
async fn checkpoints_follow_the_policy() {
    for (policy, want) in [
        ("tool", &["turn-1.1@3", "turn-1.2@4", "turn-1.3@6", "turn-1@7"][..]),
        ("step", &["turn-1.1@4", "turn-1.2@6", "turn-1@7"]),
        ("60s", &["turn-1@7"]),
        ("manual", &[]),
    ] {
        let checkpoints = Some(CheckpointPolicy::try_from(policy.to_owned()).unwrap());
        let h = test_with_clerk(|a| a.checkpoints = checkpoints).await;
        let tools = CountingTools::new([(read_only_tool("look"), ToolBehavior::succeeds("seen"))]);
        let two = tool_calls_answer(&[("c1", "look", json!({})), ("c2", "look", json!({}))]);
        let model = ScriptedModel::new([two, tool_calls_answer(&[("c3", "look", json!({}))]), text_answer("Done.")]);
        run_turn(&h.tenure, question("Look"), &model, &tools).await.unwrap();
        let s = session_x(&h.tenure).await;
        let labelled: Vec<_> = s.checkpoints.iter().map(|c| format!("{}@{}", c.label, c.position)).collect();
        assert_eq!(labelled, want, "{policy}");
        assert!(s.checkpoints.iter().all(|c| c.auto && c.run.as_ref() == Some(&s.runs[0].id)));
        let steps: Vec<_> = s.checkpoints.iter().filter_map(|c| c.step).collect();
        assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>());
    }
}

/// Periodic checkpoints follow the clock, counted from the previous checkpoint.
#[tokio::test(flavor = "multi_thread")]
async fn checkpoints_at_an_interval() {
    let h = test_with_clerk(|a| a.checkpoints = Some(CheckpointPolicy::Every(Duration::from_secs(60)))).await;
    let permit = Arc::new(Semaphore::new(0));
    let tools = CountingTools::new([(tool("slow"), ToolBehavior::WaitsForPermit(permit.clone()))]);
    let slow = || tool_calls_answer(&[("c1", "slow", json!({}))]);
    let model = ScriptedModel::new([slow(), slow(), slow(), text_answer("Done.")]);
    let turn = begin(&h.tenure, question("Go")).await.unwrap();
    let (outcome, ()) = tokio::join!(execute(*turn, &model, &tools), async {
        for (n, seconds) in [(1, 61), (2, 30), (3, 31)] {
            wait_until("it is asked", async || model.call_count() == n).await;
            wait_until("it is begun", async || session_x(&h.tenure).await.runs[0].tools_started.len() == n).await;
            h.advance(jiff::SignedDuration::from_secs(seconds));
            permit.add_permits(1);
        }
    });
    outcome.unwrap();
    let checkpoints: Vec<_> =
        session_x(&h.tenure).await.checkpoints.iter().map(|c| (c.label.to_string(), c.position)).collect();
    assert_eq!(checkpoints, [("turn-1.1".to_owned(), 3), ("turn-1.2".to_owned(), 7), ("turn-1".to_owned(), 8)]);
}

/// A manual checkpoint during a run does not disturb the numbering.
#[tokio::test(flavor = "multi_thread")]
async fn a_manual_checkpoint_during_a_run() {
    let h = test_with_clerk(|_| ()).await;
    let permit = Arc::new(Semaphore::new(0));
    let tools = CountingTools::new([(tool("slow"), ToolBehavior::WaitsForPermit(permit.clone()))]);
    let slow = || tool_calls_answer(&[("c1", "slow", json!({}))]);
    let model = ScriptedModel::new([slow(), slow(), text_answer("Done.")]);
    let turn = begin(&h.tenure, question("Go")).await.unwrap();
    let (outcome, ()) = tokio::join!(execute(*turn, &model, &tools), async {
        permit.add_permits(1);
        wait_until("it is asked twice", async || model.call_count() == 2).await;
        h.tenure.checkpoint(&ada(), &id("x"), Some(CheckpointLabel::new("mine").unwrap())).await.unwrap();
        permit.add_permits(1);
    });
    outcome.unwrap();
    let labels: Vec<_> = session_x(&h.tenure).await.checkpoints.iter().map(|c| c.label.to_string()).collect();
    assert_eq!(labels, ["turn-1.1", "mine", "turn-1.2", "turn-1"]);
}

/// A repeated call is answered from the cache: the tool is not called, and the log records it.
#[tokio::test]
async fn a_result_in_the_cache_is_not_fetched_again() {
    let h = test_with_clerk(|_| ()).await;
    let cached = Tool { cache: true, ..read_only_tool("look") };
    let tools = CountingTools::new([
        (cached.clone(), ToolBehavior::succeeds("seen")),
        (tool("pay"), ToolBehavior::succeeds("paid")),
    ]);
    let look_and_pay =
        |id: &str, arguments: Value| tool_calls_answer(&[(id, "look", arguments), ("p", "pay", json!({}))]);
    let model = ScriptedModel::new([
        look_and_pay("c1", json!({"a": 1, "b": 2})),
        look_and_pay("c2", json!(r#"{ "b": 2, "a": 1 }"#)),
        look_and_pay("c3", json!({"a": 2})),
        text_answer("Done."),
    ]);
    let answered = run_turn(&h.tenure, question("Look"), &model, &tools).await.unwrap();
    assert_eq!(tools.calls("look"), [json!({"a": 1, "b": 2}), json!({"a": 2})]);
    assert_eq!(tools.calls("pay").len(), 3, "what has an effect is never cached");
    let s = session_x(&h.tenure).await;
    let ledger: Vec<_> = s.runs[0].tools_started.iter().map(|t| (t.call.as_str(), t.cached)).collect();
    assert_eq!(ledger, [("c1", false), ("p", false), ("c2", true), ("p", false), ("c3", false), ("p", false)]);
    let look_results: Vec<_> =
        answered.calls.iter().filter(|c| c.tool == "look").map(|c| (c.cached, c.content.as_deref())).collect();
    assert_eq!(look_results, [(false, Some("seen")), (true, Some("seen")), (false, Some("seen"))]);
    // The cache works across turns, failed results are not cached, and empty arguments are equal
    // however they are written.
    let bad = CountingTools::new([(cached, ToolBehavior::fails("down"))]);
    let model = ScriptedModel::new([
        tool_calls_answer(&[("c4", "look", json!({"a": 2}))]),
        tool_calls_answer(&[("c5", "look", json!({}))]),
        tool_calls_answer(&[("c6", "look", json!(""))]),
        text_answer("Done."),
    ]);
    run_turn(&h.tenure, question("Again"), &model, &bad).await.unwrap();
    assert_eq!(bad.calls("look"), [json!({}), json!({})]);
    let good = CountingTools::new([(Tool { cache: true, ..read_only_tool("look") }, ToolBehavior::succeeds("up"))]);
    run_turn(
        &h.tenure,
        question("Again"),
        &ScriptedModel::new([
            tool_calls_answer(&[("c7", "look", json!({}))]),
            tool_calls_answer(&[("c8", "look", json!(""))]),
            text_answer("Done."),
        ]),
        &good,
    )
    .await
    .unwrap();
    assert_eq!(good.calls("look"), [json!({})]);
}

/// Calls of client tools are left to the client; server tools are executed first.
#[tokio::test]
async fn the_clients_own_tools() {
    let h = test_with_clerk(|_| ()).await;
    let tools = CountingTools::new([(tool("pay"), ToolBehavior::succeeds("paid"))]);
    let mixed = tool_calls_answer(&[("c1", "theirs", json!({"q": 1})), ("c2", "pay", json!({}))]);
    let model = ScriptedModel::new([mixed, text_answer("Both done.")]);
    let mut options = RawObject::default();
    options.set("tools", json!([{"type": "function", "function": {"name": "theirs"}}]));
    let run = async |ask: TurnRequest| {
        let turn = begin(&h.tenure, ask).await.unwrap();
        turn.execute(Executors::new(&model).tools(&tools).options(options.clone())).await.unwrap()
    };
    let answered = run(question("Go")).await;
    assert_eq!(answered.calls.iter().map(|c| c.call.as_str()).collect::<Vec<_>>(), ["c2"]);
    let s = session_x(&h.tenure).await;
    assert_eq!(conversation(&s), ["user: Go", "calls: c1 c2", "tool: paid"]);
    assert_eq!(ending(&s), (Some(RunOutcome::Completed), None));
    let back =
        TurnRequest { messages: vec![Message::tool("c1", "here")], history: Some(HistoryMode::Auto), ..question("") };
    run(back).await;
    assert_eq!(conversation(&session_x(&h.tenure).await)[3..], ["tool: here", "assistant: Both done."]);
    assert_eq!(tools.calls("pay").len(), 1);
}

/// A call whose answer was lost may have been executed: unless the tool is repeatable, a review is
/// opened (D-054).
#[tokio::test]
async fn a_lost_tool_result_opens_a_review() {
    for (decision, want, times) in [
        (Decision::Approved, "tool: A reviewer confirmed that this call was executed.", 1),
        (Decision::Rejected, "tool: paid", 2),
    ] {
        let h = test_with_clerk(|_| ()).await;
        let lossy = CountingTools::new([
            (tool("pay"), ToolBehavior::LosesResult),
            (read_only_tool("look"), ToolBehavior::LosesResult),
        ]);
        let model = ScriptedModel::new([
            tool_calls_answer(&[("c1", "pay", json!({"n": 1})), ("c2", "look", json!({}))]),
            text_answer("Done."),
        ]);
        assert!(run_turn(&h.tenure, question("Pay"), &model, &lossy).await.unwrap().waiting);
        let s = session_x(&h.tenure).await;
        assert_eq!(s.head().status, Status::Paused);
        assert_eq!(
            conversation(&s)[2..],
            ["tool: [the result of the tool call was lost: the connection broke]"],
            "looking again does no harm"
        );
        let opened = &s.open_reviews().next().unwrap().opened;
        assert_eq!((opened.lost, opened.step.as_str(), &opened.detail["arguments"]), (true, "pay", &json!({"n": 1})));
        let review = opened.review.clone();
        h.tenure.decide(&ada(), &review, &review_input(decision)).await.unwrap();
        let working_tools = CountingTools::new([
            (tool("pay"), ToolBehavior::succeeds("paid")),
            (read_only_tool("look"), ToolBehavior::succeeds("seen")),
        ]);
        take_over(&h.tenure, &model, &working_tools).await.pop().unwrap().unwrap();
        let s = session_x(&h.tenure).await;
        assert_eq!(conversation(&s)[3..], [want, "assistant: Done."]);
        assert_eq!(lossy.calls("pay").len() + working_tools.calls("pay").len(), times);
        assert!(is_valid(&history(&s, &Window::default())));
    }
}

/// After a cancellation through another handle, everything committed before stays stored, and
/// nothing is added.
#[tokio::test(flavor = "multi_thread")]
async fn cancelled_from_another_handle() {
    for beside in [false, true] {
        let h = test_with_clerk(|_| ()).await;
        let permit = Arc::new(Semaphore::new(0));
        let tools = CountingTools::new([
            (read_only_tool("look"), ToolBehavior::succeeds("seen")),
            (tool("slow"), ToolBehavior::WaitsForPermit(permit.clone())),
        ]);
        let model = ScriptedModel::new([
            tool_calls_answer(&[("c1", "look", json!({})), ("c2", "slow", json!({}))]),
            text_answer("Done."),
        ]);
        let turn = begin(&h.tenure, question("Go")).await.unwrap();
        let run = turn.run_id().clone();
        let other = if beside { h.second_node() } else { h.tenure.clone() };
        let (outcome, ()) = tokio::join!(execute(*turn, &model, &tools), async {
            wait_until("the first result is kept", async || session_x(&h.tenure).await.messages.len() == 3).await;
            let stopped = other.cancel(&ada(), &id("x"), &run).await.unwrap();
            assert_eq!(stopped.ended.unwrap().1, RunOutcome::Cancelled);
            assert_eq!(other.cancel(&ada(), &id("x"), &run).await.unwrap().ended, stopped.ended, "once");
            // On another node, the run notices the cancellation at its next commit.
            permit.add_permits(usize::from(beside));
        });
        assert_eq!(outcome.unwrap_err().code(), if beside { "superseded" } else { "cancelled" });
        let s = session_x(&h.tenure).await;
        assert_eq!(conversation(&s), ["user: Go", "calls: c1 c2", "tool: seen"]);
        assert_eq!(ending(&s), (Some(RunOutcome::Cancelled), Some("cancelled".to_owned())));
        assert_eq!(
            h.tenure.cancel(&ada(), &id("x"), &RunId::new("nobody").unwrap()).await.unwrap_err().code(),
            "no_such_run"
        );
    }
}

/// A run can be followed record by record until it is over.
#[tokio::test]
async fn a_run_can_be_followed() {
    let h = test_with_clerk(|_| ()).await;
    let tools = CountingTools::new([(read_only_tool("look"), ToolBehavior::succeeds("seen"))]);
    let model = ScriptedModel::new([tool_calls_answer(&[("c1", "look", json!({}))]), text_answer("Done.")]);
    let turn = begin(&h.tenure, question("Go")).await.unwrap();
    let run = turn.run_id().clone();
    let followed = h.tenure.follow(&ada(), &id("x"), &run, 0, 100).await.unwrap();
    assert!(!followed.ended && followed.records.len() == 1, "{followed:?}");
    execute(*turn, &model, &tools).await.unwrap();
    run_turn(&h.tenure, question("More"), &ScriptedModel::new([text_answer("Yes.")]), &tools).await.unwrap();
    let (mut seen, mut after) = (Vec::new(), followed.records[0].seq);
    loop {
        let page = h.tenure.follow(&ada(), &id("x"), &run, after, 2).await.unwrap();
        after = page.records.last().map_or(after, |r| r.seq);
        seen.extend(page.records);
        if page.ended {
            break;
        }
    }
    assert!(matches!(&seen.last().unwrap().entry, Entry::RunEnded { run: r, .. } if *r == run), "{seen:?}");
    let all = h.second_node().follow(&ada(), &id("x"), &run, 0, 100).await.unwrap();
    assert!(all.ended);
    assert_eq!(all.records[1..], seen[..]);
}

/// A fork from the middle of a turn can be continued, including calls that were not executed.
#[tokio::test]
async fn a_fork_from_the_middle_of_a_turn_can_be_continued() {
    let h = test_with_clerk(|_| ()).await;
    let tools = CountingTools::new([
        (read_only_tool("look"), ToolBehavior::succeeds("seen")),
        (tool("pay"), ToolBehavior::succeeds("paid")),
    ]);
    let model = ScriptedModel::new([
        tool_calls_answer(&[("c1", "look", json!({})), ("c2", "pay", json!({}))]),
        text_answer("Done."),
    ]);
    run_turn(&h.tenure, question("Go"), &model, &tools).await.unwrap();
    let original = session_x(&h.tenure).await;
    // Fork after the question, before any call was started, and after one was.
    for (at, name, waits) in [
        (Point::Position(1), "f1", false),
        (Point::Seq(original.messages[1].seq), "f2", false),
        (Point::Position(2), "f3", true),
    ] {
        h.tenure.fork(&ada(), &id("x"), Fork::at(at).id(Some(id(name)))).await.unwrap();
        let turn = h.tenure.start_run(&ada(), &id(name), OnBusy::Reject, resumable()).await.unwrap();
        let answered = execute(turn, &model, &tools).await.unwrap();
        assert_eq!(answered.waiting, waits, "{name}");
        let s = h.tenure.load(&ada(), &id(name)).await.unwrap();
        if waits {
            assert_eq!(conversation(&s)[2..], ["tool: seen"]);
            assert!(s.open_reviews().next().unwrap().opened.lost, "what the parent began may have happened");
        } else {
            assert_eq!(conversation(&s), conversation(&original), "{name}");
        }
    }
    assert_eq!(session_x(&h.tenure).await, original, "the parent is as it was");
}

/// A retried request whose run was taken over and completed by another node is not executed again.
#[tokio::test]
async fn an_idempotency_key_of_a_claimed_run_is_answered_once() {
    let h = test_with_clerk(|_| ()).await;
    let tools = CountingTools::new([(tool("pay"), ToolBehavior::succeeds("paid"))]);
    let model = ScriptedModel::new([tool_calls_answer(&[("c1", "pay", json!({}))]), text_answer("Done.")]);
    let keyed = || TurnRequest { idempotency: Some(("k".to_owned(), "body".to_owned())), ..question("Pay") };
    let store = FailingStore::new(h.tenure.store(), None);
    let first = Tenure::with_store(store.clone(), Options { clock: h.clock.clone(), ..Options::default() });
    first.declare(clerk(|_| ()));
    let turn = begin(&first, keyed()).await.unwrap();
    store.fail();
    assert!(execute(*turn, &model, &tools).await.is_err());
    h.advance(jiff::SignedDuration::from_secs(31));
    take_over(&h.tenure, &model, &tools).await.pop().unwrap().unwrap();
    let before = session_x(&h.tenure).await;
    let TurnStart::AlreadyAnswered { replay, .. } = h.tenure.begin_turn(&ada(), keyed()).await.unwrap() else {
        panic!("the request was executed again")
    };
    let body = replay.body;
    assert!(body.contains("Done."), "{body}");
    assert_eq!((session_x(&h.tenure).await, tools.calls("pay").len()), (before, 1));
}

/// A retried request whose run was orphaned is resumed; completed tool calls are not repeated.
#[tokio::test]
async fn an_idempotency_key_resumes_its_orphaned_run() {
    let h = test_with_clerk(|_| ()).await;
    let tools = CountingTools::new([(tool("pay"), ToolBehavior::succeeds("paid"))]);
    let model = ScriptedModel::new([tool_calls_answer(&[("c1", "pay", json!({}))]), text_answer("Done.")]);
    let keyed = || TurnRequest { idempotency: Some(("k".to_owned(), "body".to_owned())), ..question("Pay") };
    // Crashes at the commit of the last answer.
    let store = FailingStore::new(h.tenure.store(), Some((3, FailurePoint::BeforeCommit)));
    let first = Tenure::with_store(store, Options { clock: h.clock.clone(), ..Options::default() });
    first.declare(clerk(|_| ()));
    assert!(run_turn(&first, keyed(), &model, &tools).await.is_err());
    h.advance(jiff::SignedDuration::from_secs(61));
    run_turn(&h.tenure, keyed(), &model, &tools).await.unwrap();
    let s = session_x(&h.tenure).await;
    assert_eq!(conversation(&s), ["user: Pay", "calls: c1", "tool: paid", "assistant: Done."]);
    assert_eq!((tools.calls("pay").len(), s.runs.len()), (1, 1));
    assert!(matches!(h.tenure.begin_turn(&ada(), keyed()).await.unwrap(), TurnStart::AlreadyAnswered { .. }));
}
