//! Parsing of the store's URL: the options of the driver, and those of the store.
//!
//! Invariant: error messages never contain the password or the value of an option of the driver.

use crate::types::error::{Error, Result};
use rustls::{ClientConfig, RootCertStore, crypto::ring};
use std::{sync::Arc, time::Duration};
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};
use tokio_postgres_rustls::MakeRustlsConnect;

/// Default number of connections of a store.
const DEFAULT_POOL: usize = 16;
/// Maximum number of connections of a store.
const MAX_POOL: usize = 1024;
/// Default timeout for connecting to a single host (`connect_timeout`).
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Default timeout for connecting to each of several hosts. It is short, because a silent host
/// delays the others.
const CONNECT_TIMEOUT_EACH: Duration = Duration::from_secs(2);
/// Default time for which an operation is retried while the server is unavailable.
const DEFAULT_RETRY: Duration = Duration::from_secs(10);
/// Maximum value of `retry`.
const MAX_RETRY: Duration = Duration::from_secs(3600);
pub(super) const DEFAULT_PORT: u16 = 5432;
/// Maximum time that sent bytes may stay unacknowledged before the connection counts as broken.
const DEAD_PEER_TIMEOUT: Duration = Duration::from_secs(10);
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_RETRIES: u32 = 3;
/// Maximum length of a PostgreSQL identifier, in bytes.
const MAX_IDENTIFIER: usize = 63;

/// The parsed URL.
#[derive(Clone)]
pub(super) struct Settings {
    pub driver: Config,
    pub pool: usize,
    pub schema: Option<String>,
    pub prepare: Prepare,
    pub retry: Duration,
}

/// Whether prepared statements are cached on their connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prepare {
    /// Statements are prepared once for each connection.
    Once,
    /// Statements are never prepared: behind a pooler in transaction mode, each transaction may use
    /// another connection.
    Never,
}

impl Settings {
    /// Parses a URL. The store's own options are removed from it; the rest is passed to the driver.
    pub fn parse(url: &str) -> Result<Self> {
        let mut pool = DEFAULT_POOL;
        let mut schema = None;
        let mut prepare = Prepare::Once;
        let mut retry = DEFAULT_RETRY;
        let mut has_session_attributes = false;
        // Like the driver, take everything before the first `@` as user and password.
        let query = url.find('@').unwrap_or(0);
        let query = url[query..].find('?').map(|index| query + index);
        let (base, query) = query.map_or((url, ""), |index| (&url[..index], &url[index + 1..]));
        let mut driver_options = Vec::new();
        for pair in query.split('&').filter(|p| !p.is_empty()) {
            match pair.split_once('=').unwrap_or((pair, "")) {
                ("prepare", "on") => prepare = Prepare::Once,
                ("prepare", "off") => prepare = Prepare::Never,
                ("prepare", _) => return Err(invalid_url("prepare must be on or off")),
                ("pool", n) => match n.parse() {
                    Ok(n) if (1..=MAX_POOL).contains(&n) => pool = n,
                    _ => return Err(invalid_url(format!("pool must be a number from 1 to {MAX_POOL}"))),
                },
                ("retry", time) => match duration(time) {
                    Some(time) if time <= MAX_RETRY => retry = time,
                    _ => return Err(invalid_url("retry must be a time such as 500ms, 30s or 2m, at most one hour")),
                },
                ("target_session_attrs", "read-only") => {
                    return Err(invalid_url("target_session_attrs cannot be read-only: the store needs to write"));
                }
                ("target_session_attrs", _) => {
                    has_session_attributes = true;
                    driver_options.push(pair);
                }
                ("schema", name) if is_identifier(name) => schema = Some(name.to_owned()),
                ("schema", _) => {
                    return Err(invalid_url("schema must be a name of a-z, 0-9 and _, not starting with a digit"));
                }
                // Every certificate is verified, so these modes require no more than `require`
                // does.
                ("sslmode", "verify-ca" | "verify-full") => driver_options.push("sslmode=require"),
                _ => driver_options.push(pair),
            }
        }
        let url =
            if driver_options.is_empty() { base.to_owned() } else { format!("{base}?{}", driver_options.join("&")) };
        // The driver's error names the option, never its value.
        let mut driver: Config =
            url.parse().map_err(|e: tokio_postgres::Error| match std::error::Error::source(&e) {
                Some(reason) => invalid_url(reason.to_string()),
                None => invalid_url("use postgres://USER:PASSWORD@HOST:PORT/DATABASE"),
            })?;
        if driver.get_application_name().is_none() {
            driver.application_name("tenure");
        }
        if !has_session_attributes {
            driver.target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        let names = driver.get_hosts().len();
        let addresses = driver.get_hostaddrs().len();
        if names > 0 && addresses > 0 && names != addresses {
            return Err(invalid_url("the number of hostaddr values must equal the number of hosts"));
        }
        if driver.get_ports().len() > 1 && driver.get_ports().len() != names.max(addresses) {
            return Err(invalid_url("there must be one port, or one for each host"));
        }
        if driver.get_tcp_user_timeout().is_none() {
            driver.tcp_user_timeout(DEAD_PEER_TIMEOUT);
        }
        Ok(Self { driver, pool, schema, prepare, retry })
    }

    /// Returns the timeout for connecting to one host.
    pub fn host_timeout(&self) -> Duration {
        let has_several_hosts = self.driver.get_hosts().len().max(self.driver.get_hostaddrs().len()) > 1;
        let default = if has_several_hosts { CONNECT_TIMEOUT_EACH } else { CONNECT_TIMEOUT };
        self.driver.get_connect_timeout().copied().unwrap_or(default)
    }

    /// Returns one configuration for each host. The driver cannot remove hosts from a
    /// configuration, so each is built from scratch.
    pub fn hosts(&self) -> Vec<Config> {
        let driver = &self.driver;
        let names = driver.get_hosts();
        let addresses = driver.get_hostaddrs();
        let ports = driver.get_ports();
        let host = |i: usize| {
            let mut config = Config::new();
            match names.get(i) {
                Some(Host::Tcp(name)) => _ = config.host(name),
                #[cfg(unix)]
                Some(Host::Unix(path)) => _ = config.host_path(path),
                None => {}
            }
            if let Some(ip) = addresses.get(i) {
                config.hostaddr(*ip);
            }
            config.port(ports.get(i).or(ports.first()).copied().unwrap_or(DEFAULT_PORT));
            if let Some(user) = driver.get_user() {
                config.user(user);
            }
            if let Some(password) = driver.get_password() {
                config.password(password);
            }
            if let Some(name) = driver.get_dbname() {
                config.dbname(name);
            }
            if let Some(options) = driver.get_options() {
                config.options(options);
            }
            if let Some(name) = driver.get_application_name() {
                config.application_name(name);
            }
            if let Some(time) = driver.get_tcp_user_timeout() {
                config.tcp_user_timeout(*time);
            }
            config.ssl_mode(driver.get_ssl_mode()).ssl_negotiation(driver.get_ssl_negotiation());
            config
                .channel_binding(driver.get_channel_binding())
                .target_session_attrs(driver.get_target_session_attrs());
            config.connect_timeout(self.host_timeout());
            config.keepalives(true).keepalives_idle(KEEPALIVE_IDLE);
            config.keepalives_interval(KEEPALIVE_INTERVAL).keepalives_retries(KEEPALIVE_RETRIES);
            config
        };
        (0..names.len().max(addresses.len())).map(host).collect()
    }

    /// Describes the database for people, without secrets.
    pub fn describe(&self) -> String {
        let host = self.hosts().iter().map(host_name).collect::<Vec<_>>().join(",");
        let database = self.driver.get_dbname().or(self.driver.get_user()).unwrap_or_default();
        let schema = self.schema.as_deref().map(|s| format!(", schema {s}")).unwrap_or_default();
        format!("postgres at {host}/{database}{schema}")
    }
}

fn invalid_url(reason: impl Into<String>) -> Error {
    Error::invalid("store", format!("invalid store URL: {}", reason.into()))
}

fn is_identifier(name: &str) -> bool {
    let has_valid_start = name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
    let has_valid_characters = name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
    has_valid_start && has_valid_characters && name.len() <= MAX_IDENTIFIER
}

/// Parses a whole number of milliseconds, seconds or minutes.
fn duration(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let number: u64 = number.parse().ok()?;
    match unit {
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_secs(number.checked_mul(60)?)),
        _ => None,
    }
}

/// Creates the TLS configuration, which trusts the root certificates of this system. With
/// `Disable`, none are loaded.
pub(super) fn tls(mode: SslMode) -> Result<MakeRustlsConnect> {
    let mut roots = RootCertStore::empty();
    if mode != SslMode::Disable {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    }
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(Error::unavailable_from)?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"postgresql".to_vec()];
    Ok(MakeRustlsConnect::new(config))
}

/// Returns a host with its port, for people.
pub(super) fn host_name(host: &Config) -> String {
    let port = host.get_ports().first().copied().unwrap_or(super::url::DEFAULT_PORT);
    match (host.get_hosts().first(), host.get_hostaddrs().first()) {
        (Some(Host::Tcp(name)), _) => format!("{name}:{port}"),
        #[cfg(unix)]
        (Some(Host::Unix(path)), _) => format!("{}:{port}", path.display()),
        (None, Some(ip)) => format!("{ip}:{port}"),
        (None, None) => "?".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stores_options_are_removed_from_the_url() {
        let url = "postgres://me:pw%3F@db.example:6432/app?pool=4&sslmode=require&prepare=off&schema=tenure_1";
        let s = Settings::parse(url).unwrap();
        assert_eq!((s.pool, s.schema.as_deref(), s.prepare), (4, Some("tenure_1"), Prepare::Never));
        assert_eq!((s.driver.get_ssl_mode(), s.driver.get_password()), (SslMode::Require, Some(&b"pw?"[..])));
        assert_eq!((s.driver.get_application_name(), s.driver.get_dbname()), (Some("tenure"), Some("app")));
        assert_eq!(s.describe(), "postgres at db.example:6432/app, schema tenure_1");

        let s = Settings::parse("postgresql://db.example/app").unwrap();
        assert_eq!((s.pool, s.schema.as_deref(), s.prepare), (DEFAULT_POOL, None, Prepare::Once));
        assert_eq!((s.host_timeout(), s.retry), (CONNECT_TIMEOUT, DEFAULT_RETRY));
        assert_eq!(s.driver.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
        let s = Settings::parse("postgres://db.example/app?sslmode=verify-full&application_name=x").unwrap();
        assert_eq!((s.driver.get_ssl_mode(), s.driver.get_application_name()), (SslMode::Require, Some("x")));
    }

    #[test]
    fn each_host_has_its_own_settings() {
        let url = "postgres://me:pw@a:1,b:2,c:3/app?application_name=x&options=-cwork_mem%3D4MB&sslmode=require";
        let s = Settings::parse(url).unwrap();
        assert_eq!(s.describe(), "postgres at a:1,b:2,c:3/app");
        let hosts = s.hosts();
        assert_eq!(hosts.iter().map(host_name).collect::<Vec<_>>(), ["a:1", "b:2", "c:3"]);
        for host in &hosts {
            assert_eq!((host.get_hosts().len(), host.get_ports().len()), (1, 1));
            assert_eq!(
                (host.get_user(), host.get_password(), host.get_dbname()),
                (Some("me"), Some(&b"pw"[..]), Some("app"))
            );
            assert_eq!((host.get_application_name(), host.get_options()), (Some("x"), Some("-cwork_mem=4MB")));
            assert_eq!(host.get_ssl_mode(), SslMode::Require);
            assert_eq!(host.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
            assert_eq!(host.get_connect_timeout(), Some(&CONNECT_TIMEOUT_EACH));
            assert_eq!(host.get_tcp_user_timeout(), Some(&DEAD_PEER_TIMEOUT));
        }
        let s = Settings::parse("postgres://a,b:7/app?connect_timeout=9&target_session_attrs=any&retry=2m").unwrap();
        assert_eq!((s.host_timeout(), s.retry), (Duration::from_secs(9), Duration::from_secs(120)));
        assert_eq!(s.hosts()[0].get_target_session_attrs(), TargetSessionAttrs::Any);
        assert_eq!(s.describe(), "postgres at a:5432,b:7/app");
    }

    #[test]
    fn an_invalid_url_is_rejected_without_showing_its_password() {
        let urls =
            ["pool=0", "pool=x", "pool=9999", "prepare=maybe", "schema=1a", "schema=a%22b", "schema=", "sslmode=no"];
        let times = ["retry=", "retry=5", "retry=s", "retry=61m", "retry=-1s", "target_session_attrs=read-only"];
        for query in urls.into_iter().chain(times).chain(["nonsense=secret"]) {
            let Err(e) = Settings::parse(&format!("postgres://me:secret@h/d?{query}")) else {
                panic!("{query} was accepted")
            };
            assert_eq!(e.code(), "invalid", "{query}");
            assert!(!e.to_string().contains("secret"), "{e}");
        }
    }

    #[test]
    fn tls_can_be_set_up() {
        for mode in [SslMode::Disable, SslMode::Require] {
            tls(mode).unwrap();
        }
    }
}
