//! The end of sessions: the sweep, and what is told before a session goes.

use crate::clock::Stopwatch;
use crate::config::Config;
use crate::server::App;
use std::time::Duration;
use tenure::Tenure;

/// Sets up what happens when a session ends.
pub fn install(_tenure: &Tenure, _config: &Config) -> anyhow::Result<()> {
    Ok(())
}

/// Sweeps until the server stops: every quarter of the shortest time to live, at most hourly, at least each minute.
pub async fn sweep_for_ever(app: &App) {
    let ttls = app.config.assistants.iter().filter_map(|a| a.sessions.ttl).chain([app.config.sessions.ttl]);
    let shortest = ttls.filter_map(|p| p.duration()).min().unwrap_or(Duration::MAX);
    let pause = (shortest / 4).clamp(Duration::from_secs(60), Duration::from_secs(3600));
    loop {
        let more = sweep(&app.tenure).await;
        let wait = if more { Duration::from_millis(100) } else { pause };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = app.tasks.stopping() => return,
        }
    }
}

/// One pass; whether there is more to do at once.
async fn sweep(tenure: &Tenure) -> bool {
    let watch = Stopwatch::start();
    match tenure.sweep().await {
        Ok(report) => {
            crate::metrics::sweep(&report, watch.elapsed());
            let (expired, evicted, purged) = (report.expired.len(), report.evicted.len(), report.purged.len());
            if expired + evicted + purged + report.failed.len() > 0 {
                tracing::info!(expired, evicted, purged, failed = report.failed.len(), "swept");
            }
            for (key, why) in &report.failed {
                tracing::warn!(session_id = %key.session, why, "a session could not be swept; it is tried again");
            }
            report.more && report.failed.is_empty()
        }
        Err(e) => {
            tracing::warn!(error = %e, "the sweep failed; it is tried again");
            false
        }
    }
}
