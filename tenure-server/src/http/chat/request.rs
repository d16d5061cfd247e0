//! What a chat request asks for.

use crate::app::Shared;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult};
use crate::headers::{header_hint, header_text};
use crate::http::errors::unknown_model;
use crate::http::extract::{idempotency_key, parse};
use crate::jobs::runs;
use crate::observability::telemetry::Talk;
use crate::sessions;
use axum::body::Bytes;
use axum::http::HeaderMap;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;
use std::sync::Arc;
use tenure::{Ask, Fields, HistoryMode, Message, Model, OnBusy, OnDisconnect, Principal, SessionId, User, excerpt};

/// A request that was understood.
pub(super) struct Request {
    pub ask: Ask,
    pub who: Principal,
    pub model: Arc<dyn Model>,
    pub options: Fields,
    pub stream: bool,
    pub keep: bool,
    /// What becomes of the run if the client goes away, if the request says.
    pub on_disconnect: Option<OnDisconnect>,
    pub talk: Talk,
}

pub(super) async fn understand(
    app: &Shared,
    caller: &Caller,
    headers: &HeaderMap,
    bytes: &Bytes,
) -> ApiResult<Request> {
    let mut body: Fields = parse(bytes)?;
    let list: Vec<&RawValue> = match body.get("messages") {
        Some(list) => {
            serde_json::from_str(list).map_err(|_| ApiError::invalid("messages", "`messages` must be a list"))?
        }
        None => return Err(ApiError::invalid("messages", "`messages` is missing; send a list of messages")),
    };
    let mut messages = Vec::with_capacity(list.len());
    for (i, raw) in list.into_iter().enumerate() {
        messages.push(Message::parse(raw.get()).map_err(|e| e.within(&format!("messages[{i}]")))?);
    }
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` is empty; say something"));
    }
    let user: Option<String> = peek(&body, "user")?;
    let user = user.map(User::new).transpose()?;
    let who = caller.writes_as(user)?;
    caller.admit_model_call(&app.rate_limits)?;
    let stream = peek(&body, "stream")?.unwrap_or(false);
    let session = match take::<String>(&mut body, "session_id")? {
        Some(id) => Some(SessionId::new(id)?),
        None => session_header(headers, &app.config.sessions.id_headers)?,
    };
    let history: Option<HistoryMode> = take(&mut body, "history")?;
    let on_busy: Option<OnBusy> = take(&mut body, "on_busy")?;
    let on_disconnect: Option<OnDisconnect> = take(&mut body, "on_disconnect")?;
    let keep = take(&mut body, "store")?.unwrap_or(true);
    let key = idempotency_key(headers)?;
    let named: Option<String> = peek(&body, "model")?;
    let assistant: Option<String> = take(&mut body, "assistant_id")?;
    let (assistant, named) = match (assistant, named) {
        (Some(name), named) => match app.tenure.assistant(&who, &name).await? {
            Some(assistant) => (Some(assistant.clone()), assistant.model.clone().or(named)),
            None => {
                return Err(ApiError::not_found(format!(
                    "there is no assistant {}; GET /assistants lists them",
                    excerpt(&name)
                )));
            }
        },
        // An assistant can be asked for like a model.
        (None, Some(name)) => match app.tenure.assistant(&who, &name).await? {
            Some(assistant) => (Some(assistant.clone()), assistant.model.clone()),
            None => (None, Some(name)),
        },
        // Neither is named: the session goes on as it was.
        (None, None) => match &session {
            Some(id) => (None, last_model(app, &who, id).await?),
            None => (None, None),
        },
    };
    let name = named.unwrap_or_else(|| app.models.default_name().to_owned());
    let Some(model) = app.models.get(&name) else { return Err(unknown_model(&app.models, &name)) };
    let model = caller.metered(&app.rate_limits, model);
    let talk = Talk::begin(&name);
    body.set("model", &name);
    let detail = assistant.as_ref().map(|_| runs::detail(&name, &body)).unwrap_or_default();
    let ask = Ask {
        session,
        messages,
        history,
        default_history: caller.history().unwrap_or(app.config.sessions.history),
        is_retry: is_retry(headers),
        assistant: assistant.map(|a| a.name.clone()),
        model: Some(name),
        content_matching: app.config.sessions.content_matching,
        on_busy: on_busy.unwrap_or(app.config.sessions.on_busy),
        on_expired: app.config.sessions.on_expired,
        idempotency: key.map(|key| (key, blake3::hash(bytes).to_hex().to_string())),
        detail,
        queued: None,
    };
    Ok(Request { ask, who, model, options: body, stream, keep, on_disconnect, talk })
}

/// Whether the client's SDK sends a request again that it has sent before.
fn is_retry(headers: &HeaderMap) -> bool {
    let count = header_hint(headers, "x-stainless-retry-count").and_then(|n| n.trim().parse::<u32>().ok());
    count.is_some_and(|count| count > 0)
}

/// The model of a session, if it is there and its model still is.
async fn last_model(app: &Shared, who: &Principal, id: &SessionId) -> ApiResult<Option<String>> {
    match app.tenure.head(who, id).await {
        Ok(head) => Ok(sessions::available_model(app, who, &head).await?),
        Err(tenure::Error::NotFound { .. }) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// The session that a header names: `X-Session-Id`, or one that is configured. What chat applications send for a conversation
/// that has no id yet names none.
fn session_header(headers: &HeaderMap, more: &[String]) -> ApiResult<Option<SessionId>> {
    if let Some(id) = header_text(headers, "X-Session-Id")? {
        return Ok(Some(SessionId::new(id)?));
    }
    for name in more {
        let id = header_text(headers, name)?.filter(|id| !["", "new", "null", "undefined"].contains(&id.trim()));
        if let Some(id) = id {
            return SessionId::new(id).map(Some).map_err(|e| ApiError::invalid(name, e.to_string()));
        }
    }
    Ok(None)
}

/// A field of ours, taken out; `null` is as good as none.
fn take<T: DeserializeOwned>(body: &mut Fields, name: &str) -> ApiResult<Option<T>> {
    let value = peek(body, name)?;
    body.take(name);
    Ok(value)
}

/// A field that stays.
fn peek<T: DeserializeOwned>(body: &Fields, name: &str) -> ApiResult<Option<T>> {
    let Some(text) = body.get(name) else { return Ok(None) };
    serde_json::from_str(text).map_err(|e| ApiError::invalid(name, format!("`{name}` is not valid: {e}")))
}

/// OpenAI's request, and what is ours in it. Everything else is passed on untouched.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[expect(dead_code, reason = "it describes the body; what is in it is looked at field by field")]
pub struct ChatRequest {
    /// The conversation: all of it, or only what is new.
    #[schema(value_type = Vec<Object>)]
    messages: Vec<Value>,
    /// A model or an assistant by name; the first model if none is named.
    model: Option<String>,
    /// Whether the answer should come in chunks.
    stream: Option<bool>,
    /// The session; an unknown id begins one.
    session_id: Option<String>,
    /// How to read the messages: `auto`, `full` or `append`.
    history: Option<String>,
    /// What to do if the session is busy: `queue`, `reject`, `interrupt` or `branch`.
    on_busy: Option<String>,
    /// What becomes of the run if the client goes away: `finish` or `cancel`.
    on_disconnect: Option<String>,
    /// `false`: nothing is kept.
    store: Option<bool>,
    /// The assistant that a new session belongs to.
    assistant_id: Option<String>,
    /// The user, if neither the key nor a header names one.
    user: Option<String>,
}
