//! Logs and traces. They contain ids, counts and times, never the content of messages.

use super::json_log::FlatJson;
use crate::config::{LogFormat, Telemetry};
use crate::http_client::TRACE;
use anyhow::anyhow;
use std::io::IsTerminal;
use tenure::{SessionId, TurnOutcome, run::TurnError};
use tracing::Span;
use tracing::field::Empty;
use tracing_subscriber::filter::{EnvFilter, FilterExt, filter_fn};
use tracing_subscriber::{Layer, Registry, fmt, layer::SubscriberExt, reload};

/// Installs logging to standard error and, if configured, the export of traces.
///
/// Records that other crates emit through `log` are deliberately not captured: a database driver logs the
/// parameters of its statements, which contain messages. Logs of the MCP library are excluded as well, because they
/// show arguments and results of tools in unusual cases.
pub fn install(config: &Telemetry) -> anyhow::Result<(Traces, LogFilter)> {
    let (filter, handle) = reload::Layer::new(log_filter(&config.log)?);
    let text = fmt::layer().with_writer(std::io::stderr).with_target(false);
    let text = text.with_ansi(std::io::stderr().is_terminal());
    let logs: Box<dyn Layer<Registry> + Send + Sync> = match config.log_format {
        LogFormat::Text => text.compact().boxed(),
        LogFormat::Json => text.json().event_format(FlatJson).boxed(),
    };
    let logs =
        logs.with_filter(filter.and(filter_fn(|meta| meta.target() != TRACE && !meta.target().starts_with("rmcp"))));
    let (layer, traces) = traces(&config.otlp)?;
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(logs).with(layer))?;
    Ok((traces, LogFilter(handle)))
}

fn log_filter(text: &str) -> anyhow::Result<EnvFilter> {
    EnvFilter::try_new(text).map_err(|e| anyhow!("telemetry.log: {e}"))
}

/// Handle to the log filter, which can be changed at run time.
#[derive(Clone, Debug)]
pub struct LogFilter(reload::Handle<EnvFilter, Registry>);

impl LogFilter {
    /// Replaces the log filter (`telemetry.log`). An invalid filter is rejected and changes nothing.
    pub fn set(&self, text: &str) -> anyhow::Result<()> {
        self.0.reload(log_filter(text)?).map_err(|e| anyhow!("telemetry.log: {e}"))
    }
}

/// Guard of the trace exporter. Dropping it flushes pending traces.
#[must_use = "dropping this stops the export of traces"]
#[derive(Debug, Default)]
pub struct Traces {
    #[cfg(feature = "otlp")]
    provider: Option<opentelemetry_sdk::trace::SdkTracerProvider>,
}

#[cfg(feature = "otlp")]
fn traces<S>(url: &str) -> anyhow::Result<(Option<impl Layer<S> + use<S>>, Traces)>
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    use opentelemetry::trace::TracerProvider;
    use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig};
    use opentelemetry_sdk::{Resource, trace::SdkTracerProvider};
    if url.is_empty() {
        return Ok((None, Traces::default()));
    }
    let endpoint =
        format!("{}/v1/traces", crate::config::http_url("telemetry.otlp", url)?.as_str().trim_end_matches('/'));
    let exporter = SpanExporter::builder().with_http().with_protocol(Protocol::HttpJson).with_endpoint(endpoint);
    crate::http_client::install_tls_provider();
    let exporter = exporter.build().map_err(|e| anyhow!("telemetry.otlp: {e}"))?;
    let version = opentelemetry::KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let resource = Resource::builder().with_service_name("tenure").with_attribute(version).build();
    let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
    opentelemetry::global::set_text_map_propagator(opentelemetry_sdk::propagation::TraceContextPropagator::new());
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("tenure"));
    let layer = layer.with_location(false).with_threads(false).with_tracked_inactivity(false);
    let layer = layer.with_filter(filter_fn(|meta| meta.target() == TRACE));
    Ok((Some(layer), Traces { provider: Some(provider) }))
}

#[cfg(not(feature = "otlp"))]
fn traces(url: &str) -> anyhow::Result<(Option<tracing_subscriber::layer::Identity>, Traces)> {
    anyhow::ensure!(url.is_empty(), "telemetry.otlp: this program was built without the feature `otlp`");
    Ok((None, Traces::default()))
}

#[cfg(feature = "otlp")]
impl Drop for Traces {
    fn drop(&mut self) {
        if let Some(Err(e)) = self.provider.as_ref().map(|p| p.shutdown()) {
            tracing::warn!(error = %e, "could not send the last traces");
        }
    }
}

/// Creates the log span of a request, which adds its ids to every log line. Enabled at all log levels, so that
/// warnings have the ids, too.
pub fn request_span(request_id: &str) -> Span {
    tracing::error_span!(
        "request",
        request_id,
        tenant = Empty,
        user = Empty,
        key = Empty,
        session_id = Empty,
        run_id = Empty
    )
}

/// Creates the trace span of a request.
pub fn request_trace(request_id: &str, method: &str, route: &str) -> Span {
    tracing::info_span!(
        target: TRACE, "http", otel.name = format!("{method} {route}"), otel.kind = "server", request_id,
        http.request.method = method, http.route = route, http.response.status_code = Empty,
    )
}

/// Trace span of a turn, with the attributes of OpenTelemetry's semantic conventions for generative AI.
#[derive(Debug)]
pub struct ChatSpan(Span);

impl ChatSpan {
    /// Starts the span before the model is called.
    pub fn begin(model: &str) -> Self {
        Self(tracing::info_span!(
            target: TRACE, "chat", otel.name = format!("chat {model}"), otel.kind = "client", otel.status_code = Empty,
            gen_ai.operation.name = "chat", gen_ai.request.model = model, gen_ai.conversation.id = Empty,
            gen_ai.response.model = Empty, gen_ai.response.finish_reasons = Empty,
            gen_ai.usage.input_tokens = Empty, gen_ai.usage.output_tokens = Empty, error.r#type = Empty,
        ))
    }

    /// Records the id of the session.
    pub fn record_session(&self, id: &SessionId) {
        self.0.record("gen_ai.conversation.id", id.as_str());
    }

    /// Records the outcome: model, finish reason and token usage, or the error.
    pub fn record_outcome(&self, outcome: &Result<TurnOutcome, TurnError>) {
        let answer = match outcome {
            Ok(turn_outcome) => &turn_outcome.answer,
            Err(e) => {
                self.0.record("otel.status_code", "ERROR").record("error.type", e.code());
                return;
            }
        };
        for (name, text) in
            [("gen_ai.response.model", &answer.model), ("gen_ai.response.finish_reasons", &answer.finish_reason)]
        {
            if let Some(text) = text {
                self.0.record(name, text.as_str());
            }
        }
        for (name, count) in
            [("gen_ai.usage.input_tokens", "prompt_tokens"), ("gen_ai.usage.output_tokens", "completion_tokens")]
        {
            if let Some(count) = answer.usage.as_ref().and_then(|u| u[count].as_i64()) {
                self.0.record(name, count);
            }
        }
    }
}
