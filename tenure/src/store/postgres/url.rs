//! The store's URL: what the driver takes, and what is ours.

use crate::error::{Error, Result};
use rustls::{ClientConfig, RootCertStore, crypto::ring};
use std::{sync::Arc, time::Duration};
use tokio_postgres::Config;
use tokio_postgres::config::Host;
use tokio_postgres_rustls::MakeRustlsConnect;

/// Connections of one store, unless its URL says otherwise.
const DEFAULT_POOL: usize = 16;
/// Most connections of one store.
const MAX_POOL: usize = 1024;
/// How long to wait for a connection to be made.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long sent bytes may go without an answer from the other machine before the connection counts as broken.
const DEAD_PEER_TIMEOUT: Duration = Duration::from_secs(10);
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_RETRIES: u32 = 3;
/// Longest name that PostgreSQL gives to anything.
const MAX_IDENTIFIER: usize = 63;

/// A URL, taken apart.
#[derive(Clone)]
pub(super) struct Settings {
    pub driver: Config,
    pub pool: usize,
    pub schema: Option<String>,
    pub prepare: Prepare,
}

/// Whether statements are kept prepared on their connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prepare {
    /// Yes.
    Once,
    /// No: behind a pooler that gives each transaction another connection, there is nothing to keep them on.
    Never,
}

impl Settings {
    pub fn parse(url: &str) -> Result<Self> {
        let (mut pool, mut schema, mut prepare) = (DEFAULT_POOL, None, Prepare::Once);
        // Like the driver: what comes before the first `@` is the user and the password.
        let query = url.find('@').unwrap_or(0);
        let query = url[query..].find('?').map(|at| query + at);
        let (base, query) = query.map_or((url, ""), |at| (&url[..at], &url[at + 1..]));
        let mut rest = Vec::new();
        for pair in query.split('&').filter(|p| !p.is_empty()) {
            match pair.split_once('=').unwrap_or((pair, "")) {
                ("prepare", "on") => prepare = Prepare::Once,
                ("prepare", "off") => prepare = Prepare::Never,
                ("prepare", _) => return Err(wrong("prepare must be on or off")),
                ("pool", n) => match n.parse() {
                    Ok(n) if (1..=MAX_POOL).contains(&n) => pool = n,
                    _ => return Err(wrong(format!("pool must be a number from 1 to {MAX_POOL}"))),
                },
                ("schema", name) if is_identifier(name) => schema = Some(name.to_owned()),
                ("schema", _) => {
                    return Err(wrong("schema must be a name of a-z, 0-9 and _, not starting with a digit"));
                }
                // We verify every certificate: these ask for no more than `require` does here.
                ("sslmode", "verify-ca" | "verify-full") => rest.push("sslmode=require"),
                _ => rest.push(pair),
            }
        }
        let url = if rest.is_empty() { base.to_owned() } else { format!("{base}?{}", rest.join("&")) };
        // The driver's error names the option, never its value.
        let mut driver: Config =
            url.parse().map_err(|e: tokio_postgres::Error| match std::error::Error::source(&e) {
                Some(why) => wrong(why.to_string()),
                None => wrong("use postgres://USER:PASSWORD@HOST:PORT/DATABASE"),
            })?;
        if driver.get_application_name().is_none() {
            driver.application_name("tenure");
        }
        if driver.get_connect_timeout().is_none() {
            driver.connect_timeout(CONNECT_TIMEOUT);
        }
        if driver.get_tcp_user_timeout().is_none() {
            driver.tcp_user_timeout(DEAD_PEER_TIMEOUT);
        }
        driver.keepalives(true).keepalives_idle(KEEPALIVE_IDLE);
        driver.keepalives_interval(KEEPALIVE_INTERVAL).keepalives_retries(KEEPALIVE_RETRIES);
        Ok(Self { driver, pool, schema, prepare })
    }

    /// Which database, for people. Nothing secret is in it.
    pub fn place(&self) -> String {
        let host = match self.driver.get_hosts().first() {
            Some(Host::Tcp(host)) => host.clone(),
            #[cfg(unix)]
            Some(Host::Unix(path)) => path.display().to_string(),
            None => "?".to_owned(),
        };
        let database = self.driver.get_dbname().or(self.driver.get_user()).unwrap_or_default();
        let schema = self.schema.as_deref().map(|s| format!(", schema {s}")).unwrap_or_default();
        format!("postgres at {host}/{database}{schema}")
    }
}

fn wrong(why: impl Into<String>) -> Error {
    Error::invalid("store", format!("the store's URL is not right: {}", why.into()))
}

fn is_identifier(name: &str) -> bool {
    let starts = name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
    let rest = name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
    starts && rest && name.len() <= MAX_IDENTIFIER
}

/// TLS that trusts what this system trusts.
pub(super) fn tls() -> Result<MakeRustlsConnect> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(Error::unavailable)?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"postgresql".to_vec()];
    Ok(MakeRustlsConnect::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio_postgres::config::SslMode;

    #[test]
    fn our_options_are_taken_out_of_the_url() {
        let url = "postgres://me:pw%3F@db.example:6432/app?pool=4&sslmode=require&prepare=off&schema=tenure_1";
        let s = Settings::parse(url).unwrap();
        assert_eq!((s.pool, s.schema.as_deref(), s.prepare), (4, Some("tenure_1"), Prepare::Never));
        assert_eq!((s.driver.get_ssl_mode(), s.driver.get_password()), (SslMode::Require, Some(&b"pw?"[..])));
        assert_eq!((s.driver.get_application_name(), s.driver.get_dbname()), (Some("tenure"), Some("app")));
        assert_eq!(s.place(), "postgres at db.example/app, schema tenure_1");

        let s = Settings::parse("postgresql://db.example/app").unwrap();
        assert_eq!((s.pool, s.schema, s.prepare), (DEFAULT_POOL, None, Prepare::Once));
        assert_eq!(s.driver.get_connect_timeout(), Some(&CONNECT_TIMEOUT));
        let s = Settings::parse("postgres://db.example/app?sslmode=verify-full&application_name=x").unwrap();
        assert_eq!((s.driver.get_ssl_mode(), s.driver.get_application_name()), (SslMode::Require, Some("x")));
    }

    #[test]
    fn a_wrong_url_is_refused_and_its_password_kept() {
        let urls =
            ["pool=0", "pool=x", "pool=9999", "prepare=maybe", "schema=1a", "schema=a%22b", "schema=", "sslmode=no"];
        for query in urls.into_iter().chain(["nonsense=secret"]) {
            let Err(e) = Settings::parse(&format!("postgres://me:secret@h/d?{query}")) else {
                panic!("{query} was taken")
            };
            assert_eq!(e.code(), "invalid", "{query}");
            assert!(!e.to_string().contains("secret"), "{e}");
        }
    }

    #[test]
    fn tls_can_be_set_up() {
        tls().unwrap();
    }
}
