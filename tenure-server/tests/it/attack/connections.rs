//! Clients that hold connections: idle, not reading, flooding, or sending malformed HTTP.

use super::{amount, report};
use crate::support::{ServerProcess, assert_error, chat_request, http_client, send, wait_at_most};
use axum::http::Request;
use h2::client::{Connection, SendRequest};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;
use tenure::Tenant;
use tenure_server::auth::{KeyStore, NewKey, Right};
use tokio::net::TcpStream as AsyncStream;

/// A server whose store has keys. Returns an administrator's key, and a key of another tenant that may read and
/// write.
pub async fn with_keys(dir: &Path, yaml: &str) -> (ServerProcess, String, String) {
    let tenure = tenure::Tenure::open(&format!("sqlite:{}", dir.join("t.db").display())).await.unwrap();
    let keys = KeyStore::new(tenure);
    let (_, admin) = keys.add(NewKey { rights: vec![Right::Admin], ..NewKey::default() }).await.unwrap();
    let other =
        NewKey { tenant: Tenant::new("other").unwrap(), rights: vec![Right::Read, Right::Write], ..NewKey::default() };
    let (_, other) = keys.add(other).await.unwrap();
    drop(keys);
    (ServerProcess::start(dir, &format!("store: 'sqlite:t.db'\n{yaml}")), admin, other)
}

/// Opens an HTTP/2 connection, driven by its own task until it ends.
pub async fn http2(server: &ServerProcess, builder: &h2::client::Builder) -> SendRequest<bytes::Bytes> {
    let stream = AsyncStream::connect(server.address).await.unwrap();
    let (requests, connection): (_, Connection<_, bytes::Bytes>) = builder.handshake(stream).await.unwrap();
    tokio::spawn(connection);
    requests.ready().await.unwrap()
}

pub fn http2_request(server: &ServerProcess, method: &str, path: &str, key: &str) -> Request<()> {
    let request = Request::builder().method(method).uri(format!("{}{path}", server.url));
    let request = request.header("authorization", format!("Bearer {key}"));
    request.header("content-type", "application/json").body(()).unwrap()
}

/// The number of open connections, including the one that asks.
async fn open_connections(server: &ServerProcess, key: &str) -> f64 {
    let text = http_client().get(format!("{}/metrics", server.url)).bearer_auth(key).send().await.unwrap();
    let text = text.text().await.unwrap();
    let line = text.lines().find_map(|l| l.strip_prefix("tenure_connections ")).unwrap();
    line.parse().unwrap()
}

/// Sends one request on a connection that stays open.
fn ask_on(stream: &mut TcpStream, key: &str) -> String {
    write!(stream, "GET /sessions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\r\n").unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut text = String::new();
    let mut part = [0; 4096];
    loop {
        let n = stream.read(&mut part).unwrap();
        assert!(n > 0, "the connection was closed: {text}");
        text.push_str(std::str::from_utf8(&part[..n]).unwrap());
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|l| l.strip_prefix("content-length: ")).unwrap();
        if body.len() == length.parse::<usize>().unwrap() {
            return text;
        }
    }
}

/// Idle HTTP/2 connections without a key, far more than the limit: clients with a key are served throughout, and an
/// authenticated connection is not evicted.
#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_without_a_key_do_not_lock_out_other_clients() {
    let dir = tempfile::tempdir().unwrap();
    let max = amount(24, 1024);
    let yaml = format!("limits: {{max_connections: {max}, max_connections_per_address: {max}, header_timeout: 10m}}");
    let (server, key, _) = with_keys(dir.path(), &yaml).await;
    let mut authenticated = TcpStream::connect(server.address).unwrap();
    assert!(ask_on(&mut authenticated, &key).starts_with("HTTP/1.1 200"));
    let mut held = Vec::new();
    let mut idle = Vec::new();
    let mut served = 0;
    for i in 0..max * 2 {
        match i % 3 {
            0 => held.push(TcpStream::connect(server.address).unwrap()),
            1 => {
                let mut half = TcpStream::connect(server.address).unwrap();
                let _ = half.write_all(b"GET /sessions HTTP/1.1\r\nhost: loc");
                held.push(half);
            }
            _ => {
                let stream = AsyncStream::connect(server.address).await.unwrap();
                // The handshake fails if the connection has been evicted already.
                if let Ok((requests, connection)) = h2::client::handshake(stream).await {
                    idle.push(requests);
                    tokio::spawn(connection);
                }
            }
        }
        if i % 8 == 7 {
            let request = http_client().get(format!("{}/sessions", server.url)).bearer_auth(&key);
            assert_eq!(send(request).await.0, 200, "locked out by {} idle connections", i + 1);
            served += 1;
        }
    }
    assert!(
        ask_on(&mut authenticated, &key).starts_with("HTTP/1.1 200"),
        "an authenticated connection was closed first"
    );
    report("idle connections", "opened / limit / requests served meanwhile", format!("{} / {max} / {served}", max * 2));
}

/// Clients that send requests and read nothing are disconnected, also those without a key and those that answer
/// pings; an HTTP/2 stream whose client grants no window is reset.
#[tokio::test(flavor = "multi_thread")]
async fn clients_that_never_read_lose_their_connections() {
    let dir = tempfile::tempdir().unwrap();
    let (server, key, _) = with_keys(dir.path(), "limits: {write_timeout: 700ms, idle_timeout: 700ms}").await;
    let requests = "GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(400);
    let mut held = Vec::new();
    for _ in 0..amount(8, 200) {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(requests.as_bytes()).unwrap();
        held.push(stream);
    }
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(0);
    let stuck = http2(&server, &builder).await;
    let mut streams = Vec::new();
    for _ in 0..amount(8, 100) {
        let request = http2_request(&server, "GET", "/openapi.json", &key);
        let response = stuck.clone().send_request(request, true).unwrap().0.await.unwrap();
        assert_eq!(response.status(), 200);
        streams.push(response.into_body());
    }
    for mut body in streams {
        let ended = tokio::time::timeout(Duration::from_secs(60), body.data()).await.expect("the stream is reset");
        assert!(ended.is_none_or(|data| data.is_err()));
    }
    wait_at_most("all are closed", Duration::from_secs(60), async || open_connections(&server, &key).await <= 2.0)
        .await;
    assert_eq!(server.get("/healthz").await.0, 200);
}

/// One address at its limit does not affect another.
#[tokio::test(flavor = "multi_thread")]
async fn one_address_can_not_take_all_connections() {
    let dir = tempfile::tempdir().unwrap();
    let model = crate::support::slow_model(10_000, Duration::from_millis(50)).await;
    let yaml = format!("limits: {{max_connections_per_address: 4}}\nmodels: [{{name: slow, base_url: '{model}/v1'}}]");
    let (server, key, _) = with_keys(dir.path(), &yaml).await;
    let greedy =
        tenure_server::http_client::client().no_proxy().local_address(Some([127, 0, 0, 2].into())).build().unwrap();
    let mut held = Vec::new();
    let mut refused = 0;
    for i in 0..amount(10, 100) {
        let mut body = chat_request(&format!("s{i}"), "hi");
        body["stream"] = true.into();
        let request = greedy.post(format!("{}/v1/chat/completions", server.url)).bearer_auth(&key).json(&body);
        match request.send().await {
            Ok(response) if response.status() == 200 => held.push(response),
            Ok(response) => {
                assert_eq!(response.status(), 503);
                let error: Value = response.json().await.unwrap();
                assert_error(&(503, error), 503, "too_many_connections", Some("max_connections_per_address"));
                refused += 1;
            }
            // Refused before the request was sent.
            Err(_) => refused += 1,
        }
    }
    assert_eq!(held.len(), 4, "{refused} were refused");
    let other = http_client().get(format!("{}/sessions", server.url)).bearer_auth(&key);
    assert_eq!(send(other).await.0, 200);
}

/// Streams that are reset as soon as they are opened (rapid reset).
#[tokio::test(flavor = "multi_thread")]
async fn rapid_reset() {
    let dir = tempfile::tempdir().unwrap();
    let (server, key, _) = with_keys(dir.path(), "").await;
    let mut sent = 0;
    let mut closed = 0;
    for _ in 0..amount(4, 50) {
        let requests = http2(&server, &h2::client::Builder::new()).await;
        for _ in 0..amount(500, 5000) {
            let Ok(mut ready) = requests.clone().ready().await else {
                closed += 1;
                break;
            };
            let request = http2_request(&server, "GET", "/sessions", &key);
            let Ok((_, mut stream)) = ready.send_request(request, true) else {
                closed += 1;
                break;
            };
            stream.send_reset(h2::Reason::CANCEL);
            sent += 1;
        }
        let ask = http_client().get(format!("{}/sessions", server.url)).bearer_auth(&key);
        assert_eq!(send(ask).await.0, 200);
    }
    wait_at_most("nothing is left of them", Duration::from_secs(60), async || {
        open_connections(&server, &key).await <= 2.0
    })
    .await;
    report("rapid reset", "streams reset / connections closed for it", format!("{sent} / {closed}"));
    report("rapid reset", "memory in MiB (now, at most)", format!("{:?}", server.memory()));
}

/// Pings without a request: the connection is closed after a bounded number of bytes, and others are served
/// meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn ping_flood() {
    let dir = tempfile::tempdir().unwrap();
    let (server, key, _) = with_keys(dir.path(), "").await;
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();
    let mut reading = stream.try_clone().unwrap();
    std::thread::spawn(move || std::io::copy(&mut reading, &mut std::io::sink()));
    let pings = b"\0\0\x08\x06\0\0\0\0\0pingping".repeat(1000);
    let flood = std::thread::spawn(move || {
        let mut sent = 0;
        while sent < 64 << 20 && stream.write_all(&pings).is_ok() {
            sent += pings.len();
        }
        sent
    });
    while !flood.is_finished() {
        let ask = http_client().get(format!("{}/sessions", server.url)).bearer_auth(&key);
        assert_eq!(send(ask).await.0, 200);
    }
    let sent = flood.join().unwrap();
    assert!(sent < 64 << 20, "the connection was not closed");
    report("ping flood", "bytes until the connection was closed", sent);
}

/// Sends bytes and returns the response until the connection is closed.
fn exchange(server: &ServerProcess, send: &[u8]) -> String {
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let _ = stream.write_all(send);
    let mut text = Vec::new();
    stream.read_to_end(&mut text).unwrap();
    String::from_utf8(text).unwrap()
}

/// Requests that the HTTP library rejects by itself get the error envelope of the API.
#[tokio::test(flavor = "multi_thread")]
async fn broken_requests_get_the_error_envelope() {
    let dir = tempfile::tempdir().unwrap();
    let (server, key, _) = with_keys(dir.path(), "").await;
    let get = |target: &str, headers: &str| format!("GET {target} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n");
    let header = |size: usize| format!("x: {}\r\n", "y".repeat(size));
    let many: String = (0..200).map(|i| format!("x{i}: y\r\n")).collect();
    let bare = "GET /healthz HTTP/1.1\nhost: localhost\n\n";
    let smuggled = format!("{}{bare}", get("/healthz", ""));
    let cases: [(String, u16, &str, Option<&str>); 14] = [
        ("nonsense\r\n\r\n".into(), 400, "invalid", None),
        ("G@T / HTTP/1.1\r\n\r\n".into(), 400, "invalid", None),
        ("GET / HTTP/9.9\r\nhost: localhost\r\n\r\n".into(), 400, "invalid", None),
        (get("/\u{1}", ""), 400, "invalid", None),
        (get("/healthz", "bad header: x\r\n"), 400, "invalid", None),
        (get("/healthz", "x: a\0b\r\n"), 400, "invalid", None),
        (get("/healthz", "content-length: x\r\n"), 400, "invalid", None),
        (bare.into(), 400, "invalid", None),
        ("GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: y\n\r\n".into(), 400, "invalid", None),
        (smuggled, 400, "invalid", None),
        (get(&format!("/{}", "a".repeat(40_000)), "connection: close\r\n"), 414, "too_large", Some("max_header_bytes")),
        (get(&format!("/{}", "a".repeat(70_000)), ""), 431, "too_large", Some("max_header_bytes")),
        (
            get("/healthz", &format!("connection: close\r\n{}", header(40_000))),
            431,
            "too_large",
            Some("max_header_bytes"),
        ),
        (get("/healthz", &many), 431, "too_large", Some("max_header_bytes")),
    ];
    for (sent, status, code, param) in cases {
        let text = exchange(&server, sent.as_bytes());
        let shown: String = sent.chars().take(60).collect();
        let last = &text[text.rfind("HTTP/1.1 4").unwrap_or_else(|| panic!("{shown:?}: no answer: {text:?}"))..];
        assert!(last.starts_with(&format!("HTTP/1.1 {status} ")), "{shown:?}: {text}");
        let (head, body) = last.split_once("\r\n\r\n").unwrap();
        assert!(head.to_lowercase().contains("content-type: application/json"), "{shown:?}: {text}");
        assert_error(&(status, serde_json::from_str(body).unwrap()), status, code, param);
    }
    // A header that is too large on HTTP/2.
    let requests = http2(&server, &h2::client::Builder::new()).await;
    let mut request = http2_request(&server, "GET", "/healthz", &key);
    request.headers_mut().insert("x", "y".repeat(40_000).parse().unwrap());
    let response = requests.clone().send_request(request, true).unwrap().0.await.unwrap();
    assert_eq!(response.status(), 431);
    let body: Value = serde_json::from_slice(&response.into_body().data().await.unwrap().unwrap()).unwrap();
    assert_error(&(431, body), 431, "too_large", Some("max_header_bytes"));
    assert_eq!(server.get("/healthz").await.0, 200);
}
