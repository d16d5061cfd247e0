//! Full-text search: `GET /search`.

use crate::door::{Door, each};
use serde_json::{Value, json};
use tenure_server::auth::Right;

/// Creates three sessions, a second apart.
async fn furnish(door: &Door) {
    for (id, word) in [("a", "Dover"), ("b", "Calais"), ("c", "Dover")] {
        door.post("/sessions", json!({"id": id, "title": format!("To {word}"), "tags": [word]})).await.is(201);
        let asked = format!("When does the FERRY to {word} leave? <b>soon</b>");
        let call = json!({"id": "c1", "type": "function", "function": {"name": "ferries", "arguments": format!("{{\"to\":\"{word}\"}}")}});
        door.say(
            id,
            json!([
                {"role": "user", "content": [{"type": "text", "text": asked}]},
                {"role": "assistant", "content": null, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "at 8"},
                {"role": "assistant", "content": "At eight."},
            ]),
        )
        .await;
        door.later(1);
    }
}

#[tokio::test]
async fn what_was_said_is_found_newest_first() {
    let door = Door::memory().await;
    furnish(&door).await;
    let found = door.get("/search?q=dover+ferry").await.is(200);
    assert_eq!(each(&found, "session_id"), ["c", "a"]);
    assert_eq!((&found["next_cursor"], &found["looked_at"], &found["damaged"]), (&Value::Null, &json!(3), &json!([])));
    let first = &found["data"][0];
    assert_eq!(first["snippet"], "When does the FERRY to Dover leave? <b>soon</b>");
    assert_eq!(first["highlights"], json!([[14, 19], [23, 28]]));
    assert_eq!((&first["position"], &first["role"], &first["title"]), (&json!(0), &json!("user"), &json!("To Dover")));
    let there = door.get("/sessions/c/messages").await.is(200);
    assert_eq!((&first["seq"], &first["created_at"]), (&there["data"][0]["seq"], &there["data"][0]["created_at"]));
    // Tool calls and titles are searched too.
    let found = door.get("/search?q=calais").await.is(200);
    assert_eq!(each(&found, "position"), ["null", "1", "0"]);
    assert_eq!(found["data"][0]["snippet"], "To Calais");
    let found = door.get("/search?q=calais&role=user").await.is(200);
    assert_eq!(each(&found, "position"), ["0"]);
    // Sessions are filtered as in a list.
    assert_eq!(each(&door.get("/search?q=ferry&tag=Calais").await.is(200), "session_id"), ["b"]);
    door.delete("/sessions/b").await.is(200);
    assert_eq!(door.get("/search?q=ferry&tag=Calais").await.is(200)["looked_at"], 0);
    assert_eq!(each(&door.get("/search?q=ferry&status=deleted").await.is(200), "session_id"), ["b"]);
}

#[tokio::test]
async fn pages_go_on_where_they_ended() {
    let door = Door::memory().await;
    furnish(&door).await;
    let whole = door.get("/search?q=dover").await.is(200);
    let (mut cursor, mut found) = (String::new(), Vec::new());
    loop {
        let page = door.get(&format!("/search?q=dover&limit=1{cursor}")).await.is(200);
        found.extend(page["data"].as_array().unwrap().clone());
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
        assert!(found.len() < 100);
    }
    assert_eq!(json!(found), whole["data"]);
    assert_eq!(found.len(), 6);
}

#[tokio::test]
async fn wrong_questions_are_named() {
    let door = Door::memory().await;
    for (query, param) in [
        ("", "q"),
        ("?q=", "q"),
        ("?q=%22%22", "q"),
        ("?q=a&q=b", "q"),
        ("?q=a&limit=0", "limit"),
        ("?q=a&limit=101", "limit"),
        ("?q=a&cursor=x", "cursor"),
        ("?q=a&cursor=1~a~1", "cursor"),
        ("?q=a&offset=1", "offset"),
        ("?q=a&role=nobody", "role"),
        ("?q=a&words=b", "words"),
        (&format!("?q={}", "a+".repeat(65)), "q"),
        (&format!("?q={}", "a".repeat(2000)), "q"),
    ] {
        let wrong = door.get(&format!("/search{query}")).await.wrong(400);
        assert_eq!(wrong, ("invalid".to_owned(), param.to_owned()), "{query}");
    }
}

#[tokio::test]
async fn whose_it_is() {
    let door = Door::memory().await;
    let ada = door.key("acme", Some("ada"), &[Right::Read, Right::Write]).await;
    let eve = door.key("acme", Some("eve"), &[Right::Read, Right::Write]).await;
    let admin = door.key("acme", None, &[Right::Admin]).await;
    let writes = door.key("acme", None, &[Right::Write]).await;
    for (door, id) in [(&ada, "hers"), (&eve, "theirs")] {
        door.post("/sessions", json!({"id": id})).await.is(201);
        door.say(id, json!([{"role": "user", "content": "the ferry"}])).await;
        door.later(1);
    }
    assert_eq!(each(&ada.get("/search?q=ferry").await.is(200), "session_id"), ["hers"]);
    assert_eq!(each(&admin.get("/search?q=ferry").await.is(200), "session_id"), ["theirs", "hers"]);
    assert_eq!(each(&admin.get("/search?q=ferry&user=ada").await.is(200), "user"), ["ada"]);
    assert_eq!(ada.get("/search?q=ferry&user=eve").await.wrong(403).0, "forbidden");
    assert_eq!(writes.get("/search?q=ferry").await.wrong(403).0, "forbidden");
    assert_eq!(door.get("/search?q=ferry").await.wrong(401).0, "unauthorized");
}

#[tokio::test]
async fn what_is_redacted_is_neither_found_nor_shown() {
    let rules = json!([{"name": "email", "pattern": "\\S+@\\S+\\w"}]);
    let door = Door::set_up("memory:", |config| config.redaction = serde_json::from_value(rules).unwrap()).await;
    door.post("/sessions", json!({"id": "a"})).await.is(201);
    door.say("a", json!([{"role": "user", "content": "write to ann@example.com, please"}])).await;
    assert_eq!(door.get("/search?q=example").await.is(200)["data"], json!([]));
    let found = door.get("/search?q=please").await.is(200);
    assert_eq!(found["data"][0]["snippet"], "write to [redacted: email], please");
    // A client gets back exactly what it sent.
    let back = door.get("/sessions/a/messages").await.is(200);
    assert_eq!(back["data"][0]["message"]["content"], "write to ann@example.com, please");
}
