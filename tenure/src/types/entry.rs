//! What happened: the entries of a session's log, and how they are written down.
//!
//! An entry is one JSON object with one key, its kind: `{"message":{"body":{"role":"user","content":"hi"}}}`. New kinds and
//! fields may come; what is here stays readable for ever.

use crate::types::blob::Cut;
use crate::types::decision_chain::DecisionChain;
use crate::types::decision_chain::DecisionHash;
use crate::types::digest::Mark;
use crate::types::error::{Error, Result};
use crate::types::id::{Label, ReviewId, RunId, Seq, SessionId, User};
use crate::types::message::{Message, Text};
use crate::types::status::Status;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// One thing that happened in a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Entry {
    /// The session began, from nothing or as a fork.
    Created(Box<Created>),
    /// Somebody said something. Written and read by hand, so that the message's text stays as it is.
    #[serde(skip)]
    Message(Post),
    /// A point to come back to.
    Checkpoint(Checkpointed),
    /// Everything said after `to` was cut off; it stays in the log.
    Rewound(Rewound),
    /// Title, tags, metadata and the like changed.
    Info(Box<InfoChange>),
    /// The session's status changed.
    Status {
        /// The new status.
        to: Status,
        /// Why, for people.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A run began.
    RunStarted {
        /// The run.
        run: RunId,
        /// Who works on it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        claim: Option<Claim>,
        /// What it was started with.
        #[serde(default, skip_serializing_if = "Map::is_empty")]
        detail: Map<String, Value>,
    },
    /// A node took a run over; it may work on it until its lease ends.
    RunClaimed {
        /// The run.
        run: RunId,
        /// Who works on it.
        #[serde(flatten)]
        claim: Claim,
    },
    /// A tool call is about to be made: if no result follows, it may or may not have happened.
    ToolStarted {
        /// The run.
        run: RunId,
        /// The id of the tool call.
        call: String,
        /// The tool's name.
        tool: String,
        /// More about it.
        #[serde(default, skip_serializing_if = "Map::is_empty")]
        detail: Map<String, Value>,
    },
    /// A run ended.
    RunEnded {
        /// The run.
        run: RunId,
        /// How.
        outcome: Outcome,
        /// What went wrong, if it failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// The same as one stable word.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        code: Option<String>,
    },
    /// A person must decide something.
    ReviewOpened(Box<ReviewOpened>),
    /// Somebody looks at a review, so that nobody else need; or does so no more.
    ReviewClaimed {
        /// The review.
        review: ReviewId,
        /// Who; nobody: it is free again.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        by: Option<String>,
        /// Until when others leave it alone.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        until: Option<Timestamp>,
    },
    /// A person has decided.
    ReviewDecided(Box<ReviewDecided>),
    /// The oldest messages are shown to models as a summary; they stay in the log. Or they are shown themselves again.
    Compacted {
        /// The last record that the summary covers.
        upto: Seq,
        /// The summary, shown in their place; nothing: no summary is shown any more.
        #[serde(default, with = "stored", skip_serializing_if = "Option::is_none")]
        summary: Option<Message>,
    },
}

/// How a session began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Created {
    /// Whose session it is.
    pub user: User,
    /// The assistant it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assistant: Option<String>,
    /// The chat thread that shows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread: Option<String>,
    /// The model it talks to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// A title for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// Words to find it by.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// Anything else the application wants to know of it.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
    /// What it was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Parent>,
    /// When it really began, if it is an ended session that was moved to another id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began_at: Option<Timestamp>,
    /// Of a fork: the end of its parent's hash chain of decisions at the point where it left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decisions: Option<DecisionChain>,
    /// The export that it was imported from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
}

/// The import that a session began with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The BLAKE3 hash of the export: an export that is imported twice is found by it.
    pub export: String,
    /// When it was imported.
    pub at: Timestamp,
    /// The last record that came with the export; later ones were written here.
    pub upto: Seq,
}

/// Where a fork left its parent. The fork's first record is `seq + 1`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Parent {
    /// The parent.
    pub session: SessionId,
    /// The last record of the parent's log that belongs to the fork too.
    pub seq: Seq,
    /// What had been said up to there.
    pub mark: Mark,
}

/// A message in the log.
#[derive(Clone, Debug, PartialEq)]
pub struct Post {
    /// The run that produced it.
    pub run: Option<RunId>,
    /// A system message that replaces the one the conversation began with, from now on.
    pub lead: bool,
    /// An answer that was cut off before its end: its run was cancelled or failed.
    pub partial: bool,
    /// The record of the assistant message that this user message followed in its own request. `None` if it was sent without
    /// one: then nothing tells how much of the session its sender had seen.
    pub replies_to: Option<Seq>,
    /// The message.
    pub message: Message,
}

impl From<Message> for Post {
    fn from(message: Message) -> Self {
        Self { run: None, lead: false, partial: false, replies_to: None, message }
    }
}

impl Post {
    /// A message that a run produced.
    pub fn by(run: &RunId, message: Message) -> Self {
        Self { run: Some(run.clone()), ..Self::from(message) }
    }
}

/// A checkpoint in the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Checkpointed {
    /// Its name.
    pub label: Label,
    /// Whether the runtime made it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub auto: bool,
    /// The run it was taken in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// The step of that run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Whatever else its maker wants to find again.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub state: Map<String, Value>,
}

/// A cut: what was said in records after `to` is discarded. The mark says what is left, so that a head can be kept up without
/// reading the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rewound {
    /// The last record that stays.
    pub to: Seq,
    /// What had been said up to there.
    pub mark: Mark,
}

/// A change of one field.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Change<T> {
    /// Leave it.
    #[default]
    Keep,
    /// Remove it (`null`).
    Clear,
    /// Replace it.
    Set(T),
}

impl<T> Change<T> {
    /// Whether nothing changes.
    pub fn is_keep(&self) -> bool {
        matches!(self, Change::Keep)
    }

    pub(crate) fn apply(&self, field: &mut Option<T>)
    where
        T: Clone,
    {
        match self {
            Change::Keep => {}
            Change::Clear => *field = None,
            Change::Set(v) => *field = Some(v.clone()),
        }
    }
}

impl<T> From<Option<T>> for Change<T> {
    fn from(v: Option<T>) -> Self {
        v.map_or(Change::Clear, Change::Set)
    }
}

impl<T: Serialize> Serialize for Change<T> {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Change::Set(v) => v.serialize(s),
            _ => s.serialize_none(),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Change<T> {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        Option::deserialize(d).map(Change::from)
    }
}

/// A change of what is known about a session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct InfoChange {
    /// The model.
    #[serde(default, skip_serializing_if = "Change::is_keep")]
    pub model: Change<String>,
    /// The title.
    #[serde(default, skip_serializing_if = "Change::is_keep")]
    pub title: Change<String>,
    /// All tags.
    #[serde(default, skip_serializing_if = "Change::is_keep")]
    pub tags: Change<Vec<String>>,
    /// A JSON merge patch (RFC 7396): `null` removes a key.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
}

/// A node's right to work on a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The node.
    pub node: String,
    /// The end of the lease.
    pub until: Timestamp,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It is done.
    Completed,
    /// It failed; what happened until then is kept.
    Failed,
    /// Somebody stopped it; what happened until then is kept.
    Cancelled,
}

/// What a person is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReviewOpened {
    /// The review.
    pub review: ReviewId,
    /// The step under review, such as a tool's name.
    pub step: String,
    /// The run that waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// The tool call that waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<String>,
    /// Who is asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// The call may have been made already, and its result was lost: was it done?
    #[serde(default, skip_serializing_if = "is_false")]
    pub lost: bool,
    /// When it is decided without a person, and how.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Timeout>,
    /// More about it: the arguments of the call.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub detail: Map<String, Value>,
}

/// What happens to a review that nobody decides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timeout {
    /// When.
    pub at: Timestamp,
    /// The decision.
    pub decision: Decision,
}

/// What a person decided.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReviewDecided {
    /// The review.
    pub review: ReviewId,
    /// The step that was under review.
    pub step: String,
    /// The decision.
    pub decision: Decision,
    /// Who decided.
    pub reviewer: String,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notes: Option<String>,
    /// The arguments to use instead, if corrected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arguments: Option<Value>,
    /// The hash of the session's previous decision ([`ReviewDecided::hash`]). Absent in entries of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<DecisionHash>,
}

/// A person's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// Go on.
    Approved,
    /// Do not do it.
    Rejected,
    /// Do it with other arguments.
    Corrected,
}

impl Decision {
    /// One word.
    pub fn as_str(self) -> &'static str {
        match self {
            Decision::Approved => "approved",
            Decision::Rejected => "rejected",
            Decision::Corrected => "corrected",
        }
    }
}

/// An entry with its place in the log and its time.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Its place.
    pub seq: Seq,
    /// When, to the microsecond.
    pub at: Timestamp,
    /// What.
    pub entry: Entry,
}

const MESSAGE: &str = r#"{"message":{"#;
const PLAIN_MESSAGE: &str = r#"{"message":{"body":"#;

impl Entry {
    /// A message, as anybody may add one.
    pub fn message(message: Message) -> Self {
        Entry::Message(message.into())
    }

    /// The beginning of a session. Boxed, like all large kinds: logs are mostly messages, and those are small.
    pub fn created(created: Created) -> Self {
        Entry::Created(Box::new(created))
    }

    /// A change of what is known about a session.
    pub fn info(change: InfoChange) -> Self {
        Entry::Info(Box::new(change))
    }

    /// A question to a person.
    pub fn review_opened(opened: ReviewOpened) -> Self {
        Entry::ReviewOpened(Box::new(opened))
    }

    /// A person's answer.
    pub fn review_decided(decided: ReviewDecided) -> Self {
        Entry::ReviewDecided(Box::new(decided))
    }

    /// The entry as the JSON text that stores keep.
    pub fn encode(&self) -> String {
        let Entry::Message(post) = self else {
            return serde_json::to_string(self).expect("entries have string keys and finite numbers only");
        };
        let mut text = String::with_capacity(post.message.as_str().len() + 24);
        text.push_str(MESSAGE);
        if let Some(run) = &post.run {
            text.push_str(&format!(r#""run":"{run}","#));
        }
        if post.lead {
            text.push_str(r#""lead":true,"#);
        }
        if post.partial {
            text.push_str(r#""partial":true,"#);
        }
        if let Some(seq) = post.replies_to {
            text.push_str(&format!(r#""replies_to":{seq},"#));
        }
        if !post.message.cuts().is_empty() {
            let cuts = serde_json::to_string(post.message.cuts()).expect("cuts are plain data");
            text.push_str(&format!(r#""cuts":{cuts},"#));
        }
        text.push_str(r#""body":"#);
        text.push_str(post.message.as_str());
        text.push_str("}}");
        text
    }

    /// Reads what [`Entry::encode`] wrote. The text is trusted: its checksum has been verified.
    pub fn decode(text: &str) -> Result<Self, String> {
        Self::decode_with(text, |text| text.into())
    }

    /// The same, with a say in where the text of a message is kept.
    fn decode_with(text: &str, keep: impl Fn(&str) -> Text) -> Result<Self, String> {
        if let Some(body) = text.strip_prefix(PLAIN_MESSAGE).and_then(|t| t.strip_suffix("}}")) {
            return Ok(Entry::message(Message::trusted(keep(body), Vec::new())));
        }
        if text.starts_with(MESSAGE) {
            let line: MessageLine<'_> = serde_json::from_str(text).map_err(unreadable)?;
            return Ok(Entry::Message(line.message.post(keep)));
        }
        serde_json::from_str(text).map_err(unreadable)
    }

    /// Reads an entry that another program may have formatted anew. A message in it is not validated yet.
    pub(crate) fn decode_any(text: &str) -> Result<Self, String> {
        match serde_json::from_str::<MessageLine<'_>>(text) {
            Ok(line) => Ok(Entry::Message(line.message.post(|text| text.into()))),
            Err(_) => serde_json::from_str(text).map_err(unreadable),
        }
    }
}

/// Where an entry can not be read; never what stands there.
fn unreadable(e: serde_json::Error) -> String {
    format!("it is not an entry that this version knows (at character {})", e.column())
}

#[derive(Deserialize)]
struct MessageLine<'a> {
    #[serde(borrow)]
    message: PostLine<'a>,
}

#[derive(Deserialize)]
struct PostLine<'a> {
    #[serde(default)]
    run: Option<RunId>,
    #[serde(default)]
    lead: bool,
    #[serde(default)]
    partial: bool,
    #[serde(default)]
    replies_to: Option<Seq>,
    #[serde(default)]
    cuts: Vec<Cut>,
    #[serde(borrow)]
    body: &'a RawValue,
}

impl PostLine<'_> {
    fn post(self, keep: impl Fn(&str) -> Text) -> Post {
        let message = Message::trusted(keep(self.body.get()), self.cuts);
        Post { run: self.run, lead: self.lead, partial: self.partial, replies_to: self.replies_to, message }
    }
}

impl Record {
    /// The checksum that stores keep beside a record, over its place, its time and its text.
    pub fn checksum(seq: Seq, at: Timestamp, text: &str) -> u32 {
        let mut place = [0; 16];
        place[..8].copy_from_slice(&seq.to_le_bytes());
        place[8..].copy_from_slice(&at.as_microsecond().to_le_bytes());
        let mut crc = crc32fast::Hasher::new();
        crc.update(&place);
        crc.update(text.as_bytes());
        crc.finalize()
    }

    /// A record as a store found it; damage is an error that names `place`.
    pub fn read(seq: Seq, at: i64, sum: u32, text: &str, place: impl FnOnce() -> String) -> Result<Self> {
        let checked = Self::check(seq, at, sum, text);
        let read = checked.and_then(|at| Ok(Record { seq, at, entry: Entry::decode(text)? }));
        read.map_err(|why| Error::corrupt(place(), why))
    }

    /// Whether the checksum is right; the time.
    fn check(seq: Seq, at: i64, sum: u32, text: &str) -> Result<Timestamp, String> {
        let at = Timestamp::from_microsecond(at).map_err(|_| "its time is out of range")?;
        if Self::checksum(seq, at, text) != sum {
            return Err("its checksum is wrong".to_owned());
        }
        Ok(at)
    }
}

/// Records that are read one after the other. Their texts are gathered in chunks that the messages then share: one piece of memory
/// for many, and a message that is kept longer than the others keeps no more than its chunk.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
#[derive(Debug, Default)]
pub(crate) struct Records {
    done: Vec<Record>,
    chunk: String,
    /// Those in the chunk, and where their texts end.
    waiting: Vec<(Seq, Timestamp, usize)>,
}

/// A chunk is done when it has so many bytes.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
const CHUNK_BYTES: usize = 64 << 10;

#[cfg(any(feature = "sqlite", feature = "postgres"))]
impl Records {
    /// With room for so many.
    pub fn with_capacity(records: usize) -> Self {
        Self { done: Vec::with_capacity(records), ..Self::default() }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.done.len() + self.waiting.len()
    }

    /// Takes the next one as a store found it. Damage is an error: which record, and what is wrong with it.
    pub fn push(&mut self, seq: Seq, at: i64, sum: u32, text: &str) -> Result<(), (Seq, String)> {
        let at = Record::check(seq, at, sum, text).map_err(|why| (seq, why))?;
        if self.chunk.len() + text.len() > CHUNK_BYTES {
            self.close()?;
            self.chunk.reserve_exact(text.len().max(CHUNK_BYTES));
        }
        self.chunk.push_str(text);
        self.waiting.push((seq, at, self.chunk.len()));
        Ok(())
    }

    /// All of them.
    pub fn finish(mut self) -> Result<Vec<Record>, (Seq, String)> {
        self.close()?;
        Ok(self.done)
    }

    fn close(&mut self) -> Result<(), (Seq, String)> {
        let chunk = std::sync::Arc::new(std::mem::take(&mut self.chunk));
        let mut from = 0;
        for (seq, at, to) in self.waiting.drain(..) {
            let entry = Entry::decode_with(&chunk[from..to], |text| Text::within(&chunk, text));
            self.done.push(Record { seq, at, entry: entry.map_err(|why| (seq, why))? });
            from = to;
        }
        Ok(())
    }
}

fn is_false(b: &bool) -> bool {
    !b
}

/// Messages inside other entries: written as they are, read without checking them again.
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
