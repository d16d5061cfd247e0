//! Your own model and tool, and a run that resumes after a crash: `cargo run --example agent`.
//!
//! The example starts itself a second time. That process begins a turn and is killed while the tool
//! is executing. The first process then opens the same file and resumes the run: the model is not
//! asked again for what it has already answered, and the tool call is repeated only because the
//! tool is declared idempotent.

use async_trait::async_trait;
use serde_json::json;
use std::process::Command;
use tenure::run::{ModelStream, Prompt, ToolContext, ToolInvocation, model_answer};
use tenure::{
    Executors, Message, Model, ModelError, Role, RunRequest, SessionHandle, Tenure, Tool, ToolError, ToolOutput, Tools,
};

/// A model without a network: it requests the tool, then answers with the tool's result. A real one
/// would send `prompt.messages` to a server.
struct Weatherman;

#[async_trait]
impl Model for Weatherman {
    async fn ask(&self, prompt: Prompt) -> Result<ModelStream, ModelError> {
        let last = prompt.messages.last().ok_or(ModelError::Broken { reason: "empty prompt".into() })?;
        println!("  model: asked with {} messages", prompt.messages.len());
        Ok(model_answer(match last.role() {
            Role::Tool => Message::assistant(&format!("It is {} in Bern.", last.text())),
            _ => Message::assistant_tool_calls([("call_1", "temperature", json!({"city": "Bern"}))]),
        }))
    }
}

/// One tool. `die` is set in the process that is to crash.
struct Thermometer {
    die: bool,
}

#[async_trait]
impl Tools for Thermometer {
    async fn list(&self, _: &ToolContext<'_>) -> Result<Vec<Tool>, ToolError> {
        Ok(vec![Tool {
            name: "temperature".into(),
            description: "The current temperature of a city.".into(),
            parameters: json!({"type": "object", "properties": {"city": {"type": "string"}}}),
            // Calls may be repeated after a crash. Without this, a person would be asked whether the
            // interrupted call was executed.
            idempotent: true,
            ..Tool::default()
        }])
    }

    async fn call(&self, _: &ToolContext<'_>, call: &ToolInvocation) -> Result<ToolOutput, ToolError> {
        println!("  tool: {}({})", call.tool, json!(call.arguments));
        if self.die {
            println!("  (the process dies here)");
            std::process::abort();
        }
        Ok(ToolOutput { content: "21 degrees".into(), failed: false })
    }
}

async fn open(url: &str) -> tenure::Result<SessionHandle> {
    Tenure::open(url).await?.user("acme", "ada")?.session("weather")
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    if let Some(url) = std::env::args().nth(1) {
        println!("first process:");
        let request = RunRequest::new(&Weatherman, [Message::user("How warm is it in Bern?")]);
        open(&url).await?.run(request.tools(&Thermometer { die: true })).await?;
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let url = format!("sqlite:{}", dir.path().join("tenure.db").display());
    let status = Command::new(std::env::current_exe()?).arg(&url).status()?;
    assert!(!status.success(), "the first process was to crash");

    println!("second process:");
    let session = open(&url).await?;
    let tools = Thermometer { die: false };
    let outcome = session.resume(Executors::new(&Weatherman).tools(&tools)).await?;
    let outcome = outcome.ok_or("there is no run to resume")?;
    println!("  answer: {}", outcome.answer.message().map(|m| m.text()).unwrap_or_default());
    for stored in &session.load().await?.messages {
        println!("{}", stored.message.as_str());
    }
    Ok(())
}
