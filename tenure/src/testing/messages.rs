//! Builders for messages.

use crate::types::message::Message;
use base64::Engine;
use serde_json::{Value, json};

/// An assistant message with one tool call. Arguments that are a string are sent as they are, so
/// that they can be malformed.
pub fn tool_call_message(call_id: &str, tool: &str, arguments: &Value) -> Message {
    Message::from_value(&super::model::tool_calls_answer(&[(call_id, tool, arguments.clone())])).unwrap()
}

/// The messages of turn `n`: a question, a call of the tool `search`, its result, and an answer.
pub fn turn_messages(n: usize) -> Vec<Message> {
    let call_id = format!("c{n}");
    vec![
        Message::user(&format!("question {n}")),
        tool_call_message(&call_id, "search", &json!({})),
        Message::tool(&call_id, &format!("result {n}")),
        Message::assistant(&format!("answer {n}")),
    ]
}

/// A user message with a text and an image that is large enough to be stored as a blob. The data of
/// the image is `fill`, repeated.
pub fn image_message(text: &str, fill: &str) -> Message {
    let data = base64::engine::general_purpose::STANDARD.encode(fill.repeat(3000));
    let image = json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{data}")}});
    let content = [json!({"type": "text", "text": text}), image];
    Message::from_value(&json!({"role": "user", "content": content})).unwrap()
}
