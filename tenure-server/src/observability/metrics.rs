//! Prometheus metrics of the server.

use super::{catalog, process};
use crate::clock::Stopwatch;
use async_trait::async_trait;
use axum::http::Method;
use metrics::{Counter, Histogram, counter, gauge, histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;
use tenure::{
    Model, ModelError, Tenure, TurnOutcome,
    run::{ModelStream, Prompt, TurnError},
};

static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();

const SECONDS: [f64; 14] = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0];
const SIZES: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 256.0];

/// Minimum interval between two counts of all sessions and cached tool results.
const COUNT_EVERY: Duration = Duration::from_secs(15);

/// Maximum number of sessions whose open reviews are counted.
const MAX_REVIEWED_SESSIONS: usize = 10_000;

/// Installs the global metrics recorder. Idempotent: only the first call in a process has an effect.
pub fn install() {
    HANDLE.get_or_init(|| {
        let builder = PrometheusBuilder::new();
        let builder = builder.set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &SECONDS);
        let builder = builder.and_then(|b| b.set_buckets_for_metric(Matcher::Suffix("_size".into()), &SIZES));
        let recorder = builder.unwrap_or_default().build_recorder();
        let handle = recorder.handle();
        if metrics::set_global_recorder(recorder).is_err() {
            tracing::warn!("another metrics recorder is already installed; /metrics stays empty");
        }
        catalog::describe();
        handle
    });
}

/// Metric handles of requests with one method and status.
struct RequestMetrics {
    method: &'static str,
    status: u16,
    count: Counter,
    seconds: Histogram,
}

/// Cached metric handles by route, because looking one up in the recorder is slower than counting.
static REQUEST_METRICS: RwLock<BTreeMap<String, Vec<RequestMetrics>>> = RwLock::new(BTreeMap::new());

/// Records a completed request.
pub fn request(method: &Method, route: &str, status: u16, elapsed: Duration) {
    // Clients can invent methods; each would add a time series that is never removed.
    let mut known = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"].into_iter();
    let method = known.find(|m| method == m).unwrap_or("other");
    let count = |entry: &RequestMetrics| {
        entry.count.increment(1);
        entry.seconds.record(elapsed.as_secs_f64());
    };
    let record_existing = |entries: &BTreeMap<String, Vec<RequestMetrics>>| {
        let mut entries = entries.get(route).into_iter().flatten();
        entries.find(|p| p.method == method && p.status == status).map(count).is_some()
    };
    if record_existing(&REQUEST_METRICS.read().unwrap_or_else(PoisonError::into_inner)) {
        return;
    }
    let labels = [("method", method.to_owned()), ("route", route.to_owned()), ("status", status.to_string())];
    let requests = counter!("tenure_requests_total", &labels);
    let seconds = histogram!("tenure_request_seconds", &labels[..2]);
    let entry = RequestMetrics { method, status, count: requests, seconds };
    count(&entry);
    REQUEST_METRICS.write().unwrap_or_else(PoisonError::into_inner).entry(route.to_owned()).or_default().push(entry);
}

/// Counts an open client connection for as long as it exists.
#[derive(Debug)]
pub struct ConnectionGuard(());

impl ConnectionGuard {
    /// Increments the number of open connections.
    pub fn open() -> Self {
        gauge!("tenure_connections").increment(1.0);
        Self(())
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        gauge!("tenure_connections").decrement(1.0);
    }
}

/// Records a rejected connection.
pub fn connection_refused() {
    counter!("tenure_connections_refused_total").increment(1);
}

/// Records a connection that the server closed.
pub fn connection_closed(reason: &'static str) {
    counter!("tenure_connections_closed_total", "reason" => reason).increment(1);
}

/// A model wrapper that measures the duration of requests, and counts those that failed.
pub struct TimedModel {
    model: Arc<dyn Model>,
    /// The value of the label `model`.
    label: String,
    /// Duration in microseconds of the most recent request, up to the last chunk of its answer.
    answer_micros: Arc<AtomicU64>,
}

impl TimedModel {
    /// Wraps a model. The measured duration is zero until the first request. `label` is one of a fixed set of names:
    /// each would add a time series that is never removed.
    pub fn new(model: Arc<dyn Model>, label: &str) -> Self {
        Self { model, label: label.to_owned(), answer_micros: Arc::default() }
    }
}

#[async_trait]
impl Model for TimedModel {
    async fn ask(&self, prompt: Prompt) -> Result<ModelStream, ModelError> {
        use futures_util::StreamExt;
        let stopwatch = Stopwatch::start();
        let micros = self.answer_micros.clone();
        let store_elapsed = move || micros.store(stopwatch.elapsed().as_micros() as u64, Ordering::Relaxed);
        let label = self.label.clone();
        let count_error = move |e: &ModelError| {
            counter!("tenure_model_errors_total", "model" => label.clone(), "code" => e.code()).increment(1);
        };
        let chunks = self.model.ask(prompt).await.inspect_err(|e| {
            store_elapsed();
            count_error(e);
        })?;
        store_elapsed();
        Ok(Box::pin(chunks.inspect(move |chunk| {
            store_elapsed();
            if let Err(e) = chunk {
                count_error(e);
            }
        })))
    }
}

/// Records a completed turn: its outcome, the time spent in the model, and the remaining time.
pub fn turn(
    open_duration: Duration,
    run_duration: Duration,
    model: &TimedModel,
    outcome: &Result<TurnOutcome, TurnError>,
) {
    let label = match outcome {
        Ok(_) => "completed",
        Err(TurnError::Stopped | TurnError::Cancelled) => "cancelled",
        Err(_) => "failed",
    };
    let model_time = Duration::from_micros(model.answer_micros.load(Ordering::Relaxed));
    counter!("tenure_turns_total", "outcome" => label).increment(1);
    histogram!("tenure_turn_own_seconds")
        .record((open_duration + run_duration).saturating_sub(model_time).as_secs_f64());
    histogram!("tenure_turn_model_seconds").record(model_time.as_secs_f64());
    let usage = outcome.as_ref().ok().and_then(|o| o.answer.usage.as_ref());
    for (kind, field) in [("prompt", "prompt_tokens"), ("completion", "completion_tokens")] {
        if let Some(count) = usage.and_then(|usage| usage[field].as_u64()) {
            counter!("tenure_tokens_total", "model" => model.label.clone(), "kind" => kind).increment(count);
        }
    }
}

/// Records a completed sweep.
pub fn sweep(report: &tenure::maintenance::SweepReport, elapsed: Duration) {
    for (kind, count) in [
        ("expired", report.expired.len()),
        ("evicted", report.evicted.len()),
        ("purged", report.purged.len()),
        ("resumed", report.resumed.len()),
        ("items", report.items),
        ("failed", report.failed.len()),
    ] {
        counter!("tenure_sweep_total", "what" => kind).increment(count as u64);
    }
    histogram!("tenure_sweep_seconds").record(elapsed.as_secs_f64());
}

/// Time of the last count of all sessions.
#[derive(Debug, Default)]
pub struct SessionCounts(tokio::sync::Mutex<Option<Stopwatch>>);

impl SessionCounts {
    /// Counts the sessions by status and the cached tool results, at most once per `COUNT_EVERY`, because counting is not free.
    async fn refresh(&self, tenure: &Tenure) -> tenure::Result<()> {
        let mut last = self.0.lock().await;
        if last.is_some_and(|at| at.elapsed() < COUNT_EVERY) {
            return Ok(());
        }
        for (status, count) in tenure.store().count().await? {
            gauge!("tenure_sessions", "status" => status.as_str()).set(count as f64);
        }
        gauge!("tenure_open_reviews").set(tenure.count_open_reviews(MAX_REVIEWED_SESSIONS).await? as f64);
        gauge!("tenure_tool_cache_entries").set(tenure.cache_size().await? as f64);
        *last = Some(Stopwatch::start());
        Ok(())
    }
}

/// Runs the recorder's maintenance periodically until `stop` completes. Without it, histogram samples accumulate
/// until the next scrape.
pub async fn run_maintenance(stop: impl Future<Output = ()>) {
    tokio::pin!(stop);
    loop {
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(5)) => HANDLE.get().into_iter().for_each(|h| h.run_upkeep()),
            () = &mut stop => return,
        }
    }
}

/// Renders all metrics in the Prometheus text format.
pub async fn render(counts: &SessionCounts, tenure: &Tenure) -> tenure::Result<String> {
    counts.refresh(tenure).await?;
    let turns = tenure.turn_load();
    gauge!("tenure_turns_running").set(turns.running as f64);
    gauge!("tenure_turns_waiting").set(turns.waiting as f64);
    Ok(HANDLE.get().map(PrometheusHandle::render).unwrap_or_default() + &process::render())
}
