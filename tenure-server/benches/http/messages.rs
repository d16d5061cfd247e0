//! `POST /sessions/{id}/messages` with a turn of four messages.

use crate::client::Client;
use crate::servers::Server;
use crate::*;
use tenure::testing::PostgresSchema;

fn append(session: &str, n: usize) -> Vec<u8> {
    let messages: Vec<String> = turn(n).iter().map(|m| m.as_str().to_owned()).collect();
    let body = format!(r#"{{"messages":[{}]}}"#, messages.join(","));
    Client::request("POST", &format!("/sessions/{session}/messages"), &body)
}

/// Fills a session with many turns in large batches.
pub async fn filled(client: &mut Client, session: &str, messages: usize) {
    begin(client, session).await;
    for from in (0..messages / 4).step_by(500) {
        let contents: Vec<String> =
            (from..(from + 500).min(messages / 4)).flat_map(turn).map(|m| m.as_str().to_owned()).collect();
        let body = format!(r#"{{"messages":[{}]}}"#, contents.join(","));
        client.send(&Client::request("POST", &format!("/sessions/{session}/messages"), &body)).await;
    }
}

async fn begin(client: &mut Client, session: &str) {
    client.send(&Client::request("POST", "/sessions", &format!(r#"{{"id":"{session}"}}"#))).await;
}

/// One client, compared with a raw commit; and appending at 5,000 messages compared with appending to an empty
/// session.
pub async fn one_client(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("sqlite:{}", dir.path().join("ours.db").display());
    let db = raw::open(&dir.path().join("raw.db"));
    let server = Server::start(&store, None, &[]);
    let mut client = Client::connect(&server.address).await;
    begin(&mut client, "short").await;
    filled(&mut client, "long", 5_000).await;
    let mut short = Vec::new();
    let mut long = Vec::new();
    let mut baseline_times = Vec::new();
    for n in 0..900 {
        let messages = turn(n);
        let to_short = append("short", n);
        let to_long = append("long", n);
        for next in [n % 3, (n + 1) % 3, (n + 2) % 3] {
            match next {
                0 => baseline_times.push(time(|| raw::commit(&db, 1, n * 4, &messages)).0),
                1 => short.push(timed(client.send(&to_short)).await),
                _ => long.push(timed(client.send(&to_long)).await),
            }
        }
    }
    let short = median(short);
    let long = median(long);
    let baseline_times = median(baseline_times);
    let limit = baseline_times + Duration::from_micros(300);
    report.row(
        "append over HTTP, one client, beside a raw commit + 0.3 ms",
        ms(short),
        ms(limit),
        ratio(short, limit),
        Promise::AtMost(1.0),
    );
    report.row(
        "append over HTTP at 5,000 messages, beside at 0",
        ms(long),
        ms(short),
        ratio(long, short),
        Promise::AtMost(1.2),
    );
}

async fn sixteen(server: &Server, round: usize, duration: Duration) -> f64 {
    let start = Instant::now();
    let mut tasks = Vec::new();
    for w in 0..16 {
        let address = server.address.clone();
        tasks.push(tokio::spawn(async move {
            let mut client = Client::connect(&address).await;
            let session = format!("w{round}-{w}");
            begin(&mut client, &session).await;
            let requests: Vec<Vec<u8>> = (0..64).map(|n| append(&session, n)).collect();
            let mut n = 0;
            while start.elapsed() < duration {
                client.send(&requests[n % 64]).await;
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

/// 16 concurrent clients, compared with raw group commit and `pgbench`.
pub async fn sixteen_clients(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let duration = Duration::from_secs(3);
    let rate = |r: f64| format!("{r:.0} turns/s");
    let server = Server::start(&format!("sqlite:{}", dir.path().join("ours.db").display()), None, &[]);
    let mut tenure_rate = 0.0f64;
    let mut baseline_rate = 0.0f64;
    for round in 0..3 {
        let path = dir.path().join(format!("raw{round}.db"));
        baseline_rate = baseline_rate
            .max(tokio::task::spawn_blocking(move || raw::group_commit(&path, 16, duration)).await.unwrap());
        tenure_rate = tenure_rate.max(sixteen(&server, round, duration).await);
    }
    drop(server);
    report.row(
        "append over HTTP, 16 clients, SQLite, beside raw group commit",
        rate(tenure_rate),
        rate(baseline_rate),
        tenure_rate / baseline_rate,
        Promise::AtLeast(0.4),
    );
    let Some(schema) = PostgresSchema::new() else { return };
    drop(Tenure::open(&schema.url()).await.unwrap());
    let server = Server::start(&schema.url(), None, &[]);
    let (mut tenure_rate, mut baseline_rate) = (0.0f64, 0.0f64);
    for round in 0..3 {
        baseline_rate = baseline_rate.max(pgbench(schema.server(), schema.name()));
        tenure_rate = tenure_rate.max(sixteen(&server, round, duration).await);
    }
    report.row(
        "append over HTTP, 16 clients, PostgreSQL, beside pgbench",
        rate(tenure_rate),
        rate(baseline_rate),
        tenure_rate / baseline_rate,
        Promise::AtLeast(0.5),
    );
}
