//! What answers: a model, wherever it runs.

use crate::types::message::Message;
use crate::types::model::{ModelError, Piece};
use crate::types::raw_object::Fields;
use async_trait::async_trait;
use futures_core::Stream;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

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

/// The parts of an answer as they arrive.
pub type Pieces = Pin<Box<dyn Stream<Item = Result<Piece, ModelError>> + Send>>;

/// A model, wherever it runs.
#[async_trait]
pub trait Model: Send + Sync + 'static {
    /// Asks it. An answer that is not streamed is a stream of one piece.
    async fn ask(&self, prompt: Prompt) -> Result<Pieces, ModelError>;
}

/// The first question of a turn, without what is said: that is known once the session is found.
#[derive(Clone)]
pub struct First {
    /// What answers.
    pub model: Arc<dyn Model>,
    /// Everything else that the client sent.
    pub options: Fields,
    /// Whether the answer should come in pieces.
    pub stream: bool,
}

impl First {
    pub(crate) fn ask(&self, messages: Vec<Message>) -> Asking {
        let (model, options, stream) = (self.model.clone(), self.options.clone(), self.stream);
        let asked = async move { model.ask(Prompt { messages, options, stream }).await };
        Asking { asked: Box::pin(asked), said: None }
    }
}

impl std::fmt::Debug for First {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("First")
    }
}

/// A model that is being asked. Whoever drops it does not want to know any more.
pub(crate) struct Asking {
    asked: Pin<Box<dyn Future<Output = Result<Pieces, ModelError>> + Send>>,
    said: Option<Result<Pieces, ModelError>>,
}

impl Asking {
    fn poll(&mut self, context: &mut Context<'_>) {
        if self.said.is_none()
            && let Poll::Ready(said) = self.asked.as_mut().poll(context)
        {
            self.said = Some(said);
        }
    }

    pub async fn said(self) -> Result<Pieces, ModelError> {
        match self.said {
            Some(said) => said,
            None => self.asked.await,
        }
    }
}

impl std::fmt::Debug for Asking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Asking")
    }
}

/// Where something that is done leaves a model to be asked meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Beside(Mutex<Option<Asking>>);

impl Beside {
    /// Asks this one, and no longer the one before.
    pub fn set(&self, asking: Asking) {
        *self.lock() = Some(asking);
    }

    /// Does something, and asks whoever was left here on the way.
    pub async fn during<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        std::future::poll_fn(|context| {
            let done = work.as_mut().poll(context);
            if let Some(asking) = &mut *self.lock() {
                asking.poll(context);
            }
            done
        })
        .await
    }

    pub fn take(&self) -> Option<Asking> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Asking>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
