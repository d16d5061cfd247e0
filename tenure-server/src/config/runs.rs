//! The section `runs`: limits of a run, and the webhooks notified of its end.

use super::webhooks::WebhookConfig;
use serde::{Deserialize, Serialize};
use tenure::policy::HumanDuration;

/// Limits of runs, and the webhooks notified of their end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunsConfig {
    /// Duration of the lease on a run. A node that does not renew it in time loses the run to another node.
    pub lease: HumanDuration,
    /// Maximum number of model calls of a run.
    pub max_rounds: usize,
    /// Maximum duration of a run, excluding time waiting for reviews.
    pub max_time: HumanDuration,
    /// Maximum number of tokens of a run. 0 means unlimited.
    pub max_tokens: u64,
    /// Timeout of one tool call.
    pub tool_timeout: HumanDuration,
    /// Maximum size of a tool result in bytes.
    pub max_result_bytes: usize,
    /// Maximum number of concurrent tool calls.
    pub parallel: usize,
    /// Whether MCP servers are started and connected when the server starts, instead of on first use.
    pub eager_tools: bool,
    /// Maximum time for which a model call waits for a model server that is rate limited.
    pub retry_wait: HumanDuration,
    /// Maximum duration of one pause because of a rate limit. Zero means that runs fail instead.
    pub max_pause: HumanDuration,
    /// Webhooks notified when a run ends.
    pub webhooks: Vec<WebhookConfig>,
}

impl Default for RunsConfig {
    fn default() -> Self {
        let policy = tenure::policy::RunPolicy::default();
        let limits = tenure::Limits::default();
        Self {
            lease: HumanDuration::of(limits.lease),
            max_rounds: policy.max_rounds,
            max_time: HumanDuration::of(policy.max_time),
            max_tokens: policy.max_tokens.unwrap_or(0),
            tool_timeout: HumanDuration::of(policy.tool_timeout),
            max_result_bytes: policy.max_result_bytes,
            parallel: policy.parallel,
            eager_tools: false,
            retry_wait: HumanDuration::of(policy.retry_wait),
            max_pause: HumanDuration::of(policy.max_pause),
            webhooks: Vec::new(),
        }
    }
}

impl RunsConfig {
    pub(super) fn policy(&self) -> tenure::policy::RunPolicy {
        let time = |p: HumanDuration| p.duration().unwrap_or(std::time::Duration::MAX);
        tenure::policy::RunPolicy {
            max_rounds: self.max_rounds,
            max_time: time(self.max_time),
            max_tokens: (self.max_tokens > 0).then_some(self.max_tokens),
            tool_timeout: time(self.tool_timeout),
            max_result_bytes: self.max_result_bytes,
            parallel: self.parallel,
            retry_wait: time(self.retry_wait),
            max_pause: time(self.max_pause),
            ..tenure::policy::RunPolicy::default()
        }
    }
}
