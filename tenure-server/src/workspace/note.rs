//! Description of a workspace commit.

use jiff::Timestamp;
use tenure::log::Head;
use tenure::{Seq, SessionId};

/// The session, record and reason of a workspace commit.
pub struct CommitNote {
    pub session: SessionId,
    /// Creation time of the session, which distinguishes sessions that reuse an id.
    pub session_created_at: Timestamp,
    /// The record of the session that the commit belongs to. `None` for a commit that only saves the files before a
    /// rewind.
    pub seq: Option<Seq>,
    pub subject: String,
}

impl CommitNote {
    /// Creates a note for a commit of the session's workspace.
    pub fn new(head: &Head, seq: Option<Seq>, subject: impl Into<String>) -> Self {
        Self {
            session: head.info.session_id.clone(),
            session_created_at: head.info.created_at,
            seq,
            subject: subject.into(),
        }
    }
}
