//! What comes of a chat request: one body, or a stream of chunks.

use super::client::ChatConnection;
use crate::app::AppState;
use crate::error::{ApiError, ApiResult};
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use serde::Serialize;
use serde_json::{Value, json};
use tenure::{
    ModelChunk, RawObject, ReconcileReport, RunEvent, RunId, SessionId, ToolProgress, TurnError, TurnOutcome,
};
use tokio::sync::{mpsc, oneshot};

/// What is known once a turn has begun.
#[derive(Clone, Debug)]
pub(super) struct TurnStarted {
    pub session_id: SessionId,
    pub run: RunId,
    /// What was made of the messages.
    pub spliced: ReconcileReport,
}

/// What came of a turn, and what to tell the client instead of an answer while a person has to decide.
pub(super) type TurnEnded = Result<(TurnOutcome, Option<String>), TurnError>;

/// An error as the last event of a stream. No `[DONE]` follows it.
pub(super) fn told(error: ApiError) -> String {
    serde_json::to_string(&error.body()).unwrap_or_default()
}

/// The client took nothing for so long that pieces of the answer were left out.
fn too_slow() -> ApiError {
    let message = "the stream was not read for too long, and its end was left out; the whole answer is in the session";
    ApiError::new(StatusCode::REQUEST_TIMEOUT, "too_slow", message)
}

pub(super) fn event(data: &str) -> Bytes {
    Bytes::from(format!("data: {data}\n\n"))
}

pub(super) fn event_stream(body: Body) -> Response {
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    (headers, body).into_response()
}

pub(super) fn json_response(body: String) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

pub(super) fn with_session(mut response: Response, id: &SessionId) -> Response {
    if let Ok(value) = HeaderValue::from_str(id.as_str()) {
        response.headers_mut().insert("x-session-id", value);
    }
    response
}

/// A response with the headers that name its session and run.
pub(super) fn with_ids(response: Response, started: &TurnStarted) -> Response {
    let mut response = with_session(response, &started.session_id);
    if let Ok(value) = HeaderValue::from_str(started.run.as_str()) {
        response.headers_mut().insert("x-run-id", value);
    }
    response
}

/// A part of an answer with the session's id in it; the first one also says which run it is, and what was made of the messages.
fn marked(text: &str, started: &TurnStarted, report: bool) -> String {
    let Ok(mut fields) = serde_json::from_str::<RawObject>(text) else { return text.to_owned() };
    fields.set("session_id", &started.session_id);
    if report {
        fields.set("run_id", &started.run);
        fields.set("session", &started.spliced);
    }
    fields.to_string()
}

pub(super) fn whole(
    app: &AppState,
    started: &TurnStarted,
    answered: &TurnOutcome,
    notice: Option<&str>,
    stream: bool,
) -> Response {
    let mut body = match notice {
        Some(notice) => notice_body(started, notice, app.tenure.now().as_second()),
        None => answered.body.clone(),
    };
    if !answered.calls.is_empty()
        && let Ok(mut fields) = serde_json::from_str::<RawObject>(&body)
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
fn notice_body(started: &TurnStarted, notice: &str, now: i64) -> String {
    let message = json!({"role": "assistant", "content": notice});
    let choice = json!({"index": 0, "message": message, "finish_reason": "stop"});
    json!({"id": started.session_id, "object": "chat.completion", "created": now, "model": null, "choices": [choice]})
        .to_string()
}

/// A tool call that was made here, by mistral.rs's names.
fn record(call: &ToolProgress) -> Value {
    json!({"round": call.round, "name": call.tool, "arguments": call.arguments, "result_content": call.content, "cached": call.cached})
}

/// The progress of a tool call: an event of mistral.rs's, and for clients that do not know it a chunk in which nothing is said.
fn progress(call: &ToolProgress, started: &TurnStarted) -> Bytes {
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
pub(super) fn as_chunk(body: &str) -> String {
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
pub(super) fn stream_out(
    connection: ChatConnection,
    started: TurnStarted,
    first: RunEvent,
    heard: mpsc::Receiver<RunEvent>,
    ended: oneshot::Receiver<TurnEnded>,
) -> Response {
    let output = OutputStream { connection, heard, ended: Some(ended), report: true };
    streamed(output, StreamPhase::Piece(started, first))
}

/// The same for a request that has to wait for its session: a comment comes first, which clients ignore.
pub(super) fn stream_queued(
    connection: ChatConnection,
    started: oneshot::Receiver<ApiResult<TurnStarted>>,
    heard: mpsc::Receiver<RunEvent>,
    ended: oneshot::Receiver<TurnEnded>,
) -> Response {
    let output = OutputStream { connection, heard, ended: Some(ended), report: true };
    streamed(output, StreamPhase::Queued(started))
}

/// Where a stream stands.
enum StreamPhase {
    Queued(oneshot::Receiver<ApiResult<TurnStarted>>),
    Waiting(oneshot::Receiver<ApiResult<TurnStarted>>),
    Piece(TurnStarted, RunEvent),
    More(TurnStarted),
    Done,
}

/// What a stream is made of.
struct OutputStream {
    connection: ChatConnection,
    heard: mpsc::Receiver<RunEvent>,
    ended: Option<oneshot::Receiver<TurnEnded>>,
    /// What was made of the messages is still to be told, with the first chunk.
    report: bool,
}

fn streamed(output: OutputStream, phase: StreamPhase) -> Response {
    let chunks = stream::unfold((output, phase), |(mut output, phase)| async move {
        let (bytes, phase) = output.next(phase).await?;
        Some((bytes, (output, phase)))
    });
    event_stream(Body::from_stream(chunks.map(Ok::<_, std::convert::Infallible>)))
}

impl OutputStream {
    async fn next(&mut self, mut phase: StreamPhase) -> Option<(Bytes, StreamPhase)> {
        loop {
            phase = match phase {
                StreamPhase::Done => return None,
                StreamPhase::Queued(started) => {
                    return Some((Bytes::from(": queued\n\n"), StreamPhase::Waiting(started)));
                }
                StreamPhase::Waiting(started) => match started.await.ok()? {
                    Ok(started) => StreamPhase::More(started),
                    Err(e) => return Some((self.last(event(&told(e))), StreamPhase::Done)),
                },
                StreamPhase::Piece(started, piece) => {
                    let bytes = self.piece(&started, &piece);
                    return Some((bytes, StreamPhase::More(started)));
                }
                StreamPhase::More(started) => match self.heard.recv().await {
                    Some(piece) => StreamPhase::Piece(started, piece),
                    None => {
                        let bytes = self.end(&started).await?;
                        return Some((self.last(bytes), StreamPhase::Done));
                    }
                },
            }
        }
    }

    fn piece(&mut self, started: &TurnStarted, piece: &RunEvent) -> Bytes {
        let bytes = match piece {
            RunEvent::Piece(ModelChunk::Chunk(chunk)) => event(&marked(chunk, started, self.report)),
            RunEvent::Piece(ModelChunk::Whole(body)) => event(&marked(&as_chunk(body), started, self.report)),
            RunEvent::Tool(call) => progress(call, started),
        };
        self.report &= matches!(piece, RunEvent::Tool(_));
        bytes
    }

    async fn end(&mut self, started: &TurnStarted) -> Option<Bytes> {
        Some(match self.ended.take()?.await {
            Ok(Ok((answered, Some(notice)))) if answered.heard => {
                self.only_chunk(started, &notice_body(started, &notice, 0))
            }
            // Nothing was streamed: the answer was there at once, or was given before.
            Ok(Ok((answered, _))) if answered.heard && self.report => self.only_chunk(started, &answered.body),
            Ok(Ok((answered, _))) if answered.heard => event("[DONE]"),
            Ok(Ok(_)) => event(&told(too_slow())),
            Ok(Err(e)) => event(&told(e.into())),
            Err(_) => return None,
        })
    }

    fn only_chunk(&self, started: &TurnStarted, body: &str) -> Bytes {
        let chunk = marked(&as_chunk(body), started, self.report);
        Bytes::from([event(&chunk), event("[DONE]")].concat())
    }

    /// The client has everything: it may go away now.
    fn last(&self, bytes: Bytes) -> Bytes {
        self.connection.answered();
        bytes
    }
}

/// OpenAI's response, and what is ours in it. Everything else is as the model's server has it.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ChatResponse {
    /// The answers; only the first is stored.
    #[schema(value_type = Vec<Object>)]
    choices: Vec<Value>,
    /// The session.
    session_id: String,
    /// The run that answered: it can be followed and cancelled under `/sessions/{id}/runs/{run}`.
    run_id: String,
    /// What was made of the request's messages.
    session: SessionReport,
}

/// What was made of the messages of a request. Each of them, the system prompt apart, is counted once in `matched`, `appended`,
/// `ephemeral` or `orphans`.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct SessionReport {
    /// So many of them were stored already.
    matched: usize,
    /// So many stored messages the request left out after the first that it repeats, such as tool messages. The model is shown
    /// them.
    spliced: usize,
    /// So many stored messages were rewound. They stay readable as discarded.
    rewound: usize,
    /// So many of them are new and were stored.
    appended: usize,
    /// So many of them are shown to the model and not stored: they stand for stored messages in other words.
    ephemeral: usize,
    /// Tool results that answer no known call. They were dropped.
    #[schema(value_type = Option<Vec<String>>)]
    orphans: Vec<String>,
    /// Memories that the model was told of.
    #[schema(value_type = Option<Vec<Object>>)]
    memories: Vec<Value>,
}
