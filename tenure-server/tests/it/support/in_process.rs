//! A server without a socket, called in process.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt;
use jiff::Timestamp;
use serde_json::Value;
use tenure::{Assistant, Clock, Options, Tenant, Tenure, User};
use tenure_server::app::{App, AppState};
use tenure_server::auth::{NewKey, Right};
use tenure_server::config::Config;
use tenure_server::embed::EmbeddingSource;
use tenure_server::router::in_process;
use tower::ServiceExt;

/// A client of a server without a socket, and the headers that it sends with each request.
#[derive(Clone)]
pub struct InProcessClient {
    pub app: AppState,
    pub clock: Clock,
    router: Router,
    headers: Vec<(String, String)>,
}

/// A response.
#[derive(Debug)]
pub struct InProcessResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
}

impl InProcessResponse {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }

    /// Asserts the status and returns the body.
    #[track_caller]
    pub fn expect_status(self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text);
        self.json()
    }

    /// Asserts the status and the error envelope, and returns the error's code and param.
    #[track_caller]
    pub fn expect_error(self, status: u16) -> (String, String) {
        let body = self.expect_status(status);
        let error = &body["error"];
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "{body}");
        assert!(error["type"].is_string(), "{body}");
        (error["code"].as_str().unwrap().to_owned(), error["param"].as_str().unwrap_or_default().to_owned())
    }

    pub fn etag(&self) -> String {
        self.headers["etag"].to_str().unwrap().to_owned()
    }
}

/// The time at which tests begin.
fn start() -> Timestamp {
    "2026-01-01T00:00:00Z".parse().unwrap()
}

impl InProcessClient {
    pub async fn open(store: &str) -> Self {
        Self::with_config(store, |_| ()).await
    }

    pub async fn with_config(store: &str, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config { store: store.to_owned(), ..Config::default() };
        config.assistants = vec![Assistant { name: "declared".into(), ..Assistant::default() }];
        config.limits.max_body_bytes = 1 << 20;
        change(&mut config);
        let clock = Clock::manual(start());
        let embedder = EmbeddingSource::open(&config.embeddings).await.unwrap().embedder();
        let options = Options { clock: clock.clone(), embedder, ..config.options() };
        let tenure = Tenure::open_with(store, options).await.unwrap();
        let app = App::with_tenure(tenure, config).unwrap();
        Self { router: in_process(&app), app, clock, headers: Vec::new() }
    }

    pub async fn memory() -> Self {
        Self::open("memory:").await
    }

    /// Returns a copy of this client with an additional header.
    pub fn with(&self, name: &str, value: &str) -> Self {
        let mut client = self.clone();
        client.headers.push((name.to_owned(), value.to_owned()));
        client
    }

    /// Returns a copy of this client with a new key.
    pub async fn key(&self, tenant: &str, user: Option<&str>, rights: &[Right]) -> Self {
        let (tenant, user) = (Tenant::new(tenant).unwrap(), user.map(|u| User::new(u).unwrap()));
        let (_, secret) =
            self.app.keys.add(NewKey { tenant, user, rights: rights.to_vec(), ..NewKey::default() }).await.unwrap();
        self.with("authorization", &format!("Bearer {secret}"))
    }

    pub fn advance(&self, seconds: i64) {
        self.clock.advance(jiff::SignedDuration::from_secs(seconds));
    }

    /// Sends a request with an arbitrary body.
    pub async fn send(
        &self,
        method: &str,
        path: &str,
        kind: Option<&str>,
        body: impl Into<Bytes>,
    ) -> InProcessResponse {
        let mut request = Request::builder().method(method).uri(path).header("host", "localhost");
        if let Some(kind) = kind {
            request = request.header("content-type", kind);
        }
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let request = request.body(Body::from(body.into())).unwrap();
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let text = String::from_utf8(bytes.into()).unwrap();
        InProcessResponse { status: parts.status, headers: parts.headers, text }
    }

    pub async fn get(&self, path: &str) -> InProcessResponse {
        self.send("GET", path, None, "").await
    }

    pub async fn delete(&self, path: &str) -> InProcessResponse {
        self.send("DELETE", path, None, "").await
    }

    pub async fn post(&self, path: &str, body: impl ToString) -> InProcessResponse {
        self.send("POST", path, Some("application/json"), body.to_string()).await
    }

    pub async fn put(&self, path: &str, body: impl ToString) -> InProcessResponse {
        self.send("PUT", path, Some("application/json"), body.to_string()).await
    }

    pub async fn patch(&self, path: &str, body: impl ToString) -> InProcessResponse {
        self.send("PATCH", path, Some("application/json"), body.to_string()).await
    }

    /// Appends messages and asserts success.
    pub async fn append_messages(&self, id: &str, messages: Value) -> Value {
        let answer = self.post(&format!("/sessions/{id}/messages"), serde_json::json!({"messages": messages})).await;
        answer.expect_status(201)
    }
}

/// The values of a field in a list's data.
pub fn each_field(list: &Value, field: &str) -> Vec<String> {
    let text = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
    list["data"].as_array().unwrap().iter().map(|d| text(&d[field])).collect()
}
