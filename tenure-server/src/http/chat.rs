//! `POST /v1/chat/completions`: the OpenAI-compatible endpoint, with persistent sessions.

mod client;
mod request;
mod response;
mod turn;

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult, ErrorBody};
use crate::http::extract::JsonBytes;
use crate::tasks::DetachOnDrop;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use client::ChatConnection;
use futures_util::stream;
pub use request::ChatRequest;
use request::{TurnInput, parse_request};
pub use response::{ChatResponse, WARNING_HEADER};
use response::{
    as_chunk, complete_response, error_json, event, event_stream, json_response, stream_out, stream_queued, with_ids,
    with_session, with_warnings,
};
use std::sync::Arc;
use tenure::{
    ModelError,
    run::{ModelChunk, Prompt},
};
use tokio::sync::Notify;
use tracing::Instrument;
pub(super) use turn::MAX_BUFFERED_EVENTS;
use turn::{TurnEvents, execute_turn, turn_channels};

/// Create a chat completion
///
/// OpenAI's chat completions. The session is identified by `session_id` or by the content of the messages, and the request is merged with
/// its stored history. The answer is durable before the end of the response is sent. Unknown fields are passed on to the model server.
#[utoipa::path(
    post, path = "/v1/chat/completions", tag = "openai", operation_id = "chat",
    params(
        ("X-Session-Id" = Option<String>, Header, description = "The session, if the body does not name it"),
        ("X-Tenure-User" = Option<String>, Header, description = "The user, if the key is not bound to one"),
        ("Idempotency-Key" = Option<String>, Header, description = "A retry with the same key and body returns the stored response"),
    ),
    request_body(content = ChatRequest),
    responses(
        (status = 200, description = "The answer with `session_id`, `run_id` and `session` (the merge report), or its chunks as server-sent events", content((ChatResponse = "application/json"), (String = "text/event-stream"))),
        (status = 400, description = "Invalid request", body = ErrorBody),
        (status = 401, description = "Missing or unknown API key", body = ErrorBody),
        (status = 403, description = "The API key lacks the required right", body = ErrorBody),
        (status = 404, description = "No such model", body = ErrorBody),
        (status = 408, description = "Timeout while reading the body; nothing was changed", body = ErrorBody),
        (status = 409, description = "The session is busy or paused, belongs to another assistant, or its run was cancelled", body = ErrorBody),
        (status = 410, description = "The session was deleted, or has expired (`on_expired: reject`); `POST /sessions/{id}/restore` restores it", body = ErrorBody),
        (status = 413, description = "A size limit was exceeded", body = ErrorBody),
        (status = 415, description = "The content type is not JSON", body = ErrorBody),
        (status = 422, description = "The idempotency key was used with a different body", body = ErrorBody),
        (status = 429, description = "Too many requests are queued for the session", body = ErrorBody),
        (status = 500, description = "The stored data is corrupt (`corrupt`)", body = ErrorBody),
        (status = 502, description = "The model server is unreachable or returned an invalid response", body = ErrorBody),
        (status = 503, description = "The store is unavailable", body = ErrorBody),
        (status = 504, description = "The model server timed out", body = ErrorBody),
    )
)]
pub async fn complete(
    State(app): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    raw: JsonBytes,
) -> ApiResult<Response> {
    let mut request = parse_request(&app, &caller, &headers, &raw.0).await?;
    if !request.store {
        let warnings = std::mem::take(&mut request.warnings);
        return answer_without_storing(&app, request).await.map(|response| with_warnings(response, &warnings));
    }
    let stream = request.stream;
    let session_id = request.turn_request.session.clone();
    let warnings = request.warnings.clone();
    let queued = Arc::new(Notify::new());
    // The response to a repeated idempotency key is byte-identical (D-047), so no queue comment may precede it.
    request.turn_request.queued = request.turn_request.idempotency.is_none().then(|| queued.clone());
    let connection = ChatConnection::new(app.clone(), request.principal.clone());
    let (reporter, TurnEvents { mut started, mut events, ended }) = turn_channels();
    let turn = execute_turn(app.clone(), request, connection.client(), reporter);
    // A disconnect does not cancel the turn, unless `on_disconnect` requests it (D-049).
    let mut turn = DetachOnDrop::new(app.tasks.clone(), turn.instrument(tracing::Span::current()));
    let no_result = || {
        ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal",
            "the turn ended without a result; see the server log",
        )
    };
    let started_or_queued = turn.until(async {
        tokio::select! {
            biased;
            started = &mut started => Some(started),
            () = queued.notified(), if stream => None,
        }
    });
    let Some(started) = started_or_queued.await else {
        // The turn is queued, perhaps for a long time: the response headers are sent now, so that neither
        // client nor proxies time out.
        let response = with_warnings(stream_queued(connection, started, events, ended), &warnings);
        return Ok(match session_id {
            Some(id) => with_session(response, &id),
            None => response,
        });
    };
    let started = started.map_err(|_| no_result())??;
    let span = tracing::Span::current();
    span.record("session_id", started.session_id.as_str()).record("run_id", started.run.as_ref());
    // The status code is known only when the model has started to answer.
    let first = if stream { turn.until(events.recv()).await } else { None };
    let ids = started.clone();
    let response = match first {
        // From here on the turn runs as a background task, independent of a slow client.
        Some(first) => stream_out(connection, started, first, events, ended),
        None => {
            let outcome = turn.until(ended).await.map_err(|_| no_result())?;
            connection.mark_answered();
            match outcome {
                Ok((outcome, notice)) => complete_response(&app, &started, &outcome, notice.as_deref(), stream),
                Err(e) => ApiError::from(e).into_response(),
            }
        }
    };
    Ok(with_ids(response, &ids))
}

/// Answers a request with `store: false`: the model is shown the prompt that the session would produce, and
/// nothing is stored.
async fn answer_without_storing(app: &AppState, request: TurnInput) -> ApiResult<Response> {
    let messages = app.tenure.preview(&request.principal, &request.turn_request).await?;
    let prompt = Prompt { messages, options: request.options, stream: request.stream };
    let mut chunks = request.model.ask(prompt).await?;
    use futures_util::StreamExt;
    let mut answer = tenure::run::ModelAnswer::with_max_bytes(app.tenure.limits().max_message_bytes);
    let Some(first) = chunks.next().await.transpose()? else {
        return Err(ModelError::Broken { reason: "the answer ended without any content".to_owned() }.into());
    };
    answer.add_chunk(&first)?;
    let first = match (first, request.stream) {
        (ModelChunk::Complete(body), false) => return Ok(json_response(body)),
        (ModelChunk::Complete(body), true) => as_chunk(&body),
        (ModelChunk::Chunk(chunk), _) => chunk,
    };
    let rest = stream::unfold(Some((chunks, answer)), move |state| async move {
        let (mut chunks, mut answer) = state?;
        let chunk = chunks.next().await.map(|c| c.and_then(|c| answer.add_chunk(&c).map(|()| c)));
        Some(match chunk {
            Some(Ok(ModelChunk::Chunk(chunk) | ModelChunk::Complete(chunk))) => (event(&chunk), Some((chunks, answer))),
            Some(Err(e)) => (event(&error_json(e.into())), None),
            None => (event("[DONE]"), None),
        })
    });
    let all = stream::iter([event(&first)]).chain(rest);
    Ok(event_stream(Body::from_stream(all.map(Ok::<_, std::convert::Infallible>))))
}
