//! Invariant 11: every released storage format can be opened forever; an older binary rejects a
//! newer format with a clear error.
//!
//! `tests/fixtures/formats/N` contains the files of format N. They are never rewritten: a new
//! format gets a new folder, created with `TENURE_WRITE_FORMAT=1 cargo test -p tenure --test it
//! formats::write`.

use crate::support::*;
use std::path::{Path, PathBuf};
use tenure::store::{Commit, FORMAT, Item, Namespace, Owner};
use tenure::{log::*, policy::*, rules::*, session::*, *};

fn folder(format: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/formats").join(format.to_string())
}

fn url(kind: &str, dir: &Path) -> String {
    format!("{kind}:{}", dir.join(if kind == "sqlite" { "tenure.db" } else { "jsonl" }).display())
}

/// One entry of every kind, except for `rewound`, which [`fill`] writes.
fn entries() -> Vec<Entry> {
    let texts = [
        r#"{"created":{"user":"ada","assistant":"asst","thread":"th","model":"m","title":"Ti\u0000tle","tags":["a"],"metadata":{"k":1.5}}}"#,
        r#"{"message":{"body":{ "role":"user", "content":"hello \u0000 é", "x":1.10 }}}"#,
        r#"{"message":{"run":"r1","replaces_instructions":true,"body":{"role":"system","content":"be polite"}}}"#,
        r#"{"checkpoint":{"label":"here","auto":true,"run":"r1","step":3,"state":{"n":1}}}"#,
        r#"{"info":{"title":null,"tags":["b"],"metadata":{"k":null,"z":{"deep":true}}}}"#,
        r#"{"run_started":{"run":"r1","node":"n0","until":1767225630000000,"detail":{"why":"test"}}}"#,
        r#"{"run_claimed":{"run":"r1","node":"n1","until":1767225660000000}}"#,
        r#"{"tool_started":{"run":"r1","call":"c1","tool":"search"}}"#,
        r#"{"review_opened":{"review":"rev_9_every.kind","step":"refund","run":"r1","call":"c1","queue":"finance","timeout":{"at":"2026-01-02T00:00:00Z","decision":"rejected"},"detail":{"amount":5}}}"#,
        r#"{"review_claimed":{"review":"rev_9_every.kind","by":"user_789","until":"2026-01-01T00:05:00Z"}}"#,
        r#"{"status":{"to":"paused","reason":"review"}}"#,
        r#"{"review_decided":{"review":"rev_9_every.kind","step":"refund","decision":"corrected","reviewer":"user_789","notes":"fine","arguments":{"amount":4},"previous":"0000000000000000000000000000000000000000000000000000000000000000"}}"#,
        r#"{"status":{"to":"active"}}"#,
        r#"{"run_ended":{"run":"r1","outcome":"completed"}}"#,
        r#"{"compacted":{"upto":2,"summary":{"role":"system","content":"they said hello"}}}"#,
        r#"{"message":{"body":{"role":"assistant","content":"bye"}}}"#,
        r#"{"message":{"replies_to":16,"body":{"role":"user","content":"still there?"}}}"#,
        r#"{"message":{"run":"r2","partial":true,"body":{"role":"assistant","content":"I am, b"}}}"#,
    ];
    texts.iter().map(|t| Entry::decode(t).unwrap()).collect()
}

async fn fill(tenure: &Tenure) {
    let principal = ada();
    let at: jiff::Timestamp = "2026-01-01T00:00:00.000007Z".parse().unwrap();
    let records: Vec<Record> = (1..).zip(entries()).map(|(seq, entry)| Record { seq, at, entry }).collect();
    let session = Session::replay(&principal.key(&id("every.kind")), records.clone()).unwrap();
    tenure.store().commit(&Commit::new(None, records, session.head().clone())).await.unwrap();
    tenure.create(&principal, new_session("p")).await.unwrap();
    tenure.append(&principal, &id("p"), [turn_messages(1), vec![image_message("see", "F")]].concat()).await.unwrap();
    tenure.fork(&principal, &id("p"), Fork::at(Point::Position(2)).id(Some(id("f")))).await.unwrap();
    tenure
        .append(&principal, &id("f"), Append { idempotency_key: Some("key".into()), ..turn_messages(2).into() })
        .await
        .unwrap();
    tenure.rewind(&principal, &id("p"), Point::Position(4)).await.unwrap();
    tenure.append(&principal, &id("p"), vec![image_message("see", "G")]).await.unwrap();
    tenure
        .cache_put(&principal, &id("p"), "tool", &serde_json::json!({"a": 1}), &serde_json::json!("r"))
        .await
        .unwrap();
    let namespace = Namespace {
        tenant: principal.tenant.clone(),
        owner: Owner::User(principal.user.clone()),
        name: "notes".into(),
    };
    let item =
        Item { key: "n".into(), value: "\"Grüße\"".into(), created_at: at, used_at: at, uses: 2, expires_at: None };
    tenure.store().put(&namespace, &item, None).await.unwrap();
}

async fn check(tenure: &Tenure) {
    let principal = ada();
    let s = tenure.load_any(&principal, &id("every.kind")).await.unwrap();
    let log =
        tenure.store().records(&principal.key(&id("every.kind")), &tenure::store::RecordRange::after(0)).await.unwrap();
    assert_eq!(log.iter().map(|r| r.entry.clone()).collect::<Vec<_>>(), entries());
    let replayed = Session::replay(&principal.key(&id("every.kind")), log).unwrap();
    assert_eq!(replayed.head(), s.head());
    assert_eq!((&replayed.messages, &replayed.checkpoints), (&s.messages, &s.checkpoints));
    assert_eq!((&replayed.runs, &replayed.reviews, replayed.summary()), (&s.runs, &s.reviews, s.summary()));
    assert_eq!(s.head().info.metadata["hitl_decisions"][0]["reviewer"], "user_789");
    assert_eq!(texts(&s)[0], r#"{ "role":"user", "content":"hello \u0000 é", "x":1.10 }"#);
    assert_eq!(history(&s, &Window::default()).len(), 5, "instructions, summary, and what came after it");
    let p = tenure.load_any(&principal, &id("p")).await.unwrap();
    assert_eq!(texts(&p), raw(&[turn_messages(1), vec![image_message("see", "G")]].concat()));
    let discarded = tenure.discarded(&principal, &id("p")).await.unwrap();
    assert_eq!(discarded[0].messages[0].message.as_str(), image_message("see", "F").as_str());
    assert_eq!(
        texts(&tenure.load_any(&principal, &id("f")).await.unwrap()),
        raw(&[turn_messages(1)[..2].to_vec(), turn_messages(2)].concat())
    );
    let namespace = Namespace {
        tenant: principal.tenant.clone(),
        owner: Owner::User(principal.user.clone()),
        name: "notes".into(),
    };
    assert_eq!(tenure.store().get(&namespace, "n", None).await.unwrap().unwrap().value, "\"Grüße\"");
    // The session is writable.
    tenure.append(&principal, &id("f"), turn_messages(3)).await.unwrap();
}

fn options() -> Options {
    let clock = Clock::manual("2026-01-01T00:00:01Z".parse().unwrap());
    Options { clock, ..Options::default() }
}

#[tokio::test]
async fn write() {
    if std::env::var("TENURE_WRITE_FORMAT").is_err() {
        return;
    }
    let folder = folder(FORMAT);
    assert!(!folder.exists(), "{} is there already, and is never written again", folder.display());
    std::fs::create_dir_all(&folder).unwrap();
    for kind in ["sqlite", "jsonl"] {
        let tenure = Tenure::open_with(&url(kind, &folder), options()).await.unwrap();
        fill(&tenure).await;
    }
    std::fs::remove_file(folder.join("jsonl/lock")).ok();
    std::fs::remove_file(folder.join("tenure.db-reserve")).ok();
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(|e| e.unwrap()) {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[tokio::test]
async fn every_released_format_opens() {
    for format in 1..=FORMAT {
        for kind in ["sqlite", "jsonl"] {
            let dir = tempfile::tempdir().unwrap();
            copy(&folder(format), dir.path());
            let tenure = Tenure::open_with(&url(kind, dir.path()), options()).await.unwrap();
            assert!(tenure.repairs().is_empty(), "{:?}", tenure.repairs());
            check(&tenure).await;
        }
    }
}

/// The views in a file of each format show its checkpoints and runs.
#[tokio::test]
async fn the_views_of_every_released_format_can_be_read() {
    for format in 1..=FORMAT {
        let dir = tempfile::tempdir().unwrap();
        copy(&folder(format), dir.path());
        drop(Tenure::open_with(&url("sqlite", dir.path()), options()).await.unwrap());
        let sql = rusqlite::Connection::open(dir.path().join("tenure.db")).unwrap();
        let query = "SELECT json_array(c.id, r.id, r.status, c.step_index, c.updated_at, json(c.state))
            FROM workflow_checkpoints c JOIN runs r
                ON r.tenant = c.tenant AND r.session_id = c.session_id AND r.id = c.run_id
            WHERE c.tenant = 'acme' AND c.session_id = 'every.kind'";
        let row: String = sql.query_row(query, [], |r| r.get(0)).unwrap();
        let state = serde_json::json!({
            "label": "here",
            "position": 2,
            "messages": [
                {"role": "user", "content": "hello \0 é", "x": 1.1},
                {"role": "system", "content": "be polite"},
            ],
            "pending_tool_calls": [],
            "tool_results": [],
            "metadata": {"k": 1.5},
            "state": {"n": 1},
        });
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&row).unwrap(),
            serde_json::json!(["acme/every.kind/4", "r1", "completed", 3, "2026-01-01T00:00:00.000007Z", state])
        );
    }
}

#[tokio::test]
async fn a_newer_format_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    copy(&folder(FORMAT), dir.path());
    std::fs::write(dir.path().join("jsonl/format"), "99\n").unwrap();
    rusqlite::Connection::open(dir.path().join("tenure.db")).unwrap().pragma_update(None, "user_version", 99).unwrap();
    for kind in ["sqlite", "jsonl"] {
        match Tenure::open(&url(kind, dir.path())).await {
            Err(Error::NewerFormat { version: 99, supported: FORMAT, .. }) => {}
            other => panic!("{kind}: {other:?}"),
        }
    }
    if let Some(test) = TestTenure::new(StoreKind::Postgres).await {
        test.store.schema().unwrap().execute("INSERT INTO tenure_format(version) VALUES (99)").await;
        match Tenure::open(test.url()).await {
            Err(e @ Error::NewerFormat { version: 99, .. }) => assert!(e.to_string().contains("newer version"), "{e}"),
            other => panic!("{other:?}"),
        }
    }
}
