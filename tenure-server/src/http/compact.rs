//! `/sessions/{id}/compact` and `uncompact`: replaces the oldest turns by a summary in the prompt, or undoes
//! that. The messages stay in the log (D-066).

use super::view::{self, SessionView, SummaryView, Writing};
use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult, ErrorBody};
use crate::http::extract::{IfMatch, JsonBody, SessionPath};
use crate::jobs::compact::options;
use crate::sessions;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use tenure::summary::KEEP_TURNS;
use tenure::{CompactionPolicy, Principal, Seq, SessionId};
use utoipa::ToSchema;

/// How to compact.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CompactBody {
    /// Number of most recent turns that are not summarized; default 2.
    #[serde(default)]
    keep_turns: Option<usize>,
    /// The model that writes the summary; else the one of `short_term.compact`, the assistant's, or the session's.
    #[serde(default)]
    model: Option<String>,
}

/// What a compaction did.
#[derive(Debug, Serialize, ToSchema)]
pub struct CompactView {
    /// The session.
    session_id: String,
    /// The end of the log after it; the `ETag`.
    seq: Seq,
    /// How many more messages the summary covers than before; 0: there was nothing to do.
    compacted: usize,
    /// The summary in force.
    summary: Option<SummaryView>,
}

/// Compact a session
///
/// A model reads the oldest turns, all but the newest, and writes a summary that models are shown instead from now on. The messages stay:
/// every other route goes on with them. A call and its result stay together, and so does a turn that has no answer yet.
#[utoipa::path(
    post, path = "/sessions/{id}/compact", tag = "sessions", operation_id = "compact_session",
    params(("id" = String, Path, description = "The session")),
    request_body(content = CompactBody),
    responses(
        (status = 200, description = "It is written, or there was nothing to do", body = CompactView),
        (status = 429, description = "Too many requests are queued for the session", body = ErrorBody),
        (status = 502, description = "The model server is unreachable or returned an invalid response", body = ErrorBody),
        (status = 504, description = "The model server timed out", body = ErrorBody),
        Writing
    )
)]
pub async fn compact(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    JsonBody(body): JsonBody<CompactBody>,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    let name = summary_model(&app, &principal, &id, body.model).await?;
    let Some(model) = app.models.get(&name) else {
        let message = format!("there is no model {name:?}; GET /v1/models lists them");
        return Err(ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).with_param("model"));
    };
    let keep_turns = Some(body.keep_turns.unwrap_or(KEEP_TURNS));
    let compacted = app.tenure.compact(&principal, &id, &*model, options(&name), keep_turns).await?;
    let summary = compacted.summary.as_ref().map(SummaryView::from);
    let view = CompactView { session_id: id.to_string(), seq: compacted.seq, compacted: compacted.messages, summary };
    Ok(view::json(StatusCode::OK, Some(compacted.seq), view::to_json(&view)))
}

/// Chooses the model that writes a session's summary: the requested one, else the one of the compaction policy,
/// else the session's, else the default.
async fn summary_model(
    app: &AppState,
    principal: &Principal,
    id: &SessionId,
    requested: Option<String>,
) -> ApiResult<String> {
    let head = app.tenure.get_live_head(principal, id).await?;
    let policy = app.tenure.policy(&principal.tenant, head.assistant.as_deref()).compact;
    let name = match (requested, policy) {
        (Some(name), _) | (None, CompactionPolicy::With(name)) => Some(name),
        _ => sessions::available_model(app, principal, &head).await?,
    };
    Ok(name.unwrap_or_else(|| app.models.default_name().to_owned()))
}

/// Remove the summary
///
/// Models are shown the messages themselves again, as far as the window goes. No other summary is written until somebody asks for one.
#[utoipa::path(
    post, path = "/sessions/{id}/uncompact", tag = "sessions", operation_id = "uncompact_session",
    params(
        ("id" = String, Path, description = "The session"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` that the session must have (optimistic concurrency)"),
    ),
    responses((status = 200, description = "The session", body = SessionView), Writing)
)]
pub async fn uncompact(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    if_match: IfMatch,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    let head = if_match.apply_to(&app.tenure).uncompact(&principal, &id).await.map_err(|e| if_match.error(e))?;
    Ok(view::session(StatusCode::OK, &head))
}
