//! Full-text search: `GET /search`.

use crate::support::{InProcessClient, each_field};
use serde_json::{Value, json};
use tenure_server::auth::Right;

/// Creates three sessions, a second apart.
async fn create_sessions(api: &InProcessClient) {
    for (id, word) in [("a", "Dover"), ("b", "Calais"), ("c", "Dover")] {
        api.post("/sessions", json!({"id": id, "title": format!("To {word}"), "tags": [word]}))
            .await
            .expect_status(201);
        let question = format!("When does the FERRY to {word} leave? <b>soon</b>");
        let call = json!({"id": "c1", "type": "function", "function": {"name": "ferries", "arguments": format!("{{\"to\":\"{word}\"}}")}});
        api.append_messages(
            id,
            json!([
                {"role": "user", "content": [{"type": "text", "text": question}]},
                {"role": "assistant", "content": null, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "at 8"},
                {"role": "assistant", "content": "At eight."},
            ]),
        )
        .await;
        api.advance(1);
    }
}

#[tokio::test]
async fn messages_are_found_newest_first() {
    let api = InProcessClient::memory().await;
    create_sessions(&api).await;
    let page = api.get("/search?q=dover+ferry").await.expect_status(200);
    assert_eq!(each_field(&page, "session_id"), ["c", "a"]);
    assert_eq!((&page["next_cursor"], &page["looked_at"], &page["damaged"]), (&Value::Null, &json!(3), &json!([])));
    let first = &page["data"][0];
    assert_eq!(first["snippet"], "When does the FERRY to Dover leave? <b>soon</b>");
    assert_eq!(first["highlights"], json!([[14, 19], [23, 28]]));
    assert_eq!((&first["position"], &first["role"], &first["title"]), (&json!(0), &json!("user"), &json!("To Dover")));
    let stored = api.get("/sessions/c/messages").await.expect_status(200);
    assert_eq!((&first["seq"], &first["created_at"]), (&stored["data"][0]["seq"], &stored["data"][0]["created_at"]));
    // Tool calls and titles are searched too.
    let page = api.get("/search?q=calais").await.expect_status(200);
    assert_eq!(each_field(&page, "position"), ["null", "1", "0"]);
    assert_eq!(page["data"][0]["snippet"], "To Calais");
    let page = api.get("/search?q=calais&role=user").await.expect_status(200);
    assert_eq!(each_field(&page, "position"), ["0"]);
    // Sessions are filtered as in a list.
    assert_eq!(each_field(&api.get("/search?q=ferry&tag=Calais").await.expect_status(200), "session_id"), ["b"]);
    api.delete("/sessions/b").await.expect_status(200);
    assert_eq!(api.get("/search?q=ferry&tag=Calais").await.expect_status(200)["looked_at"], 0);
    assert_eq!(each_field(&api.get("/search?q=ferry&status=deleted").await.expect_status(200), "session_id"), ["b"]);
}

#[tokio::test]
async fn pages_continue_at_the_cursor() {
    let api = InProcessClient::memory().await;
    create_sessions(&api).await;
    let full = api.get("/search?q=dover").await.expect_status(200);
    let (mut cursor, mut ids) = (String::new(), Vec::new());
    loop {
        let page = api.get(&format!("/search?q=dover&limit=1{cursor}")).await.expect_status(200);
        ids.extend(page["data"].as_array().unwrap().clone());
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
        assert!(ids.len() < 100);
    }
    assert_eq!(json!(ids), full["data"]);
    assert_eq!(ids.len(), 6);
}

#[tokio::test]
async fn the_best_matches_can_come_first() {
    let api = InProcessClient::memory().await;
    let texts = ["the ferry", "a long text in which the ferry is only mentioned, as so much else is", "ferry, ferry"];
    for (id, text) in ["a", "b", "c"].iter().zip(texts) {
        api.post("/sessions", json!({"id": id})).await.expect_status(201);
        api.append_messages(id, json!([{"role": "user", "content": text}])).await;
        api.advance(1);
    }
    let ids = async |query: &str| each_field(&api.get(query).await.expect_status(200), "session_id");
    assert_eq!(ids("/search?q=ferry").await, ["c", "b", "a"]);
    assert_eq!(ids("/search?q=ferry&sort=time").await, ["c", "b", "a"]);
    assert_eq!(ids("/search?q=ferry&sort=relevance").await, ["c", "a", "b"]);
    let first = api.get("/search?q=ferry&sort=relevance&limit=2").await.expect_status(200);
    assert_eq!(
        (each_field(&first, "session_id"), &first["cut"]),
        (vec!["c".to_owned(), "a".to_owned()], &json!(false))
    );
    let next = format!("/search?q=ferry&sort=relevance&limit=2&cursor={}", first["next_cursor"].as_str().unwrap());
    let last = api.get(&next).await.expect_status(200);
    assert_eq!((each_field(&last, "session_id"), &last["next_cursor"]), (vec!["b".to_owned()], &Value::Null));
}

#[tokio::test]
async fn invalid_queries_are_refused() {
    let api = InProcessClient::memory().await;
    for (query, param) in [
        ("", "q"),
        ("?q=", "q"),
        ("?q=%22%22", "q"),
        ("?q=a&q=b", "q"),
        ("?q=a&limit=0", "limit"),
        ("?q=a&limit=101", "limit"),
        ("?q=a&cursor=x", "cursor"),
        ("?q=a&cursor=s~1~a", "cursor"),
        ("?q=a&offset=1", "offset"),
        ("?q=a&role=nobody", "role"),
        ("?q=a&sort=best", "sort"),
        ("?q=a&sort=relevance&cursor=1~a", "cursor"),
        ("?q=a&cursor=r~1", "cursor"),
        ("?q=a&sort=relevance&cursor=r~x", "cursor"),
        ("?q=a&words=b", "words"),
        (&format!("?q={}", "a+".repeat(65)), "q"),
        (&format!("?q={}", "a".repeat(2000)), "q"),
    ] {
        let wrong = api.get(&format!("/search{query}")).await.expect_error(400);
        assert_eq!(wrong, ("invalid".to_owned(), param.to_owned()), "{query}");
    }
}

#[tokio::test]
async fn users_find_only_their_own_messages() {
    let api = InProcessClient::memory().await;
    let ada = api.key("acme", Some("ada"), &[Right::Read, Right::Write]).await;
    let eve = api.key("acme", Some("eve"), &[Right::Read, Right::Write]).await;
    let admin = api.key("acme", None, &[Right::Admin]).await;
    let writes = api.key("acme", None, &[Right::Write]).await;
    for (api, id) in [(&ada, "hers"), (&eve, "theirs")] {
        api.post("/sessions", json!({"id": id})).await.expect_status(201);
        api.append_messages(id, json!([{"role": "user", "content": "the ferry"}])).await;
        api.advance(1);
    }
    assert_eq!(each_field(&ada.get("/search?q=ferry").await.expect_status(200), "session_id"), ["hers"]);
    assert_eq!(each_field(&admin.get("/search?q=ferry").await.expect_status(200), "session_id"), ["theirs", "hers"]);
    assert_eq!(each_field(&admin.get("/search?q=ferry&user=ada").await.expect_status(200), "user"), ["ada"]);
    assert_eq!(ada.get("/search?q=ferry&user=eve").await.expect_error(403).0, "forbidden");
    assert_eq!(writes.get("/search?q=ferry").await.expect_error(403).0, "forbidden");
    assert_eq!(api.get("/search?q=ferry").await.expect_error(401).0, "unauthorized");
}

#[tokio::test]
async fn redacted_text_is_neither_found_nor_shown() {
    let rules = json!([{"name": "email", "pattern": "\\S+@\\S+\\w"}]);
    let api =
        InProcessClient::with_config("memory:", |config| config.redaction = serde_json::from_value(rules).unwrap())
            .await;
    api.post("/sessions", json!({"id": "a"})).await.expect_status(201);
    api.append_messages("a", json!([{"role": "user", "content": "write to ann@example.com, please"}])).await;
    assert_eq!(api.get("/search?q=example").await.expect_status(200)["data"], json!([]));
    let page = api.get("/search?q=please").await.expect_status(200);
    assert_eq!(page["data"][0]["snippet"], "write to [redacted: email], please");
    // A client gets back exactly what it sent.
    let back = api.get("/sessions/a/messages").await.expect_status(200);
    assert_eq!(back["data"][0]["message"]["content"], "write to ann@example.com, please");
}
