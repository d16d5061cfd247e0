//! The target of a command: a store that this process opens, or a running server.

use super::client::ApiClient;
use crate::app::{App, AppState};
use crate::auth::SYSTEM_TENANT;
use crate::config::{self, Config, OnExpire};
use crate::embed::EmbeddingSource;
use anyhow::{anyhow, bail};
use clap::Args;
use std::path::{Path, PathBuf};
use tenure::{Tenant, Tenure, User};

/// The heading of the options that all commands have.
const GLOBAL: &str = "Global options";

/// The store or server to use, and the user to act as.
#[derive(Clone, Debug, Args)]
pub struct TargetArgs {
    /// The configuration file (default: tenure.yaml, if there is one)
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The store: memory: | jsonl:DIR | sqlite:FILE | postgres://…
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "URL", conflicts_with = "server")]
    pub store: Option<String>,
    /// A running server to connect to, instead of opening the store; HOST:PORT is enough [env: TENURE_SERVER]
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "URL")]
    pub server: Option<String>,
    /// The key for that server [env: TENURE_KEY]
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "KEY")]
    pub key: Option<String>,
    /// Act as this user (default: sessions of all users)
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "NAME", value_parser = user)]
    pub user: Option<User>,
    /// The tenant in the store (default: default; with a server, determined by the key)
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "NAME", value_parser = tenant)]
    pub tenant: Option<Tenant>,
}

fn user(name: &str) -> Result<User, tenure::session::InvalidName> {
    User::new(name)
}

fn tenant(name: &str) -> Result<Tenant, String> {
    if name == SYSTEM_TENANT {
        Err(format!("{SYSTEM_TENANT} is not for anybody; choose another name"))
    } else {
        Tenant::new(name).map_err(|e| e.to_string())
    }
}

/// The resources a command needs from the store or server it opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// An existing store.
    Sessions,
    /// A store, which is created if it does not exist.
    Store,
    /// An existing store, and the assistants and schedules as they are declared.
    Declarations,
    /// A store, which is created if it does not exist, and the configured models.
    Models,
    /// An existing store, and the webhooks that are called before sessions are removed.
    Hooks,
    /// An existing store, for a command that computes embeddings.
    Vectors,
}

impl TargetArgs {
    /// Loads the configuration, with flags applied.
    pub fn load(&self, overrides: &[(&'static str, Option<String>)]) -> anyhow::Result<Config> {
        let flags = [("store", self.store.clone())].into_iter().chain(overrides.iter().cloned());
        let flags: Vec<(&str, String)> = flags.filter_map(|(key, value)| Some((key, value?))).collect();
        Config::load(self.config.as_deref(), &flags)
    }

    /// Creates a client of the named server, or of the store if no server is named.
    pub async fn client(&self, needs: Needs) -> anyhow::Result<ApiClient> {
        let (server, key) = config::remote_from_environment();
        let server = self.server.clone().or(server.filter(|_| self.store.is_none()));
        let user = self.user.clone();
        let Some(server) = server else {
            let app = self.open(needs).await?;
            let tenant = self.tenant.clone().unwrap_or_default();
            return Ok(ApiClient::local(app, tenant, user));
        };
        if self.tenant.is_some() {
            bail!("--tenant applies to stores only; with a server, the key determines the tenant");
        }
        ApiClient::remote(&server, self.key.clone().or(key), user)
    }

    /// Opens the store itself, for operations that only an operator with direct access may do. Refused with
    /// `--server`.
    pub async fn open_store(&self, needs: Needs) -> anyhow::Result<AppState> {
        if self.server.is_some() {
            bail!("this command needs direct access to the store: run it with --store URL instead of --server");
        }
        self.open(needs).await
    }

    async fn open(&self, needs: Needs) -> anyhow::Result<AppState> {
        let mut config = self.load(&[])?;
        if [Needs::Sessions, Needs::Declarations, Needs::Hooks, Needs::Vectors].contains(&needs) {
            must_exist(&config.store)?;
        }
        // Settings that the command does not need are dropped, so that a missing secret of a model server or
        // webhook is no error.
        if needs != Needs::Models {
            config.models = Vec::new();
            if needs != Needs::Declarations {
                config.assistants = without_models(config.assistants);
            }
        }
        if needs != Needs::Hooks {
            config.on_expire = OnExpire::default();
        }
        let listen = config.listen.clone();
        let mut options = config.options();
        if [Needs::Models, Needs::Vectors].contains(&needs) {
            options.embedder = EmbeddingSource::open(&config.embeddings).await?.embedder();
        }
        let tenure = Tenure::open_with(&config.store, options).await;
        let tenure = tenure.map_err(|e| match e {
            tenure::Error::Locked { .. } => {
                anyhow!("{e}; if a server has it open, connect to it with --server http://{listen}")
            }
            e => e.into(),
        })?;
        let app = App::with_tenure(tenure, config)?;
        if needs == Needs::Hooks {
            app.transcripts.check()?;
        }
        Ok(app)
    }
}

fn without_models(mut assistants: Vec<tenure::Assistant>) -> Vec<tenure::Assistant> {
    assistants.iter_mut().for_each(|a| a.model = None);
    assistants
}

/// Fails if a file store does not exist, so that a mistyped name does not become an empty store.
fn must_exist(store: &str) -> anyhow::Result<()> {
    match store.split_once(':') {
        Some(("sqlite" | "jsonl", path)) if !path.is_empty() && !Path::new(path).exists() => bail!(
            "the store {store} does not exist; `tenure serve`, `tenure chat` and `tenure sessions import` create one; use --store for another store, or --server for a running server"
        ),
        _ => Ok(()),
    }
}
