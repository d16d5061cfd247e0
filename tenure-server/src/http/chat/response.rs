//! Responses to chat requests: one JSON body, or a stream of server-sent events. `[DONE]` is sent only after
//! the answer is committed (D-046).

use super::client::ChatConnection;
use crate::app::AppState;
use crate::error::{ApiError, ApiResult};
use crate::headers::header_value;
use crate::tools::python;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use serde::Serialize;
use serde_json::{Value, json};
use tenure::{
    RunEvent, SessionId, TurnOutcome,
    run::{ModelChunk, ReconcileReport, RunId, ToolProgress, TurnError},
    session::RawObject,
};
use tokio::sync::{mpsc, oneshot};

/// The identity of a turn that has started.
#[derive(Clone, Debug)]
pub(super) struct TurnStarted {
    pub session_id: SessionId,
    pub run: RunId,
    /// How the request's messages were merged with the stored history.
    pub reconcile_report: ReconcileReport,
    /// What the client may have meant otherwise.
    pub warnings: Vec<String>,
}

/// The part of a response that describes the session: the merge report and the warnings.
#[derive(Serialize)]
struct SessionFields<'a> {
    #[serde(flatten)]
    reconcile_report: &'a ReconcileReport,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    warnings: &'a [String],
}

/// The outcome of a turn, and the notice to send instead of an answer while the run waits for review (D-062).
pub(super) type TurnEnded = Result<(TurnOutcome, Option<String>), TurnError>;

/// Serializes an error as the last event of a stream. No `[DONE]` follows it.
pub(super) fn error_json(error: ApiError) -> String {
    serde_json::to_string(&error.body()).unwrap_or_default()
}

/// The error for a stream that lost chunks because the client did not read for too long.
fn too_slow() -> ApiError {
    let message = "the client did not read the stream for too long and the rest was dropped; the complete answer is stored in the session";
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

/// Adds the header that names the response's session. An id that is not ASCII is encoded as in RFC 8187.
pub(super) fn with_session(mut response: Response, id: &SessionId) -> Response {
    if let Ok(value) = HeaderValue::from_str(&header_value(id.as_str())) {
        response.headers_mut().insert("x-session-id", value);
    }
    response
}

/// The header that repeats the warnings of a chat response.
pub const WARNING_HEADER: &str = "x-tenure-warning";

/// Adds the warnings as a header.
pub(super) fn with_warnings(mut response: Response, warnings: &[String]) -> Response {
    if let Some(value) = (!warnings.is_empty()).then(|| HeaderValue::from_str(&warnings.join(" "))).and_then(Result::ok)
    {
        response.headers_mut().insert(WARNING_HEADER, value);
    }
    response
}

/// Adds the headers that name the response's session and run, and the warnings.
pub(super) fn with_ids(response: Response, started: &TurnStarted) -> Response {
    let mut response = with_warnings(with_session(response, &started.session_id), &started.warnings);
    if let Ok(value) = HeaderValue::from_str(started.run.as_str()) {
        response.headers_mut().insert("x-run-id", value);
    }
    response
}

/// Adds the session id to a chunk or body. With `report`, which is set for the first one, also the run id and
/// the merge report. Text that is not a JSON object is returned unchanged.
fn with_session_fields(text: &str, started: &TurnStarted, report: bool) -> String {
    let Ok(mut fields) = serde_json::from_str::<RawObject>(text) else { return text.to_owned() };
    fields.set("session_id", &started.session_id);
    if report {
        fields.set("run_id", &started.run);
        let TurnStarted { reconcile_report, warnings, .. } = started;
        fields.set("session", SessionFields { reconcile_report, warnings });
    }
    fields.to_string()
}

pub(super) fn complete_response(
    app: &AppState,
    started: &TurnStarted,
    outcome: &TurnOutcome,
    notice: Option<&str>,
    stream: bool,
) -> Response {
    let mut body = match notice {
        Some(notice) => notice_body(started, notice, app.tenure.now().as_second()),
        None => outcome.body.clone(),
    };
    if !outcome.calls.is_empty()
        && let Ok(mut fields) = serde_json::from_str::<RawObject>(&body)
    {
        fields.set("agentic_tool_calls", outcome.calls.iter().map(tool_call_json).collect::<Vec<_>>());
        body = fields.to_string();
    }
    if !stream {
        return json_response(with_session_fields(&body, started, true));
    }
    // The client requested a stream, and the complete answer is available: it is sent as one chunk.
    let chunk = with_session_fields(&as_chunk(&body), started, true);
    let all = [event(&chunk), event("[DONE]")];
    event_stream(Body::from_stream(stream::iter(all.map(Ok::<_, std::convert::Infallible>))))
}

/// A review notice in the shape of a chat completion.
fn notice_body(started: &TurnStarted, notice: &str, now: i64) -> String {
    let message = json!({"role": "assistant", "content": notice});
    let choice = json!({"index": 0, "message": message, "finish_reason": "stop"});
    json!({"id": started.session_id, "object": "chat.completion", "created": now, "model": null, "choices": [choice]})
        .to_string()
}

/// A tool call executed by the server, with mistral.rs's field names.
fn tool_call_json(call: &ToolProgress) -> Value {
    json!({"round": call.round, "name": call.tool, "arguments": call.arguments, "result_content": call.content, "cached": call.cached})
}

/// A tool progress event of mistral.rs. For clients that do not know it, its data is also a valid chunk with an
/// empty delta.
fn progress_event(call: &ToolProgress, started: &TurnStarted) -> Bytes {
    let phase = if call.content.is_some() { "complete" } else { "calling" };
    let tool_type = if call.tool == python::NAME { "code_execution" } else { "custom" };
    let mut data =
        json!({"tool_type": tool_type, "arguments": call.arguments, "content": call.content, "cached": call.cached});
    if call.tool == python::NAME
        && let Ok(Value::Object(arguments)) = serde_json::from_str(&call.arguments)
        && let Some(code) = arguments.get("code")
    {
        data["code"] = code.clone();
    }
    let choice = json!({"index": 0, "delta": {}, "finish_reason": null});
    let event = json!({
        "type": "agentic_tool_call_progress", "round": call.round, "tool_name": call.tool, "phase": phase, "data": data,
        "id": started.session_id, "object": "chat.completion.chunk", "created": 0, "model": "", "choices": [choice],
        "session_id": started.session_id,
    });
    Bytes::from(format!("event: agentic_tool_call_progress\ndata: {event}\n\n"))
}

/// Converts a complete chat completion into a single stream chunk.
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

/// Streams chunks as they arrive, beginning with `first`. The end of the stream is sent only after the answer
/// is committed (D-046).
pub(super) fn stream_out(
    connection: ChatConnection,
    started: TurnStarted,
    first: RunEvent,
    events: mpsc::Receiver<RunEvent>,
    ended: oneshot::Receiver<TurnEnded>,
) -> Response {
    let output = OutputStream { connection, events, ended: Some(ended), report_pending: true };
    streamed(output, StreamPhase::Event(started, first))
}

/// Streams the answer to a request that is queued for its session. A server-sent comment, which clients ignore,
/// is sent first.
pub(super) fn stream_queued(
    connection: ChatConnection,
    started: oneshot::Receiver<ApiResult<TurnStarted>>,
    events: mpsc::Receiver<RunEvent>,
    ended: oneshot::Receiver<TurnEnded>,
) -> Response {
    let output = OutputStream { connection, events, ended: Some(ended), report_pending: true };
    streamed(output, StreamPhase::Queued(started))
}

/// The state of a response stream.
enum StreamPhase {
    Queued(oneshot::Receiver<ApiResult<TurnStarted>>),
    Waiting(oneshot::Receiver<ApiResult<TurnStarted>>),
    Event(TurnStarted, RunEvent),
    Streaming(TurnStarted),
    Done,
}

/// The sources of a response stream.
struct OutputStream {
    connection: ChatConnection,
    events: mpsc::Receiver<RunEvent>,
    ended: Option<oneshot::Receiver<TurnEnded>>,
    /// Whether the merge report is still to be sent, with the first chunk.
    report_pending: bool,
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
                    Ok(started) => StreamPhase::Streaming(started),
                    Err(e) => return Some((self.finish(event(&error_json(e))), StreamPhase::Done)),
                },
                StreamPhase::Event(started, run_event) => {
                    let bytes = self.render(&started, &run_event);
                    return Some((bytes, StreamPhase::Streaming(started)));
                }
                StreamPhase::Streaming(started) => match self.events.recv().await {
                    Some(run_event) => StreamPhase::Event(started, run_event),
                    None => {
                        let bytes = self.end(&started).await?;
                        return Some((self.finish(bytes), StreamPhase::Done));
                    }
                },
            }
        }
    }

    fn render(&mut self, started: &TurnStarted, run_event: &RunEvent) -> Bytes {
        let bytes = match run_event {
            RunEvent::Chunk(ModelChunk::Chunk(chunk)) => {
                event(&with_session_fields(chunk, started, self.report_pending))
            }
            RunEvent::Chunk(ModelChunk::Complete(body)) => {
                event(&with_session_fields(&as_chunk(body), started, self.report_pending))
            }
            RunEvent::Tool(call) => progress_event(call, started),
            _ => Bytes::new(),
        };
        self.report_pending &= matches!(run_event, RunEvent::Tool(_));
        bytes
    }

    async fn end(&mut self, started: &TurnStarted) -> Option<Bytes> {
        Some(match self.ended.take()?.await {
            Ok(Ok((outcome, Some(notice)))) if outcome.all_events_delivered => {
                self.only_chunk(started, &notice_body(started, &notice, 0))
            }
            // No chunk was streamed: the answer was complete at once, or is a replay of a stored one.
            Ok(Ok((outcome, _))) if outcome.all_events_delivered && self.report_pending => {
                self.only_chunk(started, &outcome.body)
            }
            Ok(Ok((outcome, _))) if outcome.all_events_delivered => event("[DONE]"),
            Ok(Ok(_)) => event(&error_json(too_slow())),
            Ok(Err(e)) => event(&error_json(e.into())),
            Err(_) => return None,
        })
    }

    fn only_chunk(&self, started: &TurnStarted, body: &str) -> Bytes {
        let chunk = with_session_fields(&as_chunk(body), started, self.report_pending);
        Bytes::from([event(&chunk), event("[DONE]")].concat())
    }

    /// Marks the response as complete, so that the client may disconnect.
    fn finish(&self, bytes: Bytes) -> Bytes {
        self.connection.mark_answered();
        bytes
    }
}

/// An OpenAI chat completion with Tenure's additional fields. All other fields are those of the model server.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ChatResponse {
    /// The answers; only the first is stored.
    #[schema(value_type = Vec<Object>)]
    choices: Vec<Value>,
    /// The session.
    session_id: String,
    /// The run of this turn; see `/sessions/{id}/runs/{run}`.
    run_id: String,
    /// How the request's messages were merged with the stored history.
    session: SessionReport,
}

/// How the messages of a request were merged. Each message except the system prompt is counted once in `matched`, `appended`, `ephemeral` or
/// `orphans`.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct SessionReport {
    /// Number of request messages that were already stored.
    matched: usize,
    /// Number of stored messages that the request omits after the first one it repeats, such as tool messages. They are part of the prompt.
    #[serde(rename = "spliced")]
    omitted: usize,
    /// Number of stored messages that were rewound. They stay readable as discarded.
    rewound: usize,
    /// Number of request messages that are new and were stored.
    appended: usize,
    /// Number of request messages shown to the model but not stored: rewordings of stored messages.
    ephemeral: usize,
    /// Tool results that answer no known call. They were dropped.
    #[schema(value_type = Option<Vec<String>>)]
    orphans: Vec<String>,
    /// Memories injected into the prompt.
    #[schema(value_type = Option<Vec<Object>>)]
    memories: Vec<Value>,
    /// What the client may have meant otherwise: fields that resemble `session_id` in a request that names no session. Absent if there are
    /// none. Also in the header `X-Tenure-Warning`.
    #[schema(value_type = Option<Vec<String>>)]
    warnings: Vec<String>,
}
