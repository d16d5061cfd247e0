//! `tenure config --check`: tries what the configuration names (store, models, embeddings, tools) and reports each
//! result on one line, with what to do about a failure.

use super::output::{clean, line};
use super::target::TargetArgs;
use crate::app::{App, AppState};
use crate::auth::KeyStore;
use crate::config::workspaces::WorkspacesConfig;
use crate::config::{Config, ModelConfig};
use crate::embed::EmbeddingSource;
use crate::llm::upstream::Upstream;
use anyhow::bail;
use serde_json::json;
use std::net::IpAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tenure::memory::EmbeddingInput;
use tenure::policy::ToolSource;
use tenure::run::Prompt;
use tenure::session::RawObject;
use tenure::store::{self, FORMAT, MemoryStore, redacted};
use tenure::{Message, Model, ModelError, Tenure};

/// Maximum time for one check. An MCP server has a longer timeout of its own: some are downloaded first.
const TIMEOUT: Duration = Duration::from_secs(15);

/// The result of one check.
struct Check {
    /// What was checked: `store sqlite:tenure.db`.
    subject: String,
    /// What was found, or what is wrong and what to do.
    result: Result<String, String>,
}

/// Checks everything that the configuration names. The exit code is 1 if anything failed.
pub async fn run(target: &TargetArgs, as_json: bool) -> anyhow::Result<ExitCode> {
    if target.server.is_some() {
        bail!("this command checks the configuration of this machine: omit --server");
    }
    let config = target.load(&[])?;
    let mut report = Report { as_json, checks: Vec::new() };
    let file = Config::file(target.config.as_deref());
    let file = file.map_or_else(|| "none; all settings have their defaults".to_owned(), |f| f.display().to_string());
    let app = build(&config);
    let valid = app.as_ref().map(|_| file).map_err(|e| format!("{e:#}"));
    report.add("configuration".to_owned(), valid)?;
    let (store, keys_required) = check_store(&config).await;
    report.add(format!("store {}", redacted(&config.store)), store)?;
    if let Some(keys_required) = keys_required {
        report.add(format!("listen {}", config.listen), check_listen(&config, keys_required).await)?;
    }
    for (i, model) in config.models.iter().enumerate() {
        report.add(format!("model {}", model.name), check_model(i, model).await)?;
    }
    if let Some(result) = check_embeddings(&config).await {
        report.add("embeddings".to_owned(), result)?;
    }
    if let Ok(app) = app {
        check_tools(&app, &mut report).await?;
    }
    report.finish()
}

/// The checks so far. Text is printed as it becomes known, since some checks take long.
struct Report {
    as_json: bool,
    checks: Vec<Check>,
}

impl Report {
    fn add(&mut self, subject: String, result: Result<String, String>) -> anyhow::Result<()> {
        if !self.as_json {
            let (word, detail) = match &result {
                Ok(detail) => ("ok", detail),
                Err(detail) => ("failed", detail),
            };
            line(clean(&format!("{word:<8}{subject}: {detail}").replace('\n', " ")))?;
        }
        self.checks.push(Check { subject, result });
        Ok(())
    }

    fn finish(self) -> anyhow::Result<ExitCode> {
        let failed = self.checks.iter().filter(|c| c.result.is_err()).count();
        if self.as_json {
            let check = |c: &Check| {
                let (Ok(detail) | Err(detail)) = &c.result;
                json!({"check": c.subject, "ok": c.result.is_ok(), "detail": detail})
            };
            let checks: Vec<_> = self.checks.iter().map(check).collect();
            line(json!({"checks": checks, "failed": failed}).to_string())?;
        }
        Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Builds the application as the server does, with everything that needs no connection: secrets of webhooks and tools,
/// and schedules. Models and workspaces are left out.
fn build(config: &Config) -> anyhow::Result<AppState> {
    let tenure = Tenure::with_store(Arc::new(MemoryStore::new()), config.options());
    let config = Config { models: Vec::new(), workspaces: WorkspacesConfig::default(), ..config.clone() };
    App::with_tenure(tenure, config)
}

/// Checks that the store can be read, without creating or migrating it. Also returns whether it requires keys;
/// `None` if that is unknown.
async fn check_store(config: &Config) -> (Result<String, String>, Option<bool>) {
    let url = &config.store;
    if url.starts_with("memory:") {
        return (Ok("nothing is persisted: all sessions are lost when the server stops".to_owned()), Some(false));
    }
    if let Some(directory) = missing_directory(url) {
        return (Err(format!("the directory {directory} does not exist; create it")), None);
    }
    let format = match tokio::time::timeout(TIMEOUT, store::format(url)).await {
        Ok(Ok(format)) => format,
        Ok(Err(e)) => return (Err(store_error(&e)), None),
        Err(_) => return (Err(format!("no answer within {TIMEOUT:?}; is the database running?")), None),
    };
    let known = ["jsonl", "sqlite", "postgres", "postgresql"].contains(&url.split(':').next().unwrap_or_default());
    match format {
        None if known => (Ok("does not exist yet; `tenure serve` creates it".to_owned()), Some(false)),
        Some(format) if format < FORMAT => {
            (Ok(format!("format {format}; `tenure serve` migrates it to format {FORMAT}")), None)
        }
        _ => read_store(config).await,
    }
}

/// Opens a store that has the current format, and reads from it.
async fn read_store(config: &Config) -> (Result<String, String>, Option<bool>) {
    let tenure = match Tenure::open_with(&config.store, config.options()).await {
        Ok(tenure) => tenure,
        Err(tenure::Error::Locked { .. }) => return (Ok("in use by another process".to_owned()), None),
        Err(e) => return (Err(store_error(&e)), None),
    };
    match KeyStore::new(tenure).read_required().await {
        Ok(required) => (Ok(format!("format {FORMAT}")), Some(required)),
        Err(e) => (Err(store_error(&e)), None),
    }
}

fn store_error(e: &tenure::Error) -> String {
    let advice = match e {
        tenure::Error::Unavailable { .. } => "; is the database running, and `store` its address?",
        tenure::Error::Corrupt { .. } => "; `tenure doctor` examines it",
        _ => "",
    };
    format!("{e}{advice}")
}

/// The directory that a SQLite file would be created in, if it does not exist.
fn missing_directory(store: &str) -> Option<String> {
    let file = Path::new(store.strip_prefix("sqlite:")?);
    let directory = file.parent().filter(|d| !d.as_os_str().is_empty() && !d.exists())?;
    Some(directory.display().to_string())
}

/// Checks that the server would listen: an address other than loopback requires keys.
async fn check_listen(config: &Config, keys_required: bool) -> Result<String, String> {
    let keys_required = keys_required || !config.bootstrap_key_file.is_empty();
    let addresses = tokio::net::lookup_host(&config.listen).await;
    let addresses = addresses.map_err(|e| format!("{e}; `listen` is an address and a port, as 127.0.0.1:8787"))?;
    let is_loopback = addresses.map(|a| a.ip()).all(|ip: IpAddr| ip.to_canonical().is_loopback());
    match (is_loopback, keys_required) {
        (_, true) => Ok("keys are required".to_owned()),
        (true, false) => Ok("keys are not required: only this machine can connect".to_owned()),
        (false, false) => Err(
            "other machines can connect, so keys are required, and there are none; create one with `tenure keys add`"
                .to_owned(),
        ),
    }
}

/// Checks that a model server responds and accepts the key: by the list of its models, else by a short chat request.
async fn check_model(index: usize, model: &ModelConfig) -> Result<String, String> {
    let upstream = Upstream::new(model).map_err(|e| format!("{e:#}; set it, or change models[{index}].api_key_env"))?;
    let wanted = model.model.as_ref().unwrap_or(&model.name);
    let url = redacted(&model.base_url);
    let check = async {
        match upstream.list_models().await? {
            Some(ids) if ids.is_empty() || ids.contains(wanted) => Ok(format!("{url} responds")),
            Some(ids) => Ok(format!("{url} responds; it does not list {wanted:?}, but {}", ids.join(", "))),
            None => ask(&upstream, wanted).await.map(|()| format!("{url} responds")),
        }
    };
    let advice = |e: &ModelError| match e {
        ModelError::Refused { status: 401 | 403, .. } => {
            format!("check the key (models[{index}].api_key_env)")
        }
        _ => format!("start the model server, or change models[{index}].base_url"),
    };
    match tokio::time::timeout(TIMEOUT, check).await {
        Ok(result) => result.map_err(|e| format!("{url}: {e}; {}", advice(&e))),
        Err(_) => Err(format!("{url} did not respond within {TIMEOUT:?}; is it the address of a model server?")),
    }
}

/// Sends the shortest chat request.
async fn ask(upstream: &Upstream, model: &str) -> Result<(), ModelError> {
    let mut options = RawObject::default();
    options.set("model", model);
    options.set("max_tokens", 1);
    upstream.ask(Prompt { messages: vec![Message::user("ping")], options, stream: false }).await.map(drop)
}

/// Computes one embedding. `None` if no embeddings are configured.
async fn check_embeddings(config: &Config) -> Option<Result<String, String>> {
    let source = match EmbeddingSource::open(&config.embeddings).await {
        Ok(source) => source,
        Err(e) => return Some(Err(format!("{e:#}"))),
    };
    let embedder = source.embedder()?;
    let vectors = embedder.embed(vec!["ping".to_owned()], EmbeddingInput::Query).await;
    Some(match vectors {
        Ok(vectors) => {
            let dimensions = vectors.first().map_or(0, Vec::len);
            Ok(format!("{} computes vectors of {dimensions} dimensions", config.embeddings.model))
        }
        Err(reason) => Err(format!("{reason}; check embeddings.base_url, embeddings.model and its key")),
    })
}

/// Connects to each source of tools and lists its tools.
async fn check_tools(app: &App, report: &mut Report) -> anyhow::Result<()> {
    for (i, assistant) in app.config.assistants.iter().enumerate() {
        for (j, source) in assistant.tools.iter().enumerate() {
            let found = match app.tools.check(source).await {
                Ok(names) if names.is_empty() => Ok("responds, and has no tools".to_owned()),
                Ok(names) => Ok(names.join(", ")),
                Err(reason) => Err(format!("{reason}; check assistants[{i}].tools[{j}]")),
            };
            report.add(format!("tools of {}: {}", assistant.name, describe(source)), found)?;
        }
    }
    app.tools.close().await;
    Ok(())
}

/// Describes a source without its arguments and address, which may be secret.
fn describe(source: &ToolSource) -> String {
    match source {
        ToolSource::Mcp(mcp) => {
            format!("MCP server {}", mcp.command.clone().unwrap_or_else(|| host(mcp.url.as_deref())))
        }
        ToolSource::Http(http) => format!("HTTP tool {} at {}", http.name, host(Some(&http.url))),
        ToolSource::Python(_) => "python".to_owned(),
        ToolSource::Memory => "memory".to_owned(),
        ToolSource::Metadata(_) => "metadata".to_owned(),
        ToolSource::AskHuman => "ask_human".to_owned(),
    }
}

fn host(url: Option<&str>) -> String {
    let url = url.and_then(|url| reqwest::Url::parse(url).ok());
    url.as_ref().and_then(reqwest::Url::host_str).unwrap_or_default().to_owned()
}
