//! Requests as people write them by hand: without a body, with dates, with misspelled names.

use crate::support::*;
use serde_json::{Value, json};

/// The operations whose bodies are optional, by method and path.
fn optional_bodies() -> Vec<(String, String)> {
    let document = serde_json::to_value(tenure_server::router::openapi()).unwrap();
    let mut all = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            if operation["requestBody"]["required"] == false {
                all.push((method.to_uppercase(), path.clone()));
            }
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_can_be_omitted_if_all_its_fields_are_optional() {
    let test = TestServer::new(StoreKind::Memory, false).await.unwrap();
    test.chat(chat_request("s", "Hi")).await;
    let send_empty = async |method: &str, path: &str, kind: Option<&str>| {
        let url = format!("{}{path}", test.client.base);
        let mut request = test.client.http.request(method.parse().unwrap(), url);
        if let Some(kind) = kind {
            request = request.header("content-type", kind).body("");
        }
        send(request).await
    };
    let all = optional_bodies();
    for path in ["/sessions", "/sessions/{id}/fork", "/sessions/{id}/checkpoints", "/sessions/{id}/compact"] {
        assert!(all.contains(&("POST".to_owned(), path.to_owned())), "{path}: {all:?}");
    }
    for kind in [None, Some("application/json"), Some("application/x-www-form-urlencoded")] {
        for (method, path) in &all {
            // Creating a key would make keys required.
            if path == "/keys" {
                continue;
            }
            let path = path.replace("{id}", "s").replace("{review}", "nothing").replace("{key}", "nothing");
            let (status, body) = send_empty(method, &path, kind).await;
            let needs_a_position = path.ends_with("/rewind");
            assert_eq!(status == 400, needs_a_position, "{method} {path}: {body}");
            assert!(status < 415, "{method} {path}: {status} {body}");
        }
    }
    assert_eq!(send_empty("POST", "/sessions", None).await.0, 201);
    assert_eq!(send_empty("POST", "/sessions/s/fork", None).await.0, 201);
    // Required fields are named.
    let (status, body) = send_empty("POST", "/memories", None).await;
    assert_eq!(status, 400);
    assert!(body["error"]["message"].as_str().unwrap().contains("`text`"), "{body}");
    // A body that is not JSON is refused, also where it is optional.
    let url = format!("{}/sessions", test.client.base);
    let form = test.client.http.post(url).header("content-type", "application/x-www-form-urlencoded").body("id=x");
    assert_error(&send(form).await, 415, "unsupported_media_type", None);
}

#[tokio::test]
async fn dates_are_accepted_as_times() {
    // Everything is created at 2026-01-01T00:00:00Z.
    let api = InProcessClient::memory().await;
    api.post("/sessions", json!({"id": "one"})).await.expect_status(201);
    let found = async |filter: &str| {
        api.get(&format!("/sessions?{filter}")).await.expect_status(200)["data"].as_array().unwrap().len()
    };
    assert_eq!(found("created_after=2026-01-01").await, 1);
    assert_eq!(found("created_after=2026-01-02").await, 0);
    assert_eq!(found("created_before=2026-01-01").await, 0);
    assert_eq!(found("created_before=2026-01-02").await, 1);
    assert_eq!(found("created_before=2026-01-01T00:00:01Z").await, 1);
    api.get("/audit?from=2026-01-01&to=2026-02-01").await;
    for wrong in ["yesterday", "2026-13-01", "2026-01-1", "20260101", "2026-01-01T00:00", "2026-01-01T", ""] {
        for (path, param) in [("/sessions", "created_after"), ("/sessions", "created_before"), ("/audit", "from")] {
            let answer = api.get(&format!("{path}?{param}={wrong}")).await;
            let message = answer.text.clone();
            assert_eq!(answer.expect_error(400), ("invalid".to_owned(), param.to_owned()), "{wrong}");
            assert!(message.contains("2026-01-31 (midnight UTC)"), "{message}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_misspelled_session_id_is_reported() {
    for stream in [false, true] {
        let test = TestServer::new(StoreKind::Memory, stream).await.unwrap();
        let ask = async |field: &str, value: Value| {
            test.chat(json!({"messages": [user(field)], field: value, "stream": stream})).await
        };
        for name in ["sessionId", "session-id", "sessionid", "SessionID", "thread_id", "threadId", "conversation_id"] {
            let reply = ask(name, json!("trip")).await;
            let want = format!("`{name}` does not name the session; did you mean `session_id`?");
            assert_eq!(reply.body["session"]["warnings"], json!([want]), "{}", reply.text);
            assert_eq!(reply.headers["x-tenure-warning"], want.as_str());
            // The field is passed on as every other unknown field.
            assert!(test.model.bodies().pop().unwrap().contains(&format!("\"{name}\":\"trip\"")));
        }
        for (name, value) in
            [("session_id", json!("trip")), ("sessionId", json!("")), ("thread_id", Value::Null), ("sid", json!("x"))]
        {
            let reply = ask(name, value).await;
            assert_eq!((reply.status, &reply.body["session"]["warnings"]), (200, &Value::Null), "{}", reply.text);
            assert!(!reply.headers.contains_key("x-tenure-warning"));
        }
        // A header that names the session is enough.
        let body = json!({"sessionId": "trip", "messages": [user("Hi")]});
        let named = test.client.chat(stream, body.clone(), &[("x-session-id", "other")]).await;
        assert_eq!(named.body["session"]["warnings"], Value::Null);
        let mut unstored = body;
        unstored["store"] = json!(false);
        let unstored = test.client.chat(stream, unstored, &[]).await;
        assert!(unstored.headers.contains_key("x-tenure-warning"), "{}", unstored.text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_built_in_model_is_listed_only_if_there_is_no_other() {
    let listed = async |models: bool| {
        let change = |config: &mut tenure_server::config::Config| {
            if !models {
                config.models.clear();
            }
        };
        let test = TestServer::with(StoreKind::Memory, false, change).await.unwrap();
        let (_, list) = send(test.client.http.get(format!("{}/v1/models", test.client.base))).await;
        each_field(&list, "id")
    };
    assert_eq!(listed(true).await, ["default"]);
    assert_eq!(listed(false).await, ["rehearsal"]);
}

/// Titles for lists: of sessions without one, the first words of the first question.
#[tokio::test]
async fn lists_include_display_titles_on_request() {
    let api = InProcessClient::memory().await;
    api.post("/sessions", json!({"id": "titled", "title": "Mine"})).await.expect_status(201);
    api.post("/sessions", json!({"id": "empty"})).await.expect_status(201);
    api.post("/sessions", json!({"id": "asked"})).await.expect_status(201);
    let question = format!("Where  is the\nferry? {}", "x".repeat(100));
    api.append_messages("asked", json!([system("Be kind."), user(&question), assistant("Here.")])).await;
    let titles = |list: &Value| {
        let titles = list["data"].as_array().unwrap().iter().map(|s| (s["id"].clone(), s["display_title"].clone()));
        titles.collect::<std::collections::HashMap<_, _>>()
    };
    let list = titles(&api.get("/sessions?include=display_title").await.expect_status(200));
    assert_eq!(list[&json!("titled")], "Mine");
    assert_eq!(list[&json!("asked")], "Where is the ferry?…");
    assert_eq!(list[&json!("empty")], Value::Null);
    let v1 = titles(&api.get("/v1/sessions?include=display_title").await.expect_status(200));
    assert_eq!(v1, list);
    let plain = titles(&api.get("/sessions").await.expect_status(200));
    assert!(plain.values().all(Value::is_null), "{plain:?}");
    assert_eq!(api.get("/sessions/asked").await.expect_status(200)["title"], Value::Null);
    assert_eq!(api.get("/sessions?include=messages").await.expect_error(400).1, "include");
    // It follows the messages: after a rewind, the next question counts.
    api.post("/sessions/asked/rewind", json!({"position": 1})).await.expect_status(200);
    api.append_messages("asked", json!([user("What is the fare?")])).await;
    let list = titles(&api.get("/sessions?include=display_title").await.expect_status(200));
    assert_eq!(list[&json!("asked")], "What is the fare?");
}
