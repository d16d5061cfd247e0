//! Scheduled runs: on one node only, never two at once, and missed runs are recorded.

use crate::support::*;
use jiff::SignedDuration;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tenure::store::MemoryStore;
use tenure::{Clock, Limits, Options, Tenure};
use tenure_server::app::{App, AppState};
use tenure_server::config::schedules::compile;
use tenure_server::config::{Config, Schedule};
use tenure_server::jobs::schedules::{self, ScheduleJob, ScheduleState};
use tokio::sync::Semaphore;

fn config(base_url: &str, session: Option<&str>) -> Config {
    let mut config = Config { models: vec![model("default", base_url)], ..Config::default() };
    config.models[0].idle_timeout = "1m".parse().unwrap();
    config.assistants = vec![serde_json::from_value(json!({"name": "agent", "model": "default"})).unwrap()];
    let schedule = json!({
        "name": "tick", "cron": "* * * * *", "timezone": "Europe/Berlin", "assistant": "agent", "session": session,
        "input": "{{weekday}} {{date}} {{time}}, {{name}} {{count}}: {{what}}", "variables": {"what": "go"},
    });
    config.schedules = vec![serde_json::from_value(schedule).unwrap()];
    config
}

async fn state(app: &AppState) -> ScheduleState {
    ScheduleJob::new(app, &app.schedules[0]).state().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_node_runs_a_schedule_without_overlap() {
    for session in [Some("lasting"), None] {
        let script = ScriptedModelServer::default();
        let base_url = script.start().await;
        let store = Arc::new(MemoryStore::new());
        let clock = Clock::manual("2026-11-16T08:58:30Z".parse().unwrap());
        let node = || {
            // The lease is renewed by the wall clock; one of the usual length would expire when the test clock
            // jumps over it.
            let limits = Limits { lease: Duration::from_hours(1), ..Limits::default() };
            let tenure =
                Tenure::with_store(store.clone(), Options { clock: clock.clone(), limits, ..Options::default() });
            App::with_tenure(tenure, config(&base_url, session)).unwrap()
        };
        let one = node();
        let two = node();
        let mut watching = Vec::new();
        for app in [one.clone(), two.clone()] {
            watching.push(tokio::spawn(async move {
                loop {
                    schedules::evaluate_all(&app).await;
                    tokio::time::sleep(Duration::from_millis(20)).await; // pacing: a node looks
                }
            }));
        }
        wait_until("it is known", async || state(&one).await.last.is_some()).await;
        assert_eq!(script.request_count(), 0, "what was due before it was there is not made up for");
        clock.advance(SignedDuration::from_secs(40));
        wait_until("it ran", async || state(&one).await.count == 1).await;
        wait_until("it was asked", async || script.request_count() == 1).await;
        tokio::time::sleep(Duration::from_millis(300)).await; // observation window: no second run
        assert_eq!(script.request_count(), 1, "two nodes looked, one ran it");
        let last_prompt = script.last_messages().last().unwrap()["content"].as_str().unwrap().to_owned();
        assert_eq!(last_prompt, "Monday 2026-11-16 09:59, tick 1: go", "by the clock in Berlin");

        // Still running when the next one is due.
        let hold = Arc::new(Semaphore::new(0));
        script.then(ModelResponse::Held("a", hold.clone(), "b"));
        clock.advance(SignedDuration::from_secs(60));
        wait_until("it is on", async || script.request_count() == 2).await;
        wait_until("it is noted", async || state(&one).await.count == 2).await;
        clock.advance(SignedDuration::from_secs(60));
        wait_until("it is missed", async || !state(&one).await.missed.is_empty()).await;
        assert!(state(&two).await.missed[0].reason.contains("still in progress"));
        hold.add_permits(1);
        let id = state(&one).await.session.unwrap();
        wait_until("it is done", async || {
            one.tenure.load(&default_principal(), &id).await.unwrap().head().run.is_none()
        })
        .await;

        // No node was running for a while.
        clock.advance(SignedDuration::from_mins(3));
        wait_until("the last one runs", async || state(&one).await.count == 3).await;
        let missed = state(&one).await.missed;
        assert_eq!(missed.iter().filter(|m| m.reason.contains("no server was running")).count(), 2, "{missed:?}");
        watching.into_iter().for_each(|w| w.abort());
    }
}

#[test]
fn an_invalid_schedule_is_reported_with_its_path() {
    let wrong = |change: fn(&mut Schedule)| {
        let mut config = config("http://127.0.0.1:1/v1", None);
        change(&mut config.schedules[0]);
        format!("{:#}", compile(&config.schedules, &config.assistants).unwrap_err())
    };
    for (error, want) in [
        (wrong(|s| s.cron = "61 * * * *".into()), "schedules[0]: cron: minute"),
        (wrong(|s| s.timezone = "Mars/Olympus".into()), "Mars/Olympus"),
        (wrong(|s| s.assistant = "nobody".into()), "nobody"),
        (wrong(|s| s.input = "{{what".into()), "}}"),
        (wrong(|s| s.input = "{{else}}".into()), "else"),
        (wrong(|s| s.session = Some(" x".into())), "session"),
    ] {
        assert!(error.contains(want), "{error}");
    }
}

/// A scheduled run whose session was deleted is recorded as missed, and the session stays deleted.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_session_is_not_replaced() {
    let script = ScriptedModelServer::default();
    let base_url = script.start().await;
    let clock = Clock::manual("2026-11-16T08:58:30Z".parse().unwrap());
    let tenure =
        Tenure::with_store(Arc::new(MemoryStore::new()), Options { clock: clock.clone(), ..Options::default() });
    let app = App::with_tenure(tenure, config(&base_url, Some("lasting"))).unwrap();
    schedules::evaluate_all(&app).await;
    clock.advance(SignedDuration::from_secs(40));
    schedules::evaluate_all(&app).await;
    let id = state(&app).await.session.unwrap();
    // The session exists before its run does.
    wait_until("it is done", async || {
        let session = app.tenure.load(&default_principal(), &id).await.unwrap();
        session.messages.len() == 2 && session.head().run.is_none()
    })
    .await;
    app.tenure.delete(&default_principal(), &id, None).await.unwrap();
    clock.advance(SignedDuration::from_secs(60));
    schedules::evaluate_all(&app).await;
    let missed = state(&app).await.missed;
    assert!(missed.len() == 1 && missed[0].reason.contains("deleted"), "{missed:?}");
    assert_eq!(app.tenure.restore(&default_principal(), &id, None).await.unwrap().digest.messages, 2);
}
