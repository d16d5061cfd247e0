//! `/v1/models` and `/v1/embeddings`: OpenAI-compatible endpoints to list models and to compute embeddings.

use crate::app::AppState;
use crate::auth::Caller;
use crate::embed::LocalModel;
use crate::error::{ApiError, ApiResult, ErrorBody};
use crate::http::extract::{JsonBytes, parse};
use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tenure::session::RawObject;
use utoipa::ToSchema;

/// A list of models.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelList {
    object: &'static str,
    data: Vec<ModelView>,
}

/// A model, or an assistant that can be used like one.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelView {
    id: String,
    object: &'static str,
    created: i64,
    owned_by: &'static str,
}

/// List models and assistants
///
/// The configured models (the built-in model if there are none), the local embedding model, and the assistants.
#[utoipa::path(
    get, path = "/v1/models", tag = "openai", operation_id = "list_models",
    responses((status = 200, body = ModelList), (status = 401, body = ErrorBody), (status = 403, body = ErrorBody), (status = 500, body = ErrorBody), (status = 503, body = ErrorBody))
)]
pub async fn list(State(app): State<AppState>, caller: Caller) -> ApiResult<Json<ModelList>> {
    let assistants = app.tenure.assistants(&caller.authorize_read()?).await?;
    let view = |id: &str, owned_by| ModelView { id: id.to_owned(), object: "model", created: 0, owned_by };
    let models = app.models.names().map(|name| view(name, "tenure"));
    let models = models.chain(app.embeddings.local_name().map(|name| view(name, "tenure")));
    let data = models.chain(assistants.iter().map(|a| view(&a.name, "assistant"))).collect();
    Ok(Json(ModelList { object: "list", data }))
}

/// Embed texts
///
/// The request is passed on to the model server unchanged. The local embedding model (`embeddings.model: local`) is addressed by its name.
#[utoipa::path(
    post, path = "/v1/embeddings", tag = "openai", operation_id = "embed",
    request_body(content = Object),
    responses(
        (status = 200, description = "The embeddings, in OpenAI's format", body = Object),
        (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 403, body = ErrorBody),
        (status = 404, description = "No such model, or it has no server", body = ErrorBody),
        (status = 408, body = ErrorBody), (status = 413, body = ErrorBody), (status = 415, body = ErrorBody),
        (status = 500, body = ErrorBody), (status = 502, body = ErrorBody), (status = 503, body = ErrorBody), (status = 504, body = ErrorBody),
    )
)]
pub async fn embeddings(State(app): State<AppState>, caller: Caller, raw: JsonBytes) -> ApiResult<Response> {
    caller.authorize_write()?;
    caller.admit_model_call(&app.rate_limits)?;
    if let Some(meter) = caller.token_meter(&app.rate_limits) {
        meter.charge_text(raw.0.len());
    }
    let body: RawObject = parse(&raw.0)?;
    let name: Option<String> = body.get("model").and_then(|m| serde_json::from_str(m).ok());
    let name = name.unwrap_or_else(|| app.models.default_name().to_owned());
    if let Some(local) = app.embeddings.local(&name) {
        return embed_locally(local, parse(&raw.0)?).await;
    }
    let Some(upstream) = app.models.upstream(&name) else {
        let message = format!("model {name:?} has no upstream server for embeddings; configure one under `models`");
        return Err(ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message));
    };
    let (kind, body) = upstream.embed(body).await?;
    Ok(([(header::CONTENT_TYPE, kind)], body).into_response())
}

/// Maximum number of texts per embedding request, as in OpenAI's API.
const MAX_TEXTS: usize = 2048;

/// The request fields that the local embedding model supports.
#[derive(Deserialize)]
struct EmbedRequest {
    input: Texts,
    #[serde(default)]
    encoding_format: Encoding,
    dimensions: Option<usize>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "`input` must be a text or a list of texts")]
enum Texts {
    One(String),
    Many(Vec<String>),
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Encoding {
    #[default]
    Float,
    Base64,
}

async fn embed_locally(local: &LocalModel, request: EmbedRequest) -> ApiResult<Response> {
    let texts = match request.input {
        Texts::One(text) => vec![text],
        Texts::Many(texts) => texts,
    };
    if texts.is_empty() || texts.len() > MAX_TEXTS {
        return Err(ApiError::invalid("input", format!("send 1 to {MAX_TEXTS} texts, not {}", texts.len())));
    }
    let dimensions = local.dimensions();
    if request.dimensions.is_some_and(|wanted| wanted != dimensions) {
        return Err(ApiError::invalid(
            "dimensions",
            format!("embeddings of {} have {dimensions} dimensions", local.name()),
        ));
    }
    let failed = |message| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "embedding_failed", message);
    let (vectors, tokens) = local.embed(texts).await.map_err(failed)?;
    let encoded = |vector: Vec<f32>| match request.encoding_format {
        Encoding::Float => json!(vector),
        Encoding::Base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            json!(base64::engine::general_purpose::STANDARD.encode(bytes))
        }
    };
    let embedding = |(i, v)| json!({"object": "embedding", "index": i, "embedding": encoded(v)});
    let data: Vec<Value> = vectors.into_iter().enumerate().map(embedding).collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    Ok(Json(json!({"object": "list", "model": local.name(), "data": data, "usage": usage})).into_response())
}
