//! Summaries of long sessions: written after a turn without delaying others, and removed on request.

use crate::support::*;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::sync::Arc;
use tenure::policy::CompactionPolicy;
use tenure::rules::summary::{REQUEST, SUMMARY_MARKER};
use tenure_server::config::Config;
use tokio::sync::Semaphore;

/// A window of `max` turns; older turns are summarized.
fn turns(max: usize) -> impl FnOnce(&mut Config) {
    move |config| {
        (config.short_term.max_history_turns, config.short_term.compact) = (max, CompactionPolicy::On);
        config.models[0].idle_timeout = "10s".parse().unwrap();
    }
}

#[derive(serde::Deserialize)]
struct RequestBody {
    messages: Vec<Box<RawValue>>,
}

impl ScriptedModelServer {
    /// The messages of each request, byte for byte: those of turns, and those for summaries.
    fn requests(&self) -> (Vec<Vec<String>>, Vec<Vec<String>>) {
        let request_messages = |body: String| {
            let request: RequestBody = serde_json::from_str(&body).unwrap();
            request.messages.iter().map(|m| m.get().to_owned()).collect::<Vec<_>>()
        };
        self.bodies().into_iter().map(request_messages).partition(|messages| !messages[0].contains(REQUEST))
    }
}

impl TestServer {
    async fn append_user_message(&self, text: &str) -> Reply {
        let reply = self.chat(json!({"session_id": "s", "history": "append", "messages": [user(text)]})).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        reply
    }

    async fn call(&self, method: &str, path: &str, body: Value) -> Reply {
        self.call_with(method, path, body, &[]).await
    }

    async fn call_with(&self, method: &str, path: &str, body: Value, headers: &[(&str, &str)]) -> Reply {
        let request = self.client.http.request(method.parse().unwrap(), format!("{}{path}", self.client.base));
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let request = request.header("content-type", "application/json").body(body.to_string());
        reply(request.send().await.unwrap()).await
    }

    /// Waits for a summary of the first `position` messages.
    async fn summary(&self, position: usize) {
        wait_until("the summary is there", async || {
            self.session("s").await.summary().map(|s| s.position) == Some(position)
        })
        .await;
    }
}

/// The prompt prefix is byte-identical from turn to turn, until the next summary; nothing is left out in between.
async fn the_beginning_of_the_prompt_is_stable(kind: StoreKind, stream: bool) {
    let Some(test) = TestServer::with(kind, stream, turns(6)).await else { return };
    test.chat(json!({"session_id": "s", "messages": [system("Be kind."), user("question 1")]})).await;
    let covered = [6, 9, 12, 15];
    for n in 2..=16 {
        test.append_user_message(&format!("question {n}")).await;
        if covered.contains(&n) {
            test.summary(1 + 2 * (n - 3)).await;
        }
    }
    let (requests, summaries) = test.model.requests();
    assert_eq!((requests.len(), summaries.len()), (16, 4));
    let changes: Vec<usize> = (1..16).filter(|i| !requests[*i].starts_with(&requests[i - 1])).map(|i| i + 1).collect();
    assert_eq!(changes, [7, 10, 13, 16], "it changes after a summary only");
    let last: Vec<String> = requests[15]
        .iter()
        .map(|m| serde_json::from_str::<Value>(m).unwrap()["content"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!((last[0].as_str(), last[2].as_str(), last.len()), ("Be kind.", "question 13", 9));
    assert!(last[1].starts_with(SUMMARY_MARKER), "{last:?}");
    assert!(summaries[1][1].contains("answer 7"), "the next one is made from the one before");
    assert!(!summaries[1][1].contains("question 3") && summaries[1][1].contains("question 6"));
    assert_eq!(test.stored("s").await.len(), 33, "and everything is kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_beginning_of_the_prompt_is_stable_on_sqlite() {
    the_beginning_of_the_prompt_is_stable(StoreKind::Sqlite, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_beginning_of_the_prompt_is_stable_on_postgres_streamed() {
    the_beginning_of_the_prompt_is_stable(StoreKind::Postgres, true).await;
}

/// A failed summary fails no turn: the window drops old turns, and the end of the next turn retries it.
#[tokio::test(flavor = "multi_thread")]
async fn a_failing_summary_model_does_not_block_turns() {
    let test = TestServer::with(StoreKind::Memory, false, turns(3)).await.unwrap();
    for _ in 0..3 {
        test.model.then(ModelResponse::Text(""));
    }
    test.model.then(ModelResponse::Error(500, "text/plain", "no", None));
    for n in 1..=3 {
        test.append_user_message(&format!("question {n}")).await;
    }
    test.model.wait_for_requests(4).await;
    // A compaction on request waits for the one in the background; with all turns kept it has nothing to do.
    test.call("POST", "/sessions/s/compact", json!({"keep_turns": 100})).await;
    let reply = test.append_user_message("question 4").await;
    assert_eq!(reply.content(), "answer 5");
    assert_eq!(test.model.requests().0[3].len(), 5, "the window cuts: two turns and the question");
    test.summary(6).await;
    assert_eq!(test.model.request_count(), 6);
    test.append_user_message("question 5").await;
    let shown = test.model.last_messages();
    assert!(shown[0]["content"].as_str().unwrap().contains("answer 6"), "{shown:?}");
    assert_eq!(shown[1..], [user("question 4"), assistant("answer 5"), user("question 5")]);
}

/// The next turn neither waits for a summary nor invalidates it.
#[tokio::test(flavor = "multi_thread")]
async fn the_next_turn_has_priority_over_compaction() {
    let test = TestServer::with(StoreKind::Sqlite, true, turns(3)).await.unwrap();
    let hold = Arc::new(Semaphore::new(0));
    for _ in 0..3 {
        test.model.then(ModelResponse::Text(""));
    }
    test.model.then(ModelResponse::Held("they ", hold.clone(), "talked"));
    for n in 1..=3 {
        test.append_user_message(&format!("question {n}")).await;
    }
    test.model.wait_for_requests(4).await;
    test.append_user_message("question 4").await;
    assert_eq!(test.model.last_messages().len(), 5, "the window cuts meanwhile");
    // The end of this turn finds a summary in progress and requests none.
    hold.add_permits(1);
    test.summary(4).await;
    assert_eq!(test.model.request_count(), 5);
    test.append_user_message("question 5").await;
    // With it the window is full again, and the next summary may have been requested.
    let shown = test.model.requests().0.pop().unwrap();
    assert!(shown[0].contains(SUMMARY_MARKER) && shown[0].contains("they talked"), "{shown:?}");
    assert_eq!(shown.len(), 6, "the summary, two turns and the question");
}

/// Shutdown does not wait for a summary.
#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_does_not_wait_for_summaries() {
    let mut test = TestServer::with(StoreKind::Sqlite, false, turns(2)).await.unwrap();
    let hold = Arc::new(Semaphore::new(0));
    for _ in 0..2 {
        test.model.then(ModelResponse::Text(""));
    }
    test.model.then(ModelResponse::Held("", hold, ""));
    test.append_user_message("question 1").await;
    test.append_user_message("question 2").await;
    test.model.wait_for_requests(3).await;
    tokio::time::timeout(std::time::Duration::from_secs(60), test.restart()).await.expect("it stops");
    assert!(test.session("s").await.summary().is_none());
    test.append_user_message("question 3").await;
    wait_until("it is written after the next turn", async || test.session("s").await.summary().is_some()).await;
}

/// An assistant has its own compaction policy, and another model may write its summaries. Runs are turns too.
#[tokio::test(flavor = "multi_thread")]
async fn an_assistant_names_its_summary_model() {
    let writer = ScriptedModelServer::default();
    let base_url = writer.start().await;
    let test = TestServer::with(StoreKind::Memory, false, |config| {
        config.models.push(model("writer", &base_url));
        let poet = json!({"name": "poet", "model": "default", "instructions": "Rhyme.", "short_term": {"max_history_turns": 2, "compact": "writer"}});
        config.assistants = vec![serde_json::from_value(poet).unwrap()];
    })
    .await
    .unwrap();
    writer.then(ModelResponse::Text("so it was"));
    test.call("POST", "/sessions", json!({"id": "s", "assistant_id": "poet"})).await;
    for n in 1..=2 {
        let run = test.call("POST", "/sessions/s/runs", json!({"input": format!("question {n}")})).await;
        assert_eq!(run.body["status"], "completed", "{run:?}");
    }
    test.summary(2).await;
    assert!(writer.bodies()[0].contains(r#""model":"writer""#));
    assert!(!writer.bodies()[0].contains("Rhyme."), "it is nobody's instructions but the assistant's");
    test.append_user_message("question 3").await;
    let shown = test.model.last_messages();
    assert_eq!((&shown[0], &shown[1]), (&system("Rhyme."), &system(&format!("{SUMMARY_MARKER}\nso it was"))));
    // Other sessions have none.
    for n in 1..=60 {
        let body =
            json!({"session_id": "t", "history": "append", "model": "default", "messages": [user(&format!("{n}"))]});
        test.chat(body).await;
    }
    assert_eq!(test.model.requests().1.len(), 0);
    let put = async |compact: Value| {
        let body = json!({"name": "prose", "short_term": {"compact": compact}});
        test.call("PUT", "/assistants/prose", body).await
    };
    assert_eq!((put(json!(true)).await.status, put(json!("writer")).await.status), (201, 200));
    for wrong in [json!(7), json!(""), json!({"model": "x"})] {
        assert_eq!(put(wrong).await.status, 400);
    }
}

/// The routes, with the built-in model.
#[tokio::test(flavor = "multi_thread")]
async fn compaction_on_request() {
    let test = TestServer::with(StoreKind::Sqlite, false, |config| config.models.clear()).await.unwrap();
    for (i, text) in ["I am Ada.", "I like\nferries.\nCALL nobody {}", "Thanks."].into_iter().enumerate() {
        let messages = json!([user(text), assistant(&format!("ok {i}")), user("So?")]);
        test.chat(json!({"session_id": "s", "history": "append", "messages": messages})).await;
    }
    let before = test.call("GET", "/sessions/s", Value::Null).await;
    assert_eq!(before.body["summary"], Value::Null);
    let result = test.call("POST", "/sessions/s/compact", json!({})).await;
    assert_eq!(
        (result.status, &result.body["compacted"], &result.body["session_id"]),
        (200, &json!(8), &json!("s")),
        "{result:?}"
    );
    assert_eq!(result.headers["etag"], format!("\"{}\"", result.body["seq"]));
    assert_eq!(result.body["summary"]["text"], "The user said: I am Ada.; So?; I like; So?");
    let after = test.call("GET", "/sessions/s", Value::Null).await;
    assert_eq!(after.body["summary"], result.body["summary"]);
    assert_eq!((&after.body["messages"], &after.body["summary"]["position"]), (&before.body["messages"], &json!(8)));
    assert_eq!(test.append_user_message("And now?").await.content(), "You said: And now? I see 6 messages.");
    let again = test.call("POST", "/sessions/s/compact", json!({"keep_turns": 1, "model": "rehearsal"})).await;
    assert_eq!(again.body["summary"]["text"], "The user said: I am Ada.; So?; I like; So?; Thanks.; So?");
    let none = test.call("POST", "/sessions/s/compact", json!({"keep_turns": 9})).await;
    assert_eq!((none.status, &none.body["compacted"]), (200, &json!(0)));
    let seq = none.body["seq"].as_u64().unwrap();
    let stale = test.call_with("POST", "/sessions/s/uncompact", json!({}), &[("if-match", "\"1\"")]).await;
    assert_eq!((stale.status, stale.code()), (412, "conflict"));
    let undone = test.call("POST", "/sessions/s/uncompact", json!({})).await;
    assert_eq!((undone.status, undone.body["seq"].as_u64()), (200, Some(seq + 1)), "{undone:?}");
    assert_eq!(test.call("GET", "/sessions/s", Value::Null).await.body["summary"], Value::Null);
    assert!(test.append_user_message("And?").await.content().ends_with("I see 15 messages."));
    // Invalid input changes nothing.
    let seq = test.session("s").await.head().seq;
    for (path, body, status) in [
        ("/sessions/s/compact", json!({"keep": 1}), 400),
        ("/sessions/s/compact", json!({"keep_turns": -1}), 400),
        ("/sessions/s/compact", json!({"keep_turns": "two"}), 400),
        ("/sessions/s/compact", json!([]), 400),
        ("/sessions/nobody/compact", json!({}), 404),
        ("/sessions/nobody/uncompact", json!({}), 404),
    ] {
        let reply = test.call("POST", path, body.clone()).await;
        assert_eq!(reply.status, status, "{path} {body}: {reply:?}");
        assert!(!reply.code().is_empty(), "{reply:?}");
    }
    assert_eq!(test.session("s").await.head().seq, seq);
    test.call("DELETE", "/sessions/s", Value::Null).await;
    assert_eq!(test.call("POST", "/sessions/s/compact", json!({})).await.status, 410);
    assert_eq!(test.call("POST", "/sessions/s/uncompact", json!({})).await.status, 410);
}

/// An error of the model server is passed on, and an unknown model is named.
#[tokio::test(flavor = "multi_thread")]
async fn compaction_on_request_with_a_failing_model() {
    let test = TestServer::with(StoreKind::Memory, false, |config| {
        let other = config.models[0].clone();
        config.models.push(tenure_server::config::ModelConfig { name: "other".into(), ..other });
    })
    .await
    .unwrap();
    for n in 1..=4 {
        test.append_user_message(&format!("question {n}")).await;
    }
    test.model.then(ModelResponse::Error(429, "application/json", r#"{"error":{"message":"slow down"}}"#, Some("3")));
    let refused = test.call("POST", "/sessions/s/compact", json!({})).await;
    assert_eq!((refused.status, refused.headers["retry-after"].to_str().unwrap()), (429, "3"));
    let unknown = test.call("POST", "/sessions/s/compact", json!({"model": "nobody"})).await;
    assert_eq!(
        (unknown.status, unknown.code(), &unknown.body["error"]["param"]),
        (404, "model_not_found", &json!("model"))
    );
    assert!(test.session("s").await.summary().is_none());
    let result = test.call("POST", "/sessions/s/compact", json!({"model": "other"})).await;
    assert_eq!(result.body["compacted"], 4, "{result:?}");
}

#[test]
fn the_summary_model_must_exist() {
    let wrong = |text: &str| Config::parse(text).unwrap_err().to_string();
    assert!(wrong("short_term: {compact: nobody}").starts_with("short_term.compact: there is no model \"nobody\""));
    let assistant = wrong("assistants: [{name: a, short_term: {compact: nobody}}]");
    assert!(assistant.starts_with("assistants[0].short_term.compact: there is no model"), "{assistant}");
    assert!(
        wrong("short_term: {compact: 7}").contains("true, false or the name of a model"),
        "{}",
        wrong("short_term: {compact: 7}")
    );
    let config = Config::parse("short_term: {compact: rehearsal}").unwrap();
    assert_eq!(config.options().policy.compact, CompactionPolicy::With("rehearsal".into()));
    assert_eq!(Config::parse(&config.to_redacted_yaml().unwrap()).unwrap().short_term, config.short_term);
}
