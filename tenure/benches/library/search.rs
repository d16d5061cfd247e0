//! Full-text search over all messages.

use crate::*;
use tenure::store::RecordRange;

const SESSIONS: usize = 2_000;
const TURNS: usize = 13;

/// A word in the oldest of 2,000 sessions of 52 messages, so that all are scanned, compared with
/// only reading the same records.
pub async fn words(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("search.db").display());
    let tenure = Tenure::open_with(&url, lists::options_without_ttl()).await.unwrap();
    for n in 0..SESSIONS {
        let session = create(&tenure, &format!("s{n:04}")).await;
        let mut messages: Vec<Message> = (n * TURNS..(n + 1) * TURNS).flat_map(turn).collect();
        if n == 0 {
            messages[7] = Message::user("the one about the Ferry");
        }
        tenure.append(&bench_principal(), &session, plain(messages)).await.unwrap();
    }
    // Nothing is cached.
    let tenure = Tenure::open_with(&url, lists::options_without_ttl()).await.unwrap();
    let mut pages = 0;
    let mut search = SearchRequest::new("ferry", 20);
    let all = timed(async {
        loop {
            let page = tenure.search_sessions(&bench_principal(), &search).await.unwrap();
            pages += 1;
            match page.next {
                Some(next) => search.cursor = Some(next),
                None => {
                    assert_eq!(page.hits.len(), 1);
                    break;
                }
            }
        }
    });
    let all = all.await;
    let read = timed(async {
        for n in 0..SESSIONS {
            let key = bench_principal().key(&id(&format!("s{n:04}")));
            let records = tenure.store().records(&key, &RecordRange::back_from(u64::MAX, 128)).await.unwrap();
            assert_eq!(records.len(), TURNS * 4 + 1);
        }
    });
    let read = read.await;
    let label = format!("a word in {SESSIONS} sessions of 52 messages, in {pages} pages, beside reading them");
    report.row(label, ms(all), ms(read), ratio(all, read), Promise::None);
    let newest = timed(async {
        let first = SearchRequest::new("\"session memory\" retry", 20);
        assert_eq!(tenure.search_sessions(&bench_principal(), &first).await.unwrap().hits.len(), 20);
    });
    let newest = newest.await;
    report.row("the newest 20 messages with words that many have", ms(newest), "", 0.0, Promise::None);
}
