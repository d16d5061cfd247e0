//! The command line: argument parsing and dispatch. Commands use the HTTP routes, in process or over the network
//! (D-098).

mod audit;
mod chat;
mod client;
mod doctor;
mod keys;
mod maintenance;
mod memories;
mod models;
mod output;
mod reviews;
mod runs;
mod search;
mod sessions;
mod target;
mod terminal;
mod transfer;

use crate::config::Config;
use crate::serve;
use crate::signals;
use anyhow::bail;
use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;
use target::TargetArgs;

/// The example configuration, which shows every setting with its default.
const EXAMPLE: &str = include_str!("../../tenure.example.yaml");

/// Sessions that last, for LLM agents.
#[derive(Debug, Parser)]
#[command(name = "tenure", version, about)]
pub struct Cli {
    #[command(flatten)]
    at: TargetArgs,
    /// What to do; `serve` if nothing is said.
    #[command(subcommand)]
    command: Option<Command>,
}

/// The commands.
#[derive(Debug, Subcommand)]
enum Command {
    /// Start the server
    Serve {
        /// The address to listen on
        #[arg(long, value_name = "ADDRESS")]
        listen: Option<String>,
    },
    /// Look at sessions, change them, move them
    Sessions {
        /// JSON, for programs
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: sessions::SessionsCommand,
    },
    /// Look at the work in a session, and stop it
    Runs {
        /// JSON, for programs
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: runs::RunsCommand,
    },
    /// Look at what waits for a person, and decide it
    Reviews {
        /// JSON, for programs
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: reviews::ReviewsCommand,
    },
    /// Show the decisions of people and verify their hash chain
    Audit(audit::AuditArgs),
    /// Look at what is remembered, add to it, take from it
    Memories {
        /// JSON, for programs
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: memories::MemoriesCommand,
    },
    /// Promote what sessions recalled often to their users, once (a running server does it by itself, if it is told to)
    Dream(memories::DreamArgs),
    /// Talk in a session
    Chat(chat::ChatArgs),
    /// Expire and purge what is due, once (a running server does it by itself)
    Sweep {
        /// JSON, for programs
        #[arg(long)]
        json: bool,
    },
    /// Make, list and revoke the keys that a server asks for
    Keys {
        /// JSON, for programs
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: keys::KeysCommand,
    },
    /// Get the model that makes vectors in this process, and see what is there
    Models {
        /// JSON, for programs
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: models::ModelsCommand,
    },
    /// Print the configuration in force, with secrets hidden
    Config {
        /// Print everything that can be set, with its default
        #[arg(long)]
        example: bool,
    },
    /// Check the store: holes, damage, missing media, forks without their parent
    Doctor {
        /// Mend what is safe to mend
        #[arg(long)]
        repair: bool,
        /// JSON, for programs
        #[arg(long)]
        json: bool,
    },
    /// Bring the store to the newest format (opening it does the same)
    Migrate {
        /// JSON, for programs
        #[arg(long)]
        json: bool,
    },
    /// Print a script that completes commands: `source <(tenure completions bash)`
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

impl Cli {
    /// Executes the command.
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        signals::ignore_file_size_limit();
        let at = self.at;
        match self.command.unwrap_or(Command::Serve { listen: None }) {
            Command::Serve { listen } => {
                if at.server.is_some() {
                    bail!("`tenure serve` is the server; leave --server out, or name a command");
                }
                serve(move || at.load(&[("listen", listen.clone())])).await?;
            }
            Command::Sessions { command, json } => return command.run(&at, json).await,
            Command::Runs { command, json } => return command.run(&at, json).await,
            Command::Reviews { command, json } => return command.run(&at, json).await,
            Command::Audit(audit) => return audit.run(&at).await,
            Command::Memories { command, json } => return command.run(&at, json).await,
            Command::Dream(dream) => return dream.run(&at).await,
            Command::Chat(chat) => chat.run(&at).await?,
            Command::Sweep { json } => return maintenance::sweep(&at, json).await,
            Command::Keys { command, json } => command.run(&at, json).await?,
            Command::Models { command, json } => command.run(&at, json).await?,
            Command::Config { example: true } => output::print(EXAMPLE)?,
            Command::Config { example: false } => output::print(at.load(&[])?.shown()?)?,
            Command::Doctor { repair, json } => return doctor::run(&at, repair, json).await,
            Command::Migrate { json } => maintenance::migrate(&at, json).await?,
            Command::Completions { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Self::command(), "tenure", &mut script);
                output::print(String::from_utf8_lossy(&script))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn serve(load: impl Fn() -> anyhow::Result<Config>) -> anyhow::Result<()> {
    let hangups = signals::hangups()?;
    let config = load()?;
    let (_traces, log) = crate::observability::telemetry::install(&config.telemetry)?;
    let reload = signals::reload(hangups, config.clone(), log, load);
    crate::observability::metrics::install();
    let app = crate::startup::open(config).await?;
    let listener = serve::bind(&app).await?;
    let address = listener.local_addr()?;
    let (stop, first) = (signals::interrupted(), signals::interrupted());
    println!("listening on http://{address}");
    println!("try:  curl http://{address}/v1/chat/completions -H 'Content-Type: application/json' \\");
    println!(
        "        -d '{{\"session_id\": \"hello\", \"messages\": [{{\"role\": \"user\", \"content\": \"Hello!\"}}]}}'"
    );
    println!("all routes: http://{address}/docs");
    let at_once = async {
        first.await;
        signals::interrupted().await;
    };
    tokio::select! {
        done = serve::run(app, listener, stop) => done,
        () = at_once => anyhow::bail!("stopped at once; what was acknowledged is safe"),
        () = reload => anyhow::bail!("the operating system delivers no signals any more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_sound() {
        Cli::command().debug_assert();
    }
}
