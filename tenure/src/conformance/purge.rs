//! Purge: the session is destroyed completely, and nothing else is.

use super::fixture::Fixture;
use crate::store::contract::{Commit, Store};
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::testing::records::{SessionLog, blob, item, key, read_all, session_namespace, state, timestamp};
use crate::types::entry::SessionCreated;
use crate::types::id::Tenant;

/// Stores a session with records, an item and a blob.
async fn save_full_session(store: &dyn Store, log: &mut SessionLog) {
    let items = vec![("memory".to_owned(), item("k", 1))];
    let blobs = vec![blob("a picture")];
    store.commit(&Commit { items, blobs, ..log.push_message("one").commit() }).await.unwrap();
    log.push_message("two").save(store).await;
}

/// A purge deletes the head, records, items and blobs of a session.
pub async fn everything_of_a_session_is_purged(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("s");
    save_full_session(&*store, &mut log).await;
    store.purge(&log.key).await.unwrap();
    assert_eq!(store.head(&log.key).await.unwrap(), None);
    assert_eq!(read_all(&*store, &log.key).await, []);
    assert_eq!(store.heads(&SessionQuery::new(OwnerFilter::AllTenants, 9)).await.unwrap(), []);
    let memory = session_namespace(&log.key, "memory");
    assert_eq!(store.items(&memory, None, 9).await.unwrap(), []);
    assert_eq!(store.get(&memory, "k", None).await.unwrap(), None);
    assert_eq!(store.blob(&Tenant::default(), &blob("a picture").id).await.unwrap(), None);
    assert_eq!(store.put(&memory, &item("k", 1), None).await.unwrap_err().code(), "not_found");
    assert_eq!(store.commit(&log.push_message("three").commit()).await.unwrap_err().code(), "not_found");
}

/// A purge is idempotent: purging a missing session succeeds and changes nothing.
pub async fn a_purge_can_be_repeated(Fixture { store, .. }: Fixture) {
    let mut other = SessionLog::new("other");
    save_full_session(&*store, &mut other).await;
    SessionLog::new("s").save(&*store).await;
    let namespaces = [session_namespace(&other.key, "memory")];
    for _ in 0..3 {
        store.purge(&key("default", "s")).await.unwrap();
        store.purge(&key("unknown", "other")).await.unwrap();
    }
    let now = state(&*store, &namespaces, &[blob("a picture")]).await;
    assert_eq!((now.heads, now.logs), (vec![other.head()], vec![other.records.clone()]));
    assert_eq!((now.items[0].len(), now.blobs), (1, vec![Some(blob("a picture").bytes)]));
}

/// Other sessions are unaffected, including one with the same id in a different tenant.
pub async fn other_sessions_stay(Fixture { store, .. }: Fixture) {
    let mut logs =
        ["a", "default"].map(|tenant| SessionLog::begin(key(tenant, "s"), SessionCreated::default(), timestamp(0)));
    let mut neighbour = SessionLog::new("s2");
    for log in logs.iter_mut().chain([&mut neighbour]) {
        save_full_session(&*store, log).await;
    }
    let namespaces = [session_namespace(&logs[1].key, "memory"), session_namespace(&neighbour.key, "memory")];
    let blobs = [blob("a picture")];
    let mut want = state(&*store, &namespaces, &blobs).await;
    want.heads.remove(0);
    want.logs.remove(0);
    store.purge(&logs[0].key).await.unwrap();
    assert_eq!(state(&*store, &namespaces, &blobs).await, want);
}

/// A purged id can be reused, without any data of its former session.
pub async fn an_id_can_be_used_again(Fixture { store, .. }: Fixture) {
    save_full_session(&*store, &mut SessionLog::new("s")).await;
    store.purge(&key("default", "s")).await.unwrap();
    let mut log = SessionLog::new("s");
    log.push_message("new").save(&*store).await;
    assert_eq!(store.head(&log.key).await.unwrap(), Some(log.head()));
    assert_eq!(read_all(&*store, &log.key).await, log.records);
    assert_eq!(store.items(&session_namespace(&log.key, "memory"), None, 9).await.unwrap(), []);
}

/// A conditional purge is rejected once the session has another record, or a new session uses its
/// id.
pub async fn a_conditional_purge_checks_its_condition(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("s");
    save_full_session(&*store, &mut log).await;
    let created_at = log.head().info.created_at;
    let seq = log.seq();
    let later = created_at + jiff::SignedDuration::from_secs(1);
    let namespaces = [session_namespace(&log.key, "memory")];
    let before = state(&*store, &namespaces, &[blob("a picture")]).await;
    for (created_at, seq) in [(created_at, seq - 1), (created_at, seq + 1), (later, seq)] {
        let error = store.purge_at(&log.key, created_at, seq).await.unwrap_err();
        assert_eq!(error.code(), "conflict");
        assert_eq!(state(&*store, &namespaces, &[blob("a picture")]).await, before);
    }
    store.purge_at(&log.key, created_at, seq).await.unwrap();
    assert_eq!(store.head(&log.key).await.unwrap(), None);
    assert_eq!(read_all(&*store, &log.key).await, []);
    store.purge_at(&log.key, created_at, seq).await.unwrap();
}
