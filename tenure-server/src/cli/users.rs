//! `tenure users`: erases all data of a user.

use super::client::with_segment;
use super::output::{count, field, line};
use super::target::{Needs, TargetArgs};
use anyhow::bail;
use axum::http::Method;
use clap::Subcommand;
use serde_json::Value;
use std::io::IsTerminal;
use tenure::User;

/// Commands for users.
#[derive(Debug, Subcommand)]
pub enum UsersCommand {
    /// Erase all data of a user: sessions, memories and transcripts; cannot be undone
    Erase {
        /// The user
        #[arg(value_name = "USER")]
        name: String,
        /// Do not ask for confirmation
        #[arg(long, short)]
        yes: bool,
    },
}

impl UsersCommand {
    /// Executes the command. `--user` does not apply: the argument names the user.
    pub async fn run(self, target: &TargetArgs, json: bool) -> anyhow::Result<()> {
        let Self::Erase { name, yes } = self;
        let user = User::new(name)?;
        if target.user.is_some() {
            bail!("name the user once: `tenure users erase {user}`, without --user");
        }
        let client = target.client(Needs::Sessions).await?;
        if !yes {
            let question = format!("erase all sessions, memories and transcripts of {user} for good?");
            if !(std::io::stdin().is_terminal() && super::terminal::confirm(&question)?) {
                bail!("nothing was erased; it cannot be undone: confirm with --yes");
            }
        }
        let path = with_segment("/users", user.as_str())?;
        let text = client.send(Method::DELETE, &path, None).await?.text().await?;
        if json {
            return Ok(line(text)?);
        }
        let receipt: Value = serde_json::from_str(&text)?;
        let purged = count(&receipt["sessions"], "session");
        Ok(line(format!("all data of {user} is erased: {purged}, at {}", field(&receipt, "at")))?)
    }
}
