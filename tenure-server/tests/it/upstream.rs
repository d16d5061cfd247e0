//! Model servers that fail, hang, break the stream or send garbage: the client's response, and the stored session.

use crate::in_every_way;
use crate::kit::*;
use axum::body::Bytes;
use serde_json::{Value, json};
use std::time::Duration;
use tenure::{Options, Tenure, run::RunOutcome};
use tenure_server::app::App;

fn byte_chunks(text: &str, size: usize) -> Vec<Bytes> {
    text.as_bytes().chunks(size).map(Bytes::copy_from_slice).collect()
}

const SSE: &str = "text/event-stream";

fn content_chunk(text: &str) -> String {
    chunk(json!({"role": "assistant", "content": text}), Value::Null)
}

async fn ask(home: &Home) -> Reply {
    home.chat(json!({"session_id": "s", "messages": [user("Hi")]})).await
}

/// Asserts that the user's message is stored, the run has failed, and there is nothing else.
async fn assert_failed_run(home: &Home, stored_part: &[Value]) {
    let mut want = vec![user("Hi")];
    want.extend_from_slice(stored_part);
    assert_eq!(home.stored("s").await, want);
    let session = home.session("s").await;
    let run = session.runs.last().unwrap();
    assert_eq!(run.ended.unwrap().1, RunOutcome::Failed);
    assert!(run.error.is_some());
}

in_every_way! {
    /// An error of the model server is passed on: status, type, body, `Retry-After`. The retry is not a second
    /// question.
    async fn errors_are_passed_on(home: &mut Home) {
        let body = r#"{"error": {"message":"slow down","type":"tokens","code":null}}"#;
        home.model
            .then(Act::Refuse(429, "application/json; charset=utf-8", body, Some("7")))
            .then(Act::Refuse(400, "text/html", "<p>no</p>", None));
        let reply = ask(home).await;
        assert_eq!((reply.status, reply.text.as_str()), (429, body));
        assert_eq!(reply.headers["content-type"], "application/json; charset=utf-8");
        assert_eq!(reply.headers["retry-after"], "7");
        assert_eq!(reply.session_id(), "s");
        assert_failed_run(home, &[]).await;
        let reply = ask(home).await;
        assert_eq!((reply.status, reply.text.as_str()), (400, "<p>no</p>"));
        assert_eq!(reply.headers["content-type"], "text/html");
        assert_failed_run(home, &[]).await;
        let reply = ask(home).await;
        assert_eq!((reply.said(), reply.report()), ("answer 3", [1, 0, 0, 0]));
        assert_eq!(home.model.shown(), [user("Hi")]);
        assert_eq!(home.stored("s").await, [user("Hi"), assistant("answer 3")]);
    }

    /// A stream that breaks off: the partial answer is stored and marked as partial. The same question again is a
    /// retry, which replaces it; with `history: append` nothing is ever rewound.
    async fn a_stream_that_breaks_off(home: &mut Home) {
        if !home.stream {
            return;
        }
        for mode in ["auto", "append"] {
            home.model.then(Act::Raw(SSE, vec![content_chunk("Half an").into(), content_chunk(" ans").into()], End::Cut));
            let ask = async || home.chat(json!({"session_id": mode, "history": mode, "messages": [user("Hi")]})).await;
            let reply = ask().await;
            assert_eq!((reply.status, reply.code(), reply.said()), (200, "upstream_broken", "Half an ans"));
            assert!(!reply.is_done());
            assert_eq!(home.stored(mode).await, [user("Hi"), assistant("Half an ans")]);
            assert_eq!(home.session(mode).await.runs[0].ended.unwrap().1, RunOutcome::Failed);
            assert!(home.session(mode).await.messages[1].partial);
            home.model.then(Act::Say("Whole."));
            let reply = ask().await;
            let (report, before) = match mode {
                "auto" => ([1, 0, 1, 0], vec![user("Hi")]),
                _ => ([0, 0, 0, 1], vec![user("Hi"), assistant("Half an ans"), user("Hi")]),
            };
            assert_eq!((reply.said(), reply.report()), ("Whole.", report));
            assert_eq!(home.model.shown(), before);
            assert_eq!(home.stored(mode).await, [before, vec![assistant("Whole.")]].concat());
        }
    }

    /// A model server that sends nothing times out.
    async fn silence(home: &mut Home) {
        home.model.then(Act::Hang);
        let reply = ask(home).await;
        assert_eq!((reply.status, reply.code()), (504, "upstream_timeout"));
        assert!(reply.text.contains("idle_timeout"));
        assert_failed_run(home, &[]).await;
        assert_eq!(home.model.count(), 1, "it may be at work: not asked again");
    }
}

/// A timeout in the middle of a stream, or of a body.
#[tokio::test(flavor = "multi_thread")]
async fn silence_during_a_stream() {
    let home = Home::new("memory", true).await.unwrap();
    home.model.then(Act::Raw(SSE, vec![content_chunk("Half").into()], End::Silent));
    let reply = ask(&home).await;
    assert_eq!((reply.status, reply.code(), reply.is_done()), (200, "upstream_timeout", false));
    assert_failed_run(&home, &[assistant("Half")]).await;
    let home = Home::new("memory", false).await.unwrap();
    home.model.then(Act::Raw("application/json", vec!["{\"choices\"".into()], End::Silent));
    assert_eq!(ask(&home).await.status, 504);
    home.model.then(Act::Raw("application/json", vec!["{\"choices\"".into()], End::Cut));
    let reply = ask(&home).await;
    assert_eq!((reply.status, reply.code()), (502, "upstream_broken"));
    assert_failed_run(&home, &[]).await;
}

/// An invalid answer is 502 before anything was passed on, and an error event after; never a panic, never stored as
/// an answer.
#[tokio::test(flavor = "multi_thread")]
async fn garbage() {
    let huge = format!("data: \"{}\"\n\n", "x".repeat(1 << 20));
    let error = "data: {\"error\": {\"message\": \"overloaded\", \"code\": 503}}\n\n";
    let streams: [(&'static str, Vec<Bytes>); 8] = [
        (SSE, vec!["data: nonsense\n\n".into()]),
        (SSE, vec![Bytes::from_static(b"data: \xff\xfe\n\n")]),
        (SSE, vec![error.into()]),
        (SSE, vec!["data: {\"choices\": 7}\n\n".into()]),
        (SSE, vec![huge.into()]),
        (SSE, vec![]),
        ("text/html", vec!["<h1>Welcome</h1>".into()]),
        ("application/json", vec!["{}".into()]),
    ];
    for (kind, bytes) in streams {
        for first in [None, Some("Half")] {
            for store in [true, false] {
                let home = Home::new("memory", true).await.unwrap();
                let mut all: Vec<Bytes> =
                    first.filter(|_| kind == SSE).map(|f| content_chunk(f).into()).into_iter().collect();
                let has_output = !all.is_empty();
                all.extend(bytes.clone());
                home.model.then(Act::Raw(kind, all, End::Well));
                let request = json!({"session_id": "s", "store": store, "messages": [user("Hi")]});
                let response = home.client.post(true, request, &[]).send().await.unwrap();
                let status = response.status().as_u16();
                let text = response.text().await.unwrap();
                assert_eq!(status, if has_output { 200 } else { 502 }, "{kind} {bytes:?}: {text}");
                assert!(text.contains(r#""code":"upstream_broken""#), "{kind} {bytes:?}: {text}");
                assert!(!text.contains("[DONE]"), "{kind} {bytes:?}: {text}");
                if !store {
                    assert_eq!(home.sessions().await, 0);
                } else if has_output {
                    assert_failed_run(&home, &[assistant("Half")]).await;
                } else {
                    assert_failed_run(&home, &[]).await;
                }
            }
        }
    }
    for body in
        ["", "[]", "{}", "{\"choices\":[]}", "{\"choices\":[{\"message\":7}]}", "<html>", "{\"error\":{}}", "null"]
    {
        let home = Home::new("memory", false).await.unwrap();
        home.model.then(Act::Raw("application/json", vec![body.into()], End::Well));
        let reply = ask(&home).await;
        assert_eq!((reply.status, reply.code()), (502, "upstream_broken"), "{body}: {reply:?}");
        assert_failed_run(&home, &[]).await;
    }
}

/// Valid streams in unusual forms: any chunks, any line ends, comments, no `[DONE]`, no last empty line, whole
/// answers.
#[tokio::test(flavor = "multi_thread")]
async fn unusual_but_valid_streams() {
    let plain =
        format!("{}{}{}", content_chunk("Grüezi "), chunk(json!({"content": "mitenand 👋"}), Value::Null), end("stop"));
    let finished = plain.replace("data: [DONE]\n\n", "");
    let unfinished =
        format!("{}{}data: [DONE]", content_chunk("Grüezi "), chunk(json!({"content": "mitenand 👋"}), Value::Null));
    let completion =
        json!({"choices": [{"index": 0, "message": assistant("Grüezi mitenand 👋"), "finish_reason": "stop"}]});
    let streams: Vec<(&'static str, String, usize)> = vec![
        (SSE, plain.clone(), 1),
        (SSE, plain.clone(), 7),
        (SSE, plain.replace('\n', "\r\n"), 5),
        (SSE, format!(": hello\n\nevent: message\nid: 1\nretry: 10\n{plain}"), 64),
        (SSE, plain.replace("data: ", "data:"), 64),
        (SSE, finished.clone(), 64),
        (SSE, finished.trim_end().to_owned(), 64),
        (SSE, unfinished, 64),
        ("Text/Event-Stream;charset=UTF-8", plain, 64),
        ("application/json", completion.to_string(), 64),
    ];
    for (kind, text, size) in streams {
        for store in [true, false] {
            let home = Home::new("memory", true).await.unwrap();
            home.model.then(Act::Raw(kind, byte_chunks(&text, size), End::Well));
            let response =
                home.client.post(true, json!({"session_id": "s", "store": store, "messages": [user("Hi")]}), &[]);
            let response = response.send().await.unwrap();
            assert_eq!(response.headers()["content-type"], SSE, "{text:?}");
            if !store {
                assert!(response.text().await.unwrap().ends_with("data: [DONE]\n\n"), "{text:?}");
                continue;
            }
            let reply = reply(response).await;
            assert_eq!((reply.said(), reply.is_done()), ("Grüezi mitenand 👋", true), "in parts of {size}: {text:?}");
            assert_eq!(home.stored("s").await, [user("Hi"), assistant("Grüezi mitenand 👋")]);
        }
    }
}

/// A request is retried only if there was no answer: the server was unreachable, or not ready.
#[tokio::test(flavor = "multi_thread")]
async fn retries() {
    for stream in [false, true] {
        let home = Home::with("memory", stream, |c| c.models[0].retries = 2).await.unwrap();
        home.model.then(Act::Refuse(503, "text/plain", "starting", None)).then(Act::Refuse(
            502,
            "text/plain",
            "",
            None,
        ));
        assert_eq!(ask(&home).await.said(), "answer 3");
        assert_eq!(home.stored("s").await.len(), 2);
        for (act, times) in [
            (Act::Refuse(429, "text/plain", "", None), 1),
            (Act::Refuse(500, "text/plain", "", None), 1),
            (Act::Refuse(503, "text/plain", "starting", None), 3),
            (Act::Hang, 1),
            (Act::Raw(SSE, vec![content_chunk("Half").into()], End::Cut), 1),
        ] {
            let home = Home::with("memory", stream, |c| c.models[0].retries = 2).await.unwrap();
            for _ in 0..times {
                home.model.then(act.clone());
            }
            ask(&home).await;
            assert_eq!(home.model.count(), times, "{act:?}");
            let half = [assistant("Half")];
            assert_failed_run(&home, if stream && matches!(act, Act::Raw(..)) { &half } else { &[] }).await;
        }
        // No server is listening.
        let home =
            Home::with("memory", stream, |c| c.models[0].base_url = "http://127.0.0.1:9/v1".into()).await.unwrap();
        let reply = ask(&home).await;
        assert_eq!((reply.status, reply.code()), (502, "upstream_unreachable"));
        assert_failed_run(&home, &[]).await;
    }
}

/// Chunks are passed on as they arrive, not buffered until the answer is complete.
#[tokio::test(flavor = "multi_thread")]
async fn chunks_are_not_held_back() {
    let home = Home::new("memory", true).await.unwrap();
    let permit = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
    home.model.then(Act::Hold("One", permit.clone(), " two"));
    let mut response = home.client.post(true, json!({"messages": [user("Hi")]}), &[]).send().await.unwrap();
    let first = tokio::time::timeout(Duration::from_secs(60), response.chunk()).await.expect("before the second");
    assert!(std::str::from_utf8(&first.unwrap().unwrap()).unwrap().contains("One"));
    permit.add_permits(1);
    assert!(response.text().await.unwrap().ends_with("data: [DONE]\n\n"));
}

/// A client that reads nothing for too long gets an error event. The whole answer is stored.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_too_slow() {
    let mut home = Home::new("memory", true).await.unwrap();
    let mut options = Options::default();
    options.limits.max_stall = Duration::from_millis(100);
    let tenure = Tenure::open_with("memory:", options).await.unwrap();
    home.app = App::with_tenure(tenure, home.app.config.clone()).unwrap();
    home.serve().await;
    let word = "x".repeat(64 << 10);
    let times = 400;
    let mut all = vec![Bytes::from(content_chunk(&word)); times];
    all.push(end("stop").into());
    home.model.then(Act::Raw(SSE, all, End::Well));
    let request = json!({"session_id": "s", "messages": [user("Hi")]});
    let response = home.client.post(true, request, &[]).send().await.unwrap();
    within("the turn ends without its client", async || home.stored("s").await.len() == 2).await;
    let reply = reply(response).await;
    assert_eq!((reply.status, reply.code(), reply.is_done()), (200, "too_slow", false));
    assert!(reply.said().len() < word.len() * times);
    assert_eq!(home.stored("s").await[1]["content"].as_str().unwrap().len(), word.len() * times);
}

/// An answer over `max_message_bytes` ends there with its own error. The partial answer of a stream is stored; of
/// an answer that is not streamed nothing is.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_too_large() {
    let home = Home::with("memory", true, |c| c.limits.max_message_bytes = 1000).await.unwrap();
    home.model.then(Act::Raw(SSE, vec![content_chunk(&"x".repeat(300)).into(); 10], End::Well));
    let reply = ask(&home).await;
    assert_eq!((reply.status, reply.code(), reply.is_done()), (200, "answer_too_large", false));
    assert_failed_run(&home, &[assistant(&"x".repeat(900))]).await;
    assert!(home.session("s").await.messages[1].partial);
    let home = Home::with("memory", false, |c| c.limits.max_message_bytes = 1000).await.unwrap();
    home.model.then(Act::Answer(assistant(&"x".repeat(2000))));
    let reply = ask(&home).await;
    assert_eq!((reply.status, reply.code()), (502, "answer_too_large"));
    assert_eq!(reply.headers["x-should-retry"], "false");
    assert_failed_run(&home, &[]).await;
}
