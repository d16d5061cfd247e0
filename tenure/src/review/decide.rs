//! Human review of tool calls: listing, claiming and deciding.
//!
//! Open reviews are indexed in the sessions' heads and stored in their logs; there is no separate
//! list that could diverge (D-061).

use crate::engine::draft::{Depth, PendingCommit};
use crate::rules::session::{Review, Session};
use crate::store::query::{OwnerFilter, SessionCursor, SessionOrder, SessionQuery};
use crate::tenure::Tenure;
use crate::types::decision_chain::DecisionChain;
use crate::types::entry::{Decision, Entry, LeaseClaim, ReviewDecided};
use crate::types::error::{Error, Result};
use crate::types::head::{Head, ReviewIndexLabel};
use crate::types::id::{Principal, ReviewId, RunId, SessionId};
use crate::types::status::Status;
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

/// A filter for listing reviews.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReviewFilter {
    /// Undecided reviews, in one queue, or in all queues if `None`.
    Open(Option<String>),
    /// Decided reviews.
    Decided,
}

/// A page of reviews.
#[derive(Clone, Debug)]
pub struct ReviewPage {
    /// The reviews, each with the head of its session; most recently active sessions first.
    pub reviews: Vec<(Head, Review)>,
    /// The cursor of the next page. `None` means that this is the last one.
    pub next: Option<SessionCursor>,
}

/// A reviewer's decision on a review.
#[derive(Clone, Debug)]
pub struct ReviewInput {
    /// The decision.
    pub decision: Decision,
    /// The name of the reviewer.
    pub reviewer: String,
    /// The reviewer's reason.
    pub notes: Option<String>,
    /// The corrected arguments, required for [`Decision::Corrected`].
    pub arguments: Option<Value>,
}

impl Tenure {
    /// Lists reviews of the sessions visible to `who`. A page contains all matching reviews of at
    /// most `sessions` sessions.
    pub async fn reviews(
        &self,
        who: &Principal,
        which: &ReviewFilter,
        cursor: Option<SessionCursor>,
        sessions: usize,
    ) -> Result<ReviewPage> {
        let mut query = SessionQuery::new(OwnerFilter::Everyone, sessions);
        query.cursor = cursor;
        query.reviewing = Some(match which {
            ReviewFilter::Open(None) => ReviewIndexLabel::Open,
            ReviewFilter::Open(Some(queue)) => ReviewIndexLabel::Queue(queue.clone()),
            ReviewFilter::Decided => ReviewIndexLabel::Decided,
        });
        let page = self.list(who, query).await?;
        let mut reviews = Vec::new();
        for head in page.heads {
            let found = self.engine.read(who, &head.info.session_id, Depth::Session, |state| {
                let session = self.engine.whole_ref(state, &head.info.session_id)?;
                let wanted = session.reviews.iter().filter(|r| match which {
                    ReviewFilter::Open(queue) => {
                        r.decided.is_none() && !r.void && (queue.is_none() || r.opened.queue == *queue)
                    }
                    ReviewFilter::Decided => r.decided.is_some(),
                });
                Ok(wanted.cloned().map(|r| (session.head().clone(), r)).collect::<Vec<_>>())
            });
            match found.await {
                Ok(found) => reviews.extend(found),
                // The session was purged after it was listed.
                Err(Error::NotFound { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(ReviewPage { reviews, next: page.next })
    }

    /// Returns a review with the head of its session.
    pub async fn review(&self, who: &Principal, id: &ReviewId) -> Result<(Head, Review)> {
        let session_id = id.session().ok_or_else(|| no_review(id))?;
        let found = self.engine.read(who, &session_id, Depth::Session, |state| {
            let session = self.engine.whole_ref(state, &session_id)?;
            Ok((session.head().clone(), find(session, id)?.clone()))
        });
        found.await.map_err(|e| hidden(e, id))
    }

    /// Claims a review for `by`, so that no other reviewer can claim or decide it until `lasting`
    /// has elapsed. If `by` is `None`, releases the claim held by `forth`. Returns
    /// [`Error::Claimed`] if another reviewer holds it.
    pub async fn claim_review(
        &self,
        who: &Principal,
        id: &ReviewId,
        by: Option<&str>,
        forth: Option<&str>,
        lasting: SignedDuration,
    ) -> Result<Review> {
        let done = self.at_review(who, id, |_, review, now| {
            let holder = by.or(forth).unwrap_or_default();
            check_claim(review, holder, now)?;
            let until = by.and_then(|_| now.checked_add(lasting).ok());
            let mut after = review.clone();
            after.claimed = by.map(|by| (by.to_owned(), until));
            let entry = Entry::ReviewClaimed { review: id.clone(), by: by.map(str::to_owned), until };
            Ok((vec![entry], after))
        });
        done.await
    }

    /// Decides a review. The last open review of a session reactivates the session and releases its
    /// run, which can then be taken over at once.
    pub async fn decide(&self, who: &Principal, id: &ReviewId, verdict: &ReviewInput) -> Result<Review> {
        if verdict.decision == Decision::Corrected && !matches!(verdict.arguments, Some(Value::Object(_))) {
            return Err(Error::invalid("arguments", "`corrected` needs `arguments`, an object that is used instead"));
        }
        let max = self.limits().max_info_bytes;
        let arguments = verdict.arguments.as_ref().map_or(0, |a| a.to_string().len());
        let size = verdict.notes.as_ref().map_or(0, String::len) + verdict.reviewer.len() + arguments;
        if size > max {
            return Err(Error::TooLarge { what: "a decision".into(), limit: "max_info_bytes", max: max as u64 });
        }
        self.at_review(who, id, |session, review, now| {
            check_claim(review, &verdict.reviewer, now)?;
            Ok(decided(session, review, verdict, now))
        })
        .await
    }

    /// Applies `step` to an open review and commits its entries.
    async fn at_review(
        &self,
        who: &Principal,
        id: &ReviewId,
        step: impl Fn(&Session, &Review, Timestamp) -> Result<(Vec<Entry>, Review)>,
    ) -> Result<Review> {
        let session_id = id.session().ok_or_else(|| no_review(id))?;
        // Open reviews are in the session's most recent part; a review decided long ago may require
        // the full log.
        match self.step_at(who, &session_id, id, Depth::Run, &step).await {
            Err(Error::NoSuchReview { .. }) => self.step_at(who, &session_id, id, Depth::Session, &step).await,
            other => other,
        }
    }

    async fn step_at(
        &self,
        who: &Principal,
        session_id: &SessionId,
        id: &ReviewId,
        need: Depth,
        step: &impl Fn(&Session, &Review, Timestamp) -> Result<(Vec<Entry>, Review)>,
    ) -> Result<Review> {
        let done = self.write(who, session_id, need, |state, now| {
            let session = self.engine.run_ref(state, session_id)?;
            self.engine.check_live(session)?;
            let review = find(session, id)?;
            if review.decided.is_some() || review.void {
                let how = review.decided.as_ref().map_or_else(
                    || "its run has ended".to_owned(),
                    |(_, d)| format!("{} said {}", d.reviewer, d.decision.as_str()),
                );
                return Err(Error::Decided { review: id.clone(), how });
            }
            let (entries, after) = step(session, review, now)?;
            Ok(PendingCommit::new(entries, after))
        });
        done.await.map_err(|e| hidden(e, id))
    }

    /// Applies the timeout decision to reviews that are overdue, and returns how many were decided.
    /// At most `max_sweep` sessions are processed per call.
    pub async fn decide_overdue(&self) -> Result<usize> {
        let mut query = SessionQuery::new(OwnerFilter::Everyone, self.limits().max_sweep);
        (query.due_before, query.order) = (Some(self.now()), SessionOrder::Due);
        query.status = vec![Status::Paused];
        let mut count = 0;
        for head in self.store().heads(&query).await? {
            count += self.decide_for(&head).await?;
        }
        Ok(count)
    }

    /// Applies the timeout decision to the overdue reviews of one session, and returns how many
    /// were decided.
    pub(crate) async fn decide_for(&self, head: &Head) -> Result<usize> {
        let (who, id) = (head.owner(), &head.info.session_id);
        let overdue = self.engine.read(&who, id, Depth::Run, |state| {
            let (session, now) = (self.engine.run_ref(state, id)?, self.now());
            let late =
                session.open_reviews().filter_map(|r| Some((r.opened.review.clone(), r.opened.timeout.clone()?)));
            Ok(late.filter(|(_, timeout)| timeout.at <= now).collect::<Vec<_>>())
        });
        let mut count = 0;
        for (review, timeout) in overdue.await? {
            let verdict = ReviewInput {
                decision: timeout.decision,
                reviewer: "timeout".to_owned(),
                notes: Some("nobody decided in time".to_owned()),
                arguments: None,
            };
            let done =
                self.at_review(&who, &review, |session, review, now| Ok(decided(session, review, &verdict, now)));
            match done.await {
                Ok(_) => count += 1,
                Err(Error::Decided { .. } | Error::NoSuchReview { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(count)
    }
}

/// The entries that record a decision, and the resulting review. The last open review also
/// reactivates the session and releases its run.
fn decided(session: &Session, review: &Review, verdict: &ReviewInput, now: Timestamp) -> (Vec<Entry>, Review) {
    let ReviewInput { decision, reviewer, notes, arguments } = verdict.clone();
    let (id, step) = (review.opened.review.clone(), review.opened.step.clone());
    let previous = Some(DecisionChain::link(session.decisions));
    let made = ReviewDecided { review: id.clone(), step, decision, reviewer, notes, arguments, previous };
    let mut entries = vec![Entry::review_decided(made.clone())];
    if session.open_reviews().all(|r| r.opened.review == id) {
        entries.push(Entry::Status { to: Status::Active, reason: Some("decided".to_owned()) });
        entries.extend(review.opened.run.clone().map(|run| released(run, now)));
    }
    (entries, Review { decided: Some((now, made)), ..review.clone() })
}

/// An entry that releases a run's lease, so that any node can take it over.
fn released(run: RunId, now: Timestamp) -> Entry {
    Entry::RunClaimed { run, claim: LeaseClaim { node: String::new(), until: now } }
}

fn find<'s>(session: &'s Session, id: &ReviewId) -> Result<&'s Review> {
    session.reviews.iter().find(|r| r.opened.review == *id).ok_or_else(|| no_review(id))
}

fn no_review(id: &ReviewId) -> Error {
    Error::NoSuchReview { review: id.clone() }
}

/// Converts "session not found" into "review not found": the existence of an invisible session must
/// not leak.
fn hidden(e: Error, id: &ReviewId) -> Error {
    match e {
        Error::NotFound { .. } => no_review(id),
        other => other,
    }
}

fn check_claim(review: &Review, by: &str, now: Timestamp) -> Result<()> {
    match &review.claimed {
        Some((holder, until)) if holder != by && until.is_none_or(|t| t > now) => {
            Err(Error::Claimed { review: review.opened.review.clone(), by: holder.clone() })
        }
        _ => Ok(()),
    }
}
