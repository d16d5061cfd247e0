//! Waits for a model server that is rate limited or overloaded: within `retry_wait` in place, beyond it by
//! pausing the session (D-136).

use super::Execution;
use super::step_commit::EntryBuilder;
use crate::engine::pending_commit::PendingCommit;
use crate::executors::model::{ModelStream, Prompt};
use crate::run::executors::{OnRateLimit, TurnError};
use crate::types::entry::Entry;
use crate::types::error::{Error, Result};
use crate::types::id::RunId;
use crate::types::model::ModelError;
use crate::types::status::Status;
use jiff::SignedDuration;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The wait before the first retry, if the server does not say how long to wait. It doubles with each retry.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// The shortest wait, even if the server allows to retry at once.
const MIN_WAIT: Duration = Duration::from_millis(100);
/// The duration of the first pause, if the server does not say how long to wait. It doubles with each pause.
const FIRST_PAUSE: Duration = Duration::from_secs(15);
/// Maximum number of consecutive pauses without progress. Then the run fails.
const MAX_PAUSES: u32 = 10;

impl Execution<'_> {
    /// Asks the model. If it is rate limited, retries within `retry_wait`, then pauses the session or fails.
    /// `None` means that the session was paused; the run resumes later.
    pub(super) async fn ask_model(&mut self, prompt: Prompt) -> Result<Option<ModelStream>, TurnError> {
        let mut waited = Duration::ZERO;
        for retries in 0.. {
            let response = match self.context.input.speculative_call.take() {
                Some(call) => call.response().await,
                None => self.executors.model.ask(prompt.clone()).await,
            };
            let error = match response {
                Ok(stream) => return Ok(Some(stream)),
                Err(error) => error,
            };
            let Some(hint) = error.retry_hint(self.context.tenure.now()) else { return Err(error.into()) };
            let wait = hint.after.unwrap_or_else(|| jittered(doubled(FIRST_WAIT, retries), &self.context.run, retries));
            let wait = wait.max(MIN_WAIT);
            if waited.saturating_add(wait) > self.policy.retry_wait {
                // Boxed, because it is rare and its future is large.
                return Box::pin(self.pause_or_fail(error, hint.after)).await;
            }
            metrics::counter!("tenure_rate_limited_total", "action" => "waited").increment(1);
            tokio::time::sleep(wait).await;
            waited += wait;
        }
        Err(ModelError::Broken { reason: "too many retries".to_owned() }.into())
    }

    /// Pauses the session until the model can be asked again, or returns the error if the run cannot pause.
    async fn pause_or_fail(
        &mut self,
        error: ModelError,
        after: Option<Duration>,
    ) -> Result<Option<ModelStream>, TurnError> {
        let may_pause = self.executors.on_rate_limit == OnRateLimit::Pause
            && self.context.resumable.is_some()
            && !self.policy.max_pause.is_zero();
        if may_pause && self.commit_pause(&error, after).await? {
            metrics::counter!("tenure_rate_limited_total", "action" => "paused").increment(1);
            return Ok(None);
        }
        metrics::counter!("tenure_rate_limited_total", "action" => "failed").increment(1);
        Err(error.into())
    }

    /// Commits the pause with a checkpoint, and releases the lease. Returns false if the run has been paused
    /// too often without progress.
    async fn commit_pause(&mut self, error: &ModelError, after: Option<Duration>) -> Result<bool> {
        let context = &self.context;
        let reason = format!("rate limited: {error}");
        self.lease_state.releasing.store(true, Ordering::Relaxed);
        let committed =
            context.tenure.write_partial_with_retries(&context.principal, &context.session_id, |session, now| {
                let Some(run) = self.held_run(session) else { return Ok(self.superseded_commit(session)) };
                let pauses = run.pauses.count;
                if pauses >= MAX_PAUSES {
                    return Ok(PendingCommit::new(Vec::new(), Some(false)));
                }
                let pause = after.unwrap_or_else(|| jittered(doubled(FIRST_PAUSE, pauses), &context.run, pauses));
                // Whole milliseconds, because stores have no more than microseconds.
                let pause = pause.min(self.policy.max_pause).as_millis().try_into().unwrap_or(i64::MAX);
                let pause = SignedDuration::from_millis(pause);
                let mut builder = EntryBuilder::new(session, run);
                let is_recorded =
                    session.checkpoints.last().is_some_and(|c| c.position == session.head.digest.messages);
                if !is_recorded {
                    builder.checkpoint(&context.run, self.checkpoint_state());
                }
                let until = now.checked_add(pause).ok();
                builder.entries.push(Entry::Status { to: Status::Paused, reason: Some(reason.clone()), until });
                Ok(PendingCommit::new(builder.entries, Some(true)))
            });
        let committed = committed.await;
        if !matches!(committed, Ok(Some(true))) {
            self.lease_state.releasing.store(false, Ordering::Relaxed);
        }
        committed?.ok_or_else(|| Error::Superseded { session_id: context.session_id.clone() })
    }
}

/// A duration doubled `times` times.
fn doubled(first: Duration, times: u32) -> Duration {
    first.saturating_mul(2u32.saturating_pow(times))
}

/// Reduces a wait by up to a quarter, so that runs that were refused together do not retry together. It depends
/// on the run and the number of the retry only.
fn jittered(wait: Duration, run: &RunId, retry: u32) -> Duration {
    let hash = blake3::hash(format!("{run}/{retry}").as_bytes());
    wait.mul_f64(1.0 - f64::from(hash.as_bytes()[0]) / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_and_differ_between_runs() {
        let run = |name: &str| RunId::new(name).unwrap();
        let wait = |name, retry| jittered(doubled(FIRST_WAIT, retry), &run(name), retry);
        for retry in 0..5 {
            let full = FIRST_WAIT * 2u32.pow(retry);
            assert!(wait("a", retry) <= full && wait("a", retry) >= full.mul_f64(0.75));
            assert_ne!(wait("a", retry), wait("b", retry));
        }
        assert!(doubled(FIRST_PAUSE, 200) > Duration::from_secs(3600), "it does not overflow");
    }
}
