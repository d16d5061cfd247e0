//! `POST /v1/chat/completions`: OpenAI's endpoint, with a memory.

use crate::auth::Caller;
use crate::clock::Stopwatch;
use crate::error::{ApiError, ApiResult, ErrorBody};
use crate::extract::{Raw, header_text, parse};
use crate::metrics;
use crate::runner;
use crate::server::{Kept, Shared};
use crate::telemetry::Talk;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::sync::Arc;
use tenure::{
    Answered, Ask, Begun, Fields, First, Hands, Heard, Message, Mode, Model, OnBusy, Piece, Principal, Progress,
    Prompt, SessionId, Spliced, TurnError, User,
};
use tokio::sync::{mpsc, oneshot};
use tracing::Instrument;

/// A request that was understood.
struct Request {
    ask: Ask,
    who: Principal,
    model: Arc<dyn Model>,
    options: Fields,
    stream: bool,
    keep: bool,
    talk: Talk,
}

/// What is known once a turn has begun.
#[derive(Clone, Debug)]
struct Started {
    session_id: SessionId,
    /// What was made of the messages; `None` for an answer that was given before.
    spliced: Option<Spliced>,
}

/// What came of a turn, and what to tell the client instead of an answer while a person has to decide.
type Ended = Result<(Answered, Option<String>), TurnError>;

/// Answer a conversation
///
/// OpenAI's chat completions. With `session_id`, or by the content of the messages, the stored history is spliced in; the answer is
/// stored before it is reported as done. Fields that are not ours are passed on to the model's server.
#[utoipa::path(
    post, path = "/v1/chat/completions", tag = "openai", operation_id = "chat",
    params(
        ("X-Session-Id" = Option<String>, Header, description = "The session, if the body does not name it"),
        ("X-Tenure-User" = Option<String>, Header, description = "The user, if the key does not fix one"),
        ("Idempotency-Key" = Option<String>, Header, description = "The same key with the same body gets the first answer again"),
    ),
    request_body(content = ChatRequest),
    responses(
        (status = 200, description = "The answer, or its chunks as server-sent events", content((Value = "application/json"), (String = "text/event-stream"))),
        (status = 400, description = "Something in the request is wrong", body = ErrorBody),
        (status = 401, description = "No key, or an unknown one", body = ErrorBody),
        (status = 403, description = "The key does not allow it", body = ErrorBody),
        (status = 404, description = "No such model", body = ErrorBody),
        (status = 408, description = "The body came too slowly; nothing was changed", body = ErrorBody),
        (status = 409, description = "The session is busy, paused, or was changed meanwhile", body = ErrorBody),
        (status = 410, description = "The session has expired (`on_expired: reject`)", body = ErrorBody),
        (status = 413, description = "Over a limit", body = ErrorBody),
        (status = 415, description = "Not JSON", body = ErrorBody),
        (status = 422, description = "The idempotency key came with another body before", body = ErrorBody),
        (status = 429, description = "Too many requests wait for the session", body = ErrorBody),
        (status = 500, description = "What is stored there is damaged (`corrupt`)", body = ErrorBody),
        (status = 502, description = "The model's server can not be reached, or its answer is broken", body = ErrorBody),
        (status = 503, description = "The store is not available", body = ErrorBody),
        (status = 504, description = "The model's server took too long", body = ErrorBody),
    )
)]
pub async fn complete(State(app): State<Shared>, caller: Caller, headers: HeaderMap, raw: Raw) -> ApiResult<Response> {
    let request = understand(&app, &caller, &headers, &raw.0).await?;
    if !request.keep {
        return pass_on(&app, request).await;
    }
    let stream = request.stream;
    let (begun, started) = oneshot::channel();
    let (pieces, mut heard) = mpsc::channel(64);
    let (end, ended) = oneshot::channel();
    let turn = take_turn(app.clone(), request, begun, pieces, end);
    // A client that goes away does not end it.
    let mut turn = Kept::new(app.clone(), turn.instrument(tracing::Span::current()));
    let lost = || ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the turn ended without an answer");
    let started = turn.until(started).await.map_err(|_| lost())??;
    tracing::Span::current().record("session_id", started.session_id.as_str());
    // The status can be told only when the model has begun to answer.
    let first = if stream { turn.until(heard.recv()).await } else { None };
    let response = match first {
        // From here on the turn is a task of its own: it does not wait for a client that is slow.
        Some(first) => stream_out(started.clone(), first, heard, ended),
        None => match turn.until(ended).await.map_err(|_| lost())? {
            Ok((answered, notice)) => whole(&app, &started, &answered, notice.as_deref(), stream),
            Err(e) => ApiError::from(e).into_response(),
        },
    };
    Ok(with_session(response, &started.session_id))
}

async fn understand(app: &Shared, caller: &Caller, headers: &HeaderMap, bytes: &Bytes) -> ApiResult<Request> {
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
    let stream = peek(&body, "stream")?.unwrap_or(false);
    let session: Option<String> = take(&mut body, "session_id")?;
    let session = match session {
        Some(id) => Some(id),
        None => named_header(headers, "X-Session-Id")?,
    };
    let session = session.map(SessionId::new).transpose()?;
    let mode = match take::<String>(&mut body, "history")?.as_deref() {
        None | Some("auto") => Mode::Auto,
        Some("full") => Mode::Full,
        Some("append") => Mode::Append,
        Some(other) => {
            return Err(ApiError::invalid("history", format!("{other:.40?} is not auto, full or append")));
        }
    };
    let on_busy: Option<OnBusy> = take(&mut body, "on_busy")?;
    let keep = take(&mut body, "store")?.unwrap_or(true);
    let key = named_header(headers, "Idempotency-Key")?;
    if key.as_ref().is_some_and(|k| k.is_empty() || k.len() > 256) {
        return Err(ApiError::invalid("Idempotency-Key", "it must have 1 to 256 characters"));
    }
    let named: Option<String> = peek(&body, "model")?;
    let assistant: Option<String> = take(&mut body, "assistant_id")?;
    let (assistant, named) = match (assistant, named) {
        (Some(name), named) => match app.tenure.assistant(&who, &name).await? {
            Some(assistant) => (Some(assistant.clone()), assistant.model.clone().or(named)),
            None => {
                return Err(ApiError::not_found(format!("there is no assistant {name:?}; GET /assistants lists them")));
            }
        },
        // An assistant can be asked for like a model.
        (None, Some(name)) => match app.tenure.assistant(&who, &name).await? {
            Some(assistant) => (Some(assistant.clone()), assistant.model.clone()),
            None => (None, Some(name)),
        },
        // Neither is named: the session goes on as it was.
        (None, None) => match &session {
            Some(id) => (None, model_of(app, &who, id).await?),
            None => (None, None),
        },
    };
    let name = named.unwrap_or_else(|| app.models.default_name().to_owned());
    let Some(model) = app.models.get(&name) else {
        let known: Vec<_> = app.models.names().collect();
        let message = format!("there is no model {name:?}; it can be one of: {}", known.join(", "));
        return Err(ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message));
    };
    let talk = Talk::begin(&name);
    body.set("model", &name);
    let detail = assistant.as_ref().map(|_| runner::detail(&name, &body)).unwrap_or_default();
    let ask = Ask {
        session,
        messages,
        mode,
        assistant: assistant.map(|a| a.name.clone()),
        model: Some(name),
        content_matching: app.config.sessions.content_matching,
        on_busy: on_busy.unwrap_or(app.config.sessions.on_busy),
        on_expired: app.config.sessions.on_expired,
        idempotency: key.map(|key| (key, blake3::hash(bytes).to_hex().to_string())),
        detail,
    };
    Ok(Request { ask, who, model, options: body, stream, keep, talk })
}

/// The model of a session: its assistant's, else the one it talked to last. None of a model that is there no more.
pub(super) async fn model_of(app: &Shared, who: &Principal, id: &SessionId) -> ApiResult<Option<String>> {
    let head = match app.tenure.head(who, id).await {
        Ok(head) => head,
        Err(tenure::Error::NotFound { .. }) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    let assistant = match &head.assistant {
        Some(name) => app.tenure.assistant(who, name).await?,
        None => None,
    };
    let names = [assistant.and_then(|a| a.model.clone()), head.info.model];
    Ok(names.into_iter().flatten().find(|name| app.models.get(name).is_some()))
}

/// A header that must be text if it is there.
fn named_header(headers: &HeaderMap, name: &'static str) -> ApiResult<Option<String>> {
    match (headers.contains_key(name), header_text(headers, name)) {
        (true, None) => Err(ApiError::invalid(name, "it must be plain ASCII text")),
        (_, text) => Ok(text.map(str::to_owned)),
    }
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

/// The whole turn.
async fn take_turn(
    app: Shared,
    request: Request,
    begun: oneshot::Sender<ApiResult<Started>>,
    pieces: mpsc::Sender<Heard>,
    end: oneshot::Sender<Ended>,
) {
    let watch = Stopwatch::start();
    let Request { ask, who, model, options, stream, talk, .. } = request;
    let name = ask.model.clone().unwrap_or_default();
    let timed = Arc::new(metrics::Timed { model, answered: Default::default() });
    let first = First { model: timed.clone(), options: options.clone(), stream };
    let (session_id, outcome) = match app.tenure.turn_asking(&who, ask, &first).await {
        Err(e) => return drop(begun.send(Err(e.into()))),
        Ok(Begun::Before { session_id, run, body }) => {
            let _ = begun.send(Ok(Started { session_id: session_id.clone(), spliced: None }));
            let mut answer = tenure::Answer::default();
            let again = answer.take(&Piece::Whole(body));
            let broken = |why| tenure::Error::corrupt(format!("the kept answer of {run}"), why);
            let (calls, waiting) = Default::default();
            let answered = again.map(|()| Answered { answer, seq: 0, heard: true, calls, waiting });
            (session_id, answered.map_err(|why| broken(why).into()))
        }
        Ok(Begun::Turn(turn)) => {
            let opened = watch.elapsed();
            let session_id = turn.session_id.clone();
            let started = Started { session_id: session_id.clone(), spliced: Some(turn.spliced.clone()) };
            let _ = begun.send(Ok(started));
            let summaries = turn.compact();
            let asked = Stopwatch::start();
            let (run, hands) = (turn.run.clone(), Hands { model: &*timed, tools: Some(&*app.tools) });
            let outcome = turn.run(hands, options, stream, stream.then_some(pieces)).await;
            metrics::turn(opened, asked.elapsed(), &timed, &outcome);
            runner::told(&app, &who, &session_id, &run, &outcome).await;
            crate::compact::after_turn(&app, &who, &session_id, summaries, &name);
            (session_id, outcome)
        }
    };
    talk.in_session(&session_id);
    talk.ended(&outcome);
    // It can be long after its request was answered.
    match &outcome {
        Ok(_) => tracing::debug!(%session_id, "a turn is done"),
        Err(e) => tracing::warn!(%session_id, code = e.code(), "a turn failed"),
    }
    let notice = match &outcome {
        Ok(answered) if answered.waiting => app.tenure.view(&who, &session_id, |s| s.notice()).await.ok().flatten(),
        _ => None,
    };
    let _ = end.send(outcome.map(|answered| (answered, notice)));
}

/// Nothing is kept: the model sees what the session would show, and that is all.
async fn pass_on(app: &Shared, request: Request) -> ApiResult<Response> {
    let messages = app.tenure.preview(&request.who, &request.ask).await?;
    let prompt = Prompt { messages, options: request.options, stream: request.stream };
    let mut pieces = request.model.ask(prompt).await?;
    use futures_util::StreamExt;
    let mut answer = tenure::Answer::default();
    let broken = |why| tenure::ModelError::Broken { why };
    let Some(first) = pieces.next().await.transpose()? else {
        return Err(broken("it ended before anything was said".to_owned()).into());
    };
    answer.take(&first).map_err(broken)?;
    let first = match (first, request.stream) {
        (Piece::Whole(body), false) => return Ok(json_response(body)),
        (Piece::Whole(body), true) => as_chunk(&body),
        (Piece::Chunk(chunk), _) => chunk,
    };
    let rest = stream::unfold(Some((pieces, answer)), move |state| async move {
        let (mut pieces, mut answer) = state?;
        let piece = pieces.next().await.map(|p| p.and_then(|p| answer.take(&p).map_err(broken).map(|()| p)));
        Some(match piece {
            Some(Ok(Piece::Chunk(chunk) | Piece::Whole(chunk))) => (event(&chunk), Some((pieces, answer))),
            Some(Err(e)) => (event(&told(e.into())), None),
            None => (event("[DONE]"), None),
        })
    });
    let all = stream::iter([event(&first)]).chain(rest);
    Ok(event_stream(Body::from_stream(all.map(Ok::<_, std::convert::Infallible>))))
}

/// An error as the last event of a stream. No `[DONE]` follows it.
fn told(error: ApiError) -> String {
    serde_json::to_string(&error.body()).unwrap_or_default()
}

/// The client took nothing for so long that pieces of the answer were left out.
fn too_slow() -> ApiError {
    let message = "the stream was not read for too long, and its end was left out; the whole answer is in the session";
    ApiError::new(StatusCode::REQUEST_TIMEOUT, "too_slow", message)
}

fn event(data: &str) -> Bytes {
    Bytes::from(format!("data: {data}\n\n"))
}

fn event_stream(body: Body) -> Response {
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    (headers, body).into_response()
}

fn json_response(body: String) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn with_session(mut response: Response, id: &SessionId) -> Response {
    if let Ok(value) = HeaderValue::from_str(id.as_str()) {
        response.headers_mut().insert("x-session-id", value);
    }
    response
}

/// A part of an answer with the session's id in it.
fn marked(text: &str, started: &Started, report: bool) -> String {
    let Ok(mut fields) = serde_json::from_str::<Fields>(text) else { return text.to_owned() };
    fields.set("session_id", &started.session_id);
    if report && let Some(spliced) = &started.spliced {
        fields.set("session", spliced);
    }
    fields.to_string()
}

fn whole(app: &Shared, started: &Started, answered: &Answered, notice: Option<&str>, stream: bool) -> Response {
    let mut body = match notice {
        Some(notice) => notice_body(started, notice, app.tenure.now().as_second()),
        None => answered.answer.body(started.session_id.as_str(), app.tenure.now()),
    };
    if !answered.calls.is_empty()
        && let Ok(mut fields) = serde_json::from_str::<Fields>(&body)
    {
        fields.set("agentic_tool_calls", answered.calls.iter().map(record).collect::<Vec<_>>());
        body = fields.to_string();
    }
    if !stream {
        return json_response(marked(&body, started, true));
    }
    // A stream was asked for, and the answer is there at once.
    let chunk = marked(&as_chunk(&body), started, true);
    let all = [event(&chunk), event("[DONE]")];
    event_stream(Body::from_stream(stream::iter(all.map(Ok::<_, std::convert::Infallible>))))
}

/// A notice in the shape of an answer.
fn notice_body(started: &Started, notice: &str, now: i64) -> String {
    let message = json!({"role": "assistant", "content": notice});
    let choice = json!({"index": 0, "message": message, "finish_reason": "stop"});
    json!({"id": started.session_id, "object": "chat.completion", "created": now, "model": null, "choices": [choice]})
        .to_string()
}

/// A tool call that was made here, by mistral.rs's names.
fn record(call: &Progress) -> Value {
    json!({"round": call.round, "name": call.tool, "arguments": call.arguments, "result_content": call.content, "cached": call.cached})
}

/// The progress of a tool call: an event of mistral.rs's, and for clients that do not know it a chunk in which nothing is said.
fn progress(call: &Progress, started: &Started) -> Bytes {
    let phase = if call.content.is_some() { "complete" } else { "calling" };
    let data =
        json!({"tool_type": "custom", "arguments": call.arguments, "content": call.content, "cached": call.cached});
    let choice = json!({"index": 0, "delta": {}, "finish_reason": null});
    let event = json!({
        "type": "agentic_tool_call_progress", "round": call.round, "tool_name": call.tool, "phase": phase, "data": data,
        "id": started.session_id, "object": "chat.completion.chunk", "created": 0, "model": "", "choices": [choice],
        "session_id": started.session_id,
    });
    Bytes::from(format!("event: agentic_tool_call_progress\ndata: {event}\n\n"))
}

/// A whole answer as the one chunk of a stream.
fn as_chunk(body: &str) -> String {
    let mut body: Value = serde_json::from_str(body).unwrap_or_default();
    body["object"] = json!("chat.completion.chunk");
    for choice in body["choices"].as_array_mut().into_iter().flatten() {
        choice["delta"] = choice["message"].take();
        for (i, call) in choice["delta"]["tool_calls"].as_array_mut().into_iter().flatten().enumerate() {
            call["index"] = json!(i);
        }
        if let Value::Object(choice) = choice {
            choice.remove("message");
        }
    }
    body.to_string()
}

/// Chunks as they arrive. The end is told only when the answer is kept.
fn stream_out(
    started: Started,
    first: Heard,
    heard: mpsc::Receiver<Heard>,
    ended: oneshot::Receiver<Ended>,
) -> Response {
    enum Next {
        First(Heard),
        More,
        Done,
    }
    // What was made of the messages is told with the first chunk.
    let state = (Next::First(first), heard, Some(ended), started, true);
    let chunks = stream::unfold(state, |(next, mut heard, mut ended, started, report)| async move {
        let piece = match next {
            Next::Done => return None,
            Next::First(piece) => Some(piece),
            Next::More => heard.recv().await,
        };
        if let Some(piece) = piece {
            let event = match &piece {
                Heard::Piece(Piece::Chunk(chunk)) => event(&marked(chunk, &started, report)),
                Heard::Piece(Piece::Whole(body)) => event(&marked(&as_chunk(body), &started, report)),
                Heard::Tool(call) => progress(call, &started),
            };
            let report = report && matches!(piece, Heard::Tool(_));
            return Some((event, (Next::More, heard, ended, started, report)));
        }
        let last = match ended.take()?.await {
            Ok(Ok((answered, Some(notice)))) if answered.heard => {
                let chunk = marked(&as_chunk(&notice_body(&started, &notice, 0)), &started, report);
                Bytes::from([event(&chunk), event("[DONE]")].concat())
            }
            Ok(Ok((answered, _))) if answered.heard => event("[DONE]"),
            Ok(Ok(_)) => event(&told(too_slow())),
            Ok(Err(e)) => event(&told(e.into())),
            Err(_) => return None,
        };
        Some((last, (Next::Done, heard, ended, started, false)))
    });
    use futures_util::StreamExt;
    event_stream(Body::from_stream(chunks.map(Ok::<_, std::convert::Infallible>)))
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
    /// `false`: nothing is kept.
    store: Option<bool>,
    /// The assistant that a new session belongs to.
    assistant_id: Option<String>,
    /// The user, if neither the key nor a header names one.
    user: Option<String>,
}
