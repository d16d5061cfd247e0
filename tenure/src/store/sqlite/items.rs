//! Key-value items: writing, reading and expiring.

use crate::store::item::{Item, Namespace, Owner};
use crate::store::sqlite::database::Database;
use crate::store::sqlite::fault::StoreResult;
use crate::types::error::Error;
use crate::types::excerpt::excerpt;
use crate::types::id::Tenant;
use jiff::Timestamp;
use rusqlite::{Connection, Row, params};

const COLUMNS: &str = "key, value, created_at, used_at, uses, expires_at";

/// Inserts or replaces an item and evicts the least recently used ones beyond `max_items`.
pub(super) fn put(conn: &Connection, namespace: &Namespace, item: &Item, max_items: Option<usize>) -> StoreResult<()> {
    if let Owner::Session(id) = &namespace.owner
        && crate::store::sqlite::heads::seq(conn, &namespace.tenant, id)?.is_none()
    {
        return Err(Error::NotFound { session_id: id.clone() }.into());
    }
    let tenant = namespace.tenant.as_str();
    let owner = namespace.owner.to_string();
    let id = upsert(conn, &namespace.tenant, &owner, &namespace.name, item)?;
    if let Some(max_items) = max_items {
        let max_others = i64::try_from(max_items.max(1) - 1).unwrap_or(i64::MAX);
        conn.prepare_cached(
            "DELETE FROM item WHERE id IN (
                SELECT id FROM item WHERE tenant = ?1 AND owner = ?2 AND namespace = ?3 AND id <> ?4
                ORDER BY used_at DESC, key DESC LIMIT -1 OFFSET ?5)",
        )?
        .execute(params![tenant, owner, namespace.name, id, max_others])?;
    }
    Ok(())
}

/// Inserts an item or replaces the one with the same key. Returns its id.
pub(super) fn upsert(
    conn: &Connection,
    tenant: &Tenant,
    owner: &str,
    namespace: &str,
    item: &Item,
) -> StoreResult<i64> {
    let mut upsert = conn.prepare_cached(
        "INSERT INTO item (tenant, owner, namespace, key, value, created_at, used_at, uses, expires_at)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)
        ON CONFLICT (tenant, owner, namespace, key) DO UPDATE SET value = excluded.value,
            created_at = excluded.created_at, used_at = excluded.used_at, uses = excluded.uses,
            expires_at = excluded.expires_at
        RETURNING id",
    )?;
    let created_at = item.created_at.as_microsecond();
    let used_at = item.used_at.as_microsecond();
    let uses = item.uses as i64;
    let expires_at = item.expires_at.map(|t| t.as_microsecond());
    let tenant = tenant.as_str();
    let row = params![tenant, owner, namespace, item.key, item.value, created_at, used_at, uses, expires_at];
    Ok(upsert.query_row(row, |r| r.get(0))?)
}

/// Reads several items of a namespace.
pub(super) fn get_many(
    conn: &Connection,
    file: &Database,
    namespace: &Namespace,
    keys: &[String],
) -> StoreResult<Vec<Item>> {
    let mut statement = conn.prepare_cached(&format!(
        "SELECT {COLUMNS} FROM item WHERE tenant = ?1 AND owner = ?2 AND namespace = ?3 AND key = ?4"
    ))?;
    let owner = namespace.owner.to_string();
    let mut items = Vec::with_capacity(keys.len());
    for key in keys {
        let mut rows = statement.query(params![namespace.tenant.as_str(), owner, namespace.name, key])?;
        if let Some(row) = rows.next()? {
            items.push(read_item(row, file)?);
        }
    }
    Ok(items)
}

/// Counts the items of all namespaces with a name, by the index of keys.
pub(super) fn count(conn: &Connection, name: &str) -> StoreResult<u64> {
    let sql = "SELECT count(*) FROM item INDEXED BY item_key WHERE namespace = ?1";
    let count: i64 = conn.prepare_cached(sql)?.query_row([name], |r| r.get(0))?;
    Ok(count.unsigned_abs())
}

/// Records a use of each item: sets its time of last use and increments its use count.
pub(super) fn record_uses(
    conn: &Connection,
    namespace: &Namespace,
    keys: &[String],
    used_at: Timestamp,
) -> StoreResult<()> {
    let mut statement = conn.prepare_cached(
        "UPDATE item SET used_at = ?5, uses = uses + 1 WHERE tenant = ?1 AND owner = ?2 AND namespace = ?3 AND key = ?4",
    )?;
    let owner = namespace.owner.to_string();
    for key in keys {
        let row = params![namespace.tenant.as_str(), owner, namespace.name, key, used_at.as_microsecond()];
        statement.execute(row)?;
    }
    Ok(())
}

pub(super) fn items(
    conn: &Connection,
    file: &Database,
    namespace: &Namespace,
    after: Option<&str>,
    limit: usize,
) -> StoreResult<Vec<Item>> {
    let condition = if after.is_some() { "key > ?4" } else { "?4 IS NULL" };
    let mut statement = conn.prepare_cached(&format!(
        "SELECT {COLUMNS} FROM item WHERE tenant = ?1 AND owner = ?2 AND namespace = ?3 AND {condition} ORDER BY key LIMIT ?5"
    ))?;
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut rows = statement.query(params![
        namespace.tenant.as_str(),
        namespace.owner.to_string(),
        namespace.name,
        after,
        limit
    ])?;
    let mut items = Vec::new();
    while let Some(row) = rows.next()? {
        items.push(read_item(row, file)?);
    }
    Ok(items)
}

/// Lists the items of all namespaces in the order of their keys.
pub(super) fn items_after(
    conn: &Connection,
    file: &Database,
    after: Option<&(Namespace, String)>,
    limit: usize,
) -> StoreResult<Vec<(Namespace, Item)>> {
    // Before the first item: no tenant is empty.
    let (tenant, owner, name, key) = after.map_or(("", String::new(), "", ""), |(namespace, key)| {
        (namespace.tenant.as_str(), namespace.owner.to_string(), namespace.name.as_str(), key.as_str())
    });
    let mut statement = conn.prepare_cached(&format!(
        "SELECT {COLUMNS}, tenant, owner, namespace FROM item WHERE (tenant, owner, namespace, key) > (?1, ?2, ?3, ?4)
        ORDER BY tenant, owner, namespace, key LIMIT ?5"
    ))?;
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut rows = statement.query(params![tenant, owner, name, key, limit])?;
    let mut items = Vec::new();
    while let Some(row) = rows.next()? {
        let item = read_item(row, file)?;
        let location = || format!("{file}, item {}", excerpt(&item.key));
        let tenant: String = row.get(6)?;
        let tenant = Tenant::new(&tenant).map_err(|e| Error::corrupt_from(location(), e))?;
        let owner: String = row.get(7)?;
        let owner =
            Owner::parse(&owner).ok_or_else(|| Error::corrupt(location(), format!("{owner:?} is not an owner")))?;
        items.push((Namespace { tenant, owner, name: row.get(8)? }, item));
    }
    Ok(items)
}

fn read_item(row: &Row<'_>, file: &Database) -> StoreResult<Item> {
    let key: String = row.get(0)?;
    let parse_time = |micros: i64| {
        let location = || format!("{file}, item {key}", key = excerpt(&key));
        Timestamp::from_microsecond(micros).map_err(|_| Error::corrupt(location(), "a time is out of range"))
    };
    let created_at = parse_time(row.get(2)?)?;
    let used_at = parse_time(row.get(3)?)?;
    let expires_at = row.get::<_, Option<i64>>(5)?.map(parse_time).transpose()?;
    let value = row.get(1)?;
    let uses = row.get::<_, i64>(4)? as u64;
    Ok(Item { key, value, created_at, used_at, uses, expires_at })
}

pub(super) fn remove(conn: &Connection, namespace: &Namespace, key: &str) -> StoreResult<bool> {
    let mut statement =
        conn.prepare_cached("DELETE FROM item WHERE tenant = ?1 AND owner = ?2 AND namespace = ?3 AND key = ?4")?;
    Ok(statement.execute(params![namespace.tenant.as_str(), namespace.owner.to_string(), namespace.name, key])? > 0)
}

/// Removes expired items, at most `limit`, earliest expiry first.
pub(super) fn expire(conn: &Connection, now: Timestamp, limit: usize) -> StoreResult<usize> {
    let mut statement = conn.prepare_cached(
        "DELETE FROM item WHERE id IN (SELECT id FROM item WHERE expires_at <= ?1 ORDER BY expires_at LIMIT ?2)",
    )?;
    Ok(statement.execute([now.as_microsecond(), i64::try_from(limit).unwrap_or(i64::MAX)])?)
}

/// Removes all items of an owner.
pub(super) fn delete_owner_items(conn: &Connection, tenant: &Tenant, owner: &Owner) -> StoreResult<()> {
    conn.prepare_cached("DELETE FROM item WHERE tenant = ?1 AND owner = ?2")?
        .execute([tenant.as_str(), &owner.to_string()])?;
    Ok(())
}
