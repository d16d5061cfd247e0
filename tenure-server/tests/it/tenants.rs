//! Tenant isolation: no request of one tenant, on any route, reads or changes data of another.

use crate::support::InProcessClient;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Value, json};
use tenure_server::auth::Right;

/// A text that occurs only in the other tenant's data.
const MARKER: &str = "xyzzy-secret";
const CASES: u32 = 200;
const STEPS: std::ops::Range<usize> = 1..25;

/// One request: method, path, body.
type Step = (&'static str, String, String);

/// Generates requests. Every route of the OpenAPI document appears; a test below checks that.
fn steps() -> impl Strategy<Value = Step> {
    let id = prop_oneof![Just("s1"), Just("s2"), Just("shared"), Just("theirs"), Just("thread_x")];
    let word = prop_oneof![Just("t1"), Just("keeper"), Just("default"), Just("victim"), Just("turn-1")];
    let n = 0..4usize;
    (id, word, n, 0..ROUTES.len()).prop_map(|(id, word, n, route)| {
        let (method, path) = ROUTES[route];
        let path = path.replace("{id}", if path.starts_with("/sessions") || path.starts_with("/v1") { id } else { word });
        let path = path.replace("{name}", word).replace("{place}", if n % 2 == 0 { "turn-1" } else { "2" });
        let path = path.replace("{run}", "run_1").replace("{review}", &format!("rev_{n}_{id}"));
        let message = json!({"role": "user", "content": format!("mine {n}")});
        let body = match (method, ROUTES[route].1) {
            ("POST", "/v1/chat/completions") => match n {
                // The other tenant's exact text: content matching must not find their session.
                0 => json!({"model": "rehearsal", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]}),
                1 => json!({"model": word, "messages": [message]}),
                _ => json!({"session_id": id, "model": "rehearsal", "messages": [message]}),
            },
            ("POST", "/v1/embeddings") => json!({"model": word, "input": "x"}),
            ("POST", "/sessions") => json!({"id": id, "thread_id": word, "assistant_id": (n == 0).then_some(word)}),
            ("POST", "/assistants") => json!({"name": word, "instructions": "mine"}),
            ("PUT", "/assistants/{name}") => json!({"instructions": "mine"}),
            ("PATCH", _) => json!({"title": "mine", "metadata": {"a": n}}),
            ("POST", "/sessions/{id}/messages") => json!({"messages": [message, {"role": "assistant", "content": "mine too"}]}),
            ("POST", "/sessions/{id}/rewind") => json!({"position": n}),
            ("POST", "/sessions/{id}/fork") => json!({"id": format!("f{n}"), "position": n}),
            ("POST", "/v1/sessions/{id}/fork") => json!({"session_id": format!("f{n}")}),
            ("POST", "/sessions/import") => json!({"id": id, "messages": [message]}),
            ("POST", "/sessions/{id}/runs") => match n {
                0 => json!({"mode": "background"}),
                1 => json!({"input": "mine", "mode": "stream"}),
                _ => json!({"messages": [message]}),
            },
            ("POST", "/memories") => match n {
                0 => json!({"text": "mine", "session_id": id}),
                1 => json!({"text": "mine", "assistant_id": word}),
                _ => json!({"text": "mine"}),
            },
            ("POST", "/reviews/{review}/decision") => json!({"decision": "approved", "notes": "mine"}),
            ("PUT", "/sessions/{id}/cache") => json!({"tool": "look", "arguments": {}, "result": "mine"}),
            ("PUT", _) => json!([message]),
            _ => json!({}),
        };
        let query = match (method, ROUTES[route].1, n) {
            ("DELETE", "/sessions/{id}", 3) => "?purge=true",
            ("GET", "/sessions", 1) => "?status=active,paused,expired,deleted&limit=100",
            ("GET", "/sessions", 2) => "?user=victim",
            ("GET", "/sessions", 3) => "?title=xyzzy&limit=100",
            ("GET", "/sessions/{id}", 1) => "?include=cache,discarded",
            ("GET", "/sessions/{id}/cache", _) => "?tool=look&arguments=%7B%7D",
            ("GET", "/sessions/{id}/export", 1) => "?format=mistralrs",
            ("GET", "/sessions/{id}/messages", 1) => "?last=5",
            ("GET", "/search", 0) => "?q=xyzzy",
            ("GET", "/search", 1) => "?q=a&status=active,paused,expired,deleted&limit=100",
            ("GET", "/search", 2) => "?q=%22xyzzy-secret%22&user=default",
            // A cursor as if a page had ended in the other tenant's session.
            ("GET", "/search", _) => "?q=secret&cursor=1900000000000000~theirs~99~9~99",
            ("GET", "/memories/search", 0) => "?q=xyzzy-secret&session_id=shared",
            ("GET", "/memories/search", 1) => "?q=xyzzy%20secret%20remembered&assistant_id=keeper",
            ("GET", "/memories/search", _) => "?q=xyzzy%20secret%20remembered",
            ("GET", "/memories", 0) => "?session_id=theirs&limit=100",
            ("GET", "/memories", 1) => "?assistant_id=keeper",
            ("GET", "/reviews", 1) => "?status=decided",
            ("GET", "/reviews", 2) => "?queue=finance&limit=100",
            _ => "",
        };
        (method, format!("{path}{query}"), body.to_string())
    })
}

const ROUTES: &[(&str, &str)] = &[
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/sessions/{id}"),
    ("PUT", "/v1/sessions/{id}"),
    ("DELETE", "/v1/sessions/{id}"),
    ("POST", "/v1/sessions/{id}/fork"),
    ("GET", "/assistants"),
    ("POST", "/assistants"),
    ("GET", "/assistants/{name}"),
    ("PUT", "/assistants/{name}"),
    ("DELETE", "/assistants/{name}"),
    ("GET", "/sessions"),
    ("POST", "/sessions"),
    ("GET", "/sessions/{id}"),
    ("PATCH", "/sessions/{id}"),
    ("DELETE", "/sessions/{id}"),
    ("POST", "/sessions/{id}/restore"),
    ("GET", "/sessions/{id}/messages"),
    ("POST", "/sessions/{id}/messages"),
    ("GET", "/sessions/{id}/discarded"),
    ("GET", "/sessions/{id}/cache"),
    ("PUT", "/sessions/{id}/cache"),
    ("GET", "/sessions/{id}/checkpoints"),
    ("POST", "/sessions/{id}/checkpoints"),
    ("GET", "/sessions/{id}/checkpoints/{place}"),
    ("POST", "/sessions/{id}/rewind"),
    ("POST", "/sessions/{id}/fork"),
    ("GET", "/sessions/{id}/export"),
    ("POST", "/sessions/import"),
    ("GET", "/sessions/{id}/runs"),
    ("POST", "/sessions/{id}/runs"),
    ("GET", "/sessions/{id}/runs/{run}"),
    ("GET", "/sessions/{id}/runs/{run}/events"),
    ("POST", "/sessions/{id}/runs/{run}/cancel"),
    ("POST", "/sessions/{id}/runs/{run}/resume"),
    ("GET", "/search"),
    ("GET", "/search"),
    ("GET", "/schedules"),
    ("GET", "/reviews"),
    ("GET", "/reviews/{review}"),
    ("POST", "/reviews/{review}/claim"),
    ("POST", "/reviews/{review}/release"),
    ("POST", "/reviews/{review}/decision"),
    ("GET", "/sessions/{id}/audit"),
    ("GET", "/audit"),
    ("POST", "/threads/{id}/session"),
    ("DELETE", "/users/{id}"),
    ("GET", "/keys"),
    ("POST", "/keys"),
    ("DELETE", "/keys/{id}"),
    ("POST", "/keys/{id}/rotate"),
    ("POST", "/sessions/{id}/compact"),
    ("POST", "/sessions/{id}/uncompact"),
    ("GET", "/memories"),
    ("POST", "/memories"),
    ("GET", "/memories/search"),
    ("GET", "/memories/{id}"),
    ("DELETE", "/memories/{id}"),
    ("GET", "/dreams"),
    ("POST", "/dreams"),
    ("DELETE", "/dreams/{id}"),
    ("GET", "/metrics"),
    ("GET", "/backup"),
];

#[test]
fn every_route_is_tried() {
    let document = serde_json::to_value(tenure_server::router::openapi()).unwrap();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            let open = ["/healthz", "/readyz"].contains(&path.as_str());
            let is_listed = ROUTES.contains(&(method.to_uppercase().as_str(), path.as_str()));
            assert!(
                is_listed || open,
                "{method} {path} must be in the table above, so that no tenant finds a way there"
            );
        }
    }
}

/// Creates the victim's data: sessions in each state, messages, images, checkpoints, discarded messages, a fork, an
/// assistant.
async fn fill_tenant(victim: &InProcessClient) {
    let title = format!("{MARKER} title");
    for id in ["shared", "theirs", "gone"] {
        let body = json!({"id": id, "title": title, "thread_id": "t1", "tags": [MARKER], "metadata": {MARKER: MARKER}});
        victim.post("/sessions", body).await.expect_status(201);
        victim
            .append_messages(id, json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]))
            .await;
        victim
            .append_messages(id, json!([{"role": "user", "content": MARKER}, {"role": "assistant", "content": MARKER}]))
            .await;
        victim.post(&format!("/sessions/{id}/checkpoints"), json!({"label": MARKER})).await.expect_status(201);
    }
    victim.append_messages("theirs", json!([{"role": "user", "content": format!("cut {MARKER}")}])).await;
    victim.post("/sessions/theirs/rewind", json!({"turn": 1})).await.expect_status(200);
    victim.post("/sessions/theirs/fork", json!({"id": "branch"})).await.expect_status(201);
    victim.delete("/sessions/gone").await.expect_status(200);
    victim
        .post(
            "/assistants",
            json!({"name": "keeper", "instructions": MARKER, "memory": {"scope": "group", "group": "lab"}}),
        )
        .await
        .expect_status(201);
    victim.post("/memories", json!({"text": format!("{MARKER} remembered")})).await.expect_status(201);
    victim
        .post("/memories", json!({"text": format!("{MARKER} remembered by all"), "assistant_id": "keeper"}))
        .await
        .expect_status(201);
}

/// Everything that the victim can read.
async fn snapshot(victim: &InProcessClient) -> Vec<String> {
    let list = victim.get("/sessions?status=active,paused,expired,deleted&limit=100").await;
    let mut all = vec![victim.get("/assistants").await.text];
    for session in list.json()["data"].as_array().unwrap() {
        let id = session["id"].as_str().unwrap();
        all.push(victim.get(&format!("/sessions/{id}?include=cache,discarded")).await.text);
        all.push(victim.get(&format!("/sessions/{id}/export")).await.text);
    }
    all.push(victim.get("/memories").await.text);
    all.push(victim.get("/memories?assistant_id=keeper").await.text);
    all.push(list.text);
    all
}

async fn check(tenant: &str, steps: Vec<Step>) -> Result<(), TestCaseError> {
    let api = InProcessClient::memory().await;
    let victim = api.key("victim", None, &[Right::Admin]).await;
    let intruder = api.key(tenant, None, &[Right::Admin]).await;
    fill_tenant(&victim).await;
    let before = snapshot(&victim).await;
    prop_assert!(before.iter().any(|text| text.contains(MARKER)));
    for (method, path, body) in steps {
        let kind = (method != "GET").then_some("application/json");
        let answer = intruder.send(method, &path, kind, body.clone()).await;
        prop_assert!(!answer.text.contains(MARKER), "{method} {path} {body} shows {}", answer.text);
        prop_assert!(answer.status.as_u16() < 500, "{method} {path} {body}: {}", answer.text);
        let headers = format!("{:?}", answer.headers);
        prop_assert!(!headers.contains(MARKER), "{method} {path} {body} shows {headers}");
        // In lists of sessions, only its own appear.
        if method == "GET" && path.starts_with("/sessions?") {
            let list: Value = answer.json();
            for session in list["data"].as_array().into_iter().flatten() {
                prop_assert_ne!(&session["id"], "branch");
                prop_assert_ne!(&session["title"], MARKER);
            }
        }
    }
    prop_assert_eq!(snapshot(&victim).await, before);
    Ok(())
}

#[test]
fn random_requests_of_one_tenant_neither_see_nor_change_the_other() {
    let seed: [u8; 32] = match std::env::var("TENURE_TEST_SEED") {
        Ok(words) => *blake3::hash(words.as_bytes()).as_bytes(),
        Err(_) => *blake3::hash(b"tenants").as_bytes(),
    };
    println!("the seed is {:?}; another one with TENURE_TEST_SEED=words", &seed[..4]);
    let config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let cases = prop::collection::vec(steps(), STEPS);
    runner.run(&cases, |steps| runtime.block_on(check("intruder", steps))).unwrap();
}

/// The property can fail: with a key of the same tenant it does.
#[tokio::test]
async fn a_leak_is_detected() {
    let step = |method, path: &str, body: &str| vec![(method, path.to_owned(), body.to_owned())];
    for leak in [
        step("GET", "/sessions", ""),
        step("GET", "/assistants", ""),
        step("GET", "/v1/sessions/shared", ""),
        step("GET", "/search?q=secret", ""),
        step("GET", "/search?q=secret&cursor=1900000000000000~theirs~99~9~99", ""),
        step("PATCH", "/sessions/branch", "{\"title\": null, \"tags\": null, \"metadata\": {\"xyzzy-secret\": null}}"),
        step("GET", "/memories", ""),
        step("GET", "/memories/search?q=remembered&assistant_id=keeper", ""),
        step("DELETE", "/v1/sessions/theirs", ""),
        step("DELETE", "/users/default", ""),
    ] {
        let failure = format!("{leak:?}");
        assert!(check("victim", leak.clone()).await.is_err(), "{failure}");
        check("intruder", leak).await.unwrap();
    }
}

#[tokio::test]
async fn the_same_id_is_two_sessions() {
    let api = InProcessClient::memory().await;
    let (a, b) = (api.key("a", None, &[Right::Admin]).await, api.key("b", None, &[Right::Admin]).await);
    for (api, word) in [(&a, "of a"), (&b, "of b")] {
        api.post("/sessions", json!({"id": "same"})).await.expect_status(201);
        api.append_messages("same", json!([{"role": "user", "content": word}])).await;
    }
    assert_eq!(a.get("/sessions/same").await.expect_status(200)["messages"][0]["message"]["content"], "of a");
    assert_eq!(b.get("/sessions/same").await.expect_status(200)["messages"][0]["message"]["content"], "of b");
    a.delete("/users/default").await.expect_status(200);
    assert_eq!(a.get("/sessions/same").await.expect_error(404).0, "not_found");
    b.get("/sessions/same").await.expect_status(200);
}
