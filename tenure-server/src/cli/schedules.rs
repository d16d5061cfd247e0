//! `tenure schedules`: lists the scheduled runs and when they are due.

use super::client::{ApiClient, with_query};
use super::output::{self, age, brief, clean, field, line, print};
use super::target::{Needs, TargetArgs};
use axum::http::Method;
use clap::Subcommand;
use serde_json::Value;

/// Commands for schedules.
#[derive(Debug, Subcommand)]
pub enum SchedulesCommand {
    /// List the schedules with their next and last runs
    List {
        /// Also list the next N times of each
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=100))]
        next: Option<u8>,
    },
}

impl SchedulesCommand {
    /// Executes the command.
    pub async fn run(self, target: &TargetArgs, json: bool) -> anyhow::Result<()> {
        let client = target.client(Needs::Declarations).await?;
        let Self::List { next } = self;
        list(&client, next, json).await
    }
}

async fn list(client: &ApiClient, next: Option<u8>, json: bool) -> anyhow::Result<()> {
    let query: Vec<(&str, String)> = next.map(|n| ("next", n.to_string())).into_iter().collect();
    let text = client.send(Method::GET, &with_query("/schedules", &query)?, None).await?.text().await?;
    if json {
        return Ok(line(text)?);
    }
    let list: Value = serde_json::from_str(&text)?;
    let schedules = list["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    let now = crate::clock::now();
    let row = |s: &Value| {
        let last = if s["last_at"].is_null() { "never".to_owned() } else { age(&s["last_at"], now) };
        let missed = s["missed"].as_array().map_or(0, Vec::len).to_string();
        [
            brief(field(s, "name"), 32),
            brief(field(s, "cron"), 24),
            brief(field(s, "timezone"), 24),
            brief(field(s, "assistant"), 32),
            field(s, "next_at").to_owned(),
            last,
            s["count"].to_string(),
            missed,
        ]
    };
    let header = ["name", "cron", "time zone", "assistant", "next", "last", "runs", "missed"];
    print(output::table(header, schedules.iter().map(row).collect()))?;
    for schedule in schedules {
        for at in schedule["next_times"].as_array().into_iter().flatten() {
            line(clean(&format!("{} {}", at.as_str().unwrap_or_default(), field(schedule, "name"))))?;
        }
    }
    Ok(())
}
