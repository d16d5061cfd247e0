//! Key-value items: writing, reading, expiring and full-text search.
//!
//! Invariant: the rank of an item depends only on its own namespace.

use crate::store::item::{Hit, Item, Namespace, Owner};
use crate::store::sqlite::database::Database;
use crate::store::sqlite::fault::StoreResult;
use crate::types::error::Error;
use crate::types::excerpt::excerpt;
use crate::types::id::Tenant;
use jiff::Timestamp;
use rusqlite::{Connection, Row, params};
use std::collections::{BTreeSet, HashMap};

/// Limits of a search: the number of distinct words, and the number of candidate items for each
/// word.
const MAX_WORDS: usize = 64;
const MAX_CANDIDATES: i64 = 10_000;

/// BM25 parameters: the saturation of term frequency, and the weight of text length.
const K1: f64 = 1.2;
const B: f64 = 0.75;

const COLUMNS: &str = "key, value, text, created_at, used_at, uses, expires_at";

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
    let namespace_token = item.text.is_some().then(|| namespace_token(tenant, owner, namespace));
    let mut upsert = conn.prepare_cached(
        "INSERT INTO item (tenant, owner, namespace, key, value, text, namespace_token, created_at, used_at, uses,
            expires_at)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)
        ON CONFLICT (tenant, owner, namespace, key) DO UPDATE SET value = excluded.value, text = excluded.text,
            namespace_token = excluded.namespace_token, created_at = excluded.created_at, used_at = excluded.used_at,
            uses = excluded.uses, expires_at = excluded.expires_at
        RETURNING id",
    )?;
    let created_at = item.created_at.as_microsecond();
    let used_at = item.used_at.as_microsecond();
    let uses = item.uses as i64;
    let expires_at = item.expires_at.map(|t| t.as_microsecond());
    let tenant = tenant.as_str();
    let Item { key, value, text, .. } = item;
    let row =
        params![tenant, owner, namespace, key, value, text, namespace_token, created_at, used_at, uses, expires_at];
    Ok(upsert.query_row(row, |r| r.get(0))?)
}

/// The digest of a namespace as a single FTS5 token of letters and digits.
fn namespace_token(tenant: &Tenant, owner: &str, namespace: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in [tenant.as_str(), owner, namespace] {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

pub(super) fn get(conn: &Connection, file: &Database, namespace: &Namespace, key: &str) -> StoreResult<Option<Item>> {
    let mut statement = conn.prepare_cached(&format!(
        "SELECT {COLUMNS} FROM item WHERE tenant = ?1 AND owner = ?2 AND namespace = ?3 AND key = ?4"
    ))?;
    let mut rows =
        statement.query(params![namespace.tenant.as_str(), namespace.owner.to_string(), namespace.name, key])?;
    rows.next()?.map(|row| read_item(row, file)).transpose()
}

/// Counts the items of all namespaces with a name, by the index of keys.
pub(super) fn count(conn: &Connection, name: &str) -> StoreResult<u64> {
    let sql = "SELECT count(*) FROM item INDEXED BY item_key WHERE namespace = ?1";
    let count: i64 = conn.prepare_cached(sql)?.query_row([name], |r| r.get(0))?;
    Ok(count.unsigned_abs())
}

/// Records a use of an item: sets its time of last use and increments its use count.
pub(super) fn record_use(conn: &Connection, namespace: &Namespace, key: &str, used_at: Timestamp) -> StoreResult<()> {
    conn.prepare_cached(
        "UPDATE item SET used_at = ?5, uses = uses + 1 WHERE tenant = ?1 AND owner = ?2 AND namespace = ?3 AND key = ?4",
    )?
    .execute(params![
        namespace.tenant.as_str(),
        namespace.owner.to_string(),
        namespace.name,
        key,
        used_at.as_microsecond()
    ])?;
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
        let tenant: String = row.get(7)?;
        let tenant = Tenant::new(&tenant).map_err(|e| Error::corrupt_from(location(), e))?;
        let owner: String = row.get(8)?;
        let owner =
            Owner::parse(&owner).ok_or_else(|| Error::corrupt(location(), format!("{owner:?} is not an owner")))?;
        items.push((Namespace { tenant, owner, name: row.get(9)? }, item));
    }
    Ok(items)
}

fn read_item(row: &Row<'_>, file: &Database) -> StoreResult<Item> {
    let key: String = row.get(0)?;
    let parse_time = |micros: i64| {
        let location = || format!("{file}, item {key}", key = excerpt(&key));
        Timestamp::from_microsecond(micros).map_err(|_| Error::corrupt(location(), "a time is out of range"))
    };
    let created_at = parse_time(row.get(3)?)?;
    let used_at = parse_time(row.get(4)?)?;
    let expires_at = row.get::<_, Option<i64>>(6)?.map(parse_time).transpose()?;
    let value = row.get(1)?;
    let text = row.get(2)?;
    let uses = row.get::<_, i64>(5)? as u64;
    Ok(Item { key, value, text, created_at, used_at, uses, expires_at })
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

/// Ids of items that contain a word, with the lengths of their texts.
type Matches = Vec<(i64, f64)>;

/// Ranks with BM25 over the namespace alone: the built-in ranking of FTS5 counts words over all
/// namespaces, so that one tenant's texts would change the results of another. The frequency of a
/// word within an item does not count.
pub(super) fn search(
    conn: &Connection,
    file: &Database,
    namespace: &Namespace,
    text: &str,
    limit: usize,
) -> StoreResult<Vec<Hit>> {
    let words: BTreeSet<_> = text.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase).collect();
    let words = words.iter().filter(|w| !w.is_empty()).take(MAX_WORDS);
    let matches = words.map(|word| find_matches(conn, namespace, word)).collect::<StoreResult<Vec<_>>>()?;
    // The count is capped at the number of candidates: an exact count of a large namespace would
    // take longer than the rest of the search.
    let count =
        "SELECT count(*) FROM (SELECT 1 FROM item WHERE tenant = ?1 AND owner = ?2 AND namespace = ?3 LIMIT ?4)";
    let namespace_params =
        params![namespace.tenant.as_str(), namespace.owner.to_string(), namespace.name, MAX_CANDIDATES];
    let count = conn.prepare_cached(count)?.query_row(namespace_params, |r| r.get(0))?;
    let mut statement = conn.prepare_cached(&format!("SELECT {COLUMNS} FROM item WHERE id = ?1"))?;
    let mut hits = Vec::new();
    for (id, score) in rank(&matches, count).into_iter().take(limit) {
        let mut rows = statement.query([id])?;
        // A concurrent writer may have removed the item.
        if let Some(row) = rows.next()? {
            hits.push(Hit { item: read_item(row, file)?, score });
        }
    }
    Ok(hits)
}

/// Finds the items of a namespace that contain a word.
fn find_matches(conn: &Connection, namespace: &Namespace, word: &str) -> StoreResult<Matches> {
    let tenant = &namespace.tenant;
    let owner = namespace.owner.to_string();
    // A quoted word has no query syntax, and words contain no quotes.
    let query =
        format!("namespace_token : \"{}\" AND text : \"{word}\"", namespace_token(tenant, &owner, &namespace.name));
    let mut statement = conn.prepare_cached(
        "SELECT item.id, length(item.text) FROM item_text CROSS JOIN item ON item.id = item_text.rowid
        WHERE item_text MATCH ?1 AND item.tenant = ?2 AND item.owner = ?3 AND item.namespace = ?4 LIMIT ?5",
    )?;
    let row = params![query, tenant.as_str(), owner, namespace.name, MAX_CANDIDATES];
    let rows = statement.query_map(row, |r| Ok((r.get(0)?, r.get(1)?)))?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// Ranks items by score, best first. `count` is the number of items in the namespace.
fn rank(matches: &[Matches], count: f64) -> Vec<(i64, f64)> {
    let lengths: HashMap<_, _> = matches.iter().flatten().copied().collect();
    let mean_length = (lengths.values().sum::<f64>() / lengths.len() as f64).max(1.0);
    let mut scores = HashMap::<i64, f64>::new();
    for matching_items in matches {
        let n = matching_items.len() as f64;
        // A concurrent writer may have removed items since the match, so the difference may be
        // negative.
        let rarity = (1.0 + ((count - n).max(0.0) + 0.5) / (n + 0.5)).ln();
        for (id, length) in matching_items {
            *scores.entry(*id).or_default() += rarity * (K1 + 1.0) / (1.0 + K1 * (1.0 - B + B * length / mean_length));
        }
    }
    let mut ranked: Vec<_> = scores.into_iter().collect();
    ranked.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
    ranked
}
