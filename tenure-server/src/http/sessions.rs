//! `/sessions`: create, list, read, update, delete and restore sessions.

use crate::app::{App, AppState};
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult};
use crate::http::extract::{IfMatch, JsonBody, SessionPath};
use crate::http::query::StrictQuery;
use crate::http::view::{
    self, CachedView, CreateErrors, ListErrors, ReadErrors, SessionList, SessionView, SessionWhole, UpdateErrors,
    WriteErrors,
};
use crate::sessions::{self, DeletionMode};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tenure::rules::excerpt;
use tenure::{
    Principal, SessionId,
    session::{Patch, Status},
};
use utoipa::ToSchema;

/// A session to create.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSession {
    /// Its id; generated if omitted.
    #[serde(default, alias = "session_id")]
    pub id: Option<String>,
    /// The assistant it belongs to.
    #[serde(default)]
    pub assistant_id: Option<String>,
    /// The chat thread that shows it.
    #[serde(default)]
    pub thread_id: Option<String>,
    /// The model it uses.
    #[serde(default)]
    pub model: Option<String>,
    /// A human-readable title.
    #[serde(default)]
    pub title: Option<String>,
    /// Tags for filtering.
    #[serde(default)]
    pub tags: Option<Vec<String>>,
    /// Arbitrary metadata.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
    /// Any JSON value, stored as `metadata.context`.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub context: Option<Value>,
}

/// Fields to change: omitted fields stay unchanged, `null` removes a value.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionPatch {
    /// A human-readable title.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    title: Patch<String>,
    /// All tags.
    #[serde(default)]
    #[schema(value_type = Option<Vec<String>>)]
    tags: Patch<Vec<String>>,
    /// The model it uses.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    model: Patch<String>,
    /// A JSON merge patch (RFC 7396): `null` removes a key.
    #[serde(default)]
    #[schema(value_type = Object)]
    metadata: Map<String, Value>,
    /// Any JSON value, stored as `metadata.context`: an object is merged, `null` removes it, anything else replaces it.
    #[serde(default)]
    #[schema(value_type = Object)]
    context: Patch<Value>,
    /// `active` or `paused`.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    status: Option<Status>,
}

/// The result of deleting a session.
#[derive(Debug, Serialize, ToSchema)]
pub struct SessionDeleted {
    id: String,
    session_id: String,
    object: &'static str,
    deleted: bool,
    /// Whether it was purged; otherwise it can be restored.
    purged: bool,
}

/// Creates a session. The assistant that it names must exist, and its workspace must be valid.
pub(super) async fn create_session(app: &App, principal: &Principal, body: NewSession) -> ApiResult<tenure::Session> {
    if let Some(name) = &body.assistant_id
        && app.tenure.assistant(principal, name).await?.is_none()
    {
        let message = format!("there is no assistant {name:?}; GET /assistants lists them");
        return Err(ApiError::not_found(message).with_param("assistant_id"));
    }
    let mut metadata = body.metadata.unwrap_or_default();
    metadata.extend(body.context.map(|context| ("context".to_owned(), context)));
    sessions::check_workspace(app, principal, &metadata).await?;
    let new = tenure::NewSession {
        id: body.id.map(SessionId::new).transpose()?,
        assistant: body.assistant_id,
        thread: body.thread_id,
        model: body.model,
        title: body.title,
        tags: body.tags.unwrap_or_default(),
        metadata,
    };
    Ok(app.tenure.create(principal, new).await?)
}

/// Create a session
#[utoipa::path(
    post, path = "/sessions", tag = "sessions", operation_id = "create_session",
    request_body(content = NewSession),
    responses((status = 201, description = "The session was created", body = SessionView), CreateErrors)
)]
pub async fn create(
    State(app): State<AppState>,
    caller: Caller,
    JsonBody(body): JsonBody<NewSession>,
) -> ApiResult<Response> {
    let session = create_session(&app, &caller.authorize_write()?, body).await?;
    Ok(view::session(StatusCode::CREATED, session.head()))
}

/// List sessions
///
/// Last active first. Expired and deleted sessions are omitted unless `status` requests them. `metadata.KEY=VALUE` selects sessions by a
/// scalar value in their metadata; it can be repeated, like `tag`.
#[utoipa::path(
    get, path = "/sessions", tag = "sessions", operation_id = "list_sessions",
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

/// Lists a page of sessions, with their display titles on request.
pub(super) async fn list_page(app: &App, principal: &Principal, mut params: StrictQuery) -> ApiResult<SessionList> {
    let include = params.one("include")?;
    if let Some(other) = include.as_deref().filter(|word| *word != "display_title") {
        return Err(ApiError::invalid("include", format!("{} is not display_title", excerpt(other))));
    }
    let query = params.into_session_query(principal, app.config.limits.max_page)?;
    let mut list: SessionList = app.tenure.browsing(principal).list(principal, query).await?.into();
    if include.is_some() {
        for session in &mut list.data {
            session.display_title = display_title_of(app, principal, session).await?;
        }
    }
    Ok(list)
}

/// Reads the display title of a listed session. `None` if it cannot be read any more: it was deleted or has expired.
async fn display_title_of(app: &App, principal: &Principal, session: &SessionView) -> ApiResult<Option<String>> {
    if session.title.is_some() || session.message_count == 0 {
        return Ok(session.title.clone());
    }
    let tenure = app.tenure.browsing(principal);
    match tenure.messages_from(principal, &SessionId::new(&session.id)?, 0, view::SCANNED_MESSAGES).await {
        Ok((_, messages)) => Ok(view::display_title(None, &messages)),
        Err(tenure::Error::NotFound { .. } | tenure::Error::Gone { .. }) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Get a session with its messages
#[utoipa::path(
    get, path = "/sessions/{id}", tag = "sessions", operation_id = "get_session",
    params(
        ("id" = String, Path, description = "The session"),
        ("include" = Option<String>, Query, description = "`cache`, `discarded`, or both with a comma"),
    ),
    responses((status = 200, description = "The session", body = SessionWhole), ReadErrors)
)]
pub async fn get(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    mut params: StrictQuery,
) -> ApiResult<Response> {
    let principal = caller.authorize_read()?;
    let mut cache = false;
    let mut discarded = false;
    for word in params.one("include")?.iter().flat_map(|words| words.split(',')) {
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
    params.reject_unknown()?;
    let (seq, rendered) = app.tenure.browsing(&principal).render_cached(&principal, &id, view::full_session).await?;
    if !cache && !discarded {
        return Ok(view::json(StatusCode::OK, Some(seq), view::shared_body(rendered)));
    }
    let mut body = rendered.to_string();
    // Boxed: few requests ask for these, and every request contains them.
    if cache {
        let cached = Box::pin(app.tenure.browsing(&principal).cache_entries(&principal, &id)).await?;
        let cached: Vec<_> = cached.into_iter().map(CachedView::from).collect();
        body = view::with_fields(body, &[("cache", &view::to_json(&cached))]);
    }
    if discarded {
        let discarded_messages = Box::pin(app.tenure.browsing(&principal).discarded(&principal, &id)).await?;
        body = view::with_fields(body, &[("discarded", &view::discarded(&discarded_messages))]);
    }
    Ok(view::json(StatusCode::OK, Some(seq), body))
}

/// Change title, tags, model, metadata or status
#[utoipa::path(
    patch, path = "/sessions/{id}", tag = "sessions", operation_id = "update_session",
    params(
        ("id" = String, Path, description = "The session"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` that the session must have (optimistic concurrency)"),
    ),
    request_body(content = SessionPatch),
    responses((status = 200, description = "The updated session", body = SessionView), WriteErrors)
)]
pub async fn patch(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    if_match: IfMatch,
    JsonBody(body): JsonBody<SessionPatch>,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    let SessionPatch { title, tags, model, mut metadata, context, status } = body;
    match context {
        Patch::Keep => {}
        Patch::Clear => drop(metadata.insert("context".to_owned(), Value::Null)),
        Patch::Set(context) => drop(metadata.insert("context".to_owned(), context)),
    }
    sessions::check_workspace(&app, &principal, &metadata).await?;
    let changes = tenure::SessionPatch { title, tags, model, metadata };
    let update = tenure::session::SessionUpdate::from(changes).status(status).if_match(if_match.0);
    let head = app.tenure.update(&principal, &id, update).await;
    Ok(view::session(StatusCode::OK, &head.map_err(|e| if_match.error(e))?))
}

/// Delete a session
///
/// It can be restored until its retention ends, unless `purge=true`. Its transcript is deleted too.
#[utoipa::path(
    delete, path = "/sessions/{id}", tag = "sessions", operation_id = "delete_session",
    params(
        ("id" = String, Path, description = "The session"),
        ("purge" = Option<bool>, Query, description = "Purge it: it cannot be restored"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` that the session must have (optimistic concurrency)"),
    ),
    responses((status = 200, description = "The session was deleted", body = SessionDeleted), UpdateErrors)
)]
pub async fn delete(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    if_match: IfMatch,
    mut params: StrictQuery,
) -> ApiResult<Json<SessionDeleted>> {
    let principal = caller.authorize_write()?;
    let purged = params.parse("purge", "true or false")?.unwrap_or(false);
    params.reject_unknown()?;
    let deletion = if purged { DeletionMode::Purge } else { DeletionMode::Restorable };
    let deleted = sessions::delete(&app, &principal, &id, deletion, if_match.0).await.map_err(|e| if_match.error(e))?;
    if !deleted {
        return Err(tenure::Error::NotFound { session_id: id }.into());
    }
    let session_id = id.to_string();
    Ok(Json(SessionDeleted { id: session_id.clone(), session_id, object: "session.deleted", deleted, purged }))
}

/// Restore an expired or deleted session
#[utoipa::path(
    post, path = "/sessions/{id}/restore", tag = "sessions", operation_id = "restore_session",
    params(
        ("id" = String, Path, description = "The session"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` that the session must have (optimistic concurrency)"),
    ),
    responses((status = 200, description = "The session, active", body = SessionView), UpdateErrors)
)]
pub async fn restore(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    if_match: IfMatch,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    let head = app.tenure.restore(&principal, &id, if_match.0).await.map_err(|e| if_match.error(e))?;
    Ok(view::session(StatusCode::OK, &head))
}
