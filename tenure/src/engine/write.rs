//! The write path: load, decide, commit, and retry after a conflict. No step is committed on a
//! session that another writer has changed since it was loaded.

use crate::engine::cache::{CacheState, CachedState, Depth, next_generation};
use crate::engine::core::Engine;
use crate::engine::pending_commit::PendingCommit;
use crate::engine::quota::{self, Usage};
use crate::engine::read::admit;
use crate::rules::partial::PartialSession;
use crate::rules::session::Session;
use crate::store::contract::Commit;
use crate::types::blob::Blob;
use crate::types::entry::{Entry, Record};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{CheckpointLabel, Principal, Seq, SessionId, SessionKey};
use crate::types::message::Message;
use jiff::Timestamp;
use tokio::time::Instant;
use tracing::Instrument;

impl Engine {
    /// Writes to a session whose head `step` sees: the log is not read.
    pub(crate) async fn write_head<R>(
        &self,
        principal: &Principal,
        id: &SessionId,
        mut step: impl FnMut(&Head, Timestamp) -> Result<PendingCommit<R>>,
    ) -> Result<(R, Option<Committed>)> {
        self.write(principal, id, Depth::Head, |state, now| step(state.loaded_head()?, now)).await
    }

    /// Writes to a session of which `step` sees the part that a run needs.
    pub(crate) async fn write_partial<R>(
        &self,
        principal: &Principal,
        id: &SessionId,
        mut step: impl FnMut(PartialSession<'_>, Timestamp) -> Result<PendingCommit<R>>,
    ) -> Result<(R, Option<Committed>)> {
        self.write(principal, id, Depth::Partial, |state, now| step(state.partial()?, now)).await
    }

    /// Writes to a session that `step` sees in full.
    pub(crate) async fn write_session<R>(
        &self,
        principal: &Principal,
        id: &SessionId,
        mut step: impl FnMut(&Session, Timestamp) -> Result<PendingCommit<R>>,
    ) -> Result<(R, Option<Committed>)> {
        self.write(principal, id, Depth::Full, |state, now| step(&state.full()?.session, now)).await
    }

    /// Runs one step on a session: loads it, lets `step` decide what to write, and commits. If
    /// another writer committed first, the session is refreshed and the step is retried, up to
    /// `max_retries` times (optimistic concurrency).
    async fn write<R>(
        &self,
        principal: &Principal,
        id: &SessionId,
        need: Depth,
        mut step: impl FnMut(&CacheState, Timestamp) -> Result<PendingCommit<R>>,
    ) -> Result<(R, Option<Committed>)> {
        let key = principal.key(id);
        self.ensure_assistants_loaded(&key.tenant).await?;
        let entry = self.cache_entry(&key);
        let mut cached = entry.cached.lock().await;
        self.count_cache_lookup(&cached.state, need);
        let mut refreshed = false;
        let mut reserved = false;
        // One extra round, for the refresh of a stale cache.
        for _ in 0..=self.limits().max_retries + 1 {
            // A session is only folded from a current head: an old one may name a parent that is
            // another session by now. While another node holds the lease, its renewals are not in
            // the log, so the cached head may be stale without a conflict.
            let head = cached.state.head();
            let leased_by_other_node = head.and_then(|h| h.lease.as_ref()).is_some_and(|l| l.node != self.node());
            if !self.suffices(&cached.state, need) || (leased_by_other_node && !refreshed) {
                self.refresh(&key, &mut cached).await?;
                refreshed = true;
            }
            self.load_current(&key, &mut cached, need).await?;
            let now = self.now();
            let state = &cached.state;
            let draft = admit(principal, id, state).and_then(|()| step(state, now));
            // The cached state may be stale: refresh it before an error, or the absence of changes,
            // is reported.
            let idle = draft.as_ref().map_or(true, PendingCommit::is_idle);
            if idle && !refreshed {
                self.refresh(&key, &mut cached).await?;
                refreshed = true;
                continue;
            }
            let draft = draft?;
            // The output of a run in progress is stored even over the quota: rejecting it would
            // lose an answer that was paid for.
            if principal.quota.is_some() && !reserved {
                let more = Usage { sessions: 0, bytes: quota::stored_bytes(draft.entries.iter()) };
                if cached.state.head().is_some_and(|head| head.run.is_some()) {
                    self.add_usage(principal, more).await;
                } else {
                    self.reserve(principal, more).await?;
                }
                reserved = true;
            }
            match self.commit(&mut cached, draft, now).await {
                Err(Error::Conflict { .. }) => {
                    self.refresh(&key, &mut cached).await?;
                    refreshed = true;
                }
                answer => {
                    if answer.is_err() {
                        cached.state = CacheState::Empty;
                    }
                    self.update_entry_weight(&key, &entry, cached.state.weight());
                    return answer;
                }
            }
        }
        Err(Error::Conflict { session_id: id.clone(), expected: cached.state.head().map_or(0, |h| h.seq) })
    }

    /// Commits to the store, together with the change of the message index, counts the outcome, and calls
    /// the observers if the commit succeeded.
    pub(crate) async fn commit_step(&self, commit: &mut Commit) -> Result<()> {
        self.index_commit(commit).await?;
        let span = tracing::info_span!(
            target: "tenure::trace", "commit", otel.name = "commit", otel.kind = "client", db.operation.name = "commit",
            session.id = commit.head.info.session_id.as_str(), records = commit.records.len(),
        );
        let started = Instant::now();
        let result = self.store().commit(commit).instrument(span).await;
        metrics::histogram!("tenure_commit_seconds").record(started.elapsed().as_secs_f64());
        let outcome = match &result {
            Ok(()) => "committed",
            Err(Error::Conflict { .. } | Error::Exists { .. }) => "conflict",
            Err(_) => "failed",
        };
        metrics::counter!("tenure_commits_total", "outcome" => outcome).increment(1);
        if result.is_ok() {
            self.observers().iter().for_each(|observer| observer.committed(&**self.store(), commit));
        }
        result
    }

    /// Commits a draft on the cached state, and applies it to the cache.
    pub async fn commit<R>(
        &self,
        cached: &mut CachedState,
        draft: PendingCommit<R>,
        now: Timestamp,
    ) -> Result<(R, Option<Committed>)> {
        let generation = next_generation();
        let Some(previous) = cached.state.head() else { return Err(Error::unavailable("the session was not loaded")) };
        if draft.is_idle() {
            return Ok((draft.reply, None));
        }
        let numbered = (previous.seq + 1..).zip(draft.entries);
        let records: Vec<Record> = numbered.map(|(seq, entry)| Record { seq, at: now, entry }).collect();
        let mut head = previous.clone();
        records.iter().for_each(|r| head.apply(r));
        if head.status != previous.status || head.due_at.is_none() {
            head.due_at = self.due_at(&head);
        }
        if let (Some(lease), Some(until)) = (&mut head.lease, draft.lease) {
            lease.until = until;
        }
        let base = Some(previous.end());
        let mut commit = Commit { base, records, head, items: draft.items, blobs: draft.blobs, message_index: None };
        let previous_status = previous.status;
        self.commit_step(&mut commit).await?;
        self.live_count().record_change(Some(previous_status), &commit.head);
        let event = Committed::of(&commit.head, &commit.records);
        // The ancestor of a fork is determined by the store and may have changed, so the cached
        // head of a fork is not current.
        if commit.head.parent.is_none() {
            cached.as_of = generation;
        }
        match cached.state.session_mut() {
            Some(session) => {
                commit.records.iter().for_each(|r| drop(session.apply_to_lists(r)));
                session.set_head(commit.head);
            }
            None => cached.state = CacheState::Head(Box::new(commit.head)),
        }
        Ok((draft.reply, event))
    }

    /// Commits the first records of a new session with their media.
    pub(crate) async fn begin(
        &self,
        key: &SessionKey,
        first: &Record,
        more: Vec<Record>,
        blobs: Vec<Blob>,
    ) -> Result<Head> {
        self.ensure_assistants_loaded(&key.tenant).await?;
        let head = Head::begin(key, first);
        let mut head = head.ok_or_else(|| Error::invalid("session", "a log must begin with `created`"))?;
        more.iter().for_each(|r| head.apply(r));
        head.due_at = self.due_at(&head);
        let mut commit = Commit::new(None, [vec![first.clone()], more].concat(), head.clone());
        commit.blobs = blobs;
        self.commit_step(&mut commit).await?;
        self.live_count().record_change(None, &head);
        self.evict(key);
        Ok(head)
    }

    /// Purges a session and evicts it from the cache.
    pub(crate) async fn purge_key(&self, key: &SessionKey) -> Result<()> {
        self.store().purge(key).await?;
        self.live_count().forget();
        self.evict(key);
        Ok(())
    }

    /// Checks messages against the limits, and replaces their media by blob references. Returns the
    /// messages and the blobs.
    pub(crate) fn detach(&self, messages: &[Message]) -> Result<(Vec<Message>, Vec<Blob>)> {
        let limits = self.limits();
        if messages.len() > limits.max_messages {
            let description = format!("a list of {} messages", messages.len());
            return Err(Error::TooLarge {
                subject: description,
                limit: "max_messages",
                max: limits.max_messages as u64,
            });
        }
        let mut stored = Vec::with_capacity(messages.len());
        let mut blobs = Vec::new();
        for (i, message) in messages.iter().enumerate() {
            if message.as_str().len() > limits.max_message_bytes {
                let description = format!("message {i}");
                return Err(Error::TooLarge {
                    subject: description,
                    limit: "max_message_bytes",
                    max: limits.max_message_bytes as u64,
                });
            }
            let (message, media) = message.detach();
            stored.push(message);
            blobs.extend(media);
        }
        Ok((stored, blobs))
    }
}

/// The consequences of a commit for other parts than the one that committed.
#[derive(Clone, Debug)]
pub(crate) struct Committed {
    /// The head after the commit.
    pub head: Head,
    /// Whether the commit discarded messages (a rewind).
    pub rewound: bool,
    /// The last checkpoint that was set, with the sequence number of its record.
    pub checkpoint: Option<(CheckpointLabel, Seq)>,
    /// Whether the session was deleted or has expired.
    pub ended: bool,
}

impl Committed {
    /// The event of a commit. `None` means that it neither discarded messages nor set a checkpoint
    /// nor ended the session.
    pub fn of(head: &Head, records: &[Record]) -> Option<Self> {
        let rewound = records.iter().any(|r| matches!(r.entry, Entry::Rewound(_)));
        let checkpoint = records.iter().rev().find_map(|record| match &record.entry {
            Entry::Checkpoint(set) => Some((set.label.clone(), record.seq)),
            _ => None,
        });
        let ended = records.iter().any(|r| matches!(r.entry, Entry::Status { to, .. } if !to.is_live()));
        (rewound || checkpoint.is_some() || ended).then(|| Self { head: head.clone(), rewound, checkpoint, ended })
    }
}
