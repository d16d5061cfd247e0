//! The message index: it finds what commits added, and nothing that was removed. A store without one passes.

use super::fixture::Fixture;
use crate::rules::message_words::{PositionedMessage, discarded_after, indexed_words, visible_messages};
use crate::store::contract::{Commit, Store};
use crate::store::message_index::{
    IndexWord, IndexedMessage, MessageIndex, MessageIndexUpdate, MessageLocation, MessageMatches, MessageQuery,
    SessionIndexPart, WordRules,
};
use crate::testing::records::{SessionLog, head_of, key, timestamp};
use crate::types::entry::{Entry, RewindEntry, SessionCreated};
use crate::types::id::{Seq, SessionId, Tenant, User};

const RULES: WordRules = WordRules(7);

/// The change of the message index that belongs to a commit.
fn with_words(mut commit: Commit) -> Commit {
    let messages = visible_messages(&commit.records, commit.head.digest.messages);
    let entry = |m: PositionedMessage| IndexedMessage {
        seq: m.seq,
        position: m.position,
        words: indexed_words(&m.message.text()),
    };
    let added = messages.into_iter().map(entry).collect();
    let discarded_after = discarded_after(&commit.records);
    commit.message_index = Some(MessageIndexUpdate { rules: RULES, added, discarded_after });
    commit
}

async fn save(store: &dyn Store, log: &mut SessionLog) {
    store.commit(&with_words(log.commit())).await.unwrap();
}

fn rewind(log: &mut SessionLog, to: Seq) {
    let retained: Vec<_> = log.full_log().into_iter().filter(|record| record.seq <= to).collect();
    let digest = head_of(&log.key, &retained).digest;
    log.push(Entry::Rewound(RewindEntry { to, digest }));
}

fn query(words: &str) -> MessageQuery {
    let word = |word: &str| {
        let text = word.trim_end_matches('*');
        IndexWord { text: text.to_owned(), is_prefix: text.len() < word.len() }
    };
    let words = words.split(' ').map(word).collect();
    MessageQuery { rules: RULES, tenant: Tenant::default(), user: None, words, limit: 100 }
}

/// Begins to use the index of an empty store. `None` if the store has none.
async fn used(store: &dyn Store) -> Option<&dyn MessageIndex> {
    let index = store.message_index()?;
    index.find(&query("x")).await.unwrap();
    assert_eq!(index.next_unindexed(RULES).await.unwrap(), None);
    assert!(index.is_used());
    Some(index)
}

/// The messages that are found: session and record.
async fn found(index: &dyn MessageIndex, query: &MessageQuery) -> Vec<(String, Seq)> {
    match index.find(query).await.unwrap() {
        MessageMatches::Found(found) => found.into_iter().map(|m| (m.session.to_string(), m.seq)).collect(),
        MessageMatches::Unindexed => panic!("the index is incomplete"),
    }
}

fn at(session: &str, seq: Seq) -> (String, Seq) {
    (session.to_owned(), seq)
}

/// A message is found by all of its words, whole or, if the store can, by their beginning; the last indexed first.
pub async fn messages_are_found_by_their_words(Fixture { store, .. }: Fixture) {
    let Some(index) = used(&*store).await else { return };
    let mut a = SessionLog::new("a");
    let mut b = SessionLog::new("b");
    save(&*store, a.push_message("the ferry to Dover").push_message("a train 東京 हिन")).await;
    save(&*store, b.push_message("the ferry to Calais")).await;
    save(&*store, a.push_message("Ferry, ferry: 8 o'clock")).await;
    assert_eq!(found(index, &query("ferry")).await, [at("a", 4), at("b", 2), at("a", 2)]);
    assert_eq!(found(index, &query("ferry the")).await, [at("b", 2), at("a", 2)]);
    assert_eq!(found(index, &MessageQuery { limit: 2, ..query("ferry") }).await, [at("a", 4), at("b", 2)]);
    assert_eq!(found(index, &query("ferr")).await, []);
    assert_eq!(found(index, &query("missing ferry")).await, []);
    for word in ["東", "京", "हिन", "train"] {
        assert_eq!(found(index, &query(word)).await, [at("a", 3)], "{word}");
    }
    assert!(found(index, &query("ca* ferry")).await.contains(&at("b", 2)));
    let location = MessageLocation { session: SessionId::new("a").unwrap(), seq: 4, position: 2 };
    let last = MessageQuery { limit: 1, ..query("ferry") };
    assert_eq!(index.find(&last).await.unwrap(), MessageMatches::Found(vec![location]));
    assert_eq!(index.indexed(&a.key).await.unwrap(), [(2, 0), (3, 1), (4, 2)]);
    assert_eq!(index.indexed(&key("default", "unknown")).await.unwrap(), []);
}

/// A search finds only messages of its tenant, and of its user.
pub async fn messages_of_other_users_are_not_found(Fixture { store, .. }: Fixture) {
    let Some(index) = used(&*store).await else { return };
    for (tenant, user) in [("a", "ada"), ("a", "bob"), ("b", "ada")] {
        let user = User::new(user).unwrap();
        let created = SessionCreated { user: user.clone(), ..SessionCreated::default() };
        let mut log = SessionLog::begin(key(tenant, &format!("of-{user}")), created, timestamp(0));
        save(&*store, log.push_message("the ferry")).await;
    }
    let tenant = Tenant::new("a").unwrap();
    let all = MessageQuery { tenant: tenant.clone(), ..query("ferry") };
    assert_eq!(found(index, &all).await, [at("of-bob", 2), at("of-ada", 2)]);
    let own = MessageQuery { user: Some(User::new("ada").unwrap()), ..all };
    assert_eq!(found(index, &own).await, [at("of-ada", 2)]);
    assert_eq!(found(index, &MessageQuery { tenant: Tenant::new("c").unwrap(), ..own }).await, []);
}

/// A commit of many messages, and many commits of one message, are found completely.
pub async fn many_messages_are_found(Fixture { store, .. }: Fixture) {
    let Some(index) = used(&*store).await else { return };
    let mut log = SessionLog::new("s");
    for n in 0..300 {
        log.push_message(&format!("every word{n}"));
    }
    save(&*store, &mut log).await;
    for n in 300..600 {
        save(&*store, log.push_message(&format!("every word{n}"))).await;
    }
    for n in [0, 299, 300, 400, 599] {
        assert_eq!(found(index, &query(&format!("word{n}"))).await, [at("s", n + 2)], "{n}");
    }
    let all = found(index, &MessageQuery { limit: 1000, ..query("every") }).await;
    assert_eq!(all, (2..602).rev().map(|seq| at("s", seq)).collect::<Vec<_>>());
    assert_eq!(found(index, &MessageQuery { limit: 3, ..query("every") }).await, all[..3]);
    rewind(&mut log, 10);
    save(&*store, &mut log).await;
    assert_eq!(found(index, &query("every")).await.len(), 9);
    store.purge(&log.key).await.unwrap();
    assert_eq!(found(index, &query("every")).await, []);
    while index.compact().await.unwrap() {}
    assert_eq!(found(index, &query("every")).await, []);
}

/// A rewind removes what it discards, except for what forks show.
pub async fn discarded_messages_are_not_found(Fixture { store, .. }: Fixture) {
    let Some(index) = used(&*store).await else { return };
    let mut log = SessionLog::new("s");
    for text in ["one", "two", "three", "four"] {
        save(&*store, log.push_message(&format!("word {text}"))).await;
    }
    let mut fork = log.fork("fork", 3);
    save(&*store, fork.push_message("word of the fork")).await;
    rewind(&mut log, 2);
    save(&*store, log.push_message("word again")).await;
    assert_eq!(found(index, &query("word")).await, [at("s", 7), at("fork", 5), at("s", 3), at("s", 2)]);
    assert_eq!(index.indexed(&log.key).await.unwrap(), [(2, 0), (3, 1), (7, 1)]);
    assert_eq!(index.indexed(&fork.key).await.unwrap(), [(5, 2)]);
    // A commit that discards its own messages, and a rewind of a fork into its parent's log.
    log.push_message("word discarded at once");
    rewind(&mut log, 7);
    save(&*store, &mut log).await;
    rewind(&mut fork, 1);
    save(&*store, &mut fork).await;
    assert_eq!(found(index, &query("word")).await, [at("s", 7), at("s", 3), at("s", 2)]);
}

/// A purge removes the messages of a session; a fork that inherits records inherits their entries.
pub async fn purged_messages_are_not_found(Fixture { store, .. }: Fixture) {
    let Some(index) = used(&*store).await else { return };
    let mut log = SessionLog::new("s");
    save(&*store, log.push_message("word one").push_message("word two").push_message("word three")).await;
    let mut fork = log.fork("fork", 3);
    save(&*store, fork.push_message("word four")).await;
    store.purge(&log.key).await.unwrap();
    assert_eq!(found(index, &query("word")).await, [at("fork", 5), at("fork", 3), at("fork", 2)]);
    assert_eq!(index.indexed(&fork.key).await.unwrap(), [(2, 0), (3, 1), (5, 2)]);
    assert_eq!(index.indexed(&log.key).await.unwrap(), []);
    // Messages that are written after the purge to a session with the same id.
    let mut again = SessionLog::begin(log.key.clone(), SessionCreated::default(), timestamp(9));
    save(&*store, again.push_message("word five")).await;
    assert_eq!(found(index, &query("five")).await, [at("s", 2)]);
    store.purge(&fork.key).await.unwrap();
    assert_eq!(found(index, &query("word")).await, [at("s", 2)]);
    assert_eq!(store.check(&[]).await.unwrap(), []);
}

/// A refused commit changes nothing in the index.
pub async fn a_refused_commit_indexes_nothing(Fixture { store, .. }: Fixture) {
    let Some(index) = used(&*store).await else { return };
    let mut log = SessionLog::new("s");
    save(&*store, log.push_message("word one")).await;
    let mut stale = log.clone();
    save(&*store, log.push_message("word two")).await;
    rewind(&mut stale, 1);
    stale.push_message("word three");
    assert_eq!(store.commit(&with_words(stale.commit())).await.unwrap_err().code(), "conflict");
    assert_eq!(found(index, &query("word")).await, [at("s", 3), at("s", 2)]);
}

async fn replace_all(index: &dyn MessageIndex, rules: WordRules, log: &SessionLog) {
    let messages = with_words(Commit::new(None, log.records.clone(), log.head())).message_index.unwrap().added;
    let range = 1..=log.seq();
    let part = SessionIndexPart { rules, key: log.key.clone(), end: log.head().end(), range, messages, is_last: true };
    index.replace(&part).await.unwrap();
}

/// Sessions that were written without words make the index incomplete until they are indexed.
pub async fn unindexed_sessions_are_indexed_in_steps(Fixture { store, .. }: Fixture) {
    let Some(index) = used(&*store).await else { return };
    let mut logs = ["a", "b", "c"].map(SessionLog::new);
    for log in &mut logs {
        save(&*store, log.push_message("word")).await;
    }
    let next = async || index.next_unindexed(RULES).await.unwrap();
    assert_eq!(next().await, None);
    logs[1].push_message("word without index").save(&*store).await;
    assert_eq!(index.find(&query("word")).await.unwrap(), MessageMatches::Unindexed);
    assert_eq!(next().await, Some(logs[1].key.clone()));
    // A part that was computed from an older log.
    let end = logs[1].head().end();
    save(&*store, logs[1].push_message("word")).await;
    let part = SessionIndexPart {
        rules: RULES,
        key: logs[1].key.clone(),
        end,
        range: 1..=9,
        messages: Vec::new(),
        is_last: true,
    };
    assert_eq!(index.replace(&part).await.unwrap_err().code(), "conflict");
    replace_all(index, RULES, &logs[1]).await;
    assert_eq!(next().await, Some(logs[2].key.clone()));
    // A session before the next one is unindexed meanwhile.
    logs[0].push_message("word without index").save(&*store).await;
    replace_all(index, RULES, &logs[2]).await;
    for log in &logs {
        assert_eq!(next().await, Some(log.key.clone()));
        replace_all(index, RULES, log).await;
    }
    assert_eq!(next().await, None);
    let mut all = found(index, &query("word")).await;
    all.sort();
    assert_eq!(all, [at("a", 2), at("a", 3), at("b", 2), at("b", 3), at("b", 4), at("c", 2)]);
    assert_eq!(store.check(&[]).await.unwrap(), []);
    // A session that is purged needs no index.
    let missing = SessionIndexPart { key: key("default", "missing"), ..part };
    index.replace(&missing).await.unwrap();
}

/// Words of other rules are never mixed: the index is emptied.
pub async fn other_rules_empty_the_index(Fixture { store, .. }: Fixture) {
    let Some(index) = used(&*store).await else { return };
    let mut log = SessionLog::new("s");
    save(&*store, log.push_message("word")).await;
    let rules = WordRules(8);
    let other = MessageQuery { rules, ..query("word") };
    assert_eq!(index.find(&other).await.unwrap(), MessageMatches::Unindexed);
    assert_eq!(found(index, &query("word")).await, [at("s", 2)]);
    assert_eq!(index.next_unindexed(rules).await.unwrap(), Some(log.key.clone()));
    assert_eq!(index.indexed(&log.key).await.unwrap(), []);
    assert_eq!(index.find(&query("word")).await.unwrap(), MessageMatches::Unindexed);
    // A writer that still has the old rules.
    save(&*store, log.push_message("word")).await;
    replace_all(index, RULES, &log).await;
    assert_eq!(index.indexed(&log.key).await.unwrap(), []);
    replace_all(index, rules, &log).await;
    assert_eq!(index.next_unindexed(rules).await.unwrap(), None);
    assert_eq!(found(index, &other).await, [at("s", 3), at("s", 2)]);
}

/// The index of a persistent store survives a reopen, unless the store builds it when it is first used.
pub async fn the_index_survives_a_reopen(fixture: Fixture) {
    let mut log = SessionLog::new("s");
    {
        let store = fixture.store.clone();
        if used(&*store).await.is_none() {
            return;
        }
        save(&*store, log.push_message("word one").push_message("word two")).await;
    }
    let Some(fixture) = fixture.reopen().await else { return };
    let store = &fixture.store;
    let index = store.message_index().unwrap();
    if index.find(&query("word")).await.unwrap() == MessageMatches::Unindexed {
        assert_eq!(index.next_unindexed(RULES).await.unwrap(), Some(log.key.clone()));
        replace_all(index, RULES, &log).await;
        assert_eq!(index.next_unindexed(RULES).await.unwrap(), None);
    }
    assert_eq!(found(index, &query("word")).await, [at("s", 3), at("s", 2)]);
    save(&**store, log.push_message("word three")).await;
    assert_eq!(found(index, &query("three")).await, [at("s", 4)]);
    assert_eq!(index.indexed(&log.key).await.unwrap(), [(2, 0), (3, 1), (4, 2)]);
}
