//! Opening, committing and reading.

use super::*;
use crate::store::contract::{FORMAT, MAX_PAGE_BYTES};
use crate::store::item::{Item, Namespace, Owner};
use crate::store::postgres::migrate;
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::types::entry::SessionPatch;
use crate::types::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use tokio::task::JoinSet;

#[tokio::test]
async fn a_commit_is_applied_once_and_only_to_its_base() {
    for options in ["pool=2", "pool=2&prepare=off"] {
        let Some(db) = Db::new(options).await else { return };
        let store = &db.store;
        let mut a = Writer::create(store, "a").await.unwrap();
        let stale = a.clone();
        a.append(store, [user_message("one"), user_message("two")]).await.unwrap();
        assert_eq!(store.head(&key("a")).await.unwrap(), Some(a.head.clone()));
        assert_eq!(load(store, &key("a")).await.head(), &a.head);

        let error = stale.clone().append(store, [user_message("late")]).await.unwrap_err();
        assert!(matches!(error, Error::Conflict { expected: 1, .. }), "{error:?}");
        let error = Writer::create(store, "a").await.unwrap_err();
        assert!(matches!(error, Error::Exists { .. }), "{error:?}");
        let mut missing = stale;
        missing.head.info.session_id = key("missing").session;
        let error = missing.append(store, [user_message("x")]).await.unwrap_err();
        assert!(matches!(&error, Error::NotFound { session_id } if session_id.as_str() == "missing"), "{error:?}");
        let mut gap = a.next_commit([user_message("x")]);
        gap.records[0].seq += 1;
        assert_eq!(store.commit(&gap).await.unwrap_err().code(), "invalid");
        assert_eq!(read_all(store, &key("a")).await.len(), 3, "a rejected commit changes nothing");

        // A commit without records changes only the head.
        let mut head_only = a.next_commit([]);
        head_only.head.due_at = Some(at(99));
        store.commit(&head_only).await.unwrap();
        assert_eq!(store.head(&key("a")).await.unwrap().unwrap().due_at, Some(at(99)));
        assert_eq!(store.head(&key("missing")).await.unwrap(), None);
        assert_eq!(store.records(&key("missing"), &RecordRange::after(0)).await.unwrap(), []);

        if options.contains("prepare=off") {
            // Prepared statements of any connection of the pool would be visible here.
            let prepared: i64 = db.rows("SELECT count(*) FROM pg_prepared_statements").await[0].get(0);
            assert_eq!(prepared, 0);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_writers_on_one_session_lose_nothing() {
    let Some(db) = Db::new("pool=16").await else { return };
    let store = std::sync::Arc::new(db.store);
    Writer::create(&store, "a").await.unwrap();
    let mut writers = JoinSet::new();
    for n in 0..16 {
        let store = store.clone();
        writers.spawn(async move {
            for i in 0..8 {
                loop {
                    let mut w = Writer { head: store.head(&key("a")).await.unwrap().unwrap(), skew: 0 };
                    match w.append(&store, [user_message(&format!("{n}/{i}")), user_message("and")]).await {
                        Ok(()) => break,
                        Err(Error::Conflict { .. }) => {}
                        Err(e) => panic!("{e}"),
                    }
                }
            }
        });
    }
    writers.join_all().await;
    let session = load(&store, &key("a")).await;
    assert_eq!(session.head(), &store.head(&key("a")).await.unwrap().unwrap());
    let mut texts: Vec<String> = session.messages.iter().step_by(2).map(|m| m.message.text()).collect();
    texts.sort();
    texts.dedup();
    assert_eq!((texts.len(), session.messages.len(), session.head().seq), (128, 256, 257));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_writers_on_their_own_sessions_do_not_conflict() {
    let Some(db) = Db::new("pool=16").await else { return };
    let store = std::sync::Arc::new(db.store);
    let mut writers = JoinSet::new();
    for n in 0..16 {
        let store = store.clone();
        writers.spawn(async move {
            let mut w = Writer::create(&store, &format!("s{n}")).await.unwrap();
            for i in 0..20 {
                w.append(&store, [user_message(&format!("{i}"))]).await.unwrap();
            }
            assert_eq!(load(&store, &w.head.key()).await.head(), &w.head);
        });
    }
    writers.join_all().await;
}

#[tokio::test]
async fn pages_are_bounded_and_complete() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    let mut w = Writer::create(store, "a").await.unwrap();
    w.append(store, (0..20).map(|n| user_message(&format!("{n}")))).await.unwrap();
    let seqs = |page: Vec<Record>| page.iter().map(|r| r.seq).collect::<Vec<_>>();
    let page = |range: RecordRange| async move { seqs(store.records(&key("a"), &range).await.unwrap()) };
    assert_eq!(page(RecordRange { limit: 3, ..RecordRange::after(4) }).await, [5, 6, 7]);
    assert_eq!(page(RecordRange { upto: 6, ..RecordRange::after(4) }).await, [5, 6]);
    assert_eq!(page(RecordRange::back_from(u64::MAX, 2)).await, [21, 20]);
    assert_eq!(page(RecordRange { after: 8, ..RecordRange::back_from(10, 9) }).await, [10, 9]);
    assert_eq!(page(RecordRange::after(21)).await, [0; 0]);
    assert_eq!(page(RecordRange { limit: 0, ..RecordRange::after(0) }).await, [0; 0]);
    assert_eq!(page(RecordRange::after(u64::MAX)).await, [0; 0]);

    // Three of these exceed a page.
    let large = "x".repeat(MAX_PAGE_BYTES / 2 - 100);
    w.append(store, [user_message(&large), user_message(&large), user_message(&large), user_message("end")])
        .await
        .unwrap();
    assert_eq!(page(RecordRange::after(21)).await, [22, 23, 24]);
    assert_eq!(page(RecordRange::after(24)).await, [25]);
    assert_eq!(read_all(store, &key("a")).await.len(), 25);
}

#[tokio::test]
async fn damage_is_reported_with_its_location() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    let mut w = Writer::create(store, "a").await.unwrap();
    w.append(store, (0..9).map(|n| user_message(&format!("{n}")))).await.unwrap();
    let read_error =
        |range: RecordRange| async move { store.records(&key("a"), &range).await.unwrap_err().to_string() };

    db.rows("UPDATE tenure_record SET entry = replace(entry, '3', '4') WHERE seq = 5").await;
    let want = "damaged data at postgres, session acme/a, record 5: its checksum does not match";
    assert_eq!(read_error(RecordRange::after(0)).await, want);
    for (seq, range) in
        [(5, RecordRange::after(2)), (5, RecordRange::after(4)), (5, RecordRange { upto: 5, ..RecordRange::after(4) })]
    {
        db.rows(&format!("DELETE FROM tenure_record WHERE seq = {seq}")).await;
        assert_eq!(
            read_error(range).await,
            "damaged data at postgres, session acme/a, record 5: the record is missing"
        );
    }
    assert!(read_error(RecordRange::back_from(u64::MAX, 99)).await.contains("record 5: the record is missing"));
    db.rows("DELETE FROM tenure_record WHERE seq IN (1, 10)").await;
    assert!(read_error(RecordRange::after(0)).await.contains("record 1: the record is missing"));
    assert!(read_error(RecordRange::after(9)).await.contains("record 10: the record is missing"));
    assert!(read_error(RecordRange::back_from(u64::MAX, 1)).await.contains("record 10: the record is missing"));
    db.rows("UPDATE tenure_head SET head_json = '{}'").await;
    assert!(store.head(&key("a")).await.unwrap_err().to_string().contains("session acme/a, head: missing field"));
}

#[tokio::test]
async fn nul_characters_in_json_are_preserved() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    let mut w = Writer::create(store, "a").await.unwrap();
    let raw = r#"{"role":"user","content":"a\u0000b \"body\":","n":1.0e2,"z":1,"a":2}"#;
    let mut info = SessionPatch { title: Some("t\0t".to_owned()).into(), ..SessionPatch::default() };
    info.tags = Some(vec!["x\0y".to_owned()]).into();
    info.metadata.insert("k\0".to_owned(), "v\0".into());
    w.append(store, [Entry::message(Message::parse(raw).unwrap()), Entry::info(info)]).await.unwrap();
    let session = load(store, &key("a")).await;
    assert_eq!((session.messages[0].message.as_str(), session.head()), (raw, &w.head));
    assert_eq!(store.head(&key("a")).await.unwrap(), Some(w.head.clone()));

    let rows = db.rows("SELECT message_json::text FROM S.messages").await;
    assert_eq!(rows[0].get::<_, &str>(0), raw, "the view shows the message as it came");
    let rows = db.rows("SELECT info_json::text, updated_at = timestamptz '2023-11-14 22:13:23Z' FROM S.sessions").await;
    let info = serde_json::to_string(&w.head.info).unwrap().replace("\\u0000", "\\ufffd");
    assert_eq!(rows[0].get::<_, &str>(0), info);
    assert!(rows[0].get::<_, bool>(1));

    let mut commit = w.next_commit([user_message("x")]);
    commit.head.thread = Some("a\0b".to_owned());
    assert_eq!(store.commit(&commit).await.unwrap_err().code(), "invalid");
}

#[tokio::test]
async fn a_newer_format_is_rejected() {
    let Some(db) = Db::new("pool=2").await else { return };
    db.rows("INSERT INTO tenure_format (version) VALUES (99)").await;
    let error = PostgresStore::open(&db.url).await.unwrap_err();
    assert!(matches!(error, Error::NewerFormat { version: 99, supported: FORMAT, .. }), "{error:?}");
}

/// A newer version migrates while nodes of this version are working and another transaction holds a
/// table lock: the migration yields until it can proceed, the nodes continue before and after, and
/// no further node of this version can start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newer_version_migrates_while_nodes_of_this_version_work() {
    let Some(db) = Db::new("pool=4").await else { return };
    let store = Arc::new(PostgresStore::open(&db.url).await.unwrap());
    let next =
        "ALTER TABLE tenure_head ADD COLUMN mood text; ALTER TABLE tenure_record ADD COLUMN origin text DEFAULT 'here';
        ALTER TABLE tenure_item ADD COLUMN weight int; ALTER TABLE tenure_blob ADD COLUMN kind text;
        CREATE TABLE tenure_more (x int); CREATE INDEX ON tenure_head (mood)";
    let versions = [&migrate::MIGRATIONS[..], &[next]].concat();

    let mut nodes = JoinSet::new();
    let is_done = Arc::new(AtomicBool::new(false));
    for n in 0..4 {
        let store = store.clone();
        let is_done = is_done.clone();
        nodes.spawn(async move {
            let mut writer = Writer::create(&store, &format!("s{n}")).await.unwrap();
            let mut turns = 0;
            let mut is_last = false;
            // One more iteration after the migration, with statements that were prepared before it.
            while !std::mem::replace(&mut is_last, is_done.load(SeqCst)) {
                writer.append(&store, [user_message("x"), user_message("y")]).await.unwrap();
                turns += 1;
                assert_eq!(read_all(&*store, &key(&format!("s{n}"))).await.len(), 1 + 2 * turns);
                assert!(!store.heads(&SessionQuery::new(OwnerFilter::AllTenants, 10)).await.unwrap().is_empty());
                let namespace = Namespace { tenant: tenant(), owner: Owner::Tenant, name: "n".to_owned() };
                let item = Item {
                    key: n.to_string(),
                    value: "1".into(),
                    created_at: at(0),
                    used_at: at(0),
                    uses: 0,
                    expires_at: None,
                };
                store.put(&namespace, &item, Some(3)).await.unwrap();
                store.items(&namespace, None, 9).await.unwrap();
            }
            turns
        });
    }
    let mut pooled = db.store.connection.acquire().await.unwrap();
    let lock_holder = pooled.transaction().await.unwrap();
    lock_holder.batch_execute(&db.store.connection.qualify_tables("SELECT count(*) FROM tenure_head")).await.unwrap();
    let upgrade = migrate::migrate(&db.store.connection, "here", &versions);
    let release_lock = async {
        // Longer than the lock timeout of a single attempt.
        tokio::time::sleep(std::time::Duration::from_millis(1500)).await;
        lock_holder.commit().await.unwrap();
    };
    let (upgraded, ()) = tokio::join!(upgrade, release_lock);
    upgraded.unwrap();
    is_done.store(true, SeqCst);
    assert!(nodes.join_all().await.into_iter().all(|turns| turns > 1));
    assert_eq!(db.rows("SELECT count(*) FROM tenure_more").await.len(), 1, "it was migrated");
    let error = PostgresStore::open(&db.url).await.unwrap_err();
    assert!(
        matches!(error, Error::NewerFormat { supported: FORMAT, version: found, .. } if found == FORMAT + 1),
        "{error:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_nodes_can_open_an_empty_database_concurrently() {
    let Some(server) = postgres_server() else { return };
    let schema = PostgresSchema::on(&server);
    let url = format!("{}&pool=2", schema.url());
    let mut nodes = JoinSet::new();
    for _ in 0..6 {
        let url = url.clone();
        nodes.spawn(async move { PostgresStore::open(&url).await.unwrap() });
    }
    let store = nodes.join_all().await.pop().unwrap();
    let db = Db { store, url, schema };
    let versions = db.rows("SELECT version FROM tenure_format").await;
    assert_eq!(versions.iter().map(|r| r.get(0)).collect::<Vec<i32>>(), (1..=FORMAT as i32).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_database_of_another_program_is_not_changed() {
    let Some(server) = postgres_server() else { return };
    let schema = PostgresSchema::on(&server);
    schema.execute(&format!("CREATE SCHEMA {}; CREATE TABLE messages (id int)", schema.name())).await;
    let error = PostgresStore::open(&schema.url()).await.unwrap_err();
    assert_eq!(error.code(), "invalid");
    assert!(error.to_string().contains("add schema=NAME"), "{error}");
    let other = Db::at(&server, "pool=2").await;
    let tables = other.rows(&format!("SELECT count(*) FROM pg_tables WHERE schemaname = '{}'", schema.name())).await;
    assert_eq!(tables[0].get::<_, i64>(0), 1, "nothing was left behind");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_is_little_larger_than_its_text() {
    const SESSIONS: usize = 100;
    const TURNS: usize = 25;
    // In its own database: snapshots of other tests would prevent old row versions of heads from
    // being vacuumed.
    let Some(server) = postgres_server() else { return };
    let other = Db::at(&server, "pool=1").await;
    let name = format!("test_{}", uuid::Uuid::now_v7().simple());
    other.rows(&format!("CREATE DATABASE {name}")).await;
    let (base, _) = server.rsplit_once('/').unwrap();
    let db = Db::at(&format!("{base}/{name}"), "pool=4").await;
    let store = std::sync::Arc::new(db.store);
    let text = "m".repeat(1024 - r#"{"role":"user","content":""}"#.len());
    let mut writers = JoinSet::new();
    for skew in 0..SESSIONS {
        let store = store.clone();
        let text = text.clone();
        writers.spawn(async move {
            let mut w = Writer::create(&store, SessionId::generate().as_str()).await.unwrap();
            w.skew = skew as i64;
            for n in 0..TURNS {
                let text = format!("{skew:06}{}", &text[6..]);
                w.append(&store, [user_message(&text)]).await.unwrap();
                let checkpoint = format!(r#"{{"checkpoint":{{"label":"turn {n}","auto":true}}}}"#);
                let turn = [user_message(&text), Entry::decode(&checkpoint).unwrap()];
                w.append(&store, turn).await.unwrap();
            }
        });
    }
    writers.join_all().await;
    let db = Db { store: std::sync::Arc::into_inner(store).unwrap(), ..db };
    db.rows("CREATE TABLE S.m (id bigserial, sid bigint, data text, PRIMARY KEY (sid, id))").await;
    // Baseline: equal messages in the same order of arrival, and a small checkpoint row for each
    // turn.
    let sql = "INSERT INTO S.m (sid, data) SELECT s, CASE k WHEN 3 THEN '{\"label\":\"turn 10\",\"position\":20}'
        ELSE repeat('m', 1024) END FROM generate_series(1, TURNS) t, generate_series(1, SESSIONS) s, generate_series(1, 3) k";
    db.rows(&sql.replace("TURNS", &TURNS.to_string()).replace("SESSIONS", &SESSIONS.to_string())).await;
    let sql = "SELECT pg_total_relation_size('S.m'), pg_total_relation_size('tenure_head'), pg_total_relation_size('tenure_record')";
    let sizes = &db.rows(sql).await[0];
    let size = |n: usize| sizes.get::<_, i64>(n) as f64;
    let heads = size(1) / size(0);
    let log = size(2) / size(0);
    eprintln!("{} bytes raw; times {log:.3} in the log, and {heads:.3} for heads", size(0));
    // Heads do not grow with the log: the space of old row versions is reused after a vacuum, which
    // does not happen in a run as short as this one.
    assert!(log < 1.25 && log + heads < 1.4, "{log} + {heads}");
    drop(db);
    other.rows(&format!("DROP DATABASE {name} WITH (FORCE)")).await;
}
