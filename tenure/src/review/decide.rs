//! Human review of tool calls: listing, claiming and deciding.
//!
//! Open reviews are indexed in the sessions' heads and stored in their logs; there is no separate
//! list that could diverge (D-061).

use crate::engine::pending_commit::PendingCommit;
use crate::rules::human_question::CHOICE;
use crate::rules::partial::PartialSession;
use crate::rules::run_entries::release_entry;
use crate::rules::session::Review;
use crate::store::query::{OwnerFilter, SessionCursor, SessionOrder, SessionQuery};
use crate::tenure::Tenure;
use crate::types::decision_chain::DecisionChain;
use crate::types::entry::{Decision, Entry, ReviewDecided};
use crate::types::error::{Error, Result};
use crate::types::head::{Head, ReviewIndexLabel};
use crate::types::id::{Principal, ReviewId};
use crate::types::status::Status;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

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
#[non_exhaustive]
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
    /// The corrected arguments, required for [`Decision::Corrected`]. For a question, `{"answer": text}`.
    pub arguments: Option<Value>,
    /// The chosen answer, for a question that offers choices.
    pub choice: Option<String>,
}

impl Tenure {
    /// Lists reviews of the sessions visible to `principal`. A page contains all matching reviews
    /// of at most `sessions` sessions.
    pub async fn reviews(
        &self,
        principal: &Principal,
        filter: &ReviewFilter,
        cursor: Option<SessionCursor>,
        sessions: usize,
    ) -> Result<ReviewPage> {
        let mut query = SessionQuery::new(OwnerFilter::AllTenants, sessions);
        query.cursor = cursor;
        query.reviewing = Some(match filter {
            ReviewFilter::Open(None) => ReviewIndexLabel::Open,
            ReviewFilter::Open(Some(queue)) => ReviewIndexLabel::Queue(queue.clone()),
            ReviewFilter::Decided => ReviewIndexLabel::Decided,
        });
        let page = self.list(principal, query).await?;
        let mut reviews = Vec::new();
        for head in page.heads {
            let matching = self.engine.read_session(principal, &head.info.session_id, |session| {
                let selected = session.reviews.iter().filter(|r| match filter {
                    ReviewFilter::Open(queue) => {
                        r.decided.is_none() && !r.void && (queue.is_none() || r.opened.queue == *queue)
                    }
                    ReviewFilter::Decided => r.decided.is_some(),
                });
                Ok(selected.cloned().map(|r| (session.head().clone(), r)).collect::<Vec<_>>())
            });
            match matching.await {
                Ok(matching) => reviews.extend(matching),
                // The session was purged after it was listed.
                Err(Error::NotFound { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(ReviewPage { reviews, next: page.next })
    }

    /// Returns a review with the head of its session.
    pub async fn review(&self, principal: &Principal, id: &ReviewId) -> Result<(Head, Review)> {
        let session_id = id.session().ok_or_else(|| no_review(id))?;
        let review = self.engine.read_session(principal, &session_id, |session| {
            Ok((session.head().clone(), find_review(&session.reviews, id)?.clone()))
        });
        review.await.map_err(|e| hide_session(e, id))
    }

    /// Claims a review for `reviewer`, so that no other reviewer can claim or decide it until
    /// `duration` has elapsed. Returns [`Error::Claimed`] if another reviewer holds it.
    pub async fn claim_review(
        &self,
        principal: &Principal,
        id: &ReviewId,
        reviewer: &str,
        duration: SignedDuration,
    ) -> Result<Review> {
        self.update_review(principal, id, |_, review, now| {
            check_claim(review, reviewer, now)?;
            let until = now.checked_add(duration).ok();
            let claimed = Review { claimed: Some((reviewer.to_owned(), until)), ..review.clone() };
            let entry = Entry::ReviewClaimed { review: id.clone(), by: Some(reviewer.to_owned()), until };
            Ok((vec![entry], claimed))
        })
        .await
    }

    /// Releases the claim of `reviewer` on a review. Returns [`Error::Claimed`] if another reviewer
    /// holds it.
    pub async fn release_review(&self, principal: &Principal, id: &ReviewId, reviewer: &str) -> Result<Review> {
        self.update_review(principal, id, |_, review, now| {
            check_claim(review, reviewer, now)?;
            let entry = Entry::ReviewClaimed { review: id.clone(), by: None, until: None };
            Ok((vec![entry], Review { claimed: None, ..review.clone() }))
        })
        .await
    }

    /// Decides a review. The last open review of a session reactivates the session and releases its
    /// run, which can then be taken over at once.
    pub async fn decide(&self, principal: &Principal, id: &ReviewId, input: &ReviewInput) -> Result<Review> {
        if input.decision == Decision::Corrected && !matches!(input.arguments, Some(Value::Object(_))) {
            return Err(Error::invalid(
                "arguments",
                "the decision `corrected` requires `arguments`: a JSON object that replaces the arguments of the call",
            ));
        }
        let max = self.limits().max_info_bytes;
        let arguments = input.arguments.as_ref().map_or(0, |a| a.to_string().len());
        let texts = [&input.notes, &input.choice].into_iter().flatten().map(String::len).sum::<usize>();
        let size = texts + input.reviewer.len() + arguments;
        if size > max {
            return Err(Error::TooLarge { subject: "a decision".into(), limit: "max_info_bytes", max: max as u64 });
        }
        self.update_review(principal, id, |session, review, now| {
            check_claim(review, &input.reviewer, now)?;
            review.check_answer(input.decision, input.choice.as_deref(), input.arguments.as_ref())?;
            Ok(decision_entries(session, review, input, now))
        })
        .await
    }

    /// Applies `step` to an open review and commits its entries.
    async fn update_review(
        &self,
        principal: &Principal,
        id: &ReviewId,
        step: impl Fn(PartialSession<'_>, &Review, Timestamp) -> Result<(Vec<Entry>, Review)>,
    ) -> Result<Review> {
        let session_id = id.session().ok_or_else(|| no_review(id))?;
        // Open reviews are in the session's most recent part; a review decided long ago may require
        // the full log.
        let update = |session: PartialSession<'_>, now: Timestamp| {
            self.engine.check_live(session.head)?;
            let review = find_review(session.reviews, id)?;
            if review.decided.is_some() || review.void {
                let decision = review.decided.as_ref().map_or_else(
                    || "the run of the review has ended".to_owned(),
                    |(_, d)| format!("{} decided {}", d.reviewer, d.decision.as_str()),
                );
                return Err(Error::Decided { review: id.clone(), reason: decision });
            }
            let (entries, updated_review) = step(session, review, now)?;
            Ok(PendingCommit::new(entries, updated_review))
        };
        let updated = match self.write_partial(principal, &session_id, &update).await {
            Err(Error::NoSuchReview { .. }) => {
                self.write_session(principal, &session_id, |session, now| update(session.as_partial(), now)).await
            }
            other => other,
        };
        updated.map_err(|e| hide_session(e, id))
    }

    /// Applies the timeout decision to reviews that are overdue, and returns how many were decided.
    /// At most `max_sweep` sessions are processed per call.
    pub async fn decide_overdue(&self) -> Result<usize> {
        let mut query = SessionQuery::new(OwnerFilter::AllTenants, self.limits().max_sweep);
        query.due_before = Some(self.now());
        query.order = SessionOrder::Due;
        query.status = vec![Status::Paused];
        let mut count = 0;
        for head in self.store().heads(&query).await? {
            count += self.decide_overdue_in_session(&head).await?;
        }
        Ok(count)
    }

    /// Applies the timeout decision to the overdue reviews of one session, and returns how many
    /// were decided.
    pub(crate) async fn decide_overdue_in_session(&self, head: &Head) -> Result<usize> {
        let principal = head.owner();
        let id = &head.info.session_id;
        let overdue = self.engine.read_partial(&principal, id, |session| {
            let now = self.now();
            let with_timeout =
                session.open_reviews().filter_map(|r| Some((r.opened.review.clone(), r.opened.timeout.clone()?)));
            Ok(with_timeout.filter(|(_, timeout)| timeout.at <= now).collect::<Vec<_>>())
        });
        let mut count = 0;
        for (review, timeout) in overdue.await? {
            let input = ReviewInput {
                decision: timeout.decision,
                reviewer: "timeout".to_owned(),
                notes: Some("decided automatically: the review timed out".to_owned()),
                arguments: None,
                choice: None,
            };
            let decided = self.update_review(&principal, &review, |session, review, now| {
                Ok(decision_entries(session, review, &input, now))
            });
            match decided.await {
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
fn decision_entries(
    session: PartialSession<'_>,
    review: &Review,
    input: &ReviewInput,
    now: Timestamp,
) -> (Vec<Entry>, Review) {
    let ReviewInput { decision, reviewer, notes, arguments, choice } = input.clone();
    let arguments = arguments.or_else(|| choice.map(|choice| json!({CHOICE: choice})));
    let id = review.opened.review.clone();
    let step = review.opened.step.clone();
    let previous = Some(DecisionChain::link(session.head.decisions));
    let decision_record = ReviewDecided { review: id.clone(), step, decision, reviewer, notes, arguments, previous };
    let mut entries = vec![Entry::review_decided(decision_record.clone())];
    if session.open_reviews().all(|r| r.opened.review == id) {
        entries.push(Entry::Status { to: Status::Active, reason: Some("decided".to_owned()), until: None });
        entries.extend(review.opened.run.clone().map(|run| release_entry(run, now)));
    }
    (entries, Review { decided: Some((now, decision_record)), ..review.clone() })
}

fn find_review<'s>(reviews: &'s [Review], id: &ReviewId) -> Result<&'s Review> {
    reviews.iter().find(|r| r.opened.review == *id).ok_or_else(|| no_review(id))
}

fn no_review(id: &ReviewId) -> Error {
    Error::NoSuchReview { review: id.clone() }
}

/// Converts "session not found" into "review not found": the existence of an invisible session must
/// not leak.
fn hide_session(e: Error, id: &ReviewId) -> Error {
    match e {
        Error::NotFound { .. } => no_review(id),
        other => other,
    }
}

fn check_claim(review: &Review, reviewer: &str, now: Timestamp) -> Result<()> {
    match &review.claimed {
        Some((holder, until)) if holder != reviewer && until.is_none_or(|t| t > now) => {
            Err(Error::Claimed { review: review.opened.review.clone(), by: holder.clone() })
        }
        _ => Ok(()),
    }
}
