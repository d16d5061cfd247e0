//! Messages, checkpoints, rewind, fork and what was discarded.

use crate::support::{InProcessClient, each_field};
use serde_json::{Value, json};
use tenure::{Principal, SessionId};

fn turn(n: usize) -> Value {
    json!([{"role": "user", "content": format!("q{n}")}, {"role": "assistant", "content": format!("a{n}")}])
}

async fn with_turns(n: usize) -> InProcessClient {
    let api = InProcessClient::memory().await;
    api.post("/sessions", json!({"id": "a"})).await.expect_status(201);
    for i in 1..=n {
        api.append_messages("a", turn(i)).await;
    }
    api
}

fn texts(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|m| m["message"]["content"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn messages_keep_their_bytes() {
    let api = InProcessClient::memory().await;
    api.post("/sessions", json!({"id": "a"})).await.expect_status(201);
    let unusual = [
        r#"{"content":"key order","role":"user","x":{"b":1,"a":2}}"#,
        r#"{"role": "user", "content": "spaces",  "n": [1.0, 1e2, 1E400, -0, 12345678901234567890123]}"#,
        r#"{"role":"assistant","content":"\u0000 \ud83d\ude00 \/ é"}"#,
        r#"{"role":"user","content":[{"type":"text","text":"x"},{"type":"later","data":null}],"role2":"user"}"#,
    ];
    let body = format!("{{\"messages\": [{}]}}", unusual.join(" ,\t"));
    api.post("/sessions/a/messages", body).await.expect_status(201);
    let list = format!("[{}]", unusual.join(","));
    for path in ["/sessions/a", "/sessions/a/messages", "/sessions/a/messages?last=4"] {
        let text = api.get(path).await.text;
        for message in unusual {
            assert!(text.contains(&format!(r#""message":{message}}}"#)), "{path}: {message}\n{text}");
        }
    }
    for path in ["/v1/sessions/a", "/sessions/a/export", "/sessions/a/export?format=openai"] {
        let text = api.get(path).await.text;
        assert!(text.contains(&list), "{path}: {text}");
    }
    assert_eq!(api.get("/sessions/a/export?format=jsonl").await.text, unusual.map(|m| format!("{m}\n")).concat());
}

#[tokio::test]
async fn messages_are_listed_from_either_end() {
    let api = with_turns(15).await;
    let first = api.get("/sessions/a/messages").await;
    assert_eq!(first.etag(), "\"46\"");
    let first = first.expect_status(200);
    assert_eq!((first["data"].as_array().unwrap().len(), &first["next_cursor"]), (20, &json!("19")));
    assert_eq!(each_field(&first, "position")[..3], ["0", "1", "2"]);
    for name in ["after", "cursor"] {
        let rest = api.get(&format!("/sessions/a/messages?{name}=19&limit=100")).await.expect_status(200);
        assert_eq!((each_field(&rest, "position")[0].as_str(), each_field(&rest, "position").len()), ("20", 10));
        assert_eq!(rest["next_cursor"], Value::Null);
    }
    let last = api.get("/sessions/a/messages?last=3").await;
    assert_eq!(last.etag(), "\"46\"");
    let last = last.expect_status(200);
    assert_eq!(each_field(&last, "position"), ["27", "28", "29"]);
    assert_eq!(texts(&last["data"]), ["a14", "q15", "a15"]);
    assert_eq!(each_field(&api.get("/sessions/a/messages?last=100").await.expect_status(200), "position").len(), 30);
    assert_eq!(api.get("/sessions/a/messages?after=29").await.expect_status(200)["data"], json!([]));
    assert_eq!(api.get("/sessions/a/messages?after=4294967295").await.expect_status(200)["data"], json!([]));
    for (query, param) in [
        ("last=101", "last"),
        ("last=0", "last"),
        ("limit=101", "limit"),
        ("after=x", "after"),
        ("after=-1", "after"),
        ("after=1&cursor=1", "cursor"),
        ("last=1&limit=1", "last"),
        ("last=1&after=1", "last"),
        ("first=1", "first"),
    ] {
        assert_eq!(api.get(&format!("/sessions/a/messages?{query}")).await.expect_error(400).1, param, "{query}");
    }
    // After a rewind, positions continue from there, at either end.
    api.post("/sessions/a/rewind", json!({"turn": 1})).await.expect_status(200);
    api.append_messages("a", turn(99)).await;
    let last = api.get("/sessions/a/messages?last=3").await.expect_status(200);
    assert_eq!(
        (each_field(&last, "position"), texts(&last["data"])),
        (vec!["1".to_owned(), "2".into(), "3".into()], vec!["a1", "q99", "a99"])
    );
    assert_eq!(api.get("/sessions/a/messages?after=0").await.expect_status(200)["data"], last["data"]);
}

#[tokio::test]
async fn pictures_come_back_wherever_messages_do() {
    let api = InProcessClient::memory().await;
    api.post("/sessions", json!({"id": "a"})).await.expect_status(201);
    let data = "iVBORw0KGgoA".repeat(300);
    let message = format!(
        r#"{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{data}"}}}}]}}"#
    );
    api.post("/sessions/a/messages", format!(r#"{{"messages":[{message}]}}"#)).await.expect_status(201);
    api.post("/sessions/a/checkpoints", json!({"label": "here"})).await.expect_status(201);
    for path in [
        "",
        "/messages",
        "/messages?last=1",
        "/messages?limit=1",
        "/checkpoints/here",
        "/export",
        "/export?format=openai",
        "/export?format=jsonl",
    ] {
        assert!(api.get(&format!("/sessions/a{path}")).await.text.contains(&message), "{path}");
    }
    let v1 = api.get("/v1/sessions/a").await.expect_status(200);
    assert_eq!(v1["images"], json!([data]));
    api.post("/sessions/a/rewind", json!({"position": 0})).await.expect_status(200);
    assert!(api.get("/sessions/a/discarded").await.text.contains(&message));
}

#[tokio::test]
async fn a_repeated_request_is_executed_once() {
    let api = with_turns(0).await;
    let body = json!({"messages": turn(1)});
    let once = api.with("idempotency-key", "k1");
    let first = once.post("/sessions/a/messages", &body).await;
    let again = once.post("/sessions/a/messages", &body).await;
    assert_eq!((first.etag(), &first.text), (again.etag(), &again.text));
    assert_eq!(again.expect_status(201), json!({"seq": 4, "position": 0, "message_count": 2}));
    let other = json!({"messages": turn(2)});
    assert_eq!(once.post("/sessions/a/messages", &other).await.expect_error(422).0, "idempotency_key_reused");
    assert_eq!(api.get("/sessions/a").await.expect_status(200)["message_count"], 2);
    api.with("idempotency-key", "k2").post("/sessions/a/messages", &other).await.expect_status(201);
    let long = "x".repeat(257);
    for key in ["", &long] {
        let answer = api.with("idempotency-key", key).post("/sessions/a/messages", &other).await;
        assert_eq!(answer.expect_error(400).1, "Idempotency-Key", "{key}");
    }
    assert_eq!(api.get("/sessions/a").await.expect_status(200)["message_count"], 4);
}

#[tokio::test]
async fn invalid_messages_are_refused() {
    let api = with_turns(1).await;
    let before = api.get("/sessions/a").await.text;
    for (body, param) in [
        (r#"{"messages": []}"#, "messages"),
        (r#"{"messages": {}}"#, "messages"),
        (r#"{"message": []}"#, "message"),
        ("{}", "body"),
        (r#"[[{"role": "user", "content": "x"}]]"#, "body"),
        (r#"{"messages": [{"role": "user", "content": "x"}, 7]}"#, "messages[1]"),
        (r#"{"messages": [{"role": "user", "content": "x"}, {"role": "king", "content": "x"}]}"#, "messages[1].role"),
        (r#"{"messages": [{"role": "user"}]}"#, "messages[0].content"),
        (r#"{"messages": [{"role": "tool", "content": "x"}]}"#, "messages[0].tool_call_id"),
        (r#"{"messages": [{"role": "user", "content": "x"}"#, "messages"),
        (r#"{"messages": [{"role": "user", "content": "x"}]} more"#, "body"),
    ] {
        let answer = api.post("/sessions/a/messages", body).await;
        let text = answer.text.clone();
        assert_eq!(answer.expect_error(400).1, param, "{body}: {text}");
    }
    let deep =
        format!(r#"{{"messages":[{{"role":"user","content":"x","y":{}{}}}]}}"#, "[".repeat(150), "]".repeat(150));
    assert_eq!(api.post("/sessions/a/messages", deep).await.status, 400);
    assert_eq!(
        api.post("/sessions/none/messages", json!({"messages": turn(1)})).await.expect_error(404).0,
        "not_found"
    );
    assert_eq!(api.get("/sessions/a").await.text, before);
}

#[tokio::test]
async fn checkpoints_are_set_listed_and_read() {
    let api = with_turns(2).await;
    let created = api.post("/sessions/a/checkpoints", json!({"label": "half way/1"})).await;
    assert_eq!(created.etag(), "\"8\"");
    let created = created.expect_status(201);
    assert_eq!(
        (&created["label"], &created["position"], &created["auto"]),
        (&json!("half way/1"), &json!(4), &json!(false))
    );
    assert_eq!(api.post("/sessions/a/checkpoints", json!({})).await.expect_status(201)["auto"], true);
    api.append_messages("a", turn(3)).await;
    let all = api.get("/sessions/a/checkpoints").await.expect_status(200);
    assert_eq!(each_field(&all, "label"), ["turn-1", "turn-2", "half way/1", "auto-9", "turn-3"]);

    let half = api.get("/sessions/a/checkpoints/half%20way%2F1").await.expect_status(200);
    assert_eq!((texts(&half["messages"]), &half["seq"]), (vec!["q1", "a1", "q2", "a2"], &json!(8)));
    let by_position = api.get("/sessions/a/checkpoints/2").await.expect_status(200);
    assert_eq!((&by_position["label"], texts(&by_position["messages"])), (&json!("turn-1"), vec!["q1", "a1"]));
    assert_eq!(api.get("/sessions/a/checkpoints/4").await.expect_status(200)["label"], "auto-9");
    for position in ["1", "none", "99999999999999999999999"] {
        assert_eq!(
            api.get(&format!("/sessions/a/checkpoints/{position}")).await.expect_error(404).0,
            "no_such_point",
            "{position}"
        );
    }
    for label in [json!("12"), json!(""), json!("a\n"), json!(7), json!("x".repeat(129))] {
        assert_eq!(api.post("/sessions/a/checkpoints", json!({"label": label})).await.expect_error(400).1, "label");
    }
}

#[tokio::test]
async fn a_session_is_rewound_and_forked() {
    let api = with_turns(3).await;
    let back = api.post("/sessions/a/rewind", json!({"turn": 1})).await;
    assert_eq!(back.etag(), "\"11\"");
    assert_eq!(back.expect_status(200), json!({"seq": 11, "position": 2, "discarded": 4}));
    api.append_messages("a", turn(4)).await;
    let discarded = api.get("/sessions/a/discarded").await.expect_status(200);
    assert_eq!((&discarded["data"][0]["seq"], &discarded["data"][0]["position"]), (&json!(11), &json!(2)));
    assert_eq!(texts(&discarded["data"][0]["messages"]), ["q2", "a2", "q3", "a3"]);
    assert_eq!(discarded["data"][0]["messages"][3]["position"], 5);
    let full = api.get("/sessions/a?include=discarded,cache").await.expect_status(200);
    assert_eq!((&full["discarded"], &full["cache"]), (&discarded["data"], &json!([])));

    let principal = Principal::tenant_wide("default").unwrap();
    let id = SessionId::new("a").unwrap();
    api.app.tenure.cache_put(&principal, &id, "search", &json!({"q": 1}), &json!("found")).await.unwrap();
    let cached = &api.get("/sessions/a?include=cache").await.expect_status(200)["cache"][0];
    assert_eq!(
        (&cached["tool"], &cached["parameters"], &cached["result"]),
        (&json!("search"), &json!({"q": 1}), &json!("found"))
    );

    for (body, id, count) in [
        (json!({"id": "f1"}), "f1", 4),
        (json!({"session_id": "f2", "turn": 1}), "f2", 2),
        (json!({"id": "f3", "label": "turn-1"}), "f3", 2),
        (json!({"id": "f4", "position": 3}), "f4", 3),
        (json!({"id": "f5", "turn": 0}), "f5", 0),
    ] {
        let fork = api.post("/sessions/a/fork", body).await;
        assert_eq!(fork.headers["location"], format!("/sessions/{id}"));
        let fork = fork.expect_status(201);
        assert_eq!(
            (&fork["id"], &fork["message_count"], &fork["parent"]["session_id"]),
            (&json!(id), &json!(count), &json!("a"))
        );
        assert_eq!(fork["parent"]["position"], count);
    }
    let parent = api.get("/sessions/a").await.text;
    api.append_messages("f2", turn(9)).await;
    assert_eq!(texts(&api.get("/sessions/f2").await.expect_status(200)["messages"]), ["q1", "a1", "q9", "a9"]);
    assert_eq!(api.get("/sessions/a").await.text, parent);
    assert_eq!(api.post("/sessions/a/fork", "{}").await.expect_status(201)["message_count"], 4);
    assert_eq!(api.post("/sessions/a/fork", json!({"id": "f1"})).await.expect_error(409).0, "exists");
    let two = api.post("/v1/sessions/a/fork", json!({"session_id": "v", "turns": 1})).await.expect_status(201);
    assert_eq!((&two["session_id"], &two["message_count"]), (&json!("v"), &json!(2)));

    for (path, body, status, word) in [
        ("rewind", json!({}), 400, "body"),
        ("rewind", json!({"turn": 1, "position": 2}), 400, "body"),
        ("rewind", json!({"turn": -1}), 400, "turn"),
        ("rewind", json!({"end": true}), 400, "end"),
        ("rewind", json!({"id": "x", "turn": 1}), 400, "id"),
        ("fork", json!({"turn": 1, "label": "x"}), 400, "body"),
        ("rewind", json!({"turn": 99}), 404, ""),
        ("rewind", json!({"position": 99}), 404, ""),
        ("rewind", json!({"label": "no"}), 404, ""),
        ("fork", json!({"label": "no"}), 404, ""),
        ("fork", json!({"id": "a\nb"}), 400, "session_id"),
    ] {
        let answer = api.post(&format!("/sessions/a/{path}"), &body).await;
        let text = answer.text.clone();
        assert_eq!(answer.expect_error(status).1, word, "{path} {body}: {text}");
    }
    assert_eq!(api.get("/sessions/a").await.text, parent);
}
