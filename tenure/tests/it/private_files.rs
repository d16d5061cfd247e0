//! Stored files are readable by their owner only.
#![cfg(unix)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tenure::{Message, NewSession, Principal, Tenure, session::JsonlTranscript};

/// Everything in a directory that others may read, write or enter, with its mode.
fn shared_with_others(directory: &Path) -> Vec<String> {
    let mut readable_by_others = Vec::new();
    for path in std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
        let mode = std::fs::symlink_metadata(&path).unwrap().permissions().mode() & 0o777;
        readable_by_others.extend((mode & 0o077 != 0).then(|| format!("{} {mode:o}", path.display())));
        if path.is_dir() {
            readable_by_others.extend(shared_with_others(&path));
        }
    }
    readable_by_others
}

#[tokio::test]
async fn files_of_stores_and_transcripts_are_private() {
    let root = tempfile::tempdir().unwrap();
    let principal = Principal::new("acme", "ada").unwrap();
    let paths = [root.path().join("tenure.db"), root.path().join("below").join("jsonl")];
    for (scheme, path) in ["sqlite", "jsonl"].into_iter().zip(&paths) {
        let tenure = Tenure::open(&format!("{scheme}:{}", path.display())).await.unwrap();
        let id = tenure.create(&principal, NewSession::default()).await.unwrap().head().info.session_id.clone();
        let picture = format!("data:image/png;base64,{}", "aGVs".repeat(1000));
        let message =
            serde_json::json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture}}]});
        tenure.append(&principal, &id, vec![Message::parse(&message.to_string()).unwrap()]).await.unwrap();
        // Check while the store is open: SQLite's write-ahead log and its index are files too.
        assert_eq!(shared_with_others(root.path()), Vec::<String>::new(), "{scheme}");
    }
    let transcript = root.path().join("transcript.jsonl");
    JsonlTranscript::write(&transcript, &[Message::user("hi")]).unwrap();
    JsonlTranscript::append(root.path().join("appended.jsonl"), &[Message::user("hi")]).unwrap();
    assert_eq!(shared_with_others(root.path()), Vec::<String>::new());
}
