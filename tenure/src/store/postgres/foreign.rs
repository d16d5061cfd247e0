//! A read-only transaction on the database of another program, for imports.

use super::connection::{Param, PgConnection, RowSource};
use super::snapshot::PgSnapshot;
use super::url::Settings;
use crate::types::error::{Error, Result};
use std::sync::Arc;
use std::time::Duration;
use tokio_postgres::Row;
use tokio_postgres::config::TargetSessionAttrs;
use tokio_postgres::types::Type;

/// A connection in a transaction with the isolation level `REPEATABLE READ`, which can only read. Dropping it closes the
/// connection.
pub(crate) struct ForeignDatabase {
    snapshot: PgSnapshot,
    location: String,
}

impl ForeignDatabase {
    /// Connects to any host of the URL, standbys included. It may have the options of a store's URL; `schema` becomes
    /// the search path.
    pub async fn open(url: &str) -> Result<Self> {
        let mut settings = Settings::parse(url).map_err(|e| match e {
            Error::Invalid { message, .. } => Error::invalid("", message.replace("store URL", "URL")),
            other => other,
        })?;
        settings.driver.target_session_attrs(TargetSessionAttrs::Any);
        settings.pool = 1;
        settings.retry = Duration::ZERO;
        let location = settings.describe();
        let schema = settings.schema.take();
        let snapshot = PgSnapshot::begin(Arc::new(PgConnection::new(settings)?)).await?;
        let database = Self { snapshot, location };
        if let Some(schema) = schema {
            database.rows(&format!("SET LOCAL search_path TO \"{schema}\""), &[]).await?;
        }
        Ok(database)
    }

    /// Executes a statement with texts as parameters, and returns its rows.
    pub async fn rows(&self, sql: &str, texts: &[&str]) -> Result<Vec<Row>> {
        let params: Vec<Param<'_>> = texts.iter().map(|text| (text as _, Type::TEXT)).collect();
        self.snapshot.rows(sql, &params).await
    }

    /// Describes the database for people, without secrets.
    pub fn location(&self) -> &str {
        &self.location
    }
}
