//! The section `runs`: limits of a run, and the webhooks notified of its end.

use super::webhooks::WebhookConfig;
use serde::{Deserialize, Serialize};
use tenure::HumanDuration;

/// Work that goes on by itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunsConfig {
    /// How long a node may work on a run without saying that it still does. After that another takes it over.
    pub lease: HumanDuration,
    /// So many times a run asks the model.
    pub max_rounds: usize,
    /// So long it may take, waiting for people apart.
    pub max_time: HumanDuration,
    /// So many tokens its model may use; 0: any number.
    pub max_tokens: u64,
    /// So long one tool call may take.
    pub tool_timeout: HumanDuration,
    /// So many bytes one tool may answer.
    pub max_result_bytes: usize,
    /// So many tool calls are made at once.
    pub parallel: usize,
    /// Who is told when a run ends.
    pub webhooks: Vec<WebhookConfig>,
}

impl Default for RunsConfig {
    fn default() -> Self {
        let (policy, limits) = (tenure::RunPolicy::default(), tenure::Limits::default());
        Self {
            lease: HumanDuration::of(limits.lease),
            max_rounds: policy.max_rounds,
            max_time: HumanDuration::of(policy.max_time),
            max_tokens: policy.max_tokens.unwrap_or(0),
            tool_timeout: HumanDuration::of(policy.tool_timeout),
            max_result_bytes: policy.max_result_bytes,
            parallel: policy.parallel,
            webhooks: Vec::new(),
        }
    }
}

impl RunsConfig {
    pub(super) fn policy(&self) -> tenure::RunPolicy {
        let time = |p: HumanDuration| p.duration().unwrap_or(std::time::Duration::MAX);
        tenure::RunPolicy {
            max_rounds: self.max_rounds,
            max_time: time(self.max_time),
            max_tokens: (self.max_tokens > 0).then_some(self.max_tokens),
            tool_timeout: time(self.tool_timeout),
            max_result_bytes: self.max_result_bytes,
            parallel: self.parallel,
            ..tenure::RunPolicy::default()
        }
    }
}
