//! The error type of work on a SQLite connection.

use crate::types::error::Error;
use std::result;

/// A failure of work on a connection: a rejection by the store, or an error of SQLite, which
/// `Database` converts into an [`Error`].
pub(crate) enum StoreFault {
    Rejected(Error),
    Sql(rusqlite::Error),
}

/// The result of work on a connection.
pub(crate) type StoreResult<T> = result::Result<T, StoreFault>;

impl From<Error> for StoreFault {
    fn from(e: Error) -> Self {
        StoreFault::Rejected(e)
    }
}

impl From<rusqlite::Error> for StoreFault {
    fn from(e: rusqlite::Error) -> Self {
        StoreFault::Sql(e)
    }
}
