//! Exports and imports: the log is transferred, validated, and has the same meaning elsewhere.

use crate::audit::create_decided_session;
use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use serde_json::{Value, json};
use tenure::{log::*, review::*, run::*, session::*, *};

/// Creates a session with runs, tools, reviews, checkpoints, media, an edit and a summary, and a
/// fork of it that was rewound.
async fn create_sessions(test: &TestTenure) {
    let t = &test.tenure;
    create_decided_session(test, "p", 1).await;
    test.advance(SignedDuration::from_secs(7));
    t.append(&ada(), &id("p"), vec![image_message("see", "P"), Message::assistant("nice")]).await.unwrap();
    t.checkpoint(&ada(), &id("p"), Some(CheckpointLabel::new("mid").unwrap())).await.unwrap();
    t.append(&ada(), &id("p"), vec![image_message("gone", "Q"), Message::assistant("cut off")]).await.unwrap();
    t.rewind(&ada(), &id("p"), "mid").await.unwrap();
    test.advance(SignedDuration::from_secs(7));
    t.append(&ada(), &id("p"), turn_messages(1)).await.unwrap();
    t.fork(&ada(), &id("p"), Fork::at(Point::End).id(Some(id("x")))).await.unwrap();
    test.advance(SignedDuration::from_secs(7));
    t.append(&ada(), &id("x"), turn_messages(2)).await.unwrap();
    create_decided_session(test, "x", 1).await;
    t.rewind(&ada(), &id("x"), Point::Turn(3)).await.unwrap();
    t.append(&ada(), &id("x"), turn_messages(3)).await.unwrap();
    let change =
        SessionPatch { title: Patch::Set("T".into()), tags: Patch::Set(vec!["a".into()]), ..SessionPatch::default() };
    t.update(&ada(), &id("x"), change).await.unwrap();
}

/// The meaning of a session, without the names that an import changes.
fn meaning(session: &Session) -> Value {
    let review = |r: &Review| {
        let decided =
            r.decided.as_ref().map(|(at, d)| json!([at, d.decision, d.reviewer, d.notes, d.arguments, d.previous]));
        json!([
            r.opened_at,
            r.seq,
            r.opened.step,
            r.opened.run,
            r.opened.call,
            r.opened.queue,
            r.opened.detail,
            r.claimed,
            decided,
            r.void
        ])
    };
    let run = |r: &Run| {
        let tools: Vec<_> = r.tools_started.iter().map(|s| json!([s.seq, s.call, s.tool, s.cached])).collect();
        json!([r.id, r.started_at, r.ended, r.error, r.code, r.seq, r.detail, tools])
    };
    let h = session.head();
    json!({
        "messages": session.messages, "checkpoints": session.checkpoints,
        "runs": session.runs.iter().map(run).collect::<Vec<_>>(),
        "reviews": session.reviews.iter().map(review).collect::<Vec<_>>(),
        "summary": session.summary().map(|s| (s.seq, s.at, s.upto, s.position, s.text())),
        "info": [json!(h.info.model), json!(h.info.title), json!(h.info.tags), json!(h.info.metadata), json!(h.info.updated_at)],
        "head": [json!(h.digest), json!(h.status), json!(h.active_at), json!(h.seq), json!(h.decisions), json!(h.assistant), json!(h.thread)],
    })
}

async fn discarded(t: &Tenure, principal: &Principal, session: &str) -> Value {
    let all = t.discarded(principal, &id(session)).await.unwrap();
    all.iter().map(|d| json!([d.seq, d.at, d.position, d.messages])).collect()
}

/// An export after a round trip through JSON.
fn round_trip(export: &Export) -> Export {
    let text = serde_json::to_string(export).unwrap();
    let mut imported = import::read(&text, None).unwrap();
    let foreign = imported.pop().unwrap().unwrap();
    assert_eq!((foreign.format, foreign.skipped, imported.len()), (import::ImportFormat::Tenure, vec![], 0));
    assert_eq!(foreign.export, serde_json::from_str::<Export>(&text).unwrap());
    foreign.export
}

on_every_store! {
    /// An import preserves times, runs, reviews, checkpoints and branches, and can be continued.
    async fn an_import_has_the_same_log(test: &mut TestTenure) {
        create_sessions(test).await;
        let other_test = TestTenure::new(StoreKind::Memory).await.unwrap();
        other_test.advance(SignedDuration::from_hours(24));
        let bob = Principal::new("acme", "bob").unwrap();
        for session in ["p", "x"] {
            let export = round_trip(&test.tenure.export(&ada(), &id(session)).await.unwrap());
            assert_eq!((export.tenure, export.log.len() as u64), (2, test.tenure.head(&ada(), &id(session)).await.unwrap().seq));
            assert_eq!(export.blobs.len(), 1, "the one that is only in the discarded part");
            let original = test.tenure.load(&ada(), &id(session)).await.unwrap();
            for (target, principal) in [(&test.tenure, &ada()), (&other_test.tenure, &bob)] {
                let name = format!("{session}2");
                target.import_new(principal, &id(&name), &export).await.unwrap();
                let copy = target.load(principal, &id(&name)).await.unwrap();
                assert_eq!(meaning(&copy), meaning(&original));
                assert_eq!(discarded(target, principal, &name).await, discarded(&test.tenure, &ada(), session).await);
                assert_eq!((&copy.head().user, &copy.head().parent, copy.head().first), (&principal.user, &None, 1));
                let near = copy.head().info.created_at.duration_since(original.head().info.created_at);
                assert!(near.abs() < SignedDuration::from_millis(1), "{near:?}");
                let (original_trail, imported_trail) = (test.tenure.audit(&ada(), &id(session)).await.unwrap(), target.audit(principal, &id(&name)).await.unwrap());
                assert_eq!((imported_trail.broken.clone(), imported_trail.decisions.len()), (None, original_trail.decisions.len()));
                assert!(imported_trail.decisions.iter().zip(&original_trail.decisions).all(|(a, b)| a.hash == b.hash && a.imported && !b.imported));
                for review in &copy.reviews {
                    assert_eq!(target.review(principal, &review.opened.review).await.unwrap().1, *review, "it is found by its new name");
                }
                // An export of the copy is the same log and continues the same hash chain.
                let again = round_trip(&target.export(principal, &id(&name)).await.unwrap());
                assert_eq!((again.messages, again.log.len()), (export.messages.clone(), export.log.len()));
            }
        }
        create_decided_session(test, "x2", 1).await;
        let trail = test.tenure.audit(&ada(), &id("x2")).await.unwrap();
        assert_eq!((trail.broken, trail.decisions.len()), (None, 6));
        assert_eq!(trail.decisions.iter().filter(|d| d.imported).count(), 4);
        for target in [&test.tenure, &other_test.tenure] {
            assert_eq!(target.examine(|_| ()).await.unwrap(), []);
        }
        test.reopen().await;
        let reopened = test.tenure.load(&ada(), &id("p2")).await.unwrap();
        assert_eq!(meaning(&reopened), meaning(&test.tenure.load(&ada(), &id("p")).await.unwrap()));
    }

    /// An open run ends with the import, its reviews are void, and no lease is held (D-090).
    async fn an_import_ends_runs_and_reviews_in_progress(test: &mut TestTenure) {
        test.tenure.declare(clerk(|a| a.review = vec![reviewed("pay")]));
        let tools = CountingTools::new([(tool("pay"), ToolBehavior::succeeds("paid"))]);
        let model = ScriptedModel::new([tool_calls_answer(&[("c1", "pay", json!({}))]), text_answer("Done.")]);
        assert!(run_turn(&test.tenure, question("Go"), &model, &tools).await.unwrap().waiting);
        let export = round_trip(&test.tenure.export(&ada(), &id("x")).await.unwrap());
        test.advance(SignedDuration::from_secs(5));
        let head = test.tenure.import_new(&ada(), &id("y"), &export).await.unwrap();
        assert_eq!((head.status, head.run, head.lease, head.reviews.len()), (Status::Active, None, None, 0));
        let s = test.tenure.load(&ada(), &id("y")).await.unwrap();
        assert_eq!(ending(&s), (Some(RunOutcome::Cancelled), Some("cancelled".to_owned())));
        assert!(s.reviews[0].void);
        assert!(test.tenure.reviews(&ada(), &ReviewFilter::Open(None), None, 9).await.unwrap().reviews.iter().all(|(h, _)| h.info.session_id == id("x")));
        test.tenure.append(&ada(), &id("y"), turn_messages(1)).await.unwrap();
        assert_eq!(test.tenure.examine(|_| ()).await.unwrap(), []);
    }

    /// A second import of an export reports the first; both exist.
    async fn a_second_import_is_reported(test: &mut TestTenure) {
        let t = test.tenure.clone();
        t.create(&ada(), new_session("x")).await.unwrap();
        t.append(&ada(), &id("x"), turn_messages(1)).await.unwrap();
        let plain = Export { messages: turn_messages(7), ..Export::default() };
        for export in [round_trip(&t.export(&ada(), &id("x")).await.unwrap()), plain] {
            let name = |n: usize| id(&format!("{}{n}", if export.log.is_empty() { "plain" } else { "log" }));
            assert_eq!(t.find_earlier_imports(&ada(), &export).await.unwrap(), []);
            t.import_new(&ada(), &name(1), &export).await.unwrap();
            assert_eq!(t.find_earlier_imports(&ada(), &export).await.unwrap(), [name(1)]);
            t.import_new(&ada(), &name(2), &export).await.unwrap();
            let mut both = t.find_earlier_imports(&admin(), &export).await.unwrap();
            both.sort();
            assert_eq!(both, [name(1), name(2)]);
            // Later changes to the first import do not matter; other users and tenants do not learn
            // of it.
            t.append(&ada(), &name(1), turn_messages(2)).await.unwrap();
            t.fork(&ada(), &name(1), Point::End).await.unwrap();
            assert_eq!(t.find_earlier_imports(&ada(), &export).await.unwrap().len(), 2);
            for principal in [Principal::new("acme", "bob"), Principal::tenant_wide("other")] {
                assert_eq!(t.find_earlier_imports(&principal.unwrap(), &export).await.unwrap(), []);
            }
            let other = Export { title: Some("other".into()), ..export.clone() };
            assert_eq!(t.find_earlier_imports(&ada(), &other).await.unwrap(), []);
            t.purge(&ada(), &name(2), None).await.unwrap();
            assert_eq!(t.find_earlier_imports(&ada(), &export).await.unwrap(), [name(1)]);
        }
    }
}

/// Title, tags, model and metadata of the readable part take precedence; an export older than the
/// time to live is live after the import.
#[tokio::test]
async fn an_old_export_is_live_and_can_be_edited() {
    let mut test = TestTenure::new(StoreKind::Memory).await.unwrap();
    let ttl = Some(std::time::Duration::from_secs(3600));
    test.reopen_with(|o| o.policy.ttl = ttl).await;
    let t = test.tenure.clone();
    let metadata = json!({"a": 1, "b": {"c": 2}}).as_object().unwrap().clone();
    t.create(&ada(), NewSession { model: Some("m".into()), title: Some("T".into()), metadata, ..new_session("x") })
        .await
        .unwrap();
    t.append(&ada(), &id("x"), turn_messages(1)).await.unwrap();
    let export = round_trip(&t.export(&ada(), &id("x")).await.unwrap());
    test.advance(SignedDuration::from_hours(48));
    assert_eq!(t.load(&ada(), &id("x")).await.unwrap_err().code(), "gone");
    let metadata = json!({"b": {"d": 3}}).as_object().unwrap().clone();
    let edited = Export {
        model: None,
        title: Some("New".into()),
        metadata: metadata.clone(),
        thread: Some("th".into()),
        ..export
    };
    t.import_new(&ada(), &id("y"), &edited).await.unwrap();
    let s = t.load(&ada(), &id("y")).await.unwrap();
    assert_eq!(
        (s.head().info.model.clone(), s.head().info.title.as_deref(), &s.head().info.metadata),
        (None, Some("New"), &metadata)
    );
    assert_eq!((s.head().thread.as_deref(), s.messages[0].at), (Some("th"), edited.log[1].at));
    assert_eq!(t.examine(|_| ()).await.unwrap(), []);
}

/// Exports of form 1 have no log. Their decisions cannot be verified and are omitted.
#[tokio::test]
async fn exports_of_form_1_are_imported() {
    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    let text = r#"{"tenure":1,"session_id":"old","title":"T","metadata":{"k":1,"hitl_decisions":[{"step":"pay","decision":"approved","reviewer":"eve","timestamp":"2026-01-01T00:00:00Z"}]},
        "messages":[{"role":"user","content":"hi"}],"checkpoints":[{"label":"here","position":1}]}"#;
    let foreign = import::read(text, None).unwrap().pop().unwrap().unwrap();
    assert_eq!(foreign.skipped[0].location, "metadata.hitl_decisions");
    for (name, export) in [("a", foreign.export), ("b", serde_json::from_str(text).unwrap())] {
        test.tenure.import_new(&ada(), &id(name), &export).await.unwrap();
        let s = test.tenure.load(&ada(), &id(name)).await.unwrap();
        assert_eq!((s.messages.len(), labels(&s)), (1, vec![("here".to_owned(), 1)]));
        assert_eq!(Value::Object(s.head().info.metadata.clone()), json!({"k": 1}));
    }
    assert_eq!(test.tenure.reviews(&ada(), &ReviewFilter::Decided, None, 9).await.unwrap().reviews.len(), 0);
}

/// Every validation error names its path, and nothing is changed.
#[tokio::test]
async fn an_export_is_validated() {
    let mut test = TestTenure::new(StoreKind::Memory).await.unwrap();
    create_sessions(&test).await;
    test.reopen_with(|o| o.limits.max_message_bytes = 1 << 20).await;
    let t = test.tenure.clone();
    let good = serde_json::to_value(t.export(&ada(), &id("x")).await.unwrap()).unwrap();
    let index_of =
        |kind: &str| good["log"].as_array().unwrap().iter().position(|r| r["entry"].get(kind).is_some()).unwrap();
    let message = index_of("message");
    let rewound = index_of("rewound");
    let decision = index_of("review_decided");
    let opened = index_of("review_opened");
    let fork = good["log"].as_array().unwrap().iter().rposition(|r| r["entry"].get("created").is_some()).unwrap();
    let with_media =
        good["log"].as_array().unwrap().iter().position(|r| r["entry"]["message"].get("blob_refs").is_some()).unwrap();
    assert!(fork > 0);
    type Patch<'a> = Box<dyn Fn(&mut Value) + 'a>;
    let last = good["log"].as_array().unwrap().len() - 1;
    let cases: Vec<(String, Patch<'_>)> = vec![
        (
            "log[0].seq".into(),
            Box::new(|e| e["log"].as_array_mut().unwrap().remove(0).take().as_null().unwrap_or_default()),
        ),
        ("log[2].seq".into(), Box::new(|e| drop(e["log"].as_array_mut().unwrap().remove(2)))),
        ("log[1].seq".into(), Box::new(|e| e["log"][1]["seq"] = json!(7))),
        ("log[0].entry".into(), Box::new(|e| e["log"][0]["entry"] = json!({"status": {"to": "active"}}))),
        ("log[0].entry.created.parent".into(), Box::new(|e| e["log"][0]["entry"] = e["log"][fork]["entry"].clone())),
        ("log[2].entry".into(), Box::new(|e| e["log"][2]["entry"] = e["log"][0]["entry"].clone())),
        (
            format!("log[{fork}].entry.created.parent.seq"),
            Box::new(|e| e["log"][fork]["entry"]["created"]["parent"]["seq"] = json!(2)),
        ),
        ("log[2].entry".into(), Box::new(|e| e["log"][2]["entry"] = json!({"nonsense": {}}))),
        ("log[2]".into(), Box::new(|e| e["log"][2] = json!(7))),
        ("log[2]".into(), Box::new(|e| e["log"][2]["at"] = json!("yesterday"))),
        ("log[2].at".into(), Box::new(|e| e["log"][2]["at"] = json!("2100-01-01T00:00:00Z"))),
        ("log".into(), Box::new(|e| e["log"] = json!({"a": 1}))),
        (
            format!("log[{message}].entry.message.body.role"),
            Box::new(|e| e["log"][message]["entry"]["message"]["body"]["role"] = json!("king")),
        ),
        (
            "messages[0]".into(),
            Box::new(|e| e["log"][message]["entry"]["message"]["body"]["content"] = json!("forged")),
        ),
        ("messages[1]".into(), Box::new(|e| e["messages"][1]["content"] = json!("forged"))),
        ("messages".into(), Box::new(|e| drop(e["messages"].as_array_mut().unwrap().pop()))),
        (
            format!("log[{message}].entry.message.replies_to"),
            Box::new(|e| e["log"][message]["entry"]["message"]["replies_to"] = json!(9999)),
        ),
        (
            format!("log[{rewound}].entry.rewound.to"),
            Box::new(|e| e["log"][rewound]["entry"]["rewound"]["to"] = json!(rewound + 1)),
        ),
        (
            format!("log[{opened}].entry.review_opened.review"),
            Box::new(|e| e["log"][opened]["entry"]["review_opened"]["review"] = json!("rev_1_x")),
        ),
        (
            format!("log[{}].entry.review_decided.previous", decision),
            Box::new(|e| e["log"][decision]["entry"]["review_decided"]["previous"] = json!("11".repeat(32))),
        ),
        (
            format!("log[{with_media}].entry.message.blob_refs"),
            Box::new(|e| {
                e["log"][with_media]["entry"]["message"]["body"] = json!({"role": "user", "content": "no place"})
            }),
        ),
        (
            format!("log[{with_media}].entry.message.blob_refs"),
            Box::new(|e| e["log"][with_media]["entry"]["message"]["blob_refs"][0]["id"] = json!("22".repeat(32))),
        ),
        (
            format!("blobs.{}", good["blobs"].as_object().unwrap().keys().next().unwrap()),
            Box::new(|e| e["blobs"].as_object_mut().unwrap().values_mut().for_each(|b| *b = json!("AAAA"))),
        ),
        ("blobs".into(), Box::new(|e| e["blobs"] = json!([]))),
        ("metadata.hitl_decisions".into(), Box::new(|e| e["metadata"]["hitl_decisions"][0]["reviewer"] = json!("cfo"))),
        ("metadata.hitl_decisions".into(), Box::new(|e| e["metadata"]["hitl_decisions"] = json!([]))),
        ("metadata.hitl_decisions".into(), Box::new(|e| drop(e.as_object_mut().unwrap().remove("log")))),
        (
            "max_message_bytes".into(),
            Box::new(|e| e["log"][last]["entry"] = json!({"status": {"to": "active", "reason": "x".repeat(2 << 20)}})),
        ),
    ];
    let count = async || t.list(&admin(), SessionQuery::new(OwnerFilter::AllTenants, 100)).await.unwrap().heads.len();
    let before = count().await;
    for (param, change) in cases {
        let mut wrong = good.clone();
        change(&mut wrong);
        let read = import::read(&wrong.to_string(), Some(import::ImportFormat::Tenure)).unwrap().pop().unwrap();
        let result = match read {
            Ok(foreign) => {
                assert!(t.check_export(&ada(), &foreign.export).is_err(), "{param}");
                assert!(t.import(&ada(), &id("p"), foreign.export.clone(), None).await.is_err(), "{param}");
                t.import_new(&ada(), &id("n"), &foreign.export).await
            }
            Err(e) => Err(e),
        };
        match result.unwrap_err() {
            Error::Invalid { param: error_param, message } => assert_eq!(error_param, param, "{message}"),
            Error::TooLarge { limit, .. } => assert_eq!(limit, param),
            other => panic!("{param}: {other:?}"),
        }
    }
    assert_eq!(count().await, before);
    let foreign = import::read(&good.to_string(), None).unwrap().pop().unwrap().unwrap();
    t.import_new(&ada(), &id("n"), &foreign.export).await.unwrap();
    // Digests are computed, not trusted; owners and leases are not imported (D-090).
    let mut forged = good.clone();
    let bad = json!({"messages": 1, "turns": 1, "visible": 1, "hash": "ff".repeat(16)});
    forged["log"][rewound]["entry"]["rewound"]["digest"] = bad.clone();
    forged["log"][fork]["entry"]["created"]["parent"]["digest"] = bad;
    forged["log"][0]["entry"]["created"]["user"] = json!("cfo");
    forged["log"][fork]["entry"]["created"]["user"] = json!("cfo");
    let foreign = import::read(&forged.to_string(), None).unwrap().pop().unwrap().unwrap();
    let head = t.import_new(&ada(), &id("m"), &foreign.export).await.unwrap();
    assert_eq!((head.user.as_str(), head.digest == t.head(&ada(), &id("x")).await.unwrap().digest), ("ada", true));
    assert_eq!(t.examine(|_| ()).await.unwrap(), []);
}

/// A session that was purged and imported again is not mistaken for the one that another process
/// has cached (D-092).
#[tokio::test]
async fn a_session_imported_again_is_another_one() {
    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    let (first_node, second_node) = (test.tenure.clone(), test.second_node());
    first_node.create(&ada(), new_session("x")).await.unwrap();
    first_node.append(&ada(), &id("x"), turn_messages(1)).await.unwrap();
    let export = round_trip(&first_node.export(&ada(), &id("x")).await.unwrap());
    second_node.append(&ada(), &id("x"), turn_messages(2)).await.unwrap();
    assert_eq!(second_node.load(&ada(), &id("x")).await.unwrap().messages.len(), 8);
    first_node.purge(&ada(), &id("x"), None).await.unwrap();
    first_node.import_new(&ada(), &id("x"), &export).await.unwrap();
    first_node.append(&ada(), &id("x"), turn_messages(3)).await.unwrap();
    first_node.append(&ada(), &id("x"), turn_messages(4)).await.unwrap();
    let (a, b) = (second_node.load(&ada(), &id("x")).await.unwrap(), first_node.load(&ada(), &id("x")).await.unwrap());
    assert_eq!(texts(&a), texts(&b));
    assert_eq!(texts(&a), raw(&[turn_messages(1), turn_messages(3), turn_messages(4)].concat()));
}

/// Reformatted JSON is imported unchanged.
#[tokio::test]
async fn an_export_that_was_formatted_anew_is_imported() {
    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    create_sessions(&test).await;
    let export = test.tenure.export(&ada(), &id("x")).await.unwrap();
    let pretty = serde_json::to_string_pretty(&serde_json::to_value(&export).unwrap()).unwrap();
    let foreign = import::read(&pretty, None).unwrap().pop().unwrap().unwrap();
    test.tenure.import_new(&ada(), &id("y"), &foreign.export).await.unwrap();
    let (a, b) = (test.tenure.load(&ada(), &id("x")).await.unwrap(), test.tenure.load(&ada(), &id("y")).await.unwrap());
    let values = |s: &Session| s.messages.iter().map(|m| m.message.to_value()).collect::<Vec<_>>();
    assert_eq!((values(&a), &a.head().digest.hash), (values(&b), &b.head().digest.hash));
}

/// Entries with and without an origin.
#[test]
fn entries_with_an_origin_are_read() {
    let old = r#"{"created":{"user":"ada","title":"T"}}"#;
    let Entry::Created(created) = Entry::decode(old).unwrap() else { panic!() };
    assert_eq!((created.origin, created.decisions), (None, None));
    let new = r#"{"created":{"user":"ada","origin":{"export":"ab","at":"2026-01-01T00:00:00Z","upto":3}}}"#;
    assert_eq!(Entry::decode(new).unwrap().encode(), new);
}
