//! Temporary stores of every kind, and a `Tenure` on each.

#[cfg(feature = "postgres")]
use super::postgres_schema::PostgresSchema;
use crate::clock::Clock;
use crate::engine::options::Options;
use crate::tenure::Tenure;
use jiff::{SignedDuration, Timestamp};
use std::path::Path;
use tempfile::TempDir;

/// A kind of store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreKind {
    /// In memory.
    Memory,
    /// JSONL files in a temporary directory.
    Jsonl,
    /// A SQLite file in a temporary directory.
    #[cfg(feature = "sqlite")]
    Sqlite,
    /// A schema on the PostgreSQL server that `TENURE_TEST_POSTGRES` names.
    #[cfg(feature = "postgres")]
    Postgres,
}

/// The URL of a new, empty store. The store is deleted on drop, except in memory, where there is
/// nothing to delete.
#[derive(Debug)]
pub struct TestStore {
    kind: StoreKind,
    url: String,
    directory: Option<TempDir>,
    #[cfg(feature = "postgres")]
    schema: Option<PostgresSchema>,
}

impl TestStore {
    /// Creates a place for a store. `None` means that there is no PostgreSQL server.
    pub fn new(kind: StoreKind) -> Option<Self> {
        let in_directory = |scheme: &str, name: &str| {
            let directory = tempfile::tempdir().unwrap();
            let url = format!("{scheme}:{}", directory.path().join(name).display());
            Self { directory: Some(directory), ..Self::build(kind, url) }
        };
        match kind {
            StoreKind::Memory => Some(Self::build(kind, "memory:".to_owned())),
            StoreKind::Jsonl => Some(in_directory("jsonl", "sessions")),
            #[cfg(feature = "sqlite")]
            StoreKind::Sqlite => Some(in_directory("sqlite", "tenure.db")),
            #[cfg(feature = "postgres")]
            StoreKind::Postgres => {
                let schema = PostgresSchema::new()?;
                Some(Self { schema: Some(schema.clone()), ..Self::build(kind, schema.url()) })
            }
        }
    }

    fn build(kind: StoreKind, url: String) -> Self {
        Self {
            kind,
            url,
            directory: None,
            #[cfg(feature = "postgres")]
            schema: None,
        }
    }

    /// The kind of the store.
    pub fn kind(&self) -> StoreKind {
        self.kind
    }

    /// The URL of the store, for [`Tenure::open`]. All `memory:` stores are different ones.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The temporary directory, if the store is in files: it contains `sessions/` or `tenure.db`.
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_ref().map(TempDir::path)
    }

    /// The schema, if the store is in PostgreSQL.
    #[cfg(feature = "postgres")]
    pub fn schema(&self) -> Option<&PostgresSchema> {
        self.schema.as_ref()
    }
}

/// A [`Tenure`] on a [`TestStore`], with a manual clock that starts at 2026-01-01T00:00:00Z.
#[derive(Debug)]
pub struct TestTenure {
    /// The handle on the store.
    pub tenure: Tenure,
    /// The clock of the handle.
    pub clock: Clock,
    /// The store. Declared last, so that it is deleted after the handle is closed.
    pub store: TestStore,
}

impl TestTenure {
    /// Opens a new, empty store. `None` means that there is no PostgreSQL server.
    pub async fn new(kind: StoreKind) -> Option<Self> {
        let store = TestStore::new(kind)?;
        let clock = Clock::manual("2026-01-01T00:00:00Z".parse().unwrap());
        let tenure = Tenure::open_with(store.url(), Self::options(&clock)).await.unwrap();
        Some(Self { tenure, clock, store })
    }

    fn options(clock: &Clock) -> Options {
        Options { clock: clock.clone(), ..Options::default() }
    }

    /// Closes the store and opens it again, with other options. A store in memory cannot be
    /// reopened; it gets a new handle.
    pub async fn reopen_with(&mut self, change: impl FnOnce(&mut Options)) {
        let mut options = Self::options(&self.clock);
        change(&mut options);
        if self.store.kind == StoreKind::Memory {
            self.tenure = Tenure::with_store(self.tenure.store().clone(), options);
        } else {
            self.tenure = Tenure::open("memory:").await.unwrap(); // closes the store
            self.tenure = Tenure::open_with(self.store.url(), options).await.unwrap();
        }
    }

    /// Closes the store and opens it again.
    pub async fn reopen(&mut self) {
        self.reopen_with(|_| ()).await;
    }

    /// A second handle on the same store with its own cache, like that of another node.
    pub fn second_node(&self) -> Tenure {
        self.second_node_with(|_| ())
    }

    /// A second handle on the same store with its own cache and other options.
    pub fn second_node_with(&self, change: impl FnOnce(&mut Options)) -> Tenure {
        let mut options = Self::options(&self.clock);
        change(&mut options);
        Tenure::with_store(self.tenure.store().clone(), options)
    }

    /// Advances the clock.
    pub fn advance(&self, by: SignedDuration) {
        self.clock.advance(by);
    }

    /// The time of the clock.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The URL of the store.
    pub fn url(&self) -> &str {
        self.store.url()
    }

    /// The temporary directory, if the store is in files.
    pub fn directory(&self) -> Option<&Path> {
        self.store.directory()
    }
}
