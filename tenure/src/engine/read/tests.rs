//! Tests of the freshness of reads: which readers may share a head check or a commit.

use super::*;
use crate::engine::draft::PendingCommit;
use crate::engine::options::Options;
use crate::session::lifecycle::NewSession;
use crate::tenure::Tenure;
use std::pin::pin;
use std::task::Poll;

fn who() -> Principal {
    Principal::new("t", "ada").unwrap()
}

/// Appends a message without this handle's cache, as another process does.
async fn say_elsewhere(tenure: &Tenure, id: &SessionId) {
    let other = Tenure::on(tenure.store().clone(), Options::default());
    other.append(&who(), id, vec![Message::user("hi")]).await.unwrap();
}

/// Readers that waited during a head check share its result; readers that arrive later check again.
#[tokio::test]
async fn a_look_serves_all_who_came_before_it() {
    let tenure = Tenure::open("memory:").await.unwrap();
    let id = tenure.create(&who(), NewSession::default()).await.unwrap().info.session_id.clone();
    let length = |state: &CacheState| Ok(state.head().map_or(0, |h| h.mark.messages));
    assert_eq!(tenure.engine.read(&who(), &id, Depth::Head, length).await.unwrap(), 0);

    let (ada, hot) = (who(), tenure.engine.hot(&who().key(&id)));
    let mut held = hot.known.lock().await;
    let mut waits = pin!(tenure.engine.read(&ada, &id, Depth::Head, length));
    assert!(std::future::poll_fn(|context| Poll::Ready(waits.as_mut().poll(context).is_pending())).await);
    tenure.engine.catch_up(&who().key(&id), &mut held).await.unwrap();
    say_elsewhere(&tenure, &id).await;
    drop(held);
    assert_eq!(waits.await.unwrap(), 0, "what was found when it had come already");
    assert_eq!(tenure.engine.read(&who(), &id, Depth::Head, length).await.unwrap(), 1);

    // A head check that began before the reader arrived does not count.
    let mut held = hot.known.lock().await;
    tenure.engine.catch_up(&who().key(&id), &mut held).await.unwrap();
    let mut waits = pin!(tenure.engine.read(&ada, &id, Depth::Head, length));
    assert!(std::future::poll_fn(|context| Poll::Ready(waits.as_mut().poll(context).is_pending())).await);
    say_elsewhere(&tenure, &id).await;
    drop(held);
    assert_eq!(waits.await.unwrap(), 2);
}

/// A commit counts as a head check: its base was current.
#[tokio::test]
async fn a_commit_serves_all_who_came_before_it() {
    let tenure = Tenure::open("memory:").await.unwrap();
    let id = tenure.create(&who(), NewSession::default()).await.unwrap().info.session_id.clone();
    let hot = tenure.engine.hot(&who().key(&id));
    let mut held = hot.known.lock().await;
    tenure.engine.catch_up(&who().key(&id), &mut held).await.unwrap();
    let before = held.as_of;
    let came = moment();
    let entry = Entry::message(Message::user("hi"));
    tenure.engine.commit(&mut held, PendingCommit::new(vec![entry], ()), tenure.now()).await.unwrap();
    assert!(before < came && came < held.as_of);
}
