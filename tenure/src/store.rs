//! The store contract, its four implementations (memory, JSONL, SQLite, PostgreSQL), and opening
//! one by URL.
//!
//! Invariant: everything above this module reaches persistent data only through the [`Store`]
//! trait; [`open`] selects an implementation by the scheme of a URL.
//!
//! # A store of your own
//!
//! Implement [`Store`], whose documentation is the contract, run the suite `tenure::conformance`
//! (feature `conformance`) against it, and open it with
//! [`Tenure::with_store`](crate::Tenure::with_store):
//!
//! ```
//! use std::sync::Arc;
//! use tenure::store::{MemoryStore, Store};
//! use tenure::{Options, Tenure};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> tenure::Result<()> {
//! let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
//! let tenure = Tenure::with_store(store.clone(), Options::default());
//! let session = tenure.user("acme", "ada")?.create_session().await?;
//! assert!(store.head(&session.principal().key(session.id())).await?.is_some());
//! # Ok(())
//! # }
//! ```

pub(crate) mod contract;
pub(crate) mod finding;
pub(crate) mod item;
mod jsonl;
mod mem_index;
mod mem_messages;
mod memory;
pub(crate) mod message_index;
pub(crate) mod open;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
pub(crate) mod query;
pub(crate) mod shown;
pub(crate) mod snapshot;
#[cfg(feature = "sqlite")]
mod sqlite;

pub use contract::{
    Commit, Concurrency, FORMAT, HeadCheck, HeadChecker, MAX_PAGE_BYTES, Notifier, OpenRepair, Store, WriteCost,
};
pub use finding::{Finding, MAX_FINDINGS, Orphan, Remedy};
pub use item::{Item, Namespace, Owner};
pub use jsonl::JsonlStore;
pub use memory::MemoryStore;
pub use message_index::{
    IndexWord, IndexedMessage, MessageIndex, MessageIndexUpdate, MessageLocation, MessageMatches, MessageQuery,
    SessionIndexPart, TITLE_POSITION, WordRules,
};
pub use open::{format, open, redacted};
#[cfg(feature = "postgres")]
pub use postgres::PostgresStore;
pub use query::{
    ExpiryCutoffs, HeadPage, OwnerFilter, ReadDirection, RecordRange, SessionCursor, SessionOrder, SessionQuery,
};
pub use shown::{RecordLocation, ShownRecord};
pub use snapshot::{Snapshot, Snapshots};
#[cfg(feature = "sqlite")]
pub use sqlite::SqliteStore;
