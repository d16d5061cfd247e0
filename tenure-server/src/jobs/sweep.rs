//! The sweep job: expires, evicts and purges sessions that are due.

use crate::app::App;
use crate::clock::Stopwatch;
use crate::observability::metrics;
use std::time::Duration;
use tenure::Tenure;

/// Retry interval after a failed sweep, and the minimum interval between sweeps unless more work is pending.
const MIN_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum interval between sweeps, however long sessions live.
const MAX_INTERVAL: Duration = Duration::from_secs(3600);

/// The delay before the next sweep.
#[derive(Clone, Copy, Debug, PartialEq)]
enum NextSweep {
    Immediate,
    AfterMinInterval,
    AfterInterval,
}

/// Sweeps until the server stops, at intervals of a quarter of the shortest time to live, but not less than one
/// minute and not more than one hour.
pub async fn run_loop(app: &App) {
    loop {
        // A sweep that is cancelled by a shutdown is repeated after the restart.
        let next = tokio::select! {
            next = sweep(&app.tenure) => next,
            () = app.tasks.wait_for_stop() => return,
        };
        let stopwatch = Stopwatch::start();
        loop {
            // Recomputed each minute: an assistant with a shorter time to live may have been created meanwhile.
            let wait = match next {
                NextSweep::Immediate => Duration::from_millis(100),
                NextSweep::AfterMinInterval => MIN_INTERVAL,
                NextSweep::AfterInterval => interval(&app.tenure),
            };
            let remaining = wait.saturating_sub(stopwatch.elapsed());
            if remaining.is_zero() {
                break;
            }
            tokio::select! {
                () = tokio::time::sleep(remaining.min(MIN_INTERVAL)) => {}
                () = app.tasks.wait_for_stop() => return,
            }
        }
    }
}

fn interval(tenure: &Tenure) -> Duration {
    (tenure.shortest_ttl().unwrap_or(Duration::MAX) / 4).clamp(MIN_INTERVAL, MAX_INTERVAL)
}

/// Runs one sweep, logs its report, and returns when to sweep again: immediately if there is more to do and
/// this pass made progress or had no failures, after `MIN_INTERVAL` if anything failed.
async fn sweep(tenure: &Tenure) -> NextSweep {
    let stopwatch = Stopwatch::start();
    match tenure.sweep().await {
        Ok(report) => {
            metrics::sweep(&report, stopwatch.elapsed());
            let expired = report.expired.len();
            let evicted = report.evicted.len();
            let purged = report.purged.len();
            let failed = report.failed.len();
            if expired + evicted + purged + failed > 0 {
                tracing::info!(expired, evicted, purged, failed, "sweep finished");
            }
            for (key, reason) in &report.failed {
                tracing::warn!(session_id = %key.session, reason, "could not sweep a session; retrying");
            }
            let can_continue = expired + evicted + purged + report.items > 0 || failed == 0;
            if can_continue && report.more {
                NextSweep::Immediate
            } else if failed > 0 {
                NextSweep::AfterMinInterval
            } else {
                NextSweep::AfterInterval
            }
        }
        Err(e) => {
            tracing::warn!(error = %e, "sweep failed; retrying");
            NextSweep::AfterMinInterval
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tenure::{Assistant, Principal, session::AccessScope};

    #[tokio::test]
    async fn an_assistant_created_later_shortens_the_sweep_interval() {
        let tenure = Tenure::open("memory:").await.unwrap();
        assert_eq!(interval(&tenure), MAX_INTERVAL);
        let minutes = |m: u64| Duration::from_secs(m * 60);
        for (ttl, want) in [("2h", minutes(30)), ("20m", minutes(5)), ("1s", MIN_INTERVAL)] {
            let mut assistant = Assistant { name: format!("a-{ttl}"), ..Assistant::default() };
            assistant.sessions.ttl = Some(ttl.parse().unwrap());
            let principal = Principal { scope: AccessScope::Tenant, ..Principal::default() };
            tenure.put_assistant(&principal, assistant).await.unwrap();
            assert_eq!(interval(&tenure), want);
        }
    }
}
