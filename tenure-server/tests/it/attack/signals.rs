//! Signals whose default action terminates a process.

use crate::support::{ServerProcess, wait_at_most};
use std::process::Command;
use std::time::Duration;

/// SIGHUP reloads the configuration. A changed log level takes effect, other changes are reported, an invalid file
/// changes nothing, and the server continues in every case (D-117).
#[tokio::test(flavor = "multi_thread")]
async fn sighup_reloads_and_never_kills() {
    let dir = tempfile::tempdir().unwrap();
    let yaml = "store: 'memory:'\nlisten: 127.0.0.1:0\n";
    let mut server = ServerProcess::start(dir.path(), yaml);
    let logged = async |server: &ServerProcess, text: &str| {
        wait_at_most(text, Duration::from_secs(30), async || server.log().contains(text)).await;
    };
    server.signal("HUP");
    logged(&server, "needs_restart=\"nothing\"").await;
    let debug = format!("{yaml}telemetry: {{log: debug}}\nlimits: {{max_page: 7}}\n");
    std::fs::write(dir.path().join("tenure.yaml"), debug).unwrap();
    server.signal("HUP");
    logged(&server, "reloaded=\"telemetry.log\" needs_restart=\"limits.max_page\"").await;
    assert_eq!(server.chat("s", "hi").await.0, 200);
    logged(&server, "DEBUG").await;
    for invalid in ["limits: {max_pages: 7}", "telemetry: {log: 'a=b=c'}", "limits: {max_page: 0}"] {
        std::fs::write(dir.path().join("tenure.yaml"), invalid).unwrap();
        let before = server.log().matches("no setting was changed").count();
        server.signal("HUP");
        wait_at_most("it is refused", Duration::from_secs(30), async || {
            server.log().matches("no setting was changed").count() > before
        })
        .await;
    }
    assert_eq!(server.chat("s", "still there?").await.0, 200);
    server.signal("TERM");
    assert_eq!(server.wait_for_exit(Duration::from_secs(30)).code(), Some(0));
}

/// A write over the process's file size limit is an error of the store. Reads continue, and so do writes once there
/// is space.
#[tokio::test(flavor = "multi_thread")]
async fn sigxfsz_is_an_error_of_the_store() {
    for store in ["sqlite:t.db", "jsonl:data"] {
        let dir = tempfile::tempdir().unwrap();
        let server = ServerProcess::start(dir.path(), &format!("store: '{store}'"));
        assert_eq!(server.chat("s", "hi").await.0, 200);
        let limit = |bytes: &str| {
            let arguments = [format!("--pid={}", server.pid()), format!("--fsize={bytes}:")];
            assert!(Command::new("prlimit").args(arguments).status().unwrap().success());
        };
        limit("1");
        let (status, error) = server.chat("s", &"x".repeat(100_000)).await;
        assert!([503, 507].contains(&status), "{store}: {status} {error}");
        assert!(error["error"]["code"].is_string(), "{error}");
        assert_eq!(server.get("/sessions/s").await.0, 200, "{store}");
        limit("unlimited");
        wait_at_most("writes work again", Duration::from_secs(30), async || server.chat("s", "again").await.0 == 200)
            .await;
        server.stop();
    }
}
