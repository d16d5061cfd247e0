//! Entries that end a run or what it waits for.

use crate::rules::session::Session;
use crate::types::entry::{Entry, Outcome};
use crate::types::id::RunId;
use crate::types::status::Status;

/// The code of a run that somebody cancelled.
pub(crate) const CANCELLED: &str = "cancelled";

pub(crate) fn ended(run: &RunId, outcome: Outcome, error: Option<String>, code: Option<&str>) -> Entry {
    Entry::RunEnded { run: run.clone(), outcome, error, code: code.map(str::to_owned) }
}

/// A session that waits for a person only because of a run that is over need not wait any more.
pub(crate) fn unpaused(session: &Session) -> Option<Entry> {
    let waits = session.status == Status::Paused && session.open_reviews().next().is_some();
    waits.then(|| Entry::Status { to: Status::Active, reason: Some("its run was stopped".to_owned()) })
}
