//! Tool calls of a run: cache lookup, concurrent execution, and commit of the results in call
//! order.

use super::Execution;
use super::retry::Backoff;
use super::tool_call::{CallResult, ToolCall};
use crate::rules::next::{CallAction, NextStep, PendingCall, call_with_model_arguments};
use crate::run::executors::{RunEvent, ToolProgress, TurnError};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::message::Message;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use serde_json::Value;
use std::collections::HashSet;
use std::sync::Arc;

impl<'a> Execution<'a> {
    /// Looks up cached results for the tool calls of an answer.
    pub(super) async fn look_up_cached_results(&mut self, answer: &Message) -> Result<()> {
        self.hits.clear();
        if !self.tools.iter().any(|t| t.cache) {
            return Ok(());
        }
        for call in answer.tool_calls() {
            let cached = self.tools.iter().any(|t| t.cache && t.name == call.name);
            let CallAction::Call(arguments) = call_with_model_arguments(&call) else { continue };
            if !cached {
                continue;
            }
            let arguments = Value::Object(arguments);
            let hit = match self
                .context
                .tenure
                .cache_get(&self.context.principal, &self.context.session_id, &call.name, &arguments)
                .await
            {
                // The answer is not persisted yet and must not be lost to an unavailable cache:
                // treat this as a miss and call the tool.
                Err(Error::Unavailable { .. }) => None,
                hit => hit?,
            };
            if let Some(Value::String(content)) = hit.map(|c| c.result) {
                self.hits.insert(call.id, content);
            }
        }
        Ok(())
    }

    /// Executes tool calls concurrently, at most `parallel` at a time, and commits their results in
    /// the order of the calls (D-051). After an error, calls in flight finish and no new ones start
    /// (D-052).
    pub(super) async fn call_tools(&mut self, jobs: Vec<PendingCall>) -> Result<NextStep, TurnError> {
        for job in &jobs {
            let progress = self.progress(job);
            self.send_event(RunEvent::Tool(progress)).await;
        }
        let (head, called_before) = self.read_state().await?;
        let concurrent = self.policy.parallel.max(1);
        let call = |job: &PendingCall| self.tool_call(job, &head, &called_before).execute();
        let futures: Vec<_> = jobs.iter().map(call).collect();
        let mut waiting = futures.into_iter().enumerate();
        let mut running = FuturesUnordered::new();
        let mut results: Vec<Option<CallResult>> = jobs.iter().map(|_| None).collect();
        let mut committed = 0;
        let mut error: Option<TurnError> = None;
        loop {
            while running.len() < concurrent && error.is_none() {
                let Some((i, call)) = waiting.next() else { break };
                running.push(numbered(i, call));
            }
            let Some(first) = running.next().await else { break };
            let mut ready = vec![first];
            while let Some(Some(next)) = running.next().now_or_never() {
                ready.push(next);
            }
            for (i, result) in ready {
                match result {
                    Ok(result) => results[i] = Some(result),
                    // Calls in flight may have side effects: await their results, but start no new
                    // ones (D-052).
                    Err(e) => error = error.or(Some(e)),
                }
            }
            if error.as_ref().is_some_and(|t| t.code() == "superseded") {
                break;
            }
            let finished = results[committed..].iter().take_while(|r| r.is_some()).count();
            let messages =
                self.result_messages(&jobs[committed..], &mut results[committed..committed + finished]).await;
            committed += finished;
            if committed == jobs.len() {
                return Ok(self.commit_messages(messages, true).await?);
            }
            if !messages.is_empty() {
                self.commit_messages(messages, false).await?;
            }
        }
        match error {
            Some(error) => {
                let messages = self.result_messages(&jobs[committed..], &mut results[committed..]).await;
                self.commit_messages(messages, false).await?;
                Err(error)
            }
            None => Ok(self.commit_messages(Vec::new(), true).await?),
        }
    }

    /// Reads the session's head as of the run's last commit, and the names of the tools that have a result in the loaded
    /// part of the session, which contains at least what the model is shown. The calls do not read the session
    /// themselves: they are not polled while a result is committed, and would then hold its lock.
    async fn read_state(&self) -> Result<(Arc<Head>, HashSet<String>)> {
        let mut backoff = Backoff::new();
        loop {
            let engine = &self.context.tenure.engine;
            let state = engine.read_cached_partial(&self.context.principal, &self.context.session_id, |session| {
                let results = session.messages.iter().filter_map(|m| m.message.tool_call_id());
                let answered: HashSet<String> = results.collect();
                let calls = session.messages.iter().flat_map(|m| m.message.tool_calls());
                let called = calls.filter(|call| answered.contains(&call.id)).map(|call| call.name).collect();
                Ok((Arc::new(session.head.clone()), called))
            });
            if let Some(state) = backoff.unless_unavailable(state.await).await {
                return state;
            }
        }
    }

    /// Converts finished calls into tool messages and notifies the listener of each.
    async fn result_messages(&mut self, jobs: &[PendingCall], results: &mut [Option<CallResult>]) -> Vec<Message> {
        let mut messages = Vec::new();
        for (job, result) in jobs.iter().zip(results) {
            if let Some(CallResult::Content { content, patch }) = result.take() {
                self.metadata_patches.extend((!patch.is_empty()).then_some(patch));
                messages.push(Message::tool(&job.call.id, &content));
                let progress = ToolProgress { content: Some(content), ..self.progress(job) };
                self.calls.push(progress.clone());
                self.send_event(RunEvent::Tool(progress)).await;
            }
        }
        messages
    }

    fn progress(&self, job: &PendingCall) -> ToolProgress {
        let arguments = match &job.action {
            CallAction::Call(arguments) => Value::Object(arguments.clone()).to_string(),
            CallAction::Respond(_) => job.call.arguments.clone(),
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

    /// The execution of one call. It borrows nothing from the run, so events can be sent while it
    /// is polled.
    fn tool_call(&self, job: &PendingCall, head: &Arc<Head>, called_before: &HashSet<String>) -> ToolCall<'a> {
        ToolCall {
            head: head.clone(),
            tenure: self.context.tenure.clone(),
            principal: self.context.principal.clone(),
            session_id: self.context.session_id.clone(),
            run: self.context.run.clone(),
            assistant: self.context.assistant.clone(),
            tools: self.executors.tools,
            built_in: self.built_in.iter().find(|tool| tool.name() == job.call.name).cloned(),
            tool: self.tools.iter().find(|t| t.name == job.call.name).cloned().unwrap_or_default(),
            cached_result: self.hits.get(&job.call.id).cloned(),
            lease_state: self.lease_state.clone(),
            timeout: self.policy.tool_timeout,
            max_result_bytes: self.policy.max_result_bytes,
            pending: job.clone(),
            called_before: called_before.contains(&job.call.name),
        }
    }
}

/// Pairs a future's output with the position of its call.
async fn numbered<T>(position: usize, call: impl Future<Output = T>) -> (usize, T) {
    (position, call.await)
}
