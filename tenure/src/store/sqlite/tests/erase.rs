//! Deleted data leave no bytes in the files.

use super::super::items;
use super::*;
use crate::types::blob::{Blob, BlobId};
use std::collections::HashSet;
use std::path::Path;

const USERS: [&str; 2] = ["ada", "bob"];
const SESSIONS: usize = 60;

/// Returns a word that does not occur by chance.
fn word(user: usize, n: usize) -> String {
    blake3::hash(format!("{user} {n}").as_bytes()).to_hex()[..16].to_owned()
}

/// Counts how many of some words occur in the files of a directory. Their suffixes are searched
/// for, because an index omits common prefixes.
fn left(directory: &Path, words: &[String]) -> usize {
    let ends: HashSet<&[u8]> = words.iter().map(|w| &w.as_bytes()[3..]).collect();
    let mut found = HashSet::<&[u8]>::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        // Skip the reserve file.
        if bytes.iter().all(|b| *b == 0) {
            continue;
        }
        found.extend(bytes.windows(13).filter_map(|w| ends.get(w).copied()));
    }
    found.len()
}

/// Creates sessions and memories of two users, interleaved, with messages of 10 bytes to 100 KB.
/// Returns the words of each user.
async fn fill(store: &SqliteStore, seed: u64) -> [Vec<String>; 2] {
    let mut dice = Dice(seed);
    let mut logs: Vec<_> = (0..SESSIONS).map(|n| Log::of(&format!("s{n}"), USERS[n % 2])).collect();
    let mut words = [Vec::new(), Vec::new()];
    for n in (0..2000).step_by(10) {
        let which = dice.roll(logs.len());
        let user = which % 2;
        let fresh: Vec<_> = (n..n + 10).map(|n| word(user, n)).collect();
        let mut long = |word: &str| vec![word; [1, 1, 2, 4, 8, 16, 32, 64, 256, 6000][dice.roll(10)]].join(" ");
        let texts: Vec<_> = fresh.iter().map(|w| long(w)).collect();
        for text in &texts {
            logs[which].say(text);
        }
        let mut commit = logs[which].commit();
        let bytes = texts[dice.roll(10)].as_bytes();
        commit.blobs.push(Blob { id: BlobId::of(bytes), bytes: bytes.into() });
        commit.items.push(("cache".to_owned(), item(&fresh[0], &texts[0])));
        store.commit(&commit).await.unwrap();
        store.put(&memory(USERS[user]), &item(&fresh[1], &texts[1]), Some(40)).await.unwrap();
        words[user].extend(fresh);
    }
    words
}

#[tokio::test]
async fn no_byte_of_what_was_cleared_is_left() {
    for seed in [2, 5] {
        let place = Place::new().await;
        let words = fill(&place.store, seed).await;
        for n in (0..SESSIONS).step_by(2) {
            place.store.purge(&key(&format!("s{n}"))).await.unwrap();
        }
        place.store.clear(&Tenant::default(), &memory(USERS[0]).owner).await.unwrap();
        let found = words.each_ref().map(|words| left(place.directory.path(), words));
        assert_eq!(found, [0, words[1].len()], "seed {seed}");
    }
}

/// Each page of the full-text index contains words of many items.
#[tokio::test]
async fn the_full_text_index_forgets_words() {
    let place = Place::new().await;
    let sql = place.sql();
    sql.pragma_update(None, "secure_delete", true).unwrap();
    let (mut dice, mut words, mut n) = (Dice(1), [Vec::new(), Vec::new()], 0);
    for _ in 0..40 {
        let transaction = sql.unchecked_transaction().unwrap();
        for _ in 0..40 {
            let user = dice.roll(2);
            let fresh: Vec<_> = (n..n + 1 + dice.roll(40)).map(|n| word(user, n)).collect();
            n += fresh.len();
            let item = item(&n.to_string(), &fresh.join(" and ").repeat([1, 20][dice.roll(2)]));
            let owner = memory(USERS[user]).owner.to_string();
            assert!(items::upsert(&sql, &Tenant::default(), &owner, "memory", &item).is_ok());
            words[user].extend(fresh);
        }
        transaction.commit().unwrap();
        sql.execute("DELETE FROM item WHERE owner = 'user/ada' AND id % 11 = 3", []).unwrap();
    }
    place.store.clear(&Tenant::default(), &memory(USERS[0]).owner).await.unwrap();
    let found = words.each_ref().map(|words| left(place.directory.path(), words));
    assert_eq!(found, [0, words[1].len()]);
}

#[tokio::test]
async fn a_reader_that_holds_on_to_the_deleted_is_reported() {
    let place = Place::new().await;
    place.store.put(&memory("ada"), &item("a", "tea"), None).await.unwrap();
    let sql = place.sql();
    let reading = sql.unchecked_transaction().unwrap();
    let count = |sql: &Connection| sql.query_row("SELECT count(*) FROM item", [], |r| r.get::<_, i64>(0)).unwrap();
    assert_eq!(count(&reading), 1);
    let error = place.store.clear(&Tenant::default(), &memory("ada").owner).await.unwrap_err();
    assert!(error.to_string().contains("end long reads and clear again"), "{error}");
    drop(reading);
    place.store.clear(&Tenant::default(), &memory("ada").owner).await.unwrap();
    assert_eq!(count(&sql), 0);
}
