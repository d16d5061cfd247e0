//! `tenure assistants`: lists and shows assistants.

use super::client::{ApiClient, with_segment};
use super::output::{self, brief, clean, field, line, print};
use super::target::{Needs, TargetArgs};
use axum::http::Method;
use clap::Subcommand;
use serde_json::Value;

/// Commands for assistants.
#[derive(Debug, Subcommand)]
pub enum AssistantsCommand {
    /// List the assistants, by name
    List,
    /// Show the settings of an assistant
    Show {
        /// The assistant
        name: String,
    },
}

impl AssistantsCommand {
    /// Executes the command.
    pub async fn run(self, target: &TargetArgs, json: bool) -> anyhow::Result<()> {
        let client = target.client(Needs::Declarations).await?;
        match self {
            Self::List => list(&client, json).await,
            Self::Show { name } => show(&client, &name, json).await,
        }
    }
}

async fn list(client: &ApiClient, json: bool) -> anyhow::Result<()> {
    let text = client.send(Method::GET, "/assistants", None).await?.text().await?;
    if json {
        return Ok(line(text)?);
    }
    let list: Value = serde_json::from_str(&text)?;
    let row = |a: &Value| {
        let origin = if a["declared"] == true { "configuration" } else { "API" };
        let model = brief(field(a, "model"), 32);
        [brief(field(a, "name"), 48), model, origin.to_owned(), brief(field(a, "instructions"), 60)]
    };
    let rows = list["data"].as_array().into_iter().flatten().map(row).collect();
    Ok(print(output::table(["name", "model", "from", "instructions"], rows))?)
}

async fn show(client: &ApiClient, name: &str, json: bool) -> anyhow::Result<()> {
    let text = client.send(Method::GET, &with_segment("/assistants", name)?, None).await?.text().await?;
    if json {
        return Ok(line(text)?);
    }
    let assistant: Value = serde_json::from_str(&text)?;
    let mut text = String::new();
    for (name, value) in assistant.as_object().into_iter().flatten() {
        let value = match value {
            Value::Null => continue,
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        if !["id", "object"].contains(&name.as_str()) {
            text.push_str(&format!("{name:<13}{}\n", clean(&value)));
        }
    }
    Ok(print(text)?)
}
