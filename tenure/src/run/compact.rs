//! Compaction: a model summarizes the oldest turns, and later prompts contain the summary instead.
//! The messages stay in the log and visible to all other operations; `uncompact` removes the
//! summary (D-066).

use crate::engine::pending_commit::PendingCommit;
use crate::engine::status::check_if_match;
use crate::engine::turn_lock::OnBusy;
use crate::executors::model::{Model, Prompt};
use crate::rules::answer::ModelAnswer;
use crate::rules::checkpoint::compaction_checkpoint;
use crate::rules::session::Summary;
use crate::rules::summary::{self, SummaryPart};
use crate::run::executors::TurnError;
use crate::tenure::Tenure;
use crate::types::entry::{Entry, Record};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Principal, Seq, SessionId};
use crate::types::message::Message;
use crate::types::model::ModelError;
use crate::types::policy::CheckpointPolicy;
use crate::types::raw_object::RawObject;
use jiff::Timestamp;

/// The result of a compaction.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CompactionResult {
    /// The end of the log after the compaction.
    pub seq: Seq,
    /// The number of additional messages that the summary covers. 0 means that there was nothing to
    /// summarize.
    pub messages: usize,
    /// The active summary.
    pub summary: Option<Summary>,
}

impl Tenure {
    /// Summarizes the oldest turns of a session, all but the newest `keep`. Without `keep`, it does
    /// so only if the history has reached its window and [`Tenure::uncompact`] has not disabled
    /// summaries, and returns [`Error::Busy`] if a compaction is already running.
    ///
    /// Turns can run concurrently (D-068). If summarized messages are discarded in the meantime,
    /// nothing is stored and [`Error::Superseded`] is returned. A long history is summarized in
    /// parts; parts completed before a failure stay stored (D-070).
    pub async fn compact(
        &self,
        principal: &Principal,
        id: &SessionId,
        model: &dyn Model,
        options: RawObject,
        keep: Option<usize>,
    ) -> Result<CompactionResult, TurnError> {
        let on_busy = if keep.is_some() { OnBusy::Queue } else { OnBusy::Reject };
        let _compaction_guard =
            self.shared.compaction_locks.acquire(&principal.key(id), on_busy, self.limits().max_queue).await?;
        let mut goal = None;
        let mut messages = 0;
        loop {
            let cached = self.engine.shared_session(principal, id).await?;
            let session = &cached.session;
            let window = self.policy(&session.head().tenant, session.head().assistant.as_deref()).window;
            goal = goal.or_else(|| summary::goal(session, &window, keep));
            let Some(part) = goal.and_then(|goal| summary::next_part(session, &window, goal)) else {
                return Ok(CompactionResult { seq: session.head().seq, messages, summary: session.summary().cloned() });
            };
            let created_at = session.head().info.created_at;
            // Release the shared session: a writer would have to copy it while it is referenced
            // here.
            drop(cached);
            let result = async {
                let text = request_summary(model, &part, options.clone()).await?;
                let message = summary::message(&text, part.max_tokens);
                let message =
                    message.ok_or_else(|| ModelError::Broken { reason: "the model returned no summary".into() })?;
                Ok::<_, TurnError>(self.store_summary(principal, id, created_at, &part, message).await?)
            };
            let result = result.await;
            let outcome = if result.is_ok() { "written" } else { "failed" };
            metrics::counter!("tenure_summaries_total", "outcome" => outcome).increment(1);
            result?;
            messages += part.messages;
        }
    }

    async fn store_summary(
        &self,
        principal: &Principal,
        id: &SessionId,
        created_at: Timestamp,
        part: &SummaryPart,
        message: Message,
    ) -> Result<()> {
        self.write_session(principal, id, |session, _| {
            self.engine.check_live(session.head())?;
            if session.head().info.created_at != created_at || !part.still_applies(session) {
                return Err(Error::Superseded { session_id: id.clone() });
            }
            let mut entries = vec![Entry::Compacted { upto: part.upto, summary: Some(message.clone()) }];
            let policy = self.policy(&session.head().tenant, session.head().assistant.as_deref()).runs.checkpoints;
            if policy != CheckpointPolicy::Manual {
                entries.extend(compaction_checkpoint(session));
            }
            Ok(PendingCommit::new(entries, ()))
        })
        .await
    }

    /// Removes a session's summary: prompts contain the messages again, up to the window. No new
    /// summary is written until one is requested explicitly (D-069). With `if_match`, it is a
    /// conflict unless the log ends there.
    pub async fn uncompact(&self, principal: &Principal, id: &SessionId, if_match: Option<Seq>) -> Result<Head> {
        self.write_session(principal, id, |session, now| {
            check_if_match(session.head(), if_match)?;
            self.engine.check_live(session.head())?;
            let mut head = session.head().clone();
            if session.uncompacted {
                return Ok(PendingCommit::new(Vec::new(), head));
            }
            let entry = Entry::Compacted { upto: 0, summary: None };
            head.apply(&Record { seq: head.seq + 1, at: now, entry: entry.clone() });
            Ok(PendingCommit::new(vec![entry], head))
        })
        .await
    }
}

/// Requests a summary of one part from the model.
async fn request_summary(model: &dyn Model, part: &SummaryPart, options: RawObject) -> Result<String, ModelError> {
    let prompt = Prompt { messages: part.prompt.clone(), options, stream: false };
    let mut answer = ModelAnswer::default();
    let mut chunks = model.ask(prompt).await?;
    while let Some(chunk) = std::future::poll_fn(|cx| chunks.as_mut().poll_next(cx)).await {
        answer.add_chunk(&chunk?)?;
    }
    Ok(answer.message().map(|m| m.text()).unwrap_or_default())
}
