//! Concurrent tasks: every operation is atomic and happens once, and none deadlocks.

use super::fixture::Fixture;
use crate::store::contract::{Commit, Store};
use crate::store::item::{Item, Namespace, Owner};
use crate::store::query::RecordRange;
use crate::testing::records::{
    SessionLog, append_message, assert_fails, blob, item, key, namespace, read, read_all, read_full_log,
    session_namespace, timestamp,
};
use crate::testing::rng::Rng;
use crate::types::entry::Entry;
use crate::types::error::{Error, Result};
use crate::types::id::{SessionKey, Tenant, User};
use std::{collections::BTreeSet, future::Future, pin::Pin, sync::Arc};
use tokio::task::JoinSet;

const TASKS: usize = 16;

/// A session that a task tried to create, and the result. `None` for other tasks.
type WriterResult = Option<(SessionLog, Result<()>)>;

type WriterTask<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Runs tasks concurrently and returns their results in no particular order.
async fn run_concurrently<T: Send + 'static>(
    tasks: impl IntoIterator<Item = impl Future<Output = T> + Send + 'static>,
) -> Vec<T> {
    tasks.into_iter().collect::<JoinSet<T>>().join_all().await
}

fn text(entry: &Entry) -> Option<String> {
    if let Entry::Message(entry) = entry { Some(entry.message.text()) } else { None }
}

/// Tasks that write different sessions do not affect each other.
pub async fn sessions_are_written_concurrently(Fixture { store, .. }: Fixture) {
    let write = |n: usize| {
        let store = store.clone();
        async move {
            let mut log = SessionLog::new(&format!("s{n}"));
            log.save(&*store).await;
            for m in 0..20 {
                log.push_message(&format!("{n}.{m}")).save(&*store).await;
            }
            log
        }
    };
    for log in run_concurrently((0..TASKS).map(write)).await {
        assert_eq!(store.head(&log.key).await.unwrap(), Some(log.head()));
        assert_eq!(read_all(&*store, &log.key).await, log.records);
    }
}

/// Tasks that append to the same session all succeed: no record is lost, duplicated or overwritten.
pub async fn no_append_is_lost_or_duplicated(Fixture { store, .. }: Fixture) {
    const EACH: usize = 6;
    let mut log = SessionLog::new("s");
    log.save(&*store).await;
    let write = |n: usize| {
        let (store, key) = (store.clone(), log.key.clone());
        async move {
            let mut records = Vec::new();
            for m in 0..EACH {
                records.push(append_message(&*store, &key, &format!("{n}.{m}")).await.unwrap());
            }
            records
        }
    };
    log.records.extend(run_concurrently((0..TASKS).map(write)).await.into_iter().flatten());
    log.records.sort_by_key(|r| r.seq);
    let seqs: Vec<_> = log.records.iter().map(|r| r.seq).collect();
    assert_eq!(seqs, (1..=1 + (TASKS * EACH) as u64).collect::<Vec<_>>());
    assert_eq!(read_all(&*store, &log.key).await, log.records);
    assert_eq!(store.head(&log.key).await.unwrap(), Some(log.head()));
    let texts: BTreeSet<_> = log.records.iter().filter_map(|r| text(&r.entry)).collect();
    assert_eq!(texts.len(), TASKS * EACH);
}

/// Of concurrent creators of the same session, exactly one succeeds and the others get an error.
pub async fn one_creator_wins(Fixture { store, .. }: Fixture) {
    for round in 0..10 {
        let id = format!("s{round}");
        let attempts =
            (0..TASKS).map(|n| create(store.clone(), SessionLog::new(&id).push_message(&n.to_string()).clone()));
        let attempts = run_concurrently(attempts).await.into_iter().flatten();
        let (succeeded, failed): (Vec<_>, Vec<_>) = attempts.partition(|(_, result)| result.is_ok());
        assert_eq!(succeeded.len(), 1);
        let log = &succeeded[0].0;
        assert_eq!(read_all(&*store, &log.key).await, log.records);
        for (_, result) in failed {
            assert_fails(result, Error::Exists { session_id: log.key.session.clone() });
        }
    }
}

/// A concurrent reader sees only complete, acknowledged commits.
pub async fn a_reader_sees_complete_commits(Fixture { store, .. }: Fixture) {
    const COMMITS: u64 = 40;
    let mut log = SessionLog::new("s");
    log.save(&*store).await;
    let key = log.key.clone();
    let counter = session_namespace(&key, "counter");
    let read = |_| -> WriterTask<()> {
        let (store, key, counter) = (store.clone(), key.clone(), counter.clone());
        Box::pin(async move {
            loop {
                let head = store.head(&key).await.unwrap().unwrap();
                assert_eq!(head.seq % 5, 1, "the head is visible in the middle of a commit");
                let item = store.get(&counter, "commits", None).await.unwrap();
                let count = item.map_or(0, |i| i.value.parse::<u64>().unwrap());
                assert!(count * 5 + 1 >= head.seq, "the head is visible, but the item of its commit is not");
                let upto = read(&*store, &key, &RecordRange { upto: head.seq, ..RecordRange::after(0) }).await;
                assert_eq!(upto.len() as u64, head.seq, "the head is visible, but its records are not");
                let all = read_all(&*store, &key).await;
                assert_eq!(all.len() % 5, 1, "the log ends in the middle of a commit");
                if head.seq == COMMITS * 5 + 1 {
                    return;
                }
                tokio::task::yield_now().await;
            }
        })
    };
    let writer = store.clone();
    let write: WriterTask<()> = Box::pin(async move {
        for n in 1..=COMMITS {
            for m in 0..5 {
                log.push_message(&format!("{n}.{m}"));
            }
            let items = vec![("counter".to_owned(), Item { value: n.to_string(), ..item("commits", 1) })];
            writer.commit(&Commit { items, ..log.commit() }).await.unwrap();
            tokio::task::yield_now().await;
        }
    });
    run_concurrently((0..3).map(read).chain([write])).await;
}

/// Creates a session and returns the result.
async fn create(store: Arc<dyn Store>, mut log: SessionLog) -> WriterResult {
    let result = store.commit(&log.commit()).await;
    Some((log, result))
}

/// Purges a session, which must succeed.
async fn purge(store: Arc<dyn Store>, key: SessionKey) -> WriterResult {
    store.purge(&key).await.unwrap();
    None
}

/// Asserts that a created fork is complete, and that a rejected one does not exist.
async fn assert_complete_or_refused(store: &dyn Store, fork: &SessionLog, parent: &SessionKey, result: Result<()>) {
    match result {
        Ok(()) => assert_eq!(read_full_log(store, &fork.key).await, fork.full_log()),
        refused => {
            assert_fails(refused, Error::NotFound { session_id: parent.session.clone() });
            assert_eq!(store.head(&fork.key).await.unwrap(), None);
            assert_eq!(read_all(store, &fork.key).await, []);
        }
    }
}

/// A fork created concurrently with the purge of its parent is either complete or rejected.
pub async fn a_fork_and_a_purge_may_be_concurrent(Fixture { store, .. }: Fixture) {
    for round in 0..40 {
        let mut parent = SessionLog::new(&format!("p{round}"));
        parent.push_message("one").push_message("two").save(&*store).await;
        let fork = parent.fork(&format!("f{round}"), 2);
        let tasks: [WriterTask<WriterResult>; 2] =
            [Box::pin(create(store.clone(), fork)), Box::pin(purge(store.clone(), parent.key.clone()))];
        for (fork, result) in run_concurrently(tasks).await.into_iter().flatten() {
            assert_complete_or_refused(&*store, &fork, &parent.key, result).await;
        }
        assert_eq!(store.head(&parent.key).await.unwrap(), None);
    }
}

/// Concurrent forks, a purge of their parent, and a writer on one of the forks: the remaining
/// sessions are complete.
pub async fn forks_of_one_parent_may_be_concurrent_with_its_purge(Fixture { store, .. }: Fixture) {
    for round in 0..8 {
        let mut parent = SessionLog::new(&format!("p{round}"));
        for n in 0..8 {
            parent.push_message(&n.to_string());
        }
        parent.save(&*store).await;
        let mut older = parent.fork(&format!("o{round}"), 4);
        older.save(&*store).await;
        let mut tasks: Vec<WriterTask<WriterResult>> = vec![Box::pin(purge(store.clone(), parent.key.clone()))];
        for seq in 1..=8 {
            tasks.push(Box::pin(create(store.clone(), parent.fork(&format!("f{round}.{seq}"), seq))));
        }
        let writer = store.clone();
        let key = older.key.clone();
        tasks.push(Box::pin(async move {
            for n in 0..5 {
                append_message(&*writer, &key, &n.to_string()).await.unwrap();
            }
            None
        }));
        for (fork, result) in run_concurrently(tasks).await.into_iter().flatten() {
            assert_complete_or_refused(&*store, &fork, &parent.key, result).await;
        }
        let log = read_full_log(&*store, &older.key).await;
        assert_eq!(log[..5], older.full_log());
        assert_eq!(log.iter().map(|r| r.seq).collect::<Vec<_>>(), (1..=10).collect::<Vec<_>>());
    }
}

/// A blob shared by sessions that are created and purged concurrently exists while one of them
/// references it, and is deleted with the last.
pub async fn a_shared_blob_stays_while_it_is_used(Fixture { store, .. }: Fixture) {
    let picture = blob("a picture");
    for round in 0..5 {
        let session = |n: usize| {
            let (store, picture) = (store.clone(), picture.clone());
            async move {
                let mut log = SessionLog::new(&format!("s{round}.{n}"));
                log.save_with(&*store, &picture).await;
                if n % 2 == 1 {
                    store.purge(&log.key).await.unwrap();
                }
                log.key
            }
        };
        let keys = run_concurrently((0..TASKS).map(session)).await;
        let stored = store.blob(&Tenant::default(), &picture.id).await.unwrap();
        assert_eq!(stored, Some(picture.bytes.clone()), "round {round}");
        run_concurrently(keys.into_iter().map(|key| purge(store.clone(), key))).await;
        assert_eq!(store.blob(&Tenant::default(), &picture.id).await.unwrap(), None, "round {round}");
    }
}

/// Concurrent writers to a capped namespace evict each other's items; none fails, and the cap
/// holds.
pub async fn a_bounded_namespace_may_be_contended(Fixture { store, .. }: Fixture) {
    const MAX_ITEMS: usize = 3;
    let contested = namespace(Owner::Tenant, "cache");
    let fill = |task: usize| {
        let (store, namespace) = (store.clone(), contested.clone());
        async move {
            for n in 0..10 {
                let new = item(&format!("k{}", (task + n) % 8), (task * 10 + n) as i64);
                store.put(&namespace, &new, Some(MAX_ITEMS)).await.unwrap();
            }
        }
    };
    run_concurrently((0..TASKS).map(fill)).await;
    // Two concurrent puts may each leave the other's item in place; the next put enforces the cap.
    store.put(&contested, &item("last", 999), Some(MAX_ITEMS)).await.unwrap();
    let remaining = store.items(&contested, None, 100).await.unwrap();
    assert_eq!((remaining.len(), remaining.contains(&item("last", 999))), (MAX_ITEMS, true), "{remaining:?}");
}

/// Random operations of one task on namespaces.
async fn random_operations(store: Arc<dyn Store>, namespaces: Vec<Namespace>, seed: u64) -> Result<()> {
    let mut rng = Rng::new(seed);
    for n in 0..25 {
        let namespace = rng.pick(&namespaces).clone();
        let name = format!("k{}", rng.below(6));
        let time = timestamp(rng.below(100) as i64);
        match rng.below(8) {
            0..3 => {
                let expires_at = rng.once_in(2).then_some(time);
                let max_items = rng.once_in(2).then(|| rng.below(5));
                store.put(&namespace, &Item { expires_at, ..item(&name, n) }, max_items).await?;
            }
            3 => drop(store.get(&namespace, &name, Some(time)).await?),
            4 => drop(store.remove(&namespace, &name).await?),
            5 => drop(store.expire(time, 1 + rng.below(5)).await?),
            6 => {
                let names: Vec<_> = (0..6).map(|k| format!("k{k}")).collect();
                let mut names: Vec<_> = names.iter().map(String::as_str).collect();
                names.rotate_left(rng.below(6));
                drop(store.get_many(&namespace, &names, Some(time)).await?);
            }
            _ => drop(append_message(&*store, &key("default", "s"), "hi").await?),
        }
    }
    Ok(())
}

/// Tasks that put, use, remove and expire the same items all finish, and none fails.
pub async fn namespaces_do_not_deadlock(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("s");
    log.save(&*store).await;
    let user = |name: &str| namespace(Owner::User(User::new(name).unwrap()), "memory");
    let namespaces = vec![user("ada"), user("bob"), session_namespace(&log.key, "cache")];
    for result in
        run_concurrently((0..TASKS as u64).map(|seed| random_operations(store.clone(), namespaces.clone(), seed))).await
    {
        result.unwrap();
    }
    // The remaining items are consistent: each key exists once, and can be read.
    for namespace in &namespaces {
        let remaining: Vec<_> = store.items(namespace, None, 100).await.unwrap().into_iter().map(|i| i.key).collect();
        assert!(remaining.is_sorted_by(|a, b| a < b), "{remaining:?}");
        let names: Vec<_> = remaining.iter().map(String::as_str).collect();
        assert_eq!(store.get_many(namespace, &names, None).await.unwrap().len(), remaining.len());
    }
}
