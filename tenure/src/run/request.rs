//! The request for a turn, and the report of how its messages were merged into the stored history.

use crate::engine::turn_lock::OnBusy;

use crate::memory::recall::InjectedMemory;

use crate::rules::reconcile::plan::IncomingRequest;

use crate::types::id::SessionId;
use crate::types::message::Message;
use crate::types::policy::HistoryMode;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::sync::Arc;

use tokio::sync::Notify;

/// The policy for a request to an expired session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnExpired {
    /// Restore the session and continue it.
    #[default]
    Restore,
    /// End the old session with its hooks and move it to another id, where it can be read and
    /// restored until its retention ends. A new session starts (D-018).
    Fresh,
    /// Reject the request.
    Reject,
}

/// A request for a turn.
#[derive(Clone, Debug, Default)]
pub struct TurnRequest {
    /// The session. `None` means that it is found by content matching, or created.
    pub session: Option<SessionId>,
    /// The messages sent by the client.
    pub messages: Vec<Message>,
    /// How to interpret the messages. `None` means the assistant's setting, or else
    /// `default_history`.
    pub history: Option<HistoryMode>,
    /// How to interpret the messages if neither the request nor the assistant specifies it.
    pub default_history: HistoryMode,
    /// Whether the client's SDK marks the request as a retry.
    pub is_retry: bool,
    /// The assistant of the session, if the request creates one.
    pub assistant: Option<String>,
    /// The model's name, stored in the session's head.
    pub model: Option<String>,
    /// Whether to find the session by content matching.
    pub content_matching: bool,
    /// The policy if the session is busy.
    pub on_busy: OnBusy,
    /// The policy if the session has expired.
    pub on_expired: OnExpired,
    /// Idempotency key and body. A repeated key with an equal body is answered once, with the same
    /// response each time (D-047).
    pub idempotency: Option<(String, String)>,
    /// The parameters that the run is started with. A run that names its `model` can be taken over
    /// by another node (D-043).
    pub detail: Map<String, Value>,
    /// Notified when the request has to wait because its session is busy.
    pub queued: Option<Arc<Notify>>,
}

/// The report of how a request's messages were merged into the stored history.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReconcileReport {
    /// Number of request messages that were already stored.
    pub matched: usize,
    /// Number of stored messages that the request omits after the first one that it repeats, such
    /// as tool messages.
    #[serde(rename = "spliced")]
    pub omitted: usize,
    /// Number of stored messages that were rewound.
    pub rewound: usize,
    /// Number of request messages that are new and were stored.
    pub appended: usize,
    /// Number of request messages that are shown to the model but not stored.
    #[serde(default)]
    pub ephemeral: usize,
    /// Ids of tool results that answer no known call. They were dropped.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub orphans: Vec<String>,
    /// Memories that were injected into the prompt.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memories: Vec<InjectedMemory>,
}

impl TurnRequest {
    /// Notifies the subscriber, if there is one, that the request has to wait.
    pub(crate) fn notify_queued(&self) {
        if let Some(queued) = &self.queued {
            queued.notify_one();
        }
    }

    /// The input for reconciling. The request's history mode takes precedence over the assistant's,
    /// and that over the default.
    pub(crate) fn incoming<'a>(
        &self,
        messages: &'a [Message],
        assistant: Option<HistoryMode>,
        has_waited: bool,
    ) -> IncomingRequest<'a> {
        let history = self.history.or(assistant).unwrap_or(self.default_history);
        IncomingRequest { messages, history, is_retry: self.is_retry, has_waited }
    }
}
