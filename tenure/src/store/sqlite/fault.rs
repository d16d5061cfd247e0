//! How work on a connection fails.

use crate::types::error::Error;
use std::result;

/// What stopped a piece of work: a rule of the store, or SQLite itself, whose errors the [`File`] puts into words.
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
