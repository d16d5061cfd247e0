//! Claims of the seed documents (docs/seeds.md) that no other test demonstrates.

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use tenure::memory::{MemoryTarget, NewMemory};
use tenure::rules::history;
use tenure::session::make_checkpoints;
use tenure::{policy::*, *};

const MINUTE: SignedDuration = SignedDuration::from_mins(1);

on_every_store! {
    /// Any run within a session resets the time to live.
    async fn a_run_resets_the_time_to_live(test: &mut TestTenure) {
        let sessions = SessionConfig { ttl: Some("10m".parse().unwrap()), ..SessionConfig::default() };
        test.tenure.declare(Assistant { name: "quick".into(), sessions, ..Assistant::default() });
        let new = NewSession { assistant: Some("quick".into()), ..new_session("s") };
        test.tenure.create(&ada(), new).await.unwrap();
        let session = test.tenure.user("acme", "ada").unwrap().session("s").unwrap();
        test.advance(MINUTE * 9);
        let model = ScriptedModel::new([text_answer("Hello."), text_answer("Still here.")]);
        session.run(RunRequest::new(&model, [Message::user("Hi")])).await.unwrap();
        test.advance(MINUTE * 9);
        session.run(RunRequest::new(&model, [Message::user("And now?")])).await.unwrap();
        test.advance(MINUTE * 9);
        assert_eq!(session.load().await.unwrap().messages.len(), 4, "27 minutes old, idle for 9");
        test.advance(MINUTE * 2);
        assert_eq!(session.load().await.unwrap_err().code(), "gone");
    }

    /// Memories of a group are kept independently of the sessions that they came from.
    async fn memories_of_a_group_outlive_sessions(test: &mut TestTenure) {
        let memory = MemoryConfig { scope: MemoryScope::Group, group: Some("lab".into()), ..MemoryConfig::default() };
        for name in ["research", "analysis"] {
            test.tenure.declare(Assistant { name: name.into(), memory: Some(memory.clone()), ..Assistant::default() });
        }
        let new = NewSession { assistant: Some("research".into()), ..new_session("s") };
        test.tenure.create(&ada(), new).await.unwrap();
        let finding = NewMemory::from("the sample is stable at 40 degrees");
        test.tenure.remember(&ada(), &MemoryTarget::Session(id("s")), finding).await.unwrap();
        test.advance(SignedDuration::from_hours(24 * 8));
        test.tenure.sweep().await.unwrap();
        test.advance(SignedDuration::from_hours(24 * 365));
        assert_eq!(test.tenure.sweep().await.unwrap().purged.len(), 1, "the session is gone");
        let other = MemoryTarget::Assistant("analysis".into());
        let found = test.tenure.recall(&ada(), &other, "which sample is stable?", 5).await.unwrap();
        let texts: Vec<&str> = found.memories.iter().map(|hit| hit.memory.text.as_str()).collect();
        assert_eq!(texts, ["the sample is stable at 40 degrees"]);
    }

    /// A video is stored with its message and sent to the model again.
    async fn videos_are_stored_and_sent_again(test: &mut TestTenure) {
        test.tenure.create(&ada(), new_session("s")).await.unwrap();
        let data = "AAAAIGZ0eXBpc29t".repeat(300);
        let video = format!(
            r#"{{"role":"user","content":[{{"type":"video_url","video_url":{{"url":"data:video/mp4;base64,{data}"}}}}]}}"#
        );
        test.tenure.append(&ada(), &id("s"), [Message::parse(&video).unwrap()]).await.unwrap();
        test.tenure.append(&ada(), &id("s"), [Message::assistant("A film."), Message::user("How long?")]).await.unwrap();
        let session = test.tenure.load(&ada(), &id("s")).await.unwrap();
        assert_eq!(texts(&session)[0], video);
        assert_eq!(history(&session, &Window::default())[0].as_str(), video);
    }
}

/// The default checkpoints of a message list are those that a run with the default policy sets:
/// one after each tool call and one after each answer.
#[tokio::test]
async fn default_checkpoints_are_those_of_a_run() {
    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    let model = ScriptedModel::new([
        tool_calls_answer(&[("a", "look", serde_json::json!({})), ("b", "look", serde_json::json!({"n": 2}))]),
        text_answer("Both."),
    ]);
    let tools = CountingTools::new([(read_only_tool("look"), ToolBehavior::succeeds("seen"))]);
    let session = test.tenure.user("acme", "ada").unwrap().create_session().await.unwrap();
    session.run(RunRequest::new(&model, [Message::user("Look twice")]).tools(&tools)).await.unwrap();
    let stored = session.load().await.unwrap();
    let labels = |checkpoints: &[Checkpoint]| -> Vec<(String, usize)> {
        checkpoints.iter().map(|c| (c.label.to_string(), c.position)).collect()
    };
    assert_eq!(labels(&make_checkpoints(&stored.messages)), labels(&stored.checkpoints));
    assert_eq!(labels(&stored.checkpoints), [("turn-1.1".into(), 3), ("turn-1.2".into(), 4), ("turn-1".into(), 5)]);
}

/// The session functions of mistral.rs: export is optional, import replaces, delete returns whether there was a
/// session, fork copies the first turns.
#[tokio::test]
async fn the_session_functions_of_mistralrs() {
    let tenure = Tenure::open("memory:").await.unwrap();
    let user = tenure.user("acme", "ada").unwrap();
    assert!(user.export_session("s").await.unwrap().is_none());
    tenure.create(&ada(), new_session("s")).await.unwrap();
    for turn in 1..=3 {
        tenure.append(&ada(), &id("s"), turn_messages(turn)).await.unwrap();
    }
    tenure.create(&Principal::new("acme", "bob").unwrap(), new_session("of-bob")).await.unwrap();
    let export = user.export_session("s").await.unwrap().unwrap();
    user.fork_session("s", "fork", 2).await.unwrap();
    assert_eq!(tenure.load(&ada(), &id("fork")).await.unwrap().messages.len(), 8);
    user.import_session("fork", export.clone()).await.unwrap();
    assert_eq!(tenure.load(&ada(), &id("fork")).await.unwrap().messages.len(), 12);
    let mut ids: Vec<String> = user.list_session_ids().await.unwrap().iter().map(ToString::to_string).collect();
    ids.sort();
    assert_eq!(ids, ["fork", "s"]);
    assert!(user.delete_session("s").await.unwrap());
    assert!(!user.delete_session("s").await.unwrap());
    assert!(user.export_session("s").await.unwrap().is_none());
}

/// The in-memory store is not persistent: opened again, it is empty.
#[tokio::test]
async fn the_memory_store_is_not_persistent() {
    let first = Tenure::open("memory:").await.unwrap();
    first.create(&ada(), new_session("s")).await.unwrap();
    let second = Tenure::open("memory:").await.unwrap();
    assert_eq!(second.load(&ada(), &id("s")).await.unwrap_err().code(), "not_found");
}

/// Metadata can be queried in SQL with `json_extract` on `info_json` of the view `sessions`.
#[tokio::test]
async fn metadata_can_be_queried_in_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sessions.db");
    let tenure = Tenure::open(&format!("sqlite:{}", file.display())).await.unwrap();
    let metadata = serde_json::json!({"customer_id": "cust_456"}).as_object().unwrap().clone();
    tenure.create(&ada(), NewSession { metadata, ..new_session("s") }).await.unwrap();
    let database = rusqlite::Connection::open(file).unwrap();
    let sql =
        "SELECT session_id, json_extract(info_json, '$.metadata.customer_id') FROM sessions WHERE tenant = 'acme'";
    let row = database.query_row(sql, [], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)));
    assert_eq!(row.unwrap(), ("s".to_owned(), "cust_456".to_owned()));
}
