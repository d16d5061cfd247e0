//! Host selection: connects to the host that is the primary, and detects failovers (D-039).
//!
//! Every host has its own timeout for all steps of connecting: name lookup, TCP, TLS, login, and
//! the check that it accepts writes. The driver has no timeout after TCP, so a host that accepts a
//! connection and then stays silent (a frozen process, a machine behind a partition) would block
//! all others. Attempts are staggered, starting with the host that worked last.

use super::url::{Settings, tls};
use crate::store::postgres::failure::FailureKind;
use crate::store::postgres::url::host_name;
use crate::types::error::Result;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::net::lookup_host;
use tokio::sync::{Mutex, watch};
use tokio::time::{sleep, timeout};
use tokio_postgres::config::Host;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Client, Config, Connection, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;

/// Delay after which the next host is tried, unless the previous one has failed before.
const STAGGER: Duration = Duration::from_millis(250);
/// Time without a response after which a statement may be waiting for a dead host. The primary is
/// then searched for, at this interval.
const PROBE_AFTER: Duration = Duration::from_secs(1);
/// The value of `current` while no host has worked yet.
const NONE: usize = usize::MAX;

/// A client and its connection, which must be polled.
pub(super) type ConnectedHost = (Client, Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>);

/// The hosts of the URL, and the one that is currently the primary.
pub(super) struct Hosts {
    /// One configuration for each host of the URL.
    hosts: Vec<Config>,
    tls: MakeRustlsConnect,
    /// Timeout for connecting to one host.
    limit: Duration,
    /// The index of the host that worked last.
    current: AtomicUsize,
    /// The number of detected failovers. Connections of an earlier generation are not reused.
    generation: watch::Sender<u64>,
    /// Held while the primary is searched for: one search serves all waiting statements.
    probing: Mutex<()>,
}

impl Hosts {
    pub fn new(settings: &Settings) -> Result<Self> {
        let hosts = settings.hosts();
        let limit = settings.host_timeout();
        let tls = tls(settings.driver.get_ssl_mode())?;
        let generation = watch::Sender::new(0);
        let probing = Mutex::default();
        Ok(Self { hosts, tls, limit, current: AtomicUsize::new(NONE), generation, probing })
    }

    /// Connects to the first host that accepts writes.
    pub async fn connect(&self) -> Result<ConnectedHost, FailureKind> {
        let last = self.current.load(Ordering::Relaxed);
        let mut order: Vec<usize> = (0..self.hosts.len()).collect();
        order.sort_by_key(|i| *i != last);
        let attempts = order.iter().map(|i| self.connect_host(&self.hosts[*i])).collect();
        let (winner, connected) = first_success(attempts).await.map_err(|failures| combine_failures(failures, "; "))?;
        self.record_primary(order[winner]);
        Ok(connected)
    }

    async fn connect_host(&self, host: &Config) -> Result<ConnectedHost, FailureKind> {
        let connect = async {
            let addresses = addresses(host).await?;
            let attempts = addresses.iter().map(|address| async move {
                let mut config = host.clone();
                if let Some(ip) = address {
                    config.hostaddr(*ip);
                }
                config.connect(self.tls.clone()).await.map_err(FailureKind::from)
            });
            let connected = first_success(attempts.collect()).await;
            connected.map(|(_, connected)| connected).map_err(|failures| combine_failures(failures, ", "))
        };
        let timeout_failure = || FailureKind::lost(format!("timeout: no response within {:?}", self.limit));
        let connected = timeout(self.limit, connect).await.unwrap_or_else(|_| Err(timeout_failure()));
        connected.map_err(|failure| failure.with_host(&host_name(host)))
    }

    /// Records which host works. If it has changed, connections to the previous one are no longer
    /// used.
    fn record_primary(&self, host: usize) {
        let previous = self.current.swap(host, Ordering::Relaxed);
        if previous != NONE && previous != host {
            tracing::warn!(host = host_name(&self.hosts[host]), "another PostgreSQL host accepts writes now");
            self.invalidate_connections();
        }
    }

    /// Invalidates all existing connections: their host is no longer the primary.
    pub fn invalidate_connections(&self) {
        self.generation.send_modify(|generation| *generation += 1);
    }

    pub fn generation(&self) -> u64 {
        *self.generation.borrow()
    }

    /// Completes when another host has become the primary since the given generation.
    pub async fn wait_for_failover(&self, since: u64) {
        drop(self.generation.subscribe().wait_for(|now| *now != since).await);
    }

    /// Completes when another host has become the primary, for a statement that waits for its
    /// response. After `PROBE_AFTER` it searches for the primary, because a connection to a frozen
    /// host never fails by itself.
    pub async fn wait_until_replaced(&self, since: u64) {
        sleep(PROBE_AFTER).await;
        if self.hosts.len() < 2 {
            return self.wait_for_failover(since).await;
        }
        let probe = async {
            loop {
                let probing = self.probing.lock().await;
                // `connect` records the host that it finds. That there is no primary yet is no
                // reason to stop.
                drop(self.connect().await);
                sleep(PROBE_AFTER).await;
                drop(probing);
            }
        };
        tokio::select! {
            () = self.wait_for_failover(since) => {}
            () = probe => {}
        }
    }
}

/// Resolves the name of a host. The element `None` means that the driver needs no lookup.
async fn addresses(host: &Config) -> Result<Vec<Option<IpAddr>>, FailureKind> {
    let (Some(Host::Tcp(name)), []) = (host.get_hosts().first(), host.get_hostaddrs()) else { return Ok(vec![None]) };
    let port = host.get_ports().first().copied().unwrap_or(super::url::DEFAULT_PORT);
    let addresses = lookup_host((name.as_str(), port)).await.map_err(FailureKind::from)?;
    let mut addresses: Vec<_> = addresses.map(|address| Some(address.ip())).collect();
    addresses.dedup();
    if addresses.is_empty() {
        return Err(FailureKind::lost("the host name resolves to no address"));
    }
    Ok(addresses)
}

/// Returns the first attempt that succeeds, with its index. Each attempt starts when all before it
/// have failed, or after its stagger delay.
async fn first_success<T, F: Future<Output = Result<T, FailureKind>>>(
    attempts: Vec<F>,
) -> Result<(usize, T), Vec<FailureKind>> {
    let failure_count = watch::Sender::new(0);
    let staggered = attempts.into_iter().enumerate().map(|(i, attempt)| {
        let mut failures = failure_count.subscribe();
        async move {
            let _ = timeout(STAGGER * i as u32, failures.wait_for(|n| *n >= i)).await;
            attempt.await
        }
    });
    let mut attempts: FuturesUnordered<_> =
        staggered.enumerate().map(|(host, attempt)| async move { (host, attempt.await) }).collect();
    let mut failures = Vec::new();
    while let Some((host, outcome)) = attempts.next().await {
        match outcome {
            Ok(value) => return Ok((host, value)),
            Err(failure) => {
                failures.push(failure);
                failure_count.send_modify(|n| *n += 1);
            }
        }
    }
    Err(failures)
}

/// Combines the failures of several hosts. The result can be retried unless all of them are final.
fn combine_failures(failures: Vec<FailureKind>, separator: &str) -> FailureKind {
    let mut failures = failures;
    if failures.iter().all(|failure| matches!(failure, FailureKind::Final(_))) || failures.len() == 1 {
        return failures.pop().unwrap_or_else(|| FailureKind::lost("the URL names no host"));
    }
    FailureKind::combined(failures, separator)
}
