//! Startup while the database is unavailable: the server retries opening the store, and meanwhile answers
//! requests with 503.

use crate::app::{App, AppState};
use crate::config::Config;
use futures_util::stream::{FuturesUnordered, StreamExt};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// If opening the store takes longer than this, requests are answered with 503 meanwhile.
const STARTUP_GRACE: Duration = Duration::from_secs(1);
/// Pause between two attempts to open the store. Each attempt retries for as long as the store's URL
/// configures.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of connections served concurrently while the server is not ready; further ones wait in the
/// accept queue.
const MAX_CONNECTIONS: usize = 64;
/// Timeout for reading a request, and its maximum size in bytes, while the server is not ready.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_REQUEST: usize = 16 << 10;

/// Opens the store and builds the application. An unavailable PostgreSQL server is retried without limit, while
/// requests are answered with 503; any other error ends the startup.
pub async fn open(config: Config) -> anyhow::Result<AppState> {
    let opening = open_with_retries(&config);
    tokio::pin!(opening);
    if let Ok(opened) = tokio::time::timeout(STARTUP_GRACE, &mut opening).await {
        return opened;
    }
    // If the address is in use, `serve::bind` reports that once the store is open.
    match TcpListener::bind(&config.listen).await {
        Err(_) => opening.await,
        Ok(listener) => {
            tracing::warn!(
                address = config.listen,
                "the store is not available yet; answering requests with 503 until it is"
            );
            tokio::select! {
                opened = opening => opened,
                () = serve_not_ready(listener) => anyhow::bail!("stopped answering requests during startup"),
            }
        }
    }
}

async fn open_with_retries(config: &Config) -> anyhow::Result<AppState> {
    let is_retried = config.store.starts_with("postgres");
    loop {
        match App::open(config.clone()).await {
            Err(e) if is_retried && is_unavailable(&e) => {
                tracing::warn!(error = %e, "the database is unavailable; retrying");
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
            opened => return opened,
        }
    }
}

fn is_unavailable(e: &anyhow::Error) -> bool {
    matches!(e.downcast_ref(), Some(tenure::Error::Unavailable { .. }))
}

/// Serves a minimal HTTP endpoint: `GET /healthz` succeeds, every other request gets a 503.
async fn serve_not_ready(listener: TcpListener) {
    let mut responses = FuturesUnordered::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if responses.len() < MAX_CONNECTIONS => match accepted {
                Ok((stream, _)) => responses.push(tokio::time::timeout(2 * REQUEST_TIMEOUT, respond(stream))),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            },
            // Clients that disconnected or did not send a request in time are ignored.
            _ = responses.next(), if !responses.is_empty() => {}
        }
    }
}

async fn respond(mut stream: TcpStream) -> std::io::Result<()> {
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    let read = async {
        while request.len() < MAX_REQUEST && !request.windows(4).any(|w| w == b"\r\n\r\n") {
            match stream.read(&mut buffer).await? {
                0 => break,
                n => request.extend_from_slice(&buffer[..n]),
            }
        }
        Ok::<_, std::io::Error>(())
    };
    let _ = tokio::time::timeout(REQUEST_TIMEOUT, read).await;
    let is_health_check = request.starts_with(b"GET /healthz ");
    let (status, body) = if is_health_check {
        ("200 OK", serde_json::json!({"status": "ok", "version": env!("CARGO_PKG_VERSION")}))
    } else {
        let message = "the server is starting and its store is not available yet; retry later";
        let error =
            serde_json::json!({"message": message, "type": "server_error", "code": "unavailable", "param": null});
        ("503 Service Unavailable", serde_json::json!({ "error": error }))
    };
    let body = body.to_string();
    let retry = if is_health_check { "" } else { "retry-after: 1\r\n" };
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{retry}connection: close\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).await?;
    stream.shutdown().await
}
