//! Construction of outgoing HTTP clients. The whole binary uses one TLS implementation, the one that the library
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
