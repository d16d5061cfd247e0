//! The parts of the server that handlers and jobs share.

use crate::auth::rate_limit::RateLimits;
use crate::auth::{KeyStore, add_bootstrap_key};
use crate::config::Config;
use crate::config::schedules::{self, CompiledSchedule};
use crate::embed::EmbeddingSource;
use crate::llm::ModelRegistry;
use crate::net::body_budget::BodyBudget;
use crate::observability::metrics::SessionCounts;
use crate::tasks::Tasks;
use crate::tools::Toolbox;
use crate::transcripts::TranscriptWriter;
use crate::webhooks::{self, Webhook};
use crate::workspace::Workspaces;
use std::sync::Arc;
use tenure::{Tenure, Tools};

/// What every handler has in hand.
pub type AppState = Arc<App>;

/// The server's parts.
pub struct App {
    /// The sessions.
    pub tenure: Tenure,
    /// How it is set up.
    pub config: Config,
    /// Who may ask.
    pub keys: KeyStore,
    /// What keys have used of their limits this minute.
    pub rate_limits: Arc<RateLimits>,
    /// The models by name, in the order of the configuration.
    pub models: ModelRegistry,
    /// What makes vectors.
    pub embeddings: EmbeddingSource,
    /// What the models can have done.
    pub tools: Arc<Toolbox>,
    /// The workspaces of sessions, if they are kept.
    pub workspaces: Option<Arc<Workspaces>>,
    /// Work that outlives its request.
    pub tasks: Arc<Tasks>,
    /// What runs by the clock.
    pub schedules: Vec<CompiledSchedule>,
    /// Who is told when a run ends.
    pub run_hooks: Vec<Arc<Webhook>>,
    /// The files that sessions are written to as they go, or when they end.
    pub transcripts: TranscriptWriter,
    /// When sessions were last counted.
    pub census: SessionCounts,
    /// The memory that request bodies may use.
    pub bodies: Arc<BodyBudget>,
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("App")
    }
}

impl App {
    /// Opens the store and sets everything up.
    pub async fn open(config: Config) -> anyhow::Result<AppState> {
        let embeddings = EmbeddingSource::open(&config.embeddings).await?;
        let options = tenure::Options { embedder: embeddings.embedder(), ..config.options() };
        let tenure = Tenure::open_with(&config.store, options).await?;
        let app = Self::with(tenure, config, embeddings)?;
        app.transcripts.check()?;
        let file = &app.config.bootstrap_key_file;
        if !file.is_empty()
            && let Some(id) = add_bootstrap_key(&app.keys, file.as_ref()).await?
        {
            tracing::info!(key = id, "the key of bootstrap_key_file was added");
        }
        Ok(app)
    }

    /// The same on a house that is open already, and makes vectors or not by itself.
    pub fn on(tenure: Tenure, config: Config) -> anyhow::Result<AppState> {
        Self::with(tenure, config, EmbeddingSource::None)
    }

    fn with(tenure: Tenure, config: Config, embeddings: EmbeddingSource) -> anyhow::Result<AppState> {
        config.assistants.iter().cloned().for_each(|a| tenure.declare(a));
        let models = ModelRegistry::new(&config.models)?;
        let tools = Arc::new(Toolbox::new(&config)?);
        let keys = KeyStore::of(tenure.clone());
        let transcripts = TranscriptWriter::new(&config);
        transcripts.install(&tenure);
        let workspaces = Workspaces::new(&config.workspaces)?;
        if let Some(workspaces) = &workspaces {
            workspaces.clone().install(&tenure);
        }
        webhooks::install(&tenure, &config.on_expire)?;
        let interpreters = tools.clone();
        tenure.on_archive(move |old, _| {
            let tools = interpreters.clone();
            async move {
                tools.end(&old.key()).await;
                Ok(())
            }
        });
        let (tasks, census, rate_limits) = Default::default();
        let run_hooks = webhooks::run_hooks(&config.runs)?;
        let schedules = schedules::compile(&config.schedules, &config.assistants)?;
        Ok(Arc::new(Self {
            bodies: BodyBudget::new(&config.limits),
            tenure,
            config,
            keys,
            rate_limits,
            models,
            embeddings,
            tools,
            workspaces,
            schedules,
            run_hooks,
            transcripts,
            tasks,
            census,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_not_work_is_told_at_once() {
        let install = |yaml: &str| {
            Config::parse(yaml).and_then(|config| {
                let tenure = Tenure::on(Arc::new(tenure::store::MemoryStore::new()), config.options());
                App::on(tenure, config)
            })
        };
        for (yaml, want) in [
            ("on_expire: {webhooks: [{url: nowhere}]}", "on_expire.webhooks[0].url"),
            ("on_expire: {webhooks: [{url: 'ftp://x/'}]}", "http://"),
            ("on_expire: {webhooks: [{url: 'http://x/', timeout: never}]}", "timeout"),
            ("on_expire: {webhooks: [{url: 'http://x/', secret_env: NOT_SET_ANYWHERE}]}", "NOT_SET_ANYWHERE"),
            ("workspaces: {root: /dev/null/y}", "workspaces.root: can not use /dev/null/y"),
            ("workspaces: {rot: y}", "did you mean `root`"),
            ("cors: {origins: ['*']}", "cors.origins[0]"),
            ("cors: {origins: ['https://a.b/']}", "\"https://a.b\""),
            ("telemetry: {otlp: collector}", "telemetry.otlp"),
            ("limits: {max_connections: 0}", "max_connections"),
        ] {
            let error = format!("{:#}", install(yaml).unwrap_err());
            assert!(error.contains(want), "{yaml}: {error}");
        }
    }
}
