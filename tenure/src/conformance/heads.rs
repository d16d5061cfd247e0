//! Listing heads: filters, order and pagination.

use super::fixture::Fixture;
use crate::store::contract::{Commit, Store};
use crate::store::query::{OwnerFilter, SessionCursor, SessionOrder, SessionQuery};
use crate::testing::records::{SessionLog, head_of, key, timestamp};
use crate::types::digest::VisibleHash;
use crate::types::entry::{
    Decision, Entry, LeaseClaim, ReviewDecided, ReviewOpened, RunOutcome, SessionCreated, SessionPatch,
};
use crate::types::head::{Head, ReviewIndexLabel};
use crate::types::id::{ReviewId, RunId, SessionId, SessionKey, Tenant, User};
use crate::types::message::Message;
use crate::types::status::Status;
use serde_json::{Map, Value, json};

fn all() -> SessionQuery {
    SessionQuery::new(OwnerFilter::Tenant(Tenant::default()), 1000)
}

fn ids(heads: &[Head]) -> Vec<&str> {
    heads.iter().map(|h| h.info.session_id.as_str()).collect()
}

#[track_caller]
fn assert_ids(heads: &[Head], want: &[&str]) {
    assert_eq!(ids(heads), want);
}

/// Creates the sessions ten seconds apart; the last one is the newest.
async fn fill(store: &dyn Store, sessions: impl IntoIterator<Item = (&str, SessionCreated)>) {
    for (n, (id, created)) in sessions.into_iter().enumerate() {
        SessionLog::begin(key("default", id), created, timestamp(n as i64 * 10)).save(store).await;
    }
}

fn tagged(tags: &[&str]) -> SessionCreated {
    SessionCreated { tags: tags.iter().map(|t| t.to_string()).collect(), ..SessionCreated::default() }
}

fn titled(title: &str) -> SessionCreated {
    SessionCreated { title: Some(title.to_owned()), ..SessionCreated::default() }
}

fn with_metadata(metadata: Value) -> SessionCreated {
    SessionCreated { metadata: metadata.as_object().cloned().unwrap(), ..SessionCreated::default() }
}

fn of_user(user: &str) -> SessionCreated {
    SessionCreated { user: User::new(user).unwrap(), ..SessionCreated::default() }
}

/// Heads are ordered by last activity, newest first. Ties are broken by id in descending byte
/// order.
pub async fn the_newest_come_first(Fixture { store, .. }: Fixture) {
    for (id, seconds) in [("a", 5), ("Z", 5), ("a-b", 5), ("a:b", 5), ("a_b", 5), ("aB", 5), ("new", 6), ("old", 4)] {
        SessionLog::begin(key("default", id), SessionCreated::default(), timestamp(seconds)).save(&*store).await;
    }
    let got = store.heads(&all()).await.unwrap();
    assert_ids(&got, &["new", "a_b", "aB", "a:b", "a-b", "a", "Z", "old"]);
    // The order depends on activity, not on creation.
    let mut log = SessionLog::begin(key("default", "z"), SessionCreated::default(), timestamp(0));
    log.push_at(timestamp(7), Entry::message(Message::user("hi"))).save(&*store).await;
    assert_ids(&store.heads(&SessionQuery { limit: 2, ..all() }).await.unwrap(), &["z", "new"]);
}

/// Pagination returns every session exactly once, even if many were active at the same time.
pub async fn a_cursor_leads_through_all_pages(Fixture { store, .. }: Fixture) {
    for n in 0..23 {
        let created = SessionCreated { assistant: (n % 3 != 0).then(|| "x".to_owned()), ..SessionCreated::default() };
        let at = timestamp(i64::from(n) / 6);
        SessionLog::begin(key("default", &format!("s{n}")), created, at).save(&*store).await;
    }
    for assistant in [None, Some("x".to_owned())] {
        let query = SessionQuery { assistant, ..all() };
        let list = store.heads(&query).await.unwrap();
        for limit in [1, 2, 5, 23] {
            let mut pages = Vec::new();
            let mut cursor = None;
            loop {
                let page = store.heads(&SessionQuery { limit, cursor, ..query.clone() }).await.unwrap();
                let Some(last) = page.last() else { break };
                cursor = Some(SessionCursor::of(last));
                pages.extend(page);
                assert!(pages.len() <= list.len(), "the pages contain duplicates: {:?}", ids(&pages));
            }
            assert_eq!(pages, list);
        }
    }
    // A cursor stays valid after its session is purged.
    let list = store.heads(&all()).await.unwrap();
    store.purge(&list[9].key()).await.unwrap();
    let cursor = Some(SessionCursor::of(&list[9]));
    assert_eq!(store.heads(&SessionQuery { cursor, ..all() }).await.unwrap(), list[10..]);
}

/// An offset skips the first heads, also in combination with a cursor.
pub async fn an_offset_skips_the_first(Fixture { store, .. }: Fixture) {
    fill(&*store, ["a", "b", "c", "d", "e"].map(|id| (id, SessionCreated::default()))).await;
    let page = |offset, limit| SessionQuery { offset, limit, ..all() };
    assert_ids(&store.heads(&page(0, 2)).await.unwrap(), &["e", "d"]);
    assert_ids(&store.heads(&page(2, 2)).await.unwrap(), &["c", "b"]);
    assert_ids(&store.heads(&page(4, 2)).await.unwrap(), &["a"]);
    assert_ids(&store.heads(&page(5, 2)).await.unwrap(), &[]);
    let first = store.heads(&page(0, 1)).await.unwrap();
    let after = SessionQuery { cursor: Some(SessionCursor::of(&first[0])), ..page(1, 2) };
    assert_ids(&store.heads(&after).await.unwrap(), &["c", "b"]);
}

/// A limit of 0 returns nothing; the largest limits and offsets are valid.
pub async fn no_limit_is_too_small_or_too_large(Fixture { store, .. }: Fixture) {
    fill(&*store, ["a", "b"].map(|id| (id, SessionCreated::default()))).await;
    assert_ids(&store.heads(&SessionQuery { limit: 0, ..all() }).await.unwrap(), &[]);
    assert_ids(&store.heads(&SessionQuery { limit: usize::MAX, ..all() }).await.unwrap(), &["b", "a"]);
    assert_ids(&store.heads(&SessionQuery { limit: usize::MAX, offset: 1, ..all() }).await.unwrap(), &["a"]);
    assert_ids(&store.heads(&SessionQuery { limit: usize::MAX, offset: usize::MAX, ..all() }).await.unwrap(), &[]);
}

/// A tenant lists only its own sessions, whatever ids other tenants use.
pub async fn tenants_never_mix(Fixture { store, .. }: Fixture) {
    for (n, (tenant, id)) in [("a", "s"), ("b", "s"), ("a", "t"), ("b", "u"), ("ab", "s")].into_iter().enumerate() {
        let created = SessionCreated { thread: Some("t".to_owned()), ..tagged(&["x"]) };
        SessionLog::begin(key(tenant, id), created, timestamp(n as i64)).save(&*store).await;
    }
    let of = |tenant: &str| OwnerFilter::Tenant(Tenant::new(tenant).unwrap());
    for (tenant, want) in [("a", &["t", "s"][..]), ("b", &["u", "s"]), ("ab", &["s"]), ("c", &[])] {
        let heads = store.heads(&SessionQuery::new(of(tenant), 9)).await.unwrap();
        assert_ids(&heads, want);
        assert!(heads.iter().all(|h| h.tenant.as_str() == tenant));
        let query = SessionQuery {
            tags: vec!["x".to_owned()],
            thread: Some("t".to_owned()),
            ..SessionQuery::new(of(tenant), 9)
        };
        assert_eq!(store.heads(&query).await.unwrap(), heads);
    }
    assert_ids(&store.heads(&SessionQuery::new(OwnerFilter::AllTenants, 9)).await.unwrap(), &["s", "u", "t", "s", "s"]);
}

/// A user lists only their own sessions in their own tenant.
pub async fn users_see_their_own(Fixture { store, .. }: Fixture) {
    let users = [("s1", "Ada"), ("s2", "ada"), ("s3", "Ada"), ("s4", "Ädä 'x' %")];
    fill(&*store, users.map(|(id, user)| (id, of_user(user)))).await;
    SessionLog::begin(key("other", "s1"), of_user("Ada"), timestamp(0)).save(&*store).await;
    for (tenant, user, want) in [
        ("default", "Ada", &["s3", "s1"][..]),
        ("default", "ada", &["s2"]),
        ("default", "Ädä 'x' %", &["s4"]),
        ("default", "A", &[]),
        ("other", "Ada", &["s1"]),
        ("other", "ada", &[]),
    ] {
        let owner = OwnerFilter::User(Tenant::new(tenant).unwrap(), User::new(user).unwrap());
        assert_ids(&store.heads(&SessionQuery::new(owner, 9)).await.unwrap(), want);
    }
}

/// Sessions are filtered by assistant and by chat thread.
pub async fn assistants_and_threads_are_found(Fixture { store, .. }: Fixture) {
    let created = |assistant: Option<&str>, thread: Option<&str>| SessionCreated {
        assistant: assistant.map(str::to_owned),
        thread: thread.map(str::to_owned),
        ..SessionCreated::default()
    };
    let sessions =
        [("a", Some("x"), None), ("b", Some("x"), Some("x")), ("c", None, Some("x")), ("d", Some("X"), Some("it's"))];
    fill(&*store, sessions.map(|(id, assistant, thread)| (id, created(assistant, thread)))).await;
    for (assistant, thread, want) in [
        (Some("x"), None, &["b", "a"][..]),
        (None, Some("x"), &["c", "b"]),
        (Some("x"), Some("x"), &["b"]),
        (None, Some("it's"), &["d"]),
        (Some(""), None, &[]),
    ] {
        let SessionCreated { assistant, thread, .. } = created(assistant, thread);
        assert_ids(&store.heads(&SessionQuery { assistant, thread, ..all() }).await.unwrap(), want);
    }
}

/// Sessions are filtered by status, with any of several.
pub async fn statuses_are_found(Fixture { store, .. }: Fixture) {
    let statuses = [Status::Active, Status::Paused, Status::Expired, Status::Deleted];
    for to in statuses {
        let mut log = SessionLog::new(to.as_str());
        log.push(Entry::Status { to, reason: None, until: None }).save(&*store).await;
    }
    let with = |status: &[Status]| SessionQuery { status: status.to_vec(), ..all() };
    assert_ids(&store.heads(&with(&[])).await.unwrap(), &["paused", "expired", "deleted", "active"]);
    for status in statuses {
        assert_ids(&store.heads(&with(&[status])).await.unwrap(), &[status.as_str()]);
    }
    let live = with(&[Status::Active, Status::Paused]);
    assert_ids(&store.heads(&live).await.unwrap(), &["paused", "active"]);
    assert_ids(&store.heads(&SessionQuery { limit: 1, ..live }).await.unwrap(), &["paused"]);
}

/// Counting by status counts every session of every tenant once, under its current status.
pub async fn sessions_are_counted_by_their_status(Fixture { store, .. }: Fixture) {
    let statuses = [Status::Active, Status::Paused, Status::Expired, Status::Deleted];
    let mut logs = Vec::new();
    for (n, to) in statuses.into_iter().enumerate() {
        for i in 0..=n {
            let tenant = if i == 0 { "default" } else { "other" };
            let mut log = SessionLog::begin(key(tenant, &format!("{to}-{i}")), SessionCreated::default(), timestamp(0));
            log.push(Entry::Status { to, reason: None, until: None }).save(&*store).await;
            logs.push(log);
        }
    }
    let expect = async |want: [u64; 4]| {
        let counts = store.count().await.unwrap();
        let of = |status| counts.iter().filter(|(s, _)| *s == status).map(|(_, n)| n).sum::<u64>();
        assert_eq!(statuses.map(of), want);
    };
    expect([1, 2, 3, 4]).await;
    logs[9].push(Entry::Status { to: Status::Active, reason: None, until: None }).save(&*store).await;
    store.purge(&key("default", "paused-0")).await.unwrap();
    expect([2, 1, 3, 3]).await;
}

/// Sessions are filtered by creation time, lower bound inclusive, upper bound exclusive.
pub async fn creation_times_are_found(Fixture { store, .. }: Fixture) {
    fill(&*store, ["a", "b", "c"].map(|id| (id, SessionCreated::default()))).await;
    let micro = jiff::SignedDuration::from_micros(1);
    let between = |after, before| SessionQuery { created_after: after, created_before: before, ..all() };
    let b = timestamp(10);
    for (after, before, want) in [
        (Some(b), None, &["c", "b"][..]),
        (Some(b + micro), None, &["c"]),
        (None, Some(b), &["a"]),
        (None, Some(b + micro), &["b", "a"]),
        (Some(b), Some(b + micro), &["b"]),
        (Some(b), Some(b), &[]),
    ] {
        assert_ids(&store.heads(&between(after, before)).await.unwrap(), want);
    }
}

/// Sessions are filtered by tags; all given tags must match.
pub async fn tags_are_found(Fixture { store, .. }: Fixture) {
    fill(&*store, [("a", tagged(&["x"])), ("b", tagged(&["x", "y"])), ("c", tagged(&["y", "y"])), ("d", tagged(&[]))])
        .await;
    for (tags, want) in [
        (&["x"][..], &["b", "a"][..]),
        (&["y"], &["c", "b"]),
        (&["y", "x"], &["b"]),
        (&["x", "x"], &["b", "a"]),
        (&["X"], &[]),
        (&["x", "z"], &[]),
    ] {
        let tags = tags.iter().map(|t| t.to_string()).collect();
        assert_ids(&store.heads(&SessionQuery { tags, ..all() }).await.unwrap(), want);
    }
}

/// A tag may be any text.
pub async fn unusual_tags_are_found(Fixture { store, .. }: Fixture) {
    let long = "ä".repeat(5000);
    let (long_a, long_b) = (format!("{long}a"), format!("{long}b"));
    let tags = [
        "",
        " ",
        "it's",
        "\"quoted\"",
        "a\0b",
        "a\\0b",
        "ab",
        "a\nb",
        "äöü",
        "ÄÖÜ",
        "😀",
        "%",
        "_",
        "*",
        "a,b",
        "{a}",
        "[1]",
        "\\",
        "'; drop table labels; --",
        "k:1",
        "#x",
        &long_a,
        &long_b,
    ];
    let names: Vec<_> = (0..tags.len()).map(|n| format!("s{n}")).collect();
    fill(&*store, names.iter().zip(tags).map(|(id, tag)| (id.as_str(), tagged(&[tag, "all"])))).await;
    for (id, tag) in names.iter().zip(tags) {
        let tags = vec!["all".to_owned(), tag.to_owned()];
        assert_ids(&store.heads(&SessionQuery { tags, ..all() }).await.unwrap(), &[id]);
    }
}

/// Metadata fields are matched by their scalar value; a string never equals a number.
pub async fn metadata_is_found(Fixture { store, .. }: Fixture) {
    let big = 9_007_199_254_740_993_u64;
    let values = [
        json!("1"),
        json!(1),
        json!(1.5),
        json!(-1),
        json!(true),
        json!("true"),
        json!(false),
        json!(null),
        json!("null"),
        json!(""),
        json!("ä'\"\0"),
        json!(big),
        json!(big - 1),
        json!("x".repeat(3000)),
    ];
    let names: Vec<_> = (0..values.len()).map(|n| format!("s{n}")).collect();
    let created = values.iter().map(|v| with_metadata(json!({"k": v, "same": true, "nested": {"k": v}})));
    fill(&*store, names.iter().map(String::as_str).zip(created)).await;
    let with = |fields: &[(&str, Value)]| SessionQuery {
        metadata: fields.iter().map(|(k, v)| (k.to_string(), v.clone())).collect(),
        ..all()
    };
    for (id, value) in names.iter().zip(&values) {
        let query = with(&[("same", json!(true)), ("k", value.clone())]);
        assert_ids(&store.heads(&query).await.unwrap(), &[id]);
    }
    assert_eq!(store.heads(&with(&[("same", json!(true))])).await.unwrap().len(), values.len());
    for (field, value) in
        [("same", json!("true")), ("K", json!(1)), ("k", json!(2)), ("nested", json!({"k": 1})), ("", json!(1))]
    {
        assert_ids(&store.heads(&with(&[(field, value)])).await.unwrap(), &[]);
    }
    // A tag is not a metadata field.
    let tags = vec!["k".to_owned()];
    assert_ids(&store.heads(&SessionQuery { tags, ..all() }).await.unwrap(), &[]);
}

/// Titles are matched by substring, case-insensitively in every language; no character is a
/// wildcard.
pub async fn titles_are_found_whatever_their_case(Fixture { store, .. }: Fixture) {
    let titles = [
        ("a", "Grüße aus ÄÖ"),
        ("b", "100% SURE"),
        ("c", "under_score"),
        ("d", "back\\slash 'n' \"q\""),
        ("e", "Ωmega ПРИВЕТ"),
    ];
    fill(&*store, titles.map(|(id, title)| (id, titled(title))).into_iter().chain([("f", SessionCreated::default())]))
        .await;
    for (text, want) in [
        ("grüße", &["a"][..]),
        ("äö", &["a"]),
        ("GRÜ", &["a"]),
        ("sure", &["b"]),
        ("%", &["b"]),
        ("_", &["c"]),
        ("\\", &["d"]),
        ("'N'", &["d"]),
        ("\"Q\"", &["d"]),
        ("привет", &["e"]),
        ("ωMEGA", &["e"]),
        ("u", &["c", "b", "a"]),
        ("", &["f", "e", "d", "c", "b", "a"]),
        ("S%E", &[]),
        ("under-score", &[]),
    ] {
        let title = Some(text.to_owned());
        assert_ids(&store.heads(&SessionQuery { title, ..all() }).await.unwrap(), want);
    }
}

/// The forks of a session are found by their parent.
pub async fn forks_are_found_by_their_parent(Fixture { store, .. }: Fixture) {
    let mut parent = SessionLog::new("p");
    parent.push_message("one").push_message("two").save(&*store).await;
    let (mut first, mut second) = (parent.fork("f1", 2), parent.fork("f2", 3));
    first.save(&*store).await;
    second.save(&*store).await;
    first.fork("g", 3).save(&*store).await;
    let of = |id: &str| SessionQuery { parent: Some(SessionId::new(id).unwrap()), ..all() };
    assert_ids(&store.heads(&of("p")).await.unwrap(), &["f2", "f1"]);
    assert_ids(&store.heads(&of("f1")).await.unwrap(), &["g"]);
    assert_ids(&store.heads(&of("g")).await.unwrap(), &[]);
}

/// A conversation is found by its hash among many, and only within its user.
pub async fn conversations_are_found_by_their_hash(Fixture { store, .. }: Fixture) {
    let conversation = |key: SessionKey, user: &str, texts: &[&str], at| {
        let mut log = SessionLog::begin(key, of_user(user), timestamp(at));
        for text in texts {
            log.push_message(text);
        }
        log
    };
    let mut logs = [
        conversation(key("default", "a"), "ada", &["hi", "there"], 0),
        conversation(key("default", "b"), "ada", &["hi"], 10),
        conversation(key("default", "c"), "bob", &["hi"], 20),
        conversation(key("other", "d"), "ada", &["hi"], 30),
        conversation(key("default", "e"), "ada", &["hi"], 40),
    ];
    for log in &mut logs {
        log.save(&*store).await;
    }
    let hash = |log: &SessionLog| head_of(&log.key, &log.records).digest.hash;
    let ada = OwnerFilter::User(Tenant::default(), User::new("ada").unwrap());
    let with = |hashes| SessionQuery { hashes, ..SessionQuery::new(ada.clone(), 9) };
    assert_ids(&store.heads(&with(vec![hash(&logs[1])])).await.unwrap(), &["e", "b"]);
    let mut many: Vec<_> = (1..=2000_u128).map(|n| VisibleHash((n << 64).to_be_bytes())).collect();
    assert_ids(&store.heads(&with(many.clone())).await.unwrap(), &[]);
    many.extend([hash(&logs[0]), hash(&logs[1]), hash(&logs[1])]);
    assert_ids(&store.heads(&with(many)).await.unwrap(), &["e", "b", "a"]);
}

/// A session is found by its last question and answer and by the tool calls of its last turn, but
/// not by earlier ones (D-025).
pub async fn sessions_are_found_by_their_last_turn(Fixture { store, .. }: Fixture) {
    let call = |id: &str| {
        let call = json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
        Message::from_value(&json!({"role": "assistant", "content": null, "tool_calls": [call]})).unwrap()
    };
    let ada = OwnerFilter::User(Tenant::default(), User::new("ada").unwrap());
    let with = |matches| SessionQuery { matches, ..SessionQuery::new(ada.clone(), 9) };
    let mut log = SessionLog::begin(key("default", "s"), of_user("ada"), timestamp(0));
    log.push(Entry::message(Message::user("one"))).push(Entry::message(Message::assistant("1"))).save(&*store).await;
    let first = log.head().digest.match_keys();
    assert_eq!(first.len(), 1);
    assert_ids(&store.heads(&with(first.clone())).await.unwrap(), &["s"]);
    log.push(Entry::message(Message::user("two"))).push(Entry::message(call("c1"))).save(&*store).await;
    let second = log.head().digest.match_keys();
    assert_eq!(second.len(), 2);
    for key in &second {
        assert_ids(&store.heads(&with(vec![*key])).await.unwrap(), &["s"]);
    }
    let own_calls: Vec<_> = second.into_iter().filter(|key| !first.contains(key)).collect();
    // The same tool calls in a different user's session match only that session.
    let mut other = SessionLog::begin(key("default", "t"), of_user("bob"), timestamp(0));
    other.push(Entry::message(Message::user("two"))).push(Entry::message(call("c1"))).save(&*store).await;
    assert_ids(&store.heads(&with(own_calls.clone())).await.unwrap(), &["s"]);
    log.push(Entry::message(Message::tool("c1", "r")))
        .push(Entry::message(Message::assistant("2")))
        .save(&*store)
        .await;
    assert_ids(&store.heads(&with(own_calls.clone())).await.unwrap(), &["s"]);
    assert_ids(&store.heads(&with(first)).await.unwrap(), &[]);
    log.push(Entry::message(Message::user("three"))).save(&*store).await;
    assert_ids(&store.heads(&with(own_calls)).await.unwrap(), &[]);
    let last = log.head().digest.match_keys();
    assert_ids(&store.heads(&with(last.clone())).await.unwrap(), &["s"]);
    store.purge(&key("default", "s")).await.unwrap();
    assert_ids(&store.heads(&with(last)).await.unwrap(), &[]);
}

/// Sessions due before a time are listed in order of their due time.
pub async fn the_first_due_come_first(Fixture { store, .. }: Fixture) {
    for (id, tenant, due) in
        [("a", "x", Some(30)), ("b", "y", Some(10)), ("c", "x", None), ("d", "y", Some(20)), ("e", "x", Some(40))]
    {
        let mut commit = SessionLog::begin(key(tenant, id), SessionCreated::default(), timestamp(0)).commit();
        commit.head.due_at = due.map(timestamp);
        store.commit(&commit).await.unwrap();
    }
    let due = |seconds, limit| SessionQuery {
        due_before: Some(timestamp(seconds)),
        order: SessionOrder::Due,
        ..SessionQuery::new(OwnerFilter::AllTenants, limit)
    };
    assert_ids(&store.heads(&due(40, 9)).await.unwrap(), &["b", "d", "a"]);
    assert_ids(&store.heads(&due(99, 2)).await.unwrap(), &["b", "d"]);
    assert_ids(&store.heads(&due(10, 9)).await.unwrap(), &[]);
    // The filter also works with order by activity, in either direction.
    assert_ids(
        &store.heads(&SessionQuery { order: SessionOrder::Oldest, ..due(31, 9) }).await.unwrap(),
        &["a", "b", "d"],
    );
    assert_ids(&store.heads(&SessionQuery { order: SessionOrder::Oldest, ..due(31, 2) }).await.unwrap(), &["a", "b"]);
    assert_ids(
        &store.heads(&SessionQuery { order: SessionOrder::Newest, ..due(31, 9) }).await.unwrap(),
        &["d", "b", "a"],
    );
    // A session whose due time is cleared is no longer due.
    let mut head = store.head(&key("y", "b")).await.unwrap().unwrap();
    head.due_at = None;
    store.commit(&Commit::new(Some(head.end()), Vec::new(), head)).await.unwrap();
    assert_ids(&store.heads(&due(99, 9)).await.unwrap(), &["d", "a", "e"]);
}

/// Runs whose lease expired before a time are found, in every tenant.
pub async fn leases_that_ended_are_found(Fixture { store, .. }: Fixture) {
    let run = RunId::new("r").unwrap();
    for (id, tenant, until) in [("a", "x", Some(30)), ("b", "y", Some(10)), ("c", "x", None)] {
        let mut log = SessionLog::begin(key(tenant, id), SessionCreated::default(), timestamp(0));
        log.push(Entry::RunStarted { run: run.clone(), claim: None, detail: Map::new() });
        if let Some(until) = until.map(timestamp) {
            log.push(Entry::RunClaimed { run: run.clone(), claim: LeaseClaim { node: "n".to_owned(), until } });
        }
        log.save(&*store).await;
    }
    let ended = |seconds| SessionQuery {
        lease_before: Some(timestamp(seconds)),
        ..SessionQuery::new(OwnerFilter::AllTenants, 9)
    };
    assert_ids(&store.heads(&ended(10)).await.unwrap(), &[]);
    assert_ids(&store.heads(&ended(30)).await.unwrap(), &["b"]);
    assert_ids(&store.heads(&ended(31)).await.unwrap(), &["b", "a"]);
}

/// A renewed lease is found by its new expiry. It is no longer found once its run is paused for
/// review or has ended.
pub async fn leases_are_found_by_their_current_end(Fixture { store, .. }: Fixture) {
    let run = RunId::new("r").unwrap();
    let ended = |seconds| SessionQuery {
        lease_before: Some(timestamp(seconds)),
        ..SessionQuery::new(OwnerFilter::AllTenants, 9)
    };
    let mut logs = Vec::new();
    for id in ["a", "b", "c"] {
        let mut log = SessionLog::new(id);
        let claim = Some(LeaseClaim { node: "n".to_owned(), until: timestamp(10) });
        log.push(Entry::RunStarted { run: run.clone(), claim, detail: Map::new() }).save(&*store).await;
        logs.push(log);
    }
    assert_ids(&store.heads(&ended(11)).await.unwrap(), &["c", "b", "a"]);
    let mut head = logs[0].head();
    head.lease.as_mut().unwrap().until = timestamp(50);
    store.commit(&Commit::new(Some(head.end()), Vec::new(), head)).await.unwrap();
    logs[1].push(review_request("b", 3, None)).save(&*store).await;
    let run_ended = Entry::RunEnded { run, outcome: RunOutcome::Completed, error: None, code: None };
    logs[2].push(run_ended).save(&*store).await;
    assert_ids(&store.heads(&ended(11)).await.unwrap(), &[]);
    assert_ids(&store.heads(&ended(51)).await.unwrap(), &["a"]);
}

/// A review request at record `seq` of its session.
fn review_request(session: &str, seq: u64, queue: Option<&str>) -> Entry {
    Entry::review_opened(ReviewOpened {
        review: ReviewId::of(&SessionId::new(session).unwrap(), seq),
        step: "pay".to_owned(),
        run: None,
        call: None,
        queue: queue.map(str::to_owned),
        lost: false,
        timeout: None,
        detail: Map::new(),
    })
}

/// Sessions with open reviews are found, in any queue or in one, and so are sessions with decided
/// reviews.
pub async fn sessions_are_found_by_their_reviews(Fixture { store, .. }: Fixture) {
    let long = "q".repeat(3000);
    let mut logs: Vec<SessionLog> = ["a", "b", "c", "d", "e"].into_iter().map(SessionLog::new).collect();
    for (n, id, queue) in [(0, "a", None), (1, "b", Some("money")), (2, "c", Some("Money")), (3, "d", Some(&*long))] {
        logs[n].push(review_request(id, 2, queue));
    }
    logs[3].push(review_request("d", 3, Some("a\0b 'c'")));
    // Two open reviews in one session. Session e has tags and a metadata field named like the index
    // labels of reviews, which must not match.
    logs[1].push(review_request("b", 3, Some("law")));
    let change = SessionPatch {
        tags: Some(vec!["review".to_owned(), "review:money".to_owned(), "reviewed".to_owned()]).into(),
        metadata: Map::from_iter([("review".to_owned(), json!("money"))]),
        ..SessionPatch::default()
    };
    logs[4].push(Entry::info(change));
    for log in &mut logs {
        log.save(&*store).await;
    }
    let expect = async |reviewing: ReviewIndexLabel, want: &[&str]| {
        for owner in [OwnerFilter::AllTenants, all().owner] {
            let query = SessionQuery { owner, reviewing: Some(reviewing.clone()), ..all() };
            let mut heads = store.heads(&query).await.unwrap();
            heads.sort_by(|a, b| a.info.session_id.cmp(&b.info.session_id));
            assert_ids(&heads, want);
            assert!(heads.iter().all(|h| query.matches(h)));
        }
    };
    let queue = |name: &str| ReviewIndexLabel::Queue(name.to_owned());
    expect(ReviewIndexLabel::Open, &["a", "b", "c", "d"]).await;
    expect(queue("money"), &["b"]).await;
    expect(queue("law"), &["b"]).await;
    expect(queue(&long), &["d"]).await;
    expect(queue("a\0b 'c'"), &["d"]).await;
    expect(queue("mone"), &[]).await;
    expect(ReviewIndexLabel::Decided, &[]).await;
    let decided = |id: &str, seq| {
        Entry::review_decided(ReviewDecided {
            review: ReviewId::of(&SessionId::new(id).unwrap(), seq),
            step: "pay".to_owned(),
            decision: Decision::Approved,
            reviewer: "eve".to_owned(),
            notes: None,
            arguments: None,
            previous: None,
        })
    };
    logs[1].push(decided("b", 2)).save(&*store).await;
    logs[0].push(decided("a", 2)).save(&*store).await;
    expect(ReviewIndexLabel::Open, &["b", "c", "d"]).await;
    expect(queue("money"), &[]).await;
    expect(queue("law"), &["b"]).await;
    expect(ReviewIndexLabel::Decided, &["a", "b"]).await;
    let with_tag = SessionQuery { tags: vec!["x".to_owned()], reviewing: Some(ReviewIndexLabel::Open), ..all() };
    assert_ids(&store.heads(&with_tag).await.unwrap(), &[]);
}

/// Several filters are combined with AND.
pub async fn all_conditions_must_hold(Fixture { store, .. }: Fixture) {
    let full = SessionCreated {
        assistant: Some("x".to_owned()),
        thread: Some("t".to_owned()),
        title: Some("A title".to_owned()),
        tags: vec!["a".to_owned()],
        ..with_metadata(json!({"n": 1}))
    };
    let full_except = |change: &dyn Fn(&mut SessionCreated)| {
        let mut created = full.clone();
        change(&mut created);
        created
    };
    let sessions = [
        ("full", full.clone()),
        ("assistant", full_except(&|c| c.assistant = None)),
        ("thread", full_except(&|c| c.thread = Some("u".to_owned()))),
        ("title", full_except(&|c| c.title = None)),
        ("tags", full_except(&|c| c.tags.clear())),
        ("metadata", full_except(&|c| c.metadata.clear())),
        ("user", full_except(&|c| c.user = User::new("bob").unwrap())),
    ];
    fill(&*store, sessions).await;
    let query = SessionQuery {
        assistant: full.assistant.clone(),
        thread: full.thread.clone(),
        status: vec![Status::Active],
        created_after: Some(timestamp(0)),
        created_before: Some(timestamp(1000)),
        tags: full.tags.clone(),
        metadata: vec![("n".to_owned(), json!(1))],
        title: Some("TITLE".to_owned()),
        hashes: vec![VisibleHash::default()],
        ..SessionQuery::new(OwnerFilter::User(Tenant::default(), User::default()), 9)
    };
    assert_ids(&store.heads(&query).await.unwrap(), &["full"]);
    assert_ids(&store.heads(&SessionQuery { tags: Vec::new(), ..query }).await.unwrap(), &["tags", "full"]);
}

/// A changed session is found by its current state, not by its previous one.
pub async fn a_changed_head_is_found_by_its_current_state(Fixture { store, .. }: Fixture) {
    let created = SessionCreated {
        title: Some("before".to_owned()),
        tags: vec!["old".to_owned()],
        ..with_metadata(json!({"n": 1}))
    };
    let mut log = SessionLog::begin(key("default", "s"), created, timestamp(0));
    log.save(&*store).await;
    let change = serde_json::from_value(json!({"title": "after", "tags": ["new"], "metadata": {"n": 2}})).unwrap();
    log.push(Entry::info(change))
        .push(Entry::Status { to: Status::Paused, reason: None, until: None })
        .push_message("hi")
        .save(&*store)
        .await;
    let queries = |title: &str, tag: &str, n: i64, status, hash| {
        [
            SessionQuery { title: Some(title.to_owned()), ..all() },
            SessionQuery { tags: vec![tag.to_owned()], ..all() },
            SessionQuery { metadata: vec![("n".to_owned(), json!(n))], ..all() },
            SessionQuery { status: vec![status], ..all() },
            SessionQuery { hashes: vec![hash], ..all() },
        ]
    };
    for query in queries("before", "old", 1, Status::Active, VisibleHash::default()) {
        assert_eq!(store.heads(&query).await.unwrap(), []);
    }
    for query in queries("after", "new", 2, Status::Paused, log.head().digest.hash) {
        assert_eq!(store.heads(&query).await.unwrap(), [log.head()]);
    }
    // Old and new hash together match the session once.
    let hashes = vec![VisibleHash::default(), log.head().digest.hash];
    assert_eq!(store.heads(&SessionQuery { hashes, ..all() }).await.unwrap(), [log.head()]);
}
