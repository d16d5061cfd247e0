//! Reads of sessions, and the memory used after reading many.

use crate::client::Client;
use crate::servers::{Server, bare, behind_middleware};
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

/// A session of 100 messages, compared with bare axum serving the same bytes, and with a minimal handler that serves
/// them behind the server's connections and middleware. The three take turns of a quarter of a second, so that other
/// load on the machine affects all of them.
pub async fn full_session(report: &mut Report) {
    let (_dir, server) = start_server(&[("s", 100)]).await;
    let get_session = Client::request("GET", "/sessions/s", "");
    let get = Client::request("GET", "/", "");
    let bytes = Client::connect(&server.address).await.send(&get_session).await;
    let minimal = behind_middleware("x".repeat(bytes));
    let axum = bare("x".repeat(bytes));
    let mut rates = [const { Vec::new() }; 3];
    for round in 0..36 {
        for turn in 0..3 {
            let variant = (round + turn) % 3;
            let (address, request) = [(&server.address, &get_session), (&minimal, &get), (&axum, &get)][variant];
            rates[variant].push(rate(address, request, Duration::from_millis(250)).await);
        }
    }
    let [session, minimal, axum] = rates.map(|mut rates| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    });
    let kb = bytes / 1024;
    let session_label = format!("GET of a session of 100 messages ({kb} KB)");
    for (label, measured, baseline, promise) in [
        (format!("{session_label}, beside bare axum"), session, axum, Promise::AtLeast(0.6)),
        (format!("minimal handler behind the middleware ({kb} KB), beside bare axum"), minimal, axum, Promise::None),
        (format!("{session_label}, beside the minimal handler"), session, minimal, Promise::None),
    ] {
        let per_second = |r: f64| format!("{r:.0} requests/s");
        report.row(label, per_second(measured), per_second(baseline), measured / baseline, promise);
    }
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
