//! Log entries and records, and their serialized form.
//!
//! An entry is one JSON object with a single key, its kind:
//! `{"message":{"body":{"role":"user","content":"hi"}}}`. New kinds and fields may be added; the existing
//! ones stay readable forever.

use crate::types::blob::BlobRef;
use crate::types::decision_chain::DecisionChain;
use crate::types::decision_chain::DecisionHash;
use crate::types::decode_error::DecodeError;
use crate::types::digest::LogDigest;
use crate::types::error::{Error, Result};
use crate::types::id::{CheckpointLabel, ReviewId, RunId, Seq, SessionId, User};
use crate::types::message::{Message, SharedStr};
use crate::types::status::Status;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// One event in a session's log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Entry {
    /// The session was created, either empty or as a fork.
    Created(Box<SessionCreated>),
    /// A message was appended. Serialized and deserialized by hand, so that the text of the message is
    /// preserved byte for byte.
    #[serde(skip)]
    Message(MessageEntry),
    /// A checkpoint was set.
    Checkpoint(CheckpointEntry),
    /// All messages after `to` were discarded from the conversation. They stay in the log.
    Rewound(RewindEntry),
    /// Model, title, tags or metadata changed.
    Info(Box<SessionPatch>),
    /// The status of the session changed.
    Status {
        /// The new status.
        to: Status,
        /// A human-readable reason.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
        /// For a session that is paused until a time: when it continues by itself, and its run with it
        /// (D-136).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        until: Option<Timestamp>,
    },
    /// A run started.
    RunStarted {
        /// The id of the run.
        run: RunId,
        /// The lease of the node that executes the run.
        #[serde(flatten)]
        claim: Option<LeaseClaim>,
        /// Parameters of the run, such as its model and options.
        #[serde(default, skip_serializing_if = "Map::is_empty")]
        detail: Map<String, Value>,
    },
    /// A node claimed a run, for example to take it over. It may execute the run until its lease expires.
    RunClaimed {
        /// The id of the run.
        run: RunId,
        /// The lease of the node that executes the run.
        #[serde(flatten)]
        claim: LeaseClaim,
    },
    /// A tool call is about to be made. If no result follows, the call may or may not have been executed.
    ToolStarted {
        /// The id of the run.
        run: RunId,
        /// The id of the tool call.
        call: String,
        /// The name of the tool.
        tool: String,
        /// Additional details, such as token usage.
        #[serde(default, skip_serializing_if = "Map::is_empty")]
        detail: Map<String, Value>,
    },
    /// A run ended.
    RunEnded {
        /// The id of the run.
        run: RunId,
        /// How the run ended.
        outcome: RunOutcome,
        /// A human-readable error, if the run failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// A stable, machine-readable code for the error.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        code: Option<String>,
    },
    /// A review was opened: a person must decide.
    ReviewOpened(Box<ReviewOpened>),
    /// A reviewer claimed a review, so that others leave it alone, or released it.
    ReviewClaimed {
        /// The id of the review.
        review: ReviewId,
        /// The name of the reviewer. `None` means that the claim was released.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        by: Option<String>,
        /// When the claim expires.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        until: Option<Timestamp>,
    },
    /// A review was decided.
    ReviewDecided(Box<ReviewDecided>),
    /// The oldest messages were summarized: models are shown the summary instead of them, and the messages
    /// stay in the log (D-066). Without a summary, the messages themselves are shown again.
    Compacted {
        /// The last record that the summary covers.
        upto: Seq,
        /// The summary that is shown instead of the covered messages. `None` means that no summary is shown
        /// any more.
        #[serde(default, with = "stored", skip_serializing_if = "Option::is_none")]
        summary: Option<Message>,
    },
}

/// The first entry of a session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SessionCreated {
    /// The owner of the session.
    pub user: User,
    /// The assistant that the session belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assistant: Option<String>,
    /// The chat thread that displays the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread: Option<String>,
    /// The model that the session uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// A human-readable title.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// Tags for filtering.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// Application-defined metadata.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
    /// The parent and the position at which this session was forked. `None` means that the session is not a
    /// fork.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Parent>,
    /// The original creation time, if this is an ended session that was moved to another id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub original_created_at: Option<Timestamp>,
    /// For a fork: the end of the parent's hash chain of decisions at the position of the fork.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decisions: Option<DecisionChain>,
    /// The export that the session was imported from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
}

/// The import that a session was created by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The BLAKE3 hash of the export. It identifies an export that is imported a second time.
    pub export: String,
    /// When the export was imported.
    pub at: Timestamp,
    /// The last record that came with the export. Later records were written here.
    pub upto: Seq,
}

/// The position at which a fork left its parent. The fork's first own record is `seq + 1` (D-002).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Parent {
    /// The id of the parent.
    pub session: SessionId,
    /// The last record of the parent's log that the fork includes.
    pub seq: Seq,
    /// The log digest at that position (D-005).
    pub digest: LogDigest,
}

/// A message entry: a message and how it came into the log.
#[derive(Clone, Debug, PartialEq)]
pub struct MessageEntry {
    /// The run that produced the message. `None` means that no run did.
    pub run: Option<RunId>,
    /// Whether this system message replaces the initial instructions, from this position on.
    pub replaces_instructions: bool,
    /// Whether this is an incomplete answer, because its run was cancelled or failed (D-048).
    pub partial: bool,
    /// The record of the assistant message that this user message followed in its request. `None` means that
    /// the request contained none, so it is unknown how much of the session its sender had seen.
    pub replies_to: Option<Seq>,
    /// The message itself.
    pub message: Message,
}

impl From<Message> for MessageEntry {
    fn from(message: Message) -> Self {
        Self { run: None, replaces_instructions: false, partial: false, replies_to: None, message }
    }
}

impl MessageEntry {
    /// Creates an entry for a message that a run produced.
    pub fn by_run(run: &RunId, message: Message) -> Self {
        Self { run: Some(run.clone()), ..Self::from(message) }
    }
}

/// A checkpoint entry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointEntry {
    /// The name of the checkpoint.
    pub label: CheckpointLabel,
    /// Whether the checkpoint was set automatically.
    #[serde(default, skip_serializing_if = "is_false")]
    pub auto: bool,
    /// The run during which the checkpoint was set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// The step of that run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Application-defined state.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub state: Map<String, Value>,
}

/// A rewind: the messages in records after `to` are discarded from the conversation. The log digest describes
/// what remains, so that a head is updated without reading the log (D-005).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RewindEntry {
    /// The last record that remains in effect.
    pub to: Seq,
    /// The log digest at that record.
    pub digest: LogDigest,
}

/// An update of one optional field, with the semantics of a JSON merge patch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Patch<T> {
    /// Leaves the field unchanged.
    #[default]
    Keep,
    /// Removes the value (`null`).
    Clear,
    /// Replaces the value.
    Set(T),
}

impl<T> Patch<T> {
    /// Returns true if the field stays unchanged.
    pub fn is_keep(&self) -> bool {
        matches!(self, Patch::Keep)
    }

    /// Applies the update to a field.
    pub(crate) fn apply(&self, field: &mut Option<T>)
    where
        T: Clone,
    {
        match self {
            Patch::Keep => {}
            Patch::Clear => *field = None,
            Patch::Set(v) => *field = Some(v.clone()),
        }
    }
}

impl<T> From<Option<T>> for Patch<T> {
    fn from(v: Option<T>) -> Self {
        v.map_or(Patch::Clear, Patch::Set)
    }
}

impl<T: Serialize> Serialize for Patch<T> {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Patch::Set(v) => v.serialize(s),
            _ => s.serialize_none(),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Patch<T> {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        Option::deserialize(d).map(Patch::from)
    }
}

/// An update of a session's descriptive fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SessionPatch {
    /// The update of the model.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    pub model: Patch<String>,
    /// The update of the title.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    pub title: Patch<String>,
    /// The update of the tags. Tags are replaced as a whole.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    pub tags: Patch<Vec<String>>,
    /// A JSON merge patch (RFC 7396): `null` removes a key.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
}

/// A lease on a run: one node's exclusive right to execute it until a deadline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseClaim {
    /// The name of the node.
    pub node: String,
    /// When the lease expires, in microseconds.
    #[serde(with = "jiff::fmt::serde::timestamp::microsecond::required")]
    pub until: Timestamp,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunOutcome {
    /// The run finished normally.
    Completed,
    /// The run failed. Everything committed until then is preserved.
    Failed,
    /// The run was cancelled on request. Everything committed until then is preserved.
    Cancelled,
}

/// The content of a review request: what a person must decide.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReviewOpened {
    /// The id of the review.
    pub review: ReviewId,
    /// The step under review, such as a tool's name.
    pub step: String,
    /// The run that waits for the decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// The id of the tool call that waits for the decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<String>,
    /// The queue of reviewers to which the request is addressed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// Whether the call may have been executed already and its result was lost. The reviewer then decides
    /// whether it was done.
    #[serde(default, skip_serializing_if = "is_false")]
    pub lost: bool,
    /// When and how the review is decided without a person. `None` means that it has no timeout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<ReviewTimeout>,
    /// Additional details, such as the arguments of the call.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub detail: Map<String, Value>,
}

/// The decision that applies to a review if no person decides it in time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReviewTimeout {
    /// When the timeout expires.
    pub at: Timestamp,
    /// The decision that then applies.
    pub decision: Decision,
}

/// The content of a review decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReviewDecided {
    /// The id of the review.
    pub review: ReviewId,
    /// The step that was under review.
    pub step: String,
    /// The decision.
    pub decision: Decision,
    /// The name of the reviewer.
    pub reviewer: String,
    /// The reviewer's explanation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notes: Option<String>,
    /// The arguments to use instead of the model's, if the decision is `Corrected`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arguments: Option<Value>,
    /// The hash of the session's previous decision ([`ReviewDecided::hash`]), which links the decisions to a
    /// hash chain (D-064). `None` means that the decision is not linked; imported logs may contain such decisions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<DecisionHash>,
}

/// A reviewer's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// The call may be made as it is.
    Approved,
    /// The call must not be made.
    Rejected,
    /// The call is made with other arguments.
    Corrected,
}

impl Decision {
    /// Returns the serialized name of the decision.
    pub fn as_str(self) -> &'static str {
        match self {
            Decision::Approved => "approved",
            Decision::Rejected => "rejected",
            Decision::Corrected => "corrected",
        }
    }
}

/// An entry with its position in the log and its timestamp.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The position in the log.
    pub seq: Seq,
    /// When the entry was written, to the microsecond.
    pub at: Timestamp,
    /// The event.
    pub entry: Entry,
}

/// The beginning of every serialized message entry.
const MESSAGE: &str = r#"{"message":{"#;
/// The beginning of a serialized message entry without any field besides the message.
const PLAIN_MESSAGE: &str = r#"{"message":{"body":"#;

impl Entry {
    /// Creates a message entry that belongs to no run.
    pub fn message(message: Message) -> Self {
        Entry::Message(message.into())
    }

    /// Creates the first entry of a session. Boxed, like all large variants, because most entries of a log
    /// are messages, which are small.
    pub fn created(created: SessionCreated) -> Self {
        Entry::Created(Box::new(created))
    }

    /// Creates an entry that updates descriptive fields.
    pub fn info(patch: SessionPatch) -> Self {
        Entry::Info(Box::new(patch))
    }

    /// Creates an entry that opens a review.
    pub fn review_opened(opened: ReviewOpened) -> Self {
        Entry::ReviewOpened(Box::new(opened))
    }

    /// Creates an entry that decides a review.
    pub fn review_decided(decided: ReviewDecided) -> Self {
        Entry::ReviewDecided(Box::new(decided))
    }

    /// Serializes the entry to the JSON text that stores persist.
    pub fn encode(&self) -> String {
        let Entry::Message(entry) = self else {
            return serde_json::to_string(self).expect("entries have string keys and finite numbers only");
        };
        let mut text = String::with_capacity(entry.message.as_str().len() + 24);
        text.push_str(MESSAGE);
        if let Some(run) = &entry.run {
            text.push_str(&format!(r#""run":"{run}","#));
        }
        if entry.replaces_instructions {
            text.push_str(r#""replaces_instructions":true,"#);
        }
        if entry.partial {
            text.push_str(r#""partial":true,"#);
        }
        if let Some(seq) = entry.replies_to {
            text.push_str(&format!(r#""replies_to":{seq},"#));
        }
        if !entry.message.blob_refs().is_empty() {
            let blob_refs =
                serde_json::to_string(entry.message.blob_refs()).expect("blob references serialize to JSON");
            text.push_str(&format!(r#""blob_refs":{blob_refs},"#));
        }
        text.push_str(r#""body":"#);
        text.push_str(entry.message.as_str());
        text.push_str("}}");
        text
    }

    /// Deserializes the output of [`Entry::encode`]. The text is trusted and not validated again, because its
    /// checksum has been verified.
    pub fn decode(text: &str) -> Result<Self, DecodeError> {
        Self::decode_with(text, |text| text.into())
    }

    /// Deserializes an entry; `to_shared` chooses how the text of a message is held in memory.
    fn decode_with(text: &str, to_shared: impl Fn(&str) -> SharedStr) -> Result<Self, DecodeError> {
        if let Some(body) = text.strip_prefix(PLAIN_MESSAGE).and_then(|t| t.strip_suffix("}}")) {
            return Ok(Entry::message(Message::trusted(to_shared(body), Vec::new())));
        }
        if text.starts_with(MESSAGE) {
            let line: MessageLine<'_> = serde_json::from_str(text).map_err(DecodeError::unreadable)?;
            return Ok(Entry::Message(line.message.into_entry(to_shared)));
        }
        serde_json::from_str(text).map_err(DecodeError::unreadable)
    }

    /// Deserializes an entry that another program may have reformatted. A message in it is not validated yet.
    pub(crate) fn decode_any(text: &str) -> Result<Self, DecodeError> {
        match serde_json::from_str::<MessageLine<'_>>(text) {
            Ok(line) => Ok(Entry::Message(line.message.into_entry(|text| text.into()))),
            Err(_) => serde_json::from_str(text).map_err(DecodeError::unreadable),
        }
    }
}

/// The serialized form of a message entry, borrowing the text of the message.
#[derive(Deserialize)]
struct MessageLine<'a> {
    #[serde(borrow)]
    message: MessageEntryLine<'a>,
}

#[derive(Deserialize)]
struct MessageEntryLine<'a> {
    #[serde(default)]
    run: Option<RunId>,
    #[serde(default)]
    replaces_instructions: bool,
    #[serde(default)]
    partial: bool,
    #[serde(default)]
    replies_to: Option<Seq>,
    #[serde(default)]
    blob_refs: Vec<BlobRef>,
    #[serde(borrow)]
    body: &'a RawValue,
}

impl MessageEntryLine<'_> {
    fn into_entry(self, to_shared: impl Fn(&str) -> SharedStr) -> MessageEntry {
        let message = Message::trusted(to_shared(self.body.get()), self.blob_refs);
        MessageEntry {
            run: self.run,
            replaces_instructions: self.replaces_instructions,
            partial: self.partial,
            replies_to: self.replies_to,
            message,
        }
    }
}

impl Record {
    /// Computes the CRC-32 that stores persist with a record, over its sequence number, timestamp and text.
    /// Covering the sequence number reveals missing records (D-008, D-009).
    pub fn checksum(seq: Seq, at: Timestamp, text: &str) -> u32 {
        let mut header = [0; 16];
        header[..8].copy_from_slice(&seq.to_le_bytes());
        header[8..].copy_from_slice(&at.as_microsecond().to_le_bytes());
        let mut crc = crc32fast::Hasher::new();
        crc.update(&header);
        crc.update(text.as_bytes());
        crc.finalize()
    }

    /// Verifies and deserializes a record as a store returned it. Damage is an error that names the location
    /// of the record.
    pub fn read(seq: Seq, at: i64, sum: u32, text: &str, location: impl FnOnce() -> String) -> Result<Self> {
        let checked = Self::check(seq, at, sum, text);
        let read = checked.and_then(|at| Ok(Record { seq, at, entry: Entry::decode(text)? }));
        read.map_err(|e| Error::corrupt_from(location(), e))
    }

    /// Verifies the checksum and returns the timestamp.
    fn check(seq: Seq, at: i64, sum: u32, text: &str) -> Result<Timestamp, DecodeError> {
        let at =
            Timestamp::from_microsecond(at).map_err(|e| DecodeError::caused("its timestamp is out of range", e))?;
        if Self::checksum(seq, at, text) != sum {
            return Err(DecodeError::new("its checksum does not match"));
        }
        Ok(at)
    }
}

/// Deserializes a sequence of records. Their texts are gathered in chunks that the messages share: one
/// allocation serves many messages, and a message that outlives the others retains no more than its chunk
/// (D-010).
#[cfg(any(feature = "sqlite", feature = "postgres"))]
#[derive(Debug, Default)]
pub(crate) struct RecordBatch {
    decoded: Vec<Record>,
    chunk: String,
    /// The records in the current chunk, each with the offset where its text ends.
    pending: Vec<(Seq, Timestamp, usize)>,
}

/// Size at which a chunk is completed, in bytes.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
const CHUNK_BYTES: usize = 64 << 10;

#[cfg(any(feature = "sqlite", feature = "postgres"))]
impl RecordBatch {
    /// Creates an empty batch with capacity for `records` records.
    pub fn with_capacity(records: usize) -> Self {
        Self { decoded: Vec::with_capacity(records), ..Self::default() }
    }

    /// Returns the number of records.
    pub fn len(&self) -> usize {
        self.decoded.len() + self.pending.len()
    }

    /// Adds the next record as a store returned it, after verifying its checksum. An error names the damaged
    /// record and what is wrong with it.
    pub fn push(&mut self, seq: Seq, at: i64, sum: u32, text: &str) -> Result<(), (Seq, DecodeError)> {
        let at = Record::check(seq, at, sum, text).map_err(|e| (seq, e))?;
        if self.chunk.len() + text.len() > CHUNK_BYTES {
            self.decode_chunk()?;
            self.chunk.reserve_exact(text.len().max(CHUNK_BYTES));
        }
        self.chunk.push_str(text);
        self.pending.push((seq, at, self.chunk.len()));
        Ok(())
    }

    /// Completes the last chunk and returns all records.
    pub fn finish(mut self) -> Result<Vec<Record>, (Seq, DecodeError)> {
        self.decode_chunk()?;
        Ok(self.decoded)
    }

    /// Completes the current chunk: deserializes its records, whose messages share the chunk.
    fn decode_chunk(&mut self) -> Result<(), (Seq, DecodeError)> {
        let chunk = std::sync::Arc::new(std::mem::take(&mut self.chunk));
        let mut from = 0;
        for (seq, at, to) in self.pending.drain(..) {
            let entry = Entry::decode_with(&chunk[from..to], |text| SharedStr::within(&chunk, text));
            self.decoded.push(Record { seq, at, entry: entry.map_err(|e| (seq, e))? });
            from = to;
        }
        Ok(())
    }
}

fn is_false(b: &bool) -> bool {
    !b
}

/// Serde support for messages inside other entries: serialized unchanged, deserialized without being
/// validated again.
mod stored {
    use super::*;

    pub fn serialize<S: serde::Serializer>(m: &Option<Message>, s: S) -> Result<S::Ok, S::Error> {
        m.serialize(s)
    }

    pub fn deserialize<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<Message>, D::Error> {
        let raw = Option::<Box<RawValue>>::deserialize(d)?;
        Ok(raw.map(|raw| Message::trusted(raw.get(), Vec::new())))
    }
}
