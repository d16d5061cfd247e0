//! The API documentation: `/openapi.json`, and its rendering as the page `/docs`, from which requests can be sent.
//! Everything is served from the binary; the page loads nothing from other servers.

mod examples;
mod html;
mod schema;

use crate::app::AppState;
use axum::Router;
use axum::body::Bytes;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;

const STYLE: &str = include_str!("docs/style.css");
const SCRIPT: &str = include_str!("docs/docs.mjs");

/// What the page may load and do: its own style sheet and script, and requests to this server. No inline script,
/// no frames, and no other server.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// Routes of the OpenAPI document and of its HTML rendering. They need no API key.
pub fn pages(document: utoipa::openapi::OpenApi) -> Router<AppState> {
    // Rendered once and shared by all responses: these routes need no key, so requests must be cheap.
    let json = Bytes::from(document.to_pretty_json().unwrap_or_default());
    let page = Bytes::from(html::page(&serde_json::to_value(document).unwrap_or_default()));
    let file = |content_type: &'static str, content: Bytes| get(move || async move { respond(content_type, content) });
    Router::new()
        .route("/openapi.json", file("application/json", json))
        .route("/docs", file("text/html; charset=utf-8", page))
        .route("/docs/style.css", file("text/css; charset=utf-8", Bytes::from_static(STYLE.as_bytes())))
        .route("/docs/docs.mjs", file("text/javascript; charset=utf-8", Bytes::from_static(SCRIPT.as_bytes())))
}

fn respond(content_type: &'static str, content: Bytes) -> Response {
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // The files belong to this version of the server.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, content).into_response()
}
