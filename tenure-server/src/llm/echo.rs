//! The built-in model: answers immediately, offline and deterministically, so that everything can be tried without
//! a model server.
//!
//! It repeats the user's message and states the number of messages in the prompt. `CALL name {json}` makes it call
//! a tool. Its summaries list the user's messages.

use crate::config::BUILT_IN_MODEL;
use async_trait::async_trait;
use futures_util::stream;
use serde_json::{Value, json};
use tenure::rules::summary::{CONVERSATION_HEADING, PREVIOUS_SUMMARY_HEADING, REQUEST};
use tenure::{
    Message, Model, ModelError, Role,
    run::{ModelChunk, ModelStream, Prompt},
};

/// The built-in, deterministic model.
#[derive(Clone, Copy, Debug)]
pub struct EchoModel;

#[async_trait]
impl Model for EchoModel {
    async fn ask(&self, prompt: Prompt) -> Result<ModelStream, ModelError> {
        let message = answer(&prompt.messages);
        let finish = if message.get("tool_calls").is_some() { "tool_calls" } else { "stop" };
        let words = |text: &str| text.split_whitespace().count();
        let prompt_tokens: usize = prompt.messages.iter().map(|m| words(&m.text())).sum();
        let completion_tokens = words(message["content"].as_str().unwrap_or_default());
        let usage = json!({"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": prompt_tokens + completion_tokens});
        let id = format!("chatcmpl-rehearsal-{}", prompt.messages.len());
        if !prompt.stream {
            let choice = json!({"index": 0, "message": message, "finish_reason": finish});
            let body = json!({"id": id, "object": "chat.completion", "created": 0, "model": BUILT_IN_MODEL, "choices": [choice], "usage": usage});
            return Ok(Box::pin(stream::iter([Ok(ModelChunk::Complete(body.to_string()))])));
        }
        let mut deltas = vec![json!({"role": "assistant", "content": ""})];
        if let Some(text) = message["content"].as_str() {
            deltas.extend(text.split_inclusive(' ').map(|word| json!({"content": word})));
        }
        if let Some(Value::Array(calls)) = message.get("tool_calls") {
            for (i, call) in calls.iter().enumerate() {
                let mut call = call.clone();
                call["index"] = json!(i);
                deltas.push(json!({"tool_calls": [call]}));
            }
        }
        let chunk = |delta: Value, finish: Value| {
            let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
            json!({"id": id, "object": "chat.completion.chunk", "created": 0, "model": BUILT_IN_MODEL, "choices": [choice]})
        };
        let mut chunks: Vec<Value> = deltas.into_iter().map(|d| chunk(d, Value::Null)).collect();
        chunks.push(chunk(json!({}), json!(finish)));
        let wants_usage =
            prompt.options.get("stream_options").is_some_and(|o| o.replace(' ', "").contains("\"include_usage\":true"));
        if wants_usage {
            let mut last = chunk(json!({}), Value::Null);
            last["choices"] = json!([]);
            last["usage"] = usage;
            chunks.push(last);
        }
        Ok(Box::pin(stream::iter(chunks.into_iter().map(|c| Ok(ModelChunk::Chunk(c.to_string()))))))
    }
}

fn answer(messages: &[Message]) -> Value {
    if let [request, transcript] = messages
        && request.text().starts_with(REQUEST)
    {
        return json!({"role": "assistant", "content": summary(&transcript.text())});
    }
    let last = messages.iter().rev().find(|m| !m.role().is_instruction());
    let count = format!("I see {} message{}.", messages.len(), if messages.len() == 1 { "" } else { "s" });
    let Some(last) = last else {
        return json!({"role": "assistant", "content": format!("There is no message to answer. {count}")});
    };
    let text = last.text();
    match last.role() {
        Role::User => {
            let calls: Vec<Value> = text.lines().filter_map(call).enumerate().map(|(i, (name, arguments))| {
                json!({"id": format!("call_{}_{i}", messages.len()), "type": "function", "function": {"name": name, "arguments": arguments}})
            }).collect();
            if !calls.is_empty() {
                return json!({"role": "assistant", "content": null, "tool_calls": calls});
            }
            json!({"role": "assistant", "content": format!("You said: {text} {count}")})
        }
        Role::Tool => json!({"role": "assistant", "content": format!("The tool said: {text} {count}")}),
        _ => json!({"role": "assistant", "content": format!("I said: {text} {count}")}),
    }
}

/// Summarizes a conversation as a list of the first 40 characters of each user message.
fn summary(transcript: &str) -> String {
    let (before, turns) = transcript.split_once(CONVERSATION_HEADING).unwrap_or(("", transcript));
    let before = before.trim().strip_prefix(PREVIOUS_SUMMARY_HEADING).map(|b| b.trim().to_owned());
    let user_lines = turns.lines().filter_map(|line| line.strip_prefix("user: ")).map(|t| t.chars().take(40).collect());
    let all: Vec<String> = before.into_iter().chain(user_lines).collect();
    let all = all.join("; ");
    if all.starts_with("The user said: ") { all } else { format!("The user said: {all}") }
}

/// Parses a line `CALL name {json}` into name and arguments. Missing arguments become `{}`.
fn call(line: &str) -> Option<(String, String)> {
    let rest = line.trim().strip_prefix("CALL ")?.trim();
    let (name, arguments) = rest.split_once(char::is_whitespace).unwrap_or((rest, "{}"));
    let arguments = arguments.trim();
    serde_json::from_str::<Value>(arguments).ok().filter(Value::is_object)?;
    (!name.is_empty()).then(|| (name.to_owned(), arguments.to_owned()))
}
