//! `/sessions/{id}/messages`: list, append, and messages discarded by rewinds.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult, ErrorBody};
use crate::http::extract::{IfMatch, JsonBytes, SessionPath, idempotency_key, must_be_object, parse};
use crate::http::query::StrictQuery;
use crate::http::view::{self, DiscardedList, MessageList, Reading, Writing};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tenure::{Append, Message, Seq};
use utoipa::ToSchema;

/// List messages
///
/// Oldest first: from the beginning, after a position, or the last so many.
#[utoipa::path(
    get, path = "/sessions/{id}/messages", tag = "messages", operation_id = "list_messages",
    params(
        ("id" = String, Path, description = "The session"),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 100, description = "At most so many; 20 if not given"),
        ("after" = Option<u32>, Query, description = "Only those after this position; the `next_cursor` of the page before"),
        ("cursor" = Option<u32>, Query, description = "The same as `after`"),
        ("last" = Option<u32>, Query, minimum = 1, maximum = 100, description = "The last so many; instead of `limit` and `after`"),
    ),
    responses((status = 200, description = "A page", body = MessageList), Reading)
)]
pub async fn list(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    mut pairs: StrictQuery,
) -> ApiResult<Response> {
    let who = caller.reads()?;
    let max = app.config.limits.max_page;
    let last = pairs.count("last", max)?;
    let limited = pairs.count("limit", max)?;
    let place = "the position of a message";
    let (after, cursor): (Option<u32>, Option<u32>) = (pairs.read("after", place)?, pairs.read("cursor", place)?);
    pairs.end()?;
    if after.is_some() && cursor.is_some() {
        return Err(ApiError::invalid("cursor", "use `after` or `cursor`, not both: they mean the same"));
    }
    let after = after.or(cursor);
    if last.is_some() && (limited.is_some() || after.is_some()) {
        return Err(ApiError::invalid("last", "use `last` alone, or `limit` and `after`"));
    }
    let (head, said, first) = match last {
        Some(last) => {
            let (head, said) = app.tenure.browsing(&who).last_messages(&who, &id, last).await?;
            let first = head.mark.messages.saturating_sub(said.len());
            (head, said, first)
        }
        None => {
            let first = after.map_or(0, |a| a as usize + 1);
            let limit = limited.unwrap_or(20.min(max));
            let (head, said) = app.tenure.browsing(&who).messages_from(&who, &id, first, limit).await?;
            (head, said, first)
        }
    };
    let end = first + said.len();
    let next = (!said.is_empty() && end < head.mark.messages).then(|| (end - 1).to_string());
    let body = view::list(&view::messages(&said, first), next);
    Ok(view::json(StatusCode::OK, Some(head.seq), body))
}

/// Messages to add.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewMessages<'a> {
    /// What was said, in order, in OpenAI's shape. At least one.
    #[schema(value_type = Vec<Object>, min_items = 1)]
    #[serde(borrow)]
    messages: Vec<&'a RawValue>,
}

/// What an append did.
#[derive(Debug, Serialize, ToSchema)]
pub struct AppendedView {
    /// The end of the log after it; the `ETag`.
    seq: Seq,
    /// The position of the first new message.
    position: usize,
    /// How many messages the session has now.
    message_count: usize,
}

/// Append messages
///
/// All or none; durable when it answers.
#[utoipa::path(
    post, path = "/sessions/{id}/messages", tag = "messages", operation_id = "append_messages",
    params(
        ("id" = String, Path, description = "The session"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` it must still have"),
        ("Idempotency-Key" = Option<String>, Header, description = "The same key with the same messages is done once"),
    ),
    request_body(content = NewMessages<'static>),
    responses(
        (status = 201, description = "They are kept", body = AppendedView),
        Writing,
        (status = 422, description = "The idempotency key came with other messages before", body = ErrorBody),
    )
)]
pub async fn append(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    if_match: IfMatch,
    headers: HeaderMap,
    JsonBytes(bytes): JsonBytes,
) -> ApiResult<Response> {
    let who = caller.writes()?;
    let append = Append {
        messages: read(&bytes)?,
        expect: if_match.0,
        idempotency_key: idempotency_key(&headers)?,
        ..Append::default()
    };
    let done = app.tenure.append(&who, &id, append).await.map_err(|e| if_match.error(e))?;
    let view = AppendedView { seq: done.seq, position: done.position, message_count: done.messages };
    Ok(view::json(StatusCode::CREATED, Some(done.seq), view::text(&view)))
}

fn read(bytes: &[u8]) -> ApiResult<Vec<Message>> {
    must_be_object(bytes)?;
    let body: NewMessages<'_> = match serde_json::from_slice(bytes) {
        Ok(body) => body,
        // Parsed again with path tracking, which is slower, to name the invalid field.
        Err(_) => parse(bytes)?,
    };
    if body.messages.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` is empty; say something"));
    }
    let mut messages = Vec::with_capacity(body.messages.len());
    for (i, raw) in body.messages.into_iter().enumerate() {
        messages.push(Message::parse(raw.get()).map_err(|e| e.within(&format!("messages[{i}]")))?);
    }
    Ok(messages)
}

/// What rewinds have cut off
#[utoipa::path(
    get, path = "/sessions/{id}/discarded", tag = "messages", operation_id = "list_discarded",
    params(("id" = String, Path, description = "The session")),
    responses((status = 200, description = "All of it", body = DiscardedList), Reading)
)]
pub async fn discarded(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
) -> ApiResult<Response> {
    let who = caller.reads()?;
    let head = app.tenure.live(&who, &id).await?;
    let cut = app.tenure.browsing(&who).discarded(&who, &id).await?;
    Ok(view::json(StatusCode::OK, Some(head.seq), view::list(&view::discarded(&cut), None)))
}
