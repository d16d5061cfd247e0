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
    Undone(String),
    /// A retry would not succeed.
    Final(Error),
}

impl FailureKind {
    /// Adds the name of the host to the message of the failure.
    pub fn at(self, host: &str) -> Self {
        match self {
            FailureKind::Lost(why) => FailureKind::Lost(format!("{host}: {why}")),
            FailureKind::ReadOnly(why) => FailureKind::ReadOnly(format!("{host}: {why}")),
            FailureKind::Undone(why) => FailureKind::Undone(format!("{host}: {why}")),
            FailureKind::Final(Error::Unavailable { why }) => {
                FailureKind::Final(Error::unavailable(format!("{host}: {why}")))
            }
            other => other,
        }
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FailureKind::Lost(why) | FailureKind::ReadOnly(why) | FailureKind::Undone(why) => f.write_str(why),
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
            let why = format!("{} ({})", db.message(), db.code().code());
            return match db.code().code() {
                // Serialization failure, deadlock, lock timeout, and a reference to a row that was
                // removed concurrently.
                "40001" | "40P01" | "55P03" | "23503" => FailureKind::Undone(why),
                // Shutting down, starting up, or too many connections.
                "57P01" | "57P02" | "57P03" | "57P05" | "53300" => FailureKind::Lost(why),
                // The server is a standby after a failover.
                "25006" => FailureKind::ReadOnly(why),
                code if code.starts_with("08") => FailureKind::Lost(why),
                "53100" => FailureKind::Final(Error::Full { place: "the PostgreSQL server".to_owned() }),
                "26000" | "42P05" => {
                    let hint = "behind a pooler, add prepare=off to the store's URL";
                    FailureKind::Final(Error::unavailable(format!("{why}; {hint}")))
                }
                _ => FailureKind::Final(Error::unavailable(why)),
            };
        }
        let why = e.source().map_or_else(|| e.to_string(), |source| format!("{e}: {source}"));
        match e.source().and_then(|s| s.downcast_ref::<io::Error>()).map(io::Error::kind) {
            Some(ErrorKind::InvalidData) => {
                let hint =
                    "for TLS the server needs a certificate that this system trusts, or sslmode=disable in the URL";
                FailureKind::Final(Error::unavailable(format!("{why}; {hint}")))
            }
            Some(_) => FailureKind::Lost(why),
            None if e.is_closed() => FailureKind::Lost(why),
            None => FailureKind::Final(Error::unavailable(why)),
        }
    }
}
