//! Queries use their indexes, and the full-text index stays consistent with the items.

use super::*;
use crate::store::query::{OwnerFilter, SessionOrder, SessionQuery};
use crate::store::sqlite::heads::{HeadSelect, NarrowScan};
use crate::types::digest::VisibleHash;
use rusqlite::params_from_iter;

/// Returns SQLite's query plan for a query.
fn plan(sql: &Connection, query: &SessionQuery) -> String {
    let narrow = NarrowScan::choose(sql, query, 100).unwrap_or(None);
    explain(sql, HeadSelect::new(query, narrow.as_ref()))
}

fn explain(sql: &Connection, HeadSelect { sql: text, params }: HeadSelect) -> String {
    let mut explain = sql.prepare(&format!("EXPLAIN QUERY PLAN {text}")).unwrap();
    let lines = explain.query_map(params_from_iter(params), |r| r.get::<_, String>(3)).unwrap();
    lines.map(|line| line.unwrap()).collect::<Vec<_>>().join("\n")
}

#[tokio::test]
async fn queries_use_their_index() {
    let place = Place::new().await;
    let sql = place.sql();
    let tenant = Tenant::default();
    let (ours, mine) = (OwnerFilter::Tenant(tenant.clone()), OwnerFilter::User(tenant, user("ada")));
    let live = vec![crate::types::status::Status::Active, crate::types::status::Status::Paused];
    let hashes = vec![VisibleHash([1; 16]), VisibleHash([2; 16])];
    let parent = Some(SessionId::new("p").unwrap());
    let cursor = Some("5~s".parse().unwrap());
    let due = SessionQuery {
        due_before: Some(at(1)),
        order: SessionOrder::Due,
        ..SessionQuery::new(OwnerFilter::Everyone, 20)
    };
    let newest = |whose: &OwnerFilter| SessionQuery { status: live.clone(), ..SessionQuery::new(whose.clone(), 20) };
    for (query, want) in [
        (newest(&mine), "head_user (tenant=? AND user=?)"),
        (SessionQuery { cursor, ..newest(&mine) }, "head_user (tenant=? AND user=? AND active_at<?)"),
        (newest(&ours), "head_active (tenant=?)"),
        (SessionQuery { hashes: hashes.clone(), ..newest(&mine) }, "head_hash (tenant=? AND hash=? AND user=?)"),
        (SessionQuery { hashes, ..newest(&ours) }, "head_hash (tenant=? AND hash=?)"),
        (
            SessionQuery { matches: vec![VisibleHash([1; 16])], ..newest(&mine) },
            "head USING INTEGER PRIMARY KEY (rowid=?)",
        ),
        (SessionQuery { parent, ..newest(&ours) }, "head_parent (tenant=? AND parent=?)"),
        (SessionQuery { thread: Some("t".to_owned()), ..newest(&mine) }, "head_thread (tenant=? AND thread=?)"),
        (SessionQuery { tags: vec!["t".to_owned()], ..newest(&ours) }, "head USING INTEGER PRIMARY KEY (rowid=?)"),
        (SessionQuery { tags: vec!["t".to_owned()], ..newest(&mine) }, "head USING INTEGER PRIMARY KEY (rowid=?)"),
        (due, "head_due (due_at<?)"),
        (
            SessionQuery { lease_before: Some(at(1)), ..SessionQuery::new(OwnerFilter::Everyone, 20) },
            "head_lease (lease_until<?)",
        ),
    ] {
        let plan = plan(&sql, &query);
        let search = if want.starts_with("head ") { want.to_owned() } else { format!("head USING INDEX {want}") };
        assert!(plan.contains(&format!("SEARCH {search}")), "{want}\n{plan}");
        let sorted = plan.contains("USE TEMP B-TREE FOR ORDER BY");
        let in_order = ["head_user", "head_active", "head_due"].iter().any(|index| want.starts_with(index));
        assert_eq!(sorted, !in_order, "{want}\n{plan}");
        let by_label = !query.tags.is_empty();
        let label = "head_label USING PRIMARY KEY (tenant=? AND label=?)";
        assert_eq!(plan.contains(&format!("SEARCH {label}")), by_label, "{plan}");
    }
    // A scan follows the index on activity, without sorting.
    for (whose, index) in [(mine, "head_user (tenant=? AND user=?)"), (ours, "head_active (tenant=?)")] {
        let query = SessionQuery { title: Some("x".to_owned()), tags: vec!["t".to_owned()], ..newest(&whose) };
        let plan = explain(&sql, HeadSelect::scan(&query, 100));
        assert!(plan.contains(&format!("SEARCH head USING INDEX {index}")), "{plan}");
        assert!(!plan.contains("USE TEMP B-TREE FOR ORDER BY"), "{plan}");
    }
}

#[tokio::test]
async fn the_newest_of_many_are_at_hand() {
    let place = Place::new().await;
    let mut log = Log::of("s", "ada");
    log.save(&place.store).await;
    let sql = place.sql();
    // Many copies of one head, each with its own columns and serialized head.
    sql.execute(
        "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 20000)
        INSERT INTO head (tenant, session, user, status, created_at, active_at, seq, hash, title, labels, card)
        SELECT tenant, 's' || n, CASE n % 10 WHEN 0 THEN 'ada' ELSE 'u' || n % 7 END, status, created_at, active_at + n, seq, hash,
            title, labels, json_set(card, '$.info.session_id', 's' || n)
        FROM head, n",
        [],
    )
    .unwrap();
    let mine = SessionQuery::new(OwnerFilter::User(Tenant::default(), user("ada")), 20);
    let heads = place.store.heads(&mine).await.unwrap();
    let ids: Vec<_> = heads.iter().map(|h| h.info.session_id.to_string()).collect();
    assert_eq!(ids, (0..20).map(|n| format!("s{}", 20_000 - n * 10)).collect::<Vec<_>>());
    // The query reads only the rows that it returns.
    let HeadSelect { sql: text, params } = HeadSelect::new(&mine, None);
    let mut find = sql.prepare(&text).unwrap();
    assert_eq!(find.query_map(params_from_iter(params), |_| Ok(())).unwrap().count(), 20);
    assert!(find.get_status(rusqlite::StatementStatus::VmStep) < 2000);
}

/// Runs FTS5's own integrity check.
fn check_full_text(sql: &Connection) {
    sql.execute("INSERT INTO item_text (item_text, rank) VALUES ('integrity-check', 1)", []).unwrap();
}

async fn find(place: &Place, name: &str, text: &str) -> Vec<String> {
    let hits = place.store.search(&memory(name), text, 10).await.unwrap();
    hits.into_iter().map(|h| h.item.key).collect()
}

#[tokio::test]
async fn the_full_text_index_follows_the_items() {
    let place = Place::new().await;
    let (store, sql) = (&place.store, place.sql());
    for (name, key, text) in [("ada", "a", "Green tea"), ("ada", "b", "Café, black"), ("bob", "a", "green")] {
        store.put(&memory(name), &item(key, text), None).await.unwrap();
    }
    store.put(&memory("ada"), &Item { text: None, ..item("c", "") }, None).await.unwrap();
    assert_eq!(find(&place, "ada", "green \"OR black").await, ["a", "b"]);
    assert_eq!(find(&place, "ada", "CAFE").await, ["b"]);
    assert_eq!(find(&place, "bob", "tea green").await, ["a"]);
    store.put(&memory("ada"), &item("a", "Red wine"), None).await.unwrap();
    store.put(&memory("ada"), &item("c", "Green again"), None).await.unwrap();
    assert_eq!(find(&place, "ada", "green").await, ["c"]);
    check_full_text(&sql);
    store.put(&memory("ada"), &Item { text: None, ..item("c", "") }, None).await.unwrap();
    store.remove(&memory("ada"), "b").await.unwrap();
    assert_eq!(find(&place, "ada", "green black café").await, [""; 0]);
    check_full_text(&sql);
    store.clear(&Tenant::default(), &memory("ada").owner).await.unwrap();
    assert_eq!(find(&place, "ada", "red wine").await, [""; 0]);
    assert_eq!(find(&place, "bob", "green").await, ["a"]);
    check_full_text(&sql);
}

#[tokio::test]
async fn what_others_keep_does_not_change_a_search() {
    let place = Place::new().await;
    for (key, text) in [("a", "red wine"), ("b", "green tea"), ("c", "red tea cups")] {
        place.store.put(&memory("ada"), &item(key, text), None).await.unwrap();
    }
    let search = async || place.store.search(&memory("ada"), "red tea", 9).await.unwrap();
    let before = search().await;
    assert_eq!(before[0].item.key, "c");
    for n in 0..20 {
        place.store.put(&memory("bob"), &item(&n.to_string(), "red red wine"), None).await.unwrap();
    }
    assert_eq!(search().await, before);
}
