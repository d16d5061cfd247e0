//! `/sessions/{id}/messages`: list, append, and messages discarded by rewinds.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult, ErrorBody};
use crate::http::extract::{IfMatch, JsonBytes, SessionPath, idempotency_key, must_be_object, parse};
use crate::http::query::StrictQuery;
use crate::http::view::{self, DiscardedList, MessageList, ReadErrors, WriteErrors};
use crate::sessions;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tenure::{Append, Message, Seq, run::OnExpired};
use utoipa::ToSchema;

/// List messages
///
/// Oldest first: from the beginning, after a position, or the most recent ones.
#[utoipa::path(
    get, path = "/sessions/{id}/messages", tag = "messages", operation_id = "list_messages",
    params(
        ("id" = String, Path, description = "The session"),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 100, description = "Page size; default 20"),
        ("after" = Option<u32>, Query, description = "Only messages after this position; the `next_cursor` of the previous page"),
        ("cursor" = Option<u32>, Query, description = "Alias of `after`"),
        ("last" = Option<u32>, Query, minimum = 1, maximum = 100, description = "The number of most recent messages; instead of `limit` and `after`"),
    ),
    responses((status = 200, description = "A page", body = MessageList), ReadErrors)
)]
pub async fn list(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    mut params: StrictQuery,
) -> ApiResult<Response> {
    let principal = caller.authorize_read()?;
    let max = app.config.limits.max_page;
    let last = params.count("last", max)?;
    let limit = params.count("limit", max)?;
    let expected = "the position of a message";
    let after: Option<u32> = params.parse("after", expected)?;
    let cursor: Option<u32> = params.parse("cursor", expected)?;
    params.reject_unknown()?;
    if after.is_some() && cursor.is_some() {
        return Err(ApiError::invalid("cursor", "use `after` or `cursor`, not both: they mean the same"));
    }
    let after = after.or(cursor);
    if last.is_some() && (limit.is_some() || after.is_some()) {
        return Err(ApiError::invalid("last", "use `last` alone, or `limit` and `after`"));
    }
    let (head, messages, first) = match last {
        Some(last) => {
            let (head, messages) =
                app.tenure.browsing(&principal).last_messages_with_head(&principal, &id, last).await?;
            let first = head.digest.messages.saturating_sub(messages.len());
            (head, messages, first)
        }
        None => {
            let first = after.map_or(0, |a| a as usize + 1);
            let limit = limit.unwrap_or(20.min(max));
            let (head, messages) = app.tenure.browsing(&principal).messages_from(&principal, &id, first, limit).await?;
            (head, messages, first)
        }
    };
    let end = first + messages.len();
    let next = (!messages.is_empty() && end < head.digest.messages).then(|| (end - 1).to_string());
    let body = view::list(&view::messages(&messages, first), next);
    Ok(view::json(StatusCode::OK, Some(head.seq), body))
}

/// Messages to append.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewMessages<'a> {
    /// The messages in order, in OpenAI's format. At least one.
    #[schema(value_type = Vec<Object>, min_items = 1)]
    #[serde(borrow)]
    messages: Vec<&'a RawValue>,
}

/// The result of an append.
#[derive(Debug, Serialize, ToSchema)]
pub struct AppendedView {
    /// The sequence number of the last record afterwards; the `ETag`.
    seq: Seq,
    /// The position of the first new message.
    position: usize,
    /// The number of messages in the session afterwards.
    message_count: usize,
}

/// Append messages
///
/// Atomic; durable when the response is sent.
#[utoipa::path(
    post, path = "/sessions/{id}/messages", tag = "messages", operation_id = "append_messages",
    params(
        ("id" = String, Path, description = "The session"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` that the session must have (optimistic concurrency)"),
        ("Idempotency-Key" = Option<String>, Header, description = "Requests with the same key and messages take effect once"),
    ),
    request_body(content = NewMessages<'static>),
    responses(
        (status = 201, description = "The messages are durable", body = AppendedView),
        WriteErrors,
        (status = 422, description = "The idempotency key was used with different messages", body = ErrorBody),
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
    let principal = caller.authorize_write()?;
    let append = Append {
        messages: parse_messages(&bytes)?,
        if_match: if_match.0,
        idempotency_key: idempotency_key(&headers)?,
        ..Append::default()
    };
    let on_expired = match if_match.0 {
        // Restoring changes the session, so that it no longer matches the condition.
        Some(_) => OnExpired::Reject,
        None => app.config.sessions.on_expired,
    };
    let appended = app.tenure.append(&principal, &id, append.clone()).await;
    let appended = match sessions::unless_expired(&app, &principal, &id, on_expired, appended).await {
        Ok(Some(appended)) => Ok(appended),
        Ok(None) => app.tenure.append(&principal, &id, append).await,
        Err(e) => Err(e),
    };
    let appended = appended.map_err(|e| if_match.error(e))?;
    let view = AppendedView { seq: appended.seq, position: appended.position, message_count: appended.messages };
    Ok(view::json(StatusCode::CREATED, Some(appended.seq), view::to_json(&view)))
}

fn parse_messages(bytes: &[u8]) -> ApiResult<Vec<Message>> {
    must_be_object(bytes)?;
    let body: NewMessages<'_> = match serde_json::from_slice(bytes) {
        Ok(body) => body,
        // Parsed again with path tracking, which is slower, to name the invalid field.
        Err(_) => parse(bytes)?,
    };
    if body.messages.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` is empty; send at least one message"));
    }
    let mut messages = Vec::with_capacity(body.messages.len());
    for (i, raw) in body.messages.into_iter().enumerate() {
        messages.push(Message::parse(raw.get()).map_err(|e| e.within(&format!("messages[{i}]")))?);
    }
    Ok(messages)
}

/// List discarded messages
#[utoipa::path(
    get, path = "/sessions/{id}/discarded", tag = "messages", operation_id = "list_discarded",
    params(("id" = String, Path, description = "The session")),
    responses((status = 200, description = "The discarded messages, by rewind", body = DiscardedList), ReadErrors)
)]
pub async fn discarded(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
) -> ApiResult<Response> {
    let principal = caller.authorize_read()?;
    let head = app.tenure.get_live_head(&principal, &id).await?;
    let discarded_messages = app.tenure.browsing(&principal).discarded(&principal, &id).await?;
    Ok(view::json(StatusCode::OK, Some(head.seq), view::list(&view::discarded(&discarded_messages), None)))
}
