//! Loading and forking.

use crate::*;

/// Loading 5,000 messages as bytes compared with raw rows, and the last 20 of 100,000 compared with
/// the last 20 of 100.
pub async fn load(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("ours.db").display());
    let tenure = Tenure::open(&url).await.unwrap();
    let db = raw::open(&dir.path().join("raw.db"));
    let small = create(&tenure, "small").await;
    let middle = create(&tenure, "middle").await;
    let large = create(&tenure, "large").await;
    fill(&tenure, &small, 100).await;
    fill(&tenure, &middle, 5_000).await;
    fill(&tenure, &large, 100_000).await;
    raw::commit(&db, 1, 0, &(0..1250).flat_map(turn).collect::<Vec<_>>());
    let mut uncached = Vec::new();
    let mut cached = Vec::new();
    let mut baseline = Vec::new();
    let with_cache = Tenure::with_store(tenure.store().clone(), Options::default());
    for _ in 0..60 {
        let (elapsed, raw) = time(|| raw::load(&db, 1));
        baseline.push(elapsed);
        // Without cache: every load reads from the store.
        let without_cache = Tenure::with_store(tenure.store().clone(), Options::default());
        let start = Instant::now();
        let json = without_cache.messages_json(&bench_principal(), &middle).await.unwrap();
        uncached.push(start.elapsed());
        assert_eq!(json, raw);
        let start = Instant::now();
        assert_eq!(with_cache.messages_json(&bench_principal(), &middle).await.unwrap().len(), raw.len());
        cached.push(start.elapsed());
    }
    let uncached = median(uncached);
    let cached = median(cached);
    let baseline = median(baseline);
    report.row(
        "load 5,000 messages as bytes, cold, beside raw",
        ms(uncached),
        ms(baseline),
        ratio(uncached, baseline),
        Promise::AtMost(2.0),
    );
    report.row(
        "load 5,000 messages as bytes, hot, beside raw",
        ms(cached),
        ms(baseline),
        ratio(cached, baseline),
        Promise::AtMost(2.0),
    );
    let mut of_100 = Vec::new();
    let mut of_100k = Vec::new();
    for _ in 0..500 {
        of_100.push(
            timed(async { assert_eq!(tenure.last_messages(&bench_principal(), &small, 20).await.unwrap().len(), 20) })
                .await,
        );
        of_100k.push(
            timed(async { assert_eq!(tenure.last_messages(&bench_principal(), &large, 20).await.unwrap().len(), 20) })
                .await,
        );
    }
    let of_100 = median(of_100);
    let of_100k = median(of_100k);
    report.row(
        "last 20 of 100,000 messages, beside of 100",
        ms(of_100k),
        ms(of_100),
        ratio(of_100k, of_100),
        Promise::AtMost(2.0),
    );
}

/// Forking 100,000 messages: time compared with one append, and bytes on disk.
pub async fn fork(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ours.db");
    let tenure = Tenure::open(&format!("sqlite:{}", file.display())).await.unwrap();
    let large = create(&tenure, "large").await;
    fill(&tenure, &large, 100_000).await;
    tenure.checkpoint(&bench_principal(), &large, Some(CheckpointLabel::new("here").unwrap())).await.unwrap();
    tenure.load(&bench_principal(), &large).await.unwrap();
    let mut forks = Vec::new();
    let mut labelled = Vec::new();
    let mut appends = Vec::new();
    for n in 0..300 {
        appends.push(timed(async { tenure.append(&bench_principal(), &large, plain(turn(n))).await.unwrap() }).await);
        forks.push(timed(async { tenure.fork(&bench_principal(), &large, Point::End).await.unwrap() }).await);
        labelled.push(timed(async { tenure.fork(&bench_principal(), &large, "here").await.unwrap() }).await);
    }
    let forks = median(forks);
    let labelled = median(labelled);
    let appends = median(appends);
    report.row(
        "fork of 100,000 messages at the end, beside an append",
        ms(forks),
        ms(appends),
        ratio(forks, appends),
        Promise::AtMost(2.0),
    );
    report.row(
        "fork of 100,000 messages at a label, beside an append",
        ms(labelled),
        ms(appends),
        ratio(labelled, appends),
        Promise::AtMost(2.0),
    );
    let used = |db: &rusqlite::Connection| {
        db.query_row("select page_count * page_size from pragma_page_count, pragma_page_size", [], |r| {
            r.get::<_, i64>(0)
        })
        .unwrap()
    };
    let db = rusqlite::Connection::open(&file).unwrap();
    let before = used(&db);
    for _ in 0..1000 {
        tenure.fork(&bench_principal(), &large, Point::End).await.unwrap();
    }
    let each = (used(&db) - before) as f64 / 1000.0;
    report.row(
        "disk of one fork, bytes, beside 4 KB",
        format!("{each:.0} B"),
        "4096 B",
        each / 4096.0,
        Promise::AtMost(1.0),
    );
}
