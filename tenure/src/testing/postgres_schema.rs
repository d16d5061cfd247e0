//! A PostgreSQL schema for one test.

use crate::types::id::SessionId;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

/// Longer than the lock timeout of the statement.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);

/// The URL of the server for tests, from the environment variable `TENURE_TEST_POSTGRES`. `None`
/// means that tests on PostgreSQL are skipped.
///
/// # Panics
///
/// If the variable is not set but `CI` is: continuous integration skips no tests.
#[expect(clippy::disallowed_methods, reason = "tests get their server from the environment")]
pub fn postgres_server() -> Option<String> {
    let server = std::env::var("TENURE_TEST_POSTGRES").ok().filter(|url| !url.is_empty());
    if server.is_none() {
        assert!(std::env::var_os("CI").is_none(), "TENURE_TEST_POSTGRES is not set: CI does not skip PostgreSQL tests");
        eprintln!("skipped: TENURE_TEST_POSTGRES is not set (scripts/with-postgres.sh and `make test` set it)");
    }
    server
}

/// A schema on the server for tests. Opening a store with its URL creates it. It is dropped with
/// its last clone, unless the test has failed: then it is kept for inspection.
#[derive(Clone, Debug)]
pub struct PostgresSchema(Arc<Schema>);

#[derive(Debug)]
struct Schema {
    server: String,
    name: String,
}

impl PostgresSchema {
    /// A new schema. `None` means that there is no server; see [`postgres_server`].
    pub fn new() -> Option<Self> {
        postgres_server().map(|server| Self::on(&server))
    }

    /// A new schema on the server with this URL.
    pub fn on(server: &str) -> Self {
        let name = format!("test_{}", SessionId::generate().as_str().replace('-', ""));
        Self(Arc::new(Schema { server: server.to_owned(), name }))
    }

    /// The URL of the server.
    pub fn server(&self) -> &str {
        &self.0.server
    }

    /// The name of the schema.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The URL of a store in this schema.
    pub fn url(&self) -> String {
        let separator = if self.server().contains('?') { '&' } else { '?' };
        format!("{}{separator}schema={}", self.server(), self.name())
    }

    /// Executes SQL statements, with this schema as the search path, on a connection of their own.
    pub async fn execute(&self, sql: &str) {
        execute(self.server(), &format!("SET search_path TO {}; {sql}", self.name())).await.unwrap();
    }
}

async fn execute(server: &str, sql: &str) -> Result<(), tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(server, tokio_postgres::NoTls).await?;
    let mut tasks = JoinSet::new();
    tasks.spawn(connection);
    client.batch_execute(sql).await
}

impl Drop for Schema {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return eprintln!("the schema {} was not dropped, for inspection", self.name);
        }
        // A connection that is still open may hold locks. The test has passed: do not wait for long.
        let sql = format!("SET lock_timeout = '5s'; DROP SCHEMA IF EXISTS {} CASCADE", self.name);
        let server = self.server.clone();
        // In a separate thread: a runtime cannot block inside another.
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async { tokio::time::timeout(DROP_TIMEOUT, execute(&server, &sql)).await })
        });
        if !matches!(dropping.join(), Ok(Ok(Ok(())))) {
            eprintln!("the schema {} could not be dropped", self.name);
        }
    }
}
