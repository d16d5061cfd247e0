//! Forks: they reference their parent's log, and stay complete when the parent is purged (D-001).

use super::fixture::Fixture;
use crate::store::contract::{Commit, Store};
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::testing::records::{SessionLog, assert_fails, blob, key, read_all, read_full_log, state, timestamp};
use crate::types::blob::Blob;
use crate::types::entry::{Entry, SessionCreated};
use crate::types::error::Error;
use crate::types::head::Head;
use crate::types::id::{SessionId, Tenant};
use crate::types::message::Message;
use crate::types::status::Status;

/// Stores a session with records 1 to `seq`.
async fn parent(store: &dyn Store, id: &str, seq: u64) -> SessionLog {
    let mut log = SessionLog::new(id);
    for n in 2..=seq {
        log.push_message(&format!("{id} {n}"));
    }
    log.save(store).await;
    log
}

/// Stores a fork with one message of its own.
async fn fork(store: &dyn Store, of: &SessionLog, id: &str, seq: u64) -> SessionLog {
    let mut log = of.fork(id, seq);
    log.push_message(&format!("{id} after {seq}")).save(store).await;
    log
}

/// Asserts that each session still reads as it was written.
async fn assert_complete(store: &dyn Store, logs: &[&SessionLog]) {
    for log in logs {
        assert_eq!(read_full_log(store, &log.key).await, log.full_log(), "{}", log.key);
        let head = store.head(&log.key).await.unwrap().unwrap();
        assert_eq!((head.seq, head.digest), (log.seq(), log.head().digest), "{}", log.key);
        let own = read_all(store, &log.key).await;
        assert_eq!(own.first().map(|r| r.seq), Some(head.first), "{}", log.key);
    }
}

/// A fork whose parent does not exist in the same tenant is rejected, and leaves nothing behind.
pub async fn a_fork_requires_its_parent(Fixture { store, .. }: Fixture) {
    let mut elsewhere = SessionLog::begin(key("other", "p"), SessionCreated::default(), timestamp(0));
    elsewhere.push_message("one").save(&*store).await;
    let before = state(&*store, &[], &[]).await;
    let orphan = SessionLog::new("p").push_message("one").fork("f", 2).commit();
    assert_fails(store.commit(&orphan).await, Error::NotFound { session_id: SessionId::new("p").unwrap() });
    assert_eq!(state(&*store, &[], &[]).await, before);
}

/// A fork can start after the parent's last record, but not beyond it.
pub async fn a_fork_point_is_not_beyond_the_end(Fixture { store, .. }: Fixture) {
    let stored = parent(&*store, "p", 3).await;
    let before = state(&*store, &[], &[]).await;
    let beyond = stored.clone().push_message("unsaved").fork("f", 4).commit();
    assert_fails(store.commit(&beyond).await, Error::NotFound { session_id: stored.key.session.clone() });
    assert_eq!(state(&*store, &[], &[]).await, before);
    let at_the_end = fork(&*store, &stored, "f", 3).await;
    assert_complete(&*store, &[&stored, &at_the_end]).await;
    assert_eq!(store.head(&at_the_end.key).await.unwrap(), Some(at_the_end.head()));
    assert_eq!(read_all(&*store, &at_the_end.key).await, at_the_end.records);
}

/// When a parent is purged, the fork with the latest fork point inherits the records up to there;
/// the other forks then reference that one (D-001).
pub async fn the_fork_with_the_latest_fork_point_inherits(Fixture { store, .. }: Fixture) {
    let p = parent(&*store, "p", 6).await;
    let a = fork(&*store, &p, "a", 3).await;
    let b = fork(&*store, &p, "b", 5).await;
    store.purge(&p.key).await.unwrap();
    assert_eq!(store.head(&p.key).await.unwrap(), None);
    assert_eq!(read_all(&*store, &p.key).await, []);

    assert_eq!(store.head(&b.key).await.unwrap(), Some(Head { first: 1, parent: None, ..b.head() }));
    assert_eq!(read_all(&*store, &b.key).await, b.full_log());
    let mut reparented = a.head();
    reparented.parent.as_mut().unwrap().session = b.key.session.clone();
    assert_eq!(store.head(&a.key).await.unwrap(), Some(reparented));
    assert_eq!(read_all(&*store, &a.key).await, a.records);
    assert_complete(&*store, &[&a, &b]).await;

    let of = |log: &SessionLog| SessionQuery {
        parent: Some(log.key.session.clone()),
        ..SessionQuery::new(OwnerFilter::AllTenants, 9)
    };
    assert_eq!(store.heads(&of(&p)).await.unwrap(), []);
    assert_eq!(store.heads(&of(&b)).await.unwrap(), [store.head(&a.key).await.unwrap().unwrap()]);
}

/// A fork in the middle of a chain is inherited from like any other: the fork that inherits
/// references what it referenced.
pub async fn a_fork_of_a_fork_inherits(Fixture { store, .. }: Fixture) {
    let p = parent(&*store, "p", 4).await;
    let a = fork(&*store, &p, "a", 3).await;
    let c = fork(&*store, &a, "c", 5).await;
    store.purge(&a.key).await.unwrap();
    let inheriting = Head { first: 4, parent: a.head().parent, ..c.head() };
    assert_eq!(store.head(&c.key).await.unwrap(), Some(inheriting));
    assert_eq!(read_all(&*store, &c.key).await, [&a.records[..], &c.records].concat());
    assert_complete(&*store, &[&p, &c]).await;
    store.purge(&p.key).await.unwrap();
    assert_eq!(store.head(&c.key).await.unwrap(), Some(Head { first: 1, parent: None, ..c.head() }));
    assert_eq!(read_all(&*store, &c.key).await, c.full_log());
}

/// Inherited records are passed on again, and are deleted with the last session that needs them.
pub async fn an_inheriting_fork_can_be_purged_too(Fixture { store, .. }: Fixture) {
    let p = parent(&*store, "p", 6).await;
    let a = fork(&*store, &p, "a", 3).await;
    let b = fork(&*store, &p, "b", 5).await;
    store.purge(&p.key).await.unwrap();
    store.purge(&b.key).await.unwrap();
    assert_eq!(store.head(&a.key).await.unwrap(), Some(Head { first: 1, parent: None, ..a.head() }));
    assert_eq!(read_all(&*store, &a.key).await, a.full_log());
    store.purge(&a.key).await.unwrap();
    for log in [p, a, b] {
        assert_eq!(read_all(&*store, &log.key).await, []);
    }
}

/// A fork of a fork may start at a record of the grandparent's log.
pub async fn a_fork_from_before_its_parent_began_stays_complete(Fixture { store, .. }: Fixture) {
    let p = parent(&*store, "p", 6).await;
    let a = fork(&*store, &p, "a", 5).await;
    let early = fork(&*store, &a, "early", 3).await;
    let earlier = fork(&*store, &a, "earlier", 2).await;
    assert_complete(&*store, &[&p, &a, &early, &earlier]).await;
    store.purge(&a.key).await.unwrap();
    assert_complete(&*store, &[&p, &early, &earlier]).await;
    store.purge(&p.key).await.unwrap();
    assert_complete(&*store, &[&early, &earlier]).await;
    store.purge(&early.key).await.unwrap();
    assert_complete(&*store, &[&earlier]).await;
}

/// A deleted fork that can still be restored inherits too.
pub async fn a_deleted_fork_inherits_too(Fixture { store, .. }: Fixture) {
    let p = parent(&*store, "p", 4).await;
    let mut f = fork(&*store, &p, "f", 3).await;
    f.push(Entry::Status { to: Status::Deleted, reason: None, until: None }).save(&*store).await;
    store.purge(&p.key).await.unwrap();
    assert_complete(&*store, &[&f]).await;
}

/// Stores a log with one blob per record, each derived from its text.
async fn save_with_pictures(store: &dyn Store, mut log: SessionLog, upto: u64) -> SessionLog {
    log.save(store).await;
    while log.seq() < upto {
        let text = format!("{} {}", log.key.session, log.seq() + 1);
        log.push_message(&text).save_with(store, &picture(&text)).await;
    }
    log
}

fn picture(text: &str) -> Blob {
    blob(format!("picture of {text}"))
}

/// The blobs that a session references.
fn pictures(log: &SessionLog) -> Vec<Blob> {
    let records = log.full_log();
    let texts = records
        .iter()
        .filter_map(|r| if let Entry::Message(entry) = &r.entry { Some(entry.message.text()) } else { None });
    texts.map(|text| picture(&text)).collect()
}

async fn assert_pictures(store: &dyn Store, remaining: &[&SessionLog], purged: &[&SessionLog]) {
    let expected: Vec<_> = remaining.iter().flat_map(|log| pictures(log)).collect();
    for blob in remaining.iter().chain(purged).flat_map(|log| pictures(log)) {
        let stored = store.blob(&Tenant::default(), &blob.id).await.unwrap();
        let text = String::from_utf8_lossy(&blob.bytes).into_owned();
        assert_eq!(stored.is_some(), expected.contains(&blob), "{text}");
    }
}

/// Blobs of inherited records stay; the others are deleted.
pub async fn blobs_stay_with_their_records(Fixture { store, .. }: Fixture) {
    let p = save_with_pictures(&*store, SessionLog::new("p"), 6).await;
    let a = save_with_pictures(&*store, p.fork("a", 3), 5).await;
    let b = save_with_pictures(&*store, p.fork("b", 5), 7).await;
    store.purge(&p.key).await.unwrap();
    assert_pictures(&*store, &[&a, &b], &[&p]).await;
    store.purge(&b.key).await.unwrap();
    assert_pictures(&*store, &[&a], &[&p, &b]).await;
    store.purge(&a.key).await.unwrap();
    assert_pictures(&*store, &[], &[&p, &a, &b]).await;

    // A blob used before the fork point and again after it counts from its first use.
    let mut q = SessionLog::new("q");
    let repeated = blob("shown twice");
    q.save(&*store).await;
    q.push_message("once").save_with(&*store, &repeated).await;
    let f = fork(&*store, &q, "f", 2).await;
    q.push_message("twice").save_with(&*store, &repeated).await;
    store.purge(&q.key).await.unwrap();
    assert_eq!(store.blob(&Tenant::default(), &repeated.id).await.unwrap(), Some(repeated.bytes.clone()));
    store.purge(&f.key).await.unwrap();
    assert_eq!(store.blob(&Tenant::default(), &repeated.id).await.unwrap(), None);
}

fn permutations(items: &[usize]) -> Vec<Vec<usize>> {
    if items.is_empty() {
        return vec![Vec::new()];
    }
    let starting_with = |index: usize| {
        let mut rest = items.to_vec();
        let first = rest.remove(index);
        permutations(&rest).into_iter().map(move |order| [vec![first], order].concat())
    };
    (0..items.len()).flat_map(starting_with).collect()
}

/// A parent, two forks and a fork of a fork can be purged in any order; the remaining sessions stay
/// complete.
pub async fn any_order_of_purges_keeps_the_rest_complete(Fixture { store, .. }: Fixture) {
    for (n, order) in permutations(&[0, 1, 2, 3]).into_iter().enumerate() {
        let p = save_with_pictures(&*store, SessionLog::new(&format!("p{n}")), 5).await;
        let a = save_with_pictures(&*store, p.fork(&format!("a{n}"), 3), 5).await;
        let b = save_with_pictures(&*store, p.fork(&format!("b{n}"), 4), 6).await;
        let c = save_with_pictures(&*store, a.fork(&format!("c{n}"), 5), 7).await;
        let logs = [p, a, b, c];
        let mut remaining: Vec<_> = logs.iter().collect();
        let mut purged = Vec::new();
        for index in order {
            store.purge(&logs[index].key).await.unwrap();
            remaining.retain(|log| log.key != logs[index].key);
            purged.push(&logs[index]);
            assert_complete(&*store, &remaining).await;
            assert_pictures(&*store, &remaining, &purged).await;
        }
    }
}

/// A writer that read a fork's head before its parent was purged can continue; the fork stays
/// complete.
pub async fn a_writer_with_a_stale_head_continues_after_the_purge(Fixture { store, .. }: Fixture) {
    let p = parent(&*store, "p", 6).await;
    let mut a = fork(&*store, &p, "a", 3).await;
    let mut b = fork(&*store, &p, "b", 5).await;
    store.purge(&p.key).await.unwrap();
    for log in [&mut a, &mut b] {
        let mut commit = log.push_message("and on").commit();
        if let Err(Error::Conflict { .. }) = store.commit(&commit).await {
            // A store may require the current head and report a conflict.
            commit.head = store.head(&log.key).await.unwrap().unwrap();
            commit.records.iter().for_each(|record| commit.head.apply(record));
            store.commit(&commit).await.unwrap();
        }
    }
    assert_complete(&*store, &[&a, &b]).await;
    let stale = a.head();
    let _ = store.commit(&Commit::new(Some(stale.end()), Vec::new(), stale)).await;
    assert_complete(&*store, &[&a, &b]).await;
    store.purge(&b.key).await.unwrap();
    assert_complete(&*store, &[&a]).await;
}

/// A new session under a purged parent's id is unrelated to the parent's forks.
pub async fn a_new_session_is_not_mistaken_for_the_purged_parent(Fixture { store, .. }: Fixture) {
    let p = parent(&*store, "p", 6).await;
    let a = fork(&*store, &p, "a", 3).await;
    let b = fork(&*store, &p, "b", 5).await;
    store.purge(&p.key).await.unwrap();
    let mut again = SessionLog::new("p");
    again.push(Entry::message(Message::system("another life"))).save(&*store).await;
    assert_complete(&*store, &[&a, &b, &again]).await;
    store.purge(&again.key).await.unwrap();
    assert_complete(&*store, &[&a, &b]).await;
    store.purge(&b.key).await.unwrap();
    assert_complete(&*store, &[&a]).await;
}
