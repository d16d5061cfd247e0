//! Preconditions of operations on a session: its status, the size limits and `If-Match`.

use crate::engine::core::Engine;
use crate::types::error::{Error, Result};

use crate::types::entry::SessionCreated;
use crate::types::head::{DECISIONS, Head};
use crate::types::id::{Seq, check_text};
use crate::types::status::Status;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Map, Value};

/// Checks the condition of an operation (`If-Match`): the log must end at `if_match`, if it is given (D-099).
pub(crate) fn check_if_match(head: &Head, if_match: Option<Seq>) -> Result<()> {
    match if_match {
        Some(expected) if expected != head.seq => {
            Err(Error::Conflict { session_id: head.info.session_id.clone(), expected })
        }
        _ => Ok(()),
    }
}

impl Engine {
    /// The time at which the sweep should process a session. `None` means never.
    pub(crate) fn due_at(&self, head: &Head) -> Option<Timestamp> {
        let policy = self.policy(&head.tenant, head.assistant.as_deref());
        let (from, after) = match head.status {
            Status::Active => (head.active_at, policy.ttl?),
            // A paused session waits for human review or for a time. It is due at the earliest timeout of
            // its open reviews (D-015), or at that time (D-136).
            Status::Paused => {
                return head.reviews.iter().filter_map(|r| r.timeout).chain(head.paused_until()).min();
            }
            Status::Expired | Status::Deleted => (head.status_at, policy.retention?),
        };
        from.checked_add(SignedDuration::try_from(after).ok()?).ok()
    }

    /// The effective status of a session: a session that is stored as active may have expired since.
    pub(crate) fn status_of(&self, head: &Head) -> Status {
        let idle = self.now().duration_since(head.active_at);
        let ttl =
            self.policy(&head.tenant, head.assistant.as_deref()).ttl.and_then(|t| SignedDuration::try_from(t).ok());
        match head.status {
            Status::Active if ttl.is_some_and(|ttl| idle > ttl) => Status::Expired,
            status => status,
        }
    }

    /// Checks that a session is active or paused, and has not expired.
    pub(crate) fn check_live(&self, head: &Head) -> Result<()> {
        match self.status_of(head) {
            Status::Active | Status::Paused => Ok(()),
            status => Err(Error::Gone { session_id: head.info.session_id.clone(), status: status.as_str() }),
        }
    }

    /// Checks that a session is active and has not expired.
    pub(crate) fn check_active(&self, head: &Head) -> Result<()> {
        match self.check_live(head) {
            Ok(()) if head.status == Status::Paused => Err(Error::Paused { session_id: head.info.session_id.clone() }),
            other => other,
        }
    }

    /// Validates names, metadata and size of the info of a new session.
    pub(crate) fn check_info(&self, info: &SessionCreated) -> Result<()> {
        for (param, name) in [("assistant", &info.assistant), ("thread", &info.thread), ("model", &info.model)] {
            if let Some(reason) = name.as_deref().and_then(|n| check_text(n).err()) {
                return Err(Error::invalid(param, format!("not a valid {param}: {reason}")));
            }
        }
        check_derived(&info.metadata)?;
        self.check_info_size(serde_json::to_string(info).map_or(0, |t| t.len()))
    }

    /// Checks the size of the part of the info that clients can write. Review decisions are not
    /// counted: reviewers must not be able to block a client's writes.
    pub(crate) fn check_info_of(&self, head: &Head) -> Result<()> {
        let mut info = head.info.clone();
        info.metadata.remove(DECISIONS);
        self.check_info_size(serde_json::to_string(&info).map_or(0, |t| t.len()))
    }

    /// Checks a size against `max_info_bytes`.
    pub fn check_info_size(&self, bytes: usize) -> Result<()> {
        let max = self.limits().max_info_bytes;
        if bytes > max {
            return Err(Error::TooLarge {
                subject: "title, tags and metadata".into(),
                limit: "max_info_bytes",
                max: max as u64,
            });
        }
        Ok(())
    }
}

/// Rejects metadata that contains the audit trail of decisions, even to remove it (D-065).
pub(crate) fn check_derived(metadata: &Map<String, Value>) -> Result<()> {
    if metadata.contains_key(DECISIONS) {
        let reason = "this field is derived from the decisions in the session's log and cannot be written; omit it";
        return Err(Error::invalid(format!("metadata.{DECISIONS}"), reason));
    }
    Ok(())
}
