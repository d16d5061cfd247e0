//! Operational endpoints: liveness, readiness, metrics, and the API documentation.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult, ErrorBody};
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Serialize;
use utoipa::ToSchema;

/// The health status.
#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    status: &'static str,
    version: &'static str,
}

const HEALTHY: Health = Health { status: "ok", version: env!("CARGO_PKG_VERSION") };

/// Check that the process is running
#[utoipa::path(get, path = "/healthz", tag = "operations", operation_id = "healthz", responses((status = 200, body = Health)))]
pub async fn healthz() -> Json<Health> {
    Json(HEALTHY)
}

/// Check that the store can be read and written
#[utoipa::path(
    get, path = "/readyz", tag = "operations", operation_id = "readyz",
    responses((status = 200, body = Health), (status = 503, description = "The store cannot be read or written", body = ErrorBody))
)]
pub async fn readyz(State(app): State<AppState>) -> ApiResult<Json<Health>> {
    let unavailable = |message: String| ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message);
    match tokio::time::timeout(READY_TIMEOUT, app.keys.check_store()).await {
        Ok(Ok(())) => Ok(Json(HEALTHY)),
        Ok(Err(e)) => Err(unavailable(e.to_string())),
        Err(_) => Err(unavailable("the store did not respond in time".to_owned())),
    }
}

/// Timeout of the readiness check. Probes commonly give up after one second, so a later answer is useless.
const READY_TIMEOUT: std::time::Duration = std::time::Duration::from_millis(900);

/// Metrics for Prometheus
#[utoipa::path(
    get, path = "/metrics", tag = "operations", operation_id = "metrics",
    responses(
        (status = 200, description = "Prometheus text", body = String, content_type = "text/plain"),
        (status = 401, body = ErrorBody), (status = 403, body = ErrorBody), (status = 503, body = ErrorBody),
    )
)]
pub async fn metrics(State(app): State<AppState>, caller: Caller) -> ApiResult<Response> {
    caller.authorize_tenant_admin()?;
    let text = crate::observability::metrics::render(&app.session_counts, &app.tenure).await?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response())
}

/// Routes of the OpenAPI document and of its HTML rendering. They need no API key.
pub fn pages(document: utoipa::openapi::OpenApi) -> Router<AppState> {
    // Rendered once and shared by all responses: these routes need no key, so requests must be cheap.
    let json = Bytes::from(document.to_pretty_json().unwrap_or_default());
    let page = Bytes::from(page(&document));
    let document = move || async move { ([(header::CONTENT_TYPE, "application/json")], json) };
    Router::new().route("/openapi.json", get(document)).route("/docs", get(move || async move { Html(page) }))
}

fn page(document: &utoipa::openapi::OpenApi) -> String {
    let value = serde_json::to_value(document).unwrap_or_default();
    let mut html = String::from(include_str!("docs.html"));
    let mut rows = String::new();
    for (path, methods) in value["paths"].as_object().into_iter().flatten() {
        for (method, operation) in methods.as_object().into_iter().flatten() {
            let text = |name: &str| escape(operation[name].as_str().unwrap_or_default());
            let statuses: Vec<_> =
                operation["responses"].as_object().into_iter().flatten().map(|(s, _)| s.as_str()).collect();
            rows.push_str(&format!(
                "<details><summary><b class=\"{method}\">{}</b> <code>{}</code> <span>{}</span></summary><p>{}</p>{}<p class=\"s\">{}</p></details>\n",
                method.to_uppercase(), escape(path), text("summary"), text("description"), parameters(operation), statuses.join(" · "),
            ));
        }
    }
    html = html.replace("<!-- routes -->", &rows);
    html
}

fn parameters(operation: &serde_json::Value) -> String {
    let mut rows = String::new();
    for p in operation["parameters"].as_array().into_iter().flatten() {
        let text = |name: &str| escape(p[name].as_str().unwrap_or_default());
        rows.push_str(&format!(
            "<tr><td><code>{}</code></td><td>{}</td><td>{}</td></tr>",
            text("name"),
            text("in"),
            text("description")
        ));
    }
    if rows.is_empty() { rows } else { format!("<table>{rows}</table>") }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
