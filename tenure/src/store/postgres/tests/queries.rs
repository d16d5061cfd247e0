//! Queries for sessions, compared with `SessionQuery::matches`.

use super::*;
use crate::store::query::{OwnerFilter, SessionCursor, SessionOrder, SessionQuery};
use crate::types::entry::SessionPatch;
use crate::types::head::Lease;
use crate::types::id::{RunId, User};
use crate::types::status::Status;
use serde_json::json;

/// Computes the expected result of a query over these heads.
fn expected(query: &SessionQuery, all: &[Head]) -> Vec<Head> {
    let mut heads: Vec<Head> = all.iter().filter(|h| query.matches(h)).cloned().collect();
    match query.order {
        SessionOrder::Newest => heads.sort_by_key(|h| std::cmp::Reverse(SessionCursor::of(h))),
        SessionOrder::Oldest => heads.sort_by_key(SessionCursor::of),
        SessionOrder::Due => heads.sort_by_key(|h| (h.due_at, h.info.session_id.clone())),
    }
    heads.retain(|h| query.cursor.as_ref().is_none_or(|c| SessionCursor::of(h) < *c));
    heads.into_iter().skip(query.offset).take(query.limit).collect()
}

/// Creates sessions that differ in every property that a query can select.
async fn fill(store: &PostgresStore) -> Vec<Head> {
    let mut rng = Rng::new(42);
    let mut all = Vec::new();
    Writer::create(store, "parent").await.unwrap();
    for n in 0..60 {
        let mut created =
            SessionCreated { user: User::new(["ann", "bob"][rng.below(2)]).unwrap(), ..SessionCreated::default() };
        created.assistant = [None, Some("helper".to_owned())][rng.below(2)].clone();
        created.thread = [None, Some("t".repeat(5000)), Some("t".to_owned())][rng.below(3)].clone();
        created.title = [None, Some("Größe 100%_\0 of".to_owned()), Some("other".to_owned())][rng.below(3)].clone();
        created.tags =
            [vec![], vec!["red".to_owned()], vec!["red".to_owned(), "blue \"x\"".to_owned()]][rng.below(3)].clone();
        if rng.below(2) == 0 {
            created.metadata = json!({"n": rng.below(3), "deep": {"a": 1}, "s": "x\0"}).as_object().unwrap().clone();
        }
        if rng.below(3) == 0 {
            created.parent = Some(Parent { session: key("parent").session, seq: 1, digest: Default::default() });
        }
        let mut w = Writer::begin(store, &format!("s{n}"), created).await.unwrap();
        w.skew = [0, 0, n][rng.below(3)];
        let status = [Status::Active, Status::Paused, Status::Expired, Status::Deleted][rng.below(4)];
        let text = format!("{}", rng.below(4));
        let patch = SessionPatch { title: Some("late".to_owned()).into(), ..SessionPatch::default() };
        let mut commit = w.next_commit([user_message(&text), Entry::Status { to: status, reason: None, until: None }]);
        if rng.below(4) == 0 {
            commit = w.next_commit([user_message(&text), Entry::info(patch)]);
        }
        commit.head.due_at = [None, Some(at(rng.below(9) as i64))][rng.below(2)];
        if rng.below(2) == 0 {
            let until = at(rng.below(9) as i64);
            commit.head.lease = Some(Lease { run: RunId::new("r").unwrap(), node: "n\0".to_owned(), until });
        }
        store.commit(&commit).await.unwrap();
        all.push(commit.head);
    }
    all.push(store.head(&key("parent")).await.unwrap().unwrap());
    all
}

#[tokio::test]
async fn lists_agree_with_the_contract() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    let all = fill(store).await;
    let mut rng = Rng::new(4711);
    let mut match_count = 0;
    for round in 0..400 {
        let owner_filter = match rng.below(3) {
            0 => OwnerFilter::AllTenants,
            1 => OwnerFilter::Tenant(tenant()),
            _ => OwnerFilter::User(tenant(), User::new("ann").unwrap()),
        };
        let mut q = SessionQuery::new(owner_filter, [5, 100, usize::MAX][rng.below(3)]);
        // One or two conditions at a time, so that most queries match something.
        for _ in 0..rng.below(3) {
            match rng.below(13) {
                0 => q.assistant = Some(["helper", "no\0"][rng.below(2)].to_owned()),
                1 => q.thread = Some("t".repeat([1, 5000, 4999][rng.below(3)])),
                2 => q.status = vec![Status::Paused, Status::Deleted],
                3 => q.created_after = Some(at(2)),
                4 => q.created_before = Some(at(2) + jiff::SignedDuration::from_nanos(rng.below(2) as i64)),
                5 => q.tags = vec!["red".to_owned(), "blue \"x\"".to_owned()][..1 + rng.below(2)].into(),
                6 => q.metadata = vec![("n".to_owned(), json!(rng.below(3))), ("s".to_owned(), json!("x\0"))],
                7 => q.title = Some(["GRÖSSE", "größe", "%_", "", "la", "\0O"][rng.below(6)].to_owned()),
                8 => q.parent = Some(key("parent").session),
                9 => q.hashes = vec![all[rng.below(all.len())].digest.hash, all[0].digest.hash],
                10 => (q.due_before, q.order) = (Some(at(5)), SessionOrder::Due),
                11 => q.lease_before = Some(at(5)),
                _ => q.offset = rng.below(5),
            }
        }
        if q.order == SessionOrder::Newest && rng.below(3) == 0 {
            q.cursor = Some(SessionCursor::of(&all[rng.below(all.len())]));
        }
        let got = store.heads(&q).await.unwrap();
        let want = expected(&q, &all);
        match_count += want.len();
        assert_eq!(got, want, "round {round}: {q:?}");
    }
    assert!(match_count > 1000, "{match_count}");
    let other = SessionQuery::new(OwnerFilter::Tenant(Tenant::default()), 9);
    assert_eq!(store.heads(&other).await.unwrap(), [], "another tenant sees nothing");
}
