//! Purge: the session is destroyed completely, and nothing else is.

use super::fixture::Fixture;
use super::kit::{RandomLog, blob, item, key, moment, read_all, session_shelf, state};
use crate::store::contract::{Commit, Store};
use crate::store::item::Item;
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::types::entry::SessionCreated;
use crate::types::id::Tenant;

/// Stores a session with records, an item and a blob.
async fn full(store: &dyn Store, log: &mut RandomLog) {
    let remembered = Item { text: Some("remembered".to_owned()), ..item("k", 1) };
    let (items, blobs) = (vec![("memory".to_owned(), remembered)], vec![blob("a picture")]);
    store.commit(&Commit { items, blobs, ..log.say("one").commit() }).await.unwrap();
    log.say("two").save(store).await;
}

/// A purge deletes the head, records, items and blobs of a session.
pub async fn everything_of_a_session_goes(Fixture { store, .. }: Fixture) {
    let mut log = RandomLog::new("s");
    full(&*store, &mut log).await;
    store.purge(&log.key).await.unwrap();
    assert_eq!(store.head(&log.key).await.unwrap(), None);
    assert_eq!(read_all(&*store, &log.key).await, []);
    assert_eq!(store.heads(&SessionQuery::new(OwnerFilter::Everyone, 9)).await.unwrap(), []);
    let memory = session_shelf(&log.key, "memory");
    assert_eq!(store.items(&memory, None, 9).await.unwrap(), []);
    assert_eq!(store.get(&memory, "k", None).await.unwrap(), None);
    assert_eq!(store.search(&memory, "remembered", 9).await.unwrap(), []);
    assert_eq!(store.blob(&Tenant::default(), &blob("a picture").id).await.unwrap(), None);
    assert_eq!(store.put(&memory, &item("k", 1), None).await.unwrap_err().code(), "not_found");
    assert_eq!(store.commit(&log.say("three").commit()).await.unwrap_err().code(), "not_found");
}

/// A purge is idempotent: purging a missing session succeeds and changes nothing.
pub async fn a_purge_can_be_repeated(Fixture { store, .. }: Fixture) {
    let mut other = RandomLog::new("other");
    full(&*store, &mut other).await;
    RandomLog::new("s").save(&*store).await;
    let shelves = [session_shelf(&other.key, "memory")];
    for _ in 0..3 {
        store.purge(&key("default", "s")).await.unwrap();
        store.purge(&key("nobody", "other")).await.unwrap();
    }
    let now = state(&*store, &shelves, &[blob("a picture")]).await;
    assert_eq!((now.heads, now.logs), (vec![other.head()], vec![other.records.clone()]));
    assert_eq!((now.items[0].len(), now.blobs), (1, vec![Some(blob("a picture").bytes)]));
}

/// Other sessions are unaffected, including one with the same id in a different tenant.
pub async fn other_sessions_stay(Fixture { store, .. }: Fixture) {
    let mut logs =
        ["a", "default"].map(|tenant| RandomLog::begin(key(tenant, "s"), SessionCreated::default(), moment(0)));
    let mut neighbour = RandomLog::new("s2");
    for log in logs.iter_mut().chain([&mut neighbour]) {
        full(&*store, log).await;
    }
    let shelves = [session_shelf(&logs[1].key, "memory"), session_shelf(&neighbour.key, "memory")];
    let blobs = [blob("a picture")];
    let mut want = state(&*store, &shelves, &blobs).await;
    want.heads.remove(0);
    want.logs.remove(0);
    store.purge(&logs[0].key).await.unwrap();
    assert_eq!(state(&*store, &shelves, &blobs).await, want);
}

/// A purged id can be reused, without any data of its former session.
pub async fn an_id_can_be_used_again(Fixture { store, .. }: Fixture) {
    full(&*store, &mut RandomLog::new("s")).await;
    store.purge(&key("default", "s")).await.unwrap();
    let mut log = RandomLog::new("s");
    log.say("new").save(&*store).await;
    assert_eq!(store.head(&log.key).await.unwrap(), Some(log.head()));
    assert_eq!(read_all(&*store, &log.key).await, log.records);
    assert_eq!(store.items(&session_shelf(&log.key, "memory"), None, 9).await.unwrap(), []);
}

/// A conditional purge is rejected once the session has another record, or a new session uses its
/// id.
pub async fn a_purge_may_expect_a_state(Fixture { store, .. }: Fixture) {
    let mut log = RandomLog::new("s");
    full(&*store, &mut log).await;
    let (created_at, seq) = (log.head().info.created_at, log.seq());
    let later = created_at + jiff::SignedDuration::from_secs(1);
    let shelves = [session_shelf(&log.key, "memory")];
    let before = state(&*store, &shelves, &[blob("a picture")]).await;
    for (created_at, seq) in [(created_at, seq - 1), (created_at, seq + 1), (later, seq)] {
        let error = store.purge_at(&log.key, created_at, seq).await.unwrap_err();
        assert_eq!(error.code(), "conflict");
        assert_eq!(state(&*store, &shelves, &[blob("a picture")]).await, before);
    }
    store.purge_at(&log.key, created_at, seq).await.unwrap();
    assert_eq!(store.head(&log.key).await.unwrap(), None);
    assert_eq!(read_all(&*store, &log.key).await, []);
    store.purge_at(&log.key, created_at, seq).await.unwrap();
}
