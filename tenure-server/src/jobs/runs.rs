//! Execution of runs: new ones, those resumed after a review decision, and those taken over from a node that
//! stopped.

use super::compact;
use crate::app::{App, AppState};
use crate::auth::rate_limit::{Metered, RateLimited, TokenMeter};
use crate::clock::Stopwatch;
use crate::observability::metrics::{self, TimedModel};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tenure::{
    Executors, Model, ModelError, Principal, RunEvent, SessionId, TurnOutcome,
    log::Head,
    run::{OnRateLimit, OpenRun, Resumable, RunId, RunOutcome, TurnError},
    session::RawObject,
};
use tokio::sync::mpsc;

/// Maximum serialized size of stored model options, in bytes. Larger options are not stored, so such a run
/// cannot be taken over.
const MAX_OPTIONS: usize = 64 << 10;

/// Maximum number of runs taken over in one pass.
const MAX_TAKEOVERS: usize = 64;

/// The parameters stored with a run, so that any node can resume it: the model's name and the request options
/// without the conversation, stream and user fields (D-043). `None` if the options exceed `MAX_OPTIONS`.
pub fn resumable(model: &str, options: &RawObject) -> Option<Resumable> {
    let mut options = options.clone();
    ["messages", "model", "stream", "stream_options", "user"].iter().for_each(|name| drop(options.remove(name)));
    let text = options.to_string();
    if text.len() > MAX_OPTIONS {
        return None;
    }
    Some(Resumable::new(model).with_options(serde_json::from_str(&text).unwrap_or_default()))
}

/// Parameters for executing a run.
pub struct Drive {
    /// The model, wrapped to measure its latency.
    pub model: Arc<TimedModel>,
    /// The model's name, for the compaction that may follow the turn.
    pub model_name: String,
    /// The request options for the model, besides the conversation.
    pub options: RawObject,
    /// Receives the run's events as they happen. If it is set, the model is requested to stream.
    pub listener: Option<mpsc::Sender<RunEvent>>,
    /// The time it took to open the run, for the metrics.
    pub open_duration: Duration,
}

/// Executes a run until it ends or pauses for review, then records metrics, notifies the webhooks and starts
/// the compaction that may be due.
pub async fn execute_run(app: &AppState, turn: OpenRun, parameters: Drive) -> Result<TurnOutcome, TurnError> {
    let Drive { model, model_name, options, listener, open_duration: opened } = parameters;
    let session_id = turn.session_id().clone();
    let run = turn.run_id().clone();
    let principal = turn.principal().clone();
    let summaries = turn.compaction_policy();
    let stopwatch = Stopwatch::start();
    let limited = assistant_limits(app, &turn, model.clone());
    let mut executors = Executors::new(&*limited).tools(&*app.tools).options(options);
    executors = executors.on_rate_limit(OnRateLimit::Pause);
    if let Some(listener) = listener {
        executors = executors.stream(true).events(listener);
    }
    let outcome = turn.execute(executors).await;
    metrics::turn(opened, stopwatch.elapsed(), &model, &outcome);
    notify_run_ended(app, &principal, &session_id, &run, &outcome).await;
    compact::after_turn(app, &principal, &session_id, summaries, &model_name);
    outcome
}

/// Wraps a model with the rate limits of the run's assistant, which are counted per tenant.
fn assistant_limits(app: &AppState, turn: &OpenRun, model: Arc<dyn Model>) -> Arc<dyn Model> {
    let Some((name, limit)) = turn.rate_limit() else { return model };
    // The names of tenants contain no slash, and the ids of keys no colon.
    let key = format!("assistant:{}/{name}", turn.principal().tenant);
    let limits = app.rate_limits.clone();
    let requests_per_minute = limit.requests_per_minute;
    let meter = limit.tokens_per_minute.map(|limit| TokenMeter::new(limits.clone(), key.clone(), limit));
    let model = match &meter {
        Some(meter) => Arc::new(Metered { model, meter: meter.clone() }),
        None => model,
    };
    Arc::new(RateLimited { model, limits, key, requests_per_minute, meter })
}

/// Executes a run with the model and options stored in its details, until it ends or pauses for review. If the
/// model is not configured any more, the run fails.
pub async fn execute_stored_run(
    app: &AppState,
    turn: OpenRun,
    listener: Option<mpsc::Sender<RunEvent>>,
    meter: Option<TokenMeter>,
) -> Result<TurnOutcome, TurnError> {
    let Resumable { model: model_name, options, .. } = turn.resumable().cloned().unwrap_or_default();
    let mut options: RawObject = serde_json::from_value(Value::Object(options)).unwrap_or_default();
    options.set("model", &model_name);
    if listener.is_some() {
        options.set("stream", true);
    }
    let session_id = turn.session_id().clone();
    let run = turn.run_id().clone();
    let model = app.models.get(&model_name).unwrap_or_else(|| Arc::new(MissingModel(model_name.clone())));
    let model: Arc<dyn Model> = match meter {
        Some(meter) => Arc::new(Metered { model, meter }),
        None => model,
    };
    let model = Arc::new(TimedModel::new(model, app.models.label(&model_name)));
    let outcome =
        execute_run(app, turn, Drive { model, model_name, options, listener, open_duration: Duration::ZERO }).await;
    match &outcome {
        Ok(turn_outcome) => {
            tracing::debug!(%session_id, run = %run, waiting = turn_outcome.waiting, "run ended or paused")
        }
        Err(e) => {
            tracing::warn!(%session_id, run = %run, code = e.code(), reason = loggable_reason(e), "run failed")
        }
    }
    outcome
}

/// The reason of a failure, if it cannot contain the content of messages: why tools could not be listed, which limit was
/// exceeded, or why a model server could not be reached.
pub fn loggable_reason(e: &TurnError) -> Option<String> {
    match e {
        TurnError::Tools(_) | TurnError::Limit { .. } => Some(e.to_string()),
        TurnError::Model(ModelError::Unreachable { reason } | ModelError::TimedOut { reason }) => Some(reason.clone()),
        TurnError::Model(ModelError::Refused { status, .. }) => Some(format!("the model server answered {status}")),
        _ => None,
    }
}

/// Stands for a model that is not configured any more: every request fails as unreachable.
struct MissingModel(String);

#[async_trait::async_trait]
impl Model for MissingModel {
    async fn ask(&self, _: tenure::run::Prompt) -> Result<tenure::run::ModelStream, ModelError> {
        Err(ModelError::Unreachable { reason: format!("model {:?} is not configured", self.0) })
    }
}

/// Notifies the configured webhooks that a run has ended, in the background with retries. Paused runs are not
/// reported.
async fn notify_run_ended(
    app: &App,
    principal: &Principal,
    id: &SessionId,
    run: &RunId,
    outcome: &Result<TurnOutcome, TurnError>,
) {
    let continues = match outcome {
        Ok(turn_outcome) => turn_outcome.waiting,
        // Another node has taken the run over, and reports its end.
        Err(e) => matches!(e, TurnError::Store(tenure::Error::Superseded { .. })),
    };
    if app.run_hooks.is_empty() || continues {
        return;
    }
    let (status, error) = match outcome {
        Ok(_) => (RunOutcome::Completed, None),
        Err(e @ (TurnError::Stopped | TurnError::Cancelled)) => (RunOutcome::Cancelled, Some(e)),
        Err(e) => (RunOutcome::Failed, Some(e)),
    };
    let error = error.map(|e| json!({"code": e.code(), "message": e.to_string()}));
    let body = json!({
        "event": "run.ended", "id": format!("{run}/{id}"), "at": app.tenure.now(), "tenant": principal.tenant, "user": principal.user,
        "session_id": id, "run_id": run, "status": status, "error": error,
    });
    for hook in &app.run_hooks {
        let hook = hook.clone();
        let body = body.to_string();
        app.tasks.spawn(async move { hook.deliver_with_retries(body).await });
    }
}

/// Takes over a run that no node executes, and resumes it in the background. Does nothing if another node takes
/// it first.
pub fn spawn_takeover(app: &AppState, head: Head) {
    let app_handle = app.clone();
    app.tasks.spawn(async move {
        match app_handle.tenure.claim_orphaned_run(&head).await {
            Ok(Some(turn)) => {
                tracing::info!(session_id = %turn.session_id(), run = %turn.run_id(), "resuming a run");
                drop(execute_stored_run(&app_handle, turn, None, None).await);
            }
            Ok(None) => {}
            Err(e) => tracing::warn!(session_id = %head.info.session_id, error = %e, "could not take over a run"),
        }
    });
}

/// Run recovery loop: takes over abandoned runs, continues sessions whose pause is over and decides reviews whose
/// timeout has passed, until the server stops. Polls every third of the lease duration, between 50 ms and 10 s.
pub async fn run_loop(app: &AppState) {
    let pause = (app.tenure.limits().lease / 3).clamp(Duration::from_millis(50), Duration::from_secs(10));
    loop {
        match app.tenure.find_orphaned_runs(MAX_TAKEOVERS).await {
            Ok(heads) => heads.into_iter().for_each(|head| spawn_takeover(app, head)),
            Err(e) => tracing::warn!(error = %e, "could not list abandoned runs; retrying"),
        }
        if let Err(e) = app.tenure.resume_paused().await {
            tracing::warn!(error = %e, "could not continue the sessions whose pause is over; retrying");
        }
        if let Err(e) = app.tenure.decide_overdue().await {
            tracing::warn!(error = %e, "could not decide the reviews that timed out; retrying");
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = app.tasks.wait_for_stop() => return,
        }
    }
}
