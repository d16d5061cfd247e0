//! A scripted model server that records its requests.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use axum::routing::post;
use futures_util::StreamExt;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tenure::testing::wait_until;
use tenure_server::config::ModelConfig;
use tokio::sync::Semaphore;

/// A scripted response of the model server.
#[derive(Clone, Debug)]
pub enum ModelResponse {
    /// Answers with this text; word by word if a stream was requested.
    Text(&'static str),
    /// Answers with this assistant message.
    Message(Value),
    /// Calls tools: id, name, arguments.
    ToolCalls(Vec<(&'static str, &'static str, &'static str)>),
    /// Sends the first part, waits for a permit, sends the second. Not streamed, it waits and sends both.
    Held(&'static str, Arc<Semaphore>, &'static str),
    /// Answers with a status, a content type, a body and a `Retry-After`.
    Error(u16, &'static str, &'static str, Option<&'static str>),
    /// Accepts the request and sends nothing, not even a status.
    Hang,
    /// Answers 200 with this content type and these chunks; then ends properly, breaks off, or hangs.
    Raw(&'static str, Vec<Bytes>, StreamEnd),
}

/// How a raw response ends.
#[derive(Clone, Copy, Debug)]
pub enum StreamEnd {
    Complete,
    Aborted,
    Stalled,
}

/// The scripted model server.
#[derive(Clone, Debug, Default)]
pub struct ScriptedModelServer {
    responses: Arc<Mutex<VecDeque<ModelResponse>>>,
    seen: Arc<Mutex<Vec<(HeaderMap, String)>>>,
}

impl ScriptedModelServer {
    /// Appends a response to the script. When the script is empty, the server answers `answer N`.
    pub fn then(&self, response: ModelResponse) -> &Self {
        self.responses.lock().unwrap().push_back(response);
        self
    }

    /// Discards the rest of the script.
    pub fn clear(&self) {
        self.responses.lock().unwrap().clear();
    }

    /// The request bodies it received.
    pub fn bodies(&self) -> Vec<String> {
        self.seen.lock().unwrap().iter().map(|(_, body)| body.clone()).collect()
    }

    pub fn headers(&self, i: usize) -> HeaderMap {
        self.seen.lock().unwrap()[i].0.clone()
    }

    /// The number of requests it received.
    pub fn request_count(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    /// The messages of the last request.
    pub fn last_messages(&self) -> Vec<Value> {
        let last = self.bodies().pop().expect("it was asked");
        serde_json::from_str::<Value>(&last).unwrap()["messages"].as_array().unwrap().clone()
    }

    /// Waits until it has received this many requests.
    pub async fn wait_for_requests(&self, times: usize) {
        wait_until("the model was asked", async || self.request_count() >= times).await;
    }

    /// Starts it. Returns its base URL, up to `/v1`.
    pub async fn start(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Router::new().route("/v1/chat/completions", post(respond)).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        format!("http://{address}/v1")
    }
}

async fn respond(State(script): State<ScriptedModelServer>, headers: HeaderMap, body: String) -> Response {
    let (response, n) = {
        let mut seen = script.seen.lock().unwrap();
        seen.push((headers, body.clone()));
        let response = script.responses.lock().unwrap().pop_front();
        (response.unwrap_or(ModelResponse::Text("")), seen.len())
    };
    let request: Value = serde_json::from_str(&body).unwrap();
    let stream = request["stream"] == true;
    match response {
        ModelResponse::Text(text) => {
            let text = if text.is_empty() { format!("answer {n}") } else { text.to_owned() };
            let words: Vec<Value> = text.split_inclusive(' ').map(|w| json!({"content": w})).collect();
            completion(&request, json!({"role": "assistant", "content": text}), words, "stop")
        }
        ModelResponse::Message(message) => {
            let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
            let mut delta = message.clone();
            for (i, call) in delta["tool_calls"].as_array_mut().into_iter().flatten().enumerate() {
                call["index"] = json!(i);
            }
            completion(&request, message, vec![delta], if calls.is_empty() { "stop" } else { "tool_calls" })
        }
        ModelResponse::ToolCalls(calls) => {
            let call = |(id, name, arguments): &(&str, &str, &str)| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
            let calls: Vec<Value> = calls.iter().map(call).collect();
            let mut parts = vec![json!({"content": null})];
            for (i, call) in calls.iter().enumerate() {
                let arguments = call["function"]["arguments"].as_str().unwrap();
                let (first, second) = arguments.split_at(arguments.len() / 2);
                let mut begin = call.clone();
                (begin["index"], begin["function"]["arguments"]) = (json!(i), json!(first));
                parts.push(json!({"tool_calls": [begin]}));
                parts.push(json!({"tool_calls": [{"index": i, "function": {"arguments": second}}]}));
            }
            completion(
                &request,
                json!({"role": "assistant", "content": null, "tool_calls": calls}),
                parts,
                "tool_calls",
            )
        }
        ModelResponse::Held(first, permit, second) if stream => {
            let rest = async move {
                permit.acquire().await.unwrap().forget();
                format!("{}{}", chunk(json!({"content": second}), Value::Null), end_of_stream("stop"))
            };
            let first = chunk(json!({"role": "assistant", "content": first}), Value::Null);
            let parts = futures_util::stream::iter([first]).chain(futures_util::stream::once(rest));
            let body = Body::from_stream(parts.map(Ok::<_, std::io::Error>));
            Response::builder().header("content-type", "text/event-stream").body(body).unwrap()
        }
        ModelResponse::Held(first, permit, second) => {
            permit.acquire().await.unwrap().forget();
            completion(
                &request,
                json!({"role": "assistant", "content": format!("{first}{second}")}),
                Vec::new(),
                "stop",
            )
        }
        ModelResponse::Error(status, kind, body, retry) => {
            let mut response = Response::builder().status(status).header("content-type", kind);
            if let Some(retry) = retry {
                response = response.header("retry-after", retry);
            }
            response.body(body.into()).unwrap()
        }
        ModelResponse::Hang => std::future::pending().await,
        ModelResponse::Raw(kind, parts, end) => {
            let parts = futures_util::stream::iter(parts).then(|part| async move {
                tokio::time::sleep(Duration::from_millis(1)).await; // pacing: a model
                Ok(part)
            });
            let last = futures_util::stream::once(async move {
                tokio::time::sleep(Duration::from_millis(20)).await; // pacing: a model
                match end {
                    StreamEnd::Stalled => std::future::pending().await,
                    StreamEnd::Aborted => Err(std::io::Error::other("aborted")),
                    StreamEnd::Complete => Ok(Bytes::new()),
                }
            });
            Response::builder().header("content-type", kind).body(Body::from_stream(parts.chain(last))).unwrap()
        }
    }
}

/// One chunk of a stream.
pub fn chunk(delta: Value, finish: Value) -> String {
    let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
    let chunk = json!({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "scripted", "choices": [choice]});
    format!("data: {chunk}\n\n")
}

/// The end of a stream.
pub fn end_of_stream(finish: &str) -> String {
    format!("{}data: [DONE]\n\n", chunk(json!({}), json!(finish)))
}

fn completion(request: &Value, message: Value, parts: Vec<Value>, finish: &str) -> Response {
    let usage = json!({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10});
    if request["stream"] != true {
        let n = request["n"].as_u64().unwrap_or(1);
        let choice = |i: u64| json!({"index": i, "message": message, "finish_reason": finish});
        let choices: Vec<Value> = (0..n).map(choice).collect();
        let body = json!({"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "scripted", "choices": choices, "usage": usage});
        return Response::builder().header("content-type", "application/json").body(body.to_string().into()).unwrap();
    }
    let mut text = chunk(json!({"role": "assistant"}), Value::Null);
    parts.into_iter().for_each(|part| text.push_str(&chunk(part, Value::Null)));
    text.push_str(&chunk(json!({}), json!(finish)));
    if request["stream_options"]["include_usage"] == true {
        let last = json!({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "scripted", "choices": [], "usage": usage});
        text.push_str(&format!("data: {last}\n\n"));
    }
    text.push_str("data: [DONE]\n\n");
    // In chunks that are not aligned with the events.
    let parts: Vec<Bytes> = text.as_bytes().chunks(97).map(Bytes::copy_from_slice).collect();
    let body = Body::from_stream(futures_util::stream::iter(parts.into_iter().map(Ok::<_, std::io::Error>)));
    Response::builder().header("content-type", "text/event-stream; charset=utf-8").body(body).unwrap()
}

/// The configuration of a model server, with short timeouts.
pub fn model(name: &str, base_url: &str) -> ModelConfig {
    let model = json!({"name": name, "base_url": base_url, "idle_timeout": "400ms", "retries": 0});
    serde_json::from_value(model).unwrap()
}
