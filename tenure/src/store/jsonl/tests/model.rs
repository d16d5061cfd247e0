//! Model test: random operations on this store and on the memory store must always give equal
//! results, also after a restart.

use super::*;
use crate::store::MemoryStore;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Begin(usize),
    Fork(usize, usize, u64),
    Append(usize, u8),
    Touch(usize),
    Purge(usize),
    Put(usize, u8, Option<usize>),
    Remove(usize, u8),
    Expire(i64),
    DeleteNamespace(usize),
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let session = 0..5usize;
    prop_oneof![
        2 => session.clone().prop_map(Step::Begin),
        2 => (session.clone(), session.clone(), 1..12u64).prop_map(|(a, b, seq)| Step::Fork(a, b, seq)),
        4 => (session.clone(), 0..4u8).prop_map(|(s, n)| Step::Append(s, n)),
        1 => session.clone().prop_map(Step::Touch),
        2 => session.clone().prop_map(Step::Purge),
        2 => (0..7usize, 0..5u8, proptest::option::of(1..3usize)).prop_map(|(s, k, max_items)| Step::Put(s, k, max_items)),
        1 => (0..7usize, 0..5u8).prop_map(|(s, k)| Step::Remove(s, k)),
        1 => (0..40i64).prop_map(Step::Expire),
        1 => (0..7usize).prop_map(Step::DeleteNamespace),
        2 => Just(Step::Reopen),
    ]
}

fn session_key(session: usize) -> SessionKey {
    key(&format!("s{session}"))
}

fn owner(n: usize) -> Owner {
    match n {
        5 => Owner::User("ü/../x".try_into().unwrap()),
        6 => Owner::Tenant,
        session => Owner::Session(session_key(session).session),
    }
}

/// Applies an operation to a store, and describes the result.
async fn apply(store: &dyn Store, step: &Step, n: i64) -> String {
    let result = match step {
        Step::Begin(s) => store.commit(&begin(&session_key(*s), &[user("hi")])).await,
        Step::Fork(child, parent, seq) => match store.head(&session_key(*parent)).await.unwrap() {
            Some(parent) => store.commit(&fork(&session_key(*child), &parent, *seq)).await,
            None => Ok(()),
        },
        Step::Append(s, messages) => match store.head(&session_key(*s)).await.unwrap() {
            Some(head) => {
                let entries: Vec<_> = (0..*messages).map(|i| user(&format!("{n} {i}"))).collect();
                let mut commit = next(&head, &entries);
                commit.blobs.extend((*messages > 1).then(|| blob([*messages])));
                commit.items.extend((*messages > 2).then(|| ("cache".to_owned(), item("said", "x"))));
                store.commit(&commit).await
            }
            None => Ok(()),
        },
        Step::Touch(s) => match store.head(&session_key(*s)).await.unwrap() {
            Some(head) => {
                let mut commit = next(&head, &[]);
                commit.head.due_at = Some(at(n));
                commit.blobs.push(blob([0]));
                store.commit(&commit).await
            }
            None => Ok(()),
        },
        Step::Purge(s) => store.purge(&session_key(*s)).await,
        Step::Put(o, k, max_items) => {
            let mut item = item(&format!("k{k}"), &format!("{n}"));
            item.used_at = at(n);
            item.expires_at = Some(at(n + 10));
            store.put(&namespace_of(owner(*o)), &item, *max_items).await
        }
        Step::Remove(o, k) => return format!("{:?}", store.remove(&namespace_of(owner(*o)), &format!("k{k}")).await),
        Step::Expire(now) => return format!("{:?}", store.expire(at(*now), 100).await),
        Step::DeleteNamespace(o) => store.delete_owner(&Tenant::default(), &owner(*o)).await,
        Step::Reopen => Ok(()),
    };
    format!("{result:?}")
}

/// Reads everything that a store returns.
async fn read_everything(store: &dyn Store) -> String {
    let mut contents = format!("{:?}\n", store.heads(&SessionQuery::new(OwnerFilter::AllTenants, 100)).await);
    for session in 0..5 {
        contents += &format!("{:?}\n", store.records(&session_key(session), &RecordRange::after(0)).await);
    }
    for n in 0..7 {
        contents += &format!("{:?}\n", store.items(&namespace_of(owner(n)), None, 100).await);
    }
    for n in 0..4 {
        contents += &format!("{:?}\n", store.blob(&Tenant::default(), &BlobId::of(&[n])).await);
    }
    contents
}

/// Reads what all sessions but one show, including the records of their ancestors.
async fn logs_of_others(store: &dyn Store, session: usize) -> Vec<(SessionKey, Vec<Record>)> {
    let mut logs = Vec::new();
    for head in store.heads(&SessionQuery::new(OwnerFilter::AllTenants, 100)).await.unwrap() {
        if head.key() != session_key(session) {
            logs.push((head.key(), purging::full_log(store, &head.key()).await));
        }
    }
    logs
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn results_equal_those_of_the_memory_store(steps in proptest::collection::vec(step(), 1..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let dir = TempDir::new().unwrap();
            let mut files = open(&dir).await;
            let memory = MemoryStore::new();
            for (n, step) in steps.iter().enumerate() {
                if matches!(step, Step::Reopen) {
                    drop(files);
                    files = open(&dir).await;
                }
                let n = n as i64;
                let purged = if let Step::Purge(s) = step { Some((*s, logs_of_others(&memory, *s).await)) } else { None };
                assert_eq!(apply(&files, step, n).await, apply(&memory, step, n).await, "{n}: {step:?}");
                assert_eq!(read_everything(&files).await, read_everything(&memory).await, "after {n}: {step:?}");
                if let Some((s, before)) = purged {
                    assert_eq!(logs_of_others(&memory, s).await, before, "a purge changed what others show");
                }
            }
        });
    }
}
