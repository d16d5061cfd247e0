//! Classification of failures by whether a retry can succeed.

use crate::types::error::Error;
use std::error::Error as _;
use std::fmt;
use std::io::{self, ErrorKind};

/// A failure of an operation, classified by its remedy.
#[derive(Debug)]
pub(super) enum FailureKind {
    /// The connection broke, or there was none: the outcome is unknown.
    Lost(String),
    /// The server accepts no writes: it has become a standby, so all connections to it are
    /// unusable.
    ReadOnly(String),
    /// The server rolled the operation back because of concurrent operations.
    RolledBack(String),
    /// A retry would not succeed.
    Final(Error),
}

impl FailureKind {
    /// Adds the name of the host to the message of the failure.
    pub fn with_host(self, host: &str) -> Self {
        match self {
            FailureKind::Lost(reason) => FailureKind::Lost(format!("{host}: {reason}")),
            FailureKind::ReadOnly(reason) => FailureKind::ReadOnly(format!("{host}: {reason}")),
            FailureKind::RolledBack(reason) => FailureKind::RolledBack(format!("{host}: {reason}")),
            FailureKind::Final(Error::Unavailable { reason }) => {
                FailureKind::Final(Error::unavailable(format!("{host}: {reason}")))
            }
            other => other,
        }
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FailureKind::Lost(reason) | FailureKind::ReadOnly(reason) | FailureKind::RolledBack(reason) => {
                f.write_str(reason)
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

impl From<tokio_postgres::Error> for FailureKind {
    fn from(e: tokio_postgres::Error) -> Self {
        if let Some(db) = e.as_db_error() {
            // Without the detail, which may quote the data to be stored.
            let reason = format!("{} ({})", db.message(), db.code().code());
            return match db.code().code() {
                // Serialization failure, deadlock, lock timeout, and a reference to a row that was
                // removed concurrently.
                "40001" | "40P01" | "55P03" | "23503" => FailureKind::RolledBack(reason),
                // Shutting down, starting up, or too many connections.
                "57P01" | "57P02" | "57P03" | "57P05" | "53300" => FailureKind::Lost(reason),
                // The server is a standby after a failover.
                "25006" => FailureKind::ReadOnly(reason),
                code if code.starts_with("08") => FailureKind::Lost(reason),
                "53100" => FailureKind::Final(Error::Full { location: "the PostgreSQL server".to_owned() }),
                "26000" | "42P05" => {
                    let hint = "behind a pooler, add prepare=off to the store's URL";
                    FailureKind::Final(Error::unavailable(format!("{reason}; {hint}")))
                }
                _ => FailureKind::Final(Error::unavailable(reason)),
            };
        }
        let reason = e.source().map_or_else(|| e.to_string(), |source| format!("{e}: {source}"));
        match e.source().and_then(|s| s.downcast_ref::<io::Error>()).map(io::Error::kind) {
            Some(ErrorKind::InvalidData) => {
                let hint =
                    "TLS requires a server certificate that this system trusts; or use sslmode=disable in the URL";
                FailureKind::Final(Error::unavailable(format!("{reason}; {hint}")))
            }
            Some(_) => FailureKind::Lost(reason),
            None if e.is_closed() => FailureKind::Lost(reason),
            None => FailureKind::Final(Error::unavailable(reason)),
        }
    }
}
