//! `/assistants`: the assistants that sessions can belong to. Those declared in `tenure.yaml` apply to every
//! tenant and cannot be changed through the API.

use crate::app::{App, AppState};
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult};
use crate::http::extract::{JsonBytes, PathParams, parse, parse_object};
use crate::http::view::{CreateErrors, ListErrors, LookupErrors, UpdateErrors};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
use serde_json::{Map, Value};
use tenure::{Assistant, session::RawObject};
use utoipa::ToSchema;

/// An assistant to create. Omitted fields have the server's defaults. Durations are written `90s`, `30m`, `2h`, `7d` or `never`.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "it describes the body; the library reads it")]
pub struct AssistantBody {
    /// Its name, which is also its id.
    name: String,
    /// The model it uses.
    model: Option<String>,
    /// The system instructions.
    instructions: Option<String>,
    /// How long its sessions last.
    sessions: Option<LifetimeBody>,
    /// Limits of the prompt.
    short_term: Option<ShortTermBody>,
    /// The tool result cache of its sessions.
    cache: Option<CacheBody>,
    /// How often its runs may call models.
    rate_limit: Option<RateLimitBody>,
    /// Arbitrary metadata.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Map<String, Value>>,
}

/// How long an assistant's sessions last.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "it describes the body; the library reads it")]
pub struct LifetimeBody {
    /// Idle time after which a session expires.
    ttl: Option<String>,
    /// Time after which an expired or deleted session is purged.
    retention: Option<String>,
    /// Whether each interaction of a thread gets a new session.
    fresh: Option<bool>,
}

/// How often the runs of an assistant may call models, on each node.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "it describes the body; the library reads it")]
pub struct RateLimitBody {
    /// Maximum number of model requests per minute.
    requests_per_minute: Option<u64>,
    /// Maximum number of input and output tokens per minute.
    tokens_per_minute: Option<u64>,
}

/// Limits of the prompt of an assistant's sessions.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "it describes the body; the library reads it")]
pub struct ShortTermBody {
    /// Maximum number of turns in the prompt; 0 means unlimited.
    max_history_turns: Option<usize>,
    /// Maximum estimated number of tokens in the prompt; 0 means unlimited.
    max_tokens: Option<usize>,
    /// Whether older turns are summarized: `false` (no), `true` (by the session's model), or the name of the model to use.
    #[schema(value_type = Option<Value>)]
    compact: Option<Value>,
}

/// The tool result cache of an assistant's sessions.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "it describes the body; the library reads it")]
pub struct CacheBody {
    /// How long a result stays cached.
    ttl: Option<String>,
    /// Maximum number of cached results per session.
    max_entries: Option<usize>,
}

/// An assistant.
#[derive(Debug, Serialize, ToSchema)]
pub struct AssistantView {
    /// Its name.
    id: String,
    /// `assistant`.
    object: &'static str,
    /// Whether it is declared in the configuration, and therefore cannot be changed through the API.
    declared: bool,
    /// Its settings.
    #[serde(flatten)]
    #[schema(value_type = AssistantBody)]
    assistant: Assistant,
}

/// All assistants, by name.
#[derive(Debug, Serialize, ToSchema)]
pub struct AssistantList {
    object: &'static str,
    data: Vec<AssistantView>,
    /// Always `null`: the list is complete.
    next_cursor: Option<String>,
}

/// The result of deleting an assistant.
#[derive(Debug, Serialize, ToSchema)]
pub struct AssistantDeleted {
    id: String,
    object: &'static str,
    deleted: bool,
}

fn view(app: &App, mut assistant: Assistant) -> AssistantView {
    // Tool declarations are removed: they contain commands, addresses and headers, which only the operator may
    // see (D-059).
    assistant.tools.clear();
    let id = assistant.name.clone();
    let declared = app.tenure.is_declared(&assistant.name);
    AssistantView { id, object: "assistant", declared, assistant }
}

fn not_found(name: &str) -> ApiError {
    ApiError::not_found(format!("there is no assistant {name:?}; GET /assistants lists them"))
}

fn refuse_declared(app: &App, name: &str) -> ApiResult<()> {
    if app.tenure.is_declared(name) {
        let message = format!("assistant {name:?} is declared in the server's configuration; change it there");
        return Err(ApiError::new(StatusCode::CONFLICT, "declared", message).with_param("name"));
    }
    Ok(())
}

/// List assistants
#[utoipa::path(
    get, path = "/assistants", tag = "assistants", operation_id = "list_assistants",
    responses((status = 200, description = "All assistants", body = AssistantList), ListErrors)
)]
pub async fn list(State(app): State<AppState>, caller: Caller) -> ApiResult<Json<AssistantList>> {
    let all = app.tenure.assistants(&caller.authorize_read()?).await?;
    let data = all.iter().map(|a| view(&app, Assistant::clone(a))).collect();
    Ok(Json(AssistantList { object: "list", data, next_cursor: None }))
}

/// Create an assistant
///
/// Needs the right `admin`.
#[utoipa::path(
    post, path = "/assistants", tag = "assistants", operation_id = "create_assistant",
    request_body(content = AssistantBody),
    responses((status = 201, description = "Created", body = AssistantView), CreateErrors)
)]
pub async fn create(
    State(app): State<AppState>,
    caller: Caller,
    JsonBytes(body): JsonBytes,
) -> ApiResult<(StatusCode, Json<AssistantView>)> {
    let principal = caller.authorize_tenant_admin()?;
    let assistant: Assistant = parse_object(&body)?;
    refuse_declared(&app, &assistant.name)?;
    if !app.tenure.create_assistant(&principal, assistant.clone()).await? {
        let message = format!("assistant {:?} exists already; PUT replaces it", assistant.name);
        return Err(ApiError::new(StatusCode::CONFLICT, "exists", message).with_param("name"));
    }
    Ok((StatusCode::CREATED, Json(view(&app, assistant))))
}

/// Get an assistant
#[utoipa::path(
    get, path = "/assistants/{name}", tag = "assistants", operation_id = "get_assistant",
    params(("name" = String, Path, description = "The assistant")),
    responses((status = 200, description = "The assistant", body = AssistantView), LookupErrors)
)]
pub async fn get(State(app): State<AppState>, caller: Caller, path: PathParams) -> ApiResult<Json<AssistantView>> {
    let principal = caller.authorize_read()?;
    let name = path.get("name")?;
    match app.tenure.assistant(&principal, name).await? {
        Some(assistant) => Ok(Json(view(&app, Assistant::clone(&assistant)))),
        None => Err(not_found(name)),
    }
}

/// Create or replace an assistant
///
/// The new settings apply to its existing sessions, too. Needs the right `admin`. The body's `name` can be omitted.
#[utoipa::path(
    put, path = "/assistants/{name}", tag = "assistants", operation_id = "put_assistant",
    params(("name" = String, Path, description = "The assistant")),
    request_body(content = AssistantBody),
    responses(
        (status = 200, description = "The assistant was replaced", body = AssistantView),
        (status = 201, description = "The assistant was created", body = AssistantView),
        CreateErrors,
    )
)]
pub async fn put(
    State(app): State<AppState>,
    caller: Caller,
    path: PathParams,
    JsonBytes(body): JsonBytes,
) -> ApiResult<(StatusCode, Json<AssistantView>)> {
    let principal = caller.authorize_tenant_admin()?;
    let name = path.get("name")?;
    let mut fields: RawObject = parse(&body)?;
    if fields.get("name").is_none() {
        fields.set("name", name);
    }
    let assistant: Assistant = parse(fields.to_string().as_bytes())?;
    if assistant.name != name {
        return Err(ApiError::invalid(
            "name",
            format!("`name` must equal the name in the path, {name:?}, or be omitted"),
        ));
    }
    refuse_declared(&app, name)?;
    let new = app.tenure.put_assistant(&principal, assistant.clone()).await?;
    let status = if new { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(view(&app, assistant))))
}

/// Delete an assistant
///
/// Its sessions remain, and are retained like sessions without an assistant. Needs the right `admin`.
#[utoipa::path(
    delete, path = "/assistants/{name}", tag = "assistants", operation_id = "delete_assistant",
    params(("name" = String, Path, description = "The assistant")),
    responses((status = 200, description = "The assistant was deleted", body = AssistantDeleted), UpdateErrors)
)]
pub async fn delete(
    State(app): State<AppState>,
    caller: Caller,
    path: PathParams,
) -> ApiResult<Json<AssistantDeleted>> {
    let principal = caller.authorize_tenant_admin()?;
    let name = path.get("name")?;
    refuse_declared(&app, name)?;
    if !app.tenure.remove_assistant(&principal, name).await? {
        return Err(not_found(name));
    }
    Ok(Json(AssistantDeleted { id: name.to_owned(), object: "assistant.deleted", deleted: true }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The field names that a schema describes.
    fn described_fields<T: utoipa::PartialSchema>() -> BTreeSet<String> {
        let schema = serde_json::to_value(T::schema()).unwrap();
        schema["properties"].as_object().unwrap().keys().cloned().collect()
    }

    /// The field names that the library accepts, parsed from its error message about an unknown field.
    fn accepted_fields(body: &str) -> BTreeSet<String> {
        let error = serde_json::from_str::<Assistant>(body).unwrap_err().to_string();
        assert!(error.starts_with("unknown field `?`"), "{error}");
        error.split('`').skip(3).step_by(2).map(str::to_owned).collect()
    }

    /// Asserts that the schema describes every field that the library accepts, except `undescribed`. A new
    /// field must be described in the schema or listed there.
    fn check<T: utoipa::PartialSchema>(body: &str, undescribed: &[&str]) {
        let all: BTreeSet<_> =
            described_fields::<T>().into_iter().chain(undescribed.iter().map(ToString::to_string)).collect();
        assert_eq!(accepted_fields(body), all, "{body}");
    }

    #[test]
    fn the_schema_describes_what_the_library_reads() {
        check::<AssistantBody>(r#"{"?": 1}"#, &["checkpoints", "memory", "review", "runs", "tools"]);
        check::<LifetimeBody>(r#"{"sessions": {"?": 1}}"#, &["history", "on_disconnect"]);
        check::<ShortTermBody>(r#"{"short_term": {"?": 1}}"#, &[]);
        check::<CacheBody>(r#"{"cache": {"?": 1}}"#, &[]);
        check::<RateLimitBody>(r#"{"rate_limit": {"?": 1}}"#, &[]);
    }
}
