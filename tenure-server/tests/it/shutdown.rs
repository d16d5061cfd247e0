//! Graceful shutdown: requests in progress are completed, and no new ones begin.

use crate::support::{ServerProcess, chat_request, http_client, slow_model, wait_until};
use futures_util::StreamExt;
use std::time::{Duration, Instant};

async fn start_turn(server: &ServerProcess) -> impl futures_util::Stream<Item = String> + Unpin + use<> {
    let mut body = chat_request("s1", "tell me");
    body["stream"] = true.into();
    let response = server.request("POST", "/v1/chat/completions").json(&body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let parts = response.bytes_stream();
    Box::pin(
        parts.take_while(|p| std::future::ready(p.is_ok())).map(|p| String::from_utf8(p.unwrap().to_vec()).unwrap()),
    )
}

async fn a_stop_finishes_the_turn(signal: &str) {
    let model = slow_model(10, Duration::from_millis(150)).await;
    let dir = tempfile::tempdir().unwrap();
    let yaml = format!("store: 'sqlite:t.db'\nmodels: [{{name: slow, base_url: '{model}/v1'}}]");
    let mut server = ServerProcess::start(dir.path(), &yaml);
    let mut stream = start_turn(&server).await;
    let first = stream.next().await.unwrap();
    assert!(first.contains("word0") && !first.contains("word9"), "{first}");
    server.signal(signal);
    wait_until("nothing new begins", async || std::net::TcpStream::connect(server.address).is_err()).await;
    let rest: String = stream.collect().await;
    assert!(rest.contains("word9") && rest.ends_with("data: [DONE]\n\n"), "{rest}");
    assert_eq!(server.wait_for_exit(Duration::from_secs(20)).code(), Some(0));
    // The turn is durable: the next server continues from there.
    let server = ServerProcess::start(dir.path(), "store: 'sqlite:t.db'");
    let (_, next) = server.chat("s1", "and?").await;
    assert!(next["choices"][0]["message"]["content"].as_str().unwrap().ends_with("I see 3 messages."), "{next}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_finishes_the_turn() {
    a_stop_finishes_the_turn("TERM").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_finishes_the_turn() {
    a_stop_finishes_the_turn("INT").await;
}

/// A turn whose client has disconnected is completed too.
#[tokio::test(flavor = "multi_thread")]
async fn a_turn_without_a_client_is_finished() {
    let model = slow_model(5, Duration::from_millis(150)).await;
    let dir = tempfile::tempdir().unwrap();
    let yaml = format!("store: 'sqlite:t.db'\nmodels: [{{name: slow, base_url: '{model}/v1'}}]");
    let mut server = ServerProcess::start(dir.path(), &yaml);
    let mut stream = start_turn(&server).await;
    stream.next().await.unwrap();
    drop(stream);
    server.signal("TERM");
    assert_eq!(server.wait_for_exit(Duration::from_secs(20)).code(), Some(0));
    let server = ServerProcess::start(dir.path(), "store: 'sqlite:t.db'");
    let (_, next) = server.chat("s1", "and?").await;
    assert!(next["choices"][0]["message"]["content"].as_str().unwrap().ends_with("I see 3 messages."), "{next}");
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_has_an_end() {
    let model = slow_model(1000, Duration::from_millis(200)).await;
    let dir = tempfile::tempdir().unwrap();
    let yaml = format!(
        "store: 'sqlite:t.db'\nlimits: {{drain_timeout: 1s}}\nmodels: [{{name: slow, base_url: '{model}/v1'}}]"
    );
    let mut server = ServerProcess::start(dir.path(), &yaml);
    let mut stream = start_turn(&server).await;
    stream.next().await.unwrap();
    let watch = Instant::now();
    server.signal("TERM");
    // The answer would take 200 seconds.
    assert_eq!(server.wait_for_exit(Duration::from_secs(100)).code(), Some(0));
    let elapsed = watch.elapsed();
    assert!(elapsed > Duration::from_millis(900), "{elapsed:?}");
    let rest: String = stream.collect().await;
    assert!(!rest.contains("[DONE]"), "a stream that was cut must not look whole");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_stops_at_once() {
    let model = slow_model(1000, Duration::from_millis(200)).await;
    let dir = tempfile::tempdir().unwrap();
    let yaml = format!("store: 'memory:'\nmodels: [{{name: slow, base_url: '{model}/v1'}}]");
    let mut server = ServerProcess::start(dir.path(), &yaml);
    let mut stream = start_turn(&server).await;
    stream.next().await.unwrap();
    server.signal("TERM");
    wait_until("the shutdown has begun", async || server.log().contains("shutting down")).await;
    server.signal("INT");
    assert_eq!(server.wait_for_exit(Duration::from_secs(10)).code(), Some(1));
}

/// An idle connection of a client does not delay the shutdown.
#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_do_not_count() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = ServerProcess::start(dir.path(), "store: 'memory:'");
    let client = http_client();
    assert_eq!(client.get(format!("{}/healthz", server.url)).send().await.unwrap().status(), 200);
    let _silent = std::net::TcpStream::connect(server.address).unwrap();
    // Ours, the silent one, and the one that asks.
    wait_until("both connections are accepted", async || {
        let (_, metrics) = server.get("/metrics").await;
        metrics.as_str().unwrap().lines().any(|line| line == "tenure_connections 3")
    })
    .await;
    server.signal("TERM");
    assert_eq!(server.wait_for_exit(Duration::from_secs(60)).code(), Some(0));
}
