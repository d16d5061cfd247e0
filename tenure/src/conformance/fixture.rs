//! The fixture of a case: an empty store, and a way to reopen it.

use crate::store::contract::Store;
use std::{any::Any, fmt, future::Future, path::Path, pin::Pin, sync::Arc, time::Duration};

/// Timeout of a case.
const TIMEOUT: Duration = Duration::from_secs(300);

type FixtureOpener = Pin<Box<dyn Future<Output = Arc<dyn Store>> + Send>>;

/// A fresh, empty store for one case.
pub struct Fixture {
    /// The store under test.
    pub store: Arc<dyn Store>,
    open: Option<Box<dyn Fn() -> FixtureOpener + Send + Sync>>,
    // Declared after the store, so that it is dropped last.
    resources: Vec<Box<dyn Any + Send + Sync>>,
}

impl Fixture {
    /// A fixture with a store that cannot be reopened.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store, open: None, resources: Vec::new() }
    }

    /// A fixture with a store that `open` opens, initially and on every reopen.
    pub async fn open<O, F>(open: O) -> Self
    where
        O: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = Arc<dyn Store>> + Send + 'static,
    {
        let store = open().await;
        Self { store, open: Some(Box::new(move || Box::pin(open()))), resources: Vec::new() }
    }

    /// A fixture with a store in its own temporary directory, which is deleted after the case.
    pub async fn in_directory<O, F>(open: O) -> Self
    where
        O: Fn(&Path) -> F + Send + Sync + 'static,
        F: Future<Output = Arc<dyn Store>> + Send + 'static,
    {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        Self::open(move || open(&path)).await.with_resource(directory)
    }

    /// Keeps a value, such as a directory, alive until the case is over.
    pub fn with_resource(mut self, resource: impl Any + Send + Sync) -> Self {
        self.resources.push(Box::new(resource));
        self
    }

    /// Closes the store and opens it again with the same data. `None` means that the store is not
    /// persistent.
    pub async fn reopen(self) -> Option<Self> {
        let Self { store, open, resources } = self;
        let open = open?;
        // All handles must be dropped first: a store may lock its files exclusively.
        assert_eq!(Arc::strong_count(&store), 1, "the case still holds a handle to the store; drop it before `reopen`");
        drop(store);
        Some(Self { store: open().await, open: Some(open), resources })
    }
}

impl fmt::Debug for Fixture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fixture").field("store", &self.store).finish_non_exhaustive()
    }
}

/// Runs a case, or skips it if there is no fixture.
pub async fn check<F: Future<Output = ()>>(fixture: impl Into<Option<Fixture>>, case: impl FnOnce(Fixture) -> F) {
    if let Some(fixture) = fixture.into() {
        tokio::time::timeout(TIMEOUT, case(fixture)).await.expect("the case timed out after five minutes");
    }
}
