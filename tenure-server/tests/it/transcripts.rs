//! Transcripts: written during the session, repaired after a crash, removed with their session.

use crate::support::InProcessClient;
use crate::support::{ServerProcess, send, wait_at_most};
use crate::support::{StoreKind, TestServer, wait_until};
use jiff::SignedDuration;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tenure::{Message, session::read_transcript};
use tenure_server::config::Config;

const SECRET: &str = "ann@example.com";

/// Configures live transcripts in a directory, with email addresses redacted.
fn enable_live_transcripts(config: &mut Config, dir: &Path) {
    config.transcripts = tenure_server::config::TranscriptsConfig { dir: dir.display().to_string(), live: true };
    config.redaction = serde_json::from_value(json!([{"name": "email", "pattern": "\\w+@[\\w.]+"}])).unwrap();
}

/// The lines of a file, if all of them can be parsed.
fn lines(path: &Path) -> Option<Vec<String>> {
    let read = read_transcript(path).ok().filter(|t| t.problems.is_empty())?;
    Some(read.messages.iter().map(|m| m.text()).collect())
}

/// Returns true if any file below a directory contains `word`.
fn contains_word(dir: &Path, word: &str) -> bool {
    let Ok(entries) = std::fs::read_dir(dir) else { return false };
    entries.map(|e| e.unwrap().path()).any(|path| {
        if path.is_dir() {
            contains_word(&path, word)
        } else {
            std::fs::read(&path).unwrap().windows(word.len()).any(|w| w == word.as_bytes())
        }
    })
}

fn transcript_path(dir: &Path, session: &str) -> PathBuf {
    dir.join(format!("default/default/{}.jsonl", tenure::session::file_name(session)))
}

async fn call(test: &TestServer, method: &str, path: &str, body: Value) -> (u16, Value) {
    let request = test.client.http.request(method.parse().unwrap(), format!("{}{path}", test.client.base));
    send(request.json(&body)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_follows_its_session() {
    for kind in [StoreKind::Memory, StoreKind::Sqlite, StoreKind::Postgres] {
        let dir = tempfile::tempdir().unwrap();
        let Some(mut test) = TestServer::with(kind, false, |config| enable_live_transcripts(config, dir.path())).await
        else {
            continue;
        };
        let path = transcript_path(dir.path(), "s1");
        let wait_for_lines = async |want: &[&str]| {
            wait_until(&format!("{want:?} in {kind:?}"), async || lines(&path).is_some_and(|l| l == want)).await;
        };
        let ask = |text: &str| json!({"session_id": "s1", "messages": [{"role": "user", "content": text}]});
        test.chat(ask("hello")).await;
        wait_for_lines(&["hello", "answer 1"]).await;
        test.chat(ask(&format!("I am {SECRET}"))).await;
        wait_for_lines(&["hello", "answer 1", "I am [redacted: email]", "answer 2"]).await;
        // Rewound messages are not in the file.
        assert_eq!(call(&test, "POST", "/sessions/s1/rewind", json!({"turn": 1})).await.0, 200);
        wait_for_lines(&["hello", "answer 1"]).await;
        let unusual = json!({"messages": [{"role": "user", "content": "kept", "odd": 1.5}]});
        assert_eq!(call(&test, "POST", "/sessions/s1/messages", unusual).await.0, 201);
        wait_for_lines(&["hello", "answer 1", "kept"]).await;
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.ends_with("\"odd\":1.5,\"role\":\"user\"}\n"), "{text}");
        // The same number of messages, with different content.
        assert_eq!(call(&test, "POST", "/sessions/s1/rewind", json!({"position": 1})).await.0, 200);
        let two = json!({"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]});
        assert_eq!(call(&test, "POST", "/sessions/s1/messages", two).await.0, 201);
        wait_for_lines(&["hello", "x", "y"]).await;
        // A fork contains the inherited messages. A file that was changed or removed is repaired by the next
        // message.
        assert_eq!(call(&test, "POST", "/sessions/s1/fork", json!({"id": "s2"})).await.0, 201);
        wait_until("the fork's file", async || {
            lines(&transcript_path(dir.path(), "s2")).is_some_and(|l| l == ["hello", "x", "y"])
        })
        .await;
        std::fs::write(&path, "torn").unwrap();
        test.chat(ask("again")).await;
        wait_for_lines(&["hello", "x", "y", "again", "answer 3"]).await;
        if kind != StoreKind::Memory {
            // The last message is in the file when the server has stopped; a file that was removed meanwhile is
            // restored at the next start.
            test.chat(ask("last")).await;
            std::fs::remove_file(transcript_path(dir.path(), "s2")).unwrap();
            test.restart().await;
            wait_for_lines(&["hello", "x", "y", "again", "answer 3", "last", "answer 4"]).await;
            wait_until("the fork's file", async || transcript_path(dir.path(), "s2").exists()).await;
        }
        assert!(!contains_word(dir.path(), SECRET));
        assert!(test.session("s1").await.messages.len() > 4);
    }
}

/// Killed at any moment, the files are complete after the next start.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_is_repaired_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let yaml = "store: 'sqlite:t.db'\ntranscripts: {dir: kept, live: true}";
    let transcripts_dir = dir.path().join("kept");
    let mut want = Vec::new();
    for round in 0..4 {
        let mut server = ServerProcess::start(dir.path(), yaml);
        for turn in 0..3 {
            let text = format!("words {round} {turn}");
            let (status, body) = server.chat("s1", &text).await;
            assert_eq!(status, 200, "{body}");
            want.extend([text, body["choices"][0]["message"]["content"].as_str().unwrap().to_owned()]);
        }
        // Killed at once, or in the middle of a line.
        server.kill();
        let path = transcript_path(&transcripts_dir, "s1");
        if round % 2 == 1 && path.exists() {
            let bytes = std::fs::read(&path).unwrap();
            std::fs::write(&path, &bytes[..bytes.len().saturating_sub(7)]).unwrap();
        }
        let mut server = ServerProcess::start(dir.path(), yaml);
        let context = format!("round {round}: {:?}", lines(&path));
        wait_at_most(&context, Duration::from_secs(20), async || lines(&path).is_some_and(|l| l == want)).await;
        server.kill();
    }
}

/// The directory is not writable: turns continue, and the file is written once it is.
#[tokio::test(flavor = "multi_thread")]
async fn file_errors_do_not_fail_requests() {
    let dir = tempfile::tempdir().unwrap();
    let transcripts_dir = dir.path().join("kept");
    let test = TestServer::with(StoreKind::Memory, true, |config| enable_live_transcripts(config, &transcripts_dir))
        .await
        .unwrap();
    std::fs::remove_dir_all(&transcripts_dir).unwrap();
    std::fs::write(&transcripts_dir, "in the way").unwrap();
    let ask = |text: &str| json!({"session_id": "s1", "messages": [{"role": "user", "content": text}]});
    assert_eq!(test.chat(ask("one")).await.content(), "answer 1");
    tokio::time::sleep(Duration::from_millis(300)).await; // observation window: writes that must not happen
    assert!(transcripts_dir.is_file());
    std::fs::remove_file(&transcripts_dir).unwrap();
    // Without any further message.
    let is_complete =
        async || lines(&transcript_path(&transcripts_dir, "s1")).is_some_and(|l| l == ["one", "answer 1"]);
    wait_at_most("it is tried again", Duration::from_secs(20), is_complete).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_and_erasure_leave_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let test =
        TestServer::with(StoreKind::Sqlite, false, |config| enable_live_transcripts(config, dir.path())).await.unwrap();
    let word = "xyzzy";
    for id in ["a", "b", "c", "d"] {
        test.chat(json!({"session_id": id, "messages": [{"role": "user", "content": word}]})).await;
        wait_until("a file", async || lines(&transcript_path(dir.path(), id)).is_some_and(|l| l.len() == 2)).await;
    }
    std::fs::write(transcript_path(dir.path(), "a").with_extension("jsonl.1f.part"), word).unwrap();
    assert_eq!(call(&test, "DELETE", "/sessions/a?purge=true", json!({})).await.0, 200);
    assert_eq!(call(&test, "DELETE", "/sessions/b", json!({})).await.0, 200);
    assert_eq!(call(&test, "DELETE", "/v1/sessions/c", json!({})).await.1["deleted"], true);
    let remaining: Vec<_> =
        std::fs::read_dir(dir.path().join("default/default")).unwrap().map(|f| f.unwrap().file_name()).collect();
    assert_eq!(remaining, ["d.jsonl"]);
    // A restored session has its file again.
    assert_eq!(call(&test, "POST", "/sessions/b/restore", json!({})).await.0, 200);
    wait_until("the file again", async || lines(&transcript_path(dir.path(), "b")).is_some_and(|l| l.len() == 2)).await;
    // With concurrent messages: an erased file is not written again.
    let appended = std::sync::atomic::AtomicUsize::new(0);
    let append_messages = async {
        for n in 0..20 {
            let body = json!({"messages": [{"role": "user", "content": format!("{word} {n}")}]});
            call(&test, "POST", "/sessions/d/messages", body).await;
            appended.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    };
    let erase = async {
        wait_until("some are stored", async || appended.load(std::sync::atomic::Ordering::Relaxed) >= 5).await;
        assert_eq!(call(&test, "DELETE", "/users/default", json!({})).await.0, 200);
    };
    tokio::join!(append_messages, erase);
    tokio::time::sleep(Duration::from_millis(300)).await; // observation window: writes that must not happen
    assert!(!contains_word(dir.path(), word), "{:?}", std::fs::read_dir(dir.path()).unwrap().collect::<Vec<_>>());
}

/// The transcript of an expired session outlives its retention (D-088), but is removed when its user is erased.
#[tokio::test]
async fn an_archive_survives_retention_but_not_erasure() {
    let dir = tempfile::tempdir().unwrap();
    let api = InProcessClient::with_config("memory:", |config| {
        enable_live_transcripts(config, dir.path());
        config.transcripts.live = false;
    });
    let api = api.await;
    for (user, id) in [("ann", "hers"), ("../bob", "his")] {
        let user_client = api.with("x-tenure-user", user);
        user_client.post("/sessions", json!({"id": id})).await.expect_status(201);
        let message = Message::user(&format!("{id}: {SECRET}"));
        user_client.append_messages(id, json!([message.to_value()])).await;
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "not before the end");
    api.clock.advance(SignedDuration::from_hours(24 * 8));
    assert_eq!(api.app.tenure.sweep().await.unwrap().expired.len(), 2);
    api.clock.advance(SignedDuration::from_hours(24 * 31));
    assert_eq!(api.app.tenure.sweep().await.unwrap().purged.len(), 2);
    let transcript = dir.path().join("default/ann/hers.jsonl");
    assert_eq!(lines(&transcript).unwrap(), ["hers: [redacted: email]"]);
    assert_eq!(lines(&dir.path().join("default/%2E.%2Fbob/his.jsonl")).unwrap(), ["his: [redacted: email]"]);
    api.delete("/users/..%2Fbob").await.expect_status(200);
    assert!(!contains_word(dir.path(), "his") && transcript.exists());
    api.delete("/users/ann").await.expect_status(200);
    assert!(!contains_word(dir.path(), "hers"));
}

#[tokio::test]
async fn an_invalid_rule_is_reported_at_startup() {
    let dir = tempfile::tempdir().unwrap();
    let stderr =
        ServerProcess::start_failure(dir.path(), "redaction: [{name: a, pattern: x}, {name: b, pattern: '[z-a]'}]");
    assert!(stderr.contains("redaction[1]") && stderr.contains("range"), "{stderr}");
    let stderr = ServerProcess::start_failure(dir.path(), "transcripts: {dir: /dev/null/x}");
    assert!(stderr.contains("transcripts.dir"), "{stderr}");
}

/// With `on_expired: fresh` the transcript of the old session moves to its new id, and the next session writes its
/// own file (D-018).
#[tokio::test]
async fn a_fresh_session_leaves_the_old_file() {
    let dir = tempfile::tempdir().unwrap();
    let api = InProcessClient::with_config("memory:", |config| {
        enable_live_transcripts(config, dir.path());
        config.transcripts.live = false;
        config.sessions.on_expired = tenure::run::OnExpired::Fresh;
    })
    .await;
    let ask = |text: &str| json!({"session_id": "s1", "messages": [{"role": "user", "content": text}]});
    api.post("/v1/chat/completions", ask("first")).await.expect_status(200);
    api.clock.advance(SignedDuration::from_hours(24 * 8));
    api.post("/v1/chat/completions", ask("second")).await.expect_status(200);
    let list = api.get("/sessions?status=expired").await.expect_status(200);
    let archive = list["data"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(lines(&transcript_path(dir.path(), &archive)).unwrap()[0], "first");
    assert_eq!(lines(&transcript_path(dir.path(), "s1")), None);
    api.clock.advance(SignedDuration::from_hours(24 * 8));
    api.app.tenure.sweep().await.unwrap();
    assert_eq!(lines(&transcript_path(dir.path(), "s1")).unwrap()[0], "second");
    assert_eq!(lines(&transcript_path(dir.path(), &archive)).unwrap()[0], "first");
    api.delete(&format!("/sessions/{archive}?purge=true")).await.expect_status(200);
    assert_eq!(lines(&transcript_path(dir.path(), &archive)), None);
}
