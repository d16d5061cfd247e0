//! The request for a turn, and the report of how it was merged.

use crate::engine::turn_lock::OnBusy;

use crate::memory::recall::Told;

use crate::rules::reconcile::plan::Incoming;

use crate::types::id::SessionId;
use crate::types::message::Message;
use crate::types::policy::HistoryMode;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::sync::Arc;

use tokio::sync::Notify;

/// What a request under the id of an expired session does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnExpired {
    /// It goes on with it.
    #[default]
    Restore,
    /// The old session ends with its hooks and moves to another id, where it can be read and restored until its retention ends. A new
    /// session starts.
    Fresh,
    /// It is refused.
    Reject,
}

/// A request for a turn.
#[derive(Clone, Debug, Default)]
pub struct Ask {
    /// The session; if none is named, it is found by content, or begun.
    pub session: Option<SessionId>,
    /// What the client sends.
    pub messages: Vec<Message>,
    /// How to read it; `None`: as the assistant says, else as `default_history` says.
    pub history: Option<HistoryMode>,
    /// How to read it if neither the request nor the assistant says.
    pub default_history: HistoryMode,
    /// The client's SDK says that it sends this request again.
    pub is_retry: bool,
    /// The assistant that a new session belongs to.
    pub assistant: Option<String>,
    /// The model's name, for the session's card.
    pub model: Option<String>,
    /// Whether to look for the session by content.
    pub content_matching: bool,
    /// What to do if the session is busy.
    pub on_busy: OnBusy,
    /// What to do if it has expired.
    pub on_expired: OnExpired,
    /// The same key with the same body is answered once, and the same each time.
    pub idempotency: Option<(String, String)>,
    /// What its run is started with. One that names its `model` can be taken over by another node.
    pub detail: Map<String, Value>,
    /// Is told when the request has to wait because its session is busy.
    pub queued: Option<Arc<Notify>>,
}

/// What was made of the messages of a request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spliced {
    /// How many of them were stored already.
    pub matched: usize,
    /// How many stored messages the request leaves out after the first that it repeats, such as tool messages.
    pub spliced: usize,
    /// How many stored messages were rewound.
    pub rewound: usize,
    /// How many of them are new and were stored.
    pub appended: usize,
    /// How many of them are shown to the model and not stored.
    #[serde(default)]
    pub ephemeral: usize,
    /// Tool results that answer no call we know of, which were left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub orphans: Vec<String>,
    /// Memories that the model was told of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memories: Vec<Told>,
}

impl Ask {
    pub(crate) fn tell_queued(&self) {
        if let Some(queued) = &self.queued {
            queued.notify_one();
        }
    }

    pub(crate) fn incoming<'a>(
        &self,
        messages: &'a [Message],
        assistant: Option<HistoryMode>,
        has_waited: bool,
    ) -> Incoming<'a> {
        let history = self.history.or(assistant).unwrap_or(self.default_history);
        Incoming { messages, history, is_retry: self.is_retry, has_waited }
    }
}
