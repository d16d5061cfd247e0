//! Views of runs and of cached tool results.

use serde::Serialize;
use serde_json::Value;
use tenure::{
    log::Head,
    run::{CachedToolResult, Run, RunOutcome},
};
use utoipa::ToSchema;

/// A run: one turn of model and tool calls.
#[derive(Debug, Serialize, ToSchema)]
pub struct RunView {
    /// Its id.
    pub id: String,
    /// `queued`, `running`, `paused` (waiting for review or a rate limit), `completed`, `failed` or `cancelled`.
    pub status: &'static str,
    /// When it was started.
    #[schema(format = DateTime)]
    pub started_at: String,
    /// When it ended.
    #[schema(format = DateTime)]
    pub ended_at: Option<String>,
    /// When a run that is paused because of a rate limit resumes.
    #[schema(format = DateTime)]
    pub resumes_at: Option<String>,
    /// The error message, if it failed.
    pub error: Option<String>,
    /// The error as a stable code.
    pub code: Option<String>,
}

impl RunView {
    /// Builds the view of a run. `head` is the current head of its session, which tells whether an open run is
    /// paused, queued or running.
    pub fn of(run: &Run, head: &Head) -> Self {
        let is_unleased = head.lease.as_ref().is_none_or(|l| l.node.is_empty());
        let resumes_at = head.paused_until().filter(|_| run.ended.is_none() && head.run.as_ref() == Some(&run.id));
        let status = match run.ended {
            None if !head.reviews.is_empty() || resumes_at.is_some() => "paused",
            None if is_unleased => "queued",
            None => "running",
            Some((_, RunOutcome::Completed)) => "completed",
            Some((_, RunOutcome::Failed)) => "failed",
            Some((_, RunOutcome::Cancelled)) => "cancelled",
        };
        Self {
            id: run.id.to_string(),
            status,
            started_at: run.started_at.to_string(),
            ended_at: run.ended.map(|(at, _)| at.to_string()),
            resumes_at: resumes_at.map(|at| at.to_string()),
            error: run.error.clone(),
            code: run.code.clone(),
        }
    }
}

/// A tool result in a session's cache.
#[derive(Debug, Serialize, ToSchema)]
pub struct CachedView {
    /// The hash of tool and parameters.
    pub key: String,
    /// The tool.
    pub tool: String,
    /// The parameters.
    pub parameters: Value,
    /// The result.
    pub result: Value,
    /// When it was cached.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// When it expires.
    #[schema(format = DateTime)]
    pub expires_at: Option<String>,
}

impl From<CachedToolResult> for CachedView {
    fn from(c: CachedToolResult) -> Self {
        Self {
            created_at: c.created_at.to_string(),
            expires_at: c.expires_at.map(|t| t.to_string()),
            key: c.key,
            tool: c.tool,
            parameters: c.parameters,
            result: c.result,
        }
    }
}
