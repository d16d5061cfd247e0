//! Export and import of sessions: an export contains everything that is needed to continue the
//! session elsewhere.

pub(crate) mod log;

use crate::engine::draft::{Draft, Need};
use crate::rules::session::Session;
use crate::store::query::{Query, Whose};
use crate::tenure::Tenure;
use crate::types::blob::{Blob, BlobId};
use crate::types::digest::Mark;
use crate::types::entry::{Change, Checkpointed, Created, Entry, InfoChange, Origin, Post, Record, Rewound};
use crate::types::error::{Error, Result};
use crate::types::head::{DECISIONS, Head};
use crate::types::id::{Label, Principal, Seq, SessionId};
use crate::types::message::Message;
use crate::types::status::Status;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashSet};

/// The newest version of the export format. Version 1 has no log.
pub const EXPORT_FORMAT: u32 = 2;

/// The maximum number of earlier imports of the same export that are listed.
const MAX_DUPLICATES: usize = 10;

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
    /// Positions of system messages that replaced the instructions before them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lead: Vec<usize>,
    /// The checkpoints.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<ExportedCheckpoint>,
    /// The log, including inherited records and discarded messages. In its messages, markers stand
    /// for media (D-091). With the log, an import preserves times, runs, reviews and branches
    /// (D-089).
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "log::records")]
    pub log: Vec<Record>,
    /// Media of the log that are not in `messages`, as base64 by their hash.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub blobs: BTreeMap<BlobId, String>,
}

/// An exported checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExportedCheckpoint {
    /// The label.
    pub label: Label,
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

impl Tenure {
    /// Exports a session with its log.
    pub async fn export(&self, who: &Principal, id: &SessionId) -> Result<Export> {
        let head = self.live(who, id).await?;
        let log: Vec<Record> = self.engine.log(&head).await?.into_iter().flatten().collect();
        let session = Session::replay(&head.key(), log.iter().cloned());
        let session = session.ok_or_else(|| {
            Error::corrupt(format!("session {}", head.key()), "its log does not begin with `created`")
        })?;
        let mut blobs = BTreeMap::new();
        for id in log::media_beside(&log, &session) {
            let missing = || Error::corrupt(format!("blob {id}"), "it is missing");
            let bytes = self.store().blob(&head.tenant, &id).await?.ok_or_else(missing)?;
            blobs.insert(id, STANDARD.encode(bytes));
        }
        let metadata = session.info.metadata.clone();
        let readable = Export::from(self.engine.attach(session).await?);
        let log = log.into_iter().map(log::marked).collect();
        Ok(Export { metadata, log, blobs, ..readable })
    }

    /// Lists the sessions of the principal that the same export was imported to before, newest
    /// first, at most ten.
    pub async fn imported_before(&self, who: &Principal, export: &Export) -> Result<Vec<SessionId>> {
        self.engine.know(&who.tenant).await?;
        let mut query = Query::new(Whose::Tenant(who.tenant.clone()), MAX_DUPLICATES);
        query.origin = Some(hash(&of_form(export.clone())));
        self.engine.narrow(who, &mut query)?;
        let heads = self.store().heads(&query).await?;
        Ok(heads.into_iter().map(|h| h.info.session_id).collect())
    }

    /// Imports a session under an id, in one atomic commit. If the id is unused, the session is
    /// created with the export's log. An existing session is replaced: its messages are discarded
    /// by a rewind, not destroyed (D-093), and it gets the export's messages, checkpoints and info,
    /// but keeps its own log.
    pub async fn import(&self, who: &Principal, id: &SessionId, export: Export) -> Result<Head> {
        self.engine.know(&who.tenant).await?;
        let export = of_form(export);
        let (entries, blobs) = self.prepare(who, &export)?;
        for _ in 0..=self.limits().max_retries {
            let replaced = self.write(who, id, Need::Session, |state, now| {
                let session = self.engine.whole_ref(state, id)?;
                if session.status == Status::Deleted {
                    return Err(Error::Gone { session_id: id.clone(), status: Status::Deleted.as_str() });
                }
                let mut all = Vec::new();
                if session.status != Status::Active {
                    all.push(Entry::Status { to: Status::Active, reason: Some("imported".to_owned()) });
                }
                let mut cut = Vec::new();
                if !session.messages.is_empty() || !session.checkpoints.is_empty() {
                    // To the very beginning: checkpoints before the first message are discarded too.
                    all.push(Entry::Rewound(Rewound { to: 0, mark: Mark::default() }));
                    cut = session.messages.iter().map(|m| m.message.clone()).collect();
                }
                all.push(Entry::info(replacement(&session.info.metadata, &export)));
                all.extend(entries.iter().cloned());
                let mut after = session.head().clone();
                for (seq, entry) in (after.seq + 1..).zip(&all) {
                    after.apply(&Record { seq, at: now, entry: entry.clone() });
                }
                let mut draft = Draft::new(all, after);
                (draft.cut, draft.blobs) = (cut, blobs.clone());
                Ok(draft)
            });
            match replaced.await {
                Err(Error::NotFound { .. }) => {}
                answer => return answer,
            }
            self.engine.check_expected_none(id)?;
            match self.begin_import(who, id, &export, &entries, blobs.clone()).await {
                // The session was created concurrently, or belongs to another user: the head check
                // distinguishes the two.
                Err(Error::Exists { session_id }) => {
                    self.head(who, &session_id).await.map_err(|_| Error::Exists { session_id })?;
                }
                answer => return answer,
            }
        }
        Err(Error::Conflict { session_id: id.clone(), expected: 0 })
    }

    /// Imports a session under an unused id. If the id is in use, it is [`Error::Exists`].
    pub async fn import_new(&self, who: &Principal, id: &SessionId, export: &Export) -> Result<Head> {
        self.engine.know(&who.tenant).await?;
        let export = of_form(export.clone());
        let (entries, blobs) = self.prepare(who, &export)?;
        self.begin_import(who, id, &export, &entries, blobs).await
    }

    /// Checks whether an export could be imported. Nothing is written.
    pub fn check_export(&self, who: &Principal, export: &Export) -> Result<()> {
        self.prepare(who, &of_form(export.clone())).map(drop)
    }

    /// Validates an export. Returns the entries and blobs for an import without the log.
    fn prepare(&self, who: &Principal, export: &Export) -> Result<(Vec<Entry>, Vec<Blob>)> {
        if export.tenure > EXPORT_FORMAT {
            let (place, found, known) = ("the export".to_owned(), export.tenure, EXPORT_FORMAT);
            return Err(Error::NewerFormat { place, found, known });
        }
        let mut info = created(who, export);
        if !export.log.is_empty() {
            // The decisions are compared with those in the log instead.
            info.metadata.remove(DECISIONS);
            let id = export.session_id.clone().unwrap_or_else(SessionId::generate);
            self.rebuild(who, &id, export, self.origin(export), self.now())?;
        }
        self.engine.check_info(&info)?;
        let (stored, blobs) = self.engine.detach(&export.messages)?;
        Ok((imported(export, &stored)?, blobs))
    }

    /// Creates the session of an import.
    async fn begin_import(
        &self,
        who: &Principal,
        id: &SessionId,
        export: &Export,
        entries: &[Entry],
        blobs: Vec<Blob>,
    ) -> Result<Head> {
        let (now, mut origin) = (self.now(), self.origin(export));
        let (mut records, blobs) = if export.log.is_empty() {
            origin.upto = 1 + entries.len() as Seq;
            let created = Entry::created(Created { origin: Some(origin), ..created(who, export) });
            let records = (1..).zip([created].into_iter().chain(entries.iter().cloned()));
            (records.map(|(seq, entry)| Record { seq, at: now, entry }).collect(), blobs)
        } else {
            self.rebuild(who, id, export, origin, now)?
        };
        self.engine.reserve_session(who, records.iter()).await?;
        let more = records.split_off(1);
        self.engine.begin_with(&who.key(id), &records[0], more, blobs).await
    }

    /// The origin of an imported session.
    fn origin(&self, export: &Export) -> Origin {
        Origin { export: hash(export), at: self.now(), upto: 0 }
    }
}

/// The hash by which an export is recognized.
fn hash(export: &Export) -> String {
    let mut hash = blake3::Hasher::new();
    // Writing into a hash cannot fail, and an export has only string keys.
    let _ = serde_json::to_writer(&mut hash, export);
    hash.finalize().to_hex().to_string()
}

/// Removes the review decisions from an export of version 1, which has no log that proves them.
fn of_form(mut export: Export) -> Export {
    if export.tenure == 1 {
        export.metadata.remove(DECISIONS);
    }
    export
}

/// Prefixes the path of an invalid parameter with a location.
fn within(place: &str, e: Error) -> Error {
    match e {
        Error::Invalid { param, message } if param.is_empty() => Error::invalid(place, message),
        Error::Invalid { param, message } => Error::invalid(format!("{place}.{param}"), message),
        other => other,
    }
}

/// The change that makes the info of a session equal to that of an export. It is empty if they are equal.
fn difference(head: &Head, export: &Export) -> InfoChange {
    let all = replacement(&head.info.metadata, export);
    InfoChange {
        model: if head.info.model == export.model { Change::Keep } else { all.model },
        title: if head.info.title == export.title { Change::Keep } else { all.title },
        tags: if head.info.tags == export.tags { Change::Keep } else { all.tags },
        metadata: all.metadata,
    }
}

impl From<Session> for Export {
    fn from(session: Session) -> Export {
        let (head, info) = (session.head().clone(), session.info.clone());
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
            lead: (0..session.messages.len()).filter(|i| session.messages[*i].lead).collect(),
            checkpoints: checkpoints.collect(),
            messages: session.messages.into_iter().map(|m| m.message).collect(),
            log: Vec::new(),
            blobs: BTreeMap::new(),
        }
    }
}

/// The entry that creates the session of an import without the log.
fn created(who: &Principal, export: &Export) -> Created {
    let Export { assistant, thread, model, title, tags, metadata, .. } = export.clone();
    Created { user: who.user.clone(), assistant, thread, model, title, tags, metadata, ..Created::default() }
}

/// Converts messages and checkpoints to entries, in log order.
fn imported(export: &Export, stored: &[Message]) -> Result<Vec<Entry>> {
    let mut entries = Vec::with_capacity(stored.len() + export.checkpoints.len());
    if let Some(i) = export.checkpoints.iter().position(|c| c.position > stored.len()) {
        return Err(Error::invalid(format!("checkpoints[{i}].position"), "there are fewer messages than that"));
    }
    // The sort is stable, so that checkpoints at one position keep their order.
    let mut checkpoints: Vec<&ExportedCheckpoint> = export.checkpoints.iter().collect();
    checkpoints.sort_by_key(|c| c.position);
    let mut checkpoints = checkpoints.into_iter().peekable();
    let lead: HashSet<usize> = export.lead.iter().copied().collect();
    for position in 0..=stored.len() {
        while let Some(c) = checkpoints.next_if(|c| c.position == position) {
            let (label, auto, state) = (c.label.clone(), c.auto, c.state.clone());
            entries.push(Entry::Checkpoint(Checkpointed { label, auto, run: None, step: None, state }));
        }
        if let Some(message) = stored.get(position) {
            let lead = lead.contains(&position);
            entries.push(Entry::Message(Post { lead, ..Post::from(message.clone()) }));
        }
    }
    Ok(entries)
}

/// The change that replaces the info of a session by that of an export.
fn replacement(old: &Map<String, Value>, export: &Export) -> InfoChange {
    InfoChange {
        model: export.model.clone().into(),
        title: export.title.clone().into(),
        tags: Change::Set(export.tags.clone()),
        metadata: patch_between(&without_decisions(old), &without_decisions(&export.metadata)),
    }
}

/// The metadata that clients can write.
fn without_decisions(metadata: &Map<String, Value>) -> Map<String, Value> {
    metadata.iter().filter(|(k, _)| *k != DECISIONS).map(|(k, v)| (k.clone(), v.clone())).collect()
}

/// The merge patch that turns one object into another.
fn patch_between(old: &Map<String, Value>, new: &Map<String, Value>) -> Map<String, Value> {
    let gone = old.keys().filter(|k| !new.contains_key(*k)).map(|k| (k.clone(), Value::Null));
    let changed = new.iter().filter(|(k, v)| old.get(*k) != Some(v)).map(|(k, v)| match (old.get(k), v) {
        (Some(Value::Object(old)), Value::Object(new)) => (k.clone(), Value::Object(patch_between(old, new))),
        (_, v) => (k.clone(), v.clone()),
    });
    gone.chain(changed).collect()
}
