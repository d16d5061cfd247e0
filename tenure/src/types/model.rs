//! Responses of a model, as a stream of chunks or as a whole, and the ways in which a model request fails.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A part of a model's response, exactly as the model server sent it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelChunk {
    /// One chunk of a stream (`chat.completion.chunk`).
    Chunk(String),
    /// The complete response (`chat.completion`).
    Complete(String),
}

/// The reason why a model request failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The model server responded with an error, which is passed on unchanged.
    #[error("the model server responded with status {status}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The content type of the body.
        content_type: String,
        /// The body of the response.
        body: String,
        /// The value of the `Retry-After` header.
        retry_after: Option<String>,
    },
    /// A rate limit of this server does not admit the request.
    #[error("the limit `{limit}` of {max} is exceeded; retry in {} s", retry_after.as_secs() + 1)]
    RateLimited {
        /// The name of the limit.
        limit: &'static str,
        /// The limit.
        max: u64,
        /// The time until the request would be admitted.
        retry_after: Duration,
    },
    /// The model server cannot be reached.
    #[error("the model server cannot be reached: {reason}")]
    Unreachable {
        /// The error reported by the operating system or the HTTP client.
        reason: String,
    },
    /// The model server did not respond in time.
    #[error("the model server timed out: {reason}")]
    TimedOut {
        /// A description of the timeout that expired.
        reason: String,
    },
    /// The response exceeds a size limit. The part received until then is stored.
    #[error("the model's answer exceeds the limit `max_message_bytes` of {limit}; it was truncated there")]
    TooLarge {
        /// The limit, in bytes.
        limit: usize,
    },
    /// The response was truncated or is malformed.
    #[error("the model's answer is malformed or incomplete: {reason}")]
    Broken {
        /// A description of what is wrong.
        reason: String,
    },
}

impl ModelError {
    /// Returns a stable code for the kind of error.
    pub fn code(&self) -> &'static str {
        match self {
            ModelError::Refused { .. } => "upstream_refused",
            ModelError::RateLimited { .. } => "rate_limit_exceeded",
            ModelError::Unreachable { .. } => "upstream_unreachable",
            ModelError::TimedOut { .. } => "upstream_timeout",
            ModelError::TooLarge { .. } => "answer_too_large",
            ModelError::Broken { .. } => "upstream_broken",
        }
    }

    /// Returns whether and when to retry, if the request was refused because of a rate limit or overload: with
    /// status 429 or 503, or by a limit of this server. `None` for any other error.
    pub fn retry_hint(&self, now: Timestamp) -> Option<RetryHint> {
        match self {
            ModelError::Refused { status: 429 | 503, retry_after, .. } => {
                Some(RetryHint { after: retry_after.as_deref().and_then(|value| parse_retry_after(value, now)) })
            }
            ModelError::RateLimited { retry_after, .. } => Some(RetryHint { after: Some(*retry_after) }),
            _ => None,
        }
    }
}

/// When a refused request may be retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RetryHint {
    /// The time to wait. `None` means that the server did not say.
    pub after: Option<Duration>,
}

/// Parses the value of a `Retry-After` header: a number of seconds, or an HTTP date. A date that has passed
/// means no wait.
fn parse_retry_after(value: &str, now: Timestamp) -> Option<Duration> {
    let value = value.trim();
    if let Ok(seconds) = value.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let date = jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(value).ok()?;
    Some(Duration::try_from(date.duration_since(now)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now: Timestamp = "1994-11-06T08:49:30Z".parse().unwrap();
        for (value, want) in [
            ("7", Some(Duration::from_secs(7))),
            (" 0 ", Some(Duration::ZERO)),
            ("0.5", Some(Duration::from_millis(500))),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(Duration::from_secs(7))),
            ("Sun, 06 Nov 1994 08:49:27 GMT", Some(Duration::ZERO)),
            ("-1", None),
            ("soon", None),
            ("NaN", None),
            ("1e300", None),
        ] {
            let refused = |status| ModelError::Refused {
                status,
                content_type: String::new(),
                body: String::new(),
                retry_after: Some(value.to_owned()),
            };
            assert_eq!(refused(429).retry_hint(now), Some(RetryHint { after: want }), "{value}");
            assert_eq!(refused(503).retry_hint(now), Some(RetryHint { after: want }), "{value}");
            assert_eq!(refused(500).retry_hint(now), None);
        }
    }
}
