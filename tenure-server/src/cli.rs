//! The command line: argument parsing and dispatch. Commands use the HTTP routes, in process or over the network
//! (D-098).

mod assistants;
mod audit;
mod backup;
mod changes;
mod chat;
mod check;
mod client;
mod doctor;
mod healthcheck;
mod keys;
mod maintenance;
mod memories;
mod models;
mod output;
mod reviews;
mod runs;
mod schedules;
mod search;
mod sessions;
mod target;
mod terminal;
mod transfer;
mod users;

use crate::config::{BUILT_IN_MODEL, Config};
use crate::serve;
use crate::signals;
use anyhow::bail;
use clap::{CommandFactory, Parser, Subcommand};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use target::TargetArgs;
use tenure::store::redacted;

/// The example configuration, which shows every setting with its default.
const EXAMPLE: &str = include_str!("../../tenure.example.yaml");

/// Durable sessions for LLM agents.
#[derive(Debug, Parser)]
#[command(name = "tenure", version, about)]
pub struct Cli {
    #[command(flatten)]
    target: TargetArgs,
    /// The command (default: serve)
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
    /// List, show, change, export and import sessions
    Sessions {
        /// JSON, for programs
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: sessions::SessionsCommand,
    },
    /// List, show and cancel the runs of a session
    Runs {
        /// JSON, for programs
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: runs::RunsCommand,
    },
    /// List reviews that wait for a decision, and decide them
    Reviews {
        /// JSON, for programs
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: reviews::ReviewsCommand,
    },
    /// List and show assistants
    Assistants {
        /// JSON, for programs
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: assistants::AssistantsCommand,
    },
    /// List scheduled runs and when they are due
    Schedules {
        /// JSON, for programs
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: schedules::SchedulesCommand,
    },
    /// Show the decisions of people and verify their hash chain
    Audit(audit::AuditArgs),
    /// List, search, add and remove memories
    Memories {
        /// JSON, for programs
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: memories::MemoriesCommand,
    },
    /// Promote memories that sessions recalled often to their users, once (a running server does this if `dreams.every` is set)
    Dream(memories::DreamArgs),
    /// Chat in a session
    Chat(chat::ChatArgs),
    /// Expire and purge due sessions, once (a running server does this periodically)
    Sweep {
        /// JSON, for programs
        #[arg(long)]
        json: bool,
    },
    /// Create, list, rotate and revoke API keys
    Keys {
        /// JSON, for programs
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: keys::KeysCommand,
    },
    /// Erase all data of a user
    Users {
        /// JSON, for programs
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: users::UsersCommand,
    },
    /// Download and list the local embedding model
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
        /// Try it: connect to the store, the models and the tools; exit code 1 if anything fails
        #[arg(long, conflicts_with = "example")]
        check: bool,
        /// JSON, for programs
        #[arg(long, requires = "check")]
        json: bool,
    },
    /// Check the store: gaps, corruption, missing media, forks without their parent
    Doctor {
        /// Repair what can be repaired safely
        #[arg(long)]
        repair: bool,
        /// JSON, for programs
        #[arg(long)]
        json: bool,
    },
    /// Write everything that the store holds to a file, while servers use it
    Backup(backup::BackupArgs),
    /// Restore a backup into a new store, of any kind
    Restore(backup::RestoreArgs),
    /// Ask a running server whether it is ready, for containers and scripts
    Healthcheck(healthcheck::HealthcheckArgs),
    /// Migrate the store to the newest format (opening it does the same)
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
        let target = self.target;
        match self.command.unwrap_or(Command::Serve { listen: None }) {
            Command::Serve { listen } => {
                if target.server.is_some() {
                    bail!("`tenure serve` starts a server; omit --server, or use another command");
                }
                let file = Config::file(target.config.as_deref());
                serve(file, move || target.load(&[("listen", listen.clone())])).await?;
            }
            Command::Sessions { command, json } => return command.run(&target, json).await,
            Command::Runs { command, json } => return command.run(&target, json).await,
            Command::Reviews { command, json } => return command.run(&target, json).await,
            Command::Assistants { command, json } => command.run(&target, json).await?,
            Command::Schedules { command, json } => command.run(&target, json).await?,
            Command::Users { command, json } => command.run(&target, json).await?,
            Command::Audit(audit) => return audit.run(&target).await,
            Command::Memories { command, json } => return command.run(&target, json).await,
            Command::Dream(dream) => return dream.run(&target).await,
            Command::Chat(chat) => chat.run(&target).await?,
            Command::Sweep { json } => return maintenance::sweep(&target, json).await,
            Command::Keys { command, json } => command.run(&target, json).await?,
            Command::Models { command, json } => command.run(&target, json).await?,
            Command::Config { check: true, json, .. } => return check::run(&target, json).await,
            Command::Config { example: true, .. } => output::print(EXAMPLE)?,
            Command::Config { .. } => output::print(target.load(&[])?.to_redacted_yaml()?)?,
            Command::Doctor { repair, json } => return doctor::run(&target, repair, json).await,
            Command::Backup(args) => args.run(&target).await?,
            Command::Restore(args) => args.run(&target).await?,
            Command::Healthcheck(args) => args.run(&target).await?,
            Command::Migrate { json } => maintenance::migrate(&target, json).await?,
            Command::Completions { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Self::command(), "tenure", &mut script);
                output::print(String::from_utf8_lossy(&script))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn serve(file: Option<PathBuf>, load: impl Fn() -> anyhow::Result<Config>) -> anyhow::Result<()> {
    let hangups = signals::hangups()?;
    let config = load()?;
    let (_traces, log) = crate::observability::telemetry::install(&config.telemetry)?;
    let reload = signals::reload(hangups, config.clone(), log, load);
    crate::observability::metrics::install();
    let app = crate::startup::open(config).await?;
    let listener = serve::bind(&app).await?;
    let address = listener.local_addr()?;
    let stop = signals::shutdown_signal();
    let first = signals::shutdown_signal();
    println!("listening on http://{address}");
    println!("{}", summary(&app.config, file.as_deref(), app.keys.read_required().await?));
    println!("try:  curl http://{address}/v1/chat/completions -H 'Content-Type: application/json' \\");
    println!(
        "        -d '{{\"session_id\": \"hello\", \"messages\": [{{\"role\": \"user\", \"content\": \"Hello!\"}}]}}'"
    );
    println!("all routes: http://{address}/docs");
    let second_interrupt = async {
        first.await;
        signals::shutdown_signal().await;
    };
    tokio::select! {
        result = serve::run(app, listener, stop) => result,
        () = second_interrupt => anyhow::bail!("stopped immediately; all acknowledged writes are durable"),
        () = reload => anyhow::bail!("the signal handler ended unexpectedly"),
    }
}

/// Describes what the server uses, in one line without secrets.
fn summary(config: &Config, file: Option<&Path>, keys_required: bool) -> String {
    let store = redacted(&config.store);
    let file = file.map_or_else(|| "no configuration file".to_owned(), |f| format!("configuration {}", f.display()));
    let models: Vec<&str> = config.models.iter().map(|m| m.name.as_str()).collect();
    let models = if models.is_empty() { format!("{BUILT_IN_MODEL} (built-in)") } else { models.join(", ") };
    let keys = if keys_required { "keys are required" } else { "keys are not required" };
    format!("store {store}; {file}; models: {models}; {keys}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_shows_no_secrets() {
        let yaml = "store: postgres://me:hush@db/x\nmodels: [{name: a, base_url: 'http://u:hush@x/v1', api_key: hush}]";
        let line = summary(&Config::parse(yaml).unwrap(), Some(Path::new("a.yaml")), true);
        assert_eq!(line, "store postgres://me:***@db/x; configuration a.yaml; models: a; keys are required");
        let line = summary(&Config::default(), None, false);
        let want = "store sqlite:tenure.db; no configuration file; models: rehearsal (built-in); keys are not required";
        assert_eq!(line, want);
    }

    #[test]
    fn the_commands_are_sound() {
        Cli::command().debug_assert();
    }
}
