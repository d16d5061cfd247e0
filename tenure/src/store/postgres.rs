//! The store in a PostgreSQL database: many nodes share it, and a commit takes one round trip.
//!
//! The URL is the usual one, `postgres://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=require`, with
//! four additional options:
//!
//! * `pool=N`: maximum number of connections, 16 by default;
//! * `schema=NAME`: the schema of all tables and views, which is created if it does not exist;
//! * `prepare=off`: for a pooler in transaction mode. No statement is prepared and no state is left
//!   on a connection then;
//! * `retry=30s`: for how long an operation is retried while the server is unavailable, ten seconds
//!   by default.
//!
//! Several hosts may be named (`postgres://USER@A:5432,B:5432/DATABASE`): the one that accepts
//! writes is used, and after a failover the new primary. `connect_timeout` applies to each host.
//!
//! `sslmode` is `disable`, `prefer` (TLS if the server offers it) or `require`. With TLS, the
//! server's certificate must be one that this system trusts.
//!
//! A store with subscribers has one additional connection to listen on, besides its pool (not with
//! `prepare=off`).
//!
//! Invariant: no operation waits forever; each has a timeout.

mod check;
mod commit;
mod connection;
mod failure;
pub(crate) mod foreign;
mod heads;
mod hosts;
mod items;
mod messages;
mod migrate;
mod notify;
mod purge;
mod records;
mod row;
mod shown;
mod snapshot;
mod url;

#[cfg(test)]
mod tests;

use crate::store::contract::{Commit, Concurrency, Notifier, Store, WriteCost};
use crate::store::finding::{Finding, Orphan};
use crate::store::item::{Item, Namespace, Owner};
use crate::store::message_index::{MessageIndex, MessageMatches, MessageQuery, SessionIndexPart, WordRules};
use crate::store::query::{HeadPage, RecordRange, SessionQuery};
use crate::store::shown::{RecordLocation, ShownRecord};
use crate::store::snapshot::{Snapshot, Snapshots};
use crate::types::blob::BlobId;
use crate::types::entry::Record;
use crate::types::error::Result;
use crate::types::head::Head;
use crate::types::id::{Seq, SessionKey, Tenant};
use crate::types::status::Status;
use async_trait::async_trait;
use connection::PgConnection;
use jiff::Timestamp;
use std::{fmt, sync::Arc};
use tokio::sync::broadcast;

/// A store in a PostgreSQL database, version 14 or newer. Any number of processes may share it.
pub struct PostgresStore {
    connection: Arc<PgConnection>,
    notifier: notify::PgNotifier,
    statements: commit::Statements,
    location: String,
}

impl PostgresStore {
    /// Connects, and migrates the schema to the newest format.
    pub async fn open(url: &str) -> Result<Self> {
        let settings = url::Settings::parse(url)?;
        let location = settings.describe();
        let link = Arc::new(PgConnection::new(settings.clone())?);
        let notifier = notify::PgNotifier::new(&settings, link.hosts().clone());
        migrate::migrate(&link, &location, &migrate::MIGRATIONS).await?;
        Ok(Self { connection: link, notifier, statements: commit::Statements::new(), location })
    }

    /// Returns the format of a database, which is only read. `None` means that it contains no store
    /// yet.
    pub async fn format(url: &str) -> Result<Option<u32>> {
        let settings = url::Settings::parse(url)?;
        let location = settings.describe();
        migrate::existing_format(&PgConnection::new(settings)?, &location).await
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PostgresStore({})", self.location)
    }
}

#[async_trait]
impl Store for PostgresStore {
    async fn commit(&self, commit: &Commit) -> Result<()> {
        commit::commit(&self.connection, &self.statements, commit).await
    }

    async fn head(&self, key: &SessionKey) -> Result<Option<Head>> {
        heads::head(&self.connection, key).await
    }

    fn notifier(&self) -> Option<&dyn Notifier> {
        Some(self)
    }

    fn message_index(&self) -> Option<&dyn MessageIndex> {
        Some(self)
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        Some(self)
    }

    fn concurrency(&self) -> Concurrency {
        Concurrency { reads: self.connection.connections(), writes: WriteCost::SharedWithReads }
    }

    async fn heads(&self, query: &SessionQuery) -> Result<Vec<Head>> {
        heads::heads(&self.connection, query).await
    }

    async fn page(&self, query: &SessionQuery, max_scan: usize) -> Result<HeadPage> {
        heads::page(&self.connection, query, max_scan).await
    }

    async fn count_items(&self, name: &str) -> Result<u64> {
        items::count(&self.connection, name).await
    }

    async fn count(&self) -> Result<Vec<(Status, u64)>> {
        heads::count(&self.connection).await
    }

    async fn records(&self, key: &SessionKey, range: &RecordRange) -> Result<Vec<Record>> {
        records::records(&*self.connection, key, range).await
    }

    async fn sessions_showing(
        &self,
        tenant: &Tenant,
        records: &[RecordLocation],
        limit: usize,
    ) -> Result<Vec<ShownRecord>> {
        shown::sessions_showing(&self.connection, tenant, records, limit).await
    }

    async fn purge(&self, key: &SessionKey) -> Result<()> {
        purge::purge(&self.connection, key, None).await
    }

    async fn purge_at(&self, key: &SessionKey, created_at: Timestamp, seq: Seq) -> Result<()> {
        purge::purge(&self.connection, key, Some((created_at, seq))).await
    }

    async fn put(&self, namespace: &Namespace, item: &Item, max_items: Option<usize>) -> Result<()> {
        items::put(&self.connection, namespace, item, max_items).await
    }

    async fn get(&self, namespace: &Namespace, key: &str, used_at: Option<Timestamp>) -> Result<Option<Item>> {
        Ok(self.get_many(namespace, &[key], used_at).await?.pop())
    }

    async fn get_many(&self, namespace: &Namespace, keys: &[&str], used_at: Option<Timestamp>) -> Result<Vec<Item>> {
        items::get_many(&self.connection, namespace, keys, used_at).await
    }

    async fn items(&self, namespace: &Namespace, after: Option<&str>, limit: usize) -> Result<Vec<Item>> {
        items::items(&self.connection, namespace, after, limit).await
    }

    async fn remove(&self, namespace: &Namespace, key: &str) -> Result<bool> {
        items::remove(&self.connection, namespace, key).await
    }

    async fn expire(&self, now: Timestamp, limit: usize) -> Result<usize> {
        items::expire(&self.connection, now, limit).await
    }

    async fn delete_owner(&self, tenant: &Tenant, owner: &Owner) -> Result<()> {
        items::delete_owner_items(&self.connection, tenant, owner).await
    }

    // No query sees a deleted row; its bytes are removed by the next VACUUM (D-073).
    async fn scrub(&self, _: &Tenant, _: &Owner) -> Result<()> {
        Ok(())
    }

    async fn blob(&self, tenant: &Tenant, id: &BlobId) -> Result<Option<Arc<[u8]>>> {
        records::blob(&*self.connection, tenant, id).await
    }

    async fn check(&self, orphans: &[Orphan]) -> Result<Vec<Finding>> {
        check::remove(&self.connection, orphans).await?;
        check::check(&self.connection).await
    }
}

#[async_trait]
impl MessageIndex for PostgresStore {
    async fn find(&self, query: &MessageQuery) -> Result<MessageMatches> {
        messages::find(&self.connection, query).await
    }

    async fn indexed(&self, key: &SessionKey) -> Result<Vec<(Seq, usize)>> {
        messages::indexed(&self.connection, key).await
    }

    async fn next_unindexed(&self, rules: WordRules) -> Result<Option<SessionKey>> {
        messages::next_unindexed(&self.connection, rules).await
    }

    async fn replace(&self, part: &SessionIndexPart) -> Result<()> {
        messages::replace(&self.connection, part).await
    }

    // Vacuum removes the entries of removed messages.
    async fn compact(&self) -> Result<bool> {
        Ok(false)
    }
}

impl Notifier for PostgresStore {
    fn notify(&self, key: &SessionKey) {
        self.notifier.notify(&self.connection, key);
    }

    fn subscribe(&self) -> Option<broadcast::Receiver<Option<SessionKey>>> {
        self.notifier.subscribe()
    }
}

#[async_trait]
impl Snapshots for PostgresStore {
    async fn snapshot(&self) -> Result<Box<dyn Snapshot>> {
        Ok(Box::new(snapshot::PgSnapshot::begin(self.connection.clone()).await?))
    }
}
