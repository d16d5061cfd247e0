//! Reading pages of a log, and blobs.
//!
//! Invariant: a missing or damaged record is reported as [`Error::Corrupt`] and never skipped.

use crate::store::contract::MAX_PAGE_BYTES;
use crate::store::postgres::connection::{Param, RowSource};
use crate::store::postgres::row::{column, count_to_i64, row_limit, session_location};
use crate::store::query::{ReadDirection, RecordRange};
use crate::types::blob::BlobId;
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::id::{Seq, SessionKey, Tenant};
use std::sync::Arc;
use tokio_postgres::types::Type;

/// Maximum number of records in a page, even if the limit of the range is not reached.
const MAX_PAGE_RECORDS: usize = 4096;

/// Reads one page. The server sums the lengths, so it never sends more than a page; the ends of the
/// log come from the same snapshot, so that a gap can be distinguished from the end.
pub(super) async fn records(source: &impl RowSource, key: &SessionKey, range: &RecordRange) -> Result<Vec<Record>> {
    let order = match range.order {
        ReadDirection::Forward => "ASC",
        ReadDirection::Backward => "DESC",
    };
    let sql = format!(
        "SELECT h.first_seq, h.seq, r.seq, r.at, r.checksum, r.entry
        FROM tenure_head h LEFT JOIN LATERAL (
            SELECT * FROM (
                SELECT seq, at, checksum, entry, sum(octet_length(entry)) OVER (ORDER BY seq {order}) AS bytes
                FROM tenure_record
                WHERE tenant = $1 AND session = $2 AND seq > $3 AND seq <= $4 ORDER BY seq {order} LIMIT $5
            ) page WHERE bytes - octet_length(entry) < $6
        ) r ON true
        WHERE h.tenant = $1 AND h.session = $2 ORDER BY r.seq {order}"
    );
    let params: [Param<'_>; 6] = [
        (&key.tenant.as_str(), Type::TEXT),
        (&key.session.as_str(), Type::TEXT),
        (&count_to_i64(range.after), Type::INT8),
        (&count_to_i64(range.upto), Type::INT8),
        (&row_limit(range.limit.min(MAX_PAGE_RECORDS)), Type::INT8),
        (&(MAX_PAGE_BYTES as i64), Type::INT8),
    ];
    let rows = source.rows(&sql, &params).await?;
    let Some(head_row) = rows.first() else { return Ok(Vec::new()) };
    let first: i64 = column(head_row, 0, || session_location(key))?;
    let last: i64 = column(head_row, 1, || session_location(key))?;
    let first_seq = first.unsigned_abs().max(range.after.saturating_add(1));
    let last_seq = last.unsigned_abs().min(range.upto);
    if first_seq > last_seq || range.limit == 0 {
        return Ok(Vec::new());
    }
    let describe_record = |seq: Seq| format!("{}, record {seq}", session_location(key));
    let mut expected_seq = match range.order {
        ReadDirection::Forward => first_seq,
        ReadDirection::Backward => last_seq,
    };
    let mut page = Vec::with_capacity(rows.len());
    for row in &rows {
        let location = || describe_record(expected_seq);
        if column::<Option<i64>>(row, 2, location)?.map(i64::unsigned_abs) != Some(expected_seq) {
            return Err(Error::corrupt(location(), "the record is missing"));
        }
        let checksum = column::<i32>(row, 4, location)?.cast_unsigned();
        page.push(Record::read(
            expected_seq,
            column(row, 3, location)?,
            checksum,
            column(row, 5, location)?,
            location,
        )?);
        expected_seq = match range.order {
            ReadDirection::Forward => expected_seq + 1,
            ReadDirection::Backward => expected_seq - 1,
        };
    }
    Ok(page)
}

/// Reads a blob and verifies its hash.
pub(super) async fn blob(source: &impl RowSource, tenant: &Tenant, id: &BlobId) -> Result<Option<Arc<[u8]>>> {
    let sql = "SELECT bytes FROM tenure_blob WHERE tenant = $1 AND id = $2";
    let rows = source.rows(sql, &[(&tenant.as_str(), Type::TEXT), (&&id.0[..], Type::BYTEA)]).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let location = || format!("postgres, tenant {tenant}, blob {id}");
    let bytes: &[u8] = column(row, 0, location)?;
    if BlobId::of(bytes) != *id {
        return Err(Error::corrupt(location(), "the bytes do not match the blob's hash"));
    }
    Ok(Some(bytes.into()))
}
