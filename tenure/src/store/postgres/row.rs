//! Columns and parameters of rows.

use crate::types::error::{Error, Result};
use crate::types::id::Key;
use jiff::Timestamp;
use tokio_postgres::Row;
use tokio_postgres::types::FromSql;

/// A value of a row. One that can not be read is damage at a place.
pub(super) fn column<'a, T: FromSql<'a>>(row: &'a Row, index: usize, place: impl FnOnce() -> String) -> Result<T> {
    row.try_get(index).map_err(|e| Error::corrupt(place(), e))
}

/// A session's place, for errors.
pub(super) fn place(key: &Key) -> String {
    format!("postgres, session {key}")
}

/// A time as it is stored.
pub(super) fn micros(at: Timestamp) -> i64 {
    at.as_microsecond()
}

/// A time that was stored.
pub(super) fn instant(at: i64, place: impl FnOnce() -> String) -> Result<Timestamp> {
    Timestamp::from_microsecond(at).map_err(|_| Error::corrupt(place(), "a time is out of range"))
}

/// A count as it is stored. No log or counter comes near the largest number that fits; `Seq::MAX` stands for no bound.
pub(super) fn whole(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// A number of rows as it is bound.
pub(super) fn row_limit(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
