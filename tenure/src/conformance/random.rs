//! Randomized tests against a reference model. They are deterministic; the seed is part of the
//! failure message.

use super::fixture::Fixture;
use crate::store::contract::Store;
use crate::store::item::{Item, Owner};
use crate::store::query::{ExpiryCutoffs, OwnerFilter, SessionCursor, SessionOrder, SessionQuery};
use crate::testing::records::{
    SessionLog, append_message, head_of, item, key, namespace, read_all, read_full_log, timestamp,
};
use crate::testing::rng::Rng;
use crate::types::digest::VisibleHash;
use crate::types::entry::{Entry, LeaseClaim, ReviewOpened, SessionCreated, SessionPatch};
use crate::types::head::{Head, ReviewIndexLabel};
use crate::types::id::{ReviewId, RunId, Tenant, User};
use crate::types::message::Message;
use crate::types::status::Status;
use serde_json::{Map, Value, json};
use std::{cmp::Reverse, collections::BTreeMap};

const SEED: u64 = 20_260_102;

const TENANTS: [&str; 2] = ["a", "b"];
const USERS: [&str; 3] = ["ada", "bob", "Ädä"];
const NAMES: [Option<&str>; 3] = [None, Some("x"), Some("it's")];
const TITLES: [&str; 6] = ["Grüße ÄÖ", "100% sure", "under_score", "GRÜN", "", "a\0b"];
const TITLE_QUERIES: [&str; 8] = ["gr", "ÄÖ", "%", "_", "", "AB", "ü", "nowhere"];
const TAGS: [&str; 5] = ["red", "green", "it's", "a\0b", "ä"];
const WORDS: [&str; 3] = ["hi", "ho", "hello"];
const STATUSES: [Status; 4] = [Status::Active, Status::Paused, Status::Expired, Status::Deleted];

fn values() -> [Value; 6] {
    [json!(1), json!("1"), json!(true), json!(null), json!("ä"), json!({"n": 1})]
}

fn random_subset(rng: &mut Rng, from: &[&str]) -> Vec<String> {
    from.iter().filter(|_| rng.once_in(3)).map(|s| s.to_string()).collect()
}

fn created(rng: &mut Rng) -> SessionCreated {
    SessionCreated {
        user: User::new(rng.pick(&USERS)).unwrap(),
        assistant: rng.pick(&NAMES).map(str::to_owned),
        thread: rng.pick(&NAMES).map(str::to_owned),
        title: (!rng.once_in(4)).then(|| rng.pick(&TITLES).to_string()),
        tags: random_subset(rng, &TAGS),
        metadata: ["k", "l"].iter().map(|k| (k.to_string(), rng.pick(&values()).clone())).collect(),
        ..SessionCreated::default()
    }
}

/// Appends a random entry.
fn push_random_entry(rng: &mut Rng, log: &mut SessionLog) {
    let run = RunId::new("r").unwrap();
    match rng.below(6) {
        5 => {
            let opened = ReviewOpened {
                review: ReviewId::of(&log.key.session, log.seq() + 1),
                step: "x".to_owned(),
                run: None,
                call: None,
                queue: rng.pick(&NAMES).map(str::to_owned),
                lost: false,
                timeout: None,
                detail: Map::new(),
            };
            log.push(Entry::review_opened(opened))
        }
        0 => log.push(Entry::Status { to: *rng.pick(&STATUSES), reason: None, until: None }),
        1 => log.push(Entry::RunClaimed {
            run,
            claim: LeaseClaim { node: "n".to_owned(), until: timestamp(rng.below(50) as i64) },
        }),
        2 => log.push(Entry::info(SessionPatch {
            title: Some(rng.pick(&TITLES).to_string()).into(),
            tags: Some(random_subset(rng, &TAGS)).into(),
            metadata: Map::from_iter([("k".to_owned(), rng.pick(&values()).clone())]),
            ..SessionPatch::default()
        })),
        _ => log.push(Entry::message(Message::user(rng.pick::<&str>(&WORDS)))),
    };
}

/// Stores sessions of two tenants, changes some and purges some. Returns the remaining heads.
async fn fill(store: &dyn Store, rng: &mut Rng) -> Vec<Head> {
    let mut logs = Vec::<SessionLog>::new();
    let mut heads = Vec::new();
    for n in 0..200 {
        // Both tenants use the same ids. Many sessions are active at the same time, but no two with
        // the same id are.
        let key = key(TENANTS[n % 2], &format!("s{}", n / 2));
        let mut log = SessionLog::begin(key, created(rng), timestamp((rng.below(10) * 2 + n % 2) as i64));
        if n >= 20 && rng.once_in(5) {
            let parent = &logs[rng.below(10) * 2 + n % 2];
            let Entry::Created(fork) = parent.fork("f", 1).records.remove(0).entry else { continue };
            log.records[0].seq = 2;
            log.records[0].entry = Entry::created(SessionCreated { parent: fork.parent, ..created(rng) });
        }
        (0..rng.below(3)).for_each(|_| push_random_entry(rng, &mut log));
        logs.push(log);
    }
    for (n, log) in logs.iter_mut().enumerate() {
        log.save(store).await;
        if rng.once_in(3) {
            push_random_entry(rng, log);
        }
        let mut commit = log.commit();
        commit.head.due_at = (!rng.once_in(3)).then(|| timestamp(n as i64 * 37 % 200));
        store.commit(&commit).await.unwrap();
        heads.push(commit.head);
    }
    for head in heads.split_off(180) {
        store.purge(&head.key()).await.unwrap();
    }
    heads
}

fn query(rng: &mut Rng, heads: &[Head]) -> SessionQuery {
    let tenant = Tenant::new(rng.pick(&TENANTS)).unwrap();
    let owner = match rng.below(10) {
        0..4 => OwnerFilter::User(tenant, User::new(rng.pick(&USERS)).unwrap()),
        4..8 => OwnerFilter::Tenant(tenant),
        _ => OwnerFilter::AllTenants,
    };
    let mut query = SessionQuery::new(owner, *rng.pick(&[0, 1, 3, 10, 1000, usize::MAX]));
    let sample = rng.pick(heads).clone();
    let time = |rng: &mut Rng, end| timestamp(rng.below(end) as i64);
    if rng.once_in(6) {
        query.assistant = sample.assistant.clone();
    }
    if rng.once_in(6) {
        query.thread = Some("x".to_owned());
    }
    if rng.once_in(4) {
        query.status = STATUSES.into_iter().filter(|_| rng.once_in(2)).collect();
        query.expiry = rng.once_in(2).then(|| ExpiryCutoffs {
            default: (!rng.once_in(3)).then(|| time(rng, 25)),
            by_assistant: [("it's".to_owned(), (!rng.once_in(3)).then(|| time(rng, 25)))].into(),
        });
    }
    if rng.once_in(5) {
        query.created_after = Some(sample.info.created_at);
    }
    if rng.once_in(5) {
        query.created_before = Some(time(rng, 25));
    }
    if rng.once_in(4) {
        query.tags = random_subset(rng, &TAGS);
    }
    if rng.once_in(4) {
        query.metadata = vec![(rng.pick(&["k", "l"]).to_string(), rng.pick(&values()).clone())];
    }
    if rng.once_in(4) {
        query.title = Some(rng.pick(&TITLE_QUERIES).to_string());
    }
    if rng.once_in(5) {
        query.reviewing = Some(rng.pick(&[ReviewIndexLabel::Open, ReviewIndexLabel::Queue("x".to_owned())]).clone());
    }
    if rng.once_in(10) {
        query.parent = sample.parent.clone().map(|p| p.session);
    }
    if rng.once_in(6) {
        query.hashes = vec![sample.digest.hash, VisibleHash([7; 16])];
    }
    if rng.once_in(6) && matches!(query.owner, OwnerFilter::User(..)) {
        query.matches = sample.digest.match_keys();
        query.matches.push(VisibleHash([9; 16]));
    }
    if rng.once_in(6) {
        query.lease_before = Some(time(rng, 60));
    }
    if rng.once_in(4) {
        query.due_before = Some(time(rng, 250));
        query.order = *rng.pick(&[SessionOrder::Newest, SessionOrder::Oldest, SessionOrder::Due]);
    }
    if rng.once_in(3) && query.order == SessionOrder::Newest {
        query.cursor = Some(SessionCursor::of(&sample));
    }
    if rng.once_in(4) {
        query.offset = rng.below(5);
    }
    query
}

/// The reference implementation of a query.
fn expected_heads(query: &SessionQuery, heads: &[Head]) -> Vec<Head> {
    let mut matching: Vec<_> = heads.iter().filter(|h| query.matches(h)).cloned().collect();
    match query.order {
        SessionOrder::Newest => matching.sort_by_key(|h| Reverse(SessionCursor::of(h))),
        SessionOrder::Oldest => matching.sort_by_key(SessionCursor::of),
        SessionOrder::Due => matching.sort_by_key(|h| h.due_at),
    }
    let after = |h: &Head| query.cursor.as_ref().is_none_or(|c| SessionCursor::of(h) < *c);
    matching.into_iter().filter(after).skip(query.offset).take(query.limit).collect()
}

/// Every query returns what [`SessionQuery::matches`] selects, in order.
pub async fn any_query_agrees_with_its_definition(Fixture { store, .. }: Fixture) {
    println!("seed {SEED}");
    let mut rng = Rng::new(SEED);
    let heads = fill(&*store, &mut rng).await;
    let mut hits = 0;
    for n in 0..400 {
        let query = query(&mut rng, &heads);
        let want = expected_heads(&query, &heads);
        hits += want.len();
        assert_eq!(store.heads(&query).await.unwrap(), want, "seed {SEED}, query {n}: {query:?}");
    }
    assert!(hits > 1000, "too few hits for a meaningful test: {hits}");
}

/// Items are put, changed, used, removed and evicted at random: the remaining ones are read as
/// they were written.
pub async fn any_namespace_agrees_with_its_model(Fixture { store, .. }: Fixture) {
    println!("seed {SEED}");
    let mut rng = Rng::new(SEED);
    let owner = |name| namespace(Owner::User(User::new(name).unwrap()), "memory");
    let mut namespaces = [owner("ada"), owner("bob")].map(|namespace| (namespace, BTreeMap::<String, Item>::new()));
    for step in 0..400 {
        let (namespace, items) = &mut namespaces[rng.below(2)];
        let (name, at) = (format!("k{}", rng.below(8)), timestamp(step));
        match rng.below(6) {
            0..4 => {
                let max_items = rng.once_in(3).then(|| 1 + rng.below(8));
                let new = item(&name, step);
                store.put(namespace, &new, max_items).await.unwrap();
                items.insert(name.clone(), new);
                while max_items.is_some_and(|max| items.len() > max) {
                    let evictable = items.values().filter(|i| i.key != name);
                    let oldest = evictable.min_by_key(|i| i.used_at).unwrap().key.clone();
                    items.remove(&oldest);
                }
            }
            4 => {
                store.get(namespace, &name, Some(at)).await.unwrap();
                items.entry(name).and_modify(|i| (i.used_at, i.uses) = (at, i.uses + 1));
            }
            _ => assert_eq!(store.remove(namespace, &name).await.unwrap(), items.remove(&name).is_some()),
        }
        for (namespace, items) in &namespaces {
            let remaining: Vec<_> = items.values().cloned().collect();
            assert_eq!(store.items(namespace, None, 99).await.unwrap(), remaining, "seed {SEED}, step {step}");
            let names: Vec<_> = (0..8).map(|k| format!("k{k}")).filter(|_| rng.once_in(2)).collect();
            let want: Vec<_> = names.iter().filter_map(|name| items.get(name).cloned()).collect();
            let names: Vec<_> = names.iter().map(String::as_str).collect();
            let mut found = store.get_many(namespace, &names, None).await.unwrap();
            found.sort_by(|a, b| a.key.cmp(&b.key));
            assert_eq!(found, want, "seed {SEED}, step {step}, keys {names:?}");
        }
    }
}

/// Sessions are created, extended, forked and purged at random: each always reads as it was
/// written.
pub async fn any_tree_survives_any_purge(Fixture { store, .. }: Fixture) {
    for seed in SEED..SEED + 12 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let mut logs = Vec::<SessionLog>::new();
        let mut created = 0;
        for step in 0..30 {
            let index = rng.below(logs.len().max(1));
            match rng.below(8) {
                0..5 if logs.len() < 7 => {
                    let id = format!("s{seed}.{created}");
                    created += 1;
                    let mut log = match logs.get(index) {
                        Some(parent) if !rng.once_in(6) => {
                            parent.fork(&id, 1 + rng.below(parent.seq() as usize) as u64)
                        }
                        _ => SessionLog::new(&id),
                    };
                    for n in 0..rng.below(3) {
                        log.push_message(&format!("{id} {n}"));
                    }
                    log.save(&*store).await;
                    logs.push(log);
                }
                _ if logs.is_empty() => {}
                0..6 => {
                    let log = &mut logs[index];
                    log.records.push(append_message(&*store, &log.key, &format!("{step}")).await.unwrap());
                }
                _ => store.purge(&logs.swap_remove(index).key).await.unwrap(),
            }
            for log in &logs {
                assert_same(&*store, log, &format!("seed {seed}, step {step}, {}", log.key)).await;
            }
        }
    }
}

async fn assert_same(store: &dyn Store, log: &SessionLog, context: &str) {
    let full_log = log.full_log();
    assert_eq!(read_full_log(store, &log.key).await, full_log, "{context}");
    let head = store.head(&log.key).await.unwrap().unwrap();
    let own: Vec<_> = read_all(store, &log.key).await.iter().map(|r| r.seq).collect();
    assert_eq!(own, (head.first..=head.seq).collect::<Vec<_>>(), "{context}");
    assert_eq!(head.first, head.parent.as_ref().map_or(1, |p| p.seq + 1), "{context}");
    // Only the reference to an ancestor may have changed.
    assert_eq!(Head { first: 1, parent: None, ..head }, head_of(&log.key, &full_log), "{context}");
}
