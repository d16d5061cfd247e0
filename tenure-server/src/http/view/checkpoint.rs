//! Views of checkpoints, and request bodies that name a position in a session.

use super::json::{to_json, with_fields};
use super::message::{MessageView, messages, write_messages};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tenure::{Checkpoint, Role, Seq, Session, session::StoredMessage};
use utoipa::ToSchema;

/// A checkpoint: a named position to rewind to or fork at.
#[derive(Debug, Serialize, ToSchema)]
pub struct CheckpointView {
    /// Its name.
    pub label: String,
    /// The number of messages before it.
    pub position: usize,
    /// When it was created.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// Whether it was created automatically.
    pub auto: bool,
    /// The sequence number of its record.
    pub seq: Seq,
    /// The run during which it was created.
    pub run_id: Option<String>,
    /// The step of that run.
    pub step: Option<u64>,
    /// State stored by the client.
    #[schema(value_type = Object)]
    pub state: Map<String, Value>,
}

impl From<&Checkpoint> for CheckpointView {
    fn from(c: &Checkpoint) -> Self {
        Self {
            label: c.label.to_string(),
            position: c.position,
            created_at: c.created_at.to_string(),
            auto: c.auto,
            seq: c.seq,
            run_id: c.run.as_ref().map(ToString::to_string),
            step: c.step,
            state: c.state.clone(),
        }
    }
}

/// The checkpoints of a session, oldest first.
#[derive(Debug, Serialize, ToSchema)]
pub struct CheckpointList {
    /// `list`.
    pub object: &'static str,
    /// The checkpoints.
    pub data: Vec<CheckpointView>,
    /// Always `null`: the list is complete.
    pub next_cursor: Option<String>,
}

/// A checkpoint with the session's state as of it.
#[derive(Debug, Serialize, ToSchema)]
pub struct CheckpointWhole {
    /// The checkpoint.
    #[serde(flatten)]
    pub checkpoint: CheckpointView,
    /// The messages before it.
    pub messages: Vec<MessageView>,
    /// The tool calls of the last answer that had no result.
    pub pending_tool_calls: Vec<PendingCall>,
    /// The tool results of the current turn.
    pub tool_results: Vec<MessageView>,
    /// The step of the run.
    pub step_index: Option<u64>,
    /// The metadata as of the checkpoint.
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
}

/// A tool call without a result.
#[derive(Debug, Serialize, ToSchema)]
pub struct PendingCall {
    /// Its id.
    pub id: String,
    /// The tool.
    pub name: String,
    /// Its arguments, as the model wrote them.
    pub arguments: String,
    /// Whether its execution had started.
    pub started: bool,
}

/// A position in a session: exactly one field must be set.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlaceBody {
    /// After the newest checkpoint with this label.
    #[serde(default)]
    pub label: Option<String>,
    /// After this number of messages.
    #[serde(default)]
    pub position: Option<usize>,
    /// After this number of turns.
    #[serde(default)]
    pub turn: Option<usize>,
}

/// Renders a [`CheckpointWhole`] as JSON text. `session` is the session as of the checkpoint.
pub fn checkpoint_state(checkpoint: &Checkpoint, session: &Session) -> String {
    let role = |m: &StoredMessage| m.message.role();
    let turn = session.messages.iter().rposition(|m| role(m) == Role::User).map_or(0, |i| i + 1);
    let results = session.messages[turn..].iter().filter(|m| role(m) == Role::Tool);
    let answered: Vec<_> = results.filter_map(|m| m.message.tool_call_id()).collect();
    let answer = session.messages[turn..].iter().rev().find(|m| role(m) == Role::Assistant);
    let started = |id: &str| {
        let since = answer.map_or(0, |m| m.seq);
        session.runs.iter().flat_map(|r| &r.tools_started).any(|s| s.seq > since && s.call == id)
    };
    let calls = answer.map(|m| m.message.tool_calls()).unwrap_or_default();
    let pending = calls.into_iter().filter(|c| !answered.contains(&c.id)).map(|c| PendingCall {
        started: started(&c.id),
        id: c.id,
        name: c.name,
        arguments: c.arguments,
    });
    let mut results = String::new();
    let of_turn = session.messages.iter().enumerate().skip(turn);
    write_messages(&mut results, of_turn.filter(|(_, m)| role(m) == Role::Tool));
    let fields = [
        ("messages", messages(&session.messages, 0)),
        ("pending_tool_calls", to_json(&pending.collect::<Vec<_>>())),
        ("tool_results", results),
        ("step_index", to_json(&checkpoint.step)),
        ("metadata", to_json(&session.head().info.metadata)),
    ];
    with_fields(
        to_json(&CheckpointView::from(checkpoint)),
        &fields.each_ref().map(|(name, value)| (*name, value.as_str())),
    )
}

#[cfg(test)]
mod tests {
    use super::super::message::tests::view;
    use super::*;
    use tenure::{Append, Message, NewSession, Principal, Tenure};

    #[tokio::test]
    async fn the_state_at_a_checkpoint_is_written_as_its_schema_says() {
        let tenure = Tenure::open("memory:").await.unwrap();
        let principal = Principal::default();
        let id = tenure.create(&principal, NewSession::default()).await.unwrap().head().info.session_id.clone();
        let call =
            |id: &str| format!(r#"{{"id":"{id}","type":"function","function":{{"name":"f","arguments":"{{}}"}}}}"#);
        let answer = format!(r#"{{"role":"assistant","content":null,"tool_calls":[{},{}]}}"#, call("a"), call("b"));
        let result = r#"{"role":"tool","tool_call_id":"a","content":"done"}"#;
        let messages = vec![Message::user("go"), Message::parse(&answer).unwrap(), Message::parse(result).unwrap()];
        tenure.append(&principal, &id, Append { messages, ..Append::default() }).await.unwrap();
        let created = tenure.checkpoint(&principal, &id, None).await.unwrap();
        let session = tenure.state_at(&principal, &id, &created).await.unwrap();
        let views = || session.messages.iter().enumerate().map(|(i, stored)| view(i, stored));
        let pending = PendingCall { id: "b".into(), name: "f".into(), arguments: "{}".into(), started: false };
        let want = CheckpointWhole {
            checkpoint: CheckpointView::from(&created),
            messages: views().collect(),
            pending_tool_calls: vec![pending],
            tool_results: views().skip(2).collect(),
            step_index: created.step,
            metadata: Map::new(),
        };
        assert_eq!(checkpoint_state(&created, &session), to_json(&want));
    }
}
