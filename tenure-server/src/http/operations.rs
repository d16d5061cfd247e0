//! Operational endpoints: liveness, readiness and metrics.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult, ErrorBody};
use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
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
