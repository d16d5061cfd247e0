//! `tenure audit`: shows or exports the audit trail of review decisions and verifies its hash chain.

use super::client::{ApiClient, session_path, with_query};
use super::output::{self, age, brief, clean, field, line, note, print};
use super::target::{Needs, TargetArgs};
use axum::http::Method;
use clap::{Args, ValueEnum};
use futures_util::StreamExt;
use serde_json::Value;
use std::io::Write;
use std::process::ExitCode;

/// Which decisions to show.
#[derive(Debug, Args)]
pub struct AuditArgs {
    /// The session; without one, the decisions of all sessions of the tenant are exported
    session: Option<String>,
    /// Made at or after this time, as 2026-01-31 (midnight UTC) or 2026-01-31T12:00:00Z
    #[arg(long, value_name = "TIME", conflicts_with = "session")]
    from: Option<String>,
    /// Made before this time
    #[arg(long, value_name = "TIME", conflicts_with = "session")]
    to: Option<String>,
    /// The format of the export
    #[arg(long, value_enum, default_value_t = AuditFormat::Jsonl, conflicts_with = "session")]
    format: AuditFormat,
    /// JSON, for programs
    #[arg(long)]
    json: bool,
}

/// The form of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AuditFormat {
    /// One JSON object per line
    Jsonl,
    /// For spreadsheets
    Csv,
}

impl AuditArgs {
    /// Shows or exports the decisions. A broken hash chain is exit code 1.
    pub async fn run(self, target: &TargetArgs) -> anyhow::Result<ExitCode> {
        let client = target.client(Needs::Sessions).await?;
        let Some(session) = &self.session else {
            let format_name = self.format.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default();
            let mut query = vec![("format", format_name)];
            query.extend(self.from.clone().map(|t| ("from", t)));
            query.extend(self.to.clone().map(|t| ("to", t)));
            let mut answer = client.send(Method::GET, &with_query("/audit", &query)?, None).await?;
            let mut out = std::io::stdout().lock();
            while let Some(bytes) = answer.body.next().await {
                out.write_all(&bytes?)?;
            }
            out.flush()?;
            return Ok(ExitCode::SUCCESS);
        };
        self::session(&client, session, self.json).await
    }
}

/// Shows the decisions in one session. A broken hash chain is exit code 1.
pub async fn session(client: &ApiClient, id_part: &str, json: bool) -> anyhow::Result<ExitCode> {
    let id = client.resolve(id_part).await?;
    let text = client.send(Method::GET, &session_path(&id, "/audit"), None).await?.text().await?;
    let trail: Value = serde_json::from_str(&text)?;
    let verified = trail["verified"] == true;
    if json {
        line(text)?;
    } else {
        print(decisions_table(trail["decisions"].as_array().map_or(&[], |d| d)))?;
        if !verified {
            let broken = &trail["broken"];
            note(clean(&format!("the hash chain is broken at record {}: {}", broken["seq"], field(broken, "why"))));
        }
    }
    Ok(if verified { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn decisions_table(decisions: &[Value]) -> String {
    let now = crate::clock::now();
    let row = |d: &Value| {
        let hash: String = field(d, "hash").chars().take(12).collect();
        [
            d["seq"].to_string(),
            age(&d["timestamp"], now),
            brief(field(d, "step"), 32),
            field(d, "decision").to_owned(),
            brief(field(d, "reviewer"), 24),
            brief(field(d, "notes"), 40),
            hash,
        ]
    };
    output::table(
        ["record", "age", "step", "decision", "reviewer", "notes", "hash"],
        decisions.iter().map(row).collect(),
    )
}
