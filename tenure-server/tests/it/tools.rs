//! Tools that the server calls itself: real MCP servers, a real HTTP server, real interpreters.

use crate::kit::*;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use axum::routing::post;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tenure::{Assistant, Call, Key, Output, RunId, SessionId, Tenant, ToolError, Tools};
use tenure_server::config::Config;
use tenure_server::tools::Toolbox;
use tokio::io::{AsyncBufReadExt, BufReader};

/// A toolbox with one assistant that has these tools.
fn toolbox(tools: Value, python: Value) -> (Arc<Toolbox>, Assistant) {
    let text = json!({"assistants": [{"name": "a", "tools": tools}], "python": python}).to_string();
    let config = Config::parse(&text).unwrap();
    (Arc::new(Toolbox::new(&config).unwrap()), config.assistants[0].clone())
}

fn key(session: &str) -> Key {
    Key { tenant: Tenant::new("t").unwrap(), session: SessionId::new(session).unwrap() }
}

fn call(session: &str, tool: &str, arguments: Value) -> Call {
    let Value::Object(arguments) = arguments else { panic!("arguments are an object") };
    Call { session: key(session), run: RunId::generate(), id: "call/1\n".into(), tool: tool.into(), arguments }
}

fn good(content: &str) -> Result<Output, ToolError> {
    Ok(Output { content: content.into(), failed: false })
}

// MCP.

fn python() -> PathBuf {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/python/bin/python");
    assert!(python.exists(), "scripts/python-env.sh prepares it (`make test` runs that)");
    python
}

fn mcp_script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/mcp_server.py")
}

/// The test server over HTTP, and its port.
async fn mcp_over_http(port: u16) -> (tokio::process::Child, u16) {
    let mut command = tokio::process::Command::new(python());
    command.arg(mcp_script()).arg(port.to_string()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let port = lines.next_line().await.unwrap().unwrap().parse().unwrap();
    (child, port)
}

/// What both ways have in common.
async fn the_tools_of_a_server(tools: &Toolbox, assistant: &Assistant) {
    let list = tools.list(assistant).await.unwrap();
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
    let ask = async |tool: &str, arguments: Value| tools.call(assistant, &call("s", tool, arguments)).await;
    assert_eq!(ask("t_add", json!({"a": 2, "b": 3})).await, good("5"));
    assert_eq!(ask("t_picture", json!({})).await, good("look:\n[image, image/png, 3 bytes]"));
    let failed = ask("t_fail", json!({})).await.unwrap();
    assert!(failed.failed && failed.content.contains("fail"), "{failed:?}");
    let wrong = ask("t_add", json!({"a": "x"})).await.unwrap();
    assert!(wrong.failed, "{wrong:?}");
    assert!(matches!(ask("add", json!({})).await, Err(ToolError::NotCalled(why)) if why.contains("\"add\"")));
    // A new tool is seen, by a name that models can call.
    assert_eq!(ask("t_learn", json!({})).await, good("done"));
    within("the new tool is listed", async || tools.list(assistant).await.unwrap().len() == 8).await;
    assert_eq!(tools.list(assistant).await.unwrap()[7].name, "t_new_tool");
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
        let asked = tools.call(&assistant, &call("s", "t_environment", json!({"name": name}))).await;
        asked.unwrap().content
    };
    assert_eq!(variable("SECRET").await, "hush");
    assert_eq!(variable("FROM").await, env!("CARGO_MANIFEST_DIR"));
    assert_eq!(variable("CARGO_MANIFEST_DIR").await, "not set", "our environment is not passed on");
    let pid = tools.call(&assistant, &call("s", "t_pid", json!({}))).await.unwrap().content;
    assert!(lives(&pid));
    tools.close().await;
    assert!(!lives(&pid), "it ends with the server");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_mcp_program_that_dies() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("called");
    let (tools, assistant) = toolbox(json!([{"mcp": {"command": python(), "args": [mcp_script()]}}]), json!({}));
    let in_flight = {
        let (tools, assistant, call) = (tools.clone(), assistant.clone(), call("s", "wait", json!({"file": file})));
        tokio::spawn(async move { tools.call(&assistant, &call).await })
    };
    let pid = async || tokio::fs::read_to_string(&file).await.unwrap_or_default();
    within("the call is made", async || !pid().await.is_empty()).await;
    kill(&pid().await);
    let lost = in_flight.await.unwrap();
    assert!(matches!(&lost, Err(ToolError::Lost(_))), "{lost:?}");
    // The next call starts it anew.
    let again = tools.call(&assistant, &call("s", "pid", json!({}))).await.unwrap();
    assert!(!again.failed && again.content != pid().await, "{again:?}");
    // Killed while nobody calls.
    kill(&again.content);
    within("it is dead", async || !lives(&again.content)).await;
    let third = tools.call(&assistant, &call("s", "pid", json!({}))).await.unwrap();
    assert_ne!(third.content, again.content);
    // A call that takes too long.
    let (tools, assistant) =
        toolbox(json!([{"mcp": {"command": python(), "args": [mcp_script()], "timeout": "300ms"}}]), json!({}));
    let late = tools.call(&assistant, &call("s", "wait", json!({"file": file}))).await;
    assert!(matches!(&late, Err(ToolError::Lost(why)) if why.contains("300ms")), "{late:?}");
    assert_eq!(tools.call(&assistant, &call("s", "add", json!({"a": 1, "b": 1}))).await, good("2"));
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
        let (tools, assistant, call) = (tools.clone(), assistant.clone(), call("s", "t_wait", json!({"file": file})));
        tokio::spawn(async move { tools.call(&assistant, &call).await })
    };
    within("the call is made", async || file.exists()).await;
    child.kill().await.unwrap();
    let lost = in_flight.await.unwrap();
    assert!(matches!(&lost, Err(ToolError::Lost(_))), "{lost:?}");
    let refused = tools.call(&assistant, &call("s", "t_add", json!({"a": 1, "b": 1}))).await;
    assert!(matches!(&refused, Err(ToolError::NotCalled(_))), "{refused:?}");
    assert_eq!(tools.list(&assistant).await.unwrap().len(), 8, "what it could do is remembered");
    let _child = mcp_over_http(port).await;
    assert_eq!(tools.call(&assistant, &call("s", "t_add", json!({"a": 1, "b": 1}))).await, good("2"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_mcp_server_that_is_not_there() {
    for mcp in
        [json!({"command": "/no/such/program"}), json!({"url": "http://127.0.0.1:9/mcp"}), json!({"command": "true"})]
    {
        let (tools, assistant) = toolbox(json!([{"mcp": mcp}, "python"]), json!({}));
        assert!(matches!(tools.list(&assistant).await, Err(ToolError::NotCalled(_))), "{mcp}");
        let missing = tools.call(&assistant, &call("s", "x", json!({}))).await;
        assert!(matches!(&missing, Err(ToolError::NotCalled(why)) if why.contains("MCP server")), "{missing:?}");
        // The others are not held up by it.
        assert_eq!(tools.call(&assistant, &call("s", "python", json!({"code": "1"}))).await, good("1"));
        tools.close().await;
    }
}

fn lives(pid: &str) -> bool {
    // A zombie does not, once all its threads have ended.
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
    let list = tools.list(&assistant).await.unwrap();
    assert_eq!((list[0].read_only, list[0].cache, list[0].is_repeatable()), (true, true, true));
    assert_eq!((list[1].read_only, list[1].cache, list[1].is_repeatable()), (false, true, false));
    let ask = async |name: &str| tools.call(&assistant, &call("s", name, json!({"city": "Bern"}))).await;
    assert_eq!(ask("good").await, good("Grüezi"));
    let (headers, body) = seen.lock().unwrap()[0].clone();
    assert_eq!(body, r#"{"city":"Bern"}"#);
    assert_eq!(headers["x-tenure-session"], "s");
    assert_eq!(headers["x-tenure-call"], "call/1%0A");
    assert_eq!(headers["x-key"], "tenure-server");
    let run = headers["x-tenure-run"].to_str().unwrap();
    assert_eq!(headers["idempotency-key"], format!("{run}/call/1%0A"));
    let failed = |content: &str| Ok(Output { content: content.into(), failed: true });
    assert_eq!(ask("bad").await, failed("HTTP 422: no such city"));
    assert_eq!(ask("broken").await, failed("HTTP 500: oops"));
    assert_eq!(ask("moved").await, failed("HTTP 302: "));
    for lost in ["cut", "slow"] {
        assert!(matches!(ask(lost).await, Err(ToolError::Lost(_))), "{lost}");
    }
    assert!(matches!(ask("nobody").await, Err(ToolError::NotCalled(why)) if !why.contains("127.0.0.1:9/")));
    let long = ask("long").await.unwrap().content;
    assert!(long.len() < (1 << 20) + 100 && long.ends_with("left out ...]"));
    assert_eq!(seen.lock().unwrap().len(), 1, "redirects are not followed");
}

// Python.

/// Whether this system lets us make namespaces; without, some of what follows can not hold.
fn has_namespaces() -> bool {
    let try_it = std::process::Command::new("unshare").args(["--user", "--net", "--pid", "--fork", "true"]).output();
    told("namespaces", try_it.is_ok_and(|tried| tried.status.success()))
}

fn has_landlock() -> bool {
    let ask = "import ctypes, sys; sys.exit(ctypes.CDLL(None).syscall(444, 0, 0, 1) < 1)";
    told("Landlock", std::process::Command::new(python()).args(["-c", ask]).status().unwrap().success())
}

/// Whether the number of processes can be capped for this user: for root only since Linux 6.14.
fn has_cap_on_processes() -> bool {
    use std::os::unix::fs::MetadataExt;
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|n| n.trim().parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let root = std::fs::metadata("/proc/self").unwrap().uid() == 0;
    told("a cap on processes", has_namespaces() && (!root || version >= (6, 14)))
}

fn told(what: &str, has: bool) -> bool {
    if !has {
        eprintln!("partly skipped: this system has no {what}");
    }
    has
}

/// Runs code in a session.
async fn run(tools: &Toolbox, assistant: &Assistant, session: &str, code: &str) -> Output {
    tools.call(assistant, &call(session, "python", json!({"code": code}))).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn python_keeps_what_was_defined() {
    let (tools, assistant) = toolbox(json!(["python"]), json!({}));
    let list = tools.list(&assistant).await.unwrap();
    assert_eq!(
        (list.len(), list[0].name.as_str(), list[0].is_repeatable(), list[0].cache),
        (1, "python", false, false)
    );
    let ask = async |code: &str| run(&tools, &assistant, "s", code).await;
    let plain = |content: &str| Output { content: content.into(), failed: false };
    assert_eq!(ask("def twice(x):\n    return 2 * x\nname = 'Grüezi'").await, plain(""));
    assert_eq!(ask("print(name)\ntwice(21)").await, plain("Grüezi\n42"));
    assert_eq!(ask("_ + 1").await, plain("43"));
    assert_eq!(ask("None").await, plain(""));
    assert_eq!(ask("import sys; print('out'); print('err', file=sys.stderr)").await, plain("out\nerr\n"));
    assert_eq!(ask("import subprocess; subprocess.run(['echo', 'child']).returncode").await, plain("child\n0"));
    let error = ask("x = 1\ntwice()").await;
    assert!(error.failed && error.content.starts_with("Traceback") && error.content.contains("line 2"), "{error:?}");
    assert!(error.content.contains("    twice()") && error.content.contains("TypeError"), "{error:?}");
    assert!(ask("def").await.content.contains("SyntaxError"));
    assert!(ask("raise SystemExit(3)").await.content.ends_with("SystemExit: 3"));
    assert_eq!(ask("x").await, plain("1"));
    // What is printed is never taken for an answer, and too much of it is cut.
    let line = r#"{"id": 99, "text": "no", "failed": false}"#;
    assert_eq!(ask(&format!("print('{line}')")).await, plain(&format!("{line}\n")));
    let long = ask("print('a' * 10**6 + 'z')").await;
    assert!(long.content.len() < 66_000 && long.content.contains("left out") && long.content.ends_with("z\n"));
    assert_eq!(ask("'\\ud800'").await, plain("'\\ud800'"));
    let missing = tools.call(&assistant, &call("s", "python", json!({"cod": "1"}))).await.unwrap();
    assert!(missing.failed && missing.content.contains("`code`"));
    // Another session knows nothing of it.
    assert!(run(&tools, &assistant, "other", "name").await.content.contains("NameError"));
    tools.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn python_is_interrupted_then_killed() {
    let (tools, assistant) =
        toolbox(json!([{"python": {"timeout": "600ms", "memory": "300MB"}}]), json!({"grace": "500ms"}));
    let ask = async |code: &str| run(&tools, &assistant, "s", code).await;
    ask("x = 7").await;
    for slow in
        ["import time\ntime.sleep(60)", "while True: pass", "import subprocess\nsubprocess.run(['sleep', '60'])"]
    {
        let late = ask(slow).await;
        assert!(late.failed && late.content.contains("KeyboardInterrupt"), "{late:?}");
        assert!(late.content.contains("600ms") && late.content.contains("still there"), "{late:?}");
        assert_eq!(ask("x").await.content, "7", "after {slow}");
    }
    assert!(ask("b = bytearray(1 << 30)").await.content.contains("MemoryError"));
    let deaf = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)";
    let killed = ask(deaf).await;
    assert!(killed.failed && killed.content.contains("is gone"), "{killed:?}");
    assert!(ask("x").await.content.contains("NameError"));
    for end in
        ["import os\nos._exit(4)", "import os\nos.abort()", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"]
    {
        let ended = ask(end).await;
        assert!(ended.failed && ended.content.contains("the interpreter ended"), "{ended:?}");
        assert_eq!(ask("1 + 1").await.content, "2");
    }
    // A call that nobody waits for any more is interrupted as well.
    ask("x = 8").await;
    let call = call("s", "python", json!({"code": "import time\ntime.sleep(60)"}));
    assert!(tokio::time::timeout(Duration::from_millis(200), tools.call(&assistant, &call)).await.is_err());
    assert_eq!(ask("x").await.content, "8");
    tools.close().await;
}

/// The processes below this test that have this text in their command.
fn processes(text: &str) -> usize {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let command = |entry: std::fs::DirEntry| std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
    all.map(command).filter(|c| String::from_utf8_lossy(c).replace('\0', " ").contains(text)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn python_leaves_nothing_behind() {
    let (tools, assistant) = toolbox(json!(["python"]), json!({"processes": 300}));
    // Each with a session of its own, so that no signal to a group reaches them.
    let apart = has_namespaces();
    let many = "import subprocess, os\nall = [subprocess.Popen(['sleep', '98765.4'], start_new_session=True) for _ in range(100)]\nos.getcwd()";
    let many = &if apart { many.to_owned() } else { many.replace(", start_new_session=True", "") };
    let dir = run(&tools, &assistant, "s", many).await;
    assert!(!dir.failed, "{dir:?}");
    within("they run", async || processes("sleep 98765.4") == 100).await;
    let dir = PathBuf::from(dir.content.trim_matches('\''));
    assert!(dir.exists());
    tools.end(&key("s")).await;
    assert_eq!(processes("sleep 98765.4"), 0);
    assert!(!dir.exists());
    // The same when it is dropped without a word.
    run(&tools, &assistant, "s", &many.replace("98765.4", "98765.5")).await;
    within("they run", async || processes("sleep 98765.5") == 100).await;
    drop(tools);
    within("they are gone", async || processes("sleep 98765.5") == 0).await;
    // A program that starts as many as it can.
    if !has_cap_on_processes() {
        return;
    }
    let (tools, assistant) = toolbox(json!([{"python": {"timeout": "30s"}}]), json!({}));
    let bomb =
        "import os, time\nfor i in range(2000):\n    if os.fork() == 0:\n        time.sleep(1000)\n        os._exit(0)";
    let stopped = run(&tools, &assistant, "s", bomb).await;
    assert!(stopped.failed && stopped.content.contains("BlockingIOError"), "{stopped:?}");
    tools.end(&key("s")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn python_is_kept_apart() {
    let (tools, assistant) = toolbox(json!(["python"]), json!({"file": "1MB"}));
    let ask = async |code: &str| run(&tools, &assistant, "s", code).await;
    let environment = ask("import os\nsorted(os.environ)").await;
    assert_eq!(environment.content, "['HOME', 'LANG', 'TMPDIR']");
    assert_eq!(ask("os.listdir() == [] and os.getcwd() == os.environ['HOME']").await.content, "True");
    assert!(!ask("open('own', 'w').write('x')\nopen('own').read()").await.failed);
    assert!(ask("open('big', 'wb').write(b'x' * (2 << 20))").await.content.contains("File too large"));
    let descriptors =
        "import os\n[fd for fd in range(3, 256) if os.path.exists(f'/dev/fd/{fd}') and os.get_inheritable(fd)]";
    assert_eq!(ask(descriptors).await.content, "[]");
    if has_landlock() {
        let secret = tempfile::NamedTempFile::new().unwrap();
        for code in [format!("open({:?}).read()", secret.path()), format!("open({:?}, 'w')", secret.path())] {
            let refused = ask(&code).await;
            assert!(refused.content.contains("PermissionError"), "{refused:?}");
        }
    }
    if has_namespaces() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let tcp = ask(&format!("import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)")).await;
        assert!(tcp.failed && tcp.content.contains("Error"), "{tcp:?}");
        let udp = ask("s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('127.0.0.1', 9))").await;
        assert!(udp.content.contains("unreachable"), "{udp:?}");
        let other = std::process::id();
        assert!(ask(&format!("os.kill({other}, 0)")).await.failed, "it can not reach our processes");
    }
    tools.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn python_seats_are_few() {
    let (tools, assistant) = toolbox(json!(["python"]), json!({"max_processes": 2, "timeout": "20s"}));
    for session in ["a", "b"] {
        run(&tools, &assistant, session, "x = 1").await;
    }
    run(&tools, &assistant, "a", "x").await;
    run(&tools, &assistant, "c", "x = 1").await;
    assert_eq!(run(&tools, &assistant, "a", "x").await.content, "1", "the longest idle went");
    let fresh = run(&tools, &assistant, "b", "'x' in globals()").await.content;
    assert!(fresh.starts_with("[this is a new interpreter") && fresh.ends_with("False"), "{fresh}");
    // With all of them busy, nothing is called.
    let mut busy = Vec::new();
    for session in ["a", "b"] {
        let dir = run(&tools, &assistant, session, "import os\nos.getcwd()").await.content;
        let begun = Path::new(dir.trim_matches('\'')).join("begun");
        let (tools, assistant) = (tools.clone(), assistant.clone());
        let code = "import time\nopen('begun', 'w')\ntime.sleep(60)";
        busy.push(tokio::spawn(async move { run(&tools, &assistant, session, code).await }));
        within("it is busy", async || begun.exists()).await;
    }
    let refused = tools.call(&assistant, &call("d", "python", json!({"code": "1"}))).await;
    assert!(matches!(&refused, Err(ToolError::NotCalled(why)) if why.contains("max_processes")), "{refused:?}");
    // A session that ends ends its call.
    tools.end(&key("a")).await;
    tools.end(&key("b")).await;
    for call in busy {
        let given_up = call.await.unwrap();
        assert!(given_up.failed && given_up.content.contains("has ended"), "{given_up:?}");
    }
    tools.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_interpreters_end() {
    let (tools, assistant) = toolbox(json!(["python"]), json!({"idle": "300ms"}));
    let dir = run(&tools, &assistant, "s", "import os\nos.getcwd()").await.content;
    let dir = PathBuf::from(dir.trim_matches('\''));
    let reaper = {
        let tools = tools.clone();
        tokio::spawn(async move { tools.reap_until(std::future::pending()).await })
    };
    within("it is gone", async || !dir.exists()).await;
    assert!(run(&tools, &assistant, "s", "1").await.content.contains("idle for too long"));
    reaper.abort();
    tools.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_is_no_interpreter() {
    for program in ["/no/such/python", "true"] {
        let (tools, assistant) = toolbox(json!(["python"]), json!({"program": program}));
        let outcome = tools.call(&assistant, &call("s", "python", json!({"code": "1"}))).await;
        assert!(matches!(&outcome, Err(ToolError::NotCalled(why)) if why.contains(program)), "{outcome:?}");
    }
}

// The server.

/// Whoever may ask, may not start programs: tools are declared by the operator alone, and their secrets stay with them.
#[tokio::test(flavor = "multi_thread")]
async fn tools_are_the_operators() {
    let home = Home::with("memory", false, |config| {
        let text = json!({"name": "declared", "tools": ["python", {"http": {"name": "t", "description": "d", "url": "http://127.0.0.1:9/hush", "headers": {"K": "hush"}}}]});
        config.assistants.push(serde_json::from_value(text).unwrap());
    })
    .await
    .unwrap();
    for body in
        [json!({"name": "mine", "tools": ["python"]}), json!({"name": "mine", "tools": [{"mcp": {"command": "sh"}}]})]
    {
        let url = format!("{}/assistants", home.client.base);
        for request in [home.client.http.post(&url), home.client.http.put(format!("{url}/mine"))] {
            let response = request.json(&body).send().await.unwrap();
            assert_eq!(response.status(), 400);
            let text = response.text().await.unwrap();
            assert!(text.contains("\"param\":\"tools\"") && text.contains("configuration"), "{text}");
        }
    }
    let shown = home.client.http.get(format!("{}/assistants", home.client.base)).send().await.unwrap();
    let shown = shown.text().await.unwrap();
    assert!(shown.contains("declared") && !shown.contains("hush"), "{shown}");
    // An assistant that nobody declared has no tools, however it came about.
    let smuggled =
        Assistant { tools: serde_json::from_str(r#"[{"mcp": {"command": "sh"}}]"#).unwrap(), ..Assistant::default() };
    assert!(matches!(home.app.tools.list(&smuggled).await, Err(ToolError::NotCalled(_))));
    // A deleted session has no interpreter.
    let assistant = home.app.config.assistants[0].clone();
    for (path, id) in [("sessions", "s"), ("v1/sessions", "t")] {
        home.chat(json!({"session_id": id, "messages": [user("Hi")]})).await;
        let session = Key { tenant: nobody().tenant, session: SessionId::new(id).unwrap() };
        let mut arguments = Map::new();
        arguments.insert("code".into(), "import os\nos.getcwd()".into());
        let call = Call { session, run: RunId::generate(), id: "1".into(), tool: "python".into(), arguments };
        let dir = home.app.tools.call(&assistant, &call).await.unwrap().content;
        assert!(Path::new(dir.trim_matches('\'')).exists());
        let deleted = home.client.http.delete(format!("{}/{path}/{id}", home.client.base)).send().await.unwrap();
        assert_eq!(deleted.status(), 200);
        assert!(!Path::new(dir.trim_matches('\'')).exists());
    }
}
