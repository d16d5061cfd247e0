//! Queries agree with their definition; blobs, forks and evictions.

use super::*;
use crate::types::digest::LogDigest;
use crate::types::entry::{Entry, Parent, Record, SessionCreated};
use crate::types::head::Lease;
use crate::types::status::Status;
use serde_json::json;

fn at(seconds: usize) -> Timestamp {
    Timestamp::from_second(seconds as i64).unwrap()
}

fn key(tenant: &str, session: &str) -> SessionKey {
    SessionKey { tenant: tenant.try_into().unwrap(), session: session.try_into().unwrap() }
}

fn head(tenant: &str, session: &str) -> Head {
    let record = Record { seq: 1, at: at(0), entry: Entry::created(SessionCreated::default()) };
    Head::begin(&key(tenant, session), &record).unwrap()
}

fn fork(session: &str, parent: &str, seq: Seq) -> Head {
    let parent = Parent { session: parent.try_into().unwrap(), seq, digest: LogDigest::default() };
    Head { first: seq + 1, seq: seq + 10, parent: Some(parent), ..head("t", session) }
}

/// Heads that differ in every property that a query can select, with many ties.
fn many_heads() -> Vec<Head> {
    let head_number = |i: usize| {
        let mut head = head(["t", "u"][i % 2], &format!("s{}", i / 2));
        head.user = ["ada", "bob", "eve"][i % 3].try_into().unwrap();
        head.active_at = at(i % 7);
        head.info.created_at = at(i % 5);
        head.assistant = i.is_multiple_of(4).then(|| "helper".to_owned());
        head.thread = i.is_multiple_of(9).then(|| "thread".to_owned());
        head.status = [Status::Active, Status::Paused, Status::Deleted][i % 5 % 3];
        head.due_at = (!i.is_multiple_of(3)).then(|| at(i % 11));
        head.digest.hash = VisibleHash([(i % 6) as u8; 16]);
        head.info.title = i.is_multiple_of(2).then(|| format!("Große Reise {}", i % 3));
        head.info.tags = if i % 4 == 1 { vec!["x".into(), "y".into()] } else { vec!["x".into()] };
        head.info.metadata.insert("n".into(), json!(i % 3));
        let run = "r".try_into().unwrap();
        head.lease = i.is_multiple_of(8).then(|| Lease { run, node: "n".into(), until: at(i % 16) });
        let parent = Parent { session: "s0".try_into().unwrap(), seq: 1, digest: LogDigest::default() };
        head.parent = (i % 10 == 3).then_some(parent);
        head
    };
    (0..120).map(head_number).collect()
}

fn queries() -> Vec<SessionQuery> {
    let owners = [
        OwnerFilter::User("t".try_into().unwrap(), "ada".try_into().unwrap()),
        OwnerFilter::Tenant("u".try_into().unwrap()),
        OwnerFilter::Tenant("unknown".try_into().unwrap()),
        OwnerFilter::AllTenants,
    ];
    let queries_of = |owner: OwnerFilter| {
        let all = SessionQuery::new(owner, usize::MAX);
        let hash = VisibleHash([2; 16]);
        let other = VisibleHash([4; 16]);
        [
            all.clone(),
            SessionQuery {
                assistant: Some("helper".into()),
                status: vec![Status::Active, Status::Paused],
                ..all.clone()
            },
            SessionQuery { thread: Some("thread".into()), created_after: Some(at(1)), ..all.clone() },
            SessionQuery { created_before: Some(at(3)), tags: vec!["x".into(), "y".into()], ..all.clone() },
            SessionQuery { metadata: vec![("n".into(), json!(2))], title: Some("GROSSE".into()), ..all.clone() },
            SessionQuery { title: Some("große".into()), ..all.clone() },
            SessionQuery { hashes: vec![hash, other, hash], ..all.clone() },
            SessionQuery { parent: Some("s0".try_into().unwrap()), ..all.clone() },
            SessionQuery { lease_before: Some(at(9)), ..all.clone() },
            SessionQuery { order: SessionOrder::Oldest, status: vec![Status::Active, Status::Paused], ..all.clone() },
            SessionQuery { due_before: Some(at(6)), order: SessionOrder::Due, ..all },
        ]
    };
    owners.into_iter().flat_map(queries_of).collect()
}

#[test]
fn results_agree_with_the_definition_of_a_query() {
    let mut index = MemIndex::default();
    let heads = many_heads();
    // Set each head twice, first with other contents: the old contents must not be found.
    for (old, new) in heads.iter().zip(heads.iter().rev()) {
        index.set(Head { tenant: old.tenant.clone(), info: old.info.clone(), ..new.clone() });
    }
    heads.iter().for_each(|h| index.set(h.clone()));
    index.set(head("t", "removed"));
    index.remove(&key("t", "removed"));
    for query in queries() {
        let mut want: Vec<_> = heads.iter().filter(|h| query.matches(h)).cloned().collect();
        let got = index.heads(&query);
        match query.order {
            SessionOrder::Newest => {
                want.sort_by_key(|h| Reverse((h.active_at, h.info.session_id.clone(), h.tenant.clone())))
            }
            SessionOrder::Oldest => want.sort_by_key(|h| (h.active_at, h.info.session_id.clone(), h.tenant.clone())),
            SessionOrder::Due => want.sort_by_key(|h| (h.due_at, h.tenant.clone(), h.info.session_id.clone())),
        }
        assert_eq!(got, want, "{query:?}");

        let part = index.heads(&SessionQuery { offset: 2, limit: 3, ..query.clone() });
        assert_eq!(part, want.iter().skip(2).take(3).cloned().collect::<Vec<_>>());
        if query.order == SessionOrder::Newest && query.owner != OwnerFilter::AllTenants {
            let mut pages = Vec::new();
            let mut cursor = None;
            loop {
                let page = index.heads(&SessionQuery { cursor, limit: 4, ..query.clone() });
                cursor = page.last().map(SessionCursor::of);
                pages.extend(page);
                if cursor.is_none() {
                    break;
                }
            }
            assert_eq!(pages, want, "{query:?}");
        }
    }
}

#[test]
fn the_fork_with_the_latest_fork_point_replaces_the_purged_session() {
    let mut index = MemIndex::default();
    let grandparent = Parent { session: "g".try_into().unwrap(), seq: 4, digest: LogDigest::default() };
    let purged = Head { first: 5, seq: 20, parent: Some(grandparent.clone()), ..head("t", "purged") };
    index.set(purged.clone());
    assert_eq!(index.fork_inheritance(&purged.key()), ForkInheritance { inheriting_fork: None, reparented: vec![] });

    // A fork point before the session's own first record: such a fork needs none of its
    // records.
    let early = fork("early", "purged", 2);
    index.set(early.clone());
    index.set(fork("elsewhere", "g", 2));
    assert_eq!(
        index.fork_inheritance(&purged.key()),
        ForkInheritance { inheriting_fork: None, reparented: vec![fork("early", "g", 2)] }
    );

    for (name, seq) in [("late", 9), ("middle", 7)] {
        index.set(fork(name, "purged", seq));
    }
    let inheriting = Head { first: 5, parent: Some(grandparent), ..fork("late", "purged", 9) };
    let reparented = vec![fork("early", "late", 2), fork("middle", "late", 7)];
    assert_eq!(
        index.fork_inheritance(&purged.key()),
        ForkInheritance { inheriting_fork: Some((inheriting, 9)), reparented }
    );
}

#[test]
fn blobs_are_released_with_their_last_session() {
    let mut index = MemIndex::default();
    let a = key("t", "a");
    let b = key("t", "b");
    let one = BlobId([1; 32]);
    let two = BlobId([2; 32]);
    index.use_blobs(&a, [one, two], 5);
    index.use_blobs(&a, [one], 3);
    index.use_blobs(&key("u", "a"), [one], 1);
    index.inherit_blobs(&a, &b, 4);
    assert_eq!(index.remove(&a), [two]);
    assert!(index.uses_blob(&b.tenant, one) && !index.uses_blob(&b.tenant, two));
    assert_eq!(index.remove(&b), [one]);
    assert!(index.uses_blob(&"u".try_into().unwrap(), one));
}

#[test]
fn a_full_namespace_evicts_the_least_recently_used_items() {
    let mut index = MemIndex::default();
    let namespace = Namespace { tenant: Tenant::default(), owner: Owner::Tenant, name: "cache".into() };
    for (key, used) in [("a", 3), ("b", 1), ("c", 2), ("d", 1)] {
        index.put(&namespace, Item { used_at: at(used), ..Item::new(key, "1", at(0)) });
    }
    assert_eq!(index.keys_to_evict(&namespace, "new", None), Vec::<String>::new());
    assert_eq!(index.keys_to_evict(&namespace, "new", Some(5)), Vec::<String>::new());
    assert_eq!(index.keys_to_evict(&namespace, "new", Some(3)), ["b", "d"]);
    assert_eq!(index.keys_to_evict(&namespace, "b", Some(3)), ["d"]);
    assert_eq!(index.keys_to_evict(&namespace, "new", Some(0)), ["b", "d", "c", "a"]);
    assert_eq!(index.get(&namespace, "b", Some(at(9))).map(|i| (i.used_at, i.uses)), Some((at(9), 1)));
    assert_eq!(index.keys_to_evict(&namespace, "new", Some(3)), ["d", "c"]);
}
