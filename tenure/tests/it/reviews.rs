//! Human review: opening, claiming, deciding, and resuming the run.

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use serde_json::{Value, json};
use std::time::Duration;
use tenure::{policy::*, review::*, rules::*, run::*, session::*, *};

fn tools() -> CountingTools {
    CountingTools::new([
        (read_only_tool("look"), ToolBehavior::succeeds("seen")),
        (tool("pay"), ToolBehavior::succeeds("paid")),
        (tool("mail"), ToolBehavior::succeeds("sent")),
    ])
}

fn rules() -> Vec<ReviewRule> {
    let money = ReviewRule { queue: Some("money".to_owned()), ..reviewed("pay*") };
    vec![money, reviewed("mail")]
}

fn script() -> ScriptedModel {
    let wanted = [("c1", "pay", json!({"n": 1})), ("c2", "mail", json!({"to": "bob"})), ("c3", "look", json!({}))];
    ScriptedModel::new([tool_calls_answer(&wanted), text_answer("Done.")])
}

fn declare(test: &TestTenure) {
    test.tenure.declare(clerk(|a| a.review = rules()));
}

/// Creates a session with two open reviews.
async fn start_waiting_run(test: &TestTenure, model: &ScriptedModel, tools: &CountingTools) -> Vec<ReviewId> {
    declare(test);
    let answered = run_turn(&test.tenure, question("Go"), model, tools).await.unwrap();
    assert!(answered.waiting);
    open(&session_x(&test.tenure).await)
}

async fn memory() -> TestTenure {
    TestTenure::new(StoreKind::Memory).await.unwrap()
}

fn code<T: std::fmt::Debug>(result: Result<T>) -> &'static str {
    result.unwrap_err().code()
}

on_every_store! {
    /// Several open reviews are decided by id in any order. Until then the session accepts no
    /// messages; with the last decision its run can be resumed by any node.
    async fn several_reviews_at_once(test: &mut TestTenure) {
        let (model, tools) = (script(), tools());
        let reviews = start_waiting_run(test, &model, &tools).await;
        let s = session_x(&test.tenure).await;
        assert_eq!((s.head().status, reviews.len(), s.head().lease.clone()), (Status::Paused, 2, None));
        assert_eq!(conversation(&s), ["user: Go", "calls: c1 c2 c3", "tool: seen"], "what nobody must allow is done");
        let last_checkpoint = &s.checkpoints.last().unwrap();
        assert_eq!((last_checkpoint.position, last_checkpoint.run.as_ref()), (3, Some(&s.runs[0].id)), "a checkpoint from before the pause");
        let t = &test.tenure;
        let opened: Vec<_> = s.open_reviews().map(|r| (r.opened.step.as_str(), r.opened.queue.as_deref(), r.opened.detail["arguments"].clone())).collect();
        assert_eq!(opened, [("pay", Some("money"), json!({"n": 1})), ("mail", None, json!({"to": "bob"}))]);
        // A paused session rejects messages and turns.
        assert_eq!(code(t.append(&ada(), &id("x"), turn_messages(1)).await), "paused");
        assert_eq!(code(t.begin_turn(&ada(), question("More")).await), "paused");
        assert_eq!(code(t.start_run(&ada(), &id("x"), OnBusy::Queue, resumable()).await), "paused");
        assert_eq!(code(t.activate(&ada(), &id("x")).await), "invalid");
        assert_eq!(code(t.update(&ada(), &id("x"), SessionUpdate::default().status(Status::Active)).await), "invalid");
        assert!(t.find_orphaned_runs(9).await.unwrap().is_empty(), "a run that waits is nobody's");
        // One node decides; another one, opened later, resumes the run.
        let other = test.second_node();
        let seen = other.decide(&ada(), &reviews[1], &review_input(Decision::Approved)).await.unwrap();
        assert_eq!(seen.decided.unwrap().1.decision, Decision::Approved);
        assert_eq!(session_x(t).await.head().status, Status::Paused, "one is still open");
        let again = t.decide(&ada(), &reviews[1], &review_input(Decision::Rejected)).await.unwrap_err();
        assert_eq!((again.code(), again.to_string().contains("eve decided approved")), ("already_decided", true), "{again}");
        other.decide(&ada(), &reviews[0], &review_input(Decision::Rejected)).await.unwrap();
        assert_eq!(session_x(t).await.head().status, Status::Active);
        drop(other);
        test.reopen().await;
        declare(test);
        take_over(&test.tenure, &model, &tools).await.pop().unwrap().unwrap();
        let s = session_x(&test.tenure).await;
        let refused = "tool: A reviewer rejected this call; it was not executed.";
        assert_eq!(conversation(&s)[3..], [refused, "tool: sent", "assistant: Done."]);
        assert!(model.last_prompt().iter().any(|t| t.contains("rejected this call")), "the model was told");
        assert_eq!((tools.calls("pay").len(), tools.calls("mail").len()), (0, 1));
        assert_eq!((ending(&s), s.runs.len()), ((Some(RunOutcome::Completed), None), 1));
    }

    /// Reviews are listed by queue, open or decided; other users' reviews are not visible.
    async fn reviews_are_listed(test: &mut TestTenure) {
        let (model, tools) = (script(), tools());
        let reviews = start_waiting_run(test, &model, &tools).await;
        let t = &test.tenure;
        t.create(&ada(), new_session("quiet")).await.unwrap();
        let list = async |principal: &Principal, filter: ReviewFilter| {
            let page = t.reviews(principal, &filter, None, 10).await.unwrap();
            assert!(page.next.is_none());
            page.reviews.into_iter().map(|(head, r)| (head.info.session_id, r.opened.review)).collect::<Vec<_>>()
        };
        let queue = |name: &str| ReviewFilter::Open(Some(name.to_owned()));
        let of = |n: usize| (id("x"), reviews[n].clone());
        for principal in [ada(), admin()] {
            assert_eq!(list(&principal, ReviewFilter::Open(None)).await, [of(0), of(1)]);
            assert_eq!(list(&principal, queue("money")).await, [of(0)]);
            assert_eq!(list(&principal, queue("mone")).await, []);
            assert_eq!(list(&principal, ReviewFilter::Decided).await, []);
            assert_eq!(t.review(&principal, &reviews[0]).await.unwrap().1.opened.review, reviews[0]);
        }
        let strangers = [Principal::new("acme", "bob"), Principal::new("other", "ada"), Principal::tenant_wide("other")];
        for stranger in strangers.into_iter().map(Result::unwrap) {
            assert_eq!(list(&stranger, ReviewFilter::Open(None)).await, []);
            assert_eq!(code(t.review(&stranger, &reviews[0]).await), "no_such_review");
            assert_eq!(code(t.decide(&stranger, &reviews[0], &review_input(Decision::Approved)).await), "no_such_review");
            assert_eq!(code(t.claim_review(&stranger, &reviews[0], "bob", SignedDuration::from_mins(5)).await), "no_such_review");
        }
        for unknown in [ReviewId::of(&id("x"), 9999), ReviewId::of(&id("nobody"), 1)] {
            assert_eq!(code(t.review(&admin(), &unknown).await), "no_such_review");
        }
        t.decide(&admin(), &reviews[0], &review_input(Decision::Approved)).await.unwrap();
        assert_eq!(list(&ada(), queue("money")).await, []);
        assert_eq!(list(&ada(), ReviewFilter::Open(None)).await, [of(1)]);
        assert_eq!(list(&ada(), ReviewFilter::Decided).await, [of(0)]);
        // Pagination.
        for n in 0..5 {
            run_turn(t, TurnRequest { session: Some(id(&format!("y{n}"))), ..question("Go") }, &model, &tools).await.unwrap();
        }
        let mut listed = 0;
        let mut cursor = None;
        loop {
            let page = t.reviews(&admin(), &queue("money"), cursor, 2).await.unwrap();
            listed += page.reviews.len();
            cursor = page.next;
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(listed, 5);
    }

    /// Of two concurrent decisions, exactly one is accepted.
    async fn one_decision_counts(test: &mut TestTenure) {
        let (model, tools) = (script(), tools());
        let reviews = start_waiting_run(test, &model, &tools).await;
        let mut deciders = Vec::new();
        for n in 0..6 {
            let (tenure, review) = (if n % 2 == 0 { test.second_node() } else { test.tenure.clone() }, reviews[0].clone());
            let decision = if n % 3 == 0 { Decision::Approved } else { Decision::Rejected };
            deciders.push(tokio::spawn(async move { tenure.decide(&ada(), &review, &review_input(decision)).await.map_err(|e| e.code()) }));
        }
        let mut won = Vec::new();
        let mut late = 0;
        for decider in deciders {
            match decider.await.unwrap() {
                Ok(review) => won.push(review.decided.unwrap().1.decision),
                Err(code) => late += usize::from(code == "already_decided"),
            }
        }
        assert_eq!((won.len(), late), (1, 5));
        let s = session_x(&test.tenure).await;
        assert_eq!(s.reviews[0].decided.as_ref().unwrap().1.decision, won[0]);
        assert_eq!(s.head().info.metadata["hitl_decisions"].as_array().unwrap().len(), 1);
    }

    /// An overdue review is decided according to its rule, by the runner and by the sweep.
    async fn an_undecided_review_times_out(test: &mut TestTenure) {
        let rule = |tool: &str, minutes: u64, on_timeout| ReviewRule {
            timeout: Some(HumanDuration::of(Duration::from_secs(60 * minutes))), on_timeout, ..reviewed(tool)
        };
        let rules = vec![rule("pay", 10, Decision::Approved), rule("mail", 20, Decision::Rejected)];
        test.tenure.declare(clerk(|a| a.review = rules.clone()));
        let t = test.tenure.clone();
        let (model, tools) = (script(), tools());
        for session in ["x", "swept"] {
            run_turn(&t, TurnRequest { session: Some(id(session)), ..question("Go") }, &model, &tools).await.unwrap();
        }
        assert_eq!(t.decide_overdue().await.unwrap(), 0);
        test.advance(SignedDuration::from_mins(11));
        assert_eq!(t.decide_overdue().await.unwrap(), 2);
        assert_eq!(session_x(&t).await.head().status, Status::Paused, "the other one has more time");
        test.advance(SignedDuration::from_mins(10));
        assert!(t.sweep().await.unwrap().failed.is_empty());
        let mut decided = t.sweep().await.unwrap().decided.len();
        decided += t.decide_overdue().await.unwrap();
        assert_eq!(decided, 0, "the sweep had done all of it");
        let outcomes = take_over(&t, &model, &tools).await;
        assert_eq!(outcomes.into_iter().map(|d| d.unwrap().waiting).collect::<Vec<_>>(), [false, false]);
        for session in ["x", "swept"] {
            let s = t.load(&ada(), &id(session)).await.unwrap();
            assert_eq!(conversation(&s)[3..], ["tool: paid", "tool: A reviewer rejected this call; it was not executed. Note: decided automatically: the review timed out", "assistant: Done."]);
            assert_eq!(s.head().info.metadata["hitl_decisions"][0]["reviewer"], "timeout");
        }
    }
}

/// Decisions are stored in the metadata with exactly these fields.
#[tokio::test]
async fn decisions_are_stored_in_the_metadata() {
    let test = memory().await;
    let (model, tools) = (script(), tools());
    let reviews = start_waiting_run(&test, &model, &tools).await;
    let notes = "Classification correct, proceed with extraction".to_owned();
    let expected =
        ReviewInput { notes: Some(notes.clone()), reviewer: "user_789".to_owned(), ..review_input(Decision::Approved) };
    test.tenure.decide(&ada(), &reviews[0], &expected).await.unwrap();
    test.tenure.decide(&ada(), &reviews[1], &review_input(Decision::Rejected)).await.unwrap();
    let s = session_x(&test.tenure).await;
    let at = test.now();
    assert_eq!(
        s.head().info.metadata["hitl_decisions"],
        json!([
            {"step": "pay", "decision": "approved", "reviewer": "user_789", "timestamp": at, "notes": notes},
            {"step": "mail", "decision": "rejected", "reviewer": "eve", "timestamp": at},
        ])
    );
}

/// A claimed review can be decided only by its holder, until the claim is released or expires.
#[tokio::test]
async fn a_review_can_be_claimed() {
    let test = memory().await;
    let reviews = start_waiting_run(&test, &script(), &tools()).await;
    let (t, five) = (&test.tenure, SignedDuration::from_mins(5));
    let claim = async |reviewer: &str| t.claim_review(&ada(), &reviews[0], reviewer, five).await;
    let release = async |reviewer: &str| t.release_review(&ada(), &reviews[0], reviewer).await;
    let held = claim("eve").await.unwrap().claimed.unwrap();
    assert_eq!(held, ("eve".to_owned(), Some(test.now() + five)));
    assert_eq!(code(claim("mallory").await), "claimed");
    assert_eq!(code(release("mallory").await), "claimed", "nor can others give it back");
    let by = |reviewer: &str| ReviewInput { reviewer: reviewer.to_owned(), ..review_input(Decision::Approved) };
    assert_eq!(code(t.decide(&ada(), &reviews[0], &by("mallory")).await), "claimed");
    claim("eve").await.unwrap();
    assert_eq!(release("eve").await.unwrap().claimed, None);
    claim("mallory").await.unwrap();
    test.advance(five);
    claim("eve").await.unwrap();
    t.decide(&ada(), &reviews[0], &by("eve")).await.unwrap();
    assert_eq!(code(claim("eve").await), "already_decided");
    assert_eq!(session_x(t).await.open_reviews().count(), 1, "the other one is not touched");
}

/// A correction replaces the arguments. They must be an object of limited size.
#[tokio::test]
async fn a_correction_replaces_the_arguments() {
    let test = memory().await;
    let (model, tools) = (script(), tools());
    let reviews = start_waiting_run(&test, &model, &tools).await;
    let t = &test.tenure;
    let corrected = |arguments: Option<Value>| ReviewInput { arguments, ..review_input(Decision::Corrected) };
    for bad in [None, Some(json!([1])), Some(json!("x"))] {
        assert_eq!(code(t.decide(&ada(), &reviews[0], &corrected(bad)).await), "invalid");
    }
    let too_large = json!({"n": "x".repeat(t.limits().max_info_bytes)});
    assert_eq!(code(t.decide(&ada(), &reviews[0], &corrected(Some(too_large))).await), "too_large");
    let long = ReviewInput { notes: Some("x".repeat(t.limits().max_info_bytes)), ..review_input(Decision::Approved) };
    assert_eq!(code(t.decide(&ada(), &reviews[0], &long).await), "too_large");
    t.decide(&ada(), &reviews[0], &corrected(Some(json!({"n": 7})))).await.unwrap();
    t.decide(&ada(), &reviews[1], &review_input(Decision::Approved)).await.unwrap();
    take_over(t, &model, &tools).await.pop().unwrap().unwrap();
    assert_eq!((tools.calls("pay"), tools.calls("mail")), (vec![json!({"n": 7})], vec![json!({"to": "bob"})]));
}

/// The last prompt: the arguments of its calls, and the results.
fn shown_calls_and_results(model: &ScriptedModel) -> (Vec<String>, Vec<String>) {
    let prompts = model.prompts();
    let last = prompts.last().unwrap();
    assert!(is_valid(last));
    let calls = last.iter().flat_map(|m| m.tool_calls()).map(|c| format!("{} {}", c.id, c.arguments)).collect();
    (calls, last.iter().filter(|m| m.role() == Role::Tool).map(Message::text).collect())
}

on_every_store! {
    /// Prompts contain the corrected arguments and the reviewers' notes, in this turn and in later
    /// ones, also if only the recent part of a long session is loaded. The log keeps what the model
    /// wrote (D-063).
    async fn a_model_is_shown_what_reviewers_changed(test: &mut TestTenure) {
        let (model, tools) = (script(), tools());
        let turns = |a: &mut Assistant| {
            a.review = rules();
            a.short_term.max_history_turns = Some(3);
        };
        let declare = |tenure: &Tenure| tenure.declare(clerk(turns));
        declare(&test.tenure);
        // Earlier calls with the same ids and without any review.
        let earlier = ScriptedModel::new([tool_calls_answer(&[("c1", "look", json!({})), ("c2", "look", json!({}))]), text_answer("Looked.")]);
        for _ in 0..30 {
            run_turn(&test.tenure, question("Look"), &earlier, &tools).await.unwrap();
        }
        run_turn(&test.tenure, question("Go"), &model, &tools).await.unwrap();
        let reviews = open(&session_x(&test.tenure).await);
        let noted = |decision, notes: &str| ReviewInput { notes: Some(notes.to_owned()), ..review_input(decision) };
        let corrected = ReviewInput { arguments: Some(json!({"n": 7})), ..noted(Decision::Corrected, "not so much") };
        test.tenure.decide(&ada(), &reviews[0], &corrected).await.unwrap();
        test.tenure.decide(&ada(), &reviews[1], &noted(Decision::Approved, "this once")).await.unwrap();
        test.reopen().await;
        declare(&test.tenure);
        take_over(&test.tenure, &model, &tools).await.pop().unwrap().unwrap();
        let before = ["c1 {}", "c2 {}", "c1 {}", "c2 {}"];
        let (shown_calls, results) = shown_calls_and_results(&model);
        assert_eq!(shown_calls[..4], before);
        assert_eq!(shown_calls[4..], [r#"c1 {"n":7}"#, r#"c2 {"to":"bob"}"#, "c3 {}"]);
        let expected_results = ["[a reviewer changed the arguments: not so much]\npaid", "[a reviewer approved this call: this once]\nsent", "seen"];
        assert_eq!(results[..4], ["seen"; 4]);
        assert_eq!(results[4..], expected_results);
        let stored = session_x(&test.tenure).await;
        let wrote = stored.messages.iter().rev().find(|m| !m.message.tool_calls().is_empty()).unwrap();
        assert_eq!(wrote.message.tool_calls()[0].arguments, r#"{"n":1}"#, "the log keeps what the model wrote");
        assert!(stored.messages.iter().any(|m| m.message.text() == "paid"));
        // The correction also appears in the next turn, but not, after a rewind of the reviewed
        // turn, for another call with that id.
        let next = ScriptedModel::new([text_answer("Thanks.")]);
        run_turn(&test.tenure, question("And?"), &next, &tools).await.unwrap();
        assert_eq!(shown_calls_and_results(&next).1[2..], expected_results);
        assert_eq!(history(&session_x(&test.tenure).await, &Window::default()).iter().filter(|m| m.text().contains("[a reviewer")).count(), 2);
        test.tenure.rewind(&ada(), &id("x"), Point::Turn(30)).await.unwrap();
        run_turn(&test.tenure, question("Other"), &next, &tools).await.unwrap();
        assert_eq!(shown_calls_and_results(&next).0, ["c1 {}", "c2 {}", "c1 {}", "c2 {}"]);
        assert_eq!(shown_calls_and_results(&next).1, ["seen"; 4]);
    }
}

/// Cancelling a paused run reactivates its session.
#[tokio::test]
async fn cancelling_a_run_that_waits() {
    let test = memory().await;
    let reviews = start_waiting_run(&test, &script(), &tools()).await;
    let run = session_x(&test.tenure).await.runs[0].id.clone();
    test.tenure.cancel(&ada(), &id("x"), &run).await.unwrap();
    let s = session_x(&test.tenure).await;
    assert_eq!((s.head().status, s.open_reviews().count(), s.head().reviews.len()), (Status::Active, 0, 0));
    assert_eq!(ending(&s), (Some(RunOutcome::Cancelled), Some("cancelled".to_owned())));
    assert_eq!(
        code(test.tenure.decide(&ada(), &reviews[0], &review_input(Decision::Approved)).await),
        "already_decided"
    );
    assert!(test.tenure.find_orphaned_runs(9).await.unwrap().is_empty());
    let model = ScriptedModel::new([text_answer("Fine.")]);
    run_turn(&test.tenure, question("Never mind"), &model, &tools()).await.unwrap();
    assert!(is_valid(&model.prompts()[0]));
}

/// A rewind to before a review voids the review and ends its run.
#[tokio::test]
async fn rewinding_past_an_open_review() {
    let test = memory().await;
    let (model, tools) = (script(), tools());
    let reviews = start_waiting_run(&test, &model, &tools).await;
    test.tenure.rewind(&ada(), &id("x"), Point::Position(1)).await.unwrap();
    let s = session_x(&test.tenure).await;
    assert_eq!((s.head().status, s.open_reviews().count(), s.head().reviews.len()), (Status::Active, 0, 0));
    assert_eq!(ending(&s).0, Some(RunOutcome::Cancelled));
    assert_eq!(
        code(test.tenure.decide(&ada(), &reviews[0], &review_input(Decision::Approved)).await),
        "already_decided"
    );
    let turn = test.tenure.start_run(&ada(), &id("x"), OnBusy::Reject, resumable()).await.unwrap();
    assert!(execute(turn, &model, &tools).await.unwrap().waiting, "it is asked anew");
    let new_reviews = open(&session_x(&test.tenure).await);
    assert!(new_reviews.len() == 2 && !new_reviews.contains(&reviews[0]));
}

/// A session with open reviews that was deleted is paused again when it is restored.
#[tokio::test]
async fn a_restored_session_still_waits() {
    let test = memory().await;
    let (model, tools) = (script(), tools());
    let reviews = start_waiting_run(&test, &model, &tools).await;
    let t = &test.tenure;
    t.delete(&ada(), &id("x"), None).await.unwrap();
    assert_eq!(code(t.decide(&ada(), &reviews[0], &review_input(Decision::Approved)).await), "gone");
    assert!(t.reviews(&ada(), &ReviewFilter::Open(None), None, 9).await.unwrap().reviews.is_empty());
    assert_eq!(t.restore(&ada(), &id("x"), None).await.unwrap().status, Status::Paused);
    assert_eq!(code(t.begin_turn(&ada(), question("More")).await), "paused");
    for review in &reviews {
        t.decide(&ada(), review, &review_input(Decision::Approved)).await.unwrap();
    }
    take_over(t, &model, &tools).await.pop().unwrap().unwrap();
    assert_eq!(conversation(&session_x(t).await)[3..], ["tool: paid", "tool: sent", "assistant: Done."]);
}

/// A client that sends its full history includes the review notice; this must not discard the
/// actual answer (D-062).
#[tokio::test]
async fn a_resent_notice_is_ignored() {
    let test = memory().await;
    let (model, tools) = (script(), tools());
    let reviews = start_waiting_run(&test, &model, &tools).await;
    let s = session_x(&test.tenure).await;
    let notice = s.notice().unwrap();
    assert!(reviews.iter().all(|r| notice.contains(&r.to_string())) && notice.contains("money"), "{notice}");
    for review in &reviews {
        test.tenure.decide(&ada(), review, &review_input(Decision::Approved)).await.unwrap();
    }
    take_over(&test.tenure, &model, &tools).await.pop().unwrap().unwrap();
    let s = session_x(&test.tenure).await;
    assert_eq!(s.notice(), None);
    let sent = vec![Message::user("Go"), Message::assistant(&notice), Message::user("And?")];
    // The session is found by the notice, only for its owner, and only if the other messages match
    // (D-026).
    let t = &test.tenure;
    assert_eq!(t.find(&ada(), &sent).await.unwrap(), Some(id("x")));
    assert_eq!(t.find(&Principal::new("acme", "bob").unwrap(), &sent).await.unwrap(), None);
    let other = vec![Message::user("Stop"), sent[1].clone(), sent[2].clone()];
    assert_eq!(t.find(&ada(), &other).await.unwrap(), None);
    let unknown = Message::assistant(&notice.replace("_x", "_nowhere"));
    assert_eq!(t.find(&ada(), &[sent[0].clone(), unknown, sent[2].clone()]).await.unwrap(), None);
    let plan = reconcile(&s, &IncomingRequest { messages: &sent, ..IncomingRequest::default() });
    assert_eq!((plan.retained, plan.rewound, plan.append.len()), (s.messages.len(), 0, 1));
    assert_eq!(plan.append[0].message.text(), "And?");
    let model = ScriptedModel::new([text_answer("Yes.")]);
    let ask = |messages| TurnRequest {
        messages,
        history: Some(HistoryMode::Auto),
        session: None,
        content_matching: true,
        ..question("")
    };
    run_turn(t, ask(sent.clone()), &model, &tools).await.unwrap();
    assert_eq!(conversation(&session_x(t).await)[6..], ["user: And?", "assistant: Yes."][..]);
    // Later requests, which still contain the notice, work too.
    let sent = [sent, vec![Message::assistant("Yes."), Message::user("Bye")]].concat();
    run_turn(t, ask(sent), &model, &tools).await.unwrap();
    assert_eq!(conversation(&session_x(t).await)[8..], ["user: Bye", "assistant: Yes."][..]);
}
