//! Request bodies in memory: a budget for all of them, and one for those of each principal.
//!
//! A reservation grows with the body as it is received and is released with the body's bytes, so that unfinished bodies
//! count as well as those of requests that are being handled.

use crate::auth::Caller;
use crate::error::ApiError;
use crate::net::connections::Connection;
use crate::serve::Shared;
use axum::body::Bytes;
use axum::extract::{FromRequestParts, Request};
use axum::http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tower_http::timeout::{TimeoutBody, TimeoutError};

/// The bytes of request bodies in memory.
#[derive(Debug)]
pub struct BodyBudget {
    max: usize,
    max_per_principal: usize,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    all: usize,
    by_principal: HashMap<String, usize>,
}

/// A part of the budget. Dropping it gives it back.
#[derive(Debug)]
struct Reservation {
    budget: Arc<BodyBudget>,
    principal: String,
    bytes: usize,
}

/// The first buffer of a body.
const FIRST_BUFFER: usize = 16 << 10;

impl BodyBudget {
    /// Nothing is used yet.
    pub fn new(limits: &crate::config::Limits) -> Arc<Self> {
        Arc::new(Self {
            max: limits.max_inflight_body_bytes,
            max_per_principal: limits.max_principal_body_bytes,
            used: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reserve(self: &Arc<Self>, principal: String) -> Reservation {
        Reservation { budget: self.clone(), principal, bytes: 0 }
    }
}

impl Reservation {
    /// Makes it larger. One principal over its budget gets 429, all of them together over theirs 503; nothing is
    /// reserved then.
    fn grow(&mut self, more: usize) -> Result<(), ApiError> {
        let mut used = self.budget.lock();
        let own = used.by_principal.get(&self.principal).copied().unwrap_or(0);
        let max = self.budget.max_per_principal;
        if own + more > max {
            let message = format!(
                "the request bodies of this principal are over the limit `max_principal_body_bytes` of {max} together; send fewer at once"
            );
            return Err(exceeded(StatusCode::TOO_MANY_REQUESTS, "max_principal_body_bytes", message));
        }
        let max = self.budget.max;
        if used.all + more > max {
            let message = format!(
                "all request bodies together are over the limit `max_inflight_body_bytes` of {max}; try again in a moment"
            );
            return Err(exceeded(StatusCode::SERVICE_UNAVAILABLE, "max_inflight_body_bytes", message));
        }
        used.all += more;
        *used.by_principal.entry(self.principal.clone()).or_default() += more;
        self.bytes += more;
        Ok(())
    }
}

fn exceeded(status: StatusCode, limit: &'static str, message: String) -> ApiError {
    ApiError::new(status, "body_budget_exceeded", message).with_param(limit).with_header(header::RETRY_AFTER, "1")
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let mut used = self.budget.lock();
        used.all -= self.bytes;
        if let Some(own) = used.by_principal.get_mut(&self.principal) {
            *own -= self.bytes;
            if *own == 0 {
                used.by_principal.remove(&self.principal);
            }
        }
    }
}

/// A body with what is reserved for it.
struct Reserved {
    bytes: Vec<u8>,
    _reservation: Reservation,
}

impl AsRef<[u8]> for Reserved {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads the body of a request, after its caller was authenticated. The budget is held for as long as the bytes are.
pub async fn read(request: Request, app: &Shared) -> Result<Bytes, ApiError> {
    let connection = request.extensions().get::<Arc<Connection>>().cloned();
    let result = receive(request, app).await;
    if let (Err(_), Some(connection)) = (&result, connection) {
        connection.leaves_unread();
    }
    result
}

async fn receive(request: Request, app: &Shared) -> Result<Bytes, ApiError> {
    let (max, time) = (app.config.limits.max_body_bytes, app.config.limits.body_timeout);
    let (mut parts, body) = request.into_parts();
    let caller = match parts.extensions.get::<Caller>() {
        Some(caller) => caller.clone(),
        None => Caller::from_request_parts(&mut parts, app).await?,
    };
    let mut reservation = app.bodies.reserve(caller.budget_owner());
    let announced = content_length(&parts.headers);
    let too_large = || {
        let message = format!("the body is over the limit `max_body_bytes` of {max}; send less, or raise the limit");
        ApiError::too_large("max_body_bytes", message)
    };
    if announced.is_some_and(|length| length > max) {
        return Err(too_large());
    }
    let body = TimeoutBody::new(time.duration().unwrap_or(Duration::MAX), body);
    let mut body = std::pin::pin!(body);
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| match e.downcast_ref::<TimeoutError>() {
            Some(_) => ApiError::too_slow(
                "body_timeout",
                format!("nothing came of the body for longer than the limit `body_timeout` of {time}; send it again"),
            ),
            None => ApiError::invalid("body", "the body ended before it was complete"),
        })?;
        let Ok(data) = frame.into_data() else { continue };
        let length = bytes.len() + data.len();
        if length > max {
            return Err(too_large());
        }
        // Frames are copied and dropped: a small one can keep a large receive buffer alive.
        if length > bytes.capacity() {
            let capacity = (bytes.capacity() * 2).max(FIRST_BUFFER).min(announced.unwrap_or(max)).max(length);
            reservation.grow(capacity - bytes.capacity())?;
            bytes.reserve_exact(capacity - bytes.len());
        }
        bytes.extend_from_slice(&data);
    }
    Ok(Bytes::from_owner(Reserved { bytes, _reservation: reservation }))
}

fn content_length(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_is_shared_fairly_and_given_back() {
        let limits =
            crate::config::Limits { max_inflight_body_bytes: 100, max_principal_body_bytes: 60, ..Default::default() };
        let budget = BodyBudget::new(&limits);
        let (mut a, mut b) = (budget.reserve("a".into()), budget.reserve("b".into()));
        a.grow(50).unwrap();
        let mut again = budget.reserve("a".into());
        assert_eq!(again.grow(11).unwrap_err().status, StatusCode::TOO_MANY_REQUESTS);
        b.grow(50).unwrap();
        assert_eq!(b.grow(1).unwrap_err().status, StatusCode::SERVICE_UNAVAILABLE);
        drop(a);
        again.grow(50).unwrap();
        drop((b, again));
        let used = budget.lock();
        assert_eq!((used.all, used.by_principal.len()), (0, 0));
    }
}
