//! Crash simulation: a run with tools and a review is killed before and after every commit, under
//! every checkpoint policy. The node that takes it over reaches the same result, and no tool with
//! side effects is executed twice.

use crate::hands::*;
use crate::on_every_store;
use crate::places::*;
use jiff::SignedDuration;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use tenure::store::Store;
use tenure::*;

/// The observable result of a session, without ids and times.
#[derive(Clone, Debug, PartialEq)]
struct Story {
    talk: Vec<String>,
    decisions: Vec<(String, Decision)>,
    outcome: RunOutcome,
    done: BTreeMap<String, usize>,
}

struct World {
    store: Arc<dyn Store>,
    clock: Clock,
    policy: &'static str,
    /// Number of turns in the prompt window.
    window: usize,
    tools: Workshop,
    model: Script,
    /// Number of reviews opened because the outcome of a call was lost.
    lost: usize,
    _dir: Option<tempfile::TempDir>,
}

/// One round of concurrent calls, of which `mail` requires review; a second round that reuses call
/// ids; and an answer.
fn script() -> Script {
    Script::new([
        calls(&[
            ("c1", "look", json!({"n": 1})),
            ("c2", "pay", json!({"n": 1})),
            ("c3", "mail", json!({"n": 1})),
            ("c4", "set", json!({"n": 1})),
            ("c5", "fly", json!({})),
        ]),
        calls(&[("c2", "pay", json!({"n": 2})), ("c1", "look", json!({"n": 2}))]),
        say("All is done."),
    ])
}

impl World {
    /// Creates a session, with a long history if the prompt window is small.
    async fn new(kind: &str, policy: &'static str, window: usize) -> Self {
        let home = Home::new(kind).await.unwrap();
        let tools = Workshop::new([
            (read_only("look"), Does::Says("seen")),
            (tool("pay"), Does::Says("paid")),
            (tool("mail"), Does::Says("sent")),
            (Tool { idempotent: true, ..tool("set") }, Does::Says("set")),
        ]);
        let Home { tenure, clock, dir, .. } = home;
        let store = tenure.store().clone();
        let world = Self { store, clock, policy, window, tools, model: script(), lost: 0, _dir: dir };
        let node = world.node(&world.store);
        node.create(&ada(), NewSession { assistant: Some("clerk".into()), ..named("x") }).await.unwrap();
        if window < 50 {
            let talk = (0..150).flat_map(|n| [Message::user(&format!("{n}?")), Message::assistant(&format!("{n}!"))]);
            let said = [Message::system("Be brief.")].into_iter().chain(talk);
            node.append(&ada(), &id("x"), said.collect::<Vec<_>>()).await.unwrap();
        }
        world
    }

    /// A node on the given store, which may be a wrapper around the shared one.
    fn node(&self, store: &Arc<dyn Store>) -> Tenure {
        let tenure = Tenure::on(store.clone(), Options { clock: self.clock.clone(), ..Options::default() });
        let checkpoints = Some(CheckpointPolicy::try_from(self.policy.to_owned()).unwrap());
        tenure.declare(clerk(|a| {
            (a.review, a.checkpoints) = (vec![reviewed("mail")], checkpoints);
            a.short_term.max_history_turns = Some(self.window);
        }));
        tenure
    }

    /// Simulates one process until it crashes: starts the run if it does not exist, takes over an
    /// orphaned run, decides open reviews. Returns whether the run has ended.
    async fn live(&mut self, tenure: &Tenure) -> Result<bool, TurnError> {
        // Inspect the session through another node, so that this process caches no more than it
        // needs.
        let elsewhere = self.node(&self.store);
        for _ in 0..20 {
            let s = elsewhere.load(&ada(), &id("x")).await?;
            if s.runs.last().is_some_and(|r| r.ended.is_some()) {
                return Ok(true);
            }
            if s.runs.is_empty() {
                turn_of(tenure, question("Do all of it"), &self.model, &self.tools).await?;
                continue;
            }
            for review in s.open_reviews().map(|r| r.opened.clone()) {
                let decision = if review.lost { self.truth(&review) } else { Decision::Approved };
                self.lost += usize::from(review.lost);
                tenure.decide(&ada(), &review.review, &verdict(decision)).await?;
            }
            for head in tenure.abandoned(9).await? {
                if let Some(turn) = tenure.take_over(&head).await? {
                    work(turn, &self.model, &self.tools).await?;
                }
            }
        }
        Ok(false)
    }

    /// The decision that matches whether the tool was actually executed.
    fn truth(&self, review: &ReviewOpened) -> Decision {
        match self.tools.done(&review.step).contains(&review.detail["arguments"]) {
            true => Decision::Approved,
            false => Decision::Rejected,
        }
    }

    async fn story(&self) -> Story {
        let tenure = self.node(&self.store);
        let s = x(&tenure).await;
        let log = tenure.store().records(&s.key(), &tenure::store::RecordRange::after(0)).await.unwrap();
        assert!(log.iter().map(|r| r.seq).eq(1..=s.seq), "the log has no hole");
        let rebuilt = Session::replay(&s.key(), log).unwrap();
        let card = |h: &Head| Head { due_at: None, lease: None, ..h.clone() };
        assert_eq!(card(rebuilt.head()), card(s.head()), "the card follows from the log");
        assert_eq!(s.status, Status::Active);
        assert_eq!((s.head().run.clone(), s.head().lease.clone(), s.head().reviews.len()), (None, None, 0));
        assert!(is_valid(&history(&s, &Window::default())));
        let decided = s.reviews.iter().filter(|r| !r.opened.lost).filter_map(|r| Some((r, r.decided.as_ref()?)));
        Story {
            talk: in_order(&s),
            decisions: decided.map(|(r, (_, d))| (r.opened.step.clone(), d.decision)).collect(),
            outcome: s.runs.last().unwrap().ended.unwrap().1,
            done: self.tools.counts(),
        }
    }
}

/// The messages in call order. A result that was delayed by a review is moved next to the results
/// of the other calls.
fn in_order(session: &Session) -> Vec<String> {
    let (mut said, mut calls) = (Vec::new(), Vec::new());
    for (at, (text, message)) in talk(session).into_iter().zip(&session.messages).enumerate() {
        if !message.message.tool_calls().is_empty() {
            calls = message.message.tool_calls().into_iter().map(|c| (at, c.id)).collect();
        }
        let result = message.message.tool_call_id();
        let place = calls.iter().position(|(_, id)| result.as_ref() == Some(id));
        said.push((place.map_or((at, 0), |i| (calls[i].0, i + 1)), text));
    }
    said.sort();
    said.into_iter().map(|(_, text)| text).collect()
}

/// Compares with the result without a crash. A lost result may be replaced by the reviewer's
/// confirmation, at most once per review.
fn compare(at: &str, mut got: Story, want: &Story, lost: usize) {
    let mut told = 0;
    for (got, want) in got.talk.iter_mut().zip(&want.talk) {
        if got == "tool: A reviewer confirmed that this call was executed." && want.starts_with("tool: ") {
            told += 1;
            got.clone_from(want);
        }
    }
    assert!(told <= lost, "{at}: {told} results were told by a person, who was asked {lost} times");
    for (what, times) in &mut got.done {
        let harmless = what.starts_with("look") || what.starts_with("set");
        assert!(*times == 1 || harmless, "{at}: {what} was done {times} times");
        *times = 1;
    }
    assert_eq!(got, *want, "{at}");
}

async fn dies_everywhere(kind: &str, policies: &[&'static str], window: usize, twice: bool) {
    for policy in policies {
        let mut world = World::new(kind, policy, window).await;
        let counted = Fragile::new(&world.store, None);
        let node = world.node(&(counted.clone() as Arc<dyn Store>));
        assert!(world.live(&node).await.unwrap());
        let (want, commits) = (world.story().await, counted.commits());
        assert_eq!((want.outcome, want.decisions.len(), world.lost), (RunOutcome::Completed, 1, 0));
        assert_eq!(want.done.len(), 6, "{want:?}");
        assert!(commits > 8, "{commits}");
        let mut questions = 0;
        for at in 0..commits {
            for when in [When::Before, When::After] {
                let seconds = if twice { 0..commits } else { 0..1 };
                for second in seconds {
                    let mut world = World::new(kind, policy, window).await;
                    let point =
                        format!("{kind}, {policy}: dies at commit {at}, {when:?}; and again at {second} ({twice})");
                    let mut deaths = vec![Some((at, when))];
                    deaths.extend(twice.then_some(Some((second, when))));
                    deaths.push(None);
                    let mut ended = false;
                    for (n, dies) in deaths.into_iter().enumerate() {
                        let store = Fragile::new(&world.store, dies);
                        let node = world.node(&(store.clone() as Arc<dyn Store>));
                        match world.live(&node).await {
                            Ok(done) => ended = done,
                            Err(e) => assert!(store.is_dead(), "{point}: {e}"),
                        }
                        // The resuming node reads the prompt window, not the whole history (D-014).
                        let read = store.read.load(SeqCst);
                        let asks = n == 0 || (at == 0 && when == When::Before);
                        assert!(asks || window == 50 || read < 150, "{point}: {read} records were read");
                        world.clock.advance(SignedDuration::from_secs(31));
                    }
                    assert!(ended, "{point}: the run never ended");
                    compare(&point, world.story().await, &want, world.lost);
                    questions += world.lost;
                }
            }
        }
        assert!(questions > 0, "somewhere a person must have been asked whether something was done");
    }
}

#[tokio::test]
async fn a_run_that_dies_anywhere_ends_the_same_in_memory() {
    dies_everywhere("memory", &["tool", "step", "60s", "manual"], 50, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_dies_anywhere_ends_the_same_on_sqlite() {
    dies_everywhere("sqlite", &["tool", "step", "60s", "manual"], 50, false).await;
}

#[tokio::test]
async fn a_run_that_dies_twice_ends_the_same() {
    dies_everywhere("memory", &["tool"], 50, true).await;
}

/// Crash simulation in a long session, of which the resuming node reads only the most recent part.
#[tokio::test]
async fn a_run_that_dies_anywhere_in_a_long_session_ends_the_same() {
    dies_everywhere("memory", &["tool", "step", "60s", "manual"], 2, false).await;
    dies_everywhere("memory", &["tool"], 2, true).await;
}

on_every_store! {
    /// The cost of resuming depends on the prompt window, not on the length of the history, and the
    /// prompt is the same as without a crash (D-014).
    async fn a_run_in_a_long_session_goes_on_with_its_newest_part(home: &mut Home) {
        let tools = Workshop::new([(tool("mail"), Does::Says("sent"))]);
        let model = Script::new([calls(&[("c1", "mail", json!({}))]), say("Done.")]);
        let declared = || clerk(|a| {
            a.review = vec![reviewed("mail")];
            a.short_term.max_history_turns = Some(3);
        });
        let node = |store: &Arc<dyn Store>| {
            let tenure = Tenure::on(store.clone(), Options { clock: home.clock.clone(), ..Options::default() });
            tenure.declare(declared());
            tenure
        };
        let (store, window) = (home.tenure.store().clone(), Window { max_turns: Some(3), max_tokens: None });
        let first = node(&store);
        first.create(&ada(), NewSession { assistant: Some("clerk".into()), ..named("x") }).await.unwrap();
        first.append(&ada(), &id("x"), vec![Message::system("Be brief.")]).await.unwrap();
        for n in 0..200 {
            let said = vec![Message::user(&format!("{n}?")), Message::assistant(&format!("{n}!"))];
            first.append(&ada(), &id("x"), said).await.unwrap();
        }
        drop(begin(&first, question("Mail it")).await.unwrap());
        home.pass(SignedDuration::from_secs(31));

        let counting = || Fragile::new(&store, None);
        let few = |counted: &Fragile, what| {
            let read = counted.read.load(SeqCst);
            assert!(read > 0 && read < 150, "{what}: {read} records were read");
        };
        // A node without cache takes over the run and opens a review.
        let second = counting();
        let done = take_over(&node(&(second.clone() as Arc<dyn Store>)), &model, &tools).await;
        assert!(done[0].as_ref().unwrap().waiting);
        few(&second, "taking over");
        let s = x(&first).await;
        assert!(s.seq > 600);
        assert_eq!(model.shown(), ["Be brief.", "198?", "198!", "199?", "199!", "Mail it"]);

        // One node decides the review, and another resumes the run.
        let third = counting();
        let review = open(&s).pop().unwrap();
        let asked = node(&(third.clone() as Arc<dyn Store>));
        asked.decide(&ada(), &review, &verdict(Decision::Approved)).await.unwrap();
        few(&third, "deciding");
        let again = asked.decide(&ada(), &review, &verdict(Decision::Rejected)).await;
        assert!(matches!(again, Err(Error::Decided { .. })), "{again:?}");
        let fourth = counting();
        let done = take_over(&node(&(fourth.clone() as Arc<dyn Store>)), &model, &tools).await;
        assert!(!done[0].as_ref().unwrap().waiting);
        few(&fourth, "going on");
        let s = x(&first).await;
        let last: Vec<Message> = model.prompts.lock().unwrap().last().unwrap().clone();
        let mut then = history(&s, &window);
        assert_eq!(then.pop().map(|m| m.text()), Some("Done.".to_owned()));
        assert_eq!(last, then);
        assert_eq!((ending(&s), tools.done("mail").len()), ((Some(RunOutcome::Completed), None), 1));
        assert_eq!(x(&asked).await, s, "who knew a part of it finds all of it");

        // A run started without input also reads only the recent part.
        first.append(&ada(), &id("x"), vec![Message::user("And now?")]).await.unwrap();
        let fifth = counting();
        let fresh = node(&(fifth.clone() as Arc<dyn Store>));
        let turn = fresh.go_on(&ada(), &id("x"), OnBusy::Queue, lasting()).await.unwrap();
        work(turn, &Script::new([say("Nothing.")]), &tools).await.unwrap();
        few(&fifth, "a run of its own");

        // A larger prompt window reads more.
        fresh.declare(clerk(|a| a.short_term.max_history_turns = Some(150)));
        fresh.append(&ada(), &id("x"), vec![Message::user("All of it?")]).await.unwrap();
        let turn = fresh.go_on(&ada(), &id("x"), OnBusy::Queue, lasting()).await.unwrap();
        let curious = Script::new([say("Yes.")]);
        work(turn, &curious, &tools).await.unwrap();
        assert_eq!(curious.shown().iter().filter(|said| said.ends_with('?')).count(), 149, "and one without");

        // A review decided long ago is still known as decided.
        let talk_on = (0..100).flat_map(|_| [Message::user("on"), Message::assistant("and on")]);
        first.append(&ada(), &id("x"), talk_on.collect::<Vec<_>>()).await.unwrap();
        let late = node(&store).decide(&ada(), &review, &verdict(Decision::Rejected)).await;
        assert!(matches!(late, Err(Error::Decided { .. })), "{late:?}");

        // Messages discarded by another node are not shown by a node that has a part of them
        // cached.
        let knowing = node(&store);
        drop(begin(&first, question("Once more")).await.unwrap());
        home.pass(SignedDuration::from_secs(31));
        let head = knowing.abandoned(1).await.unwrap().pop().unwrap();
        let turn = knowing.take_over(&head).await.unwrap().unwrap();
        first.rewind(&ada(), &id("x"), Point::Position(4)).await.unwrap();
        let model = Script::new([say("Again 1.")]);
        work(turn, &model, &tools).await.unwrap();
        assert_eq!(model.shown(), ["Be brief.", "0?", "0!", "1?"]);
        let s = x(&knowing).await;
        assert_eq!(s, x(&first).await);
        assert_eq!(talk(&s)[1..], ["user: 0?", "assistant: 0!", "user: 1?", "assistant: Again 1."]);
    }
}
