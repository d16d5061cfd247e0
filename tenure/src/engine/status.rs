//! Conditions on a session before an operation: its status, its owner's limits, `If-Match`.

use crate::engine::core::Engine;
use crate::types::error::{Error, Result};

use crate::types::entry::Created;
use crate::types::head::{DECISIONS, Head};
use crate::types::id::{SessionId, check_text};
use crate::types::status::Status;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Map, Value};

impl Engine {
    /// A session that does not exist ends nowhere.
    pub(crate) fn check_expected_none(&self, id: &SessionId) -> Result<()> {
        match self.expect {
            Some(expected) => Err(Error::Conflict { session_id: id.clone(), expected }),
            None => Ok(()),
        }
    }

    pub(crate) fn check_expected(&self, head: &Head) -> Result<()> {
        match self.expect {
            Some(expected) if expected != head.seq => {
                Err(Error::Conflict { session_id: head.info.session_id.clone(), expected })
            }
            _ => Ok(()),
        }
    }

    /// When the sweep should look at a session.
    pub(crate) fn due_at(&self, head: &Head) -> Option<Timestamp> {
        let policy = self.policy(&head.tenant, head.assistant.as_deref());
        let (from, after) = match head.status {
            Status::Active => (head.active_at, policy.ttl?),
            // It waits for a person, if need be for as long as the rule says.
            Status::Paused => return head.reviews.iter().filter_map(|r| r.timeout).min(),
            Status::Expired | Status::Deleted => (head.status_at, policy.retention?),
        };
        from.checked_add(SignedDuration::try_from(after).ok()?).ok()
    }

    /// Whether a session stands where its card says: an active one may have expired since.
    pub(crate) fn status_of(&self, head: &Head) -> Status {
        let idle = self.now().duration_since(head.active_at);
        let ttl =
            self.policy(&head.tenant, head.assistant.as_deref()).ttl.and_then(|t| SignedDuration::try_from(t).ok());
        match head.status {
            Status::Active if ttl.is_some_and(|ttl| idle > ttl) => Status::Expired,
            status => status,
        }
    }

    pub(crate) fn check_live(&self, head: &Head) -> Result<()> {
        match self.status_of(head) {
            Status::Active | Status::Paused => Ok(()),
            gone => Err(Error::Gone { session_id: head.info.session_id.clone(), status: gone.as_str() }),
        }
    }

    pub(crate) fn check_active(&self, head: &Head) -> Result<()> {
        match self.check_live(head) {
            Ok(()) if head.status == Status::Paused => Err(Error::Paused { session_id: head.info.session_id.clone() }),
            other => other,
        }
    }

    pub(crate) fn check_info(&self, info: &Created) -> Result<()> {
        for (param, name) in [("assistant", &info.assistant), ("thread", &info.thread), ("model", &info.model)] {
            if let Some(why) = name.as_deref().and_then(|n| check_text(n).err()) {
                return Err(Error::invalid(param, format!("not a valid {param}: {why}")));
            }
        }
        check_derived(&info.metadata)?;
        self.check_info_size(serde_json::to_string(info).map_or(0, |t| t.len()))
    }

    /// The size of what clients can write. Decisions do not count: people's decisions must not keep a client from writing.
    pub(crate) fn check_info_of(&self, head: &Head) -> Result<()> {
        let mut info = head.info.clone();
        info.metadata.remove(DECISIONS);
        self.check_info_size(serde_json::to_string(&info).map_or(0, |t| t.len()))
    }

    pub fn check_info_size(&self, bytes: usize) -> Result<()> {
        let max = self.limits().max_info_bytes;
        match bytes > max {
            true => Err(Error::TooLarge {
                what: "title, tags and metadata".into(),
                limit: "max_info_bytes",
                max: max as u64,
            }),
            false => Ok(()),
        }
    }
}

/// Refuses metadata that names the audit trail, also to remove it.
pub(crate) fn check_derived(metadata: &Map<String, Value>) -> Result<()> {
    if metadata.contains_key(DECISIONS) {
        let why = "it is derived from the decisions in the session's log and cannot be written; leave it out";
        return Err(Error::invalid(format!("metadata.{DECISIONS}"), why));
    }
    Ok(())
}
