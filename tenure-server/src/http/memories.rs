//! `/memories` and `/dreams`: long-term memories, and their consolidation by dreams, which promote memories
//! from sessions to users.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult};
use crate::http::extract::{JsonBody, PathParams};
use crate::http::query::StrictQuery;
use crate::http::view::{Asking, Finding, Making, Reading, Writing};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tenure::excerpt;
use tenure::{Dream, Memory, MemoryTarget, Principal, RecallResult, Seq, SessionId};
use utoipa::ToSchema;

/// Something to remember.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewMemory {
    /// The words: one fact.
    text: String,
    /// The session it comes from; its assistant says who shares it.
    #[serde(default)]
    session_id: Option<String>,
    /// The assistant that says who shares it, if no session is named. Neither: it is the user's.
    #[serde(default)]
    assistant_id: Option<String>,
    /// The messages of the session that it comes from, by their `seq`.
    #[serde(default)]
    #[schema(value_type = Option<Vec<u64>>)]
    messages: Option<Vec<Seq>>,
    /// Anything else.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    metadata: Option<Map<String, Value>>,
}

/// Something that is remembered.
#[derive(Debug, Serialize, ToSchema)]
pub struct MemoryView {
    /// `memory`.
    object: &'static str,
    /// The memory: `id`, `text`, `scope`, whose it is, its `sources`, times and uses.
    #[serde(flatten)]
    #[schema(value_type = Object)]
    memory: Memory,
}

/// A page of memories.
#[derive(Debug, Serialize, ToSchema)]
pub struct MemoryList {
    /// `list`.
    object: &'static str,
    /// By their ids.
    data: Vec<MemoryView>,
    /// Where the next page begins, if there is one.
    next_cursor: Option<String>,
}

/// What was recalled.
#[derive(Debug, Serialize, ToSchema)]
pub struct RecallView {
    /// `list`.
    object: &'static str,
    /// The memories, the best first, each with its `score`, and its `similarity` if it was found by meaning.
    #[schema(value_type = Vec<Object>)]
    data: Vec<tenure::RecallHit>,
    /// `hybrid`, or `full_text` if they were looked for by their words only.
    mode: &'static str,
    /// Why only by their words.
    note: Option<String>,
}

/// What became of a memory.
#[derive(Debug, Serialize, ToSchema)]
pub struct MemoryForgotten {
    id: String,
    object: &'static str,
    deleted: bool,
}

/// How to dream.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewDream {
    /// Only says what would be promoted.
    #[serde(default)]
    dry_run: bool,
}

/// What a dream did.
#[derive(Debug, Serialize, ToSchema)]
pub struct DreamView {
    /// `dream`.
    object: &'static str,
    /// The dream: `id`, `at`, `dry_run`, how many `sessions` it looked at, and what was `promoted` and why.
    #[serde(flatten)]
    #[schema(value_type = Object)]
    dream: Dream,
}

/// Dreams that promoted something.
#[derive(Debug, Serialize, ToSchema)]
pub struct DreamList {
    /// `list`.
    object: &'static str,
    /// The newest first.
    data: Vec<DreamView>,
    /// Always `null`: they come all at once.
    next_cursor: Option<String>,
}

/// What was taken back.
#[derive(Debug, Serialize, ToSchema)]
pub struct DreamUndone {
    id: String,
    object: &'static str,
    /// How many memories.
    undone: usize,
}

fn view(memory: Memory) -> MemoryView {
    MemoryView { object: "memory", memory }
}

fn mind(session: Option<String>, assistant: Option<String>) -> ApiResult<MemoryTarget> {
    match (session, assistant) {
        (Some(_), Some(_)) => {
            Err(ApiError::invalid("assistant_id", "name a session or an assistant; a session has its assistant"))
        }
        (Some(id), None) => Ok(MemoryTarget::Session(SessionId::new(id)?)),
        (None, Some(name)) => Ok(MemoryTarget::Assistant(name)),
        (None, None) => Ok(MemoryTarget::Own),
    }
}

/// Consumes the query parameters that select whose memories are meant.
fn meant(pairs: &mut StrictQuery) -> ApiResult<MemoryTarget> {
    mind(pairs.one("session_id")?, pairs.name("assistant_id")?)
}

/// Remember something
///
/// The same words again are one memory, said now, with one more source.
#[utoipa::path(
    post, path = "/memories", tag = "memories", operation_id = "create_memory",
    request_body(content = NewMemory),
    responses((status = 201, description = "It is remembered", body = MemoryView), Writing)
)]
pub async fn create(
    State(app): State<AppState>,
    caller: Caller,
    JsonBody(body): JsonBody<NewMemory>,
) -> ApiResult<(StatusCode, Json<MemoryView>)> {
    let who = caller.writes()?;
    let mind = mind(body.session_id, body.assistant_id)?;
    let (messages, metadata) = (body.messages.unwrap_or_default(), body.metadata.unwrap_or_default());
    let memory = app.tenure.remember(&who, &mind, tenure::NewMemory { text: body.text, messages, metadata }).await?;
    Ok((StatusCode::CREATED, Json(view(memory))))
}

/// List memories
#[utoipa::path(
    get, path = "/memories", tag = "memories", operation_id = "list_memories",
    params(
        ("session_id" = Option<String>, Query, description = "Those of this session, as its assistant shares them"),
        ("assistant_id" = Option<String>, Query, description = "Those of this assistant; neither: the user's own"),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 100, description = "At most so many; 20 if not given"),
        ("cursor" = Option<String>, Query, description = "The `next_cursor` of the page before"),
    ),
    responses((status = 200, description = "A page", body = MemoryList), Reading)
)]
pub async fn list(State(app): State<AppState>, caller: Caller, mut pairs: StrictQuery) -> ApiResult<Json<MemoryList>> {
    let who = caller.reads()?;
    let (mind, limit) = (meant(&mut pairs)?, pairs.limit(app.config.limits.max_page)?);
    let cursor = pairs.one("cursor")?;
    pairs.end()?;
    let mut found = app.tenure.browsing(&who).memory_list(&who, &mind, cursor.as_deref(), limit + 1).await?;
    let more = found.len() > limit;
    found.truncate(limit);
    let next_cursor = found.last().filter(|_| more).map(|m| m.id.clone());
    Ok(Json(MemoryList { object: "list", data: found.into_iter().map(view).collect(), next_cursor }))
}

/// Recall memories
///
/// By their words, and by their meaning if an embedder is configured and can be reached.
#[utoipa::path(
    get, path = "/memories/search", tag = "memories", operation_id = "search_memories",
    params(
        ("q" = String, Query, description = "The question"),
        ("session_id" = Option<String>, Query, description = "Those of this session, as its assistant shares them"),
        ("assistant_id" = Option<String>, Query, description = "Those of this assistant; neither: the user's own"),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 100, description = "At most so many; 20 if not given"),
    ),
    responses((status = 200, description = "The best first", body = RecallView), Reading)
)]
pub async fn search(
    State(app): State<AppState>,
    caller: Caller,
    mut pairs: StrictQuery,
) -> ApiResult<Json<RecallView>> {
    let who = caller.reads()?;
    let (mind, limit) = (meant(&mut pairs)?, pairs.limit(app.config.limits.max_page)?);
    let question = pairs.one("q")?.filter(|q| !q.trim().is_empty());
    let question = question.ok_or_else(|| ApiError::invalid("q", "say what to look for: `?q=…`"))?;
    pairs.end()?;
    let RecallResult { memories, by_meaning, note } =
        app.tenure.browsing(&who).recall(&who, &mind, &question, limit).await?;
    let mode = if by_meaning { "hybrid" } else { "full_text" };
    Ok(Json(RecallView { object: "list", data: memories, mode, note }))
}

/// Look at a memory
#[utoipa::path(
    get, path = "/memories/{id}", tag = "memories", operation_id = "get_memory",
    params(
        ("id" = String, Path, description = "The memory"),
        ("session_id" = Option<String>, Query, description = "Among those of this session"),
        ("assistant_id" = Option<String>, Query, description = "Among those of this assistant; neither: the user's own"),
    ),
    responses((status = 200, description = "The memory", body = MemoryView), Reading)
)]
pub async fn get(
    State(app): State<AppState>,
    caller: Caller,
    path: PathParams,
    mut pairs: StrictQuery,
) -> ApiResult<Json<MemoryView>> {
    let (who, id) = (caller.reads()?, path.get("id")?);
    let mind = meant(&mut pairs)?;
    pairs.end()?;
    match app.tenure.browsing(&who).memory(&who, &mind, id).await? {
        Some(memory) => Ok(Json(view(memory))),
        None => Err(not_there(id)),
    }
}

/// Forget a memory
#[utoipa::path(
    delete, path = "/memories/{id}", tag = "memories", operation_id = "delete_memory",
    params(
        ("id" = String, Path, description = "The memory"),
        ("session_id" = Option<String>, Query, description = "Among those of this session"),
        ("assistant_id" = Option<String>, Query, description = "Among those of this assistant; neither: the user's own"),
    ),
    responses((status = 200, description = "It is forgotten", body = MemoryForgotten), Writing)
)]
pub async fn delete(
    State(app): State<AppState>,
    caller: Caller,
    path: PathParams,
    mut pairs: StrictQuery,
) -> ApiResult<Json<MemoryForgotten>> {
    let (who, id) = (caller.writes()?, path.get("id")?);
    let mind = meant(&mut pairs)?;
    pairs.end()?;
    match app.tenure.forget_memory(&who, &mind, id).await? {
        true => Ok(Json(MemoryForgotten { id: id.to_owned(), object: "memory.deleted", deleted: true })),
        false => Err(not_there(id)),
    }
}

fn not_there(id: &str) -> ApiError {
    ApiError::not_found(format!("there is no memory {id} there; GET /memories lists them", id = excerpt(id)))
}

/// Dream
///
/// Promotes what sessions recalled often, for different questions, on different days, to their users; the thresholds are in the
/// configuration. For administrators.
#[utoipa::path(
    post, path = "/dreams", tag = "memories", operation_id = "create_dream",
    request_body(content = NewDream),
    responses((status = 200, description = "What was promoted, and why", body = DreamView), Making)
)]
pub async fn dream(
    State(app): State<AppState>,
    caller: Caller,
    JsonBody(body): JsonBody<NewDream>,
) -> ApiResult<Json<DreamView>> {
    let who = caller.administers_tenant()?;
    let dream = app.tenure.dream(&who, &app.config.dreams.rules(), body.dry_run).await?;
    Ok(Json(DreamView { object: "dream", dream }))
}

/// List dreams
///
/// Those that promoted something. For administrators.
#[utoipa::path(
    get, path = "/dreams", tag = "memories", operation_id = "list_dreams",
    responses((status = 200, description = "The newest first", body = DreamList), Asking)
)]
pub async fn dreams(State(app): State<AppState>, caller: Caller) -> ApiResult<Json<DreamList>> {
    let who: Principal = caller.administers_tenant()?;
    let data = app.tenure.dreams(&who).await?.into_iter().map(|dream| DreamView { object: "dream", dream }).collect();
    Ok(Json(DreamList { object: "list", data, next_cursor: None }))
}

/// Take back what a dream promoted
///
/// What was said again since then stays. For administrators.
#[utoipa::path(
    delete, path = "/dreams/{id}", tag = "memories", operation_id = "undo_dream",
    params(("id" = String, Path, description = "The dream")),
    responses((status = 200, description = "It is taken back", body = DreamUndone), Finding)
)]
pub async fn undo(State(app): State<AppState>, caller: Caller, path: PathParams) -> ApiResult<Json<DreamUndone>> {
    let (who, id) = (caller.administers_tenant()?, path.get("id")?);
    match app.tenure.undo_dream(&who, id).await? {
        Some(undone) => Ok(Json(DreamUndone { id: id.to_owned(), object: "dream.undone", undone })),
        None => Err(ApiError::not_found(format!("there is no dream {id}; GET /dreams lists them", id = excerpt(id)))),
    }
}
