//! The error type of work on a SQLite connection.

use crate::types::error::Error;
use std::result;

/// A failure of work on a connection: a rejection by the store, or an error of SQLite, which `File`
/// converts into an [`Error`].
pub(crate) enum Fault {
    Told(Error),
    Sql(rusqlite::Error),
}

/// The result of work on a connection.
pub(crate) type Done<T> = result::Result<T, Fault>;

impl From<Error> for Fault {
    fn from(e: Error) -> Self {
        Fault::Told(e)
    }
}

impl From<rusqlite::Error> for Fault {
    fn from(e: rusqlite::Error) -> Self {
        Fault::Sql(e)
    }
}
