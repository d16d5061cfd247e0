//! The request for a turn: what the client sends, and how it is executed.
use crate::engine::turn_lock::OnBusy;
use crate::executors::model::Model;
use crate::executors::tools::Tools;
use crate::rules::reconcile::plan::IncomingRequest;
use crate::run::executors::{Executors, RunEvent};
use crate::types::id::SessionId;
use crate::types::message::Message;
use crate::types::policy::HistoryMode;
use crate::types::raw_object::RawObject;
use crate::types::resumable::Resumable;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tokio::sync::{Notify, mpsc};

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
    /// The parameters that are stored with the run, so that any process can resume it after a crash.
    /// `None` means that the run ends if its process dies (D-043).
    pub resumable: Option<Resumable>,
    /// Notified when the request has to wait because its session is busy.
    pub queued: Option<Arc<Notify>>,
}

/// A request to execute one turn: the messages, and the model and the tools that execute it.
///
/// ```
/// use tenure::{Message, RunRequest, Tenure};
/// # use tenure::testing::ScriptedModel;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let model = ScriptedModel::new([serde_json::json!({"role": "assistant", "content": "Hello, Ada."})]);
/// let tenure = Tenure::open("memory:").await?;
/// let session = tenure.user("acme", "ada")?.create_session().await?;
/// let outcome = session.run(RunRequest::new(&model, [Message::user("hello")])).await?;
/// assert_eq!(outcome.answer.message().unwrap().text(), "Hello, Ada.");
/// assert_eq!(session.load().await?.messages.len(), 2);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RunRequest<'a> {
    /// The messages, and how the turn is begun.
    pub turn: TurnRequest,
    /// The model and the tools.
    pub executors: Executors<'a>,
}

impl<'a> RunRequest<'a> {
    /// Creates a request with new messages for the session. The run can be resumed after a crash
    /// with [`SessionHandle::resume`](crate::SessionHandle::resume).
    pub fn new(model: &'a dyn Model, messages: impl IntoIterator<Item = Message>) -> Self {
        let turn = TurnRequest {
            messages: messages.into_iter().collect(),
            history: Some(HistoryMode::Append),
            resumable: Some(Resumable::default()),
            ..TurnRequest::default()
        };
        Self { turn, executors: Executors::new(model) }
    }

    /// Sets the tools.
    pub fn tools(mut self, tools: &'a dyn Tools) -> Self {
        self.executors = self.executors.tools(tools);
        self
    }

    /// Sets all fields of the model request besides the conversation, such as `temperature`.
    pub fn options(mut self, options: RawObject) -> Self {
        self.executors = self.executors.options(options);
        self
    }

    /// Streams the answer, and sends the events of the run to a channel as they occur.
    pub fn events(mut self, events: mpsc::Sender<RunEvent>) -> Self {
        self.executors = self.executors.stream(true).events(events);
        self
    }

    /// Sets the policy for a session that is busy with another turn.
    pub fn on_busy(mut self, on_busy: OnBusy) -> Self {
        self.turn.on_busy = on_busy;
        self
    }

    /// Sets an idempotency key: a repeated request with the same key and messages is not executed
    /// again and returns the stored answer.
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Self {
        let body = self.turn.messages.iter().map(Message::as_str).collect::<Vec<_>>().join("\n");
        self.turn.idempotency = Some((key.into(), body));
        self
    }
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
