//! Parsing of chat requests: Tenure's own fields are removed from the body, the rest is passed on to the model
//! server.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult};
use crate::headers::{header_hint, header_text};
use crate::http::errors::unknown_model;
use crate::http::extract::{idempotency_key, parse};
use crate::jobs::runs;
use crate::observability::telemetry::ChatSpan;
use crate::sessions;
use axum::body::Bytes;
use axum::http::HeaderMap;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use std::sync::Arc;
use tenure::{
    Message, Model, Principal, SessionId, User,
    policy::{HistoryMode, OnDisconnect},
    rules::excerpt,
    run::{OnBusy, TurnRequest},
    session::RawObject,
};

/// A parsed and authorized chat request, with its model resolved.
pub(super) struct TurnInput {
    pub turn_request: TurnRequest,
    pub principal: Principal,
    pub model: Arc<dyn Model>,
    pub options: RawObject,
    pub stream: bool,
    pub store: bool,
    /// The disconnect rule of the request. `None` means that the assistant or the configuration decides.
    pub on_disconnect: Option<OnDisconnect>,
    /// What the client may have meant otherwise, for the response.
    pub warnings: Vec<String>,
    pub span: ChatSpan,
}

pub(super) async fn parse_request(
    app: &AppState,
    caller: &Caller,
    headers: &HeaderMap,
    bytes: &Bytes,
) -> ApiResult<TurnInput> {
    let mut body: RawObject = parse(bytes)?;
    let mut request = ChatRequest { messages: parse_messages(&body)?, ..ChatRequest::default() };
    request.user = parse_field::<String>(&body, "user")?.map(User::new).transpose()?;
    let principal = caller.authorize_write_as(request.user.clone())?;
    caller.admit_model_call(&app.rate_limits)?;
    request.take_options(&mut body)?;
    if request.session_id.is_none() {
        request.session_id = session_header(headers, &app.config.sessions.id_headers)?;
    }
    let warnings = if request.session_id.is_none() { misnamed_session_id(&body) } else { Vec::new() };
    let key = idempotency_key(headers)?;
    let SessionTarget { assistant, model_name } = resolve_target(app, &principal, &request).await?;
    let Some(model) = app.models.get(&model_name) else { return Err(unknown_model(&app.models, &model_name)) };
    let model = caller.metered(&app.rate_limits, model);
    let span = ChatSpan::begin(&model_name);
    body.set("model", &model_name);
    let resumable = assistant.as_ref().and_then(|_| runs::resumable(&model_name, &body));
    let sessions = &app.config.sessions;
    let turn_request = TurnRequest {
        session: request.session_id,
        messages: request.messages,
        history: request.history,
        default_history: caller.history().unwrap_or(sessions.history),
        is_retry: is_retry(headers),
        assistant,
        model: Some(model_name),
        content_matching: sessions.content_matching,
        on_busy: request.on_busy.unwrap_or(sessions.on_busy),
        on_expired: sessions.on_expired,
        idempotency: key.map(|key| (key, blake3::hash(bytes).to_hex().to_string())),
        resumable,
        queued: None,
    };
    Ok(TurnInput {
        turn_request,
        principal,
        model,
        options: body,
        stream: request.stream.unwrap_or(false),
        store: request.store.unwrap_or(true),
        on_disconnect: request.on_disconnect,
        warnings,
        span,
    })
}

fn parse_messages(body: &RawObject) -> ApiResult<Vec<Message>> {
    let Some(list) = body.get("messages") else {
        return Err(ApiError::invalid("messages", "`messages` is missing; send a list of messages"));
    };
    let list: Vec<&RawValue> =
        serde_json::from_str(list).map_err(|_| ApiError::invalid("messages", "`messages` must be a list"))?;
    let mut messages = Vec::with_capacity(list.len());
    for (i, raw) in list.into_iter().enumerate() {
        messages.push(Message::parse(raw.get()).map_err(|e| e.within(&format!("messages[{i}]")))?);
    }
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` is empty; send at least one message"));
    }
    Ok(messages)
}

/// The assistant and model that a request addresses.
struct SessionTarget {
    /// The assistant's name. `None` means that the request addresses a model directly.
    assistant: Option<String>,
    model_name: String,
}

/// Resolves the assistant and the model of a request. If it names neither, the preferred available model of its
/// session is chosen, else the default model.
async fn resolve_target(app: &AppState, principal: &Principal, request: &ChatRequest) -> ApiResult<SessionTarget> {
    let requested_model = request.model.as_ref();
    // The `model` field may name an assistant.
    let assistant = match request.assistant_id.as_ref().or(requested_model) {
        Some(name) => app.tenure.assistant(principal, name).await?,
        None => None,
    };
    if let (Some(name), None) = (&request.assistant_id, &assistant) {
        let message = format!("no assistant {}; GET /assistants lists them", excerpt(name));
        return Err(ApiError::not_found(message));
    }
    let model = match (&assistant, &request.session_id) {
        // `model` names a model only next to `assistant_id`; otherwise it named the assistant itself.
        (Some(assistant), _) => {
            assistant.model.clone().or_else(|| requested_model.filter(|_| request.assistant_id.is_some()).cloned())
        }
        (None, Some(id)) if requested_model.is_none() => last_model(app, principal, id).await?,
        (None, _) => requested_model.cloned(),
    };
    let model_name = model.unwrap_or_else(|| app.models.default_name().to_owned());
    Ok(SessionTarget { assistant: assistant.map(|a| a.name.clone()), model_name })
}

/// Whether the client's SDK marks the request as a retry.
fn is_retry(headers: &HeaderMap) -> bool {
    let count = header_hint(headers, "x-stainless-retry-count").and_then(|n| n.trim().parse::<u32>().ok());
    count.is_some_and(|count| count > 0)
}

/// The model of a session. `None` means that the session does not exist, or that none of its models is
/// configured any more.
async fn last_model(app: &AppState, principal: &Principal, id: &SessionId) -> ApiResult<Option<String>> {
    match app.tenure.head(principal, id).await {
        Ok(head) => Ok(sessions::available_model(app, principal, &head).await?),
        Err(tenure::Error::NotFound { .. }) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// The session id from the header `X-Session-Id` or one of the configured headers. In the latter, the
/// placeholders that chat applications send for a conversation without an id (empty, `new`, `null`,
/// `undefined`) are ignored.
fn session_header(headers: &HeaderMap, extra_headers: &[String]) -> ApiResult<Option<SessionId>> {
    if let Some(id) = header_text(headers, "X-Session-Id")? {
        return Ok(Some(SessionId::new(id)?));
    }
    for name in extra_headers {
        let id = header_text(headers, name)?.filter(|id| !["", "new", "null", "undefined"].contains(&id.trim()));
        if let Some(id) = id {
            return SessionId::new(id).map(Some).map_err(|e| ApiError::invalid(name, e.to_string()));
        }
    }
    Ok(None)
}

/// Warns of fields that resemble `session_id` in a request that names no session, with a value that could be an id.
fn misnamed_session_id(body: &RawObject) -> Vec<String> {
    let is_misnamed = |name: &&str| {
        let plain: String = name.chars().filter(|c| !"_-".contains(*c)).flat_map(char::to_lowercase).collect();
        ["sessionid", "session", "threadid", "conversationid", "chatid"].contains(&plain.as_str())
            && body.get(name).is_some_and(|value| value.starts_with('"') && value != "\"\"")
    };
    let warning = |name| format!("`{name}` does not name the session; did you mean `session_id`?");
    body.names().filter(is_misnamed).map(warning).collect()
}

/// Parses a field and removes it from the body. `null` counts as absent.
fn take_field<T: DeserializeOwned>(body: &mut RawObject, name: &str) -> ApiResult<Option<T>> {
    let value = parse_field(body, name)?;
    body.remove(name);
    Ok(value)
}

/// Parses a field that stays in the body. `null` counts as absent.
fn parse_field<T: DeserializeOwned>(body: &RawObject, name: &str) -> ApiResult<Option<T>> {
    let Some(text) = body.get(name) else { return Ok(None) };
    serde_json::from_str(text).map_err(|e| ApiError::invalid(name, format!("`{name}` is not valid: {e}")))
}

/// An OpenAI chat request with Tenure's additional fields. All other fields are passed on to the model server unchanged.
#[derive(Debug, Default, utoipa::ToSchema)]
pub struct ChatRequest {
    /// The conversation: the full history, or only the new messages.
    #[schema(value_type = Vec<Object>)]
    messages: Vec<Message>,
    /// A model or an assistant by name; the first model if none is named.
    model: Option<String>,
    /// Whether to stream the answer in chunks.
    stream: Option<bool>,
    /// The session; an unknown id creates one.
    #[schema(value_type = Option<String>)]
    session_id: Option<SessionId>,
    /// How the messages are merged with the stored history: `auto`, `full` or `append`.
    #[schema(value_type = Option<String>)]
    history: Option<HistoryMode>,
    /// What to do if the session is busy: `queue`, `reject`, `interrupt` or `branch`.
    #[schema(value_type = Option<String>)]
    on_busy: Option<OnBusy>,
    /// What to do with the run if the client disconnects: `finish` or `cancel`.
    #[schema(value_type = Option<String>)]
    on_disconnect: Option<OnDisconnect>,
    /// `false` means that nothing is stored.
    store: Option<bool>,
    /// The assistant that a new session belongs to.
    assistant_id: Option<String>,
    /// The user, if neither the key nor a header names one.
    #[schema(value_type = Option<String>)]
    user: Option<User>,
}

impl ChatRequest {
    /// Parses the remaining fields, and removes those from the body that are not meant for the model server.
    fn take_options(&mut self, body: &mut RawObject) -> ApiResult<()> {
        self.stream = parse_field(body, "stream")?;
        self.session_id = take_field::<String>(body, "session_id")?.map(SessionId::new).transpose()?;
        self.history = take_field(body, "history")?;
        self.on_busy = take_field(body, "on_busy")?;
        self.on_disconnect = take_field(body, "on_disconnect")?;
        self.store = take_field(body, "store")?;
        self.model = parse_field(body, "model")?;
        self.assistant_id = take_field(body, "assistant_id")?;
        Ok(())
    }
}
