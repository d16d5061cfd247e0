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
use crate::testing::{PostgresSchema, Rng, postgres_server, read_all, read_full_log};
use crate::types::entry::{Entry, Parent, Record, SessionCreated};
use crate::types::error::Result;
use crate::types::head::Head;
use crate::types::id::{SessionId, SessionKey, Tenant};
use crate::types::message::Message;
use jiff::Timestamp;
use tokio_postgres::Row;

/// A store in its own schema.
struct Db {
    store: PostgresStore,
    url: String,
    schema: PostgresSchema,
}

impl Db {
    async fn new(options: &str) -> Option<Self> {
        Some(Self::at(&postgres_server()?, options).await)
    }

    /// A store that is reached through another URL, such as that of a proxy.
    async fn at(server: &str, options: &str) -> Self {
        let schema = PostgresSchema::on(&postgres_server().unwrap());
        let url = format!("{server}?schema={}&{options}", schema.name());
        Self { store: PostgresStore::open(&url).await.unwrap(), url, schema }
    }

    /// Runs a statement in which `S.` is replaced by the schema, for names that the store does not
    /// qualify itself.
    async fn rows(&self, sql: &str) -> Vec<Row> {
        let sql = sql.replace("S.", &format!("{}.", self.schema.name()));
        self.store.connection.rows_planned(&sql, &[]).await.unwrap()
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

async fn load(store: &PostgresStore, key: &SessionKey) -> Session {
    Session::replay(key, read_full_log(store, key).await).unwrap()
}
