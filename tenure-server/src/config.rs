//! The configuration: `tenure.yaml`, then `TENURE_*`, then flags. Nothing else reads the environment.
#![expect(clippy::disallowed_methods, reason = "this is the one place that reads the environment")]

pub mod cron;
pub mod dreams;
pub mod embeddings;
pub mod limits;
pub mod runs;
pub mod tools;
mod trusted_proxies;
pub mod workspaces;

pub use limits::Limits;
pub use runs::Runs;

use anyhow::{Context, anyhow, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use tenure::store::redacted;
use tenure::{
    Assistant, CachePolicy, Compact, HistoryMode, OnBusy, OnDisconnect, OnExpired, Options, Period, Policy, Redaction,
    Window,
};
pub use trusted_proxies::TrustedProxies;

/// The file that is read if there is one and no other is named.
pub const DEFAULT_FILE: &str = "tenure.yaml";
/// Where the server is to be found if nobody says otherwise.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:8787";

/// Everything that can be set. What a file leaves out is as in [`Config::default`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The address to listen on. Other than loopback only with keys.
    pub listen: String,
    /// The store: `memory:`, `jsonl:DIR`, `sqlite:FILE` or `postgres://…`.
    pub store: String,
    /// The model servers. Without any, the built-in `rehearsal` model answers.
    pub models: Vec<ModelConfig>,
    /// How long sessions last, and what requests do that come at a bad time.
    pub sessions: Sessions,
    /// What models are shown.
    pub short_term: ShortTerm,
    /// Tool results.
    pub cache: Cache,
    /// Assistants that stand for every tenant.
    pub assistants: Vec<Assistant>,
    /// Work that goes on by itself.
    pub runs: Runs,
    /// Runs by the clock.
    pub schedules: Vec<crate::jobs::schedules::Schedule>,
    /// The Python tool, for assistants that list it.
    pub python: tools::Python,
    /// What sessions remember becomes their users'.
    pub dreams: dreams::Dreams,
    /// What makes vectors of texts.
    pub embeddings: embeddings::Embeddings,
    /// What happens when a session ends.
    pub on_expire: OnExpire,
    /// One JSONL file per session.
    pub transcripts: Transcripts,
    /// What must not be written to transcripts and memories, nor be shown by a search.
    pub redaction: Redaction,
    /// The workspaces of sessions.
    pub workspaces: workspaces::Workspaces,
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

/// A model server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// What requests call it.
    pub name: String,
    /// Its address, up to and including `/v1`.
    pub base_url: String,
    /// What its server calls it; if not set, requests are passed on with the name they came with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The environment variable that holds its key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_env: Option<String>,
    /// The key itself; better is `api_key_env`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key: Option<String>,
    /// How long a connection may take.
    #[serde(default = "ten_seconds")]
    pub connect_timeout: Period,
    /// How long the server may say nothing.
    #[serde(default = "five_minutes")]
    pub idle_timeout: Period,
    /// How often a request is repeated that failed before anything was answered.
    #[serde(default = "two")]
    pub retries: u32,
    /// Whether requests for models that are not configured are passed on to this server, under their own names.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pass_unknown: bool,
}

fn ten_seconds() -> Period {
    Period::of(std::time::Duration::from_secs(10))
}

fn five_minutes() -> Period {
    Period::of(std::time::Duration::from_secs(300))
}

fn two() -> u32 {
    2
}

/// How long sessions last, and what requests do that come at a bad time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sessions {
    /// Idle for longer, a session expires.
    pub ttl: Period,
    /// Expired or deleted for longer, it is purged.
    pub retention: Period,
    /// At most so many live sessions; the longest idle go first. 0: no cap.
    pub max_sessions: usize,
    /// Whether a request without `session_id` is matched by its content.
    pub content_matching: bool,
    /// Request headers that name the session besides `X-Session-Id`, for clients that can not set a body field.
    pub id_headers: Vec<String>,
    /// How the messages of requests are read: `auto`, `full` or `append`.
    pub history: HistoryMode,
    /// What a request does whose session is busy: `queue`, `reject`, `interrupt` or `branch`.
    pub on_busy: OnBusy,
    /// What a request does whose session has expired: `restore`, `fresh` or `reject`.
    pub on_expired: OnExpired,
    /// What becomes of a run when the client that waits for it goes away: `finish` or `cancel`.
    pub on_disconnect: OnDisconnect,
}

/// What models are shown. The log keeps everything.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShortTerm {
    /// At most so many turns; 0: all.
    pub max_history_turns: usize,
    /// At most so many tokens, estimated; 0: all.
    pub max_tokens: usize,
    /// Who writes a summary of the oldest turns when there are more: `false` (nobody: they are left out), `true` (the session's model), or
    /// the name of a model.
    pub compact: Compact,
}

/// Tool results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cache {
    /// How long a result is good for.
    pub ttl: Period,
    /// How many a session keeps.
    pub max_entries: usize,
}

/// What happens when a session ends.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OnExpire {
    /// Web hooks that get the whole session before it goes.
    pub webhooks: Vec<Webhook>,
}

/// One JSONL file per session, one message per line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Transcripts {
    /// Their directory; none are written if it is empty.
    pub dir: String,
    /// Whether they are written as it goes, not only when a session ends.
    pub live: bool,
}

/// A web hook.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Webhook {
    /// Where to POST.
    pub url: String,
    /// The environment variable with the secret that signs the body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_env: Option<String>,
    /// How long an answer may take.
    #[serde(default = "ten_seconds")]
    pub timeout: Period,
}

/// Other web sites whose pages may call this server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cors {
    /// Their origins, such as `https://app.example.com`; none: no page but our own.
    pub origins: Vec<String>,
}

/// Logs and traces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Telemetry {
    /// What is logged: `error`, `warn`, `info`, `debug`, or directives such as `tenure=debug`.
    pub log: String,
    /// How: `text` or `json`.
    pub log_format: LogFormat,
    /// Where traces go over OTLP, such as `http://127.0.0.1:4318`; nowhere if empty.
    pub otlp: String,
}

/// How logs are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// For programs.
    Json,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: DEFAULT_LISTEN.to_owned(),
            store: "sqlite:tenure.db".to_owned(),
            models: Vec::new(),
            sessions: Sessions::default(),
            short_term: ShortTerm::default(),
            cache: Cache::default(),
            assistants: Vec::new(),
            runs: Runs::default(),
            schedules: Vec::new(),
            python: tools::Python::default(),
            dreams: dreams::Dreams::default(),
            embeddings: embeddings::Embeddings::default(),
            on_expire: OnExpire::default(),
            transcripts: Transcripts::default(),
            redaction: Redaction::default(),
            workspaces: workspaces::Workspaces::default(),
            limits: Limits::default(),
            cors: Cors::default(),
            trusted_proxies: TrustedProxies::default(),
            bootstrap_key_file: String::new(),
            telemetry: Telemetry::default(),
        }
    }
}

impl Default for Sessions {
    fn default() -> Self {
        let Policy { ttl, retention, .. } = Policy::default();
        let period = |d: Option<std::time::Duration>| d.map_or(Period::NEVER, Period::of);
        Self {
            ttl: period(ttl),
            retention: period(retention),
            max_sessions: 0,
            content_matching: true,
            id_headers: Vec::new(),
            history: HistoryMode::default(),
            on_busy: OnBusy::default(),
            on_expired: OnExpired::default(),
            on_disconnect: OnDisconnect::default(),
        }
    }
}

impl Default for ShortTerm {
    fn default() -> Self {
        let Policy { window: Window { max_turns, max_tokens }, compact, .. } = Policy::default();
        Self { max_history_turns: max_turns.unwrap_or(0), max_tokens: max_tokens.unwrap_or(0), compact }
    }
}

impl Default for Cache {
    fn default() -> Self {
        let CachePolicy { ttl, max_entries } = CachePolicy::default();
        Self { ttl: Period::of(ttl), max_entries }
    }
}

impl Default for Telemetry {
    fn default() -> Self {
        Self { log: "info".to_owned(), log_format: LogFormat::Text, otlp: String::new() }
    }
}

impl Config {
    /// Reads the file, then the environment, then what flags say (`path.to.key`, value).
    pub fn load(file: Option<&Path>, flags: &[(&str, String)]) -> anyhow::Result<Self> {
        let named = file.map(Path::to_owned).or_else(|| std::env::var_os("TENURE_CONFIG").map(PathBuf::from));
        let path = named.clone().unwrap_or_else(|| DEFAULT_FILE.into());
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if named.is_none() && e.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(e).with_context(|| format!("can not read {}", path.display())),
        };
        let mut tree = tree(&text).with_context(|| format!("in {}", path.display()))?;
        let mut env: Vec<_> = std::env::vars().filter(|(name, _)| name.starts_with("TENURE_")).collect();
        env.sort();
        for (name, value) in env {
            // The tests' own.
            if name == "TENURE_CONFIG"
                || name.starts_with("TENURE_TEST_")
                || name == "TENURE_SERVER"
                || name == "TENURE_KEY"
            {
                continue;
            }
            let at = name["TENURE_".len()..].to_ascii_lowercase().replace("__", ".");
            set(&mut tree, &at, &value).with_context(|| format!("in the environment variable {name}"))?;
        }
        for (at, value) in flags {
            set(&mut tree, at, value)?;
        }
        Self::from_tree(tree)
    }

    /// Reads the text of a file.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        Self::from_tree(tree(text)?)
    }

    fn from_tree(tree: Value) -> anyhow::Result<Self> {
        let config: Self = serde_path_to_error::deserialize(tree).map_err(|e| {
            let (path, why) = (e.path().to_string(), e.into_inner().to_string());
            anyhow!("{path}: {}", nearest(&why))
        })?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> anyhow::Result<()> {
        let mut names: Vec<&str> = self.models.iter().map(|m| m.name.as_str()).collect();
        names.extend(self.assistants.iter().map(|a| a.name.as_str()));
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|w| w[0] == w[1]) {
            bail!("{:?} is the name of two models or assistants; a request could not tell them apart", pair[0]);
        }
        for (i, model) in self.models.iter().enumerate() {
            http_url(&format!("models[{i}].base_url"), &model.base_url)?;
        }
        let mut passing = self.models.iter().enumerate().filter(|(_, m)| m.pass_unknown);
        if let (Some((first, _)), Some((second, _))) = (passing.next(), passing.next()) {
            bail!(
                "models[{second}].pass_unknown: models[{first}] has it already; unknown names can go to one server only"
            );
        }
        for (i, name) in self.sessions.id_headers.iter().enumerate() {
            if axum::http::HeaderName::from_bytes(name.as_bytes()).is_err() {
                bail!("sessions.id_headers[{i}]: {name:?} is not the name of a header");
            }
        }
        for (i, hook) in self.on_expire.webhooks.iter().enumerate() {
            http_url(&format!("on_expire.webhooks[{i}].url"), &hook.url)?;
            if hook.timeout.duration().is_none() {
                bail!("on_expire.webhooks[{i}].timeout: it must end some time, or one hook could hold up all");
            }
        }
        if self.transcripts.live && self.transcripts.dir.is_empty() {
            bail!("transcripts.live: there is no directory to write to; set transcripts.dir");
        }
        if !self.telemetry.otlp.is_empty() {
            http_url("telemetry.otlp", &self.telemetry.otlp)?;
        }
        for (i, origin) in self.cors.origins.iter().enumerate() {
            let url = http_url(&format!("cors.origins[{i}]"), origin)?;
            if url.origin().ascii_serialization() != *origin {
                let right = url.origin().ascii_serialization();
                bail!("cors.origins[{i}]: {origin:?} is not an origin; write it as {right:?}");
            }
        }
        self.limits.check()?;
        for (i, assistant) in self.assistants.iter().enumerate() {
            if let Some(model) = assistant.model.as_ref().filter(|m| !self.has_model(m)) {
                bail!("assistants[{i}].model: there is no model {model:?} under `models`");
            }
            if let Some(compact) = &assistant.short_term.compact {
                self.check_writer(&format!("assistants[{i}].short_term.compact"), compact)?;
            }
        }
        self.check_writer("short_term.compact", &self.short_term.compact)?;
        self.embeddings.check()?;
        tools::check(&self.python, &self.assistants)
    }

    fn check_writer(&self, at: &str, compact: &Compact) -> anyhow::Result<()> {
        match compact {
            Compact::With(model) if !self.has_model(model) => {
                bail!("{at}: there is no model {model:?} under `models`; name one of them, or say true or false")
            }
            _ => Ok(()),
        }
    }

    fn has_model(&self, name: &str) -> bool {
        name == crate::llm::echo::NAME || self.models.iter().any(|m| m.name == name || m.pass_unknown)
    }

    /// What the library is opened with.
    pub fn options(&self) -> Options {
        let some = |n: usize| (n > 0).then_some(n);
        let window =
            Window { max_turns: some(self.short_term.max_history_turns), max_tokens: some(self.short_term.max_tokens) };
        let cache = CachePolicy {
            ttl: self.cache.ttl.duration().unwrap_or(std::time::Duration::MAX),
            max_entries: self.cache.max_entries,
        };
        let (ttl, retention) = (self.sessions.ttl.duration(), self.sessions.retention.duration());
        let runs = self.runs.policy();
        let compact = self.short_term.compact.clone();
        let policy = Policy { ttl, retention, window, compact, cache, runs, ..Policy::default() };
        let mut options = Options { policy, ..Options::default() };
        if let Some(lease) = self.runs.lease.duration() {
            options.limits.lease = lease;
        }
        options.max_sessions = self.sessions.max_sessions;
        options.redaction = self.redaction.clone();
        options.cache_bytes = self.limits.cache_bytes;
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

    /// The configuration as a file would say it, with secrets hidden.
    pub fn shown(&self) -> anyhow::Result<String> {
        let mut shown = self.clone();
        shown.store = redacted(&shown.store);
        for model in &mut shown.models {
            model.api_key = model.api_key.as_ref().map(|_| "***".to_owned());
            model.base_url = redacted(&model.base_url);
        }
        for hook in shown.on_expire.webhooks.iter_mut().chain(&mut shown.runs.webhooks) {
            hook.url = redacted(&hook.url);
        }
        shown.telemetry.otlp = redacted(&shown.telemetry.otlp);
        shown.embeddings = shown.embeddings.hidden();
        shown.assistants.iter_mut().for_each(tools::hide);
        Ok(serde_saphyr::to_string(&shown)?)
    }
}

/// The running server that commands speak to (`TENURE_SERVER`), and the key they show it (`TENURE_KEY`).
pub fn remote() -> (Option<String>, Option<String>) {
    let set = |name| std::env::var(name).ok().filter(|v: &String| !v.is_empty());
    (set("TENURE_SERVER"), set("TENURE_KEY"))
}

impl ModelConfig {
    /// Its key, from the environment or the file.
    pub fn key(&self) -> anyhow::Result<Option<String>> {
        match &self.api_key_env {
            Some(name) => match std::env::var(name) {
                Ok(key) => Ok(Some(key)),
                Err(_) => {
                    bail!("model {:?} takes its key from the environment variable {name}, which is not set", self.name)
                }
            },
            None => Ok(self.api_key.clone()),
        }
    }
}

impl Webhook {
    /// The secret that signs the body.
    pub fn secret(&self) -> anyhow::Result<Option<String>> {
        let Some(name) = &self.secret_env else { return Ok(None) };
        std::env::var(name).map(Some).map_err(|_| anyhow!("the web hook's secret_env {name} is not set"))
    }
}

/// The URL of a web server; `at` is where it is written.
pub fn http_url(at: &str, url: &str) -> anyhow::Result<reqwest::Url> {
    let shown = redacted(url);
    let url = reqwest::Url::parse(url).map_err(|e| anyhow!("{at}: {shown:?} is not a URL: {e}"))?;
    if !["http", "https"].contains(&url.scheme()) {
        bail!("{at}: {shown:?} must begin with http:// or https://");
    }
    Ok(url)
}

fn tree(text: &str) -> anyhow::Result<Value> {
    if text.lines().all(|l| l.trim().is_empty() || l.trim_start().starts_with('#')) {
        return Ok(Value::Object(Map::new()));
    }
    let tree: Value = serde_saphyr::from_str(text)?;
    if !tree.is_object() {
        bail!("a configuration is a mapping such as `listen: {DEFAULT_LISTEN}`");
    }
    Ok(tree)
}

/// Sets one value by its path.
fn set(tree: &mut Value, at: &str, value: &str) -> anyhow::Result<()> {
    let read = serde_saphyr::from_str(value).ok();
    // `memory:` is a store's URL, not a mapping without a value.
    let read = read.filter(|v: &Value| !v.is_object() || value.trim_start().starts_with('{'));
    let value = read.unwrap_or_else(|| Value::from(value));
    let mut place = tree;
    let mut names = at.split('.').peekable();
    while let Some(name) = names.next() {
        let Value::Object(map) = place else { bail!("{at}: there is nothing to set below a plain value") };
        if names.peek().is_none() {
            map.insert(name.to_owned(), value);
            return Ok(());
        }
        place = map.entry(name).or_insert_with(|| Value::Object(Map::new()));
    }
    Ok(())
}

/// Adds the nearest known name to serde's complaint about an unknown one.
fn nearest(why: &str) -> String {
    let names: Vec<&str> = why.split('`').skip(1).step_by(2).collect();
    match (why.starts_with("unknown field"), names.split_first()) {
        (true, Some((wrong, known))) if !known.is_empty() => {
            let best = known.iter().min_by_key(|k| distance(wrong, k)).unwrap_or(&known[0]);
            format!("unknown key `{wrong}`; did you mean `{best}`? (known: {})", known.join(", "))
        }
        _ => why.to_owned(),
    }
}

/// How many letters differ (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut last = std::mem::replace(&mut row[0], i + 1);
        for (j, cb) in b.iter().enumerate() {
            let step = (last + usize::from(ca != *cb)).min(row[j] + 1).min(row[j + 1] + 1);
            last = std::mem::replace(&mut row[j + 1], step);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_is_the_default() {
        let example = Config::parse(include_str!("../../tenure.example.yaml")).unwrap();
        assert_eq!(example, Config::default());
    }

    #[test]
    fn an_unknown_key_names_the_nearest_known_one() {
        let error = Config::parse("sessions: {tll: 2h}").unwrap_err().to_string();
        assert!(
            error.contains("sessions") && error.contains("`tll`") && error.contains("did you mean `ttl`"),
            "{error}"
        );
        assert!(Config::parse("sessions: {ttl: soon}").unwrap_err().to_string().contains("sessions.ttl"));
    }

    #[test]
    fn flags_win_and_secrets_are_hidden() {
        let mut tree = tree("store: 'memory:'\nlimits: {max_page: 7}").unwrap();
        set(&mut tree, "store", "postgres://me:secret@db/x").unwrap();
        set(&mut tree, "sessions.ttl", "2h").unwrap();
        set(&mut tree, "transcripts.dir", "memory:").unwrap();
        let config = Config::from_tree(tree).unwrap();
        assert_eq!(config.transcripts.dir, "memory:");
        assert_eq!((config.limits.max_page, config.sessions.ttl), (7, "2h".parse().unwrap()));
        let shown = config.shown().unwrap();
        assert!(!shown.contains("secret") && shown.contains("me:***@db"), "{shown}");
        assert_eq!(Config::parse(&shown).unwrap().sessions, config.sessions);
    }

    #[test]
    fn a_rule_that_can_not_work_is_named_with_its_place() {
        for (yaml, want) in [
            ("redaction: [{name: a, pattern: x}, {name: b, pattern: '('}]", "redaction[1]: "),
            ("redaction: [{name: a, pattern: '('}]", "unclosed group"),
            ("redaction: [{name: a, patern: x}]", "did you mean `pattern`"),
            ("redaction: [{name: a, pattern: x}, {name: a, pattern: z}]", "two rules"),
            ("transcripts: {live: true}", "transcripts.dir"),
        ] {
            let error = Config::parse(yaml).unwrap_err().to_string();
            assert!(error.contains(want) && !error.contains('\n'), "{yaml}: {error}");
        }
        let config = Config::parse("redaction: [{name: email, pattern: '\\S+@\\S+'}]").unwrap();
        assert_eq!(config.options().redaction.apply("to a@b").0, "to [redacted: email]");
        assert_eq!(Config::parse(&config.shown().unwrap()).unwrap().redaction, config.redaction);
    }

    #[test]
    fn names_must_be_told_apart() {
        let two = "models: [{name: a, base_url: http://x/v1}, {name: a, base_url: http://y/v1}]";
        assert!(Config::parse(two).unwrap_err().to_string().contains("two models"));
        let unknown = "assistants: [{name: a, model: nobody}]";
        assert!(Config::parse(unknown).unwrap_err().to_string().contains("nobody"));
    }
}
