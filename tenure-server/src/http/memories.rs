//! `/memories` and `/dreams`: long-term memories, and their consolidation by dreams, which promote memories
//! from sessions to users.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult};
use crate::http::extract::{JsonBody, PathParams};
use crate::http::query::StrictQuery;
use crate::http::view::{CreateErrors, ListErrors, LookupErrors, ReadErrors, WriteErrors};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tenure::rules::excerpt;
use tenure::{
    Principal, Seq, SessionId,
    memory::{Dream, MAX_QUESTIONS, Memory, MemoryKind, MemoryTarget, RecallResult},
};
use utoipa::ToSchema;

/// A memory to create.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewMemory {
    /// The text: one statement.
    text: String,
    /// `fact` (default: shown to the model when it is relevant) or `preference` (shown in every turn). If omitted, an
    /// existing memory with this text keeps its kind.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    kind: Option<MemoryKind>,
    /// The session it comes from; the session's assistant determines the scope.
    #[serde(default)]
    session_id: Option<String>,
    /// The assistant that determines the scope, if no session is given. Without either, the memory belongs to the user.
    #[serde(default)]
    assistant_id: Option<String>,
    /// The messages of the session that it comes from, by their `seq`.
    #[serde(default)]
    #[schema(value_type = Option<Vec<u64>>)]
    messages: Option<Vec<Seq>>,
    /// Arbitrary metadata.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    metadata: Option<Map<String, Value>>,
    /// When it was said or became true, RFC 3339; default: now. Memories are ordered by it, and a newer one supersedes
    /// those that it updates.
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime)]
    timestamp: Option<Timestamp>,
    /// The ids of older memories that it supersedes: they are kept and found after it, but no longer injected into
    /// prompts. Those that it updates by its words ("my new address is …") are found without this.
    #[serde(default)]
    supersedes: Option<Vec<String>>,
}

/// A memory.
#[derive(Debug, Serialize, ToSchema)]
pub struct MemoryView {
    /// `memory`.
    object: &'static str,
    /// The memory: `id`, `text`, `kind`, `scope`, its owner, its `sources`, times and number of uses.
    #[serde(flatten)]
    #[schema(value_type = Object)]
    memory: Memory,
}

/// A page of memories.
#[derive(Debug, Serialize, ToSchema)]
pub struct MemoryList {
    /// `list`.
    object: &'static str,
    /// The memories, ordered by id.
    data: Vec<MemoryView>,
    /// The cursor of the next page; `null` on the last one.
    next_cursor: Option<String>,
}

/// The result of a recall.
#[derive(Debug, Serialize, ToSchema)]
pub struct RecallView {
    /// `list`.
    object: &'static str,
    /// The memories, best first, each with its `score`, the `coverage` of the question's words, and the `similarity` of
    /// its meaning if it has a vector.
    #[schema(value_type = Vec<Object>)]
    data: Vec<tenure::memory::RecallHit>,
    /// `hybrid`, or `full_text` if similarity search was not available.
    mode: &'static str,
    /// Why similarity search was not available.
    note: Option<String>,
}

/// The result of deleting a memory.
#[derive(Debug, Serialize, ToSchema)]
pub struct MemoryForgotten {
    id: String,
    object: &'static str,
    deleted: bool,
}

/// Parameters of a dream (memory consolidation).
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewDream {
    /// Reports what would be promoted, without changing anything.
    #[serde(default)]
    dry_run: bool,
}

/// The result of a dream.
#[derive(Debug, Serialize, ToSchema)]
pub struct DreamView {
    /// `dream`.
    object: &'static str,
    /// The dream: `id`, `at`, `dry_run`, the number of `sessions` it scanned, and which memories were `promoted`, with the reason.
    #[serde(flatten)]
    #[schema(value_type = Object)]
    dream: Dream,
}

/// Dreams that promoted a memory.
#[derive(Debug, Serialize, ToSchema)]
pub struct DreamList {
    /// `list`.
    object: &'static str,
    /// The dreams, newest first.
    data: Vec<DreamView>,
    /// Always `null`: the list is complete.
    next_cursor: Option<String>,
}

/// The result of undoing a dream.
#[derive(Debug, Serialize, ToSchema)]
pub struct DreamUndone {
    id: String,
    object: &'static str,
    /// The number of memories that were retracted.
    undone: usize,
}

fn view(memory: Memory) -> MemoryView {
    MemoryView { object: "memory", memory }
}

fn memory_target(session: Option<String>, assistant: Option<String>) -> ApiResult<MemoryTarget> {
    match (session, assistant) {
        (Some(_), Some(_)) => Err(ApiError::invalid(
            "assistant_id",
            "use `session_id` or `assistant_id`, not both: a session determines its assistant",
        )),
        (Some(id), None) => Ok(MemoryTarget::Session(SessionId::new(id)?)),
        (None, Some(name)) => Ok(MemoryTarget::Assistant(name)),
        (None, None) => Ok(MemoryTarget::Own),
    }
}

/// Consumes the query parameters that select the owner of the memories.
fn target_from_query(params: &mut StrictQuery) -> ApiResult<MemoryTarget> {
    memory_target(params.one("session_id")?, params.name("assistant_id")?)
}

/// Add a memory
///
/// A memory with the same text is deduplicated: it is refreshed and gets one more source. Older memories that it
/// updates are superseded by it.
#[utoipa::path(
    post, path = "/memories", tag = "memories", operation_id = "create_memory",
    request_body(content = NewMemory),
    responses((status = 201, description = "The memory was stored", body = MemoryView), WriteErrors)
)]
pub async fn create(
    State(app): State<AppState>,
    caller: Caller,
    JsonBody(body): JsonBody<NewMemory>,
) -> ApiResult<(StatusCode, Json<MemoryView>)> {
    let principal = caller.authorize_write()?;
    let target = memory_target(body.session_id, body.assistant_id)?;
    let messages = body.messages.unwrap_or_default();
    let metadata = body.metadata.unwrap_or_default();
    let new = tenure::memory::NewMemory {
        text: body.text,
        kind: body.kind,
        messages,
        metadata,
        timestamp: body.timestamp,
        supersedes: body.supersedes.unwrap_or_default(),
    };
    let memory = app.tenure.remember(&principal, &target, new).await?;
    Ok((StatusCode::CREATED, Json(view(memory))))
}

/// List memories
#[utoipa::path(
    get, path = "/memories", tag = "memories", operation_id = "list_memories",
    params(
        ("session_id" = Option<String>, Query, description = "The memories of this session, in its assistant's scope"),
        ("assistant_id" = Option<String>, Query, description = "The memories of this assistant; without session and assistant, the user's own"),
        ("kind" = Option<String>, Query, description = "Only memories of this kind: `fact` or `preference`"),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 100, description = "Page size; default 20"),
        ("cursor" = Option<String>, Query, description = "`next_cursor` of the previous page"),
    ),
    responses((status = 200, description = "A page", body = MemoryList), ReadErrors)
)]
pub async fn list(State(app): State<AppState>, caller: Caller, mut params: StrictQuery) -> ApiResult<Json<MemoryList>> {
    let principal = caller.authorize_read()?;
    let target = target_from_query(&mut params)?;
    let limit = params.limit(app.config.limits.max_page)?;
    let cursor = params.one("cursor")?;
    let kind = match params.one("kind")?.as_deref() {
        None => None,
        Some("fact") => Some(MemoryKind::Fact),
        Some("preference") => Some(MemoryKind::Preference),
        Some(other) => {
            let message = format!("{other} is not fact or preference", other = excerpt(other));
            return Err(ApiError::invalid("kind", message));
        }
    };
    params.reject_unknown()?;
    let browsing = app.tenure.browsing(&principal);
    let mut memories = browsing.memory_list(&principal, &target, kind, cursor.as_deref(), limit + 1).await?;
    let has_more = memories.len() > limit;
    memories.truncate(limit);
    let next_cursor = memories.last().filter(|_| has_more).map(|m| m.id.clone());
    Ok(Json(MemoryList { object: "list", data: memories.into_iter().map(view).collect(), next_cursor }))
}

/// Recall memories
///
/// By words, and by similarity if an embedder is configured and available. A memory that a newer one supersedes comes
/// after it.
#[utoipa::path(
    get, path = "/memories/search", tag = "memories", operation_id = "search_memories",
    params(
        ("q" = String, Query, description = "The question. May be repeated, at most 8 times: a memory is ranked by the question that it matches best"),
        ("session_id" = Option<String>, Query, description = "The memories of this session, in its assistant's scope"),
        ("assistant_id" = Option<String>, Query, description = "The memories of this assistant; without session and assistant, the user's own"),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 100, description = "Page size; default 20"),
    ),
    responses((status = 200, description = "The memories, best first", body = RecallView), ReadErrors)
)]
pub async fn search(
    State(app): State<AppState>,
    caller: Caller,
    mut params: StrictQuery,
) -> ApiResult<Json<RecallView>> {
    let principal = caller.authorize_read()?;
    let target = target_from_query(&mut params)?;
    let limit = params.limit(app.config.limits.max_page)?;
    let questions = params.all("q");
    if questions.is_empty() || questions.iter().any(|q| q.trim().is_empty()) {
        return Err(ApiError::invalid("q", "`q` is missing or empty; send the search terms as `?q=…`"));
    }
    if questions.len() > MAX_QUESTIONS {
        let message = format!("`q` is given {} times; at most {MAX_QUESTIONS} questions are searched", questions.len());
        return Err(ApiError::invalid("q", message));
    }
    params.reject_unknown()?;
    let questions: Vec<&str> = questions.iter().map(String::as_str).collect();
    let RecallResult { memories, by_meaning, note, .. } =
        app.tenure.browsing(&principal).recall_any(&principal, &target, &questions, limit).await?;
    let mode = if by_meaning { "hybrid" } else { "full_text" };
    Ok(Json(RecallView { object: "list", data: memories, mode, note }))
}

/// Get a memory
#[utoipa::path(
    get, path = "/memories/{id}", tag = "memories", operation_id = "get_memory",
    params(
        ("id" = String, Path, description = "The memory"),
        ("session_id" = Option<String>, Query, description = "Among the memories of this session"),
        ("assistant_id" = Option<String>, Query, description = "Among the memories of this assistant; without session and assistant, the user's own"),
    ),
    responses((status = 200, description = "The memory", body = MemoryView), ReadErrors)
)]
pub async fn get(
    State(app): State<AppState>,
    caller: Caller,
    path: PathParams,
    mut params: StrictQuery,
) -> ApiResult<Json<MemoryView>> {
    let principal = caller.authorize_read()?;
    let id = path.get("id")?;
    let target = target_from_query(&mut params)?;
    params.reject_unknown()?;
    match app.tenure.browsing(&principal).memory(&principal, &target, id).await? {
        Some(memory) => Ok(Json(view(memory))),
        None => Err(not_found(id)),
    }
}

/// Delete a memory
#[utoipa::path(
    delete, path = "/memories/{id}", tag = "memories", operation_id = "delete_memory",
    params(
        ("id" = String, Path, description = "The memory"),
        ("session_id" = Option<String>, Query, description = "Among the memories of this session"),
        ("assistant_id" = Option<String>, Query, description = "Among the memories of this assistant; without session and assistant, the user's own"),
    ),
    responses((status = 200, description = "The memory was deleted", body = MemoryForgotten), WriteErrors)
)]
pub async fn delete(
    State(app): State<AppState>,
    caller: Caller,
    path: PathParams,
    mut params: StrictQuery,
) -> ApiResult<Json<MemoryForgotten>> {
    let principal = caller.authorize_write()?;
    let id = path.get("id")?;
    let target = target_from_query(&mut params)?;
    params.reject_unknown()?;
    if !app.tenure.forget_memory(&principal, &target, id).await? {
        return Err(not_found(id));
    }
    Ok(Json(MemoryForgotten { id: id.to_owned(), object: "memory.deleted", deleted: true }))
}

fn not_found(id: &str) -> ApiError {
    ApiError::not_found(format!("no memory {id}; GET /memories lists them", id = excerpt(id)))
}

/// Run a dream
///
/// Promotes memories of sessions that were recalled often, for different questions and on different days, to memories of their users; the
/// thresholds are configured under `dreams`. Needs the right `admin`.
#[utoipa::path(
    post, path = "/dreams", tag = "memories", operation_id = "create_dream",
    request_body(content = NewDream),
    responses((status = 200, description = "The promoted memories, with the reasons", body = DreamView), CreateErrors)
)]
pub async fn dream(
    State(app): State<AppState>,
    caller: Caller,
    JsonBody(body): JsonBody<NewDream>,
) -> ApiResult<Json<DreamView>> {
    let principal = caller.authorize_tenant_admin()?;
    let dream = app.tenure.dream(&principal, &app.config.dreams.rules(), body.dry_run).await?;
    Ok(Json(DreamView { object: "dream", dream }))
}

/// List dreams
///
/// Only those that promoted a memory. Needs the right `admin`.
#[utoipa::path(
    get, path = "/dreams", tag = "memories", operation_id = "list_dreams",
    responses((status = 200, description = "The dreams, newest first", body = DreamList), ListErrors)
)]
pub async fn dreams(State(app): State<AppState>, caller: Caller) -> ApiResult<Json<DreamList>> {
    let principal: Principal = caller.authorize_tenant_admin()?;
    let data =
        app.tenure.dreams(&principal).await?.into_iter().map(|dream| DreamView { object: "dream", dream }).collect();
    Ok(Json(DreamList { object: "list", data, next_cursor: None }))
}

/// Undo a dream
///
/// Retracts the memories it promoted, except those that were stored again since. Needs the right `admin`.
#[utoipa::path(
    delete, path = "/dreams/{id}", tag = "memories", operation_id = "undo_dream",
    params(("id" = String, Path, description = "The dream")),
    responses((status = 200, description = "The dream was undone", body = DreamUndone), LookupErrors)
)]
pub async fn undo(State(app): State<AppState>, caller: Caller, path: PathParams) -> ApiResult<Json<DreamUndone>> {
    let principal = caller.authorize_tenant_admin()?;
    let id = path.get("id")?;
    match app.tenure.undo_dream(&principal, id).await? {
        Some(undone) => Ok(Json(DreamUndone { id: id.to_owned(), object: "dream.undone", undone })),
        None => Err(ApiError::not_found(format!("there is no dream {id}; GET /dreams lists them", id = excerpt(id)))),
    }
}
