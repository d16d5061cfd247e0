//! Tool calls of a run: cache lookup, concurrent execution, and commit of the results in call
//! order.

use super::insist::Backoff;
use super::{Execution, limit};
use crate::executors::tools::ToolInvocation;
use crate::memory::tool;
use crate::rules::next::{CallAction, NextStep, PendingCall, arguments};
use crate::run::executors::{RunEvent, ToolProgress, TurnError};
use crate::types::error::{Error, Result};
use crate::types::message::Message;
use crate::types::tool::{ToolError, ToolOutput};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

impl<'a> Execution<'a> {
    /// Looks up cached results for the tool calls of an answer.
    pub(super) async fn look_up(&mut self, answer: &Message) -> Result<()> {
        self.hits.clear();
        if !self.tools.iter().any(|t| t.cache) {
            return Ok(());
        }
        for call in answer.tool_calls() {
            let cached = self.tools.iter().any(|t| t.cache && t.name == call.name);
            let CallAction::Call(arguments) = arguments(&call) else { continue };
            if !cached {
                continue;
            }
            let arguments = Value::Object(arguments);
            let found = match self.tenure.cache_get(&self.who, &self.session_id, &call.name, &arguments).await {
                // The answer is not persisted yet and must not be lost to an unavailable cache:
                // treat this as a miss and call the tool.
                Err(Error::Unavailable { .. }) => None,
                found => found?,
            };
            if let Some(Value::String(content)) = found.map(|c| c.result) {
                self.hits.insert(call.id, content);
            }
        }
        Ok(())
    }

    /// Executes tool calls concurrently, at most `parallel` at a time, and commits their results in
    /// the order of the calls (D-051). After an error, calls in flight finish and no new ones start
    /// (D-052).
    pub(super) async fn call(&mut self, jobs: Vec<PendingCall>) -> Result<NextStep, TurnError> {
        for job in &jobs {
            let progress = self.progress(job);
            self.tell(RunEvent::Tool(progress)).await;
        }
        let concurrent = self.policy.parallel.max(1);
        let makers: Vec<_> = jobs.iter().map(|job| self.maker(job)).collect();
        let mut waiting = makers.into_iter().enumerate();
        let mut running = FuturesUnordered::new();
        let (mut results, mut kept): (Vec<Option<CallResult>>, usize) = (jobs.iter().map(|_| None).collect(), 0);
        let mut trouble: Option<TurnError> = None;
        loop {
            while running.len() < concurrent && trouble.is_none() {
                let Some((i, call)) = waiting.next() else { break };
                running.push(numbered(i, call));
            }
            let Some(first) = running.next().await else { break };
            let mut ready = vec![first];
            while let Some(Some(next)) = running.next().now_or_never() {
                ready.push(next);
            }
            for (i, made) in ready {
                match made {
                    Ok(made) => results[i] = Some(made),
                    // Calls in flight may have side effects: await their results, but start no new
                    // ones (D-052).
                    Err(e) => trouble = trouble.or(Some(e)),
                }
            }
            if trouble.as_ref().is_some_and(|t| t.code() == "superseded") {
                break;
            }
            let whole = results[kept..].iter().take_while(|r| r.is_some()).count();
            let said = self.said(&jobs[kept..], &mut results[kept..kept + whole]).await;
            kept += whole;
            if kept == jobs.len() {
                return Ok(self.keep(said, true).await?);
            }
            if !said.is_empty() {
                self.keep(said, false).await?;
            }
        }
        match trouble {
            Some(trouble) => {
                let said = self.said(&jobs[kept..], &mut results[kept..]).await;
                self.keep(said, false).await?;
                Err(trouble)
            }
            None => Ok(self.keep(Vec::new(), true).await?),
        }
    }

    /// Converts finished calls into tool messages and notifies the listener of each.
    async fn said(&mut self, jobs: &[PendingCall], results: &mut [Option<CallResult>]) -> Vec<Message> {
        let mut said = Vec::new();
        for (job, made) in jobs.iter().zip(results) {
            if let Some(CallResult::Said(content)) = made.take() {
                said.push(Message::tool(&job.call.id, &content));
                let progress = ToolProgress { content: Some(content), ..self.progress(job) };
                self.calls.push(progress.clone());
                self.tell(RunEvent::Tool(progress)).await;
            }
        }
        said
    }

    fn progress(&self, job: &PendingCall) -> ToolProgress {
        let arguments = match &job.doing {
            CallAction::Call(arguments) => Value::Object(arguments.clone()).to_string(),
            CallAction::Say(_) => job.call.arguments.clone(),
        };
        ToolProgress {
            round: self.rounds.max(1),
            call: job.call.id.clone(),
            tool: job.call.name.clone(),
            arguments,
            content: None,
            cached: self.hits.contains_key(&job.call.id),
        }
    }

    /// Returns a future that executes one call. It borrows nothing from the run, so events can be
    /// sent while it is polled.
    fn maker(&self, job: &PendingCall) -> impl Future<Output = Result<CallResult, TurnError>> + use<'a> {
        let (hands, assistant) = (self.hands, self.assistant.clone());
        let tool = self.tools.iter().find(|t| t.name == job.call.name).cloned().unwrap_or_default();
        let (hit, held) = (self.hits.get(&job.call.id).cloned(), self.held.clone());
        let (timeout, max) = (self.policy.tool_timeout, self.policy.max_result_bytes);
        let (tenure, who, id) = (self.tenure.clone(), self.who.clone(), self.session_id.clone());
        let (session, run) = (self.who.key(&self.session_id), self.run.clone());
        let PendingCall { call, doing } = job.clone();
        async move {
            let arguments = match doing {
                CallAction::Say(content) => return Ok(CallResult::Said(content)),
                CallAction::Call(arguments) => arguments,
            };
            if let Some(content) = hit {
                return Ok(CallResult::Said(content));
            }
            let Some(assistant) = assistant else { return Ok(CallResult::Lost) };
            let ours = call.name == tool::NAME && tenure.memory_tool(&who, &assistant).is_some();
            let tools = match hands.tools {
                Some(tools) => Some(tools),
                None if ours => None,
                None => return Ok(CallResult::Lost),
            };
            // The lease may have expired while this node was suspended, and another node may be
            // executing this call. Renew it first.
            if tenure.now().as_microsecond() >= held.until.load(Ordering::Relaxed) {
                let mut pauses = Backoff::new();
                let end = loop {
                    if let Some(end) = pauses.unless_away(tenure.renew(&who, &id, &run).await).await {
                        break end?;
                    }
                };
                held.until.store(end.as_microsecond(), Ordering::Relaxed);
            }
            let call = ToolInvocation { session, run, id: call.id, tool: call.name, arguments };
            let make = async {
                match tools {
                    Some(tools) if !ours => Ok(tools.call(&assistant, &call).await),
                    _ => match tenure.call_memory(&who, &id, &call).await {
                        Err(e @ Error::Unavailable { .. }) => Ok(Err(ToolError::NotCalled(e.to_string()))),
                        made => made.map(Ok),
                    },
                }
            };
            let made = match tokio::time::timeout(timeout, make).await {
                Ok(made) => made?,
                Err(_) => {
                    let message = format!("tool {:?} took longer than its `tool_timeout`", call.tool);
                    return Err(limit("tool_timeout", message));
                }
            };
            let outcome = match &made {
                Ok(ToolOutput { failed: false, .. }) => "answered",
                Ok(_) => "failed",
                Err(ToolError::NotCalled(_)) => "not_called",
                Err(ToolError::Lost(_)) => "lost",
            };
            metrics::counter!("tenure_tool_calls_total", "outcome" => outcome).increment(1);
            match made {
                Ok(ToolOutput { content, .. }) if content.len() > max => {
                    let message = format!(
                        "tool {:?} answered {} bytes, over the `max_result_bytes` of {max}",
                        call.tool,
                        content.len()
                    );
                    Err(limit("result_too_large", message))
                }
                Ok(ToolOutput { content, failed }) => {
                    if tool.cache && !failed {
                        let arguments = Value::Object(call.arguments);
                        match tenure.cache_put(&who, &id, &call.tool, &arguments, &json!(content)).await {
                            Err(e @ Error::Unavailable { .. }) => {
                                tracing::warn!(session_id = %id, tool = call.tool, error = %e, "a result was not cached");
                            }
                            put => put?,
                        }
                    }
                    Ok(CallResult::Said(content))
                }
                Err(ToolError::Lost(_)) if !tool.is_repeatable() => Ok(CallResult::Lost),
                Err(e) => Ok(CallResult::Said(format!("[{e}]"))),
            }
        }
    }
}

/// The result of a tool call.
enum CallResult {
    Said(String),
    /// The outcome is unknown and the tool is not repeatable: a review is required (D-054).
    Lost,
}

/// Pairs a future's output with the position of its call.
async fn numbered<T>(position: usize, call: impl Future<Output = T>) -> (usize, T) {
    (position, call.await)
}
