//! Classification of failures by whether a retry can succeed.

use crate::types::error::Error;
use crate::types::error_source::ErrorSource;
use std::error::Error as _;
use std::fmt;
use std::io::{self, ErrorKind};

/// A failure of an operation, classified by its remedy.
#[derive(Debug)]
pub(super) enum FailureKind {
    /// The connection broke, or there was none: the outcome is unknown.
    Lost(FailureCause),
    /// The server accepts no writes: it has become a standby, so all connections to it are
    /// unusable.
    ReadOnly(FailureCause),
    /// The server rolled the operation back because of concurrent operations.
    RolledBack(FailureCause),
    /// A retry would not succeed.
    Final(Error),
}

/// The message of a failure, and the error of the driver or the operating system, if there is one.
#[derive(Debug)]
pub(super) struct FailureCause {
    reason: String,
    source: Option<ErrorSource>,
}

impl FailureCause {
    fn with_host(self, host: &str) -> Self {
        Self { reason: format!("{host}: {}", self.reason), ..self }
    }
}

impl From<FailureCause> for Error {
    fn from(FailureCause { reason, source }: FailureCause) -> Self {
        Error::Unavailable { reason, source }
    }
}

impl FailureKind {
    /// Converts the failure of an operation that is not retried.
    pub fn into_error(self) -> Error {
        match self {
            FailureKind::Final(e) => e,
            FailureKind::Lost(cause) | FailureKind::ReadOnly(cause) | FailureKind::RolledBack(cause) => cause.into(),
        }
    }

    /// A lost connection that no error of the driver describes.
    pub fn lost(reason: impl Into<String>) -> Self {
        FailureKind::Lost(FailureCause { reason: reason.into(), source: None })
    }

    /// A rollback that no error of the server describes.
    pub fn rolled_back(reason: impl Into<String>) -> Self {
        FailureKind::RolledBack(FailureCause { reason: reason.into(), source: None })
    }

    /// Adds the name of the host to the message of the failure.
    pub fn with_host(self, host: &str) -> Self {
        match self {
            FailureKind::Lost(cause) => FailureKind::Lost(cause.with_host(host)),
            FailureKind::ReadOnly(cause) => FailureKind::ReadOnly(cause.with_host(host)),
            FailureKind::RolledBack(cause) => FailureKind::RolledBack(cause.with_host(host)),
            FailureKind::Final(Error::Unavailable { reason, source }) => {
                FailureKind::Final(FailureCause { reason, source }.with_host(host).into())
            }
            other => other,
        }
    }

    /// Combines the failures of several hosts into one that can be retried. Its source is that of
    /// the first failure that has one.
    pub fn combined(failures: Vec<FailureKind>, separator: &str) -> Self {
        let reason = failures.iter().map(FailureKind::to_string).collect::<Vec<_>>().join(separator);
        let source = failures.into_iter().find_map(FailureKind::into_source);
        FailureKind::Lost(FailureCause { reason, source })
    }

    fn into_source(self) -> Option<ErrorSource> {
        match self {
            FailureKind::Lost(cause) | FailureKind::ReadOnly(cause) | FailureKind::RolledBack(cause) => cause.source,
            FailureKind::Final(Error::Unavailable { source, .. }) => source,
            FailureKind::Final(_) => None,
        }
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FailureKind::Lost(cause) | FailureKind::ReadOnly(cause) | FailureKind::RolledBack(cause) => {
                f.write_str(&cause.reason)
            }
            FailureKind::Final(error) => error.fmt(f),
        }
    }
}

impl From<Error> for FailureKind {
    fn from(e: Error) -> Self {
        FailureKind::Final(e)
    }
}

impl From<io::Error> for FailureKind {
    fn from(e: io::Error) -> Self {
        FailureKind::Lost(FailureCause { reason: e.to_string(), source: Some(e.into()) })
    }
}

impl From<tokio_postgres::Error> for FailureKind {
    fn from(e: tokio_postgres::Error) -> Self {
        match e.as_db_error().map(|db| db.code().code().to_owned()) {
            Some(code) => from_server(&code, e),
            None => from_connection(e),
        }
    }
}

/// Classifies an error that the server reported.
fn from_server(code: &str, e: tokio_postgres::Error) -> FailureKind {
    // Without the detail, which may quote the data to be stored.
    let reason = format!("{} ({code})", e.as_db_error().map_or_else(String::new, |db| db.message().to_owned()));
    let cause = FailureCause { reason, source: Some(e.into()) };
    match code {
        // Serialization failure, deadlock, lock timeout, and a reference to a row that was
        // removed concurrently.
        "40001" | "40P01" | "55P03" | "23503" => FailureKind::RolledBack(cause),
        // Shutting down, starting up, or too many connections.
        "57P01" | "57P02" | "57P03" | "57P05" | "53300" => FailureKind::Lost(cause),
        // The server is a standby after a failover.
        "25006" => FailureKind::ReadOnly(cause),
        code if code.starts_with("08") => FailureKind::Lost(cause),
        "53100" => {
            FailureKind::Final(Error::Full { location: "the PostgreSQL server".to_owned(), source: cause.source })
        }
        "26000" | "42P05" => {
            let hint = "behind a pooler, add prepare=off to the store's URL";
            let reason = format!("{}; {hint}", cause.reason);
            FailureKind::Final(FailureCause { reason, ..cause }.into())
        }
        _ => FailureKind::Final(cause.into()),
    }
}

/// Classifies an error of the connection.
fn from_connection(e: tokio_postgres::Error) -> FailureKind {
    let reason = e.source().map_or_else(|| e.to_string(), |source| format!("{e}: {source}"));
    let io_error = e.source().and_then(|s| s.downcast_ref::<io::Error>()).map(io::Error::kind);
    let is_closed = e.is_closed();
    let cause = FailureCause { reason, source: Some(e.into()) };
    match io_error {
        Some(ErrorKind::InvalidData) => {
            let hint = "TLS requires a server certificate that this system trusts; or use sslmode=disable in the URL";
            let reason = format!("{}; {hint}", cause.reason);
            FailureKind::Final(FailureCause { reason, ..cause }.into())
        }
        Some(_) => FailureKind::Lost(cause),
        None if is_closed => FailureKind::Lost(cause),
        None => FailureKind::Final(cause.into()),
    }
}
