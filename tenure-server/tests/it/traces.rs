//! Recorded request sequences of real clients, replayed over HTTP: with a `session_id` the session must match the
//! trace after each request, and without one each conversation must be found by its content.
//!
//! The traces and their README are in `tenure/tests/fixtures/traces`.

use crate::support::*;
use axum::Router;
use axum::routing::post;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

fn traces() -> Vec<(String, Value)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tenure/tests/fixtures/traces");
    let mut paths: Vec<_> = std::fs::read_dir(dir).unwrap().map(|f| f.unwrap().path()).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == "json"));
    paths.sort();
    assert!(paths.len() > 100, "the traces are there");
    let read = |path: &std::path::PathBuf| {
        let trace = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        (path.file_stem().unwrap().to_string_lossy().into_owned(), trace)
    };
    paths.iter().map(read).collect()
}

fn list(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

/// Renders a stored message in the notation of the traces.
fn line(message: &Value) -> Option<String> {
    let short = |id: &str| id.chars().skip(id.chars().count().saturating_sub(5)).collect::<String>();
    let texts = |parts: &[Value]| parts.iter().filter_map(|p| p["text"].as_str()).collect::<Vec<_>>().join("\n");
    let (text, parts) = match &message["content"] {
        Value::String(text) => (text.clone(), Vec::new()),
        Value::Array(parts) => (texts(parts), parts.clone()),
        _ => (String::new(), Vec::new()),
    };
    let calls = list(&message["tool_calls"]);
    Some(match message["role"].as_str().unwrap() {
        "system" | "developer" => return None,
        "tool" => format!("tool {}: {text}", short(message["tool_call_id"].as_str().unwrap())),
        "assistant" if !calls.is_empty() => {
            let call =
                |c: &Value| format!("{}#{}", c["function"]["name"].as_str().unwrap(), short(c["id"].as_str().unwrap()));
            format!("calls {}", calls.iter().map(call).collect::<Vec<_>>().join(" "))
        }
        "user" if parts.iter().any(|p| p["type"] == "image_url") => format!("user: {text} +picture"),
        role => format!("{role}: {text}"),
    })
}

fn lines(value: &Value) -> Vec<String> {
    list(value).iter().map(|l| l.as_str().unwrap().to_owned()).collect()
}

fn is_expected(expected: &Value, stored: &[String]) -> bool {
    let questions = |lines: &[String]| lines.iter().filter(|l| l.starts_with("user: ")).cloned().collect::<Vec<_>>();
    let alternatives = list(&expected["or"]);
    let mut right = [&expected["stored_after"]].into_iter().chain(&alternatives).map(lines);
    right.any(
        |lines| {
            if expected["compare"] == "questions" { questions(&lines) == questions(stored) } else { lines == stored }
        },
    )
}

/// A server with its own tool `search`, for traces in which the server runs it.
async fn test_server(kind: StoreKind) -> Option<TestServer> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let routes = Router::new().route("/", post(|| async { "found" }));
    tokio::spawn(async move { axum::serve(listener, routes).await });
    let search =
        json!({"http": {"name": "search", "description": "Search.", "url": url, "parameters": {"type": "object"}}});
    let agent = serde_json::from_value(json!({"name": "agent", "model": "default", "tools": [search]})).unwrap();
    TestServer::with(kind, false, |config| config.assistants = vec![agent]).await
}

/// Sends one request of a trace.
async fn send(test: &TestServer, request: &Value, user: &str, session: Option<&str>) -> Reply {
    let answers = list(&request["answer"]);
    for message in answers.iter().filter(|m| m["role"] == "assistant") {
        test.model.then(ModelResponse::Message(message.clone()));
    }
    if request["failed"] == true {
        test.model.then(ModelResponse::Error(400, "application/json", r#"{"error":{"message":"no"}}"#, None));
    }
    let mut body = json!({"messages": request["messages"], "model": "default"});
    if answers.len() > 1 || request["agent"] == true {
        body["model"] = json!("agent");
    }
    if let Some(session) = session {
        body["session_id"] = json!(session);
    }
    let mut headers = vec![("x-tenure-user", user)];
    headers.extend(request["retry_count"].as_str().map(|n| ("x-stainless-retry-count", n)));
    let reply = test.client.chat(request["stream"] == true, body, &headers).await;
    assert_eq!(reply.status == 400, request["failed"] == true, "{reply:?}");
    reply
}

/// A trace in which the server runs a tool needs its assistant from the beginning.
fn with_agent(mut trace: Value) -> Value {
    let requests = trace["requests"].as_array_mut().unwrap();
    let agent = requests.iter().any(|r| list(&r["answer"]).len() > 1);
    requests.iter_mut().for_each(|r| r["agent"] = json!(agent));
    trace
}

async fn stored(test: &TestServer, user: &str, session: &str) -> Vec<String> {
    let request = test.client.http.get(format!("{}/v1/sessions/{session}", test.client.base));
    let session: Value = request.header("x-tenure-user", user).send().await.unwrap().json().await.unwrap();
    list(&session["messages"]).iter().filter_map(line).collect()
}

async fn with_session_ids(kind: StoreKind) {
    let Some(test) = test_server(kind).await else { return };
    let mut wrong = Vec::new();
    for (name, trace) in traces() {
        for (i, request) in list(&with_agent(trace)["requests"]).iter().enumerate() {
            if request["side"] == true {
                continue;
            }
            send(&test, request, &name, Some(&name)).await;
            let stored = stored(&test, &name, &name).await;
            if !is_expected(&request["expected"], &stored) {
                wrong.push(format!("{name}, request {i}\n  {stored:#?}\n  {}", request["expected"]));
                break;
            }
            let shown: Vec<String> = test.model.last_messages().iter().filter_map(line).collect();
            if request["expected"]["shown"].is_array() && lines(&request["expected"]["shown"]) != shown {
                wrong.push(format!("{name}, request {i} shows\n  {shown:#?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} traces are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

async fn without_session_ids(kind: StoreKind) {
    let Some(test) = test_server(kind).await else { return };
    let mut wrong = Vec::new();
    for (name, trace) in traces() {
        // The sessions of each conversation of the trace.
        let mut sessions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (i, request) in list(&with_agent(trace)["requests"]).iter().enumerate() {
            let reply = send(&test, request, &name, None).await;
            let id = if request["failed"] == true {
                reply.headers.get("x-session-id").map(|v| v.to_str().unwrap().to_owned())
            } else {
                Some(reply.session_id())
            };
            let Some(id) = id else { continue };
            let expected = &request["expected"];
            let label = expected["without_id"].as_str().unwrap().to_owned();
            let other = sessions.iter().any(|(l, ids)| *l != label && ids.contains(&id));
            let known = sessions.get(&label).is_some_and(|ids| ids.contains(&id));
            let is_new = !sessions.values().any(|ids| ids.contains(&id));
            let may_be_new = expected["without_id_new_is_fine"] == true || !sessions.contains_key(&label);
            let right = known || (is_new && may_be_new) || (other && expected["without_id_new_is_fine"] == true);
            if !right {
                wrong.push(format!("{name}, request {i} ({label}) is in {id}, of {sessions:?}"));
                break;
            }
            sessions.entry(label).or_default().insert(id);
        }
    }
    assert!(wrong.is_empty(), "{} traces are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn with_session_ids_on_sqlite() {
    with_session_ids(StoreKind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_session_ids_on_postgres() {
    with_session_ids(StoreKind::Postgres).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_session_ids_on_sqlite() {
    without_session_ids(StoreKind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_session_ids_on_postgres() {
    without_session_ids(StoreKind::Postgres).await;
}
