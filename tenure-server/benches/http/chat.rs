//! The overhead that Tenure adds to a chat completion.

use crate::client::Client;
use crate::servers::{Server, upstream};
use crate::*;

fn chat(session: &str, n: usize, stream: bool) -> Vec<u8> {
    let body = format!(
        r#"{{"model":"m","session_id":"{session}","history":"append","stream":{stream},"messages":[{{"role":"user","content":"{n} {}"}}]}}"#,
        words(200, n)
    );
    Client::request("POST", "/v1/chat/completions", &body)
}

/// The request that is sent to the model server directly, for comparison: the same 50 turns.
fn direct(messages: usize, stream: bool) -> Vec<u8> {
    let turns = messages / 4;
    let shown: Vec<String> = (turns.saturating_sub(49)..turns).flat_map(turn).map(|m| m.as_str().to_owned()).collect();
    let last = format!(r#"{{"role":"user","content":"{}"}}"#, words(200, 1));
    let body = format!(r#"{{"model":"m","stream":{stream},"messages":[{},{last}]}}"#, shown.join(","));
    Client::request("POST", "/v1/chat/completions", &body)
}

/// One client in append mode: the latency compared with a direct request to the model server, and with the two
/// durable commits that a turn needs.
pub async fn added_latency(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("sqlite:{}", dir.path().join("ours.db").display());
    let db = raw::open(&dir.path().join("raw.db"));
    raw::commit(&db, 1, 0, &(0..2750).flat_map(turn).collect::<Vec<_>>());
    let upstream = upstream();
    let server = Server::start(&store, Some(&upstream), &[]);
    let mut proxied = Client::connect(&server.address).await;
    let mut direct_client = Client::connect(&upstream).await;
    for (name, messages) in [("s1000", 1_000), ("s10000", 10_000)] {
        crate::messages::filled(&mut proxied, name, messages).await;
    }
    let question = [Message::user(&words(210, 1))];
    let answer = [Message::assistant(&words(600, 7))];
    let mut added = Vec::new();
    for (name, messages) in [("s1000", 1_000), ("s10000", 10_000)] {
        let plain = direct(messages, false);
        proxied.send(&chat(name, 0, false)).await;
        let mut through = Vec::new();
        let mut alone = Vec::new();
        let mut commits = Vec::new();
        for n in 1..400 {
            let request = chat(name, n, false);
            through.push(timed(proxied.send(&request)).await);
            alone.push(timed(direct_client.send(&plain)).await);
            commits.push(
                time(|| {
                    raw::commit(&db, 1, 11_000 + messages + n * 2, &question);
                    raw::commit(&db, 1, 11_001 + messages + n * 2, &answer);
                })
                .0,
            );
        }
        let through = median(through);
        let alone = median(alone);
        let commits = median(commits);
        let adds = through.saturating_sub(alone);
        let promise = if messages == 1_000 { Promise::AtMost(1.0) } else { Promise::None };
        report.row(
            format!("chat at {messages} messages: what is added, beside two raw commits + 0.5 ms"),
            ms(adds),
            ms(commits + Duration::from_micros(500)),
            ratio(adds, commits + Duration::from_micros(500)),
            promise,
        );
        added.push(adds);
    }
    report.row(
        "chat: added at 10,000 messages, beside at 1,000",
        ms(added[1]),
        ms(added[0]),
        ratio(added[1], added[0]),
        Promise::AtMost(1.3),
    );
}

/// Time to the first chunk of a stream, compared with the model server's own first chunk.
pub async fn first_chunk(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("sqlite:{}", dir.path().join("ours.db").display());
    let upstream = upstream();
    let server = Server::start(&store, Some(&upstream), &[]);
    let mut proxied = Client::connect(&server.address).await;
    let mut direct_client = Client::connect(&upstream).await;
    let plain = direct(40, true);
    let mut through = Vec::new();
    let mut alone = Vec::new();
    for n in 0..60 {
        through.push(proxied.first_event(&chat("stream", n, true)).await);
        alone.push(direct_client.first_event(&plain).await);
    }
    let through = median(through);
    let alone = median(alone);
    let limit = alone.mul_f64(1.1) + Duration::from_millis(1);
    report.row(
        "first streamed chunk, beside 1.1 × the model server's + 1 ms",
        ms(through),
        ms(limit),
        ratio(through, limit),
        Promise::AtMost(1.0),
    );
}
