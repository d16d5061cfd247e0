//! `/reviews`: the review queue (human in the loop): open reviews, claims and decisions.

use crate::app::AppState;
use crate::auth::{Caller, LocalAccess};
use crate::error::{ApiError, ApiResult};
use crate::http::extract::{JsonBody, PathParams, QueryParams};
use crate::http::view::{ListErrors, LookupErrors, WriteErrors};
use crate::jobs::runs;
use axum::extract::State;
use axum::{Extension, Json};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tenure::rules::excerpt;
use tenure::{
    log::Head,
    policy::HumanDuration,
    review::{Decision, Review, ReviewFilter, ReviewId, ReviewInput},
};
use utoipa::{IntoParams, ToSchema};

/// A review and its decision.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReviewView {
    /// Its id.
    id: String,
    /// `review`.
    object: &'static str,
    /// `open`, `decided` or `void` (its run has ended without it).
    status: &'static str,
    /// The session that waits.
    session_id: String,
    /// The run that waits.
    run_id: Option<String>,
    /// The tool call that waits.
    call_id: Option<String>,
    /// The step under review: the tool's name.
    step: String,
    /// `approve` (may the call be executed?), `question` (the model asks something), or `lost` (the call was started and its result was
    /// lost: was it executed?).
    kind: &'static str,
    /// The queue of reviewers.
    queue: Option<String>,
    /// The arguments of the call.
    arguments: Value,
    /// The question of the model, for the kind `question`.
    question: Option<String>,
    /// The answers that the question offers.
    choices: Vec<String>,
    /// When it was created.
    #[schema(format = DateTime)]
    created_at: String,
    /// When it is decided automatically.
    #[schema(format = DateTime)]
    timeout_at: Option<String>,
    /// The decision on timeout.
    #[schema(value_type = Option<String>)]
    on_timeout: Option<Decision>,
    /// The reviewer who claimed it.
    claimed_by: Option<String>,
    /// When the claim expires.
    #[schema(format = DateTime)]
    claimed_until: Option<String>,
    /// The decision: `approved`, `rejected` or `corrected`.
    #[schema(value_type = Option<String>)]
    decision: Option<Decision>,
    /// The answer that the reviewer chose.
    choice: Option<String>,
    /// Who decided.
    reviewer: Option<String>,
    /// The reviewer's reason.
    notes: Option<String>,
    /// When it was decided.
    #[schema(format = DateTime)]
    decided_at: Option<String>,
}

impl ReviewView {
    fn of(head: &Head, review: &Review) -> Self {
        let opened = &review.opened;
        let decided = review.decided.as_ref();
        let timeout = opened.timeout.as_ref();
        Self {
            id: opened.review.to_string(),
            object: "review",
            status: match (decided, review.void) {
                (Some(_), _) => "decided",
                (None, true) => "void",
                (None, false) => "open",
            },
            session_id: head.info.session_id.to_string(),
            run_id: opened.run.as_ref().map(ToString::to_string),
            call_id: opened.call.clone(),
            step: opened.step.clone(),
            kind: match (opened.lost, review.question()) {
                (true, _) => "lost",
                (false, Some(_)) => "question",
                (false, None) => "approve",
            },
            queue: opened.queue.clone(),
            arguments: opened.detail.get("arguments").cloned().unwrap_or_default(),
            question: review.question().map(str::to_owned),
            choices: review.choices().into_iter().map(str::to_owned).collect(),
            created_at: review.opened_at.to_string(),
            timeout_at: timeout.map(|t| t.at.to_string()),
            on_timeout: timeout.map(|t| t.decision),
            claimed_by: review.claimed.as_ref().map(|(by, _)| by.clone()),
            claimed_until: review.claimed.as_ref().and_then(|(_, until)| Some((*until)?.to_string())),
            decision: decided.map(|(_, d)| d.decision),
            choice: review.choice().map(str::to_owned),
            reviewer: decided.map(|(_, d)| d.reviewer.clone()),
            notes: decided.and_then(|(_, d)| d.notes.clone()),
            decided_at: decided.map(|(at, _)| at.to_string()),
        }
    }
}

/// Reviews, by most recently active session.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReviewList {
    /// `list`.
    object: &'static str,
    /// The reviews.
    data: Vec<ReviewView>,
    /// The cursor of the next page; `null` on the last one.
    next_cursor: Option<String>,
}

/// Parameters that select reviews.
#[derive(Debug, Deserialize, IntoParams)]
pub struct ReviewQuery {
    /// Only those of this queue.
    #[serde(default)]
    queue: Option<String>,
    /// `open` (default) or `decided`.
    #[serde(default)]
    status: Option<String>,
    /// Maximum number of sessions whose reviews are returned; default 20, at most 100.
    #[serde(default)]
    limit: Option<usize>,
    /// `next_cursor` of the previous page.
    #[serde(default)]
    cursor: Option<String>,
}

/// The claimant of a review, and the duration of the claim.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClaimBody {
    /// The reviewer; the requesting user if omitted.
    #[serde(default)]
    reviewer: Option<String>,
    /// The duration of the claim, such as `15m` (default).
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    lasting: Option<HumanDuration>,
}

/// A decision.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DecisionBody {
    /// `approved`, `rejected` or `corrected`. For a `lost` call: it was executed, it was not executed (and is executed now), or it was not
    /// executed and is executed with other arguments.
    #[schema(value_type = String)]
    decision: Decision,
    /// The reviewer's reason, or the answer to a question.
    #[serde(default)]
    notes: Option<String>,
    /// The chosen answer to a question: one of its `choices`.
    #[serde(default)]
    choice: Option<String>,
    /// The arguments to use instead, if corrected; for a question `{"answer": text}`.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    arguments: Option<Map<String, Value>>,
    /// The reviewer; the requesting user if omitted.
    #[serde(default)]
    reviewer: Option<String>,
}

fn review_id(path: &PathParams) -> ApiResult<ReviewId> {
    // A review id contains the session's id, so that it can be longer than other names.
    let id = path.text("review");
    let not_found = |_| ApiError::not_found(format!("there is no review {}; GET /reviews lists them", excerpt(id)));
    ReviewId::new(id).map_err(not_found)
}

/// List reviews
#[utoipa::path(
    get, path = "/reviews", tag = "reviews", operation_id = "list_reviews", params(ReviewQuery),
    responses((status = 200, description = "Reviews of the tenant's sessions", body = ReviewList), ListErrors)
)]
pub async fn list(
    State(app): State<AppState>,
    caller: Caller,
    QueryParams(query): QueryParams<ReviewQuery>,
) -> ApiResult<Json<ReviewList>> {
    let principal = caller.authorize_review()?;
    let filter = match (query.status.as_deref(), query.queue) {
        (None | Some("open"), queue) => ReviewFilter::Open(queue),
        (Some("decided"), None) => ReviewFilter::Decided,
        (Some("decided"), Some(_)) => {
            return Err(ApiError::invalid("queue", "`queue` is for open reviews only"));
        }
        (Some(other), _) => {
            return Err(ApiError::invalid("status", format!("{other} is not open or decided", other = excerpt(other))));
        }
    };
    let cursor = query.cursor.map(|c| c.parse()).transpose()?;
    let page = app.tenure.browsing(&principal).reviews(&principal, &filter, cursor, query.limit.unwrap_or(20)).await?;
    let data = page.reviews.iter().map(|(head, review)| ReviewView::of(head, review)).collect();
    Ok(Json(ReviewList { object: "list", data, next_cursor: page.next.map(|c| c.to_string()) }))
}

/// Get a review
#[utoipa::path(
    get, path = "/reviews/{review}", tag = "reviews", operation_id = "get_review",
    params(("review" = String, Path, description = "The review")),
    responses((status = 200, description = "The review", body = ReviewView), LookupErrors)
)]
pub async fn get(State(app): State<AppState>, caller: Caller, path: PathParams) -> ApiResult<Json<ReviewView>> {
    let (head, review) = app.tenure.review(&caller.authorize_review()?, &review_id(&path)?).await?;
    Ok(Json(ReviewView::of(&head, &review)))
}

/// Claim a review
///
/// No one else can claim or decide it until it is released or the claim expires.
#[utoipa::path(
    post, path = "/reviews/{review}/claim", tag = "reviews", operation_id = "claim_review",
    params(("review" = String, Path, description = "The review")), request_body(content = ClaimBody),
    responses((status = 200, description = "The review is claimed", body = ReviewView), WriteErrors)
)]
pub async fn claim(
    State(app): State<AppState>,
    caller: Caller,
    path: PathParams,
    JsonBody(body): JsonBody<ClaimBody>,
) -> ApiResult<Json<ReviewView>> {
    let principal = caller.authorize_review()?;
    let id = review_id(&path)?;
    let reviewer = caller.reviewer(body.reviewer)?;
    let lasting = body.lasting.unwrap_or(HumanDuration::of(std::time::Duration::from_secs(900)));
    let lasting = lasting.duration().and_then(|d| d.try_into().ok());
    let lasting = lasting.ok_or_else(|| ApiError::invalid("lasting", "`lasting` must be finite, such as 15m"))?;
    let review = app.tenure.claim_review(&principal, &id, &reviewer, lasting).await?;
    Ok(Json(ReviewView::of(&app.tenure.review(&principal, &id).await?.0, &review)))
}

/// Release a review
#[utoipa::path(
    post, path = "/reviews/{review}/release", tag = "reviews", operation_id = "release_review",
    params(("review" = String, Path, description = "The review")), request_body(content = ClaimBody),
    responses((status = 200, description = "The review can be claimed again", body = ReviewView), WriteErrors)
)]
pub async fn release(
    State(app): State<AppState>,
    caller: Caller,
    path: PathParams,
    JsonBody(body): JsonBody<ClaimBody>,
) -> ApiResult<Json<ReviewView>> {
    let principal = caller.authorize_review()?;
    let id = review_id(&path)?;
    let reviewer = caller.reviewer(body.reviewer)?;
    let review = app.tenure.release_review(&principal, &id, &reviewer).await?;
    Ok(Json(ReviewView::of(&app.tenure.review(&principal, &id).await?.0, &review)))
}

/// Decide a review
///
/// The decision is recorded in the session's metadata under `hitl_decisions`. When no review is open any more, the run resumes.
#[utoipa::path(
    post, path = "/reviews/{review}/decision", tag = "reviews", operation_id = "decide_review",
    params(("review" = String, Path, description = "The review")), request_body(content = DecisionBody),
    responses((status = 200, description = "The review was decided", body = ReviewView), WriteErrors)
)]
pub async fn decide(
    State(app): State<AppState>,
    caller: Caller,
    local_access: Option<Extension<LocalAccess>>,
    path: PathParams,
    JsonBody(body): JsonBody<DecisionBody>,
) -> ApiResult<Json<ReviewView>> {
    let principal = caller.authorize_review()?;
    let id = review_id(&path)?;
    let reviewer = caller.reviewer(body.reviewer)?;
    let DecisionBody { decision, notes, choice, arguments, .. } = body;
    let input = ReviewInput { decision, reviewer, notes, arguments: arguments.map(Value::Object), choice };
    let review = app.tenure.decide(&principal, &id, &input).await?;
    let (head, _) = app.tenure.review(&principal, &id).await?;
    let view = ReviewView::of(&head, &review);
    // A command with direct access to the store exits soon; its run is left to a server, which has the models
    // and tools.
    if local_access.is_none() && head.reviews.is_empty() && head.run.is_some() {
        runs::spawn_takeover(&app, head);
    }
    Ok(Json(view))
}
