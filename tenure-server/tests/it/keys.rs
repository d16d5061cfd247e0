//! API keys over HTTP: created, listed, rotated, revoked, limited; and the bootstrap key from a file.

use crate::support::{InProcessClient, each_field};
use axum::http::HeaderMap;
use serde_json::{Value, json};
use tenure_server::auth::{KeyStore, NewKey, Right, add_bootstrap_key};
use tenure_server::config::{KeyLimits, TrustedProxies};

fn bearer(api: &InProcessClient, key: &Value) -> InProcessClient {
    api.with("authorization", &format!("Bearer {}", key["key"].as_str().unwrap()))
}

/// Administrators create, list, rotate and revoke the keys of their own tenant.
#[tokio::test]
async fn administrators_manage_the_keys_of_their_tenant() {
    let api = InProcessClient::memory().await;
    let admin = api.key("acme", None, &[Right::Admin]).await;
    let other = api.key("other", None, &[Right::Admin]).await;
    api.advance(1);
    let body = json!({"name": "app", "user": "ann", "rights": ["read"], "expires_at": "2026-01-02T00:00:00Z"});
    let key = admin.post("/keys", body).await.expect_status(201);
    assert_eq!((&key["tenant"], &key["user"], &key["rights"]), (&json!("acme"), &json!("ann"), &json!(["read"])));
    let app = bearer(&api, &key);
    app.get("/sessions").await.expect_status(200);
    assert_eq!(app.get("/keys").await.expect_error(403).0, "forbidden");

    let list = admin.get("/keys").await.expect_status(200);
    assert_eq!(each_field(&list, "name"), ["null", "app"]);
    assert!(!list.to_string().contains(key["key"].as_str().unwrap()) && !list.to_string().contains("hash"));
    assert_eq!(
        each_field(&other.get("/keys").await.expect_status(200), "name"),
        ["null"],
        "another tenant's keys are not shown"
    );
    let path = format!("/keys/{}", key["id"].as_str().unwrap());
    assert_eq!(other.delete(&path).await.expect_error(404).0, "not_found");
    assert_eq!(other.post(&format!("{path}/rotate"), json!({})).await.expect_error(404).0, "not_found");
    assert_eq!(admin.get("/keys?tenant=*").await.expect_error(400).1, "tenant");

    // A rotated key has the same settings; the old one stays valid during the grace period.
    let new = admin.post(&format!("{path}/rotate"), json!({"grace": "10m"})).await.expect_status(201);
    assert_eq!((&new["name"], &new["user"], &new["expires_at"]), (&key["name"], &key["user"], &key["expires_at"]));
    let rotated = bearer(&api, &new);
    rotated.get("/sessions").await.expect_status(200);
    app.get("/sessions").await.expect_status(200);
    api.advance(601);
    assert_eq!(app.get("/sessions").await.expect_error(401).0, "unauthorized");
    rotated.get("/sessions").await.expect_status(200);

    admin.delete(&format!("/keys/{}", new["id"].as_str().unwrap())).await.expect_status(200);
    rotated.get("/sessions").await.expect_error(401);
}

/// An expired key is refused with the reason.
#[tokio::test]
async fn keys_expire() {
    let api = InProcessClient::memory().await;
    let admin = api.key("acme", None, &[Right::Admin]).await;
    let key = admin.post("/keys", json!({"expires_at": "2026-01-01T01:00:00Z"})).await.expect_status(201);
    let app = bearer(&api, &key);
    app.get("/sessions").await.expect_status(200);
    api.advance(3600);
    let refused = app.get("/sessions").await;
    assert!(refused.text.contains("expired"), "{}", refused.text);
    refused.expect_error(401);
    for (body, param) in [
        (json!({"expires_at": "2020-01-01T00:00:00Z"}), "expires_at"),
        (json!({"rights": []}), "rights"),
        (json!({"rights": ["root"]}), "rights[0]"),
        (json!({"name": "x".repeat(101)}), "name"),
        (json!({"limits": {"requests": 1}}), "limits.requests"),
    ] {
        assert_eq!(admin.post("/keys", &body).await.expect_error(400).1, param, "{body}");
    }
}

/// The last use of a key is shown, to the minute.
#[tokio::test]
async fn the_last_use_of_a_key_is_recorded() {
    let api = InProcessClient::memory().await;
    let admin = api.key("acme", None, &[Right::Admin]).await;
    let key = admin.post("/keys", json!({"name": "app"})).await.expect_status(201);
    let last_used = async || {
        let list = admin.get("/keys").await.expect_status(200);
        list["data"].as_array().unwrap().iter().find(|k| k["name"] == "app").unwrap()["last_used_at"].clone()
    };
    assert_eq!(last_used().await, Value::Null);
    api.advance(120);
    bearer(&api, &key).get("/sessions").await.expect_status(200);
    crate::support::wait_until("the use is recorded", async || last_used().await == "2026-01-01T00:02:00Z").await;
}

/// An `admin` key that is bound to a user administers that user, and nothing else of the tenant.
#[tokio::test]
async fn an_administrator_of_one_user_administers_only_that_user() {
    let api = InProcessClient::memory().await;
    let admin = api.key("acme", None, &[Right::Admin]).await;
    let ann = api.key("acme", Some("ann"), &[Right::Admin]).await;
    for user in ["ann", "bob"] {
        admin
            .with("x-tenure-user", user)
            .post("/sessions", json!({"id": format!("{user}-1")}))
            .await
            .expect_status(201);
    }
    assert_eq!(each_field(&ann.get("/sessions").await.expect_status(200), "id"), ["ann-1"]);
    assert_eq!(ann.delete("/users/bob").await.expect_error(403).0, "forbidden");
    for (method, path) in
        [("POST", "/assistants"), ("GET", "/metrics"), ("POST", "/dreams"), ("GET", "/dreams"), ("DELETE", "/dreams/x")]
    {
        let body = if path == "/assistants" { r#"{"name": "x"}"# } else { "{}" };
        let answer = ann.send(method, path, Some("application/json"), body).await;
        assert_eq!(answer.expect_error(403).0, "forbidden", "{method} {path}");
    }
    assert_eq!(ann.post("/keys", json!({"user": "bob"})).await.expect_error(403).1, "user");
    let key = ann.post("/keys", json!({"rights": ["admin"]})).await.expect_status(201);
    assert_eq!(key["user"], "ann");
    assert_eq!(each_field(&ann.get("/keys").await.expect_status(200), "user"), ["ann", "ann"]);
    assert_eq!(each_field(&ann.get("/reviews").await.expect_status(200), "id"), Vec::<String>::new());
    ann.delete("/users/ann").await.expect_status(200);
    assert_eq!(each_field(&admin.get("/sessions").await.expect_status(200), "id"), ["bob-1"]);
}

fn header(headers: &HeaderMap, name: &str) -> u64 {
    headers[name].to_str().unwrap().parse().unwrap_or_else(|_| panic!("{name}: {headers:?}"))
}

/// A key over its rate limit gets 429 with the time to wait; other keys are not affected.
#[tokio::test]
async fn requests_per_minute_are_limited_per_key() {
    let api = InProcessClient::with_config("memory:", |config| config.limits.keys.requests_per_minute = Some(3)).await;
    let (ann, bob) = (api.key("acme", Some("ann"), &[Right::Read]).await, api.key("acme", None, &[Right::Read]).await);
    for remaining in [2, 1, 0] {
        let answer = ann.get("/sessions").await;
        assert_eq!(header(&answer.headers, "x-ratelimit-limit-requests"), 3);
        assert_eq!(header(&answer.headers, "x-ratelimit-remaining-requests"), remaining);
        answer.expect_status(200);
    }
    let refused = ann.get("/sessions").await;
    assert!((1..=21).contains(&header(&refused.headers, "retry-after")), "{:?}", refused.headers);
    assert_eq!(header(&refused.headers, "x-ratelimit-remaining-requests"), 0);
    assert_eq!(refused.expect_error(429), ("rate_limit_exceeded".to_owned(), "requests_per_minute".to_owned()));
    bob.get("/sessions").await.expect_status(200);
    // A key's own limit takes precedence; 0 means unlimited.
    let limits = KeyLimits { requests_per_minute: Some(0), ..KeyLimits::default() };
    let (_, secret) =
        api.app.keys.add(NewKey { rights: vec![Right::Read], limits, ..NewKey::default() }).await.unwrap();
    let free = api.with("authorization", &format!("Bearer {secret}"));
    for _ in 0..10 {
        let answer = free.get("/sessions").await;
        assert!(!answer.headers.contains_key("x-ratelimit-limit-requests"));
        answer.expect_status(200);
    }
}

/// Tokens are charged as models report them; a key without any left can read, but not call a model.
#[tokio::test]
async fn tokens_per_minute_are_limited_per_key() {
    let mut test = crate::support::TestServer::with(crate::support::StoreKind::Memory, false, |_| ()).await.unwrap();
    for stream in [false, true] {
        test.stream = stream;
        // The scripted model reports 10 tokens for each answer.
        let limits = KeyLimits { tokens_per_minute: Some(15), ..KeyLimits::default() };
        let rights = vec![Right::Read, Right::Write];
        let (_, secret) = test.app.keys.add(NewKey { rights, limits, ..NewKey::default() }).await.unwrap();
        let authorization = format!("Bearer {secret}");
        let key = [("authorization", authorization.as_str())];
        let mut body = json!({"session_id": format!("s-{stream}"), "messages": [{"role": "user", "content": "hi"}]});
        body["stream_options"] = if stream { json!({"include_usage": true}) } else { Value::Null };
        let first = test.client.chat(stream, body.clone(), &key).await;
        assert_eq!((first.status, header(&first.headers, "x-ratelimit-remaining-tokens")), (200, 15));
        let second = test.client.chat(stream, body.clone(), &key).await;
        assert_eq!((second.status, header(&second.headers, "x-ratelimit-remaining-tokens")), (200, 5), "{second:?}");
        let third = test.client.chat(stream, body.clone(), &key).await;
        assert_eq!((third.status, third.code()), (429, "rate_limit_exceeded"), "{third:?}");
        assert_eq!(third.body["error"]["param"], "tokens_per_minute");
        assert!(header(&third.headers, "retry-after") >= 1);
        let read = test.client.http.get(format!("{}/sessions", test.client.base)).bearer_auth(&secret);
        assert_eq!(read.send().await.unwrap().status(), 200);
    }
}

/// The bootstrap key is added once; after it is revoked, a restart does not add it again.
#[tokio::test]
async fn a_bootstrap_key_is_added_once() {
    let api = InProcessClient::memory().await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("key");
    for (text, reason) in [("short", "at least 32"), ("two keys which are separated by spaces", "without spaces")] {
        std::fs::write(&file, text).unwrap();
        assert!(add_bootstrap_key(&api.app.keys, &file).await.unwrap_err().to_string().contains(reason));
    }
    let secret = "0123456789abcdef0123456789abcdef";
    std::fs::write(&file, format!("{secret}\n")).unwrap();
    let id = add_bootstrap_key(&api.app.keys, &file).await.unwrap().expect("it is new");
    let admin = api.with("authorization", &format!("Bearer {secret}"));
    assert_eq!(each_field(&admin.get("/keys").await.expect_status(200), "name"), ["bootstrap"]);
    assert_eq!(add_bootstrap_key(&api.app.keys, &file).await.unwrap(), None, "it is there already");
    admin.delete(&format!("/keys/{id}")).await.expect_status(200);
    let restarted = KeyStore::new(api.app.tenure.clone());
    assert_eq!(add_bootstrap_key(&restarted, &file).await.unwrap(), None);
    admin.get("/keys").await.expect_error(401);
}

/// Requests through a proxy are not local: without keys they are refused; with `trusted_proxies` keys are required.
#[tokio::test]
async fn requests_through_a_proxy_need_a_key() {
    let api = InProcessClient::memory().await;
    api.get("/sessions").await.expect_status(200);
    for name in ["x-forwarded-for", "forwarded", "x-real-ip"] {
        assert_eq!(api.with(name, "for=192.0.2.1").get("/sessions").await.expect_error(403).0, "host_not_allowed");
    }
    let api = InProcessClient::with_config("memory:", |config| {
        config.listen = "127.0.0.1:0".to_owned();
        config.trusted_proxies = TrustedProxies::try_from(vec!["127.0.0.1".to_owned()]).unwrap();
    })
    .await;
    tenure_server::serve::bind(&api.app).await.unwrap();
    api.get("/sessions").await.expect_error(401);
    api.key("acme", None, &[Right::Read])
        .await
        .with("x-forwarded-for", "192.0.2.1")
        .get("/sessions")
        .await
        .expect_status(200);
}

/// A key at its quota cannot store more, but can still read and delete; deleting frees quota.
#[tokio::test]
async fn sessions_and_bytes_are_limited_per_key() {
    for (user, limit) in [(Some("ann"), "max_sessions"), (None, "max_sessions"), (Some("ann"), "max_stored_bytes")] {
        let api = InProcessClient::memory().await;
        let rights = vec![Right::Read, Right::Write];
        let bound = user.map(|user| tenure::User::new(user).unwrap());
        let limits = match limit {
            "max_sessions" => KeyLimits { max_sessions: Some(2), ..KeyLimits::default() },
            _ => KeyLimits { max_stored_bytes: Some(1000), ..KeyLimits::default() },
        };
        let new = NewKey { rights, limits, user: bound, ..NewKey::default() };
        let (_, secret) = api.app.keys.add(new).await.unwrap();
        let app = api.with("authorization", &format!("Bearer {secret}"));
        let chat = async |id: &str, text: String| {
            let body = json!({"session_id": id, "messages": [{"role": "user", "content": text}]});
            app.post("/v1/chat/completions", body).await
        };
        if limit == "max_sessions" {
            app.post("/sessions", json!({"id": "a"})).await.expect_status(201);
            chat("b", "hi".to_owned()).await.expect_status(200);
            let refused = ("quota_exceeded".to_owned(), limit.to_owned());
            assert_eq!(chat("c", "hi".to_owned()).await.expect_error(429), refused);
            assert_eq!(app.post("/sessions", json!({"id": "c"})).await.expect_error(429), refused);
            assert_eq!(app.post("/sessions/a/fork", json!({"id": "c"})).await.expect_error(429), refused);
            let export = app.get("/sessions/b/export").await.expect_status(200);
            assert_eq!(app.post("/sessions/import", &export).await.expect_error(429), refused);
            chat("b", "what is there goes on".to_owned()).await.expect_status(200);
            app.delete("/sessions/a").await.expect_status(200);
            api.advance(6);
            app.post("/sessions", json!({"id": "c"})).await.expect_status(201);
            continue;
        }
        chat("a", "x".repeat(300)).await.expect_status(200);
        let refused = chat("a", "x".repeat(600)).await;
        assert_eq!(refused.headers["x-should-retry"], "false");
        assert_eq!(refused.expect_error(429), ("quota_exceeded".to_owned(), limit.to_owned()));
        let stored = app.get("/sessions/a").await.expect_status(200);
        assert_eq!(stored["message_count"], 2, "nothing was changed");
        app.delete("/sessions/a?purge=true").await.expect_status(200);
        api.advance(6);
        chat("b", "x".repeat(300)).await.expect_status(200);
    }
}
