//! ReadErrors of request bodies, within the size limit, the read timeout and the caller's memory budget.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::http::caller::authenticate;
use crate::net::body_budget::Reservation;
use crate::net::connections::Connection;
use axum::body::Bytes;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt;
use std::sync::Arc;
use std::time::Duration;
use tower_http::timeout::{TimeoutBody, TimeoutError};

/// Initial capacity of a body buffer, in bytes.
const INITIAL_CAPACITY: usize = 16 << 10;

/// A request body together with its memory reservation, which is released when the bytes are dropped.
struct ReservedBody {
    bytes: Vec<u8>,
    _reservation: Reservation,
}

impl AsRef<[u8]> for ReservedBody {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads the body of a request, after authenticating its caller. The memory budget is reserved as the buffer
/// grows and held until the returned bytes are dropped (D-108). On failure the connection is marked as having
/// an unread body.
pub async fn read(request: Request, app: &AppState) -> Result<Bytes, ApiError> {
    let connection = request.extensions().get::<Arc<Connection>>().cloned();
    let result = receive(request, app).await;
    if let (Err(_), Some(connection)) = (&result, connection) {
        connection.mark_unread();
    }
    result
}

async fn receive(request: Request, app: &AppState) -> Result<Bytes, ApiError> {
    let max = app.config.limits.max_body_bytes;
    let timeout = app.config.limits.body_timeout;
    let (mut parts, body) = request.into_parts();
    let caller = match parts.extensions.get::<Caller>() {
        Some(caller) => caller.clone(),
        None => authenticate(&mut parts, app).await?,
    };
    let mut reservation = app.body_budget.reserve(caller.budget_owner());
    let declared_length = content_length(&parts.headers);
    let too_large = || {
        let message = format!("the body is larger than `max_body_bytes` ({max}); send less, or raise the limit");
        ApiError::too_large("max_body_bytes", message)
    };
    if declared_length.is_some_and(|length| length > max) {
        return Err(too_large());
    }
    let body = TimeoutBody::new(timeout.duration().unwrap_or(Duration::MAX), body);
    let mut body = std::pin::pin!(body);
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| match e.downcast_ref::<TimeoutError>() {
            Some(_) => ApiError::too_slow(
                "body_timeout",
                format!("no body data was received for longer than `body_timeout` ({timeout}); retry the request"),
            ),
            None => ApiError::invalid("body", "the connection closed before the body was complete"),
        })?;
        let Ok(data) = frame.into_data() else { continue };
        let length = bytes.len() + data.len();
        if length > max {
            return Err(too_large());
        }
        // Frames are copied and dropped, since a small frame can keep a large receive buffer alive.
        if length > bytes.capacity() {
            let capacity = (bytes.capacity() * 2).max(INITIAL_CAPACITY).min(declared_length.unwrap_or(max)).max(length);
            reservation.grow(capacity - bytes.capacity())?;
            bytes.reserve_exact(capacity - bytes.len());
        }
        bytes.extend_from_slice(&data);
    }
    Ok(Bytes::from_owner(ReservedBody { bytes, _reservation: reservation }))
}

fn content_length(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}
