//! Checkpoints, rewind and fork. A checkpoint is a pointer into the log; rewinding and forking copy nothing.

use crate::engine::pending_commit::PendingCommit;
use crate::engine::status::check_if_match;
use crate::engine::write::Committed;
use crate::rules::checkpoint::{fork_record, resolve_point};
use crate::rules::run_entries::reactivation_entry;
use crate::rules::run_entries::run_ended_entry;
use crate::rules::session::{Checkpoint, Point, ResolvedPoint, Session, StoredMessage};
use crate::tenure::{SessionObserver, Tenure};
use crate::types::entry::{CheckpointEntry, Entry, RewindEntry, RunOutcome};
use crate::types::error::Result;
use crate::types::error_source::BoxError;
use crate::types::head::Head;
use crate::types::id::{CheckpointLabel, Principal, Seq, SessionId};
use async_trait::async_trait;
use jiff::Timestamp;
use serde::Serialize;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

/// The result of a rewind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RewindResult {
    /// The end of the log after the rewind.
    pub seq: Seq,
    /// The number of messages that remain.
    pub position: usize,
    /// The number of messages that were discarded.
    pub discarded: usize,
}

/// The messages that one rewind discarded.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiscardedMessages {
    /// The sequence number of the rewind's record.
    pub seq: Seq,
    /// The time of the rewind.
    pub at: Timestamp,
    /// The number of messages that remained.
    pub position: usize,
    /// The discarded messages.
    pub messages: Vec<StoredMessage>,
}

type CheckpointFn =
    dyn Fn(Head, CheckpointLabel, Seq) -> Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>> + Send + Sync;

/// A callback that is called after a checkpoint was set.
#[derive(Clone)]
struct CheckpointHook(Arc<CheckpointFn>);

impl fmt::Debug for CheckpointHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CheckpointHook")
    }
}

#[async_trait]
impl SessionObserver for CheckpointHook {
    async fn committed(&self, _: &Tenure, event: &Committed) {
        let Some((label, seq)) = event.checkpoint.clone() else { return };
        if let Err(e) = self.0(event.head.clone(), label, seq).await {
            tracing::warn!(session_id = %event.head.info.session_id, reason = %e, "an on_checkpoint hook failed");
        }
    }
}

/// A rewind: where to, and on what condition.
///
/// ```
/// use tenure::{Error, Message, Point, Rewind, Tenure};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> tenure::Result<()> {
/// # let tenure = Tenure::open("memory:").await?;
/// # let session = tenure.user("acme", "ada")?.create_session().await?;
/// let seen = session.append([Message::user("hi")]).await?.seq;
/// session.append([Message::assistant("hello")]).await?; // another client
/// let rewind = Rewind::to(Point::Position(0)).if_match(seen);
/// assert!(matches!(session.rewind(rewind).await, Err(Error::Conflict { .. })));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rewind {
    /// The point. Messages after it are discarded.
    pub to: Point,
    /// Rewinds only if the log ends at this record; otherwise it is a conflict.
    pub if_match: Option<Seq>,
}

impl Rewind {
    /// Rewinds to a point, such as a checkpoint's label.
    pub fn to(point: impl Into<Point>) -> Self {
        Self { to: point.into(), if_match: None }
    }

    /// Sets the condition: the log must end at this record.
    pub fn if_match(mut self, seq: impl Into<Option<Seq>>) -> Self {
        self.if_match = seq.into();
        self
    }
}

impl<P: Into<Point>> From<P> for Rewind {
    fn from(point: P) -> Self {
        Self::to(point)
    }
}

/// A fork: where it leaves its parent, and the id of the new session.
///
/// ```
/// use tenure::{Fork, Message, Point, SessionId, Tenure};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> tenure::Result<()> {
/// # let tenure = Tenure::open("memory:").await?;
/// # let session = tenure.user("acme", "ada")?.create_session().await?;
/// session.append([Message::user("one"), Message::assistant("two")]).await?;
/// let branch = session.fork(Fork::at(Point::Position(1)).id(SessionId::new("branch")?)).await?;
/// assert_eq!(branch.id().as_str(), "branch");
/// assert_eq!(branch.load().await?.messages.len(), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fork {
    /// The point up to which the fork shares its parent's history.
    pub at: Point,
    /// The id of the new session. `None` means that one is generated.
    pub id: Option<SessionId>,
    /// Forks only if the log of the parent ends at this record; otherwise it is a conflict.
    pub if_match: Option<Seq>,
}

impl Fork {
    /// Forks at a point, such as a checkpoint's label.
    pub fn at(point: impl Into<Point>) -> Self {
        Self { at: point.into(), id: None, if_match: None }
    }

    /// Sets the id of the new session.
    pub fn id(mut self, id: impl Into<Option<SessionId>>) -> Self {
        self.id = id.into();
        self
    }

    /// Sets the condition: the log of the parent must end at this record.
    pub fn if_match(mut self, seq: impl Into<Option<Seq>>) -> Self {
        self.if_match = seq.into();
        self
    }
}

impl<P: Into<Point>> From<P> for Fork {
    fn from(point: P) -> Self {
        Self::at(point)
    }
}

/// A checkpoint to set at the end of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewCheckpoint {
    /// The label. `None` means that the checkpoint counts as automatic and is named after its
    /// record.
    pub label: Option<CheckpointLabel>,
    /// Sets the checkpoint only if the log ends at this record; otherwise it is a conflict.
    pub if_match: Option<Seq>,
}

impl NewCheckpoint {
    /// Sets the condition: the log must end at this record.
    pub fn if_match(mut self, seq: impl Into<Option<Seq>>) -> Self {
        self.if_match = seq.into();
        self
    }
}

impl<L: Into<Option<CheckpointLabel>>> From<L> for NewCheckpoint {
    fn from(label: L) -> Self {
        Self { label: label.into(), if_match: None }
    }
}

impl Tenure {
    /// Registers a callback that is called after each checkpoint set through this handle or its
    /// clones, with the session's head, the checkpoint's label and the sequence number of its
    /// record. The operation that set the checkpoint waits for the callback, so that a run does
    /// nothing else meanwhile (D-115); readers do not wait. A failure is logged and not retried.
    pub fn on_checkpoint<F, Fut>(&self, hook: F)
    where
        F: Fn(Head, CheckpointLabel, Seq) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let hook = CheckpointHook(Arc::new(move |head, label, seq| Box::pin(hook(head, label, seq))));
        self.shared.observers.write().unwrap_or_else(|e| e.into_inner()).push(Arc::new(hook));
    }

    /// Sets a checkpoint at the end of a session. Without a label it counts as automatic, and is
    /// named after its record.
    pub async fn checkpoint(
        &self,
        principal: &Principal,
        id: &SessionId,
        checkpoint: impl Into<NewCheckpoint>,
    ) -> Result<Checkpoint> {
        let NewCheckpoint { label, if_match } = checkpoint.into();
        self.write_head(principal, id, |head, now| {
            check_if_match(head, if_match)?;
            self.engine.check_live(head)?;
            let seq = head.seq + 1;
            let auto = label.is_none();
            let label = label.clone().map_or_else(|| CheckpointLabel::new(format!("auto-{seq}")), Ok)?;
            let entry = CheckpointEntry { label, auto, run: None, step: None, state: Default::default() };
            let created = crate::rules::session::checkpoint(&entry, seq, now, head.digest.messages);
            Ok(PendingCommit::new(vec![Entry::Checkpoint(entry)], created))
        })
        .await
    }

    /// Lists the checkpoints of a session, oldest first.
    pub async fn checkpoints(&self, principal: &Principal, id: &SessionId) -> Result<Vec<Checkpoint>> {
        self.engine
            .read_session(principal, id, |session| {
                self.engine.check_live(session.head())?;
                Ok(session.checkpoints.clone())
            })
            .await
    }

    /// Rewinds a session to a point. The messages after it are discarded, but stay readable with
    /// [`Tenure::discarded`].
    pub async fn rewind(
        &self,
        principal: &Principal,
        id: &SessionId,
        rewind: impl Into<Rewind>,
    ) -> Result<RewindResult> {
        let Rewind { to, if_match } = rewind.into();
        self.write_session(principal, id, |session, _| {
            check_if_match(session.head(), if_match)?;
            self.engine.check_live(session.head())?;
            let target = resolve_point(session, &to)?;
            let position = target.position;
            let discarded = session.messages.len() - position;
            if discarded == 0 && session.checkpoints.iter().all(|c| c.seq <= target.seq) {
                return Ok(PendingCommit::new(
                    Vec::new(),
                    RewindResult { seq: session.head().seq, position, discarded },
                ));
            }
            // An open review of a discarded call need not be decided, and its run cannot continue:
            // the run is cancelled.
            let moot_run = session.open_reviews().find(|r| r.seq > target.seq).and_then(|r| r.opened.run.clone());
            let reason = || Some("the session was rewound".to_owned());
            let run_ended =
                moot_run.map(|run| run_ended_entry(&run, RunOutcome::Cancelled, reason(), Some("superseded")));
            let unpaused = run_ended.as_ref().and_then(|_| reactivation_entry(session.as_partial()));
            let entry = Entry::Rewound(RewindEntry { to: target.seq, digest: target.digest });
            let entries: Vec<Entry> = [entry].into_iter().chain(run_ended).chain(unpaused).collect();
            let seq = session.head().seq + entries.len() as Seq;
            Ok(PendingCommit::new(entries, RewindResult { seq, position, discarded }))
        })
        .await
    }

    /// Rewinds a session to a point and loads it.
    pub async fn rewind_and_load(
        &self,
        principal: &Principal,
        id: &SessionId,
        point: impl Into<Point>,
    ) -> Result<Session> {
        self.rewind(principal, id, point).await?;
        self.load(principal, id).await
    }

    /// Lists the messages that rewinds have discarded, oldest rewind first.
    pub async fn discarded(&self, principal: &Principal, id: &SessionId) -> Result<Vec<DiscardedMessages>> {
        let head = self.head(principal, id).await?;
        let mut session = Session::empty(head.clone());
        let mut all = Vec::new();
        for record in self.engine.log(&head).await?.into_iter().flatten() {
            let mut messages = session.apply_to_lists(&record);
            for stored in &mut messages {
                stored.message = self.engine.attach_message(&head.tenant, &stored.message).await?;
            }
            if !messages.is_empty() {
                let position = session.messages.len();
                all.push(DiscardedMessages { seq: record.seq, at: record.at, position, messages });
            }
        }
        Ok(all)
    }

    /// Forks a session at a point. Nothing is copied, however long the history is, and neither
    /// session can change the other.
    pub async fn fork(&self, principal: &Principal, id: &SessionId, fork: impl Into<Fork>) -> Result<Head> {
        let Fork { at: point, id: new, if_match } = fork.into();
        let check = |head: &Head| check_if_match(head, if_match).and_then(|()| self.engine.check_live(head));
        let (head, fork_point) = if point == Point::End {
            // The end is known from the head: the log need not be read.
            let at_end = self.engine.read_head(principal, id, |head| {
                check(head)?;
                let end = ResolvedPoint { seq: head.seq, position: head.digest.messages, digest: head.digest.clone() };
                Ok((head.clone(), end))
            });
            at_end.await?
        } else {
            let at_point = self.engine.read_session(principal, id, |session| {
                check(session.head())?;
                let fork_point = resolve_point(session, &point)?;
                Ok((session.head_at(fork_point.seq), fork_point))
            });
            at_point.await?
        };
        let owner = self.find_log_owner(head.clone(), fork_point.seq).await?;
        let record = fork_record(&head, &owner.info.session_id, fork_point, self.now());
        let key = principal.key(&new.unwrap_or_else(SessionId::generate));
        self.engine.reserve_session(principal, [&record].into_iter()).await?;
        self.begin_session(&key, &record, Vec::new(), Vec::new()).await
    }

    /// Finds the ancestor whose own log contains `seq`. A new fork references that ancestor
    /// directly, so that parent chains stay short.
    pub(crate) async fn find_log_owner(&self, head: Head, seq: Seq) -> Result<Head> {
        let mut reader = self.engine.log_reader(head);
        while seq < reader.current().first && reader.move_to_parent().await? {}
        Ok(reader.current().clone())
    }
}
