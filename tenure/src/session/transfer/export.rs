//! The export of a session.

use crate::rules::session::Session;
use crate::session::transfer::records;
use crate::types::blob::BlobId;
use crate::types::entry::{Patch, Record, SessionPatch};
use crate::types::error::Error;
use crate::types::head::{DECISIONS, Head};
use crate::types::id::{CheckpointLabel, SessionId};
use crate::types::message::Message;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The newest version of the export format. Version 1 has no log.
pub const EXPORT_FORMAT: u32 = 2;

/// An exported session: everything that is needed to continue it elsewhere. Only `messages` is required.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Export {
    /// The version of the export format. Absent in lists of plain messages.
    #[serde(default)]
    pub tenure: u32,
    /// The id of the session where it was exported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// The time at which the session was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at: Option<Timestamp>,
    /// The time of the last change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub updated_at: Option<Timestamp>,
    /// The assistant that the session belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assistant: Option<String>,
    /// The chat thread that shows the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread: Option<String>,
    /// The model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The title.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// The tags.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// The metadata.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
    /// The messages with their media, each as it was given.
    pub messages: Vec<Message>,
    /// The time of each message, if the source has one. With a log, the times of its records are used instead.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub message_times: Vec<Option<Timestamp>>,
    /// Positions of system messages that replaced the instructions before them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "lead")]
    pub instruction_positions: Vec<usize>,
    /// The checkpoints.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<ExportedCheckpoint>,
    /// The log, including inherited records and discarded messages. In its messages, markers stand
    /// for media (D-091). With the log, an import preserves times, runs, reviews and branches
    /// (D-089).
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "records::as_list")]
    pub log: Vec<Record>,
    /// Media of the log that are not in `messages`, as base64 by their hash.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub blobs: BTreeMap<BlobId, String>,
}

/// An exported checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExportedCheckpoint {
    /// The label.
    pub label: CheckpointLabel,
    /// The number of messages before the checkpoint.
    pub position: usize,
    /// Whether the checkpoint was set automatically.
    #[serde(default)]
    pub auto: bool,
    /// The time at which the checkpoint was set in the exported session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at: Option<Timestamp>,
    /// Application state that was stored with the checkpoint.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub state: Map<String, Value>,
}

/// Prefixes the path of an invalid parameter with a location.
pub(crate) fn prefix_param(location: &str, e: Error) -> Error {
    match e {
        Error::Invalid { param, message } if param.is_empty() => Error::invalid(location, message),
        Error::Invalid { param, message } => Error::invalid(format!("{location}.{param}"), message),
        other => other,
    }
}

/// The change that makes the info of a session equal to that of an export. It is empty if they are equal.
pub(crate) fn difference(head: &Head, export: &Export) -> SessionPatch {
    let all = replacement(&head.info.metadata, export);
    SessionPatch {
        model: if head.info.model == export.model { Patch::Keep } else { all.model },
        title: if head.info.title == export.title { Patch::Keep } else { all.title },
        tags: if head.info.tags == export.tags { Patch::Keep } else { all.tags },
        metadata: all.metadata,
    }
}

impl From<Session> for Export {
    fn from(session: Session) -> Export {
        let head = session.head().clone();
        let info = session.head().info.clone();
        let checkpoints = session.checkpoints.iter().map(|c| ExportedCheckpoint {
            label: c.label.clone(),
            position: c.position,
            auto: c.auto,
            created_at: Some(c.created_at),
            state: c.state.clone(),
        });
        Export {
            tenure: EXPORT_FORMAT,
            session_id: Some(info.session_id),
            created_at: Some(info.created_at),
            updated_at: Some(info.updated_at),
            assistant: head.assistant,
            thread: head.thread,
            model: info.model,
            title: info.title,
            tags: info.tags,
            // Without the log, nothing proves the review decisions.
            metadata: without_decisions(&info.metadata),
            instruction_positions: (0..session.messages.len())
                .filter(|i| session.messages[*i].replaces_instructions)
                .collect(),
            checkpoints: checkpoints.collect(),
            message_times: Vec::new(),
            messages: session.messages.into_iter().map(|m| m.message).collect(),
            log: Vec::new(),
            blobs: BTreeMap::new(),
        }
    }
}

/// The change that replaces the info of a session by that of an export.
pub(crate) fn replacement(old: &Map<String, Value>, export: &Export) -> SessionPatch {
    SessionPatch {
        model: export.model.clone().into(),
        title: export.title.clone().into(),
        tags: Patch::Set(export.tags.clone()),
        metadata: patch_between(&without_decisions(old), &without_decisions(&export.metadata)),
    }
}

/// The metadata that clients can write.
pub(crate) fn without_decisions(metadata: &Map<String, Value>) -> Map<String, Value> {
    metadata.iter().filter(|(k, _)| *k != DECISIONS).map(|(k, v)| (k.clone(), v.clone())).collect()
}

/// The merge patch that turns one object into another.
pub(crate) fn patch_between(old: &Map<String, Value>, new: &Map<String, Value>) -> Map<String, Value> {
    let removed = old.keys().filter(|k| !new.contains_key(*k)).map(|k| (k.clone(), Value::Null));
    let changed = new.iter().filter(|(k, v)| old.get(*k) != Some(v)).map(|(k, v)| match (old.get(k), v) {
        (Some(Value::Object(old)), Value::Object(new)) => (k.clone(), Value::Object(patch_between(old, new))),
        (_, v) => (k.clone(), v.clone()),
    });
    removed.chain(changed).collect()
}
