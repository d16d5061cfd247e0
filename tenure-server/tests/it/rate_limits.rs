//! Rate limits over HTTP: of model servers and of assistants; and requests to expired sessions.

use crate::runs::{Toolbox, test_server};
use crate::support::*;
use serde_json::{Value, json};
use tenure::run::OnExpired;
use tenure_server::config::Config;
use tenure_server::jobs::schedules;

const LIMITED: ModelResponse =
    ModelResponse::Error(429, "application/json", r#"{"error":{"message":"slow down"}}"#, Some("2"));

fn without_waiting() -> Value {
    json!({"runs": {"retry_wait": "0s"}})
}

/// A run whose model server answers 429 beyond `retry_wait` is paused with a reason, and resumes by itself after
/// `Retry-After`, also after a restart.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_pauses_and_resumes() {
    for kind in [StoreKind::Sqlite, StoreKind::Postgres] {
        let tools = Toolbox::start().await;
        let Some(mut test) = test_server(kind, &tools, without_waiting()).await else { continue };
        for restart in [false, true] {
            let id = if restart { "b" } else { "a" };
            test.client.begin(id).await;
            let calls = vec![("call_1", "pay", r#"{"x": 1}"#)];
            test.model.then(ModelResponse::ToolCalls(calls)).then(LIMITED).then(ModelResponse::Text("done"));
            let run = test.client.run(id, "pay", "wait").await;
            assert_eq!((run.status, run.body["status"].as_str()), (200, Some("paused")), "{run:?}");
            assert!(run.body["resumes_at"].as_str().is_some_and(|at| at.ends_with('Z')), "{run:?}");
            let session = test.client.send("GET", &format!("/sessions/{id}"), Value::Null).await.body;
            assert_eq!(session["status"], "paused");
            assert_eq!(session["pause"]["resumes_at"], run.body["resumes_at"]);
            let reason = session["pause"]["reason"].as_str().unwrap();
            assert!(reason.starts_with("rate limited: ") && reason.contains("429"), "{reason}");
            let refused = test.client.run(id, "more", "wait").await;
            assert_eq!((refused.status, refused.body["error"]["code"].as_str()), (409, Some("paused")));
            if restart {
                test.restart().await;
            }
            test.client.wait_for_status(id, "completed").await;
            assert_eq!(tools.count("pay"), if restart { 2 } else { 1 }, "no tool call is repeated");
            let session = test.client.send("GET", &format!("/sessions/{id}"), Value::Null).await.body;
            assert_eq!((&session["status"], &session["pause"]), (&json!("active"), &Value::Null));
            assert_eq!(session["messages"].as_array().unwrap().last().unwrap()["message"]["content"], "done");
        }
    }
}

/// A chat request to an assistant gets a notice when its run is paused; the next request continues after the answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_chat_with_an_assistant_gets_a_notice() {
    for stream in [false, true] {
        let tools = Toolbox::start().await;
        let mut test = test_server(StoreKind::Memory, &tools, without_waiting()).await.unwrap();
        test.stream = stream;
        test.model.then(LIMITED).then(ModelResponse::Text("done"));
        let ask = |text: &str| json!({"model": "agent", "session_id": "s", "messages": [user(text)]});
        let reply = test.chat(ask("hi")).await;
        assert_eq!((reply.status, reply.is_done()), (200, stream), "{reply:?}");
        assert!(reply.content().starts_with("The model is rate limited."), "{reply:?}");
        assert_eq!(test.stored("s").await, [user("hi")]);
        test.client.wait_for_status("s", "completed").await;
        assert_eq!(test.stored("s").await, [user("hi"), assistant("done")]);
    }
}

/// A model call waits for a limit that is over within `retry_wait`.
#[tokio::test(flavor = "multi_thread")]
async fn a_chat_request_waits_for_a_short_limit() {
    let test = TestServer::new(StoreKind::Memory, false).await.unwrap();
    let at_once = ModelResponse::Error(503, "text/plain", "busy", Some("Thu, 01 Jan 1970 00:00:00 GMT"));
    test.model.then(at_once).then(ModelResponse::Text("done"));
    let reply = test.chat(json!({"session_id": "s", "messages": [user("hi")]})).await;
    assert_eq!((reply.status, reply.content(), test.model.request_count()), (200, "done", 2));
}

/// The runs of an assistant over its rate limit are paused like those of a limited model server; other assistants
/// are not affected.
#[tokio::test(flavor = "multi_thread")]
async fn an_assistant_has_a_rate_limit() {
    for (limit, name) in [
        (json!({"requests_per_minute": 1}), "requests_per_minute"),
        (json!({"tokens_per_minute": 5}), "tokens_per_minute"),
    ] {
        let tools = Toolbox::start().await;
        let limited = json!({"rate_limit": limit, "runs": {"retry_wait": "0s"}});
        let test = test_server(StoreKind::Memory, &tools, limited).await.unwrap();
        test.client.begin("a").await;
        test.client.begin("b").await;
        assert_eq!(test.client.run("a", "hi", "wait").await.body["status"], "completed");
        let run = test.client.run("b", "hi", "wait").await;
        assert_eq!(run.body["status"], "paused", "{run:?}");
        let session = test.client.send("GET", "/sessions/b", Value::Null).await.body;
        assert!(session["pause"]["reason"].as_str().unwrap().contains(name), "{session}");
        let direct = test.client.chat(false, json!({"model": "default", "messages": [user("hi")]}), &[]).await;
        assert_eq!(direct.status, 200);
        assert_eq!(test.model.request_count(), 2);
    }
}

/// Runs, appended messages and schedules treat an expired session as `on_expired` says, like chat.
#[tokio::test(flavor = "multi_thread")]
async fn every_request_follows_on_expired() {
    let messages = json!({"messages": [user("two")]});
    for policy in [OnExpired::Restore, OnExpired::Fresh, OnExpired::Reject] {
        for request in ["run", "empty run", "append"] {
            let test = InProcessClient::with_config("memory:", |c: &mut Config| c.sessions.on_expired = policy).await;
            let new = json!({"id": "s", "assistant_id": "declared", "thread_id": "t"});
            test.post("/sessions", &new).await.expect_status(201);
            test.append_messages("s", json!([user("one")])).await;
            test.advance(8 * 24 * 3600);
            assert_eq!(each_field(&test.get("/sessions?status=expired").await.expect_status(200), "id"), ["s"]);
            assert_eq!(test.get("/sessions").await.expect_status(200)["data"], json!([]));
            let response = match request {
                "run" => test.post("/sessions/s/runs", json!({"input": "two"})).await,
                "empty run" => test.post("/sessions/s/runs", json!({})).await,
                _ => test.post("/sessions/s/messages", &messages).await,
            };
            let has_answer = request != "append";
            let is_rejected = policy == OnExpired::Reject || (policy == OnExpired::Fresh && request == "empty run");
            if is_rejected {
                assert_eq!(response.expect_error(410).0, "gone", "{policy:?} {request}");
                continue;
            }
            assert!(response.status.is_success(), "{policy:?} {request}: {}", response.text);
            let session = test.get("/sessions/s").await.expect_status(200);
            assert_eq!((&session["assistant_id"], &session["thread_id"]), (&json!("declared"), &json!("t")));
            let before = usize::from(policy == OnExpired::Restore);
            let input = usize::from(request != "empty run");
            let want = before + input + usize::from(has_answer);
            assert_eq!(session["messages"].as_array().unwrap().len(), want, "{policy:?} {request}: {session}");
            let expired = test.get("/sessions?status=expired").await.expect_status(200);
            assert_eq!(expired["data"].as_array().unwrap().len(), 1 - before, "{expired}");
        }
    }
}

/// A schedule with one session follows `on_expired` too.
#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_follows_on_expired() {
    for (policy, messages) in [(OnExpired::Restore, 4), (OnExpired::Fresh, 2), (OnExpired::Reject, 2)] {
        let test = InProcessClient::with_config("memory:", |c: &mut Config| {
            c.sessions.on_expired = policy;
            let schedule =
                json!({"name": "tick", "cron": "0 0 * * thu", "assistant": "declared", "input": "go", "session": "s"});
            c.schedules = vec![serde_json::from_value(schedule).unwrap()];
            c.sessions.ttl = "1d".parse().unwrap();
        })
        .await;
        // The clock starts on a Thursday at midnight.
        for _ in 0..3 {
            schedules::evaluate_all(&test.app).await;
            wait_until("the run is over", async || {
                let head = test.app.tenure.head(&default_principal(), &"s".try_into().unwrap()).await;
                head.map_or(true, |h| h.run.is_none())
            })
            .await;
            test.advance(7 * 24 * 3600);
        }
        let listed = test.get("/sessions?status=active,expired").await.expect_status(200);
        let newest = &listed["data"][0];
        assert_eq!(newest["message_count"], messages, "{policy:?}: {listed}");
    }
}

/// With `sessions: {fresh: true}`, each interaction of a thread with the assistant starts a new session, unless the
/// request says otherwise.
#[tokio::test]
async fn an_assistant_can_require_fresh_sessions() {
    let test = InProcessClient::with_config("memory:", |c: &mut Config| {
        c.assistants.push(serde_json::from_value(json!({"name": "once", "sessions": {"fresh": true}})).unwrap());
    })
    .await;
    let interact = async |body: Value| test.post("/threads/t/session", body).await;
    let first = interact(json!({"assistant_id": "once"})).await.expect_status(201);
    let second = interact(json!({"assistant_id": "once"})).await.expect_status(201);
    assert_ne!(first["id"], second["id"]);
    let reused = interact(json!({"assistant_id": "once", "fresh": false})).await.expect_status(200);
    assert_eq!(reused["id"], second["id"]);
    let other = interact(json!({"assistant_id": "declared"})).await.expect_status(201);
    assert_eq!(interact(json!({"assistant_id": "declared"})).await.expect_status(200)["id"], other["id"]);
}

/// Messages that start a run carry its id, like those that it produces; appended messages carry none. Tool results
/// that a client sends set a checkpoint.
#[tokio::test(flavor = "multi_thread")]
async fn input_messages_carry_their_run() {
    let test = TestServer::new(StoreKind::Sqlite, false).await.unwrap();
    let tools = json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]);
    test.model.then(ModelResponse::ToolCalls(vec![("call_1", "look", "{}")])).then(ModelResponse::Text("done"));
    test.client.send("POST", "/sessions", json!({"id": "s"})).await;
    test.client.send("POST", "/sessions/s/messages", json!({"messages": [user("zero"), assistant("ok")]})).await;
    let first = test.chat(json!({"session_id": "s", "messages": [user("one")], "tools": tools})).await;
    let second = test.chat(json!({"session_id": "s", "messages": [tool("call_1", "seen")], "tools": tools})).await;
    let run = |reply: &Reply| reply.headers["x-run-id"].to_str().unwrap().to_owned();
    let want = [None, None, Some(run(&first)), Some(run(&first)), Some(run(&second)), Some(run(&second))];
    for query in ["", "?last=100"] {
        let list = test.client.send("GET", &format!("/sessions/s/messages{query}"), Value::Null).await.body;
        let ids: Vec<_> =
            list["data"].as_array().unwrap().iter().map(|m| m["run_id"].as_str().map(str::to_owned)).collect();
        assert_eq!(ids, want, "{query}: {list}");
    }
    let list = test.client.send("GET", "/sessions/s/checkpoints", Value::Null).await.body;
    let checkpoint = list["data"].as_array().unwrap().iter().find(|c| c["label"] == "turn-2.1").unwrap();
    assert_eq!((&checkpoint["position"], &checkpoint["run_id"]), (&json!(5), &json!(run(&second))), "{list}");
}
