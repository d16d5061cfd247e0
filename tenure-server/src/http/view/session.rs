//! Views of sessions.

use super::checkpoint::CheckpointView;
use super::json::{to_json, with_fields};
use super::message::{DiscardedView, MessageView, messages};
use super::run::{CachedView, RunView};
use super::summary::SummaryView;
use super::title::display_title;
use serde::Serialize;
use serde_json::{Map, Value};
use tenure::log::Head;
use tenure::{Seq, Session};
use utoipa::ToSchema;

/// A session without its messages.
#[derive(Debug, Serialize, ToSchema)]
pub struct SessionView {
    /// Its id.
    pub id: String,
    /// Alias of `id`.
    pub session_id: String,
    /// `session`.
    pub object: &'static str,
    /// `active`, `paused`, `expired` or `deleted`.
    pub status: &'static str,
    /// Why it is paused, and until when; `null` if it is not paused.
    pub pause: Option<PauseView>,
    /// The user who owns it.
    pub user: String,
    /// The assistant it belongs to.
    pub assistant_id: Option<String>,
    /// The chat thread that shows it.
    pub thread_id: Option<String>,
    /// The model it uses.
    pub model: Option<String>,
    /// A human-readable title.
    pub title: Option<String>,
    /// `title`, or the first words of the first user message. In `GET /sessions/{id}`, and in `GET /sessions` with `include=display_title`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub display_title: Option<String>,
    /// Tags for filtering.
    pub tags: Vec<String>,
    /// Arbitrary metadata.
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    /// The value of `metadata.context`, any JSON value; omitted if there is none.
    #[serde(skip_serializing_if = "Value::is_null")]
    #[schema(value_type = Object)]
    pub context: Value,
    /// When it was created.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// When it was last changed.
    #[schema(format = DateTime)]
    pub updated_at: String,
    /// The time of the last message or run; idle time is measured from it.
    #[schema(format = DateTime)]
    pub active_at: String,
    /// Its fork point, if it is a fork.
    pub parent: Option<ParentView>,
    /// The sequence number of its last record; the `ETag`.
    pub seq: Seq,
    /// The number of messages.
    pub message_count: usize,
    /// The number of turns.
    pub turn_count: usize,
}

/// The pause of a session.
#[derive(Debug, Serialize, ToSchema)]
pub struct PauseView {
    /// The reason, such as `waiting for review` or `rate limited: …`.
    pub reason: Option<String>,
    /// When the session continues by itself, and its run with it; `null` if it waits for a request or a reviewer.
    #[schema(format = DateTime)]
    pub resumes_at: Option<String>,
}

/// The fork point of a session.
#[derive(Debug, Serialize, ToSchema)]
pub struct ParentView {
    /// The ancestor whose log it references.
    pub session_id: String,
    /// The sequence number of the last shared record.
    pub seq: Seq,
    /// The number of shared messages.
    pub position: usize,
}

impl From<&Head> for SessionView {
    fn from(head: &Head) -> Self {
        let info = &head.info;
        Self {
            id: info.session_id.to_string(),
            session_id: info.session_id.to_string(),
            object: "session",
            status: head.status.as_str(),
            pause: head.pause.as_ref().map(|pause| PauseView {
                reason: pause.reason.clone(),
                resumes_at: pause.until.map(|at| at.to_string()),
            }),
            user: head.user.to_string(),
            assistant_id: head.assistant.clone(),
            thread_id: head.thread.clone(),
            model: info.model.clone(),
            title: info.title.clone(),
            display_title: None,
            tags: info.tags.clone(),
            metadata: info.metadata.clone(),
            context: info.context().clone(),
            created_at: info.created_at.to_string(),
            updated_at: info.updated_at.to_string(),
            active_at: head.active_at.to_string(),
            parent: head.parent.as_ref().map(|p| ParentView {
                session_id: p.session.to_string(),
                seq: p.seq,
                position: p.digest.messages,
            }),
            seq: head.seq,
            message_count: head.digest.messages,
            turn_count: head.digest.turns,
        }
    }
}

/// A page of sessions.
#[derive(Debug, Serialize, ToSchema)]
pub struct SessionList {
    /// `list`.
    pub object: &'static str,
    /// The sessions, last active first.
    pub data: Vec<SessionView>,
    /// The cursor of the next page; `null` on the last one.
    pub next_cursor: Option<String>,
}

impl From<tenure::session::SessionPage> for SessionList {
    fn from(page: tenure::session::SessionPage) -> Self {
        let data = page.heads.iter().map(SessionView::from).collect();
        Self { object: "list", data, next_cursor: page.next.map(|c| c.to_string()) }
    }
}

/// A session with its messages.
#[derive(Debug, Serialize, ToSchema)]
pub struct SessionWhole {
    /// The session's head.
    #[serde(flatten)]
    pub session: SessionView,
    /// The messages, oldest first.
    pub messages: Vec<MessageView>,
    /// The checkpoints, oldest first.
    pub checkpoints: Vec<CheckpointView>,
    /// The runs, oldest first.
    pub runs: Vec<RunView>,
    /// The summary that replaces the oldest messages in prompts.
    pub summary: Option<SummaryView>,
    /// With `include=cache`: cached tool results that have not expired.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<Vec<CachedView>>,
    /// With `include=discarded`: messages discarded by rewinds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discarded: Option<Vec<DiscardedView>>,
}

/// The view of a loaded session, with its display title.
fn titled_view(session: &Session) -> SessionView {
    let mut view = SessionView::from(session.head());
    view.display_title = display_title(view.title.as_deref(), &session.messages);
    view
}

/// Renders a [`SessionWhole`] as JSON text, without the parts that have to be requested with `include`.
pub fn full_session(session: &Session) -> String {
    let checkpoints: Vec<_> = session.checkpoints.iter().map(CheckpointView::from).collect();
    let runs: Vec<_> = session.runs.iter().map(|r| RunView::of(r, session.head())).collect();
    let summary = session.summary().map(SummaryView::from);
    let messages = messages(&session.messages, 0);
    let fields = [
        ("messages", messages.as_str()),
        ("checkpoints", &to_json(&checkpoints)),
        ("runs", &to_json(&runs)),
        ("summary", &to_json(&summary)),
    ];
    with_fields(to_json(&titled_view(session)), &fields)
}

#[cfg(test)]
mod tests {
    use super::super::message::tests::view;
    use super::*;
    use tenure::{Append, Message, NewSession, Principal, Tenure};

    #[tokio::test]
    async fn a_session_is_written_as_its_schema_says() {
        let tenure = Tenure::open("memory:").await.unwrap();
        let principal = Principal::default();
        let new = NewSession { title: Some("a \"title\"".to_owned()), ..NewSession::default() };
        let id = tenure.create(&principal, new).await.unwrap().head().info.session_id.clone();
        let messages = vec![Message::user("one"), Message::user("two")];
        tenure.append(&principal, &id, Append { messages, ..Append::default() }).await.unwrap();
        tenure.checkpoint(&principal, &id, None).await.unwrap();
        let session = tenure.load(&principal, &id).await.unwrap();
        let want = SessionWhole {
            session: titled_view(&session),
            messages: session.messages.iter().enumerate().map(|(i, stored)| view(i, stored)).collect(),
            checkpoints: session.checkpoints.iter().map(CheckpointView::from).collect(),
            runs: Vec::new(),
            summary: None,
            cache: None,
            discarded: None,
        };
        assert_eq!((want.messages.len(), want.checkpoints.is_empty()), (2, false));
        assert_eq!(full_session(&session), to_json(&want));
    }
}
