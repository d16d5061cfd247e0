//! Memories and dreams (memory consolidation) over HTTP and on the command line.

use crate::support::InProcessClient;
use crate::support::ServerProcess;
use serde_json::{Value, json};
use tenure::{
    Assistant,
    policy::{MemoryConfig, MemoryScope, ToolSource},
};
use tenure_server::auth::Right;

fn assistant(name: &str, scope: MemoryScope) -> Assistant {
    let group = (scope == MemoryScope::Group).then(|| "lab".to_owned());
    let memory = Some(MemoryConfig { scope, group, ..MemoryConfig::default() });
    Assistant { name: name.to_owned(), memory, tools: vec![ToolSource::Memory], ..Assistant::default() }
}

async fn open() -> InProcessClient {
    InProcessClient::with_config("memory:", |c| {
        c.assistants = [
            ("friend", MemoryScope::User),
            ("guest", MemoryScope::Session),
            ("lab", MemoryScope::Group),
            ("goldfish", MemoryScope::None),
        ]
        .map(|(name, scope)| assistant(name, scope))
        .into();
        c.assistants[3].tools = Vec::new();
    })
    .await
}

fn texts(list: &Value) -> Vec<&str> {
    list["data"].as_array().unwrap().iter().map(|m| m["text"].as_str().unwrap()).collect()
}

/// Memories from other sessions are injected into the prompt and named in the response; the model can also store
/// memories itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_chat_with_a_memory() {
    let api = open().await.with("x-tenure-user", "ada");
    let memory =
        api.post("/memories", json!({"text": "likes green tea", "metadata": {"by": "hand"}})).await.expect_status(201);
    assert_eq!(
        (&memory["object"], &memory["scope"], &memory["user"], &memory["metadata"]["by"]),
        (&json!("memory"), &json!("user"), &json!("ada"), &json!("hand"))
    );
    let ask =
        |text: &str| json!({"model": "friend", "session_id": "s1", "messages": [{"role": "user", "content": text}]});
    let reply = api.post("/v1/chat/completions", ask("Which tea do I like?")).await.expect_status(200);
    assert_eq!(reply["session"]["memories"][0]["id"], memory["id"], "{reply}");
    let called = r#"CALL memory {"action": "remember", "text": "takes no sugar"}"#;
    api.post("/v1/chat/completions", ask(called)).await.expect_status(200);
    let all = api.get("/memories").await.expect_status(200);
    assert_eq!(all["data"].as_array().unwrap().len(), 2, "{all}");
    let sugar = all["data"].as_array().unwrap().iter().find(|m| m["text"] == "takes no sugar").unwrap();
    assert_eq!((&sugar["assistant"], &sugar["sources"][0]["session_id"]), (&json!("friend"), &json!("s1")));
    // The turn that contained the fact is rewound.
    api.post("/sessions/s1/rewind", json!({"turn": 1})).await.expect_status(200);
    assert_eq!(texts(&api.get("/memories").await.expect_status(200)), ["likes green tea"]);
    let stream = json!({"model": "friend", "stream": true, "messages": [{"role": "user", "content": "Which tea?"}]});
    let answer = api.post("/v1/chat/completions", stream).await;
    let first = answer.text.lines().next().unwrap().strip_prefix("data: ").unwrap().to_owned();
    let first: Value = serde_json::from_str(&first).unwrap();
    assert_eq!(first["session"]["memories"][0]["id"], memory["id"], "the first chunk says it");
}

#[tokio::test(flavor = "multi_thread")]
async fn routes() {
    let api = open().await;
    let (ada, bob) = (api.with("x-tenure-user", "ada"), api.with("x-tenure-user", "bob"));
    ada.post("/sessions", json!({"id": "g", "assistant_id": "guest"})).await.expect_status(201);
    ada.post("/sessions", json!({"id": "n", "assistant_id": "goldfish"})).await.expect_status(201);
    ada.post("/memories", json!({"text": "for this session", "session_id": "g"})).await.expect_status(201);
    ada.post("/memories", json!({"text": "for the lab", "assistant_id": "lab"})).await.expect_status(201);
    for n in 0..5 {
        ada.post("/memories", json!({"text": format!("fact {n}")})).await.expect_status(201);
    }
    assert_eq!(texts(&ada.get("/memories?session_id=g").await.expect_status(200)), ["for this session"]);
    assert_eq!(texts(&bob.get("/memories?assistant_id=lab").await.expect_status(200)), ["for the lab"]);
    assert_eq!(texts(&bob.get("/memories").await.expect_status(200)), Vec::<&str>::new());
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = ada.get(&format!("/memories?limit=2{cursor}")).await.expect_status(200);
        seen.extend(texts(&page).into_iter().map(str::to_owned));
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    seen.sort();
    assert_eq!(seen, ["fact 0", "fact 1", "fact 2", "fact 3", "fact 4"]);
    let hits = ada.get("/memories/search?q=FACT%203&limit=1").await.expect_status(200);
    assert_eq!((texts(&hits), &hits["mode"]), (vec!["fact 3"], &json!("full_text")));
    assert!(hits["note"].as_str().unwrap().contains("no embedder"));
    let id = hits["data"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(ada.get(&format!("/memories/{id}")).await.expect_status(200)["uses"], 1);
    bob.get(&format!("/memories/{id}")).await.expect_error(404);
    bob.delete(&format!("/memories/{id}")).await.expect_error(404);
    assert_eq!(ada.delete(&format!("/memories/{id}")).await.expect_status(200)["deleted"], true);
    ada.delete(&format!("/memories/{id}")).await.expect_error(404);
    for (body, status, param) in [
        (json!({}), 400, ""),
        (json!({"text": ""}), 400, "text"),
        (json!({"text": "x", "session_id": "n"}), 400, "session_id"),
        (json!({"text": "x", "session_id": "nobody"}), 404, ""),
        (json!({"text": "x", "assistant_id": "guest"}), 400, "session_id"),
        (json!({"text": "x", "assistant_id": "nobody"}), 400, "assistant_id"),
        (json!({"text": "x", "assistant_id": "lab", "session_id": "g"}), 400, "assistant_id"),
        (json!({"text": "x", "session_id": "g", "messages": [99]}), 404, ""),
        (json!({"text": "x", "messages": [1]}), 400, "messages"),
        (json!({"text": "x".repeat(20_000)}), 413, ""),
        (json!({"text": "x", "scope": "user"}), 400, "scope"),
    ] {
        let (_, wrong) = ada.post("/memories", body.clone()).await.expect_error(status);
        assert!(param.is_empty() || wrong == param, "{body}: {wrong}");
    }
    bob.post("/memories", json!({"text": "x", "session_id": "g"})).await.expect_error(404);
    for path in [
        "/memories/search",
        "/memories/search?q=%20",
        "/memories?limit=0",
        "/memories?scope=user",
        "/memories/search?q=a&q=",
        "/memories/search?q=1&q=2&q=3&q=4&q=5&q=6&q=7&q=8&q=9",
    ] {
        ada.get(path).await.expect_error(400);
    }
    let assistant = json!({"name": "own", "memory": {"scope": "group"}});
    assert_eq!(api.post("/assistants", assistant).await.expect_error(400).1, "memory.group");
    let own = json!({"name": "own", "memory": {"scope": "user", "retention": "30d", "max_entries": 1000}});
    assert_eq!(api.post("/assistants", own.clone()).await.expect_status(201)["memory"]["retention"], "30d");
}

/// Dreams are for administrators, and can be undone.
#[tokio::test(flavor = "multi_thread")]
async fn dreams() {
    let api = open().await;
    let admin = api.key("default", None, &[Right::Read, Right::Write, Right::Admin]).await;
    let ada = api.key("default", Some("ada"), &[Right::Read, Right::Write]).await;
    ada.post("/sessions", json!({"id": "g", "assistant_id": "guest"})).await.expect_status(201);
    ada.post("/memories", json!({"text": "likes tea", "session_id": "g"})).await.expect_status(201);
    for question in ["tea", "which%20tea", "tea%20or%20milk"] {
        ada.get(&format!("/memories/search?session_id=g&q={question}")).await.expect_status(200);
        api.advance(24 * 60 * 60);
    }
    ada.post("/dreams", json!({})).await.expect_error(403);
    let dry = admin.post("/dreams", json!({"dry_run": true})).await.expect_status(200);
    assert_eq!((dry["promoted"].as_array().unwrap().len(), &dry["promoted"][0]["days"]), (1, &json!(3)));
    assert_eq!(texts(&ada.get("/memories").await.expect_status(200)), Vec::<&str>::new());
    let dream = admin.post("/dreams", json!({})).await.expect_status(200);
    assert_eq!(texts(&ada.get("/memories").await.expect_status(200)), ["likes tea"]);
    let listed = admin.get("/dreams").await.expect_status(200);
    assert_eq!(listed["data"][0]["id"], dream["id"]);
    let path = format!("/dreams/{}", dream["id"].as_str().unwrap());
    ada.delete(&path).await.expect_error(403);
    assert_eq!(admin.delete(&path).await.expect_status(200)["undone"], 1);
    admin.delete(&path).await.expect_error(404);
    assert_eq!(texts(&ada.get("/memories").await.expect_status(200)), Vec::<&str>::new());
}

/// The real binary: a fact from one session is recalled in the next, also after a restart, and the command line
/// shows the same.
#[test]
fn memories_over_the_command_line() {
    let dir = tempfile::tempdir().unwrap();
    let yaml = "store: sqlite:t.db\nassistants: [{name: friend, memory: {scope: user}, tools: [memory]}]\ndreams: {every: 1s}\n";
    let tenure = |args: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_tenure"))
            .args(args)
            .current_dir(dir.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let ask = |running: &ServerProcess, session: &str, text: &str| -> Value {
        let body = json!({"model": "friend", "session_id": session, "messages": [{"role": "user", "content": text}]});
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let url = format!("{}/v1/chat/completions", running.url);
            tenure_server::http_client::client()
                .build()
                .unwrap()
                .post(url)
                .json(&body)
                .send()
                .await
                .unwrap()
                .json()
                .await
                .unwrap()
        })
    };
    let running = ServerProcess::start(dir.path(), yaml);
    ask(&running, "one", r#"CALL memory {"action": "remember", "text": "her dog is called Rex"}"#);
    drop(running);
    let running = ServerProcess::start(dir.path(), yaml);
    let answer = ask(&running, "two", "What is my dog called?");
    assert_eq!(answer["session"]["memories"].as_array().map(Vec::len), Some(1), "{answer}");
    drop(running);
    let store = ["--store", "sqlite:t.db"];
    assert!(tenure(&[&store[..], &["memories", "list"]].concat()).contains("her dog is called Rex"));
    let hits: Value =
        serde_json::from_str(&tenure(&[&store[..], &["memories", "search", "which dog?", "--json"]].concat())).unwrap();
    let id = hits["data"][0]["id"].as_str().unwrap().to_owned();
    assert!(tenure(&[&store[..], &["memories", "add", "likes tea"]].concat()).contains("is remembered, for the user"));
    assert!(tenure(&[&store[..], &["memories", "forget", &id]].concat()).contains("is forgotten"));
    assert!(!tenure(&[&store[..], &["memories", "list"]].concat()).contains("Rex"));
    tenure(&[&store[..], &["dream", "--dry-run"]].concat());
    assert_eq!(
        tenure(&[&store[..], &["dream", "--list", "--json"]].concat()).trim(),
        r#"{"object":"list","data":[],"next_cursor":null}"#
    );
}
