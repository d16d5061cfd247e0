//! Store outages during a run: the run retries and retains its uncommitted results.

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use serde_json::json;
use std::sync::Arc;
use tenure::{run::*, *};

fn node(test: &TestTenure, store: Arc<FailingStore>) -> Tenure {
    let tenure = Tenure::with_store(store, Options { clock: test.clock.clone(), ..Options::default() });
    tenure.declare(clerk(|_| ()));
    tenure
}

fn tools() -> CountingTools {
    CountingTools::new([
        (Tool { cache: true, ..read_only_tool("look") }, ToolBehavior::succeeds("seen")),
        (tool("pay"), ToolBehavior::succeeds("paid")),
    ])
}

fn script() -> ScriptedModel {
    ScriptedModel::new([
        tool_calls_answer(&[("c1", "look", json!({})), ("c2", "pay", json!({}))]),
        text_answer("Done."),
    ])
}

fn ask(session: &str) -> TurnRequest {
    TurnRequest { session: Some(id(session)), ..question("Go") }
}

const MESSAGES: [&str; 5] = ["user: Go", "calls: c1 c2", "tool: seen", "tool: paid", "assistant: Done."];

on_every_store! {
    /// Whichever commit meets the outage, and whether it was persisted or not: the run ends as it
    /// would have without it, and nothing is executed or written twice.
    async fn a_run_waits_with_its_results(test: &mut TestTenure) {
        let counting = FailingStore::new(test.tenure.store(), None);
        let tenure = node(test, counting.clone());
        let turn = begin(&tenure, ask("count")).await.unwrap();
        let commits_at_start = counting.commits();
        execute(*turn, &script(), &tools()).await.unwrap();
        let all = counting.commits();
        assert!(all >= commits_at_start + 3, "the calls, their results, the answer: {commits_at_start} {all}");
        for commit in commits_at_start..all {
            for failure_point in [FailurePoint::BeforeCommit, FailurePoint::AfterCommit] {
                let (session, tools) = (format!("s{commit}{failure_point:?}"), tools());
                let store = FailingStore::unavailable_at(test.tenure.store(), commit, failure_point);
                let tenure = node(test, store.clone());
                let turn = begin(&tenure, ask(&session)).await.unwrap();
                let (model, back) = (script(), async {
                    wait_until("the store is away", async || store.has_failed()).await;
                    store.recover();
                });
                let (outcome, ()) = tokio::join!(execute(*turn, &model, &tools), back);
                assert!(!outcome.unwrap().waiting);
                let s = test.tenure.load(&ada(), &id(&session)).await.unwrap();
                assert_eq!(conversation(&s), MESSAGES, "{commit} {failure_point:?}");
                assert_eq!((ending(&s), s.runs.len()), ((Some(RunOutcome::Completed), None), 1));
                assert_eq!((tools.calls("pay").len(), tools.calls("look").len()), (1, 1));
                assert_eq!(*tenure.load(&ada(), &id(&session)).await.unwrap().head(), *s.head());
            }
        }
        assert_eq!(test.tenure.examine(|_| ()).await.unwrap(), []);
    }

    /// Another node takes over the run during the outage: the first node drops its results once the
    /// store is available again.
    async fn a_run_that_was_taken_over_meanwhile_is_superseded(test: &mut TestTenure) {
        let counting = FailingStore::new(test.tenure.store(), None);
        begin(&node(test, counting.clone()), ask("count")).await.unwrap();
        // The commit of the tool results.
        let store = FailingStore::unavailable_at(test.tenure.store(), counting.commits() + 1, FailurePoint::BeforeCommit);
        let (first_node, second_node) = (node(test, store.clone()), node(test, FailingStore::new(test.tenure.store(), None)));
        let (first_tools, second_tools) = (tools(), tools());
        let turn = begin(&first_node, ask("x")).await.unwrap();
        let (model, claimed) = (script(), async {
            wait_until("the store is away", async || store.has_failed()).await;
            test.advance(SignedDuration::from_secs(60));
            let head = second_node.head(&ada(), &id("x")).await.unwrap();
            let turn = second_node.claim_orphaned_run(&head).await.unwrap().unwrap();
            // The outcome of the payment is unknown, so a review is opened.
            assert!(execute(turn, &script(), &second_tools).await.unwrap().waiting);
            store.recover();
        });
        let (lost, ()) = tokio::join!(execute(*turn, &model, &first_tools), claimed);
        assert_eq!(lost.unwrap_err().code(), "superseded");
        let s = test.tenure.load(&ada(), &id("x")).await.unwrap();
        assert_eq!((first_tools.calls("pay").len(), second_tools.calls("pay").len(), s.open_reviews().count()), (1, 0, 1));
    }
}
