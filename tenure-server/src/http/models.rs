//! `/v1/models` and `/v1/embeddings`: OpenAI's, for clients that look before they ask.

use crate::auth::Caller;
use crate::error::{ApiError, ApiResult, ErrorBody};
use crate::extract::{Raw, parse};
use crate::server::Shared;
use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tenure::Fields;
use utoipa::ToSchema;

/// A list of models.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelList {
    object: &'static str,
    data: Vec<ModelView>,
}

/// A model, or an assistant that can be asked like one.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelView {
    id: String,
    object: &'static str,
    created: i64,
    owned_by: &'static str,
}

/// List what can be asked
///
/// The configured models, the built-in one, and the assistants.
#[utoipa::path(
    get, path = "/v1/models", tag = "openai", operation_id = "list_models",
    responses((status = 200, body = ModelList), (status = 401, body = ErrorBody), (status = 403, body = ErrorBody), (status = 500, body = ErrorBody), (status = 503, body = ErrorBody))
)]
pub async fn list(State(app): State<Shared>, caller: Caller) -> ApiResult<Json<ModelList>> {
    let assistants = app.tenure.assistants(&caller.reads()?).await?;
    let view = |id: &str, owned_by| ModelView { id: id.to_owned(), object: "model", created: 0, owned_by };
    let models = app.models.names().map(|name| view(name, "tenure"));
    let data = models.chain(assistants.iter().map(|a| view(&a.name, "assistant"))).collect();
    Ok(Json(ModelList { object: "list", data }))
}

/// Embed texts
///
/// Passed on to the model's server as it is.
#[utoipa::path(
    post, path = "/v1/embeddings", tag = "openai", operation_id = "embed",
    request_body(content = Object),
    responses(
        (status = 200, description = "As the model's server answers", body = Object),
        (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 403, body = ErrorBody),
        (status = 404, description = "No such model, or it has no server", body = ErrorBody),
        (status = 408, body = ErrorBody), (status = 413, body = ErrorBody), (status = 415, body = ErrorBody),
        (status = 500, body = ErrorBody), (status = 502, body = ErrorBody), (status = 503, body = ErrorBody), (status = 504, body = ErrorBody),
    )
)]
pub async fn embeddings(State(app): State<Shared>, caller: Caller, raw: Raw) -> ApiResult<Response> {
    caller.writes()?;
    let body: Fields = parse(&raw.0)?;
    let name: Option<String> = body.get("model").and_then(|m| serde_json::from_str(m).ok());
    let name = name.unwrap_or_else(|| app.models.default_name().to_owned());
    let Some(upstream) = app.models.upstream(&name) else {
        let message = format!("{name:?} has no server that could embed; configure one under `models`");
        return Err(ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message));
    };
    let (kind, body) = upstream.embed(body).await?;
    Ok(([(header::CONTENT_TYPE, kind)], body).into_response())
}
