//! Checkpoints, rewind and fork: points to come back to, and ways to come back.

use crate::engine::draft::{Draft, Need};
use crate::engine::write::Committed;
use crate::rules::checkpoint::{fork_record, place};
use crate::rules::run_entries::ended;
use crate::rules::run_entries::unpaused;
use crate::rules::session::{Checkpoint, Place, Point, Said, Session, checkpoint};
use crate::tenure::{SessionObserver, Tenure};
use crate::types::entry::{Checkpointed, Entry, Outcome, Rewound};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Key, Label, Principal, Seq, SessionId};
use async_trait::async_trait;
use jiff::Timestamp;
use serde::Serialize;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

/// What a rewind did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rewind {
    /// The end of the log after it.
    pub seq: Seq,
    /// The number of messages that are left.
    pub position: usize,
    /// The number of messages that were cut off.
    pub discarded: usize,
}

/// What one rewind cut off.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Discarded {
    /// The rewind's record.
    pub seq: Seq,
    /// When.
    pub at: Timestamp,
    /// The number of messages that were left.
    pub position: usize,
    /// What was cut off.
    pub messages: Vec<Said>,
}

type CheckpointFn = dyn Fn(Head, Label, Seq) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>> + Send + Sync;

/// What is called after a checkpoint.
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
        if let Err(why) = self.0(event.head.clone(), label, seq).await {
            tracing::warn!(session_id = %event.head.info.session_id, why, "an on_checkpoint hook failed");
        }
    }
}

impl Tenure {
    /// Calls `hook` after each checkpoint that is set in a session here, with the session's card, the checkpoint's label and its record.
    /// Who set it waits for the hook, so that a run does nothing else meanwhile; readers do not. A hook that fails is logged, and not called again.
    pub fn on_checkpoint<F, Fut>(&self, hook: F)
    where
        F: Fn(Head, Label, Seq) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), String>> + Send + 'static,
    {
        let hook = CheckpointHook(Arc::new(move |head, label, seq| Box::pin(hook(head, label, seq))));
        self.shared.observers.write().unwrap_or_else(|e| e.into_inner()).push(Arc::new(hook));
    }

    /// Sets a checkpoint at the end of a session. Without a label it counts as automatic and is named after its record.
    pub async fn checkpoint(&self, who: &Principal, id: &SessionId, label: Option<Label>) -> Result<Checkpoint> {
        self.write(who, id, Need::Head, |state, now| {
            let Some(head) = state.head() else { return Err(Error::NotFound { session_id: id.clone() }) };
            self.engine.check_live(head)?;
            let seq = head.seq + 1;
            let auto = label.is_none();
            let label = label.clone().map_or_else(|| Label::new(format!("auto-{seq}")), Ok)?;
            let (run, step, state) = Default::default();
            let entry = Checkpointed { label, auto, run, step, state };
            let made = checkpoint(&entry, seq, now, head.mark.messages);
            Ok(Draft::new(vec![Entry::Checkpoint(entry)], made))
        })
        .await
    }

    /// The checkpoints of a session, oldest first.
    pub async fn checkpoints(&self, who: &Principal, id: &SessionId) -> Result<Vec<Checkpoint>> {
        self.engine
            .read(who, id, Need::Session, |state| {
                let session = self.engine.whole_ref(state, id)?;
                self.engine.check_live(session)?;
                Ok(session.checkpoints.clone())
            })
            .await
    }

    /// Goes back to a point: what came after it is cut off, and stays readable as discarded.
    pub async fn rewind(&self, who: &Principal, id: &SessionId, to: impl Into<Point>) -> Result<Rewind> {
        let to = to.into();
        self.write(who, id, Need::Session, |state, _| {
            let session = self.engine.whole_ref(state, id)?;
            self.engine.check_live(session)?;
            let place = place(session, &to)?;
            let (discarded, position) = (session.messages.len() - place.position, place.position);
            if discarded == 0 && session.checkpoints.iter().all(|c| c.seq <= place.seq) {
                return Ok(Draft::new(Vec::new(), Rewind { seq: session.seq, position, discarded }));
            }
            let cut = session.messages[position..].iter().map(|m| m.message.clone()).collect();
            // A question about what is cut off need not be answered; its run has nothing to go on with.
            let moot = session.open_reviews().find(|r| r.seq > place.seq).and_then(|r| r.opened.run.clone());
            let why = || Some("the session was rewound".to_owned());
            let over = moot.map(|run| ended(&run, Outcome::Cancelled, why(), Some("superseded")));
            let on = over.as_ref().and_then(|_| unpaused(session));
            let entry = Entry::Rewound(Rewound { to: place.seq, mark: place.mark });
            let entries: Vec<Entry> = [entry].into_iter().chain(over).chain(on).collect();
            let seq = session.seq + entries.len() as Seq;
            let mut draft = Draft::new(entries, Rewind { seq, position, discarded });
            draft.cut = cut;
            Ok(draft)
        })
        .await
    }

    /// Goes back to a point and gives the session as it is there.
    pub async fn resume(&self, who: &Principal, id: &SessionId, at: impl Into<Point>) -> Result<Session> {
        self.rewind(who, id, at).await?;
        self.load(who, id).await
    }

    /// What rewinds have cut off, oldest first.
    pub async fn discarded(&self, who: &Principal, id: &SessionId) -> Result<Vec<Discarded>> {
        let head = self.head(who, id).await?;
        let mut session = Session::empty(head.clone());
        let mut all = Vec::new();
        for record in self.engine.log(&head).await?.into_iter().flatten() {
            let mut messages = session.take(&record);
            for said in &mut messages {
                said.message = self.engine.attach_message(&head.tenant, &said.message).await?;
            }
            if !messages.is_empty() {
                let position = session.messages.len();
                all.push(Discarded { seq: record.seq, at: record.at, position, messages });
            }
        }
        Ok(all)
    }

    /// Branches off a new session at a point. Nothing is copied, however long the history is; neither can change the other.
    pub async fn fork(
        &self,
        who: &Principal,
        id: &SessionId,
        at: impl Into<Point>,
        new: Option<SessionId>,
    ) -> Result<Head> {
        let at = at.into();
        let need = if at == Point::End { Need::Head } else { Need::Session };
        let (head, place) = self
            .engine
            .read(who, id, need, |state| {
                let Some(head) = state.head() else { return Err(Error::NotFound { session_id: id.clone() }) };
                self.engine.check_live(head)?;
                self.engine.check_expected(head)?;
                let end = Place { seq: head.seq, position: head.mark.messages, mark: head.mark.clone() };
                if need == Need::Head {
                    return Ok((head.clone(), end));
                }
                let session = self.engine.whole_ref(state, id)?;
                let place = place(session, &at)?;
                Ok((session.head_at(place.seq), place))
            })
            .await?;
        let owner = self.owner_of(head.clone(), place.seq).await?;
        let record = fork_record(&head, &owner.info.session_id, place, self.now());
        let key = who.key(&new.unwrap_or_else(SessionId::generate));
        self.engine.reserve_session(who, [&record].into_iter()).await?;
        self.engine.begin(&key, &record, Vec::new()).await
    }

    /// The session whose own log has a record: a fork leans on it, not on one that leans on it in turn.
    pub(crate) async fn owner_of(&self, mut head: Head, seq: Seq) -> Result<Head> {
        while seq < head.first {
            let Some(parent) = &head.parent else { break };
            let key = Key { tenant: head.tenant.clone(), session: parent.session.clone() };
            head = self.store().head(&key).await?.ok_or(Error::NotFound { session_id: key.session })?;
        }
        Ok(head)
    }
}
