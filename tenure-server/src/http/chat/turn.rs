//! The turn of a chat request, from its beginning to its end.
//!
//! ```text
//!   handler (`complete`)                  turn (`take_turn`)
//!   DetachOnDrop::until(started) ──poll─► open: find, reconcile, commit
//!                                ◄─started─┘
//!   DetachOnDrop::until(heard)   ──poll─► drive: model, tools, commits
//!                                ◄─heard───┘ (pieces, if they are streamed)
//!   the response begins; the handler returns, DetachOnDrop is dropped,
//!   and the turn goes on as a task of its own
//!                                ◄─heard── … ◄─ended──┘
//! ```
//!
//! Until the response begins, the turn runs on the task of its request: nothing has to be woken up. From then on, or when the
//! client goes away, it is a background task, so that neither a slow client nor one that disconnects holds it up.

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

/// Pieces of an answer that wait for a slow client. While there are so many, nothing more is read from the model's server.
pub(in crate::http) const MAX_PIECES: usize = 16;

/// What a handler hears of a turn.
pub(super) struct TurnEvents {
    /// That it has begun, and in which session; or why it has not.
    pub started: oneshot::Receiver<ApiResult<TurnStarted>>,
    /// The pieces of the answer, if they are streamed.
    pub heard: mpsc::Receiver<RunEvent>,
    /// How it ended, after what was said is stored.
    pub ended: oneshot::Receiver<TurnEnded>,
}

/// Where a turn reports to.
pub(super) struct TurnReporter {
    started: oneshot::Sender<ApiResult<TurnStarted>>,
    pieces: mpsc::Sender<RunEvent>,
    end: oneshot::Sender<TurnEnded>,
}

/// The two ends of a turn's report.
pub(super) fn report() -> (TurnReporter, TurnEvents) {
    let (begun, started) = oneshot::channel();
    let (pieces, heard) = mpsc::channel(MAX_PIECES);
    let (end, ended) = oneshot::channel();
    (TurnReporter { started: begun, pieces, end }, TurnEvents { started, heard, ended })
}

/// Takes a whole turn: opens it, drives it, and reports.
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
    // It can be long after its request was answered.
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

/// The response to a request that was made before, once more.
async fn replayed(replay: StoredAnswer, pieces: Option<mpsc::Sender<RunEvent>>) -> Result<TurnOutcome, String> {
    let StoredAnswer { body, calls, stream, .. } = replay;
    let mut answer = tenure::ModelAnswer::default();
    answer.take(&ModelChunk::Whole(body.clone())).map_err(|e| e.to_string())?;
    if let Some(pieces) = pieces {
        for heard in stream {
            // A client that has gone away needs no more.
            if pieces.send(heard).await.is_err() {
                break;
            }
        }
    }
    Ok(TurnOutcome { answer, body, seq: 0, heard: true, calls, waiting: false })
}
