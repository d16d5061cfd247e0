//! A model behind an OpenAI-compatible server. Requests and answers are forwarded unchanged, except for the model name.

use super::sse::{MAX_ANSWER_BYTES, SseDecoder};
use crate::config::ModelConfig;
use crate::http_client::{TRACE, error_chain, with_trace_context};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::{Client, Response};
use std::time::Duration;
use tenure::{
    Message, Model, ModelError,
    run::{ModelChunk, ModelStream, Prompt},
    session::RawObject,
};
use tracing::Instrument;
use tracing::field::Empty;

/// Maximum size in bytes of an error body that is forwarded.
const MAX_ERROR_BYTES: usize = 1 << 20;

/// Client for one configured model server.
#[derive(Debug)]
pub struct Upstream {
    client: Client,
    url: String,
    /// The model name that is sent to the server. `None` means that the name in the request is sent.
    model: Option<String>,
    key: Option<String>,
    idle: Duration,
    retries: u32,
}

impl Upstream {
    /// Creates a client from the configuration of a model.
    pub fn new(config: &ModelConfig) -> anyhow::Result<Self> {
        let forever = Duration::from_secs(24 * 60 * 60);
        let client = crate::http_client::client()
            .connect_timeout(config.connect_timeout.duration().unwrap_or(forever))
            .redirect(reqwest::redirect::Policy::none())
            .build()?;
        Ok(Self {
            client,
            url: config.base_url.trim_end_matches('/').to_owned(),
            model: config.model.clone(),
            key: config.key()?,
            idle: config.idle_timeout.duration().unwrap_or(forever),
            retries: config.retries,
        })
    }

    /// Returns the ids of the server's models (`GET /models`), or `None` if it has no such list. Not retried.
    pub async fn list_models(&self) -> Result<Option<Vec<String>>, ModelError> {
        let response = match self.send("GET models", self.client.get(format!("{}/models", self.url))).await {
            Err(ModelError::Refused { status: 404 | 405 | 501, .. }) => return Ok(None),
            response => response?,
        };
        let body = self.read(response, MAX_ANSWER_BYTES).await?;
        let list: serde_json::Value =
            serde_json::from_str(&body).map_err(|_| broken("the response to GET /models is not JSON"))?;
        let ids = list["data"].as_array().into_iter().flatten().filter_map(|model| model["id"].as_str());
        Ok(Some(ids.map(str::to_owned).collect()))
    }

    /// Sends a body to a route of the server. Retries with exponential backoff if the server is unreachable or
    /// responds with 502, 503 or 504 without `Retry-After`, because no answer was generated then.
    pub async fn post(&self, route: &str, body: String) -> Result<Response, ModelError> {
        let body = Bytes::from(body);
        let mut tries = 0;
        loop {
            let outcome = self.post_once(route, body.clone()).await;
            let retryable = match &outcome {
                Err(ModelError::Unreachable { .. }) => true,
                // A server that says when to retry is asked again by the run.
                Err(ModelError::Refused { status, retry_after, .. }) => {
                    [502, 503, 504].contains(status) && retry_after.is_none()
                }
                _ => false,
            };
            if !retryable || tries >= self.retries {
                return outcome;
            }
            tries += 1;
            tracing::warn!(tries, route, "the model server is not ready; retrying");
            tokio::time::sleep(Duration::from_millis(100) * 2u32.pow(tries.min(6))).await;
        }
    }

    async fn post_once(&self, route: &str, body: Bytes) -> Result<Response, ModelError> {
        let request = self.client.post(format!("{}/{route}", self.url)).header(CONTENT_TYPE, "application/json");
        self.send(&format!("POST {route}"), request.body(body)).await
    }

    /// Sends a request, in a span that has the name of the operation.
    async fn send(&self, operation: &str, mut request: reqwest::RequestBuilder) -> Result<Response, ModelError> {
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        let span = tracing::info_span!(
            target: TRACE, "model_request", otel.name = operation, otel.kind = "client",
            gen_ai.request.model = self.model, http.response.status_code = Empty,
        );
        let request = with_trace_context(request, &span);
        let response = tokio::time::timeout(self.idle, request.send().instrument(span.clone())).await;
        let response = response.map_err(|_| self.idle_error())?.map_err(|e| unreachable_or_broken(&e))?;
        span.record("http.response.status_code", response.status().as_u16());
        if response.status().is_success() {
            return Ok(response);
        }
        let header = |name| response.headers().get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
        let content_type = header(CONTENT_TYPE);
        let retry_after = header(RETRY_AFTER);
        let status = response.status().as_u16();
        let body = self.read(response, MAX_ERROR_BYTES).await.unwrap_or_default();
        let content_type = content_type.unwrap_or_else(|| "text/plain".to_owned());
        // A status that is neither success nor error, such as a redirect, is of no use to the client.
        let status = if status < 400 { 502 } else { status };
        Err(ModelError::Refused { status, content_type, body, retry_after })
    }

    /// Forwards a request for embeddings. Returns content type and body of the response.
    pub async fn embed(&self, mut body: RawObject) -> Result<(String, String), ModelError> {
        if let Some(model) = &self.model {
            body.set("model", model);
        }
        let response = self.post("embeddings", body.to_string()).await?;
        let content_type =
            response.headers().get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or("application/json");
        let content_type = content_type.to_owned();
        Ok((content_type, self.read(response, MAX_ANSWER_BYTES).await?))
    }

    fn idle_error(&self) -> ModelError {
        ModelError::TimedOut { reason: format!("no data for {:?} (`idle_timeout`)", self.idle) }
    }

    async fn read(&self, response: Response, max: usize) -> Result<String, ModelError> {
        let mut body = Vec::new();
        let mut bytes = response.bytes_stream();
        while let Some(part) = tokio::time::timeout(self.idle, bytes.next()).await.map_err(|_| self.idle_error())? {
            body.extend_from_slice(
                &part.map_err(|e| broken(format!("the response was interrupted: {}", error_chain(&e))))?,
            );
            if body.len() > max {
                return Err(broken(format!("the response exceeds {max} bytes")));
            }
        }
        String::from_utf8(body).map_err(|_| broken("not valid UTF-8"))
    }

    fn stream(&self, response: Response) -> impl Stream<Item = Result<ModelChunk, ModelError>> + Send + use<> {
        let idle = self.idle;
        let idle_error = self.idle_error();
        let bytes = response.bytes_stream();
        let state = (Box::pin(bytes), SseDecoder::default(), false);
        stream::unfold(Some(state), move |state| {
            let idle_error = idle_error.clone();
            async move {
                let (mut bytes, mut events, mut finished) = state?;
                loop {
                    match events.next_event() {
                        Some(data) if data == "[DONE]" => return None,
                        Some(data) => {
                            finished |= data.contains("\"finish_reason\":\"") || data.contains("\"finish_reason\": \"");
                            return Some((Ok(ModelChunk::Chunk(data)), Some((bytes, events, finished))));
                        }
                        None => {}
                    }
                    let part = match tokio::time::timeout(idle, bytes.next()).await {
                        Err(_) => return Some((Err(idle_error), None)),
                        Ok(Some(Ok(part))) => part,
                        Ok(Some(Err(e))) => {
                            return Some((
                                Err(broken(format!("the stream was interrupted: {}", error_chain(&e)))),
                                None,
                            ));
                        }
                        // Some servers close the stream without `[DONE]` after they have sent a finish reason.
                        Ok(None) if finished => return None,
                        // Some servers omit the empty line after the last event.
                        Ok(None) if events.finish() => continue,
                        Ok(None) => {
                            return Some((Err(broken("the stream ended before the answer was complete")), None));
                        }
                    };
                    if let Err(reason) = events.push(&part) {
                        return Some((Err(broken(reason)), None));
                    }
                }
            }
        })
    }
}

#[async_trait]
impl Model for Upstream {
    async fn ask(&self, prompt: Prompt) -> Result<ModelStream, ModelError> {
        let mut body = prompt.options;
        if let Some(model) = &self.model {
            body.set("model", model);
        }
        let body = body.text_with("messages", &messages_json(&prompt.messages));
        let response = self.post("chat/completions", body).await?;
        let content_type = response.headers().get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
        if prompt.stream && content_type.to_ascii_lowercase().starts_with("text/event-stream") {
            return Ok(Box::pin(self.stream(response)));
        }
        let body = self.read(response, MAX_ANSWER_BYTES).await?;
        Ok(Box::pin(stream::iter([Ok(ModelChunk::Complete(body))])))
    }
}

/// Serializes messages as a JSON array.
fn messages_json(messages: &[Message]) -> String {
    let mut json = String::with_capacity(messages.iter().map(|m| m.as_str().len() + 1).sum::<usize>() + 2);
    json.push('[');
    for message in messages {
        if json.len() > 1 {
            json.push(',');
        }
        json.push_str(message.as_str());
    }
    json.push(']');
    json
}

fn broken(reason: impl Into<String>) -> ModelError {
    ModelError::Broken { reason: reason.into() }
}

fn unreachable_or_broken(e: &reqwest::Error) -> ModelError {
    if e.is_timeout() || e.is_connect() {
        ModelError::Unreachable { reason: error_chain(e) }
    } else {
        broken(error_chain(e))
    }
}
