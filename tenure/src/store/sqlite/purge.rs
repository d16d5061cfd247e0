//! Purging a session, with fork inheritance.
//!
//! Invariant: what a fork of the purged session shows does not change (D-001).

use super::commit::remove_match_keys;
use super::record_key::record_key;
use super::{heads, items, messages};
use crate::store::item::Owner;
use crate::store::sqlite::database::Database;
use crate::store::sqlite::fault::StoreResult;
use crate::types::error::Error;
use crate::types::head::Head;
use crate::types::id::{Seq, SessionId, SessionKey};
use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};

/// Purges a session. With `expected`, only if it still has this creation time and its log still
/// ends at this record.
pub(super) fn purge(
    conn: &Connection,
    file: &Database,
    key: &SessionKey,
    expected: Option<(Timestamp, Seq)>,
) -> StoreResult<()> {
    let sql = "SELECT id, head_json, match_keys FROM head WHERE tenant = ?1 AND session = ?2";
    let found_row = conn.prepare_cached(sql)?.query_row([key.tenant.as_str(), key.session.as_str()], |r| {
        Ok((r.get::<_, i64>(0)?, r.get::<_, String>(1)?, r.get::<_, String>(2)?))
    });
    let Some((id, head_json, match_keys_hex)) = found_row.optional()? else { return Ok(()) };
    if let Some((created_at, seq)) = expected {
        let current = heads::decode(file, &key.tenant, &key.session, &head_json)?;
        if (current.info.created_at, current.seq) != (created_at, seq) {
            return Err(Error::Conflict { session_id: key.session.clone(), expected: seq }.into());
        }
    }
    let forks = forks(conn, file, key)?;
    if !forks.is_empty() {
        // Deserialized only here: a damaged head must not prevent purging a session without forks.
        let purged = heads::decode(file, &key.tenant, &key.session, &head_json)?;
        transfer_to_forks(conn, id, &purged, forks)?;
    }
    messages::remove(conn, id, 0, Seq::MAX)?;
    conn.prepare_cached("DELETE FROM record WHERE record_key > ?1 AND record_key <= ?2")?
        .execute([record_key(id, 0), record_key(id, Seq::MAX)])?;
    conn.prepare_cached(
        "DELETE FROM blob WHERE tenant = ?1 AND id IN (SELECT blob_id FROM blob_ref WHERE head_id = ?2)
            AND NOT EXISTS (SELECT 1 FROM blob_ref r WHERE r.tenant = ?1 AND r.blob_id = blob.id AND r.head_id <> ?2)",
    )?
    .execute(params![key.tenant.as_str(), id])?;
    conn.prepare_cached("DELETE FROM blob_ref WHERE head_id = ?1")?.execute([id])?;
    items::delete_owner_items(conn, &key.tenant, &Owner::Session(key.session.clone()))?;
    remove_match_keys(conn, key.tenant.as_str(), id, &match_keys_hex)?;
    conn.prepare_cached("DELETE FROM head WHERE id = ?1")?.execute([id])?;
    Ok(())
}

/// Returns the forks of a session, ordered by fork point; the latest is last.
fn forks(conn: &Connection, file: &Database, key: &SessionKey) -> StoreResult<Vec<(i64, Head)>> {
    let mut statement =
        conn.prepare_cached("SELECT id, session, head_json FROM head WHERE tenant = ?1 AND parent = ?2 ORDER BY id")?;
    let mut rows = statement.query([key.tenant.as_str(), key.session.as_str()])?;
    let mut forks = Vec::new();
    while let Some(row) = rows.next()? {
        let session: String = row.get(1)?;
        let head_json: String = row.get(2)?;
        forks.push((row.get(0)?, heads::decode(file, &key.tenant, &session, &head_json)?));
    }
    forks.sort_by_key(|(_, head)| fork_point(head));
    Ok(forks)
}

/// The fork point: the last inherited record.
fn fork_point(fork: &Head) -> Seq {
    fork.parent.as_ref().map_or(0, |p| p.seq)
}

/// Moves the records up to the latest fork point to that fork, which takes the purged session's
/// place. If all fork points lie before the session's own first record, no records are inherited,
/// and the forks are re-parented to its parent.
fn transfer_to_forks(conn: &Connection, id: i64, purged: &Head, mut forks: Vec<(i64, Head)>) -> StoreResult<()> {
    let last_inherited = forks.last().map_or(0, |(_, last)| fork_point(last));
    let inheriting_fork = if last_inherited + 1 >= purged.first { forks.pop() } else { None };
    let new_parent = match inheriting_fork {
        Some((inheriting_id, inheriting_fork)) => {
            move_records(conn, id, inheriting_id, last_inherited)?;
            messages::inherit(conn, &inheriting_fork.key(), inheriting_fork.user == purged.user)?;
            let inheriting_fork = Head { first: purged.first, parent: purged.parent.clone(), ..inheriting_fork };
            update_lineage(conn, inheriting_id, &inheriting_fork)?;
            Some(inheriting_fork.info.session_id)
        }
        None => purged.parent.as_ref().map(|p| p.session.clone()),
    };
    for (fork_id, fork) in forks {
        update_lineage(conn, fork_id, &reparent(fork, new_parent.as_ref()))?;
    }
    Ok(())
}

/// Re-parents a fork.
fn reparent(mut fork: Head, new_parent: Option<&SessionId>) -> Head {
    if let (Some(parent), Some(session)) = (&mut fork.parent, new_parent) {
        parent.session = session.clone();
    }
    fork
}

/// Moves records and blob references up to `last_seq` to another session.
fn move_records(conn: &Connection, from: i64, to: i64, last_seq: Seq) -> StoreResult<()> {
    conn.prepare_cached("UPDATE record SET record_key = record_key + ?3 WHERE record_key > ?1 AND record_key <= ?2")?
        .execute([record_key(from, 0), record_key(from, last_seq), record_key(to - from, 0)])?;
    conn.prepare_cached("UPDATE blob_ref SET head_id = ?2 WHERE head_id = ?1 AND first_seq <= ?3")?.execute([
        from,
        to,
        last_seq as i64,
    ])?;
    Ok(())
}

/// Updates the lineage of a stored head.
fn update_lineage(conn: &Connection, id: i64, head: &Head) -> StoreResult<()> {
    let parent = head.parent.as_ref().map(|p| p.session.as_str());
    conn.prepare_cached("UPDATE head SET parent = ?2, head_json = ?3 WHERE id = ?1")?.execute(params![
        id,
        parent,
        heads::encode(head)
    ])?;
    Ok(())
}
