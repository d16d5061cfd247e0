//! Reading pages of a log.
//!
//! Invariant: a missing or damaged record is reported as [`Error::Corrupt`] and never skipped.

use crate::store::contract::MAX_PAGE_BYTES;
use crate::store::postgres::connection::{Param, PgConnection};
use crate::store::postgres::row::{column, place, row_limit, whole};
use crate::store::query::{ReadDirection, RecordRange};
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::id::{Seq, SessionKey};
use tokio_postgres::types::Type;

/// Maximum number of records in a page, even if the limit of the range is not reached.
const MAX_PAGE_RECORDS: usize = 4096;

/// Reads one page. The server sums the lengths, so it never sends more than a page; the ends of the
/// log come from the same snapshot, so that a gap can be distinguished from the end.
pub(super) async fn records(link: &PgConnection, key: &SessionKey, range: &RecordRange) -> Result<Vec<Record>> {
    let order = match range.order {
        ReadDirection::Forward => "ASC",
        ReadDirection::Backward => "DESC",
    };
    let sql = format!(
        "SELECT h.first, h.seq, r.seq, r.at, r.sum, r.entry
        FROM tenure_head h LEFT JOIN LATERAL (
            SELECT * FROM (
                SELECT seq, at, sum, entry, sum(octet_length(entry)) OVER (ORDER BY seq {order}) AS bytes
                FROM tenure_record
                WHERE tenant = $1 AND session = $2 AND seq > $3 AND seq <= $4 ORDER BY seq {order} LIMIT $5
            ) page WHERE bytes - octet_length(entry) < $6
        ) r ON true
        WHERE h.tenant = $1 AND h.session = $2 ORDER BY r.seq {order}"
    );
    let params: [Param<'_>; 6] = [
        (&key.tenant.as_str(), Type::TEXT),
        (&key.session.as_str(), Type::TEXT),
        (&whole(range.after), Type::INT8),
        (&whole(range.upto), Type::INT8),
        (&row_limit(range.limit.min(MAX_PAGE_RECORDS)), Type::INT8),
        (&(MAX_PAGE_BYTES as i64), Type::INT8),
    ];
    let rows = link.rows(&sql, &params).await?;
    let Some(ends) = rows.first() else { return Ok(Vec::new()) };
    let (first, last): (i64, i64) = (column(ends, 0, || place(key))?, column(ends, 1, || place(key))?);
    let from = first.unsigned_abs().max(range.after.saturating_add(1));
    let to = last.unsigned_abs().min(range.upto);
    if from > to || range.limit == 0 {
        return Ok(Vec::new());
    }
    let at = |seq: Seq| format!("{}, record {seq}", place(key));
    let mut want = match range.order {
        ReadDirection::Forward => from,
        ReadDirection::Backward => to,
    };
    let mut page = Vec::with_capacity(rows.len());
    for row in &rows {
        let here = || at(want);
        if column::<Option<i64>>(row, 2, here)?.map(i64::unsigned_abs) != Some(want) {
            return Err(Error::corrupt(here(), "it is missing"));
        }
        let sum = column::<i32>(row, 4, here)?.cast_unsigned();
        page.push(Record::read(want, column(row, 3, here)?, sum, column(row, 5, here)?, here)?);
        want = match range.order {
            ReadDirection::Forward => want + 1,
            ReadDirection::Backward => want - 1,
        };
    }
    Ok(page)
}
