//! Runs over HTTP: tools, events, cancellation, resumption after a restart, and human review.

use crate::support::*;
use axum::Router;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::routing::post;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tenure::Assistant;
use tenure_server::auth::{NewKey, Right};
use tenure_server::config::Config;
use tokio::sync::Semaphore;

/// A tool server: it records the calls, and answers when permitted.
#[derive(Clone)]
pub struct Toolbox {
    pub calls: Arc<Mutex<Vec<(String, HeaderMap, Value)>>>,
    /// A call of `slow` takes a permit.
    pub slow: Arc<Semaphore>,
    pub address: String,
}

impl Toolbox {
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let box_ = Self { calls: Arc::default(), slow: Arc::new(Semaphore::new(0)), address };
        let routes = Router::new().route("/{tool}", post(answer)).with_state(box_.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        box_
    }

    pub fn count(&self, tool: &str) -> usize {
        self.calls.lock().unwrap().iter().filter(|(t, ..)| t == tool).count()
    }

    /// An assistant with all of these tools.
    pub fn assistant(&self, more: Value) -> Assistant {
        let tool = |name: &str, flags: Value| {
            let mut http = json!({
                "name": name, "description": "A tool.", "url": format!("{}/{name}", self.address),
                "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
            });
            http.as_object_mut().unwrap().extend(flags.as_object().unwrap().clone());
            json!({"http": http})
        };
        let mut assistant = json!({"name": "agent", "model": "default", "tools": [
            tool("look", json!({"read_only": true})), tool("pay", json!({})), tool("refund", json!({})),
            tool("slow", json!({})), tool("again", json!({"idempotent": true})),
        ]});
        assistant.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(assistant).unwrap()
    }
}

async fn answer(
    State(tools): State<Toolbox>,
    axum::extract::Path(tool): axum::extract::Path<String>,
    headers: HeaderMap,
    body: String,
) -> String {
    let arguments: Value = serde_json::from_str(&body).unwrap();
    tools.calls.lock().unwrap().push((tool.clone(), headers, arguments.clone()));
    if tool == "slow" || tool == "again" {
        tools.slow.acquire().await.unwrap().forget();
    }
    format!("{tool} {}", arguments["x"])
}

pub async fn test_server(kind: StoreKind, tools: &Toolbox, more: Value) -> Option<TestServer> {
    test_server_with(kind, tools, more, |_| ()).await
}

async fn test_server_with(
    kind: StoreKind,
    tools: &Toolbox,
    more: Value,
    change: impl FnOnce(&mut Config),
) -> Option<TestServer> {
    let assistant = tools.assistant(more);
    TestServer::with(kind, false, |config| {
        config.assistants = vec![assistant];
        config.runs.lease = "600ms".parse().unwrap();
        change(config);
    })
    .await
}

impl Client {
    pub async fn send(&self, method: &str, path: &str, body: Value) -> Reply {
        let request = self.http.request(method.parse().unwrap(), format!("{}{path}", self.base));
        let request = if method == "GET" { request } else { request.json(&body) };
        reply_plain(request.send().await.unwrap()).await
    }

    pub async fn begin(&self, id: &str) {
        let created = self.send("POST", "/sessions", json!({"id": id, "assistant_id": "agent"})).await;
        assert_eq!(created.status, 201, "{created:?}");
    }

    pub async fn run(&self, id: &str, input: &str, mode: &str) -> Reply {
        self.send("POST", &format!("/sessions/{id}/runs"), json!({"input": input, "mode": mode})).await
    }

    /// Waits until the last run of a session has this status.
    pub async fn wait_for_status(&self, id: &str, status: &str) -> Value {
        let last = Mutex::new(Value::Null);
        wait_until(&format!("the run of {id} is {status}"), async || {
            let runs = self.send("GET", &format!("/sessions/{id}/runs"), Value::Null).await;
            *last.lock().unwrap() = runs.body["data"].as_array().and_then(|r| r.last().cloned()).unwrap_or_default();
            last.lock().unwrap()["status"] == status
        })
        .await;
        last.into_inner().unwrap()
    }
}

async fn reply_plain(response: reqwest::Response) -> Reply {
    let status = response.status().as_u16();
    let headers = response.headers().clone();
    let text = response.text().await.unwrap();
    let body = serde_json::from_str(&text).unwrap_or_default();
    Reply { status, headers, text, body, ..Reply::default() }
}

/// The events of a stream: id, kind, data.
fn events(text: &str) -> Vec<(Option<u64>, String, String)> {
    let part = |event: &str, name: &str| event.lines().find_map(|l| Some(l.strip_prefix(name)?.to_owned()));
    let all = text.split("\n\n").filter(|e| e.contains("event: "));
    all.map(|e| {
        let id = part(e, "id: ").map(|id| id.parse().unwrap());
        (id, part(e, "event: ").unwrap(), part(e, "data: ").unwrap())
    })
    .collect()
}

fn kinds(text: &str) -> Vec<String> {
    events(text).into_iter().map(|(_, kind, _)| kind).filter(|k| k != "delta").collect()
}

/// The whole life of a run: parallel calls, stored in order, subscribed to from any position, also after a restart.
async fn a_run_calls_tools_and_can_be_followed(kind: StoreKind) {
    let tools = Toolbox::start().await;
    let Some(mut test) = test_server(kind, &tools, json!({})).await else { return };
    test.client.begin("s").await;
    test.model
        .then(ModelResponse::ToolCalls(vec![("a", "slow", r#"{"x":1}"#), ("b", "look", r#"{"x":2}"#)]))
        .then(ModelResponse::Text("Done."));
    tools.slow.add_permits(1);
    let run = test.client.run("s", "Go", "wait").await;
    assert_eq!((run.status, run.body["status"].as_str()), (200, Some("completed")), "{run:?}");
    assert_eq!(run.body["answer"]["content"], "Done.");
    let shown = test.model.last_messages();
    assert_eq!(shown[2..], [tool("a", "slow 1"), tool("b", "look 2")], "in the order of the calls");
    let id = run.body["id"].as_str().unwrap().to_owned();
    let (_, headers, arguments) = tools.calls.lock().unwrap()[0].clone();
    assert_eq!(arguments.as_object().unwrap().len(), 1);
    assert_eq!(headers["x-tenure-run"].to_str().unwrap(), id);
    for restarted in [false, true] {
        if restarted && kind != StoreKind::Memory {
            test.restart().await;
        }
        let path = format!("/sessions/s/runs/{id}/events");
        let all = test.client.send("GET", &path, Value::Null).await;
        assert_eq!(
            kinds(&all.text),
            [
                "run_started",
                "message",
                "tool_started",
                "tool_started",
                "message",
                "checkpoint",
                "message",
                "checkpoint",
                "message",
                "checkpoint",
                "info",
                "run_ended",
                "done"
            ],
            "{}",
            all.text
        );
        let fourth = events(&all.text)[3].0.unwrap();
        let rest = test.client.send("GET", &format!("{path}?after={fourth}"), Value::Null).await;
        assert_eq!(kinds(&rest.text)[..], kinds(&all.text)[4..]);
        let request = test.client.http.get(format!("{}{path}", test.client.base)).header("accept", "application/json");
        let polled = reply_plain(request.header("last-event-id", fourth.to_string()).send().await.unwrap()).await;
        assert_eq!(polled.body["data"].as_array().unwrap().len(), kinds(&rest.text).len() - 1);
        assert_eq!(polled.body["over"], true);
    }
    let checkpoint = test.client.send("GET", "/sessions/s/checkpoints/turn-1.1", Value::Null).await;
    assert_eq!(checkpoint.body["pending_tool_calls"][0]["name"], "look", "{checkpoint:?}");
    assert_eq!(checkpoint.body["pending_tool_calls"][0]["started"], true);
    assert_eq!(checkpoint.body["tool_results"][0]["message"]["content"], "slow 1");
    assert_eq!(checkpoint.body["step_index"], 1);
    assert_eq!(checkpoint.body["messages"].as_array().unwrap().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_calls_tools_and_can_be_followed_sqlite() {
    a_run_calls_tools_and_can_be_followed(StoreKind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_calls_tools_and_can_be_followed_postgres() {
    a_run_calls_tools_and_can_be_followed(StoreKind::Postgres).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_has_text_as_it_arrives_and_events_as_they_are_stored() {
    let tools = Toolbox::start().await;
    let test = test_server(StoreKind::Memory, &tools, json!({})).await.unwrap();
    test.client.begin("s").await;
    test.model.then(ModelResponse::ToolCalls(vec![("a", "look", "{}")])).then(ModelResponse::Text("All is well."));
    let run = test.client.run("s", "Go", "stream").await;
    let all = events(&run.text);
    assert!(kinds(&run.text).ends_with(&["run_ended".into(), "done".into()]), "{}", run.text);
    let words = all.iter().filter(|(id, kind, data)| id.is_none() && kind == "delta" && data.contains("content"));
    assert!(words.count() >= 3, "{}", run.text);
    assert!(!all.iter().any(|(_, kind, data)| kind == "delta" && data.contains("tool_calls")), "{}", run.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_in_the_background_can_be_polled_and_cancelled() {
    let tools = Toolbox::start().await;
    let test = test_server(StoreKind::Memory, &tools, json!({})).await.unwrap();
    test.client.begin("s").await;
    test.model.then(ModelResponse::ToolCalls(vec![("a", "slow", "{}")]));
    let run = test.client.run("s", "Go", "background").await;
    assert_eq!(run.status, 202, "{run:?}");
    let id = run.body["id"].as_str().unwrap().to_owned();
    wait_until("the tool is called", async || tools.count("slow") == 1).await;
    assert_eq!(test.client.wait_for_status("s", "running").await["id"], id);
    let resumed = test.client.send("POST", &format!("/sessions/s/runs/{id}/resume"), json!({})).await;
    assert_eq!((resumed.status, resumed.code()), (409, "run_not_ended"));
    let ended = test.client.send("POST", &format!("/sessions/s/runs/{id}/cancel"), json!({})).await;
    assert_eq!((ended.body["status"].as_str(), ended.body["code"].as_str()), (Some("cancelled"), Some("cancelled")));
    // The events so far are stored, and none follow.
    tools.slow.add_permits(1);
    tokio::time::sleep(Duration::from_millis(100)).await; // observation window: nothing follows
    assert_eq!(test.stored("s").await.len(), 2);
    // A call that may have been executed is not repeated automatically.
    let resumed = test.client.send("POST", &format!("/sessions/s/runs/{id}/resume"), json!({})).await;
    assert_eq!(resumed.status, 202, "{resumed:?}");
    test.client.wait_for_status("s", "paused").await;
    let reviews = test.client.send("GET", "/reviews", Value::Null).await;
    assert_eq!(reviews.body["data"][0]["kind"], "lost", "{reviews:?}");
    assert_eq!(tools.count("slow"), 1);
    let nothing = test.client.send("GET", "/sessions/s/runs/run_nothing", Value::Null).await;
    assert_eq!((nothing.status, nothing.code()), (404, "no_such_run"));
}

/// A standard client of an assistant with tools gets a normal answer, which names the calls.
#[tokio::test(flavor = "multi_thread")]
async fn chat_with_server_tools() {
    let tools = Toolbox::start().await;
    let test = test_server(StoreKind::Memory, &tools, json!({})).await.unwrap();
    for stream in [false, true] {
        test.model
            .then(ModelResponse::ToolCalls(vec![("a", "look", r#"{"x":7}"#)]))
            .then(ModelResponse::Text("Seven it is."));
        let id = format!("s-{stream}");
        let body = json!({"model": "agent", "session_id": id, "messages": [user("Look")]});
        let answer = test.client.chat(stream, body, &[]).await;
        assert_eq!((answer.status, answer.content()), (200, "Seven it is."), "{answer:?}");
        assert!(answer.message().get("tool_calls").is_none(), "{answer:?}");
        assert_eq!(answer.report()[3], 1, "{answer:?}");
        assert_eq!(test.stored(&id).await.len(), 4);
        if stream {
            let progress: Vec<Value> = answer.events.iter().filter_map(|e| serde_json::from_str(e).ok()).collect();
            let phases: Vec<&str> = progress.iter().filter_map(|e| e["phase"].as_str()).collect();
            assert_eq!(phases, ["calling", "complete"]);
            assert!(answer.text.contains("event: agentic_tool_call_progress\n"));
        } else {
            let calls = &answer.body["agentic_tool_calls"];
            assert_eq!(
                (calls[0]["name"].as_str(), calls[0]["result_content"].as_str()),
                (Some("look"), Some("look 7"))
            );
        }
    }
    // The same call of `look` in the same session is served from the cache.
    let look_count = tools.count("look");
    test.model.then(ModelResponse::ToolCalls(vec![("b", "look", r#"{"x":7}"#)])).then(ModelResponse::Text("Still."));
    let again = test
        .client
        .chat(
            false,
            json!({"model": "agent", "session_id": "s-false", "history": "append", "messages": [user("And?")]}),
            &[],
        )
        .await;
    assert_eq!(again.body["agentic_tool_calls"][0]["cached"], true, "{again:?}");
    assert_eq!(tools.count("look"), look_count);
    // Tools that the client declares are left to the client.
    test.model.then(ModelResponse::ToolCalls(vec![("c", "mine", "{}")]));
    let brought = json!([{"type": "function", "function": {"name": "mine", "parameters": {}}}]);
    let body = json!({"model": "agent", "session_id": "c", "messages": [user("Hi")], "tools": brought});
    let client_reply = test.client.chat(false, body, &[]).await;
    assert_eq!(client_reply.message()["tool_calls"][0]["function"]["name"], "mine", "{client_reply:?}");
    let offered: Value = serde_json::from_str(&test.model.bodies().pop().unwrap()).unwrap();
    assert_eq!(offered["tools"].as_array().unwrap().len(), 6);
}

fn rules() -> Value {
    json!({"review": [{"tool": "refund*", "queue": "finance"}, {"tool": "pay", "queue": "finance", "timeout": "1s", "on_timeout": "rejected"}]})
}

/// A standard client whose run needs a human decision gets a normal answer, and can continue later.
async fn a_reviewer_decides(kind: StoreKind, stream: bool) {
    let tools = Toolbox::start().await;
    let Some(test) = test_server(kind, &tools, rules()).await else { return };
    test.model.then(ModelResponse::ToolCalls(vec![("a", "refund", r#"{"x":5}"#)]));
    let ask = |messages: Value| json!({"model": "agent", "session_id": "s", "messages": messages});
    let first = test.client.chat(stream, ask(json!([user("Money back")])), &[]).await;
    assert_eq!(first.status, 200, "{first:?}");
    let notice = first.content().to_owned();
    assert!(notice.contains("refund") && notice.contains("rev_"), "{notice}");
    assert_eq!(tools.count("refund"), 0);
    let session = test.client.send("GET", "/sessions/s", Value::Null).await;
    assert_eq!(
        (session.body["status"].as_str(), session.body["runs"][0]["status"].as_str()),
        (Some("paused"), Some("paused"))
    );
    let refused = test.client.chat(stream, ask(json!([user("And?")])), &[]).await;
    assert_eq!((refused.status, refused.code()), (409, "paused"));
    let forced = test.client.send("PATCH", "/sessions/s", json!({"status": "active"})).await;
    assert_eq!(forced.status, 400, "{forced:?}");

    let list = test.client.send("GET", "/reviews?queue=finance", Value::Null).await;
    let review = list.body["data"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(list.body["data"][0]["arguments"], json!({"x": 5}));
    assert_eq!(test.client.send("GET", "/reviews?queue=other", Value::Null).await.body["data"], json!([]));
    let path = format!("/reviews/{review}");
    let claimed = test.client.send("POST", &format!("{path}/claim"), json!({"reviewer": "bob"})).await;
    assert_eq!((claimed.status, claimed.body["claimed_by"].as_str()), (200, Some("bob")), "{claimed:?}");
    let other =
        test.client.send("POST", &format!("{path}/decision"), json!({"decision": "approved", "reviewer": "eve"})).await;
    assert_eq!((other.status, other.code()), (409, "claimed"));
    let bad = test
        .client
        .send("POST", &format!("{path}/decision"), json!({"decision": "corrected", "reviewer": "bob"}))
        .await;
    assert_eq!((bad.status, bad.body["error"]["param"].as_str()), (400, Some("arguments")));
    test.model.then(ModelResponse::Text("You get 3."));
    let decision = json!({"decision": "corrected", "arguments": {"x": 3}, "notes": "less", "reviewer": "bob"});
    let decided = test.client.send("POST", &format!("{path}/decision"), decision.clone()).await;
    assert_eq!((decided.status, decided.body["status"].as_str()), (200, Some("decided")), "{decided:?}");
    let twice = test.client.send("POST", &format!("{path}/decision"), decision).await;
    assert_eq!((twice.status, twice.code()), (409, "already_decided"));
    test.client.wait_for_status("s", "completed").await;
    assert_eq!(tools.calls.lock().unwrap()[0].2, json!({"x": 3}));
    let session = test.client.send("GET", "/sessions/s", Value::Null).await;
    assert_eq!(session.body["status"], "active");
    let recorded = &session.body["metadata"]["hitl_decisions"][0];
    let mut names: Vec<&str> = recorded.as_object().unwrap().keys().map(String::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["decision", "notes", "reviewer", "step", "timestamp"], "as the seed has it");
    assert_eq!((recorded["step"].as_str(), recorded["decision"].as_str()), (Some("refund"), Some("corrected")));
    assert_eq!(
        test.client.send("GET", "/reviews?status=decided", Value::Null).await.body["data"][0]["id"],
        review.as_str()
    );

    // The client sends everything back, including the notice: it is replaced by the outcome.
    test.model.then(ModelResponse::Text("Good bye."));
    let last = ask(json!([user("Money back"), assistant(&notice), user("Thanks")]));
    let last = test.client.chat(stream, last, &[]).await;
    assert_eq!((last.status, last.content()), (200, "Good bye."), "{last:?}");
    assert_eq!(last.report()[2], 0, "nothing is rewound: {last:?}");
    let contents: Vec<String> =
        test.model.last_messages().iter().filter_map(|m| Some(m["content"].as_str()?.to_owned())).collect();
    let refund = "[a reviewer changed the arguments: less]\nrefund 3";
    assert_eq!(contents, ["Money back", refund, "You get 3.", "Thanks"]);

    // The session id is not needed either: the notice identifies the session.
    test.model.then(ModelResponse::Text("Still here."));
    let conversation =
        json!([user("Money back"), assistant(&notice), user("Thanks"), assistant("Good bye."), user("Hello?")]);
    let later = test.client.chat(stream, json!({"model": "agent", "messages": conversation}), &[]).await;
    assert_eq!((later.status, later.content()), (200, "Still here."), "{later:?}");
    let session = test.client.send("GET", "/sessions/s", Value::Null).await;
    assert_eq!(session.body["messages"].as_array().unwrap().len(), 8, "{session:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reviewer_decides_sqlite() {
    a_reviewer_decides(StoreKind::Sqlite, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reviewer_decides_postgres_streamed() {
    a_reviewer_decides(StoreKind::Postgres, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undecided_review_times_out() {
    let tools = Toolbox::start().await;
    let test = test_server(StoreKind::Memory, &tools, rules()).await.unwrap();
    test.client.begin("s").await;
    test.model.then(ModelResponse::ToolCalls(vec![("a", "pay", "{}")])).then(ModelResponse::Text("Then not."));
    let run = test.client.run("s", "Pay", "wait").await;
    assert_eq!((run.body["status"].as_str(), run.body["reviews"].as_array().map(Vec::len)), (Some("paused"), Some(1)));
    test.client.wait_for_status("s", "completed").await;
    assert_eq!(tools.count("pay"), 0);
    let stored = test.stored("s").await;
    assert!(stored[2]["content"].as_str().unwrap().contains("rejected"), "{stored:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn reviews_need_the_right_and_stay_with_the_tenant() {
    let tools = Toolbox::start().await;
    let test = test_server(StoreKind::Memory, &tools, rules()).await.unwrap();
    test.client.begin("s").await;
    test.model.then(ModelResponse::ToolCalls(vec![("a", "refund", "{}")]));
    test.client.run("s", "Pay", "wait").await;
    let review =
        test.client.send("GET", "/reviews", Value::Null).await.body["data"][0]["id"].as_str().unwrap().to_owned();
    let mut keys = Vec::new();
    for (tenant, rights) in [
        ("default", vec![Right::Read, Right::Write]),
        ("default", vec![Right::Review]),
        ("other", vec![Right::Review, Right::Admin]),
    ] {
        let tenant = tenure::Tenant::new(tenant).unwrap();
        keys.push(test.app.keys.add(NewKey { tenant, rights, ..NewKey::default() }).await.unwrap().1);
    }
    let ask = async |key: &str, path: &str| {
        let request = test.client.http.get(format!("{}{path}", test.client.base)).bearer_auth(key);
        reply_plain(request.send().await.unwrap()).await
    };
    assert_eq!(ask(&keys[0], "/reviews").await.status, 403);
    assert_eq!(ask(&keys[1], "/reviews").await.body["data"][0]["id"], review.as_str());
    assert_eq!(ask(&keys[1], "/sessions/s").await.status, 403, "who reviews need not read");
    assert_eq!(ask(&keys[2], "/reviews").await.body["data"], json!([]));
    let hidden = ask(&keys[2], &format!("/reviews/{review}")).await;
    assert_eq!((hidden.status, hidden.code()), (404, "no_such_review"));
}

/// The server is killed during a call. Idempotent calls are repeated; for the others a human decides.
async fn a_run_is_resumed_after_a_crash(store: &str, dir: &std::path::Path) {
    let (tools, model) = (Toolbox::start().await, ScriptedModelServer::default());
    let more = json!({"assistants": [tools.assistant(json!({}))], "runs": {"lease": "2s"}});
    let base_url = model.start().await;
    let mut node = ServerProcess::with_model(dir, store, &base_url, more.clone());
    for (id, tool) in [("may", "again"), ("must-not", "slow")] {
        node.client.begin(id).await;
        model.then(ModelResponse::ToolCalls(vec![("a", tool, "{}")]));
        node.client.run(id, "Go", "background").await;
        wait_until("the tool is called", async || tools.count(tool) == 1).await;
    }
    node.kill();
    let node = ServerProcess::with_model(dir, store, &base_url, more);
    node.client.wait_for_status("must-not", "paused").await;
    wait_until("it is called again", async || tools.count("again") == 2).await;
    model.then(ModelResponse::Text("One."));
    tools.slow.add_permits(3);
    node.client.wait_for_status("may", "completed").await;
    let reviews = node.client.send("GET", "/reviews", Value::Null).await;
    let review = reviews.body["data"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(reviews.body["data"][0]["kind"], "lost", "{reviews:?}");
    model.then(ModelResponse::Text("Two."));
    let decision = json!({"decision": "approved", "notes": "I saw it"});
    node.client.send("POST", &format!("/reviews/{review}/decision"), decision).await;
    node.client.wait_for_status("must-not", "completed").await;
    assert_eq!(tools.count("slow"), 1, "no side effect runs twice");
    let messages = node.client.send("GET", "/sessions/must-not/messages", Value::Null).await;
    assert!(messages.body["data"][2]["message"]["content"].as_str().unwrap().contains("I saw it"), "{messages:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_resumed_after_a_crash_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    a_run_is_resumed_after_a_crash("sqlite:tenure.db", dir.path()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_resumed_after_a_crash_postgres() {
    let dir = tempfile::tempdir().unwrap();
    if let Some(schema) = PostgresSchema::new() {
        a_run_is_resumed_after_a_crash(&schema.url(), dir.path()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_is_called_when_a_run_ends() {
    let tools = Toolbox::start().await;
    let hook = format!("{}/hook", tools.address);
    let test = test_server_with(StoreKind::Memory, &tools, json!({}), |config| {
        config.runs.webhooks = vec![serde_json::from_value(json!({"url": hook})).unwrap()];
    })
    .await
    .unwrap();
    test.client.begin("s").await;
    let run = test.client.run("s", "Go", "wait").await;
    wait_until("the hook is told", async || tools.count("hook") == 1).await;
    let (_, _, delivered) = tools.calls.lock().unwrap()[0].clone();
    assert_eq!(
        (delivered["event"].as_str(), &delivered["run_id"], delivered["status"].as_str()),
        (Some("run.ended"), &run.body["id"], Some("completed"))
    );
}

/// The usage of a turn with several model calls is their sum: in the body, and in a stream in one chunk at its end.
#[tokio::test(flavor = "multi_thread")]
async fn usage_is_the_sum_of_all_calls() {
    let tools = Toolbox::start().await;
    for (stream, rounds) in [(false, 3), (true, 3), (false, 1), (true, 1)] {
        let agent = tools.assistant(json!({}));
        let test = TestServer::with(StoreKind::Memory, stream, |config| config.assistants = vec![agent]).await.unwrap();
        let script = |test: &TestServer| {
            for id in ["c1", "c2"].iter().take(rounds - 1) {
                test.model.then(ModelResponse::ToolCalls(vec![(*id, "look", "{}")]));
            }
            test.model.then(ModelResponse::Text("All done."));
        };
        script(&test);
        let body = json!({"model": "agent", "messages": [user("Go")], "stream_options": {"include_usage": true}});
        let key = [("idempotency-key", "k")];
        let want = json!({"prompt_tokens": 7 * rounds, "completion_tokens": 3 * rounds, "total_tokens": 10 * rounds});
        for _ in 0..2 {
            let reply = test.client.chat(stream, body.clone(), &key).await;
            assert_eq!((reply.content(), &reply.body["usage"]), ("All done.", &want), "{}", reply.text);
            assert_eq!(test.model.request_count(), rounds, "the second time it is not asked");
            if stream {
                let chunks: Vec<Value> = reply.events.iter().filter_map(|e| serde_json::from_str(e).ok()).collect();
                let usage_chunks: Vec<usize> = (0..chunks.len()).filter(|i| !chunks[*i]["usage"].is_null()).collect();
                assert_eq!(usage_chunks, [chunks.len() - 1], "{}", reply.text);
                assert!(reply.is_done());
            }
        }
        // Usage was not requested.
        if stream {
            script(&test);
            let reply = test.chat(json!({"model": "agent", "messages": [user("Again")]})).await;
            assert!(!reply.text.contains("usage") && reply.content() == "All done.", "{}", reply.text);
        }
    }
}
