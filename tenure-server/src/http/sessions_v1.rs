//! `/v1/sessions`: the session endpoints of mistral.rs, for its clients, and a short form of export and import.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult};
use crate::http::extract::{IfMatch, JsonBody, SessionPath, TextBody};
use crate::http::query::StrictQuery;
use crate::http::sessions::list_page;
use crate::http::transfer::{self, LeftOutView};
use crate::http::view::{self, ListErrors, LookupErrors, SessionList, SessionView, WriteErrors};
use crate::sessions::{self, DeletionMode};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tenure::{Error, Point, Seq, SessionId};
use utoipa::ToSchema;

/// List sessions
///
/// Accepts the parameters of `GET /sessions`, `metadata.KEY=VALUE` included.
#[utoipa::path(
    get, path = "/v1/sessions", tag = "v1", operation_id = "list_sessions_v1",
    params(
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 100, description = "Page size; default 20"),
        ("cursor" = Option<String>, Query, description = "`next_cursor` of the previous page"),
        ("offset" = Option<u32>, Query, description = "Number of sessions to skip, at most `max_offset` (1,000); instead of `cursor`"),
        ("assistant_id" = Option<String>, Query, description = "Of this assistant"),
        ("thread_id" = Option<String>, Query, description = "Of this chat thread"),
        ("user" = Option<String>, Query, description = "Of this user; for administrators"),
        ("status" = Option<String>, Query, description = "`active`, `paused`, `expired`, `deleted`; several with commas"),
        ("created_after" = Option<String>, Query, description = "Created at or after this time: RFC 3339, or a date (midnight UTC)"),
        ("created_before" = Option<String>, Query, description = "Created before this time: RFC 3339, or a date (midnight UTC)"),
        ("tag" = Option<Vec<String>>, Query, description = "With this tag; repeatable, all must match"),
        ("title" = Option<String>, Query, description = "Title contains this text (case-insensitive)"),
        ("include" = Option<String>, Query, description = "`display_title`: also the title to show for each session, which is read from its messages"),
    ),
    responses((status = 200, description = "A page", body = SessionList), ListErrors)
)]
pub async fn list(State(app): State<AppState>, caller: Caller, params: StrictQuery) -> ApiResult<Json<SessionList>> {
    Ok(Json(list_page(&app, &caller.authorize_read()?, params).await?))
}

/// Maps an expired or deleted session to not found, as clients of these routes expect.
fn gone_as_not_found(e: Error) -> Error {
    match e {
        Error::Gone { session_id, .. } => Error::NotFound { session_id },
        other => other,
    }
}

/// An exported session.
#[derive(Debug, Serialize, ToSchema)]
pub struct ExportView {
    /// The format of the export.
    tenure: u32,
    /// Its id.
    session_id: String,
    /// The messages including media, each as it was sent.
    #[schema(value_type = Vec<Object>)]
    messages: Vec<Value>,
    /// The images in the messages, base64.
    images: Vec<String>,
    /// The videos in the messages, base64.
    videos: Vec<String>,
    /// The files in the messages.
    #[schema(value_type = Vec<Object>)]
    files: Vec<Value>,
}

/// Export a session
#[utoipa::path(
    get, path = "/v1/sessions/{id}", tag = "v1", operation_id = "export_session_v1",
    params(("id" = String, Path, description = "The session")),
    responses((status = 200, description = "The session", body = ExportView), LookupErrors)
)]
pub async fn get(State(app): State<AppState>, caller: Caller, SessionPath(id): SessionPath) -> ApiResult<Response> {
    let principal = caller.authorize_read()?;
    let session = app.tenure.browsing(&principal).load(&principal, &id).await.map_err(gone_as_not_found)?;
    let seq = session.head().seq;
    transfer::mistralrs_response(seq, &session.into())
}

/// The result of an import that replaces a session.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReplacedView {
    /// The session.
    session_id: String,
    /// The sequence number of its last record; the `ETag`.
    seq: Seq,
    /// The number of messages afterwards.
    message_count: usize,
    /// Parts of the import that a session cannot represent.
    #[serde(rename = "left_out")]
    skipped: Vec<LeftOutView>,
}

/// Import a session, or replace it
///
/// The body is an export of Tenure, plain messages (`{"messages": […]}` or the list alone), or an export of mistral.rs. Messages that are
/// replaced are discarded, as by a rewind.
#[utoipa::path(
    put, path = "/v1/sessions/{id}", tag = "v1", operation_id = "import_session_v1",
    params(
        ("id" = String, Path, description = "The session"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` that the session must have (optimistic concurrency)"),
    ),
    request_body(content((Object = "application/json"), (String = "application/jsonl"))),
    responses((status = 200, description = "The session was imported", body = ReplacedView), WriteErrors)
)]
pub async fn put(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    if_match: IfMatch,
    lines: TextBody,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    let mut imports = transfer::read(lines.as_str(), None)?;
    let (Some(mut imported), true) = (imports.pop(), imports.is_empty()) else {
        return Err(ApiError::invalid(
            "body",
            "the body must contain exactly one session; POST /sessions/import accepts several",
        ));
    };
    if imported.export.messages.is_empty() && imported.export.log.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` is empty: a session to import has at least one message"));
    }
    sessions::check_workspace(&app, &principal, &imported.export.metadata).await?;
    imported.skip_unknown_model(|model| app.models.get(model).is_some());
    let mut skipped = transfer::skipped_parts(&id, &imported);
    if !imported.export.log.is_empty() && app.tenure.head(&principal, &id).await.is_ok() {
        let location = "log".to_owned();
        let reason = "the session exists and has a log of its own: times, runs and reviews are not replaced".to_owned();
        skipped.push(LeftOutView { session_id: id.to_string(), location, reason });
    }
    let head = app.tenure.import(&principal, &id, imported.export, if_match.0).await.map_err(|e| if_match.error(e))?;
    let seq = head.seq;
    let view = ReplacedView { session_id: id.to_string(), seq, message_count: head.digest.messages, skipped };
    Ok(view::json(StatusCode::OK, Some(seq), view::to_json(&view)))
}

/// The result of deleting a session.
#[derive(Debug, Serialize, ToSchema)]
pub struct DeletedView {
    /// The session.
    session_id: String,
    /// Whether it existed.
    deleted: bool,
}

/// Delete a session
///
/// 200 whether or not it existed. It can be restored until its retention ends.
#[utoipa::path(
    delete, path = "/v1/sessions/{id}", tag = "v1", operation_id = "delete_session_v1",
    params(("id" = String, Path, description = "The session")),
    responses((status = 200, description = "The session is deleted, or did not exist", body = DeletedView), ListErrors)
)]
pub async fn delete(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
) -> ApiResult<Json<DeletedView>> {
    let principal = caller.authorize_write()?;
    let deleted = match app.tenure.get_live_head(&principal, &id).await {
        Ok(_) => sessions::delete(&app, &principal, &id, DeletionMode::Restorable, None).await?,
        Err(Error::NotFound { .. } | Error::Gone { .. }) => false,
        Err(e) => return Err(e.into()),
    };
    Ok(Json(DeletedView { session_id: id.to_string(), deleted }))
}

/// The position at which to fork.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkTurns {
    /// The new session's id; generated if omitted.
    #[serde(default)]
    session_id: Option<String>,
    /// After this number of turns; by default at the end.
    #[serde(default)]
    turns: Option<usize>,
}

/// Fork a session after a number of turns
#[utoipa::path(
    post, path = "/v1/sessions/{id}/fork", tag = "v1", operation_id = "fork_session_v1",
    params(("id" = String, Path, description = "The session")),
    request_body(content = ForkTurns),
    responses((status = 201, description = "The new session", body = SessionView), WriteErrors)
)]
pub async fn fork(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    JsonBody(body): JsonBody<ForkTurns>,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    let new = body.session_id.map(SessionId::new).transpose()?;
    let point = body.turns.map_or(Point::End, Point::Turn);
    let head = app.tenure.fork(&principal, &id, tenure::Fork::at(point).id(new)).await?;
    Ok(view::session(StatusCode::CREATED, &head))
}
