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
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of a migration, a purge or a vacuum.
pub(super) const MAINTENANCE_TIMEOUT: Duration = Duration::from_secs(600);
/// First delay between retries; each further one is twice as long, up to `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A value to bind, with its type.
pub(super) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// A retry budget with exponential backoff.
pub(super) struct RetryBudget {
    /// Maximum time for retries while the server is unavailable, or rolls the operation back
    /// because of concurrent ones.
    limit: Duration,
    until: Option<Instant>,
    pause: Duration,
}

impl RetryBudget {
    fn new(limit: Duration) -> Self {
        Self { limit, until: None, pause: FIRST_PAUSE }
    }

    /// Waits before the next attempt, or returns the error if it is final or the budget is
    /// exhausted.
    pub async fn wait(&mut self, fail: FailureKind) -> Result<()> {
        let why = match fail {
            FailureKind::Final(e) => return Err(e),
            FailureKind::Lost(why) | FailureKind::ReadOnly(why) | FailureKind::Undone(why) => why,
        };
        let now = Instant::now();
        let until = *self.until.get_or_insert(now + self.limit);
        if now + self.pause > until {
            return Err(Error::unavailable(why));
        }
        sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
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
        match pooled.client.is_closed() || pooled.generation != self.0.generation() {
            true => Err(RecycleError::message("closed, or another host is the primary now")),
            false => Ok(()),
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
            .map_err(Error::unavailable)?;
        Ok(Self { pool, hosts, prepare, schema, retry })
    }

    pub fn hosts(&self) -> &Arc<Hosts> {
        &self.hosts
    }

    /// Creates a retry budget with the limit from the URL.
    pub fn tries(&self) -> RetryBudget {
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
    pub fn sql<'a>(&self, sql: &'a str) -> Cow<'a, str> {
        match &self.schema {
            Some(schema) => sql.replace("tenure_", &format!("\"{schema}\".tenure_")).into(),
            None => sql.into(),
        }
    }

    /// Takes a connection from the pool for one operation.
    pub async fn lease(&self) -> Result<PooledConnection, FailureKind> {
        match self.pool.get().await {
            Ok(pooled) => Ok(PooledConnection(Some(pooled))),
            Err(PoolError::Backend(fail)) => Err(fail),
            Err(e) => {
                let why = format!("no connection is free: {e}; raise pool in the store's URL");
                Err(Error::unavailable(why).into())
            }
        }
    }

    /// Executes a statement and returns its rows. Retried while the server is unavailable, so only
    /// for idempotent statements.
    pub async fn rows(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
        self.retry(self.prepare, sql, params).await
    }

    /// Executes a statement like [`PgConnection::rows`], but plans it each time: for statements whose best
    /// plan depends on the bound values.
    pub async fn rows_planned(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
        self.retry(Prepare::Never, sql, params).await
    }

    /// Executes a statement whose commit waits neither for an fsync nor for a standby: for changes
    /// that may be lost in a crash.
    pub async fn rows_unsynced(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
        let mut tries = self.tries();
        loop {
            match self.send(self.prepare, Durability::Unsynced, sql, params).await {
                Ok(rows) => return Ok(rows),
                Err(fail) => tries.wait(fail).await?,
            }
        }
    }

    async fn retry(&self, prepare: Prepare, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
        let mut tries = self.tries();
        loop {
            match self.send(prepare, Durability::Full, sql, params).await {
                Ok(rows) => return Ok(rows),
                Err(fail) => tries.wait(fail).await?,
            }
        }
    }

    /// Executes a statement once, without retries.
    pub async fn once(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, FailureKind> {
        self.send(self.prepare, Durability::Full, sql, params).await
    }

    async fn send(
        &self,
        prepare: Prepare,
        durability: Durability,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>, FailureKind> {
        let sql = self.sql(sql);
        let lease = self.lease().await?;
        let asked = async {
            match prepare {
                Prepare::Never => Ok(durability.apply(&lease, lease.query_typed(&sql, params)).await?),
                Prepare::Once => {
                    let types: Vec<Type> = params.iter().map(|(_, t)| t.clone()).collect();
                    let values: Vec<&(dyn ToSql + Sync)> = params.iter().map(|(v, _)| *v).collect();
                    let statement = lease.prepare_typed_cached(&sql, &types).await?;
                    Ok(durability.apply(&lease, lease.query(&statement, &values)).await?)
                }
            }
        };
        let rows = self.within_since(lease.generation(), STATEMENT_TIMEOUT, asked).await?;
        lease.keep();
        Ok(rows)
    }

    /// Runs an operation with a timeout. Also ends it if another host becomes the primary while it
    /// waits for a response.
    pub async fn within<T>(
        &self,
        limit: Duration,
        step: impl Future<Output = Result<T, FailureKind>>,
    ) -> Result<T, FailureKind> {
        self.within_since(self.hosts.generation(), limit, step).await
    }

    async fn within_since<T>(
        &self,
        since: u64,
        limit: Duration,
        step: impl Future<Output = Result<T, FailureKind>>,
    ) -> Result<T, FailureKind> {
        let done = tokio::select! {
            done = timeout(limit, step) => done,
            () = self.hosts.replaced(since) => {
                return Err(FailureKind::Lost("another host has become the primary".to_owned()));
            }
        };
        if let Ok(Err(FailureKind::ReadOnly(_))) = &done {
            self.hosts.distrust();
        }
        let silent = || Error::unavailable(format!("the server did not answer within {} s", limit.as_secs()));
        done.unwrap_or_else(|_| Err(silent().into()))
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
                let (begun, done, ended) = tokio::join!(biased; begin, statement, client.batch_execute("COMMIT"));
                begun?;
                let done = done?;
                ended?;
                Ok(done)
            }
        }
    }
}

/// An exclusively held connection. It returns to the pool only with [`PooledConnection::keep`]: a connection
/// that is dropped in the middle of an operation, for example because the caller was cancelled, is
/// closed.
pub(super) struct PooledConnection(Option<Object<Connector>>);

impl PooledConnection {
    /// The generation of [`Hosts`] in which the connection was opened.
    fn generation(&self) -> u64 {
        self.0.as_ref().map_or(0, |pooled| pooled.generation)
    }

    /// Returns the connection to the pool.
    pub fn keep(mut self) {
        self.0.take();
    }
}

impl Deref for PooledConnection {
    type Target = ClientWrapper;
    fn deref(&self) -> &ClientWrapper {
        &self.0.as_ref().expect("only keep and drop take the connection, and both end the lease").client
    }
}

impl DerefMut for PooledConnection {
    fn deref_mut(&mut self) -> &mut ClientWrapper {
        &mut self.0.as_mut().expect("only keep and drop take the connection, and both end the lease").client
    }
}

impl Drop for PooledConnection {
    fn drop(&mut self) {
        if let Some(client) = self.0.take() {
            drop(Object::take(client));
        }
    }
}
