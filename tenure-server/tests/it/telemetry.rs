//! Logs and traces: ids, counts and times, and never the content of messages.

use crate::support::{ServerProcess, chat_request, send, serve};
use axum::extract::State;
use axum::{Router, body::Bytes};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

const MARKER: &str = "PLUM-7731";

/// Sends valid and invalid requests of many kinds, all containing the marker.
async fn send_chat_requests(server: &ServerProcess) {
    let post = |body: String| {
        server.request("POST", "/v1/chat/completions").header("content-type", "application/json").body(body)
    };
    assert_eq!(server.chat("s-1", MARKER).await.0, 200);
    let mut streamed = chat_request("s-1", &format!("CALL {MARKER} {{\"a\": \"{MARKER}\"}}"));
    streamed["stream"] = true.into();
    assert_eq!(send(post(streamed.to_string())).await.0, 200);
    for body in [
        format!("{{\"messages\": [{{\"role\": \"{MARKER}\", \"content\": 1}}]}}"),
        format!("{{\"messages\": \"{MARKER}\"}}"),
        format!("{{\"messages\": [\"{MARKER}\"], \"{MARKER}"),
        format!("\"{MARKER}\""),
        json!({"session_id": "s-1", "history": MARKER, "messages": [{"role": "user", "content": MARKER}]}).to_string(),
        json!({"stream": MARKER, "messages": [{"role": "tool", "tool_call_id": MARKER, "content": MARKER}]})
            .to_string(),
    ] {
        let status = send(post(body.clone())).await.0;
        assert_eq!(status, 400, "{body}");
    }
    let stored = json!({"store": false, "messages": [{"role": "user", "content": MARKER}]});
    assert_eq!(send(post(stored.to_string())).await.0, 200);
}

/// Checks that log lines have their fields, and contain nothing of the messages' content.
async fn check_logs(store: &str, format: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let server =
        ServerProcess::start(dir.path(), &format!("store: '{store}'\ntelemetry: {{log: trace, log_format: {format}}}"));
    send_chat_requests(&server).await;
    let logs = server.stop();
    assert!(logs.lines().count() > 8, "{logs}");
    let bad: Vec<_> = logs.lines().filter(|l| l.to_lowercase().contains(&MARKER.to_lowercase())).collect();
    assert!(bad.is_empty(), "what was said is in the logs: {bad:#?}");
    logs
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_for_people_are_short_and_contain_no_contents() {
    let logs = check_logs("sqlite:t.db", "text").await;
    let line = logs.lines().find(|l| l.contains("POST /v1/chat/completions")).unwrap();
    for part in ["INFO", "request_id=", "session_id=", "s-1", "status=200", "ms="] {
        assert!(line.contains(part), "{part} in {line}");
    }
    assert!(!logs.contains("gen_ai") && !logs.contains("otel.") && !logs.contains('\u{1b}'), "{line}");
    assert!(line.len() < 220, "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_for_programs_are_json() {
    let logs = check_logs("sqlite:t.db", "json").await;
    let lines: Vec<Value> = logs.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let line = lines.iter().find(|l| l["message"] == "POST /v1/chat/completions").unwrap();
    assert_eq!(
        (&line["status"], &line["span"]["session_id"], &line["level"]),
        (&json!(200), &json!("s-1"), &json!("INFO"))
    );
    assert!(line["ms"].is_number() && line["span"]["request_id"].is_string(), "{line}");
}

/// The PostgreSQL driver would log every parameter.
#[tokio::test(flavor = "multi_thread")]
async fn logs_of_postgres_contain_no_contents() {
    let Some(schema) = crate::support::PostgresSchema::new() else { return };
    check_logs(&schema.url(), "text").await;
}

#[derive(Default)]
struct Collector(Mutex<Vec<Value>>);

async fn collect(State(collector): State<Arc<Collector>>, body: Bytes) -> &'static str {
    collector.0.lock().unwrap().push(serde_json::from_slice(&body).unwrap());
    "{}"
}

fn attribute<'a>(span: &'a Value, name: &str) -> &'a Value {
    let all = span["attributes"].as_array().unwrap();
    all.iter().find(|a| a["key"] == name).map_or(&Value::Null, |a| &a["value"])
}

#[tokio::test(flavor = "multi_thread")]
async fn traces_have_the_names_of_opentelemetry() {
    let collector = Arc::new(Collector::default());
    let routes = Router::new().route("/v1/traces", axum::routing::post(collect)).with_state(collector.clone());
    let url = serve(routes).await;
    let dir = tempfile::tempdir().unwrap();
    // Traces do not depend on the log level.
    let server =
        ServerProcess::start(dir.path(), &format!("store: 'memory:'\ntelemetry: {{log: warn, otlp: '{url}'}}"));
    send_chat_requests(&server).await;
    server.stop();
    let sent = collector.0.lock().unwrap().clone();
    assert!(!sent.is_empty(), "what waits is sent when the server stops");
    let text = serde_json::to_string(&sent).unwrap();
    assert!(text.contains("s-1") && !text.contains(MARKER), "{text}");
    let lists = sent.iter().flat_map(|s| s["resourceSpans"].as_array().unwrap());
    assert!(text.contains("\"service.name\""));
    let spans: Vec<&Value> =
        lists.flat_map(|r| r["scopeSpans"].as_array().unwrap()).flat_map(|s| s["spans"].as_array().unwrap()).collect();
    let is_turn = |s: &&&Value| attribute(s, "gen_ai.conversation.id")["stringValue"] == "s-1";
    let turn = spans.iter().find(is_turn).unwrap();
    assert_eq!(turn["name"], "chat rehearsal");
    for (name, value) in [
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.request.model", "rehearsal"),
        ("gen_ai.response.model", "rehearsal"),
        ("gen_ai.response.finish_reasons", "stop"),
    ] {
        assert_eq!(attribute(turn, name)["stringValue"], value, "{turn}");
    }
    for name in ["gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"] {
        assert!(!attribute(turn, name)["intValue"].is_null(), "{name} in {turn}");
    }
    let request = spans.iter().find(|s| s["spanId"] == turn["parentSpanId"]).expect("a turn is part of its request");
    assert_eq!(
        (&request["name"], &attribute(request, "http.route")["stringValue"]),
        (&json!("POST /v1/chat/completions"), &json!("/v1/chat/completions"))
    );
}
