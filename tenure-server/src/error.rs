//! Error responses of the HTTP API. Every route uses the error envelope of OpenAI's API.

use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tenure::{Error, ModelError, run::TurnError};
use utoipa::ToSchema;

/// Maximum length in bytes of an error's message (`MAX_MESSAGE`) and of its `param` (`MAX_PARAM`). Both may echo
/// input of the client, so they are truncated.
const MAX_MESSAGE: usize = 1000;
const MAX_PARAM: usize = 200;

/// Truncates a text to `max` bytes at a character boundary and appends `…` if anything was removed.
fn truncated(mut text: String, max: usize) -> String {
    if text.len() > max {
        text.truncate(text.floor_char_boundary(max));
        text.push('…');
    }
    text
}

/// The result type of request handlers.
pub type ApiResult<T> = Result<T, ApiError>;

/// An error response: HTTP status, stable code, message, optional `param` and extra headers.
#[derive(Debug)]
pub struct ApiError {
    /// The HTTP status.
    pub status: StatusCode,
    code: &'static str,
    message: String,
    param: Option<String>,
    headers: Vec<(HeaderName, HeaderValue)>,
    /// Content type and body of a model server's error response, forwarded to the client unchanged.
    verbatim: Option<Box<(String, String)>>,
}

/// The error envelope of every route: `{"error": {…}}`.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    /// Details of the error.
    pub error: ErrorDetail,
}

/// Details of the error.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorDetail {
    /// Human-readable description of the error and how to fix it.
    pub message: String,
    /// Error category, as in OpenAI's API.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Stable error code for programs.
    pub code: &'static str,
    /// Path of the invalid field or parameter, or the name of the exceeded limit.
    pub param: Option<String>,
}

/// Value of `Retry-After` in seconds on a 503 response. It is short because the server has already waited for the
/// unavailable dependency before it responds.
const RETRY_AFTER: &str = "1";

impl ApiError {
    /// Creates an error with its own status and code. The message is truncated to `MAX_MESSAGE` bytes.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let message = truncated(message.into(), MAX_MESSAGE);
        Self { status, code, message, param: None, headers: Vec::new(), verbatim: None }
    }

    /// Creates a 400 `invalid` error; `param` is the path of the invalid field or parameter.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid", message).with_param(param)
    }

    /// Creates a 404 `not_found` error.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    /// Creates a 413 `too_large` error for an exceeded limit; `param` is the name of that limit.
    pub fn too_large(limit: &'static str, message: impl Into<String>) -> Self {
        Self { param: Some(limit.to_owned()), ..Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message) }
    }

    /// Creates a 408 `too_slow` error: the client sent nothing for longer than the named limit. The connection is
    /// closed without reading the rest of the request.
    pub fn too_slow(limit: &'static str, message: impl Into<String>) -> Self {
        let error =
            Self { param: Some(limit.to_owned()), ..Self::new(StatusCode::REQUEST_TIMEOUT, "too_slow", message) };
        error.with_header(header::CONNECTION, "close")
    }

    /// Sets `param`, the path of the invalid field or parameter, truncated to `MAX_PARAM` bytes.
    #[must_use]
    pub fn with_param(self, param: impl Into<String>) -> Self {
        Self { param: Some(truncated(param.into(), MAX_PARAM)), ..self }
    }

    /// Sets `param` unless the error already has one.
    #[must_use]
    pub fn or_param(self, param: &str) -> Self {
        Self { param: self.param.or_else(|| Some(param.to_owned())), ..self }
    }

    /// Adds a response header. A value that is not valid in a header is ignored.
    #[must_use]
    pub fn with_header(mut self, name: HeaderName, value: &str) -> Self {
        if let Ok(value) = HeaderValue::from_str(value) {
            self.headers.push((name, value));
        }
        self
    }

    /// Adds `x-should-retry: false`. Used where a retry would restart a cancelled run or fail in the same way:
    /// client SDKs retry a 409 or a 5xx automatically unless this header forbids it.
    #[must_use]
    pub fn not_to_be_retried(self) -> Self {
        self.with_header(HeaderName::from_static("x-should-retry"), "false")
    }

    /// Returns the error envelope, as it is also sent inside an event stream.
    pub fn body(&self) -> ErrorBody {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            400..500 => "invalid_request_error",
            _ => "server_error",
        };
        let error = ErrorDetail { message: self.message.clone(), kind, code: self.code, param: self.param.clone() };
        ErrorBody { error }
    }

    /// Returns the stable error code for programs.
    pub fn code(&self) -> &'static str {
        self.code
    }
}

impl From<tenure::session::InvalidName> for ApiError {
    fn from(invalid: tenure::session::InvalidName) -> Self {
        tenure::Error::from(invalid).into()
    }
}

impl From<Error> for ApiError {
    fn from(e: Error) -> Self {
        let status = match &e {
            Error::NotFound { .. }
            | Error::NoSuchPoint { .. }
            | Error::NoSuchRun { .. }
            | Error::NoSuchReview { .. } => StatusCode::NOT_FOUND,
            Error::Gone { .. } => StatusCode::GONE,
            Error::Paused { .. }
            | Error::Busy { .. }
            | Error::OtherAssistant { .. }
            | Error::Superseded { .. }
            | Error::Decided { .. }
            | Error::Claimed { .. }
            | Error::Exists { .. }
            | Error::Conflict { .. } => StatusCode::CONFLICT,
            Error::KeyReused { .. } => StatusCode::UNPROCESSABLE_ENTITY,
            Error::Invalid { .. } | Error::NewerFormat { .. } => StatusCode::BAD_REQUEST,
            Error::QuotaExceeded { .. } => StatusCode::TOO_MANY_REQUESTS,
            Error::TooLarge { limit: "max_queue" | "max_waiting_reads", .. } => StatusCode::TOO_MANY_REQUESTS,
            Error::TooLarge { limit: "max_page", .. } => StatusCode::BAD_REQUEST,
            Error::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Error::Full { .. } => StatusCode::INSUFFICIENT_STORAGE,
            Error::Unavailable { .. } | Error::Locked { .. } => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        if status.is_server_error() {
            tracing::error!(code = e.code(), error = %e, "a store operation failed");
        }
        let param = match &e {
            Error::Invalid { param, .. } if !param.is_empty() => Some(param.clone()),
            Error::TooLarge { limit, .. } | Error::QuotaExceeded { limit, .. } => Some((*limit).to_owned()),
            _ => None,
        };
        let message = match &e {
            Error::Gone { session_id, status } => {
                format!("session {session_id} is {status}; POST /sessions/{session_id}/restore restores it")
            }
            _ => e.to_string(),
        };
        let param = param.map(|param| truncated(param, MAX_PARAM));
        let error = Self { param, ..Self::new(status, e.code(), message) };
        match e {
            Error::TooLarge { limit: "max_waiting_reads", .. } => error.with_header(header::RETRY_AFTER, "1"),
            Error::Paused { .. }
            | Error::OtherAssistant { .. }
            | Error::Superseded { .. }
            | Error::QuotaExceeded { .. } => error.not_to_be_retried(),
            _ => error,
        }
    }
}

impl From<ModelError> for ApiError {
    fn from(e: ModelError) -> Self {
        let code = e.code();
        let status = match &e {
            ModelError::Refused { status, .. } => StatusCode::from_u16(*status).unwrap_or(StatusCode::BAD_GATEWAY),
            ModelError::RateLimited { .. } => StatusCode::TOO_MANY_REQUESTS,
            ModelError::TimedOut { .. } => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::BAD_GATEWAY,
        };
        let mut error = Self::new(status, code, e.to_string());
        if let ModelError::TooLarge { .. } = e {
            return error.with_param("max_message_bytes").not_to_be_retried();
        }
        if let ModelError::RateLimited { limit, retry_after, .. } = &e {
            return error.with_param(*limit).with_header(header::RETRY_AFTER, &(retry_after.as_secs() + 1).to_string());
        }
        if let ModelError::Refused { content_type, body, retry_after, .. } = e {
            if let Some(after) = retry_after {
                error = error.with_header(header::RETRY_AFTER, &after);
            }
            error.verbatim = Some(Box::new((content_type, body)));
        }
        error
    }
}

impl From<TurnError> for ApiError {
    fn from(e: TurnError) -> Self {
        match e {
            TurnError::Store(e) => e.into(),
            TurnError::Model(e) => e.into(),
            TurnError::Stopped | TurnError::Cancelled => {
                Self::new(StatusCode::CONFLICT, e.code(), e.to_string()).not_to_be_retried()
            }
            TurnError::Instructions(_) => {
                Self::new(StatusCode::UNPROCESSABLE_ENTITY, e.code(), e.to_string()).not_to_be_retried()
            }
            TurnError::Limit { code: code @ ("out_of_time" | "tool_timeout"), .. } => {
                Self::new(StatusCode::GATEWAY_TIMEOUT, code, e.to_string()).not_to_be_retried()
            }
            TurnError::Limit { code, .. } => {
                Self::new(StatusCode::BAD_GATEWAY, code, e.to_string()).not_to_be_retried()
            }
            _ => Self::new(StatusCode::BAD_GATEWAY, e.code(), e.to_string()),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = match self.verbatim.as_deref() {
            Some((kind, body)) => (self.status, [(header::CONTENT_TYPE, kind.clone())], body.clone()).into_response(),
            None => (self.status, axum::Json(self.body())).into_response(),
        };
        let has_own = self.headers.iter().any(|(name, _)| *name == header::RETRY_AFTER);
        if self.status == StatusCode::SERVICE_UNAVAILABLE && self.verbatim.is_none() && !has_own {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER));
        }
        response
            .headers_mut()
            .extend(self.headers.into_iter().map(|(n, v)| (Some(n), v)).filter_map(|(n, v)| Some((n?, v))));
        response
    }
}

/// Formats an error with its causes, for the terminal. It ends at an error of the library: its message includes what
/// a user needs to know of the cause, and the cause itself may quote stored data (D-128).
pub fn with_causes(e: &anyhow::Error) -> String {
    let mut texts = Vec::new();
    for cause in e.chain() {
        texts.push(cause.to_string());
        if cause.is::<Error>() || cause.is::<TurnError>() {
            break;
        }
    }
    texts.join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_of_a_library_error_is_not_printed_again() {
        let io = std::io::Error::other("the disk is on fire");
        let error = Error::unavailable(format!("/data: {io}")).with_source(io);
        let error = anyhow::Error::from(error).context("cannot open the store");
        assert_eq!(
            with_causes(&error),
            "cannot open the store: the store is not available: /data: the disk is on fire"
        );
        let other = anyhow::anyhow!("no such file").context("cannot read it");
        assert_eq!(with_causes(&other), format!("{other:#}"));
    }
}
