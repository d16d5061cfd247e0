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

/// Every metric has its description and type, and names and types are those of the catalog.
#[tokio::test(flavor = "multi_thread")]
async fn every_metric_is_described() {
    use std::collections::BTreeMap;
    use tenure_server::observability::{catalog, process};
    let dir = tempfile::tempdir().unwrap();
    let server = ServerProcess::start(dir.path(), "store: 'sqlite:t.db'");
    assert_eq!(server.chat("a", "one").await.0, 200);
    let text = metrics(&server).await;
    let described = |keyword: &str| -> BTreeMap<String, String> {
        let lines = text.lines().filter_map(|l| l.strip_prefix(keyword)?.split_once(' '));
        lines.map(|(name, rest)| (name.to_owned(), rest.to_owned())).collect()
    };
    let (help, types) = (described("# HELP "), described("# TYPE "));
    assert_eq!(help.keys().collect::<Vec<_>>(), types.keys().collect::<Vec<_>>());
    let catalog = catalog::METRICS.iter().map(|(name, kind, help)| (*name, format!("{kind:?}").to_lowercase(), *help));
    let process = process::PROCESS_METRICS.iter().map(|(name, kind, help)| (*name, (*kind).to_owned(), *help));
    let known: BTreeMap<_, _> = catalog.chain(process).map(|(name, kind, help)| (name, (kind, help))).collect();
    for (name, kind) in &types {
        assert_eq!(known.get(name.as_str()), Some(&(kind.clone(), help[name].as_str())), "{name}");
    }
    assert_line(&text, "tenure_turns_running", "0");
    assert_line(&text, "tenure_turns_waiting", "0");
    assert_line(&text, "tenure_open_reviews", "0");
    assert!(number(&text, "tenure_tokens_total{model=\"rehearsal\",kind=\"prompt\"}") > 0.0, "{text}");
    assert!(number(&text, "tenure_tokens_total{model=\"rehearsal\",kind=\"completion\"}") > 0.0, "{text}");
    assert!(number(&text, "tenure_commit_seconds_count") >= 2.0, "{text}");
    assert_line(&text, &format!("tenure_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION")), "1");
    assert!(number(&text, "process_resident_memory_bytes") > 1e6, "{text}");
    assert!(number(&text, "process_start_time_seconds") > 1.7e9, "{text}");
    assert!(number(&text, "process_open_fds") > 5.0 && number(&text, "process_max_fds") > 100.0, "{text}");
    assert!(number(&text, "process_threads") > 1.0, "{text}");
}

/// Failed requests to a model server are counted by the configured name of the model.
#[tokio::test(flavor = "multi_thread")]
async fn errors_of_models_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let config =
        "store: 'memory:'\nmodels: [{name: m, base_url: 'http://127.0.0.1:9/v1', retries: 0, pass_unknown: true}]";
    let server = ServerProcess::start(dir.path(), config);
    for model in ["m", "invented-1", "invented-2"] {
        let mut body = chat_request("a", "one");
        body["model"] = json!(model);
        assert_eq!(send(server.request("POST", "/v1/chat/completions").json(&body)).await.0, 502);
    }
    let text = metrics(&server).await;
    assert_line(&text, "tenure_model_errors_total{model=\"m\",code=\"upstream_unreachable\"}", "1");
    assert_line(&text, "tenure_model_errors_total{model=\"other\",code=\"upstream_unreachable\"}", "2");
}
