//! Deleted data leave no bytes in the files.

use super::super::items;
use super::*;
use crate::store::message_index::{IndexedMessage, MessageIndex, MessageIndexUpdate, WordRules};
use crate::types::blob::{Blob, BlobId};
use std::collections::HashSet;
use std::path::Path;

const USERS: [&str; 2] = ["ada", "bob"];
const SESSIONS: usize = 60;

/// Returns a word that does not occur by chance.
fn unique_word(user: usize, n: usize) -> String {
    blake3::hash(format!("{user} {n}").as_bytes()).to_hex()[..16].to_owned()
}

/// Counts how many of some words occur in the files of a directory. Their suffixes are searched
/// for, because an index omits common prefixes.
fn count_remaining(directory: &Path, words: &[String]) -> usize {
    let suffixes: HashSet<&[u8]> = words.iter().map(|w| &w.as_bytes()[3..]).collect();
    let mut remaining = HashSet::<&[u8]>::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        // Skip the reserve file.
        if bytes.iter().all(|b| *b == 0) {
            continue;
        }
        remaining.extend(bytes.windows(13).filter_map(|w| suffixes.get(w).copied()));
    }
    remaining.len()
}

/// Creates sessions and memories of two users, interleaved, with messages of 10 bytes to 100 KB.
/// Returns the words of each user.
async fn fill(store: &SqliteStore, seed: u64) -> [Vec<String>; 2] {
    let mut rng = Rng::new(seed);
    let mut logs: Vec<_> = (0..SESSIONS).map(|n| Log::of_user(&format!("s{n}"), USERS[n % 2])).collect();
    let mut words = [Vec::new(), Vec::new()];
    for n in (0..2000).step_by(10) {
        let index = rng.below(logs.len());
        let user = index % 2;
        let new_words: Vec<_> = (n..n + 10).map(|n| unique_word(user, n)).collect();
        let mut repeat_word = |word: &str| vec![word; [1, 1, 2, 4, 8, 16, 32, 64, 256, 6000][rng.below(10)]].join(" ");
        let texts: Vec<_> = new_words.iter().map(|w| repeat_word(w)).collect();
        for text in &texts {
            logs[index].push_user_message(text);
        }
        let mut commit = logs[index].commit();
        let first = commit.head.seq + 1 - texts.len() as u64;
        let message = |(seq, word): (u64, &String)| IndexedMessage { seq, position: 0, words: vec![word.clone()] };
        let added = (first..).zip(&new_words).map(message).collect();
        commit.message_index = Some(MessageIndexUpdate { rules: WordRules(1), added, discarded_after: None });
        let bytes = texts[rng.below(10)].as_bytes();
        commit.blobs.push(Blob { id: BlobId::of(bytes), bytes: bytes.into() });
        commit.items.push(("cache".to_owned(), item(&new_words[0], &texts[0])));
        store.commit(&commit).await.unwrap();
        store.put(&memory_namespace(USERS[user]), &item(&new_words[1], &texts[1]), Some(40)).await.unwrap();
        words[user].extend(new_words);
    }
    words
}

#[tokio::test]
async fn no_byte_of_deleted_data_remains() {
    for seed in [2, 5] {
        let test_store = TestStore::new().await;
        let words = fill(&test_store.store, seed).await;
        for n in (0..SESSIONS).step_by(2) {
            test_store.store.purge(&key(&format!("s{n}"))).await.unwrap();
        }
        test_store.store.delete_owner(&Tenant::default(), &memory_namespace(USERS[0]).owner).await.unwrap();
        let remaining = words.each_ref().map(|words| count_remaining(test_store.directory.path(), words));
        assert_eq!(remaining, [0, words[1].len()], "seed {seed}");
    }
}

/// The words that are in the FTS5 table of the message index or in the table of the newest messages.
fn indexed_words(sql: &Connection) -> HashSet<String> {
    sql.execute_batch("CREATE VIRTUAL TABLE IF NOT EXISTS temp.vocabulary USING fts5vocab(main, message_words, row)")
        .unwrap();
    let all = "SELECT substr(term, 13) FROM vocabulary WHERE length(term) > 12 UNION SELECT words FROM message_recent";
    let mut statement = sql.prepare(all).unwrap();
    let words = statement.query_map([], |r| r.get::<_, String>(0)).unwrap();
    words.collect::<Result<_, _>>().unwrap()
}

#[tokio::test]
async fn the_message_index_keeps_no_words_of_purged_sessions() {
    let test_store = TestStore::new().await;
    let words = fill(&test_store.store, 3).await.map(HashSet::from_iter);
    assert_eq!(indexed_words(&test_store.sql()), &words[0] | &words[1]);
    for n in (0..SESSIONS).step_by(2) {
        test_store.store.purge(&key(&format!("s{n}"))).await.unwrap();
    }
    let mut steps = 0;
    while test_store.store.compact().await.unwrap() {
        steps += 1;
    }
    assert!(steps > 0, "there was something to remove");
    assert_eq!(indexed_words(&test_store.sql()), words[1]);
    assert!(!test_store.store.compact().await.unwrap());
}

/// Each page of the full-text index contains words of many items.
#[tokio::test]
async fn the_full_text_index_keeps_no_deleted_words() {
    let test_store = TestStore::new().await;
    let sql = test_store.sql();
    sql.pragma_update(None, "secure_delete", true).unwrap();
    let mut rng = Rng::new(1);
    let mut words = [Vec::new(), Vec::new()];
    let mut n = 0;
    for _ in 0..40 {
        let transaction = sql.unchecked_transaction().unwrap();
        for _ in 0..40 {
            let user = rng.below(2);
            let new_words: Vec<_> = (n..n + 1 + rng.below(40)).map(|n| unique_word(user, n)).collect();
            n += new_words.len();
            let item = item(&n.to_string(), &new_words.join(" and ").repeat([1, 20][rng.below(2)]));
            let owner = memory_namespace(USERS[user]).owner.to_string();
            assert!(items::upsert(&sql, &Tenant::default(), &owner, "memory", &item).is_ok());
            words[user].extend(new_words);
        }
        transaction.commit().unwrap();
        sql.execute("DELETE FROM item WHERE owner = 'user/ada' AND id % 11 = 3", []).unwrap();
    }
    test_store.store.delete_owner(&Tenant::default(), &memory_namespace(USERS[0]).owner).await.unwrap();
    let remaining = words.each_ref().map(|words| count_remaining(test_store.directory.path(), words));
    assert_eq!(remaining, [0, words[1].len()]);
}

#[tokio::test]
async fn a_reader_that_still_uses_deleted_data_is_reported() {
    let test_store = TestStore::new().await;
    test_store.store.put(&memory_namespace("ada"), &item("a", "tea"), None).await.unwrap();
    let sql = test_store.sql();
    let read_transaction = sql.unchecked_transaction().unwrap();
    let count = |sql: &Connection| sql.query_row("SELECT count(*) FROM item", [], |r| r.get::<_, i64>(0)).unwrap();
    assert_eq!(count(&read_transaction), 1);
    let error = test_store.store.delete_owner(&Tenant::default(), &memory_namespace("ada").owner).await.unwrap_err();
    assert!(error.to_string().contains("end long reads and retry the erasure"), "{error}");
    drop(read_transaction);
    test_store.store.delete_owner(&Tenant::default(), &memory_namespace("ada").owner).await.unwrap();
    assert_eq!(count(&sql), 0);
}
