//! Starts the server's background jobs.

use super::{memory, runs, schedules, sweep};
use crate::app::AppState;
use crate::observability::metrics;

/// Starts all background jobs as tasks. They end when the server stops.
pub fn start_all(app: &AppState) {
    let here = app.clone();
    app.tasks.spawn(async move { sweep::run_loop(&here).await });
    let here = app.clone();
    app.tasks.spawn(async move { runs::look_after(&here).await });
    let here = app.clone();
    app.tasks.spawn(async move { schedules::watch(&here).await });
    let here = app.clone();
    app.tasks.spawn(async move { memory::embed_for_ever(&here).await });
    let here = app.clone();
    app.tasks.spawn(async move { memory::dream_for_ever(&here).await });
    let here = app.clone();
    app.tasks.spawn(async move { here.transcripts.follow(&here.tenure, &here.tasks).await });
    let here = app.clone();
    app.tasks.spawn(async move { metrics::upkeep(here.tasks.stopping()).await });
    let here = app.clone();
    app.tasks.spawn(async move { here.tools.reap_until(here.tasks.stopping()).await });
}
