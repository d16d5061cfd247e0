//! The sessions that show a record: a session, and the forks that inherit it.

use super::fixture::Fixture;
use crate::store::contract::Store;
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::store::shown::{RecordLocation, ShownRecord};
use crate::testing::records::{SessionLog, head_of, key, read_all, read_full_log, timestamp};
use crate::testing::rng::Rng;
use crate::types::entry::{Entry, RewindEntry, SessionCreated};
use crate::types::id::{SessionId, Tenant};
use std::collections::BTreeSet;

const SEED: u64 = 20_261_118;

/// Appends a rewind to a visible message.
fn push_rewind(log: &mut SessionLog, to: u64) {
    let upto: Vec<_> = log.full_log().into_iter().filter(|r| r.seq <= to).collect();
    let digest = head_of(&log.key, &upto).digest;
    log.push(Entry::Rewound(RewindEntry { to, digest }));
}

/// The messages that a log shows, by their records.
fn visible(log: &SessionLog) -> BTreeSet<u64> {
    let mut visible = BTreeSet::new();
    for record in log.full_log() {
        match record.entry {
            Entry::Message(_) => {
                visible.insert(record.seq);
            }
            Entry::Rewound(rewind) => visible.retain(|seq| *seq <= rewind.to),
            _ => {}
        }
    }
    visible
}

/// Asserts that a store finds, for each message of a tenant, exactly the sessions that show it.
async fn assert_shown(store: &dyn Store, logs: &[&SessionLog], step: &str) {
    let tenant = &logs[0].key.tenant;
    let mut locations = Vec::new();
    for log in logs {
        let own = read_all(store, &log.key).await;
        let messages = own.into_iter().filter(|r| matches!(r.entry, Entry::Message(_)));
        locations.extend(messages.map(|r| RecordLocation { session: log.key.session.clone(), seq: r.seq }));
    }
    let mut want = Vec::new();
    for (record, location) in locations.iter().enumerate() {
        for log in logs {
            // Equal records of two logs have one owner: the log in which the other's begins.
            let shows = || {
                let owner = logs.iter().find(|l| l.key.session == location.session).expect("a stored session");
                let message = owner.full_log().into_iter().find(|r| r.seq == location.seq);
                visible(log).contains(&location.seq)
                    && log.full_log().into_iter().find(|r| r.seq == location.seq) == message
            };
            if shows() {
                let active_at = store.head(&log.key).await.unwrap().unwrap().active_at;
                want.push(ShownRecord { record, session: log.key.session.clone(), active_at });
            }
        }
    }
    want.sort();
    let mut got = store.sessions_showing(tenant, &locations, 10_000).await.unwrap();
    got.sort();
    assert_eq!(got, want, "{step}, seed {SEED}");
}

/// Sessions with forks of forks and rewinds, some of which are purged, so that forks inherit records and rewinds.
pub async fn a_record_is_shown_by_the_forks_that_inherit_it(fixture: Fixture) {
    let store = &*fixture.store;
    let mut rng = Rng::new(SEED);
    for round in 0..6 {
        let tenant = format!("t{round}");
        let root = |name: &str| SessionLog::begin(key(&tenant, name), SessionCreated::default(), timestamp(round));
        let mut logs = vec![root("s0")];
        logs[0].push_message("m s0 0").save(store).await;
        for step in 1..50 {
            let at = rng.below(logs.len());
            let shown: Vec<u64> = visible(&logs[at]).into_iter().collect();
            match rng.below(5) {
                0 if !shown.is_empty() => {
                    let to = *rng.pick(&shown);
                    push_rewind(&mut logs[at], to);
                }
                1 if !shown.is_empty() && logs.len() < 10 => {
                    let seq = *rng.pick(&shown);
                    // A fork begins in the log that contains the fork point.
                    let mut owner = at;
                    while logs[owner].records[0].seq > seq {
                        let Entry::Created(created) = &logs[owner].records[0].entry else { unreachable!() };
                        let parent = created.parent.clone().expect("an inherited record has a parent").session;
                        owner = logs.iter().position(|l| l.key.session == parent).expect("the parent is stored");
                    }
                    let fork = logs[owner].fork(&format!("s{}", logs.len()), seq);
                    logs.push(fork);
                }
                _ => {
                    let text = format!("m {} {step}", logs[at].key.session);
                    logs[at].push_message(&text);
                }
            }
            // Nothing changes in most of them: such a commit writes the head again.
            logs[at].save(store).await;
            logs.last_mut().expect("not empty").save(store).await;
        }
        let mut remaining: Vec<&SessionLog> = logs.iter().collect();
        assert_shown(store, &remaining, "before purges").await;
        while remaining.len() > 2 {
            let purged = remaining.remove(rng.below(remaining.len()));
            store.purge(&purged.key).await.unwrap();
            for log in &remaining {
                assert_eq!(read_full_log(store, &log.key).await, log.full_log());
            }
            assert_shown(store, &remaining, "after a purge").await;
        }
    }
}

/// The number of pairs is limited; records, sessions and tenants that do not exist are not found.
pub async fn only_existing_sessions_show_records(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("a");
    log.push_message("one").save(&*store).await;
    for n in 0..5 {
        log.fork(&format!("f{n}"), 2).save(&*store).await;
    }
    let at = |session: &str, seq| RecordLocation { session: SessionId::new(session).unwrap(), seq };
    let tenant = &log.key.tenant;
    assert_eq!(store.sessions_showing(tenant, &[at("a", 2)], 100).await.unwrap().len(), 6);
    assert_eq!(store.sessions_showing(tenant, &[at("a", 2)], 4).await.unwrap().len(), 4);
    assert_eq!(store.sessions_showing(tenant, &[at("b", 2)], 4).await.unwrap(), []);
    assert_eq!(store.sessions_showing(tenant, &[], 4).await.unwrap(), []);
    let other = Tenant::new("other").unwrap();
    assert_eq!(store.sessions_showing(&other, &[at("a", 2)], 4).await.unwrap(), []);
}

/// A query for given sessions finds these, in the order of the list, if they match its other conditions.
pub async fn a_query_can_name_sessions(Fixture { store, .. }: Fixture) {
    for (n, name) in ["a", "b", "c", "d"].iter().enumerate() {
        let title = Some(format!("title {}", n % 2));
        let created = SessionCreated { title, ..SessionCreated::default() };
        SessionLog::begin(key("default", name), created, timestamp(n as i64)).save(&*store).await;
        SessionLog::begin(key("other", name), SessionCreated::default(), timestamp(n as i64)).save(&*store).await;
    }
    let names = |heads: Vec<crate::types::head::Head>| {
        heads.iter().map(|h| h.info.session_id.to_string()).collect::<Vec<_>>().concat()
    };
    let sessions: Vec<SessionId> = ["a", "d", "b", "x", "a"].iter().map(|s| SessionId::new(*s).unwrap()).collect();
    let base = SessionQuery::new(OwnerFilter::Tenant(Tenant::default()), 10);
    let query = SessionQuery { sessions, ..base };
    assert_eq!(names(store.heads(&query).await.unwrap()), "dba");
    let page = store.page(&query, 1).await.unwrap();
    assert_eq!((names(page.heads), page.scan_stopped_at), ("dba".to_owned(), None), "the scan bound does not apply");
    let titled = SessionQuery { title: Some("title 1".to_owned()), ..query.clone() };
    assert_eq!(names(store.page(&titled, 1).await.unwrap().heads), "db");
    let limited = SessionQuery { limit: 1, offset: 1, ..query };
    assert_eq!(names(store.page(&limited, 1).await.unwrap().heads), "b");
}
