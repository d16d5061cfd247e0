//! Tests specific to JSONL files. The conformance suite tests the behavior common to all stores.

mod crash;
mod model;
mod purging;

use super::*;
use crate::store::contract::FORMAT;
use crate::store::query::{OwnerFilter, ReadDirection, SessionOrder};
use crate::testing::blob;
use crate::types::decode_error::DecodeError;
use crate::types::entry::{Entry, Parent, RewindEntry, SessionCreated};
use crate::types::message::Message;
use crate::types::status::Status;
use std::error::Error as _;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

fn at(micros: i64) -> Timestamp {
    Timestamp::from_microsecond(1_767_225_600_000_000 + micros).unwrap()
}

fn key(session: &str) -> SessionKey {
    SessionKey { tenant: Tenant::default(), session: session.try_into().unwrap() }
}

fn user(text: &str) -> Entry {
    Entry::message(Message::user(text))
}

fn item(key: &str, value: &str) -> Item {
    Item::new(key, value, at(0))
}

fn namespace_of(owner: Owner) -> Namespace {
    Namespace { tenant: Tenant::default(), owner, name: "cache".into() }
}

fn session_namespace(session: &str) -> Namespace {
    namespace_of(Owner::Session(session.try_into().unwrap()))
}

/// Creates the first commit of a session.
fn begin(key: &SessionKey, entries: &[Entry]) -> Commit {
    begin_at(key, 0, SessionCreated::default(), entries)
}

fn begin_at(key: &SessionKey, before: u64, created: SessionCreated, entries: &[Entry]) -> Commit {
    let first = Record { seq: before + 1, at: at(before as i64), entry: Entry::created(created) };
    let head = Head::begin(key, &first).unwrap();
    let mut commit = next(&head, entries);
    commit.base = None;
    commit.records.insert(0, first);
    commit
}

/// Creates the first commit of a fork.
fn fork(key: &SessionKey, parent: &Head, seq: u64) -> Commit {
    let parent = Parent { session: parent.info.session_id.clone(), seq, digest: parent.digest.clone() };
    begin_at(
        key,
        seq,
        SessionCreated { parent: Some(parent), ..SessionCreated::default() },
        &[user(&format!("in {key}"))],
    )
}

/// Creates the next commit of a session.
fn next(head: &Head, entries: &[Entry]) -> Commit {
    let mut after = head.clone();
    let record = |(seq, entry): (u64, &Entry)| {
        let record = Record { seq, at: at(seq as i64), entry: entry.clone() };
        after.apply(&record);
        record
    };
    let records = (head.seq + 1..).zip(entries).map(record).collect();
    Commit::new(Some(head.end()), records, after)
}

async fn open(dir: &TempDir) -> JsonlStore {
    let (store, repairs) = JsonlStore::open(dir.path().to_str().unwrap()).await.unwrap();
    assert_eq!(repairs, []);
    store
}

async fn open_repaired(dir: &Path) -> (JsonlStore, Vec<OpenRepair>) {
    JsonlStore::open(dir.to_str().unwrap()).await.unwrap()
}

/// Reads everything that a store returns for a session.
async fn read_session(store: &dyn Store, key: &SessionKey) -> (Option<Head>, Vec<Record>, Vec<Item>) {
    let head = store.head(key).await.unwrap();
    let records = store.records(key, &RecordRange::after(0)).await.unwrap();
    let items = store.items(&session_namespace(key.session.as_str()), None, 1000).await.unwrap();
    (head, records, items)
}

#[tokio::test]
async fn a_session_is_restored_byte_for_byte() {
    let dir = TempDir::new().unwrap();
    let (store, key) = (open(&dir).await, key("s1"));
    let raw = r#"{"role":"user", "content":"na\u00efve \ud83d\ude00 \u0000", "n":1.10e+2, "x":{"b":1,"a":[2]}}"#;
    let mut first = begin(&key, &[Entry::message(Message::parse(raw).unwrap())]);
    first.head.due_at = Some(at(99));
    first.items.push(("cache".into(), item("k", "{\"a\":\n1}")));
    first.blobs.push(blob(b"picture"));
    store.commit(&first).await.unwrap();
    let second = next(&first.head, &[user("two"), user("three")]);
    store.commit(&second).await.unwrap();
    let mut third = next(&second.head, &[]);
    third.head.due_at = None;
    store.commit(&third).await.unwrap();

    let before = read_session(&store, &key).await;
    assert_eq!(before.0.as_ref(), Some(&third.head));
    drop(store);
    let store = open(&dir).await;
    assert_eq!(read_session(&store, &key).await, before);
    let Entry::Message(entry) = &before.1[1].entry else { panic!("not a message") };
    assert_eq!(entry.message.as_str(), raw);
    assert_eq!(store.blob(&key.tenant, &BlobId::of(b"picture")).await.unwrap().as_deref(), Some(&b"picture"[..]));

    // Every line is a JSON object, and only the last line of a commit has a checksum.
    let text = fs::read_to_string(dir.path().join("default/s1.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let seqs: Vec<_> = lines.iter().map(|l| l["seq"].as_u64()).collect();
    assert_eq!(seqs, [None, Some(1), Some(2), Some(3), Some(4), None]);
    let with_checksum: Vec<_> = lines.iter().map(|l| l["sum"].is_string()).collect();
    assert_eq!(with_checksum, [false, false, true, false, true, true]);
    let with_head: Vec<_> = lines.iter().map(|l| l["head"].is_object()).collect();
    assert_eq!(
        with_head,
        [false, false, true, false, false, true],
        "a head is written only where it does not follow from the records"
    );
    assert_eq!(lines[3]["entry"]["message"]["body"]["content"], "two");
    assert_eq!(lines[3]["at"], "2026-01-01T00:00:00.000003Z");
}

#[tokio::test]
async fn errors_keep_their_source() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    let commit = begin(&key("a"), &[user("secret")]);
    store.commit(&commit).await.unwrap();
    let path = paths::LogFile::session(&key("a")).path(dir.path());
    let text = std::fs::read_to_string(&path).unwrap();

    // A record that cannot be parsed: the message does not quote it, the source is the parser's error.
    std::fs::write(&path, text.replace(r#""seq":2"#, r#""seq":!"#)).unwrap();
    let error = store.records(&key("a"), &RecordRange::after(1)).await.unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }) && !error.to_string().contains("secret"), "{error}");
    let line = error.source().and_then(|source| source.downcast_ref::<DecodeError>()).unwrap();
    assert!(line.source().unwrap().is::<serde_json::Error>());

    std::fs::remove_file(&path).unwrap();
    let error = store.records(&key("a"), &RecordRange::after(0)).await.unwrap_err();
    let cause = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
    assert_eq!(cause.map(|e| e.kind()), Some(std::io::ErrorKind::NotFound), "{error}");
}

#[tokio::test]
async fn one_process_at_a_time() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir).await;
    let path = dir.path().to_str().unwrap();
    assert_eq!(JsonlStore::open(path).await.unwrap_err().code(), "locked");
    drop(store);
    open(&dir).await;
}

#[tokio::test]
async fn a_newer_format_and_a_foreign_directory_are_refused() {
    let dir = TempDir::new().unwrap();
    drop(open(&dir).await);
    let (path, format) = (dir.path().to_str().unwrap(), dir.path().join("format"));
    assert_eq!(fs::read_to_string(&format).unwrap(), format!("{FORMAT}\n"));
    for (text, code) in [("99\n", "newer_format"), ("", "corrupt"), ("0", "corrupt"), ("x", "corrupt")] {
        fs::write(&format, text).unwrap();
        assert_eq!(JsonlStore::open(path).await.unwrap_err().code(), code, "{text:?}");
    }
    fs::remove_file(&format).unwrap();
    drop(open(&dir).await);
    fs::remove_file(&format).unwrap();
    fs::write(dir.path().join("thesis.tex"), "x").unwrap();
    assert_eq!(JsonlStore::open(path).await.unwrap_err().code(), "invalid");
    assert!(!format.exists());
    assert_eq!(JsonlStore::open("").await.unwrap_err().code(), "invalid");
}

#[tokio::test]
async fn the_tail_of_a_long_log_is_read_alone() {
    let dir = TempDir::new().unwrap();
    let (store, key) = (open(&dir).await, key("long"));
    let entries: Vec<_> = (0..100_000).map(|i| user(&format!("message {i}"))).collect();
    store.commit(&begin(&key, &entries)).await.unwrap();
    // Overwrite the first half: a read of more than the tail now finds damage.
    let path = dir.path().join("default/long.jsonl");
    let mut bytes = fs::read(&path).unwrap();
    let half = bytes.len() / 2;
    bytes[..half].fill(b'x');
    fs::write(&path, &bytes).unwrap();
    let tail = store.records(&key, &RecordRange::back_from(u64::MAX, 20)).await.unwrap();
    let seqs: Vec<_> = tail.iter().map(|r| r.seq).collect();
    assert_eq!(seqs, (99_982..=100_001).rev().collect::<Vec<_>>());
    let range = RecordRange { after: 90_000, upto: 90_003, order: ReadDirection::Forward, limit: 2 };
    let some = store.records(&key, &range).await.unwrap();
    assert_eq!(some.iter().map(|r| r.seq).collect::<Vec<_>>(), [90_001, 90_002]);
    assert_eq!(store.records(&key, &RecordRange { upto: 0, ..range.clone() }).await.unwrap(), []);
    assert_eq!(store.records(&key, &RecordRange { after: u64::MAX, ..range }).await.unwrap(), []);
    let error = store.records(&key, &RecordRange::after(0)).await.unwrap_err();
    assert!(error.to_string().contains("long.jsonl:1:"), "{error}");
}

#[tokio::test]
async fn a_page_is_bounded_and_continues_after_its_last_record() {
    let dir = TempDir::new().unwrap();
    let (store, key) = (open(&dir).await, key("big"));
    let big = "x".repeat(3 << 20);
    let entries: Vec<_> = (0..5).map(|_| user(&big)).chain([user(&"y".repeat(9 << 20))]).collect();
    store.commit(&begin(&key, &entries)).await.unwrap();
    for order in [ReadDirection::Forward, ReadDirection::Backward] {
        let mut seqs = Vec::new();
        let mut pages = 0;
        let mut range = RecordRange { order, ..RecordRange::after(0) };
        loop {
            let page = store.records(&key, &range).await.unwrap();
            let Some(last) = page.last() else { break };
            match order {
                ReadDirection::Forward => range.after = last.seq,
                ReadDirection::Backward => range.upto = last.seq - 1,
            }
            seqs.extend(page.iter().map(|r| r.seq));
            pages += 1;
        }
        seqs.sort();
        assert_eq!(seqs, (1..=7).collect::<Vec<_>>());
        assert_eq!(pages, 4);
    }
}

#[tokio::test]
async fn discarded_messages_are_copied_to_a_readable_file() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir).await;
    let one = key("a");
    let two = key("a.discarded");
    for key in [&one, &two] {
        let first = begin(key, &[user("x"), user(&format!("of {key}"))]);
        store.commit(&first).await.unwrap();
        let rewound = Entry::Rewound(RewindEntry { to: 1, digest: Default::default() });
        store.commit(&next(&first.head, &[rewound])).await.unwrap();
    }
    let read = |name: &str| fs::read_to_string(dir.path().join("default").join(name)).unwrap();
    assert_eq!(read("a.discarded.jsonl").lines().count(), 2);
    assert!(read("a.discarded.jsonl").ends_with("{\"role\":\"user\",\"content\":\"of default/a\"}\n"));
    assert!(read("a%2Ediscarded.discarded.jsonl").contains("of default/a.discarded"));
    drop(store);
    let store = open(&dir).await;
    assert_eq!(store.head(&two).await.unwrap().unwrap().seq, 4);
    store.purge(&one).await.unwrap();
    assert!(!dir.path().join("default/a.discarded.jsonl").exists());
    assert_eq!(store.head(&two).await.unwrap().unwrap().seq, 4);
}

/// A fork's rewind also discards messages that it inherited. Messages that were discarded before are
/// not copied again.
#[tokio::test]
async fn a_fork_copies_the_inherited_messages_that_it_discards() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir).await;
    let parent = begin(&key("p"), &[user("1"), user("2"), user("3")]);
    store.commit(&parent).await.unwrap();
    let mut branch = fork(&key("f"), &parent.head, 3);
    store.commit(&branch).await.unwrap();
    let rewound = |to| Entry::Rewound(RewindEntry { to, digest: Default::default() });
    for entries in [vec![user("4"), user("5")], vec![rewound(6), user("6")], vec![rewound(2), user("7")]] {
        branch = next(&branch.head, &entries);
        store.commit(&branch).await.unwrap();
    }
    let copied = fs::read_to_string(dir.path().join("default/f.discarded.jsonl")).unwrap();
    let contents = copied.lines().map(|line| Message::parse(line).unwrap().text());
    assert_eq!(contents.collect::<Vec<_>>(), ["5", "2", "in default/f", "4", "6"]);
}

#[tokio::test]
async fn a_file_of_dead_items_is_rewritten() {
    let dir = TempDir::new().unwrap();
    let (store, key) = (open(&dir).await, key("s"));
    let mut first = begin(&key, &[user("one")]);
    first.head.due_at = Some(at(5));
    first.blobs.push(blob(b"b"));
    first.items.push(("other".into(), item("stays", "1")));
    store.commit(&first).await.unwrap();
    let mut blob_alone = next(&first.head, &[]);
    blob_alone.blobs.push(blob(b"without a record"));
    store.commit(&blob_alone).await.unwrap();
    let group = namespace_of(Owner::Group("g".repeat(1000)));
    let path = dir.path().join("default/s.jsonl");
    for namespace in [session_namespace("s"), group.clone()] {
        for i in 0..1_010 {
            store.put(&namespace, &item("k", &format!("value {i}")), None).await.unwrap();
            if i == 1_000 {
                store.get(&namespace, "k", Some(at(7))).await.unwrap();
            }
        }
    }
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.lines().count() < 20, "{} lines", text.lines().count());
    let second = next(&first.head, &[user("two")]);
    store.commit(&second).await.unwrap();
    let before = read_session(&store, &key).await;
    assert_eq!(before.0, Some(second.head));
    assert_eq!(before.1.len(), 3);
    let groups = store.items(&group, None, 9).await.unwrap();
    drop(store);
    let store = open(&dir).await;
    assert_eq!(read_session(&store, &key).await, before);
    assert_eq!(store.items(&group, None, 9).await.unwrap(), groups);
    for bytes in [&b"b"[..], b"without a record"] {
        assert!(store.blob(&key.tenant, &BlobId::of(bytes)).await.unwrap().is_some());
    }
}

#[tokio::test]
async fn delete_namespace_leaves_no_bytes() {
    let dir = TempDir::new().unwrap();
    let (store, key) = (open(&dir).await, key("s"));
    let ada = Owner::User("ada".try_into().unwrap());
    let first = begin(&key, &[user("kept")]);
    store.commit(&first).await.unwrap();
    for namespace in [session_namespace("s"), namespace_of(ada.clone()), namespace_of(Owner::Tenant)] {
        store.put(&namespace, &item("a", "secret"), None).await.unwrap();
        store.put(&namespace, &item("b", "kept too"), None).await.unwrap();
        store.remove(&namespace, "a").await.unwrap();
    }
    assert!(any_file_contains(dir.path(), "secret"));
    store.delete_owner(&key.tenant, &ada).await.unwrap();
    assert!(!any_file_contains(dir.path(), "secret"), "removed items of others are gone for good as well");
    assert_eq!(store.items(&namespace_of(ada), None, 9).await.unwrap(), []);
    assert_eq!(store.items(&namespace_of(Owner::Tenant), None, 9).await.unwrap().len(), 1);
    store.delete_owner(&key.tenant, &Owner::Session(key.session.clone())).await.unwrap();
    store.delete_owner(&key.tenant, &Owner::Tenant).await.unwrap();
    assert!(!any_file_contains(dir.path(), "kept too"));
    drop(store);
    let store = open(&dir).await;
    assert_eq!(read_session(&store, &key).await, (Some(first.head), first.records, vec![]));
}

fn any_file_contains(dir: &Path, text: &str) -> bool {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).any(|path| {
        if path.is_dir() {
            any_file_contains(&path, text)
        } else {
            String::from_utf8_lossy(&fs::read(&path).unwrap()).contains(text)
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_sessions_at_once_and_many_writers_of_one() {
    let dir = TempDir::new().unwrap();
    let store = Arc::new(open(&dir).await);
    let shared = key("shared");
    store.commit(&begin(&shared, &[])).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..16 {
        let (store, shared) = (store.clone(), shared.clone());
        tasks.spawn(async move {
            let own = key(&format!("own-{n}"));
            let mut head = begin(&own, &[]).head;
            store.commit(&begin(&own, &[])).await.unwrap();
            for i in 0..5 {
                let mut step = next(&head, &[user(&format!("{i}"))]);
                step.blobs.push(blob(b"the same for all"));
                store.commit(&step).await.unwrap();
                head = step.head;
                loop {
                    let stored = store.head(&shared).await.unwrap().unwrap();
                    match store.commit(&next(&stored, &[user(&format!("{n} {i}"))])).await {
                        Ok(()) => break,
                        Err(e) => assert_eq!(e.code(), "conflict"),
                    }
                    assert!(!store.records(&shared, &RecordRange::back_from(u64::MAX, 3)).await.unwrap().is_empty());
                }
            }
            if n % 2 == 0 {
                store.purge(&own).await.unwrap();
            }
        });
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
    drop(Arc::into_inner(store));
    let store = open(&dir).await;
    let (head, records, _) = read_session(&store, &shared).await;
    assert_eq!(head.unwrap().digest.messages, 80);
    assert_eq!(records.len(), 81);
    assert_eq!(store.heads(&SessionQuery::new(OwnerFilter::AllTenants, 100)).await.unwrap().len(), 9);
    assert!(store.blob(&shared.tenant, &BlobId::of(b"the same for all")).await.unwrap().is_some());
}

#[tokio::test]
async fn blobs_are_verified_and_removed_with_their_last_session() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir).await;
    let tenant = Tenant::default();
    let id = BlobId::of(b"bytes");
    for session in ["a", "b"] {
        let mut first = begin(&key(session), &[user("see")]);
        first.blobs.push(blob(b"bytes"));
        store.commit(&first).await.unwrap();
    }
    assert_eq!(store.blob(&Tenant::new("other").unwrap(), &id).await.unwrap(), None);
    let path = dir.path().join("default/blobs").join(id.to_string());
    store.purge(&key("a")).await.unwrap();
    assert!(path.exists());
    fs::write(&path, b"bytez").unwrap();
    assert_eq!(store.blob(&tenant, &id).await.unwrap_err().code(), "corrupt");
    store.purge(&key("b")).await.unwrap();
    assert!(!path.exists());

    // Leftovers of a crash between writing a blob and the commit.
    fs::write(&path, b"bytes").unwrap();
    fs::write(path.with_extension("0.tmp"), b"by").unwrap();
    drop(store);
    open(&dir).await;
    assert_eq!(fs::read_dir(dir.path().join("default/blobs")).unwrap().count(), 0);
}
