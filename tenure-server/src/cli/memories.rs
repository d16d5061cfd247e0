//! `tenure memories` and `tenure dream`: lists, adds and removes memories, and promotes memories of sessions to
//! their users.

use super::client::{ApiClient, PageStream};
use super::output::{self, age, brief, clean, field, line, note, print};
use super::target::{Needs, TargetArgs};
use anyhow::bail;
use axum::http::Method;
use clap::{Args, Subcommand};
use indicatif::ProgressBar;
use serde_json::{Value, json};
use std::process::ExitCode;

/// What to do with memories.
#[derive(Debug, Subcommand)]
pub enum MemoriesCommand {
    /// List memories
    List {
        #[command(flatten)]
        whose: OwnerArgs,
        /// At most so many
        #[arg(long, value_name = "N", default_value_t = 20)]
        limit: usize,
    },
    /// Recall what has to do with a question
    Search {
        /// The question
        question: String,
        #[command(flatten)]
        whose: OwnerArgs,
        /// At most so many
        #[arg(long, value_name = "N", default_value_t = 10)]
        limit: usize,
    },
    /// Remember something
    Add {
        /// The words: one fact
        text: String,
        #[command(flatten)]
        whose: OwnerArgs,
    },
    /// Forget a memory
    Forget {
        /// The memory
        id: String,
        #[command(flatten)]
        whose: OwnerArgs,
    },
    /// Give all memories vectors of the configured model (a running server does it by itself)
    Embed,
}

/// Whose memories: a session's, an assistant's, or the user's own (`--user`).
#[derive(Debug, Args)]
pub struct OwnerArgs {
    /// Those of this session, as its assistant shares them
    #[arg(long, value_name = "ID", conflicts_with = "assistant")]
    session: Option<String>,
    /// Those of this assistant
    #[arg(long, value_name = "NAME")]
    assistant: Option<String>,
}

impl OwnerArgs {
    fn pairs(&self) -> Vec<(&str, &str)> {
        let session = self.session.as_deref().map(|id| ("session_id", id));
        session.into_iter().chain(self.assistant.as_deref().map(|name| ("assistant_id", name))).collect()
    }
}

/// What to dream.
#[derive(Debug, Args)]
pub struct DreamArgs {
    /// Only say what would be promoted
    #[arg(long, conflicts_with = "undo")]
    dry_run: bool,
    /// Take back what a dream promoted
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
    pub async fn run(self, at: &TargetArgs, json: bool) -> anyhow::Result<ExitCode> {
        if matches!(self, Self::Embed) {
            return embed(at, json).await;
        }
        let client = at.client(Needs::Vectors).await?;
        match self {
            Self::List { whose, limit } => list(&client, &whose, limit, json).await?,
            Self::Search { question, whose, limit } => search(&client, &question, &whose, limit, json).await?,
            Self::Add { text, whose } => {
                let mut body = json!({"text": text});
                for (name, value) in whose.pairs() {
                    body[name] = json!(value);
                }
                let text = client.post("/memories", &body).await?.text().await?;
                say(json, &text, |m| format!("{} is remembered, for the {}", field(m, "id"), field(m, "scope")))?;
            }
            Self::Forget { id, whose } => {
                let path = format!("/memories/{}{}", clean(&id), query(&whose.pairs()));
                let text = client.send(Method::DELETE, &path, None).await?.text().await?;
                say(json, &text, |m| format!("{} is forgotten", field(m, "id")))?;
            }
            Self::Embed => {}
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn say(json: bool, text: &str, words: impl Fn(&Value) -> String) -> anyhow::Result<()> {
    match json {
        true => Ok(line(text)?),
        false => Ok(line(words(&serde_json::from_str(text)?))?),
    }
}

async fn list(client: &ApiClient, whose: &OwnerArgs, limit: usize, json: bool) -> anyhow::Result<()> {
    let (memories, next) = PageStream::new(client, "/memories", &whose.pairs(), limit).all().await?;
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

async fn search(client: &ApiClient, question: &str, whose: &OwnerArgs, limit: usize, json: bool) -> anyhow::Result<()> {
    let limit = limit.to_string();
    let mut pairs = whose.pairs();
    pairs.extend([("q", question), ("limit", limit.as_str())]);
    let text = client.send(Method::GET, &format!("/memories/search{}", query(&pairs)), None).await?.text().await?;
    if json {
        return Ok(line(text)?);
    }
    let found: Value = serde_json::from_str(&text)?;
    print(table(found["data"].as_array().map(Vec::as_slice).unwrap_or_default()))?;
    if let Some(why) = found["note"].as_str() {
        note(why);
    }
    Ok(())
}

async fn embed(at: &TargetArgs, json: bool) -> anyhow::Result<ExitCode> {
    let app = at.house(Needs::Vectors).await?;
    let bar = if json { ProgressBar::hidden() } else { ProgressBar::new_spinner() };
    bar.set_message("memories have new vectors");
    let done = app.tenure.embed_all(|n| bar.inc(n as u64)).await?;
    bar.finish_and_clear();
    match json {
        true => line(json!({"embedded": done}).to_string())?,
        false => line(format!("{done} memories have new vectors"))?,
    }
    Ok(ExitCode::SUCCESS)
}

impl DreamArgs {
    /// Executes the command.
    pub async fn run(self, at: &TargetArgs) -> anyhow::Result<ExitCode> {
        if at.user.is_some() {
            bail!("a dream is the tenant's; leave --user out");
        }
        let client = at.client(Needs::Sessions).await?;
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
        let told: Value = serde_json::from_str(&text)?;
        if self.undo.is_some() {
            line(format!("{} memories were taken back", told["undone"]))?;
        } else if self.list {
            let dreams = told["data"].as_array().map(Vec::as_slice).unwrap_or_default();
            let row = |d: &Value| {
                let promoted = d["promoted"].as_array().map_or(0, Vec::len).to_string();
                [clean(field(d, "id")), clean(field(d, "at")), promoted]
            };
            print(output::table(["id", "at", "promoted"], dreams.iter().map(row).collect()))?;
        } else {
            report(&told)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn report(dream: &Value) -> anyhow::Result<()> {
    let promoted = dream["promoted"].as_array().map(Vec::as_slice).unwrap_or_default();
    let row = |p: &Value| {
        let number = |name: &str| p[name].to_string();
        let (user, session) = (brief(field(p, "user"), 24), clean(field(p, "session_id")));
        [clean(field(p, "memory")), user, session, number("recalls"), number("questions"), number("days")]
    };
    let head = ["memory", "user", "session", "recalls", "questions", "days"];
    print(output::table(head, promoted.iter().map(row).collect()))?;
    let (n, sessions) = (promoted.len(), &dream["sessions"]);
    match dream["dry_run"].as_bool() {
        Some(true) => note(format!("{n} memories of {sessions} sessions would be promoted")),
        _ => note(format!("{n} memories of {sessions} sessions were promoted ({})", clean(field(dream, "id")))),
    }
    Ok(())
}
