//! `tenure runs`: lists, shows and cancels the runs of a session.

use super::client::{ApiClient, session_path};
use super::output::{self, age, brief, clean, field, line, print};
use super::target::{Needs, TargetArgs};
use anyhow::bail;
use axum::http::Method;
use clap::Subcommand;
use serde_json::{Value, json};
use std::process::ExitCode;
use tenure::{SessionId, run::RunId};

/// Commands for runs.
#[derive(Debug, Subcommand)]
pub enum RunsCommand {
    /// List the runs of a session, oldest first
    List {
        /// The session
        session: String,
    },
    /// Show a run: its status, its last answer, and the reviews it waits for
    Show {
        /// The session
        session: String,
        /// The run (default: the last one)
        run: Option<String>,
    },
    /// Cancel a run; its results so far are stored, completed tool calls are not undone
    Cancel {
        /// The session
        session: String,
        /// The run (default: the last one)
        run: Option<String>,
    },
}

impl RunsCommand {
    /// Executes the command.
    pub async fn run(self, target: &TargetArgs, json: bool) -> anyhow::Result<ExitCode> {
        let client = target.client(Needs::Sessions).await?;
        match self {
            Self::List { session } => {
                let id = client.resolve(&session).await?;
                let text = client.send(Method::GET, &session_path(&id, "/runs"), None).await?.text().await?;
                if json {
                    line(text)?;
                } else {
                    let list: Value = serde_json::from_str(&text)?;
                    print(runs_table(list["data"].as_array().map(Vec::as_slice).unwrap_or_default()))?;
                }
            }
            Self::Show { session, run } => {
                let id = client.resolve(&session).await?;
                let run = resolve_run(&client, &id, run).await?;
                let path = session_path(&id, &format!("/runs/{run}"));
                let text = client.send(Method::GET, &path, None).await?.text().await?;
                if json { line(text)? } else { print(run_details(&serde_json::from_str(&text)?))? }
            }
            Self::Cancel { session, run } => {
                let id = client.resolve(&session).await?;
                let run = resolve_run(&client, &id, run).await?;
                let path = session_path(&id, &format!("/runs/{run}/cancel"));
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
async fn resolve_run(client: &ApiClient, id: &SessionId, run: Option<String>) -> anyhow::Result<RunId> {
    if let Some(run) = run {
        return Ok(RunId::new(run)?);
    }
    let list: Value = client.get(&session_path(id, "/runs")).await?;
    match list["data"].as_array().and_then(|runs| runs.last()) {
        Some(run) => Ok(RunId::new(field(run, "id"))?),
        None => bail!("session {id} has no runs yet"),
    }
}

fn runs_table(runs: &[Value]) -> String {
    let now = crate::clock::now();
    let row = |r: &Value| {
        let error = brief(field(r, "error"), 60);
        [
            clean(field(r, "id")),
            age(&r["started_at"], now),
            field(r, "status").to_owned(),
            clean(field(r, "code")),
            error,
        ]
    };
    output::table(["id", "age", "status", "code", "error"], runs.iter().map(row).collect())
}

fn run_details(run: &Value) -> String {
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
        let answer = clean(&output::text(&run["answer"]));
        text.extend(answer.lines().map(|l| format!("    {l}\n")));
        let calls = run["answer"]["tool_calls"].as_array();
        text.extend(calls.into_iter().flatten().map(|c| clean(&format!("    → {}\n", output::call(c)))));
    }
    text
}
