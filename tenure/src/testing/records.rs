//! Logs, items and blobs written directly to a store, and reading them back.

use crate::rules::session::Session;
use crate::store::contract::{Commit, Store};
use crate::store::item::{Item, Namespace, Owner};
use crate::store::query::{OwnerFilter, ReadDirection, RecordRange, SessionQuery};
use crate::types::blob::{Blob, BlobId};
use crate::types::entry::{Entry, Parent, Record, SessionCreated};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Seq, SessionId, SessionKey, Tenant};
use crate::types::message::Message;
use jiff::{SignedDuration, Timestamp};
use std::{fmt::Debug, sync::Arc};

/// A timestamp `seconds` after a fixed time, with odd microseconds to reveal stores that round.
pub fn timestamp(seconds: i64) -> Timestamp {
    Timestamp::from_microsecond(1_767_323_045_000_007 + seconds * 1_000_000).expect("test timestamps are in range")
}

/// The key of a session.
pub fn key(tenant: &str, session: &str) -> SessionKey {
    SessionKey { tenant: Tenant::new(tenant).unwrap(), session: SessionId::new(session).unwrap() }
}

/// The head derived from a log: from a session's own records, or from its complete log.
pub fn head_of(key: &SessionKey, records: &[Record]) -> Head {
    let session = Session::replay(key, records.iter().cloned()).expect("a log starts with `created`");
    session.head().clone()
}

/// A session that a test writes directly to a store, record by record.
#[derive(Clone, Debug)]
pub struct SessionLog {
    /// The key of the session.
    pub key: SessionKey,
    /// Records inherited from its parent.
    pub inherited: Vec<Record>,
    /// The session's own records.
    pub records: Vec<Record>,
    saved: usize,
}

impl SessionLog {
    /// A new session of the default tenant and user.
    pub fn new(id: &str) -> Self {
        Self::begin(key("default", id), SessionCreated::default(), timestamp(0))
    }

    /// A new session.
    pub fn begin(key: SessionKey, created: SessionCreated, at: Timestamp) -> Self {
        let created = Record { seq: 1, at, entry: Entry::created(created) };
        Self { key, inherited: Vec::new(), records: vec![created], saved: 0 }
    }

    /// A fork of this session after record `seq`.
    pub fn fork(&self, id: &str, seq: Seq) -> Self {
        let inherited: Vec<_> = self.full_log().into_iter().filter(|r| r.seq <= seq).collect();
        let digest = head_of(&self.key, &inherited).digest;
        let parent = Some(Parent { session: self.key.session.clone(), seq, digest });
        let entry = Entry::created(SessionCreated { parent, ..SessionCreated::default() });
        let records = vec![Record { seq: seq + 1, at: self.next_timestamp(), entry }];
        let key = SessionKey { session: SessionId::new(id).unwrap(), ..self.key.clone() };
        Self { key, inherited, records, saved: 0 }
    }

    /// The position of the last record.
    pub fn seq(&self) -> Seq {
        self.records.last().map_or(0, |r| r.seq)
    }

    /// The complete log: inherited and own records.
    pub fn full_log(&self) -> Vec<Record> {
        [&self.inherited[..], &self.records].concat()
    }

    /// The head of the session.
    pub fn head(&self) -> Head {
        head_of(&self.key, &self.records)
    }

    /// Appends a record, one second after the last one.
    pub fn push(&mut self, entry: Entry) -> &mut Self {
        self.push_at(self.next_timestamp(), entry)
    }

    /// Appends a record with a given time.
    pub fn push_at(&mut self, at: Timestamp, entry: Entry) -> &mut Self {
        self.records.push(Record { seq: self.seq() + 1, at, entry });
        self
    }

    /// Appends a user message.
    pub fn push_message(&mut self, text: &str) -> &mut Self {
        self.push(Entry::message(Message::user(text)))
    }

    /// The commit of all records that are not saved yet. They then count as saved.
    pub fn commit(&mut self) -> Commit {
        let base = (self.saved > 0).then(|| head_of(&self.key, &self.records[..self.saved]).end());
        let records = self.records[self.saved..].to_vec();
        self.saved = self.records.len();
        Commit::new(base, records, self.head())
    }

    /// Commits all records that are not saved yet.
    pub async fn save(&mut self, store: &dyn Store) {
        store.commit(&self.commit()).await.unwrap();
    }

    /// Commits all records that are not saved yet, together with a blob.
    pub async fn save_with(&mut self, store: &dyn Store, blob: &Blob) {
        let blobs = vec![blob.clone()];
        store.commit(&Commit { blobs, ..self.commit() }).await.unwrap();
    }

    fn next_timestamp(&self) -> Timestamp {
        self.records.last().map_or(timestamp(0), |r| r.at + SignedDuration::from_micros(1_000_001))
    }
}

/// Appends a user message to a stored session, retrying on conflicts with concurrent writers.
/// Returns the stored record.
pub async fn append_message(store: &dyn Store, key: &SessionKey, text: &str) -> Result<Record> {
    loop {
        let stored = store.head(key).await?;
        let mut head = stored.ok_or_else(|| Error::NotFound { session_id: key.session.clone() })?;
        let base = head.end();
        let at = head.info.updated_at + SignedDuration::from_micros(1);
        let record = Record { seq: base.seq + 1, at, entry: Entry::message(Message::user(text)) };
        head.apply(&record);
        match store.commit(&Commit::new(Some(base), vec![record.clone()], head)).await {
            Err(Error::Conflict { .. }) => tokio::task::yield_now().await,
            result => return result.map(|()| record),
        }
    }
}

/// Reads all records of a range, over as many pages as needed.
pub async fn read(store: &dyn Store, key: &SessionKey, range: &RecordRange) -> Vec<Record> {
    let mut range = range.clone();
    let mut records = Vec::new();
    loop {
        let page = store.records(key, &range).await.unwrap();
        assert!(
            page.len() <= range.limit,
            "the page has {} records, more than its limit of {}",
            page.len(),
            range.limit
        );
        // A page that makes no progress would cause an endless loop.
        let mut seqs = page.iter().map(|r| r.seq);
        let within = |seq: Seq| seq > range.after && seq <= range.upto;
        let ordered = match range.order {
            ReadDirection::Forward => page.is_sorted_by(|a, b| a.seq < b.seq),
            ReadDirection::Backward => page.is_sorted_by(|a, b| a.seq > b.seq),
        };
        assert!(ordered && seqs.all(within), "{key}: the records of {range:?} are out of order or out of range");
        range.limit -= page.len();
        match (page.last(), range.order) {
            (Some(last), ReadDirection::Forward) => range.after = last.seq,
            // There is no record before the first.
            (Some(last), ReadDirection::Backward) => range.upto = last.seq.saturating_sub(1),
            (None, _) => return records,
        }
        records.extend(page);
    }
}

/// Reads all records of a session's own log.
pub async fn read_all(store: &dyn Store, key: &SessionKey) -> Vec<Record> {
    read(store, key, &RecordRange::after(0)).await
}

/// Reads the complete log of a session: its own records and those of its ancestors.
pub async fn read_full_log(store: &dyn Store, key: &SessionKey) -> Vec<Record> {
    let mut key = key.clone();
    let mut upto = Seq::MAX;
    let mut parts = Vec::new();
    loop {
        assert!(parts.len() < 1000, "{key}: the ancestors form a cycle");
        let head =
            store.head(&key).await.unwrap().unwrap_or_else(|| panic!("{key} is missing, but a fork references it"));
        parts.push(read(store, &key, &RecordRange { upto, ..RecordRange::after(0) }).await);
        let Some(parent) = head.parent else { break };
        upto = upto.min(parent.seq);
        key.session = parent.session;
    }
    parts.into_iter().rev().flatten().collect()
}

/// A namespace of the default tenant.
pub fn namespace(owner: Owner, name: &str) -> Namespace {
    Namespace { tenant: Tenant::default(), owner, name: name.to_owned() }
}

/// A namespace of a session.
pub fn session_namespace(key: &SessionKey, name: &str) -> Namespace {
    Namespace { tenant: key.tenant.clone(), owner: Owner::Session(key.session.clone()), name: name.to_owned() }
}

/// An item created and last used at [`timestamp`]`(seconds)`.
pub fn item(key: &str, seconds: i64) -> Item {
    let (created_at, used_at) = (timestamp(seconds), timestamp(seconds));
    let value = format!(r#"{{"made": {seconds}}}"#);
    Item { key: key.to_owned(), value, created_at, used_at, uses: 0, expires_at: None }
}

/// A blob with these bytes.
pub fn blob(bytes: impl Into<Vec<u8>>) -> Blob {
    let bytes = bytes.into();
    Blob { id: BlobId::of(&bytes), bytes: bytes.into() }
}

/// A snapshot of a store's contents, for comparison.
#[derive(Debug, PartialEq)]
pub struct StoreState {
    /// The heads, in key order.
    pub heads: Vec<Head>,
    /// The log of each session.
    pub logs: Vec<Vec<Record>>,
    /// The items of the requested namespaces.
    pub items: Vec<Vec<Item>>,
    /// The bytes of the requested blobs in the tenant `default`.
    pub blobs: Vec<Option<Arc<[u8]>>>,
}

/// Takes a snapshot of all sessions, and of the given namespaces and blobs.
pub async fn state(store: &dyn Store, namespaces: &[Namespace], blobs: &[Blob]) -> StoreState {
    let mut heads = store.heads(&SessionQuery::new(OwnerFilter::AllTenants, usize::MAX)).await.unwrap();
    heads.sort_by_key(Head::key);
    let mut logs = Vec::new();
    let mut items = Vec::new();
    let mut contents = Vec::new();
    for head in &heads {
        logs.push(read_all(store, &head.key()).await);
    }
    for namespace in namespaces {
        items.push(store.items(namespace, None, usize::MAX).await.unwrap());
    }
    for blob in blobs {
        contents.push(store.blob(&Tenant::default(), &blob.id).await.unwrap());
    }
    StoreState { heads, logs, items, blobs: contents }
}

/// Asserts that a result is a given error.
#[track_caller]
pub fn assert_fails<T: Debug>(got: Result<T>, want: Error) {
    match got {
        Err(got) => assert_eq!(format!("{got:?}"), format!("{want:?}")),
        Ok(got) => panic!("expected the error {want:?}, got {got:?}"),
    }
}
