//! Decisions that the model requests with `ask_human`, and review rules with conditions on arguments.

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use serde_json::{Value, json};
use std::time::Duration;
use tenure::{policy::*, review::*, run::*, session::*, *};

fn asking_clerk(review: Vec<ReviewRule>) -> Assistant {
    clerk(|a| {
        a.tools = vec![ToolSource::AskHuman];
        a.review = review;
    })
}

/// A model that asks once, and then answers.
fn asks(arguments: Value) -> ScriptedModel {
    ScriptedModel::new([tool_calls_answer(&[("c1", "ask_human", arguments)]), text_answer("Thank you.")])
}

async fn open_review(t: &Tenure) -> Review {
    session_x(t).await.open_reviews().next().unwrap().clone()
}

/// The result of the call in session `x`.
async fn result(t: &Tenure) -> Value {
    let s = session_x(t).await;
    let message = s.messages.iter().rev().find(|m| m.message.tool_call_id().is_some()).unwrap();
    serde_json::from_str(&message.message.text()).unwrap()
}

on_every_store! {
    /// A question pauses the session, survives a restart, and its decision is the result of the call.
    async fn a_decision_is_the_result(test: &mut TestTenure) {
        test.tenure.declare(asking_clerk(Vec::new()));
        let none = CountingTools::default();
        let model = asks(json!({"question": "Which color?", "choices": ["red", "blue"], "queue": "design"}));
        let outcome = run_turn(&test.tenure, question("Paint it."), &model, &none).await.unwrap();
        assert!(outcome.waiting);
        test.reopen().await;
        test.tenure.declare(asking_clerk(Vec::new()));
        let t = &test.tenure;
        assert_eq!(session_x(t).await.head().status, Status::Paused);
        let page = t.reviews(&admin(), &ReviewFilter::Open(Some("design".into())), None, 10).await.unwrap();
        let review = &page.reviews[0].1;
        assert_eq!((review.question(), review.choices()), (Some("Which color?"), vec!["red", "blue"]));
        assert_eq!(review.opened.step, "ask_human");
        let notice = session_x(t).await.notice().unwrap();
        assert!(notice.contains("queue design): Which color?\n"), "{notice}");
        let rev = review.opened.review.clone();
        let approved = |choice: Option<&str>| ReviewInput { choice: choice.map(str::to_owned), ..review_input(Decision::Approved) };
        for (input, want) in [
            (approved(Some("green")), "choice"),
            (ReviewInput { arguments: Some(json!({})), ..approved(Some("red")) }, "choice"),
            (ReviewInput { arguments: Some(json!({"color": "red"})), ..review_input(Decision::Corrected) }, "arguments.answer"),
        ] {
            let error = t.decide(&admin(), &rev, &input).await.unwrap_err();
            assert!(matches!(&error, Error::Invalid { param, .. } if param == want), "{error}");
        }
        let decided = t.decide(&admin(), &rev, &ReviewInput { notes: Some("as the door".into()), ..approved(Some("blue")) }).await.unwrap();
        assert_eq!(decided.choice(), Some("blue"));
        take_over(t, &model, &none).await.remove(0).unwrap();
        assert_eq!(result(t).await, json!({"decision": "approved", "answer": "blue", "notes": "as the door"}));
        assert_eq!(model.last_prompt().last().unwrap(), &result(t).await.to_string(), "the model sees the decision once");
        let s = session_x(t).await;
        assert_eq!((s.head().status, s.head().info.metadata["hitl_decisions"][0]["step"].as_str()), (Status::Active, Some("ask_human")));
        assert_eq!(t.audit(&admin(), &id("x")).await.unwrap().broken, None);
    }

    /// Every decision has a meaning for a question, and so does a timeout.
    async fn decisions_are_answers(test: &mut TestTenure) {
        let t = &test.tenure;
        let timeout = Some(HumanDuration::of(Duration::from_secs(60)));
        t.declare(asking_clerk(vec![ReviewRule { timeout, queue: Some("desk".into()), ..reviewed("ask_*") }]));
        let none = CountingTools::default();
        let noted = |decision, notes: Option<&str>| ReviewInput { notes: notes.map(str::to_owned), ..review_input(decision) };
        let corrected = ReviewInput { arguments: Some(json!({"answer": "Tuesday"})), ..review_input(Decision::Corrected) };
        for (input, want) in [
            (Some(noted(Decision::Approved, None)), json!({"decision": "approved"})),
            (Some(noted(Decision::Approved, Some("Monday"))), json!({"decision": "approved", "answer": "Monday"})),
            (Some(noted(Decision::Rejected, Some("Never."))), json!({"decision": "rejected", "answer": "Never."})),
            (Some(corrected), json!({"decision": "corrected", "answer": "Tuesday"})),
            (None, json!({"decision": "rejected", "answer": "decided automatically: the review timed out"})),
        ] {
            let _ = t.purge(&ada(), &id("x"), None).await;
            let model = asks(json!({"question": "When?"}));
            run_turn(t, question("Plan it."), &model, &none).await.unwrap();
            let review = open_review(t).await;
            assert_eq!(review.opened.queue.as_deref(), Some("desk"), "the queue of the rule");
            match input {
                Some(input) => drop(t.decide(&admin(), &review.opened.review, &input).await.unwrap()),
                None => {
                    test.advance(SignedDuration::from_secs(61));
                    assert_eq!(t.decide_overdue().await.unwrap(), 1);
                }
            }
            take_over(t, &model, &none).await.remove(0).unwrap();
            assert_eq!(result(t).await, want);
        }
    }

    /// Invalid arguments are returned to the model, and no person is asked.
    async fn an_invalid_question(test: &mut TestTenure) {
        let t = &test.tenure;
        t.declare(asking_clerk(Vec::new()));
        let too_many = vec!["x"; 33];
        for arguments in [json!({}), json!({"question": " "}), json!({"question": "?", "queue": "a\nb"}), json!({"question": "?", "choices": too_many}), json!("{")] {
            let _ = t.purge(&ada(), &id("x"), None).await;
            let outcome = run_turn(t, question("Ask."), &asks(arguments.clone()), &CountingTools::default()).await.unwrap();
            assert!(!outcome.waiting, "{arguments}");
            assert!(outcome.calls[0].content.as_ref().unwrap().starts_with("[no person was asked: "), "{:?}", outcome.calls);
            assert!(session_x(t).await.reviews.is_empty());
        }
    }

    /// A rule with a condition holds only the calls whose arguments satisfy it, and every call for which
    /// that is not certain.
    async fn a_rule_with_a_condition(test: &mut TestTenure) {
        let t = &test.tenure;
        let rule = |condition: &str, queue: &str| ReviewRule { condition: Some(condition.to_owned()), queue: Some(queue.to_owned()), ..reviewed("refund_*") };
        t.declare(clerk(|a| a.review = vec![rule("amount > 1000", "board"), rule("amount > 100", "finance")]));
        let parameters = json!({"type": "object", "properties": {"amount": {"type": "number"}}});
        for (arguments, queue) in [
            (json!({"amount": 100}), None),
            (json!({"amount": 101}), Some("finance")),
            (json!({"amount": 5000}), Some("board")),
            (json!({}), Some("board")),
            (json!({"amount": null}), Some("board")),
            (json!({"amount": "5"}), Some("board")),
            (json!("not JSON"), Some("board")),
        ] {
            let _ = t.purge(&ada(), &id("x"), None).await;
            let model = ScriptedModel::new([tool_calls_answer(&[("c1", "refund_order", arguments.clone())]), text_answer("Done.")]);
            let tools = CountingTools::new([(Tool { parameters: parameters.clone(), ..tool("refund_order") }, ToolBehavior::succeeds("refunded"))]);
            let outcome = run_turn(t, question("Refund."), &model, &tools).await.unwrap();
            assert_eq!(outcome.waiting, queue.is_some(), "{arguments}");
            assert_eq!(tools.calls("refund_order").len(), usize::from(queue.is_none()), "{arguments}");
            let s = session_x(t).await;
            assert_eq!(s.open_reviews().next().and_then(|r| r.opened.queue.as_deref()), queue, "{arguments}");
        }
    }
}
