//! Model servers that fail, hang, break the stream or send garbage: the client's response, and the stored session.

use crate::in_every_way;
use crate::support::*;
use axum::body::Bytes;
use serde_json::{Value, json};
use std::time::Duration;
use tenure::{Options, Tenure, run::RunOutcome};
use tenure_server::app::App;
use tenure_server::config::Config;

fn byte_chunks(text: &str, size: usize) -> Vec<Bytes> {
    text.as_bytes().chunks(size).map(Bytes::copy_from_slice).collect()
}

const SSE: &str = "text/event-stream";

fn content_chunk(text: &str) -> String {
    chunk(json!({"role": "assistant", "content": text}), Value::Null)
}

async fn ask(test: &TestServer) -> Reply {
    test.chat(json!({"session_id": "s", "messages": [user("Hi")]})).await
}

/// Asserts that the user's message is stored, the run has failed, and there is nothing else.
async fn assert_failed_run(test: &TestServer, stored_part: &[Value]) {
    let mut want = vec![user("Hi")];
    want.extend_from_slice(stored_part);
    assert_eq!(test.stored("s").await, want);
    let session = test.session("s").await;
    let run = session.runs.last().unwrap();
    assert_eq!(run.ended.unwrap().1, RunOutcome::Failed);
    assert!(run.error.is_some());
}

in_every_way! {
    /// An error of the model server is passed on: status, type, body, `Retry-After`. The retry is not a second
    /// question.
    async fn errors_are_passed_on(test: &mut TestServer) {
        let body = r#"{"error": {"message":"slow down","type":"tokens","code":null}}"#;
        test.model
            .then(ModelResponse::Error(429, "application/json; charset=utf-8", body, Some("7")))
            .then(ModelResponse::Error(400, "text/html", "<p>no</p>", None));
        let reply = ask(test).await;
        assert_eq!((reply.status, reply.text.as_str()), (429, body));
        assert_eq!(reply.headers["content-type"], "application/json; charset=utf-8");
        assert_eq!(reply.headers["retry-after"], "7");
        assert_eq!(reply.session_id(), "s");
        assert_failed_run(test, &[]).await;
        let reply = ask(test).await;
        assert_eq!((reply.status, reply.text.as_str()), (400, "<p>no</p>"));
        assert_eq!(reply.headers["content-type"], "text/html");
        assert_failed_run(test, &[]).await;
        let reply = ask(test).await;
        assert_eq!((reply.content(), reply.report()), ("answer 3", [1, 0, 0, 0]));
        assert_eq!(test.model.last_messages(), [user("Hi")]);
        assert_eq!(test.stored("s").await, [user("Hi"), assistant("answer 3")]);
    }

    /// A stream that breaks off: the partial answer is stored and marked as partial. The same question again is a
    /// retry, which replaces it; with `history: append` nothing is ever rewound.
    async fn a_stream_that_breaks_off(test: &mut TestServer) {
        if !test.stream {
            return;
        }
        for mode in ["auto", "append"] {
            test.model.then(ModelResponse::Raw(SSE, vec![content_chunk("Half an").into(), content_chunk(" ans").into()], StreamEnd::Aborted));
            let ask = async || test.chat(json!({"session_id": mode, "history": mode, "messages": [user("Hi")]})).await;
            let reply = ask().await;
            assert_eq!((reply.status, reply.code(), reply.content()), (200, "upstream_broken", "Half an ans"));
            assert!(!reply.is_done());
            assert_eq!(test.stored(mode).await, [user("Hi"), assistant("Half an ans")]);
            assert_eq!(test.session(mode).await.runs[0].ended.unwrap().1, RunOutcome::Failed);
            assert!(test.session(mode).await.messages[1].partial);
            test.model.then(ModelResponse::Text("Whole."));
            let reply = ask().await;
            let (report, before) = match mode {
                "auto" => ([1, 0, 1, 0], vec![user("Hi")]),
                _ => ([0, 0, 0, 1], vec![user("Hi"), assistant("Half an ans"), user("Hi")]),
            };
            assert_eq!((reply.content(), reply.report()), ("Whole.", report));
            assert_eq!(test.model.last_messages(), before);
            assert_eq!(test.stored(mode).await, [before, vec![assistant("Whole.")]].concat());
        }
    }

    /// A model server that sends nothing times out.
    async fn silence(test: &mut TestServer) {
        test.model.then(ModelResponse::Hang);
        let reply = ask(test).await;
        assert_eq!((reply.status, reply.code()), (504, "upstream_timeout"));
        assert!(reply.text.contains("idle_timeout"));
        assert_failed_run(test, &[]).await;
        assert_eq!(test.model.request_count(), 1, "it may be at work: not asked again");
    }
}

/// A timeout in the middle of a stream, or of a body.
#[tokio::test(flavor = "multi_thread")]
async fn silence_during_a_stream() {
    let test = TestServer::new(StoreKind::Memory, true).await.unwrap();
    test.model.then(ModelResponse::Raw(SSE, vec![content_chunk("Half").into()], StreamEnd::Stalled));
    let reply = ask(&test).await;
    assert_eq!((reply.status, reply.code(), reply.is_done()), (200, "upstream_timeout", false));
    assert_failed_run(&test, &[assistant("Half")]).await;
    let test = TestServer::new(StoreKind::Memory, false).await.unwrap();
    test.model.then(ModelResponse::Raw("application/json", vec!["{\"choices\"".into()], StreamEnd::Stalled));
    assert_eq!(ask(&test).await.status, 504);
    test.model.then(ModelResponse::Raw("application/json", vec!["{\"choices\"".into()], StreamEnd::Aborted));
    let reply = ask(&test).await;
    assert_eq!((reply.status, reply.code()), (502, "upstream_broken"));
    assert_failed_run(&test, &[]).await;
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
                let test = TestServer::new(StoreKind::Memory, true).await.unwrap();
                let mut all: Vec<Bytes> =
                    first.filter(|_| kind == SSE).map(|f| content_chunk(f).into()).into_iter().collect();
                let has_output = !all.is_empty();
                all.extend(bytes.clone());
                test.model.then(ModelResponse::Raw(kind, all, StreamEnd::Complete));
                let request = json!({"session_id": "s", "store": store, "messages": [user("Hi")]});
                let response = test.client.post(true, request, &[]).send().await.unwrap();
                let (status, text) = (response.status().as_u16(), response.text().await.unwrap());
                assert_eq!(status, if has_output { 200 } else { 502 }, "{kind} {bytes:?}: {text}");
                assert!(text.contains(r#""code":"upstream_broken""#), "{kind} {bytes:?}: {text}");
                assert!(!text.contains("[DONE]"), "{kind} {bytes:?}: {text}");
                match store {
                    true if has_output => assert_failed_run(&test, &[assistant("Half")]).await,
                    true => assert_failed_run(&test, &[]).await,
                    false => assert_eq!(test.sessions().await, 0),
                }
            }
        }
    }
    for body in
        ["", "[]", "{}", "{\"choices\":[]}", "{\"choices\":[{\"message\":7}]}", "<html>", "{\"error\":{}}", "null"]
    {
        let test = TestServer::new(StoreKind::Memory, false).await.unwrap();
        test.model.then(ModelResponse::Raw("application/json", vec![body.into()], StreamEnd::Complete));
        let reply = ask(&test).await;
        assert_eq!((reply.status, reply.code()), (502, "upstream_broken"), "{body}: {reply:?}");
        assert_failed_run(&test, &[]).await;
    }
}

/// Valid streams in unusual forms: any chunks, any line ends, comments, no `[DONE]`, no last empty line, whole
/// answers.
#[tokio::test(flavor = "multi_thread")]
async fn unusual_but_valid_streams() {
    let plain = format!(
        "{}{}{}",
        content_chunk("Grüezi "),
        chunk(json!({"content": "mitenand 👋"}), Value::Null),
        end_of_stream("stop")
    );
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
            let test = TestServer::new(StoreKind::Memory, true).await.unwrap();
            test.model.then(ModelResponse::Raw(kind, byte_chunks(&text, size), StreamEnd::Complete));
            let response =
                test.client.post(true, json!({"session_id": "s", "store": store, "messages": [user("Hi")]}), &[]);
            let response = response.send().await.unwrap();
            assert_eq!(response.headers()["content-type"], SSE, "{text:?}");
            if !store {
                assert!(response.text().await.unwrap().ends_with("data: [DONE]\n\n"), "{text:?}");
                continue;
            }
            let reply = reply(response).await;
            assert_eq!(
                (reply.content(), reply.is_done()),
                ("Grüezi mitenand 👋", true),
                "in parts of {size}: {text:?}"
            );
            assert_eq!(test.stored("s").await, [user("Hi"), assistant("Grüezi mitenand 👋")]);
        }
    }
}

/// A request is retried only if there was no answer: the server was unreachable, or not ready.
#[tokio::test(flavor = "multi_thread")]
async fn retries() {
    for stream in [false, true] {
        let test = TestServer::with(StoreKind::Memory, stream, |c| c.models[0].retries = 2).await.unwrap();
        test.model.then(ModelResponse::Error(503, "text/plain", "starting", None)).then(ModelResponse::Error(
            502,
            "text/plain",
            "",
            None,
        ));
        assert_eq!(ask(&test).await.content(), "answer 3");
        assert_eq!(test.stored("s").await.len(), 2);
        for (act, times) in [
            (ModelResponse::Error(429, "text/plain", "", None), 1),
            (ModelResponse::Error(500, "text/plain", "", None), 1),
            (ModelResponse::Error(503, "text/plain", "starting", None), 3),
            (ModelResponse::Hang, 1),
            (ModelResponse::Raw(SSE, vec![content_chunk("Half").into()], StreamEnd::Aborted), 1),
        ] {
            let change = |c: &mut Config| {
                c.models[0].retries = 2;
                c.runs.retry_wait = "0s".parse().unwrap();
            };
            let test = TestServer::with(StoreKind::Memory, stream, change).await.unwrap();
            for _ in 0..times {
                test.model.then(act.clone());
            }
            ask(&test).await;
            assert_eq!(test.model.request_count(), times, "{act:?}");
            let half = [assistant("Half")];
            assert_failed_run(&test, if stream && matches!(act, ModelResponse::Raw(..)) { &half } else { &[] }).await;
        }
        // No server is listening.
        let test =
            TestServer::with(StoreKind::Memory, stream, |c| c.models[0].base_url = "http://127.0.0.1:9/v1".into())
                .await
                .unwrap();
        let reply = ask(&test).await;
        assert_eq!((reply.status, reply.code()), (502, "upstream_unreachable"));
        assert_failed_run(&test, &[]).await;
    }
}

/// Chunks are passed on as they arrive, not buffered until the answer is complete.
#[tokio::test(flavor = "multi_thread")]
async fn chunks_are_not_held_back() {
    let test = TestServer::new(StoreKind::Memory, true).await.unwrap();
    let permit = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
    test.model.then(ModelResponse::Held("One", permit.clone(), " two"));
    let mut response = test.client.post(true, json!({"messages": [user("Hi")]}), &[]).send().await.unwrap();
    let first = tokio::time::timeout(Duration::from_secs(60), response.chunk()).await.expect("before the second");
    assert!(std::str::from_utf8(&first.unwrap().unwrap()).unwrap().contains("One"));
    permit.add_permits(1);
    assert!(response.text().await.unwrap().ends_with("data: [DONE]\n\n"));
}

/// A client that reads nothing for too long gets an error event. The whole answer is stored.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_too_slow() {
    let mut test = TestServer::new(StoreKind::Memory, true).await.unwrap();
    let mut options = Options::default();
    options.limits.max_stall = Duration::from_millis(100);
    let tenure = Tenure::open_with("memory:", options).await.unwrap();
    test.app = App::with_tenure(tenure, test.app.config.clone()).unwrap();
    test.serve().await;
    let (word, times) = ("x".repeat(64 << 10), 400);
    let mut all = vec![Bytes::from(content_chunk(&word)); times];
    all.push(end_of_stream("stop").into());
    test.model.then(ModelResponse::Raw(SSE, all, StreamEnd::Complete));
    let request = json!({"session_id": "s", "messages": [user("Hi")]});
    let response = test.client.post(true, request, &[]).send().await.unwrap();
    wait_until("the turn ends without its client", async || test.stored("s").await.len() == 2).await;
    let reply = reply(response).await;
    assert_eq!((reply.status, reply.code(), reply.is_done()), (200, "too_slow", false));
    assert!(reply.content().len() < word.len() * times);
    assert_eq!(test.stored("s").await[1]["content"].as_str().unwrap().len(), word.len() * times);
}

/// An answer over `max_message_bytes` ends there with its own error. The partial answer of a stream is stored; of
/// an answer that is not streamed nothing is.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_too_large() {
    let test = TestServer::with(StoreKind::Memory, true, |c| c.limits.max_message_bytes = 1000).await.unwrap();
    test.model.then(ModelResponse::Raw(SSE, vec![content_chunk(&"x".repeat(300)).into(); 10], StreamEnd::Complete));
    let reply = ask(&test).await;
    assert_eq!((reply.status, reply.code(), reply.is_done()), (200, "answer_too_large", false));
    assert_failed_run(&test, &[assistant(&"x".repeat(900))]).await;
    assert!(test.session("s").await.messages[1].partial);
    let test = TestServer::with(StoreKind::Memory, false, |c| c.limits.max_message_bytes = 1000).await.unwrap();
    test.model.then(ModelResponse::Message(assistant(&"x".repeat(2000))));
    let reply = ask(&test).await;
    assert_eq!((reply.status, reply.code()), (502, "answer_too_large"));
    assert_eq!(reply.headers["x-should-retry"], "false");
    assert_failed_run(&test, &[]).await;
}

/// On a system without certificates of authorities, as in an empty container, the server starts and `http://` works.
#[tokio::test(flavor = "multi_thread")]
async fn http_works_without_system_certificates() {
    let model = crate::support::ScriptedModelServer::default();
    let base = model.start().await;
    let dir = tempfile::tempdir().unwrap();
    let config = format!("store: 'memory:'\nmodels: [{{name: m, base_url: '{base}'}}]");
    let env = [("SSL_CERT_FILE", "/nonexistent/file"), ("SSL_CERT_DIR", "/nonexistent")];
    let server = crate::support::ServerProcess::start_with(dir.path(), &config, &env);
    assert_eq!(server.chat("a", "hello").await.0, 200);
    let logs = server.stop();
    assert!(logs.contains("https cannot be used"), "{logs}");
}
