//! The SQL views for people, compared with the fold.

use super::*;
use crate::rules::session::{Point, Session};
use crate::testing::expected_views::{checkpoint_state, random_event, run_row};
use crate::types::entry::{CheckpointEntry, Parent, RewindEntry};
use crate::types::id::{CheckpointLabel, RunId};
use crate::types::status::Status;
use serde_json::{Map, Value, json};

/// Reads the whole log of a session, including the records of its ancestors.
async fn full_log(test_store: &TestStore, session: &str) -> Vec<Record> {
    let mut records = Vec::new();
    let mut id = session.to_owned();
    let mut last_seq = Seq::MAX;
    loop {
        let own = test_store
            .store
            .records(&key(&id), &RecordRange { upto: last_seq, ..RecordRange::after(0) })
            .await
            .unwrap();
        records.splice(..0, own);
        let Some(parent) = test_store.store.head(&key(&id)).await.unwrap().unwrap().parent else { return records };
        (id, last_seq) = (parent.session.to_string(), last_seq.min(parent.seq));
    }
}

async fn load(test_store: &TestStore, session: &str) -> Session {
    Session::replay(&key(session), full_log(test_store, session).await).unwrap()
}

fn rows(sql: &Connection, query: &str, session: &str) -> Vec<Value> {
    let mut statement = sql.prepare(query).unwrap();
    let rows = statement.query_map([session], |r| r.get::<_, String>(0)).unwrap();
    rows.map(|row| serde_json::from_str(&row.unwrap()).unwrap()).collect()
}

async fn assert_views(test_store: &TestStore, session: &str) {
    let sql = test_store.sql();
    let folded = load(test_store, session).await;
    let expected_messages =
        folded.messages.iter().enumerate().map(|(n, m)| json!([n, m.message.to_value(), "default"]));
    let query = "SELECT json_array(ord, json(message_json), tenant) FROM messages WHERE session_id = ?1 ORDER BY ord";
    assert_eq!(rows(&sql, query, session), expected_messages.collect::<Vec<_>>(), "messages of {session}");

    let expected_checkpoints =
        folded.checkpoints.iter().map(|c| json!([c.label, c.position, c.auto, format!("{:.6}", c.created_at)]));
    let query = "SELECT json_array(label, position, json(iif(auto, 'true', 'false')), created_at) FROM checkpoints
        WHERE session_id = ?1 AND tenant = 'default' ORDER BY created_at";
    assert_eq!(rows(&sql, query, session), expected_checkpoints.collect::<Vec<_>>(), "checkpoints of {session}");

    let log = full_log(test_store, session).await;
    let expected_states = folded.checkpoints.iter().map(|c| {
        let id = format!("default/{session}/{}", c.seq);
        let at = format!("{:.6}", c.created_at);
        json!([id, c.run, checkpoint_state(&key(session), &log, c), c.step, at, at])
    });
    let query = "SELECT json_array(id, run_id, json(state), step_index, created_at, updated_at)
        FROM workflow_checkpoints WHERE session_id = ?1 AND tenant = 'default' ORDER BY updated_at";
    assert_eq!(rows(&sql, query, session), expected_states.collect::<Vec<_>>(), "states of {session}");

    let head = test_store.store.head(&key(session)).await.unwrap().unwrap();
    let expected_runs = folded.runs.iter().map(|run| run_row(run, &head));
    let micros = |column| {
        format!(
            "unixepoch(substr({column}, 1, 19)) * 1000000
            + substr({column}, 21, 6)"
        )
    };
    let query = format!(
        "SELECT json_array(id, status, {}, {}, error, code) FROM runs
        WHERE session_id = ?1 AND tenant = 'default' ORDER BY started_at",
        micros("started_at"),
        micros("ended_at")
    );
    assert_eq!(rows(&sql, &query, session), expected_runs.collect::<Vec<_>>(), "runs of {session}");

    let query = "SELECT json_array(json(info_json), updated_at) FROM sessions WHERE session_id = ?1";
    assert_eq!(rows(&sql, query, session), [json!([head.info, head.info.updated_at])]);
}

/// Appends random entries: messages, checkpoints, runs, metadata, and rewinds to any message or checkpoint, including
/// those of a parent.
async fn grow(test_store: &TestStore, log: &mut Log, rng: &mut Rng) {
    for _ in 0..3 + rng.below(8) {
        match rng.below(8) {
            5.. => {
                log.save(&test_store.store).await;
                let session = load(test_store, log.head.info.session_id.as_str()).await;
                log.push(random_event(rng, &session));
            }
            0..3 => {
                log.push_user_message(&format!("{} \"{}\"", log.head.info.session_id, log.head.seq));
            }
            3 => {
                let label = CheckpointLabel::new(format!("after {}", log.head.seq)).unwrap();
                let run = (rng.below(2) == 0).then(|| RunId::new("r-1").unwrap());
                let step = (rng.below(2) == 0).then_some(log.head.seq);
                let mut state = Map::new();
                if rng.below(2) == 0 {
                    state.insert("a\0".to_owned(), json!({"n": log.head.seq}));
                }
                log.push(Entry::Checkpoint(CheckpointEntry { label, auto: rng.below(2) == 0, run, step, state }));
            }
            _ => {
                log.save(&test_store.store).await;
                let session = load(test_store, log.head.info.session_id.as_str()).await;
                let position = rng.below(session.messages.len() + 1);
                let target = session.locate(&Point::Position(position)).unwrap();
                log.push(Entry::Rewound(RewindEntry { to: target.seq, digest: target.digest }));
            }
        }
    }
    log.save(&test_store.store).await;
}

#[tokio::test]
async fn views_show_what_the_fold_shows() {
    for seed in 1..=8 {
        let test_store = TestStore::new().await;
        let mut rng = Rng::new(seed);
        let mut logs = vec![Log::new("s0")];
        for n in 1..10 {
            let index = rng.below(logs.len());
            grow(&test_store, &mut logs[index], &mut rng).await;
            let parent = &mut logs[rng.below(n)];
            if parent.base.is_none() {
                parent.save(&test_store.store).await;
            }
            let session = load(&test_store, parent.head.info.session_id.as_str()).await;
            let fork_point = session.locate(&Point::Position(rng.below(session.messages.len() + 1))).unwrap();
            let parent =
                Parent { session: parent.head.info.session_id.clone(), seq: fork_point.seq, digest: fork_point.digest };
            // Like the library, a fork begins with the metadata of its parent, including the decisions.
            let metadata = session.head().info.metadata.clone();
            let created = SessionCreated { parent: Some(parent), metadata, ..SessionCreated::default() };
            let mut fork = Log::begin(&format!("s{n}"), created);
            grow(&test_store, &mut fork, &mut rng).await;
            logs.push(fork);
        }
        for n in 0..10 {
            assert_views(&test_store, &format!("s{n}")).await;
        }
        // Purging some sessions does not change what the remaining ones show.
        for n in [0, 4, 1] {
            test_store.store.purge(&key(&format!("s{n}"))).await.unwrap();
        }
        for n in [2, 3, 5, 6, 7, 8, 9] {
            assert_views(&test_store, &format!("s{n}")).await;
        }
    }
}

#[tokio::test]
async fn views_show_live_sessions_only() {
    let test_store = TestStore::new().await;
    for to in [Status::Active, Status::Paused, Status::Expired, Status::Deleted] {
        let mut log = Log::new(to.as_str());
        log.push_user_message("hi")
            .push(checkpoint("c"))
            .push(run_started())
            .push(Entry::Status { to, reason: None, until: None })
            .save(&test_store.store)
            .await;
    }
    let sql = test_store.sql();
    for view in ["sessions", "messages", "workflow_checkpoints", "runs"] {
        let mut statement = sql.prepare(&format!("SELECT session_id FROM {view} ORDER BY 1")).unwrap();
        let ids: Vec<String> = statement.query_map([], |r| r.get(0)).unwrap().map(|id| id.unwrap()).collect();
        assert_eq!(ids, ["active", "paused"], "{view}");
    }
}

/// The messages of one session are found without reading those of others.
#[tokio::test]
async fn a_view_reads_only_one_session() {
    let test_store = TestStore::new().await;
    for n in 0..100 {
        let mut log = Log::new(&format!("s{n}"));
        for m in 0..20 {
            log.push_user_message(&m.to_string());
        }
        log.save(&test_store.store).await;
    }
    let sql = test_store.sql();
    let mut statement =
        sql.prepare("SELECT message_json FROM messages WHERE tenant = 'default' AND session_id = 's7'").unwrap();
    assert_eq!(statement.query_map([], |_| Ok(())).unwrap().count(), 20);
    let steps = statement.get_status(rusqlite::StatementStatus::VmStep);
    assert!(steps < 20_000, "{steps} steps");
}

fn checkpoint(label: &str) -> Entry {
    Entry::Checkpoint(CheckpointEntry {
        label: CheckpointLabel::new(label).unwrap(),
        auto: false,
        run: None,
        step: None,
        state: Map::new(),
    })
}

fn run_started() -> Entry {
    Entry::decode(r#"{"run_started":{"run":"r"}}"#).unwrap()
}

/// The newest checkpoint of a session is looked up in an index, and only its state is computed. So are those of a fork.
#[tokio::test]
async fn the_newest_checkpoint_is_an_index_lookup() {
    let test_store = TestStore::new().await;
    for n in 0..50 {
        let mut log = Log::new(&format!("s{n}"));
        for m in 0..200 {
            log.push_user_message(&m.to_string());
            log.push(checkpoint(&format!("c{m}")));
        }
        log.save(&test_store.store).await;
    }
    let end = load(&test_store, "s7").await.locate(&Point::End).unwrap();
    let parent = Parent { session: key("s7").session, seq: end.seq, digest: end.digest };
    let mut fork = Log::begin("fork", SessionCreated { parent: Some(parent), ..SessionCreated::default() });
    fork.push_user_message("own").save(&test_store.store).await;

    let sql = test_store.sql();
    let newest = "SELECT id, state ->> '$.position' FROM workflow_checkpoints
        WHERE tenant = 'default' AND session_id = ?1 ORDER BY updated_at DESC LIMIT 1";
    let mut statement = sql.prepare(&format!("EXPLAIN QUERY PLAN {newest}")).unwrap();
    let plan: Vec<String> = statement.query_map(["s7"], |r| r.get(3)).unwrap().map(|step| step.unwrap()).collect();
    assert!(plan[0].starts_with("SEARCH h USING INDEX head_key"), "{plan:#?}");
    assert!(plan.iter().any(|step| step.starts_with("SEARCH c USING INDEX record_checkpoint")), "{plan:#?}");
    for table in ["c", "w", "r", "h", "ancestor"] {
        let scan = format!("SCAN {table} ");
        let is_scan = |step: &String| format!("{step} ").starts_with(&scan) && !step.contains("LEFT-JOIN");
        assert!(!plan.iter().any(is_scan), "{scan}: {plan:#?}");
    }

    for session in ["s7", "fork"] {
        let mut statement = sql.prepare(newest).unwrap();
        let shown: (String, i64) = statement.query_row([session], |r| Ok((r.get(0)?, r.get(1)?))).unwrap();
        assert_eq!(shown, (format!("default/{session}/401"), 200));
        // One state takes about 60,000 steps, those of 200 checkpoints more than a hundred times as many.
        let steps = statement.get_status(rusqlite::StatementStatus::VmStep);
        assert!(steps < 200_000, "{session}: {steps} steps");
    }
}
