//! `/schedules`: the scheduled runs of the tenant and their state.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::ApiResult;
use crate::http::query::StrictQuery;
use crate::http::view::ListErrors;
use crate::jobs::schedules::ScheduleJob;
use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

/// A schedule and its state.
#[derive(Debug, Serialize, ToSchema)]
pub struct ScheduleView {
    /// Its name.
    name: String,
    /// The start times as a cron expression: minute, hour, day, month, day of the week.
    cron: String,
    /// The time zone of the cron expression.
    timezone: String,
    /// The assistant that runs.
    assistant: String,
    /// The session that all runs use; `null` means a new session for each run.
    session_id: Option<String>,
    /// When it is due next.
    #[schema(format = DateTime)]
    next_at: Option<String>,
    /// With `next=N`: the next N times at which it is due.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_times: Option<Vec<String>>,
    /// When it was due last.
    #[schema(format = DateTime)]
    last_at: Option<String>,
    /// How often it has run.
    count: u64,
    /// The session of the last run.
    last_session_id: Option<String>,
    /// The last run.
    last_run_id: Option<String>,
    /// Times at which it was due and did not run, with the reasons.
    missed: Vec<MissedView>,
}

/// A due time at which a schedule did not run.
#[derive(Debug, Serialize, ToSchema)]
pub struct MissedView {
    /// When it was due.
    #[schema(format = DateTime)]
    at: String,
    /// The reason why it did not run.
    #[serde(rename = "why")]
    reason: String,
}

/// All schedules of the tenant.
#[derive(Debug, Serialize, ToSchema)]
pub struct ScheduleList {
    /// `list`.
    object: &'static str,
    /// The schedules.
    data: Vec<ScheduleView>,
    /// Always `null`: the list is complete.
    next_cursor: Option<String>,
}

/// List schedules
///
/// They are declared in `tenure.yaml`.
#[utoipa::path(
    get, path = "/schedules", tag = "runs", operation_id = "list_schedules",
    params(("next" = Option<u32>, Query, minimum = 1, maximum = 100, description = "Also the next N times of each schedule")),
    responses((status = 200, description = "All schedules of the tenant", body = ScheduleList), ListErrors)
)]
pub async fn list(
    State(app): State<AppState>,
    caller: Caller,
    mut params: StrictQuery,
) -> ApiResult<Json<ScheduleList>> {
    let principal = caller.authorize_read()?;
    let times = params.count("next", app.config.limits.max_page)?;
    params.reject_unknown()?;
    let mut data = Vec::new();
    for compiled in app.schedules.iter().filter(|p| p.schedule.tenant == principal.tenant.as_str()) {
        let state = ScheduleJob::new(&app, compiled).state().await?;
        let schedule = compiled.schedule.clone();
        let missed = state.missed.into_iter().map(|m| MissedView { at: m.at.to_string(), reason: m.reason });
        let from = state.last.unwrap_or_else(|| app.tenure.now());
        let due = std::iter::successors(compiled.next(from), |at| compiled.next(*at));
        data.push(ScheduleView {
            next_at: compiled.next(from).map(|t| t.to_string()),
            next_times: times.map(|n| due.take(n).map(|t| t.to_string()).collect()),
            name: schedule.name,
            cron: schedule.cron,
            timezone: schedule.timezone,
            assistant: schedule.assistant,
            session_id: schedule.session,
            last_at: state.last.filter(|_| state.count > 0).map(|t| t.to_string()),
            count: state.count,
            last_session_id: state.session.map(|s| s.to_string()),
            last_run_id: state.run.map(|r| r.to_string()),
            missed: missed.collect(),
        });
    }
    Ok(Json(ScheduleList { object: "list", data, next_cursor: None }))
}
