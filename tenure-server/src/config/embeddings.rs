//! The section `embeddings`: the model that computes embeddings.

use super::models::{ModelConfig, ten_seconds, two};
use super::url::http_url;
use anyhow::bail;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Duration;
use tenure::policy::HumanDuration;

/// The name of the model that `tenure models pull` downloads.
pub const LOCAL_MODEL_NAME: &str = "all-minilm-l6-v2";

/// Maximum number of characters of a prefix.
const MAX_PREFIX_CHARS: usize = 1000;

/// The source of embeddings, for search by meaning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Embeddings {
    /// `none`, `local`, or the model name at the server `base_url`.
    pub model: String,
    /// The directory of the local model.
    pub path: String,
    /// The address of an OpenAI-compatible server, up to and including `/v1`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_url: Option<String>,
    /// The environment variable that holds its key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_key_env: Option<String>,
    /// The key itself; better is `api_key_env`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_key: Option<String>,
    /// The requested number of dimensions, if the server supports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dimensions: Option<usize>,
    /// Put before a question; unset: as the model's files or its family have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub query_prefix: Option<String>,
    /// Put before the text of a memory; unset: as the model's files or its family have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passage_prefix: Option<String>,
    /// Timeout of one request.
    pub timeout: HumanDuration,
    /// Number of retries of a request that failed before any response.
    pub retries: u32,
    /// Maximum number of texts per request.
    pub batch: usize,
}

impl Default for Embeddings {
    fn default() -> Self {
        Self {
            model: "none".to_owned(),
            path: format!("models/{}", LOCAL_MODEL_NAME),
            base_url: None,
            api_key_env: None,
            api_key: None,
            dimensions: None,
            query_prefix: None,
            passage_prefix: None,
            timeout: HumanDuration::of(Duration::from_secs(30)),
            retries: two(),
            batch: 64,
        }
    }
}

/// The configured source of embeddings.
#[derive(Clone, Copy, Debug)]
pub enum EmbeddingBackend<'a> {
    /// No embeddings are computed.
    None,
    /// The local model in this directory.
    Local(&'a Path),
    /// The OpenAI-compatible server at this base URL.
    Server(&'a str),
}

impl Embeddings {
    /// Returns the configured source of embeddings. `base_url` takes precedence over `model`.
    pub fn backend(&self) -> EmbeddingBackend<'_> {
        match (&self.base_url, self.model.as_str()) {
            (Some(url), _) => EmbeddingBackend::Server(url),
            (None, "local") => EmbeddingBackend::Local(Path::new(&self.path)),
            (None, _) => EmbeddingBackend::None,
        }
    }

    /// The embeddings server as a `ModelConfig`, so that it shares the model client. Fails if `base_url` is not
    /// set.
    pub fn server(&self) -> anyhow::Result<ModelConfig> {
        let EmbeddingBackend::Server(url) = self.backend() else { bail!("embeddings.base_url is not set") };
        Ok(ModelConfig {
            name: self.model.clone(),
            base_url: url.to_owned(),
            model: Some(self.model.clone()),
            api_key_env: self.api_key_env.clone(),
            api_key: self.api_key.clone(),
            connect_timeout: ten_seconds(),
            // `timeout` covers the whole request.
            idle_timeout: HumanDuration::NEVER,
            retries: self.retries,
            pass_unknown: false,
        })
    }

    /// Returns a copy with secrets redacted, for printing.
    #[must_use]
    pub fn redacted(&self) -> Self {
        let api_key = self.api_key.as_ref().map(|_| "***".to_owned());
        Self { api_key, base_url: self.base_url.as_deref().map(tenure::store::redacted), ..self.clone() }
    }

    /// Validates the section.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        match (&self.base_url, self.model.as_str()) {
            (Some(url), model) => {
                http_url("embeddings.base_url", url)?;
                if ["", "none", "local"].contains(&model) {
                    bail!(
                        "embeddings.model: with a `base_url`, set it to the server's name of the model; for `local` or `none`, remove `base_url`"
                    );
                }
            }
            (None, "none" | "local") => {
                if self.api_key.is_some() || self.api_key_env.is_some() || self.dimensions.is_some() {
                    bail!("embeddings: `api_key_env`, `api_key` and `dimensions` require a `base_url`");
                }
            }
            (None, model) => {
                bail!(
                    "embeddings.model: {model:?} needs the `base_url` of its server; in this process there is only `local`"
                );
            }
        }
        if self.timeout.duration().is_none_or(|t| t.is_zero()) {
            bail!("embeddings.timeout: must be finite and greater than 0");
        }
        if self.batch == 0 || self.dimensions == Some(0) {
            bail!("embeddings: `batch` and `dimensions` must be at least 1");
        }
        for (key, prefix) in [("query_prefix", &self.query_prefix), ("passage_prefix", &self.passage_prefix)] {
            if prefix.as_ref().is_some_and(|prefix| prefix.chars().count() > MAX_PREFIX_CHARS) {
                bail!("embeddings.{key}: at most {MAX_PREFIX_CHARS} characters");
            }
        }
        if self.path.is_empty() {
            bail!("embeddings.path: must be a directory");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn invalid_settings_are_rejected_with_a_reason() {
        for (text, want) in [
            ("modle: local", "did you mean `model`"),
            ("model: bge-m3", "needs the `base_url`"),
            ("base_url: 'http://x/v1'", "the server's name of the model"),
            ("model: local, base_url: 'http://x/v1'", "the server's name of the model"),
            ("model: m, base_url: 'ftp://x'", "embeddings.base_url"),
            ("model: local, dimensions: 3", "require a `base_url`"),
            ("model: local, api_key: hush", "require a `base_url`"),
            ("timeout: never", "embeddings.timeout"),
            ("batch: 0", "batch"),
            ("model: local, path: ''", "embeddings.path"),
            (&format!("query_prefix: {}", "x".repeat(1001)), "embeddings.query_prefix"),
            (&format!("passage_prefix: {}", "x".repeat(1001)), "embeddings.passage_prefix"),
        ] {
            let error = Config::parse(&format!("embeddings: {{{text}}}")).unwrap_err().to_string();
            assert!(error.contains(want) && !error.contains("hush"), "{text}: {error}");
        }
    }

    #[test]
    fn secrets_are_not_printed() {
        let text = "embeddings: {model: m, base_url: 'http://me:hush@x/v1', api_key: hush, dimensions: 256}";
        let config = Config::parse(text).unwrap();
        let shown = config.to_redacted_yaml().unwrap();
        assert!(!shown.contains("hush") && shown.contains("me:***@x"), "{shown}");
        assert_eq!(Config::parse(&shown).unwrap().embeddings.dimensions, Some(256));
    }
}
