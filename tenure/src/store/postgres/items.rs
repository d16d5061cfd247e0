//! Key-value items: writing, reading and expiring.

use crate::store::item::{Item, Namespace, Owner};
use crate::store::postgres::connection::{MAINTENANCE_TIMEOUT, Param, PgConnection, RowSource};
use crate::store::postgres::row::{column, count_to_i64, micros, row_limit, timestamp_from_micros};
use crate::types::error::{Error, Result};
use crate::types::id::Tenant;
use jiff::Timestamp;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

/// Maximum length of owner, namespace and key of an item together, in bytes: with the tenant, the
/// limit of an index entry.
const MAX_ITEM_KEY_BYTES: usize = 2048;

pub(super) const ITEM_COLUMNS: &str = "tenant, owner, namespace, key, value, created_at, used_at, uses, expires_at";
pub(super) const ITEM_REPLACE: &str =
    "ON CONFLICT (tenant, owner, namespace, key) DO UPDATE SET value = excluded.value,
    created_at = excluded.created_at, used_at = excluded.used_at, uses = excluded.uses,
    expires_at = excluded.expires_at";

/// Counts the items of all namespaces with a name.
pub(super) async fn count(connection: &PgConnection, name: &str) -> Result<u64> {
    let sql = "SELECT count(*) FROM tenure_item WHERE namespace = $1";
    let rows = connection.rows(sql, &[(&name, Type::TEXT)]).await?;
    let table = || "postgres, table tenure_item".to_owned();
    Ok(rows.first().map(|row| column::<i64>(row, 0, table)).transpose()?.unwrap_or(0).unsigned_abs())
}

/// Validates that a text contains no NUL character, which PostgreSQL cannot store.
pub(super) fn check_no_nul(name: &str, value: &str) -> Result<()> {
    if value.contains('\0') {
        return Err(Error::invalid(
            name,
            format!("{name} contains a NUL character, which cannot be stored; remove it"),
        ));
    }
    Ok(())
}

/// Validates that the key of an item fits into an index entry.
pub(super) fn check_item_key(owner: &str, namespace: &str, key: &str) -> Result<()> {
    check_no_nul("owner", owner)?;
    check_no_nul("namespace", namespace)?;
    check_no_nul("key", key)?;
    if owner.len() + namespace.len() + key.len() > MAX_ITEM_KEY_BYTES {
        let limit = "MAX_ITEM_KEY_BYTES";
        let max = MAX_ITEM_KEY_BYTES as u64;
        return Err(Error::TooLarge {
            subject: "the item's key, with its namespace and owner,".to_owned(),
            limit,
            max,
        });
    }
    Ok(())
}

/// Inserts or replaces an item and evicts the least recently used ones beyond `max_items`, in one
/// statement.
pub(super) async fn put(
    connection: &PgConnection,
    namespace: &Namespace,
    item: &Item,
    max_items: Option<usize>,
) -> Result<()> {
    let tenant = namespace.tenant.as_str();
    let owner = namespace.owner.to_string();
    check_item_key(&owner, &namespace.name, &item.key)?;
    item.check()?;
    let session = match &namespace.owner {
        Owner::Session(id) => Some(id.as_str()),
        _ => None,
    };
    // The new item is not counted, because the statement sees the namespace as it was before. Old
    // items that another transaction has locked are skipped and left to that transaction or the
    // next: waiting for them while holding the new row would deadlock.
    let max_others = max_items.map(|n| row_limit(n.saturating_sub(1)));
    let sql = format!(
        "WITH session_lock AS (
            SELECT 1 FROM tenure_head WHERE tenant = $1 AND session = $10 FOR KEY SHARE
        ), upserted AS (
            INSERT INTO tenure_item ({ITEM_COLUMNS})
            SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9
            WHERE $10 IS NULL OR EXISTS (SELECT 1 FROM session_lock)
            {ITEM_REPLACE}
            RETURNING 1
        ), evicted AS (
            DELETE FROM tenure_item i USING (
                SELECT key FROM tenure_item
                WHERE tenant = $1 AND owner = $2 AND namespace = $3
                    AND $11 IS NOT NULL AND EXISTS (SELECT 1 FROM upserted)
                    AND key IN (
                        SELECT key FROM tenure_item
                        WHERE tenant = $1 AND owner = $2 AND namespace = $3 AND key <> $4
                        ORDER BY used_at DESC, created_at DESC, key DESC OFFSET coalesce($11, 0)
                    )
                FOR UPDATE SKIP LOCKED
            ) candidate
            WHERE i.tenant = $1 AND i.owner = $2 AND i.namespace = $3 AND i.key = candidate.key
        )
        SELECT 1 FROM upserted"
    );
    let params: [Param<'_>; 11] = [
        (&tenant, Type::TEXT),
        (&owner, Type::TEXT),
        (&namespace.name, Type::TEXT),
        (&item.key, Type::TEXT),
        (&item.value, Type::TEXT),
        (&micros(item.created_at), Type::INT8),
        (&micros(item.used_at), Type::INT8),
        (&count_to_i64(item.uses), Type::INT8),
        (&item.expires_at.map(micros), Type::INT8),
        (&session, Type::TEXT),
        (&max_others, Type::INT8),
    ];
    match (connection.rows(&sql, &params).await?.is_empty(), &namespace.owner) {
        (true, Owner::Session(session_id)) => Err(Error::NotFound { session_id: session_id.clone() }),
        _ => Ok(()),
    }
}

const SELECTED_COLUMNS: &str = "key, value, created_at, used_at, uses, expires_at";

/// Reads items by their keys. With `used_at`, records their use in the same statement, except of items that another
/// transaction is changing: waiting for them could deadlock with a call that names the same items.
pub(super) async fn get_many(
    connection: &PgConnection,
    namespace: &Namespace,
    keys: &[&str],
    used_at: Option<Timestamp>,
) -> Result<Vec<Item>> {
    let Some(item_params) = ItemParams::new(namespace, keys) else { return Ok(Vec::new()) };
    let condition = "tenant = $1 AND owner = $2 AND namespace = $3 AND key = ANY($4)";
    let mut params: Vec<Param<'_>> = item_params.params().into();
    params.push((&keys, Type::TEXT_ARRAY));
    let select = format!("SELECT {SELECTED_COLUMNS} FROM tenure_item WHERE {condition}");
    let rows = match &used_at.map(micros) {
        None => connection.rows(&select, &params).await?,
        Some(used_at) => {
            params.push((used_at, Type::INT8));
            let sql = format!(
                "WITH unlocked AS MATERIALIZED (
                    SELECT key FROM tenure_item WHERE {condition} FOR UPDATE SKIP LOCKED
                ), used AS (
                    UPDATE tenure_item i SET used_at = $5, uses = uses + 1 FROM unlocked
                    WHERE i.tenant = $1 AND i.owner = $2 AND i.namespace = $3 AND i.key = unlocked.key
                )
                {select}"
            );
            // A use mark is not worth an fsync.
            connection.rows_unsynced(&sql, &params).await?
        }
    };
    let mut items = rows.iter().map(|row| read_item(row, namespace)).collect::<Result<Vec<_>>>()?;
    if let Some(at) = used_at {
        // The statement reads the items as they were before its update.
        items.iter_mut().for_each(|item| item.record_use(at));
    }
    Ok(items)
}

pub(super) async fn items(
    connection: &PgConnection,
    namespace: &Namespace,
    after: Option<&str>,
    limit: usize,
) -> Result<Vec<Item>> {
    let Some(item_params) = ItemParams::new(namespace, &[]) else { return Ok(Vec::new()) };
    // No stored key contains a NUL character: what follows `a\0b` is what follows `a`.
    let after = after.and_then(|a| a.split('\0').next());
    let limit = row_limit(limit);
    let mut params: Vec<Param<'_>> = item_params.params().into();
    params.extend::<[Param<'_>; 2]>([(&after, Type::TEXT), (&limit, Type::INT8)]);
    let sql = format!(
        "SELECT {SELECTED_COLUMNS} FROM tenure_item
        WHERE tenant = $1 AND owner = $2 AND namespace = $3 AND ($4 IS NULL OR key > $4) ORDER BY key LIMIT $5"
    );
    connection.rows(&sql, &params).await?.iter().map(|row| read_item(row, namespace)).collect()
}

/// Lists the items of all namespaces in the order of their keys.
pub(super) async fn items_after(
    source: &impl RowSource,
    after: Option<(&Namespace, &str)>,
    limit: usize,
) -> Result<Vec<(Namespace, Item)>> {
    let tenant = after.map(|(namespace, _)| namespace.tenant.as_str());
    let owner = after.map(|(namespace, _)| namespace.owner.to_string());
    let name = after.map(|(namespace, _)| namespace.name.as_str());
    let key = after.map(|(_, key)| key);
    let sql = format!(
        "SELECT {SELECTED_COLUMNS}, tenant, owner, namespace FROM tenure_item
        WHERE $1 IS NULL OR (tenant, owner, namespace, key) > ($1, $2, $3, $4)
        ORDER BY tenant, owner, namespace, key LIMIT $5"
    );
    let params: [Param<'_>; 5] = [
        (&tenant, Type::TEXT),
        (&owner, Type::TEXT),
        (&name, Type::TEXT),
        (&key, Type::TEXT),
        (&row_limit(limit), Type::INT8),
    ];
    source.rows(&sql, &params).await?.iter().map(read_item_with_namespace).collect()
}

fn read_item_with_namespace(row: &Row) -> Result<(Namespace, Item)> {
    let table = || "postgres, table tenure_item".to_owned();
    let tenant = Tenant::new(column::<&str>(row, 6, table)?).map_err(|e| Error::corrupt_from(table(), e))?;
    let owner: &str = column(row, 7, table)?;
    let owner = Owner::parse(owner).ok_or_else(|| Error::corrupt(table(), format!("{owner:?} is not an owner")))?;
    let namespace = Namespace { tenant, owner, name: column(row, 8, table)? };
    let item = read_item(row, &namespace)?;
    Ok((namespace, item))
}

pub(super) async fn remove(connection: &PgConnection, namespace: &Namespace, key: &str) -> Result<bool> {
    let Some(item_params) = ItemParams::new(namespace, &[key]) else { return Ok(false) };
    let mut params: Vec<Param<'_>> = item_params.params().into();
    params.push((&key, Type::TEXT));
    let sql = "DELETE FROM tenure_item WHERE tenant = $1 AND owner = $2 AND namespace = $3 AND key = $4 RETURNING 1";
    Ok(!connection.rows(sql, &params).await?.is_empty())
}

/// Removes expired items, at most `limit`.
pub(super) async fn expire(connection: &PgConnection, now: Timestamp, limit: usize) -> Result<usize> {
    // One statement for each tenant, so that every statement that locks or changes rows concerns a
    // single tenant (Citus, D-040).
    let sql = "SELECT tenant, count(*) FROM (
            SELECT tenant FROM tenure_item WHERE expires_at <= $1 ORDER BY expires_at LIMIT $2
        ) expired GROUP BY tenant ORDER BY tenant";
    let now = micros(now);
    let expired_by_tenant = connection.rows(sql, &[(&now, Type::INT8), (&row_limit(limit), Type::INT8)]).await?;
    // SKIP LOCKED: nodes that sweep concurrently share the work instead of waiting for each other.
    let sql = "WITH expired_item AS MATERIALIZED (
            SELECT owner, namespace, key FROM tenure_item WHERE tenant = $1 AND expires_at <= $2
            ORDER BY expires_at LIMIT $3 FOR UPDATE SKIP LOCKED
        )
        DELETE FROM tenure_item i USING expired_item e
        WHERE i.tenant = $1 AND i.owner = e.owner AND i.namespace = e.namespace AND i.key = e.key
        RETURNING 1";
    let table = || "postgres, table tenure_item".to_owned();
    let mut expired = 0;
    for row in &expired_by_tenant {
        let tenant: &str = column(row, 0, table)?;
        let count: i64 = column(row, 1, table)?;
        let params: [Param<'_>; 3] = [(&tenant, Type::TEXT), (&now, Type::INT8), (&count, Type::INT8)];
        expired += connection.rows(sql, &params).await?.len();
    }
    Ok(expired)
}

/// Removes all items of an owner, and vacuums the tables (D-035).
pub(super) async fn delete_owner_items(connection: &PgConnection, tenant: &Tenant, owner: &Owner) -> Result<()> {
    let owner = owner.to_string();
    if !owner.contains('\0') {
        let sql = "DELETE FROM tenure_item WHERE tenant = $1 AND owner = $2";
        connection.rows(sql, &[(&tenant.as_str(), Type::TEXT), (&owner, Type::TEXT)]).await?;
    }
    let vacuum = connection.qualify_tables(
        "VACUUM tenure_item, tenure_record, tenure_head, tenure_head_label, tenure_blob, tenure_blob_ref",
    );
    let mut retries = connection.retry_budget();
    loop {
        let vacuum_once = async {
            let pooled = connection.acquire().await?;
            pooled.batch_execute(&vacuum).await?;
            pooled.release();
            Ok(())
        };
        match connection.with_timeout(MAINTENANCE_TIMEOUT, vacuum_once).await {
            Ok(()) => return Ok(()),
            Err(failure) => retries.wait(failure).await?,
        }
    }
}

/// A namespace as values to bind.
struct ItemParams<'a> {
    tenant: &'a str,
    owner: String,
    name: &'a str,
}

impl<'a> ItemParams<'a> {
    /// Returns `None` if nothing can be stored there, because a name or one of the keys contains a
    /// NUL character.
    fn new(namespace: &'a Namespace, keys: &[&str]) -> Option<Self> {
        let item_params =
            Self { tenant: namespace.tenant.as_str(), owner: namespace.owner.to_string(), name: &namespace.name };
        let has_nul = keys.iter().chain([&item_params.owner.as_str(), &item_params.name]).any(|s| s.contains('\0'));
        (!has_nul).then_some(item_params)
    }

    fn params(&self) -> [Param<'_>; 3] {
        [(&self.tenant, Type::TEXT), (&self.owner, Type::TEXT), (&self.name, Type::TEXT)]
    }
}

fn read_item(row: &Row, namespace: &Namespace) -> Result<Item> {
    let location = || describe_namespace(namespace);
    Ok(Item {
        key: column(row, 0, location)?,
        value: column(row, 1, location)?,
        created_at: timestamp_from_micros(column(row, 2, location)?, location)?,
        used_at: timestamp_from_micros(column(row, 3, location)?, location)?,
        uses: column::<i64>(row, 4, location)?.unsigned_abs(),
        expires_at: column::<Option<i64>>(row, 5, location)?
            .map(|micros| timestamp_from_micros(micros, location))
            .transpose()?,
    })
}

fn describe_namespace(namespace: &Namespace) -> String {
    format!("postgres, tenant {}, namespace {} of {}", namespace.tenant, namespace.name, namespace.owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_key_is_rejected() {
        assert_eq!(check_item_key("user/a", "cache", "a\0b").unwrap_err().code(), "invalid");
        assert_eq!(check_item_key("user/a", "cache", &"k".repeat(MAX_ITEM_KEY_BYTES)).unwrap_err().code(), "too_large");
        check_item_key("user/a", "cache", &"k".repeat(MAX_ITEM_KEY_BYTES - 11)).unwrap();
    }
}
