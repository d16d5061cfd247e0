//! Speculative model requests: the model is called while the user's message is being committed, and
//! its output is not used before (D-044).

use crate::hands::*;
use crate::on_every_store;
use crate::places::*;
use std::sync::Arc;
use tenure::store::Store;
use tenure::*;
use tokio::sync::Semaphore;

fn plain(text: &str) -> TurnRequest {
    TurnRequest { assistant: None, ..question(text) }
}

fn first(model: &Arc<Script>) -> EagerModelCall {
    EagerModelCall { model: model.clone(), options: RawObject::default(), stream: false }
}

fn node(home: &Home, store: Arc<dyn Store>) -> Tenure {
    Tenure::on(store, Options { clock: home.clock.clone(), ..Options::default() })
}

/// Creates the session without messages.
async fn exists(home: &Home) {
    if home.tenure.head(&ada(), &id("x")).await.is_err() {
        home.tenure.create(&ada(), named("x")).await.unwrap();
    }
}

async fn said(tenure: &Tenure) -> Vec<String> {
    let session = tenure.load(&ada(), &id("x")).await.unwrap();
    session.messages.iter().map(|m| m.message.text()).collect()
}

async fn answered(begun: Result<TurnStart>, model: &Script) -> String {
    let TurnStart::Turn(turn) = begun.unwrap() else { panic!("a turn") };
    let done = turn.run(Executors { model, tools: None }, RawObject::default(), false, None).await.unwrap();
    done.answer.message().unwrap().text()
}

on_every_store! {
    async fn while_it_is_being_kept(home: &mut Home) {
        for (n, words) in ["one", "another"].into_iter().enumerate() {
            exists(home).await;
            let (gate, model) = (Arc::new(Semaphore::new(0)), Arc::new(Script::new([say("Yes.")])));
            let (slow, question) = (node(home, Fragile::held(home.tenure.store(), &gate)), first(&model));
            let principal = ada();
            let mut begun = Box::pin(slow.turn_asking(&principal, plain(words), &question));
            while model.asked() == 0 {
                tokio::select! {
                    _ = &mut begun => panic!("the turn began before its commit"),
                    () = tokio::task::yield_now() => {}
                }
            }
            assert_eq!(home.tenure.head(&principal, &id("x")).await.map_or(0, |h| h.mark.messages), n * 2);
            gate.add_permits(10);
            assert_eq!(answered(begun.await, &model).await, "Yes.");
            assert_eq!((model.asked(), said(&home.tenure).await.len()), (1, n * 2 + 2), "asked once, and both are kept");
        }
    }

    async fn what_can_not_be_kept_is_not_answered(home: &mut Home) {
        exists(home).await;
        for when in [When::Before, When::After] {
            let model = Arc::new(Script::held([say("Yes.")], &Arc::new(Semaphore::new(0))));
            let broken = node(home, Fragile::new(home.tenure.store(), Some((0, when))));
            let lost = broken.turn_asking(&ada(), plain("Are you there?"), &first(&model)).await.unwrap_err();
            assert_eq!(lost.code(), "storage_full");
            assert_eq!(Arc::strong_count(&model), 1, "nobody waits for its answer");
        }
    }

    /// If the session has changed concurrently, the speculative request is discarded and the model
    /// is called again with the current history.
    async fn somebody_else_was_first(home: &mut Home) {
        let principal = ada();
        let (here, there) = (&home.tenure, node(home, home.tenure.store().clone()));
        let model = Arc::new(Script::new([say("Yes.")]));
        answered(here.turn_asking(&principal, plain("one"), &first(&model)).await, &model).await;
        there.append(&principal, &id("x"), Append { messages: vec![Message::user("two"), Message::assistant("Two.")], ..Append::default() }).await.unwrap();
        answered(here.turn_asking(&principal, plain("three"), &first(&model)).await, &model).await;
        assert_eq!(said(here).await, ["one", "Yes.", "two", "Two.", "three", "Yes."]);
        assert_eq!(model.shown(), ["one", "Yes.", "two", "Two.", "three"]);
        assert!(model.asked() <= 3, "{}", model.asked());
    }

    /// A session id that belongs to a different user is detected only when the session is created,
    /// so the model must not be called before.
    async fn nobody_is_asked_in_somebody_elses_session(home: &mut Home) {
        exists(home).await;
        let (bob, model) = (Principal::new("acme", "bob").unwrap(), Arc::new(Script::new([say("Yes.")])));
        let refused = home.tenure.turn_asking(&bob, plain("Are you there?"), &first(&model)).await.unwrap_err();
        assert_eq!((refused.code(), model.asked()), ("not_found", 0));
    }

    /// With instructions or media, the model is called after the commit.
    async fn where_more_is_needed_it_is_asked_afterwards(home: &mut Home) {
        home.tenure.declare(clerk(|a| a.instructions = Some("Be kind.".to_owned())));
        let model = Arc::new(Script::new([say("Yes.")]));
        let begun = home.tenure.turn_asking(&ada(), question("Are you there?"), &first(&model)).await;
        assert_eq!(model.asked(), 0);
        answered(begun, &model).await;
        assert_eq!((model.asked(), model.shown()), (1, vec!["Be kind.".to_owned(), "Are you there?".to_owned()]));
    }
}
