//! Export and import of sessions: an export contains everything that is needed to continue the
//! session elsewhere.
pub(crate) mod export;
pub(crate) mod log;
pub(crate) mod records;

use crate::engine::pending_commit::PendingCommit;
use crate::engine::status::check_if_match;
use crate::rules::session::Session;
use crate::session::transfer::export::{EXPORT_FORMAT, Export, ExportedCheckpoint, replacement};
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::tenure::Tenure;
use crate::types::blob::Blob;
use crate::types::digest::LogDigest;
use crate::types::entry::{CheckpointEntry, Entry, MessageEntry, Origin, Record, RewindEntry, SessionCreated};
use crate::types::error::{Error, Result};
use crate::types::head::{DECISIONS, Head};
use crate::types::id::{Principal, Seq, SessionId};
use crate::types::message::Message;
use crate::types::status::Status;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::{SignedDuration, Timestamp};
use std::collections::{BTreeMap, HashSet};

/// The maximum number of earlier imports of the same export that are listed.
const MAX_DUPLICATES: usize = 10;

impl Tenure {
    /// Exports a session with its log.
    pub async fn export(&self, principal: &Principal, id: &SessionId) -> Result<Export> {
        let head = self.get_live_head(principal, id).await?;
        let log: Vec<Record> = self.engine.log(&head).await?.into_iter().flatten().collect();
        let session = Session::replay(&head.key(), log.iter().cloned());
        let session = session.ok_or_else(|| {
            Error::corrupt(format!("session {}", head.key()), "its log does not begin with `created`")
        })?;
        let mut blobs = BTreeMap::new();
        for id in log::media_outside_messages(&log, &session) {
            let missing = || Error::corrupt(format!("blob {id}"), "the blob is missing");
            let bytes = self.store().blob(&head.tenant, &id).await?.ok_or_else(missing)?;
            blobs.insert(id, STANDARD.encode(bytes));
        }
        let metadata = session.head().info.metadata.clone();
        let readable = Export::from(self.engine.attach(session).await?);
        let log = log.into_iter().map(log::to_exported).collect();
        Ok(Export { metadata, log, blobs, ..readable })
    }

    /// Lists the sessions of the principal that the same export was imported to before, newest
    /// first, at most ten.
    pub async fn find_earlier_imports(&self, principal: &Principal, export: &Export) -> Result<Vec<SessionId>> {
        self.engine.ensure_assistants_loaded(&principal.tenant).await?;
        let mut query = SessionQuery::new(OwnerFilter::Tenant(principal.tenant.clone()), MAX_DUPLICATES);
        query.origin = Some(export_hash(&normalize(export.clone())));
        self.engine.restrict_query(principal, &mut query)?;
        let heads = self.store().heads(&query).await?;
        Ok(heads.into_iter().map(|h| h.info.session_id).collect())
    }

    /// Imports a session under an id, in one atomic commit. If the id is unused, the session is
    /// created with the export's log. An existing session is replaced: its messages are discarded
    /// by a rewind, not destroyed (D-093), and it gets the export's messages, checkpoints and info,
    /// but keeps its own log. With `if_match`, only a session whose log ends there is replaced;
    /// otherwise it is a conflict.
    pub async fn import(
        &self,
        principal: &Principal,
        id: &SessionId,
        export: Export,
        if_match: Option<Seq>,
    ) -> Result<Head> {
        self.engine.ensure_assistants_loaded(&principal.tenant).await?;
        let export = normalize(export);
        let (entries, blobs) = self.prepare(principal, &export)?;
        for _ in 0..=self.limits().max_retries {
            let replaced = self.write_session(principal, id, |session, now| {
                check_if_match(session.head(), if_match)?;
                if session.head().status == Status::Deleted {
                    return Err(Error::Gone { session_id: id.clone(), status: Status::Deleted.as_str() });
                }
                let mut all = Vec::new();
                if session.head().status != Status::Active {
                    all.push(Entry::Status { to: Status::Active, reason: Some("imported".to_owned()), until: None });
                }
                if !session.messages.is_empty() || !session.checkpoints.is_empty() {
                    // To the very beginning: checkpoints before the first message are discarded too.
                    all.push(Entry::Rewound(RewindEntry { to: 0, digest: LogDigest::default() }));
                }
                all.push(Entry::info(replacement(&session.head().info.metadata, &export)));
                all.extend(entries.iter().cloned());
                let mut after = session.head().clone();
                for (seq, entry) in (after.seq + 1..).zip(&all) {
                    after.apply(&Record { seq, at: now, entry: entry.clone() });
                }
                let mut draft = PendingCommit::new(all, after);
                draft.blobs = blobs.clone();
                Ok(draft)
            });
            match replaced.await {
                Err(Error::NotFound { .. }) => {}
                result => return result,
            }
            if let Some(expected) = if_match {
                return Err(Error::Conflict { session_id: id.clone(), expected });
            }
            match self.begin_import(principal, id, &export, &entries, blobs.clone()).await {
                // The session was created concurrently, or belongs to another user: the head check
                // distinguishes the two.
                Err(Error::Exists { session_id }) => {
                    self.head(principal, &session_id).await.map_err(|_| Error::Exists { session_id })?;
                }
                result => return result,
            }
        }
        Err(Error::Conflict { session_id: id.clone(), expected: 0 })
    }

    /// Imports a session under an unused id. If the id is in use, it is [`Error::Exists`].
    pub async fn import_new(&self, principal: &Principal, id: &SessionId, export: &Export) -> Result<Head> {
        self.engine.ensure_assistants_loaded(&principal.tenant).await?;
        let export = normalize(export.clone());
        let (entries, blobs) = self.prepare(principal, &export)?;
        self.begin_import(principal, id, &export, &entries, blobs).await
    }

    /// Checks whether an export could be imported. Nothing is written.
    pub fn check_export(&self, principal: &Principal, export: &Export) -> Result<()> {
        self.prepare(principal, &normalize(export.clone())).map(drop)
    }

    /// Validates an export. Returns the entries and blobs for an import without the log.
    fn prepare(&self, principal: &Principal, export: &Export) -> Result<(Vec<Entry>, Vec<Blob>)> {
        if export.message_times.len() > export.messages.len() {
            return Err(Error::invalid("message_times", "there are more times than messages"));
        }
        if export.tenure > EXPORT_FORMAT {
            let location = "the export".to_owned();
            return Err(Error::NewerFormat { location, version: export.tenure, supported: EXPORT_FORMAT });
        }
        let mut info = session_created(principal, export);
        if !export.log.is_empty() {
            // The decisions are compared with those in the log instead.
            info.metadata.remove(DECISIONS);
            let id = export.session_id.clone().unwrap_or_else(SessionId::generate);
            self.rebuild(principal, &id, export, self.origin(export), self.now())?;
        }
        self.engine.check_info(&info)?;
        let (stored, blobs) = self.engine.detach(&export.messages)?;
        Ok((import_entries(export, &stored)?, blobs))
    }

    /// Creates the session of an import.
    async fn begin_import(
        &self,
        principal: &Principal,
        id: &SessionId,
        export: &Export,
        entries: &[Entry],
        blobs: Vec<Blob>,
    ) -> Result<Head> {
        let now = self.now();
        let mut origin = self.origin(export);
        let (mut records, blobs) = if export.log.is_empty() {
            origin.upto = 1 + entries.len() as Seq;
            let created = Entry::created(SessionCreated { origin: Some(origin), ..session_created(principal, export) });
            (self.timed_records(principal, id, export, created, entries), blobs)
        } else {
            self.rebuild(principal, id, export, origin, now)?
        };
        self.engine.reserve_session(principal, records.iter()).await?;
        let more = records.split_off(1);
        self.begin_session(&principal.key(id), &records[0], more, blobs).await
    }

    /// The records of an import without the log. Messages get the time that the source has for them; times never
    /// decrease and are not in the future. A session whose last activity is too long ago is restored, as one that is
    /// imported with its log.
    fn timed_records(
        &self,
        principal: &Principal,
        id: &SessionId,
        export: &Export,
        created: Entry,
        entries: &[Entry],
    ) -> Vec<Record> {
        let now = self.now();
        let first_message = export.message_times.iter().flatten().min();
        let begin = export.created_at.into_iter().chain(first_message.copied()).min().unwrap_or(now).min(now);
        let mut at = log::unique_creation_time(begin, now);
        // The first message may have the same time, and must not be earlier than the session.
        if at > begin {
            at = at.saturating_sub(SignedDuration::from_millis(1)).unwrap_or(begin);
        }
        let mut records = vec![Record { seq: 1, at, entry: created }];
        let mut message_times = export.message_times.iter().copied();
        let has_times = first_message.is_some();
        for entry in entries {
            let original = match entry {
                Entry::Message(_) => message_times.next().flatten(),
                _ => None,
            };
            // Without any times, the messages were stored now. After a time, those without one follow it directly.
            let original = original.and_then(|at| Timestamp::from_microsecond(at.as_microsecond()).ok());
            at = original.unwrap_or(if has_times { at } else { now }).max(at).min(now.max(at));
            records.push(Record { seq: records.len() as Seq + 1, at, entry: entry.clone() });
        }
        let session = Session::replay(&principal.key(id), records.iter().cloned());
        if session.is_some_and(|session| !self.engine.status_of(session.head()).is_live()) {
            let restored = Entry::Status { to: Status::Active, reason: Some("imported".to_owned()), until: None };
            for entry in [Entry::Status { to: Status::Expired, reason: None, until: None }, restored] {
                records.push(Record { seq: records.len() as Seq + 1, at: now, entry });
            }
        }
        records
    }

    /// The origin of an imported session.
    fn origin(&self, export: &Export) -> Origin {
        Origin { export: export_hash(export), at: self.now(), upto: 0 }
    }
}

/// The hash by which an export is recognized.
fn export_hash(export: &Export) -> String {
    let mut hash = blake3::Hasher::new();
    // Writing into a hash cannot fail, and an export has only string keys.
    let _ = serde_json::to_writer(&mut hash, export);
    hash.finalize().to_hex().to_string()
}

/// Removes the review decisions from an export of version 1, which has no log that proves them.
fn normalize(mut export: Export) -> Export {
    if export.tenure == 1 {
        export.metadata.remove(DECISIONS);
    }
    export
}

/// The entry that creates the session of an import without the log.
fn session_created(principal: &Principal, export: &Export) -> SessionCreated {
    let Export { assistant, thread, model, title, tags, metadata, .. } = export.clone();
    SessionCreated {
        user: principal.user.clone(),
        assistant,
        thread,
        model,
        title,
        tags,
        metadata,
        ..SessionCreated::default()
    }
}

/// Converts messages and checkpoints to entries, in log order.
pub(crate) fn import_entries(export: &Export, stored: &[Message]) -> Result<Vec<Entry>> {
    let mut entries = Vec::with_capacity(stored.len() + export.checkpoints.len());
    if let Some(i) = export.checkpoints.iter().position(|c| c.position > stored.len()) {
        return Err(Error::invalid(
            format!("checkpoints[{i}].position"),
            "the position is greater than the number of messages",
        ));
    }
    // The sort is stable, so that checkpoints at one position keep their order.
    let mut checkpoints: Vec<&ExportedCheckpoint> = export.checkpoints.iter().collect();
    checkpoints.sort_by_key(|c| c.position);
    let mut checkpoints = checkpoints.into_iter().peekable();
    let instruction_positions: HashSet<usize> = export.instruction_positions.iter().copied().collect();
    for position in 0..=stored.len() {
        while let Some(c) = checkpoints.next_if(|c| c.position == position) {
            let entry =
                CheckpointEntry { label: c.label.clone(), auto: c.auto, run: None, step: None, state: c.state.clone() };
            entries.push(Entry::Checkpoint(entry));
        }
        if let Some(message) = stored.get(position) {
            let replaces_instructions = instruction_positions.contains(&position);
            entries.push(Entry::Message(MessageEntry { replaces_instructions, ..MessageEntry::from(message.clone()) }));
        }
    }
    Ok(entries)
}
