//! Records and blobs: reading them.

use super::Done;
use super::commit::record_key;
use super::file::File;
use crate::entry::Record;
use crate::error::Error;
use crate::id::{Key, Seq, Tenant};
use crate::media::BlobId;
use crate::store::{Direction, MAX_PAGE_BYTES, Range};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params};
use std::sync::Arc;

// As a blob, SQLite gives the text where it lies; as text it would copy it first, to put a NUL behind it.
const FORWARD: &str = "SELECT k, at, sum, CAST(entry AS BLOB) FROM record WHERE k > ?1 AND k <= ?2 ORDER BY k";
const BACKWARD: &str = "SELECT k, at, sum, CAST(entry AS BLOB) FROM record WHERE k > ?1 AND k <= ?2 ORDER BY k DESC";

pub(super) fn records(conn: &Connection, file: &File, key: &Key, range: &Range) -> Done<Vec<Record>> {
    // One moment for both statements, so that a hole is a hole.
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

    let place = |seq: Seq| format!("{file}, session {key}, record {seq}");
    let missing = |seq| Err(Error::corrupt(place(seq), "it is missing").into());
    let (sql, mut want) = match range.order {
        Direction::Forward => (FORWARD, after + 1),
        Direction::Backward => (BACKWARD, upto),
    };
    let length = (upto - after).min(range.limit as u64);
    let mut records = Vec::with_capacity(length.min(8192) as usize);
    let mut bytes = 0;
    let mut find = conn.prepare_cached(sql)?;
    let mut rows = find.query([record_key(id, after), record_key(id, upto)])?;
    while (records.len() as u64) < length && bytes < MAX_PAGE_BYTES {
        let Some(row) = rows.next()? else { return missing(want) };
        let seq = (row.get::<_, i64>(0)? & 0xffff_ffff) as Seq;
        if seq != want {
            return missing(want);
        }
        let (record, length) = read(row, seq, place)?;
        records.push(record);
        bytes += length;
        want = match range.order {
            Direction::Forward => want + 1,
            Direction::Backward => want.saturating_sub(1),
        };
    }
    Ok(records)
}

/// A record, and the length of its text.
fn read(row: &Row<'_>, seq: Seq, place: impl Fn(Seq) -> String) -> Done<(Record, usize)> {
    let (at, sum) = (row.get(1)?, row.get(2)?);
    let Some(text) = row.get_ref(3)?.as_blob().ok().and_then(|t| std::str::from_utf8(t).ok()) else {
        return Err(Error::corrupt(place(seq), "its text is not UTF-8").into());
    };
    Ok((Record::read(seq, at, sum, text, || place(seq))?, text.len()))
}

pub(super) fn blob(conn: &Connection, tenant: &Tenant, id: &BlobId) -> Done<Option<Arc<[u8]>>> {
    let mut find = conn.prepare_cached("SELECT bytes FROM blob WHERE tenant = ?1 AND id = ?2")?;
    let bytes = find.query_row(params![tenant.as_str(), id.0], |r| Ok(Arc::from(r.get_ref(0)?.as_blob()?)));
    Ok(bytes.optional()?)
}
