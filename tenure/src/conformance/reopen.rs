//! Durability: everything acknowledged is still there after the store is reopened. Stores that are
//! not persistent skip these cases.

use super::fixture::Fixture;
use super::log::rich;
use crate::store::contract::Commit;
use crate::store::item::{Item, Namespace, Owner};
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::testing::records::{
    SessionLog, assert_fails, blob, item, key, namespace, read_full_log, session_namespace, state, timestamp,
};
use crate::testing::rng::Rng;
use crate::types::entry::SessionCreated;
use crate::types::error::Error;
use crate::types::id::{SessionId, Tenant, User};

/// Heads, logs, items and blobs are unchanged after a reopen.
pub async fn everything_is_restored(fixture: Fixture) {
    let store = &*fixture.store;
    let blobs = [blob(Rng::new(3).bytes(100_000)), blob("gone")];
    let mut logs = [
        rich("rich"),
        SessionLog::new("plain"),
        SessionLog::begin(key("other", "rich"), SessionCreated::default(), timestamp(5)),
    ];
    for log in &mut logs {
        log.save_with(store, &blobs[0]).await;
    }
    let mut purged = SessionLog::new("purged");
    purged.save_with(store, &blobs[1]).await;
    store.purge(&purged.key).await.unwrap();
    let mut due = logs[1].head();
    due.due_at = Some(timestamp(77));
    store.commit(&Commit::new(Some(due.end()), Vec::new(), due)).await.unwrap();

    let namespaces = [
        session_namespace(&logs[0].key, "cache"),
        session_namespace(&purged.key, "cache"),
        namespace(Owner::User(User::new("Ädä/..").unwrap()), "memory"),
        namespace(Owner::Group("g".to_owned()), "memory"),
        namespace(Owner::Tenant, "memory"),
        Namespace { tenant: Tenant::new("other").unwrap(), ..namespace(Owner::Tenant, "memory") },
    ];
    for (n, namespace) in namespaces.iter().enumerate().filter(|(n, _)| *n != 1) {
        let expires_at = Some(timestamp(500));
        store.put(namespace, &Item { expires_at, uses: 3, ..item("a", n as i64) }, Some(9)).await.unwrap();
        store.put(namespace, &item("b", n as i64), Some(9)).await.unwrap();
        store.put(namespace, &item("c", n as i64), Some(9)).await.unwrap();
        store.remove(namespace, "c").await.unwrap();
    }
    let before = state(store, &namespaces, &blobs).await;
    let Some(fixture) = fixture.reopen().await else { return };
    assert_eq!(state(&*fixture.store, &namespaces, &blobs).await, before);
    let tagged = SessionQuery { tags: vec!["b\0c".to_owned()], ..SessionQuery::new(OwnerFilter::AllTenants, 9) };
    assert_eq!(fixture.store.heads(&tagged).await.unwrap(), [logs[0].head()]);
    // Reopen again, this time without any writes in between.
    let fixture = fixture.reopen().await.expect("it was reopened before");
    assert_eq!(state(&*fixture.store, &namespaces, &blobs).await, before);
}

/// Forks whose parent was purged are complete after a reopen, and can then be purged.
pub async fn inheriting_forks_are_restored(fixture: Fixture) {
    let store = &*fixture.store;
    let blobs = [blob("inherited")];
    let mut p = SessionLog::new("p");
    p.push_message("one").save_with(store, &blobs[0]).await;
    p.push_message("two").push_message("three").save(store).await;
    let (mut a, mut b) = (p.fork("a", 3), p.fork("b", 4));
    a.push_message("four").save(store).await;
    b.save(store).await;
    let mut c = a.fork("c", 2);
    c.save(store).await;
    store.purge(&p.key).await.unwrap();
    store.purge(&a.key).await.unwrap();
    let before = state(store, &[], &blobs).await;

    let Some(fixture) = fixture.reopen().await else { return };
    let store = &*fixture.store;
    assert_eq!(state(store, &[], &blobs).await, before);
    for log in [&b, &c] {
        assert_eq!(read_full_log(store, &log.key).await, log.full_log());
    }
    store.purge(&b.key).await.unwrap();
    assert_eq!(read_full_log(store, &c.key).await, c.full_log());
    let fixture = fixture.reopen().await.expect("it was reopened before");
    assert_eq!(read_full_log(&*fixture.store, &c.key).await, c.full_log());
    fixture.store.purge(&c.key).await.unwrap();
    assert_eq!(state(&*fixture.store, &[], &blobs).await.blobs, [None]);
}

/// After a reopen, the same commits are accepted and rejected as before.
pub async fn commits_continue_after_a_reopen(fixture: Fixture) {
    let mut log = SessionLog::new("s");
    let picture = blob("a picture");
    log.push_message("one").save_with(&*fixture.store, &picture).await;
    let cache = session_namespace(&log.key, "cache");
    for (name, seconds) in [("a", 30), ("b", 10), ("c", 20)] {
        fixture.store.put(&cache, &item(name, seconds), None).await.unwrap();
    }
    let Some(fixture) = fixture.reopen().await else { return };
    let store = &*fixture.store;
    let session_id = SessionId::new("s").unwrap();
    assert_fails(store.commit(&SessionLog::new("s").commit()).await, Error::Exists { session_id: session_id.clone() });
    let stale = log.clone().push_message("two").commit();
    log.push_message("two").save(store).await;
    assert_fails(store.commit(&stale).await, Error::Conflict { session_id, expected: 2 });
    assert_eq!(store.head(&log.key).await.unwrap(), Some(log.head()));
    store.put(&cache, &item("d", 40), Some(3)).await.unwrap();
    assert_eq!(store.items(&cache, None, 9).await.unwrap(), [item("a", 30), item("c", 20), item("d", 40)]);

    let fixture = fixture.reopen().await.expect("it was reopened before");
    let store = &*fixture.store;
    assert_eq!(read_full_log(store, &log.key).await, log.records);
    log.push_message("three").save(store).await;
    store.purge(&log.key).await.unwrap();
    assert_eq!(store.blob(&Tenant::default(), &picture.id).await.unwrap(), None);
    assert_eq!(store.items(&cache, None, 9).await.unwrap(), []);
}
