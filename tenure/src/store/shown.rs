//! Which sessions show a record: its own, and the forks that inherit it.

use crate::types::id::{Seq, SessionId};
use jiff::Timestamp;

/// A record of a session's own log.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RecordLocation {
    /// The session whose own log contains the record.
    pub session: SessionId,
    /// The sequence number of the record.
    pub seq: Seq,
}

/// A session that shows a record ([`Store::sessions_showing`](crate::store::Store::sessions_showing)).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShownRecord {
    /// The index of the record in the request.
    pub record: usize,
    /// The session that shows it.
    pub session: SessionId,
    /// The last activity of that session.
    pub active_at: Timestamp,
}
