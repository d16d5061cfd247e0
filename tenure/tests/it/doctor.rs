//! The doctor: a consistent store has no findings, each kind of damage is located, and repairable
//! damage is repaired.

use crate::on_every_store;
use crate::support::*;
use std::path::PathBuf;
use tenure::store::{Commit, IndexWord, Item, MessageMatches, MessageQuery, Namespace, Owner};
use tenure::testing::append_message;
use tenure::{log::*, maintenance::*, session::*, *};

/// Creates sessions with media, forks, a rewind, items and every status, in two tenants. Returns
/// their number.
async fn create_sessions(test: &TestTenure) -> usize {
    let (tenure, ada) = (&test.tenure, ada());
    let other = Principal::new("other", "ada").unwrap();
    for (principal, name) in [(&ada, "x"), (&ada, "y"), (&other, "x"), (&ada, "gone"), (&ada, "old")] {
        tenure.create(principal, new_session(name)).await.unwrap();
        for n in 0..3 {
            tenure.append(principal, &id(name), turn_messages(n)).await.unwrap();
            test.advance(jiff::SignedDuration::from_secs(1));
        }
    }
    for (principal, name, fill) in [(&ada, "x", "a"), (&ada, "y", "b"), (&other, "x", "a")] {
        tenure
            .append(principal, &id(name), vec![image_message("look", fill), Message::assistant("nice")])
            .await
            .unwrap();
    }
    tenure.fork(&ada, &id("x"), Fork::at(Point::Turn(1)).id(Some(id("f")))).await.unwrap();
    tenure.fork(&ada, &id("x"), Fork::at(Point::Turn(4)).id(Some(id("g")))).await.unwrap();
    tenure.fork(&ada, &id("old"), Fork::at(Point::Turn(2)).id(Some(id("heir")))).await.unwrap();
    tenure.append(&ada, &id("heir"), turn_messages(9)).await.unwrap();
    tenure.purge(&ada, &id("old"), None).await.unwrap();
    tenure.rewind(&ada, &id("y"), "turn-1").await.unwrap();
    tenure.delete(&ada, &id("gone"), None).await.unwrap();
    let at = test.now();
    let (key, value) = ("k".to_owned(), "1".to_owned());
    let item = Item { key, value, created_at: at, used_at: at, uses: 0, expires_at: None };
    let tenant = ada.tenant.clone();
    for owner in [Owner::Session(id("x")), Owner::User(ada.user.clone())] {
        let namespace = Namespace { tenant: tenant.clone(), owner, name: "cache".into() };
        tenure.store().put(&namespace, &item, None).await.unwrap();
    }
    7
}

async fn findings_of(test: &TestTenure) -> Vec<String> {
    test.tenure.examine(|_| ()).await.unwrap().iter().map(Finding::to_string).collect()
}

/// Returns true if one finding contains all words.
fn has_finding(findings: &[String], words: &[&str]) -> bool {
    findings.iter().any(|f| words.iter().all(|w| f.contains(w)))
}

on_every_store! {
    async fn a_consistent_store_has_no_findings(test: &mut TestTenure) {
        let sessions = create_sessions(test).await;
        let mut progress = Vec::new();
        assert_eq!(test.tenure.examine(|session_number| progress.push(session_number)).await.unwrap(), []);
        assert_eq!(progress, (1..=sessions).collect::<Vec<_>>());
        test.reopen().await;
        let tenure = test.tenure.clone();
        let repaired = tokio::spawn(async move { tenure.repair_all(|_| ()).await }).await.unwrap().unwrap();
        assert_eq!(repaired, RepairReport::default());
    }

    /// A head without the positions of the prompt prefix is not damaged: they are then unknown. A
    /// recorded value must be correct.
    async fn a_head_without_a_prompt_prefix_has_no_findings(test: &mut TestTenure) {
        create_sessions(test).await;
        let correct = test.tenure.head(&admin(), &id("x")).await.unwrap();
        let prompt_prefix = correct.prompt_prefix.clone().unwrap();
        let unknown = Head { prompt_prefix: None, ..correct.clone() };
        test.tenure.store().commit(&Commit::new(Some(correct.end()), Vec::new(), unknown)).await.unwrap();
        assert_eq!(findings_of(test).await, [""; 0]);
        let wrong = Head { prompt_prefix: Some(PromptPrefix { summary: Some((3, 2)), ..prompt_prefix }), ..correct.clone() };
        test.tenure.store().commit(&Commit::new(Some(correct.end()), Vec::new(), wrong)).await.unwrap();
        let findings = test.tenure.examine(|_| ()).await.unwrap();
        assert!(findings.len() == 1 && findings[0].description.ends_with("prompt_prefix"), "{findings:?}");
        assert!(test.tenure.repair(&findings[0]).await.unwrap());
        assert_eq!(test.tenure.head(&admin(), &id("x")).await.unwrap().prompt_prefix, correct.prompt_prefix);
    }

    /// Commits without words leave a session that is not in the message index.
    async fn an_incomplete_message_index_is_completed(test: &mut TestTenure) {
        create_sessions(test).await;
        // JSONL and memory build the index when it is first used.
        let index = test.tenure.store().message_index().unwrap();
        let query = MessageQuery {
            rules: test.tenure.word_rules(),
            tenant: ada().tenant,
            user: None,
            words: vec![IndexWord { text: "zanzibar".to_owned(), is_prefix: false }],
            limit: 9,
        };
        index.find(&query).await.unwrap();
        while test.tenure.maintain_message_index(1).await.unwrap() {}
        assert_eq!(findings_of(test).await, [""; 0]);
        assert_eq!(index.find(&query).await.unwrap(), MessageMatches::Found(Vec::new()));
        append_message(&**test.tenure.store(), &ada().key(&id("x")), "in Zanzibar").await.unwrap();
        assert_eq!(index.find(&query).await.unwrap(), MessageMatches::Unindexed);
        let findings = findings_of(test).await;
        assert!(findings.len() == 1 && has_finding(&findings, &["message index", "/x", "repair completes"]), "{findings:?}");
        let report = test.tenure.repair_all(|_| ()).await.unwrap();
        assert_eq!((report.repaired.len(), report.remaining), (1, vec![]));
        let MessageMatches::Found(found) = index.find(&query).await.unwrap() else { panic!("it is complete") };
        assert_eq!(found.iter().map(|m| m.session.as_str()).collect::<Vec<_>>(), ["x"]);
    }

    async fn a_wrong_head_is_repaired(test: &mut TestTenure) {
        create_sessions(test).await;
        for name in ["x", "f", "heir"] {
            let correct = test.tenure.head(&admin(), &id(name)).await.unwrap();
            let mut wrong = correct.clone();
            (wrong.digest.messages, wrong.info.title, wrong.status) = (99, Some("no".into()), Status::Paused);
            test.tenure.store().commit(&Commit::new(Some(wrong.end()), Vec::new(), wrong)).await.unwrap();
            let findings = test.tenure.examine(|_| ()).await.unwrap();
            assert_eq!(findings.len(), 1, "{findings:?}");
            assert_eq!(findings[0].remedy, Remedy::RebuildHead(correct.key()));
            assert!(findings[0].description.ends_with("digest, info, status"), "{}", findings[0]);
            assert!(test.tenure.repair(&findings[0]).await.unwrap());
            let now = test.tenure.head(&admin(), &id(name)).await.unwrap();
            assert_eq!(Head { due_at: correct.due_at, ..now }, correct);
            assert_eq!(findings_of(test).await, [""; 0]);
        }
        test.tenure.append(&ada(), &id("x"), turn_messages(7)).await.unwrap();
    }
}

/// A manually changed row: the SQL for SQLite and PostgreSQL, the words of the finding, and whether
/// it is repairable.
struct Case {
    sqlite: &'static str,
    postgres: &'static str,
    words: &'static [&'static str],
    repairable: bool,
}

const CASES: [Case; 12] = [
    Case {
        sqlite: "DELETE FROM record WHERE record_key & 0xffffffff = 5 AND record_key >> 32 = (SELECT id FROM head WHERE tenant = 'other')",
        postgres: "DELETE FROM tenure_record WHERE tenant = 'other' AND seq = 5",
        words: &["other/x, record 5", "the record is missing", "backup"],
        repairable: false,
    },
    Case {
        sqlite: "UPDATE record SET entry = replace(entry, 'search', 'SEARCH') WHERE record_key & 0xffffffff = 3 AND record_key >> 32 = (SELECT id FROM head WHERE tenant = 'other')",
        postgres: "UPDATE tenure_record SET entry = replace(entry, 'search', 'SEARCH') WHERE tenant = 'other' AND seq = 3",
        words: &["other/x, record 3", "checksum"],
        repairable: false,
    },
    Case {
        sqlite: "UPDATE head SET head_json = '{\"first\":1' WHERE session = 'y'",
        postgres: "UPDATE tenure_head SET head_json = '{' WHERE session = 'y'",
        words: &["acme/y", "backup"],
        repairable: false,
    },
    Case {
        sqlite: "UPDATE head SET head_json = json_set(head_json, '$.digest.turns', 7) WHERE session = 'y'",
        postgres: "UPDATE tenure_head SET head_json = replace(head_json, '\"turns\":1', '\"turns\":7') WHERE session = 'y'",
        words: &["acme/y", "the head differs from the log in: digest"],
        repairable: true,
    },
    Case {
        sqlite: "DELETE FROM head WHERE tenant = 'other'",
        postgres: "DELETE FROM tenure_head WHERE tenant = 'other'",
        words: &["records have no head", "backup"],
        repairable: false,
    },
    Case {
        sqlite: "UPDATE head SET parent = 'nobody', head_json = json_set(head_json, '$.parent.session', 'nobody') WHERE session = 'f'",
        postgres: "UPDATE tenure_head SET parent = 'nobody' WHERE session = 'f'",
        words: &["session acme/f", "its parent session nobody (forked at record", "does not exist", "purge"],
        repairable: false,
    },
    Case {
        sqlite: "UPDATE head SET parent = 'gone', head_json = json_set(head_json, '$.parent.session', 'gone') WHERE session = 'g'",
        postgres: "UPDATE tenure_head SET parent = 'gone' WHERE session = 'g'",
        words: &["session acme/g", "forked from gone at record", "but the log of that session ends at"],
        repairable: false,
    },
    Case {
        sqlite: "DELETE FROM blob WHERE tenant = 'other'",
        postgres: "DELETE FROM tenure_blob_ref WHERE tenant = 'other'; DELETE FROM tenure_blob WHERE tenant = 'other'",
        words: &["session other/x, record", "references blob", "missing", "backup"],
        repairable: false,
    },
    Case {
        sqlite: "UPDATE blob SET bytes = x'00' WHERE tenant = 'other'",
        postgres: "UPDATE tenure_blob SET bytes = '\\x00' WHERE tenant = 'other'",
        words: &["session other/x, record", "references blob"],
        repairable: false,
    },
    Case {
        sqlite: "DELETE FROM blob_ref WHERE tenant = 'other'",
        postgres: "DELETE FROM tenure_blob_ref WHERE tenant = 'other'",
        words: &["tenant other, blob", "no session references it", "a message references the blob", "import it again"],
        repairable: false,
    },
    Case {
        sqlite: "INSERT INTO blob SELECT tenant, zeroblob(32), x'00' FROM blob WHERE tenant = 'other';
            INSERT INTO blob_ref SELECT 77, 1, tenant, zeroblob(32) FROM blob WHERE tenant = 'other' LIMIT 1;
            INSERT INTO blob VALUES ('acme', zeroblob(32), x'00')",
        postgres: "INSERT INTO tenure_blob VALUES ('other', decode(repeat('00', 32), 'hex'), '\\x00'), ('acme', decode(repeat('00', 32), 'hex'), '\\x00');
            INSERT INTO tenure_blob_ref VALUES (1, 'other', 'nobody', decode(repeat('00', 32), 'hex'))",
        words: &["tenant acme, blob 00000000", "no session references it", "removes it"],
        repairable: true,
    },
    Case {
        sqlite: "UPDATE item SET owner = 'session/nobody' WHERE owner = 'session/x'",
        postgres: "UPDATE tenure_item SET owner = 'session/nobody' WHERE owner = 'session/x'",
        words: &["acme/nobody", "the session does not exist", "removes it"],
        repairable: true,
    },
];

async fn execute(test: &TestTenure, case: &Case) {
    if let Some(file) = test.url().strip_prefix("sqlite:") {
        return rusqlite::Connection::open(file).unwrap().execute_batch(case.sqlite).unwrap();
    }
    test.store.schema().unwrap().execute(case.postgres).await;
}

/// Each case is found while the store is open; repairable damage is repaired, and nothing else is
/// changed.
async fn rows_changed_by_hand(kind: StoreKind) {
    for case in &CASES {
        let Some(test) = TestTenure::new(kind).await else { return };
        create_sessions(&test).await;
        execute(&test, case).await;
        let findings = findings_of(&test).await;
        assert!(has_finding(&findings, case.words), "{:?} is not in {findings:#?}", case.words);
        let repaired = test.tenure.repair_all(|_| ()).await.unwrap();
        let mut repaired = repaired.repaired;
        repaired.retain(|finding| !finding.location.ends_with("message index"));
        assert_eq!(!repaired.is_empty(), case.repairable, "{repaired:#?}");
        let remaining = findings_of(&test).await;
        assert_eq!(remaining.is_empty(), case.repairable, "{remaining:#?}");
        assert_eq!(has_finding(&remaining, case.words), !case.repairable, "{remaining:#?}");
        // Records needed by other sessions are unchanged.
        test.tenure.load(&ada(), &id("heir")).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_changed_by_hand_are_found_on_sqlite() {
    rows_changed_by_hand(StoreKind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_changed_by_hand_are_found_on_postgres() {
    rows_changed_by_hand(StoreKind::Postgres).await;
}

/// Damage specific to SQLite: columns beside the head, records beyond the end of a log, and pages.
#[tokio::test(flavor = "multi_thread")]
async fn damage_below_the_rows_is_found_on_sqlite() {
    let mut test = TestTenure::new(StoreKind::Sqlite).await.unwrap();
    create_sessions(&test).await;
    let file = test.url().strip_prefix("sqlite:").unwrap().to_owned();
    let db = || rusqlite::Connection::open(&file).unwrap();
    db().execute_batch("UPDATE head SET status = 'paused', visible_hash = zeroblob(16) WHERE session = 'f'").unwrap();
    let findings = test.tenure.examine(|_| ()).await.unwrap();
    assert_eq!(findings.len(), 1);
    assert!(findings[0].description.contains("user, status or hash differs from the serialized head"), "{findings:?}");
    assert_eq!(test.tenure.repair_all(|_| ()).await.unwrap().remaining, []);

    db().execute_batch(
        "INSERT INTO record SELECT record_key + 50, at, checksum, NULL, NULL, entry FROM record WHERE record_key & 0xffffffff = 2",
    )
    .unwrap();
    assert!(has_finding(&findings_of(&test).await, &["acme/y", "1 records are outside the range of its log"]));
    db().execute_batch("DELETE FROM record WHERE record_key & 0xffffffff > 40").unwrap();
    assert_eq!(findings_of(&test).await, [""; 0]);

    // An index with an overwritten page.
    let number = |sql: &str| db().query_row(sql, [], |r| r.get::<_, u32>(0)).unwrap() as usize;
    let size = number("PRAGMA page_size");
    let page = number("SELECT rootpage FROM sqlite_schema WHERE name = 'head_active'");
    test.tenure = Tenure::open("memory:").await.unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[page * size - 100..page * size].fill(0x11);
    std::fs::write(&file, bytes).unwrap();
    test.reopen().await;
    let findings = test.tenure.examine(|_| ()).await.unwrap();
    assert!(findings.iter().any(|f| f.description.contains("SQLite reports damage")), "{findings:?}");
    assert!(findings.iter().all(|f| !f.is_repairable() && f.to_string().contains(".recover")), "{findings:?}");
    assert_eq!(test.tenure.repair_all(|_| ()).await.unwrap().repaired, []);

    // A file that is corrupted throughout.
    test.tenure = Tenure::open("memory:").await.unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[size..].fill(0x11);
    std::fs::write(&file, bytes).unwrap();
    if let Ok(tenure) = Tenure::open(test.url()).await {
        let findings = tenure.examine(|_| ()).await.unwrap();
        assert!(findings.iter().any(|f| f.to_string().contains("backup")), "{findings:?}");
    }
}

/// Files changed manually while the store is open, and before it is opened.
#[tokio::test(flavor = "multi_thread")]
async fn files_changed_by_hand_are_found_on_jsonl() {
    let mut test = TestTenure::new(StoreKind::Jsonl).await.unwrap();
    create_sessions(&test).await;
    let root = test.directory().unwrap().join("sessions").canonicalize().unwrap();
    let file = |name: &str| root.join(name);
    let replace_text = |path: &PathBuf, from: &str, to: &str| {
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.contains(from));
        std::fs::write(path, text.replacen(from, to, 1)).unwrap();
    };
    let orphan = BlobId::of(b"nobody's").to_string();
    for (name, words) in [
        ("notes.txt", vec!["not a file of the store", "move it"]),
        ("acme/notes.txt", vec!["not a file of the store"]),
        ("acme/namespaces/notes.txt", vec!["not a file of the store"]),
        ("acme/blobs/notes.txt", vec!["not a file of the store"]),
        ("acme/new.jsonl", vec!["created by another program while the store is open", "open it again"]),
        ("acme/nobody.discarded.jsonl", vec!["its session does not exist"]),
        (&*format!("acme/blobs/{orphan}"), vec!["no session references it", "removes it"]),
    ] {
        std::fs::write(file(name), "nobody's").unwrap();
        let findings = findings_of(&test).await;
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert!(findings[0].contains(name) && has_finding(&findings, &words), "{findings:?}");
        let repaired = test.tenure.repair_all(|_| ()).await.unwrap().repaired;
        assert_eq!(repaired.len(), usize::from(name.ends_with(&orphan)));
        assert_eq!(file(name).exists(), repaired.is_empty(), "only what is ours is ever removed");
        if file(name).exists() {
            std::fs::remove_file(file(name)).unwrap();
        }
    }
    let x = file("acme/x.jsonl");
    replace_text(&x, "question 1", "question #");
    assert!(has_finding(&findings_of(&test).await, &["acme/x.jsonl:", "checksum", "backup"]));
    replace_text(&x, "question #", "question 1");
    let full = std::fs::read(&x).unwrap();
    std::fs::write(&x, [&full[..], b"{\"seq\":"].concat()).unwrap();
    assert!(has_finding(&findings_of(&test).await, &["acme/x.jsonl:", "the last 7 bytes are not a complete commit"]));
    std::fs::write(&x, &full).unwrap();
    let blob = std::fs::read_dir(file("other/blobs")).unwrap().next().unwrap().unwrap().path();
    let bytes = std::fs::read(&blob).unwrap();
    std::fs::write(&blob, "other").unwrap();
    assert!(has_finding(&findings_of(&test).await, &["session other/x, record", "references blob", "damaged"]));
    std::fs::remove_file(&blob).unwrap();
    assert!(has_finding(&findings_of(&test).await, &["session other/x, record", "references blob", "missing"]));
    std::fs::write(&blob, bytes).unwrap();
    assert_eq!(findings_of(&test).await, [""; 0]);

    // Before opening: a damaged session, and one whose file is missing although forks reference it.
    test.tenure = Tenure::open("memory:").await.unwrap();
    replace_text(&file("acme/y.jsonl"), "question 1", "question #");
    std::fs::remove_file(&x).unwrap();
    test.reopen().await;
    std::fs::write(file("acme/blobs").join(&orphan), "nobody's").unwrap();
    let repaired = test.tenure.repair_all(|_| ()).await.unwrap();
    let remaining: Vec<String> = repaired.remaining.iter().map(Finding::to_string).collect();
    assert_eq!((repaired.repaired.len(), remaining.len()), (0, 3), "{remaining:#?}");
    assert!(has_finding(&remaining, &["acme/y.jsonl:", "checksum"]));
    for fork in ["f", "g"] {
        assert!(has_finding(
            &remaining,
            &[&format!("session acme/{fork}"), "its parent session x (forked at record", "does not exist"]
        ));
    }
    assert!(file("acme/blobs").join(&orphan).exists(), "a damaged session may need it");
}
