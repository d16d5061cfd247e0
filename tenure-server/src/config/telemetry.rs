//! The section `telemetry`: logs and traces.

use super::url::http_url;
use serde::{Deserialize, Serialize};

/// Logs and traces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Telemetry {
    /// The log filter: `error`, `warn`, `info`, `debug`, or directives such as `tenure=debug`.
    pub log: String,
    /// The log format: `text` or `json`.
    pub log_format: LogFormat,
    /// The OTLP endpoint for traces, such as `http://127.0.0.1:4318`. Empty disables traces.
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

impl Default for Telemetry {
    fn default() -> Self {
        Self { log: "info".to_owned(), log_format: LogFormat::Text, otlp: String::new() }
    }
}

impl Telemetry {
    /// Validates the section.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        if !self.otlp.is_empty() {
            http_url("telemetry.otlp", &self.otlp)?;
        }
        Ok(())
    }
}
