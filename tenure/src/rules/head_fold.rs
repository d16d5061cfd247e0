//! The fold of a head: applies one record at a time, without the rest of the log (D-005).

use crate::rules::metadata;
use crate::types::decision_chain::DecisionChain;
use crate::types::digest::LogDigest;
use crate::types::entry::{Entry, Record, SessionCreated};
use crate::types::head::{DECISIONS, Head, Lease, OpenReview, Pause, PromptPrefix, SessionInfo};
use crate::types::id::SessionKey;
use crate::types::log_hash::LogHash;
use crate::types::status::Status;
use jiff::Timestamp;
use serde_json::Map;

impl Head {
    /// Creates the head of a log from its own first record. `None` unless that is `created`.
    pub fn begin(key: &SessionKey, record: &Record) -> Option<Head> {
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
            pause: None,
            active_at: record.at,
            due_at: None,
            first: record.seq,
            seq: record.seq,
            log_hash: LogHash::of(record),
            digest: LogDigest::default(),
            stored_bytes: 0,
            prompt_prefix: None,
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

    /// Resets the head to a newly created session. Used for the first record of a log, and for a fork's own
    /// `created` entry.
    fn create(&mut self, created: &SessionCreated, at: Timestamp) {
        let c = created.clone();
        let session_id = self.info.session_id.clone();
        let mut metadata = c.metadata;
        // A fork starts with the decisions of its parent. Any other session starts without decisions.
        if c.parent.is_none() {
            metadata.remove(DECISIONS);
        }
        let created_at = c.original_created_at.unwrap_or(at);
        self.info = SessionInfo {
            session_id,
            created_at,
            updated_at: at,
            model: c.model,
            title: c.title,
            tags: c.tags,
            metadata,
        };
        self.user = c.user;
        self.assistant = c.assistant;
        self.thread = c.thread;
        self.status = Status::Active;
        self.status_at = at;
        self.pause = None;
        self.active_at = at;
        self.run = None;
        self.lease = None;
        self.stored_bytes = 0;
        self.reviews.clear();
        self.decisions = c.decisions;
        self.origin = c.origin;
        self.prompt_prefix = c.parent.is_none().then(PromptPrefix::default);
        self.digest = c.parent.map(|p| p.digest).unwrap_or_default();
    }

    /// Applies the next record. Needs only the head, however long the log is (D-005).
    pub fn apply(&mut self, record: &Record) {
        let at = record.at;
        self.seq = record.seq;
        self.log_hash = match record.entry {
            Entry::Created(_) => LogHash::of(record),
            _ => self.log_hash.then(record),
        };
        self.info.updated_at = self.info.updated_at.max(at);
        let mut active = false;
        match &record.entry {
            // A fork that inherited its parent's records contains two `created` entries; its own is the later
            // one.
            Entry::Created(created) => self.create(created, at),
            Entry::Message(entry) => {
                self.prompt_prefix = self
                    .prompt_prefix
                    .take()
                    .and_then(|prefix| prefix.with_message(entry, record.seq, self.digest.messages));
                self.digest.advance(&entry.message);
                self.stored_bytes += entry.message.stored_len();
                active = true;
            }
            Entry::Rewound(r) => {
                self.digest = r.digest.clone();
                self.prompt_prefix = self.prompt_prefix.take().filter(|prefix| prefix.survives_rewind(r.to));
                self.reviews.retain(|open| open.seq <= r.to);
            }
            Entry::Info(patch) => {
                patch.model.apply(&mut self.info.model);
                patch.title.apply(&mut self.info.title);
                let mut tags = Some(std::mem::take(&mut self.info.tags));
                patch.tags.apply(&mut tags);
                self.info.tags = tags.unwrap_or_default();
                metadata::apply_patch(&mut self.info.metadata, &patch.metadata);
            }
            Entry::Status { to, reason, until } => {
                // The session was restored or stopped waiting: its time to live starts again.
                active = *to == Status::Active && self.status != Status::Active;
                self.status = *to;
                self.status_at = at;
                let is_paused = *to == Status::Paused;
                self.pause = is_paused.then(|| Pause { reason: reason.clone(), until: *until });
                if self.paused_until().is_some() {
                    // A run that waits for a time holds no lease.
                    self.lease = None;
                }
            }
            Entry::RunStarted { run, claim, .. } => {
                self.run = Some(run.clone());
                self.lease = claim.as_ref().map(|c| Lease::new(run, c));
                active = true;
            }
            Entry::RunClaimed { run, claim } => self.lease = Some(Lease::new(run, claim)),
            Entry::RunEnded { .. } => {
                self.run = None;
                self.lease = None;
                self.reviews.clear();
                if let Some(pause) = &mut self.pause {
                    pause.until = None;
                }
                active = true;
            }
            Entry::ReviewOpened(opened) => {
                let timeout = opened.timeout.as_ref().map(|t| t.at);
                self.reviews.push(OpenReview { seq: record.seq, queue: opened.queue.clone(), timeout });
                // A run that waits for a review holds no lease.
                self.lease = None;
            }
            Entry::ReviewDecided(d) => {
                self.reviews.retain(|open| d.review.seq() != Some(open.seq));
                metadata::record_decision(&mut self.info.metadata, d, at);
                self.decisions = DecisionChain::after(self.decisions, d, at);
            }
            Entry::Compacted { upto, summary } => {
                if let Some(prefix) = &mut self.prompt_prefix {
                    prefix.summary = summary.as_ref().map(|_| (record.seq, *upto));
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
