//! `/sessions/{id}/cache`: the cached tool results of a session, for tools that clients execute. Keys, expiry and
//! eviction are those of the tools that the server executes.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult, ErrorBody};
use crate::http::extract::{JsonBody, SessionPath};
use crate::http::query::StrictQuery;
use crate::http::view::{self, CachedView, ReadErrors, WriteErrors};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

/// A tool result to store.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewCachedResult {
    /// The name of the tool.
    tool: String,
    /// The arguments of the call: any JSON value. Equivalent spellings share an entry.
    #[serde(default)]
    #[schema(value_type = Object)]
    arguments: Value,
    /// The result: any JSON value.
    #[schema(value_type = Object)]
    result: Value,
}

/// Look up a cached tool result
///
/// The result of a call of the same tool with equal arguments, if it has not expired. The lookup counts as a use.
#[utoipa::path(
    get, path = "/sessions/{id}/cache", tag = "sessions", operation_id = "get_cached_result",
    params(
        ("id" = String, Path, description = "The session"),
        ("tool" = String, Query, description = "The name of the tool"),
        ("arguments" = Option<String>, Query, description = "The arguments of the call, as JSON; `null` if omitted"),
    ),
    responses(
        (status = 200, description = "The cached result", body = CachedView),
        ReadErrors,
        (status = 400, description = "Invalid request", body = ErrorBody),
    )
)]
pub async fn get(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    mut params: StrictQuery,
) -> ApiResult<Response> {
    let principal = caller.authorize_read()?;
    let tool = params.name("tool")?;
    let arguments = params.parse::<Value>("arguments", "a JSON value")?.unwrap_or_default();
    params.reject_unknown()?;
    let tool = tool.ok_or_else(|| ApiError::invalid("tool", "`tool` is missing; send the name of the tool"))?;
    match app.tenure.cache_get(&principal, &id, &tool, &arguments).await? {
        Some(cached) => Ok(view::json(StatusCode::OK, None, view::to_json(&CachedView::from(cached)))),
        None => {
            let message = "no result is cached for this tool and these arguments; PUT stores one";
            Err(ApiError::new(StatusCode::NOT_FOUND, "not_cached", message))
        }
    }
}

/// Store a tool result in the cache
///
/// Replaces an earlier result of the same call. It expires after the assistant's `cache.ttl`; beyond its `cache.max_entries`, the least
/// recently used result is evicted.
#[utoipa::path(
    put, path = "/sessions/{id}/cache", tag = "sessions", operation_id = "put_cached_result",
    params(("id" = String, Path, description = "The session")),
    request_body(content = NewCachedResult),
    responses((status = 200, description = "The cached result", body = CachedView), WriteErrors)
)]
pub async fn put(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    JsonBody(body): JsonBody<NewCachedResult>,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    crate::http::query::check_name("tool", &body.tool)?;
    let max = app.config.runs.max_result_bytes;
    if view::to_json(&body.result).len() > max {
        let message = format!("`result` is larger than `max_result_bytes` ({max}); store less");
        return Err(ApiError::too_large("max_result_bytes", message));
    }
    app.tenure.cache_put(&principal, &id, &body.tool, &body.arguments, &body.result).await?;
    match app.tenure.cache_get(&principal, &id, &body.tool, &body.arguments).await? {
        Some(cached) => Ok(view::json(StatusCode::OK, None, view::to_json(&CachedView::from(cached)))),
        None => Err(ApiError::invalid("tool", "the cache of this session is disabled (`cache.max_entries` is 0)")),
    }
}
