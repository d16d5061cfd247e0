//! Forks, purges and media: fork inheritance and blob references.

use super::*;
use crate::store::item::{Item, Namespace, Owner};
use crate::types::blob::{Blob, BlobId};
use crate::types::error::Error;
use std::sync::Arc;

fn blob(text: &str) -> Blob {
    Blob { id: BlobId::of(text.as_bytes()), bytes: text.as_bytes().into() }
}

async fn add_blob(store: &PostgresStore, w: &mut Writer, text: &str) {
    let mut step = w.step([say(text)]);
    step.blobs = vec![blob(text), blob(text)];
    w.commit(store, step).await.unwrap();
}

async fn has(store: &PostgresStore, text: &str) -> bool {
    store.blob(&tenant(), &blob(text).id).await.unwrap().is_some()
}

#[tokio::test]
async fn the_fork_that_left_last_inherits() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    let mut root = Writer::create(store, "root").await.unwrap();
    root.add(store, [say("1"), say("2")]).await.unwrap();
    let mut a = Writer::fork(store, "root", &Point::Position(2), "a").await.unwrap();
    a.add(store, [say("a1"), say("a2"), say("a3")]).await.unwrap();
    let early = Writer::fork(store, "a", &Point::Position(1), "early").await.unwrap();
    let first = Writer::fork(store, "a", &Point::Position(3), "first").await.unwrap();
    let mut last = Writer::fork(store, "a", &Point::Position(4), "last").await.unwrap();
    assert_eq!((a.head.first, early.head.first, first.head.first, last.head.first), (4, 3, 6, 7));
    let texts = |s: Session| s.messages.iter().map(|m| m.message.text()).collect::<Vec<_>>().join(" ");

    store.purge(&key("a")).await.unwrap();
    store.purge(&key("a")).await.unwrap();
    assert_eq!(store.head(&key("a")).await.unwrap(), None);
    assert_eq!(own(store, &key("a")).await, []);
    let heir = store.head(&key("last")).await.unwrap().unwrap();
    assert_eq!((heir.first, heir.seq, &heir.parent), (4, 7, &a.head.parent), "it stands where the purged one stood");
    for (name, seq) in [("early", 2), ("first", 5)] {
        let parent = store.head(&key(name)).await.unwrap().unwrap().parent.unwrap();
        assert_eq!((parent.session.as_str(), parent.seq), ("last", seq));
    }

    // A writer with a stale head does not restore the old lineage.
    last.add(store, [say("l1")]).await.unwrap();
    let heir = store.head(&key("last")).await.unwrap().unwrap();
    assert_eq!((heir.first, heir.seq, &heir.parent), (4, 8, &a.head.parent));
    for (name, want) in [("last", "1 2 a1 a2 l1"), ("first", "1 2 a1"), ("early", "1"), ("root", "1 2")] {
        assert_eq!(texts(load(store, &key(name)).await), want, "{name}");
    }

    // The fork point of `early` lies before the heir's own first record: it is re-parented to an
    // ancestor.
    store.purge(&key("first")).await.unwrap();
    store.purge(&key("last")).await.unwrap();
    assert_eq!(store.head(&key("early")).await.unwrap().unwrap().parent.unwrap().session.as_str(), "root");
    assert_eq!(texts(load(store, &key("early")).await), "1");
    store.purge(&key("root")).await.unwrap();
    let heir = store.head(&key("early")).await.unwrap().unwrap();
    assert_eq!((heir.first, &heir.parent, texts(load(store, &key("early")).await)), (1, &None, "1".to_owned()));
    let left: i64 = db.rows("SELECT count(*) FROM tenure_record").await[0].get(0);
    assert_eq!(left, 3, "nothing else is left");
    db.end().await;
}

#[tokio::test]
async fn a_fork_needs_its_parent() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    Writer::create(store, "root").await.unwrap();
    for (session, seq) in [("nobody", 1), ("root", 2)] {
        let parent = Parent { session: key(session).session, seq, mark: Default::default() };
        let created = SessionCreated { parent: Some(parent), ..SessionCreated::default() };
        let error = Writer::begin(store, "fork", created).await.unwrap_err();
        assert!(matches!(&error, Error::NotFound { session_id } if session_id.as_str() == session), "{error:?}");
    }
    assert_eq!(store.head(&key("fork")).await.unwrap(), None);
    db.end().await;
}

#[tokio::test]
async fn blobs_stay_as_long_as_a_session_needs_them() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    let mut root = Writer::create(store, "root").await.unwrap();
    add_blob(store, &mut root, "early").await;
    add_blob(store, &mut root, "late").await;
    add_blob(store, &mut root, "shared").await;
    let mut other = Writer::create(store, "other").await.unwrap();
    add_blob(store, &mut other, "shared").await;
    Writer::fork(store, "root", &Point::Position(1), "fork").await.unwrap();
    assert_eq!(store.blob(&tenant(), &blob("early").id).await.unwrap().as_deref(), Some(&b"early"[..]));
    assert_eq!(store.blob(&Tenant::default(), &blob("early").id).await.unwrap(), None, "another tenant has its own");

    store.purge(&key("root")).await.unwrap();
    assert_eq!((has(store, "early").await, has(store, "late").await, has(store, "shared").await), (true, false, true));
    store.purge(&key("fork")).await.unwrap();
    store.purge(&key("other")).await.unwrap();
    assert_eq!((has(store, "early").await, has(store, "shared").await), (false, false));

    add_blob(store, &mut Writer::create(store, "bad").await.unwrap(), "x").await;
    db.rows("UPDATE tenure_blob SET bytes = 'y'").await;
    assert_eq!(store.blob(&tenant(), &blob("x").id).await.unwrap_err().code(), "corrupt");
    db.end().await;
}

#[tokio::test]
async fn a_purge_takes_the_items_too() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    Writer::create(store, "a").await.unwrap();
    let item = Item {
        key: "k".to_owned(),
        value: "1".to_owned(),
        text: None,
        created_at: at(0),
        used_at: at(0),
        uses: 0,
        expires_at: None,
    };
    let shelf = Namespace { tenant: tenant(), owner: Owner::Session(key("a").session), name: "cache".to_owned() };
    store.put(&shelf, &item, None).await.unwrap();
    store.purge(&key("a")).await.unwrap();
    assert_eq!(store.get(&shelf, "k", None).await.unwrap(), None);
    assert_eq!(store.put(&shelf, &item, None).await.unwrap_err().code(), "not_found");
    db.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_and_a_fork_at_once_leave_a_whole_fork_or_none() {
    let Some(db) = Db::new("pool=6").await else { return };
    let store = Arc::new(db.store);
    let mut forked = 0;
    for round in 0..40 {
        let (name, child, late) = (format!("p{round}"), format!("c{round}"), format!("f{round}"));
        let mut w = Writer::create(&store, &name).await.unwrap();
        w.add(&store, [say("1"), say("2")]).await.unwrap();
        let mut c = Writer::fork(&store, &name, &Point::Position(1), &child).await.unwrap();
        let place = load(&store, &key(&name)).await.locate(&Point::End).unwrap();
        let parent = Parent { session: key(&name).session, seq: place.seq, mark: place.mark };
        let created = SessionCreated { parent: Some(parent), ..SessionCreated::default() };
        let (purge, fork, commit) = tokio::join!(
            async { store.purge(&key(&name)).await },
            async { Writer::begin(&store, &late, created).await },
            async { c.add(&store, [say("c")]).await },
        );
        purge.unwrap();
        commit.unwrap();
        assert_eq!(load(&store, &key(&child)).await.messages.len(), 2);
        match fork {
            Ok(_) => {
                forked += 1;
                assert_eq!(load(&store, &key(&late)).await.messages.len(), 2);
            }
            Err(e) => assert_eq!(e.code(), "not_found", "{e}"),
        }
    }
    eprintln!("{forked} of 40 forks came first");
    let store = Arc::into_inner(store).unwrap();
    Db { store, ..db }.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn families_can_be_purged_at_once() {
    let Some(db) = Db::new("pool=6").await else { return };
    let store = &db.store;
    for round in 0..20 {
        let name = |n: usize| format!("s{round}-{n}");
        Writer::create(store, &name(0)).await.unwrap().add(store, [say("0")]).await.unwrap();
        for n in 1..5 {
            let mut w = Writer::fork(store, &name(n - 1), &Point::End, &name(n)).await.unwrap();
            w.add(store, [say(&n.to_string())]).await.unwrap();
        }
        let (n0, n1, n2, n3) = (key(&name(0)), key(&name(1)), key(&name(2)), key(&name(3)));
        let (a, b, c, d) = tokio::join!(store.purge(&n2), store.purge(&n1), store.purge(&n0), store.purge(&n3));
        [a, b, c, d].into_iter().for_each(|done| done.unwrap());
        let last = load(store, &key(&name(4))).await;
        assert_eq!(
            (last.messages.len(), &last.head().parent),
            (5, &store.head(&key(&name(4))).await.unwrap().unwrap().parent)
        );
    }
    db.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_and_a_commit_at_once_leave_the_blob_in_use() {
    let Some(db) = Db::new("pool=6").await else { return };
    let store = &db.store;
    for round in 0..40 {
        let (gone, stays, text) = (format!("g{round}"), format!("s{round}"), format!("blob {round}"));
        add_blob(store, &mut Writer::create(store, &gone).await.unwrap(), &text).await;
        let mut w = Writer::create(store, &stays).await.unwrap();
        let gone = key(&gone);
        let (purge, ()) = tokio::join!(store.purge(&gone), add_blob(store, &mut w, &text));
        purge.unwrap();
        assert!(has(store, &text).await, "round {round}");
    }
    db.end().await;
}

#[tokio::test]
async fn a_purge_waits_for_a_commit_that_begins_to_use_its_blob() {
    let Some(db) = Db::new("pool=4&application_name=blob_race").await else { return };
    let store = &db.store;
    add_blob(store, &mut Writer::create(store, "gone").await.unwrap(), "blob").await;
    // Simulates a concurrent commit to another session whose transaction stays open.
    let commit = store.link.lease().await.unwrap();
    let sql = "BEGIN; INSERT INTO tenure_blob_use SELECT first, tenant, 'stays', blob FROM tenure_blob_use";
    commit.batch_execute(&store.link.sql(sql)).await.unwrap();
    let gone = key("gone");
    let finish = async {
        let waiting =
            "SELECT 1 FROM pg_stat_activity WHERE application_name = 'blob_race' AND wait_event_type = 'Lock'";
        while db.rows(waiting).await.is_empty() {
            tokio::task::yield_now().await;
        }
        commit.batch_execute("COMMIT").await.unwrap();
    };
    let (purge, ()) = tokio::join!(store.purge(&gone), finish);
    purge.unwrap();
    assert_eq!((store.head(&gone).await.unwrap(), has(store, "blob").await), (None, true));
    db.end().await;
}
