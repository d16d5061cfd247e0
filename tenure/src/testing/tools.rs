//! Tools that record their executions.

use crate::executors::tools::{ToolContext, ToolInvocation, Tools};
use crate::types::id::SessionKey;
use crate::types::tool::{Tool, ToolError, ToolOutput};
use async_trait::async_trait;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use tokio::sync::Semaphore;

/// What a tool does when it is called.
#[derive(Clone, Debug)]
pub enum ToolBehavior {
    /// Executes the call and returns this result.
    Succeeds(String),
    /// Executes the call and returns this text as a failure.
    Fails(String),
    /// Executes the call, but its result is lost.
    LosesResult,
    /// Does not execute the call.
    Unavailable,
    /// Executes the call once a permit is available.
    WaitsForPermit(Arc<Semaphore>),
    /// Executes the call and never returns.
    Hangs,
}

impl ToolBehavior {
    /// [`ToolBehavior::Succeeds`] with this result.
    pub fn succeeds(text: impl Into<String>) -> Self {
        Self::Succeeds(text.into())
    }

    /// [`ToolBehavior::Fails`] with this text.
    pub fn fails(text: impl Into<String>) -> Self {
        Self::Fails(text.into())
    }
}

/// Tools with a scripted behavior that record their executions.
#[derive(Debug, Default)]
pub struct CountingTools {
    tools: Vec<(Tool, ToolBehavior)>,
    /// The executed calls, in order: tool and arguments.
    executed: Mutex<Vec<(String, Value)>>,
    running: AtomicUsize,
    max_concurrent: AtomicUsize,
}

impl CountingTools {
    /// These tools. A call of another tool panics.
    pub fn new(tools: impl IntoIterator<Item = (Tool, ToolBehavior)>) -> Self {
        Self { tools: tools.into_iter().collect(), ..Self::default() }
    }

    /// The arguments of the executed calls of a tool, in order.
    pub fn calls(&self, tool: &str) -> Vec<Value> {
        let executed = self.executed.lock().unwrap();
        executed.iter().filter(|(name, _)| name == tool).map(|(_, arguments)| arguments.clone()).collect()
    }

    /// The number of executions per tool and arguments; the keys are `TOOL ARGUMENTS`.
    pub fn counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for (tool, arguments) in self.executed.lock().unwrap().iter() {
            *counts.entry(format!("{tool} {arguments}")).or_default() += 1;
        }
        counts
    }

    /// The largest number of calls that ran at the same time.
    pub fn max_concurrent(&self) -> usize {
        self.max_concurrent.load(SeqCst)
    }

    fn record(&self, call: &ToolInvocation) {
        self.executed.lock().unwrap().push((call.tool.clone(), Value::Object(call.arguments.clone())));
    }

    async fn execute(&self, call: &ToolInvocation) -> Result<ToolOutput, ToolError> {
        self.max_concurrent.fetch_max(self.running.fetch_add(1, SeqCst) + 1, SeqCst);
        let _running = RunningCall(&self.running);
        let entry = self.tools.iter().find(|(tool, _)| tool.name == call.tool);
        let (_, behavior) = entry.unwrap_or_else(|| panic!("there is no tool {}", call.tool));
        // Let other calls start.
        tokio::task::yield_now().await;
        let output = |content: &str, failed| Ok(ToolOutput { content: content.to_owned(), failed });
        match behavior {
            ToolBehavior::Unavailable => return Err(ToolError::NotCalled("the tool is unavailable".to_owned())),
            ToolBehavior::WaitsForPermit(permits) => {
                permits.acquire().await.unwrap().forget();
                self.record(call);
                return output(&format!("{} is done", call.tool), false);
            }
            _ => self.record(call),
        }
        if let ToolBehavior::Hangs = behavior {
            return std::future::pending().await;
        }
        tokio::task::yield_now().await;
        match behavior {
            ToolBehavior::Succeeds(text) => output(text, false),
            ToolBehavior::Fails(text) => output(text, true),
            _ => Err(ToolError::Lost("the connection broke".to_owned())),
        }
    }
}

#[async_trait]
impl Tools for CountingTools {
    async fn list(&self, _: &ToolContext<'_>) -> Result<Vec<Tool>, ToolError> {
        Ok(self.tools.iter().map(|(tool, _)| tool.clone()).collect())
    }

    async fn call(&self, _: &ToolContext<'_>, call: &ToolInvocation) -> Result<ToolOutput, ToolError> {
        self.execute(call).await
    }

    async fn end(&self, _: &SessionKey) {}
}

/// Counts a running call until it is dropped, which includes cancelled calls.
struct RunningCall<'a>(&'a AtomicUsize);

impl Drop for RunningCall<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// A tool with side effects and without parameters.
pub fn tool(name: &str) -> Tool {
    Tool { name: name.to_owned(), description: format!("does {name}"), parameters: json!({}), ..Tool::default() }
}

/// A tool without side effects and without parameters.
pub fn read_only_tool(name: &str) -> Tool {
    Tool { read_only: true, ..tool(name) }
}
