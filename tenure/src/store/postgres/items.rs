//! Key-value items: writing, reading, expiring and full-text search.

use crate::store::item::{Hit, Item, Namespace, Owner};
use crate::store::postgres::connection::{MAINTENANCE_TIMEOUT, Param, PgConnection};
use crate::store::postgres::row::{column, instant, micros, row_limit, whole};
use crate::types::error::{Error, Result};
use crate::types::id::Tenant;
use jiff::Timestamp;
use std::collections::BTreeSet;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

/// Maximum length of owner, namespace and key of an item together, in bytes: with the tenant, the
/// limit of an index entry.
const MAX_ITEM_KEY_BYTES: usize = 2048;
/// Number of characters of a word that are compared.
const MAX_WORD_CHARS: usize = 64;
/// Maximum total size of an item's distinct words that are indexed, in bytes.
const MAX_WORDS_BYTES: usize = 256 << 10;
/// Maximum number of words of a query that are searched for.
const MAX_QUERY_WORDS: usize = 64;
/// Maximum number of matches that are ranked.
const MAX_RANKED: i64 = 10_000;

pub(super) const ITEM_COLUMNS: &str =
    "tenant, owner, shelf, key, value, text, words, created_at, used_at, uses, expires_at";
pub(super) const ITEM_REPLACE: &str = "ON CONFLICT (tenant, owner, shelf, key) DO UPDATE SET value = excluded.value,
    text = excluded.text, words = excluded.words, created_at = excluded.created_at, used_at = excluded.used_at,
    uses = excluded.uses, expires_at = excluded.expires_at";

/// Validates that a text contains no NUL character, which PostgreSQL cannot store.
pub(super) fn no_nul(name: &str, value: &str) -> Result<()> {
    match value.contains('\0') {
        true => Err(Error::invalid(name, format!("{name} has a NUL character, which can not be stored; leave it out"))),
        false => Ok(()),
    }
}

/// Validates that the key of an item fits into an index entry.
pub(super) fn key_fits(owner: &str, shelf: &str, key: &str) -> Result<()> {
    no_nul("owner", owner)?;
    no_nul("shelf", shelf)?;
    no_nul("key", key)?;
    if owner.len() + shelf.len() + key.len() > MAX_ITEM_KEY_BYTES {
        let (limit, max) = ("MAX_ITEM_KEY_BYTES", MAX_ITEM_KEY_BYTES as u64);
        return Err(Error::TooLarge { what: "the item's key, with its shelf and owner,".to_owned(), limit, max });
    }
    Ok(())
}

/// Returns the distinct words of a text, in lower case. They are split here and not by the server,
/// whose rules for words and case depend on its configuration.
fn split(text: &str) -> BTreeSet<String> {
    let text = text.to_lowercase();
    let words = text.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty());
    words.map(|w| w.chars().take(MAX_WORD_CHARS).collect()).collect()
}

/// Returns the indexed words of an item, separated by spaces.
pub(super) fn words(text: &str) -> String {
    let mut all = String::new();
    for word in split(text) {
        if all.len() + word.len() >= MAX_WORDS_BYTES {
            break;
        }
        if !all.is_empty() {
            all.push(' ');
        }
        all.push_str(&word);
    }
    all
}

/// Inserts or replaces an item and evicts the least recently used ones beyond `keep`, in one
/// statement.
pub(super) async fn put(link: &PgConnection, shelf: &Namespace, item: &Item, keep: Option<usize>) -> Result<()> {
    let (tenant, owner) = (shelf.tenant.as_str(), shelf.owner.to_string());
    key_fits(&owner, &shelf.name, &item.key)?;
    item.check()?;
    let session = match &shelf.owner {
        Owner::Session(id) => Some(id.as_str()),
        _ => None,
    };
    // The new item is not counted, because the statement sees the namespace as it was before. Old
    // items that another transaction has locked are skipped and left to that transaction or the
    // next: waiting for them while holding the new row would deadlock.
    let others = keep.map(|n| row_limit(n.saturating_sub(1)));
    let sql = format!(
        "WITH owned AS (
            SELECT 1 FROM tenure_head WHERE tenant = $1 AND session = $12 FOR KEY SHARE
        ), new AS (
            INSERT INTO tenure_item ({ITEM_COLUMNS})
            SELECT $1, $2, $3, $4, $5, $6, array_to_tsvector(string_to_array($7, ' ')), $8, $9, $10, $11
            WHERE $12 IS NULL OR EXISTS (SELECT 1 FROM owned)
            {ITEM_REPLACE}
            RETURNING 1
        ), gone AS (
            DELETE FROM tenure_item i USING (
                SELECT key FROM tenure_item
                WHERE tenant = $1 AND owner = $2 AND shelf = $3 AND $13 IS NOT NULL AND EXISTS (SELECT 1 FROM new)
                    AND key IN (
                        SELECT key FROM tenure_item
                        WHERE tenant = $1 AND owner = $2 AND shelf = $3 AND key <> $4
                        ORDER BY used_at DESC, created_at DESC, key DESC OFFSET coalesce($13, 0)
                    )
                FOR UPDATE SKIP LOCKED
            ) old
            WHERE i.tenant = $1 AND i.owner = $2 AND i.shelf = $3 AND i.key = old.key
        )
        SELECT 1 FROM new"
    );
    let params: [Param<'_>; 13] = [
        (&tenant, Type::TEXT),
        (&owner, Type::TEXT),
        (&shelf.name, Type::TEXT),
        (&item.key, Type::TEXT),
        (&item.value, Type::TEXT),
        (&item.text, Type::TEXT),
        (&item.text.as_deref().map(words), Type::TEXT),
        (&micros(item.created_at), Type::INT8),
        (&micros(item.used_at), Type::INT8),
        (&whole(item.uses), Type::INT8),
        (&item.expires_at.map(micros), Type::INT8),
        (&session, Type::TEXT),
        (&others, Type::INT8),
    ];
    match (link.rows(&sql, &params).await?.is_empty(), &shelf.owner) {
        (true, Owner::Session(session_id)) => Err(Error::NotFound { session_id: session_id.clone() }),
        _ => Ok(()),
    }
}

const ITEM: &str = "key, value, text, created_at, used_at, uses, expires_at";

pub(super) async fn get(
    link: &PgConnection,
    shelf: &Namespace,
    key: &str,
    used: Option<Timestamp>,
) -> Result<Option<Item>> {
    let Some(at) = ItemParams::new(shelf, &[key]) else { return Ok(None) };
    let here = "tenant = $1 AND owner = $2 AND shelf = $3 AND key = $4";
    let mut params: Vec<Param<'_>> = at.params().into();
    params.push((&key, Type::TEXT));
    let used = used.map(micros);
    let sql = match &used {
        None => format!("SELECT {ITEM} FROM tenure_item WHERE {here}"),
        Some(used) => {
            params.push((used, Type::INT8));
            format!("UPDATE tenure_item SET used_at = $5, uses = uses + 1 WHERE {here} RETURNING {ITEM}")
        }
    };
    let rows = match used {
        None => link.rows(&sql, &params).await?,
        // A use mark is not worth an fsync.
        Some(_) => link.rows_unsynced(&sql, &params).await?,
    };
    rows.first().map(|row| item(row, shelf)).transpose()
}

pub(super) async fn items(
    link: &PgConnection,
    shelf: &Namespace,
    after: Option<&str>,
    limit: usize,
) -> Result<Vec<Item>> {
    let Some(at) = ItemParams::new(shelf, &[]) else { return Ok(Vec::new()) };
    // No stored key contains a NUL character: what follows `a\0b` is what follows `a`.
    let (after, limit) = (after.and_then(|a| a.split('\0').next()), row_limit(limit));
    let mut params: Vec<Param<'_>> = at.params().into();
    params.extend::<[Param<'_>; 2]>([(&after, Type::TEXT), (&limit, Type::INT8)]);
    let sql = format!(
        "SELECT {ITEM} FROM tenure_item
        WHERE tenant = $1 AND owner = $2 AND shelf = $3 AND ($4 IS NULL OR key > $4) ORDER BY key LIMIT $5"
    );
    link.rows(&sql, &params).await?.iter().map(|row| item(row, shelf)).collect()
}

pub(super) async fn remove(link: &PgConnection, shelf: &Namespace, key: &str) -> Result<bool> {
    let Some(at) = ItemParams::new(shelf, &[key]) else { return Ok(false) };
    let mut params: Vec<Param<'_>> = at.params().into();
    params.push((&key, Type::TEXT));
    let sql = "DELETE FROM tenure_item WHERE tenant = $1 AND owner = $2 AND shelf = $3 AND key = $4 RETURNING 1";
    Ok(!link.rows(sql, &params).await?.is_empty())
}

/// Ranks the items that contain any word of the text, with `ts_rank`.
pub(super) async fn search(link: &PgConnection, shelf: &Namespace, text: &str, limit: usize) -> Result<Vec<Hit>> {
    // Words consist of letters and digits, so they contain no query syntax.
    let query: Vec<String> = split(text).into_iter().take(MAX_QUERY_WORDS).map(|w| format!("'{w}'")).collect();
    let Some(at) = ItemParams::new(shelf, &[]).filter(|_| !query.is_empty()) else { return Ok(Vec::new()) };
    let (query, limit) = (query.join(" | "), row_limit(limit));
    let mut params: Vec<Param<'_>> = at.params().into();
    params.extend::<[Param<'_>; 3]>([(&query, Type::TEXT), (&MAX_RANKED, Type::INT8), (&limit, Type::INT8)]);
    let sql = format!(
        "SELECT {ITEM}, ts_rank(words, $4::tsquery)::float8 AS score FROM (
            SELECT * FROM tenure_item
            WHERE tenant = $1 AND owner = $2 AND shelf = $3 AND words @@ $4::tsquery LIMIT $5
        ) found ORDER BY score DESC, length(words), key LIMIT $6"
    );
    let rows = link.rows_planned(&sql, &params).await?;
    let hit = |row: &Row| Ok(Hit { item: item(row, shelf)?, score: column(row, 7, || place(shelf))? });
    rows.iter().map(hit).collect()
}

/// Removes expired items, at most `limit`.
pub(super) async fn expire(link: &PgConnection, now: Timestamp, limit: usize) -> Result<usize> {
    // One statement for each tenant, so that every statement that locks or changes rows concerns a
    // single tenant (Citus, D-040).
    let sql = "SELECT tenant, count(*) FROM (
            SELECT tenant FROM tenure_item WHERE expires_at <= $1 ORDER BY expires_at LIMIT $2
        ) due GROUP BY tenant ORDER BY tenant";
    let now = micros(now);
    let due = link.rows(sql, &[(&now, Type::INT8), (&row_limit(limit), Type::INT8)]).await?;
    // SKIP LOCKED: nodes that sweep concurrently share the work instead of waiting for each other.
    let sql = "WITH over AS MATERIALIZED (
            SELECT owner, shelf, key FROM tenure_item WHERE tenant = $1 AND expires_at <= $2
            ORDER BY expires_at LIMIT $3 FOR UPDATE SKIP LOCKED
        )
        DELETE FROM tenure_item i USING over
        WHERE i.tenant = $1 AND i.owner = over.owner AND i.shelf = over.shelf AND i.key = over.key
        RETURNING 1";
    let table = || "postgres, table tenure_item".to_owned();
    let mut expired = 0;
    for row in &due {
        let (tenant, count): (&str, i64) = (column(row, 0, table)?, column(row, 1, table)?);
        let params: [Param<'_>; 3] = [(&tenant, Type::TEXT), (&now, Type::INT8), (&count, Type::INT8)];
        expired += link.rows(sql, &params).await?.len();
    }
    Ok(expired)
}

/// Removes all items of an owner, and vacuums the tables (D-035).
pub(super) async fn clear(link: &PgConnection, tenant: &Tenant, owner: &Owner) -> Result<()> {
    let owner = owner.to_string();
    if !owner.contains('\0') {
        let sql = "DELETE FROM tenure_item WHERE tenant = $1 AND owner = $2";
        link.rows(sql, &[(&tenant.as_str(), Type::TEXT), (&owner, Type::TEXT)]).await?;
    }
    let vacuum = link.sql("VACUUM tenure_item, tenure_record, tenure_head, tenure_label, tenure_blob, tenure_blob_use");
    let mut tries = link.tries();
    loop {
        let step = async {
            let lease = link.lease().await?;
            lease.batch_execute(&vacuum).await?;
            lease.keep();
            Ok(())
        };
        match link.within(MAINTENANCE_TIMEOUT, step).await {
            Ok(()) => return Ok(()),
            Err(fail) => tries.wait(fail).await?,
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
    fn new(shelf: &'a Namespace, keys: &[&str]) -> Option<Self> {
        let at = Self { tenant: shelf.tenant.as_str(), owner: shelf.owner.to_string(), name: &shelf.name };
        let nul = keys.iter().chain([&at.owner.as_str(), &at.name]).any(|s| s.contains('\0'));
        (!nul).then_some(at)
    }

    fn params(&self) -> [Param<'_>; 3] {
        [(&self.tenant, Type::TEXT), (&self.owner, Type::TEXT), (&self.name, Type::TEXT)]
    }
}

fn item(row: &Row, shelf: &Namespace) -> Result<Item> {
    let place = || place(shelf);
    Ok(Item {
        key: column(row, 0, place)?,
        value: column(row, 1, place)?,
        text: column(row, 2, place)?,
        created_at: instant(column(row, 3, place)?, place)?,
        used_at: instant(column(row, 4, place)?, place)?,
        uses: column::<i64>(row, 5, place)?.unsigned_abs(),
        expires_at: column::<Option<i64>>(row, 6, place)?.map(|at| instant(at, place)).transpose()?,
    })
}

fn place(shelf: &Namespace) -> String {
    format!("postgres, tenant {}, shelf {} of {}", shelf.tenant, shelf.name, shelf.owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_split_and_folded() {
        assert_eq!(words("The ÉTÉ, the 2nd-best: été/x_1"), "1 2nd best the x été");
        assert_eq!(words(" '' | & \\ \0"), "");
        assert_eq!(words(&"x".repeat(1000)).len(), MAX_WORD_CHARS);
        let many: String = (0..100_000).map(|n| format!("w{n} ")).collect();
        assert!(words(&many).len() <= MAX_WORDS_BYTES);
    }

    #[test]
    fn what_can_not_be_stored_is_refused() {
        assert_eq!(key_fits("user/a", "cache", "a\0b").unwrap_err().code(), "invalid");
        assert_eq!(key_fits("user/a", "cache", &"k".repeat(MAX_ITEM_KEY_BYTES)).unwrap_err().code(), "too_large");
        key_fits("user/a", "cache", &"k".repeat(MAX_ITEM_KEY_BYTES - 11)).unwrap();
    }
}
