//! `tenure runs`: lists, shows and cancels the runs of a session.

use super::client::ApiClient;
use super::output::{self, age, brief, clean, field, line, print};
use super::target::{Needs, TargetArgs};
use anyhow::bail;
use axum::http::Method;
use clap::Subcommand;
use serde_json::{Value, json};
use std::process::ExitCode;
use tenure::{RunId, SessionId};

/// What to do with runs.
#[derive(Debug, Subcommand)]
pub enum RunsCommand {
    /// List the runs of a session, oldest first
    List {
        /// The session
        session: String,
    },
    /// Show a run: where it stands, its last answer, what it waits for
    Show {
        /// The session
        session: String,
        /// The run (default: the last one)
        run: Option<String>,
    },
    /// Stop a run; what happened is kept, tools that were called are not undone
    Cancel {
        /// The session
        session: String,
        /// The run (default: the last one)
        run: Option<String>,
    },
}

impl RunsCommand {
    /// Executes the command.
    pub async fn run(self, at: &TargetArgs, json: bool) -> anyhow::Result<ExitCode> {
        let client = at.client(Needs::Sessions).await?;
        match self {
            Self::List { session } => {
                let id = client.resolve(&session).await?;
                let text = client.send(Method::GET, &format!("/sessions/{id}/runs"), None).await?.text().await?;
                if json {
                    line(text)?;
                } else {
                    let list: Value = serde_json::from_str(&text)?;
                    print(runs_table(list["data"].as_array().map(Vec::as_slice).unwrap_or_default()))?;
                }
            }
            Self::Show { session, run } => {
                let id = client.resolve(&session).await?;
                let run = named(&client, &id, run).await?;
                let path = format!("/sessions/{id}/runs/{run}");
                let text = client.send(Method::GET, &path, None).await?.text().await?;
                if json { line(text)? } else { print(whole(&serde_json::from_str(&text)?))? }
            }
            Self::Cancel { session, run } => {
                let id = client.resolve(&session).await?;
                let run = named(&client, &id, run).await?;
                let path = format!("/sessions/{id}/runs/{run}/cancel");
                let text = client.post(&path, &json!({})).await?.text().await?;
                if json {
                    line(text)?;
                } else {
                    let ended: Value = serde_json::from_str(&text)?;
                    line(format!("{run} is {}", field(&ended, "status")))?;
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Resolves the run a command refers to: the last one if none is named.
async fn named(client: &ApiClient, id: &SessionId, run: Option<String>) -> anyhow::Result<RunId> {
    if let Some(run) = run {
        return Ok(RunId::new(run)?);
    }
    let list: Value = client.get(&format!("/sessions/{id}/runs")).await?;
    match list["data"].as_array().and_then(|runs| runs.last()) {
        Some(run) => Ok(RunId::new(field(run, "id"))?),
        None => bail!("session {id} has no runs yet"),
    }
}

fn runs_table(runs: &[Value]) -> String {
    let now = crate::clock::now();
    let row = |r: &Value| {
        let why = brief(field(r, "error"), 60);
        [clean(field(r, "id")), age(&r["started_at"], now), field(r, "status").to_owned(), clean(field(r, "code")), why]
    };
    output::table(["id", "age", "status", "code", "error"], runs.iter().map(row).collect())
}

fn whole(run: &Value) -> String {
    let mut text = String::new();
    for (name, value) in [
        ("run", "id"),
        ("status", "status"),
        ("started", "started_at"),
        ("ended", "ended_at"),
        ("code", "code"),
        ("error", "error"),
    ] {
        let value = field(run, value);
        if !value.is_empty() {
            text.push_str(&format!("{name:<11}{}\n", clean(value)));
        }
    }
    for review in run["reviews"].as_array().into_iter().flatten() {
        text.push_str(&format!("{:<11}{}\n", "waits for", clean(review.as_str().unwrap_or_default())));
    }
    if run["answer"].is_object() {
        let said = clean(&output::text(&run["answer"]));
        text.extend(said.lines().map(|l| format!("    {l}\n")));
        let calls = run["answer"]["tool_calls"].as_array();
        text.extend(calls.into_iter().flatten().map(|c| clean(&format!("    → {}\n", output::call(c)))));
    }
    text
}
