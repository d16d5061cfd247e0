//! `tenure reviews`: lists the reviews that wait for a human decision, and decides them.

use super::client::{ApiClient, PageStream};
use super::output::{self, age, brief, clean, field, line, note, print};
use super::target::{Needs, TargetArgs};
use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Map, Value, json};
use std::process::ExitCode;
use tenure::review::ReviewId;

/// Commands for reviews.
#[derive(Debug, Subcommand)]
pub enum ReviewsCommand {
    /// List reviews, by most recently active session
    List(ListReviews),
    /// Show a review: the request, its queue, and the decision
    Show {
        /// The review
        review: String,
    },
    /// Approve a call. For a call whose result was lost: confirm that it was executed
    Approve(DecideArgs),
    /// Reject a call. For a call whose result was lost: it was not executed, and is executed now
    Reject(DecideArgs),
    /// Approve a call with other arguments
    Correct {
        #[command(flatten)]
        decide: DecideArgs,
        /// The arguments, a JSON object
        arguments: String,
    },
}

/// Which reviews to list.
#[derive(Debug, Args)]
pub struct ListReviews {
    /// In this state
    #[arg(long, default_value = "open")]
    status: ReviewStatus,
    /// Only those of this queue
    #[arg(long, value_name = "NAME")]
    queue: Option<String>,
    /// Maximum number of results
    #[arg(long, value_name = "N", default_value_t = 20, conflicts_with = "all")]
    limit: usize,
    /// All of them
    #[arg(long)]
    all: bool,
}

/// The state of a review.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum ReviewStatus {
    /// Waiting for a decision.
    Open,
    /// Decided.
    Decided,
}

/// The decided review and the reason. `--user` names the reviewer.
#[derive(Debug, Args)]
pub struct DecideArgs {
    /// The review
    review: String,
    /// The reason, or the answer to a question
    #[arg(long, value_name = "TEXT")]
    notes: Option<String>,
    /// The chosen answer to a question
    #[arg(long, value_name = "TEXT")]
    choice: Option<String>,
}

impl ReviewsCommand {
    /// Executes the command.
    pub async fn run(self, target: &TargetArgs, json: bool) -> anyhow::Result<ExitCode> {
        let client = target.client(Needs::Sessions).await?;
        match self {
            Self::List(args) => list(&client, &args, json).await?,
            Self::Show { review } => show(&client, &ReviewId::new(review)?, json).await?,
            Self::Approve(args) => decide(&client, args, json!({"decision": "approved"}), json).await?,
            Self::Reject(args) => decide(&client, args, json!({"decision": "rejected"}), json).await?,
            Self::Correct { decide: args, arguments } => {
                let arguments: Map<String, Value> = serde_json::from_str(&arguments)
                    .context("the arguments must be a JSON object, as '{\"amount\": 5}'")?;
                decide(&client, args, json!({"decision": "corrected", "arguments": arguments}), json).await?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn list(client: &ApiClient, args: &ListReviews, json: bool) -> anyhow::Result<()> {
    let status = args.status.to_possible_value().map(|s| s.get_name().to_owned()).unwrap_or_default();
    let mut query = vec![("status", status.as_str())];
    query.extend(args.queue.as_deref().map(|q| ("queue", q)));
    let limit = if args.all { usize::MAX } else { args.limit };
    let (reviews, next) = PageStream::new(client, "/reviews", &query, limit).all().await?;
    if json {
        return Ok(line(json!({"object": "list", "data": reviews, "next_cursor": next}).to_string())?);
    }
    print(reviews_table(&reviews))?;
    if next.is_some() {
        note(format!("there are more: --limit {} or --all", args.limit.saturating_mul(2).max(1)));
    }
    Ok(())
}

fn reviews_table(reviews: &[Value]) -> String {
    let now = crate::clock::now();
    let row = |r: &Value| {
        let state = if field(r, "status") == "decided" { field(r, "decision") } else { field(r, "status") };
        [
            clean(field(r, "id")),
            age(&r["created_at"], now),
            brief(field(r, "step"), 32),
            brief(&r["arguments"].to_string(), 48),
            brief(field(r, "queue"), 24),
            state.to_owned(),
        ]
    };
    output::table(["id", "age", "step", "arguments", "queue", "status"], reviews.iter().map(row).collect())
}

async fn show(client: &ApiClient, id: &ReviewId, json: bool) -> anyhow::Result<()> {
    let text = client.send(axum::http::Method::GET, &format!("/reviews/{id}"), None).await?.text().await?;
    if json {
        return Ok(line(text)?);
    }
    let review: Value = serde_json::from_str(&text)?;
    let mut text = String::new();
    for (name, value) in [
        ("review", "id"),
        ("status", "status"),
        ("asks", "kind"),
        ("session", "session_id"),
        ("run", "run_id"),
        ("step", "step"),
        ("question", "question"),
        ("arguments", "arguments"),
        ("queue", "queue"),
        ("created", "created_at"),
        ("timeout", "timeout_at"),
        ("then", "on_timeout"),
        ("claimed by", "claimed_by"),
        ("until", "claimed_until"),
        ("decision", "decision"),
        ("choice", "choice"),
        ("reviewer", "reviewer"),
        ("notes", "notes"),
        ("decided", "decided_at"),
    ] {
        let value = match &review[value] {
            Value::Null => continue,
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        text.push_str(&format!("{name:<12}{}\n", clean(&value)));
    }
    Ok(print(text)?)
}

async fn decide(client: &ApiClient, args: DecideArgs, mut body: Value, json: bool) -> anyhow::Result<()> {
    let id = ReviewId::new(args.review)?;
    if let Some(notes) = args.notes {
        body["notes"] = json!(notes);
    }
    if let Some(choice) = args.choice {
        body["choice"] = json!(choice);
    }
    let text = client.post(&format!("/reviews/{id}/decision"), &body).await?.text().await?;
    if json {
        line(text)?;
    } else {
        let review: Value = serde_json::from_str(&text)?;
        line(format!("{id} is {}", field(&review, "decision")))?;
    }
    if client.is_store() {
        note("the decision is stored; a server on this store will resume the run");
    }
    Ok(())
}
