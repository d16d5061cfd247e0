//! Speculative model requests: the model is called while the user's message is being committed, and
//! its output is not used before (D-044).

use crate::on_every_store;
use crate::support::*;
use std::sync::Arc;
use tenure::store::Store;
use tenure::{run::*, session::*, *};
use tokio::sync::Semaphore;

fn request_without_assistant(text: &str) -> TurnRequest {
    TurnRequest { assistant: None, ..question(text) }
}

fn eager_call(model: &Arc<ScriptedModel>) -> EagerModelCall {
    EagerModelCall { model: model.clone(), options: RawObject::default(), stream: false }
}

fn node(test: &TestTenure, store: Arc<dyn Store>) -> Tenure {
    Tenure::with_store(store, Options { clock: test.clock.clone(), ..Options::default() })
}

/// Creates the session without messages.
async fn ensure_session(test: &TestTenure) {
    if test.tenure.head(&ada(), &id("x")).await.is_err() {
        test.tenure.create(&ada(), new_session("x")).await.unwrap();
    }
}

async fn message_texts(tenure: &Tenure) -> Vec<String> {
    let session = tenure.load(&ada(), &id("x")).await.unwrap();
    session.messages.iter().map(|m| m.message.text()).collect()
}

async fn finish_turn(turn_start: Result<TurnStart>, model: &ScriptedModel) -> String {
    let TurnStart::Run(turn) = turn_start.unwrap() else { panic!("a turn") };
    let outcome = turn.execute(Executors::new(model)).await.unwrap();
    outcome.answer.message().unwrap().text()
}

on_every_store! {
    async fn the_model_is_called_while_the_message_is_committed(test: &mut TestTenure) {
        for (n, words) in ["one", "another"].into_iter().enumerate() {
            ensure_session(test).await;
            let (commit_permits, model) = (Arc::new(Semaphore::new(0)), Arc::new(ScriptedModel::new([text_answer("Yes.")])));
            let (slow_node, eager_call_request) = (node(test, FailingStore::with_permits(test.tenure.store(), &commit_permits)), eager_call(&model));
            let principal = ada();
            let mut turn_start = Box::pin(slow_node.begin_turn_eager(&principal, request_without_assistant(words), &eager_call_request));
            while model.call_count() == 0 {
                tokio::select! {
                    _ = &mut turn_start => panic!("the turn began before its commit"),
                    () = tokio::task::yield_now() => {}
                }
            }
            assert_eq!(test.tenure.head(&principal, &id("x")).await.map_or(0, |h| h.digest.messages), n * 2);
            commit_permits.add_permits(10);
            assert_eq!(finish_turn(turn_start.await, &model).await, "Yes.");
            assert_eq!((model.call_count(), message_texts(&test.tenure).await.len()), (1, n * 2 + 2), "asked once, and both are kept");
        }
    }

    async fn a_message_that_can_not_be_stored_is_not_answered(test: &mut TestTenure) {
        ensure_session(test).await;
        for failure_point in [FailurePoint::BeforeCommit, FailurePoint::AfterCommit] {
            let model = Arc::new(ScriptedModel::with_permits([text_answer("Yes.")], &Arc::new(Semaphore::new(0))));
            let broken_node = node(test, FailingStore::new(test.tenure.store(), Some((0, failure_point))));
            let error = broken_node.begin_turn_eager(&ada(), request_without_assistant("Are you there?"), &eager_call(&model)).await.unwrap_err();
            assert_eq!(error.code(), "storage_full");
            assert_eq!(Arc::strong_count(&model), 1, "nobody waits for its answer");
        }
    }

    /// If the session has changed concurrently, the speculative request is discarded and the model
    /// is called again with the current history.
    async fn a_concurrent_change_discards_the_speculative_call(test: &mut TestTenure) {
        let principal = ada();
        let (first_node, second_node) = (&test.tenure, node(test, test.tenure.store().clone()));
        let model = Arc::new(ScriptedModel::new([text_answer("Yes.")]));
        finish_turn(first_node.begin_turn_eager(&principal, request_without_assistant("one"), &eager_call(&model)).await, &model).await;
        second_node.append(&principal, &id("x"), Append { messages: vec![Message::user("two"), Message::assistant("Two.")], ..Append::default() }).await.unwrap();
        finish_turn(first_node.begin_turn_eager(&principal, request_without_assistant("three"), &eager_call(&model)).await, &model).await;
        assert_eq!(message_texts(first_node).await, ["one", "Yes.", "two", "Two.", "three", "Yes."]);
        assert_eq!(model.last_prompt(), ["one", "Yes.", "two", "Two.", "three"]);
        assert!(model.call_count() <= 3, "{}", model.call_count());
    }

    /// A session id that belongs to a different user is detected only when the session is created,
    /// so the model must not be called before.
    async fn no_model_is_called_in_a_session_of_another_user(test: &mut TestTenure) {
        ensure_session(test).await;
        let (bob, model) = (Principal::new("acme", "bob").unwrap(), Arc::new(ScriptedModel::new([text_answer("Yes.")])));
        let refused = test.tenure.begin_turn_eager(&bob, request_without_assistant("Are you there?"), &eager_call(&model)).await.unwrap_err();
        assert_eq!((refused.code(), model.call_count()), ("not_found", 0));
    }

    /// With instructions or media, the model is called after the commit.
    async fn a_prompt_with_instructions_is_sent_after_the_commit(test: &mut TestTenure) {
        test.tenure.declare(clerk(|a| a.instructions = Some("Be kind.".to_owned())));
        let model = Arc::new(ScriptedModel::new([text_answer("Yes.")]));
        let turn_start = test.tenure.begin_turn_eager(&ada(), question("Are you there?"), &eager_call(&model)).await;
        assert_eq!(model.call_count(), 0);
        finish_turn(turn_start, &model).await;
        assert_eq!((model.call_count(), model.last_prompt()), (1, vec!["Be kind.".to_owned(), "Are you there?".to_owned()]));
    }
}
