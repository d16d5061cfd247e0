//! Appending: one writer, many writers.

use crate::*;

/// A durable append of a turn of four messages with one fdatasync, compared with one raw commit;
/// and at 100,000 messages compared with 100.
pub async fn append(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let tenure = Tenure::open(&format!("sqlite:{}", dir.path().join("ours.db").display())).await.unwrap();
    let db = raw::open(&dir.path().join("raw.db"));
    let (short, long) = (create(&tenure, "short").await, create(&tenure, "long").await);
    fill(&tenure, &short, 100).await;
    fill(&tenure, &long, 100_000).await;
    // Both files contain the same sessions with the same bytes.
    raw::commit(&db, 1, 0, &(0..25).flat_map(turn).collect::<Vec<_>>());
    (0..25_000)
        .step_by(1000)
        .for_each(|n| raw::commit(&db, 2, n * 4, &(n..n + 1000).flat_map(turn).collect::<Vec<_>>()));
    let (mut ours, mut theirs, mut far) = (Vec::new(), Vec::new(), Vec::new());
    for n in 0..2400 {
        let said = turn(n);
        let append = plain(said.clone());
        // Alternate the order: the first write after another file's fsync is slower.
        for who_is_next in [n % 3, (n + 1) % 3, (n + 2) % 3] {
            match who_is_next {
                0 => theirs.push(time(|| raw::commit(&db, 1, 100 + n * 4, &said)).0),
                1 => ours.push(timed(async { tenure.append(&who(), &short, append.clone()).await.unwrap() }).await),
                _ => far.push(timed(async { tenure.append(&who(), &long, append.clone()).await.unwrap() }).await),
            }
        }
    }
    let (ours, theirs, far) = (median(ours), median(theirs), median(far));
    report.row(
        "append a turn, SQLite, one writer, beside raw rusqlite",
        ms(ours),
        ms(theirs),
        ratio(ours, theirs),
        Promise::AtMost(1.4),
    );
    report.row("append at 100,000 messages, beside at 100", ms(far), ms(ours), ratio(far, ours), Promise::AtMost(1.15));
}

async fn sixteen(tenure: &Tenure, round: usize, lasting: Duration) -> f64 {
    let start = Instant::now();
    let mut tasks = Vec::new();
    for w in 0..16 {
        let tenure = tenure.clone();
        tasks.push(tokio::spawn(async move {
            let session = create(&tenure, &format!("w{round}-{w}")).await;
            let mut n = 0;
            while start.elapsed() < lasting {
                tenure.append(&who(), &session, plain(turn(n))).await.unwrap();
                n += 1;
            }
            n
        }));
    }
    let mut turns = 0;
    for task in tasks {
        turns += task.await.unwrap();
    }
    turns as f64 / start.elapsed().as_secs_f64()
}

/// 16 writers to 16 sessions, compared with raw group commit and with `pgbench`.
pub async fn writers(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let lasting = Duration::from_secs(3);
    let tenure = Tenure::open(&format!("sqlite:{}", dir.path().join("ours.db").display())).await.unwrap();
    let (mut ours, mut theirs) = (0.0f64, 0.0f64);
    for round in 0..3 {
        let path = dir.path().join(format!("raw{round}.db"));
        theirs = theirs.max(tokio::task::spawn_blocking(move || raw::group_commit(&path, 16, lasting)).await.unwrap());
        ours = ours.max(sixteen(&tenure, round, lasting).await);
    }
    let rate = |r: f64| format!("{r:.0} turns/s");
    report.row(
        "16 writers, SQLite, beside raw group commit",
        rate(ours),
        rate(theirs),
        ours / theirs,
        Promise::AtLeast(0.7),
    );

    let dir = dir.path().join("jsonl");
    let tenure = Tenure::open(&format!("jsonl:{}", dir.display())).await.unwrap();
    let jsonl = sixteen(&tenure, 0, lasting).await;
    report.row(
        "16 writers, JSONL, beside raw SQLite group commit",
        rate(jsonl),
        rate(theirs),
        jsonl / theirs,
        Promise::None,
    );

    let Ok(url) = std::env::var("TENURE_TEST_POSTGRES") else {
        println!("(PostgreSQL is not measured: TENURE_TEST_POSTGRES is not set; `make bench` sets it)");
        return;
    };
    let schema = format!("b_{}", SessionId::generate().as_str().replace('-', ""));
    let tenure = Tenure::open(&format!("{url}?schema={schema}")).await.unwrap();
    let (mut ours, mut theirs) = (0.0f64, 0.0f64);
    for round in 0..3 {
        theirs = theirs.max(pgbench(&url, &schema));
        ours = ours.max(sixteen(&tenure, round, lasting).await);
    }
    report.row(
        "16 writers, PostgreSQL, beside pgbench",
        rate(ours),
        rate(theirs),
        ours / theirs,
        Promise::AtLeast(0.6),
    );
}
