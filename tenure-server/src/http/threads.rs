//! `/threads/{id}/session`: the session that belongs to a chat thread of another application.

use crate::app::{App, AppState};
use crate::auth::Caller;
use crate::error::ApiResult;
use crate::http::extract::{JsonBody, PathParams};
use crate::http::sessions::{NewSession, create_session};
use crate::http::view::{self, CreateErrors, SessionView};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value};
use tenure::{
    Principal,
    log::Head,
    session::{OwnerFilter, SessionQuery, Status},
};
use utoipa::ToSchema;

/// The session to look up, or to create if there is none.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ThreadBody {
    /// The assistant it belongs to. Sessions of other assistants in the same thread are not considered.
    #[serde(default)]
    assistant_id: Option<String>,
    /// Whether to create a new session in any case; by default the assistant's `sessions.fresh`.
    #[serde(default)]
    fresh: Option<bool>,
    /// The model of a new session.
    #[serde(default)]
    model: Option<String>,
    /// The title of a new session.
    #[serde(default)]
    title: Option<String>,
    /// The tags of a new session.
    #[serde(default)]
    tags: Option<Vec<String>>,
    /// The metadata of a new session.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    metadata: Option<Map<String, Value>>,
}

/// Get or create the session of a chat thread
///
/// Returns the most recently active session of the thread (200), or creates one if it has no active or paused session, or if each
/// interaction with the assistant starts a new session (201).
#[utoipa::path(
    post, path = "/threads/{id}/session", tag = "threads", operation_id = "thread_session",
    params(("id" = String, Path, description = "The thread's id in the chat application")),
    request_body(content = ThreadBody),
    responses(
        (status = 200, description = "The thread's live session", body = SessionView),
        (status = 201, description = "A new session was created", body = SessionView),
        CreateErrors,
    )
)]
pub async fn session(
    State(app): State<AppState>,
    caller: Caller,
    path: PathParams,
    JsonBody(body): JsonBody<ThreadBody>,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    let thread = path.get("id")?;
    let assistant = match &body.assistant_id {
        Some(name) => app.tenure.assistant(&principal, name).await?,
        None => None,
    };
    if body.fresh.unwrap_or(assistant.is_some_and(|a| a.sessions.fresh)) {
        let created = create_session(&app, &principal, new_session(thread, &body, None)).await?;
        return Ok(view::session(StatusCode::CREATED, created.head()));
    }
    if let Some(head) = newest(&app, &principal, thread, &body, &LIVE).await? {
        return Ok(view::session(StatusCode::OK, &head));
    }
    // Concurrent requests must get the same session. Each derives the same id from the user, thread, assistant
    // and the thread's last session, so only one creation succeeds.
    let previous = newest(&app, &principal, thread, &body, &ANY).await?;
    let id = next_id(&principal, thread, body.assistant_id.as_deref(), previous.as_ref());
    match create_session(&app, &principal, new_session(thread, &body, Some(id))).await {
        Err(e) if e.code() == "exists" => {
            if let Some(head) = newest(&app, &principal, thread, &body, &LIVE).await? {
                return Ok(view::session(StatusCode::OK, &head));
            }
            let created = create_session(&app, &principal, new_session(thread, &body, None)).await?;
            Ok(view::session(StatusCode::CREATED, created.head()))
        }
        created => Ok(view::session(StatusCode::CREATED, created?.head())),
    }
}

const LIVE: [Status; 2] = [Status::Active, Status::Paused];
const ANY: [Status; 4] = [Status::Active, Status::Paused, Status::Expired, Status::Deleted];

fn new_session(thread: &str, body: &ThreadBody, id: Option<String>) -> NewSession {
    let ThreadBody { assistant_id, model, title, tags, metadata, .. } = body.clone();
    NewSession { id, assistant_id, thread_id: Some(thread.to_owned()), model, title, tags, metadata, context: None }
}

/// The most recently active session of the thread with one of the given statuses. Sessions that have expired
/// since the last sweep do not count as live.
async fn newest(
    app: &App,
    principal: &Principal,
    thread: &str,
    body: &ThreadBody,
    status: &[Status],
) -> ApiResult<Option<Head>> {
    let mut query = SessionQuery::new(
        OwnerFilter::User(principal.tenant.clone(), principal.user.clone()),
        app.config.limits.max_page.min(20),
    );
    query.thread = Some(thread.to_owned());
    query.assistant = body.assistant_id.clone();
    query.status = status.to_vec();
    loop {
        let page = app.tenure.list(principal, query.clone()).await?;
        match (page.heads.into_iter().next(), page.next) {
            (Some(head), _) => return Ok(Some(head)),
            (None, None) => return Ok(None),
            (None, next) => query.cursor = next,
        }
    }
}

fn next_id(principal: &Principal, thread: &str, assistant: Option<&str>, previous: Option<&Head>) -> String {
    let previous = previous.map_or("", |h| h.info.session_id.as_str());
    let mut hash = blake3::Hasher::new();
    for part in [principal.user.as_str(), thread, assistant.unwrap_or_default(), previous] {
        hash.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    format!("thread_{}", &hash.finalize().to_hex()[..32])
}
