//! A model with scripted answers.

use crate::executors::model::{Model, ModelStream, Prompt};
use crate::types::message::{Message, Role};
use crate::types::model::{ModelChunk, ModelError};
use async_trait::async_trait;
use futures_util::stream;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use tokio::sync::Semaphore;

/// A model whose n-th answer in a turn is the n-th of its script, and that records its prompts. The
/// index is derived from the prompt alone, so that the model of another node gives the same answers.
#[derive(Debug, Default)]
pub struct ScriptedModel {
    /// Complete response bodies.
    answers: Vec<String>,
    prompts: Mutex<Vec<Vec<Message>>>,
    permits: Option<Arc<Semaphore>>,
}

impl ScriptedModel {
    /// A model with these answers, which are assistant messages. After the last one, it answers
    /// that its script has ended.
    pub fn new(answers: impl IntoIterator<Item = Value>) -> Self {
        Self { answers: answers.into_iter().map(|message| response(&message)).collect(), ..Self::default() }
    }

    /// A model that takes a permit before each answer. Its prompt is recorded before.
    pub fn with_permits(answers: impl IntoIterator<Item = Value>, permits: &Arc<Semaphore>) -> Self {
        Self { permits: Some(permits.clone()), ..Self::new(answers) }
    }

    /// How often it was called.
    pub fn call_count(&self) -> usize {
        self.prompts.lock().unwrap().len()
    }

    /// The messages of all prompts.
    pub fn prompts(&self) -> Vec<Vec<Message>> {
        self.prompts.lock().unwrap().clone()
    }

    /// The texts of the last prompt's messages.
    pub fn last_prompt(&self) -> Vec<String> {
        let prompts = self.prompts.lock().unwrap();
        prompts.last().map(|messages| messages.iter().map(Message::text).collect()).unwrap_or_default()
    }
}

#[async_trait]
impl Model for ScriptedModel {
    async fn ask(&self, prompt: Prompt) -> Result<ModelStream, ModelError> {
        let question = prompt.messages.iter().rposition(|m| m.role() == Role::User).unwrap_or(0);
        let round = prompt.messages[question..].iter().filter(|m| m.role() == Role::Assistant).count();
        self.prompts.lock().unwrap().push(prompt.messages);
        if let Some(permits) = &self.permits {
            permits.acquire().await.unwrap().forget();
        }
        let scripted = self.answers.get(round).cloned();
        let body = scripted.unwrap_or_else(|| response(&text_answer("The script has no further answer.")));
        Ok(Box::pin(stream::iter([Ok(ModelChunk::Complete(body))])))
    }
}

fn response(message: &Value) -> String {
    let choice = json!({"index": 0, "message": message, "finish_reason": "stop"});
    let usage = json!({"total_tokens": 10});
    let body = json!({"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage});
    body.to_string()
}

/// An answer with text.
pub fn text_answer(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

/// An answer with tool calls: id, tool and arguments. Arguments that are a string are sent as they
/// are, so that they can be malformed.
pub fn tool_calls_answer(calls: &[(&str, &str, Value)]) -> Value {
    let call = |(id, tool, arguments): &(&str, &str, Value)| {
        let arguments = arguments.as_str().map_or_else(|| arguments.to_string(), str::to_owned);
        json!({"id": id, "type": "function", "function": {"name": tool, "arguments": arguments}})
    };
    let calls: Vec<Value> = calls.iter().map(call).collect();
    json!({"role": "assistant", "content": null, "tool_calls": calls})
}
