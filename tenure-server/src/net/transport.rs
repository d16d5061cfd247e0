//! The socket of a connection, as the HTTP library sees it.
//!
//! This wrapper adds a timeout for clients that accept nothing (`write_timeout`), a limit on bytes without a
//! request, strict line endings (`http1.rs`, D-100), and a body for the errors that the library answers by itself.

use crate::error::ApiError;
use crate::net::connections::Connection;
use crate::net::http1::RequestScanner;
use axum::http::StatusCode;
use bytes::{Buf, Bytes};
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

/// Maximum time a client may take to read an error before its connection is reset.
const LINGER: Duration = Duration::from_secs(1);

/// The socket of a connection, with timeouts and checks.
#[derive(Debug)]
pub struct Transport {
    stream: TcpStream,
    connection: Arc<Connection>,
    scanner: RequestScanner,
    /// Bytes to deliver next in place of the rest of an invalid request, so that the library answers it at once.
    end_of_head: &'static [u8],
    write_timeout: Option<Duration>,
    /// The write timeout; runs while a write waits for the client.
    write_timer: Option<Pin<Box<Sleep>>>,
    /// The linger timeout; runs while the client may read an error before the connection is closed.
    linger_timer: Option<Pin<Box<Sleep>>>,
    /// The response sent in place of an error of the library: its remaining bytes, and the number of bytes it
    /// replaces.
    replacement: Option<(Bytes, usize)>,
}

impl Transport {
    /// Wraps a socket on which nothing has been received yet. `max_line` is the longest line that the HTTP library
    /// accepts, in bytes.
    pub fn new(
        stream: TcpStream,
        connection: Arc<Connection>,
        write_timeout: Option<Duration>,
        max_line: usize,
    ) -> Self {
        Self {
            stream,
            connection,
            scanner: RequestScanner::new(max_line),
            end_of_head: b"",
            write_timeout,
            write_timer: None,
            linger_timer: None,
            replacement: None,
        }
    }

    /// Returns the outcome of a write, or `TimedOut` if the client has accepted nothing for `write_timeout`.
    fn with_write_timeout<T>(&mut self, context: &mut Context<'_>, outcome: Poll<Result<T>>) -> Poll<Result<T>> {
        let Some(limit) = self.write_timeout else { return outcome };
        if outcome.is_ready() {
            self.write_timer = None;
            return outcome;
        }
        let write_timer = self.write_timer.get_or_insert_with(|| Box::pin(sleep(limit)));
        ready!(write_timer.as_mut().poll(context));
        tracing::debug!(limit = "write_timeout", "connection closed: the client read nothing for too long");
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the client read nothing for longer than `write_timeout`")))
    }

    fn poll_replacement(&mut self, context: &mut Context<'_>) -> Poll<Result<usize>> {
        while let Some((rest, replaced)) = &mut self.replacement {
            if rest.is_empty() {
                let replaced = *replaced;
                self.replacement = None;
                return Poll::Ready(Ok(replaced));
            }
            let written = Pin::new(&mut self.stream).poll_write(context, rest);
            if let Poll::Ready(Ok(n)) = written {
                rest.advance(n);
            }
            ready!(self.with_write_timeout(context, written))?;
        }
        Poll::Ready(Ok(0))
    }
}

impl AsyncRead for Transport {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        let this = &mut *self;
        if !this.end_of_head.is_empty() {
            let (delivered, rest) = this.end_of_head.split_at(this.end_of_head.len().min(buffer.remaining()));
            buffer.put_slice(delivered);
            this.end_of_head = rest;
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.stream).poll_read(context, buffer))?;
        let received = &mut buffer.filled_mut()[before..];
        if this.connection.record_received(received.len()) {
            tracing::debug!("connection closed: too much data without a request");
            return Poll::Ready(Err(Error::new(ErrorKind::ConnectionAborted, "too much data without a request")));
        }
        if let Some(end) = this.scanner.scan(received) {
            buffer.set_filled(before + end);
            this.end_of_head = b"\r\n\r\n";
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Transport {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let this = &mut *self;
        if this.replacement.is_none()
            && let Some(error) = with_envelope(bytes)
        {
            this.connection.mark_unread();
            this.replacement = Some((error, bytes.len()));
        }
        if this.replacement.is_some() {
            return this.poll_replacement(context);
        }
        let written = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.with_write_timeout(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        if let [slice] = slices {
            return self.poll_write(context, slice);
        }
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.with_write_timeout(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    /// Closes the connection. Closing with unread input would reset it, and the client could lose the response; so
    /// input is read and discarded for at most `LINGER`.
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let this = &mut *self;
        if this.linger_timer.is_none() {
            ready!(Pin::new(&mut this.stream).poll_shutdown(context))?;
            if !this.connection.has_unread() {
                return Poll::Ready(Ok(()));
            }
        }
        let linger_timer = this.linger_timer.get_or_insert_with(|| Box::pin(sleep(LINGER)));
        let mut ignored = [0; 4096];
        while linger_timer.as_mut().poll(context).is_pending() {
            let mut buffer = ReadBuf::new(&mut ignored);
            let read = ready!(Pin::new(&mut this.stream).poll_read(context, &mut buffer));
            if read.is_err() || buffer.filled().is_empty() {
                break;
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// Adds a JSON body in the API's error envelope to an error that the HTTP library answers by itself, which is a
/// head without a body. Returns `None` for all other bytes.
fn with_envelope(bytes: &[u8]) -> Option<Bytes> {
    let rest = bytes.strip_prefix(b"HTTP/1.1 ")?;
    let error = match rest.get(..3)? {
        b"400" => ApiError::new(
            StatusCode::BAD_REQUEST,
            "invalid",
            "this is not a valid HTTP/1.1 request; check the request line and the headers, and end each line with CRLF",
        ),
        b"414" => ApiError::new(StatusCode::URI_TOO_LONG, "too_large", "the request target is too long")
            .with_param("max_header_bytes"),
        b"431" => ApiError::new(
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            "too_large",
            "the headers are too large, or there are more than 100; send less, or raise `max_header_bytes`",
        )
        .with_param("max_header_bytes"),
        _ => return None,
    };
    let head = std::str::from_utf8(bytes).ok()?.strip_suffix("\r\n\r\n")?;
    let mut lines: Vec<&str> =
        head.split("\r\n").filter(|line| !line.eq_ignore_ascii_case("content-length: 0")).collect();
    // Only a response that consists of a head with `content-length: 0` is replaced.
    if lines.len() == head.split("\r\n").count() || lines.contains(&"") {
        return None;
    }
    let body = serde_json::to_string(&error.body()).ok()?;
    let length = format!("content-length: {}", body.len());
    lines.extend(["content-type: application/json", &length]);
    Some(format!("{}\r\n\r\n{body}", lines.join("\r\n")).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_library_get_a_body() {
        let head = "HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        let sent = with_envelope(head.as_bytes()).unwrap();
        let (head, body) = std::str::from_utf8(&sent).unwrap().split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 431 ") && head.contains("connection: close\r\n"), "{head}");
        assert!(head.ends_with(&format!("content-length: {}", body.len())), "{head}");
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(
            (&body["error"]["code"], &body["error"]["param"]),
            (&"too_large".into(), &"max_header_bytes".into())
        );
        for other in [
            "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
            "{\"x\": \"HTTP/1.1 400 \"}",
            "",
        ] {
            assert!(with_envelope(other.as_bytes()).is_none(), "{other}");
        }
    }
}
