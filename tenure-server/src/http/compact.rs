//! `/sessions/{id}/compact` and `uncompact`: replaces the oldest turns by a summary in the prompt, or undoes
//! that. The messages stay in the log (D-066).

use super::view::{self, SessionView, SummaryView, WriteErrors};
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
use tenure::rules::summary::KEEP_TURNS;
use tenure::{Principal, Seq, SessionId, policy::CompactionPolicy};
use utoipa::ToSchema;

/// Options of a compaction.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CompactBody {
    /// Number of most recent turns that are not summarized; default 2.
    #[serde(default)]
    keep_turns: Option<usize>,
    /// The model that writes the summary; by default the one of `short_term.compact`, else the assistant's, else the session's.
    #[serde(default)]
    model: Option<String>,
}

/// The result of a compaction.
#[derive(Debug, Serialize, ToSchema)]
pub struct CompactView {
    /// The session.
    session_id: String,
    /// The sequence number of the last record afterwards; the `ETag`.
    seq: Seq,
    /// The number of messages that the summary covers in addition to before; 0 if there was nothing to do.
    compacted: usize,
    /// The current summary.
    summary: Option<SummaryView>,
}

/// Compact a session
///
/// A model summarizes all turns but the newest ones. From then on, prompts contain the summary in place of these turns. The messages stay
/// stored, and all other routes return them. A tool call is never separated from its result, and a turn without an answer is not summarized.
#[utoipa::path(
    post, path = "/sessions/{id}/compact", tag = "sessions", operation_id = "compact_session",
    params(("id" = String, Path, description = "The session")),
    request_body(content = CompactBody),
    responses(
        (status = 200, description = "The summary was written, or there was nothing to do", body = CompactView),
        (status = 429, description = "Too many requests are queued for the session", body = ErrorBody),
        (status = 502, description = "The model server is unreachable or returned an invalid response", body = ErrorBody),
        (status = 504, description = "The model server timed out", body = ErrorBody),
        WriteErrors
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
/// Prompts contain the messages themselves again, as far as the window permits. No summary is written again until one is requested.
#[utoipa::path(
    post, path = "/sessions/{id}/uncompact", tag = "sessions", operation_id = "uncompact_session",
    params(
        ("id" = String, Path, description = "The session"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` that the session must have (optimistic concurrency)"),
    ),
    responses((status = 200, description = "The session", body = SessionView), WriteErrors)
)]
pub async fn uncompact(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    if_match: IfMatch,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    let head = app.tenure.uncompact(&principal, &id, if_match.0).await.map_err(|e| if_match.error(e))?;
    Ok(view::session(StatusCode::OK, &head))
}
