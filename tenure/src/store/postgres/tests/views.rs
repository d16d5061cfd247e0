//! The SQL views for people, compared with the fold.

use super::*;
use crate::testing::expected_views::{checkpoint_state, random_event, run_row};
use crate::types::entry::{CheckpointEntry, RewindEntry};
use crate::types::id::{CheckpointLabel, RunId};
use crate::types::status::Status;
use serde_json::{Map, Value, json};

/// Asserts that every view of a session agrees with its folded log.
async fn assert_views(db: &Db, session: &str) {
    let folded = load(&db.store, &key(session)).await;
    let condition = format!("tenant = 'acme' AND session_id = '{session}'");

    let rows = db.rows(&format!("SELECT ord, message_json::text FROM S.messages WHERE {condition} ORDER BY ord")).await;
    let shown: Vec<(i64, String)> = rows.iter().map(|r| (r.get(0), r.get(1))).collect();
    let want: Vec<_> = (0..).zip(folded.messages.iter().map(|m| m.message.as_str().to_owned())).collect();
    assert_eq!(shown, want, "messages of {session}");

    let sql = "SELECT label, position, (extract(epoch FROM created_at) * 1000000)::bigint, auto FROM S.checkpoints";
    let rows = db.rows(&format!("{sql} WHERE {condition} ORDER BY created_at, position")).await;
    let shown: Vec<(String, i64, i64, bool)> = rows.iter().map(|r| (r.get(0), r.get(1), r.get(2), r.get(3))).collect();
    let checkpoints = folded.checkpoints.iter();
    let want = checkpoints.map(|c| (c.label.to_string(), c.position as i64, c.created_at.as_microsecond(), c.auto));
    assert_eq!(shown, want.collect::<Vec<_>>(), "checkpoints of {session}");

    let sql = "SELECT run_id, step_index, state::text, created_at = updated_at, id::text FROM S.workflow_checkpoints";
    let rows = db.rows(&format!("{sql} WHERE {condition} ORDER BY created_at")).await;
    assert_eq!(rows.len(), folded.checkpoints.len());
    let log = read_full_log(&db.store, &key(session)).await;
    for (row, c) in rows.iter().zip(&folded.checkpoints) {
        assert_eq!(row.get::<_, Option<&str>>(0), c.run.as_ref().map(RunId::as_str));
        assert_eq!(row.get::<_, Option<i32>>(1), c.step.map(|s| s as i32));
        let want = with_replaced_nul(&checkpoint_state(&key(session), &log, c));
        assert_eq!(serde_json::from_str::<Value>(row.get(2)).unwrap(), want);
        assert!(row.get::<_, bool>(3));
    }
    let mut ids: Vec<&str> = rows.iter().map(|r| r.get(4)).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), rows.len(), "ids are unique");

    let sql = "SELECT json_build_array(id, status, (extract(epoch FROM started_at) * 1000000)::bigint,
        (extract(epoch FROM ended_at) * 1000000)::bigint, error, code)::text FROM S.runs";
    let rows = db.rows(&format!("{sql} WHERE {condition} ORDER BY started_at")).await;
    let shown: Vec<Value> = rows.iter().map(|r| serde_json::from_str(r.get(0)).unwrap()).collect();
    let head = db.store.head(&key(session)).await.unwrap().unwrap();
    assert_eq!(shown, folded.runs.iter().map(|run| run_row(run, &head)).collect::<Vec<_>>(), "runs of {session}");
}

/// Replaces NUL in the keys and strings of a value, as the views do where they return `jsonb`.
fn with_replaced_nul(value: &Value) -> Value {
    let replaced = |text: &str| text.replace('\0', "\u{fffd}");
    match value {
        Value::String(text) => Value::String(replaced(text)),
        Value::Array(values) => values.iter().map(with_replaced_nul).collect(),
        Value::Object(fields) => fields.iter().map(|(k, v)| (replaced(k), with_replaced_nul(v))).collect(),
        other => other.clone(),
    }
}

/// Returns a random entry: a message, a checkpoint, a rewind, or what else the views show.
fn random_entry(rng: &mut Rng, session: &Session) -> Entry {
    match rng.below(13) {
        9.. => random_event(rng, session),
        0 if session.head().seq > 2 => {
            let position = session.locate(&Point::Position(rng.below(session.messages.len() + 1))).unwrap();
            Entry::Rewound(RewindEntry { to: position.seq, digest: position.digest })
        }
        0 | 1 => {
            let mut state = Map::new();
            if rng.below(2) == 0 {
                state.insert("a\0,\"state\":{".to_owned(), json!({"body": "\0", "n": session.head().seq}));
            }
            let label = CheckpointLabel::new(format!("c{} ,\"state\":{{ \\ é", rng.below(3))).unwrap();
            let run = (rng.below(2) == 0).then(|| RunId::new("r-1").unwrap());
            let step = (rng.below(2) == 0).then_some(session.head().seq);
            Entry::Checkpoint(CheckpointEntry { label, auto: rng.below(2) == 0, run, step, state })
        }
        2 => {
            let text = format!(
                r#"{{"message":{{"run":"r.1","replaces_instructions":true,"body":{}}}}}"#,
                Message::system("\"body\":").as_str()
            );
            Entry::decode(&text).unwrap()
        }
        n => user_message(&format!("{} {n} \0 \"body\":", session.head().seq)),
    }
}

#[tokio::test]
async fn views_agree_with_the_fold_over_forks_rewinds_and_purges() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    for seed in [7, 1234, 99_999] {
        eprintln!("seed {seed}");
        let mut rng = Rng::new(seed);
        let mut names = vec![format!("root-{seed}")];
        Writer::create(store, &names[0]).await.unwrap();
        for step in 0..120 {
            let source = names[rng.below(names.len())].clone();
            let session = load(store, &key(&source)).await;
            match rng.below(10) {
                0 | 1 if names.len() < 8 => {
                    // At any position, including one before the session's own first record.
                    let point = Point::Position(rng.below(session.messages.len() + 1));
                    let name = format!("fork-{seed}-{step}");
                    Writer::fork(store, &source, &point, &name).await.unwrap();
                    names.push(name);
                }
                2 if names.len() > 3 => {
                    names.retain(|n| *n != source);
                    let mut before = Vec::new();
                    for name in &names {
                        before.push(load(store, &key(name)).await);
                    }
                    store.purge(&key(&source)).await.unwrap();
                    for (name, before) in names.iter().zip(before) {
                        let after = load(store, &key(name)).await;
                        assert_eq!((&after.messages, &after.checkpoints), (&before.messages, &before.checkpoints));
                        let head = store.head(&key(name)).await.unwrap().unwrap();
                        assert_eq!((head.seq, &head.digest), (before.head().seq, &before.head().digest));
                    }
                }
                _ => {
                    let mut w = Writer { head: store.head(&key(&source)).await.unwrap().unwrap(), skew: 0 };
                    let entry = random_entry(&mut rng, &session);
                    w.append(store, [entry]).await.unwrap();
                }
            }
        }
        for name in &names {
            assert_views(&db, name).await;
        }
    }
}

#[tokio::test]
async fn views_show_only_live_sessions() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    for (name, status) in [("a", Status::Active), ("p", Status::Paused), ("e", Status::Expired), ("d", Status::Deleted)]
    {
        let mut w = Writer::create(store, name).await.unwrap();
        let run = Entry::decode(r#"{"run_started":{"run":"r"}}"#).unwrap();
        let status = Entry::Status { to: status, reason: None, until: None };
        w.append(store, [user_message(name), checkpoint("c"), run, status]).await.unwrap();
    }
    // A fork of a deleted session still shows the inherited records.
    Writer::fork(store, "d", &Point::End, "f").await.unwrap();
    for view in ["sessions", "messages", "workflow_checkpoints", "runs"] {
        let rows = db.rows(&format!("SELECT DISTINCT session_id FROM S.{view} ORDER BY 1")).await;
        assert_eq!(rows.iter().map(|r| r.get(0)).collect::<Vec<&str>>(), ["a", "f", "p"], "{view}");
    }
}

fn checkpoint(label: &str) -> Entry {
    let label = CheckpointLabel::new(label).unwrap();
    Entry::Checkpoint(CheckpointEntry { label, auto: false, run: None, step: None, state: Map::new() })
}

/// The newest checkpoint of a session is looked up in an index, and only its state is computed, with and without
/// statistics.
#[tokio::test]
async fn the_newest_checkpoint_is_an_index_lookup() {
    let Some(db) = Db::new("pool=2").await else { return };
    for n in 0..50 {
        let mut w = Writer::create(&db.store, &format!("s{n}")).await.unwrap();
        let entries = (0..200).flat_map(|m| [user_message(&m.to_string()), checkpoint(&format!("c{m}"))]);
        w.append(&db.store, entries).await.unwrap();
    }
    Writer::fork(&db.store, "s7", &Point::End, "fork").await.unwrap();
    for statistics in ["SELECT 1", "ANALYZE tenure_head, tenure_record"] {
        db.rows(statistics).await;
        for session in ["s7", "fork"] {
            let newest = format!(
                "SELECT state FROM S.workflow_checkpoints
                WHERE tenant = 'acme' AND session_id = '{session}' ORDER BY updated_at DESC LIMIT 1"
            );
            let plan = db.rows(&format!("EXPLAIN (ANALYZE, TIMING OFF, COSTS OFF, VERBOSE) {newest}")).await;
            let plan: Vec<&str> = plan.iter().map(|r| r.get(0)).collect();
            let plan = plan.join("\n");
            assert!(plan.contains("Index Scan using tenure_record_checkpoint"), "{plan}");
            assert!(plan.contains("(tenure_record.session = segment.source) AND"), "{plan}");
            assert!(!plan.lines().any(|l| l.contains("Seq Scan") && l.contains("tenure_record")), "{plan}");
            // The state is computed above the sort, for the row that is left.
            let (before_sort, after_sort) = plan.split_once("Sort Key").unwrap();
            assert!(before_sort.contains("tenure_checkpoint_state("), "{plan}");
            assert!(!after_sort.contains("tenure_checkpoint_state("), "{plan}");
            let rows = db.rows(&format!("SELECT (state ->> 'position')::int FROM ({newest}) newest")).await;
            assert_eq!(rows[0].get::<_, i32>(0), 200);
        }
    }
}

/// `jsonb` cannot hold NUL: the view replaces it, and nothing that only looks like its escape.
#[tokio::test]
async fn a_state_shows_a_replacement_for_nul() {
    let Some(db) = Db::new("pool=2").await else { return };
    let mut w = Writer::create(&db.store, "s").await.unwrap();
    let state = json!({"key\0": ["\0\0", "\\\0", "\\u0000", "\\\\u0000"]});
    let state = state.as_object().unwrap().clone();
    let label = CheckpointLabel::new("c").unwrap();
    let entry = Entry::Checkpoint(CheckpointEntry { label, auto: false, run: None, step: None, state });
    w.append(&db.store, [user_message("a\0b\\u0000"), entry]).await.unwrap();
    let rows = db.rows("SELECT state::text, pg_typeof(state)::text, step_index FROM S.workflow_checkpoints").await;
    assert_eq!((rows[0].get(1), rows[0].get(2)), ("jsonb", None::<i32>));
    assert_eq!(
        serde_json::from_str::<Value>(rows[0].get(0)).unwrap(),
        json!({
            "label": "c",
            "position": 1,
            "messages": [{"role": "user", "content": "a\u{fffd}b\\u0000"}],
            "pending_tool_calls": [],
            "tool_results": [],
            "metadata": {},
            "state": {"key\u{fffd}": ["\u{fffd}\u{fffd}", "\\\u{fffd}", "\\u0000", "\\\\u0000"]},
        })
    );
    // Half of a surrogate pair is not a character: the text is shown as it is.
    let rows = db.rows(r#"SELECT tenure_jsonb('["\ud800"]')::text"#).await;
    assert_eq!(serde_json::from_str::<Value>(rows[0].get(0)).unwrap(), json!(r#"["\ud800"]"#));
}
