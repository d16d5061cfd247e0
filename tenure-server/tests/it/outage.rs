//! Outages of the database: at startup, and while the server runs.

use crate::proxy::Proxy;
use crate::support::PostgresSchema;
use crate::support::{ServerProcess, assert_error, http_client, send, wait_at_most};
use std::time::Duration;

/// Puts the test database behind a proxy. Returns the proxy, the store's URL, and the schema, which is dropped last.
async fn behind_a_proxy(passing: bool, options: &str) -> Option<(Proxy, String, PostgresSchema)> {
    let schema = PostgresSchema::new()?;
    let url = schema.url();
    let (user, rest) = url.rsplit_once('@').unwrap();
    let (address, path) = rest.split_once('/').unwrap();
    let proxy = Proxy::new(address.to_owned(), passing).await;
    let store = format!("{user}@{}/{path}{options}", proxy.address);
    Some((proxy, store, schema))
}

async fn free_port() -> u16 {
    tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port()
}

/// At startup the server waits for a database that does not answer, logs its host and port, and serves requests
/// meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_database_is_waited_for_at_startup() {
    let Some((proxy, store, _schema)) = behind_a_proxy(false, "&retry=1s&connect_timeout=1").await else { return };
    let (dir, port) = (tempfile::tempdir().unwrap(), free_port().await);
    let yaml = format!("listen: 127.0.0.1:{port}\nstore: \"{store}\"\n");
    let path = dir.path().to_owned();
    let starting = tokio::task::spawn_blocking(move || ServerProcess::start(&path, &yaml));
    let get = |path: &str| http_client().get(format!("http://127.0.0.1:{port}{path}")).timeout(Duration::from_secs(2));
    wait_at_most("it answers", Duration::from_secs(30), async || get("/healthz").send().await.is_ok()).await;
    assert_eq!(send(get("/healthz")).await.0, 200);
    let response = get("/readyz").send().await.unwrap();
    assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (503, &"1".parse().unwrap()));
    assert_error(&send(get("/readyz")).await, 503, "unavailable", None);
    assert_error(&send(get("/sessions")).await, 503, "unavailable", None);
    assert!(!starting.is_finished());

    proxy.pass(true);
    let running = starting.await.unwrap();
    assert_eq!(running.get("/readyz").await.0, 200);
    assert_eq!(running.get("/sessions").await.0, 200);
    let log = running.stop();
    assert!(log.contains(&format!("127.0.0.1:{}", proxy.address.port())), "{log}");
}

/// An error that waiting cannot fix fails the startup at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_refuses_the_connection_ends_the_startup() {
    let Some(schema) = PostgresSchema::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let url = schema.url();
    let (base, _) = url.split_once('?').unwrap();
    let (server, _) = base.rsplit_once('/').unwrap();
    let stderr = ServerProcess::start_failure(
        dir.path(),
        &format!("listen: 127.0.0.1:0\nstore: \"{server}/no_such_database\"\n"),
    );
    assert!(stderr.contains("no_such_database") && stderr.contains("127.0.0.1:"), "{stderr}");
}

/// The database stops responding under a running server: `/readyz` fails soon, and each 503 has a `Retry-After`.
#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_database_is_reported() {
    let Some((proxy, store, _schema)) = behind_a_proxy(true, "&retry=0s&connect_timeout=1").await else { return };
    let dir = tempfile::tempdir().unwrap();
    let running = ServerProcess::start(dir.path(), &format!("store: \"{store}\"\n"));
    assert_eq!(running.get("/readyz").await.0, 200);
    proxy.pass(false);
    let ask = || running.request("GET", "/readyz").timeout(Duration::from_secs(2)).send();
    let response = ask().await.unwrap();
    assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (503, &"1".parse().unwrap()));
    proxy.pass(true);
    wait_at_most("it is ready again", Duration::from_secs(60), async || running.get("/readyz").await.0 == 200).await;
}
