//! The log of an export: how it is serialized, and how it is rebuilt under another id.
//!
//! An import is untrusted input: every record is validated, derived data is computed again, and
//! nothing is imported that grants rights (owners, leases) (D-090).

use crate::rules::decision_chain::ChainCheck;
use crate::rules::session::Session;
use crate::session::transfer::export::Export;
use crate::tenure::Tenure;
use crate::types::blob::{Blob, BlobId};
use crate::types::digest::LogDigest;
use crate::types::entry::{Entry, LeaseClaim, MessageEntry, Origin, Record, RunOutcome};
use crate::types::error::{Error, Result};
use crate::types::head::{DECISIONS, Head};
use crate::types::id::{Principal, ReviewId, Seq, SessionId, check_text};
use crate::types::message::Message;
use crate::types::status::Status;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::{SignedDuration, Timestamp};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// The maximum clock difference between two installations.
const MAX_CLOCK_DIFFERENCE: SignedDuration = SignedDuration::from_hours(24);

/// The number of messages between stored digests, so that computing the digest of a rewind does not
/// start at the first message.
const MARK_EVERY: usize = 64;

/// The marker that stands for media in the text of an exported message. A byte offset would not
/// survive a program that reformats the JSON (D-091).
fn marker(id: &BlobId) -> String {
    format!("tenure-blob:{id}")
}

/// Removes the lease that a record grants. The record itself stays, so that sequence numbers do not change.
fn drop_lease(record: &mut Record) {
    match &mut record.entry {
        Entry::RunStarted { claim, .. } => *claim = None,
        Entry::RunClaimed { claim, .. } => *claim = LeaseClaim { node: String::new(), until: record.at },
        _ => {}
    }
}

/// A record as it is exported: without leases, and with markers in place of media.
pub(super) fn marked(mut record: Record) -> Record {
    drop_lease(&mut record);
    if let Entry::Message(post) = &mut record.entry
        && !post.message.cuts().is_empty()
    {
        let (raw, mut text, mut done) = (post.message.as_str(), String::new(), 0);
        for cut in post.message.cuts() {
            text.push_str(raw.get(done..cut.at).unwrap_or_default());
            text.push_str(&marker(&cut.id));
            done = cut.at;
        }
        text.push_str(raw.get(done..).unwrap_or_default());
        post.message = Message::trusted(text, post.message.cuts().to_vec());
    }
    record
}

/// The ids of media in a log that are not in its readable messages.
pub(super) fn media_beside(log: &[Record], readable: &Session) -> Vec<BlobId> {
    let cuts = |m: &Message| m.cuts().iter().map(|c| c.id).collect::<Vec<_>>();
    let inside: HashSet<BlobId> = readable.messages.iter().flat_map(|m| cuts(&m.message)).collect();
    let mut beside: Vec<BlobId> = Vec::new();
    for record in log {
        if let Entry::Message(post) = &record.entry {
            beside.extend(cuts(&post.message).into_iter().filter(|id| !inside.contains(id)));
        }
    }
    beside.sort();
    beside.dedup();
    beside
}

/// The state of rebuilding a log from an export.
struct LogRebuild<'a> {
    tenure: &'a Tenure,
    who: &'a Principal,
    id: &'a SessionId,
    now: Timestamp,
    media: HashMap<BlobId, Arc<[u8]>>,
    blobs: BTreeMap<BlobId, Blob>,
    session: Option<Session>,
    chain: ChainCheck,
    messages: usize,
    marks: Vec<LogDigest>,
    records: Vec<Record>,
}

impl Tenure {
    /// Rebuilds the records of an export for an id. Returns the records and the media that they need.
    pub(super) fn rebuild(
        &self,
        who: &Principal,
        id: &SessionId,
        export: &Export,
        origin: Origin,
        now: Timestamp,
    ) -> Result<(Vec<Record>, Vec<Blob>)> {
        let (readable, inside) = self.engine.detach(&export.messages)?;
        let mut media: HashMap<BlobId, Arc<[u8]>> = inside.into_iter().map(|b| (b.id, b.bytes)).collect();
        for (id, data) in &export.blobs {
            let wrong = |why: &str| Error::invalid(format!("blobs.{id}"), why);
            let bytes = STANDARD.decode(data).map_err(|_| wrong("a blob must be base64 text"))?;
            if BlobId::of(&bytes) != *id {
                return Err(wrong("the hash of the blob is another one than its id"));
            }
            media.insert(*id, bytes.into());
        }
        let mut rebuild = LogRebuild {
            tenure: self,
            who,
            id,
            now,
            media,
            blobs: BTreeMap::new(),
            session: None,
            chain: ChainCheck::default(),
            messages: 0,
            marks: vec![LogDigest::default()],
            records: Vec::with_capacity(export.log.len() + 4),
        };
        let own = export.log.iter().rposition(|r| matches!(r.entry, Entry::Created(_)));
        for (i, record) in export.log.iter().enumerate() {
            let mut record = record.clone();
            if let Entry::Created(created) = &mut record.entry {
                created.origin = Some(Origin { upto: export.log.len() as Seq, ..origin.clone() });
                // The last `created` entry is the session's own; the others are those of its ancestors.
                if Some(i) == own {
                    (created.assistant, created.thread) = (export.assistant.clone(), export.thread.clone());
                    record.at = distinct(record.at, now);
                }
            }
            rebuild.take(i, record)?;
        }
        rebuild.compare(export, &readable)?;
        rebuild.finish(export)?;
        let LogRebuild { records, blobs, .. } = rebuild;
        Ok((records, blobs.into_values().collect()))
    }
}

/// Makes the creation time of an imported session unique: a session that was purged and imported
/// again must not be mistaken for the purged one, and sessions are distinguished by their creation
/// time in microseconds. The milliseconds are preserved (D-092).
fn distinct(at: Timestamp, now: Timestamp) -> Timestamp {
    let micros = at.as_microsecond().div_euclid(1000) * 1000 + now.as_microsecond().rem_euclid(1000);
    Timestamp::from_microsecond(micros).unwrap_or(at)
}

impl LogRebuild<'_> {
    /// The head so far.
    fn head(&self) -> Option<&Head> {
        self.session.as_ref().map(Session::head)
    }

    /// Validates a record and appends it.
    fn take(&mut self, i: usize, mut record: Record) -> Result<()> {
        let wrong = |field: &str, why: &str| Error::invalid(format!("log[{i}].{field}"), why);
        if record.seq != i as Seq + 1 {
            return Err(wrong("seq", "records are numbered 1, 2, 3 … without gaps"));
        }
        if record.at > self.now.saturating_add(MAX_CLOCK_DIFFERENCE).unwrap_or(Timestamp::MAX) {
            return Err(wrong("at", "the time is in the future"));
        }
        let seq = record.seq;
        let before = |other: Seq| other < seq;
        match &mut record.entry {
            Entry::Created(created) => {
                created.user = self.who.user.clone();
                created.metadata.remove(DECISIONS);
                self.tenure.engine.check_info(created)?;
                match (&mut created.parent, self.head()) {
                    (None, None) => created.decisions = None,
                    (Some(parent), Some(head)) if parent.seq + 1 == seq => {
                        parent.mark = head.mark.clone();
                        created.decisions = head.decisions;
                        if let Some(decisions) = head.info.metadata.get(DECISIONS) {
                            created.metadata.insert(DECISIONS.to_owned(), decisions.clone());
                        }
                    }
                    (Some(_), None) => return Err(wrong("entry.created.parent", "the first record has no parent")),
                    (None, Some(_)) => return Err(wrong("entry", "a log is `created` once")),
                    _ => {
                        return Err(wrong(
                            "entry.created.parent.seq",
                            "a fork follows the record where it left its parent",
                        ));
                    }
                }
            }
            _ if self.session.is_none() => return Err(wrong("entry", "the first record must be `created`")),
            Entry::Message(post) => {
                if post.replies_to.is_some_and(|to| !before(to)) {
                    return Err(wrong("entry.message.replies_to", "it must name an earlier record"));
                }
                *post = MessageEntry { message: self.message(i, &post.message)?, ..post.clone() };
            }
            Entry::Rewound(rewound) => {
                if !before(rewound.to) {
                    return Err(wrong("entry.rewound.to", "it must name an earlier record"));
                }
                rewound.mark = self.mark_at(rewound.to);
            }
            Entry::Compacted { upto, summary } => {
                if !before(*upto) {
                    return Err(wrong("entry.compacted.upto", "it must name an earlier record"));
                }
                if let Some(message) = summary {
                    let parsed = Message::parse(message.as_str());
                    *message = parsed.map_err(|e| wrong("entry.compacted.summary", &e.to_string()))?;
                }
            }
            Entry::Info(change) => {
                change.metadata.remove(DECISIONS);
                if let crate::types::entry::Patch::Set(model) = &change.model
                    && let Err(why) = check_text(model)
                {
                    return Err(wrong("entry.info.model", why));
                }
            }
            // A lease of another installation is not valid here.
            Entry::RunStarted { .. } | Entry::RunClaimed { .. } => drop_lease(&mut record),
            Entry::ReviewOpened(opened) => {
                if opened.review.seq().is_some_and(|s| s != seq) {
                    return Err(wrong(
                        "entry.review_opened.review",
                        "a review is named after the record that opens it",
                    ));
                }
                self.rename(&mut opened.review);
            }
            Entry::ReviewClaimed { review, .. } => self.rename(review),
            Entry::ReviewDecided(decided) => self.rename(&mut decided.review),
            Entry::Checkpoint(_) | Entry::Status { .. } | Entry::ToolStarted { .. } | Entry::RunEnded { .. } => {}
        }
        let max = self.tenure.limits().max_message_bytes;
        if !matches!(record.entry, Entry::Message(_)) && record.entry.encode().len() > max {
            return Err(Error::TooLarge { what: format!("log[{i}]"), limit: "max_message_bytes", max: max as u64 });
        }
        if let (_, Some(why)) = self.chain.take(self.id, &record) {
            return Err(wrong("entry.review_decided.previous", &why));
        }
        self.push(record)
    }

    /// Appends a validated record, and applies it to the session.
    fn push(&mut self, record: Record) -> Result<()> {
        match &mut self.session {
            Some(session) => drop(session.apply(&record)),
            None => {
                let head = Head::begin(&self.who.key(self.id), &record);
                let head = head.ok_or_else(|| Error::invalid("log[0].entry", "the first record must be `created`"))?;
                self.session = Some(Session::empty(head));
            }
        }
        if let Some(session) = &self.session {
            let count = session.messages.len();
            self.marks.truncate(count / MARK_EVERY + 1);
            if count.is_multiple_of(MARK_EVERY) && count / MARK_EVERY == self.marks.len() {
                self.marks.push(session.mark.clone());
            }
        }
        self.records.push(record);
        Ok(())
    }

    /// Renames a review: review ids contain the session id, and reviews are found by it.
    fn rename(&self, review: &mut ReviewId) {
        if let (Some(seq), Some(_)) = (review.seq(), review.session()) {
            *review = ReviewId::of(self.id, seq);
        }
    }

    /// Converts a message to its stored form, as if a client sent it now: its media are inserted,
    /// it is validated, and the media are replaced by blob references.
    fn message(&mut self, i: usize, message: &Message) -> Result<Message> {
        let place = format!("log[{i}].entry.message");
        let limits = self.tenure.limits();
        self.messages += 1;
        if self.messages > limits.max_messages {
            let (what, max) = ("the log's list of messages".to_owned(), limits.max_messages as u64);
            return Err(Error::TooLarge { what, limit: "max_messages", max });
        }
        let size = message.cuts().iter().map(|c| self.media.get(&c.id).map_or(0, |b| b.len() / 3 * 4));
        if message.as_str().len() + size.sum::<usize>() > limits.max_message_bytes {
            return Err(Error::TooLarge {
                what: place,
                limit: "max_message_bytes",
                max: limits.max_message_bytes as u64,
            });
        }
        let (mut whole, mut rest) = (String::new(), message.as_str());
        for cut in message.cuts() {
            let wrong = |why: &str| Error::invalid(format!("{place}.cuts"), format!("{why} {}", cut.id));
            let (before, after) =
                rest.split_once(&marker(&cut.id)).ok_or_else(|| wrong("the body has no place for"))?;
            let bytes = self.media.get(&cut.id).ok_or_else(|| wrong("the export does not contain the blob"))?;
            whole.push_str(before);
            STANDARD.encode_string(bytes, &mut whole);
            rest = after;
        }
        whole.push_str(rest);
        let whole = Message::parse(&whole)
            .map_err(|e| crate::session::transfer::export::within(&format!("{place}.body"), e))?;
        let (message, blobs) = whole.detach();
        self.blobs.extend(blobs.into_iter().map(|b| (b.id, b)));
        Ok(message)
    }

    /// The log digest of the messages up to a record.
    fn mark_at(&self, seq: Seq) -> LogDigest {
        let Some(session) = &self.session else { return LogDigest::default() };
        let position = session.messages.partition_point(|m| m.seq <= seq);
        let known = (position / MARK_EVERY).min(self.marks.len() - 1);
        let mut mark = self.marks[known].clone();
        session.messages[known * MARK_EVERY..position].iter().for_each(|m| mark.advance(&m.message));
        mark
    }

    /// Checks that the readable part of an export agrees with its log.
    fn compare(&self, export: &Export, readable: &[Message]) -> Result<()> {
        let Some(session) = &self.session else { return Err(Error::invalid("log", "there is no record in it")) };
        // Another program may have reformatted the JSON.
        let same = |a: &Message, b: &Message| {
            let media = |m: &Message| m.cuts().iter().map(|c| c.id).collect::<Vec<_>>();
            a == b || (media(a) == media(b) && a.to_value() == b.to_value())
        };
        let differs = session.messages.iter().zip(readable).position(|(a, b)| !same(&a.message, b));
        if let Some(i) = differs {
            return Err(Error::invalid(format!("messages[{i}]"), "it is not the message that `log` has in its place"));
        }
        if session.messages.len() != readable.len() {
            let why = format!("there are {}, and `log` has {}", readable.len(), session.messages.len());
            return Err(Error::invalid("messages", why));
        }
        match export.metadata.get(DECISIONS) {
            Some(given) if Some(given) != session.info.metadata.get(DECISIONS) => {
                let why = "they are not the decisions that `log` has";
                Err(Error::invalid(format!("metadata.{DECISIONS}"), why))
            }
            _ => Ok(()),
        }
    }

    /// Ends what cannot continue here (runs, reviews, expiry), and changes the title, tags, model
    /// and metadata to those of the export.
    fn finish(&mut self, export: &Export) -> Result<()> {
        let Some(head) = self.head().cloned() else { return Ok(()) };
        let reason = || Some("imported".to_owned());
        let waits = !head.reviews.is_empty();
        if let Some(run) = head.run {
            let (error, code) = (Some("the session was imported elsewhere".to_owned()), Some("cancelled".to_owned()));
            self.append(Entry::RunEnded { run, outcome: RunOutcome::Cancelled, error, code })?;
        }
        let idle = |rebuild: &Self| rebuild.head().is_some_and(|h| h.reviews.is_empty());
        if head.status == Status::Paused && waits && idle(self) {
            self.append(Entry::Status { to: Status::Active, reason: reason() })?;
        }
        if let Some(head) = self.head().cloned()
            && !self.tenure.engine.status_of(&head).is_live()
        {
            if head.status.is_live() {
                self.append(Entry::Status { to: Status::Expired, reason: None })?;
            }
            self.append(Entry::Status { to: Status::Active, reason: reason() })?;
        }
        let change =
            self.head().map(|head| crate::session::transfer::export::difference(head, export)).unwrap_or_default();
        if change != Default::default() {
            self.append(Entry::info(change))?;
        }
        self.head().map_or(Ok(()), |head| self.tenure.engine.check_info_of(head))
    }

    /// Appends an entry with the time of the import.
    fn append(&mut self, entry: Entry) -> Result<()> {
        let seq = self.records.len() as Seq + 1;
        self.push(Record { seq, at: self.now, entry })
    }
}
