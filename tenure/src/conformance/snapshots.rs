//! Snapshots: everything at one point in time, while the store is in use. Stores without snapshots
//! have nothing to check.

use super::fixture::Fixture;
use crate::store::item::{Item, Namespace, Owner};
use crate::store::query::RecordRange;
use crate::store::snapshot::Snapshot;
use crate::testing::records::{SessionLog, blob, item, key, namespace, session_namespace, timestamp};
use crate::types::entry::SessionCreated;
use crate::types::head::Head;
use crate::types::id::Tenant;

async fn all_heads(snapshot: &dyn Snapshot) -> Vec<Head> {
    let mut heads: Vec<Head> = Vec::new();
    loop {
        let after = heads.last().map(Head::key);
        let page = snapshot.heads(after.as_ref(), 2).await.unwrap();
        if page.is_empty() {
            return heads;
        }
        assert!(page.len() <= 2, "at most as many as requested");
        heads.extend(page);
    }
}

async fn all_items(snapshot: &dyn Snapshot) -> Vec<(Namespace, Item)> {
    let mut items: Vec<(Namespace, Item)> = Vec::new();
    loop {
        let after = items.last().map(|(namespace, item)| (namespace.clone(), item.key.clone()));
        let page = snapshot.items(after.as_ref().map(|(n, k)| (n, k.as_str())), 2).await.unwrap();
        if page.is_empty() {
            return items;
        }
        items.extend(page);
    }
}

/// The pages of a snapshot contain every head and every item of every tenant exactly once, and its
/// records and blobs are those of the store.
pub async fn a_snapshot_contains_everything(Fixture { store, .. }: Fixture) {
    let Some(snapshots) = store.snapshots() else { return };
    let picture = blob("a picture");
    let mut heads = Vec::new();
    for (tenant, session) in [("a", "x"), ("a", "x.y"), ("a", "X:-"), ("b", "x"), ("default", "0")] {
        let mut log = SessionLog::begin(key(tenant, session), SessionCreated::default(), timestamp(0));
        log.push_message("hello").save_with(&*store, &picture).await;
        heads.push(log.head());
    }
    let session = key("b", "x");
    let mut want = Vec::new();
    for namespace in [
        session_namespace(&session, "cache"),
        namespace(Owner::User("ann/é".try_into().unwrap()), "memories"),
        namespace(Owner::Group("g/h".to_owned()), "memories"),
        namespace(Owner::Tenant, "keys"),
    ] {
        for name in ["a", "b", "c"] {
            let item = Item { uses: 3, expires_at: Some(timestamp(9)), ..item(name, 5) };
            store.put(&namespace, &item, None).await.unwrap();
            want.push((namespace.clone(), item));
        }
    }
    let snapshot = snapshots.snapshot().await.unwrap();
    heads.sort_by_key(Head::key);
    let mut found = all_heads(&*snapshot).await;
    found.sort_by_key(Head::key);
    assert_eq!(found, heads);
    let mut items = all_items(&*snapshot).await;
    items.sort_by(|a, b| (&a.0, &a.1.key).cmp(&(&b.0, &b.1.key)));
    want.sort_by(|a, b| (&a.0, &a.1.key).cmp(&(&b.0, &b.1.key)));
    assert_eq!(items, want);
    let range = RecordRange::after(0);
    assert_eq!(snapshot.records(&session, &range).await.unwrap(), store.records(&session, &range).await.unwrap());
    let bytes = snapshot.blob(&Tenant::new("b").unwrap(), &picture.id).await.unwrap();
    assert_eq!(bytes.as_deref(), Some(&*picture.bytes));
    assert_eq!(snapshot.blob(&Tenant::new("b").unwrap(), &blob("unknown").id).await.unwrap(), None);
}

/// What is written after a snapshot was taken is not in it: neither sessions nor records nor items,
/// changed or new.
pub async fn a_snapshot_shows_one_point_in_time(Fixture { store, .. }: Fixture) {
    let Some(snapshots) = store.snapshots() else { return };
    let mut log = SessionLog::new("s");
    log.push_message("before").save(&*store).await;
    let head = log.head();
    let keys = namespace(Owner::Tenant, "keys");
    store.put(&keys, &item("old", 1), None).await.unwrap();
    let snapshot = snapshots.snapshot().await.unwrap();
    log.push_message("after").save(&*store).await;
    SessionLog::new("t").save(&*store).await;
    store.put(&keys, &item("old", 2), None).await.unwrap();
    store.put(&keys, &item("new", 2), None).await.unwrap();
    assert_eq!(all_heads(&*snapshot).await, [head]);
    assert_eq!(snapshot.records(&log.key, &RecordRange::after(0)).await.unwrap().len(), 2);
    assert_eq!(all_items(&*snapshot).await, [(keys.clone(), item("old", 1))]);
    store.remove(&keys, "old").await.unwrap();
    assert_eq!(all_items(&*snapshot).await, [(keys, item("old", 1))]);
    drop(snapshot);
    assert_eq!(all_heads(&*snapshots.snapshot().await.unwrap()).await.len(), 2);
}

/// A purge, at the latest after the snapshot was dropped, completes; until then the snapshot still
/// contains the session.
pub async fn a_purge_does_not_change_a_snapshot(Fixture { store, .. }: Fixture) {
    let Some(snapshots) = store.snapshots() else { return };
    let picture = blob("a picture");
    let mut log = SessionLog::new("s");
    log.push_message("hello").save_with(&*store, &picture).await;
    let snapshot = snapshots.snapshot().await.unwrap();
    let purge = store.purge(&log.key);
    let mut purge = std::pin::pin!(purge);
    let early = tokio::time::timeout(std::time::Duration::from_millis(100), &mut purge).await;
    assert_eq!(snapshot.records(&log.key, &RecordRange::after(0)).await.unwrap(), log.full_log());
    let bytes = snapshot.blob(&log.key.tenant, &picture.id).await.unwrap();
    assert_eq!(bytes.as_deref(), Some(&*picture.bytes));
    drop(snapshot);
    if early.is_err() {
        purge.await.unwrap();
    }
    assert_eq!(store.head(&log.key).await.unwrap(), None);
}
