//! Admission, eviction and idle timeouts of the server's connections.
//!
//! A connection that has carried an authenticated request is preferred to one that has not, so that clients without
//! a key cannot lock out clients with one (D-107).

use crate::clock::Stopwatch;
use crate::config::Config;
use crate::config::TrustedProxies;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// The open connections and their limits.
#[derive(Debug)]
pub struct Connections {
    max: usize,
    max_per_address: usize,
    trusted: TrustedProxies,
    header_timeout: Option<Duration>,
    idle_timeout: Option<Duration>,
    clock: Stopwatch,
    table: Mutex<ConnectionTable>,
    /// Notified when the last connection is closed.
    closed: Notify,
}

#[derive(Debug, Default)]
struct ConnectionTable {
    next_id: u64,
    open: HashMap<u64, Arc<Connection>>,
    per_address: HashMap<IpAddr, usize>,
    /// Number of admitted connections that still exist, including evicted ones that are being closed.
    alive: usize,
}

/// The limit that rejected a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimitReached {
    /// The limit's name in the configuration.
    pub limit: &'static str,
    /// The limit's value.
    pub max: usize,
}

/// Why the server closes a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// It was evicted to admit another connection.
    Evicted,
    /// It had no request for longer than the timeout of this name.
    Idle(&'static str),
}

impl CloseReason {
    /// The metrics label: the name of the timeout, or `evicted`.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Evicted => "evicted",
            Self::Idle(limit) => limit,
        }
    }
}

/// The state of one connection. Requests carry it as an extension.
#[derive(Debug)]
pub struct Connection {
    id: u64,
    address: IpAddr,
    authenticated: AtomicBool,
    /// Number of requests whose response is not complete.
    in_flight: AtomicUsize,
    /// True if there has been a request.
    used: AtomicBool,
    /// When a request last began or ended, in milliseconds since the server started.
    active_at: AtomicU64,
    /// Bytes received while no request was in flight.
    idle_bytes: AtomicU64,
    /// True if a response was sent before its request was read to the end.
    unread: AtomicBool,
    clock: Stopwatch,
    evicted: Notify,
}

/// An admitted connection. Dropping it releases its slot.
#[derive(Debug)]
pub struct AdmittedConnection {
    connections: Arc<Connections>,
    connection: Arc<Connection>,
}

/// A request in flight. Dropping it ends the request.
#[derive(Debug)]
pub struct InFlight(Arc<Connection>);

/// Maximum number of bytes received without a request. A client that exceeds it sends only control frames, such as
/// pings.
const MAX_IDLE_BYTES: u64 = 4 << 20;

impl Connections {
    /// Creates an empty set of connections with the configured limits.
    pub fn new(config: &Config) -> Arc<Self> {
        let limits = &config.limits;
        Arc::new(Self {
            max: limits.max_connections,
            max_per_address: limits.max_connections_per_address,
            trusted: config.trusted_proxies.clone(),
            header_timeout: limits.header_timeout.duration(),
            idle_timeout: limits.idle_timeout.duration(),
            clock: Stopwatch::start(),
            table: Mutex::default(),
            closed: Notify::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a connection. At a limit, another connection is evicted to make room if possible; see
    /// `ConnectionTable::evict`. Trusted proxies are exempt from the limit per address.
    pub fn admit(self: &Arc<Self>, address: IpAddr) -> Result<AdmittedConnection, ConnectionLimitReached> {
        let is_trusted = self.trusted.contains(address);
        let address = counting_address(address);
        let mut table = self.lock();
        let open_from_address = table.per_address.get(&address).copied().unwrap_or(0);
        if open_from_address >= self.max_per_address && !is_trusted && !table.evict(|other| other.address == address) {
            return Err(ConnectionLimitReached { limit: "max_connections_per_address", max: self.max_per_address });
        }
        if table.open.len() >= self.max && !table.evict(|_| true) {
            return Err(ConnectionLimitReached { limit: "max_connections", max: self.max });
        }
        table.next_id += 1;
        let connection = Arc::new(Connection {
            id: table.next_id,
            address,
            authenticated: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
            used: AtomicBool::new(false),
            active_at: AtomicU64::new(millis(self.clock.elapsed())),
            idle_bytes: AtomicU64::new(0),
            unread: AtomicBool::new(false),
            clock: self.clock,
            evicted: Notify::new(),
        });
        table.open.insert(connection.id, connection.clone());
        *table.per_address.entry(address).or_default() += 1;
        table.alive += 1;
        Ok(AdmittedConnection { connections: self.clone(), connection })
    }

    /// Completes when every connection is closed.
    pub async fn all_closed(&self) {
        loop {
            let closed = self.closed.notified();
            if self.lock().alive == 0 {
                return;
            }
            closed.await;
        }
    }
}

impl ConnectionTable {
    /// Closes one connection that satisfies `is_candidate` to make room, and returns false if none can be closed.
    /// The order is: the longest idle connection that has never authenticated; then an unauthenticated one with a
    /// request in flight; then the longest idle authenticated one. An authenticated connection with a request in
    /// flight is never closed (D-107).
    fn evict(&mut self, is_candidate: impl Fn(&Connection) -> bool) -> bool {
        let candidates = self.open.values().filter(|c| is_candidate(c));
        let ranked = candidates.filter_map(|c| Some((c.eviction_rank()?, c.active_at.load(Relaxed), c.id)));
        let Some((_, _, id)) = ranked.min() else { return false };
        if let Some(connection) = self.remove(id) {
            connection.evicted.notify_one();
        }
        true
    }

    fn remove(&mut self, id: u64) -> Option<Arc<Connection>> {
        let connection = self.open.remove(&id)?;
        if let Some(count) = self.per_address.get_mut(&connection.address) {
            *count -= 1;
            if *count == 0 {
                self.per_address.remove(&connection.address);
            }
        }
        Some(connection)
    }
}

impl Connection {
    /// The eviction rank: lower ranks are closed first. `None` means that the connection is never evicted.
    fn eviction_rank(&self) -> Option<u8> {
        match (self.authenticated.load(Relaxed), self.in_flight.load(Relaxed) > 0) {
            (false, false) => Some(0),
            (false, true) => Some(1),
            (true, false) => Some(2),
            (true, true) => None,
        }
    }

    /// Records the start of a request. The request is in flight until the guard is dropped.
    pub fn begin_request(self: &Arc<Self>) -> InFlight {
        self.in_flight.fetch_add(1, Relaxed);
        self.used.store(true, Relaxed);
        self.idle_bytes.store(0, Relaxed);
        self.touch();
        InFlight(self.clone())
    }

    /// Returns true if a request on this connection was authenticated.
    pub fn is_authenticated(&self) -> bool {
        self.authenticated.load(Relaxed)
    }

    /// Records that a request on this connection was authenticated.
    pub fn mark_authenticated(&self) {
        self.authenticated.store(true, Relaxed);
    }

    /// Records that a response is sent without reading the rest of the request's body.
    pub fn mark_unread(&self) {
        self.unread.store(true, Relaxed);
    }

    /// Returns true if the client may still be sending bytes that will not be read.
    pub fn has_unread(&self) -> bool {
        self.unread.load(Relaxed)
    }

    /// Counts received bytes. Returns true if more than `MAX_IDLE_BYTES` were received without a request.
    pub fn record_received(&self, bytes: usize) -> bool {
        self.in_flight.load(Relaxed) == 0
            && self.idle_bytes.fetch_add(bytes as u64, Relaxed) + bytes as u64 > MAX_IDLE_BYTES
    }

    fn touch(&self) {
        self.active_at.store(millis(self.clock.elapsed()), Relaxed);
    }

    fn idle_for(&self) -> Duration {
        let now = millis(self.clock.elapsed());
        Duration::from_millis(now.saturating_sub(self.active_at.load(Relaxed)))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // The time is updated first: a reader that sees no request in flight must not see the time at which the
        // last one began.
        self.0.touch();
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

impl AdmittedConnection {
    /// The state that requests carry as an extension.
    pub fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Completes when the connection is to be closed: it was evicted, or had no request for too long. Only requests
    /// count as activity: neither pings nor half a request keep a connection open.
    pub async fn wait_for_close(&self) -> CloseReason {
        tokio::select! {
            () = self.connection.evicted.notified() => CloseReason::Evicted,
            limit = self.wait_for_idle_timeout() => CloseReason::Idle(limit),
        }
    }

    async fn wait_for_idle_timeout(&self) -> &'static str {
        let before_first_request = self.connections.header_timeout.map(|max| ("header_timeout", max));
        let between_requests = self.connections.idle_timeout.map(|max| ("idle_timeout", max));
        loop {
            let used = self.connection.used.load(Relaxed);
            let Some((limit, max)) = (if used { between_requests } else { before_first_request }) else {
                // Without `header_timeout` it may still receive a request, and is then subject to `idle_timeout`.
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            };
            let idle = self.connection.idle_for();
            let busy = self.connection.in_flight.load(Relaxed) > 0;
            if !busy && idle >= max {
                return limit;
            }
            tokio::time::sleep(if busy { max } else { max - idle }).await;
        }
    }
}

impl Drop for AdmittedConnection {
    fn drop(&mut self) {
        let mut table = self.connections.lock();
        table.remove(self.connection.id);
        table.alive -= 1;
        if table.alive == 0 {
            self.connections.closed.notify_waiters();
        }
    }
}

/// The address under which connections are counted. IPv6 addresses are reduced to their /64 network, because a
/// client usually owns a whole one.
fn counting_address(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)),
        v4 => v4,
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections(yaml: &str) -> Arc<Connections> {
        Connections::new(&Config::parse(yaml).unwrap())
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// The order of eviction: unauthenticated before authenticated, idle before busy, oldest first; an
    /// authenticated connection with a request in flight is never closed.
    #[test]
    fn the_least_useful_connection_is_evicted_first() {
        let all = connections("limits: {max_connections: 4}");
        let open: Vec<_> = (1..=4).map(|i| all.admit(ip(&format!("10.0.0.{i}"))).unwrap()).collect();
        let is_open = |i: usize| all.lock().open.contains_key(&open[i].connection.id);
        open[0].connection.mark_authenticated();
        open[1].connection.mark_authenticated();
        let _busy = (open[1].connection.begin_request(), open[2].connection.begin_request());
        for (i, evicted) in [3, 2, 0].into_iter().enumerate() {
            let new = all.admit(ip("10.0.0.9")).unwrap();
            assert!(!is_open(evicted), "{i}");
            // The freed slot was taken by an authenticated connection.
            new.connection.mark_authenticated();
            std::mem::forget(new.connection.begin_request());
            std::mem::forget(new);
        }
        assert!(is_open(1));
        let refused = all.admit(ip("10.0.0.10")).unwrap_err();
        assert_eq!(refused, ConnectionLimitReached { limit: "max_connections", max: 4 });
    }

    #[test]
    fn an_address_has_a_limit_of_its_own() {
        let all =
            connections("trusted_proxies: [10.9.0.0/16, '2001:db8:9::5']\nlimits: {max_connections_per_address: 2}");
        let busy = |address: &str| {
            let admitted = all.admit(ip(address))?;
            admitted.connection.mark_authenticated();
            std::mem::forget(admitted.connection.begin_request());
            Ok::<_, ConnectionLimitReached>(admitted)
        };
        let first = busy("10.0.0.1").unwrap();
        let _second = busy("::ffff:10.0.0.1").unwrap();
        assert_eq!(busy("10.0.0.1").unwrap_err().limit, "max_connections_per_address");
        let _other = busy("10.0.0.2").unwrap();
        let _proxy: Vec<_> = (0..5).map(|_| busy("10.9.0.1").unwrap()).collect();
        let _network = [busy("2001:db8::1").unwrap(), busy("2001:db8::2").unwrap()];
        assert!(busy("2001:db8::3").is_err() && busy("2001:db8:0:1::3").is_ok());
        let _proxy: Vec<_> = (0..5).map(|_| busy("2001:db8:9::5").unwrap()).collect();
        drop(first);
        assert!(busy("10.0.0.1").is_ok());
        // An idle connection is evicted for the next one from the same address.
        let idle = all.admit(ip("10.0.0.3")).unwrap();
        let _a = busy("10.0.0.3").unwrap();
        let _b = busy("10.0.0.3").unwrap();
        assert!(!all.lock().open.contains_key(&idle.connection.id));
    }

    #[tokio::test]
    async fn idle_connections_are_closed() {
        let all = connections("limits: {header_timeout: 40ms, idle_timeout: 80ms}");
        let silent = all.admit(ip("10.0.0.1")).unwrap();
        assert_eq!(silent.wait_for_close().await, CloseReason::Idle("header_timeout"));
        let used = all.admit(ip("10.0.0.1")).unwrap();
        drop(used.connection.begin_request());
        assert_eq!(used.wait_for_close().await, CloseReason::Idle("idle_timeout"));
        let busy = all.admit(ip("10.0.0.1")).unwrap();
        let _request = busy.connection.begin_request();
        assert!(tokio::time::timeout(Duration::from_millis(200), busy.wait_for_close()).await.is_err());
    }

    #[test]
    fn bytes_without_a_request_are_limited() {
        let all = connections("");
        let open = all.admit(ip("10.0.0.1")).unwrap();
        let flood = |open: &AdmittedConnection| (0..300).any(|_| open.connection.record_received(16 << 10));
        assert!(flood(&open));
        let request = open.connection.begin_request();
        assert!(!flood(&open), "a body may be of any size");
        drop(request);
        assert!(!open.connection.record_received(1 << 20));
    }
}
