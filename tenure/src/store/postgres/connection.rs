//! The connection pool, the execution of statements, and retries with exponential backoff.
//!
//! Invariant: a connection returns to the pool only after its last operation has completed.

use super::hosts::Hosts;
use super::url::{Prepare, Settings};
use crate::store::postgres::failure::FailureKind;
use crate::types::error::{Error, Result};
use deadpool::managed::{Manager, Metrics, Object, Pool, PoolError, RecycleError, RecycleResult};
use deadpool_postgres::{ClientWrapper, Runtime};
use std::borrow::Cow;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

/// Timeout of a statement.
pub(super) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of a migration, a purge or a vacuum.
pub(super) const MAINTENANCE_TIMEOUT: Duration = Duration::from_secs(600);
/// First delay between retries; each further one is twice as long, up to `MAX_DELAY`.
const FIRST_DELAY: Duration = Duration::from_millis(20);
const MAX_DELAY: Duration = Duration::from_secs(1);

/// A value to bind, with its type.
pub(super) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// A retry budget with exponential backoff.
pub(super) struct RetryBudget {
    /// Maximum time for retries while the server is unavailable, or rolls the operation back
    /// because of concurrent ones.
    limit: Duration,
    deadline: Option<Instant>,
    delay: Duration,
}

impl RetryBudget {
    fn new(limit: Duration) -> Self {
        Self { limit, deadline: None, delay: FIRST_DELAY }
    }

    /// Waits before the next attempt, or returns the error if it is final or the budget is
    /// exhausted.
    pub async fn wait(&mut self, failure: FailureKind) -> Result<()> {
        let cause = match failure {
            FailureKind::Final(e) => return Err(e),
            FailureKind::Lost(cause) | FailureKind::ReadOnly(cause) | FailureKind::RolledBack(cause) => cause,
        };
        let now = Instant::now();
        let deadline = *self.deadline.get_or_insert(now + self.limit);
        if now + self.delay > deadline {
            return Err(cause.into());
        }
        sleep(self.delay).await;
        self.delay = (self.delay * 2).min(MAX_DELAY);
        Ok(())
    }
}

/// A pool of connections to the primary.
pub(super) struct PgConnection {
    pool: Pool<Connector>,
    hosts: Arc<Hosts>,
    prepare: Prepare,
    schema: Option<String>,
    retry: Duration,
}

/// The connection factory of the pool.
pub(super) struct Connector(Arc<Hosts>);

/// A connection of the pool.
pub(super) struct PoolObject {
    client: ClientWrapper,
    generation: u64,
}

impl Manager for Connector {
    type Type = PoolObject;
    type Error = FailureKind;

    #[expect(clippy::disallowed_methods, reason = "it ends with the connection, which the pool closes")]
    async fn create(&self) -> Result<PoolObject, FailureKind> {
        let (client, connection) = self.0.connect().await?;
        let generation = self.0.generation();
        let task = tokio::spawn(async move {
            if let Err(e) = connection.await {
                tracing::debug!(error = %e, "a connection to PostgreSQL has ended");
            }
        });
        Ok(PoolObject { client: ClientWrapper::new(client, task), generation })
    }

    async fn recycle(&self, pooled: &mut PoolObject, _: &Metrics) -> RecycleResult<FailureKind> {
        if pooled.client.is_closed() || pooled.generation != self.0.generation() {
            Err(RecycleError::message("closed, or another host is the primary now"))
        } else {
            Ok(())
        }
    }
}

impl PgConnection {
    pub fn new(settings: Settings) -> Result<Self> {
        let hosts = Arc::new(Hosts::new(&settings)?);
        let Settings { pool, schema, prepare, retry, .. } = settings;
        // Connecting has its own timeouts.
        let pool = Pool::builder(Connector(hosts.clone()))
            .max_size(pool)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(STATEMENT_TIMEOUT))
            .build()
            .map_err(Error::unavailable_from)?;
        Ok(Self { pool, hosts, prepare, schema, retry })
    }

    pub fn hosts(&self) -> &Arc<Hosts> {
        &self.hosts
    }

    /// Creates a retry budget with the limit from the URL.
    pub fn retry_budget(&self) -> RetryBudget {
        RetryBudget::new(self.retry)
    }

    /// Returns the maximum number of connections.
    pub fn connections(&self) -> usize {
        self.pool.status().max_size
    }

    /// Returns the schema from the URL.
    pub fn schema(&self) -> Option<&str> {
        self.schema.as_deref()
    }

    /// Qualifies the tables of a statement with the schema from the URL. They are qualified because
    /// a pooler does not preserve `search_path`.
    pub fn qualify_tables<'a>(&self, sql: &'a str) -> Cow<'a, str> {
        match &self.schema {
            Some(schema) => sql.replace("tenure_", &format!("\"{schema}\".tenure_")).into(),
            None => sql.into(),
        }
    }

    /// Takes a connection from the pool for one operation.
    pub async fn acquire(&self) -> Result<PooledConnection, FailureKind> {
        let acquired = self.pool.get().await;
        let status = self.pool.status();
        for (state, count) in [("open", status.size), ("idle", status.available), ("waiting", status.waiting)] {
            metrics::gauge!("tenure_store_connections", "state" => state).set(count as f64);
        }
        match acquired {
            Ok(pooled) => Ok(PooledConnection(Some(pooled))),
            Err(PoolError::Backend(failure)) => Err(failure),
            Err(e) => {
                let reason = format!("no free connection: {e}; increase `pool` in the store's URL");
                Err(Error::unavailable(reason).into())
            }
        }
    }

    /// Executes a statement and returns its rows. Retried while the server is unavailable, so only
    /// for idempotent statements.
    pub async fn rows(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
        self.rows_with_retry(self.prepare, sql, params).await
    }

    /// Executes a statement like [`PgConnection::rows`], but plans it each time: for statements whose best
    /// plan depends on the bound values.
    pub async fn rows_planned(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
        self.rows_with_retry(Prepare::Never, sql, params).await
    }

    /// Executes a statement whose commit waits neither for an fsync nor for a standby: for changes
    /// that may be lost in a crash.
    pub async fn rows_unsynced(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
        let mut retries = self.retry_budget();
        loop {
            match self.send(self.prepare, Durability::Unsynced, sql, params).await {
                Ok(rows) => return Ok(rows),
                Err(failure) => retries.wait(failure).await?,
            }
        }
    }

    async fn rows_with_retry(&self, prepare: Prepare, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
        let mut retries = self.retry_budget();
        loop {
            match self.send(prepare, Durability::Full, sql, params).await {
                Ok(rows) => return Ok(rows),
                Err(failure) => retries.wait(failure).await?,
            }
        }
    }

    /// Executes a statement once, without retries.
    pub async fn rows_once(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, FailureKind> {
        self.send(self.prepare, Durability::Full, sql, params).await
    }

    async fn send(
        &self,
        prepare: Prepare,
        durability: Durability,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>, FailureKind> {
        let sql = self.qualify_tables(sql);
        let pooled = self.acquire().await?;
        let query = async {
            match prepare {
                Prepare::Never => Ok(durability.apply(&pooled, pooled.query_typed(&sql, params)).await?),
                Prepare::Once => {
                    let types: Vec<Type> = params.iter().map(|(_, t)| t.clone()).collect();
                    let values: Vec<&(dyn ToSql + Sync)> = params.iter().map(|(v, _)| *v).collect();
                    let statement = pooled.prepare_typed_cached(&sql, &types).await?;
                    Ok(durability.apply(&pooled, pooled.query(&statement, &values)).await?)
                }
            }
        };
        let rows = self.with_timeout_since(pooled.generation(), STATEMENT_TIMEOUT, query).await?;
        pooled.release();
        Ok(rows)
    }

    /// Runs an operation with a timeout. Also ends it if another host becomes the primary while it
    /// waits for a response.
    pub async fn with_timeout<T>(
        &self,
        limit: Duration,
        operation: impl Future<Output = Result<T, FailureKind>>,
    ) -> Result<T, FailureKind> {
        self.with_timeout_since(self.hosts.generation(), limit, operation).await
    }

    async fn with_timeout_since<T>(
        &self,
        generation: u64,
        limit: Duration,
        operation: impl Future<Output = Result<T, FailureKind>>,
    ) -> Result<T, FailureKind> {
        let outcome = tokio::select! {
            outcome = timeout(limit, operation) => outcome,
            () = self.hosts.wait_until_replaced(generation) => {
                return Err(FailureKind::lost("another host has become the primary"));
            }
        };
        if let Ok(Err(FailureKind::ReadOnly(_))) = &outcome {
            self.hosts.invalidate_connections();
        }
        let timeout_error =
            || Error::unavailable(format!("timeout: the server did not respond within {} s", limit.as_secs()));
        outcome.unwrap_or_else(|_| Err(timeout_error().into()))
    }
}

/// Executes statements that only read: on any connection of the pool, or in the transaction of a
/// snapshot.
pub(super) trait RowSource: Sync {
    /// Executes a statement and returns its rows.
    fn rows(&self, sql: &str, params: &[Param<'_>]) -> impl Future<Output = Result<Vec<Row>>> + Send;
}

impl RowSource for PgConnection {
    async fn rows(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
        self.rows(sql, params).await
    }
}

/// Whether the server waits for the fsync, and for a synchronous standby, before it acknowledges a
/// statement.
#[derive(Clone, Copy)]
enum Durability {
    Full,
    Unsynced,
}

impl Durability {
    /// Sends a statement. The transaction around an unsynced one is pipelined with it, in the same
    /// round trip.
    async fn apply<T, E: From<tokio_postgres::Error>>(
        self,
        client: &ClientWrapper,
        statement: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        match self {
            Durability::Full => statement.await,
            Durability::Unsynced => {
                let begin = client.batch_execute("BEGIN; SET LOCAL synchronous_commit TO off");
                let (begin_outcome, outcome, commit_outcome) =
                    tokio::join!(biased; begin, statement, client.batch_execute("COMMIT"));
                begin_outcome?;
                let outcome = outcome?;
                commit_outcome?;
                Ok(outcome)
            }
        }
    }
}

/// An exclusively held connection. It returns to the pool only with [`PooledConnection::release`]: a connection
/// that is dropped in the middle of an operation, for example because the caller was cancelled, is
/// closed.
pub(super) struct PooledConnection(Option<Object<Connector>>);

impl PooledConnection {
    /// The generation of [`Hosts`] in which the connection was opened.
    fn generation(&self) -> u64 {
        self.0.as_ref().map_or(0, |pooled| pooled.generation)
    }

    /// Returns the connection to the pool.
    pub fn release(mut self) {
        self.0.take();
    }
}

impl Deref for PooledConnection {
    type Target = ClientWrapper;
    fn deref(&self) -> &ClientWrapper {
        &self.0.as_ref().expect("only keep and drop take the connection, and both consume the guard").client
    }
}

impl DerefMut for PooledConnection {
    fn deref_mut(&mut self) -> &mut ClientWrapper {
        &mut self.0.as_mut().expect("only keep and drop take the connection, and both consume the guard").client
    }
}

impl Drop for PooledConnection {
    fn drop(&mut self) {
        if let Some(client) = self.0.take() {
            drop(Object::take(client));
        }
    }
}
