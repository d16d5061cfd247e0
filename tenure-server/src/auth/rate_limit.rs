//! Rate limits per key and per assistant: token buckets that hold one minute's worth and refill continuously. Each node counts on its
//! own (D-104).

use crate::clock::Stopwatch;
use crate::config::KeyLimits;
use crate::error::ApiError;
use async_trait::async_trait;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use futures_util::StreamExt;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tenure::{
    Model, ModelError,
    run::{ModelChunk, ModelStream, Prompt},
};

/// A quantity that is limited per minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Resource {
    /// HTTP requests.
    Requests,
    /// Input and output tokens of models.
    Tokens,
}

impl Resource {
    fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Tokens => "tokens",
        }
    }

    /// The name of the limit in the configuration.
    fn limit_name(self) -> &'static str {
        match self {
            Self::Requests => "requests_per_minute",
            Self::Tokens => "tokens_per_minute",
        }
    }
}

/// The token bucket of one key and resource. A negative level is debt, from a request whose cost was known only
/// afterwards.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    remaining: f64,
    /// When it was last refilled, as time since the start of the process.
    at: Duration,
}

impl Bucket {
    fn refill(&mut self, limit: u64, now: Duration) {
        let gained = now.saturating_sub(self.at).as_secs_f64() * limit as f64 / 60.0;
        self.remaining = (self.remaining + gained).min(limit as f64);
        self.at = now;
    }

    /// Returns the time until the bucket holds `amount`, at most one day.
    fn time_until(&self, amount: f64, limit: u64) -> Duration {
        let missing = (amount - self.remaining).max(0.0);
        Duration::from_secs_f64((missing * 60.0 / limit as f64).min(86_400.0))
    }
}

/// The state of one rate limit, for the response headers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LimitStatus {
    resource: Resource,
    limit: u64,
    remaining: u64,
    /// Time until the bucket is full again.
    reset: Duration,
    /// Time until a rejected request may be retried. `None` means that the request was admitted.
    retry_after: Option<Duration>,
}

impl LimitStatus {
    /// The headers that OpenAI clients know: `x-ratelimit-limit-requests` and so on.
    fn headers(&self) -> Vec<(HeaderName, HeaderValue)> {
        let name = self.resource.name();
        let reset = format!("{}ms", self.reset.as_millis());
        [("limit", self.limit.to_string()), ("remaining", self.remaining.to_string()), ("reset", reset)]
            .into_iter()
            .filter_map(|(suffix, value)| {
                let header = HeaderName::try_from(format!("x-ratelimit-{suffix}-{name}")).ok()?;
                Some((header, HeaderValue::try_from(value).ok()?))
            })
            .collect()
    }

    fn model_error(&self) -> Option<ModelError> {
        let limit = self.resource.limit_name();
        self.retry_after.map(|retry_after| ModelError::RateLimited { limit, max: self.limit, retry_after })
    }

    fn error(&self) -> Option<ApiError> {
        let wait = self.retry_after?;
        let name = self.resource.limit_name();
        let seconds = wait.as_secs() + 1;
        let message = format!("this key exceeds its limit `{name}` of {}; retry in {seconds} s", self.limit);
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", message).with_param(name);
        Some(error.with_header(header::RETRY_AFTER, &seconds.to_string()))
    }
}

/// The names of all rate limit headers, exposed to cross-origin pages (CORS).
pub const HEADERS: [&str; 6] = [
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
];

/// The token buckets of all keys that have limits: at most two per existing key.
#[derive(Debug)]
pub struct RateLimits {
    buckets: Mutex<HashMap<(String, Resource), Bucket>>,
    start: Stopwatch,
}

impl Default for RateLimits {
    fn default() -> Self {
        Self { buckets: Mutex::default(), start: Stopwatch::start() }
    }
}

impl RateLimits {
    /// Takes `amount` from a bucket unless it is empty. An `amount` of 0 only reads the state.
    fn consume(&self, key: &str, resource: Resource, limit: u64, amount: u64) -> LimitStatus {
        self.with_bucket(key, resource, limit, |bucket| {
            let refused = bucket.remaining < 1.0;
            if !refused {
                bucket.remaining -= amount as f64;
            }
            LimitStatus {
                resource,
                limit,
                remaining: bucket.remaining.max(0.0) as u64,
                reset: bucket.time_until(limit as f64, limit),
                retry_after: refused.then(|| bucket.time_until(1.0, limit)),
            }
        })
    }

    /// Takes `amount` from a bucket even if that makes it negative. A negative amount is a refund.
    fn charge(&self, key: &str, resource: Resource, limit: u64, amount: i64) {
        self.with_bucket(key, resource, limit, |bucket| bucket.remaining -= amount as f64);
    }

    fn with_bucket<R>(&self, key: &str, resource: Resource, limit: u64, change: impl FnOnce(&mut Bucket) -> R) -> R {
        let now = self.start.elapsed();
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let full = Bucket { remaining: limit as f64, at: now };
        let bucket = buckets.entry((key.to_owned(), resource)).or_insert(full);
        bucket.refill(limit, now);
        change(bucket)
    }

    /// Counts a request of a key, and rejects it with 429 if the key is over `requests_per_minute`. The state of
    /// both limits is added to `responses`.
    pub fn admit(&self, key: &str, limits: KeyLimits, responses: Option<&ResponseHeaders>) -> Result<(), ApiError> {
        let requests = limits.requests_per_minute.map(|limit| self.consume(key, Resource::Requests, limit, 1));
        let tokens = limits.tokens_per_minute.map(|limit| self.consume(key, Resource::Tokens, limit, 0));
        let statuses = [requests, tokens];
        if let Some(responses) = responses {
            responses.add(statuses.iter().flatten().flat_map(LimitStatus::headers));
        }
        // A key without tokens left may still send requests that call no model.
        requests.and_then(|status| status.error()).map_or(Ok(()), Err)
    }

    /// Rejects a model call with 429 if the key has no tokens left.
    pub fn admit_tokens(&self, key: &str, limits: KeyLimits) -> Result<(), ApiError> {
        let status = limits.tokens_per_minute.map(|limit| self.consume(key, Resource::Tokens, limit, 0));
        status.and_then(|status| status.error()).map_or(Ok(()), Err)
    }
}

/// Headers to add to the response of a request, whether it succeeds or fails. It is a request extension.
#[derive(Clone, Debug, Default)]
pub struct ResponseHeaders(Arc<Mutex<Vec<(HeaderName, HeaderValue)>>>);

impl ResponseHeaders {
    fn add(&self, headers: impl Iterator<Item = (HeaderName, HeaderValue)>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(headers);
    }

    /// Removes and returns the collected headers.
    pub fn drain(&self) -> Vec<(HeaderName, HeaderValue)> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Charges the tokens of model calls to a key.
#[derive(Clone, Debug)]
pub struct TokenMeter {
    pub(super) limits: Arc<RateLimits>,
    pub(super) key: String,
    pub(super) limit: u64,
}

impl TokenMeter {
    /// Charges the estimated tokens of a text of `bytes` bytes.
    pub fn charge_text(&self, bytes: usize) {
        self.charge(bytes.div_ceil(BYTES_PER_TOKEN) as i64);
    }

    fn charge(&self, tokens: i64) {
        self.limits.charge(&self.key, Resource::Tokens, self.limit, tokens);
    }
}

impl TokenMeter {
    /// Creates a meter that charges tokens to the bucket of `key`.
    pub fn new(limits: Arc<RateLimits>, key: String, limit: u64) -> Self {
        Self { limits, key, limit }
    }
}

/// A model wrapper that refuses requests beyond the rate limits of a key. Tokens are charged by [`Metered`].
pub struct RateLimited {
    /// The wrapped model.
    pub model: Arc<dyn Model>,
    /// The token buckets.
    pub limits: Arc<RateLimits>,
    /// The key of the buckets.
    pub key: String,
    /// Maximum number of requests per minute. `None` means unlimited.
    pub requests_per_minute: Option<u64>,
    /// The meter of the tokens. `None` means unlimited.
    pub meter: Option<TokenMeter>,
}

#[async_trait]
impl Model for RateLimited {
    async fn ask(&self, prompt: Prompt) -> Result<ModelStream, ModelError> {
        let tokens = self.meter.as_ref().map(|m| self.limits.consume(&self.key, Resource::Tokens, m.limit, 0));
        // A request that has no tokens left is not counted.
        let requests = match tokens.and_then(|status| status.model_error()) {
            Some(error) => return Err(error),
            None => self.requests_per_minute.map(|limit| self.limits.consume(&self.key, Resource::Requests, limit, 1)),
        };
        match requests.and_then(|status| status.model_error()) {
            Some(error) => Err(error),
            None => self.model.ask(prompt).await,
        }
    }
}

/// A model wrapper that charges tokens to a key as they are used: estimated from the bytes of the prompt and from
/// the chunks, and corrected when the model reports its usage. A client that disconnects is charged for what it has
/// caused.
pub struct Metered {
    /// The wrapped model.
    pub model: Arc<dyn Model>,
    /// The meter of the key to charge.
    pub meter: TokenMeter,
}

/// Estimated bytes of text per token, where a model does not report its usage.
const BYTES_PER_TOKEN: usize = 4;

#[async_trait]
impl Model for Metered {
    async fn ask(&self, prompt: Prompt) -> Result<ModelStream, ModelError> {
        let bytes: usize = prompt.messages.iter().map(|m| m.as_str().len()).sum();
        let estimate = bytes.div_ceil(BYTES_PER_TOKEN) as i64;
        self.meter.charge(estimate);
        let chunks = self.model.ask(prompt).await.inspect_err(|_| self.meter.charge(-estimate))?;
        let meter = self.meter.clone();
        let mut charged = estimate;
        Ok(Box::pin(chunks.inspect(move |chunk| {
            let Ok(ModelChunk::Chunk(text) | ModelChunk::Complete(text)) = chunk else { return };
            // The content is a small part of a chunk's JSON, so one token per chunk is a better estimate than its
            // length.
            let tokens = match (chunk, reported_usage(text)) {
                (_, Some(total)) => total - charged,
                (Ok(ModelChunk::Complete(_)), None) => text.len().div_ceil(BYTES_PER_TOKEN) as i64,
                _ => 1,
            };
            charged += tokens;
            meter.charge(tokens);
        })))
    }
}

/// Returns the total token usage that a response reports.
fn reported_usage(text: &str) -> Option<i64> {
    if !text.contains("\"total_tokens\"") {
        return None;
    }
    let value: serde_json::Value = serde_json::from_str(text).ok()?;
    value["usage"]["total_tokens"].as_i64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_refills_over_a_minute_and_holds_no_more_than_its_limit() {
        let mut bucket = Bucket { remaining: 0.0, at: Duration::ZERO };
        bucket.refill(60, Duration::from_secs(10));
        assert_eq!(bucket.remaining, 10.0);
        bucket.refill(60, Duration::from_secs(1000));
        assert_eq!(bucket.remaining, 60.0);
        bucket.remaining = -60.0;
        assert_eq!(bucket.time_until(0.0, 60), Duration::from_secs(60));
    }

    #[test]
    fn a_key_over_its_limit_is_refused_with_a_retry_time() {
        let limits = RateLimits::default();
        for remaining in (0..3).rev() {
            let status = limits.consume("a", Resource::Requests, 3, 1);
            assert_eq!((status.remaining, status.retry_after), (remaining, None));
        }
        let status = limits.consume("a", Resource::Requests, 3, 1);
        assert!(status.retry_after.is_some_and(|wait| wait <= Duration::from_secs(20)));
        assert_eq!(status.error().unwrap().status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(
            limits.consume("b", Resource::Requests, 3, 1).retry_after,
            None,
            "another key has a bucket of its own"
        );
    }

    #[test]
    fn usage_is_read_from_responses_only() {
        assert_eq!(reported_usage(r#"{"usage": {"total_tokens": 7}}"#), Some(7));
        assert_eq!(reported_usage(r#"{"choices": [{"delta": {"content": "\"total_tokens\": 9"}}]}"#), None);
        assert_eq!(reported_usage(r#"{"usage": null}"#), None);
    }
}
