//! The fold: builds a session from its log. This is the only module that defines what an entry means.

use crate::rules::turns::TurnCounter;
use crate::types::decision_chain::DecisionChain;
use crate::types::digest::LogDigest;
use crate::types::entry::{CheckpointEntry, Entry, MessageEntry, Record, ReviewDecided, ReviewOpened, RunOutcome};
use crate::types::head::{Head, LogEnd};
use crate::types::id::{CheckpointLabel, RunId, Seq, SessionKey};
use crate::types::message::Message;
use crate::types::resumable::Resumable;
use crate::types::status::Status;
use jiff::{SignedDuration, Timestamp};
use serde::Serialize;
use serde_json::{Map, Value};
use std::sync::OnceLock;

/// A stored message, with its position in the log, its timestamp, and the run that produced it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StoredMessage {
    /// The record of the message.
    pub seq: Seq,
    /// When the message was stored.
    pub at: Timestamp,
    /// The run that produced the message. `None` means that no run did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// The run that was started with this message as input. `None` means that no run was, or that a run produced
    /// the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_of: Option<RunId>,
    /// Whether this system message replaced the initial instructions.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "lead")]
    pub replaces_instructions: bool,
    /// Whether this is an incomplete answer (D-048).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// The record of the assistant message that this user message followed in its request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replies_to: Option<Seq>,
    /// The message itself.
    pub message: Message,
}

impl StoredMessage {
    /// Creates a stored message from a log entry.
    pub(crate) fn new(seq: Seq, at: Timestamp, entry: MessageEntry) -> Self {
        let MessageEntry { run, replaces_instructions, partial, replies_to, message } = entry;
        Self { seq, at, run, input_of: None, replaces_instructions, partial, replies_to, message }
    }
}

/// A checkpoint: a named position to which a session can be rewound. It is a pointer into the log and copies
/// nothing.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Checkpoint {
    /// The name of the checkpoint.
    pub label: CheckpointLabel,
    /// The number of messages before the checkpoint: an index into the session's messages.
    pub position: usize,
    /// When the checkpoint was set.
    pub created_at: Timestamp,
    /// Whether the checkpoint was set automatically.
    pub auto: bool,
    /// The record of the checkpoint.
    pub seq: Seq,
    /// The run during which the checkpoint was set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// The step of that run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Application-defined state.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub state: Map<String, Value>,
    /// The log digest at this position, computed on first use.
    #[serde(skip)]
    pub(crate) digest: CachedDigest,
}

/// A lazily computed log digest. It is derived from the messages, so it is only a cache and does not affect
/// equality.
#[derive(Clone, Debug, Default)]
pub(crate) struct CachedDigest(OnceLock<LogDigest>);

impl PartialEq for CachedDigest {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// Key in the detail of a `tool_started` entry: the result came from the cache and no tool was called.
pub(crate) const CACHED: &str = "cached";
/// Key in the detail of a `tool_started` entry and in the state of a run's checkpoint: the tokens that the
/// run has used.
pub(crate) const TOKENS: &str = "tokens";

/// Returns the number of tokens that the run had used when this was written.
pub(crate) fn tokens_used(state: &Map<String, Value>) -> u64 {
    state.get(TOKENS).and_then(Value::as_u64).unwrap_or(0)
}

/// A run: the execution of one turn.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Run {
    /// The id of the run.
    pub id: RunId,
    /// When the run started.
    pub started_at: Timestamp,
    /// When and how the run ended. `None` means that it has not ended.
    pub ended: Option<(Timestamp, RunOutcome)>,
    /// A human-readable error, if the run failed.
    pub error: Option<String>,
    /// A stable, machine-readable code for the error.
    pub code: Option<String>,
    /// The record that started the run.
    pub seq: Seq,
    /// Parameters of the run, such as its model and options.
    pub detail: Map<String, Value>,
    /// The tool calls that were started, in order. They show which calls may have been executed when a result
    /// is missing.
    pub tools_started: Vec<ToolCallStart>,
    /// The pauses of the run until a time.
    pub(crate) pauses: RunPauses,
}

/// The pauses of a run until a time, because of a rate limit.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RunPauses {
    /// The number of pauses since the run last produced a message.
    pub count: u32,
    /// The start of the current pause.
    pub since: Option<Timestamp>,
    /// The total duration of the pauses that are over.
    pub total: SignedDuration,
}

/// A tool call that was started.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ToolCallStart {
    /// The record that started the call.
    pub seq: Seq,
    /// The id of the call.
    pub call: String,
    /// The name of the tool.
    pub tool: String,
    /// Whether the result came from the cache, so that no tool was called.
    pub cached: bool,
    /// The number of tokens that the run had used by then.
    pub tokens: u64,
}

impl Run {
    /// Returns the parameters with which any process can resume the run. `None` means that it can only be
    /// executed by the process that started it.
    pub fn resumable(&self) -> Option<Resumable> {
        Resumable::from_detail(&self.detail)
    }

    /// Returns true if the run can be resumed by any process.
    pub(crate) fn is_resumable(&self) -> bool {
        self.resumable().is_some()
    }
}

/// A review: a request for a decision, and the decision.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Review {
    /// When the review was opened.
    pub opened_at: Timestamp,
    /// The record that opened the review.
    pub seq: Seq,
    /// The content of the request.
    pub opened: ReviewOpened,
    /// The reviewer who claimed the review, and when the claim expires.
    pub claimed: Option<(String, Option<Timestamp>)>,
    /// The decision and when it was made. `None` means that the review is not decided.
    pub decided: Option<(Timestamp, ReviewDecided)>,
    /// Whether the review became obsolete without a decision: its run ended, its record was rewound, or it
    /// belongs to the parent of a fork.
    pub void: bool,
}

impl Review {
    /// Returns true if the review still needs a decision.
    pub fn is_open(&self) -> bool {
        self.decided.is_none() && !self.void
    }
}

/// A summary that replaces the oldest messages in the prompt (D-066).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Summary {
    /// The record of the summary.
    pub seq: Seq,
    /// When the summary was written.
    pub at: Timestamp,
    /// The last record that the summary covers.
    pub upto: Seq,
    /// The number of messages that the summary covers.
    pub position: usize,
    /// The message that models are shown.
    pub message: Message,
}

impl Summary {
    /// Returns the text of the summary, without the marker that models are shown.
    pub fn text(&self) -> String {
        let text = self.message.text();
        text.strip_prefix(SUMMARY_MARKER).map_or(&*text, str::trim_start).to_owned()
    }
}

/// Marks the input of a run: the messages that were committed together with its start, directly before it.
/// `newest_first` are the messages before the record `started`.
pub(crate) fn mark_inputs<'a>(
    newest_first: impl Iterator<Item = &'a mut StoredMessage>,
    run: &RunId,
    started: Seq,
    at: Timestamp,
) {
    let mut next = started;
    for stored in newest_first {
        if stored.seq + 1 != next || stored.at != at || stored.run.is_some() {
            break;
        }
        stored.input_of = Some(run.clone());
        next = stored.seq;
    }
}

/// A session: the folded log. Dereferences to its [`Head`] (`session.info`, `session.status` …).
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    head: Head,
    /// The messages of the conversation, oldest first, without rewound ones.
    pub messages: Vec<StoredMessage>,
    /// The checkpoints, oldest first.
    pub checkpoints: Vec<Checkpoint>,
    /// The runs, oldest first.
    pub runs: Vec<Run>,
    /// The reviews, oldest first.
    pub reviews: Vec<Review>,
    /// The valid summaries, oldest first. The newest is active; an older one becomes active again when a
    /// rewind discards those after it.
    pub(crate) summaries: Vec<Summary>,
    /// The records of all decisions, each with the end of the hash chain after it.
    pub(crate) decided: Vec<(Seq, Option<DecisionChain>)>,
    /// Whether summaries were switched off: none is written until one is requested (D-069).
    pub uncompacted: bool,
    /// Records that were applied in memory and are not committed yet.
    pub(crate) pending: Vec<Record>,
    /// The end of the committed log: the base of the commit of the pending records. Set by the first of them.
    pub(crate) committed_end: Option<LogEnd>,
    /// The number of older messages that are not loaded, and the record before which they lie.
    pub(crate) older: (usize, Seq),
    /// Size of all messages in bytes, approximately: media may have been attached again.
    bytes: usize,
}

/// A position in a session, as a user specifies it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Point {
    /// After the newest checkpoint with this label.
    Label(String),
    /// After this number of messages.
    Position(usize),
    /// After this number of turns.
    Turn(usize),
    /// After this record, which must be a checkpoint or a message.
    Seq(Seq),
    /// At the end.
    End,
}

impl From<&str> for Point {
    fn from(label: &str) -> Self {
        Point::Label(label.to_owned())
    }
}

impl From<&CheckpointLabel> for Point {
    fn from(label: &CheckpointLabel) -> Self {
        Point::Label(label.to_string())
    }
}

impl From<&Checkpoint> for Point {
    fn from(checkpoint: &Checkpoint) -> Self {
        Point::Seq(checkpoint.seq)
    }
}

impl std::fmt::Display for Point {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Point::Label(l) => write!(f, "checkpoint {l:?}"),
            Point::Position(p) => write!(f, "position {p}"),
            Point::Turn(t) => write!(f, "turn {t}"),
            Point::Seq(s) => write!(f, "record {s}"),
            Point::End => f.write_str("the end"),
        }
    }
}

/// A resolved position in a session.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedPoint {
    /// The last record before the position.
    pub seq: Seq,
    /// The number of messages before the position.
    pub position: usize,
    /// The log digest at the position.
    pub digest: LogDigest,
}

impl Session {
    /// Folds a session from its head and its whole log, including the records of its parent.
    pub fn fold(head: Head, records: impl IntoIterator<Item = Record>) -> Self {
        let mut session = Self::empty(head);
        session.messages.reserve(session.head.digest.messages);
        records.into_iter().for_each(|record| session.fold_record(record));
        session
    }

    /// Folds a record into the lists without changing the head. Moves the message out of the record instead
    /// of cloning it.
    pub(crate) fn fold_record(&mut self, record: Record) {
        match record.entry {
            Entry::Message(entry) => {
                self.bytes += entry.message.text_len();
                self.end_pauses(&entry);
                self.messages.push(StoredMessage::new(record.seq, record.at, entry));
            }
            _ => drop(self.apply_to_lists(&record)),
        }
    }

    /// Folds a session from its log alone. `None` if the log does not start with `created`.
    pub fn replay(key: &SessionKey, records: impl IntoIterator<Item = Record>) -> Option<Self> {
        let mut records = records.into_iter();
        let mut session = Self::empty(Head::begin(key, &records.next()?)?);
        for record in records {
            session.apply(&record);
        }
        Some(session)
    }

    /// Creates a session with this head and without any folded records.
    pub(crate) fn empty(head: Head) -> Self {
        Self {
            head,
            messages: Vec::new(),
            checkpoints: Vec::new(),
            runs: Vec::new(),
            reviews: Vec::new(),
            summaries: Vec::new(),
            decided: Vec::new(),
            uncompacted: false,
            pending: Vec::new(),
            committed_end: None,
            older: (0, 0),
            bytes: 0,
        }
    }

    /// Returns the head.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// Replaces the head.
    pub(crate) fn set_head(&mut self, head: Head) {
        self.head = head;
    }

    /// Applies the next record to the head and the lists. Returns the messages that a rewind discards.
    pub fn apply(&mut self, record: &Record) -> Vec<StoredMessage> {
        self.head.apply(record);
        self.apply_to_lists(record)
    }

    /// Resets the number of pauses of the run that has produced a message.
    fn end_pauses(&mut self, entry: &MessageEntry) {
        if let Some(run) = self.runs.last_mut().filter(|run| entry.run.as_ref() == Some(&run.id)) {
            run.pauses.count = 0;
        }
    }

    /// Records the begin or the end of a pause of the open run.
    fn apply_pause(&mut self, to: Status, until: Option<Timestamp>, at: Timestamp) {
        let Some(run) = self.runs.last_mut().filter(|run| run.ended.is_none()) else { return };
        if to == Status::Paused && until.is_some() {
            run.pauses.count += 1;
            run.pauses.since = Some(at);
        } else if let Some(since) = run.pauses.since.take() {
            run.pauses.total += at.duration_since(since).max(SignedDuration::ZERO);
        }
    }

    /// Applies the next record to the lists only. Returns the messages that a rewind discards.
    pub(crate) fn apply_to_lists(&mut self, record: &Record) -> Vec<StoredMessage> {
        let seq = record.seq;
        let at = record.at;
        match &record.entry {
            Entry::Message(entry) => {
                self.bytes += entry.message.text_len();
                self.end_pauses(entry);
                self.messages.push(StoredMessage::new(seq, at, entry.clone()));
            }
            Entry::Checkpoint(c) => self.checkpoints.push(checkpoint(c, seq, at, self.older.0 + self.messages.len())),
            Entry::Rewound(r) => return self.truncate(r.to),
            Entry::RunStarted { run, detail, .. } => {
                mark_inputs(self.messages.iter_mut().rev(), run, seq, at);
                self.runs.push(Run {
                    id: run.clone(),
                    started_at: at,
                    ended: None,
                    error: None,
                    code: None,
                    seq,
                    detail: detail.clone(),
                    tools_started: Vec::new(),
                    pauses: RunPauses::default(),
                });
            }
            Entry::ToolStarted { run, call, tool, detail } => {
                if let Some(run) = self.run_mut(run) {
                    let cached = detail.get(CACHED) == Some(&Value::Bool(true));
                    run.tools_started.push(ToolCallStart {
                        seq,
                        call: call.clone(),
                        tool: tool.clone(),
                        cached,
                        tokens: tokens_used(detail),
                    });
                }
            }
            Entry::RunEnded { run, outcome, error, code } => {
                self.void_reviews(|r| r.opened.run.as_ref() == Some(run));
                if let Some(run) = self.run_mut(run) {
                    run.ended = Some((at, *outcome));
                    run.error = error.clone();
                    run.code = code.clone();
                }
            }
            Entry::ReviewOpened(opened) => {
                self.reviews.push(Review {
                    opened_at: at,
                    seq,
                    opened: (**opened).clone(),
                    claimed: None,
                    decided: None,
                    void: false,
                });
            }
            Entry::ReviewClaimed { review, by, until } => {
                if let Some(review) = self.reviews.iter_mut().find(|r| r.opened.review == *review) {
                    review.claimed = by.clone().map(|by| (by, *until));
                }
            }
            Entry::ReviewDecided(decided) => {
                if let Some(review) = self.reviews.iter_mut().find(|r| r.opened.review == decided.review) {
                    review.decided.get_or_insert((at, (**decided).clone()));
                }
                let chain = self.decided.last().and_then(|(_, chain)| *chain);
                self.decided.push((seq, DecisionChain::after(chain, decided, at)));
            }
            Entry::Compacted { upto, summary: Some(message) } => {
                let position = self.messages.partition_point(|m| m.seq <= *upto);
                self.summaries.push(Summary { seq, at, upto: *upto, position, message: message.clone() });
                self.uncompacted = false;
            }
            Entry::Compacted { summary: None, .. } => {
                self.summaries.clear();
                self.uncompacted = true;
            }
            Entry::Created(created) => {
                if let Some(last) = self.decided.last_mut() {
                    last.1 = created.decisions;
                }
                // A fork does not continue its parent's runs, and the parent's reviews are not open here.
                self.void_reviews(|_| true);
                for run in self.runs.iter_mut().filter(|r| r.ended.is_none()) {
                    run.ended = Some((at, RunOutcome::Cancelled));
                }
            }
            Entry::Status { to, until, .. } => self.apply_pause(*to, *until, at),
            Entry::Info(_) | Entry::RunClaimed { .. } => {}
        }
        Vec::new()
    }

    /// Marks the selected undecided reviews as obsolete.
    fn void_reviews(&mut self, is_selected: impl Fn(&Review) -> bool) {
        let open = self.reviews.iter_mut().filter(|r| r.decided.is_none());
        open.filter(|r| is_selected(r)).for_each(|r| r.void = true);
    }

    /// Discards messages, checkpoints and summaries after `to`, and voids later reviews. Returns the messages.
    fn truncate(&mut self, to: Seq) -> Vec<StoredMessage> {
        self.checkpoints.retain(|c| c.seq <= to);
        self.void_reviews(|r| r.seq > to);
        self.summaries.retain(|s| s.upto <= to);
        let discarded = self.messages.split_off(self.messages.partition_point(|m| m.seq <= to));
        let bytes: usize = discarded.iter().map(|m| m.message.text_len()).sum();
        self.bytes = self.bytes.saturating_sub(bytes);
        discarded
    }

    fn run_mut(&mut self, id: &RunId) -> Option<&mut Run> {
        self.runs.iter_mut().rev().find(|r| r.id == *id)
    }

    /// Returns the reviews that still need a decision.
    pub fn open_reviews(&self) -> impl Iterator<Item = &Review> {
        self.reviews.iter().filter(|review| review.is_open())
    }

    /// Returns the active summary.
    pub fn summary(&self) -> Option<&Summary> {
        self.summaries.last()
    }

    /// Returns a run by its id.
    pub fn run(&self, id: &RunId) -> Option<&Run> {
        self.runs.iter().rev().find(|r| r.id == *id)
    }

    /// Resolves a point. `None` if the session has no such checkpoint, position or turn.
    pub fn locate(&self, point: &Point) -> Option<ResolvedPoint> {
        let before = |position: usize| match self.messages.get(position) {
            Some(next) => next.seq - 1,
            None => self.head.seq,
        };
        let (seq, position) = match point {
            Point::End => (self.head.seq, self.messages.len()),
            Point::Position(p) if *p <= self.messages.len() => (before(*p), *p),
            Point::Position(_) => return None,
            Point::Turn(n) => {
                let position = turn_position(&self.messages, *n)?;
                (before(position), position)
            }
            Point::Label(label) => {
                let c = self.checkpoints.iter().rev().find(|c| c.label.as_str() == label)?;
                (c.seq, c.position)
            }
            Point::Seq(seq) => {
                let at_checkpoint = self.checkpoints.iter().any(|c| c.seq == *seq);
                let position = self.messages.partition_point(|m| m.seq <= *seq);
                let at_message = position > 0 && self.messages[position - 1].seq == *seq;
                (at_checkpoint || at_message).then_some((*seq, position))?
            }
        };
        Some(ResolvedPoint { seq, position, digest: self.digest_at(position) })
    }

    /// Returns the log digest at a position, cached with the checkpoint that is there.
    fn digest_at(&self, position: usize) -> LogDigest {
        if position == self.messages.len() {
            return self.head.digest.clone();
        }
        match self.checkpoints.iter().rev().find(|c| c.position == position) {
            Some(checkpoint) => checkpoint.digest.0.get_or_init(|| self.compute_digest(position)).clone(),
            None => self.compute_digest(position),
        }
    }

    /// Computes the digest at a position, starting from the nearest earlier one that is known.
    fn compute_digest(&self, position: usize) -> LogDigest {
        let known = self.checkpoints.iter().rev().filter(|c| c.position < position);
        let known = known.filter_map(|c| Some((c.position, c.digest.0.get()?.clone()))).next();
        let (from, mut digest) = known.unwrap_or_default();
        self.messages[from..position].iter().for_each(|m| digest.advance(&m.message));
        digest
    }

    /// Returns the messages as one JSON array, each exactly as received.
    pub fn messages_json(&self) -> String {
        let mut json = String::with_capacity(self.bytes + self.messages.len() + 2);
        json.push('[');
        for stored in &self.messages {
            if json.len() > 1 {
                json.push(',');
            }
            json.push_str(stored.message.as_str());
        }
        json.push(']');
        json
    }

    /// Estimates the memory that the session occupies, for the budget of the cache.
    pub(crate) fn weight(&self) -> usize {
        // Heap memory of each element besides its text: names, timestamps and allocator overhead.
        const OVERHEAD_BYTES: usize = 128;
        let lists = self.messages.capacity() * (size_of::<StoredMessage>() + OVERHEAD_BYTES)
            + self.checkpoints.capacity() * (size_of::<Checkpoint>() + OVERHEAD_BYTES)
            + self.runs.capacity() * (size_of::<Run>() + 2 * OVERHEAD_BYTES);
        self.bytes + lists + size_of::<Self>() + 2048
    }
}

/// Returns the position after `turns` turns.
fn turn_position(messages: &[StoredMessage], turns: usize) -> Option<usize> {
    let mut counter = TurnCounter::default();
    for (i, stored) in messages.iter().enumerate() {
        if counter.count(stored.message.role()) && counter.turns > turns {
            return Some(i);
        }
    }
    (counter.turns == turns).then_some(messages.len())
}

/// Creates a checkpoint from its log entry.
pub(crate) fn checkpoint(c: &CheckpointEntry, seq: Seq, at: Timestamp, position: usize) -> Checkpoint {
    let CheckpointEntry { label, auto, run, step, state } = c.clone();
    Checkpoint { label, position, created_at: at, auto, seq, run, step, state, digest: CachedDigest::default() }
}

/// The marker at the beginning of a summary, which distinguishes it from a message of the conversation.
pub const SUMMARY_MARKER: &str = "[Summary of the earlier conversation; its messages are not shown]";
