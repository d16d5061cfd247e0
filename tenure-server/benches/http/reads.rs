//! Reads of sessions, and the memory used after reading many.

use crate::client::Client;
use crate::servers::{Server, bare};
use crate::*;

async fn start_server(sizes: &[(&str, usize)]) -> (tempfile::TempDir, Server) {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("sqlite:{}", dir.path().join("ours.db").display());
    let server = Server::start(&store, None, &[]);
    let mut client = Client::connect(&server.address).await;
    for (name, messages) in sizes {
        crate::messages::filled(&mut client, name, *messages).await;
    }
    (dir, server)
}

async fn rate(address: &str, request: &[u8], duration: Duration) -> f64 {
    let start = Instant::now();
    let mut tasks = Vec::new();
    for _ in 0..16 {
        let address = address.to_owned();
        let request = request.to_vec();
        tasks.push(tokio::spawn(async move {
            let mut client = Client::connect(&address).await;
            let mut n = 0;
            while start.elapsed() < duration {
                client.send(&request).await;
                n += 1;
            }
            n
        }));
    }
    let mut total = 0;
    for task in tasks {
        total += task.await.unwrap();
    }
    total as f64 / start.elapsed().as_secs_f64()
}

/// A session of 100 messages, compared with bare axum serving the same bytes.
pub async fn full_session(report: &mut Report) {
    let (_dir, server) = start_server(&[("s", 100)]).await;
    let get = Client::request("GET", "/sessions/s", "");
    let bytes = Client::connect(&server.address).await.send(&get).await;
    let axum = bare("x".repeat(bytes));
    let mut tenure_rate = 0.0f64;
    let mut baseline_rate = 0.0f64;
    for _ in 0..3 {
        baseline_rate = baseline_rate.max(rate(&axum, &Client::request("GET", "/", ""), Duration::from_secs(2)).await);
        tenure_rate = tenure_rate.max(rate(&server.address, &get, Duration::from_secs(2)).await);
    }
    let per_second = |r: f64| format!("{r:.0} requests/s");
    let label = format!("GET of a session of 100 messages ({} KB), beside bare axum", bytes / 1024);
    report.row(
        label,
        per_second(tenure_rate),
        per_second(baseline_rate),
        tenure_rate / baseline_rate,
        Promise::AtLeast(0.6),
    );
}

/// The last 20 of 5,000 messages, compared with the last 20 of 100.
pub async fn last_messages(report: &mut Report) {
    let (_dir, server) = start_server(&[("short", 100), ("long", 5_000)]).await;
    let mut client = Client::connect(&server.address).await;
    let get = |name: &str| Client::request("GET", &format!("/sessions/{name}/messages?last=20"), "");
    let mut short = Vec::new();
    let mut long = Vec::new();
    for _ in 0..1000 {
        short.push(timed(client.send(&get("short"))).await);
        long.push(timed(client.send(&get("long"))).await);
    }
    let short = median(short);
    let long = median(long);
    report.row(
        "GET of the last 20 of 5,000 messages, beside of 100",
        ms(long),
        ms(short),
        ratio(long, short),
        Promise::AtMost(1.1),
    );
}

/// Resident memory after reading 100,000 sessions with a cache of 32 MB, compared with 10,000.
pub async fn memory(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("sqlite:{}", dir.path().join("ours.db").display());
    let server = Server::start(&store, None, &[("TENURE_LIMITS__CACHE_BYTES", "33554432")]);
    let mut seen = Vec::new();
    for range in [0..10_000, 10_000..100_000] {
        let mut tasks = Vec::new();
        for client_index in 0..16 {
            let address = server.address.clone();
            let range = range.clone();
            tasks.push(tokio::spawn(async move {
                let mut client = Client::connect(&address).await;
                for n in range.skip(client_index).step_by(16) {
                    let body = format!(
                        r#"{{"session_id":"t{n}","messages":[{{"role":"user","content":"{}"}}]}}"#,
                        words(400, n)
                    );
                    client.send(&Client::request("POST", "/v1/chat/completions", &body)).await;
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
        seen.push(server.resident());
    }
    let mb = |m: f64| format!("{m:.0} MB");
    report.row(
        "resident memory after 100,000 sessions, cache of 32 MB, beside after 10,000",
        mb(seen[1]),
        mb(seen[0]),
        seen[1] / seen[0],
        Promise::AtMost(1.5),
    );
    let label = "resident memory after 100,000 sessions, cache of 32 MB, beside 150 MB";
    report.row(label, mb(seen[1]), mb(150.0), seen[1] / 150.0, Promise::AtMost(1.0));
}
