//! The primary key of a record.

use crate::types::id::Seq;

/// Maximum number of records in one session.
pub(super) const MAX_RECORDS: u64 = (1 << 32) - 1;

/// The primary key of a record: session id and sequence number in one integer. `seq` 0 is the
/// position before the first record.
pub(super) fn record_key(id: i64, seq: Seq) -> i64 {
    id << 32 | seq.min(MAX_RECORDS) as i64
}
