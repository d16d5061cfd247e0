//! Invariant 1 over HTTP: the real binary is killed with `kill -9` under load, and no acknowledged message is lost.

use crate::support::*;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tenure::{SessionId, Tenure};
use tokio::sync::Semaphore;

const CLIENTS: usize = 16;
const ROUNDS: usize = 4;

/// One client: chats until the server is gone, and counts acknowledged turns. Half of the clients use streams.
async fn chat(client: Client, n: usize, acknowledged: Arc<Vec<AtomicUsize>>) {
    let session = format!("c{n}");
    loop {
        let turn = acknowledged[n].load(Ordering::SeqCst);
        // A turn whose response was lost is sent again: the same text is a retry.
        let body = json!({"session_id": session, "history": "append", "messages": [user(&format!("question {turn}"))]});
        let Ok(response) = client.post(n.is_multiple_of(2), body, &[]).send().await else { return };
        assert_eq!(response.status(), 200);
        let Ok(text) = response.text().await else { return };
        let is_complete = if n.is_multiple_of(2) { text.ends_with("data: [DONE]\n\n") } else { text.ends_with('}') };
        if !is_complete {
            return;
        }
        acknowledged[n].fetch_add(1, Ordering::SeqCst);
    }
}

/// One client that appends messages itself, a turn at a time.
async fn write(client: Client, n: usize, acknowledged: Arc<Vec<AtomicUsize>>) {
    let session = format!("c{n}");
    let post = |route: String, body: Value| client.http.post(format!("{}{route}", client.base)).json(&body).send();
    let Ok(created) = post("/sessions".to_owned(), json!({"id": session})).await else { return };
    assert!([201, 409].contains(&created.status().as_u16()), "{}", created.status());
    loop {
        let turn = acknowledged[n].load(Ordering::SeqCst);
        let messages = [user(&format!("question {turn}")), assistant("written")];
        let Ok(appended) = post(format!("/sessions/{session}/messages"), json!({"messages": messages})).await else {
            return;
        };
        assert_eq!(appended.status(), 201);
        if appended.bytes().await.is_err() {
            return;
        }
        acknowledged[n].fetch_add(1, Ordering::SeqCst);
    }
}

async fn killed_under_load(kind: StoreKind) {
    let dir = tempfile::tempdir().unwrap();
    let Some(test_store) = TestStore::new(kind) else { return };
    let store = test_store.url().to_owned();
    let model = ScriptedModelServer::default();
    let base_url = model.start().await;
    let acknowledged: Arc<Vec<AtomicUsize>> = Arc::new((0..CLIENTS).map(|_| AtomicUsize::new(0)).collect());
    for round in 0..ROUNDS {
        let mut server = ServerProcess::with_model(dir.path(), &store, &base_url, json!({}));
        let start = |n: usize| match n % 4 {
            3 => tokio::spawn(write(server.client.clone(), n, acknowledged.clone())),
            _ => tokio::spawn(chat(server.client.clone(), n, acknowledged.clone())),
        };
        let clients: Vec<_> = (0..CLIENTS).map(start).collect();
        // The server is killed under load, after every client has made progress.
        let count = |n: &AtomicUsize| n.load(Ordering::SeqCst);
        let before: Vec<usize> = acknowledged.iter().map(count).collect();
        let more = 1 + round;
        wait_until("every client gets on", async || {
            acknowledged.iter().zip(&before).all(|(now, before)| count(now) >= before + more)
        })
        .await;
        server.kill();
        for client in clients {
            client.await.unwrap();
        }
        let tenure = Tenure::open(&store).await.unwrap();
        for (n, turns) in acknowledged.iter().enumerate() {
            let turns = turns.load(Ordering::SeqCst);
            let session = match tenure.load(&default_principal(), &SessionId::new(format!("c{n}")).unwrap()).await {
                Ok(session) => session,
                Err(tenure::Error::NotFound { .. }) if turns == 0 => continue,
                Err(e) => panic!("c{n}, round {round}: {e}"),
            };
            let stored: Vec<Value> = session.messages.iter().map(|m| m.message.to_value()).collect();
            assert!(
                stored.len() >= 2 * turns,
                "c{n}: {turns} turns were acknowledged, {} messages are there",
                stored.len()
            );
            // The log contains exactly what was sent: each question once, each with its answer, at most one turn
            // more.
            assert!(stored.len() <= 2 * turns + 2, "c{n}: {turns} turns were acknowledged: {stored:?}");
            for (turn, pair) in stored.chunks(2).enumerate() {
                assert_eq!(pair[0], user(&format!("question {turn}")), "c{n}, round {round}");
                assert!(pair.get(1).is_none_or(|a| a["role"] == "assistant"), "c{n}, round {round}: {stored:?}");
            }
            // An answer whose acknowledgement was lost counts: sent again, it would be a second question.
            acknowledged[n].store(stored.len() / 2, Ordering::SeqCst);
        }
    }
}

mod acknowledged_means_durable {
    #[tokio::test(flavor = "multi_thread")]
    async fn sqlite() {
        super::killed_under_load(super::StoreKind::Sqlite).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn postgres() {
        super::killed_under_load(super::StoreKind::Postgres).await;
    }
}

/// Killed while the model answers: the question is durable, and the same request with the same key completes the
/// turn without duplicating it; sent again, it returns the same answer.
async fn killed_while_the_model_answers(kind: StoreKind, stream: bool) {
    let dir = tempfile::tempdir().unwrap();
    let Some(test_store) = TestStore::new(kind) else { return };
    let store = test_store.url().to_owned();
    let model = ScriptedModelServer::default();
    let base_url = model.start().await;
    model.then(ModelResponse::Held("Never", Arc::new(Semaphore::new(0)), " heard"));
    let (key, body) = ([("idempotency-key", "k")], json!({"history": "append", "messages": [user("Hi")]}));
    let mut server = ServerProcess::with_model(dir.path(), &store, &base_url, json!({}));
    let lost = tokio::spawn(server.client.post(stream, body.clone(), &key).send());
    model.wait_for_requests(1).await;
    server.kill();
    if let Ok(response) = lost.await.unwrap() {
        assert!(stream && response.text().await.is_err(), "it was cut off");
    }
    let server = ServerProcess::with_model(dir.path(), &store, &base_url, json!({}));
    let reply = server.client.chat(stream, body.clone(), &key).await;
    assert_eq!(reply.content(), "answer 2");
    assert_eq!(model.last_messages(), [user("Hi")]);
    let again = server.client.chat(stream, body, &key).await;
    assert_eq!((again.content(), again.session_id(), model.request_count()), ("answer 2", reply.session_id(), 2));
    drop(server);
    let tenure = Tenure::open(&store).await.unwrap();
    let session = tenure.load(&default_principal(), &SessionId::new(reply.session_id()).unwrap()).await.unwrap();
    let stored: Vec<Value> = session.messages.iter().map(|m| m.message.to_value()).collect();
    assert_eq!(stored, [user("Hi"), assistant("answer 2")]);
}

mod killed_while_the_model_answers {
    #[tokio::test(flavor = "multi_thread")]
    async fn sqlite() {
        super::killed_while_the_model_answers(super::StoreKind::Sqlite, false).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn sqlite_streamed() {
        super::killed_while_the_model_answers(super::StoreKind::Sqlite, true).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn postgres() {
        super::killed_while_the_model_answers(super::StoreKind::Postgres, false).await;
    }
}
