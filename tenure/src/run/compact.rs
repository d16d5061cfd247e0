//! Compaction: a model writes a summary of the oldest turns, and models are shown that instead. The messages stay, and all other verbs
//! go on with them; `uncompact` takes the summary away.

use crate::engine::draft::{Draft, Need};
use crate::engine::turn_lock::OnBusy;
use crate::executors::model::{Model, Prompt};
use crate::rules::answer::Answer;
use crate::rules::session::Summary;
use crate::rules::summary::{self, Piece};
use crate::run::executors::TurnError;
use crate::tenure::Tenure;
use crate::types::entry::{Entry, Record};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Principal, Seq, SessionId};
use crate::types::message::Message;
use crate::types::model::ModelError;
use crate::types::raw_object::Fields;
use jiff::Timestamp;

/// What a compaction did.
#[derive(Clone, Debug, PartialEq)]
pub struct Compacted {
    /// The end of the log after it.
    pub seq: Seq,
    /// How many more messages the summary covers than before; 0: there was nothing to do.
    pub messages: usize,
    /// The summary in force.
    pub summary: Option<Summary>,
}

impl Tenure {
    /// Has a model write a summary of the oldest turns of a session, all but the newest `keep`. Without `keep` it does so only if the
    /// history has reached its window and nobody wanted the messages back ([`Tenure::uncompact`]), and is [`Error::Busy`] if
    /// that is being done already.
    ///
    /// Turns can go on meanwhile. If what was summarised is taken back, nothing is kept: [`Error::Superseded`]. A long history is read
    /// in pieces; what is done of it when something fails is kept.
    pub async fn compact(
        &self,
        who: &Principal,
        id: &SessionId,
        model: &dyn Model,
        options: Fields,
        keep: Option<usize>,
    ) -> Result<Compacted, TurnError> {
        let on_busy = if keep.is_some() { OnBusy::Queue } else { OnBusy::Reject };
        let _one = self.shared.compaction_locks.enter(&who.key(id), on_busy, self.limits().max_queue).await?;
        let (mut goal, mut messages) = (None, 0);
        loop {
            let session = self.engine.shared(who, id).await?;
            let window = self.policy(&session.tenant, session.assistant.as_deref()).window;
            goal = goal.or_else(|| summary::goal(&session, &window, keep));
            let Some(piece) = goal.and_then(|goal| summary::piece(&session, &window, goal)) else {
                return Ok(Compacted { seq: session.seq, messages, summary: session.summary().cloned() });
            };
            let began = session.info.created_at;
            // Whoever writes while somebody looks has to copy.
            drop(session);
            let done = async {
                let text = ask(model, &piece, options.clone()).await?;
                let message = summary::message(&text, piece.room);
                let message = message.ok_or_else(|| ModelError::Broken { why: "it gave no summary".into() })?;
                Ok::<_, TurnError>(self.keep_summary(who, id, began, &piece, message).await?)
            };
            let done = done.await;
            let outcome = if done.is_ok() { "written" } else { "failed" };
            metrics::counter!("tenure_summaries_total", "outcome" => outcome).increment(1);
            done?;
            messages += piece.messages;
        }
    }

    async fn keep_summary(
        &self,
        who: &Principal,
        id: &SessionId,
        began: Timestamp,
        piece: &Piece,
        message: Message,
    ) -> Result<()> {
        self.write(who, id, Need::Session, |state, _| {
            let session = self.engine.whole_ref(state, id)?;
            self.engine.check_live(session)?;
            if session.info.created_at != began || !piece.fits(session) {
                return Err(Error::Superseded { session_id: id.clone() });
            }
            Ok(Draft::new(vec![Entry::Compacted { upto: piece.upto, summary: Some(message.clone()) }], ()))
        })
        .await
    }

    /// Takes a session's summary away: models are shown the messages themselves again, as far as the window goes. No other is written
    /// until somebody asks for one.
    pub async fn uncompact(&self, who: &Principal, id: &SessionId) -> Result<Head> {
        self.write(who, id, Need::Session, |state, now| {
            let session = self.engine.whole_ref(state, id)?;
            self.engine.check_live(session)?;
            let mut head = session.head().clone();
            if session.uncompacted {
                return Ok(Draft::new(Vec::new(), head));
            }
            let entry = Entry::Compacted { upto: 0, summary: None };
            head.apply(&Record { seq: head.seq + 1, at: now, entry: entry.clone() });
            Ok(Draft::new(vec![entry], head))
        })
        .await
    }
}

/// What a model says of a piece.
async fn ask(model: &dyn Model, piece: &Piece, options: Fields) -> Result<String, ModelError> {
    let prompt = Prompt { messages: piece.prompt.clone(), options, stream: false };
    let (mut answer, mut pieces) = (Answer::default(), model.ask(prompt).await?);
    while let Some(part) = std::future::poll_fn(|cx| pieces.as_mut().poll_next(cx)).await {
        answer.take(&part?)?;
    }
    Ok(answer.message().map(|m| m.text()).unwrap_or_default())
}
