//! The sweep job: expires, evicts and purges sessions that are due.

use crate::app::App;
use crate::clock::Stopwatch;
use crate::observability::metrics;
use std::time::Duration;
use tenure::Tenure;

/// Retry interval after a failed sweep, and the minimum interval between sweeps unless more work is pending.
const SOON: Duration = Duration::from_secs(60);
/// Maximum interval between sweeps, however long sessions live.
const AT_LEAST: Duration = Duration::from_secs(3600);

/// The delay before the next sweep.
#[derive(Clone, Copy, Debug, PartialEq)]
enum NextSweep {
    AtOnce,
    Soon,
    InTime,
}

/// Sweeps until the server stops, at intervals of a quarter of the shortest time to live, but not less than one
/// minute and not more than one hour.
pub async fn run_loop(app: &App) {
    loop {
        // A sweep that is cancelled by a shutdown is repeated after the restart.
        let again = tokio::select! {
            again = sweep(&app.tenure) => again,
            () = app.tasks.stopping() => return,
        };
        let watch = Stopwatch::start();
        loop {
            // Recomputed each minute: an assistant with a shorter time to live may have been created meanwhile.
            let wait = match again {
                NextSweep::AtOnce => Duration::from_millis(100),
                NextSweep::Soon => SOON,
                NextSweep::InTime => pause(&app.tenure),
            };
            let left = wait.saturating_sub(watch.elapsed());
            if left.is_zero() {
                break;
            }
            tokio::select! {
                () = tokio::time::sleep(left.min(SOON)) => {}
                () = app.tasks.stopping() => return,
            }
        }
    }
}

fn pause(tenure: &Tenure) -> Duration {
    (tenure.shortest_ttl().unwrap_or(Duration::MAX) / 4).clamp(SOON, AT_LEAST)
}

/// Runs one sweep, logs its report, and returns when to sweep again: immediately if there is more to do and
/// this pass made progress or had no failures, after `SOON` if anything failed.
async fn sweep(tenure: &Tenure) -> NextSweep {
    let watch = Stopwatch::start();
    match tenure.sweep().await {
        Ok(report) => {
            metrics::sweep(&report, watch.elapsed());
            let (expired, evicted, purged) = (report.expired.len(), report.evicted.len(), report.purged.len());
            let failed = report.failed.len();
            if expired + evicted + purged + failed > 0 {
                tracing::info!(expired, evicted, purged, failed, "swept");
            }
            for (key, why) in &report.failed {
                tracing::warn!(session_id = %key.session, why, "a session could not be swept; it is tried again");
            }
            match expired + evicted + purged + report.items > 0 || failed == 0 {
                true if report.more => NextSweep::AtOnce,
                _ if failed > 0 => NextSweep::Soon,
                _ => NextSweep::InTime,
            }
        }
        Err(e) => {
            tracing::warn!(error = %e, "the sweep failed; it is tried again");
            NextSweep::Soon
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tenure::{AccessScope, Assistant, Principal};

    #[tokio::test]
    async fn an_assistant_made_later_makes_the_sweep_come_sooner() {
        let tenure = Tenure::open("memory:").await.unwrap();
        assert_eq!(pause(&tenure), AT_LEAST);
        let minutes = |m: u64| Duration::from_secs(m * 60);
        for (ttl, want) in [("2h", minutes(30)), ("20m", minutes(5)), ("1s", SOON)] {
            let mut assistant = Assistant { name: format!("a-{ttl}"), ..Assistant::default() };
            assistant.sessions.ttl = Some(ttl.parse().unwrap());
            let who = Principal { reach: AccessScope::Tenant, ..Principal::default() };
            tenure.put_assistant(&who, assistant).await.unwrap();
            assert_eq!(pause(&tenure), want);
        }
    }
}
