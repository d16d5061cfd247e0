//! Webhooks, and the section `on_expire`: the webhooks notified when a session ends.

use super::models::ten_seconds;
use super::url::http_url;
use anyhow::{anyhow, bail};
use serde::{Deserialize, Serialize};
use tenure::policy::HumanDuration;

/// A web hook.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebhookConfig {
    /// The URL to POST to.
    pub url: String,
    /// The environment variable with the secret that signs the body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_env: Option<String>,
    /// Timeout of a delivery.
    #[serde(default = "ten_seconds")]
    pub timeout: HumanDuration,
}

impl WebhookConfig {
    /// The secret that signs the body, from the environment. `None` means that the body is not signed.
    pub fn secret(&self) -> anyhow::Result<Option<String>> {
        let Some(name) = &self.secret_env else { return Ok(None) };
        std::env::var(name)
            .map(Some)
            .map_err(|_| anyhow!("the environment variable {name} (secret_env of a webhook) is not set"))
    }
}

/// Webhooks called when a session ends.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OnExpire {
    /// Webhooks that receive the whole session before it is removed.
    pub webhooks: Vec<WebhookConfig>,
}

impl OnExpire {
    /// Validates the section.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        for (i, hook) in self.webhooks.iter().enumerate() {
            http_url(&format!("on_expire.webhooks[{i}].url"), &hook.url)?;
            if hook.timeout.duration().is_none() {
                bail!("on_expire.webhooks[{i}].timeout: must be finite, or one webhook could block all others");
            }
        }
        Ok(())
    }
}
