//! Server-side tools: real MCP servers, a real HTTP server, real interpreters.

use crate::python::processes;
use crate::support::*;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use axum::routing::post;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use tenure::{
    Assistant, SessionId, Tenant, ToolError, ToolOutput, Tools,
    run::{RunId, ToolInvocation},
    session::SessionKey,
};
use tenure_server::config::Config;
use tenure_server::tools::Toolbox;
use tokio::io::{AsyncBufReadExt, BufReader};

/// A toolbox with one assistant that has these tools.
pub fn toolbox(tools: Value, python: Value) -> (Arc<Toolbox>, Assistant) {
    let text = json!({"assistants": [{"name": "a", "tools": tools}], "python": python}).to_string();
    let mut config = Config::parse(&text).unwrap();
    config.python.helper = env!("CARGO_BIN_EXE_tenure").into();
    (Arc::new(Toolbox::new(&config).unwrap()), config.assistants[0].clone())
}

pub fn key(session: &str) -> SessionKey {
    SessionKey { tenant: Tenant::new("t").unwrap(), session: SessionId::new(session).unwrap() }
}

pub fn call(session: &str, tool: &str, arguments: Value) -> ToolInvocation {
    let Value::Object(arguments) = arguments else { panic!("arguments are an object") };
    ToolInvocation {
        session: key(session),
        run: RunId::generate(),
        id: "call/1\n".into(),
        tool: tool.into(),
        arguments,
        called_before: false,
    }
}

fn good(content: &str) -> Result<ToolOutput, ToolError> {
    Ok(ToolOutput { content: content.into(), failed: false })
}

// MCP.

pub fn python() -> PathBuf {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/python/bin/python");
    assert!(python.exists(), "scripts/python-env.sh prepares it (`make test` runs that)");
    python
}

pub fn mcp_script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/mcp_server.py")
}

/// Starts the MCP test server over HTTP. Returns the process and its port.
async fn mcp_over_http(port: u16) -> (tokio::process::Child, u16) {
    let mut command = tokio::process::Command::new(python());
    command.arg(mcp_script()).arg(port.to_string()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let port = lines.next_line().await.unwrap().unwrap().parse().unwrap();
    (child, port)
}

/// The context of a session of an assistant.
pub fn context(assistant: &Assistant) -> tenure::run::ToolContext<'_> {
    static SESSION: std::sync::LazyLock<SessionKey> = std::sync::LazyLock::new(|| call("s", "any", json!({})).session);
    tenure::run::ToolContext::new(&SESSION, Some(assistant))
}

/// The checks that both transports share.
async fn the_tools_of_a_server(tools: &Toolbox, assistant: &Assistant) {
    let list = tools.list(&context(assistant)).await.unwrap();
    let flags: Vec<_> = list.iter().map(|t| (t.name.as_str(), t.read_only, t.idempotent, t.cache)).collect();
    assert_eq!(
        flags,
        [
            ("t_add", true, false, true),
            ("t_environment", false, true, false),
            ("t_fail", false, false, true),
            ("t_picture", false, false, false),
            ("t_pid", true, false, true),
            ("t_wait", false, false, false),
            ("t_learn", false, false, false),
        ]
    );
    assert_eq!(list[0].description, "Adds two numbers.");
    assert_eq!(list[0].parameters["properties"]["a"]["type"], "integer");
    let ask = async |tool: &str, arguments: Value| tools.call(&context(assistant), &call("s", tool, arguments)).await;
    assert_eq!(ask("t_add", json!({"a": 2, "b": 3})).await, good("5"));
    assert_eq!(ask("t_picture", json!({})).await, good("look:\n[image, image/png, 3 bytes]"));
    let failed = ask("t_fail", json!({})).await.unwrap();
    assert!(failed.failed && failed.content.contains("fail"), "{failed:?}");
    let wrong = ask("t_add", json!({"a": "x"})).await.unwrap();
    assert!(wrong.failed, "{wrong:?}");
    assert!(matches!(ask("add", json!({})).await, Err(ToolError::NotCalled(reason)) if reason.contains("\"add\"")));
    // A newly added tool is discovered, under a name that models can call.
    assert_eq!(ask("t_learn", json!({})).await, good("done"));
    wait_until("the new tool is listed", async || tools.list(&context(assistant)).await.unwrap().len() == 8).await;
    assert_eq!(tools.list(&context(assistant)).await.unwrap()[7].name, "t_new_tool");
    assert_eq!(ask("t_new_tool", json!({})).await, good("learned"));
}

const RULES: [(&str, &str); 2] = [("read_only", "p*"), ("cache", "fail")];

fn with_rules(mut mcp: Value) -> Value {
    mcp["prefix"] = json!("t");
    for (name, pattern) in RULES {
        mcp[name] = json!([pattern, "!picture"]);
    }
    json!([{ "mcp": mcp }])
}

#[tokio::test(flavor = "multi_thread")]
async fn mcp_over_stdio() {
    let env = json!({"SECRET": "hush", "FROM": {"env": "CARGO_MANIFEST_DIR"}});
    let (tools, assistant) =
        toolbox(with_rules(json!({"command": python(), "args": [mcp_script()], "env": env})), json!({}));
    the_tools_of_a_server(&tools, &assistant).await;
    let variable = async |name: &str| {
        let variable_result =
            tools.call(&context(&assistant), &call("s", "t_environment", json!({"name": name}))).await;
        variable_result.unwrap().content
    };
    assert_eq!(variable("SECRET").await, "hush");
    assert_eq!(variable("FROM").await, env!("CARGO_MANIFEST_DIR"));
    assert_eq!(variable("CARGO_MANIFEST_DIR").await, "not set", "our environment is not passed on");
    let pid = tools.call(&context(&assistant), &call("s", "t_pid", json!({}))).await.unwrap().content;
    assert!(is_alive(&pid));
    tools.close().await;
    assert!(!is_alive(&pid), "it ends with the server");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_mcp_program_that_dies() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("called");
    let (tools, assistant) = toolbox(json!([{"mcp": {"command": python(), "args": [mcp_script()]}}]), json!({}));
    let in_flight = {
        let tools = tools.clone();
        let assistant = assistant.clone();
        let call = call("s", "wait", json!({"file": file}));
        tokio::spawn(async move { tools.call(&context(&assistant), &call).await })
    };
    let pid = async || tokio::fs::read_to_string(&file).await.unwrap_or_default();
    wait_until("the call is made", async || !pid().await.is_empty()).await;
    kill(&pid().await);
    let lost = in_flight.await.unwrap();
    assert!(matches!(&lost, Err(ToolError::Lost(_))), "{lost:?}");
    // The next call restarts it.
    let again = tools.call(&context(&assistant), &call("s", "pid", json!({}))).await.unwrap();
    assert!(!again.failed && again.content != pid().await, "{again:?}");
    // Killed while no call is in progress.
    kill(&again.content);
    wait_until("it is dead", async || !is_alive(&again.content)).await;
    let third = tools.call(&context(&assistant), &call("s", "pid", json!({}))).await.unwrap();
    assert_ne!(third.content, again.content);
    // A call that exceeds its timeout.
    let (tools, assistant) =
        toolbox(json!([{"mcp": {"command": python(), "args": [mcp_script()], "timeout": "300ms"}}]), json!({}));
    let late = tools.call(&context(&assistant), &call("s", "wait", json!({"file": file}))).await;
    assert!(matches!(&late, Err(ToolError::Lost(reason)) if reason.contains("300ms")), "{late:?}");
    assert_eq!(tools.call(&context(&assistant), &call("s", "add", json!({"a": 1, "b": 1}))).await, good("2"));
}

#[tokio::test(flavor = "multi_thread")]
async fn mcp_over_http_works_and_comes_back() {
    let (mut child, port) = mcp_over_http(0).await;
    let url = format!("http://127.0.0.1:{port}/mcp");
    let headers = json!({"X-Key": {"env": "CARGO_PKG_NAME"}});
    let (tools, assistant) = toolbox(with_rules(json!({"url": url, "headers": headers, "timeout": "5s"})), json!({}));
    the_tools_of_a_server(&tools, &assistant).await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("called");
    let in_flight = {
        let tools = tools.clone();
        let assistant = assistant.clone();
        let call = call("s", "t_wait", json!({"file": file}));
        tokio::spawn(async move { tools.call(&context(&assistant), &call).await })
    };
    wait_until("the call is made", async || file.exists()).await;
    child.kill().await.unwrap();
    let lost = in_flight.await.unwrap();
    assert!(matches!(&lost, Err(ToolError::Lost(_))), "{lost:?}");
    let refused = tools.call(&context(&assistant), &call("s", "t_add", json!({"a": 1, "b": 1}))).await;
    assert!(matches!(&refused, Err(ToolError::NotCalled(_))), "{refused:?}");
    assert_eq!(tools.list(&context(&assistant)).await.unwrap().len(), 8, "what it could do is remembered");
    let _child = mcp_over_http(port).await;
    assert_eq!(tools.call(&context(&assistant), &call("s", "t_add", json!({"a": 1, "b": 1}))).await, good("2"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_mcp_server_that_is_not_there() {
    for mcp in
        [json!({"command": "/no/such/program"}), json!({"url": "http://127.0.0.1:9/mcp"}), json!({"command": "true"})]
    {
        let (tools, assistant) = toolbox(json!([{"mcp": mcp}, "python"]), json!({}));
        assert!(matches!(tools.list(&context(&assistant)).await, Err(ToolError::NotCalled(_))), "{mcp}");
        let missing = tools.call(&context(&assistant), &call("s", "x", json!({}))).await;
        assert!(matches!(&missing, Err(ToolError::NotCalled(reason)) if reason.contains("MCP server")), "{missing:?}");
        // Other calls are not delayed by it.
        assert_eq!(tools.call(&context(&assistant), &call("s", "python", json!({"code": "1"}))).await, good("1"));
        tools.close().await;
    }
}

fn is_alive(pid: &str) -> bool {
    // A zombie does not count, once all its threads have ended.
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, |tasks| tasks.count());
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    threads > 1 || stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

fn kill(pid: &str) {
    assert!(std::process::Command::new("kill").args(["-9", pid]).status().unwrap().success());
}

// HTTP.

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_behind_a_url() {
    type Seen = Arc<Mutex<Vec<(HeaderMap, String)>>>;
    let seen = Seen::default();
    let remember = seen.clone();
    let routes = Router::new()
        .route(
            "/good",
            post(move |headers: HeaderMap, body: String| async move {
                remember.lock().unwrap().push((headers, body));
                "Grüezi"
            }),
        )
        .route("/bad", post(|| async { (StatusCode::UNPROCESSABLE_ENTITY, "no such city") }))
        .route("/broken", post(|| async { (StatusCode::INTERNAL_SERVER_ERROR, "oops") }))
        .route("/moved", post(|| async { (StatusCode::FOUND, [("location", "/good")], "") }))
        .route(
            "/cut",
            post(|| async {
                let parts = futures_util::stream::iter([Ok(Bytes::from("half")), Err(std::io::Error::other("cut"))]);
                Response::new(Body::from_stream(parts))
            }),
        )
        .route(
            "/long",
            post(|| async {
                let parts =
                    futures_util::stream::repeat_with(|| Ok::<_, std::io::Error>(Bytes::from(vec![b'x'; 1 << 16])));
                Response::new(Body::from_stream(parts))
            }),
        )
        .route("/slow", post(|| async { std::future::pending::<()>().await }));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, routes).await });
    let tool = |name: &str| json!({"http": {"name": name, "description": "d", "url": format!("{base}/{name}"), "timeout": "2s", "headers": {"X-Key": {"env": "CARGO_PKG_NAME"}}}});
    let mut sources: Vec<Value> = ["good", "bad", "broken", "moved", "cut", "long", "slow"].map(tool).to_vec();
    sources[0]["http"]["read_only"] = json!(true);
    sources[1]["http"]["cache"] = json!(true);
    sources.push(json!({"http": {"name": "nobody", "description": "d", "url": "http://127.0.0.1:9/"}}));
    let (tools, assistant) = toolbox(json!(sources), json!({}));
    let list = tools.list(&context(&assistant)).await.unwrap();
    assert_eq!((list[0].read_only, list[0].cache, list[0].is_repeatable()), (true, true, true));
    assert_eq!((list[1].read_only, list[1].cache, list[1].is_repeatable()), (false, true, false));
    let ask = async |name: &str| tools.call(&context(&assistant), &call("s", name, json!({"city": "Bern"}))).await;
    assert_eq!(ask("good").await, good("Grüezi"));
    let (headers, body) = seen.lock().unwrap()[0].clone();
    assert_eq!(body, r#"{"city":"Bern"}"#);
    assert_eq!(headers["x-tenure-session"], "s");
    assert_eq!(headers["x-tenure-call"], "call/1%0A");
    assert_eq!(headers["x-key"], "tenure-server");
    let run = headers["x-tenure-run"].to_str().unwrap();
    assert_eq!(headers["idempotency-key"], format!("{run}/call/1%0A"));
    let failed = |content: &str| Ok(ToolOutput { content: content.into(), failed: true });
    assert_eq!(ask("bad").await, failed("HTTP 422: no such city"));
    assert_eq!(ask("broken").await, failed("HTTP 500: oops"));
    assert_eq!(ask("moved").await, failed("HTTP 302: "));
    for lost in ["cut", "slow"] {
        assert!(matches!(ask(lost).await, Err(ToolError::Lost(_))), "{lost}");
    }
    assert!(matches!(ask("nobody").await, Err(ToolError::NotCalled(reason)) if !reason.contains("127.0.0.1:9/")));
    let long = ask("long").await.unwrap().content;
    assert!(long.len() <= 1 << 20 && long.ends_with("omitted ...]"));
    assert_eq!(seen.lock().unwrap().len(), 1, "redirects are not followed");
}

// The server's routes.

/// Clients cannot start programs: tools are declared only by the operator (D-059), and their secrets are not
/// exposed.
#[tokio::test(flavor = "multi_thread")]
async fn only_the_operator_defines_tools() {
    let test = TestServer::with(StoreKind::Memory, false, |config| {
        let text = json!({"name": "declared", "tools": ["python", {"http": {"name": "t", "description": "d", "url": "http://127.0.0.1:9/hush", "headers": {"K": "hush"}}}]});
        config.assistants.push(serde_json::from_value(text).unwrap());
        config.python.helper = env!("CARGO_BIN_EXE_tenure").into();
    })
    .await
    .unwrap();
    for body in
        [json!({"name": "mine", "tools": ["python"]}), json!({"name": "mine", "tools": [{"mcp": {"command": "sh"}}]})]
    {
        let url = format!("{}/assistants", test.client.base);
        for request in [test.client.http.post(&url), test.client.http.put(format!("{url}/mine"))] {
            let response = request.json(&body).send().await.unwrap();
            assert_eq!(response.status(), 400);
            let text = response.text().await.unwrap();
            assert!(text.contains("\"param\":\"tools\"") && text.contains("configuration"), "{text}");
        }
    }
    let shown = test.client.http.get(format!("{}/assistants", test.client.base)).send().await.unwrap();
    let shown = shown.text().await.unwrap();
    assert!(shown.contains("declared") && !shown.contains("hush"), "{shown}");
    // An assistant that is not declared in the configuration has no tools, however it was created.
    let smuggled =
        Assistant { tools: serde_json::from_str(r#"[{"mcp": {"command": "sh"}}]"#).unwrap(), ..Assistant::default() };
    assert!(matches!(test.app.tools.list(&context(&smuggled)).await, Err(ToolError::NotCalled(_))));
    // A deleted session has no interpreter.
    let assistant = test.app.config.assistants[0].clone();
    for (path, id) in [("sessions", "s"), ("v1/sessions", "d")] {
        test.chat(json!({"session_id": id, "messages": [user("Hi")]})).await;
        let session = SessionKey { tenant: default_principal().tenant, session: SessionId::new(id).unwrap() };
        let mut arguments = Map::new();
        let program = format!("sleep 98766.6{id}");
        arguments.insert("code".into(), format!("import subprocess\np = subprocess.Popen({program:?}.split())").into());
        let call = ToolInvocation {
            session,
            run: RunId::generate(),
            id: "1".into(),
            tool: "python".into(),
            arguments,
            called_before: false,
        };
        assert!(!test.app.tools.call(&context(&assistant), &call).await.unwrap().failed);
        wait_until("it runs", async || processes(&program) == 1).await;
        let deleted = test.client.http.delete(format!("{}/{path}/{id}", test.client.base)).send().await.unwrap();
        assert_eq!(deleted.status(), 200);
        assert_eq!(processes(&program), 0);
    }
}
