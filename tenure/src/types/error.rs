//! The error type of the library. Each error says what was wrong and what to do about it.

use crate::types::error_source::ErrorSource;
use crate::types::id::{InvalidName, ReviewId, RunId, Seq, SessionId};

/// The result of a fallible operation of this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the library. [`Error::code`] returns a stable code for programs; the message is for humans.
///
/// The message is complete: it includes what a user needs to know of the [source](std::error::Error::source), so
/// print one or the other. The source is the original error of the database, the operating system or a callback.
/// Its text may quote stored data, which the message never does (D-128).
///
/// ```
/// use std::error::Error as _;
/// use tenure::Tenure;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let error = Tenure::open("jsonl:/dev/null/store").await.unwrap_err();
/// let cause = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
/// assert_eq!(cause.map(|e| e.kind()), Some(std::io::ErrorKind::NotADirectory));
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The session does not exist for this principal. A session of another user yields the same error, so
    /// that its existence is not disclosed.
    #[error("session {session_id} was not found; create it, or check its id and owner")]
    NotFound {
        /// The requested session.
        session_id: SessionId,
    },

    /// The session has expired or was deleted, and can still be restored (D-019).
    #[error("session {session_id} is {status}; restore it, or use another id")]
    Gone {
        /// The requested session.
        session_id: SessionId,
        /// `expired` or `deleted`.
        status: &'static str,
    },

    /// The session is paused and accepts no new messages.
    #[error("session {session_id} is paused; activate it (or decide its open review) first")]
    Paused {
        /// The requested session.
        session_id: SessionId,
    },

    /// Another turn is in progress in the session, and this request does not wait.
    #[error("session {session_id} is busy with another turn; wait for it, or use on_busy queue, interrupt or branch")]
    Busy {
        /// The requested session.
        session_id: SessionId,
    },

    /// The session belongs to another assistant, or to none.
    #[error(
        "session {session_id} belongs to {}, and a session cannot change its assistant; omit the assistant to continue it, \
         or use another session id for {requested:?}",
        current.as_ref().map_or_else(|| "no assistant".to_owned(), |name| format!("assistant {name:?}"))
    )]
    OtherAssistant {
        /// The requested session.
        session_id: SessionId,
        /// The assistant that the request named.
        requested: String,
        /// The assistant that the session belongs to. `None` means that it belongs to none.
        current: Option<String>,
    },

    /// The session was rewound, replaced or ended while the answer was generated, so that the message being
    /// answered is no longer current. The answer was not stored.
    #[error("session {session_id} was rewound, replaced or ended during this turn; the answer was not stored")]
    Superseded {
        /// The requested session.
        session_id: SessionId,
    },

    /// A session with this id exists already.
    #[error("session {session_id} already exists; load it, or choose another id")]
    Exists {
        /// The id that was to be created.
        session_id: SessionId,
    },

    /// Another writer committed to the session first (optimistic concurrency). Load the session again and
    /// retry.
    #[error(
        "session {session_id} was changed by another writer (expected its log to end at {expected}); load it again and retry"
    )]
    Conflict {
        /// The session that changed.
        session_id: SessionId,
        /// The position at which the writer expected the log to end.
        expected: Seq,
    },

    /// The idempotency key was used before with a different request body.
    #[error("idempotency key {key:?} was already used with a different request body; use a new key for a new request")]
    KeyReused {
        /// The idempotency key.
        key: String,
    },

    /// The session has no such checkpoint, position or turn.
    #[error("{point} was not found in session {session_id}; list its checkpoints and messages")]
    NoSuchPoint {
        /// The requested session.
        session_id: SessionId,
        /// A description of the requested point.
        point: String,
    },

    /// The session has no such run.
    #[error("run {run} was not found in session {session_id}; list its runs")]
    NoSuchRun {
        /// The requested session.
        session_id: SessionId,
        /// The requested run.
        run: RunId,
    },

    /// The review does not exist, or the principal has no access to it.
    #[error("review {review} was not found; list the reviews")]
    NoSuchReview {
        /// The requested review.
        review: ReviewId,
    },

    /// The review no longer needs a decision: it was decided, or its run has ended.
    #[error("review {review} is already closed: {reason}")]
    Decided {
        /// The requested review.
        review: ReviewId,
        /// A description of how it was decided, or why it is closed.
        reason: String,
    },

    /// Another reviewer has claimed the review.
    #[error("review {review} is claimed by {by}; wait until the claim is released or expires")]
    Claimed {
        /// The requested review.
        review: ReviewId,
        /// The reviewer who holds the claim.
        by: String,
    },

    /// The input is invalid; nothing was changed.
    #[error("{message}")]
    Invalid {
        /// The path of the invalid field.
        param: String,
        /// A description of what is wrong and what would be valid.
        message: String,
    },

    /// A storage quota is exhausted; nothing was changed.
    #[error(
        "{owner} has stored {used} {resource}, and the limit `{limit}` is {max}; delete and purge sessions, or raise the limit"
    )]
    QuotaExceeded {
        /// A description of whose sessions count towards the quota.
        owner: &'static str,
        /// A description of what is counted.
        resource: &'static str,
        /// The name of the limit.
        limit: &'static str,
        /// The value of the limit.
        max: u64,
        /// The amount in use.
        used: u64,
    },

    /// A named limit was exceeded; nothing was changed.
    #[error("{subject} exceeds the limit `{limit}` of {max}; send less, or raise the limit")]
    TooLarge {
        /// A description of what was too large.
        subject: String,
        /// The name of the limit.
        limit: &'static str,
        /// The value of the limit.
        max: u64,
    },

    /// Stored data is damaged. The message names its location.
    #[error("damaged data at {location}: {reason}")]
    Corrupt {
        /// The location: store, session, record, file and line, as far as they are known.
        location: String,
        /// A description of the damage.
        reason: String,
        /// The error of the parser or the database that found the damage, if there is one.
        #[source]
        source: Option<ErrorSource>,
    },

    /// The store was written by a newer version of this software.
    #[error(
        "{location} has format version {version}, and this version supports up to {supported}; use a newer version"
    )]
    NewerFormat {
        /// The location of the store.
        location: String,
        /// The format version of the store.
        version: u32,
        /// The newest format version that this version of the software supports.
        supported: u32,
    },

    /// Another process holds the lock of the store.
    #[error(
        "{location} is locked by another process; stop that process, or use a store that supports several processes"
    )]
    Locked {
        /// The location of the store.
        location: String,
    },

    /// The disk is full. Everything acknowledged is durable; this operation was not performed.
    #[error("no space left at {location}; free disk space and retry")]
    Full {
        /// The location of the store.
        location: String,
        /// The error reported by the database or the operating system, if there is one.
        #[source]
        source: Option<ErrorSource>,
    },

    /// The store cannot be reached or did not respond. The outcome of the operation is unknown; an
    /// idempotency key makes a retry safe.
    #[error("the store is not available: {reason}")]
    Unavailable {
        /// A description of the failure, including the message of the source.
        reason: String,
        /// The error reported by the database, the operating system or a callback, if there is one.
        #[source]
        source: Option<ErrorSource>,
    },
}

impl From<InvalidName> for Error {
    fn from(invalid: InvalidName) -> Self {
        Error::invalid(invalid.param, invalid.message)
    }
}

impl Error {
    /// Returns a stable code for the kind of error.
    pub fn code(&self) -> &'static str {
        match self {
            Error::NotFound { .. } => "not_found",
            Error::Gone { .. } => "gone",
            Error::Paused { .. } => "paused",
            Error::Busy { .. } => "busy",
            Error::OtherAssistant { .. } => "other_assistant",
            Error::Superseded { .. } => "superseded",
            Error::NoSuchRun { .. } => "no_such_run",
            Error::NoSuchReview { .. } => "no_such_review",
            Error::Decided { .. } => "already_decided",
            Error::Claimed { .. } => "claimed",
            Error::Exists { .. } => "exists",
            Error::Conflict { .. } => "conflict",
            Error::KeyReused { .. } => "idempotency_key_reused",
            Error::NoSuchPoint { .. } => "no_such_point",
            Error::Invalid { .. } => "invalid",
            Error::QuotaExceeded { .. } => "quota_exceeded",
            Error::TooLarge { .. } => "too_large",
            Error::Corrupt { .. } => "corrupt",
            Error::NewerFormat { .. } => "newer_format",
            Error::Locked { .. } => "locked",
            Error::Full { .. } => "storage_full",
            Error::Unavailable { .. } => "unavailable",
        }
    }

    /// Creates an error for invalid input; `param` is the path of the invalid field.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Error::Invalid { param: param.into(), message: message.into() }
    }

    /// Puts the path of an invalid field below another path. Other errors are unchanged.
    pub(crate) fn under(self, path: &str) -> Self {
        match self {
            Error::Invalid { param, message } => Error::Invalid { param: format!("{path}.{param}"), message },
            other => other,
        }
    }

    /// Creates an error for a store failure that only its operator can resolve.
    pub fn unavailable(reason: impl std::fmt::Display) -> Self {
        Error::Unavailable { reason: reason.to_string(), source: None }
    }

    /// Creates an error for a store failure that another error caused, with the same message.
    pub fn unavailable_from(source: impl Into<ErrorSource>) -> Self {
        let source = source.into();
        Error::Unavailable { reason: source.to_string(), source: Some(source) }
    }

    /// Creates an error for damaged data at a location.
    pub fn corrupt(location: impl std::fmt::Display, reason: impl std::fmt::Display) -> Self {
        Error::Corrupt { location: location.to_string(), reason: reason.to_string(), source: None }
    }

    /// Creates an error for damaged data at a location that another error describes.
    pub fn corrupt_from(location: impl std::fmt::Display, source: impl Into<ErrorSource>) -> Self {
        let source = source.into();
        Error::Corrupt { location: location.to_string(), reason: source.to_string(), source: Some(source) }
    }

    /// Creates an error for a full disk.
    pub fn full(location: impl std::fmt::Display) -> Self {
        Error::Full { location: location.to_string(), source: None }
    }

    /// Sets the source of an error. Its message stays as it is. Errors that have no source are returned
    /// unchanged.
    pub fn with_source(self, source: impl Into<ErrorSource>) -> Self {
        let source = Some(source.into());
        match self {
            Error::Corrupt { location, reason, .. } => Error::Corrupt { location, reason, source },
            Error::Full { location, .. } => Error::Full { location, source },
            Error::Unavailable { reason, .. } => Error::Unavailable { reason, source },
            other => other,
        }
    }

    /// Prepends `prefix` to the path of the invalid field, so that the error names the full path. Other
    /// errors are returned unchanged.
    pub fn within(self, prefix: &str) -> Self {
        match self {
            Error::Invalid { param, message } if param.is_empty() => {
                Error::Invalid { param: prefix.to_owned(), message }
            }
            Error::Invalid { param, message } => Error::Invalid { param: format!("{prefix}.{param}"), message },
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::types::excerpt::excerpt;

    #[test]
    fn input_quoted_in_an_error_is_short() {
        assert_eq!(excerpt("a\"b\n"), r#""a\"b\n""#);
        let long = excerpt("ü".repeat(1_000_000));
        assert_eq!(long.chars().count(), 60 + 3, "{long}");
    }
}
