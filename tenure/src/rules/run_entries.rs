//! Builds the entries that end a run and the pause that it caused.

use crate::rules::partial::PartialSession;
use crate::types::entry::{Entry, RunOutcome};
use crate::types::id::RunId;
use crate::types::status::Status;

/// The error code of a cancelled run.
pub(crate) const CANCELLED: &str = "cancelled";

/// Builds the entry that ends a run.
pub(crate) fn run_ended_entry(run: &RunId, outcome: RunOutcome, error: Option<String>, code: Option<&str>) -> Entry {
    Entry::RunEnded { run: run.clone(), outcome, error, code: code.map(str::to_owned) }
}

/// Returns the entry that reactivates a session that is paused for open reviews, after its run was stopped.
/// `None` if the session does not wait for a review.
pub(crate) fn reactivation_entry(session: PartialSession<'_>) -> Option<Entry> {
    let is_waiting = session.head.status == Status::Paused && session.open_reviews().next().is_some();
    is_waiting.then(|| Entry::Status { to: Status::Active, reason: Some("its run was stopped".to_owned()) })
}
