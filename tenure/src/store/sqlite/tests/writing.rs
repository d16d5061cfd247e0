//! Writing: the thread that executes a write, batching, and failures of single writes and of whole
//! batches.

use super::*;
use crate::types::blob::{Blob, BlobId};
use crate::types::digest::LogDigest;
use crate::types::entry::{MessageEntry, Parent};
use crate::types::error::Error;
use crate::types::id::RunId;
use crate::types::status::Status;
use std::error::Error as _;
use std::sync::{Arc, mpsc};
use tokio::task::JoinSet;

/// Blocks the writer thread until the sender is dropped.
async fn block_writer(store: &Arc<SqliteStore>) -> mpsc::Sender<()> {
    let (sender, receiver) = mpsc::channel::<()>();
    let (started, start_signal) = tokio::sync::oneshot::channel();
    let work = move |_: &Connection, _: &super::super::Database| {
        let _ = started.send(());
        let _ = receiver.recv();
        Ok(())
    };
    let store = store.clone();
    JoinSet::from_iter([async move { store.writer.run_exclusive(work).await }]).detach_all();
    start_signal.await.unwrap();
    sender
}

/// Returns the results of commits that are all queued when the writer gets to them.
async fn commit_queued(store: &Arc<SqliteStore>, commits: Vec<Commit>) -> Vec<Result<()>> {
    let blocker = block_writer(store).await;
    let mut tasks = JoinSet::new();
    for (n, commit) in commits.into_iter().enumerate() {
        let store = store.clone();
        tasks.spawn(async move { (n, store.commit(&commit).await) });
    }
    while store.writer.queued_jobs() < tasks.len() {
        tokio::task::yield_now().await;
    }
    drop(blocker);
    let mut outcomes = tasks.join_all().await;
    outcomes.sort_by_key(|(n, _)| *n);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

fn into_parts(test_store: TestStore) -> (Arc<SqliteStore>, TempDir, String) {
    let file = test_store.file();
    (Arc::new(test_store.store), test_store.directory, file)
}

#[tokio::test]
async fn queued_commits_share_a_transaction() {
    let (store, _directory, file) = into_parts(TestStore::new().await);
    let mut logs: Vec<_> = (0..16).map(|n| Log::new(&format!("s{n}"))).collect();
    for log in &mut logs {
        log.save(&store).await;
    }
    let pages = || std::fs::metadata(format!("{file}-wal")).unwrap().len() / 4096;
    let before = pages();
    let outcomes =
        commit_queued(&store, logs.iter_mut().map(|log| log.push_user_message("hi").commit()).collect()).await;
    assert!(outcomes.iter().all(Result::is_ok));
    // Each commit on its own would write the pages of its head, three indexes and its record.
    assert!(pages() - before < 16, "{} pages for one transaction", pages() - before);
    for log in &logs {
        assert_eq!(store.head(&log.head.key()).await.unwrap(), Some(log.head.clone()));
    }
}

/// Returns the name of the thread that executes a write.
async fn writing_thread_name(store: &SqliteStore) -> Option<String> {
    let name = |_: &Connection, _: &super::super::Database| Ok(std::thread::current().name().map(str::to_owned));
    store.writer.write(name).await.unwrap()
}

const WRITER_THREAD: Option<&str> = Some("tenure-sqlite");

#[tokio::test(flavor = "multi_thread")]
async fn a_single_write_runs_on_the_callers_thread() {
    let (store, _directory, _) = into_parts(TestStore::new().await);
    // The writer thread may still be executing writes from the opening of the store.
    let mut name = writing_thread_name(&store).await;
    while name.as_deref() == WRITER_THREAD {
        name = writing_thread_name(&store).await;
    }
    assert_eq!(name.as_deref(), std::thread::current().name());
    let task_store = store.clone();
    let task = async move {
        // As above; a write may find the writer thread busy, but not a hundred times in a row.
        for _ in 0..100 {
            if writing_thread_name(&task_store).await.as_deref() != WRITER_THREAD {
                return true;
            }
        }
        false
    };
    assert_eq!(JoinSet::from_iter([task]).join_all().await, [true]);
    // Not while another write is in progress, nor right after concurrent writes.
    let blocker = block_writer(&store).await;
    let waiting = JoinSet::from_iter([(); 2].map(|()| {
        let store = store.clone();
        async move { writing_thread_name(&store).await }
    }));
    while store.writer.queued_jobs() < 2 {
        tokio::task::yield_now().await;
    }
    drop(blocker);
    assert_eq!(waiting.join_all().await.iter().map(Option::as_deref).collect::<Vec<_>>(), [WRITER_THREAD; 2]);
    assert_eq!(writing_thread_name(&store).await.as_deref(), WRITER_THREAD);
    // After the queue has drained, writes soon run on the caller's thread again.
    while writing_thread_name(&store).await.as_deref() == WRITER_THREAD {}
}

#[tokio::test]
async fn a_current_thread_runtime_never_blocks_on_the_disk() {
    let test_store = TestStore::new().await;
    assert_eq!(writing_thread_name(&test_store.store).await.as_deref(), WRITER_THREAD);
}

#[test]
fn a_local_set_never_blocks_on_the_disk() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let (store, _directory, _) = into_parts(TestStore::new().await);
        let task_store = store.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn_local(async move { writing_thread_name(&task_store).await });
        assert_eq!(tasks.join_all().await[0].as_deref(), WRITER_THREAD);
        // The root future of the `LocalSet` can write as well.
        writing_thread_name(&store).await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn commits_of_one_task_share_a_transaction() {
    let (store, _directory, file) = into_parts(TestStore::new().await);
    let mut logs: Vec<_> = (0..4).map(|n| Log::new(&format!("s{n}"))).collect();
    for log in &mut logs {
        log.save(&store).await;
    }
    let pages = || std::fs::metadata(format!("{file}-wal")).unwrap().len() / 4096;
    let before = pages();
    let [a, b, c, d] = &mut logs[..] else { unreachable!() };
    tokio::join!(
        a.push_user_message("hi").save(&store),
        b.push_user_message("hi").save(&store),
        c.push_user_message("hi").save(&store),
        d.push_user_message("hi").save(&store)
    );
    assert!(pages() - before < 8, "{} pages for one transaction", pages() - before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_is_executed_although_its_caller_was_cancelled() {
    let test_store = TestStore::new().await;
    let commit = Log::new("s").commit();
    {
        let mut step = std::pin::pin!(test_store.store.commit(&commit));
        let poll_once =
            std::future::poll_fn(|context| std::task::Poll::Ready(step.as_mut().poll(context).is_pending()));
        assert!(poll_once.await, "the write yields once, so that others can join its batch");
    }
    while test_store.store.head(&key("s")).await.unwrap().is_none() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_caller_waits_forever_after_a_panic() {
    for flavor in ["a thread of the caller's", "the store's own"] {
        let (store, _directory, _) = into_parts(TestStore::new().await);
        let blocker = if flavor == "the store's own" { Some(block_writer(&store).await) } else { None };
        let task_store = store.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { task_store.writer.write::<()>(|_, _| panic!("on purpose")).await });
        while blocker.is_some() && store.writer.queued_jobs() < 1 {
            tokio::task::yield_now().await;
        }
        drop(blocker);
        let outcome = tasks.join_next().await.unwrap();
        assert!(outcome.is_err() || outcome.unwrap().is_err());
        let error = store.commit(&Log::new("s").commit()).await.unwrap_err();
        assert_eq!(error.code(), "unavailable", "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_tasks_write_concurrently() {
    let (store, _directory, _) = into_parts(TestStore::new().await);
    let mut tasks = JoinSet::new();
    for n in 0..16 {
        let store = store.clone();
        tasks.spawn(async move {
            let mut log = Log::new(&format!("s{n}"));
            for m in 0..20 {
                log.push_user_message(&format!("{n}.{m}")).save(&store).await;
            }
            log
        });
    }
    for log in tasks.join_all().await {
        let records = store.records(&log.head.key(), &RecordRange::after(0)).await.unwrap();
        assert_eq!(records.iter().map(|r| r.seq).collect::<Vec<_>>(), (1..=21).collect::<Vec<_>>());
        assert_eq!(store.head(&log.head.key()).await.unwrap(), Some(log.head));
    }
}

#[tokio::test]
async fn a_rejected_commit_does_not_affect_the_others() {
    let test_store = TestStore::new().await;
    let sql = test_store.sql();
    let (store, _directory, _) = into_parts(test_store);
    let mut logs: Vec<_> = (0..4).map(|n| Log::new(&format!("s{n}"))).collect();
    for log in &mut logs {
        log.save(&store).await;
    }
    // A stray record where the third session will write: detected only after its head has been
    // written.
    let stray = "INSERT INTO record SELECT (id << 32) + 3, 0, 0, NULL, NULL, '' FROM head WHERE session = 's2'";
    assert_eq!(sql.execute(stray, []).unwrap(), 1);

    let good = logs[0].push_user_message("good").commit();
    let mut stale = logs[1].clone().push_user_message("one").push_user_message("two").commit();
    stale.records.remove(0);
    stale.base = stale.base.map(|end| LogEnd { seq: 2, ..end });
    let dirty = logs[2].push_user_message("one").push_user_message("two").commit();
    let missing =
        Commit { base: Some(Log::new("missing").head.end()), ..Log::new("missing").push_user_message("hi").commit() };
    let missing = Commit { records: missing.records[1..].to_vec(), ..missing };
    let exists = Log::new("s3").commit();
    let last = logs[3].push_user_message("good").commit();
    let outcomes = commit_queued(&store, vec![good, stale, dirty, missing, exists, last]).await;
    let codes: Vec<_> = outcomes.iter().map(|o| o.as_ref().map_err(Error::code).copied()).collect();
    assert_eq!(
        codes,
        [Ok(()), Err("conflict"), Err("corrupt"), Err("not_found"), Err("exists"), Ok(())],
        "{outcomes:?}"
    );
    let ends: Vec<i64> = {
        let mut statement = sql.prepare("SELECT seq FROM head ORDER BY session").unwrap();
        statement.query_map([], |r| r.get(0)).unwrap().map(|seq| seq.unwrap()).collect()
    };
    assert_eq!(ends, [2, 1, 1, 2]);
    let count: i64 = sql.query_row("SELECT count(*) FROM record", [], |r| r.get(0)).unwrap();
    assert_eq!(count, 4 + 2 + 1, "four beginnings, two messages and the stray one");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_can_write_one_file() {
    let test_store = TestStore::new().await;
    let other = Arc::new(SqliteStore::open(&test_store.file()).await.unwrap());
    let (store, _directory, _) = into_parts(test_store);
    Log::new("s").save(&store).await;
    let mut tasks = JoinSet::new();
    for (n, store) in [&store, &other, &store, &other].into_iter().enumerate() {
        let store = store.clone();
        tasks.spawn(async move {
            let mut written = 0;
            while written < 15 {
                let head = store.head(&key("s")).await.unwrap().unwrap();
                let mut log = Log { base: Some(head.end()), head, new: Vec::new() };
                match store.commit(&log.push_user_message(&format!("{n}.{written}")).commit()).await {
                    Ok(()) => written += 1,
                    Err(e) => assert_eq!(e.code(), "conflict", "{e}"),
                }
            }
        });
    }
    tasks.join_all().await;
    let records = other.records(&key("s"), &RecordRange::after(0)).await.unwrap();
    assert_eq!(records.iter().map(|r| r.seq).collect::<Vec<_>>(), (1..=61).collect::<Vec<_>>());
    let count_of = |n: usize| records.iter().filter(|r| r.entry.encode().contains(&format!("\"{n}."))).count();
    assert_eq!([0, 1, 2, 3].map(count_of), [15; 4]);
}

#[tokio::test]
async fn a_full_disk_loses_nothing_and_can_be_freed() {
    let test_store = TestStore::new().await;
    let mut log = Log::new("s");
    log.save(&test_store.store).await;
    let limit = |pages: i64| {
        test_store.store.writer.run_exclusive(move |conn, file| {
            conn.pragma_update(None, "max_page_count", pages).map_err(|e| file.error(e))
        })
    };
    limit(1).await.unwrap();
    let commit = log.clone().push_user_message(&"long ".repeat(10_000)).commit();
    let error = test_store.store.commit(&commit).await.unwrap_err();
    assert_eq!(error.to_string(), format!("no space left at sqlite {}; free disk space and retry", test_store.file()));
    let cause = error.source().and_then(|source| source.downcast_ref::<rusqlite::Error>());
    assert_eq!(cause.and_then(rusqlite::Error::sqlite_error_code), Some(rusqlite::ErrorCode::DiskFull));
    assert_eq!(test_store.store.head(&key("s")).await.unwrap(), Some(log.head));
    assert_eq!(test_store.records("s").await.unwrap().len(), 1);
    limit(1 << 30).await.unwrap();
    test_store.store.commit(&commit).await.unwrap();
    assert_eq!(test_store.records("s").await.unwrap().len(), 2);
}

#[tokio::test]
async fn uses_are_visible_and_counted() {
    let test_store = TestStore::new().await;
    let namespace = memory_namespace("ada");
    test_store.store.put(&namespace, &item("a", "tea"), None).await.unwrap();
    for second in 2..=50 {
        let got = test_store.store.get(&namespace, "a", Some(at(second))).await.unwrap().unwrap();
        assert_eq!(got.used_at, at(second));
    }
    let expected_item = Item { used_at: at(50), uses: 49, ..item("a", "tea") };
    assert_eq!(test_store.store.get(&namespace, "a", None).await.unwrap(), Some(expected_item));
    // Whatever use marks came before, a commit is fsynced.
    Log::new("s").save(&test_store.store).await;
    let level =
        |conn: &Connection, _: &super::super::Database| Ok(conn.pragma_query_value(None, "synchronous", |r| r.get(0)));
    assert_eq!(test_store.store.writer.run_exclusive(level).await.unwrap(), Ok(2));
}

#[tokio::test]
async fn records_and_sessions_are_limited() {
    let test_store = TestStore::new().await;
    let mut log = Log::new("s");
    log.save(&test_store.store).await;
    let sql = test_store.sql();
    let last = (1u64 << 32) - 1;
    sql.execute("UPDATE head SET seq = ?1, head_json = json_set(head_json, '$.seq', ?1)", [last as i64]).unwrap();
    let mut log = Log {
        base: Some(LogEnd { seq: last, ..log.head.end() }),
        head: Head { seq: last, ..log.head },
        new: Vec::new(),
    };
    let error = test_store.store.commit(&log.push_user_message("one more").commit()).await.unwrap_err();
    assert_eq!(error.code(), "too_large", "{error}");

    sql.execute("UPDATE head SET id = (1 << 31) - 1", []).unwrap();
    let error = test_store.store.commit(&Log::new("t").commit()).await.unwrap_err();
    assert_eq!(error.code(), "too_large", "{error}");
    assert_eq!(test_store.store.head(&key("t")).await.unwrap(), None);
}

fn fork(session: &str, parent: &Log, seq: Seq) -> Log {
    let parent = Parent { session: parent.head.info.session_id.clone(), seq, digest: LogDigest::default() };
    Log::begin(session, SessionCreated { parent: Some(parent), ..SessionCreated::default() })
}

#[tokio::test]
async fn the_fork_with_the_latest_fork_point_inherits() {
    let test_store = TestStore::new().await;
    let store = &test_store.store;
    let picture = |n: u8| Blob { id: BlobId::of(&[n]), bytes: Arc::from([n]) };
    let mut parent = Log::new("p");
    for n in 1..=5 {
        let commit = parent.push_user_message(&n.to_string()).commit();
        store.commit(&Commit { blobs: vec![picture(n)], ..commit }).await.unwrap();
    }
    let mut early = fork("early", &parent, 2);
    let mut inheriting = fork("late", &parent, 4);
    for log in [&mut early, &mut inheriting] {
        log.push_user_message("own").save(store).await;
    }
    let before = test_store.records("p").await.unwrap();
    let inheriting_records = test_store.records("late").await.unwrap();
    store.purge(&key("p")).await.unwrap();

    assert_eq!(store.head(&key("p")).await.unwrap(), None);
    assert_eq!(test_store.records("late").await.unwrap(), [&before[..4], &inheriting_records[..]].concat());
    let got = store.head(&key("late")).await.unwrap();
    assert_eq!(got, Some(Head { first: 1, parent: None, ..inheriting.head.clone() }));
    let got = store.head(&key("early")).await.unwrap().unwrap();
    assert_eq!(got.parent.map(|p| (p.session.to_string(), p.seq)), Some(("late".to_owned(), 2)));
    for n in 1..=5 {
        // The first picture belongs to record 1 (and 2), the n-th to record n + 1.
        let exists = store.blob(&Tenant::default(), &picture(n).id).await.unwrap().is_some();
        assert_eq!(exists, n <= 3, "picture {n}");
    }
    // A writer with a stale head can continue, and does not undo the inheritance.
    inheriting.push_user_message("more").save(store).await;
    assert_eq!(
        store.head(&key("late")).await.unwrap(),
        Some(Head { first: 1, parent: None, ..inheriting.head.clone() })
    );
    assert_eq!(test_store.records("late").await.unwrap().len(), 7);
}

#[tokio::test]
async fn records_of_all_sizes_and_kinds_are_read_back() {
    let test_store = TestStore::new().await;
    let mut log = Log::new("s");
    let mut rng = Rng::new(3);
    for n in 0..400 {
        match n % 8 {
            3 => log.push(Entry::Status { to: Status::Paused, reason: Some("ä".repeat(rng.below(99))), until: None }),
            5 => {
                let run = Some(RunId::new("r").unwrap());
                let message = Message::assistant(&"ö\"".repeat(rng.below(999)));
                log.push(Entry::Message(MessageEntry {
                    run,
                    replaces_instructions: n % 3 == 0,
                    ..MessageEntry::from(message)
                }))
            }
            _ if n % 100 == 0 => log.push_user_message(&"long ".repeat(20_000)),
            _ => log.push_user_message(&"é".repeat(rng.below(2000))),
        };
    }
    let written = log.new.clone();
    log.save(&test_store.store).await;
    assert_eq!(test_store.records("s").await.unwrap(), written);
    let mut backward = test_store.store.records(&key("s"), &RecordRange::back_from(Seq::MAX, 1000)).await.unwrap();
    backward.reverse();
    assert_eq!(backward, written);
}
