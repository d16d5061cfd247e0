//! The interface to language models, and speculative requests that run concurrently with a commit.

use crate::types::message::Message;
use crate::types::model::{ModelChunk, ModelError};
use crate::types::raw_object::RawObject;
use async_trait::async_trait;
use futures_core::Stream;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

/// A model request.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// The conversation, valid for every OpenAI-compatible server.
    pub messages: Vec<Message>,
    /// All other fields of the client's request, passed through unchanged.
    pub options: RawObject,
    /// Whether to stream the answer.
    pub stream: bool,
}

/// A stream of answer chunks.
pub type ModelStream = Pin<Box<dyn Stream<Item = Result<ModelChunk, ModelError>> + Send>>;

/// A language model, local or remote.
#[async_trait]
pub trait Model: Send + Sync + 'static {
    /// Sends a request. An answer that is not streamed is a stream of one chunk.
    async fn ask(&self, prompt: Prompt) -> Result<ModelStream, ModelError>;
}

/// Returns the stream of a model that answers with one message, complete and without usage.
///
/// ```
/// use serde_json::json;
/// use tenure::Message;
/// use tenure::run::model_answer;
///
/// let text = model_answer(Message::assistant("It is 21 degrees."));
/// let calls = model_answer(Message::assistant_tool_calls([("call_1", "weather", json!({"city": "Bern"}))]));
/// # drop((text, calls));
/// ```
pub fn model_answer(message: Message) -> ModelStream {
    let finish_reason = if message.tool_calls().is_empty() { "stop" } else { "tool_calls" };
    let body = format!(
        r#"{{"object":"chat.completion","choices":[{{"index":0,"message":{},"finish_reason":"{finish_reason}"}}]}}"#,
        message.as_str()
    );
    Box::pin(futures_util::stream::once(std::future::ready(Ok(ModelChunk::Complete(body)))))
}

/// The first model request of a turn without its messages, which are known only after the session
/// is loaded. Lets the request start before the commit is acknowledged (D-044).
#[derive(Clone)]
pub struct EagerModelCall {
    /// The model to call.
    pub model: Arc<dyn Model>,
    /// All other fields of the client's request.
    pub options: RawObject,
    /// Whether to stream the answer.
    pub stream: bool,
}

impl EagerModelCall {
    /// Creates the request with its messages. It is sent when first polled.
    pub(crate) fn with_messages(&self, messages: Vec<Message>) -> SpeculativeCall {
        let model = self.model.clone();
        let options = self.options.clone();
        let stream = self.stream;
        let request = async move { model.ask(Prompt { messages, options, stream }).await };
        SpeculativeCall { request: Box::pin(request), response: None }
    }
}

impl std::fmt::Debug for EagerModelCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EagerModelCall")
    }
}

/// An in-flight model request. Dropping it cancels the request.
pub(crate) struct SpeculativeCall {
    request: Pin<Box<dyn Future<Output = Result<ModelStream, ModelError>> + Send>>,
    response: Option<Result<ModelStream, ModelError>>,
}

impl SpeculativeCall {
    fn poll(&mut self, context: &mut Context<'_>) {
        if self.response.is_none()
            && let Poll::Ready(response) = self.request.as_mut().poll(context)
        {
            self.response = Some(response);
        }
    }

    /// Waits for the response.
    pub async fn response(self) -> Result<ModelStream, ModelError> {
        match self.response {
            Some(response) => response,
            None => self.request.await,
        }
    }
}

impl std::fmt::Debug for SpeculativeCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SpeculativeCall")
    }
}

/// A slot for a speculative model request: the request is polled while the commit future runs, so
/// both make progress concurrently (D-044).
#[derive(Debug, Default)]
pub(crate) struct SpeculativeSlot(Mutex<Option<SpeculativeCall>>);

impl SpeculativeSlot {
    /// Sets the request to poll. A previous one is cancelled.
    pub fn set(&self, call: SpeculativeCall) {
        *self.lock() = Some(call);
    }

    /// Runs a future to completion and polls the slot's request, if there is one, along with it.
    pub async fn during<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        std::future::poll_fn(|context| {
            let output = work.as_mut().poll(context);
            if let Some(call) = &mut *self.lock() {
                call.poll(context);
            }
            output
        })
        .await
    }

    /// Removes the request from the slot.
    pub fn take(&self) -> Option<SpeculativeCall> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<SpeculativeCall>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
