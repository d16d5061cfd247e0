//! `tenure healthcheck`: asks a running server whether it is ready. For containers without a shell or curl.

use super::client::ApiClient;
use super::output::line;
use super::target::TargetArgs;
use crate::config;
use anyhow::bail;
use clap::Args;
use serde_json::Value;
use std::net::SocketAddr;
use std::time::Duration;

/// What to check.
#[derive(Debug, Args)]
pub struct HealthcheckArgs {
    /// Only check that the process answers, not that its store can be read and written
    #[arg(long)]
    live: bool,
    /// Give up after this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 2)]
    timeout: u64,
}

impl HealthcheckArgs {
    /// Asks the server of `--server`, else the one that the configuration starts on this machine. An error means that it
    /// is not ready.
    pub async fn run(&self, target: &TargetArgs) -> anyhow::Result<()> {
        let (server, _) = config::remote_from_environment();
        let server = match target.server.clone().or(server) {
            Some(server) => server,
            None => format!("http://{}", local_address(&target.load(&[])?.listen)?),
        };
        let path = if self.live { "/healthz" } else { "/readyz" };
        let client = ApiClient::remote(&server, None, None)?;
        let limit = Duration::from_secs(self.timeout.max(1));
        let Ok(health) = tokio::time::timeout(limit, client.get::<Value>(path)).await else {
            bail!("{server}{path} did not answer within {} s", limit.as_secs());
        };
        line(health?["status"].as_str().unwrap_or_default())?;
        Ok(())
    }
}

/// The address of this machine at which a server that listens on `listen` can be reached.
fn local_address(listen: &str) -> anyhow::Result<String> {
    let Ok(mut address) = listen.parse::<SocketAddr>() else { return Ok(listen.to_owned()) };
    if address.port() == 0 {
        bail!("the server listens on a port that the system chooses; name it with --server URL");
    }
    if address.ip().is_unspecified() {
        address.set_ip(if address.is_ipv4() { [127, 0, 0, 1].into() } else { std::net::Ipv6Addr::LOCALHOST.into() });
    }
    Ok(address.to_string())
}

#[cfg(test)]
mod tests {
    use super::local_address;

    #[test]
    fn an_unspecified_address_is_reached_on_loopback() {
        for (listen, want) in [
            ("0.0.0.0:8787", "127.0.0.1:8787"),
            ("[::]:8787", "[::1]:8787"),
            ("10.1.2.3:80", "10.1.2.3:80"),
            ("localhost:8787", "localhost:8787"),
        ] {
            assert_eq!(local_address(listen).unwrap(), want);
        }
        assert!(local_address("127.0.0.1:0").is_err());
    }
}
