//! Model test: random operations on this store and on the memory store must always give equal
//! results, also after a restart.

use super::*;
use crate::store::MemoryStore;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Begin(usize),
    Fork(usize, usize, u64),
    Say(usize, u8),
    Touch(usize),
    Purge(usize),
    Put(usize, u8, Option<usize>),
    Remove(usize, u8),
    Expire(i64),
    Clear(usize),
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let session = 0..5usize;
    prop_oneof![
        2 => session.clone().prop_map(Step::Begin),
        2 => (session.clone(), session.clone(), 1..12u64).prop_map(|(a, b, seq)| Step::Fork(a, b, seq)),
        4 => (session.clone(), 0..4u8).prop_map(|(s, n)| Step::Say(s, n)),
        1 => session.clone().prop_map(Step::Touch),
        2 => session.clone().prop_map(Step::Purge),
        2 => (0..7usize, 0..5u8, proptest::option::of(1..3usize)).prop_map(|(s, k, keep)| Step::Put(s, k, keep)),
        1 => (0..7usize, 0..5u8).prop_map(|(s, k)| Step::Remove(s, k)),
        1 => (0..40i64).prop_map(Step::Expire),
        1 => (0..7usize).prop_map(Step::Clear),
        2 => Just(Step::Reopen),
    ]
}

fn name(session: usize) -> SessionKey {
    key(&format!("s{session}"))
}

fn owner(n: usize) -> Owner {
    match n {
        5 => Owner::User("ü/../x".try_into().unwrap()),
        6 => Owner::Tenant,
        session => Owner::Session(name(session).session),
    }
}

/// Applies an operation to a store, and describes the result.
async fn take(store: &dyn Store, step: &Step, n: i64) -> String {
    let done = match step {
        Step::Begin(s) => store.commit(&begin(&name(*s), &[user("hi")])).await,
        Step::Fork(child, parent, seq) => match store.head(&name(*parent)).await.unwrap() {
            Some(parent) => store.commit(&fork(&name(*child), &parent, *seq)).await,
            None => Ok(()),
        },
        Step::Say(s, messages) => match store.head(&name(*s)).await.unwrap() {
            Some(head) => {
                let said: Vec<_> = (0..*messages).map(|i| user(&format!("{n} {i}"))).collect();
                let mut commit = next(&head, &said);
                commit.blobs.extend((*messages > 1).then(|| blob(&[*messages])));
                commit.items.extend((*messages > 2).then(|| ("cache".to_owned(), item("said", "x"))));
                store.commit(&commit).await
            }
            None => Ok(()),
        },
        Step::Touch(s) => match store.head(&name(*s)).await.unwrap() {
            Some(head) => {
                let mut commit = next(&head, &[]);
                commit.head.due_at = Some(at(n));
                commit.blobs.push(blob(&[0]));
                store.commit(&commit).await
            }
            None => Ok(()),
        },
        Step::Purge(s) => store.purge(&name(*s)).await,
        Step::Put(o, k, keep) => {
            let mut item = item(&format!("k{k}"), &format!("{n}"));
            (item.used_at, item.expires_at) = (at(n), Some(at(n + 10)));
            store.put(&shelf(owner(*o)), &item, *keep).await
        }
        Step::Remove(o, k) => return format!("{:?}", store.remove(&shelf(owner(*o)), &format!("k{k}")).await),
        Step::Expire(now) => return format!("{:?}", store.expire(at(*now), 100).await),
        Step::Clear(o) => store.clear(&Tenant::default(), &owner(*o)).await,
        Step::Reopen => Ok(()),
    };
    format!("{done:?}")
}

/// Reads everything that a store returns.
async fn show(store: &dyn Store) -> String {
    let mut all_of_it = format!("{:?}\n", store.heads(&SessionQuery::new(OwnerFilter::Everyone, 100)).await);
    for session in 0..5 {
        all_of_it += &format!("{:?}\n", store.records(&name(session), &RecordRange::after(0)).await);
    }
    for n in 0..7 {
        all_of_it += &format!("{:?}\n", store.items(&shelf(owner(n)), None, 100).await);
    }
    for n in 0..4 {
        all_of_it += &format!("{:?}\n", store.blob(&Tenant::default(), &BlobId::of(&[n])).await);
    }
    all_of_it
}

/// Reads what all sessions but one show, including the records of their ancestors.
async fn shown_by_others(store: &dyn Store, session: usize) -> Vec<(SessionKey, Vec<Record>)> {
    let mut shown = Vec::new();
    for head in store.heads(&SessionQuery::new(OwnerFilter::Everyone, 100)).await.unwrap() {
        if head.key() != name(session) {
            shown.push((head.key(), purging::shown(store, &head.key()).await));
        }
    }
    shown
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_same_as_in_memory(steps in proptest::collection::vec(step(), 1..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let dir = TempDir::new().unwrap();
            let (mut files, memory) = (open(&dir).await, MemoryStore::new());
            for (n, step) in steps.iter().enumerate() {
                if matches!(step, Step::Reopen) {
                    drop(files);
                    files = open(&dir).await;
                }
                let n = n as i64;
                let purged = if let Step::Purge(s) = step { Some((*s, shown_by_others(&memory, *s).await)) } else { None };
                assert_eq!(take(&files, step, n).await, take(&memory, step, n).await, "{n}: {step:?}");
                assert_eq!(show(&files).await, show(&memory).await, "after {n}: {step:?}");
                if let Some((s, before)) = purged {
                    assert_eq!(shown_by_others(&memory, s).await, before, "a purge changed what others show");
                }
            }
        });
    }
}
