//! What a commit is about.

use jiff::Timestamp;
use tenure::{Head, Seq, SessionId};

/// What a commit is about.
pub struct CommitNote {
    pub session: SessionId,
    /// When the session began: another may have had its name before.
    pub born: Timestamp,
    /// The record of the session that it belongs to; what is only put by before a rewind belongs to none.
    pub seq: Option<Seq>,
    pub what: String,
}

impl CommitNote {
    pub fn new(head: &Head, seq: Option<Seq>, what: impl Into<String>) -> Self {
        let (session, born) = (head.info.session_id.clone(), head.info.created_at);
        Self { session, born, seq, what: what.into() }
    }
}
