//! Response bodies, and the detection of clients that do not read them.
//!
//! On HTTP/1 a client that reads nothing blocks the socket, which `transport.rs` detects. On HTTP/2 it can block
//! one stream by flow control while the connection itself makes progress, so each stream is watched.

use crate::clock::Stopwatch;
use crate::net::connections::InFlight;
use axum::body::{Body, Bytes};
use hyper::body::{Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

tokio::task_local! {
    /// The HTTP/2 stream that the current task serves.
    static STREAM: Arc<WriteProgress>;
}

/// The write progress of an HTTP/2 stream: whether the server waits for the client.
#[derive(Debug)]
struct WriteProgress {
    clock: Stopwatch,
    /// Since when the client has accepted nothing, in milliseconds plus one. 0 means that the server has nothing to
    /// send.
    waiting_since: AtomicU64,
}

impl WriteProgress {
    /// Records that a part of the response was handed over; the client must accept it before the next one is
    /// produced.
    fn mark_waiting(&self) {
        self.waiting_since.store(self.now() + 1, Relaxed);
    }

    /// Records that the client has accepted everything handed over so far.
    fn mark_accepted(&self) {
        self.waiting_since.store(0, Relaxed);
    }

    fn now(&self) -> u64 {
        u64::try_from(self.clock.elapsed().as_millis()).unwrap_or(u64::MAX - 1)
    }

    /// Completes when the client has accepted nothing for `limit`.
    async fn wait_until_stalled(&self, limit: Duration) {
        loop {
            let waiting = match self.waiting_since.load(Relaxed) {
                0 => Duration::ZERO,
                since => Duration::from_millis((self.now() + 1).saturating_sub(since)),
            };
            if waiting >= limit {
                return;
            }
            tokio::time::sleep(limit - waiting).await;
        }
    }
}

/// Serves an HTTP/2 stream, and drops (and thereby resets) it if its client accepts nothing of the response for
/// `limit`. `None` means no limit.
pub async fn until_stalled<F: Future>(limit: Option<Duration>, stream: F) {
    let Some(limit) = limit else { return drop(stream.await) };
    let progress = Arc::new(WriteProgress { clock: Stopwatch::start(), waiting_since: AtomicU64::new(0) });
    tokio::select! {
        _ = STREAM.scope(progress.clone(), stream) => {}
        () = progress.wait_until_stalled(limit) => {
            tracing::debug!(limit = "write_timeout", "stream reset: the client read nothing for too long");
        }
    }
}

/// Maximum size of a part of a response that is handed to an HTTP/2 stream at once, in bytes. The library buffers a
/// part until the client accepts it, whatever its size.
const MAX_PART: usize = 16 << 10;

/// The body of a response. Its request counts as in flight until the body is dropped.
#[derive(Debug)]
pub struct ResponseBody {
    body: Body,
    /// The remainder of a part larger than `MAX_PART`.
    rest: Bytes,
    /// The HTTP/2 stream it is sent on. `None` means HTTP/1.
    stream: Option<Arc<WriteProgress>>,
    _in_flight: InFlight,
}

impl ResponseBody {
    /// Wraps the body of the response to a request that is in flight.
    pub fn new(body: Body, in_flight: InFlight) -> Self {
        let stream = STREAM.try_with(Arc::clone).ok();
        if let Some(stream) = &stream {
            stream.mark_waiting();
        }
        Self { body, rest: Bytes::new(), stream, _in_flight: in_flight }
    }

    fn part(&mut self, mut data: Bytes) -> Frame<Bytes> {
        if self.stream.is_some() && data.len() > MAX_PART {
            self.rest = data.split_off(MAX_PART);
        }
        Frame::data(data)
    }
}

impl hyper::body::Body for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Some(stream) = &self.stream {
            stream.mark_accepted();
        }
        let frame = if self.rest.is_empty() {
            match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => self.part(data),
                    Err(other) => other,
                },
                other => return other,
            }
        } else {
            let rest = std::mem::take(&mut self.rest);
            self.part(rest)
        };
        if let Some(stream) = &self.stream {
            stream.mark_waiting();
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let rest = self.rest.len() as u64;
        let body = self.body.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(body.lower() + rest);
        if let Some(upper) = body.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}
