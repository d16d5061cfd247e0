//! The contract that every store implements: the [`Store`] trait and the types of its write path.
//!
//! Invariant: the guarantees are stated here once; the conformance suite (feature `conformance`)
//! tests them, and every implementation passes the same suite.

use crate::store::finding::{Finding, Orphan};
use crate::store::item::{Item, Namespace, Owner};
use crate::store::message_index::{MessageIndex, MessageIndexUpdate};
use crate::store::query::{HeadPage, RecordRange, SessionQuery};
use crate::store::shown::{RecordLocation, ShownRecord};
use crate::store::snapshot::Snapshots;
use crate::types::blob::{Blob, BlobId};
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::head::{Head, LogEnd};
use crate::types::id::{Seq, SessionKey, Tenant};
use crate::types::status::Status;
use async_trait::async_trait;
use jiff::Timestamp;

use std::fmt;
use std::sync::Arc;
use tokio::sync::broadcast;

/// The newest storage format, which this version reads and writes. Data in the format of any released
/// version can be opened as well.
pub const FORMAT: u32 = 1;

/// Maximum size of a page of records, in bytes of text. A page that reaches it ends early, even if
/// the limit of the range is not reached.
pub const MAX_PAGE_BYTES: usize = 8 << 20;

/// A durable store of session logs, heads, key-value items and blobs. Implement this trait to add a
/// storage backend, and verify the implementation with the suite `tenure::conformance` (feature
/// `conformance`).
///
/// # Data model
///
/// A store holds four kinds of data:
///
/// * **Logs.** Each session has an append-only log of [`Record`]s with contiguous sequence numbers.
///   Entries are opaque: a store serializes and deserializes them, but their meaning is defined
///   elsewhere (the fold of a session).
/// * **Heads.** Each session has one [`Head`], its index row. A commit replaces it together with
///   the append, and all queries for sessions are answered from heads.
/// * **Items.** Key-value [`Item`]s with use and expiry times, grouped in namespaces ([`Namespace`]),
///   each of which belongs to an [`Owner`].
/// * **Blobs.** Content-addressed media, stored once per tenant and kept as long as a session
///   references them. Only a commit writes blobs, so a blob without a session cannot be created
///   (D-003).
///
/// # Atomicity
///
/// [`Store::commit`] applies its records, head, items and blobs as one unit: either all of them are
/// persisted or none is. [`Store::purge_at`] checks its condition and purges in one atomic step.
///
/// # Errors
///
/// A method that returns an error has changed nothing, with one exception: after
/// [`Error::Unavailable`] the outcome is unknown, and the operation may have been applied. Damaged
/// data is [`Error::Corrupt`], which names its location; a full disk is [`Error::Full`]. The
/// methods document which other errors reject a call.
///
/// # Durability
///
/// A write is durable when its method returns, as far as the store is durable at all (the memory
/// store is not). The only exception is the use that [`Store::get`] and [`Store::get_many`] record, which
/// may be lost in a crash.
///
/// # Read consistency
///
/// A read reflects every commit that was acknowledged before the call (D-012).
///
/// # Optimistic concurrency
///
/// A commit names the log end that it builds on ([`Commit::base`]) and is rejected with
/// [`Error::Conflict`] unless the stored log still ends there, in the same session. Of several
/// concurrent commits on one base, at most one succeeds.
///
/// # Concurrent use
///
/// All methods may be called concurrently from many tasks; [`Store::concurrency`] states how many
/// calls are served at the same time, and further calls wait.
///
/// # Fork inheritance
///
/// A fork stores only its own records and reads the earlier ones from its parent. Purging a parent
/// must not change what its forks show, so a fork inherits the records that are still needed
/// ([`Store::purge`], D-001).
///
/// # Notifications
///
/// [`Store::notifier`] provides best-effort hints between processes. Correctness never depends on
/// them: a notification may be late, duplicated or lost.
///
/// # Deletion
///
/// Removed and purged data are no longer visible to any method as soon as the call returns.
/// [`Store::scrub`] and [`Store::delete_owner`] additionally remove their bytes from the files of the
/// store, for erasure requests.
///
/// # Optional capabilities
///
/// Every method is required, except those that return an optional capability: [`HeadChecker`],
/// [`MessageIndex`], [`Notifier`] and [`Snapshots`] are traits of their own, and a store without them has nothing to implement (D-129).
#[async_trait]
pub trait Store: Send + Sync + fmt::Debug + 'static {
    /// Appends to a session's log and replaces its head, as one atomic and durable write:
    /// compare-and-set on the end of the log.
    ///
    /// # Preconditions
    ///
    /// * The commit is well-formed ([`Error::Invalid`]): its records are contiguous, follow the base
    ///   and end at `head.seq`; a commit that creates a session has at least one record, and the
    ///   first record of a fork follows its fork point; items contain no NUL characters.
    /// * `base: None` creates a session. The session must not exist ([`Error::Exists`]). If the
    ///   head names a parent, the parent must exist and its log must reach the fork point
    ///   ([`Error::NotFound`] with the parent's id).
    /// * `base: Some(end)` appends to a session. The session must exist ([`Error::NotFound`]) and
    ///   its log must end at `end` ([`Error::Conflict`]): with the same last record, and with the
    ///   same hash over all records. The hash prevents a writer whose records the store has lost (a
    ///   restored backup, an asynchronous failover) from continuing from them (D-007).
    /// * The stored session must have the same `created_at` as the head ([`Error::Conflict`]). A
    ///   session that was purged and created again under the same id is a different session
    ///   (D-006).
    ///
    /// # Effects
    ///
    /// * The records are appended and the head is replaced. A commit without records changes only
    ///   the head.
    /// * `first` and `parent` of an existing session (where its own log begins, and which log it
    ///   continues) keep their stored values: a purge of another session may have changed them
    ///   without the writer's knowledge.
    /// * Items are written to namespaces of the session itself.
    /// * Blobs are stored unless the tenant already has them. The session references them from the
    ///   first record of the commit on.
    async fn commit(&self, commit: &Commit) -> Result<()>;

    /// Returns the head of a session, or `None` if the session does not exist. It reflects every
    /// commit acknowledged before the call.
    async fn head(&self, key: &SessionKey) -> Result<Option<Head>>;

    /// Returns the store's non-blocking check of cached heads, if it has one. Without it, callers
    /// use [`Store::head`].
    fn head_checker(&self) -> Option<&dyn HeadChecker> {
        None
    }

    /// Returns the store's notifications between processes, if it has them. Without them, callers
    /// poll.
    fn notifier(&self) -> Option<&dyn Notifier> {
        None
    }

    /// Returns the store's snapshots, if it has them. Without them, it cannot be backed up.
    fn snapshots(&self) -> Option<&dyn Snapshots> {
        None
    }

    /// Returns the store's message index, if it has one. Without it, searches scan the logs.
    fn message_index(&self) -> Option<&dyn MessageIndex> {
        None
    }

    /// Returns how many calls the store serves concurrently. The scheduler in front of the store
    /// uses it to admit calls (D-106).
    fn concurrency(&self) -> Concurrency;

    /// Returns the heads that match a query, in the query's order. The number of heads scanned is
    /// unbounded, so this is for background work of the server, not for requests; those use
    /// [`Store::page`].
    async fn heads(&self, query: &SessionQuery) -> Result<Vec<Head>>;

    /// Returns a page of heads that match a query, newest first, and scans at most `max_scan`
    /// heads.
    ///
    /// If a label or the thread of the query selects at most `max_scan` sessions, those are
    /// scanned; otherwise the sessions of `query.owner` are scanned in the order of their activity.
    /// A scan that reaches the bound ends the page early, possibly with no heads at all:
    /// [`HeadPage::scan_stopped_at`] is then the cursor from which the next page continues. Queries by hash,
    /// match key or parent are answered from an index of those, without the bound.
    async fn page(&self, query: &SessionQuery, max_scan: usize) -> Result<HeadPage>;

    /// Counts the sessions by status, over all tenants. A status without sessions may be omitted.
    async fn count(&self) -> Result<Vec<(Status, u64)>>;

    /// Reads records of a session's own log (not its parent's) in a range.
    ///
    /// A page may end early ([`MAX_PAGE_BYTES`]), but contains at least one record if the range has
    /// any: continue after its last record. An unknown session has no records. Damaged data is
    /// reported as [`Error::Corrupt`], which names its location.
    async fn records(&self, key: &SessionKey, range: &RecordRange) -> Result<Vec<Record>>;

    /// Returns the sessions that show records, at most `limit` pairs of a record and a session, in any
    /// order.
    ///
    /// A record is shown by the session whose own log contains it, and by its forks, through any number
    /// of forks, whose fork points are at or after it; unless a rewind in what the session reads (its own
    /// log, and those of its ancestors up to the fork points) follows the record and goes back to before
    /// it. Sessions that do not exist are not an error.
    async fn sessions_showing(
        &self,
        tenant: &Tenant,
        records: &[RecordLocation],
        limit: usize,
    ) -> Result<Vec<ShownRecord>>;

    /// Destroys a session: its head, log and items, and the blobs that no other session references.
    /// Idempotent.
    ///
    /// # Fork inheritance
    ///
    /// If forks still read from its log, the fork with the latest fork point inherits the records
    /// up to that point and takes the purged session's place: the other forks are re-parented to
    /// it. Neither what a fork shows nor its `seq` changes, and blobs stay with the records that
    /// use them. If every fork point lies before the purged session's own first record, there are no
    /// records to inherit, and the forks are re-parented so that they read from that session's
    /// parent. Forks that were deleted and can be restored inherit like any other (D-001).
    async fn purge(&self, key: &SessionKey) -> Result<()>;

    /// Purges a session on condition: only if it still has this `created_at` and its log still ends
    /// at `seq`.
    ///
    /// Otherwise returns [`Error::Conflict`] and changes nothing. A session that does not exist is
    /// not a conflict. The check and the purge are one atomic step, so a commit that was
    /// acknowledged in between is never destroyed.
    async fn purge_at(&self, key: &SessionKey, created_at: Timestamp, seq: Seq) -> Result<()>;

    /// Inserts or replaces an item by its key.
    ///
    /// `max_items` bounds the number of items of the namespace: beyond it, the least recently used items
    /// are evicted, never the new one; concurrent calls may exceed the bound briefly. Items that
    /// contain NUL characters are rejected. A namespace of a session that does not exist rejects
    /// the item with [`Error::NotFound`].
    async fn put(&self, namespace: &Namespace, item: &Item, max_items: Option<usize>) -> Result<()>;

    /// Returns an item by its key, or `None` if there is none. With `used_at`, also sets the item's
    /// last use to that time and increments its use count; the returned item includes the update.
    /// This update may be lost in a crash.
    async fn get(&self, namespace: &Namespace, key: &str, used_at: Option<Timestamp>) -> Result<Option<Item>>;

    /// Like [`Store::get`] for several items, in one read and at most one write. Items that do not exist are
    /// omitted; the order is not defined.
    async fn get_many(&self, namespace: &Namespace, keys: &[&str], used_at: Option<Timestamp>) -> Result<Vec<Item>>;

    /// Lists the items of a namespace in the order of their keys, after a key (exclusive), at most
    /// `limit`.
    async fn items(&self, namespace: &Namespace, after: Option<&str>, limit: usize) -> Result<Vec<Item>>;

    /// Counts the items of all namespaces with a name, over all tenants and owners. Expired items that have
    /// not been removed are counted. The cost may be proportional to the number of all items, so this is for
    /// metrics, not for requests.
    async fn count_items(&self, name: &str) -> Result<u64>;

    /// Removes an item. Returns whether it existed.
    async fn remove(&self, namespace: &Namespace, key: &str) -> Result<bool>;

    /// Removes expired items (`expires_at` at or before `now`) of all namespaces, at most `limit`.
    /// Returns the number removed.
    async fn expire(&self, now: Timestamp, limit: usize) -> Result<usize>;

    /// Removes all namespaces of an owner, and scrubs the store: afterwards no file of the store
    /// contains a byte of anything that was removed or purged before (for PostgreSQL see
    /// `docs/storage.md`).
    async fn delete_owner(&self, tenant: &Tenant, owner: &Owner) -> Result<()>;

    /// Scrubs items that were removed from an owner's namespaces from the store's files, as far as
    /// this is possible at once: only [`Store::delete_owner`] rewrites everything (D-073).
    async fn scrub(&self, tenant: &Tenant, owner: &Owner) -> Result<()>;

    /// Returns the bytes of a blob, or `None` if the tenant does not have it.
    async fn blob(&self, tenant: &Tenant, id: &BlobId) -> Result<Option<Arc<[u8]>>>;

    /// Checks what only the store can see: orphans, damage below the level of records, and foreign
    /// files. The meaning of sessions is not checked.
    ///
    /// Before the check, removes those entries of `remove` that are orphans at that moment; the
    /// others stay. Returns the findings that remain, at most [`MAX_FINDINGS`] of each kind
    /// (D-027).
    ///
    /// [`MAX_FINDINGS`]: crate::store::MAX_FINDINGS
    async fn check(&self, remove: &[Orphan]) -> Result<Vec<Finding>>;
}

/// Checks whether a cached head is current without blocking: an optional capability of a store that
/// can read a head without waiting for a disk or a server.
pub trait HeadChecker {
    /// Non-blocking variant of [`Store::head`], for sessions that are in use and whose head the
    /// caller has cached. Like [`Store::head`], it reflects every commit acknowledged before the
    /// call.
    ///
    /// Returns `None` if answering would block; the caller then calls [`Store::head`]. `known_json`
    /// is the caller's cached head as JSON: if the stored head is equal, a store may return
    /// [`HeadCheck::Unchanged`] without deserializing it.
    fn head_if_changed(&self, key: &SessionKey, known_json: &str) -> Option<Result<HeadCheck>>;
}

/// Change notifications between the processes that use a store: an optional capability.
pub trait Notifier {
    /// Notifies other processes on this store that a session has changed. Returns at once; the
    /// notification is sent soon afterwards. It is a hint, and nothing depends on its delivery.
    fn notify(&self, key: &SessionKey);

    /// Subscribes to the change notifications of other processes. Delivery is best effort: late,
    /// duplicated or lost.
    ///
    /// The receiver yields the key of a changed session, or `None` for a gap, after which any
    /// session may have changed. Returns no receiver if this process can only send, as through some
    /// connection poolers; callers then poll.
    fn subscribe(&self) -> Option<broadcast::Receiver<Option<SessionKey>>>;
}

/// The number of calls that a store serves concurrently. More calls may be made: they wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Concurrency {
    /// The number of concurrent reads.
    pub reads: usize,
    /// The capacity that a write uses.
    pub writes: WriteCost,
}

/// The share of a store's capacity that a write uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteCost {
    /// None that reads need: a dedicated writer performs the writes.
    DedicatedWriter,
    /// As much as a read, such as a connection of a shared pool.
    SharedWithReads,
}

/// The result of a head check ([`HeadChecker::head_if_changed`]).
#[derive(Clone, Debug, PartialEq)]
pub enum HeadCheck {
    /// The stored head is equal to the caller's.
    Unchanged,
    /// The stored head as it is now, which may be equal to the caller's. `None` means that the
    /// session does not exist.
    Current(Option<Box<Head>>),
}

/// One atomic append to the log of a session, with its new head. The head names the session.
#[derive(Clone, Debug)]
pub struct Commit {
    /// The log end that the commit builds on (optimistic concurrency). `None` creates a session,
    /// which must not exist.
    pub base: Option<LogEnd>,
    /// The records to append, contiguous and in log order.
    pub records: Vec<Record>,
    /// The session's head after the commit.
    pub head: Head,
    /// Items for namespaces of the session itself, each with the name of its namespace.
    pub items: Vec<(String, Item)>,
    /// The media that the records reference.
    pub blobs: Vec<Blob>,
    /// The change of the message index. `None` means that it is unknown, so that a session with new
    /// records must be indexed again.
    pub message_index: Option<MessageIndexUpdate>,
}

impl Commit {
    /// Creates a commit of records only, without items, blobs and a change of the message index.
    pub fn new(base: Option<LogEnd>, records: Vec<Record>, head: Head) -> Self {
        Self { base, records, head, items: Vec::new(), blobs: Vec::new(), message_index: None }
    }

    /// The sequence number of the commit's first record, from which on its blobs are referenced.
    /// Without records, that of the head.
    pub(crate) fn first(&self) -> Seq {
        self.records.first().map_or(self.head.seq, |r| r.seq)
    }

    /// Validates the invariants that every store relies on: contiguous records from the base to the
    /// head, a first record that follows the fork point, and valid items.
    pub(crate) fn check(&self) -> Result<()> {
        let before = self.base.map_or(self.head.first.saturating_sub(1), |end| end.seq);
        let last = self.records.last().map_or(before, |r| r.seq);
        let contiguous = self.records.iter().zip(before + 1..).all(|(r, want)| r.seq == want);
        if !contiguous || last != self.head.seq || (self.base.is_none() && self.records.is_empty()) {
            return Err(Error::invalid(
                "commit",
                "records must follow the base without a gap and end at the head's seq",
            ));
        }
        let parent = self.head.parent.as_ref().filter(|_| self.base.is_none());
        if parent.is_some_and(|p| p.seq + 1 != self.head.first) {
            return Err(Error::invalid("commit", "a fork's first record must follow its fork point in the parent"));
        }
        self.items.iter().try_for_each(|(_, item)| item.check())
    }
}

/// A repair that was made while a store was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenRepair {
    /// The file that was repaired.
    pub location: String,
    /// The damage that was found, and the repair that was made.
    pub description: String,
}
