//! The audit trail: clients cannot write decisions, and tampering with a log is detected.

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use serde_json::{Map, Value, json};
use tenure::store::{Commit, RecordRange};
use tenure::{log::*, maintenance::*, review::*, run::*, session::*, *};

fn map(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

/// Creates a session with `rounds` rounds of decisions, a minute apart.
pub async fn create_decided_session(test: &TestTenure, session: &str, rounds: usize) {
    test.tenure.declare(clerk(|a| a.review = vec![reviewed("pay"), reviewed("mail")]));
    let tools = CountingTools::new([
        (tool("pay"), ToolBehavior::succeeds("paid")),
        (tool("mail"), ToolBehavior::succeeds("sent")),
    ]);
    for round in 0..rounds {
        let wanted = [("c1", "pay", json!({"n": 1})), ("c2", "mail", json!({"to": "bob"}))];
        let model = ScriptedModel::new([tool_calls_answer(&wanted), text_answer("Done.")]);
        let ask = TurnRequest { session: Some(id(session)), ..question(&format!("Go {round}")) };
        run_turn(&test.tenure, ask, &model, &tools).await.unwrap();
        let s = test.tenure.load(&ada(), &id(session)).await.unwrap();
        for (n, review) in open(&s).into_iter().enumerate() {
            test.advance(SignedDuration::from_mins(1));
            let arguments = Some(json!({"z": 0.1, "a": [1, null]}));
            let verdict = match n {
                0 => ReviewInput { notes: Some("=less".to_owned()), arguments, ..review_input(Decision::Corrected) },
                _ => review_input(Decision::Rejected),
            };
            test.tenure.decide(&ada(), &review, &verdict).await.unwrap();
        }
        take_over(&test.tenure, &model, &tools).await.pop().unwrap().unwrap();
    }
}

async fn log(test: &TestTenure, session: &str) -> Vec<Record> {
    test.tenure.store().records(&ada().key(&id(session)), &RecordRange::after(0)).await.unwrap()
}

/// Stores a log under an id, with the head derived from it.
async fn store_log(test: &TestTenure, session: &str, records: Vec<Record>) {
    let key = ada().key(&id(session));
    let head = Session::replay(&key, records.clone()).unwrap().head().clone();
    test.tenure.store().commit(&Commit::new(None, records, head)).await.unwrap();
}

async fn export_trail(test: &TestTenure, principal: &Principal, range: AuditRange) -> Vec<AuditedDecision> {
    let (mut export, mut all) = (test.tenure.audit_export(principal, range), Vec::new());
    while let Some(page) = export.next().await.unwrap() {
        all.extend(page);
    }
    all
}

fn assert_refused<T: std::fmt::Debug>(result: Result<T>) {
    match result.unwrap_err() {
        Error::Invalid { param, .. } => assert_eq!(param, "metadata.hitl_decisions"),
        other => panic!("{other:?}"),
    }
}

on_every_store! {
    /// Regression test: a merge patch could forge decisions, or erase them and remove the review
    /// from the list (D-065).
    async fn decisions_cannot_be_forged_or_erased(test: &mut TestTenure) {
        create_decided_session(test, "x", 1).await;
        let t = &test.tenure;
        let before = t.load(&ada(), &id("x")).await.unwrap();
        for value in [json!(null), json!([]), json!([{"step": "pay", "decision": "approved", "reviewer": "cfo"}]), json!({"0": null})] {
            let metadata = map(json!({"hitl_decisions": value, "k": 1}));
            assert_refused(t.update(&ada(), &id("x"), SessionPatch { metadata: metadata.clone(), ..SessionPatch::default() }).await);
            assert_refused(t.create(&ada(), NewSession { metadata: metadata.clone(), ..new_session("forged") }).await);
            let export = Export { messages: turn_messages(1), metadata, ..Export::default() };
            assert_refused(t.import(&ada(), &id("x"), export.clone(), None).await);
            assert_refused(t.import(&ada(), &id("forged"), export.clone(), None).await);
            assert_refused(t.import_new(&ada(), &id("forged"), &export).await);
            assert_refused(t.check_export(&ada(), &export));
        }
        assert_eq!(t.load(&ada(), &id("x")).await.unwrap(), before);
        assert_eq!(t.head(&ada(), &id("forged")).await.unwrap_err().code(), "not_found");
        let other = map(json!({"k": 1}));
        t.update(&ada(), &id("x"), SessionPatch { metadata: other, ..SessionPatch::default() }).await.unwrap();
        // Replacing the session removes no decision.
        t.import(&ada(), &id("x"), Export { messages: turn_messages(1), ..Export::default() }, None).await.unwrap();
        let after = t.load(&ada(), &id("x")).await.unwrap();
        assert_eq!(after.head().info.metadata["hitl_decisions"], before.head().info.metadata["hitl_decisions"]);
        assert_eq!(t.reviews(&ada(), &ReviewFilter::Decided, None, 10).await.unwrap().reviews.len(), 2);
        assert_eq!(t.audit(&ada(), &id("x")).await.unwrap().decisions.len(), 2);
        assert_eq!(t.examine(|_| ()).await.unwrap(), []);
    }

    /// In a log of an older version, which let clients write the field, the recorded decisions take
    /// precedence over it.
    async fn a_log_with_an_erased_trail_still_has_it(test: &mut TestTenure) {
        create_decided_session(test, "x", 1).await;
        let mut records = log(test, "x").await;
        let erased = SessionPatch { metadata: map(json!({"hitl_decisions": null, "k": 1})), ..SessionPatch::default() };
        let last = records.last().unwrap().clone();
        records.push(Record { seq: last.seq + 1, at: last.at, entry: Entry::info(erased) });
        store_log(test, "old", records).await;
        let s = test.tenure.load(&ada(), &id("old")).await.unwrap();
        assert_eq!(s.head().info.metadata["hitl_decisions"].as_array().unwrap().len(), 2);
        assert_eq!(s.head().info.metadata["k"], 1);
        assert_eq!(test.tenure.reviews(&ada(), &ReviewFilter::Decided, None, 10).await.unwrap().reviews.len(), 4);
    }

    /// Changing, removing or reordering a decision is detected, and reported with its session and
    /// record.
    async fn the_hash_chain_detects_tampering(test: &mut TestTenure) {
        create_decided_session(test, "x", 3).await;
        let t = &test.tenure;
        let trail = t.audit(&ada(), &id("x")).await.unwrap();
        assert_eq!((trail.decisions.len(), trail.broken.clone()), (6, None));
        let mut previous = Some(DecisionHash::START);
        for d in &trail.decisions {
            assert_eq!((d.decided.previous, d.hash, d.imported), (previous, d.decided.hash(d.at), false));
            previous = Some(d.hash);
        }
        let head = t.head(&ada(), &id("x")).await.unwrap();
        assert_eq!(head.decisions, Some(DecisionChain { count: 6, hash: previous.unwrap() }));
        assert_eq!(t.examine(|_| ()).await.unwrap(), []);
        let records = log(test, "x").await;
        let decision_indexes: Vec<usize> = (0..records.len()).filter(|i| matches!(records[*i].entry, Entry::ReviewDecided(_))).collect();
        let change = |change: &dyn Fn(&mut ReviewDecided)| {
            let mut records = records.clone();
            if let Entry::ReviewDecided(d) = &mut records[decision_indexes[1]].entry {
                change(d);
            }
            records
        };
        let remove_decision = |index: usize| {
            let mut records = records.clone();
            records[decision_indexes[index]].entry = Entry::info(SessionPatch::default());
            records
        };
        let mut swapped = records.clone();
        let one = swapped[decision_indexes[1]].entry.clone();
        let two = swapped[decision_indexes[3]].entry.clone();
        (swapped[decision_indexes[1]].entry, swapped[decision_indexes[3]].entry) = (two, one);
        let mut later = records.clone();
        later[decision_indexes[1]].at += SignedDuration::from_secs(1);
        let cases = [
            ("decision", change(&|d| d.decision = Decision::Approved), decision_indexes[2]),
            ("reviewer", change(&|d| d.reviewer = "cfo".to_owned()), decision_indexes[2]),
            ("notes", change(&|d| d.notes = Some("fine".to_owned())), decision_indexes[2]),
            ("step", change(&|d| d.step = "other".to_owned()), decision_indexes[2]),
            ("arguments", change(&|d| d.arguments = Some(json!({}))), decision_indexes[2]),
            ("time", later, decision_indexes[2]),
            ("first", remove_decision(0), decision_indexes[1]),
            ("removed", remove_decision(1), decision_indexes[2]),
            ("swapped", swapped, decision_indexes[1]),
            ("unlinked", change(&|d| d.previous = None), decision_indexes[1]),
            ("relinked", change(&|d| d.previous = Some(DecisionHash::START)), decision_indexes[1]),
        ];
        for (name, tampered, broken_index) in cases {
            store_log(test, name, tampered).await;
            let trail = t.audit(&ada(), &id(name)).await.unwrap();
            let expected_seq = records[broken_index].seq;
            assert_eq!(trail.broken.as_ref().map(|(seq, _)| *seq), Some(expected_seq), "{name}: {:?}", trail.broken);
            let findings: Vec<String> = t.examine(|_| ()).await.unwrap().iter().map(Finding::to_string).collect();
            let location = format!("session acme/{name}, record {expected_seq}");
            assert!(findings.iter().any(|finding| finding.contains(&location)), "{name}: {findings:?}");
            t.purge(&ada(), &id(name), None).await.unwrap();
        }
        // The last decision has no successor: tampering is detected by comparison with the head.
        for (name, decision) in [("last", Some(Decision::Approved)), ("gone", None)] {
            let mut tampered = records.clone();
            match (&mut tampered[decision_indexes[5]].entry, decision) {
                (Entry::ReviewDecided(d), Some(decision)) => d.decision = decision,
                (entry, _) => *entry = Entry::info(SessionPatch::default()),
            }
            let key = ada().key(&id(name));
            let original_head = Session::replay(&key, records.clone()).unwrap().head().clone();
            t.store().commit(&Commit::new(None, tampered, original_head)).await.unwrap();
            assert!(t.audit(&ada(), &id(name)).await.unwrap().broken.is_some());
            let findings: Vec<String> = t.examine(|_| ()).await.unwrap().iter().map(Finding::to_string).collect();
            let is_expected = |finding: &String| finding.contains(&format!("session acme/{name}")) && finding.contains("decisions");
            assert!(findings.iter().any(is_expected), "{findings:?}");
            t.purge(&ada(), &id(name), None).await.unwrap();
        }
    }

    /// Decisions discarded by a rewind stay in the trail; a fork has its parent's part and
    /// continues its chain.
    async fn rewinds_and_forks_keep_the_trail(test: &mut TestTenure) {
        create_decided_session(test, "x", 2).await;
        let t = test.tenure.clone();
        t.fork(&ada(), &id("x"), Fork::at(Point::Turn(1)).id(Some(id("early")))).await.unwrap();
        t.fork(&ada(), &id("x"), Fork::at(Point::End).id(Some(id("late")))).await.unwrap();
        t.fork(&ada(), &id("x"), Fork::at(Point::Position(0)).id(Some(id("first")))).await.unwrap();
        t.rewind(&ada(), &id("x"), Point::Position(0)).await.unwrap();
        let hashes = async |session: &str| {
            let trail = t.audit(&ada(), &id(session)).await.unwrap();
            assert_eq!(trail.broken, None, "{session}");
            let metadata = t.head(&ada(), &id(session)).await.unwrap().info.metadata;
            assert_eq!(metadata.get("hitl_decisions").map_or(0, |d| d.as_array().unwrap().len()), trail.decisions.len());
            trail.decisions.iter().map(|d| d.hash).collect::<Vec<_>>()
        };
        let all = hashes("x").await;
        assert_eq!((all.len(), hashes("early").await, hashes("late").await), (4, all[..2].to_vec(), all.clone()));
        assert_eq!(hashes("first").await, []);
        for fork in ["early", "late", "first"] {
            create_decided_session(test, fork, 1).await;
        }
        assert_eq!(hashes("early").await[..2], all[..2]);
        assert_eq!((hashes("early").await.len(), hashes("late").await.len(), hashes("first").await.len()), (4, 6, 2));
        create_decided_session(test, "x", 1).await;
        assert_eq!(hashes("x").await[..4], all[..]);
        assert_eq!(t.examine(|_| ()).await.unwrap(), []);
        // Each decision is exported once, even if a fork has inherited the log of a purged parent.
        assert_eq!(export_trail(test, &admin(), AuditRange::default()).await.len(), 6 + 2 + 2 + 2);
        t.purge(&ada(), &id("x"), None).await.unwrap();
        let remaining = export_trail(test, &admin(), AuditRange::default()).await;
        assert_eq!(remaining.len(), 4 + 2 + 2 + 2, "the two after the forks are gone with the session");
        assert!(remaining.iter().all(|d| d.broken.is_none()), "{remaining:?}");
        drop(t);
        test.reopen().await;
        assert_eq!(test.tenure.examine(|_| ()).await.unwrap(), []);
    }

    /// An export contains all decisions of a tenant within a time range, including deleted
    /// sessions, and nothing of other tenants.
    async fn a_tenant_exports_its_trail(test: &mut TestTenure) {
        for n in 0..3 {
            create_decided_session(test, &format!("s{n}"), 1).await;
        }
        test.tenure.create(&ada(), new_session("quiet")).await.unwrap();
        test.tenure.delete(&ada(), &id("s1"), None).await.unwrap();
        let all = export_trail(test, &admin(), AuditRange::default()).await;
        assert_eq!(all.len(), 6);
        let mut times: Vec<_> = all.iter().map(|d| d.at).collect();
        times.sort();
        let range = AuditRange { from: Some(times[2]), to: Some(times[4]) };
        let in_range = export_trail(test, &admin(), range).await;
        assert_eq!(in_range.iter().map(|d| (d.session.as_str(), d.at)).collect::<Vec<_>>(), [("s1", times[2]), ("s1", times[3])]);
        assert_eq!(export_trail(test, &ada(), AuditRange::default()).await.len(), 6);
        for principal in [Principal::tenant_wide("other"), Principal::new("acme", "bob")] {
            assert_eq!(export_trail(test, &principal.unwrap(), AuditRange::default()).await, []);
        }
        // A session that becomes active during the export is neither missed nor exported twice.
        let mut export = test.tenure.audit_export(&admin(), AuditRange::default());
        let mut exported = export.next().await.unwrap().unwrap();
        for session in ["s0", "s2"] {
            test.advance(SignedDuration::from_secs(1));
            test.tenure.append(&ada(), &id(session), turn_messages(1)).await.unwrap();
        }
        while let Some(page) = export.next().await.unwrap() {
            exported.extend(page);
        }
        let mut locations: Vec<_> = exported.iter().map(|d| (d.session.to_string(), d.seq)).collect();
        locations.sort();
        locations.dedup();
        assert_eq!((exported.len(), locations.len()), (6, 6));
    }
}

/// Decisions without a link are read as they are, and the chain starts after them.
#[tokio::test]
async fn decisions_without_a_link_are_readable() {
    let old = r#"{"review_decided":{"review":"rev_3_x","step":"pay","decision":"approved","reviewer":"eve","notes":"fine","arguments":{"a":1}}}"#;
    let entry = Entry::decode(old).unwrap();
    assert_eq!(entry.encode(), old);
    let Entry::ReviewDecided(decided) = &entry else { panic!("{entry:?}") };
    assert_eq!(decided.previous, None);
    let created = r#"{"created":{"user":"ada","parent":{"session":"p","seq":1,"digest":{"messages":0,"turns":0,"visible":0,"hash":"00000000000000000000000000000000"}}}}"#;
    assert_eq!(Entry::decode(created).unwrap().encode(), created);
    let linked = old.replace("}}}", &format!(r#"}},"previous":"{}"}}}}"#, "0f".repeat(32)));
    let Entry::ReviewDecided(decided) = Entry::decode(&linked).unwrap() else { panic!() };
    assert_eq!(decided.previous, Some(DecisionHash([0x0f; 32])));
    assert_eq!(Entry::decode(&linked).unwrap().encode(), linked);

    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    create_decided_session(&test, "x", 2).await;
    let mut records = log(&test, "x").await;
    let mut unlinked = 0;
    for record in &mut records {
        if let Entry::ReviewDecided(d) = &mut record.entry
            && unlinked < 4
        {
            (d.previous, unlinked) = (None, unlinked + 1);
        }
    }
    store_log(&test, "old", records).await;
    let head = test.tenure.head(&ada(), &id("old")).await.unwrap();
    assert_eq!(head.decisions, None);
    create_decided_session(&test, "old", 1).await;
    let trail = test.tenure.audit(&ada(), &id("old")).await.unwrap();
    assert_eq!((trail.decisions.len(), trail.broken), (6, None));
    assert_eq!(test.tenure.head(&ada(), &id("old")).await.unwrap().decisions.unwrap().count, 2);
    assert_eq!(test.tenure.examine(|_| ()).await.unwrap(), []);
}

/// The hash is part of the storage format: it must never change.
#[test]
fn the_hash_of_a_decision_is_stable() {
    let decision_in = |session: &str| ReviewDecided {
        review: ReviewId::of(&id(session), 12),
        step: "pay".to_owned(),
        decision: Decision::Corrected,
        reviewer: "eve".to_owned(),
        notes: None,
        arguments: Some(json!({"b": 1.5, "a": null})),
        previous: Some(DecisionHash([1; 32])),
    };
    let at = "2026-01-01T00:00:00.000001Z".parse().unwrap();
    let previous = "01".repeat(32);
    let content = format!(
        r#"["tenure.decision.1","{previous}",12,"pay","corrected","eve",null,{{"a":null,"b":1.5}},1767225600000001]"#
    );
    assert_eq!(decision_in("x").hash(at).0, *blake3::hash(content.as_bytes()).as_bytes());
    assert_eq!(decision_in("x").hash(at), decision_in("y").hash(at), "the session's id does not matter");
}
