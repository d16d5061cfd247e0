//! Assistants with the memory scope `none`: the model is shown only the current request (D-130).

use crate::on_every_store;
use crate::support::*;
use serde_json::json;
use tenure::{policy::*, review::*, run::*, *};

/// The clerk without memory, who greets.
fn stateless_clerk(change: impl FnOnce(&mut Assistant)) -> Assistant {
    clerk(|a| {
        a.instructions = Some("Be kind.".to_owned());
        a.memory = Some(MemoryConfig { scope: MemoryScope::None, ..MemoryConfig::default() });
        change(a);
    })
}

fn with_messages(messages: Vec<Message>) -> TurnRequest {
    TurnRequest { messages, history: None, ..question("") }
}

on_every_store! {
    /// The prompt is the instructions and the request; the log has every message.
    async fn each_request_is_answered_alone(test: &mut TestTenure) {
        let t = &test.tenure;
        t.declare(stateless_clerk(|_| ()));
        let (model, none) = (ScriptedModel::new([text_answer("Yes.")]), CountingTools::default());
        run_turn(t, question("I am Ada."), &model, &none).await.unwrap();
        let turn = begin(t, question("Who am I?")).await.unwrap();
        assert_eq!(turn.reconcile_report().omitted, 0);
        execute(*turn, &model, &none).await.unwrap();
        assert_eq!(model.last_prompt(), ["Be kind.", "Who am I?"]);
        let sent = vec![Message::system("Rhyme."), Message::user("Who am I?"), Message::assistant("Yes."), Message::user("Sure?")];
        run_turn(t, with_messages(sent), &model, &none).await.unwrap();
        assert_eq!(model.last_prompt(), ["Be kind.", "Rhyme.", "Who am I?", "Yes.", "Sure?"], "what the client sends is shown");
        let shown = t.preview(&ada(), &question("Again?")).await.unwrap();
        assert_eq!(shown.iter().map(Message::text).collect::<Vec<_>>(), ["Be kind.", "Again?"]);
        assert_eq!(
            conversation(&session_x(t).await),
            ["user: I am Ada.", "assistant: Yes.", "user: Who am I?", "assistant: Yes.", "system: Rhyme.", "user: Sure?", "assistant: Yes."]
        );
    }

    /// The messages of a run are part of its request: tools work, also after a review, which another
    /// process may continue.
    async fn a_run_sees_its_own_tool_calls(test: &mut TestTenure) {
        let t = &test.tenure;
        t.declare(stateless_clerk(|a| a.review = vec![reviewed("refund")]));
        let tools = CountingTools::new([
            (read_only_tool("look_up"), ToolBehavior::succeeds("20 EUR")),
            (tool("refund"), ToolBehavior::succeeds("refunded")),
        ]);
        run_turn(t, question("Hello."), &ScriptedModel::new([text_answer("Hi.")]), &tools).await.unwrap();
        let model = ScriptedModel::new([
            tool_calls_answer(&[("c1", "look_up", json!({}))]),
            tool_calls_answer(&[("c2", "refund", json!({}))]),
            text_answer("Done."),
        ]);
        let outcome = run_turn(t, question("Refund it."), &model, &tools).await.unwrap();
        assert!(outcome.waiting);
        assert_eq!(model.last_prompt(), ["Be kind.", "Refund it.", "", "20 EUR"]);
        let review = session_x(t).await.open_reviews().next().unwrap().opened.review.clone();
        let input = ReviewInput { decision: Decision::Approved, reviewer: "bob".into(), notes: None, arguments: None, choice: None };
        t.decide(&ada(), &review, &input).await.unwrap();
        assert_eq!(take_over(t, &model, &tools).await.len(), 1);
        assert_eq!(model.last_prompt(), ["Be kind.", "Refund it.", "", "20 EUR", "", "refunded"]);
    }

    /// A request that only answers the model's calls is shown with the turn that made them.
    async fn results_of_client_tools_continue_their_turn(test: &mut TestTenure) {
        let t = &test.tenure;
        t.declare(stateless_clerk(|_| ()));
        let none = CountingTools::default();
        run_turn(t, question("Hello."), &ScriptedModel::new([text_answer("Hi.")]), &none).await.unwrap();
        let model = ScriptedModel::new([tool_calls_answer(&[("c1", "clock", json!({}))]), text_answer("Noon.")]);
        run_turn(t, question("What time is it?"), &model, &none).await.unwrap();
        run_turn(t, with_messages(vec![Message::tool("c1", "12:00")]), &model, &none).await.unwrap();
        assert_eq!(model.last_prompt(), ["Be kind.", "What time is it?", "", "12:00"]);
    }

    /// Neither summaries nor memories of the session are shown.
    async fn summaries_and_memories_are_not_shown(test: &mut TestTenure) {
        let t = &test.tenure;
        t.declare(clerk(|a| a.short_term.max_history_turns = Some(1)));
        let (model, none) = (ScriptedModel::new([text_answer("Hm.")]), CountingTools::default());
        for text in ["I like tea.", "I like tea a lot.", "Tea again."] {
            run_turn(t, question(text), &model, &none).await.unwrap();
        }
        let summarizer = ScriptedModel::new([text_answer("They like tea.")]);
        t.compact(&ada(), &id("x"), &summarizer, session::RawObject::default(), Some(1)).await.unwrap();
        let target = memory::MemoryTarget::Session(id("x"));
        t.remember(&ada(), &target, "likes tea".into()).await.unwrap();
        run_turn(t, question("Which tea?"), &model, &none).await.unwrap();
        assert!(model.last_prompt().iter().any(|m| m.contains("likes tea")), "{:?}", model.last_prompt());
        assert!(model.last_prompt().iter().any(|m| m.contains("They like tea.")), "{:?}", model.last_prompt());
        t.declare(stateless_clerk(|_| ()));
        run_turn(t, question("Which tea?"), &model, &none).await.unwrap();
        assert_eq!(model.last_prompt(), ["Be kind.", "Which tea?"]);
        assert_eq!(t.remember(&ada(), &target, "x".into()).await.unwrap_err().code(), "invalid");
    }
}
