//! What people type.

use crate::config::Config;
use crate::server::{self, App};
use clap::{Parser, Subcommand};
use std::path::PathBuf;

/// Sessions that last, for LLM agents.
#[derive(Debug, Parser)]
#[command(name = "tenure", version, about)]
pub struct Cli {
    /// The configuration file (default: tenure.yaml, if there is one)
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The store: memory: | jsonl:DIR | sqlite:FILE | postgres://…
    #[arg(long, global = true, value_name = "URL")]
    pub store: Option<String>,
    /// What to do; `serve` if nothing is said.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start the server
    Serve {
        /// The address to listen on
        #[arg(long, value_name = "ADDRESS")]
        listen: Option<String>,
    },
}

impl Cli {
    fn load(&self, more: &[(&'static str, Option<String>)]) -> anyhow::Result<Config> {
        let flags = [("store", self.store.clone())].into_iter().chain(more.iter().cloned());
        let flags: Vec<(&str, String)> = flags.filter_map(|(at, value)| Some((at, value?))).collect();
        Config::load(self.config.as_deref(), &flags)
    }

    /// Does what was asked.
    pub async fn run(self) -> anyhow::Result<()> {
        match &self.command {
            None => serve(self.load(&[])?).await,
            Some(Command::Serve { listen }) => serve(self.load(&[("listen", listen.clone())])?).await,
        }
    }
}

async fn serve(config: Config) -> anyhow::Result<()> {
    crate::telemetry::install(&config.telemetry)?;
    crate::metrics::install();
    let app = App::open(config).await?;
    let listener = server::bind(&app).await?;
    let address = listener.local_addr()?;
    println!("listening on http://{address}");
    println!("try:  curl http://{address}/v1/chat/completions -H 'Content-Type: application/json' \\");
    println!(
        "        -d '{{\"session_id\": \"hello\", \"messages\": [{{\"role\": \"user\", \"content\": \"Hello!\"}}]}}'"
    );
    println!("all routes: http://{address}/docs");
    server::run(app, listener, server::interrupted()).await
}
