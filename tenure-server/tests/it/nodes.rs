//! Three nodes on one PostgreSQL, as real processes: killed, frozen and resumed, while the database is restarted.
//! Every run ends; no side effect happens twice; no acknowledged write is lost, duplicated or reordered.
//!
//! `CHAOS_SECONDS` and `CHAOS_RUNS` make it longer (`make chaos`).

use crate::support::*;
use axum::Router;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::routing::post;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tenure::{Principal, Role, SessionId, Tenure};

/// The side effects of the tools: how often each call was executed.
#[derive(Clone, Default)]
struct SideEffects {
    executions: Arc<Mutex<HashMap<String, usize>>>,
}

/// A stateless model: it calls the tools `pay` and `look`, and then reports that.
async fn model_response(body: String) -> String {
    let request: Value = serde_json::from_str(&body).unwrap();
    let messages = request["messages"].as_array().unwrap();
    let results = messages.iter().rev().take_while(|m| m["role"] == "tool").count();
    let call = |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{\"x\":1}"}});
    let message = match results {
        0 => json!({"role": "assistant", "content": null, "tool_calls": [call("p", "pay"), call("l", "look")]}),
        n => json!({"role": "assistant", "content": format!("{n} results")}),
    };
    tokio::time::sleep(Duration::from_millis(20)).await; // pacing: model and clients
    json!({"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).to_string()
}

async fn execute_tool(
    State(side_effects): State<SideEffects>,
    axum::extract::Path(tool): axum::extract::Path<String>,
    headers: HeaderMap,
) -> String {
    let call = headers["idempotency-key"].to_str().unwrap().to_owned();
    let session = headers["x-tenure-session"].to_str().unwrap().to_owned();
    *side_effects.executions.lock().unwrap().entry(format!("{session} {tool} {call}")).or_default() += 1;
    tokio::time::sleep(Duration::from_millis(30)).await; // pacing: a tool
    format!("{tool} done")
}

/// The database of this test alone, because it is restarted.
struct Database;

impl Database {
    fn run(command: &str) -> Option<String> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/postgres.sh");
        let output =
            Command::new("bash").arg(script).arg(command).env("TENURE_TEST_PG_NAME", "nodes").output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        Self::run("stop");
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

#[tokio::test(flavor = "multi_thread")]
async fn three_nodes_lose_nothing_and_execute_nothing_twice() {
    if postgres_server().is_none() {
        return;
    }
    let seconds = number("CHAOS_SECONDS", 15);
    let runs = number("CHAOS_RUNS", 200);
    let seed = number("CHAOS_SEED", u64::from(std::process::id()));
    eprintln!("CHAOS_SEED={seed}");
    let mut state = seed | 1;
    // A random number below `n`.
    let mut random = move |n: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % n
    };
    // Stops a database that a killed test left behind.
    Database::run("stop");
    let store = Database::run("start").expect("a database");
    let _database = Database;

    let side_effects = SideEffects::default();
    let routes = Router::new()
        .route("/v1/chat/completions", post(model_response))
        .route("/tools/{tool}", post(execute_tool))
        .with_state(side_effects.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, routes).await });

    let tool = |name: &str, read_only: bool| {
        let url = format!("{address}/tools/{name}");
        json!({"http": {"name": name, "description": "x", "url": url, "parameters": {"type": "object"}, "read_only": read_only, "cache": false}})
    };
    let assistant = json!({"name": "agent", "model": "default", "tools": [tool("pay", false), tool("look", true)]});
    let more = json!({"assistants": [assistant], "runs": {"lease": "1500ms"}});
    let dirs: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let start = |i: usize| ServerProcess::with_model(dirs[i].path(), &store, &format!("{address}/v1"), more.clone());
    let mut nodes: Vec<ServerProcess> = (0..3).map(start).collect();
    let clients = Arc::new(Mutex::new(nodes.iter().map(|n| n.client.clone()).collect::<Vec<_>>()));

    // Clients: each starts its runs on any node until one acknowledges them.
    let runs_started = Arc::new(Mutex::new(BTreeMap::new()));
    let mut client_tasks = Vec::new();
    for client_index in 0..8 {
        let clients = clients.clone();
        let runs_started = runs_started.clone();
        client_tasks.push(tokio::spawn(async move {
            for n in (client_index..runs).step_by(8) {
                let id = format!("s{n}");
                for attempt in 0.. {
                    assert!(attempt < 2000, "no node takes {id}");
                    let client = {
                        let all = clients.lock().unwrap();
                        all[(n as usize + attempt) % all.len()].clone()
                    };
                    if let Some(run) = try_start_run(&client, &id).await {
                        runs_started.lock().unwrap().insert(id, run);
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await; // pacing: a client retries
                }
                tokio::time::sleep(Duration::from_millis(20)).await; // pacing: model and clients
            }
        }));
    }

    // Chaos, until the time is over and every run has begun.
    let chaos_start = Instant::now();
    let mut restarted = false;
    while chaos_start.elapsed() < Duration::from_secs(seconds) || client_tasks.iter().any(|a| !a.is_finished()) {
        assert!(chaos_start.elapsed() < Duration::from_secs(seconds + 300), "it does not get on");
        let i = random(3) as usize;
        if !restarted && chaos_start.elapsed() > Duration::from_secs(seconds / 2) {
            restarted = true;
            tokio::task::spawn_blocking(|| Database::run("restart")).await.unwrap();
        } else if random(2) == 0 {
            nodes[i].kill();
            nodes[i] = start(i);
            clients.lock().unwrap()[i] = nodes[i].client.clone();
        } else {
            nodes[i].signal("STOP");
            tokio::time::sleep(Duration::from_millis(200 + random(3800))).await; // pacing: frozen this long
            nodes[i].signal("CONT");
        }
        tokio::time::sleep(Duration::from_millis(100 + random(800))).await; // pacing: until the next fault
    }
    for task in client_tasks {
        task.await.unwrap();
    }

    let runs_started = runs_started.lock().unwrap().clone();

    // Quiet: reviewers answer truthfully whether lost calls were executed, and every run ends.
    let client = nodes[0].client.clone();
    let recovery_start = Instant::now();
    let mut reviews_decided = 0;
    loop {
        let open = client.send("GET", "/reviews?limit=100", Value::Null).await;
        for review in open.body["data"].as_array().into_iter().flatten() {
            assert_eq!(review["kind"], "lost");
            let call = format!("{} {} ", review["session_id"].as_str().unwrap(), review["step"].as_str().unwrap());
            let was_executed = side_effects.executions.lock().unwrap().keys().any(|k| k.starts_with(&call));
            let decision = json!({"decision": if was_executed { "approved" } else { "rejected" }});
            let path = format!("/reviews/{}/decision", review["id"].as_str().unwrap());
            client.send("POST", &path, decision).await;
            reviews_decided += 1;
        }
        let mut open = 0;
        for (id, run) in &runs_started {
            let response = client.send("GET", &format!("/sessions/{id}/runs/{run}"), Value::Null).await;
            open += usize::from(response.body["status"] != "completed");
        }
        if open == 0 {
            break;
        }
        assert!(recovery_start.elapsed() < Duration::from_secs(300), "{open} runs do not end");
        tokio::time::sleep(Duration::from_millis(300)).await; // polling interval
    }
    eprintln!("{runs} runs in {:?}; a person was asked {reviews_decided} times", chaos_start.elapsed());

    check(&store, &runs_started, &side_effects).await;
}

/// Creates a session and its run, unless they exist. Returns the run if the node acknowledged it.
async fn try_start_run(client: &Client, id: &str) -> Option<String> {
    let post = |path: String, body: Value| {
        let request = client.http.post(format!("{}{path}", client.base)).json(&body);
        request.header("idempotency-key", format!("key-{id}")).timeout(Duration::from_secs(3)).send()
    };
    let created = post("/sessions".to_owned(), json!({"id": id, "assistant_id": "agent"})).await.ok()?;
    if ![201, 409].contains(&created.status().as_u16()) {
        return None;
    }
    let run =
        post(format!("/sessions/{id}/runs"), json!({"input": format!("do {id}"), "mode": "background"})).await.ok()?;
    if !run.status().is_success() {
        return None;
    }
    let run: Value = run.json().await.ok()?;
    Some(run["id"].as_str()?.to_owned())
}

/// Reads every log, and compares it with the acknowledged runs and the side effects.
async fn check(store: &str, runs_started: &BTreeMap<String, String>, side_effects: &SideEffects) {
    let tenure = Tenure::open(store).await.unwrap();
    let findings = tenure.examine(|_| ()).await.unwrap();
    assert!(findings.is_empty(), "{findings:?}");
    let principal = Principal::new("default", "default").unwrap();
    let mut wrong = Vec::new();
    for (id, run) in runs_started {
        let session = tenure.load(&principal, &SessionId::new(id).unwrap()).await.unwrap();
        let roles: Vec<Role> = session.messages.iter().map(|m| m.message.role()).collect();
        if roles != [Role::User, Role::Assistant, Role::Tool, Role::Tool, Role::Assistant] {
            wrong.push(format!("{id}: {roles:?}"));
        }
        if session.messages[0].message.text() != format!("do {id}") {
            wrong.push(format!("{id} has another's words"));
        }
        if session.runs.iter().filter(|r| r.id.as_str() == run).count() != 1 || session.runs.len() != 1 {
            wrong.push(format!("{id} has {} runs", session.runs.len()));
        }
        // The result of a reviewed call comes later in the log; a model sees results in the order of the calls.
        let shown = tenure::history(&session, &tenure::Window::default());
        let results: Vec<_> = shown.iter().filter_map(|m| m.tool_call_id()).collect();
        if results != ["p", "l"] || shown.iter().any(|m| m.text() == tenure::rules::NO_RESULT) {
            wrong.push(format!("{id}: results of {results:?}"));
        }
        let paid: usize = {
            let executions = side_effects.executions.lock().unwrap();
            executions.iter().filter(|(k, _)| k.starts_with(&format!("{id} pay "))).map(|(_, n)| n).sum()
        };
        if paid != 1 {
            wrong.push(format!("{id} paid {paid} times"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
