//! The values of `/metrics` after a known amount of work.

use crate::support::{ServerProcess, chat_request, send};
use serde_json::json;

async fn metrics(server: &ServerProcess) -> String {
    server.request("GET", "/metrics").send().await.unwrap().text().await.unwrap()
}

#[track_caller]
fn assert_line(text: &str, name: &str, value: &str) {
    let line = text.lines().find(|l| l.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
    assert_eq!(line.map(|l| &l[name.len() + 1..]), Some(value), "{name} in\n{text}");
}

fn number(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')).unwrap_or("0");
    line.parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn work_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let server = ServerProcess::start(dir.path(), "store: 'sqlite:t.db'");
    for (session, text) in [("a", "one"), ("a", "two"), ("b", "three")] {
        assert_eq!(server.chat(session, text).await.0, 200);
    }
    let mut bad = chat_request("c", "four");
    bad["messages"] = json!([]);
    assert_eq!(send(server.request("POST", "/v1/chat/completions").json(&bad)).await.0, 400);
    assert_eq!(server.get("/nowhere").await.0, 404);
    let text = metrics(&server).await;
    let chat = "method=\"POST\",route=\"/v1/chat/completions\"";
    assert_line(&text, &format!("tenure_requests_total{{{chat},status=\"200\"}}"), "3");
    assert_line(&text, &format!("tenure_requests_total{{{chat},status=\"400\"}}"), "1");
    assert_line(&text, "tenure_requests_total{method=\"GET\",route=\"none\",status=\"404\"}", "1");
    assert_line(&text, &format!("tenure_request_seconds_count{{{chat}}}"), "4");
    assert_line(&text, "tenure_turns_total{outcome=\"completed\"}", "3");
    assert_line(&text, "tenure_turn_own_seconds_count", "3");
    assert_line(&text, "tenure_turn_model_seconds_count", "3");
    assert_line(&text, "tenure_sessions{status=\"active\"}", "2");
    assert_line(&text, "tenure_sessions{status=\"expired\"}", "0");
    // Each turn commits the question before the answer.
    let commits = number(&text, "tenure_commits_total{outcome=\"committed\"}");
    assert!((6.0..20.0).contains(&commits), "{text}");
    assert_eq!(number(&text, "tenure_commits_total{outcome=\"failed\"}"), 0.0);
    let batches = number(&text, "tenure_commit_batch_size_count");
    let steps = number(&text, "tenure_commit_batch_size_sum");
    assert!(batches >= 1.0 && steps >= commits && batches <= steps, "{text}");
    assert!(number(&text, "tenure_hot_sessions_total{found=\"hit\"}") >= 1.0, "{text}");
    assert!(number(&text, "tenure_hot_sessions_total{found=\"miss\"}") >= 1.0, "{text}");
    assert!(number(&text, "tenure_sweep_seconds_count") >= 1.0, "{text}");
    assert!(number(&text, "tenure_connections") >= 1.0, "{text}");
}

/// The session count is cached between scrapes.
#[tokio::test(flavor = "multi_thread")]
async fn sessions_are_not_counted_at_every_scrape() {
    let dir = tempfile::tempdir().unwrap();
    let server = ServerProcess::start(dir.path(), "store: 'memory:'");
    server.chat("a", "one").await;
    assert_line(&metrics(&server).await, "tenure_sessions{status=\"active\"}", "1");
    server.chat("b", "two").await;
    assert_line(&metrics(&server).await, "tenure_sessions{status=\"active\"}", "1");
}

/// The library counts tool results: a `Tenure` in this process, with its own recorder.
#[test]
fn results_of_tools_are_counted() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    metrics::with_local_recorder(&recorder, || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let tenure = tenure::Tenure::open("memory:").await.unwrap();
            let principal = tenure::Principal::default();
            let id =
                tenure.create(&principal, tenure::NewSession::default()).await.unwrap().head().info.session_id.clone();
            assert!(tenure.cache_get(&principal, &id, "look", &json!({"a": 1})).await.unwrap().is_none());
            tenure.cache_put(&principal, &id, "look", &json!({"a": 1}), &json!("there")).await.unwrap();
            for _ in 0..2 {
                assert!(tenure.cache_get(&principal, &id, "look", &json!({"a": 1})).await.unwrap().is_some());
            }
        });
    });
    let text = handle.render();
    assert_line(&text, "tenure_tool_cache_total{found=\"hit\"}", "2");
    assert_line(&text, "tenure_tool_cache_total{found=\"miss\"}", "1");
}
