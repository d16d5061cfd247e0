//! Behavior when the connection or the server fails.

use super::*;
use crate::store::contract::Notifier;
use crate::types::error::Error;
use std::error::Error as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::task::JoinSet;

const FORWARD: u8 = 0;
/// Close the connection instead of forwarding the next request.
const DROP_REQUEST: u8 = 1;
/// Forward the next request, and close the connection instead of forwarding the response.
const DROP_RESPONSE: u8 = 2;

/// Accept data and never respond, like a frozen process or an unreachable machine.
const FREEZE: u8 = 3;

/// A proxy between the store and the server that injects faults into connections.
struct Proxy {
    port: u16,
    fault: Arc<AtomicU8>,
    _task: JoinSet<()>,
}

impl Proxy {
    async fn new(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let fault = Arc::new(AtomicU8::new(FORWARD));
        let mut task = JoinSet::new();
        let proxy_fault = fault.clone();
        task.spawn(async move {
            let mut pairs = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(&server).await.unwrap();
                pairs.spawn(forward(client, server, proxy_fault.clone()));
            }
        });
        Self { port, fault, _task: task }
    }

    /// Returns the URL of a store that connects through this proxy.
    fn url(&self, db: &Db) -> String {
        let (_, rest) = db.url.rsplit_once('@').unwrap();
        let (_, path) = rest.split_once('/').unwrap();
        format!("postgres://postgres@127.0.0.1:{}/{path}", self.port)
    }
}

async fn forward(mut client: TcpStream, mut server: TcpStream, fault: Arc<AtomicU8>) {
    let mut up = vec![0; 1 << 16];
    let mut down = vec![0; 1 << 16];
    let take_fault = |expected| fault.compare_exchange(expected, FORWARD, SeqCst, SeqCst).is_ok();
    let is_frozen = || fault.load(SeqCst) == FREEZE;
    let mut has_request = false;
    loop {
        tokio::select! {
            n = client.read(&mut up) => match n {
                Ok(n) if n > 0 && is_frozen() => std::future::pending().await,
                Ok(n) if n > 0 && !take_fault(DROP_REQUEST) => {
                    has_request = true;
                    if server.write_all(&up[..n]).await.is_err() { return }
                }
                _ => return,
            },
            n = server.read(&mut down) => match n {
                Ok(n) if n > 0 && is_frozen() => std::future::pending().await,
                // When a response arrives, the server has executed the request.
                Ok(n) if n > 0 && !(has_request && take_fault(DROP_RESPONSE)) => {
                    if client.write_all(&down[..n]).await.is_err() { return }
                }
                _ => return,
            },
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_connection_neither_loses_nor_repeats_a_commit() {
    let Some(db) = Db::new("pool=1").await else { return };
    let address = db.url.split(['@', '?']).nth(1).unwrap().split('/').next().unwrap().to_owned();
    let proxy = Proxy::new(address).await;
    for options in ["", "&prepare=off"] {
        let store = PostgresStore::open(&(proxy.url(&db) + options)).await.unwrap();
        let name = format!("a{}", options.len());
        for fault in [DROP_REQUEST, DROP_RESPONSE] {
            // Creation, appends, a commit of the head alone, and reads: the connection of each
            // breaks once.
            proxy.fault.store(fault, SeqCst);
            let mut w = Writer::create(&store, &format!("{name}-{fault}")).await.unwrap();
            assert_eq!(proxy.fault.load(SeqCst), FORWARD, "the fault occurred");
            for n in 0..3 {
                w.append(&store, [user_message("calm")]).await.unwrap();
                proxy.fault.store(fault, SeqCst);
                w.append(&store, [user_message(&format!("{n}")), user_message("x")]).await.unwrap();
                assert_eq!(proxy.fault.load(SeqCst), FORWARD, "the fault occurred");
            }
            proxy.fault.store(fault, SeqCst);
            w.append(&store, []).await.unwrap();
            proxy.fault.store(fault, SeqCst);
            assert_eq!(store.head(&w.head.key()).await.unwrap(), Some(w.head.clone()));
            proxy.fault.store(fault, SeqCst);
            assert_eq!(read_all(&store, &w.head.key()).await.len(), 10);
            // Another writer commits first while the outcome of this commit is unknown: it was not
            // applied.
            let stale = w.clone();
            w.append(&db.store, [user_message("other")]).await.unwrap();
            proxy.fault.store(fault, SeqCst);
            let error = { stale }.append(&store, [user_message("late")]).await.unwrap_err();
            assert!(matches!(error, Error::Conflict { .. }), "{error}");
            proxy.fault.store(fault, SeqCst);
            let other = SessionCreated { title: Some("x".to_owned()), ..SessionCreated::default() };
            let error = Writer::begin(&store, w.head.info.session_id.as_str(), other).await.unwrap_err();
            assert!(matches!(error, Error::Exists { .. }), "{error}");
            proxy.fault.store(fault, SeqCst);
            store.purge(&w.head.key()).await.unwrap();
            assert_eq!(store.head(&w.head.key()).await.unwrap(), None);
        }
    }
    drop(proxy);
}

/// Runs the script that manages a test server. This test has its own server, because it kills it.
async fn server_script(verb: &str) -> String {
    server_script_for("store-faults", verb).await
}

async fn server_script_for(name: &str, verb: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/postgres.sh");
    let run = Command::new("bash").arg(path).arg(verb).env("TENURE_TEST_PG_NAME", name).output().await.unwrap();
    assert!(run.status.success(), "{verb}: {}", String::from_utf8_lossy(&run.stderr));
    String::from_utf8(run.stdout).unwrap().trim().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_the_server_loses_no_acknowledged_commit() {
    if postgres_server().is_none() {
        return;
    }
    let url = server_script("start").await;
    let db = Db::at(&url, "pool=8").await;
    let store = Arc::new(db.store);
    let stop = Arc::new(AtomicBool::new(false));
    let mut writers = JoinSet::new();
    for n in 0..8 {
        let mut w = Writer::create(&store, &format!("s{n}")).await.unwrap();
        let store = store.clone();
        let stop = stop.clone();
        writers.spawn(async move {
            while !stop.load(SeqCst) {
                w.append(&store, [user_message("a"), user_message("b")]).await.unwrap();
            }
            w.head
        });
    }
    for restart in [true, true, false] {
        // Until every writer has committed again.
        for n in 0..8 {
            let seq = || async { store.head(&key(&format!("s{n}"))).await.unwrap().unwrap().seq };
            let before = seq().await;
            while seq().await < before + 6 {
                tokio::task::yield_now().await;
            }
        }
        if restart {
            assert_eq!(server_script("restart").await, url);
        }
    }
    stop.store(true, SeqCst);
    for head in writers.join_all().await {
        let records = read_all(&*store, &head.key()).await;
        assert_eq!(Session::replay(&head.key(), records).unwrap().head(), &head, "all of it, once");
    }

    // While the server is down, an operation fails with a clear error.
    server_script("kill").await;
    let key = key("s0");
    let (read, write) = tokio::join!(store.head(&key), Writer::create(&store, "new"));
    for error in [read.unwrap_err(), write.unwrap_err()] {
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    }
    server_script("start").await;
    assert!(store.head(&key).await.unwrap().is_some());
    server_script("stop").await;
}

/// An error keeps the error of the driver as its source.
#[tokio::test]
async fn errors_keep_their_source() {
    let Some(db) = Db::new("").await else { return };
    let driver_error = |e: Error| {
        let cause = e.source().and_then(|source| source.downcast_ref::<tokio_postgres::Error>());
        cause.map(|cause| cause.code().map(|code| code.code().to_owned()))
    };
    // The connection breaks, and cannot be opened again.
    let address = db.url.split(['@', '?']).nth(1).unwrap().split('/').next().unwrap().to_owned();
    let proxy = Proxy::new(address).await;
    let store = PostgresStore::open(&(proxy.url(&db) + "&retry=100ms")).await.unwrap();
    drop(proxy);
    let error = store.head(&key("a")).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert_eq!(driver_error(error), Some(None));

    // The server rejects a statement.
    db.rows("DROP TABLE tenure_head CASCADE").await;
    let error = db.store.head(&key("a")).await.unwrap_err();
    assert!(error.to_string().ends_with("does not exist (42P01)"), "{error}");
    assert_eq!(driver_error(error), Some(Some("42P01".to_owned())));
}

/// Notifications reach other nodes, not the sender. A listener that lost its connection receives a
/// gap, and then notifications again.
#[tokio::test(flavor = "multi_thread")]
async fn other_nodes_are_notified() {
    let Some(db) = Db::new("application_name=ear").await else { return };
    let other = PostgresStore::open(&db.url).await.unwrap();
    let mut local_events = db.store.subscribe().unwrap();
    let mut remote_events = other.subscribe().unwrap();
    assert_eq!((local_events.recv().await.unwrap(), remote_events.recv().await.unwrap()), (None, None), "both listen");
    db.store.notify(&key("a"));
    db.store.notify(&key("a"));
    db.store.notify(&key("b"));
    let mut received = std::collections::BTreeSet::new();
    while received.len() < 2 {
        received.insert(remote_events.recv().await.unwrap());
    }
    assert_eq!(received, [Some(key("a")), Some(key("b"))].into());
    other.notify(&key("c"));
    assert_eq!(local_events.recv().await.unwrap(), Some(key("c")), "and none of its own notifications");

    db.rows("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'ear' AND query LIKE 'LISTEN%'")
        .await;
    while remote_events.recv().await.unwrap().is_some() {}
    while local_events.recv().await.unwrap().is_some() {}
    db.store.notify(&key("d"));
    assert_eq!(remote_events.recv().await.unwrap(), Some(key("d")));

    let behind_a_pooler = PostgresStore::open(&format!("{}&prepare=off", db.url)).await.unwrap();
    assert!(behind_a_pooler.subscribe().is_none());
    behind_a_pooler.notify(&key("e"));
    assert_eq!(remote_events.recv().await.unwrap(), Some(key("e")), "it can notify nevertheless");
}

/// Returns a URL with another host before that of the database.
fn with_host(db: &Db, port: u16, options: &str) -> String {
    let (user, rest) = db.url.rsplit_once('@').unwrap();
    format!("{user}@127.0.0.1:{port},{rest}{options}")
}

/// Waits for a future, with a timeout.
async fn with_deadline<T>(description: &str, operation: impl Future<Output = T>) -> T {
    let limit = std::time::Duration::from_secs(60);
    tokio::time::timeout(limit, operation).await.unwrap_or_else(|_| panic!("timeout: {description}"))
}

/// A host that accepts connections and never responds is skipped, by the store and by its listener.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_host_does_not_block_the_others() {
    let Some(db) = Db::new("").await else { return };
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port();
    let mut task = JoinSet::new();
    task.spawn(async move {
        let mut connections = Vec::new();
        while let Ok(connection) = silent.accept().await {
            connections.push(connection);
        }
    });
    let store = with_deadline("it opens", PostgresStore::open(&with_host(&db, port, "&retry=0s"))).await.unwrap();
    let mut events = store.subscribe().unwrap();
    assert_eq!(with_deadline("it listens", events.recv()).await.unwrap(), None);
    let mut w = Writer::create(&store, "a").await.unwrap();
    w.append(&store, [user_message("one")]).await.unwrap();
    db.store.notify(&key("a"));
    assert_eq!(with_deadline("a notification arrives", events.recv()).await.unwrap(), Some(key("a")));

    // No host is reachable: the error names both.
    let url = format!("postgres://postgres@127.0.0.1:{port},127.0.0.1:1/postgres?retry=0s&connect_timeout=1");
    let error = with_deadline("the error", PostgresStore::open(&url)).await.unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains(&format!("127.0.0.1:{port}: timeout: no response")) && message.contains("127.0.0.1:1: "),
        "{message}"
    );
}

/// The primary freezes: connections to it stay open and never respond. Waiting operations are
/// executed on the new primary, exactly once, and the listener moves there as well.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_primary_is_replaced() {
    let Some(db) = Db::new("").await else { return };
    let address = db.url.split(['@', '?']).nth(1).unwrap().split('/').next().unwrap().to_owned();
    let proxy = Proxy::new(address).await;
    let store = Arc::new(PostgresStore::open(&with_host(&db, proxy.port, "&pool=4")).await.unwrap());
    let mut events = store.subscribe().unwrap();
    assert_eq!(with_deadline("it listens", events.recv()).await.unwrap(), None);
    let mut writers = Vec::new();
    for n in 0..4 {
        let mut w = Writer::create(&store, &format!("s{n}")).await.unwrap();
        w.append(&store, [user_message("before")]).await.unwrap();
        writers.push(w);
    }
    proxy.fault.store(FREEZE, SeqCst);
    let mut tasks = JoinSet::new();
    for mut w in writers {
        let store = store.clone();
        tasks.spawn(async move {
            for text in ["during", "after"] {
                w.append(&store, [user_message(text)]).await.unwrap();
            }
            w.head
        });
    }
    for head in with_deadline("all are written", tasks.join_all()).await {
        let records = read_all(&*store, &head.key()).await;
        assert_eq!(Session::replay(&head.key(), records).unwrap().head(), &head, "all of it, once");
    }
    assert_eq!(with_deadline("it listens again", events.recv()).await.unwrap(), None);
    db.store.notify(&key("s0"));
    assert_eq!(with_deadline("a notification arrives", events.recv()).await.unwrap(), Some(key("s0")));
    drop(proxy);
}

/// A commit whose connection ends while it waits for a synchronous standby is visible, but may
/// still be lost: it is not acknowledged before a standby has it (D-038).
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_is_not_replicated_is_not_acknowledged() {
    if postgres_server().is_none() {
        return;
    }
    let url = server_script_for("store-sync", "start").await;
    let db = Db::at(&url, "application_name=sync").await;
    let store = Arc::new(db.store);
    let mut w = Writer::create(&store, "a").await.unwrap();
    let (admin, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { drop(connection.await) });
    let set_standbys = async |names: &str| {
        admin.batch_execute(&format!("ALTER SYSTEM SET synchronous_standby_names = '{names}'")).await.unwrap();
        admin.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    };
    // The backend that waits for a standby, selected by the beginning of its statement.
    let waiting_backend = async |statement: &str| {
        let sql = "SELECT pid FROM pg_stat_activity WHERE application_name = 'sync' AND wait_event = 'SyncRep'
            AND starts_with(query, $1)";
        admin.query(sql, &[&statement]).await.unwrap().first().map(|row| row.get::<_, i32>(0))
    };
    set_standbys("missing").await;
    // The server applies the setting some time after it was reloaded: until then, commits do not wait.
    let (pid, mut commit_task) = 'write: loop {
        let mut commit_task = {
            let store = store.clone();
            JoinSet::from_iter([async move { w.append(&store, [user_message("one")]).await.map(|()| w) }])
        };
        loop {
            if let Some(pid) = waiting_backend("WITH head AS").await {
                break 'write (pid, commit_task);
            }
            if let Some(outcome) = commit_task.try_join_next() {
                w = outcome.unwrap().unwrap();
                continue 'write;
            }
            tokio::task::yield_now().await;
        }
    };
    admin.query("SELECT pg_terminate_backend($1)", &[&pid]).await.unwrap();
    // The commit is visible and is being confirmed by a write that waits as well; until that
    // completes, it is not acknowledged.
    loop {
        assert!(commit_task.try_join_next().is_none(), "it was acknowledged without a standby");
        if waiting_backend("UPDATE").await.is_some() {
            break;
        }
        tokio::task::yield_now().await;
    }
    set_standbys("").await;
    let head = commit_task.join_next().await.unwrap().unwrap().unwrap().head;
    let records = read_all(&*store, &head.key()).await;
    assert_eq!(Session::replay(&head.key(), records).unwrap().head(), &head, "all of it, once");
    server_script_for("store-sync", "stop").await;
}
