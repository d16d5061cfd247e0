//! JSON responses with the session's `ETag`.

use super::json::to_json;
use super::session::SessionView;
use crate::names::url_segment;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use tenure::Seq;
use tenure::log::Head;

/// Wraps a shared text as a response body without copying it.
pub fn shared_body(text: Arc<str>) -> Bytes {
    struct Text(Arc<str>);
    impl AsRef<[u8]> for Text {
        fn as_ref(&self) -> &[u8] {
            self.0.as_bytes()
        }
    }
    Bytes::from_owner(Text(text))
}

/// Builds a JSON response. `seq` is the end of the session's log, sent as the `ETag`; `None` means no `ETag`.
pub fn json(status: StatusCode, seq: Option<Seq>, body: impl Into<Body>) -> Response {
    let body: Body = body.into();
    let mut response = (status, [(header::CONTENT_TYPE, "application/json")], body).into_response();
    if let Some(tag) = seq.and_then(|seq| HeaderValue::from_str(&format!("\"{seq}\"")).ok()) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

/// Builds the response for a session's head, with its `ETag` and, if it was created, its `Location`.
pub fn session(status: StatusCode, head: &Head) -> Response {
    let mut response = json(status, Some(head.seq), to_json(&SessionView::from(head)));
    if status == StatusCode::CREATED
        && let Ok(location) =
            HeaderValue::from_str(&format!("/sessions/{}", url_segment(head.info.session_id.as_str())))
    {
        response.headers_mut().insert(header::LOCATION, location);
    }
    response
}
