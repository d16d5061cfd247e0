//! Durability: everything acknowledged is still there after the store is reopened. Stores that are
//! not persistent skip these cases.

use super::fixture::Fixture;
use super::kit::{RandomLog, Rng, assert_fails, blob, item, key, moment, session_shelf, shelf, state, whole_log};
use super::log::rich;
use crate::store::contract::Commit;
use crate::store::item::{Item, Namespace, Owner};
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::types::entry::SessionCreated;
use crate::types::error::Error;
use crate::types::id::{SessionId, Tenant, User};

/// Heads, logs, items and blobs are unchanged after a reopen.
pub async fn everything_is_there_again(fixture: Fixture) {
    let store = &*fixture.store;
    let blobs = [blob(Rng::new(3).bytes(100_000)), blob("gone")];
    let mut logs = [
        rich("rich"),
        RandomLog::new("plain"),
        RandomLog::begin(key("other", "rich"), SessionCreated::default(), moment(5)),
    ];
    for log in &mut logs {
        log.save_with(store, &blobs[0]).await;
    }
    let mut purged = RandomLog::new("purged");
    purged.save_with(store, &blobs[1]).await;
    store.purge(&purged.key).await.unwrap();
    let mut due = logs[1].head();
    due.due_at = Some(moment(77));
    store.commit(&Commit::new(Some(due.end()), Vec::new(), due)).await.unwrap();

    let shelves = [
        session_shelf(&logs[0].key, "cache"),
        session_shelf(&purged.key, "cache"),
        shelf(Owner::User(User::new("Ädä/..").unwrap()), "memory"),
        shelf(Owner::Group("g".to_owned()), "memory"),
        shelf(Owner::Tenant, "memory"),
        Namespace { tenant: Tenant::new("other").unwrap(), ..shelf(Owner::Tenant, "memory") },
    ];
    for (n, shelf) in shelves.iter().enumerate().filter(|(n, _)| *n != 1) {
        let (text, expires_at) = (Some("Äpfel und Birnen".to_owned()), Some(moment(500)));
        store.put(shelf, &Item { text, expires_at, uses: 3, ..item("a", n as i64) }, Some(9)).await.unwrap();
        store.put(shelf, &item("b", n as i64), Some(9)).await.unwrap();
        store.put(shelf, &item("c", n as i64), Some(9)).await.unwrap();
        store.remove(shelf, "c").await.unwrap();
    }
    let before = state(store, &shelves, &blobs).await;
    let Some(fixture) = fixture.reopen().await else { return };
    assert_eq!(state(&*fixture.store, &shelves, &blobs).await, before);
    let hits = fixture.store.search(&shelves[2], "äpfel", 9).await.unwrap();
    assert_eq!(hits.into_iter().map(|h| h.item).collect::<Vec<_>>(), before.items[2][..1]);
    let tagged = SessionQuery { tags: vec!["b\0c".to_owned()], ..SessionQuery::new(OwnerFilter::Everyone, 9) };
    assert_eq!(fixture.store.heads(&tagged).await.unwrap(), [logs[0].head()]);
    // Reopen again, this time without any writes in between.
    let fixture = fixture.reopen().await.expect("it was reopened before");
    assert_eq!(state(&*fixture.store, &shelves, &blobs).await, before);
}

/// Forks whose parent was purged are complete after a reopen, and can then be purged.
pub async fn heirs_are_there_again(fixture: Fixture) {
    let store = &*fixture.store;
    let blobs = [blob("inherited")];
    let mut p = RandomLog::new("p");
    p.say("one").save_with(store, &blobs[0]).await;
    p.say("two").say("three").save(store).await;
    let (mut a, mut b) = (p.fork("a", 3), p.fork("b", 4));
    a.say("four").save(store).await;
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
        assert_eq!(whole_log(store, &log.key).await, log.whole());
    }
    store.purge(&b.key).await.unwrap();
    assert_eq!(whole_log(store, &c.key).await, c.whole());
    let fixture = fixture.reopen().await.expect("it was reopened before");
    assert_eq!(whole_log(&*fixture.store, &c.key).await, c.whole());
    fixture.store.purge(&c.key).await.unwrap();
    assert_eq!(state(&*fixture.store, &[], &blobs).await.blobs, [None]);
}

/// After a reopen, the same commits are accepted and rejected as before.
pub async fn work_goes_on(fixture: Fixture) {
    let (mut log, picture) = (RandomLog::new("s"), blob("a picture"));
    log.say("one").save_with(&*fixture.store, &picture).await;
    let cache = session_shelf(&log.key, "cache");
    for (name, seconds) in [("a", 30), ("b", 10), ("c", 20)] {
        fixture.store.put(&cache, &item(name, seconds), None).await.unwrap();
    }
    let Some(fixture) = fixture.reopen().await else { return };
    let store = &*fixture.store;
    let session_id = SessionId::new("s").unwrap();
    assert_fails(store.commit(&RandomLog::new("s").commit()).await, Error::Exists { session_id: session_id.clone() });
    let stale = log.clone().say("two").commit();
    log.say("two").save(store).await;
    assert_fails(store.commit(&stale).await, Error::Conflict { session_id, expected: 2 });
    assert_eq!(store.head(&log.key).await.unwrap(), Some(log.head()));
    store.put(&cache, &item("d", 40), Some(3)).await.unwrap();
    assert_eq!(store.items(&cache, None, 9).await.unwrap(), [item("a", 30), item("c", 20), item("d", 40)]);

    let fixture = fixture.reopen().await.expect("it was reopened before");
    let store = &*fixture.store;
    assert_eq!(whole_log(store, &log.key).await, log.records);
    log.say("three").save(store).await;
    store.purge(&log.key).await.unwrap();
    assert_eq!(store.blob(&Tenant::default(), &picture.id).await.unwrap(), None);
    assert_eq!(store.items(&cache, None, 9).await.unwrap(), []);
}
