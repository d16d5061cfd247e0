//! The way to the server: connections, statements, and what to do when either fails.

use super::url::{CONNECT_TIMEOUT, Prepare, Settings, tls};
use crate::error::{Error, Result};
use deadpool_postgres::{
    Client, ClientWrapper, Manager, ManagerConfig, Object, Pool, PoolError, RecyclingMethod, Runtime,
};
use std::borrow::Cow;
use std::error::Error as _;
use std::io::{self, ErrorKind};
use std::ops::{Deref, DerefMut};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::config::SslMode;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{NoTls, Row};

/// How long a statement may take.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a migration, a purge or a vacuum may take.
pub(super) const MAINTENANCE_TIMEOUT: Duration = Duration::from_secs(600);
/// How long a step is tried again when the server is away, or undid it because of others.
const RETRY_FOR: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A value to bind, and its type.
pub(super) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// Why a step failed, by what can be done about it.
#[derive(Debug)]
pub(super) enum Fail {
    /// The connection broke, or there was none: what was sent may have happened.
    Lost(String),
    /// The server undid the step because of what others did meanwhile.
    Undone(String),
    /// Trying again would not help.
    Final(Error),
}

impl From<Error> for Fail {
    fn from(e: Error) -> Self {
        Fail::Final(e)
    }
}

impl From<tokio_postgres::Error> for Fail {
    fn from(e: tokio_postgres::Error) -> Self {
        if let Some(db) = e.as_db_error() {
            // Without the detail: it may quote what was to be stored.
            let why = format!("{} ({})", db.message(), db.code().code());
            return match db.code().code() {
                // Serialization failure, deadlock, a table that was not free in time, and a reference to what was removed at the same time.
                "40001" | "40P01" | "55P03" | "23503" => Fail::Undone(why),
                // Shutting down, starting up, too many connections, or a standby after a failover.
                "57P01" | "57P02" | "57P03" | "57P05" | "53300" | "25006" => Fail::Lost(why),
                code if code.starts_with("08") => Fail::Lost(why),
                "53100" => Fail::Final(Error::Full { place: "the PostgreSQL server".to_owned() }),
                "26000" | "42P05" => {
                    let hint = "behind a pooler, add prepare=off to the store's URL";
                    Fail::Final(Error::unavailable(format!("{why}; {hint}")))
                }
                _ => Fail::Final(Error::unavailable(why)),
            };
        }
        let why = e.source().map_or_else(|| e.to_string(), |source| format!("{e}: {source}"));
        match e.source().and_then(|s| s.downcast_ref::<io::Error>()).map(io::Error::kind) {
            Some(ErrorKind::InvalidData) => {
                let hint =
                    "for TLS the server needs a certificate that this system trusts, or sslmode=disable in the URL";
                Fail::Final(Error::unavailable(format!("{why}; {hint}")))
            }
            Some(_) => Fail::Lost(why),
            None if e.is_closed() => Fail::Lost(why),
            None => Fail::Final(Error::unavailable(why)),
        }
    }
}

/// Decides how often and how long to try again.
pub(super) struct Tries {
    until: Option<Instant>,
    pause: Duration,
}

impl Tries {
    pub fn new() -> Self {
        Self { until: None, pause: FIRST_PAUSE }
    }

    /// Waits before the next try, or gives up.
    pub async fn wait(&mut self, fail: Fail) -> Result<()> {
        let why = match fail {
            Fail::Final(e) => return Err(e),
            Fail::Lost(why) | Fail::Undone(why) => why,
        };
        let now = Instant::now();
        let until = *self.until.get_or_insert(now + RETRY_FOR);
        if now + self.pause > until {
            return Err(Error::unavailable(why));
        }
        sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Ok(())
    }
}

/// A pool of connections.
pub(super) struct Link {
    pool: Pool,
    prepare: Prepare,
    schema: Option<String>,
}

impl Link {
    pub fn new(settings: Settings) -> Result<Self> {
        let config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let Settings { driver, pool, schema, prepare } = settings;
        let manager = match driver.get_ssl_mode() {
            SslMode::Disable => Manager::from_config(driver, NoTls, config),
            _ => Manager::from_config(driver, tls()?, config),
        };
        let pool = Pool::builder(manager)
            .max_size(pool)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(STATEMENT_TIMEOUT))
            .create_timeout(Some(CONNECT_TIMEOUT))
            .build()
            .map_err(Error::unavailable)?;
        Ok(Self { pool, prepare, schema })
    }

    /// The schema from the URL.
    pub fn schema(&self) -> Option<&str> {
        self.schema.as_deref()
    }

    /// A statement with its tables in the schema from the URL. Written out, because a pooler keeps no `search_path`.
    pub fn sql<'a>(&self, sql: &'a str) -> Cow<'a, str> {
        match &self.schema {
            Some(schema) => sql.replace("tenure_", &format!("\"{schema}\".tenure_")).into(),
            None => sql.into(),
        }
    }

    /// A connection for one step.
    pub async fn lease(&self) -> Result<Lease, Fail> {
        match self.pool.get().await {
            Ok(client) => Ok(Lease(Some(client))),
            Err(PoolError::Backend(e)) => Err(e.into()),
            Err(PoolError::Timeout(deadpool_postgres::TimeoutType::Create)) => {
                Err(Fail::Lost(format!("no connection within {} s", CONNECT_TIMEOUT.as_secs())))
            }
            Err(e) => {
                Err(Error::unavailable(format!("no connection is free: {e}; raise pool in the store's URL")).into())
            }
        }
    }

    /// The rows that a statement gives. Tried again while the server is away: for what may be done twice.
    pub async fn rows(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
        self.retry(self.prepare, sql, params).await
    }

    /// The same, planned anew each time: for statements whose best plan depends on what is bound.
    pub async fn rows_planned(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
        self.retry(Prepare::Never, sql, params).await
    }

    async fn retry(&self, prepare: Prepare, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
        let mut tries = Tries::new();
        loop {
            match self.send(prepare, sql, params).await {
                Ok(rows) => return Ok(rows),
                Err(fail) => tries.wait(fail).await?,
            }
        }
    }

    /// The rows that a statement gives, tried once.
    pub async fn once(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Fail> {
        self.send(self.prepare, sql, params).await
    }

    async fn send(&self, prepare: Prepare, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Fail> {
        let sql = self.sql(sql);
        let lease = self.lease().await?;
        let rows = within(STATEMENT_TIMEOUT, async {
            match prepare {
                Prepare::Never => Ok(lease.query_typed(&sql, params).await?),
                Prepare::Once => {
                    let types: Vec<Type> = params.iter().map(|(_, t)| t.clone()).collect();
                    let values: Vec<&(dyn ToSql + Sync)> = params.iter().map(|(v, _)| *v).collect();
                    let statement = lease.prepare_typed_cached(&sql, &types).await?;
                    Ok(lease.query(&statement, &values).await?)
                }
            }
        });
        let rows = rows.await?;
        lease.keep();
        Ok(rows)
    }
}

/// What a future gives, unless it takes too long.
pub(super) async fn within<T>(limit: Duration, step: impl Future<Output = Result<T, Fail>>) -> Result<T, Fail> {
    match timeout(limit, step).await {
        Ok(done) => done,
        Err(_) => Err(Error::unavailable(format!("the server did not answer within {} s", limit.as_secs())).into()),
    }
}

/// A connection in use. It goes back to the pool with [`Lease::keep`] only: one that was given up in the middle of
/// something, also because nobody waits for the answer any more, is closed.
pub(super) struct Lease(Option<Client>);

impl Lease {
    pub fn keep(mut self) {
        self.0.take();
    }
}

impl Deref for Lease {
    type Target = ClientWrapper;
    fn deref(&self) -> &ClientWrapper {
        self.0.as_ref().expect("only keep and drop take the connection, and both end the lease")
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut ClientWrapper {
        self.0.as_mut().expect("only keep and drop take the connection, and both end the lease")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(client) = self.0.take() {
            drop(Object::take(client));
        }
    }
}
