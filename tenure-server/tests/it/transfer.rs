//! Exports, imports, and sessions written by other programs.

use crate::audit::seed;
use crate::support::{InProcessClient, each_field};
use serde_json::{Value, json};

const TAGGED: &str = include_str!("../../../tenure/tests/fixtures/foreign/20_mistralrs_tagged.json");

/// Chats in a session with the built-in model, which answers with the number of messages it sees.
async fn ask(api: &InProcessClient, id: &str, text: &str) -> String {
    let body = json!({"session_id": id, "model": "rehearsal", "messages": [{"role": "user", "content": text}]});
    let answer = api.post("/v1/chat/completions", body).await.expect_status(200);
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn an_imported_session_continues_unchanged() {
    let (source, target) = (InProcessClient::memory().await, InProcessClient::memory().await);
    let data = "iVBORw0KGgoA".repeat(300);
    source
        .post("/sessions", json!({"id": "a", "title": "T", "tags": ["x"], "metadata": {"k": 1.50}}))
        .await
        .expect_status(201);
    let picture = json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{data}")}}, {"type": "text", "text": "look"}]});
    source.append_messages(
        "a",
        json!([{"role": "system", "content": "Be brief."}, picture, {"role": "assistant", "content": "A picture."}]),
    )
    .await;
    ask(&source, "a", "and now?").await;
    source.post("/sessions/a/checkpoints", json!({"label": "here"})).await.expect_status(201);

    let export = source.get("/v1/sessions/a").await;
    assert!(export.headers.contains_key("etag"));
    assert_eq!(export.json()["images"], json!([data]));
    // The answer of the last turn is included.
    assert_eq!(export.json()["messages"].as_array().unwrap().len(), 5);
    let put = target.put("/v1/sessions/a", &export.text).await.expect_status(200);
    assert_eq!((&put["session_id"], &put["message_count"], &put["left_out"]), (&json!("a"), &json!(5), &json!([])));
    let mut original = export.json();
    let mut imported = target.get("/v1/sessions/a").await.json();
    for export in [&mut original, &mut imported] {
        for time in ["created_at", "updated_at"] {
            export.as_object_mut().unwrap().remove(time);
        }
        for checkpoint in export["checkpoints"].as_array_mut().unwrap() {
            checkpoint.as_object_mut().unwrap().remove("created_at");
        }
    }
    assert_eq!(original, imported);
    assert_eq!(ask(&source, "a", "go on").await, ask(&target, "a", "go on").await);
    // The whole history without the image continues both sessions, too.
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "look"}, {"role": "assistant", "content": "A picture."}]);
    let mut answers = Vec::new();
    for api in [&source, &target] {
        let mut list = messages.as_array().unwrap().clone();
        list.push(json!({"role": "user", "content": "an edit"}));
        let body = json!({"session_id": "a", "model": "rehearsal", "messages": list});
        let mut answer = api.post("/v1/chat/completions", body).await.expect_status(200);
        answers.push((answer["choices"].take(), answer["session"].take()));
    }
    assert_eq!(answers[0], answers[1]);
    assert!(target.get("/sessions/a").await.text.contains(&data));

    // Each format that carries all messages can be imported again.
    for format in ["tenure", "openai", "mistralrs", "jsonl"] {
        let text = source.get(&format!("/sessions/a/export?format={format}")).await.text;
        let kind = if format == "jsonl" { "application/jsonl" } else { "application/json" };
        let answer = target.send("PUT", &format!("/v1/sessions/{format}"), Some(kind), text).await;
        answer.expect_status(200);
        let list = |v: Value| v["messages"].clone();
        assert_eq!(
            list(target.get(&format!("/v1/sessions/{format}")).await.json()),
            list(source.get("/v1/sessions/a").await.json()),
            "{format}"
        );
    }
    assert_eq!(source.get("/sessions/a/export?format=xml").await.expect_error(400).1, "format");
    assert_eq!(source.get("/sessions/a/export?frmat=jsonl").await.expect_error(400).1, "frmat");
    assert_eq!(source.get("/sessions/b/export").await.expect_error(404).0, "not_found");
}

#[tokio::test]
async fn put_imports_and_replaces() {
    let api = InProcessClient::memory().await;
    let put = api.put("/v1/sessions/m", TAGGED).await.expect_status(200);
    assert_eq!(put["message_count"], 7);
    assert_eq!(put["left_out"][0]["place"], "videos[0]");
    let list = api.get("/v1/sessions/m").await.expect_status(200);
    assert_eq!(list["messages"][3]["tool_call_id"], "call-1");
    assert_eq!(list["images"].as_array().unwrap().len(), 4);
    // A list of messages alone, or in an object.
    api.put("/v1/sessions/m", r#"[{"role":"user","content":"one"}]"#).await.expect_status(200);
    let want = json!([{"role": "user", "content": "one"}]);
    assert_eq!(api.get("/v1/sessions/m").await.json()["messages"], want);
    api.put("/v1/sessions/m", r#"{"messages":[{"role":"user","content":"two"}]}"#).await.expect_status(200);
    assert_eq!(api.get("/v1/sessions/m").await.json()["messages"][0]["content"], "two");
    // Replaced messages are rewound, not destroyed (D-093).
    assert_eq!(api.get("/sessions/m/discarded").await.expect_status(200)["data"].as_array().unwrap().len(), 2);

    let before = api.get("/sessions/m").await.text;
    for (body, param) in [
        ("", "body"),
        ("7", "body"),
        ("{}", "body"),
        ("[]", "messages"),
        (r#"{"messages": []}"#, "messages"),
        (r#"{"messages": [], "images": [], "videos": []}"#, "messages"),
        ("\"text\"", "body"),
        ("{\"messages\": 7}", "messages"),
        (r#"{"messages": [{"role": "user", "content": "x"}, {"role": "king", "content": "x"}]}"#, "messages[1].role"),
        (r#"{"messages": [{"role": {"Left": "user"}, "content": {"Middle": "x"}}]}"#, "messages[0].content"),
        (r#"{"tenure": 1, "messages": [], "tags": 7}"#, "tags"),
        (
            r#"{"tenure": 1, "messages": [{"role": "user", "content": "x"}], "checkpoints": [{"label": "x", "position": 4}]}"#,
            "checkpoints[0].position",
        ),
        (
            r#"{"messages": [{"role": {"Left": "user"}, "content": {"Right": [{"type": "image"}]}}], "images": ["?"]}"#,
            "images[0]",
        ),
    ] {
        let answer = api.put("/v1/sessions/m", body).await;
        let text = answer.text.clone();
        assert_eq!(answer.expect_error(400).1, param, "{body}: {text}");
    }
    assert_eq!(
        api.put("/v1/sessions/m", r#"{"tenure": 99, "messages": []}"#).await.expect_error(400).0,
        "newer_format"
    );
    assert_eq!(
        api.send("PUT", "/v1/sessions/m", Some("text/plain"), "[]").await.expect_error(415).0,
        "unsupported_media_type"
    );
    let bytes = api.send("PUT", "/v1/sessions/m", Some("application/json"), vec![b'"', 0xff, b'"']).await;
    assert_eq!(bytes.expect_error(400).1, "body");
    assert_eq!(api.get("/sessions/m").await.text, before);

    assert_eq!(api.delete("/v1/sessions/m").await.expect_status(200), json!({"session_id": "m", "deleted": true}));
    assert_eq!(api.delete("/v1/sessions/m").await.expect_status(200), json!({"session_id": "m", "deleted": false}));
    assert_eq!(api.delete("/v1/sessions/never").await.expect_status(200)["deleted"], false);
    assert_eq!(api.get("/v1/sessions/m").await.expect_error(404).0, "not_found");
    // The id of a deleted session is reserved until it is purged (D-019).
    let three = r#"[{"role":"user","content":"three"}]"#;
    assert_eq!(api.put("/v1/sessions/m", three).await.expect_error(410).0, "gone");
    api.delete("/sessions/m?purge=true").await.expect_status(200);
    api.put("/v1/sessions/m", three).await.expect_status(200);
    assert_eq!(api.get("/v1/sessions/m").await.json()["messages"][0]["content"], "three");
    assert_eq!(each_field(&api.get("/v1/sessions").await.expect_status(200), "id"), ["m"]);
}

#[tokio::test]
async fn sessions_are_imported_under_ids_that_are_free() {
    let api = InProcessClient::memory().await;
    let body = json!({"id": "mine", "messages": [{"role": "user", "content": "x"}], "colour": "red"});
    let imported = api.post("/sessions/import", &body).await.expect_status(201);
    assert_eq!(
        (&imported["sessions"][0]["id"], &imported["sessions"][0]["message_count"]),
        (&json!("mine"), &json!(1))
    );
    assert_eq!(imported["left_out"][0]["place"], "colour");
    assert_eq!(imported["left_out"][0]["session_id"], "mine");
    assert_eq!(api.post("/sessions/import", &body).await.expect_error(409).0, "exists");
    assert_eq!(api.post("/sessions/import?id=other", &body).await.expect_status(201)["sessions"][0]["id"], "other");

    // An export keeps its own id if that is free, and gets a new one if not.
    let export = api.get("/sessions/mine/export").await.text;
    let copy = api.post("/sessions/import", &export).await.expect_status(201);
    assert_ne!(copy["sessions"][0]["id"], "mine");
    let copy = copy["sessions"][0]["id"].as_str().unwrap();
    for id in ["mine", copy] {
        api.delete(&format!("/sessions/{id}?purge=true")).await.expect_status(200);
    }
    assert_eq!(api.post("/sessions/import", &export).await.expect_status(201)["sessions"][0]["id"], "mine");

    // Several sessions, as JSON lines.
    let lines = "{\"session_id\":\"l1\",\"messages\":[{\"role\":\"user\",\"content\":\"1\"}]}\n{\"session_id\":\"l2\",\"messages\":[{\"role\":\"user\",\"content\":\"2\"}]}\n";
    let many = api.send("POST", "/sessions/import", Some("application/x-ndjson"), lines).await.expect_status(201);
    assert_eq!(
        many["sessions"].as_array().unwrap().iter().map(|s| s["id"].as_str().unwrap()).collect::<Vec<_>>(),
        ["l1", "l2"]
    );
    let count = each_field(&api.get("/sessions?limit=100").await.expect_status(200), "id").len();
    // If one is invalid, none is imported.
    let bad = lines
        .replace("l1", "m1")
        .replace("l2", "m2")
        .replace("\"role\":\"user\",\"content\":\"2\"", "\"role\":\"king\"");
    let answer = api.send("POST", "/sessions/import", Some("application/jsonl"), bad).await;
    assert!(answer.text.contains("line 2"), "{}", answer.text);
    assert_eq!(answer.expect_error(400).0, "invalid");
    let long = lines.replace("l1", "m1").replace("l2", "m2").replace(
        "\"messages\":[{\"role\":\"user\",\"content\":\"2\"}]",
        "\"tenure\":1,\"messages\":[],\"checkpoints\":[{\"label\":\"x\",\"position\":9}]",
    );
    assert_eq!(
        api.send("POST", "/sessions/import", Some("application/jsonl"), long).await.expect_error(400).0,
        "invalid"
    );
    assert_eq!(
        api.send("POST", "/sessions/import?id=x", Some("application/jsonl"), lines).await.expect_error(400).1,
        "id"
    );
    for (path, body, param) in [
        ("/sessions/import", r#"{"id": " x", "messages": []}"#, "id"),
        ("/sessions/import", r#"{"id": 7, "messages": []}"#, "id"),
        ("/sessions/import?id=%20x", "[]", "id"),
        ("/sessions/import?format=xml", "[]", "format"),
        ("/sessions/import?from=x", "[]", "from"),
        ("/sessions/import", "", "body"),
        ("/sessions/import", "{}", "body"),
        ("/sessions/import", "nonsense", "body"),
    ] {
        let answer = api.post(path, body).await;
        let text = answer.text.clone();
        assert_eq!(answer.expect_error(400).1, param, "{path} {body}: {text}");
    }
    assert_eq!(each_field(&api.get("/sessions?limit=100").await.expect_status(200), "id").len(), count);
}

/// Times, reviews and decisions are imported with a session, and a second import of the same export is reported.
#[tokio::test]
async fn an_export_contains_the_log() {
    let (source, target) = (InProcessClient::memory().await, InProcessClient::memory().await);
    seed(&source, "default", "s", 2, |_| ()).await;
    let export = source.get("/sessions/s/export").await;
    assert!(!export.headers.contains_key("x-tenure-left-out"));
    assert_eq!(export.json()["tenure"], 2);
    target.advance(3600);
    let imported =
        target.with("x-tenure-user", "bob").post("/sessions/import?id=t", &export.text).await.expect_status(201);
    assert_eq!(
        (&imported["sessions"][0]["user"], &imported["left_out"], &imported["duplicate_of"]),
        (&json!("bob"), &json!([]), &json!([]))
    );
    let (original, copy) =
        (source.get("/sessions/s").await.expect_status(200), target.get("/sessions/t").await.expect_status(200));
    for field in ["messages", "checkpoints", "runs", "metadata", "updated_at", "active_at", "seq"] {
        assert_eq!(original[field], copy[field], "{field}");
    }
    let (original, copy) = (
        source.get("/sessions/s/audit").await.expect_status(200),
        target.get("/sessions/t/audit").await.expect_status(200),
    );
    assert_eq!(copy["verified"], true);
    for (a, b) in original["decisions"].as_array().unwrap().iter().zip(copy["decisions"].as_array().unwrap()) {
        assert_eq!((&a["hash"], &a["timestamp"], &a["imported"]), (&b["hash"], &b["timestamp"], &json!(false)));
        assert_eq!((&b["imported"], &b["session_id"]), (&json!(true), &json!("t")));
        target.get(&format!("/reviews/{}", b["review_id"].as_str().unwrap())).await.expect_status(200);
    }
    // A second import is reported and changes nothing, unless it names an id. Another user may import it, too.
    let before = target.get("/sessions").await.text;
    let again = target.with("x-tenure-user", "bob").post("/sessions/import", &export.text).await.expect_status(200);
    assert_eq!((&again["duplicate_of"], &again["sessions"]), (&json!(["t"]), &json!([])));
    assert_eq!(target.get("/sessions").await.text, before);
    let other = target.post("/sessions/import", &export.text).await.expect_status(201);
    assert_eq!((&other["duplicate_of"], &other["sessions"][0]["id"]), (&json!([]), &json!("s")));
    let copy = target.post("/sessions/import?id=copy", &export.text).await.expect_status(201);
    assert_eq!((&copy["duplicate_of"], &copy["sessions"][0]["id"]), (&json!(["s"]), &json!("copy")));
    assert_eq!(target.post("/sessions/import?id=t", &export.text).await.expect_error(409).0, "exists");
    // A session that exists keeps its own log.
    let put = target.put("/v1/sessions/t", &export.text).await.expect_status(200);
    assert_eq!(put["left_out"][0]["place"], "log");
    assert_eq!(target.put("/v1/sessions/new", &export.text).await.expect_status(200)["left_out"], json!([]));
    // An error names the path of the invalid value.
    let wrong = export.text.replacen(r#""seq":3,"#, r#""seq":9,"#, 1);
    assert_eq!(target.post("/sessions/import", &wrong).await.expect_error(400).1, "log[2].seq");
    let forged = export.text.replacen(r#""reviewer":"user_789""#, r#""reviewer":"cfo""#, 1);
    assert_eq!(target.post("/sessions/import", &forged).await.expect_error(400).1, "metadata.hitl_decisions");
}

/// A format reports what it cannot represent, and a model that is not configured here is left out.
#[tokio::test]
async fn skipped_parts_are_reported() {
    let source = InProcessClient::memory().await;
    source.post("/sessions", json!({"id": "s", "model": "their-model", "metadata": {"k": 1}})).await.expect_status(201);
    source.append_messages("s", json!([{"role": "user", "content": "x"}])).await;
    let messages = "info,timestamps,runs,reviews,checkpoints,discarded";
    let v1 = "timestamps,runs,reviews,discarded";
    for (path, list) in [
        ("/sessions/s/export?format=openai", Some(messages)),
        ("/sessions/s/export?format=jsonl", Some(messages)),
        ("/sessions/s/export?format=mistralrs", Some(messages)),
        ("/v1/sessions/s", Some(v1)),
        ("/sessions/s/export?format=tenure", None),
        ("/sessions/s/export", None),
    ] {
        let answer = source.get(path).await;
        assert_eq!(answer.headers.get("x-tenure-left-out").map(|h| h.to_str().unwrap()), list, "{path}");
    }
    let export = source.get("/sessions/s/export").await.text;
    let model =
        |name: &str| serde_json::from_value(json!({"name": name, "base_url": "http://127.0.0.1:9/v1"})).unwrap();
    let target = InProcessClient::with_config("memory:", |c| c.models = vec![model("one"), model("two")]).await;
    let imported = target.post("/sessions/import", &export).await.expect_status(201);
    assert_eq!((&imported["sessions"][0]["model"], &imported["left_out"][0]["place"]), (&Value::Null, &json!("model")));
    assert_eq!(target.get("/sessions/s").await.expect_status(200)["metadata"], json!({"k": 1}));
    let put = target.put("/v1/sessions/p", &export).await.expect_status(200);
    assert_eq!(put["left_out"][0]["place"], "model");
    assert_eq!(target.get("/sessions/p").await.expect_status(200)["model"], Value::Null);
    let known = export.replace("their-model", "two");
    let imported = target.post("/sessions/import?id=k", &known).await.expect_status(201);
    assert_eq!((&imported["sessions"][0]["model"], &imported["left_out"]), (&json!("two"), &json!([])));
}

/// The export for mistral.rs has its tagged form, and can be imported again with the same messages.
#[tokio::test]
async fn an_export_for_mistralrs_is_tagged() {
    let api = InProcessClient::memory().await;
    let data = "iVBORw0KGgoA";
    let call = json!({"id": "c1", "type": "function", "function": {"name": "plot", "arguments": r#"{"n": 1.50}"#}});
    let image = json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{data}")}});
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image, {"type": "text", "text": "look"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done", "name": "plot"},
        {"role": "assistant", "content": "A picture."},
    ]);
    api.post("/sessions", json!({"id": "s"})).await.expect_status(201);
    api.append_messages("s", messages.clone()).await;
    let answer = api.get("/sessions/s/export?format=mistralrs").await;
    let text = answer.text.clone();
    let tagged = answer.expect_status(200);
    let call = json!({"id": "c1", "type": "function", "function": {"name": "plot", "arguments": {"n": 1.5}}});
    let want = json!({
        "messages": [
            {"role": {"Left": "system"}, "content": {"Left": "Be brief."}},
            {"role": {"Left": "user"}, "content": {"Right": [{"type": "image"}, {"type": "text", "text": "look"}]}},
            {"role": {"Left": "assistant"}, "content": {"Left": ""}, "tool_calls": {"Right": [call]}},
            {"role": {"Left": "tool"}, "tool_call_id": {"Left": "c1"}, "content": {"Left": "done"}, "name": {"Left": "plot"}},
            {"role": {"Left": "assistant"}, "content": {"Left": "A picture."}},
        ],
        "images": [data],
        "videos": [],
    });
    assert_eq!(tagged, want);
    let put = api.put("/v1/sessions/t", &text).await.expect_status(200);
    assert_eq!(put["left_out"], json!([]));
    assert_eq!(api.get("/v1/sessions/t").await.expect_status(200)["messages"], messages);
    // A field that is neither a text nor a list of objects is left out and reported.
    api.post("/sessions", json!({"id": "n"})).await.expect_status(201);
    api.append_messages("n", json!([{"role": "user", "content": "x", "weight": 7}])).await;
    let answer = api.get("/sessions/n/export?format=mistralrs").await;
    assert!(answer.headers["x-tenure-left-out"].to_str().unwrap().ends_with(",fields"));
    assert_eq!(answer.expect_status(200)["messages"], json!([{"role": {"Left": "user"}, "content": {"Left": "x"}}]));
}

/// Imported messages have their original times, and the session is active although they are old.
#[tokio::test]
async fn an_import_keeps_the_times_of_the_messages() {
    let api = InProcessClient::memory().await;
    let body = json!({
        "created_at": "2025-03-01T10:00:00Z",
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
        "message_times": ["2025-03-01T10:00:05Z", null, "2025-03-02T00:00:00.5Z"],
    });
    let imported = api.post("/sessions/import?id=old", &body).await.expect_status(201);
    let session = &imported["sessions"][0];
    assert!(session["created_at"].as_str().unwrap().starts_with("2025-03-01T10:00:00"), "{session}");
    assert_eq!(session["status"], "active");
    let list = api.get("/sessions/old/messages").await.expect_status(200);
    let times = ["2025-03-01T10:00:05Z", "2025-03-01T10:00:05Z", "2025-03-02T00:00:00.5Z"];
    assert_eq!(each_field(&list, "created_at"), times);
    // Times that are in the future or decrease are limited.
    let wrong = json!({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        "message_times": ["2999-01-01T00:00:00Z", "2025-01-01T00:00:00Z"]});
    api.post("/sessions/import?id=future", &wrong).await.expect_status(201);
    let list = api.get("/sessions/future/messages").await.expect_status(200);
    assert_eq!(each_field(&list, "created_at"), ["2026-01-01T00:00:00Z"; 2]);
    let more = json!({"messages": [], "message_times": ["2025-01-01T00:00:00Z"]});
    assert_eq!(api.post("/sessions/import", &more).await.expect_error(400).1, "message_times");
}
