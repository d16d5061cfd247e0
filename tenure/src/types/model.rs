//! Responses of a model, as a stream of chunks or as a whole, and the ways in which a model request fails.

use serde::{Deserialize, Serialize};

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
            ModelError::Unreachable { .. } => "upstream_unreachable",
            ModelError::TimedOut { .. } => "upstream_timeout",
            ModelError::TooLarge { .. } => "answer_too_large",
            ModelError::Broken { .. } => "upstream_broken",
        }
    }
}
