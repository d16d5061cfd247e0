//! Calls to others: one TLS implementation for the whole binary, the one that the library uses for PostgreSQL.

/// Chooses the implementation. May be called often.
pub fn install() {
    // An error says that one was chosen before.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// A client to be.
pub fn client() -> reqwest::ClientBuilder {
    install();
    reqwest::Client::builder().tcp_nodelay(true)
}

/// An error with its causes, and without the URL, which may hold a secret.
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
