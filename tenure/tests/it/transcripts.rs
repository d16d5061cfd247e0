//! Transcripts, and files of the JSONL store read as transcripts.

use crate::support::*;
use tenure::session::*;

#[test]
fn bad_lines_are_reported_with_file_and_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("abc.jsonl");
    let messages =
        [turn_messages(1), vec![Message::parse(r#"{"role":"user","content":"é","odd":1.50}"#).unwrap()]].concat();
    JsonlTranscript::append(&file, &messages[..2]).unwrap();
    JsonlTranscript::append(&file, &messages[2..]).unwrap();
    assert_eq!(
        read_transcript(&file).unwrap(),
        JsonlTranscript { path: file.clone(), messages: messages.clone(), problems: vec![] }
    );
    let mut bytes = std::fs::read(&file).unwrap();
    bytes.extend(b"\n# a foreign line\n{\"type\":\"summary\"}\n\xff\xfe\n{\"role\":\"user\",\"content\":\"ok\"}\n{\"role\":\"assistant\",\"con");
    std::fs::write(&file, bytes).unwrap();
    let transcript = read_transcript(&file).unwrap();
    assert_eq!(raw(&transcript.messages), [raw(&messages), raw(&[Message::user("ok")])].concat());
    assert_eq!(transcript.problems.iter().map(|p| p.line).collect::<Vec<_>>(), [7, 8, 9, 11]);
    assert!(transcript.problems.iter().all(|p| p.path == file && !p.reason.is_empty()));
    assert!(transcript.problems[3].reason.contains("incomplete"), "{:?}", transcript.problems);
    JsonlTranscript::write(&file, &messages[..1]).unwrap();
    assert_eq!(read_transcript(&file).unwrap().messages, messages[..1]);
    assert!(read_transcript(dir.path().join("none.jsonl")).is_err());
}

#[tokio::test]
async fn files_of_the_jsonl_store_are_transcripts_too() {
    let test = TestTenure::new(StoreKind::Jsonl).await.unwrap();
    let (t, principal) = (&test.tenure, ada());
    t.create(&principal, new_session("a")).await.unwrap();
    t.append(
        &principal,
        &id("a"),
        [turn_messages(1), vec![image_message("see", "T"), Message::assistant("yes")]].concat(),
    )
    .await
    .unwrap();
    t.cache_put(&principal, &id("a"), "tool", &serde_json::json!({}), &serde_json::json!(1)).await.unwrap();
    t.fork(&principal, &id("a"), Fork::at("turn-2").id(Some(id("b")))).await.unwrap();
    t.rewind(&principal, &id("a"), Point::Position(4)).await.unwrap();
    t.append(&principal, &id("b"), turn_messages(3)).await.unwrap();
    let mut transcripts = Vec::new();
    for transcript in iter_transcripts(test.directory().unwrap()).unwrap() {
        let (path, transcript) = transcript.unwrap();
        assert_eq!(transcript.problems, [], "{}", path.display());
        transcripts.push((path.file_stem().unwrap().to_str().unwrap().to_owned(), raw(&transcript.messages)));
    }
    let want = ["a", "b"].map(|name| (name.to_owned(), id(name)));
    assert_eq!(transcripts.len(), 2, "discarded messages are not a transcript of their own");
    for ((name, messages), (want, x)) in transcripts.into_iter().zip(want) {
        assert_eq!(name, want);
        assert_eq!(messages, texts(&t.load(&principal, &x).await.unwrap()), "{name}");
    }
    // When a parent is purged, one fork inherits its records and the others reference that fork
    // (D-001).
    t.fork(&principal, &id("b"), Fork::at(Point::Position(2)).id(Some(id("c")))).await.unwrap();
    t.append(&principal, &id("c"), turn_messages(7)).await.unwrap();
    t.purge(&principal, &id("a"), None).await.unwrap();
    for transcript in iter_transcripts(test.directory().unwrap()).unwrap() {
        let (path, transcript) = transcript.unwrap();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        assert_eq!(transcript.problems, [], "{name}");
        assert_eq!(raw(&transcript.messages), texts(&t.load(&principal, &id(&name)).await.unwrap()), "{name}");
    }
}

/// A path that begins with `~` is in the home directory. The test reads the variable that it expects to be used.
#[test]
fn a_tilde_is_the_home_directory() {
    let home = std::env::var("HOME").unwrap();
    let missing = "~/no-such-directory-of-tenure/a.jsonl";
    let error = read_transcript(missing).unwrap_err().to_string();
    assert!(error.contains(&format!("{home}/no-such-directory-of-tenure/a.jsonl")), "{error}");
    let error = iter_transcripts("~/no-such-directory-of-tenure").err().unwrap().to_string();
    assert!(error.contains(&format!("{home}/no-such-directory-of-tenure")), "{error}");
}
