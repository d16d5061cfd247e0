//! The end of sessions: webhooks and transcripts.

use crate::support::{ServerProcess, serve, wait_at_most, wait_until};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::{Router, body::Bytes};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tenure::{Clock, Message, Principal, SessionId, Tenure, session::read_transcript};
use tenure_server::config::Config;
use tenure_server::transcripts::TranscriptWriter;

/// A webhook receiver: the received requests, and the planned responses.
#[derive(Default)]
struct Receiver {
    deliveries: Mutex<Vec<(HeaderMap, String)>>,
    /// Statuses of the next responses; 200 when the list is empty. 0 means no response at all.
    plan: Mutex<Vec<u16>>,
}

impl Receiver {
    fn bodies(&self) -> Vec<Value> {
        self.deliveries.lock().unwrap().iter().map(|(_, body)| serde_json::from_str(body).unwrap()).collect()
    }
}

async fn receive(State(receiver_state): State<Arc<Receiver>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    receiver_state.deliveries.lock().unwrap().push((headers, String::from_utf8(body.to_vec()).unwrap()));
    let next = {
        let mut plan = receiver_state.plan.lock().unwrap();
        if plan.is_empty() { 200 } else { plan.remove(0) }
    };
    match next {
        0 => std::future::pending().await,
        status => StatusCode::from_u16(status).unwrap(),
    }
}

async fn receiver(plan: &[u16]) -> (Arc<Receiver>, String) {
    let receiver_state = Arc::new(Receiver { plan: Mutex::new(plan.to_vec()), ..Receiver::default() });
    (
        receiver_state.clone(),
        serve(Router::new().route("/hook", axum::routing::post(receive)).with_state(receiver_state)).await + "/hook",
    )
}

/// A store with a movable clock and the given configuration.
async fn open_node(config: &Config, clock: &Clock) -> Tenure {
    let options = tenure::Options { clock: clock.clone(), ..config.options() };
    let tenure = Tenure::open_with(&config.store, options).await.unwrap();
    TranscriptWriter::new(config).install(&tenure);
    tenure_server::webhooks::install(&tenure, &config.on_expire).unwrap();
    tenure
}

async fn append_message(tenure: &Tenure, id: &str, text: &str) {
    let principal = Principal::default();
    let id = SessionId::new(id).unwrap();
    let messages =
        vec![Message::user(text), Message::parse(r#"{"role":"assistant","content":"well","x":1.50}"#).unwrap()];
    if tenure.head(&principal, &id).await.is_err() {
        tenure
            .create(
                &principal,
                tenure::NewSession { id: Some(id.clone()), title: Some("T".into()), ..Default::default() },
            )
            .await
            .unwrap();
    }
    tenure.append(&principal, &id, messages).await.unwrap();
}

fn start() -> Clock {
    Clock::manual("2026-01-01T00:00:00Z".parse::<Timestamp>().unwrap())
}

#[tokio::test]
async fn a_failed_webhook_is_retried_until_it_receives_the_full_session() {
    let (receiver_state, url) = receiver(&[500]).await;
    let yaml = format!("store: 'memory:'\nsessions: {{ttl: 1h}}\non_expire: {{webhooks: [{{url: '{url}'}}]}}");
    let config = Config::parse(&yaml).unwrap();
    let clock = start();
    let tenure = open_node(&config, &clock).await;
    append_message(&tenure, "ends", "what I said").await;
    clock.advance(SignedDuration::from_hours(2));
    let report = tenure.sweep().await.unwrap();
    assert!(report.expired.is_empty() && report.failed[0].1.contains("responded with status 500"), "{report:?}");
    assert!(tenure.sweep().await.unwrap().failed.is_empty(), "it is not tried again at once");
    clock.advance(SignedDuration::from_mins(2));
    assert_eq!(tenure.sweep().await.unwrap().expired.len(), 1);
    clock.advance(SignedDuration::from_mins(2));
    tenure.sweep().await.unwrap();
    let bodies = receiver_state.bodies();
    let [first, second] = &bodies[..] else { panic!("told once too often or not at all: {bodies:?}") };
    assert_eq!((&first["id"], &first["session"]), (&second["id"], &second["session"]), "the same ending, the same id");
    assert_eq!(
        (&second["event"], &second["tenant"], &second["user"]),
        (&json!("session.expired"), &json!("default"), &json!("default"))
    );
    let messages = second["session"]["messages"].as_array().unwrap();
    assert_eq!(messages[0]["content"], "what I said");
    assert!(
        receiver_state.deliveries.lock().unwrap()[1].1.contains(r#"{"role":"assistant","content":"well","x":1.50}"#),
        "byte for byte"
    );
    // Restored and expired again: a second end, with its own notification.
    let principal = Principal::default();
    let id = SessionId::new("ends").unwrap();
    tenure.restore(&principal, &id, None).await.unwrap();
    clock.advance(SignedDuration::from_hours(3));
    tenure.sweep().await.unwrap();
    let bodies = receiver_state.bodies();
    assert_eq!(bodies.len(), 3);
    assert_ne!(bodies[2]["id"], bodies[1]["id"]);
}

#[tokio::test]
async fn a_hanging_webhook_does_not_block_others() {
    let (receiver_state, url) = receiver(&[0]).await;
    let yaml =
        format!("store: 'memory:'\nsessions: {{ttl: 1h}}\non_expire: {{webhooks: [{{url: '{url}', timeout: 1s}}]}}");
    let config = Config::parse(&yaml).unwrap();
    let clock = start();
    let tenure = open_node(&config, &clock).await;
    for i in 0..20 {
        append_message(&tenure, &format!("s{i}"), "hi").await;
    }
    clock.advance(SignedDuration::from_hours(2));
    let report = tenure.sweep().await.unwrap();
    assert_eq!((report.expired.len(), report.failed.len()), (19, 1), "{report:?}");
    assert!(report.failed[0].1.contains("timed out"), "{report:?}");
    assert_eq!(receiver_state.deliveries.lock().unwrap().len(), 20);
}

#[tokio::test]
async fn an_evicted_session_is_reported_as_evicted() {
    let (receiver_state, url) = receiver(&[]).await;
    let yaml = format!("store: 'memory:'\nsessions: {{max_sessions: 1}}\non_expire: {{webhooks: [{{url: '{url}'}}]}}");
    let config = Config::parse(&yaml).unwrap();
    let clock = start();
    let tenure = open_node(&config, &clock).await;
    append_message(&tenure, "old", "hi").await;
    clock.advance(SignedDuration::from_secs(1));
    append_message(&tenure, "new", "hi").await;
    tenure.sweep().await.unwrap();
    let bodies = receiver_state.bodies();
    assert_eq!((bodies.len(), &bodies[0]["event"]), (1, &json!("session.evicted")));
    assert_eq!(bodies[0]["session"]["session_id"], "old");
}

/// The process dies during a webhook delivery; the next process delivers it, signed.
#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_is_delivered_after_a_restart() {
    let (receiver_state, url) = receiver(&[0]).await;
    let dir = tempfile::tempdir().unwrap();
    let open = "store: 'sqlite:t.db'\nsessions: {ttl: 1s}";
    let server = ServerProcess::start(dir.path(), open);
    assert_eq!(server.chat("s1", "before the crash").await.0, 200);
    let answered = std::time::Instant::now();
    server.stop();
    wait_until("the session is due", async || answered.elapsed() > Duration::from_millis(1100)).await;
    let yaml = format!("{open}\non_expire: {{webhooks: [{{url: '{url}', secret_env: HOOK_SECRET}}]}}");
    let env = [("HOOK_SECRET", "a secret")];
    let mut server = ServerProcess::start_with(dir.path(), &yaml, &env);
    wait_at_most("the hook is called", Duration::from_secs(20), async || {
        receiver_state.deliveries.lock().unwrap().len() == 1
    })
    .await;
    server.kill();
    let server = ServerProcess::start_with(dir.path(), &yaml, &env);
    wait_at_most("the hook is called again", Duration::from_secs(20), async || {
        receiver_state.deliveries.lock().unwrap().len() == 2
    })
    .await;
    wait_at_most("the session is gone", Duration::from_secs(20), async || {
        server
            .request("GET", "/metrics")
            .send()
            .await
            .unwrap()
            .text()
            .await
            .unwrap()
            .contains("tenure_sweep_total{what=\"expired\"} 1")
    })
    .await;
    let bodies = receiver_state.bodies();
    assert_eq!(bodies[0]["id"], bodies[1]["id"]);
    assert_eq!(bodies[1]["session"]["messages"][0]["content"], "before the crash");
    let (headers, body) = receiver_state.deliveries.lock().unwrap()[1].clone();
    let key = *blake3::hash(b"a secret").as_bytes();
    let want = format!("blake3={}", blake3::keyed_hash(&key, body.as_bytes()).to_hex());
    assert_eq!(headers["x-tenure-signature"], want);
}

#[tokio::test]
async fn a_transcript_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let yaml =
        format!("store: 'memory:'\nsessions: {{ttl: 1h}}\ntranscripts: {{dir: '{}/kept'}}", dir.path().display());
    let config = Config::parse(&yaml).unwrap();
    let clock = start();
    let tenure = open_node(&config, &clock).await;
    append_message(&tenure, "ends", "keep me").await;
    clock.advance(SignedDuration::from_hours(2));
    assert_eq!(tenure.sweep().await.unwrap().expired.len(), 1);
    let read = read_transcript(dir.path().join("kept/default/default/ends.jsonl")).unwrap();
    assert_eq!((read.messages.len(), read.problems.len()), (2, 0));
    assert_eq!(read.messages[0].text(), "keep me");
    // The directory is missing: the session is not removed until it can be archived again.
    append_message(&tenure, "later", "me too").await;
    clock.advance(SignedDuration::from_hours(2));
    std::fs::remove_dir_all(dir.path().join("kept")).unwrap();
    std::fs::write(dir.path().join("kept"), "in the way").unwrap();
    assert_eq!(tenure.sweep().await.unwrap().failed.len(), 1);
    std::fs::remove_file(dir.path().join("kept")).unwrap();
    clock.advance(SignedDuration::from_mins(2));
    assert_eq!(tenure.sweep().await.unwrap().expired.len(), 1);
    assert!(dir.path().join("kept/default/default/later.jsonl").exists());
}
