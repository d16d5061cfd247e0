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
const DIGEST_INTERVAL: usize = 64;

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
pub(super) fn to_exported(mut record: Record) -> Record {
    drop_lease(&mut record);
    if let Entry::Message(post) = &mut record.entry
        && !post.message.blob_refs().is_empty()
    {
        let raw = post.message.as_str();
        let mut text = String::new();
        let mut copied = 0;
        for blob_ref in post.message.blob_refs() {
            text.push_str(raw.get(copied..blob_ref.offset).unwrap_or_default());
            text.push_str(&marker(&blob_ref.id));
            copied = blob_ref.offset;
        }
        text.push_str(raw.get(copied..).unwrap_or_default());
        post.message = Message::trusted(text, post.message.blob_refs().to_vec());
    }
    record
}

/// The ids of media in a log that are not in its readable messages.
pub(super) fn media_outside_messages(log: &[Record], readable: &Session) -> Vec<BlobId> {
    let blob_ids = |m: &Message| m.blob_refs().iter().map(|c| c.id).collect::<Vec<_>>();
    let in_messages: HashSet<BlobId> = readable.messages.iter().flat_map(|m| blob_ids(&m.message)).collect();
    let mut outside: Vec<BlobId> = Vec::new();
    for record in log {
        if let Entry::Message(post) = &record.entry {
            outside.extend(blob_ids(&post.message).into_iter().filter(|id| !in_messages.contains(id)));
        }
    }
    outside.sort();
    outside.dedup();
    outside
}

/// The state of rebuilding a log from an export.
struct LogRebuild<'a> {
    tenure: &'a Tenure,
    principal: &'a Principal,
    id: &'a SessionId,
    now: Timestamp,
    media: HashMap<BlobId, Arc<[u8]>>,
    blobs: BTreeMap<BlobId, Blob>,
    session: Option<Session>,
    chain: ChainCheck,
    messages: usize,
    digests: Vec<LogDigest>,
    records: Vec<Record>,
}

impl Tenure {
    /// Rebuilds the records of an export for an id. Returns the records and the media that they need.
    pub(super) fn rebuild(
        &self,
        principal: &Principal,
        id: &SessionId,
        export: &Export,
        origin: Origin,
        now: Timestamp,
    ) -> Result<(Vec<Record>, Vec<Blob>)> {
        let (readable, blobs) = self.engine.detach(&export.messages)?;
        let mut media: HashMap<BlobId, Arc<[u8]>> = blobs.into_iter().map(|b| (b.id, b.bytes)).collect();
        for (id, data) in &export.blobs {
            let invalid = |reason: &str| Error::invalid(format!("blobs.{id}"), reason);
            let bytes = STANDARD.decode(data).map_err(|_| invalid("a blob must be base64 text"))?;
            if BlobId::of(&bytes) != *id {
                return Err(invalid("the content of the blob does not match its hash"));
            }
            media.insert(*id, bytes.into());
        }
        let mut rebuild = LogRebuild {
            tenure: self,
            principal,
            id,
            now,
            media,
            blobs: BTreeMap::new(),
            session: None,
            chain: ChainCheck::default(),
            messages: 0,
            digests: vec![LogDigest::default()],
            records: Vec::with_capacity(export.log.len() + 4),
        };
        let own_created = export.log.iter().rposition(|r| matches!(r.entry, Entry::Created(_)));
        for (i, record) in export.log.iter().enumerate() {
            let mut record = record.clone();
            if let Entry::Created(created) = &mut record.entry {
                created.origin = Some(Origin { upto: export.log.len() as Seq, ..origin.clone() });
                // The last `created` entry is the session's own; the others are those of its ancestors.
                if Some(i) == own_created {
                    created.assistant = export.assistant.clone();
                    created.thread = export.thread.clone();
                    record.at = unique_creation_time(record.at, now);
                }
            }
            rebuild.append_validated(i, record)?;
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
pub(super) fn unique_creation_time(at: Timestamp, now: Timestamp) -> Timestamp {
    let micros = at.as_microsecond().div_euclid(1000) * 1000 + now.as_microsecond().rem_euclid(1000);
    Timestamp::from_microsecond(micros).unwrap_or(at)
}

impl LogRebuild<'_> {
    /// The head so far.
    fn head(&self) -> Option<&Head> {
        self.session.as_ref().map(Session::head)
    }

    /// Validates a record and appends it.
    fn append_validated(&mut self, i: usize, mut record: Record) -> Result<()> {
        let invalid = |field: &str, reason: &str| Error::invalid(format!("log[{i}].{field}"), reason);
        if record.seq != i as Seq + 1 {
            return Err(invalid("seq", "records are numbered 1, 2, 3 … without gaps"));
        }
        if record.at > self.now.saturating_add(MAX_CLOCK_DIFFERENCE).unwrap_or(Timestamp::MAX) {
            return Err(invalid("at", "the time is in the future"));
        }
        let seq = record.seq;
        let before = |other: Seq| other < seq;
        match &mut record.entry {
            Entry::Created(created) => {
                created.user = self.principal.user.clone();
                created.metadata.remove(DECISIONS);
                self.tenure.engine.check_info(created)?;
                match (&mut created.parent, self.head()) {
                    (None, None) => created.decisions = None,
                    (Some(parent), Some(head)) if parent.seq + 1 == seq => {
                        parent.digest = head.digest.clone();
                        created.decisions = head.decisions;
                        if let Some(decisions) = head.info.metadata.get(DECISIONS) {
                            created.metadata.insert(DECISIONS.to_owned(), decisions.clone());
                        }
                    }
                    (Some(_), None) => return Err(invalid("entry.created.parent", "the first record has no parent")),
                    (None, Some(_)) => {
                        return Err(invalid(
                            "entry",
                            "only the first record, or the first record of a fork (with `parent`), may be `created`",
                        ));
                    }
                    _ => {
                        return Err(invalid(
                            "entry.created.parent.seq",
                            "`parent.seq` must be the number of the record before this one",
                        ));
                    }
                }
            }
            _ if self.session.is_none() => return Err(invalid("entry", "the first record must be `created`")),
            Entry::Message(post) => {
                if post.replies_to.is_some_and(|to| !before(to)) {
                    return Err(invalid(
                        "entry.message.replies_to",
                        "the value must be the number of an earlier record",
                    ));
                }
                *post = MessageEntry { message: self.message(i, &post.message)?, ..post.clone() };
            }
            Entry::Rewound(rewound) => {
                if !before(rewound.to) {
                    return Err(invalid("entry.rewound.to", "the value must be the number of an earlier record"));
                }
                rewound.digest = self.digest_at(rewound.to);
            }
            Entry::Compacted { upto, summary } => {
                if !before(*upto) {
                    return Err(invalid("entry.compacted.upto", "the value must be the number of an earlier record"));
                }
                if let Some(message) = summary {
                    let parsed = Message::parse(message.as_str());
                    *message = parsed.map_err(|e| invalid("entry.compacted.summary", &e.to_string()))?;
                }
            }
            Entry::Info(change) => {
                change.metadata.remove(DECISIONS);
                if let crate::types::entry::Patch::Set(model) = &change.model
                    && let Err(reason) = check_text(model)
                {
                    return Err(invalid("entry.info.model", reason));
                }
            }
            // A lease of another installation is not valid here.
            Entry::RunStarted { .. } | Entry::RunClaimed { .. } => drop_lease(&mut record),
            Entry::ReviewOpened(opened) => {
                if opened.review.seq().is_some_and(|s| s != seq) {
                    return Err(invalid(
                        "entry.review_opened.review",
                        "the review id must contain the number of the record that opens it",
                    ));
                }
                self.rename_review(&mut opened.review);
            }
            Entry::ReviewClaimed { review, .. } => self.rename_review(review),
            Entry::ReviewDecided(decided) => self.rename_review(&mut decided.review),
            Entry::Checkpoint(_) | Entry::Status { .. } | Entry::ToolStarted { .. } | Entry::RunEnded { .. } => {}
        }
        let max = self.tenure.limits().max_message_bytes;
        if !matches!(record.entry, Entry::Message(_)) && record.entry.encode().len() > max {
            return Err(Error::TooLarge { subject: format!("log[{i}]"), limit: "max_message_bytes", max: max as u64 });
        }
        if let (_, Some(reason)) = self.chain.check_record(self.id, &record) {
            return Err(invalid("entry.review_decided.previous", &reason));
        }
        self.push(record)
    }

    /// Appends a validated record, and applies it to the session.
    fn push(&mut self, record: Record) -> Result<()> {
        match &mut self.session {
            Some(session) => drop(session.apply(&record)),
            None => {
                let head = Head::begin(&self.principal.key(self.id), &record);
                let head = head.ok_or_else(|| Error::invalid("log[0].entry", "the first record must be `created`"))?;
                self.session = Some(Session::empty(head));
            }
        }
        if let Some(session) = &self.session {
            let count = session.messages.len();
            self.digests.truncate(count / DIGEST_INTERVAL + 1);
            if count.is_multiple_of(DIGEST_INTERVAL) && count / DIGEST_INTERVAL == self.digests.len() {
                self.digests.push(session.head().digest.clone());
            }
        }
        self.records.push(record);
        Ok(())
    }

    /// Renames a review: review ids contain the session id, and reviews are found by it.
    fn rename_review(&self, review: &mut ReviewId) {
        if let (Some(seq), Some(_)) = (review.seq(), review.session()) {
            *review = ReviewId::of(self.id, seq);
        }
    }

    /// Converts a message to its stored form, as if a client sent it now: its media are inserted,
    /// it is validated, and the media are replaced by blob references.
    fn message(&mut self, i: usize, message: &Message) -> Result<Message> {
        let location = format!("log[{i}].entry.message");
        let limits = self.tenure.limits();
        self.messages += 1;
        if self.messages > limits.max_messages {
            let description = "the log's list of messages".to_owned();
            return Err(Error::TooLarge {
                subject: description,
                limit: "max_messages",
                max: limits.max_messages as u64,
            });
        }
        let size = message.blob_refs().iter().map(|c| self.media.get(&c.id).map_or(0, |b| b.len() / 3 * 4));
        if message.as_str().len() + size.sum::<usize>() > limits.max_message_bytes {
            return Err(Error::TooLarge {
                subject: location,
                limit: "max_message_bytes",
                max: limits.max_message_bytes as u64,
            });
        }
        let mut full = String::new();
        let mut rest = message.as_str();
        for blob_ref in message.blob_refs() {
            let invalid =
                |reason: &str| Error::invalid(format!("{location}.blob_refs"), format!("{reason} {}", blob_ref.id));
            let (before, after) =
                rest.split_once(&marker(&blob_ref.id)).ok_or_else(|| invalid("the body has no marker for blob"))?;
            let bytes = self.media.get(&blob_ref.id).ok_or_else(|| invalid("the export does not contain blob"))?;
            full.push_str(before);
            STANDARD.encode_string(bytes, &mut full);
            rest = after;
        }
        full.push_str(rest);
        let full = Message::parse(&full)
            .map_err(|e| crate::session::transfer::export::prefix_param(&format!("{location}.body"), e))?;
        let (message, blobs) = full.detach();
        self.blobs.extend(blobs.into_iter().map(|b| (b.id, b)));
        Ok(message)
    }

    /// The log digest of the messages up to a record.
    fn digest_at(&self, seq: Seq) -> LogDigest {
        let Some(session) = &self.session else { return LogDigest::default() };
        let position = session.messages.partition_point(|m| m.seq <= seq);
        let nearest = (position / DIGEST_INTERVAL).min(self.digests.len() - 1);
        let mut digest = self.digests[nearest].clone();
        session.messages[nearest * DIGEST_INTERVAL..position].iter().for_each(|m| digest.advance(&m.message));
        digest
    }

    /// Checks that the readable part of an export agrees with its log.
    fn compare(&self, export: &Export, readable: &[Message]) -> Result<()> {
        let Some(session) = &self.session else { return Err(Error::invalid("log", "the log contains no record")) };
        // Another program may have reformatted the JSON.
        let same = |a: &Message, b: &Message| {
            let media = |m: &Message| m.blob_refs().iter().map(|c| c.id).collect::<Vec<_>>();
            a == b || (media(a) == media(b) && a.to_value() == b.to_value())
        };
        let differs = session.messages.iter().zip(readable).position(|(a, b)| !same(&a.message, b));
        if let Some(i) = differs {
            return Err(Error::invalid(
                format!("messages[{i}]"),
                "the message differs from the one at this position in `log`",
            ));
        }
        if session.messages.len() != readable.len() {
            let reason =
                format!("`messages` has {} messages, but `log` has {}", readable.len(), session.messages.len());
            return Err(Error::invalid("messages", reason));
        }
        match export.metadata.get(DECISIONS) {
            Some(given) if Some(given) != session.head().info.metadata.get(DECISIONS) => {
                let reason = "the decisions differ from those in `log`";
                Err(Error::invalid(format!("metadata.{DECISIONS}"), reason))
            }
            _ => Ok(()),
        }
    }

    /// Ends what cannot continue here (runs, reviews, expiry), and changes the title, tags, model
    /// and metadata to those of the export.
    fn finish(&mut self, export: &Export) -> Result<()> {
        let Some(head) = self.head().cloned() else { return Ok(()) };
        let reason = || Some("imported".to_owned());
        // Waits for its run, which ends here.
        let waits_for_run = !head.reviews.is_empty() || head.paused_until().is_some();
        if let Some(run) = head.run {
            let error = Some("the run was cancelled because the session was imported".to_owned());
            let code = Some("cancelled".to_owned());
            self.append(Entry::RunEnded { run, outcome: RunOutcome::Cancelled, error, code })?;
        }
        let idle = |rebuild: &Self| rebuild.head().is_some_and(|h| h.reviews.is_empty());
        if head.status == Status::Paused && waits_for_run && idle(self) {
            self.append(Entry::Status { to: Status::Active, reason: reason(), until: None })?;
        }
        if let Some(head) = self.head().cloned()
            && !self.tenure.engine.status_of(&head).is_live()
        {
            if head.status.is_live() {
                self.append(Entry::Status { to: Status::Expired, reason: None, until: None })?;
            }
            self.append(Entry::Status { to: Status::Active, reason: reason(), until: None })?;
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
