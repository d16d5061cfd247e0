//! Logs. Ids, counts and times; never what was said.

use crate::config::{LogFormat, Telemetry};
use anyhow::anyhow;
use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt};

/// Begins to log, to standard error.
pub fn install(config: &Telemetry) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&config.log).map_err(|e| anyhow!("telemetry.log: {e}"))?;
    let registry = tracing_subscriber::registry().with(filter);
    let text = fmt::layer().with_writer(std::io::stderr).with_target(false);
    match config.log_format {
        LogFormat::Text => registry.with(text.compact()).try_init()?,
        LogFormat::Json => registry.with(text.json().flatten_event(true)).try_init()?,
    }
    Ok(())
}
