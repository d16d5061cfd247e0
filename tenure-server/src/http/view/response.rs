//! Responses with a session's `ETag`.

use super::json::text;
use super::session::SessionView;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use tenure::{Head, Seq};

/// A text that others send too, not copied.
pub fn shared(text: Arc<str>) -> Bytes {
    struct Text(Arc<str>);
    impl AsRef<[u8]> for Text {
        fn as_ref(&self) -> &[u8] {
            self.0.as_bytes()
        }
    }
    Bytes::from_owner(Text(text))
}

/// JSON text, with the session's `ETag` if there is one.
pub fn json(status: StatusCode, seq: Option<Seq>, body: impl Into<Body>) -> Response {
    let body: Body = body.into();
    let mut response = (status, [(header::CONTENT_TYPE, "application/json")], body).into_response();
    if let Some(tag) = seq.and_then(|seq| HeaderValue::from_str(&format!("\"{seq}\"")).ok()) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

/// A session's card.
pub fn session(status: StatusCode, head: &Head) -> Response {
    let mut response = json(status, Some(head.seq), text(&SessionView::from(head)));
    if status == StatusCode::CREATED
        && let Ok(place) = HeaderValue::from_str(&format!("/sessions/{}", head.info.session_id))
    {
        response.headers_mut().insert(header::LOCATION, place);
    }
    response
}
