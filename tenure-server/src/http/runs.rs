//! `/sessions/{id}/runs`: runs, which continue independently of their client and whose events can be followed
//! from any node.

mod events;

use crate::app::AppState;
use crate::auth::Caller;
use crate::auth::rate_limit::TokenMeter;
use crate::error::{ApiError, ApiResult, ErrorBody};
use crate::headers::{header_hint, header_text};
use crate::http::errors::unknown_model;
use crate::http::extract::{JsonBody, PathParams, QueryParams, SessionPath, idempotency_key};
use crate::http::view::{self, ReadErrors, RunView};
use crate::jobs;
use crate::sessions;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use events::{PAGE, event, events};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tenure::{
    Message, Principal, Seq, SessionId, TurnOutcome,
    log::Head,
    policy::HistoryMode,
    run::{OnBusy, OnExpired, OpenRun, Resumable, RunId, TurnError, TurnRequest, TurnStart},
    session::Status,
};
use tokio::sync::{mpsc, oneshot};
use utoipa::{IntoParams, ToSchema};

/// A run to start.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewRun {
    /// Messages to append first; if omitted, the run continues from the session's end.
    #[serde(default)]
    #[schema(value_type = Option<Vec<Object>>)]
    messages: Option<Vec<Box<serde_json::value::RawValue>>>,
    /// The text of one user message, instead of `messages`.
    #[serde(default)]
    input: Option<String>,
    /// The model; by default the assistant's, else the session's.
    #[serde(default)]
    model: Option<String>,
    /// Further fields for the model server, such as `temperature`.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    options: Option<Map<String, Value>>,
    /// `wait` (respond when the run ends or waits for review), `stream` (respond with its events) or `background` (respond immediately).
    #[serde(default)]
    mode: Wait,
    /// What to do if the session is busy: `queue`, `reject` or `interrupt`.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    on_busy: Option<OnBusy>,
}

/// The response mode of a new run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Wait {
    /// Respond when the run ends or waits for review.
    #[default]
    Wait,
    /// Respond with its events as they occur.
    Stream,
    /// Respond immediately.
    Background,
}

/// A run with its outcome.
#[derive(Debug, Serialize, ToSchema)]
pub struct RunWhole {
    /// The run.
    #[serde(flatten)]
    run: RunView,
    /// Its last answer.
    #[schema(value_type = Option<Object>)]
    answer: Option<Value>,
    /// The open reviews that block the run.
    reviews: Vec<String>,
}

/// Runs, oldest first.
#[derive(Debug, Serialize, ToSchema)]
pub struct RunList {
    /// `list`.
    object: &'static str,
    /// The runs.
    data: Vec<RunView>,
    /// Always `null`: the list is complete.
    next_cursor: Option<String>,
}

/// The events of a run.
#[derive(Debug, Serialize, ToSchema)]
pub struct EventList {
    /// `list`.
    object: &'static str,
    /// The events, oldest first: `seq`, `created_at`, `type` and `data`.
    #[schema(value_type = Vec<Object>)]
    data: Vec<Value>,
    /// The value of `after` for the next events.
    next_cursor: Option<String>,
    /// Whether the run is over and no more events follow.
    over: bool,
}

/// The position after which events are returned.
#[derive(Debug, Deserialize, IntoParams)]
pub struct EventCursor {
    /// The id of the last event received; the same as `Last-Event-ID`.
    #[serde(default)]
    after: Option<Seq>,
}

/// Start a run
///
/// Executes model calls and tool calls until there is an answer. Each step is durable. The run continues if its client disconnects, after a
/// restart of the server, and on another node if its own has failed.
#[utoipa::path(
    post, path = "/sessions/{id}/runs", tag = "runs", operation_id = "create_run",
    params(("id" = String, Path, description = "The session"), ("Idempotency-Key" = Option<String>, Header, description = "Requests with the same key and body start one run")),
    request_body(content = NewRun),
    responses(
        (status = 200, description = "The run ended (`completed`, `failed`, `cancelled`) or waits for review or a rate limit (`paused`)", content((RunWhole = "application/json"), (String = "text/event-stream"))),
        (status = 202, description = "The run was started (`background`)", body = RunWhole),
        (status = 400, description = "Invalid request", body = ErrorBody),
        (status = 401, description = "Missing or unknown API key", body = ErrorBody),
        (status = 403, description = "The API key lacks the required right", body = ErrorBody),
        (status = 404, description = "No such session or model", body = ErrorBody),
        (status = 408, description = "Timeout while reading the body; nothing was changed", body = ErrorBody),
        (status = 409, description = "The session is busy or paused", body = ErrorBody),
        (status = 410, description = "The session was deleted, or has expired (`on_expired: reject`)", body = ErrorBody),
        (status = 413, description = "A size limit was exceeded", body = ErrorBody),
        (status = 415, description = "The content type is not JSON", body = ErrorBody),
        (status = 422, description = "The idempotency key was used with a different body", body = ErrorBody),
        (status = 429, description = "Too many requests are queued for the session", body = ErrorBody),
        (status = 500, description = "The stored data is corrupt (`corrupt`)", body = ErrorBody),
        (status = 503, description = "The store is unavailable", body = ErrorBody),
        (status = 507, description = "The disk is full", body = ErrorBody),
    )
)]
pub async fn create(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    headers: HeaderMap,
    JsonBody(body): JsonBody<NewRun>,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    caller.admit_model_call(&app.rate_limits)?;
    let mut head = app.tenure.head(&principal, &id).await?;
    if head.status == Status::Deleted {
        // Fails: a deleted session is gone, whatever the request asks for.
        head = app.tenure.get_live_head(&principal, &id).await?;
    }
    let model = match body.model.clone() {
        Some(name) => name,
        None => session_model(&app, &principal, &head).await?,
    };
    if app.models.get(&model).is_none() {
        return Err(unknown_model(&app.models, &model));
    }
    let mode = body.mode;
    let request = body.into_request(id.clone(), model, app.config.sessions.on_busy, &headers)?;
    let on_expired = match app.config.sessions.on_expired {
        // A new session has nothing that a run without messages could continue.
        OnExpired::Fresh if request.messages.is_empty() => OnExpired::Reject,
        policy => policy,
    };
    if let Some((key, body)) = &request.idempotency
        && let Some((_, run)) = app.tenure.find_by_idempotency_key(&principal, key, body).await?
    {
        return respond_to_repeat(&app, &principal, &id, &run, mode).await;
    }
    let started = open(&app, &principal, &id, request.clone()).await;
    let started = match sessions::unless_expired(&app, &principal, &id, on_expired, started).await? {
        Some(started) => started,
        None => open(&app, &principal, &id, request).await?,
    };
    match started {
        TurnStart::Run(turn) => execute(&app, &principal, *turn, mode, caller.token_meter(&app.rate_limits)).await,
        TurnStart::AlreadyAnswered { run, .. } => run_response(&app, &principal, &id, &run, StatusCode::OK).await,
    }
}

impl NewRun {
    /// Converts the body into a turn request. With an idempotency key, requests with the same messages, model
    /// and options are deduplicated to one run.
    fn into_request(
        self,
        id: SessionId,
        model: String,
        on_busy: OnBusy,
        headers: &HeaderMap,
    ) -> ApiResult<TurnRequest> {
        let mut messages = Vec::new();
        for (i, raw) in self.messages.unwrap_or_default().iter().enumerate() {
            messages.push(Message::parse(raw.get()).map_err(|e| e.within(&format!("messages[{i}]")))?);
        }
        messages.extend(self.input.as_deref().map(Message::user));
        let options = Value::Object(self.options.unwrap_or_default());
        let resumable = jobs::runs::resumable(&model, &serde_json::from_value(options).unwrap_or_default());
        if resumable.is_none() {
            return Err(ApiError::too_large("options", "`options` is larger than 64 KiB; send less"));
        }
        let on_busy = self.on_busy.unwrap_or(on_busy);
        if on_busy == OnBusy::Branch {
            return Err(ApiError::invalid(
                "on_busy",
                "`branch` is not supported for runs; use queue, reject or interrupt",
            ));
        }
        let idempotency = idempotency_key(headers)?.map(|key| {
            let contents: Vec<&str> = messages.iter().map(Message::as_str).collect();
            (key, blake3::hash(json!([id, contents, resumable]).to_string().as_bytes()).to_hex().to_string())
        });
        Ok(TurnRequest {
            session: Some(id),
            messages,
            history: Some(HistoryMode::Append),
            model: Some(model),
            on_busy,
            on_expired: OnExpired::Reject,
            idempotency,
            resumable,
            ..TurnRequest::default()
        })
    }
}

/// Opens a run: with messages as a new turn, without messages from the current end of the session.
async fn open(
    app: &AppState,
    principal: &Principal,
    id: &SessionId,
    request: TurnRequest,
) -> tenure::Result<TurnStart> {
    if request.messages.is_empty() {
        let turn = app.tenure.start_run(principal, id, request.on_busy, request.resumable).await?;
        return Ok(TurnStart::Run(Box::new(turn)));
    }
    app.tenure.begin_turn(principal, request).await
}

/// The model for a run whose request names none: the session's preferred model, else the default.
async fn session_model(app: &AppState, principal: &Principal, head: &Head) -> ApiResult<String> {
    let preferred = sessions::preferred_models(app, principal, head).await?;
    Ok(preferred.into_iter().next().unwrap_or_else(|| app.models.default_name().to_owned()))
}

/// Responds to a repeated idempotency key: the existing run is awaited or streamed, and no new one is started.
/// If no node executes it, the recovery loop takes it over.
async fn respond_to_repeat(
    app: &AppState,
    principal: &Principal,
    id: &SessionId,
    run: &RunId,
    wait: Wait,
) -> ApiResult<Response> {
    match wait {
        Wait::Stream => Ok(events(app.clone(), principal.clone(), id.clone(), run.clone(), 0, None)),
        Wait::Background => run_response(app, principal, id, run, StatusCode::ACCEPTED).await,
        Wait::Wait => loop {
            let (head, current) = app.tenure.get_run(principal, id, run).await?;
            if current.ended.is_some() || head.status == Status::Paused {
                return run_response(app, principal, id, run, StatusCode::OK).await;
            }
            app.tenure.wait_for_change(principal, id, head.seq).await?;
        },
    }
}

/// Executes a run in the background and responds in the requested mode.
async fn execute(
    app: &AppState,
    principal: &Principal,
    turn: OpenRun,
    wait: Wait,
    meter: Option<TokenMeter>,
) -> ApiResult<Response> {
    let id = turn.session_id().clone();
    let run = turn.run_id().clone();
    tracing::Span::current().record("session_id", id.as_str()).record("run_id", run.as_ref());
    let (events_tx, events_rx) = mpsc::channel(super::chat::MAX_BUFFERED_EVENTS);
    let (ended_tx, ended) = oneshot::channel::<Result<TurnOutcome, TurnError>>();
    let state = app.clone();
    app.tasks.spawn(async move {
        let outcome =
            jobs::runs::execute_stored_run(&state, turn, (wait == Wait::Stream).then_some(events_tx), meter).await;
        let _ = ended_tx.send(outcome);
    });
    match wait {
        Wait::Background => run_response(app, principal, &id, &run, StatusCode::ACCEPTED).await,
        Wait::Stream => Ok(events(app.clone(), principal.clone(), id, run, 0, Some(events_rx))),
        Wait::Wait => {
            // The outcome is read from the session.
            let _ = ended.await;
            run_response(app, principal, &id, &run, StatusCode::OK).await
        }
    }
}

async fn run_response(
    app: &AppState,
    principal: &Principal,
    id: &SessionId,
    run: &RunId,
    status: StatusCode,
) -> ApiResult<Response> {
    let response = app.tenure.with_session(principal, id, |session| {
        let state = session.run(run)?;
        let last = session.messages.iter().rev().find(|m| m.run.as_ref() == Some(run));
        let answer = last.filter(|m| m.message.role() == tenure::Role::Assistant).map(|m| m.message.to_value());
        let open = session.open_reviews().filter(|r| r.opened.run.as_ref() == Some(run));
        let reviews = open.map(|r| r.opened.review.to_string()).collect();
        Some((session.head().seq, RunWhole { run: RunView::of(state, session.head()), answer, reviews }))
    });
    match response.await? {
        Some((seq, run)) => Ok(view::json(status, Some(seq), view::to_json(&run))),
        None => Err(tenure::Error::NoSuchRun { session_id: id.clone(), run: run.clone() }.into()),
    }
}

fn run_id(path: &PathParams) -> ApiResult<RunId> {
    Ok(RunId::new(path.get("run")?)?)
}

/// List runs
#[utoipa::path(
    get, path = "/sessions/{id}/runs", tag = "runs", operation_id = "list_runs",
    params(("id" = String, Path, description = "The session")),
    responses((status = 200, description = "All of them, oldest first", body = RunList), ReadErrors)
)]
pub async fn list(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
) -> ApiResult<Json<RunList>> {
    let principal = caller.authorize_read()?;
    let view = |session: &tenure::Session| session.runs.iter().map(|r| RunView::of(r, session.head())).collect();
    let data = app.tenure.browsing(&principal).with_session(&principal, &id, view).await?;
    Ok(Json(RunList { object: "list", data, next_cursor: None }))
}

/// Get a run
#[utoipa::path(
    get, path = "/sessions/{id}/runs/{run}", tag = "runs", operation_id = "get_run",
    params(("id" = String, Path, description = "The session"), ("run" = String, Path, description = "The run")),
    responses((status = 200, description = "The run's status and last answer", body = RunWhole), ReadErrors)
)]
pub async fn get(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    path: PathParams,
) -> ApiResult<Response> {
    run_response(&app, &caller.authorize_read()?, &id, &run_id(&path)?, StatusCode::OK).await
}

/// Follow a run
///
/// With `Accept: text/event-stream` (or none), events are sent as server-sent events until the run is over. The id of an event is the
/// sequence number of its record: a client that sends it as `Last-Event-ID` receives all later events, also after a restart and from another
/// node. With `Accept: application/json` the events so far are returned as a list.
#[utoipa::path(
    get, path = "/sessions/{id}/runs/{run}/events", tag = "runs", operation_id = "run_events",
    params(
        ("id" = String, Path, description = "The session"), ("run" = String, Path, description = "The run"), EventCursor,
        ("Last-Event-ID" = Option<String>, Header, description = "The id of the last event received"),
    ),
    responses((status = 200, description = "The events", content((EventList = "application/json"), (String = "text/event-stream"))), ReadErrors)
)]
pub async fn follow(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    path: PathParams,
    headers: HeaderMap,
    QueryParams(after): QueryParams<EventCursor>,
) -> ApiResult<Response> {
    let principal = caller.authorize_read()?;
    let run = run_id(&path)?;
    let last = header_text(&headers, "last-event-id")?.filter(|t| !t.is_empty());
    let last = last.map(|t| t.parse::<Seq>()).transpose();
    let last = last.map_err(|_| ApiError::invalid("Last-Event-ID", "it must be the id of an event, a number"))?;
    let after = last.or(after.after).unwrap_or(0);
    // Errors must be detected before the response headers are sent.
    let first = app.tenure.follow(&principal, &id, &run, after, PAGE).await?;
    if header_hint(&headers, "accept").is_some_and(|a| a.contains("application/json")) {
        let next = first.records.last().map_or(after, |r| r.seq);
        let data = first.records.iter().map(event).collect();
        let list = EventList { object: "list", data, next_cursor: Some(next.to_string()), over: first.ended };
        return Ok(Json(list).into_response());
    }
    Ok(events(app, principal, id, run, after, None))
}

/// Cancel a run
///
/// Stored results stay. Tool calls that were made are not undone.
#[utoipa::path(
    post, path = "/sessions/{id}/runs/{run}/cancel", tag = "runs", operation_id = "cancel_run",
    params(("id" = String, Path, description = "The session"), ("run" = String, Path, description = "The run")),
    responses((status = 200, description = "The run was cancelled, or had already ended", body = RunWhole), view::UpdateErrors)
)]
pub async fn cancel(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    path: PathParams,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    let run = run_id(&path)?;
    app.tenure.cancel(&principal, &id, &run).await?;
    run_response(&app, &principal, &id, &run, StatusCode::OK).await
}

/// Resume a run
///
/// Starts a new run that continues where a failed or cancelled run ended, with the same parameters.
#[utoipa::path(
    post, path = "/sessions/{id}/runs/{run}/resume", tag = "runs", operation_id = "resume_run",
    params(("id" = String, Path, description = "The session"), ("run" = String, Path, description = "The run")),
    responses((status = 202, description = "A new run was started", body = RunWhole), view::UpdateErrors)
)]
pub async fn resume(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    path: PathParams,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    let run = run_id(&path)?;
    caller.admit_model_call(&app.rate_limits)?;
    let on_expired = match app.config.sessions.on_expired {
        // The run belongs to the expired session, not to a new one.
        OnExpired::Fresh => OnExpired::Reject,
        policy => policy,
    };
    let found = app.tenure.get_run(&principal, &id, &run).await;
    let (head, previous) = match sessions::unless_expired(&app, &principal, &id, on_expired, found).await? {
        Some(found) => found,
        None => app.tenure.get_run(&principal, &id, &run).await?,
    };
    if previous.ended.is_none() {
        let message = if head.paused_until().is_some() {
            "the run is paused because of a rate limit; it resumes by itself (`resumes_at` of the run)"
        } else if head.reviews.is_empty() {
            "the run is still in progress; follow its events"
        } else {
            "the run is waiting for review; it resumes when its reviews (GET /reviews) are decided"
        };
        return Err(ApiError::new(StatusCode::CONFLICT, "run_not_ended", message));
    }
    let resumable = match previous.resumable() {
        Some(resumable) => resumable,
        None => Resumable::new(session_model(&app, &principal, &head).await?),
    };
    let turn = app.tenure.start_run(&principal, &id, OnBusy::Reject, Some(resumable)).await?;
    execute(&app, &principal, turn, Wait::Background, caller.token_meter(&app.rate_limits)).await
}
