//! Opens a store by its URL, and redacts URLs for logs.
//!
//! Invariant: a URL reaches messages and logs only in its redacted form ([`redacted`]).

use crate::store::contract::{OpenRepair, Store};
use crate::store::jsonl::JsonlStore;
use crate::store::memory::MemoryStore;
#[cfg(feature = "postgres")]
use crate::store::postgres::PostgresStore;
#[cfg(feature = "sqlite")]
use crate::store::sqlite::SqliteStore;
use crate::types::error::{Error, Result};
use std::sync::Arc;

/// Opens a store by its URL: `memory:`, `jsonl:DIR`, `sqlite:FILE` or `postgres://…`. Runs pending
/// migrations, and returns the repairs that were made on opening.
pub async fn open(url: &str) -> Result<(Arc<dyn Store>, Vec<OpenRepair>)> {
    let no_repairs = Vec::new();
    match url.split_once(':') {
        Some(("memory", _)) => Ok((Arc::new(MemoryStore::new()), no_repairs)),
        Some(("jsonl", dir)) if !dir.is_empty() => {
            let (store, repairs) = JsonlStore::open(dir).await?;
            Ok((Arc::new(store), repairs))
        }
        #[cfg(feature = "sqlite")]
        Some(("sqlite", file)) if !file.is_empty() => Ok((Arc::new(SqliteStore::open(file).await?), no_repairs)),
        #[cfg(feature = "postgres")]
        Some(("postgres" | "postgresql", _)) => Ok((Arc::new(PostgresStore::open(url).await?), no_repairs)),
        #[cfg(not(all(feature = "sqlite", feature = "postgres")))]
        Some((scheme @ ("sqlite" | "postgres"), rest)) if !rest.is_empty() => Err(Error::invalid(
            "store",
            format!("this build does not include the {scheme} store; rebuild with the feature `{scheme}`"),
        )),
        _ => {
            let known = "memory: | jsonl:DIR | sqlite:FILE | postgres://USER@HOST/DATABASE";
            Err(Error::invalid("store", format!("{:?} is not a store URL; use {known}", redacted(url))))
        }
    }
}

/// Returns the storage format of the data at a URL, without changing them. `None` means that there
/// are no data yet.
pub async fn format(url: &str) -> Result<Option<u32>> {
    match url.split_once(':') {
        Some(("jsonl", dir)) if !dir.is_empty() => JsonlStore::format(dir),
        #[cfg(feature = "sqlite")]
        Some(("sqlite", file)) if !file.is_empty() => SqliteStore::format(file).await,
        #[cfg(feature = "postgres")]
        Some(("postgres" | "postgresql", _)) => PostgresStore::format(url).await,
        // The memory store persists nothing; for an invalid URL, `open` returns the better error.
        _ => Ok(None),
    }
}

/// Query parameters whose values are never secret.
const PUBLIC_PARAMETERS: [&str; 13] = [
    "application_name",
    "channel_binding",
    "connect_timeout",
    "dbname",
    "host",
    "load_balance_hosts",
    "pool",
    "port",
    "prepare",
    "retry",
    "schema",
    "sslmode",
    "target_session_attrs",
];

/// Redacts a URL for messages and logs: replaces the password, and the value of every query
/// parameter that may be a secret.
pub fn redacted(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let (address, query) = rest.split_once(['?', '#']).unwrap_or((rest, ""));
    let (user, address) = match address.rsplit_once('@') {
        Some((user_info, address)) => (format!("{}:***@", user_info.split(':').next().unwrap_or_default()), address),
        // A password that contains `?` may have been split here, so nothing but the scheme is
        // shown.
        None if query.contains('@') => return format!("{scheme}://***"),
        None => (String::new(), address),
    };
    let redact_pair = |pair: &str| match pair.split_once('=') {
        Some((name, value)) if PUBLIC_PARAMETERS.contains(&name) => format!("{name}={value}"),
        Some((name, _)) => format!("{name}=***"),
        None => "***".to_owned(),
    };
    if query.is_empty() {
        format!("{scheme}://{user}{address}")
    } else {
        let pairs: Vec<_> = query.split('&').map(redact_pair).collect();
        format!("{scheme}://{user}{address}?{}", pairs.join("&"))
    }
}

#[cfg(test)]
mod tests {
    use crate::store::open::redacted;

    #[test]
    fn a_url_is_shown_without_its_secrets() {
        for (url, expected) in [
            ("memory:", "memory:"),
            ("sqlite:a.db", "sqlite:a.db"),
            ("postgres://me:secret@db/x", "postgres://me:***@db/x"),
            ("postgres://me:se/cr@et@db/x", "postgres://me:***@db/x"),
            ("postgres://me:sec?ret@db/x", "postgres://***"),
            ("postgres://db/x?user=me&password=secret&pool=4", "postgres://db/x?user=***&password=***&pool=4"),
            ("https://hook.example/a?token=secret#secret", "https://hook.example/a?token=***"),
            ("https://hook.example/a?secret", "https://hook.example/a?***"),
            ("https://hook.example/a?x=1@secret", "https://***"),
        ] {
            assert_eq!(redacted(url), expected, "{url}");
        }
    }
}
