//! The events of a run, as a list or as a stream of server-sent events.

use crate::app::AppState;
use crate::error::ApiError;
use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::{Value, json};
use std::time::Duration;
use tenure::{
    Principal, RunEvent, Seq, SessionId,
    log::{Entry, Record},
    run::{ModelChunk, RunId},
};
use tokio::sync::mpsc;

/// Maximum number of records read at a time.
pub const PAGE: usize = 256;

/// Interval of keep-alive comments: proxies close idle connections.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Converts a log record into an event: `seq`, `created_at`, `type` and `data`.
pub fn event(record: &Record) -> Value {
    let mut event = json!({"seq": record.seq, "created_at": record.at});
    let encoded: Value = match &record.entry {
        Entry::Message(message) => json!({"message": {"run": message.run, "message": message.message.to_value()}}),
        other => serde_json::from_str(&other.encode()).unwrap_or_default(),
    };
    if let Value::Object(fields) = encoded
        && let Some((kind, data)) = fields.into_iter().next()
    {
        event["type"] = json!(kind);
        event["data"] = data;
    }
    event
}

/// The state of an event stream.
struct RunFollower {
    app: AppState,
    principal: Principal,
    id: SessionId,
    run: RunId,
    after: Seq,
    /// Uncommitted answer chunks. Only available to the request that started the run, on the node that executes
    /// it.
    chunks: Option<mpsc::Receiver<RunEvent>>,
    over: bool,
}

/// Streams the events of a run after the record `after`, until the run is over. The stream stays open while the
/// run waits for review. Each event has its sequence number as id, so that clients can resume.
pub fn events(
    app: AppState,
    principal: Principal,
    id: SessionId,
    run: RunId,
    after: Seq,
    chunks: Option<mpsc::Receiver<RunEvent>>,
) -> Response {
    let follower = RunFollower { app, principal, id, run, after, chunks, over: false };
    let all = stream::unfold(follower, |mut f| async move {
        if f.over {
            return None;
        }
        let bytes = f.next_bytes().await;
        Some((Ok::<_, std::convert::Infallible>(bytes), f))
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(all)).into_response()
}

impl RunFollower {
    async fn next_bytes(&mut self) -> Bytes {
        let keep_alive = tokio::time::sleep(KEEP_ALIVE);
        tokio::pin!(keep_alive);
        loop {
            let page = match self.app.tenure.follow(&self.principal, &self.id, &self.run, self.after, PAGE).await {
                Ok(page) => page,
                Err(e) => {
                    self.over = true;
                    let body = serde_json::to_string(&ApiError::from(e).body()).unwrap_or_default();
                    return Bytes::from(format!("event: error\ndata: {body}\n\n"));
                }
            };
            if !page.records.is_empty() || page.ended {
                let mut text = String::new();
                // Chunks are sent before they are committed, so pending ones precede the records that contain
                // them.
                while let Some(Ok(run_event)) = self.chunks.as_mut().map(mpsc::Receiver::try_recv) {
                    if let RunEvent::Chunk(ModelChunk::Chunk(chunk) | ModelChunk::Complete(chunk)) = run_event {
                        text.push_str(&format!("event: delta\ndata: {chunk}\n\n"));
                    }
                }
                for record in &page.records {
                    let event = event(record);
                    let kind = event["type"].as_str().unwrap_or("event").to_owned();
                    text.push_str(&format!("id: {}\nevent: {kind}\ndata: {event}\n\n", record.seq));
                    self.after = record.seq;
                }
                self.over = page.ended;
                if page.ended {
                    text.push_str("event: done\ndata: [DONE]\n\n");
                }
                return Bytes::from(text);
            }
            let changed = self.app.tenure.wait_for_change(&self.principal, &self.id, self.after);
            let Some(chunks) = &mut self.chunks else {
                tokio::select! {
                    _ = changed => continue, // an error recurs when the log is read again
                    () = &mut keep_alive => return Bytes::from_static(b": \n\n"),
                }
            };
            tokio::select! {
                _ = changed => {}
                run_event = chunks.recv() => match run_event {
                    Some(RunEvent::Chunk(ModelChunk::Chunk(chunk) | ModelChunk::Complete(chunk))) => {
                        return Bytes::from(format!("event: delta\ndata: {chunk}\n\n"));
                    }
                    Some(_) => {}
                    None => self.chunks = None,
                },
            }
        }
    }
}
