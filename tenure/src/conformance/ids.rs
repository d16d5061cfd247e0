//! Session ids: any printable text is an id of its own, in every operation and after a reopen.

use super::fixture::Fixture;
use crate::store::item::Namespace;
use crate::store::query::{OwnerFilter, SessionCursor, SessionQuery};
use crate::testing::records::{SessionLog, head_of, item, read_full_log, session_namespace, state};
use crate::types::entry::{Entry, RewindEntry};
use crate::types::id::ReviewId;
use std::collections::BTreeSet;

/// Ids that differ only in case, contain separators and escapes, are reserved names of file systems, or have the
/// maximum length.
fn unusual_ids() -> Vec<String> {
    let ids = [
        "user@example.com",
        "Ünïcødé 会話",
        "ünïcødé 会話",
        "a/b",
        "a\\b",
        "..",
        ".",
        "%2e",
        "%2E",
        "CON",
        "con",
        "Con",
        "nul.txt",
        "a'b\"c",
        "a%_*?b",
        "1767323045000007~x",
        "!",
        "@default",
        "s.discarded",
        "s",
        "S",
        "{\"id\": 1}",
    ];
    let long = ["会".repeat(128), "会".repeat(127) + "話", "Z".repeat(128), "z".repeat(128)];
    ids.into_iter().map(str::to_owned).chain(long).collect()
}

/// Each id has its own log, items, review and forks; all are listed, paged, restored after a reopen, and purged
/// alone.
pub async fn any_printable_text_is_an_id(fixture: Fixture) {
    let store = &*fixture.store;
    let mut logs: Vec<SessionLog> = unusual_ids().iter().map(|id| SessionLog::new(id)).collect();
    for log in &mut logs {
        let text = format!("in {}", log.key.session);
        log.push_message(&text).push_message("discarded").save(store).await;
        let digest = head_of(&log.key, &log.records[..2]).digest;
        log.push(Entry::Rewound(RewindEntry { to: 2, digest })).save(store).await;
    }
    let namespaces: Vec<Namespace> = logs.iter().map(|log| session_namespace(&log.key, "cache")).collect();
    for (n, namespace) in namespaces.iter().enumerate() {
        store.put(namespace, &item("k", n as i64), None).await.unwrap();
    }
    for log in &logs {
        assert_eq!(read_full_log(store, &log.key).await, log.full_log(), "{}", log.key.session);
        assert_eq!(ReviewId::of(&log.key.session, 1).session().as_ref(), Some(&log.key.session));
        assert_eq!(
            SessionCursor::of(&log.head()).to_string().parse::<SessionCursor>().unwrap().session,
            log.key.session
        );
    }
    let mut query = SessionQuery::new(OwnerFilter::Tenant(logs[0].key.tenant.clone()), 5);
    let mut listed = BTreeSet::new();
    loop {
        let page = store.heads(&query).await.unwrap();
        let Some(last) = page.last() else { break };
        query.cursor = Some(SessionCursor::of(last));
        listed.extend(page.into_iter().map(|head| head.info.session_id));
    }
    assert_eq!(listed, logs.iter().map(|log| log.key.session.clone()).collect());
    let before = state(store, &namespaces, &[]).await;
    let fixture = match fixture.reopen().await {
        Some(reopened) => reopened,
        None => return,
    };
    let store = &*fixture.store;
    assert_eq!(state(store, &namespaces, &[]).await, before);
    for log in &mut logs {
        log.push_message("after the reopen").save(store).await;
        assert_eq!(read_full_log(store, &log.key).await, log.full_log());
    }
}

/// A fork of a session with an unusual id inherits its records when it is purged, also under an unusual id.
pub async fn forks_of_unusual_ids_inherit(fixture: Fixture) {
    let ids = unusual_ids();
    let mut forks = Vec::new();
    for id in &ids {
        let mut parent = SessionLog::new(id);
        parent.push_message("one").save(&*fixture.store).await;
        let fork_id: String = id.chars().rev().take(120).collect::<String>().trim().to_owned() + " fork";
        let mut fork = parent.fork(&fork_id, 2);
        fork.push_message("two").save(&*fixture.store).await;
        fixture.store.purge(&parent.key).await.unwrap();
        assert_eq!(fixture.store.head(&parent.key).await.unwrap(), None, "{id}");
        forks.push(fork);
    }
    let Some(fixture) = fixture.reopen().await else { return };
    for fork in &forks {
        assert_eq!(read_full_log(&*fixture.store, &fork.key).await, fork.full_log(), "{}", fork.key.session);
    }
}
