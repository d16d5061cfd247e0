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
    let mut commit = w.next_commit([user_message(text)]);
    commit.blobs = vec![blob(text), blob(text)];
    w.commit(store, commit).await.unwrap();
}

async fn has_blob(store: &PostgresStore, text: &str) -> bool {
    store.blob(&tenant(), &blob(text).id).await.unwrap().is_some()
}

#[tokio::test]
async fn the_fork_with_the_latest_fork_point_inherits() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    let mut root = Writer::create(store, "root").await.unwrap();
    root.append(store, [user_message("1"), user_message("2")]).await.unwrap();
    let mut a = Writer::fork(store, "root", &Point::Position(2), "a").await.unwrap();
    a.append(store, [user_message("a1"), user_message("a2"), user_message("a3")]).await.unwrap();
    let early = Writer::fork(store, "a", &Point::Position(1), "early").await.unwrap();
    let first = Writer::fork(store, "a", &Point::Position(3), "first").await.unwrap();
    let mut last = Writer::fork(store, "a", &Point::Position(4), "last").await.unwrap();
    assert_eq!((a.head.first, early.head.first, first.head.first, last.head.first), (4, 3, 6, 7));
    let texts = |s: Session| s.messages.iter().map(|m| m.message.text()).collect::<Vec<_>>().join(" ");

    store.purge(&key("a")).await.unwrap();
    store.purge(&key("a")).await.unwrap();
    assert_eq!(store.head(&key("a")).await.unwrap(), None);
    assert_eq!(read_all(store, &key("a")).await, []);
    let inheriting = store.head(&key("last")).await.unwrap().unwrap();
    assert_eq!(
        (inheriting.first, inheriting.seq, &inheriting.parent),
        (4, 7, &a.head.parent),
        "it has the lineage of the purged session"
    );
    for (name, seq) in [("early", 2), ("first", 5)] {
        let parent = store.head(&key(name)).await.unwrap().unwrap().parent.unwrap();
        assert_eq!((parent.session.as_str(), parent.seq), ("last", seq));
    }

    // A writer with a stale head does not restore the old lineage.
    last.append(store, [user_message("l1")]).await.unwrap();
    let inheriting = store.head(&key("last")).await.unwrap().unwrap();
    assert_eq!((inheriting.first, inheriting.seq, &inheriting.parent), (4, 8, &a.head.parent));
    for (name, want) in [("last", "1 2 a1 a2 l1"), ("first", "1 2 a1"), ("early", "1"), ("root", "1 2")] {
        assert_eq!(texts(load(store, &key(name)).await), want, "{name}");
    }

    // The fork point of `early` lies before the inheriting fork's own first record: it is
    // re-parented to an ancestor.
    store.purge(&key("first")).await.unwrap();
    store.purge(&key("last")).await.unwrap();
    assert_eq!(store.head(&key("early")).await.unwrap().unwrap().parent.unwrap().session.as_str(), "root");
    assert_eq!(texts(load(store, &key("early")).await), "1");
    store.purge(&key("root")).await.unwrap();
    let inheriting = store.head(&key("early")).await.unwrap().unwrap();
    assert_eq!(
        (inheriting.first, &inheriting.parent, texts(load(store, &key("early")).await)),
        (1, &None, "1".to_owned())
    );
    let remaining: i64 = db.rows("SELECT count(*) FROM tenure_record").await[0].get(0);
    assert_eq!(remaining, 3, "no other records remain");
}

#[tokio::test]
async fn a_fork_requires_its_parent() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    Writer::create(store, "root").await.unwrap();
    for (session, seq) in [("missing", 1), ("root", 2)] {
        let parent = Parent { session: key(session).session, seq, digest: Default::default() };
        let created = SessionCreated { parent: Some(parent), ..SessionCreated::default() };
        let error = Writer::begin(store, "fork", created).await.unwrap_err();
        assert!(matches!(&error, Error::NotFound { session_id } if session_id.as_str() == session), "{error:?}");
    }
    assert_eq!(store.head(&key("fork")).await.unwrap(), None);
}

#[tokio::test]
async fn blobs_are_kept_as_long_as_a_session_references_them() {
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
    assert_eq!(
        (has_blob(store, "early").await, has_blob(store, "late").await, has_blob(store, "shared").await),
        (true, false, true)
    );
    store.purge(&key("fork")).await.unwrap();
    store.purge(&key("other")).await.unwrap();
    assert_eq!((has_blob(store, "early").await, has_blob(store, "shared").await), (false, false));

    add_blob(store, &mut Writer::create(store, "bad").await.unwrap(), "x").await;
    db.rows("UPDATE tenure_blob SET bytes = 'y'").await;
    assert_eq!(store.blob(&tenant(), &blob("x").id).await.unwrap_err().code(), "corrupt");
}

#[tokio::test]
async fn a_purge_removes_the_items() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    Writer::create(store, "a").await.unwrap();
    let item = Item {
        key: "k".to_owned(),
        value: "1".to_owned(),
        created_at: at(0),
        used_at: at(0),
        uses: 0,
        expires_at: None,
    };
    let namespace = Namespace { tenant: tenant(), owner: Owner::Session(key("a").session), name: "cache".to_owned() };
    store.put(&namespace, &item, None).await.unwrap();
    store.purge(&key("a")).await.unwrap();
    assert_eq!(store.get(&namespace, "k", None).await.unwrap(), None);
    assert_eq!(store.put(&namespace, &item, None).await.unwrap_err().code(), "not_found");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_concurrent_with_a_fork_leaves_a_complete_fork_or_none() {
    let Some(db) = Db::new("pool=6").await else { return };
    let store = Arc::new(db.store);
    let mut forked = 0;
    for round in 0..40 {
        let name = format!("p{round}");
        let child = format!("c{round}");
        let fork_name = format!("f{round}");
        let mut w = Writer::create(&store, &name).await.unwrap();
        w.append(&store, [user_message("1"), user_message("2")]).await.unwrap();
        let mut c = Writer::fork(&store, &name, &Point::Position(1), &child).await.unwrap();
        let position = load(&store, &key(&name)).await.locate(&Point::End).unwrap();
        let parent = Parent { session: key(&name).session, seq: position.seq, digest: position.digest };
        let created = SessionCreated { parent: Some(parent), ..SessionCreated::default() };
        let (purge, fork, commit) = tokio::join!(
            async { store.purge(&key(&name)).await },
            async { Writer::begin(&store, &fork_name, created).await },
            async { c.append(&store, [user_message("c")]).await },
        );
        purge.unwrap();
        commit.unwrap();
        assert_eq!(load(&store, &key(&child)).await.messages.len(), 2);
        match fork {
            Ok(_) => {
                forked += 1;
                assert_eq!(load(&store, &key(&fork_name)).await.messages.len(), 2);
            }
            Err(e) => assert_eq!(e.code(), "not_found", "{e}"),
        }
    }
    eprintln!("{forked} of 40 forks came first");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn related_sessions_can_be_purged_concurrently() {
    let Some(db) = Db::new("pool=6").await else { return };
    let store = &db.store;
    for round in 0..20 {
        let name = |n: usize| format!("s{round}-{n}");
        Writer::create(store, &name(0)).await.unwrap().append(store, [user_message("0")]).await.unwrap();
        for n in 1..5 {
            let mut w = Writer::fork(store, &name(n - 1), &Point::End, &name(n)).await.unwrap();
            w.append(store, [user_message(&n.to_string())]).await.unwrap();
        }
        let n0 = key(&name(0));
        let n1 = key(&name(1));
        let n2 = key(&name(2));
        let n3 = key(&name(3));
        let (a, b, c, d) = tokio::join!(store.purge(&n2), store.purge(&n1), store.purge(&n0), store.purge(&n3));
        [a, b, c, d].into_iter().for_each(|outcome| outcome.unwrap());
        let last = load(store, &key(&name(4))).await;
        assert_eq!(
            (last.messages.len(), &last.head().parent),
            (5, &store.head(&key(&name(4))).await.unwrap().unwrap().parent)
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_concurrent_with_a_commit_keeps_the_blob_in_use() {
    let Some(db) = Db::new("pool=6").await else { return };
    let store = &db.store;
    for round in 0..40 {
        let purged = format!("g{round}");
        let remaining_session = format!("s{round}");
        let text = format!("blob {round}");
        add_blob(store, &mut Writer::create(store, &purged).await.unwrap(), &text).await;
        let mut w = Writer::create(store, &remaining_session).await.unwrap();
        let purged = key(&purged);
        let (purge, ()) = tokio::join!(store.purge(&purged), add_blob(store, &mut w, &text));
        purge.unwrap();
        assert!(has_blob(store, &text).await, "round {round}");
    }
}

#[tokio::test]
async fn a_purge_waits_for_a_commit_that_begins_to_use_its_blob() {
    let Some(db) = Db::new("pool=4&application_name=blob_race").await else { return };
    let store = &db.store;
    add_blob(store, &mut Writer::create(store, "gone").await.unwrap(), "blob").await;
    // Simulates a concurrent commit to another session whose transaction stays open.
    let commit_connection = store.connection.acquire().await.unwrap();
    let sql = "BEGIN; INSERT INTO tenure_blob_ref SELECT first_seq, tenant, 'stays', blob_id FROM tenure_blob_ref";
    commit_connection.batch_execute(&store.connection.qualify_tables(sql)).await.unwrap();
    let purged = key("gone");
    let finish_commit = async {
        let lock_wait_query =
            "SELECT 1 FROM pg_stat_activity WHERE application_name = 'blob_race' AND wait_event_type = 'Lock'";
        while db.rows(lock_wait_query).await.is_empty() {
            tokio::task::yield_now().await;
        }
        commit_connection.batch_execute("COMMIT").await.unwrap();
    };
    let (purge, ()) = tokio::join!(store.purge(&purged), finish_commit);
    purge.unwrap();
    assert_eq!((store.head(&purged).await.unwrap(), has_blob(store, "blob").await), (None, true));
}
