//! The turn of a chat request, from opening its run to its outcome, and the channels by which it reports to the handler.
//!
//! ```text
//!   handler (`complete`)                  turn (`execute_turn`)
//!   DetachOnDrop::until(started) ──poll─► open: find, reconcile, commit
//!                                ◄─started─┘
//!   DetachOnDrop::until(events)  ──poll─► drive: model, tools, commits
//!                                ◄─events──┘ (chunks, if streamed)
//!   the response begins; the handler returns, DetachOnDrop is dropped,
//!   and the turn continues as a background task
//!                                ◄─events─ … ◄─ended──┘
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
use tenure::{
    RunEvent,
    run::{EagerModelCall, TurnError, TurnStart},
};
use tokio::sync::{mpsc, oneshot};

/// Capacity of the channel of answer chunks to a client. When it is full, backpressure applies: nothing more is
/// read from the model server.
pub(in crate::http) const MAX_BUFFERED_EVENTS: usize = 16;

/// The handler's end of a turn's channels.
pub(super) struct TurnEvents {
    /// The start of the turn and its session, or the error that prevented it.
    pub started: oneshot::Receiver<ApiResult<TurnStarted>>,
    /// The chunks of the answer, if it is streamed.
    pub events: mpsc::Receiver<RunEvent>,
    /// The outcome, sent after the turn is committed.
    pub ended: oneshot::Receiver<TurnEnded>,
}

/// The turn's end of the channels to its handler.
pub(super) struct TurnReporter {
    started: oneshot::Sender<ApiResult<TurnStarted>>,
    events: mpsc::Sender<RunEvent>,
    ended: oneshot::Sender<TurnEnded>,
}

/// Creates the channels between a turn and its handler.
pub(super) fn turn_channels() -> (TurnReporter, TurnEvents) {
    let (started_tx, started) = oneshot::channel();
    let (events_tx, events) = mpsc::channel(MAX_BUFFERED_EVENTS);
    let (ended_tx, ended) = oneshot::channel();
    let reporter = TurnReporter { started: started_tx, events: events_tx, ended: ended_tx };
    (reporter, TurnEvents { started, events, ended })
}

/// Executes a complete turn: opens the run, executes it, and reports start, chunks and outcome. A repeated
/// idempotency key replays the stored response instead.
pub(super) async fn execute_turn(app: AppState, request: TurnInput, client: ChatClient, reporter: TurnReporter) {
    let TurnReporter { started, events, ended } = reporter;
    let stopwatch = Stopwatch::start();
    let TurnInput { turn_request, principal, model, options, stream, span, on_disconnect, warnings, .. } = request;
    let model_name = turn_request.model.clone().unwrap_or_default();
    let timed_model = Arc::new(TimedModel::new(model, app.models.label(&model_name)));
    let eager_call = EagerModelCall { model: timed_model.clone(), options: options.clone(), stream };
    let (session_id, outcome) = match app.tenure.begin_turn_eager(&principal, turn_request, &eager_call).await {
        Err(e) => return drop(started.send(Err(e.into()))),
        Ok(TurnStart::AlreadyAnswered { session_id, run, replay }) => {
            let reconcile_report = replay.reconcile_report.clone();
            let _ = started.send(Ok(TurnStarted {
                session_id: session_id.clone(),
                run: run.clone(),
                reconcile_report,
                warnings,
            }));
            if stream {
                replay_events(replay.stream.clone(), events).await;
            }
            (session_id.clone(), replay.outcome(session_id, run, 0).map_err(TurnError::from))
        }
        Ok(TurnStart::Run(turn)) => {
            let opened = stopwatch.elapsed();
            let session_id = turn.session_id().clone();
            let run = turn.run_id().clone();
            client.register_run(&turn, on_disconnect);
            let reconcile_report = turn.reconcile_report().clone();
            let _ = started.send(Ok(TurnStarted { session_id: session_id.clone(), run, reconcile_report, warnings }));
            let listener = stream.then_some(events);
            let drive = Drive { model: timed_model, model_name, options, listener, open_duration: opened };
            (session_id, runs::execute_run(&app, *turn, drive).await)
        }
    };
    span.record_session(&session_id);
    span.record_outcome(&outcome);
    // The request may have been answered long before; this line is about the turn.
    match &outcome {
        Ok(_) => tracing::debug!(%session_id, "turn finished"),
        Err(e) => tracing::warn!(%session_id, code = e.code(), reason = runs::loggable_reason(e), "turn failed"),
    }
    let notice = match &outcome {
        Ok(outcome) if outcome.waiting => {
            app.tenure.with_session(&principal, &session_id, |s| s.notice()).await.ok().flatten()
        }
        _ => None,
    };
    let _ = ended.send(outcome.map(|outcome| (outcome, notice)));
}

/// Replays the stream of a repeated request (D-047).
async fn replay_events(stream: Vec<RunEvent>, events: mpsc::Sender<RunEvent>) {
    for event in stream {
        // The client has disconnected; the rest of the replay is not needed.
        if events.send(event).await.is_err() {
            break;
        }
    }
}
