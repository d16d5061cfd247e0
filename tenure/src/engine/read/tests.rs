//! Tests of the freshness of reads: which readers may share a head check or a commit.

use super::*;
use crate::engine::options::Options;
use crate::engine::pending_commit::PendingCommit;
use crate::session::lifecycle::NewSession;
use crate::tenure::Tenure;
use std::pin::pin;
use std::task::Poll;

fn principal() -> Principal {
    Principal::new("t", "ada").unwrap()
}

/// Appends a message without this handle's cache, as another process does.
async fn append_in_other_process(tenure: &Tenure, id: &SessionId) {
    let other = Tenure::with_store(tenure.store().clone(), Options::default());
    other.append(&principal(), id, vec![Message::user("hi")]).await.unwrap();
}

/// Readers that waited during a head check share its result; readers that arrive later check again.
#[tokio::test]
async fn a_head_check_serves_all_readers_that_arrived_before_it() {
    let tenure = Tenure::open("memory:").await.unwrap();
    let id = tenure.create(&principal(), NewSession::default()).await.unwrap().head().info.session_id.clone();
    let length = |state: &CacheState| Ok(state.head().map_or(0, |h| h.digest.messages));
    assert_eq!(tenure.engine.read(&principal(), &id, Depth::Head, length).await.unwrap(), 0);

    let ada = principal();
    let cache_entry = tenure.engine.cache_entry(&principal().key(&id));
    let mut cached = cache_entry.cached.lock().await;
    let mut waiting = pin!(tenure.engine.read(&ada, &id, Depth::Head, length));
    assert!(std::future::poll_fn(|context| Poll::Ready(waiting.as_mut().poll(context).is_pending())).await);
    tenure.engine.refresh(&principal().key(&id), &mut cached).await.unwrap();
    append_in_other_process(&tenure, &id).await;
    drop(cached);
    assert_eq!(waiting.await.unwrap(), 0, "a head check that started after the reader arrived is shared");
    assert_eq!(tenure.engine.read(&principal(), &id, Depth::Head, length).await.unwrap(), 1);

    // A head check that began before the reader arrived does not count.
    let mut cached = cache_entry.cached.lock().await;
    tenure.engine.refresh(&principal().key(&id), &mut cached).await.unwrap();
    let mut waiting = pin!(tenure.engine.read(&ada, &id, Depth::Head, length));
    assert!(std::future::poll_fn(|context| Poll::Ready(waiting.as_mut().poll(context).is_pending())).await);
    append_in_other_process(&tenure, &id).await;
    drop(cached);
    assert_eq!(waiting.await.unwrap(), 2);
}

/// A commit counts as a head check: its base was current.
#[tokio::test]
async fn a_commit_serves_all_readers_that_arrived_before_it() {
    let tenure = Tenure::open("memory:").await.unwrap();
    let id = tenure.create(&principal(), NewSession::default()).await.unwrap().head().info.session_id.clone();
    let cache_entry = tenure.engine.cache_entry(&principal().key(&id));
    let mut cached = cache_entry.cached.lock().await;
    tenure.engine.refresh(&principal().key(&id), &mut cached).await.unwrap();
    let before = cached.as_of;
    let arrived = next_generation();
    let entry = Entry::message(Message::user("hi"));
    tenure.engine.commit(&mut cached, PendingCommit::new(vec![entry], ()), tenure.now()).await.unwrap();
    assert!(before < arrived && arrived < cached.as_of);
}
