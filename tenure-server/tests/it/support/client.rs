//! An HTTP client, and responses in a form that tests can check.

use axum::http::HeaderMap;
use serde_json::{Value, json};
use std::time::Duration;
use tenure::run::{ModelAnswer, ModelChunk};

/// An HTTP client.
#[derive(Clone, Debug)]
pub struct Client {
    pub http: reqwest::Client,
    pub base: String,
}

/// A response.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: HeaderMap,
    /// The raw body.
    pub text: String,
    /// The complete answer or the error; of a stream, its assembled chunks.
    pub body: Value,
    /// The raw data of a stream's events.
    pub events: Vec<String>,
}

impl Reply {
    pub fn session_id(&self) -> String {
        self.headers["x-session-id"].to_str().unwrap().to_owned()
    }

    pub fn message(&self) -> &Value {
        &self.body["choices"][0]["message"]
    }

    pub fn content(&self) -> &str {
        self.message()["content"].as_str().unwrap_or_else(|| panic!("no answer: {self:?}"))
    }

    /// How the messages were reconciled: `matched`, `spliced`, `rewound`, `appended`.
    pub fn report(&self) -> [u64; 4] {
        let part = |name: &str| self.body["session"][name].as_u64().unwrap_or_else(|| panic!("no {name}: {self:?}"));
        [part("matched"), part("spliced"), part("rewound"), part("appended")]
    }

    pub fn code(&self) -> &str {
        self.body["error"]["code"].as_str().unwrap_or_default()
    }

    pub fn is_done(&self) -> bool {
        self.events.last().is_some_and(|e| e == "[DONE]")
    }
}

impl Client {
    pub fn new(base: &str) -> Self {
        Self { http: tenure_server::http_client::client().build().unwrap(), base: base.to_owned() }
    }

    pub fn post(&self, stream: bool, mut body: Value, headers: &[(&str, &str)]) -> reqwest::RequestBuilder {
        if stream {
            body["stream"] = json!(true);
        }
        self.post_text(&body.to_string(), headers)
    }

    pub fn post_text(&self, body: &str, headers: &[(&str, &str)]) -> reqwest::RequestBuilder {
        let request = self.http.post(format!("{}/v1/chat/completions", self.base)).body(body.to_owned());
        let request = request.header("content-type", "application/json");
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value))
    }

    pub async fn chat(&self, stream: bool, body: Value, headers: &[(&str, &str)]) -> Reply {
        reply(self.post(stream, body, headers).send().await.unwrap()).await
    }
}

/// Reads a response. The chunks of a successful stream are assembled; an error in it becomes the body.
pub async fn reply(response: reqwest::Response) -> Reply {
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let streamed = headers.get("content-type").is_some_and(|t| t == "text/event-stream");
    let text = response.text().await.unwrap();
    let mut reply = Reply { status, headers, text, ..Reply::default() };
    if !streamed {
        reply.body = serde_json::from_str(&reply.text).unwrap_or_default();
        return reply;
    }
    // Comments only keep the connection alive while a request waits.
    let events = reply.text.split("\n\n").filter(|e| !e.is_empty() && !e.starts_with(':'));
    let data = |e: &str| e.lines().find_map(|l| l.strip_prefix("data: ")).expect("an event with data").to_owned();
    reply.events = events.map(data).collect();
    let mut answer = ModelAnswer::default();
    let (mut report, mut run_id, mut error) = (Value::Null, Value::Null, None);
    let mut id = reply.headers.get("x-session-id").map(|v| v.to_str().unwrap().to_owned());
    for (i, event) in reply.events.iter().enumerate().filter(|(_, e)| *e != "[DONE]") {
        let chunk: Value = serde_json::from_str(event).unwrap();
        if chunk.get("error").is_some() {
            assert_eq!(i + 1, reply.events.len(), "nothing follows an error");
            error = Some(chunk);
            break;
        }
        // A request that was queued gets its session id with the first chunk.
        id = id.or_else(|| chunk["session_id"].as_str().map(str::to_owned));
        assert_eq!(chunk["session_id"].as_str(), id.as_deref(), "every chunk names the session");
        assert_eq!(chunk["object"], "chat.completion.chunk");
        answer.add_chunk(&ModelChunk::Chunk(event.clone())).unwrap();
        if i == 0 {
            report = chunk["session"].clone();
            run_id = chunk["run_id"].clone();
        } else {
            assert!(chunk.get("session").is_none(), "only the first chunk reports");
        }
    }
    reply.body = serde_json::from_str(&answer.body("streamed", jiff::Timestamp::UNIX_EPOCH)).unwrap();
    (reply.body["session_id"], reply.body["session"]) = (json!(id), report);
    reply.body["run_id"] = run_id;
    if let Some(error) = error {
        reply.body["error"] = error["error"].clone();
    }
    reply
}

/// The body of a chat request with one message.
pub fn chat_request(session: &str, text: &str) -> Value {
    json!({"session_id": session, "messages": [{"role": "user", "content": text}]})
}

/// A client without proxy, with a timeout of a minute.
pub fn http_client() -> reqwest::Client {
    tenure_server::http_client::client().no_proxy().timeout(Duration::from_secs(60)).build().unwrap()
}

/// Sends a request. Returns the status, and the body as JSON (or as a JSON string).
pub async fn send(request: reqwest::RequestBuilder) -> (u16, Value) {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

/// Asserts all parts of an API error.
#[track_caller]
pub fn assert_error(answer: &(u16, Value), status: u16, code: &str, param: Option<&str>) {
    let error = &answer.1["error"];
    assert_eq!((answer.0, error["code"].as_str(), error["param"].as_str()), (status, Some(code), param), "{answer:?}");
    assert!(!error["message"].as_str().unwrap().is_empty() && error["type"].is_string(), "{answer:?}");
}
