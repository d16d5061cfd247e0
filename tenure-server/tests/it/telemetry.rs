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
    assert!(line.len() < 320, "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_for_programs_are_json() {
    let logs = check_logs("sqlite:t.db", "json").await;
    let lines: Vec<Value> = logs.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let line = lines.iter().find(|l| l["message"] == "POST /v1/chat/completions").unwrap();
    assert_eq!(
        (&line["status"], &line["session_id"], &line["level"], &line["tenant"]),
        (&json!(200), &json!("s-1"), &json!("INFO"), &json!("default"))
    );
    assert!(line["ms"].is_number() && line["request_id"].is_string() && line["timestamp"].is_string(), "{line}");
    assert!(line["run_id"].as_str().unwrap().starts_with("run_"), "{line}");
    for line in &lines {
        let nested = line.as_object().unwrap().values().any(|v| v.is_object() || v.is_array());
        assert!(!nested, "one level of fields: {line}");
    }
}

/// The log line of a request names its tenant, user, key, session and run; that of an unknown route its path; and those
/// of probes are at `debug`.
#[tokio::test(flavor = "multi_thread")]
async fn requests_are_logged_with_their_caller() {
    let dir = tempfile::tempdir().unwrap();
    let config = "store: 'sqlite:t.db'\ntelemetry: {log_format: json}";
    let secret = "0123456789abcdef0123456789abcdef";
    std::fs::write(dir.path().join("key"), secret).unwrap();
    let server = ServerProcess::start_with(dir.path(), config, &[("TENURE_BOOTSTRAP_KEY_FILE", "key")]);
    let request = |method: &str, path: &str| server.request(method, path).bearer_auth(secret);
    let mut body = chat_request("s-1", "hello");
    body["user"] = json!("ann");
    assert_eq!(send(request("POST", "/v1/chat/completions").json(&body)).await.0, 200);
    assert_eq!(send(request("GET", "/v2/nowhere?secret=1")).await.0, 404);
    assert_eq!(send(request("GET", "/readyz")).await.0, 200);
    assert_eq!(send(server.request("GET", "/sessions")).await.0, 401);
    let logs = server.stop();
    let lines: Vec<Value> = logs.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let find = |message: &str| lines.iter().find(|l| l["message"] == message).unwrap_or_else(|| panic!("{logs}"));
    let chat = find("POST /v1/chat/completions");
    for (name, value) in [("tenant", "default"), ("user", "ann"), ("session_id", "s-1")] {
        assert_eq!(chat[name], value, "{chat}");
    }
    assert_eq!(chat["key"].as_str().map(str::len), Some(12), "{chat}");
    assert!(chat["run_id"].as_str().unwrap().starts_with("run_"), "{chat}");
    assert_eq!(find("GET none")["path"], "/v2/nowhere");
    assert_eq!((&find("GET /sessions")["status"], &find("GET /sessions")["key"]), (&json!(401), &Value::Null));
    assert!(!logs.contains("/readyz") && !logs.contains("secret=1") && !logs.contains(secret), "{logs}");
}

/// The reason why an assistant's tools cannot be listed is in the log.
#[tokio::test(flavor = "multi_thread")]
async fn the_reason_of_unavailable_tools_is_logged() {
    let dir = tempfile::tempdir().unwrap();
    let config = "store: 'memory:'\nassistants: [{name: clerk, tools: [{mcp: {command: /no/such/program}}]}]";
    let server = ServerProcess::start(dir.path(), config);
    let mut body = chat_request("s-1", "hello");
    body["model"] = json!("clerk");
    assert!(send(server.request("POST", "/v1/chat/completions").json(&body)).await.0 >= 500);
    let logs = server.stop();
    let line = logs.lines().find(|l| l.contains("tools_unavailable")).unwrap_or_else(|| panic!("{logs}"));
    assert!(line.contains("/no/such/program"), "{line}");
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

/// The trace of a client continues in the server, in its requests to the model server, and in its commits; the exporter
/// sends the headers of the environment.
#[tokio::test(flavor = "multi_thread")]
async fn traces_are_continued() {
    let collector = Arc::new(Collector::default());
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let headers = seen.clone();
    let routes = Router::new().route("/v1/traces", axum::routing::post(collect)).with_state(collector.clone()).layer(
        axum::middleware::from_fn(move |request: axum::extract::Request, next: axum::middleware::Next| {
            let value = request.headers().get("x-team").and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
            headers.lock().unwrap().push(value);
            next.run(request)
        }),
    );
    let url = serve(routes).await;
    let model = crate::support::ScriptedModelServer::default();
    let base = model.start().await;
    let dir = tempfile::tempdir().unwrap();
    let config =
        format!("store: 'sqlite:t.db'\ntelemetry: {{otlp: '{url}'}}\nmodels: [{{name: m, base_url: '{base}'}}]");
    let server =
        ServerProcess::start_with(dir.path(), &config, &[("OTEL_EXPORTER_OTLP_HEADERS", "x-team=plum,x-other=1")]);
    let trace_id = "4bf92f3577b34da6a3ce929d0e0e4736";
    let parent = format!("00-{trace_id}-00f067aa0ba902b7-01");
    let request = server.request("POST", "/v1/chat/completions").json(&chat_request("s-1", "hello"));
    assert_eq!(send(request.header("traceparent", &parent)).await.0, 200);
    // A node that has not cached the session reads it.
    let server = {
        drop(server.stop());
        ServerProcess::start_with(dir.path(), &config, &[("OTEL_EXPORTER_OTLP_HEADERS", "x-team=plum")])
    };
    let request = server.request("POST", "/v1/chat/completions").json(&chat_request("s-1", "again"));
    assert_eq!(send(request.header("traceparent", &parent)).await.0, 200);
    // An invalid context is ignored.
    let request = server.request("POST", "/v1/chat/completions").json(&chat_request("s-2", "hello"));
    assert_eq!(send(request.header("traceparent", "00-nonsense")).await.0, 200);
    server.stop();
    let sent = model.headers(0)["traceparent"].to_str().unwrap().to_owned();
    assert!(sent.starts_with(&format!("00-{trace_id}-")) && sent != parent, "{sent}");
    assert!(!model.headers(2)["traceparent"].to_str().unwrap().contains(trace_id));
    assert!(seen.lock().unwrap().iter().all(|value| value == "plum"), "{seen:?}");
    let text = collector.0.lock().unwrap().clone();
    let lists = text.iter().flat_map(|s| s["resourceSpans"].as_array().unwrap());
    let spans: Vec<&Value> =
        lists.flat_map(|r| r["scopeSpans"].as_array().unwrap()).flat_map(|s| s["spans"].as_array().unwrap()).collect();
    let of_trace: Vec<&str> =
        spans.iter().filter(|s| s["traceId"] == trace_id).map(|s| s["name"].as_str().unwrap()).collect();
    for name in ["POST /v1/chat/completions", "POST chat/completions", "commit", "load session"] {
        assert!(of_trace.contains(&name), "{name} in {of_trace:?}");
    }
    let request = spans.iter().find(|s| s["traceId"] == trace_id && s["name"] == "POST /v1/chat/completions").unwrap();
    assert_eq!(request["parentSpanId"], "00f067aa0ba902b7");
}

/// A server of the Model Context Protocol with one tool, which returns the metadata of its call.
const MCP_SERVER: &str = r#"
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    params, answer = request.get("params") or {}, {"jsonrpc": "2.0", "id": request["id"]}
    if request["method"] == "initialize":
        answer["result"] = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                            "serverInfo": {"name": "meta", "version": "1"}}
    elif request["method"] == "tools/list":
        answer["result"] = {"tools": [{"name": "meta", "inputSchema": {"type": "object"}}]}
    elif request["method"] == "tools/call":
        open("meta.json", "w").write(json.dumps(params.get("_meta")))
        answer["result"] = {"content": [{"type": "text", "text": "ok"}]}
    else:
        answer["error"] = {"code": -32601, "message": "no such method"}
    print(json.dumps(answer), flush=True)
"#;

/// Tools get the trace of the request that calls them, HTTP tools in a header, MCP servers in `_meta`; each call has a
/// span.
#[tokio::test(flavor = "multi_thread")]
async fn traces_are_continued_in_tools() {
    let collector = Arc::new(Collector::default());
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let headers = seen.clone();
    let tool = async move |request: axum::http::HeaderMap| {
        headers.lock().unwrap().push(request["traceparent"].to_str().unwrap().to_owned());
        "sunny"
    };
    let routes = Router::new()
        .route("/v1/traces", axum::routing::post(collect))
        .with_state(collector.clone())
        .route("/tool", axum::routing::post(tool));
    let url = serve(routes).await;
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("server.py"), MCP_SERVER).unwrap();
    let tools = json!([
        {"http": {"name": "weather", "description": "", "url": format!("{url}/tool"), "parameters": {"type": "object"}}},
        {"mcp": {"command": "python3", "args": ["server.py"]}},
    ]);
    let config =
        format!("store: 'memory:'\ntelemetry: {{otlp: '{url}'}}\nassistants: [{{name: clerk, tools: {tools}}}]");
    let server = ServerProcess::start(dir.path(), &config);
    let trace_id = "4bf92f3577b34da6a3ce929d0e0e4736";
    for (session, tool) in [("s-1", "weather"), ("s-2", "meta")] {
        let mut body = chat_request(session, &format!("CALL {tool} {{}}"));
        body["model"] = json!("clerk");
        let request = server.request("POST", "/v1/chat/completions").json(&body);
        let answer = send(request.header("traceparent", format!("00-{trace_id}-00f067aa0ba902b7-01"))).await;
        assert_eq!(answer.0, 200, "{answer:?}");
    }
    let logs = server.stop();
    assert_eq!(seen.lock().unwrap().len(), 1, "{logs}");
    assert!(seen.lock().unwrap()[0].starts_with(&format!("00-{trace_id}-")), "{seen:?}");
    let meta: Value = serde_json::from_slice(&std::fs::read(dir.path().join("meta.json")).unwrap()).unwrap();
    assert!(meta["traceparent"].as_str().unwrap().starts_with(&format!("00-{trace_id}-")), "{meta}");
    let text = serde_json::to_string(&*collector.0.lock().unwrap()).unwrap();
    for name in ["execute_tool weather", "execute_tool meta", "POST weather", "tools/call meta"] {
        assert!(text.contains(name), "{name}");
    }
}
