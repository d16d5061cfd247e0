//! The sessions that show a record: its own, and the forks that inherit it.

use crate::store::shown::{RecordLocation, ShownRecord};
use crate::store::sqlite::fault::StoreResult;
use crate::types::error::Error;
use crate::types::id::{SessionId, Tenant};
use jiff::Timestamp;
use rusqlite::{Connection, params};

/// Follows the forks of each record's session. `discarded_by` is the first rewind that discards the record, in the part
/// of the logs that the session shows; 2^32 if there is none. A rewind after a fork point has no effect on the fork.
const SHOWING: &str = "
    WITH RECURSIVE shown (record, id, session, seq, active_at, discarded_by) AS (
        SELECT wanted.key, h.id, h.session, wanted.value ->> 1, h.active_at, coalesce((
            SELECT min(w.record_key & 0xffffffff) FROM record w INDEXED BY record_rewound
            WHERE w.record_key >> 32 = h.id AND w.entry GLOB '{\"rewound\":*'
                AND w.record_key > h.id << 32 | wanted.value ->> 1 AND w.entry ->> '$.rewound.to' < wanted.value ->> 1
        ), 1 << 32)
        FROM json_each(?2) wanted CROSS JOIN head h INDEXED BY head_key
            ON h.tenant = ?1 AND h.session = wanted.value ->> 0
        UNION ALL
        SELECT s.record, f.id, f.session, s.seq, f.active_at, min(
            CASE WHEN s.discarded_by <= f.head_json ->> '$.parent.seq' THEN s.discarded_by ELSE 1 << 32 END,
            coalesce((
                SELECT min(w.record_key & 0xffffffff) FROM record w INDEXED BY record_rewound
                WHERE w.record_key >> 32 = f.id AND w.entry GLOB '{\"rewound\":*'
                    AND w.record_key > f.id << 32 | s.seq AND w.entry ->> '$.rewound.to' < s.seq
            ), 1 << 32)
        )
        FROM shown s CROSS JOIN head f INDEXED BY head_parent ON f.tenant = ?1 AND f.parent = s.session
        WHERE f.head_json ->> '$.parent.seq' >= s.seq
    )
    SELECT record, session, active_at FROM shown WHERE discarded_by = 1 << 32 LIMIT ?3";

pub(super) fn sessions_showing(
    conn: &Connection,
    tenant: &Tenant,
    records: &[RecordLocation],
    limit: usize,
) -> StoreResult<Vec<ShownRecord>> {
    let wanted: Vec<_> = records.iter().map(|r| (r.session.as_str(), r.seq)).collect();
    let wanted = serde_json::to_string(&wanted).expect("names and numbers are valid JSON");
    let mut statement = conn.prepare_cached(SHOWING)?;
    let mut rows = statement.query(params![tenant.as_str(), wanted, i64::try_from(limit).unwrap_or(i64::MAX)])?;
    let mut shown = Vec::new();
    while let Some(row) = rows.next()? {
        let session: String = row.get(1)?;
        let corrupt = |reason: String| Error::corrupt(format!("sqlite, session {tenant}/{session}"), reason);
        let active_at = Timestamp::from_microsecond(row.get(2)?).map_err(|e| corrupt(e.to_string()))?;
        let session = SessionId::new(&session).map_err(|e| corrupt(e.to_string()))?;
        shown.push(ShownRecord { record: row.get::<_, i64>(0)? as usize, session, active_at });
    }
    Ok(shown)
}
