//! Conversions between columns, parameters and the types of the crate.

use crate::types::error::{Error, Result};
use crate::types::id::SessionKey;
use jiff::Timestamp;
use tokio_postgres::Row;
use tokio_postgres::types::FromSql;

/// Reads a column of a row. A value of another type is reported as [`Error::Corrupt`] at
/// `location`.
pub(super) fn column<'a, T: FromSql<'a>>(row: &'a Row, index: usize, location: impl FnOnce() -> String) -> Result<T> {
    row.try_get(index).map_err(|e| Error::corrupt_from(location(), e))
}

/// Describes the location of a session, for errors.
pub(super) fn session_location(key: &SessionKey) -> String {
    format!("postgres, session {key}")
}

/// A time as it is stored, in microseconds.
pub(super) fn micros(timestamp: Timestamp) -> i64 {
    timestamp.as_microsecond()
}

/// Converts a stored time; out of range is [`Error::Corrupt`] at `location`.
pub(super) fn timestamp_from_micros(micros: i64, location: impl FnOnce() -> String) -> Result<Timestamp> {
    Timestamp::from_microsecond(micros).map_err(|_| Error::corrupt(location(), "a time is out of range"))
}

/// A count as it is stored. Logs and counters never reach the largest number that fits; `Seq::MAX`
/// (no bound) becomes that number.
pub(super) fn count_to_i64(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// A number of rows as it is bound, capped at the largest number that fits.
pub(super) fn row_limit(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
