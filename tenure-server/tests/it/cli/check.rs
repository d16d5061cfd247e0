//! `tenure config --check`, and what the server prints when it starts.

use super::*;
use crate::support::ServerProcess;
use crate::tools::{mcp_script, python};

fn check(dir: &Path, config: Value) -> CommandOutput {
    // JSON is YAML.
    std::fs::write(dir.join("tenure.yaml"), config.to_string()).unwrap();
    tenure(dir, &["config", "--check"])
}

/// Asserts that one line has this status and contains these texts.
#[track_caller]
fn assert_line(output: &CommandOutput, status: &str, texts: &[&str]) {
    let is_it = |line: &str| line.starts_with(status) && texts.iter().all(|text| line.contains(text));
    assert!(output.out.lines().any(is_it), "no line {status} {texts:?} in:\n{}{}", output.out, output.err);
}

/// Everything responds: a Tenure server is the model server, and serves the address of an HTTP tool.
#[test]
fn a_configuration_is_tried() {
    let dir = temp();
    let upstream = Server::start(dir.path(), "memory:");
    let config = json!({
        "store": "sqlite:mine.db",
        "models": [{"name": "rehearsal", "base_url": format!("{}/v1", upstream.url)}, {"name": "a", "model": "b", "base_url": format!("{}/v1", upstream.url)}],
        "assistants": [{"name": "agent", "tools": [
            {"mcp": {"command": python(), "args": [mcp_script()]}},
            {"http": {"name": "weather", "description": "W.", "url": format!("{}/healthz", upstream.url)}},
        ]}],
    });
    let output = check(dir.path(), config.clone());
    assert_line(&output, "ok", &["configuration: tenure.yaml"]);
    assert_line(&output, "ok", &["store sqlite:mine.db: does not exist yet"]);
    assert_line(&output, "ok", &["listen 127.0.0.1:8787: keys are not required"]);
    assert_line(&output, "ok", &["model rehearsal", "responds"]);
    assert_line(&output, "ok", &["model a", "does not list \"b\", but rehearsal"]);
    assert_line(&output, "ok", &["tools of agent: MCP server", "add, environment"]);
    assert_line(&output, "ok", &["tools of agent: HTTP tool weather at 127.0.0.1: weather"]);
    assert_eq!(output.code, 0);
    assert!(!dir.path().join("mine.db").exists(), "a check must not make a store");
    // An existing store is read. With a key, another address is permitted.
    tenure(dir.path(), &["keys", "add"]).ok();
    let mut config = config;
    config["listen"] = json!("0.0.0.0:8787");
    let output = check(dir.path(), config);
    assert_line(&output, "ok", &["store sqlite:mine.db: format 1"]);
    assert_line(&output, "ok", &["listen 0.0.0.0:8787: keys are required"]);
    let report = tenure(dir.path(), &["config", "--check", "--json"]).json();
    assert_eq!((&report["failed"], report["checks"].as_array().unwrap().len()), (&0.into(), 7));
    // The model server is a program that has no list of models: it is asked.
    drop(upstream);
    let output = tenure(dir.path(), &["config", "--check"]);
    assert_line(&output, "failed", &["model rehearsal", "start the model server, or change models[0].base_url"]);
    assert_eq!(output.code, 1);
}

#[test]
fn what_is_wrong_is_named() {
    let dir = temp();
    let upstream = Server::start(dir.path(), "sqlite:upstream.db");
    let key = tenure(dir.path(), &["--store", "sqlite:upstream.db", "keys", "add"]).ok();
    let url = format!("{}/v1", upstream.url);
    // Until the server knows that keys are required, it accepts requests without one.
    let model = json!({"models": [{"name": "m", "base_url": url}]});
    wait_until("the key is required", || check(dir.path(), model.clone()).code == 1);
    let config = json!({
        "store": "sqlite:nowhere/tenure.db",
        "models": [
            {"name": "denied", "base_url": url},
            {"name": "unset", "base_url": url, "api_key_env": "NOT_SET_ANYWHERE"},
            {"name": "absent", "base_url": "http://127.0.0.1:1/v1"},
            {"name": "good", "base_url": url, "api_key": key.trim()},
        ],
        "assistants": [{"name": "agent", "tools": [
            {"mcp": {"command": "no-such-program"}},
            {"http": {"name": "weather", "description": "W.", "url": "http://127.0.0.1:1/x"}},
        ]}],
    });
    let output = check(dir.path(), config);
    assert_line(&output, "failed", &["store sqlite:nowhere/tenure.db", "the directory nowhere does not exist"]);
    assert_line(&output, "failed", &["model denied", "401", "models[0].api_key_env"]);
    assert_line(&output, "failed", &["model unset", "NOT_SET_ANYWHERE"]);
    assert_line(&output, "failed", &["model absent", "http://127.0.0.1:1/v1", "models[2].base_url"]);
    assert_line(&output, "ok", &["model good"]);
    assert_line(&output, "failed", &["MCP server no-such-program", "assistants[0].tools[0]"]);
    assert_line(&output, "failed", &["HTTP tool weather", "assistants[0].tools[1]"]);
    assert_eq!(output.code, 1);
    assert!(!output.out.contains(key.trim()), "{}", output.out);
    let output = check(dir.path(), json!({"listen": "0.0.0.0:1", "store": "sqlite:new.db"}));
    assert_line(&output, "failed", &["listen 0.0.0.0:1", "tenure keys add"]);
    let output =
        check(dir.path(), json!({"on_expire": {"webhooks": [{"url": "http://x/", "secret_env": "NOT_SET_ANYWHERE"}]}}));
    assert_line(&output, "failed", &["configuration: on_expire.webhooks[0]", "NOT_SET_ANYWHERE"]);
    let output = check(dir.path(), json!({"store": "mysql:x"}));
    assert_line(&output, "failed", &["store mysql:x"]);
    let output = check(dir.path(), json!({"sesions": {}}));
    output.fails(1, "did you mean `sessions`");
    let server = ["--server", upstream.url.as_str(), "config", "--check"];
    std::fs::write(dir.path().join("tenure.yaml"), "").unwrap();
    tenure(dir.path(), &server).fails(1, "omit --server");
}

#[test]
fn the_start_is_summarized() {
    let dir = temp();
    std::fs::write(dir.path().join("mine.yaml"), "models: [{name: m, base_url: http://127.0.0.1:1/v1}]\n").unwrap();
    let args = ["--config", "mine.yaml", "--store", "jsonl:sessions", "serve", "--listen", "127.0.0.1:0"];
    let mut child = command(dir.path(), &args).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().take(2).map(Result::unwrap).collect::<Vec<_>>();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(lines[0].starts_with("listening on http://127.0.0.1:"), "{lines:?}");
    assert_eq!(lines[1], "store jsonl:sessions; configuration mine.yaml; models: m; keys are not required");
}

/// `runs.eager_tools` starts MCP servers with the server; one that fails is logged and does not stop it.
#[tokio::test(flavor = "multi_thread")]
async fn tools_are_connected_at_the_start_on_request() {
    let dir = temp();
    let config = |eager: bool| {
        json!({"listen": "127.0.0.1:0", "store": "memory:", "runs": {"eager_tools": eager}, "assistants": [{"name": "agent", "tools": [
            {"mcp": {"command": python(), "args": [mcp_script()]}}, {"mcp": {"command": "no-such-program"}},
        ]}]})
        .to_string()
    };
    let server = ServerProcess::start(dir.path(), &config(true));
    crate::support::wait_until("the tools are connected", async || {
        let log = server.log();
        log.contains("connected to an MCP server") && log.contains("could not connect to an MCP server at the start")
    })
    .await;
    assert_eq!(server.get("/readyz").await.0, 200);
    drop(server);
    let server = ServerProcess::start(dir.path(), &config(false));
    assert_eq!(server.get("/readyz").await.0, 200);
    assert!(!server.stop().contains("an MCP server"));
}
