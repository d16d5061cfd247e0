//! The error of reading a stored record.

use crate::types::error_source::ErrorSource;
use std::borrow::Cow;

/// The reason why a stored entry or record cannot be read. The message never quotes the contents, which may be
/// private; the [source](std::error::Error::source), the error of the parser, may.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct DecodeError {
    reason: Cow<'static, str>,
    #[source]
    source: Option<ErrorSource>,
}

impl DecodeError {
    /// An error that no other error caused.
    pub(crate) fn new(reason: impl Into<Cow<'static, str>>) -> Self {
        Self { reason: reason.into(), source: None }
    }

    /// An error that another error caused.
    pub(crate) fn caused(reason: impl Into<Cow<'static, str>>, source: impl Into<ErrorSource>) -> Self {
        Self { reason: reason.into(), source: Some(source.into()) }
    }

    /// An entry that cannot be parsed.
    pub(crate) fn unreadable(e: serde_json::Error) -> Self {
        let column = e.column();
        let reason = format!("unknown or malformed entry (at character {column}); a newer version may have written it");
        Self::caused(reason, e)
    }
}
