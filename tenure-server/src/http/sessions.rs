//! `/sessions`: create, list, read, update, delete and restore sessions.

use crate::app::{App, AppState};
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult};
use crate::http::extract::{IfMatch, JsonBody, SessionPath};
use crate::http::query::StrictQuery;
use crate::http::view::{
    self, Asking, CachedView, Ending, Making, Reading, SessionList, SessionView, SessionWhole, Writing,
};
use crate::sessions::{self, DeletionMode};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tenure::excerpt;
use tenure::{Patch, Principal, SessionId, Status};
use utoipa::ToSchema;

/// A session to be.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSession {
    /// Its id; generated if there is none.
    #[serde(default, alias = "session_id")]
    pub id: Option<String>,
    /// The assistant it belongs to.
    #[serde(default)]
    pub assistant_id: Option<String>,
    /// The chat thread that shows it.
    #[serde(default)]
    pub thread_id: Option<String>,
    /// The model it talks to.
    #[serde(default)]
    pub model: Option<String>,
    /// A title for people.
    #[serde(default)]
    pub title: Option<String>,
    /// Words to find it by.
    #[serde(default)]
    pub tags: Option<Vec<String>>,
    /// Anything else.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
}

/// What to change; what is left out stays, `null` removes.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionPatch {
    /// A title for people.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    title: Patch<String>,
    /// All tags.
    #[serde(default)]
    #[schema(value_type = Option<Vec<String>>)]
    tags: Patch<Vec<String>>,
    /// The model it talks to.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    model: Patch<String>,
    /// A JSON merge patch (RFC 7396): `null` removes a key.
    #[serde(default)]
    #[schema(value_type = Object)]
    metadata: Map<String, Value>,
    /// `active` or `paused`.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    status: Option<Status>,
}

/// What became of a session.
#[derive(Debug, Serialize, ToSchema)]
pub struct SessionDeleted {
    id: String,
    session_id: String,
    object: &'static str,
    deleted: bool,
    /// Whether it was destroyed; else it can be restored.
    purged: bool,
}

/// Creates a session. The assistant that it names must exist, and its workspace must be valid.
pub(super) async fn begin(app: &App, who: &Principal, body: NewSession) -> ApiResult<tenure::Session> {
    if let Some(name) = &body.assistant_id
        && app.tenure.assistant(who, name).await?.is_none()
    {
        let message = format!("there is no assistant {name:?}; GET /assistants lists them");
        return Err(ApiError::not_found(message).with_param("assistant_id"));
    }
    sessions::check_workspace(app, who, body.metadata.as_ref().unwrap_or(&Map::new())).await?;
    let new = tenure::NewSession {
        id: body.id.map(SessionId::new).transpose()?,
        assistant: body.assistant_id,
        thread: body.thread_id,
        model: body.model,
        title: body.title,
        tags: body.tags.unwrap_or_default(),
        metadata: body.metadata.unwrap_or_default(),
    };
    Ok(app.tenure.create(who, new).await?)
}

/// Begin a session
#[utoipa::path(
    post, path = "/sessions", tag = "sessions", operation_id = "create_session",
    request_body(content = NewSession),
    responses((status = 201, description = "It has begun", body = SessionView), Making)
)]
pub async fn create(
    State(app): State<AppState>,
    caller: Caller,
    JsonBody(body): JsonBody<NewSession>,
) -> ApiResult<Response> {
    let session = begin(&app, &caller.writes()?, body).await?;
    Ok(view::session(StatusCode::CREATED, session.head()))
}

/// List sessions
///
/// Last active first. Those that expired or were deleted are left out unless `status` asks for them. `metadata.KEY=VALUE` looks for plain
/// values in the metadata; it can be repeated, like `tag`.
#[utoipa::path(
    get, path = "/sessions", tag = "sessions", operation_id = "list_sessions",
    params(
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 100, description = "At most so many; 20 if not given"),
        ("cursor" = Option<String>, Query, description = "The `next_cursor` of the page before"),
        ("offset" = Option<u32>, Query, description = "Leaves out so many, at most `max_offset` (1,000); instead of `cursor`"),
        ("assistant_id" = Option<String>, Query, description = "Of this assistant"),
        ("thread_id" = Option<String>, Query, description = "Of this chat thread"),
        ("user" = Option<String>, Query, description = "Of this user; for administrators"),
        ("status" = Option<String>, Query, description = "`active`, `paused`, `expired`, `deleted`; several with commas"),
        ("created_after" = Option<String>, Query, description = "Created at or after this RFC 3339 time"),
        ("created_before" = Option<String>, Query, description = "Created before this RFC 3339 time"),
        ("tag" = Option<Vec<String>>, Query, description = "With this tag; repeatable, all must be there"),
        ("title" = Option<String>, Query, description = "With this text in the title, whatever its case"),
    ),
    responses((status = 200, description = "A page", body = SessionList), Asking)
)]
pub async fn list(State(app): State<AppState>, caller: Caller, pairs: StrictQuery) -> ApiResult<Json<SessionList>> {
    let who = caller.reads()?;
    let query = pairs.sessions(&who, app.config.limits.max_page)?;
    Ok(Json(app.tenure.browsing(&who).list(&who, query).await?.into()))
}

/// Look at a session, whole
#[utoipa::path(
    get, path = "/sessions/{id}", tag = "sessions", operation_id = "get_session",
    params(
        ("id" = String, Path, description = "The session"),
        ("include" = Option<String>, Query, description = "`cache`, `discarded`, or both with a comma"),
    ),
    responses((status = 200, description = "The session", body = SessionWhole), Reading)
)]
pub async fn get(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    mut pairs: StrictQuery,
) -> ApiResult<Response> {
    let who = caller.reads()?;
    let (mut cache, mut discarded) = (false, false);
    for word in pairs.one("include")?.iter().flat_map(|words| words.split(',')) {
        match word {
            "cache" => cache = true,
            "discarded" => discarded = true,
            other => {
                return Err(ApiError::invalid(
                    "include",
                    format!("{other} is not cache or discarded", other = excerpt(other)),
                ));
            }
        }
    }
    pairs.end()?;
    let (seq, whole) = app.tenure.browsing(&who).text(&who, &id, view::whole).await?;
    if !cache && !discarded {
        return Ok(view::json(StatusCode::OK, Some(seq), view::shared(whole)));
    }
    let mut body = whole.to_string();
    if cache {
        let cached = app.tenure.browsing(&who).cache_entries(&who, &id).await?;
        let cached: Vec<_> = cached.into_iter().map(CachedView::from).collect();
        body = view::with(body, &[("cache", &view::text(&cached))]);
    }
    if discarded {
        let cut = app.tenure.browsing(&who).discarded(&who, &id).await?;
        body = view::with(body, &[("discarded", &view::discarded(&cut))]);
    }
    Ok(view::json(StatusCode::OK, Some(seq), body))
}

/// Change title, tags, model, metadata or status
#[utoipa::path(
    patch, path = "/sessions/{id}", tag = "sessions", operation_id = "update_session",
    params(
        ("id" = String, Path, description = "The session"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` it must still have"),
    ),
    request_body(content = SessionPatch),
    responses((status = 200, description = "The session after it", body = SessionView), Writing)
)]
pub async fn patch(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    if_match: IfMatch,
    JsonBody(body): JsonBody<SessionPatch>,
) -> ApiResult<Response> {
    let who = caller.writes()?;
    let SessionPatch { title, tags, model, metadata, status } = body;
    sessions::check_workspace(&app, &who, &metadata).await?;
    let change = tenure::SessionPatch { title, tags, model, metadata };
    let head = if_match.on(&app.tenure).patch(&who, &id, change, status).await;
    Ok(view::session(StatusCode::OK, &head.map_err(|e| if_match.error(e))?))
}

/// Delete a session
///
/// It can be restored until its retention ends; with `purge=true` it can not. Its transcript goes with it.
#[utoipa::path(
    delete, path = "/sessions/{id}", tag = "sessions", operation_id = "delete_session",
    params(
        ("id" = String, Path, description = "The session"),
        ("purge" = Option<bool>, Query, description = "Destroy it for good"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` it must still have"),
    ),
    responses((status = 200, description = "It is gone", body = SessionDeleted), Ending)
)]
pub async fn delete(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    if_match: IfMatch,
    mut pairs: StrictQuery,
) -> ApiResult<Json<SessionDeleted>> {
    let who = caller.writes()?;
    let purged = pairs.read("purge", "true or false")?.unwrap_or(false);
    pairs.end()?;
    let deletion = if purged { DeletionMode::Purge } else { DeletionMode::Restorable };
    let deleted = sessions::delete(&app, &who, &id, deletion, if_match.0).await.map_err(|e| if_match.error(e))?;
    if !deleted {
        return Err(tenure::Error::NotFound { session_id: id }.into());
    }
    let (id, session_id) = (id.to_string(), id.to_string());
    Ok(Json(SessionDeleted { id, session_id, object: "session.deleted", deleted, purged }))
}

/// Bring an expired or deleted session back
#[utoipa::path(
    post, path = "/sessions/{id}/restore", tag = "sessions", operation_id = "restore_session",
    params(
        ("id" = String, Path, description = "The session"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` it must still have"),
    ),
    responses((status = 200, description = "The session, active", body = SessionView), Ending)
)]
pub async fn restore(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    if_match: IfMatch,
) -> ApiResult<Response> {
    let who = caller.writes()?;
    let head = if_match.on(&app.tenure).restore(&who, &id).await.map_err(|e| if_match.error(e))?;
    Ok(view::session(StatusCode::OK, &head))
}
