//! Starts the server's background jobs.

use super::{memory, runs, schedules, sweep};
use crate::app::AppState;
use crate::observability::metrics;

/// Starts all background jobs as tasks. They end when the server stops.
pub fn start_all(app: &AppState) {
    let app_handle = app.clone();
    app.tasks.spawn(async move { sweep::run_loop(&app_handle).await });
    let app_handle = app.clone();
    app.tasks.spawn(async move { runs::run_loop(&app_handle).await });
    let app_handle = app.clone();
    app.tasks.spawn(async move { schedules::run_loop(&app_handle).await });
    let app_handle = app.clone();
    app.tasks.spawn(async move { memory::embed_loop(&app_handle).await });
    let app_handle = app.clone();
    app.tasks.spawn(async move { memory::dream_loop(&app_handle).await });
    let app_handle = app.clone();
    app.tasks.spawn(async move { app_handle.transcripts.run_loop(&app_handle.tenure, &app_handle.tasks).await });
    let app_handle = app.clone();
    app.tasks.spawn(async move { metrics::run_maintenance(app_handle.tasks.wait_for_stop()).await });
    if app.config.runs.eager_tools {
        let app_handle = app.clone();
        app.tasks.spawn(async move {
            tokio::select! {
                () = app_handle.tools.connect() => {}
                () = app_handle.tasks.wait_for_stop() => {}
            }
        });
    }
    let app_handle = app.clone();
    app.tasks.spawn(async move { app_handle.tools.reap_until(app_handle.tasks.wait_for_stop()).await });
}
