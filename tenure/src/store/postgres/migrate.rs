//! Schema migrations.
//!
//! While one node migrates, nodes of the previous version continue to work. A migration therefore
//! only adds: tables, optional columns, and indexes. What is no longer needed is removed one
//! version later. A migration waits only briefly for a table lock, because every later statement
//! would queue behind it.

use crate::store::contract::FORMAT;
use crate::store::postgres::connection::{MAINTENANCE_TIMEOUT, PgConnection};
use crate::store::postgres::failure::FailureKind;
use crate::types::error::{Error, Result};
use std::time::Duration;
use tokio::time::timeout;
use tokio_postgres::types::Type;

/// The migrations, one file for each version, starting with version 1 (D-118).
pub(super) const MIGRATIONS: [&str; FORMAT as usize] = [include_str!("../../../migrations/postgres/0001_init.sql")];

/// The key of the advisory lock that serializes migrations: any number that nothing else in the
/// database uses.
const LOCK_KEY: i64 = 0x74_65_6e_75_72_65;

/// Time without a response from the server after which a warning names it.
const WARN_AFTER: Duration = Duration::from_secs(1);

/// Limits the wait for a table lock; afterwards other statements proceed, and the migration is
/// retried.
const LOCK_TIMEOUT: &str = "SET LOCAL lock_timeout = '1s'";

/// Migrates the schema to the last of these versions. Safe to run concurrently on any number of
/// nodes.
pub(super) async fn migrate(connection: &PgConnection, location: &str, migrations: &[&str]) -> Result<()> {
    let mut retries = connection.retry_budget();
    let mut has_warned = false;
    loop {
        let attempt = connection.with_timeout(MAINTENANCE_TIMEOUT, apply_next(connection, location, migrations));
        tokio::pin!(attempt);
        let outcome = match timeout(WARN_AFTER, &mut attempt).await {
            Ok(outcome) => outcome,
            Err(_) => {
                if !std::mem::replace(&mut has_warned, true) {
                    tracing::warn!(location = location, "the database has not responded yet; still waiting");
                }
                attempt.await
            }
        };
        match outcome {
            Ok(MigrationStep::Done) => return Ok(()),
            Ok(MigrationStep::More) => {}
            // No such database, a wrong password, no TLS: a retry would not succeed.
            Err(FailureKind::Final(Error::Unavailable { reason, .. })) => {
                return Err(Error::invalid("store", format!("{location} cannot be used: {reason}")));
            }
            Err(failure) => {
                if !matches!(failure, FailureKind::Final(_)) && !std::mem::replace(&mut has_warned, true) {
                    tracing::warn!(location = location, error = %failure, "the database is unavailable; retrying");
                }
                retries.wait(failure).await?;
            }
        }
    }
}

/// Returns the format of the schema. `None` means that there is no store yet.
pub(super) async fn existing_format(connection: &PgConnection, location: &str) -> Result<Option<u32>> {
    let mut retries = connection.retry_budget();
    loop {
        match connection.with_timeout(MAINTENANCE_TIMEOUT, read_format(connection, location)).await {
            Ok(format) => return Ok(format),
            Err(failure) => retries.wait(failure).await?,
        }
    }
}

/// Runs one attempt of [`existing_format`].
async fn read_format(connection: &PgConnection, location: &str) -> Result<Option<u32>, FailureKind> {
    let mut pooled = connection.acquire().await?;
    let tx = pooled.transaction().await?;
    let table = connection.schema().map_or_else(|| "tenure_format".to_owned(), |s| format!("\"{s}\".tenure_format"));
    let has_table = tx.query_typed_one("SELECT to_regclass($1) IS NOT NULL", &[(&table, Type::TEXT)]).await?;
    let version: i32 = if has_table.try_get::<_, bool>(0)? {
        tx.query_typed_one(&format!("SELECT coalesce(max(version), 0) FROM {table}"), &[]).await?.try_get(0)?
    } else {
        0
    };
    tx.commit().await?;
    pooled.release();
    let format =
        u32::try_from(version).map_err(|_| Error::corrupt(location, "tenure_format has a negative version"))?;
    Ok((format > 0).then_some(format))
}

/// The result of one migration transaction: whether more migrations may follow.
enum MigrationStep {
    Done,
    More,
}

/// Applies one migration, in one transaction.
async fn apply_next(
    connection: &PgConnection,
    location: &str,
    migrations: &[&str],
) -> Result<MigrationStep, FailureKind> {
    let mut pooled = connection.acquire().await?;
    let tx = pooled.transaction().await?;
    tx.query_typed("SELECT pg_advisory_xact_lock($1)", &[(&LOCK_KEY, Type::INT8)]).await?;
    if let Some(schema) = connection.schema() {
        let has_schema = tx.query_typed_one("SELECT to_regnamespace($1) IS NOT NULL", &[(&schema, Type::TEXT)]).await?;
        if !has_schema.try_get::<_, bool>(0)? {
            tx.batch_execute(&format!("CREATE SCHEMA \"{schema}\"")).await?;
        }
        tx.batch_execute(&format!("SET LOCAL search_path TO \"{schema}\"")).await?;
    }
    // Look the table up first: a role without the right to create tables can still open an existing
    // store.
    let has_table = tx.query_typed_one("SELECT to_regclass('tenure_format') IS NOT NULL", &[]).await?;
    let version: i32 = if has_table.try_get::<_, bool>(0)? {
        tx.query_typed_one("SELECT coalesce(max(version), 0) FROM tenure_format", &[]).await?.try_get(0)?
    } else {
        // One row for each version, written under the lock: it needs no index.
        let sql = "CREATE TABLE tenure_format (version int NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())";
        tx.batch_execute(sql).await?;
        0
    };
    let found = u32::try_from(version).map_err(|_| Error::corrupt(location, "tenure_format has a negative version"))?;
    let known = migrations.len() as u32;
    if found > known {
        return Err(Error::NewerFormat { location: location.to_owned(), version: found, supported: known }.into());
    }
    let outcome = match migrations.get(found as usize) {
        None => MigrationStep::Done,
        Some(migration) => {
            tx.batch_execute(LOCK_TIMEOUT).await?;
            tx.batch_execute(migration).await.map_err(explain_name_conflict)?;
            tx.execute_typed("INSERT INTO tenure_format (version) VALUES ($1)", &[(&(version + 1), Type::INT4)])
                .await?;
            MigrationStep::More
        }
    };
    tx.commit().await?;
    pooled.release();
    Ok(outcome)
}

/// Explains what to do when the table names are in use by another program.
fn explain_name_conflict(e: tokio_postgres::Error) -> FailureKind {
    match e.as_db_error() {
        Some(db) if db.code().code() == "42P07" => {
            let hint = "table names are in use by another program: add schema=NAME to the store's URL, or use another database";
            Error::invalid("store", format!("{}; {hint}", db.message())).into()
        }
        _ => e.into(),
    }
}
