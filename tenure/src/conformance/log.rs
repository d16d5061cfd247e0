//! Commits and the log: every acknowledged commit reads back exactly, and nothing else does.

use super::fixture::Fixture;
use crate::store::contract::{Commit, HeadCheck, MAX_PAGE_BYTES};
use crate::store::item::Owner;
use crate::store::query::{ReadDirection, RecordRange};
use crate::testing::records::{
    SessionLog, assert_fails, blob, item, key, namespace, read, read_all, session_namespace, state, timestamp,
};
use crate::types::decision_chain::DecisionHash;
use crate::types::entry::{
    CheckpointEntry, Decision, Entry, LeaseClaim, MessageEntry, Origin, Patch, Record, ReviewDecided, ReviewOpened,
    ReviewTimeout, RewindEntry, RunOutcome, SessionCreated, SessionPatch,
};
use crate::types::error::Error;
use crate::types::head::{Head, LogEnd};
use crate::types::id::{CheckpointLabel, ReviewId, RunId, SessionId, Tenant, User};
use crate::types::message::Message;
use crate::types::status::Status;
use jiff::Timestamp;
use serde_json::{Map, Value, json};
use std::slice::from_ref;

fn map(value: Value) -> Map<String, Value> {
    value.as_object().cloned().unwrap()
}

/// One entry of every kind except `created`, with all fields set, and once with none.
pub(super) fn every_kind() -> Vec<Entry> {
    let run = RunId::new("run-1").unwrap();
    let until = timestamp(99);
    let review = ReviewId::new("rev_1_s:1").unwrap();
    let digest = SessionLog::new("x").push_message("one").head().digest;
    let text = Patch::Set("Ein schöner \"Titel\"".to_owned());
    let tags = Patch::Set(vec!["a".to_owned(), "b\0c".to_owned()]);
    let metadata = map(json!({"a": {"b": null}, "c": [1, 2.5, "x"], "d": null}));
    let detail = map(json!({"n": u64::MAX, "s": "\u{0}\n"}));
    vec![
        Entry::message(Message::user("hi")),
        Entry::Message(MessageEntry {
            replaces_instructions: true,
            ..MessageEntry::by_run(&run, Message::system("Be brief."))
        }),
        Entry::Checkpoint(CheckpointEntry {
            label: CheckpointLabel::new("vor dem Löschen").unwrap(),
            auto: true,
            run: Some(run.clone()),
            step: Some(7),
            state: detail.clone(),
        }),
        Entry::Checkpoint(CheckpointEntry {
            label: CheckpointLabel::new("plain").unwrap(),
            auto: false,
            run: None,
            step: None,
            state: Map::new(),
        }),
        Entry::Rewound(RewindEntry { to: 2, digest }),
        Entry::info(SessionPatch { model: Patch::Clear, title: text, tags, metadata }),
        Entry::info(SessionPatch::default()),
        Entry::Status { to: Status::Paused, reason: Some("a person must look".to_owned()), until: None },
        Entry::Status { to: Status::Active, reason: None, until: None },
        Entry::Status { to: Status::Paused, reason: None, until: Some(timestamp(99)) },
        Entry::RunStarted { run: run.clone(), claim: None, detail: detail.clone() },
        Entry::RunStarted {
            run: run.clone(),
            claim: Some(LeaseClaim { node: "n".to_owned(), until: timestamp(98) }),
            detail: Map::new(),
        },
        Entry::RunClaimed { run: run.clone(), claim: LeaseClaim { node: "node/1 ☃".to_owned(), until } },
        Entry::ToolStarted {
            run: run.clone(),
            call: "call_1".to_owned(),
            tool: "search".to_owned(),
            detail: detail.clone(),
        },
        Entry::review_opened(ReviewOpened {
            review: review.clone(),
            step: "pay".to_owned(),
            run: Some(run.clone()),
            call: Some("call_1".to_owned()),
            queue: Some("finance".to_owned()),
            lost: true,
            timeout: Some(ReviewTimeout { at: timestamp(120), decision: Decision::Rejected }),
            detail,
        }),
        Entry::ReviewClaimed { review: review.clone(), by: Some("bob".to_owned()), until: Some(timestamp(110)) },
        Entry::ReviewClaimed { review: review.clone(), by: None, until: None },
        Entry::review_decided(ReviewDecided {
            review,
            step: "pay".to_owned(),
            decision: Decision::Corrected,
            reviewer: "bob".to_owned(),
            notes: Some("less".to_owned()),
            arguments: Some(json!({"amount": 1e-7})),
            previous: Some(DecisionHash([7; 32])),
        }),
        Entry::Compacted { upto: 2, summary: Message::parse(r#"{ "role":"user" , "content":"\u00e4" }"#).ok() },
        Entry::Compacted { upto: 0, summary: None },
        Entry::RunEnded {
            run,
            outcome: RunOutcome::Failed,
            error: Some("it was late".to_owned()),
            code: Some("late".to_owned()),
        },
    ]
}

/// A session with every kind of entry.
pub(super) fn rich(id: &str) -> SessionLog {
    let created = SessionCreated {
        user: User::new("Ada \"L\" Ü").unwrap(),
        assistant: Some("it's".to_owned()),
        thread: Some("thread/1".to_owned()),
        model: Some("m".to_owned()),
        title: Some("A\0B 'C' Ä".to_owned()),
        tags: vec!["x".to_owned(), "x".to_owned(), String::new()],
        metadata: map(json!({"n": 1.50, "big": u64::MAX, "o": {"z": 1, "a": [true, null]}, "\0": "\0"})),
        parent: None,
        original_created_at: None,
        decisions: None,
        origin: Some(Origin { export: "ab".repeat(32), at: timestamp(7), upto: 2 }),
    };
    let mut log = SessionLog::begin(key("default", id), created, timestamp(0));
    for entry in every_kind() {
        log.push(entry);
    }
    log
}

/// A created session has the head and the records it was created with.
pub async fn a_created_session_reads_back(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("s");
    log.push_message("one").push_message("two").save(&*store).await;
    assert_eq!(store.head(&log.key).await.unwrap(), Some(log.head()));
    assert_eq!(read_all(&*store, &log.key).await, log.records);
    log.push_message("three").save(&*store).await;
    assert_eq!(store.head(&log.key).await.unwrap(), Some(log.head()));
    assert_eq!(read_all(&*store, &log.key).await, log.records);
}

/// The non-blocking head check returns the current head after each commit and after a purge, if the
/// store has one.
pub async fn a_head_check_returns_the_current_head(Fixture { store, .. }: Fixture) {
    let Some(checker) = store.head_checker() else { return };
    let mut log = SessionLog::new("s");
    for n in 0..50 {
        log.push_message(&n.to_string()).save(&*store).await;
        for _ in 0..2 {
            let current = log.head().to_json();
            let outdated = Head { seq: 0, ..log.head() }.to_json();
            for known in ["", &outdated, &current] {
                match checker.head_if_changed(&log.key, known) {
                    Some(Ok(HeadCheck::Unchanged)) => assert_eq!(known, current),
                    Some(result) => assert_eq!(result.unwrap(), HeadCheck::Current(Some(Box::new(log.head())))),
                    None => {}
                }
            }
            assert_eq!(store.head(&log.key).await.unwrap(), Some(log.head()));
        }
    }
    store.purge(&log.key).await.unwrap();
    let known = log.head().to_json();
    assert!(checker.head_if_changed(&log.key, &known).is_none_or(|result| result.unwrap() == HeadCheck::Current(None)));
}

/// Entries of every kind round-trip.
pub async fn every_kind_of_entry_reads_back(Fixture { store, .. }: Fixture) {
    let mut log = rich("s");
    log.save(&*store).await;
    assert_eq!(store.head(&log.key).await.unwrap(), Some(log.head()));
    assert_eq!(read_all(&*store, &log.key).await, log.records);
}

/// Timestamps are stored to the microsecond. They may repeat, go backwards, or be far in the past
/// or future.
pub async fn times_are_stored_to_the_microsecond(Fixture { store, .. }: Fixture) {
    let times = ["2026-03-29T00:59:59.999999Z", "2026-03-29T00:59:59.999999Z", "1969-12-31T23:59:59.999999Z"];
    let times =
        times.into_iter().chain(["1970-01-01T00:00:00.000001Z", "0001-01-01T00:00:00Z", "9999-12-30T12:00:00.123456Z"]);
    for (n, time) in times.clone().enumerate() {
        let at: Timestamp = time.parse().unwrap();
        let mut log = SessionLog::begin(key("default", &format!("s{n}")), SessionCreated::default(), at);
        for other in times.clone() {
            log.push_at(other.parse().unwrap(), Entry::message(Message::user(other)));
        }
        let mut commit = log.commit();
        commit.head.due_at = Some(at);
        store.commit(&commit).await.unwrap();
        assert_eq!(store.head(&log.key).await.unwrap(), Some(commit.head));
        assert_eq!(read_all(&*store, &log.key).await, log.records);
    }
}

/// Message text is stored byte for byte: escapes, numbers, key order, whitespace.
pub async fn messages_are_stored_byte_for_byte(Fixture { store, .. }: Fixture) {
    let texts = [
        r#"{"role":"user","content":"äöü €😀 \ud83d\ude00 \u00e4 \\ \" \/ \b\f\n\r\t"}"#,
        r#"{"role":"user","content":"a\u0000b\u0001\u001f\u007f"}"#,
        r#"{"content":"the role comes last","n":12345678901234567890123,"f":1.50,"e":1E+2,"m":-0.0,"role":"user"}"#,
        "{  \"role\" : \"assistant\" ,\t\"content\":null,\"z\":1,\"a\":{ \"y\":[ ],\"x\":{ } } }",
        r#"{"role":"user","content":"lone \ud800 surrogate? no: \u2028 \u2029 '; drop table records; -- $1 ?1 :a @b"}"#,
        r#"{"role":"user","content":[{"type":"text","text":""},{"type":"text","text":"x"}],"name":""}"#,
        r#"{"role":"user","content":"twice","role2":1,"x":1,"x":2}"#,
        "{\"role\":\"user\",\"content\":\"\u{7f}\u{85}\u{a0}\u{200b}\u{feff}\u{fffd}\u{10ffff}\"}",
    ];
    let mut log = SessionLog::new("s");
    for text in texts {
        // Invalid messages never reach the store.
        if let Ok(message) = Message::parse(text) {
            assert_eq!(message.as_str(), text);
            log.push(Entry::message(message));
        }
    }
    assert!(log.records.len() > 6, "most of the texts are messages");
    log.save(&*store).await;
    assert_eq!(read_all(&*store, &log.key).await, log.records);
}

/// Messages of a megabyte, and messages larger than a page, are stored.
pub async fn large_messages_are_stored(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("s");
    log.push_message(&"ä\\\"".repeat(1 << 18))
        .push_message("small")
        .push_message(&"y".repeat(MAX_PAGE_BYTES + 1))
        .push_message("last")
        .save(&*store)
        .await;
    assert!(read_all(&*store, &log.key).await == log.records, "the large messages differ");
}

/// Creating an existing session fails and changes nothing.
pub async fn an_existing_session_is_not_created_again(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("s");
    log.push_message("one").save(&*store).await;
    let before = state(&*store, &[], &[]).await;
    let duplicate = SessionLog::new("s").push_message("other").commit();
    assert_fails(store.commit(&duplicate).await, Error::Exists { session_id: log.key.session.clone() });
    assert_eq!(state(&*store, &[], &[]).await, before);
}

/// A commit whose base is not the end of the log is rejected and changes nothing.
pub async fn a_stale_base_is_refused(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("s");
    log.push_message("one").push_message("two").save(&*store).await;
    let before = state(&*store, &[], &[]).await;
    for base in [0, 1, 2, 4, 1 << 40] {
        let record = Record { seq: base + 1, at: timestamp(9), entry: Entry::message(Message::user("no")) };
        let mut head = log.head();
        head.seq = base + 1;
        let end = LogEnd { seq: base, ..log.head().end() };
        let refused = store.commit(&Commit::new(Some(end), vec![record], head.clone())).await;
        assert_fails(refused, Error::Conflict { session_id: log.key.session.clone(), expected: base });
        head.seq = base;
        let refused = store.commit(&Commit::new(Some(end), Vec::new(), head)).await;
        assert_fails(refused, Error::Conflict { session_id: log.key.session.clone(), expected: base });
    }
    assert_eq!(state(&*store, &[], &[]).await, before);
}

/// A store that lost the last commits of a session (a restored backup, an asynchronous failover),
/// after which other writers continued. A writer that still caches the lost records is rejected,
/// however long the log has become, and changes nothing (D-007).
pub async fn a_store_that_went_back_in_time(Fixture { store, .. }: Fixture) {
    let title =
        |title: &str| Entry::info(SessionPatch { title: Patch::Set(title.to_owned()), ..SessionPatch::default() });
    let variants = [
        ("text", Entry::message(Message::user("lost")), Entry::message(Message::user("other"))),
        // Records that are not messages count too.
        ("info", title("lost"), title("other")),
    ];
    for (id, lost, other) in variants {
        let mut stored = SessionLog::new(id);
        stored.push_message("one").save(&*store).await;
        let mut writer = stored.clone();
        // Same times and same last record: only the earlier records distinguish the two logs.
        writer.push(lost).push_message("last").commit();
        stored.push(other).push_message("last").save(&*store).await;
        assert_eq!((writer.seq(), writer.records.last()), (stored.seq(), stored.records.last()));
        let before = state(&*store, &[], &[]).await;

        let conflict = || Error::Conflict { session_id: stored.key.session.clone(), expected: 4 };
        let renewal = Commit::new(Some(writer.head().end()), Vec::new(), writer.head());
        assert_fails(store.commit(&renewal).await, conflict());
        assert_fails(store.commit(&writer.push_message("next").commit()).await, conflict());
        assert_eq!(state(&*store, &[], &[]).await, before);
        stored.push_message("next").save(&*store).await;
        assert_eq!(store.head(&stored.key).await.unwrap(), Some(stored.head()));
    }
}

/// Appending to a missing session fails.
pub async fn an_append_to_an_unknown_session_is_refused(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("s");
    log.commit();
    let next = log.push_message("one").commit();
    assert_fails(store.commit(&next).await, Error::NotFound { session_id: log.key.session.clone() });
    let head_only = Commit { records: Vec::new(), base: Some(log.head().end()), ..next };
    assert_fails(store.commit(&head_only).await, Error::NotFound { session_id: log.key.session.clone() });
    assert_eq!(store.head(&log.key).await.unwrap(), None);
}

/// Items and blobs are visible together with the records of their commit, also in the commit that
/// creates the session.
pub async fn a_commit_stores_its_items_and_blobs(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("s");
    let (cache, notes) = (session_namespace(&log.key, "cache"), session_namespace(&log.key, "notes"));
    let (one, two, three) = (item("k", 1), item("l", 2), item("k", 3));
    let picture = blob("a picture");
    let mut commit = log.commit();
    commit.items = vec![("cache".to_owned(), one.clone()), ("cache".to_owned(), two.clone())];
    store.commit(&commit).await.unwrap();
    assert_eq!(state(&*store, from_ref(&cache), &[]).await.items, [[one, two.clone()]]);

    let mut commit = log.push_message("next").commit();
    commit.items = vec![("cache".to_owned(), three.clone()), ("notes".to_owned(), two.clone())];
    commit.blobs = vec![picture.clone()];
    store.commit(&commit).await.unwrap();
    let now = state(&*store, &[cache, notes], from_ref(&picture)).await;
    assert_eq!(now.items, [vec![three, two.clone()], vec![two]]);
    assert_eq!(now.blobs, [Some(picture.bytes)]);
}

/// A commit is atomic: if it is rejected, its items and blobs are not stored either.
pub async fn a_refused_commit_stores_nothing(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("s");
    log.push_message("one").save(&*store).await;
    let namespaces = [session_namespace(&log.key, "cache"), session_namespace(&key("default", "t"), "cache")];
    let pictures = [blob("a picture")];
    let before = state(&*store, &namespaces, &pictures).await;
    let with = |commit| Commit { items: vec![("cache".to_owned(), item("k", 1))], blobs: pictures.to_vec(), ..commit };

    let exists = with(SessionLog::new("s").commit());
    assert_eq!(store.commit(&exists).await.unwrap_err().code(), "exists");
    let mut stale = log.clone();
    stale.push_message("two").save(&*store).await;
    let conflict = with(log.push_message("three").commit());
    assert_eq!(store.commit(&conflict).await.unwrap_err().code(), "conflict");
    let orphan = with(SessionLog::new("gone").push_message("x").fork("t", 2).commit());
    assert_eq!(store.commit(&orphan).await.unwrap_err().code(), "not_found");
    let invalid = with(Commit { records: Vec::new(), ..SessionLog::new("t").commit() });
    assert_eq!(store.commit(&invalid).await.unwrap_err().code(), "invalid");

    let after = state(&*store, &namespaces, &pictures).await;
    assert_eq!((after.heads, after.logs), (vec![stale.head()], vec![stale.records]));
    assert_eq!((after.items, after.blobs), (before.items, before.blobs));
}

/// Records with a gap, a duplicate, a wrong start or a wrong end are rejected and change nothing.
pub async fn invalid_commits_are_refused(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("s");
    log.push_message("one").save(&*store).await;
    let before = state(&*store, &[], &[]).await;
    let next = log.clone().push_message("two").push_message("three").push_message("four").commit();
    let create = SessionLog::new("t").push_message("one").push_message("two").commit();
    let mut invalid = Vec::new();
    for commit in [&next, &create] {
        let mut with = |change: &dyn Fn(&mut Commit)| {
            let mut commit = commit.clone();
            change(&mut commit);
            invalid.push(commit);
        };
        with(&|c| drop(c.records.remove(0)));
        with(&|c| drop(c.records.remove(1)));
        with(&|c| drop(c.records.pop()));
        with(&|c| c.records.swap(0, 1));
        with(&|c| c.records[1].seq = c.records[0].seq);
        with(&|c| c.records.iter_mut().for_each(|r| r.seq += 1));
        with(&|c| c.head.seq += 1);
        with(&|c| c.head.seq -= 1);
        // Without new records, the head must end where the log does.
        with(&|c| c.records.clear());
    }
    for commit in invalid {
        let code = store.commit(&commit).await.map_err(|e| e.code());
        assert_eq!(code, Err("invalid"), "{commit:?}");
    }
    assert_eq!(state(&*store, &[], &[]).await, before);
}

/// A commit without records changes only the head.
pub async fn the_head_can_change_alone(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("s");
    let run = RunId::new("r").unwrap();
    log.push(Entry::RunStarted { run: run.clone(), claim: None, detail: Map::new() });
    log.push(Entry::RunClaimed { run, claim: LeaseClaim { node: "n".to_owned(), until: timestamp(60) } })
        .save(&*store)
        .await;
    for seconds in [100, 200] {
        let mut head = log.head();
        head.due_at = Some(timestamp(seconds));
        head.lease.as_mut().unwrap().until = timestamp(seconds);
        store.commit(&Commit::new(Some(head.end()), Vec::new(), head.clone())).await.unwrap();
        assert_eq!(store.head(&log.key).await.unwrap(), Some(head));
        assert_eq!(read_all(&*store, &log.key).await, log.records);
    }
}

/// Records can be read in any range, in either direction, with any limit.
pub async fn records_are_read_in_ranges(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("s");
    for n in 2..=6 {
        log.push_message(&n.to_string()).save(&*store).await;
    }
    let bounds = [0, 1, 2, 4, 6, 7, u64::MAX];
    for (after, upto) in bounds.iter().flat_map(|after| bounds.map(|upto| (*after, upto))) {
        let all: Vec<_> = log.records.iter().filter(|r| r.seq > after && r.seq <= upto).cloned().collect();
        for limit in [0, 1, 3, 6, usize::MAX] {
            let range = RecordRange { after, upto, order: ReadDirection::Forward, limit };
            let want: Vec<_> = all.iter().take(limit).cloned().collect();
            assert_eq!(read(&*store, &log.key, &range).await, want, "{range:?}");
            let range = RecordRange { order: ReadDirection::Backward, ..range };
            let want: Vec<_> = all.iter().rev().take(limit).cloned().collect();
            assert_eq!(read(&*store, &log.key, &range).await, want, "{range:?}");
        }
    }
}

/// A long log is read in pages of bounded size, in either direction, without duplicates or gaps.
pub async fn long_logs_come_in_pages(Fixture { store, .. }: Fixture) {
    const LARGE: usize = 700 << 10;
    let mut log = SessionLog::new("s");
    for n in 0..4 {
        for m in 0..6 {
            log.push_message(&format!("{n}.{m} {}", "x".repeat(LARGE)));
        }
        log.save(&*store).await;
    }
    let page = store.records(&log.key, &RecordRange::after(0)).await.unwrap();
    let bytes: usize = page.iter().map(|r| r.entry.encode().len()).sum();
    assert!(bytes <= MAX_PAGE_BYTES + 2 * LARGE, "a page has {bytes} bytes");
    assert!(!page.is_empty() && log.records.starts_with(&page), "the first page must start at the first record");
    assert!(read_all(&*store, &log.key).await == log.records, "reading forward, the pages do not add up to the log");
    let page = store.records(&log.key, &RecordRange::back_from(u64::MAX, usize::MAX)).await.unwrap();
    let bytes: usize = page.iter().map(|r| r.entry.encode().len()).sum();
    assert!(bytes <= MAX_PAGE_BYTES + 2 * LARGE, "a page has {bytes} bytes");
    let mut backward = read(&*store, &log.key, &RecordRange::back_from(u64::MAX, usize::MAX)).await;
    backward.reverse();
    assert!(backward == log.records, "reading backward, the pages do not add up to the log");
}

/// The end of a long log can be read without reading the records before it.
pub async fn the_tail_of_a_long_log_is_read_alone(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("s");
    for n in 2..=5000 {
        log.push_message(&n.to_string());
        if n % 1000 == 0 {
            log.save(&*store).await;
        }
    }
    let tail: Vec<_> = log.records.iter().rev().take(10).cloned().collect();
    assert_eq!(read(&*store, &log.key, &RecordRange::back_from(u64::MAX, 10)).await, tail);
    assert_eq!(read(&*store, &log.key, &RecordRange::after(4990)).await, log.records[4990..]);
    assert_eq!(
        read(&*store, &log.key, &RecordRange::back_from(3000, 2)).await,
        [log.records[2999].clone(), log.records[2998].clone()]
    );
}

/// A missing session has no head, records or items; reading it is not an error.
pub async fn an_unknown_session_is_empty(Fixture { store, .. }: Fixture) {
    SessionLog::new("other").push_message("one").save(&*store).await;
    let missing = key("default", "s");
    assert_eq!(store.head(&missing).await.unwrap(), None);
    assert_eq!(store.records(&missing, &RecordRange::after(0)).await.unwrap(), []);
    assert_eq!(store.records(&missing, &RecordRange::back_from(9, 9)).await.unwrap(), []);
    let cache = session_namespace(&missing, "cache");
    assert_eq!(store.items(&cache, None, 9).await.unwrap(), []);
    assert_eq!(store.get(&cache, "k", Some(timestamp(1))).await.unwrap(), None);
    assert!(!store.remove(&cache, "k").await.unwrap());
}

/// Ids are scoped by tenant: one id in two tenants is two sessions.
pub async fn tenants_have_logs_of_their_own(Fixture { store, .. }: Fixture) {
    let mut logs =
        ["a", "b"].map(|tenant| SessionLog::begin(key(tenant, "s"), SessionCreated::default(), timestamp(0)));
    for (n, log) in logs.iter_mut().enumerate() {
        log.push_message(if n == 0 { "first" } else { "second" }).save(&*store).await;
    }
    logs[0].push_message("more").save(&*store).await;
    for log in &logs {
        assert_eq!(store.head(&log.key).await.unwrap(), Some(log.head()));
        assert_eq!(read_all(&*store, &log.key).await, log.records);
    }
    assert_eq!(store.head(&key("c", "s")).await.unwrap(), None);
    // Namespaces are separated by tenant too.
    let of = |tenant: &str| crate::store::item::Namespace {
        tenant: Tenant::new(tenant).unwrap(),
        ..namespace(Owner::Session(SessionId::new("s").unwrap()), "x")
    };
    store.put(&of("a"), &item("k", 1), None).await.unwrap();
    assert_eq!(store.items(&of("b"), None, 9).await.unwrap(), []);
}
