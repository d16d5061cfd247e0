//! What answers: a model, wherever it runs.

use crate::fields::Fields;
use crate::message::Message;
use async_trait::async_trait;
use futures_core::Stream;
use std::pin::Pin;

/// What a model is asked.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// The conversation, valid for every OpenAI-style server.
    pub messages: Vec<Message>,
    /// Everything else that the client sent, to be passed on as it is.
    pub options: Fields,
    /// Whether the answer should come in pieces.
    pub stream: bool,
}

/// A part of an answer, as the model's server wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// One chunk of a stream (`chat.completion.chunk`).
    Chunk(String),
    /// The whole answer at once (`chat.completion`).
    Whole(String),
}

/// The parts of an answer as they arrive.
pub type Pieces = Pin<Box<dyn Stream<Item = Result<Piece, ModelError>> + Send>>;

/// A model, wherever it runs.
#[async_trait]
pub trait Model: Send + Sync + 'static {
    /// Asks it. An answer that is not streamed is a stream of one piece.
    async fn ask(&self, prompt: Prompt) -> Result<Pieces, ModelError>;
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
            ModelError::Broken { .. } => "upstream_broken",
        }
    }
}
