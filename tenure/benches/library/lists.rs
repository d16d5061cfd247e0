//! Finding sessions among many.

use crate::*;
use tenure::store::{Commit, Store};

/// Writes many small sessions directly to the store, with concurrent tasks.
pub async fn write_sessions(store: &std::sync::Arc<dyn Store>, count: usize) {
    let mut tasks = Vec::new();
    for worker in 0..64 {
        let store = store.clone();
        tasks.push(tokio::spawn(async move {
            for n in (worker..count).step_by(64) {
                let user = User::new(format!("u{}", n % 10)).unwrap();
                let tags = vec![format!("t{}", n % 10)];
                let at = jiff::Timestamp::from_microsecond(1_700_000_000_000_000 + n as i64 * 1000).unwrap();
                let messages = [Message::user(&format!("question {n}")), Message::assistant(&format!("answer {n}"))];
                let entries = [Entry::created(SessionCreated { user, tags, ..SessionCreated::default() })]
                    .into_iter()
                    .chain(messages.map(Entry::message));
                let records: Vec<Record> = (1..).zip(entries).map(|(seq, entry)| Record { seq, at, entry }).collect();
                let key = SessionKey { tenant: Tenant::new("bench").unwrap(), session: id(&format!("s{n:07}")) };
                let session = Session::replay(&key, records.clone()).unwrap();
                store.commit(&Commit::new(None, records, session.head().clone())).await.unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
}

/// Options without a time to live: the sessions have old timestamps and must not expire.
pub fn options_without_ttl() -> Options {
    Options { policy: Policy { ttl: None, ..Policy::default() }, ..Options::default() }
}

/// The newest 20 of 100,000 sessions with a filter, compared with 100 sessions.
pub async fn newest(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let mut tenures = Vec::new();
    for count in [100, 100_000] {
        let path = dir.path().join(format!("{count}.db"));
        let tenure = Tenure::open_with(&format!("sqlite:{}", path.display()), options_without_ttl()).await.unwrap();
        write_sessions(tenure.store(), count).await;
        tenures.push(tenure);
    }
    for filter in ["user", "user and tag", "tenant and tag"] {
        let mut query = SessionQuery::new(OwnerFilter::AllTenants, 20);
        let mut principal = bench_principal();
        if filter != "user" {
            query.tags = vec!["t3".into()];
        }
        if filter == "tenant and tag" {
            principal = Principal::tenant_wide("bench").unwrap();
        }
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..200 {
            for (tenure, times) in tenures.iter().zip(&mut times) {
                times.push(
                    timed(async { assert!(tenure.list(&principal, query.clone()).await.unwrap().heads.len() >= 10) })
                        .await,
                );
            }
        }
        let [small, large] = times.map(median);
        report.row(
            format!("newest 20 of 100,000 by {filter}, beside of 100"),
            ms(large),
            ms(small),
            ratio(large, small),
            Promise::AtMost(3.0),
        );
    }
}

/// Content matching among 1,000,000 sessions, compared with 1,000; and the memory that many
/// sessions take.
pub async fn content_match(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let url = |count: usize| format!("sqlite:{}", dir.path().join(format!("{count}.db")).display());
    for count in [1_000, 10_000, 1_000_000] {
        let tenure = Tenure::open_with(&url(count), options_without_ttl()).await.unwrap();
        write_sessions(tenure.store(), count).await;
    }
    let mut tenures = Vec::new();
    for count in [1_000, 1_000_000] {
        tenures.push((Tenure::open_with(&url(count), options_without_ttl()).await.unwrap(), count));
    }
    let mut times = [Vec::new(), Vec::new()];
    for i in 0..400usize {
        for ((tenure, count), times) in tenures.iter().zip(&mut times) {
            let n = (i * 7919 % (count / 10)) * 10 + 3;
            times.push(timed(find(tenure, n)).await);
        }
    }
    let [small, large] = times.map(median);
    report.row(
        "content match among 1,000,000 sessions, beside among 1,000",
        ms(large),
        ms(small),
        ratio(large, small),
        Promise::AtMost(3.0),
    );
    drop(tenures);
    memory::growth(report, (&url(10_000), 10_000), (&url(1_000_000), 1_000_000));
}

pub async fn find(tenure: &Tenure, n: usize) {
    let messages =
        [Message::user(&format!("question {n}")), Message::assistant(&format!("answer {n}")), Message::user("more")];
    assert_eq!(tenure.find(&bench_principal(), &messages).await.unwrap(), Some(id(&format!("s{n:07}"))));
}
