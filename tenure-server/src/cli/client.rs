//! The client that commands use: the routes of `docs/api.md`, called in this process or over HTTP (D-098).

use crate::app::AppState;
use crate::auth::LocalAccess;
use crate::headers::header_value;
use crate::names::url_segment;
use crate::router::in_process;
use anyhow::{Context, anyhow, bail};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Method, Request, header};
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::time::Duration;
use tenure::{SessionId, Tenant, User};
use tower::ServiceExt;

/// Maximum number of sessions scanned to resolve an abbreviated id.
const MAX_SCANNED: usize = 1000;

/// Minimum similarity of a suggested id, from 0 (nothing in common) to 1 (equal).
const MIN_SIMILARITY: f64 = 0.6;

/// A client of the HTTP routes. Responses are the same in process and over the network.
#[derive(Debug)]
pub struct ApiClient {
    transport: ClientTransport,
    user: Option<User>,
    /// Keeps the store open.
    _app: Option<AppState>,
}

#[derive(Debug)]
enum ClientTransport {
    /// The server's own router, called in this process.
    Local(Router, LocalAccess),
    /// A running server, called over HTTP.
    Remote { http: reqwest::Client, base: String, key: Option<String> },
}

/// A successful response whose body is still streaming.
pub struct ClientResponse {
    /// The body as a stream of chunks.
    pub body: BoxStream<'static, anyhow::Result<Bytes>>,
    /// For an export, the comma-separated list of what its format cannot represent.
    pub skipped: Option<String>,
}

/// An error response of the API.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiRefusal {
    /// The HTTP status.
    pub status: u16,
    /// The stable error code.
    pub code: String,
    /// What was wrong and what to do.
    pub message: String,
}

impl ApiRefusal {
    /// Returns the API error response that an error was caused by, if any.
    pub fn from_error(e: &anyhow::Error) -> Option<&Self> {
        e.downcast_ref()
    }

    /// Parses the error envelope.
    fn read(status: u16, body: &str) -> Self {
        let error_body = serde_json::from_str::<Value>(body).unwrap_or_default();
        let text = |name: &str| error_body["error"][name].as_str().unwrap_or_default().to_owned();
        let code = text("code");
        let mut message = text("message");
        if message.is_empty() {
            message = format!("the server answered with status {status}: {:.200}", body.trim());
        }
        match (error_body["error"]["param"].as_str(), status) {
            (_, 410) => {
                let cause = message.split(';').next().unwrap_or_default().to_owned();
                message = format!("{cause}; `tenure sessions restore` brings it back");
            }
            (_, 401) => message = "the server requires a valid API key: use --key KEY or TENURE_KEY".to_owned(),
            (Some(param), 400) if !param.is_empty() && !message.contains(param) => {
                message = format!("{param}: {message}");
            }
            _ => {}
        }
        Self { status, code, message }
    }
}

fn skipped_header(headers: &HeaderMap) -> Option<String> {
    headers.get(crate::http::transfer::SKIPPED_HEADER)?.to_str().ok().map(str::to_owned)
}

impl ApiClient {
    /// Creates a client of the routes in this process, acting as an operator of a tenant.
    pub fn local(app: AppState, tenant: Tenant, user: Option<User>) -> Self {
        Self { transport: ClientTransport::Local(in_process(&app), LocalAccess(tenant)), user, _app: Some(app) }
    }

    /// Creates a client of a running server.
    pub fn remote(server: &str, key: Option<String>, user: Option<User>) -> anyhow::Result<Self> {
        let base = with_scheme(server.trim_end_matches('/'));
        let url = reqwest::Url::parse(&base).map_err(|e| anyhow!("{base:?} is not the URL of a server: {e}"))?;
        if !["http", "https"].contains(&url.scheme()) {
            bail!("the URL of a server begins with http:// or https://, as http://127.0.0.1:8787");
        }
        let http = crate::http_client::client().connect_timeout(Duration::from_secs(10)).build()?;
        Ok(Self { transport: ClientTransport::Remote { http, base, key }, user, _app: None })
    }

    /// Sends a request. Any status other than success is returned as an `ApiRefusal` error.
    pub async fn send(&self, method: Method, path: &str, body: Option<String>) -> anyhow::Result<ClientResponse> {
        self.send_if(method, path, body, None).await
    }

    /// Sends a request that is refused if the session has changed: `seq` is the sequence number of its last record,
    /// as it was read. `None` means unconditional.
    pub async fn send_if(
        &self,
        method: Method,
        path: &str,
        body: Option<String>,
        seq: Option<u64>,
    ) -> anyhow::Result<ClientResponse> {
        let if_match = seq.map(|seq| format!("\"{seq}\""));
        let (status, response) = match &self.transport {
            ClientTransport::Local(router, access) => {
                let mut request = Request::builder().method(method).uri(path).extension(access.clone());
                if let Some(tag) = &if_match {
                    request = request.header(header::IF_MATCH, tag);
                }
                if body.is_some() {
                    request = request.header(header::CONTENT_TYPE, "application/json");
                }
                if let Some(user) = &self.user {
                    request = request.header("x-tenure-user", header_value(user.as_str()));
                }
                let request = request.body(body.map_or_else(Body::empty, Body::from))?;
                let response = router.clone().oneshot(request).await.unwrap_or_else(|never| match never {});
                let (parts, body) = response.into_parts();
                let body = body.into_data_stream().map(|part| part.map_err(anyhow::Error::from)).boxed();
                (parts.status, ClientResponse { skipped: skipped_header(&parts.headers), body })
            }
            ClientTransport::Remote { http, base, key } => {
                if path.split(['/', '?']).any(|segment| segment == "." || segment == "..") {
                    bail!("a URL cannot name the session `.` or `..`; omit --server to open the store");
                }
                let mut request = http.request(method, format!("{base}{path}"));
                if let Some(tag) = &if_match {
                    request = request.header(header::IF_MATCH, tag);
                }
                if let Some(body) = body {
                    request = request.header(header::CONTENT_TYPE, "application/json").body(body);
                }
                if let Some(user) = &self.user {
                    request = request.header("x-tenure-user", header_value(user.as_str()));
                }
                if let Some(key) = key {
                    request = request.bearer_auth(key);
                }
                let response = request.send().await.map_err(|e| if e.is_connect() {
                    anyhow!("cannot connect to {base}; is the server running? start it with `tenure serve`, or omit --server to open the store")
                } else {
                    anyhow::Error::from(e.without_url()).context(format!("{base} did not answer"))
                })?;
                let status = response.status();
                let left_out = skipped_header(response.headers());
                let lost = |e: reqwest::Error| anyhow::Error::from(e.without_url()).context("the connection was lost");
                let body = response.bytes_stream().map(move |part| part.map_err(lost)).boxed();
                (status, ClientResponse { body, skipped: left_out })
            }
        };
        if status.is_success() {
            return Ok(response);
        }
        let body = response.text().await.unwrap_or_default();
        Err(ApiRefusal::read(status.as_u16(), &body).into())
    }

    /// Returns true if this process has opened the store itself, instead of calling a server.
    pub fn is_store(&self) -> bool {
        matches!(self.transport, ClientTransport::Local(..))
    }

    /// Returns the ids of live sessions that resemble an unknown one, the most similar first, at most three. Of
    /// many sessions, only the most recently active ones are considered.
    pub async fn similar_ids(&self, unknown: &str) -> anyhow::Result<Vec<String>> {
        let mut similar: Vec<(f64, String)> = Vec::new();
        let mut pages = PageStream::new(self, "/sessions", &[], MAX_SCANNED);
        while let Some(session) = pages.next().await? {
            let id = session["id"].as_str().unwrap_or_default();
            let similarity = similarity(unknown, id);
            if similarity >= MIN_SIMILARITY {
                similar.push((similarity, id.to_owned()));
            }
        }
        similar.sort_by(|a, b| b.0.total_cmp(&a.0));
        Ok(similar.into_iter().take(3).map(|(_, id)| id).collect())
    }

    /// Sends a GET request and deserializes the response.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        self.send(Method::GET, path, None).await?.json().await
    }

    /// Sends a POST request with a JSON body.
    pub async fn post(&self, path: &str, body: &Value) -> anyhow::Result<ClientResponse> {
        self.send(Method::POST, path, Some(body.to_string())).await
    }

    /// Resolves a session id, or a prefix or suffix of a generated one. An ambiguous abbreviation is an error; one
    /// that matches nothing is taken as an id.
    pub async fn resolve(&self, id_part: &str) -> anyhow::Result<SessionId> {
        let id = SessionId::new(id_part)?;
        if !may_be_short(id_part) {
            return Ok(id);
        }
        match self.send(Method::GET, &session_path(&id, "/messages?last=1"), None).await {
            Err(e) if ApiRefusal::from_error(&e).is_some_and(|r| r.status == 404) => {}
            Err(e) if ApiRefusal::from_error(&e).is_none() => return Err(e),
            _ => return Ok(id),
        }
        let mut matches: Vec<String> = Vec::new();
        let query = [("status", "active,paused,expired,deleted")];
        let mut pages = PageStream::new(self, "/sessions", &query, MAX_SCANNED);
        while let Some(session) = pages.next().await? {
            let session = session["id"].as_str().unwrap_or_default();
            if uuid::Uuid::parse_str(session).is_ok() && (session.ends_with(id_part) || session.starts_with(id_part)) {
                matches.push(session.to_owned());
            }
        }
        match &matches[..] {
            [] => Ok(id),
            [one] => Ok(SessionId::new(one)?),
            many => bail!("{id_part} is ambiguous: {}; use a longer part of the id", many.join(", ")),
        }
    }
}

/// The similarity of two ids, ignoring case: by the number of edits from one to the other. An id that begins with
/// the other one is similar too.
fn similarity(a: &str, b: &str) -> f64 {
    let (a, b) = (a.to_lowercase(), b.to_lowercase());
    let is_prefix = a.len().min(b.len()) >= 3 && (a.starts_with(&b) || b.starts_with(&a));
    strsim::normalized_damerau_levenshtein(&a, &b).max(if is_prefix { MIN_SIMILARITY } else { 0.0 })
}

/// Completes the URL of a server: without a scheme it is http, on port 443 https.
fn with_scheme(server: &str) -> String {
    if server.contains("://") {
        return server.to_owned();
    }
    let authority = server.split('/').next().unwrap_or_default();
    let scheme = if authority.ends_with(":443") { "https" } else { "http" };
    format!("{scheme}://{server}")
}

/// Appends a name to a path as one URL-encoded segment.
pub fn with_segment(path: &str, name: &str) -> anyhow::Result<String> {
    let mut url = reqwest::Url::parse(&format!("http://localhost{path}"))?;
    url.path_segments_mut().map_err(|()| anyhow!("{path} is not a path"))?.push(name);
    Ok(url.path().to_owned())
}

/// Returns true if the text can be a part of a generated id (a UUID).
fn may_be_short(id_part: &str) -> bool {
    (4..36).contains(&id_part.len()) && id_part.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-')
}

impl ClientResponse {
    /// Reads the whole body as text.
    pub async fn text(mut self) -> anyhow::Result<String> {
        let mut all = Vec::new();
        while let Some(part) = self.body.next().await {
            all.extend_from_slice(&part?);
        }
        String::from_utf8(all).context("the response is not valid UTF-8")
    }

    /// Reads and deserializes the whole body.
    pub async fn json<T: DeserializeOwned>(self) -> anyhow::Result<T> {
        let text = self.text().await?;
        serde_json::from_str(&text)
            .context("the response could not be parsed; is it a tenure server of the same version?")
    }
}

/// An iterator over a paged list, which fetches pages on demand.
pub struct PageStream<'a> {
    client: &'a ApiClient,
    path: String,
    query: Vec<(String, String)>,
    page: std::vec::IntoIter<Value>,
    remaining: usize,
    /// The requested page size. `None` lets the server choose.
    size: Option<usize>,
    /// The cursor of the next page: `None` before the first page, `Some(None)` after the last.
    next: Option<Option<String>>,
}

impl<'a> PageStream<'a> {
    /// Lists at most `limit` elements.
    pub fn new(client: &'a ApiClient, path: &str, query: &[(&str, &str)], limit: usize) -> Self {
        let query = query.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Self {
            client,
            path: path.to_owned(),
            query,
            page: Vec::new().into_iter(),
            remaining: limit,
            size: Some(100),
            next: None,
        }
    }

    /// Returns the next element, or `None` at the end of the list or at the limit.
    pub async fn next(&mut self) -> anyhow::Result<Option<Value>> {
        while self.remaining > 0 {
            if let Some(item) = self.page.next() {
                self.remaining -= 1;
                return Ok(Some(item));
            }
            let mut query = self.query.clone();
            query.extend(self.size.map(|size| ("limit".to_owned(), self.remaining.min(size).to_string())));
            match &self.next {
                None => {}
                Some(Some(cursor)) => query.push(("cursor".to_owned(), cursor.clone())),
                Some(None) => break,
            }
            let page = self.client.get(&with_query(&self.path, &query)?).await;
            let mut page: Value = match page {
                // The server's `max_page` is smaller than the requested size.
                Err(e) if self.size.is_some() && e.to_string().contains("max_page") => {
                    self.size = None;
                    continue;
                }
                page => page?,
            };
            self.next = Some(page["next_cursor"].as_str().map(str::to_owned));
            let Value::Array(list) = page["data"].take() else { bail!("{} did not return a list", self.path) };
            self.page = list.into_iter();
        }
        Ok(None)
    }

    /// Collects all elements, and returns them with the cursor of the next page, if there is one.
    pub async fn all(mut self) -> anyhow::Result<(Vec<Value>, Option<String>)> {
        let mut all = Vec::new();
        while let Some(item) = self.next().await? {
            all.push(item);
        }
        Ok((all, self.next.flatten()))
    }
}

/// Appends URL-encoded query parameters to a path.
pub fn with_query<K: AsRef<str>, V: AsRef<str>>(path: &str, query: &[(K, V)]) -> anyhow::Result<String> {
    let pairs = query.iter().map(|(k, v)| (k.as_ref(), v.as_ref()));
    let url = reqwest::Url::parse_with_params("http://localhost/", pairs)?;
    Ok(match url.query() {
        Some(query) if !query.is_empty() => format!("{path}?{query}"),
        _ => path.to_owned(),
    })
}

/// The path of a session's resource, with the session's id encoded: `/sessions/user%40example.com/messages`.
pub fn session_path<I: AsRef<str> + ?Sized>(id: &I, resource: &str) -> String {
    format!("/sessions/{}{resource}", url_segment(id.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_escaped() {
        let pairs = [("title", "a&b=ü"), ("tag", "x y")];
        assert_eq!(with_query("/sessions", &pairs).unwrap(), "/sessions?title=a%26b%3D%C3%BC&tag=x+y");
        assert_eq!(with_query::<&str, &str>("/sessions", &[]).unwrap(), "/sessions");
    }

    #[test]
    fn names_in_paths_are_escaped() {
        assert_eq!(with_segment("/users", "a/b ü?").unwrap(), "/users/a%2Fb%20%C3%BC%3F");
    }

    #[test]
    fn a_server_without_a_scheme_is_http_except_on_port_443() {
        for (server, want) in [
            ("localhost:8787", "http://localhost:8787"),
            ("example.com", "http://example.com"),
            ("example.com:443", "https://example.com:443"),
            ("example.com:443/tenure", "https://example.com:443/tenure"),
            ("[::1]:8787", "http://[::1]:8787"),
            ("https://example.com", "https://example.com"),
        ] {
            assert_eq!(with_scheme(server), want);
            ApiClient::remote(server, None, None).unwrap();
        }
        assert!(ApiClient::remote("ftp://example.com", None, None).is_err());
    }

    #[test]
    fn mistyped_ids_are_similar() {
        for (unknown, id) in [("trpi", "trip"), ("Trip", "trip"), ("trip", "trip-to-rome"), ("support42", "support-42")]
        {
            assert!(similarity(unknown, id) >= MIN_SIMILARITY, "{unknown} {id}");
        }
        for (unknown, id) in [("trip", "billing"), ("a", "b"), ("one", "two")] {
            assert!(similarity(unknown, id) < MIN_SIMILARITY, "{unknown} {id}");
        }
    }

    #[test]
    fn session_ids_are_encoded_in_paths() {
        assert_eq!(
            session_path("user@example.com", "/messages?last=1"),
            "/sessions/user%40example.com/messages?last=1"
        );
        assert_eq!(with_query(&session_path("..", "/export"), &[("a", "b")]).unwrap(), "/sessions/../export?a=b");
    }

    #[test]
    fn only_parts_of_uuids_are_short() {
        assert!(may_be_short("3c6ec5dab1f0") && may_be_short("019a-77"));
        assert!(
            !may_be_short("abc") && !may_be_short("hello") && !may_be_short("019a8c3e-0000-7000-8000-3c6ec5dab1f0")
        );
    }
}
