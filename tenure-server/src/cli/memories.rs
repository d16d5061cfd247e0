//! `tenure memories` and `tenure dream`: lists, adds and removes memories, and promotes memories of sessions to
//! their users.

use super::client::{ApiClient, PageStream};
use super::output::{self, age, brief, clean, field, line, note, print};
use super::target::{Needs, TargetArgs};
use crate::config::embeddings::EmbeddingBackend;
use anyhow::bail;
use axum::http::Method;
use clap::{Args, Subcommand};
use indicatif::ProgressBar;
use serde_json::{Value, json};
use std::process::ExitCode;

/// Commands for memories.
#[derive(Debug, Subcommand)]
pub enum MemoriesCommand {
    /// List memories
    List {
        #[command(flatten)]
        owner: OwnerArgs,
        /// Maximum number of results
        #[arg(long, value_name = "N", default_value_t = 20)]
        limit: usize,
    },
    /// Search memories that are relevant to a question
    Search {
        /// The question; several are searched at once
        #[arg(required = true, value_name = "QUESTION")]
        questions: Vec<String>,
        #[command(flatten)]
        owner: OwnerArgs,
        /// Maximum number of results
        #[arg(long, value_name = "N", default_value_t = 10)]
        limit: usize,
    },
    /// Add a memory
    Add {
        /// The text: one fact
        text: String,
        /// When it was said or became true (RFC 3339); default: now
        #[arg(long, value_name = "TIME")]
        timestamp: Option<String>,
        /// An older memory that it supersedes (repeatable)
        #[arg(long, value_name = "ID")]
        supersedes: Vec<String>,
        #[command(flatten)]
        owner: OwnerArgs,
    },
    /// Remove a memory
    Forget {
        /// The memory
        id: String,
        #[command(flatten)]
        owner: OwnerArgs,
    },
    /// Compute the embeddings of all memories with the configured model (a running server does this automatically)
    Embed,
}

/// The owner of the memories: a session, an assistant, or the user (`--user`).
#[derive(Debug, Args)]
pub struct OwnerArgs {
    /// Memories of this session, in the scope its assistant defines
    #[arg(long, value_name = "ID", conflicts_with = "assistant")]
    session: Option<String>,
    /// Memories of this assistant
    #[arg(long, value_name = "NAME")]
    assistant: Option<String>,
}

impl OwnerArgs {
    fn pairs(&self) -> Vec<(&str, &str)> {
        let session = self.session.as_deref().map(|id| ("session_id", id));
        session.into_iter().chain(self.assistant.as_deref().map(|name| ("assistant_id", name))).collect()
    }
}

/// Options of a dream (memory consolidation).
#[derive(Debug, Args)]
pub struct DreamArgs {
    /// Only show what would be promoted
    #[arg(long, conflicts_with = "undo")]
    dry_run: bool,
    /// Undo the promotions of a dream
    #[arg(long, value_name = "DREAM")]
    undo: Option<String>,
    /// List the dreams that promoted something
    #[arg(long, conflicts_with_all = ["undo", "dry_run"])]
    list: bool,
    /// JSON, for programs
    #[arg(long)]
    json: bool,
}

fn query(pairs: &[(&str, &str)]) -> String {
    let mut url = reqwest::Url::parse("http://x/").expect("it is one");
    url.query_pairs_mut().extend_pairs(pairs);
    url.query().map(|q| format!("?{q}")).unwrap_or_default()
}

impl MemoriesCommand {
    /// Executes the command.
    pub async fn run(self, target: &TargetArgs, json: bool) -> anyhow::Result<ExitCode> {
        if matches!(self, Self::Embed) {
            return embed(target, json).await;
        }
        let needs = match self {
            Self::List { .. } | Self::Forget { .. } => Needs::Sessions,
            Self::Search { .. } | Self::Add { .. } | Self::Embed => Needs::Vectors,
        };
        let client = target.client(needs).await?;
        match self {
            Self::List { owner, limit } => list(&client, &owner, limit, json).await?,
            Self::Search { questions, owner, limit } => search(&client, &questions, &owner, limit, json).await?,
            Self::Add { text, timestamp, supersedes, owner } => {
                let mut body = json!({"text": text, "timestamp": timestamp, "supersedes": supersedes});
                for (name, value) in owner.pairs() {
                    body[name] = json!(value);
                }
                let text = client.post("/memories", &body).await?.text().await?;
                print_result(json, &text, |m| {
                    format!("{} is remembered, for the {}", field(m, "id"), field(m, "scope"))
                })?;
            }
            Self::Forget { id, owner } => {
                let path = format!("/memories/{}{}", clean(&id), query(&owner.pairs()));
                let text = client.send(Method::DELETE, &path, None).await?.text().await?;
                print_result(json, &text, |m| format!("{} is forgotten", field(m, "id")))?;
            }
            Self::Embed => {}
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn print_result(json: bool, text: &str, describe: impl Fn(&Value) -> String) -> anyhow::Result<()> {
    if json { Ok(line(text)?) } else { Ok(line(describe(&serde_json::from_str(text)?))?) }
}

async fn list(client: &ApiClient, owner: &OwnerArgs, limit: usize, json: bool) -> anyhow::Result<()> {
    let (memories, next) = PageStream::new(client, "/memories", &owner.pairs(), limit).all().await?;
    if json {
        return Ok(line(json!({"object": "list", "data": memories, "next_cursor": next}).to_string())?);
    }
    print(table(&memories))?;
    if next.is_some() {
        note(format!("there are more: --limit {}", limit.saturating_mul(2).max(1)));
    }
    Ok(())
}

fn table(memories: &[Value]) -> String {
    let now = crate::clock::now();
    let row = |m: &Value| {
        let uses = m["uses"].to_string();
        [
            clean(field(m, "id")),
            age(&m["created_at"], now),
            uses,
            field(m, "scope").to_owned(),
            brief(field(m, "text"), 80),
        ]
    };
    output::table(["id", "age", "uses", "scope", "text"], memories.iter().map(row).collect())
}

async fn search(
    client: &ApiClient,
    questions: &[String],
    owner: &OwnerArgs,
    limit: usize,
    json: bool,
) -> anyhow::Result<()> {
    let limit = limit.to_string();
    let mut pairs = owner.pairs();
    pairs.extend(questions.iter().map(|question| ("q", question.as_str())));
    pairs.push(("limit", limit.as_str()));
    let text = client.send(Method::GET, &format!("/memories/search{}", query(&pairs)), None).await?.text().await?;
    if json {
        return Ok(line(text)?);
    }
    let results: Value = serde_json::from_str(&text)?;
    print(table(results["data"].as_array().map(Vec::as_slice).unwrap_or_default()))?;
    if let Some(reason) = results["note"].as_str() {
        note(reason);
    }
    Ok(())
}

async fn embed(target: &TargetArgs, json: bool) -> anyhow::Result<ExitCode> {
    if matches!(target.load(&[])?.embeddings.backend(), EmbeddingBackend::None) {
        bail!("no embeddings are configured: set `embeddings.model` in tenure.yaml");
    }
    let app = target.open_store(Needs::Vectors).await?;
    let bar = if json { ProgressBar::hidden() } else { ProgressBar::new_spinner() };
    bar.set_message("memories have new embeddings");
    let count = app.tenure.embed_all(|n| bar.inc(n as u64)).await?;
    bar.finish_and_clear();
    if json {
        line(json!({"embedded": count}).to_string())?;
    } else {
        line(format!("{count} memories have new embeddings"))?;
    }
    Ok(ExitCode::SUCCESS)
}

impl DreamArgs {
    /// Executes the command.
    pub async fn run(self, target: &TargetArgs) -> anyhow::Result<ExitCode> {
        if target.user.is_some() {
            bail!("dreams apply to the whole tenant; omit --user");
        }
        let client = target.client(Needs::Sessions).await?;
        let text = match &self.undo {
            Some(dream) => client.send(Method::DELETE, &format!("/dreams/{}", clean(dream)), None).await?,
            None if self.list => client.send(Method::GET, "/dreams", None).await?,
            None => client.post("/dreams", &json!({"dry_run": self.dry_run})).await?,
        };
        let text = text.text().await?;
        if self.json {
            line(text)?;
            return Ok(ExitCode::SUCCESS);
        }
        let response: Value = serde_json::from_str(&text)?;
        if self.undo.is_some() {
            line(format!("{} promoted memories were removed", response["undone"]))?;
        } else if self.list {
            let dreams = response["data"].as_array().map(Vec::as_slice).unwrap_or_default();
            let row = |d: &Value| {
                let promoted = d["promoted"].as_array().map_or(0, Vec::len).to_string();
                [clean(field(d, "id")), clean(field(d, "at")), promoted]
            };
            print(output::table(["id", "at", "promoted"], dreams.iter().map(row).collect()))?;
        } else {
            report(&response)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn report(dream: &Value) -> anyhow::Result<()> {
    let promoted = dream["promoted"].as_array().map(Vec::as_slice).unwrap_or_default();
    let row = |p: &Value| {
        let number = |name: &str| p[name].to_string();
        let user = brief(field(p, "user"), 24);
        let session = clean(field(p, "session_id"));
        [clean(field(p, "memory")), user, session, number("recalls"), number("questions"), number("days")]
    };
    let header = ["memory", "user", "session", "recalls", "questions", "days"];
    print(output::table(header, promoted.iter().map(row).collect()))?;
    let n = promoted.len();
    let sessions = &dream["sessions"];
    match dream["dry_run"].as_bool() {
        Some(true) => note(format!("{n} memories of {sessions} sessions would be promoted")),
        _ => note(format!("{n} memories of {sessions} sessions were promoted ({})", clean(field(dream, "id")))),
    }
    Ok(())
}
