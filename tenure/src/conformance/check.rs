//! Consistency check: a consistent store has no findings, and data in use is never removed.

use super::fixture::Fixture;
use crate::store::contract::Store;
use crate::store::finding::Orphan;
use crate::store::item::Owner;
use crate::testing::records::{SessionLog, blob, item, key, namespace, read_full_log, session_namespace, timestamp};
use crate::testing::rng::Rng;
use crate::types::entry::SessionCreated;

/// Creates sessions of two tenants with blobs, forks and items, purges some, and lets forks
/// inherit. Returns the keys of the remaining sessions.
async fn populate(store: &dyn Store, rng: &mut Rng) -> Vec<crate::types::id::SessionKey> {
    let mut logs: Vec<SessionLog> = Vec::new();
    for n in 0..60 {
        let tenant = ["a", "b"][n % 2];
        let source = (n > 8 && rng.once_in(2)).then(|| logs[rng.below(n / 2) * 2 + n % 2].clone());
        let mut log = match source {
            Some(parent) => parent.fork(&format!("s{n}"), 1 + rng.below(parent.seq() as usize) as u64),
            None => SessionLog::begin(key(tenant, &format!("s{n}")), SessionCreated::default(), timestamp(n as i64)),
        };
        for m in 0..rng.below(4) {
            log.push_message(&format!("{n} {m}"));
        }
        if rng.once_in(2) {
            log.save_with(store, &blob(format!("picture {}", rng.below(6)))).await;
        } else {
            log.save(store).await;
        }
        if rng.once_in(3) {
            store.put(&session_namespace(&log.key, "cache"), &item("k", 1), None).await.unwrap();
        }
        logs.push(log);
    }
    store.put(&namespace(Owner::Tenant, "notes"), &item("k", 1), None).await.unwrap();
    let mut remaining = Vec::new();
    let mut purged = Vec::new();
    logs.into_iter().for_each(|l| if rng.once_in(3) { purged.push(l.key) } else { remaining.push(l.key) });
    for key in purged {
        store.purge(&key).await.unwrap();
    }
    remaining
}

/// A consistent store has no findings, neither after any amount of work nor after a reopen.
pub async fn a_consistent_store_has_no_findings(fixture: Fixture) {
    assert_eq!(fixture.store.check(&[]).await.unwrap(), [], "an empty store");
    populate(&*fixture.store, &mut Rng::new(20_260_103)).await;
    assert_eq!(fixture.store.check(&[]).await.unwrap(), []);
    if let Some(reopened) = fixture.reopen().await {
        assert_eq!(reopened.store.check(&[]).await.unwrap(), []);
    }
}

/// Data in use is not removed even if it is passed as an orphan; orphans that do not exist are not
/// an error.
pub async fn nothing_in_use_is_removed(Fixture { store, .. }: Fixture) {
    let remaining = populate(&*store, &mut Rng::new(20_260_104)).await;
    let picture = blob("a picture");
    let mut log = SessionLog::begin(key("a", "kept"), SessionCreated::default(), timestamp(99));
    log.save_with(&*store, &picture).await;
    let cache = session_namespace(&log.key, "cache");
    store.put(&cache, &item("k", 1), None).await.unwrap();
    let mut before = Vec::new();
    for key in &remaining {
        before.push(read_full_log(&*store, key).await);
    }
    let tenant = log.key.tenant.clone();
    let mut orphans = vec![Orphan::Blob(tenant.clone(), picture.id), Orphan::Blob(tenant.clone(), blob("none").id)];
    for key in remaining.iter().chain([&log.key]) {
        orphans.push(Orphan::Items(key.tenant.clone(), key.session.clone()));
        orphans.push(Orphan::BlobRefs(key.tenant.clone(), key.session.to_string()));
    }
    // Internal names that a store may use for a session.
    orphans.extend((0..99).map(|n| Orphan::BlobRefs(tenant.clone(), n.to_string())));
    assert_eq!(store.check(&orphans).await.unwrap(), []);
    assert_eq!(store.blob(&tenant, &picture.id).await.unwrap().as_deref(), Some(&*picture.bytes));
    assert_eq!(store.items(&cache, None, 9).await.unwrap().len(), 1);
    for (key, log) in remaining.iter().zip(before) {
        assert_eq!(read_full_log(&*store, key).await, log);
    }
    // If a blob reference had been removed, the purge would not delete the blob.
    store.purge(&log.key).await.unwrap();
    assert_eq!(store.blob(&tenant, &picture.id).await.unwrap(), None);
    assert_eq!(store.check(&[]).await.unwrap(), []);
}
