//! Scheduled runs: an assistant is asked at the times of a cron expression, in a new session each time or
//! always in the same one.
//!
//! Every node evaluates the schedules. Each due time is submitted with its own idempotency key, so concurrent
//! nodes start one run between them. Times that were due while no node was running, or while the previous run
//! was still in progress, are not made up for; they are recorded as missed (D-058).

use super::runs;
use crate::app::AppState;
use crate::config::schedules::{CompiledSchedule, Schedule};
use crate::sessions;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::VecDeque;
use std::time::Duration;
use tenure::store::{Item, Namespace, Owner};
use tenure::{
    Message, SessionId,
    policy::HistoryMode,
    run::{OnBusy, Resumable, RunId, TurnRequest, TurnStart},
};

/// A due time older than this is recorded as missed instead of being run.
const MAX_DELAY: SignedDuration = SignedDuration::from_mins(5);
/// Maximum sleep between two evaluations, however far away the next due time is: the wall clock may be
/// adjusted.
const MAX_EVALUATION_INTERVAL: SignedDuration = SignedDuration::from_secs(5);
const RAN: &str = "ran";
const MISSED: &str = "missed";
/// Maximum number of missed times that are reported.
const MAX_REPORTED_MISSED: usize = 20;
/// Maximum number of records of each kind that are stored per schedule.
const MAX_RECORDS: usize = 50;

/// The state of a schedule, folded from its stored records.
#[derive(Clone, Debug, Default)]
pub struct ScheduleState {
    /// The last due time that was processed. `None` means that the schedule has never been evaluated.
    pub last: Option<Timestamp>,
    /// The number of runs started so far.
    pub count: u64,
    /// The session of the last run.
    pub session: Option<SessionId>,
    /// The last run.
    pub run: Option<RunId>,
    /// Missed due times with their reasons, newest last.
    pub missed: Vec<MissedStart>,
}

/// A due time at which a schedule did not run.
#[derive(Clone, Debug, PartialEq)]
pub struct MissedStart {
    /// The due time.
    pub at: Timestamp,
    /// The reason for not running.
    pub reason: String,
}

/// The stored outcome of one due time. Records are append-only and none invalidates another, so concurrent
/// nodes need not agree on which of them writes (D-058).
#[derive(Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum ScheduleRecord {
    /// The schedule was first seen; earlier due times are ignored.
    New {
        at: Timestamp,
    },
    Missed {
        at: Timestamp,
        reason: String,
    },
    /// A run was started. Overrides a `Missed` record of the same time from another node.
    Ran {
        at: Timestamp,
        count: u64,
        session: SessionId,
        run: RunId,
    },
}

impl ScheduleRecord {
    fn at(&self) -> Timestamp {
        let (Self::New { at } | Self::Missed { at, .. } | Self::Ran { at, .. }) = self;
        *at
    }

    /// The namespace suffix of this kind of record. Kinds are stored separately, so that many missed times do
    /// not evict the last run.
    fn namespace_kind(&self) -> &'static str {
        match self {
            Self::New { .. } | Self::Ran { .. } => RAN,
            Self::Missed { .. } => MISSED,
        }
    }
}

/// A configured schedule, bound to the application.
#[derive(Clone, Copy, Debug)]
pub struct ScheduleJob<'a> {
    app: &'a AppState,
    compiled: &'a CompiledSchedule,
}

impl<'a> ScheduleJob<'a> {
    /// Binds a schedule to the application, without evaluating it.
    pub fn new(app: &'a AppState, compiled: &'a CompiledSchedule) -> Self {
        Self { app, compiled }
    }

    fn namespace(&self, kind: &str) -> Namespace {
        let name = format!("schedule/{}/{kind}", self.compiled.schedule.name);
        Namespace { tenant: self.compiled.principal.tenant.clone(), owner: Owner::Tenant, name }
    }

    /// Loads the stored records and folds them into the schedule's state, with at most `MAX_REPORTED_MISSED` missed
    /// times.
    pub async fn state(&self) -> tenure::Result<ScheduleState> {
        let mut state = ScheduleState::default();
        for kind in [MISSED, RAN] {
            for item in self.app.tenure.store().items(&self.namespace(kind), None, 2 * MAX_RECORDS).await? {
                let location = || {
                    format!("schedule {:?} of tenant {}", self.compiled.schedule.name, self.compiled.principal.tenant)
                };
                let record: ScheduleRecord =
                    serde_json::from_str(&item.value).map_err(|e| tenure::Error::corrupt_from(location(), e))?;
                state.add(record);
            }
        }
        let excess = state.missed.len().saturating_sub(MAX_REPORTED_MISSED);
        state.missed.drain(..excess);
        Ok(state)
    }

    async fn put_record(&self, record: &ScheduleRecord) -> tenure::Result<()> {
        let created_at = self.app.tenure.now();
        let used_at = record.at();
        let key = used_at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let item = Item { used_at, ..Item::new(key, json!(record).to_string(), created_at) };
        self.app.tenure.store().put(&self.namespace(record.namespace_kind()), &item, Some(MAX_RECORDS)).await
    }

    async fn record_missed(&self, at: Timestamp, reason: &str) -> tenure::Result<()> {
        tracing::warn!(schedule = self.compiled.schedule.name, %at, reason, "scheduled run missed");
        metrics::counter!("tenure_schedules_total", "what" => "missed").increment(1);
        self.put_record(&ScheduleRecord::Missed { at, reason: reason.to_owned() }).await
    }

    /// Evaluates the schedule: starts the run that is due and records missed times. Returns the next due time,
    /// or `None` if there is none.
    async fn evaluate(&self) -> tenure::Result<Option<Timestamp>> {
        let now = self.app.tenure.now();
        let state = self.state().await?;
        let Some(last) = state.last else {
            // A new schedule starts with its next due time.
            self.put_record(&ScheduleRecord::New { at: now }).await?;
            return Ok(self.compiled.next(now));
        };
        let mut due = VecDeque::new();
        let mut at = last;
        while let Some(next) = self.compiled.next(at).filter(|t| *t <= now) {
            due.push_back(next);
            at = next;
            if due.len() > MAX_REPORTED_MISSED {
                due.pop_front();
            }
        }
        let Some(latest) = due.pop_back() else { return Ok(self.compiled.next(last)) };
        for at in due {
            self.record_missed(at, "no server was running").await?;
        }
        if now.duration_since(latest) > MAX_DELAY {
            self.record_missed(latest, "no server was running").await?;
        } else if self.is_running(&state).await? {
            self.record_missed(latest, "the previous run was still in progress").await?;
        } else {
            let count = state.count + 1;
            let (session, run) = match self.fire(latest, count).await {
                Err(tenure::Error::Gone { session_id, status }) => {
                    let reason = format!("its session {session_id} is {status}; restore or purge it");
                    self.record_missed(latest, &reason).await?;
                    return Ok(self.compiled.next(latest));
                }
                fired => fired?,
            };
            metrics::counter!("tenure_schedules_total", "what" => "ran").increment(1);
            self.put_record(&ScheduleRecord::Ran { at: latest, count, session, run }).await?;
        }
        Ok(self.compiled.next(latest))
    }

    async fn is_running(&self, state: &ScheduleState) -> tenure::Result<bool> {
        let (Some(session), Some(run)) = (&state.session, &state.run) else { return Ok(false) };
        match self.app.tenure.get_run(&self.compiled.principal, session, run).await {
            Ok((_, run)) => Ok(run.ended.is_none()),
            Err(tenure::Error::NotFound { .. } | tenure::Error::NoSuchRun { .. } | tenure::Error::Gone { .. }) => {
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    /// Starts the run of a due time and returns its session and run. The call is idempotent: if another node
    /// has started it, that run is returned.
    async fn fire(&self, at: Timestamp, count: u64) -> tenure::Result<(SessionId, RunId)> {
        let Schedule { name, assistant, .. } = &self.compiled.schedule;
        let input = self.compiled.input_at(at, count).map_err(|e| tenure::Error::invalid("input", format!("{e:#}")))?;
        let key = format!("schedule/{name}/{}", at.as_second());
        let body = blake3::hash(name.as_bytes()).to_hex().to_string();
        if let Some(started) = self.app.tenure.find_by_idempotency_key(&self.compiled.principal, &key, &body).await? {
            return Ok(started);
        }
        let model = sessions::assistant_model(self.app, &self.compiled.principal, assistant).await?;
        let model = model.unwrap_or_else(|| self.app.models.default_name().to_owned());
        let new_id = || SessionId::new(format!("{name}-{}", at.strftime("%Y%m%dT%H%MZ")));
        let session = self.compiled.session.clone().map_or_else(new_id, Ok)?;
        let request = TurnRequest {
            session: Some(session),
            messages: vec![Message::user(&input)],
            history: Some(HistoryMode::Append),
            assistant: Some(assistant.clone()),
            resumable: Some(Resumable::new(&model)),
            model: Some(model),
            on_busy: OnBusy::Reject,
            on_expired: self.app.config.sessions.on_expired,
            idempotency: Some((key.clone(), body.clone())),
            ..TurnRequest::default()
        };
        match self.app.tenure.begin_turn(&self.compiled.principal, request).await? {
            TurnStart::AlreadyAnswered { session_id, run, .. } => Ok((session_id, run)),
            TurnStart::Run(turn) => {
                let started = (turn.session_id().clone(), turn.run_id().clone());
                tracing::info!(schedule = name, session_id = %started.0, run = %started.1, "scheduled run started");
                let app_handle = self.app.clone();
                self.app
                    .tasks
                    .spawn(async move { drop(runs::execute_stored_run(&app_handle, *turn, None, None).await) });
                Ok(started)
            }
        }
    }
}

impl ScheduleState {
    fn add(&mut self, record: ScheduleRecord) {
        self.last = self.last.max(Some(record.at()));
        match record {
            ScheduleRecord::New { .. } => {}
            ScheduleRecord::Missed { at, reason } => self.missed.push(MissedStart { at, reason }),
            ScheduleRecord::Ran { at, count, session, run } => {
                self.count = count;
                self.session = Some(session);
                self.run = Some(run);
                self.missed.retain(|m| m.at != at);
            }
        }
    }
}

/// Evaluates all schedules whenever one is due, until the server stops. Returns immediately if none is
/// configured.
pub async fn run_loop(app: &AppState) {
    if app.schedules.is_empty() {
        return;
    }
    loop {
        let wait = Duration::try_from(evaluate_all(app).await.duration_since(app.tenure.now())).unwrap_or_default();
        tokio::select! {
            () = tokio::time::sleep(wait.max(Duration::from_millis(500))) => {}
            () = app.tasks.wait_for_stop() => return,
        }
    }
}

/// Evaluates all schedules once. Returns the time of the next evaluation, at most `MAX_EVALUATION_INTERVAL` from
/// now. A schedule that fails is logged and retried then.
pub async fn evaluate_all(app: &AppState) -> Timestamp {
    let mut soonest = app.tenure.now().saturating_add(MAX_EVALUATION_INTERVAL).unwrap_or(Timestamp::MAX);
    for compiled in &app.schedules {
        match ScheduleJob::new(app, compiled).evaluate().await {
            Ok(next) => soonest = next.map_or(soonest, |t| t.min(soonest)),
            Err(e) => {
                tracing::warn!(schedule = compiled.schedule.name, error = %e, "could not evaluate a schedule; retrying");
            }
        }
    }
    soonest
}
