//! What an assistant's settings do over HTTP: stateless sessions, preferences, templates, metadata for tools,
//! questions to people, and review rules with conditions.

use crate::support::*;
use crate::tools::{call, context, toolbox};
use axum::Router;
use axum::http::HeaderMap;
use axum::routing::post;
use serde_json::{Map, Value, json};
use std::sync::{Arc, Mutex};
use tenure::{ToolError, Tools};

async fn open(assistants: Value) -> InProcessClient {
    InProcessClient::with_config("memory:", |c| c.assistants = serde_json::from_value(assistants).unwrap()).await
}

fn ask(assistant: &str, session: &str, text: &str) -> Value {
    json!({"model": assistant, "session_id": session, "messages": [{"role": "user", "content": text}]})
}

async fn answer(api: &InProcessClient, body: Value) -> String {
    let reply = api.post("/v1/chat/completions", body).await.expect_status(200);
    reply["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

/// With the scope `none` the model sees the instructions and the request, and the session has everything.
#[tokio::test(flavor = "multi_thread")]
async fn a_stateless_assistant() {
    let none = json!({"scope": "none"});
    let api = open(json!([{"name": "goldfish", "instructions": "Be kind.", "memory": none}, {"name": "plain"}])).await;
    for text in ["one", "two", "three"] {
        let goldfish = answer(&api, ask("goldfish", "g", text)).await;
        assert!(goldfish.contains("I see 2 messages"), "{goldfish}");
    }
    let reply = api.post("/v1/chat/completions", ask("goldfish", "g", "four")).await.expect_status(200);
    assert_eq!(reply["session"]["spliced"], 0, "{reply}");
    assert_eq!(api.get("/sessions/g/messages").await.expect_status(200)["data"].as_array().unwrap().len(), 8);
    answer(&api, ask("plain", "p", "one")).await;
    let plain = answer(&api, ask("plain", "p", "two")).await;
    assert!(plain.contains("I see 3 messages"), "{plain}");
    // Without a `memory` section, the scope is `session`.
    let memory = api.post("/memories", json!({"text": "likes tea", "session_id": "p"})).await.expect_status(201);
    assert_eq!(memory["scope"], "session");
    let reply = api.post("/v1/chat/completions", ask("plain", "p", "Which tea?")).await.expect_status(200);
    assert_eq!(reply["session"]["memories"][0]["id"], memory["id"], "{reply}");
    let error = api.post("/memories", json!({"text": "likes tea", "session_id": "g"})).await.expect_error(400);
    assert_eq!(error, ("invalid".to_owned(), "session_id".to_owned()));
}

/// Preferences are stored, listed and injected over HTTP.
#[tokio::test(flavor = "multi_thread")]
async fn preferences_over_http() {
    let api = open(json!([{"name": "friend", "memory": {"scope": "user"}}])).await;
    let metric = json!({"text": "always use metric units", "kind": "preference"});
    let metric = api.post("/memories", metric).await.expect_status(201);
    assert_eq!(metric["kind"], "preference");
    let dog = api.post("/memories", json!({"text": "owns a dog"})).await.expect_status(201);
    assert_eq!(dog["kind"], "fact");
    for (kind, memory) in [("preference", &metric), ("fact", &dog)] {
        let list = api.get(&format!("/memories?kind={kind}")).await.expect_status(200);
        assert_eq!((list["data"].as_array().unwrap().len(), &list["data"][0]["id"]), (1, &memory["id"]), "{list}");
    }
    let reply = api.post("/v1/chat/completions", ask("friend", "s", "How far is it to Rome?")).await.expect_status(200);
    assert_eq!(reply["session"]["memories"], json!([{"id": metric["id"], "kind": "preference", "score": 0.0}]));
    assert_eq!(api.get("/memories?kind=opinion").await.expect_error(400).1, "kind");
    assert_eq!(api.post("/memories", json!({"text": "x", "kind": "opinion"})).await.expect_error(400).1, "kind");
    let path = format!("/memories/{}", metric["id"].as_str().unwrap());
    api.delete(&path).await.expect_status(200);
    assert_eq!(api.get("/memories?kind=preference").await.expect_status(200)["data"], json!([]));
}

/// An invalid template or condition is rejected with its path; one that fails at run time fails the run.
#[tokio::test(flavor = "multi_thread")]
async fn templates_over_http() {
    let api = InProcessClient::memory().await;
    for (assistant, param) in [
        (json!({"name": "a", "instructions": "Hi {{ metadata.name"}), "instructions"),
        (json!({"name": "a", "instructions": "{% include 'x' %}"}), "instructions"),
        (json!({"name": "a", "review": [{"tool": "x", "when": "amount >"}]}), "review[0].when"),
    ] {
        assert_eq!(
            api.post("/assistants", assistant.clone()).await.expect_error(400),
            ("invalid".into(), param.into())
        );
        assert_eq!(api.put("/assistants/a", assistant).await.expect_error(400), ("invalid".into(), param.into()));
    }
    api.get("/assistants/a").await.expect_error(404);
    let assistant = json!({"name": "a", "model": "rehearsal", "instructions": "Share {{ 100 / metadata.people }}."});
    api.post("/assistants", assistant).await.expect_status(201);
    api.post("/sessions", json!({"id": "s", "assistant_id": "a", "metadata": {"people": 0}})).await.expect_status(201);
    let (code, _) = api.post("/v1/chat/completions", ask("a", "s", "Hello")).await.expect_error(422);
    assert_eq!(code, "instructions_failed");
    let runs = api.get("/sessions/s/runs").await.expect_status(200);
    assert_eq!(
        (&runs["data"][0]["status"], &runs["data"][0]["code"]),
        (&json!("failed"), &json!("instructions_failed"))
    );
    api.patch("/sessions/s", json!({"metadata": {"people": 4}})).await.expect_status(200);
    answer(&api, ask("a", "s", "Hello again")).await;
}

/// A question of the model is a review with its choices; the decision is the result of the call.
#[tokio::test(flavor = "multi_thread")]
async fn a_question_to_a_person() {
    let api = open(json!([{"name": "painter", "model": "rehearsal", "tools": ["ask_human"]}])).await;
    let called = r#"CALL ask_human {"question": "Which color?", "choices": ["red", "blue"], "queue": "design"}"#;
    let notice = answer(&api, ask("painter", "s", called)).await;
    assert!(notice.contains("queue design): Which color?"), "{notice}");
    assert_eq!(api.get("/sessions/s").await.expect_status(200)["status"], "paused");
    let list = api.get("/reviews?queue=design").await.expect_status(200);
    let path = format!("/reviews/{}", list["data"][0]["id"].as_str().unwrap());
    let review = api.get(&path).await.expect_status(200);
    assert_eq!(
        (&review["kind"], &review["question"], &review["choices"], &review["step"]),
        (&json!("question"), &json!("Which color?"), &json!(["red", "blue"]), &json!("ask_human"))
    );
    let decision = format!("{path}/decision");
    let green = json!({"decision": "approved", "choice": "green"});
    assert_eq!(api.post(&decision, green).await.expect_error(400).1, "choice");
    let blue = json!({"decision": "approved", "choice": "blue", "reviewer": "bob"});
    let decided = api.post(&decision, blue).await.expect_status(200);
    assert_eq!((&decided["choice"], &decided["decision"]), (&json!("blue"), &json!("approved")));
    wait_until("the run has continued", async || {
        api.get("/sessions/s/runs").await.expect_status(200)["data"][0]["status"] == "completed"
    })
    .await;
    let messages = api.get("/sessions/s/messages").await.expect_status(200);
    assert_eq!(messages["data"][2]["message"]["content"], r#"{"answer":"blue","decision":"approved"}"#, "{messages}");
}

/// The patterns select the metadata that a tool receives: in a header, or in a field of the body.
#[tokio::test(flavor = "multi_thread")]
async fn http_tools_receive_metadata() {
    let seen = Arc::new(Mutex::new(Vec::<(HeaderMap, String)>::new()));
    let record = seen.clone();
    let routes = Router::new()
        .route("/", post(async move |headers: HeaderMap, body: String| record.lock().unwrap().push((headers, body))));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, routes).await });
    let tool = |name: &str, metadata: Value, field: Option<&str>| {
        let mut tool = json!({"name": name, "description": "d", "url": url, "read_only": true, "metadata": metadata});
        if let Some(field) = field {
            tool["metadata_field"] = json!(field);
        }
        json!({"http": tool})
    };
    let sources = json!([
        tool("none", json!([]), None),
        tool("header", json!(["c*"]), None),
        tool("body", json!(["*", "!secret"]), Some("session"))
    ]);
    let (tools, assistant) = toolbox(sources, json!({}));
    let cached: Vec<bool> = tools.list(&context(&assistant)).await.unwrap().iter().map(|t| t.cache).collect();
    assert_eq!(cached, [true, false, false], "a result may depend on the metadata");
    let metadata: Map<String, Value> =
        json!({"city": "Zürich\n", "channel": "web", "secret": 7}).as_object().unwrap().clone();
    let context = context(&assistant).with_metadata(&metadata);
    for name in ["none", "header", "body"] {
        tools.call(&context, &call("s", name, json!({"q": 1, "session": "forged"}))).await.unwrap();
    }
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    let header = |n: usize| seen[n].0.get("x-tenure-metadata").map(|h| h.to_str().unwrap());
    assert_eq!((header(0), header(2)), (None, None));
    assert_eq!(header(1), Some(r#"{"channel":"web","city":"Z\u00fcrich\n"}"#));
    assert_eq!(
        serde_json::from_str::<Value>(&seen[2].1).unwrap(),
        json!({"q": 1, "session": {"city": "Zürich\n", "channel": "web"}})
    );
    let long = Map::from_iter([("city".to_owned(), json!("x".repeat(9000)))]);
    let refused = tools.call(&context.with_metadata(&long), &call("s", "header", json!({}))).await;
    assert!(matches!(refused, Err(ToolError::NotCalled(reason)) if reason.contains("metadata_field")));
}

/// An MCP server that returns the `_meta` of a call.
const META_SERVER: &str = r#"
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    method = message.get("method")
    if method == "initialize":
        result = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": {"name": "t", "version": "1"}}
    elif method == "tools/list":
        result = {"tools": [{"name": "meta", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}]}
    elif method == "tools/call":
        meta = (message["params"].get("_meta") or {}).get("tenure/metadata")
        result = {"content": [{"type": "text", "text": json.dumps(meta, sort_keys=True)}]}
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"#;

#[tokio::test(flavor = "multi_thread")]
async fn mcp_tools_receive_metadata() {
    let server = |prefix: &str, metadata: Value| json!({"mcp": {"command": "python3", "args": ["-c", META_SERVER], "prefix": prefix, "metadata": metadata}});
    let (tools, assistant) = toolbox(json!([server("a", json!(["customer_*"])), server("b", json!([]))]), json!({}));
    let metadata: Map<String, Value> = json!({"customer_id": "c1", "other": 1}).as_object().unwrap().clone();
    let context = context(&assistant).with_metadata(&metadata);
    let cached: Vec<bool> = tools.list(&context).await.unwrap().iter().map(|t| t.cache).collect();
    assert_eq!(cached, [false, true]);
    let result = async |tool: &str| tools.call(&context, &call("s", tool, json!({}))).await.unwrap().content;
    assert_eq!(result("a_meta").await, r#"{"customer_id": "c1"}"#);
    assert_eq!(result("b_meta").await, "null");
    tools.close().await;
}
