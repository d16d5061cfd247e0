//! Concurrency and time of turns: disconnects, concurrent requests, expiry, and retried requests.

use crate::in_every_way;
use crate::support::*;
use serde_json::{Value, json};
use std::sync::Arc;
use tenure::{SessionId, run::RunOutcome};
use tenure_server::auth::{NewKey, Right};
use tenure_server::config::Config;
use tokio::sync::Semaphore;

fn no_permits() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(0))
}

fn id(text: &str) -> SessionId {
    SessionId::new(text).unwrap()
}

/// Sends a request in a task of its own, which returns the response.
fn send(test: &TestServer, stream: bool, body: Value, headers: &[(&str, &str)]) -> tokio::task::JoinHandle<Reply> {
    send_observed(test, stream, body, headers).0
}

/// Sends a request in a task of its own. Also returns a receiver that resolves when the response begins: of a stream,
/// with its first chunk, or as soon as the request is queued.
fn send_observed(
    test: &TestServer,
    stream: bool,
    body: Value,
    headers: &[(&str, &str)],
) -> (tokio::task::JoinHandle<Reply>, tokio::sync::oneshot::Receiver<()>) {
    let request = test.client.post(stream, body, headers);
    let (started, when_started) = tokio::sync::oneshot::channel();
    let answer = tokio::spawn(async move {
        let response = request.send().await.unwrap();
        let _ = started.send(());
        reply(response).await
    });
    (answer, when_started)
}

/// Starts a turn that the model suspends half way. Returns the permits to continue it, and its response.
async fn start_half_a_turn(test: &TestServer, body: Value) -> (Arc<Semaphore>, tokio::task::JoinHandle<Reply>) {
    start_half_a_turn_with(test, body, &[]).await
}

async fn start_half_a_turn_with(
    test: &TestServer,
    body: Value,
    headers: &[(&str, &str)],
) -> (Arc<Semaphore>, tokio::task::JoinHandle<Reply>) {
    let (permit, session) = (no_permits(), body["session_id"].as_str().map(id));
    let before = test.model.request_count();
    test.model.then(ModelResponse::Held("Half", permit.clone(), " whole"));
    let (answer, when_started) = send_observed(test, test.stream, body, headers);
    test.model.wait_for_requests(before + 1).await;
    // The model may be called while the user's message is still being committed.
    let (tenure, principal) = (&test.app.tenure, default_principal());
    if let Some(session) = session {
        wait_until("the turn is on", async || tenure.head(&principal, &session).await.is_ok_and(|h| h.run.is_some()))
            .await;
    }
    if test.stream {
        when_started.await.unwrap();
    }
    (permit, answer)
}

async fn wait_for_messages(test: &TestServer, session: &str, count: usize) {
    let condition = format!("{session} has {count} messages");
    wait_until(&condition, async || test.stored(session).await.len() == count).await;
}

fn ask(session: &str, text: &str) -> Value {
    json!({"session_id": session, "messages": [user(text)]})
}

fn busy(session: &str, text: &str, rule: &str) -> Value {
    json!({"session_id": session, "on_busy": rule, "messages": [user(text)]})
}

in_every_way! {
    /// The user's message is durable while the model answers, and the answer is durable before it is acknowledged.
    async fn messages_are_durable_while_the_model_answers(test: &mut TestServer) {
        let (permit, answer) = start_half_a_turn(test, ask("s", "Hi")).await;
        // Reads through a second instance, without the cache.
        let beside = tenure::Tenure::with_store(test.app.tenure.store().clone(), tenure::Options::default());
        let stored = async || beside.load(&default_principal(), &id("s")).await.unwrap().messages.len();
        assert_eq!(stored().await, 1);
        permit.add_permits(1);
        let reply = answer.await.unwrap();
        assert_eq!(stored().await, 2, "there when the client has heard the end");
        assert_eq!(reply.content(), "Half whole");
    }

    /// A turn whose client disconnects is completed and stored.
    async fn a_client_that_disconnects(test: &mut TestServer) {
        let (permit, answer) = start_half_a_turn(test, ask("s", "Hi")).await;
        answer.abort();
        assert!(answer.await.unwrap_err().is_cancelled());
        tokio::time::sleep(std::time::Duration::from_millis(30)).await; // observation window: the turn continues
        permit.add_permits(1);
        wait_for_messages(test, "s", 2).await;
        assert_eq!(test.stored("s").await, [user("Hi"), assistant("Half whole")]);
        assert_eq!(test.session("s").await.runs[0].ended.unwrap().1, RunOutcome::Completed);
    }

    /// A client that lost the connection and sends the same request again gets the whole answer.
    async fn a_retry_after_a_disconnect(test: &mut TestServer) {
        let key = [("idempotency-key", "gone")];
        let (permit, first) = start_half_a_turn_with(test, ask("s", "Hi"), &key).await;
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        permit.add_permits(1);
        wait_for_messages(test, "s", 2).await;
        let again = test.client.chat(test.stream, ask("s", "Hi"), &key).await;
        assert_eq!((again.status, again.content(), test.model.request_count()), (200, "Half whole", 1));
        assert!(!test.stream || again.is_done());
    }

    /// With `on_disconnect: cancel`, a disconnect cancels the run; the partial answer is stored and marked as
    /// partial.
    async fn a_disconnect_that_cancels_the_run(test: &mut TestServer) {
        let body = json!({"session_id": "s", "on_disconnect": "cancel", "messages": [user("Hi")]});
        let (_permit, answer) = start_half_a_turn(test, body).await;
        answer.abort();
        assert!(answer.await.unwrap_err().is_cancelled());
        wait_until("its run is cancelled", async || test.session("s").await.runs[0].ended.is_some()).await;
        let session = test.session("s").await;
        assert_eq!((session.runs[0].ended.unwrap().1, session.runs[0].code.as_deref()), (RunOutcome::Cancelled, Some("cancelled")));
        let mut want = vec![user("Hi")];
        want.extend(test.stream.then(|| assistant("Half")));
        assert_eq!(test.stored("s").await, want);
        assert!(!test.stream || session.messages[1].partial);
        assert_eq!(test.chat(ask("s", "Ho")).await.status, 200, "the session is free");
    }

    /// Cancellation stores the streamed part of the answer, marked as partial, and notifies the waiting client.
    async fn cancel_stores_the_partial_answer(test: &mut TestServer) {
        let (_permit, answer) = start_half_a_turn(test, ask("s", "Hi")).await;
        let run = test.session("s").await.runs[0].id.clone();
        let url = format!("{}/sessions/s/runs/{run}/cancel", test.client.base);
        let cancelled: Value = test.client.http.post(url).send().await.unwrap().json().await.unwrap();
        assert_eq!(cancelled["status"], "cancelled", "{cancelled}");
        let reply = answer.await.unwrap();
        assert_eq!((reply.status, reply.code()), (if test.stream { 200 } else { 409 }, "cancelled"));
        assert!(test.stream || reply.headers["x-should-retry"] == "false", "SDKs would start it over");
        let url = format!("{}/sessions/s/messages", test.client.base);
        let messages: Value = test.client.http.get(url).send().await.unwrap().json().await.unwrap();
        if test.stream {
            assert_eq!(messages["data"][1]["message"], assistant("Half"));
            assert_eq!((&messages["data"][1]["partial"], messages["data"][0].get("partial")), (&json!(true), None));
            assert_eq!(cancelled["answer"], assistant("Half"));
        } else {
            assert_eq!(messages["data"].as_array().unwrap().len(), 1);
        }
        // The client continues with its part of the answer, which is not a second answer.
        let sent = json!([user("Hi"), assistant("Half"), user("Go on")]);
        let reply = test.chat(json!({"session_id": "s", "messages": sent})).await;
        assert_eq!(reply.status, 200);
        assert_eq!(test.stored("s").await[..3], sent.as_array().unwrap()[..]);
    }

    /// A stream that is queued for its session gets its headers and a comment at once.
    async fn a_queued_stream_begins_at_once(test: &mut TestServer) {
        let (permit, first) = start_half_a_turn(test, ask("s", "1")).await;
        let mut second = test.client.post(true, ask("s", "2"), &[]).send().await.unwrap();
        assert_eq!((second.status().as_u16(), second.headers()["x-session-id"].to_str().unwrap()), (200, "s"));
        assert_eq!(second.chunk().await.unwrap().unwrap(), ": queued\n\n");
        assert_eq!(test.model.request_count(), 1);
        permit.add_permits(1);
        assert_eq!(first.await.unwrap().content(), "Half whole");
        let rest = reply(second).await;
        assert_eq!((rest.content(), rest.is_done()), ("answer 2", true));
        // Later errors are sent in the stream.
        let (permit, first) = start_half_a_turn(test, ask("s", "3")).await;
        test.model.then(ModelResponse::Error(400, "application/json", "{}", None));
        let fourth = test.client.post(true, ask("s", "4"), &[]).send().await.unwrap();
        permit.add_permits(1);
        first.await.unwrap();
        let fourth = reply(fourth).await;
        assert_eq!((fourth.status, fourth.code(), fourth.is_done()), (200, "upstream_refused", false));
    }

    /// The response names its run, so that it can be cancelled.
    async fn the_answer_names_its_run(test: &mut TestServer) {
        let reply = test.chat(ask("s", "Hi")).await;
        let run = test.session("s").await.runs[0].id.to_string();
        assert_eq!((reply.body["run_id"].as_str(), reply.headers["x-run-id"].to_str().unwrap()), (Some(&*run), &*run));
    }

    /// The session's model changes only when another one has answered.
    async fn a_model_that_fails_does_not_become_the_sessions(test: &mut TestServer) {
        let other = json!({"session_id": "s", "model": "rehearsal", "messages": [user("Hi")]});
        let refuse = || ModelResponse::Error(400, "application/json", "{}", None);
        test.model.then(refuse());
        assert_eq!(test.chat(ask("s", "Hi")).await.status, 400);
        assert_eq!(test.session("s").await.head().info.model, None, "nothing has answered");
        test.chat(other).await;
        assert_eq!(test.session("s").await.head().info.model.as_deref(), Some("rehearsal"));
        test.model.then(refuse());
        let back = json!({"session_id": "s", "model": "default", "messages": [user("Ho")]});
        assert_eq!(test.chat(back.clone()).await.status, 400);
        assert_eq!(test.session("s").await.head().info.model.as_deref(), Some("rehearsal"));
        test.chat(back).await;
        assert_eq!(test.session("s").await.head().info.model.as_deref(), Some("default"));
    }

    /// `queue`: one after the other, in order of arrival.
    async fn queue(test: &mut TestServer) {
        let (permit, first) = start_half_a_turn(test, ask("s", "1")).await;
        let mut queued = Vec::new();
        for i in 2..5 {
            // Streamed: the response begins when the request is queued.
            let (answer, when_queued) = send_observed(test, true, busy("s", &i.to_string(), "queue"), &[]);
            when_queued.await.unwrap();
            queued.push(answer);
        }
        queued.push(send(test, test.stream, busy("s", "5", "queue"), &[]));
        assert_eq!(test.model.request_count(), 1, "they wait");
        permit.add_permits(1);
        assert_eq!(first.await.unwrap().content(), "Half whole");
        for other in queued {
            assert_eq!(other.await.unwrap().status, 200);
        }
        let contents: Vec<Value> = test.stored("s").await.iter().map(|m| m["content"].clone()).collect();
        assert_eq!(contents, ["1", "Half whole", "2", "answer 2", "3", "answer 3", "4", "answer 4", "5", "answer 5"]);
    }

    /// `reject`: 409, and nothing is stored.
    async fn reject(test: &mut TestServer) {
        let (permit, first) = start_half_a_turn(test, ask("s", "1")).await;
        let reply = test.chat(busy("s", "2", "reject")).await;
        assert_eq!((reply.status, reply.code()), (409, "busy"));
        permit.add_permits(1);
        assert_eq!(first.await.unwrap().content(), "Half whole");
        assert_eq!(test.stored("s").await.len(), 2);
        assert_eq!(test.chat(busy("s", "2", "reject")).await.status, 200);
    }

    /// `interrupt`: the first turn stores its partial answer, marked as interrupted; its client is notified.
    async fn interrupt(test: &mut TestServer) {
        let (_permit, first) = start_half_a_turn(test, ask("s", "1")).await;
        let second = test.chat(busy("s", "2", "interrupt")).await;
        assert_eq!(second.content(), "answer 2");
        let first = first.await.unwrap();
        assert_eq!((first.status, first.code()), (if test.stream { 200 } else { 409 }, "interrupted"));
        let mut want = vec![user("1")];
        want.extend(test.stream.then(|| assistant("Half")));
        want.push(user("2"));
        assert_eq!(test.model.last_messages(), want);
        want.push(assistant("answer 2"));
        assert_eq!(test.stored("s").await, want);
        let outcomes: Vec<_> = test.session("s").await.runs.iter().map(|r| r.ended.unwrap().1).collect();
        assert_eq!(outcomes, [RunOutcome::Cancelled, RunOutcome::Completed]);
    }

    /// `branch`: the second request continues in a fork from before the running turn; both are stored.
    async fn branch(test: &mut TestServer) {
        test.chat(ask("s", "0")).await;
        let (permit, first) = start_half_a_turn(test, ask("s", "1")).await;
        let second = test.chat(busy("s", "2", "branch")).await;
        let fork = second.session_id();
        assert_ne!(fork, "s");
        assert_eq!(second.body["session_id"], fork.as_str());
        permit.add_permits(1);
        assert_eq!(first.await.unwrap().content(), "Half whole");
        let root = [user("0"), assistant("answer 1")];
        assert_eq!(test.stored("s").await, [&root[..], &[user("1"), assistant("Half whole")]].concat());
        assert_eq!(test.stored(&fork).await, [&root[..], &[user("2"), assistant("answer 3")]].concat());
    }

    /// Rewound, deleted, purged or replaced while the model answers: the turn fails with an error, and nothing
    /// partial is written.
    async fn superseded(test: &mut TestServer) {
        for way in ["rewind", "delete", "purge", "replace", "replace after purge"] {
            let session = way.replace(' ', "-");
            test.chat(ask(&session, "0")).await;
            let (permit, first) = start_half_a_turn(test, ask(&session, "1")).await;
            let (tenure, principal, at) = (&test.app.tenure, default_principal(), id(&session));
            let other = vec![tenure::Message::user("new"); 9];
            let import = async || {
                let export = tenure::session::Export { messages: other.clone(), ..Default::default() };
                tenure.import(&principal, &at, export, None).await.unwrap();
            };
            match way {
                "rewind" => drop(tenure.rewind(&principal, &at, tenure::Point::Position(2)).await.unwrap()),
                "delete" => assert!(tenure.delete(&principal, &at, None).await.unwrap()),
                "purge" => assert!(tenure.purge(&principal, &at, None).await.unwrap()),
                "replace" => import().await,
                _ => {
                    assert!(tenure.purge(&principal, &at, None).await.unwrap());
                    import().await;
                }
            }
            permit.add_permits(1);
            let first = first.await.unwrap();
            assert_eq!((first.status, first.code()), (if test.stream { 200 } else { 409 }, "superseded"), "{way}");
            assert!(!first.is_done());
            let loaded = tenure.load_any(&principal, &at).await.map(|s| s.messages.len());
            match way {
                "rewind" => assert_eq!(loaded.unwrap(), 2),
                "delete" => assert_eq!(loaded.unwrap(), 3),
                "purge" => assert!(matches!(loaded, Err(tenure::Error::NotFound { .. }))),
                _ => assert_eq!(loaded.unwrap(), 9, "{way}"),
            }
        }
    }

    /// Requests with the same key get the same response: concurrently, later, and after a restart; another body is 422.
    async fn idempotency(test: &mut TestServer) {
        let key = [("idempotency-key", "k 1")];
        let body = json!({"messages": [user("Hi")]});
        let permit = no_permits();
        test.model.then(ModelResponse::Held("Half", permit.clone(), " whole"));
        // Two concurrent requests, as from an impatient client; neither names the session.
        let first = send(test, test.stream, body.clone(), &key);
        test.model.wait_for_requests(1).await;
        let second = send(test, test.stream, body.clone(), &key);
        tokio::time::sleep(std::time::Duration::from_millis(60)).await; // observation window: the second one waits
        permit.add_permits(1);
        let (first, second) = (first.await.unwrap(), second.await.unwrap());
        assert_eq!((first.content(), second.content()), ("Half whole", "Half whole"));
        assert_eq!(second.text, first.text, "the same bytes");
        assert_eq!(first.report(), [0, 0, 0, 1]);
        let session = first.session_id();
        assert_eq!(second.session_id(), session);
        assert!(!test.stream || second.is_done());
        test.restart().await;
        let third = test.client.chat(test.stream, body.clone(), &key).await;
        assert_eq!((third.content(), third.session_id()), ("Half whole", session.clone()));
        assert_eq!(third.text, first.text, "the same bytes, after a restart");
        assert_eq!(third.body["choices"][0]["finish_reason"], "stop");
        assert_eq!((test.model.request_count(), test.sessions().await), (1, 1));
        assert_eq!(test.stored(&session).await.len(), 2);
        let reply = test.client.chat(test.stream, json!({"messages": [user("Ho")]}), &key).await;
        assert_eq!((reply.status, reply.code()), (422, "idempotency_key_reused"));
        // Idempotency keys of another user are separate.
        let reply = test.client.chat(test.stream, json!({"messages": [user("Ho")]}), &[key[0], ("x-tenure-user", "bob")]).await;
        assert_eq!(reply.status, 200);
        // A retry with the same key does not interrupt, branch or reject its own first attempt.
        for rule in ["interrupt", "branch", "reject"] {
            let key = [("idempotency-key", rule)];
            let permit = no_permits();
            test.model.then(ModelResponse::Held("Half", permit.clone(), " whole"));
            let before = test.model.request_count();
            let first = send(test, test.stream, busy(rule, "Hi", rule), &key);
            test.model.wait_for_requests(before + 1).await;
            let second = send(test, test.stream, busy(rule, "Hi", rule), &key);
            // Observation window: the second one waits.
            tokio::time::sleep(std::time::Duration::from_millis(60)).await;
            permit.add_permits(1);
            assert_eq!((first.await.unwrap().content(), second.await.unwrap().content()), ("Half whole", "Half whole"));
            assert_eq!(test.stored(rule).await.len(), 2);
        }
    }

    /// A failed turn is completed by the same request with the same key; the question is not duplicated, and a
    /// partial answer does not count as the answer.
    async fn idempotency_after_a_failure(test: &mut TestServer) {
        let (body, key) = (json!({"session_id": "s", "history": "append", "messages": [user("Hi")]}), [("idempotency-key", "k")]);
        test.model.then(if test.stream {
            ModelResponse::Raw("text/event-stream", vec![chunk(json!({"content": "Half"}), Value::Null).into()], StreamEnd::Aborted)
        } else {
            ModelResponse::Error(500, "text/plain", "oh", None)
        });
        let reply = test.client.chat(test.stream, body.clone(), &key).await;
        assert!(reply.status == 500 || reply.code() == "upstream_broken");
        let reply = test.client.chat(test.stream, body.clone(), &key).await;
        assert_eq!(reply.content(), "answer 2");
        assert_eq!(test.model.last_messages(), [user("Hi")]);
        assert_eq!(test.stored("s").await, [user("Hi"), assistant("answer 2")]);
        let reply = test.client.chat(test.stream, body, &key).await;
        assert_eq!((reply.content(), test.model.request_count()), ("answer 2", 2));
    }

    /// A paused session refuses turns.
    async fn paused(test: &mut TestServer) {
        test.chat(ask("s", "Hi")).await;
        test.app.tenure.pause(&default_principal(), &id("s"), None).await.unwrap();
        let reply = test.chat(ask("s", "More")).await;
        assert_eq!((reply.status, reply.code(), test.model.request_count()), (409, "paused", 1));
        test.app.tenure.activate(&default_principal(), &id("s")).await.unwrap();
        assert_eq!(test.chat(ask("s", "More")).await.status, 200);
    }

    /// A request to a deleted session is refused with a hint how to restore it; after that it succeeds.
    async fn a_deleted_session_is_refused(test: &mut TestServer) {
        test.chat(ask("s", "Hi")).await;
        test.app.tenure.delete(&default_principal(), &id("s"), None).await.unwrap();
        for keep in [true, false] {
            let mut again = ask("s", "Again");
            again["store"] = json!(keep);
            let reply = test.chat(again).await;
            assert_eq!((reply.status, reply.code(), test.model.request_count()), (410, "gone", 1), "{}", reply.text);
            assert!(reply.text.contains("POST /sessions/s/restore"), "{}", reply.text);
        }
        test.app.tenure.restore(&default_principal(), &id("s"), None).await.unwrap();
        let reply = test.chat(ask("s", "Again")).await;
        assert_eq!((reply.status, test.model.last_messages().len(), test.stored("s").await.len()), (200, 3, 4));
    }

    /// Another user's session is not visible, and not changed.
    async fn a_session_of_another_user(test: &mut TestServer) {
        test.client.chat(test.stream, ask("s", "Secret"), &[("x-tenure-user", "ada")]).await;
        // A caller without a key is an administrator; a key that is bound to a user is not.
        let bob = tenure::User::new("bob").unwrap();
        let (_, secret) = test.app.keys.add(NewKey { user: Some(bob), rights: vec![Right::Write], ..NewKey::default() }).await.unwrap();
        let bearer = format!("Bearer {secret}");
        let reply = test.client.chat(test.stream, ask("s", "Mine?"), &[("authorization", &bearer)]).await;
        assert_eq!((reply.status, reply.code(), test.model.request_count()), (404, "not_found", 1));
        assert!(!reply.text.contains("Secret"));
    }
}

/// At most `max_queue` requests wait.
#[tokio::test(flavor = "multi_thread")]
async fn the_queue_is_bounded() {
    let test = TestServer::with(StoreKind::Memory, false, |c| c.limits.max_queue = 2).await.unwrap();
    let (permit, first) = start_half_a_turn(&test, ask("s", "1")).await;
    let waiting = ["2", "3"].map(|text| send_observed(&test, true, ask("s", text), &[]));
    let [(two, two_queued), (three, three_queued)] = waiting;
    // The response to a streamed request begins when it is queued.
    two_queued.await.unwrap();
    three_queued.await.unwrap();
    let reply = test.chat(ask("s", "4")).await;
    assert_eq!((reply.status, reply.body["error"]["param"].as_str()), (429, Some("max_queue")));
    // Another session is not affected.
    assert_eq!(test.chat(ask("other", "1")).await.status, 200);
    permit.add_permits(1);
    assert_eq!(first.await.unwrap().status, 200);
    for answer in [two, three] {
        assert_eq!(answer.await.unwrap().status, 200);
    }
    assert_eq!(test.stored("s").await.len(), 6);
}

/// A request to an expired session: it is restored, a new one begins, or the request is refused.
#[tokio::test(flavor = "multi_thread")]
async fn on_expired() {
    for (rule, shown, status) in [("restore", 3, 200), ("fresh", 1, 200), ("reject", 1, 410)] {
        let change = |config: &mut Config| {
            config.sessions.ttl = "300ms".parse().unwrap();
            config.sessions.on_expired = serde_json::from_value(json!(rule)).unwrap();
        };
        let test = TestServer::with(StoreKind::Sqlite, false, change).await.unwrap();
        test.chat(ask("s", "Hi")).await;
        let (tenure, principal, id) = (&test.app.tenure, default_principal(), id("s"));
        wait_until("it has expired", async || tenure.get_live_head(&principal, &id).await.is_err()).await;
        let reply = test.chat(ask("s", "Back")).await;
        assert_eq!((reply.status, test.model.last_messages().len()), (status, shown), "{rule}");
        assert_eq!(reply.code(), if rule == "reject" { "gone" } else { "" });
        let mut query = tenure::session::SessionQuery::new(tenure::session::OwnerFilter::AllTenants, 9);
        query.status = vec![tenure::session::Status::Expired];
        let ended = test.app.tenure.store().heads(&query).await.unwrap();
        assert_eq!(ended.len(), usize::from(rule == "fresh"), "{rule}");
        for head in ended {
            let old = test.stored(head.info.session_id.as_str()).await;
            assert_eq!(old, [user("Hi"), assistant("answer 1")]);
        }
    }
}

/// `on_disconnect` by configuration and by assistant; the request takes precedence.
#[tokio::test(flavor = "multi_thread")]
async fn precedence_of_on_disconnect_settings() {
    let agent = json!({"name": "agent", "model": "default", "sessions": {"on_disconnect": "finish"}});
    let change = |config: &mut Config| {
        config.sessions.on_disconnect = tenure::policy::OnDisconnect::Cancel;
        config.assistants = vec![serde_json::from_value(agent).unwrap()];
    };
    let test = TestServer::with(StoreKind::Sqlite, true, change).await.unwrap();
    for (session, more, outcome) in [
        ("configured", json!({}), RunOutcome::Cancelled),
        ("requested", json!({"on_disconnect": "finish"}), RunOutcome::Completed),
        ("assistant", json!({"model": "agent"}), RunOutcome::Completed),
    ] {
        let mut body = ask(session, "Hi");
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (permit, answer) = start_half_a_turn(&test, body).await;
        answer.abort();
        assert!(answer.await.unwrap_err().is_cancelled());
        if outcome == RunOutcome::Completed {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await; // observation window: the turn continues
            permit.add_permits(1);
        }
        wait_until("the run has ended", async || test.session(session).await.runs[0].ended.is_some()).await;
        assert_eq!(test.session(session).await.runs[0].ended.unwrap().1, outcome, "{session}");
    }
}

/// An unknown model is refused, unless a server has `pass_unknown`; a mistyped assistant is not passed on as a
/// model.
#[tokio::test(flavor = "multi_thread")]
async fn unknown_models_and_other_assistants() {
    let agent = json!({"name": "agent", "model": "default"});
    let other = json!({"name": "other", "model": "default"});
    let assistants =
        || vec![serde_json::from_value(agent.clone()).unwrap(), serde_json::from_value(other.clone()).unwrap()];
    let test = TestServer::with(StoreKind::Sqlite, false, |config| config.assistants = assistants()).await.unwrap();
    let chat = async |test: &TestServer, session: &str, model: &str| {
        test.chat(json!({"session_id": session, "model": model, "messages": [user("Hi")]})).await
    };
    for unknown in ["agnet", "gpt-9"] {
        let reply = chat(&test, "s", unknown).await;
        assert_eq!((reply.status, reply.code()), (404, "model_not_found"));
        assert!(reply.text.contains("configured models: default (GET"), "{}", reply.text);
    }
    assert_eq!((test.sessions().await, test.model.request_count()), (0, 0));
    assert_eq!(chat(&test, "s", "agent").await.status, 200);
    let reply = chat(&test, "s", "other").await;
    assert_eq!((reply.status, reply.code()), (409, "other_assistant"));
    assert!(reply.text.contains("agent") && reply.text.contains("another session id"), "{}", reply.text);
    assert_eq!(test.stored("s").await.len(), 2, "nothing was changed");
    assert_eq!(chat(&test, "bare", "default").await.status, 200);
    assert_eq!(chat(&test, "bare", "agent").await.code(), "other_assistant");
    assert_eq!(chat(&test, "s", "agent").await.status, 200);

    let test = TestServer::with(StoreKind::Sqlite, false, |config| config.models[0].pass_unknown = true).await.unwrap();
    assert_eq!(chat(&test, "s", "gpt-9").await.status, 200);
    assert!(test.model.bodies()[0].contains(r#""model":"gpt-9""#), "under its own name");
}

/// How messages are merged: set by the request, else the assistant, else the key, else the configuration.
#[tokio::test(flavor = "multi_thread")]
async fn precedence_of_history_settings() {
    let change = |config: &mut Config| {
        config.sessions.history = tenure::policy::HistoryMode::Full;
        let agent = json!({"name": "agent", "model": "default", "sessions": {"history": "append"}});
        config.assistants = vec![serde_json::from_value(agent).unwrap()];
    };
    let test = TestServer::with(StoreKind::Sqlite, false, change).await.unwrap();
    let (tenant, rights) = (default_principal().tenant, vec![Right::Read, Right::Write]);
    let history = Some(tenure::policy::HistoryMode::Append);
    let (_, key) = test
        .app
        .keys
        .add(NewKey { tenant: tenant.clone(), rights: rights.clone(), history, ..NewKey::default() })
        .await
        .unwrap();
    let (_, plain) = test.app.keys.add(NewKey { tenant, rights, ..NewKey::default() }).await.unwrap();
    let lone = async |session: &str, key: &str, more: Value| {
        let bearer = format!("Bearer {key}");
        let headers = [("authorization", bearer.as_str())];
        for text in ["one", "two"] {
            let mut body = ask(session, text);
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            assert_eq!(test.client.chat(false, body, &headers).await.status, 200);
        }
        test.stored(session).await.len()
    };
    assert_eq!(lone("configured", &plain, json!({})).await, 2, "a lone message is the whole history");
    assert_eq!(lone("by-key", &key, json!({})).await, 4);
    assert_eq!(lone("by-assistant", &plain, json!({"model": "agent"})).await, 4);
    assert_eq!(lone("by-request", &key, json!({"model": "agent", "history": "full"})).await, 2);
    let wrong = json!({"session_id": "x", "history": "all", "messages": [user("Hi")]});
    let bearer = format!("Bearer {plain}");
    let reply = test.client.chat(false, wrong, &[("authorization", &bearer)]).await;
    assert_eq!((reply.status, reply.body["error"]["param"].as_str()), (400, Some("history")));
}

/// Chat applications name the conversation in their own headers (`id_headers`).
#[tokio::test(flavor = "multi_thread")]
async fn other_headers_can_name_the_session() {
    let change = |config: &mut Config| config.sessions.id_headers = vec!["X-Conversation-Id".into(), "X-Chat".into()];
    let test = TestServer::with(StoreKind::Sqlite, false, change).await.unwrap();
    let chat =
        async |headers: &[(&str, &str)]| test.client.chat(false, json!({"messages": [user("Hi")]}), headers).await;
    assert_eq!(chat(&[("x-conversation-id", "c-1")]).await.session_id(), "c-1");
    assert_eq!(chat(&[("x-chat", "c-2")]).await.session_id(), "c-2");
    assert_eq!(chat(&[("x-chat", "c-2"), ("x-conversation-id", "c-1")]).await.session_id(), "c-1");
    assert_eq!(chat(&[("x-conversation-id", "c-1"), ("x-session-id", "mine")]).await.session_id(), "mine");
    for none in ["", "new", "null"] {
        let id = chat(&[("x-conversation-id", none)]).await.session_id();
        assert!(!["", "new", "null", "c-1"].contains(&id.as_str()), "{none:?} names no conversation");
    }
    assert_eq!(chat(&[("x-conversation-id", "a\tb/../c")]).await.status, 400);
}

/// Results of unknown calls, in an empty session: there is nothing to answer.
#[tokio::test(flavor = "multi_thread")]
async fn only_unknown_tool_results() {
    let test = TestServer::new(StoreKind::Sqlite, false).await.unwrap();
    let reply = test.chat(json!({"session_id": "s", "messages": [tool("c9", "r")]})).await;
    assert_eq!((reply.status, reply.body["error"]["param"].as_str()), (400, Some("messages")));
    assert!(reply.text.contains("c9"), "{}", reply.text);
    assert_eq!((test.sessions().await, test.model.request_count()), (0, 0), "nothing was changed");
}

/// Not every server generates unique call ids: the same id with other arguments is another conversation.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_id_alone_does_not_make_a_session() {
    let test = TestServer::new(StoreKind::Sqlite, false).await.unwrap();
    test.model.then(ModelResponse::ToolCalls(vec![("functions.search:0", "search", r#"{"q":"house"}"#)]));
    test.chat(json!({"session_id": "alice", "messages": [user("I earn 1234. Find me a house.")]})).await;
    let other = json!([
        user("weather in Rome?"),
        call("functions.search:0", "search", r#"{"q":"rome"}"#),
        tool("functions.search:0", "sun"),
    ]);
    let reply = test.chat(json!({"messages": other})).await;
    assert_ne!(reply.session_id(), "alice");
    assert_eq!(test.stored("alice").await.len(), 2);
    let same = json!([
        user("I earn 1234. Find me a house."),
        call("functions.search:0", "search", r#"{"q":"house"}"#),
        tool("functions.search:0", "found"),
    ]);
    assert_eq!(test.chat(json!({"messages": same})).await.session_id(), "alice");
    // A common greeting does not match either, if the client has answers that the session has not given.
    test.model.then(ModelResponse::Text("Hello!"));
    test.chat(json!({"session_id": "hi", "messages": [user("hi")]})).await;
    let other = json!([user("hi"), assistant("Hello!"), user("my password is X"), assistant("I see."), user("and?")]);
    assert_ne!(test.chat(json!({"messages": other})).await.session_id(), "hi");
    let same = json!([user("hi"), assistant("Hello!"), user("how are you?")]);
    assert_eq!(test.chat(json!({"messages": same})).await.session_id(), "hi");
}
