//! Construction of outgoing HTTP clients, and the propagation of trace contexts. The whole binary uses one TLS implementation, the one that the library
//! uses for PostgreSQL.

use std::sync::OnceLock;

/// Installs the process-wide TLS provider. Idempotent.
pub fn install_tls_provider() {
    // An error means that a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Returns a builder for an HTTP client with the TLS provider installed and `TCP_NODELAY` set. Certificates are verified
/// with those of the system. On a system that has none, as in an empty container, `http://` still works, and every
/// `https://` request fails.
pub fn client() -> reqwest::ClientBuilder {
    install_tls_provider();
    let client = reqwest::Client::builder().tcp_nodelay(true);
    if has_system_certificates() { client } else { client.tls_certs_only(std::iter::empty()) }
}

/// Returns true if the system has certificates of authorities. Logs once if it has none.
fn has_system_certificates() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let built = reqwest::Client::builder().build();
        if let Err(e) = &built {
            tracing::warn!(
                reason = error_chain(e),
                "https cannot be used; install the package ca-certificates, or name a file in SSL_CERT_FILE"
            );
        }
        built.is_ok()
    })
}

/// Target of spans that are exported as traces. Logs exclude this target, and traces include nothing else. The library
/// uses it as well.
pub const TRACE: &str = "tenure::trace";

/// Adds the trace context of a span to an outgoing request. Without an exporter of traces the request stays as it is.
pub fn with_trace_context(mut request: reqwest::RequestBuilder, span: &tracing::Span) -> reqwest::RequestBuilder {
    for (name, value) in trace_context(span) {
        request = request.header(name, value);
    }
    request
}

/// Returns the trace context of a span as fields of the W3C Trace Context: `traceparent`, and `tracestate` if there is
/// one. Without an exporter of traces there are none.
#[cfg(feature = "otlp")]
pub fn trace_context(span: &tracing::Span) -> Vec<(String, String)> {
    use tracing_opentelemetry::OpenTelemetrySpanExt;
    let mut fields = std::collections::HashMap::new();
    opentelemetry::global::get_text_map_propagator(|p| p.inject_context(&span.context(), &mut fields));
    fields.into_iter().filter(|(_, value)| !value.is_empty()).collect()
}

/// Returns the trace context of a span. Without the feature `otlp` there is none.
#[cfg(not(feature = "otlp"))]
pub fn trace_context(_: &tracing::Span) -> Vec<(String, String)> {
    Vec::new()
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
