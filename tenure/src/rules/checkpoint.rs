//! Builds the entries of checkpoints, rewinds and forks.

use crate::rules::session::{Checkpoint, Point, ResolvedPoint, Session, StoredMessage, checkpoint};
use crate::rules::turns::TurnCounter;
use crate::types::entry::{CheckpointEntry, Entry, Parent, Record, RewindEntry, SessionCreated};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{CheckpointLabel, RunId, SessionId};
use crate::types::message::{Message, Role};
use jiff::Timestamp;

/// Builds the first record of a fork of `source`. The position of the fork is in the log of `owner`, which is
/// `source` or one of its ancestors. Its sequence number continues that log (D-002).
pub(crate) fn fork_record(source: &Head, owner: &SessionId, point: ResolvedPoint, at: Timestamp) -> Record {
    let parent = Parent { session: owner.clone(), seq: point.seq, digest: point.digest };
    let info = source.info.clone();
    let created = SessionCreated {
        user: source.user.clone(),
        assistant: source.assistant.clone(),
        thread: source.thread.clone(),
        model: info.model,
        title: info.title,
        tags: info.tags,
        metadata: info.metadata,
        parent: Some(parent),
        original_created_at: None,
        decisions: source.decisions,
        origin: None,
    };
    Record { seq: point.seq + 1, at, entry: Entry::created(created) }
}

/// Resolves a point. A point that the session does not have is [`Error::NoSuchPoint`].
pub(crate) fn resolve_point(session: &Session, point: &Point) -> Result<ResolvedPoint> {
    let session_id = session.head().info.session_id.clone();
    session.locate(point).ok_or_else(|| Error::NoSuchPoint { session_id, point: point.to_string() })
}

/// Builds the entry that rewinds a session to its first `retained` messages.
pub(crate) fn rewind_entry(session: &Session, retained: usize) -> Entry {
    let end = ResolvedPoint { seq: session.head().seq, position: retained, digest: session.head().digest.clone() };
    let point = session.locate(&Point::Position(retained)).unwrap_or(end);
    Entry::Rewound(RewindEntry { to: point.seq, digest: point.digest })
}

/// Builds the automatic checkpoint after new messages. `None` unless they end with a completed answer.
pub(crate) fn automatic_checkpoint(head: &Head, new: &[Message], run: Option<&RunId>) -> Option<Entry> {
    let last = new.last()?;
    if last.role() != Role::Assistant || !last.is_visible() {
        return None;
    }
    let mut counter = TurnCounter::after(&head.digest);
    for message in new {
        counter.count(message.role());
    }
    let label = CheckpointLabel::new(format!("turn-{}", counter.turns)).ok()?;
    Some(Entry::Checkpoint(CheckpointEntry {
        label,
        auto: true,
        run: run.cloned(),
        step: None,
        state: Default::default(),
    }))
}

/// Builds the automatic checkpoint after a summary of the oldest messages.
pub(crate) fn compaction_checkpoint(session: &Session) -> Option<Entry> {
    // The record of the summary, which makes the label unique.
    let label = CheckpointLabel::new(format!("compacted-{}", session.head().seq + 1)).ok()?;
    Some(Entry::Checkpoint(CheckpointEntry { label, auto: true, run: None, step: None, state: Default::default() }))
}

/// Builds the automatic checkpoint after tool results that a client sent with a request: it follows the start of
/// the request's run, as the run's first step.
pub(crate) fn client_tools_checkpoint(session: &Session, run: &RunId) -> Option<Entry> {
    let prefix = format!("turn-{}.", session.head().digest.turns.max(1));
    let earlier = session.checkpoints.iter().filter(|c| c.auto && c.label.as_str().starts_with(&prefix)).count();
    let label = CheckpointLabel::new(format!("{prefix}{}", earlier + 1)).ok()?;
    let run = Some(run.clone());
    Some(Entry::Checkpoint(CheckpointEntry { label, auto: true, run, step: Some(1), state: Default::default() }))
}

/// Computes the checkpoints that a run would have set along these messages: `turn-N` after each answer, and
/// `turn-N.M` after the result of the turn's M-th tool call.
pub fn make_checkpoints(messages: &[StoredMessage]) -> Vec<Checkpoint> {
    let mut checkpoints = Vec::new();
    let mut counter = TurnCounter::default();
    let mut calls = 0;
    for (i, stored) in messages.iter().enumerate() {
        let role = stored.message.role();
        counter.count(role);
        let label = match role {
            Role::User => {
                calls = 0;
                continue;
            }
            Role::Assistant if stored.message.is_visible() => format!("turn-{}", counter.turns),
            Role::Tool => {
                calls += 1;
                format!("turn-{}.{calls}", counter.turns)
            }
            _ => continue,
        };
        let Ok(label) = CheckpointLabel::new(label) else { continue };
        let entry =
            CheckpointEntry { label, auto: true, run: stored.run.clone(), step: None, state: Default::default() };
        checkpoints.push(checkpoint(&entry, stored.seq, stored.at, i + 1));
    }
    checkpoints
}
