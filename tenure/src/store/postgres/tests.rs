//! Tests against a real server, which `TENURE_TEST_POSTGRES` names. Each test uses its own schema.

mod basics;
mod faults;
mod forks;
mod namespaces;
mod queries;
mod views;

use super::PostgresStore;
use crate::rules::session::{Point, Session};
use crate::store::contract::{Commit, Store};
use crate::store::query::RecordRange;
use crate::types::entry::{Entry, Parent, Record, SessionCreated};
use crate::types::error::Result;
use crate::types::head::Head;
use crate::types::id::{SessionId, SessionKey, Tenant};
use crate::types::message::Message;
use jiff::Timestamp;
use tokio_postgres::Row;

/// The URL of the test server. Without one, tests are skipped, except in CI, where that is an
/// error.
#[expect(
    clippy::disallowed_methods,
    reason = "tests find their server in the environment; the library never looks there"
)]
fn server() -> Option<String> {
    let url = std::env::var("TENURE_TEST_POSTGRES").ok().filter(|url| !url.is_empty());
    if url.is_none() {
        assert!(std::env::var("CI").is_err(), "TENURE_TEST_POSTGRES is not set: CI does not skip PostgreSQL tests");
        eprintln!("SKIPPED: set TENURE_TEST_POSTGRES, or use scripts/with-postgres.sh");
    }
    url
}

/// A store in its own schema.
struct Db {
    store: PostgresStore,
    url: String,
    schema: String,
}

impl Db {
    async fn new(options: &str) -> Option<Self> {
        Some(Self::at(&server()?, options).await)
    }

    async fn at(server: &str, options: &str) -> Self {
        let schema = format!("test_{}", uuid::Uuid::now_v7().simple());
        let url = format!("{server}?schema={schema}&{options}");
        Self { store: PostgresStore::open(&url).await.unwrap(), url, schema }
    }

    /// Runs a statement in which `S.` is replaced by the schema, for names that the store does not
    /// qualify itself.
    async fn rows(&self, sql: &str) -> Vec<Row> {
        self.store.connection.rows_planned(&sql.replace("S.", &format!("{}.", self.schema)), &[]).await.unwrap()
    }

    async fn drop_schema(self) {
        self.rows(&format!("DROP SCHEMA {} CASCADE", self.schema)).await;
    }
}

fn tenant() -> Tenant {
    Tenant::new("acme").unwrap()
}

fn key(session: &str) -> SessionKey {
    SessionKey { tenant: tenant(), session: SessionId::new(session).unwrap() }
}

/// A time, in seconds after a fixed start.
fn at(second: i64) -> Timestamp {
    Timestamp::from_microsecond(1_700_000_000_000_000 + second * 1_000_000).unwrap()
}

fn user_message(text: &str) -> Entry {
    Entry::message(Message::user(text))
}

/// A writer of one session, with its cached head.
#[derive(Clone, Debug)]
struct Writer {
    head: Head,
    /// Offset in microseconds, so that different writers write at different times.
    skew: i64,
}

impl Writer {
    async fn create(store: &PostgresStore, session: &str) -> Result<Self> {
        Self::begin(store, session, SessionCreated::default()).await
    }

    /// Creates a fork of a session at a point.
    async fn fork(store: &PostgresStore, from: &str, point: &Point, session: &str) -> Result<Self> {
        let position = load(store, &key(from)).await.locate(point).expect("the position exists");
        let parent = Parent { session: key(from).session, seq: position.seq, digest: position.digest };
        Self::begin(store, session, SessionCreated { parent: Some(parent), ..SessionCreated::default() }).await
    }

    async fn begin(store: &PostgresStore, session: &str, created: SessionCreated) -> Result<Self> {
        let seq = created.parent.as_ref().map_or(1, |p| p.seq + 1);
        let record = Record { seq, at: at(seq as i64), entry: Entry::created(created) };
        let head = Head::begin(&key(session), &record).unwrap();
        store.commit(&Commit::new(None, vec![record], head.clone())).await?;
        Ok(Self { head, skew: 0 })
    }

    /// Creates the next commit, with these entries.
    fn next_commit(&self, entries: impl IntoIterator<Item = Entry>) -> Commit {
        let mut head = self.head.clone();
        let base = self.head.end();
        let skew = jiff::SignedDuration::from_micros(self.skew);
        let record = |(seq, entry)| Record { seq, at: at(seq as i64) + skew, entry };
        let records: Vec<Record> = (base.seq + 1..).zip(entries).map(record).collect();
        records.iter().for_each(|r| head.apply(r));
        Commit::new(Some(base), records, head)
    }

    async fn commit(&mut self, store: &PostgresStore, commit: Commit) -> Result<()> {
        store.commit(&commit).await?;
        self.head = commit.head;
        Ok(())
    }

    async fn append(&mut self, store: &PostgresStore, entries: impl IntoIterator<Item = Entry>) -> Result<()> {
        self.commit(store, self.next_commit(entries)).await
    }
}

/// Reads a session's own records, page by page.
async fn own_records(store: &PostgresStore, key: &SessionKey) -> Vec<Record> {
    let mut records: Vec<Record> = Vec::new();
    loop {
        let page = store.records(key, &RecordRange::after(records.last().map_or(0, |r| r.seq))).await.unwrap();
        if page.is_empty() {
            return records;
        }
        records.extend(page);
    }
}

/// Reads a session's whole log, including the records of its ancestors.
async fn log(store: &PostgresStore, key: &SessionKey) -> Vec<Record> {
    let mut parts = Vec::new();
    let mut key = key.clone();
    let mut last_seq = u64::MAX;
    loop {
        let head = store.head(&key).await.unwrap().expect("the session exists");
        let mut records = own_records(store, &key).await;
        assert_eq!(
            records.first().map(|r| r.seq),
            Some(head.first),
            "the head has the first sequence number of the log"
        );
        records.retain(|r| r.seq <= last_seq);
        parts.insert(0, records);
        let Some(parent) = head.parent else { return parts.concat() };
        last_seq = last_seq.min(parent.seq);
        key.session = parent.session;
    }
}

async fn load(store: &PostgresStore, key: &SessionKey) -> Session {
    Session::replay(key, log(store, key).await).unwrap()
}

/// A deterministic pseudo-random number generator.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % sides as u64) as usize
    }
}
