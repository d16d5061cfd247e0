//! The fold: a log becomes a session. The one place that says what an entry means.

use crate::rules::metadata;
use crate::types::decision_chain::DecisionChain;
use crate::types::digest::Mark;
use crate::types::entry::{Checkpointed, Created, Entry, Outcome, Post, Record, ReviewDecided, ReviewOpened};
use crate::types::head::{DECISIONS, Front, Head, Lease, LogEnd, OpenReview, SessionInfo};
use crate::types::id::{Key, Label, RunId, Seq};
use crate::types::log_hash::LogHash;
use crate::types::message::{Message, Role};
use crate::types::status::Status;
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Map, Value};
use std::ops::Deref;
use std::sync::OnceLock;

/// A message with its place in the log, its time, and the run that produced it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Said {
    /// Its record.
    pub seq: Seq,
    /// When.
    pub at: Timestamp,
    /// The run that produced it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// A system message that replaced the one the conversation began with.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub lead: bool,
    /// An answer that was cut off before its end.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// The record of the assistant message that this user message followed in its own request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replies_to: Option<Seq>,
    /// What was said.
    pub message: Message,
}

impl Said {
    /// A message of the log, at its place.
    pub(crate) fn new(seq: Seq, at: Timestamp, post: Post) -> Self {
        let Post { run, lead, partial, replies_to, message } = post;
        Self { seq, at, run, lead, partial, replies_to, message }
    }
}

/// A point to come back to. It points into the log and copies nothing.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Checkpoint {
    /// Its name.
    pub label: Label,
    /// The number of messages before it: an index into the session's messages.
    pub position: usize,
    /// When it was made.
    pub created_at: Timestamp,
    /// Whether the runtime made it.
    pub auto: bool,
    /// Its record.
    pub seq: Seq,
    /// The run it was taken in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// The step of that run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// What its maker put there.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub state: Map<String, Value>,
    /// How much had been said, once somebody has asked.
    #[serde(skip)]
    pub(crate) mark: Memo,
}

/// A mark that was worked out before. It follows from the messages, so it makes no difference to anything but speed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memo(OnceLock<Mark>);

impl PartialEq for Memo {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// In the detail of a `tool_started`: nothing was called.
pub(crate) const CACHED: &str = "cached";
/// In the detail of a `tool_started` and in the state of a run's checkpoint: how many tokens it has used.
pub(crate) const TOKENS: &str = "tokens";

/// How many tokens a run had used when this was written.
pub(crate) fn spent(state: &Map<String, Value>) -> u64 {
    state.get(TOKENS).and_then(Value::as_u64).unwrap_or(0)
}

/// One turn of work.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Its id.
    pub id: RunId,
    /// When it began.
    pub started_at: Timestamp,
    /// When and how it ended.
    pub ended: Option<(Timestamp, Outcome)>,
    /// What went wrong.
    pub error: Option<String>,
    /// The same as one stable word.
    pub code: Option<String>,
    /// Its first record.
    pub seq: Seq,
    /// What it was started with.
    pub detail: Map<String, Value>,
    /// Tool calls that were begun: the ledger.
    pub tools_started: Vec<Started>,
}

/// A tool call that was begun.
#[derive(Clone, Debug, PartialEq)]
pub struct Started {
    /// Its record.
    pub seq: Seq,
    /// The id of the call.
    pub call: String,
    /// The tool's name.
    pub tool: String,
    /// Whether its result was in the cache, so that nothing was called.
    pub cached: bool,
    /// How many tokens the run had used by then.
    pub tokens: u64,
}

/// A question to a person, and the answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Review {
    /// When it was asked.
    pub opened_at: Timestamp,
    /// Its record.
    pub seq: Seq,
    /// What was asked.
    pub opened: ReviewOpened,
    /// Who looks at it, and until when others leave it alone.
    pub claimed: Option<(String, Option<Timestamp>)>,
    /// What was decided.
    pub decided: Option<(Timestamp, ReviewDecided)>,
    /// Whether the run went on or ended without it.
    pub void: bool,
}

/// A summary that stands for the oldest messages when a model is shown the history.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Its record.
    pub seq: Seq,
    /// When it was written.
    pub at: Timestamp,
    /// The last record it covers.
    pub upto: Seq,
    /// The number of messages it covers.
    pub position: usize,
    /// The summary.
    pub message: Message,
}

impl Summary {
    /// What it says, without the mark that models are shown.
    pub fn text(&self) -> String {
        let text = self.message.text();
        text.strip_prefix(crate::rules::summary::MARK).map_or(&*text, str::trim_start).to_owned()
    }
}

/// A session: its log, folded. What its [`Head`] knows can be read from it directly (`session.info`, `session.status` …).
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    head: Head,
    /// What has been said, oldest first; what was rewound is not in it.
    pub messages: Vec<Said>,
    /// The points to come back to, oldest first.
    pub checkpoints: Vec<Checkpoint>,
    /// The runs, oldest first.
    pub runs: Vec<Run>,
    /// The reviews, oldest first.
    pub reviews: Vec<Review>,
    /// The summaries that hold, oldest first: the newest is in force, the others hold again when what came after them is cut off.
    pub(crate) summaries: Vec<Summary>,
    /// The records of all decisions, each with the end of the hash chain after it.
    pub(crate) decided: Vec<(Seq, Option<DecisionChain>)>,
    /// Somebody wanted to see the messages themselves again: no summary is written unless somebody asks for one.
    pub uncompacted: bool,
    /// Records that were applied here and are not saved yet.
    pub(crate) pending: Vec<Record>,
    /// Where its log ended before them.
    pub(crate) saved: Option<LogEnd>,
    /// What those records cut off.
    pub(crate) cut_off: Vec<Message>,
    /// So many messages are not here, because nobody needs them: those before this record.
    pub(crate) older: (usize, Seq),
    /// Bytes of all messages, roughly: media may have been put back.
    bytes: usize,
}

impl Deref for Session {
    type Target = Head;
    fn deref(&self) -> &Head {
        &self.head
    }
}

/// A place in a session, as people name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Point {
    /// After the newest checkpoint with this label.
    Label(String),
    /// After so many messages.
    Position(usize),
    /// After so many turns.
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

impl From<&Label> for Point {
    fn from(label: &Label) -> Self {
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

/// A place in a session, found.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    /// The last record that belongs to it.
    pub seq: Seq,
    /// The number of messages before it.
    pub position: usize,
    /// How much had been said.
    pub mark: Mark,
}

impl Session {
    /// A session from its index card and its whole log, its parent's part included.
    pub fn fold(head: Head, records: impl IntoIterator<Item = Record>) -> Self {
        let mut session = Self::empty(head);
        session.messages.reserve(session.head.mark.messages);
        records.into_iter().for_each(|record| session.take_in(record));
        session
    }

    /// Takes a record into the lists, and keeps what it can of it.
    pub(crate) fn take_in(&mut self, record: Record) {
        match record.entry {
            Entry::Message(post) => {
                self.bytes += post.message.text_len();
                self.messages.push(Said::new(record.seq, record.at, post));
            }
            _ => drop(self.take(&record)),
        }
    }

    /// A session from its log alone. `None` if the log does not begin with `created`.
    pub fn replay(key: &Key, records: impl IntoIterator<Item = Record>) -> Option<Self> {
        let mut records = records.into_iter();
        let mut session = Self::empty(Head::begin(key, &records.next()?)?);
        for record in records {
            session.apply(&record);
        }
        Some(session)
    }

    pub(crate) fn empty(head: Head) -> Self {
        let (messages, checkpoints, runs, reviews) = Default::default();
        Self {
            head,
            messages,
            checkpoints,
            runs,
            reviews,
            summaries: Vec::new(),
            decided: Vec::new(),
            uncompacted: false,
            pending: Vec::new(),
            saved: None,
            cut_off: Vec::new(),
            older: (0, 0),
            bytes: 0,
        }
    }

    /// Its index card.
    pub fn head(&self) -> &Head {
        &self.head
    }

    pub(crate) fn set_head(&mut self, head: Head) {
        self.head = head;
    }

    /// Takes the next record in: the head and the lists. What a rewind cuts off is given back.
    pub fn apply(&mut self, record: &Record) -> Vec<Said> {
        self.head.apply(record);
        self.take(record)
    }

    /// Takes the next record into the lists only.
    pub(crate) fn take(&mut self, record: &Record) -> Vec<Said> {
        let (seq, at) = (record.seq, record.at);
        match &record.entry {
            Entry::Message(post) => {
                self.bytes += post.message.text_len();
                self.messages.push(Said::new(seq, at, post.clone()));
            }
            Entry::Checkpoint(c) => self.checkpoints.push(checkpoint(c, seq, at, self.older.0 + self.messages.len())),
            Entry::Rewound(r) => return self.cut(r.to),
            Entry::RunStarted { run, detail, .. } => {
                let (ended, error, code, tools_started) = Default::default();
                let (id, detail) = (run.clone(), detail.clone());
                self.runs.push(Run { id, started_at: at, ended, error, code, seq, detail, tools_started });
            }
            Entry::ToolStarted { run, call, tool, detail } => {
                if let Some(run) = self.run_mut(run) {
                    let cached = detail.get(CACHED) == Some(&Value::Bool(true));
                    let (call, tool, tokens) = (call.clone(), tool.clone(), spent(detail));
                    run.tools_started.push(Started { seq, call, tool, cached, tokens });
                }
            }
            Entry::RunEnded { run, outcome, error, code } => {
                self.void_reviews(|r| r.opened.run.as_ref() == Some(run));
                if let Some(run) = self.run_mut(run) {
                    run.ended = Some((at, *outcome));
                    (run.error, run.code) = (error.clone(), code.clone());
                }
            }
            Entry::ReviewOpened(opened) => {
                let (opened, opened_at) = ((**opened).clone(), at);
                self.reviews.push(Review { opened_at, seq, opened, claimed: None, decided: None, void: false });
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
                // A fork: what its parent was doing is not for it to finish, and its questions are not asked here.
                self.void_reviews(|_| true);
                for run in self.runs.iter_mut().filter(|r| r.ended.is_none()) {
                    run.ended = Some((at, Outcome::Cancelled));
                }
            }
            Entry::Info(_) | Entry::Status { .. } | Entry::RunClaimed { .. } => {}
        }
        Vec::new()
    }

    fn void_reviews(&mut self, which: impl Fn(&Review) -> bool) {
        let open = self.reviews.iter_mut().filter(|r| r.decided.is_none());
        open.filter(|r| which(r)).for_each(|r| r.void = true);
    }

    fn cut(&mut self, to: Seq) -> Vec<Said> {
        self.checkpoints.retain(|c| c.seq <= to);
        self.void_reviews(|r| r.seq > to);
        self.summaries.retain(|s| s.upto <= to);
        let cut = self.messages.split_off(self.messages.partition_point(|m| m.seq <= to));
        let bytes: usize = cut.iter().map(|m| m.message.text_len()).sum();
        self.bytes = self.bytes.saturating_sub(bytes);
        cut
    }

    fn run_mut(&mut self, id: &RunId) -> Option<&mut Run> {
        self.runs.iter_mut().rev().find(|r| r.id == *id)
    }

    /// The reviews that nobody has decided yet.
    pub fn open_reviews(&self) -> impl Iterator<Item = &Review> {
        self.reviews.iter().filter(|r| r.decided.is_none() && !r.void)
    }

    /// The summary that is shown in place of the oldest messages.
    pub fn summary(&self) -> Option<&Summary> {
        self.summaries.last()
    }

    /// A run by its id.
    pub fn run(&self, id: &RunId) -> Option<&Run> {
        self.runs.iter().rev().find(|r| r.id == *id)
    }

    /// Finds a place. `None` if the session has no such checkpoint, position or turn.
    pub fn locate(&self, point: &Point) -> Option<Place> {
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
        Some(Place { seq, position, mark: self.mark_at(position) })
    }

    fn mark_at(&self, position: usize) -> Mark {
        if position == self.messages.len() {
            return self.head.mark.clone();
        }
        match self.checkpoints.iter().rev().find(|c| c.position == position) {
            Some(checkpoint) => checkpoint.mark.0.get_or_init(|| self.work_out_mark(position)).clone(),
            None => self.work_out_mark(position),
        }
    }

    /// Goes on from the last mark that is known.
    fn work_out_mark(&self, position: usize) -> Mark {
        let known = self.checkpoints.iter().rev().filter(|c| c.position < position);
        let known = known.filter_map(|c| Some((c.position, c.mark.0.get()?.clone()))).next();
        let (from, mut mark) = known.unwrap_or_default();
        self.messages[from..position].iter().for_each(|m| mark.advance(&m.message));
        mark
    }

    /// The messages as one JSON list, each exactly as it was given.
    pub fn messages_json(&self) -> String {
        let mut json = String::with_capacity(self.bytes + self.messages.len() + 2);
        json.push('[');
        for said in &self.messages {
            if json.len() > 1 {
                json.push(',');
            }
            json.push_str(said.message.as_str());
        }
        json.push(']');
        json
    }

    /// Roughly the memory it takes, for the cache's budget.
    pub(crate) fn weight(&self) -> usize {
        // What each has on the heap beside its text: names, times, and the allocator's own share.
        const BESIDE: usize = 128;
        let lists = self.messages.capacity() * (size_of::<Said>() + BESIDE)
            + self.checkpoints.capacity() * (size_of::<Checkpoint>() + BESIDE)
            + self.runs.capacity() * (size_of::<Run>() + 2 * BESIDE);
        self.bytes + lists + size_of::<Self>() + 2048
    }
}

/// The position after so many turns.
fn turn_position(messages: &[Said], turns: usize) -> Option<usize> {
    let (mut seen, mut last) = (0, None);
    for (i, said) in messages.iter().enumerate() {
        let role = said.message.role();
        if role == Role::User && last != Some(Role::User) {
            if seen == turns {
                return Some(i);
            }
            seen += 1;
        }
        if !role.instructs() {
            last = Some(role);
        }
    }
    (seen == turns).then_some(messages.len())
}

pub(crate) fn checkpoint(c: &Checkpointed, seq: Seq, at: Timestamp, position: usize) -> Checkpoint {
    let Checkpointed { label, auto, run, step, state } = c.clone();
    Checkpoint { label, position, created_at: at, auto, seq, run, step, state, mark: Memo::default() }
}

impl Head {
    /// The card of a log whose own first record is this one. `None` unless that is `created`.
    pub fn begin(key: &Key, record: &Record) -> Option<Head> {
        let Entry::Created(created) = &record.entry else { return None };
        let mut head = Head {
            tenant: key.tenant.clone(),
            user: created.user.clone(),
            info: SessionInfo {
                session_id: key.session.clone(),
                created_at: record.at,
                updated_at: record.at,
                model: None,
                title: None,
                tags: Vec::new(),
                metadata: Map::new(),
            },
            assistant: None,
            thread: None,
            status: Status::Active,
            status_at: record.at,
            active_at: record.at,
            due_at: None,
            first: record.seq,
            seq: record.seq,
            log: Some(LogHash::of(record)),
            mark: Mark::default(),
            stored_bytes: None,
            front: None,
            parent: created.parent.clone(),
            run: None,
            lease: None,
            reviews: Vec::new(),
            decisions: None,
            origin: None,
        };
        head.create(created, record.at);
        Some(head)
    }

    fn create(&mut self, created: &Created, at: Timestamp) {
        let c = created.clone();
        let session_id = self.info.session_id.clone();
        let (model, title, tags, mut metadata) = (c.model, c.title, c.tags, c.metadata);
        // A fork begins with the decisions of its parent's part. Otherwise nobody has decided anything yet.
        if c.parent.is_none() {
            metadata.remove(DECISIONS);
        }
        let created_at = c.began_at.unwrap_or(at);
        self.info = SessionInfo { session_id, created_at, updated_at: at, model, title, tags, metadata };
        (self.user, self.assistant, self.thread) = (c.user, c.assistant, c.thread);
        (self.status, self.status_at, self.active_at) = (Status::Active, at, at);
        (self.run, self.lease) = (None, None);
        self.stored_bytes = Some(0);
        self.reviews.clear();
        (self.decisions, self.origin) = (c.decisions, c.origin);
        self.front = c.parent.is_none().then(Front::default);
        self.mark = c.parent.map(|p| p.mark).unwrap_or_default();
    }

    /// Takes the next record in. Needs nothing but the card, however long the log is.
    pub fn apply(&mut self, record: &Record) {
        let at = record.at;
        self.seq = record.seq;
        self.log = match record.entry {
            Entry::Created(_) => Some(LogHash::of(record)),
            _ => self.log.map(|log| log.then(record)),
        };
        self.info.updated_at = self.info.updated_at.max(at);
        let mut active = false;
        match &record.entry {
            // A fork that inherited its parent's records has two beginnings; its own is the later one.
            Entry::Created(created) => self.create(created, at),
            Entry::Message(post) => {
                self.front = self.front.take().and_then(|front| front.after(post, record.seq, self.mark.messages));
                self.mark.advance(&post.message);
                self.stored_bytes = self.stored_bytes.map(|bytes| bytes + post.message.stored_len());
                active = true;
            }
            Entry::Rewound(r) => {
                self.mark = r.mark.clone();
                self.front = self.front.take().filter(|front| front.is_before(r.to));
                self.reviews.retain(|open| open.seq <= r.to);
            }
            Entry::Info(change) => {
                change.model.apply(&mut self.info.model);
                change.title.apply(&mut self.info.title);
                let mut tags = Some(std::mem::take(&mut self.info.tags));
                change.tags.apply(&mut tags);
                self.info.tags = tags.unwrap_or_default();
                metadata::apply_patch(&mut self.info.metadata, &change.metadata);
            }
            Entry::Status { to, .. } => {
                // Restored, or done waiting: its time to live begins anew.
                active = *to == Status::Active && self.status != Status::Active;
                (self.status, self.status_at) = (*to, at);
            }
            Entry::RunStarted { run, claim, .. } => {
                self.run = Some(run.clone());
                self.lease = claim.as_ref().map(|c| Lease::new(run, c));
                active = true;
            }
            Entry::RunClaimed { run, claim } => self.lease = Some(Lease::new(run, claim)),
            Entry::RunEnded { .. } => {
                (self.run, self.lease) = (None, None);
                self.reviews.clear();
                active = true;
            }
            Entry::ReviewOpened(opened) => {
                let timeout = opened.timeout.as_ref().map(|t| t.at);
                self.reviews.push(OpenReview { seq: record.seq, queue: opened.queue.clone(), timeout });
                // A run that waits for a person is nobody's.
                self.lease = None;
            }
            Entry::ReviewDecided(d) => {
                self.reviews.retain(|open| d.review.seq() != Some(open.seq));
                metadata::record_decision(&mut self.info.metadata, d, at);
                self.decisions = DecisionChain::after(self.decisions, d, at);
            }
            Entry::Compacted { upto, summary } => {
                if let Some(front) = &mut self.front {
                    front.summary = summary.as_ref().map(|_| (record.seq, *upto));
                }
            }
            Entry::Checkpoint(_) | Entry::ToolStarted { .. } | Entry::ReviewClaimed { .. } => {}
        }
        if active {
            // A clock that jumps back must not make a session look idle.
            self.active_at = self.active_at.max(at);
        }
    }
}
