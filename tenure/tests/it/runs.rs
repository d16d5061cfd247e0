//! The execution loop of a run: concurrent tools, limits, checkpoints, the tool cache, client
//! tools, and the state after a cancellation.

use crate::hands::*;
use crate::places::*;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tenure::{log::*, maintenance::*, memory::*, policy::*, review::*, rules::*, run::*, session::*, *};
use tokio::sync::Semaphore;

async fn home(change: impl FnOnce(&mut Assistant)) -> Home {
    let home = Home::new("memory").await.unwrap();
    home.tenure.declare(clerk(change));
    home
}

fn millis(n: u64) -> Option<HumanDuration> {
    Some(HumanDuration::of(Duration::from_millis(n)))
}

/// Calls run concurrently up to the limit; their results are stored in call order, and the model
/// sees them (D-051).
#[tokio::test(flavor = "multi_thread")]
async fn calls_run_concurrently_and_results_stay_in_order() {
    let home = home(|a| a.runs.parallel = Some(3)).await;
    let permit = Arc::new(Semaphore::new(0));
    let tools = Workshop::new([
        (tool("slow"), Does::Waits(permit.clone())),
        (read_only("look"), Does::Says("seen")),
        (tool("pay"), Does::Says("paid")),
        (tool("odd"), Does::Fails("no such thing")),
        (tool("away"), Does::IsAway),
    ]);
    let named = ["slow", "look", "pay", "odd", "away", "slow"];
    let ids: Vec<String> = (1..).zip(named).map(|(n, _)| format!("c{n}")).collect();
    let wanted: Vec<_> = ids.iter().zip(named).map(|(id, name)| (id.as_str(), name, json!({}))).collect();
    let model = Script::new([calls(&wanted), say("All done.")]);
    let turn = begin(&home.tenure, question("Do it")).await.unwrap();
    let (answered, ()) = tokio::join!(work(*turn, &model, &tools), async {
        until("the others are done", async || tools.done("pay").len() == 1).await;
        let s = x(&home.tenure).await;
        assert_eq!(talk(&s), ["user: Do it", "calls: c1 c2 c3 c4 c5 c6"], "nothing is kept out of its order");
        assert_eq!(s.runs[0].tools_started.len(), 6, "all of them were announced before the first was made");
        permit.add_permits(2);
    });
    let answered = answered.unwrap();
    assert!(tools.most.load(SeqCst) <= 3, "{} at once", tools.most.load(SeqCst));
    assert!(tools.most.load(SeqCst) > 1, "not one after the other");
    let s = x(&home.tenure).await;
    let results =
        ["slow is done", "seen", "paid", "no such thing", "[the tool was not called: nobody is there]", "slow is done"];
    let mut want = vec!["user: Do it".to_owned(), "calls: c1 c2 c3 c4 c5 c6".to_owned()];
    want.extend(results.iter().map(|r| format!("tool: {r}")));
    want.push("assistant: All done.".to_owned());
    assert_eq!(talk(&s), want);
    assert_eq!(ending(&s), (Some(RunOutcome::Completed), None));
    assert_eq!(model.shown()[2..], results, "the model was shown the results, in order");
    let reported_results: Vec<_> =
        answered.calls.iter().map(|c| (c.call.clone(), c.content.clone().unwrap())).collect();
    assert_eq!(reported_results, ids.iter().cloned().zip(results.map(str::to_owned)).collect::<Vec<_>>());
    assert_eq!(answered.seq, s.head().seq);
}

/// A round with tools is two commits, however many calls it has; the question and the last answer
/// are one each.
#[tokio::test]
async fn a_round_is_two_commits() {
    let home = home(|_| ()).await;
    let store = Fragile::new(home.tenure.store(), None);
    let tenure = Tenure::with_store(store.clone(), Options { clock: home.clock.clone(), ..Options::default() });
    tenure.declare(clerk(|_| ()));
    let tools = Workshop::new([(read_only("look"), Does::Says("seen")), (tool("pay"), Does::Says("paid"))]);
    let round =
        |n: u64| calls(&[("c1", "look", json!({"n": n})), ("c2", "pay", json!({"n": n})), ("c3", "look", json!({}))]);
    let model = Script::new([round(1), round(2), say("Done.")]);
    let turn = begin(&tenure, question("Do it")).await.unwrap();
    let opened = store.commits();
    work(*turn, &model, &tools).await.unwrap();
    assert_eq!((opened, store.commits() - opened), (1, 2 * 2 + 1));
}

/// The reported usage of a turn is the sum over its answers, also after a node was lost; a repeated
/// request gets the same (D-050).
#[tokio::test]
async fn usage_is_the_sum_of_all_rounds() {
    let home = home(|_| ()).await;
    let tools = Workshop::new([(read_only("look"), Does::Says("seen"))]);
    let look_call = |id| calls(&[(id, "look", json!({}))]);
    let script = || Script::new([look_call("c1"), look_call("c2"), say("Done.")]);
    let ask = || TurnRequest { idempotency: Some(("k".into(), "b".into())), ..question("Look twice") };
    let answered = turn_of(&home.tenure, ask(), &script(), &tools).await.unwrap();
    assert_eq!(answered.answer.usage, Some(json!({"total_tokens": 30})));
    let total = |body: &str| serde_json::from_str::<Value>(body).unwrap()["usage"]["total_tokens"].clone();
    assert_eq!(total(&answered.answer.body("x", home.now())), 30);
    let TurnStart::AlreadyAnswered { replay, .. } = home.tenure.begin_turn(&ada(), ask()).await.unwrap() else {
        panic!("expected a stored response")
    };
    assert_eq!(total(&replay.body), 30);
    // One node crashes after its second answer, and another resumes the run.
    let store = Fragile::new(home.tenure.store(), Some((4, When::Before)));
    let crashing_node = Tenure::with_store(store.clone(), Options { clock: home.clock.clone(), ..Options::default() });
    crashing_node.declare(clerk(|_| ()));
    assert!(turn_of(&crashing_node, question("Again"), &script(), &tools).await.is_err() && store.is_dead());
    home.pass(jiff::SignedDuration::from_mins(5));
    let outcomes = take_over(&home.tenure, &script(), &tools).await;
    let usage = outcomes.into_iter().next().unwrap().unwrap().answer.usage.unwrap();
    assert_eq!(usage["total_tokens"], 30, "{usage}");
}

/// The session cache is an optimization only: a run works even if it is evicted after every step.
#[tokio::test]
async fn a_run_needs_no_cache() {
    let store = Home::new("memory").await.unwrap().tenure.store().clone();
    let tenure = Tenure::with_store(store, Options { cache_bytes: 0, ..Options::default() });
    tenure.declare(clerk(|_| ()));
    let tools = Workshop::new([(read_only("look"), Does::Says("seen"))]);
    let look_call = |id| calls(&[(id, "look", json!({}))]);
    let model = Script::new([look_call("c1"), look_call("c2"), say("Done.")]);
    turn_of(&tenure, question("Look twice"), &model, &tools).await.unwrap();
    assert_eq!(model.prompts.lock().unwrap().iter().map(Vec::len).collect::<Vec<_>>(), [1, 3, 5]);
    assert_eq!(talk(&x(&tenure).await).len(), 6);
}

async fn ends_with(home: &Home, model: Script, tools: Workshop, code: &str) -> Session {
    let error = turn_of(&home.tenure, question("Do it"), &model, &tools).await.unwrap_err();
    assert_eq!(error.code(), code, "{error}");
    let s = x(&home.tenure).await;
    assert_eq!(ending(&s), (Some(RunOutcome::Failed), Some(code.to_owned())));
    assert_eq!((s.head().run.clone(), s.head().lease.clone()), (None, None));
    assert_eq!(s.runs[0].error.as_deref(), Some(error.to_string().as_str()));
    s
}

/// Each limit ends the run with its own code, and everything committed before stays stored.
#[tokio::test(flavor = "multi_thread")]
async fn every_limit_has_its_code() {
    let tool_definitions = || [(read_only("look"), Does::Says("seen")), (tool("hang"), Does::Hangs)];
    let again = || calls(&[("c1", "look", json!({}))]);
    let h = home(|a| a.runs.max_rounds = Some(2)).await;
    let s =
        ends_with(&h, Script::new([again(), again(), again()]), Workshop::new(tool_definitions()), "too_many_rounds")
            .await;
    assert_eq!(talk(&s)[1..], ["calls: c1", "tool: seen", "calls: c1", "tool: seen"]);

    let h = home(|a| a.runs.max_tokens = Some(20)).await;
    let s = ends_with(&h, Script::new([again(), again(), again()]), Workshop::new(tool_definitions()), "out_of_tokens")
        .await;
    assert_eq!(s.messages.len(), 5, "two answers of ten tokens");

    let h = home(|a| a.runs.max_time = millis(80)).await;
    let hang = calls(&[("c1", "look", json!({})), ("c2", "hang", json!({}))]);
    let s = ends_with(&h, Script::new([hang.clone()]), Workshop::new(tool_definitions()), "out_of_time").await;
    assert_eq!(talk(&s), ["user: Do it", "calls: c1 c2", "tool: seen"], "what was there is kept");

    let h = home(|a| a.runs.tool_timeout = millis(80)).await;
    let s = ends_with(&h, Script::new([hang]), Workshop::new(tool_definitions()), "tool_timeout").await;
    assert_eq!(talk(&s), ["user: Do it", "calls: c1 c2", "tool: seen"]);

    let h = home(|a| a.runs.max_result_bytes = Some(3)).await;
    let s = ends_with(&h, Script::new([again()]), Workshop::new(tool_definitions()), "result_too_large").await;
    assert_eq!(talk(&s), ["user: Do it", "calls: c1"]);
    // The session stays usable: the next question is answered.
    let model = Script::new([say("Hello.")]);
    let tools = Workshop::new(tool_definitions());
    turn_of(&h.tenure, question("And?"), &model, &tools).await.unwrap();
    assert!(is_valid(&model.prompts.lock().unwrap()[0]));
}

/// When one call ends the run, calls in flight are awaited and their results stored, because they
/// may have side effects; pending calls are not started (D-052).
#[tokio::test(flavor = "multi_thread")]
async fn other_results_are_stored_when_a_call_ends_the_run() {
    let home = home(|a| (a.runs.parallel, a.runs.max_result_bytes) = (Some(2), Some(12))).await;
    let permit = Arc::new(Semaphore::new(0));
    let tools = Workshop::new([
        (tool("big"), Does::Says("far more than twelve bytes")),
        (tool("slow"), Does::Waits(permit.clone())),
        (tool("pay"), Does::Says("paid")),
    ]);
    let model = Script::new([calls(&[("c1", "big", json!({})), ("c2", "slow", json!({})), ("c3", "pay", json!({}))])]);
    let turn = begin(&home.tenure, question("Do it")).await.unwrap();
    let (ended, ()) = tokio::join!(work(*turn, &model, &tools), async {
        until("one is done", async || tools.done("big").len() == 1).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        permit.add_permits(1);
    });
    assert_eq!(ended.unwrap_err().code(), "result_too_large");
    let s = x(&home.tenure).await;
    assert_eq!(talk(&s), ["user: Do it", "calls: c1 c2 c3", "tool: slow is done"]);
    assert_eq!((tools.done("slow").len(), tools.done("pay").len()), (1, 0));
}

/// Token and round limits apply to the whole run across nodes; the time limit excludes the time
/// spent waiting for reviews.
#[tokio::test]
async fn limits_survive_a_pause() {
    let limits = |a: &mut Assistant| {
        (a.review, a.runs.max_time) = (vec![reviewed("pay")], Some(HumanDuration::of(Duration::from_secs(600))));
        a.runs.max_tokens = Some(15);
    };
    let h = home(limits).await;
    let permit = Arc::new(Semaphore::new(0));
    let tools = Workshop::new([(tool("pay"), Does::Waits(permit.clone()))]);
    let pay = || calls(&[("c1", "pay", json!({}))]);
    let model = Script::new([pay(), pay(), say("Done.")]);
    assert!(turn_of(&h.tenure, question("Pay"), &model, &tools).await.unwrap().waiting);
    h.pass(jiff::SignedDuration::from_hours(5));
    let review = open(&x(&h.tenure).await)[0].clone();
    h.tenure.decide(&ada(), &review, &verdict(Decision::Approved)).await.unwrap();
    let (outcomes, ()) = tokio::join!(take_over(&h.tenure, &model, &tools), async {
        // Long enough for an exceeded time limit to be noticed.
        tokio::time::sleep(Duration::from_millis(30)).await;
        permit.add_permits(9);
    });
    assert!(outcomes[0].as_ref().unwrap().waiting, "it had all its time, and asked again");
    let review = open(&x(&h.tenure).await)[0].clone();
    h.tenure.decide(&ada(), &review, &verdict(Decision::Approved)).await.unwrap();
    let outcomes = take_over(&h.tenure, &model, &tools).await;
    assert_eq!(outcomes[0].as_ref().unwrap_err().code(), "out_of_tokens", "twenty were used before");
    assert_eq!(ending(&x(&h.tenure).await), (Some(RunOutcome::Failed), Some("out_of_tokens".to_owned())));
}

/// Tokens used before a crash count, whether or not a checkpoint was set since.
#[tokio::test]
async fn tokens_that_were_used_before_a_crash_count() {
    for policy in ["tool", "manual"] {
        let h = home(|_| ()).await;
        let node = |store: &Arc<dyn store::Store>| {
            let tenure = Tenure::with_store(store.clone(), Options { clock: h.clock.clone(), ..Options::default() });
            tenure.declare(clerk(|a| {
                a.runs.max_tokens = Some(10);
                a.checkpoints = Some(CheckpointPolicy::try_from(policy.to_owned()).unwrap());
            }));
            tenure
        };
        let tools = Workshop::new([(read_only("look"), Does::Says("seen"))]);
        let model = Script::new([calls(&[("c1", "look", json!({}))]), say("Done.")]);
        // Commits: the question, the answer with the call, and its result, which is lost.
        let dying = Fragile::new(h.tenure.store(), Some((2, When::Before)));
        assert!(turn_of(&node(&(dying.clone() as _)), question("Look"), &model, &tools).await.is_err());
        assert!(dying.is_dead());
        h.pass(jiff::SignedDuration::from_secs(31));
        let outcomes = take_over(&node(h.tenure.store()), &model, &tools).await;
        assert_eq!(outcomes[0].as_ref().unwrap_err().code(), "out_of_tokens", "{policy}");
        assert_eq!(model.asked(), 1, "{policy}: it is not asked once more than it may be");
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
        let h = home(|a| a.checkpoints = checkpoints).await;
        let tools = Workshop::new([(read_only("look"), Does::Says("seen"))]);
        let two = calls(&[("c1", "look", json!({})), ("c2", "look", json!({}))]);
        let model = Script::new([two, calls(&[("c3", "look", json!({}))]), say("Done.")]);
        turn_of(&h.tenure, question("Look"), &model, &tools).await.unwrap();
        let s = x(&h.tenure).await;
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
    let h = home(|a| a.checkpoints = Some(CheckpointPolicy::Every(Duration::from_secs(60)))).await;
    let permit = Arc::new(Semaphore::new(0));
    let tools = Workshop::new([(tool("slow"), Does::Waits(permit.clone()))]);
    let slow = || calls(&[("c1", "slow", json!({}))]);
    let model = Script::new([slow(), slow(), slow(), say("Done.")]);
    let turn = begin(&h.tenure, question("Go")).await.unwrap();
    let (outcome, ()) = tokio::join!(work(*turn, &model, &tools), async {
        for (n, seconds) in [(1, 61), (2, 30), (3, 31)] {
            until("it is asked", async || model.asked() == n).await;
            until("it is begun", async || x(&h.tenure).await.runs[0].tools_started.len() == n).await;
            h.pass(jiff::SignedDuration::from_secs(seconds));
            permit.add_permits(1);
        }
    });
    outcome.unwrap();
    let checkpoints: Vec<_> =
        x(&h.tenure).await.checkpoints.iter().map(|c| (c.label.to_string(), c.position)).collect();
    assert_eq!(checkpoints, [("turn-1.1".to_owned(), 3), ("turn-1.2".to_owned(), 7), ("turn-1".to_owned(), 8)]);
}

/// A manual checkpoint during a run does not disturb the numbering.
#[tokio::test(flavor = "multi_thread")]
async fn a_manual_checkpoint_during_a_run() {
    let h = home(|_| ()).await;
    let permit = Arc::new(Semaphore::new(0));
    let tools = Workshop::new([(tool("slow"), Does::Waits(permit.clone()))]);
    let slow = || calls(&[("c1", "slow", json!({}))]);
    let model = Script::new([slow(), slow(), say("Done.")]);
    let turn = begin(&h.tenure, question("Go")).await.unwrap();
    let (outcome, ()) = tokio::join!(work(*turn, &model, &tools), async {
        permit.add_permits(1);
        until("it is asked twice", async || model.asked() == 2).await;
        h.tenure.checkpoint(&ada(), &id("x"), Some(CheckpointLabel::new("mine").unwrap())).await.unwrap();
        permit.add_permits(1);
    });
    outcome.unwrap();
    let labels: Vec<_> = x(&h.tenure).await.checkpoints.iter().map(|c| c.label.to_string()).collect();
    assert_eq!(labels, ["turn-1.1", "mine", "turn-1.2", "turn-1"]);
}

/// A repeated call is answered from the cache: the tool is not called, and the log records it.
#[tokio::test]
async fn a_result_in_the_cache_is_not_fetched_again() {
    let h = home(|_| ()).await;
    let cached = Tool { cache: true, ..read_only("look") };
    let tools = Workshop::new([(cached.clone(), Does::Says("seen")), (tool("pay"), Does::Says("paid"))]);
    let look_and_pay = |id: &str, arguments: Value| calls(&[(id, "look", arguments), ("p", "pay", json!({}))]);
    let model = Script::new([
        look_and_pay("c1", json!({"a": 1, "b": 2})),
        look_and_pay("c2", json!(r#"{ "b": 2, "a": 1 }"#)),
        look_and_pay("c3", json!({"a": 2})),
        say("Done."),
    ]);
    let answered = turn_of(&h.tenure, question("Look"), &model, &tools).await.unwrap();
    assert_eq!(tools.done("look"), [json!({"a": 1, "b": 2}), json!({"a": 2})]);
    assert_eq!(tools.done("pay").len(), 3, "what has an effect is never cached");
    let s = x(&h.tenure).await;
    let ledger: Vec<_> = s.runs[0].tools_started.iter().map(|t| (t.call.as_str(), t.cached)).collect();
    assert_eq!(ledger, [("c1", false), ("p", false), ("c2", true), ("p", false), ("c3", false), ("p", false)]);
    let look_results: Vec<_> =
        answered.calls.iter().filter(|c| c.tool == "look").map(|c| (c.cached, c.content.as_deref())).collect();
    assert_eq!(look_results, [(false, Some("seen")), (true, Some("seen")), (false, Some("seen"))]);
    // The cache works across turns, failed results are not cached, and empty arguments are equal
    // however they are written.
    let bad = Workshop::new([(cached, Does::Fails("down"))]);
    let model = Script::new([
        calls(&[("c4", "look", json!({"a": 2}))]),
        calls(&[("c5", "look", json!({}))]),
        calls(&[("c6", "look", json!(""))]),
        say("Done."),
    ]);
    turn_of(&h.tenure, question("Again"), &model, &bad).await.unwrap();
    assert_eq!(bad.done("look"), [json!({}), json!({})]);
    let good = Workshop::new([(Tool { cache: true, ..read_only("look") }, Does::Says("up"))]);
    turn_of(
        &h.tenure,
        question("Again"),
        &Script::new([calls(&[("c7", "look", json!({}))]), calls(&[("c8", "look", json!(""))]), say("Done.")]),
        &good,
    )
    .await
    .unwrap();
    assert_eq!(good.done("look"), [json!({})]);
}

/// Calls of client tools are left to the client; server tools are executed first.
#[tokio::test]
async fn the_clients_own_tools() {
    let h = home(|_| ()).await;
    let tools = Workshop::new([(tool("pay"), Does::Says("paid"))]);
    let mixed = calls(&[("c1", "theirs", json!({"q": 1})), ("c2", "pay", json!({}))]);
    let model = Script::new([mixed, say("Both done.")]);
    let mut options = RawObject::default();
    options.set("tools", json!([{"type": "function", "function": {"name": "theirs"}}]));
    let run = async |ask: TurnRequest| {
        let turn = begin(&h.tenure, ask).await.unwrap();
        turn.execute(Executors::new(&model).tools(&tools).options(options.clone())).await.unwrap()
    };
    let answered = run(question("Go")).await;
    assert_eq!(answered.calls.iter().map(|c| c.call.as_str()).collect::<Vec<_>>(), ["c2"]);
    let s = x(&h.tenure).await;
    assert_eq!(talk(&s), ["user: Go", "calls: c1 c2", "tool: paid"]);
    assert_eq!(ending(&s), (Some(RunOutcome::Completed), None));
    let back =
        TurnRequest { messages: vec![Message::tool("c1", "here")], history: Some(HistoryMode::Auto), ..question("") };
    run(back).await;
    assert_eq!(talk(&x(&h.tenure).await)[3..], ["tool: here", "assistant: Both done."]);
    assert_eq!(tools.done("pay").len(), 1);
}

/// A call whose answer was lost may have been executed: unless the tool is repeatable, a review is
/// opened (D-054).
#[tokio::test]
async fn a_lost_tool_result_opens_a_review() {
    for (decision, want, times) in [
        (Decision::Approved, "tool: A reviewer confirmed that this call was executed.", 1),
        (Decision::Rejected, "tool: paid", 2),
    ] {
        let h = home(|_| ()).await;
        let lossy = Workshop::new([(tool("pay"), Does::LosesAnswer), (read_only("look"), Does::LosesAnswer)]);
        let model = Script::new([calls(&[("c1", "pay", json!({"n": 1})), ("c2", "look", json!({}))]), say("Done.")]);
        assert!(turn_of(&h.tenure, question("Pay"), &model, &lossy).await.unwrap().waiting);
        let s = x(&h.tenure).await;
        assert_eq!(s.head().status, Status::Paused);
        assert_eq!(
            talk(&s)[2..],
            ["tool: [the result of the tool call was lost: the line broke]"],
            "looking again does no harm"
        );
        let opened = &s.open_reviews().next().unwrap().opened;
        assert_eq!((opened.lost, opened.step.as_str(), &opened.detail["arguments"]), (true, "pay", &json!({"n": 1})));
        let review = opened.review.clone();
        h.tenure.decide(&ada(), &review, &verdict(decision)).await.unwrap();
        let working_tools = Workshop::new([(tool("pay"), Does::Says("paid")), (read_only("look"), Does::Says("seen"))]);
        take_over(&h.tenure, &model, &working_tools).await.pop().unwrap().unwrap();
        let s = x(&h.tenure).await;
        assert_eq!(talk(&s)[3..], [want, "assistant: Done."]);
        assert_eq!(lossy.done("pay").len() + working_tools.done("pay").len(), times);
        assert!(is_valid(&history(&s, &Window::default())));
    }
}

/// After a cancellation through another handle, everything committed before stays stored, and
/// nothing is added.
#[tokio::test(flavor = "multi_thread")]
async fn cancelled_from_another_handle() {
    for beside in [false, true] {
        let h = home(|_| ()).await;
        let permit = Arc::new(Semaphore::new(0));
        let tools =
            Workshop::new([(read_only("look"), Does::Says("seen")), (tool("slow"), Does::Waits(permit.clone()))]);
        let model = Script::new([calls(&[("c1", "look", json!({})), ("c2", "slow", json!({}))]), say("Done.")]);
        let turn = begin(&h.tenure, question("Go")).await.unwrap();
        let run = turn.run_id().clone();
        let other = if beside { h.beside() } else { h.tenure.clone() };
        let (outcome, ()) = tokio::join!(work(*turn, &model, &tools), async {
            until("the first result is kept", async || x(&h.tenure).await.messages.len() == 3).await;
            let stopped = other.cancel(&ada(), &id("x"), &run).await.unwrap();
            assert_eq!(stopped.ended.unwrap().1, RunOutcome::Cancelled);
            assert_eq!(other.cancel(&ada(), &id("x"), &run).await.unwrap().ended, stopped.ended, "once");
            // On another node, the run notices the cancellation at its next commit.
            permit.add_permits(usize::from(beside));
        });
        assert_eq!(outcome.unwrap_err().code(), if beside { "superseded" } else { "cancelled" });
        let s = x(&h.tenure).await;
        assert_eq!(talk(&s), ["user: Go", "calls: c1 c2", "tool: seen"]);
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
    let h = home(|_| ()).await;
    let tools = Workshop::new([(read_only("look"), Does::Says("seen"))]);
    let model = Script::new([calls(&[("c1", "look", json!({}))]), say("Done.")]);
    let turn = begin(&h.tenure, question("Go")).await.unwrap();
    let run = turn.run_id().clone();
    let followed = h.tenure.follow(&ada(), &id("x"), &run, 0, 100).await.unwrap();
    assert!(!followed.ended && followed.records.len() == 1, "{followed:?}");
    work(*turn, &model, &tools).await.unwrap();
    turn_of(&h.tenure, question("More"), &Script::new([say("Yes.")]), &tools).await.unwrap();
    let mut seen = Vec::new();
    let mut after = followed.records[0].seq;
    loop {
        let page = h.tenure.follow(&ada(), &id("x"), &run, after, 2).await.unwrap();
        after = page.records.last().map_or(after, |r| r.seq);
        seen.extend(page.records);
        if page.ended {
            break;
        }
    }
    assert!(matches!(&seen.last().unwrap().entry, Entry::RunEnded { run: r, .. } if *r == run), "{seen:?}");
    let all = h.beside().follow(&ada(), &id("x"), &run, 0, 100).await.unwrap();
    assert!(all.ended);
    assert_eq!(all.records[1..], seen[..]);
}

/// A fork from the middle of a turn can be continued, including calls that were not executed.
#[tokio::test]
async fn a_fork_from_the_middle_of_a_turn_can_be_continued() {
    let h = home(|_| ()).await;
    let tools = Workshop::new([(read_only("look"), Does::Says("seen")), (tool("pay"), Does::Says("paid"))]);
    let model = Script::new([calls(&[("c1", "look", json!({})), ("c2", "pay", json!({}))]), say("Done.")]);
    turn_of(&h.tenure, question("Go"), &model, &tools).await.unwrap();
    let original = x(&h.tenure).await;
    // Fork after the question, before any call was started, and after one was.
    for (at, name, waits) in [
        (Point::Position(1), "f1", false),
        (Point::Seq(original.messages[1].seq), "f2", false),
        (Point::Position(2), "f3", true),
    ] {
        h.tenure.fork(&ada(), &id("x"), Fork::at(at).id(Some(id(name)))).await.unwrap();
        let turn = h.tenure.start_run(&ada(), &id(name), OnBusy::Reject, lasting()).await.unwrap();
        let answered = work(turn, &model, &tools).await.unwrap();
        assert_eq!(answered.waiting, waits, "{name}");
        let s = h.tenure.load(&ada(), &id(name)).await.unwrap();
        if waits {
            assert_eq!(talk(&s)[2..], ["tool: seen"]);
            assert!(s.open_reviews().next().unwrap().opened.lost, "what the parent began may have happened");
        } else {
            assert_eq!(talk(&s), talk(&original), "{name}");
        }
    }
    assert_eq!(x(&h.tenure).await, original, "the parent is as it was");
}

/// A retried request whose run was taken over and completed by another node is not executed again.
#[tokio::test]
async fn an_idempotency_key_of_a_claimed_run_is_answered_once() {
    let h = home(|_| ()).await;
    let tools = Workshop::new([(tool("pay"), Does::Says("paid"))]);
    let model = Script::new([calls(&[("c1", "pay", json!({}))]), say("Done.")]);
    let keyed = || TurnRequest { idempotency: Some(("k".to_owned(), "body".to_owned())), ..question("Pay") };
    let store = Fragile::new(h.tenure.store(), None);
    let first = Tenure::with_store(store.clone(), Options { clock: h.clock.clone(), ..Options::default() });
    first.declare(clerk(|_| ()));
    let turn = begin(&first, keyed()).await.unwrap();
    store.die();
    assert!(work(*turn, &model, &tools).await.is_err());
    h.pass(jiff::SignedDuration::from_secs(31));
    take_over(&h.tenure, &model, &tools).await.pop().unwrap().unwrap();
    let before = x(&h.tenure).await;
    let TurnStart::AlreadyAnswered { replay, .. } = h.tenure.begin_turn(&ada(), keyed()).await.unwrap() else {
        panic!("the request was executed again")
    };
    let body = replay.body;
    assert!(body.contains("Done."), "{body}");
    assert_eq!((x(&h.tenure).await, tools.done("pay").len()), (before, 1));
}

/// A retried request whose run was orphaned is resumed; completed tool calls are not repeated.
#[tokio::test]
async fn an_idempotency_key_resumes_its_orphaned_run() {
    let h = home(|_| ()).await;
    let tools = Workshop::new([(tool("pay"), Does::Says("paid"))]);
    let model = Script::new([calls(&[("c1", "pay", json!({}))]), say("Done.")]);
    let keyed = || TurnRequest { idempotency: Some(("k".to_owned(), "body".to_owned())), ..question("Pay") };
    // Crashes at the commit of the last answer.
    let store = Fragile::new(h.tenure.store(), Some((3, When::Before)));
    let first = Tenure::with_store(store, Options { clock: h.clock.clone(), ..Options::default() });
    first.declare(clerk(|_| ()));
    assert!(turn_of(&first, keyed(), &model, &tools).await.is_err());
    h.pass(jiff::SignedDuration::from_secs(61));
    turn_of(&h.tenure, keyed(), &model, &tools).await.unwrap();
    let s = x(&h.tenure).await;
    assert_eq!(talk(&s), ["user: Pay", "calls: c1", "tool: paid", "assistant: Done."]);
    assert_eq!((tools.done("pay").len(), s.runs.len()), (1, 1));
    assert!(matches!(h.tenure.begin_turn(&ada(), keyed()).await.unwrap(), TurnStart::AlreadyAnswered { .. }));
}
