//! What is counted and timed, for Prometheus.

use crate::server::App;
use async_trait::async_trait;
use axum::http::Method;
use metrics::{counter, gauge, histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tenure::{Answered, Model, ModelError, Pieces, Prompt, TurnError};

static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();

const SECONDS: [f64; 14] = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0];
const SIZES: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 256.0];

/// Begins to count. Only the first call in a process does something.
pub fn install() {
    HANDLE.get_or_init(|| {
        let builder = PrometheusBuilder::new();
        let builder = builder.set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &SECONDS);
        let builder = builder.and_then(|b| b.set_buckets_for_metric(Matcher::Suffix("_size".into()), &SIZES));
        let recorder = builder.unwrap_or_default().build_recorder();
        let handle = recorder.handle();
        if metrics::set_global_recorder(recorder).is_err() {
            tracing::warn!("something else counts already; /metrics stays empty");
        }
        handle
    });
}

/// A request was answered.
pub fn request(method: &Method, route: &str, status: u16, took: Duration) {
    let labels = [("method", method.to_string()), ("route", route.to_owned()), ("status", status.to_string())];
    counter!("tenure_requests_total", &labels).increment(1);
    histogram!("tenure_request_seconds", &labels[..2]).record(took.as_secs_f64());
}

/// A client came.
pub fn connection_opened() {
    gauge!("tenure_connections").increment(1.0);
}

/// A client went.
pub fn connection_closed() {
    gauge!("tenure_connections").decrement(1.0);
}

/// A model that is timed.
pub struct Timed {
    /// The model.
    pub model: Arc<dyn Model>,
    /// Microseconds that it took until the end of its answer.
    pub answered: Arc<AtomicU64>,
}

#[async_trait]
impl Model for Timed {
    async fn ask(&self, prompt: Prompt) -> Result<Pieces, ModelError> {
        use futures_util::StreamExt;
        let watch = crate::clock::Stopwatch::start();
        let spent = self.answered.clone();
        let note = move || spent.store(watch.elapsed().as_micros() as u64, Ordering::Relaxed);
        let pieces = self.model.ask(prompt).await.inspect_err(|_| note())?;
        note();
        Ok(Box::pin(pieces.inspect(move |_| note())))
    }
}

/// A turn ended.
pub fn turn(opened: Duration, ran: Duration, model: &Timed, outcome: &Result<Answered, TurnError>) {
    let word = match outcome {
        Ok(_) => "completed",
        Err(TurnError::Stopped) => "cancelled",
        Err(_) => "failed",
    };
    let asked = Duration::from_micros(model.answered.load(Ordering::Relaxed));
    counter!("tenure_turns_total", "outcome" => word).increment(1);
    histogram!("tenure_turn_own_seconds").record((opened + ran.saturating_sub(asked)).as_secs_f64());
    histogram!("tenure_turn_model_seconds").record(asked.as_secs_f64());
}

/// A pass of the sweep ended.
pub fn sweep(report: &tenure::Report, took: Duration) {
    for (what, count) in [
        ("expired", report.expired.len()),
        ("evicted", report.evicted.len()),
        ("purged", report.purged.len()),
        ("items", report.items),
        ("failed", report.failed.len()),
    ] {
        counter!("tenure_sweep_total", "what" => what).increment(count as u64);
    }
    histogram!("tenure_sweep_seconds").record(took.as_secs_f64());
}

/// Everything that was counted.
pub async fn render(_app: &App) -> tenure::Result<String> {
    Ok(HANDLE.get().map(PrometheusHandle::render).unwrap_or_default())
}
