//! Crash simulation: a run with tools and a review is killed before and after every commit, under
//! every checkpoint policy. The node that takes it over reaches the same result, and no tool with
//! side effects is executed twice.

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use tenure::store::Store;
use tenure::{log::*, policy::*, review::*, rules::*, run::*, session::*, *};

/// The observable result of a session, without ids and times.
#[derive(Clone, Debug, PartialEq)]
struct Observed {
    messages: Vec<String>,
    decisions: Vec<(String, Decision)>,
    outcome: RunOutcome,
    executed: BTreeMap<String, usize>,
}

struct Simulation {
    store: Arc<dyn Store>,
    clock: Clock,
    policy: &'static str,
    /// Number of turns in the prompt window.
    window: usize,
    tools: CountingTools,
    model: ScriptedModel,
    /// Number of reviews opened because the outcome of a call was lost.
    lost: usize,
    _test_store: TestStore,
}

/// One round of concurrent calls, of which `mail` requires review; a second round that reuses call
/// ids; and an answer.
fn script() -> ScriptedModel {
    ScriptedModel::new([
        tool_calls_answer(&[
            ("c1", "look", json!({"n": 1})),
            ("c2", "pay", json!({"n": 1})),
            ("c3", "mail", json!({"n": 1})),
            ("c4", "set", json!({"n": 1})),
            ("c5", "fly", json!({})),
        ]),
        tool_calls_answer(&[("c2", "pay", json!({"n": 2})), ("c1", "look", json!({"n": 2}))]),
        text_answer("All is done."),
    ])
}

impl Simulation {
    /// Creates a session, with a long history if the prompt window is small.
    async fn new(kind: StoreKind, policy: &'static str, window: usize) -> Self {
        let test = TestTenure::new(kind).await.unwrap();
        let tools = CountingTools::new([
            (read_only_tool("look"), ToolBehavior::succeeds("seen")),
            (tool("pay"), ToolBehavior::succeeds("paid")),
            (tool("mail"), ToolBehavior::succeeds("sent")),
            (Tool { idempotent: true, ..tool("set") }, ToolBehavior::succeeds("set")),
        ]);
        let TestTenure { tenure, clock, store: test_store } = test;
        let store = tenure.store().clone();
        let simulation =
            Self { store, clock, policy, window, tools, model: script(), lost: 0, _test_store: test_store };
        let node = simulation.node(&simulation.store);
        node.create(&ada(), NewSession { assistant: Some("clerk".into()), ..new_session("x") }).await.unwrap();
        if window < 50 {
            let long_history =
                (0..150).flat_map(|n| [Message::user(&format!("{n}?")), Message::assistant(&format!("{n}!"))]);
            let messages = [Message::system("Be brief.")].into_iter().chain(long_history);
            node.append(&ada(), &id("x"), messages.collect::<Vec<_>>()).await.unwrap();
        }
        simulation
    }

    /// A node on the given store, which may be a wrapper around the shared one.
    fn node(&self, store: &Arc<dyn Store>) -> Tenure {
        let tenure = Tenure::with_store(store.clone(), Options { clock: self.clock.clone(), ..Options::default() });
        let checkpoints = Some(CheckpointPolicy::try_from(self.policy.to_owned()).unwrap());
        tenure.declare(clerk(|a| {
            (a.review, a.checkpoints) = (vec![reviewed("mail")], checkpoints);
            a.short_term.max_history_turns = Some(self.window);
        }));
        tenure
    }

    /// Simulates one process until it crashes: starts the run if it does not exist, takes over an
    /// orphaned run, decides open reviews. Returns whether the run has ended.
    async fn run_until_crash(&mut self, tenure: &Tenure) -> Result<bool, TurnError> {
        // Inspect the session through another node, so that this process caches no more than it
        // needs.
        let observer = self.node(&self.store);
        for _ in 0..20 {
            let s = observer.load(&ada(), &id("x")).await?;
            if s.runs.last().is_some_and(|r| r.ended.is_some()) {
                return Ok(true);
            }
            if s.runs.is_empty() {
                run_turn(tenure, question("Do all of it"), &self.model, &self.tools).await?;
                continue;
            }
            for review in s.open_reviews().map(|r| r.opened.clone()) {
                let decision = if review.lost { self.actual_decision(&review) } else { Decision::Approved };
                self.lost += usize::from(review.lost);
                tenure.decide(&ada(), &review.review, &review_input(decision)).await?;
            }
            for head in tenure.find_orphaned_runs(9).await? {
                if let Some(turn) = tenure.claim_orphaned_run(&head).await? {
                    execute(turn, &self.model, &self.tools).await?;
                }
            }
        }
        Ok(false)
    }

    /// The decision that matches whether the tool was actually executed.
    fn actual_decision(&self, review: &ReviewOpened) -> Decision {
        if self.tools.calls(&review.step).contains(&review.detail["arguments"]) {
            Decision::Approved
        } else {
            Decision::Rejected
        }
    }

    async fn observe(&self) -> Observed {
        let tenure = self.node(&self.store);
        let s = session_x(&tenure).await;
        let log = tenure.store().records(&s.head().key(), &tenure::store::RecordRange::after(0)).await.unwrap();
        assert!(log.iter().map(|r| r.seq).eq(1..=s.head().seq), "the log has no hole");
        let rebuilt = Session::replay(&s.head().key(), log).unwrap();
        let without_lease = |h: &Head| Head { due_at: None, lease: None, ..h.clone() };
        assert_eq!(without_lease(rebuilt.head()), without_lease(s.head()), "the card follows from the log");
        assert_eq!(s.head().status, Status::Active);
        assert_eq!((s.head().run.clone(), s.head().lease.clone(), s.head().reviews.len()), (None, None, 0));
        assert!(is_valid(&history(&s, &Window::default())));
        let decided = s.reviews.iter().filter(|r| !r.opened.lost).filter_map(|r| Some((r, r.decided.as_ref()?)));
        Observed {
            messages: messages_in_call_order(&s),
            decisions: decided.map(|(r, (_, d))| (r.opened.step.clone(), d.decision)).collect(),
            outcome: s.runs.last().unwrap().ended.unwrap().1,
            executed: self.tools.counts(),
        }
    }
}

/// The messages in call order. A result that was delayed by a review is moved next to the results
/// of the other calls.
fn messages_in_call_order(session: &Session) -> Vec<String> {
    let (mut ordered, mut calls) = (Vec::new(), Vec::new());
    for (position, (text, message)) in conversation(session).into_iter().zip(&session.messages).enumerate() {
        if !message.message.tool_calls().is_empty() {
            calls = message.message.tool_calls().into_iter().map(|c| (position, c.id)).collect();
        }
        let result = message.message.tool_call_id();
        let call_index = calls.iter().position(|(_, id)| result.as_ref() == Some(id));
        ordered.push((call_index.map_or((position, 0), |i| (calls[i].0, i + 1)), text));
    }
    ordered.sort();
    ordered.into_iter().map(|(_, text)| text).collect()
}

/// Compares with the result without a crash. A lost result may be replaced by the reviewer's
/// confirmation, at most once per review.
fn compare(crash_point: &str, mut got: Observed, want: &Observed, lost: usize) {
    let mut confirmed = 0;
    for (got, want) in got.messages.iter_mut().zip(&want.messages) {
        if got == "tool: A reviewer confirmed that this call was executed." && want.starts_with("tool: ") {
            confirmed += 1;
            got.clone_from(want);
        }
    }
    assert!(confirmed <= lost, "{crash_point}: {confirmed} results were confirmed by a person, in {lost} reviews");
    for (call, times) in &mut got.executed {
        let harmless = call.starts_with("look") || call.starts_with("set");
        assert!(*times == 1 || harmless, "{crash_point}: {call} was done {times} times");
        *times = 1;
    }
    assert_eq!(got, *want, "{crash_point}");
}

async fn crashes_at_every_commit(kind: StoreKind, policies: &[&'static str], window: usize, twice: bool) {
    for policy in policies {
        let mut simulation = Simulation::new(kind, policy, window).await;
        let counted = FailingStore::new(&simulation.store, None);
        let node = simulation.node(&(counted.clone() as Arc<dyn Store>));
        assert!(simulation.run_until_crash(&node).await.unwrap());
        let want = simulation.observe().await;
        let commits = counted.commits();
        assert_eq!((want.outcome, want.decisions.len(), simulation.lost), (RunOutcome::Completed, 1, 0));
        assert_eq!(want.executed.len(), 6, "{want:?}");
        assert!(commits > 8, "{commits}");
        let mut lost_calls = 0;
        for commit in 0..commits {
            for failure_point in [FailurePoint::BeforeCommit, FailurePoint::AfterCommit] {
                let second_commits = if twice { 0..commits } else { 0..1 };
                for second_commit in second_commits {
                    let mut simulation = Simulation::new(kind, policy, window).await;
                    let crash_point = format!(
                        "{kind:?}, {policy}: dies at commit {commit}, {failure_point:?}; and again at {second_commit} ({twice})"
                    );
                    let mut crashes = vec![Some((commit, failure_point))];
                    crashes.extend(twice.then_some(Some((second_commit, failure_point))));
                    crashes.push(None);
                    let mut ended = false;
                    for (n, crash) in crashes.into_iter().enumerate() {
                        let store = FailingStore::new(&simulation.store, crash);
                        let node = simulation.node(&(store.clone() as Arc<dyn Store>));
                        match simulation.run_until_crash(&node).await {
                            Ok(has_ended) => ended = has_ended,
                            Err(e) => assert!(store.has_failed(), "{crash_point}: {e}"),
                        }
                        // The resuming node reads the prompt window, not the whole history (D-014).
                        let read = store.records_read();
                        let starts_run = n == 0 || (commit == 0 && failure_point == FailurePoint::BeforeCommit);
                        assert!(starts_run || window == 50 || read < 150, "{crash_point}: {read} records were read");
                        simulation.clock.advance(SignedDuration::from_secs(31));
                    }
                    assert!(ended, "{crash_point}: the run never ended");
                    compare(&crash_point, simulation.observe().await, &want, simulation.lost);
                    lost_calls += simulation.lost;
                }
            }
        }
        assert!(lost_calls > 0, "somewhere a person must have been asked whether something was done");
    }
}

#[tokio::test]
async fn a_run_that_crashes_anywhere_ends_the_same_in_memory() {
    crashes_at_every_commit(StoreKind::Memory, &["tool", "step", "60s", "manual"], 50, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_crashes_anywhere_ends_the_same_on_sqlite() {
    crashes_at_every_commit(StoreKind::Sqlite, &["tool", "step", "60s", "manual"], 50, false).await;
}

#[tokio::test]
async fn a_run_that_crashes_twice_ends_the_same() {
    crashes_at_every_commit(StoreKind::Memory, &["tool"], 50, true).await;
}

/// Crash simulation in a long session, of which the resuming node reads only the most recent part.
#[tokio::test]
async fn a_run_that_crashes_anywhere_in_a_long_session_ends_the_same() {
    crashes_at_every_commit(StoreKind::Memory, &["tool", "step", "60s", "manual"], 2, false).await;
    crashes_at_every_commit(StoreKind::Memory, &["tool"], 2, true).await;
}

on_every_store! {
    /// The cost of resuming depends on the prompt window, not on the length of the history, and the
    /// prompt is the same as without a crash (D-014).
    async fn resuming_in_a_long_session_reads_only_the_prompt_window(test: &mut TestTenure) {
        let tools = CountingTools::new([(tool("mail"), ToolBehavior::succeeds("sent"))]);
        let model = ScriptedModel::new([tool_calls_answer(&[("c1", "mail", json!({}))]), text_answer("Done.")]);
        let declared = || clerk(|a| {
            a.review = vec![reviewed("mail")];
            a.short_term.max_history_turns = Some(3);
        });
        let node = |store: &Arc<dyn Store>| {
            let tenure = Tenure::with_store(store.clone(), Options { clock: test.clock.clone(), ..Options::default() });
            tenure.declare(declared());
            tenure
        };
        let (store, window) = (test.tenure.store().clone(), Window { max_turns: Some(3), max_tokens: None });
        let first = node(&store);
        first.create(&ada(), NewSession { assistant: Some("clerk".into()), ..new_session("x") }).await.unwrap();
        first.append(&ada(), &id("x"), vec![Message::system("Be brief.")]).await.unwrap();
        for n in 0..200 {
            let messages = vec![Message::user(&format!("{n}?")), Message::assistant(&format!("{n}!"))];
            first.append(&ada(), &id("x"), messages).await.unwrap();
        }
        drop(begin(&first, question("Mail it")).await.unwrap());
        test.advance(SignedDuration::from_secs(31));

        let counting = || FailingStore::new(&store, None);
        let assert_few_reads = |counted: &FailingStore, operation| {
            let read = counted.records_read();
            assert!(read > 0 && read < 150, "{operation}: {read} records were read");
        };
        // A node without cache takes over the run and opens a review.
        let second = counting();
        let outcomes = take_over(&node(&(second.clone() as Arc<dyn Store>)), &model, &tools).await;
        assert!(outcomes[0].as_ref().unwrap().waiting);
        assert_few_reads(&second, "taking over");
        let s = session_x(&first).await;
        assert!(s.head().seq > 600);
        assert_eq!(model.last_prompt(), ["Be brief.", "198?", "198!", "199?", "199!", "Mail it"]);

        // One node decides the review, and another resumes the run.
        let third = counting();
        let review = open(&s).pop().unwrap();
        let deciding_node = node(&(third.clone() as Arc<dyn Store>));
        deciding_node.decide(&ada(), &review, &review_input(Decision::Approved)).await.unwrap();
        assert_few_reads(&third, "deciding");
        let again = deciding_node.decide(&ada(), &review, &review_input(Decision::Rejected)).await;
        assert!(matches!(again, Err(Error::Decided { .. })), "{again:?}");
        let fourth = counting();
        let outcomes = take_over(&node(&(fourth.clone() as Arc<dyn Store>)), &model, &tools).await;
        assert!(!outcomes[0].as_ref().unwrap().waiting);
        assert_few_reads(&fourth, "going on");
        let s = session_x(&first).await;
        let last_prompt: Vec<Message> = model.prompts().last().unwrap().clone();
        let mut expected_prompt = history(&s, &window);
        assert_eq!(expected_prompt.pop().map(|m| m.text()), Some("Done.".to_owned()));
        assert_eq!(last_prompt, expected_prompt);
        assert_eq!((ending(&s), tools.calls("mail").len()), ((Some(RunOutcome::Completed), None), 1));
        assert_eq!(session_x(&deciding_node).await, s, "who knew a part of it finds all of it");

        // A run started without input also reads only the recent part.
        first.append(&ada(), &id("x"), vec![Message::user("And now?")]).await.unwrap();
        let fifth = counting();
        let fresh = node(&(fifth.clone() as Arc<dyn Store>));
        let turn = fresh.start_run(&ada(), &id("x"), OnBusy::Queue, resumable()).await.unwrap();
        execute(turn, &ScriptedModel::new([text_answer("Nothing.")]), &tools).await.unwrap();
        assert_few_reads(&fifth, "a run of its own");

        // A larger prompt window reads more.
        fresh.declare(clerk(|a| a.short_term.max_history_turns = Some(150)));
        fresh.append(&ada(), &id("x"), vec![Message::user("All of it?")]).await.unwrap();
        let turn = fresh.start_run(&ada(), &id("x"), OnBusy::Queue, resumable()).await.unwrap();
        let long_prompt_model = ScriptedModel::new([text_answer("Yes.")]);
        execute(turn, &long_prompt_model, &tools).await.unwrap();
        assert_eq!(long_prompt_model.last_prompt().iter().filter(|text| text.ends_with('?')).count(), 149, "and one without");

        // A review decided long ago is still known as decided.
        let more_messages = (0..100).flat_map(|_| [Message::user("on"), Message::assistant("and on")]);
        first.append(&ada(), &id("x"), more_messages.collect::<Vec<_>>()).await.unwrap();
        let late = node(&store).decide(&ada(), &review, &review_input(Decision::Rejected)).await;
        assert!(matches!(late, Err(Error::Decided { .. })), "{late:?}");

        // Messages discarded by another node are not shown by a node that has a part of them
        // cached.
        let caching_node = node(&store);
        drop(begin(&first, question("Once more")).await.unwrap());
        test.advance(SignedDuration::from_secs(31));
        let head = caching_node.find_orphaned_runs(1).await.unwrap().pop().unwrap();
        let turn = caching_node.claim_orphaned_run(&head).await.unwrap().unwrap();
        first.rewind(&ada(), &id("x"), Point::Position(4)).await.unwrap();
        let model = ScriptedModel::new([text_answer("Again 1.")]);
        execute(turn, &model, &tools).await.unwrap();
        assert_eq!(model.last_prompt(), ["Be brief.", "0?", "0!", "1?"]);
        let s = session_x(&caching_node).await;
        assert_eq!(s, session_x(&first).await);
        assert_eq!(conversation(&s)[1..], ["user: 0?", "assistant: 0!", "user: 1?", "assistant: Again 1."]);
    }
}
