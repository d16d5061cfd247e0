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
