//! Blobs: content-addressed bytes, stored once per tenant for as long as a session references them.

use super::fixture::Fixture;
use crate::store::contract::{Commit, Store};
use crate::testing::records::{SessionLog, blob, key, timestamp};
use crate::testing::rng::Rng;
use crate::types::blob::Blob;
use crate::types::entry::SessionCreated;
use crate::types::id::Tenant;

async fn bytes(store: &dyn Store, tenant: &str, blob: &Blob) -> Option<Vec<u8>> {
    store.blob(&Tenant::new(tenant).unwrap(), &blob.id).await.unwrap().map(|b| b.to_vec())
}

/// A blob round-trips, whatever its content and size.
pub async fn a_blob_reads_back(Fixture { store, .. }: Fixture) {
    let blobs = [blob(Rng::new(7).bytes(1 << 20)), blob("text"), blob([0]), blob((0..=255).collect::<Vec<u8>>())];
    let commit = Commit { blobs: blobs.to_vec(), ..SessionLog::new("s").commit() };
    store.commit(&commit).await.unwrap();
    for blob in &blobs {
        assert!(bytes(&*store, "default", blob).await.as_deref() == Some(&*blob.bytes), "{} differs", blob.id);
    }
    assert_eq!(bytes(&*store, "default", &blob("unknown")).await, None);
}

/// A blob may be committed repeatedly, in one commit or in later ones.
pub async fn a_blob_may_be_committed_twice(Fixture { store, .. }: Fixture) {
    let picture = blob("a picture");
    let mut log = SessionLog::new("s");
    let blobs = vec![picture.clone(), picture.clone()];
    store.commit(&Commit { blobs, ..log.commit() }).await.unwrap();
    log.push_message("again").save_with(&*store, &picture).await;
    assert_eq!(bytes(&*store, "default", &picture).await.as_deref(), Some(&*picture.bytes));
    store.purge(&log.key).await.unwrap();
    assert_eq!(bytes(&*store, "default", &picture).await, None);
}

/// A blob is deleted with the last session that references it.
pub async fn a_blob_is_deleted_with_its_last_session(Fixture { store, .. }: Fixture) {
    let (shared, own) = (blob("shared"), blob("own"));
    let (mut a, mut b) = (SessionLog::new("a"), SessionLog::new("b"));
    let blobs = vec![shared.clone(), own.clone()];
    store.commit(&Commit { blobs, ..a.commit() }).await.unwrap();
    b.save(&*store).await;
    b.push_message("a picture").save_with(&*store, &shared).await;
    store.purge(&a.key).await.unwrap();
    assert_eq!(bytes(&*store, "default", &own).await, None);
    assert_eq!(bytes(&*store, "default", &shared).await.as_deref(), Some(&*shared.bytes));
    store.purge(&b.key).await.unwrap();
    assert_eq!(bytes(&*store, "default", &shared).await, None);
    // A deleted blob can be stored again.
    SessionLog::new("c").save_with(&*store, &shared).await;
    assert_eq!(bytes(&*store, "default", &shared).await.as_deref(), Some(&*shared.bytes));
}

/// Blobs are separated by tenant: deleting one tenant's blob does not affect the other's.
pub async fn tenants_do_not_share_blobs(Fixture { store, .. }: Fixture) {
    let picture = blob("a picture");
    let log = |tenant| SessionLog::begin(key(tenant, "s"), SessionCreated::default(), timestamp(0));
    log("a").save_with(&*store, &picture).await;
    assert_eq!(bytes(&*store, "b", &picture).await, None);
    log("b").save_with(&*store, &picture).await;
    store.purge(&key("a", "s")).await.unwrap();
    assert_eq!(bytes(&*store, "a", &picture).await, None);
    assert_eq!(bytes(&*store, "b", &picture).await.as_deref(), Some(&*picture.bytes));
}
