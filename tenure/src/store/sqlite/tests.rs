//! Tests specific to this store. The conformance suite tests the behavior common to all stores.

mod damage;
mod erase;
mod find;
mod idle;
mod views;
mod writing;

use super::SqliteStore;
use crate::store::contract::{Commit, Store};
use crate::store::item::{Item, Namespace, Owner};
use crate::store::query::RecordRange;
use crate::testing::Rng;
use crate::types::entry::{Entry, Record, SessionCreated};
use crate::types::error::Result;
use crate::types::head::{Head, LogEnd};
use crate::types::id::{Seq, SessionId, SessionKey, Tenant, User};
use crate::types::message::Message;
use jiff::Timestamp;
use rusqlite::Connection;
use tempfile::TempDir;

/// A store in its own directory.
struct TestStore {
    store: SqliteStore,
    directory: TempDir,
}

impl TestStore {
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(&file(&directory)).await.unwrap();
        Self { store, directory }
    }

    fn file(&self) -> String {
        file(&self.directory)
    }

    /// Opens a separate connection, like another process.
    fn sql(&self) -> Connection {
        Connection::open(self.file()).unwrap()
    }

    async fn records(&self, session: &str) -> Result<Vec<Record>> {
        self.store.records(&key(session), &RecordRange::after(0)).await
    }
}

fn file(directory: &TempDir) -> String {
    directory.path().join("tenure.db").to_str().unwrap().to_owned()
}

fn at(second: u64) -> Timestamp {
    Timestamp::from_microsecond(1_700_000_000_000_000 + second as i64 * 1_000_001).unwrap()
}

fn key(session: &str) -> SessionKey {
    SessionKey { tenant: Tenant::default(), session: SessionId::new(session).unwrap() }
}

fn user(name: &str) -> User {
    User::new(name).unwrap()
}

fn memory_namespace(name: &str) -> Namespace {
    Namespace { tenant: Tenant::default(), owner: Owner::User(user(name)), name: "memory".to_owned() }
}

fn item(key: &str, text: &str) -> Item {
    let key = key.to_owned();
    let value = serde_json::Value::from(text).to_string();
    Item { key, value, created_at: at(1), used_at: at(1), uses: 0, expires_at: None }
}

/// A session from the point of view of its writer.
#[derive(Clone)]
struct Log {
    head: Head,
    base: Option<LogEnd>,
    new: Vec<Record>,
}

impl Log {
    fn begin(session: &str, created: SessionCreated) -> Self {
        let seq = created.parent.as_ref().map_or(1, |p| p.seq + 1);
        let record = Record { seq, at: at(seq), entry: Entry::created(created) };
        let head = Head::begin(&key(session), &record).unwrap();
        Self { head, base: None, new: vec![record] }
    }

    fn new(session: &str) -> Self {
        Self::begin(session, SessionCreated::default())
    }

    fn of_user(session: &str, name: &str) -> Self {
        Self::begin(session, SessionCreated { user: user(name), ..SessionCreated::default() })
    }

    fn push(&mut self, entry: Entry) -> &mut Self {
        let seq = self.head.seq + 1;
        let record = Record { seq, at: at(seq), entry };
        self.head.apply(&record);
        self.new.push(record);
        self
    }

    fn push_user_message(&mut self, text: &str) -> &mut Self {
        self.push(Entry::message(Message::user(text)))
    }

    /// Returns the uncommitted records as a commit, and treats them as committed from now on.
    fn commit(&mut self) -> Commit {
        let commit = Commit::new(self.base, std::mem::take(&mut self.new), self.head.clone());
        self.base = Some(self.head.end());
        commit
    }

    async fn save(&mut self, store: &SqliteStore) {
        store.commit(&self.commit()).await.unwrap();
    }
}
