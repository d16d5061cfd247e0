//! Access control: keys stay required, unreadable headers are refused, and cross-site requests are rejected.

use crate::support::InProcessClient;
use axum::body::Body;
use axum::http::{HeaderValue, Method, Request};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tenure::User;
use tenure_server::auth::{NewKey, Right};
use tower::ServiceExt;

/// Sends a request whose headers may be arbitrary bytes. Returns the status and the body.
async fn send(
    api: &InProcessClient,
    method: Method,
    path: &str,
    headers: &[(&str, &[u8])],
    body: Value,
) -> (u16, Value) {
    let mut request = Request::builder().method(method).uri(path).header("content-type", "application/json");
    for (name, value) in headers {
        request = request.header(*name, HeaderValue::from_bytes(value).unwrap());
    }
    let body = if body.is_null() { Body::empty() } else { Body::from(body.to_string()) };
    let router = tenure_server::router::in_process(&api.app);
    let response = router.oneshot(request.body(body).unwrap()).await.unwrap();
    let status = response.status().as_u16();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&bytes).unwrap_or_default())
}

/// After the last key is revoked, keys are still required: on this node, on other nodes, and after a restart.
#[tokio::test]
async fn keys_stay_required_when_the_last_one_is_revoked() {
    let api = InProcessClient::memory().await;
    let list = async |api: &InProcessClient| send(api, Method::GET, "/sessions", &[], Value::Null).await.0;
    assert_eq!(list(&api).await, 200, "nobody has made a key yet");
    let keys = &api.app.keys;
    let add = async || keys.add(NewKey { rights: vec![Right::Read], ..NewKey::default() }).await.unwrap();
    let (key, secret) = add().await;
    assert_eq!(list(&api).await, 401);
    let bearer = format!("Bearer {secret}");
    let (status, _) = send(&api, Method::GET, "/sessions", &[("authorization", bearer.as_bytes())], Value::Null).await;
    assert_eq!(status, 200, "a new key works at once");
    assert!(keys.revoke(&key.id).await.unwrap());
    assert_eq!(list(&api).await, 401);
    // Another process on the same store.
    let other = tenure_server::auth::KeyStore::new(api.app.tenure.clone());
    assert!(other.are_required().await.unwrap() && !other.has_keys().await.unwrap());
    // Only an operator with access to the store can allow unauthenticated requests again, and not while there are
    // keys.
    let (key, _) = add().await;
    assert!(keys.allow_unauthenticated().await.is_err());
    keys.revoke(&key.id).await.unwrap();
    keys.allow_unauthenticated().await.unwrap();
    assert_eq!(list(&api).await, 200);
}

/// A key that another process has just created is accepted at once.
#[tokio::test]
async fn a_new_key_is_looked_up_before_it_is_refused() {
    let api = InProcessClient::memory().await;
    let key_store = &api.app.keys;
    key_store.add(NewKey { rights: vec![Right::Read], ..NewKey::default() }).await.unwrap();
    assert_eq!(send(&api, Method::GET, "/sessions", &[], Value::Null).await.0, 401, "the keys are read");
    let other = tenure_server::auth::KeyStore::new(api.app.tenure.clone());
    let (_, secret) = other.add(NewKey { rights: vec![Right::Read], ..NewKey::default() }).await.unwrap();
    let bearer = format!("Bearer {secret}");
    let (status, _) = send(&api, Method::GET, "/sessions", &[("authorization", bearer.as_bytes())], Value::Null).await;
    assert_eq!(status, 200);
}

/// An unreadable header is refused. Names may be any UTF-8, raw or encoded as in RFC 8187.
#[tokio::test]
async fn headers_are_read_or_refused_and_never_ignored() {
    let api = InProcessClient::memory().await;
    let (_, secret) = api.app.keys.add(NewKey { rights: vec![Right::Admin], ..NewKey::default() }).await.unwrap();
    let bearer = format!("Bearer {secret}");
    let key: (&str, &[u8]) = ("authorization", bearer.as_bytes());
    for (user, id) in [("jürgen", "a"), ("ada", "b")] {
        let headers = [key, ("x-tenure-user", user.as_bytes())];
        assert_eq!(send(&api, Method::POST, "/sessions", &headers, json!({"id": id})).await.0, 201);
    }
    let ids = async |headers: &[(&str, &[u8])]| {
        let (status, body) = send(&api, Method::GET, "/sessions", headers, Value::Null).await;
        let ids: Vec<String> = body["data"].as_array().into_iter().flatten().map(|s| s["id"].to_string()).collect();
        (status, ids, body["error"]["param"].as_str().unwrap_or_default().to_owned())
    };
    let own_header = vec![r#""a""#.to_owned()];
    assert_eq!(ids(&[key, ("x-tenure-user", "jürgen".as_bytes())]).await, (200, own_header.clone(), String::new()));
    assert_eq!(ids(&[key, ("x-tenure-user", b"UTF-8''j%C3%BCrgen")]).await, (200, own_header, String::new()));
    for wrong in [&b"j\xfcrgen"[..], b"UTF-8''j%C3", b"UTF-8''%zz", b"a\tb"] {
        assert_eq!(ids(&[key, ("x-tenure-user", wrong)]).await, (400, vec![], "x-tenure-user".to_owned()), "{wrong:?}");
    }
    let twice = ids(&[key, ("x-tenure-user", b"ada"), ("x-tenure-user", b"bob")]).await;
    assert_eq!((twice.0, &*twice.2), (400, "x-tenure-user"));
    // A precondition that cannot be parsed is not met.
    let patch = [key, ("x-tenure-user", b"ada".as_slice()), ("if-match", b"\"\xff\"")];
    let (status, body) = send(&api, Method::PATCH, "/sessions/b", &patch, json!({"title": "x"})).await;
    assert_eq!((status, body["error"]["param"].as_str()), (400, Some("if-match")));
    let (_, body) = send(&api, Method::GET, "/sessions/b", &patch[..2], Value::Null).await;
    assert_eq!(body["title"], Value::Null, "nothing was changed");
    for (name, value) in
        [("host", &b"\xff.example"[..]), ("authorization", b"Bearer \xff"), ("idempotency-key", b"\xff")]
    {
        let mut headers = vec![(name, value)];
        headers.extend((name != "authorization").then_some(key));
        let (status, body) = send(
            &api,
            Method::POST,
            "/sessions/b/messages",
            &headers,
            json!({"messages": [{"role": "user", "content": "x"}]}),
        )
        .await;
        assert_eq!((status, body["error"]["param"].as_str()), (400, Some(name)), "{body}");
    }
    assert_eq!(
        api.app.tenure.head(&principal("jürgen"), &"a".parse().unwrap()).await.unwrap().user,
        User::new("jürgen").unwrap()
    );
}

fn principal(user: &str) -> tenure::Principal {
    tenure::Principal::new("default", user).unwrap()
}

/// A page of another origin cannot change anything, on any route, with or without a body.
#[tokio::test]
async fn pages_of_other_sites_change_nothing() {
    let api = InProcessClient::memory().await;
    assert_eq!(send(&api, Method::POST, "/sessions", &[], json!({"id": "s"})).await.0, 201);
    let evil: [(&str, &[u8]); 2] = [("origin", b"https://evil.example"), ("host", b"127.0.0.1:8787")];
    let cross: [(&str, &[u8]); 1] = [("sec-fetch-site", b"cross-site")];
    let null: [(&str, &[u8]); 1] = [("origin", b"null")];
    let routes =
        ["/sessions/s/restore", "/sessions/s/runs/r/cancel", "/sessions/s/runs/r/resume", "/sessions/s/uncompact"];
    for headers in [&evil[..], &cross, &null] {
        for path in routes {
            let (status, body) = send(&api, Method::POST, path, headers, Value::Null).await;
            assert_eq!((status, body["error"]["code"].as_str()), (403, Some("foreign_origin")), "{path}: {body}");
        }
        assert_eq!(send(&api, Method::DELETE, "/sessions/s", headers, Value::Null).await.0, 403);
    }
    let own: [(&str, &[u8]); 3] =
        [("origin", b"http://127.0.0.1:8787"), ("host", b"127.0.0.1:8787"), ("sec-fetch-site", b"same-origin")];
    assert_eq!(send(&api, Method::POST, "/sessions/s/uncompact", &own, Value::Null).await.0, 200);
    assert_eq!(
        send(&api, Method::GET, "/sessions/s", &evil, Value::Null).await.0,
        200,
        "reading is the browser's to refuse"
    );
}
