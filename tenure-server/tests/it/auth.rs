//! Authorization: which requests each key may make.

use crate::support::{ServerProcess, assert_error, chat_request, send};
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request};
use serde_json::Value;
use tenure::{Tenant, User};
use tenure_server::app::{App, AppState};
use tenure_server::auth::{NewKey, Right};
use tenure_server::config::Config;
use tenure_server::router::in_process;
use tower::ServiceExt;

struct TestServer {
    app: AppState,
    routes: Router,
}

impl TestServer {
    async fn open(yaml: &str) -> Self {
        let app = App::open(Config::parse(&format!("store: 'memory:'\n{yaml}")).unwrap()).await.unwrap();
        Self { routes: in_process(&app), app }
    }

    async fn key(&self, tenant: &str, user: Option<&str>, rights: &[Right]) -> (String, String) {
        let user = user.map(|u| User::new(u).unwrap());
        let (key, secret) = self
            .app
            .keys
            .add(NewKey { tenant: Tenant::new(tenant).unwrap(), user, rights: rights.to_vec(), ..NewKey::default() })
            .await
            .unwrap();
        (key.id, format!("Bearer {secret}"))
    }

    async fn ask(&self, path: &str, headers: &[(&str, &str)], body: Option<Value>) -> (u16, HeaderMap, Value) {
        let mut request = Request::builder().uri(path).method(if body.is_some() { "POST" } else { "GET" });
        for (name, value) in headers.iter().chain(&[("content-type", "application/json")]) {
            request = request.header(*name, *value);
        }
        let body = body.map_or_else(Body::empty, |b| Body::from(b.to_string()));
        let response = self.routes.clone().oneshot(request.body(body).unwrap()).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = axum::body::to_bytes(body, 1 << 20).await.unwrap();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        (parts.status.as_u16(), parts.headers, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    async fn get(&self, path: &str, headers: &[(&str, &str)]) -> (u16, Value) {
        let (status, _, body) = self.ask(path, headers, None).await;
        (status, body)
    }

    /// The number of messages the model sees in this session, from its answer.
    async fn chat_response(&self, session: &str, headers: &[(&str, &str)]) -> String {
        let mut body = chat_request(session, "hi");
        body["history"] = "append".into();
        let (status, _, body) = self.ask("/v1/chat/completions", headers, Some(body)).await;
        assert_eq!(status, 200, "{body}");
        body["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    }
}

#[tokio::test]
async fn without_keys_every_local_client_is_the_administrator() {
    let server = TestServer::open("").await;
    assert_eq!(server.get("/v1/models", &[]).await.0, 200);
    assert_eq!(server.get("/metrics", &[]).await.0, 200);
}

#[tokio::test]
async fn keys_work_from_creation_until_revocation() {
    let server = TestServer::open("").await;
    let (id, key) = server.key("acme", None, &[Right::Read]).await;
    let (_, admin) = server.key("acme", None, &[Right::Admin]).await;
    let (status, headers, body) = server.ask("/v1/models", &[], None).await;
    assert_error(&(status, body), 401, "unauthorized", None);
    assert_eq!(headers["www-authenticate"], "Bearer");
    for wrong in ["Bearer tnr_nothing", "Bearer ", "Basic abc", "", key.trim_start_matches("Bearer ")] {
        assert_error(&server.get("/v1/models", &[("authorization", wrong)]).await, 401, "unauthorized", None);
    }
    assert_eq!(server.get("/v1/models", &[("authorization", &key)]).await.0, 200);
    for open in ["/healthz", "/readyz", "/openapi.json", "/docs"] {
        assert_eq!(server.get(open, &[]).await.0, 200, "{open}");
    }
    let listed = server.app.keys.list().await.unwrap();
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().all(|k| !key.contains(&k.hash)), "only the hash is kept");
    assert!(server.app.keys.revoke(&id).await.unwrap() && !server.app.keys.revoke(&id).await.unwrap());
    assert_error(&server.get("/v1/models", &[("authorization", &key)]).await, 401, "unauthorized", None);
    assert_eq!(server.get("/v1/models", &[("authorization", &admin)]).await.0, 200, "the other one still works");
}

#[tokio::test]
async fn rights_are_needed() {
    let server = TestServer::open("").await;
    let (_, reads) = server.key("acme", None, &[Right::Read]).await;
    let (_, writes) = server.key("acme", None, &[Right::Write]).await;
    let (_, admin) = server.key("acme", None, &[Right::Admin]).await;
    let chat = async |key: &str| {
        let (status, _, body) =
            server.ask("/v1/chat/completions", &[("authorization", key)], Some(chat_request("s", "hi"))).await;
        (status, body)
    };
    let refused = chat(&reads).await;
    assert_error(&refused, 403, "forbidden", None);
    assert!(refused.1["error"]["message"].as_str().unwrap().contains("`write`"), "{refused:?}");
    assert_eq!(chat(&writes).await.0, 200);
    assert_eq!(chat(&admin).await.0, 200, "an administrator may do everything");
    assert_error(&server.get("/v1/models", &[("authorization", &writes)]).await, 403, "forbidden", None);
    assert_error(&server.get("/metrics", &[("authorization", &writes)]).await, 403, "forbidden", None);
    assert_eq!(server.get("/metrics", &[("authorization", &admin)]).await.0, 200);
}

#[tokio::test]
async fn a_key_fixes_its_tenant_and_perhaps_its_user() {
    let server = TestServer::open("").await;
    let (_, ann) = server.key("acme", Some("ann"), &[Right::Write]).await;
    let (_, any) = server.key("acme", None, &[Right::Write]).await;
    let (_, other) = server.key("other", Some("ann"), &[Right::Write]).await;
    assert!(server.chat_response("anns", &[("authorization", &ann)]).await.ends_with("I see 1 message."));
    let impostor = [("authorization", ann.as_str()), ("x-tenure-user", "bob")];
    let (status, _, body) = server.ask("/v1/chat/completions", &impostor, Some(chat_request("anns", "hi"))).await;
    assert_error(&(status, body), 403, "forbidden", None);
    // A key that is not bound acts as the user it names; the header takes precedence over the body.
    let as_ann = [("authorization", any.as_str()), ("x-tenure-user", "ann")];
    assert!(server.chat_response("anns", &as_ann).await.ends_with("I see 3 messages."));
    let mut body = chat_request("anns", "hi");
    body["user"] = "ann".into();
    body["history"] = "append".into();
    let (status, _, answer) = server.ask("/v1/chat/completions", &[("authorization", &any)], Some(body.clone())).await;
    assert!(status == 200 && answer.to_string().contains("I see 5 messages."), "{answer}");
    let as_bob = [("authorization", any.as_str()), ("x-tenure-user", "bob")];
    let (status, _, answer) = server.ask("/v1/chat/completions", &as_bob, Some(body)).await;
    assert_error(&(status, answer), 404, "not_found", None);
    // Another tenant has its own sessions under the same id.
    assert!(server.chat_response("anns", &[("authorization", &other)]).await.ends_with("I see 1 message."));
    let bad = [("authorization", any.as_str()), ("x-tenure-user", "")];
    assert_error(&server.get("/v1/models", &bad).await, 400, "invalid", Some("X-Tenure-User"));
}

#[tokio::test]
async fn pages_of_other_hosts_are_refused_until_there_are_keys() {
    let server = TestServer::open("").await;
    for loopback_host in ["localhost", "localhost:8787", "127.0.0.1:1", "[::1]:8787", "127.1.2.3"] {
        assert_eq!(server.get("/v1/models", &[("host", loopback_host)]).await.0, 200, "{loopback_host}");
    }
    for other in ["evil.example", "localhost.evil.example", "10.0.0.1:8787", "[2001:db8::1]"] {
        assert_error(&server.get("/v1/models", &[("host", other)]).await, 403, "host_not_allowed", None);
    }
    let (_, key) = server.key("acme", None, &[Right::Read]).await;
    assert_eq!(server.get("/v1/models", &[("host", "evil.example"), ("authorization", &key)]).await.0, 200);
}

#[tokio::test]
async fn other_sites_may_call_only_if_they_are_named() {
    let origin = ("origin", "https://app.example.com");
    let (_, headers, _) = TestServer::open("").await.ask("/healthz", &[origin], None).await;
    assert!(!headers.contains_key("access-control-allow-origin"), "{headers:?}");
    let server = TestServer::open("cors: {origins: ['https://app.example.com']}").await;
    let (_, headers, _) = server.ask("/healthz", &[origin], None).await;
    assert_eq!(headers["access-control-allow-origin"], "https://app.example.com");
    let (_, headers, _) = server.ask("/healthz", &[("origin", "https://evil.example")], None).await;
    assert!(!headers.contains_key("access-control-allow-origin"), "{headers:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn other_than_loopback_needs_keys() {
    let dir = tempfile::tempdir().unwrap();
    let stderr = ServerProcess::start_failure(dir.path(), "store: 'sqlite:t.db'\nlisten: 0.0.0.0:0");
    assert!(stderr.contains("refusing to listen") && stderr.contains("tenure keys add"), "{stderr}");
    let tenure = tenure::Tenure::open(&format!("sqlite:{}", dir.path().join("t.db").display())).await.unwrap();
    let keys = tenure_server::auth::KeyStore::new(tenure.clone());
    let (key, secret) = keys.add(NewKey { rights: vec![Right::Read], ..NewKey::default() }).await.unwrap();
    let server = ServerProcess::start(dir.path(), "store: 'sqlite:t.db'\nlisten: 0.0.0.0:0");
    let ask = async || {
        let url = format!("http://127.0.0.1:{}/v1/models", server.address.port());
        send(crate::support::http_client().get(url).bearer_auth(&secret)).await
    };
    assert_eq!(ask().await.0, 200);
    // A key revoked by another process expires from the cache within seconds. It was the last one, and keys stay
    // required.
    assert!(keys.revoke(&key.id).await.unwrap());
    crate::support::wait_until("the key is refused", async || ask().await.0 != 200).await;
    assert_error(&ask().await, 401, "unauthorized", None);
}
