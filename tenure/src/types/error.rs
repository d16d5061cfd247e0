//! What can go wrong, and what to do about it.

use crate::types::id::{InvalidName, ReviewId, RunId, Seq, SessionId};

/// The result of everything that can fail here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong. [`Error::code`] gives one stable word for programs; the text is for people.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No such session for this principal; somebody else's session answers the same.
    #[error("session {session_id} was not found; create it, or check the id and whose it is")]
    NotFound {
        /// The id that was asked for.
        session_id: SessionId,
    },

    /// The session has expired or was deleted, and can still be restored.
    #[error("session {session_id} is {status}; restore it to go on, or use another id")]
    Gone {
        /// The id that was asked for.
        session_id: SessionId,
        /// `expired` or `deleted`.
        status: &'static str,
    },

    /// The session is paused and takes no new messages.
    #[error("session {session_id} is paused; activate it (or decide its open review) first")]
    Paused {
        /// The id that was asked for.
        session_id: SessionId,
    },

    /// Another turn is on in the session, and this request does not want to wait.
    #[error("session {session_id} is busy with another turn; wait for it, or use on_busy queue, interrupt or branch")]
    Busy {
        /// The id that was asked for.
        session_id: SessionId,
    },

    /// The session belongs to another assistant, or to none.
    #[error(
        "session {session_id} belongs to {}, and a session keeps its assistant; leave out the assistant to go on with it, \
         or use another session id for {asked:?}",
        own.as_ref().map_or_else(|| "no assistant".to_owned(), |name| format!("assistant {name:?}"))
    )]
    OtherAssistant {
        /// The session.
        session_id: SessionId,
        /// The assistant that was asked for.
        asked: String,
        /// The session's own.
        own: Option<String>,
    },

    /// While an answer was made, what it answers was taken back.
    #[error("session {session_id} was rewound, replaced or ended while this turn was on; its answer was not kept")]
    Superseded {
        /// The session.
        session_id: SessionId,
    },

    /// A session with this id exists already.
    #[error("session {session_id} exists already; load it, or choose another id")]
    Exists {
        /// The id that was to be created.
        session_id: SessionId,
    },

    /// Somebody else wrote to the session first. Load it again and repeat the step.
    #[error("session {session_id} has moved on (expected it to end at {expected}); load it again and retry")]
    Conflict {
        /// The session that moved.
        session_id: SessionId,
        /// Where the writer believed the log ended.
        expected: Seq,
    },

    /// The same idempotency key came with another body.
    #[error("idempotency key {key:?} was used before with another body; use a new key for a new request")]
    KeyReused {
        /// The key.
        key: String,
    },

    /// A checkpoint, position or turn that the session does not have.
    #[error("{what} was not found in session {session_id}; list its checkpoints and messages to see what is there")]
    NoSuchPoint {
        /// The session.
        session_id: SessionId,
        /// What was asked for, in words.
        what: String,
    },

    /// A run that the session does not have.
    #[error("there is no run {run} in session {session_id}; list its runs to see what is there")]
    NoSuchRun {
        /// The session.
        session_id: SessionId,
        /// The run.
        run: RunId,
    },

    /// A review that is not there, or not for whoever asks.
    #[error("there is no review {review}; list the reviews to see what is there")]
    NoSuchReview {
        /// The review.
        review: ReviewId,
    },

    /// The review needs no decision any more.
    #[error("review {review} is decided already: {how}")]
    Decided {
        /// The review.
        review: ReviewId,
        /// How, in words.
        how: String,
    },

    /// Somebody else looks at the review.
    #[error("review {review} is claimed by {by}; wait until it is released, or its time is over")]
    Claimed {
        /// The review.
        review: ReviewId,
        /// Who.
        by: String,
    },

    /// The input is wrong; nothing was changed.
    #[error("{message}")]
    Invalid {
        /// Which field, as a path.
        param: String,
        /// What is wrong and what would be right.
        message: String,
    },

    /// A caller has stored as much as it may; nothing was changed.
    #[error(
        "{whose} has {used} {what} stored, and the limit `{limit}` is {max}; delete and purge some, or raise the limit"
    )]
    QuotaExceeded {
        /// Whose sessions count.
        whose: &'static str,
        /// What is counted.
        what: &'static str,
        /// The name of the limit.
        limit: &'static str,
        /// Its value.
        max: u64,
        /// What is stored already.
        used: u64,
    },

    /// A named limit was passed; nothing was changed.
    #[error("{what} is over the limit `{limit}` of {max}; send less, or raise the limit")]
    TooLarge {
        /// What was too large, in words.
        what: String,
        /// The name of the limit.
        limit: &'static str,
        /// Its value.
        max: u64,
    },

    /// Stored data is damaged. The text names its place.
    #[error("damaged data at {place}: {why}")]
    Corrupt {
        /// Store, session, record, file and line as far as they are known.
        place: String,
        /// What is wrong with it.
        why: String,
    },

    /// The store was written by a newer version of this software.
    #[error("{place} has format {found}, and this version reads up to {known}; use a newer version")]
    NewerFormat {
        /// Which store.
        place: String,
        /// The format that was found.
        found: u32,
        /// The newest format this version knows.
        known: u32,
    },

    /// Another process holds the store.
    #[error("{place} is in use by another process; stop it, or use a store that several may share")]
    Locked {
        /// Which store.
        place: String,
    },

    /// The disk is full. What was acknowledged is safe; this step was not done.
    #[error("no space left at {place}; free some and retry")]
    Full {
        /// Which store.
        place: String,
    },

    /// The store can not be reached or did not answer. The step may or may not have happened; an idempotency key makes a
    /// retry safe.
    #[error("the store is not available: {why}")]
    Unavailable {
        /// What the store or the system said.
        why: String,
    },
}

impl From<InvalidName> for Error {
    fn from(invalid: InvalidName) -> Self {
        Error::invalid(invalid.param, invalid.message)
    }
}

impl Error {
    /// One stable word for each kind of failure.
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

    /// Bad input: `param` is the path of what is wrong.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Error::Invalid { param: param.into(), message: message.into() }
    }

    /// The store failed in a way that only its operator can mend.
    pub fn unavailable(why: impl std::fmt::Display) -> Self {
        Error::Unavailable { why: why.to_string() }
    }

    /// Damaged data at a place.
    pub fn corrupt(place: impl std::fmt::Display, why: impl std::fmt::Display) -> Self {
        Error::Corrupt { place: place.to_string(), why: why.to_string() }
    }

    /// Puts `prefix` before the path of bad input, so that the whole path is named.
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
    fn what_an_error_repeats_is_short() {
        assert_eq!(excerpt("a\"b\n"), r#""a\"b\n""#);
        let long = excerpt("ü".repeat(1_000_000));
        assert_eq!(long.chars().count(), 60 + 3, "{long}");
    }
}
