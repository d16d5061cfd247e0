//! The contract that every store implements.

use crate::store::finding::{Finding, Orphan};
use crate::store::item::{Hit, Item, Owner, Shelf};
use crate::store::query::{HeadPage, Query, Range};
use crate::types::blob::{Blob, BlobId};
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::head::{Head, LogEnd};
use crate::types::id::{Key, Seq, Tenant};
use crate::types::message::Message;
use crate::types::status::Status;
use async_trait::async_trait;
use jiff::Timestamp;

use std::fmt;
use std::sync::Arc;
use tokio::sync::broadcast;

/// The newest storage format this version writes and reads; every older one opens too.
pub const FORMAT: u32 = 4;

/// A page of records ends after so many bytes of text, even if the limit is not reached.
pub const MAX_PAGE_BYTES: usize = 8 << 20;

/// Keeps logs, index cards, items and blobs. A store never looks inside an entry; what entries mean is said elsewhere.
///
/// Every method is required. All methods may be called at once from many tasks. A method that fails has changed nothing,
/// except where the error is [`Error::Unavailable`]: then the step may have happened.
#[async_trait]
pub trait Store: Send + Sync + fmt::Debug + 'static {
    /// Does one atomic step: wholly in or wholly out, and durable when it returns (as far as the store is durable at all).
    ///
    /// * `base: None`: the session must not exist ([`Error::Exists`]). If its head names a parent, the parent must exist and
    ///   its log must reach the fork's point ([`Error::NotFound`] with the parent's id).
    /// * `base: Some(end)`: the session's log must end there ([`Error::Conflict`]; [`Error::NotFound`] if there is none): with the same
    ///   record, and with the same hash over all records, so that a writer whose records the store has lost (a restored backup, an
    ///   asynchronous failover) never continues from them. And it must be the same session: one that was purged and made anew has
    ///   another `created_at`, and conflicts. Where the session's own log
    ///   begins and what it leans on (`first`, `parent`) stay as stored: a purge elsewhere may have changed them unknown to the writer.
    ///
    /// Records are contiguous and end at `head.seq`; there may be none (then only the head changes). Items go on shelves of
    /// the session itself. Blobs are stored unless the tenant has them, and counted as used by the session from the first
    /// record of the commit on.
    async fn commit(&self, commit: &Commit) -> Result<()>;

    /// The index card of a session.
    async fn head(&self, key: &Key) -> Result<Option<Head>>;

    /// The same at once, if the store can tell without making its caller wait; `None`: ask [`Store::head`]. Meant for sessions in use,
    /// whose card is at hand. `known` is the card as JSON, as the caller has it: it need not be read again if it is the same.
    fn glance(&self, key: &Key, known: &str) -> Option<Result<Glance>>;

    /// Tells other processes on this store that a session has changed, some time soon. It is a hint: nothing depends on it.
    fn tell(&self, key: &Key);

    /// Sessions that other processes have told of, and `None` when something may have been missed: they may be late, come twice, or
    /// never. No receiver: nobody tells, and whoever waits looks again after a while.
    fn hear(&self) -> Option<broadcast::Receiver<Option<Key>>>;

    /// How many calls it can serve at once: what is scheduled in front of it goes by that.
    fn concurrency(&self) -> Concurrency;

    /// The index cards that match, in the query's order. However many must be looked at: for the server's own work, not for requests.
    async fn heads(&self, query: &Query) -> Result<Vec<Head>>;

    /// The index cards that match, newest first, found by looking at no more than `max_scan` cards. If a label or the thread is on that
    /// many sessions or fewer, those are looked at; otherwise the sessions of `query.whose` in the order of their activity. Then a page may
    /// end early, also an empty one: it says where ([`HeadPage::stopped`]), and what follows is found with that as the cursor.
    async fn page(&self, query: &Query, max_scan: usize) -> Result<HeadPage>;

    /// How many sessions there are in each state, all tenants together; states without any may be left out.
    async fn count(&self) -> Result<Vec<(Status, u64)>>;

    /// Records of the session's own log (not its parent's) in a range. A page may end early, but holds at least one record
    /// if there is any: read on from its last. An unknown session has none. Damage is [`Error::Corrupt`] and names its place.
    async fn records(&self, key: &Key, range: &Range) -> Result<Vec<Record>>;

    /// Destroys a session: its card, log, items, and the blobs that no other session uses. Idempotent.
    ///
    /// If living forks lean on its log, the fork that left it last inherits the records up to there and stands in its place:
    /// the others now lean on the heir. What a fork shows does not change, nor does its seq. Blobs stay with their records. A fork that
    /// left before the purged session's own first record needs none of them: it now leans on that session's parent. Forks that were
    /// deleted and can be restored count as living.
    async fn purge(&self, key: &Key) -> Result<()>;

    /// A conditional purge: only if the session is still the one that began at `created_at` and its log still ends at `seq`; else
    /// [`Error::Conflict`], and nothing is changed. A session that does not exist is no conflict. The check and the purge are one
    /// atomic step: a commit that was acknowledged in between is never destroyed.
    async fn purge_at(&self, key: &Key, created_at: Timestamp, seq: Seq) -> Result<()>;

    /// Puts an item on a shelf, in place of one with the same key. `keep` bounds the shelf: beyond it, the least recently used
    /// items go (never the new one); while several are put at once it may hold a few more. NUL characters are refused. A shelf of a session that does not exist takes nothing ([`Error::NotFound`]).
    async fn put(&self, shelf: &Shelf, item: &Item, keep: Option<usize>) -> Result<()>;

    /// An item by its key. `used` marks it as used at that time (and counts it), and the item is given with that mark; the mark may be
    /// lost in a crash.
    async fn get(&self, shelf: &Shelf, key: &str, used: Option<Timestamp>) -> Result<Option<Item>>;

    /// The items of a shelf by key, after a key (exclusive), at most `limit`.
    async fn items(&self, shelf: &Shelf, after: Option<&str>, limit: usize) -> Result<Vec<Item>>;

    /// Removes an item; whether it was there.
    async fn remove(&self, shelf: &Shelf, key: &str) -> Result<bool>;

    /// Items of a shelf whose text has any word of `text`, best first, at most `limit`. Words are compared without case; a store may
    /// look at the first 64 words only, and may ignore accents.
    async fn search(&self, shelf: &Shelf, text: &str, limit: usize) -> Result<Vec<Hit>>;

    /// Removes items of any shelf whose time is over (`expires_at` is `now` or earlier), at most `limit`; how many.
    async fn expire(&self, now: Timestamp, limit: usize) -> Result<usize>;

    /// Removes all shelves of an owner, and sees to it that no byte of anything removed or purged before is left in a file of
    /// the store (for PostgreSQL see `docs/storage.md`).
    async fn clear(&self, tenant: &Tenant, owner: &Owner) -> Result<()>;

    /// Sees to it that what was removed from an owner's shelves is in no file any more, as far as that can be done at once: only
    /// [`Store::clear`] writes everything anew.
    async fn wipe(&self, tenant: &Tenant, owner: &Owner) -> Result<()>;

    /// The bytes of a blob.
    async fn blob(&self, tenant: &Tenant, id: &BlobId) -> Result<Option<Arc<[u8]>>>;

    /// Looks for what only the store can see: things that belong to nobody, damage below the records, files that are not its own. What
    /// sessions mean is not looked at. First removes those of `remove` that do belong to nobody; others stay. Gives what is found
    /// after that, at most [`MAX_FINDINGS`] of a kind.
    async fn check(&self, remove: &[Orphan]) -> Result<Vec<Finding>>;
}

/// How many calls a store can serve at once. More may be made: they wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Concurrency {
    /// Reads.
    pub reads: usize,
    /// What a write takes.
    pub writes: Writes,
}

/// What a write takes of a store's capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// Nothing that reads need: writes are done by a writer of its own.
    Apart,
    /// As much as a read does, such as a connection of the same pool.
    AsReads,
}

/// What a glance at a card shows.
#[derive(Clone, Debug, PartialEq)]
pub enum Glance {
    /// The card that was known.
    Same,
    /// The card as it is now, if there is one.
    Now(Option<Box<Head>>),
}

/// One atomic step. Which session it is for is in its head.
#[derive(Clone, Debug)]
pub struct Commit {
    /// Where the log must end for the step to be taken; `None`: the session must not exist.
    pub base: Option<LogEnd>,
    /// What happened.
    pub records: Vec<Record>,
    /// The index card after it.
    pub head: Head,
    /// Items for the session's own shelves, by the shelf's name.
    pub items: Vec<(String, Item)>,
    /// Media that the records use.
    pub blobs: Vec<Blob>,
    /// The messages that this step cuts off, for stores that keep them in a file for people as well.
    pub cut: Vec<Message>,
}

impl Commit {
    /// A step of records only.
    pub fn new(base: Option<LogEnd>, records: Vec<Record>, head: Head) -> Self {
        Self { base, records, head, items: Vec::new(), blobs: Vec::new(), cut: Vec::new() }
    }

    /// The first record of the step, for blobs that are used from there on.
    pub(crate) fn first(&self) -> Seq {
        self.records.first().map_or(self.head.seq, |r| r.seq)
    }

    /// Checks what every store relies on.
    pub(crate) fn check(&self) -> Result<()> {
        let before = self.base.map_or(self.head.first.saturating_sub(1), |end| end.seq);
        let last = self.records.last().map_or(before, |r| r.seq);
        let contiguous = self.records.iter().zip(before + 1..).all(|(r, want)| r.seq == want);
        if !contiguous || last != self.head.seq || (self.base.is_none() && self.records.is_empty()) {
            return Err(Error::invalid(
                "commit",
                "records must follow the base without a hole and end at the head's seq",
            ));
        }
        let parent = self.head.parent.as_ref().filter(|_| self.base.is_none());
        if parent.is_some_and(|p| p.seq + 1 != self.head.first) {
            return Err(Error::invalid("commit", "a fork's first record must follow the one where it left its parent"));
        }
        self.items.iter().try_for_each(|(_, item)| item.check())
    }
}

/// Something that was mended while a store was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    /// Which file.
    pub place: String,
    /// What was found and done.
    pub what: String,
}
