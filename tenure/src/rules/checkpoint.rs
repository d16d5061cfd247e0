//! Builds the entries of checkpoints, rewinds and forks.

use crate::rules::session::{Checkpoint, Point, ResolvedPoint, Session, StoredMessage, checkpoint};
use crate::types::entry::{CheckpointEntry, Entry, Parent, Record, RewindEntry, SessionCreated};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{CheckpointLabel, RunId, SessionId};
use crate::types::message::{Message, Role};
use jiff::Timestamp;

/// Builds the first record of a fork of `source`. The position of the fork is in the log of `owner`, which is
/// `source` or one of its ancestors. Its sequence number continues that log (D-002).
pub(crate) fn fork_record(source: &Head, owner: &SessionId, place: ResolvedPoint, at: Timestamp) -> Record {
    let parent = Parent { session: owner.clone(), seq: place.seq, mark: place.mark };
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
        began_at: None,
        decisions: source.decisions,
        origin: None,
    };
    Record { seq: place.seq + 1, at, entry: Entry::created(created) }
}

/// Resolves a point. A point that the session does not have is [`Error::NoSuchPoint`].
pub(crate) fn place(session: &Session, at: &Point) -> Result<ResolvedPoint> {
    let session_id = session.info.session_id.clone();
    session.locate(at).ok_or_else(|| Error::NoSuchPoint { session_id, what: at.to_string() })
}

/// Builds the entry that rewinds a session to its first `keep` messages. Also returns the messages that it
/// discards.
pub(crate) fn rewound(session: &Session, keep: usize) -> (Entry, Vec<Message>) {
    let end = ResolvedPoint { seq: session.seq, position: keep, mark: session.mark.clone() };
    let place = session.locate(&Point::Position(keep)).unwrap_or(end);
    let cut = session.messages[keep..].iter().map(|m| m.message.clone()).collect();
    (Entry::Rewound(RewindEntry { to: place.seq, mark: place.mark }), cut)
}

/// Builds the automatic checkpoint after new messages. `None` unless they end with a completed answer.
pub(crate) fn automatic(head: &Head, new: &[Message], run: Option<&RunId>) -> Option<Entry> {
    let last = new.last()?;
    if last.role() != Role::Assistant || !last.is_visible() {
        return None;
    }
    let mut turns = TurnCounter { seen: head.mark.turns, last: head.mark.last };
    new.iter().for_each(|m| turns.count(m.role()));
    let label = CheckpointLabel::new(format!("turn-{}", turns.seen)).ok()?;
    let (step, state) = Default::default();
    Some(Entry::Checkpoint(CheckpointEntry { label, auto: true, run: run.cloned(), step, state }))
}

/// Counts turns: user messages that do not follow another user message.
struct TurnCounter {
    seen: usize,
    last: Option<Role>,
}

impl TurnCounter {
    fn count(&mut self, role: Role) {
        if role == Role::User && self.last != Some(Role::User) {
            self.seen += 1;
        }
        if !role.instructs() {
            self.last = Some(role);
        }
    }
}

/// Computes the checkpoints that a run would have set along these messages: `turn-N` after each answer, and
/// `turn-N.M` after the results of the turn's M-th round of tool calls.
pub fn make_checkpoints(messages: &[StoredMessage]) -> Vec<Checkpoint> {
    let mut made = Vec::new();
    let (mut turns, mut rounds) = (TurnCounter { seen: 0, last: None }, 0);
    for (i, said) in messages.iter().enumerate() {
        let role = said.message.role();
        turns.count(role);
        let next = messages.get(i + 1).map(|m| m.message.role());
        let label = match role {
            Role::User => {
                rounds = 0;
                continue;
            }
            Role::Assistant if said.message.is_visible() => format!("turn-{}", turns.seen),
            Role::Tool if next != Some(Role::Tool) => {
                rounds += 1;
                format!("turn-{}.{rounds}", turns.seen)
            }
            _ => continue,
        };
        let Ok(label) = CheckpointLabel::new(label) else { continue };
        let entry = CheckpointEntry { label, auto: true, run: said.run.clone(), step: None, state: Default::default() };
        made.push(checkpoint(&entry, said.seq, said.at, i + 1));
    }
    made
}
