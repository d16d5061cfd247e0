//! `tenure backup`, `tenure restore` and `GET /backup`: against a running server, with rights, and with damaged files.

use crate::support::{InProcessClient, ServerProcess, binary, chat_request, send};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;
use tenure_server::auth::Right;

/// Runs a command of the binary in a directory. Returns its success, standard output and standard error.
fn run(dir: &Path, args: &[&str]) -> (bool, String, String) {
    let output = Command::new(binary()).args(args).current_dir(dir).env_remove("TENURE_STORE").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

/// A store of each kind is backed up while its server runs, restored into another kind, and served again.
async fn backed_up_and_restored(store: &str, through_server: bool, target: &str) {
    let dir = tempfile::tempdir().unwrap();
    let server = ServerProcess::start(dir.path(), &format!("store: '{store}'"));
    assert_eq!(server.chat("a", "one").await.0, 200);
    assert_eq!(server.chat("b", "two").await.0, 200);
    let memory = json!({"text": "likes tea"});
    assert_eq!(send(server.request("POST", "/memories").json(&memory)).await.0, 201);
    let source = if through_server { ["--server", &server.url] } else { ["--store", store] };
    let (success, out, err) = run(dir.path(), &[source[0], source[1], "backup", "copy.jsonl"]);
    assert!(success && out.starts_with("2 sessions ("), "{out}{err}");
    assert!(!dir.path().join("copy.jsonl.partial").exists());
    let (success, _, err) = run(dir.path(), &[source[0], source[1], "backup", "copy.jsonl"]);
    assert!(!success && err.contains("copy.jsonl exists"), "{err}");
    // What happens after the backup is not in it.
    assert_eq!(server.chat("c", "three").await.0, 200);
    server.stop();

    let (success, out, err) = run(dir.path(), &["--store", target, "restore", "copy.jsonl"]);
    assert!(success && out.contains("2 sessions"), "{out}{err}");
    let (success, out, err) = run(dir.path(), &["--store", target, "doctor"]);
    assert!(success && out.contains("2 sessions checked, no findings"), "{out}{err}");
    let (success, _, err) = run(dir.path(), &["--store", target, "restore", "copy.jsonl"]);
    assert!(!success && err.contains("the store is not empty"), "{err}");
    let restored = ServerProcess::start(dir.path(), &format!("store: '{target}'"));
    let (status, answer) =
        send(restored.request("POST", "/v1/chat/completions").json(&chat_request("b", "again"))).await;
    assert_eq!(
        (status, &answer["choices"][0]["message"]["content"]),
        (200, &json!("You said: again I see 3 messages."))
    );
    let (_, found) = restored.get("/memories").await;
    assert!(found.to_string().contains("likes tea"), "{found}");
    assert_eq!(restored.get("/sessions/c").await.0, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_is_backed_up_beside_its_server() {
    backed_up_and_restored("sqlite:t.db", false, "jsonl:new").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jsonl_is_backed_up_through_its_server() {
    backed_up_and_restored("jsonl:t", true, "sqlite:new.db").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_is_backed_up_beside_its_server() {
    let Some(schema) = crate::support::PostgresSchema::new() else { return };
    let Some(target) = crate::support::PostgresSchema::new() else { return };
    backed_up_and_restored(&schema.url(), false, &target.url()).await;
}

/// A JSONL directory is locked by its server; the error says what to do.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_store_names_the_way_through_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let _server = ServerProcess::start(dir.path(), "store: 'jsonl:t'");
    let (success, _, err) = run(dir.path(), &["--store", "jsonl:t", "backup", "copy.jsonl"]);
    assert!(!success && err.contains("--server http://"), "{err}");
    assert!(!dir.path().join("copy.jsonl").exists() && !dir.path().join("copy.jsonl.partial").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_in_memory_has_no_backup() {
    let api = InProcessClient::memory().await;
    let (code, param) = api.get("/backup").await.expect_error(400);
    assert_eq!((code.as_str(), param.as_str()), ("invalid", "store"));
    let dir = tempfile::tempdir().unwrap();
    let (success, _, err) = run(dir.path(), &["--store", "memory:", "backup", "copy.jsonl"]);
    assert!(!success && err.contains("cannot be backed up"), "{err}");
}

/// A damaged backup is rejected before anything is written.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_backup_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &["--store", "sqlite:t.db", "keys", "add", "--name", "app"]);
    let (success, _, err) = run(dir.path(), &["--store", "sqlite:t.db", "backup", "copy.jsonl"]);
    assert!(success, "{err}");
    let text = fs::read_to_string(dir.path().join("copy.jsonl")).unwrap();
    fs::write(dir.path().join("damaged.jsonl"), text.replace("\"app", "\"abb").replace("\\\"app", "\\\"abb")).unwrap();
    let (success, _, err) = run(dir.path(), &["--store", "sqlite:new.db", "restore", "damaged.jsonl"]);
    assert!(!success && err.contains("the checksum of the archive do"), "{err}");
    assert!(!dir.path().join("new.db").exists());
    let (success, out, _) = run(dir.path(), &["restore", "--verify", "copy.jsonl"]);
    assert!(success && out.contains("are intact in copy.jsonl"), "{out}");
    let (success, _, err) = run(dir.path(), &["--server", "http://127.0.0.1:1", "restore", "copy.jsonl"]);
    assert!(!success && err.contains("--store URL"), "{err}");
    // The write-ahead log of another file would be applied to the new one.
    fs::write(dir.path().join("new.db-wal"), "left").unwrap();
    let (success, _, err) = run(dir.path(), &["--store", "sqlite:new.db", "restore", "copy.jsonl"]);
    assert!(!success && err.contains("new.db-wal is left from another database"), "{err}");
}

/// A SQLite file with the write-ahead log of another one: the error names it.
#[tokio::test(flavor = "multi_thread")]
async fn a_stale_write_ahead_log_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let write = async |store: &str, sessions: std::ops::Range<usize>| {
        let server = ServerProcess::start(dir.path(), &format!("store: 'sqlite:{store}'"));
        for n in sessions {
            assert_eq!(server.chat(&format!("s{n}"), &"long ".repeat(2000)).await.0, 200);
        }
        server
    };
    drop(write("small.db", 0..1).await.stop());
    // The log contains only what was written after the last orderly stop.
    drop(write("large.db", 0..40).await.stop());
    write("large.db", 40..43).await.kill();
    assert!(path("large.db-wal").exists());
    // The operator puts a copy of another database in its place, and leaves the log beside it.
    let conn = rusqlite::Connection::open(path("small.db")).unwrap();
    conn.execute("VACUUM INTO ?1", [path("copy.db").to_str().unwrap()]).unwrap();
    fs::rename(path("copy.db"), path("large.db")).unwrap();
    let (success, out, err) = run(dir.path(), &["--store", "sqlite:large.db", "doctor"]);
    let all = format!("{out}{err}");
    assert!(!success && all.contains("large.db-wal may belong to another database"), "{all}");
}

/// Only the right `backup` gives access to the data of all tenants, and administrators of a tenant cannot grant it.
#[tokio::test]
async fn backups_need_a_right_that_administrators_cannot_grant() {
    let dir = tempfile::tempdir().unwrap();
    let api = InProcessClient::open(&format!("sqlite:{}", dir.path().join("t.db").display())).await;
    let backup = api.key("acme", None, &[Right::Backup]).await;
    let admin = api.key("acme", None, &[Right::Read, Right::Write, Right::Review, Right::Admin]).await;
    let bound = api.key("acme", Some("ann"), &[Right::Backup]).await;
    let archive = backup.get("/backup").await;
    assert_eq!(archive.status, 200);
    assert_eq!(admin.get("/backup").await.expect_error(403).0, "forbidden");
    assert_eq!(bound.get("/backup").await.expect_error(403).0, "forbidden");
    assert_eq!(backup.get("/sessions").await.expect_error(403).0, "forbidden");
    let grant = json!({"rights": ["backup"]});
    assert_eq!(admin.post("/keys", &grant).await.expect_error(403).0, "forbidden");
    let keys: Value = admin.get("/keys").await.expect_status(200);
    let rights = |key: &&Value| key["rights"] == json!(["backup"]) && key["user"].is_null();
    let id = keys["data"].as_array().unwrap().iter().find(rights).unwrap()["id"].as_str().unwrap();
    assert_eq!(admin.post(&format!("/keys/{id}/rotate"), json!({})).await.expect_error(403).0, "forbidden");
}
