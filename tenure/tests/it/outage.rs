//! Store outages during a run: the run retries and retains its uncommitted results.

use crate::hands::*;
use crate::on_every_store;
use crate::places::*;
use jiff::SignedDuration;
use serde_json::json;
use std::sync::Arc;
use tenure::{log::*, maintenance::*, memory::*, policy::*, review::*, rules::*, run::*, session::*, *};

fn node(home: &Home, store: Arc<Fragile>) -> Tenure {
    let tenure = Tenure::with_store(store, Options { clock: home.clock.clone(), ..Options::default() });
    tenure.declare(clerk(|_| ()));
    tenure
}

fn tools() -> Workshop {
    Workshop::new([(Tool { cache: true, ..read_only("look") }, Does::Says("seen")), (tool("pay"), Does::Says("paid"))])
}

fn script() -> Script {
    Script::new([calls(&[("c1", "look", json!({})), ("c2", "pay", json!({}))]), say("Done.")])
}

fn ask(session: &str) -> TurnRequest {
    TurnRequest { session: Some(id(session)), ..question("Go") }
}

const MESSAGES: [&str; 5] = ["user: Go", "calls: c1 c2", "tool: seen", "tool: paid", "assistant: Done."];

on_every_store! {
    /// Whichever commit meets the outage, and whether it was persisted or not: the run ends as it
    /// would have without it, and nothing is executed or written twice.
    async fn a_run_waits_with_its_results(home: &mut Home) {
        let counting = Fragile::new(home.tenure.store(), None);
        let tenure = node(home, counting.clone());
        let turn = begin(&tenure, ask("count")).await.unwrap();
        let commits_at_start = counting.commits();
        work(*turn, &script(), &tools()).await.unwrap();
        let all = counting.commits();
        assert!(all >= commits_at_start + 3, "the calls, their results, the answer: {commits_at_start} {all}");
        for commit in commits_at_start..all {
            for failure_point in [When::Before, When::After] {
                let session = format!("s{commit}{failure_point:?}");
                let tools = tools();
                let store = Fragile::away_at(home.tenure.store(), commit, failure_point);
                let tenure = node(home, store.clone());
                let turn = begin(&tenure, ask(&session)).await.unwrap();
                let (model, back) = (script(), async {
                    until("the store is away", async || store.is_dead()).await;
                    store.come_back();
                });
                let (outcome, ()) = tokio::join!(work(*turn, &model, &tools), back);
                assert!(!outcome.unwrap().waiting);
                let s = home.tenure.load(&ada(), &id(&session)).await.unwrap();
                assert_eq!(talk(&s), MESSAGES, "{commit} {failure_point:?}");
                assert_eq!((ending(&s), s.runs.len()), ((Some(RunOutcome::Completed), None), 1));
                assert_eq!((tools.done("pay").len(), tools.done("look").len()), (1, 1));
                assert_eq!(*tenure.load(&ada(), &id(&session)).await.unwrap().head(), *s.head());
            }
        }
        assert_eq!(home.tenure.examine(|_| ()).await.unwrap(), []);
    }

    /// Another node takes over the run during the outage: the first node drops its results once the
    /// store is available again.
    async fn a_run_that_was_taken_over_meanwhile_is_superseded(home: &mut Home) {
        let counting = Fragile::new(home.tenure.store(), None);
        begin(&node(home, counting.clone()), ask("count")).await.unwrap();
        // The commit of the tool results.
        let store = Fragile::away_at(home.tenure.store(), counting.commits() + 1, When::Before);
        let first_node = node(home, store.clone());
        let second_node = node(home, Fragile::new(home.tenure.store(), None));
        let first_tools = tools();
        let second_tools = tools();
        let turn = begin(&first_node, ask("x")).await.unwrap();
        let (model, claimed) = (script(), async {
            until("the store is away", async || store.is_dead()).await;
            home.pass(SignedDuration::from_secs(60));
            let head = second_node.head(&ada(), &id("x")).await.unwrap();
            let turn = second_node.claim_orphaned_run(&head).await.unwrap().unwrap();
            // The outcome of the payment is unknown, so a review is opened.
            assert!(work(turn, &script(), &second_tools).await.unwrap().waiting);
            store.come_back();
        });
        let (lost, ()) = tokio::join!(work(*turn, &model, &first_tools), claimed);
        assert_eq!(lost.unwrap_err().code(), "superseded");
        let s = home.tenure.load(&ada(), &id("x")).await.unwrap();
        assert_eq!((first_tools.done("pay").len(), second_tools.done("pay").len(), s.open_reviews().count()), (1, 0, 1));
    }
}
