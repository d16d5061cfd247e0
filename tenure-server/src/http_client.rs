//! Construction of outgoing HTTP clients, and the propagation of trace contexts. The whole binary uses one TLS implementation, the one that the library
//! uses for PostgreSQL.

/// Installs the process-wide TLS provider. Idempotent.
pub fn install_tls_provider() {
    // An error means that a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Returns a builder for an HTTP client with the TLS provider installed and `TCP_NODELAY` set.
pub fn client() -> reqwest::ClientBuilder {
    install_tls_provider();
    reqwest::Client::builder().tcp_nodelay(true)
}

/// Target of spans that are exported as traces. Logs exclude this target, and traces include nothing else. The library
/// uses it as well.
pub const TRACE: &str = "tenure::trace";

/// Adds the trace context of a span to an outgoing request (`traceparent`, W3C Trace Context). Without an exporter of
/// traces the request stays as it is.
pub fn with_trace_context(request: reqwest::RequestBuilder, span: &tracing::Span) -> reqwest::RequestBuilder {
    request.headers(trace_context(span))
}

#[cfg(feature = "otlp")]
fn trace_context(span: &tracing::Span) -> axum::http::HeaderMap {
    use tracing_opentelemetry::OpenTelemetrySpanExt;
    let mut fields = std::collections::HashMap::new();
    opentelemetry::global::get_text_map_propagator(|p| p.inject_context(&span.context(), &mut fields));
    let header = |(name, value): (String, String)| Some((name.parse().ok()?, value.parse().ok()?));
    let headers: Vec<(axum::http::HeaderName, axum::http::HeaderValue)> =
        fields.into_iter().filter_map(header).collect();
    headers.into_iter().collect()
}

#[cfg(not(feature = "otlp"))]
fn trace_context(_: &tracing::Span) -> axum::http::HeaderMap {
    axum::http::HeaderMap::new()
}

/// Makes the trace context of an incoming request the parent of a span that was not entered yet. An invalid context is
/// ignored.
#[cfg(feature = "otlp")]
pub fn set_trace_parent(span: &tracing::Span, headers: &axum::http::HeaderMap) {
    use tracing_opentelemetry::OpenTelemetrySpanExt;
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
    let fields: std::collections::HashMap<String, String> =
        ["traceparent", "tracestate"].into_iter().filter_map(|name| Some((name.to_owned(), text(name)?))).collect();
    if fields.contains_key("traceparent") {
        let parent = opentelemetry::global::get_text_map_propagator(|p| p.extract(&fields));
        // It fails if traces are not exported.
        let _ = span.set_parent(parent);
    }
}

/// Makes the trace context of an incoming request the parent of a span.
#[cfg(not(feature = "otlp"))]
pub fn set_trace_parent(_: &tracing::Span, _: &axum::http::HeaderMap) {}

/// Formats the causes of an error without its URL, which may contain a secret.
pub fn error_chain(e: &reqwest::Error) -> String {
    use std::error::Error;
    let mut causes = Vec::new();
    let mut next = e.source();
    while let Some(cause) = next {
        causes.push(cause.to_string());
        next = cause.source();
    }
    if causes.is_empty() { "the connection failed".to_owned() } else { causes.join(": ") }
}
