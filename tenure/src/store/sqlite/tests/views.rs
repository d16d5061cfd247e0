//! The SQL views for people, compared with the fold.

use super::*;
use crate::rules::session::{Point, Session};
use crate::types::entry::{CheckpointEntry, Parent, RewindEntry};
use crate::types::id::CheckpointLabel;
use crate::types::status::Status;
use serde_json::{Value, json};

/// Reads the whole log of a session, including the records of its ancestors.
async fn whole(place: &Place, session: &str) -> Vec<Record> {
    let (mut records, mut id, mut upto) = (Vec::new(), session.to_owned(), Seq::MAX);
    loop {
        let own = place.store.records(&key(&id), &RecordRange { upto, ..RecordRange::after(0) }).await.unwrap();
        records.splice(..0, own);
        let Some(parent) = place.store.head(&key(&id)).await.unwrap().unwrap().parent else { return records };
        (id, upto) = (parent.session.to_string(), upto.min(parent.seq));
    }
}

async fn folded(place: &Place, session: &str) -> Session {
    Session::replay(&key(session), whole(place, session).await).unwrap()
}

fn rows(sql: &Connection, query: &str, session: &str) -> Vec<Value> {
    let mut find = sql.prepare(query).unwrap();
    let rows = find.query_map([session], |r| r.get::<_, String>(0)).unwrap();
    rows.map(|row| serde_json::from_str(&row.unwrap()).unwrap()).collect()
}

async fn assert_views(place: &Place, session: &str) {
    let (sql, folded) = (place.sql(), folded(place, session).await);
    let said = folded.messages.iter().enumerate().map(|(n, m)| json!([n, m.message.to_value(), "default"]));
    let query = "SELECT json_array(ord, json(message_json), tenant) FROM messages WHERE session_id = ?1 ORDER BY ord";
    assert_eq!(rows(&sql, query, session), said.collect::<Vec<_>>(), "messages of {session}");

    let points =
        folded.checkpoints.iter().map(|c| json!([c.label, c.position, c.auto, format!("{:.6}", c.created_at)]));
    let query = "SELECT json_array(label, position, json(iif(auto, 'true', 'false')), created_at) FROM checkpoints
        WHERE session_id = ?1 AND tenant = 'default' ORDER BY created_at";
    assert_eq!(rows(&sql, query, session), points.collect::<Vec<_>>(), "checkpoints of {session}");

    let head = place.store.head(&key(session)).await.unwrap().unwrap();
    let query = "SELECT json_array(json(info_json), updated_at) FROM sessions WHERE session_id = ?1";
    assert_eq!(rows(&sql, query, session), [json!([head.info, head.info.updated_at])]);
}

/// Appends random entries: messages, checkpoints, and rewinds to any message or checkpoint,
/// including those of a parent.
async fn grow(place: &Place, log: &mut Log, dice: &mut Dice) {
    for _ in 0..3 + dice.roll(5) {
        match dice.roll(5) {
            0..3 => {
                log.say(&format!("{} \"{}\"", log.head.info.session_id, log.head.seq));
            }
            3 => {
                let label = CheckpointLabel::new(format!("after {}", log.head.seq)).unwrap();
                let (run, step, state) = Default::default();
                log.push(Entry::Checkpoint(CheckpointEntry { label, auto: dice.roll(2) == 0, run, step, state }));
            }
            _ => {
                log.save(&place.store).await;
                let session = folded(place, log.head.info.session_id.as_str()).await;
                let position = dice.roll(session.messages.len() + 1);
                let to = session.locate(&Point::Position(position)).unwrap();
                log.push(Entry::Rewound(RewindEntry { to: to.seq, mark: to.mark }));
            }
        }
    }
    log.save(&place.store).await;
}

#[tokio::test]
async fn views_show_what_the_fold_shows() {
    for seed in 1..=8 {
        let place = Place::new().await;
        let mut dice = Dice(seed);
        let mut logs = vec![Log::new("s0")];
        for n in 1..10 {
            let which = dice.roll(logs.len());
            grow(&place, &mut logs[which], &mut dice).await;
            let parent = &mut logs[dice.roll(n)];
            if parent.base.is_none() {
                parent.save(&place.store).await;
            }
            let session = folded(&place, parent.head.info.session_id.as_str()).await;
            let point = session.locate(&Point::Position(dice.roll(session.messages.len() + 1))).unwrap();
            let parent = Parent { session: parent.head.info.session_id.clone(), seq: point.seq, mark: point.mark };
            let mut fork =
                Log::begin(&format!("s{n}"), SessionCreated { parent: Some(parent), ..SessionCreated::default() });
            grow(&place, &mut fork, &mut dice).await;
            logs.push(fork);
        }
        for n in 0..10 {
            assert_views(&place, &format!("s{n}")).await;
        }
        // Purging some sessions does not change what the remaining ones show.
        for n in [0, 4, 1] {
            place.store.purge(&key(&format!("s{n}"))).await.unwrap();
        }
        for n in [2, 3, 5, 6, 7, 8, 9] {
            assert_views(&place, &format!("s{n}")).await;
        }
    }
}

#[tokio::test]
async fn views_show_live_sessions_only() {
    let place = Place::new().await;
    for to in [Status::Active, Status::Paused, Status::Expired, Status::Deleted] {
        let mut log = Log::new(to.as_str());
        log.say("hi").push(Entry::Status { to, reason: None }).save(&place.store).await;
    }
    let sql = place.sql();
    for view in ["sessions", "messages"] {
        let mut find = sql.prepare(&format!("SELECT session_id FROM {view} ORDER BY 1")).unwrap();
        let ids: Vec<String> = find.query_map([], |r| r.get(0)).unwrap().map(|id| id.unwrap()).collect();
        assert_eq!(ids, ["active", "paused"], "{view}");
    }
}

/// The messages of one session are found without reading those of others.
#[tokio::test]
async fn a_view_reads_one_session_only() {
    let place = Place::new().await;
    for n in 0..100 {
        let mut log = Log::new(&format!("s{n}"));
        for m in 0..20 {
            log.say(&m.to_string());
        }
        log.save(&place.store).await;
    }
    let sql = place.sql();
    let mut find =
        sql.prepare("SELECT message_json FROM messages WHERE tenant = 'default' AND session_id = 's7'").unwrap();
    assert_eq!(find.query_map([], |_| Ok(())).unwrap().count(), 20);
    let steps = find.get_status(rusqlite::StatementStatus::VmStep);
    assert!(steps < 20_000, "{steps} steps");
}
