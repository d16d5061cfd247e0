//! The simulation: a run with tools and a review dies at every commit, before and after it, under every rule for checkpoints. Whoever takes
//! it over comes to the same end, and nothing with an effect is done twice.

use crate::hands::*;
use crate::places::*;
use jiff::SignedDuration;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use tenure::store::Store;
use tenure::*;

/// What there is to see of a session in the end, ids and times apart.
#[derive(Clone, Debug, PartialEq)]
struct Story {
    talk: Vec<String>,
    decisions: Vec<(String, Decision)>,
    outcome: Outcome,
    done: BTreeMap<String, usize>,
}

struct World {
    store: Arc<dyn Store>,
    clock: Clock,
    policy: &'static str,
    tools: Workshop,
    model: Script,
    /// Calls that somebody was asked about: was it done?
    lost: usize,
    _dir: Option<tempfile::TempDir>,
}

/// Looks, pays, and mails (which a person must allow) at once; pays again under an id that was used before; and is done.
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
    async fn new(kind: &str, policy: &'static str) -> Self {
        let home = Home::new(kind).await.unwrap();
        let tools = Workshop::new([
            (read_only("look"), Does::Says("seen")),
            (tool("pay"), Does::Says("paid")),
            (tool("mail"), Does::Says("sent")),
            (Tool { idempotent: true, ..tool("set") }, Does::Says("set")),
        ]);
        let Home { tenure, clock, dir, .. } = home;
        let store = tenure.store().clone();
        let world = Self { store, clock, policy, tools, model: script(), lost: 0, _dir: dir };
        world.node(&world.store).create(&ada(), New { assistant: Some("clerk".into()), ..named("x") }).await.unwrap();
        world
    }

    /// Another process on the same store, or on what stands before it.
    fn node(&self, store: &Arc<dyn Store>) -> Tenure {
        let tenure = Tenure::on(store.clone(), Options { clock: self.clock.clone(), ..Options::default() });
        let checkpoints = Some(Checkpoints::try_from(self.policy.to_owned()).unwrap());
        tenure.declare(clerk(|a| (a.review, a.checkpoints) = (vec![reviewed("mail")], checkpoints)));
        tenure
    }

    /// A process that lives until it dies: asks if nobody has, takes over what is left, decides what is open. Whether the run has ended.
    async fn live(&mut self, tenure: &Tenure) -> Result<bool, TurnError> {
        for _ in 0..20 {
            let s = tenure.load(&ada(), &id("x")).await?;
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

    /// Whether it was done, as the tool itself knows.
    fn truth(&self, review: &ReviewOpened) -> Decision {
        match self.tools.done(&review.step).contains(&review.detail["arguments"]) {
            true => Decision::Approved,
            false => Decision::Rejected,
        }
    }

    async fn story(&self) -> Story {
        let tenure = self.node(&self.store);
        let s = x(&tenure).await;
        let log = tenure.store().records(&s.key(), &tenure::store::Range::after(0)).await.unwrap();
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

/// What was said. Results that came late because somebody had to be asked stand where those of the other calls do.
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

/// Compares with the story without a crash. A result that nobody heard may be told in a person's words instead, if one was asked.
fn compare(at: &str, mut got: Story, want: &Story, lost: usize) {
    let mut told = 0;
    for (got, want) in got.talk.iter_mut().zip(&want.talk) {
        if got == "tool: This was done, as a person has made sure." && want.starts_with("tool: ") {
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

async fn dies_everywhere(kind: &str, policies: &[&'static str], twice: bool) {
    for policy in policies {
        let mut world = World::new(kind, policy).await;
        let counted = Fragile::new(&world.store, None);
        let node = world.node(&(counted.clone() as Arc<dyn Store>));
        assert!(world.live(&node).await.unwrap());
        let (want, commits) = (world.story().await, counted.commits());
        assert_eq!((want.outcome, want.decisions.len(), world.lost), (Outcome::Completed, 1, 0));
        assert_eq!(want.done.len(), 6, "{want:?}");
        assert!(commits > 8, "{commits}");
        let mut questions = 0;
        for at in 0..commits {
            for when in [When::Before, When::After] {
                let seconds = if twice { 0..commits } else { 0..1 };
                for second in seconds {
                    let mut world = World::new(kind, policy).await;
                    let point =
                        format!("{kind}, {policy}: dies at commit {at}, {when:?}; and again at {second} ({twice})");
                    let mut deaths = vec![Some((at, when))];
                    deaths.extend(twice.then_some(Some((second, when))));
                    deaths.push(None);
                    let mut ended = false;
                    for dies in deaths {
                        let store = Fragile::new(&world.store, dies);
                        let node = world.node(&(store.clone() as Arc<dyn Store>));
                        match world.live(&node).await {
                            Ok(done) => ended = done,
                            Err(e) => assert!(store.is_dead(), "{point}: {e}"),
                        }
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
    dies_everywhere("memory", &["tool", "step", "60s", "manual"], false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_dies_anywhere_ends_the_same_on_sqlite() {
    dies_everywhere("sqlite", &["tool", "step", "60s", "manual"], false).await;
}

#[tokio::test]
async fn a_run_that_dies_twice_ends_the_same() {
    dies_everywhere("memory", &["tool"], true).await;
}
