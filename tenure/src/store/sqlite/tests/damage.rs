//! Files that are damaged, foreign or of a newer format: the error says what is wrong and where.

use super::*;
use crate::store::contract::FORMAT;

async fn refusal(file: &str) -> String {
    SqliteStore::open(file).await.unwrap_err().to_string()
}

async fn three_messages() -> Place {
    let place = Place::new().await;
    Log::new("s").say("one").say("two").say("three").save(&place.store).await;
    place
}

#[tokio::test]
async fn a_damaged_record_names_its_place() {
    let place = three_messages().await;
    let change = "UPDATE record SET entry = replace(entry, 'two', 'TWO') WHERE k & 0xffffffff = 3";
    assert_eq!(place.sql().execute(change, []).unwrap(), 1);
    let error = place.records("s").await.unwrap_err();
    let want = format!("damaged data at sqlite {}, session default/s, record 3: its checksum is wrong", place.file());
    assert_eq!(error.to_string(), want);
    let undamaged = RecordRange { upto: 2, ..RecordRange::after(0) };
    assert_eq!(place.store.records(&key("s"), &undamaged).await.unwrap().len(), 2);
}

#[tokio::test]
async fn a_hole_names_its_place() {
    for gone in 1..=4 {
        let place = three_messages().await;
        place.sql().execute("DELETE FROM record WHERE k & 0xffffffff = ?1", [gone as i64]).unwrap();
        let want = format!("damaged data at sqlite {}, session default/s, record {gone}: it is missing", place.file());
        for range in [RecordRange::after(0), RecordRange::back_from(Seq::MAX, 10), RecordRange::after(gone - 1)] {
            let error = place.store.records(&key("s"), &range).await.unwrap_err();
            assert_eq!(error.to_string(), want, "{range:?}");
        }
        let beside = place.store.records(&key("s"), &RecordRange::after(gone)).await.unwrap();
        assert_eq!(beside.len() as u64, 4 - gone);
    }
}

#[tokio::test]
async fn a_damaged_head_names_its_place() {
    let place = three_messages().await;
    place.sql().execute("UPDATE head SET card = '{}'", []).unwrap();
    let want = format!("damaged data at sqlite {}, head of session default/s: missing field", place.file());
    let error = place.store.head(&key("s")).await.unwrap_err().to_string();
    assert!(error.starts_with(&want), "{error}");
    // A damaged session can still be purged.
    place.store.purge(&key("s")).await.unwrap();
    assert_eq!(place.store.head(&key("s")).await.unwrap(), None);
}

#[tokio::test]
async fn a_newer_format_is_refused() {
    let place = three_messages().await;
    let sql = place.sql();
    sql.pragma_update(None, "user_version", 7).unwrap();
    let want =
        format!("sqlite {} has format 7, and this version reads up to {FORMAT}; use a newer version", place.file());
    assert_eq!(refusal(&place.file()).await, want);
    sql.pragma_update(None, "user_version", FORMAT).unwrap();
    SqliteStore::open(&place.file()).await.unwrap();
}

#[tokio::test]
async fn what_is_no_store_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(&directory);
    std::fs::write(&file, "Dear diary, ".repeat(1000)).unwrap();
    assert_eq!(refusal(&file).await, format!("damaged data at sqlite {file}: it is not a SQLite database"));
    std::fs::remove_file(&file).unwrap();
    Connection::open(&file).unwrap().execute_batch("CREATE TABLE recipes (name TEXT)").unwrap();
    assert_eq!(refusal(&file).await, format!("sqlite {file} is the database of another program; use another file"));
    let nowhere = directory.path().join("no/where.db");
    let error = refusal(nowhere.to_str().unwrap()).await;
    assert!(error.ends_with("create it first"), "{error}");
    assert!(refusal(":memory:").await.contains("`memory:`"));
}

#[tokio::test(flavor = "multi_thread")]
async fn several_may_open_a_new_file_at_once() {
    for _ in 0..5 {
        let directory = tempfile::tempdir().unwrap();
        let file = file(&directory);
        let opening = (0..8).map(|_| {
            let file = file.clone();
            async move { SqliteStore::open(&file).await }
        });
        let stores = opening.collect::<tokio::task::JoinSet<_>>().join_all().await;
        let stores: Vec<_> = stores.into_iter().map(|s| s.unwrap()).collect();
        Log::new("s").save(&stores[0]).await;
        assert!(stores[7].head(&key("s")).await.unwrap().is_some());
    }
}

#[tokio::test]
async fn a_closed_store_leaves_its_file_and_the_reserve() {
    let place = three_messages().await;
    let Place { store, directory } = place;
    assert!(store.head(&key("s")).await.unwrap().is_some());
    drop(store);
    let mut names: Vec<_> = std::fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["tenure.db", "tenure.db-reserve"]);
}
