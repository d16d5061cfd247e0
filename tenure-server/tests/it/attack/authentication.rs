//! Keys, headers and cross-site requests.

use super::{amount, report};
use crate::support::PostgresSchema;
use crate::support::{ServerProcess, assert_error, send};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;

/// Runs the command line on the store in a directory. Returns its output.
fn tenure(dir: &Path, args: &[&str]) -> String {
    let output = Command::new(crate::support::binary()).args(args).current_dir(dir).output().unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Sends raw bytes. Returns the status and the body.
fn raw(server: &ServerProcess, request: &[u8]) -> (u16, Value) {
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
    stream.write_all(request).unwrap();
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text);
    let text = String::from_utf8_lossy(&text);
    let status = text.get(9..12).and_then(|s| s.parse().ok()).unwrap_or_else(|| panic!("no status: {text:?}"));
    (status, serde_json::from_str(text.split("\r\n\r\n").nth(1).unwrap_or_default()).unwrap_or_default())
}

/// Revoking the last key grants no unauthenticated access, neither at once nor after a restart.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_key_is_revoked() {
    let dir = tempfile::tempdir().unwrap();
    let yaml = "store: 'sqlite:tenure.db'";
    let mut server = ServerProcess::start(dir.path(), yaml);
    let secret = tenure(dir.path(), &["keys", "add", "--rights", "admin", "--user", "ann"]);
    let id = serde_json::from_str::<Value>(&tenure(dir.path(), &["keys", "list", "--json"])).unwrap()["data"][0]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let create = server.request("POST", "/sessions").bearer_auth(&secret).json(&json!({"id": "kept"}));
    assert_eq!(send(create).await.0, 201, "a new key works at once");
    tenure(dir.path(), &["keys", "revoke", &id]);
    crate::support::wait_until("the key is refused", async || {
        send(server.request("GET", "/sessions").bearer_auth(&secret)).await.0 == 401
    })
    .await;
    assert_error(&send(server.request("DELETE", "/users/ann")).await, 401, "unauthorized", None);
    server.kill();
    let server = ServerProcess::start(dir.path(), yaml);
    assert_error(&send(server.request("DELETE", "/users/ann")).await, 401, "unauthorized", None);
    assert!(tenure(dir.path(), &["sessions", "list"]).contains("kept"));
}

/// Bytes that are not text in a security-relevant header: the request is refused, and nothing is changed.
#[tokio::test(flavor = "multi_thread")]
async fn headers_that_can_not_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let server = ServerProcess::start(dir.path(), "store: 'memory:'");
    assert_eq!(send(server.request("POST", "/sessions").json(&json!({"id": "s"}))).await.0, 201);
    let mut sent = 0;
    for name in ["host", "x-tenure-user", "if-match", "origin", "x-session-id", "idempotency-key"] {
        for value in [&b"\xff"[..], b"a\xc3", b"UTF-8''%c3", b"\"1\xa0\""] {
            let body = r#"{"messages": [{"role": "user", "content": "x"}]}"#;
            let host = if name == "host" { "" } else { "host: localhost\r\n" };
            let mut request = format!(
                "POST /v1/chat/completions HTTP/1.1\r\n{host}connection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{name}: ",
                body.len()
            )
            .into_bytes();
            if name == "if-match" {
                request = format!("PATCH /sessions/s HTTP/1.1\r\n{host}connection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{name}: ", body.len()).into_bytes();
            }
            request.extend_from_slice(value);
            request.extend_from_slice(format!("\r\n\r\n{body}").as_bytes());
            let (status, body) = raw(&server, &request);
            assert_eq!((status, body["error"]["code"].is_string()), (400, true), "{name}: {value:?}: {body}");
            sent += 1;
        }
    }
    let (_, list) = server.get("/sessions").await;
    assert_eq!(list["data"].as_array().map(Vec::len), Some(1), "nothing was created: {list}");
    report("headers_that_can_not_be_read", "requests refused", sent);
}

/// A page of another origin sends state-changing requests without a body, which browsers send without a preflight.
#[tokio::test(flavor = "multi_thread")]
async fn cross_site_requests() {
    let dir = tempfile::tempdir().unwrap();
    let server = ServerProcess::start(dir.path(), "store: 'memory:'");
    assert_eq!(send(server.request("POST", "/sessions").json(&json!({"id": "s"}))).await.0, 201);
    assert_eq!(send(server.request("DELETE", "/sessions/s")).await.0, 200);
    for (name, value) in [("origin", "https://evil.example"), ("origin", "null"), ("sec-fetch-site", "cross-site")] {
        for path in ["restore", "uncompact", "runs/r/cancel", "runs/r/resume"] {
            let request = server.request("POST", &format!("/sessions/s/{path}")).header(name, value);
            assert_error(&send(request).await, 403, "foreign_origin", None);
        }
    }
    assert_eq!(server.get("/sessions/s").await.0, 410, "it is still deleted");
}

/// SQL in every input that reaches a query: ids, users, filters by tag, metadata key and value, title, cursors.
#[tokio::test(flavor = "multi_thread")]
async fn sql_injection() {
    let payloads = [
        "x') OR '1'='1",
        "x\" OR \"1\"=\"1",
        "'; DROP TABLE heads; --",
        "$.a') UNION SELECT 1 --",
        "%27%20OR%201=1",
        "\\'; SELECT pg_sleep(9); --",
        "{\"$gt\": \"\"}",
        "* OR NOT x",
    ];
    let dir = tempfile::tempdir().unwrap();
    let schema = PostgresSchema::new();
    let stores = [Some("sqlite:tenure.db".to_owned()), schema.as_ref().map(PostgresSchema::url)];
    let mut sent = 0;
    for store in stores.into_iter().flatten() {
        let server = ServerProcess::start(dir.path(), &format!("store: '{store}'"));
        let secret = json!({"id": "secret", "title": "secret", "tags": ["secret"], "metadata": {"secret": "secret"}});
        let create = server.request("POST", "/sessions").header("x-tenure-user", "victim").json(&secret);
        assert_eq!(send(create).await.0, 201);
        for payload in payloads {
            let text = url_encoded(payload);
            let paths = [
                format!("/sessions?tag={text}"),
                format!("/sessions?title={text}"),
                format!("/sessions?metadata.{text}=secret"),
                format!("/sessions?metadata.secret={text}"),
                format!("/sessions?assistant_id={text}"),
                format!("/sessions?thread_id={text}"),
                format!("/sessions?cursor={text}"),
                format!("/sessions/{text}"),
                format!("/search?q={text}"),
                format!("/memories/search?q={text}"),
            ];
            for path in paths {
                let (status, body) = send(server.request("GET", &path).header("x-tenure-user", payload.trim())).await;
                assert!((200..500).contains(&status), "{path}: {status} {body}");
                assert!(!body["data"].to_string().contains("secret"), "{path}: {body}");
                sent += 1;
            }
        }
        let (status, _) = send(server.request("GET", "/sessions/secret").header("x-tenure-user", "victim")).await;
        assert_eq!(status, 200, "it is still there");
    }
    report("sql_injection", "requests without effect", sent);
}

fn url_encoded(text: &str) -> String {
    text.bytes()
        .map(|b| if b.is_ascii_alphanumeric() { (b as char).to_string() } else { format!("%{b:02X}") })
        .collect()
}

/// Guessing keys: none is accepted, and clients with a key are still served.
#[tokio::test(flavor = "multi_thread")]
async fn guessed_keys() {
    let dir = tempfile::tempdir().unwrap();
    let server = ServerProcess::start(dir.path(), "store: 'sqlite:tenure.db'");
    let secret = tenure(dir.path(), &["keys", "add", "--rights", "read"]);
    let guesses = amount(200, 20_000);
    for i in 0..guesses {
        let mut guess = secret.clone().into_bytes();
        let at = 4 + i % (guess.len() - 4);
        guess[at] = if guess[at] == b'A' { b'B' } else { b'A' };
        let guess = String::from_utf8(guess).unwrap();
        assert_eq!(send(server.request("GET", "/sessions").bearer_auth(guess)).await.0, 401);
    }
    assert_eq!(send(server.request("GET", "/sessions").bearer_auth(&secret)).await.0, 200);
    report("guessed_keys", "guesses refused", guesses);
}

/// Errors quote external input only in part.
#[tokio::test(flavor = "multi_thread")]
async fn long_input_is_not_echoed() {
    let dir = tempfile::tempdir().unwrap();
    let server = ServerProcess::start(dir.path(), "store: 'memory:'");
    let long = "x".repeat(1 << 20);
    for body in [json!({"id": long}), json!({"assistant_id": long}), json!({long.as_str(): 1})] {
        let (status, body) = send(server.request("POST", "/sessions").json(&body)).await;
        assert!((400..500).contains(&status), "{status}");
        assert!(body.to_string().len() < 2000, "{} bytes", body.to_string().len());
    }
}
