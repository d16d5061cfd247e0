//! Property: no request except purge and erase makes an acknowledged message unreadable, whatever came before it.

use crate::support::InProcessClient;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use tenure::run::OnExpired;

/// The number of sequences per `on_expired` rule, and of requests per sequence.
const SEQUENCES: u64 = 12;
const REQUESTS: usize = 60;

/// splitmix64: a deterministic generator.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

/// A message as it is compared: its role and its text.
type RoleAndText = (String, String);

/// One sequence of requests.
struct Scenario {
    api: InProcessClient,
    random: Random,
    /// The ids that requests name.
    ids: Vec<String>,
    /// The acknowledged messages.
    acknowledged: BTreeSet<RoleAndText>,
    /// The requests sent, for the failure report.
    log: Vec<String>,
    texts: usize,
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

impl Scenario {
    async fn begin(seed: u64, on_expired: OnExpired) -> Self {
        let api = InProcessClient::with_config("memory:", |config| {
            config.sessions.on_expired = on_expired;
            config.sessions.retention = "never".parse().unwrap();
            config.sessions.max_sessions = if seed.is_multiple_of(3) { 4 } else { 0 };
        })
        .await;
        let ids = ["a", "b", "c"].map(str::to_owned).to_vec();
        let (acknowledged, log) = Default::default();
        Self { api, random: Random(seed), ids, acknowledged, log, texts: 0 }
    }

    /// A text that was never used before.
    fn text(&mut self) -> String {
        self.texts += 1;
        format!("message {}", self.texts)
    }

    async fn send(&mut self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let answer = self.api.send(method, path, Some("application/json"), body.to_string()).await;
        let status = answer.status.as_u16();
        self.log.push(format!("{status} {method} {path} {body}"));
        assert!(status < 500, "{}\n{}", answer.text, self.log.join("\n"));
        (status, serde_json::from_str(&answer.text).unwrap_or_default())
    }

    fn acknowledge(&mut self, role: &str, text: &str) {
        self.acknowledged.insert((role.to_owned(), text.to_owned()));
    }

    /// The history that a client of this session would send: all of it, a part, or an edited copy.
    async fn seen(&mut self, id: &str) -> Vec<Value> {
        let (_, body) = self.send("GET", &format!("/sessions/{id}/messages?limit=100"), &json!({})).await;
        let data = body["data"].as_array().cloned().unwrap_or_default();
        let mut messages: Vec<Value> = data.iter().map(|m| m["message"].clone()).collect();
        match self.random.below(5) {
            0 => messages.clear(),
            1 => drop(messages.drain(..self.random.below(messages.len() + 1))),
            2 => messages.truncate(self.random.below(messages.len() + 1)),
            3 if !messages.is_empty() => {
                let at = self.random.below(messages.len());
                messages[at]["content"] = json!("changed by the client");
            }
            _ => {}
        }
        messages
    }

    async fn chat(&mut self, id: &str) {
        let mut messages = self.seen(id).await;
        let text = self.text();
        messages.push(user(&text));
        let history = *self.random.pick(&["auto", "full", "append"]);
        let on_busy = *self.random.pick(&["queue", "branch", "interrupt"]);
        let body = json!({"session_id": id, "messages": messages, "history": history, "on_busy": on_busy});
        let (status, answer) = self.send("POST", "/v1/chat/completions", &body).await;
        if status == 200 {
            self.acknowledge("user", &text);
            self.acknowledge("assistant", answer["choices"][0]["message"]["content"].as_str().unwrap());
        }
    }

    /// Sends the same request again: a retry or a regeneration.
    async fn regenerate(&mut self, id: &str) {
        let (_, body) = self.send("GET", &format!("/sessions/{id}/messages?limit=100"), &json!({})).await;
        let data = body["data"].as_array().cloned().unwrap_or_default();
        let mut messages: Vec<Value> = data.iter().map(|m| m["message"].clone()).collect();
        while messages.last().is_some_and(|m| m["role"] != "user") {
            messages.pop();
        }
        if !messages.is_empty() {
            let body = json!({"session_id": id, "messages": messages});
            self.send("POST", "/v1/chat/completions", &body).await;
        }
    }

    async fn replace(&mut self, method: &str, path: &str) {
        let texts = [self.text(), self.text()];
        let messages = json!([user(&texts[0]), {"role": "assistant", "content": texts[1]}]);
        let (status, body) = self.send(method, path, &json!({"messages": messages})).await;
        if status < 300 {
            self.acknowledge("user", &texts[0]);
            self.acknowledge("assistant", &texts[1]);
            if let Some(id) = body["sessions"][0]["session_id"].as_str() {
                self.ids.push(id.to_owned());
            }
        }
    }

    async fn step(&mut self) {
        let ids = self.ids.clone();
        let id = self.random.pick(&ids).clone();
        let path = |rest: &str| format!("/sessions/{id}{rest}");
        let n = self.random.below(4);
        match self.random.below(19) {
            0..=4 => self.chat(&id).await,
            5 => {
                let text = self.text();
                let body = json!({"messages": [user(&text)]});
                if self.send("POST", &path("/messages"), &body).await.0 == 201 {
                    self.acknowledge("user", &text);
                }
            }
            6 => drop(self.send("POST", &path("/rewind"), &json!({"turn": n})).await),
            7 => {
                let body = if n == 0 { json!({}) } else { json!({"position": n}) };
                let (_, fork) = self.send("POST", &path("/fork"), &body).await;
                self.ids.extend(fork["id"].as_str().map(str::to_owned));
            }
            8 => {
                let body = *self.random.pick(&["paused", "active"]);
                self.send("PATCH", &path(""), &json!({"status": body, "title": "t"})).await;
            }
            9 => {
                let route = if n < 2 { path("") } else { format!("/v1/sessions/{id}") };
                self.send("DELETE", &route, &json!({})).await;
            }
            10 => drop(self.send("POST", &path("/restore"), &json!({})).await),
            11 => self.replace("PUT", &format!("/v1/sessions/{id}")).await,
            12 => {
                let route = if n < 2 { format!("/sessions/import?id={id}") } else { "/sessions/import".to_owned() };
                self.replace("POST", &route).await;
            }
            13 => drop(self.send("POST", &path("/compact"), &json!({"keep_turns": n})).await),
            14 => drop(self.send("POST", &path("/uncompact"), &json!({})).await),
            15 => {
                let text = self.text();
                let (status, run) = self.send("POST", &path("/runs"), &json!({"input": text, "mode": "wait"})).await;
                if status < 300 {
                    self.acknowledge("user", &text);
                    let run = run["id"].as_str().unwrap_or("none").to_owned();
                    self.send("POST", &path(&format!("/runs/{run}/cancel")), &json!({})).await;
                }
            }
            16 => {
                // Some sessions expire on access, some by the sweep.
                self.api.advance(*self.random.pick(&[60, 3600, 8 * 86_400]));
                self.log.push("time passes".to_owned());
            }
            17 => {
                let report = self.api.app.tenure.sweep().await.unwrap();
                assert!(report.purged.is_empty());
                self.log.push("the sweep".to_owned());
            }
            _ => self.regenerate(&id).await,
        }
    }

    /// All readable messages, after every expired or deleted session was restored.
    async fn readable(&mut self) -> BTreeSet<RoleAndText> {
        let mut readable_texts = BTreeSet::new();
        let route = "/sessions?status=active,paused,expired,deleted&limit=100";
        let (_, list) = self.send("GET", route, &json!({})).await;
        assert!(list["next_cursor"].is_null(), "one page holds all sessions");
        for session in list["data"].as_array().unwrap() {
            let id = session["id"].as_str().unwrap();
            self.send("POST", &format!("/sessions/{id}/restore"), &json!({})).await;
            let (status, full) = self.send("GET", &format!("/sessions/{id}?include=discarded"), &json!({})).await;
            assert_eq!(status, 200, "{id}\n{}", self.log.join("\n"));
            let discarded =
                full["discarded"].as_array().unwrap().iter().flat_map(|d| d["messages"].as_array().unwrap());
            for stored in full["messages"].as_array().unwrap().iter().chain(discarded) {
                let message = &stored["message"];
                let text = message["content"].as_str().unwrap_or_default();
                readable_texts.insert((message["role"].as_str().unwrap().to_owned(), text.to_owned()));
            }
        }
        readable_texts
    }
}

async fn no_acknowledged_message_becomes_unreadable(on_expired: OnExpired) {
    for seed in 1..=SEQUENCES {
        let mut scenario = Scenario::begin(seed, on_expired).await;
        for _ in 0..REQUESTS {
            scenario.step().await;
        }
        let log = scenario.log.join("\n");
        let readable = scenario.readable().await;
        let lost: Vec<_> = scenario.acknowledged.difference(&readable).collect();
        assert!(lost.is_empty(), "seed {seed}, {on_expired:?}: lost {lost:?}\n{log}");
        assert!(scenario.acknowledged.len() > 10, "seed {seed}: too little was said to tell anything\n{log}");
    }
}

#[tokio::test]
async fn no_acknowledged_message_becomes_unreadable_with_restore() {
    no_acknowledged_message_becomes_unreadable(OnExpired::Restore).await;
}

#[tokio::test]
async fn no_acknowledged_message_becomes_unreadable_with_fresh() {
    no_acknowledged_message_becomes_unreadable(OnExpired::Fresh).await;
}

#[tokio::test]
async fn no_acknowledged_message_becomes_unreadable_with_reject() {
    no_acknowledged_message_becomes_unreadable(OnExpired::Reject).await;
}
