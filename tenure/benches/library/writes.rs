//! Appending: one writer, many writers.

use crate::*;

/// A durable append of a turn of four messages with one fdatasync, compared with one raw commit;
/// and at 100,000 messages compared with 100.
pub async fn append(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let tenure = Tenure::open(&format!("sqlite:{}", dir.path().join("ours.db").display())).await.unwrap();
    let db = raw::open(&dir.path().join("raw.db"));
    let short = create(&tenure, "short").await;
    let long = create(&tenure, "long").await;
    fill(&tenure, &short, 100).await;
    fill(&tenure, &long, 100_000).await;
    // Both files contain the same sessions with the same bytes.
    raw::commit(&db, 1, 0, &(0..25).flat_map(turn).collect::<Vec<_>>());
    (0..25_000)
        .step_by(1000)
        .for_each(|n| raw::commit(&db, 2, n * 4, &(n..n + 1000).flat_map(turn).collect::<Vec<_>>()));
    let mut at_100 = Vec::new();
    let mut baseline = Vec::new();
    let mut at_100k = Vec::new();
    for n in 0..2400 {
        let messages = turn(n);
        let append = plain(messages.clone());
        // Alternate the order: the first write after another file's fsync is slower.
        for next_writer in [n % 3, (n + 1) % 3, (n + 2) % 3] {
            match next_writer {
                0 => baseline.push(time(|| raw::commit(&db, 1, 100 + n * 4, &messages)).0),
                1 => at_100.push(
                    timed(async { tenure.append(&bench_principal(), &short, append.clone()).await.unwrap() }).await,
                ),
                _ => at_100k.push(
                    timed(async { tenure.append(&bench_principal(), &long, append.clone()).await.unwrap() }).await,
                ),
            }
        }
    }
    let at_100 = median(at_100);
    let baseline = median(baseline);
    let at_100k = median(at_100k);
    report.row(
        "append a turn, SQLite, one writer, beside raw rusqlite",
        ms(at_100),
        ms(baseline),
        ratio(at_100, baseline),
        Promise::AtMost(1.4),
    );
    report.row(
        "append at 100,000 messages, beside at 100",
        ms(at_100k),
        ms(at_100),
        ratio(at_100k, at_100),
        Promise::AtMost(1.15),
    );
}

async fn sixteen_writers(tenure: &Tenure, round: usize, duration: Duration) -> f64 {
    let start = Instant::now();
    let mut tasks = Vec::new();
    for w in 0..16 {
        let tenure = tenure.clone();
        tasks.push(tokio::spawn(async move {
            let session = create(&tenure, &format!("w{round}-{w}")).await;
            let mut n = 0;
            while start.elapsed() < duration {
                tenure.append(&bench_principal(), &session, plain(turn(n))).await.unwrap();
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
    let duration = Duration::from_secs(3);
    let tenure = Tenure::open(&format!("sqlite:{}", dir.path().join("ours.db").display())).await.unwrap();
    let mut measured = 0.0f64;
    let mut baseline = 0.0f64;
    for round in 0..3 {
        let path = dir.path().join(format!("raw{round}.db"));
        baseline =
            baseline.max(tokio::task::spawn_blocking(move || raw::group_commit(&path, 16, duration)).await.unwrap());
        measured = measured.max(sixteen_writers(&tenure, round, duration).await);
    }
    let rate = |r: f64| format!("{r:.0} turns/s");
    report.row(
        "16 writers, SQLite, beside raw group commit",
        rate(measured),
        rate(baseline),
        measured / baseline,
        Promise::AtLeast(0.7),
    );

    let dir = dir.path().join("jsonl");
    let tenure = Tenure::open(&format!("jsonl:{}", dir.display())).await.unwrap();
    let jsonl = sixteen_writers(&tenure, 0, duration).await;
    report.row(
        "16 writers, JSONL, beside raw SQLite group commit",
        rate(jsonl),
        rate(baseline),
        jsonl / baseline,
        Promise::None,
    );

    let Some(schema) = PostgresSchema::new() else { return };
    let tenure = Tenure::open(&schema.url()).await.unwrap();
    let mut measured = 0.0f64;
    let mut baseline = 0.0f64;
    for round in 0..3 {
        baseline = baseline.max(pgbench(schema.server(), schema.name()));
        measured = measured.max(sixteen_writers(&tenure, round, duration).await);
    }
    report.row(
        "16 writers, PostgreSQL, beside pgbench",
        rate(measured),
        rate(baseline),
        measured / baseline,
        Promise::AtLeast(0.6),
    );
}
