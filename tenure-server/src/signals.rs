//! Handling of operating system signals.
//!
//! | signal | effect |
//! |---|---|
//! | `SIGINT`, `SIGTERM` | graceful shutdown: work in progress is finished; a second signal stops at once |
//! | `SIGHUP` | the configuration is reloaded; settings that can change at run time take effect (D-117) |
//! | `SIGXFSZ` | ignored: a write over the process's file size limit fails, as on a full disk |

use crate::config::Config;
use crate::observability::telemetry::LogFilter;
use serde_json::Value;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Returns a future that completes on SIGINT (Ctrl-C) or SIGTERM. The signal handlers are installed by this
/// call, not by the first poll, so a signal sent as soon as the server is known to listen is not lost.
pub fn shutdown_signal() -> impl Future<Output = ()> + Send + use<> {
    let signals = [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
    async move {
        let [interrupt, terminate] = signals.map(|registered| async {
            match registered {
                Ok(mut signal) => drop(signal.recv().await),
                Err(_) => std::future::pending().await,
            }
        });
        tokio::select! {
            () = interrupt => {}
            () = terminate => {}
        }
    }
}

/// Makes writes over the file size limit (`RLIMIT_FSIZE`) fail with an error, which the store reports, instead
/// of terminating the process. Child processes get the default action again.
pub fn ignore_file_size_limit() {
    if let Err(error) = signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw())) {
        tracing::warn!(%error, "could not install the SIGXFSZ handler: a write over the file size limit will terminate the process");
    }
}

/// Subscribes to SIGHUP. From this call on, SIGHUP does not terminate the process.
pub fn hangups() -> std::io::Result<Signal> {
    signal(SignalKind::hangup())
}

/// Reloads the configuration on each SIGHUP, until the signal stream ends. A changed `telemetry.log` takes
/// effect immediately; other changed settings are logged by name and need a restart (D-117). An invalid
/// configuration changes nothing.
pub async fn reload(
    mut hangups: Signal,
    mut config: Config,
    log: LogFilter,
    load: impl Fn() -> anyhow::Result<Config>,
) {
    while hangups.recv().await.is_some() {
        let outcome = load().and_then(|new| log.set(&new.telemetry.log).map(|()| new));
        match outcome {
            Err(error) => {
                tracing::error!(
                    error = format!("{error:#}"),
                    "SIGHUP: the configuration is invalid; no setting was changed"
                );
            }
            Ok(new) => {
                let reloaded = if new.telemetry.log == config.telemetry.log { "nothing" } else { "telemetry.log" };
                config.telemetry.log.clone_from(&new.telemetry.log);
                let restart = changed_settings(&config, &new).join(", ");
                let restart = if restart.is_empty() { "nothing" } else { &restart };
                tracing::info!(reloaded, needs_restart = restart, "SIGHUP: configuration reloaded");
            }
        }
    }
}

/// The dotted names of the settings that differ.
fn changed_settings(old: &Config, new: &Config) -> Vec<String> {
    let tree = |config: &Config| serde_json::to_value(config).unwrap_or_default();
    let mut names = Vec::new();
    differences("", &tree(old), &tree(new), &mut names);
    names
}

fn differences(prefix: &str, old: &Value, new: &Value, names: &mut Vec<String>) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            let all: std::collections::BTreeSet<&String> = old.keys().chain(new.keys()).collect();
            for name in all {
                let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                let part = |fields: &serde_json::Map<String, Value>| fields.get(name).cloned().unwrap_or_default();
                differences(&path, &part(old), &part(new), names);
            }
        }
        (old, new) if old != new => names.push(prefix.to_owned()),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_settings_are_listed_by_name() {
        let old = Config::parse("limits: {max_page: 7}\nlisten: 127.0.0.1:1").unwrap();
        let new =
            Config::parse("limits: {max_page: 8}\nlisten: 127.0.0.1:1\nmodels: [{name: a, base_url: 'http://x/v1'}]");
        assert_eq!(changed_settings(&old, &new.unwrap()), ["limits.max_page", "models"]);
        assert!(changed_settings(&old, &old).is_empty());
    }
}
