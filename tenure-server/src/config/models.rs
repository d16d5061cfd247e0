//! The section `models`: the model servers, and the name of the built-in model.

use super::url::http_url;
use anyhow::bail;
use serde::{Deserialize, Serialize};
use tenure::policy::HumanDuration;

/// The name of the built-in model, which answers without a server.
pub const BUILT_IN_MODEL: &str = "rehearsal";

/// A model server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// The name that requests use.
    pub name: String,
    /// Its address, up to and including `/v1`.
    pub base_url: String,
    /// The upstream model name. If not set, the name in the request is passed on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The environment variable that holds its key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_env: Option<String>,
    /// The key itself; better is `api_key_env`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key: Option<String>,
    /// Timeout for connecting.
    #[serde(default = "ten_seconds")]
    pub connect_timeout: HumanDuration,
    /// Maximum time without any data from the server.
    #[serde(default = "five_minutes")]
    pub idle_timeout: HumanDuration,
    /// Number of retries of a request that failed before any response.
    #[serde(default = "two")]
    pub retries: u32,
    /// Whether requests for models that are not configured are passed on to this server, under their own names.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pass_unknown: bool,
}

pub(super) fn ten_seconds() -> HumanDuration {
    HumanDuration::of(std::time::Duration::from_secs(10))
}

fn five_minutes() -> HumanDuration {
    HumanDuration::of(std::time::Duration::from_secs(300))
}

pub(super) fn two() -> u32 {
    2
}

impl ModelConfig {
    /// The API key, from the environment variable or the file. `None` means that none is configured.
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

/// Validates the model servers.
pub(super) fn check(models: &[ModelConfig]) -> anyhow::Result<()> {
    for (i, model) in models.iter().enumerate() {
        http_url(&format!("models[{i}].base_url"), &model.base_url)?;
    }
    let mut passing = models.iter().enumerate().filter(|(_, m)| m.pass_unknown);
    if let (Some((first, _)), Some((second, _))) = (passing.next(), passing.next()) {
        bail!("models[{second}].pass_unknown: already set on models[{first}]; only one server can take unknown names");
    }
    Ok(())
}

/// Returns true if requests for a model of this name can be served.
pub(super) fn has_model(models: &[ModelConfig], name: &str) -> bool {
    name == BUILT_IN_MODEL || models.iter().any(|m| m.name == name || m.pass_unknown)
}
