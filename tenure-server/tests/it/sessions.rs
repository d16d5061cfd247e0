//! `/sessions`, `/assistants`, `/threads`, `/users`: every route, with valid and invalid requests.

use crate::support::{InProcessClient, each_field};
use serde_json::{Value, json};
use tenure_server::auth::Right;

#[tokio::test]
async fn a_session_is_created_read_updated_and_deleted() {
    let api = InProcessClient::memory().await;
    let body = json!({"id": "a", "assistant_id": "declared", "thread_id": "t", "model": "m", "title": "T", "tags": ["x"], "metadata": {"k": 1}});
    let created = api.post("/sessions", &body).await;
    assert_eq!((created.etag(), created.headers["location"].to_str().unwrap()), ("\"1\"".to_owned(), "/sessions/a"));
    let want = json!({
        "id": "a", "session_id": "a", "object": "session", "status": "active", "user": "default", "assistant_id": "declared",
        "thread_id": "t", "model": "m", "title": "T", "tags": ["x"], "metadata": {"k": 1}, "created_at": "2026-01-01T00:00:00Z",
        "updated_at": "2026-01-01T00:00:00Z", "active_at": "2026-01-01T00:00:00Z", "pause": null, "parent": null, "seq": 1,
        "message_count": 0, "turn_count": 0,
    });
    assert_eq!(created.expect_status(201), want);
    assert_eq!(api.post("/sessions", &body).await.expect_error(409).0, "exists");

    api.advance(1);
    let change =
        json!({"title": null, "tags": ["y", "z"], "metadata": {"k": null, "l": {"m": true}}, "status": "paused"});
    let changed = api.patch("/sessions/a", change).await;
    assert_eq!(changed.etag(), "\"3\"");
    let changed = changed.expect_status(200);
    assert_eq!(changed["title"], Value::Null);
    assert_eq!((&changed["tags"], &changed["metadata"]), (&json!(["y", "z"]), &json!({"l": {"m": true}})));
    assert_eq!((&changed["status"], &changed["model"]), (&json!("paused"), &json!("m")));
    let appended = api.post("/sessions/a/messages", json!({"messages": [{"role": "user", "content": "?"}]})).await;
    assert_eq!(appended.expect_error(409).0, "paused");
    assert_eq!(api.patch("/sessions/a", json!({"status": "active"})).await.expect_status(200)["status"], "active");
    // An empty patch changes nothing.
    assert_eq!(api.patch("/sessions/a", json!({})).await.etag(), "\"4\"");

    api.append_messages("a", json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])).await;
    let full = api.get("/sessions/a").await;
    assert_eq!(full.etag(), "\"7\"");
    let full = full.expect_status(200);
    assert_eq!((&full["id"], &full["message_count"], &full["turn_count"]), (&json!("a"), &json!(2), &json!(1)));
    let want = json!({"position": 1, "seq": 6, "created_at": "2026-01-01T00:00:01Z", "run_id": null, "message": {"role": "assistant", "content": "ho"}});
    assert_eq!(full["messages"][1], want);
    let want = json!({"label": "turn-1", "position": 2, "created_at": "2026-01-01T00:00:01Z", "auto": true, "seq": 7, "run_id": null, "step": null, "state": {}});
    assert_eq!(full["checkpoints"], json!([want]));
    assert_eq!((&full["runs"], full.get("cache"), full.get("discarded")), (&json!([]), None, None));

    let gone = api.delete("/sessions/a").await.expect_status(200);
    assert_eq!(
        (&gone["deleted"], &gone["purged"], &gone["object"]),
        (&json!(true), &json!(false), &json!("session.deleted"))
    );
    for path in ["", "/messages", "/messages?last=1", "/checkpoints", "/checkpoints/turn-1", "/discarded", "/export"] {
        let answer = api.get(&format!("/sessions/a{path}")).await;
        assert!(answer.text.contains("POST /sessions/a/restore"), "{}", answer.text);
        assert_eq!(answer.expect_error(410).0, "gone", "{path}");
    }
    for (path, body) in [
        ("messages", json!({"messages": [{"role": "user", "content": "?"}]})),
        ("rewind", json!({"position": 0})),
        ("fork", json!({})),
        ("checkpoints", json!({})),
    ] {
        assert_eq!(api.post(&format!("/sessions/a/{path}"), body).await.expect_error(410).0, "gone", "{path}");
    }
    assert_eq!(api.patch("/sessions/a", json!({"title": "x"})).await.expect_error(410).0, "gone");
    assert_eq!(api.get("/v1/sessions/a").await.expect_error(404).0, "not_found");
    for (method, path, body) in [
        ("POST", "/v1/sessions/a/fork", json!({})),
        ("PUT", "/v1/sessions/a", json!([{"role": "user", "content": "instead"}])),
        ("POST", "/v1/chat/completions", json!({"session_id": "a", "messages": [{"role": "user", "content": "?"}]})),
        ("POST", "/sessions/a/runs", json!({"input": "?", "mode": "wait"})),
        ("POST", "/sessions/a/runs", json!({"input": "?", "mode": "background"})),
        ("POST", "/sessions/a/compact", json!({})),
        ("POST", "/sessions/a/uncompact", json!({})),
    ] {
        let answer = api.send(method, path, Some("application/json"), body.to_string()).await;
        assert!(answer.text.contains("POST /sessions/a/restore"), "{path}: {}", answer.text);
        assert_eq!(answer.expect_error(410).0, "gone", "{path}");
    }
    assert_eq!(api.delete("/v1/sessions/a").await.expect_status(200)["deleted"], false);
    assert_eq!(api.post("/sessions", json!({"id": "a"})).await.expect_error(409).0, "exists");
    let import = json!({"id": "a", "messages": [{"role": "user", "content": "instead"}]});
    assert_eq!(api.post("/sessions/import?id=a", import).await.expect_error(409).0, "exists");
    api.post("/sessions", json!({"id": "b"})).await.expect_status(201);
    assert_eq!(api.post("/sessions/b/fork", json!({"id": "a"})).await.expect_error(409).0, "exists");
    let back = api.post("/sessions/a/restore", "").await;
    assert_eq!(back.expect_status(200)["status"], "active");
    assert_eq!(api.get("/sessions/a").await.expect_status(200)["message_count"], 2);

    assert_eq!(api.delete("/sessions/a?purge=true").await.expect_status(200)["purged"], true);
    assert_eq!(api.get("/sessions/a").await.expect_error(404).0, "not_found");
    assert_eq!(api.post("/sessions/a/restore", "").await.expect_error(404).0, "not_found");
    assert_eq!(api.delete("/sessions/a").await.expect_error(404).0, "not_found");
    assert_eq!(api.delete("/sessions/a?purge=true").await.expect_error(404).0, "not_found");
}

#[tokio::test]
async fn invalid_input_is_refused_and_changes_nothing() {
    let api = InProcessClient::memory().await;
    api.post("/sessions", json!({"id": "a"})).await.expect_status(201);
    let before = api.get("/sessions/a").await.text;
    let cases = [
        ("POST", "/sessions", r#"{"id": "no space at the end "}"#, 400, "session_id"),
        ("POST", "/sessions", r#"{"id": 7}"#, 400, "id"),
        ("POST", "/sessions", r#"{"tags": ["a", 7]}"#, 400, "tags[1]"),
        ("POST", "/sessions", r#"{"metadata": []}"#, 400, "metadata"),
        ("POST", "/sessions", r#"{"colour": "red"}"#, 400, "colour"),
        ("POST", "/sessions", r#"{"model": ""}"#, 400, "model"),
        ("POST", "/sessions", r#"{"thread_id": "a\u0000"}"#, 400, "thread"),
        ("POST", "/sessions", "[]", 400, "body"),
        ("POST", "/assistants", "[\"x\"]", 400, "body"),
        ("POST", "/sessions", "{", 400, "body"),
        ("POST", "/sessions", r#"{"assistant_id": "nobody"}"#, 404, "assistant_id"),
        ("PATCH", "/sessions/a", r#"{"status": "deleted"}"#, 400, "status"),
        ("PATCH", "/sessions/a", r#"{"status": "gone"}"#, 400, "status"),
        ("PATCH", "/sessions/a", r#"{"metadata": null}"#, 400, "metadata"),
        ("PATCH", "/sessions/a", r#"{"title": 1}"#, 400, "title"),
        ("PATCH", "/sessions/a", r#"{"seq": 1}"#, 400, "seq"),
        ("PATCH", "/sessions/%20a", "{}", 400, "session_id"),
        ("PATCH", "/sessions/b", "{}", 404, ""),
        ("GET", "/sessions/a?include=cache,all", "", 400, "include"),
        ("GET", "/sessions/a?inclued=cache", "", 400, "inclued"),
        ("GET", "/sessions/%ff", "", 400, "path"),
        ("DELETE", "/sessions/a?purge=yes", "", 400, "purge"),
        ("DELETE", "/sessions/a?purge=true&purge=true", "", 400, "purge"),
    ];
    for (method, path, body, status, param) in cases {
        let answer = api.send(method, path, Some("application/json"), body).await;
        let text = answer.text.clone();
        assert_eq!(answer.expect_error(status).1, param, "{method} {path} {body}: {text}");
    }
    let large = json!({"metadata": {"k": "x".repeat(300_000)}});
    assert_eq!(api.patch("/sessions/a", &large).await.expect_error(413).1, "max_info_bytes");
    assert_eq!(api.post("/sessions", "x".repeat(2 << 20)).await.expect_error(413).1, "max_body_bytes");
    let plain = api.send("POST", "/sessions", Some("text/plain"), "{}").await;
    assert_eq!(plain.expect_error(415).0, "unsupported_media_type");
    assert_eq!(api.send("PUT", "/sessions", None, "").await.expect_error(405).0, "method_not_allowed");
    assert_eq!(api.get("/sessions/a").await.text, before);
    assert_eq!(each_field(&api.get("/sessions").await.expect_status(200), "id"), ["a"]);
}

#[tokio::test]
async fn writes_can_be_conditional() {
    let api = InProcessClient::memory().await;
    api.post("/sessions", json!({"id": "a"})).await.expect_status(201);
    let seen = api.get("/sessions/a").await.etag();
    api.append_messages("a", json!([{"role": "user", "content": "meanwhile"}])).await;
    let (late, now) = (api.with("if-match", &seen), api.get("/sessions/a").await);
    let body = json!({"messages": [{"role": "user", "content": "late"}]});
    for (method, path, body) in [
        ("PATCH", "/sessions/a", json!({"title": "late"})),
        ("POST", "/sessions/a/messages", body.clone()),
        ("POST", "/sessions/a/checkpoints", json!({})),
        ("POST", "/sessions/a/rewind", json!({"position": 0})),
        ("POST", "/sessions/a/fork", json!({"id": "f"})),
        ("POST", "/sessions/a/restore", json!({})),
        ("DELETE", "/sessions/a", json!({})),
        ("DELETE", "/sessions/a?purge=true", json!({})),
        ("PUT", "/v1/sessions/a", json!([{"role": "user", "content": "late"}])),
        ("PUT", "/v1/sessions/none", json!([{"role": "user", "content": "late"}])),
    ] {
        let answer = late.send(method, path, Some("application/json"), body.to_string()).await;
        assert_eq!(answer.expect_error(412).0, "conflict", "{method} {path}");
    }
    assert_eq!(api.get("/sessions/a").await.text, now.text);
    assert_eq!(each_field(&api.get("/sessions").await.expect_status(200), "id"), ["a"]);
    let appended = api.with("if-match", &now.etag()).post("/sessions/a/messages", &body).await;
    assert_eq!(appended.etag(), "\"3\"");
    assert_eq!(appended.expect_status(201), json!({"seq": 3, "position": 1, "message_count": 2}));
    assert_eq!(api.with("if-match", "abc").patch("/sessions/a", "{}").await.expect_error(400).1, "If-Match");
    api.with("if-match", "*").patch("/sessions/a", "{}").await.expect_status(200);
}

/// Predicate of the sessions that a filter should keep.
type Matches = fn(i32) -> bool;

#[tokio::test]
async fn lists_are_filtered_and_paged_on_every_store() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    for store in ["memory:".to_owned(), format!("sqlite:{}", path("t.db")), format!("jsonl:{}", path("logs"))] {
        let api = InProcessClient::open(&store).await;
        for i in 0..25 {
            let body = json!({
                "id": format!("s{i:02}"), "thread_id": format!("t{}", i % 3), "title": format!("Über {i}"),
                "assistant_id": (i % 2 == 0).then_some("declared"), "tags": [format!("g{}", i % 5), "all"],
                "metadata": {"n": i, "even": i % 2 == 0, "word": format!("w{}", i % 4)},
            });
            let user = api.with("x-tenure-user", if i % 2 == 0 { "ada" } else { "bob" });
            user.post("/sessions", body).await.expect_status(201);
            api.advance(1);
        }
        let ids = |list: Value| each_field(&list, "id");
        let want =
            |keep: fn(i32) -> bool| (0..25).rev().filter(|i| keep(*i)).map(|i| format!("s{i:02}")).collect::<Vec<_>>();

        // Pages, by cursor and by offset, add up to the whole list.
        for route in ["/sessions", "/v1/sessions"] {
            let mut all = Vec::new();
            let mut next = String::new();
            loop {
                let page = api.get(&format!("{route}?limit=7{next}")).await.expect_status(200);
                all.extend(each_field(&page, "id"));
                match page["next_cursor"].as_str() {
                    Some(cursor) => next = format!("&cursor={cursor}"),
                    None => break,
                }
            }
            assert_eq!(all, want(|_| true), "{store}");
        }
        assert_eq!(ids(api.get("/sessions").await.expect_status(200)).len(), 20);
        assert_eq!(ids(api.get("/sessions?limit=100").await.expect_status(200)).len(), 25);
        assert_eq!(ids(api.get("/sessions?limit=5&offset=20").await.expect_status(200)), want(|i| i < 5));

        let checks: [(&str, Matches); 12] = [
            ("assistant_id=declared", |i| i % 2 == 0),
            ("thread_id=t1", |i| i % 3 == 1),
            ("user=bob", |i| i % 2 == 1),
            ("tag=g3", |i| i % 5 == 3),
            ("tag=g3&tag=all", |i| i % 5 == 3),
            ("tag=g3&tag=g4", |_| false),
            ("metadata.n=7", |i| i == 7),
            ("metadata.n=%227%22", |_| false),
            ("metadata.even=true&metadata.word=w2", |i| i % 4 == 2),
            ("title=%C3%BCBER%201", |i| i == 1 || (10..20).contains(&i)),
            ("created_after=2026-01-01T00:00:20Z", |i| i >= 20),
            ("created_after=2026-01-01T00:00:03Z&created_before=2026-01-01T00:00:05Z", |i| i == 3 || i == 4),
        ];
        for (filter, keep) in checks {
            let list = api.get(&format!("/sessions?limit=100&{filter}")).await.expect_status(200);
            assert_eq!(ids(list), want(keep), "{store} {filter}");
        }
        api.delete("/sessions/s03").await.expect_status(200);
        api.patch("/sessions/s04", json!({"status": "paused"})).await.expect_status(200);
        assert_eq!(ids(api.get("/sessions?status=deleted").await.expect_status(200)), ["s03"]);
        assert_eq!(ids(api.get("/sessions?status=paused,deleted").await.expect_status(200)), ["s04", "s03"]);
        assert_eq!(ids(api.get("/sessions?status=paused&status=deleted").await.expect_status(200)), ["s04", "s03"]);
        assert_eq!(ids(api.get("/sessions?limit=100").await.expect_status(200)).len(), 24);

        for (query, param) in [
            ("limit=101", "limit"),
            ("limit=0", "limit"),
            ("limit=x", "limit"),
            ("limit=1&limit=2", "limit"),
            ("cursor=x", "cursor"),
            ("cursor=1~a&offset=1", "offset"),
            ("offset=-1", "offset"),
            ("status=live", "status"),
            ("created_after=yesterday", "created_after"),
            ("created_before=2026-13-01", "created_before"),
            ("metadata.k=%7B%7D", "metadata.k"),
            ("metadata=1", "metadata"),
            ("asistant_id=x", "asistant_id"),
            ("assistant_id=", "assistant_id"),
            ("thread_id=%00", "thread_id"),
            ("user=%0A", "user"),
        ] {
            let answer = api.get(&format!("/sessions?{query}")).await;
            let text = answer.text.clone();
            assert_eq!(answer.expect_error(400).1, param, "{query}: {text}");
        }
        assert!(api.get("/sessions?limit=101").await.text.contains("max_page"));
        // Unusual characters are valid filters that match nothing.
        for unusual in ["title=%00", "tag=%00", "metadata.%00=%00", "tag=", "title=%25_", "metadata.n=1e400"] {
            assert_eq!(
                ids(api.get(&format!("/sessions?{unusual}")).await.expect_status(200)).len(),
                if unusual == "title=%00" { 20 } else { 0 },
                "{unusual}"
            );
        }
    }
}

#[tokio::test]
async fn users_of_a_tenant_see_their_own() {
    let api = InProcessClient::memory().await;
    let (ada, bob) = (api.with("x-tenure-user", "ada"), api.with("x-tenure-user", "bob"));
    ada.post("/sessions", json!({"id": "hers"})).await.expect_status(201);
    bob.post("/sessions", json!({"id": "his"})).await.expect_status(201);
    assert_eq!(each_field(&ada.get("/sessions").await.expect_status(200), "id"), ["hers"]);
    assert_eq!(each_field(&api.get("/sessions").await.expect_status(200), "id").len(), 2);
    // Without keys every caller is an administrator, but a request that names a user acts as that user.
    assert_eq!(ada.get("/sessions?user=bob").await.expect_error(403).0, "forbidden");
    assert_eq!(each_field(&ada.get("/sessions?user=ada").await.expect_status(200), "id"), ["hers"]);
    let response = ada.get("/sessions/his").await;
    let nowhere = ada.get("/sessions/him").await;
    assert_eq!(response.text.replace("his", "him"), nowhere.text);
    assert_eq!(response.expect_error(404).0, "not_found");
    assert_eq!(ada.put("/v1/sessions/his", "[]").await.status.as_u16() / 100, 4);
    assert_eq!(ada.delete("/v1/sessions/his").await.expect_status(200)["deleted"], false);
    bob.get("/sessions/his").await.expect_status(200);
}

#[tokio::test]
async fn a_key_allows_only_its_rights() {
    let api = InProcessClient::memory().await;
    let reader = api.key("acme", None, &[Right::Read]).await;
    let writer = api.key("acme", None, &[Right::Write]).await;
    let admin = api.key("acme", None, &[Right::Admin]).await;
    assert_eq!(api.get("/sessions").await.expect_error(401).0, "unauthorized");
    assert_eq!(api.with("authorization", "Bearer tnr_no").get("/sessions").await.expect_error(401).0, "unauthorized");
    writer.post("/sessions", json!({"id": "a"})).await.expect_status(201);
    writer.append_messages("a", json!([{"role": "user", "content": "x"}])).await;
    reader.get("/sessions/a").await.expect_status(200);
    for (method, path, body) in [
        ("POST", "/sessions", "{}"),
        ("PATCH", "/sessions/a", "{}"),
        ("DELETE", "/sessions/a", ""),
        ("POST", "/sessions/a/restore", ""),
        ("POST", "/sessions/a/messages", "{}"),
        ("POST", "/sessions/a/checkpoints", "{}"),
        ("POST", "/sessions/a/rewind", "{}"),
        ("POST", "/sessions/a/fork", "{}"),
        ("POST", "/sessions/import", "[]"),
        ("PUT", "/v1/sessions/a", "[]"),
        ("DELETE", "/v1/sessions/a", ""),
        ("POST", "/v1/sessions/a/fork", "{}"),
        ("POST", "/threads/t/session", "{}"),
        ("POST", "/assistants", r#"{"name": "x"}"#),
        ("PUT", "/assistants/x", "{}"),
        ("DELETE", "/assistants/x", ""),
        ("DELETE", "/users/default", ""),
    ] {
        assert_eq!(
            reader.send(method, path, Some("application/json"), body).await.expect_error(403).0,
            "forbidden",
            "{method} {path}"
        );
    }
    for path in [
        "/sessions",
        "/sessions/a",
        "/sessions/a/messages",
        "/sessions/a/checkpoints",
        "/sessions/a/export",
        "/v1/sessions/a",
        "/assistants",
    ] {
        assert_eq!(writer.get(path).await.expect_error(403).0, "forbidden", "{path}");
    }
    assert_eq!(writer.delete("/users/default").await.expect_error(403).0, "forbidden");
    assert_eq!(admin.delete("/users/default").await.expect_status(200)["sessions"], 1);
}

/// Checking and creating is atomic: of many concurrent requests, one creates it.
#[tokio::test(flavor = "multi_thread")]
async fn one_of_many_requests_creates_an_assistant() {
    let dir = tempfile::tempdir().unwrap();
    let api = InProcessClient::open(&format!("sqlite:{}", dir.path().join("tenure.db").display())).await;
    for (method, path, status_of_others) in [("POST", "/assistants", 409), ("PUT", "/assistants/put", 200)] {
        let all: Vec<_> = (0..16)
            .map(|i| {
                let api = api.clone();
                let name = if method == "POST" { "posted" } else { "put" };
                let body = json!({"name": name, "instructions": i.to_string()});
                tokio::spawn(async move { api.send(method, path, Some("application/json"), body.to_string()).await })
            })
            .collect();
        let mut created = 0;
        for answer in all {
            match answer.await.unwrap().status.as_u16() {
                201 => created += 1,
                status => assert_eq!(status, status_of_others),
            }
        }
        assert_eq!(created, 1, "{method}");
    }
}

#[tokio::test]
async fn assistants_are_created_replaced_and_deleted() {
    let api = InProcessClient::memory().await;
    let body = json!({"name": "helper", "model": "m", "instructions": "Help.", "sessions": {"ttl": "2h"}, "metadata": {"a": 1}});
    let created = api.post("/assistants", &body).await.expect_status(201);
    let want = json!({"id": "helper", "object": "assistant", "declared": false, "name": "helper", "model": "m", "instructions": "Help.", "sessions": {"ttl": "2h"}, "metadata": {"a": 1}});
    assert_eq!(created, want);
    assert_eq!(api.post("/assistants", &body).await.expect_error(409), ("exists".into(), "name".into()));
    assert_eq!(api.get("/assistants/helper").await.expect_status(200), want);
    assert_eq!(each_field(&api.get("/assistants").await.expect_status(200), "declared"), ["true", "false"]);
    assert_eq!(
        api.put("/assistants/helper", json!({"cache": {"max_entries": 3}})).await.expect_status(200)["cache"],
        json!({"max_entries": 3})
    );
    assert_eq!(api.put("/assistants/other", json!({"name": "other"})).await.expect_status(201)["id"], "other");
    assert_eq!(api.put("/assistants/a%20b%2Fc", "{}").await.expect_status(201)["id"], "a b/c");
    assert_eq!(api.put("/assistants/helper", json!({"name": "other"})).await.expect_error(400).1, "name");
    for body in [
        "{}",
        r#"{"name": ""}"#,
        r#"{"name": "x", "sessions": {"ttl": "soon"}}"#,
        r#"{"name": "x", "colour": 1}"#,
        r#"{"name": "a\n"}"#,
        "7",
    ] {
        assert_eq!(api.post("/assistants", body).await.expect_error(400).0, "invalid", "{body}");
    }
    for answer in [
        api.post("/assistants", json!({"name": "declared"})).await,
        api.put("/assistants/declared", "{}").await,
        api.delete("/assistants/declared").await,
    ] {
        assert!(answer.text.contains("configuration"));
        assert_eq!(answer.expect_error(409).0, "declared");
    }
    api.post("/sessions", json!({"id": "a", "assistant_id": "other"})).await.expect_status(201);
    assert_eq!(api.delete("/assistants/other").await.expect_status(200)["deleted"], true);
    assert_eq!(api.delete("/assistants/other").await.expect_error(404).0, "not_found");
    assert_eq!(api.get("/assistants/other").await.expect_error(404).0, "not_found");
    api.get("/sessions/a").await.expect_status(200);
}

#[tokio::test]
async fn a_thread_has_one_session_at_a_time() {
    let api = InProcessClient::memory().await;
    api.put("/assistants/brief", json!({"sessions": {"ttl": "1m"}})).await.expect_status(201);
    let ask = json!({"assistant_id": "brief", "title": "T"});
    let first = api.post("/threads/t%201/session", &ask).await;
    assert_eq!(first.etag(), "\"1\"");
    let first = first.expect_status(201);
    assert_eq!(
        (&first["thread_id"], &first["assistant_id"], &first["title"]),
        (&json!("t 1"), &json!("brief"), &json!("T"))
    );
    assert_eq!(api.post("/threads/t%201/session", &ask).await.expect_status(200)["id"], first["id"]);
    assert_eq!(api.post("/threads/t%201/session", json!({})).await.expect_status(200)["id"], first["id"]);
    // Sessions of another user, assistant or thread are different ones.
    let bob = api.with("x-tenure-user", "bob").post("/threads/t%201/session", &ask).await.expect_status(201);
    let other = api.post("/threads/t%201/session", json!({"assistant_id": "declared"})).await.expect_status(201);
    let thread = api.post("/threads/t2/session", &ask).await.expect_status(201);
    let ids = [&first["id"], &bob["id"], &other["id"], &thread["id"]];
    assert!((0..4).all(|i| (0..i).all(|j| ids[i] != ids[j])), "{ids:?}");

    api.advance(61);
    assert_eq!(api.get(&format!("/sessions/{}", first["id"].as_str().unwrap())).await.expect_error(410).0, "gone");
    let second = api.post("/threads/t%201/session", &ask).await.expect_status(201);
    assert_ne!(second["id"], first["id"]);
    let fresh =
        api.post("/threads/t%201/session", json!({"assistant_id": "brief", "fresh": true})).await.expect_status(201);
    assert_ne!(fresh["id"], second["id"]);

    // Two concurrent requests get the same session.
    let (a, b) = tokio::join!(api.post("/threads/new/session", &ask), api.post("/threads/new/session", &ask));
    assert_eq!(a.json()["id"], b.json()["id"]);
    assert_eq!(each_field(&api.get("/sessions?thread_id=new").await.expect_status(200), "id").len(), 1);

    assert_eq!(api.post("/threads/t/session", json!({"assistant_id": "no"})).await.expect_error(404).1, "assistant_id");
    assert_eq!(api.post("/threads/t/session", json!({"fresh": 1})).await.expect_error(400).1, "fresh");
    assert_eq!(api.post("/threads/%00/session", "{}").await.expect_error(400).1, "id");
}

#[tokio::test]
async fn a_user_is_erased() {
    let api = InProcessClient::memory().await;
    let (ada, bob) = (api.with("x-tenure-user", "ada"), api.with("x-tenure-user", "bob"));
    for (principal, id) in [(&ada, "a1"), (&ada, "a2"), (&bob, "b")] {
        principal.post("/sessions", json!({"id": id})).await.expect_status(201);
    }
    ada.delete("/sessions/a2").await.expect_status(200);
    let receipt = api.delete("/users/ada").await.expect_status(200);
    assert_eq!(receipt, json!({"user": "ada", "sessions": 2, "at": "2026-01-01T00:00:00Z"}));
    assert_eq!(api.get("/sessions/a1").await.expect_error(404).0, "not_found");
    assert_eq!(each_field(&api.get("/sessions?status=deleted,active").await.expect_status(200), "id"), ["b"]);
    assert_eq!(api.delete("/users/ada").await.expect_status(200)["sessions"], 0);
    assert_eq!(api.delete("/users/%0a").await.expect_error(400).1, "id");
}

/// The context of a session is any JSON value: it is returned as it was given, and is part of the metadata.
#[tokio::test]
async fn the_context_is_any_json_value() {
    let api = InProcessClient::memory().await;
    api.post("/sessions", json!({"id": "plain"})).await.expect_status(201);
    assert_eq!(api.get("/sessions/plain").await.expect_status(200).get("context"), None);
    let values =
        [json!([1, "two", {"three": null}]), json!("text"), json!(1.5), json!(true), json!({"cart": {"n": 2}})];
    for (i, context) in values.iter().enumerate() {
        let created =
            api.post("/sessions", json!({"id": format!("s{i}"), "context": context})).await.expect_status(201);
        assert_eq!(created["context"], *context);
        let patched = api.patch("/sessions/plain", json!({"context": context})).await.expect_status(200);
        assert_eq!((&patched["context"], &patched["metadata"]["context"]), (context, context));
        assert_eq!(api.get("/sessions/plain").await.expect_status(200)["context"], *context);
    }
    let listed = api.get("/sessions?metadata.context=text").await.expect_status(200);
    assert_eq!(each_field(&listed, "id"), ["s1"]);
    // An object is merged like the rest of the metadata, and null removes it.
    let merged = api.patch("/sessions/plain", json!({"context": {"page": 7}})).await.expect_status(200);
    assert_eq!(merged["context"], json!({"cart": {"n": 2}, "page": 7}));
    let removed = api.patch("/sessions/plain", json!({"context": null})).await.expect_status(200);
    assert_eq!((removed.get("context"), &removed["metadata"]), (None, &json!({})));
}
