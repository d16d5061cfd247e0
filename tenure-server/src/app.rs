//! The application state shared by all handlers and jobs, and its construction from the configuration.

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
use tenure::Tenure;
use tokio::sync::Semaphore;

/// The shared application state, as handlers extract it.
pub type AppState = Arc<App>;

/// The components of a running server.
pub struct App {
    /// The session library on the configured store.
    pub tenure: Tenure,
    /// The configuration.
    pub config: Config,
    /// The API keys.
    pub keys: KeyStore,
    /// Rate limit counters per key, for the current minute (D-104).
    pub rate_limits: Arc<RateLimits>,
    /// The configured models by name, in the order of the configuration.
    pub models: ModelRegistry,
    /// The source of embeddings.
    pub embeddings: EmbeddingSource,
    /// The tools that models can call.
    pub tools: Arc<Toolbox>,
    /// The workspaces of sessions. `None` means that workspaces are disabled.
    pub workspaces: Option<Arc<Workspaces>>,
    /// Background tasks, which outlive the request that started them.
    pub tasks: Arc<Tasks>,
    /// The scheduled runs.
    pub schedules: Vec<CompiledSchedule>,
    /// Webhooks to notify when a run ends.
    pub run_hooks: Vec<Arc<Webhook>>,
    /// The transcript files, written as sessions progress or when they end.
    pub transcripts: TranscriptWriter,
    /// Limits how often sessions are counted for the metrics: holds the time of the last count.
    pub session_counts: SessionCounts,
    /// Held by the backup in progress: one at a time.
    pub backup_permit: Arc<Semaphore>,
    /// The memory budget for request bodies (D-108).
    pub body_budget: Arc<BodyBudget>,
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("App")
    }
}

impl App {
    /// Opens the store and builds the application. Also verifies the transcript directory, and adds the
    /// bootstrap key if one is configured (D-103).
    pub async fn open(config: Config) -> anyhow::Result<AppState> {
        let embeddings = EmbeddingSource::open(&config.embeddings).await?;
        let options = tenure::Options { embedder: embeddings.embedder(), ..config.options() };
        let tenure = Tenure::open_with(&config.store, options).await?;
        let app = Self::build(tenure, config, embeddings)?;
        app.transcripts.check()?;
        let file = &app.config.bootstrap_key_file;
        if !file.is_empty()
            && let Some(id) = add_bootstrap_key(&app.keys, file.as_ref()).await?
        {
            tracing::info!(key = id, "added the API key from bootstrap_key_file");
        }
        Ok(app)
    }

    /// Builds the application on a store that is already open. The server then provides no embeddings of its
    /// own; `tenure` may have an embedder.
    pub fn with_tenure(tenure: Tenure, config: Config) -> anyhow::Result<AppState> {
        Self::build(tenure, config, EmbeddingSource::None)
    }

    fn build(tenure: Tenure, config: Config, embeddings: EmbeddingSource) -> anyhow::Result<AppState> {
        config.assistants.iter().cloned().for_each(|a| tenure.declare(a));
        let models = ModelRegistry::new(&config.models)?;
        let tools = Arc::new(Toolbox::new(&config)?);
        let keys = KeyStore::new(tenure.clone());
        let transcripts = TranscriptWriter::new(&config);
        transcripts.install(&tenure);
        let workspaces = Workspaces::new(&config.workspaces)?;
        if let Some(workspaces) = &workspaces {
            workspaces.clone().install(&tenure);
        }
        webhooks::install(&tenure, &config.on_expire)?;
        tenure.register_tools(tools.clone());
        let tasks = Arc::default();
        let rate_limits = Arc::default();
        let run_hooks = webhooks::run_hooks(&config.runs)?;
        let schedules = schedules::compile(&config.schedules, &config.assistants)?;
        Ok(Arc::new(Self {
            body_budget: BodyBudget::new(&config.limits),
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
            session_counts: SessionCounts::default(),
            backup_permit: Arc::new(Semaphore::new(1)),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_configuration_is_rejected_at_startup() {
        let build_app = |yaml: &str| {
            Config::parse(yaml).and_then(|config| {
                let tenure = Tenure::with_store(Arc::new(tenure::store::MemoryStore::new()), config.options());
                App::with_tenure(tenure, config)
            })
        };
        for (yaml, want) in [
            ("on_expire: {webhooks: [{url: nowhere}]}", "on_expire.webhooks[0].url"),
            ("on_expire: {webhooks: [{url: 'ftp://x/'}]}", "http://"),
            ("on_expire: {webhooks: [{url: 'http://x/', timeout: never}]}", "timeout"),
            ("on_expire: {webhooks: [{url: 'http://x/', secret_env: NOT_SET_ANYWHERE}]}", "NOT_SET_ANYWHERE"),
            ("workspaces: {root: /dev/null/y}", "workspaces.root: cannot use /dev/null/y"),
            ("workspaces: {rot: y}", "did you mean `root`"),
            ("cors: {origins: ['*']}", "cors.origins[0]"),
            ("cors: {origins: ['https://a.b/']}", "\"https://a.b\""),
            ("telemetry: {otlp: collector}", "telemetry.otlp"),
            ("limits: {max_connections: 0}", "max_connections"),
        ] {
            let error = format!("{:#}", build_app(yaml).unwrap_err());
            assert!(error.contains(want), "{yaml}: {error}");
        }
    }
}
