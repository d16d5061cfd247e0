//! The sessions that show a record: its own, and the forks that inherit it.

use crate::store::postgres::connection::{Param, PgConnection};
use crate::store::postgres::row::{column, count_to_i64, row_limit, timestamp_from_micros};
use crate::store::shown::{RecordLocation, ShownRecord};
use crate::types::error::{Error, Result};
use crate::types::id::{SessionId, Tenant};
use tokio_postgres::types::Type;

/// Follows the forks of each record's session. `discarded_by` is the first rewind that discards the record, in the part
/// of the logs that the session shows; NULL if there is none. A rewind after a fork point has no effect on the fork.
const SHOWING: &str = "
    WITH RECURSIVE shown (record, session, seq, active_at, discarded_by) AS (
        SELECT wanted.record, h.session, wanted.seq, h.active_at, (
            SELECT min(w.seq) FROM tenure_record w
            WHERE w.tenant = $1 AND w.session = h.session AND w.seq > wanted.seq
                AND starts_with(w.entry, '{\"rewound\":')
                AND (tenure_jsonb(w.entry) #>> '{rewound,to}')::bigint < wanted.seq
        )
        FROM unnest($2, $3) WITH ORDINALITY AS wanted (session, seq, record)
            JOIN tenure_head h ON h.tenant = $1 AND h.session = wanted.session
        UNION ALL
        SELECT s.record, f.session, s.seq, f.active_at, least(
            CASE WHEN s.discarded_by <= f.parent_seq THEN s.discarded_by END,
            (
                SELECT min(w.seq) FROM tenure_record w
                WHERE w.tenant = $1 AND w.session = f.session AND w.seq > s.seq
                    AND starts_with(w.entry, '{\"rewound\":')
                    AND (tenure_jsonb(w.entry) #>> '{rewound,to}')::bigint < s.seq
            )
        )
        FROM shown s JOIN tenure_head f ON f.tenant = $1 AND f.parent = s.session AND f.parent_seq >= s.seq
    )
    SELECT record, session, active_at FROM shown WHERE discarded_by IS NULL LIMIT $4";

pub(super) async fn sessions_showing(
    connection: &PgConnection,
    tenant: &Tenant,
    records: &[RecordLocation],
    limit: usize,
) -> Result<Vec<ShownRecord>> {
    let sessions: Vec<&str> = records.iter().map(|r| r.session.as_str()).collect();
    let seqs: Vec<i64> = records.iter().map(|r| count_to_i64(r.seq)).collect();
    let params: [Param<'_>; 4] = [
        (&tenant.as_str(), Type::TEXT),
        (&sessions, Type::TEXT_ARRAY),
        (&seqs, Type::INT8_ARRAY),
        (&row_limit(limit), Type::INT8),
    ];
    let location = || "postgres, table tenure_head".to_owned();
    let mut shown = Vec::new();
    for row in &connection.rows(SHOWING, &params).await? {
        let record: i64 = column(row, 0, location)?;
        let session: &str = column(row, 1, location)?;
        let session = SessionId::new(session).map_err(|e| Error::corrupt_from(location(), e))?;
        let active_at = timestamp_from_micros(column(row, 2, location)?, location)?;
        // Ordinal numbers count from 1.
        shown.push(ShownRecord { record: record.unsigned_abs() as usize - 1, session, active_at });
    }
    Ok(shown)
}
