//! Leases: two nodes on one store, with a manual clock.

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tenure::{run::*, session::*, *};
use tokio::sync::Semaphore;

/// Another node on the same store.
fn node(test: &TestTenure, change: impl FnOnce(&mut Options)) -> Tenure {
    let mut options = Options { clock: test.clock.clone(), ..Options::default() };
    change(&mut options);
    let tenure = Tenure::with_store(test.tenure.store().clone(), options);
    tenure.declare(clerk(|_| ()));
    tenure
}

fn tools() -> CountingTools {
    CountingTools::new([
        (read_only_tool("look"), ToolBehavior::succeeds("seen")),
        (tool("pay"), ToolBehavior::succeeds("paid")),
    ])
}

fn script() -> [serde_json::Value; 2] {
    [tool_calls_answer(&[("c1", "look", json!({})), ("c2", "pay", json!({}))]), text_answer("Done.")]
}

on_every_store! {
    /// A node whose lease has expired and whose run was taken over cannot commit any more; the
    /// other node completes the run.
    async fn a_node_that_lost_its_lease_is_superseded(test: &mut TestTenure) {
        let (a, b) = (node(test, |_| ()), node(test, |_| ()));
        let (held, tools) = (Arc::new(Semaphore::new(0)), tools());
        let (slow, quick) = (ScriptedModel::with_permits(script(), &held), ScriptedModel::new(script()));
        let turn = begin(&a, question("Go")).await.unwrap();
        assert!(b.find_orphaned_runs(9).await.unwrap().is_empty(), "somebody works on it");
        let head = b.head(&ada(), &id("x")).await.unwrap();
        assert!(b.claim_orphaned_run(&head).await.unwrap().is_none(), "nor can it be taken");
        let (lost, ()) = tokio::join!(execute(*turn, &slow, &tools), async {
            wait_until("it is asked", async || slow.call_count() == 1).await;
            test.advance(SignedDuration::from_secs(31));
            let outcomes = take_over(&b, &quick, &tools).await;
            assert!(!outcomes[0].as_ref().unwrap().waiting);
            held.add_permits(9);
        });
        assert_eq!(lost.unwrap_err().code(), "superseded");
        let s = session_x(&a).await;
        assert_eq!(conversation(&s), ["user: Go", "calls: c1 c2", "tool: seen", "tool: paid", "assistant: Done."]);
        assert_eq!((ending(&s), s.runs.len(), tools.calls("pay").len()), ((Some(RunOutcome::Completed), None), 1, 1));
        assert_eq!(session_x(&b).await, s);
    }

    /// A node that lost its lease while the other one is still working cannot commit either,
    /// whichever finishes first.
    async fn a_node_that_lost_its_lease_commits_nothing(test: &mut TestTenure) {
        let (a, b) = (node(test, |_| ()), node(test, |_| ()));
        let (first, second, tools) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)), tools());
        let (slow, slower) = (ScriptedModel::with_permits(script(), &first), ScriptedModel::with_permits(script(), &second));
        let turn = begin(&a, question("Go")).await.unwrap();
        let taken_over = async {
            wait_until("it is asked", async || slow.call_count() == 1).await;
            test.advance(SignedDuration::from_secs(31));
            take_over(&b, &slower, &tools).await
        };
        let lost = async {
            let lost = execute(*turn, &slow, &tools).await;
            second.add_permits(9);
            lost
        };
        let release_first = async {
            wait_until("the other is asked", async || slower.call_count() == 1).await;
            first.add_permits(9);
        };
        let (lost, taken_over, ()) = tokio::join!(lost, taken_over, release_first);
        assert_eq!(lost.unwrap_err().code(), "superseded");
        assert!(!taken_over[0].as_ref().unwrap().waiting);
        let s = session_x(&a).await;
        assert_eq!(conversation(&s), ["user: Go", "calls: c1 c2", "tool: seen", "tool: paid", "assistant: Done."]);
        assert_eq!((ending(&s), tools.calls("pay").len()), ((Some(RunOutcome::Completed), None), 1));
    }

    /// A node that was suspended between tool calls starts no further call before it has verified
    /// that it still holds the run.
    async fn a_node_that_lost_its_lease_makes_no_further_call(test: &mut TestTenure) {
        let (a, b) = (node(test, |_| ()), node(test, |_| ()));
        a.declare(clerk(|c| c.runs.parallel = Some(2)));
        let (never, held) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let suspended_tools = [(read_only_tool("look"), ToolBehavior::WaitsForPermit(never)), (read_only_tool("see"), ToolBehavior::WaitsForPermit(held.clone())), (tool("pay"), ToolBehavior::succeeds("paid"))];
        let working_tools = [(read_only_tool("look"), ToolBehavior::succeeds("seen")), (read_only_tool("see"), ToolBehavior::succeeds("seen")), (tool("pay"), ToolBehavior::succeeds("paid"))];
        let (suspended_tools, working_tools) = (CountingTools::new(suspended_tools), CountingTools::new(working_tools));
        let script_of_three_calls = || [tool_calls_answer(&[("c1", "look", json!({})), ("c2", "see", json!({})), ("c3", "pay", json!({}))]), text_answer("Done.")];
        let (model, other) = (ScriptedModel::new(script_of_three_calls()), ScriptedModel::new([text_answer("Done.")]));
        let turn = begin(&a, question("Go")).await.unwrap();
        let (lost, ()) = tokio::join!(execute(*turn, &model, &suspended_tools), async {
            wait_until("two are under way", async || suspended_tools.max_concurrent() == 2).await;
            test.advance(SignedDuration::from_secs(31));
            let outcomes = take_over(&b, &other, &working_tools).await;
            assert!(outcomes[0].as_ref().unwrap().waiting, "whether it was paid is for a person to say");
            held.add_permits(1);
        });
        assert_eq!(lost.unwrap_err().code(), "superseded");
        assert_eq!(suspended_tools.calls("pay").len(), 0);
        // With change notifications, it may have stopped earlier.
        assert!(suspended_tools.calls("see").len() == 1 || test.url().starts_with("postgres"));
    }

    /// The lease is renewed during the run: the log does not grow, and no other node takes over.
    async fn a_lease_is_renewed(test: &mut TestTenure) {
        let short = |o: &mut Options| o.limits.lease = Duration::from_millis(60);
        let (a, b) = (node(test, short), node(test, short));
        let (held, tools) = (Arc::new(Semaphore::new(0)), tools());
        let model = ScriptedModel::with_permits(script(), &held);
        let turn = begin(&a, question("Go")).await.unwrap();
        let (outcome, ()) = tokio::join!(execute(*turn, &model, &tools), async {
            let lease = async || b.head(&ada(), &id("x")).await.unwrap().lease.unwrap();
            let first = lease().await;
            let before = b.head(&ada(), &id("x")).await.unwrap().seq;
            for _ in 0..3 {
                test.advance(SignedDuration::from_millis(50));
                wait_until("it is renewed", async || lease().await.until >= test.now() + SignedDuration::from_millis(60)).await;
                assert!(b.find_orphaned_runs(9).await.unwrap().is_empty());
            }
            let now = lease().await;
            assert_eq!((&now.node, &now.run), (&first.node, &first.run));
            assert_eq!(b.head(&ada(), &id("x")).await.unwrap().seq, before, "the log has not grown");
            held.add_permits(9);
        });
        outcome.unwrap();
        assert_eq!(b.head(&ada(), &id("x")).await.unwrap().lease, None);
    }

    /// A node with a stale cached head does not rely on the lease in it.
    async fn a_stale_lease_in_the_cache_is_ignored(test: &mut TestTenure) {
        let short = |o: &mut Options| (o.limits.lease, o.limits.max_wait) = (Duration::from_millis(60), Duration::from_millis(100));
        let (a, b) = (node(test, short), node(test, short));
        let (held, tools) = (Arc::new(Semaphore::new(0)), tools());
        let model = ScriptedModel::with_permits(script(), &held);
        // A run that can be taken over, and one that cannot.
        for resumable in [resumable(), None] {
            let turn = begin(&a, TurnRequest { resumable, ..question("Go") }).await.unwrap();
            let (outcome, ()) = tokio::join!(execute(*turn, &model, &tools), async {
                session_x(&b).await;
                for _ in 0..4 {
                    test.advance(SignedDuration::from_millis(50));
                    let renewed = async || b.head(&ada(), &id("x")).await.unwrap().lease.unwrap().until;
                    wait_until("it is renewed", async || renewed().await >= test.now() + SignedDuration::from_millis(60)).await;
                }
                for on_busy in [OnBusy::Reject, OnBusy::Queue] {
                    let busy = b.begin_turn(&ada(), TurnRequest { on_busy, ..question("Me too") }).await;
                    assert_eq!(busy.unwrap_err().code(), "busy", "{on_busy:?}");
                }
                // An unrelated write must not store the stale lease.
                let title = SessionPatch { title: Patch::Set("t".into()), ..SessionPatch::default() };
                b.update(&ada(), &id("x"), title).await.unwrap();
                let lease_end = b.head(&ada(), &id("x")).await.unwrap().lease.unwrap().until;
                assert!(lease_end > test.now(), "the lease was cut short");
                assert!(b.find_orphaned_runs(9).await.unwrap().is_empty());
                held.add_permits(2);
            });
            outcome.unwrap();
        }
    }

    /// One request sent to two nodes concurrently is executed once, whatever its policy for busy
    /// sessions.
    async fn the_same_idempotency_key_at_two_nodes_runs_once(test: &mut TestTenure) {
        for on_busy in [OnBusy::Queue, OnBusy::Interrupt, OnBusy::Branch] {
            let (a, b) = (node(test, |_| ()), node(test, |_| ()));
            let (held, tools) = (Arc::new(Semaphore::new(0)), tools());
            let model = Arc::new(ScriptedModel::with_permits(script(), &held));
            let key = format!("{on_busy:?}");
            let keyed = || TurnRequest { session: Some(id(&key)), on_busy, idempotency: Some((key.clone(), "body".to_owned())), ..question("Go") };
            let turn = begin(&a, keyed()).await.unwrap();
            let second = {
                let b = b.clone();
                let ask = keyed();
                tokio::spawn(async move { b.begin_turn(&ada(), ask).await })
            };
            let (first, ()) = tokio::join!(execute(*turn, &model, &tools), async {
                wait_until("it is asked", async || model.call_count() == 1).await;
                tokio::time::sleep(Duration::from_millis(50)).await; // observation window: it waits
                assert!(!second.is_finished(), "{on_busy:?}: it waits");
                held.add_permits(9);
            });
            first.unwrap();
            let TurnStart::AlreadyAnswered { replay, session_id, .. } = second.await.unwrap().unwrap() else { panic!("{on_busy:?}: twice") };
            assert!(replay.body.contains("Done.") && session_id == id(&key), "{on_busy:?}");
            assert_eq!((model.call_count(), tools.calls("pay").len()), (2, 1), "{on_busy:?}");
        }
    }
}

/// However the clocks jump, two nodes never both commit their answers.
#[tokio::test(flavor = "multi_thread")]
async fn only_one_node_commits_after_a_clock_jump() {
    for (jump_a, jump_b) in [(1200, 0), (-1200, 0), (0, 1200), (0, -1200), (1200, -1200), (-1200, 1200)] {
        let test = TestTenure::new(StoreKind::Memory).await.unwrap();
        let node_with_clock = |clock: &Clock| {
            let tenure =
                Tenure::with_store(test.tenure.store().clone(), Options { clock: clock.clone(), ..Options::default() });
            tenure.declare(clerk(|_| ()));
            tenure
        };
        let (clock_a, clock_b) = (Clock::manual(test.now()), Clock::manual(test.now()));
        let (a, b) = (node_with_clock(&clock_a), node_with_clock(&clock_b));
        let (held, tools) = (Arc::new(Semaphore::new(0)), tools());
        let (slow, quick) = (ScriptedModel::with_permits(script(), &held), ScriptedModel::new(script()));
        let turn = begin(&a, question("Go")).await.unwrap();
        let (first, second) = tokio::join!(execute(*turn, &slow, &tools), async {
            wait_until("it is asked", async || slow.call_count() == 1).await;
            clock_a.jump(SignedDuration::from_secs(jump_a));
            clock_b.jump(SignedDuration::from_secs(jump_b));
            let second = take_over(&b, &quick, &tools).await;
            held.add_permits(9);
            second
        });
        let committed = usize::from(first.is_ok()) + second.iter().filter(|r| r.is_ok()).count();
        assert_eq!(committed, 1, "{jump_a} {jump_b}: {first:?} {second:?}");
        let s = session_x(&b).await;
        assert_eq!(conversation(&s), ["user: Go", "calls: c1 c2", "tool: seen", "tool: paid", "assistant: Done."]);
        assert_eq!(tools.calls("pay").len(), 1);
    }
}

/// The policies for a request to a session that is busy on another node.
#[tokio::test(flavor = "multi_thread")]
async fn busy_at_another_node() {
    for on_busy in [OnBusy::Queue, OnBusy::Reject, OnBusy::Interrupt, OnBusy::Branch] {
        let test = TestTenure::new(StoreKind::Memory).await.unwrap();
        let (a, b) = (node(&test, |_| ()), node(&test, |_| ()));
        let (held, tools) = (Arc::new(Semaphore::new(0)), tools());
        run_turn(&a, question("Before"), &ScriptedModel::new([text_answer("Yes?")]), &tools).await.unwrap();
        let (slow, quick) =
            (ScriptedModel::with_permits([text_answer("First.")], &held), ScriptedModel::new([text_answer("Second.")]));
        let turn = begin(&a, question("One")).await.unwrap();
        let (first, second) = tokio::join!(execute(*turn, &slow, &tools), async {
            wait_until("it is asked", async || slow.call_count() == 1).await;
            let second = TurnRequest { on_busy, ..question("Two") };
            match on_busy {
                OnBusy::Queue => {
                    let turn = tokio::spawn({
                        let b = b.clone();
                        async move { begin(&b, second).await }
                    });
                    tokio::time::sleep(Duration::from_millis(60)).await; // observation window: it waits
                    assert!(!turn.is_finished());
                    held.add_permits(9);
                    Ok(turn.await.unwrap().unwrap())
                }
                _ => {
                    let turn = begin(&b, second).await;
                    held.add_permits(9);
                    turn
                }
            }
        });
        let session = second.as_ref().map(|t| t.session_id().clone()).ok();
        let second = match second {
            Ok(turn) => execute(*turn, &quick, &tools).await.map(drop).map_err(|e| e.code()),
            Err(e) => Err(e.code()),
        };
        let (first, s) = (first.map(drop).map_err(|e| e.code()), session_x(&a).await);
        let first_turn = ["user: Before", "assistant: Yes?"];
        match on_busy {
            OnBusy::Queue => {
                assert_eq!((first, second), (Ok(()), Ok(())));
                assert_eq!(
                    conversation(&s)[2..],
                    ["user: One", "assistant: First.", "user: Two", "assistant: Second."]
                );
            }
            OnBusy::Reject => {
                assert_eq!((first, second), (Ok(()), Err("busy")));
                assert_eq!(conversation(&s)[2..], ["user: One", "assistant: First."]);
            }
            OnBusy::Interrupt => {
                assert_eq!((first, second), (Err("superseded"), Ok(())));
                assert_eq!(conversation(&s)[2..], ["user: One", "user: Two", "assistant: Second."]);
                let stopped = s.runs.iter().find(|r| r.code.is_some()).unwrap();
                assert_eq!(
                    (stopped.code.as_deref(), stopped.ended.unwrap().1),
                    (Some("interrupted"), RunOutcome::Cancelled)
                );
            }
            OnBusy::Branch => {
                assert_eq!((first, second), (Ok(()), Ok(())));
                assert_eq!(conversation(&s)[2..], ["user: One", "assistant: First."]);
                let fork = a.load(&ada(), &session.unwrap()).await.unwrap();
                assert_eq!(conversation(&fork), [&first_turn[..], &["user: Two", "assistant: Second."]].concat());
                assert_eq!(fork.head().parent.as_ref().unwrap().session, id("x"));
            }
        }
        assert_eq!(conversation(&s)[..2], first_turn);
    }
}

/// Many active runs do not hide the few orphaned ones.
#[tokio::test]
async fn orphaned_runs_are_found_among_many() {
    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    let (a, b) = (node(&test, |_| ()), node(&test, |_| ()));
    let request = |n: usize| TurnRequest { session: Some(id(&format!("s{n}"))), ..question("Go") };
    drop(begin(&a, request(0)).await.unwrap());
    test.advance(SignedDuration::from_secs(31));
    let mut active_runs = Vec::new();
    for n in 1..9 {
        active_runs.push(begin(&a, request(n)).await.unwrap());
    }
    let orphaned: Vec<_> = b.find_orphaned_runs(3).await.unwrap().into_iter().map(|h| h.info.session_id).collect();
    assert_eq!(orphaned, [id("s0")]);
}

/// A run that cannot be resumed without its client is ended with a reason (D-043).
#[tokio::test]
async fn a_run_that_can_not_be_resumed_is_ended() {
    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    let (a, b) = (node(&test, |_| ()), node(&test, |_| ()));
    drop(begin(&a, TurnRequest { resumable: None, ..question("Go") }).await.unwrap());
    test.advance(SignedDuration::from_secs(31));
    assert!(take_over(&b, &ScriptedModel::new([]), &tools()).await.is_empty());
    assert_eq!(ending(&session_x(&b).await), (Some(RunOutcome::Failed), Some("abandoned".to_owned())));
    // Of two nodes that see it concurrently, only one gets it.
    drop(begin(&a, question("Again")).await.unwrap());
    test.advance(SignedDuration::from_secs(31));
    let head = b.find_orphaned_runs(9).await.unwrap().pop().unwrap();
    let (one, other) = tokio::join!(a.claim_orphaned_run(&head), b.claim_orphaned_run(&head));
    assert_eq!([one, other].into_iter().filter(|t| t.as_ref().unwrap().is_some()).count(), 1);
}

/// A run that is cancelled from another node stops immediately, in the middle of an answer, without
/// waiting for the lease renewal.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_cancelled_on_another_node_stops_at_once() {
    let Some(test) = TestTenure::new(StoreKind::Postgres).await else { return };
    let long = |o: &mut Options| o.limits.lease = Duration::from_hours(3);
    let a = node(&test, long);
    let b = Tenure::open_with(test.url(), Options { clock: test.clock.clone(), ..Options::default() }).await.unwrap();
    let blocked_model = ScriptedModel::with_permits(script(), &Arc::new(Semaphore::new(0)));
    let turn = begin(&a, question("Go")).await.unwrap();
    let run = turn.run_id().clone();
    let tools = tools();
    let (stopped, ()) = tokio::join!(execute(*turn, &blocked_model, &tools), async {
        wait_until("it is asked", async || blocked_model.call_count() == 1).await;
        b.cancel(&ada(), &id("x"), &run).await.unwrap();
    });
    assert_eq!(stopped.unwrap_err().code(), "superseded");
    assert_eq!(ending(&session_x(&a).await), (Some(RunOutcome::Cancelled), Some("cancelled".to_owned())));
}
