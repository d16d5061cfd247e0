//! Models that never stop, and clients that do not read their responses.

use super::{amount, report};
use crate::support::{ServerProcess, chat_request, serve, wait_at_most};
use crate::support::{chunk, reply};
use axum::body::{Body, Bytes};
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

const PART: usize = 32 << 10;

/// A model server whose stream never ends. Returns its address and the total bytes of text it has sent.
async fn endless_model() -> (String, Arc<AtomicUsize>) {
    let sent = Arc::new(AtomicUsize::new(0));
    let counter = sent.clone();
    let route = axum::routing::post(move || async move {
        let text = Bytes::from(chunk(json!({"content": "x".repeat(PART)}), Value::Null));
        let parts = stream::repeat(text).map(move |text| {
            counter.fetch_add(PART, Relaxed);
            Ok::<_, Infallible>(text)
        });
        ([("content-type", "text/event-stream")], Body::from_stream(parts))
    });
    (serve(axum::Router::new().route("/v1/chat/completions", route)).await, sent)
}

fn streamed(session: &str) -> Value {
    let mut body = chat_request(session, "tell me");
    body["stream"] = true.into();
    body
}

/// An answer ends at `max_message_bytes` with its own error, and the text received so far is stored as partial.
#[tokio::test(flavor = "multi_thread")]
async fn an_endless_answer_is_ended() {
    let (model, sent) = endless_model().await;
    let dir = tempfile::tempdir().unwrap();
    let yaml = format!(
        "store: 'memory:'\nlimits: {{max_message_bytes: 1000000}}\nmodels: [{{name: m, base_url: '{model}/v1'}}]"
    );
    let server = ServerProcess::start(dir.path(), &yaml);
    let response = server.request("POST", "/v1/chat/completions").json(&streamed("s")).send().await.unwrap();
    let reply = reply(response).await;
    assert_eq!((reply.status, reply.code(), reply.is_done()), (200, "answer_too_large", false));
    assert_eq!(reply.body["error"]["param"], "max_message_bytes");
    let (status, export) = server.get("/sessions/s/export?format=openai").await;
    assert_eq!(status, 200);
    let stored_bytes = export["messages"][1]["content"].as_str().unwrap().len();
    assert!((900_000..1_000_000).contains(&stored_bytes), "{stored_bytes} bytes are kept");
    assert_eq!(reply.content().len(), stored_bytes);
    let (_, run) = server.get(&format!("/sessions/s/runs/{}", reply.body["run_id"].as_str().unwrap())).await;
    assert!(run.to_string().contains("answer_too_large"), "{run}");
    // The limit also applies with `store: false`.
    let mut body = streamed("t");
    body["store"] = false.into();
    let response = server.request("POST", "/v1/chat/completions").json(&body).send().await.unwrap();
    let text = response.text().await.unwrap();
    assert!(text.contains("\"answer_too_large\"") && !text.contains("[DONE]"));
    wait_at_most("the model's server is not read any more", Duration::from_secs(30), async || {
        let before = sent.load(Relaxed);
        tokio::time::sleep(Duration::from_millis(100)).await; // observation window: nothing more is sent
        sent.load(Relaxed) == before
    })
    .await;
    assert!(sent.load(Relaxed) < 40 << 20, "{} bytes were sent", sent.load(Relaxed));
}

/// The server reads no more from the model server than the client accepts, until the client counts as disconnected.
#[tokio::test(flavor = "multi_thread")]
async fn unread_streams_are_not_buffered() {
    let (model, sent) = endless_model().await;
    let dir = tempfile::tempdir().unwrap();
    let yaml = format!(
        "store: 'memory:'\nlimits: {{write_timeout: 3s, max_message_bytes: 4000000}}\nmodels: [{{name: m, base_url: '{model}/v1'}}]"
    );
    let server = ServerProcess::start(dir.path(), &yaml);
    assert_eq!(server.get("/healthz").await.0, 200);
    let (before, _) = server.memory();
    let clients = amount(5, 20);
    let mut held = Vec::new();
    for i in 0..clients {
        let request = server.request("POST", "/v1/chat/completions").json(&streamed(&format!("s{i}")));
        held.push(request.send().await.unwrap());
    }
    // Each client counts as disconnected after `write_timeout`; its turn is then completed without it, up to the
    // message limit.
    for i in 0..clients {
        wait_at_most("the turn is finished", Duration::from_secs(60), async || {
            let (status, export) = server.get(&format!("/sessions/s{i}/export?format=openai")).await;
            status == 200 && export["messages"].as_array().is_some_and(|m| m.len() == 2)
        })
        .await;
    }
    let (after, peak) = server.memory();
    let total = sent.load(Relaxed) >> 20;
    report("unread streams", "clients, MiB sent by the model", format!("{clients}, {total}"));
    report("unread streams", "memory in MiB before, at most, after", format!("{before}, {peak}, {after}"));
    // A message of 4 MB is copied several times when it is stored.
    assert!(peak < before + 60 + 30 * clients as u64, "{before} MiB before, {peak} MiB at most");
}

/// A slow client gets the whole answer, and backpressure reaches the model server.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_client_slows_the_model_down() {
    let (model, sent) = endless_model().await;
    let dir = tempfile::tempdir().unwrap();
    let yaml = format!("store: 'memory:'\nmodels: [{{name: m, base_url: '{model}/v1'}}]");
    let server = ServerProcess::start(dir.path(), &yaml);
    let request = server.request("POST", "/v1/chat/completions").json(&streamed("s"));
    let mut response = request.send().await.unwrap();
    wait_at_most("the model's server has to wait", Duration::from_secs(30), async || {
        let before = sent.load(Relaxed);
        tokio::time::sleep(Duration::from_millis(300)).await; // observation window: nothing more is sent
        sent.load(Relaxed) == before
    })
    .await;
    let waiting = sent.load(Relaxed);
    assert!(waiting < 30 << 20, "{waiting} bytes were taken for a client that reads nothing");
    wait_at_most("it goes on when the client reads", Duration::from_secs(30), async || {
        response.chunk().await.unwrap();
        sent.load(Relaxed) > waiting
    })
    .await;
    report("slow client", "KiB sent by the model until it had to wait", waiting >> 10);
}
