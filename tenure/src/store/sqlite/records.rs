//! Reading records and blobs.
//!
//! Invariant: a missing or damaged record is reported as [`Error::Corrupt`] and never skipped.

use super::record_key::record_key;
use crate::store::contract::MAX_PAGE_BYTES;
use crate::store::query::{ReadDirection, RecordRange};
use crate::store::sqlite::database::Database;
use crate::store::sqlite::fault::{StoreFault, StoreResult};
use crate::types::blob::BlobId;
use crate::types::decode_error::DecodeError;
use crate::types::entry::{Record, RecordBatch};
use crate::types::error::Error;
use crate::types::id::{Seq, SessionKey, Tenant};
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};
use std::sync::Arc;

const FORWARD: &str =
    "SELECT at, checksum, entry FROM record WHERE record_key > ?1 AND record_key <= ?2 ORDER BY record_key";
const BACKWARD: &str =
    "SELECT at, checksum, entry FROM record WHERE record_key > ?1 AND record_key <= ?2 ORDER BY record_key DESC";
const EXISTS: &str = "SELECT EXISTS (SELECT 1 FROM record WHERE record_key = ?1)";

/// Reads a page of records and verifies their checksums.
pub(super) fn records(
    conn: &Connection,
    file: &Database,
    key: &SessionKey,
    range: &RecordRange,
) -> StoreResult<Vec<Record>> {
    // All statements read one snapshot, so that a gap is real damage and no concurrent change.
    let _snapshot = Transaction::new_unchecked(conn, TransactionBehavior::Deferred)?;
    records_in_transaction(conn, file, key, range)
}

/// Reads a page of records in the transaction of the caller.
pub(super) fn records_in_transaction(
    conn: &Connection,
    file: &Database,
    key: &SessionKey,
    range: &RecordRange,
) -> StoreResult<Vec<Record>> {
    let sql = "SELECT id, seq, coalesce(head_json ->> '$.first', 0) FROM head WHERE tenant = ?1 AND session = ?2";
    let head_row = conn.prepare_cached(sql)?.query_row([key.tenant.as_str(), key.session.as_str()], |r| {
        Ok((r.get::<_, i64>(0)?, r.get::<_, i64>(1)? as Seq, r.get::<_, i64>(2)? as Seq))
    });
    let Some((id, seq, first)) = head_row.optional()? else { return Ok(Vec::new()) };
    let after = range.after.max(first.saturating_sub(1));
    let last = range.upto.min(seq);
    if after >= last || range.limit == 0 {
        return Ok(Vec::new());
    }

    // The checksum covers the sequence number, so a record at the wrong position fails verification
    // (D-009).
    let corrupt_error = |(seq, error): (Seq, DecodeError)| -> StoreFault {
        let exists = conn.query_row(EXISTS, [record_key(id, seq)], |r| r.get(0)).unwrap_or(true);
        let error = if exists { error } else { DecodeError::new("the record is missing") };
        Error::corrupt_from(format!("{file}, session {key}, record {seq}"), error).into()
    };
    let (sql, mut expected_seq) = match range.order {
        ReadDirection::Forward => (FORWARD, after + 1),
        ReadDirection::Backward => (BACKWARD, last),
    };
    let max_records = (last - after).min(range.limit as u64);
    let mut records = RecordBatch::with_capacity(max_records.min(8192) as usize);
    let mut bytes = 0;
    let mut statement = conn.prepare_cached(sql)?;
    let mut rows = statement.query([record_key(id, after), record_key(id, last)])?;
    while (records.len() as u64) < max_records && bytes < MAX_PAGE_BYTES {
        let Some(row) = rows.next()? else {
            return Err(corrupt_error((expected_seq, DecodeError::new("the record is missing"))));
        };
        let Ok(text) = row.get_ref(2)?.as_str() else {
            return Err(corrupt_error((expected_seq, DecodeError::new("the entry is not valid UTF-8"))));
        };
        records.push(expected_seq, row.get(0)?, row.get(1)?, text).map_err(corrupt_error)?;
        bytes += text.len();
        expected_seq = match range.order {
            ReadDirection::Forward => expected_seq + 1,
            ReadDirection::Backward => expected_seq.saturating_sub(1),
        };
    }
    records.finish().map_err(corrupt_error)
}

pub(super) fn blob(conn: &Connection, tenant: &Tenant, id: &BlobId) -> StoreResult<Option<Arc<[u8]>>> {
    let mut statement = conn.prepare_cached("SELECT bytes FROM blob WHERE tenant = ?1 AND id = ?2")?;
    let bytes = statement.query_row(params![tenant.as_str(), id.0], |r| Ok(Arc::from(r.get_ref(0)?.as_blob()?)));
    Ok(bytes.optional()?)
}
