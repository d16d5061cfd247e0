//! `/sessions/{id}/checkpoints`, `rewind` and `fork`: checkpoints, and going back to or branching off from one.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult};
use crate::http::extract::{IfMatch, JsonBody, PathParams, SessionPath};
use crate::http::view::{
    self, CheckpointList, CheckpointView, CheckpointWhole, PlaceBody, ReadErrors, SessionView, WriteErrors,
};
use crate::sessions::{self, RewindRequest, SessionError};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use tenure::rules::excerpt;
use tenure::{Error, Point, Seq, SessionId, session::CheckpointLabel};
use utoipa::ToSchema;

/// A checkpoint to create.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewCheckpoint {
    /// Its name; by default it is named after its record. A name must not consist of digits only: those are a position.
    #[serde(default)]
    label: Option<String>,
}

/// The position at which to fork.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkBody {
    /// The new session's id; generated if omitted.
    #[serde(default, alias = "session_id")]
    id: Option<String>,
    /// After the newest checkpoint with this label.
    #[serde(default)]
    label: Option<String>,
    /// After this number of messages.
    #[serde(default)]
    position: Option<usize>,
    /// After this number of turns.
    #[serde(default)]
    turn: Option<usize>,
}

/// The position to rewind to: exactly one of `label`, `position` and `turn`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RewindBody {
    /// After the newest checkpoint with this label.
    #[serde(default)]
    label: Option<String>,
    /// After this number of messages.
    #[serde(default)]
    position: Option<usize>,
    /// After this number of turns.
    #[serde(default)]
    turn: Option<usize>,
    /// Whether to restore the session's workspace, too: to its newest commit at or before that position.
    #[serde(default)]
    workspace: Option<bool>,
}

/// The result of restoring a workspace.
#[derive(Debug, Serialize, ToSchema)]
pub struct WorkspaceView {
    /// The commit that was restored.
    commit: String,
    /// The commit of the previous files, if they were not committed yet.
    saved: Option<String>,
}

/// The result of a rewind.
#[derive(Debug, Serialize, ToSchema)]
pub struct RewindView {
    /// The sequence number of the last record afterwards; the `ETag`.
    seq: Seq,
    /// The number of remaining messages.
    position: usize,
    /// The number of messages that were discarded.
    discarded: usize,
    /// The result for the workspace, if `workspace` was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    workspace: Option<WorkspaceView>,
}

/// Converts a body into a point. `None` means that none of the fields is set; more than one is an error.
fn parse_point(body: PlaceBody) -> ApiResult<Option<Point>> {
    let label = body.label.map(Point::Label);
    let points = [label, body.position.map(Point::Position), body.turn.map(Point::Turn)];
    let mut points = points.into_iter().flatten();
    match (points.next(), points.next()) {
        (point, None) => Ok(point),
        _ => Err(ApiError::invalid("body", "send only one of `label`, `position` and `turn`")),
    }
}

/// List checkpoints
#[utoipa::path(
    get, path = "/sessions/{id}/checkpoints", tag = "checkpoints", operation_id = "list_checkpoints",
    params(("id" = String, Path, description = "The session")),
    responses((status = 200, description = "All checkpoints of the session", body = CheckpointList), ReadErrors)
)]
pub async fn list(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
) -> ApiResult<Json<CheckpointList>> {
    let principal = caller.authorize_read()?;
    let all = app.tenure.browsing(&principal).checkpoints(&principal, &id).await?;
    let data = all.iter().map(CheckpointView::from).collect();
    Ok(Json(CheckpointList { object: "list", data, next_cursor: None }))
}

/// Create a checkpoint at the end of a session
#[utoipa::path(
    post, path = "/sessions/{id}/checkpoints", tag = "checkpoints", operation_id = "create_checkpoint",
    params(
        ("id" = String, Path, description = "The session"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` that the session must have (optimistic concurrency)"),
    ),
    request_body(content = NewCheckpoint),
    responses((status = 201, description = "The checkpoint was created", body = CheckpointView), WriteErrors)
)]
pub async fn create(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    if_match: IfMatch,
    JsonBody(body): JsonBody<NewCheckpoint>,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    let label = body.label.map(CheckpointLabel::new).transpose()?;
    let checkpoint = app
        .tenure
        .checkpoint(&principal, &id, tenure::session::NewCheckpoint::from(label).if_match(if_match.0))
        .await
        .map_err(|e| if_match.error(e))?;
    Ok(view::json(StatusCode::CREATED, Some(checkpoint.seq), view::to_json(&CheckpointView::from(&checkpoint))))
}

/// Get a checkpoint with the session's state
///
/// As of the checkpoint: the messages, the pending tool calls, the results in the current turn, the step of the run, and the metadata.
#[utoipa::path(
    get, path = "/sessions/{id}/checkpoints/{place}", tag = "checkpoints", operation_id = "get_checkpoint",
    params(
        ("id" = String, Path, description = "The session"),
        ("place" = String, Path, description = "Its label, or its position if it is a number; if several match, the newest"),
    ),
    responses((status = 200, description = "The checkpoint", body = CheckpointWhole), ReadErrors)
)]
pub async fn get(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    path: PathParams,
) -> ApiResult<Response> {
    let principal = caller.authorize_read()?;
    let label = path.get("place")?;
    let position = label.bytes().all(|b| b.is_ascii_digit()).then(|| label.parse().unwrap_or(usize::MAX));
    let tenure = app.tenure.browsing(&principal);
    let lookup = tenure.with_session(&principal, &id, |session| {
        let matches = |c: &&tenure::Checkpoint| match position {
            Some(position) => c.position == position,
            None => c.label.as_str() == label,
        };
        Some((session.head().seq, session.checkpoints.iter().rev().find(matches)?.clone()))
    });
    let Some((seq, checkpoint)) = lookup.await? else {
        let description = format!("checkpoint {}", excerpt(label));
        return Err(Error::NoSuchPoint { session_id: id, point: description }.into());
    };
    let session = tenure.state_at(&principal, &id, &checkpoint).await?;
    Ok(view::json(StatusCode::OK, Some(seq), view::checkpoint_state(&checkpoint, &session)))
}

/// Rewind a session
///
/// Later messages are discarded; they stay readable under `discarded`. With `workspace: true` the files of the session's workspace are
/// restored, too; its current files are committed first.
#[utoipa::path(
    post, path = "/sessions/{id}/rewind", tag = "checkpoints", operation_id = "rewind_session",
    params(
        ("id" = String, Path, description = "The session"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` that the session must have (optimistic concurrency)"),
    ),
    request_body(content = RewindBody),
    responses((status = 200, description = "The session was rewound", body = RewindView), WriteErrors)
)]
pub async fn rewind(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    if_match: IfMatch,
    JsonBody(body): JsonBody<RewindBody>,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    let RewindBody { label, position, turn, workspace } = body;
    let Some(to) = parse_point(PlaceBody { label, position, turn })? else {
        return Err(ApiError::invalid("body", "send one of `label`, `position` and `turn`"));
    };
    let request = RewindRequest { to, expected: if_match.0, workspace: workspace.unwrap_or(false) };
    let result = sessions::rewind(&app, &principal, &id, request).await;
    let (rewound, restored) = result.map_err(|e| match e {
        SessionError::Store(e) => if_match.error(e),
        other => other.into(),
    })?;
    let workspace = restored.map(|r| WorkspaceView { commit: r.commit, saved: r.saved_commit });
    let view = RewindView { seq: rewound.seq, position: rewound.position, discarded: rewound.discarded, workspace };
    Ok(view::json(StatusCode::OK, Some(rewound.seq), view::to_json(&view)))
}

/// Fork a session
///
/// At a position, or at the end. The shared history is referenced, not copied. Later changes to one of the two do not affect the other.
#[utoipa::path(
    post, path = "/sessions/{id}/fork", tag = "checkpoints", operation_id = "fork_session",
    params(
        ("id" = String, Path, description = "The session"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` that the session must have (optimistic concurrency)"),
    ),
    request_body(content = ForkBody),
    responses((status = 201, description = "The new session", body = SessionView), WriteErrors)
)]
pub async fn fork(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    if_match: IfMatch,
    JsonBody(body): JsonBody<ForkBody>,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    let ForkBody { id: new, label, position, turn } = body;
    let point = parse_point(PlaceBody { label, position, turn })?.unwrap_or(Point::End);
    let new = new.map(SessionId::new).transpose()?;
    let head = app
        .tenure
        .fork(&principal, &id, tenure::Fork::at(point).id(new).if_match(if_match.0))
        .await
        .map_err(|e| if_match.error(e))?;
    Ok(view::session(StatusCode::CREATED, &head))
}
