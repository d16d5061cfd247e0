//! `tenure sessions`: lists, shows and changes sessions.

use super::audit;
use super::changes::{self, TitleChange, rewound_text};
use super::client::{ApiClient, PageStream, session_path};
use super::output::{self, age, brief, clean, field, line, note, print, shell_word, short};
use super::search::{self, SearchArgs};
use super::target::{Needs, TargetArgs};
use super::transfer::{self, ExportArgs, ImportArgs};
use anyhow::{Context, bail};
use axum::http::Method;
use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};
use std::io::IsTerminal;
use std::process::ExitCode;

/// Commands for sessions.
#[derive(Debug, Subcommand)]
pub enum SessionsCommand {
    /// List sessions, last active first
    List(ListSessions),
    /// Show a session: its properties, messages and checkpoints
    Show {
        /// The session
        id: String,
        /// Only the last N messages
        #[arg(long, value_name = "N")]
        last: Option<usize>,
    },
    /// Write a session, or all of them, to files
    Export(ExportArgs),
    /// Read sessions from files: exports of Tenure, OpenAI messages, mistral.rs, Claude Code, the OpenAI Agents SDK
    Import(ImportArgs),
    /// Fork a session: create a new one that shares its beginning
    Fork {
        /// The session
        id: String,
        /// The position to fork at: a number of messages, turn:N, or the label of a checkpoint (default: the end)
        #[arg(long, value_name = "POSITION")]
        at: Option<String>,
        /// The id of the new session
        #[arg(long = "id", value_name = "ID")]
        new: Option<String>,
    },
    /// Rewind a session; discarded messages stay readable
    Rewind {
        /// The session
        id: String,
        /// The position to rewind to: a number of messages, turn:N, or the label of a checkpoint
        position: String,
        /// Also restore its workspace; the current files are committed first
        #[arg(long)]
        workspace: bool,
    },
    /// Summarize the oldest turns; models see the summary instead, the messages stay stored
    Compact {
        /// The session
        id: String,
        /// Number of newest turns to leave unsummarized (default: 2)
        #[arg(long, value_name = "N")]
        keep: Option<usize>,
        /// The model that writes it (default: the session's)
        #[arg(long, value_name = "NAME")]
        model: Option<String>,
    },
    /// Remove the summary: models see the messages again
    Uncompact {
        /// The session
        id: String,
    },
    /// Delete sessions; they can be restored until their retention ends
    Delete {
        /// The sessions
        #[arg(required = true)]
        ids: Vec<String>,
        /// Purge them permanently
        #[arg(long)]
        purge: bool,
        /// Do not ask for confirmation
        #[arg(long, short)]
        yes: bool,
    },
    /// Restore deleted or expired sessions
    Restore {
        /// The sessions
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Search titles and messages
    Search(SearchArgs),
    /// Undo the last turns: rewind to before the user's question
    Undo {
        /// The session
        id: String,
        /// Number of turns
        #[arg(default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
        turns: u64,
    },
    /// Set the title of a session; without a text, print it
    Title {
        /// The session
        id: String,
        /// The title
        #[arg(conflicts_with = "clear")]
        text: Vec<String>,
        /// Remove the title
        #[arg(long)]
        clear: bool,
    },
    /// Add and remove tags of a session; without any, print them
    Tag {
        /// The session
        id: String,
        /// The tags to add
        tags: Vec<String>,
        /// A tag to remove (repeatable)
        #[arg(long, value_name = "TAG")]
        remove: Vec<String>,
    },
    /// Pause sessions: they accept no messages until they are resumed
    Pause {
        /// The sessions
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Resume paused sessions
    Resume {
        /// The sessions
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Show the decisions of people in a session and verify their hash chain
    Audit {
        /// The session
        id: String,
    },
}

/// Which sessions to list.
#[derive(Debug, Args)]
pub struct ListSessions {
    /// In this state (default: active and paused)
    #[arg(long)]
    status: Option<StatusFilter>,
    /// Of this assistant
    #[arg(long, value_name = "NAME")]
    assistant: Option<String>,
    /// Of this chat thread
    #[arg(long, value_name = "ID")]
    thread: Option<String>,
    /// With this tag (repeatable)
    #[arg(long, value_name = "TAG")]
    tag: Vec<String>,
    /// With this in their metadata (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    metadata: Vec<String>,
    /// With this text in their title
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,
    /// Created at or after this time, as 2026-01-31 (midnight UTC) or 2026-01-31T12:00:00Z
    #[arg(long, value_name = "TIME")]
    created_after: Option<String>,
    /// Created before this time
    #[arg(long, value_name = "TIME")]
    created_before: Option<String>,
    /// Maximum number of results
    #[arg(long, value_name = "N", default_value_t = 20, conflicts_with = "all")]
    limit: usize,
    /// All of them
    #[arg(long)]
    all: bool,
    /// Show full ids
    #[arg(long)]
    long: bool,
}

/// The state of a session.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum StatusFilter {
    /// In use.
    Active,
    /// Does not accept messages.
    Paused,
    /// Idle for too long.
    Expired,
    /// Deleted, and not yet purged.
    Deleted,
}

impl SessionsCommand {
    /// Executes the command.
    pub async fn run(self, target: &TargetArgs, json: bool) -> anyhow::Result<ExitCode> {
        let needs = match self {
            Self::Import(_) => Needs::Store,
            Self::Compact { .. } => Needs::Models,
            _ => Needs::Sessions,
        };
        let client = target.client(needs).await?;
        match self {
            Self::List(args) => list(&client, &args, json).await?,
            Self::Show { id, last } => show(&client, &id, last, json).await?,
            Self::Export(args) => return transfer::export(&client, &args).await,
            Self::Import(args) => return transfer::import(&client, &args, json).await,
            Self::Fork { id, at, new } => fork(&client, &id, at.as_deref(), new, json).await?,
            Self::Rewind { id, position, workspace } => {
                let mut body = parse_position(&position)?;
                if workspace {
                    body["workspace"] = true.into();
                }
                rewind(&client, &id, &body, json).await?
            }
            Self::Compact { id, keep, model } => compact(&client, &id, keep, model, json).await?,
            Self::Uncompact { id } => uncompact(&client, &id, json).await?,
            Self::Delete { ids, purge, yes } => delete(&client, &ids, purge, yes, json).await?,
            Self::Restore { ids } => restore(&client, &ids, json).await?,
            Self::Search(args) => search::run(&client, &args, json).await?,
            Self::Undo { id, turns } => changes::undo(&client, &id, turns, json).await?,
            Self::Title { id, text, clear } => {
                let change = if clear { TitleChange::Clear } else { TitleChange::from_words(&text) };
                changes::title(&client, &id, change, json).await?;
            }
            Self::Tag { id, tags, remove } => changes::tag(&client, &id, &tags, &remove, json).await?,
            Self::Pause { ids } => changes::set_status(&client, &ids, "paused", json).await?,
            Self::Resume { ids } => changes::set_status(&client, &ids, "active", json).await?,
            Self::Audit { id } => return audit::session(&client, &id, json).await,
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn list(client: &ApiClient, args: &ListSessions, json: bool) -> anyhow::Result<()> {
    let status = args.status.and_then(|s| s.to_possible_value()).map(|s| s.get_name().to_owned());
    let mut query: Vec<(String, String)> = [
        ("status", &status),
        ("assistant_id", &args.assistant),
        ("thread_id", &args.thread),
        ("title", &args.title),
        ("created_after", &args.created_after),
        ("created_before", &args.created_before),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name.to_owned(), value.clone()?)))
    .collect();
    query.extend(args.tag.iter().map(|t| ("tag".to_owned(), t.clone())));
    for pair in &args.metadata {
        let (key, value) = pair.split_once('=').context("--metadata takes KEY=VALUE")?;
        query.push((format!("metadata.{key}"), value.to_owned()));
    }
    query.push(("include".to_owned(), "display_title".to_owned()));
    let query: Vec<(&str, &str)> = query.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    let limit = if args.all { usize::MAX } else { args.limit };
    let (sessions, next) = PageStream::new(client, "/sessions", &query, limit).all().await?;
    if json {
        return Ok(line(json!({"object": "list", "data": sessions, "next_cursor": next}).to_string())?);
    }
    print(sessions_table(&sessions, args.long))?;
    if next.is_some() {
        note(format!("there are more: --limit {} or --all", args.limit.saturating_mul(2).max(1)));
    }
    Ok(())
}

/// The title of a session, or the first words of its first question if it has none.
fn display_title(session: &Value) -> &str {
    session["display_title"].as_str().unwrap_or_else(|| field(session, "title"))
}

/// Renders sessions as a table. The column of users is shown unless all sessions belong to `default`.
pub fn sessions_table(sessions: &[Value], long: bool) -> String {
    let now = crate::clock::now();
    let id = |s: &Value| if long { field(s, "id").to_owned() } else { short(field(s, "id")).to_owned() };
    let cells = |s: &Value| {
        let count = s["message_count"].to_string();
        [id(s), age(&s["active_at"], now), brief(display_title(s), 48), count, field(s, "status").to_owned()]
    };
    if sessions.iter().all(|s| field(s, "user") == "default") {
        return output::table(["id", "age", "title", "messages", "status"], sessions.iter().map(cells).collect());
    }
    let cells = |s: &Value| {
        let [id, age, title, count, status] = cells(s);
        [id, age, brief(field(s, "user"), 24), title, count, status]
    };
    output::table(["id", "age", "user", "title", "messages", "status"], sessions.iter().map(cells).collect())
}

async fn show(client: &ApiClient, id_part: &str, last: Option<usize>, json: bool) -> anyhow::Result<()> {
    let id = client.resolve(id_part).await?;
    let answer = client.send(Method::GET, &session_path(&id, ""), None).await?;
    if json && last.is_none() {
        return Ok(line(answer.text().await?)?);
    }
    let mut session: Value = answer.json().await?;
    if let (Some(last), Some(messages)) = (last, session["messages"].as_array_mut()) {
        messages.drain(..messages.len().saturating_sub(last));
    }
    if json {
        return Ok(line(session.to_string())?);
    }
    let now = crate::clock::now();
    let mut text = String::new();
    let mut row = |name: &str, value: String| {
        if !value.is_empty() {
            text.push_str(&format!("{name:<11}{}\n", clean(&value)));
        }
    };
    row("session", id.to_string());
    row("title", display_title(&session).to_owned());
    for name in ["status", "user", "assistant_id", "thread_id", "model"] {
        row(name.trim_end_matches("_id"), field(&session, name).to_owned());
    }
    let tags: Vec<&str> = session["tags"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    row("tags", tags.join(", "));
    if session["metadata"].as_object().is_some_and(|m| !m.is_empty()) {
        row("metadata", session["metadata"].to_string());
    }
    if let Some(parent) = session["parent"]["session_id"].as_str() {
        row("fork of", format!("{parent}, after message {}", session["parent"]["position"]));
    }
    for (name, key) in [("created", "created_at"), ("active", "active_at")] {
        row(name, format!("{} ({} ago)", field(&session, key), age(&session[key], now)));
    }
    row("messages", format!("{} in {}", session["message_count"], output::count(&session["turn_count"], "turn")));
    if let Some(summary) = session["summary"]["text"].as_str() {
        row("summary", format!("of the first {}: {}", session["summary"]["position"], brief(summary, 200)));
    }
    for message in session["messages"].as_array().into_iter().flatten() {
        text.push('\n');
        text.push_str(&output::format_message(message));
    }
    let checkpoints = session["checkpoints"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !checkpoints.is_empty() {
        text.push('\n');
        text.push_str(&checkpoints_table(checkpoints));
    }
    Ok(print(text)?)
}

/// Renders checkpoints as a table.
pub fn checkpoints_table(checkpoints: &[Value]) -> String {
    let now = crate::clock::now();
    let origin = |c: &Value| if c["auto"] == true { "by itself".to_owned() } else { "by hand".to_owned() };
    let row = |c: &Value| [clean(field(c, "label")), c["position"].to_string(), age(&c["created_at"], now), origin(c)];
    output::table(["checkpoint", "after message", "age", "made"], checkpoints.iter().map(row).collect())
}

/// Parses a position as written on the command line: a number of messages, `turn:N`, or a checkpoint's label.
pub fn parse_position(text: &str) -> anyhow::Result<Value> {
    let number = |n: &str| n.parse::<u64>().with_context(|| format!("{n:?} is not a number"));
    Ok(match text.split_once(':') {
        Some(("turn", n)) => json!({"turn": number(n)?}),
        Some(("position" | "message", n)) => json!({"position": number(n)?}),
        Some(("label", label)) => json!({"label": label}),
        _ => match text.parse::<u64>() {
            Ok(n) => json!({"position": n}),
            Err(_) => json!({"label": text}),
        },
    })
}

async fn fork(
    client: &ApiClient,
    id_part: &str,
    position: Option<&str>,
    new: Option<String>,
    json: bool,
) -> anyhow::Result<()> {
    let id = client.resolve(id_part).await?;
    let forked = fork_at(client, id.as_str(), position, new).await?;
    if json {
        line(forked.to_string())?;
    } else {
        line(format!(
            "{} begins like {id}: {}",
            field(&forked, "id"),
            output::count(&forked["message_count"], "message")
        ))?;
    }
    Ok(())
}

/// Forks a session and returns the new one.
pub async fn fork_at(
    client: &ApiClient,
    id: &str,
    position: Option<&str>,
    new: Option<String>,
) -> anyhow::Result<Value> {
    let mut body = position.map_or_else(|| Ok(json!({})), parse_position)?;
    if let Some(new) = new {
        body["id"] = json!(new);
    }
    client.post(&session_path(id, "/fork"), &body).await?.json().await
}

async fn rewind(client: &ApiClient, id_part: &str, body: &Value, json: bool) -> anyhow::Result<()> {
    let id = client.resolve(id_part).await?;
    let rewound: Value = client.post(&session_path(&id, "/rewind"), body).await?.json().await?;
    if json {
        line(rewound.to_string())?;
    } else {
        line(rewound_text(id.as_str(), &rewound))?;
    }
    Ok(())
}

async fn compact(
    client: &ApiClient,
    id_part: &str,
    keep_turns: Option<usize>,
    model: Option<String>,
    json: bool,
) -> anyhow::Result<()> {
    let id = client.resolve(id_part).await?;
    let body = json!({"keep_turns": keep_turns, "model": model});
    let compacted: Value = client.post(&session_path(&id, "/compact"), &body).await?.json().await?;
    if json {
        line(compacted.to_string())?;
    } else {
        line(compacted_text(&compacted))?;
    }
    Ok(())
}

/// Describes the outcome of a compaction.
pub fn compacted_text(compacted: &Value) -> String {
    let id = field(compacted, "session_id");
    match (compacted["compacted"].as_u64(), compacted["summary"]["text"].as_str()) {
        (Some(1..), Some(text)) => {
            let covered = output::count(&compacted["summary"]["position"], "message");
            format!("models are shown a summary of the first {covered} of {id}:\n{}", clean(text))
        }
        _ => format!("{id} has no turns to summarize"),
    }
}

async fn uncompact(client: &ApiClient, id_part: &str, json: bool) -> anyhow::Result<()> {
    let id = client.resolve(id_part).await?;
    let session: Value = client.post(&session_path(&id, "/uncompact"), &json!({})).await?.json().await?;
    if json {
        line(session.to_string())?;
    } else {
        line(format!("the summary of {id} is removed; models see its messages again"))?;
    }
    Ok(())
}

async fn delete(client: &ApiClient, id_parts: &[String], purge: bool, yes: bool, json: bool) -> anyhow::Result<()> {
    let mut ids = Vec::new();
    for id in id_parts {
        ids.push(client.resolve(id).await?);
    }
    if purge && !yes {
        let names: Vec<&str> = ids.iter().map(|id| id.as_str()).collect();
        let confirmed = || super::terminal::confirm(&format!("destroy {} for good?", names.join(", ")));
        if !(std::io::stdin().is_terminal() && confirmed()?) {
            bail!("nothing was purged; --purge cannot be undone: confirm with --yes");
        }
    }
    let mut results = Vec::new();
    for id in ids {
        let path = if purge { session_path(&id, "?purge=true") } else { session_path(&id, "") };
        let text = client.send(Method::DELETE, &path, None).await?.text().await?;
        if json {
            results.push(serde_json::from_str(&text).unwrap_or_else(|_| json!({"id": id, "deleted": true})));
            continue;
        }
        if purge {
            line(format!("{id} is purged"))?;
        } else {
            line(format!("{id} is deleted; `tenure sessions restore {}` restores it", shell_word(id.as_str())))?;
        }
    }
    if json {
        line(json!({"object": "list", "data": Value::Array(results)}).to_string())?;
    }
    Ok(())
}

async fn restore(client: &ApiClient, id_parts: &[String], json: bool) -> anyhow::Result<()> {
    let mut results = Vec::new();
    for id in id_parts {
        let id = client.resolve(id).await?;
        let session: Value = client.post(&session_path(&id, "/restore"), &json!({})).await?.json().await?;
        if json {
            results.push(session);
        } else {
            line(format!("{id} is {}", field(&session, "status")))?;
        }
    }
    if json {
        line(json!({"object": "list", "data": results}).to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_in_the_accepted_notations() {
        let cases =
            [("3", json!({"position": 3})), ("turn:2", json!({"turn": 2})), ("turn-2", json!({"label": "turn-2"}))];
        for (text, want) in cases {
            assert_eq!(parse_position(text).unwrap(), want);
        }
        assert_eq!(parse_position("label:3").unwrap(), json!({"label": "3"}));
        assert!(parse_position("turn:x").is_err());
    }
}
