//! Queries use their indexes.

use super::*;
use crate::store::query::{OwnerFilter, SessionOrder, SessionQuery};
use crate::store::sqlite::heads::{HeadSelect, NarrowScan};
use crate::types::digest::VisibleHash;
use rusqlite::params_from_iter;

/// Returns SQLite's query plan for a query.
fn plan(sql: &Connection, query: &SessionQuery) -> String {
    let narrow_scan = NarrowScan::choose(sql, query, 100).unwrap_or(None);
    explain(sql, HeadSelect::new(query, narrow_scan.as_ref()))
}

fn explain(sql: &Connection, HeadSelect { sql: text, params }: HeadSelect) -> String {
    let mut explain = sql.prepare(&format!("EXPLAIN QUERY PLAN {text}")).unwrap();
    let lines = explain.query_map(params_from_iter(params), |r| r.get::<_, String>(3)).unwrap();
    lines.map(|line| line.unwrap()).collect::<Vec<_>>().join("\n")
}

#[tokio::test]
async fn queries_use_their_index() {
    let test_store = TestStore::new().await;
    let sql = test_store.sql();
    let tenant = Tenant::default();
    let tenant_filter = OwnerFilter::Tenant(tenant.clone());
    let user_filter = OwnerFilter::User(tenant, user("ada"));
    let live_statuses = vec![crate::types::status::Status::Active, crate::types::status::Status::Paused];
    let hashes = vec![VisibleHash([1; 16]), VisibleHash([2; 16])];
    let parent = Some(SessionId::new("p").unwrap());
    let cursor = Some("5~s".parse().unwrap());
    let due = SessionQuery {
        due_before: Some(at(1)),
        order: SessionOrder::Due,
        ..SessionQuery::new(OwnerFilter::AllTenants, 20)
    };
    let newest = |owner_filter: &OwnerFilter| SessionQuery {
        status: live_statuses.clone(),
        ..SessionQuery::new(owner_filter.clone(), 20)
    };
    for (query, want) in [
        (newest(&user_filter), "head_user (tenant=? AND user=?)"),
        (SessionQuery { cursor, ..newest(&user_filter) }, "head_user (tenant=? AND user=? AND active_at<?)"),
        (newest(&tenant_filter), "head_active (tenant=?)"),
        (
            SessionQuery { hashes: hashes.clone(), ..newest(&user_filter) },
            "head_visible_hash (tenant=? AND visible_hash=? AND user=?)",
        ),
        (SessionQuery { hashes, ..newest(&tenant_filter) }, "head_visible_hash (tenant=? AND visible_hash=?)"),
        (
            SessionQuery { matches: vec![VisibleHash([1; 16])], ..newest(&user_filter) },
            "head USING INTEGER PRIMARY KEY (rowid=?)",
        ),
        (SessionQuery { parent, ..newest(&tenant_filter) }, "head_parent (tenant=? AND parent=?)"),
        (SessionQuery { thread: Some("t".to_owned()), ..newest(&user_filter) }, "head_thread (tenant=? AND thread=?)"),
        (
            SessionQuery { tags: vec!["t".to_owned()], ..newest(&tenant_filter) },
            "head USING INTEGER PRIMARY KEY (rowid=?)",
        ),
        (
            SessionQuery { tags: vec!["t".to_owned()], ..newest(&user_filter) },
            "head USING INTEGER PRIMARY KEY (rowid=?)",
        ),
        (due, "head_due (due_at<?)"),
        (
            SessionQuery { lease_before: Some(at(1)), ..SessionQuery::new(OwnerFilter::AllTenants, 20) },
            "head_lease (lease_until<?)",
        ),
    ] {
        let plan = plan(&sql, &query);
        let search = if want.starts_with("head ") { want.to_owned() } else { format!("head USING INDEX {want}") };
        assert!(plan.contains(&format!("SEARCH {search}")), "{want}\n{plan}");
        let is_sorted = plan.contains("USE TEMP B-TREE FOR ORDER BY");
        let is_index_ordered = ["head_user", "head_active", "head_due"].iter().any(|index| want.starts_with(index));
        assert_eq!(is_sorted, !is_index_ordered, "{want}\n{plan}");
        let uses_label_index = !query.tags.is_empty();
        let label = "head_label USING PRIMARY KEY (tenant=? AND label=?)";
        assert_eq!(plan.contains(&format!("SEARCH {label}")), uses_label_index, "{plan}");
    }
    // A scan follows the index on activity, without sorting.
    for (owner_filter, index) in
        [(user_filter, "head_user (tenant=? AND user=?)"), (tenant_filter, "head_active (tenant=?)")]
    {
        let query = SessionQuery { title: Some("x".to_owned()), tags: vec!["t".to_owned()], ..newest(&owner_filter) };
        let plan = explain(&sql, HeadSelect::scan(&query, 100));
        assert!(plan.contains(&format!("SEARCH head USING INDEX {index}")), "{plan}");
        assert!(!plan.contains("USE TEMP B-TREE FOR ORDER BY"), "{plan}");
    }
}

#[tokio::test]
async fn the_newest_sessions_are_found_without_a_scan() {
    let test_store = TestStore::new().await;
    let mut log = Log::of_user("s", "ada");
    log.save(&test_store.store).await;
    let sql = test_store.sql();
    // Many copies of one head, each with its own columns and serialized head.
    sql.execute(
        "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 20000)
        INSERT INTO head (tenant, session, user, status, created_at, active_at, seq, log_hash, visible_hash, match_keys,
            title, labels, head_json)
        SELECT tenant, 's' || n, CASE n % 10 WHEN 0 THEN 'ada' ELSE 'u' || n % 7 END, status, created_at, active_at + n,
            seq, log_hash, visible_hash, match_keys, title, labels, json_set(head_json, '$.info.session_id', 's' || n)
        FROM head, n",
        [],
    )
    .unwrap();
    let query = SessionQuery::new(OwnerFilter::User(Tenant::default(), user("ada")), 20);
    let heads = test_store.store.heads(&query).await.unwrap();
    let ids: Vec<_> = heads.iter().map(|h| h.info.session_id.to_string()).collect();
    assert_eq!(ids, (0..20).map(|n| format!("s{}", 20_000 - n * 10)).collect::<Vec<_>>());
    // The query reads only the rows that it returns.
    let HeadSelect { sql: text, params } = HeadSelect::new(&query, None);
    let mut statement = sql.prepare(&text).unwrap();
    assert_eq!(statement.query_map(params_from_iter(params), |_| Ok(())).unwrap().count(), 20);
    assert!(statement.get_status(rusqlite::StatementStatus::VmStep) < 2000);
}
