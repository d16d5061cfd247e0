//! Editing a loaded session in memory: load it, change it, save it.
//!
//! For work outside of an agent loop. Changes are made in memory and saved in one commit. If
//! another writer committed since the session was loaded, saving is [`Error::Conflict`] and changes
//! nothing.

use crate::engine::write::Committed;
use crate::rules::checkpoint::{fork_record, resolve_point};
use crate::rules::session::{Checkpoint, Point, Session, checkpoint};
use crate::store::contract::Commit;
use crate::tenure::Tenure;
use crate::types::entry::{CheckpointEntry, Entry, Record, RewindEntry};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{CheckpointLabel, SessionId, SessionKey};
use crate::types::message::Message;
use jiff::Timestamp;

impl Tenure {
    /// Commits all changes since a session was loaded, atomically. Does nothing if there are none.
    pub async fn save(&self, session: &mut Session) -> Result<()> {
        session.commit_changes(self).await
    }
}

impl Session {
    async fn commit_changes(&mut self, tenure: &Tenure) -> Result<()> {
        let Some(first) = self.pending.first().cloned() else { return Ok(()) };
        let has_messages = self.pending.iter().any(|r| matches!(r.entry, Entry::Message(_)));
        if has_messages {
            tenure.engine.check_active(self.head())?;
        } else {
            tenure.engine.check_live(self.head())?;
        }
        let mut records = Vec::new();
        let mut blobs = Vec::new();
        for mut record in self.pending.iter().cloned() {
            if let Entry::Message(post) = &mut record.entry {
                let (stored, media) = tenure.engine.detach(std::slice::from_ref(&post.message))?;
                post.message = stored.into_iter().next().unwrap_or_else(|| post.message.clone());
                blobs.extend(media);
            }
            records.push(record);
        }
        if let Entry::Created(mut created) = first.entry {
            let more = records.split_off(1);
            if let Some(parent) = &mut created.parent {
                let key = SessionKey { tenant: self.head().tenant.clone(), session: parent.session.clone() };
                let source = tenure.store().head(&key).await?.ok_or(Error::NotFound { session_id: key.session })?;
                parent.session = tenure.find_log_owner(source, parent.seq).await?.info.session_id;
            }
            records[0].entry = Entry::Created(created);
            let head = tenure.begin_session(&self.head().key(), &records[0], more, blobs).await?;
            self.set_head(head);
        } else {
            // The hash covers the records as they are stored, with blob references in place of media.
            let committed_hash = self.committed_end.map(|end| end.hash).unwrap_or_default();
            let log_hash = records.iter().fold(committed_hash, |hash, record| hash.then(record));
            let head = Head { log_hash, ..self.head().clone() };
            let mut commit = Commit { blobs, ..Commit::new(self.committed_end, records, head) };
            tenure.engine.commit_step(&mut commit).await?;
            tenure.engine.evict(&self.head().key());
            self.set_head(commit.head);
            if let Some(event) = Committed::of(self.head(), &commit.records) {
                tenure.notify_observers(&event).await;
            }
        }
        self.pending.clear();
        Ok(())
    }

    /// Returns true if there are unsaved changes.
    pub fn is_changed(&self) -> bool {
        !self.pending.is_empty()
    }

    fn add(&mut self, entry: Entry, at: Timestamp) {
        if self.pending.is_empty() {
            self.committed_end = Some(self.head().end());
        }
        let record = Record { seq: self.head().seq + 1, at, entry };
        self.apply(&record);
        self.pending.push(record);
    }

    /// Appends a message in memory.
    pub fn push(&mut self, message: Message, at: Timestamp) {
        self.add(Entry::message(message), at);
    }

    /// Sets a checkpoint at the end, in memory.
    pub fn add_checkpoint(&mut self, label: &str, at: Timestamp) -> Result<Checkpoint> {
        let label = CheckpointLabel::new(label)?;
        let entry = CheckpointEntry { label, auto: false, run: None, step: None, state: Default::default() };
        let created = checkpoint(&entry, self.head().seq + 1, at, self.messages.len());
        self.add(Entry::Checkpoint(entry), at);
        Ok(created)
    }

    /// Discards everything after a checkpoint or another point, in memory. Discarded messages stay
    /// in the log.
    pub fn truncate_to(&mut self, point: impl Into<Point>, at: Timestamp) -> Result<()> {
        let resolved = resolve_point(self, &point.into())?;
        self.add(Entry::Rewound(RewindEntry { to: resolved.seq, digest: resolved.digest }), at);
        Ok(())
    }
}

/// Creates a session in memory that shares the source's history up to a point. Nothing is copied in
/// the store; it is stored when it is saved. It is an error if the source has unsaved changes.
pub fn fork_session(source: &Session, point: impl Into<Point>, new: SessionId, at: Timestamp) -> Result<Session> {
    if source.is_changed() {
        return Err(Error::invalid("source", "save the session before forking it"));
    }
    let resolved = resolve_point(source, &point.into())?;
    let record = fork_record(&source.head_at(resolved.seq), &source.head().info.session_id, resolved.clone(), at);
    let key = SessionKey { tenant: source.head().tenant.clone(), session: new };
    let Some(head) = Head::begin(&key, &record) else {
        return Err(Error::invalid("source", "not a session"));
    };
    let mut fork = Session::empty(head);
    fork.messages = source.messages[..resolved.position].to_vec();
    fork.checkpoints = source.checkpoints.iter().filter(|c| c.seq <= resolved.seq).cloned().collect();
    fork.summaries = source.summaries.iter().filter(|s| s.seq <= resolved.seq).cloned().collect();
    fork.uncompacted = source.uncompacted;
    fork.pending.push(record);
    Ok(fork)
}
