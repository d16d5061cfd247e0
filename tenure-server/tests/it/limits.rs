//! Limits: each is enforced, and errors name it.

use crate::support::{ServerProcess, assert_error, chat_request, send, slow_model, wait_at_most};
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_too_large_is_refused_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let yaml = "store: 'memory:'\nlimits: {max_body_bytes: 5000, max_messages: 3, max_message_bytes: 1000}";
    let server = ServerProcess::start(dir.path(), yaml);
    assert_error(&server.chat("a", &"x".repeat(6000)).await, 413, "too_large", Some("max_body_bytes"));
    let large = server.chat("a", &"x".repeat(2000)).await;
    assert_eq!((large.0, &large.1["error"]["code"]), (413, &json!("too_large")), "{large:?}");
    assert!(large.1["error"]["message"].as_str().unwrap().contains("max_message_bytes"), "{large:?}");
    let mut many = chat_request("a", "hi");
    many["messages"] = json!(vec![json!({"role": "user", "content": "hi"}); 4]);
    let many = send(server.request("POST", "/v1/chat/completions").json(&many)).await;
    assert_error(&many, 413, "too_large", Some("max_messages"));
    let (status, first) = server.chat("a", "hi").await;
    assert_eq!(status, 200);
    assert!(first["choices"][0]["message"]["content"].as_str().unwrap().ends_with("I see 1 message."), "{first}");
    let plain = server.request("POST", "/v1/chat/completions").body(chat_request("a", "hi").to_string());
    assert_error(&send(plain).await, 415, "unsupported_media_type", None);
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_waiting_requests_are_rejected() {
    let model = slow_model(20, Duration::from_millis(150)).await;
    let dir = tempfile::tempdir().unwrap();
    let yaml = format!("store: 'memory:'\nlimits: {{max_queue: 1}}\nmodels: [{{name: slow, base_url: '{model}/v1'}}]");
    let server = ServerProcess::start(dir.path(), &yaml);
    let ask = || {
        let mut body = chat_request("s", "hi");
        body["stream"] = true.into();
        let request = server.request("POST", "/v1/chat/completions").json(&body);
        tokio::spawn(send(request))
    };
    let all = [ask(), ask(), ask(), ask()];
    let mut statuses = Vec::new();
    for response in all {
        let answer = response.await.unwrap();
        if answer.0 != 200 {
            assert_error(&answer, 429, "too_large", Some("max_queue"));
        }
        statuses.push(answer.0);
    }
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 200, 429, 429], "one runs, one waits");
}

/// Sends bytes on a new connection. Returns the response until the connection is closed, and how long that took.
fn read_response(server: &ServerProcess, send: &[u8]) -> (String, Duration) {
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let watch = Instant::now();
    stream.write_all(send).unwrap();
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text);
    (String::from_utf8_lossy(&text).into_owned(), watch.elapsed())
}

/// Connections with a request in flight are not evicted; a further one is refused with the name of the limit.
#[tokio::test(flavor = "multi_thread")]
async fn connections_have_a_limit() {
    let model = slow_model(1000, Duration::from_millis(100)).await;
    for limit in ["max_connections", "max_connections_per_address"] {
        let dir = tempfile::tempdir().unwrap();
        let yaml =
            format!("store: 'memory:'\nlimits: {{{limit}: 2}}\nmodels: [{{name: slow, base_url: '{model}/v1'}}]");
        let server = ServerProcess::start(dir.path(), &yaml);
        let mut held = Vec::new();
        for session in ["a", "b"] {
            let mut body = chat_request(session, "hi");
            body["stream"] = true.into();
            let response = server.request("POST", "/v1/chat/completions").json(&body).send().await.unwrap();
            assert_eq!(response.status(), 200);
            held.push(response);
        }
        let (text, _) = read_response(&server, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 503 ") && text.contains("retry-after: 1"), "{text}");
        let body: serde_json::Value = serde_json::from_str(text.split("\r\n\r\n").nth(1).unwrap()).unwrap();
        assert_error(&(503, body), 503, "too_many_connections", Some(limit));
        drop(held);
        wait_at_most("there is room again", Duration::from_secs(10), async || server.get("/healthz").await.0 == 200)
            .await;
    }
}

/// A client that sends its headers too slowly is disconnected.
#[tokio::test(flavor = "multi_thread")]
async fn headers_must_come_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let server = ServerProcess::start(dir.path(), "store: 'memory:'\nlimits: {header_timeout: 1s}");
    let cases: [&[u8]; 4] = [b"", b"P", b"GET /healthz HTTP/1.1\r\nhost: loc", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"];
    std::thread::scope(|scope| {
        for send in cases {
            let server = &server;
            scope.spawn(move || {
                let (text, elapsed) = read_response(server, send);
                let request = String::from_utf8_lossy(send);
                assert!(
                    elapsed > Duration::from_millis(800) && elapsed < Duration::from_secs(100),
                    "{request:?}: {elapsed:?}, {text:?}"
                );
            });
        }
        // Sending a byte now and then does not help.
        scope.spawn(|| {
            let mut stream = TcpStream::connect(server.address).unwrap();
            let watch = Instant::now();
            let mut send = b"GET /healthz HTTP/1.1\r\nx: ".to_vec();
            while stream.write_all(&send).is_ok() {
                send = b"x".to_vec();
                std::thread::sleep(Duration::from_millis(100)); // pacing: a slow client
                assert!(watch.elapsed() < Duration::from_secs(120), "a slow client keeps its connection");
            }
        });
    });
    assert_eq!(server.get("/healthz").await.0, 200);
}

/// An incomplete body does not hold a connection either, however it was announced, and is not processed.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_must_come_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let server = ServerProcess::start(dir.path(), "store: 'memory:'\nlimits: {body_timeout: 700ms}");
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    let half = r#"{"session_id": "slow", "messages": [{"role": "user", "#;
    let sized = format!("{head}content-length: 500\r\n\r\n{half}");
    let chunked = format!("{head}transfer-encoding: chunked\r\n\r\n{:x}\r\n{half}\r\n", half.len());
    for send in [sized, chunked] {
        let (text, elapsed) = read_response(&server, send.as_bytes());
        assert!(text.starts_with("HTTP/1.1 408 ") && text.contains("connection: close"), "{text}");
        let body = serde_json::from_str(text.split("\r\n\r\n").nth(1).unwrap()).unwrap();
        assert_error(&(408, body), 408, "too_slow", Some("body_timeout"));
        assert!(elapsed > Duration::from_millis(500) && elapsed < Duration::from_secs(8), "{elapsed:?}");
    }
    assert_eq!(server.get("/sessions/slow").await.0, 404);
    // Slow, but never silent for longer than the timeout.
    let body = chat_request("slow", "hi").to_string();
    let mut stream = TcpStream::connect(server.address).unwrap();
    write!(stream, "{head}connection: close\r\ncontent-length: {}\r\n\r\n", body.len()).unwrap();
    for part in body.as_bytes().chunks(body.len().div_ceil(6)) {
        stream.write_all(part).unwrap();
        std::thread::sleep(Duration::from_millis(200)); // pacing: a slow client
    }
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
}

/// A turn may take longer than `header_timeout`.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_response_is_not_a_slow_client() {
    let model = slow_model(10, Duration::from_millis(200)).await;
    let dir = tempfile::tempdir().unwrap();
    let yaml = format!(
        "store: 'memory:'\nlimits: {{header_timeout: 300ms}}\nmodels: [{{name: slow, base_url: '{model}/v1'}}]"
    );
    let server = ServerProcess::start(dir.path(), &yaml);
    let mut body = chat_request("s", "hi");
    body["stream"] = true.into();
    let (status, text) = send(server.request("POST", "/v1/chat/completions").json(&body)).await;
    assert_eq!(status, 200);
    assert!(text.as_str().unwrap().ends_with("data: [DONE]\n\n"), "{text}");
}

/// `/healthz` is about the process, `/readyz` about the store. Uses its own PostgreSQL, which it stops and starts.
#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_store_is_not_ready() {
    if crate::support::postgres_server().is_none() {
        return;
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/postgres.sh");
    let postgres = |sql: &str| {
        let mut command = Command::new(script);
        let output = command.arg(sql).env("TENURE_TEST_PG_NAME", "server-readyz").output().unwrap();
        assert!(output.status.success(), "{sql}: {output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let url = postgres("start");
    let dir = tempfile::tempdir().unwrap();
    let server = ServerProcess::start(dir.path(), &format!("store: '{url}'"));
    assert_eq!(server.get("/readyz").await.0, 200);
    postgres("kill");
    assert_error(&server.get("/readyz").await, 503, "unavailable", None);
    assert_eq!(server.get("/healthz").await.0, 200);
    postgres("start");
    wait_at_most("the store is back", Duration::from_secs(30), async || server.get("/readyz").await.0 == 200).await;
    server.stop();
    postgres("stop");
}

/// A store that can be read but not written is not ready.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_can_not_be_written_is_not_ready() {
    let dir = tempfile::tempdir().unwrap();
    let server = ServerProcess::start(dir.path(), "store: 'sqlite:tenure.db'");
    // Another process holds a write transaction.
    let other = rusqlite::Connection::open(dir.path().join("tenure.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    assert_error(&server.get("/readyz").await, 503, "unavailable", None);
    assert_eq!(server.get("/healthz").await.0, 200);
    other.execute_batch("ROLLBACK").unwrap();
    wait_at_most("it is ready again", Duration::from_secs(30), async || server.get("/readyz").await.0 == 200).await;
}
