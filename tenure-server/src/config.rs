//! The configuration, merged from `tenure.yaml`, then `TENURE_*` environment variables, then flags. No other module
//! reads the environment.
#![expect(clippy::disallowed_methods, reason = "this is the one place that reads the environment")]

mod assistants;
mod cors;
mod cron;
pub mod dreams;
pub mod embeddings;
pub mod limits;
mod load;
mod models;
mod remote;
mod runs;
pub mod schedules;
mod search;
mod sessions;
mod telemetry;
pub mod tools;
mod transcripts;
mod trusted_proxies;
mod url;
mod webhooks;
pub mod workspaces;

pub use cors::Cors;
pub use limits::{KeyLimits, Limits};
pub use models::{BUILT_IN_MODEL, ModelConfig};
pub use remote::remote_from_environment;
pub use runs::RunsConfig;
pub use schedules::Schedule;
pub use search::SearchConfig;
pub use sessions::{Cache, SessionsConfig, ShortTerm};
pub use telemetry::{LogFormat, Telemetry};
pub use transcripts::TranscriptsConfig;
pub use trusted_proxies::TrustedProxies;
pub use url::http_url;
pub use webhooks::{OnExpire, WebhookConfig};

use serde::{Deserialize, Serialize};
use tenure::store::redacted;
use tenure::{Assistant, Options, Policy, policy::Redaction};

/// The configuration file that is read, if it exists, when no other is named.
pub const DEFAULT_FILE: &str = "tenure.yaml";
/// The default listen address of the server.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:8787";

/// The complete configuration. Absent settings have the values of [`Config::default`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The address to listen on. Addresses other than loopback require keys.
    pub listen: String,
    /// The store: `memory:`, `jsonl:DIR`, `sqlite:FILE` or `postgres://…`.
    pub store: String,
    /// The model servers. Without any, the built-in `rehearsal` model answers.
    pub models: Vec<ModelConfig>,
    /// Lifetime of sessions, and the handling of busy and expired ones.
    pub sessions: SessionsConfig,
    /// The prompt window: the part of a session that models see.
    pub short_term: ShortTerm,
    /// The cache of tool results.
    pub cache: Cache,
    /// Assistants that are available to every tenant.
    pub assistants: Vec<Assistant>,
    /// Limits of runs, and the webhooks notified of their end.
    pub runs: RunsConfig,
    /// Scheduled runs.
    pub schedules: Vec<Schedule>,
    /// The Python tool, for assistants that list it.
    pub python: tools::Python,
    /// Memory consolidation: promotion of memories of sessions to their users.
    pub dreams: dreams::Dreams,
    /// Full-text search over messages.
    pub search: SearchConfig,
    /// The source of embeddings.
    pub embeddings: embeddings::Embeddings,
    /// Webhooks called when a session ends.
    pub on_expire: OnExpire,
    /// One JSONL file per session.
    pub transcripts: TranscriptsConfig,
    /// Patterns to redact from transcripts, memories and search results.
    pub redaction: Redaction,
    /// The workspaces of sessions.
    pub workspaces: workspaces::WorkspacesConfig,
    /// The limits.
    pub limits: Limits,
    /// Other web sites whose pages may call this server.
    pub cors: Cors,
    /// Reverse proxies in front of this server, by address or network. With any, keys are required.
    pub trusted_proxies: TrustedProxies,
    /// A file with the first key, for containers; none if empty.
    pub bootstrap_key_file: String,
    /// Logs and traces.
    pub telemetry: Telemetry,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: DEFAULT_LISTEN.to_owned(),
            store: "sqlite:tenure.db".to_owned(),
            models: Vec::new(),
            sessions: SessionsConfig::default(),
            short_term: ShortTerm::default(),
            cache: Cache::default(),
            assistants: Vec::new(),
            runs: RunsConfig::default(),
            schedules: Vec::new(),
            python: tools::Python::default(),
            dreams: dreams::Dreams::default(),
            search: SearchConfig::default(),
            embeddings: embeddings::Embeddings::default(),
            on_expire: OnExpire::default(),
            transcripts: TranscriptsConfig::default(),
            redaction: Redaction::default(),
            workspaces: workspaces::WorkspacesConfig::default(),
            limits: Limits::default(),
            cors: Cors::default(),
            trusted_proxies: TrustedProxies::default(),
            bootstrap_key_file: String::new(),
            telemetry: Telemetry::default(),
        }
    }
}

impl Config {
    /// Validates every section. The error names the invalid setting.
    fn check(&self) -> anyhow::Result<()> {
        assistants::check_names(&self.assistants, &self.models)?;
        models::check(&self.models)?;
        self.sessions.check()?;
        self.on_expire.check()?;
        self.transcripts.check()?;
        self.telemetry.check()?;
        self.cors.check()?;
        self.limits.check()?;
        assistants::check(&self.assistants, &self.models)?;
        assistants::check_summary_model("short_term.compact", &self.short_term.compact, &self.models)?;
        self.embeddings.check()?;
        tools::check(&self.python, &self.assistants)
    }

    /// The options that the library is opened with.
    pub fn options(&self) -> Options {
        let ttl = self.sessions.ttl.duration();
        let retention = self.sessions.retention.duration();
        let runs = self.runs.policy();
        let compact = self.short_term.compact.clone();
        let window = self.short_term.window();
        let cache = self.cache.policy();
        let policy = Policy { ttl, retention, window, compact, cache, runs, ..Policy::default() };
        let mut options = Options { policy, ..Options::default() };
        if let Some(lease) = self.runs.lease.duration() {
            options.limits.lease = lease;
        }
        options.max_sessions = self.sessions.max_sessions;
        options.redaction = self.redaction.clone();
        options.message_index = self.search.index;
        options.cache_bytes = self.limits.cache_bytes;
        options.vector_bytes = self.limits.vector_bytes;
        options.limits.max_messages = self.limits.max_messages;
        options.limits.max_message_bytes = self.limits.max_message_bytes;
        options.limits.max_page = self.limits.max_page;
        options.limits.max_offset = self.limits.max_offset;
        options.limits.max_scan = self.limits.max_scan;
        options.limits.max_waiting_reads = self.limits.max_waiting_reads;
        options.limits.max_queue = self.limits.max_queue;
        options.limits.max_stall = self.limits.write_timeout.duration().unwrap_or(std::time::Duration::MAX);
        options
    }

    /// Renders the configuration in force as YAML, with secrets redacted.
    pub fn to_redacted_yaml(&self) -> anyhow::Result<String> {
        let mut redacted_config = self.clone();
        redacted_config.store = redacted(&redacted_config.store);
        for model in &mut redacted_config.models {
            model.api_key = model.api_key.as_ref().map(|_| "***".to_owned());
            model.base_url = redacted(&model.base_url);
        }
        for hook in redacted_config.on_expire.webhooks.iter_mut().chain(&mut redacted_config.runs.webhooks) {
            hook.url = redacted(&hook.url);
        }
        redacted_config.telemetry.otlp = redacted(&redacted_config.telemetry.otlp);
        redacted_config.embeddings = redacted_config.embeddings.redacted();
        redacted_config.assistants.iter_mut().for_each(tools::redact_secrets);
        Ok(serde_saphyr::to_string(&redacted_config)?)
    }
}
