//! Request extractors: bodies, query and path parameters, and conditional headers. Every rejection is an
//! `ApiError`, so all errors have the same JSON envelope.

use crate::app::AppState;
use crate::error::ApiError;
use crate::headers::header_text;
use crate::http::body;
use crate::http::query::check_name;
use axum::body::{Bytes, HttpBody};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::{HeaderMap, StatusCode, header, request::Parts};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tenure::{Seq, SessionId};

/// Extractor of a JSON body: an object, deserialized into `T`. A request without a body, whatever its content type,
/// counts as the empty object.
#[derive(Debug)]
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned> FromRequest<AppState> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &AppState) -> Result<Self, ApiError> {
        // Cross-site requests without a body are rejected by their origin (`router.rs`).
        if request.body().is_end_stream() {
            return parse_object(b"{}").map(JsonBody);
        }
        let JsonBytes(bytes) = JsonBytes::from_request(request, app).await?;
        parse_object(if bytes.is_empty() { b"{}" } else { &bytes }).map(JsonBody)
    }
}

/// Extractor of the raw bytes of a JSON body. Requires a JSON content type; the content is not validated.
#[derive(Debug)]
pub struct JsonBytes(pub Bytes);

impl FromRequest<AppState> for JsonBytes {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &AppState) -> Result<Self, ApiError> {
        // The content type check also protects against cross-site requests: browsers send JSON to another
        // origin only after a CORS preflight.
        let kind = media_type(request.headers());
        if kind != "application/json" && !kind.ends_with("+json") {
            return Err(not_json("the body must be JSON; send `Content-Type: application/json`"));
        }
        body::read(request, app).await.map(JsonBytes)
    }
}

/// Extractor of a UTF-8 body of JSON or JSON lines. The content is not parsed.
#[derive(Debug)]
pub struct TextBody(Bytes);

impl TextBody {
    /// The body as text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl FromRequest<AppState> for TextBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &AppState) -> Result<Self, ApiError> {
        let kind = media_type(request.headers());
        let accepted = ["application/json", "application/jsonl", "application/x-ndjson", "application/x-jsonlines"];
        if !accepted.contains(&&*kind) && !kind.ends_with("+json") {
            let message =
                "the body must be JSON or JSON lines; send `Content-Type: application/json` or `application/jsonl`";
            return Err(not_json(message));
        }
        let bytes = body::read(request, app).await?;
        match std::str::from_utf8(&bytes) {
            Ok(_) => Ok(TextBody(bytes)),
            Err(_) => Err(ApiError::invalid("body", "the body is not UTF-8 text")),
        }
    }
}

fn not_json(message: &str) -> ApiError {
    ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)
}

fn media_type(headers: &HeaderMap) -> String {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// Parses a JSON object; the error names the path of the invalid value. Arrays are rejected, although serde
/// would accept their items as fields in order.
pub fn parse_object<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    must_be_object(bytes)?;
    parse(bytes)
}

/// Rejects JSON that is not an object, by its first character.
pub fn must_be_object(bytes: &[u8]) -> Result<(), ApiError> {
    match bytes.trim_ascii_start().first() {
        Some(b'[' | b'"' | b'0'..=b'9' | b'-' | b't' | b'f' | b'n') => {
            Err(ApiError::invalid("body", "the body must be a JSON object"))
        }
        _ => Ok(()),
    }
}

/// Parses a JSON document; the error names the path of the invalid value. Trailing content is rejected.
pub fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, ApiError> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|e| {
        // serde_path_to_error writes `?` for path segments that it cannot name.
        let path = e.path().to_string();
        let path = path.trim_end_matches(['?', '.']);
        let param = if path.is_empty() { "body" } else { path };
        ApiError::invalid(param, format!("not a valid body: {}", e.into_inner()))
    })?;
    json.end().map_err(|e| ApiError::invalid("body", format!("not a valid body: {e}")))?;
    Ok(value)
}

/// Extractor of query parameters, deserialized into `T`.
#[derive(Debug)]
pub struct QueryParams<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for QueryParams<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        match Query::try_from_uri(&parts.uri) {
            Ok(Query(params)) => Ok(QueryParams(params)),
            Err(e) => {
                use std::error::Error;
                let reason = e.source().map_or_else(|| e.to_string(), ToString::to_string);
                Err(ApiError::invalid("query", format!("not a valid query: {reason}")))
            }
        }
    }
}

/// Extractor of the named parameters of a path.
#[derive(Debug)]
pub struct PathParams(Vec<(String, String)>);

impl<S: Send + Sync> FromRequestParts<S> for PathParams {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let params = Path::<Vec<(String, String)>>::from_request_parts(parts, state).await;
        params.map(|Path(params)| Self(params)).map_err(|e| ApiError::invalid("path", e.body_text()))
    }
}

impl PathParams {
    /// Returns a path parameter by name. Its value must be a valid name: 1 to 128 bytes, without control
    /// characters.
    pub fn get(&self, name: &str) -> Result<&str, ApiError> {
        let value = self.text(name);
        check_name(name, value)?;
        Ok(value)
    }

    /// Returns a path parameter by name, without validation.
    pub fn text(&self, name: &str) -> &str {
        self.0.iter().find(|(n, _)| n == name).map_or("", |(_, v)| v)
    }
}

/// Extractor of the session id in a path.
#[derive(Debug)]
pub struct SessionPath(pub SessionId);

impl<S: Send + Sync> FromRequestParts<S> for SessionPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let PathParams(params) = PathParams::from_request_parts(parts, state).await?;
        let id = params.into_iter().find(|(name, _)| name == "id").map(|(_, id)| id).unwrap_or_default();
        Ok(SessionPath(SessionId::new(id)?))
    }
}

/// Parses the `Idempotency-Key` header, which makes a retried request take effect once. It must have 1 to 256
/// bytes.
pub fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    match header_text(headers, "idempotency-key")? {
        Some(key) if key.is_empty() || key.len() > 256 => {
            Err(ApiError::invalid("Idempotency-Key", "it must have 1 to 256 bytes"))
        }
        key => Ok(key),
    }
}

/// Extractor of the `If-Match` header, the condition of a write (optimistic concurrency): the sequence number
/// at which the log must end. `None` means unconditional; `*` counts as such.
#[derive(Clone, Copy, Debug)]
pub struct IfMatch(pub Option<Seq>);

impl<S: Send + Sync> FromRequestParts<S> for IfMatch {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let Some(tag) = header_text(&parts.headers, "if-match")? else { return Ok(IfMatch(None)) };
        if tag == "*" {
            return Ok(IfMatch(None));
        }
        let seq = tag
            .trim_matches('"')
            .parse()
            .map_err(|_| ApiError::invalid("If-Match", "it must be an ETag of the session, such as \"12\""))?;
        Ok(IfMatch(Some(seq)))
    }
}

impl IfMatch {
    /// Converts an error of a conditional write: a conflict becomes 412 Precondition Failed if `If-Match` was
    /// sent.
    pub fn error(self, e: tenure::Error) -> ApiError {
        let mut error = ApiError::from(e);
        if self.0.is_some() && error.code() == "conflict" {
            error.status = StatusCode::PRECONDITION_FAILED;
        }
        error
    }
}
