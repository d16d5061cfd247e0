//! Builds the entries that end a run, and that end the pause that it caused.

use crate::rules::partial::PartialSession;
use crate::types::entry::{Entry, LeaseClaim, RunOutcome};
use crate::types::head::Head;
use crate::types::id::RunId;
use crate::types::status::Status;
use jiff::Timestamp;

/// The error code of a cancelled run.
pub(crate) const CANCELLED: &str = "cancelled";

/// Builds the entry that ends a run.
pub(crate) fn run_ended_entry(run: &RunId, outcome: RunOutcome, error: Option<String>, code: Option<&str>) -> Entry {
    Entry::RunEnded { run: run.clone(), outcome, error, code: code.map(str::to_owned) }
}

/// Returns the entry that reactivates a session that is paused for open reviews or until a time, after its run
/// was stopped. `None` if the session does not wait for either.
pub(crate) fn reactivation_entry(session: PartialSession<'_>) -> Option<Entry> {
    let is_paused = session.head.status == Status::Paused;
    let is_waiting = is_paused && (session.open_reviews().next().is_some() || session.head.paused_until().is_some());
    is_waiting.then(|| Entry::Status {
        to: Status::Active,
        reason: Some("its run was stopped".to_owned()),
        until: None,
    })
}

/// Returns the entry that releases a run's lease, so that any node can take the run over.
pub(crate) fn release_entry(run: RunId, now: Timestamp) -> Entry {
    Entry::RunClaimed { run, claim: LeaseClaim { node: String::new(), until: now } }
}

/// Returns the entries that continue a session that is paused until a time: it becomes active, and its run is
/// released.
pub(crate) fn resume_entries(head: &Head, reason: Option<&str>, now: Timestamp) -> Vec<Entry> {
    let active = Entry::Status { to: Status::Active, reason: reason.map(str::to_owned), until: None };
    [active].into_iter().chain(head.run.clone().map(|run| release_entry(run, now))).collect()
}
