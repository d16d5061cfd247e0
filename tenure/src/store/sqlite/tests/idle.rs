//! The write-ahead log of a store without writes.

use super::super::database::Database;
use super::super::idle_checkpoint::{IdleCheckpoint, IdleStep};
use super::*;
use std::time::Duration;

/// Writes about two megabytes.
async fn write_much(test_store: &TestStore, session: &str) -> Log {
    let mut log = Log::new(session);
    log.save(&test_store.store).await;
    for _ in 0..20 {
        log.push_user_message(&"x".repeat(100_000)).save(&test_store.store).await;
    }
    log
}

fn wal_bytes(test_store: &TestStore) -> u64 {
    Database::new(&test_store.file()).unwrap().wal_bytes()
}

/// Waits until the write-ahead log is empty.
async fn wait_until_truncated(test_store: &TestStore) {
    let is_truncated = async {
        let mut interval = tokio::time::interval(Duration::from_millis(20));
        while wal_bytes(test_store) > 0 {
            interval.tick().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), is_truncated).await.expect("the write-ahead log is truncated");
}

/// The writer thread truncates the write-ahead log once no writes come, whichever thread executed
/// them, and again after the next writes. A copy of the main file alone then contains everything.
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_store_truncates_its_write_ahead_log() {
    let test_store = TestStore::new().await;
    for session in ["a", "b"] {
        let log = write_much(&test_store, session).await;
        wait_until_truncated(&test_store).await;
        assert_eq!(test_store.records(session).await.unwrap().len() as Seq, log.head.seq);
        let copy = test_store.directory.path().join(session);
        std::fs::copy(test_store.file(), &copy).unwrap();
        let count = Connection::open(&copy).unwrap().query_row("SELECT count(*) FROM record", [], |r| r.get(0));
        assert_eq!(count, Ok(21 * if session == "a" { 1 } else { 2 }));
    }
}

/// On a runtime with one thread, all writes are executed by the writer thread.
#[tokio::test]
async fn the_log_of_an_earlier_process_is_truncated() {
    let test_store = TestStore::new().await;
    let log = write_much(&test_store, "a").await;
    // A reader keeps the write-ahead log in place when the store is closed.
    let reader = test_store.sql();
    assert_eq!(reader.query_row("SELECT count(*) FROM record", [], |r| r.get(0)), Ok(21));
    let TestStore { store, directory } = test_store;
    drop(store);
    let reopened = TestStore { store: SqliteStore::open(&file(&directory)).await.unwrap(), directory };
    wait_until_truncated(&reopened).await;
    assert_eq!(reopened.records("a").await.unwrap().len() as Seq, log.head.seq);
}

/// Nothing is truncated while writes come, or while a reader needs the write-ahead log.
#[tokio::test]
async fn a_write_ahead_log_in_use_is_left_alone() {
    let test_store = TestStore::new().await;
    let reader = test_store.sql();
    reader.execute_batch("BEGIN; SELECT count(*) FROM record;").unwrap();
    write_much(&test_store, "a").await;
    let mut checkpoint = IdleCheckpoint::new(Database::new(&test_store.file()).unwrap());
    assert_eq!(checkpoint.next_step(1), IdleStep::Wait(Duration::from_secs(1)), "the first look");
    assert_eq!(checkpoint.next_step(2), IdleStep::Wait(Duration::from_secs(1)), "there was a write");
    let waits: Vec<_> = (0..8).map(|_| checkpoint.next_step(2)).collect();
    let expected = [1, 2, 4, 8, 16, 32, 60, 60].map(|seconds| IdleStep::Wait(Duration::from_secs(seconds)));
    assert_eq!(waits, expected, "a reader needs the state before the writes");
    reader.execute_batch("COMMIT").unwrap();
    assert_eq!(checkpoint.next_step(2), IdleStep::Truncate);
    assert!(Database::new(&test_store.file()).unwrap().try_truncate_wal(&test_store.sql(), Duration::ZERO).unwrap());
    assert_eq!((checkpoint.next_step(2), wal_bytes(&test_store)), (IdleStep::Sleep, 0));
}
