//! The turn of a chat request, from opening its run to its outcome, and the channels by which it reports to the handler.
//!
//! ```text
//!   handler (`complete`)                  turn (`take_turn`)
//!   DetachOnDrop::until(started) ──poll─► open: find, reconcile, commit
//!                                ◄─started─┘
//!   DetachOnDrop::until(heard)   ──poll─► drive: model, tools, commits
//!                                ◄─heard───┘ (chunks, if streamed)
//!   the response begins; the handler returns, DetachOnDrop is dropped,
//!   and the turn continues as a background task
//!                                ◄─heard── … ◄─ended──┘
//! ```
//!
//! Until the response begins, the turn is polled on the task of its request, which saves task wake-ups. From then on, or
//! when the client disconnects, it is a background task, so that neither a slow client nor a disconnect delays it.

use super::client::ChatClient;
use super::request::TurnInput;
use super::response::{TurnEnded, TurnStarted};
use crate::app::AppState;
use crate::clock::Stopwatch;
use crate::error::ApiResult;
use crate::jobs::runs::{self, Drive};
use crate::observability::metrics::TimedModel;
use std::sync::Arc;
use tenure::{EagerModelCall, ModelChunk, RunEvent, StoredAnswer, TurnOutcome, TurnStart};
use tokio::sync::{mpsc, oneshot};

/// Capacity of the channel of answer chunks to a client. When it is full, backpressure applies: nothing more is
/// read from the model server.
pub(in crate::http) const MAX_PIECES: usize = 16;

/// The handler's end of a turn's channels.
pub(super) struct TurnEvents {
    /// The start of the turn and its session, or the error that prevented it.
    pub started: oneshot::Receiver<ApiResult<TurnStarted>>,
    /// The chunks of the answer, if it is streamed.
    pub heard: mpsc::Receiver<RunEvent>,
    /// The outcome, sent after the turn is committed.
    pub ended: oneshot::Receiver<TurnEnded>,
}

/// The turn's end of the channels to its handler.
pub(super) struct TurnReporter {
    started: oneshot::Sender<ApiResult<TurnStarted>>,
    pieces: mpsc::Sender<RunEvent>,
    end: oneshot::Sender<TurnEnded>,
}

/// Creates the channels between a turn and its handler.
pub(super) fn report() -> (TurnReporter, TurnEvents) {
    let (begun, started) = oneshot::channel();
    let (pieces, heard) = mpsc::channel(MAX_PIECES);
    let (end, ended) = oneshot::channel();
    (TurnReporter { started: begun, pieces, end }, TurnEvents { started, heard, ended })
}

/// Executes a complete turn: opens the run, executes it, and reports start, chunks and outcome. A repeated
/// idempotency key replays the stored response instead.
pub(super) async fn take_turn(app: AppState, request: TurnInput, client: ChatClient, reporter: TurnReporter) {
    let TurnReporter { started: begun, pieces, end } = reporter;
    let watch = Stopwatch::start();
    let TurnInput { ask, who, model, options, stream, talk, on_disconnect, .. } = request;
    let name = ask.model.clone().unwrap_or_default();
    let timed = Arc::new(TimedModel::new(model));
    let first = EagerModelCall { model: timed.clone(), options: options.clone(), stream };
    let (session_id, outcome) = match app.tenure.turn_asking(&who, ask, &first).await {
        Err(e) => return drop(begun.send(Err(e.into()))),
        Ok(TurnStart::Before { session_id, run, replay }) => {
            let spliced = replay.spliced.clone();
            let _ = begun.send(Ok(TurnStarted { session_id: session_id.clone(), run: run.clone(), spliced }));
            let outcome = replayed(*replay, stream.then_some(pieces)).await;
            let broken = |why| tenure::Error::corrupt(format!("the stored response of {run}"), why);
            (session_id, outcome.map_err(|why| broken(why).into()))
        }
        Ok(TurnStart::Turn(turn)) => {
            let opened = watch.elapsed();
            let (session_id, run) = (turn.session_id.clone(), turn.run.clone());
            client.began(&turn, on_disconnect);
            let spliced = turn.spliced.clone();
            let _ = begun.send(Ok(TurnStarted { session_id: session_id.clone(), run, spliced }));
            let listener = stream.then_some(pieces);
            let drive = Drive { model: timed, model_name: name, options, listener, opened };
            (session_id, runs::drive(&app, *turn, drive).await)
        }
    };
    talk.in_session(&session_id);
    talk.ended(&outcome);
    // The request may have been answered long before; this line is about the turn.
    match &outcome {
        Ok(_) => tracing::debug!(%session_id, "a turn is done"),
        Err(e) => tracing::warn!(%session_id, code = e.code(), "a turn failed"),
    }
    let notice = match &outcome {
        Ok(answered) if answered.waiting => app.tenure.view(&who, &session_id, |s| s.notice()).await.ok().flatten(),
        _ => None,
    };
    let _ = end.send(outcome.map(|answered| (answered, notice)));
}

/// Replays the stored response of a repeated request, including its stream (D-047).
async fn replayed(replay: StoredAnswer, pieces: Option<mpsc::Sender<RunEvent>>) -> Result<TurnOutcome, String> {
    let StoredAnswer { body, calls, stream, .. } = replay;
    let mut answer = tenure::ModelAnswer::default();
    answer.take(&ModelChunk::Whole(body.clone())).map_err(|e| e.to_string())?;
    if let Some(pieces) = pieces {
        for heard in stream {
            // The client has disconnected; the rest of the replay is not needed.
            if pieces.send(heard).await.is_err() {
                break;
            }
        }
    }
    Ok(TurnOutcome { answer, body, seq: 0, heard: true, calls, waiting: false })
}
