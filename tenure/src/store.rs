//! The contract of a store, and the way to open one.

use crate::error::{Error, Result};
use crate::types::blob::{Blob, BlobId};
use crate::types::digest::VisibleHash;
use crate::types::entry::Record;
use crate::types::head::{Head, LogEnd, Reviewing, field_label, fold_case, origin_label, tag_label};
use crate::types::id::{Key, Seq, SessionId, Tenant, User};
use crate::types::message::Message;
use crate::types::status::Status;
use async_trait::async_trait;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{fmt, sync::Arc};
use tokio::sync::broadcast;

mod finding;
mod jsonl;
mod mem_index;
mod memory;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

pub use finding::{Cure, Finding, MAX_FINDINGS, Orphan};
pub use jsonl::JsonlStore;
pub use memory::MemoryStore;
#[cfg(feature = "postgres")]
pub use postgres::PostgresStore;
#[cfg(feature = "sqlite")]
pub use sqlite::SqliteStore;

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

/// Index cards that were found with bounded work.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeadPage {
    /// The cards, newest first.
    pub heads: Vec<Head>,
    /// The last card that was looked at, if the page ended there and not because of its limit or because there are no more.
    pub stopped: Option<Cursor>,
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

/// Which records.
#[derive(Clone, Debug)]
pub struct Range {
    /// Only records after this one.
    pub after: Seq,
    /// Only records up to this one.
    pub upto: Seq,
    /// From which end.
    pub order: Direction,
    /// At most so many.
    pub limit: usize,
}

impl Range {
    /// All records after one, oldest first.
    pub fn after(seq: Seq) -> Self {
        Self { after: seq, upto: Seq::MAX, order: Direction::Forward, limit: usize::MAX }
    }

    /// The last records up to one, newest first.
    pub fn back_from(upto: Seq, limit: usize) -> Self {
        Self { after: 0, upto, order: Direction::Backward, limit }
    }
}

/// Which end comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Oldest first.
    Forward,
    /// Newest first.
    Backward,
}

/// Whose sessions a query looks at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Those of one user.
    User(Tenant, User),
    /// Those of a tenant.
    Tenant(Tenant),
    /// All: for the sweep and for taking over runs only.
    Everyone,
}

/// The order of index cards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Last active first; equal times by session id, descending.
    #[default]
    Newest,
    /// The same, the other way round: longest idle first (without a cursor).
    Oldest,
    /// First due first (only with `due_before`, and without a cursor).
    Due,
}

/// Which sessions. All conditions must hold.
#[derive(Clone, Debug)]
pub struct Query {
    /// Whose.
    pub whose: Whose,
    /// Of which assistant.
    pub assistant: Option<String>,
    /// Of which chat thread.
    pub thread: Option<String>,
    /// In one of these states; empty: any.
    pub status: Vec<Status>,
    /// Created at or after.
    pub created_after: Option<Timestamp>,
    /// Created before.
    pub created_before: Option<Timestamp>,
    /// With all of these tags.
    pub tags: Vec<String>,
    /// With all of these metadata fields (top level, plain values).
    pub metadata: Vec<(String, Value)>,
    /// With this text in the title, whatever its case.
    pub title: Option<String>,
    /// Having to do with people in this way.
    pub reviewing: Option<Reviewing>,
    /// Imported from the export with this hash ([`Origin::export`](crate::Origin::export)).
    pub origin: Option<String>,
    /// Leaning on this session.
    pub parent: Option<SessionId>,
    /// With one of these conversations.
    pub hashes: Vec<VisibleHash>,
    /// With one of these match keys ([`Mark::match_keys`](crate::Mark::match_keys)); only with [`Whose::User`].
    pub matches: Vec<VisibleHash>,
    /// Due before.
    pub due_before: Option<Timestamp>,
    /// With a lease that ended before.
    pub lease_before: Option<Timestamp>,
    /// In which order.
    pub order: Order,
    /// After the session this cursor names.
    pub cursor: Option<Cursor>,
    /// Leaving out the first so many.
    pub offset: usize,
    /// At most so many.
    pub limit: usize,
}

impl Query {
    /// Everything of somebody, newest first.
    pub fn new(whose: Whose, limit: usize) -> Self {
        Self {
            whose,
            limit,
            assistant: None,
            thread: None,
            status: Vec::new(),
            created_after: None,
            created_before: None,
            tags: Vec::new(),
            metadata: Vec::new(),
            title: None,
            reviewing: None,
            origin: None,
            parent: None,
            hashes: Vec::new(),
            matches: Vec::new(),
            due_before: None,
            lease_before: None,
            order: Order::Newest,
            cursor: None,
            offset: 0,
        }
    }

    /// The labels ([`Head::labels`]) that a session must have.
    pub fn labels(&self) -> Vec<String> {
        let tags = self.tags.iter().map(|t| tag_label(t));
        let fields = self.metadata.iter().map(|(k, v)| field_label(k, v));
        let origin = self.origin.iter().map(|export| origin_label(export));
        tags.chain(fields).chain(self.reviewing.iter().map(Reviewing::label)).chain(origin).collect()
    }

    /// What the folded title ([`Head::folded_title`]) must contain.
    pub fn folded_title(&self) -> Option<String> {
        self.title.as_deref().map(fold_case)
    }

    /// Whether a session matches, order, cursor, offset and limit apart: what every store's answer must agree with.
    pub fn matches(&self, head: &Head) -> bool {
        let has = |want: &Option<String>, got: &Option<String>| want.is_none() || want == got;
        let labels = self.labels();
        let labelled = || {
            let have = head.labels();
            labels.iter().all(|l| have.contains(l))
        };
        (match &self.whose {
            Whose::User(t, u) => head.tenant == *t && head.user == *u,
            Whose::Tenant(t) => head.tenant == *t,
            Whose::Everyone => true,
        }) && has(&self.assistant, &head.assistant)
            && has(&self.thread, &head.thread)
            && (self.status.is_empty() || self.status.contains(&head.status))
            && self.created_after.is_none_or(|t| head.info.created_at >= t)
            && self.created_before.is_none_or(|t| head.info.created_at < t)
            && (labels.is_empty() || labelled())
            && self.folded_title().is_none_or(|t| head.folded_title().contains(&t))
            && self.parent.as_ref().is_none_or(|p| head.parent.as_ref().is_some_and(|h| h.session == *p))
            && (self.hashes.is_empty() || self.hashes.contains(&head.mark.hash))
            && (self.matches.is_empty() || head.mark.match_keys().iter().any(|key| self.matches.contains(key)))
            && self.due_before.is_none_or(|t| head.due_at.is_some_and(|d| d < t))
            && self.lease_before.is_none_or(|t| head.lease.as_ref().is_some_and(|l| l.until < t))
    }
}

/// A place in a list of sessions, newest first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cursor {
    /// When the session was last active.
    pub active_at: Timestamp,
    /// Which session.
    pub session: SessionId,
}

impl Cursor {
    /// The place after a session.
    pub fn of(head: &Head) -> Self {
        Self { active_at: head.active_at, session: head.info.session_id.clone() }
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}~{}", self.active_at.as_microsecond(), self.session)
    }
}

impl std::str::FromStr for Cursor {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let wrong = || Error::invalid("cursor", "not a cursor; use the one that came with the page before");
        let (at, session) = s.split_once('~').ok_or_else(wrong)?;
        let at = at.parse().ok().and_then(|at| Timestamp::from_microsecond(at).ok()).ok_or_else(wrong)?;
        Ok(Self { active_at: at, session: SessionId::new(session).map_err(|_| wrong())? })
    }
}

/// Whose shelf.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// A session's: it goes with the session.
    Session(SessionId),
    /// A user's: it goes when the user is erased.
    User(User),
    /// A group's.
    Group(String),
    /// The tenant's.
    Tenant,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::Session(id) => write!(f, "session/{id}"),
            Owner::User(user) => write!(f, "user/{user}"),
            Owner::Group(group) => write!(f, "group/{group}"),
            Owner::Tenant => f.write_str("tenant"),
        }
    }
}

/// A named shelf of items.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shelf {
    /// Whose data.
    pub tenant: Tenant,
    /// Whose shelf.
    pub owner: Owner,
    /// What is on it, such as `cache`.
    pub name: String,
}

/// A keyed value with use and expiry times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Item {
    /// Its key on the shelf.
    pub key: String,
    /// The value, JSON text.
    pub value: String,
    /// What it can be found by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// When it was put there.
    pub created_at: Timestamp,
    /// When it was last used.
    pub used_at: Timestamp,
    /// How often it was used.
    pub uses: u64,
    /// When its time is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
}

impl Item {
    /// Checks what every store relies on: no NUL in it, which PostgreSQL can not keep.
    pub(crate) fn check(&self) -> Result<()> {
        let nul = |s: &str| s.contains('\0');
        match nul(&self.key) || nul(&self.value) || self.text.as_deref().is_some_and(nul) {
            true => Err(Error::invalid("item", "an item's key, value and text must be free of NUL characters")),
            false => Ok(()),
        }
    }
}

/// An item that a search found; a higher score is a better match.
#[derive(Clone, Debug, PartialEq)]
pub struct Hit {
    /// The item.
    pub item: Item,
    /// How good it is, comparable within one answer only.
    pub score: f64,
}

/// Something that was mended while a store was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    /// Which file.
    pub place: String,
    /// What was found and done.
    pub what: String,
}

/// Opens a store by its URL: `memory:`, `jsonl:DIR`, `sqlite:FILE` or `postgres://…`. Migrations run here. What had to be mended
/// is reported.
pub async fn open(url: &str) -> Result<(Arc<dyn Store>, Vec<Repair>)> {
    let none = Vec::new();
    match url.split_once(':') {
        Some(("memory", _)) => Ok((Arc::new(MemoryStore::new()), none)),
        Some(("jsonl", dir)) if !dir.is_empty() => {
            let (store, repairs) = JsonlStore::open(dir).await?;
            Ok((Arc::new(store), repairs))
        }
        #[cfg(feature = "sqlite")]
        Some(("sqlite", file)) if !file.is_empty() => Ok((Arc::new(SqliteStore::open(file).await?), none)),
        #[cfg(feature = "postgres")]
        Some(("postgres" | "postgresql", _)) => Ok((Arc::new(PostgresStore::open(url).await?), none)),
        #[cfg(not(all(feature = "sqlite", feature = "postgres")))]
        Some((scheme @ ("sqlite" | "postgres"), rest)) if !rest.is_empty() => Err(Error::invalid(
            "store",
            format!("this build has no {scheme} store; build it with the feature `{scheme}`"),
        )),
        _ => {
            let known = "memory: | jsonl:DIR | sqlite:FILE | postgres://USER@HOST/DATABASE";
            Err(Error::invalid("store", format!("{:?} is not a store; use {known}", redacted(url))))
        }
    }
}

/// The format of what is stored at a URL, which is not changed; `None` if nothing is there yet.
pub async fn format(url: &str) -> Result<Option<u32>> {
    match url.split_once(':') {
        Some(("jsonl", dir)) if !dir.is_empty() => JsonlStore::format(dir),
        #[cfg(feature = "sqlite")]
        Some(("sqlite", file)) if !file.is_empty() => SqliteStore::format(file).await,
        #[cfg(feature = "postgres")]
        Some(("postgres" | "postgresql", _)) => PostgresStore::format(url).await,
        // Nothing lasts there; or it is no store, which opening it says better.
        _ => Ok(None),
    }
}

/// Query parameters of URLs that are never secret.
const PUBLIC_PARAMETERS: [&str; 13] = [
    "application_name",
    "channel_binding",
    "connect_timeout",
    "dbname",
    "host",
    "load_balance_hosts",
    "pool",
    "port",
    "prepare",
    "retry",
    "schema",
    "sslmode",
    "target_session_attrs",
];

/// A URL without its secrets, for messages and logs: the password, and the value of every query parameter that could be one.
pub fn redacted(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let (place, query) = rest.split_once(['?', '#']).unwrap_or((rest, ""));
    let (user, place) = match place.rsplit_once('@') {
        Some((who, place)) => (format!("{}:***@", who.split(':').next().unwrap_or_default()), place),
        // Perhaps a password with a `?` in it.
        None if query.contains('@') => return format!("{scheme}://***"),
        None => (String::new(), place),
    };
    let shown = |pair: &str| match pair.split_once('=') {
        Some((name, value)) if PUBLIC_PARAMETERS.contains(&name) => format!("{name}={value}"),
        Some((name, _)) => format!("{name}=***"),
        None => "***".to_owned(),
    };
    match query.is_empty() {
        true => format!("{scheme}://{user}{place}"),
        false => format!("{scheme}://{user}{place}?{}", query.split('&').map(shown).collect::<Vec<_>>().join("&")),
    }
}

#[cfg(test)]
mod tests {
    use super::redacted;

    #[test]
    fn a_url_is_shown_without_its_secrets() {
        for (url, expected) in [
            ("memory:", "memory:"),
            ("sqlite:a.db", "sqlite:a.db"),
            ("postgres://me:secret@db/x", "postgres://me:***@db/x"),
            ("postgres://me:se/cr@et@db/x", "postgres://me:***@db/x"),
            ("postgres://me:sec?ret@db/x", "postgres://***"),
            ("postgres://db/x?user=me&password=secret&pool=4", "postgres://db/x?user=***&password=***&pool=4"),
            ("https://hook.example/a?token=secret#secret", "https://hook.example/a?token=***"),
            ("https://hook.example/a?secret", "https://hook.example/a?***"),
            ("https://hook.example/a?x=1@secret", "https://***"),
        ] {
            assert_eq!(redacted(url), expected, "{url}");
        }
    }
}
