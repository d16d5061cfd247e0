//! Session ids of any printable text: in bodies, headers, URLs, file names and on the command line.

use crate::support::{InProcessClient, StoreKind, TestServer, each_field, send, user, wait_until};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::json;
use tenure_server::headers::header_text;

const IDS: [&str; 9] =
    ["user@example.com", "Ünïcødé 会話", "a/b", "..", "%2e", "CON", "con", "a b?c#d&e=f", "\"q\"~\\"];

/// The id as a segment of a URL.
fn encoded(id: &str) -> String {
    utf8_percent_encode(id, NON_ALPHANUMERIC).to_string()
}

/// Each id is created by a chat request, is returned in body and header, and names its session on every route.
#[tokio::test]
async fn any_printable_text_names_a_session_on_every_route() {
    let api = InProcessClient::memory().await;
    for id in IDS {
        let path = encoded(id);
        let text = format!("in {id}");
        let answer = api.post("/v1/chat/completions", json!({"session_id": id, "messages": [user(&text)]})).await;
        assert_eq!(header_text(&answer.headers, "x-session-id").unwrap().as_deref(), Some(id));
        assert!(answer.headers["x-session-id"].to_str().is_ok(), "{id}");
        assert_eq!(answer.expect_status(200)["session_id"], id);
        let session = api.get(&format!("/sessions/{path}")).await.expect_status(200);
        assert_eq!((&session["id"], &session["message_count"]), (&json!(id), &json!(2)));
        let messages = api.get(&format!("/sessions/{path}/messages")).await.expect_status(200);
        assert_eq!(messages["data"][0]["message"]["content"], text);
        assert_eq!(api.get(&format!("/v1/sessions/{path}")).await.expect_status(200)["messages"][0]["content"], text);
        api.post(&format!("/sessions/{path}/checkpoints"), json!({"label": "here"})).await.expect_status(201);
        let fork = api.post(&format!("/sessions/{path}/fork"), json!({"id": format!("{id} fork")})).await;
        let location = fork.headers["location"].to_str().unwrap().to_owned();
        assert_eq!(fork.expect_status(201)["id"], format!("{id} fork"));
        assert_eq!(api.get(&location).await.expect_status(200)["parent"]["session_id"], id);
        let export = api.get(&format!("/sessions/{path}/export")).await.expect_status(200);
        assert_eq!(export["session_id"], id);
        let runs = api.get(&format!("/sessions/{path}/runs")).await.expect_status(200);
        let run = runs["data"][0]["id"].as_str().unwrap();
        assert_eq!(api.get(&format!("/sessions/{path}/runs/{run}")).await.expect_status(200)["status"], "completed");
    }
    let found = api.get("/search?q=in&limit=3").await.expect_status(200);
    assert_eq!(found["data"].as_array().unwrap().len(), 3);
    let mut listed = Vec::new();
    let mut cursor = String::new();
    loop {
        let page = api.get(&format!("/sessions?limit=4{cursor}")).await.expect_status(200);
        listed.extend(each_field(&page, "id"));
        let Some(next) = page["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={}", encoded(next));
    }
    assert_eq!(listed.len(), 2 * IDS.len());
    for id in IDS {
        assert!(listed.iter().any(|l| l == id), "{id}");
        api.delete(&format!("/v1/sessions/{}", encoded(id))).await.expect_status(200);
        assert_eq!(api.get(&format!("/v1/sessions/{}", encoded(id))).await.status, 404);
    }
}

/// The header of a request may contain the id as it was returned, or as UTF-8.
#[tokio::test]
async fn the_session_header_may_contain_any_id() {
    let api = InProcessClient::memory().await;
    for id in IDS {
        let first = api.post("/v1/chat/completions", json!({"session_id": id, "messages": [user("hi")]})).await;
        let value = first.headers["x-session-id"].to_str().unwrap().to_owned();
        for value in [&*value, id] {
            let body = json!({"messages": [user("again")]});
            let answer = api.with("x-session-id", value).post("/v1/chat/completions", body).await;
            assert_eq!(answer.expect_status(200)["session_id"], id);
        }
    }
    for (id, header) in [("a b", "a b"), ("é", "UTF-8''%C3%A9")] {
        let answer = api.post("/v1/chat/completions", json!({"session_id": id, "messages": [user("hi")]})).await;
        assert_eq!(answer.headers["x-session-id"], header);
    }
}

#[tokio::test]
async fn unprintable_ids_are_refused_and_change_nothing() {
    let api = InProcessClient::memory().await;
    for id in ["", " ", "a ", " a", "a\nb", "a\u{7f}", "a\u{202e}b", &"é".repeat(129)] {
        let body = json!({"session_id": id, "messages": [user("hi")]});
        let error = api.post("/v1/chat/completions", body).await.expect_error(400);
        assert_eq!(error, ("invalid".to_owned(), "session_id".to_owned()), "{id:?}");
        if !id.is_empty() {
            let path = format!("/sessions/{}", encoded(id));
            assert_eq!(api.get(&path).await.expect_error(400).1, "session_id", "{id:?}");
        }
    }
    assert_eq!(api.get("/sessions/%FF").await.status, 400);
    assert_eq!(api.get("/sessions").await.expect_status(200)["data"], json!([]));
}

/// Sessions whose ids differ only in case have their own transcripts, whose names are valid everywhere.
#[tokio::test(flavor = "multi_thread")]
async fn transcripts_have_safe_and_distinct_names() {
    let dir = tempfile::tempdir().unwrap();
    let live = |config: &mut tenure_server::config::Config| {
        config.transcripts =
            tenure_server::config::TranscriptsConfig { dir: dir.path().display().to_string(), live: true };
    };
    let test = TestServer::with(StoreKind::Memory, false, live).await.unwrap();
    for id in IDS {
        let body = json!({"session_id": id, "messages": [user(&format!("in {id}"))]});
        let (status, _) =
            send(test.client.http.post(format!("{}/v1/chat/completions", test.client.base)).json(&body)).await;
        assert_eq!(status, 200);
    }
    let names = || {
        let files = std::fs::read_dir(dir.path().join("default/default")).into_iter().flatten();
        let mut names: Vec<_> = files.map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|n| n.ends_with(".jsonl"));
        names.sort();
        names
    };
    wait_until("all transcripts", async || names().len() == IDS.len()).await;
    let mut want: Vec<_> = IDS.iter().map(|id| tenure::session::file_name(id) + ".jsonl").collect();
    want.sort();
    assert_eq!(names(), want);
    assert!(names().iter().all(|n| n.bytes().all(|b| b.is_ascii_alphanumeric() || b"%._-".contains(&b))));
}
