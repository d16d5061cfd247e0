//! The cache of tool results over HTTP, for tools that clients execute.

use crate::support::*;
use serde_json::json;
use tenure_server::config::Config;

/// A client looks up and stores results; equal arguments share an entry, which expires and is evicted by the rules of
/// the assistant, and is listed with the session.
#[tokio::test]
async fn clients_use_the_cache() {
    for store in ["memory:", "sqlite"] {
        let dir = tempfile::tempdir().unwrap();
        let url = if store == "sqlite" { format!("sqlite:{}/t.db", dir.path().display()) } else { store.to_owned() };
        let test = InProcessClient::with_config(&url, |c: &mut Config| {
            c.cache.max_entries = 2;
            c.cache.ttl = "1h".parse().unwrap();
        })
        .await;
        test.post("/sessions", json!({"id": "s"})).await.expect_status(201);
        let get = async |arguments: &str| test.get(&format!("/sessions/s/cache?tool=look&arguments={arguments}")).await;
        assert_eq!(get("%7B%22a%22:1,%22b%22:2%7D").await.expect_error(404).0, "not_cached");
        let put = async |a: i64, result: &str| {
            let body = json!({"tool": "look", "arguments": {"b": 2, "a": a}, "result": {"text": result}});
            test.put("/sessions/s/cache", body).await.expect_status(200)
        };
        let stored = put(1, "one").await;
        assert_eq!((&stored["tool"], &stored["result"]), (&json!("look"), &json!({"text": "one"})));
        assert_eq!(stored["expires_at"], "2026-01-01T01:00:00Z");
        assert_eq!(get("%7B%22a%22:1,%22b%22:2%7D").await.expect_status(200), stored, "another spelling");
        assert_eq!(test.get("/sessions/s?include=cache").await.expect_status(200)["cache"], json!([stored]));
        test.advance(1);
        put(2, "two").await;
        test.advance(1);
        get("%7B%22a%22:1,%22b%22:2%7D").await.expect_status(200);
        test.advance(1);
        put(3, "three").await;
        assert_eq!(get("%7B%22a%22:2,%22b%22:2%7D").await.expect_error(404).0, "not_cached", "least recently used");
        get("%7B%22a%22:1,%22b%22:2%7D").await.expect_status(200);
        assert_eq!(test.app.tenure.cache_size().await.unwrap(), 2);
        test.advance(3600);
        assert_eq!(get("%7B%22a%22:3,%22b%22:2%7D").await.expect_error(404).0, "not_cached", "expired");
    }
}

/// Invalid requests are rejected by name and store nothing; other users do not see the session.
#[tokio::test]
async fn invalid_requests_are_rejected() {
    let test = InProcessClient::with_config("memory:", |c: &mut Config| c.runs.max_result_bytes = 1000).await;
    test.post("/sessions", json!({"id": "s"})).await.expect_status(201);
    let invalid = |param: &str| ("invalid".to_owned(), param.to_owned());
    assert_eq!(test.get("/sessions/s/cache").await.expect_error(400), invalid("tool"));
    assert_eq!(test.get("/sessions/s/cache?tool=x&arguments=%7B").await.expect_error(400), invalid("arguments"));
    assert_eq!(test.get("/sessions/s/cache?tool=x&args=1").await.expect_error(400), invalid("args"));
    for body in [json!({"tool": "", "result": 1}), json!({"tool": "x".repeat(200), "result": 1})] {
        assert_eq!(test.put("/sessions/s/cache", body).await.expect_error(400), invalid("tool"));
    }
    assert_eq!(test.put("/sessions/s/cache", json!({"tool": "x"})).await.expect_error(400).0, "invalid");
    let large = json!({"tool": "x", "result": "y".repeat(1000)});
    let refused = test.put("/sessions/s/cache", large).await.expect_error(413);
    assert_eq!(refused, ("too_large".to_owned(), "max_result_bytes".to_owned()));
    test.get("/sessions/none/cache?tool=x").await.expect_error(404);
    let eve = test.with("x-tenure-user", "eve");
    assert_eq!(eve.get("/sessions/s/cache?tool=x").await.expect_error(404).0, "not_found");
    assert_eq!(eve.put("/sessions/s/cache", json!({"tool": "x", "result": 1})).await.expect_error(404).0, "not_found");
    assert_eq!(test.app.tenure.cache_size().await.unwrap(), 0);
}
