//! Files that are damaged, foreign or of a newer format: the error says what is wrong and where.

use super::*;
use crate::store::contract::FORMAT;

async fn open_error(file: &str) -> String {
    SqliteStore::open(file).await.unwrap_err().to_string()
}

async fn store_with_three_messages() -> TestStore {
    let test_store = TestStore::new().await;
    Log::new("s")
        .push_user_message("one")
        .push_user_message("two")
        .push_user_message("three")
        .save(&test_store.store)
        .await;
    test_store
}

#[tokio::test]
async fn a_damaged_record_is_reported_with_its_location() {
    let test_store = store_with_three_messages().await;
    let sql = "UPDATE record SET entry = replace(entry, 'two', 'TWO') WHERE record_key & 0xffffffff = 3";
    assert_eq!(test_store.sql().execute(sql, []).unwrap(), 1);
    let error = test_store.records("s").await.unwrap_err();
    let want = format!(
        "damaged data at sqlite {}, session default/s, record 3: its checksum does not match",
        test_store.file()
    );
    assert_eq!(error.to_string(), want);
    let undamaged = RecordRange { upto: 2, ..RecordRange::after(0) };
    assert_eq!(test_store.store.records(&key("s"), &undamaged).await.unwrap().len(), 2);
}

#[tokio::test]
async fn a_missing_record_is_reported_with_its_location() {
    for missing_seq in 1..=4 {
        let test_store = store_with_three_messages().await;
        test_store
            .sql()
            .execute("DELETE FROM record WHERE record_key & 0xffffffff = ?1", [missing_seq as i64])
            .unwrap();
        let want = format!(
            "damaged data at sqlite {}, session default/s, record {missing_seq}: the record is missing",
            test_store.file()
        );
        for range in [RecordRange::after(0), RecordRange::back_from(Seq::MAX, 10), RecordRange::after(missing_seq - 1)]
        {
            let error = test_store.store.records(&key("s"), &range).await.unwrap_err();
            assert_eq!(error.to_string(), want, "{range:?}");
        }
        let later_records = test_store.store.records(&key("s"), &RecordRange::after(missing_seq)).await.unwrap();
        assert_eq!(later_records.len() as u64, 4 - missing_seq);
    }
}

#[tokio::test]
async fn a_damaged_head_is_reported_with_its_location() {
    let test_store = store_with_three_messages().await;
    test_store.sql().execute("UPDATE head SET head_json = '{}'", []).unwrap();
    let want = format!("damaged data at sqlite {}, head of session default/s: missing field", test_store.file());
    let error = test_store.store.head(&key("s")).await.unwrap_err().to_string();
    assert!(error.starts_with(&want), "{error}");
    // A damaged session can still be purged.
    test_store.store.purge(&key("s")).await.unwrap();
    assert_eq!(test_store.store.head(&key("s")).await.unwrap(), None);
}

#[tokio::test]
async fn a_newer_format_is_rejected() {
    let test_store = store_with_three_messages().await;
    let sql = test_store.sql();
    sql.pragma_update(None, "user_version", 7).unwrap();
    let want = format!(
        "sqlite {} has format version 7, and this version supports up to {FORMAT}; use a newer version",
        test_store.file()
    );
    assert_eq!(open_error(&test_store.file()).await, want);
    sql.pragma_update(None, "user_version", FORMAT).unwrap();
    SqliteStore::open(&test_store.file()).await.unwrap();
}

#[tokio::test]
async fn a_file_that_is_not_a_store_is_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(&directory);
    std::fs::write(&file, "Dear diary, ".repeat(1000)).unwrap();
    assert_eq!(open_error(&file).await, format!("damaged data at sqlite {file}: not a SQLite database"));
    std::fs::remove_file(&file).unwrap();
    Connection::open(&file).unwrap().execute_batch("CREATE TABLE recipes (name TEXT)").unwrap();
    assert_eq!(open_error(&file).await, format!("sqlite {file} is the database of another program; use another file"));
    let missing_directory = directory.path().join("no/where.db");
    let error = open_error(missing_directory.to_str().unwrap()).await;
    assert!(error.ends_with("create it first"), "{error}");
    assert!(open_error(":memory:").await.contains("`memory:`"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_file_can_be_opened_concurrently() {
    for _ in 0..5 {
        let directory = tempfile::tempdir().unwrap();
        let file = file(&directory);
        let open_tasks = (0..8).map(|_| {
            let file = file.clone();
            async move { SqliteStore::open(&file).await }
        });
        let stores = open_tasks.collect::<tokio::task::JoinSet<_>>().join_all().await;
        let stores: Vec<_> = stores.into_iter().map(|s| s.unwrap()).collect();
        Log::new("s").save(&stores[0]).await;
        assert!(stores[7].head(&key("s")).await.unwrap().is_some());
    }
}

#[tokio::test]
async fn a_closed_store_leaves_only_its_file_and_the_reserve_file() {
    let test_store = store_with_three_messages().await;
    let TestStore { store, directory } = test_store;
    assert!(store.head(&key("s")).await.unwrap().is_some());
    drop(store);
    let mut names: Vec<_> = std::fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["tenure.db", "tenure.db-reserve"]);
}
