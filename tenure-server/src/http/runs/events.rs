//! The events of a run, as a list or as a stream.

use crate::app::AppState;
use crate::error::ApiError;
use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::{Value, json};
use std::time::Duration;
use tenure::{Entry, ModelChunk, Principal, Record, RunEvent, RunId, Seq, SessionId};
use tokio::sync::mpsc;

/// So many records are read at once.
pub const PAGE: usize = 256;

/// Proxies close what says nothing for long: a comment comes after so long.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// A record as an event.
pub fn event(record: &Record) -> Value {
    let mut event = json!({"seq": record.seq, "created_at": record.at});
    let encoded: Value = match &record.entry {
        Entry::Message(post) => json!({"message": {"run": post.run, "message": post.message.to_value()}}),
        other => serde_json::from_str(&other.encode()).unwrap_or_default(),
    };
    if let Value::Object(one) = encoded
        && let Some((kind, data)) = one.into_iter().next()
    {
        event["type"] = json!(kind);
        event["data"] = data;
    }
    event
}

/// Where a stream of events stands.
struct RunFollower {
    app: AppState,
    who: Principal,
    id: SessionId,
    run: RunId,
    after: Seq,
    /// What the run says before it is kept; only here and now.
    heard: Option<mpsc::Receiver<RunEvent>>,
    over: bool,
}

/// The events of a run until it is over, also while it waits for a person.
pub fn events(
    app: AppState,
    who: Principal,
    id: SessionId,
    run: RunId,
    after: Seq,
    heard: Option<mpsc::Receiver<RunEvent>>,
) -> Response {
    let following = RunFollower { app, who, id, run, after, heard, over: false };
    let all = stream::unfold(following, |mut f| async move {
        if f.over {
            return None;
        }
        let bytes = f.more().await;
        Some((Ok::<_, std::convert::Infallible>(bytes), f))
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(all)).into_response()
}

impl RunFollower {
    async fn more(&mut self) -> Bytes {
        let quiet = tokio::time::sleep(KEEP_ALIVE);
        tokio::pin!(quiet);
        loop {
            let found = match self.app.tenure.follow(&self.who, &self.id, &self.run, self.after, PAGE).await {
                Ok(found) => found,
                Err(e) => {
                    self.over = true;
                    let body = serde_json::to_string(&ApiError::from(e).body()).unwrap_or_default();
                    return Bytes::from(format!("event: error\ndata: {body}\n\n"));
                }
            };
            if !found.records.is_empty() || found.over {
                let mut text = String::new();
                // Words are told before they are kept: those that are on their way come before what was kept.
                while let Some(Ok(heard)) = self.heard.as_mut().map(mpsc::Receiver::try_recv) {
                    if let RunEvent::Piece(ModelChunk::Chunk(chunk) | ModelChunk::Whole(chunk)) = heard {
                        text.push_str(&format!("event: delta\ndata: {chunk}\n\n"));
                    }
                }
                for record in &found.records {
                    let event = event(record);
                    let kind = event["type"].as_str().unwrap_or("event").to_owned();
                    text.push_str(&format!("id: {}\nevent: {kind}\ndata: {event}\n\n", record.seq));
                    self.after = record.seq;
                }
                self.over = found.over;
                if found.over {
                    text.push_str("event: done\ndata: [DONE]\n\n");
                }
                return Bytes::from(text);
            }
            let changed = self.app.tenure.changed(&self.who, &self.id, self.after);
            let Some(heard) = &mut self.heard else {
                tokio::select! {
                    _ = changed => continue, // what is wrong shows when the log is read again
                    () = &mut quiet => return Bytes::from_static(b": \n\n"),
                }
            };
            tokio::select! {
                _ = changed => {}
                piece = heard.recv() => match piece {
                    Some(RunEvent::Piece(ModelChunk::Chunk(chunk) | ModelChunk::Whole(chunk))) => {
                        return Bytes::from(format!("event: delta\ndata: {chunk}\n\n"));
                    }
                    Some(RunEvent::Tool(_)) => {}
                    None => self.heard = None,
                },
            }
        }
    }
}
