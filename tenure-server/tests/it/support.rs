//! What the server's tests share, on top of `tenure::testing`.

mod client;
mod in_process;
mod model_server;
mod process;
mod server;

pub use client::{Client, Reply, assert_error, chat_request, http_client, reply, send};
pub use in_process::{InProcessClient, each_field};
pub use model_server::{ModelResponse, ScriptedModelServer, StreamEnd, chunk, end_of_stream, model};
pub use process::{ServerProcess, binary};
pub use server::{TestServer, default_principal};
pub use tenure::testing::{PostgresSchema, StoreKind, TestStore, image_message, postgres_server, wait_until};

use axum::Router;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

pub fn system(text: &str) -> Value {
    json!({"role": "system", "content": text})
}

pub fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

pub fn assistant(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

pub fn call(id: &str, name: &str, arguments: &str) -> Value {
    let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    json!({"role": "assistant", "content": null, "tool_calls": [call]})
}

pub fn tool(id: &str, text: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": text})
}

/// Serves routes on its own port, for as long as the test runs.
pub async fn serve(router: Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    format!("http://{address}")
}

/// A model server that streams `words` words with a pause before each.
pub async fn slow_model(words: usize, pause: Duration) -> String {
    use futures_util::{StreamExt, stream};
    let route = axum::routing::post(move || async move {
        let chunk = |delta: Value, finish: Value| {
            format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}))
        };
        let chunks = (0..words).map(move |i| chunk(json!({"content": format!("word{i} ")}), Value::Null));
        let all = chunks.chain([chunk(json!({}), json!("stop")), "data: [DONE]\n\n".to_owned()]);
        let slowly = stream::iter(all).then(move |text| async move {
            tokio::time::sleep(pause).await; // pacing: a slow model
            Ok::<_, std::convert::Infallible>(text)
        });
        ([("content-type", "text/event-stream")], axum::body::Body::from_stream(slowly))
    });
    serve(Router::new().route("/v1/chat/completions", route)).await
}

/// Polls until a condition holds, which it must within the given time. Without a limit to check, use
/// [`wait_until`].
pub async fn wait_at_most(description: &str, limit: Duration, mut condition: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < limit, "not within {limit:?}: {description}");
        tokio::time::sleep(Duration::from_millis(20)).await; // polling interval
    }
}
