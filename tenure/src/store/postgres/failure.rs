//! How work on a connection fails, and whether it is worth another attempt.

use crate::types::error::Error;
use std::error::Error as _;
use std::fmt;
use std::io::{self, ErrorKind};

/// Why a step failed, by what can be done about it.
#[derive(Debug)]
pub(super) enum Fail {
    /// The connection broke, or there was none: what was sent may have happened.
    Lost(String),
    /// The server accepts no writes: it has become a standby, and so have all connections to it.
    ReadOnly(String),
    /// The server undid the step because of what others did meanwhile.
    Undone(String),
    /// Trying again would not help.
    Final(Error),
}

impl Fail {
    /// Adds the name of the host to the message of the failure.
    pub fn at(self, host: &str) -> Self {
        match self {
            Fail::Lost(why) => Fail::Lost(format!("{host}: {why}")),
            Fail::ReadOnly(why) => Fail::ReadOnly(format!("{host}: {why}")),
            Fail::Undone(why) => Fail::Undone(format!("{host}: {why}")),
            Fail::Final(Error::Unavailable { why }) => Fail::Final(Error::unavailable(format!("{host}: {why}"))),
            other => other,
        }
    }
}

impl fmt::Display for Fail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fail::Lost(why) | Fail::ReadOnly(why) | Fail::Undone(why) => f.write_str(why),
            Fail::Final(error) => error.fmt(f),
        }
    }
}

impl From<Error> for Fail {
    fn from(e: Error) -> Self {
        Fail::Final(e)
    }
}

impl From<tokio_postgres::Error> for Fail {
    fn from(e: tokio_postgres::Error) -> Self {
        if let Some(db) = e.as_db_error() {
            // Without the detail: it may quote what was to be stored.
            let why = format!("{} ({})", db.message(), db.code().code());
            return match db.code().code() {
                // Serialization failure, deadlock, a table that was not free in time, and a reference to what was removed at the same time.
                "40001" | "40P01" | "55P03" | "23503" => Fail::Undone(why),
                // Shutting down, starting up, or too many connections.
                "57P01" | "57P02" | "57P03" | "57P05" | "53300" => Fail::Lost(why),
                // A standby after a failover.
                "25006" => Fail::ReadOnly(why),
                code if code.starts_with("08") => Fail::Lost(why),
                "53100" => Fail::Final(Error::Full { place: "the PostgreSQL server".to_owned() }),
                "26000" | "42P05" => {
                    let hint = "behind a pooler, add prepare=off to the store's URL";
                    Fail::Final(Error::unavailable(format!("{why}; {hint}")))
                }
                _ => Fail::Final(Error::unavailable(why)),
            };
        }
        let why = e.source().map_or_else(|| e.to_string(), |source| format!("{e}: {source}"));
        match e.source().and_then(|s| s.downcast_ref::<io::Error>()).map(io::Error::kind) {
            Some(ErrorKind::InvalidData) => {
                let hint =
                    "for TLS the server needs a certificate that this system trusts, or sslmode=disable in the URL";
                Fail::Final(Error::unavailable(format!("{why}; {hint}")))
            }
            Some(_) => Fail::Lost(why),
            None if e.is_closed() => Fail::Lost(why),
            None => Fail::Final(Error::unavailable(why)),
        }
    }
}
