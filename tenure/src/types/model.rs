//! What a model answers, chunk by chunk, and how it fails.

use serde::{Deserialize, Serialize};

/// A part of an answer, as the model's server wrote it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Piece {
    /// One chunk of a stream (`chat.completion.chunk`).
    Chunk(String),
    /// The whole answer at once (`chat.completion`).
    Whole(String),
}

/// Why a model did not answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ModelError {
    /// Its server answered with an error of its own, which is passed on as it is.
    #[error("the model's server answered with status {status}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The body's type.
        content_type: String,
        /// The body.
        body: String,
        /// How long it asks to wait.
        retry_after: Option<String>,
    },
    /// Its server can not be reached.
    #[error("the model's server can not be reached: {why}")]
    Unreachable {
        /// What the system said.
        why: String,
    },
    /// Its server took too long.
    #[error("the model's server took too long: {why}")]
    TimedOut {
        /// Which time ran out.
        why: String,
    },
    /// Its answer is over a limit. What was said until then is kept.
    #[error("the model's answer is over the limit `max_message_bytes` of {limit}; it was ended there")]
    TooLarge {
        /// The limit, in bytes.
        limit: usize,
    },
    /// Its answer broke off, or is no answer.
    #[error("the model's answer is broken: {why}")]
    Broken {
        /// What is wrong with it.
        why: String,
    },
}

impl ModelError {
    /// One stable word for each kind.
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
