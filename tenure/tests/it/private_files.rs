//! What is stored is readable by its owner only.
#![cfg(unix)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tenure::{JsonlTranscript, Message, New, Principal, Tenure};

/// The modes of a directory and of everything below it that others may read, write or enter.
fn shared_with_others(path: &Path) -> Vec<String> {
    let mode = std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777;
    let mut found: Vec<_> = (mode & 0o077 != 0).then(|| format!("{} {mode:o}", path.display())).into_iter().collect();
    if path.is_dir() {
        let entries = std::fs::read_dir(path).unwrap();
        found.extend(entries.flat_map(|entry| shared_with_others(&entry.unwrap().path())));
    }
    found
}

#[tokio::test]
async fn files_of_stores_and_transcripts_are_private() {
    let root = tempfile::tempdir().unwrap();
    let who = Principal::new("acme", "ada").unwrap();
    let places = [root.path().join("tenure.db"), root.path().join("below").join("jsonl")];
    for (scheme, place) in ["sqlite", "jsonl"].into_iter().zip(&places) {
        let tenure = Tenure::open(&format!("{scheme}:{}", place.display())).await.unwrap();
        let id = tenure.create(&who, New::default()).await.unwrap().info.session_id.clone();
        let picture = format!("data:image/png;base64,{}", "aGVs".repeat(1000));
        let message =
            serde_json::json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture}}]});
        tenure.append(&who, &id, vec![Message::parse(&message.to_string()).unwrap()]).await.unwrap();
        // While it is open: SQLite's log and index are files too.
        assert_eq!(shared_with_others(root.path()), Vec::<String>::new(), "{scheme}");
    }
    let transcript = root.path().join("transcript.jsonl");
    JsonlTranscript::write(&transcript, &[Message::user("hi")]).unwrap();
    JsonlTranscript::append(&root.path().join("appended.jsonl"), &[Message::user("hi")]).unwrap();
    assert_eq!(shared_with_others(root.path()), Vec::<String>::new());
}
