//! Reading records and blobs.
//!
//! Invariant: a missing or damaged record is reported as [`Error::Corrupt`] and never skipped.

use super::commit::record_key;
use crate::store::contract::MAX_PAGE_BYTES;
use crate::store::query::{ReadDirection, RecordRange};
use crate::store::sqlite::database::Database;
use crate::store::sqlite::fault::{StoreFault, StoreResult};
use crate::types::blob::BlobId;
use crate::types::entry::{Record, RecordBatch};
use crate::types::error::Error;
use crate::types::id::{Seq, SessionKey, Tenant};
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};
use std::sync::Arc;

const FORWARD: &str = "SELECT at, sum, entry FROM record WHERE k > ?1 AND k <= ?2 ORDER BY k";
const BACKWARD: &str = "SELECT at, sum, entry FROM record WHERE k > ?1 AND k <= ?2 ORDER BY k DESC";
const EXISTS: &str = "SELECT EXISTS (SELECT 1 FROM record WHERE k = ?1)";

/// Reads a page of records and verifies their checksums.
pub(super) fn records(
    conn: &Connection,
    file: &Database,
    key: &SessionKey,
    range: &RecordRange,
) -> StoreResult<Vec<Record>> {
    // Both statements read one snapshot, so that a gap is real damage and no concurrent change.
    let _moment = Transaction::new_unchecked(conn, TransactionBehavior::Deferred)?;
    let find = "SELECT id, seq, coalesce(card ->> '$.first', 0) FROM head WHERE tenant = ?1 AND session = ?2";
    let found = conn.prepare_cached(find)?.query_row([key.tenant.as_str(), key.session.as_str()], |r| {
        Ok((r.get::<_, i64>(0)?, r.get::<_, i64>(1)? as Seq, r.get::<_, i64>(2)? as Seq))
    });
    let Some((id, seq, first)) = found.optional()? else { return Ok(Vec::new()) };
    let after = range.after.max(first.saturating_sub(1));
    let upto = range.upto.min(seq);
    if after >= upto || range.limit == 0 {
        return Ok(Vec::new());
    }

    // The checksum covers the sequence number, so a record at the wrong position fails verification
    // (D-009).
    let damage = |(seq, why): (Seq, String)| -> StoreFault {
        let there = conn.query_row(EXISTS, [record_key(id, seq)], |r| r.get(0)).unwrap_or(true);
        let why = if there { why } else { "it is missing".to_owned() };
        Error::corrupt(format!("{file}, session {key}, record {seq}"), why).into()
    };
    let (sql, mut want) = match range.order {
        ReadDirection::Forward => (FORWARD, after + 1),
        ReadDirection::Backward => (BACKWARD, upto),
    };
    let length = (upto - after).min(range.limit as u64);
    let mut records = RecordBatch::with_capacity(length.min(8192) as usize);
    let mut bytes = 0;
    let mut find = conn.prepare_cached(sql)?;
    let mut rows = find.query([record_key(id, after), record_key(id, upto)])?;
    while (records.len() as u64) < length && bytes < MAX_PAGE_BYTES {
        let Some(row) = rows.next()? else { return Err(damage((want, "it is missing".to_owned()))) };
        let Ok(text) = row.get_ref(2)?.as_str() else {
            return Err(damage((want, "its text is not UTF-8".to_owned())));
        };
        records.push(want, row.get(0)?, row.get(1)?, text).map_err(damage)?;
        bytes += text.len();
        want = match range.order {
            ReadDirection::Forward => want + 1,
            ReadDirection::Backward => want.saturating_sub(1),
        };
    }
    records.finish().map_err(damage)
}

pub(super) fn blob(conn: &Connection, tenant: &Tenant, id: &BlobId) -> StoreResult<Option<Arc<[u8]>>> {
    let mut find = conn.prepare_cached("SELECT bytes FROM blob WHERE tenant = ?1 AND id = ?2")?;
    let bytes = find.query_row(params![tenant.as_str(), id.0], |r| Ok(Arc::from(r.get_ref(0)?.as_blob()?)));
    Ok(bytes.optional()?)
}
